//! What is refused before it runs, and what ends a program that does.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use forge_guest_init::ServeError;
use forge_protocol::ending::{Ending, LimitKind, RejectKind, TrapKind};
use forge_protocol::limits::{OUTPUT_BYTES_MAX, REASON_BYTES_MAX, RunLimits};
use forge_protocol::signature::SignerKey;
use support::{Report, Run, program, signer};

const MINIMAL: &str = r#"(module (memory (export "memory") 1)
    (func (export "forge_run") (result i32) (i32.const 0)))"#;

fn rejected(report: &Report, expected: RejectKind, says: &[&str]) {
    match report.ending() {
        Ending::Rejected { kind, detail } if *kind == expected => {
            for text in says {
                assert!(detail.contains(text), "{text:?} is not in {detail:?}");
            }
        }
        other => panic!("{other:?}"),
    }
    let ended = report.ended();
    assert_eq!((ended.fuel_used, ended.memory_peak_bytes, ended.run_ticks), (0, 0, 0));
    assert!(report.calls.is_empty() && report.output.is_empty());
}

fn trapped(text: &str, expected: TrapKind) {
    match Run::of(text).go().ending() {
        Ending::Trap { kind, .. } => assert_eq!(*kind, expected, "{text}"),
        other => panic!("{text}: {other:?}"),
    }
}

/// A module whose `forge_run` is `body`, after `fields`.
fn module(fields: &str, body: &str) -> String {
    format!(
        r#"(module {fields} (memory (export "memory") 1)
        (func $run (export "forge_run") (result i32) {body}))"#
    )
}

// ---- refused

#[test]
fn an_unsigned_program_is_refused_before_it_is_parsed() {
    // Not even a module: whoever parsed it would say so.
    let mut nonsense = b"\0asm\x01\0\0\0".to_vec();
    nonsense.extend_from_slice(b"\x7f\x02no");
    rejected(&Run::as_is(nonsense).go(), RejectKind::Signature, &["not signed"]);
    let unsigned = wat::parse_str(MINIMAL).unwrap();
    rejected(&Run::as_is(unsigned).go(), RejectKind::Signature, &["not signed"]);
    rejected(&Run::as_is(Vec::new()).go(), RejectKind::Signature, &["no core WebAssembly"]);
}

#[test]
fn a_changed_or_wrongly_signed_program_is_refused() {
    let signed = signer().sign(&wat::parse_str(MINIMAL).unwrap()).unwrap();
    assert_eq!(Run::as_is(signed.clone()).go().ending(), &Ending::Returned(0));
    let mut flipped = signed.clone();
    *flipped.last_mut().unwrap() ^= 1;
    rejected(&Run::as_is(flipped).go(), RejectKind::Signature, &["changed since"]);
    let stranger = SignerKey::from_secret(&[8; 32]).sign(&signed).unwrap();
    rejected(&Run::as_is(stranger).go(), RejectKind::Signature, &["no trusted key"]);
}

#[test]
fn a_module_that_is_no_webassembly_is_invalid() {
    // A type section that is cut off, well framed as a section.
    let broken = Run::of_bytes(b"\0asm\x01\0\0\0\x01\x02\x05\x60");
    rejected(&broken.go(), RejectKind::Invalid, &[]);
    // Well-formed, ill-typed.
    rejected(&Run::of(&module("", "(i64.const 0)")).go(), RejectKind::Invalid, &["type mismatch"]);
}

