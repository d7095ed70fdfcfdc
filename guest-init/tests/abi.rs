//! What a program sees of forge ABI v1, function by function.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use forge_protocol::abi::{CallCode, Value, Wasi};
use forge_protocol::ending::{Ending, LimitKind, TrapKind};
use sha2::{Digest, Sha256};
use support::{Order, Reply, Report, Run, program, reply};

fn returned(report: &Report, code: i32) {
    assert_eq!(report.ending(), &Ending::Returned(code), "{report:?}");
}

fn trapped(report: &Report, expected: TrapKind, says: &str) {
    match report.ending() {
        Ending::Trap { kind, detail } if *kind == expected => {
            assert!(detail.contains(says), "{detail}");
        }
        other => panic!("{other:?}"),
    }
}

/// Stores an `i32` expression at 0 and outputs it.
fn show(expression: &str) -> String {
    format!(
        "(i32.store (i32.const 0) {expression})(drop (call $output (i32.const 0) (i32.const 4)))"
    )
}

// ---- forge

#[test]
fn every_function_links_with_its_documented_type() {
    // `program` imports all of them.
    returned(&Run::of(&program(&["a.b"], "", "(i32.const 0)")).go(), 0);
}

#[test]
fn forge_run_returns_the_runs_code() {
    returned(&Run::of(&program(&[], "", "(i32.const -3)")).go(), -3);
}

#[test]
fn initialize_runs_before_forge_run() {
    let text = r#"(module (memory (export "memory") 1) (global $g (mut i32) (i32.const 0))
        (func (export "_initialize") (global.set $g (i32.const 7)))
        (func (export "forge_run") (result i32) (global.get $g)))"#;
    returned(&Run::of(text).go(), 7);
}

#[test]
fn a_call_gives_the_response_and_sends_the_request_as_it_is() {
    let text = program(
        &["a.b"],
        r#"(data (i32.const 8) "{\22q\22:1}")"#,
        "(local $n i32)
        (local.set $n (call $a.b (i32.const 8) (i32.const 7)))
        (drop (call $resp_read (i32.const 100) (i32.const 0) (i32.const 50)))
        (drop (call $output (i32.const 100) (local.get $n)))
        (i32.sub (local.get $n) (call $resp_len))",
    );
    let report = Run::of(&text).tools(|_| reply("[1,2,3]")).go();
    returned(&report, 0);
    assert_eq!(report.output_text(), "[1,2,3]");
    assert_eq!(report.calls[0].request, b"{\"q\":1}");
    assert_eq!(report.calls[0].tool, support::tool("a.b"));
    assert!(report.calls[0].waits);
}

#[test]
fn the_response_can_be_read_in_pieces_until_the_next_call() {
    let text = program(
        &["a.b"],
        "",
        "(drop (call $a.b (i32.const 0) (i32.const 0)))
        (drop (call $resp_read (i32.const 100) (i32.const 2) (i32.const 2)))
        (drop (call $output (i32.const 100) (i32.const 2)))
        (drop (call $resp_read (i32.const 100) (i32.const 4) (i32.const 50)))
        (drop (call $output (i32.const 100) (i32.const 2)))
        (if (call $resp_read (i32.const 100) (i32.const 6) (i32.const 1)) (then unreachable))
        (if (call $resp_read (i32.const 100) (i32.const -1) (i32.const 1)) (then unreachable))
        (drop (call $a.b (i32.const 0) (i32.const 0)))
        (call $resp_len)",
    );
    let mut bodies = vec!["x", "abcdef"];
    let report = Run::of(&text).tools(move |_| reply(bodies.pop().unwrap())).go();
    returned(&report, 1);
    assert_eq!(report.output_text(), "cdef");
}

#[test]
fn every_code_reaches_the_program_and_its_body_is_readable() {
    for code in CallCode::ALL {
        let text = program(
            &["a.b"],
            "",
            "(local $code i32)
            (local.set $code (call $a.b (i32.const 0) (i32.const 0)))
            (drop (call $resp_read (i32.const 0) (i32.const 0) (call $resp_len)))
            (drop (call $output (i32.const 0) (call $resp_len)))
            (local.get $code)",
        );
        let report = Run::of(&text)
            .tools(move |_| Reply { code: Some(code), duration_ns: 1, body: b"why".to_vec() })
            .go();
        returned(&report, code as i32);
        assert_eq!(report.output_text(), "why");
    }
}

#[test]
fn a_call_by_name_reaches_the_broker_even_if_it_is_not_granted() {
    let text = program(
        &[],
        r#"(data (i32.const 0) "x.secret{}")"#,
        "(call $call (i32.const 0) (i32.const 8) (i32.const 8) (i32.const 2))",
    );
    let denied = Reply { code: Some(CallCode::Denied), duration_ns: 0, body: Vec::new() };
    let report = Run::of(&text).tools(move |_| denied.clone()).go();
    returned(&report, CallCode::Denied as i32);
    assert_eq!(report.calls[0].tool, support::tool("x.secret"));
    assert_eq!(report.calls[0].request, b"{}");
}

#[test]
fn a_malformed_name_is_no_such_tool_without_a_call() {
    for (data, length) in [("nodot", 5), ("A.b", 3), ("a.\\ff", 3), ("", 0), ("", 257)] {
        let text = program(
            &["a.b"],
            &format!("(data (i32.const 0) \"{data}\")"),
            &format!(
                "(drop (call $a.b (i32.const 0) (i32.const 0)))
                (if (i32.ne (call $call_async (i32.const 0) (i32.const {length}) (i32.const 0)
                    (i32.const 0)) (i32.const -2)) (then unreachable))
                (if (i32.ne (call $call (i32.const 0) (i32.const {length}) (i32.const 0)
                    (i32.const 0)) (i32.const -2)) (then unreachable))
                ;; The response before it is gone.
                (call $resp_len)"
            ),
        );
        let report = Run::of(&text).go();
        returned(&report, 0);
        assert_eq!(report.calls.len(), 1, "{data:?}");
    }
}

#[test]
fn a_request_over_the_limit_is_refused_without_a_call() {
    let text = program(&["a.b"], "", "(call $a.b (i32.const 0) (i32.const 101))");
    let report = Run::of(&text).limits(|limits| limits.request_bytes = 100).go();
    returned(&report, CallCode::RequestTooLarge as i32);
    assert!(report.calls.is_empty());
    let text = program(&["a.b"], "", "(call $a.b (i32.const 0) (i32.const 100))");
    let report = Run::of(&text).limits(|limits| limits.request_bytes = 100).go();
    assert_eq!(report.calls[0].request.len(), 100);
}

