//! JSON-RPC on a process's standard streams, a message on each line.
//!
//! It distrusts the server, which may read nothing and say anything. What is to
//! be written waits here, bounded, and not in the MCP library: a request that is
//! given up before its first byte was written is never sent, so that a server
//! which was busy does not carry out what nobody waits for any more. A line is
//! bounded in bytes and in values; an answer of which nothing can be made ends
//! its request, and no other ([`Unusable`]); and so does the error of a server that
//! could not read its request, if there is only one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::{fmt, io};

use rmcp::RoleClient;
use rmcp::model::{ClientNotification, ErrorCode, JsonRpcMessage, RequestId};
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncWrite, AsyncWriteExt as _, BufReader};
use tokio::sync::{Notify, oneshot};
use tokio::task::AbortHandle;
use tokio::task::coop::consume_budget;

use super::received::{self, answers};
use super::unread::SMALL_BYTES_MAX;
use super::unusable::{MESSAGE_BYTES_MAX, Scan, Unusable, is_same};
use crate::locks::lock;

/// What may wait to be written, in bytes: a server that takes nothing gets no
/// more requests.
pub(super) const WAITING_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Lines of one server that are told as unreadable.
const COMPLAINTS_MAX: u32 = 20;

/// The messages of one server.
pub(super) struct Lines<R> {
    server: String,
    outbox: Arc<Outbox>,
    writer: AbortHandle,
    incoming: BufReader<R>,
    line: Line,
    /// What it was asked and has not answered.
    asked: Vec<RequestId>,
    /// What was given up, and may be answered yet.
    late: Option<RequestId>,
    complaints: u32,
}

/// What waits to be written.
#[derive(Debug, Default)]
struct Outbox {
    waiting: Mutex<Waiting>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    lines: VecDeque<Outgoing>,
    bytes: usize,
    is_over: bool,
}

#[derive(Debug)]
struct Outgoing {
    request: Option<RequestId>,
    line: Vec<u8>,
    written: oneshot::Sender<()>,
}

/// A line as far as it has come.
#[derive(Debug, Default)]
struct Line {
    bytes: Vec<u8>,
    scan: Scan,
    /// Why its bytes are not kept.
    dropped: Option<Unusable>,
}

impl Line {
    fn add(&mut self, bytes: &[u8]) {
        self.scan.see(bytes);
        let why = if self.scan.has_too_many() {
            Unusable::TooMany
        } else if self.bytes.len() + bytes.len() > MESSAGE_BYTES_MAX {
            Unusable::TooLong
        } else {
            if self.dropped.is_none() {
                self.bytes.extend_from_slice(bytes);
            }
            return;
        };
        self.dropped.get_or_insert(why);
        self.bytes = Vec::new();
    }

    /// The message, if it is one that is anybody's.
    fn message(&self) -> Result<Option<RxJsonRpcMessage<RoleClient>>, Unusable> {
        if let Some(why) = self.dropped {
            return Err(why);
        }
        let text = self.bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(&self.bytes);
        if text.trim_ascii().is_empty() {
            return Ok(None);
        }
        match received::read(text).and_then(serde_json::from_value) {
            Ok(message) => Ok(Some(message)),
            // A notification that this release does not know.
            Err(error) if error.is_data() && self.scan.has_method() => Ok(None),
            Err(error) => Err(Unusable::unread(&error)),
        }
    }
}

fn over() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the server's standard input is closed")
}

impl Outbox {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        lock(&self.waiting)
    }

    /// Has a message wait to be written; what tells that it was.
    fn put(
        &self,
        message: &TxJsonRpcMessage<RoleClient>,
    ) -> io::Result<Option<oneshot::Receiver<()>>> {
        let mut waiting = self.waiting();
        if waiting.is_over {
            return Err(over());
        }
        if let Some(given_up) = cancelled(message)
            && let Some(at) = waiting.lines.iter().position(|it| it.request == *given_up)
            && let Some(unsent) = waiting.lines.remove(at)
        {
            waiting.bytes -= unsent.line.len();
            let _ = unsent.written.send(());
            return Ok(None);
        }
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        if waiting.bytes + line.len() > WAITING_BYTES_MAX {
            let why = "the server takes nothing, and too much waits for it";
            return Err(io::Error::new(io::ErrorKind::WouldBlock, why));
        }
        let request = match message {
            JsonRpcMessage::Request(request) => Some(request.id.clone()),
            _ => None,
        };
        let (written, told) = oneshot::channel();
        waiting.bytes += line.len();
        waiting.lines.push_back(Outgoing { request, line, written });
        drop(waiting);
        self.changed.notify_one();
        Ok(Some(told))
    }

    /// The next that is to be written, which nobody takes back any more.
    async fn next(&self) -> Outgoing {
        loop {
            let next = {
                let mut waiting = self.waiting();
                let next = waiting.lines.pop_front();
                waiting.bytes -= next.as_ref().map_or(0, |it| it.line.len());
                next
            };
            match next {
                Some(next) => return next,
                None => self.changed.notified().await,
            }
        }
    }

    /// Nothing more is written.
    fn end(&self) {
        let mut waiting = self.waiting();
        waiting.is_over = true;
        waiting.bytes = 0;
        // Whoever waits for one of them hears that it was not written.
        waiting.lines.clear();
    }
}

