//! The service behind the door.

use std::path::PathBuf;

use forge_client::{Client, ClientError, Run};
use forge_protocol::service::{Order, Question, Reply};
use tokio::net::UnixStream;
use tokio::sync::Mutex;

/// A connection to a service. One that listens is connected to again when it
/// was lost.
#[derive(Debug)]
pub struct ServiceLink {
    socket: Option<PathBuf>,
    client: Mutex<Client>,
}

impl ServiceLink {
    /// The service that listens at this path.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn at(socket: PathBuf) -> Result<Self, ClientError> {
        let client = Client::connect(&socket).await?;
        Ok(Self { socket: Some(socket), client: Mutex::new(client) })
    }

    /// The service at the other end of this connection.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn over(connection: UnixStream) -> Result<Self, ClientError> {
        let client = Client::over(connection).await?;
        Ok(Self { socket: None, client: Mutex::new(client) })
    }

    pub(super) async fn ask(&self, question: Question) -> Result<Reply, ClientError> {
        self.client().await?.ask(question).await
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
