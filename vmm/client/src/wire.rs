//! What both clients share: the greeting, how messages become bytes, and how
//! bytes become frames.

use std::io;
use std::time::Duration;

use forge_protocol::broker::RefusalKind;
use forge_protocol::codec::{self, BorrowDecode, Encode};
use forge_protocol::frame::{self, Frame, Incoming, Kind};
use forge_protocol::handshake::{Hello, Refusal, Role};
use forge_protocol::parts::OutOfPlace;

use crate::ClientError;

/// How long a service may take to say hello.
pub(crate) const GREETING_TIME_MAX: Duration = Duration::from_secs(10);
/// What is read from a socket at once, in bytes.
const READ_BYTES: usize = 64 * 1024;

/// One message as it goes on the wire.
pub(crate) fn message<T: Encode>(kind: Kind, message: &T) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::write_message(kind, message, &mut bytes);
    bytes
}

/// The same of a message whose size others chose.
///
/// # Errors
/// [`ClientError::Refused`]: the service would end the connection over it.
pub(crate) fn bounded<T: Encode>(kind: Kind, message: &T) -> Result<Vec<u8>, ClientError> {
    let mut bytes = Vec::new();
    match frame::try_write_message(kind, message, &mut bytes) {
        Ok(()) => Ok(bytes),
        Err(error) => {
            let message = format!("more than a service takes: {error}");
            Err(ClientError::Refused { kind: RefusalKind::BadRequest, message })
        }
    }
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
    let comes = [Kind::Event, Kind::Callback, Kind::Part, Kind::Finished, Kind::Answered];
    comes.contains(&kind).then(|| kind.payload_bytes_max())
}

/// What a run left is not what its end says.
pub(crate) fn misplaced(out_of_place: OutOfPlace) -> ClientError {
    ClientError::Protocol(out_of_place.to_string())
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

/// What is read and is no frame yet.
pub(crate) fn incoming() -> Incoming {
    Incoming::new(READ_BYTES)
}

/// The next frame, if it is there to its end.
pub(crate) fn next(
    incoming: &mut Incoming,
    awaits: impl Fn(Kind) -> Option<u32>,
) -> Result<Option<Frame>, ClientError> {
    incoming.next(awaits).map_err(|error| ClientError::Protocol(error.to_string()))
}

/// So many bytes were read. None are the end of the connection.
pub(crate) fn filled(incoming: &mut Incoming, bytes: usize) -> io::Result<()> {
    if bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    incoming.filled(bytes);
    Ok(())
}