#[test]
fn proposals_that_are_off_are_invalid() {
    for (fields, body) in [
        ("(memory 1)", "(i32.const 0)"),
        ("(import \"a\" \"b\" (memory i64 1))", "(i32.const 0)"),
        ("", "(drop (v128.const i64x2 0 0)) (i32.const 0)"),
        ("(tag)", "(i32.const 0)"),
        ("(type (struct))", "(i32.const 0)"),
        ("", "(i32.atomic.load (i32.const 0))"),
        (
            "",
            "(drop (i64.add128 (i64.const 0) (i64.const 0) (i64.const 0) (i64.const 0)))
              (drop) (i32.const 0)",
        ),
    ] {
        let report = Run::of(&module(fields, body)).go();
        match report.ending() {
            Ending::Rejected { kind: RejectKind::Invalid | RejectKind::TooLarge, .. } => {}
            other => panic!("{fields} {body}: {other:?}"),
        }
    }
    let small_pages = r#"(module (memory (export "memory") 1 (pagesize 1))
        (func (export "forge_run") (result i32) (i32.const 0)))"#;
    rejected(&Run::of(small_pages).go(), RejectKind::Invalid, &[]);
}

#[test]
fn proposals_that_are_on_run() {
    for (fields, body) in [
        ("(global $g (mut i32) (i32.const 5))", "(global.set $g (i32.const 0)) (global.get $g)"),
        ("", "(i32.extend8_s (i32.const 0x100))"),
        ("", "(i32.trunc_sat_f32_s (f32.const nan))"),
        ("(func $two (result i32 i32) (i32.const 4) (i32.const 4))", "(i32.sub (call $two))"),
        ("", "(memory.fill (i32.const 0) (i32.const 0) (i32.const 9)) (i32.load (i32.const 0))"),
        ("(table 2 externref)", "(i32.sub (table.size 0) (i32.const 2))"),
        ("(func $zero (result i32) (i32.const 0))", "(return_call $zero)"),
        ("(global $g i32 (i32.sub (i32.const 3) (i32.const 3)))", "(global.get $g)"),
    ] {
        assert_eq!(Run::of(&module(fields, body)).go().ending(), &Ending::Returned(0), "{body}");
    }
}

#[test]
fn an_unknown_import_is_named() {
    let report = Run::of(&module("(import \"env\" \"abort\" (func))", "(i32.const 0)")).go();
    rejected(
        &report,
        RejectKind::Import,
        &["\"env\".\"abort\"", "`tool`, `forge` and `wasi_snapshot_preview1`"],
    );
    let field = "(import \"wasi_snapshot_preview1\" \"sock_open\" (func))";
    rejected(
        &Run::of(&module(field, "(i32.const 0)")).go(),
        RejectKind::Import,
        &["\"sock_open\"", "no such function in WASI preview 1"],
    );
}

#[test]
fn a_program_with_a_tool_that_is_not_granted_is_not_run() {
    let field = "(import \"tool\" \"a.b\" (func (param i32 i32) (result i32)))
        (import \"tool\" \"github.delete\" (func (param i32 i32) (result i32)))";
    let report = Run::of(&module(field, "(i32.const 0)")).go();
    rejected(&report, RejectKind::Import, &["\"tool\".\"github.delete\"", "grant"]);
    assert!(!format!("{:?}", report.ending()).contains("a.b"));
    // Said in the same words to a program that was prepared first.
    let prepared = Run::of(&module(field, "(i32.const 0)")).announced().go();
    assert_eq!(prepared.ending(), report.ending());
}

#[test]
fn a_prepared_program_runs_as_one_that_was_not() {
    let text = program(
        &["a.b"],
        r#"(data (i32.const 0) "{}")"#,
        "(call $random (i32.const 64) (i32.const 8))
        (i64.store (i32.const 72) (call $now_ns))
        (drop (call $a.b (i32.const 0) (i32.const 2)))
        (drop (call $output (i32.const 64) (i32.const 16)))
        (drop (call $output (i32.const 0)
            (call $input_read (i32.const 0) (i32.const 0) (i32.const 100))))
        (i32.const 3)",
    );
    let plain = Run::of(&text).input("{\"of\":1}").go();
    let prepared = Run::of(&text).input("{\"of\":1}").announced().go();
    assert_eq!(plain.ending(), &Ending::Returned(3));
    assert_eq!(prepared.ended(), plain.ended());
    assert_eq!(prepared.output, plain.output);
    assert_eq!(prepared.calls, plain.calls);
    // One send more, by which it says that it is prepared.
    assert_eq!(prepared.sends, plain.sends + 1);
}

#[test]
fn a_program_that_does_not_load_ends_before_its_run_is_there() {
    let outside = r#"(module (memory (export "memory") 1)
        (data (i32.const 65535) "too far")
        (func (export "forge_run") (result i32) (i32.const 0)))"#;
    for text in [outside, "(module)"] {
        let plain = Run::of(text).go();
        let prepared = Run::of(text).announced().go();
        assert_eq!(prepared.ended(), plain.ended());
        // It greeted and it ended.
        assert_eq!(prepared.sends, 2, "{text}");
    }
}

