//! The link between the supervisor and a worker: for each run a [`Job`] or a
//! [`PreparedJob`] in, and a [`Report`] out; and what a zygote is asked.
//!
//! The worker is the jailed process around one VM. It trusts the supervisor;
//! the supervisor takes the report for a claim by whoever the guest may have
//! become, and bounds it.

use alloc::string::String;
use alloc::vec::Vec;

use crate::codec::by_hand::{DecodeError, Decoder, impl_borrow_decode, list};
use crate::codec::{Decode, Encode};
use crate::frame::Kind;
use crate::guest::{Ended, Load, Start};
use crate::limits::{
    ARTIFACTS_MAX, CALLS_MAX, LOG_BYTES_MAX, LOG_RECORD_OVERHEAD_BYTES, MESSAGE_OVERHEAD_BYTES,
    OverLimit, RunLimits, within,
};
use crate::run::{Artifact, CallRecord, Log};
use crate::tally::Tally;

/// When a run's time is over: a moment of the host's monotonic clock
/// (`CLOCK_MONOTONIC`), which all its processes share. It is set once, where
/// the run is admitted, so whatever time is lost on the way is the run's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub struct Deadline {
    /// That clock's time, in nanoseconds.
    pub monotonic_ns: u64,
}

/// One run, as the supervisor hands it to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Job {
    /// What the guest loads the program by.
    pub load: Load,
    /// What it runs it by.
    pub start: Start,
    /// The signed program.
    pub program: Vec<u8>,
    /// The run's input.
    pub input: Vec<u8>,
    /// When its wall clock ends.
    pub deadline: Deadline,
    /// Whether a link to the broker came with the job. Without one every call
    /// is denied.
    pub brokered: bool,
}

/// A program to be loaded ahead of its runs, which then come as
/// [`PreparedJob`]s.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Prepare {
    /// What the guest loads it by.
    pub load: Load,
    /// The signed program.
    pub program: Vec<u8>,
}

/// One run of the program that was prepared.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct PreparedJob {
    /// What the guest is told of the run.
    pub start: Start,
    /// The run's input.
    pub input: Vec<u8>,
    /// When the run's wall clock ends, as in [`Job`].
    pub deadline: Deadline,
    /// Whether the run has a link to the broker, as in [`Job`].
    pub brokered: bool,
}

/// What became of a run. It decodes with no more of each than any run may have.
#[derive(Clone, Debug, PartialEq, Eq, Encode)]
pub struct Report {
    /// How the run ended.
    pub fate: Fate,
    /// The program's output, whole or as far as it came.
    pub output: Vec<u8>,
    /// The artifacts that the run left.
    pub artifacts: Vec<Artifact>,
    /// The run's log.
    pub logs: Vec<Log>,
    /// Its tool calls, in the order in which they settled; those that never
    /// did come last.
    pub calls: Vec<CallRecord>,
    /// VM exits from the program's delivery to the end.
    pub vm_exits: u64,
    /// Where the time went.
    pub timing: Timing,
}

impl<Context> Decode<Context> for Report {
    fn decode<D: Decoder<Context = Context>>(decoder: &mut D) -> Result<Self, DecodeError> {
        Ok(Self {
            fate: Fate::decode(decoder)?,
            output: Vec::decode(decoder)?,
            artifacts: list(decoder, ARTIFACTS_MAX as usize)?,
            logs: list(decoder, (LOG_BYTES_MAX / LOG_RECORD_OVERHEAD_BYTES) as usize)?,
            calls: list(decoder, CALLS_MAX as usize)?,
            vm_exits: u64::decode(decoder)?,
            timing: Timing::decode(decoder)?,
        })
    }
}

impl_borrow_decode!(Report);

/// What a report has beside what the run left: how it ended, with a guest's last words,
/// in bytes.
const REPORT_OVERHEAD_BYTES: u32 = 16 * MESSAGE_OVERHEAD_BYTES;

impl Report {
    /// The largest report of a run with these limits, in bytes. It bounds what is
    /// kept of a worker's claims before they are read.
    #[must_use]
    pub fn payload_bytes_max(limits: &RunLimits) -> u32 {
        let artifact = limits.artifact_bytes.saturating_add(MESSAGE_OVERHEAD_BYTES);
        let most = limits
            .output_bytes
            .saturating_add(limits.artifacts.saturating_mul(artifact))
            .saturating_add(limits.log_bytes.saturating_mul(2))
            .saturating_add(limits.calls.saturating_mul(512))
            .saturating_add(REPORT_OVERHEAD_BYTES);
        most.min(Kind::Report.payload_bytes_max())
    }

