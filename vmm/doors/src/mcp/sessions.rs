//! Sessions of one principal over HTTP: rmcp's own, and no more than so many.
//!
//! rmcp takes a second request of an id that is not answered, and loses the first
//! one's answer; and it begins each stream with an event without data, which
//! clients before 2025-11-25 take for a message. Neither is so here.

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use futures_core::Stream;
use rmcp::model::{
    ClientJsonRpcMessage, ErrorData, ProtocolVersion, RequestId, ServerJsonRpcMessage, ServerResult,
};
use rmcp::transport::streamable_http_server::session::local::{
    LocalSessionManager, LocalSessionManagerError,
};
use rmcp::transport::streamable_http_server::session::{
    ServerSseMessage, SessionId, SessionManager,
};

/// Sessions that one principal may have. One that nothing comes on ends after
/// five minutes.
pub(super) const SESSIONS_MAX: usize = 64;

/// Requests of one session whose answer nobody was given.
const OPEN_MAX: usize = 1024;

pub(super) struct Sessions {
    sessions: LocalSessionManager,
    known: Mutex<HashMap<SessionId, Known>>,
}

/// What is known of one.
#[derive(Clone, Default)]
struct Known {
    /// Its client knows events without data.
    is_primed: bool,
    /// Requests whose answer nobody was given. One whose client went away is
    /// among them until it is fetched: it goes on, and rmcp would give its answer
    /// to another of its id.
    open: Arc<Mutex<HashSet<RequestId>>>,
}

/// A request that is open, unless it comes to nothing before it is with its
/// session: then there is no answer that another of its id could be given.
struct Opening<'a> {
    of: &'a Known,
    id: Option<RequestId>,
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        if let Some(id) = &self.id {
            lock(&self.of.open).remove(id);
        }
    }
}

/// What the locks guard is whole between any two statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a session says on one stream.
struct Told {
    /// Said first, and nothing after it.
    refusal: Option<ServerSseMessage>,
    stream: Option<Pin<Box<dyn Stream<Item = ServerSseMessage> + Send + Sync>>>,
    of: Known,
    /// The request that it answers.
    answers: Option<RequestId>,
}

impl Told {
    fn over(
        stream: impl Stream<Item = ServerSseMessage> + Send + Sync + 'static,
        of: Known,
        answers: Option<RequestId>,
    ) -> Self {
        Self { refusal: None, stream: Some(Box::pin(stream)), of, answers }
    }

    fn refused(error: ErrorData) -> Self {
        let refusal = ServerSseMessage::from_message(ServerJsonRpcMessage::error(error, None));
        Self { refusal: Some(refusal), stream: None, of: Known::default(), answers: None }
    }
}

impl Stream for Told {
    type Item = ServerSseMessage;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<ServerSseMessage>> {
        if let Some(refusal) = self.refusal.take() {
            return Poll::Ready(Some(refusal));
        }
        let Self { stream: Some(stream), of, answers, .. } = &mut *self else {
            return Poll::Ready(None);
        };
        loop {
            let said = stream.as_mut().poll_next(context);
            let answered = match &said {
                Poll::Ready(Some(event)) => match event.message.as_deref() {
                    None if !of.is_primed => continue,
                    Some(ServerJsonRpcMessage::Response(response)) => Some(&response.id),
                    Some(ServerJsonRpcMessage::Error(error)) => error.id.as_ref(),
                    _ => None,
                },
                // It was cancelled.
                Poll::Ready(None) => answers.as_ref(),
                Poll::Pending => None,
            };
            if let Some(id) = answered {
                lock(&of.open).remove(id);
            }
            return said;
        }
    }
}

/// Why a session does not do what it should.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionsError {
    #[error("{SESSIONS_MAX} sessions are open: end one")]
    Full,
    #[error(transparent)]
    Session(#[from] LocalSessionManagerError),
}

impl Sessions {
    pub(super) fn new(sessions: LocalSessionManager) -> Self {
        Self { sessions, known: Mutex::default() }
    }

