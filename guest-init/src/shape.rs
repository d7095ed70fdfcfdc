//! How large and complex a module may be, counted before wasmi compiles it.
//!
//! A few bytes of WebAssembly can ask an engine for a great deal of memory:
//! an empty function costs four bytes in the module and a few hundred in the
//! engine, a function type with a thousand results is copied at each branch.
//! The bounds here are far above what compilers emit for programs of the size
//! that is allowed, and keep a guest's heap from being the limit that gives.
//! wasmi's own `EnforcedLimits` cannot be chosen singly, and its strict set
//! refuses sound modules with many small functions.
//!
//! Nothing is validated here beyond that what is counted parses, with the parser
//! wasmi uses and every proposal it knows; wasmi reads all of it.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use forge_protocol::limits::OverLimit;
use wasmparser::{
    BinaryReaderError, BlockType, CompositeInnerType, ElementItems, FunctionBody, Operator, Parser,
    Payload, TypeRef,
};

use crate::operators::Operators;
use crate::place;

/// Types of one module.
pub const TYPES_MAX: u32 = 10_000;
/// Parameters, or results, of one type.
pub const TYPE_VALUES_MAX: u32 = 128;
/// Imports of one module.
pub const IMPORTS_MAX: u32 = 1_000;
/// Functions of the module's own.
pub const FUNCTIONS_MAX: u32 = 20_000;
/// Bytes of one function. While wasmi translates one, each of them may take 50 of the heap
/// beside what stays of it: conditions without anything in them do. An interpreter's
/// loop, the largest that compilers emit, has some 100 KiB.
pub const FUNCTION_BYTES_MAX: u32 = 512 * 1024;
/// Local variables of one function, its parameters apart. wasmi takes 30,000
/// with them.
pub const LOCALS_MAX: u32 = 25_000;
/// Tables of one module.
pub const TABLES_MAX: u32 = 4;
/// Elements of one table, and of all element segments together.
pub const TABLE_ELEMENTS_MAX: u32 = 100_000;
/// Linear memories of one module.
pub const MEMORIES_MAX: u32 = 1;
/// Globals of one module.
pub const GLOBALS_MAX: u32 = 10_000;
/// Exports of one module.
pub const EXPORTS_MAX: u32 = 10_000;
/// Element segments of one module.
pub const ELEMENT_SEGMENTS_MAX: u32 = 10_000;
/// Data segments. Go's linker begins one behind every few zeros: 42,000 in a program
/// that reads and writes JSON.
pub const DATA_SEGMENTS_MAX: u32 = 100_000;

/// `memory.grow` and `table.grow` operators in all functions together; why,
/// see [`crate::engine`]. Compilers emit one or two, in the allocator.
pub const GROWS_MAX: u32 = 128;
/// Values beyond the first that all branches together carry to their labels. Each
/// may be an instruction of its own, where the branch itself takes two bytes.
/// Compilers have labels with one value, or none.
pub const BRANCH_VALUES_MAX: u32 = 200_000;

/// Blocks, loops and conditions inside one another. What is open takes 240 bytes of
/// an engine, and its beginning two of a module. A `switch` has as many as it has
/// cases, as compilers write it.
pub const NESTING_MAX: u32 = 20_000;

/// Why a module's shape is refused.
#[derive(Debug)]
pub enum ShapeError {
    /// A count is over its bound.
    Over {
        /// What is over, and by how much.
        over: OverLimit,
        /// The function that it is of, if it is one's: those that are imported come
        /// first.
        function: Option<u32>,
    },
    /// The module does not parse.
    Malformed(BinaryReaderError),
}

impl fmt::Display for ShapeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Over { over: OverLimit { what, got, limit }, function } => {
                write!(f, "the module has {got} {what}, the limit is {limit}")?;
                function.map_or(Ok(()), |function| write!(f, ", in function {function}"))
            }
            Self::Malformed(error) => write!(f, "{error}"),
        }
    }
}

impl core::error::Error for ShapeError {}

