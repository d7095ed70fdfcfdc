//! What the journal keeps: one record for each thing that happened.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use forge_protocol::RunId;
use forge_protocol::abi::CallCode;
use forge_protocol::name::ToolName;

use crate::definition::Effect;

/// One record. The journal numbers them in the order in which they are
/// appended.
#[derive(Clone, Debug)]
pub struct Record {
    /// The run.
    pub run: RunId,
    /// Whose run it is.
    pub principal: Arc<str>,
    /// When, in microseconds since the Unix epoch, by the host's clock.
    pub at_us: u64,
    /// What happened.
    pub event: Event,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A run made its first call. Runs that make none leave no record.
    Opened {
        /// The signed hash of its program.
        program_sha256: [u8; 32],
    },
    /// A call passed every check and is about to be dispatched.
    Intent(CallFacts),
    /// A call was refused, and its server saw nothing of it. Where an intent
    /// of the call stands before, it was not dispatched after all.
    Refusal {
        /// The call.
        call: CallFacts,
        /// Why, as the program saw it.
        code: CallCode,
    },
    /// What became of a dispatched call.
    Outcome {
        /// Its number in the run.
        call: u32,
        /// `None` for a response. [`CallCode::OutcomeUnknown`] says that
        /// nobody knows: it may have happened.
        code: Option<CallCode>,
        /// From the call's arrival to its end, in microseconds.
        took_us: u64,
        /// What left for the program, in bytes.
        response_bytes: u64,
        /// Whether a credential was taken out of it.
        redacted: bool,
    },
    /// A broker died between the intent and the outcome: written by the next
    /// one that opens the journal. The call may have happened, and nothing
    /// here ever repeats it.
    Unknown {
        /// Its number in the run.
        call: u32,
    },
    /// A run's link was closed: nothing more of it is dispatched.
    Closed {
        /// How.
        how: Close,
    },
}

/// What is kept of a call before it is dispatched or refused.
#[derive(Clone, Debug)]
pub struct CallFacts {
    /// Its number in the run.
    pub call: u32,
    /// The tool.
    pub tool: ToolName,
    /// The definition that the grant names; `None` if it names no such tool.
    pub definition_sha256: Option<[u8; 32]>,
    /// What the operator says it does; `None` if it was refused before that
    /// was looked up.
    pub effect: Option<Effect>,
    /// SHA-256 of the request's bytes as the program sent them; `None` if it
    /// was refused before they were read.
    pub arguments_sha256: Option<[u8; 32]>,
    /// Whether the run's caller carries it out itself: what it did is the
    /// caller's to know, and the caller's word is all there is of it.
    pub held_by_caller: bool,
}

/// How a run's link ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// The worker or the supervisor closed it, or the broker shut down.
    Closed,
    /// The worker broke the protocol.
    Dropped,
    /// The broker died before it; written by the next one.
    Lost,
}

impl Close {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Dropped => "dropped",
            Self::Lost => "lost",
        }
    }
}

impl Record {
    /// A record of this moment.
    #[must_use]
    pub fn now(run: RunId, principal: Arc<str>, event: Event) -> Self {
        Self { run, principal, at_us: now_us(), event }
    }
}

/// Microseconds since the Unix epoch.
pub(super) fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
