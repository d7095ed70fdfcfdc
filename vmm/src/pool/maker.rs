//! How a worker comes to be: forked from the zygote, which is started when it is first
//! needed, and again when it is gone.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use forge_log::Seldom;
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::{Fork, Reuse, VmFailure, VmFailureKind, ZygoteSetup};

use super::PoolOptions;
use super::turn::Turn;
use super::worker::Worker;
use super::zygote::{ANSWER_TIME_MAX, Unmade, Zygote};
use crate::jail::{GroupLimits, Hardening, Spawned};
use crate::link::Patience;
use crate::locks::lock;
use crate::shortage;

/// How much memory a VM that serves one run touches while it waits, so that its
/// run need not: the stack, the queues, data, and the heap with a first page of
/// linear memory. One that is reset keeps what its runs touch, and would put
/// back what it touched ahead after every one of them.
const TOUCH_BYTES: u32 = 61 * 4096;

/// How long a zygote owes an answer, which takes it a millisecond, until that is told of it
/// and not of the runs that wait for it.
const SILENCE: Duration = Duration::from_secs(5);

/// What makes workers.
#[derive(Debug)]
pub(super) struct Maker {
    setup: ZygoteSetup,
    group: Option<GroupLimits>,
    /// What becomes of a VM after its run.
    reuse: Reuse,
    zygote: Turn<Option<Zygote>>,
    reach: Mutex<Reach>,
    /// Of the last zygote.
    hardening: Mutex<Option<Hardening>>,
    /// That it says nothing.
    silences: Seldom,
}

/// What can be reached while others wait for the zygote.
#[derive(Debug, Default)]
struct Reach {
    /// The last zygote's process.
    process: Option<Arc<Spawned>>,
    /// Since when the last zygote owes an answer.
    asked: Option<Instant>,
    /// Somebody waits for that.
    is_asking: bool,
    /// No zygote is to live from now on.
    killed: bool,
}

impl Maker {
    pub(super) fn new(trust: &TrustKeys, options: PoolOptions) -> Self {
        let trust = trust.as_slice().iter().map(|key| key.to_bytes()).collect();
        Self {
            setup: ZygoteSetup { tier: options.tier, trust },
            group: options.group,
            // Where nothing is kept nothing is used again.
            reuse: if options.ready_max > 0 { options.reuse } else { Reuse::Fresh },
            zygote: Turn::new(None),
            reach: Mutex::default(),
            hardening: Mutex::new(None),
            silences: Seldom::failing(),
        }
    }

    /// What is on of the jail around workers, once there has been one.
    pub(super) fn hardening(&self) -> Option<Hardening> {
        self.lock_hardening().clone()
    }

    /// Whether the workers that it makes are reset after a run. Without a procfs the
    /// zygote makes them for one.
    pub(super) fn makes_for_many(&self) -> bool {
        self.reuse != Reuse::Fresh && self.lock_hardening().as_ref().is_none_or(|on| on.procfs)
    }

    /// The zygote's process id, while there is one.
    pub(super) fn zygote(&self) -> Option<libc::pid_t> {
        self.zygote.take(Patience::default()).ok()?.as_ref().map(Zygote::id)
    }

    /// Ends the zygote and with it all workers, whoever has them and waits for what.
    /// There is no other from now on.
    pub(super) fn kill(&self) {
        let mut reach = self.lock_reach();
        reach.killed = true;
        if let Some(process) = &reach.process {
            // One that is gone was waited for, and its descriptor names no other.
            let _ = process.kill();
        }
    }

    /// Starts the first zygote, if none ever stood.
    pub(super) fn stand_by(&self, patience: Patience<'_>) -> Result<(), Unmade> {
        // A zygote that was lost since is started by whoever needs it.
        if self.lock_hardening().is_some() {
            return Ok(());
        }
        let mut zygote = self.zygote.take(patience).map_err(Unmade::Late)?;
        self.asking(&mut zygote, |zygote| self.standing(zygote, patience).map(drop))
    }

    /// The same, and what the host lacks for a moment is waited for, and so is a zygote
    /// that ended as it began.
    pub(super) fn stand_by_to_serve(&self, patience: Patience<'_>) -> Result<(), Unmade> {
        let last = Instant::now() + shortage::TIME_MAX;
        let until = patience.until.map_or(last, |until| until.min(last));
        let failures = Seldom::failing();
        let passes = |unmade: &Unmade| unmade.is_loss() || matches!(unmade, Unmade::Short(_));
        shortage::outlast_until(until, passes, || {
            let stood = self.stand_by(patience);
            if let Err(unmade @ (Unmade::Short(failure) | Unmade::Failed(failure))) = &stood
                && passes(unmade)
                && failures.is_due_for(&failure.message)
            {
                tracing::warn!(reason = failure.message, "there is no zygote yet");
            }
            stood
        })
    }

