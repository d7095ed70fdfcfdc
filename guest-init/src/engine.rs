//! How wasmi is configured: which WebAssembly a program may be written in,
//! and what bounds its execution.
//!
//! | proposal | | why |
//! |---|---|---|
//! | mutable globals, sign extension, saturating conversions, multi-value, bulk memory, reference types, tail calls, extended constants | on | what compilers emit by default |
//! | memory64, multi-memory | off | the ABI's pointers are 32 bits wide and mean the one exported memory |
//! | custom page sizes | off | `memory.grow` and the memory cap count in pages of 64 KiB |
//! | wide arithmetic | off | no compiler emits it unasked |
//! | SIMD, relaxed SIMD | not built in | glue code gains nothing, the guest image would grow; relaxed SIMD is not deterministic |
//! | exceptions, GC, threads, components | – | wasmi has none |
//!
//! Modules are compiled eagerly: lazily translated functions are charged to
//! the fuel of whoever calls them first, and fuel must repeat.

use forge_protocol::limits::RunLimits;
use wasmi::{CompilationMode, Config, StoreLimits, StoreLimitsBuilder};

use crate::shape::{MEMORIES_MAX, TABLE_ELEMENTS_MAX, TABLES_MAX};

/// The value stack a run starts with, in bytes, if it may have as much.
const STACK_BYTES_MIN: usize = 64 * 1024;

/// The configuration for a run with these limits.
#[must_use]
pub fn config(limits: &RunLimits) -> Config {
    let stack_bytes = limits.stack_bytes as usize;
    let mut config = Config::default();
    config
        .wasm_mutable_global(true)
        .wasm_sign_extension(true)
        .wasm_saturating_float_to_int(true)
        .wasm_multi_value(true)
        .wasm_bulk_memory(true)
        .wasm_reference_types(true)
        .wasm_tail_call(true)
        .wasm_extended_const(true)
        .floats(true)
        .wasm_multi_memory(false)
        .wasm_memory64(false)
        .wasm_custom_page_sizes(false)
        .wasm_wide_arithmetic(false)
        .compilation_mode(CompilationMode::Eager)
        .consume_fuel(true)
        .allow_start_fn(false)
        .ignore_custom_sections(true)
        .set_max_recursion_depth(limits.recursion as usize)
        // wasmi panics where the least height is above the greatest, so the
        // order of these three matters.
        .set_min_stack_height(0)
        .set_max_stack_height(stack_bytes)
        .set_min_stack_height(STACK_BYTES_MIN.min(stack_bytes))
        .set_max_cached_stacks(1);
    config
}

/// What a program's memory and tables may grow to. Growth past it fails
/// inside the program: `memory.grow` and `table.grow` give -1.
pub(crate) fn caps(limits: &RunLimits) -> StoreLimits {
    StoreLimitsBuilder::new()
        .memory_size(usize::try_from(limits.memory_bytes).unwrap_or(usize::MAX))
        .memories(MEMORIES_MAX as usize)
        .table_elements(TABLE_ELEMENTS_MAX as usize)
        .tables(TABLES_MAX as usize)
        .instances(1)
        .trap_on_grow_failure(false)
        .build()
}
