//! The service's ends of its sockets, and its event loop: new connections,
//! connections that nobody reads, signals.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use forge_log::Seldom;
use forge_protocol::signature::TrustKeys;

use vmm_sys_util::epoll::EpollEvent;
use vmm_sys_util::eventfd::EventFd;

use super::arrival::{Arrival, VsockListener};
use super::connection::Connection;
use super::options::ServiceOptions;
use super::socket_file::SocketFile;
use super::systemd::{Standing, notify};
use super::{CONNECTIONS_MAX, OPERATORS_OWN, Service};
use crate::cancel::Cancel;
use crate::locks::lock;
use crate::supervisor::Supervisor;

/// How long a client may take to say hello, and a stranger to be refused.
const GREETING_TIME_MAX: Duration = Duration::from_secs(10);
/// How often the loop looks at what no descriptor tells.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long cancelled runs of a service that ends have to tell their clients.
const FAREWELL: Duration = Duration::from_secs(2);
/// What it takes at most, from its last answer, until the process is gone: a door and a
/// toolbroker are waited for, each at most so long as they say themselves.
const END_TIME: Duration = Duration::from_secs(40);
/// The stack of who reads the configuration again. There is nothing else on it.
const RELOAD_STACK_BYTES: usize = 1024 * 1024;
/// Descriptors that are looked at after one wait, and arrivals at each.
const EVENTS: usize = 64;
/// The loop's own numbers; connections count from 0.
const SIGNALS: u64 = u64::MAX;
const LISTENER: u64 = u64::MAX - 1;
const VSOCK_LISTENER: u64 = u64::MAX - 2;
/// Of the timer of [`super::awake::Awake`].
pub(super) const AWAKE: u64 = u64::MAX - 3;

/// Where signals are told, or -1; and how often the process was asked to end.
static SIGNALLED: AtomicI32 = AtomicI32::new(-1);
static ENDS_ASKED: AtomicU32 = AtomicU32::new(0);
/// Whether it was asked to load its configuration again.
static RELOAD_ASKED: AtomicBool = AtomicBool::new(false);

/// Whether this process was asked to end more than once.
#[must_use]
pub fn is_to_end_at_once() -> bool {
    ENDS_ASKED.load(Ordering::Acquire) > 1
}

