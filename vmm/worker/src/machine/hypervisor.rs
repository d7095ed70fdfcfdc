//! `/dev/kvm`, opened and checked once per process.

use std::io;
use std::os::fd::{FromRawFd as _, IntoRawFd as _, OwnedFd};

use kvm_bindings::{
    CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_SYNC_X86_EVENTS, KVM_SYNC_X86_REGS,
    KVM_SYNC_X86_SREGS, kvm_cpuid_entry2, kvm_run,
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
    #[error(
        "/dev/kvm may not be opened by this user: `ls -l /dev/kvm` shows who may read and write it, \
         which should be the group kvm, with the user in it (usermod -aG kvm USER)"
    )]
    Forbidden,
    /// Opening it failed otherwise.
    #[error("/dev/kvm cannot be opened: {0}")]
    Open(kvm_ioctls::Error),
    /// Something else answers there.
    #[error("/dev/kvm speaks API version {got}, not {API_VERSION}")]
    Version {
        /// The API version that it answered.
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
    base_cpuid: CpuId,
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
            (Cap::X86MsrFilter, "KVM_CAP_X86_MSR_FILTER"),
        ] {
            if !kvm.check_extension(capability) {
                return Err(HypervisorError::Capability(name).into());
            }
        }
        let cpuid = guest_cpuid(host_leaf)?;
        let base_cpuid = base_cpuid(&cpuid)?;
        Ok(Self { kvm, cpuid, base_cpuid })
    }

    /// The model-specific registers that belong to a vCPU's state.
    pub(super) fn state_msrs(&self) -> Result<Vec<u32>, MachineError> {
        self.kvm
            .get_msr_index_list()
            .map(|list| list.as_slice().to_vec())
            .map_err(|source| MachineError::Kvm { call: "KVM_GET_MSR_INDEX_LIST", source })
    }

    /// What the CPUID of a guest says that boots.
    #[must_use]
    pub fn cpuid(&self) -> &CpuId {
        &self.cpuid
    }

    /// What the CPUID of a guest says that starts from a base: no more than its state
    /// needs. What the CPU can do the base has asked already and keeps, and each leaf
    /// costs where KVM is itself in a VM.
    pub(super) fn base_cpuid(&self) -> &CpuId {
        &self.base_cpuid
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
        let mut vcpu = vm
            .create_vcpu(0)
            .map_err(|source| MachineError::Kvm { call: "KVM_CREATE_VCPU", source })?;
        let bytes = self
            .kvm
            .get_vcpu_mmap_size()
            .map_err(|source| MachineError::Kvm { call: "KVM_GET_VCPU_MMAP_SIZE", source })?;
        let shared: *mut kvm_run = vcpu.get_kvm_run();
        // What KVM shares with this process it would share with all forks, and they with
        // each other: workers have no memory in common that they can write.
        // SAFETY: advice about a mapping of `vcpu`'s, of this length.
        if unsafe { libc::madvise(shared.cast(), bytes, libc::MADV_DONTFORK) } != 0 {
            let reason = io::Error::last_os_error().to_string();
            return Err(MachineError::Memory { bytes, reason });
        }
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

/// One leaf of CPUID: EAX, EBX, ECX, EDX.
type Leaf = [u32; 4];

/// What this host's CPUID says.
fn host_leaf(function: u32, index: u32) -> Leaf {
    // SAFETY: every x86-64 CPU has the instruction. (It is safe to call with
    // newer compilers.)
    #[allow(unused_unsafe, reason = "the oldest compiler we support wants it")]
    let got = unsafe { core::arch::x86_64::__cpuid_count(function, index) };
    [got.eax, got.ebx, got.ecx, got.edx]
}

/// The CPUID that booting guests see: of what the host has, that which a ring-3 guest
/// without AVX can use and which takes nothing to enable. Hardware randomness,
/// which would make a run differ from its replay, nested virtualisation and
/// the hypervisor's own interfaces are not in it, nor is what differs between
/// the CPUs of one host.
///
/// KVM_GET_SUPPORTED_CPUID is not asked: it takes 260 us where KVM is itself
/// in a VM, more than making one.
fn guest_cpuid(host: impl Fn(u32, u32) -> Leaf) -> Result<CpuId, MachineError> {
    let bits = |bits: &[u32]| bits.iter().fold(0u32, |all, bit| all | 1 << bit);
    // Intel SDM volume 2, CPUID. SSE3, PCLMULQDQ, SSSE3, CMPXCHG16B, SSE4.1,
    // SSE4.2, MOVBE, POPCNT, AES, XSAVE.
    let ecx_1 = bits(&[0, 1, 9, 13, 19, 20, 22, 23, 25, 26]);
    // FPU, TSC, MSR, PAE, CX8, SEP, PGE, CMOV, PAT, CLFSH, MMX, FXSR, SSE,
    // SSE2.
    let edx_1 = bits(&[0, 4, 5, 6, 8, 11, 13, 15, 16, 19, 23, 24, 25, 26]);
    // BMI1, BMI2, ERMS, ADX, SHA; fast short REP MOV.
    let (ebx_7, edx_7) = (bits(&[3, 8, 9, 19, 29]), bits(&[4]));
    // LAHF, LZCNT, PREFETCHW; SYSCALL, NX, long mode.
    let (ecx_81, edx_81) = (bits(&[0, 5, 8]), bits(&[11, 20, 29]));
    const CACHE_LINE: u32 = 0xff00;
    const X87_AND_SSE: u32 = 0b11;
    const FXSAVE_AREA_BYTES: u32 = 576;

    let mut entries = Vec::new();
    let mut leaf = |function, index, flags, values: Leaf, mask: Leaf| {
        let [eax, ebx, ecx, edx] = std::array::from_fn(|at| values[at] & mask[at]);
        let padding = [0; 3];
        entries.push(kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, padding });
    };
    let [_, vendor_b, vendor_c, vendor_d] = host(0, 0);
    leaf(0, 0, 0, [0xd, vendor_b, vendor_c, vendor_d], [!0; 4]);
    leaf(1, 0, 0, host(1, 0), [!0, CACHE_LINE, ecx_1, edx_1]);
    let by_index = KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
    leaf(7, 0, by_index, host(7, 0), [0, ebx_7, 0, edx_7]);
    leaf(0xd, 0, by_index, [X87_AND_SSE, FXSAVE_AREA_BYTES, FXSAVE_AREA_BYTES, 0], [!0; 4]);
    leaf(0xd, 1, by_index, [0; 4], [!0; 4]);
    leaf(0x8000_0000, 0, 0, [0x8000_0008, vendor_b, vendor_c, vendor_d], [!0; 4]);
    leaf(EXTENDED_FEATURES, 0, 0, host(EXTENDED_FEATURES, 0), [0, 0, ecx_81, edx_81]);
    // The widths of physical and virtual addresses.
    leaf(0x8000_0008, 0, 0, host(0x8000_0008, 0), [0xffff, 0, 0, 0]);
    listed(&entries)
}

