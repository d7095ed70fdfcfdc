//! HTTP interfaces with an OpenAPI document (3.0 or 3.1, as JSON): each
//! operation is a tool.
//!
//! The document is text that somebody else wrote. It says which operations
//! there are and what they take, and nothing else: the address comes from the
//! configuration, credentials from there too, and a document's `servers` and
//! `security` are not followed. An operation that cannot be carried out
//! exactly as it is described is left out with a reason, or refused if the
//! configuration asks for it by name. See [`schema`] for what becomes of its
//! schemas and [`request`] for how a call becomes a request.
//!
//! The tool's name is the operation's `operationId`, or else its method and
//! path, as in `get_pets_id`. Its arguments are one object: each parameter
//! under its name (`query_id` where a path has an `id` too), the body under
//! `body`.
//!
//! Deliberately absent are YAML, cookies, bodies other than JSON, callbacks,
//! and the schemas of responses.

mod request;
mod schema;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forge_protocol::limits::RESPONSE_BYTES_MAX;
use reqwest::header::{CONTENT_ENCODING, CONTENT_TYPE};
use reqwest::{Method, StatusCode};
use rmcp::model::JsonObject;
use serde_json::{Map, Value, json};

use self::request::{Body, Parameter, Path as Template, Request};
use self::schema::Resolver;
use crate::config::Endpoint;
use crate::definition::{DefinitionError, Listed, Tool};
use crate::upstream::http::{BodyError, Client, body_within, retry_after};
use crate::upstream::scrubs::Scrubs;
use crate::upstream::{Breaker, CallEnd, TOOLS_MAX, Unusable, has_few_values};

/// A larger document is a wrong file.
const DOCUMENT_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// An operation's description, in bytes.
const DESCRIPTION_BYTES_MAX: usize = 8 * 1024;
/// What is read of an answer that is an error, in bytes.
const ERROR_BODY_BYTES_MAX: usize = 64 * 1024;
/// What a path item may hold beside operations.
const METHODS: [(&str, Method); 8] = [
    ("get", Method::GET),
    ("put", Method::PUT),
    ("post", Method::POST),
    ("delete", Method::DELETE),
    ("options", Method::OPTIONS),
    ("head", Method::HEAD),
    ("patch", Method::PATCH),
    ("trace", Method::TRACE),
];

/// Why a document is refused.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// It cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// It is no JSON.
    #[error(
        "{} is not JSON (line {line}); YAML is not read: convert it, for example with `yq -o json`",
        file.display()
    )]
    NotJson {
        /// The file.
        file: PathBuf,
        /// Where, from 1.
        line: usize,
    },
    /// It is something else.
    #[error("this is no OpenAPI 3.0 or 3.1 document{}", hint(*.is_swagger))]
    Version {
        /// Whether it is the version before.
        is_swagger: bool,
    },
    /// It has no operations.
    #[error("the document has no operation that can be a tool")]
    Empty,
    /// It has too many.
    #[error("{got} operations are too many, at most {TOOLS_MAX}: choose some with `include`")]
    TooMany {
        /// How many.
        got: usize,
    },
    /// Its schemas are too large, all together.
    #[error("the schemas are too large together: choose some operations with `include`")]
    TooLarge,
    /// An operation is asked for that is not there.
    #[error("the document has no operation {name:?}: give an operationId, or \"GET /path\"")]
    NoOperation {
        /// What was asked for.
        name: String,
    },
    /// An operation is asked for that cannot be a tool.
    #[error("{operation} cannot be a tool: {why}")]
    Operation {
        /// Method and path.
        operation: String,
        /// Why not.
        why: Refusal,
    },
    /// The address has what a base cannot have.
    #[error("the address of an interface has no query")]
    BaseQuery,
}

fn hint(is_swagger: bool) -> &'static str {
    if is_swagger { ": it is Swagger 2.0, convert it first" } else { "" }
}

impl ApiError {
    /// The field of the configuration that it is about.
    #[must_use]
    pub fn field(&self) -> &'static str {
        match self {
            Self::NoOperation { .. } | Self::Operation { .. } => "include",
            Self::BaseQuery => "base_url",
            Self::Read { .. }
            | Self::NotJson { .. }
            | Self::Version { .. }
            | Self::Empty
            | Self::TooMany { .. }
            | Self::TooLarge => "openapi",
        }
    }
}

