//! `forge-vmm bench`: what a run costs on this host, beside floors: what its parts
//! take by themselves.
//!
//! Every case and every floor is sampled in turn, round by round, so that a
//! host that becomes slower in the middle makes all of them slower. Figures
//! that take seconds each (throughput, density) follow, in turn as well.
//! Figures of one host and one run can be compared; ratios to the floors can
//! be compared further.
//!
//! A new case is one [`Entry`] and one small struct, see [`cases`].
//!
//! | module | what it holds |
//! |---|---|
//! | [`floors`] | bare KVM, one exit, a socket, the disk, fork, one verification, one parse |
//! | [`cases`] | what is measured of us |
//! | [`toolcall`] | tool calls by their effect, and what allowing one takes |
//! | [`doors`] | what each door costs over the bare run |
//! | [`overload`] | a tenant beside another that floods the service |
//! | `fixture` | the supervisors and services that cases are measured in |
//! | [`exec`] | execution in the guest beside the same interpreter on the host |
//! | [`program`] | the benched programs: signed, checked, new input each run |
//! | [`retrieval`] | how well and how fast tools are found, over a data set |
//! | [`formula`] | what a case's ratio is to, as data |
//! | [`stats`] | percentiles, and how sure a median is |
//! | [`disturbance`] | how much others kept it from running |
//! | [`memory`] | what the machine could still give, for what a waiting VM takes |
//! | `quiet` | waiting until what a sample left under way is done |
//! | [`compare`] | two results: what moved beyond noise |
//! | [`plot`] | the distributions as a picture |

pub mod cases;
pub mod compare;
pub mod disturbance;
pub mod doors;
pub mod exec;
mod fixture;
pub mod floors;
pub mod formula;
pub mod memory;
pub mod overload;
pub mod plot;
pub mod program;
mod quiet;
pub mod retrieval;
pub mod stats;
pub mod toolcall;

use std::ops::ControlFlow;

use serde::{Deserialize, Serialize};

use crate::cpu_latency::CpuLatency;
use disturbance::Disturbance;
pub use formula::Formula;
use stats::{Interval, blocks, median};

/// One thing to measure by samples.
pub trait Case {
    /// Takes one sample, in nanoseconds.
    ///
    /// # Errors
    /// What failed, for a reader. It is not sampled again.
    fn sample(&mut self) -> Result<u64, String>;
}

/// One thing that is a figure of its own: a rate, a size, a quotient.
pub trait Figure {
    /// Measures it once, in the unit of its [`Entry`].
    ///
    /// # Errors
    /// As for [`Case::sample`].
    fn measure(&mut self) -> Result<f64, String>;

    /// What a reader of the figure should know, after it was measured.
    fn note(&self) -> Option<String> {
        None
    }
}

/// How something is measured. Preparations are not.
#[derive(Clone, Copy)]
pub enum Measure {
    /// One sample each round, told in microseconds.
    Sampled(fn() -> Result<Box<dyn Case>, String>),
    /// A few repetitions, after the rounds.
    Figure {
        /// What a figure counts. One with a `/s` in it is better the larger it
        /// is, any other the smaller.
        unit: &'static str,
        /// How often it is measured; never more often than there are rounds.
        repetitions: usize,
        /// Makes what the figure is taken of.
        make: fn() -> Result<Box<dyn Figure>, String>,
    },
}

/// Something to measure, by its name.
#[derive(Clone, Copy)]
pub struct Entry {
    /// Its stable name.
    pub name: &'static str,
    /// What it is asked for by, with others.
    pub group: &'static str,
    /// What it measures.
    pub about: &'static str,
    /// What its ratio is to.
    pub ratio_of: Option<Formula>,
    /// How it is measured.
    pub measure: Measure,
}

/// Everything there is to measure, floors first.
#[must_use]
pub fn entries() -> Vec<Entry> {
    [
        floors::ENTRIES,
        cases::ENTRIES,
        toolcall::ENTRIES,
        doors::ENTRIES,
        overload::ENTRIES,
        exec::ENTRIES,
    ]
    .concat()
}

/// The entries that `name` stands for (`all`, a group, or one entry), and the
/// floors that their ratios need, in the order of [`entries`]. `None` if it
/// stands for none.
#[must_use]
pub fn select(name: &str) -> Option<Vec<Entry>> {
    let all = entries();
    let asked: Vec<Entry> = all
        .iter()
        .filter(|entry| name == "all" || name == entry.group || name == entry.name)
        .copied()
        .collect();
    let needed = |floor: &Entry| {
        asked.iter().any(|entry| {
            entry.name == floor.name
                || entry.ratio_of.is_some_and(|formula| formula.needs(floor.name))
        })
    };
    (!asked.is_empty()).then(|| all.iter().filter(|entry| needed(entry)).copied().collect())
}

