//! Two results of `forge-vmm bench`: what moved, and whether beyond noise.
//!
//! Where a case has a ratio to floors, the ratios are compared: a host that is
//! slower today makes its floors slower too, and is not mistaken for slower
//! code. What has none is compared as it is; of a floor, that says how the
//! host moved.
//!
//! A change counts if the intervals of both medians are apart (see
//! [`super::stats`]) by more than [`APART_MIN`]: the same executable started
//! twice does not find its memory in the same places, and intervals within one
//! run know nothing of that. And it counts only if both benches were let run:
//! neighbours on the machine make a VM slower than they make its floors.

use serde::Serialize;

use super::stats::Interval;
use super::{Outcome, Results};

/// How far intervals must be apart, as a part of the values.
pub const APART_MIN: f64 = 0.05;

/// How disturbed a bench may have been for a change to be believed.
pub const DISTURBED_MAX: f64 = 0.05;

/// What became of one entry.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Moved {
    /// Name of the entry.
    pub name: String,
    /// Its unit.
    pub unit: String,
    /// Its median then.
    pub old: f64,
    /// Its median now.
    pub new: f64,
    /// Its ratio to floors then, if the ratios are what is compared.
    pub old_ratio: Option<f64>,
    /// Its ratio to floors now.
    pub new_ratio: Option<f64>,
    /// What is compared, now over then.
    pub change: f64,
    /// What the change means.
    pub verdict: Verdict,
}

/// What a change means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// No more than the same code would show if it were measured again.
    WithinNoise,
    /// It takes less time, or does more in the same.
    Faster,
    /// It takes more time, or does less in the same.
    Slower,
    /// It takes less memory.
    Smaller,
    /// It takes more memory.
    Larger,
    /// A floor, so the host: it is faster now.
    HostFaster,
    /// The host is slower now.
    HostSlower,
    /// It moved, and was measured on another host or in another build, without a ratio
    /// that would tell code from those.
    Elsewhere,
    /// It moved, and one of the benches was disturbed too much to say why.
    Disturbed,
    /// There are not enough samples on one side.
    TooFewSamples,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::WithinNoise => "within noise",
            Self::Faster => "faster",
            Self::Slower => "slower",
            Self::Smaller => "smaller",
            Self::Larger => "larger",
            Self::HostFaster => "host faster",
            Self::HostSlower => "host slower",
            Self::Elsewhere => "moved, on another host or in another build",
            Self::Disturbed => "moved, but the host was busy",
            Self::TooFewSamples => "too few samples",
        })
    }
}

/// Reads what `forge-vmm bench --json` wrote.
///
/// # Errors
/// Why it is no such thing, for a reader.
pub fn parse(json: &[u8]) -> Result<Results, String> {
    let results: Results = serde_json::from_slice(json)
        .map_err(|error| format!("this is no output of `forge-vmm bench --json`: {error}"))?;
    if results.results.is_empty() {
        return Err("this output of `forge-vmm bench --json` has no results".into());
    }
    Ok(results)
}

/// What both have, in the order of `new`, but for what was nothing in one of them: a
/// difference of two times may be, and nothing is no part of it.
#[must_use]
pub fn compare(old: &Results, new: &Results) -> Vec<Moved> {
    let disturbed = old.disturbed.max(new.disturbed) > DISTURBED_MAX;
    let (other_host, other_build) = (old.host != new.host, old.profile != new.profile);
    let moved = |new: &Outcome| {
        let old = old.results.iter().find(|old| old.name == new.name && old.unit == new.unit)?;
        let moved = one(old, new);
        if !(moved.change.is_finite() && moved.change > 0.0) {
            return None;
        }
        match moved.verdict {
            Verdict::WithinNoise | Verdict::TooFewSamples => Some(moved),
            Verdict::Faster | Verdict::Slower | Verdict::Larger | Verdict::Smaller
                if other_build || other_host && moved.new_ratio.is_none() =>
            {
                Some(Moved { verdict: Verdict::Elsewhere, ..moved })
            }
            _ if disturbed => Some(Moved { verdict: Verdict::Disturbed, ..moved }),
            _ => Some(moved),
        }
    };
    new.results.iter().filter_map(moved).collect()
}

fn one(old: &Outcome, new: &Outcome) -> Moved {
    // Ratios to different sums cannot be compared.
    let ratios = (old.ratio_of == new.ratio_of).then_some(()).and(old.ratio.zip(new.ratio));
    let (change, intervals) = match ratios {
        Some((old_ratio, new_ratio)) => {
            (new_ratio / old_ratio, old.ratio_interval.zip(new.ratio_interval))
        }
        None => (new.p50 / old.p50, old.interval.zip(new.interval)),
    };
    Moved {
        name: new.name.clone(),
        unit: new.unit.clone(),
        old: old.p50,
        new: new.p50,
        old_ratio: ratios.map(|(old, _)| old),
        new_ratio: ratios.map(|(_, new)| new),
        change,
        verdict: intervals.map_or(Verdict::TooFewSamples, |(then, now)| judge(new, then, now)),
    }
}