#[test]
fn an_import_of_another_type_is_refused_and_both_types_are_named() {
    for (field, says) in [
        (
            "(import \"forge\" \"output\" (func (param i64 i32) (result i32)))",
            "is (func (param i64 i32) (result i32)), the ABI has (func (param i32 i32)",
        ),
        ("(import \"tool\" \"a.b\" (func))", "is (func), the ABI has"),
        (
            "(import \"forge\" \"resp_len\" (func (result f32)))",
            "is (func (result f32)), the ABI has (func (result i32))",
        ),
        ("(import \"forge\" \"output\" (global i32))", "is no function"),
        ("(import \"tool\" \"a.b\" (table 1 funcref))", "is no function"),
    ] {
        rejected(&Run::of(&module(field, "(i32.const 0)")).go(), RejectKind::Import, &[says]);
    }
}

#[test]
fn every_violation_is_listed_up_to_a_bound() {
    let mut fields = String::new();
    for number in 0..20 {
        fields.push_str(&format!("(import \"env\" \"f{number}\" (func))"));
    }
    let report = Run::of(&module(&fields, "(i32.const 0)")).go();
    rejected(&report, RejectKind::Import, &["\"f0\"", "\"f7\"", "and 12 more"]);
    assert!(!format!("{:?}", report.ending()).contains("\"f8\""));
}

#[test]
fn names_a_module_chose_are_escaped_and_cut() {
    let long = "x".repeat(100_000);
    let field =
        format!("(import \"\\1b[2J\\n\" \"{long}\" (func)) (import \"{long}\" \"\" (func))");
    let report = Run::of(&module(&field, "(i32.const 0)")).go();
    let Ending::Rejected { detail, .. } = report.ending() else { panic!() };
    assert!(detail.len() < REASON_BYTES_MAX && !detail.contains('\u{1b}'), "{detail}");
    assert!(detail.contains("\\u{1b}[2J\\n"), "{detail}");
}

#[test]
fn exports_the_abi_needs_are_checked() {
    let run = "(func (export \"forge_run\") (result i32) (i32.const 0))";
    let memory = "(memory (export \"memory\") 1)";
    for (fields, says) in [
        (run.to_owned(), "no exported `memory`"),
        (memory.to_owned(), "neither `forge_run` nor `_start`"),
        (format!("{run} (global (export \"memory\") i32 (i32.const 0))"), "no linear memory"),
        (format!("{memory} (func (export \"forge_run\"))"), "`forge_run` is (func), the ABI has"),
        (
            format!("{memory} (func (export \"_start\") (param i32))"),
            "`_start` is (func (param i32)), the ABI has (func)",
        ),
        (
            format!("{memory} {run} (func (export \"_initialize\") (param i64))"),
            "`_initialize` is (func (param i64))",
        ),
        (format!("{memory} (global (export \"forge_run\") i32 (i32.const 0))"), "no function"),
    ] {
        let report = Run::of(&format!("(module {fields})")).go();
        rejected(&report, RejectKind::Export, &[says]);
    }
}

