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
    .macro forge_trap vector has_error
    .balign 16                       # platform::TRAP_STUB_STRIDE
    .if \has_error == 0
    push 0
    .endif
    push \vector
    jmp forge_trap_common
    .endm

    .set forge_vector, 0
    .rept 32                         # platform::TRAP_VECTORS
    # The CPU pushes an error code for these vectors and no others.
    .if (forge_vector == 8) || ((forge_vector >= 10) && (forge_vector <= 14)) || (forge_vector == 17) || (forge_vector == 21) || (forge_vector == 29) || (forge_vector == 30)
    forge_trap %forge_vector 1
    .else
    forge_trap %forge_vector 0
    .endif
    .set forge_vector, forge_vector + 1
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
