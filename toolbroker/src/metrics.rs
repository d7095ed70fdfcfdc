//! Counters and histograms of the broker, as Prometheus reads them (text
//! exposition format 0.0.4).
//!
//! Labels come from the configuration and from fixed lists alone: a tool that
//! no grant names is counted under the server `""`, and one that its caller hosts
//! under `"(hosted)"`, so that neither program nor client chooses how many series
//! there are. Counting is a few atomic additions; the
//! text is made when somebody asks. Deliberately absent are the principal and
//! the run, which are the journal's, and a port to be scraped at.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forge_protocol::abi::CallCode;
use forge_protocol::exposition::Exposition;

use crate::definition::Effect;
use crate::locks::lock;

/// Upper bounds of the buckets, in microseconds.
const BUCKETS_US: [u64; 20] = [
    5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000,
    500_000, 1_000_000, 2_500_000, 5_000_000, 30_000_000,
];
/// Effects a call may be counted under, the last for calls refused before
/// theirs was known.
const EFFECTS: [&str; 4] = ["none", "read", "write", ""];
/// Ends a call may be counted under: a response, and each code.
const ENDS: usize = 1 + CallCode::ALL.len();

#[derive(Debug, Default)]
struct Histogram {
    /// One for each bound, and one for what is beyond the last.
    counts: [AtomicU64; BUCKETS_US.len() + 1],
    sum_ns: AtomicU64,
}

impl Histogram {
    fn observe(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bucket = BUCKETS_US.partition_point(|bound| bound.saturating_mul(1_000) < ns);
        if let Some(count) = self.counts.get(bucket) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    fn told_to(&self, told: &mut Exposition, name: &str, help: &str) {
        let counts = self.counts.each_ref().map(|count| count.load(Ordering::Relaxed));
        let buckets = BUCKETS_US
            .iter()
            .enumerate()
            .map(|(place, bound)| (*bound as f64 / 1e6, counts[..=place].iter().sum::<u64>()));
        let seconds = self.sum_ns.load(Ordering::Relaxed) as f64 / 1e9;
        told.histogram(name, help, buckets, (counts.iter().sum(), seconds));
    }
}

/// Calls of one server, by effect and end.
type Calls = [[AtomicU64; ENDS]; EFFECTS.len()];

/// All that is counted.
#[derive(Debug, Default)]
pub struct Metrics {
    calls: Mutex<HashMap<Box<str>, Arc<Calls>>>,
    duration: Histogram,
    authorisation: Histogram,
    intent: Histogram,
    dispatch: Histogram,
    runs: AtomicU64,
    runs_open: AtomicI64,
    commits: AtomicU64,
    commit_failures: AtomicU64,
    records: AtomicU64,
    commit: Histogram,
    redacted: AtomicU64,
    spans_exported: AtomicU64,
    spans_dropped: AtomicU64,
}

impl Metrics {
    /// A call settled. `server` is empty unless a grant names the tool, and never a
    /// name of a program's or a client's choice: what is counted is not forgotten.
    pub fn settled(
        &self,
        server: &str,
        effect: Option<Effect>,
        code: Option<CallCode>,
        took: Duration,
    ) {
        let effect = match effect {
            Some(Effect::None) => 0,
            Some(Effect::Read) => 1,
            Some(Effect::Write) => 2,
            None => 3,
        };
        let end = code.map_or(0, |code| code as i32).unsigned_abs() as usize;
        let mut calls = lock(&self.calls);
        let calls = match calls.get(server) {
            Some(calls) => calls,
            None => calls.entry(server.into()).or_default(),
        };
        if let Some(count) = calls[effect].get(end) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.duration.observe(took);
    }

    /// A call passed every check, from its arrival to its intent.
    pub fn authorised(&self, took: Duration) {
        self.authorisation.observe(took);
    }

    /// The intent of a call was taken by the journal.
    pub fn intended(&self, took: Duration) {
        self.intent.observe(took);
    }

    /// A dispatched call ended.
    pub fn dispatched(&self, took: Duration) {
        self.dispatch.observe(took);
    }

    /// A run was opened.
    pub fn run_opened(&self) {
        self.runs.fetch_add(1, Ordering::Relaxed);
        self.runs_open.fetch_add(1, Ordering::Relaxed);
    }

    /// A run's link was closed.
    pub fn run_closed(&self) {
        self.runs_open.fetch_sub(1, Ordering::Relaxed);
    }

    /// The journal put so many records on the disk at once.
    pub fn committed(&self, records: usize, took: Duration) {
        self.commits.fetch_add(1, Ordering::Relaxed);
        self.records.fetch_add(records as u64, Ordering::Relaxed);
        self.commit.observe(took);
    }

    /// How many commits there were, and of how many records.
    #[cfg(test)]
    pub(crate) fn commits(&self) -> (u64, u64) {
        (self.commits.load(Ordering::Relaxed), self.records.load(Ordering::Relaxed))
    }

    /// The journal could not be written.
    pub fn commit_failed(&self) {
        self.commit_failures.fetch_add(1, Ordering::Relaxed);
    }

    /// A result carried a credential, which was removed.
    pub fn redacted(&self) {
        self.redacted.fetch_add(1, Ordering::Relaxed);
    }

    /// A collector took so many spans.
    pub fn spans_exported(&self, spans: u64) {
        self.spans_exported.fetch_add(spans, Ordering::Relaxed);
    }

