//! The command line, the whole way: the real `forge-vmm`, a worker process,
//! a VM, the real toolbroker and a real tool server.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/executables.rs"]
mod executables;
#[path = "support/processes.rs"]
mod processes;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use executables::FORGE;
use forge_protocol::limits::RunLimits;
use processes::{child_named, contains, memory_of, wait_for, worker_of};
use serde_json::{Value, json};
use support::{forge_module, signer};

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
            a_group_in_the_configuration_holds_what_a_run_starts,
            probe_proves_that_a_guest_boots,
        ],
        claims![
            an_import_that_is_not_granted_exits_3_and_is_named,
            unsigned_flipped_and_wrongly_keyed_programs_exit_3,
            keygen_sign_and_inspect_fit_together,
            check_names_every_violation,
            what_check_says_run_says_too,
            log_records_that_were_dropped_are_counted,
            what_has_no_end_or_is_no_text_is_refused,
            a_tool_server_that_is_installed_below_the_home_is_started,
            usage_errors_exit_2_and_say_what_to_do,
            an_empty_intent_is_a_usage_error_that_says_what_to_give,
            a_limit_over_its_bound_is_told_by_its_option,
            a_state_folder_that_cannot_be_made_exits_2_before_anything_is_called,
            arguments_that_are_nested_too_deeply_are_refused_before_they_are_sent,
            an_empty_variable_names_no_state_folder,
            text_is_told_how_to_become_a_signed_module,
            an_mcp_config_that_is_not_there_is_an_error_with_and_without_tools,
            a_journal_that_is_not_there_is_said,
            a_door_is_loaded_again_with_all_or_not_at_all,
            what_a_service_refuses_is_no_wrong_usage,
            a_private_key_that_others_can_read_is_refused,
            wasmsign2_signs_for_us_and_verifies_ours,
        ],
    )
}

// What every test needs

const CREDENTIAL: &str = "tok-7f3a9c51e2b84d06-canary";

/// A folder with a key pair and an `mcp.json`, gone after the test.
struct Desk(PathBuf);

