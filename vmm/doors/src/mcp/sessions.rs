//! Sessions of one principal over HTTP: rmcp's own, and no more than so many.

use futures_core::Stream;
use rmcp::model::{ClientJsonRpcMessage, ServerJsonRpcMessage};
use rmcp::transport::streamable_http_server::session::local::{
    LocalSessionManager, LocalSessionManagerError,
};
use rmcp::transport::streamable_http_server::session::{
    ServerSseMessage, SessionId, SessionManager,
};

/// Sessions that one principal may have. One that nothing comes on ends after
/// five minutes.
pub(super) const SESSIONS_MAX: usize = 64;

pub(super) struct Sessions(LocalSessionManager);

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
        Self(sessions)
    }

    /// Whether there is no room for another.
    pub(super) async fn is_full(&self) -> bool {
        self.0.sessions.read().await.len() >= SESSIONS_MAX
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
        Ok(self.0.create_session().await?)
    }

    async fn initialize_session(
        &self,
        id: &SessionId,
        message: Message,
    ) -> Result<ServerJsonRpcMessage, SessionsError> {
        Ok(self.0.initialize_session(id, message).await?)
    }

    async fn has_session(&self, id: &SessionId) -> Result<bool, SessionsError> {
        Ok(self.0.has_session(id).await?)
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), SessionsError> {
        Ok(self.0.close_session(id).await?)
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        message: Message,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, SessionsError> {
        Ok(self.0.create_stream(id, message).await?)
    }

    async fn accept_message(&self, id: &SessionId, message: Message) -> Result<(), SessionsError> {
        Ok(self.0.accept_message(id, message).await?)
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, SessionsError> {
        Ok(self.0.create_standalone_stream(id).await?)
    }

    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, SessionsError> {
        Ok(self.0.resume(id, last_event_id).await?)
    }
}