/// Why an operation cannot be a tool.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// A part of the document is not what the standard says.
    #[error("{0} is not what OpenAPI says it is")]
    Malformed(&'static str),
    /// A reference out of the document.
    #[error("it refers to {0:?}, which is not in this document")]
    Remote(String),
    /// A reference to nothing.
    #[error("it refers to {0:?}, which is not there")]
    Dangling(String),
    /// A reference to what it is part of.
    #[error("{0:?} refers to itself")]
    Cycle(String),
    /// A schema that is too deep or too large.
    #[error("its schemas are too large or too deep")]
    TooLarge,
    /// All schemas of the document together are.
    #[error("the document's schemas are too large together")]
    Spent,
    /// Something that is not carried out here.
    #[error("{0}")]
    Unsupported(String),
    /// It makes no tool.
    #[error("{0}")]
    Definition(DefinitionError),
    /// Another one has its name.
    #[error("another operation is a tool of the same name: give it another operationId")]
    Twice,
}

/// The operations of a document that are tools.
#[derive(Clone, Debug)]
pub struct Plan {
    endpoint: Endpoint,
    operations: Vec<Arc<Operation>>,
}

#[derive(Debug)]
struct Operation {
    tool: Arc<Tool>,
    request: Request,
}

impl Plan {
    /// Reads a document. Of its operations those in `include` are taken, each
    /// by operationId or as `GET /path`, or all.
    ///
    /// # Errors
    /// [`ApiError`].
    pub fn read(
        server: &str,
        file: &Path,
        include: Option<&[String]>,
        endpoint: Endpoint,
    ) -> Result<Self, ApiError> {
        let unreadable = |source| ApiError::Read { file: file.to_owned(), source };
        let mut text = String::new();
        File::open(file)
            .and_then(|opened| opened.take(DOCUMENT_BYTES_MAX + 1).read_to_string(&mut text))
            .map_err(unreadable)?;
        if text.len() as u64 > DOCUMENT_BYTES_MAX {
            let why = format!("it has more than {DOCUMENT_BYTES_MAX} bytes");
            return Err(unreadable(std::io::Error::other(why)));
        }
        let document = serde_json::from_str(&text)
            .map_err(|error| ApiError::NotJson { file: file.to_owned(), line: error.line() })?;
        Self::of(server, &document, include, endpoint)
    }

    /// As [`Plan::read`], of a document that was read.
    ///
    /// # Errors
    /// [`ApiError`].
    pub fn of(
        server: &str,
        document: &Value,
        include: Option<&[String]>,
        endpoint: Endpoint,
    ) -> Result<Self, ApiError> {
        if endpoint.url.query().is_some() {
            return Err(ApiError::BaseQuery);
        }
        let version = document.get("openapi").and_then(Value::as_str).unwrap_or_default();
        let is_3_0 = version.starts_with("3.0");
        if !is_3_0 && !version.starts_with("3.1") {
            return Err(ApiError::Version { is_swagger: document.get("swagger").is_some() });
        }
        let mut listed = listed(document);
        if let Some(include) = include {
            let missing = include.iter().find(|name| !listed.iter().any(|it| it.is(name)));
            if let Some(name) = missing {
                return Err(ApiError::NoOperation { name: crate::cut(name, 128) });
            }
            listed.retain(|it| include.iter().any(|name| it.is(name)));
        }
        if listed.len() > TOOLS_MAX {
            return Err(ApiError::TooMany { got: listed.len() });
        }
        let mut resolver = Resolver::new(document, is_3_0);
        let mut operations: BTreeMap<String, Arc<Operation>> = BTreeMap::new();
        for it in listed {
            let made = it.compile(server, &endpoint, &mut resolver);
            let made = made.and_then(|made| match operations.contains_key(&it.name()) {
                false => Ok(made),
                true => Err(Refusal::Twice),
            });
            match made {
                Ok(made) => {
                    operations.insert(it.name(), Arc::new(made));
                }
                Err(Refusal::Spent) => return Err(ApiError::TooLarge),
                Err(why) if include.is_some() => {
                    return Err(ApiError::Operation { operation: it.shown(), why });
                }
                Err(why) => {
                    let (operation, why) = (it.shown(), why.to_string());
                    tracing::warn!(server, ?operation, ?why, "operation left out");
                }
            }
        }
        if operations.is_empty() {
            return Err(ApiError::Empty);
        }
        let mut operations: Vec<Arc<Operation>> = operations.into_values().collect();
        operations.sort_by(|a, b| a.tool.name().cmp(b.tool.name()));
        Ok(Self { endpoint, operations })
    }
}

