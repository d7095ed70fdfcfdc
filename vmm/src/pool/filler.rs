//! The filling thread: ends what is spent, makes what is missing, lets go what is not
//! missed.

use std::time::{Duration, Instant};

use forge_log::Seldom;
use forge_protocol::worker::VmFailure;

use super::Shared;
use super::shelves::Missing;
use super::worker::Worker;
use crate::link::Patience;

/// How long a worker may take to stand ready. It takes a millisecond; this is
/// for hosts that emulate everything.
const READY_TIME_MAX: Duration = Duration::from_secs(30);
/// How long the filling thread waits for a VM that stands ready to load a program.
/// The largest take 1.7 s where little else runs. One may hang, and nothing else is
/// made or ended meanwhile; a run that finds none that has it loaded has one load it in
/// its own time.
pub(super) const PREPARE_TIME_MAX: Duration = Duration::from_secs(5);
/// How long the filling thread makes nothing after it failed, whoever has run meanwhile.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// How often the filling thread looks for what nobody misses, and for what has
/// something to say.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The thread's whole life, until the shelves are closed.
pub(super) fn fill(shared: &Shared) {
    let Shared { stock, losses, .. } = shared;
    let mut shelves = stock.lock();
    let mut looked = Instant::now();
    let failures = Seldom::failing();
    let mut makes_from = looked;
    while !shelves.is_closing() {
        if looked.elapsed() >= LOOK_EVERY {
            looked = Instant::now();
            let (speaking, restless) = (shelves.take_speaking(), shelves.take_restless());
            if !(speaking.is_empty() && restless.is_empty()) {
                drop(shelves);
                losses.end_speaking(speaking);
                losses.end_restless(restless);
                shelves = stock.lock();
                continue;
            }
        }
        shelves.forget_unused(Instant::now());
        let spent = shelves.take_spent();
        if !spent.is_empty() {
            drop(shelves);
            losses.end(spent);
            shelves = stock.lock();
            shelves.ended();
            continue;
        }
        let rest = makes_from.saturating_duration_since(Instant::now());
        let Some(missing) = shelves.missing().filter(|_| rest.is_zero()) else {
            let unmissed = shelves.let_go(Instant::now());
            if unmissed.is_some() {
                drop(shelves);
                losses.end(unmissed);
                shelves = stock.lock();
                continue;
            }
            shelves = stock.wait(shelves, if rest.is_zero() { LOOK_EVERY } else { rest });
            continue;
        };
        drop(shelves);
        let made = make(shared, &missing);
        shelves = stock.lock();
        match made {
            Ok(worker) => {
                failures.end();
                if let Some(unwanted) = shelves.add(missing, worker) {
                    drop(shelves);
                    drop(unwanted);
                    shelves = stock.lock();
                }
            }
            Err(failure) => {
                // What is being made ends with the pool.
                if !shelves.is_closing() && failures.is_due_for(&failure.message) {
                    tracing::warn!(reason = failure.message, "the pool cannot be filled");
                }
                shelves.give_up(&missing);
                makes_from = Instant::now() + RETRY_AFTER;
            }
        }
    }
}