/// The request that a message says nobody waits for.
fn cancelled(message: &TxJsonRpcMessage<RoleClient>) -> Option<&Option<RequestId>> {
    match message {
        JsonRpcMessage::Notification(said) => match &said.notification {
            ClientNotification::CancelledNotification(it) if it.params.request_id.is_some() => {
                Some(&it.params.request_id)
            }
            _ => None,
        },
        _ => None,
    }
}

async fn write(outbox: Arc<Outbox>, mut stdin: impl AsyncWrite + Unpin) {
    loop {
        let Outgoing { line, written, .. } = outbox.next().await;
        if stdin.write_all(&line).await.is_err() || stdin.flush().await.is_err() {
            return outbox.end();
        }
        let _ = written.send(());
    }
}

impl<R: AsyncRead + Unpin> Lines<R> {
    pub(super) fn new(
        server: &str,
        stdout: R,
        stdin: impl AsyncWrite + Unpin + Send + 'static,
    ) -> Self {
        let outbox = Arc::new(Outbox::default());
        let writer = tokio::spawn(write(Arc::clone(&outbox), stdin)).abort_handle();
        Self {
            server: server.to_owned(),
            outbox,
            writer,
            incoming: BufReader::new(stdout),
            line: Line::default(),
            asked: Vec::new(),
            late: None,
            complaints: 0,
        }
    }

    /// The next line. May be given up and begun again: what has come is kept.
    async fn line(&mut self) -> Option<Line> {
        loop {
            let available = self.incoming.fill_buf().await.ok()?;
            if available.is_empty() {
                return None;
            }
            let end = available.iter().position(|byte| *byte == b'\n');
            let taken = end.unwrap_or(available.len());
            self.line.add(&available[..taken]);
            self.incoming.consume(end.map_or(taken, |end| end + 1));
            if end.is_some() {
                return Some(std::mem::take(&mut self.line));
            }
        }
    }

    /// Nobody waits for an answer with this id any more, and one that comes says something.
    pub(super) fn give_up(&mut self, id: &RequestId) {
        self.forget(id);
        self.late = Some(id.clone());
    }

    /// Nobody waits for an answer with this id any more.
    fn forget(&mut self, id: &RequestId) {
        self.asked.retain(|asked| !is_same(id, asked));
    }

    /// Whether a line is a large answer to nothing that is waited for: of a run that is over,
    /// perhaps. To read it would hold up what others wait for.
    fn is_nobodys(&self, line: &Line) -> bool {
        let mut heard = self.asked.iter().chain(&self.late);
        line.bytes.len() > SMALL_BYTES_MAX
            && line.scan.answers().is_some_and(|id| !heard.any(|it| is_same(&id, it)))
    }

    /// Of an error that names no request, the only one there is, if the error says
    /// that no request could be read: so a server answers that does not know the id
    /// (JSON-RPC 2.0, section 5).
    fn attributed(
        &mut self,
        mut message: RxJsonRpcMessage<RoleClient>,
    ) -> RxJsonRpcMessage<RoleClient> {
        if let JsonRpcMessage::Error(error) = &mut message
            && error.id.is_none()
        {
            self.complain("an error that names no request");
            let unread = [ErrorCode::PARSE_ERROR, ErrorCode::INVALID_REQUEST];
            if let [only] = self.asked.as_slice()
                && unread.contains(&error.error.code)
            {
                error.id = Some(only.clone());
            }
        }
        if let Some(id) = answers(&message) {
            if !self.asked.iter().any(|asked| is_same(id, asked)) {
                // Of one that was given up, perhaps; or under an id that is nobody's.
                let server = &self.server;
                tracing::debug!(server, ?id, "an answer to nothing that is waited for");
            }
            self.forget(id);
        }
        message
    }

    fn complain(&mut self, why: impl fmt::Display) {
        self.complaints = self.complaints.saturating_add(1);
        if self.complaints <= COMPLAINTS_MAX {
            let server = &self.server;
            tracing::warn!(server, %why, "a message of a tool server is of no use");
        }
    }
}