/// An operation as it stands in the document.
struct Entry<'a> {
    path: &'a str,
    method: Method,
    item: &'a Map<String, Value>,
    operation: &'a Map<String, Value>,
}

/// All operations, in the order of the document's paths.
fn listed(document: &Value) -> Vec<Entry<'_>> {
    let mut listed = Vec::new();
    let paths = document.get("paths").and_then(Value::as_object);
    for (path, item) in paths.into_iter().flatten() {
        let Some(item) = item.as_object() else { continue };
        for (key, method) in METHODS {
            if let Some(operation) = item.get(key).and_then(Value::as_object) {
                listed.push(Entry { path, method, item, operation });
            }
        }
    }
    listed
}

impl<'a> Entry<'a> {
    fn text(&self, key: &str) -> Option<&str> {
        self.operation.get(key).and_then(Value::as_str).filter(|text| !text.is_empty())
    }

    /// Method and path.
    fn shown(&self) -> String {
        crate::cut(&format!("{} {}", self.method, self.path), 256)
    }

    fn is(&self, name: &str) -> bool {
        self.text("operationId") == Some(name)
            || name.split_once(' ').is_some_and(|(method, path)| {
                method.eq_ignore_ascii_case(self.method.as_str()) && path == self.path
            })
    }

    /// The tool's own name.
    fn name(&self) -> String {
        if let Some(id) = self.text("operationId") {
            return id.to_owned();
        }
        let mut name = self.method.as_str().to_ascii_lowercase();
        for word in self.path.split(|c: char| !c.is_ascii_alphanumeric()) {
            if !word.is_empty() {
                name.push('_');
                name.push_str(word);
            }
        }
        name
    }

    /// What it is for, and, as advice to whoever decides on its effect, what
    /// its method says.
    fn description(&self) -> String {
        let mut description = String::new();
        for key in ["summary", "description"] {
            if let Some(text) = self.text(key) {
                description.push_str(text.trim());
                description.push_str("\n\n");
            }
        }
        let mut description = crate::cut(&description, DESCRIPTION_BYTES_MAX);
        description.push_str(&self.shown());
        if matches!(self.method, Method::GET | Method::HEAD) {
            description.push_str(" (by its method, it only reads)");
        }
        description
    }

