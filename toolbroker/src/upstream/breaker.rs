//! When a server that failed is tried again: one state machine for processes
//! that die, for servers over HTTP that do not answer, and for plain HTTP
//! interfaces.
//!
//! ```text
//!            failure            failure, again
//!   closed ─────────▶ closed ───────────────────▶ open ◀──────────────┐
//!     ▲               (tried again at once)        │ the wait is over │
//!     │                                            ▼                  │
//!     └──────────────── answer ──────────────── half open ── failure ─┘
//! ```
//!
//! While it is open nobody asks the server anything: a call fails at once and
//! says when the next try is. Half open, one caller tries and all others still
//! fail at once. Each failure in a row doubles the wait, and no wait is the
//! same as another's, so that many brokers do not come back in one moment.
//! Calls that fail together are one failure: what was under way when the
//! server failed says nothing of it afterwards.
//! Deliberately absent are rates and time windows: one answer closes it.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;

use super::UpstreamError;
use crate::locks::lock;

/// So many failures in a row open it. One alone is a server that was
/// restarted, or a connection that was idle for too long.
const OPENS_AFTER: u32 = 2;
/// The wait after the failure that opens it; it doubles with each further one.
const WAIT_MIN: Duration = Duration::from_millis(200);
/// The longest wait between two tries.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// What is known of one server's failures.
#[derive(Debug)]
pub struct Breaker(Mutex<State>);

#[derive(Debug)]
struct State {
    /// In a row.
    failures: u32,
    /// How many were ever counted.
    counted: u64,
    retry_at: Instant,
    /// Whether somebody tries it out just now, after it was open.
    probed: bool,
    reason: String,
}

/// The right to ask the server now. Dropped without a word, a probe counts as
/// a failure: whoever tried gave up waiting.
#[derive(Debug)]
pub struct Admission {
    breaker: Arc<Breaker>,
    is_probe: bool,
    /// How many failures were counted when it was given.
    counted: u64,
}

impl Breaker {
    /// A breaker of a server that never failed.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(State::new(Instant::now()))))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }

    /// Whether the server would be asked now. Changes nothing.
    ///
    /// # Errors
    /// [`UpstreamError::BackOff`].
    pub fn check(&self) -> Result<(), UpstreamError> {
        self.state().check(Instant::now())
    }

    /// Asks for the right to ask the server.
    ///
    /// # Errors
    /// [`UpstreamError::BackOff`].
    pub fn enter(self: &Arc<Self>) -> Result<Admission, UpstreamError> {
        let mut state = self.state();
        let is_probe = state.enter(Instant::now())?;
        Ok(Admission { breaker: Arc::clone(self), is_probe, counted: state.counted })
    }

    /// The server answered: whatever was before is forgotten.
    pub fn answered(&self) {
        self.state().answered();
    }

    /// The server failed.
    pub fn failed(&self, reason: String) {
        self.state().failed(Instant::now(), random(), reason);
    }
}

/// The machine itself: the clock and the dice are its caller's.
impl State {
    fn new(now: Instant) -> Self {
        Self { failures: 0, counted: 0, retry_at: now, probed: false, reason: String::new() }
    }

    /// Whether whoever enters now tries it out for all others.
    fn enter(&mut self, now: Instant) -> Result<bool, UpstreamError> {
        self.check(now)?;
        self.probed = self.failures >= OPENS_AFTER;
        Ok(self.probed)
    }

    fn answered(&mut self) {
        self.failures = 0;
        self.probed = false;
    }

    fn failed(&mut self, now: Instant, random: u32, reason: String) {
        self.failures = self.failures.saturating_add(1);
        self.counted += 1;
        self.reason = reason;
        self.retry_at = now + jittered(wait(self.failures), random);
    }

    /// Somebody failed who was let in when so many were counted. Whether that
    /// opened it.
    fn failed_since(
        &mut self,
        counted: u64,
        is_probe: bool,
        now: Instant,
        random: u32,
        reason: String,
    ) -> bool {
        if is_probe {
            self.probed = false;
        }
        let counts = counted == self.counted;
        if counts {
            self.failed(now, random, reason);
        }
        counts && self.failures >= OPENS_AFTER
    }