/// The leaf of long mode and NX.
const EXTENDED_FEATURES: u32 = 0x8000_0001;
/// These two in its EDX (AMD APM volume 3, CPUID Fn8000_0001).
const NX_AND_LONG_MODE: u32 = 1 << 20 | 1 << 29;

/// Of the CPUID of a guest that boots, what one needs that starts from a base. Its EFER has
/// long mode and NX, and kernels refuse a state with bits there that its CPUID has not.
fn base_cpuid(booted: &CpuId) -> Result<CpuId, MachineError> {
    let leaf = booted.as_slice().iter().find(|entry| entry.function == EXTENDED_FEATURES);
    let leaf =
        leaf.map(|&leaf| kvm_cpuid_entry2 { ecx: 0, edx: leaf.edx & NX_AND_LONG_MODE, ..leaf });
    listed(leaf.as_slice())
}

fn listed(entries: &[kvm_cpuid_entry2]) -> Result<CpuId, MachineError> {
    CpuId::from_entries(entries).map_err(|_| MachineError::Kvm {
        call: "KVM_SET_CPUID2",
        source: kvm_ioctls::Error::new(libc::E2BIG),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_virtualisation_and_hardware_randomness_are_hidden() {
        let cpuid = guest_cpuid(|_, _| [!0; 4]).unwrap();
        let leaf = |function| cpuid.as_slice().iter().find(|entry| entry.function == function);
        let one = leaf(1).unwrap();
        // VMX, RDRAND, a hypervisor; OSXSAVE and AVX.
        assert_eq!(one.ecx & (1 << 5 | 1 << 30 | 1 << 31 | 1 << 27 | 1 << 28), 0);
        // RDSEED; AVX2.
        assert_eq!(leaf(7).unwrap().ebx & (1 << 18 | 1 << 5), 0);
        // SVM.
        assert_eq!(leaf(0x8000_0001).unwrap().ecx & (1 << 2), 0);
        assert!(leaf(0x4000_0001).is_none());
    }

    #[test]
    fn what_the_guest_is_compiled_for_is_there() {
        let cpuid = guest_cpuid(host_leaf).unwrap();
        let leaf = |function| cpuid.as_slice().iter().find(|entry| entry.function == function);
        // SSE2, and long mode with NX.
        assert_ne!(leaf(1).unwrap().edx & (1 << 26), 0);
        assert_eq!(leaf(EXTENDED_FEATURES).unwrap().edx & NX_AND_LONG_MODE, NX_AND_LONG_MODE);
    }

    #[test]
    fn a_guest_of_a_base_is_told_what_its_state_has_and_no_more() {
        let booted = guest_cpuid(|_, _| [!0; 4]).unwrap();
        let told = base_cpuid(&booted).unwrap();
        let [leaf] = told.as_slice() else { panic!("{told:?}") };
        let kvm_cpuid_entry2 { function, eax, ebx, ecx, edx, .. } = *leaf;
        let all = [function, eax, ebx, ecx, edx];
        assert_eq!(all, [EXTENDED_FEATURES, 0, 0, 0, NX_AND_LONG_MODE]);
    }
}
