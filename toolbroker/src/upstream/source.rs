//! What tools come from, as the operator says it.

use crate::endpoint::Endpoint;
use crate::openapi::Plan;
use crate::secret::Secret;
use crate::stranger::Program;

/// One tool server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// What it is.
    pub source: Source,
    /// Values to be removed from whatever it says.
    pub scrub: Vec<Secret>,
}

/// What tools come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A program that speaks MCP on its standard streams.
    Stdio(Program),
    /// An MCP server over HTTP.
    Http(Endpoint),
    /// An HTTP interface with an OpenAPI document.
    OpenApi(Plan),
}