impl ShapeError {
    /// The same of this module's, which may have a name for the function.
    #[must_use]
    pub fn told(&self, module: &[u8]) -> String {
        match *self {
            Self::Over { function: Some(function), .. } => place::named(self, function, module),
            _ => format!("{self}"),
        }
    }

    /// It is this function that has it.
    fn of(self, function: u32) -> Self {
        match self {
            Self::Over { over, .. } => Self::Over { over, function: Some(function) },
            malformed @ Self::Malformed(_) => malformed,
        }
    }
}

impl From<BinaryReaderError> for ShapeError {
    fn from(error: BinaryReaderError) -> Self {
        Self::Malformed(error)
    }
}

/// Checks a module's counts.
///
/// # Errors
/// [`ShapeError`]: the first count that is over its bound, or where what is
/// counted does not parse.
pub fn check(module: &[u8]) -> Result<(), ShapeError> {
    // The next whose body comes; those that are imported come first.
    let mut function = 0;
    let mut grows = 0;
    let mut widest = 0;
    let mut branches_at_most = 0;
    for payload in Parser::new(0).parse_all(module) {
        match payload? {
            Payload::TypeSection(types) => {
                within("types", types.count(), TYPES_MAX)?;
                for group in types {
                    for sub in group?.types() {
                        if let CompositeInnerType::Func(func) = &sub.composite_type.inner {
                            let params = func.params().len() as u32;
                            within("parameters of one type", params, TYPE_VALUES_MAX)?;
                            let results = func.results().len() as u32;
                            within("results of one type", results, TYPE_VALUES_MAX)?;
                            widest = widest.max(params).max(results);
                        }
                    }
                }
            }
            Payload::ImportSection(imports) => {
                within("imports", imports.count(), IMPORTS_MAX)?;
                for import in imports {
                    function += u32::from(matches!(import?.ty, TypeRef::Func(_)));
                }
            }
            Payload::FunctionSection(functions) => {
                within("functions", functions.count(), FUNCTIONS_MAX)?;
            }
            Payload::TableSection(tables) => {
                within("tables", tables.count(), TABLES_MAX)?;
                for table in tables {
                    within("elements of one table", table?.ty.initial, TABLE_ELEMENTS_MAX)?;
                }
            }
            Payload::MemorySection(memories) => {
                within("memories", memories.count(), MEMORIES_MAX)?;
            }
            Payload::GlobalSection(globals) => within("globals", globals.count(), GLOBALS_MAX)?,
            Payload::ExportSection(exports) => within("exports", exports.count(), EXPORTS_MAX)?,
            Payload::ElementSection(segments) => {
                within("element segments", segments.count(), ELEMENT_SEGMENTS_MAX)?;
                let mut elements = 0u32;
                for segment in segments {
                    elements = elements.saturating_add(match segment?.items {
                        ElementItems::Functions(items) => items.count(),
                        ElementItems::Expressions(_, items) => items.count(),
                    });
                    within("elements of all segments", elements, TABLE_ELEMENTS_MAX)?;
                }
            }
            Payload::DataCountSection { count, .. } => {
                within("data segments", count, DATA_SEGMENTS_MAX)?;
            }
            Payload::DataSection(segments) => {
                within("data segments", segments.count(), DATA_SEGMENTS_MAX)?;
            }
            Payload::CodeSectionEntry(body) => {
                within_function(&body).map_err(|error| error.of(function))?;
                grows += grows_of(&body)?;
                within("instructions memory.grow and table.grow", grows, GROWS_MAX)?;
                branches_at_most += branches_at_most_of(&body);
                function += 1;
            }
            _ => {}
        }
    }
    // They are counted one by one only where they could be too many.
    if branches_at_most * u64::from(widest.saturating_sub(1)) > BRANCH_VALUES_MAX.into() {
        within("values carried by branches", branch_values(module)?, BRANCH_VALUES_MAX)?;
    }
    Ok(())
}

