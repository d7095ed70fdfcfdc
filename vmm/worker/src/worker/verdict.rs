//! Why the host's side serves a guest no further, whatever the guest is in, and
//! what that makes of its run.

use forge_protocol::guest::{Ended, SessionError};
use forge_protocol::worker::{Fate, VmFailure, VmFailureKind};

use super::broker_link::LinkError;

/// Why the host's side serves a guest no further.
#[derive(Debug)]
pub enum Verdict {
    /// The guest waits for a program, or with one loaded for a run.
    Ready,
    /// The guest reported the end of its run.
    Ended(Ended),
    /// The guest panicked and left a message of this many bytes, it says.
    Panicked {
        /// The message's length, in bytes, as the guest says.
        message_bytes: u32,
    },
    /// The deadline passed while the host waited for the guest's sake.
    Stopped,
    /// The guest broke a rule.
    Misbehaved(String),
    /// The connection to the broker is gone.
    BrokerLost(String),
    /// This code has a bug.
    Internal(String),
}

impl From<SessionError> for Verdict {
    fn from(error: SessionError) -> Self {
        match error {
            SessionError::Handshake(_) | SessionError::Peer(_) => {
                Self::Misbehaved(error.to_string())
            }
            SessionError::Misuse(_) => Self::Internal(error.to_string()),
        }
    }
}

impl From<LinkError> for Verdict {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Stopped => Self::Stopped,
            LinkError::Lost(_) | LinkError::Protocol(_) => Self::BrokerLost(error.to_string()),
        }
    }
}

impl From<Verdict> for Fate {
    fn from(verdict: Verdict) -> Self {
        let (kind, message) = match verdict {
            Verdict::Ended(ended) => return Self::Ended(ended),
            Verdict::Stopped => return Self::Deadline,
            Verdict::Panicked { message_bytes } => {
                let message = format!("guest panic, with a message of {message_bytes} bytes");
                (VmFailureKind::Crash, message)
            }
            Verdict::Misbehaved(how) => (VmFailureKind::Misbehaved, how),
            Verdict::BrokerLost(how) => (VmFailureKind::BrokerLost, how),
            Verdict::Internal(how) => (VmFailureKind::Internal, how),
            Verdict::Ready => {
                let how = "the guest waits for a program in the middle of a run";
                (VmFailureKind::Misbehaved, how.into())
            }
        };
        Self::Vm(VmFailure::new(kind, message))
    }
}