/// A signal's handler: wakes the event loop.
extern "C" fn signalled(signal: libc::c_int) {
    match signal {
        libc::SIGHUP => RELOAD_ASKED.store(true, Ordering::Release),
        _ => {
            ENDS_ASKED.fetch_add(1, Ordering::AcqRel);
        }
    }
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

fn handle(signal: libc::c_int) -> io::Result<()> {
    // SAFETY: all zero is a valid sigaction, with an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = signalled as extern "C" fn(_) as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the action is whole, and its handler keeps to what handlers may do.
    match unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has a SIGHUP that comes from now on wait for a server that heeds it
/// ([`Server::heed_signals`]): until then it would end the process. SIGTERM and
/// SIGINT are to do that.
///
/// # Errors
/// What the kernel said.
pub fn await_reload() -> io::Result<()> {
    handle(libc::SIGHUP)
}

/// What can be loaded again while a service serves.
#[derive(Debug)]
pub struct Reloaded {
    /// The keys that programs are trusted by.
    pub trust: TrustKeys,
    /// What the service goes by.
    pub options: ServiceOptions,
}

/// The end of a service that was asked to end.
struct Ending {
    cancel_at: Instant,
    end_at: Option<Instant>,
}

impl Ending {
    fn within(drain: Duration) -> Self {
        Self { cancel_at: Instant::now() + drain, end_at: None }
    }

    fn look_in(&self) -> Duration {
        let next = self.end_at.unwrap_or(self.cancel_at);
        let left = next.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        left.min(LOOK_EVERY)
    }

    /// Cancels what still runs when its time is over, and says when that has
    /// had its time too.
    fn is_over(&mut self, service: &Service) -> bool {
        let now = Instant::now();
        match self.end_at {
            Some(end_at) => now >= end_at,
            None if now >= self.cancel_at => {
                service.cancel_all();
                self.end_at = Some(now + FAREWELL);
                false
            }
            None => false,
        }
    }
}

/// A service that listens.
#[derive(Debug)]
pub struct Server {
    /// Its own to remove, while it listens still; a socket that was passed is
    /// somebody else's.
    _file: Option<SocketFile>,
    listener: UnixListener,
    vsock: Option<VsockListener>,
    signals: EventFd,
}

impl Server {
    /// Listens at a socket that is there already.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn passed(listener: UnixListener) -> io::Result<Self> {
        Self::over(listener, None)
    }

    /// Listens at this path, with this mode: 0600 lets in the owner of this
    /// process alone. A socket that a dead service left there is replaced.
    ///
    /// # Errors
    /// As [`SocketFile::bind`].
    pub fn bind(path: &Path, mode: u32) -> io::Result<Self> {
        let (listener, file) = SocketFile::bind(path, mode)?;
        Self::over(listener, Some(file))
    }

    fn over(listener: UnixListener, file: Option<SocketFile>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let signals = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        Ok(Self { _file: file, listener, vsock: None, signals })
    }

    /// Listens at this one too, for machines that speak for a principal
    /// (`Principal::cids`). Whoever comes there is never the operator.
    #[must_use]
    pub fn and_vsock(mut self, listener: VsockListener) -> Self {
        self.vsock = Some(listener);
        self
    }

    /// Has signals reach [`Self::serve`], of the last server that asked for it:
    /// SIGTERM and SIGINT drain it, and end it at once the second time; SIGHUP
    /// has it load its configuration again. Without this the first two end the
    /// process, and the socket stays; so does SIGHUP before [`await_reload`].
    ///
    /// # Errors
    /// What the kernel said.
    pub fn heed_signals(&self) -> io::Result<()> {
        SIGNALLED.store(self.signals.as_raw_fd(), Ordering::Release);
        [libc::SIGTERM, libc::SIGINT, libc::SIGHUP].into_iter().try_for_each(handle)
    }

    /// Serves until a signal or a client ends it, or the socket fails. `load`
    /// loads the configuration again, beside everything else and until what it is given
    /// is raised, and says what else is to be done once the service goes by it.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn serve<Then: FnOnce() + Send>(
        &self,
        supervisor: &Arc<Supervisor>,
        options: ServiceOptions,
        load: impl Fn(&Cancel) -> Result<(Reloaded, Then), String> + Sync,
    ) -> io::Result<()> {
        let ends = Cancel::new()?;
        std::thread::scope(|scope| {
            let (loaded, is_loaded) = mpsc::channel();
            let (load, ends) = (&load, &ends);
            let served = self.serve_and(supervisor, options, &is_loaded, |wake| {
                let loaded = loaded.clone();
                let begun = std::thread::Builder::new().name("reload".into());
                let begun = begun.stack_size(RELOAD_STACK_BYTES);
                let begun = begun.spawn_scoped(scope, move || {
                    // Or nothing would be loaded again.
                    let all = std::panic::catch_unwind(AssertUnwindSafe(|| load(ends)));
                    let _ = loaded.send(all.unwrap_or_else(|_| Err("reading it panicked".into())));
                    let _ = wake.write(1);
                });
                begun.map(drop)
            });
            // Nobody goes by what is still read.
            ends.raise();
            served
        })
    }

    /// Like [`Self::serve`], but `load` only begins to load: its result arrives on `loaded`,
    /// and the event that it is given wakes this loop then.
    fn serve_and<Then: FnOnce()>(
        &self,
        supervisor: &Arc<Supervisor>,
        options: ServiceOptions,
        loaded: &mpsc::Receiver<Result<(Reloaded, Then), String>>,
        load: impl Fn(EventFd) -> io::Result<()>,
    ) -> io::Result<()> {
        let wake = self.signals.try_clone()?;
        let service = Service::new(Arc::clone(supervisor), options, wake)?;
        service.watch.always(self.listener.as_raw_fd(), LISTENER)?;
        if let Some(vsock) = &self.vsock {
            service.watch.always(vsock.as_raw_fd(), VSOCK_LISTENER)?;
        }
        service.watch.always(self.signals.as_raw_fd(), SIGNALS)?;
        notify(Standing::Ready);
        let mut ending = None;
        let mut next = 0;
        let mut loads = false;
        loop {
            let time = ending.as_ref().map_or(LOOK_EVERY, Ending::look_in);
            service.turn(time, |listener| match (listener, &self.vsock) {
                (VSOCK_LISTENER, Some(vsock)) => accept(&service, &mut next, || vsock.accept()),
                _ => accept(&service, &mut next, || {
                    self.listener.accept().map(|(socket, _)| Arrival::unix(socket))
                }),
            })?;
            if loads && let Ok(loaded) = loaded.try_recv() {
                loads = false;
                service.go_by(loaded);
            }
            // One at a time, and after it one more for all who asked meanwhile.
            if !loads && RELOAD_ASKED.swap(false, Ordering::AcqRel) {
                match service.wake.try_clone().and_then(&load) {
                    Ok(()) => {
                        loads = true;
                        service.stand(Standing::Reloading);
                    }
                    Err(error) => service.go_by::<Then>(Err(error.to_string())),
                }
            }
            let ends_asked = ENDS_ASKED.load(Ordering::Acquire);
            if ends_asked > 0 {
                service.drain();
            }
            if ending.is_none() && service.gate.is_draining() {
                let drain = service.options().drain;
                notify(Standing::Stopping(drain + FAREWELL + END_TIME));
                ending = Some(Ending::within(drain));
            }
            if let Some(ending) = &mut ending
                && (ends_asked > 1 || service.is_drained() || ending.is_over(&service))
            {
                // A thread that goes on has its pool still. What it is at was cancelled
                // then, and is no worker that was lost.
                service.cancel_all();
                supervisor.kill();
                return Ok(());
            }
        }
    }
}

