//! A client's end of the socket.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use forge_protocol::frame::Kind;
use forge_protocol::handshake::Role;
use forge_protocol::service::{Finished, Submit};

use super::{decode, greet, send};
use crate::link::{Link, Patience};

/// How long a service may take to say hello.
const GREETING_TIME_MAX: Duration = Duration::from_secs(10);

/// A connection to a service. It carries one run at a time.
#[derive(Debug)]
pub struct Client(Link);

impl Client {
    /// Connects to the service that listens at this path.
    ///
    /// # Errors
    /// What the kernel said; `InvalidData` if it is another release's.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let mut link = Link::new(UnixStream::connect(path)?);
        let patience = Patience::until(Instant::now() + GREETING_TIME_MAX);
        greet(&mut link, Role::Client, Role::Supervisor, patience)?;
        Ok(Self(link))
    }

    /// Submits a run and waits for its end.
    ///
    /// # Errors
    /// If the service is gone. A run that ends badly is no error: its report
    /// says how.
    pub fn run(&mut self, submit: &Submit) -> io::Result<Finished> {
        send(&mut self.0, Kind::Submit, submit)?;
        let frame = self.0.receive(|kind| kind == Kind::Finished, Patience::default())?;
        decode(&frame)
    }
}