    /// Forks a worker, as long as patience lasts. It may not stand ready yet. Workers
    /// end with their zygote: `bereft` is called when one is found gone, before another
    /// is started.
    pub(super) fn make(
        &self,
        ram_bytes: usize,
        touched: bool,
        patience: Patience<'_>,
        bereft: impl Fn(),
    ) -> Result<Worker, Unmade> {
        let touch_bytes = if touched && self.reuse == Reuse::Fresh { TOUCH_BYTES } else { 0 };
        let order = Fork { ram_bytes: ram_bytes as u64, touch_bytes, reuse: self.reuse };
        let turn = self.zygote.take(patience).map_err(Unmade::Late);
        let made = turn.and_then(|mut zygote| {
            self.asking(&mut zygote, |zygote| self.forked(zygote, order, patience, bereft))
        });
        made.map_err(|unmade| self.accounted(unmade))
    }

    fn forked(
        &self,
        zygote: &mut Option<Zygote>,
        order: Fork,
        patience: Patience<'_>,
        bereft: impl Fn(),
    ) -> Result<Worker, Unmade> {
        let mut lost = None;
        for _ in 0..2 {
            match self.standing(zygote, patience)?.fork(order, patience) {
                Ok(made) => return made,
                Err(error) => {
                    // One that was killed has none after it.
                    if !self.lock_reach().killed {
                        tracing::warn!(%error, "the zygote is gone; another is started");
                    }
                    bereft();
                    lost = Some(error);
                    *zygote = None;
                }
            }
        }
        let why = lost.map_or_else(String::new, |error| format!("the zygote is gone: {error}"));
        Err(Unmade::Failed(VmFailure::new(VmFailureKind::Internal, why)))
    }

    /// Time that is over is a run's own, but where it is the zygote that took it: one that
    /// says nothing, or none that ever stood, is a word on this host.
    fn accounted(&self, unmade: Unmade) -> Unmade {
        let Unmade::Late(error) = unmade else { return unmade };
        if error.kind() != io::ErrorKind::TimedOut {
            return Unmade::Late(error);
        }
        if self.silence().is_none() && self.lock_hardening().is_some() {
            return Unmade::Late(error);
        }
        Unmade::Failed(Unmade::Late(error).into())
    }

    /// How long the zygote has owed an answer, if longer than a healthy one takes. If much
    /// longer, it is ended here: while no runs come, whoever asks for the status may be all
    /// that notices.
    pub(super) fn silence(&self) -> Option<Duration> {
        let (asked, is_asking) = {
            let reach = self.lock_reach();
            (reach.asked?, reach.is_asking)
        };
        let silent = asked.elapsed();
        if silent < SILENCE {
            return None;
        }
        match self.zygote.take(Patience::until(Instant::now())) {
            Ok(mut zygote) => {
                // It may have answered since, and nobody has looked.
                if !zygote.as_ref().is_some_and(Zygote::is_silent) {
                    return None;
                }
                if silent >= ANSWER_TIME_MAX {
                    tracing::warn!("the zygote says nothing: it is ended, and another is started");
                    *zygote = None;
                    self.lock_reach().asked = None;
                    return None;
                }
            }
            // Whoever has the turn waits for it, or looks as this does.
            Err(_) if is_asking => {}
            Err(_) => return None,
        }
        if self.silences.is_due() {
            tracing::warn!(silent_s = silent.as_secs(), "the zygote says nothing");
        }
        Some(silent)
    }

