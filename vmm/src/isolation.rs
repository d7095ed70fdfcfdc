//! Which tier runs are carried out in: the one place that decides it.
//!
//! What was asked for is kept: `vm` never becomes anything else. Only `auto`
//! chooses, and whoever resolves it has what to say about the choice.

use clap::ValueEnum;
use forge_protocol::worker::Tier;
use serde::Deserialize;

use crate::machine::{Hypervisor, MachineError};

/// How programs are to be isolated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Isolation {
    /// A KVM virtual machine; fails where there is no KVM
    #[default]
    Vm,
    /// A jailed process, without KVM: weaker, see docs/threat-model.md
    Process,
    /// `vm` where KVM can be used, else `process`; says which
    Auto,
}

/// What an [`Isolation`] comes to on this host.
#[derive(Debug)]
pub struct Resolved {
    /// The tier.
    pub tier: Tier,
    /// Why it is not a VM, if there was a choice.
    pub instead: Option<MachineError>,
}

impl Isolation {
    /// The tier that this is here.
    #[must_use]
    pub fn resolve(self) -> Resolved {
        self.resolve_with(|| Hypervisor::open().map(drop))
    }

    fn resolve_with(self, kvm: impl FnOnce() -> Result<(), MachineError>) -> Resolved {
        let of = |tier| Resolved { tier, instead: None };
        match self {
            Self::Vm => of(Tier::Vm),
            Self::Process => of(Tier::Process),
            Self::Auto => match kvm() {
                Ok(()) => of(Tier::Vm),
                Err(why) => Resolved { tier: Tier::Process, instead: Some(why) },
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::hypervisor::HypervisorError;

    #[test]
    fn only_auto_looks_for_kvm_and_only_auto_takes_something_else() {
        let none = || Err(MachineError::from(HypervisorError::Missing));
        assert_eq!(Isolation::Vm.resolve_with(none).tier, Tier::Vm);
        assert_eq!(Isolation::Process.resolve_with(|| panic!("asked")).tier, Tier::Process);
        let taken = Isolation::Auto.resolve_with(none);
        assert_eq!(taken.tier, Tier::Process);
        assert!(taken.instead.is_some_and(|why| why.to_string().contains("/dev/kvm")));
        let taken = Isolation::Auto.resolve_with(|| Ok(()));
        assert!(taken.tier == Tier::Vm && taken.instead.is_none());
    }
}
