//! The service: runs for clients of other processes, over a unix
//! socket and, where that is configured, AF_VSOCK.
//!
//! A connection carries any number of runs and questions at once, in the
//! frames of `forge_protocol::service`. A client that leaves cancels its runs.
//! Whatever a client sends, it is bounded, and no other client waits for it:
//! one that takes nothing of what it is owed is cut off.
//!
//! | module | what it holds |
//! |---|---|
//! | [`server`] | the sockets, and who is woken by what |
//! | `arrival` | by which socket somebody comes |
//! | `awake` | idle CPUs, while runs come |
//! | `connection` | one client: its frames, its runs |
//! | `crew` | the threads that read and carry out |
//! | `gate` | who may run now |
//! | `latency` | how long runs took |
//! | [`options`] | how much it takes, and who may speak for whom |
//! | `peer` | who is at the other end |
//! | `socket_file` | a socket's place among the files |
//! | `answers` | what clients ask |
//! | `status` | how the service stands |
//! | [`systemd`] | what a service manager says and wants to hear |
//!
//! # One thread for one run
//! The thread that reads a run's order carries the run out and sends its end,
//! so a run that comes alone passes no thread by. Before it begins, it has the
//! server's event loop watch the connection. Nothing wakes the loop unless
//! something comes meanwhile; then a second thread reads on. When the run is
//! over, its thread reads itself, unless another does. So a single run costs
//! two calls of the kernel, and no thread is woken for it that was not before.
//!
//! The other end is the crate `forge-client`.

mod answers;
mod arrival;
mod awake;
mod connection;
mod crew;
mod gate;
mod latency;
pub mod options;
mod peer;
pub mod server;
mod socket_file;
mod status;
pub mod systemd;

pub use arrival::{VsockAddress, VsockListener};
pub use options::ServiceOptions;
pub use server::{Reloaded, Server, serve_connection};
pub use socket_file::SocketFile;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use forge_protocol::ending::{Denial, Refusal, RunEnd};
use forge_protocol::limits::{PRINCIPAL_BYTES_MAX, SESSION_BYTES_MAX};
use forge_protocol::name::{is_principal, is_session};
use forge_protocol::service::Order;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::cancel::Cancel;
use crate::cpu_latency::CpuLatency;
use crate::locks::lock;
use crate::supervisor::{Attendance, RunResult, Supervisor};
use answers::Questions;
use awake::Awake;
use crew::Crew;
use gate::{Gate, Stay};
use peer::Peer;
use server::{AWAKE, Connections};
use status::Counts;

/// Connections at a time. One more is closed at once.
const CONNECTIONS_MAX: usize = 1024;
/// Of these, the ones that only the operator may take, and as many threads on
/// top: others may be many, and none of them can keep a drain or a door out.
const OPERATORS_OWN: usize = 64;
/// Threads beside those of runs: they read, and answer what clients ask. A
/// connection beyond waits for one.
const OTHER_THREADS_MAX: usize = 1024;

/// What all connections share.
#[derive(Debug)]
pub(crate) struct Service {
    supervisor: Arc<Supervisor>,
    crew: Crew,
    watch: Watch,
    gate: Gate,
    questions: Questions,
    options: RwLock<Arc<ServiceOptions>>,
    connections: Mutex<Connections>,
    counts: Counts,
    /// Where the host lets its CPUs be asked.
    awake: Option<Awake>,
    /// Runs and questions whose end is not sent yet.
    busy: AtomicUsize,
    /// Has the event loop look again.
    wake: EventFd,
    /// What runs now is cancelled, for the service ends.
    ending: AtomicBool,
}

/// Something is under way whose end is to be sent. Dropped after that.
#[derive(Debug)]
struct Busy(Arc<Service>);

impl Drop for Busy {
    fn drop(&mut self) {
        if self.0.busy.fetch_sub(1, Ordering::SeqCst) == 1 && self.0.gate.is_draining() {
            let _ = self.0.wake.write(1);
        }
    }
}

impl Service {
    fn new(
        supervisor: Arc<Supervisor>,
        options: ServiceOptions,
        wake: EventFd,
    ) -> io::Result<Arc<Self>> {
        let watch = Watch::new()?;
        let awake = match CpuLatency::open() {
            Ok(latency) => Some(Awake::new(latency)?),
            Err(error) => {
                tracing::debug!(%error, "idle CPUs sleep as they like");
                None
            }
        };
        if let Some(awake) = &awake {
            watch.always(awake.timer_fd(), AWAKE)?;
        }
        Ok(Arc::new(Self {
            supervisor,
            crew: Crew::new(threads_max(&options)),
            watch,
            awake,
            gate: Gate::new(options.bounds),
            questions: Questions::default(),
            options: RwLock::new(Arc::new(options)),
            connections: Mutex::default(),
            counts: Counts::new(),
            busy: AtomicUsize::new(0),
            wake,
            ending: AtomicBool::new(false),
        }))
    }

