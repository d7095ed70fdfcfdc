//! What a run is reported as: one object, the same at every door.

use base64::Engine as _;
use forge_protocol::abi::CallCode;
use forge_protocol::ending::{Ending, Fault, Lack, LimitKind, RunEnd};
use forge_protocol::guest::Ended;
use forge_protocol::run::{Artifact, CallRecord};
use forge_protocol::text::visible;
use forge_protocol::worker::{Fate, Tier, Timing, VmFailure, VmFailureKind};
use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

/// The output's bytes as JSON can carry them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OutputEncoding {
    /// As text.
    Utf8,
    /// As base64, because they are no UTF-8.
    Base64,
}

/// One artifact, without its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ArtifactReport {
    /// Its name, as the program gave it.
    pub name: String,
    /// Its media type, as the program gave it.
    #[serde(rename = "type")]
    pub media_type: String,
    /// Its size in bytes.
    pub bytes: usize,
    /// The file it was written to, if a folder for artifacts was named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

/// One tool call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CallReport {
    /// Its number in the order of calling, from 0. The list itself is in the
    /// order of settling.
    pub id: u32,
    /// Which tool.
    pub tool: String,
    /// `ok`, a call code's name, or `unsettled`.
    pub status: &'static str,
    /// How long it took, in microseconds.
    pub duration_us: Option<u64>,
    /// Who said what came back, as `server/tool`. What a tool says is never
    /// anything but data: `trust` says so of each.
    pub origin: String,
    /// `untrusted`, whatever the tool.
    pub trust: &'static str,
    /// Whether what came back carried a credential, which was removed.
    pub credential_removed: bool,
}

/// Where the time went, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TimingReport {
    /// Checking the program and opening the run.
    pub admission: u64,
    /// Making the VM.
    pub vm: u64,
    /// What its guest did before the run came; with `vm` from when it was made,
    /// which for a VM that stood ready is not in `total`.
    pub boot: u64,
    /// From the program's delivery to its first instruction.
    pub load: u64,
    /// The program's own run.
    pub run: u64,
    /// All of it, from admission to report.
    pub total: u64,
}

impl TimingReport {
    pub(crate) fn of_worker(timing: Timing) -> Self {
        let us = |ns: u64| ns / 1000;
        Self {
            vm: us(timing.vm_ns),
            boot: us(timing.boot_ns),
            load: us(timing.load_ns),
            run: us(timing.run_ns),
            ..Self::default()
        }
    }
}

/// One run, reported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunReport {
    /// The run, as 32 hex digits.
    pub run_id: String,
    /// How it ended: `status` and `kind`.
    #[serde(flatten, serialize_with = "status_and_kind")]
    pub end: RunEnd,
    /// Why, for a reader.
    pub reason: String,
    /// When it may be worth while to come again, in milliseconds from then:
    /// of a run that there was no room for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// The program's output.
    pub output: String,
    /// How `output` is to be read.
    pub output_encoding: OutputEncoding,
    /// Its artifacts.
    pub artifacts: Vec<ArtifactReport>,
    /// Its log records, in order.
    pub log: Vec<LogReport>,
    /// Records that were dropped because its log was full.
    pub log_dropped: u64,
    /// The isolation that it ran in or would have: `unknown` for one that was to be a
    /// service's, and was not sent.
    pub isolation: &'static str,
    /// What of that isolation is weaker on this host than it could be: the
    /// words of [`crate::jail::Weakness`]. Empty for a run that no VM was made
    /// for.
    pub weaknesses: Vec<&'static str>,
    /// Whether its VM was made for it (`fresh`) or put back after another run (`reset`);
    /// `none` of a run that was refused before it had one.
    pub vm: &'static str,
    /// The signed hash of the program, in hex, once its signature was good.
    pub program_sha256: Option<String>,
    /// The public key that signed it, in hex.
    pub signer: Option<String>,
    /// Its tool calls, in the order in which they settled.
    pub tool_calls: Vec<CallReport>,
    /// Fuel it used, as the guest counts; 0 of a guest that did not tell its
    /// end, at a deadline above all.
    pub fuel_used: u64,
    /// The most linear memory it had, in bytes; 0 as for `fuel_used`.
    pub memory_peak_bytes: u64,
    /// VM exits from the program's delivery to its end.
    pub vm_exits: u64,
    /// Where the time went.
    pub timing_us: TimingReport,
}

impl RunReport {
    /// Logs that the run ended, and how. At `info`: who submits runs must not
    /// choose how much is logged by default. Its reason may be a program's words.
    pub fn log(&self, principal: &str) {
        tracing::info!(
            run = self.run_id,
            ?principal,
            program = self.program_sha256,
            status = self.end.status().as_str(),
            kind = self.end.kind(),
            calls = self.tool_calls.len(),
            total_us = self.timing_us.total,
            "run ended"
        );
    }
}

fn status_and_kind<S: Serializer>(end: &RunEnd, serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(2))?;
    map.serialize_entry("status", end.status().as_str())?;
    map.serialize_entry("kind", end.kind())?;
    map.end()
}

/// A tool that was found for a run's intent: exactly these are its grant. Whoever asked
/// for them adds them to the report, as `retrieved`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RetrievedReport {
    /// Which tool.
    pub tool: String,
    /// How well it fits, in millionths; see
    /// [`forge_protocol::broker::FoundTool`].
    pub score_millionths: u32,
}