#[test]
fn a_start_section_is_refused() {
    let report = Run::of(&module("(func $s) (start $s)", "(i32.const 0)")).go();
    rejected(&report, RejectKind::StartSection, &["start section"]);
}

#[test]
fn a_module_with_too_many_functions_is_refused() {
    let report = Run::of(&module(&"(func)".repeat(20_001), "(i32.const 0)")).go();
    rejected(
        &report,
        RejectKind::TooLarge,
        &["the module has 20002 functions, the limit is 20000"],
    );
}

#[test]
fn a_valid_function_that_is_too_much_for_the_engine_is_refused_as_too_large() {
    let operands = |count: usize| {
        let (values, drops) = ("(i32.const 0)".repeat(count), "drop ".repeat(count));
        format!("{values} {drops} (i32.const 0)")
    };
    assert_eq!(Run::of(&module("", &operands(65_000))).go().ending(), &Ending::Returned(0));
    let report = Run::of(&module("", &operands(66_000))).go();
    rejected(&report, RejectKind::TooLarge, &["more registers"]);
}

#[test]
fn of_locals_twice_as_many_count_beside_operands() {
    // Parameters are locals, and what is loaded is an operand that no constant stands for.
    let with = |params: usize, locals: usize, operands: usize| {
        let (params, locals) = (" i64".repeat(params), " i32".repeat(locals));
        let loads = "(i32.load (i32.const 0)) ".repeat(operands);
        let drops = "drop ".repeat(operands);
        let field = format!("(func (param{params}) (local{locals}) {loads} {drops})");
        Run::of(&module(&field, "(i32.const 0)")).go()
    };
    for (params, locals) in [(0, 0), (0, 24_000), (100, 20_000)] {
        let most = 65_535 - 2 * (params + locals);
        assert_eq!(with(params, locals, most).ending(), &Ending::Returned(0));
        let report = with(params, locals, most + 1);
        rejected(&report, RejectKind::TooLarge, &["twice its locals", "65535"]);
    }
}

#[test]
fn a_table_larger_than_its_cap_is_refused() {
    let report = Run::of(&module("(table 100001 funcref)", "(i32.const 0)")).go();
    rejected(
        &report,
        RejectKind::TooLarge,
        &["the module has 100001 elements of one table, the limit is 100000"],
    );
}

// ---- limits

#[test]
fn an_endless_loop_ends_when_fuel_is_out() {
    let text = module("", "(loop $l (br $l)) (i32.const 0)");
    let report = Run::of(&text).limits(|limits| limits.fuel = 1_000_000).go();
    assert_eq!(report.ending(), &Ending::Limit { kind: LimitKind::Fuel, limit: 1_000_000 });
    let used = report.ended().fuel_used;
    assert!((999_000..=1_000_000).contains(&used), "{used}");
}

#[test]
fn a_loop_over_any_copying_function_ends_when_fuel_is_out() {
    for call in [
        "(call $random (i32.const 0) (i32.const 65536))",
        "(drop (call $input_read (i32.const 0) (i32.const 0) (i32.const 65536)))",
        "(drop (call $resp_read (i32.const 0) (i32.const 0) (i32.const 65536)))",
        "(call $log (i32.const 0) (i32.const 0) (i32.const 65536))",
        "(drop (call $a.b (i32.const 0) (i32.const 65536)))",
        "(drop (call $fd_write (i32.const 2) (i32.const 1024) (i32.const 64) (i32.const 0)))",
        "(drop (call $fd_write (i32.const 2) (i32.const 2048) (i32.const 2048) (i32.const 0)))",
    ] {
        // 64 iovecs of 32 KiB each at 1024; zeros, so empty ones, at 2048.
        let data = format!(
            "(data (i32.const 1024) \"{}\")",
            "\\00\\00\\00\\00\\00\\80\\00\\00".repeat(64)
        );
        let text = program(
            &["a.b"],
            &data,
            &format!(
                "(drop (call $a.b (i32.const 0) (i32.const 0))) (loop $l {call} (br $l)) unreachable"
            ),
        );
        let mut first = true;
        let report = Run::of(&text)
            .input(&"i".repeat(65_536))
            .limits(|limits| {
                limits.fuel = 5_000_000;
                limits.calls = 2;
            })
            .tools(move |_| {
                let body = if std::mem::take(&mut first) { "r".repeat(65_536) } else { "".into() };
                support::reply(&body)
            })
            .go();
        assert_eq!(
            report.ending(),
            &Ending::Limit { kind: LimitKind::Fuel, limit: 5_000_000 },
            "{call}"
        );
    }
}

