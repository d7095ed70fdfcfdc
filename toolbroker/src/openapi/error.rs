//! Why a document, or an operation of it, is refused.

use std::path::PathBuf;

use crate::definition::DefinitionError;
use crate::definition::TOOLS_MAX;

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
    #[error("this is no OpenAPI 3.0 or 3.1 document{}", hint(.version.as_deref()))]
    Version {
        /// What it says that it is.
        version: Option<String>,
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
    #[error("the address of an interface has no query: a key goes under `credentials`")]
    BaseQuery,
}

fn hint(version: Option<&str>) -> String {
    match version {
        Some("2.0") => ": it is Swagger 2.0, convert it first".into(),
        Some(version) => format!(": it says that it is {version}"),
        None => String::new(),
    }
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