    /// Asks the zygote in this place for something, which [`Self::silence`] then knows of.
    fn asking<T>(
        &self,
        place: &mut Option<Zygote>,
        ask: impl FnOnce(&mut Option<Zygote>) -> T,
    ) -> T {
        // What it has answered, and nobody has read, it does not owe.
        let owed = place.as_ref().filter(|it| it.is_silent()).and_then(Zygote::asked);
        {
            let mut reach = self.lock_reach();
            (reach.asked, reach.is_asking) = (owed.or_else(|| Some(Instant::now())), true);
        }
        let told = ask(place);
        let mut reach = self.lock_reach();
        (reach.asked, reach.is_asking) = (place.as_ref().and_then(Zygote::asked), false);
        told
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
                None => match Zygote::begin(&self.setup, self.group.as_ref()) {
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

    /// Has [`Self::kill`] reach this zygote. One that was started meanwhile ends here.
    fn reach(&self, zygote: &Zygote) {
        let process = zygote.process();
        let mut reach = self.lock_reach();
        if reach.killed {
            let _ = process.kill();
        }
        reach.process = Some(process);
    }

    fn lock_reach(&self) -> MutexGuard<'_, Reach> {
        lock(&self.reach)
    }

    fn lock_hardening(&self) -> MutexGuard<'_, Option<Hardening>> {
        lock(&self.hardening)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::fd::AsRawFd as _;

    use forge_protocol::frame::Kind;
    use forge_protocol::worker::ZygoteReady;

    use super::*;
    use crate::cancel::Cancel;
    use crate::link::Link;
    use crate::pool::zygote::tests::{beginning, say};

    /// Has it make its workers from a zygote that has not said yet that it stands, whose
    /// end of the link to it this is.
    pub(in super::super) fn begin_zygote(maker: &Maker) -> Link {
        let (zygote, theirs) = beginning();
        *maker.zygote.take(Patience::default()).unwrap() = Some(zygote);
        theirs
    }

    fn maker() -> Maker {
        Maker::new(&TrustKeys::new([]).unwrap(), PoolOptions::default())
    }

    /// The process of the zygote that it has.
    pub(in super::super) fn process(maker: &Maker) -> Arc<Spawned> {
        maker.zygote.take(Patience::default()).unwrap().as_ref().unwrap().process()
    }

    #[test]
    fn a_zygote_that_stands_still_is_ended_though_somebody_waits_for_it() {
        let maker = maker();
        let mut theirs = begin_zygote(&maker);
        let process = process(&maker);
        std::thread::scope(|scope| {
            let stands = scope.spawn(|| maker.stand_by(Patience::default()));
            while maker.lock_reach().process.is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            maker.kill();
            assert!(process.wait().is_ok());
            assert!(!stands.is_finished(), "nobody waited for it");
            let gone = ZygoteReady::Err(VmFailure::new(VmFailureKind::Internal, "gone"));
            say(&mut theirs, Kind::ZygoteReady, &gone, None);
            assert!(stands.join().unwrap().is_err());
        });
    }

    #[test]
    fn a_zygote_that_is_started_while_all_are_ended_ends_and_no_other_follows() {
        let maker = maker();
        maker.kill();
        let theirs = begin_zygote(&maker);
        let process = process(&maker);
        std::thread::scope(|scope| {
            let stands = scope.spawn(|| maker.stand_by(Patience::default()));
            assert!(process.wait().is_ok());
            // As its end of the socket goes with it.
            drop(theirs);
            let failure = VmFailure::from(stands.join().unwrap().unwrap_err());
            assert_eq!(failure.kind, VmFailureKind::Cancelled);
        });
        assert_eq!(maker.zygote(), None);
    }

    #[test]
    fn what_a_host_lacks_for_good_is_told_a_service_at_once() {
        let maker = maker();
        let mut theirs = begin_zygote(&maker);
        let failure = VmFailure::new(VmFailureKind::Unavailable, "no namespaces here");
        say(&mut theirs, Kind::ZygoteReady, &ZygoteReady::Err(failure.clone()), None);
        // Another one would say something else.
        let told = maker.stand_by_to_serve(Patience::default());
        assert_eq!(told.map_err(VmFailure::from), Err(failure));
        assert_eq!(maker.zygote(), None);
    }

    #[test]
    fn a_run_waits_no_longer_than_it_can_for_a_zygote_that_begins() {
        let maker = maker();
        let mut theirs = begin_zygote(&maker);
        let id = process(&maker).pid;
        let make = |patience| maker.make(1 << 20, false, patience, || ());
        let soon = Patience::until(Instant::now() + Duration::from_millis(5));
        match make(soon) {
            // None ever stood here.
            Err(Unmade::Failed(failure)) => assert_eq!(failure.kind, VmFailureKind::Unavailable),
            other => panic!("{other:?}"),
        }
        *maker.lock_hardening() =
            maker.zygote.take(soon).ok().and_then(|it| Some(it.as_ref()?.hardening().clone()));
        match make(Patience::until(Instant::now() + Duration::from_millis(5))) {
            Err(Unmade::Late(error)) => assert_eq!(error.kind(), io::ErrorKind::TimedOut),
            other => panic!("{other:?}"),
        }
        *maker.lock_hardening() = None;
        let cancel = Cancel::new().unwrap();
        cancel.raise();
        assert!(maker.stand_by(Patience { until: None, cancel: Some(&cancel) }).is_err());
        // It goes on, and what it says then is heard by whoever comes next.
        assert_eq!(maker.zygote(), Some(id));
        let failure = VmFailure::new(VmFailureKind::Unavailable, "no VM here");
        say(&mut theirs, Kind::ZygoteReady, &ZygoteReady::Err(failure), None);
        match make(Patience::default()) {
            Err(Unmade::Failed(failure)) => assert_eq!(failure.message, "no VM here"),
            other => panic!("{other:?}"),
        }
        assert_eq!(maker.zygote(), None);
    }

    #[test]
    fn a_zygote_that_stands_and_says_nothing_is_told_as_such_until_it_answers() {
        let maker = maker();
        let mut theirs = begin_zygote(&maker);
        let jailed = forge_protocol::worker::Jailed { procfs: true, landlock_abi: None };
        say(&mut theirs, Kind::ZygoteReady, &ZygoteReady::Ok(jailed), None);
        maker.stand_by(Patience::default()).unwrap();
        let soon = || Patience::until(Instant::now() + Duration::from_millis(5));
        let make = || maker.make(1 << 20, false, soon(), || ());
        // A run has no more time, and the zygote had no more.
        let asked = loop {
            assert!(matches!(make(), Err(Unmade::Late(_))));
            // It may have had too little to ask.
            if let Some(asked) = maker.lock_reach().asked {
                break asked;
            }
        };
        assert_eq!(maker.silence(), None);
        let before = asked.checked_sub(SILENCE).unwrap();
        maker.lock_reach().asked = Some(before);
        maker.zygote.take(soon()).unwrap().as_mut().unwrap().has_owed_since(before);
        assert!(maker.silence() >= Some(SILENCE));
        match make() {
            Err(Unmade::Failed(failure)) => assert_eq!(failure.kind, VmFailureKind::Unavailable),
            other => panic!("{other:?}"),
        }
        // Who has the turn waits for it, if that is what they have it for.
        let turn = maker.zygote.take(soon()).unwrap();
        assert_eq!(maker.silence(), None);
        maker.lock_reach().is_asking = true;
        assert!(maker.silence().is_some());
        assert!(matches!(make(), Err(Unmade::Failed(_))));
        maker.lock_reach().is_asking = false;
        drop(turn);
        let short = VmFailure::new(VmFailureKind::Unavailable, "none");
        say(&mut theirs, Kind::Zygoted, &forge_protocol::worker::Zygoted::Err(short), None);
        assert_eq!(maker.silence(), None, "it has answered, though nobody looked");
    }

    #[test]
    fn a_zygote_that_says_nothing_for_good_is_ended_by_whoever_looks() {
        let maker = maker();
        let theirs = begin_zygote(&maker);
        let process = process(&maker);
        let before = Instant::now().checked_sub(ANSWER_TIME_MAX).unwrap();
        maker.zygote.take(Patience::default()).unwrap().as_mut().unwrap().has_owed_since(before);
        maker.lock_reach().asked = Some(before);
        assert_eq!(maker.silence(), None);
        assert_eq!(maker.zygote(), None);
        assert!(
            crate::link::wait(
                process.pidfd.as_raw_fd(),
                libc::POLLIN,
                Patience::until(Instant::now() + Duration::from_secs(20)),
            )
            .is_ok()
        );
        drop(theirs);
    }

    #[test]
    fn where_there_is_no_procfs_no_worker_is_put_back_after_its_run() {
        let reuse = Reuse::Reset { prove_one_in: 0 };
        let options = PoolOptions { ready_max: 1, reuse, ..PoolOptions::default() };
        let maker = Maker::new(&TrustKeys::new([]).unwrap(), options);
        for procfs in [true, false] {
            let (zygote, _theirs) = beginning();
            let on = Hardening { procfs, ..zygote.hardening().clone() };
            *maker.lock_hardening() = Some(on);
            assert_eq!(maker.makes_for_many(), procfs);
        }
    }

    #[test]
    fn all_workers_are_found_gone_with_their_zygote_before_another_is_started() {
        let maker = maker();
        let mut theirs = begin_zygote(&maker);
        let jailed = forge_protocol::worker::Jailed { procfs: true, landlock_abi: None };
        say(&mut theirs, Kind::ZygoteReady, &ZygoteReady::Ok(jailed), None);
        maker.stand_by(Patience::default()).unwrap();
        drop(theirs);
        let bereft = std::cell::Cell::new(0);
        let made = maker.make(1 << 20, false, Patience::default(), || {
            // No other is to be started here.
            maker.kill();
            bereft.set(bereft.get() + 1);
        });
        assert!(matches!(made, Err(Unmade::Late(_))), "{made:?}");
        assert_eq!(bereft.get(), 1);
    }
}
