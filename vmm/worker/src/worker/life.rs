//! A worker's life: a fork of the zygote that makes one VM, gives up all it
//! can, and carries out the runs it is given.
//!
//! Descriptor 0 is the socket to its supervisor, 1 and 2 are the null device.
//! Beside them it holds its VM, its vCPU, for a VM that is reset the map of
//! its own pages, and while a run lasts that run's connection to the broker.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use forge_protocol::codec;
use forge_protocol::frame::{self, Frame, HEADER_BYTES, Header, Kind};
use forge_protocol::worker::{
    Fate, Fork, Job, Prepare, PreparedJob, Ready, Report, Reuse, Timing, VmFailure, VmFailureKind,
};

use super::{BrokerLink, Guest, GuestBase, Standing, heap, unavailable};
use crate::clock::now_ns;
use crate::jail::{Limits, WorkerJail};
use crate::link::{self, Link, Patience};
use crate::machine::{Hypervisor, PageMap, Watchdog};

/// A worker's limits: its descriptors, the run's connection to the broker
/// among them, and no process, no file.
pub const LIMITS: Limits = Limits { open_files: 16, processes: 0, file_bytes: 0 };

/// Of a worker's address space, what is no guest's and no run's: what it has
/// from the zygote, some 40 MiB, and what it takes to serve any guest.
const OWN_BYTES: u64 = 128 << 20;

/// What a worker with a VM may map, in bytes: its own, its guest's RAM, what waits
/// for the guest, which is never more than there is room for in its RAM
/// (`untaken_bytes_max`), and what any run may leave.
#[must_use]
pub fn address_space_bytes(ram_bytes: u64) -> u64 {
    OWN_BYTES.saturating_add(ram_bytes.saturating_mul(2)).saturating_add(left_bytes())
}

/// What it takes at most to hold what a run leaves, in bytes: once as it is
/// kept and once as it is reported. No run gets more than an operator's maxima,
/// and not every VM's maker knows its run.
pub(crate) fn left_bytes() -> u64 {
    2 * u64::from(Kind::Report.payload_bytes_max())
}

/// What a worker allocates from its beginning to a small run's report, in bytes.
const HEAP_BYTES: usize = 8 * 4096;

/// How long a worker rests after a run before it puts its guest back, unless
/// its next order comes first. Whoever waits for the report is answered
/// meanwhile, and woken where the answer is: beside a worker that computes it
/// would be woken on a CPU that sleeps.
pub const REST: Duration = Duration::from_millis(1);

/// What a worker has from the zygote.
pub(crate) struct Inherited<'a> {
    pub(crate) hypervisor: &'a Hypervisor,
    pub(crate) base: &'a GuestBase,
    pub(crate) procfs: Result<BorrowedFd<'a>, &'a io::Error>,
    pub(crate) jail: &'a WorkerJail,
    pub(crate) order: Fork,
}

/// The child's whole life.
pub(crate) fn main(socket: OwnedFd, inherited: &Inherited<'_>) -> ! {
    end(|| live(socket, inherited))
}

/// Lives, and ends the process. Nothing of the zygote's is dropped: memory and
/// descriptors go with the process.
pub(crate) fn end(live: impl FnOnce() -> io::Result<()>) -> ! {
    let lived = catch_unwind(AssertUnwindSafe(live));
    let code = match lived {
        Ok(Ok(())) => 0,
        Ok(Err(_)) => 1,
        Err(_) => 101,
    };
    // SAFETY: ends this process without running the zygote's destructors.
    unsafe { libc::_exit(code) }
}

/// A guest, and what it takes to use it again.
struct Worker {
    guest: Guest,
    watchdog: Watchdog,
    /// For a guest that is reset: where to, how its changes are found, and how
    /// often that is proven.
    reset: Option<Reset>,
}

struct Reset {
    to: Standing,
    pages: PageMap,
    prove_one_in: u32,
    done: u32,
}

fn live(socket: OwnedFd, inherited: &Inherited<'_>) -> io::Result<()> {
    let (mut link, worker) = settle_in(socket, inherited)?;
    // Its VM and its timer go with the process, and its filter forbids giving
    // up either.
    let mut worker = match worker {
        Ok(worker) => ManuallyDrop::new(worker),
        Err(failure) => return say(&mut link, Kind::Ready, &Ready::Err(failure)),
    };
    let worker = &mut *worker;
    worker.guest.note(|at| at.jailed = now_ns());
    say(&mut link, Kind::Ready, &Ready::Ok(worker.guest.timing()))?;
    loop {
        let Ordered { order, is_answered_ready, arrived_ns } =
            match next_order(&mut link, |listener| worker.guest.tell(listener)) {
                Ok(ordered) => ordered,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                Err(error) => return Err(error),
            };
        worker.guest.note(|at| at.arrived = arrived_ns);
        let report = match order {
            Ok(Order::Prepare(program)) => {
                let ready = worker.prepare(&program);
                let ends = ready.is_err();
                say(&mut link, Kind::Ready, &ready)?;
                if ends {
                    return Ok(());
                }
                continue;
            }
            Ok(Order::Run(job, broker)) => worker.guest.run(&job, broker, &worker.watchdog),
            Ok(Order::RunPrepared(job, broker)) => {
                worker.guest.run_prepared(&job, broker, &worker.watchdog)
            }
            Err(failure) if is_answered_ready => {
                return say(&mut link, Kind::Ready, &Ready::Err(failure));
            }
            Err(failure) => failed(failure),
        };
        say(&mut link, Kind::Report, &report)?;
        let Some(reset) = &mut worker.reset else { return await_end(&mut link) };
        rest(&link)?;
        if let Err(failure) = reset.put_back(&mut worker.guest) {
            return say(&mut link, Kind::Ready, &Ready::Err(failure));
        }
    }
}

