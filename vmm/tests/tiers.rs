//! The two tiers side by side: the same programs, the same results.
//!
//! Each case says how it ends, so that the tier `process` is held to something
//! where there is no KVM too; where there is, both reports are compared, field
//! by field, but for those that name the tier, a moment or a run.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/desk.rs"]
mod desk;
#[path = "support/executables.rs"]
mod executables;
#[path = "support/processes.rs"]
mod processes;
#[path = "support/serving.rs"]
mod serving;

use std::ffi::CString;
use std::fs;
use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode, Output, Stdio};

use desk::{Desk, text};
use forge_protocol::broker::Authority;
use forge_protocol::ending::{Ending, RejectKind, RunEnd};
use forge_protocol::limits::{LOG_RECORD_BYTES_MAX, LOG_RECORD_OVERHEAD_BYTES, RunLimits};
use forge_protocol::name::ToolName;
use forge_protocol::run::Artifact;
use forge_protocol::service::{Order, Question, Reply, RunEvent};
use forge_protocol::signature::{SignerKey, TrustKeys};
use forge_protocol::worker::{Fate, Job, Tier};
use forge_vmm::cancel::Cancel;
use forge_vmm::link::Patience;
use forge_vmm::machine::Hypervisor;
use forge_vmm::pool::{Pool, PoolOptions, Task};
use forge_vmm::supervisor::{Attendance, Supervisor, SupervisorOptions};
use processes::{wait_for, worker_of};
use serde_json::{Value, json};
use serving::{ECHO, Service, run, submit};
use support::{answer, forge_module, job, signed, signer};

fn main() -> ExitCode {
    support::main(
        claims![
            every_ending_is_the_same_in_both_tiers,
            the_examples_give_the_same_in_both_tiers,
            the_examples_binding_takes_long_texts_with_escapes,
            auto_takes_the_vm_where_there_is_one,
            a_vm_that_the_deadline_stops_leaves_the_line_it_was_at,
        ],
        claims![
            every_ending_is_reached_without_a_vm,
            the_signature_is_checked_within_the_tier_too,
            all_that_the_largest_limits_allow_is_reported,
            a_cancelled_run_ends_as_one_and_keeps_what_it_wrote_to_itself,
            a_killed_worker_loses_its_run_and_says_so,
            a_worker_without_a_vm_holds_its_links_and_nothing_else,
            a_service_runs_in_the_tier_of_its_configuration,
            a_run_without_a_descriptor_is_told_in_its_tier_and_counted,
            a_program_that_cannot_be_signed_is_told_in_its_tier_or_a_services_unknown_one,
            a_prepared_program_runs_in_a_process_of_its_own_each_time,
            nothing_is_reset_without_a_vm,
            a_process_that_the_deadline_stops_leaves_the_line_it_was_at,
            without_kvm_a_vm_is_refused_and_a_process_runs_the_readmes_example,
            without_kvm_a_service_does_not_start_and_says_why,
            without_kvm_auto_says_what_it_took_instead,
            without_kvm_probe_says_what_works,
        ],
    )
}

const FUEL_MAX: &str = "18446744073709551615";
const PAGE: &str = r#"(memory (export "memory") 1)"#;

/// One program, and how it ends.
struct Case {
    name: &'static str,
    wat: String,
    arguments: Vec<&'static str>,
    ends: (i32, &'static str, &'static str),
}

