//! The heap: talc over RAM, which it is given piece by piece.
//!
//! Each page of a VM costs when it is first touched, and RAM is zero when the
//! VM starts. So talc gets a page only when what it has does not do, and what
//! lies above is known to be zero: a zeroed block that reaches up there need
//! not be written there.
//!
//! The upper part of RAM is not there until somebody asks for it, which the
//! heap does before it gives talc the first of it.
//!
//! There are two arenas. Small blocks lie together in the lower one, so that
//! what a run touches is compact; large ones, of which often only some pages
//! are used, lie above, and so do small ones for which there is no room.
//!
//! ```text
//!  start          boundary                              later   end
//!  | small blocks … |   | large blocks …      |           ┆       |
//!                 top ▲                   top ▲    zero, talc knows nothing of it
//! ```
//!
//! Nothing here depends on the guest, so `tests/heap.rs` checks it on the host.

use core::alloc::Layout;
use core::ptr::{self, NonNull, null_mut};

use talc::DefaultBinning;
use talc::base::binning::Binning;
use talc::base::{CHUNK_UNIT, Talc};
use talc::source::Source;

const PAGE_BYTES: usize = 4096;
/// The room of the lower arena: what compiling and running a program of a few
/// kilobytes takes.
const SMALL_ARENA_BYTES: usize = 128 * 1024;
/// A block from here on is a large one, in bytes: half a page of linear memory.
pub(crate) const LARGE_BYTES_MIN: usize = 32 * 1024;

/// What talc writes at the start of a free stretch, in bytes: two list
/// pointers, a bin, and a size (talc 5.1, `base/chunk.rs`). At its end it
/// writes a size of [`TAIL_BYTES`], in the place where a block has its tag,
/// behind its last byte.
const GAP_HEAD_BYTES: usize = CHUNK_UNIT;
/// What talc keeps behind each block's last byte.
const TAIL_BYTES: usize = size_of::<usize>();
const _: () = assert!(GAP_HEAD_BYTES == 4 * size_of::<usize>());

/// The size of the chunk in which talc places a block of `bytes`.
const fn chunk_bytes(bytes: usize) -> usize {
    (bytes + TAIL_BYTES).next_multiple_of(CHUNK_UNIT)
}

/// Memory that talc has not been given yet: zero from `top` to `end`.
#[derive(Debug)]
struct Fresh {
    /// Where talc's part ends. `None` before it has any.
    top: Option<NonNull<u8>>,
    /// Where the arena starts.
    start: *mut u8,
    /// Where the arena ends.
    end: *mut u8,
    /// From here on it is there once it has been asked for; `end` if it has.
    later: *mut u8,
    /// Asks for the part that begins at `later`.
    ask: fn(),
    /// `top` before it was moved last.
    before: usize,
}

impl Fresh {
    /// The page boundary at or above `address`, within the arena.
    fn boundary(&self, address: usize) -> *mut u8 {
        let target = address.next_multiple_of(PAGE_BYTES).min(self.end as usize);
        self.start.wrapping_add(target - self.start as usize)
    }

    /// Has what lies below `target` be there: talc writes where its part ends.
    fn reach(&mut self, target: *mut u8) {
        if target > self.later {
            (self.ask)();
            self.later = self.end;
        }
    }

    /// Gives talc memory so that it has `bytes` free at its end.
    fn give<B: Binning>(talc: &mut Talc<Self, B>, bytes: usize) -> Result<(), ()> {
        match talc.source.top {
            None => {
                let start = talc.source.start;
                let metadata = talc::min_first_heap_size::<B>();
                let target = (start as usize)
                    .checked_add(metadata)
                    .and_then(|end| end.checked_add(bytes))
                    .ok_or(())?;
                let target = talc.source.boundary(target);
                talc.source.before = start as usize;
                talc.source.reach(target);
                // SAFETY: the arena is ours (`Arena::new`), and nothing of it
                // was given before.
                let top = unsafe { talc.claim(start, target as usize - start as usize) };
                talc.source.top = Some(top.ok_or(())?);
            }
            Some(top) => {
                // SAFETY: `top` is where talc's only heap ends.
                let free = unsafe { talc.reserved(top) }.up_to;
                let target = (free.as_ptr() as usize).checked_add(bytes).ok_or(())?;
                let target = talc.source.boundary(target.max(top.as_ptr() as usize + 1));
                if target <= top.as_ptr() {
                    return Err(());
                }
                talc.source.before = top.as_ptr() as usize;
                talc.source.reach(target);
                // SAFETY: what lies between is of the arena and was not given
                // before.
                let moved = unsafe { talc.extend(top, target) };
                if moved == top {
                    return Err(());
                }
                talc.source.top = Some(moved);
            }
        }
        Ok(())
    }
}

