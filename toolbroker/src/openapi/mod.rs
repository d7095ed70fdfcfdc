//! HTTP interfaces with an OpenAPI document (3.0 or 3.1, as JSON): each
//! operation is a tool.
//!
//! The document is text that somebody else wrote. It says which operations
//! there are and what they take, and nothing else: the address comes from the
//! configuration, credentials from there too, and a document's `servers` and
//! `security` are not followed. An operation that cannot be carried out
//! exactly as it is described is left out with a reason, or refused if the
//! configuration asks for it by name. What becomes of it
//! is in these files, in this order:
//!
//! | file | |
//! |---|---|
//! | `plan` | a document's operations, each a tool, and why not |
//! | `schema` | what they take, without references |
//! | `parameter`, `body`, `form`, `template` | what an argument is written as, and where |
//! | `name`, `media` | names and media types as servers read them |
//! | `response` | how answers are described |
//! | `request` | a call becomes a request, which `upstream` sends |
//! | `error` | why not |
//!
//! The tool's name is the operation's `operationId`, or else its method and
//! path, as in `get_pets_id`. Its arguments are one object: each parameter
//! under its name (`query_id` where a path has an `id` too), the body under
//! `body`.
//!
//! Deliberately absent are YAML, parameters that are cookies, bodies other than
//! JSON and plain forms, callbacks, and that an answer is held against its schema.

mod body;
mod error;
mod form;
mod media;
mod name;
mod parameter;
mod plan;
mod request;
mod response;
mod schema;
mod template;

pub use error::{ApiError, Refusal};
pub(crate) use media::Kind;
pub(crate) use plan::Operation;
pub use plan::Plan;
pub(crate) use request::Request;

#[cfg(test)]
pub(crate) fn tests_endpoint() -> crate::endpoint::Endpoint {
    let url = reqwest::Url::parse("https://api.example/v1/").unwrap();
    crate::endpoint::Endpoint {
        url,
        headers: Vec::new(),
        query: Vec::new(),
        oauth: None,
        roots: Vec::new(),
    }
}