#[test]
fn copies_are_charged_by_what_is_copied() {
    let fuel = |length: u32| {
        let body = format!("(call $output (i32.const 0) (i32.const {length}))");
        Run::of(&program(&[], "", &body)).go().ended().fuel_used
    };
    assert_eq!(fuel(64_000) - fuel(0), 1_000);
    let fuel = |length: u32| {
        let body = format!("(call $random (i32.const 0) (i32.const {length})) (i32.const 0)");
        Run::of(&program(&[], "", &body)).go().ended().fuel_used
    };
    assert_eq!(fuel(1_000) - fuel(0), 8_000);
    // Each byte of standard error may be a line of the log.
    let fuel = |length: u32| {
        let data = format!(
            r#"(data (i32.const 0) "\00\01\00\00{}")"#,
            length.to_le_bytes().map(|byte| format!("\\{byte:02x}")).concat()
        );
        let body = "(drop (call $fd_write (i32.const 2) (i32.const 0) (i32.const 1) \
                    (i32.const 8))) (i32.const 0)";
        Run::of(&program(&[], &data, body)).go().ended().fuel_used
    };
    assert_eq!(fuel(6_400) - fuel(0), 6_400 + 100);
    let fuel = |length: u32| {
        let body = format!("(call $random (i32.const 0) (i32.const {length})) (i32.const 0)");
        Run::of(&program(&[], "", &body)).go().ended().fuel_used
    };
    // Also where wasmi holds less of the run's fuel than that at once.
    assert_eq!(fuel(60_000) - fuel(0), 480_000);
}

#[test]
fn memory_grow_past_the_cap_fails_inside_the_program() {
    let text = module(
        "",
        "(if (i32.ne (memory.grow (i32.const 2)) (i32.const 1)) (then unreachable))
        (if (i32.ne (memory.grow (i32.const 2)) (i32.const -1)) (then unreachable))
        (if (i32.ne (memory.grow (i32.const 1)) (i32.const 3)) (then unreachable))
        (if (i32.ne (memory.grow (i32.const 65535)) (i32.const -1)) (then unreachable))
        (i32.sub (memory.size) (i32.const 4))",
    );
    let report = Run::of(&text).limits(|limits| limits.memory_bytes = 4 * 65_536).go();
    assert_eq!(report.ending(), &Ending::Returned(0));
    assert_eq!(report.ended().memory_peak_bytes, 4 * 65_536);
}

#[test]
fn a_program_that_needs_more_memory_than_it_may_have_does_not_start() {
    let text = r#"(module (memory (export "memory") 300)
        (func (export "forge_run") (result i32) (i32.const 0)))"#;
    let report = Run::of(text).go();
    let limit = RunLimits::default().memory_bytes;
    assert_eq!(report.ending(), &Ending::Limit { kind: LimitKind::Memory, limit });
    assert_eq!(report.ended().memory_peak_bytes, 0);
}

#[test]
fn table_grow_past_the_cap_fails_inside_the_program() {
    let text = module(
        "(table $t 1 funcref)",
        "(if (i32.ne (table.grow $t (ref.null func) (i32.const 99999)) (i32.const 1))
            (then unreachable))
        (i32.add (i32.const 1) (table.grow $t (ref.null func) (i32.const 1)))",
    );
    assert_eq!(Run::of(&text).go().ending(), &Ending::Returned(0));
}

