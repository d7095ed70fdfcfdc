//! Sessions of one principal over HTTP: rmcp's own, and no more than so many.
//!
//! rmcp takes a second request of an id that is not answered, and loses the first
//! one's answer; it begins each stream with an event without data, which clients
//! before 2025-11-25 take for a message; and to whoever comes back it says the last
//! event again, and no answer that came meanwhile. None of it is so here.

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use futures_core::Stream;
use rmcp::model::{
    ClientJsonRpcMessage, ErrorData, GetExtensions as _, ProtocolVersion, RequestId,
    ServerJsonRpcMessage, ServerResult,
};
use rmcp::transport::streamable_http_server::session::local::{
    LocalSessionManager, LocalSessionManagerError, SessionError,
};
use rmcp::transport::streamable_http_server::session::{
    ServerSseMessage, SessionId, SessionManager,
};

use super::kept::{Ahead, Kept};
use crate::locks::lock;

/// Sessions that one principal may have. Clients come back to theirs after any time,
/// and some never take up another: none ends by itself.
pub(super) const SESSIONS_MAX: usize = 64;
/// For how long one has been silent that gives way to another where there is no room.
const SILENT_TIME: Duration = Duration::from_secs(300);
/// The same of one whose client listened last and does no more: it went away, as some do
/// that end no session, or comes back at once.
const LEFT_TIME: Duration = Duration::from_secs(10);

/// Requests of one session that are not answered.
const OPEN_MAX: usize = 1024;

pub(super) struct Sessions {
    sessions: LocalSessionManager,
    known: Mutex<HashMap<SessionId, Known>>,
    kept: Arc<Kept>,
}

/// What is known of one.
#[derive(Clone)]
struct Known {
    /// Its client knows events without data.
    is_primed: bool,
    /// Requests that are not answered. One whose client went away is among them:
    /// it goes on, and rmcp would give its answer to another of its id.
    open: Arc<Mutex<HashSet<RequestId>>>,
    silence: Arc<Mutex<Silence>>,
    /// Each stream of what it says unasked has it as well.
    listened: Arc<()>,
}

/// Since when a session is silent.
struct Silence {
    /// When something came on it last, or a stream of what it says unasked ended.
    since: Instant,
    /// It was such a stream that ended: its client went away, or comes back at once.
    left: bool,
}

impl Default for Known {
    fn default() -> Self {
        let (is_primed, open, listened) = Default::default();
        let silence = Arc::new(Mutex::new(Silence { since: Instant::now(), left: false }));
        Self { is_primed, open, silence, listened }
    }
}

impl Known {
    /// When it will have been silent for so long that it gives way to another. Not while
    /// anybody waits for anything that it says.
    fn gives_way_in(&self, now: Instant) -> Option<Duration> {
        let is_waited_for = Arc::strong_count(&self.listened) > 1 || !lock(&self.open).is_empty();
        let Silence { since, left } = *lock(&self.silence);
        let time = if left { LEFT_TIME } else { SILENT_TIME };
        (!is_waited_for).then(|| time.saturating_sub(now.saturating_duration_since(since)))
    }

    fn since(&self) -> Instant {
        lock(&self.silence).since
    }
}

/// A stream of what a session says unasked.
struct Listens {
    silence: Arc<Mutex<Silence>>,
    _listened: Arc<()>,
}

impl Drop for Listens {
    fn drop(&mut self) {
        *lock(&self.silence) = Silence { since: Instant::now(), left: true };
    }
}

/// A request that is open, until it is answered or comes to nothing, and is carried
/// out no more: one that is cancelled goes on for a while.
struct Opening {
    open: Arc<Mutex<HashSet<RequestId>>>,
    id: RequestId,
}

impl Drop for Opening {
    fn drop(&mut self) {
        lock(&self.open).remove(&self.id);
    }
}

/// What a session says on one stream.
struct Told {
    /// Said first, and nothing after it.
    refusal: Option<ServerSseMessage>,
    stream: Option<Pin<Box<dyn Stream<Item = ServerSseMessage> + Send + Sync>>>,
    is_primed: bool,
    /// While it is what a session says unasked.
    _listens: Option<Listens>,
}

impl Told {
    fn over(
        stream: impl Stream<Item = ServerSseMessage> + Send + Sync + 'static,
        is_primed: bool,
    ) -> Self {
        Self { refusal: None, stream: Some(Box::pin(stream)), is_primed, _listens: None }
    }

