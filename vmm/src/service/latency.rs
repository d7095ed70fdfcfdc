//! How long runs took, of all since the start and of those of the last minute:
//! histograms of fixed size, so that neither load nor time makes them grow.

use std::collections::VecDeque;

use forge_protocol::exposition::Exposition;
use serde_json::{Value, json};

/// Steps within each doubling: a time is known to one part in sixteen.
const STEPS: u64 = 16;
/// Times beyond 2^40 us, which are twelve days, count as that.
const LONGEST_US: u64 = (1 << 40) - 1;
/// Buckets up to there.
const BUCKETS: usize = place_of(LONGEST_US) + 1;
/// The last minute in parts: what is older goes a part at a time.
const PART_S: u64 = 5;
const PARTS: u64 = 60 / PART_S;

/// Bounds of buckets as they are told, in microseconds. What is within one part in
/// sixteen of a bound may count as above it.
const BOUNDS_US: [u64; 14] = [
    500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000, 10_000_000, 60_000_000,
];

const fn place_of(us: u64) -> usize {
    if us < STEPS {
        return us as usize;
    }
    let doublings = us.ilog2() as u64 - STEPS.ilog2() as u64;
    (STEPS * doublings + (us >> doublings)) as usize
}

/// The longest time that counts as this one.
fn longest_in(place: usize) -> u64 {
    let place = place as u64;
    if place < STEPS {
        return place;
    }
    let doublings = place / STEPS - 1;
    ((place % STEPS + STEPS + 1) << doublings) - 1
}

#[derive(Clone, Debug)]
struct Histogram {
    counts: Box<[u32]>,
    runs: u64,
    sum_us: u64,
}

impl Histogram {
    fn new() -> Self {
        Self { counts: vec![0; BUCKETS].into(), runs: 0, sum_us: 0 }
    }

    fn add(&mut self, us: u64) {
        let count = &mut self.counts[place_of(us.min(LONGEST_US))];
        *count = count.saturating_add(1);
        self.runs += 1;
        self.sum_us = self.sum_us.saturating_add(us);
    }

    fn join(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_add(*more);
        }
        self.runs += other.runs;
        self.sum_us = self.sum_us.saturating_add(other.sum_us);
    }

    fn told_to(&self, told: &mut Exposition, name: &str, help: &str) {
        let (mut before, mut place) = (0, 0);
        let buckets = BOUNDS_US.map(|bound_us| {
            while place < BUCKETS && longest_in(place) <= bound_us {
                before += u64::from(self.counts[place]);
                place += 1;
            }
            (bound_us as f64 / 1e6, before)
        });
        told.histogram(name, help, buckets, (self.runs, self.sum_us as f64 / 1e6));
    }

    /// The given percentile of how long runs took, by nearest rank, in microseconds.
    fn percentile_us(&self, percent: u64) -> u64 {
        let rank = (self.runs * percent).div_ceil(100);
        let mut before = 0;
        for (place, count) in self.counts.iter().enumerate() {
            before += u64::from(*count);
            if before >= rank {
                return longest_in(place);
            }
        }
        LONGEST_US
    }

    fn told(&self) -> Value {
        if self.runs == 0 {
            return json!({ "runs": 0 });
        }
        json!({
            "runs": self.runs,
            "p50_us": self.percentile_us(50),
            "p99_us": self.percentile_us(99),
        })
    }
}

/// How long runs took.
#[derive(Debug)]
pub(super) struct Latencies {
    all: Histogram,
    /// By the part of time since the start that they ended in, oldest first.
    lately: VecDeque<(u64, Histogram)>,
}

impl Latencies {
    pub(super) fn new() -> Self {
        Self { all: Histogram::new(), lately: VecDeque::new() }
    }

    /// A run took this long and ended now, so long after the start.
    pub(super) fn add(&mut self, us: u64, now_s: u64) {
        self.forget(now_s);
        let part = now_s / PART_S;
        self.all.add(us);
        if self.lately.back().is_none_or(|(last, _)| *last != part) {
            self.lately.push_back((part, Histogram::new()));
        }
        if let Some((_, last)) = self.lately.back_mut() {
            last.add(us);
        }
    }

    /// As it is told in a service's status.
    pub(super) fn told(&mut self, now_s: u64) -> Value {
        self.forget(now_s);
        let mut minute = Histogram::new();
        self.lately.iter().for_each(|(_, part)| minute.join(part));
        json!({ "last_minute": minute.told(), "since_start": self.all.told() })
    }

    /// All since the start, as a histogram of this name.
    pub(super) fn told_to(&self, told: &mut Exposition, name: &str, help: &str) {
        self.all.told_to(told, name, help);
    }

    fn forget(&mut self, now_s: u64) {
        let part = now_s / PART_S;
        self.lately.retain(|(of, _)| of + PARTS > part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_has_a_place_that_is_near_it() {
        for us in (0..5_000).chain([LONGEST_US / 3, LONGEST_US]) {
            let longest = longest_in(place_of(us));
            assert!(longest >= us && longest - us <= us / STEPS, "{us}: {longest}");
            assert_eq!(place_of(longest), place_of(us), "{us}");
        }
    }

    #[test]
    fn half_took_at_most_the_median_and_one_in_a_hundred_more_than_the_99th() {
        let mut latencies = Latencies::new();
        (1..=1000).for_each(|us| latencies.add(us * 100, 0));
        let told = latencies.told(0)["since_start"].clone();
        assert_eq!(told["runs"], 1000);
        let (p50, p99) = (told["p50_us"].as_u64().unwrap(), told["p99_us"].as_u64().unwrap());
        assert!((50_000..=53_200).contains(&p50), "{p50}");
        assert!((99_000..=105_200).contains(&p99), "{p99}");
    }

    #[test]
    fn what_is_older_than_a_minute_is_only_in_the_whole() {
        let mut latencies = Latencies::new();
        latencies.add(9_000_000, 3);
        latencies.add(100, 61);
        let told = latencies.told(64);
        assert_eq!(
            (&told["since_start"]["runs"], &told["last_minute"]["runs"]),
            (&2.into(), &1.into())
        );
        assert!(told["last_minute"]["p99_us"].as_u64().unwrap() < 200);
        assert_eq!(latencies.told(1000)["last_minute"], json!({ "runs": 0 }));
        (0..100_000).for_each(|at| latencies.add(5, at));
        assert!(latencies.lately.len() <= PARTS as usize);
    }

    #[test]
    fn a_histogram_counts_each_run_in_all_buckets_from_its_own_on() {
        let mut latencies = Latencies::new();
        for us in [400, 3_000, 3_000, 9_000_000, 3_600_000_000] {
            latencies.add(us, 0);
        }
        let mut told = Exposition::default();
        latencies.told_to(&mut told, "run_seconds", "Runs.");
        let text = told.into_text();
        for line in [
            "# TYPE run_seconds histogram",
            "run_seconds_bucket{le=\"0.0005\"} 1",
            "run_seconds_bucket{le=\"0.0025\"} 1",
            "run_seconds_bucket{le=\"0.005\"} 3",
            "run_seconds_bucket{le=\"2.5\"} 3",
            "run_seconds_bucket{le=\"10\"} 4",
            "run_seconds_bucket{le=\"+Inf\"} 5",
            "run_seconds_sum 3609.0064",
            "run_seconds_count 5",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}: {text}");
        }
    }
}