/// Holds one function to its bounds.
fn within_function(body: &FunctionBody<'_>) -> Result<(), ShapeError> {
    within("bytes of one function", body.range().len() as u64, FUNCTION_BYTES_MAX)?;
    within("locals of one function", locals_of(body)?, LOCALS_MAX)?;
    within("nested blocks of one function", nesting_of(body)?, NESTING_MAX)
}

/// No fewer than a function has branches, each target of a `br_table` being one.
fn branches_at_most_of(body: &FunctionBody<'_>) -> u64 {
    let bytes = body.as_bytes();
    let branches = |byte: &&u8| matches!(byte, 0x0c | 0x0d | 0x0f);
    let count = match bytes.contains(&0x0e) {
        true => bytes.len(),
        false => bytes.iter().filter(branches).count(),
    };
    count as u64
}

/// Parameters and results of a type.
type Arity = (u32, u32);

/// The values beyond the first that a module's branches carry.
fn branch_values(module: &[u8]) -> Result<u64, BinaryReaderError> {
    let mut types: Vec<Arity> = Vec::new();
    let mut functions = Vec::new().into_iter();
    let mut values = 0;
    for payload in Parser::new(0).parse_all(module) {
        match payload? {
            Payload::TypeSection(section) => {
                for group in section {
                    types.extend(group?.types().map(|sub| match &sub.composite_type.inner {
                        CompositeInnerType::Func(func) => {
                            (func.params().len() as u32, func.results().len() as u32)
                        }
                        _ => (0, 0),
                    }));
                }
            }
            Payload::FunctionSection(section) => {
                let indices: Result<Vec<u32>, _> = section.into_iter().collect();
                functions = indices?.into_iter();
            }
            Payload::CodeSectionEntry(body) => {
                // What is not there, wasmi refuses.
                let of = |index: u32| types.get(index as usize).copied().unwrap_or_default();
                let results = functions.next().map_or(0, |index| of(index).1);
                values += branch_values_of(&body, of, results)?;
            }
            _ => {}
        }
    }
    Ok(values)
}

fn branch_values_of(
    body: &FunctionBody<'_>,
    of: impl Fn(u32) -> Arity,
    results: u32,
) -> Result<u64, BinaryReaderError> {
    let arity = |block: BlockType| match block {
        BlockType::Empty => (0, 0),
        BlockType::Type(_) => (0, 1),
        BlockType::FuncType(index) => of(index),
    };
    // What a branch to each label carries, the innermost last.
    let mut labels = alloc::vec![results];
    let mut values = 0;
    let mut operators = body.get_operators_reader()?;
    while !operators.eof() {
        let mut carries = |label: Option<&u32>| {
            values += u64::from(label.map_or(0, |values| values.saturating_sub(1)));
        };
        let at = |labels: &[u32], depth: u32| labels.len().checked_sub(depth as usize + 1);
        match operators.read()? {
            Operator::Block { blockty } | Operator::If { blockty } => {
                let (params, results) = arity(blockty);
                carries(Some(&params));
                labels.push(results);
            }
            Operator::Loop { blockty } => {
                let (params, _) = arity(blockty);
                carries(Some(&params));
                labels.push(params);
            }
            Operator::End => {
                labels.pop();
            }
            Operator::Br { relative_depth } | Operator::BrIf { relative_depth } => {
                carries(at(&labels, relative_depth).and_then(|at| labels.get(at)));
            }
            Operator::BrTable { targets } => {
                carries(at(&labels, targets.default()).and_then(|at| labels.get(at)));
                for target in targets.targets() {
                    let target = target?;
                    carries(at(&labels, target).and_then(|at| labels.get(at)));
                }
            }
            Operator::Return => carries(Some(&results)),
            _ => {}
        }
    }
    Ok(values)
}

