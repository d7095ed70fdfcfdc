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
//! A *prepared program* has VMs that have verified, parsed and instantiated
//! it already. They are one tenant's, and are found by the program's bytes,
//! its signer and its limits; what is admitted and granted is checked for
//! every run all the same.
//!
//! | module | what it holds |
//! |---|---|
//! | `conduct` | how one run is carried out, and what becomes of its worker |
//! | `executable` | what the zygote's process executes |
//! | `filler` | the thread that makes what is missing and ends what is spent |
//! | `losses` | what is heard of workers that are lost, or ended |
//! | `maker` | how a worker comes to be, and the zygote that it is forked from |
//! | `rest` | what a worker uses of the CPU while it waits |
//! | `shelves` | the workers that stand ready, by what they can be used for |
//! | `stock` | the shelves as threads share them |
//! | `turn` | a lock whose waiters give up when their patience ends |
//! | [`zygote`] | the process that workers are forked from, from outside |
//! | [`worker`] | one worker, from outside |
//!
//! Why a run may get no report, from the inside out, and what is done then. There is no
//! worker for it:
//!
//! - [`zygote::Unmade::Late`]: patience was over, or the run was cancelled, before there was
//!   one; the zygote may still owe it. The run ends as over its deadline or as cancelled, and
//!   as with `Failed` where it is the zygote that took the time.
//! - [`zygote::Unmade::Failed`]: none can be made. The run fails.
//! - [`zygote::Unmade::Short`]: the zygote cannot be started now, as something that a process
//!   takes is short. The run fails; a service that starts waits for it.
//!
//! The worker was not given the run:
//!
//! - [`worker::Unbegun::Lost`]: the worker is gone. As [`worker::Lost::Before`] or
//!   [`worker::Lost::Handed`].
//! - [`worker::Unbegun::Crowded`]: the run's link could not be passed. The run fails, and the
//!   worker is put back if it stands ready.
//!
//! The worker was lost:
//!
//! - [`worker::Lost::Before`]: before the run began. Another is tried, three in all.
//! - [`worker::Lost::Handed`]: before the run began, as it seems; but it had the run's link to
//!   the broker and had served a program before. If the run is still wanted, the broker is
//!   asked what it called.
//! - [`worker::Lost::During`]: during the run. The run fails, as its calls may have happened.
//!
//! What a level tells the one above it:
//!
//! - `conduct::Undone`, of one worker: it did not carry the run out, and another may
//!   (`Unbegun`) or no other may (`Over`). Where a program was to be prepared for the run,
//!   `Unbegun` has it carried out the plain way.
//! - [`Unserved`], to the supervisor: the run is over (`Ended`), or its broker has to be asked
//!   (`Handed`).
//! - `AfterLoss`, in the supervisor, what the broker's answer means: a worker that is made for
//!   the run has it over a new link (`Again`), or the run fails (`Over`).

mod conduct;
mod executable;
mod filler;
mod losses;
mod maker;
mod rest;
mod shelves;
mod stock;
mod turn;
pub mod worker;
pub mod zygote;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::{Fate, Job, Report, Reuse, Tier, VmFailure};

use crate::admission::Admitted;
use crate::jail::{GroupLimits, Hardening, Weakness};
use crate::link::Patience;
use crate::shortage;
use conduct::Conduct;
use losses::Losses;
use maker::Maker;
pub use shelves::{Key, ProgramKey, Stands};
use stock::Stock;
use worker::{Tell, Worker};
use zygote::Unmade;

/// How a pool keeps its VMs.
#[derive(Clone, Copy, Debug, Default)]
pub struct PoolOptions {
    /// What a run is carried out in. In `process` nothing is reset.
    pub tier: Tier,
    /// So many stand ready at all times.
    pub ready_min: usize,
    /// At most so many do, when cold starts show that more are needed. Those that are
    /// prepared with a program, or are a tenant's own, are not among them.
    pub ready_max: usize,
    /// What becomes of a VM after its run.
    pub reuse: Reuse,
    /// What all VMs together may use, by cgroup v2. Where the host cannot keep
    /// it there are no VMs.
    pub group: Option<GroupLimits>,
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
    /// That of a worker which is to be given a run.
    fn of(worker: &Worker) -> Self {
        if worker.runs() == 0 { Self::Fresh } else { Self::Reset }
    }

    /// Its word in a report.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Reset => "reset",
        }
    }
}

