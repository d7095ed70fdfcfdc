//! A worker's life: a fork of the zygote that makes one VM, gives up all it
//! can, and carries out the runs it is given.
//!
//! Descriptor 0 is the socket to its supervisor, 1 and 2 are the null device.
//! Beside them it holds its VM, its vCPU, for a VM that is reset the map of
//! its own pages, and while a run lasts that run's connection to the broker.

use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use forge_protocol::codec;
use forge_protocol::frame::{self, Kind};
use forge_protocol::worker::{Fate, Job, Ready, Report, Reuse, Timing, VmFailure, VmFailureKind};

use super::{BrokerLink, Guest, GuestBase, Standing};
use crate::link::Link;
use crate::machine::{Hypervisor, PageMap, Watchdog};

/// What a worker has from the zygote.
pub(super) struct Inherited<'a> {
    pub(super) hypervisor: &'a Hypervisor,
    pub(super) base: &'a GuestBase,
    pub(super) socket: OwnedFd,
    pub(super) reuse: Reuse,
}

/// The child's whole life. Nothing of the zygote's is dropped: memory and
/// descriptors go with the process.
pub(super) fn main(inherited: Inherited<'_>) -> ! {
    let lived = catch_unwind(AssertUnwindSafe(|| live(inherited)));
    let code = match lived {
        Ok(Ok(())) => 0,
        Ok(Err(_)) => 1,
        Err(_) => 101,
    };
    // SAFETY: ends this process without running the zygote's destructors.
    unsafe { libc::_exit(code) }
}

fn internal(message: String) -> VmFailure {
    VmFailure { kind: VmFailureKind::Internal, message }
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

fn live(inherited: Inherited<'_>) -> io::Result<()> {
    let mut link = settle_in(inherited.socket)?;
    let mut worker = match Worker::new(inherited.hypervisor, inherited.base, inherited.reuse) {
        Ok(worker) => worker,
        Err(failure) => return say(&mut link, Kind::Ready, &Ready::Err(failure)),
    };
    say(&mut link, Kind::Ready, &Ready::Ok(worker.guest.timing()))?;
    loop {
        let frame = match link.receive(|kind| kind == Kind::Job, None) {
            Ok(frame) => frame,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        };
        let started = Instant::now();
        let report = match codec::decode::<Job>(&frame.payload) {
            Ok(job) => worker.carry_out(job, link.take_passed(), started),
            Err(error) => failed(internal(format!("the job cannot be read: {error}"))),
        };
        say(&mut link, Kind::Report, &report)?;
        let Some(ready) = worker.put_back() else { return Ok(()) };
        let ends = ready.is_err();
        say(&mut link, Kind::Ready, &ready)?;
        if ends {
            return Ok(());
        }
    }
}

/// Puts the socket where it belongs and closes the zygote's own.
fn settle_in(socket: OwnedFd) -> io::Result<Link> {
    // SAFETY: duplicates a descriptor of ours over the zygote's socket, which
    // this process must not have.
    if unsafe { libc::dup2(socket.as_raw_fd(), 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    drop(socket);
    // SAFETY: 0 is the duplicate, and nobody else's.
    Ok(Link::new(UnixStream::from(unsafe { OwnedFd::from_raw_fd(0) })))
}

fn say<T: codec::Encode>(link: &mut Link, kind: Kind, message: &T) -> io::Result<()> {
    let mut bytes = Vec::new();
    frame::write_message(kind, message, &mut bytes);
    link.send(&bytes, None, None)
}

/// The report of a run that no guest was given.
pub(crate) fn failed(failure: VmFailure) -> Report {
    Report {
        fate: Fate::Vm(failure),
        output: Vec::new(),
        artifacts: Vec::new(),
        logs: Vec::new(),
        calls: Vec::new(),
        vm_exits: 0,
        timing: Timing::default(),
    }
}

impl Worker {
    fn new(hypervisor: &Hypervisor, base: &GuestBase, reuse: Reuse) -> Result<Self, VmFailure> {
        let unavailable = |what: &str, error: io::Error| VmFailure {
            kind: VmFailureKind::Unavailable,
            message: format!("{what}: {error}"),
        };
        let watchdog = Watchdog::new().map_err(|error| unavailable("no timer", error))?;
        let mut guest = Guest::from_base(hypervisor, base, &watchdog)?;
        let reset = match reuse {
            Reuse::Fresh => None,
            Reuse::Reset { prove_one_in } => {
                let pages = PageMap::open().map_err(|error| unavailable("no page map", error))?;
                let to = guest.mark(&pages)?;
                Some(Reset { to, pages, prove_one_in, done: 0 })
            }
        };
        Ok(Self { guest, watchdog, reset })
    }

    fn carry_out(&mut self, job: Job, broker: Option<OwnedFd>, started: Instant) -> Report {
        let link = broker.map(|fd| BrokerLink::new(UnixStream::from(fd))).transpose();
        match link {
            Ok(link) if link.is_some() == job.brokered => {
                self.guest.run(&job, link, started, &self.watchdog)
            }
            Ok(_) => failed(internal("the job came without its connection to the broker".into())),
            Err(error) => failed(internal(format!("the connection to the broker: {error}"))),
        }
    }

    /// After a run: resets the guest, if that is its way. `None`: its life is
    /// over.
    fn put_back(&mut self) -> Option<Ready> {
        let reset = self.reset.as_mut()?;
        let mut put_back = || {
            self.guest.reset(&reset.to, &reset.pages)?;
            reset.done = reset.done.wrapping_add(1);
            if reset.prove_one_in != 0 && reset.done.is_multiple_of(reset.prove_one_in) {
                self.guest.prove_reset(&reset.to, &reset.pages)?;
            }
            Ok(Timing::default())
        };
        Some(put_back())
    }
}
