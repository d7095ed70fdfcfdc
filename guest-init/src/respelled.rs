//! Code that wasmi translates wrongly, spelled otherwise.
//!
//! Three kinds of it, all of wasmi 2.0.0, and no configuration turns any off.
//! When wasmi does one right, what is here of it goes; `tests/computes.rs` says when.
//!
//! **Comparisons before a `select`.** wasmi drops a comparison with zero if it is what
//! it emitted last before a `select`, and has the `select` look at what was compared
//! instead. Where that is a local variable it looks at another place: at what an
//! earlier instruction left in a register (`try_fuse_select`, which keeps the
//! comparison's result for the condition). So
//!
//! ```text
//!  local.get $x    i32.eqz    select
//! ```
//!
//! picks either value. Between the two may be whatever emits nothing: constants and
//! all that is computed of them ahead, be it another `select`. No comparison but
//! `i32.eqz`, `i32.eq` and `i32.ne` is dropped, and `ref.is_null`, which wasmi makes a
//! comparison of. Here each of these becomes instructions with the same result that
//! wasmi leaves alone, unless something is surely emitted between it and the next
//! `select`:
//!
//! | | becomes |
//! |---|---|
//! | `i32.eqz` | `i32.const 1`, `i32.lt_u` |
//! | `i32.eq` | `i32.xor`, `i32.const 1`, `i32.lt_u` |
//! | `i32.ne` | `i32.xor`, `i32.const 1`, `i32.ge_u` |
//! | `ref.is_null` | itself, and an empty block, which makes a value of its result |
//!
//! Compilers that optimise hardly ever emit any of them there: they swap the values
//! instead.
//!
//! **Blocks with parameters.** A `local.get` is nothing to wasmi but a note of which
//! variable is meant. Before a block it makes values of the notes that lie below the
//! block's parameters, since what is in the block may be left out or done twice; but
//! it leaves out as many notes as there are parameters, where it means as many operands
//! (`PreservedAllLocalsIter`, `skip`). So the local variable in
//!
//! ```text
//!  local.get $x    i32.const 1    loop (param i32) … local.set $x … end
//! ```
//!
//! is read too late, or from a place that nothing was written to. Here an empty block
//! goes before each block, loop or condition with parameters: it makes values of all.
//! Compilers hardly ever emit parameters of blocks.
//!
//! **Stores of an address at itself.** wasmi panics at a store of an integer with an
//! offset of 65,536 or more, if address and value are the same local variable and that
//! is in a register: it has no instruction for that (`choose_store_op_vt`). An empty
//! block before such a store makes values of the two.

use alloc::vec::Vec;
use core::ops::Range;

use wasmparser::{
    BinaryReaderError, CompositeInnerType, FunctionBody, Parser, Payload, TypeSectionReader,
};

use crate::operators::{Operator, Operators};
use crate::shape::{ShapeError, within};

/// Opcodes (WebAssembly core specification, 5.4).
mod op {
    pub(super) const BLOCK: u8 = 0x02;
    pub(super) const IF: u8 = 0x04;
    pub(super) const END: u8 = 0x0b;
    pub(super) const BR_IF: u8 = 0x0d;
    pub(super) const SELECT: u8 = 0x1b;
    pub(super) const SELECT_TYPED: u8 = 0x1c;
    pub(super) const LOCAL_GET: u8 = 0x20;
    pub(super) const LOCAL_TEE: u8 = 0x22;
    pub(super) const I32_EQZ: u8 = 0x45;
    pub(super) const I32_EQ: u8 = 0x46;
    pub(super) const I32_NE: u8 = 0x47;
    pub(super) const I32_WRAP_I64: u8 = 0xa7;
    pub(super) const REF_IS_NULL: u8 = 0xd1;
    pub(super) const I64_EXTEND_I32_U: u8 = 0xad;
    /// The type of a block without values.
    pub(super) const EMPTY: u8 = 0x40;

    /// Whether an instruction with this opcode stores an integer.
    pub(super) fn stores(opcode: u8) -> bool {
        matches!(opcode, 0x36 | 0x37 | 0x3a..=0x3e)
    }

    /// Whether an instruction with this opcode is a load, a constant or of numbers, and
    /// leaves one value of its own.
    pub(super) fn computes(opcode: u8) -> bool {
        matches!(opcode, 0x28..=0x35 | 0x41..=0xc4)
    }

    /// Whether wasmi makes something of an instruction with this opcode whatever its
    /// operands are: calls, `global.set`, loads and stores, `memory.grow`.
    pub(super) fn is_emitted(opcode: u8) -> bool {
        matches!(opcode, 0x10 | 0x11 | 0x24 | 0x28..=0x3e | 0x40)
    }
}

/// The section of code (WebAssembly core specification, 5.5).
const CODE_SECTION: u8 = 10;

const EQZ: &[u8] = &[0x41, 1, 0x49];
const EQ: &[u8] = &[0x73, 0x41, 1, 0x49];
const NE: &[u8] = &[0x73, 0x41, 1, 0x4f];
const EMPTY_BLOCK: &[u8] = &[op::BLOCK, op::EMPTY, op::END];

/// Instructions of a module that are spelled otherwise. Each takes 32 bytes here and up
/// to three more in the module, so that a few megabytes of nothing else would fill a
/// guest's heap; compilers emit one in some hundred bytes, or none.
const OTHERS_MAX: u32 = 50_000;

/// Bytes of a module, and what they become.
struct Other {
    range: Range<usize>,
    bytes: &'static [u8],
}

/// The module with such code spelled otherwise; `None` if it has none.
///
/// # Errors
/// The module does not parse, or has more of it than it may.
pub(crate) fn respelled(module: &[u8]) -> Result<Option<Vec<u8>>, ShapeError> {
    let mut before = 0;
    let mut with_parameters = WithParameters::default();
    // The section of code with its header, how many functions it has, and these.
    let mut code = None;
    let mut bodies = Vec::new();
    let mut found = Vec::new();
    for payload in Parser::new(0).parse_all(module) {
        match payload? {
            Payload::CodeSectionStart { count, range, .. } => {
                code = Some((before..range.end, count));
            }
            Payload::CodeSectionEntry(body) => {
                bodies.push(body.range());
                find(&body, &with_parameters, &mut found)?;
            }
            Payload::TypeSection(types) => {
                before = types.range().end;
                with_parameters = WithParameters::of(types)?;
            }
            Payload::Version { range, .. } => before = range.end,
            other => before = other.as_section().map_or(before, |(_, range)| range.end),
        }
    }
    let Some((section, count)) = code else { return Ok(None) };
    if found.is_empty() {
        return Ok(None);
    }
    let mut code = Vec::with_capacity(section.len());
    leb(&mut code, count as usize);
    let mut rest = &found[..];
    for body in bodies {
        let (these, after) = rest.split_at(rest.partition_point(|it| it.range.start < body.end));
        rest = after;
        spell(&mut code, module, body, these);
    }
    let mut spelled = Vec::with_capacity(module.len() - section.len() + code.len() + 6);
    spelled.extend_from_slice(&module[..section.start]);
    spelled.push(CODE_SECTION);
    leb(&mut spelled, code.len());
    spelled.append(&mut code);
    spelled.extend_from_slice(&module[section.end..]);
    Ok(Some(spelled))
}

/// Which types have parameters, by their indices.
#[derive(Default)]
struct WithParameters(Vec<bool>);

impl WithParameters {
    fn of(types: TypeSectionReader<'_>) -> Result<Self, BinaryReaderError> {
        let mut these = Vec::new();
        for group in types {
            these.extend(group?.types().map(|sub| match &sub.composite_type.inner {
                CompositeInnerType::Func(func) => !func.params().is_empty(),
                _ => false,
            }));
        }
        Ok(Self(these))
    }

    fn has(&self, index: Option<u64>) -> bool {
        let index = index.and_then(|index| usize::try_from(index).ok());
        index.and_then(|index| self.0.get(index)).copied().unwrap_or(false)
    }
}

/// The largest offset with which wasmi can store a register at itself.
const NEAR_OFFSET_MAX: u64 = 0xffff;

/// What an instruction left on top.
#[derive(Clone, Copy, PartialEq)]
enum Left {
    Local(u64),
    Other,
    /// What is there may be from before it.
    Unknown,
}

impl Left {
    fn by(operator: Option<Operator<'_>>) -> Self {
        let Some(operator) = operator else { return Self::Unknown };
        match operator.opcode {
            op::LOCAL_GET | op::LOCAL_TEE => Self::Local(operator.number()),
            opcode if op::computes(opcode) => Self::Other,
            _ => Self::Unknown,
        }
    }

    /// Whether a value of this is stored at the same, where `address` is what the
    /// instruction before left.
    fn may_be_at_itself(self, address: Self) -> bool {
        match (self, address) {
            (Self::Local(value), Self::Local(address)) => value == address,
            (Self::Local(_), Self::Unknown) | (Self::Unknown, _) => true,
            _ => false,
        }
    }
}

/// Adds what of a function is to be spelled otherwise, in order.
fn find(
    body: &FunctionBody<'_>,
    with_parameters: &WithParameters,
    found: &mut Vec<Other>,
) -> Result<(), ShapeError> {
    let before = found.len();
    let few = |count: usize| {
        within("instructions that are written anew for the interpreter", count as u64, OTHERS_MAX)
    };
    let selects = |byte: &u8| matches!(*byte, op::SELECT | op::SELECT_TYPED);
    let may_select = body.as_bytes().iter().any(selects);
    // Comparisons after which wasmi may not have emitted anything, and whether the last
    // is what the next instruction takes.
    let (mut compared, mut is_taken) = (Vec::new(), false);
    // The two that may have left address and value of a store.
    let (mut address, mut value) = (None, None);
    for operator in Operators::of(body)? {
        let Operator { at, opcode, .. } = operator;
        let was_compared = core::mem::take(&mut is_taken);
        match opcode {
            op::I32_EQZ..=op::I32_NE | op::REF_IS_NULL if may_select => {
                if was_compared {
                    // Emitted after it, or both of them are computed ahead.
                    compared.pop();
                }
                let (range, bytes) = match opcode {
                    op::I32_EQZ => (at..at + 1, EQZ),
                    op::I32_EQ => (at..at + 1, EQ),
                    op::I32_NE => (at..at + 1, NE),
                    _ => (at + 1..at + 1, EMPTY_BLOCK),
                };
                compared.push(Other { range, bytes });
                few(found.len() + compared.len())?;
                is_taken = true;
            }
            op::SELECT | op::SELECT_TYPED => found.append(&mut compared),
            op::BLOCK..=op::IF if with_parameters.has(operator.block_type()) => {
                found.push(Other { range: at..at, bytes: EMPTY_BLOCK });
                few(found.len() + compared.len())?;
            }
            // That takes it for good.
            op::BR_IF if was_compared => drop(compared.pop()),
            op::IF if was_compared && operator.is_empty_block() => drop(compared.pop()),
            _ if op::stores(opcode)
                && operator.offset() > NEAR_OFFSET_MAX
                && Left::by(value).may_be_at_itself(Left::by(address)) =>
            {
                compared.clear();
                found.push(Other { range: at..at, bytes: EMPTY_BLOCK });
                few(found.len() + compared.len())?;
            }
            _ if op::is_emitted(opcode) => compared.clear(),
            // Whatever else may be computed ahead, and leave the comparison last.
            _ => {}
        }
        // These two leave a register as it is.
        if !matches!(opcode, op::I32_WRAP_I64 | op::I64_EXTEND_I32_U) {
            (address, value) = (value, Some(operator));
        }
    }
    // What goes before an instruction goes before what takes its place.
    found[before..].sort_unstable_by_key(|other| (other.range.start, other.range.end));
    Ok(())
}

/// Writes a function's body with its length before it.
fn spell(code: &mut Vec<u8>, module: &[u8], body: Range<usize>, others: &[Other]) {
    let added: usize = others.iter().map(|it| it.bytes.len() - it.range.len()).sum();
    leb(code, body.len() + added);
    let mut from = body.start;
    for other in others {
        code.extend_from_slice(&module[from..other.range.start]);
        code.extend_from_slice(other.bytes);
        from = other.range.end;
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
            "(module (func (param i32) (result i32 i32)
                local.get 0 block (result i32 i32) i32.const 1 i32.const 2 end drop i32.add
                i32.const 5 i32.const 7 select))",
            // The bytes, but not the instructions.
            "(module (memory 1) (data (i32.const 0) \"\\45\\1b\"))",
            "(module (memory 1) (func (result i32) (i32.load offset=3397 (i32.const 27))))",
            "(module (memory 1) (func (param i32) (result i32) (i32.load (local.get 0))))",
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

    #[test]
    fn an_empty_block_goes_between_a_null_check_and_a_select() {
        let module = |between: &str, taker: &str| {
            bytes(&format!(
                "(module (func (param externref) (result i32) (i32.const 5) (i32.const 7)
                    (local.get 0) ref.is_null {between} {taker}))"
            ))
        };
        let other = respelled(&module("", "select")).unwrap().unwrap();
        assert_eq!(other, module("block end", "select"));
        // Compared once more, that comparison is the last.
        let twice = respelled(&module("", "i32.eqz select")).unwrap().unwrap();
        assert_eq!(twice, module("", "i32.const 1 i32.lt_u select"));
        // And a block with parameters takes both.
        let block = "block (param i32) (result i32) end select";
        let both = respelled(&module("", block)).unwrap().unwrap();
        assert_eq!(both, module("block end block end", block));
        let taken = module("", "if nop end (i32.const 1) select");
        assert_eq!(respelled(&taken).unwrap(), None, "a condition takes it for good");
    }

    #[test]
    fn an_empty_block_goes_before_each_block_with_parameters() {
        let around = |before: &str| {
            bytes(&format!(
                "(module (type (func (param i32) (result i32))) (func (type 0)
                    (local.get 0) (i32.const 1)
                    {before} block (type 0) end
                    {before} loop (type 0) end
                    (local.get 0) {before} if (type 0) nop else nop end
                    block end drop))"
            ))
        };
        assert_eq!(respelled(&around("")).unwrap().unwrap(), around("block end"));
        // Of a type whose index takes more than a byte, as well.
        let far = |before: &str| {
            let types = "(type (func))".repeat(200);
            bytes(&format!(
                "(module {types} (type $last (func (param i32) (result i32)))
                (func (type $last) (local.get 0) {before} block (type $last) end))"
            ))
        };
        assert_eq!(respelled(&far("")).unwrap().unwrap(), far("block end"));
    }

    #[test]
    fn a_comparison_before_a_block_with_parameters_is_respelled_with_it() {
        let module = |compare: &str, before: &str| {
            bytes(&format!(
                "(module (func (param i32) (result i32) (i32.const 5) (i32.const 7)
                    (local.get 0) {compare} {before} block (param i32) (result i32) end select))"
            ))
        };
        assert_eq!(
            respelled(&module("i32.eqz", "")).unwrap().unwrap(),
            module("i32.const 1 i32.lt_u", "block end")
        );
    }

    #[test]
    fn an_empty_block_goes_before_a_far_store_of_what_may_be_its_address() {
        let module = |before: &str, block: &str, store: &str| {
            bytes(&format!(
                "(module (memory 3) (func (param i32 i32) (local.get 0) {before}
                    (local.get 0) {block} {store}))"
            ))
        };
        let far = "i32.store16 offset=70000";
        for before in ["", "nop", "(global.set 0 (i32.const 1))"] {
            let module = |block| {
                let global = "(memory 3) (global (mut i32) (i32.const 0))";
                let text = format!(
                    "(module {global} (func (param i32 i32) (local.get 0) {before}
                        (local.get 0) {block} {far}))"
                );
                bytes(&text)
            };
            assert_eq!(respelled(&module("")).unwrap().unwrap(), module("block end"), "{before}");
        }
        // Another address, or near, or a register of its own.
        for (before, store) in [
            ("drop (local.get 1)", far),
            ("(i32.const 4) i32.add", far),
            ("", "i32.store offset=65535"),
            ("i32.clz", far),
        ] {
            assert_eq!(respelled(&module(before, "", store)).unwrap(), None, "{before} {store}");
        }
    }

    #[test]
    fn more_of_it_than_a_heap_has_room_for_is_refused() {
        let module = |piece: &str, count: u32| {
            let pieces = piece.repeat(count as usize);
            bytes(&format!(
                "(module (func (param i32) {pieces} (drop (select {}))))",
                "(i32.const 1) (i32.const 2) (local.get 0)"
            ))
        };
        // Compared and dropped, with a select at the end; and with one each.
        let drops = "(drop (i32.eqz (local.get 0)))";
        let selects = "(drop (select (i32.const 1) (i32.const 2) (i32.eqz (local.get 0))))";
        for piece in [drops, selects] {
            assert!(respelled(&module(piece, OTHERS_MAX)).unwrap().is_some());
            let refused = respelled(&module(piece, OTHERS_MAX + 1)).unwrap_err();
            assert!(matches!(refused, ShapeError::Over { .. }), "{refused}");
        }
        // One after another is one.
        let chain = format!("(drop (local.get 0 {}))", "i32.eqz ".repeat(200_000));
        let chain = chain.replace("(local.get 0 ", "(block (result i32) local.get 0 ");
        assert!(respelled(&module(&chain, 1)).unwrap().is_some());
    }
}