// SAFETY: it uses the talc it is handed and no other.
unsafe impl Source for Fresh {
    fn acquire<B: Binning>(talc: &mut Talc<Self, B>, layout: Layout) -> Result<(), ()> {
        // Room for aligning it, and for what may be left over.
        let slack = layout.align().max(CHUNK_UNIT) + CHUNK_UNIT;
        let bytes = layout.size().checked_add(slack + TAIL_BYTES + CHUNK_UNIT).ok_or(())?;
        Self::give(talc, bytes)
    }
}

/// A stretch of memory and the talc that divides it.
struct Arena {
    talc: Talc<Fresh, DefaultBinning>,
}

impl Arena {
    const fn empty() -> Self {
        let (start, end, later) = (null_mut(), null_mut(), null_mut());
        let ask = || ();
        Self { talc: Talc::new(Fresh { top: None, start, end, later, ask, before: 0 }) }
    }

    /// # Safety
    /// As [`Heap::claim`].
    unsafe fn claim(&mut self, start: *mut u8, later: *mut u8, end: *mut u8, ask: fn()) {
        let fresh = &mut self.talc.source;
        (fresh.start, fresh.later, fresh.end, fresh.ask) = (start, later, end, ask);
    }

    fn top(&self) -> usize {
        match self.talc.source.top {
            Some(top) => top.as_ptr() as usize,
            None => self.talc.source.start as usize,
        }
    }

    fn alloc(&mut self, layout: Layout) -> *mut u8 {
        if self.talc.source.start.is_null() {
            return null_mut();
        }
        // SAFETY: no layout that reaches an allocator has size zero.
        unsafe { self.talc.allocate(layout) }.map_or(null_mut(), NonNull::as_ptr)
    }

    /// A new block, and how many of its bytes, from the first on, may be other
    /// than zero.
    fn alloc_and_dirty(&mut self, layout: Layout) -> (*mut u8, usize) {
        self.talc.source.before = self.top();
        let block = self.alloc(layout);
        // Above `before` talc has been given memory once, for this very block:
        // it has written the head of a free stretch that began at the block
        // or below it, and a tail that lies behind the block.
        let used = self.talc.source.before.saturating_sub(block as usize);
        (block, used.max(GAP_HEAD_BYTES).min(layout.size()))
    }

    /// Changes a block's size where it is; whether that could be done.
    ///
    /// # Safety
    /// `block` is a block of this arena with this layout; `bytes` is not zero.
    unsafe fn resize(&mut self, block: *mut u8, layout: Layout, bytes: usize) -> bool {
        // SAFETY: the caller's contract.
        if unsafe { self.talc.try_realloc_in_place(block, layout, bytes) } {
            return true;
        }
        let Some(top) = self.talc.source.top else { return false };
        // Nothing but free memory above it: then there may be more.
        // SAFETY: `top` is where talc's only heap ends.
        let free = unsafe { self.talc.reserved(top) }.up_to;
        let end = block.wrapping_add(chunk_bytes(layout.size()));
        if free.as_ptr() != end || bytes > isize::MAX as usize {
            return false;
        }
        let more = chunk_bytes(bytes) - chunk_bytes(layout.size());
        Fresh::give(&mut self.talc, more + CHUNK_UNIT).is_ok()
            // SAFETY: the caller's contract.
            && unsafe { self.talc.try_realloc_in_place(block, layout, bytes) }
    }
}

/// The heap.
pub(crate) struct Heap {
    small: Arena,
    large: Arena,
    boundary: *mut u8,
    unwritten: Unwritten,
}

/// A block of which all but the first bytes have never been written. Only the
/// one that was allocated last is known, and only until the heap is used
/// again.
#[derive(Clone, Copy)]
pub(crate) struct Unwritten {
    /// Where the block starts; 0 for none.
    pub(crate) block: usize,
    /// Its size.
    pub(crate) bytes: usize,
    /// How much of it may be other than zero.
    pub(crate) dirty_bytes: usize,
}

impl Unwritten {
    /// No block.
    pub(crate) const NONE: Self = Self { block: 0, bytes: 0, dirty_bytes: 0 };
}