#[test]
fn calls_past_the_budget_are_refused_without_a_call() {
    let text = program(
        &["a.b"],
        "",
        "(drop (call $a.b (i32.const 0) (i32.const 0)))
        (drop (call $a.b (i32.const 0) (i32.const 0)))
        (call $a.b (i32.const 0) (i32.const 0))",
    );
    let report = Run::of(&text).limits(|limits| limits.calls = 2).go();
    returned(&report, CallCode::BudgetSpent as i32);
    assert_eq!(report.calls.len(), 2);
}

/// Starts calls of a.b: the name is at 0.
const START: &str = "(call $call_async (i32.const 0) (i32.const 3) (i32.const 0) (i32.const 0))";
const NAME: &str = r#"(data (i32.const 0) "a.b")"#;

#[test]
fn uncollected_calls_count_as_in_flight() {
    let text = program(
        &["a.b"],
        NAME,
        &format!(
            "(drop {START})(drop {START})
            (if (i32.ne {START} (i32.const -6)) (then unreachable))
            (if (i32.ne (call $a.b (i32.const 0) (i32.const 0)) (i32.const -6)) (then unreachable))
            (drop (call $wait_any))
            (if (i32.ne {START} (i32.const -6)) (then unreachable))
            (drop (call $wait (i32.const 0)))
            {START}"
        ),
    );
    let report = Run::of(&text).limits(|limits| limits.calls_in_flight = 2).go();
    returned(&report, 2);
    assert_eq!(report.calls.len(), 3);
}

#[test]
fn calls_settle_in_any_order_and_wait_any_tells_which_was_first() {
    for (order, expected) in [(Order::OldestFirst, [0, 1, 2]), (Order::NewestFirst, [2, 1, 0])] {
        let wait_and_show = "(local.set $h (call $wait_any))
            (i32.store (i32.const 100) (local.get $h))
            (drop (call $output (i32.const 100) (i32.const 4)))
            ;; It is told again until the call is collected.
            (if (i32.ne (local.get $h) (call $wait_any)) (then unreachable))
            (if (i32.ne (call $wait (local.get $h)) (i32.const 5)) (then unreachable))
            (drop (call $resp_read (i32.const 200) (i32.const 4) (i32.const 1)))
            (if (i32.ne (i32.load8_u (i32.const 200)) (i32.add (local.get $h) (i32.const 48)))
                (then unreachable))";
        let text = program(
            &["a.b"],
            NAME,
            &format!(
                "(local $h i32) (drop {START})(drop {START})(drop {START})
                {wait_and_show} {wait_and_show} {wait_and_show} (i32.const 0)"
            ),
        );
        let mut run = Run::of(&text).tools(|call| reply(&format!("call{}", call.id)));
        run.order = order;
        let report = run.go();
        returned(&report, 0);
        assert_eq!(report.output_i32s(), expected);
        assert!(report.calls.iter().all(|call| !call.waits));
    }
}

#[test]
fn a_call_can_be_waited_for_while_others_settle_first() {
    let text = program(
        &["a.b"],
        NAME,
        &format!(
            "(drop {START})(drop {START})(drop {START})
            (drop (call $wait (i32.const 0)))
            {}{}
            (drop (call $wait (i32.const 2)))
            {}
            (call $wait (i32.const 1))",
            show("(call $resp_len)"),
            show("(call $wait_any)"),
            show("(call $wait_any)"),
        ),
    );
    let mut run = Run::of(&text).tools(|call| reply(&"x".repeat(call.id as usize + 1)));
    run.order = Order::NewestFirst;
    let report = run.go();
    returned(&report, 2);
    // Call 2 settled first, then 1, then 0.
    assert_eq!(report.output_i32s(), [1, 2, 1]);
}

#[test]
fn a_blocking_call_beside_started_ones_gets_its_own_answer() {
    let text = program(
        &["a.b"],
        NAME,
        &format!(
            "(drop {START})(drop {START})
            (if (i32.ne (call $a.b (i32.const 0) (i32.const 0)) (i32.const 3)) (then unreachable))
            (if (i32.ne (call $wait (i32.const 1)) (i32.const 2)) (then unreachable))
            (call $wait (i32.const 0))"
        ),
    );
    for order in [Order::OldestFirst, Order::NewestFirst] {
        let mut run = Run::of(&text).tools(|call| reply(&"x".repeat(call.id as usize + 1)));
        run.order = order;
        returned(&run.go(), 1);
    }
}

#[test]
fn waiting_for_what_is_no_open_call_traps() {
    for (body, says) in [
        ("(call $wait (i32.const 0))".to_owned(), "wait for 0"),
        ("(call $wait (i32.const -1))".to_owned(), "wait for -1"),
        ("(call $wait_any)".to_owned(), "no open call"),
        (
            format!("(drop {START})(drop (call $wait (i32.const 0)))(call $wait (i32.const 0))"),
            "wait for 0",
        ),
        (format!("(drop {START})(call $wait (i32.const 1))"), "wait for 1"),
        (
            "(drop (call $a.b (i32.const 0) (i32.const 0)))(call $wait (i32.const 0))".to_owned(),
            "wait for 0",
        ),
    ] {
        trapped(&Run::of(&program(&["a.b"], NAME, &body)).go(), TrapKind::Misuse, says);
    }
}

#[test]
fn a_program_may_end_with_calls_open() {
    let report = Run::of(&program(&["a.b"], NAME, START)).go();
    returned(&report, 0);
    assert_eq!(report.calls.len(), 1);
}

#[test]
fn the_input_is_read_in_pieces() {
    let text = program(
        &[],
        "",
        "(drop (call $input_read (i32.const 0) (i32.const 2) (i32.const 3)))
        (drop (call $output (i32.const 0) (call $input_read (i32.const 8) (i32.const 4)
            (i32.const 100))))
        (if (call $input_read (i32.const 0) (i32.const 8) (i32.const 1)) (then unreachable))
        (drop (call $output (i32.const 0) (i32.const 3)))
        (call $input_len)",
    );
    let report = Run::of(&text).input("01234567").go();
    returned(&report, 8);
    assert_eq!(report.output_text(), "234\u{0}234");
}