/// The host that was measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostInfo {
    /// CPU model.
    pub cpu: String,
    /// Kernel release.
    pub kernel: String,
    /// KVM flavour.
    pub kvm: String,
    /// Threads the host has.
    pub threads: usize,
}

impl std::fmt::Display for HostInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { cpu, kernel, kvm, threads } = self;
        write!(f, "{cpu}, {threads} threads, Linux {kernel}, {kvm}")
    }
}

/// What was measured of one entry, in its unit.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// Name of the entry.
    pub name: String,
    /// `us` for what is sampled.
    pub unit: String,
    /// How many samples or repetitions.
    pub n: usize,
    /// The median.
    pub p50: f64,
    /// Nine of ten were less.
    pub p90: f64,
    /// 99 of 100 were less; `None` of fewer than 100 samples, of which it would be the
    /// greatest.
    pub p99: Option<f64>,
    /// The greatest.
    pub max: f64,
    /// Its median over what `ratio_of` comes to.
    pub ratio: Option<f64>,
    /// The formula, as text.
    pub ratio_of: Option<String>,
    /// Where the median would be in most repetitions of this bench.
    #[serde(default)]
    pub interval: Option<Interval>,
    /// The same of the ratio.
    #[serde(default)]
    pub ratio_interval: Option<Interval>,
    /// What a reader should know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// What was measured, in the order in which it was.
    #[serde(skip)]
    pub samples: Vec<f64>,
}

impl Outcome {
    /// Its tail: p99 over p50, unless that is nothing, as a difference may be.
    #[must_use]
    pub fn tail(&self) -> Option<f64> {
        self.p99.filter(|_| self.p50 > 0.0).map(|p99| p99 / self.p50)
    }
}

/// The results of a whole bench.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Results {
    /// The host that was measured.
    pub host: HostInfo,
    /// Git commit of the build that was measured.
    pub commit: String,
    /// Built with which cargo profile.
    #[serde(default)]
    pub profile: String,
    /// The part of its time that the bench had to wait for a CPU, for others
    /// than its own processes: 0 to 1.
    #[serde(default)]
    pub disturbed: f64,
    /// Idle CPUs were held ready within so many microseconds, as a service
    /// holds them while runs come ([`crate::cpu_latency`]); `None` if they slept
    /// as they liked.
    #[serde(default)]
    pub cpu_latency_us: Option<i32>,
    /// The figures.
    pub results: Vec<Outcome>,
    /// What could not be measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<Failure>,
}

/// An entry that there is no figure of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Name of the entry.
    pub name: String,
    /// Why the entry has no figure.
    pub error: String,
}

/// How far a bench is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// What it is at.
    pub what: &'static str,
    /// Steps done.
    pub done: usize,
    /// Steps in all.
    pub of: usize,
}

/// The order of each round. In one that stays, each case would always find the
/// caches as one certain other left them, and so would each floor.
struct Shuffle(u64);

impl Default for Shuffle {
    /// The same in every bench.
    fn default() -> Self {
        Self(0x9E37_79B9_7F4A_7C15)
    }
}

impl Shuffle {
    fn shuffle(&mut self, order: &mut [usize]) {
        for at in (1..order.len()).rev() {
            // xorshift64
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            order.swap(at, (self.0 % (at as u64 + 1)) as usize);
        }
    }
}

/// Rounds that are run and thrown away first.
const WARM_UP_ROUNDS: usize = 5;
/// Rounds from one look at how disturbed the bench is to the next. A sample
/// that follows one finds other things in the caches, so few do.
const LOOK_EVERY: usize = 10;

