//! A Landlock ruleset that handles every right it knows and grants none: no
//! file, no TCP port, no abstract socket and no signal outside the jail.
//!
//! What is open already stays usable: descriptors are how a worker has
//! anything at all. Deliberately absent: a way to grant something for good.
//! The one exception is for the zygote's own procfs, and ends when its
//! descriptor is closed, because no path leads there.
//!
//! Each time a ruleset is put on, the kernel makes a domain of it, and it is
//! domains that may not signal each other. So workers share one ruleset, made
//! before them, and each has a domain of its own
//! (`a_worker_cannot_signal_another_worker`).

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

use ::landlock::{
    ABI, Access as _, AccessFs, AccessNet, CompatLevel, Compatible as _, LandlockStatus,
    PathBeneath, RulesetAttr as _, RulesetCreated, RulesetCreatedAttr as _, RulesetError,
    RulesetStatus, Scope,
};

/// What the kernel enforces of the ruleset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enforced {
    /// All that this program knows of.
    Fully {
        /// The kernel's version of Landlock.
        abi: i32,
    },
    /// What an older kernel knows of.
    Partly {
        /// The kernel's version of Landlock.
        abi: i32,
    },
    /// Nothing: the kernel has no Landlock, or has it switched off.
    Not,
}

impl Enforced {
    /// The kernel's version of Landlock, if anything is enforced.
    #[must_use]
    pub fn abi(self) -> Option<i32> {
        match self {
            Self::Fully { abi } | Self::Partly { abi } => Some(abi),
            Self::Not => None,
        }
    }
}

/// The version that first has everything a jail is after: scopes for signals
/// and abstract sockets (Linux 6.12). Later ones add logging and threads.
pub const ABI_WANTED: i32 = 6;

/// Puts the ruleset on the calling thread and all it starts. With `readable`,
/// files below that directory may still be read. Takes `no_new_privs`.
///
/// # Errors
/// If the kernel has Landlock and refuses.
pub fn restrict(readable: Option<BorrowedFd<'_>>) -> Result<Enforced, RulesetError> {
    let mut ruleset = create()?;
    if let Some(directory) = readable {
        ruleset = ruleset.add_rule(PathBeneath::new(directory, AccessFs::ReadFile))?;
    }
    let status = ruleset.restrict_self()?;
    let abi = match status.landlock {
        LandlockStatus::Available { effective_abi, kernel_abi } => {
            kernel_abi.unwrap_or(effective_abi as i32)
        }
        _ => 0,
    };
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => Enforced::Fully { abi },
        RulesetStatus::PartiallyEnforced => Enforced::Partly { abi },
        RulesetStatus::NotEnforced => Enforced::Not,
    })
}

fn create() -> Result<RulesetCreated, RulesetError> {
    let newest = ABI::V9;
    ::landlock::Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(newest))?
        .handle_access(AccessNet::from_all(newest))?
        .scope(Scope::from_all(newest))?
        .create()
}

/// The ruleset that grants nothing at all, made once to be put on by many.
#[derive(Debug)]
pub struct Ruleset {
    /// Absent where the kernel has no Landlock.
    descriptor: Option<OwnedFd>,
}

impl Ruleset {
    /// Makes it.
    ///
    /// # Errors
    /// If the kernel has Landlock and refuses.
    pub fn new() -> Result<Self, RulesetError> {
        Ok(Self { descriptor: create()?.into() })
    }

    /// Puts it on the calling thread and all it starts, as a domain of its
    /// own. Takes `no_new_privs`. It allocates nothing.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn restrict(&self) -> io::Result<()> {
        let Some(descriptor) = &self.descriptor else { return Ok(()) };
        // SAFETY: a descriptor of ours, and no flags.
        match unsafe { libc::syscall(libc::SYS_landlock_restrict_self, descriptor.as_raw_fd(), 0) }
        {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}