#[test]
fn output_is_appended_in_order_and_byte_for_byte() {
    let text = program(
        &[],
        r#"(data (i32.const 0) "one\00\fftwo")"#,
        "(drop (call $output (i32.const 0) (i32.const 5)))
        (drop (call $output (i32.const 0) (i32.const 0)))
        (call $output (i32.const 5) (i32.const 3))",
    );
    let report = Run::of(&text).go();
    returned(&report, 0);
    assert_eq!(report.output, b"one\0\xfftwo");
}

#[test]
fn output_over_the_limit_ends_the_run_and_keeps_what_was_written() {
    let text = program(
        &[],
        r#"(data (i32.const 0) "0123456789")"#,
        "(drop (call $output (i32.const 0) (i32.const 6)))
        (drop (call $output (i32.const 0) (i32.const 4)))
        (drop (call $output (i32.const 0) (i32.const 1)))
        unreachable",
    );
    let report = Run::of(&text).limits(|limits| limits.output_bytes = 10).go();
    assert_eq!(report.ending(), &Ending::Limit { kind: LimitKind::Output, limit: 10 });
    assert_eq!(report.output_text(), "0123450123");
}

#[test]
fn artifacts_carry_name_type_and_content() {
    let text = program(
        &[],
        r#"(data (i32.const 0) "a.csvtext/csv1,2")"#,
        "(call $artifact (i32.const 0) (i32.const 5) (i32.const 5) (i32.const 8)
            (i32.const 13) (i32.const 3))",
    );
    let report = Run::of(&text).go();
    returned(&report, 0);
    let artifact = &report.artifacts[0];
    assert_eq!((&*artifact.name, &*artifact.media_type), ("a.csv", "text/csv"));
    assert_eq!(artifact.content, b"1,2");
}

const ARTIFACT: &str = "(drop (call $artifact (i32.const 0) (i32.const 1) (i32.const 0)
    (i32.const 1) (i32.const 0) (i32.const 10)))";

#[test]
fn too_many_or_too_large_artifacts_end_the_run() {
    let text =
        program(&[], r#"(data (i32.const 0) "n")"#, &format!("{ARTIFACT}{ARTIFACT}(i32.const 0)"));
    let report = Run::of(&text).limits(|limits| limits.artifacts = 1).go();
    assert_eq!(report.ending(), &Ending::Limit { kind: LimitKind::Artifacts, limit: 1 });
    assert_eq!(report.artifacts.len(), 1);
    let report = Run::of(&text).limits(|limits| limits.artifact_bytes = 9).go();
    assert_eq!(report.ending(), &Ending::Limit { kind: LimitKind::Artifacts, limit: 9 });
    assert!(report.artifacts.is_empty());
}

#[test]
fn an_artifact_needs_a_short_utf8_name() {
    for (length, says) in [(257, "257 bytes, the limit is 256"), (1, "not UTF-8")] {
        let text = program(
            &[],
            r#"(data (i32.const 0) "\ff")"#,
            &format!(
                "(call $artifact (i32.const 0) (i32.const {length}) (i32.const 9) (i32.const 1)
                (i32.const 0) (i32.const 0))"
            ),
        );
        trapped(&Run::of(&text).go(), TrapKind::Misuse, says);
    }
}

#[test]
fn log_records_are_cut_levelled_and_made_utf8() {
    let text = program(
        &[],
        r#"(data (i32.const 0) "ok\ff")"#,
        "(call $log (i32.const 1) (i32.const 0) (i32.const 3))
        (call $log (i32.const 99) (i32.const 0) (i32.const 2))
        (call $log (i32.const -1) (i32.const 100) (i32.const 5000))
        (i32.const 0)",
    );
    let report = Run::of(&text).go();
    returned(&report, 0);
    let logs = &report.logs;
    assert_eq!((logs[0].level, &*logs[0].text), (1, "ok\u{fffd}"));
    assert_eq!((logs[1].level, &*logs[1].text), (4, "ok"));
    assert_eq!((logs[2].level, logs[2].text.len()), (0, 4096));
}

#[test]
fn a_record_cut_within_a_character_ends_before_it() {
    // 4095 zeros and a two-byte character across the cut.
    let text = program(
        &[],
        r#"(data (i32.const 4095) "\c3\a9")"#,
        "(call $log (i32.const 2) (i32.const 0) (i32.const 4097))(i32.const 0)",
    );
    let report = Run::of(&text).go();
    assert_eq!(report.logs[0].text.len(), 4095);
    assert!(!report.logs[0].text.contains('\u{fffd}'));
}

#[test]
fn a_record_that_ends_within_a_character_keeps_what_is_left_of_it() {
    let text = program(
        &[],
        r#"(data (i32.const 0) "ab\e2\82")"#,
        "(call $log (i32.const 2) (i32.const 0) (i32.const 4))
        (call $log (i32.const 2) (i32.const 2) (i32.const 2))
        (i32.const 0)",
    );
    let report = Run::of(&text).go();
    let texts: Vec<&str> = report.logs.iter().map(|log| &*log.text).collect();
    assert_eq!(texts, ["ab\u{fffd}", "\u{fffd}"]);
}

#[test]
fn log_records_past_the_bound_are_dropped_and_counted() {
    let text = program(
        &[],
        "",
        "(local $i i32)
        (loop $again
            (call $log (i32.const 2) (i32.const 0) (i32.const 84))
            (br_if $again (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1)))
                (i32.const 50))))
        (i32.const 0)",
    );
    let report = Run::of(&text).limits(|limits| limits.log_bytes = 1_000).go();
    returned(&report, 0);
    // Each counts its 84 bytes and 16 more.
    assert_eq!((report.logs.len(), report.ended().logs_dropped), (10, 40));
}

#[test]
fn empty_log_records_are_bounded_too() {
    let text = program(
        &[],
        "",
        "(local $i i32)
        (loop $again
            (call $log (i32.const 2) (i32.const 0) (i32.const 0))
            (br_if $again (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1)))
                (i32.const 10000))))
        (i32.const 0)",
    );
    let report = Run::of(&text).go();
    assert_eq!(report.logs.len() as u64 + report.ended().logs_dropped, 10_000);
    assert_eq!(report.logs.len(), 64 * 1024 / 16);
}

/// Outputs `now_ns`.
const SHOW_NOW: &str =
    "(i64.store (i32.const 100) (call $now_ns))(drop (call $output (i32.const 100) (i32.const 8)))";

fn times(report: &Report) -> Vec<u64> {
    report.output.chunks(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap())).collect()
}