/// A run that was carried out.
#[derive(Debug)]
pub struct Done {
    /// What the worker reports.
    pub report: Report,
    /// What it ran in.
    pub vm: Vm,
    /// Whose report it is.
    pub served: Served,
    /// When there was a worker, in [`crate::trace::now_ns`].
    pub taken: u64,
    /// When the run had been handed over.
    pub handed: u64,
    /// When the report was there.
    pub reported: u64,
    /// What the pool has to do now.
    pub upkeep: Upkeep,
}

/// A worker that has reported, wherever it is by now: it may have been given another run.
#[derive(Debug)]
pub struct Served(Arc<OwnedFd>);

impl Served {
    /// Ends it: what it reported shows that somebody has taken it over.
    pub fn end(&self) {
        // It may have ended already.
        let _ = crate::jail::kill(&self.0);
    }
}

/// What a run leaves its pool to do: the VM that served it is to be destroyed,
/// and another to be made. Both begin when this is dropped, so whoever owes
/// somebody the run's result tells it first. A pool looks for what is to be
/// done every second all the same.
#[derive(Debug)]
pub struct Upkeep {
    /// Gone if the pool is: then so are its VMs.
    shared: Weak<Shared>,
    /// A worker that nobody else ends.
    ended: Option<Worker>,
}

impl Drop for Upkeep {
    fn drop(&mut self) {
        let ended = self.ended.take();
        if let Some(shared) = self.shared.upgrade() {
            shared.losses.end(ended);
            shared.stock.resume_filling();
        }
    }
}

/// A run that nobody reported on.
#[derive(Debug, PartialEq)]
pub enum Unserved {
    /// How it ended: [`Fate::Vm`] if the host can make no VM or the worker was lost,
    /// [`Fate::Deadline`] if patience was over before there was a VM.
    Ended {
        /// How the run ended.
        fate: Fate,
        /// What it had begun in, if it had.
        vm: Option<Vm>,
    },
    /// Its worker seems not to have begun it, and was given its link to the broker
    /// ([`worker::Lost::Handed`]). Over another link it may be carried out
    /// [afresh](Pool::carry_out_afresh), if the broker knows of no call.
    Handed {
        /// How the worker was lost.
        failure: VmFailure,
        /// What it was handed to.
        vm: Vm,
    },
}

impl Unserved {
    /// How it ended, and what it was carried out in, if it may have begun.
    #[must_use]
    pub fn told(self) -> (Fate, Option<Vm>) {
        match self {
            Self::Ended { fate, vm } => (fate, vm),
            Self::Handed { failure, vm } => (Fate::Vm(failure), Some(vm)),
        }
    }
}

impl From<Fate> for Unserved {
    fn from(fate: Fate) -> Self {
        Self::Ended { fate, vm: None }
    }
}

impl From<Unmade> for Unserved {
    fn from(unmade: Unmade) -> Self {
        Fate::from(unmade).into()
    }
}

/// One run, admitted, for one tenant.
pub struct Task<'a> {
    /// The tenant whose run it is.
    pub tenant: &'a str,
    /// The run.
    pub job: &'a Job,
    /// Its end of the connection to the broker.
    pub broker: Option<&'a UnixStream>,
    /// If VMs are to be kept that have the program loaded: what admission
    /// found.
    pub prepared: Option<&'a Admitted>,
    /// Who hears what happens in it as it happens.
    pub tell: Option<Tell<'a>>,
}

/// What runs and the filling thread have in common.
#[derive(Debug)]
struct Shared {
    options: PoolOptions,
    maker: Maker,
    stock: Stock,
    losses: Losses,
}

impl Shared {
    /// Forks a worker, as long as patience lasts. It may not stand ready yet.
    fn make(
        &self,
        ram_bytes: usize,
        touched: bool,
        patience: Patience<'_>,
    ) -> Result<Worker, Unmade> {
        self.maker.make(ram_bytes, touched, patience, || {
            let gone = self.stock.lock().clear();
            self.losses.end(gone);
        })
    }
}

/// The pool.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    filler: Option<JoinHandle<()>>,
}

