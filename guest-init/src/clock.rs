//! Virtual time.
//!
//! A program cannot see the real clock, so that its run repeats. Time stands
//! still while it computes and moves when it learns how a call settled: a call
//! that was started at `t` and took `d` settled at `t + d`, and now is the
//! latest such moment the program has seen. Three calls of 10 ms started
//! together and all waited for thus cost 10 ms, one after the other 30 ms. A
//! program that sleeps moves it too, and no real time passes.

/// The clock of one run, in nanoseconds since the Unix epoch.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    now_ns: u64,
}

impl Clock {
    /// A clock that stands at the run's start.
    #[must_use]
    pub fn new(start_unix_ns: u64) -> Self {
        Self { now_ns: start_unix_ns }
    }

    /// Now, in nanoseconds since the Unix epoch.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// The program learns that the call it started at `started_ns` took
    /// `duration_ns`. Time never goes back, and stops at its last moment.
    pub fn observe(&mut self, started_ns: u64, duration_ns: u64) {
        self.sleep_until(started_ns.saturating_add(duration_ns));
    }

    /// The program sleeps until `time_ns`, if that is not over.
    pub fn sleep_until(&mut self, time_ns: u64) {
        self.now_ns = self.now_ns.max(time_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_side_by_side_cost_the_longest_calls_in_a_row_the_sum() {
        let mut clock = Clock::new(100);
        let started = clock.now_ns();
        clock.observe(started, 30);
        clock.observe(started, 10);
        assert_eq!(clock.now_ns(), 130);
        clock.observe(clock.now_ns(), 10);
        clock.observe(clock.now_ns(), 10);
        assert_eq!(clock.now_ns(), 150);
    }

    #[test]
    fn time_stops_at_its_last_moment() {
        let mut clock = Clock::new(u64::MAX - 1);
        clock.observe(clock.now_ns(), u64::MAX);
        assert_eq!(clock.now_ns(), u64::MAX);
    }
}
