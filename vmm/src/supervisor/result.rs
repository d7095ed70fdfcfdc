//! What is told of a run, whatever became of it.

use std::io;

use forge_protocol::RunId;
use forge_protocol::broker::RefusalKind;
use forge_protocol::ending::{Denial, Fault, Lack, Refusal, RejectKind, RunEnd};
use forge_protocol::hex::hex;
use forge_protocol::limits::OverLimit;
use forge_protocol::run::Artifact;
use forge_protocol::worker::{Fate, Report, Tier, Timing};

use crate::admission::{Admitted, Violation};
use crate::broker::BrokerError;
use crate::jail::Weakness;
use crate::pool::{Upkeep, Vm};
use crate::report::{
    LogReport, Outcome, RunReport, TimingReport, UNSETTLED, artifact_report, call_report,
    encode_output,
};
use crate::trace::{Supervised, Trace, now_ns};

/// Violations of one program that are told one by one.
const VIOLATIONS_TOLD: usize = 16;

/// A run's report and the artifacts it left.
#[derive(Debug)]
pub struct RunResult {
    /// The report.
    pub report: RunReport,
    /// The artifacts, in the order of the report's list.
    pub artifacts: Vec<Artifact>,
    /// Where the time went.
    pub trace: Trace,
    /// What the run's pool has to do, once whoever waits has the rest of this.
    pub upkeep: Option<Upkeep>,
}

impl RunResult {
    /// It was cancelled as the service ended, where it was. What else is said of it
    /// stands.
    pub fn service_ended(&mut self) {
        if self.report.end == RunEnd::Cancelled {
            self.report.reason.insert_str(0, "the service ended before the run did: ");
        }
    }

    /// What this takes until it is told, in bytes: what the run left, and its report as
    /// JSON, the longest parts of that as they are written and the calls by what one takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        const CALL_BYTES: usize = 512;
        let written = |text: &str| -> usize {
            text.bytes().map(|byte| if byte < b' ' { 6 } else { 1 }).sum()
        };
        let left: usize = self.artifacts.iter().map(|it| it.content.len()).sum();
        let logged: usize =
            self.report.log.iter().map(|it| CALL_BYTES / 8 + written(&it.text)).sum();
        left + written(&self.report.output) + logged + self.report.tool_calls.len() * CALL_BYTES
    }

    /// A run that was not begun, and would have been carried out in this tier.
    #[must_use]
    pub fn unstarted(tier: Tier, end: RunEnd, reason: impl Into<String>) -> Self {
        let at = Supervised { started: now_ns(), ..Supervised::default() };
        let run_id = RunId(crate::keys::random().unwrap_or_default());
        unstarted(run_id, tier, None, Outcome::new(end, reason), at)
    }

    /// One that there was no room for, and when there may be.
    #[must_use]
    pub fn refused(
        tier: Tier,
        refusal: Refusal,
        reason: impl Into<String>,
        retry_after_ms: Option<u64>,
    ) -> Self {
        let mut result = Self::unstarted(tier, RunEnd::Refused(refusal), reason);
        result.report.retry_after_ms = retry_after_ms;
        result
    }
}

/// After how long one may come again whose tool's server is away: about as long as a server
/// that failed once is left alone.
const SERVER_RETRY_MS: u64 = 1_000;

/// What a report says in place of a VM where a run had none.
const NO_VM: &str = "none";

/// Why a run is refused before it has a VM.
pub(super) enum Refused {
    Violations(Vec<Violation>),
    Broker(BrokerError),
    Over(OverLimit),
    Input(String),
    Host(io::Error),
}

impl Refused {
    pub(super) fn result(
        self,
        run_id: RunId,
        tier: Tier,
        admitted: Option<&Admitted>,
        at: Supervised,
    ) -> RunResult {
        let retry_after_ms = match &self {
            Self::Broker(BrokerError::Away { retry_after_ms, .. }) => Some(*retry_after_ms),
            Self::Broker(BrokerError::Refused { kind: RefusalKind::ServerAway, .. }) => {
                Some(SERVER_RETRY_MS)
            }
            _ => None,
        };
        let mut result = unstarted(run_id, tier, admitted, self.into(), at);
        result.report.retry_after_ms = retry_after_ms;
        result
    }
}

impl From<Refused> for Outcome {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Violations(violations) => {
                let kind = violations.first().map_or(RejectKind::Invalid, |it| it.kind);
                let more = violations.len().saturating_sub(VIOLATIONS_TOLD);
                let mut messages: Vec<_> =
                    violations.into_iter().take(VIOLATIONS_TOLD).map(|v| v.message).collect();
                if more > 0 {
                    messages.push(format!("and {more} more"));
                }
                Self::new(RunEnd::Rejected(kind), messages.join("; "))
            }
            Refused::Input(why) => Self::new(
                RunEnd::Denied(Denial::BadRequest),
                format!("the input is not JSON: {why}"),
            ),
            Refused::Over(over) => {
                Self::new(RunEnd::Rejected(RejectKind::TooLarge), over.to_string())
            }
            Refused::Broker(error) => {
                let end = match &error {
                    BrokerError::Refused { kind, .. } => (*kind).into(),
                    BrokerError::Away { .. } => RunEnd::Refused(Refusal::BrokerAway),
                    BrokerError::Cancelled => RunEnd::Cancelled,
                    BrokerError::NoLink(_) => RunEnd::Unavailable(Lack::Host),
                    BrokerError::OutOfTime { .. } => RunEnd::Deadline,
                    error if error.ends_the_link() => RunEnd::Internal(Fault::BrokerLost),
                    _ => RunEnd::Internal(Fault::Broker),
                };
                Self::new(end, error.to_string())
            }
            Refused::Host(error) => Self::new(RunEnd::Unavailable(Lack::Host), error.to_string()),
        }
    }
}