    /// Holds it to what the guest was held to, and its fate to what a worker can know: one
    /// that lets more through is no longer ours. What passes can be told as it is.
    ///
    /// # Errors
    /// [`Implausible`]: the first that it passes, or the failure that is not its to tell.
    pub fn check(&self, limits: &RunLimits) -> Result<(), Implausible> {
        if let Fate::Vm(VmFailure { kind, .. }) = &self.fate
            && !kind.is_of_a_worker()
        {
            return Err(Implausible::Failure(*kind));
        }
        self.within(limits).map_err(Implausible::Over)
    }

    fn within(&self, limits: &RunLimits) -> Result<(), OverLimit> {
        let mut tally = Tally::default();
        tally.output(&self.output, limits)?;
        self.artifacts.iter().try_for_each(|artifact| tally.artifact(artifact, limits))?;
        self.logs.iter().try_for_each(|log| tally.log(log, limits))?;
        self.calls.iter().try_for_each(|_| tally.call(limits))?;
        match &self.fate {
            Fate::Ended(ended) => ended.check(),
            Fate::Deadline => Ok(()),
            Fate::Vm(failure) => {
                within("last words", failure.message.len() as u64, REPORT_OVERHEAD_BYTES.into())
            }
        }
    }
}

/// What no report of ours says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Implausible {
    /// The run left more than it may.
    Over(OverLimit),
    /// A failure that only whoever waits for the report can find.
    Failure(VmFailureKind),
}

impl core::fmt::Display for Implausible {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Over(over) => over.fmt(f),
            Self::Failure(kind) => write!(f, "a report of {kind:?}"),
        }
    }
}

impl core::error::Error for Implausible {}

/// How the run ended, as the worker saw it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Fate {
    /// The guest reported an end.
    Ended(Ended),
    /// The deadline came first.
    Deadline,
    /// The guest died, misbehaved or could not be started.
    Vm(VmFailure),
}

/// How a VM failed. None of these is the program's doing.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct VmFailure {
    /// The kind of failure, for programs.
    pub kind: VmFailureKind,
    /// What happened, for a reader.
    pub message: String,
}

impl VmFailure {
    /// This failure, and what happened for a reader.
    #[must_use]
    pub fn new(kind: VmFailureKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }
}

/// The kinds of VM failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum VmFailureKind {
    /// The guest kernel or guest-init faulted or panicked.
    Crash,
    /// The guest broke the protocol or the device's rules.
    Misbehaved,
    /// The VM stopped in a way that tells no more: shutdown, internal error.
    Stopped,
    /// This host cannot run the VM.
    Unavailable,
    /// The link to the broker was lost.
    BrokerLost,
    /// Nobody wants the run any more.
    Cancelled,
    /// The worker ended without a report.
    WorkerLost,
    /// The worker tried what its jail forbids: somebody else has taken it
    /// over.
    WorkerBroke,
    /// The host's own code has a bug.
    Internal,
    /// A reset left something behind, as its proof found.
    NotReset,
    /// A run changed more than a reset puts back, as it may: its VM is let go.
    TooChanged,
}

impl VmFailureKind {
    /// Whether the report of a run can say so. The others its supervisor finds, or are
    /// said of what comes before a run.
    const fn is_of_a_worker(self) -> bool {
        match self {
            Self::Crash
            | Self::Misbehaved
            | Self::Stopped
            | Self::Unavailable
            | Self::BrokerLost
            | Self::Internal => true,
            Self::Cancelled
            | Self::WorkerLost
            | Self::WorkerBroke
            | Self::NotReset
            | Self::TooChanged => false,
        }
    }
}

/// Where a worker's time went, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct Timing {
    /// Making the VM: KVM objects, memory, image.
    pub vm_ns: u64,
    /// What the guest did before a run came: its boot, or its warming up, and
    /// the program that it was prepared with.
    pub boot_ns: u64,
    /// From the program's delivery to its first instruction.
    pub load_ns: u64,
    /// From there to its end.
    pub run_ns: u64,
    /// When each step of the run and of its worker's life happened.
    pub at: Moments,
}

