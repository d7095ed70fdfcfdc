//! The Rust client of a forge-vmm service: submits signed programs, hears of
//! what they do, cancels them, asks for tools and grants.
//!
//! [`blocking::Client`] carries one run at a time and needs no runtime;
//! [`Client`] carries any number at once on one connection, under tokio. Both
//! speak the client link of `docs/protocol.md`, whose messages are
//! [`forge_protocol::service`].
//!
//! A service is no stranger, but what a run leaves (output, log, artifacts,
//! reasons) is the program's and its tools' word, untrusted.

#![cfg_attr(test, allow(clippy::unwrap_used))]
#![forbid(unsafe_code)]

pub mod blocking;
#[cfg(feature = "async")]
mod connection;
#[cfg(feature = "async")]
mod socket;
mod wire;

#[cfg(feature = "async")]
pub use connection::{Canceller, Client, Run, RunMessage};
pub use forge_protocol as protocol;

use std::io;

use forge_protocol::broker::RefusalKind;
use forge_protocol::handshake::HandshakeError;

/// As a stream of the one type that both clients have: it is read, written,
/// polled and shut down, which is the same for every stream socket.
#[cfg(feature = "vsock")]
fn connect_vsock(cid: u32, port: u32) -> io::Result<std::os::unix::net::UnixStream> {
    let stream = vsock::VsockStream::connect_with_cid_port(cid, port)?;
    Ok(std::os::fd::OwnedFd::from(stream).into())
}

fn lost(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            format!("no service listens there ({error}): start one with forge-vmm serve")
        }
        io::ErrorKind::PermissionDenied => format!(
            "this user may not connect to the service ({error}): forge.toml, [service] mode, and \
             uids in [principals.<name>]"
        ),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
            format!("the service gave no answer in time ({error}): it is stopped or overloaded")
        }
        _ => format!("the service is not there: {error}"),
    }
}

/// Why a service gave no answer, or no good one.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// It cannot be reached, or is gone.
    #[error("{}", lost(.0))]
    Connection(#[from] io::Error),
    /// It went away with a run that was submitted. Whoever submits it again may have done
    /// twice what it did.
    #[error(
        "the service went away with the run ({0}): whether it had begun is not known, and its \
         calls may have happened; `forge-vmm journal list` has them"
    )]
    Lost(io::Error),
    /// Another release answers.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// What it said is not what a service says.
    #[error("the service broke the protocol: {0}")]
    Protocol(String),
    /// It refused the question.
    #[error("{message}")]
    Refused {
        /// The kind of refusal.
        kind: RefusalKind,
        /// What happened, and what to do.
        message: String,
    },
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_socket_where_nobody_is_let_in_is_waited_for_in_bounds_and_told_from_a_dead_one() {
        let path = std::env::temp_dir().join(format!("forge-full-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        // With room for as few as can be: descriptors may be few as well.
        rustix::net::listen(&listener, 1).unwrap();
        let mut waiting: Vec<UnixStream> = Vec::new();
        let patience = Duration::from_millis(50);
        let began = Instant::now();
        let full = loop {
            match blocking::reach(&path, patience) {
                Ok(socket) => waiting.push(socket),
                Err(error) => break error,
            }
        };
        assert!(began.elapsed() < Duration::from_secs(20), "it waited for ever");
        assert!(ClientError::from(full).to_string().contains("stopped or overloaded"));
        drop(listener);
        let dead = blocking::reach(&path, patience).unwrap_err();
        assert!(ClientError::from(dead).to_string().contains("no service listens there"));
        let _ = std::fs::remove_file(&path);
    }
}