/// Measures: the sampled entries `rounds` times each, then the figures. One
/// that cannot be made or measured is left out from there on, and said.
/// `progress` hears of every step, and may break the bench off: `None` then.
/// Entries that others made (a peer's, for one) are measured like our own.
pub fn run(
    entries: &[Entry],
    rounds: usize,
    mut progress: impl FnMut(Progress) -> ControlFlow<()>,
) -> Option<Results> {
    let host = host_info();
    // For floors as for cases, or they would be of two hosts.
    let awake = CpuLatency::open().ok();
    if let Some(latency) = &awake {
        latency.ask();
    }
    let mut disturbance = Disturbance::begin();
    let mut failed = Vec::new();
    let mut sampled = Vec::new();
    let mut figures = Vec::new();
    for entry in entries {
        match entry.measure {
            Measure::Sampled(make) => {
                if let Some(case) = kept(entry, make(), &mut failed) {
                    sampled.push((entry, case, Vec::with_capacity(rounds)));
                }
            }
            Measure::Figure { repetitions, make, unit } => {
                figures.push((entry, make, unit, repetitions.min(rounds)));
            }
        }
    }
    let round_steps = if sampled.is_empty() { 0 } else { WARM_UP_ROUNDS + rounds };
    let of = round_steps + figures.iter().map(|(_, _, _, times)| times).sum::<usize>();
    let mut goes_on = |what, done| progress(Progress { what, done, of }).is_continue();
    let mut order: Vec<usize> = (0..sampled.len()).collect();
    let mut shuffle = Shuffle::default();
    for round in 0..round_steps {
        if !goes_on("rounds", round) {
            return None;
        }
        shuffle.shuffle(&mut order);
        order.retain(|&index| {
            let (entry, case, samples) = &mut sampled[index];
            let ns = kept(entry, case.sample(), &mut failed);
            if let Some(ns) = ns.filter(|_| round >= WARM_UP_ROUNDS) {
                samples.push(ns as f64 / 1000.0);
            }
            ns.is_some()
        });
        if round % LOOK_EVERY == 0 {
            disturbance.look();
        }
    }
    let mut results: Vec<Outcome> = sampled
        .into_iter()
        .enumerate()
        .filter(|(index, _)| order.contains(index))
        .map(|(_, sampled)| sampled)
        .map(|(entry, _case, samples)| outcome(entry, "us", samples))
        .collect();

    // What the sampled cases held (VMs, processes, memory) is gone by now.
    let mut done = round_steps;
    let mut made = Vec::new();
    for (entry, make, unit, times) in figures {
        if let Some(figure) = kept(entry, make(), &mut failed) {
            made.push((entry, figure, unit, times, Vec::new()));
        }
    }
    let most = made.iter().map(|(_, _, _, times, _)| *times).max().unwrap_or(0);
    for repetition in 0..most {
        let mut broken_off = false;
        made.retain_mut(|(entry, figure, _, times, values)| {
            if repetition >= *times || broken_off {
                return true;
            }
            broken_off = !goes_on(entry.name, done);
            if broken_off {
                return true;
            }
            done += 1;
            let value = kept(entry, figure.measure(), &mut failed);
            values.extend(value);
            value.is_some()
        });
        if broken_off {
            return None;
        }
        disturbance.look();
    }
    for (entry, figure, unit, _, values) in made {
        let note = figure.note();
        results.push(Outcome { note, ..outcome(entry, unit, values) });
    }
    rate(entries, &mut results);
    Some(Results {
        host,
        commit: env!("FORGE_COMMIT").into(),
        profile: env!("FORGE_PROFILE").into(),
        disturbed: disturbance.part(),
        cpu_latency_us: awake.as_ref().map(CpuLatency::bound_us),
        results,
        failed,
    })
}

/// What there is of an entry, or a note of why there is nothing.
fn kept<T>(entry: &Entry, made: Result<T, String>, failed: &mut Vec<Failure>) -> Option<T> {
    made.map_err(|error| failed.push(Failure { name: entry.name.into(), error })).ok()
}

fn outcome(entry: &Entry, unit: &str, samples: Vec<f64>) -> Outcome {
    let sorted = stats::sorted(&samples);
    Outcome {
        name: entry.name.into(),
        unit: unit.into(),
        n: samples.len(),
        p50: stats::percentile(&sorted, 50),
        p90: stats::percentile(&sorted, 90),
        p99: stats::p99(&sorted),
        max: stats::percentile(&sorted, 100),
        ratio: None,
        ratio_of: entry.ratio_of.map(|formula| formula.to_string()),
        interval: stats::interval(&blocks(&samples)),
        ratio_interval: None,
        note: None,
        samples,
    }
}