#[test]
fn time_stands_still_while_the_program_computes_and_moves_with_its_calls() {
    let text = program(
        &["a.b"],
        NAME,
        &format!(
            "{SHOW_NOW}{SHOW_NOW}
            (drop (call $a.b (i32.const 0) (i32.const 0))) {SHOW_NOW}
            (drop {START})(drop {START}) {SHOW_NOW}
            (drop (call $wait (i32.const 1))) {SHOW_NOW}
            (drop (call $wait (i32.const 2))) {SHOW_NOW} (i32.const 0)"
        ),
    );
    let mut run = Run::of(&text).tools(|call| Reply {
        code: None,
        duration_ns: [10, 500, 300][call.id as usize],
        body: Vec::new(),
    });
    run.start_unix_ns = 1_000;
    let report = run.go();
    returned(&report, 0);
    // Calls 1 and 2 run side by side: the shorter one costs nothing more.
    assert_eq!(times(&report), [1_000, 1_000, 1_010, 1_010, 1_510, 1_510]);
}

#[test]
fn time_past_what_an_i64_holds_stands_at_its_end() {
    let text = program(&[], "", &format!("{SHOW_NOW}(i32.const 0)"));
    let mut run = Run::of(&text);
    run.start_unix_ns = u64::MAX;
    assert_eq!(times(&run.go()), [i64::MAX as u64]);
}

#[test]
fn random_bytes_come_from_the_seed_alone() {
    let text = program(
        &[],
        "",
        "(call $random (i32.const 0) (i32.const 40))
        (drop (call $random_get (i32.const 40) (i32.const 24)))
        (call $output (i32.const 0) (i32.const 64))",
    );
    let report = Run::of(&text).go();
    assert_eq!(report.output, Run::of(&text).go().output);
    let mut expected = Vec::new();
    for block in 0u64..2 {
        let mut text = b"forge-random-1\0".to_vec();
        text.extend([5; 32]);
        text.extend(block.to_le_bytes());
        expected.extend(Sha256::digest(text));
    }
    assert_eq!(report.output, expected);
    let mut other = Run::of(&text);
    other.seed = [6; 32];
    assert_ne!(other.go().output, expected);
}

#[test]
fn the_same_run_uses_the_same_fuel() {
    let text = program(
        &["a.b"],
        "",
        "(call $random (i32.const 0) (i32.const 4000))
        (drop (call $a.b (i32.const 0) (i32.const 0)))
        (drop (memory.grow (i32.const 3)))
        (call $output (i32.const 0) (i32.const 4000))",
    );
    let (first, second) = (Run::of(&text).go(), Run::of(&text).go());
    assert_eq!(first.ended().fuel_used, second.ended().fuel_used);
    assert!(first.ended().fuel_used > 8 * 4000);
}

// ---- pointers

#[test]
fn a_pointer_outside_memory_traps_in_every_function() {
    let end = 65_536;
    let mut bodies = Vec::new();
    // The last byte of each stretch is the first past memory; then lengths
    // and sums that wrap 32 bits.
    for (pointer, length) in [(end - 3, 4), (end, 1), (end + 1, 0), (0, -1), (-1, 1), (-1, -1)] {
        let at = format!("(i32.const {pointer}) (i32.const {length})");
        let zero = "(i32.const 0)";
        bodies.extend([
            format!("(call $a.b {at})"),
            format!("(call $resp_read (i32.const {pointer}) {zero} (i32.const {length}))"),
            format!("(call $input_read (i32.const {pointer}) {zero} (i32.const {length}))"),
            format!("(call $output {at})"),
            format!("(call $artifact {at} {zero} {zero} {zero} {zero})"),
            format!("(call $artifact {zero} {zero} {at} {zero} {zero})"),
            format!("(call $artifact {zero} {zero} {zero} {zero} {at})"),
            format!("(call $log {zero} {at}) {zero}"),
            format!("(call $random {at}) {zero}"),
            format!("(call $call {at} {zero} {zero})"),
            format!("(call $call {zero} (i32.const 3) {at})"),
            // Though there is no such tool.
            format!("(call $call {zero} {zero} {at})"),
            format!("(call $call_async {zero} {zero} {at})"),
            format!("(call $call_async {at} {zero} {zero})"),
            format!("(call $call_async {zero} (i32.const 3) {at})"),
            format!("(call $random_get {at})"),
        ]);
    }
    for pointer in [end - 3, end, -1] {
        let at = format!("(i32.const {pointer})");
        let one_iovec = "(i32.const 16) (i32.const 1)";
        bodies.extend([
            format!("(call $args_sizes_get {at} (i32.const 0))"),
            format!("(call $environ_sizes_get (i32.const 0) {at})"),
            format!("(call $clock_time_get (i32.const 0) (i64.const 0) {at})"),
            format!("(call $clock_res_get (i32.const 1) {at})"),
            format!("(call $fd_fdstat_get (i32.const 1) {at})"),
            format!("(call $fd_filestat_get (i32.const 1) {at})"),
            format!("(call $poll_oneoff {at} (i32.const 0) (i32.const 1) (i32.const 0))"),
            format!("(call $poll_oneoff (i32.const 0) {at} (i32.const 1) (i32.const 0))"),
            format!("(call $poll_oneoff (i32.const 0) (i32.const 0) (i32.const 1) {at})"),
            format!("(call $fd_write (i32.const 1) {at} (i32.const 1) (i32.const 0))"),
            format!("(call $fd_write (i32.const 1) {one_iovec} {at})"),
            format!("(call $fd_read (i32.const 0) {at} (i32.const 1) (i32.const 0))"),
            format!("(call $fd_read (i32.const 0) {one_iovec} {at})"),
        ]);
    }
    // An array whose size wraps 32 bits, and an iovec that points outside.
    bodies.extend([
        "(call $fd_write (i32.const 1) (i32.const 0) (i32.const 0x20000000) (i32.const 0))".into(),
        "(call $fd_read (i32.const 0) (i32.const 0) (i32.const 0x20000001) (i32.const 0))".into(),
        "(call $fd_write (i32.const 1) (i32.const 24) (i32.const 1) (i32.const 0))".into(),
        "(call $poll_oneoff (i32.const 0) (i32.const 0) (i32.const 0x08000000) (i32.const 0))"
            .into(),
        "(call $fd_read (i32.const 0) (i32.const 24) (i32.const 1) (i32.const 0))".into(),
    ]);
    let data = r#"(data (i32.const 0) "a.b") (data (i32.const 24) "\fe\ff\00\00\10\00\00\00")"#;
    for body in bodies {
        let report = Run::of(&program(&["a.b"], data, &body)).go();
        match report.ending() {
            Ending::Trap { kind: TrapKind::BadPointer, detail } => {
                assert!(detail.contains("65536 bytes of memory"), "{detail}");
            }
            other => panic!("{body}: {other:?}"),
        }
        assert!(report.calls.is_empty() && report.output.is_empty(), "{body}");
    }
}