    fn compile(
        &self,
        server: &str,
        endpoint: &Endpoint,
        resolver: &mut Resolver<'a>,
    ) -> Result<Operation, Refusal> {
        if self.item.contains_key("$ref") {
            return Err(Refusal::Unsupported("its path is a reference".into()));
        }
        let mut given: Vec<&'a Map<String, Value>> = Vec::new();
        for level in [self.operation, self.item] {
            let Some(list) = level.get("parameters") else { continue };
            let list = list.as_array().ok_or(Refusal::Malformed("`parameters`"))?;
            for parameter in list {
                let parameter = resolver.object(parameter)?;
                let id = |it: &Map<String, Value>| (it.get("name").cloned(), it.get("in").cloned());
                // An operation's own stand in for its path's.
                if !given.iter().any(|other| id(other) == id(parameter)) {
                    given.push(parameter);
                }
            }
        }
        let mut parameters = Vec::new();
        let mut schemas = Vec::new();
        for parameter in given {
            if let Some((parameter, schema)) = Parameter::read(parameter, endpoint, resolver)? {
                parameters.push(parameter);
                schemas.push(schema);
            }
        }
        let body = match self.operation.get("requestBody") {
            None => None,
            Some(body) => Body::read(resolver.object(body)?, resolver)?,
        };
        // A name that stands in several places gets its place in front.
        let names: Vec<String> = parameters.iter().map(|it: &Parameter| it.name.clone()).collect();
        for parameter in &mut parameters {
            let twice = names.iter().filter(|name| **name == parameter.name).count() > 1;
            if twice || parameter.name == "body" {
                parameter.key = format!("{}_{}", parameter.place.as_str(), parameter.name);
            }
        }
        let mut properties = Map::new();
        let mut required = Vec::new();
        for (parameter, schema) in parameters.iter().zip(schemas) {
            if properties.insert(parameter.key.clone(), schema).is_some() {
                let why = format!("two arguments would be called {:?}", parameter.key);
                return Err(Refusal::Unsupported(crate::cut(&why, 256)));
            }
            if parameter.required {
                required.push(Value::String(parameter.key.clone()));
            }
        }
        let body = body.map(|(body, schema)| {
            properties.insert("body".into(), schema);
            if body.required {
                required.push("body".into());
            }
            body
        });
        let input_schema = json!({
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": false,
        });
        let Value::Object(input_schema) = input_schema else {
            return Err(Refusal::Malformed("its schema"));
        };
        let listed = Listed {
            name: self.name(),
            description: Some(self.description()),
            input_schema,
            output_schema: None,
        };
        let tool = Arc::new(Tool::new(server, listed).map_err(Refusal::Definition)?);
        let path = Template::parse(self.path, &parameters)?;
        let request = Request::new(self.method.clone(), &endpoint.url, path, parameters, body)?;
        Ok(Operation { tool, request })
    }
}

/// An HTTP interface whose operations can be called.
#[derive(Debug)]
pub struct Api {
    operations: Vec<Arc<Operation>>,
    tools: Arc<Vec<Arc<Tool>>>,
    client: Client,
    scrubs: Arc<Scrubs>,
    breaker: Arc<Breaker>,
}

impl Api {
    pub(crate) fn new(
        plan: &Plan,
        scrubs: &Arc<Scrubs>,
        breaker: Arc<Breaker>,
    ) -> Result<Self, String> {
        let operations = plan.operations.clone();
        let tools = operations.iter().map(|it| Arc::clone(&it.tool)).collect();
        let client = Client::new(&plan.endpoint, scrubs, false)?;
        let scrubs = Arc::clone(scrubs);
        Ok(Self { operations, tools: Arc::new(tools), client, scrubs, breaker })
    }

    /// Its tools, by name.
    #[must_use]
    pub fn tools(&self) -> Arc<Vec<Arc<Tool>>> {
        Arc::clone(&self.tools)
    }