    fn known(&self, id: &SessionId) -> Known {
        lock(&self.known).get(id).cloned().unwrap_or_default()
    }

    /// Whether there is no room for another.
    pub(super) async fn is_full(&self) -> bool {
        self.sessions.sessions.read().await.len() >= SESSIONS_MAX
    }
}

type Message = ClientJsonRpcMessage;

impl SessionManager for Sessions {
    type Error = SessionsError;
    type Transport = <LocalSessionManager as SessionManager>::Transport;

    async fn create_session(&self) -> Result<(SessionId, Self::Transport), SessionsError> {
        if self.is_full().await {
            return Err(SessionsError::Full);
        }
        {
            // Those that ended by themselves.
            let there = self.sessions.sessions.read().await;
            lock(&self.known).retain(|id, _| there.contains_key(id));
        }
        let (id, transport) = self.sessions.create_session().await?;
        // rmcp ends what it was given: nothing may be waited for from here on.
        lock(&self.known).insert(id.clone(), Known::default());
        Ok((id, transport))
    }

    async fn initialize_session(
        &self,
        id: &SessionId,
        message: Message,
    ) -> Result<ServerJsonRpcMessage, SessionsError> {
        let answer = self.sessions.initialize_session(id, message).await?;
        if let ServerJsonRpcMessage::Response(response) = &answer
            && let ServerResult::InitializeResult(initialized) = &response.result
            && let Some(known) = lock(&self.known).get_mut(id)
        {
            known.is_primed = initialized.protocol_version >= ProtocolVersion::V_2025_11_25;
        }
        Ok(answer)
    }

    async fn has_session(&self, id: &SessionId) -> Result<bool, SessionsError> {
        Ok(self.sessions.has_session(id).await?)
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), SessionsError> {
        lock(&self.known).remove(id);
        Ok(self.sessions.close_session(id).await?)
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        message: Message,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, SessionsError> {
        let known = self.known(id);
        let answers = match &message {
            ClientJsonRpcMessage::Request(request) => Some(request.id.clone()),
            _ => None,
        };
        if let Some(id) = &answers {
            let mut open = lock(&known.open);
            let refusal = if open.contains(id) {
                // Nobody could tell the two answers apart.
                Some("a request of this id is not answered yet")
            } else if open.len() >= OPEN_MAX {
                Some("too many requests of this session were broken off: begin another")
            } else {
                open.insert(id.clone());
                None
            };
            if let Some(what) = refusal {
                return Ok(Told::refused(ErrorData::invalid_request(what, None)));
            }
        }
        let mut opening = Opening { of: &known, id: answers };
        let stream = self.sessions.create_stream(id, message).await?;
        let answers = opening.id.take();
        drop(opening);
        Ok(Told::over(stream, known, answers))
    }

    async fn accept_message(&self, id: &SessionId, message: Message) -> Result<(), SessionsError> {
        Ok(self.sessions.accept_message(id, message).await?)
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, SessionsError> {
        let stream = self.sessions.create_standalone_stream(id).await?;
        Ok(Told::over(stream, self.known(id), None))
    }

    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, SessionsError> {
        let stream = self.sessions.resume(id, last_event_id).await?;
        Ok(Told::over(stream, self.known(id), None))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn a_request_that_no_session_was_given_leaves_its_id_free() {
        let sessions = Sessions::new(LocalSessionManager::default());
        let (id, transport) = sessions.create_session().await.unwrap();
        let known = sessions.known(&id);
        let ask = || {
            let request = json!({"jsonrpc": "2.0", "id": 7, "method": "ping"});
            let message = serde_json::from_value(request).unwrap();
            sessions.create_stream(&id, message)
        };
        // Its client leaves while the session has no ear for it.
        let left = tokio::time::timeout(std::time::Duration::ZERO, ask()).await;
        assert!(left.is_err() && lock(&known.open).is_empty());
        // It is over.
        drop(transport);
        assert!(ask().await.is_err());
        assert!(lock(&known.open).is_empty());
    }
}
