# The smallest guest that hyperlight-host 0.16 can call: it answers every
# function call with a constant, and calls the host CALLS times before.
#
# Integer instructions alone, because this runs in ring 0, and a software KVM
# emulates ring 0 without SSE. There is no runtime in it, no allocator and no
# interpreter: what it measures is the host library, from below.
#
# The protocol, as hyperlight-common has it:
#   entry     rdi is the PEB; rax at the hlt is where calls are to enter, and
#             rsp is kept from one entry to the next
#   PEB       size and address of the input stack, then of the output stack
#   a stack   its first word is the offset of its free part; each element is
#             followed by the offset it begins at
#   a call    its arguments are on the input stack; hlt ends it, its result is
#             on the output stack
#   to host   the call is on the output stack; a write to port 101 is answered
#             before the next instruction, on the input stack
#   ZF        set at entry: flush the TLB before anything else

        .set    PEB_INPUT, 8
        .set    PEB_OUTPUT, 24
        .set    PORT_CALL_HOST, 101
        .set    EMPTY, 8                # the offset of an empty stack's free part

        .text
        .globl  _start
_start: movq    %rdi, %rsp
        leaq    dispatch(%rip), %rax
        hlt

dispatch:
        jnz     1f
        movq    %cr3, %rax
        movq    %rax, %cr3
1:      movq    PEB_INPUT(%rsp), %rbx
        movq    PEB_OUTPUT(%rsp), %rbp
        movq    $EMPTY, (%rbx)          # the arguments are not looked at
        movl    $CALLS, %r12d

2:      testl   %r12d, %r12d
        jz      3f
        leaq    call_bytes(%rip), %rsi
        movl    $(call_end - call_bytes), %ecx
        leaq    EMPTY(%rbp), %rdi
        movl    %ecx, %eax
        shrl    $3, %ecx
        rep movsq
        movq    $EMPTY, (%rdi)
        addl    $(EMPTY + 8), %eax
        movq    %rax, (%rbp)
        movl    $PORT_CALL_HOST, %edx
        xorl    %eax, %eax
        outl    %eax, %dx
        movq    $EMPTY, (%rbx)          # the host's answer is not looked at
        decl    %r12d
        jmp     2b

3:      leaq    result_bytes(%rip), %rsi
        movl    $((result_end - result_bytes) / 8), %ecx
        leaq    EMPTY(%rbp), %rdi
        rep movsq
        movq    $EMPTY, (%rdi)
        movq    $(result_end - result_bytes + EMPTY + 8), (%rbp)
        hlt

        # Encoded by build.rs with hyperlight-common; padded to whole words.
        .section .rodata
        .balign 16
result_bytes:
        .incbin "result.bin"
        .balign 8
result_end:
call_bytes:
        .incbin "call.bin"
        .balign 8
call_end:
