//! The operators of a function's body, one after another, at little cost.
//!
//! wasmparser reads all that an operator says and takes ten nanoseconds for each,
//! which makes a fifth of what wasmi takes for it. What is looked for before wasmi
//! needs to know where an operator is, which it is, and one number of it; everything
//! else is stepped over here, by the binary format (WebAssembly core specification,
//! 5.4).
//!
//! A type is taken to be one byte. `funcref` and `externref` may be spelled in full,
//! `(ref null func)`, in two: the second is read as an operator then, the remainder of
//! two numbers, which nobody here looks for, and the next one is where it is.
//!
//! Nothing is validated. What is not an operator of the proposals in
//! [`crate::engine`] ends a body early: wasmi refuses it, and whatever comes behind
//! it with it.

use wasmparser::{BinaryReaderError, FunctionBody};

/// One operator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operator<'a> {
    /// Where it begins, in bytes of the module.
    pub(crate) at: usize,
    /// Its first byte.
    pub(crate) opcode: u8,
    /// The others.
    immediates: &'a [u8],
}

impl Operator<'_> {
    /// Its first number: an index of most, of one with a sign not the value. 0 if it has
    /// none.
    pub(crate) fn number(self) -> u64 {
        number_at(self.immediates, 0).map_or(0, |(number, _)| number)
    }

    /// The offset of a load or a store.
    pub(crate) fn offset(self) -> u64 {
        let offset = |(_, end)| number_at(self.immediates, end);
        number_at(self.immediates, 0).and_then(offset).map_or(0, |(offset, _)| offset)
    }

    /// The index of a block's type, if it has one.
    pub(crate) fn block_type(self) -> Option<u64> {
        // A type by itself is a negative number of one byte.
        let is_index = !matches!(self.immediates, [0x40..=0x7f]);
        is_index.then(|| self.number())
    }

    /// Whether a block has neither parameters nor results.
    pub(crate) fn is_empty_block(self) -> bool {
        self.immediates == [0x40]
    }
}

/// A number in LEB128, and where it ends.
fn number_at(bytes: &[u8], from: usize) -> Option<(u64, usize)> {
    let mut number = 0;
    for (byte, place) in bytes.get(from..)?.iter().zip(0..) {
        // No number is longer in a valid module.
        number |= u64::from(byte & 0x7f).checked_shl(7 * place).unwrap_or(0);
        if byte & 0x80 == 0 {
            return Some((number, from + place as usize + 1));
        }
    }
    None
}

/// The operators of a body, in order.
pub(crate) struct Operators<'a> {
    bytes: &'a [u8],
    /// Where the next one begins in them.
    at: usize,
    /// Where they begin in the module.
    start: usize,
}

impl<'a> Operators<'a> {
    /// # Errors
    /// The local variables before them do not parse.
    pub(crate) fn of(body: &FunctionBody<'a>) -> Result<Self, BinaryReaderError> {
        let start = body.range().start;
        let at = body.get_operators_reader()?.original_position() - start;
        Ok(Self { bytes: body.as_bytes(), at, start })
    }
}

impl<'a> Iterator for Operators<'a> {
    type Item = Operator<'a>;

    #[inline]
    fn next(&mut self) -> Option<Operator<'a>> {
        let from = self.at;
        let (opcode, rest) = self.bytes.get(from..)?.split_first()?;
        let bytes = match few_numbers(*opcode, rest) {
            Some(bytes) => bytes,
            None => immediates(*opcode, rest)?,
        };
        self.at = from + 1 + bytes;
        Some(Operator { at: self.start + from, opcode: *opcode, immediates: &rest[..bytes] })
    }
}

/// How many numbers an operator has behind its first byte; [`NOT_NUMBERS`] if that is not
/// all, or not known.
const NUMBERS: [u8; 256] = {
    let mut numbers = [NOT_NUMBERS; 256];
    let mut opcode = 0;
    while opcode < numbers.len() {
        numbers[opcode] = match opcode {
            // Control, `drop` and `select` without any; numeric ones; `ref.is_null`.
            0x00 | 0x01 | 0x05 | 0x0b | 0x0f | 0x1a | 0x1b | 0x45..=0xc4 | 0xd1 => 0,
            // Blocks, branches, calls, variables, `table.get`, `table.set`, `memory.size`,
            // `memory.grow`, `i32.const`, `i64.const`, `ref.null`, `ref.func`.
            0x02..=0x04 | 0x0c | 0x0d | 0x10 | 0x12 => 1,
            0x20..=0x26 | 0x3f..=0x42 | 0xd0 | 0xd2 => 1,
            // Indirect calls, loads and stores.
            0x11 | 0x13 | 0x28..=0x3e => 2,
            _ => NOT_NUMBERS,
        };
        opcode += 1;
    }
    numbers
};
const NOT_NUMBERS: u8 = 3;