    /// Calls an operation. An answer that is no success is the tool's own
    /// error; one that does not come at all leaves the outcome unknown, unless
    /// the request was surely not sent.
    pub(crate) async fn call(&self, tool: &Tool, arguments: &JsonObject) -> CallEnd {
        let found = self.operations.binary_search_by(|it| it.tool.name().cmp(tool.name()));
        let Some(operation) = found.ok().and_then(|at| self.operations.get(at)) else {
            return CallEnd::failed("NoSuchTool", "the interface has no such operation");
        };
        let request = match operation.request.build(self.client.http(), arguments) {
            Ok(request) => request,
            Err(why) => return CallEnd::failed("BadArgument", &why),
        };
        let admission = match self.breaker.enter() {
            Ok(admission) => admission,
            Err(error) => return CallEnd::failed("Unavailable", &error.to_string()),
        };
        let response = match self.client.send(request).await {
            Ok(response) => response,
            Err(error) => {
                let why = self.scrubs.text(&error.to_string());
                admission.failed(why.clone());
                let unsent = error.is_unsent();
                return if unsent { CallEnd::failed("Unreachable", &why) } else { CallEnd::Lost };
            }
        };
        let status = response.status();
        let is_json = response
            .headers()
            .get(CONTENT_TYPE)
            .and_then(|value| value.to_str().ok())
            .is_some_and(request::is_json);
        // None was asked for.
        let encoding = response.headers().get(CONTENT_ENCODING);
        let is_encoded = encoding.is_some_and(|it| {
            let compressions = ["gzip", "x-gzip", "deflate", "compress", "br", "zstd"];
            compressions.iter().any(|known| it.as_bytes().eq_ignore_ascii_case(known.as_bytes()))
        });
        let limit =
            if status.is_success() { RESPONSE_BYTES_MAX as usize } else { ERROR_BODY_BYTES_MAX };
        let retry_after = retry_after(&response).filter(|_| !status.is_success());
        let body = body_within(response, limit).await;
        match (&body, status) {
            // Whoever stands before the server says that it is not there.
            (
                _,
                StatusCode::BAD_GATEWAY
                | StatusCode::SERVICE_UNAVAILABLE
                | StatusCode::GATEWAY_TIMEOUT,
            ) => admission.failed(format!("it answers {status}")),
            (Err(BodyError::Broken(why)), _) => admission.failed(why.clone()),
            _ => admission.answered(),
        }
        match body {
            Err(BodyError::Broken(_)) => CallEnd::Lost,
            Ok(body) if status.is_success() && is_encoded && !body.is_empty() => {
                CallEnd::Unusable(Unusable::Encoded)
            }
            Ok(body) if status.is_success() => {
                answer(body, is_json).map_or_else(CallEnd::Unusable, CallEnd::Answered)
            }
            Err(BodyError::TooLarge { limit }) if status.is_success() => CallEnd::Failed(json!({
                "name": "AnswerTooLarge",
                "message": format!(
                    "{} answered {status} with more than {limit} bytes: what it did stands, its \
                     answer is dropped",
                    operation.request
                ),
                "code": status.as_u16(),
            })),
            other => {
                let mut error =
                    error(&operation.request, status, other.unwrap_or_default(), is_json);
                if let Some(when) = retry_after {
                    error["retryAfter"] = when.into();
                }
                CallEnd::Failed(error)
            }
        }
    }
}

/// A successful answer: JSON as it is, text as a string, nothing as null.
/// Bytes that are no text lose what is none.
///
/// # Errors
/// Why nothing is made of what says that it is JSON.
fn answer(body: Vec<u8>, is_json: bool) -> Result<Value, Unusable> {
    if body.is_empty() {
        return Ok(Value::Null);
    }
    if !is_json {
        return Ok(text(&body));
    }
    if !has_few_values(&body) {
        return Err(Unusable::TooMany);
    }
    let body = body.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(&body);
    crate::json::from_slice(body).map_err(|_| Unusable::NoJson)
}

fn text(body: &[u8]) -> Value {
    String::from_utf8_lossy(body).into_owned().into()
}

/// An answer that is no success, as the tool's own error.
fn error(request: &Request, status: StatusCode, body: Vec<u8>, is_json: bool) -> Value {
    let (name, hint) = if status.is_redirection() {
        ("Redirect", "; no redirect is followed")
    } else {
        ("HttpError", "")
    };
    let mut error = json!({
        "name": name,
        "message": format!("{request} answered {status}{hint}"),
        "code": status.as_u16(),
    });
    if !body.is_empty() {
        // Whole, since what is cut through is not known as a credential.
        let is_json = is_json && !status.is_redirection();
        error["data"] = match has_few_values(&body) && is_json {
            true => crate::json::from_slice(&body).unwrap_or_else(|_| text(&body)),
            false if is_json => Value::Null,
            false => text(&body),
        };
    }
    error
}

#[cfg(test)]
fn tests_endpoint() -> Endpoint {
    let url = reqwest::Url::parse("https://api.example/v1/").unwrap();
    Endpoint { url, headers: Vec::new(), oauth: None }
}

#[cfg(test)]
mod tests {
    use super::tests_endpoint as endpoint;
    use super::*;

    fn plan(document: &Value, include: &[&str]) -> Result<Plan, ApiError> {
        let include: Vec<String> = include.iter().map(|&name| name.to_owned()).collect();
        let include = (!include.is_empty()).then_some(include.as_slice());
        Plan::of("shop", document, include, endpoint())
    }

