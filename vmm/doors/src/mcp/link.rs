//! The service behind the door.

use std::path::PathBuf;
use std::sync::Arc;

use forge_client::{Client, ClientError, Run};
use forge_protocol::limits::QUESTIONS_MAX;
use forge_protocol::service::{Order, Question, Reply};
use tokio::net::UnixStream;
use tokio::sync::{Mutex, Semaphore};

/// A connection to a service. One that listens is connected to again when it
/// was lost.
#[derive(Debug)]
pub struct ServiceLink {
    socket: Option<PathBuf>,
    client: Mutex<Client>,
    /// As many as a service answers at once on one connection. Sessions of all
    /// principals share it, and wait for their turn.
    questions: Arc<Semaphore>,
}

impl ServiceLink {
    /// The service that listens at this path.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn at(socket: PathBuf) -> Result<Self, ClientError> {
        let client = Client::connect(&socket).await?;
        Ok(Self::of(Some(socket), client))
    }

    /// The service at the other end of this connection.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn over(connection: UnixStream) -> Result<Self, ClientError> {
        let client = Client::over(connection).await?;
        Ok(Self::of(None, client))
    }

    fn of(socket: Option<PathBuf>, client: Client) -> Self {
        let questions = Arc::new(Semaphore::new(QUESTIONS_MAX));
        Self { socket, client: Mutex::new(client), questions }
    }

    /// Asks in turn. The turn, and the door's own place, are given back when the
    /// service has answered, also a question that is cancelled meanwhile: it has
    /// no room for another before.
    pub(super) async fn ask(
        &self,
        question: Question,
        place: impl Send + 'static,
    ) -> Result<Reply, ClientError> {
        let turn = Arc::clone(&self.questions).acquire_owned().await;
        self.client().await?.ask_holding(question, (place, turn)).await
    }

    /// How it stands, which no question keeps waiting.
    pub(super) async fn status(&self) -> Result<Reply, ClientError> {
        self.client().await?.ask(Question::Status).await
    }

    pub(super) async fn submit(&self, order: &Order) -> Result<Run, ClientError> {
        self.client().await?.submit(order).await
    }

    async fn client(&self) -> Result<Client, ClientError> {
        let mut client = self.client.lock().await;
        if let Some(socket) = &self.socket
            && client.is_closed()
        {
            *client = Client::connect(socket).await?;
        }
        Ok(client.clone())
    }
}
