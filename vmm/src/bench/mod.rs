//! `forge-vmm bench`: what a run costs on this host, beside the floors that
//! no design can go below.
//!
//! Every case and every floor is sampled in turn, round by round, so that a
//! host that becomes slower in the middle makes all of them slower. Figures
//! of one host and one run can be compared; ratios to the floors can be
//! compared further.
//!
//! | module | what it holds |
//! |---|---|
//! | [`floors`] | bare KVM, one exit, a socket, fork, one verification |
//! | [`cases`] | what is measured of us |
//! | [`program`] | the benched program: signed, checked, new input each run |

pub mod cases;
pub mod floors;
pub mod program;

use serde::Serialize;

/// One thing to measure.
pub trait Case {
    /// Takes one sample, in nanoseconds.
    ///
    /// # Errors
    /// What failed, for a reader: a bench that cannot measure says so.
    fn sample(&mut self) -> Result<u64, String>;
}

/// Makes a case; its preparations are not measured.
type Make = fn() -> Result<Box<dyn Case>, String>;

/// A case by its name.
#[derive(Clone, Copy)]
pub struct Entry {
    /// Its stable name.
    pub name: &'static str,
    /// What it measures.
    pub about: &'static str,
    /// The floor that its ratio is to.
    pub ratio_of: Option<&'static str>,
    make: Make,
}

/// Every case there is, floors first.
pub const ENTRIES: [Entry; 7] = [
    Entry {
        name: "floor_kvm",
        about: "bare KVM: create a VM, one slot, one vCPU, one exit",
        ratio_of: None,
        make: floors::kvm,
    },
    Entry {
        name: "floor_kvm_destroy",
        about: "bare KVM: destroy that VM",
        ratio_of: None,
        make: floors::kvm_destroy,
    },
    Entry {
        name: "floor_exit",
        about: "one bare VM exit by MMIO, and back",
        ratio_of: None,
        make: floors::exit,
    },
    Entry {
        name: "floor_socket",
        about: "64 bytes to another process over a unix socket, and back",
        ratio_of: None,
        make: floors::socket,
    },
    Entry {
        name: "floor_fork",
        about: "fork a process that ends at once, and wait for it",
        ratio_of: None,
        make: floors::fork,
    },
    Entry {
        name: "floor_verify",
        about: "check the program's signature on the host",
        ratio_of: None,
        make: floors::verify,
    },
    Entry {
        name: "boot",
        about: "nothing prepared: program in hand → admission, VM, guest, result",
        ratio_of: Some("floor_kvm"),
        make: cases::boot,
    },
];

/// The host that was measured.
#[derive(Clone, Debug, Serialize)]
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

/// What was measured of one case, in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The case.
    pub name: &'static str,
    /// Always `us`.
    pub unit: &'static str,
    /// How many samples.
    pub n: usize,
    /// The median.
    pub p50: f64,
    /// Nine of ten were faster.
    pub p90: f64,
    /// 99 of 100 were faster.
    pub p99: f64,
    /// The slowest.
    pub max: f64,
    /// Its median over the floor's.
    pub ratio: Option<f64>,
    /// That floor.
    pub ratio_of: Option<&'static str>,
}

/// A whole bench.
#[derive(Clone, Debug, Serialize)]
pub struct Results {
    /// Where.
    pub host: HostInfo,
    /// Of what.
    pub commit: &'static str,
    /// The figures.
    pub results: Vec<Outcome>,
}

/// Rounds that are run and thrown away first.
const WARM_UP_ROUNDS: usize = 5;

/// Measures the named cases and the floors their ratios need, `rounds` samples
/// each. `progress` hears of every round.
///
/// # Errors
/// The first case that cannot be made or sampled, by its name.
pub fn run(
    names: &[&str],
    rounds: usize,
    mut progress: impl FnMut(usize),
) -> Result<Results, String> {
    let wanted = |entry: &&Entry| {
        let needed = |name: &&str| {
            let of = ENTRIES.iter().find(|other| other.name == *name);
            of.is_some_and(|other| other.ratio_of == Some(entry.name))
        };
        names.contains(&entry.name) || names.iter().any(needed)
    };
    let entries: Vec<Entry> = ENTRIES.iter().filter(wanted).copied().collect();
    let named = |entry: &Entry| {
        let name = entry.name;
        move |error: String| format!("{name}: {error}")
    };
    let mut cases = Vec::new();
    for entry in &entries {
        cases.push((entry.make)().map_err(named(entry))?);
    }
    let mut samples = vec![Vec::with_capacity(rounds); entries.len()];
    for round in 0..WARM_UP_ROUNDS + rounds {
        for ((entry, case), samples) in entries.iter().zip(&mut cases).zip(&mut samples) {
            let ns = case.sample().map_err(named(entry))?;
            if round >= WARM_UP_ROUNDS {
                samples.push(ns);
            }
        }
        progress(round.saturating_sub(WARM_UP_ROUNDS));
    }
    let mut results: Vec<Outcome> =
        entries.iter().zip(samples).map(|(entry, samples)| outcome(entry, samples)).collect();
    let medians: Vec<(&str, f64)> = results.iter().map(|r| (r.name, r.p50)).collect();
    for result in &mut results {
        let floor = medians.iter().find(|(name, _)| Some(*name) == result.ratio_of);
        result.ratio = floor.map(|(_, p50)| result.p50 / p50);
    }
    Ok(Results { host: host_info(), commit: env!("FORGE_COMMIT"), results })
}

fn outcome(entry: &Entry, mut samples: Vec<u64>) -> Outcome {
    samples.sort_unstable();
    // The nearest-rank percentile: a value that was measured.
    let percentile = |percent: usize| {
        let rank = (samples.len() * percent).div_ceil(100).max(1);
        samples.get(rank - 1).map_or(f64::NAN, |ns| *ns as f64 / 1000.0)
    };
    Outcome {
        name: entry.name,
        unit: "us",
        n: samples.len(),
        p50: percentile(50),
        p90: percentile(90),
        p99: percentile(99),
        max: percentile(100),
        ratio: None,
        ratio_of: entry.ratio_of,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let outcome = outcome(&ENTRIES[0], (1..=200).map(|n| n * 1000).collect());
        assert_eq!((outcome.p50, outcome.p90), (100.0, 180.0));
        assert_eq!((outcome.p99, outcome.max), (198.0, 200.0));
        assert_eq!(outcome.n, 200);
    }

    #[test]
    fn every_ratio_is_to_a_floor_that_exists() {
        for entry in &ENTRIES {
            if let Some(floor) = entry.ratio_of {
                assert!(ENTRIES.iter().any(|other| other.name == floor), "{floor}");
            }
        }
    }
}