    fn check(&self, now: Instant) -> Result<(), UpstreamError> {
        // What answered since it failed is not waited for.
        if self.failures == 0 {
            return Ok(());
        }
        let wait = self.retry_at.saturating_duration_since(now);
        if self.probed || !wait.is_zero() {
            return Err(UpstreamError::BackOff {
                failures: self.failures,
                wait_ms: wait.as_millis(),
                reason: self.reason.clone(),
            });
        }
        Ok(())
    }
}

impl Admission {
    /// The server is there. Whether it answers calls too is not known yet, so
    /// its failures are not forgotten.
    pub fn stands(mut self) {
        if std::mem::take(&mut self.is_probe) {
            self.breaker.state().probed = false;
        }
    }

    /// The server answered.
    pub fn answered(mut self) {
        self.is_probe = false;
        self.breaker.answered();
    }

    /// The server failed. It counts if no failure did since this was given.
    /// Whether it is left alone now because of that.
    pub fn failed(mut self, reason: String) -> bool {
        let opened = self.fail(reason);
        self.is_probe = false;
        opened
    }

    fn fail(&self, reason: String) -> bool {
        let (counted, is_probe) = (self.counted, self.is_probe);
        let mut state = self.breaker.state();
        state.failed_since(counted, is_probe, Instant::now(), random(), reason)
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        if self.is_probe {
            self.fail("no answer came while somebody waited".to_owned());
        }
    }
}

/// The wait after so many failures in a row, before jitter.
fn wait(failures: u32) -> Duration {
    match failures.checked_sub(OPENS_AFTER) {
        None => Duration::ZERO,
        Some(more) => WAIT_MIN.saturating_mul(2u32.saturating_pow(more)).min(WAIT_MAX),
    }
}

/// Between half of a wait and all of it; `random` chooses.
fn jittered(wait: Duration, random: u32) -> Duration {
    wait / 2 + (wait / 2).mul_f64(f64::from(random) / f64::from(u32::MAX))
}

