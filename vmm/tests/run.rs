//! The command line, the whole way: the real `forge-vmm`, a worker process,
//! a VM, the real toolbroker and a real tool server.

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

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use desk::{CREDENTIAL, Desk, text};
use executables::FORGE;
use processes::{child_named, contains, memory_of, wait_for, worker_of};
use serde_json::{Value, json};
use serving::Service;
use support::{HELLO, calls, forge_module, signer};

fn main() -> ExitCode {
    support::main(
        claims![
            a_program_runs_and_prints_its_output_and_nothing_else,
            the_json_report_is_complete,
            a_program_calls_a_real_tool,
            a_call_and_its_answer_take_one_exit,
            an_endless_loop_exits_4_by_fuel,
            an_endless_loop_with_huge_fuel_exits_4_by_the_deadline,
            a_tool_that_never_answers_exits_4_on_time,
            growing_past_the_limit_fails_in_the_program,
            deep_recursion_is_a_trap,
            a_crashed_guest_exits_70_with_its_crash_record,
            a_killed_worker_exits_70_and_loses_one_run,
            three_calls_in_flight_meet_and_their_settlement_is_reported,
            the_credential_is_in_no_memory_of_worker_or_guest,
            a_credential_that_a_server_tells_in_other_words_is_removed_and_reported,
            an_environment_credential_is_not_in_the_workers_environment,
            no_worker_has_memory_that_another_can_write,
            a_grant_opens_what_it_names_and_nothing_else,
            artifacts_are_written_and_never_over_anything,
            what_a_person_would_miss_of_a_run_is_said,
            every_run_has_a_line_in_the_log_at_info,
            a_file_that_cannot_be_made_is_told_before_anything_runs,
            a_file_that_cannot_be_written_takes_no_result_away,
            a_result_that_cannot_be_written_takes_no_exit_code_away,
            a_reader_that_leaves_changes_no_exit_code,
            input_comes_from_a_file_or_standard_input,
            no_process_is_left_behind,
            a_run_that_is_interrupted_is_cancelled_and_reports_what_it_called,
            what_is_invalid_is_told_by_the_bytes_that_its_author_has,
            a_group_in_the_configuration_holds_what_a_run_starts,
            probe_proves_that_a_guest_boots,
        ],
        &[],
    )
}

const ENDLESS: &str = r#"(module (memory (export "memory") 1)
    (func (export "forge_run") (result i32) (loop (br 0)) (unreachable)))"#;

const TOOLS: [&str; 2] = ["--mcp-config", "mcp.json"];

fn with_tools<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&TOOLS[..], more].concat()
}

// Running

