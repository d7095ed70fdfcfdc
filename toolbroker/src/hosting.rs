//! Callers that host tools for one run each, and the links to them.
//!
//! A supervisor registers a caller's tools with a socket of their own, opens a
//! run that names them, and relays what comes on the socket to the caller.
//! The caller is a stranger: an answer that is none settles its call as
//! failed, and a link that breaks leaves the outcome of what is out unknown.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use forge_protocol::broker::{HostedTool, HostedTools};
use forge_protocol::codec;
use forge_protocol::frame::{self, Kind};
use forge_protocol::service::{Callback as CallbackFrame, CallbackSettled};
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};

use crate::definition::Listed;
use crate::link::{self, LinkError};
use crate::locks::lock;
use crate::upstream::hosted::{Callback, HostError, Hosted};

/// Callers that are registered and whose run is not open yet.
const UNCLAIMED_MAX: usize = 1024;

/// Why a caller cannot host its tools.
#[derive(Debug, thiserror::Error)]
pub enum HostingError {
    /// The tools are none.
    #[error("{0}")]
    Host(#[from] HostError),
    /// The name is a configured server's.
    #[error("{server:?} is a configured server: give the caller's tools another server name")]
    Configured {
        /// The name.
        server: String,
    },
    /// A schema is no JSON object.
    #[error("the tool {tool:?}: {what} cannot be read as a JSON object: {why}")]
    Schema {
        /// The tool.
        tool: String,
        /// Which schema.
        what: &'static str,
        /// Why not.
        why: serde_json::Error,
    },
    /// Too many are registered whose runs are not open.
    #[error("{UNCLAIMED_MAX} callers host tools for runs that are not open yet")]
    TooMany,
    /// Nobody hosts these.
    #[error("no caller hosts these tools any more")]
    Gone,
}

/// Callers whose run is not open yet.
#[derive(Debug, Default)]
pub struct Hosting {
    unclaimed: Mutex<Unclaimed>,
}

#[derive(Debug, Default)]
struct Unclaimed {
    next: u64,
    hosts: HashMap<u64, Hosted>,
}

type Answer = oneshot::Sender<Result<Vec<u8>, Vec<u8>>>;

impl Hosting {
    fn unclaimed(&self) -> MutexGuard<'_, Unclaimed> {
        lock(&self.unclaimed)
    }

    /// Registers a caller's tools, which it serves on this link.
    ///
    /// # Errors
    /// [`HostingError`].
    pub fn host(
        self: &Arc<Self>,
        tools: HostedTools,
        stream: UnixStream,
    ) -> Result<u64, HostingError> {
        let HostedTools { server, tools } = tools;
        let listed = tools.into_iter().map(listed).collect::<Result<Vec<_>, _>>()?;
        let (hosted, calls) = Hosted::new(&server, listed)?;
        let host = {
            let mut unclaimed = self.unclaimed();
            if unclaimed.hosts.len() >= UNCLAIMED_MAX {
                return Err(HostingError::TooMany);
            }
            let host = unclaimed.next;
            unclaimed.next += 1;
            unclaimed.hosts.insert(host, hosted);
            host
        };
        let this = Arc::clone(self);
        tokio::spawn(async move {
            if let Err(error) = serve(stream, calls).await {
                tracing::debug!(error = ?error.to_string(), "a caller's link was dropped");
            }
            this.unclaimed().hosts.remove(&host);
        });
        Ok(host)
    }

    /// The caller's tools for its run.
    ///
    /// # Errors
    /// [`HostingError::Gone`].
    pub fn claim(&self, host: u64) -> Result<Hosted, HostingError> {
        self.unclaimed().hosts.remove(&host).ok_or(HostingError::Gone)
    }
}

fn listed(tool: HostedTool) -> Result<Listed, HostingError> {
    let HostedTool { name, description, input_schema, output_schema } = tool;
    let schema = |what, text: &str| {
        forge_protocol::json::from_slice(text.as_bytes()).map_err(|why| HostingError::Schema {
            tool: crate::cut(&name, 128),
            what,
            why,
        })
    };
    let input_schema = schema("its input schema", &input_schema)?;
    let output_schema = output_schema.map(|text| schema("its output schema", &text)).transpose()?;
    Ok(Listed { name, description: Some(description), input_schema, output_schema })
}