    fn refused(error: ErrorData, id: Option<RequestId>) -> Self {
        let refusal = ServerSseMessage::from_message(ServerJsonRpcMessage::error(error, id));
        Self { refusal: Some(refusal), stream: None, is_primed: false, _listens: None }
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
        let Self { stream: Some(stream), is_primed, .. } = &mut *self else {
            return Poll::Ready(None);
        };
        loop {
            match ready!(stream.as_mut().poll_next(context)) {
                Some(event) if event.message.is_none() && !*is_primed => {}
                said => return Poll::Ready(said),
            }
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
    pub(super) fn new(mut sessions: LocalSessionManager) -> Self {
        sessions.session_config.keep_alive = None;
        Self { sessions, known: Mutex::default(), kept: Arc::default() }
    }

    /// What is known of a session that something comes on now.
    fn known(&self, id: &SessionId) -> Known {
        let all = lock(&self.known);
        let Some(known) = all.get(id) else { return Known::default() };
        *lock(&known.silence) = Silence { since: Instant::now(), left: false };
        known.clone()
    }

    /// The session that has been silent for longest, if it gives way to another.
    fn silent(&self, now: Instant) -> Option<SessionId> {
        let all = lock(&self.known);
        let silent =
            all.iter().filter(|(_, known)| known.gives_way_in(now) == Some(Duration::ZERO));
        silent.min_by_key(|(_, known)| known.since()).map(|(id, _)| Arc::clone(id))
    }

    /// When the first may give way, if nobody takes it up before.
    pub(super) fn room_in(&self, now: Instant) -> Duration {
        let all = lock(&self.known);
        all.values().filter_map(|known| known.gives_way_in(now)).min().unwrap_or(SILENT_TIME)
    }

    /// A stream of what this session says unasked begins.
    fn listens(&self, id: &SessionId) -> Listens {
        let Known { silence, listened, .. } = self.known(id);
        Listens { silence, _listened: listened }
    }

    /// Whether all requests are answered, and the answers with whoever waits.
    pub(super) fn is_quiet(&self) -> bool {
        self.kept.is_quiet()
    }

    /// What is ahead of a client that has heard this event. Numbers alone are of what is
    /// said unasked, which goes on.
    pub(super) fn ahead(&self, id: &SessionId, last_event_id: &str) -> Ahead {
        match last_event_id.parse::<usize>() {
            Ok(_) => Ahead::More,
            Err(_) => self.kept.ahead(id, last_event_id),
        }
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
            let silent = self.silent(Instant::now()).ok_or(SessionsError::Full)?;
            self.close_session(&silent).await?;
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
        self.kept.forget(id);
        Ok(self.sessions.close_session(id).await?)
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        mut message: Message,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, SessionsError> {
        let known = self.known(id);
        let request = match &message {
            ClientJsonRpcMessage::Request(request) => Some(request.id.clone()),
            _ => None,
        };
        let mut opening = None;
        if let Some(id) = request {
            let mut open = lock(&known.open);
            if open.contains(&id) {
                // Nobody could tell the two answers apart.
                let what = "a request of this id is not answered yet";
                return Ok(Told::refused(ErrorData::invalid_request(what, None), None));
            }
            if open.len() >= OPEN_MAX {
                let what = "too many requests of this session are not answered: cancel some";
                return Ok(Told::refused(ErrorData::invalid_request(what, None), Some(id)));
            }
            open.insert(id.clone());
            opening = Some(Arc::new(Opening { open: Arc::clone(&known.open), id }));
        }
        if let ClientJsonRpcMessage::Request(request) = &mut message
            && let Some(opening) = &opening
        {
            // rmcp has it for as long as the request is carried out.
            request.request.extensions_mut().insert(Arc::clone(opening));
        }
        let stream = self.sessions.create_stream(id, message).await?;
        let listener = self.kept.begin(Arc::clone(id), stream, move || drop(opening));
        Ok(Told::over(listener, known.is_primed))
    }

    async fn accept_message(&self, id: &SessionId, message: Message) -> Result<(), SessionsError> {
        self.known(id);
        Ok(self.sessions.accept_message(id, message).await?)
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, SessionsError> {
        let stream = self.sessions.create_standalone_stream(id).await?;
        let is_primed = self.known(id).is_primed;
        Ok(Told { _listens: Some(self.listens(id)), ..Told::over(stream, is_primed) })
    }

    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, SessionsError> {
        let is_primed = self.known(id).is_primed;
        if let Some(listener) = self.kept.resume(id, &last_event_id) {
            return Ok(Told::over(listener, is_primed));
        }
        // rmcp numbers requests otherwise, and would give another one's stream away.
        if last_event_id.contains('/') {
            return Err(LocalSessionManagerError::from(SessionError::InvalidEventId).into());
        }
        // Of what is said unasked rmcp begins with the event that is named.
        let after = match last_event_id.parse::<usize>() {
            Ok(last) => last.saturating_add(1).to_string(),
            Err(_) => last_event_id,
        };
        let stream = self.sessions.resume(id, after).await?;
        Ok(Told { _listens: Some(self.listens(id)), ..Told::over(stream, is_primed) })
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

    #[tokio::test]
    async fn the_id_of_a_cancelled_request_is_in_use_until_that_is_over() {
        let sessions = Sessions::new(LocalSessionManager::default());
        let (id, _transport) = sessions.create_session().await.unwrap();
        let open = || Opening { open: sessions.known(&id).open, id: RequestId::Number(7) };
        lock(&sessions.known(&id).open).insert(RequestId::Number(7));
        let opening = Arc::new(open());
        let carried = Arc::clone(&opening);
        drop(opening);
        assert!(lock(&sessions.known(&id).open).contains(&RequestId::Number(7)));
        drop(carried);
        assert!(lock(&sessions.known(&id).open).is_empty());
    }

    #[tokio::test]
    async fn a_silent_session_gives_way_and_one_that_is_listened_to_does_not() {
        let sessions = Sessions::new(LocalSessionManager::default());
        let mut transports = Vec::new();
        let mut ids = Vec::new();
        for _ in 0..SESSIONS_MAX {
            let (id, transport) = sessions.create_session().await.unwrap();
            ids.push(id);
            transports.push(transport);
        }
        let now = Instant::now();
        assert_eq!(sessions.silent(now), None);
        let later = now + SILENT_TIME;
        assert_eq!(sessions.silent(later).as_ref(), Some(&ids[0]));
        // Something came on it, is asked on it, or somebody listens.
        let Known { open, listened, .. } = sessions.known(&ids[1]);
        lock(&open).insert(RequestId::Number(1));
        let _listened = (listened, sessions.known(&ids[2]).listened);
        let since = |at: usize, since| {
            let silence = Arc::clone(&lock(&sessions.known)[&ids[at]].silence);
            lock(&silence).since = since;
        };
        since(0, later);
        assert_eq!(sessions.silent(later).as_ref(), Some(&ids[3]));
        assert!(matches!(sessions.create_session().await, Err(SessionsError::Full)));
        since(3, now - SILENT_TIME);
        sessions.create_session().await.unwrap();
        assert!(!sessions.has_session(&ids[3]).await.unwrap());
        // One whose client has left may be taken up again for a little while: from then on,
        // however long it had listened.
        let listens = sessions.listens(&ids[4]);
        since(4, now - SILENT_TIME);
        assert_eq!(sessions.silent(now), None);
        drop(listens);
        let left = lock(&sessions.known)[&ids[4]].since();
        assert!(left >= now);
        assert_eq!(sessions.room_in(left), LEFT_TIME);
        assert_eq!(sessions.silent(left + LEFT_TIME / 2), None);
        assert_eq!(sessions.silent(left + LEFT_TIME).as_ref(), Some(&ids[4]));
        // A message by itself is no sign that it will listen again.
        sessions.known(&ids[4]);
        assert_eq!(sessions.silent(left + 2 * LEFT_TIME), None);
    }

    #[test]
    fn a_session_that_owes_an_answer_or_is_listened_to_gives_way_to_none() {
        let later = Instant::now() + 2 * SILENT_TIME;
        let gives_way = |known: &Known| known.gives_way_in(later).is_some();
        let known = Known::default();
        assert!(gives_way(&known));
        lock(&known.open).insert(RequestId::Number(1));
        assert!(!gives_way(&known));
        lock(&known.open).clear();
        let listened = Arc::clone(&known.listened);
        assert!(!gives_way(&known));
        drop(listened);
        assert!(gives_way(&known));
    }

    #[tokio::test]
    async fn a_request_of_an_id_that_is_open_and_one_too_many_are_refused_at_once() {
        let sessions = Sessions::new(LocalSessionManager::default());
        let (id, _transport) = sessions.create_session().await.unwrap();
        let refused = async |number: usize| {
            let request = json!({"jsonrpc": "2.0", "id": number, "method": "ping"});
            let message = serde_json::from_value(request).unwrap();
            // Nobody has an ear for one that is not refused.
            let asked = sessions.create_stream(&id, message);
            let asked = tokio::time::timeout(Duration::from_secs(1), asked).await;
            let mut stream = Box::pin(asked.ok()?.unwrap());
            let said = std::future::poll_fn(|context| stream.as_mut().poll_next(context)).await;
            match said?.message.as_deref()? {
                ServerJsonRpcMessage::Error(error) => Some(error.error.message.to_string()),
                _ => None,
            }
        };
        let open = sessions.known(&id).open;
        lock(&open).insert(RequestId::Number(7));
        assert!(refused(7).await.unwrap().contains("not answered yet"));
        assert_eq!(refused(8).await, None);
        lock(&open).extend((0..OPEN_MAX as i64).map(RequestId::Number));
        assert!(refused(OPEN_MAX).await.unwrap().contains("too many requests"));
    }
}