    fn options(&self) -> Arc<ServiceOptions> {
        Arc::clone(&self.options.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Goes by these from now on. Where that fails, nothing changed.
    fn reload(&self, Reloaded { trust, options }: Reloaded) -> io::Result<()> {
        self.supervisor.trust(trust)?;
        self.gate.rebind(options.bounds);
        self.crew.grow(threads_max(&options));
        *self.options.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(options);
        // Whoever lost somebody to speak for is cut off, and what runs for it ends.
        let principals = &self.options().principals;
        let mut connections: Vec<_> = lock(&self.connections).values().cloned().collect();
        connections.retain(|connection| !connection.speaks_still(principals));
        for connection in connections {
            connection.close();
        }
        Ok(())
    }

    /// Carries out a run, if the client may have it and there is room for it.
    /// With it comes its place among the principal's, to be kept until the
    /// client has the run's end.
    fn run(
        &self,
        order: &Order,
        peer: &Peer,
        cancel: &Arc<Cancel>,
        attendance: &Attendance<'_>,
    ) -> (RunResult, Option<Stay<'_>>) {
        let (result, stay) = self.run_if_let(order, peer, cancel, attendance);
        (self.ended(order, result), stay)
    }

    /// Refuses a run that its connection has no room for.
    fn refuse(&self, order: &Order, why: &str, retry_after_ms: u64) -> RunResult {
        let tier = self.supervisor.tier();
        self.ended(order, RunResult::refused(tier, Refusal::Overloaded, why, Some(retry_after_ms)))
    }

    /// Every run is counted and logged, however far it came.
    fn ended(&self, order: &Order, result: RunResult) -> RunResult {
        self.counts.ended(&result.report);
        result.report.log(&order.principal);
        result
    }

    fn run_if_let(
        &self,
        order: &Order,
        peer: &Peer,
        cancel: &Arc<Cancel>,
        attendance: &Attendance<'_>,
    ) -> (RunResult, Option<Stay<'_>>) {
        let (principal, tier) = (&order.principal, self.supervisor.tier());
        let malformed = RunEnd::Denied(Denial::BadRequest);
        if !is_principal(principal) {
            let reason = format!(
                "a principal's name has 1 to {PRINCIPAL_BYTES_MAX} bytes and no control characters"
            );
            return (RunResult::unstarted(tier, malformed, reason), None);
        }
        if !peer.speaks_for(principal) {
            let reason = not_theirs(principal);
            let forbidden = RunEnd::Denied(Denial::Forbidden);
            return (RunResult::unstarted(tier, forbidden, reason), None);
        }
        if order.session.as_deref().is_some_and(|it| !is_session(it)) {
            let reason = format!(
                "a session's name has 1 to {SESSION_BYTES_MAX} bytes and no control characters"
            );
            return (RunResult::unstarted(tier, malformed, reason), None);
        }
        let options = self.options();
        if options.pm_qos
            && let Some(awake) = &self.awake
        {
            awake.run_came();
        }
        let limit = options.principals.0.get(principal).and_then(|it| it.runs_max);
        let denied = match self.gate.enter(principal, limit, cancel) {
            Ok((mut stay, pass)) => {
                let mut result = self.supervisor.run_for(order, attendance);
                stay.ends_with(result.bytes());
                drop(pass);
                if self.ending.load(Ordering::Acquire) {
                    result.service_ended();
                }
                return (result, Some(stay));
            }
            Err(denied) => denied,
        };
        (denied.result(tier), None)
    }

    /// The timer of [`Awake`] has expired.
    fn look_at_cpus(&self) {
        if let Some(awake) = &self.awake {
            awake.look();
        }
    }

    fn busy(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::SeqCst);
        Busy(Arc::clone(self))
    }

    /// Takes no more runs.
    fn drain(&self) {
        // The loop is woken once: with a signal there, it drains at each turn.
        if self.gate.drain() {
            let _ = self.wake.write(1);
        }
    }

    /// Ends what still runs.
    fn cancel_all(&self) {
        self.ending.store(true, Ordering::Release);
        let connections: Vec<_> = lock(&self.connections).values().cloned().collect();
        for connection in connections {
            connection.cancel_all();
        }
    }

    fn is_busy(&self) -> bool {
        self.busy.load(Ordering::SeqCst) > 0
    }

    /// Whether it was to take no more runs, and owes nobody an end.
    fn is_drained(&self) -> bool {
        self.gate.is_draining() && !self.is_busy()
    }
}

/// Why a client that names this principal is refused.
fn not_theirs(principal: &str) -> String {
    let named = if is_principal(principal) { principal } else { "the principal that it names" };
    format!(
        "this client may not speak for {named}: name a principal that it may speak for \
         (--principal on the command line); forge.toml, [principals.<name>] uids, or cids over \
         vsock, says for which"
    )
}

/// Each run that runs or waits has a thread, so that none of them keeps a
/// question or another's order from being read.
fn threads_max(options: &ServiceOptions) -> usize {
    options.bounds.runs_max + options.bounds.queue_max + OTHER_THREADS_MAX
}

/// The event loop's descriptors, each under a number.
#[derive(Debug)]
struct Watch(Epoll);

impl Watch {
    fn new() -> io::Result<Self> {
        Epoll::new().map(Self)
    }

    /// Looks at it at once, always.
    fn always(&self, fd: i32, number: u64) -> io::Result<()> {
        self.0.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, number))
    }

    /// Looks at it from now on until something comes, once.
    fn once(&self, fd: i32, number: u64, operation: ControlOperation) -> io::Result<()> {
        let events = EventSet::IN | EventSet::READ_HANG_UP | EventSet::ONE_SHOT;
        self.0.ctl(operation, fd, EpollEvent::new(events, number))
    }

    /// Looks at it no more.
    fn away(&self, fd: i32, number: u64) {
        // A hang-up may still be told; whoever reads has it at first hand.
        let event = EpollEvent::new(EventSet::ONE_SHOT, number);
        let _ = self.0.ctl(ControlOperation::Modify, fd, event);
    }

    fn forget(&self, fd: i32) {
        let _ = self.0.ctl(ControlOperation::Delete, fd, EpollEvent::default());
    }
}