impl<R: AsyncRead + Unpin + Send> Transport<RoleClient> for Lines<R> {
    type Error = io::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let put = self.outbox.put(&message);
        match &message {
            JsonRpcMessage::Request(request) if put.is_ok() => self.asked.push(request.id.clone()),
            message => {
                if let Some(Some(given_up)) = cancelled(message) {
                    self.forget(given_up);
                }
            }
        }
        async move {
            match put? {
                Some(written) => written.await.map_err(|_| over()),
                None => Ok(()),
            }
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        loop {
            // Lines that are no message may come many in one read.
            consume_budget().await;
            let line = self.line().await?;
            if self.is_nobodys(&line) {
                let (server, bytes) = (&self.server, line.bytes.len());
                tracing::debug!(server, bytes, "a large answer to nothing that is waited for");
                continue;
            }
            match line.message() {
                Ok(Some(message)) => return Some(self.attributed(message)),
                Ok(None) => {}
                Err(why) => {
                    self.complain(why);
                    if let Some(asked) = line.scan.answers() {
                        return Some(self.attributed(why.answer(asked)));
                    }
                }
            }
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        self.outbox.end();
        // And with it the server's standard input.
        self.writer.abort();
        Ok(())
    }
}

impl<R> Drop for Lines<R> {
    fn drop(&mut self) {
        self.outbox.end();
        self.writer.abort();
    }
}

#[cfg(test)]
mod tests {
    use rmcp::model::{
        CallToolRequestParams, CancelledNotification, CancelledNotificationParam, ClientRequest,
    };
    use tokio::io::{AsyncReadExt as _, duplex};

    use super::*;

    fn call(id: i64, text: &str) -> TxJsonRpcMessage<RoleClient> {
        let arguments = serde_json::json!({ "x": text }).as_object().unwrap().clone();
        let params = CallToolRequestParams::new("t").with_arguments(arguments);
        let request = ClientRequest::CallToolRequest(rmcp::model::Request::new(params));
        JsonRpcMessage::request(request, RequestId::Number(id))
    }

    fn given_up(id: i64) -> TxJsonRpcMessage<RoleClient> {
        let params = CancelledNotificationParam::new(Some(RequestId::Number(id)), None);
        let said = ClientNotification::CancelledNotification(CancelledNotification::new(params));
        JsonRpcMessage::notification(said)
    }

    #[tokio::test]
    async fn what_is_given_up_before_it_is_written_is_never_sent() {
        let (mut server, stdin) = duplex(64);
        let mut lines = Lines::new("x", tokio::io::empty(), stdin);
        // Larger than what the server has room for.
        let first = tokio::spawn(lines.send(call(1, &"a".repeat(1000))));
        tokio::task::yield_now().await;
        let second = tokio::spawn(lines.send(call(2, "b")));
        let third = tokio::spawn(lines.send(call(3, "c")));
        tokio::task::yield_now().await;
        lines.send(given_up(2)).await.unwrap();
        second.await.unwrap().unwrap();
        // That one is on its way, and the server hears of it.
        let told = tokio::spawn(lines.send(given_up(1)));
        let mut said = Vec::new();
        while said.iter().filter(|byte| **byte == b'\n').count() < 3 {
            server.read_buf(&mut said).await.unwrap();
        }
        for written in [first, third, told] {
            written.await.unwrap().unwrap();
        }
        let said = String::from_utf8(said).unwrap();
        let said: Vec<&str> = said.lines().collect();
        assert!(said[0].contains("aaaa") && said[1].contains("\"c\""), "{said:?}");
        assert!(said[2].contains("notifications/cancelled"), "{said:?}");
    }

    #[tokio::test]
    async fn a_server_that_takes_nothing_gets_no_more_than_so_much() {
        let (_server, stdin) = duplex(64);
        let mut lines = Lines::new("x", tokio::io::empty(), stdin);
        let large = "a".repeat(MESSAGE_BYTES_MAX);
        let mut sent = Vec::new();
        let refused = loop {
            assert!(sent.len() < 10);
            let mut send = Box::pin(lines.send(call(sent.len() as i64, &large)));
            tokio::select! {
                biased;
                outcome = &mut send => break outcome.unwrap_err(),
                () = tokio::task::yield_now() => sent.push(send),
            }
        };
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        lines.close().await.unwrap();
        for written in sent {
            assert!(written.await.is_err());
        }
        assert!(lines.send(call(9, "late")).await.is_err());
    }

