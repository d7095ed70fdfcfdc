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
    client: Mutex<Option<Client>>,
}

impl ServiceLink {
    /// The service that listens at this path.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn at(socket: PathBuf) -> Result<Self, ClientError> {
        let client = Client::connect(&socket).await?;
        Ok(Self { socket: Some(socket), client: Mutex::new(Some(client)) })
    }

    /// The service at the other end of this connection.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn over(connection: UnixStream) -> Result<Self, ClientError> {
        let client = Client::over(connection).await?;
        Ok(Self { socket: None, client: Mutex::new(Some(client)) })
    }

    pub(super) async fn ask(&self, question: Question) -> Result<Reply, ClientError> {
        let answer = self.client().await?.ask(question).await;
        self.heard(&answer).await;
        answer
    }

    pub(super) async fn submit(&self, order: &Order) -> Result<Run, ClientError> {
        let run = self.client().await?.submit(order).await;
        self.heard(&run).await;
        run
    }

    async fn client(&self) -> Result<Client, ClientError> {
        let mut client = self.client.lock().await;
        match (&*client, &self.socket) {
            (Some(client), _) => Ok(client.clone()),
            (None, Some(socket)) => {
                let again = Client::connect(socket).await?;
                *client = Some(again.clone());
                Ok(again)
            }
            (None, None) => Err(std::io::Error::from(std::io::ErrorKind::NotConnected).into()),
        }
    }

    /// A connection that is lost is made anew for whoever comes next.
    async fn heard<T>(&self, answer: &Result<T, ClientError>) {
        if let Err(ClientError::Connection(_) | ClientError::Protocol(_)) = answer {
            *self.client.lock().await = None;
        }
    }
}
