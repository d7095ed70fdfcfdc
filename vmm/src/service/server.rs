//! The service's end of the socket.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forge_protocol::frame::Kind;
use forge_protocol::handshake::Role;
use forge_protocol::service::{Finish, Finished, Submit};

use super::{decode, greet, send};
use crate::link::{Link, Patience};
use crate::supervisor::Supervisor;

/// Connections at a time. One more is closed at once.
const CONNECTIONS_MAX: usize = 1024;
/// How long a client may take to say hello.
const GREETING_TIME_MAX: Duration = Duration::from_secs(10);

/// The socket that a signal shuts, or -1; and whether one did.
static LISTENS: AtomicI32 = AtomicI32::new(-1);
static ENDED: AtomicBool = AtomicBool::new(false);

/// A signal's handler: whoever accepts at the socket is told that it ended.
extern "C" fn end_listening(_: libc::c_int) {
    ENDED.store(true, Ordering::Release);
    let listens = LISTENS.load(Ordering::Acquire);
    // SAFETY: reads and restores `errno`, which is this thread's.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: a plain system call, which a handler may make; -1 is no socket.
    unsafe { libc::shutdown(listens, libc::SHUT_RDWR) };
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

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

    /// Has SIGTERM and SIGINT end [`Self::serve`], of the last server that asked
    /// for it. Without this they end the process, and the socket stays.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn end_by_signals(&self) -> io::Result<()> {
        LISTENS.store(self.listener.as_raw_fd(), Ordering::Release);
        for signal in [libc::SIGTERM, libc::SIGINT] {
            // SAFETY: all zero is a valid sigaction, with an empty mask.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_sigaction = end_listening as extern "C" fn(_) as usize;
            action.sa_flags = libc::SA_RESTART;
            // SAFETY: the action is whole, and its handler keeps to what
            // handlers may do.
            if unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }

    /// Serves until a signal ends it or the socket fails.
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
                // What a socket says that was shut down.
                Err(error)
                    if error.raw_os_error() == Some(libc::EINVAL)
                        && ENDED.load(Ordering::Acquire) =>
                {
                    return Ok(());
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
        let descriptor = self.listener.as_raw_fd();
        let _ = LISTENS.compare_exchange(descriptor, -1, Ordering::AcqRel, Ordering::Relaxed);
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Serves the client at the other end of this socket, until it leaves.
///
/// # Errors
/// What the kernel said.
pub fn serve_connection(socket: UnixStream, supervisor: &Arc<Supervisor>) -> io::Result<()> {
    converse(socket, supervisor)
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
        let Submit { number, order } = decode(&frame)?;
        let result = supervisor.run_for(&order, Some(client.as_fd()));
        let report = serde_json::to_vec(&result.report)?;
        let result = Finish { report, artifacts: result.artifacts };
        send(&mut link, Kind::Finished, &Finished { number, result })?;
    }
}
