//! How one run is carried out: a worker is taken or made, given the run, and seen to
//! after it. A worker that was lost before costs the run nothing but time.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use forge_protocol::worker::{Fate, Job, Prepare, PreparedJob, VmFailure, VmFailureKind};

use super::filler::PREPARE_TIME_MAX;
use super::shelves::{Key, ProgramKey};
use super::worker::{self, Lost, Run, Unbegun, Worker};
use super::{Done, Served, Shared, Task, Unserved, Upkeep, Vm};
use crate::link::Patience;
use crate::trace::now_ns;

/// How often a run is given to another worker if one was lost before it
/// began.
const ATTEMPTS: usize = 3;

/// One run, and how long it is waited for.
pub(super) struct Conduct<'a> {
    shared: &'a Arc<Shared>,
    task: &'a Task<'a>,
    patience: Patience<'a>,
}

impl<'a> Conduct<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>, task: &'a Task<'a>, patience: Patience<'a>) -> Self {
        Self { shared, task, patience }
    }

    /// Carries it out in whatever serves it soonest.
    pub(super) fn carry_out(&self) -> Result<Done, Unserved> {
        let key = Key::of(self.task);
        if let Some(admitted) = self.task.prepared
            && self.shared.options.ready_max > 0
        {
            let program = ProgramKey {
                digest: admitted.digest,
                signer: admitted.signer.to_bytes(),
                limits: self.task.job.load.limits.clone(),
            };
            let key = Key { program: Some(program), ..key.clone() };
            match self.carry_out_prepared(key) {
                // It could not be prepared; the plain way says why.
                Err(Undone::Unbegun(failure)) => {
                    self.shared.losses.tell(&failure);
                }
                Err(Undone::Over(unserved)) => return Err(unserved),
                Ok(done) => return Ok(done),
            }
        }
        self.attempt(&key, ATTEMPTS)
    }

    /// The same in a worker that is made for it and has had no program yet.
    pub(super) fn carry_out_afresh(&self) -> Result<Done, Unserved> {
        self.attempt(&Key::of(self.task), 1)
    }

    fn attempt(&self, key: &Key, attempts: usize) -> Result<Done, Unserved> {
        let mut lost = None;
        for left in (0..attempts).rev() {
            if let Some(fate) = unwanted(self.patience) {
                return Err(fate.into());
            }
            // All that stand ready may be dead, as with their zygote: the last
            // attempt is made with one that nobody can have lost yet.
            let ready = if left > 0 { self.shared.stock.take(key) } else { None };
            let worker = match ready {
                Some(worker) => worker,
                None => self.shared.make(key.ram_bytes, false, self.patience)?,
            };
            match self.use_worker(key, worker, Run::Whole(self.task.job)) {
                // It was lost while nobody looked; another can do the same.
                Err(Undone::Unbegun(failure)) => {
                    self.shared.losses.tell(&failure);
                    lost = Some(failure);
                }
                Err(Undone::Over(unserved)) => return Err(unserved),
                Ok(done) => return Ok(done),
            }
        }
        if self.patience.is_over() {
            return Err(Fate::Deadline.into());
        }
        let untried = || VmFailure::new(VmFailureKind::Internal, "no worker was tried");
        Err(Fate::Vm(lost.unwrap_or_else(untried)).into())
    }

    /// The worker with this VM was lost over it.
    fn lost(&self, lost: Lost, vm: Vm) -> Undone {
        match lost {
            Lost::Before(failure) => Undone::Unbegun(failure),
            Lost::During(failure) => {
                Undone::Over(Unserved::Ended { fate: Fate::Vm(failure), vm: Some(vm) })
            }
            Lost::Handed(failure) => {
                self.shared.losses.tell(&failure);
                // Nobody asks on for a run that is wanted no more.
                Undone::Over(match unwanted(self.patience) {
                    Some(fate) => Unserved::Ended { fate, vm: Some(vm) },
                    None => Unserved::Handed { failure, vm },
                })
            }
        }
    }

    /// In a worker that has its program loaded, or loads it now.
    fn carry_out_prepared(&self, key: Key) -> Result<Done, Undone> {
        let Job { load, start, program, input, deadline, brokered } = self.task.job;
        let stock = &self.shared.stock;
        let worker = match stock.take(&key) {
            Some(worker) => worker,
            None => {
                let prepare = Prepare { load: load.clone(), program: program.clone() };
                let unprepared = stock.take(&Key { program: None, ..key.clone() });
                let mut worker = match unprepared {
                    Some(worker) => worker,
                    None => {
                        let made = self.shared.make(key.ram_bytes, false, self.patience);
                        made.map_err(|unmade| match self.patience.is_over() {
                            true => Undone::Over(unmade.into()),
                            false => Undone::Unbegun(unmade.into()),
                        })?
                    }
                };
                worker.await_ready(self.patience).map_err(Undone::Unbegun)?;
                let began = Instant::now();
                worker.prepare(&prepare, self.patience).map_err(Undone::Unbegun)?;
                // Only now, as nobody else could prepare one that fails, hangs or takes
                // longer than the filling thread waits.
                if began.elapsed() < PREPARE_TIME_MAX {
                    stock.lock().keep_prepared(&key, prepare);
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
        self.use_worker(&key, worker, Run::Prepared(&job))
    }

    /// Gives it to this worker, and waits for its report.
    fn use_worker(&self, key: &Key, worker: Worker, run: Run<'_>) -> Result<Done, Undone> {
        let Self { shared, task, patience } = *self;
        // However it goes.
        let mut upkeep = Upkeep { shared: Arc::downgrade(shared), ended: None };
        // Dropped before that: whoever fills the pool then finds it ended.
        let mut worker = worker;
        let vm = Vm::of(&worker);
        let taken = now_ns();
        if task.tell.is_some() {
            worker.ask_to_tell();
        }
        match worker.begin(run, task.broker, patience) {
            Ok(()) => {}
            Err(Unbegun::Lost(failure)) => return Err(self.lost(worker.not_begun(failure), vm)),
            Err(Unbegun::Crowded(failure)) => {
                // As it was, and with it what stands ready. One that did not say yet
                // that it stands ready may never do.
                upkeep.ended = match worker.is_ready() {
                    true => shared.stock.put_back(key, worker),
                    false => Some(worker),
                };
                return Err(Undone::Over(Fate::Vm(failure).into()));
            }
        }
        let handed = now_ns();
        let told = worker.finish_telling(patience, task.tell);
        let report = told.map_err(|lost| self.lost(lost, vm))?;
        let served = Served(Arc::clone(worker.process()));
        let reported = now_ns();
        // Who fills the pool ends workers too; without, the result does.
        upkeep.ended = if shared.options.ready_max == 0 {
            Some(worker)
        } else if shared.maker.makes_for_many() {
            worker.rests();
            shared.stock.lock().give_back(key, worker)
        } else {
            shared.stock.lock().spend(worker)
        };
        Ok(Done { report, vm, served, taken, handed, reported, upkeep })
    }
}

/// Why one worker did not carry a run out.
enum Undone {
    /// It was lost, or could not be had, before the run began: another can do the same.
    Unbegun(VmFailure),
    /// And no other is to.
    Over(Unserved),
}

/// What has become of a run that nobody waits for any more.
fn unwanted(patience: Patience<'_>) -> Option<Fate> {
    if patience.is_over() {
        return Some(Fate::Deadline);
    }
    let cancelled = || Fate::Vm(worker::lost(&io::ErrorKind::ConnectionAborted.into()));
    patience.is_cancelled().then(cancelled)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::time::Duration;

    use forge_protocol::frame::{Frame, Kind};
    use forge_protocol::guest::{Load, Start};
    use forge_protocol::limits::RunLimits;
    use forge_protocol::signature::TrustKeys;
    use forge_protocol::worker::{Jailed, Ready, Reuse, Timing, ZygoteReady, Zygoted};

    use super::*;
    use crate::admission::Admitted;
    use crate::link::Link;
    use crate::machine;
    use crate::pool::maker::tests::begin_zygote;
    use crate::pool::zygote::tests::say;
    use crate::pool::{Pool, PoolOptions};

    /// A pool whose zygote makes workers that answer each order so.
    fn pool_of(
        options: PoolOptions,
        answer: impl Fn(&mut Link, &Frame) + Copy + Send + 'static,
    ) -> Pool {
        let pool = Pool::new(&TrustKeys::new([]).unwrap(), options).unwrap();
        let mut theirs = begin_zygote(&pool.shared.maker);
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
            deadline: machine::deadline_in(Duration::from_secs(30)),
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
            let done =
                Conduct::new(&pool.shared, &task, Patience::default()).carry_out_prepared(key);
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
            assert!(pool.shared.stock.lock().give_back(key, worker).is_none());
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
        pool.shared.stock.lock().clear();
        let task = Task { job: &brokered, broker: Some(&link), ..task };
        let lied = lies(&key);
        match pool.carry_out(&task, Patience::default()) {
            Err(Unserved::Handed { failure, vm: Vm::Reset }) => {
                assert_eq!(failure.kind, VmFailureKind::NotReset);
            }
            other => panic!("{other:?}"),
        }
        lied.join().unwrap();
        // Whoever carries it out then never had a program.
        let (worker, mut theirs) = worker::tests::standing();
        pool.shared.stock.lock().give_back(&key, worker);
        assert_eq!(pool.carry_out_afresh(&task, Patience::default()).unwrap().vm, Vm::Fresh);
        theirs.set_nonblocking(true).unwrap();
        let asked = std::io::Read::read(&mut theirs, &mut [0]).unwrap_err();
        assert_eq!(asked.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_disproven_reset_is_counted_whatever_run_finds_it() {
        let reuse = Reuse::Reset { prove_one_in: 1 };
        let options = PoolOptions { ready_max: 2, reuse, ..PoolOptions::default() };
        let pool = pool_of(options, |worker, order| match order.kind {
            Kind::Prepare => say(worker, Kind::Ready, &Ready::Ok(Timing::default()), None),
            _ => say(worker, Kind::Report, &crate::worker::unserved(Fate::Deadline), None),
        });
        let lies = |key: &Key| {
            let (worker, theirs) = worker::tests::standing();
            assert!(pool.shared.stock.lock().give_back(key, worker).is_none());
            std::thread::spawn(move || {
                let mut theirs = Link::new(theirs);
                theirs.receive(|_| true, Patience::default()).unwrap();
                say(&mut theirs, Kind::Ready, &worker::tests::not_reset(), None);
            })
        };
        let (link, _broker) = UnixStream::pair().unwrap();
        let (plain, brokered) = (job(false), job(true));
        let key = forge_protocol::signature::SignerKey::from_secret(&[1; 32]).trust_key();
        let (digest, sha256, shape) = ([1; 32], [2; 32], Default::default());
        let admitted = Admitted { digest, sha256, signer: key, shape };
        let task = Task { tenant: "a", job: &plain, broker: None, prepared: None, tell: None };
        let usual = Key::of(&task);
        let program = ProgramKey { digest, signer: key.to_bytes(), limits: RunLimits::default() };
        let prepared = Key { program: Some(program), ..usual.clone() };
        for (counted, key, task) in [
            (1, &usual, Task { ..task }),
            (2, &prepared, Task { prepared: Some(&admitted), ..task }),
            (3, &usual, Task { job: &brokered, broker: Some(&link), ..task }),
        ] {
            let lied = lies(key);
            let _ = pool.carry_out(&task, Patience::default());
            lied.join().unwrap();
            assert_eq!(pool.resets_disproven(), counted);
            pool.shared.stock.lock().clear();
        }
    }

    #[test]
    fn a_run_whose_worker_took_its_link_and_not_all_of_its_order_is_given_to_no_other_over_it() {
        let reuse = Reuse::Reset { prove_one_in: 1 };
        let options = PoolOptions { ready_max: 2, reuse, ..PoolOptions::default() };
        let pool = pool_of(options, |worker, _| {
            say(worker, Kind::Report, &crate::worker::unserved(Fate::Deadline), None);
        });
        let (link, _broker) = UnixStream::pair().unwrap();
        // More than a socket holds.
        let job = Job { program: vec![1; 8 << 20], ..job(true) };
        let broker = Some(&link);
        let task = Task { tenant: "a", job: &job, broker, prepared: None, tell: None };
        let (worker, mut theirs) = worker::tests::standing();
        assert!(pool.shared.stock.lock().give_back(&Key::of(&task), worker).is_none());
        let took = std::thread::spawn(move || {
            std::io::Read::read(&mut theirs, &mut [0; 64]).unwrap();
        });
        match pool.carry_out(&task, Patience::default()) {
            Err(Unserved::Handed { vm: Vm::Reset, .. }) => {}
            other => panic!("{other:?}"),
        }
        took.join().unwrap();
    }

    #[test]
    fn a_run_that_was_lost_with_its_worker_says_what_it_was_carried_out_in() {
        let options = PoolOptions { ready_max: 1, ..PoolOptions::default() };
        let pool = pool_of(options, |worker, _| {
            // None of ours says that.
            say(worker, Kind::Ready, &Ready::Ok(Timing::default()), None);
        });
        let job = job(false);
        let task = Task { tenant: "a", job: &job, broker: None, prepared: None, tell: None };
        match pool.carry_out(&task, Patience::default()) {
            Err(Unserved::Ended { fate: Fate::Vm(_), vm: Some(Vm::Fresh) }) => {}
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_prepared_program_is_given_its_run_as_it_was_asked_for() {
        static ASKED: std::sync::Mutex<Option<PreparedJob>> = std::sync::Mutex::new(None);
        let options = PoolOptions { ready_max: 1, ..PoolOptions::default() };
        let pool = pool_of(options, |worker, order| match order.kind {
            Kind::Prepare => say(worker, Kind::Ready, &Ready::Ok(Timing::default()), None),
            _ => {
                let asked = forge_protocol::codec::decode(&order.payload).unwrap();
                *ASKED.lock().unwrap() = Some(asked);
                say(worker, Kind::Report, &crate::worker::unserved(Fate::Deadline), None);
            }
        });
        let key = forge_protocol::signature::SignerKey::from_secret(&[1; 32]).trust_key();
        let (digest, sha256, shape) = ([1; 32], [2; 32], Default::default());
        let admitted = Admitted { digest, sha256, signer: key, shape };
        let (link, _broker) = UnixStream::pair().unwrap();
        for broker in [None, Some(&link)] {
            let job = job(broker.is_some());
            let prepared = Some(&admitted);
            let task = Task { tenant: "a", job: &job, broker, prepared, tell: None };
            pool.carry_out(&task, Patience::default()).unwrap();
            let asked = ASKED.lock().unwrap().take().unwrap();
            let Job { start, input, deadline, brokered, .. } = job;
            assert_eq!(asked, PreparedJob { start, input, deadline, brokered });
        }
    }

    #[test]
    fn a_run_whose_time_is_over_before_its_worker_stands_ready_ended_by_its_deadline() {
        let pool = Pool::new(&TrustKeys::new([]).unwrap(), PoolOptions::default()).unwrap();
        let mut theirs = begin_zygote(&pool.shared.maker);
        let stands = ZygoteReady::Ok(Jailed { procfs: true, landlock_abi: None });
        say(&mut theirs, Kind::ZygoteReady, &stands, None);
        let makes = std::thread::spawn(move || {
            let patience = Patience::until(Instant::now() + Duration::from_secs(60));
            theirs.receive(|kind| kind == Kind::Fork, patience).unwrap();
            let worker = theirs.take_passed();
            let process = File::open("/dev/null").unwrap();
            say(&mut theirs, Kind::Zygoted, &Zygoted::Ok(()), Some(&process));
            // It never says that it stands ready.
            (theirs, worker)
        });
        let job = job(false);
        let task = Task { tenant: "a", job: &job, broker: None, prepared: None, tell: None };
        let soon = Patience::until(Instant::now() + Duration::from_secs(3));
        match pool.carry_out_afresh(&task, soon) {
            Err(Unserved::Ended { fate: Fate::Deadline, vm: None }) => {}
            other => panic!("{other:?}"),
        }
        drop(makes.join().unwrap());
    }
}
