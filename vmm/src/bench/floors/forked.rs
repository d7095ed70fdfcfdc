//! What a worker's process costs: its fork, its jail, and with a bare VM.

use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use forge_protocol::limits::RunLimits;
use forge_protocol::platform::{CODE_BYTES, RAM_AT_START_BYTES};
use kvm_ioctls::Kvm;

use super::bare::{GUEST_PAGES, bare};
use super::load::{Parsed, Signed};
use super::process::{Beside, fork_child, wait_for};
use super::{Case, Figure, said};
use crate::bench::cases::THROUGHPUT_TIME;
use crate::jail::{WorkerJail, landlock};
use crate::machine::hypervisor::Placeholder;
use crate::machine::{self, Hypervisor};
use crate::worker::life;
use crate::zygote::{self, Filters};

pub(super) fn fork() -> Result<Box<dyn Case>, String> {
    let beside = Beside::fork(|| {
        let started = Instant::now();
        wait_for(fork_child(|| {}).map_err(said)?);
        Ok(started.elapsed().as_nanos() as u64)
    });
    Ok(Box::new(beside?))
}

/// In a child for each sample, because nobody takes a jail off. It puts on
/// first, outside the measured time, what a worker has from its zygote.
struct JailFloor {
    filters: Filters,
}

pub(super) fn jail() -> Result<Box<dyn Case>, String> {
    let floor = JailFloor { filters: Filters::compile().map_err(said)? };
    Ok(Box::new(Beside::fork(move || floor.sample())?))
}

/// The bound of a worker with a usual VM.
fn address_space_bytes() -> u64 {
    life::address_space_bytes(machine::ram_bytes(&RunLimits::default()) as u64)
}

impl JailFloor {
    fn in_child(&self, tell: &UnixStream) -> Result<Duration, String> {
        // SAFETY: an option that takes numbers alone.
        unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
        zygote::LIMITS.apply().map_err(said)?;
        let worker = self.filters.worker.clone();
        let jail = WorkerJail::prepare(&life::LIMITS, worker).map_err(said)?;
        landlock::restrict(None).map_err(said)?;
        self.filters.zygote.install().map_err(said)?;
        let started = Instant::now();
        jail.enter(&mut [tell.as_raw_fd()], address_space_bytes()).map_err(said)?;
        Ok(started.elapsed())
    }

    fn sample(&self) -> Result<u64, String> {
        let (mut told, mut tell) = UnixStream::pair().map_err(said)?;
        let child = fork_child(|| {
            let took = self.in_child(&tell).map_or(u64::MAX, |took| took.as_nanos() as u64);
            let _ = tell.write_all(&took.to_ne_bytes());
        });
        let child = child.map_err(said)?;
        drop(tell);
        let mut took = [0; 8];
        let read = told.read_exact(&mut took);
        wait_for(child);
        match (read, u64::from_ne_bytes(took)) {
            (Ok(()), ns) if ns != u64::MAX => Ok(ns),
            _ => Err("a child could not enter the jail".into()),
        }
    }
}

/// All of a bare worker's path at once, which is more than the sum of its
/// floors: a process that has just been forked faults its memory in, its VM is
/// the first that it makes, and it has to be heard.
#[derive(Default)]
struct ForkedFloor {
    made: Option<(Kvm, WorkerJail)>,
    load: Option<(Signed, Parsed)>,
}

pub(super) fn forked() -> Result<Box<dyn Case>, String> {
    let mut floor = ForkedFloor::default();
    Ok(Box::new(Beside::fork(move || floor.sample())?))
}

/// The same, and a program made ready there without a guest.
pub(super) fn cold() -> Result<Box<dyn Case>, String> {
    let load = Some((Signed::new()?, Parsed::new()?));
    let mut floor = ForkedFloor { made: None, load };
    Ok(Box::new(Beside::fork(move || floor.sample())?))
}

