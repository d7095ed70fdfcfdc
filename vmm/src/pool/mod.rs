//! VMs that stand ready before anybody asks.
//!
//! Making a VM and destroying it is work for another time than a request's.
//! A pool keeps between a least and a most number of workers whose VM stands
//! at "waiting for a program", and makes the next when one is taken. Found
//! empty, it makes one while the request waits: a cold start, never an error;
//! and keeps more from then on. What nobody misses for a while is let go.
//!
//! By default a VM serves one run. An operator may have it reset instead; it
//! then serves runs of one tenant, the first that it was given to.
//!
//! | module | what it holds |
//! |---|---|
//! | [`zygote`] | the process that workers are forked from, from outside |
//! | [`worker`] | one worker, from outside |

pub mod worker;
pub mod zygote;

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forge_protocol::limits::RunLimits;
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::{
    Fork, Job, Report, Reuse, VmFailure, VmFailureKind, ZygoteSetup,
};

use crate::machine;
use worker::{Lost, Worker};
use zygote::Zygote;

/// How long a worker may take to stand ready. It takes a millisecond; this is
/// for hosts that emulate everything.
const READY_TIME_MAX: Duration = Duration::from_secs(30);
/// After so long without a cold start the pool keeps one worker less.
const SHRINK_AFTER: Duration = Duration::from_secs(10);
/// How long the filling thread waits after it failed.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// How often a run is given to another worker if one was lost before it
/// began.
const ATTEMPTS: usize = 3;

/// How a pool keeps its VMs.
#[derive(Clone, Copy, Debug, Default)]
pub struct PoolOptions {
    /// So many stand ready at all times.
    pub ready_min: usize,
    /// At most so many do, when cold starts show that more are needed.
    pub ready_max: usize,
    /// What becomes of a VM after its run.
    pub reuse: Reuse,
}

/// What a run was carried out in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vm {
    /// A VM that had served no run before.
    Fresh,
    /// A VM that had been reset after a run of the same tenant.
    Reset,
}

impl Vm {
    /// Its word in a report.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Reset => "reset",
        }
    }
}

/// Whose VM it is and what it must have.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Key {
    tenant: String,
    ram_bytes: usize,
}

/// Workers by what they can be used for.
#[derive(Debug, Default)]
struct Shelves {
    /// Untouched ones with the usual RAM.
    standing: Vec<Worker>,
    /// Ones that were reset, the longest unused first.
    used: Vec<(Key, Worker)>,
    /// How many are to stand ready now.
    target: usize,
    last_cold: Option<Instant>,
    closing: bool,
}

#[derive(Debug)]
struct Shared {
    executable: PathBuf,
    setup: ZygoteSetup,
    options: PoolOptions,
    usual_ram_bytes: usize,
    zygote: Mutex<Option<Zygote>>,
    shelves: Mutex<Shelves>,
    changed: Condvar,
}

/// The pool.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    filler: Option<JoinHandle<()>>,
}

impl Pool {
    /// A pool of VMs that trust these keys. `executable` is `forge-vmm`. The
    /// first zygote is started when it is first needed.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn new(
        executable: PathBuf,
        trust: &TrustKeys,
        options: PoolOptions,
    ) -> io::Result<Self> {
        let trust = trust.as_slice().iter().map(|key| key.to_bytes()).collect();
        let shared = Arc::new(Shared {
            executable,
            setup: ZygoteSetup { trust },
            options,
            usual_ram_bytes: machine::ram_bytes(&RunLimits::default()),
            zygote: Mutex::new(None),
            shelves: Mutex::new(Shelves { target: options.ready_min, ..Shelves::default() }),
            changed: Condvar::new(),
        });
        let filler = match options.ready_max {
            0 => None,
            _ => {
                let shared = Arc::clone(&shared);
                let thread = std::thread::Builder::new().name("pool".into());
                Some(thread.spawn(move || shared.fill())?)
            }
        };
        Ok(Self { shared, filler })
    }

    /// How many VMs stand ready.
    #[must_use]
    pub fn ready(&self) -> usize {
        self.shared.shelves().standing.len()
    }

    /// Carries out a job for a tenant, until then at the latest.
    ///
    /// # Errors
    /// [`VmFailure`]: the host can make no VM, or the worker was lost.
    pub fn carry_out(
        &self,
        tenant: &str,
        limits: &RunLimits,
        job: &Job,
        broker: Option<&UnixStream>,
        until: Instant,
    ) -> Result<(Report, Vm), VmFailure> {
        let ram_bytes = machine::ram_bytes(limits);
        let key = Key { tenant: tenant.to_owned(), ram_bytes };
        let mut lost = None;
        for _ in 0..ATTEMPTS {
            let mut worker = self.shared.take(&key)?;
            let vm = if worker.runs() == 0 { Vm::Fresh } else { Vm::Reset };
            match worker.carry_out(job, broker, until) {
                Ok(report) => {
                    self.shared.give_back(key, worker);
                    return Ok((report, vm));
                }
                // It was lost while nobody looked; another can do the same.
                Err(Lost::Before(failure)) => lost = Some(failure),
                Err(Lost::During(failure)) => return Err(failure),
            }
        }
        Err(lost.unwrap_or_else(|| internal("no worker was tried")))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.shelves().closing = true;
        self.shared.changed.notify_all();
        if let Some(filler) = self.filler.take() {
            let _ = filler.join();
        }
    }
}

