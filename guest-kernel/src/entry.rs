//! The first instructions, and what they hand to `main`.
//!
//! The VMM starts the vCPU in ring 3, long mode, with the page tables of
//! `forge_protocol::platform` loaded, at `forge_entry`. There is no earlier
//! stage and no firmware.

use forge_protocol::platform::{
    ARCHIVE, BOOT_INFO, BootInfo, DATA, PAGE_BYTES, RAM_AT_START_BYTES, RAM_START, STACK_TOP,
    VSOCK_QUEUES,
};

use crate::mmio::Control;

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

// SAFETY: the linker script defines these symbols; only their addresses are
// taken.
unsafe extern "C" {
    /// Where the stack begins; set by the linker script.
    static forge_stack_top: u8;
    /// Where the image's data begins; set by the linker script.
    static forge_data_start: u8;
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

fn boot_info() -> BootInfo {
    // SAFETY: the VMM maps this page readable before the first instruction and
    // writes it only while the guest stands in an exit; it is read volatilely.
    let info = unsafe { core::ptr::read_volatile(BOOT_INFO as *const [u8; BootInfo::BYTES]) };
    match BootInfo::from_bytes(&info) {
        Some(info) => info,
        None => panic!("the VMM left no boot info of this release"),
    }
}

/// Where the RAM ends that is there from the start.
fn end_at_start(info: &BootInfo) -> u64 {
    info.ram_end.min(RAM_START + RAM_AT_START_BYTES)
}

/// Touches the memory that the VMM named for it
/// ([`BootInfo::touch_bytes`]): each page is then mapped before it is needed.
/// To be called once the guest has greeted.
pub fn touch() {
    let info = boot_info();
    let end = DATA.saturating_add(info.touch_bytes).min(end_at_start(&info));
    for page in (DATA..end).step_by(PAGE_BYTES as usize) {
        // SAFETY: the page is mapped writable, and what is there stays: one
        // instruction reads and writes back, in the only thread there is.
        unsafe { core::arch::asm!("or byte ptr [{page}], 0", page = in(reg) page) };
    }
}

extern "C" fn start() -> ! {
    let symbols = [(&raw const forge_stack_top) as u64, (&raw const forge_data_start) as u64];
    assert!(symbols == [STACK_TOP, VSOCK_QUEUES + PAGE_BYTES], "link.ld is not platform.rs");
    let info = boot_info();
    let heap_start = (&raw const forge_heap_start) as u64;
    let later = end_at_start(&info);
    // SAFETY: called once, here, with the RAM above the image, which is zero
    // and which nothing else uses.
    unsafe { crate::allocator::claim(heap_start, later, info.ram_end, Control::all_ram) };
    // SAFETY: the VMM placed this many bytes there, mapped them read-only and
    // never writes them again.
    let archive =
        unsafe { core::slice::from_raw_parts(ARCHIVE as *const u8, info.archive_bytes as usize) };
    forge_main(archive)
}
