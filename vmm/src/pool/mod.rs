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
//! | `executable` | what that process executes |
//! | `shelves` | the workers that stand ready, by what they can be used for |
//! | `turn` | a lock for which nobody waits longer than it can |
//! | [`zygote`] | the process that workers are forked from, from outside |
//! | [`worker`] | one worker, from outside |

mod executable;
mod shelves;
mod turn;
pub mod worker;
pub mod zygote;

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forge_protocol::limits::RunLimits;
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::{
    Fate, Fork, Job, Prepare, PreparedJob, Report, Reuse, Tier, VmFailure, VmFailureKind,
    ZygoteSetup,
};

use crate::admission::Admitted;
use crate::jail::{GroupLimits, Hardening, Spawned, Weakness};
use crate::link::Patience;
use crate::machine;
use crate::shortage;
use crate::trace::now_ns;
pub use shelves::{Key, ProgramKey, Stands};
use shelves::{Missing, Shelves};
use turn::Turn;
use worker::{Lost, Run, Tell, Worker};
use zygote::{Unmade, Zygote};

/// How long a worker may take to stand ready. It takes a millisecond; this is
/// for hosts that emulate everything.
const READY_TIME_MAX: Duration = Duration::from_secs(30);
/// How long the filling thread waits for a VM that stands ready to load a program.
/// The largest take 1.7 s where little else runs. One may hang, and nothing else is
/// made or ended meanwhile; a run that finds none that has it loaded has one load it in
/// its own time.
const PREPARE_TIME_MAX: Duration = Duration::from_secs(5);
/// How long the filling thread waits after it failed.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// How long it says nothing of the same failure, at most.
const SILENCE_MAX: Duration = Duration::from_secs(300);
/// How often the filling thread looks for what nobody misses, and for what has
/// something to say.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long it is listened to workers that are ended together. What an honest one
/// says is there at once.
const HEARD_TIME_MAX: Duration = Duration::from_millis(20);
/// How often a run is given to another worker if one was lost before it
/// began.
const ATTEMPTS: usize = 3;
/// How much memory a VM that serves one run touches while it waits, so that its
/// run need not: the stack, the queues, data, and the heap with a first page of
/// linear memory. One that is reset keeps what its runs touch, and would put
/// back what it touched ahead after every one of them.
const TOUCH_BYTES: u32 = 61 * 4096;

/// How a pool keeps its VMs.
#[derive(Clone, Copy, Debug, Default)]
pub struct PoolOptions {
    /// What a run is carried out in. In `process` nothing is reset.
    pub tier: Tier,
    /// So many stand ready at all times.
    pub ready_min: usize,
    /// At most so many do, when cold starts show that more are needed.
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
    /// When there was a worker, in [`crate::trace::now_ns`].
    pub taken: u64,
    /// When the run had been handed over.
    pub handed: u64,
    /// When the report was there.
    pub reported: u64,
    /// What the pool has to do now.
    pub upkeep: Upkeep,
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
            shared.end(ended);
            shared.resume_filling();
        }
    }
}

/// A run that nobody reported on.
#[derive(Debug, PartialEq)]
pub enum Unserved {
    /// How it ended: [`Fate::Vm`] if the host can make no VM or the worker was lost,
    /// [`Fate::Deadline`] if patience was over before there was a VM.
    Ended(Fate),
    /// Its worker seems not to have begun it, and was given its link to the broker
    /// ([`Lost::Handed`]). Over another link it may be carried out
    /// [afresh](Pool::carry_out_afresh), if the broker knows of no call.
    Handed(VmFailure),
}

impl From<Unserved> for Fate {
    fn from(unserved: Unserved) -> Self {
        match unserved {
            Unserved::Ended(fate) => fate,
            Unserved::Handed(failure) => Self::Vm(failure),
        }
    }
}

impl From<Fate> for Unserved {
    fn from(fate: Fate) -> Self {
        Self::Ended(fate)
    }
}

impl From<Unmade> for Unserved {
    fn from(unmade: Unmade) -> Self {
        Self::Ended(unmade.into())
    }
}

/// One run, admitted, for one tenant.
pub struct Task<'a> {
    /// Whose it is.
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

#[derive(Debug)]
struct Shared {
    setup: ZygoteSetup,
    options: PoolOptions,
    usual_ram_bytes: usize,
    zygote: Turn<Option<Zygote>>,
    reach: Mutex<Reach>,
    /// Of the last zygote.
    hardening: Mutex<Option<Hardening>>,
    shelves: Mutex<Shelves>,
    changed: Condvar,
    /// Of this pool and those that it succeeded.
    resets_disproven: Arc<AtomicU64>,
}

