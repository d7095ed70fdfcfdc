//! What a server asks of its client: declined at the door.
//!
//! MCP lets a server send requests of its own. The broker carries none out,
//! and answers each at once: a `ping` with nothing, any other with an error.
//! Left to the MCP library, each would be a task and an answer that waits for
//! the server to read it, and a server that asks without end and reads nothing
//! would choose how much memory the broker has. Here only so many answers
//! wait, and behind them the numbers of so many questions. While those do, nothing
//! more is read; a server that does not take the answers either is hung up on.
//!
//! What it says unasked is mostly for a user interface, and the library would make a task
//! of each, more than it carries out where they come without end. They go no further.
//!
//! What must not be missed is noted here too ([`Heard`]), before the library
//! makes anything of it. It tells its handler at some time that tools changed,
//! which may be after the answer that came behind, and a call in between would
//! go by a definition that the server has said is gone. And not every request
//! is told of the server's end.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::locks::lock;
use rmcp::RoleClient;
use rmcp::model::{
    ClientResult, ErrorCode, ErrorData, GetMeta as _, JsonRpcMessage, RequestId,
    ServerNotification, ServerRequest,
};
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, sleep_until, timeout};

/// What a server is told that asks for input, a completion or roots. Most hand it on to
/// whoever called the tool.
const NOBODY: &str = "nobody is there to be asked: who calls this tool is a program, which has no \
                      user, no model and no roots";

/// Answers that wait to be taken.
const WAITING_MAX: usize = 64;
/// Questions that wait for theirs. What comes in one piece is read whole, or its
/// rest would keep the answers from being sent.
const UNANSWERED_MAX: usize = 4_096;
/// The longest number of a question that waits, in bytes. One with a longer is not
/// answered.
const NUMBER_BYTES_MAX: usize = 128;
/// How long a server may leave so many of them waiting.
const TAKEN_TIME_MAX: Duration = Duration::from_secs(5);

/// How long the last word to a server may take. The library's transport over HTTP waits
/// there for a task of its own, which may wait to be read; that ends as it is dropped.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(5);

/// What was heard of a server on its transport.
#[derive(Debug, Default)]
pub(super) struct Heard {
    changes: AtomicU64,
    last: Mutex<Option<Instant>>,
    over: watch::Sender<bool>,
}

impl Heard {
    /// How often it said that its tools changed.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Its tools may have changed.
    pub(super) fn changed(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// When it said something last.
    pub(super) fn last(&self) -> Option<Instant> {
        *lock(&self.last)
    }

    fn said_something(&self) {
        *lock(&self.last) = Some(Instant::now());
    }

    /// Whether nothing more comes from it.
    pub(super) fn is_over(&self) -> bool {
        *self.over.borrow()
    }

    /// Waits until nothing more comes from it.
    pub(super) async fn over(&self) {
        // It cannot fail: the sender is here.
        let _ = self.over.subscribe().wait_for(|over| *over).await;
    }

    fn end(&self) {
        self.over.send_replace(true);
    }
}

/// A transport on which the server's own requests are declined.
pub(super) struct Declined<T> {
    inner: T,
    answers: JoinSet<()>,
    unanswered: VecDeque<Asked>,
    /// When the server has to have taken one, while too many wait.
    until: Option<Instant>,
    heard: Arc<Heard>,
}

/// A question of a server's.
struct Asked {
    id: RequestId,
    is_ping: bool,
}

impl<T> Declined<T> {
    pub(super) fn new(inner: T, heard: Arc<Heard>) -> Self {
        let (answers, unanswered) = (JoinSet::new(), VecDeque::new());
        Self { inner, answers, unanswered, until: None, heard }
    }
}

impl<T> Drop for Declined<T> {
    fn drop(&mut self) {
        self.heard.end();
    }
}

impl<T: Transport<RoleClient>> Declined<T> {
    fn answer(&mut self, Asked { id, is_ping }: Asked) {
        let answer = if is_ping {
            JsonRpcMessage::response(ClientResult::empty(()), id)
        } else {
            let error = ErrorData::new(ErrorCode::METHOD_NOT_FOUND, NOBODY, None);
            JsonRpcMessage::error(error, Some(id))
        };
        let sent = self.inner.send(answer);
        // Where it cannot be sent, the server is gone, which others notice, or takes
        // nothing.
        self.answers.spawn(async move { drop(sent.await) });
    }

    /// Sends the answers that there is room for. Whether they are all.
    fn answer_some(&mut self) -> bool {
        while self.answers.try_join_next().is_some() {
            self.until = None;
        }
        while self.answers.len() < WAITING_MAX {
            let Some(asked) = self.unanswered.pop_front() else { return true };
            self.answer(asked);
        }
        self.unanswered.is_empty()
    }