impl Pool {
    /// A pool of VMs that trust these keys. The first zygote is started when it
    /// is first needed.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn new(trust: &TrustKeys, options: PoolOptions) -> io::Result<Self> {
        Self::counting(trust, options, Losses::new(options.reuse))
    }

    /// One that trusts other keys and counts on where this one has got to.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn successor(&self, trust: &TrustKeys) -> io::Result<Self> {
        let Shared { options, losses, .. } = &*self.shared;
        Self::counting(trust, *options, losses.clone())
    }

    fn counting(trust: &TrustKeys, options: PoolOptions, losses: Losses) -> io::Result<Self> {
        let (maker, stock) = (Maker::new(trust, options), Stock::new(options));
        let shared = Arc::new(Shared { options, maker, stock, losses });
        let filler = match options.ready_max {
            0 => None,
            _ => {
                let shared = Arc::clone(&shared);
                let thread = std::thread::Builder::new().name("pool".into());
                Some(thread.spawn(move || filler::fill(&shared))?)
            }
        };
        Ok(Self { shared, filler })
    }

    /// Whether all VMs that should be ready are: nothing is being made or ended.
    #[must_use]
    pub fn is_full(&self) -> bool {
        !self.shared.stock.lock().has_work()
    }

    /// What stands ready now.
    #[must_use]
    pub fn stands(&self) -> Stands {
        self.shared.stock.lock().stands()
    }

    /// What is on of the jail around workers, once there has been one.
    #[must_use]
    pub fn hardening(&self) -> Option<Hardening> {
        self.shared.maker.hardening()
    }

    /// What is weaker on this host than it could be; nothing before there has
    /// been a worker.
    #[must_use]
    pub fn weaknesses(&self) -> Vec<Weakness> {
        self.hardening().as_ref().map(Hardening::weaknesses).unwrap_or_default()
    }

    /// How many resets were found by their proof to have left something
    /// behind, in this pool and those that it succeeded. No run was given such a
    /// VM; one is enough to doubt the others.
    #[must_use]
    pub fn resets_disproven(&self) -> u64 {
        self.shared.losses.resets_disproven()
    }

    /// The zygote's process id, while there is one.
    #[must_use]
    pub fn zygote(&self) -> Option<libc::pid_t> {
        self.shared.maker.zygote()
    }

    /// For how long the zygote has said nothing, if it owes an answer for longer than one
    /// takes that is well. Runs that find no VM end as `unavailable` then, in their time.
    #[must_use]
    pub fn silence(&self) -> Option<Duration> {
        self.shared.maker.silence()
    }

    /// A worker of its own for whoever measures or tests: made now, and on no
    /// shelf.
    ///
    /// # Errors
    /// [`VmFailure`]: the host can make no VM.
    pub fn make(&self, touched: bool) -> Result<Worker, VmFailure> {
        let ram_bytes = self.shared.stock.usual_ram_bytes();
        Ok(self.shared.make(ram_bytes, touched, Patience::default())?)
    }

    /// What ends its processes, whoever has the pool, and while it ends by itself.
    #[must_use]
    pub fn killer(&self) -> Killer {
        Killer(Arc::downgrade(&self.shared))
    }

    /// Starts the first zygote, if none ever stood. What every run needs is
    /// not made in the time of one, unless patience is over before.
    ///
    /// # Errors
    /// [`VmFailure`]: it cannot be started. The next run says so too.
    pub fn stand_by(&self, patience: Patience<'_>) -> Result<(), VmFailure> {
        Ok(self.shared.maker.stand_by(patience)?)
    }

    /// The same for a service that starts, which nobody may start again, and that a VM can
    /// be made: what its host lacks for a moment is waited for, and so is a zygote that ended
    /// as it began. Where memory is short it is what is in a jail that the kernel ends first.
    ///
    /// # Errors
    /// [`VmFailure`]: it cannot be started, or makes no VM, and that is not about to change.
    pub fn stand_by_to_serve(&self, patience: Patience<'_>) -> Result<(), VmFailure> {
        self.shared.maker.stand_by_to_serve(patience)?;
        // A host may let a zygote stand and refuse each VM that it makes.
        let last = Instant::now() + shortage::TIME_MAX;
        let until = patience.until.map_or(last, |until| until.min(last));
        shortage::outlast_until(
            until,
            |_| true,
            || {
                let ram_bytes = self.shared.stock.usual_ram_bytes();
                self.shared.make(ram_bytes, false, patience)?.await_ready(patience)
            },
        )
    }

    /// Carries out a run, as long as patience lasts.
    ///
    /// # Errors
    /// [`Unserved`].
    pub fn carry_out(&self, task: &Task<'_>, patience: Patience<'_>) -> Result<Done, Unserved> {
        Conduct::new(&self.shared, task, patience).carry_out()
    }

    /// The same in a worker that is made for it and has had no program yet.
    ///
    /// # Errors
    /// [`Unserved`].
    pub fn carry_out_afresh(
        &self,
        task: &Task<'_>,
        patience: Patience<'_>,
    ) -> Result<Done, Unserved> {
        Conduct::new(&self.shared, task, patience).carry_out_afresh()
    }
}