/// Withholds the result of a run whose calls may not be on the disk. Only events that
/// were already sent stand, and which calls there were: what became of them only if the
/// broker was lost, since its journal has that.
pub(super) fn held_back(result: RunResult, error: &BrokerError) -> RunResult {
    let RunResult { mut report, mut trace, upkeep, .. } = result;
    report.end = match error {
        BrokerError::Cancelled => RunEnd::Cancelled,
        error if error.ends_the_link() => RunEnd::Internal(Fault::BrokerLost),
        _ => RunEnd::Internal(Fault::Journal),
    };
    if report.end != RunEnd::Internal(Fault::BrokerLost) {
        for call in &mut report.tool_calls {
            call.status = UNSETTLED;
            call.duration_us = None;
        }
        trace.calls.iter_mut().for_each(|call| call.settled = None);
    }
    report.reason = format!(
        "the run may have made calls, and its result is held back, since what they did may not \
         be on the disk yet; `forge-vmm journal list --run {}` has what is: {error}",
        report.run_id
    );
    (report.output, report.output_encoding) = encode_output(&[]);
    report.artifacts.clear();
    report.log.clear();
    RunResult { report, artifacts: Vec::new(), trace, upkeep }
}

fn us_since(since_ns: u64) -> u64 {
    now_ns().saturating_sub(since_ns) / 1000
}

/// The report of a run that no VM was made for.
pub(super) fn unstarted(
    run_id: RunId,
    tier: Tier,
    admitted: Option<&Admitted>,
    outcome: Outcome,
    at: Supervised,
) -> RunResult {
    let total = us_since(at.started);
    let timing_us = TimingReport { admission: total, total, ..TimingReport::default() };
    let (output, output_encoding) = encode_output(&[]);
    let report = RunReport {
        run_id: run_id.to_string(),
        end: outcome.end,
        reason: outcome.reason,
        retry_after_ms: None,
        output,
        output_encoding,
        artifacts: Vec::new(),
        log: Vec::new(),
        log_dropped: 0,
        isolation: tier.as_str(),
        weaknesses: Vec::new(),
        vm: NO_VM,
        program_sha256: admitted.map(|admitted| hex(&admitted.sha256)),
        signer: admitted.map(|admitted| admitted.signer.to_string()),
        tool_calls: Vec::new(),
        fuel_used: 0,
        memory_peak_bytes: 0,
        vm_exits: 0,
        timing_us,
    };
    let trace = Trace { supervised: at, ..Trace::default() };
    RunResult { report, artifacts: Vec::new(), trace, upkeep: None }
}

/// What a run was carried out in.
pub(super) struct Place<'a> {
    pub(super) tier: Tier,
    /// None if it did not come that far.
    pub(super) vm: Option<Vm>,
    pub(super) weaknesses: &'a [Weakness],
}

/// The report of a run that came as far as the pool.
pub(super) fn reported(
    run_id: RunId,
    admitted: &Admitted,
    outcome: Outcome,
    report: Report,
    place: Place<'_>,
    at: Supervised,
) -> RunResult {
    // Only a guest that told its end has told these.
    let (fuel_used, memory_peak_bytes, log_dropped) = match &report.fate {
        Fate::Ended(ended) => (ended.fuel_used, ended.memory_peak_bytes, ended.logs_dropped),
        Fate::Deadline | Fate::Vm(_) => (0, 0, 0),
    };
    let timing: Timing = report.timing;
    let timing_us = TimingReport {
        admission: at.opened.saturating_sub(at.started) / 1000,
        total: us_since(at.started),
        ..TimingReport::of_worker(timing)
    };
    let (output, output_encoding) = encode_output(&report.output);
    let unstarted = unstarted(run_id, place.tier, Some(admitted), outcome, at);
    let public = RunReport {
        output,
        output_encoding,
        artifacts: report.artifacts.iter().map(artifact_report).collect(),
        log: report
            .logs
            .iter()
            .map(|log| LogReport { level: log.level, text: log.text.clone() })
            .collect(),
        log_dropped,
        weaknesses: place.weaknesses.iter().map(|weakness| weakness.word()).collect(),
        vm: place.vm.map_or(NO_VM, Vm::as_str),
        tool_calls: report.calls.iter().map(call_report).collect(),
        fuel_used,
        memory_peak_bytes,
        vm_exits: report.vm_exits,
        timing_us,
        ..unstarted.report
    };
    let trace = Trace { supervised: at, timing, calls: report.calls };
    RunResult { report: public, artifacts: report.artifacts, trace, upkeep: None }
}
