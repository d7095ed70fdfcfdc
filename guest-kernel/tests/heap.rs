//! The guest's heap on the host, over memory that is zero as a VM's RAM is at
//! its start.

#![allow(clippy::unwrap_used, missing_docs)]

use std::alloc::Layout;
use std::cell::Cell;
use std::collections::BTreeMap;

#[path = "../src/heap.rs"]
mod heap;

use heap::Heap;

const PAGE: usize = 4096;

thread_local! {
    /// How often this thread's heap has asked for the rest of its memory.
    static ASKED: Cell<usize> = const { Cell::new(0) };
    /// Where that begins, and how much it is.
    static LATER: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// What a heap asks by, which must not have touched what it asks for.
fn ask() {
    let (start, bytes) = LATER.get();
    assert!(holds(start, bytes, 0), "touched before it was asked for");
    ASKED.set(ASKED.get() + 1);
}

/// RAM: zero, page-aligned, and looked at only through pointers.
struct Ram {
    start: *mut u8,
    layout: Layout,
}

impl Ram {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, PAGE).unwrap();
        // SAFETY: the size is not zero.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        assert!(!start.is_null());
        Self { start, layout }
    }

    fn heap(&self) -> Heap {
        self.heap_with_later(self.layout.size() / 2)
    }

    /// Of which so many bytes are there from the start.
    fn heap_with_later(&self, bytes: usize) -> Heap {
        let mut heap = Heap::new();
        ASKED.set(0);
        LATER.set((self.start as usize + bytes, self.layout.size() - bytes));
        let [later, end] = [bytes, self.layout.size()].map(|at| self.start.wrapping_add(at));
        // SAFETY: zero, and nothing else's.
        assert!(unsafe { heap.claim(self.start, later, end, ask) });
        heap
    }

    /// How many pages have a byte that is not zero.
    fn written_pages(&self) -> usize {
        let pages = self.layout.size() / PAGE;
        (0..pages).filter(|page| (0..PAGE).any(|byte| self.byte(page * PAGE + byte) != 0)).count()
    }

    fn byte(&self, at: usize) -> u8 {
        assert!(at < self.layout.size());
        // SAFETY: within the memory.
        unsafe { self.start.add(at).read_volatile() }
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.start, self.layout) }
    }
}

/// splitmix64: any spread will do, and it repeats.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Mostly small, sometimes pages, seldom many.
    fn bytes(&mut self) -> usize {
        1 + match self.below(20) {
            0 => self.below(400_000),
            1..4 => self.below(40_000),
            4..9 => self.below(3_000),
            _ => self.below(200),
        }
    }

    fn layout(&mut self) -> Layout {
        let align = match self.below(16) {
            0 => 1 << self.below(13),
            _ => 1 << self.below(5),
        };
        Layout::from_size_align(self.bytes(), align).unwrap()
    }
}

struct Block {
    layout: Layout,
    fill: u8,
}

fn holds(block: usize, bytes: usize, fill: u8) -> bool {
    // SAFETY: a live block of at least this size, all of it written or zero.
    let bytes = unsafe { std::slice::from_raw_parts(block as *const u8, bytes) };
    bytes.iter().fold(0, |differs, byte| differs | (byte ^ fill)) == 0
}

fn fill(block: usize, layout: Layout, with: u8) {
    // SAFETY: a live block of this layout.
    unsafe { std::ptr::write_bytes(block as *mut u8, with, layout.size()) };
}