/// What [`Pool::kill`] reaches while others wait for the zygote.
#[derive(Debug, Default)]
struct Reach {
    /// The last zygote's process.
    process: Option<Arc<Spawned>>,
    /// No zygote is to live from now on.
    killed: bool,
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
        Self::counting(trust, options, Arc::default())
    }

    /// One that trusts other keys and counts on where this one has got to.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn successor(&self, trust: &TrustKeys) -> io::Result<Self> {
        let Shared { options, resets_disproven, .. } = &*self.shared;
        Self::counting(trust, *options, Arc::clone(resets_disproven))
    }

    fn counting(
        trust: &TrustKeys,
        options: PoolOptions,
        resets_disproven: Arc<AtomicU64>,
    ) -> io::Result<Self> {
        let trust = trust.as_slice().iter().map(|key| key.to_bytes()).collect();
        let shared = Arc::new(Shared {
            setup: ZygoteSetup { tier: options.tier, trust },
            options,
            usual_ram_bytes: machine::ram_bytes(&RunLimits::default()),
            zygote: Turn::new(None),
            reach: Mutex::default(),
            hardening: Mutex::new(None),
            shelves: Mutex::new(Shelves::new(options)),
            changed: Condvar::new(),
            resets_disproven,
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

    /// Whether everything stands ready that is to: nothing is being made or ended.
    #[must_use]
    pub fn is_full(&self) -> bool {
        !self.shared.shelves().has_work()
    }

    /// What stands ready now.
    #[must_use]
    pub fn stands(&self) -> Stands {
        self.shared.shelves().stands()
    }

    /// What is on of the jail around workers, once there has been one.
    #[must_use]
    pub fn hardening(&self) -> Option<Hardening> {
        self.shared.lock_hardening().clone()
    }

    /// What is weaker on this host than it could be; nothing before there has
    /// been a worker.
    #[must_use]
    pub fn weaknesses(&self) -> Vec<Weakness> {
        self.shared.lock_hardening().as_ref().map(Hardening::weaknesses).unwrap_or_default()
    }

    /// How many resets were found by their proof to have left something
    /// behind, in this pool and those that it succeeded. No run was given such a
    /// VM; one is enough to doubt the others.
    #[must_use]
    pub fn resets_disproven(&self) -> u64 {
        self.shared.resets_disproven.load(Ordering::Relaxed)
    }

    /// The zygote's process id, while there is one.
    #[must_use]
    pub fn zygote(&self) -> Option<libc::pid_t> {
        self.shared.zygote.take(Patience::default()).ok()?.as_ref().map(Zygote::id)
    }

    /// A worker of its own for whoever measures or tests: made now, and on no
    /// shelf.
    ///
    /// # Errors
    /// [`VmFailure`]: the host can make no VM.
    pub fn make(&self, touched: bool) -> Result<Worker, VmFailure> {
        let made = self.shared.make(self.shared.usual_ram_bytes, touched, Patience::default());
        made.map_err(VmFailure::from)
    }

    /// Ends all workers with their zygote, whoever has them and waits for what: for
    /// who is about to end. A zygote that was stopped would not hear of that end.
    pub fn kill(&self) {
        // Or the filling thread starts another for those that it finds ended.
        self.shared.shelves().close();
        self.shared.changed.notify_all();
        let mut reach = self.shared.lock_reach();
        reach.killed = true;
        if let Some(process) = &reach.process {
            // One that is gone was waited for, and its descriptor names no other.
            let _ = process.kill();
        }
    }

    /// Starts the first zygote, if none ever stood. What every run needs is
    /// not made in the time of one, unless patience is over before.
    ///
    /// # Errors
    /// [`VmFailure`]: it cannot be started. The next run says so too.
    pub fn stand_by(&self, patience: Patience<'_>) -> Result<(), VmFailure> {
        Ok(self.shared.stand_by(patience)?)
    }

    /// The same for a service that starts, which nobody may start again: what its host
    /// lacks for a moment is waited for, and so is one that ended as it began. Where
    /// memory is short it is what is in a jail that the kernel ends first.
    ///
    /// # Errors
    /// [`VmFailure`]: it cannot be started, and that is not about to change.
    pub fn stand_by_to_serve(&self, patience: Patience<'_>) -> Result<(), VmFailure> {
        let last = Instant::now() + shortage::TIME_MAX;
        let until = patience.until.map_or(last, |until| until.min(last));
        let mut failures = Failures::default();
        let passes = |unmade: &Unmade| unmade.is_loss() || matches!(unmade, Unmade::Short(_));
        let stood = shortage::outlast_until(until, passes, || {
            let stood = self.shared.stand_by(patience);
            if let Err(unmade @ (Unmade::Short(failure) | Unmade::Failed(failure))) = &stood
                && passes(unmade)
                && failures.is_due(&failure.message, Instant::now())
            {
                tracing::warn!(reason = failure.message, "there is no zygote yet");
            }
            stood
        });
        Ok(stood?)
    }

    /// Carries out a run, as long as patience lasts.
    ///
    /// # Errors
    /// [`Unserved`].
    pub fn carry_out(&self, task: &Task<'_>, patience: Patience<'_>) -> Result<Done, Unserved> {
        let limits = &task.job.load.limits;
        let key = Key::of(task);
        if let Some(admitted) = task.prepared
            && self.shared.options.ready_max > 0
        {
            let program = ProgramKey {
                digest: admitted.digest,
                signer: admitted.signer.to_bytes(),
                limits: limits.clone(),
            };
            let key = Key { program: Some(program), ..key.clone() };
            match self.carry_out_prepared(key, task, patience) {
                // It could not be prepared; the plain way says why.
                Err(Lost::Before(failure)) => self.shared.note_lost(&failure),
                Err(Lost::Handed(failure)) => return Err(self.handed(failure, patience)),
                Err(Lost::During(failure) | Lost::Crowded(failure)) => {
                    return Err(Fate::Vm(failure).into());
                }
                Ok(done) => return Ok(done),
            }
        }
        self.attempt(&key, task, patience, ATTEMPTS)
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
        self.attempt(&Key::of(task), task, patience, 1)
    }

    fn attempt(
        &self,
        key: &Key,
        task: &Task<'_>,
        patience: Patience<'_>,
        attempts: usize,
    ) -> Result<Done, Unserved> {
        let mut lost = None;
        for left in (0..attempts).rev() {
            if let Some(fate) = unwanted(patience) {
                return Err(fate.into());
            }
            // All that stand ready may be dead, as with their zygote: the last
            // attempt is made with one that nobody can have lost yet.
            let ready = if left > 0 { self.shared.take(key) } else { None };
            let worker = match ready {
                Some(worker) => worker,
                None => self.shared.make(key.ram_bytes, false, patience)?,
            };
            match self.shared.use_worker(key, worker, Run::Whole(task.job), task, patience) {
                // It was lost while nobody looked; another can do the same.
                Err(Lost::Before(failure)) => {
                    self.shared.note_lost(&failure);
                    lost = Some(failure);
                }
                Err(Lost::Handed(failure)) => return Err(self.handed(failure, patience)),
                Err(Lost::During(failure) | Lost::Crowded(failure)) => {
                    return Err(Fate::Vm(failure).into());
                }
                Ok(done) => return Ok(done),
            }
        }
        if patience.is_over() {
            return Err(Fate::Deadline.into());
        }
        let untried = || VmFailure::new(VmFailureKind::Internal, "no worker was tried");
        Err(Fate::Vm(lost.unwrap_or_else(untried)).into())
    }

    /// Its worker was lost with the run's link. Nobody asks on for a run that is
    /// wanted no more.
    fn handed(&self, failure: VmFailure, patience: Patience<'_>) -> Unserved {
        self.shared.note_lost(&failure);
        unwanted(patience).map_or(Unserved::Handed(failure), Unserved::Ended)
    }

    fn carry_out_prepared(
        &self,
        key: Key,
        task: &Task<'_>,
        patience: Patience<'_>,
    ) -> Result<Done, Lost> {
        let Job { load, start, program, input, deadline, brokered } = task.job;
        let worker = match self.shared.take(&key) {
            Some(worker) => worker,
            None => {
                let prepare = Prepare { load: load.clone(), program: program.clone() };
                let unprepared = self.shared.take(&Key { program: None, ..key.clone() });
                let mut worker = match unprepared {
                    Some(worker) => worker,
                    None => {
                        let made = self.shared.make(key.ram_bytes, false, patience);
                        made.map_err(|unmade| Lost::Before(unmade.into()))?
                    }
                };
                worker.await_ready(patience).map_err(Lost::Before)?;
                let began = Instant::now();
                worker.prepare(&prepare, patience).map_err(Lost::Before)?;
                // Only now, as nobody else could prepare one that fails, hangs or takes
                // longer than the filling thread waits.
                if began.elapsed() < PREPARE_TIME_MAX {
                    self.shared.shelves().keep_prepared(&key, prepare);
                }
                worker
            }
        };
        let job = PreparedJob {
            start: start.clone(),
            input: input.clone(),
            deadline: *deadline,
            brokered: *brokered,
        };
        self.shared.use_worker(&key, worker, Run::Prepared(&job), task, patience)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.shelves().close();
        self.shared.changed.notify_all();
        if let Some(filler) = self.filler.take() {
            let _ = filler.join();
        }
        let mut shelves = self.shared.shelves();
        let left = [shelves.take_spent(), shelves.take_speaking()];
        drop(shelves);
        self.shared.end(left.into_iter().flatten());
    }
}

/// Failures to fill a pool, each a second after the one before. What is the same again
/// is said seldomer each time.
#[derive(Default)]
struct Failures {
    said: Option<(String, Instant)>,
    silence: Duration,
}

impl Failures {
    /// Whether it is to be said now, which then is when it was said last.
    fn is_due(&mut self, why: &str, now: Instant) -> bool {
        match &self.said {
            Some((before, at)) if before == why => {
                if now.saturating_duration_since(*at) < self.silence {
                    return false;
                }
                self.silence = (2 * self.silence).min(SILENCE_MAX);
            }
            _ => self.silence = RETRY_AFTER,
        }
        self.said = Some((why.to_owned(), now));
        true
    }
}

/// What has become of a run that nobody waits for any more.
fn unwanted(patience: Patience<'_>) -> Option<Fate> {
    if patience.is_over() {
        return Some(Fate::Deadline);
    }
    let cancelled = || Fate::Vm(worker::lost(&io::ErrorKind::ConnectionAborted.into()));
    patience.is_cancelled().then(cancelled)
}

impl Shared {
    fn shelves(&self) -> MutexGuard<'_, Shelves> {
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_hardening(&self) -> MutexGuard<'_, Option<Hardening>> {
        self.hardening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stand_by(&self, patience: Patience<'_>) -> Result<(), Unmade> {
        // A zygote that was lost since is started by whoever needs it.
        if self.lock_hardening().is_some() {
            return Ok(());
        }
        let mut zygote = self.zygote.take(patience).map_err(Unmade::Late)?;
        self.standing(&mut zygote, patience)?;
        Ok(())
    }

    fn lock_reach(&self) -> MutexGuard<'_, Reach> {
        self.reach.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has [`Pool::kill`] reach this zygote. One that was started meanwhile ends here.
    fn reach(&self, zygote: &Zygote) {
        let process = zygote.process();
        let mut reach = self.lock_reach();
        if reach.killed {
            let _ = process.kill();
        }
        reach.process = Some(process);
    }

    /// A worker was lost before it had a run, which another gets. That is no
    /// reason for silence if its last reset was not one, or if it tried what
    /// its jail forbids.
    fn note_lost(&self, failure: &VmFailure) {
        match failure.kind {
            VmFailureKind::NotReset => {
                self.resets_disproven.fetch_add(1, Ordering::Relaxed);
                tracing::error!(reason = failure.message, "a VM that was reset is not as it was");
            }
            VmFailureKind::WorkerBroke => {
                tracing::error!(reason = failure.message, "a worker was lost between two runs");
            }
            _ => {}
        }
    }

    /// Ends workers that nobody needs, and hears what they have to say. One whose
    /// run is over and that is not put back has nothing to.
    fn end(&self, workers: impl IntoIterator<Item = Worker>) {
        let until = Instant::now() + HEARD_TIME_MAX;
        for worker in workers {
            let is_over = self.options.reuse == Reuse::Fresh && worker.runs() > 0;
            if !is_over && worker.speaks() {
                self.note_lost(&worker.last_word(until));
            }
        }
    }

    /// A zygote that stands, as long as patience lasts; started if there is none.
    /// One that does not stand yet goes on, for whoever comes next.
    fn standing<'a>(
        &self,
        place: &'a mut Option<Zygote>,
        patience: Patience<'_>,
    ) -> Result<&'a mut Zygote, Unmade> {
        // One that is lost while it begins is no word on this host.
        for again in [true, false] {
            let mut zygote = match place.take() {
                Some(zygote) if zygote.stands() => return Ok(place.insert(zygote)),
                Some(zygote) => zygote,
                None if self.lock_reach().killed => {
                    return Err(Unmade::Late(io::ErrorKind::ConnectionAborted.into()));
                }
                None => match Zygote::begin(&self.setup, self.options.group.as_ref()) {
                    Err(unmade) if again && unmade.is_loss() => continue,
                    begun => begun?,
                },
            };
            self.reach(&zygote);
            match zygote.stand(patience) {
                Ok(()) => {
                    *self.lock_hardening() = Some(zygote.hardening().clone());
                    return Ok(place.insert(zygote));
                }
                Err(unmade) if again && unmade.is_loss() => {}
                Err(late @ Unmade::Late(_)) => {
                    *place = Some(zygote);
                    return Err(late);
                }
                Err(unmade) => return Err(unmade),
            }
        }
        Err(Unmade::Failed(VmFailure::new(VmFailureKind::Internal, "no zygote was tried")))
    }

    /// A worker from the shelves. What takes its place is made when its run is
    /// over, or within [`LOOK_EVERY`], so that it is not made beside the run;
    /// at once only if nothing is left for the next who comes.
    fn take(&self, key: &Key) -> Option<Worker> {
        let usual = key.ram_bytes == self.usual_ram_bytes;
        let mut shelves = self.shelves();
        let worker = shelves.take(key, usual);
        let urgent = shelves.is_bare(key);
        drop(shelves);
        if urgent {
            self.changed.notify_one();
        }
        worker
    }

    /// After a run, however it went.
    fn resume_filling(&self) {
        if self.shelves().has_work() {
            self.changed.notify_one();
        }
    }

    fn use_worker(
        self: &Arc<Self>,
        key: &Key,
        worker: Worker,
        run: Run<'_>,
        task: &Task<'_>,
        patience: Patience<'_>,
    ) -> Result<Done, Lost> {
        // However it goes.
        let mut upkeep = Upkeep { shared: Arc::downgrade(self), ended: None };
        let (report, vm, [taken, handed, reported]) =
            self.conduct(key, worker, run, task, patience, &mut upkeep)?;
        Ok(Done { report, vm, taken, handed, reported, upkeep })
    }

    fn conduct(
        &self,
        key: &Key,
        mut worker: Worker,
        run: Run<'_>,
        task: &Task<'_>,
        patience: Patience<'_>,
        upkeep: &mut Upkeep,
    ) -> Result<(Report, Vm, [u64; 3]), Lost> {
        let vm = if worker.runs() == 0 { Vm::Fresh } else { Vm::Reset };
        let taken = now_ns();
        if task.tell.is_some() {
            worker.ask_to_tell();
        }
        if let Err(unbegun) = worker.begin(run, task.broker, patience) {
            let lost = worker.not_given(unbegun);
            if let Lost::Crowded(_) = lost {
                // As it was, and with it what stands ready.
                let usual = key.ram_bytes == self.usual_ram_bytes;
                // One that did not say yet that it stands ready may never do.
                upkeep.ended = match worker.is_ready() {
                    true => self.shelves().put_back(key, worker, usual),
                    false => Some(worker),
                };
            }
            return Err(lost);
        }
        let handed = now_ns();
        let report = worker.finish_telling(patience, task.tell)?;
        let reported = now_ns();
        // Without a procfs its zygote made it for one run.
        let resets = self.lock_hardening().as_ref().is_none_or(|on| on.procfs);
        // Who fills the pool ends workers too; without, the result does.
        upkeep.ended = if self.options.ready_max == 0 {
            Some(worker)
        } else if resets && self.options.reuse != Reuse::Fresh {
            self.shelves().give_back(key, worker)
        } else {
            self.shelves().spend(worker)
        };
        Ok((report, vm, [taken, handed, reported]))
    }

    /// Forks a worker, as long as patience lasts. It may not stand ready yet.
    fn make(
        &self,
        ram_bytes: usize,
        touched: bool,
        patience: Patience<'_>,
    ) -> Result<Worker, Unmade> {
        let reuse = if self.options.ready_max > 0 { self.options.reuse } else { Reuse::Fresh };
        let touch_bytes = if touched && reuse == Reuse::Fresh { TOUCH_BYTES } else { 0 };
        let order = Fork { ram_bytes: ram_bytes as u64, touch_bytes, reuse };
        let mut zygote = self.zygote.take(patience).map_err(Unmade::Late)?;
        let mut lost = None;
        for _ in 0..2 {
            let standing = self.standing(&mut zygote, patience).map_err(|unmade| match unmade {
                // Where none ever stood that is a word on this host, and not on the run.
                Unmade::Late(error)
                    if error.kind() == io::ErrorKind::TimedOut
                        && self.lock_hardening().is_none() =>
                {
                    Unmade::Failed(Unmade::Late(error).into())
                }
                unmade => unmade,
            });
            match standing?.fork(order, patience) {
                Ok(made) => return made,
                Err(error) => {
                    tracing::warn!(%error, "the zygote is gone; another is started");
                    // And its workers with it.
                    let gone = self.shelves().clear();
                    self.end(gone);
                    lost = Some(error);
                    *zygote = None;
                }
            }
        }
        let why = lost.map_or_else(String::new, |error| format!("the zygote is gone: {error}"));
        Err(Unmade::Failed(VmFailure::new(VmFailureKind::Internal, why)))
    }

    /// The filling thread: ends what is spent, makes what is missing, lets go
    /// what is not missed.
    fn fill(&self) {
        let mut shelves = self.shelves();
        let mut looked = Instant::now();
        let mut failures = Failures::default();
        while !shelves.is_closing() {
            if looked.elapsed() >= LOOK_EVERY {
                looked = Instant::now();
                let speaking = shelves.take_speaking();
                if !speaking.is_empty() {
                    drop(shelves);
                    tracing::warn!(workers = speaking.len(), "workers that stood ready have ended");
                    self.end(speaking);
                    shelves = self.shelves();
                    continue;
                }
            }
            let spent = shelves.take_spent();
            if !spent.is_empty() {
                drop(shelves);
                self.end(spent);
                shelves = self.shelves();
                shelves.ended();
                continue;
            }
            let Some(missing) = shelves.missing() else {
                let unmissed = shelves.let_go(Instant::now());
                if unmissed.is_some() {
                    drop(shelves);
                    self.end(unmissed);
                    shelves = self.shelves();
                    continue;
                }
                let waited = self.changed.wait_timeout(shelves, LOOK_EVERY);
                shelves = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            };
            drop(shelves);
            let made = self.make_missing(&missing);
            shelves = self.shelves();
            match made {
                Ok(worker) => {
                    failures = Failures::default();
                    if let Some(unwanted) = shelves.add(missing, worker) {
                        drop(shelves);
                        drop(unwanted);
                        shelves = self.shelves();
                    }
                }
                Err(failure) => {
                    if failures.is_due(&failure.message, Instant::now()) {
                        tracing::warn!(reason = failure.message, "the pool cannot be filled");
                    }
                    shelves.give_up(&missing);
                    let waited = self.changed.wait_timeout(shelves, RETRY_AFTER);
                    shelves = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }

    fn make_missing(&self, missing: &Missing) -> Result<Worker, VmFailure> {
        let patience = Patience::until(Instant::now() + READY_TIME_MAX);
        match missing {
            Missing::Standing => {
                let mut worker = self.make(self.usual_ram_bytes, true, patience)?;
                worker.await_ready(patience)?;
                Ok(worker)
            }
            Missing::Prepared(key, order) => {
                let mut worker = self.make(key.ram_bytes, true, patience)?;
                worker.await_ready(patience)?;
                worker.prepare(order, Patience::until(Instant::now() + PREPARE_TIME_MAX))?;
                Ok(worker)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd as _;
    use std::sync::atomic::AtomicBool;

    use forge_protocol::codec::Encode;
    use forge_protocol::frame::{self, Frame, Kind};
    use forge_protocol::guest::{Load, Start};
    use forge_protocol::worker::{Jailed, Ready, Timing, ZygoteReady, Zygoted};

    use super::*;
    use crate::cancel::Cancel;
    use crate::link::Link;

    #[test]
    fn a_pool_that_cannot_be_filled_says_the_same_seldomer_each_time() {
        let (mut failures, start) = (Failures::default(), Instant::now());
        let at = |s| start + Duration::from_secs(s);
        let said = (0..100).filter(|s| failures.is_due("no KVM", at(*s)));
        assert_eq!(said.collect::<Vec<_>>(), [0, 1, 3, 7, 15, 31, 63]);
        assert!(failures.is_due("no memory", at(100)), "another reason");
    }

    #[test]
    fn a_zygote_that_stands_still_is_ended_though_somebody_waits_for_it() {
        let pool = Pool::new(&TrustKeys::new([]).unwrap(), PoolOptions::default()).unwrap();
        let (zygote, mut theirs) = zygote::tests::beginning();
        let process = zygote.process();
        *pool.shared.zygote.take(Patience::default()).unwrap() = Some(zygote);
        std::thread::scope(|scope| {
            let stands = scope.spawn(|| pool.stand_by(Patience::default()));
            while pool.shared.lock_reach().process.is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            pool.kill();
            assert!(process.wait().is_ok());
            assert!(!stands.is_finished(), "nobody waited for it");
            let gone = ZygoteReady::Err(VmFailure::new(VmFailureKind::Internal, "gone"));
            say(&mut theirs, Kind::ZygoteReady, &gone, None);
            assert!(stands.join().unwrap().is_err());
        });
    }

    #[test]
    fn a_zygote_that_is_started_while_all_are_ended_ends_and_no_other_follows() {
        let pool = Pool::new(&TrustKeys::new([]).unwrap(), PoolOptions::default()).unwrap();
        let (zygote, theirs) = zygote::tests::beginning();
        let process = zygote.process();
        pool.kill();
        *pool.shared.zygote.take(Patience::default()).unwrap() = Some(zygote);
        std::thread::scope(|scope| {
            let stands = scope.spawn(|| pool.stand_by(Patience::default()));
            assert!(process.wait().is_ok());
            // As its end of the socket goes with it.
            drop(theirs);
            assert_eq!(stands.join().unwrap().unwrap_err().kind, VmFailureKind::Cancelled);
        });
        assert_eq!(pool.zygote(), None);
    }

    #[test]
    fn what_a_host_lacks_for_good_is_told_a_service_at_once() {
        let pool = Pool::new(&TrustKeys::new([]).unwrap(), PoolOptions::default()).unwrap();
        let (zygote, mut theirs) = zygote::tests::beginning();
        *pool.shared.zygote.take(Patience::default()).unwrap() = Some(zygote);
        let failure = VmFailure::new(VmFailureKind::Unavailable, "no namespaces here");
        say(&mut theirs, Kind::ZygoteReady, &ZygoteReady::Err(failure.clone()), None);
        // Another one would say something else.
        assert_eq!(pool.stand_by_to_serve(Patience::default()), Err(failure));
        assert_eq!(pool.zygote(), None);
    }

    #[test]
    fn a_run_waits_no_longer_than_it_can_for_a_zygote_that_begins() {
        let pool = Pool::new(&TrustKeys::new([]).unwrap(), PoolOptions::default()).unwrap();
        let (zygote, mut theirs) = zygote::tests::beginning();
        let id = zygote.id();
        *pool.shared.zygote.take(Patience::default()).unwrap() = Some(zygote);
        let make = |patience| pool.shared.make(pool.shared.usual_ram_bytes, false, patience);
        let soon = Patience::until(Instant::now() + Duration::from_millis(5));
        match make(soon) {
            // None ever stood here.
            Err(Unmade::Failed(failure)) => assert_eq!(failure.kind, VmFailureKind::Unavailable),
            other => panic!("{other:?}"),
        }
        *pool.shared.lock_hardening() = pool
            .shared
            .zygote
            .take(soon)
            .ok()
            .and_then(|it| Some(it.as_ref()?.hardening().clone()));
        match make(Patience::until(Instant::now() + Duration::from_millis(5))) {
            Err(Unmade::Late(error)) => assert_eq!(error.kind(), io::ErrorKind::TimedOut),
            other => panic!("{other:?}"),
        }
        *pool.shared.lock_hardening() = None;
        let cancel = Cancel::new().unwrap();
        cancel.raise();
        assert!(pool.stand_by(Patience { until: None, cancel: Some(&cancel) }).is_err());
        // It goes on, and what it says then is heard by whoever comes next.
        assert_eq!(pool.zygote(), Some(id));
        let failure = VmFailure::new(VmFailureKind::Unavailable, "no VM here");
        let mut bytes = Vec::new();
        frame::write_message(Kind::ZygoteReady, &ZygoteReady::Err(failure), &mut bytes);
        theirs.send(&bytes, Patience::default()).unwrap();
        match make(Patience::default()) {
            Err(Unmade::Failed(failure)) => assert_eq!(failure.message, "no VM here"),
            other => panic!("{other:?}"),
        }
        assert_eq!(pool.zygote(), None);
    }

    fn say<T: Encode>(link: &mut Link, kind: Kind, message: &T, passed: Option<&File>) {
        let mut bytes = Vec::new();
        frame::write_message(kind, message, &mut bytes);
        let mut passed = passed.map(|file| file.as_fd());
        link.pass(&bytes, &mut passed, Patience::default()).unwrap();
    }

    #[test]
    fn a_program_that_hangs_while_it_is_prepared_keeps_the_pool_from_nothing_for_long() {
        let options = PoolOptions { ready_max: 1, ..PoolOptions::default() };
        let pool = Pool::new(&TrustKeys::new([]).unwrap(), options).unwrap();
        let (zygote, mut theirs) = zygote::tests::beginning();
        *pool.shared.zygote.take(Patience::default()).unwrap() = Some(zygote);
        let stands = ZygoteReady::Ok(Jailed { procfs: true, landlock_abi: None });
        say(&mut theirs, Kind::ZygoteReady, &stands, None);
        let limits = RunLimits::default();
        let program = ProgramKey { digest: [1; 32], signer: [0; 32], limits: limits.clone() };
        let key = Key { tenant: "a".into(), ram_bytes: 1 << 20, program: Some(program) };
        let load = Load { limits, announce: true };
        pool.shared.shelves().keep_prepared(&key, Prepare { load, program: vec![1] });
        pool.shared.changed.notify_all();
        theirs.receive(|kind| kind == Kind::Fork, Patience::default()).unwrap();
        let mut worker = Link::new(UnixStream::from(theirs.take_passed().unwrap()));
        let process = File::open("/dev/null").unwrap();
        say(&mut theirs, Kind::Zygoted, &Zygoted::Ok(()), Some(&process));
        say(&mut worker, Kind::Ready, &Ready::Ok(Timing::default()), None);
        worker.receive(|kind| kind == Kind::Prepare, Patience::default()).unwrap();
        // It never says that it has it loaded; and it is not asked again.
        let until = Instant::now() + READY_TIME_MAX / 3;
        while !pool.is_full() {
            assert!(Instant::now() < until, "the pool still waits for it");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A pool whose zygote makes workers that answer each order so.
    fn pool_of(
        options: PoolOptions,
        answer: impl Fn(&mut Link, &Frame) + Copy + Send + 'static,
    ) -> Pool {
        let pool = Pool::new(&TrustKeys::new([]).unwrap(), options).unwrap();
        let (zygote, mut theirs) = zygote::tests::beginning();
        *pool.shared.zygote.take(Patience::default()).unwrap() = Some(zygote);
        let serves = move || {
            let stands = ZygoteReady::Ok(Jailed { procfs: true, landlock_abi: None });
            say(&mut theirs, Kind::ZygoteReady, &stands, None);
            let process = File::open("/dev/null").unwrap();
            while theirs.receive(|kind| kind == Kind::Fork, Patience::default()).is_ok() {
                let worker = Link::new(UnixStream::from(theirs.take_passed().unwrap()));
                say(&mut theirs, Kind::Zygoted, &Zygoted::Ok(()), Some(&process));
                std::thread::spawn(move || lives(worker, answer));
            }
        };
        std::thread::spawn(serves);
        pool
    }

    fn lives(mut worker: Link, answer: impl Fn(&mut Link, &Frame)) {
        say(&mut worker, Kind::Ready, &Ready::Ok(Timing::default()), None);
        while let Ok(order) = worker.receive(|_| true, Patience::default()) {
            answer(&mut worker, &order);
        }
    }

    fn job(brokered: bool) -> Job {
        let run_id = forge_protocol::RunId([1; 16]);
        Job {
            load: Load { limits: RunLimits::default(), announce: false },
            start: Start { run_id, seed: [2; 32], start_unix_ns: 3, granted: Vec::new() },
            program: vec![1],
            input: b"{}".to_vec(),
            deadline: machine::deadline_in(READY_TIME_MAX),
            brokered,
        }
    }

    #[test]
    fn a_program_is_kept_prepared_once_somebody_could_prepare_it() {
        static PREPARED: AtomicU64 = AtomicU64::new(0);
        static FAILS: AtomicBool = AtomicBool::new(true);
        let options = PoolOptions { ready_max: 2, ..PoolOptions::default() };
        let pool = pool_of(options, |worker, order| {
            if order.kind == Kind::Prepare {
                PREPARED.fetch_add(1, Ordering::SeqCst);
                let ready = match FAILS.load(Ordering::SeqCst) {
                    true => Err(VmFailure::new(VmFailureKind::Internal, "it cannot be loaded")),
                    false => Ready::Ok(Timing::default()),
                };
                say(worker, Kind::Ready, &ready, None);
            } else {
                say(worker, Kind::Report, &crate::worker::unserved(Fate::Deadline), None);
            }
        });
        let job = job(false);
        let task = Task { tenant: "a", job: &job, broker: None, prepared: None, tell: None };
        let program = ProgramKey { digest: [1; 32], signer: [0; 32], limits: RunLimits::default() };
        let key = Key { program: Some(program), ..Key::of(&task) };
        let prepared_after = |key: Key| {
            let done = pool.carry_out_prepared(key, &task, Patience::default());
            let is_done = done.is_ok();
            drop(done);
            while !pool.is_full() {
                std::thread::sleep(Duration::from_millis(1));
            }
            (is_done, PREPARED.load(Ordering::SeqCst))
        };
        assert_eq!(prepared_after(key.clone()), (false, 1), "nobody prepares it again");
        FAILS.store(false, Ordering::SeqCst);
        assert_eq!(prepared_after(key), (true, 3), "one is kept for the next run");
    }

    #[test]
    fn a_run_whose_worker_had_its_link_is_given_to_no_other_over_it() {
        let reuse = Reuse::Reset { prove_one_in: 1 };
        let options = PoolOptions { ready_max: 2, reuse, ..PoolOptions::default() };
        let pool = pool_of(options, |worker, _| {
            say(worker, Kind::Report, &crate::worker::unserved(Fate::Deadline), None);
        });
        let lies = |key: &Key| {
            let (worker, theirs) = worker::tests::standing();
            assert!(pool.shared.shelves().give_back(key, worker).is_none());
            std::thread::spawn(move || {
                let mut theirs = Link::new(theirs);
                theirs.receive(|kind| kind == Kind::Job, Patience::default()).unwrap();
                say(&mut theirs, Kind::Ready, &worker::tests::not_reset(), None);
            })
        };
        let (link, _broker) = UnixStream::pair().unwrap();
        let (plain, brokered) = (job(false), job(true));
        let task = Task { tenant: "a", job: &plain, broker: None, prepared: None, tell: None };
        let key = Key::of(&task);
        // There is nothing that it could have called.
        let lied = lies(&key);
        assert!(pool.carry_out(&task, Patience::default()).is_ok());
        lied.join().unwrap();
        pool.shared.shelves().clear();
        let task = Task { job: &brokered, broker: Some(&link), ..task };
        let lied = lies(&key);
        match pool.carry_out(&task, Patience::default()) {
            Err(Unserved::Handed(failure)) => assert_eq!(failure.kind, VmFailureKind::NotReset),
            other => panic!("{other:?}"),
        }
        lied.join().unwrap();
        // Whoever carries it out then never had a program.
        let (worker, mut theirs) = worker::tests::standing();
        pool.shared.shelves().give_back(&key, worker);
        assert_eq!(pool.carry_out_afresh(&task, Patience::default()).unwrap().vm, Vm::Fresh);
        theirs.set_nonblocking(true).unwrap();
        let asked = std::io::Read::read(&mut theirs, &mut [0]).unwrap_err();
        assert_eq!(asked.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_reset_that_was_disproven_is_counted_and_other_losses_are_not() {
        let trust = TrustKeys::new([]).unwrap();
        let pool = Pool::new(&trust, PoolOptions::default()).unwrap();
        let lost = |kind| pool.shared.note_lost(&VmFailure::new(kind, "gone"));
        lost(VmFailureKind::WorkerLost);
        assert_eq!(pool.resets_disproven(), 0);
        lost(VmFailureKind::NotReset);
        assert_eq!(pool.resets_disproven(), 1);
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
            assert!(pool.shared.shelves().give_back(&key, worker).is_none());
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
