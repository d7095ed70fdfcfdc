//! Guest RAM: mapped, filled, handed to KVM.

use forge_protocol::platform::{ARCHIVE, ARCHIVE_BYTES_MAX, BOOT_INFO, BootInfo, HEAP, RAM_START};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
};

use super::{Image, MachineError, cpu, paging};

/// Maps RAM for a guest. Untouched pages cost nothing.
pub(super) fn map(bytes: usize) -> Result<GuestMemoryMmap, MachineError> {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(RAM_START), bytes)])
        .map_err(|error| MachineError::Memory { bytes, reason: error.to_string() })
}

/// Places everything the guest finds at its start.
pub(super) fn fill(
    memory: &GuestMemoryMmap,
    image: &Image,
    boot_archive: &[u8],
    ram_bytes: usize,
) -> Result<(), MachineError> {
    let ram_end = RAM_START + ram_bytes as u64;
    if ram_end <= HEAP {
        return Err(MachineError::Image("RAM is smaller than the image"));
    }
    let archive_bytes = boot_archive.len() as u64;
    if archive_bytes > ARCHIVE_BYTES_MAX {
        return Err(MachineError::Image("the boot archive is larger than its place"));
    }
    image.load(memory)?;
    let info = BootInfo { ram_end, archive_bytes };
    paging::build(image, archive_bytes, ram_end).write(memory)?;
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

/// Gives the VM its one memory slot.
pub(super) fn hand_over(vm: &VmFd, memory: &GuestMemoryMmap) -> Result<(), MachineError> {
    for (slot, region) in memory.iter().enumerate() {
        let kvm_region = kvm_userspace_memory_region {
            slot: slot as u32,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the mapping lives as long as `memory`, which `Machine` keeps
        // beside the VM; the kernel and the guest write it, and this process
        // accesses it only through vm-memory's volatile copies.
        unsafe { vm.set_user_memory_region(kvm_region) }
            .map_err(|source| MachineError::Kvm { call: "KVM_SET_USER_MEMORY_REGION", source })?;
    }
    Ok(())
}