/// Sends calls to the caller and takes its answers, until the run is over or
/// the caller leaves.
async fn serve(stream: UnixStream, mut calls: mpsc::Receiver<Callback>) -> Result<(), LinkError> {
    let (mut receiver, mut sender) = link::split_plain(stream);
    let awaits = |kind: Kind| (kind == Kind::CallbackSettled).then(|| kind.payload_bytes_max());
    let mut out: HashMap<u32, Answer> = HashMap::new();
    let mut next = 0;
    loop {
        tokio::select! {
            sent = sender.go_on(), if sender.unsent() > 0 => sent?,
            call = calls.recv() => {
                let Some(Callback { tool, arguments, answer }) = call else { return Ok(()) };
                // Nobody waits any more for some of them.
                out.retain(|_, answer| !answer.is_closed());
                let arguments = Value::Object(arguments).to_string().into_bytes();
                // The service puts its client's number there, whatever its length.
                let mut callback =
                    CallbackFrame { number: u64::MAX, callback: next, tool, arguments };
                let mut bytes = Vec::new();
                let fits = frame::try_write_message(Kind::Callback, &callback, &mut bytes);
                bytes.clear();
                callback.number = 0;
                if fits
                    .and_then(|()| frame::try_write_message(Kind::Callback, &callback, &mut bytes))
                    .is_err()
                {
                    let why = "the arguments are too large as they are sent";
                    let error = json!({ "name": "BadCaller", "message": why });
                    let _ = answer.send(Err(error.to_string().into_bytes()));
                    continue;
                }
                out.insert(next, answer);
                next = next.wrapping_add(1);
                sender.send(bytes)?;
            }
            received = receiver.receive(awaits) => {
                let Some(frame) = received? else { return Ok(()) };
                let CallbackSettled { callback, result, .. } = codec::decode(&frame.payload)
                    .map_err(|error| LinkError::Payload { kind: frame.kind, error })?;
                // One that is not out was given up, or never was.
                if let Some(answer) = out.remove(&callback) {
                    // As it came: its call reads it, and no other link waits.
                    let _ = answer.send(result);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn tools() -> HostedTools {
        HostedTools { server: "app".into(), tools: Vec::new() }
    }

    /// Registers a caller, and gives its end of the link.
    fn caller(hosting: &Arc<Hosting>) -> Result<(u64, UnixStream), HostingError> {
        let (link, theirs) = UnixStream::pair().unwrap();
        Ok((hosting.host(tools(), theirs)?, link))
    }

    /// Waits until so many are registered.
    async fn are_left(hosting: &Hosting, left: usize) {
        let left = async {
            while hosting.unclaimed().hosts.len() != left {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), left).await.unwrap();
    }

    #[tokio::test]
    async fn callers_whose_runs_are_not_open_are_bounded_and_each_claim_makes_room() {
        let hosting = Arc::<Hosting>::default();
        for number in 1..UNCLAIMED_MAX as u64 {
            let (hosted, _) = Hosted::new("app", Vec::new()).unwrap();
            hosting.unclaimed().hosts.insert(u64::MAX - number, hosted);
        }
        let (last, link) = caller(&hosting).unwrap();
        for _ in 0..2 {
            assert!(matches!(caller(&hosting), Err(HostingError::TooMany)));
        }
        assert_eq!(hosting.unclaimed().hosts.len(), UNCLAIMED_MAX);
        let hosted = hosting.claim(last).unwrap();
        assert!(matches!(hosting.claim(last), Err(HostingError::Gone)), "it is claimed once");
        let (next, _next_link) = caller(&hosting).unwrap();
        assert_ne!(next, last);
        assert!(matches!(caller(&hosting), Err(HostingError::TooMany)));
        drop((hosted, link));
    }

    #[tokio::test]
    async fn an_answer_settles_its_own_call_in_whatever_order_they_come() {
        let (link, theirs) = UnixStream::pair().unwrap();
        let (calls, waiting) = mpsc::channel(8);
        tokio::spawn(serve(theirs, waiting));
        let mut answered = Vec::new();
        for number in 0..3 {
            let (answer, settled) = oneshot::channel();
            let tool = forge_protocol::name::ToolName::parse("app.twice").unwrap();
            let arguments = json!({ "n": number }).as_object().unwrap().clone();
            calls.send(Callback { tool, arguments, answer }).await.unwrap();
            answered.push(settled);
        }
        let (mut receiver, mut sender) = link::split_plain(link);
        let awaits = |kind: Kind| (kind == Kind::Callback).then(|| kind.payload_bytes_max());
        let mut asked = Vec::new();
        for _ in 0..3 {
            let frame = receiver.receive(awaits).await.unwrap().unwrap();
            let CallbackFrame { callback, arguments, .. } = codec::decode(&frame.payload).unwrap();
            asked.push((callback, arguments));
        }
        // One that is not out settles nothing.
        asked.insert(0, (u32::MAX, b"nobody's".to_vec()));
        let mut bytes = Vec::new();
        for (callback, arguments) in asked.into_iter().rev() {
            let settled = CallbackSettled { number: 0, callback, result: Ok(arguments) };
            frame::write_message(Kind::CallbackSettled, &settled, &mut bytes);
        }
        sender.send(bytes).unwrap();
        for (number, settled) in answered.into_iter().enumerate() {
            let settled = tokio::time::timeout(Duration::from_secs(10), settled).await.unwrap();
            assert_eq!(settled.unwrap(), Ok(json!({ "n": number }).to_string().into_bytes()));
        }
    }

    #[tokio::test]
    async fn a_caller_that_leaves_before_its_run_opens_is_forgotten() {
        let hosting = Arc::<Hosting>::default();
        let (stays, _link) = caller(&hosting).unwrap();
        let (leaves, link) = caller(&hosting).unwrap();
        drop(link);
        are_left(&hosting, 1).await;
        assert!(matches!(hosting.claim(leaves), Err(HostingError::Gone)));
        assert!(hosting.claim(stays).is_ok());
    }
}