/// When what happened in a worker, in nanoseconds of the host's monotonic
/// clock; 0 for what did not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct Moments {
    /// When the worker began.
    pub forked: u64,
    /// When its VM was made.
    pub made: u64,
    /// When its guest stood ready.
    pub ready: u64,
    /// When it had closed itself in.
    pub jailed: u64,
    /// When the run arrived.
    pub arrived: u64,
    /// When the guest was let go.
    pub begun: u64,
    /// When the run was over.
    pub ended: u64,
}

/// What keeps a program from the host it runs on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub enum Tier {
    /// A virtual machine, in a jailed process.
    #[default]
    Vm,
    /// The jailed process alone.
    Process,
}

impl Tier {
    /// Its stable name, in reports and configurations.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Vm => "vm",
            Self::Process => "process",
        }
    }
}

/// What a zygote is told first: what goes into every guest it makes, and what
/// its guests are in.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ZygoteSetup {
    /// What its guests are in.
    pub tier: Tier,
    /// The keys that guests trust programs by.
    pub trust: Vec<[u8; 32]>,
}

/// An order to a zygote: fork a worker. Its socket rides along.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Fork {
    /// How much RAM its guest has, in bytes.
    pub ram_bytes: u64,
    /// How much of its memory the guest touches before it stands ready, in
    /// bytes from the start of its stack; 0 where a run waits already.
    pub touch_bytes: u32,
    /// How it goes on after a run.
    pub reuse: Reuse,
}

/// What a worker does with its VM after a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub enum Reuse {
    /// It is destroyed, and the worker ends.
    #[default]
    Fresh,
    /// It is put back to where it stood before the run.
    Reset {
        /// Of so many resets one is compared with the base, page by page; 0
        /// for none.
        prove_one_in: u32,
    },
}

/// What a zygote found of its jail, as the kernel answered. It entered all of
/// it, or it would not be ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Jailed {
    /// It has a procfs of its own, by which a worker finds the pages that a
    /// run wrote.
    pub procfs: bool,
    /// The version of Landlock that is enforced. Absent: none.
    pub landlock_abi: Option<i32>,
}

/// A zygote's answer to its setup.
pub type ZygoteReady = Result<Jailed, VmFailure>;

/// A zygote's answer to each [`Fork`]; with a forked worker its process
/// descriptor rides along.
pub type Zygoted = Result<(), VmFailure>;

