//! The global allocator: [`Heap`](crate::heap::Heap) over all RAM above the
//! image.

use core::alloc::{GlobalAlloc, Layout};
use core::cell::UnsafeCell;

use crate::heap::Heap;

struct Global(UnsafeCell<Heap>);

// SAFETY: there is one thread and there are no interrupts, so nothing can
// enter the allocator while it works.
unsafe impl Sync for Global {}

// SAFETY: every method is the heap's own. The one reference to it that there
// is at a time ends with each call: the heap calls nothing that allocates.
unsafe impl GlobalAlloc for Global {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract, handed on.
        unsafe { (*self.0.get()).alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract, handed on.
        unsafe { (*self.0.get()).alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract, handed on.
        unsafe { (*self.0.get()).dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: the caller's contract, handed on.
        unsafe { (*self.0.get()).realloc(block, layout, bytes) }
    }
}

#[global_allocator]
static GLOBAL: Global = Global(UnsafeCell::new(Heap::new()));

/// Gives the allocator its memory.
///
/// # Safety
/// Called once; `start..end` is mapped, writable, zero and used by nothing
/// else.
pub(crate) unsafe fn claim(start: u64, end: u64) {
    // SAFETY: the caller's contract; nothing has allocated yet.
    let claimed = unsafe { (*GLOBAL.0.get()).claim(start as *mut u8, end as *mut u8) };
    assert!(claimed, "no room for a heap between {start:#x} and {end:#x}");
}
