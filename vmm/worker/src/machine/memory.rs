//! Guest memory: mapped, filled, handed to KVM.
//!
//! The image's code, which none can write, and RAM. Where the code lies right
//! before RAM in the host's addresses too, they are one slot, and code is
//! read-only because the host's mapping is; else they are two, and code's is
//! read-only. The VMM itself reads and writes RAM alone, so no descriptor of a
//! guest can make it write code.

use forge_protocol::platform::{
    ARCHIVE, ARCHIVE_BYTES_MAX, BOOT_INFO, BootInfo, CODE, CODE_BYTES, DATA, RAM_START,
};
use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
};

use super::mapping::Code;
use super::{MachineError, cpu, mapping, paging};

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

/// Gives the VM its memory, in as few slots as it takes: the kernel waits for
/// its readers at each.
pub(super) fn hand_over(vm: &VmFd, code: &Code, ram: &GuestMemoryMmap) -> Result<(), MachineError> {
    let of_code = kvm_userspace_memory_region {
        slot: 0,
        flags: KVM_MEM_READONLY,
        guest_phys_addr: CODE,
        memory_size: CODE_BYTES,
        userspace_addr: code.bytes().as_ptr() as u64,
    };
    if code.is_below(ram) {
        let ram_bytes: u64 = ram.iter().map(|region| region.len()).sum();
        let memory_size = CODE_BYTES + ram_bytes;
        return set_slot(vm, kvm_userspace_memory_region { flags: 0, memory_size, ..of_code });
    }
    set_slot(vm, of_code)?;
    for (slot, region) in (1..).zip(ram.iter()) {
        set_slot(
            vm,
            kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
            },
        )?;
    }
    Ok(())
}

fn set_slot(vm: &VmFd, region: kvm_userspace_memory_region) -> Result<(), MachineError> {
    // SAFETY: `Machine` keeps code and RAM mapped as long as the VM; the kernel
    // and the guest write RAM, and this process accesses it only through
    // vm-memory's volatile copies. Nobody writes code.
    unsafe { vm.set_user_memory_region(region) }
        .map_err(|source| MachineError::Kvm { call: "KVM_SET_USER_MEMORY_REGION", source })
}
