//! Who comes to the service, and by which socket: the only place that knows
//! the two kinds apart. Further in, a connection is a stream of bytes and a
//! [`Peer`].
//!
//! Deliberately absent: AF_VSOCK sockets that somebody else made. A stream is
//! taken for one only where this module accepted it, so that the CID is the
//! kernel's word.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use super::options::Principals;
use super::peer::Peer;

/// Where a service listens on AF_VSOCK (vsock(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VsockAddress {
    /// This host's CID, or `None` for all that it has.
    pub cid: Option<u32>,
    /// The port.
    pub port: u32,
}

impl fmt::Display for VsockAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.cid {
            Some(cid) => write!(f, "vsock:{cid}:{}", self.port),
            None => write!(f, "vsock port {}", self.port),
        }
    }
}

/// A listening AF_VSOCK socket.
#[derive(Debug)]
pub struct VsockListener(::vsock::VsockListener);

impl VsockListener {
    /// Listens there.
    ///
    /// # Errors
    /// What the kernel said, with what to do about it.
    pub fn bind(at: VsockAddress) -> io::Result<Self> {
        let cid = at.cid.unwrap_or(::vsock::VMADDR_CID_ANY);
        let bound = ::vsock::VsockListener::bind_with_cid_port(cid, at.port)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| Self(listener)));
        bound.map_err(|error| {
            let hint = match error.raw_os_error() {
                Some(libc::EADDRINUSE) => "somebody listens there: another [service.vsock] port",
                Some(libc::EADDRNOTAVAIL) => {
                    "no CID of this host: leave [service.vsock] cid out, or load its transport"
                }
                Some(libc::EACCES) => "ports below 1024 need CAP_NET_BIND_SERVICE",
                Some(libc::EAFNOSUPPORT) => {
                    "no AF_VSOCK here: modprobe vsock, and see RestrictAddressFamilies of the unit"
                }
                _ => return error,
            };
            io::Error::new(error.kind(), format!("{error}; {hint}"))
        })
    }

    /// Whether a machine of this host could connect, or the host itself. Anybody may
    /// listen at all CIDs that a host has, also where it has none.
    #[must_use]
    pub fn has_machines() -> bool {
        let has = |cid| ::vsock::VsockListener::bind_with_cid_port(cid, libc::VMADDR_PORT_ANY);
        [::vsock::VMADDR_CID_HOST, ::vsock::VMADDR_CID_LOCAL]
            .into_iter()
            .any(|cid| has(cid).is_ok())
    }

    /// The next that waits at it.
    pub(super) fn accept(&self) -> io::Result<Arrival> {
        let (stream, address) = self.0.accept()?;
        Ok(Arrival(Way::Vsock { stream, cid: address.cid() }))
    }
}

impl AsRawFd for VsockListener {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Somebody who has just connected.
#[derive(Debug)]
pub(super) struct Arrival(Way);

#[derive(Debug)]
enum Way {
    Unix(UnixStream),
    Vsock { stream: ::vsock::VsockStream, cid: u32 },
}

impl Arrival {
    /// By a unix socket.
    pub(super) fn unix(socket: UnixStream) -> Self {
        Self(Way::Unix(socket))
    }

    /// Who it is.
    ///
    /// # Errors
    /// What the kernel said.
    pub(super) fn peer(&self, principals: &Principals) -> io::Result<Peer> {
        match &self.0 {
            Way::Unix(socket) => Peer::of_user(socket, principals),
            Way::Vsock { cid, .. } => Ok(Peer::of_machine(*cid, principals)),
        }
    }

    /// The stream of bytes. What is done with it from here on (read, write,
    /// poll, shut down, time-outs) is the same for every stream socket.
    pub(super) fn into_stream(self) -> UnixStream {
        match self.0 {
            Way::Unix(socket) => socket,
            Way::Vsock { stream, .. } => UnixStream::from(OwnedFd::from(stream)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_in_use_is_said_with_what_to_do() {
        // Far from what anybody configures; as many processes test at once.
        let port = 0x4000_0000 + std::process::id();
        let at = VsockAddress { cid: None, port };
        let first = match VsockListener::bind(at) {
            Ok(listener) => listener,
            Err(error) if error.raw_os_error().is_none() => {
                eprintln!("SKIPPED: {error}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let error = VsockListener::bind(at).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(error.to_string().contains("another [service.vsock] port"), "{error}");
        // Nobody waits, and it does not wait for anybody.
        assert_eq!(first.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(first);
        VsockListener::bind(at).unwrap();
    }
}
