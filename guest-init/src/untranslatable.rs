//! A `br_table` that wasmi translates wrongly, which is refused.
//!
//! wasmi 2.0.0 copies the values that a `br_table` carries to where their label has
//! them, unless all of its labels begin at one height: then it takes them to be there
//! (`visit_br_table`, `equal_heights`). They are, unless something lies below them
//! that the branch is to drop. So
//!
//! ```text
//!  block (result i32 i32)
//!    i32.const 77    local.get $x    i32.const 5    local.get $which    br_table 0 1
//!  end
//! ```
//!
//! leaves other values than `$x` and 5, in a function whose results are two as well. A
//! single value is in a register, and right. Compilers emit none with more, and it
//! cannot be spelled otherwise without variables and types of our own; so it is
//! refused. When wasmi does it right this module goes; `tests/computes.rs` has it.

use alloc::vec::Vec;

use wasmparser::{
    BinaryReaderError, BlockType, BrTable, CompositeInnerType, FrameKind, FuncValidator,
    FuncValidatorAllocations, FunctionBody, Parser, Payload, TypeSectionReader, ValidPayload,
    Validator, ValidatorResources,
};

use crate::operators::Operators;

/// Opcodes (WebAssembly core specification, 5.4.1).
const LOOP: u8 = 0x03;
const BR_TABLE: u8 = 0x0e;

/// Where the first such `br_table` of a module begins, in bytes; `None` also for a module
/// that is not valid, of which wasmi says so.
pub(crate) fn find(module: &[u8]) -> Option<usize> {
    let Ok(true) = may_have(module) else { return None };
    first(module).ok().flatten()
}

/// Parameters and results of a type.
type Arity = (usize, usize);

fn arities(types: TypeSectionReader<'_>) -> Result<Vec<Arity>, BinaryReaderError> {
    let mut these = Vec::new();
    for group in types {
        these.extend(group?.types().map(|sub| match &sub.composite_type.inner {
            CompositeInnerType::Func(func) => (func.params().len(), func.results().len()),
            _ => (0, 0),
        }));
    }
    Ok(these)
}

/// Whether some function may have one: a `br_table`, and a label of several values.
fn may_have(module: &[u8]) -> Result<bool, BinaryReaderError> {
    let mut types = Vec::new();
    for payload in Parser::new(0).parse_all(module) {
        match payload? {
            Payload::TypeSection(section) => types = arities(section)?,
            Payload::CodeSectionEntry(body) if has_both(&body, &types)? => return Ok(true),
            _ => {}
        }
    }
    Ok(false)
}

fn has_both(body: &FunctionBody<'_>, types: &[Arity]) -> Result<bool, BinaryReaderError> {
    // Its operators are read only where its bytes may have one.
    if !body.as_bytes().contains(&BR_TABLE) {
        return Ok(false);
    }
    // Some function, or block, may have several results. Compilers rarely emit any.
    let mut has_label = types.iter().any(|(_, results)| *results > 1);
    let mut has_table = false;
    for operator in Operators::of(body)? {
        match operator.opcode {
            BR_TABLE => has_table = true,
            LOOP => has_label |= operator.block_type().is_some_and(|it| arity(types, it).0 > 1),
            _ => {}
        }
    }
    Ok(has_table && has_label)
}

fn arity(types: &[Arity], index: u64) -> Arity {
    usize::try_from(index).ok().and_then(|index| types.get(index)).copied().unwrap_or_default()
}

fn first(module: &[u8]) -> Result<Option<usize>, BinaryReaderError> {
    let mut validator = Validator::new();
    let mut allocations = FuncValidatorAllocations::default();
    let mut types = Vec::new();
    for payload in Parser::new(0).parse_all(module) {
        let payload = payload?;
        let valid = validator.payload(&payload)?;
        if let Payload::TypeSection(section) = payload {
            types = arities(section)?;
        }
        if let ValidPayload::Func(function, body) = valid {
            let mut function = function.into_validator(allocations);
            function.read_locals(&mut body.get_binary_reader())?;
            let mut operators = body.get_operators_reader()?;
            while !operators.eof() {
                let (operator, at) = operators.read_with_offset()?;
                if let wasmparser::Operator::BrTable { targets } = &operator
                    && leaves_some(&function, targets, &types)?
                {
                    return Ok(Some(at));
                }
                function.op(at, &operator)?;
            }
            allocations = function.into_allocations();
        }
    }
    Ok(None)
}

/// Whether a `br_table` that comes next is one of these.
fn leaves_some(
    function: &FuncValidator<ValidatorResources>,
    targets: &BrTable<'_>,
    types: &[Arity],
) -> Result<bool, BinaryReaderError> {
    let label = |depth: u32| function.get_control_frame(depth as usize);
    let Some(default) = label(targets.default()) else { return Ok(false) };
    let values = match (default.block_type, default.kind) {
        (BlockType::FuncType(index), kind) => {
            let (params, results) = arity(types, index.into());
            if kind == FrameKind::Loop { params } else { results }
        }
        _ => 1,
    };
    let (mut is_one, mut is_level) = (true, true);
    for target in targets.targets() {
        let target = target?;
        is_one &= target == targets.default();
        is_level &= label(target).is_some_and(|label| label.height == default.height);
    }
    // Its index is on top of the values.
    let below = (function.operand_stack_height() as usize).saturating_sub(values + 1);
    Ok(values > 1 && !is_one && is_level && below > default.height)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;

    fn found(body: &str) -> bool {
        let module = format!(
            "(module (type (func (param i32 i32) (result i32 i32)))
                (func (param $x i32) (result i32 i32) {body}))"
        );
        find(&wat::parse_str(module).unwrap()).is_some()
    }

    #[test]
    fn a_table_of_several_values_over_others_is_found() {
        let values = "(local.get $x) (i32.const 5)";
        assert!(found(&format!(
            "block (result i32 i32) i32.const 7 {values} {values} drop br_table 0 1 end"
        )));
        assert!(found(&format!(
            "{values} loop (type 0) i32.const 7 {values} local.get $x br_table 1 0 end"
        )));
        // Nothing below, one label, labels of other heights, or one value.
        for body in [
            format!("block (result i32 i32) {values} local.get $x br_table 0 1 end"),
            format!("block (result i32 i32) i32.const 7 {values} local.get $x br_table 0 0 end"),
            format!(
                "i32.const 7 block (result i32 i32) i32.const 7 {values} local.get $x
                br_table 0 1 end br 0"
            ),
            "block (result i32) block (result i32) i32.const 7 i32.const 5 local.get $x
                br_table 0 1 end end i32.const 1"
                .into(),
            values.into(),
        ] {
            assert!(!found(&body), "{body}");
        }
    }

    #[test]
    fn what_is_not_valid_is_left_to_the_interpreter() {
        let module = "(module (func (result i32 i32) block (result i32 i32) i32.const 1
            br_table 0 1 end))";
        assert_eq!(find(&wat::parse_str(module).unwrap()), None);
        assert_eq!(find(b"\0asm\x01\0\0\0\x01"), None);
    }
}
