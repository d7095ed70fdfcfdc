//! The global allocator: [`Heap`](crate::heap::Heap) over all RAM above the
//! image; and what it can tell `memset`.
//!
//! wasmi makes a linear memory by allocating it and then writing zeros all
//! over it, which touches each of its pages. While it instantiates a module,
//! [`instantiating`], a fill with zeros of the large block that was allocated
//! last leaves out what was never written.

use core::alloc::{GlobalAlloc, Layout};
use core::cell::{Cell, UnsafeCell};

use crate::heap::{Heap, Unwritten};

struct Global {
    heap: UnsafeCell<Heap>,
    /// Apart from the heap, as `memset` is also what the heap fills by.
    unwritten: Cell<Unwritten>,
    instantiating: Cell<bool>,
}

impl Global {
    /// Lets the heap do one thing. What was known of unwritten memory is not
    /// known any more, but of what it now allocated.
    fn with<R>(&self, work: impl FnOnce(&mut Heap) -> R) -> R {
        self.unwritten.set(Unwritten::NONE);
        // SAFETY: the one reference to the heap that there is at a time: it
        // calls nothing that allocates.
        let heap = unsafe { &mut *self.heap.get() };
        let done = work(heap);
        if self.instantiating.get() {
            self.unwritten.set(heap.unwritten());
        }
        done
    }
}

// SAFETY: there is one thread and there are no interrupts, so nothing can
// enter the allocator while it works.
unsafe impl Sync for Global {}

// SAFETY: every method is the heap's own.
unsafe impl GlobalAlloc for Global {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract, handed on.
        self.with(|heap| unsafe { heap.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract, handed on.
        self.with(|heap| unsafe { heap.alloc_zeroed(layout) })
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract, handed on.
        self.with(|heap| unsafe { heap.dealloc(block, layout) })
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: the caller's contract, handed on.
        self.with(|heap| unsafe { heap.realloc(block, layout, bytes) })
    }
}

#[global_allocator]
static GLOBAL: Global = Global {
    heap: UnsafeCell::new(Heap::new()),
    unwritten: Cell::new(Unwritten::NONE),
    instantiating: Cell::new(false),
};

/// How many bytes of a fill with zeros from `start` must be written: all, or
/// the first so many if the rest is zero anyway.
pub(crate) fn to_be_zeroed(start: usize, bytes: usize) -> usize {
    let known = GLOBAL.unwritten.replace(Unwritten::NONE);
    if known.block == start && bytes <= known.bytes { bytes.min(known.dirty_bytes) } else { bytes }
}

/// Says that a module is being instantiated, or no longer.
///
/// # Safety
/// While one is, a large block that is allocated and then filled with zeros
/// from its first byte is written by nothing between the two.
pub unsafe fn instantiating(is: bool) {
    GLOBAL.instantiating.set(is);
    GLOBAL.unwritten.set(Unwritten::NONE);
}

/// Gives the allocator its memory.
///
/// # Safety
/// Called once; `start..end` is mapped, writable, zero and used by nothing
/// else; from `later` on it is there once `ask` has been called.
pub(crate) unsafe fn claim(start: u64, later: u64, end: u64, ask: fn()) {
    let [from, later, to] = [start, later, end].map(|address| address as *mut u8);
    // SAFETY: the caller's contract; nothing has allocated yet.
    let claimed = GLOBAL.with(|heap| unsafe { heap.claim(from, later, to, ask) });
    assert!(claimed, "no room for a heap between {start:#x} and {end:#x}");
}
