//! The system calls of a launcher for which no safe interface exists.
//!
//! A launcher has one thread, which [`fork`] makes sure of: what is forked
//! from it is an ordinary process that may do anything. Deliberately absent
//! is anything that the broker itself, which has threads, could call.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use rustix::process::Pid;
use rustix::thread::UnshareFlags;

/// Forks. `None` in the child.
///
/// # Errors
/// The kernel's, and `InvalidInput` in a process with more than one thread.
pub(super) fn fork() -> io::Result<Option<Pid>> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a launcher has one thread"));
    }
    // SAFETY: this process has one thread, as was just seen, and a thread can
    // only be made by a thread. So no lock is held by anybody else, and the
    // child may do whatever a process may.
    match unsafe { libc::fork() } {
        0 => Ok(None),
        child => Pid::from_raw(child)
            .filter(|_| child > 0)
            .map(Some)
            .ok_or_else(io::Error::last_os_error),
    }
}

/// Moves the process into new namespaces. For pid namespaces: its children.
pub(super) fn unshare(flags: UnshareFlags) -> io::Result<()> {
    // SAFETY: what is unsafe is unsharing descriptors or memory, and the
    // callers name namespaces.
    unsafe { rustix::thread::unshare_unsafe(flags)? };
    Ok(())
}

/// Blocks all signals, or none. What this process executes inherits it.
pub(super) fn block_signals(all: bool) -> io::Result<()> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is made by one of the first two calls before it is read
    // by the third, which takes no other memory.
    let outcome = unsafe {
        if all {
            libc::sigfillset(set.as_mut_ptr());
        } else {
            libc::sigemptyset(set.as_mut_ptr());
        }
        libc::sigprocmask(libc::SIG_SETMASK, set.as_ptr(), std::ptr::null_mut())
    };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Has this signal do again what it does by default: what this process executes
/// inherits that it is ignored.
pub(super) fn heed(signal: libc::c_int) {
    // SAFETY: the default needs no handler.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// Sets attributes on a mount and all below it; with a user namespace, shows
/// their owners through its map.
pub(super) fn set_mount_attributes(
    mount: BorrowedFd<'_>,
    attributes: u64,
    owners: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: attributes | owners.map_or(0, |_| libc::MOUNT_ATTR_IDMAP),
        attr_clr: 0,
        propagation: 0,
        userns_fd: owners.map_or(0, |owners| owners.as_raw_fd() as u64),
    };
    // SAFETY: an open descriptor, an empty C string, and a structure of the
    // size that is told, which lives while the kernel reads it.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | libc::AT_RECURSIVE,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_the_broker_ignores_is_heeded_by_who_is_executed() {
        // SAFETY: ignoring a signal needs no handler; none is sent here.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        heed(libc::SIGXFSZ);
        let mut shows = std::process::Command::new("sed");
        shows.args(["-n", "s/^SigIgn:\\t//p", "/proc/self/status"]);
        let mask = shows.output().unwrap().stdout;
        let mask = u64::from_str_radix(String::from_utf8(mask).unwrap().trim(), 16).unwrap();
        assert_eq!(mask & (1 << (libc::SIGXFSZ - 1)), 0);
    }

    #[test]
    fn a_process_with_threads_is_not_forked() {
        // The test harness has several.
        std::thread::scope(|scope| {
            let (stop, stopped) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || stopped.recv());
            assert_eq!(fork().unwrap_err().kind(), io::ErrorKind::InvalidInput);
            drop(stop);
        });
    }
}
