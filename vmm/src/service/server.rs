//! The service's end of the socket, and its event loop: new connections,
//! connections that nobody reads, signals.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::Duration;

use vmm_sys_util::epoll::EpollEvent;
use vmm_sys_util::eventfd::EventFd;

use super::connection::Connection;
use super::{CONNECTIONS_MAX, Service, lock};
use crate::supervisor::Supervisor;

/// How long a client may take to say hello.
const GREETING_TIME_MAX: Duration = Duration::from_secs(10);
/// How often the loop looks at what no descriptor tells.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Descriptors that are looked at after one wait.
const EVENTS: usize = 64;
/// The loop's own numbers; connections count from 0.
const SIGNALS: u64 = u64::MAX;
const LISTENER: u64 = u64::MAX - 1;

/// Where signals are told, or -1; and how often the process was asked to end.
static SIGNALLED: AtomicI32 = AtomicI32::new(-1);
static ENDS_ASKED: AtomicU32 = AtomicU32::new(0);

/// A signal's handler: wakes the event loop.
extern "C" fn ask_to_end(_: libc::c_int) {
    ENDS_ASKED.fetch_add(1, Ordering::AcqRel);
    let event = SIGNALLED.load(Ordering::Acquire);
    let one = 1u64.to_ne_bytes();
    // SAFETY: reads and restores `errno`, which is this thread's.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: a plain system call on readable bytes, which a handler may make;
    // -1 is no descriptor.
    unsafe { libc::write(event, one.as_ptr().cast(), one.len()) };
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// A service that listens.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    path: PathBuf,
    signals: EventFd,
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
        listener.set_nonblocking(true)?;
        let signals = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        Ok(Self { listener, path: path.to_owned(), signals })
    }

    /// Has SIGTERM and SIGINT end [`Self::serve`], of the last server that asked
    /// for it. Without this they end the process, and the socket stays.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn end_by_signals(&self) -> io::Result<()> {
        SIGNALLED.store(self.signals.as_raw_fd(), Ordering::Release);
        for signal in [libc::SIGTERM, libc::SIGINT] {
            // SAFETY: all zero is a valid sigaction, with an empty mask.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_sigaction = ask_to_end as extern "C" fn(_) as usize;
            action.sa_flags = libc::SA_RESTART;
            // SAFETY: the action is whole, and its handler keeps to what
            // handlers may do.
            if unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }

    /// Serves until a signal or a client ends it, or the socket fails.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn serve(&self, supervisor: &Arc<Supervisor>) -> io::Result<()> {
        let service = Service::new(Arc::clone(supervisor), self.signals.try_clone()?)?;
        service.watch.always(self.listener.as_raw_fd(), LISTENER)?;
        service.watch.always(self.signals.as_raw_fd(), SIGNALS)?;
        let mut events = [EpollEvent::default(); EVENTS];
        let mut next = 0;
        loop {
            let waited = service.watch.0.wait(LOOK_EVERY.as_millis() as i32, &mut events);
            let happened = match waited {
                Ok(events_there) => &events[..events_there],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            for event in happened {
                match event.data() {
                    SIGNALS => {
                        let _ = self.signals.read();
                    }
                    LISTENER => self.accept(&service, &mut next)?,
                    number => service.attend_to(number),
                }
            }
            service.drop_the_silent();
            if ENDS_ASKED.load(Ordering::Acquire) > 0 || service.is_drained() {
                return Ok(());
            }
        }
    }

    /// Takes all who wait at the door.
    fn accept(&self, service: &Arc<Service>, next: &mut u64) -> io::Result<()> {
        loop {
            match self.listener.accept() {
                Ok((socket, _)) => {
                    service.welcome(*next, socket);
                    *next += 1;
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(()),
                    // The client left, or a signal came.
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => {}
                    _ if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                        // It waits at the door until there is a descriptor.
                        tracing::warn!(%error, "a client has to wait");
                        std::thread::sleep(Duration::from_millis(10));
                        return Ok(());
                    }
                    _ => return Err(error),
                },
            }
        }
    }
}

/// Serves the client at the other end of this socket, and no other: until it
/// has left and its runs are over, which are cancelled then.
///
/// # Errors
/// What the kernel said.
pub fn serve_connection(socket: UnixStream, supervisor: &Arc<Supervisor>) -> io::Result<()> {
    let wake = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
    let service = Service::new(Arc::clone(supervisor), wake)?;
    service.watch.always(service.wake.as_raw_fd(), SIGNALS)?;
    service.welcome(0, socket);
    let mut events = [EpollEvent::default(); EVENTS];
    while !lock(&service.connections).is_empty() || service.is_busy() {
        match service.watch.0.wait(LOOK_EVERY.as_millis() as i32, &mut events) {
            Ok(there) => {
                for event in &events[..there] {
                    match event.data() {
                        SIGNALS => {
                            let _ = service.wake.read();
                        }
                        number => service.attend_to(number),
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        service.drop_the_silent();
    }
    Ok(())
}

impl Drop for Server {
    fn drop(&mut self) {
        let event = self.signals.as_raw_fd();
        let _ = SIGNALLED.compare_exchange(event, -1, Ordering::AcqRel, Ordering::Relaxed);
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Connections by their numbers.
pub(super) type Connections = HashMap<u64, Arc<Connection>>;

impl Service {
    fn welcome(self: &Arc<Self>, number: u64, socket: UnixStream) {
        if lock(&self.connections).len() >= CONNECTIONS_MAX {
            tracing::warn!("a connection beyond {CONNECTIONS_MAX} is closed");
            return;
        }
        let accepted = Connection::accept(self, number, socket).and_then(|connection| {
            lock(&self.connections).insert(number, Arc::clone(&connection));
            connection.watch(self)
        });
        if let Err(error) = accepted {
            self.left(number);
            tracing::debug!(%error, "a client cannot be greeted");
        }
    }

    /// Something came on a connection, or it hung up.
    fn attend_to(&self, number: u64) {
        let connection = lock(&self.connections).get(&number).cloned();
        if let Some(connection) = connection
            && connection.take()
        {
            self.crew.attend(connection);
        }
    }

    /// A connection is closed.
    pub(super) fn left(&self, number: u64) {
        lock(&self.connections).remove(&number);
        let _ = self.wake.write(1);
    }

    /// Closes connections that did not say hello in time.
    fn drop_the_silent(&self) {
        let silent: Vec<_> = lock(&self.connections)
            .values()
            .filter(|it| !it.has_greeted() && it.since.elapsed() > GREETING_TIME_MAX)
            .cloned()
            .collect();
        for connection in silent {
            connection.close();
        }
    }
}