/// Fills in the ratios, from the floors among the outcomes.
fn rate(entries: &[Entry], results: &mut [Outcome]) {
    let floors: Vec<(String, f64, Vec<f64>)> = results
        .iter()
        .map(|floor| (floor.name.clone(), floor.p50, blocks(&floor.samples)))
        .collect();
    let floor = |name: &str| floors.iter().find(|(other, _, _)| other == name);
    for result in results {
        let formula =
            entries.iter().find(|entry| entry.name == result.name).and_then(|entry| entry.ratio_of);
        let Some(formula) = formula else { continue };
        let Some(whole) = formula.value(|name| floor(name).map(|(_, p50, _)| *p50)) else {
            continue;
        };
        result.ratio = Some(result.p50 / whole);
        // Block by block, so that what slowed both down for a while drops out.
        // A figure was not measured beside the floors and has no such blocks.
        let of_blocks = blocks(&result.samples).into_iter().enumerate().map(|(at, block)| {
            let beside = if result.unit == "us" {
                formula.value(|name| floor(name).and_then(|(_, _, blocks)| blocks.get(at).copied()))
            } else {
                None
            };
            block / beside.unwrap_or(whole)
        });
        let interval = stats::interval(&of_blocks.collect::<Vec<f64>>());
        // So it is as uncertain as its floors are.
        let at = |end: usize| {
            let of = |name: &str| Some(stats::interval(&floor(name)?.2)?[end]);
            formula.value(of).filter(|_| result.unit != "us").unwrap_or(whole)
        };
        let (least, most) = (at(0).min(at(1)), at(0).max(at(1)));
        result.ratio_interval =
            interval.map(|[low, high]| [low * whole / most, high * whole / least]);
    }
}

impl Results {
    /// The median of an entry, if it was measured.
    #[must_use]
    pub fn p50(&self, name: &str) -> Option<f64> {
        self.results.iter().find(|result| result.name == name).map(|result| median(&result.samples))
    }
}

fn host_info() -> HostInfo {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let cpu = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or_else(|| "unknown".into(), |(_, model)| model.to_owned());
    let kvm = ["kvm_intel", "kvm_amd", "kvm_pvm"]
        .into_iter()
        .find(|module| std::path::Path::new("/sys/module").join(module).is_dir());
    HostInfo {
        cpu,
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        kvm: kvm.unwrap_or("unknown").to_owned(),
        threads: cpuinfo.lines().filter(|line| line.starts_with("processor")).count(),
    }
}

