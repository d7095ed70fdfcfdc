//! Why a session ends early: what the peer did, or what did not fit.

use crate::codec::CodecError;
use crate::frame::{FrameError, Kind};
use crate::handshake::HandshakeError;
use crate::limits::OverLimit;

/// How a peer broke the protocol. Each of these ends the link, and a guest's
/// VM with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misbehaviour {
    /// Bytes that are no frame, or a frame out of turn.
    Frame(FrameError),
    /// A frame whose payload does not decode.
    Payload {
        /// The frame's kind.
        kind: Kind,
        /// What is wrong with it.
        error: CodecError,
    },
    /// More than the run's limits, which a sound peer keeps itself.
    Over(OverLimit),
    /// A call that does not carry the next number.
    CallOutOfOrder {
        /// The number that the call carries.
        got: u32,
        /// The number that was next.
        expected: u32,
    },
    /// An answer to a call that is not in flight.
    NotInFlight {
        /// The call's number.
        id: u32,
    },
}

/// Why a session ends early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionError {
    /// The two sides do not fit together.
    Handshake(HandshakeError),
    /// The peer broke the protocol.
    Peer(Misbehaviour),
    /// This side's own code called the session out of turn: our bug.
    Misuse(&'static str),
}

impl core::fmt::Display for Misbehaviour {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Frame(error) => write!(f, "{error}"),
            Self::Payload { kind, error } => write!(f, "in a {kind:?} frame {error}"),
            Self::Over(over) => write!(f, "{over}"),
            Self::CallOutOfOrder { got, expected } => {
                write!(f, "call {got} came where {expected} was next")
            }
            Self::NotInFlight { id } => write!(f, "call {id} settled and is not in flight"),
        }
    }
}

impl core::fmt::Display for SessionError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Handshake(error) => write!(f, "{error}"),
            Self::Peer(how) => write!(f, "the peer broke the protocol: {how}"),
            Self::Misuse(what) => write!(f, "bug: {what}"),
        }
    }
}

impl core::error::Error for SessionError {}

impl From<FrameError> for SessionError {
    fn from(error: FrameError) -> Self {
        Self::Peer(Misbehaviour::Frame(error))
    }
}

impl From<OverLimit> for SessionError {
    fn from(over: OverLimit) -> Self {
        Self::Peer(Misbehaviour::Over(over))
    }
}

impl From<HandshakeError> for SessionError {
    fn from(error: HandshakeError) -> Self {
        Self::Handshake(error)
    }
}