/// A worker whose run is over is ended by its supervisor, or ends when that is
/// gone. Ending by itself it would destroy its VM, which takes longer than a
/// run, on a CPU that whoever waits for the report needs.
fn await_end(link: &mut Link) -> io::Result<()> {
    match link.receive(|_| false, Patience::default()) {
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => Err(error),
        _ => Ok(()),
    }
}

/// Until [`REST`] is over, or the next order is there. That is not read yet: if
/// this process ends before its VM is put back, the kernel tells the supervisor
/// so (ECONNRESET), and another is given the run.
fn rest(link: &Link) -> io::Result<()> {
    let until = Patience::until(Instant::now() + REST);
    match link::wait(link.socket().as_raw_fd(), libc::POLLIN, until) {
        Err(error) if error.kind() != io::ErrorKind::TimedOut => Err(error),
        _ => Ok(()),
    }
}

/// What the supervisor may want.
pub(crate) enum Order {
    /// A program is to be loaded ahead of its runs.
    Prepare(Prepare),
    /// A program and its run.
    Run(Job, Option<BrokerLink>),
    /// A run of the program that is loaded.
    RunPrepared(PreparedJob, Option<BrokerLink>),
}

/// An order that has come, and how it is answered.
pub(crate) struct Ordered {
    /// Or why it cannot be carried out.
    pub(crate) order: Result<Order, VmFailure>,
    /// By [`Ready`], as that to load a program is; any other by a report.
    pub(crate) is_answered_ready: bool,
    /// When all of it was there, and was not read yet.
    pub(crate) arrived_ns: u64,
}

/// Waits for the next order. Before it may come where to `tell` of what happens in it.
///
/// # Errors
/// What the kernel said, or what came is none.
pub(crate) fn next_order(link: &mut Link, mut tell: impl FnMut(RawFd)) -> io::Result<Ordered> {
    let awaits = |kind| matches!(kind, Kind::Job | Kind::Prepare | Kind::PreparedJob | Kind::Tell);
    loop {
        let frame = link.receive(awaits, Patience::default())?;
        if frame.kind != Kind::Tell {
            let (arrived_ns, passed) = (now_ns(), link.take_passed());
            return Ok(Ordered {
                arrived_ns,
                order: Order::read(&frame).and_then(|order| order.with(passed)),
                is_answered_ready: frame.kind == Kind::Prepare,
            });
        }
        tell(link.socket().as_raw_fd());
    }
}

impl Order {
    /// The order in a frame, which is one of these.
    fn read(frame: &Frame) -> Result<Self, VmFailure> {
        let payload = &frame.payload;
        match frame.kind {
            Kind::Prepare => codec::decode(payload).map(Self::Prepare),
            Kind::PreparedJob => codec::decode(payload).map(|job| Self::RunPrepared(job, None)),
            _ => codec::decode(payload).map(|job| Self::Run(job, None)),
        }
        .map_err(|error| {
            VmFailure::new(VmFailureKind::Internal, format!("an order cannot be read: {error}"))
        })
    }

    /// With the connection to the broker, which comes with a run that has one: not without
    /// it, and with no run that has none.
    fn with(mut self, passed: Option<OwnedFd>) -> Result<Self, VmFailure> {
        let link = passed.map(|fd| BrokerLink::new(UnixStream::from(fd)));
        let (brokered, place) = match &mut self {
            Self::Prepare(_) => return Ok(self),
            Self::Run(job, place) => (job.brokered, place),
            Self::RunPrepared(job, place) => (job.brokered, place),
        };
        if link.is_some() != brokered {
            let message = match brokered {
                true => "a job came without its connection to the broker",
                false => "a connection to the broker came with a job that has none",
            };
            return Err(VmFailure::new(VmFailureKind::Internal, message));
        }
        *place = link;
        Ok(self)
    }
}

