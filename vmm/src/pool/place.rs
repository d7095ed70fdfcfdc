//! Where a worker runs.
//!
//! A worker that waits is woken where the thread is that has a run for it:
//! that thread is about to sleep, and handing its CPU over costs a few
//! microseconds where waking another, idle CPU costs tens. A run that lasts
//! may move on.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

/// How long a run stays where it was woken.
pub(super) const STAYS: Duration = Duration::from_millis(1);

/// A worker's process id in our own namespace, by its descriptor.
pub(super) fn id_of(process: &OwnedFd) -> Option<libc::pid_t> {
    let path = format!("/proc/self/fdinfo/{}", process.as_raw_fd());
    let text = std::fs::read_to_string(path).ok()?;
    let id = text.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()?;
    // -1: it has ended.
    (id > 0).then_some(id)
}

/// Keeps a process on the calling thread's CPU. It is no harm if that fails.
pub(super) fn keep_here(process: libc::pid_t) {
    // SAFETY: has no preconditions.
    let cpu = unsafe { libc::sched_getcpu() };
    if let Ok(cpu) = usize::try_from(cpu) {
        // SAFETY: an all-zero set is empty; the macro checks the number.
        let set = unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(cpu, &mut set);
            set
        };
        set_affinity(process, &set);
    }
}

/// Lets a process run on every CPU again.
pub(super) fn let_go(process: libc::pid_t) {
    // SAFETY: any bit pattern is a set; the kernel leaves out CPUs that are
    // not there or not allowed.
    let set: libc::cpu_set_t = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        std::ptr::write_bytes(&raw mut set, 0xff, 1);
        set
    };
    set_affinity(process, &set);
}

fn set_affinity(process: libc::pid_t, set: &libc::cpu_set_t) {
    // SAFETY: the set is readable for its size.
    unsafe { libc::sched_setaffinity(process, size_of::<libc::cpu_set_t>(), set) };
}