#[test]
fn deep_recursion_is_a_trap() {
    // Each level takes room on the value stack: eight parameters.
    let zeros = "(i64.const 0)".repeat(8);
    let deep = module(
        &format!("(func $down (param{}) (call $down {zeros}))", " i64".repeat(8)),
        &format!("(call $down {zeros}) (i32.const 0)"),
    );
    trapped(&deep, TrapKind::StackOverflow);
    // By depth alone, by the value stack alone, and with no stack at all.
    for (recursion, stack_bytes) in [(100_000, 64 << 20), (100_000, 4_096), (1_000, 0), (0, 0)] {
        let report = Run::of(&deep)
            .limits(|limits| (limits.recursion, limits.stack_bytes) = (recursion, stack_bytes))
            .go();
        match report.ending() {
            Ending::Trap { kind: TrapKind::StackOverflow, .. } => {}
            other => panic!("{recursion} {stack_bytes}: {other:?}"),
        }
        let levels_max = recursion.min(stack_bytes / 64 + 1);
        let used = report.ended().fuel_used;
        assert!(used < u64::from(levels_max) * 100 + 100, "{recursion} {stack_bytes}: {used}");
    }
}

#[test]
fn recursion_up_to_the_limit_works() {
    let text = |depth: u32| {
        module(
            "(func $down (param i32) (result i32)
                (if (result i32) (local.get 0)
                    (then (call $down (i32.sub (local.get 0) (i32.const 1))))
                    (else (i32.const 0))))",
            &format!("(call $down (i32.const {depth}))"),
        )
    };
    // forge_run is one level, $down with 0 another.
    let at = |depth| Run::of(&text(depth)).limits(|limits| limits.recursion = 100).go();
    assert_eq!(at(98).ending(), &Ending::Returned(0));
    assert!(matches!(at(99).ending(), Ending::Trap { kind: TrapKind::StackOverflow, .. }));
}

#[test]
fn a_run_of_many_operations_does_not_grow_the_native_stack() {
    // Every host function and branch here is one step of an interpreter that
    // must tail-call; 128 KiB would not hold a hundredth of these steps.
    let text = program(
        &[],
        "",
        "(local $i i32)
        (loop $again
            (drop (call $fd_close (i32.const 1)))
            (call $random (i32.const 0) (i32.const 1))
            (i64.store (i32.const 8) (call $now_ns))
            (br_if $again (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1)))
                (i32.const 200000))))
        (i32.const 0)",
    );
    let run = std::thread::Builder::new().stack_size(256 * 1024);
    let done = run.spawn(move || Run::of(&text).go().ending().clone()).unwrap().join().unwrap();
    assert_eq!(done, Ending::Returned(0));
}

#[test]
fn growing_without_end_does_not_grow_the_native_stack() {
    for grow in [
        "(drop (memory.grow (i32.const 0)))",
        "(drop (memory.grow (i32.const 70000)))",
        "(drop (table.grow 0 (ref.null func) (i32.const 0)))",
        "(drop (table.grow 0 (ref.null func) (i32.const -1)))",
    ] {
        // Also with as many in one block as a module may have.
        for times in [1, 128] {
            let text = module(
                "(table 1 funcref)",
                &format!("(loop $l {} (br $l)) (i32.const 0)", grow.repeat(times)),
            );
            let run = std::thread::Builder::new().stack_size(256 * 1024);
            let ending = run
                .spawn(move || {
                    Run::of(&text).limits(|limits| limits.fuel = 50_000_000).go().ending().clone()
                })
                .unwrap()
                .join()
                .unwrap();
            let fuel_is_out = Ending::Limit { kind: LimitKind::Fuel, limit: 50_000_000 };
            assert_eq!(ending, fuel_is_out, "{times} times {grow}");
        }
    }
}