/// How many blocks of a function are open at most. They are counted one by one
/// only where enough of its bytes could begin one.
fn nesting_of(body: &FunctionBody<'_>) -> Result<u32, BinaryReaderError> {
    let begins = |byte: &&u8| matches!(byte, 0x02..=0x04);
    let at_most = body.as_bytes().iter().filter(begins).count();
    if at_most <= NESTING_MAX as usize {
        return Ok(0);
    }
    let (mut open, mut most) = (0u32, 0);
    for operator in Operators::of(body)? {
        match operator.opcode {
            0x02..=0x04 => {
                open += 1;
                most = most.max(open);
            }
            0x0b => open = open.saturating_sub(1),
            _ => {}
        }
    }
    Ok(most)
}

/// How many local variables a function declares.
fn locals_of(body: &FunctionBody<'_>) -> Result<u32, BinaryReaderError> {
    let mut locals = 0u32;
    for group in body.get_locals_reader()? {
        let (count, _) = group?;
        locals = locals.saturating_add(count);
    }
    Ok(locals)
}

/// How often a function has `memory.grow` or `table.grow` in it.
///
/// Its operators are read only where their bytes are in it, in whatever place: few
/// functions grow anything, and to look for two bytes takes less time.
fn grows_of(body: &FunctionBody<'_>) -> Result<u32, BinaryReaderError> {
    // `memory.grow 0` and `table.grow`, whose numbers may have bytes more than
    // they need.
    let grow = |pair: &[u8]| matches!(pair, [0x40, 0 | 0x80..] | [0xfc, 0x0f | 0x8f]);
    if !body.as_bytes().windows(2).any(grow) {
        return Ok(0);
    }
    let grows = Operators::of(body)?.filter(|it| match it.opcode {
        0x40 => true,
        0xfc => it.number() == 0x0f,
        _ => false,
    });
    Ok(grows.count() as u32)
}