fn internal(message: impl Into<String>) -> VmFailure {
    VmFailure { kind: VmFailureKind::Internal, message: message.into() }
}

impl Shared {
    fn shelves(&self) -> MutexGuard<'_, Shelves> {
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A worker from the shelves, or a new one.
    fn take(&self, key: &Key) -> Result<Worker, VmFailure> {
        let mut shelves = self.shelves();
        // The one used last has the most of its memory in the caches.
        if let Some(at) = shelves.used.iter().rposition(|(of, _)| of == key) {
            return Ok(shelves.used.remove(at).1);
        }
        if key.ram_bytes == self.usual_ram_bytes {
            let standing = shelves.standing.pop();
            if standing.is_none() {
                shelves.last_cold = Some(Instant::now());
                shelves.target = (shelves.target * 2).clamp(1, self.options.ready_max.max(1));
            }
            drop(shelves);
            self.changed.notify_one();
            if let Some(worker) = standing {
                return Ok(worker);
            }
        } else {
            drop(shelves);
        }
        self.make(key.ram_bytes)
    }

    /// After a run: shelved if it resets itself, and let go otherwise.
    fn give_back(&self, key: Key, worker: Worker) {
        if self.options.reuse == Reuse::Fresh || self.options.ready_max == 0 {
            return;
        }
        let mut shelves = self.shelves();
        shelves.used.push((key, worker));
        let too_many = shelves.used.len() > self.options.ready_max;
        let oldest = too_many.then(|| shelves.used.remove(0));
        drop(shelves);
        drop(oldest);
    }

    /// Forks a worker. It may not stand ready yet.
    fn make(&self, ram_bytes: usize) -> Result<Worker, VmFailure> {
        let order = Fork { ram_bytes: ram_bytes as u64, reuse: self.options.reuse };
        let mut zygote = self.zygote.lock().unwrap_or_else(PoisonError::into_inner);
        let mut lost = None;
        for _ in 0..2 {
            let alive = match zygote.take() {
                Some(zygote) => zygote,
                None => Zygote::start(&self.executable, &self.setup)?,
            };
            match zygote.insert(alive).fork(order) {
                Ok(made) => return made,
                Err(error) => {
                    tracing::warn!(%error, "the zygote is gone; another is started");
                    lost = Some(error);
                    *zygote = None;
                }
            }
        }
        Err(internal(lost.map_or_else(String::new, |error| format!("the zygote is gone: {error}"))))
    }

    /// The filling thread: makes what is missing, lets go what is not missed.
    fn fill(&self) {
        let mut shelves = self.shelves();
        while !shelves.closing {
            let missing = shelves.standing.len() < shelves.target;
            if !missing {
                let quiet = shelves.last_cold.is_none_or(|cold| cold.elapsed() > SHRINK_AFTER);
                if quiet && shelves.target > self.options.ready_min {
                    shelves.target -= 1;
                    shelves.last_cold = Some(Instant::now());
                    let one = shelves.standing.pop();
                    drop(shelves);
                    drop(one);
                    shelves = self.shelves();
                    continue;
                }
                let waited = self.changed.wait_timeout(shelves, SHRINK_AFTER);
                shelves = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            drop(shelves);
            let made = self.make(self.usual_ram_bytes).and_then(|mut worker| {
                worker.await_ready(Instant::now() + READY_TIME_MAX).map(|()| worker)
            });
            shelves = self.shelves();
            match made {
                Ok(worker) => shelves.standing.push(worker),
                Err(failure) => {
                    tracing::warn!(reason = failure.message, "the pool cannot be filled");
                    let waited = self.changed.wait_timeout(shelves, RETRY_AFTER);
                    shelves = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }
}