/// Random enough to tell brokers apart, and nothing more.
fn random() -> u32 {
    let hash = RandomState::new().build_hasher().finish();
    (hash >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever was let in last fails.
    fn fail(state: &mut State, now: Instant) {
        state.failed_since(state.counted, state.probed, now, u32::MAX, "down".into());
    }

    #[test]
    fn the_first_retry_is_at_once_and_later_ones_wait_longer_and_longer() {
        assert_eq!(wait(1), Duration::ZERO);
        assert_eq!(wait(2), Duration::from_millis(200));
        assert_eq!(wait(3), Duration::from_millis(400));
        assert_eq!(wait(200), WAIT_MAX);
        assert_eq!(wait(u32::MAX), WAIT_MAX);
    }

    #[test]
    fn jitter_takes_at_most_half_of_a_wait() {
        assert_eq!(jittered(WAIT_MAX, 0), WAIT_MAX / 2);
        assert_eq!(jittered(WAIT_MAX, u32::MAX), WAIT_MAX);
        assert_eq!(jittered(Duration::ZERO, u32::MAX), Duration::ZERO);
    }

    #[test]
    fn it_opens_after_failures_in_a_row_and_says_why_and_until_when() {
        let now = Instant::now();
        let mut state = State::new(now);
        fail(&mut state, now);
        state.check(now).unwrap();
        state.failed(now, 0, "second".into());
        match state.check(now) {
            Err(UpstreamError::BackOff { failures: 2, wait_ms: 100, reason }) => {
                assert_eq!(reason, "second");
            }
            other => panic!("{other:?}"),
        }
        assert!(state.enter(now).is_err());
        state.check(now + WAIT_MIN).unwrap();
    }

    #[test]
    fn half_open_only_one_may_try() {
        let now = Instant::now();
        let mut state = State::new(now);
        assert!(!state.enter(now).unwrap(), "nobody tries out what never failed");
        fail(&mut state, now);
        fail(&mut state, now);
        let later = now + WAIT_MAX;
        assert!(state.enter(later).unwrap());
        assert!(state.enter(later).is_err(), "a second one beside the probe");
        fail(&mut state, later);
        assert!(state.enter(later).is_err(), "the wait begins anew");
        let later = later + WAIT_MAX;
        assert!(state.enter(later).unwrap());
        state.answered();
        assert!(!state.enter(later).unwrap());
        assert!(!state.enter(later).unwrap());
    }

    #[test]
    fn one_answer_and_all_is_as_before_however_long_the_wait_was() {
        let now = Instant::now();
        let mut state = State::new(now);
        (0..10).for_each(|_| fail(&mut state, now));
        assert!(state.enter(now).is_err());
        // Of one that was asked before all that.
        state.answered();
        assert!(!state.enter(now).unwrap());
    }

    #[test]
    fn a_server_that_stands_and_answers_nothing_waits_ever_longer() {
        let breaker = Breaker::new();
        let mut waits = Vec::new();
        for _ in 0..5 {
            // Time passes.
            breaker.state().retry_at = Instant::now();
            breaker.enter().unwrap().stands();
            breaker.enter().unwrap().stands();
            let now = Instant::now();
            breaker.state().failed(now, u32::MAX, "its answer broke off".into());
            waits.push(breaker.state().retry_at - now);
        }
        assert_eq!(waits[0], Duration::ZERO);
        assert!(waits.is_sorted_by(|a, b| a < b), "{waits:?}");
        breaker.answered();
        breaker.failed("once".into());
        breaker.check().unwrap();
    }

    #[test]
    fn calls_that_fail_together_are_one_failure() {
        let breaker = Breaker::new();
        for failures in 1..=OPENS_AFTER {
            let together: Vec<_> = (0..64).map(|_| breaker.enter().unwrap()).collect();
            for call in together {
                call.failed("it was cut off".into());
            }
            assert_eq!(breaker.state().failures, failures);
        }
        assert!(breaker.state().retry_at <= Instant::now() + WAIT_MIN);
    }

    #[test]
    fn of_failures_that_are_one_one_opens_it() {
        let breaker = Breaker::new();
        let together = || -> Vec<_> { (0..8).map(|_| breaker.enter().unwrap()).collect() };
        for opened in [0, 1] {
            let told = together().into_iter().map(|call| call.failed("it was cut off".into()));
            assert_eq!(told.filter(|opened| *opened).count(), opened);
        }
    }

    #[test]
    fn what_was_under_way_before_a_probe_does_not_let_in_another() {
        let breaker = Breaker::new();
        let before = breaker.enter().unwrap();
        breaker.state().failures = OPENS_AFTER;
        breaker.failed("down".into());
        breaker.state().retry_at = Instant::now();
        let probe = breaker.enter().unwrap();
        before.failed("it was cut off".into());
        assert!(breaker.enter().is_err(), "a second one beside the probe");
        assert_eq!(breaker.state().failures, OPENS_AFTER + 1);
        probe.failed("down".into());
        assert_eq!(breaker.state().failures, OPENS_AFTER + 2);
    }

    #[test]
    fn a_probe_that_nobody_waits_for_any_more_opens_it_again() {
        let breaker = Breaker::new();
        breaker.state().failures = OPENS_AFTER;
        let probe = breaker.enter().unwrap();
        assert!(breaker.check().is_err());
        drop(probe);
        assert_eq!(breaker.state().failures, OPENS_AFTER + 1);
        assert!(breaker.check().is_err());
        breaker.state().retry_at = Instant::now();
        breaker.enter().unwrap().answered();
        breaker.check().unwrap();
    }

    #[test]
    fn an_admission_that_is_no_probe_says_nothing_when_dropped() {
        let breaker = Breaker::new();
        for _ in 0..10 {
            drop(breaker.enter().unwrap());
        }
        assert_eq!(breaker.state().failures, 0);
        breaker.check().unwrap();
    }
}