fn a_program_runs_and_prints_its_output_and_nothing_else() {
    let desk = Desk::new();
    desk.write("hello.wat", HELLO);
    let signed = desk.forge(&["sign", "--key", "signer.pem", "hello.wat", "-o", "hello.wasm"]);
    assert!(signed.status.success(), "{}", text(&signed.stderr));
    let output = desk.forge(&["run", "--trust", "signer.pub", "hello.wasm"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "hello");
    assert_eq!(text(&output.stderr), "");
}

fn the_json_report_is_complete() {
    let (code, report) = Desk::new().run_text(HELLO, &[]);
    assert_eq!(code, 0);
    let fields = [
        "run_id",
        "status",
        "reason",
        "output",
        "output_encoding",
        "artifacts",
        "log",
        "log_dropped",
        "isolation",
        "weaknesses",
        "vm",
        "program_sha256",
        "signer",
        "tool_calls",
        "fuel_used",
        "memory_peak_bytes",
        "vm_exits",
        "timing_us",
    ];
    for field in fields {
        assert!(!report[field].is_null(), "{field} is missing from {report:#}");
    }
    for part in ["admission", "vm", "boot", "load", "run", "total"] {
        assert!(report["timing_us"][part].is_u64(), "timing_us.{part}");
    }
    assert_eq!(report["status"], "ok");
    assert_eq!(report["isolation"], "vm");
    // No limits by cgroup are configured here.
    assert!(report["weaknesses"].as_array().unwrap().contains(&json!("memory_not_grouped")));
    assert_eq!(report["vm"], "fresh");
    assert_eq!(report["output"], "hello");
    assert_eq!(report["signer"], signer().trust_key().to_string());
}

fn a_program_calls_a_real_tool() {
    let desk = Desk::with_tools();
    let wat = calls("test.echo", r#"{"text":"round trip"}"#);
    let (code, report) = desk.run_text(&wat, &with_tools(&["--allow", "test.echo"]));
    assert_eq!(code, 0, "{report:#}");
    let answer: Value = serde_json::from_str(report["output"].as_str().unwrap()).unwrap();
    assert_eq!(answer, json!({ "text": "round trip" }));
    assert_eq!(report["tool_calls"][0]["tool"], "test.echo");
    assert_eq!(report["tool_calls"][0]["status"], "ok");
}

fn a_call_and_its_answer_take_one_exit() {
    let desk = Desk::with_tools();
    let wat = calls("test.echo", r#"{"text":"x"}"#);
    let (_, report) = desk.run_text(&wat, &with_tools(&["--allow", "test.echo"]));
    assert_eq!(report["vm_exits"], 2, "one for the call, one for the end: {report:#}");
}

fn an_endless_loop_exits_4_by_fuel() {
    let (code, report) = Desk::new().run_text(ENDLESS, &["--fuel", "1000000"]);
    assert_eq!((code, &report["kind"]), (4, &json!("fuel")), "{report:#}");
    assert_eq!(report["status"], "limit");
}

fn an_endless_loop_with_huge_fuel_exits_4_by_the_deadline() {
    let started = Instant::now();
    let (code, report) =
        Desk::new().run_text(ENDLESS, &["--fuel", "18446744073709551615", "--timeout", "1s"]);
    assert_eq!((code, &report["kind"]), (4, &json!("deadline")), "{report:#}");
    assert!(started.elapsed() < Duration::from_secs(20));
}

fn a_tool_that_never_answers_exits_4_on_time() {
    let desk = Desk::with_tools();
    let arguments = with_tools(&["--allow", "test.never", "--timeout", "1s"]);
    let (code, report) = desk.run_text(&calls("test.never", "{}"), &arguments);
    let ended_by = report["timing_us"]["total"].as_u64().unwrap();
    // Either the deadline ends the run, or the broker's answer just before it
    // says that the call's outcome is unknown.
    assert_eq!((code, &report["kind"]), (4, &json!("deadline")), "{report:#}");
    assert!(ended_by < 10_000_000, "{ended_by} us");
}

fn growing_past_the_limit_fails_in_the_program() {
    let wat = r#"(module (memory (export "memory") 1)
        (func (export "forge_run") (result i32)
            (if (i32.eq (memory.grow (i32.const 60000)) (i32.const -1))
                (then (return (i32.const 0))))
            (i32.const 1)))"#;
    let (code, report) = Desk::new().run_text(wat, &[]);
    assert_eq!(code, 0, "{report:#}");
    assert_eq!(report["memory_peak_bytes"], 65_536);
}

fn a_group_in_the_configuration_holds_what_a_run_starts() {
    let desk = Desk::new();
    let module = r#"(module (memory (export "memory") 1)
        (func (export "forge_run") (result i32) (i32.const 0)))"#;
    desk.write("forge.toml", "");
    let (code, report) = desk.run_text(module, &["--config", "forge.toml"]);
    assert_eq!(code, 0, "{report:#}");
    // Room for the zygote and no worker; a host that cannot keep a group to it
    // makes none either.
    desk.write("forge.toml", "[vm.group]\nprocesses = 1\n");
    let (code, report) = desk.run_text(module, &["--config", "forge.toml"]);
    assert_eq!((code, &report["status"]), (5, &json!("unavailable")), "{report:#}");
}

fn deep_recursion_is_a_trap() {
    let wat = r#"(module (memory (export "memory") 1)
        (func $f (param i32) (result i32)
            (i32.add (i32.const 1) (call $f (local.get 0))))
        (func (export "forge_run") (result i32) (call $f (i32.const 0))))"#;
    let (code, report) = Desk::new().run_text(wat, &[]);
    assert_eq!((code, &report["kind"]), (1, &json!("stack_overflow")), "{report:#}");
}