    /// What comes next, while answers are taken. May be given up and begun again.
    async fn heard_next(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        loop {
            if self.answer_some() {
                self.until = None;
                return self.inner.receive().await;
            }
            let until = *self.until.get_or_insert_with(|| Instant::now() + TAKEN_TIME_MAX);
            let is_full = self.unanswered.len() >= UNANSWERED_MAX;
            tokio::select! {
                biased;
                _ = self.answers.join_next() => self.until = None,
                message = self.inner.receive(), if !is_full => return message,
                () = sleep_until(until), if is_full => {
                    tracing::warn!("a tool server asks and takes no answer: it is hung up on");
                    return None;
                }
            }
        }
    }

    /// The next message that is the library's to read. May be given up and begun again.
    async fn next(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        loop {
            // Many come with one read, and a server that talks without end is to leave the
            // thread to others as if each were one.
            consume_budget().await;
            let message = self.heard_next().await?;
            self.heard.said_something();
            if let JsonRpcMessage::Request(asked) = message {
                let is_ping = matches!(asked.request, ServerRequest::PingRequest(_));
                let is_long =
                    matches!(&asked.id, RequestId::String(id) if id.len() > NUMBER_BYTES_MAX);
                if !is_long {
                    self.unanswered.push_back(Asked { id: asked.id, is_ping });
                }
                continue;
            }
            if let JsonRpcMessage::Notification(said) = &message {
                let said = &said.notification;
                if matches!(said, ServerNotification::ToolListChangedNotification(_)) {
                    self.heard.changed();
                }
                if !is_for_the_library(said) {
                    continue;
                }
            }
            return Some(message);
        }
    }
}

/// Whether the library goes by it: it ends a subscription, is of one, or says that what the
/// library may have kept is no longer so.
fn is_for_the_library(said: &ServerNotification) -> bool {
    let is_kept = matches!(
        said,
        ServerNotification::CancelledNotification(_)
            | ServerNotification::ToolListChangedNotification(_)
            | ServerNotification::ResourceListChangedNotification(_)
            | ServerNotification::ResourceUpdatedNotification(_)
    );
    is_kept || said.get_meta().subscription_id().is_some()
}

impl<T: Transport<RoleClient>> Transport<RoleClient> for Declined<T> {
    type Error = T::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = Result<(), T::Error>> + Send + 'static {
        self.inner.send(message)
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        let message = self.next().await;
        if message.is_none() {
            self.heard.end();
        }
        message
    }

    fn close(&mut self) -> impl Future<Output = Result<(), T::Error>> + Send {
        // Before what may wait for a server that takes nothing.
        self.heard.end();
        self.answers.abort_all();
        let closed = timeout(CLOSE_TIME_MAX, self.inner.close());
        async move { closed.await.unwrap_or(Ok(())) }
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::io;

    use serde_json::{Value, json};

    use super::*;

    /// A server that says the same so often, and is never waited for.
    struct Says {
        what: Value,
        left: u32,
    }

    impl Transport<RoleClient> for Says {
        type Error = io::Error;

        fn send(
            &mut self,
            _: TxJsonRpcMessage<RoleClient>,
        ) -> impl Future<Output = io::Result<()>> + Send + 'static {
            ready(Ok(()))
        }

        async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
            self.left = self.left.checked_sub(1)?;
            Some(serde_json::from_value(self.what.clone()).unwrap())
        }

        async fn close(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn says(method: &str, params: Value, left: u32) -> Declined<Says> {
        let what = json!({ "jsonrpc": "2.0", "method": method, "params": params });
        Declined::new(Says { what, left }, Arc::default())
    }

    #[tokio::test]
    async fn a_server_that_talks_without_end_is_heard_by_nobody_and_leaves_the_thread_to_others() {
        let others = tokio::spawn(async {});
        let log = json!({ "level": "info", "data": "on and on" });
        let mut server = says("notifications/message", log, 1_000);
        assert!(server.receive().await.is_none(), "the library heard of it");
        assert!(others.is_finished(), "nobody else had a turn");
        assert!(server.heard.last().is_some());
    }

    #[tokio::test]
    async fn what_the_library_goes_by_goes_on_to_it() {
        let of_one = json!({ "io.modelcontextprotocol/subscriptionId": 7 });
        for (method, params, changes) in [
            ("notifications/tools/list_changed", json!({}), 1),
            ("notifications/cancelled", json!({ "requestId": 7 }), 0),
            ("notifications/message", json!({ "level": "info", "data": 1, "_meta": of_one }), 0),
        ] {
            let mut server = says(method, params, 1);
            assert!(server.receive().await.is_some(), "{method}");
            assert_eq!(server.heard.changes(), changes, "{method}");
        }
    }
}