/// What is missing, which then stands ready.
fn make(shared: &Shared, missing: &Missing) -> Result<Worker, VmFailure> {
    let patience = Patience::until(Instant::now() + READY_TIME_MAX);
    match missing {
        Missing::Standing => {
            let mut worker = shared.make(shared.stock.usual_ram_bytes(), true, patience)?;
            worker.await_ready(patience)?;
            Ok(worker)
        }
        Missing::Prepared(key, order) => {
            let mut worker = shared.make(key.ram_bytes, true, patience)?;
            worker.await_ready(patience)?;
            worker.prepare(order, Patience::until(Instant::now() + PREPARE_TIME_MAX))?;
            Ok(worker)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::net::UnixStream;

    use forge_protocol::frame::Kind;
    use forge_protocol::guest::Load;
    use forge_protocol::limits::RunLimits;
    use forge_protocol::signature::TrustKeys;
    use forge_protocol::worker::{Fork, Jailed, Prepare, Ready, Timing, ZygoteReady, Zygoted};

    use super::*;
    use crate::link::Link;
    use crate::pool::maker::tests::begin_zygote;
    use crate::pool::zygote::tests::say;
    use crate::pool::{Key, Pool, PoolOptions, ProgramKey};

    #[test]
    fn a_program_that_hangs_while_it_is_prepared_keeps_the_pool_from_nothing_for_long() {
        let (pool, mut theirs) = pool_of(PoolOptions { ready_max: 1, ..PoolOptions::default() });
        let limits = RunLimits::default();
        let program = ProgramKey { digest: [1; 32], signer: [0; 32], limits: limits.clone() };
        let key = Key { tenant: "a".into(), ram_bytes: 1 << 20, program: Some(program) };
        let load = Load { limits, announce: true };
        pool.shared.stock.lock().keep_prepared(&key, Prepare { load, program: vec![1] });
        pool.shared.stock.resume_filling();
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

    #[test]
    fn a_vm_that_is_prepared_ahead_has_the_memory_of_its_programs_limits() {
        let (pool, mut theirs) = pool_of(PoolOptions { ready_max: 1, ..PoolOptions::default() });
        let limits = RunLimits::default();
        let program = ProgramKey { digest: [1; 32], signer: [0; 32], limits: limits.clone() };
        let ram_bytes = 2 * pool.shared.stock.usual_ram_bytes();
        let key = Key { tenant: "a".into(), ram_bytes, program: Some(program) };
        let load = Load { limits, announce: true };
        pool.shared.stock.lock().keep_prepared(&key, Prepare { load, program: vec![1] });
        pool.shared.stock.resume_filling();
        let asked = theirs.receive(|kind| kind == Kind::Fork, Patience::default()).unwrap();
        let asked: Fork = forge_protocol::codec::decode(&asked.payload).unwrap();
        assert_eq!(asked.ram_bytes, ram_bytes as u64);
        // Nobody answers: it is not waited for.
        drop((theirs, pool.killer().kill()));
    }

    /// A pool without workers, and its zygote's end of the link.
    fn pool_of(options: PoolOptions) -> (Pool, Link) {
        let pool = Pool::new(&TrustKeys::new([]).unwrap(), options).unwrap();
        let mut theirs = begin_zygote(&pool.shared.maker);
        let stands = ZygoteReady::Ok(Jailed { procfs: true, landlock_abi: None });
        say(&mut theirs, Kind::ZygoteReady, &stands, None);
        (pool, theirs)
    }

    /// The next worker that is asked for, which says this of its VM.
    fn makes(theirs: &mut Link, ready: &Ready) -> Link {
        let patience = Patience::until(Instant::now() + Duration::from_secs(20));
        theirs.receive(|kind| kind == Kind::Fork, patience).expect("nobody asks for a worker");
        let mut worker = Link::new(UnixStream::from(theirs.take_passed().unwrap()));
        let process = File::open("/dev/null").unwrap();
        say(theirs, Kind::Zygoted, &Zygoted::Ok(()), Some(&process));
        say(&mut worker, Kind::Ready, ready, None);
        worker
    }

    fn until(what: &str, is_so: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(20);
        while !is_so() {
            assert!(Instant::now() < until, "it never came about that {what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_worker_that_could_make_no_vm_does_not_stand_ready_and_another_is_made() {
        let (pool, mut theirs) = pool_of(PoolOptions { ready_max: 1, ..PoolOptions::default() });
        // Somebody finds none, and from then on one is to stand ready.
        let ram_bytes = pool.shared.stock.usual_ram_bytes();
        let key = Key { tenant: "a".into(), ram_bytes, program: None };
        assert!(pool.shared.stock.take(&key).is_none());
        let failure = VmFailure::new(forge_protocol::worker::VmFailureKind::Unavailable, "no VM");
        let _fails = makes(&mut theirs, &Ready::Err(failure));
        let _stands = makes(&mut theirs, &Ready::Ok(Timing::default()));
        until("one stands ready", || pool.stands().standing == 1);
        assert!(pool.shared.stock.take(&key).unwrap().is_ready());
        drop((theirs, pool.killer().kill()));
    }

    #[test]
    fn what_nobody_misses_or_asks_for_any_more_is_let_go_by_itself() {
        let (pool, mut theirs) = pool_of(PoolOptions { ready_max: 1, ..PoolOptions::default() });
        let ram_bytes = pool.shared.stock.usual_ram_bytes();
        let key = Key { tenant: "a".into(), ram_bytes, program: None };
        assert!(pool.shared.stock.take(&key).is_none());
        let _stands = makes(&mut theirs, &Ready::Ok(Timing::default()));
        until("one stands ready", || pool.stands().standing == 1);
        let (own, _owns) = crate::pool::worker::tests::standing();
        assert!(pool.shared.stock.lock().give_back(&key, own).is_none());
        crate::pool::shelves::tests::age(&mut pool.shared.stock.lock());
        until("neither stands there", || {
            let stands = pool.stands();
            (stands.standing, stands.owned, stands.target) == (0, 0, 0)
        });
        drop((theirs, pool.killer().kill()));
    }
}