/// What ends the processes of one pool, as long as there is anything of it.
#[derive(Debug)]
pub struct Killer(Weak<Shared>);

impl Killer {
    /// Whether there is a pool still that it could end.
    #[must_use]
    pub fn has_any(&self) -> bool {
        self.0.strong_count() > 0
    }

    /// Ends all workers with their zygote, whoever has them and waits for what: for
    /// who is about to end. A zygote that was stopped would not hear of that end.
    pub fn kill(&self) {
        let Some(shared) = self.0.upgrade() else { return };
        // Or the filling thread starts another for those that it finds ended.
        shared.stock.close();
        shared.maker.kill();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stock.close();
        if let Some(filler) = self.filler.take() {
            let _ = filler.join();
        }
        let mut shelves = self.shared.stock.lock();
        let left = [shelves.take_spent(), shelves.take_speaking()];
        drop(shelves);
        self.shared.losses.end(left.into_iter().flatten());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_of_a_pool_that_ends_by_itself_is_ended_all_the_same() {
        let pool = Pool::new(&TrustKeys::new([]).unwrap(), PoolOptions::default()).unwrap();
        let killer = pool.killer();
        // As its filling thread has, while it waits for a zygote that says nothing.
        let left = Arc::clone(&pool.shared);
        drop(pool);
        let _theirs = maker::tests::begin_zygote(&left.maker);
        let soon = Patience::until(Instant::now() + Duration::from_millis(10));
        assert!(left.maker.stand_by(soon).is_err());
        let process = maker::tests::process(&left.maker);
        assert!(killer.has_any());
        killer.kill();
        assert!(process.wait().is_ok());
        drop(left);
        assert!(!killer.has_any());
    }

    #[test]
    fn no_service_begins_where_a_zygote_stands_and_its_vms_do_not() {
        use forge_protocol::frame::Kind;
        use forge_protocol::worker::{Jailed, Ready, VmFailureKind, ZygoteReady, Zygoted};

        use crate::link::Link;
        use crate::pool::zygote::tests::say;

        let pool = Pool::new(&TrustKeys::new([]).unwrap(), PoolOptions::default()).unwrap();
        let mut theirs = maker::tests::begin_zygote(&pool.shared.maker);
        let refused = VmFailure::new(VmFailureKind::Unavailable, "KVM refuses its state");
        let says = Ready::Err(refused.clone());
        std::thread::spawn(move || {
            let stands = ZygoteReady::Ok(Jailed { procfs: true, landlock_abi: None });
            say(&mut theirs, Kind::ZygoteReady, &stands, None);
            let process = std::fs::File::open("/dev/null").unwrap();
            while theirs.receive(|kind| kind == Kind::Fork, Patience::default()).is_ok() {
                let mut worker = Link::new(UnixStream::from(theirs.take_passed().unwrap()));
                say(&mut worker, Kind::Ready, &says, None);
                say(&mut theirs, Kind::Zygoted, &Zygoted::Ok(()), Some(&process));
            }
        });
        assert_eq!(pool.stand_by(Patience::default()), Ok(()));
        assert_eq!(pool.stand_by_to_serve(Patience::default()), Err(refused));
    }

    #[test]
    fn a_disproven_reset_is_counted_though_its_worker_gets_no_other_run() {
        let trust = TrustKeys::new([]).unwrap();
        let reuse = Reuse::Reset { prove_one_in: 1 };
        let options = PoolOptions { ready_max: 2, reuse, ..PoolOptions::default() };
        let pool = Pool::new(&trust, options).unwrap();
        let key = Key { tenant: "a".into(), ram_bytes: 1 << 20, program: None };
        let stands = |pool: &Pool| {
            let (worker, theirs) = worker::tests::standing();
            assert!(pool.shared.stock.lock().give_back(&key, worker).is_none());
            theirs
        };
        // One that is well, and one that is not: within a second somebody looks.
        let _well = stands(&pool);
        worker::tests::say(&mut stands(&pool), &worker::tests::not_reset());
        let until = Instant::now() + Duration::from_secs(20);
        while pool.stands().owned > 1 || pool.resets_disproven() == 0 {
            assert!(Instant::now() < until, "nobody looked");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(pool.stands().owned, 1);
        // One that is dropped before, and what a pool counted that is no more.
        let next = pool.successor(&trust).unwrap();
        worker::tests::say(&mut stands(&pool), &worker::tests::not_reset());
        drop(pool);
        assert_eq!(next.resets_disproven(), 2);
    }
}
