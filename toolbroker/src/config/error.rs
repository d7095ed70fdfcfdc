//! Why a configuration is refused: the file, the line, the field and what is wrong
//! with it, and never a value, which may be a credential in the wrong place.

use std::path::{Path, PathBuf};

use forge_document::{Lines, place};
use forge_protocol::name::NameError;

use super::read;
use crate::openapi::ApiError;
use crate::policy::PatternError;
use crate::secret::SecretError;

/// What is wrong with a server that two files configure.
const TWICE: &str = "another file configures a server of this name too: rename one";

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The file is no JSON or TOML.
    #[error("{}: {what}", place(file, Some(*line)))]
    Syntax {
        /// The file.
        file: PathBuf,
        /// The line, from 1.
        line: u32,
        /// What is wrong, without the line's text.
        what: String,
    },
    /// One field is wrong.
    #[error("{}: {field}: {problem}", place(file, *line))]
    Field {
        /// The file.
        file: PathBuf,
        /// The line, from 1, where it is known.
        line: Option<u32>,
        /// The field, as a path with dots.
        field: String,
        /// What is wrong with it.
        problem: Problem,
    },
    /// Two files configure the same server.
    #[error("{}: servers.{server}: {TWICE}", place(file, *line))]
    Twice {
        /// The second file.
        file: PathBuf,
        /// The line, from 1, where it is known.
        line: Option<u32>,
        /// The server.
        server: String,
    },
}

impl ConfigError {
    /// The file it is about.
    #[must_use]
    pub fn file(&self) -> &Path {
        match self {
            Self::Field { file, .. }
            | Self::Twice { file, .. }
            | Self::Read { file, .. }
            | Self::Syntax { file, .. } => file,
        }
    }

    /// The line there, from 1, if one is known.
    #[must_use]
    pub fn line(&self) -> Option<u32> {
        match self {
            Self::Field { line, .. } | Self::Twice { line, .. } => *line,
            Self::Syntax { line, .. } => Some(*line),
            Self::Read { .. } => None,
        }
    }

    /// The field, if it is one of a field, as a path with dots.
    #[must_use]
    pub fn field(&self) -> Option<String> {
        match self {
            Self::Field { field, .. } => Some(field.clone()),
            Self::Twice { server, .. } => Some(format!("servers.{server}")),
            Self::Read { .. } | Self::Syntax { .. } => None,
        }
    }

    /// What is wrong.
    #[must_use]
    pub fn problem(&self) -> String {
        match self {
            Self::Field { problem, .. } => problem.to_string(),
            Self::Twice { .. } => TWICE.into(),
            Self::Read { source, .. } => format!("cannot be read: {source}"),
            Self::Syntax { what, .. } => what.clone(),
        }
    }

    pub(super) fn of(file: &Path, field: String, problem: Problem) -> Self {
        Self::Field { file: file.to_owned(), line: None, field, problem }
    }

    /// Finds the line of what it is about, if it is of this file.
    fn find_line(&mut self, of: &Path, lines: &Lines<'_>) {
        match self {
            Self::Field { file, line, field, .. } if file == of => *line = lines.of_field(field),
            // Only servers of an `mcp.json` come after others.
            Self::Twice { file, line, server } if file == of => {
                *line = lines.of_field(&format!("mcpServers.{server}"));
            }
            _ => {}
        }
    }
}

/// Finds the lines of what is wrong with these files.
pub(super) fn find_lines(errors: &mut [ConfigError], files: [Option<&Path>; 2]) {
    if errors.is_empty() {
        return;
    }
    for file in files.into_iter().flatten() {
        // What is no file may not be there a second time.
        if let Some(text) = file.is_file().then(|| read(file).ok()).flatten() {
            let lines = Lines::of(&text);
            errors.iter_mut().for_each(|error| error.find_line(file, &lines));
        }
    }
}