    fn document(paths: Value) -> Value {
        json!({"openapi": "3.1.0", "info": {}, "paths": paths, "components": {"schemas": {
            "Part": {"type": "object", "properties": {"id": {"type": "integer", "readOnly": true},
                     "name": {"type": "string"}}, "required": ["id", "name"]},
            "Tree": {"type": "object", "properties": {"up": {"$ref": "#/components/schemas/Tree"}}},
        }}})
    }

    fn names(plan: &Plan) -> Vec<&str> {
        plan.operations.iter().map(|it| it.tool.name().as_str()).collect()
    }

    fn schema(plan: &Plan, at: usize) -> Value {
        serde_json::from_str(&plan.operations[at].tool.spec().input_schema).unwrap()
    }

    #[test]
    fn each_operation_is_a_tool_named_and_described_by_the_document() {
        let document = document(json!({
            "/parts/{id}": {
                "parameters": [{"name": "id", "in": "path", "required": true,
                                "schema": {"type": "integer"}}],
                "get": {"operationId": "getPart", "summary": "One part.", "parameters": [
                    {"name": "id", "in": "query", "schema": {"type": "string"}}]},
                "put": {"requestBody": {"required": true, "content": {"application/json": {
                    "schema": {"$ref": "#/components/schemas/Part"}}}}},
            },
        }));
        let plan = plan(&document, &[]).unwrap();
        assert_eq!(names(&plan), ["shop.getPart", "shop.put_parts_id"]);
        let get = schema(&plan, 0);
        assert_eq!(get["required"], json!(["path_id"]));
        assert_eq!(get["properties"]["query_id"]["type"], "string");
        assert_eq!(get["additionalProperties"], false);
        let description = &plan.operations[0].tool.spec().description;
        assert!(description.starts_with("One part.\n\nGET /parts/{id}"), "{description}");
        assert!(description.contains("only reads"), "{description}");
        assert!(!plan.operations[1].tool.spec().description.contains("only reads"));
        let body = &schema(&plan, 1)["properties"]["body"];
        assert_eq!(body["required"], json!(["name"]), "what only the server sets is not asked for");
        assert!(body["properties"].get("id").is_none());
    }

    #[test]
    fn include_chooses_by_id_and_by_method_and_path_and_refuses_what_is_not_there() {
        let document = document(json!({
            "/a": {"get": {"operationId": "a"}, "post": {}}, "/b": {"get": {"operationId": "b"}},
        }));
        assert_eq!(names(&plan(&document, &["a", "POST /a"]).unwrap()), ["shop.a", "shop.post_a"]);
        let refused = plan(&document, &["a", "c"]).unwrap_err();
        assert!(matches!(&refused, ApiError::NoOperation { name } if name == "c"), "{refused}");
        assert_eq!(refused.field(), "include");
    }

    #[test]
    fn references_that_are_remote_dangling_or_cyclic_are_refused_with_the_reason() {
        let with = |reference: &str| {
            document(json!({"/a": {"post": {"operationId": "a", "requestBody": {"content": {
                "application/json": {"schema": {"$ref": reference}}}}}}}))
        };
        for (reference, expected) in [
            ("https://evil.example/s.json", "not in this document"),
            ("other.json#/a", "not in this document"),
            ("#/components/schemas/None", "not there"),
            ("#/components/schemas/Tree", "refers to itself"),
        ] {
            let refused = plan(&with(reference), &["a"]).unwrap_err().to_string();
            assert!(refused.contains("POST /a") && refused.contains(expected), "{refused}");
            // Not asked for by name, it is left out, and nothing is left.
            assert!(matches!(plan(&with(reference), &[]), Err(ApiError::Empty)));
        }
    }

