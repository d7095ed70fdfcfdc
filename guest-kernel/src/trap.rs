//! Ring 0: what happens when the guest faults.
//!
//! Every exception enters here through an interrupt gate of the IDT that the
//! VMM wrote, on the stack page of IST 1. The stub completes the frame
//! (`forge_protocol::platform::TrapFrame`) and halts; the VMM reads the frame
//! and ends the VM. Nothing returns from here. On hosts that emulate ring 0
//! each instruction costs about a microsecond and SSE is not there at all, so
//! it is a handful of integer instructions in assembly.

core::arch::global_asm!(
    r#"
    .section .trap, "ax"
    # platform::TRAP_VECTORS stubs, platform::TRAP_STUB_STRIDE apart.
    .irp vector, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31
    .balign 16
    # The CPU pushes an error code for these vectors and no others.
    .if !((\vector == 8) || ((\vector >= 10) && (\vector <= 14)) || (\vector == 17) || (\vector == 21) || (\vector == 29) || (\vector == 30))
    push 0
    .endif
    push \vector
    jmp forge_trap_common
    .endr

    .balign 16
forge_trap_common:
    push rax
    mov rax, cr2
    push rax
2:  hlt
    jmp 2b
    .text
"#
);
