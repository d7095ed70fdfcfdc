//! What a service manager says and wants to hear: sockets that are open
//! already (`sd_listen_fds(3)`) and how the service stands (`sd_notify(3)`).
//! Both are protocols of a few words, and there is nothing to do for who is
//! started otherwise.

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::trace::now_ns;

/// The first descriptor that is passed.
const LISTEN_FDS_START: RawFd = 3;

/// How a service stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    Ready,
    Reloading,
    /// It is at its end within this time.
    Stopping(Duration),
}

/// Tells the manager, if there is one.
pub(super) fn notify(standing: Standing) {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let words = words(standing, now_ns());
    let told = address(name.as_bytes()).and_then(|address| {
        UnixDatagram::unbound()?.send_to_addr(words.as_bytes(), &address).map(|_| ())
    });
    if let Err(error) = told {
        tracing::warn!(%error, "the service manager was not told: {words:?}");
    }
}

fn words(standing: Standing, monotonic_ns: u64) -> String {
    match standing {
        Standing::Ready => "READY=1".into(),
        Standing::Reloading => format!("RELOADING=1\nMONOTONIC_USEC={}", monotonic_ns / 1000),
        // Without, the manager kills what takes longer than its unit says.
        Standing::Stopping(within) => {
            format!("STOPPING=1\nEXTEND_TIMEOUT_USEC={}", within.as_micros())
        }
    }
}

fn address(name: &[u8]) -> io::Result<SocketAddr> {
    match name {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        path => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(path)),
    }
}

/// The listening socket that the manager passed, if it passed one, and its path. To be
/// called once, before any process is started.
///
/// # Errors
/// If what it passed is not one listening unix socket with a path.
pub fn passed_listener() -> io::Result<Option<(UnixListener, PathBuf)>> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    if number("LISTEN_PID") != Some(std::process::id()) {
        return Ok(None);
    }
    match number("LISTEN_FDS") {
        None | Some(0) => Ok(None),
        Some(1) => {
            let fd = LISTEN_FDS_START;
            let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what.to_owned());
            let asked = [
                (libc::SO_DOMAIN, libc::AF_UNIX),
                (libc::SO_TYPE, libc::SOCK_STREAM),
                (libc::SO_ACCEPTCONN, 1),
            ];
            for (option, expected) in asked {
                if socket_option(fd, option)? != expected {
                    return Err(wrong(
                        "descriptor 3, which was passed, listens at no unix socket for streams: \
                         give ListenStream= a path",
                    ));
                }
            }
            // No process that is started may have it.
            // SAFETY: sets a flag of a descriptor that is a socket, as the
            // kernel has just said.
            if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: it was passed to this process, and this is called once.
            let listener = UnixListener::from(unsafe { OwnedFd::from_raw_fd(fd) });
            // Who may connect is said by a file's mode.
            let path = listener.local_addr()?.as_pathname().map(Path::to_path_buf);
            let path = path.ok_or_else(|| wrong("it has no path: give ListenStream= one"))?;
            Ok(Some((listener, path)))
        }
        Some(more) => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{more} sockets were passed: the service listens at one"),
        )),
    }
}

fn socket_option(fd: RawFd, option: libc::c_int) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut bytes = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most so many bytes there.
    let got = unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, option, (&raw mut value).cast(), &raw mut bytes)
    };
    if got == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manager_is_told_in_its_own_words() {
        assert_eq!(words(Standing::Ready, 0), "READY=1");
        let stopping = words(Standing::Stopping(Duration::from_millis(2)), 0);
        assert_eq!(stopping, "STOPPING=1\nEXTEND_TIMEOUT_USEC=2000");
        assert_eq!(words(Standing::Reloading, 5_000), "RELOADING=1\nMONOTONIC_USEC=5");
        assert!(address(b"@name").unwrap().as_abstract_name().is_some());
        assert!(address(b"/run/x").unwrap().as_pathname().is_some());
    }
}
