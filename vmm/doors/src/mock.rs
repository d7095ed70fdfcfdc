//! The service behind a door, in tests: it says what it is told to, and hears
//! what it is asked for.

use forge_protocol::codec::Encode;
use forge_protocol::frame::{self, Kind};
use forge_protocol::handshake::{Hello, Role};
use forge_protocol::service::{Answered, Reply};
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixStream;

pub(crate) struct Service(UnixStream);

impl Service {
    /// One that has said hello, and the door's end of its connection.
    pub(crate) async fn new() -> (Self, UnixStream) {
        let (ours, doors) = UnixStream::pair().unwrap();
        let mut service = Self(ours);
        service.say(Kind::Hello, &Hello::ours(Role::Supervisor)).await;
        (service, doors)
    }

    pub(crate) async fn answer(&mut self, number: u64, reply: Reply) {
        self.say(Kind::Answered, &Answered { number, reply }).await;
    }

    /// Waits for the next frame of this kind.
    #[cfg(feature = "http")]
    pub(crate) async fn hear(&mut self, kind: Kind) {
        use tokio::io::AsyncReadExt as _;
        loop {
            let mut header = [0; frame::HEADER_BYTES];
            self.0.read_exact(&mut header).await.unwrap();
            let header = frame::Header::from_bytes(header).unwrap();
            let mut payload = vec![0; header.payload_bytes as usize];
            self.0.read_exact(&mut payload).await.unwrap();
            if header.kind == kind {
                return;
            }
        }
    }

    pub(crate) async fn say<T: Encode>(&mut self, kind: Kind, message: &T) {
        let mut bytes = Vec::new();
        frame::write_message(kind, message, &mut bytes);
        self.0.write_all(&bytes).await.unwrap();
    }
}
