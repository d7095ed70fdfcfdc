//! Code that wasmi translates wrongly, spelled otherwise.
//!
//! wasmi 2.0.0 drops a comparison with zero right before a `select` and has the
//! `select` look at what was compared instead. Where that is a local variable it
//! looks at another place: at what an earlier instruction left in a register
//! (`try_fuse_select`, which keeps the comparison's result for the condition). So
//!
//! ```text
//!  local.get $x    i32.eqz    select
//! ```
//!
//! picks either value. No configuration turns that off, and no comparison but
//! `i32.eqz`, `i32.eq` and `i32.ne` is dropped. Here each of these right before a
//! `select` becomes instructions with the same result that wasmi leaves alone:
//!
//! | | becomes |
//! |---|---|
//! | `i32.eqz` | `i32.const 1`, `i32.lt_u` |
//! | `i32.eq` | `i32.xor`, `i32.const 1`, `i32.lt_u` |
//! | `i32.ne` | `i32.xor`, `i32.const 1`, `i32.ge_u` |
//!
//! Compilers that optimise hardly ever emit the three there: they swap the values
//! instead. When wasmi does it right this module goes; its test says when.

use alloc::vec::Vec;
use core::ops::Range;

use wasmparser::{BinaryReaderError, FunctionBody, Operator, Parser, Payload};

/// Opcodes (WebAssembly core specification, 5.4).
mod op {
    pub(super) const NOP: u8 = 0x01;
    pub(super) const END: u8 = 0x0b;
    pub(super) const DROP: u8 = 0x1a;
    pub(super) const SELECT: u8 = 0x1b;
    pub(super) const SELECT_TYPED: u8 = 0x1c;
    pub(super) const I32_EQZ: u8 = 0x45;
    pub(super) const I32_EQ: u8 = 0x46;
    pub(super) const I32_NE: u8 = 0x47;
    /// The type of a block without values.
    pub(super) const EMPTY: u8 = 0x40;
}

/// The section of code (WebAssembly core specification, 5.5).
const CODE_SECTION: u8 = 10;

const EQZ: &[u8] = &[0x41, 1, 0x49];
const EQ: &[u8] = &[0x73, 0x41, 1, 0x49];
const NE: &[u8] = &[0x73, 0x41, 1, 0x4f];

/// The module with such code spelled otherwise; `None` if it has none.
///
/// # Errors
/// The module does not parse.
pub(crate) fn respelled(module: &[u8]) -> Result<Option<Vec<u8>>, BinaryReaderError> {
    // Few programs have the bytes.
    if !may_need(module) {
        return Ok(None);
    }
    let mut before = 0;
    let mut section = None;
    let mut code = Vec::new();
    let mut is_other = false;
    for payload in Parser::new(0).parse_all(module) {
        match payload? {
            Payload::CodeSectionStart { count, range, .. } => {
                leb(&mut code, count as usize);
                section = Some(before..range.end);
            }
            Payload::CodeSectionEntry(body) => {
                let found = comparisons(&body)?;
                is_other |= !found.is_empty();
                spell(&mut code, module, body.range(), &found);
            }
            other => {
                if let Some((_, range)) = other.as_section() {
                    before = range.end;
                } else if let Payload::Version { range, .. } = other {
                    before = range.end;
                }
            }
        }
    }
    let (true, Some(section)) = (is_other, section) else { return Ok(None) };
    let mut spelled = Vec::with_capacity(module.len() - section.len() + code.len() + 6);
    spelled.extend_from_slice(&module[..section.start]);
    spelled.push(CODE_SECTION);
    leb(&mut spelled, code.len());
    spelled.append(&mut code);
    spelled.extend_from_slice(&module[section.end..]);
    Ok(Some(spelled))
}

/// Whether these bytes may have a comparison that is dropped. What stands between
/// it and its `select` has no effect: nothing, or what is dropped, or an empty
/// block, or the end of one.
fn may_need(bytes: &[u8]) -> bool {
    let mut last = op::NOP;
    bytes.iter().any(|byte| {
        let before = last;
        if !matches!(*byte, op::NOP | op::END) {
            last = *byte;
        }
        matches!(*byte, op::SELECT | op::SELECT_TYPED)
            && matches!(before, op::I32_EQZ | op::I32_EQ | op::I32_NE | op::DROP | op::EMPTY)
    })
}

