//! JSON-RPC in lines: the client started this process and holds both ends.
//!
//! rmcp's own transport for this takes any number of requests at once, says
//! nothing to a line that is no JSON, and lets what runs go on for seconds
//! after the client has left. This one answers every line that asks for an
//! answer, stops reading while the client does not read, and closes the door
//! when the client is gone.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use forge_protocol::json;
use rmcp::model::{
    ClientJsonRpcMessage, ClientNotification, ClientRequest, ErrorCode, ErrorData,
    GetExtensions as _, RequestId, ServerJsonRpcMessage,
};
use rmcp::service::ServerInitializeError;
use rmcp::transport::Transport;
use rmcp::{RoleServer, ServiceExt as _};
use tokio::io::{
    AsyncBufRead, AsyncBufReadExt as _, AsyncRead, AsyncWrite, AsyncWriteExt as _, BufReader,
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::skim::Skim;
use super::{Door, MESSAGE_BYTES_MAX, REQUEST_BYTES_MAX, REQUESTS_MAX, handler};
use crate::locks::lock;

/// How long a client that is leaving may take for its last answers.
const LAST_WRITE_TIME_MAX: Duration = Duration::from_secs(2);

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
    let (unsent, taken) = mpsc::channel(1);
    let outlet = Arc::new(Outlet { unsent, open: Arc::default(), closing: door.0.closing.clone() });
    let writing = tokio::spawn(write_all(output, taken, Arc::downgrade(&outlet)));
    let lines = Arc::new(tokio::sync::Mutex::new(Lines {
        input: BufReader::new(input),
        line: Vec::new(),
        skipping: None,
        refusal: None,
        outlet: Arc::clone(&outlet),
    }));
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
    drop((lines, outlet));
    // What was answered is still written, to a client that takes it.
    let _ = tokio::time::timeout(LAST_WRITE_TIME_MAX, writing).await;
    served
}

/// Writes line after line. A client that takes no more is gone.
async fn write_all(
    mut output: impl AsyncWrite + Unpin,
    mut unsent: mpsc::Receiver<Outgoing>,
    outlet: Weak<Outlet>,
) {
    while let Some(Outgoing { line, answers }) = unsent.recv().await {
        // Before its client knows: it may use the id and the place again at once.
        if let (Some(id), Some(outlet)) = (answers, outlet.upgrade()) {
            outlet.answered(&id);
        }
        let written = async {
            output.write_all(&line).await?;
            output.flush().await
        };
        let written: io::Result<()> = written.await;
        if let Err(error) = written {
            tracing::debug!(%error, "the client takes nothing more");
            if let Some(outlet) = outlet.upgrade() {
                outlet.closing.cancel();
            }
            return;
        }
    }
}

/// The client's end of the conversation.
struct Lines<R> {
    input: BufReader<R>,
    /// What is there of the next line. Reading can be interrupted.
    line: Vec<u8>,
    /// The line is too long, and is left out to its end: what was seen of it.
    skipping: Option<Skim>,
    /// An answer to the last line that is not on its way yet. Until it is,
    /// nothing more is read.
    refusal: Option<Outgoing>,
    outlet: Arc<Outlet>,
}

struct Outlet {
    unsent: mpsc::Sender<Outgoing>,
    open: Arc<Mutex<Open>>,
    closing: CancellationToken,
}

/// A line for the client, and the request that it answers.
struct Outgoing {
    line: Vec<u8>,
    answers: Option<RequestId>,
}

/// Requests that are not answered, and those that are cancelled and go on: rmcp would
/// give the answer of such a one to another of its id.
#[derive(Default)]
struct Open {
    requests: HashMap<RequestId, Asked>,
    bytes: usize,
    /// The number of the next.
    next: u64,
}

struct Asked {
    number: u64,
    bytes: usize,
    stage: Stage,
}

#[derive(PartialEq, Eq)]
enum Stage {
    /// It is carried out.
    Open,
    /// The same, and it will not be answered.
    Cancelled,
    /// It is not carried out any more.
    Over,
    /// It is, and its answer is on its way.
    Answered,
}

/// In a request for as long as that is carried out.
struct Carried {
    open: Arc<Mutex<Open>>,
    id: RequestId,
    number: u64,
}

