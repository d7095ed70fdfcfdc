//! A large answer, as it came. Read, it takes many times its size, and time in which
//! nobody else is talked with: that waits until there is a turn for it
//! ([`crate::call`]).

use serde_json::Value;

use super::{Answer, CallEnd, hosted, mcp, openapi};

/// An answer of no more bytes is read at once.
pub(super) const SMALL_BYTES_MAX: usize = 32 * 1024;

/// An answer that is still to be read.
#[derive(Debug)]
pub enum Unread {
    /// Of an HTTP interface: JSON, as it said.
    Json(Vec<u8>),
    /// Of a caller that hosts its tools.
    Hosted(Vec<u8>),
    /// A result of MCP (`CallToolResult`).
    Result {
        /// The result.
        text: String,
        /// Whether the tool has a schema for what is structured.
        promised: bool,
    },
    /// What a resource of MCP has (`ReadResourceResult`).
    Resource {
        /// The result.
        text: String,
        /// The most that there may be in it, in bytes.
        bytes_max: usize,
    },
}

impl Unread {
    fn bytes(&self) -> usize {
        match self {
            Self::Json(text) | Self::Hosted(text) => text.len(),
            Self::Result { text, .. } | Self::Resource { text, .. } => text.len(),
        }
    }

    /// The end of its call, which is yet to be read if it is large.
    pub(super) fn answer(self) -> Answer {
        if self.bytes() <= SMALL_BYTES_MAX { self.read().into() } else { Answer::Unread(self) }
    }

    /// The end of its call.
    pub(crate) fn read(self) -> CallEnd {
        match self {
            Self::Json(text) => openapi::read(&text),
            Self::Hosted(text) => hosted::read(&text),
            Self::Result { text, promised } => {
                let result = forge_protocol::json::from_slice_mended::<Value>(text.as_bytes());
                mcp::read(result.ok(), promised)
            }
            Self::Resource { text, bytes_max } => {
                let result = forge_protocol::json::from_slice_mended::<Value>(text.as_bytes());
                mcp::contents(result.ok(), bytes_max)
            }
        }
    }
}