#[test]
fn slices_change_no_fuel_and_no_result() {
    // Blocks of several sizes, so that slices end at odd places; a block and
    // a copy that need more than a slice at once; a host function's charge
    // across the end of one.
    let text = program(
        &[],
        "",
        &format!(
            "(local $i i32) (local $sum i32)
            (drop (memory.grow (i32.const 200)))
            (loop $l
                (local.set $sum (i32.add (local.get $sum) (i32.mul (local.get $i) (i32.const 3))))
                (if (i32.rem_u (local.get $i) (i32.const 7))
                    (then (call $random (i32.const 0) (i32.const 100))))
                (br_if $l (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1)))
                    (i32.const 2000))))
            (memory.fill (i32.const 0) (i32.const 1) (i32.const 13000000))
            {}
            (i32.store (i32.const 0) (local.get $sum))
            (call $output (i32.const 0) (i32.const 4))",
            "(local.set $i (i32.add (local.get $i) (local.get $sum)))".repeat(60_000),
        ),
    );
    let report = Run::of(&text).go();
    assert_eq!(report.ending(), &Ending::Returned(0));
    assert_eq!(report.output_i32s(), [(0..2000).map(|i| i * 3).sum::<i32>()]);
    let used = report.ended().fuel_used;
    // Exactly as much is enough, and one less is not.
    let with = |fuel| Run::of(&text).limits(|limits| limits.fuel = fuel).go().ending().clone();
    assert_eq!(with(used), Ending::Returned(0));
    assert_eq!(with(used - 1), Ending::Limit { kind: LimitKind::Fuel, limit: used - 1 });
}

#[test]
fn a_table_that_grows_at_the_end_of_a_slice_grows_or_ends_the_run_and_does_nothing_twice() {
    let (mut grown, mut ended) = (0, 0);
    for turns in (0..20_000).step_by(150) {
        let text = program(
            &[],
            "(table 1 funcref) (global $begun (mut i32) (i32.const 0))",
            &format!(
                "(local $i i32)
                (global.set $begun (i32.add (global.get $begun) (i32.const 1)))
                (loop $l (br_if $l (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1)))
                    (i32.const {turns}))))
                (drop (table.grow 0 (ref.null func) (i32.const 90000)))
                (i32.or (i32.ne (global.get $begun) (i32.const 1))
                    (i32.ne (table.size 0) (i32.const 90001)))"
            ),
        );
        match Run::of(&text).go().ending() {
            Ending::Returned(0) => grown += 1,
            Ending::Trap { detail, .. } if detail.contains("table.grow") => ended += 1,
            other => panic!("{turns} turns: {other:?}"),
        }
    }
    assert!(grown > 0 && ended > 0, "{grown} grown, {ended} ended");
    // With fuel for no such growth at all it is the fuel that ends the run.
    let text = program(
        &[],
        "(table 1 funcref)",
        "(drop (table.grow 0 (ref.null func) (i32.const 90000))) (i32.const 0)",
    );
    let ending = Run::of(&text).limits(|limits| limits.fuel = 5_000).go().ending().clone();
    assert_eq!(ending, Ending::Limit { kind: LimitKind::Fuel, limit: 5_000 });
}

// ---- traps