fn case(
    name: &'static str,
    wat: impl Into<String>,
    arguments: &[&'static str],
    ends: (i32, &'static str, &'static str),
) -> Case {
    Case { name, wat: wat.into(), arguments: arguments.to_vec(), ends }
}

/// A program without imports.
fn bare(more: &str, body: &str) -> String {
    format!(r#"(module {PAGE} {more} (func (export "forge_run") (result i32) {body}))"#)
}

/// A program with all of `forge`, and this text in its memory.
fn with_text(text: &str, body: &str) -> String {
    forge_module(&format!("{PAGE} (data (i32.const 0) {text:?})"), body)
}

fn cases() -> Vec<Case> {
    const TOOLS: [&str; 2] = ["--mcp-config", "mcp.json"];
    let say = "(drop (call $output (i32.const 0) (i32.const 5)))";
    let log = "(call $log (i32.const 1) (i32.const 0) (i32.const 5))";
    let trap = |kind| (1, "trap", kind);
    let tool = |name, wat: String, allow: &[&'static str], ends| {
        case(name, wat, &[&TOOLS[..], allow].concat(), ends)
    };
    let call = |tool: &str, request: &str| {
        forge_module(
            &format!(
                "(import \"tool\" \"{tool}\" (func $tool (param i32 i32) (result i32)))
                 (memory (export \"memory\") 2) (data (i32.const 0) {request:?})"
            ),
            &format!(
                "(local $n i32)
                 (local.set $n (call $tool (i32.const 0) (i32.const {})))
                 (drop (call $output (i32.const 4096)
                    (call $resp_read (i32.const 4096) (i32.const 0) (i32.const 100000))))
                 (local.get $n)",
                request.len(),
            ),
        )
    };
    let table = "(type $i (func (result i32))) (type $v (func))
        (table 2 funcref) (func $nothing) (elem (i32.const 0) $nothing)";
    let recursion = "(func $f (param i32) (result i32)
        (i32.add (i32.const 1) (call $f (local.get 0))))";
    vec![
        case("success", with_text("hello", &format!("{say} {log} (i32.const 0)")), &[], (0, "ok", "")),
        case("a code of its own", with_text("hello", &format!("{say} (i32.const 3)")), &[], (1, "failed", "returned")),
        case("unreachable, behind output and log", with_text("hello", &format!("{say} {log} (unreachable)")), &[], trap("unreachable")),
        case("memory", bare("", "(i32.load (i32.const 65534))"), &[], trap("memory_out_of_bounds")),
        case("table", bare(table, "(call_indirect (type $i) (i32.const 7))"), &[], trap("table_out_of_bounds")),
        case("null", bare(table, "(call_indirect (type $i) (i32.const 1))"), &[], trap("indirect_call_to_null")),
        case("type", bare(table, "(call_indirect (type $i) (i32.const 0))"), &[], trap("bad_signature")),
        case("division", bare("", "(i32.div_s (i32.const 1) (i32.const 0))"), &[], trap("division_by_zero")),
        case("overflow", bare("", "(i32.div_s (i32.const -2147483648) (i32.const -1))"), &[], trap("integer_overflow")),
        case("conversion", bare("", "(i32.trunc_f32_s (f32.const nan))"), &[], trap("bad_conversion")),
        case("stack", bare(recursion, "(call $f (i32.const 0))"), &[], trap("stack_overflow")),
        case("pointer", with_text("hello", "(call $output (i32.const 65530) (i32.const 100))"), &[], trap("bad_pointer")),
        case("misuse", with_text("hello", "(call $wait (i32.const 5))"), &[], trap("misuse")),
        case("fuel", with_text("hello", &format!("{say} (loop (br 0)) (unreachable)")), &["--fuel", "1000000"], (4, "limit", "fuel")),
        case(
            "deadline",
            with_text("hello", &format!("{say} (loop (br 0)) (unreachable)")),
            &["--fuel", FUEL_MAX, "--timeout", "5s"],
            (4, "limit", "deadline"),
        ),
        case(
            "memory beyond its limit, which is the program's to see",
            bare("", "(if (i32.ne (memory.grow (i32.const 20)) (i32.const 1)) (then (return (i32.const 1))))
                (i32.ne (memory.grow (i32.const 400)) (i32.const -1))"),
            &["--memory", "2000000"],
            (0, "ok", ""),
        ),
        case(
            "a table that is too large",
            bare("(table 100001 funcref)", "(i32.const 0)"),
            &[],
            (3, "rejected", "too_large"),
        ),
        case(
            "output",
            with_text("hello", "(loop (drop (call $output (i32.const 0) (i32.const 65536))) (br 0)) (unreachable)"),
            &[],
            (4, "limit", "output"),
        ),
        case(
            "artifacts",
            with_text("hello", "(loop (drop (call $artifact (i32.const 0) (i32.const 1) (i32.const 1)
                (i32.const 1) (i32.const 2) (i32.const 3))) (br 0)) (unreachable)"),
            &[],
            (4, "limit", "artifacts"),
        ),
        case("more log than is kept", with_text("hello", &format!("(local $i i32) (loop {log} (br_if 0 (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1))) (i32.const 9000)))) (i32.const 0)")), &[], (0, "ok", "")),
        case("no start section", r#"(module (memory (export "memory") 1) (func $f) (start $f))"#, &[], (3, "rejected", "start_section")),
        tool("a call", call("test.echo", r#"{"text":"round trip"}"#), &["--allow", "test.echo"], (1, "failed", "returned")),
        tool("a call that fails", call("test.fail", "{}"), &["--allow", "test.fail"], (1, "failed", "returned")),
        tool("a request that is none", call("test.echo", "[]"), &["--allow", "test.echo"], (1, "failed", "returned")),
        tool("an import that is not granted", call("test.echo", "{}"), &["--allow", "test.slow"], (3, "rejected", "import")),
        tool(
            "a call by name that is not granted",
            with_text("test.echo{}", "(call $call (i32.const 0) (i32.const 9) (i32.const 9) (i32.const 2))"),
            &["--allow", "test.slow"],
            (1, "failed", "returned"),
        ),
        tool("a tool that never answers", call("test.never", "{}"), &["--allow", "test.never", "--timeout", "5s"], (4, "limit", "deadline")),
        tool("three calls in flight", barrier(), &["--allow", "test.barrier"], (0, "ok", "")),
    ]
}

/// Starts three calls that settle once all have arrived, and takes all.
fn barrier() -> String {
    with_text(
        r#"test.barrier{\"n\":3}"#.replace("\\\"", "\"").as_str(),
        r#"(local $i i32)
           (loop $start
               (if (i32.ne (local.get $i)
                       (call $call_async (i32.const 0) (i32.const 12) (i32.const 12) (i32.const 7)))
                   (then (return (i32.const 1))))
               (br_if $start (i32.lt_u
                   (local.tee $i (i32.add (local.get $i) (i32.const 1))) (i32.const 3))))
           (loop $collect
               (local.set $i (i32.sub (local.get $i) (i32.const 1)))
               (if (i32.lt_s (call $wait (local.get $i)) (i32.const 0))
                   (then (return (i32.const 2))))
               (br_if $collect (local.get $i)))
           (i32.const 0)"#,
    )
}

/// The folder with all that these tests start.
fn programs() -> &'static Path {
    const OTHERS: [&str; 4] =
        ["forge-toolbroker", "forge-test-server", "inventory-server", "office-server"];
    executables::folder_with(&OTHERS)
}

/// The desk, with the test server.
fn desk() -> Desk {
    let desk = Desk::new();
    let server = json!({ "command": programs().join("forge-test-server") });
    desk.write("mcp.json", json!({ "mcpServers": { "test": server } }).to_string());
    desk.write("signer.pub", signer().trust_key().to_pem());
    desk
}

fn run_command(desk: &Desk, isolation: &str, arguments: &[&str]) -> Command {
    let mut all = vec!["run", "--json", "--sign-with", "signer.pem", "--isolation", isolation];
    // An emulated CPU needs more than the default to boot at all.
    if !arguments.contains(&"--timeout") {
        all.extend(["--timeout", "30s"]);
    }
    all.extend(arguments);
    desk.command(&all)
}

fn reported(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("no report: {}", text(&output.stderr)))
}

/// Runs a program in a tier. The report is held to naming it.
fn run_in(desk: &Desk, tier: Tier, arguments: &[&str]) -> (i32, Value) {
    let output = run_command(desk, tier.as_str(), arguments).output().unwrap();
    let report = reported(&output);
    assert_eq!(report["isolation"], tier.as_str(), "{report:#}");
    let weak = report["weaknesses"].as_array().unwrap().contains(&json!("no_vm"));
    let started = report["timing_us"]["load"] != 0 || report["timing_us"]["run"] != 0;
    assert_eq!(weak, started && tier == Tier::Process, "{report:#}");
    (output.status.code().unwrap(), report)
}

/// What is the same in both tiers: all but what names the tier, the run, or
/// how long something took. Calls settle in the order of their servers.
fn comparable(mut report: Value) -> Value {
    let fields = report.as_object_mut().unwrap();
    for field in ["run_id", "isolation", "weaknesses", "vm_exits", "timing_us"] {
        assert!(fields.remove(field).is_some(), "{field}");
    }
    let calls = fields["tool_calls"].as_array_mut().unwrap();
    for call in calls.iter_mut() {
        call.as_object_mut().unwrap().remove("duration_us");
        // At the deadline either the broker's word or the worker's own end
        // comes first.
        if call["status"] == "outcome_unknown" {
            call["status"] = "unsettled".into();
        }
    }
    calls.sort_by_key(|call| call["id"].as_u64());
    report
}

fn run_case(desk: &Desk, tier: Tier, case: &Case) -> Value {
    let program = desk.write("program.wat", &case.wat);
    let (code, report) = run_in(desk, tier, &[&case.arguments[..], &[program.as_str()]].concat());
    let found = (code, report["status"].as_str().unwrap(), report["kind"].as_str().unwrap());
    assert_eq!(found, case.ends, "{} in {tier:?}: {report:#}", case.name);
    report
}

fn every_ending_is_reached_without_a_vm() {
    let desk = desk();
    for case in cases() {
        run_case(&desk, Tier::Process, &case);
    }
    // That something comes of it is not left to chance.
    let deadline = cases().into_iter().find(|case| case.name == "deadline").unwrap();
    let report = run_case(&desk, Tier::Process, &deadline);
    assert_eq!(report["output"], "hello", "what was written before is kept");
}

fn every_ending_is_the_same_in_both_tiers() {
    let desk = desk();
    for case in cases() {
        let [vm, process] = [Tier::Vm, Tier::Process].map(|tier| run_case(&desk, tier, &case));
        if case.ends.1 == "ok" || case.ends.1 == "trap" {
            assert!(vm["fuel_used"].as_u64().unwrap() > 0, "{}", case.name);
        }
        assert_eq!(comparable(process), comparable(vm), "{}", case.name);
    }
    // Refused before there is a worker, and with the same words.
    let module = wat::parse_str(&cases()[0].wat).unwrap();
    let [good, stranger] =
        [signer(), SignerKey::from_secret(&[9; 32])].map(|key| key.sign(&module).unwrap());
    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    for (name, program) in [("unsigned", module), ("flipped", flipped), ("stranger", stranger)] {
        desk.write("program.wasm", program);
        let [vm, process] = ["vm", "process"].map(|isolation| {
            let arguments = ["run", "--json", "--trust", "signer.pub", "--isolation", isolation];
            reported(&desk.forge(&[&arguments[..], &["program.wasm"]].concat()))
        });
        assert_eq!(process["kind"], "signature", "{name}: {process:#}");
        assert_eq!(comparable(process), comparable(vm), "{name}");
    }
}

fn a_vm_that_the_deadline_stops_leaves_the_line_it_was_at() {
    the_line_is_left(Tier::Vm);
}

fn a_process_that_the_deadline_stops_leaves_the_line_it_was_at() {
    the_line_is_left(Tier::Process);
}

/// Stops a program that has written a line of standard error and half of another, while it
/// computes and while it waits.
fn the_line_is_left(tier: Tier) {
    let desk = desk();
    let wat = |wait: &str| {
        format!(
            r#"(module
                (import "wasi_snapshot_preview1" "fd_write"
                    (func $fd_write (param i32 i32 i32 i32) (result i32)))
                (import "forge" "call" (func $call (param i32 i32 i32 i32) (result i32)))
                {PAGE}
                (data (i32.const 0) "\64\00\00\00\0b\00\00\00test.never{{}}")
                (data (i32.const 100) "one\0aloading")
                (func (export "_start")
                    (drop (call $fd_write (i32.const 2) (i32.const 0) (i32.const 1) (i32.const 32)))
                    {wait}))"#
        )
    };
    let never = "(drop (call $call (i32.const 8) (i32.const 10) (i32.const 18) (i32.const 2)))";
    for (name, wait) in [("it computes", "(loop (br 0))"), ("a tool never answers", never)] {
        let case = case(
            name,
            wat(wait),
            &[
                "--mcp-config",
                "mcp.json",
                "--allow",
                "test.never",
                "--fuel",
                FUEL_MAX,
                "--timeout",
                "5s",
            ],
            (4, "limit", "deadline"),
        );
        let report = run_case(&desk, tier, &case);
        let log = report["log"].as_array().unwrap().iter();
        let texts: Vec<_> = log.map(|record| record["text"].as_str().unwrap()).collect();
        assert_eq!(texts, ["one", "loading"], "{name} in {tier:?}");
    }
}

/// The programs of `examples/`, with what the README runs them with.
fn examples(desk: &Desk) -> Vec<Vec<String>> {
    let programs = programs();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/programs");
    let inventory = json!({
        "command": programs.join("inventory-server"),
        "env": { "INVENTORY_TOKEN": "${INVENTORY_TOKEN}" },
    });
    let office = json!({ "command": programs.join("office-server"), "args": ["billing"] });
    let servers = json!({ "mcpServers": { "inventory": inventory, "billing": office } });
    let servers = desk.write("examples.json", servers.to_string());
    let tools = |allow: &[&str]| {
        let allow = allow.iter().flat_map(|tool| ["--allow", tool]);
        ["--mcp-config", &servers].into_iter().chain(allow).map(String::from).collect::<Vec<_>>()
    };
    let input = |text: &str| vec!["--input".to_owned(), text.to_owned()];
    let mut all = Vec::new();
    for entry in fs::read_dir(&root).unwrap() {
        let path = entry.unwrap().path();
        let arguments = match path.file_name().unwrap().to_str().unwrap() {
            "restock.wasm" => [
                input(r#"{"query": "bolt", "needed": 100}"#),
                tools(&["inventory.find_parts", "inventory.get_stock"]),
            ]
            .concat(),
            "call_async.wat" => tools(&["inventory.get_stock"]),
            "unpaid.wat" => tools(&["billing.list_invoices"]),
            "artifact.wat" => input(r#"{"a":1}"#),
            name if name.ends_with(".wat") || name.ends_with(".wasm") => Vec::new(),
            _ => continue,
        };
        all.push([arguments, vec![path.to_str().unwrap().to_owned()]].concat());
    }
    assert!(all.len() >= 5, "{all:?}");
    all
}

fn run_example(desk: &Desk, isolation: &str, arguments: &[String]) -> Command {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut command = run_command(desk, isolation, &arguments);
    command.env("INVENTORY_TOKEN", "demo-inventory-token");
    command
}

fn the_examples_binding_takes_long_texts_with_escapes() {
    let desk = desk();
    let mut arguments = restock(&desk);
    let query = json!({ "query": "b\n\u{e4}\"".repeat(15_000), "needed": 100 });
    let given = arguments.iter().position(|it| it == "--input").unwrap() + 1;
    arguments[given] = query.to_string();
    let report = reported(&run_example(&desk, "vm", &arguments).output().unwrap());
    assert_eq!(report["status"], "ok", "{report:#}");
    assert_eq!(report["tool_calls"][0]["tool"], "inventory.find_parts", "{report:#}");
}

fn the_examples_give_the_same_in_both_tiers() {
    let desk = desk();
    for arguments in examples(&desk) {
        let [vm, process] = ["vm", "process"].map(|isolation| {
            let output = run_example(&desk, isolation, &arguments).output().unwrap();
            let report = reported(&output);
            assert_eq!(output.status.code(), Some(0), "{arguments:?}: {report:#}");
            comparable(report)
        });
        assert!(vm["fuel_used"].as_u64().unwrap() > 0);
        // Three answers are written as they come.
        if arguments.last().unwrap().ends_with("call_async.wat") {
            let lines = |report: &Value| {
                let mut lines: Vec<_> =
                    report["output"].as_str().unwrap().lines().map(str::to_owned).collect();
                lines.sort();
                lines
            };
            assert_eq!(lines(&process), lines(&vm));
            continue;
        }
        assert_eq!(process, vm, "{arguments:?}");
    }
}

fn pool(tier: Tier) -> (Pool, TrustKeys) {
    let trust = TrustKeys::new([signer().trust_key()]).unwrap();
    let options = PoolOptions { tier, ..PoolOptions::default() };
    (Pool::new(&trust, options).unwrap(), trust)
}

/// The tiers that this host has.
fn tiers() -> Vec<Tier> {
    match Hypervisor::open() {
        Ok(_) => vec![Tier::Vm, Tier::Process],
        Err(_) => vec![Tier::Process],
    }
}

fn the_signature_is_checked_within_the_tier_too() {
    let good = signed(&with_text("hello", "(i32.const 0)"));
    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    let stranger = SignerKey::from_secret(&[9; 32]);
    let module = wat::parse_str(with_text("hello", "(i32.const 0)")).unwrap();
    for tier in tiers() {
        let (pool, _) = pool(tier);
        // By the pool's own door, behind every admission.
        let ending = |program: &[u8]| {
            let job: Job = job(program.to_vec(), RunLimits::default());
            let task =
                Task { tenant: "local", job: &job, broker: None, prepared: None, tell: None };
            match pool.carry_out(&task, Patience::default()).unwrap().report.fate {
                Fate::Ended(ended) => ended.ending,
                other => panic!("{tier:?}: {other:?}"),
            }
        };
        assert_eq!(ending(&good), Ending::Returned(0));
        for program in [&module, &flipped, &stranger.sign(&module).unwrap()] {
            let ending = ending(program);
            let refused = matches!(ending, Ending::Rejected { kind: RejectKind::Signature, .. });
            assert!(refused, "{tier:?}: {ending:?}");
        }
    }
}

fn all_that_the_largest_limits_allow_is_reported() {
    // A quarter of a gigabyte each way, also on an emulated CPU.
    let limits = RunLimits { wall_ms: 300_000, ..RunLimits::operator_maxima() };
    let log_bytes = LOG_RECORD_BYTES_MAX + LOG_RECORD_OVERHEAD_BYTES;
    let (artifacts, logs) = (limits.artifacts, limits.log_bytes / log_bytes);
    // The largest of everything, the smallest last: an encoder that makes room
    // by doubling does so once more at the end. And as many answers as there may be
    // wait with it for a guest that waits for the last of them alone.
    let program = signed(&forge_module(
        r#"(import "tool" "test.echo" (func (param i32 i32) (result i32)))
           (memory (export "memory") 65)
           (data (i32.const 0) "a.txttext/plain") (data (i32.const 32) "test.echo{}")"#,
        &format!(
            "(local $i i32)
             (drop (call $output (i32.const 64) (i32.const {output})))
             (loop $more
                (drop (call $artifact (i32.const 0) (i32.const 5) (i32.const 5) (i32.const 10)
                    (i32.const 64) (i32.const {artifact})))
                (local.set $i (i32.add (local.get $i) (i32.const 1)))
                (br_if $more (i32.lt_u (local.get $i) (i32.const {artifacts}))))
             (local.set $i (i32.const 0))
             (loop $more
                (call $log (i32.const 2) (i32.const 64) (i32.const {LOG_RECORD_BYTES_MAX}))
                (local.set $i (i32.add (local.get $i) (i32.const 1)))
                (br_if $more (i32.lt_u (local.get $i) (i32.const {logs}))))
             (local.set $i (i32.const 0))
             (loop $more
                (drop (call $call_async
                    (i32.const 32) (i32.const 9) (i32.const 41) (i32.const 2)))
                (local.set $i (i32.add (local.get $i) (i32.const 1)))
                (br_if $more (i32.lt_u (local.get $i) (i32.const {calls}))))
             (i32.lt_s (call $call (i32.const 32) (i32.const 9) (i32.const 41) (i32.const 2))
                (i32.const 0))",
            output = limits.output_bytes,
            artifact = limits.artifact_bytes,
            calls = limits.calls_in_flight - 1,
        ),
    ));
    for tier in tiers() {
        let (pool, _) = pool(tier);
        let mut job: Job = job(program.clone(), limits.clone());
        job.start.granted = vec![ToolName::parse("test.echo").unwrap()];
        job.brokered = true;
        let (broker, link) = UnixStream::pair().unwrap();
        let report = std::thread::scope(|scope| {
            let bytes = limits.response_bytes as usize;
            scope.spawn(move || answer(broker, limits.calls_in_flight, bytes));
            let broker = Some(&link);
            let task = Task { tenant: "local", job: &job, broker, prepared: None, tell: None };
            let carried_out = pool.carry_out(&task, Patience::default());
            // Nobody is answered any more.
            link.shutdown(std::net::Shutdown::Both).unwrap();
            carried_out.unwrap().report
        });
        let Fate::Ended(ended) = &report.fate else { panic!("{tier:?}: {:?}", report.fate) };
        assert_eq!(ended.ending, Ending::Returned(0), "{tier:?}");
        assert_eq!(report.calls.len(), limits.calls_in_flight as usize, "{tier:?}");
        assert_eq!(report.output.len(), limits.output_bytes as usize, "{tier:?}");
        let whole = |it: &&Artifact| it.content.len() == limits.artifact_bytes as usize;
        assert_eq!(report.artifacts.iter().filter(whole).count(), artifacts as usize, "{tier:?}");
        assert_eq!(report.logs.len(), logs as usize, "{tier:?}");
    }
}

fn supervisor(tier: Tier) -> Supervisor {
    let options = SupervisorOptions {
        trust: TrustKeys::new([signer().trust_key()]).unwrap(),
        maxima: RunLimits::operator_maxima(),
        pool: PoolOptions { tier, ..PoolOptions::default() },
    };
    Supervisor::new(options, None).unwrap()
}

fn a_cancelled_run_ends_as_one_and_keeps_what_it_wrote_to_itself() {
    let program = signed(&with_text(
        "hello",
        "(drop (call $output (i32.const 0) (i32.const 65536))) (loop (br 0)) (unreachable)",
    ));
    for tier in tiers() {
        let cancel = Cancel::new().unwrap();
        // It is under way when this is heard.
        let tell = |event: RunEvent| {
            if matches!(event, RunEvent::Output(_)) {
                cancel.raise();
            }
        };
        let order = Order {
            program: program.clone(),
            input: b"{}".to_vec(),
            principal: "local".into(),
            session: None,
            authority: Authority::Tools(Vec::new()),
            limits: RunLimits { fuel: u64::MAX, wall_ms: 30_000, ..RunLimits::default() },
            prepare: false,
            events: true,
            hosted: None,
        };
        let attendance =
            Attendance { cancel: Some(&cancel), tell: Some(&tell), ..Attendance::default() };
        let report = supervisor(tier).run_for(&order, &attendance).report;
        assert_eq!(report.end, RunEnd::Cancelled, "{tier:?}");
        assert_eq!((report.isolation, report.output.len()), (tier.as_str(), 0));
    }
}

/// Starts a run that does not end, and gives its worker once that computes.
fn endless(desk: &Desk, isolation: &str) -> (std::process::Child, u32) {
    let program = desk.write("endless.wat", bare("", "(loop (br 0)) (unreachable)"));
    let mut command = run_command(desk, isolation, &["--fuel", FUEL_MAX, &program]);
    let run = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let worker = wait_for("a worker that runs the program", || {
        let worker = worker_of(run.id())?;
        let stat = fs::read_to_string(format!("/proc/{worker}/stat")).ok()?;
        let ticks: u64 = stat.rsplit_once(") ")?.1.split(' ').nth(11)?.parse().ok()?;
        (ticks > 10).then_some(worker)
    });
    (run, worker)
}

fn a_killed_worker_loses_its_run_and_says_so() {
    let desk = desk();
    let mut reports = Vec::new();
    for tier in tiers() {
        let (run, worker) = endless(&desk, tier.as_str());
        // SAFETY: sends a signal to a process that this test started.
        unsafe { libc::kill(worker as i32, libc::SIGKILL) };
        let output = run.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(70), "{tier:?}");
        let report = reported(&output);
        assert_eq!(report["kind"], "worker_lost", "{tier:?}: {report:#}");
        assert_eq!(report["isolation"], tier.as_str());
        reports.push(comparable(report));
    }
    assert!(reports.windows(2).all(|pair| pair[0] == pair[1]), "{reports:#?}");
}

fn a_worker_without_a_vm_holds_its_links_and_nothing_else() {
    let desk = desk();
    let (mut run, worker) = endless(&desk, "process");
    let held: Vec<String> = fs::read_dir(format!("/proc/{worker}/fd"))
        .unwrap()
        .map(|entry| fs::read_link(entry.unwrap().path()).unwrap().display().to_string())
        .collect();
    let known = |it: &String| it.starts_with("socket:") || it == "/dev/null";
    assert!(held.len() == 3 && held.iter().all(known), "{held:?}");
    assert_eq!(fs::read(format!("/proc/{worker}/environ")).unwrap(), b"");
    let status = fs::read_to_string(format!("/proc/{worker}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim_start_matches(':').trim().to_owned()
    };
    for (name, value) in [
        ("Seccomp", "2"),
        // The zygote's and its own.
        ("Seccomp_filters", "2"),
        ("NoNewPrivs", "1"),
        ("Threads", "1"),
        ("CapEff", "0000000000000000"),
        ("CapBnd", "0000000000000000"),
    ] {
        assert_eq!(field(name), value, "{name}");
    }
    // Nobody outside is a process to it, and it may make none.
    assert!(field("NSpid").split_whitespace().count() > 1, "{status}");
    let limits = fs::read_to_string(format!("/proc/{worker}/limits")).unwrap();
    let limit = |name: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().to_owned()
    };
    assert_eq!(limit("Max processes"), "0");
    assert_eq!(limit("Max file size"), "0");
    assert!(limit("Max address space").parse::<u64>().unwrap() < 4 << 30);
    run.kill().unwrap();
    run.wait().unwrap();
}

const PROCESS_TOML: &str = "[vm]\nisolation = 'process'\n[trust]\nkeys = ['signer.pub']\n";

fn service_desk() -> Desk {
    let desk = desk();
    desk.write("forge.toml", PROCESS_TOML);
    desk.write(
        "program.wasm",
        signed(&with_text(
            "hello",
            "(drop (call $output (i32.const 0) (i32.const 5))) (i32.const 0)",
        )),
    );
    desk
}

fn a_service_runs_in_the_tier_of_its_configuration() {
    let desk = service_desk();
    let _service = desk.serve(&["--config", "forge.toml"]);
    for (program, status) in [("program.wasm", "ok"), ("forge.toml", "rejected")] {
        let arguments = ["run", "--json", "--service", "socket", program];
        let report = reported(&desk.forge(&arguments));
        assert_eq!(report["status"], status, "{report:#}");
        assert_eq!(report["isolation"], "process", "{report:#}");
    }
    let status = desk.forge(&["status", "--json", "--service", "socket"]);
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!(status["isolation"], "process", "{status:#}");
    assert!(status["pool"]["weaknesses"].as_array().unwrap().contains(&json!("no_vm")));
    // Who asks for a tier asks the service's operator.
    let arguments = ["run", "--isolation", "vm", "--service", "socket", "program.wasm"];
    assert_eq!(desk.forge(&arguments).status.code(), Some(2));
}

/// How many descriptors a process may have from now on; gives back how many it could.
fn set_descriptors(pid: i32, descriptors: u64) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let (kind, none) = (libc::RLIMIT_NOFILE, std::ptr::null());
    // SAFETY: one valid rlimit, which it writes.
    assert_eq!(unsafe { libc::prlimit(pid, kind, none, &raw mut limit) }, 0);
    let former = std::mem::replace(&mut limit.rlim_cur, descriptors);
    let none = std::ptr::null_mut();
    // SAFETY: one valid rlimit, which it reads.
    assert_eq!(unsafe { libc::prlimit(pid, kind, &raw const limit, none) }, 0);
    former
}

fn a_run_without_a_descriptor_is_told_in_its_tier_and_counted() {
    let desk = service_desk();
    let service = desk.serve(&["--config", "forge.toml", "--ready", "0", "--ready-max", "0"]);
    let mut client = service.client();
    let pid = service.child.id() as i32;
    let former = set_descriptors(pid, 3);
    let report = run(&mut client, &submit(ECHO, "[7]"));
    set_descriptors(pid, former);
    assert_eq!((&report["status"], &report["kind"]), (&json!("refused"), &json!("overloaded")));
    assert_eq!(report["isolation"], "process", "{report:#}");
    assert!(report["reason"].as_str().unwrap().contains("no descriptor left"), "{report:#}");
    let Reply::Status(status) = client.ask(Question::Status).unwrap() else { panic!("no status") };
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["runs"]["ended"], json!({ "refused": 1 }), "{status:#}");
    service.serves();
}

fn a_program_that_cannot_be_signed_is_told_in_its_tier_or_a_services_unknown_one() {
    let desk = desk();
    desk.write("none.wasm", "no module");
    for (place, isolation) in [
        (["--isolation", "vm"], "vm"),
        (["--isolation", "process"], "process"),
        (["--service", "nobody-is-there"], "unknown"),
    ] {
        let run = ["run", "--json", "--sign-with", "signer.pem"];
        let output = desk.forge(&[&run[..], &place, &["none.wasm"]].concat());
        let report = reported(&output);
        assert_eq!((&report["status"], &report["kind"]), (&json!("rejected"), &json!("invalid")));
        assert_eq!(report["isolation"], isolation, "{report:#}");
    }
}

fn a_prepared_program_runs_in_a_process_of_its_own_each_time() {
    let desk = service_desk();
    let _service = desk.serve(&["--config", "forge.toml"]);
    for _ in 0..4 {
        let arguments = ["run", "--json", "--prepare", "--service", "socket", "program.wasm"];
        let report = reported(&desk.forge(&arguments));
        assert_eq!((&report["status"], &report["output"]), (&json!("ok"), &json!("hello")));
        assert_eq!(report["vm"], "fresh", "{report:#}");
    }
}

/// A service that does not start: its exit code, and what it says.
fn refusal(desk: &Desk, command: &mut Command) -> (Option<i32>, String) {
    // Ended by its drop, if it serves.
    let mut service = Service { child: command.spawn().unwrap(), socket: desk.socket() };
    let ended = wait_for("its refusal", || service.child.try_wait().unwrap());
    let mut said = String::new();
    service.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(!desk.socket().exists());
    (ended.code(), said)
}

fn nothing_is_reset_without_a_vm() {
    let desk = service_desk();
    let (code, said) =
        refusal(&desk, &mut desk.serves(&["--config", "forge.toml", "--reuse", "reset"]));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("--reuse reset"), "{said}");
}

