//! What both clients share: the greeting, and how messages become bytes.

use forge_protocol::codec::{self, BorrowDecode, Encode};
use forge_protocol::frame::{self, Frame, Kind};
use forge_protocol::handshake::{Hello, Refusal, Role};

use crate::ClientError;

/// What is read from a socket at once, in bytes.
pub(crate) const READ_BYTES: usize = 64 * 1024;

/// One message as it goes on the wire.
pub(crate) fn message<T: Encode>(kind: Kind, message: &T) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::write_message(kind, message, &mut bytes);
    bytes
}

pub(crate) fn decode<T: for<'a> BorrowDecode<'a, ()>>(frame: &Frame) -> Result<T, ClientError> {
    codec::decode(&frame.payload)
        .map_err(|error| ClientError::Protocol(format!("in a {:?} frame {error}", frame.kind)))
}

/// This side's first message.
pub(crate) fn hello() -> Vec<u8> {
    message(Kind::Hello, &Hello::ours(Role::Client))
}

/// The bound of a frame that may come first.
pub(crate) fn may_greet(kind: Kind) -> Option<u32> {
    matches!(kind, Kind::Hello | Kind::Refuse).then(|| kind.payload_bytes_max())
}

/// The bound of a frame that may come later.
pub(crate) fn may_come(kind: Kind) -> Option<u32> {
    matches!(kind, Kind::Event | Kind::Callback | Kind::Finished | Kind::Answered)
        .then(|| kind.payload_bytes_max())
}

/// What the service's first message says.
pub(crate) fn greeted(frame: &Frame) -> Result<(), ClientError> {
    let ours = Hello::ours(Role::Client);
    let theirs: Hello = match frame.kind {
        Kind::Refuse => decode::<Refusal>(frame)?.0,
        _ => decode(frame)?,
    };
    ours.agree(theirs, Role::Supervisor)?;
    Ok(())
}
