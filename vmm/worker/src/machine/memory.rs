//! Guest memory: mapped, filled, handed to KVM.
//!
//! The image's code, which none can write, and RAM. Where the code lies right
//! before RAM in the host's addresses too, they are one slot, and code is
//! read-only because the host's mapping is; else they are two, and code's is
//! read-only. The VMM itself reads and writes RAM alone, so no descriptor of a
//! guest can make it write code.
//!
//! Of RAM the VM has the first `RAM_AT_START_BYTES`, and the rest once its guest
//! asks for it.

use forge_protocol::platform::{
    ARCHIVE, ARCHIVE_BYTES_MAX, BOOT_INFO, BootInfo, CODE, CODE_BYTES, CONTROL_MMIO, DATA,
    RAM_AT_START_BYTES, RAM_START, control,
};
use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
};

use super::mapping::Code;
use super::vcpu::{Bus, Go};
use super::{MachineError, cpu, mapping, paging};
use crate::jail::SealedSlot;

/// Maps RAM for a guest that boots. Untouched pages cost nothing.
pub(super) fn map(bytes: usize) -> Result<GuestMemoryMmap, MachineError> {
    let ram = mapping::map(RAM_START, bytes)
        .map_err(|error| MachineError::Memory { bytes, reason: error.to_string() })?;
    mapping::small_pages(&ram);
    Ok(ram)
}

/// Places what the guest finds at its start beside its image.
pub(super) fn fill(
    memory: &GuestMemoryMmap,
    boot_archive: &[u8],
    ram_bytes: usize,
) -> Result<(), MachineError> {
    let ram_end = RAM_START + ram_bytes as u64;
    if ram_end <= DATA {
        return Err(MachineError::Image("RAM is smaller than the image"));
    }
    let archive_bytes = boot_archive.len() as u64;
    if archive_bytes > ARCHIVE_BYTES_MAX {
        return Err(MachineError::Image("the boot archive is larger than its place"));
    }
    let info = BootInfo { ram_end, archive_bytes, touch_bytes: 0 };
    paging::build(archive_bytes, ram_end).write(memory)?;
    for (bytes, address) in [
        (&cpu::descriptors()[..], forge_protocol::platform::DESCRIPTORS),
        (&info.to_bytes()[..], BOOT_INFO),
        (boot_archive, ARCHIVE),
    ] {
        memory
            .write_slice(bytes, GuestAddress(address))
            .map_err(|_| MachineError::Image("RAM is smaller than the image"))?;
    }
    Ok(())
}

/// The slot of code, and of the RAM at the start if that lies behind it.
const CODE_SLOT: u32 = 0;
/// The slot of the RAM at the start where it lies elsewhere.
const RAM_SLOT: u32 = 1;
/// The slot of the rest of RAM.
const REST_SLOT: u32 = 2;

/// A slot of nothing in the place of that.
pub(super) const NO_REST: kvm_userspace_memory_region = kvm_userspace_memory_region {
    slot: REST_SLOT,
    flags: 0,
    guest_phys_addr: 0,
    memory_size: 0,
    userspace_addr: 0,
};

/// Gives the VM the memory that it has from the start, in as few slots as it
/// takes: the kernel waits for its readers at each.
pub(super) fn hand_over(vm: &VmFd, code: &Code, ram: &GuestMemoryMmap) -> Result<(), MachineError> {
    let of_code = kvm_userspace_memory_region {
        slot: CODE_SLOT,
        flags: KVM_MEM_READONLY,
        guest_phys_addr: CODE,
        memory_size: CODE_BYTES,
        userspace_addr: code.bytes().as_ptr() as u64,
    };
    if code.is_below(ram) {
        let memory_size = CODE_BYTES + RAM_AT_START_BYTES.min(bytes(ram));
        return set_slot(vm, kvm_userspace_memory_region { flags: 0, memory_size, ..of_code });
    }
    set_slot(vm, of_code)?;
    set_slot(vm, ram_slot(RAM_SLOT, ram, 0, RAM_AT_START_BYTES.min(bytes(ram)))?)
}

/// Gives the VM the RAM that it has not had from the start, by a description that
/// was sealed if there is one.
pub(super) fn hand_over_rest(
    vm: &VmFd,
    ram: &GuestMemoryMmap,
    sealed: Option<&SealedSlot>,
) -> Result<(), MachineError> {
    match (sealed, rest(ram)?) {
        (_, None) => Ok(()),
        (None, Some(rest)) => set_slot(vm, rest),
        (Some(sealed), Some(_)) => sealed.give(vm).map_err(not_set),
    }
}

/// The slot of the RAM that a VM does not have from the start.
pub(super) fn rest(
    ram: &GuestMemoryMmap,
) -> Result<Option<kvm_userspace_memory_region>, MachineError> {
    match bytes(ram).checked_sub(RAM_AT_START_BYTES) {
        None | Some(0) => Ok(None),
        Some(bytes) => ram_slot(REST_SLOT, ram, RAM_AT_START_BYTES, bytes).map(Some),
    }
}

/// How much RAM that is.
pub(super) fn bytes(ram: &GuestMemoryMmap) -> u64 {
    ram.iter().map(|region| region.len()).sum()
}

/// A slot of this stretch of RAM, which is one mapping.
fn ram_slot(
    slot: u32,
    ram: &GuestMemoryMmap,
    from: u64,
    memory_size: u64,
) -> Result<kvm_userspace_memory_region, MachineError> {
    let guest_phys_addr = RAM_START + from;
    let start = ram
        .get_host_address(GuestAddress(guest_phys_addr))
        .map_err(|_| MachineError::Image("RAM does not start where it should"))?;
    let userspace_addr = start as u64;
    Ok(kvm_userspace_memory_region { slot, flags: 0, guest_phys_addr, memory_size, userspace_addr })
}

/// Stands before the bus while a guest runs, and gives the VM the rest of its
/// RAM when it asks.
pub(super) struct OnRequest<'a, B> {
    pub(super) bus: &'a mut B,
    pub(super) vm: &'a VmFd,
    pub(super) ram: &'a GuestMemoryMmap,
    pub(super) sealed: Option<&'a SealedSlot>,
    /// Whether the VM has it.
    pub(super) has_all: &'a mut bool,
    /// Why it could not be had.
    pub(super) refused: Option<MachineError>,
}

impl<B: Bus> Bus for OnRequest<'_, B> {
    fn read(&mut self, address: u64, data: &mut [u8]) -> Go {
        self.bus.read(address, data)
    }

    fn write(&mut self, address: u64, data: &[u8]) -> Go {
        if address != CONTROL_MMIO + control::ALL_RAM {
            return self.bus.write(address, data);
        }
        if !*self.has_all
            && let Err(error) = hand_over_rest(self.vm, self.ram, self.sealed)
        {
            self.refused = Some(error);
            return Go::Break(());
        }
        *self.has_all = true;
        Go::Continue(())
    }
}

fn set_slot(vm: &VmFd, region: kvm_userspace_memory_region) -> Result<(), MachineError> {
    // SAFETY: `Machine` keeps code and RAM mapped as long as the VM; the kernel
    // and the guest write RAM, and this process accesses it only through
    // vm-memory's volatile copies. Nobody writes code.
    unsafe { vm.set_user_memory_region(region) }.map_err(not_set)
}

fn not_set(source: kvm_ioctls::Error) -> MachineError {
    MachineError::Kvm { call: "KVM_SET_USER_MEMORY_REGION", source }
}
