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
//! What must not be missed is noted here too ([`Heard`]), before the library
//! makes anything of it. It tells its handler at some time that tools changed,
//! which may be after the answer that came behind, and a call in between would
//! go by a definition that the server has said is gone. And not every request
//! is told of the server's end.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rmcp::RoleClient;
use rmcp::model::{
    ClientResult, ErrorCode, ErrorData, JsonRpcMessage, RequestId, ServerNotification,
    ServerRequest,
};
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

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
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn said_something(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
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

    /// The next message that is the library's to read.
    async fn next(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        loop {
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
            if let JsonRpcMessage::Notification(said) = &message
                && matches!(said.notification, ServerNotification::ToolListChangedNotification(_))
            {
                self.heard.changed();
            }
            return Some(message);
        }
    }
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
        self.inner.close()
    }
}