fn judge(entry: &Outcome, [old_low, old_high]: Interval, [new_low, new_high]: Interval) -> Verdict {
    let more = new_low > old_high * (1.0 + APART_MIN);
    let less = new_high * (1.0 + APART_MIN) < old_low;
    let floor = entry.name.starts_with("floor_");
    let rate = entry.unit.contains("/s");
    let size = entry.unit.contains("iB");
    // Of a rate, less is worse.
    let (worse, better) = if rate { (less, more) } else { (more, less) };
    match (worse, better) {
        (true, _) if floor => Verdict::HostSlower,
        (_, true) if floor => Verdict::HostFaster,
        (true, _) if size => Verdict::Larger,
        (_, true) if size => Verdict::Smaller,
        (true, _) => Verdict::Slower,
        (_, true) => Verdict::Faster,
        (false, false) => Verdict::WithinNoise,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::HostInfo;

    fn outcome(name: &str, unit: &str, p50: f64) -> Outcome {
        Outcome {
            name: name.into(),
            unit: unit.into(),
            n: 100,
            p50,
            p90: p50,
            p99: Some(p50),
            max: p50,
            ratio: None,
            ratio_of: None,
            interval: Some([p50 * 0.99, p50 * 1.01]),
            ratio_interval: None,
            note: None,
            samples: Vec::new(),
        }
    }

    fn with_ratio(outcome: Outcome, ratio: f64) -> Outcome {
        Outcome {
            ratio: Some(ratio),
            ratio_of: Some("floor_kvm".into()),
            ratio_interval: Some([ratio * 0.99, ratio * 1.01]),
            ..outcome
        }
    }

    fn results(results: Vec<Outcome>) -> Results {
        let host = HostInfo { cpu: "a".into(), kernel: "b".into(), kvm: "c".into(), threads: 1 };
        let (commit, profile) = ("d".into(), "release".into());
        Results {
            host,
            commit,
            profile,
            disturbed: 0.0,
            cpu_latency_us: None,
            results,
            failed: Vec::new(),
        }
    }

    fn verdict(old: Outcome, new: Outcome) -> Verdict {
        compare(&results(vec![old]), &results(vec![new]))[0].verdict
    }

    #[test]
    fn of_a_rate_more_is_better_of_a_floor_too() {
        let of = |name: &str, unit, old, new| {
            verdict(outcome(name, unit, old), outcome(name, unit, new))
        };
        assert_eq!(of("floor_throughput", "runs/s/core", 48.0, 430.0), Verdict::HostFaster);
        assert_eq!(of("floor_kvm", "us", 48.0, 430.0), Verdict::HostSlower);
        assert_eq!(of("throughput_reset", "runs/s/core", 48.0, 430.0), Verdict::Faster);
        assert_eq!(of("density", "KiB/VM", 48.0, 430.0), Verdict::Larger);
    }

    #[test]
    fn figures_of_another_host_or_build_say_nothing_of_code_without_a_ratio() {
        let of = |rate, kib, ratio| {
            results(vec![
                outcome("throughput_reset", "runs/s/core", rate),
                outcome("density", "KiB/VM", kib),
                with_ratio(outcome("boot", "us", 2_000.0), ratio),
            ])
        };
        let (old, mut new) = (of(50.0, 800.0, 10.0), of(5.0, 1_000.0, 5.0));
        let verdicts = |new: &Results| -> Vec<Verdict> {
            compare(&old, new).iter().map(|moved| moved.verdict).collect()
        };
        assert_eq!(verdicts(&new), [Verdict::Slower, Verdict::Larger, Verdict::Faster]);
        new.profile = "debug".into();
        assert_eq!(verdicts(&new), [Verdict::Elsewhere; 3], "floors are none of the build");
        new.profile = "release".into();
        new.host.cpu = "another".into();
        assert_eq!(verdicts(&new), [Verdict::Elsewhere, Verdict::Elsewhere, Verdict::Faster]);
    }

    #[test]
    fn a_slower_host_is_not_slower_code() {
        let old = results(vec![
            outcome("floor_kvm", "us", 200.0),
            with_ratio(outcome("boot", "us", 2_000.0), 10.0),
        ]);
        let new = results(vec![
            outcome("floor_kvm", "us", 400.0),
            with_ratio(outcome("boot", "us", 4_000.0), 10.0),
        ]);
        let moved = compare(&old, &new);
        assert_eq!(moved[0].verdict, Verdict::HostSlower);
        assert_eq!((moved[1].verdict, moved[1].change), (Verdict::WithinNoise, 1.0));
    }

    #[test]
    fn slower_code_on_a_faster_host_is_slower_code() {
        let old = with_ratio(outcome("boot", "us", 2_000.0), 10.0);
        let new = with_ratio(outcome("boot", "us", 1_500.0), 15.0);
        assert_eq!(verdict(old.clone(), new.clone()), Verdict::Slower);
        assert_eq!(verdict(new, old), Verdict::Faster);
    }

    #[test]
    fn intervals_that_touch_are_noise() {
        let old = outcome("boot", "us", 100.0);
        let wide = Outcome { interval: Some([104.5, 140.0]), ..outcome("boot", "us", 120.0) };
        assert_eq!(verdict(old.clone(), wide), Verdict::WithinNoise);
        assert_eq!(verdict(old, outcome("boot", "us", 120.0)), Verdict::Slower);
    }

    #[test]
    fn a_disturbed_bench_accuses_nobody() {
        let old = results(vec![outcome("boot", "us", 100.0), outcome("reset", "us", 10.0)]);
        let new = results(vec![outcome("boot", "us", 200.0), outcome("reset", "us", 10.0)]);
        let new = Results { disturbed: 2.0 * DISTURBED_MAX, ..new };
        for moved in [compare(&old, &new), compare(&new, &old)] {
            assert_eq!(moved[0].verdict, Verdict::Disturbed);
            assert_eq!(moved[1].verdict, Verdict::WithinNoise);
        }
    }

    #[test]
    fn more_runs_a_second_are_faster_and_more_memory_is_larger() {
        let rate = |p50| outcome("throughput", "runs/s/core", p50);
        assert_eq!(verdict(rate(100.0), rate(200.0)), Verdict::Faster);
        assert_eq!(verdict(rate(200.0), rate(100.0)), Verdict::Slower);
        let size = |p50| outcome("density", "KiB/VM", p50);
        assert_eq!(verdict(size(100.0), size(200.0)), Verdict::Larger);
        assert_eq!(verdict(size(200.0), size(100.0)), Verdict::Smaller);
    }

    #[test]
    fn what_was_nothing_is_not_compared() {
        let (nothing, some) = (outcome("floor_door", "us", 0.0), outcome("floor_door", "us", 3.0));
        for (old, new) in [(&nothing, &some), (&some, &nothing), (&nothing, &nothing)] {
            let (old, new) = (results(vec![old.clone()]), results(vec![new.clone()]));
            assert_eq!(compare(&old, &new), []);
        }
    }

    #[test]
    fn ratios_to_different_floors_are_not_compared() {
        let old = with_ratio(outcome("warm", "us", 100.0), 4.0);
        let new = Outcome { ratio_of: Some("2 floor_kvm".into()), ..old.clone() };
        let new = Outcome { ratio: Some(2.0), ratio_interval: Some([1.9, 2.1]), ..new };
        let moved = compare(&results(vec![old]), &results(vec![new]));
        assert_eq!((moved[0].verdict, moved[0].old_ratio), (Verdict::WithinNoise, None));
    }

    #[test]
    fn results_survive_json_and_other_files_are_refused() {
        let written = serde_json::to_vec(&results(vec![outcome("boot", "us", 100.0)])).unwrap();
        let read = parse(&written).unwrap();
        assert_eq!(serde_json::to_vec(&read).unwrap(), written);
        for other in [&b"no JSON"[..], b"{}", b"[]", br#"{"host":1,"results":[]}"#] {
            assert!(parse(other).unwrap_err().starts_with("this is no output of"));
        }
        let empty = serde_json::to_vec(&results(Vec::new())).unwrap();
        assert!(parse(&empty).unwrap_err().contains("has no results"));
    }

    #[test]
    fn a_result_without_intervals_is_not_judged() {
        let json =
            br#"{"host": {"cpu": "a", "kernel": "b", "kvm": "c", "threads": 1}, "commit": "d",
            "results": [{"name": "boot", "unit": "us", "n": 2, "p50": 1.0, "p90": 1.0, "p99": 1.0,
            "max": 1.0, "ratio": null, "ratio_of": null}]}"#;
        let moved = compare(&parse(json).unwrap(), &results(vec![outcome("boot", "us", 100.0)]));
        assert_eq!(moved[0].verdict, Verdict::TooFewSamples);
    }
}