impl Drop for Carried {
    fn drop(&mut self) {
        let mut open = lock(&self.open);
        let Some(asked) = open.requests.get_mut(&self.id) else { return };
        if asked.number != self.number {
            return;
        }
        match asked.stage {
            Stage::Cancelled => open.remove(&self.id),
            Stage::Open => asked.stage = Stage::Over,
            Stage::Over | Stage::Answered => {}
        }
    }
}

impl Open {
    fn remove(&mut self, id: &RequestId) {
        if let Some(asked) = self.requests.remove(id) {
            self.bytes -= asked.bytes;
        }
    }
}

/// One of several attempts to begin, over the same lines.
struct Connection<R> {
    lines: Arc<tokio::sync::Mutex<Lines<R>>>,
    outlet: Arc<Outlet>,
}

/// What a line is.
enum Line {
    Whole,
    /// With the id of the request that it is.
    TooLong(Option<RequestId>),
}

impl<R: AsyncRead + Send + Unpin + 'static> Transport<RoleServer> for Connection<R> {
    type Error = io::Error;

    fn send(
        &mut self,
        mut item: ServerJsonRpcMessage,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let outlet = Arc::clone(&self.outlet);
        if let ServerJsonRpcMessage::Error(refusal) = &mut item
            && refusal.error.message.starts_with("request _meta is missing")
        {
            // rmcp takes whoever comes without a handshake for a client that needs none.
            let more = "; a client of a protocol before 2026-07-28 sends `initialize` first";
            refusal.error.message = format!("{}{more}", refusal.error.message).into();
        }
        async move {
            let answers = match &item {
                ServerJsonRpcMessage::Response(response) => Some(response.id.clone()),
                ServerJsonRpcMessage::Error(error) => error.id.clone(),
                _ => None,
            };
            if let Some(id) = &answers
                && let Some(asked) = outlet.open().requests.get_mut(id)
            {
                asked.stage = Stage::Answered;
            }
            let outgoing = Outgoing { answers, ..Outgoing::new(&item) };
            outlet.unsent.send(outgoing).await.map_err(|_| io::ErrorKind::BrokenPipe.into())
        }
    }

    async fn receive(&mut self) -> Option<ClientJsonRpcMessage> {
        let closing = self.outlet.closing.clone();
        let message = tokio::select! {
            biased;
            () = closing.cancelled() => None,
            message = async { self.lines.lock().await.next().await } => message,
        };
        if message.is_none() {
            closing.cancel();
        }
        message
    }

    async fn close(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Outgoing {
    /// One that answers nothing.
    fn new(message: &ServerJsonRpcMessage) -> Self {
        // Writing into memory fails for maps with keys that are no texts, and
        // a message has none.
        let mut line = serde_json::to_vec(message).unwrap_or_default();
        line.push(b'\n');
        Self { line, answers: None }
    }
}

impl<R: AsyncRead + Unpin> Lines<R> {
    /// The next message that the door is to see. Nothing is lost if the future
    /// is dropped, as it is whenever something else happens first.
    async fn next(&mut self) -> Option<ClientJsonRpcMessage> {
        loop {
            if self.refusal.is_some() {
                // A client that does not read its answers is not read either.
                let room = self.outlet.unsent.reserve().await.ok()?;
                if let Some(refusal) = self.refusal.take() {
                    room.send(refusal);
                }
            }
            let line = match read_line(&mut self.input, &mut self.line, &mut self.skipping).await {
                Ok(line) => line?,
                Err(error) => {
                    tracing::warn!(%error, "standard input");
                    return None;
                }
            };
            let admitted = match line {
                Line::Whole => self.outlet.admit(&self.line),
                Line::TooLong(id) => {
                    // Nobody could tell it from the answer of one that goes on.
                    let id = id.filter(|id| !self.outlet.open().requests.contains_key(id));
                    let what = format!("a message has at most {MESSAGE_BYTES_MAX} bytes");
                    Err(refuse(ErrorCode::INVALID_REQUEST, what, id))
                }
            };
            self.line.clear();
            match admitted {
                Ok(Some(message)) => return Some(message),
                Ok(None) => {}
                Err(refusal) => self.refusal = Some(refusal),
            }
        }
    }
}

/// Reads up to the end of a line or of `input`. What was read is left in `line`,
/// without that end, and stays there if the future is dropped.
async fn read_line(
    input: &mut (impl AsyncBufRead + Unpin),
    line: &mut Vec<u8>,
    skipping: &mut Option<Skim>,
) -> io::Result<Option<Line>> {
    loop {
        let there = input.fill_buf().await?;
        if there.is_empty() && line.is_empty() && skipping.is_none() {
            return Ok(None);
        }
        let end = there.iter().position(|byte| *byte == b'\n');
        let is_whole = there.is_empty() || end.is_some();
        let part = &there[..end.unwrap_or(there.len())];
        if skipping.is_none() && line.len() + part.len() > MESSAGE_BYTES_MAX {
            let mut skim = Skim::default();
            skim.pass(&std::mem::take(line));
            *skipping = Some(skim);
        }
        match skipping {
            Some(skim) => skim.pass(part),
            None => line.extend_from_slice(part),
        }
        let taken = end.map_or(there.len(), |end| end + 1);
        input.consume(taken);
        if is_whole {
            let too_long = skipping.take().map(|skim| Line::TooLong(skim.id()));
            return Ok(Some(too_long.unwrap_or(Line::Whole)));
        }
    }
}

impl Outlet {
    /// A line as a message. `None`: nothing that anybody waits for.
    fn admit(&self, line: &[u8]) -> Result<Option<ClientJsonRpcMessage>, Outgoing> {
        let line = line.trim_ascii();
        let line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        if line.is_empty() {
            return Ok(None);
        }
        let mut message = match json::from_text_mended(line) {
            Ok(message) => message,
            Err(_) if super::asks_for_nothing(line) => return Ok(None),
            Err(error) => return Err(Outgoing::new(&super::no_message(line, &error))),
        };
        match &mut message {
            ClientJsonRpcMessage::Request(request) => {
                let carried = self.opened(&request.id, line.len())?;
                request.request.extensions_mut().insert(Arc::new(carried));
                // Before the handshake nobody else would say so.
                if let ClientRequest::CustomRequest(custom) = &request.request
                    && let Some(ErrorData { code, message, .. }) = handler::unreadable(custom)
                {
                    self.answered(&request.id);
                    return Err(refuse(code, message.into_owned(), Some(request.id.clone())));
                }
            }
            ClientJsonRpcMessage::Notification(notification) => {
                if let ClientNotification::CancelledNotification(cancelled) =
                    &notification.notification
                    && let Some(id) = &cancelled.params.request_id
                {
                    self.cancelled(id);
                }
            }
            // The door asks its clients nothing.
            ClientJsonRpcMessage::Response(_) | ClientJsonRpcMessage::Error(_) => return Ok(None),
        }
        Ok(Some(message))
    }

    fn opened(&self, id: &RequestId, bytes: usize) -> Result<Carried, Outgoing> {
        let mut open = self.open();
        if let Some(asked) = open.requests.get(id) {
            // Nobody could tell the two answers apart.
            let what = match asked.stage {
                Stage::Cancelled => "a request of this id is cancelled, and not over yet",
                _ => "a request of this id is not answered yet",
            };
            return Err(refuse(ErrorCode::INVALID_REQUEST, what.into(), None));
        }
        if open.requests.len() >= REQUESTS_MAX || open.bytes + bytes > REQUEST_BYTES_MAX {
            let what = format!(
                "too much at once: at most {REQUESTS_MAX} requests of {REQUEST_BYTES_MAX} bytes \
                 together"
            );
            return Err(refuse(ErrorCode::INTERNAL_ERROR, what, Some(id.clone())));
        }
        open.bytes += bytes;
        let number = open.next;
        open.next += 1;
        open.requests.insert(id.clone(), Asked { number, bytes, stage: Stage::Open });
        Ok(Carried { open: Arc::clone(&self.open), id: id.clone(), number })
    }

    fn answered(&self, id: &RequestId) {
        self.open().remove(id);
    }

    /// It is not answered, unless it is already.
    fn cancelled(&self, id: &RequestId) {
        let mut open = self.open();
        match open.requests.get_mut(id) {
            Some(asked) if asked.stage == Stage::Open => asked.stage = Stage::Cancelled,
            Some(asked) if asked.stage == Stage::Over => open.remove(id),
            _ => {}
        }
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        lock(&self.open)
    }
}

fn refuse(code: ErrorCode, what: String, id: Option<RequestId>) -> Outgoing {
    Outgoing::new(&ServerJsonRpcMessage::error(ErrorData::new(code, what, None), id))
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use super::*;
    use serde_json::{Value, json};

    fn outlet() -> (Outlet, mpsc::Receiver<Outgoing>) {
        let (unsent, taken) = mpsc::channel(1);
        let closing = CancellationToken::new();
        (Outlet { unsent, open: Arc::default(), closing }, taken)
    }

    fn request(id: u64, more: &str) -> String {
        let params = json!({"cursor": more});
        json!({"jsonrpc": "2.0", "id": id, "method": "tools/list", "params": params}).to_string()
    }

    /// What a line is refused with.
    fn refused(outlet: &Outlet, line: &str) -> Option<Value> {
        let refusal = outlet.admit(line.as_bytes()).err()?;
        Some(serde_json::from_slice(&refusal.line).unwrap())
    }

    #[test]
    fn so_many_requests_are_open_until_one_is_answered_or_cancelled() {
        let (outlet, _taken) = outlet();
        for id in 0..REQUESTS_MAX as u64 {
            assert_eq!(refused(&outlet, &request(id, "")), None);
        }
        let refusal = refused(&outlet, &request(1000, "")).unwrap();
        assert_eq!(refusal["id"], 1000);
        assert!(refusal["error"]["message"].as_str().unwrap().contains("too much"), "{refusal}");
        outlet.answered(&RequestId::Number(3));
        assert_eq!(refused(&outlet, &request(1000, "")), None);
        let cancelled = json!({"jsonrpc": "2.0", "method": "notifications/cancelled",
            "params": {"requestId": 4}});
        assert_eq!(refused(&outlet, &cancelled.to_string()), None);
        assert_eq!(refused(&outlet, &request(1001, "")), None);
        assert!(refused(&outlet, &request(1002, "")).is_some());
    }

    #[test]
    fn a_notification_has_no_answer_whatever_is_wrong_with_it() {
        let (outlet, _taken) = outlet();
        let cancelled = r#""method":"notifications/cancelled","params":[1]"#;
        assert_eq!(refused(&outlet, &format!(r#"{{"jsonrpc":"2.0",{cancelled}}}"#)), None);
        assert_eq!(refused(&outlet, r#"{"jsonrpc":"1.0","method":"notifications/x"}"#), None);
        for (line, id) in [
            (format!(r#"{{"jsonrpc":"2.0","id":7,{cancelled}}}"#), json!(7)),
            (r#"{"jsonrpc":"2.0","id":null,"method":"ping"}"#.to_owned(), Value::Null),
            (r#"{"jsonrpc":"2.0","method":7}"#.to_owned(), Value::Null),
            (r#"{"jsonrpc":"2.0"}"#.to_owned(), Value::Null),
        ] {
            let refusal = refused(&outlet, &line).unwrap();
            assert_eq!(refusal.get("id").cloned().unwrap_or_default(), id, "{refusal}");
        }
    }

    #[test]
    fn open_requests_have_so_many_bytes_together() {
        let (outlet, _taken) = outlet();
        let long = "x".repeat(MESSAGE_BYTES_MAX - 1000);
        assert_eq!(refused(&outlet, &request(1, &long)), None);
        assert_eq!(refused(&outlet, &request(2, &long)), None);
        assert!(refused(&outlet, &request(3, &long)).is_some());
        assert_eq!(refused(&outlet, &request(4, "")), None);
        outlet.answered(&RequestId::Number(1));
        assert_eq!(refused(&outlet, &request(3, &long)), None);
    }

    #[test]
    fn the_id_of_a_cancelled_request_is_in_use_until_that_is_over() {
        let (outlet, _taken) = outlet();
        let carried = outlet.admit(request(7, "").as_bytes());
        let cancelled = json!({"jsonrpc": "2.0", "method": "notifications/cancelled",
            "params": {"requestId": 7}});
        assert_eq!(refused(&outlet, &cancelled.to_string()), None);
        let refusal = refused(&outlet, &request(7, "")).unwrap();
        assert!(refusal["id"].is_null(), "{refusal}");
        assert!(refusal["error"]["message"].as_str().unwrap().contains("not over"), "{refusal}");
        drop(carried);
        assert_eq!(refused(&outlet, &request(7, "")), None);
        assert_eq!(outlet.open().requests.len(), 1);
    }

    #[test]
    fn an_id_that_is_in_use_is_refused_without_an_answer_to_it() {
        let (outlet, _taken) = outlet();
        assert_eq!(refused(&outlet, &request(7, "")), None);
        let refusal = refused(&outlet, &request(7, "")).unwrap();
        assert!(refusal["id"].is_null(), "{refusal}");
        outlet.answered(&RequestId::Number(7));
        assert_eq!(refused(&outlet, &request(7, "")), None);
    }

    #[tokio::test]
    async fn an_id_is_free_before_its_client_has_the_answer() {
        /// Looks what is open whenever something is written.
        struct Output(Arc<Outlet>);
        impl AsyncWrite for Output {
            fn poll_write(
                self: Pin<&mut Self>,
                _: &mut Context<'_>,
                bytes: &[u8],
            ) -> Poll<io::Result<usize>> {
                assert!(self.0.open().requests.is_empty(), "it is open still");
                Poll::Ready(Ok(bytes.len()))
            }

            fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
                Poll::Ready(Ok(()))
            }

            fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
                Poll::Ready(Ok(()))
            }
        }
        let (outlet, taken) = outlet();
        let outlet = Arc::new(outlet);
        let writing = write_all(Output(Arc::clone(&outlet)), taken, Arc::downgrade(&outlet));
        let writing = tokio::spawn(writing);
        assert_eq!(refused(&outlet, &request(7, "")), None);
        let answers = Some(RequestId::Number(7));
        let answer = Outgoing { line: b"{}\n".to_vec(), answers };
        outlet.unsent.send(answer).await.unwrap();
        while outlet.unsent.capacity() == 0 || !outlet.open().requests.is_empty() {
            assert!(!writing.is_finished());
            tokio::task::yield_now().await;
        }
        tokio::task::yield_now().await;
        assert!(!writing.is_finished());
    }

    #[test]
    fn no_text_in_a_message_is_read_as_json_whatever_its_name() {
        let (outlet, _taken) = outlet();
        for (name, id) in
            [("$serde_json::private::RawValue", 1), ("\\u0024serde_json::private::RawValue", 2)]
        {
            let arguments = format!(r#"{{"program":"","input":{{"{name}":"[1]"}}}}"#);
            let line = format!(
                r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"run_program","arguments":{arguments}}}}}"#
            );
            let refusal = refused(&outlet, &line).unwrap();
            assert_eq!((&refusal["error"]["code"], &refusal["id"]), (&json!(-32600), &json!(id)));
            let said = refusal["error"]["message"].as_str().unwrap();
            assert!(said.contains("RawValue"), "{said}");
        }
        // An id is none either.
        let line =
            r#"{"jsonrpc":"2.0","id":{"$serde_json::private::RawValue":"7"},"method":"ping"}"#;
        assert!(refused(&outlet, line).unwrap()["id"].is_null());
    }

    #[test]
    fn half_a_character_in_a_message_costs_itself() {
        let (outlet, _taken) = outlet();
        let line = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"run_program",
            "arguments":{"program":"","input":"cut \ud83d"}}}"#;
        match outlet.admit(line.as_bytes()) {
            Ok(Some(message)) => {
                assert!(serde_json::to_string(&message).unwrap().contains("cut \u{FFFD}"));
            }
            _ => panic!("it is refused"),
        }
    }

    #[test]
    fn a_long_line_is_refused_by_its_id_and_the_next_ones_are_read() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let long = request(7, &"x".repeat(MESSAGE_BYTES_MAX));
            let text = format!("{long}\nshort\nno end");
            let mut input = BufReader::new(text.as_bytes());
            let (mut line, mut skipping) = (Vec::new(), None);
            let read = read_line(&mut input, &mut line, &mut skipping).await.unwrap();
            let seven = RequestId::Number(7);
            assert!(matches!(read, Some(Line::TooLong(Some(id))) if id == seven));
            assert!(line.is_empty());
            for expected in ["short", "no end"] {
                let read = read_line(&mut input, &mut line, &mut skipping).await.unwrap();
                assert!(matches!(read, Some(Line::Whole)));
                assert_eq!(line, expected.as_bytes());
                line.clear();
            }
            assert!(read_line(&mut input, &mut line, &mut skipping).await.unwrap().is_none());
        });
    }
}
