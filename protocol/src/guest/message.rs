//! The messages of this link alone, and how a frame is read as one of them. A log
//! record and an artifact are of every link: see [`crate::run`].

use alloc::vec::Vec;

use super::error::{Misbehaviour, SessionError};
use crate::abi::CallCode;
use crate::codec::{self, BorrowDecode, Decode, Encode};
use crate::ending::Ending;
use crate::frame::Frame;
use crate::limits::{OverLimit, REASON_BYTES_MAX, RunLimits, within};
use crate::name::ToolName;
use crate::run::RunId;

/// What loading a program goes by: nothing that differs from run to run.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Load {
    /// What each run of the program may use.
    pub limits: RunLimits,
    /// The guest says [`Kind::Loaded`](crate::frame::Kind::Loaded) and waits for
    /// [`Start`]. Without it `Start` may come at once, and nothing is said.
    pub announce: bool,
}

/// Everything a run needs beside its program, its limits and its input.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Start {
    /// Which run this is; for the guest a label, nothing more.
    pub run_id: RunId,
    /// Seeds the program's random numbers.
    pub seed: [u8; 32],
    /// Where virtual time starts, in nanoseconds since the Unix epoch.
    pub start_unix_ns: u64,
    /// The tools the program may import.
    pub granted: Vec<ToolName>,
}

/// One tool call.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Call {
    /// Counts from 0 within the run.
    pub id: u32,
    /// The guest does nothing until this call settles. A hint for whoever
    /// decides when the guest runs on.
    pub waits: bool,
    /// Which tool.
    pub tool: ToolName,
    /// Its arguments, as the program wrote them: JSON if it did well.
    pub request: Vec<u8>,
}

/// The answer to one [`Call`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Settled {
    /// The number of the call that is answered.
    pub id: u32,
    /// `None`: the tool answered, and `body` is its response. `Some`: it did
    /// not, and `body` may say why.
    pub code: Option<CallCode>,
    /// How long the call took, in nanoseconds, as journalled: what virtual
    /// time advances by.
    pub duration_ns: u64,
    /// The response or the reason, JSON.
    pub body: Vec<u8>,
    /// Whether the broker removed credentials from the body.
    pub redacted: bool,
}

/// The end of a run, as the guest saw it: claims all.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Ended {
    /// How the program ended.
    pub ending: Ending,
    /// Fuel it used.
    pub fuel_used: u64,
    /// The most linear memory it had, in bytes.
    pub memory_peak_bytes: u64,
    /// Log records that did not fit.
    pub logs_dropped: u64,
    /// Time-stamp-counter ticks from the program's arrival to its first
    /// instruction.
    pub load_ticks: u64,
    /// Ticks from there to its end.
    pub run_ticks: u64,
}

impl Ended {
    /// Holds what explains the end to the bound that a guest cuts it to.
    ///
    /// # Errors
    /// [`OverLimit`].
    pub fn check(&self) -> Result<(), OverLimit> {
        match &self.ending {
            Ending::Trap { detail, .. } | Ending::Rejected { detail, .. } => {
                within("reason_bytes", detail.len() as u64, REASON_BYTES_MAX as u64)
            }
            Ending::Returned(_) | Ending::Limit { .. } => Ok(()),
        }
    }
}

/// Decodes a frame's payload as the message of its kind.
pub(super) fn read<'a, T: BorrowDecode<'a, ()>>(frame: &'a Frame) -> Result<T, SessionError> {
    codec::decode(&frame.payload)
        .map_err(|error| SessionError::Peer(Misbehaviour::Payload { kind: frame.kind, error }))
}
