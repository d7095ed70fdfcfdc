//! JSON-RPC in lines: the client started this process and holds both ends.
//!
//! rmcp's own transport for this takes any number of requests at once, says
//! nothing to a line that is no JSON, and lets what runs go on for seconds
//! after the client has left. This one answers every line that asks for an
//! answer, stops reading while the client does not read, and closes the door
//! when the client is gone.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rmcp::model::{
    ClientJsonRpcMessage, ClientNotification, ErrorCode, ErrorData, RequestId, ServerJsonRpcMessage,
};
use rmcp::service::ServerInitializeError;
use rmcp::transport::Transport;
use rmcp::{RoleServer, ServiceExt as _};
use serde::Deserialize;
use tokio::io::{
    AsyncBufRead, AsyncBufReadExt as _, AsyncRead, AsyncWrite, AsyncWriteExt as _, BufReader,
};

use super::{Door, MESSAGE_BYTES_MAX, REQUEST_BYTES_MAX, REQUESTS_MAX};

/// Serves one client until it closes `input` or stops taking `output`. What it
/// had running is cancelled by then.
///
/// # Errors
/// What the host said of `output`.
pub async fn serve(
    door: Door,
    input: impl AsyncRead + Send + Unpin + 'static,
    output: impl AsyncWrite + Send + Unpin + 'static,
) -> io::Result<()> {
    let lines = Lines {
        input: BufReader::new(input),
        line: Vec::new(),
        skipping: false,
        outlet: Arc::new(Outlet {
            output: tokio::sync::Mutex::new(output),
            open: Mutex::default(),
            door: door.clone(),
        }),
    };
    let outlet = Arc::clone(&lines.outlet);
    let lines = Arc::new(tokio::sync::Mutex::new(lines));
    let served = loop {
        let connection = Connection { lines: Arc::clone(&lines), outlet: Arc::clone(&outlet) };
        match door.clone().serve(connection).await {
            Ok(running) => {
                break running.waiting().await.map(drop).map_err(io::Error::other);
            }
            // Something else came first, or a version that is not spoken. The
            // client has been told and may try again.
            Err(
                ServerInitializeError::ExpectedInitializeRequest(Some(_))
                | ServerInitializeError::InitializeFailed(_),
            ) => {}
            Err(ServerInitializeError::TransportError { error, .. }) => {
                break Err(io::Error::other(error));
            }
            Err(_) => break Ok(()),
        }
    };
    door.close();
    served
}

/// The client's end of the conversation.
struct Lines<R, W> {
    input: BufReader<R>,
    /// What is there of the next line. Reading can be interrupted.
    line: Vec<u8>,
    /// The line is too long, and is left out to its end.
    skipping: bool,
    outlet: Arc<Outlet<W>>,
}

struct Outlet<W> {
    output: tokio::sync::Mutex<W>,
    open: Mutex<Open>,
    door: Door,
}

/// Requests that are not answered.
#[derive(Default)]
struct Open {
    requests: HashMap<RequestId, usize>,
    bytes: usize,
}

/// One of several attempts to begin, over the same lines.
struct Connection<R, W> {
    lines: Arc<tokio::sync::Mutex<Lines<R, W>>>,
    outlet: Arc<Outlet<W>>,
}

/// What a line is.
enum Line {
    Whole,
    TooLong,
}

