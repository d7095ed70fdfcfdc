//! `/dev/kvm`, opened and checked once per process.

use std::os::fd::{FromRawFd as _, IntoRawFd as _, OwnedFd};

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_SYNC_X86_EVENTS, KVM_SYNC_X86_REGS, KVM_SYNC_X86_SREGS,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};

use super::MachineError;

/// The only KVM API version there has been since 2007.
const API_VERSION: i32 = 12;

/// Why this host cannot run virtual machines.
#[derive(Debug, thiserror::Error)]
pub enum HypervisorError {
    /// The device is missing.
    #[error(
        "/dev/kvm does not exist: this host has no KVM. On bare metal, enable virtualisation \
         (VT-x or AMD-V) in the firmware and load kvm_intel or kvm_amd; in a VM, ask its host for \
         nested virtualisation"
    )]
    Missing,
    /// The device is there and may not be opened.
    #[error("/dev/kvm may not be opened by this user: add it to the group that owns it (kvm)")]
    Forbidden,
    /// Opening it failed otherwise.
    #[error("/dev/kvm cannot be opened: {0}")]
    Open(kvm_ioctls::Error),
    /// Something else answers there.
    #[error("/dev/kvm speaks API version {got}, not {API_VERSION}")]
    Version {
        /// Its version.
        got: i32,
    },
    /// A capability is missing.
    #[error("KVM on this host lacks {0}")]
    Capability(&'static str),
}

/// A VM for no guest.
#[derive(Debug)]
pub struct Placeholder {
    _vcpu: VcpuFd,
    _vm: VmFd,
}

/// KVM, and what it offers guests on this host.
#[derive(Debug)]
pub struct Hypervisor {
    kvm: Kvm,
    cpuid: CpuId,
    state_msrs: Vec<u32>,
}

/// Opens `/dev/kvm`.
///
/// # Errors
/// [`HypervisorError`], which says what to do.
pub fn open_device() -> Result<OwnedFd, HypervisorError> {
    let fd = Kvm::open_with_cloexec(true).map_err(|error| match error.errno() {
        libc::ENOENT | libc::ENXIO | libc::ENODEV => HypervisorError::Missing,
        libc::EACCES | libc::EPERM => HypervisorError::Forbidden,
        _ => HypervisorError::Open(error),
    })?;
    // SAFETY: it was just opened, and is nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Hypervisor {
    /// Opens `/dev/kvm` and checks that it can do what is needed.
    ///
    /// # Errors
    /// [`HypervisorError`], which says what to do.
    pub fn open() -> Result<Self, MachineError> {
        Self::over(open_device()?)
    }

    /// The same over `/dev/kvm` that somebody else has opened.
    ///
    /// # Errors
    /// [`HypervisorError`].
    pub fn over(device: OwnedFd) -> Result<Self, MachineError> {
        // SAFETY: the descriptor is `/dev/kvm`'s, or KVM's calls fail on it,
        // and it is nobody else's.
        let kvm = unsafe { Kvm::from_raw_fd(device.into_raw_fd()) };
        let got = kvm.get_api_version();
        if got != API_VERSION {
            return Err(HypervisorError::Version { got }.into());
        }
        for (capability, name) in [
            (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
            (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
            (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
        ] {
            if !kvm.check_extension(capability) {
                return Err(HypervisorError::Capability(name).into());
            }
        }
        let cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(|source| MachineError::Kvm { call: "KVM_GET_SUPPORTED_CPUID", source })?;
        let state_msrs = kvm
            .get_msr_index_list()
            .map_err(|source| MachineError::Kvm { call: "KVM_GET_MSR_INDEX_LIST", source })?
            .as_slice()
            .to_vec();
        Ok(Self { kvm, cpuid: guest_cpuid(cpuid), state_msrs })
    }

    /// The model-specific registers that belong to a vCPU's state.
    pub(super) fn state_msrs(&self) -> &[u32] {
        &self.state_msrs
    }

    /// What the guest's CPUID says.
    #[must_use]
    pub fn cpuid(&self) -> &CpuId {
        &self.cpuid
    }

    /// Whether KVM has this capability.
    #[must_use]
    pub fn has(&self, capability: Cap) -> bool {
        self.kvm.check_extension(capability)
    }

    /// Whether registers, segments and events can be left in the page that KVM
    /// shares, for KVM_RUN to take in.
    pub(super) fn syncs_registers(&self) -> bool {
        const ALL: i32 = (KVM_SYNC_X86_REGS | KVM_SYNC_X86_SREGS | KVM_SYNC_X86_EVENTS) as i32;
        self.kvm.check_extension_int(Cap::SyncRegs) & ALL == ALL
    }

    /// A VM that does nothing and has next to nothing, with one vCPU.
    ///
    /// While there is one, making and destroying others is cheaper by some
    /// 100 us each: the kernel patches its own code, on all CPUs, when the
    /// first VM and the first vCPU without an interrupt controller come and
    /// when the last go.
    ///
    /// # Errors
    /// [`MachineError`].
    pub fn placeholder(&self) -> Result<Placeholder, MachineError> {
        let vm = self.create_vm()?;
        let vcpu = vm
            .create_vcpu(0)
            .map_err(|source| MachineError::Kvm { call: "KVM_CREATE_VCPU", source })?;
        Ok(Placeholder { _vcpu: vcpu, _vm: vm })
    }

    pub(super) fn create_vm(&self) -> Result<VmFd, MachineError> {
        loop {
            match self.kvm.create_vm() {
                // A signal came while the kernel made it.
                Err(error) if error.errno() == libc::EINTR => {}
                Err(source) => return Err(MachineError::Kvm { call: "KVM_CREATE_VM", source }),
                Ok(vm) => return Ok(vm),
            }
        }
    }
}

/// What KVM supports, less what a guest of ours has no use for: nested
/// virtualisation, the hypervisor's own interfaces, and hardware randomness,
/// which would make a run differ from its replay.
fn guest_cpuid(mut cpuid: CpuId) -> CpuId {
    const VMX: u32 = 1 << 5;
    const RDRAND: u32 = 1 << 30;
    const RDSEED: u32 = 1 << 18;
    const SVM: u32 = 1 << 2;
    const HYPERVISOR_LEAVES: std::ops::Range<u32> = 0x4000_0000..0x5000_0000;
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            1 => entry.ecx &= !(VMX | RDRAND),
            7 if entry.index == 0 => entry.ebx &= !RDSEED,
            0x8000_0001 => entry.ecx &= !SVM,
            leaf if HYPERVISOR_LEAVES.contains(&leaf) => {
                (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
            }
            _ => {}
        }
    }
    cpuid
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvm_bindings::kvm_cpuid_entry2;

    #[test]
    fn nested_virtualisation_and_hardware_randomness_are_hidden() {
        let entry =
            |function| kvm_cpuid_entry2 { function, ecx: !0, ebx: !0, ..Default::default() };
        let all = [entry(1), entry(7), entry(0x8000_0001), entry(0x4000_0001)];
        let cpuid = guest_cpuid(CpuId::from_entries(&all).unwrap());
        let got = cpuid.as_slice();
        assert_eq!(got[0].ecx & (1 << 5 | 1 << 30), 0);
        assert_eq!(got[1].ebx & (1 << 18), 0);
        assert_eq!(got[2].ecx & (1 << 2), 0);
        assert_eq!((got[3].ecx, got[3].ebx), (0, 0));
    }
}
