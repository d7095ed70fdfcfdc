//! Bare KVM: a VM made and destroyed, an exit, a vCPU put back.

use std::ops::Range;
use std::time::{Duration, Instant};

use forge_protocol::platform::CONTROL_MMIO;
use kvm_bindings::{kvm_userspace_memory_region, kvm_xsave};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
};

use super::{Case, said};
use crate::machine::vcpu::Go;
use crate::machine::{Bus, Exit, Hypervisor, Image, Machine, PageMap, Watchdog, deadline_in};

/// A VM that halts at its first instruction.
pub(super) struct Bare {
    pub(super) vcpu: VcpuFd,
    pub(super) vm: VmFd,
    memory: GuestMemoryMmap,
}

/// The page that holds the reset vector (Intel SDM volume 3, 11.1.4).
const RESET_PAGE: u64 = 0xffff_f000;
const RESET_VECTOR: u64 = 0xffff_fff0;
pub(super) const SLOT_BYTES: usize = 4 << 20;
/// Pages that a guest writes on its way, about, and has before it begins.
pub(super) const GUEST_PAGES: u64 = 20;

/// With one slot of so many bytes, the last pages of which are there already.
pub(super) fn bare(kvm: &Kvm, slot_bytes: usize, pages: u64) -> Result<Bare, String> {
    let vm = kvm.create_vm().map_err(said)?;
    let start = RESET_PAGE + 4096 - slot_bytes as u64;
    let memory =
        GuestMemoryMmap::from_ranges(&[(GuestAddress(start), slot_bytes)]).map_err(said)?;
    for page in 0..pages {
        memory.write_slice(&[0], GuestAddress(RESET_PAGE - 4096 * page)).map_err(said)?;
    }
    memory.write_slice(&[0xf4], GuestAddress(RESET_VECTOR)).map_err(said)?;
    for region in memory.iter() {
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the mapping is kept beside the VM, and accessed through
        // vm-memory alone.
        unsafe { vm.set_user_memory_region(region) }.map_err(said)?;
    }
    let mut vcpu = vm.create_vcpu(0).map_err(said)?;
    match vcpu.run().map_err(said)? {
        VcpuExit::Hlt => Ok(Bare { vcpu, vm, memory }),
        other => Err(format!("a bare VM left with {other:?}")),
    }
}

struct KvmFloor {
    kvm: Kvm,
    destroy: bool,
}

pub(super) fn kvm() -> Result<Box<dyn Case>, String> {
    Ok(Box::new(KvmFloor { kvm: Kvm::new().map_err(said)?, destroy: false }))
}

pub(super) fn kvm_destroy() -> Result<Box<dyn Case>, String> {
    Ok(Box::new(KvmFloor { kvm: Kvm::new().map_err(said)?, destroy: true }))
}

impl Case for KvmFloor {
    fn sample(&mut self) -> Result<u64, String> {
        let making = Instant::now();
        let bare = bare(&self.kvm, SLOT_BYTES, 0)?;
        let made = making.elapsed();
        let destroying = Instant::now();
        drop(bare);
        let destroyed = destroying.elapsed();
        Ok(if self.destroy { destroyed } else { made }.as_nanos() as u64)
    }
}

/// Exits in one sample of [`exit`].
const EXITS: u32 = 50;

pub(super) struct ExitFloor {
    machine: Machine,
    watchdog: Watchdog,
}

/// Counts down, then breaks.
struct Countdown(u32);

impl Bus for Countdown {
    fn read(&mut self, _: u64, _: &mut [u8]) -> Go {
        Go::Break(())
    }

    fn write(&mut self, _: u64, _: &[u8]) -> Go {
        self.0 -= 1;
        if self.0 == 0 { Go::Break(()) } else { Go::Continue(()) }
    }
}

pub(super) fn exit() -> Result<Box<dyn Case>, String> {
    ExitFloor::new().map(|floor| Box::new(floor) as Box<dyn Case>)
}

impl ExitFloor {
    pub(super) fn new() -> Result<Self, String> {
        let [a, b, c, d] = (CONTROL_MMIO as u32).to_le_bytes();
        // mov [CONTROL_MMIO], eax; jmp back
        let code = [0x89, 0x04, 0x25, a, b, c, d, 0xeb, 0xf7];
        let image = Image::with_entry_code(&code).map_err(said)?;
        let hypervisor = Hypervisor::open().map_err(said)?;
        let machine = Machine::new(&hypervisor, &image, &[], 16 << 20).map_err(said)?;
        Ok(Self { machine, watchdog: Watchdog::new().map_err(said)? })
    }

    /// Runs the guest for this many exits.
    pub(super) fn run(&mut self, exits: u32) -> Result<(), String> {
        let _armed = self.watchdog.arm(deadline_in(Duration::from_secs(10)));
        match self.machine.run(&mut Countdown(exits), self.watchdog.stop()) {
            Exit::Bus => Ok(()),
            other => Err(format!("the guest that only exits left with {other:?}")),
        }
    }
}

impl Case for ExitFloor {
    fn sample(&mut self) -> Result<u64, String> {
        let started = Instant::now();
        self.run(EXITS)?;
        Ok(started.elapsed().as_nanos() as u64 / u64::from(EXITS))
    }
}

/// What no reset does without, on a VM in which nothing has changed.
struct ResetFloor {
    bare: Bare,
    extended: kvm_xsave,
    pages: PageMap,
    memory: Range<usize>,
}

pub(super) fn reset() -> Result<Box<dyn Case>, String> {
    let bare = bare(&Kvm::new().map_err(said)?, SLOT_BYTES, 0)?;
    let extended = bare.vcpu.get_xsave().map_err(said)?;
    let region = bare.memory.iter().next().ok_or("a bare VM has no memory")?;
    let start = region.as_ptr() as usize;
    let memory = start..start + SLOT_BYTES;
    Ok(Box::new(ResetFloor { extended, pages: PageMap::open().map_err(said)?, memory, bare }))
}

impl Case for ResetFloor {
    fn sample(&mut self) -> Result<u64, String> {
        let vcpu = &mut self.bare.vcpu;
        let started = Instant::now();
        vcpu.set_kvm_immediate_exit(1);
        let interrupted = vcpu.run().is_err_and(|error| error.errno() == libc::EINTR);
        vcpu.set_kvm_immediate_exit(0);
        // SAFETY: as much as KVM wrote there; nothing here has asked for more
        // (ARCH_REQ_XCOMP_GUEST_PERM).
        unsafe { vcpu.set_xsave(&self.extended) }.map_err(said)?;
        let changed = self.pages.private_pages(self.memory.clone()).map_err(said)?;
        let ns = started.elapsed().as_nanos() as u64;
        // The page with its one instruction.
        match (interrupted, changed.len()) {
            (true, 1) => Ok(ns),
            found => Err(format!("a bare vCPU cannot be put back: {found:?}")),
        }
    }
}