/// Holds a count to its bound.
///
/// # Errors
/// [`ShapeError::Over`].
pub fn within(what: &'static str, got: impl Into<u64>, limit: u32) -> Result<(), ShapeError> {
    let (got, limit) = (got.into(), limit.into());
    if got > limit {
        return Err(ShapeError::Over { over: OverLimit { what, got, limit }, function: None });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_text(text: &str) -> Result<(), OverLimit> {
        match check(&wat::parse_str(text).unwrap()) {
            Ok(()) => Ok(()),
            Err(ShapeError::Over { over, .. }) => Err(over),
            Err(ShapeError::Malformed(error)) => panic!("{error}"),
        }
    }

    /// Two growing operators.
    const GROWS: &str = "(func (drop (memory.grow (i32.const 0)))
        (drop (table.grow 0 (ref.null func) (i32.const 0))))";

    /// A module with so many branches that carry 101 values each.
    fn branching(count: u32) -> String {
        let values = " (i32.const 0)".repeat(101);
        let branches = "(br_if 0 (i32.const 0))".repeat(count as usize);
        let drops = "(drop)".repeat(101);
        let results = " i32".repeat(101);
        format!("(module (func (block (result{results}) {values} {branches}) {drops}))")
    }

    const BRANCHES_MAX: u32 = BRANCH_VALUES_MAX / 100;

    /// A module with so many blocks inside one another.
    fn nested(count: u32) -> String {
        let (begin, end) = ("block ".repeat(count as usize), "end ".repeat(count as usize));
        format!("(module (func {begin} {end}))")
    }

    /// A module with a function of so many bytes.
    fn function_of(bytes: u32) -> String {
        // Two more: no local variables, and the end.
        format!("(module (func {}))", "nop ".repeat(bytes as usize - 2))
    }

    /// A module whose body is `piece`, `count` times.
    fn repeated(piece: &str, count: u32) -> String {
        format!("(module {})", piece.repeat(count as usize))
    }

    #[test]
    fn each_count_is_held_to_its_bound_and_named() {
        let wide = format!("(type (func (param{})))", " i32".repeat(129));
        let wide_results = format!("(type (func (result{})))", " i32".repeat(129));
        for (module, what) in [
            (repeated("(type (func (param i64)))", TYPES_MAX + 1), "types"),
            (repeated(&wide, 1), "parameters of one type"),
            (repeated(&wide_results, 1), "results of one type"),
            (repeated("(import \"a\" \"b\" (func))", IMPORTS_MAX + 1), "imports"),
            (repeated("(func)", FUNCTIONS_MAX + 1), "functions"),
            (
                format!("(module (func (local{})))", " i64".repeat(LOCALS_MAX as usize + 1)),
                "locals of one function",
            ),
            (function_of(FUNCTION_BYTES_MAX + 1), "bytes of one function"),
            (repeated("(table 1 funcref)", TABLES_MAX + 1), "tables"),
            (repeated("(table 100001 funcref)", 1), "elements of one table"),
            (repeated("(memory 1)", MEMORIES_MAX + 1), "memories"),
            (repeated("(global i32 (i32.const 0))", GLOBALS_MAX + 1), "globals"),
            (repeated("(elem funcref)", ELEMENT_SEGMENTS_MAX + 1), "element segments"),
            (
                format!("(module (elem funcref{}))", " (ref.null func)".repeat(100_001)),
                "elements of all segments",
            ),
            (repeated("(data \"\")", DATA_SEGMENTS_MAX + 1), "data segments"),
            (repeated(GROWS, GROWS_MAX / 2 + 1), "instructions memory.grow and table.grow"),
            (branching(BRANCHES_MAX + 1), "values carried by branches"),
            (nested(NESTING_MAX + 1), "nested blocks of one function"),
        ] {
            assert_eq!(check_text(&module).unwrap_err().what, what);
        }
        let mut exports = String::from("(module (func $f)");
        for number in 0..=EXPORTS_MAX {
            exports.push_str(&format!("(export \"{number}\" (func $f))"));
        }
        exports.push(')');
        assert_eq!(check_text(&exports).unwrap_err().what, "exports");
    }

    #[test]
    fn counts_at_their_bounds_pass() {
        let widest = format!("(type (func (param{})))", " i32".repeat(128));
        for module in [
            repeated(&widest, 1),
            repeated("(func)", FUNCTIONS_MAX),
            function_of(FUNCTION_BYTES_MAX),
            repeated("(table 100000 funcref)", TABLES_MAX),
            repeated("(data \"\")", DATA_SEGMENTS_MAX),
            repeated(GROWS, GROWS_MAX / 2),
            nested(NESTING_MAX),
            branching(BRANCHES_MAX),
        ] {
            assert_eq!(check_text(&module), Ok(()));
        }
    }

    /// A module of one function with these bytes `count` times, with nothing that
    /// they would need.
    fn code(operator: &[u8], count: usize) -> Vec<u8> {
        let body = [&[0x00], &operator.repeat(count)[..], &[0x0b]].concat();
        let leb = |value: usize| [value as u8 | 0x80, (value >> 7) as u8];
        let section = [&[0x01], &leb(body.len())[..], &body].concat();
        [b"\0asm\x01\0\0\0\x0a", &leb(section.len())[..], &section].concat()
    }

    #[test]
    fn an_operator_that_grows_counts_in_each_of_its_encodings() {
        for operator in [
            &[0x40, 0x00][..],
            &[0x40, 0x80, 0x00],
            &[0xfc, 0x0f, 0x00],
            &[0xfc, 0x8f, 0x00, 0x00],
            &[0xfc, 0x8f, 0x80, 0x00, 0x00],
        ] {
            let bound = GROWS_MAX as usize;
            assert!(check(&code(operator, bound)).is_ok(), "{operator:x?}");
            let over = check(&code(operator, bound + 1));
            assert!(matches!(over, Err(ShapeError::Over { .. })), "{operator:x?}: {over:?}");
        }
    }

    #[test]
    fn what_does_not_parse_is_refused() {
        // Operators are wasmi's to read, variables before them are counted.
        let variables_that_are_cut_off = b"\0asm\x01\0\0\0\x0a\x04\x01\x02\x01\xff";
        for module in [&b"\0asm\x01\0\0\0\x01\xff"[..], b"", variables_that_are_cut_off] {
            assert!(matches!(check(module), Err(ShapeError::Malformed(_))), "{module:?}");
        }
    }
}
