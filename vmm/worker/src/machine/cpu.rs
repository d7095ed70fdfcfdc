//! The vCPU's first state: ring 3, long mode, at the image's entry.
//!
//! There is no real mode, no firmware and no boot protocol to go through: KVM
//! takes the state as it is given (KVM_SET_SREGS).

use forge_protocol::platform::{
    DESCRIPTORS, PAGE_BYTES, PAGE_TABLES, TRAP_STACK, TRAP_STUB, TRAP_STUB_STRIDE, TRAP_VECTORS,
};
use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;

use super::MachineError;

/// Selectors into the descriptor table below.
const KERNEL_CODE: u16 = 1 << 3;
const USER_DATA: u16 = 3 << 3 | 3;
const USER_CODE: u16 = 4 << 3 | 3;
const TASK: u16 = 5 << 3;

/// Where each table lies in the descriptors' page.
const GDT: u64 = DESCRIPTORS;
const GDT_BYTES: usize = 7 * 8;
const TSS: u64 = DESCRIPTORS + 0x100;
const TSS_BYTES: usize = 104;
const IDT: u64 = DESCRIPTORS + 0x800;
const IDT_BYTES: usize = TRAP_VECTORS as usize * 16;

const _: () = assert!(0x800 + IDT_BYTES <= PAGE_BYTES as usize);

/// The descriptors' page: GDT, TSS, IDT (Intel SDM volume 3, chapters 3, 7, 8).
pub(super) fn descriptors() -> [u8; PAGE_BYTES as usize] {
    let mut page = [0u8; PAGE_BYTES as usize];
    let mut put = |address: u64, value: u64| {
        let at = (address - DESCRIPTORS) as usize;
        page[at..at + 8].copy_from_slice(&value.to_le_bytes());
    };
    // Accessed bits are set, so that the CPU never writes here.
    put(GDT + 8, 0x00af_9b00_0000_ffff); // ring-0 code, 64 bit
    put(GDT + 16, 0x00cf_9300_0000_ffff); // ring-0 data
    put(GDT + 24, 0x00cf_f300_0000_ffff); // ring-3 data
    put(GDT + 32, 0x00af_fb00_0000_ffff); // ring-3 code, 64 bit
    let limit = TSS_BYTES as u64 - 1;
    put(GDT + 40, limit | (TSS & 0xff_ffff) << 16 | 0x8b << 40 | (TSS >> 24 & 0xff) << 56);
    put(GDT + 48, TSS >> 32);

    // The stack of every trap; the I/O map is past the limit, so that ring 3
    // has no ports.
    let stack_top = TRAP_STACK + PAGE_BYTES;
    put(TSS + 4, stack_top); // RSP0
    put(TSS + 36, stack_top); // IST 1
    put(TSS + 96, (TSS_BYTES as u64) << 48);

    for vector in 0..TRAP_VECTORS {
        let stub = TRAP_STUB + vector * TRAP_STUB_STRIDE;
        // Present, ring 0 (so that `int` from ring 3 is refused), interrupt
        // gate, IST 1.
        let low = (stub & 0xffff)
            | u64::from(KERNEL_CODE) << 16
            | 1 << 32
            | 0x8e << 40
            | (stub >> 16 & 0xffff) << 48;
        put(IDT + vector * 16, low);
        put(IDT + vector * 16 + 8, stub >> 32);
    }
    page
}

/// Sets control registers, segments and the instruction pointer.
pub(super) fn set_up(vcpu: &VcpuFd, entry: u64) -> Result<(), MachineError> {
    let failed = |call| move |source| MachineError::Kvm { call, source };
    let mut sregs = vcpu.get_sregs().map_err(failed("KVM_GET_SREGS"))?;
    // PE, MP, ET, NE, WP, PG.
    sregs.cr0 = 1 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31;
    sregs.cr2 = 0;
    sregs.cr3 = PAGE_TABLES;
    // PAE, OSFXSR, OSXMMEXCPT. No OSXSAVE: AVX state would be one more thing
    // to reset, and nothing in the guest uses it.
    sregs.cr4 = 1 << 5 | 1 << 9 | 1 << 10;
    // LME, LMA, NXE. No SCE: there is nothing for `syscall` to enter.
    sregs.efer = 1 << 8 | 1 << 10 | 1 << 11;

    let code = kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector: USER_CODE,
        type_: 0b1011,
        present: 1,
        dpl: 3,
        db: 0,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    let data = kvm_segment { selector: USER_DATA, type_: 0b0011, db: 1, l: 0, ..code };
    sregs.cs = code;
    sregs.ss = data;
    sregs.ds = data;
    sregs.es = data;
    sregs.fs = data;
    sregs.gs = data;
    sregs.tr = kvm_segment {
        base: TSS,
        limit: TSS_BYTES as u32 - 1,
        selector: TASK,
        type_: 0b1011,
        present: 1,
        ..Default::default()
    };
    sregs.ldt = kvm_segment { unusable: 1, ..Default::default() };
    sregs.gdt = kvm_dtable { base: GDT, limit: GDT_BYTES as u16 - 1, ..Default::default() };
    sregs.idt = kvm_dtable { base: IDT, limit: IDT_BYTES as u16 - 1, ..Default::default() };
    vcpu.set_sregs(&sregs).map_err(failed("KVM_SET_SREGS"))?;

    // The entry code loads the stack pointer itself. Bit 1 of the flags is
    // always set.
    let regs = kvm_regs { rip: entry, rflags: 1 << 1, ..Default::default() };
    vcpu.set_regs(&regs).map_err(failed("KVM_SET_REGS"))
}