/// Takes those who wait at a listening socket: some at a time, since a machine
/// that connects without end must not keep the loop from everybody else.
fn accept(
    service: &Arc<Service>,
    next: &mut u64,
    one: impl Fn() -> io::Result<Arrival>,
) -> io::Result<()> {
    for _ in 0..EVENTS {
        match one() {
            Ok(arrival) => {
                service.welcome(*next, arrival);
                *next += 1;
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => return Ok(()),
                // The client left, or a signal came.
                io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => {}
                _ if ends_the_socket(&error) => return Err(error),
                _ => {
                    // It waits at the door until there is a descriptor, or what
                    // else the host has too little of.
                    static SAID: Seldom = Seldom::each_second();
                    if SAID.is_due() {
                        tracing::warn!(%error, "clients have to wait");
                    }
                    std::thread::sleep(Duration::from_millis(10));
                    return Ok(());
                }
            },
        }
    }
    // The loop hears again of who still waits.
    Ok(())
}

/// Whether nobody comes by this socket any more. All else that accept(2) says is
/// of the host or of one client, and passes.
fn ends_the_socket(error: &io::Error) -> bool {
    let ends = [libc::EBADF, libc::EINVAL, libc::ENOTSOCK, libc::EOPNOTSUPP];
    error.raw_os_error().is_some_and(|code| ends.contains(&code))
}