#[test]
fn traps_keep_their_kind() {
    for (fields, body, kind) in [
        ("", "unreachable", TrapKind::Unreachable),
        ("", "(i32.load (i32.const 65533))", TrapKind::MemoryOutOfBounds),
        (
            "(table 1 funcref)",
            "(table.get 0 (i32.const 1)) drop (i32.const 0)",
            TrapKind::TableOutOfBounds,
        ),
        (
            "(table 1 funcref)",
            "(call_indirect (result i32) (i32.const 7))",
            TrapKind::TableOutOfBounds,
        ),
        (
            "(table 1 funcref)",
            "(call_indirect (result i32) (i32.const 0))",
            TrapKind::IndirectCallToNull,
        ),
        (
            "(table funcref (elem $f)) (func $f (param i64))",
            "(call_indirect (result i32) (i32.const 0))",
            TrapKind::BadSignature,
        ),
        ("", "(i32.div_u (i32.const 1) (i32.const 0))", TrapKind::DivisionByZero),
        ("", "(i32.div_s (i32.const 0x80000000) (i32.const -1))", TrapKind::IntegerOverflow),
        ("", "(i32.trunc_f32_s (f32.const nan))", TrapKind::BadConversion),
        // At load.
        ("(data (i32.const 65536) \"x\")", "(i32.const 0)", TrapKind::MemoryOutOfBounds),
        (
            "(table 1 funcref) (elem (i32.const 1) $f) (func $f)",
            "(i32.const 0)",
            TrapKind::TableOutOfBounds,
        ),
    ] {
        trapped(&module(fields, body), kind);
    }
}

#[test]
fn a_trap_in_initialize_ends_the_run() {
    let text = module("(func (export \"_initialize\") unreachable)", "(i32.const 0)");
    trapped(&text, TrapKind::Unreachable);
}

#[test]
fn what_was_written_before_a_trap_is_kept() {
    let text = program(
        &[],
        r#"(data (i32.const 0) "half")(data (i32.const 16) "\00\00\00\00\04\00\00\00")"#,
        "(drop (call $output (i32.const 0) (i32.const 4)))
        (drop (call $fd_write (i32.const 2) (i32.const 16) (i32.const 1) (i32.const 32)))
        unreachable",
    );
    let report = Run::of(&text).go();
    assert_eq!(report.output_text(), "half");
    assert_eq!(report.logs[0].text, "half");
}

// ---- figures, and the host's own mistakes

#[test]
fn loading_and_running_are_timed_apart() {
    let report = Run::of(MINIMAL).go();
    // The test's counter moves by one with each look: the program came, it was
    // loaded; its run came, it was started, it ended. What lies between the
    // two is no loading.
    assert_eq!((report.ended().load_ticks, report.ended().run_ticks), (2, 1));
    assert_eq!(report.ended().memory_peak_bytes, 65_536);
    assert_eq!(report.ended().logs_dropped, 0);
}

#[test]
fn an_order_past_the_absolute_bounds_is_not_carried_out() {
    let report = Run::of(MINIMAL).limits(|limits| limits.output_bytes = u32::MAX).go();
    match report.served {
        Err(ServeError::Order(over)) => {
            assert_eq!((over.what, over.limit), ("output_bytes", u64::from(OUTPUT_BYTES_MAX)));
        }
        other => panic!("{other:?}"),
    }
    assert!(report.ended.is_none());
}

#[test]
fn limits_of_zero_are_kept() {
    let zero = |run: Run| {
        run.limits(|limits| {
            *limits = RunLimits {
                memory_bytes: 65_536,
                program_bytes: limits.program_bytes,
                fuel: 10_000,
                recursion: 10,
                stack_bytes: 10_000,
                wall_ms: 0,
                input_bytes: 0,
                request_bytes: 0,
                response_bytes: 0,
                output_bytes: 0,
                artifacts: 0,
                artifact_bytes: 0,
                log_bytes: 0,
                calls: 0,
                calls_in_flight: 0,
            };
        })
    };
    let text = program(
        &["a.b"],
        "",
        "(call $log (i32.const 0) (i32.const 0) (i32.const 1))
        (drop (call $output (i32.const 0) (i32.const 0)))
        (call $a.b (i32.const 0) (i32.const 0))",
    );
    let report = zero(Run::of(&text)).go();
    assert_eq!(report.ending(), &Ending::Returned(-6));
    assert_eq!(report.ended().logs_dropped, 1);
    let report = zero(Run::of(&text)).limits(|limits| limits.fuel = 0).go();
    assert_eq!(report.ending(), &Ending::Limit { kind: LimitKind::Fuel, limit: 0 });
}