    #[test]
    fn what_cannot_be_carried_out_as_described_is_refused() {
        let parameter = |parameter: Value| {
            document(json!({"/a/{x}": {"get": {"operationId": "a", "parameters": [
                {"name": "x", "in": "path", "required": true, "schema": {}}, parameter]}}}))
        };
        let cases = [
            (
                parameter(json!({"name": "c", "in": "cookie", "required": true, "schema": {}})),
                "cookie",
            ),
            (
                parameter(json!({"name": "Host", "in": "header", "required": true, "schema": {}})),
                "Host",
            ),
            (
                parameter(json!({"name": "a b", "in": "header", "required": true, "schema": {}})),
                "header",
            ),
            (parameter(json!({"name": "y", "in": "path", "required": true, "schema": {}})), "path"),
            (parameter(json!({"name": "q", "in": "query", "style": "odd", "schema": {}})), "style"),
            (parameter(json!({"$ref": "#/components/parameters/None"})), "not there"),
            (document(json!({"/a/{x}": {"get": {"operationId": "a"}}})), "{x}"),
            (document(json!({"/a?x=1": {"get": {"operationId": "a"}}})), "path"),
            (document(json!({"/../a": {"get": {"operationId": "a"}}})), "path"),
            (document(json!({"//evil.example/a": {"get": {"operationId": "a"}}})), "path"),
            (
                document(
                    json!({"/a": {"post": {"operationId": "a", "requestBody": {"required": true,
                "content": {"multipart/form-data": {"schema": {}}}}}}}),
                ),
                "JSON",
            ),
            (
                document(
                    json!({"/a": {"post": {"operationId": "a", "requestBody": {"required": true,
                "content": {"application/json": {"schema": {"$dynamicRef": "#x"}}}}}}}),
                ),
                "$dynamicRef",
            ),
        ];
        for (document, expected) in cases {
            let refused = plan(&document, &["a"]).unwrap_err().to_string();
            assert!(refused.contains(expected), "{expected}: {refused}");
        }
    }

    #[test]
    fn a_schema_that_grows_without_end_is_refused_and_takes_no_memory() {
        // Each level refers to the one below ten times: 10^12 nodes.
        let mut schemas = Map::new();
        schemas.insert("L0".into(), json!({"type": "string"}));
        for level in 1..=12 {
            let below = json!({"$ref": format!("#/components/schemas/L{}", level - 1)});
            schemas.insert(format!("L{level}"), json!({"allOf": vec![below; 10]}));
        }
        let mut document = document(json!({"/a": {"post": {"operationId": "a", "requestBody": {
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/L12"}}}}}}}));
        document["components"]["schemas"] = Value::Object(schemas);
        let refused = plan(&document, &["a"]).unwrap_err();
        assert!(matches!(refused, ApiError::Operation { why: Refusal::TooLarge, .. }), "{refused}");
        let mut deep = json!({"type": "string"});
        for _ in 0..100 {
            deep = json!({"items": deep});
        }
        document["components"]["schemas"] = json!({"L12": deep});
        assert!(matches!(plan(&document, &["a"]), Err(ApiError::Operation { .. })));
    }

    #[test]
    fn documents_that_are_none_are_refused_with_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let read = |text: &str| {
            let file = folder.path().join("api");
            std::fs::write(&file, text).unwrap();
            Plan::read("shop", &file, None, endpoint()).unwrap_err().to_string()
        };
        assert!(read("openapi: 3.0.0\npaths: {}\n").contains("YAML"));
        assert!(read(r#"{"swagger": "2.0"}"#).contains("Swagger"));
        assert!(read(r#"{"openapi": "4.0.0"}"#).contains("3.0 or 3.1"));
        assert!(read(r#"{"openapi": "3.0.3", "paths": []}"#).contains("no operation"));
        let missing = Plan::read("shop", Path::new("/nonexistent/x.json"), None, endpoint());
        assert!(missing.unwrap_err().to_string().contains("/nonexistent/x.json"));
    }

    #[test]
    fn too_many_operations_are_refused_until_some_are_chosen() {
        let paths: Map<String, Value> =
            (0..=TOOLS_MAX).map(|at| (format!("/p{at}"), json!({"get": {}}))).collect();
        let document = document(Value::Object(paths));
        assert!(matches!(plan(&document, &[]), Err(ApiError::TooMany { got: 2_001 })));
        assert_eq!(names(&plan(&document, &["GET /p7"]).unwrap()), ["shop.get_p7"]);
    }

    #[test]
    fn two_operations_of_one_name_are_not_one_tool() {
        let document = document(json!({
            "/a": {"get": {"operationId": "same"}}, "/b": {"get": {"operationId": "same"}},
        }));
        assert!(matches!(
            plan(&document, &["same"]),
            Err(ApiError::Operation { why: Refusal::Twice, .. })
        ));
    }
}
