//! The service's end of the socket.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forge_protocol::frame::Kind;
use forge_protocol::handshake::Role;
use forge_protocol::service::{Finished, Submit};

use super::{decode, greet, send};
use crate::link::{Link, Patience};
use crate::supervisor::{RunRequest, Supervisor};

/// Connections at a time. One more is closed at once.
const CONNECTIONS_MAX: usize = 1024;
/// How long a client may take to say hello.
const GREETING_TIME_MAX: Duration = Duration::from_secs(10);

/// A service that listens.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    path: PathBuf,
}

impl Server {
    /// Listens at this path, for the owner of this process alone. A socket
    /// that a dead service left there is replaced.
    ///
    /// # Errors
    /// `AddrInUse` if a service answers there already or something else lies
    /// there; else what the kernel said.
    pub fn bind(path: &Path) -> io::Result<Self> {
        match UnixListener::bind(path) {
            Ok(listener) => Self::over(listener, path),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                let is_socket = path.symlink_metadata()?.file_type().is_socket();
                if !is_socket || UnixStream::connect(path).is_ok() {
                    return Err(error);
                }
                std::fs::remove_file(path)?;
                Self::over(UnixListener::bind(path)?, path)
            }
            Err(error) => Err(error),
        }
    }

    fn over(listener: UnixListener, path: &Path) -> io::Result<Self> {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Ok(Self { listener, path: path.to_owned() })
    }

    /// Serves until the socket fails.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn serve(&self, supervisor: &Arc<Supervisor>) -> io::Result<()> {
        let connections = Arc::new(AtomicUsize::new(0));
        loop {
            let socket = match self.listener.accept() {
                Ok((socket, _)) => socket,
                // The client left, or a signal came.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted
                    ) =>
                {
                    continue;
                }
                Err(error) => return Err(error),
            };
            if connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
                connections.fetch_sub(1, Ordering::Relaxed);
                tracing::warn!("a connection beyond {CONNECTIONS_MAX} is closed");
                continue;
            }
            let (supervisor, guard) = (Arc::clone(supervisor), Arc::clone(&connections));
            let thread = std::thread::Builder::new().name("client".into());
            let started = thread.spawn(move || {
                if let Err(error) = converse(socket, &supervisor) {
                    tracing::debug!(%error, "a client's connection ends");
                }
                guard.fetch_sub(1, Ordering::Relaxed);
            });
            if let Err(error) = started {
                connections.fetch_sub(1, Ordering::Relaxed);
                tracing::warn!(%error, "no thread for a client");
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// One connection's whole life.
fn converse(socket: UnixStream, supervisor: &Supervisor) -> io::Result<()> {
    let client = socket.try_clone()?;
    let mut link = Link::new(socket);
    let patience = Patience::until(Instant::now() + GREETING_TIME_MAX);
    greet(&mut link, Role::Supervisor, Role::Client, patience)?;
    loop {
        let frame = match link.receive(|kind| kind == Kind::Submit, Patience::default()) {
            Ok(frame) => frame,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        };
        let Submit { program, input, principal, session, authority, limits, prepare } =
            decode(&frame)?;
        let request = RunRequest { program, input, principal, session, authority, limits, prepare };
        let result = supervisor.run_for(&request, Some(client.as_fd()));
        let report = serde_json::to_vec(&result.report)?;
        send(&mut link, Kind::Finished, &Finished { report, artifacts: result.artifacts })?;
    }
}
