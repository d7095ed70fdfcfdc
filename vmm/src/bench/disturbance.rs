//! How much others kept the bench from running: figures of a disturbed bench
//! mean little, and no statistic over its own samples shows that.
//!
//! While a sample is taken, a worker of ours may well run before the thread
//! that waits for it. So how long that thread waits for a CPU is looked at
//! between rounds, when nothing of ours is under way. It computes then: who
//! has just slept is given its CPU at once, however many others want it.

use std::time::{Duration, Instant};

use super::quiet::wait_for_quiet;

/// How long one look takes: some turns of whoever else there is.
const LOOK_TIME: Duration = Duration::from_millis(20);

/// What was found so far.
#[derive(Debug)]
pub struct Disturbance {
    started: Counters,
    ran_ns: u64,
    waited_ns: u64,
}

impl Disturbance {
    /// Begins to observe, from now on.
    #[must_use]
    pub fn begin() -> Self {
        Self { started: Counters::now(), ran_ns: 0, waited_ns: 0 }
    }

    /// Looks for some milliseconds, between two rounds.
    pub fn look(&mut self) {
        wait_for_quiet(std::process::id().cast_signed());
        let before = Counters::now();
        let until = Instant::now() + LOOK_TIME;
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        let after = Counters::now();
        self.ran_ns += after.ran_ns.saturating_sub(before.ran_ns);
        self.waited_ns += after.waited_ns.saturating_sub(before.waited_ns);
    }

    /// The part of its time that the bench had to wait, for other processes or
    /// for other machines: 0 to 1.
    #[must_use]
    pub fn part(&self) -> f64 {
        let Counters { ticks, stolen_ticks, .. } = Counters::now();
        let looked = Counters {
            ran_ns: self.started.ran_ns + self.ran_ns,
            waited_ns: self.started.waited_ns + self.waited_ns,
            ticks,
            stolen_ticks,
        };
        looked.since(&self.started)
    }
}

/// What the kernel has counted up to a moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Time this thread ran, in nanoseconds.
    ran_ns: u64,
    /// Time it could have run and waited for a CPU.
    waited_ns: u64,
    /// Ticks of all CPUs.
    ticks: u64,
    /// Those in which the host of this machine ran somebody else.
    stolen_ticks: u64,
}

impl Counters {
    /// As of now. What the kernel does not tell is zero.
    #[must_use]
    pub fn now() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        Self::parse(&read("/proc/thread-self/schedstat"), &read("/proc/stat"))
    }

    fn parse(schedstat: &str, stat: &str) -> Self {
        let numbers = |line: &str| -> Vec<u64> {
            line.split_whitespace().filter_map(|number| number.parse().ok()).collect()
        };
        let thread = numbers(schedstat);
        // user nice system idle iowait irq softirq steal, and two that are in
        // user and nice already (proc_stat(5)).
        let cpu = numbers(stat.lines().next().unwrap_or_default());
        Self {
            ran_ns: thread.first().copied().unwrap_or(0),
            waited_ns: thread.get(1).copied().unwrap_or(0),
            ticks: cpu.iter().take(8).sum(),
            stolen_ticks: cpu.get(7).copied().unwrap_or(0),
        }
    }

    /// The part of the time since `earlier` that this thread had to wait, for
    /// other processes or for other machines: 0 to 1.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> f64 {
        let part = |part: u64, of: u64| if of == 0 { 0.0 } else { part as f64 / of as f64 };
        let ran = self.ran_ns.saturating_sub(earlier.ran_ns);
        let waited = self.waited_ns.saturating_sub(earlier.waited_ns);
        let stolen = self.stolen_ticks.saturating_sub(earlier.stolen_ticks);
        let ticks = self.ticks.saturating_sub(earlier.ticks);
        (part(waited, ran + waited) + part(stolen, ticks)).min(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_and_stolen_time_add_up() {
        let before = Counters::parse("1000 500 9\n", "cpu  10 0 10 80 0 0 0 0 0 0\ncpu0 1\n");
        let after = Counters::parse("1900 600 12\n", "cpu  20 0 20 150 0 0 0 10 0 0\ncpu0 1\n");
        // 100 of 1000 ns, and 10 of 100 ticks.
        assert_eq!(after.since(&before), 0.2);
    }

    #[test]
    fn who_computes_on_every_cpu_disturbs() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let cpus = std::thread::available_parallelism().unwrap().get();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 * cpus {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let mut disturbance = Disturbance::begin();
            let until = Instant::now() + Duration::from_secs(20);
            while disturbance.part() < 0.1 && Instant::now() < until {
                disturbance.look();
            }
            over.store(true, Ordering::Relaxed);
            assert!(disturbance.part() >= 0.1, "{disturbance:?}");
        });
    }

    #[test]
    fn a_kernel_that_does_not_tell_is_no_disturbance() {
        assert_eq!(Counters::parse("", "").since(&Counters::default()), 0.0);
    }

    #[test]
    fn this_kernel_tells_how_long_this_thread_ran() {
        let before = Counters::now();
        let mut sum = 0u64;
        while Counters::now().ran_ns == before.ran_ns {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(Counters::now().ticks > 0);
    }
}
