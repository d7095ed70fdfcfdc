//! Tools that a caller hosts itself: agent frameworks pass functions of their
//! own process as tools. The caller says what they are, and is called back
//! over its own connection when a program calls one.
//!
//! What is here is the broker's half: a [`Hosted`] takes calls that passed the
//! chain like any other, and hands each to whoever serves the connection as a
//! [`Callback`]. The caller is a stranger like any server: its schemas are
//! checked, its answers are bounded by the chain, and if it leaves in the
//! middle of a call, the outcome is unknown. Deliberately absent is the
//! connection itself, which belongs to a door.

use std::sync::Arc;

use forge_protocol::limits::GRANTED_TOOLS_MAX;
use forge_protocol::name::{RESERVED_SERVERS, ToolName, is_server_name};
use rmcp::model::JsonObject;
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use super::{Answer, CallEnd, Undone, Unread, Unusable, has_few_values};
use crate::definition::{CompiledRoom, DefinitionError, Listed, Tool};

/// Calls that may wait for the caller to take them.
const CALLS_WAITING_MAX: usize = 64;
/// What is compiled of one caller's tools may take so much, in bytes: there are
/// many callers, and each comes unasked.
const COMPILED_ROOM_BYTES: usize = 32 * 1024 * 1024;

/// A caller's tools.
#[derive(Debug)]
pub struct Hosted {
    tools: Arc<Vec<Arc<Tool>>>,
    calls: mpsc::Sender<Callback>,
}

/// One call for the caller to carry out. Dropped without an answer, its
/// outcome is unknown.
#[derive(Debug)]
pub struct Callback {
    /// Which of its tools.
    pub tool: ToolName,
    /// Arguments that fit the tool's schema.
    pub arguments: JsonObject,
    /// Where the answer goes: the result, or the tool's own error, an object,
    /// as JSON that nobody has looked at. It is closed when nobody waits any
    /// more.
    pub answer: oneshot::Sender<Result<Vec<u8>, Vec<u8>>>,
}

/// Why a caller cannot host what it wants to.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The name is no server's, or taken by the broker itself.
    #[error(
        "{server:?} cannot be the name of a caller's tools: it must be [a-z0-9_-]+ and not reserved"
    )]
    Server {
        /// The name.
        server: String,
    },
    /// Too many tools.
    #[error("a caller may host {GRANTED_TOOLS_MAX} tools, not {got}")]
    TooMany {
        /// How many.
        got: usize,
    },
    /// Two tools of one name.
    #[error("there are two tools {tool}")]
    Twice {
        /// The name.
        tool: ToolName,
    },
    /// One tool is no tool.
    #[error("the tool {tool:?} cannot be hosted: {source}")]
    Tool {
        /// Its name.
        tool: String,
        /// Why not.
        source: DefinitionError,
    },
}

impl Hosted {
    /// The tools of a caller, under the server name `server`, and the calls
    /// to be carried out by it.
    ///
    /// # Errors
    /// [`HostError`].
    pub fn new(
        server: &str,
        listed: Vec<Listed>,
    ) -> Result<(Self, mpsc::Receiver<Callback>), HostError> {
        if !is_server_name(server) || RESERVED_SERVERS.contains(&server) {
            return Err(HostError::Server { server: crate::cut(server, 128) });
        }
        // More could not be granted.
        if listed.len() > GRANTED_TOOLS_MAX {
            return Err(HostError::TooMany { got: listed.len() });
        }
        let mut room = CompiledRoom::new(COMPILED_ROOM_BYTES);
        let mut tools = Vec::with_capacity(listed.len());
        for listed in listed {
            let name = crate::cut(&listed.name, 128);
            let tool = Tool::within(&mut room, server, listed)
                .map_err(|source| HostError::Tool { tool: name, source })?;
            tools.push(Arc::new(tool));
        }
        tools.sort_by(|a, b| a.name().cmp(b.name()));
        if let Some(pair) = tools.windows(2).find(|pair| pair[0].name() == pair[1].name()) {
            return Err(HostError::Twice { tool: pair[0].name().clone() });
        }
        let (calls, callbacks) = mpsc::channel(CALLS_WAITING_MAX);
        Ok((Self { tools: Arc::new(tools), calls }, callbacks))
    }

    /// The tools, by name.
    #[must_use]
    pub fn tools(&self) -> Arc<Vec<Arc<Tool>>> {
        Arc::clone(&self.tools)
    }

    pub(super) async fn call(&self, tool: &Tool, arguments: JsonObject) -> Answer {
        let (answer, answered) = oneshot::channel();
        let callback = Callback { tool: tool.name().clone(), arguments, answer };
        if self.calls.send(callback).await.is_err() {
            return CallEnd::undone(Undone::Gone, "the caller that hosts this tool is gone").into();
        }
        let answered = tokio::select! {
            biased;
            answered = answered => answered.ok(),
            // What was put into the queue while that was taken away is never
            // dropped as long as there are senders (tokio's issue 7714).
            () = self.calls.closed() => None,
        };
        let end = match answered {
            Some(Ok(said) | Err(said)) if !has_few_values(&said) => {
                CallEnd::Unusable(Unusable::TooMany)
            }
            Some(Ok(result)) => return Unread::Hosted(result).answer(),
            Some(Err(error)) => match forge_protocol::json::from_slice_mended(&error) {
                Ok(error) => CallEnd::Failed(Value::Object(error)),
                Err(_) => CallEnd::failed("BadCaller", "the caller's error is no JSON object"),
            },
            None => CallEnd::Lost,
        };
        end.into()
    }
}

/// What a caller answered.
pub(super) fn read(result: &[u8]) -> CallEnd {
    match forge_protocol::json::from_slice_mended(result) {
        Ok(result) => CallEnd::Answered(result),
        Err(_) => CallEnd::failed("BadCaller", "the caller's answer is no JSON"),
    }
}