/// Puts a worker's socket where it belongs.
///
/// # Errors
/// What the kernel said.
pub(crate) fn take_socket(socket: OwnedFd) -> io::Result<Link> {
    // For whoever lists processes.
    // SAFETY: a C string of at most 15 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"forge-worker".as_ptr()) };
    // SAFETY: duplicates a descriptor of ours over the zygote's socket, which
    // this process must not have.
    if unsafe { libc::dup2(socket.as_raw_fd(), 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    drop(socket);
    // SAFETY: 0 is the duplicate, and nobody else's.
    let mut link = Link::new(UnixStream::from(unsafe { OwnedFd::from_raw_fd(0) }));
    // First, so that what is not used of it lies between no two blocks.
    link.make_room();
    heap::reach(HEAP_BYTES);
    Ok(link)
}

/// Takes its socket, makes the guest, and gives up everything else.
fn settle_in(
    socket: OwnedFd,
    inherited: &Inherited<'_>,
) -> io::Result<(Link, Result<Worker, VmFailure>)> {
    let link = take_socket(socket)?;
    let worker = Worker::new(inherited).and_then(|worker| {
        let bound = address_space_bytes(inherited.order.ram_bytes);
        let entered = inherited.jail.enter(&mut worker.descriptors(), bound);
        entered.map_err(|error| VmFailure::new(VmFailureKind::Internal, error.to_string()))?;
        Ok(worker)
    });
    Ok((link, worker))
}

/// Called in the handler of SIGSYS: tells the supervisor.
pub(crate) fn tell_forbidden(call: i32) {
    let mut bytes = [0u8; HEADER_BYTES + 4];
    let header = Header { kind: Kind::Forbidden, payload_bytes: 4 };
    bytes[..HEADER_BYTES].copy_from_slice(&header.to_bytes());
    bytes[HEADER_BYTES..].copy_from_slice(&call.to_le_bytes());
    // SAFETY: readable bytes.
    unsafe { libc::send(0, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
}

/// Says something to the supervisor.
///
/// # Errors
/// What the kernel said.
pub(crate) fn say<T: codec::Encode>(link: &mut Link, kind: Kind, message: &T) -> io::Result<()> {
    let mut bytes = Vec::new();
    frame::write_message(kind, message, &mut bytes);
    link.send(&bytes, Patience::default())
}

/// The report of a run for which there was no VM.
pub(crate) fn failed(failure: VmFailure) -> Report {
    unserved(Fate::Vm(failure))
}

/// The report of a run that no guest was given.
#[must_use]
pub fn unserved(fate: Fate) -> Report {
    Report {
        fate,
        output: Vec::new(),
        artifacts: Vec::new(),
        logs: Vec::new(),
        calls: Vec::new(),
        vm_exits: 0,
        timing: Timing::default(),
    }
}

impl Worker {
    fn new(inherited: &Inherited<'_>) -> Result<Self, VmFailure> {
        let forked = now_ns();
        let watchdog = Watchdog::new().map_err(|error| unavailable("no timer", &error))?;
        let mut guest = Guest::from_base(inherited.hypervisor, inherited.base, &watchdog)?;
        guest.note(|at| (at.forked, at.made) = (forked, now_ns()));
        if inherited.order.touch_bytes > 0 {
            guest.warm_up(inherited.order.touch_bytes.into(), &watchdog)?;
        }
        let reset = match inherited.order.reuse {
            Reuse::Fresh => None,
            Reuse::Reset { prove_one_in } => {
                let pages = match inherited.procfs {
                    Ok(procfs) => PageMap::open_below(procfs),
                    Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
                };
                let pages = pages.map_err(|error| unavailable("no page map", &error))?;
                let to = guest.mark(&pages)?;
                Some(Reset { to, pages, prove_one_in, done: 0 })
            }
        };
        guest.seal_slots()?;
        guest.note(|at| at.ready = now_ns());
        Ok(Self { guest, watchdog, reset })
    }

    /// The descriptors that it needs beside its socket.
    fn descriptors(&self) -> Vec<RawFd> {
        let mut needed = self.guest.descriptors().to_vec();
        needed.extend(self.reset.as_ref().map(|reset| reset.pages.as_raw_fd()));
        needed
    }

    /// Loads a program ahead of its runs. From here on a reset leads to where
    /// it is loaded.
    fn prepare(&mut self, order: &Prepare) -> Ready {
        self.guest.prepare(order, &self.watchdog)?;
        if let Some(reset) = &mut self.reset {
            reset.to = self.guest.mark(&reset.pages)?;
        }
        Ok(self.guest.timing())
    }
}

impl Reset {
    /// Puts the guest back after a run.
    fn put_back(&mut self, guest: &mut Guest) -> Result<(), VmFailure> {
        guest.reset(&self.to, &self.pages)?;
        self.done = self.done.wrapping_add(1);
        if self.prove_one_in != 0 && self.done.is_multiple_of(self.prove_one_in) {
            guest.prove_reset(&self.to, &self.pages)?;
        }
        Ok(())
    }
}
