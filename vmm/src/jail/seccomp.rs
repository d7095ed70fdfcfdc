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
//! and answers those from a bitmap. The others walk the program, which tries
//! calls in the order of their numbers and one call's rules in the order of
//! the table; `ioctl` is the sixteenth number and KVM_RUN its first rule.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, sock_filter,
};

use super::rules::{Role, Rule, When};

/// Why there is no filter.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// Our own tables make none.
    #[error("the system-call filter cannot be compiled: {0}")]
    Compile(#[from] seccompiler::BackendError),
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
    program: BpfProgram,
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
        Self::of(role.rules())
    }

    /// The same with one rule of the role's table taken out, to show what
    /// that rule is good for.
    ///
    /// # Errors
    /// As [`Self::compile`].
    pub fn compile_without(role: Role, index: usize) -> Result<Self, FilterError> {
        let mut rules = role.rules().to_vec();
        if index < rules.len() {
            rules.remove(index);
        }
        Self::of(&rules)
    }

    /// The filter of a table.
    ///
    /// # Errors
    /// If the table is wrong.
    pub fn of(rules: &[Rule]) -> Result<Self, FilterError> {
        let mut chains: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
        for rule in rules {
            let chain = chains.entry(rule.number).or_default();
            let condition = |argument, operator, value: u32| {
                let condition = SeccompCondition::new(
                    argument,
                    SeccompCmpArgLen::Dword,
                    operator,
                    value.into(),
                )?;
                SeccompRule::new(vec![condition])
            };
            match rule.when {
                // An empty chain matches always; a table has no second rule
                // beside such a one.
                When::Always => {}
                When::Is(argument, value) => {
                    chain.push(condition(argument, SeccompCmpOp::Eq, value)?);
                }
                When::Without(argument, bits) => {
                    chain.push(condition(argument, SeccompCmpOp::MaskedEq(bits.into()), 0)?);
                }
            }
        }
        let filter = SeccompFilter::new(
            chains,
            SeccompAction::Trap,
            SeccompAction::Allow,
            TargetArch::x86_64,
        )?;
        Ok(Self { program: filter.try_into()? })
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
            filter: *const sock_filter,
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
