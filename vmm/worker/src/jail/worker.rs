//! A worker's own part of the jail, prepared by the zygote, so that each worker
//! has little left to do: about ten system calls and no allocation.
//!
//! It distrusts the zygote's descriptors, which a worker was born with.
//! Deliberately absent: everything a fork inherits; the zygote went through
//! that once for all.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::RawFd;

use super::landlock::Ruleset;
use super::privileges::{AddressSpace, Lowering, PrivilegeError};
use super::seccomp::FilterError;
use super::{Filter, Limits};

/// A step that failed.
#[derive(Debug, thiserror::Error)]
pub enum WorkerJailError {
    /// There is no ruleset.
    #[error("no Landlock ruleset for workers: {0}")]
    Ruleset(#[from] ::landlock::RulesetError),
    /// The kernel did not take the ruleset.
    #[error("a worker cannot put on its Landlock ruleset: {0}")]
    Restrict(io::Error),
    /// Descriptors stayed open.
    #[error("a worker cannot close the zygote's descriptors: {0}")]
    Close(io::Error),
    /// A resource limit cannot be set.
    #[error(transparent)]
    Limits(#[from] PrivilegeError),
    /// The filter cannot be put on.
    #[error(transparent)]
    Filter(#[from] FilterError),
}

/// What a worker puts on.
#[derive(Debug)]
pub struct WorkerJail {
    /// Never dropped: in a worker its descriptor is closed by then, and a
    /// zygote has it to its end.
    ruleset: ManuallyDrop<Ruleset>,
    lowering: Lowering,
    address_space: AddressSpace,
    filter: Filter,
}

impl WorkerJail {
    /// Prepares it, in the process that workers will be forked from and with
    /// its own limits on. Its own filter comes after this: it allows no new
    /// ruleset.
    ///
    /// # Errors
    /// If the kernel has Landlock and refuses, or does not tell its limits.
    pub fn prepare(limits: &Limits, filter: Filter) -> Result<Self, WorkerJailError> {
        let ruleset = ManuallyDrop::new(Ruleset::new()?);
        let (lowering, address_space) = (limits.lowering()?, AddressSpace::now()?);
        Ok(Self { ruleset, lowering, address_space, filter })
    }

    /// A worker's whole part, for ever: a Landlock domain of its own, no
    /// descriptor but 0, 1, 2 and those in `keep`, its limits, so much address
    /// space, its filter. Its VM has been made and has run before: KVM starts a
    /// thread at a VM's first KVM_RUN, which the limits forbid.
    ///
    /// # Errors
    /// [`WorkerJailError`]; the worker must not go on.
    pub fn enter(
        &self,
        keep: &mut [RawFd],
        address_space_bytes: u64,
    ) -> Result<(), WorkerJailError> {
        self.ruleset.restrict().map_err(WorkerJailError::Restrict)?;
        close_all_but(keep).map_err(WorkerJailError::Close)?;
        self.lowering.apply()?;
        self.address_space.lower(address_space_bytes)?;
        Ok(self.filter.install()?)
    }
}

/// Closes all descriptors from 3 on that are not among these.
fn close_all_but(keep: &mut [RawFd]) -> io::Result<()> {
    keep.sort_unstable();
    let mut from = 3;
    for &fd in keep.iter().chain([&RawFd::MAX]) {
        if fd > from {
            // SAFETY: what is closed is the zygote's, whose objects a worker
            // never uses nor drops.
            if unsafe { libc::close_range(from as u32, fd as u32 - 1, 0) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        from = fd.saturating_add(1).max(from);
    }
    Ok(())
}
