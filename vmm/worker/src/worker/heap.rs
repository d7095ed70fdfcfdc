//! What zygote and workers allocate from: the C library's heap, and for the
//! first of what a worker allocates a region that the zygote never wrote to.
//!
//! Each page that a worker writes to and the zygote has too is a fault and a
//! copy. What the zygote's heap has free lies scattered between what it keeps,
//! so a worker's first hundred small blocks were a dozen such pages, half of
//! them while somebody waited for the run. In the region they lie side by side,
//! nothing is copied, and its first pages are put in place by one call.
//!
//! A block of the region that is given back is used again only if it is the
//! last: there is nothing to be gained for a process that serves one run. One
//! that serves many has the C library's heap from the moment the region is used
//! up.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A page of the host, in bytes.
const PAGE: usize = 4096;
/// The region's size: the room that orders are received in, and a small run's
/// blocks twice over.
const REGION_BYTES: usize = 128 << 10;
/// Larger blocks that are to be zero are the kernel's: those are so unwritten.
const ZEROED_BYTES_MAX: usize = PAGE;

/// All zero, so that it is no part of the executable, and closed.
static REGION: Region<REGION_BYTES> = Region::closed();

/// Has this process, which has just been forked, allocate from the region.
pub(crate) fn open() {
    REGION.open();
}

/// Puts the region's next bytes in place.
pub(crate) fn reach(bytes: usize) {
    REGION.reach(bytes);
}

/// The executable's global allocator.
#[derive(Debug)]
pub struct Heap;

// SAFETY: a block is one of the C library's or one of the region's, and goes
// back to where it is from.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract, handed on.
        REGION.take(layout).unwrap_or_else(|| unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() <= ZEROED_BYTES_MAX
            && let Some(block) = REGION.take(layout)
        {
            // SAFETY: the block is of this size. What lay there before may have
            // been given back.
            unsafe { block.write_bytes(0, layout.size()) };
            return block;
        }
        // SAFETY: the caller's contract, handed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if REGION.offset(block).is_some() {
            REGION.resize(block, layout.size(), 0);
        } else {
            // SAFETY: the caller's contract; it is the C library's.
            unsafe { System.dealloc(block, layout) }
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        if REGION.offset(block).is_none() {
            // SAFETY: the caller's contract; it is the C library's.
            return unsafe { System.realloc(block, layout, bytes) };
        }
        if REGION.resize(block, layout.size(), bytes) {
            return block;
        }
        // SAFETY: `bytes` makes a layout with this alignment, by the caller's
        // contract; both blocks hold what is copied, and are two.
        unsafe {
            let moved = self.alloc(Layout::from_size_align_unchecked(bytes, layout.align()));
            if !moved.is_null() {
                moved.copy_from_nonoverlapping(block, layout.size().min(bytes));
            }
            moved
        }
    }
}

/// Memory that is given out from its start on.
#[repr(C, align(4096))]
struct Region<const BYTES: usize> {
    /// How many of its bytes, the last ones, are in no block. In its first
    /// page, which has to be written to anyway.
    left: AtomicUsize,
    bytes: UnsafeCell<[u8; BYTES]>,
}

// SAFETY: by `left` each byte is in one block at most, and what blocks hold is
// for their owners to keep apart.
unsafe impl<const BYTES: usize> Sync for Region<BYTES> {}

impl<const BYTES: usize> Region<BYTES> {
    const fn closed() -> Self {
        Self { left: AtomicUsize::new(0), bytes: UnsafeCell::new([0; BYTES]) }
    }

    fn open(&self) {
        self.left.store(BYTES, Ordering::Relaxed);
    }

    fn start(&self) -> *mut u8 {
        self.bytes.get().cast()
    }

    /// If the kernel does not take the advice, pages come one by one.
    fn reach(&self, bytes: usize) {
        let left = self.left.load(Ordering::Relaxed);
        let next = self.start().wrapping_add(BYTES - left);
        let page = next.wrapping_sub(next.addr() % PAGE);
        // SAFETY: advice about pages that this region has some of.
        unsafe { libc::madvise(page.cast(), bytes.min(left), libc::MADV_POPULATE_WRITE) };
    }

