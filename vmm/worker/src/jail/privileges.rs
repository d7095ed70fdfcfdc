//! No capability and no way to one; limits on what the kernel will give.
//!
//! Order matters. The namespaces' and the tree's making needs capabilities,
//! so this comes after both. Bounding set and securebits can only be changed
//! while there still is a capability to change them with. Landlock and
//! seccomp take `no_new_privs`, so they come after this.
//!
//! A process that may not be dumped can neither be traced nor read by another
//! of the same user. Its own `/proc` files then belong to uid 0 of its user
//! namespace, which in new namespaces is itself, so it may still open its own
//! pagemap; in the caller's namespaces it no longer may.

use std::io;

/// A step that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot give up privileges: {what}: {source}")]
pub struct PrivilegeError {
    what: &'static str,
    source: io::Error,
}

fn checked(what: &'static str, result: impl Into<i64>) -> Result<(), PrivilegeError> {
    if result.into() < 0 {
        return Err(PrivilegeError { what, source: io::Error::last_os_error() });
    }
    Ok(())
}

/// `capset`'s header and its two halves of data (`linux/capability.h`).
#[repr(C)]
struct CapHeader {
    version: u32,
    pid: i32,
}
#[repr(C)]
#[derive(Clone, Copy)]
struct CapData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}
const CAP_VERSION_3: u32 = 0x2008_0522;

/// Root without capabilities, files that give none, ids that change none; and
/// all that for good.
const SECUREBITS: libc::c_int = libc::SECBIT_NOROOT
    | libc::SECBIT_NOROOT_LOCKED
    | libc::SECBIT_NO_SETUID_FIXUP
    | libc::SECBIT_NO_SETUID_FIXUP_LOCKED
    | libc::SECBIT_KEEP_CAPS_LOCKED
    | libc::SECBIT_NO_CAP_AMBIENT_RAISE
    | libc::SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED;

/// Gives up every capability in every set, for this thread and all it starts.
///
/// A process that never had one, in the caller's namespaces, cannot lower its
/// bounding set or lock its securebits; there `no_new_privs` does their work.
///
/// # Errors
/// If the kernel refuses.
pub fn drop_all() -> Result<(), PrivilegeError> {
    let prctl = |option, value: libc::c_ulong| {
        // SAFETY: options that take numbers alone.
        unsafe { libc::prctl(option, value, 0 as libc::c_ulong, 0 as libc::c_ulong, 0) }
    };
    checked("no_new_privs", prctl(libc::PR_SET_NO_NEW_PRIVS, 1))?;
    checked("the ambient set", prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as _))?;
    let may_set = has_setpcap()?;
    if may_set {
        checked("securebits", prctl(libc::PR_SET_SECUREBITS, SECUREBITS as libc::c_ulong))?;
        // The kernel knows which is the last.
        for capability in 0..64 {
            if prctl(libc::PR_CAPBSET_READ, capability) < 0 {
                break;
            }
            checked("the bounding set", prctl(libc::PR_CAPBSET_DROP, capability))?;
        }
    }
    let header = CapHeader { version: CAP_VERSION_3, pid: 0 };
    let none = [CapData { effective: 0, permitted: 0, inheritable: 0 }; 2];
    // SAFETY: header and data as version 3 has them; the kernel reads both.
    checked("capset", unsafe {
        libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr())
    })?;
    checked("PR_SET_DUMPABLE", prctl(libc::PR_SET_DUMPABLE, 0))
}

/// Keeps all descriptors but the standard ones from whatever this process starts, unless
/// they are given to it: what was open in who started this one is nobody's to have.
///
/// # Errors
/// If the kernel refuses.
pub fn keep_descriptors() -> Result<(), PrivilegeError> {
    // SAFETY: it closes nothing here, and takes numbers alone.
    checked("close_range", unsafe {
        libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC)
    })
}

fn has_setpcap() -> Result<bool, PrivilegeError> {
    const CAP_SETPCAP: u32 = 8;
    has(&[CAP_SETPCAP])
}

/// Whether this thread may use these capabilities, all below the 32nd
/// (`linux/capability.h`).
pub(super) fn has(capabilities: &[u32]) -> Result<bool, PrivilegeError> {
    let header = CapHeader { version: CAP_VERSION_3, pid: 0 };
    let mut data = [CapData { effective: 0, permitted: 0, inheritable: 0 }; 2];
    // SAFETY: header and data as version 3 has them; the kernel writes both
    // halves of the data.
    checked("capget", unsafe {
        libc::syscall(libc::SYS_capget, &raw const header, data.as_mut_ptr())
    })?;
    Ok(capabilities.iter().all(|capability| data[0].effective & 1 << capability != 0))
}