/// Why a case cannot be made or measured, in its cause's words.
fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed(u64);

    impl Case for Fixed {
        fn sample(&mut self) -> Result<u64, String> {
            Ok(self.0)
        }
    }

    struct Counts(f64);

    impl Figure for Counts {
        fn measure(&mut self) -> Result<f64, String> {
            self.0 += 1.0;
            Ok(self.0)
        }

        fn note(&self) -> Option<String> {
            Some(format!("up to {}", self.0))
        }
    }

    fn whole(entries: &[Entry], rounds: usize) -> Results {
        run(entries, rounds, |_| ControlFlow::Continue(())).unwrap()
    }

    fn entry(name: &'static str, ratio_of: Option<Formula>, measure: Measure) -> Entry {
        Entry { name, group: "test", about: "", ratio_of, measure }
    }

    fn sample() -> Vec<Entry> {
        vec![
            entry("floor_a", None, Measure::Sampled(|| Ok(Box::new(Fixed(2_000))))),
            entry("floor_b", None, Measure::Sampled(|| Ok(Box::new(Fixed(1_000))))),
            entry(
                "case",
                Some(Formula::sum(&[(2.0, "floor_a"), (1.0, "floor_b")])),
                Measure::Sampled(|| Ok(Box::new(Fixed(15_000)))),
            ),
            entry(
                "figure",
                Some(Formula::rate(&[(1.0, "floor_a"), (2.0, "floor_b")])),
                Measure::Figure {
                    unit: "runs/s",
                    repetitions: 5,
                    make: || Ok(Box::new(Counts(0.0))),
                },
            ),
        ]
    }

    #[test]
    fn ratios_are_to_the_sums_their_formulas_name() {
        let results = whole(&sample(), 20).results;
        assert_eq!(results[2].p50, 15.0);
        assert_eq!(results[2].ratio, Some(3.0));
        assert_eq!(results[2].ratio_interval, Some([3.0, 3.0]));
        assert_eq!(results[2].ratio_of.as_deref(), Some("2 floor_a + floor_b"));
        // 1e6 / 4 us is 250 000 a second, and the median of 1 to 5 is 3.
        assert_eq!(results[3].ratio, Some(3.0 / 250_000.0));
        assert_eq!(results[3].ratio_of.as_deref(), Some("1e6 / (floor_a + 2 floor_b)"));
    }

    #[test]
    fn a_figure_is_repeated_in_its_own_unit_and_says_its_note() {
        let results = whole(&sample(), 20).results;
        let figure = &results[3];
        assert_eq!((figure.n, figure.unit.as_str()), (5, "runs/s"));
        assert_eq!((figure.p50, figure.max), (3.0, 5.0));
        assert_eq!(figure.note.as_deref(), Some("up to 5"));
        assert_eq!(whole(&sample(), 2).results[3].n, 2);
    }

    #[test]
    fn every_round_has_everything_once_and_none_follows_the_same_other_always() {
        let mut order: Vec<usize> = (0..8).collect();
        let mut shuffle = Shuffle::default();
        let mut follows = std::collections::BTreeSet::new();
        for _ in 0..200 {
            shuffle.shuffle(&mut order);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..8).collect::<Vec<_>>());
            follows.extend(order.windows(2).map(|pair| (pair[0], pair[1])));
        }
        assert_eq!(follows.len(), 8 * 7);
    }

    #[test]
    fn progress_counts_up_to_all_steps() {
        let mut heard = Vec::new();
        run(&sample(), 20, |progress| {
            heard.push((progress.done, progress.of));
            ControlFlow::Continue(())
        });
        let of = WARM_UP_ROUNDS + 20 + 5;
        assert_eq!(heard, (0..of).map(|done| (done, of)).collect::<Vec<_>>());
    }

    #[test]
    fn what_fails_is_said_and_the_others_are_measured_all_the_same() {
        struct Breaks;
        impl Figure for Breaks {
            fn measure(&mut self) -> Result<f64, String> {
                Err("broken".into())
            }
        }
        let mut entries = sample();
        entries.insert(1, entry("none", None, Measure::Sampled(|| Err("no luck".into()))));
        let make: fn() -> Result<Box<dyn Figure>, String> = || Ok(Box::new(Breaks));
        entries.push(entry("late", None, Measure::Figure { unit: "KiB", repetitions: 3, make }));
        let Results { results, failed, .. } = whole(&entries, 20);
        let failed: Vec<_> = failed.iter().map(|it| (&it.name[..], &it.error[..])).collect();
        assert_eq!(failed, [("none", "no luck"), ("late", "broken")]);
        let names: Vec<_> = results.iter().map(|it| &it.name[..]).collect();
        assert_eq!(names, ["floor_a", "floor_b", "case", "figure"]);
        assert_eq!(results[2].ratio, Some(3.0));
    }

    #[test]
    fn a_case_without_its_floor_has_a_figure_and_no_ratio() {
        let mut entries = sample();
        entries[0].measure = Measure::Sampled(|| Err("no such floor".into()));
        let Results { results, failed, .. } = whole(&entries, 20);
        assert_eq!((failed.len(), results[1].p50, results[1].ratio), (1, 15.0, None));
    }

    #[test]
    fn a_bench_can_be_broken_off_at_any_step() {
        for last in 0..WARM_UP_ROUNDS + 20 + 5 {
            let mut heard = 0;
            let results = run(&sample(), 20, |progress| {
                heard += 1;
                if progress.done == last {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            });
            assert!(results.is_none() && heard == last + 1, "{last}: {heard}");
        }
    }

    #[test]
    fn every_ratio_is_to_sampled_floors_that_exist() {
        let all = entries();
        for entry in &all {
            for (_, floor) in entry.ratio_of.iter().flat_map(|formula| formula.terms()) {
                let floor = all.iter().find(|other| other.name == *floor);
                let floor = floor.unwrap_or_else(|| panic!("{} has no such floor", entry.name));
                assert!(matches!(floor.measure, Measure::Sampled(_)), "{}", floor.name);
            }
        }
    }

    #[test]
    fn names_are_unique_and_no_entry_is_called_like_another_group() {
        let all = entries();
        for (at, entry) in all.iter().enumerate() {
            assert!(all[at + 1..].iter().all(|other| other.name != entry.name), "{}", entry.name);
            let misleading = all.iter().any(|o| o.group == entry.name && entry.group != entry.name);
            assert!(!misleading && entry.name != "all", "{}", entry.name);
        }
    }

    #[test]
    fn a_selection_draws_in_the_floors_it_needs_and_no_others() {
        let names = |name| {
            let selected = select(name)?;
            Some(selected.iter().map(|entry| entry.name).collect::<Vec<_>>())
        };
        assert_eq!(names("boot"), Some(vec!["floor_kvm", "boot"]));
        assert_eq!(names("floor_exit"), Some(vec!["floor_exit"]));
        assert_eq!(names("all").map(|all| all.len()), Some(entries().len()));
        assert_eq!(names("no such thing"), None);
    }
}