/// Has a command see no `/dev/kvm`; `false` if this takes root.
fn without_kvm(desk: &Desk, command: &mut Command) -> bool {
    if !Path::new("/dev/kvm").exists() {
        return true;
    }
    // SAFETY: has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: hiding /dev/kvm takes root");
        return false;
    }
    let empty = CString::new(desk.write("empty", "")).unwrap();
    let hide = move || {
        let none = std::ptr::null::<libc::c_char>();
        // SAFETY: system calls on C strings, in a child before exec.
        let hidden = unsafe {
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(
                    none,
                    c"/".as_ptr(),
                    none,
                    libc::MS_REC | libc::MS_PRIVATE,
                    none.cast(),
                ) == 0
                && libc::mount(
                    empty.as_ptr(),
                    c"/dev/kvm".as_ptr(),
                    none,
                    libc::MS_BIND,
                    none.cast(),
                ) == 0
        };
        if hidden { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: the closure makes system calls and nothing else.
    unsafe { command.pre_exec(hide) };
    true
}

fn restock(desk: &Desk) -> Vec<String> {
    let mut all = examples(desk).into_iter();
    all.find(|arguments| arguments.last().unwrap().ends_with("restock.wasm")).unwrap()
}

fn without_kvm_a_vm_is_refused_and_a_process_runs_the_readmes_example() {
    let desk = desk();
    let example = restock(&desk);
    let mut command = run_example(&desk, "vm", &example);
    if !without_kvm(&desk, &mut command) {
        return;
    }
    let output = command.output().unwrap();
    let report = reported(&output);
    assert_eq!(output.status.code(), Some(5), "{report:#}");
    assert_eq!((&report["status"], &report["isolation"]), (&json!("unavailable"), &json!("vm")));
    assert_eq!(report["vm"], "none");
    let reason = report["reason"].as_str().unwrap();
    for said in ["/dev/kvm", "--isolation process", "weaker"] {
        assert!(reason.contains(said), "{said}: {reason}");
    }
    let mut command = run_example(&desk, "process", &example);
    without_kvm(&desk, &mut command);
    let output = command.output().unwrap();
    let report = reported(&output);
    assert_eq!(output.status.code(), Some(0), "{report:#}");
    assert_eq!((&report["status"], &report["isolation"]), (&json!("ok"), &json!("process")));
    assert!(report["tool_calls"].as_array().unwrap().len() > 1, "{report:#}");
    assert!(!report["output"].as_str().unwrap().is_empty(), "{report:#}");
}

fn without_kvm_a_service_does_not_start_and_says_why() {
    let desk = desk();
    let mut command = desk.serves(&[]);
    if !without_kvm(&desk, &mut command) {
        return;
    }
    let (code, said) = refusal(&desk, &mut command);
    assert_eq!(code, Some(5), "{said}");
    for word in ["/dev/kvm", "--isolation process", "weaker"] {
        assert!(said.contains(word), "{word}: {said}");
    }
}

fn auto_takes_the_vm_where_there_is_one() {
    let desk = desk();
    let program = desk.write("program.wat", bare("", "(i32.const 0)"));
    let output = run_command(&desk, "auto", &[&program]).output().unwrap();
    assert_eq!(reported(&output)["isolation"], "vm");
    assert!(text(&output.stderr).contains("isolation auto: programs run in VMs"));
}

fn without_kvm_auto_says_what_it_took_instead() {
    let desk = desk();
    let program = desk.write("program.wat", bare("", "(i32.const 0)"));
    let mut command = run_command(&desk, "auto", &[&program]);
    if !without_kvm(&desk, &mut command) {
        return;
    }
    let output = command.output().unwrap();
    let said = text(&output.stderr);
    assert!(said.contains("jailed processes") && said.contains("/dev/kvm"), "{said}");
    let report = reported(&output);
    assert_eq!((&report["status"], &report["isolation"]), (&json!("ok"), &json!("process")));
}

fn without_kvm_probe_says_what_works() {
    let desk = desk();
    let mut command = desk.command(&["probe", "--json"]);
    if !without_kvm(&desk, &mut command) {
        return;
    }
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(5), "{}", text(&output.stderr));
    let probe: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&probe["vm"]["booted"], &probe["process"]["stood"]), (&json!(false), &json!(true)));
    assert_eq!(probe["jail"]["on"]["vm"], false, "{probe:#}");
    let weak: Vec<_> = probe["jail"]["weaknesses"].as_array().unwrap().iter().collect();
    assert!(weak.iter().any(|it| it["word"] == "no_vm"), "{probe:#}");
}