    /// A block, if there is room.
    fn take(&self, layout: Layout) -> Option<*mut u8> {
        let mut start = 0;
        let mut after = |left: usize| {
            let next = self.start().addr() + BYTES - left;
            start = next.checked_next_multiple_of(layout.align())?;
            left.checked_sub(start - next)?.checked_sub(layout.size())
        };
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, &mut after).ok()?;
        Some(self.start().with_addr(start))
    }

    /// Where in the region a block lies, if it does.
    fn offset(&self, block: *mut u8) -> Option<usize> {
        let offset = block.addr().checked_sub(self.start().addr())?;
        (offset < BYTES).then_some(offset)
    }

    /// Moves the end of a block of the region, which only the last one's can be.
    fn resize(&self, block: *mut u8, bytes: usize, to: usize) -> bool {
        let left = |bytes| BYTES.checked_sub(self.offset(block)?)?.checked_sub(bytes);
        let (Some(from), Some(to)) = (left(bytes), left(to)) else { return false };
        self.left.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened() -> Box<Region<{ 4 * PAGE }>> {
        let region = Box::new(Region::closed());
        region.open();
        region
    }

    fn layout(bytes: usize, align: usize) -> Layout {
        Layout::from_size_align(bytes, align).unwrap()
    }

    #[test]
    fn a_region_that_nobody_opened_gives_nothing() {
        let region = Box::new(Region::<PAGE>::closed());
        assert_eq!(region.take(layout(1, 1)), None);
    }

    #[test]
    fn blocks_lie_one_behind_the_other_as_they_are_aligned_until_the_region_is_used_up() {
        let region = opened();
        let layouts = [(1, 1), (24, 8), (3, 2), (100, 64), (1, 1), (PAGE, PAGE), (16, 16)];
        let mut end = region.start().addr();
        for (bytes, align) in layouts {
            let block = region.take(layout(bytes, align)).unwrap();
            assert_eq!(block.addr(), end.next_multiple_of(align));
            assert!(region.offset(block).is_some());
            end = block.addr() + bytes;
        }
        let left = region.start().addr() + 4 * PAGE - end;
        assert_eq!(region.take(layout(left + 1, 1)), None);
        assert_eq!(region.take(layout(1, 64 * PAGE)), None);
        assert_eq!(region.take(layout(left, 1)).unwrap().addr(), end);
        assert_eq!(region.take(layout(1, 1)), None);
    }

    #[test]
    fn the_last_block_moves_its_end_and_no_other_does() {
        let region = opened();
        let first = region.take(layout(100, 4)).unwrap();
        let last = region.take(layout(100, 4)).unwrap();
        assert!(!region.resize(first, 100, 200) && !region.resize(first, 100, 0));
        assert!(region.resize(last, 100, 1000));
        assert!(!region.resize(last, 1000, 4 * PAGE), "past the region's end");
        assert!(region.resize(last, 1000, 0), "given back");
        assert_eq!(region.take(layout(8, 4)).unwrap(), last);
    }

    #[test]
    fn what_the_region_holds_survives_its_move_to_the_c_librarys_heap() {
        // This process's own region, which nothing else here allocates from.
        open();
        let heap = Heap;
        let small = layout(64, 16);
        // SAFETY: blocks are used as their layouts say, and given back once.
        unsafe {
            let block = heap.alloc(small);
            assert!(REGION.offset(block).is_some());
            block.write_bytes(7, 64);
            let another = heap.alloc(small);
            let grown = heap.realloc(block, small, 4096);
            assert!(REGION.offset(grown).is_some() && grown != block, "it was not the last");
            let huge = heap.realloc(grown, layout(4096, 16), 2 * REGION_BYTES);
            assert_eq!(REGION.offset(huge), None);
            assert_eq!(std::slice::from_raw_parts(huge, 64), [7; 64]);
            heap.dealloc(huge, layout(2 * REGION_BYTES, 16));
            heap.dealloc(another, small);
            // The place of a block that was given back is not zero any more.
            let dirty = heap.alloc(small);
            dirty.write_bytes(7, 64);
            heap.dealloc(dirty, small);
            let zeroed = heap.alloc_zeroed(small);
            assert_eq!(zeroed, dirty);
            assert_eq!(std::slice::from_raw_parts(zeroed, 64), [0; 64]);
        }
    }
}