/// This executable with another guest inside: one that faults at its entry.
fn with_a_broken_guest(desk: &Desk) -> PathBuf {
    let mut executable = fs::read(FORGE).unwrap();
    let elf = forge_rootfs::GUEST_ELF;
    let at = executable
        .windows(4096)
        .position(|window| window == &elf[..4096])
        .expect("the guest is in the executable");
    let long = |at: usize| u64::from_le_bytes(elf[at..at + 8].try_into().unwrap());
    let (entry, text_header) = (long(24), long(32) as usize);
    let in_file = (long(text_header + 8) + entry - long(text_header + 16)) as usize;
    executable[at + in_file..at + in_file + 2].copy_from_slice(&[0x0f, 0x0b]); // ud2
    let path = desk.path("forge-vmm-broken");
    fs::write(&path, executable).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn a_crashed_guest_exits_70_with_its_crash_record() {
    let desk = Desk::new();
    let broken = with_a_broken_guest(&desk);
    desk.write("hello.wat", HELLO);
    let output = Command::new(broken)
        .args(["run", "--json", "--sign-with", "signer.pem", "hello.wat"])
        .current_dir(desk.folder())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(70), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["kind"], "guest_crash");
    let reason = report["reason"].as_str().unwrap();
    for part in ["invalid opcode", "vector 6", "error code", "rip 0x2", "cr2"] {
        assert!(reason.contains(part), "{part} is not in {reason:?}");
    }
}

/// The test server of a broker.
fn server_of(broker: u32) -> Option<u32> {
    // Its launcher, and process 1 of the server's namespaces.
    let launcher = child_named(broker, "/proc/self/exe")?;
    let first = child_named(launcher, "/proc/self/exe")?;
    child_named(first, executables::folder().join("forge-test-server").to_str()?)
}

fn a_killed_worker_exits_70_and_loses_one_run() {
    let desk = Desk::new();
    desk.write("endless.wat", ENDLESS);
    let run = desk
        .command(&["run", "--json", "--sign-with", "signer.pem", "--fuel", "18446744073709551615"])
        .args(["--timeout", "30s", "endless.wat"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // Before it has begun it would be replaced, and nothing lost.
    let worker = wait_for("a worker that runs the program", || {
        let worker = worker_of(run.id())?;
        let stat = fs::read_to_string(format!("/proc/{worker}/stat")).ok()?;
        let fields = stat.rsplit_once(") ")?.1;
        let ticks: u64 = fields.split(' ').nth(11)?.parse().ok()?;
        (ticks > 10).then_some(worker)
    });
    // SAFETY: sends a signal to a process that this test started.
    unsafe { libc::kill(worker as i32, libc::SIGKILL) };
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(70));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["kind"], "worker_lost");
}

