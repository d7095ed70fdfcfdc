//! What this process does to itself before anything else, so that a
//! credential it reads later stays in it: no core dump, no debugger, no
//! `/proc/self/mem` for others, no descriptor that a tool server would
//! inherit, no new privileges and the [`filter`] on system
//! calls. The last two and the bound on core dumps hold for every tool server
//! as well.
//!
//! Not being dumpable is what keeps other processes of the same user away from
//! its memory, whether Yama restricts tracing or not. The `unsafe` here is three
//! calls that no safe interface offers. Deliberately
//! absent is what is done to tool servers: see [`crate::stranger`].

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::sync::Mutex;

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};

use crate::filter;

/// Makes the process non-dumpable, which keeps debuggers of the same user out
/// too; turns core dumps off; marks every descriptor above standard error
/// close-on-exec; has a write to a file that may grow no further fail, where it
/// would end the process under its calls; and puts the filter on. Call it first,
/// before any other thread runs.
///
/// # Errors
/// If the kernel refuses any of it. Close-on-exec for a range needs Linux
/// 5.11.
pub fn harden() -> io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    // Servers become dumpable again when they start; this they inherit.
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    // Servers are put back to the default by their launcher.
    // SAFETY: ignoring a signal needs no handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    filter::install(filter::Whose::Broker)?;
    // SAFETY: close_range with CLOSE_RANGE_CLOEXEC closes nothing and touches
    // no memory; it only sets a flag on descriptors that are open.
    let outcome = unsafe {
        libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int)
    };
    match outcome {
        0 => Ok(()),
        _ => {
            let error = io::Error::last_os_error();
            let text = format!("close_range, for which Linux has to be 5.11 or newer: {error}");
            Err(io::Error::new(error.kind(), text))
        }
    }
}

/// Starts so many threads, which are there at once, and ends them. Without enough of
/// them a runtime panics, or waits for one that never comes.
///
/// # Errors
/// The kernel's, of the first that cannot be started: `WouldBlock` where the user or
/// the control group has all the tasks that it may have.
pub fn try_threads(count: usize) -> io::Result<()> {
    let gate = Mutex::new(());
    std::thread::scope(|scope| {
        // None ends before all are there, or one cannot be.
        let _held = gate.lock();
        for _ in 0..count {
            std::thread::Builder::new().spawn_scoped(scope, || drop(gate.lock()))?;
        }
        Ok(())
    })
}

/// Takes over the descriptor that the parent left open for this process. Call
/// it once for each number, before anything else opens descriptors.
///
/// # Errors
/// `InvalidInput` for standard output and standard error, and the kernel's error if nothing
/// is open there.
pub fn adopt(number: RawFd) -> io::Result<OwnedFd> {
    // Standard input is a descriptor like any other: a supervisor without
    // unsafe code can pass a socket there and nowhere else.
    if number == libc::STDOUT_FILENO || number == libc::STDERR_FILENO {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a control link cannot be standard output or standard error",
        ));
    }
    // SAFETY: F_GETFD only reads a flag, and fails for numbers not open.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open (checked above), was left to us by the
    // parent, and by this function's contract nobody else in the process
    // knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd as _;

    #[test]
    fn a_hardened_process_is_not_dumpable_and_hands_no_descriptor_on() {
        let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
        // SAFETY: clears a flag of a descriptor that this test owns.
        assert_eq!(unsafe { libc::fcntl(near.as_raw_fd(), libc::F_SETFD, 0) }, 0);
        harden().unwrap();
        assert_eq!(rustix::process::dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
        // SAFETY: sets what is set.
        let full_file = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        assert_eq!(full_file, libc::SIG_IGN, "a full file ends it");
        // SAFETY: reads a flag of a descriptor that this test owns.
        let flags = unsafe { libc::fcntl(near.as_raw_fd(), libc::F_GETFD) };
        assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    }

    #[test]
    fn standard_streams_and_closed_numbers_are_refused() {
        assert_eq!(adopt(2).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert!(adopt(RawFd::MAX).is_err());
    }
}