impl Desk {
    fn new() -> Self {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let folder =
            std::env::temp_dir().join(format!("forge-run-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let desk = Self(folder);
        desk.write("signer.pem", signer().to_pem());
        fs::set_permissions(desk.path("signer.pem"), fs::Permissions::from_mode(0o600)).unwrap();
        desk.write("signer.pub", signer().trust_key().to_pem());
        desk
    }

    /// The same, with the test server.
    fn with_tools() -> Self {
        let desk = Self::new();
        let server = json!({
            "command": executables::folder().join("forge-test-server"),
            "env": { "TEST_TOKEN": "${TEST_TOKEN}" },
        });
        desk.write("mcp.json", json!({ "mcpServers": { "test": server } }).to_string());
        desk
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).unwrap();
    }

    fn command(&self) -> Command {
        let mut command = Command::new(FORGE);
        command.current_dir(&self.0).env("TEST_TOKEN", CREDENTIAL).stdin(Stdio::null());
        // The journal of whoever runs the tests is left alone.
        command.env("FORGE_STATE", self.path("state"));
        command
    }

    fn forge(&self, arguments: &[&str]) -> Output {
        self.command().args(arguments).output().unwrap()
    }

    /// A service that listens at `socket`.
    fn serve(&self) -> Ended {
        executables::folder();
        let service = self
            .command()
            .args(["serve", "--socket", "socket", "--trust", "signer.pub"])
            .args(["--ready", "0", "--ready-max", "0"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map(Ended)
            .unwrap();
        support::eventually("the service listens", || {
            std::os::unix::net::UnixStream::connect(self.path("socket")).is_ok()
        });
        service
    }

    /// `run`, of a program in text, with `--json`.
    fn run(&self, wat: &str, arguments: &[&str]) -> (i32, Value) {
        self.write("program.wat", wat);
        let mut all = vec!["run", "--json", "--sign-with", "signer.pem"];
        // An emulated CPU needs more than the default to boot at all.
        if !arguments.contains(&"--timeout") {
            all.extend(["--timeout", "30s"]);
        }
        all.extend(arguments);
        all.push("program.wat");
        let output = self.forge(&all);
        let report = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| panic!("no report: {}", text(&output.stderr)));
        (output.status.code().unwrap(), report)
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A process that ends with its test, however that does.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const HELLO: &str = r#"(module
    (import "forge" "output" (func $output (param i32 i32) (result i32)))
    (memory (export "memory") 1) (data (i32.const 0) "hello")
    (func (export "forge_run") (result i32)
        (drop (call $output (i32.const 0) (i32.const 5))) (i32.const 0)))"#;

const ENDLESS: &str = r#"(module (memory (export "memory") 1)
    (func (export "forge_run") (result i32) (loop (br 0)) (unreachable)))"#;

/// Calls one tool with a fixed request and writes its response.
fn calls(tool: &str, request: &str) -> String {
    forge_module(
        &format!(
            "(import \"tool\" \"{tool}\" (func $call_tool (param i32 i32) (result i32)))
             (memory (export \"memory\") 2) (data (i32.const 0) {request:?})"
        ),
        &format!(
            "(local $n i32)
             (local.set $n (call $call_tool (i32.const 0) (i32.const {})))
             (if (i32.lt_s (local.get $n) (i32.const 0)) (then (return (local.get $n))))
             (drop (call $output (i32.const 4096)
                (call $resp_read (i32.const 4096) (i32.const 0) (i32.const 100000))))
             (i32.const 0)",
            request.len()
        ),
    )
    // An import cannot follow a definition, and forge_module puts ours first.
}

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
    let (code, report) = Desk::new().run(HELLO, &[]);
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
    let (code, report) = desk.run(&wat, &with_tools(&["--allow", "test.echo"]));
    assert_eq!(code, 0, "{report:#}");
    let answer: Value = serde_json::from_str(report["output"].as_str().unwrap()).unwrap();
    assert_eq!(answer, json!({ "text": "round trip" }));
    assert_eq!(report["tool_calls"][0]["tool"], "test.echo");
    assert_eq!(report["tool_calls"][0]["status"], "ok");
}

fn a_call_and_its_answer_take_one_exit() {
    let desk = Desk::with_tools();
    let wat = calls("test.echo", r#"{"text":"x"}"#);
    let (_, report) = desk.run(&wat, &with_tools(&["--allow", "test.echo"]));
    assert_eq!(report["vm_exits"], 2, "one for the call, one for the end: {report:#}");
}

fn an_endless_loop_exits_4_by_fuel() {
    let (code, report) = Desk::new().run(ENDLESS, &["--fuel", "1000000"]);
    assert_eq!((code, &report["kind"]), (4, &json!("fuel")), "{report:#}");
    assert_eq!(report["status"], "limit");
}

fn an_endless_loop_with_huge_fuel_exits_4_by_the_deadline() {
    let started = Instant::now();
    let (code, report) =
        Desk::new().run(ENDLESS, &["--fuel", "18446744073709551615", "--timeout", "1s"]);
    assert_eq!((code, &report["kind"]), (4, &json!("deadline")), "{report:#}");
    assert!(started.elapsed() < Duration::from_secs(20));
}

fn a_tool_that_never_answers_exits_4_on_time() {
    let desk = Desk::with_tools();
    let arguments = with_tools(&["--allow", "test.never", "--timeout", "1s"]);
    let (code, report) = desk.run(&calls("test.never", "{}"), &arguments);
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
    let (code, report) = Desk::new().run(wat, &[]);
    assert_eq!(code, 0, "{report:#}");
    assert_eq!(report["memory_peak_bytes"], 65_536);
}

fn a_group_in_the_configuration_holds_what_a_run_starts() {
    let desk = Desk::new();
    let module = r#"(module (memory (export "memory") 1)
        (func (export "forge_run") (result i32) (i32.const 0)))"#;
    desk.write("forge.toml", "");
    let (code, report) = desk.run(module, &["--config", "forge.toml"]);
    assert_eq!(code, 0, "{report:#}");
    // Room for the zygote and no worker; a host that cannot keep a group to it
    // makes none either.
    desk.write("forge.toml", "[vm.group]\nprocesses = 1\n");
    let (code, report) = desk.run(module, &["--config", "forge.toml"]);
    assert_eq!((code, &report["status"]), (5, &json!("unavailable")), "{report:#}");
}

fn deep_recursion_is_a_trap() {
    let wat = r#"(module (memory (export "memory") 1)
        (func $f (param i32) (result i32)
            (i32.add (i32.const 1) (call $f (local.get 0))))
        (func (export "forge_run") (result i32) (call $f (i32.const 0))))"#;
    let (code, report) = Desk::new().run(wat, &[]);
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
        .current_dir(&desk.0)
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
        .command()
        .args(["run", "--json", "--sign-with", "signer.pem", "--fuel", "18446744073709551615"])
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
    let (code, report) = desk.run(&wat, &with_tools(&["--allow", "test.barrier"]));
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
        .command()
        .args(["run", "--sign-with", "signer.pem", "--mcp-config", "mcp.json"])
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
        let (code, report) = desk.run(&wat, &with_tools(&["--allow", "test.spell"]));
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
        .command()
        .args(["run", "--sign-with", "signer.pem", "--fuel", "18446744073709551615"])
        .args(["--timeout", "30s", "endless.wat"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let worker = wait_for("a worker", || worker_of(run.id()));
    let environment = fs::read(format!("/proc/{worker}/environ")).unwrap();
    assert_eq!(text(&environment), "");
    // It has closed the zygote's once it is in its jail.
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
    run.kill().unwrap();
    run.wait().unwrap();
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
    let (code, report) = desk.run(&calls("test.echo", r#"{"text":"x"}"#), &granted);
    assert_eq!(code, 0, "{report:#}");
    let (code, report) = desk.run(&calls("test.slow", r#"{"ms":1}"#), &granted);
    assert_eq!(code, 3, "{report:#}");
    assert!(report["reason"].as_str().unwrap().contains("test.slow"));
    let other = [&granted[..], &["--principal", "somebody"]].concat();
    let (code, report) = desk.run(&calls("test.echo", r#"{"text":"x"}"#), &other);
    assert_eq!((code, &report["kind"]), (3, &json!("grant")), "{report:#}");
}

fn artifacts_are_written_and_never_over_anything() {
    let wat = forge_module(
        r#"(memory (export "memory") 1) (data (i32.const 0) "../a.csvtext/csv1,2")"#,
        "(call $artifact (i32.const 0) (i32.const 8) (i32.const 8) (i32.const 8)
            (i32.const 16) (i32.const 3))",
    );
    let desk = Desk::new();
    for expected in ["out/_a.csv", "out/2-_a.csv"] {
        let (code, report) = desk.run(&wat, &["--artifacts", "out"]);
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
        let mut command = desk.command();
        command.env("FORGE_LOG", "info").args(["run", "--trust", "signer.pub", program]);
        check(&text(&command.output().unwrap().stderr), &[status]);
    }
    let log = desk.path("log");
    let mut service = desk
        .command()
        .env("FORGE_LOG", "info")
        .args(["serve", "--socket", "socket", "--trust", "signer.pub", "--ready", "0"])
        .stderr(fs::File::create(&log).unwrap())
        .spawn()
        .map(Ended)
        .unwrap();
    support::eventually("the service listens", || {
        std::os::unix::net::UnixStream::connect(desk.path("socket")).is_ok()
    });
    for program in ["hello.wasm", "other.wasm"] {
        desk.forge(&["run", "--service", "socket", program]);
    }
    assert!(desk.forge(&["drain", "--service", "socket"]).status.success());
    service.0.wait().unwrap();
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
        let (exit, report) = desk.run(wat, more);
        assert_eq!((exit, &report["status"]), (code, &json!(status)), "{more:?}: {report:#}");
    }
}

fn a_result_that_cannot_be_written_takes_no_exit_code_away() {
    let desk = Desk::new();
    let _service = desk.serve();
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
            let output = desk.command().args(&all).stdout(full).output().unwrap();
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
        let output = desk.command().args(arguments).stdout(left).output().unwrap();
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
    let (_, report) = desk.run(&echo, &["--input", "@input.json"]);
    assert_eq!(report["output"], r#"{"from":"file"}"#);
    let mut run = desk
        .command()
        .args(["run", "--sign-with", "signer.pem", "--timeout", "30s", "--input", "-"])
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
        .command()
        .args(["run", "--sign-with", "signer.pem", "--mcp-config", "mcp.json"])
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
    let mut command = desk.command();
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

// Refusals, which need no VM

fn an_import_that_is_not_granted_exits_3_and_is_named() {
    let desk = Desk::with_tools();
    let wat = calls("test.echo", r#"{"text":"x"}"#);
    for arguments in [vec![], with_tools(&["--allow", "test.slow"])] {
        let (code, report) = desk.run(&wat, &arguments);
        assert_eq!((code, &report["status"]), (3, &json!("rejected")), "{report:#}");
        let reason = report["reason"].as_str().unwrap();
        assert!(reason.contains("test.echo"), "{reason}");
    }
    let (code, report) = desk.run(
        r#"(module (import "wasi_snapshot_preview1" "path_open" (func))
            (memory (export "memory") 1)
            (func (export "forge_run") (result i32) (i32.const 0)))"#,
        &[],
    );
    assert_eq!(code, 3);
    assert!(report["reason"].as_str().unwrap().contains("path_open"), "{report:#}");
}

fn unsigned_flipped_and_wrongly_keyed_programs_exit_3() {
    let desk = Desk::new();
    let module = wat::parse_str(HELLO).unwrap();
    let stranger = forge_protocol::signature::SignerKey::from_secret(&[9; 32]);
    let signed = signer().sign(&module).unwrap();
    let mut flipped = signed.clone();
    let last = flipped.len() - 3;
    flipped[last] ^= 0x10;
    // Whatever is behind the signature, no WebAssembly parser gets to see it.
    let mut no_wasm = b"\0asm\x01\0\0\0".to_vec();
    no_wasm.extend_from_slice(&[1, 3, 0xff, 0xff, 0xff]);
    for (name, program, said) in [
        ("unsigned", module.clone(), "not signed"),
        ("flipped", flipped, "bytes changed"),
        ("stranger", stranger.sign(&module).unwrap(), "no trusted key"),
        ("no wasm", no_wasm, "not signed"),
    ] {
        desk.write("program.wasm", program);
        let output = desk.forge(&["run", "--json", "--trust", "signer.pub", "program.wasm"]);
        assert_eq!(output.status.code(), Some(3), "{name}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["kind"], "signature", "{name}: {report:#}");
        assert!(report["reason"].as_str().unwrap().contains(said), "{name}: {report:#}");
        assert_eq!(report["timing_us"]["vm"], 0, "{name}: no VM was made");
    }
}

fn keygen_sign_and_inspect_fit_together() {
    let desk = Desk::new();
    let made = desk.forge(&["keygen", "--out", "keys"]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    let mode = fs::metadata(desk.path("keys/signer.pem")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let again = desk.forge(&["keygen", "--out", "keys"]);
    assert_eq!(again.status.code(), Some(2), "an existing key is never overwritten");
    let said = text(&again.stderr);
    assert!(said.contains("keys/signer.pem: there is such a file already"), "{said}");
    // Each half in the place of the other.
    for (arguments, half) in [
        (["sign", "--key", "keys/signer.pub", "hello.wat", "-o", "hello.wasm"], "a public key"),
        (["check", "--trust", "keys/signer.pem", "hello.wat", "--allow", "a.b"], "a private key"),
    ] {
        let refused = desk.forge(&arguments);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{said}");
        assert!(said.contains(half) && said.contains("its other half"), "{said}");
    }

    desk.write("hello.wat", HELLO);
    let key = ["sign", "--key", "keys/signer.pem", "hello.wat", "-o", "hello.wasm"];
    assert!(desk.forge(&key).status.success());
    let inspected = desk.forge(&["inspect", "--json", "--trust", "keys/signer.pub", "hello.wasm"]);
    let inspected: Value = serde_json::from_slice(&inspected.stdout).unwrap();
    assert_eq!(inspected["signature"], "good");
    assert_eq!(inspected["imports"][0]["name"], "output");
    assert_eq!(inspected["memory"]["initial_bytes"], 65_536);
    // Who calls tools by name needs no import of one.
    let call = r#"(import "forge" "call_async" (func (param i32 i32 i32 i32) (result i32)))"#;
    for (import, may) in [(call, "any tool that is granted"), ("", "no tool")] {
        desk.write("calls.wat", format!("(module {import} (memory (export \"memory\") 1))"));
        let sign = ["sign", "--key", "keys/signer.pem", "calls.wat", "-o", "calls.wasm"];
        assert!(desk.forge(&sign).status.success());
        let said = text(&desk.forge(&["inspect", "calls.wasm"]).stdout);
        assert!(said.contains(&format!("may call    {may}")), "{said}");
    }
}

fn check_names_every_violation() {
    let desk = Desk::new();
    desk.write(
        "bad.wat",
        r#"(module
            (import "tool" "test.echo" (func (param i32 i32) (result i32)))
            (import "env" "abort" (func))
            (func $f) (start $f))"#,
    );
    let output = desk.forge(&["check", "--json", "bad.wat"]);
    assert_eq!(output.status.code(), Some(3));
    let checked: Value = serde_json::from_slice(&output.stdout).unwrap();
    let kinds: Vec<&str> = checked["violations"]
        .as_array()
        .unwrap()
        .iter()
        .map(|violation| violation["kind"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["signature", "import", "import", "start_section", "export", "export"]);
    desk.write("hello.wat", HELLO);
    desk.forge(&["sign", "--key", "signer.pem", "hello.wat", "-o", "hello.wasm"]);
    let output = desk.forge(&["check", "--trust", "signer.pub", "hello.wasm"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
}

fn what_check_says_run_says_too() {
    let memory = r#"(memory (export "memory") 1)"#;
    let bare = |body: &str| format!("(module {memory} {body})");
    let run = |body: &str| bare(&format!(r#"(func (export "forge_run") (result i32) {body})"#));
    let many = |piece: &str, count: usize| piece.repeat(count);
    let fits = "(i32.const 0)";
    let start = r#"(func (export "_start"))"#;
    let desk = Desk::new();
    for (name, kind, wat) in [
        ("fits", None, run(fits)),
        ("the most locals", None, run(&format!("(local{}) {fits}", many(" i64", 25_000)))),
        ("locals", Some("too_large"), run(&format!("(local{}) {fits}", many(" i64", 25_001)))),
        (
            "operands",
            Some("invalid"),
            run(&format!("{} {}", many("i32.const 1 ", 200_000), many("i32.add ", 199_999))),
        ),
        ("a type", Some("invalid"), run("(i64.const 0)")),
        ("the largest table", None, bare(&format!("(table 100000 funcref) {start}"))),
        ("a table", Some("too_large"), bare(&format!("(table 100001 funcref) {start}"))),
        (
            "an entry's type",
            Some("export"),
            bare(r#"(func (export "_start") (result i32) (i32.const 0))"#),
        ),
        (
            "a second entry's type",
            Some("export"),
            bare(&format!(r#"{start} (func (export "forge_run"))"#)),
        ),
        (
            "an initializer's type",
            Some("export"),
            run(&format!(r#"{fits}) (func (export "_initialize") (result i32) (i32.const 0)"#)),
        ),
    ] {
        desk.write("program.wat", &wat);
        assert!(
            desk.forge(&["sign", "--key", "signer.pem", "program.wat", "-o", "it.wasm"])
                .status
                .success()
        );
        let trusted = ["--json", "--trust", "signer.pub", "it.wasm"];
        let json = |said: &Output| serde_json::from_slice::<Value>(&said.stdout).unwrap();
        let checked = json(&desk.forge(&[&["check"], &trusted[..]].concat()));
        let report = json(&desk.forge(
            &[&["run", "--isolation", "process", "--timeout", "30s"], &trusted[..]].concat(),
        ));
        match kind {
            None => {
                assert_eq!(checked["ok"], true, "{name}: {checked}");
                assert_eq!(report["status"], "ok", "{name}: {report}");
            }
            Some(kind) => {
                assert_eq!(checked["violations"].as_array().unwrap().len(), 1, "{name}: {checked}");
                assert_eq!(checked["violations"][0]["kind"], kind, "{name}: {checked}");
                assert_eq!(report["kind"], kind, "{name}: {report}");
            }
        }
    }
}

fn log_records_that_were_dropped_are_counted() {
    let wat = forge_module(
        r#"(memory (export "memory") 1)"#,
        "(local $i i32)
         (loop $more
            (call $log (i32.const 2) (i32.const 0) (i32.const 4096))
            (local.set $i (i32.add (local.get $i) (i32.const 1)))
            (br_if $more (i32.lt_u (local.get $i) (i32.const 100))))
         (i32.const 0)",
    );
    let desk = Desk::new();
    let (code, report) = desk.run(&wat, &["--isolation", "process"]);
    assert_eq!(code, 0, "{report:#}");
    // Of 64 KiB, each record takes 4,096 bytes and 16 beside them.
    assert_eq!(report["log"].as_array().unwrap().len(), 15);
    assert_eq!(report["log_dropped"], 85);
    let run = ["run", "--sign-with", "signer.pem", "--isolation", "process", "program.wat"];
    let said = text(&desk.forge(&run).stderr);
    assert!(said.contains("the run's log was full: 85 more records were dropped"), "{said}");
}

fn what_has_no_end_or_is_no_text_is_refused() {
    let desk = Desk::new();
    desk.write("hello.wat", HELLO);
    desk.write("latin.json", b"{\"name\": \"Stra\xdfe\"}");
    desk.write("long.json", format!("{{\"text\": \"{}\"}}", "x".repeat(1 << 20)));
    let run = ["run", "--sign-with", "signer.pem", "--input"];
    for (arguments, said) in [
        (vec!["inspect", "/dev/zero"], "/dev/zero: this has more than 64 MiB"),
        ([&run[..], &["@/dev/zero", "hello.wat"]].concat(), "/dev/zero: this has more than"),
        (
            [&run[..], &["@latin.json", "hello.wat"]].concat(),
            "--input: this is not JSON: invalid utf-8",
        ),
        (vec!["tools", "call", "a.tool", "@long.json"], "a tool call has at most 1048576"),
    ] {
        let refused = desk.forge(&arguments);
        let stderr = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.contains(said), "{arguments:?} said {stderr:?}, not {said:?}");
    }
}

fn text_is_told_how_to_become_a_signed_module() {
    let desk = Desk::new();
    desk.write("hello.wat", HELLO);
    desk.write("hello.txt", HELLO);
    for arguments in [
        &["run", "--trust", "signer.pub", "hello.wat"][..],
        &["run", "--sign-with", "signer.pem", "hello.txt"],
        &["inspect", "hello.txt"],
        &["check", "hello.txt"],
    ] {
        let refused = desk.forge(arguments);
        assert_eq!(refused.status.code(), Some(3), "{arguments:?}");
        let said = text(&refused.stdout) + &text(&refused.stderr);
        assert!(said.contains("WebAssembly text"), "{arguments:?}: {said}");
        assert!(said.contains("`forge-vmm sign --key"), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
    }
}

fn an_mcp_config_that_is_not_there_is_an_error_with_and_without_tools() {
    let desk = Desk::new();
    executables::folder();
    desk.write("hello.wat", HELLO);
    let run = ["run", "--sign-with", "signer.pem", "--mcp-config", "typo.json", "hello.wat"];
    let check = ["check", "--trust", "signer.pub", "--mcp-config", "typo.json", "hello.wat"];
    for more in [&[][..], &["--allow", "test.echo"]] {
        for command in [run, check] {
            let refused = desk.forge(&[&command[..], more].concat());
            let said = text(&refused.stderr);
            assert_eq!(refused.status.code(), Some(2), "{command:?} {more:?}: {said}");
            assert!(said.contains("typo.json"), "{command:?} {more:?}: {said}");
        }
    }
}

fn a_journal_that_is_not_there_is_said() {
    let desk = Desk::new();
    executables::folder();
    for more in [&[][..], &["--json"]] {
        let listed = desk.forge(&[&["journal", "list", "--state", "typo"], more].concat());
        let said = text(&listed.stderr);
        assert_eq!(listed.status.code(), Some(2), "{said}");
        assert!(said.contains("typo/journal: there is no journal"), "{said}");
        assert!(!desk.path("typo").exists(), "a reader made it");
    }
}

fn a_door_is_loaded_again_with_all_or_not_at_all() {
    use forge_doors::web::TokenHash;
    use std::io::{BufRead as _, BufReader, Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    let desk = Desk::new();
    executables::folder();
    let configure = |trust: &str, http: &str, token: &str| {
        let hash = String::from(TokenHash::of(token.as_bytes()));
        let principal = format!("[principals.alice]\ntoken_sha256 = ['{hash}']");
        let trust = format!("[vm]\nisolation = 'process'\n[trust]\nkeys = ['{trust}']");
        desk.write("forge.toml", format!("{trust}\n{http}\n{principal}"));
    };
    let http = "[http]\nlisten = './http.sock'";
    configure("signer.pub", http, "first-token");
    let mut service = desk
        .command()
        .args(["serve", "--socket", "socket", "--config", "forge.toml"])
        .args(["--ready", "0", "--ready-max", "1"])
        .env("FORGE_LOG", "info")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map(Ended)
        .unwrap();
    let mut said = BufReader::new(service.0.stderr.take().unwrap()).lines();
    let mut says = |what: &str| {
        let mut lines = said.by_ref().map(Result::unwrap);
        assert!(lines.any(|line| line.contains(what)), "the service never says {what:?}");
    };
    let asks = |token: &str| {
        let mut stream = UnixStream::connect(desk.path("http.sock")).unwrap();
        let request = format!(
            "GET /v1/tools HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\
             authorization: Bearer {token}\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split(' ').nth(1).unwrap().to_owned()
    };
    let hangup = |service: &Ended| {
        // SAFETY: a plain system call; the process is a child of ours.
        assert_eq!(unsafe { libc::kill(service.0.id() as i32, libc::SIGHUP) }, 0);
    };
    says("serving at");
    assert_eq!((&*asks("first-token"), &*asks("second-token")), ("200", "401"));

    let nothing_changed = || {
        // It would have been told by now, and have heard soon.
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!((&*asks("first-token"), &*asks("second-token")), ("200", "401"));
    };
    configure("nowhere.pub", http, "second-token");
    hangup(&service);
    says("is not loaded again");
    nothing_changed();

    // All of it is good, but the host has no thread for the new keys' pool.
    configure("signer.pub", http, "second-token");
    let pid = service.0.id() as i32;
    bound_memory(pid, mapped_bytes(pid) + (1 << 20));
    hangup(&service);
    says("is not loaded again");
    bound_memory(pid, libc::RLIM_INFINITY);
    nothing_changed();

    // Whoever takes the table away may have taken the token back with it.
    configure("signer.pub", "", "first-token");
    hangup(&service);
    says("was loaded again");
    support::eventually("the door knows nobody", || asks("first-token") == "401");

    configure("signer.pub", http, "second-token");
    hangup(&service);
    says("was loaded again");
    support::eventually("it is open again", || asks("second-token") == "200");
}

/// What a process has mapped, in bytes.
fn mapped_bytes(pid: i32) -> u64 {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    statm.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096
}

/// Lets a process map no more than that: a thread's stack needs 2 MiB.
fn bound_memory(pid: i32, bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a plain system call that reads a whole limit.
    let set = unsafe { libc::prlimit(pid, libc::RLIMIT_AS, &limit, std::ptr::null_mut()) };
    assert_eq!(set, 0);
}

fn what_a_service_refuses_is_no_wrong_usage() {
    let desk = Desk::new();
    desk.write("hello.wat", HELLO);
    let service = desk.serve();
    let intent = "x".repeat(forge_protocol::limits::INTENT_BYTES_MAX as usize + 1);
    let run = ["run", "--service", "socket", "--sign-with", "signer.pem", "--intent", &intent];
    let refused = desk.forge(&[&run[..], &["hello.wat"]].concat());
    assert_eq!(refused.status.code(), Some(3), "{}", text(&refused.stderr));
    drop(service);
    let gone = desk.forge(&[&run[..], &["hello.wat"]].concat());
    assert_eq!(gone.status.code(), Some(2), "{}", text(&gone.stderr));
}

fn a_tool_server_that_is_installed_below_the_home_is_started() {
    let desk = Desk::new();
    let bin = desk.path("home/bin");
    fs::create_dir_all(&bin).unwrap();
    let server = bin.join("forge-test-server");
    fs::copy(executables::folder().join("forge-test-server"), &server).unwrap();
    let servers = json!({"mcpServers": {"test": {"command": server}}});
    desk.write("mcp.json", servers.to_string());
    // Whether the state is below the home, as it usually is, or elsewhere.
    for state in ["home/.local/state/forge-vmm", "state"] {
        let mut command = desk.command();
        // SAFETY: umask is async-signal-safe and cannot fail.
        unsafe {
            command.pre_exec(|| {
                libc::umask(0o077);
                Ok(())
            })
        };
        let output = command
            .args(["tools", "call", "--mcp-config", "mcp.json", "test.echo", "{\"text\": \"x\"}"])
            .env("HOME", desk.path("home"))
            .env("FORGE_STATE", desk.path(state))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{state}: {said}");
    }
}

fn usage_errors_exit_2_and_say_what_to_do() {
    let desk = Desk::new();
    desk.write("hello.wat", HELLO);
    desk.write("typo.toml", "[trust]\nkeyz = []\n");
    desk.write("bytes", [0xff, 0xfe]);
    let cases: [(&[&str], &str); 11] = [
        (&["run"], "Usage"),
        (&["run", "--isolation", "none", "hello.wat"], "possible values: vm"),
        (&["run", "hello.wat"], "--trust"),
        (&["run", "--principal", "", "--trust", "signer.pub", "hello.wat"], "1 to 256 bytes"),
        (&["run", "--prepare", "--trust", "signer.pub", "hello.wat"], "--service"),
        (&["run", "--trust", "nowhere.pub", "hello.wat"], "nowhere.pub"),
        (&["run", "--trust", "bytes", "hello.wat"], "BEGIN PUBLIC KEY"),
        (&["run", "--sign-with", "signer.pem", "--input", "{", "hello.wat"], "not JSON"),
        (&["run", "--sign-with", "signer.pem", "--allow", "nodot", "hello.wat"], "<server>.<tool>"),
        (&["run", "--sign-with", "signer.pem", "--allow", "a.b", "hello.wat"], "--mcp-config"),
        (&["run", "--config", "typo.toml", "--sign-with", "signer.pem", "hello.wat"], "keyz"),
    ];
    for (arguments, said) in cases {
        let output = desk.forge(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", text(&output.stderr));
        let stderr = text(&output.stderr);
        assert!(stderr.contains(said), "{arguments:?} said {stderr:?}, not {said:?}");
        assert_eq!(text(&output.stdout), "");
    }
}

fn an_empty_intent_is_a_usage_error_that_says_what_to_give() {
    let desk = Desk::new();
    desk.write("hello.wat", HELLO);
    for intent in ["", " \n"] {
        let run = ["run", "--json", "--sign-with", "signer.pem", "--intent", intent, "hello.wat"];
        for arguments in [&run[..], &["tools", "search", intent]] {
            let output = desk.forge(arguments);
            let stderr = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
            assert!(stderr.contains("say in a sentence or two what is to be done"), "{stderr}");
            assert!(stderr.contains("--intent") || arguments[0] == "tools", "{stderr}");
        }
    }
}

fn a_limit_over_its_bound_is_told_by_its_option() {
    let desk = Desk::new();
    let _service = desk.serve();
    for place in [["--isolation", "process"], ["--service", "socket"]] {
        for (option, value, said) in [
            ("--timeout", "100h", "--timeout: wall_ms is 360000000, the limit is "),
            ("--memory", "99999999999", "--memory: memory_bytes is 99999999999, the limit is "),
        ] {
            let (code, report) = desk.run(HELLO, &[&place[..], &[option, value]].concat());
            assert_eq!((code, &report["kind"]), (3, &json!("too_large")), "{report:#}");
            let reason = report["reason"].as_str().unwrap();
            assert!(reason.starts_with(said), "{reason}");
        }
    }
}

fn a_state_folder_that_cannot_be_made_exits_2_before_anything_is_called() {
    let desk = Desk::new();
    executables::folder();
    let call = ["tools", "call", "crypto.hash", r#"{"algorithm": "sha256", "text": "x"}"#];
    let nowhere = desk.forge(&[&call[..], &["--state", "/proc/forge/state"]].concat());
    let stderr = text(&nowhere.stderr);
    assert_eq!(nowhere.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("the state folder /proc/forge/state: "), "{stderr}");
    let file = desk.forge(&[&call[..], &["--state", "signer.pem"]].concat());
    assert_eq!(file.status.code(), Some(2));
    let stderr = text(&file.stderr);
    assert!(stderr.contains("the state folder signer.pem: not a directory"), "{stderr}");
    let made = desk.forge(&[&call[..], &["--state", "deep/state"]].concat());
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
}

fn arguments_that_are_nested_too_deeply_are_refused_before_they_are_sent() {
    let desk = Desk::new();
    executables::folder();
    let nested = |deep: usize| format!("{{\"a\": {}{}}}", "[".repeat(deep), "]".repeat(deep));
    let refused = desk.forge(&["tools", "call", "crypto.hash", &nested(127)]);
    let stderr = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("nested more than 127 deep"), "{stderr}");
    assert!(!stderr.contains("recursion limit"), "{stderr}");
    // One less is the tool's to judge.
    let judged = desk.forge(&["tools", "call", "crypto.hash", &nested(126)]);
    assert_eq!(judged.status.code(), Some(1), "{}", text(&judged.stderr));
}

fn an_empty_variable_names_no_state_folder() {
    let desk = Desk::new();
    let mut command = desk.command();
    command.env("FORGE_STATE", "").env_remove("XDG_STATE_HOME").env("HOME", &desk.0);
    let output = command.args(["grant", "issue", "--allow", "crypto.hash", "-o", "g"]).output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(desk.path(".local/state/forge-vmm").is_dir(), "it is where it is without");
}

fn a_private_key_that_others_can_read_is_refused() {
    let desk = Desk::new();
    fs::set_permissions(desk.path("signer.pem"), fs::Permissions::from_mode(0o644)).unwrap();
    desk.write("hello.wat", HELLO);
    let output = desk.forge(&["run", "--sign-with", "signer.pem", "hello.wat"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("chmod 600"), "{}", text(&output.stderr));
    // What is no key has nothing to hide.
    let output = desk.forge(&["run", "--sign-with", "hello.wat", "hello.wat"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(!text(&output.stderr).contains("chmod"), "{}", text(&output.stderr));
}

fn wasmsign2_signs_for_us_and_verifies_ours() {
    let module = wat::parse_str(HELLO).unwrap();
    let (theirs_secret, theirs_public) = {
        let pair = wasmsign2::KeyPair::generate();
        (pair.sk, pair.pk)
    };
    // They sign, we verify, with their keys in PEM.
    let parsed = wasmsign2::Module::deserialize(&mut &module[..]).unwrap();
    let signed = theirs_secret.sign(parsed, None).unwrap();
    let mut bytes = Vec::new();
    signed.serialize(&mut bytes).unwrap();
    let trust = forge_protocol::signature::TrustKey::from_pem(&theirs_public.to_pem()).unwrap();
    let keys = forge_protocol::signature::TrustKeys::new([trust]).unwrap();
    let proof = keys.verify(&bytes).unwrap();
    assert_eq!(proof.signer(), trust);
    // We sign with their key, they verify.
    let ours = forge_protocol::signature::SignerKey::from_pem(&theirs_secret.to_pem()).unwrap();
    let signed = ours.sign(&module).unwrap();
    theirs_public.verify(&mut &signed[..], None).unwrap();
    // They read our keys.
    wasmsign2::SecretKey::from_pem(&signer().to_pem()).unwrap();
    let public = wasmsign2::PublicKey::from_pem(&signer().trust_key().to_pem()).unwrap();
    public.verify(&mut &signer().sign(&module).unwrap()[..], None).unwrap();
    assert!(RunLimits::default().program_bytes as usize > signed.len());
}