/// Random calls against a model: blocks lie within RAM, aligned, apart from
/// each other, keep what was put there, and are zero where that was asked for.
fn check(seed: u64, ram_bytes: usize, steps: usize) -> usize {
    let ram = Ram::new(ram_bytes);
    let mut heap = ram.heap();
    let mut random = Random(seed);
    let mut blocks: BTreeMap<usize, Block> = BTreeMap::new();
    let mut refused = 0;
    for step in 0..steps {
        let picked = match blocks.len() {
            0 => None,
            count => blocks.keys().nth(random.below(count)).copied(),
        };
        // Grows for a while, then shrinks, over and over.
        let frees = if step / 200 % 2 == 0 { 3 } else { 6 };
        match (random.below(10), picked) {
            (choice, Some(at)) if choice < frees => {
                let Block { layout, fill } = blocks.remove(&at).unwrap();
                assert!(holds(at, layout.size(), fill), "seed {seed} step {step}: lost its bytes");
                // SAFETY: a live block of this layout.
                unsafe { heap.dealloc(at as *mut u8, layout) };
            }
            (choice, Some(at)) if choice < frees + 2 => {
                let Block { layout, fill: old } = blocks.remove(&at).unwrap();
                let bytes = match random.below(3) {
                    0 => random.bytes(),
                    _ => layout.size() + random.below(2 * layout.size()) + 1,
                };
                // SAFETY: a live block of this layout; the size is not zero.
                let moved = unsafe { heap.realloc(at as *mut u8, layout, bytes) } as usize;
                if moved == 0 {
                    refused += 1;
                    blocks.insert(at, Block { layout, fill: old });
                    continue;
                }
                let kept = layout.size().min(bytes);
                assert!(holds(moved, kept, old), "seed {seed} step {step}: not copied");
                let layout = Layout::from_size_align(bytes, layout.align()).unwrap();
                admit(&ram, &mut blocks, moved, layout, &mut random);
            }
            _ => {
                let layout = random.layout();
                let zeroed = random.below(2) == 0;
                // SAFETY: the layout's size is not zero.
                let block =
                    unsafe { if zeroed { heap.alloc_zeroed(layout) } else { heap.alloc(layout) } }
                        as usize;
                if block == 0 {
                    refused += 1;
                    continue;
                }
                let known = heap.unwritten();
                if known.block != 0 {
                    assert!(!zeroed && known.block == block && known.bytes == layout.size());
                    let rest = known.bytes - known.dirty_bytes;
                    assert!(holds(block + known.dirty_bytes, rest, 0), "seed {seed} step {step}");
                }
                let is_zero = !zeroed || holds(block, layout.size(), 0);
                assert!(is_zero, "seed {seed} step {step}: {layout:?} is not zero");
                admit(&ram, &mut blocks, block, layout, &mut random);
            }
        }
    }
    for (at, Block { layout, fill }) in blocks {
        assert!(holds(at, layout.size(), fill), "seed {seed}: lost its bytes");
    }
    refused
}

fn admit(
    ram: &Ram,
    blocks: &mut BTreeMap<usize, Block>,
    at: usize,
    layout: Layout,
    random: &mut Random,
) {
    let start = ram.start as usize;
    assert!(at >= start && at + layout.size() <= start + ram.layout.size(), "outside RAM");
    assert!(at.is_multiple_of(layout.align()), "misaligned");
    if let Some((below, block)) = blocks.range(..=at).next_back() {
        assert!(below + block.layout.size() <= at, "two blocks overlap");
    }
    if let Some((above, _)) = blocks.range(at..).next() {
        assert!(at + layout.size() <= *above, "two blocks overlap");
    }
    let with = 1 + random.below(255) as u8;
    fill(at, layout, with);
    blocks.insert(at, Block { layout, fill: with });
}

#[test]
fn every_zeroed_block_reads_as_zero_and_no_block_loses_its_bytes() {
    for seed in 0..6 {
        assert_eq!(check(seed, 64 << 20, 1_500), 0, "seed {seed}: refused with room to spare");
    }
}

#[test]
fn the_same_holds_where_memory_runs_out() {
    let refused: usize = (100..110).map(|seed| check(seed, 1 << 20, 1_500)).sum();
    assert!(refused > 0, "memory never ran out");
}

#[test]
fn a_large_zeroed_block_touches_its_ends_alone() {
    let ram = Ram::new(8 << 20);
    let mut heap = ram.heap();
    let layout = Layout::from_size_align(4 << 20, 1).unwrap();
    // As good as zero, for a page count that sees what is written.
    // SAFETY: the layout's size is not zero; the block is then live.
    unsafe {
        let small = heap.alloc(Layout::new::<u64>());
        small.cast::<u64>().write(1);
        let block = heap.alloc_zeroed(layout);
        assert!(holds(block as usize, layout.size(), 0));
    }
    // The lower arena's lists, the upper one's, and what follows the block.
    assert!(ram.written_pages() <= 4, "{} pages", ram.written_pages());
}