#[test]
fn a_stretch_may_end_where_memory_ends() {
    let body = "(drop (call $output (i32.const 65535) (i32.const 1)))
        (call $output (i32.const 65536) (i32.const 0))";
    returned(&Run::of(&program(&[], "", body)).go(), 0);
}

#[test]
fn memory_that_has_grown_can_be_pointed_at() {
    let body = "(drop (memory.grow (i32.const 1)))
        (call $random (i32.const 131000) (i32.const 72))
        (call $output (i32.const 131000) (i32.const 72))";
    let report = Run::of(&program(&[], "", body)).go();
    returned(&report, 0);
    assert!(report.output.iter().any(|byte| *byte != 0));
}

// ---- when bytes leave

#[test]
fn a_blocking_call_is_one_send_whatever_was_written_before_it() {
    let text = program(
        &["a.b"],
        r#"(data (i32.const 0) "n")"#,
        &format!(
            "(drop (call $output (i32.const 0) (i32.const 10)))
            (call $log (i32.const 2) (i32.const 0) (i32.const 10))
            {ARTIFACT}
            (drop (call $a.b (i32.const 0) (i32.const 0)))
            (drop (call $output (i32.const 0) (i32.const 10)))
            (drop (call $a.b (i32.const 0) (i32.const 0)))
            (drop (call $output (i32.const 0) (i32.const 10)))
            (i32.const 0)"
        ),
    );
    let report = Run::of(&text).go();
    returned(&report, 0);
    // The greeting; the first call with all before it; the second; the end.
    assert_eq!(report.sends_at_call, [2, 3]);
    assert_eq!(report.sends, 4);
    // The run, two answers; the greeting's answer came with the run.
    assert_eq!(report.receives, 3);
    assert_eq!(report.output.len(), 30);
}

#[test]
fn much_output_leaves_before_the_end() {
    let text = program(
        &[],
        "",
        "(drop (call $output (i32.const 0) (i32.const 65535)))
        (drop (call $output (i32.const 0) (i32.const 1)))
        (drop (call $output (i32.const 0) (i32.const 1)))
        (i32.const 0)",
    );
    let report = Run::of(&text).go();
    returned(&report, 0);
    assert_eq!(report.sends, 3);
    assert_eq!(report.output.len(), 65_537);
}

#[test]
fn a_started_call_leaves_at_once() {
    let text =
        program(&["a.b"], NAME, &format!("(drop {START})(drop {START})(call $wait (i32.const 0))"));
    let report = Run::of(&text).go();
    assert_eq!(report.sends_at_call, [2, 3]);
    // Waiting sends nothing.
    assert_eq!(report.sends, 4);
}

#[test]
fn a_lost_link_ends_serving() {
    struct Mute;
    impl forge_guest_init::Stream for Mute {
        fn send(&mut self, _: &[u8]) -> Result<(), forge_guest_init::LinkLost> {
            Ok(())
        }
        fn receive(&mut self, _: &mut dyn FnMut(&[u8])) -> Result<(), forge_guest_init::LinkLost> {
            Err(forge_guest_init::LinkLost)
        }
    }
    assert_eq!(
        forge_guest_init::serve(Mute, &support::trust(), || 0),
        Err(forge_guest_init::ServeError::Link(forge_guest_init::LinkLost))
    );
}

// ---- WASI

/// A WASI command with every import.
fn command(data: &str, body: &str) -> String {
    format!("(module {} {data} (func (export \"_start\") {body}))", support::imports_and_memory())
}

#[test]
fn a_wasi_command_reads_its_input_and_writes_output_and_log() {
    // iovecs: at 16 two of 3 bytes each at 200 and 203; at 32 "hello" and
    // " there"; at 48 the log.
    let data = r#"
        (data (i32.const 16) "\c8\00\00\00\03\00\00\00\cb\00\00\00\03\00\00\00")
        (data (i32.const 32) "\2c\01\00\00\05\00\00\00\31\01\00\00\06\00\00\00")
        (data (i32.const 48) "\90\01\00\00\0e\00\00\00")
        (data (i32.const 300) "hello there")
        (data (i32.const 400) "one\0atwo\0athree!")"#;
    let body = r#"
        (if (call $fd_read (i32.const 0) (i32.const 16) (i32.const 2) (i32.const 0))
            (then unreachable))
        (if (i32.ne (i32.load (i32.const 0)) (i32.const 5)) (then unreachable))
        (if (call $fd_write (i32.const 1) (i32.const 16) (i32.const 2) (i32.const 0))
            (then unreachable))
        (if (call $fd_write (i32.const 1) (i32.const 32) (i32.const 2) (i32.const 0))
            (then unreachable))
        (if (i32.ne (i32.load (i32.const 0)) (i32.const 11)) (then unreachable))
        (if (call $fd_write (i32.const 2) (i32.const 48) (i32.const 1) (i32.const 0))
            (then unreachable))
        (if (i32.ne (i32.load (i32.const 0)) (i32.const 14)) (then unreachable))
        (if (call $fd_read (i32.const 0) (i32.const 16) (i32.const 2) (i32.const 0))
            (then unreachable))
        (if (i32.load (i32.const 0)) (then unreachable))"#;
    let report = Run::of(&command(data, body)).input("input").go();
    returned(&report, 0);
    assert_eq!(report.output_text(), "input\0hello there");
    let lines: Vec<_> = report.logs.iter().map(|log| (log.level, &*log.text)).collect();
    assert_eq!(lines, [(2, "one"), (2, "two"), (2, "three!")]);
}