/// Serves the client at the other end of this socket, and no other: until it
/// has left and its runs are over, which are cancelled then.
///
/// # Errors
/// What the kernel said.
pub fn serve_connection(
    socket: UnixStream,
    supervisor: &Arc<Supervisor>,
    options: ServiceOptions,
) -> io::Result<()> {
    let wake = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
    let service = Service::new(Arc::clone(supervisor), options, wake)?;
    service.watch.always(service.wake.as_raw_fd(), SIGNALS)?;
    service.welcome(0, Arrival::unix(socket));
    loop {
        if lock(&service.connections).is_empty() {
            // Whatever ends then wakes the loop.
            service.drain();
            if service.is_drained() {
                return Ok(());
            }
        }
        service.turn(LOOK_EVERY, |_| Ok(()))?;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let event = self.signals.as_raw_fd();
        let _ = SIGNALLED.compare_exchange(event, -1, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Connections by their numbers.
pub(super) type Connections = HashMap<u64, Arc<Connection>>;

impl Service {
    /// A turn of the event loop: waits for something to happen, no longer than so, and
    /// sees to it. Who connects is left to `accept`, with the listener's number.
    fn turn(
        &self,
        time: Duration,
        mut accept: impl FnMut(u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut events = [EpollEvent::default(); EVENTS];
        let happened = match self.watch.0.wait(time.as_millis() as i32, &mut events) {
            Ok(happened) => happened,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
        for event in &events[..happened] {
            match event.data() {
                SIGNALS => drop(self.wake.read()),
                AWAKE => self.look_at_cpus(),
                listener @ (LISTENER | VSOCK_LISTENER) => accept(listener)?,
                number => self.attend_to(number),
            }
        }
        self.drop_the_slow();
        self.crew.look();
        Ok(())
    }

    fn welcome(self: &Arc<Self>, number: u64, arrival: Arrival) {
        let peer = match arrival.peer(&self.options().principals) {
            Ok(peer) => peer,
            Err(error) => {
                tracing::debug!(%error, "a client that nobody knows is sent away");
                return;
            }
        };
        let most =
            if peer.is_operator() { CONNECTIONS_MAX } else { CONNECTIONS_MAX - OPERATORS_OWN };
        if lock(&self.connections).len() >= most {
            static SAID: Seldom = Seldom::each_second();
            if SAID.is_due() {
                tracing::warn!("connections beyond {most} are closed");
            }
            return;
        }
        if let Some(who) = peer.who() {
            let connections = lock(&self.connections);
            let its = connections.values().filter(|it| it.who() == Some(who)).count();
            let most = who.connections_max();
            if its >= most {
                static SAID: Seldom = Seldom::each_second();
                if SAID.is_due() {
                    tracing::info!(?who, "connections beyond {most} are closed");
                }
                return;
            }
        }
        let accepted =
            Connection::accept(Arc::downgrade(self), number, arrival.into_stream(), peer).and_then(
                |connection| {
                    lock(&self.connections).insert(number, Arc::clone(&connection));
                    connection.watch(self)
                },
            );
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

    /// Goes by what was loaded again.
    fn go_by<Then: FnOnce()>(&self, loaded: Result<(Reloaded, Then), String>) {
        let gone_by = loaded.and_then(|(new, then)| {
            self.reload(new).map_err(|error| error.to_string())?;
            then();
            Ok(())
        });
        match gone_by {
            Ok(()) => tracing::info!("the configuration was loaded again"),
            // It goes on as it was.
            Err(error) => tracing::error!(%error, "the configuration is not loaded again"),
        }
        self.stand(Standing::Ready);
    }

    /// Tells its manager how it stands. One that ends goes on to end for it, whatever it
    /// reads meanwhile.
    fn stand(&self, standing: Standing) {
        if !self.gate.is_draining() {
            notify(standing);
        }
    }

    /// Closes connections that did not say hello in time, or not the whole of
    /// a frame.
    fn drop_the_slow(&self) {
        let now = Instant::now();
        let slow: Vec<_> = lock(&self.connections)
            .values()
            .filter(|it| it.is_silent(GREETING_TIME_MAX) || it.is_overdue(now))
            .cloned()
            .collect();
        for connection in slow {
            connection.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_is_short_of_something_ends_no_service() {
        let ends = |code| ends_the_socket(&io::Error::from_raw_os_error(code));
        for code in [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOBUFS, libc::EPERM] {
            assert!(!ends(code), "{code}");
        }
        for code in [libc::EPROTO, libc::ENETDOWN, libc::EHOSTUNREACH, libc::ETIMEDOUT] {
            assert!(!ends(code), "{code}");
        }
        assert!(!ends_the_socket(&io::Error::other("of this process")));
        for code in [libc::EBADF, libc::EINVAL, libc::ENOTSOCK, libc::EOPNOTSUPP] {
            assert!(ends(code), "{code}");
        }
    }
}
