//! The global allocator: talc over all RAM above the image.

use core::alloc::{GlobalAlloc, Layout};

use talc::DefaultBinning;
use talc::cell::TalcCell;
use talc::source::Manual;

struct Heap(TalcCell<Manual, DefaultBinning>);

// SAFETY: there is one thread and there are no interrupts, so nothing can
// enter the allocator while it works.
unsafe impl Sync for Heap {}

// SAFETY: every method is the inner allocator's own.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract, handed on.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract, handed on.
        unsafe { self.0.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: the caller's contract, handed on.
        unsafe { self.0.realloc(block, layout, bytes) }
    }
}

#[global_allocator]
static HEAP: Heap = Heap(TalcCell::new(Manual));

/// Gives the allocator its memory.
///
/// # Safety
/// Called once; `start..end` is mapped, writable and used by nothing else.
pub(crate) unsafe fn claim(start: u64, end: u64) {
    let bytes = end.saturating_sub(start) as usize;
    // SAFETY: the caller's contract.
    let claimed = unsafe { HEAP.0.claim(start as *mut u8, bytes) };
    assert!(claimed.is_some(), "no room for a heap between {start:#x} and {end:#x}");
}