#[test]
fn to_read_costs_what_is_copied_and_not_what_there_is_room_for() {
    let fuel = |input: &str, room: u32| {
        let body = format!(
            "(i32.store (i32.const 16) (i32.const 1000)) (i32.store (i32.const 20) (i32.const {room}))
            (drop (call $fd_read (i32.const 0) (i32.const 16) (i32.const 1) (i32.const 0)))"
        );
        let report = Run::of(&command("", &body)).input(input).go();
        returned(&report, 0);
        report.ended().fuel_used
    };
    assert_eq!(fuel("", 60_000), fuel("", 0));
    assert_eq!(fuel(&"x".repeat(640), 60_000), fuel("", 0) + 10);
    assert_eq!(fuel(&"x".repeat(640), 64), fuel("", 0) + 1);
}

#[test]
fn proc_exit_ends_the_run_with_its_code() {
    returned(&Run::of(&command("", "(call $proc_exit (i32.const 42)) unreachable")).go(), 42);
    let body = "(call $proc_exit (i32.const 0)) unreachable";
    returned(&Run::of(&program(&[], "", body)).go(), 0);
}

#[test]
fn arguments_and_environment_are_empty() {
    let body = "(i64.store (i32.const 0) (i64.const -1))
        (i64.store (i32.const 8) (i64.const -1))
        (drop (call $args_sizes_get (i32.const 0) (i32.const 4)))
        (drop (call $environ_sizes_get (i32.const 8) (i32.const 12)))
        (if (i64.ne (i64.or (i64.load (i32.const 0)) (i64.load (i32.const 8))) (i64.const 0))
            (then unreachable))
        (if (call $args_get (i32.const 0) (i32.const 0)) (then unreachable))
        (if (call $environ_get (i32.const 0) (i32.const 0)) (then unreachable))";
    returned(&Run::of(&command("", body)).go(), 0);
}

#[test]
fn clock_time_get_is_the_virtual_clock() {
    let body = "(if (call $clock_time_get (i32.const 0) (i64.const 0) (i32.const 0))
            (then unreachable))
        (if (i64.ne (i64.load (i32.const 0)) (call $now_ns)) (then unreachable))
        (if (call $clock_time_get (i32.const 1) (i64.const 0) (i32.const 0))
            (then unreachable))
        (if (i32.ne (call $clock_time_get (i32.const 2) (i64.const 0) (i32.const 0))
            (i32.const 28)) (then unreachable))";
    returned(&Run::of(&command("", body)).go(), 0);
}

#[test]
fn a_clock_steps_by_a_nanosecond() {
    let step = |clock: u32| {
        let body = format!(
            "(if (call $clock_res_get (i32.const {clock}) (i32.const 0)) (then unreachable))
            (drop (call $output (i32.const 0) (i32.const 8)))"
        );
        Run::of(&command("", &body)).go().output
    };
    for clock in [0, 1] {
        assert_eq!(step(clock), 1u64.to_le_bytes());
    }
    // What is none is told before the pointer is looked at.
    let body = "(call $proc_exit (call $clock_res_get (i32.const 2) (i32.const -1)))";
    returned(&Run::of(&command("", body)).go(), 28);
}

/// What a program ends with that ends with what each of these expressions gives.
fn answers<const N: usize>(expressions: [&str; N]) -> [i32; N] {
    let stores: String = (expressions.iter().enumerate())
        .map(|(at, expression)| format!("(i32.store (i32.const {}) {expression})", 64 + 4 * at))
        .collect();
    let body = format!("{stores} (drop (call $output (i32.const 64) (i32.const {})))", 4 * N);
    let report = Run::of(&command("", &body)).go();
    returned(&report, 0);
    let mut numbers =
        report.output.chunks_exact(4).map(|it| i32::from_le_bytes(it.try_into().unwrap()));
    std::array::from_fn(|_| numbers.next().unwrap())
}

const EBADF: i32 = 8;

/// Each function that takes a descriptor, with what it answers for 0, 1 and 2.
const OF_DESCRIPTORS: [(&str, &str, [i32; 3]); 25] = [
    ("fd_read", "(i32.const 0) (i32.const 0) (i32.const 0)", [0, EBADF, EBADF]),
    ("fd_write", "(i32.const 0) (i32.const 0) (i32.const 0)", [EBADF, 0, 0]),
    ("fd_fdstat_get", "(i32.const 0)", [0; 3]),
    ("fd_fdstat_set_flags", "(i32.const 4)", [0; 3]),
    ("fd_seek", "(i64.const 0) (i32.const 1) (i32.const 0)", [70; 3]),
    ("fd_tell", "(i32.const 0)", [70; 3]),
    ("fd_pread", "(i32.const 0) (i32.const 0) (i64.const 0) (i32.const 0)", [70; 3]),
    ("fd_pwrite", "(i32.const 0) (i32.const 0) (i64.const 0) (i32.const 0)", [70; 3]),
    ("fd_advise", "(i64.const 0) (i64.const 0) (i32.const 0)", [70; 3]),
    ("fd_allocate", "(i64.const 0) (i64.const 0)", [70; 3]),
    ("fd_filestat_get", "(i32.const 0)", [0; 3]),
    ("fd_filestat_set_size", "(i64.const 0)", [28; 3]),
    ("fd_filestat_set_times", "(i64.const 0) (i64.const 0) (i32.const 0)", [28; 3]),
    ("fd_fdstat_set_rights", "(i64.const 0) (i64.const 0)", [58; 3]),
    ("fd_renumber", "(i32.const 0)", [58; 3]),
    ("fd_readdir", "(i32.const 0) (i32.const 0) (i64.const 0) (i32.const 0)", [54; 3]),
    ("fd_sync", "", [0; 3]),
    ("fd_datasync", "", [0; 3]),
    ("sock_accept", "(i32.const 0) (i32.const 0)", [57; 3]),
    ("sock_recv", "(i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)", [57; 3]),
    ("sock_send", "(i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)", [57; 3]),
    ("sock_shutdown", "(i32.const 0)", [57; 3]),
    ("fd_prestat_get", "(i32.const 0)", [EBADF; 3]),
    ("fd_prestat_dir_name", "(i32.const 0) (i32.const 8)", [EBADF; 3]),
    ("fd_close", "", [0; 3]),
];

#[test]
fn there_are_three_descriptors_and_no_more() {
    for (function, arguments, expected) in OF_DESCRIPTORS {
        let of = |fd: i32| format!("(call ${function} (i32.const {fd}) {arguments})");
        let calls = [0, 1, 2, 3, -1].map(of);
        let [zero, one, two, three, negative] = answers(calls.each_ref().map(String::as_str));
        assert_eq!([zero, one, two], expected, "{function}");
        assert_eq!([three, negative], [EBADF; 2], "{function}");
    }
}