impl<R, W> Transport<RoleServer> for Connection<R, W>
where
    R: AsyncRead + Send + Unpin + 'static,
    W: AsyncWrite + Send + Unpin + 'static,
{
    type Error = io::Error;

    fn send(
        &mut self,
        item: ServerJsonRpcMessage,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let outlet = Arc::clone(&self.outlet);
        async move {
            let sent = outlet.write(&item).await;
            if let ServerJsonRpcMessage::Response(response) = &item {
                outlet.answered(&response.id);
            } else if let ServerJsonRpcMessage::Error(error) = &item
                && let Some(id) = &error.id
            {
                outlet.answered(id);
            }
            sent
        }
    }

    async fn receive(&mut self) -> Option<ClientJsonRpcMessage> {
        let closing = self.outlet.door.0.closing.clone();
        tokio::select! {
            biased;
            () = closing.cancelled() => None,
            message = async { self.lines.lock().await.next().await } => message,
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Lines<R, W> {
    /// The next message that the door is to see. Nothing is lost if the future
    /// is dropped.
    async fn next(&mut self) -> Option<ClientJsonRpcMessage> {
        loop {
            let line = match read_line(&mut self.input, &mut self.line, &mut self.skipping).await {
                Ok(Some(line)) => line,
                Ok(None) => {
                    self.outlet.door.close();
                    return None;
                }
                Err(error) => {
                    tracing::warn!(%error, "standard input");
                    self.outlet.door.close();
                    return None;
                }
            };
            let refusal = match line {
                Line::Whole => match self.outlet.admit(&self.line) {
                    Ok(message) => {
                        self.line.clear();
                        match message {
                            Some(message) => return Some(message),
                            None => continue,
                        }
                    }
                    Err(refusal) => refusal,
                },
                Line::TooLong => {
                    let what = format!("a message has at most {MESSAGE_BYTES_MAX} bytes");
                    refuse(ErrorCode::INVALID_REQUEST, what, None)
                }
            };
            self.line.clear();
            // A client that does not read its answers is not read either.
            if self.outlet.write(&refusal).await.is_err() {
                return None;
            }
        }
    }
}

/// Reads up to the end of a line, which is left in `line` without it. What was
/// read stays there if the future is dropped.
async fn read_line(
    input: &mut (impl AsyncBufRead + Unpin),
    line: &mut Vec<u8>,
    skipping: &mut bool,
) -> io::Result<Option<Line>> {
    loop {
        let there = input.fill_buf().await?;
        if there.is_empty() {
            return Ok(None);
        }
        let end = there.iter().position(|byte| *byte == b'\n');
        let part = &there[..end.unwrap_or(there.len())];
        if !*skipping {
            if line.len() + part.len() > MESSAGE_BYTES_MAX {
                *skipping = true;
                *line = Vec::new();
            } else {
                line.extend_from_slice(part);
            }
        }
        let taken = end.map_or(there.len(), |end| end + 1);
        input.consume(taken);
        if end.is_some() {
            let too_long = std::mem::take(skipping);
            return Ok(Some(if too_long { Line::TooLong } else { Line::Whole }));
        }
    }
}

impl<W: AsyncWrite + Unpin> Outlet<W> {
    /// Writes one line. A client that takes nothing more is gone.
    async fn write(&self, message: &ServerJsonRpcMessage) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let mut output = self.output.lock().await;
        let written = async {
            output.write_all(&line).await?;
            output.flush().await
        };
        let written = written.await;
        if written.is_err() {
            self.door.close();
        }
        written
    }
}

impl<W> Outlet<W> {
    /// A line as a message. `None`: nothing that anybody waits for.
    fn admit(&self, line: &[u8]) -> Result<Option<ClientJsonRpcMessage>, ServerJsonRpcMessage> {
        let line = line.trim_ascii();
        let line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        if line.is_empty() {
            return Ok(None);
        }
        let message = serde_json::from_slice(line).map_err(|error| match error.classify() {
            serde_json::error::Category::Data => {
                let id = id_of(line);
                refuse(ErrorCode::INVALID_REQUEST, "this is no message of MCP".into(), id)
            }
            _ => refuse(ErrorCode::PARSE_ERROR, format!("this is no JSON: {error}"), None),
        })?;
        match &message {
            ClientJsonRpcMessage::Request(request) => self.opened(&request.id, line.len())?,
            ClientJsonRpcMessage::Notification(notification) => {
                if let ClientNotification::CancelledNotification(cancelled) =
                    &notification.notification
                    && let Some(id) = &cancelled.params.request_id
                {
                    // It is not answered.
                    self.answered(id);
                }
            }
            // The door asks its clients nothing.
            ClientJsonRpcMessage::Response(_) | ClientJsonRpcMessage::Error(_) => return Ok(None),
        }
        Ok(Some(message))
    }

    fn opened(&self, id: &RequestId, bytes: usize) -> Result<(), ServerJsonRpcMessage> {
        let mut open = self.open();
        if open.requests.contains_key(id) {
            // Nobody could tell the two answers apart.
            let what = "a request of this id is not answered yet".into();
            return Err(refuse(ErrorCode::INVALID_REQUEST, what, None));
        }
        if open.requests.len() >= REQUESTS_MAX || open.bytes + bytes > REQUEST_BYTES_MAX {
            let what = format!(
                "too much at once: at most {REQUESTS_MAX} requests of {REQUEST_BYTES_MAX} bytes \
                 together"
            );
            return Err(refuse(ErrorCode::INTERNAL_ERROR, what, Some(id.clone())));
        }
        open.bytes += bytes;
        open.requests.insert(id.clone(), bytes);
        Ok(())
    }

    fn answered(&self, id: &RequestId) {
        let mut open = self.open();
        if let Some(bytes) = open.requests.remove(id) {
            open.bytes -= bytes;
        }
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refuse(code: ErrorCode, what: String, id: Option<RequestId>) -> ServerJsonRpcMessage {
    ServerJsonRpcMessage::error(ErrorData::new(code, what, None), id)
}

/// The id of something that is no message but has one.
fn id_of(line: &[u8]) -> Option<RequestId> {
    #[derive(Deserialize)]
    struct Numbered {
        id: Option<RequestId>,
    }
    serde_json::from_slice::<Numbered>(line).ok()?.id
}