/// A worker's word that its VM stands ready: first of all, and after a
/// [`Prepare`]. Later only as an error: why its VM could not be put back.
pub type Ready = Result<Timing, VmFailure>;

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    use crate::codec::{self, CodecError};
    use crate::ending::{Ending, RejectKind, TrapKind};
    use crate::limits::{
        ARTIFACT_NAME_BYTES_MAX, LOG_LEVEL_MAX, LOG_RECORD_BYTES_MAX, REASON_BYTES_MAX,
    };
    use crate::name::ToolName;
    use crate::run::CallSettled;

    fn report(fate: Fate) -> Report {
        Report {
            fate,
            output: Vec::new(),
            artifacts: Vec::new(),
            logs: Vec::new(),
            calls: Vec::new(),
            vm_exits: 0,
            timing: Timing::default(),
        }
    }

    fn ended(ending: Ending) -> Fate {
        let (fuel_used, memory_peak_bytes, logs_dropped) = (1, 2, 3);
        let (load_ticks, run_ticks) = (4, 5);
        let ended =
            Ended { ending, fuel_used, memory_peak_bytes, logs_dropped, load_ticks, run_ticks };
        Fate::Ended(ended)
    }

    /// What a report passes.
    fn passed(report: &Report) -> Option<&'static str> {
        match report.check(&RunLimits::operator_maxima()) {
            Err(Implausible::Over(over)) => Some(over.what),
            Err(Implausible::Failure(_)) => Some("failure"),
            Ok(()) => None,
        }
    }

    fn encoded(report: &Report) -> Vec<u8> {
        let mut bytes = Vec::new();
        codec::encode_into(report, &mut bytes);
        bytes
    }

    /// All the calls and log records that any run may have.
    #[test]
    fn a_report_with_all_that_a_run_may_leave_decodes() {
        let maxima = RunLimits::operator_maxima();
        let tool = alloc::format!("a.{}", "a".repeat(crate::limits::TOOL_NAME_BYTES_MAX - 2));
        let settled = Some(CallSettled { code: None, duration_ns: u64::MAX, redacted: false });
        let calls = (0..maxima.calls).map(|id| CallRecord {
            id,
            tool: ToolName::parse(&tool).unwrap(),
            begun_ns: u64::MAX,
            settled,
        });
        let empty = Log { level: 0, text: String::new() };
        let artifact = || Artifact {
            name: "a".into(),
            media_type: "a".into(),
            content: vec![7; maxima.artifact_bytes as usize],
        };
        for artifacts in [0, maxima.artifacts] {
            let most = Report {
                artifacts: core::iter::repeat_with(artifact).take(artifacts as usize).collect(),
                logs: vec![empty.clone(); (maxima.log_bytes / LOG_RECORD_OVERHEAD_BYTES) as usize],
                calls: calls.clone().collect(),
                ..report(Fate::Deadline)
            };
            assert_eq!(passed(&most), None);
            let decoded: Report = codec::decode(&encoded(&most)).unwrap();
            assert!(decoded == most);
        }
    }

    /// As a worker that was taken over may send it: of small records, each of which is
    /// some blocks of memory.
    #[test]
    fn a_report_of_more_records_than_any_run_has_does_not_decode() {
        let logs = |records: u32| {
            let empty = Log { level: 0, text: String::new() };
            Report { logs: vec![empty; records as usize], ..report(Fate::Deadline) }
        };
        let artifacts = |artifacts: u32| {
            let [name, media_type] = ["a".into(), "a".into()];
            let artifact = Artifact { name, media_type, content: vec![1] };
            Report { artifacts: vec![artifact; artifacts as usize], ..report(Fate::Deadline) }
        };
        let calls = |calls: u32| {
            let tool = ToolName::parse("a.b").unwrap();
            let call = CallRecord { id: 0, tool, begun_ns: 0, settled: None };
            Report { calls: vec![call; calls as usize], ..report(Fate::Deadline) }
        };
        let most: [(&dyn Fn(u32) -> Report, u32); 3] = [
            (&logs, LOG_BYTES_MAX / LOG_RECORD_OVERHEAD_BYTES),
            (&artifacts, ARTIFACTS_MAX),
            (&calls, CALLS_MAX),
        ];
        for (of, most) in most {
            assert!(codec::decode::<Report>(&encoded(&of(most))) == Ok(of(most)));
            let more = codec::decode::<Report>(&encoded(&of(most + 1)));
            assert_eq!(more, Err(CodecError::Malformed));
        }
    }

    #[test]
    fn a_report_cannot_hold_what_no_guest_could_have_sent() {
        let text = |bytes: usize| "a".repeat(bytes);
        let trap = |detail| report(ended(Ending::Trap { kind: TrapKind::Other, detail }));
        assert_eq!(passed(&trap(text(REASON_BYTES_MAX))), None);
        assert_eq!(passed(&trap(text(REASON_BYTES_MAX + 1))), Some("reason_bytes"));
        let rejected = Ending::Rejected { kind: RejectKind::Invalid, detail: text(1 << 20) };
        assert_eq!(passed(&report(ended(rejected))), Some("reason_bytes"));

        let log =
            |level, text| Report { logs: vec![Log { level, text }], ..report(Fate::Deadline) };
        let longest = LOG_RECORD_BYTES_MAX as usize;
        assert_eq!(passed(&log(LOG_LEVEL_MAX, text(longest))), None);
        assert_eq!(passed(&log(LOG_LEVEL_MAX + 1, text(1))), Some("log_level"));
        assert_eq!(passed(&log(0, text(longest + 1))), Some("log_record_bytes"));

        let artifact = |name, media_type| {
            let artifact = Artifact { name, media_type, content: Vec::new() };
            Report { artifacts: vec![artifact], ..report(Fate::Deadline) }
        };
        let longest = ARTIFACT_NAME_BYTES_MAX as usize;
        assert_eq!(passed(&artifact(text(longest), text(longest))), None);
        for long in [artifact(text(longest + 1), text(1)), artifact(text(1), text(longest + 1))] {
            assert_eq!(passed(&long), Some("artifact_name_bytes"));
        }
    }

    #[test]
    fn no_report_says_what_only_its_supervisor_can_find() {
        use VmFailureKind as Of;
        let told = |kind| passed(&report(Fate::Vm(VmFailure::new(kind, "")))).is_none();
        let plausible =
            [Of::Crash, Of::Misbehaved, Of::Stopped, Of::Unavailable, Of::BrokerLost, Of::Internal];
        assert!(plausible.into_iter().all(told));
        let others = [Of::Cancelled, Of::WorkerLost, Of::WorkerBroke, Of::NotReset, Of::TooChanged];
        assert!(!others.into_iter().any(told));
    }
}