/// A bare worker that has said that its VM ran, and is about to end.
struct Ending {
    child: libc::pid_t,
    /// From the fork until it said so.
    ns: u64,
}

impl Drop for Ending {
    fn drop(&mut self) {
        wait_for(self.child);
    }
}

impl ForkedFloor {
    fn sample(&mut self) -> Result<u64, String> {
        Ok(self.live()?.ns)
    }

    fn live(&mut self) -> Result<Ending, String> {
        let load = &self.load;
        let (kvm, jail) = match &mut self.made {
            Some(made) => &*made,
            none => {
                let filter = Filters::compile().map_err(said)?.worker;
                let jail = WorkerJail::prepare(&life::LIMITS, filter).map_err(said)?;
                &*none.insert((Kvm::new().map_err(said)?, jail))
            }
        };
        let (mut told, mut tell) = UnixStream::pair().map_err(said)?;
        let started = Instant::now();
        let child = fork_child(|| {
            // SAFETY: an option that takes numbers alone.
            unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            let slot_bytes = (CODE_BYTES + RAM_AT_START_BYTES) as usize;
            let Ok(bare) = bare(kvm, slot_bytes, GUEST_PAGES) else { return };
            // Before the jail, in which a process cannot ask for more memory.
            let loaded = load
                .as_ref()
                .map(|(signed, parsed)| signed.verify().and_then(|()| parsed.instantiate()));
            let Ok(_kept) = loaded.transpose() else { return };
            let mut keep = [tell.as_raw_fd(), bare.vm.as_raw_fd(), bare.vcpu.as_raw_fd()];
            if jail.enter(&mut keep, address_space_bytes()).is_ok() {
                let _ = tell.write_all(&[1]);
            }
        });
        let child = child.map_err(said)?;
        drop(tell);
        let read = told.read_exact(&mut [0]);
        let ending = Ending { child, ns: started.elapsed().as_nanos() as u64 };
        read.map_err(|_| "a forked process could not make a jailed VM")?;
        Ok(ending)
    }
}

/// Bare workers that end while the next ones live. The end of a VM waits for
/// readers of its process's memory (SRCU), milliseconds of which cost no CPU:
/// a service does not wait for it, and nor may its floor.
const ENDING: usize = 32;

/// [`ForkedFloor`]s, each to the end of its process, by two processes for each
/// core.
struct ThroughputFloor {
    beside: Vec<Beside>,
    cores: usize,
    /// A service always has one VM, and what a host's first VM costs is not
    /// paid by each.
    _placeholder: Placeholder,
}

pub(super) fn throughput() -> Result<Box<dyn Figure>, String> {
    let cores = std::thread::available_parallelism().map_err(said)?.get();
    let one = || {
        let mut floor = ForkedFloor::default();
        Beside::fork(move || {
            let mut runs = 0;
            let mut ending = VecDeque::with_capacity(ENDING);
            while ending.len() < ENDING {
                ending.push_back(floor.live()?);
            }
            let until = Instant::now() + THROUGHPUT_TIME;
            while Instant::now() < until {
                ending.push_back(floor.live()?);
                ending.pop_front();
                runs += 1;
            }
            Ok(runs)
        })
    };
    let beside = (0..2 * cores).map(|_| one()).collect::<Result<_, _>>()?;
    let hypervisor = Hypervisor::open().map_err(said)?;
    Ok(Box::new(ThroughputFloor {
        beside,
        cores,
        _placeholder: hypervisor.placeholder().map_err(said)?,
    }))
}

impl Figure for ThroughputFloor {
    fn measure(&mut self) -> Result<f64, String> {
        self.beside.iter_mut().try_for_each(Beside::ask)?;
        let mut runs = 0;
        for beside in &mut self.beside {
            runs += beside.answer()?;
        }
        Ok(runs as f64 / THROUGHPUT_TIME.as_secs_f64() / self.cores as f64)
    }
}