#[test]
fn a_descriptor_that_was_closed_is_none_and_the_others_are() {
    for (function, arguments, expected) in OF_DESCRIPTORS {
        for closed in 0..3 {
            let close = format!("(call $fd_close (i32.const {closed}))");
            let of = |fd: i32| format!("(call ${function} (i32.const {fd}) {arguments})");
            // The output of the answers is no descriptor's, so it comes all the same.
            let calls = [close, of(0), of(1), of(2)];
            let [done, answers @ ..] = answers(calls.each_ref().map(String::as_str));
            let mut expected = expected;
            expected[closed] = EBADF;
            assert_eq!((done, answers), (0, expected), "{function} after {closed} was closed");
        }
    }
}

#[test]
fn a_character_device_is_told_with_what_may_be_done_to_it() {
    for (fd, right) in [(0, 2), (1, 64), (2, 64)] {
        let body = format!(
            "(if (call $fd_fdstat_get (i32.const {fd}) (i32.const 0)) (then unreachable))
            (drop (call $output (i32.const 0) (i32.const 24)))"
        );
        let report = Run::of(&command("", &body)).go();
        returned(&report, 0);
        let mut fdstat = [0; 24];
        (fdstat[0], fdstat[8]) = (2, right);
        assert_eq!(report.output, fdstat);
    }
}

#[test]
fn a_character_device_has_no_size_and_no_times() {
    for fd in 0..3 {
        let body = format!(
            "(i64.store (i32.const 56) (i64.const -1))
            (if (call $fd_filestat_get (i32.const {fd}) (i32.const 0)) (then unreachable))
            (drop (call $output (i32.const 0) (i32.const 64)))"
        );
        let report = Run::of(&command("", &body)).go();
        returned(&report, 0);
        let mut filestat = [0; 64];
        filestat[16] = 2;
        assert_eq!(report.output, filestat);
    }
}

#[test]
fn no_path_leads_anywhere_whatever_is_asked_of_it() {
    let paths = Wasi::ALL.iter().filter(|it| it.name().starts_with("path_"));
    let calls: Vec<String> = (paths.clone())
        .map(|function| {
            let arguments = function.signature().params.iter().map(|value| match value {
                Value::I32 => "(i32.const -1)",
                Value::I64 => "(i64.const -1)",
            });
            format!("(call ${} {})", function.name(), arguments.collect::<String>())
        })
        .collect();
    assert_eq!(calls.len(), 10);
    for call in calls {
        assert_eq!(answers([&call]), [76], "{call}");
    }
}

#[test]
fn who_yields_goes_on_and_no_signal_is_raised() {
    assert_eq!(answers(["(call $sched_yield)", "(call $proc_raise (i32.const 6))"]), [0, 58]);
}

// ---- poll_oneoff

/// A subscription to a time, in nanoseconds.
fn time(userdata: u64, clock: u32, ns: u64, is_absolute: bool) -> Vec<u8> {
    let mut bytes = subscription(userdata, 0, clock);
    bytes[24..32].copy_from_slice(&ns.to_le_bytes());
    bytes[40] = is_absolute.into();
    bytes
}