    #[tokio::test]
    async fn a_large_answer_that_nobody_waits_for_is_not_read() {
        // Whoever read them would say of each that it is no JSON.
        let answer =
            |id, text: &str| format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{text}\n");
        let large = format!("\"{}", "a".repeat(SMALL_BYTES_MAX));
        let said = [answer(7, &large), answer(8, &large), answer(7, "{}}")].concat();
        let mut lines = Lines::new("x", said.as_bytes(), tokio::io::sink());
        lines.send(call(7, "")).await.unwrap();
        lines.send(given_up(7)).await.unwrap();
        lines.send(call(8, "")).await.unwrap();
        let first = lines.receive().await.unwrap();
        assert_eq!(answers(&first), Some(&RequestId::Number(8)));
        assert_eq!(lines.complaints, 1, "of the one that is waited for");
        assert_eq!(answers(&lines.receive().await.unwrap()), Some(&RequestId::Number(7)));
        // But what was given up and is heard all the same.
        let said = answer(7, &format!("{large}\"}}"));
        let mut lines = Lines::new("x", said.as_bytes(), tokio::io::sink());
        lines.send(call(7, "")).await.unwrap();
        lines.give_up(&RequestId::Number(7));
        assert_eq!(answers(&lines.receive().await.unwrap()), Some(&RequestId::Number(7)));
    }

    #[tokio::test]
    async fn an_error_that_names_no_request_ends_the_only_one_and_none_of_two() {
        let no_id =
            "{\"jsonrpc\":\"2.0\",\"id\":null,\"error\":{\"code\":-32700,\"message\":\"?\"}}\n";
        for (asked, given_up, ended) in [
            (vec![7], None, Some(7)),
            (vec![7, 8], None, None),
            (vec![7, 8], Some(7), Some(8)),
            (vec![], None, None),
        ] {
            let mut lines = Lines::new("x", no_id.as_bytes(), tokio::io::sink());
            for id in asked {
                lines.send(call(id, "")).await.unwrap();
            }
            if let Some(id) = given_up {
                lines.send(self::given_up(id)).await.unwrap();
            }
            let Some(JsonRpcMessage::Error(error)) = lines.receive().await else { panic!() };
            assert_eq!(error.id, ended.map(RequestId::Number));
        }
    }

    #[tokio::test]
    async fn an_answer_that_gives_its_number_back_as_a_text_is_waited_for_no_more() {
        let said = "{\"jsonrpc\":\"2.0\",\"id\":\"7\",\"result\":{}}\n";
        let mut lines = Lines::new("x", said.as_bytes(), tokio::io::sink());
        for id in [7, 8] {
            lines.send(call(id, "")).await.unwrap();
        }
        lines.receive().await.unwrap();
        assert_eq!(lines.asked, [RequestId::Number(8)]);
    }

    #[tokio::test]
    async fn an_answer_of_no_use_ends_its_request_and_no_other() {
        let many = "0,".repeat(super::super::unusable::VALUES_MAX as usize + 1);
        let long = "a".repeat(MESSAGE_BYTES_MAX);
        let said = format!(
            "\u{feff}{{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{{}}}}\n\n\
             {{\"jsonrpc\":\"2.0\",\"id\":2,\"result\":{{\"x\":NaN}}}}\n\
             {{\"jsonrpc\":\"2.0\",\"result\":[{many}0],\"id\":3}}\n\
             {{\"jsonrpc\":\"2.0\",\"result\":\"{long}\",\"id\":4}}\n\
             what is this\n\
             {{\"jsonrpc\":\"2.0\",\"method\":\"notifications/unheard-of\",\"params\":7}}\n\
             {{\"jsonrpc\":\"2.0\",\"id\":5,\"result\":{{}}}}\n"
        );
        let mut lines = Lines::new("x", said.as_bytes(), tokio::io::sink());
        let mut got = Vec::new();
        while let Some(message) = lines.receive().await {
            got.push(match message {
                JsonRpcMessage::Response(it) => (it.id, None),
                JsonRpcMessage::Error(it) => (it.id.unwrap(), Unusable::of(&it.error)),
                other => panic!("{other:?}"),
            });
        }
        let number = |(id, why): (i64, Option<Unusable>)| (RequestId::Number(id), why);
        let expected = [
            (1, None),
            (2, Some(Unusable::NoJson)),
            (3, Some(Unusable::TooMany)),
            (4, Some(Unusable::TooLong)),
            (5, None),
        ];
        assert_eq!(got, expected.map(number));
    }

    #[tokio::test]
    async fn half_a_character_costs_itself_and_not_its_answer() {
        let mut said = br#"{"jsonrpc":"2.0","id":1,"result":{"x":"cut \ud83d"}}"#.to_vec();
        said.extend(b"\n{\"jsonrpc\":\"2.0\",\"id\":2,\"result\":{\"x\":\"cut \xf0\x9f\"}}\n");
        let mut lines = Lines::new("x", said.as_slice(), tokio::io::sink());
        for _ in 0..2 {
            let message = serde_json::to_value(lines.receive().await.unwrap()).unwrap();
            assert_eq!(message["result"]["x"], "cut \u{fffd}", "{message}");
        }
    }
}
