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
//! `operators` knows the operators of what is on, and no others.
//!
//! Modules are compiled eagerly: lazily translated functions are charged to
//! the fuel of whoever calls them first, and fuel must repeat.
//!
//! # The native stack
//!
//! wasmi's operations call each other in tail position and rely on LLVM to
//! make jumps of these calls. It does for all but `memory.grow` and
//! `table.grow`: as compiled, each execution of one leaves a frame of some
//! 180 bytes on the native stack until wasmi returns, and a loop over
//! `memory.grow` would overflow it: in a guest, a crash that any program could
//! cause. wasmi's other loop has no such fault and is three times slower.
//!
//! So programs run in slices: wasmi is given [`SLICE_FUEL`] at a time and
//! returns, its native stack unwound, to be given more. A growth costs
//! [`GROW_FUEL`], the most wasmi can be told, and fuel is charged for a whole
//! block of code at once, so at most `SLICE_FUEL / GROW_FUEL` and one block's
//! growths can happen in a slice; [`crate::shape`] bounds the latter. Slices
//! change no program's fuel.
//!
//! # A `table.grow` at the end of a slice
//!
//! wasmi 2.0.0 cannot go on after a `table.grow` that finds too little fuel for its
//! elements: it does not note where it was (`table_grow` in `handler/exec.rs`, which has
//! no `set_ip`), and goes on where it noted that last, with what its registers held
//! there. [`Caps`] makes a trap of that, since wasmi asks there; memories and all other
//! operations on tables are right.

use forge_protocol::limits::RunLimits;
use wasmi::errors::{MemoryError, TableError};
use wasmi::{
    CompilationMode, Config, OperatorCost, ResourceLimiter, StoreLimits, StoreLimitsBuilder,
};
use wasmi_core::LimiterError;

use crate::shape::{MEMORIES_MAX, TABLE_ELEMENTS_MAX, TABLES_MAX};

/// What a program is given to run on before wasmi must return, in fuel: a tenth
/// of a millisecond of work.
pub const SLICE_FUEL: u64 = 100_000;
/// What `memory.grow` and `table.grow` cost beside the bytes they add.
pub const GROW_FUEL: u8 = u8::MAX;

/// The value stack a run starts with, in bytes, if it may have as much. It
/// doubles when it is full; small, because a page that is not touched costs
/// nothing.
const STACK_BYTES_MIN: usize = 4 * 1024;

/// The configuration for a run with these limits.
#[must_use]
pub fn config(limits: &RunLimits) -> Config {
    let stack_bytes = limits.stack_bytes as usize;
    let costs =
        OperatorCost { memory_grow: GROW_FUEL, table_grow: GROW_FUEL, ..OperatorCost::default() };
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
        .operator_cost(costs)
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
#[derive(Debug)]
pub(crate) struct Caps {
    limits: StoreLimits,
    /// What a `table.grow` took, in fuel, that had too little and ended the run.
    pub(crate) unpaid: Option<u64>,
}

impl Caps {
    pub(crate) fn new(limits: &RunLimits) -> Self {
        let limits = StoreLimitsBuilder::new()
            .memory_size(usize::try_from(limits.memory_bytes).unwrap_or(usize::MAX))
            .memories(MEMORIES_MAX as usize)
            .table_elements(TABLE_ELEMENTS_MAX as usize)
            .tables(TABLES_MAX as usize)
            .instances(1)
            .trap_on_grow_failure(false)
            .build();
        Self { limits, unpaid: None }
    }
}

impl ResourceLimiter for Caps {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> Result<bool, LimiterError> {
        self.limits.memory_growing(current, desired, maximum)
    }

    fn table_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> Result<bool, LimiterError> {
        self.limits.table_growing(current, desired, maximum)
    }

    fn memory_grow_failed(&mut self, error: &MemoryError) -> Result<(), LimiterError> {
        self.limits.memory_grow_failed(error)
    }

    fn table_grow_failed(&mut self, error: &TableError) -> Result<(), LimiterError> {
        if let TableError::OutOfFuel { required_fuel } = error {
            self.unpaid = Some(*required_fuel);
            return Err(LimiterError::ResourceLimiterDeniedAllocation);
        }
        self.limits.table_grow_failed(error)
    }

    fn instances(&self) -> usize {
        self.limits.instances()
    }

    fn tables(&self) -> usize {
        self.limits.tables()
    }

    fn memories(&self) -> usize {
        self.limits.memories()
    }
}