fn three_calls_in_flight_meet_and_their_settlement_is_reported() {
    // Each call settles only once all three have arrived.
    let wat = forge_module(
        r#"(memory (export "memory") 1)
           (data (i32.const 0) "test.barrier{\"n\":3}")"#,
        r#"(local $i i32) (local $mask i32) (local $settled i32)
           (loop $start
               (if (i32.ne (local.get $i)
                       (call $call_async (i32.const 0) (i32.const 12) (i32.const 12) (i32.const 7)))
                   (then (return (i32.const 1))))
               (br_if $start (i32.lt_u
                   (local.tee $i (i32.add (local.get $i) (i32.const 1))) (i32.const 3))))
           (loop $collect
               (local.set $settled (call $wait_any))
               (if (i32.lt_s (call $wait (local.get $settled)) (i32.const 0))
                   (then (return (i32.const 2))))
               (local.set $mask (i32.or (local.get $mask)
                   (i32.shl (i32.const 1) (local.get $settled))))
               (br_if $collect (local.tee $i (i32.sub (local.get $i) (i32.const 1)))))
           (i32.sub (local.get $mask) (i32.const 7))"#,
    );
    let desk = Desk::with_tools();
    let (code, report) = desk.run_text(&wat, &with_tools(&["--allow", "test.barrier"]));
    assert_eq!(code, 0, "{report:#}");
    let calls = report["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 3);
    assert!(calls.iter().all(|call| call["status"] == "ok"), "{report:#}");
    let mut ids: Vec<u64> = calls.iter().map(|call| call["id"].as_u64().unwrap()).collect();
    ids.sort_unstable();
    assert_eq!(ids, [0, 1, 2], "the list is in the order of settling, each with its number");
}

fn the_credential_is_in_no_memory_of_worker_or_guest() {
    // The first tool uses the credential and even answers with it; then the
    // program stays, with the answer in its memory, while it is looked at.
    let wat = forge_module(
        r#"(memory (export "memory") 1)
           (data (i32.const 0) "test.echo_env{}test.never")
           (data (i32.const 64) "marker-in-the-guest-5b1f")"#,
        r#"(local $n i32)
           (local.set $n (call $call (i32.const 0) (i32.const 13) (i32.const 13) (i32.const 2)))
           (if (i32.lt_s (local.get $n) (i32.const 0)) (then (return (local.get $n))))
           (drop (call $resp_read (i32.const 4096) (i32.const 0) (i32.const 60000)))
           (call $call (i32.const 15) (i32.const 10) (i32.const 13) (i32.const 2))"#,
    );
    let desk = Desk::with_tools();
    desk.write("program.wat", &wat);
    let mut run = desk
        .command(&["run", "--sign-with", "signer.pem", "--mcp-config", "mcp.json"])
        .args(["--allow", "test.echo_env", "--allow", "test.never", "--timeout", "30s"])
        .arg("program.wat")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let worker = wait_for("a worker", || worker_of(run.id()));
    let server = wait_for("the tool server", || {
        server_of(child_named(run.id(), executables::folder().join("forge-toolbroker").to_str()?)?)
    });
    // The tool's answer has arrived when its other words are there. What was
    // mapped while that was looked for is in the next dump.
    wait_for("the tool's answer in the guest", || {
        contains(&memory_of(worker), "\"TEST_TOKEN\"").then_some(())
    });
    let memory = memory_of(worker);
    assert!(contains(&memory, "\"TEST_TOKEN\""), "the tool's answer is in the dump");
    assert!(contains(&memory, "marker-in-the-guest-5b1f"), "the guest's memory is in the dump");
    assert!(!contains(&memory, CREDENTIAL), "the credential is in the worker's memory");
    // The same search finds it where it is known to be.
    assert!(contains(&memory_of(server), CREDENTIAL), "the search itself works");
    run.kill().unwrap();
    run.wait().unwrap();
}

fn a_credential_that_a_server_tells_in_other_words_is_removed_and_reported() {
    let desk = Desk::new();
    let server = json!({
        "command": executables::folder().join("forge-test-server"),
        "args": ["--hostile"],
        "env": { "TEST_TOKEN": "${TEST_TOKEN}" },
    });
    desk.write("mcp.json", json!({ "mcpServers": { "test": server } }).to_string());
    let hex: String = CREDENTIAL.bytes().map(|byte| format!("{byte:02x}")).collect();
    for (how, removed) in [
        ("base64", true),
        ("hex", true),
        ("split", true),
        ("base64 split", true),
        ("plainly", false),
    ] {
        let request = json!({ "how": how }).to_string();
        let wat = calls("test.spell", &request);
        let (code, report) = desk.run_text(&wat, &with_tools(&["--allow", "test.spell"]));
        assert_eq!(code, 0, "{report}");
        let call = &report["tool_calls"][0];
        assert_eq!(call["credential_removed"], removed, "{how}: {report}");
        assert_eq!(call["origin"], "test/spell");
        assert_eq!(call["trust"], "untrusted");
        let output = report["output"].as_str().unwrap();
        assert_eq!(output.contains("[credential removed]"), removed, "{how}: {output}");
        assert!(!output.contains(CREDENTIAL) && !output.contains(&hex), "{how}: {output}");
    }
}

fn an_environment_credential_is_not_in_the_workers_environment() {
    let desk = Desk::new();
    desk.write("endless.wat", ENDLESS);
    let mut run = desk
        .command(&["run", "--sign-with", "signer.pem", "--fuel", "18446744073709551615"])
        .args(["--timeout", "30s", "endless.wat"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let worker = wait_for("a worker", || worker_of(run.id()));
    let environment = fs::read(format!("/proc/{worker}/environ")).unwrap();
    assert_eq!(text(&environment), "");
    wait_until_jailed(worker);
    run.kill().unwrap();
    run.wait().unwrap();
}

fn no_worker_has_memory_that_another_can_write() {
    let desk = Desk::new();
    desk.write("endless.wat", ENDLESS);
    let mut run = desk
        .command(&["run", "--sign-with", "signer.pem", "--fuel", "18446744073709551615"])
        .args(["--timeout", "30s", "endless.wat"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let worker = wait_for("a worker", || worker_of(run.id()));
    wait_until_jailed(worker);
    let maps = fs::read_to_string(format!("/proc/{worker}/maps")).unwrap();
    let shared: Vec<&str> = maps.lines().filter(|line| line.contains(" rw-s ")).collect();
    // Of its own vCPU, which no other process has.
    assert!(shared.len() == 1 && shared[0].contains("kvm-vcpu"), "{shared:#?}");
    run.kill().unwrap();
    run.wait().unwrap();
}

/// It has closed what the zygote had once it is in its jail.
fn wait_until_jailed(worker: u32) {
    let known = ["socket:", "/dev/null", "anon_inode:kvm-"];
    wait_for("a worker that has its own descriptors alone", || {
        let links: Vec<String> = fs::read_dir(format!("/proc/{worker}/fd"))
            .unwrap()
            .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
            .map(|link| link.display().to_string())
            .collect();
        let has_vm = links.iter().any(|link| link.contains("kvm-vcpu"));
        let all_known = links.iter().all(|link| known.iter().any(|start| link.starts_with(start)));
        (has_vm && all_known).then_some(())
    });
}

fn a_grant_opens_what_it_names_and_nothing_else() {
    let desk = Desk::with_tools();
    let issue = desk.forge(&[
        "grant",
        "issue",
        "--mcp-config",
        "mcp.json",
        "--state",
        "state",
        "--allow",
        "test.echo",
        "--valid",
        "10m",
        "-o",
        "echo.grant",
    ]);
    assert!(issue.status.success(), "{}", text(&issue.stderr));
    let inspect = desk.forge(&["grant", "inspect", "--state", "state", "--json", "echo.grant"]);
    let claims: Value = serde_json::from_slice(&inspect.stdout).unwrap();
    assert_eq!(claims["principal"], "local");
    assert_eq!(claims["tools"][0]["name"], "test.echo");

    let granted = with_tools(&["--state", "state", "--grant", "echo.grant"]);
    let (code, report) = desk.run_text(&calls("test.echo", r#"{"text":"x"}"#), &granted);
    assert_eq!(code, 0, "{report:#}");
    let (code, report) = desk.run_text(&calls("test.slow", r#"{"ms":1}"#), &granted);
    assert_eq!(code, 3, "{report:#}");
    assert!(report["reason"].as_str().unwrap().contains("test.slow"));
    let other = [&granted[..], &["--principal", "somebody"]].concat();
    let (code, report) = desk.run_text(&calls("test.echo", r#"{"text":"x"}"#), &other);
    assert_eq!((code, &report["kind"]), (3, &json!("grant")), "{report:#}");
    assert_eq!(report["vm"], "none");
}

fn artifacts_are_written_and_never_over_anything() {
    let wat = forge_module(
        r#"(memory (export "memory") 1) (data (i32.const 0) "../a.csvtext/csv1,2")"#,
        "(call $artifact (i32.const 0) (i32.const 8) (i32.const 8) (i32.const 8)
            (i32.const 16) (i32.const 3))",
    );
    let desk = Desk::new();
    for expected in ["out/_a.csv", "out/2-_a.csv"] {
        let (code, report) = desk.run_text(&wat, &["--artifacts", "out"]);
        assert_eq!(code, 0, "{report:#}");
        assert_eq!(report["artifacts"][0]["name"], "../a.csv");
        assert_eq!(report["artifacts"][0]["bytes"], 3);
        assert_eq!(report["artifacts"][0]["path"], expected);
        assert_eq!(fs::read(desk.path(expected)).unwrap(), b"1,2");
    }
}

fn what_a_person_would_miss_of_a_run_is_said() {
    let desk = Desk::with_tools();
    let said = |wat: &str, arguments: &[&str]| {
        desk.write("program.wat", wat);
        let run = ["run", "--sign-with", "signer.pem", "--timeout", "30s"];
        let output = desk.forge(&[&run[..], arguments, &["program.wat"]].concat());
        (output.status.code(), text(&output.stderr))
    };
    let in_vain = calls("test.echo", r#"{"other":1}"#);
    let (code, stderr) = said(&in_vain, &with_tools(&["--allow", "test.echo"]));
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("call of test.echo: bad_request\n"), "{stderr}");
    let leaves = forge_module(
        r#"(memory (export "memory") 1) (data (i32.const 0) "a")"#,
        "(call $artifact (i32.const 0) (i32.const 1) (i32.const 0) (i32.const 1)
            (i32.const 0) (i32.const 1))",
    );
    let (code, stderr) = said(&leaves, &[]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("artifacts not kept: 1; --artifacts DIR"), "{stderr}");
    let (code, stderr) = said(&leaves, &["--artifacts", "out"]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
}

fn every_run_has_a_line_in_the_log_at_info() {
    executables::folder();
    let desk = Desk::new();
    desk.write("hello.wat", HELLO);
    desk.write("other.wasm", wat::parse_str(HELLO).unwrap());
    let sign = ["sign", "--key", "signer.pem", "hello.wat", "-o", "hello.wasm"];
    assert!(desk.forge(&sign).status.success());
    // A run's line, in the log of whoever carries it out.
    let check = |log: &str, runs: &[&str]| {
        let lines: Vec<&str> = log.lines().filter(|line| line.contains("run ended")).collect();
        assert_eq!(lines.len(), runs.len(), "{log}");
        for (line, status) in lines.iter().zip(runs) {
            let status = format!("status=\"{status}\"");
            assert!(line.contains(&status) && line.contains("principal=\"local\""), "{line}");
        }
    };
    for (program, status) in [("hello.wasm", "ok"), ("other.wasm", "rejected")] {
        let mut command = desk.command(&["run", "--trust", "signer.pub", program]);
        command.env("FORGE_LOG", "info");
        check(&text(&command.output().unwrap().stderr), &[status]);
    }
    let log = desk.path("log");
    let service = desk
        .serves(&["--ready", "0"])
        .env("FORGE_LOG", "info")
        .stderr(fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let mut service = Service::listening(service, desk.socket());
    for program in ["hello.wasm", "other.wasm"] {
        desk.forge(&["run", "--service", "socket", program]);
    }
    assert!(desk.forge(&["drain", "--service", "socket"]).status.success());
    service.child.wait().unwrap();
    check(&fs::read_to_string(&log).unwrap(), &["ok", "rejected"]);
}

fn a_file_that_cannot_be_made_is_told_before_anything_runs() {
    let desk = Desk::new();
    let (log, server) = (desk.path("calls"), executables::folder().join("forge-test-server"));
    // A server may write what its command line names, if it is there.
    fs::write(&log, "").unwrap();
    fs::set_permissions(&log, fs::Permissions::from_mode(0o666)).unwrap();
    let servers = json!({"mcpServers": {"test": {"command": server, "args": ["--log", log]}}});
    desk.write("mcp.json", servers.to_string());
    desk.write("program.wat", calls("test.echo", r#"{"text":"x"}"#));
    let run = |more: &[&str]| {
        let all = ["run", "--sign-with", "signer.pem", "--timeout", "30s", "--allow", "test.echo"];
        desk.forge(&[&all[..], &TOOLS, more, &["program.wat"]].concat())
    };
    for more in [["--trace", "nowhere/trace.json"], ["--artifacts", "mcp.json/out"]] {
        let output = run(&more);
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains(more[1]), "{}", text(&output.stderr));
        assert_eq!(fs::read_to_string(&log).unwrap(), "", "{more:?}: it ran");
    }
    // It would have called.
    assert_eq!(run(&["--trace", "trace.json"]).status.code(), Some(0));
    assert_ne!(fs::read_to_string(&log).unwrap(), "");
    // And the call is in the trace, within the run.
    let trace: Value = serde_json::from_slice(&fs::read(desk.path("trace.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let span = |name: &str| {
        let it = events.iter().find(|event| event["name"] == name).unwrap();
        let from = it["ts"].as_f64().unwrap();
        (from, from + it["dur"].as_f64().unwrap())
    };
    let (run, call) = (span("KVM_RUN"), span("test.echo"));
    assert!(run.0 < call.0 && call.1 < run.1, "{run:?} {call:?}");
}

fn a_file_that_cannot_be_written_takes_no_result_away() {
    let artifact = forge_module(
        r#"(memory (export "memory") 1) (data (i32.const 0) "a.csvtext/csv1,2")"#,
        "(call $artifact (i32.const 0) (i32.const 5) (i32.const 5) (i32.const 8)
            (i32.const 13) (i32.const 3))",
    );
    let desk = Desk::new();
    for (wat, status, code, more) in [
        (HELLO, "ok", 1, &["--trace", "/dev/full"][..]),
        // Not even root makes a file there.
        (&artifact, "ok", 1, &["--artifacts", "/proc/self"]),
        (ENDLESS, "limit", 4, &["--trace", "/dev/full", "--fuel", "1000"]),
    ] {
        let (exit, report) = desk.run_text(wat, more);
        assert_eq!((exit, &report["status"]), (code, &json!(status)), "{more:?}: {report:#}");
    }
}

fn a_result_that_cannot_be_written_takes_no_exit_code_away() {
    let desk = Desk::new();
    let _service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    desk.write("hello.wat", HELLO);
    desk.write("endless.wat", ENDLESS);
    desk.write("calls.wat", calls("test.never", "{}"));
    let run = ["run", "--sign-with", "signer.pem", "--timeout", "30s"];
    for (program, code) in
        [(&["hello.wat"][..], 1), (&["endless.wat", "--fuel", "1000"], 4), (&["calls.wat"], 3)]
    {
        for how in [&[][..], &["--json"], &["--service=socket"], &["--service=socket", "--json"]] {
            let all = [&run[..], how, program].concat();
            let full = fs::File::options().write(true).open("/dev/full").unwrap();
            let output = desk.command(&all).stdout(full).output().unwrap();
            let stderr = text(&output.stderr);
            assert_eq!(output.status.code(), Some(code), "{all:?}: {stderr}");
            // Without a report, those that end badly have nothing to write there.
            let is_written = code == 1 || how.contains(&"--json");
            assert_eq!(stderr.contains("standard output: "), is_written, "{all:?}: {stderr}");
        }
    }
}

fn a_reader_that_leaves_changes_no_exit_code() {
    let desk = Desk::new();

    desk.write("hello.wat", HELLO);
    desk.write("trap.wat", HELLO.replace("(i32.const 0)))", "(unreachable)))"));
    let run = ["run", "--sign-with", "signer.pem", "--timeout", "30s"];
    let cases: [(&[&str], i32, &str); 6] = [
        (&[&run[..], &["hello.wat"]].concat(), 0, ""),
        (&[&run[..], &["trap.wat"]].concat(), 1, "trap: "),
        (&[&run[..], &["--json", "trap.wat"]].concat(), 1, ""),
        (&["check", "hello.wat"], 3, ""),
        (&["check", "--json", "hello.wat"], 3, ""),
        (&["inspect", "hello.wat"], 0, ""),
    ];
    for (arguments, code, said) in cases {
        let (_, left) = std::io::pipe().unwrap();
        let output = desk.command(arguments).stdout(left).output().unwrap();
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
        assert!(stderr.contains(said), "{arguments:?}: {stderr}");
    }
}

fn input_comes_from_a_file_or_standard_input() {
    use std::io::Write as _;
    let desk = Desk::new();
    let echo = forge_module(
        r#"(memory (export "memory") 1)"#,
        "(drop (call $output (i32.const 0)
            (call $input_read (i32.const 0) (i32.const 0) (call $input_len)))) (i32.const 0)",
    );
    desk.write("input.json", r#"{"from":"file"}"#);
    let (_, report) = desk.run_text(&echo, &["--input", "@input.json"]);
    assert_eq!(report["output"], r#"{"from":"file"}"#);
    let mut run = desk
        .command(&["run", "--sign-with", "signer.pem", "--timeout", "30s", "--input", "-"])
        .arg("program.wat")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    run.stdin.take().unwrap().write_all(b"[1, 2]").unwrap();
    assert_eq!(text(&run.wait_with_output().unwrap().stdout), "[1, 2]");
}

fn no_process_is_left_behind() {
    let desk = Desk::with_tools();
    desk.write("program.wat", calls("test.never", "{}"));
    let mut run = desk
        .command(&["run", "--sign-with", "signer.pem", "--mcp-config", "mcp.json"])
        .args(["--allow", "test.never", "--timeout", "30s", "program.wat"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let worker = wait_for("a worker", || worker_of(run.id()));
    let broker = wait_for("a broker", || {
        child_named(run.id(), executables::folder().join("forge-toolbroker").to_str()?)
    });
    let server = wait_for("a server", || server_of(broker));
    run.kill().unwrap();
    run.wait().unwrap();
    for (name, process) in [("worker", worker), ("broker", broker), ("server", server)] {
        wait_for(&format!("the end of the {name}"), || {
            let status = fs::read_to_string(format!("/proc/{process}/stat")).ok();
            // Gone, or dead and waiting for whoever inherited it.
            let over = status.is_none_or(|stat| stat.contains(") Z "));
            over.then_some(())
        });
    }
}

fn what_is_invalid_is_told_by_the_bytes_that_its_author_has() {
    let desk = Desk::new();
    // A guest spells this otherwise, which is longer.
    let spelled = "(drop (select (i32.const 5) (i32.const 0) (i32.eqz (local.get 0))))".repeat(200);
    for before in ["", &spelled] {
        let module = wat::parse_str(format!(
            "(module (memory (export \"memory\") 1) (func (param i32) {before})
                (func (export \"forge_run\") (result i32)
                    (i32.add (i64.const 1) (i32.const 2))))"
        ));
        let module = module.unwrap();
        // The operator before the last `end`.
        let at = format!("(at offset {:#x})", module.len() - 2);
        desk.write("invalid.wasm", &module);
        let checked = desk.forge(&["check", "--trust", "signer.pub", "invalid.wasm"]);
        let ran = desk.forge(&["run", "--sign-with", "signer.pem", "invalid.wasm"]);
        for told in [text(&checked.stdout), text(&ran.stderr)] {
            assert!(told.contains(&at), "{at}: {told}");
        }
    }
}

fn a_run_that_is_interrupted_is_cancelled_and_reports_what_it_called() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let (desk, output) = (0..5).find_map(|_| interrupted(signal)).expect("signals in time");
        assert_eq!(output.status.code(), Some(7));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(
            (&report["status"], &report["kind"]),
            (&json!("cancelled"), &json!("cancelled"))
        );
        let calls = report["tool_calls"].as_array().unwrap();
        assert_eq!((calls.len(), &calls[0]["tool"]), (1, &json!("test.never")), "{report:#}");
        let journal = desk.forge(&["journal", "list"]);
        assert!(text(&journal.stdout).contains("unknown"), "{}", text(&journal.stdout));
    }
}

/// What a run leaves that is interrupted in its call, more than once: as `timeout`
/// tells the command and then its group, and until after the run is over. `None` if
/// this process was kept waiting for so long that its last was another word.
fn interrupted(signal: libc::c_int) -> Option<(Desk, Output)> {
    let desk = Desk::with_tools();
    desk.write("program.wat", calls("test.never", "{}"));
    let mut command = desk.command(&[]);
    // Whoever runs this in the background may have it ignored, and so would we.
    // SAFETY: signal is async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            libc::signal(signal, libc::SIG_DFL);
            Ok(())
        })
    };
    let run = command
        .args(["run", "--json", "--sign-with", "signer.pem", "--mcp-config", "mcp.json"])
        .args(["--allow", "test.never", "--timeout", "30s", "program.wat"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for("the call", || {
        let journal = desk.forge(&["journal", "list"]);
        text(&journal.stdout).contains("test.never").then_some(())
    });
    let first = Instant::now();
    while first.elapsed() < Duration::from_millis(100) {
        // SAFETY: sends a signal to a process that this test started, and has not
        // waited for.
        unsafe { libc::kill(run.id() as i32, signal) };
        std::thread::sleep(Duration::from_micros(500));
    }
    let in_time = first.elapsed() < Duration::from_millis(190);
    let output = run.wait_with_output().unwrap();
    in_time.then_some((desk, output))
}

fn probe_proves_that_a_guest_boots() {
    let output = Desk::new().forge(&["probe", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let probe: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(probe["vm"]["booted"], true);
    for name in ["kvm", "cpu", "huge_pages", "cgroup_v2", "seccomp", "landlock", "vhost_vsock"] {
        let found = probe["findings"].as_array().unwrap().iter().any(|f| f["name"] == name);
        assert!(found, "{name}");
    }
    assert_eq!(probe["jail"]["on"]["seccomp"], true, "{probe:#}");
    assert_eq!(probe["jail"]["on"]["empty_root"], true);
    let weak: Vec<_> = probe["jail"]["weaknesses"].as_array().unwrap().iter().collect();
    assert!(weak.iter().any(|it| it["word"] == "memory_not_grouped"), "{probe:#}");
}