/// How long an operator's numbers are, in bytes, if it has no more than two, and these are
/// short and not the last of a body: nearly all. What a processor would have to guess costs
/// more than all else here, so nothing depends on how many and how long they are.
#[inline]
fn few_numbers(opcode: u8, bytes: &[u8]) -> Option<usize> {
    let ahead = u64::from_le_bytes(*bytes.first_chunk()?);
    // The last byte of each number has its highest bit clear.
    let ends = !ahead & 0x8080_8080_8080_8080;
    let end = |ends: u64| (ends.trailing_zeros() as usize + 1) / 8;
    let first = end(ends);
    let second = end(ends & ends.wrapping_sub(1));
    let numbers = NUMBERS[usize::from(opcode)];
    let bytes = match numbers {
        0 => 0,
        1 => first,
        _ => second,
    };
    (numbers < NOT_NUMBERS && ends & ends.wrapping_sub(1) != 0).then_some(bytes)
}

/// How long the immediates of any operator are, in bytes.
#[cold]
fn immediates(opcode: u8, bytes: &[u8]) -> Option<usize> {
    let numbers = |count: u64, from: usize| {
        let mut end = from;
        for _ in 0..count {
            (_, end) = number_at(bytes, end)?;
        }
        Some(end)
    };
    let skipped = |count: u64, from: usize| {
        let left = bytes.len().checked_sub(from)?;
        usize::try_from(count).ok().filter(|count| *count <= left).map(|count| from + count)
    };
    match (opcode, NUMBERS[usize::from(opcode)]) {
        (_, count @ ..NOT_NUMBERS) => numbers(count.into(), 0),
        // `br_table`: its labels, and one more.
        (0x0e, _) => number_at(bytes, 0).and_then(|(count, at)| numbers(count.checked_add(1)?, at)),
        // `select` with types, of a byte each.
        (0x1c, _) => number_at(bytes, 0).and_then(|(count, at)| skipped(count, at)),
        // `f32.const`, `f64.const`.
        (0x43, _) => skipped(4, 0),
        (0x44, _) => skipped(8, 0),
        (0xfc, _) => {
            let (which, at) = number_at(bytes, 0)?;
            let count = match which {
                // Conversions that saturate.
                0..=7 => 0,
                // `data.drop`, `memory.fill`, `elem.drop`, `table.grow`, `table.size`,
                // `table.fill`.
                9 | 11 | 13 | 15..=17 => 1,
                // `memory.init`, `memory.copy`, `table.init`, `table.copy`.
                8 | 10 | 12 | 14 => 2,
                _ => return None,
            };
            numbers(count, at)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use alloc::vec::Vec;
    use wasmparser::{BlockType, Operator as Read, Parser, Payload};

    /// Holds each function of a module to what wasmparser reads; how many operators
    /// they have.
    fn is_read_alike(module: &[u8]) -> usize {
        let mut count = 0;
        for payload in Parser::new(0).parse_all(module) {
            let Payload::CodeSectionEntry(body) = payload.unwrap() else { continue };
            let mut theirs = body.get_operators_reader().unwrap();
            for ours in Operators::of(&body).unwrap() {
                let (read, at) = theirs.read_with_offset().unwrap();
                assert_eq!((ours.at, ours.opcode), (at, module[at]), "{read:?}");
                match read {
                    Read::Block { blockty } | Read::Loop { blockty } | Read::If { blockty } => {
                        let index = match blockty {
                            BlockType::FuncType(index) => Some(index.into()),
                            _ => None,
                        };
                        assert_eq!(ours.block_type(), index);
                        assert_eq!(ours.is_empty_block(), blockty == BlockType::Empty);
                    }
                    Read::LocalGet { local_index: index }
                    | Read::LocalTee { local_index: index }
                    | Read::Call { function_index: index } => {
                        assert_eq!(ours.number(), u64::from(index));
                    }
                    Read::I32Store { memarg } | Read::I64Store32 { memarg } => {
                        assert_eq!(ours.offset(), memarg.offset);
                    }
                    _ => {}
                }
                count += 1;
            }
            assert!(theirs.eof(), "{:?} was left", theirs.read());
        }
        count
    }

    #[test]
    fn each_kind_of_operator_is_as_long_as_wasmparser_reads_it() {
        let kinds = "
            unreachable nop block end loop (result i32) i32.const 1 end drop
            i32.const 1 if (type $t) nop else nop end i32.const 1 br_if 0
            local.get 0 br_table 0 0 0 i32.const -70000 i64.const 0x7fffffffffffffff
            f32.const 1.5 f64.const -2.5 select select (result f64) drop
            local.get 0 local.tee 0 local.set 0 global.get $g global.set $g
            i32.const 0 table.get $a ref.is_null i32.const 0 ref.null func table.set $a
            ref.func $f drop call $f i32.const 0 call_indirect (type $t)
            i32.const 0 i64.load32_s offset=0xffffffff drop
            i32.const 0 i32.const 0 i32.store offset=70000 align=1
            memory.size memory.grow i32.trunc_sat_f64_u i64.extend32_s i32.eqz
            memory.init $d data.drop $d memory.copy memory.fill
            table.init $a $e elem.drop $e table.copy $a $a table.grow $a table.size $a table.fill $a
            return_call $f return_call_indirect (type $t) return";
        let text = alloc::format!(
            "(module (type $t (func)) (table $a 1 funcref) (memory 1) (data $d \"\")
            (elem $e func $f) (global $g (mut i32) (i32.const 0))
            (func $f (param i32) (local i64 f32 f32) {kinds}))"
        );
        assert!(is_read_alike(&wat::parse_str(text).unwrap()) > 60);
    }

    #[test]
    fn the_modules_of_the_test_suite_are_read_as_wasmparser_reads_them() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/wast-sample");
        let mut count = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|it| it == "wasm") {
                count += is_read_alike(&std::fs::read(path).unwrap());
            }
        }
        assert!(count > 10_000, "{count}");
    }

    fn of_bytes(bytes: &[u8]) -> Operators<'_> {
        Operators { bytes, at: 0, start: 0 }
    }

    #[test]
    fn numbers_may_be_longer_than_they_need_be() {
        // Before many other bytes, and before none.
        for behind in [0, 20] {
            let read = |bytes: &[u8]| {
                let bytes = [bytes, &[0x01; 20][..behind]].concat();
                let all: Vec<_> = of_bytes(&bytes).map(|it| (it.at, it.opcode)).collect();
                let nops = all.iter().filter(|(_, opcode)| *opcode == 0x01).count();
                assert_eq!(nops, behind);
                (of_bytes(&bytes).next().unwrap().number(), all.len() - nops)
            };
            assert_eq!(read(&[0x02, 0x83, 0x80, 0x00, 0x0b]), (3, 2));
            assert_eq!(
                read(&[0x36, 0x82, 0x80, 0x80, 0x80, 0x00, 0x80, 0x80, 0x84, 0x80, 0x00]),
                (2, 1)
            );
            assert_eq!(read(&[0xfc, 0x8f, 0x00, 0x80, 0x00]), (15, 1));
            assert_eq!(
                read(&[0x42, 0x87, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x00]),
                (7, 1)
            );
        }
        let far = of_bytes(&[0x36, 0x82, 0x00, 0x80, 0x80, 0x04]).next().unwrap();
        assert_eq!(far.offset(), 0x10000);
    }

    #[test]
    fn a_reference_type_that_is_spelled_in_full_hides_no_operator() {
        for full in [[0x63, 0x70], [0x63, 0x6f]] {
            // `block`, `loop` and `if` of such a type, and a `select`.
            for before in [&[0x02][..], &[0x03], &[0x04], &[0x1c, 0x01]] {
                for behind in [1, 20] {
                    let bytes = [before, &full, &[0x0b].repeat(behind)].concat();
                    let all: Vec<_> = of_bytes(&bytes).map(|it| (it.at, it.opcode)).collect();
                    let at = before.len() + full.len();
                    assert_eq!(all[..2], [(0, before[0]), (at - 1, full[1])]);
                    assert_eq!(all[2..].len(), behind);
                    assert_eq!(all[2], (at, 0x0b));
                    let first = of_bytes(&bytes).next().unwrap();
                    assert!(!first.is_empty_block());
                    assert!(before[0] == 0x1c || first.block_type().is_none());
                }
            }
        }
    }

    #[test]
    fn what_is_cut_off_or_of_no_proposal_that_is_on_is_an_end() {
        for bytes in [
            &[0x20][..],
            &[0x41, 0x80, 0x80],
            &[0x43, 0, 0, 0],
            &[0x0e, 0xff, 0xff, 0xff, 0xff, 0x0f, 0x00],
            &[0x0e, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01, 0x00],
            &[0x1c, 0xff, 0xff, 0xff, 0xff, 0x0f],
            &[0x41, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80],
            &[0xfc, 0x13],
            &[0xfd, 0x0c],
            &[0x06, 0x40],
        ] {
            assert!(of_bytes(bytes).next().is_none(), "{bytes:x?}");
        }
    }
}
