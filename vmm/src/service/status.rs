//! How the service stands: for a reader, as JSON, and for Prometheus.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

use forge_protocol::ending::RunEnd;
use forge_protocol::exposition::Exposition;
use forge_protocol::service::Reply;
use serde_json::{Value, json};

use super::Service;
use super::latency::Latencies;
use crate::link::Patience;
use crate::locks::lock;
use crate::report::RunReport;

/// Principals that a status names, of those with the most runs.
const PRINCIPALS_TOLD_MAX: usize = 16;

/// What is counted of runs.
#[derive(Debug)]
pub(super) struct Counts {
    since: Instant,
    ended: Mutex<BTreeMap<RunEnd, u64>>,
    latencies: Mutex<Latencies>,
}

impl Counts {
    pub(super) fn new() -> Self {
        Self {
            since: Instant::now(),
            ended: Mutex::default(),
            latencies: Mutex::new(Latencies::new()),
        }
    }

    /// A run is over.
    pub(super) fn ended(&self, report: &RunReport) {
        *lock(&self.ended).entry(report.end).or_default() += 1;
        // Of those that had a VM: a refusal is quick.
        if report.timing_us.run > 0 {
            lock(&self.latencies).add(report.timing_us.total, self.since.elapsed().as_secs());
        }
    }
}

impl Service {
    /// As `forge-vmm status --json` prints it. Who else is here is the
    /// operator's alone to know.
    pub(super) fn status(&self, is_operator: bool) -> Value {
        let mut ended: BTreeMap<&str, u64> = BTreeMap::new();
        for (end, runs) in lock(&self.counts.ended).iter() {
            *ended.entry(end.status().as_str()).or_default() += runs;
        }
        let ((running, waiting), bounds) = (self.gate.load(), self.gate.bounds());
        let pool = self.supervisor.pool();
        let weaknesses: Vec<_> = pool.weaknesses().iter().map(|weakness| weakness.word()).collect();
        let broker = self.supervisor.broker();
        let silence = pool.silence();
        let is_impaired = broker.as_ref().is_some_and(|it| !it.records) || silence.is_some();
        let (stands, uptime_s) = (pool.stands(), self.counts.since.elapsed().as_secs());
        let mut status = json!({
            "state": match (self.gate.is_draining(), is_impaired) {
                (true, _) => "draining",
                // Runs that call tools are refused, or those that find no VM standing.
                (false, true) => "recovering",
                (false, false) => "serving",
            },
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "uptime_s": uptime_s,
            "broker": broker.map(|it| json!({
                "pid": it.pid,
                "restarts": it.restarts,
                // It may name files of this host.
                "reason": it.reason.filter(|_| is_operator),
            })),
            "connections": lock(&self.connections).len(),
            "threads": self.crew.threads(),
            "handovers": self.crew.handed(),
            "runs": { "running": running, "waiting": waiting, "ended": ended },
            "bounds": {
                "runs_max": bounds.runs_max,
                "queue_max": bounds.queue_max,
                "queue_wait_ms": bounds.queue_wait.as_millis() as u64,
                "principal_runs_max": bounds.principal_runs_max,
            },
            "isolation": self.supervisor.tier().as_str(),
            "latency": lock(&self.counts.latencies).told(uptime_s),
            "pool": {
                "standing": stands.standing,
                "owned": stands.owned,
                "target": stands.target,
                "ready_max": stands.ready_max,
                "full": pool.is_full(),
                "resets_disproven": pool.resets_disproven(),
                "silent_s": silence.map(|it| it.as_secs()),
                "weaknesses": weaknesses,
            },
        });
        if is_operator {
            let options = self.options();
            let own_limit = |name: &str| options.principals.0.get(name).and_then(|it| it.runs_max);
            let tenants = self.gate.tenants(PRINCIPALS_TOLD_MAX).into_iter();
            let told = tenants.map(|(name, running, here)| {
                let runs_max = own_limit(&name).unwrap_or(bounds.principal_runs_max);
                json!({ "name": name, "running": running, "here": here, "runs_max": runs_max })
            });
            status["principals"] = told.collect();
        }
        status
    }

    /// What the broker counts, as far as patience lasts, and what is counted here.
    pub(super) fn metrics(&self, patience: Patience<'_>) -> Reply {
        let (text, answers) = match self.supervisor.metrics(patience) {
            Ok(text) => (text, true),
            Err(error) => {
                tracing::warn!(%error, "the toolbroker tells no metrics");
                (String::new(), false)
            }
        };
        let (running, waiting) = self.gate.load();
        let mut told = Exposition::behind(text);
        let mut gauge = |name: &str, help: &str, value: u64| told.gauge(name, help).is(value);
        gauge("forge_service_runs_running", "Runs that are carried out now.", running as u64);
        gauge("forge_service_runs_waiting", "Runs that wait for their turn.", waiting as u64);
        let bounds = self.gate.bounds();
        gauge(
            "forge_service_runs_max",
            "Runs that are carried out at once.",
            bounds.runs_max as u64,
        );
        gauge("forge_service_queue_max", "Runs that may wait.", bounds.queue_max as u64);
        let connections = lock(&self.connections).len() as u64;
        gauge("forge_service_connections", "Clients that are connected now.", connections);
        gauge("forge_service_threads", "Threads that serve clients.", self.crew.threads() as u64);
        let broker = self.supervisor.broker();
        let is_up = answers && broker.as_ref().is_some_and(|it| it.pid.is_some());
        gauge("forge_broker_up", "Whether the toolbroker is there and answers.", is_up.into());
        let pool = self.supervisor.pool();
        gauge(
            "forge_pool_full",
            "Whether all VMs that should be ready are.",
            pool.is_full().into(),
        );
        let stands = pool.stands();
        gauge("forge_pool_standing", "VMs that stand ready.", stands.standing as u64);
        gauge("forge_pool_target", "VMs that are to stand ready.", stands.target as u64);
        let mut counter = |name: &str, help: &str, value: u64| told.counter(name, help).is(value);
        let help = "How many toolbrokers were started after one was lost.";
        let restarts = broker.map_or(0, |it| it.restarts);
        counter("forge_broker_restarts_total", help, restarts);
        let help = "Resets that were found to have left something behind.";
        counter("forge_pool_resets_disproven_total", help, pool.resets_disproven());
        let help = "How often a connection was handed to a thread that did not read it.";
        counter("forge_service_handovers_total", help, self.crew.handed());
        let mut family = told.counter("forge_service_runs_total", "Runs by how they ended.");
        for (end, runs) in lock(&self.counts.ended).iter() {
            family.of(&[("status", end.status().as_str()), ("kind", end.kind())], runs);
        }
        let help = "Runs that reported, from the end of their wait for a turn to their report.";
        lock(&self.counts.latencies).told_to(&mut told, "forge_service_run_seconds", help);
        Reply::Metrics(told.into_text())
    }
}
