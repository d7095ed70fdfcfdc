//! A program that is within its bounds loads within a guest's memory.
#![allow(clippy::unwrap_used, missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use forge_guest_init::shape::FUNCTION_BYTES_MAX;
use forge_protocol::limits::RunLimits;

/// The system's allocator, and how much of it each thread has and had at most.
struct Counted;

thread_local! {
    static HAS: Cell<usize> = const { Cell::new(0) };
    static HAD: Cell<usize> = const { Cell::new(0) };
}

fn takes(bytes: usize) {
    HAS.set(HAS.get().wrapping_add(bytes));
    HAD.set(HAD.get().max(HAS.get()));
}

fn gives(bytes: usize) {
    HAS.set(HAS.get().saturating_sub(bytes));
}

// SAFETY: every method is the system's own.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        takes(layout.size());
        // SAFETY: the caller's contract, handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        gives(layout.size());
        // SAFETY: the caller's contract, handed on.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // Where it does not stay, both are there for a moment.
        takes(bytes);
        gives(layout.size());
        // SAFETY: the caller's contract, handed on.
        unsafe { System.realloc(block, layout, bytes) }
    }
}

#[global_allocator]
static COUNTED: Counted = Counted;

fn number(mut number: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

fn counted(items: &[Vec<u8>]) -> Vec<u8> {
    [number(items.len()), items.concat()].concat()
}

fn with_length(bytes: Vec<u8>) -> Vec<u8> {
    [number(bytes.len()), bytes].concat()
}

const I32: u8 = 0x7f;
const HUNDRED: usize = 100;

/// A module of functions whose bytes are `piece`, again and again; function 0 has a
/// hundred results.
fn module(piece: &[u8], functions: usize, function_bytes: usize) -> Vec<u8> {
    let results = [vec![0x60, 0], counted(&vec![vec![I32]; HUNDRED])].concat();
    let types = counted(&[results, vec![0x60, 0, 0]]);
    let mut of_type = vec![vec![1]; functions + 1];
    of_type[0] = vec![0];
    // A variable of each integer type, and the end.
    let (before, end) = ([2, 1, I32, 1, 0x7e], [0x0b]);
    let pieces = (function_bytes - before.len() - end.len()) / piece.len();
    let body = with_length([&before[..], &piece.repeat(pieces), &end].concat());
    let mut bodies = vec![body; functions + 1];
    bodies[0] = with_length([&[0][..], &[0x41, 0].repeat(HUNDRED), &end].concat());
    let mut module = b"\0asm\x01\0\0\0".to_vec();
    for (id, content) in [
        (1, types),
        (3, counted(&of_type)),
        (5, vec![1, 0, 1]),
        (6, vec![1, I32, 1, 0x41, 0, 0x0b]),
        (7, [&[2, 6][..], b"memory", &[2, 0, 6], b"_start", &[0, 1]].concat()),
        (10, counted(&bodies)),
    ] {
        module.push(id);
        module.extend(with_length(content));
    }
    module
}

#[test]
fn a_program_at_its_bounds_is_compiled_in_what_its_guest_has() {
    let limits = RunLimits::default();
    // What is left of the 96 MiB that a guest with these limits gets, beside the program.
    const HEAP_BYTES: usize = 84 << 20;
    let function_bytes = FUNCTION_BYTES_MAX as usize;
    let functions = limits.program_bytes as usize / function_bytes;
    let values = [0x10, 0];
    for piece in [
        // Conditions over a hundred values, with an arm for each case and with one.
        [&values[..], &[0x04, 0x40, 0x05, 0x0b].repeat(HUNDRED)].concat(),
        [&values[..], &[0x04, 0x40, 0x0b].repeat(HUNDRED)].concat(),
        // Branches, a loop in each arm, and variables that are set.
        [&values[..], &[0x0d, 0].repeat(HUNDRED)].concat(),
        [&values[..], &[0x04, 0x40, 0x03, 0x40, 0x0b, 0x05, 0x0b].repeat(HUNDRED)].concat(),
        [&values[..], &[0x24, 0].repeat(HUNDRED)].concat(),
        // Calls without values, stores of constants, blocks.
        vec![0x10, 1],
        vec![0x41, 0, 0x42, 0, 0x3c, 0, 0],
        vec![0x02, 0x40, 0x0c, 0, 0x0b],
    ] {
        let module = module(&piece, functions, function_bytes);
        let before = HAS.get();
        HAD.set(before);
        forge_guest_init::check(&limits, &module).unwrap();
        let took = HAD.get() - before;
        assert!(took < HEAP_BYTES, "{took} bytes, for {piece:x?}");
    }
}
