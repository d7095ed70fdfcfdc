//! The service: runs for clients of other processes, over a unix socket.
//!
//! A connection carries one run at a time, in the frames of
//! `forge_protocol::service`; a client that wants several opens several. The
//! socket belongs to the operator (mode 0600), and whoever can open it may
//! name any principal. A client that leaves cancels its run.
//!
//! | module | what it holds |
//! |---|---|
//! | [`server`] | the socket, and a thread for each connection |
//!
//! The other end is the crate `forge-client`.

pub mod server;

pub use server::{Server, serve_connection};

use std::io;

use forge_protocol::codec::{self, BorrowDecode};
use forge_protocol::frame::{self, Frame, Kind};
use forge_protocol::handshake::{Hello, Refusal, Role};

use crate::link::{Link, Patience};

fn invalid(what: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

fn decode<T: for<'a> BorrowDecode<'a, ()>>(frame: &Frame) -> io::Result<T> {
    codec::decode(&frame.payload).map_err(invalid)
}

fn send<T: codec::Encode>(link: &mut Link, kind: Kind, message: &T) -> io::Result<()> {
    let mut bytes = Vec::new();
    frame::write_message(kind, message, &mut bytes);
    link.send(&bytes, None, Patience::default())
}

/// Says hello and hears it.
fn greet(link: &mut Link, as_whom: Role, whom: Role, patience: Patience<'_>) -> io::Result<()> {
    let ours = Hello::ours(as_whom);
    send(link, Kind::Hello, &ours)?;
    let frame = link.receive(|kind| matches!(kind, Kind::Hello | Kind::Refuse), patience)?;
    let theirs: Hello = match frame.kind {
        Kind::Refuse => decode::<Refusal>(&frame)?.0,
        _ => decode(&frame)?,
    };
    match ours.agree(theirs, whom) {
        Ok(_) => Ok(()),
        Err(error) => {
            let _ = send(link, Kind::Refuse, &Refusal(ours));
            Err(invalid(error))
        }
    }
}