impl Heap {
    /// A heap without memory.
    pub(crate) const fn new() -> Self {
        Self {
            small: Arena::empty(),
            large: Arena::empty(),
            boundary: null_mut(),
            unwritten: Unwritten::NONE,
        }
    }

    /// The block that was allocated last, if the heap has not been used since
    /// and the block is a large one.
    pub(crate) fn unwritten(&self) -> Unwritten {
        self.unwritten
    }

    /// Gives the heap its memory; whether it is enough to be one.
    ///
    /// # Safety
    /// Called once; `start..end` is valid, all zero, and used by nothing else
    /// from here on; what is not below `later` is so once `ask` was called.
    pub(crate) unsafe fn claim(
        &mut self,
        start: *mut u8,
        later: *mut u8,
        end: *mut u8,
        ask: fn(),
    ) -> bool {
        let bytes = (later as usize).saturating_sub(start as usize);
        if bytes < 2 * SMALL_ARENA_BYTES || later > end {
            return false;
        }
        self.boundary = start.wrapping_add(SMALL_ARENA_BYTES);
        // SAFETY: the caller's contract; the two stretches are apart.
        unsafe {
            self.small.claim(start, self.boundary, self.boundary, ask);
            self.large.claim(self.boundary, later, end, ask);
        }
        true
    }

    /// As [`core::alloc::GlobalAlloc::alloc`].
    ///
    /// # Safety
    /// Likewise.
    pub(crate) unsafe fn alloc(&mut self, layout: Layout) -> *mut u8 {
        self.place(layout).0
    }

    /// As [`core::alloc::GlobalAlloc::alloc_zeroed`].
    ///
    /// # Safety
    /// Likewise.
    pub(crate) unsafe fn alloc_zeroed(&mut self, layout: Layout) -> *mut u8 {
        let (block, dirty) = self.place(layout);
        // It is about to be what it is said to be; nothing is left to know.
        self.unwritten = Unwritten::NONE;
        if !block.is_null() {
            // SAFETY: within the block.
            unsafe { ptr::write_bytes(block, 0, dirty) };
        }
        block
    }

    fn place(&mut self, layout: Layout) -> (*mut u8, usize) {
        self.unwritten = Unwritten::NONE;
        let bytes = layout.size();
        if bytes < LARGE_BYTES_MIN {
            let placed = self.small.alloc_and_dirty(layout);
            if !placed.0.is_null() {
                return placed;
            }
        }
        let (block, dirty_bytes) = self.large.alloc_and_dirty(layout);
        if bytes >= LARGE_BYTES_MIN && !block.is_null() {
            self.unwritten = Unwritten { block: block as usize, bytes, dirty_bytes };
        }
        (block, dirty_bytes)
    }

    /// As [`core::alloc::GlobalAlloc::dealloc`].
    ///
    /// # Safety
    /// Likewise.
    pub(crate) unsafe fn dealloc(&mut self, block: *mut u8, layout: Layout) {
        self.unwritten = Unwritten::NONE;
        // SAFETY: the caller's contract; the block is of this arena.
        unsafe { self.arena_of(block).talc.deallocate(block, layout) }
    }

    /// As [`core::alloc::GlobalAlloc::realloc`].
    ///
    /// # Safety
    /// Likewise.
    pub(crate) unsafe fn realloc(
        &mut self,
        block: *mut u8,
        layout: Layout,
        bytes: usize,
    ) -> *mut u8 {
        self.unwritten = Unwritten::NONE;
        // A block that has become large leaves the small ones.
        let stays = block >= self.boundary || bytes < LARGE_BYTES_MIN;
        // SAFETY: the caller's contract; the block is of this arena.
        if stays && unsafe { self.arena_of(block).resize(block, layout, bytes) } {
            return block;
        }
        let Ok(wanted) = Layout::from_size_align(bytes, layout.align()) else {
            return null_mut();
        };
        // SAFETY: the caller's contract; the new block is another one, and at
        // least as long as what is copied.
        unsafe {
            let moved = self.alloc(wanted);
            if !moved.is_null() {
                ptr::copy_nonoverlapping(block, moved, layout.size().min(bytes));
                // Which also forgets the new block: it has been written.
                self.dealloc(block, layout);
            }
            moved
        }
    }

    fn arena_of(&mut self, block: *mut u8) -> &mut Arena {
        if block < self.boundary { &mut self.small } else { &mut self.large }
    }
}
