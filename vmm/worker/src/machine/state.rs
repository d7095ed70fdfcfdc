//! Everything a vCPU remembers, as KVM tells it: read, compared, put back.
//!
//! A guest that runs in ring 3 can change general registers, segment
//! selectors, x87 and SSE. The rest (control registers, XCR0, debug
//! registers) takes ring 0, which holds nothing but the trap stub, and MSRs
//! not even ring 0 can write once [`deny_msrs`] was called. CR4.OSXSAVE is
//! clear, so there is no AVX state.
//!
//! Each KVM call on a vCPU costs some microseconds before it does anything.
//! So registers, segments and events are left in the page that KVM shares,
//! for the next KVM_RUN to take in (KVM_CAP_SYNC_REGS), where there is that.
//! When a reset is proven everything is compared; put back each time is what
//! a guest could change.

use std::fmt;
use std::sync::Arc;

use kvm_bindings::{
    Msrs, kvm_debugregs, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_sync_regs, kvm_vcpu_events,
    kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{
    MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, SyncReg, VcpuFd, VmFd,
};

use super::{Hypervisor, MachineError};

/// Model-specific registers that go on by themselves or belong to no guest
/// state: the time-stamp counter and its kin, and KVM's paravirtual clocks,
/// which our guests are not told of.
fn moves_by_itself(index: u32) -> bool {
    const TSC: u32 = 0x10;
    const TSC_ADJUST: u32 = 0x3b;
    const MPERF: u32 = 0xe7;
    const APERF: u32 = 0xe8;
    const TSC_DEADLINE: u32 = 0x6e0;
    const KVM_CLOCKS: std::ops::RangeInclusive<u32> = 0x4b56_4d00..=0x4b56_4dff;
    const KVM_OLD_CLOCKS: [u32; 2] = [0x11, 0x12];
    const HYPERV: std::ops::RangeInclusive<u32> = 0x4000_0000..=0x4000_0fff;
    matches!(index, TSC | TSC_ADJUST | MPERF | APERF | TSC_DEADLINE)
        || KVM_CLOCKS.contains(&index)
        || KVM_OLD_CLOCKS.contains(&index)
        || HYPERV.contains(&index)
}

/// Has KVM refuse each of the guest's accesses to an MSR, by a general
/// protection fault and in whatever ring it is (KVM_X86_SET_MSR_FILTER). What a
/// guest cannot write need not be put back. KVM has the filter since Linux 5.10.
pub(super) fn deny_msrs(vm: &VmFd) -> Result<(), MachineError> {
    // KVM wants to see one range beside the rule for all others.
    let (flags, none) = (MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE, [0]);
    let range = MsrFilterRange { flags, base: 0, msr_count: 1, bitmap: &none };
    vm.set_msr_filter(MsrFilterDefaultAction::DENY, &[range])
        .map_err(failed("KVM_X86_SET_MSR_FILTER"))
}

/// A vCPU's state.
#[derive(Clone, Debug)]
pub(super) struct CpuState {
    regs: kvm_regs,
    sregs: kvm_sregs,
    extended: Extended,
    rest: Rest,
    /// Whether KVM takes registers from the page it shares.
    syncs: bool,
}

/// What takes ring 0 to change.
#[derive(Clone, Debug, PartialEq)]
struct Rest {
    xcrs: kvm_xcrs,
    debug: kvm_debugregs,
    events: kvm_vcpu_events,
    msrs: Msrs,
}

/// x87 and SSE as XSAVE lays them out (Intel SDM 1, 13.4). KVM_GET_FPU and
/// KVM_SET_FPU have all of it but MXCSR, in which a program that left the
/// interpreter could leave its rounding mode and its masks to the next.
#[derive(Clone)]
struct Extended(Arc<kvm_xsave>);

/// Words of it that are looked at by name.
const MXCSR: usize = 24 / 4;
const XSTATE_BV: usize = 512 / 4;
/// In XSTATE_BV: what is here of x87 and of SSE counts.
const X87_AND_SSE: u32 = 0b11;

impl Extended {
    fn read(vcpu: &VcpuFd) -> Result<Self, MachineError> {
        let mut area = vcpu.get_xsave().map_err(failed("KVM_GET_XSAVE"))?;
        // A CPU may say of registers at their first values that they are not in
        // use. KVM has written those values down, and they are to be put back.
        area.region[XSTATE_BV] |= X87_AND_SSE;
        Ok(Self(Arc::new(area)))
    }

    fn write(&self, vcpu: &VcpuFd) -> Result<(), MachineError> {
        // SAFETY: KVM reads as much as it wrote when this was read, 4096 bytes:
        // more only in a process that has asked for more (arch_prctl(2),
        // ARCH_REQ_XCOMP_GUEST_PERM), and none here does.
        unsafe { vcpu.set_xsave(&self.0) }.map_err(failed("KVM_SET_XSAVE"))
    }
}

impl PartialEq for Extended {
    fn eq(&self, other: &Self) -> bool {
        self.0.region == other.0.region
    }
}

impl fmt::Debug for Extended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let region = &self.0.region;
        write!(f, "MXCSR {:x}, {:x?}", region[MXCSR], &region[..XSTATE_BV])
    }
}

fn failed(call: &'static str) -> impl Fn(kvm_ioctls::Error) -> MachineError {
    move |source| MachineError::Kvm { call, source }
}

