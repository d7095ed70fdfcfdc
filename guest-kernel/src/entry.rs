//! The first instructions, and what they hand to `main`.
//!
//! The VMM starts the vCPU in ring 3, long mode, with the page tables of
//! `forge_protocol::platform` loaded, at `forge_entry`. There is no earlier
//! stage and no firmware.

use forge_protocol::platform::{ARCHIVE, BOOT_INFO, BootInfo};

core::arch::global_asm!(
    r#"
    .section .entry, "ax"
    .global forge_entry
forge_entry:
    lea rsp, [rip + forge_stack_top]
    xor ebp, ebp
    call {start}
    ud2
    .text
"#,
    start = sym start,
);

// SAFETY: the linker script defines this symbol; only its address is taken.
unsafe extern "C" {
    /// Where the image's data ends; set by the linker script.
    static forge_heap_start: u8;
}

// SAFETY: `main!` defines this function with this very signature.
unsafe extern "Rust" {
    /// Defined by [`main!`](crate::main).
    safe fn forge_main(archive: &'static [u8]) -> !;
}

/// Names the guest's main function: `fn(archive: &'static [u8]) -> !`, called
/// once, on the boot stack, with a working heap. `archive` is the boot archive
/// (`forge_protocol::platform::archive`).
#[macro_export]
macro_rules! main {
    ($main:path) => {
        #[unsafe(no_mangle)]
        extern "Rust" fn forge_main(archive: &'static [u8]) -> ! {
            let main: fn(&'static [u8]) -> ! = $main;
            main(archive)
        }
    };
}

extern "C" fn start() -> ! {
    // SAFETY: the VMM maps this page readable before the first instruction
    // and never writes it again.
    let info = unsafe { core::ptr::read_volatile(BOOT_INFO as *const [u8; BootInfo::BYTES]) };
    let Some(info) = BootInfo::from_bytes(&info) else {
        panic!("the VMM left no boot info of this release");
    };
    let heap_start = (&raw const forge_heap_start) as u64;
    // SAFETY: called once, here, with the RAM above the image, which nothing
    // else uses.
    unsafe { crate::heap::claim(heap_start, info.ram_end) };
    // SAFETY: the VMM placed this many bytes there, mapped them read-only and
    // never writes them again.
    let archive =
        unsafe { core::slice::from_raw_parts(ARCHIVE as *const u8, info.archive_bytes as usize) };
    forge_main(archive)
}