    /// So many spans were not delivered and never will be.
    pub fn spans_dropped(&self, spans: u64) {
        self.spans_dropped.fetch_add(spans, Ordering::Relaxed);
    }

    /// Everything, in the text exposition format.
    #[must_use]
    pub fn text(&self) -> String {
        let mut told = Exposition::behind(String::with_capacity(8 * 1024));
        let mut family = told.counter("forge_calls_total", "Tool calls by server, effect and end.");
        let calls = lock(&self.calls);
        let mut servers: Vec<_> = calls.iter().collect();
        servers.sort_unstable_by_key(|(server, _)| *server);
        for (server, calls) in servers {
            for (effect, ends) in EFFECTS.iter().zip(&**calls) {
                for (end, count) in ends.iter().enumerate() {
                    let count = count.load(Ordering::Relaxed);
                    if count == 0 {
                        continue;
                    }
                    let code = end.checked_sub(1).and_then(|code| CallCode::ALL.get(code));
                    let end = code.map_or("ok", |code| code.as_str());
                    family.of(&[("server", server), ("effect", effect), ("end", end)], count);
                }
            }
        }
        for (histogram, name, help) in [
            (&self.duration, "forge_call_seconds", "A call, from its arrival to its answer."),
            (
                &self.authorisation,
                "forge_call_authorisation_seconds",
                "From a call's arrival until it may be dispatched, the journal apart.",
            ),
            (
                &self.intent,
                "forge_call_intent_seconds",
                "What a call waits for the journal to take its intent.",
            ),
            (
                &self.dispatch,
                "forge_call_dispatch_seconds",
                "From a call's dispatch to its tool's answer.",
            ),
            (
                &self.commit,
                "forge_journal_commit_seconds",
                "One commit of the journal, the disk included.",
            ),
        ] {
            histogram.told_to(&mut told, name, help);
        }
        for (value, name, help) in [
            (
                &self.runs,
                "forge_runs_total",
                "Runs opened at the broker: those that may call a tool.",
            ),
            (&self.commits, "forge_journal_commits_total", "Commits of the journal."),
            (
                &self.commit_failures,
                "forge_journal_commit_failures_total",
                "Commits that failed. While the last one did, calls are refused.",
            ),
            (&self.records, "forge_journal_records_total", "Records on the disk."),
            (
                &self.redacted,
                "forge_results_redacted_total",
                "Results that carried a credential, which was removed.",
            ),
            (&self.spans_exported, "forge_spans_exported_total", "Spans that the collector took."),
            (
                &self.spans_dropped,
                "forge_spans_dropped_total",
                "Spans that the collector did not take, or not fast enough.",
            ),
        ] {
            told.counter(name, help).is(value.load(Ordering::Relaxed));
        }
        let help = "Runs whose link is open, or whose calls are still carried out.";
        told.gauge("forge_runs_open", help).is(self.runs_open.load(Ordering::Relaxed));
        told.into_text()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_server_effect_and_end() {
        let metrics = Metrics::default();
        let took = Duration::from_micros(30);
        metrics.settled("shop", Some(Effect::Write), None, took);
        metrics.settled("shop", Some(Effect::Write), None, took);
        metrics.settled("", None, Some(CallCode::Denied), took);
        let text = metrics.text();
        for line in [
            "forge_calls_total{server=\"shop\",effect=\"write\",end=\"ok\"} 2",
            "forge_calls_total{server=\"\",effect=\"\",end=\"denied\"} 1",
            "forge_call_seconds_count 3",
        ] {
            assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn buckets_are_cumulative_and_hold_their_upper_bound() {
        let histogram = Histogram::default();
        for us in [5, 6, 1_000, 60_000_000] {
            histogram.observe(Duration::from_micros(us));
        }
        let mut told = Exposition::default();
        histogram.told_to(&mut told, "x", "X.");
        let text = told.into_text();
        for line in [
            "x_bucket{le=\"0.000005\"} 1",
            "x_bucket{le=\"0.00001\"} 2",
            "x_bucket{le=\"0.001\"} 3",
            "x_bucket{le=\"30\"} 3",
            "x_bucket{le=\"+Inf\"} 4",
            "x_sum 60.001011",
            "x_count 4",
        ] {
            assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn the_operators_table_has_every_metric_and_no_other() {
        let guide = include_str!("../../docs/observability.md");
        // The service's own are its tests' to look for.
        let (guide, _) = guide.split_once("The service counts as well").unwrap();
        let told: std::collections::BTreeSet<(&str, &str)> = guide
            .lines()
            .filter_map(|line| line.strip_prefix("| `forge_")?.split_once("` | "))
            .map(|(name, rest)| (name, rest.split(' ').next().unwrap()))
            .collect();
        let metrics = Metrics::default();
        metrics.settled("shop", None, None, Duration::ZERO);
        let text = metrics.text();
        let counted = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE forge_")?.split_once(' '))
            .collect();
        assert_eq!(told, counted);
    }

    #[test]
    fn every_code_has_a_place_to_be_counted() {
        let metrics = Metrics::default();
        for code in CallCode::ALL {
            metrics.settled("shop", None, Some(code), Duration::ZERO);
            let line = format!("end=\"{}\"}} 1", code.as_str());
            assert!(metrics.text().contains(&line), "{line}");
        }
    }
}
