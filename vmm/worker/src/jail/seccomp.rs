//! The system-call filters: compiled once, installed by each process for
//! itself, and a report of the call that one stopped.
//!
//! A call that no rule allows raises SIGSYS. The handler tells its number and
//! ends the process; where SIGSYS cannot be handled the kernel ends it. A call
//! by another architecture's entry (32-bit) ends it at once.
//!
//! The filter is the calling thread's: a process that installs it has no
//! other. `SECCOMP_FILTER_FLAG_LOG` is off, because a guest must not choose
//! how much the host logs; `SPEC_ALLOW` is off, so older kernels keep the
//! mitigations they couple to filters; `TSYNC` would hide a mistake.
//!
//! The kernel remembers which calls a filter allows whatever their arguments,
//! and answers those from a bitmap. The others run the program, which finds a
//! call's number by halving and tries its rules in the order of the table;
//! KVM_RUN is the first of `ioctl`.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::bpf;
use super::rules::{Role, Rule};

/// Why there is no filter.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// Our own table makes none.
    #[error("the system-call filter cannot be compiled: its table is too long")]
    TooLong,
    /// The kernel took it not.
    #[error(
        "the system-call filter cannot be installed: {0}; the kernel needs CONFIG_SECCOMP_FILTER, \
         and no_new_privs must be set before"
    )]
    Install(io::Error),
    /// The kernel took no handler.
    #[error("no handler for SIGSYS: {0}")]
    Handler(io::Error),
}

/// A compiled filter.
#[derive(Clone)]
pub struct Filter {
    program: Vec<libc::sock_filter>,
}

impl std::fmt::Debug for Filter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Filter").field("instructions", &self.program.len()).finish()
    }
}

impl Filter {
    /// Compiles the filter of a role.
    ///
    /// # Errors
    /// If our own tables are wrong.
    pub fn compile(role: Role) -> Result<Self, FilterError> {
        Self::of(&role.enforceable())
    }

    /// The same with one rule of the role's table taken out, to show what
    /// that rule is good for.
    ///
    /// # Errors
    /// As [`Self::compile`].
    pub fn compile_without(role: Role, index: usize) -> Result<Self, FilterError> {
        let without = role.rules().get(index);
        let same = |rule: &Rule| without.is_some_and(|it| it.name == rule.name);
        let mut rules = role.enforceable();
        rules.retain(|rule| !same(rule));
        Self::of(&rules)
    }

    /// The filter of a table.
    ///
    /// # Errors
    /// If the table is wrong.
    pub fn of(rules: &[Rule]) -> Result<Self, FilterError> {
        bpf::compile(rules).map(|program| Self { program }).ok_or(FilterError::TooLong)
    }

    /// How many instructions it has.
    #[must_use]
    pub fn instructions(&self) -> usize {
        self.program.len()
    }

    /// Puts it on the calling thread, for ever. Whoever did without
    /// [`super::privileges`] needs no_new_privs first.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub fn install(&self) -> Result<(), FilterError> {
        /// `struct sock_fprog` (`linux/filter.h`).
        #[repr(C)]
        struct Program {
            len: libc::c_ushort,
            filter: *const libc::sock_filter,
        }
        let program = Program { len: self.program.len() as u16, filter: self.program.as_ptr() };
        // SAFETY: the program has as many instructions as it says, and the
        // kernel copies it before it returns.
        let refused = unsafe {
            libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
        };
        if refused != 0 {
            return Err(FilterError::Install(io::Error::last_os_error()));
        }
        Ok(())
    }
}

/// The exit code of a process whose call was stopped: 128 and the signal's
/// number, as a shell has it.
pub const EXIT_FORBIDDEN: i32 = 128 + libc::SIGSYS;

/// What to call with the number, as an address. Zero: nothing.
static TELL: AtomicUsize = AtomicUsize::new(0);

/// Has `tell` called with the number of the first call that a filter stops;
/// then the process ends with [`EXIT_FORBIDDEN`]. `tell` runs in a signal
/// handler: no allocation, no lock, and only calls that the filter allows.
///
/// # Errors
/// If the kernel takes no handler.
pub fn report_forbidden(tell: fn(i32)) -> Result<(), FilterError> {
    TELL.store(tell as usize, Ordering::Release);
    // SAFETY: all zero is a valid sigaction, with an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = forbidden as extern "C" fn(_, _, _) as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the action is whole; its handler keeps to what handlers may do.
    if unsafe { libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut()) } != 0 {
        return Err(FilterError::Handler(io::Error::last_os_error()));
    }
    Ok(())
}

extern "C" fn forbidden(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    /// `siginfo_t` of a SIGSYS (`asm-generic/siginfo.h`).
    #[repr(C)]
    struct Sigsys {
        signo: libc::c_int,
        errno: libc::c_int,
        code: libc::c_int,
        pad: libc::c_int,
        call_addr: *const libc::c_void,
        syscall: libc::c_int,
        arch: libc::c_uint,
    }
    const _: () = assert!(size_of::<Sigsys>() <= size_of::<libc::siginfo_t>());
    // SAFETY: the kernel hands a handler with SA_SIGINFO a whole siginfo.
    let number = unsafe { (*info.cast::<Sigsys>()).syscall };
    let tell = TELL.load(Ordering::Acquire);
    if tell != 0 {
        // SAFETY: what is not zero came from a `fn(i32)`, which never goes.
        let tell: fn(i32) = unsafe { std::mem::transmute(tell) };
        tell(number);
    }
    // SAFETY: ends the process. If even that is forbidden, SIGSYS is blocked
    // by now and the kernel ends it.
    unsafe { libc::_exit(EXIT_FORBIDDEN) }
}