/// Where in the module such comparisons are, each of one byte, in order.
fn comparisons(body: &FunctionBody<'_>) -> Result<Vec<usize>, BinaryReaderError> {
    let mut found = Vec::new();
    if !may_need(body.as_bytes()) {
        return Ok(found);
    }
    let mut last = None;
    let mut operators = body.get_operators_reader()?;
    while !operators.eof() {
        let (operator, at) = operators.read_with_offset()?;
        match operator {
            Operator::I32Eqz | Operator::I32Eq | Operator::I32Ne => last = Some(at),
            Operator::Select | Operator::TypedSelect { .. } => found.extend(last.take()),
            // wasmi makes nothing of these by themselves.
            Operator::Nop
            | Operator::Block { .. }
            | Operator::End
            | Operator::Drop
            | Operator::LocalGet { .. }
            | Operator::I32Const { .. }
            | Operator::I64Const { .. }
            | Operator::F32Const { .. }
            | Operator::F64Const { .. } => {}
            _ => last = None,
        }
    }
    Ok(found)
}

/// Writes a function's body with its length before it.
fn spell(code: &mut Vec<u8>, module: &[u8], body: Range<usize>, comparisons: &[usize]) {
    let otherwise = |at: &usize| match module[*at] {
        op::I32_EQZ => EQZ,
        op::I32_EQ => EQ,
        _ => NE,
    };
    let added: usize = comparisons.iter().map(|at| otherwise(at).len() - 1).sum();
    leb(code, body.len() + added);
    let mut from = body.start;
    for at in comparisons {
        code.extend_from_slice(&module[from..*at]);
        code.extend_from_slice(otherwise(at));
        from = at + 1;
    }
    code.extend_from_slice(&module[from..body.end]);
}

/// An unsigned number of 32 bits (WebAssembly core specification, 5.2.2). What is
/// counted here is of a module, and no module is larger.
fn leb(out: &mut Vec<u8>, mut number: usize) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;

    fn bytes(text: &str) -> Vec<u8> {
        wat::parse_str(text).unwrap()
    }

    #[test]
    fn a_module_without_such_code_stays_as_it_is() {
        for text in [
            "(module)",
            "(module (func (param i32) (result i32)
                (select (i32.const 5) (i32.const 7) (local.get 0))))",
            "(module (func (param i32) (result i32)
                (if (result i32) (i32.eqz (local.get 0)) (then i32.const 5) (else i32.const 7))))",
            // The bytes, but not the instructions.
            "(module (memory 1) (data (i32.const 0) \"\\45\\1b\"))",
            "(module (memory 1) (func (result i32) (i32.load offset=3397 (i32.const 27))))",
        ] {
            assert_eq!(respelled(&bytes(text)).unwrap(), None, "{text}");
        }
    }

    #[test]
    fn what_is_not_such_code_is_kept_byte_for_byte() {
        let around = |code: &str| {
            bytes(&format!(
                "(module (type (func (param i32) (result i32))) (memory (export \"memory\") 1)
                (func (type 0) local.get 0)
                (func (export \"f\") (type 0) (select (i32.const 5) (i32.const 7) {code}))
                (func (type 0) (drop (i32.const 300)) local.get 0)
                (data (i32.const 9) \"after\"))"
            ))
        };
        for (from, to) in [
            ("(i32.eqz (local.get 0))", "(i32.lt_u (local.get 0) (i32.const 1))"),
            (
                "(i32.eq (local.get 0) (i32.const 0))",
                "(i32.lt_u (i32.xor (local.get 0) (i32.const 0)) (i32.const 1))",
            ),
            (
                "(i32.ne (i32.const 0) (local.get 0))",
                "(i32.ge_u (i32.xor (i32.const 0) (local.get 0)) (i32.const 1))",
            ),
        ] {
            assert_eq!(respelled(&around(from)).unwrap().unwrap(), around(to), "{from}");
        }
    }
}