impl Rest {
    /// With those of these MSRs that the vCPU has.
    fn read(vcpu: &VcpuFd, msrs: &[kvm_msr_entry]) -> Result<Self, MachineError> {
        Ok(Self {
            xcrs: vcpu.get_xcrs().map_err(failed("KVM_GET_XCRS"))?,
            debug: vcpu.get_debug_regs().map_err(failed("KVM_GET_DEBUGREGS"))?,
            events: vcpu.get_vcpu_events().map_err(failed("KVM_GET_VCPU_EVENTS"))?,
            msrs: readable_msrs(vcpu, msrs)?,
        })
    }
}

fn list(entries: impl Iterator<Item = kvm_msr_entry>) -> Result<Msrs, MachineError> {
    let entries: Vec<_> = entries.collect();
    Msrs::from_entries(&entries)
        .map_err(|_| failed("KVM_GET_MSRS")(kvm_ioctls::Error::new(libc::E2BIG)))
}

impl CpuState {
    /// Reads it from a vCPU that has no access pending.
    pub(super) fn read(vcpu: &VcpuFd, hypervisor: &Hypervisor) -> Result<Self, MachineError> {
        let msrs: Vec<kvm_msr_entry> = hypervisor
            .state_msrs()?
            .into_iter()
            .filter(|index| !moves_by_itself(*index))
            .map(|index| kvm_msr_entry { index, ..Default::default() })
            .collect();
        Self::read_with(vcpu, &msrs, hypervisor.syncs_registers())
    }

    /// Reads the same from another vCPU, or from this one later. Of the MSRs
    /// those that it has: one without CPUID may have fewer.
    pub(super) fn read_again(&self, vcpu: &VcpuFd) -> Result<Self, MachineError> {
        Self::read_with(vcpu, self.rest.msrs.as_slice(), self.syncs)
    }

    fn read_with(vcpu: &VcpuFd, msrs: &[kvm_msr_entry], syncs: bool) -> Result<Self, MachineError> {
        Ok(Self {
            regs: vcpu.get_regs().map_err(failed("KVM_GET_REGS"))?,
            sregs: vcpu.get_sregs().map_err(failed("KVM_GET_SREGS"))?,
            extended: Extended::read(vcpu)?,
            rest: Rest::read(vcpu, msrs)?,
            syncs,
        })
    }

    /// Gives it to a vCPU that has just been made or has run, and has what a
    /// guest cannot change as it was when this was read. It may take effect with
    /// the next KVM_RUN only.
    pub(super) fn write(&self, vcpu: &mut VcpuFd) -> Result<(), MachineError> {
        if self.syncs {
            *vcpu.sync_regs_mut() =
                kvm_sync_regs { regs: self.regs, sregs: self.sregs, events: self.rest.events };
            for part in [SyncReg::Register, SyncReg::SystemRegister, SyncReg::VcpuEvents] {
                vcpu.set_sync_dirty_reg(part);
            }
        } else {
            vcpu.set_sregs(&self.sregs).map_err(failed("KVM_SET_SREGS"))?;
            vcpu.set_regs(&self.regs).map_err(failed("KVM_SET_REGS"))?;
            let events = &self.rest.events;
            vcpu.set_vcpu_events(events).map_err(failed("KVM_SET_VCPU_EVENTS"))?;
        }
        self.extended.write(vcpu)
    }

    /// What a vCPU has that differs from this, by name.
    pub(super) fn differences(&self, vcpu: &VcpuFd) -> Result<Vec<String>, MachineError> {
        let now = self.read_again(vcpu)?;
        let mut found = Vec::new();
        if now.regs != self.regs {
            found.push(format!("registers: {:x?}, not {:x?}", now.regs, self.regs));
        }
        if now.sregs != self.sregs {
            found.push(format!("segments: {:x?}, not {:x?}", now.sregs, self.sregs));
        }
        if now.extended != self.extended {
            found.push(format!("x87 and SSE: {:?}, not {:?}", now.extended, self.extended));
        }
        let (now_msrs, msrs) = (now.rest.msrs.as_slice(), self.rest.msrs.as_slice());
        if now_msrs.len() != msrs.len() {
            found.push(format!("{} MSRs, not {}", now_msrs.len(), msrs.len()));
        }
        for (now, was) in now_msrs.iter().zip(msrs).filter(|(now, was)| now != was) {
            found.push(format!("MSR {:#x}: {:#x}, not {:#x}", now.index, now.data, was.data));
        }
        if (now.rest.xcrs, now.rest.debug, now.rest.events)
            != (self.rest.xcrs, self.rest.debug, self.rest.events)
        {
            found.push(format!("{:x?}, not {:x?}", now.rest, self.rest));
        }
        Ok(found)
    }
}

/// Those of these MSRs that this vCPU lets itself be asked for, with their
/// values.
fn readable_msrs(vcpu: &VcpuFd, wanted: &[kvm_msr_entry]) -> Result<Msrs, MachineError> {
    // KVM stops at the first that this vCPU does not have.
    let mut readable = Vec::with_capacity(wanted.len());
    let mut left = wanted;
    while !left.is_empty() {
        let mut asked = list(left.iter().copied())?;
        let got = vcpu.get_msrs(&mut asked).map_err(failed("KVM_GET_MSRS"))?;
        readable.extend_from_slice(&asked.as_slice()[..got]);
        left = left.get(got + 1..).unwrap_or(&[]);
    }
    list(readable.into_iter())
}
