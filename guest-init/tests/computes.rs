//! What the interpreter computes is what WebAssembly says.
//!
//! The wasm test-suite has each instruction by itself. What an interpreter makes of
//! several together is looked for here: expressions of many of them, drawn from a
//! seed, beside a computation of the same by Rust.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::fmt::Write as _;

use forge_protocol::ending::{Ending, RejectKind};
use support::Run;

/// Whether `first` and `second`, bodies that leave an `i32`, do so alike for each
/// of these parameters: the first for which they do not.
fn first_difference(first: &str, second: &str, values: &[i32]) -> Option<i32> {
    let calls: String = values
        .iter()
        .enumerate()
        .map(|(at, x)| {
            let differ =
                format!("(i32.ne (call $first (i32.const {x})) (call $second (i32.const {x})))");
            format!("(if {differ} (then (return (i32.const {}))))", at + 1)
        })
        .collect();
    let module = format!(
        "(module (memory (export \"memory\") 1) (elem declare func $first)
            (func $first (param $x i32) (result i32) {first})
            (func $second (param $x i32) (result i32) {second})
            (func (export \"forge_run\") (result i32) {calls} (i32.const 0)))"
    );
    match Run::of(&module).go().ending() {
        Ending::Returned(0) => None,
        Ending::Returned(at) => Some(values[*at as usize - 1]),
        other => panic!("{module}: {other:?}"),
    }
}

#[test]
fn a_select_by_a_comparison_with_zero_picks_what_a_condition_by_it_picks() {
    let conditions = [
        "local.get $x i32.eqz",
        "local.get $x i32.const 0 i32.eq",
        "i32.const 0 local.get $x i32.eq",
        "local.get $x i32.const 0 i32.ne",
        "i32.const 0 local.get $x i32.ne",
        "local.get $x i32.eqz i32.eqz",
        "local.get $x i32.eqz i32.const 0 i32.ne",
        "local.get $x i32.const 0 i32.ne i32.eqz",
        "local.get $x local.get $x i32.eq",
        "local.get $x i32.const 5 i32.ne",
        "local.get $x i32.const 1 i32.and i32.eqz",
        "local.get $x i32.const 5 i32.xor i32.eqz",
        "local.get $x i64.extend_i32_s i64.eqz",
        "block (result i32) local.get $x i32.eqz end",
    ];
    let between = [
        "",
        "nop",
        "i32.const 9 drop",
        "local.get $x drop",
        "block end",
        "nop nop",
        // Computed ahead, so that nothing is emitted.
        "i64.const 1 i64.eqz drop",
        "i32.const 3 i32.const 4 i32.mul drop",
        "i32.const 4 i32.const 1 select",
        "i32.const 4 i64.const 0 i64.eqz select",
        "i32.const 1 i32.eqz if nop end",
        "block i32.const 0 br_if 0 end",
    ];
    let arms = [
        ("i32.const 5 i32.const 7", "select", ""),
        ("i32.const 5 i32.const 7", "select (result i32)", ""),
        ("local.get $x i32.const 7", "select", ""),
        ("i64.const 5 i64.const 7", "select", "i32.wrap_i64"),
        ("f32.const 5 f32.const 7", "select", "i32.trunc_f32_s"),
        ("f64.const 5 f64.const 7", "select", "i32.trunc_f64_s"),
        ("ref.null func ref.func 0", "select (result funcref)", "ref.is_null"),
    ];
    for condition in conditions {
        for (values, select, after) in arms {
            let (ty, mut picked) = ("(result i32)", ["i32.const 5", "i32.const 7"]);
            match values {
                "local.get $x i32.const 7" => picked[0] = "local.get $x",
                "ref.null func ref.func 0" => picked = ["i32.const 1", "i32.const 0"],
                _ => {}
            }
            let second = format!("{condition} if {ty} {} else {} end", picked[0], picked[1]);
            for between in between {
                let first = format!("{values} {condition} {between} {select} {after}");
                let differs = first_difference(&first, &second, &[0, 1, 5, -1, i32::MIN]);
                assert_eq!(differs, None, "{first}");
            }
        }
    }
}

#[test]
fn a_select_by_whether_a_variable_is_null_picks_by_that() {
    for (ty, reference, picked) in [
        ("funcref", "(ref.null func)", 5),
        ("funcref", "(ref.func $pick)", 7),
        ("externref", "(ref.null extern)", 5),
    ] {
        for (between, swaps) in [
            ("", false),
            ("nop", false),
            ("i32.const 9 drop", false),
            ("i64.const 1 i64.eqz drop", false),
            ("i32.eqz", true),
            ("i32.const 0 i32.ne", false),
        ] {
            let expected = if swaps { 12 - picked } else { picked };
            // What the addition leaves in a register is what a wrong one looks at.
            for left in [-1, 0, 41] {
                let module = format!(
                    "(module (memory (export \"memory\") 1) (global (mut i32) (i32.const 0))
                    (elem declare func $pick)
                    (func $pick (param $r {ty}) (param $y i32) (result i32)
                        (global.set 0 (i32.add (local.get $y) (i32.const 1)))
                        i32.const 5 i32.const 7 local.get $r ref.is_null {between} select)
                    (func (export \"forge_run\") (result i32)
                        (call $pick {reference} (i32.const {left}))))"
                );
                assert_eq!(Run::of(&module).go().ending(), &Ending::Returned(expected), "{module}");
            }
        }
    }
}

#[test]
fn a_variable_is_stored_at_its_own_address_however_far_the_offset() {
    for (store, load) in [
        ("i32.store", "i32.load"),
        ("i32.store8", "i32.load8_u"),
        ("i32.store16", "i32.load16_u"),
        ("i64.extend_i32_u i64.store", "i32.load"),
        ("i64.extend_i32_u i64.store32", "i32.load"),
    ] {
        for offset in [0, 65_535, 65_536, 70_000, 1_000_000] {
            for (between, after) in [
                ("", ""),
                ("nop", ""),
                ("i32.const 7 drop", ""),
                ("local.get $y global.set 0", ""),
                ("", "nop"),
                ("", "i32.const 7 drop"),
                ("", "local.get $y i32.const 1 select"),
            ] {
                let module = format!(
                    "(module (memory (export \"memory\") 20) (global (mut i32) (i32.const 0))
                    (func $f (param $x i32) (param $y i32) (result i32)
                        local.get $x i32.const 255 i32.and local.tee $x {between}
                        local.get $x {after} {store} offset={offset}
                        i32.const 200 {load} offset={offset})
                    (func (export \"forge_run\") (result i32)
                        (i32.ne (call $f (i32.const 456) (i32.const 1)) (i32.const 200))))"
                );
                let report = Run::of(&module).go();
                assert_eq!(report.ending(), &Ending::Returned(0), "{module}");
            }
        }
    }
}

#[test]
fn a_table_of_several_values_that_would_leave_others_is_refused_and_others_compute() {
    let module = |below: &str| {
        format!(
            "(module (memory (export \"memory\") 1)
            (func $f (param $x i32) (param $which i32) (result i32 i32)
                block (result i32 i32)
                    {below} local.get $x i32.const 5 local.get $which br_table 0 1
                end)
            (func (export \"forge_run\") (result i32)
                (call $f (i32.const 300) (i32.const 1)) i32.sub i32.const 295 i32.ne))"
        )
    };
    match Run::of(&module("i32.const 77")).go().ending() {
        Ending::Rejected { kind: RejectKind::TooLarge, detail } => {
            assert!(detail.contains("br_table"), "{detail}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(Run::of(&module("")).go().ending(), &Ending::Returned(0));
}

/// Numbers from a seed (Marsaglia, Xorshift RNGs). Its copy draws the same.
#[derive(Clone)]
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % bound
    }

    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
}

/// The local variables of an expression, and what they hold.
type Locals = [i32; PARAMETERS];

const PARAMETERS: usize = 3;
/// How deep expressions are inside one another.
const DEPTH: usize = 6;

const NUMBERS: &[i32] = &[0, 0, 1, 2, 7, 31, 32, 255, 65_536, -1, -2, i32::MIN, i32::MAX];

/// An instruction of one operand, by its name.
type Unary = (&'static str, fn(i32) -> i32);
/// One of two.
type Binary = (&'static str, fn(i32, i32) -> i32);

const UNARY: &[Unary] = &[
    ("eqz", |a| (a == 0).into()),
    ("eqz", |a| (a == 0).into()),
    ("clz", |a| a.leading_zeros() as i32),
    ("ctz", |a| a.trailing_zeros() as i32),
    ("popcnt", |a| a.count_ones() as i32),
    ("extend8_s", |a| (a as i8).into()),
    ("extend16_s", |a| (a as i16).into()),
];

const BINARY: &[Binary] = &[
    ("add", i32::wrapping_add),
    ("sub", i32::wrapping_sub),
    ("mul", i32::wrapping_mul),
    ("and", |a, b| a & b),
    ("or", |a, b| a | b),
    ("xor", |a, b| a ^ b),
    ("shl", |a, b| a.wrapping_shl(b as u32)),
    ("shr_s", |a, b| a.wrapping_shr(b as u32)),
    ("shr_u", |a, b| (a as u32).wrapping_shr(b as u32) as i32),
    ("rotl", |a, b| a.rotate_left(b as u32 % 32)),
    ("rotr", |a, b| a.rotate_right(b as u32 % 32)),
    ("eq", |a, b| (a == b).into()),
    ("ne", |a, b| (a != b).into()),
    ("lt_s", |a, b| (a < b).into()),
    ("lt_u", |a, b| ((a as u32) < b as u32).into()),
    ("gt_s", |a, b| (a > b).into()),
    ("gt_u", |a, b| (a as u32 > b as u32).into()),
    ("le_s", |a, b| (a <= b).into()),
    ("le_u", |a, b| (a as u32 <= b as u32).into()),
    ("ge_s", |a, b| (a >= b).into()),
    ("ge_u", |a, b| (a as u32 >= b as u32).into()),
];

/// Writes an expression and computes it. Operands are computed from left to right,
/// and of a condition one arm.
fn expression(draw: &mut Draw, depth: usize, text: &mut String, locals: &mut Locals) -> i32 {
    if depth == 0 || draw.below(6) == 0 {
        if draw.below(3) == 0 {
            let number = draw.of(NUMBERS);
            write!(text, " i32.const {number}").unwrap();
            return number;
        }
        let local = draw.below(locals.len());
        write!(text, " local.get {local}").unwrap();
        return locals[local];
    }
    match draw.below(12) {
        0 | 1 => {
            let (name, compute) = draw.of(UNARY);
            let value = expression(draw, depth - 1, text, locals);
            write!(text, " i32.{name}").unwrap();
            compute(value)
        }
        2..=4 => {
            let (name, compute) = draw.of(BINARY);
            let first = expression(draw, depth - 1, text, locals);
            let second = expression(draw, depth - 1, text, locals);
            write!(text, " i32.{name}").unwrap();
            compute(first, second)
        }
        5 | 6 => {
            let first = expression(draw, depth - 1, text, locals);
            let second = expression(draw, depth - 1, text, locals);
            let condition = expression(draw, depth - 1, text, locals);
            text.push_str(" select");
            if condition != 0 { first } else { second }
        }
        7 => {
            let local = draw.below(locals.len());
            let value = expression(draw, depth - 1, text, locals);
            write!(text, " local.tee {local}").unwrap();
            locals[local] = value;
            value
        }
        8 => {
            let condition = expression(draw, depth - 1, text, locals);
            let mut others = *locals;
            text.push_str(" if (result i32)");
            let first = expression(draw, depth - 1, text, locals);
            text.push_str(" else");
            let second = expression(draw, depth - 1, text, &mut others);
            text.push_str(" end");
            if condition != 0 {
                return first;
            }
            *locals = others;
            second
        }
        // The rest have a parameter: one is left out or not,
        9 => {
            let value = expression(draw, depth - 1, text, locals);
            text.push_str(" block (param i32) (result i32)");
            let leaves = expression(draw, depth - 1, text, locals);
            text.push_str(" br_if 0");
            let mut others = *locals;
            let more = expression(draw, depth - 1, text, &mut others);
            text.push_str(" i32.sub end");
            if leaves != 0 {
                return value;
            }
            *locals = others;
            value.wrapping_sub(more)
        }
        // one has two arms,
        10 => {
            let value = expression(draw, depth - 1, text, locals);
            let condition = expression(draw, depth - 1, text, locals);
            let mut others = *locals;
            text.push_str(" if (param i32) (result i32)");
            let first = expression(draw, depth - 1, text, locals);
            text.push_str(" i32.xor else");
            let second = expression(draw, depth - 1, text, &mut others);
            text.push_str(" i32.sub end");
            if condition != 0 {
                return value ^ first;
            }
            *locals = others;
            value.wrapping_sub(second)
        }
        // and one is done twice, counted by a variable that only this depth has.
        _ => {
            let value = expression(draw, depth - 1, text, locals);
            let counter = PARAMETERS + depth;
            text.push_str(" loop (param i32) (result i32)");
            let mut again = draw.clone();
            let first = expression(draw, depth - 1, text, locals);
            let second = expression(&mut again, depth - 1, &mut String::new(), locals);
            write!(text, " i32.sub local.get {counter} i32.eqz local.tee {counter} br_if 0 end")
                .unwrap();
            value.wrapping_sub(first).wrapping_sub(second)
        }
    }
}

#[test]
fn expressions_of_many_instructions_compute_as_they_should() {
    const EACH: usize = 100;
    for seed in 1..=40u64 {
        let mut draw = Draw(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let (mut functions, mut calls) = (String::new(), String::new());
        for at in 1..=EACH {
            let parameters: Locals = std::array::from_fn(|_| draw.of(NUMBERS));
            let (mut text, mut locals) = (String::new(), parameters);
            let expected = expression(&mut draw, DEPTH, &mut text, &mut locals);
            let counters = " i32".repeat(DEPTH + 1);
            writeln!(
                functions,
                "(func $f{at} (param i32 i32 i32) (result i32) (local{counters}) {text})"
            )
            .unwrap();
            let [a, b, c] = parameters.map(|it| format!("(i32.const {it})"));
            write!(
                calls,
                "(if (i32.ne (call $f{at} {a} {b} {c}) (i32.const {expected}))
                    (then (return (i32.const {at}))))"
            )
            .unwrap();
        }
        let module = format!(
            "(module (memory (export \"memory\") 1) {functions}
                (func (export \"forge_run\") (result i32) {calls} (i32.const 0)))"
        );
        let report = Run::of(&module).go();
        assert_eq!(
            report.ending(),
            &Ending::Returned(0),
            "seed {seed}: the function of this number computes something else\n{functions}"
        );
    }
}