#[test]
fn what_is_known_to_be_unwritten_is_forgotten_with_the_next_use() {
    let ram = Ram::new(8 << 20);
    let mut heap = ram.heap();
    let large = Layout::from_size_align(1 << 20, 1).unwrap();
    let small = Layout::new::<u64>();
    // SAFETY: the sizes are not zero; the blocks are live.
    unsafe {
        let other = heap.alloc(small);
        for forget in 0..4 {
            let block = heap.alloc(large);
            let known = heap.unwritten();
            assert_eq!((known.block, known.bytes), (block as usize, large.size()));
            assert!(known.dirty_bytes <= PAGE);
            match forget {
                0 => drop(heap.alloc(small)),
                1 => drop(heap.alloc_zeroed(large)),
                2 => drop(heap.realloc(block, large, 2 << 20)),
                _ => heap.dealloc(other, small),
            }
            assert_eq!(heap.unwritten().block, 0, "{forget}");
        }
    }
}

#[test]
fn small_blocks_lie_together_whatever_large_ones_there_are() {
    let ram = Ram::new(8 << 20);
    let mut heap = ram.heap();
    for _ in 0..40 {
        // SAFETY: the sizes are not zero; the blocks are live.
        unsafe {
            let small = heap.alloc(Layout::from_size_align(1000, 8).unwrap());
            fill(small as usize, Layout::from_size_align(1000, 8).unwrap(), 1);
            heap.alloc(Layout::from_size_align(64 * 1024, 1).unwrap());
            assert!((small as usize - ram.start as usize) < 64 * 1024);
        }
    }
}

#[test]
fn a_block_at_the_end_grows_where_it_is() {
    let ram = Ram::new(8 << 20);
    let mut heap = ram.heap();
    let mut layout = Layout::from_size_align(64 * 1024, 1).unwrap();
    // SAFETY: live blocks with their layouts.
    unsafe {
        let block = heap.alloc(layout);
        for _ in 0..100 {
            let bytes = layout.size() + 65_536;
            assert_eq!(heap.realloc(block, layout, bytes), block);
            layout = Layout::from_size_align(bytes, 1).unwrap();
        }
    }
}

#[test]
fn the_upper_part_is_asked_for_once_and_before_it_is_touched() {
    const START: usize = 4 << 20;
    const LARGE: Layout = Layout::new::<[u8; 50_000]>();
    let ram = Ram::new(32 << 20);
    // Block by block, by one that grows where it is, and by the first block.
    for (blocks, bytes) in [(200, 50_000), (1, 8 << 20), (0, 8 << 20)] {
        let mut heap = ram.heap_with_later(START);
        let wanted = Layout::from_size_align(bytes, 8).unwrap();
        let mut end = 0;
        // SAFETY: the sizes are not zero; the blocks are live.
        unsafe {
            for _ in 0..blocks {
                let block = heap.alloc(LARGE);
                fill(block as usize, LARGE, 1);
                end = block as usize + LARGE.size() - ram.start as usize;
                assert!(ASKED.get() == 1 || end <= START, "a block where nothing is yet");
                if blocks == 1 {
                    assert_eq!(ASKED.get(), 0, "asked without need");
                    assert_eq!(heap.realloc(block, LARGE, bytes), block);
                    end = block as usize + bytes - ram.start as usize;
                }
            }
            if blocks == 0 {
                end = heap.alloc(wanted) as usize + bytes - ram.start as usize;
            }
            assert!(end > START && ASKED.get() == 1, "{blocks}: {end}, asked {}", ASKED.get());
            // There is room up to the end then, and nobody asks again.
            assert!(!heap.alloc(Layout::from_size_align(16 << 20, 8).unwrap()).is_null());
        }
        assert_eq!(ASKED.get(), 1);
        // For the next heap.
        fill(ram.start as usize, ram.layout, 0);
    }
}

#[test]
fn absurd_sizes_are_refused() {
    let ram = Ram::new(1 << 20);
    let mut heap = ram.heap();
    // SAFETY: the layouts' sizes are not zero; the block is live.
    unsafe {
        for bytes in [1 << 20, 1 << 40, isize::MAX as usize] {
            let layout = Layout::from_size_align(bytes, 1).unwrap();
            assert!(heap.alloc(layout).is_null());
            assert!(heap.alloc_zeroed(layout).is_null());
        }
        let layout = Layout::new::<u64>();
        let block = heap.alloc(layout);
        assert!(heap.realloc(block, layout, isize::MAX as usize).is_null());
        assert!(heap.realloc(block, layout, usize::MAX / 2 + 2).is_null());
    }
}