/// One log record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LogReport {
    /// 0 error, 1 warn, 2 info, 3 debug, 4 trace.
    pub level: u8,
    /// The text, as the program gave it.
    pub text: String,
}

/// How and why a run ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) end: RunEnd,
    pub(crate) reason: String,
}

impl Outcome {
    pub(crate) fn new(end: RunEnd, reason: impl Into<String>) -> Self {
        Self { end, reason: reason.into() }
    }

    pub(crate) fn of_fate(fate: &Fate, wall_ms: u64, tier: Tier) -> Self {
        match fate {
            Fate::Ended(Ended { ending, .. }) => Self::of_ending(ending),
            Fate::Deadline => Self::new(
                RunEnd::Deadline,
                format!("the run did not end within the {wall_ms} ms that it was given"),
            ),
            Fate::Vm(failure) => Self::of_failure(failure, tier),
        }
    }

    fn of_ending(ending: &Ending) -> Self {
        match ending {
            Ending::Returned(0) => Self::new(RunEnd::Ok, ""),
            Ending::Returned(code) => {
                Self::new(RunEnd::Returned, format!("the program returned {code}"))
            }
            Ending::Trap { kind, detail } => Self::new(
                RunEnd::Trap(*kind),
                format!("the program trapped: {}", printable(detail)),
            ),
            Ending::Limit { kind: kind @ LimitKind::Artifacts, limit } => Self::new(
                RunEnd::Limit(*kind),
                format!(
                    "the program left more than `artifacts`, or one of more than `artifact_bytes`: \
                     its limit is {limit}"
                ),
            ),
            Ending::Limit { kind, limit } => Self::new(
                RunEnd::Limit(*kind),
                format!("the program reached its {} limit of {limit}", kind.as_str()),
            ),
            Ending::Rejected { kind, detail } => {
                Self::new(RunEnd::Rejected(*kind), printable(detail))
            }
        }
    }

    fn of_failure(failure: &VmFailure, tier: Tier) -> Self {
        let end = match failure.kind {
            VmFailureKind::Crash => RunEnd::Internal(Fault::GuestCrash),
            VmFailureKind::Misbehaved => RunEnd::Internal(Fault::GuestMisbehaved),
            VmFailureKind::Stopped => RunEnd::Internal(Fault::VmStopped),
            VmFailureKind::BrokerLost => RunEnd::Internal(Fault::BrokerLost),
            VmFailureKind::Cancelled => RunEnd::Cancelled,
            // With too much changed it ended before the run, which another is given.
            VmFailureKind::WorkerLost | VmFailureKind::TooChanged => {
                RunEnd::Internal(Fault::WorkerLost)
            }
            VmFailureKind::WorkerBroke => RunEnd::Internal(Fault::WorkerBroke),
            VmFailureKind::Internal => RunEnd::Internal(Fault::Internal),
            VmFailureKind::NotReset => RunEnd::Internal(Fault::NotReset),
            VmFailureKind::Unavailable => RunEnd::Unavailable(match tier {
                Tier::Vm => Lack::Kvm,
                Tier::Process => Lack::Host,
            }),
        };
        Self::new(end, printable(&failure.message))
    }
}

/// Text from a guest, made safe to print, on one line.
fn printable(text: &str) -> String {
    text.lines().map(visible).collect::<Vec<_>>().join("; ")
}

/// The status of a call of which no more is known.
pub(crate) const UNSETTLED: &str = "unsettled";

/// `ok`, a call code's name, or [`UNSETTLED`].
pub(crate) fn call_status(call: &CallRecord) -> &'static str {
    match call.settled {
        None => UNSETTLED,
        Some(settled) => settled.code.map_or("ok", CallCode::as_str),
    }
}

pub(crate) fn call_report(call: &CallRecord) -> CallReport {
    CallReport {
        id: call.id,
        tool: call.tool.to_string(),
        status: call_status(call),
        duration_us: call.settled.map(|settled| settled.duration_ns / 1000),
        origin: format!("{}/{}", call.tool.server(), call.tool.tool()),
        trust: "untrusted",
        credential_removed: call.settled.is_some_and(|settled| settled.redacted),
    }
}

pub(crate) fn artifact_report(artifact: &Artifact) -> ArtifactReport {
    ArtifactReport {
        name: artifact.name.clone(),
        media_type: artifact.media_type.clone(),
        bytes: artifact.content.len(),
        path: None,
    }
}

pub(crate) fn encode_output(output: &[u8]) -> (String, OutputEncoding) {
    match std::str::from_utf8(output) {
        Ok(text) => (text.into(), OutputEncoding::Utf8),
        Err(_) => {
            let text = base64::engine::general_purpose::STANDARD.encode(output);
            (text, OutputEncoding::Base64)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_that_is_no_text_is_base64() {
        assert_eq!(encode_output("grüße".as_bytes()), ("grüße".into(), OutputEncoding::Utf8));
        assert_eq!(encode_output(&[0xff, 0]), ("/wA=".into(), OutputEncoding::Base64));
    }

    #[test]
    fn a_guests_words_stay_on_one_line_without_controls() {
        let failure = VmFailure::new(VmFailureKind::Crash, "guest panic: a\x1b[31m\nsecond");
        let outcome = Outcome::of_failure(&failure, Tier::Vm);
        assert_eq!(outcome.reason, "guest panic: a\\u{1b}[31m; second");
    }
}