/// What is wrong with one field.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// No such field.
    #[error("unknown field; known here are {known}")]
    Unknown {
        /// The known fields.
        known: String,
    },
    /// The field is needed.
    #[error("this field is missing")]
    Missing,
    /// The value has another type.
    #[error("expected {expected}, found {found}")]
    Type {
        /// What should be there.
        expected: &'static str,
        /// The type of what is there.
        found: &'static str,
    },
    /// The table's name cannot be a server's.
    #[error("a server name must be [a-z0-9_-]+: rename it")]
    ServerName,
    /// The name is one of the broker's own servers.
    #[error("this name is reserved for a built-in server: rename it")]
    Reserved,
    /// A transport that is none of MCP's two.
    #[error(
        "known transports are \"stdio\", \"http\" and \"streamable-http\" (the older HTTP+SSE is \
         not supported: give the server's streamable HTTP address)"
    )]
    Transport,
    /// A program and an address in one entry.
    #[error("a server is a program or an address, not both: keep `command` or `url`")]
    Mixed,
    /// Another program's name for a field.
    #[error("call this field `{name}`")]
    OtherName {
        /// The name here.
        name: &'static str,
    },
    /// Not one kind of server.
    #[error(
        "give exactly one of `command` (a program), `url` (an MCP server over HTTP) and `openapi` \
         (an HTTP interface with a document)"
    )]
    OneKind,
    /// No address.
    #[error("expected an http:// or https:// address with a host and without a fragment")]
    Url,
    /// A credential in an address.
    #[error("a user and password do not belong into an address: put them under `headers`")]
    UserInfo,
    /// Credentials would travel in the clear.
    #[error(
        "plain http to another host shows credentials and answers to everybody between: use \
         https, or set `allow_http = true` in forge.toml"
    )]
    PlainHttp,
    /// No name of a header.
    #[error("this cannot be the name of a header")]
    Header,
    /// A header that the protocol itself sets.
    #[error("this header is set by the broker itself: leave it out")]
    OwnHeader,
    /// No value of a header.
    #[error("the value has a line break or another character that no header can carry")]
    HeaderValue,
    /// Two sources for one header.
    #[error("the header Authorization is set under `headers` too: keep one")]
    TwoTokens,
    /// Two places where tokens come from.
    #[error("`token_url` says where tokens come from already: keep one")]
    TwoIssuers,
    /// The OpenAPI document is refused.
    #[error("{0}")]
    OpenApi(ApiError),
    /// The name of an environment variable is none.
    #[error("an environment variable's name is not empty and has no `=` and no NUL")]
    VariableName,
    /// A variable is used that is not set.
    #[error("${{{variable}}} is not set: set it, or give a default as ${{{variable}:-…}}")]
    Unset {
        /// The variable.
        variable: String,
    },
    /// `${` without an end, or with a name that is none.
    #[error("`${{` begins no variable here; write ${{NAME}} or ${{NAME:-default}}")]
    Expansion,
    /// Text that a command line cannot carry.
    #[error("must not be empty or hold a NUL byte")]
    Text,
    /// A variable is set both plainly and as a credential.
    #[error("is set under `env` and under `credentials`: keep one")]
    SetTwice,
    /// A parameter of the query is in the address and a credential.
    #[error("the address has this parameter in its query already: take it out there")]
    QueryTwice,
    /// A credential needs one source.
    #[error(
        "give exactly one source: {{ from_env = \"NAME\" }}, {{ file = \"path\" }}, \
         {{ age = \"path\", identity = \"path\" }} or {{ command = [\"program\", …] }}"
    )]
    Source,
    /// The key is no tool's name.
    #[error("this is no tool's name: {0}")]
    ToolName(NameError),
    /// The text names no tools.
    #[error("this names no tools; write shop.find, shop.*, shop.get_* or *: {0}")]
    ToolPattern(PatternError),
    /// No role has this name.
    #[error("no role has this name; known are {known}: add it as [roles.<name>]")]
    NoRole {
        /// The roles there are.
        known: String,
    },
    /// There are no roles.
    #[error("there are no roles: add this one as [roles.<name>]")]
    NoRoles,
    /// The value is none of those possible.
    #[error("must be one of {0}")]
    OneOf(&'static str),
    /// A built-in tool's effect is no matter of configuration.
    #[error("a built-in tool knows its own effect: leave this out")]
    BuiltInEffect,
    /// A number is 0, negative or no whole one.
    #[error("expected a whole number above 0")]
    Positive,
    /// No range of users.
    #[error("expected a range of user numbers above 0, as \"200000-200999\"")]
    Uids,
    /// A server is to be given everything.
    #[error("a server cannot be given the whole host: name the folders it needs")]
    WholeHost,
    /// The credential cannot be had.
    #[error("{0}")]
    Secret(SecretError),
    /// The value is not what it has to be; says what that is.
    #[error("{0}")]
    Value(String),
}