/// A subscription to a descriptor: 1 for input, 2 for room.
fn subscription(userdata: u64, tag: u8, number: u32) -> Vec<u8> {
    let mut bytes = vec![0; 48];
    bytes[..8].copy_from_slice(&userdata.to_le_bytes());
    bytes[8] = tag;
    bytes[16..20].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// User data, error, tag, bytes and flags.
type Event = (u64, u16, u8, u64, u16);

/// What `poll_oneoff` answers, how far it moves the clock, and its events.
fn polled(input: &str, before: &str, subscriptions: &[Vec<u8>]) -> (i32, u64, Vec<Event>) {
    let bytes: String = subscriptions.concat().iter().map(|byte| format!("\\{byte:02x}")).collect();
    let body = format!(
        "(local $begun i64) {before} (local.set $begun (call $now_ns))
        (i32.store (i32.const 0) (call $poll_oneoff (i32.const 1024) (i32.const 4096)
            (i32.const {}) (i32.const 4)))
        (i64.store (i32.const 8) (i64.sub (call $now_ns) (local.get $begun)))
        (drop (call $output (i32.const 0) (i32.const 16)))
        (drop (call $output (i32.const 4096)
            (i32.mul (i32.const 32) (i32.load (i32.const 4)))))",
        subscriptions.len(),
    );
    let data = format!("(data (i32.const 1024) \"{bytes}\")");
    let report = Run::of(&command(&data, &body)).input(input).go();
    returned(&report, 0);
    let (head, events) = report.output.split_at(16);
    let word = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let half = |bytes: &[u8], at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let told = |it: &[u8]| (word(it, 0), half(it, 8), it[10], word(it, 16), half(it, 24));
    (head[0].into(), word(head, 8), events.chunks_exact(32).map(told).collect())
}

#[test]
fn a_program_that_sleeps_finds_that_so_much_time_has_passed() {
    let second = 1_000_000_000;
    for clock in [0, 1] {
        let slept = polled("", "", &[time(7, clock, 3 * second, false)]);
        assert_eq!(slept, (0, 3 * second, vec![(7, 0, 0, 0, 0)]));
    }
    // The first time ends the wait, and whatever else is due by then is told.
    let times = [time(1, 1, 9, false), time(2, 1, 5, false), time(3, 0, 5, false)];
    assert_eq!(polled("", "", &times), (0, 5, vec![(2, 0, 0, 0, 0), (3, 0, 0, 0, 0)]));
    // A time that is over is not waited for, and the clock goes no way back.
    let times = [time(1, 1, 1, true), time(2, 1, 5, false)];
    assert_eq!(polled("", "", &times), (0, 0, vec![(1, 0, 0, 0, 0)]));
    let far = polled("", "", &[time(1, 1, u64::MAX, false)]);
    assert_eq!((far.0, far.2), (0, vec![(1, 0, 0, 0, 0)]));
}

#[test]
fn a_time_on_the_clock_is_slept_until() {
    let until = Run::of("(module)").start_unix_ns + 250;
    assert_eq!(polled("", "", &[time(1, 0, until, true)]), (0, 250, vec![(1, 0, 0, 0, 0)]));
}

#[test]
fn input_and_room_are_there_and_nothing_is_waited_for() {
    let all =
        [time(1, 1, 5, false), subscription(2, 1, 0), subscription(3, 2, 1), subscription(4, 2, 2)];
    let there = |input| {
        vec![(2, 0, 1, input, u16::from(input == 0)), (3, 0, 2, 4096, 0), (4, 0, 2, 4096, 0)]
    };
    assert_eq!(polled("12345", "", &all), (0, 0, there(5)));
    assert_eq!(polled("", "", &all), (0, 0, there(0)));
}

#[test]
fn what_cannot_be_waited_for_is_an_error_of_its_own() {
    let none = [
        time(1, 2, 5, false),
        subscription(2, 1, 1),
        subscription(3, 2, 0),
        subscription(4, 1, 9),
        time(5, 1, 5, false),
    ];
    let bad = |userdata, tag| (userdata, 8, tag, 0, 0);
    let events = vec![(1, 28, 0, 0, 0), bad(2, 1), bad(3, 2), bad(4, 1)];
    assert_eq!(polled("", "", &none), (0, 0, events));
    let closed = "(drop (call $fd_close (i32.const 1)))";
    assert_eq!(polled("", closed, &[subscription(1, 2, 1)]), (0, 0, vec![bad(1, 2)]));
    // Nothing, and what there is no name for.
    assert_eq!(polled("", "", &[]), (28, 0, vec![]));
    assert_eq!(polled("", "", &[time(1, 1, 5, false), subscription(2, 3, 0)]), (28, 0, vec![]));
}

#[test]
fn a_line_of_standard_error_may_come_in_pieces() {
    // One byte at a time.
    let body = r#"(local $i i32)
        (i32.store (i32.const 4) (i32.const 1))
        (loop $again
            (i32.store (i32.const 0) (i32.add (i32.const 100) (local.get $i)))
            (drop (call $fd_write (i32.const 2) (i32.const 0) (i32.const 1) (i32.const 8)))
            (br_if $again (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1)))
                (i32.const 6))))"#;
    let report = Run::of(&command(r#"(data (i32.const 100) "ab\0acde")"#, body)).go();
    let lines: Vec<_> = report.logs.iter().map(|log| &*log.text).collect();
    assert_eq!(lines, ["ab", "cde"]);
}

/// What the programs of the next tests are made of: `$say` writes to standard error, and the
/// others take time.
const STDERR: &str = r#"
    (func $say (param $from i32) (param $len i32)
        (i32.store (i32.const 0) (local.get $from))
        (i32.store (i32.const 4) (local.get $len))
        (drop (call $fd_write (i32.const 2) (i32.const 0) (i32.const 1) (i32.const 8))))
    (func $call_it (drop (call $call (i32.const 90) (i32.const 3) (i32.const 0) (i32.const 0))))
    (func $spin (loop $l (br $l)))
    (func $spin_some (local $n i32) (loop $l
        (br_if $l (i32.lt_u (local.tee $n (i32.add (local.get $n) (i32.const 1))) (i32.const 1000000)))))
    (data (i32.const 90) "a.b") (data (i32.const 100) "one\0atwo")"#;

#[test]
fn what_is_cut_off_leaves_the_line_of_standard_error_that_it_was_at() {
    // What a host has that ends the run after so many slices.
    let left = |body: &str, slices: u32| {
        let report = Run::of(&command(STDERR, body)).cut_after(slices).go();
        assert!(report.served.is_err() && report.ended.is_none());
        let logs: Vec<_> = report.logs.into_iter().map(|log| log.text).collect();
        (logs, report.unfinished.map(|log| (log.level, log.text)))
    };
    let none = || Vec::<String>::new();
    let one = || Some((2, "one".to_owned()));
    let say = "(call $say (i32.const 100) (i32.const 3))";
    // It leaves with what waits for long, and with a call at once.
    assert_eq!(left(&format!("{say} (call $spin)"), 20), (none(), None));
    assert_eq!(left(&format!("{say} (call $spin)"), 40), (none(), one()));
    assert_eq!(left(&format!("{say} (call $call_it) (call $spin)"), 3), (none(), one()));
    let waits =
        "(drop (call $call_async (i32.const 90) (i32.const 3) (i32.const 0) (i32.const 0)))";
    let waits = format!("{waits} {say} (drop (call $wait_any)) (call $spin)");
    assert_eq!(left(&waits, 3), (none(), one()));
    // What came since is told as well.
    let more = format!("{say} (call $call_it) {say} (call $spin)");
    assert_eq!(left(&more, 40), (none(), Some((2, "oneone".into()))));
    // A line that was ended is a record and no more.
    let ended =
        format!("{say} (call $call_it) (call $say (i32.const 103) (i32.const 1)) (call $spin)");
    assert_eq!(left(&ended, 40), (vec!["one".into()], None));
}

#[test]
fn a_line_of_standard_error_is_whole_however_long_it_takes() {
    let body = "(call $say (i32.const 100) (i32.const 2)) (call $call_it)
        (call $say (i32.const 102) (i32.const 4)) (call $spin_some)
        (call $say (i32.const 106) (i32.const 1))";
    let report = Run::of(&command(STDERR, body)).go();
    returned(&report, 0);
    // It was told before it was over.
    assert!(report.sends > 3, "{}", report.sends);
    let lines: Vec<_> = report.logs.iter().map(|log| &*log.text).collect();
    assert_eq!(lines, ["one", "two"]);
    assert_eq!(report.unfinished, None);
}

#[test]
fn lines_that_find_the_log_full_are_counted_however_they_come() {
    const LINES: u32 = 60_000;
    // All at once, and in pieces of a thousand.
    for piece in [LINES, 1_000] {
        let body = format!(
            r#"(local $left i32)
               (local.set $left (i32.const {}))
               (memory.fill (i32.const 64) (i32.const 10) (i32.const {piece}))
               (i32.store (i32.const 0) (i32.const 64))
               (i32.store (i32.const 4) (i32.const {piece}))
               (loop $more
                   (drop (call $fd_write (i32.const 2) (i32.const 0) (i32.const 1) (i32.const 8)))
                   (br_if $more (local.tee $left (i32.sub (local.get $left) (i32.const 1)))))"#,
            LINES / piece
        );
        let mut room = 0;
        let report = Run::of(&command("", &body)).limits(|limits| room = limits.log_bytes).go();
        let fit = room / forge_protocol::limits::LOG_RECORD_OVERHEAD_BYTES;
        assert!(fit < LINES);
        assert_eq!(report.logs.len() as u32, fit);
        assert_eq!(report.ended().logs_dropped, u64::from(LINES - fit));
    }
}
