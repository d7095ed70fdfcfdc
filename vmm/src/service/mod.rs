//! The service: runs for clients of other processes, over a unix socket.
//!
//! A connection carries any number of runs and questions at once, in the
//! frames of `forge_protocol::service`. A client that leaves cancels its runs.
//! Whatever a client sends, it is bounded, and no other client waits for it:
//! one that takes nothing of what it is owed is cut off.
//!
//! | module | what it holds |
//! |---|---|
//! | [`server`] | the socket, and who is woken by what |
//! | `connection` | one client: its frames, its runs |
//! | `crew` | the threads that read and carry out |
//! | `gate` | who may run now |
//! | `answers` | what clients ask |
//! | `status` | how the service stands |
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
mod connection;
mod crew;
mod gate;
pub mod server;
mod status;

pub use server::{Server, serve_connection};

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forge_protocol::service::{Order, Reply};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::cancel::Cancel;
use crate::supervisor::{RunResult, Supervisor};
use crew::Crew;
use gate::Gate;
use server::Connections;
use status::Counts;

/// Connections at a time. One more is closed at once.
const CONNECTIONS_MAX: usize = 1024;
/// Threads that read and carry out. A connection beyond waits for one.
const THREADS_MAX: usize = 1024;

/// What all connections share.
#[derive(Debug)]
pub(crate) struct Service {
    supervisor: Arc<Supervisor>,
    crew: Crew,
    watch: Watch,
    gate: Gate,
    connections: Mutex<Connections>,
    counts: Counts,
    /// Runs and questions whose end is not sent yet.
    busy: AtomicUsize,
    /// Has the event loop look again.
    wake: EventFd,
}

/// Something is under way whose end is to be sent. Dropped after that.
struct Busy<'a>(&'a Service);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        if self.0.busy.fetch_sub(1, Ordering::SeqCst) == 1 && self.0.gate.is_draining() {
            let _ = self.0.wake.write(1);
        }
    }
}

impl Service {
    fn new(supervisor: Arc<Supervisor>, wake: EventFd) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            supervisor,
            crew: Crew::new(THREADS_MAX),
            watch: Watch::new()?,
            gate: Gate::default(),
            connections: Mutex::default(),
            counts: Counts::new(),
            busy: AtomicUsize::new(0),
            wake,
        }))
    }

    /// Carries out a run, if there is room for it.
    fn run(&self, order: &Order, cancel: &Cancel) -> RunResult {
        let result = match self.gate.enter() {
            Some(_pass) => self.supervisor.run_for(order, Some(cancel)),
            None => RunResult::refused("draining", "this service takes no more runs"),
        };
        self.counts.ended(&result.report);
        result
    }

    fn busy(&self) -> Busy<'_> {
        self.busy.fetch_add(1, Ordering::SeqCst);
        Busy(self)
    }

    /// Takes no more runs.
    fn drain(&self) -> Reply {
        self.gate.drain();
        Reply::Draining
    }

    fn is_busy(&self) -> bool {
        self.busy.load(Ordering::SeqCst) > 0
    }

    /// Whether it was to take no more runs, and owes nobody an end.
    fn is_drained(&self) -> bool {
        self.gate.is_draining() && !self.is_busy()
    }
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

    /// Looks away.
    fn away(&self, fd: i32, number: u64) {
        // A hang-up may still be told; whoever reads has it at first hand.
        let event = EpollEvent::new(EventSet::ONE_SHOT, number);
        let _ = self.0.ctl(ControlOperation::Modify, fd, event);
    }

    fn forget(&self, fd: i32) {
        let _ = self.0.ctl(ControlOperation::Delete, fd, EpollEvent::default());
    }
}

/// What the locks guard is whole between any two statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