/// What the kernel gives a process at most. Each can only be lowered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The first descriptor number that cannot be had. Numbers in use stay.
    pub open_files: u64,
    /// How many processes its user may have in its user namespace before it
    /// makes another: 0 for one that makes none.
    pub processes: u64,
    /// How large a file it may write, in bytes: a file in memory is one, a pipe
    /// or socket is none.
    pub file_bytes: u64,
}

/// The bound of a process's address space, guest memory and mapped files
/// included. Not one of [`Limits`], as each worker has its own.
#[derive(Clone, Copy, Debug)]
pub struct AddressSpace {
    /// What the calling process may have already, in bytes.
    most: u64,
}

impl AddressSpace {
    /// That of the calling process, and of one that is forked from it.
    ///
    /// # Errors
    /// If the kernel does not tell.
    pub fn now() -> Result<Self, PrivilegeError> {
        let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `now` is writable.
        checked("RLIMIT_AS", unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut now) })?;
        Ok(Self { most: now.rlim_max })
    }

    /// Lowers it to so many bytes, with one system call.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn lower(self, bytes: u64) -> Result<(), PrivilegeError> {
        let bytes = bytes.min(self.most);
        let to = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
        // SAFETY: `to` is readable.
        checked("RLIMIT_AS", unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const to) })
    }
}

/// Lets the calling process have as many descriptors as it may, and what it
/// starts. Shells commonly begin with 1,024, for the sake of `select`. How many that
/// are.
///
/// # Errors
/// If the kernel refuses.
pub fn raise_descriptors() -> Result<u64, PrivilegeError> {
    let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `now` is writable.
    checked("RLIMIT_NOFILE", unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut now) })?;
    let to = libc::rlimit { rlim_cur: now.rlim_max, ..now };
    // SAFETY: `to` is readable.
    checked("RLIMIT_NOFILE", unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const to) })?;
    Ok(now.rlim_max)
}

impl Limits {
    /// Puts the limits on, and those that are the same for everybody.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn apply(&self) -> Result<(), PrivilegeError> {
        self.lowering()?.apply()
    }

    /// What it takes to put the limits on the calling process, or on one that
    /// is forked from it: only those that are not on yet.
    ///
    /// # Errors
    /// If the kernel does not tell what is on.
    pub fn lowering(&self) -> Result<Lowering, PrivilegeError> {
        let wanted: [(&'static str, libc::__rlimit_resource_t, u64); 9] = [
            // Descriptors are all that its rights hang on.
            ("RLIMIT_NOFILE", libc::RLIMIT_NOFILE, self.open_files),
            // A fork bomb, if seccomp were not there.
            ("RLIMIT_NPROC", libc::RLIMIT_NPROC, self.processes),
            // A dump would write guest memory to wherever the host keeps
            // dumps, or feed it to a program that root runs.
            ("RLIMIT_CORE", libc::RLIMIT_CORE, 0),
            // There is no file that a worker writes.
            ("RLIMIT_FSIZE", libc::RLIMIT_FSIZE, self.file_bytes),
            // Locked memory cannot be reclaimed; KVM locks none.
            ("RLIMIT_MEMLOCK", libc::RLIMIT_MEMLOCK, 0),
            // Kernel memory for queues it has no use for.
            ("RLIMIT_MSGQUEUE", libc::RLIMIT_MSGQUEUE, 0),
            // A real-time loop would starve the host.
            ("RLIMIT_RTPRIO", libc::RLIMIT_RTPRIO, 0),
            // The same, by a better nice value: 0 here means 20, the worst.
            ("RLIMIT_NICE", libc::RLIMIT_NICE, 0),
            // File locks, which the kernel no longer counts.
            ("RLIMIT_LOCKS", libc::RLIMIT_LOCKS, 0),
        ];
        let mut steps = Vec::with_capacity(wanted.len());
        for (what, resource, value) in wanted {
            let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: `now` is writable.
            checked(what, unsafe { libc::getrlimit(resource, &mut now) })?;
            let value = value.min(now.rlim_max);
            if (now.rlim_cur, now.rlim_max) != (value, value) {
                let to = libc::rlimit { rlim_cur: value, rlim_max: value };
                steps.push(Step { what, resource, to });
            }
        }
        Ok(Lowering { steps })
    }
}

/// Limits that are not on yet.
#[derive(Debug)]
pub struct Lowering {
    steps: Vec<Step>,
}

#[derive(Debug)]
struct Step {
    what: &'static str,
    resource: libc::__rlimit_resource_t,
    to: libc::rlimit,
}

impl Lowering {
    /// Puts them on the calling process, with one system call each. It
    /// allocates nothing.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn apply(&self) -> Result<(), PrivilegeError> {
        for Step { what, resource, to } in &self.steps {
            // SAFETY: `to` is readable.
            checked(what, unsafe { libc::setrlimit(*resource, to) })?;
        }
        Ok(())
    }
}
