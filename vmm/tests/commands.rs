//! What the commands say and refuse, which needs no VM: the real `forge-vmm`, and
//! behind it the real toolbroker.

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
use std::process::{ExitCode, Output, Stdio};
use std::time::Duration;

use desk::{Desk, text};
use forge_protocol::limits::RunLimits;
use serde_json::{Value, json};
use serving::Service;
use support::{HELLO, calls, forge_module, signer};

fn main() -> ExitCode {
    support::main(
        &[],
        claims![
            an_import_that_is_not_granted_exits_3_and_is_named,
            unsigned_flipped_and_wrongly_keyed_programs_exit_3,
            keygen_sign_and_inspect_fit_together,
            a_session_that_no_service_takes_is_refused_by_each_command,
            check_names_every_violation,
            check_takes_what_a_run_may_ask_for_and_says_what_that_is,
            what_check_says_run_says_too,
            a_refusal_names_the_option_or_the_file_that_it_is_about,
            any_limit_is_asked_for_by_its_name,
            a_call_of_a_tool_takes_no_longer_than_it_is_told,
            a_command_is_refused_in_words_of_what_was_typed,
            log_records_that_were_dropped_are_counted,
            what_has_no_end_or_is_no_text_is_refused,
            a_tool_server_that_is_installed_below_the_home_is_started,
            usage_errors_exit_2_and_say_what_to_do,
            a_limit_that_is_said_twice_is_refused,
            a_trace_replaces_nothing_before_there_is_one,
            a_trace_is_written_into_a_pipe_that_is_read_from_the_beginning,
            a_run_that_is_interrupted_before_it_begins_is_cancelled,
            help_that_cannot_be_written_is_a_failure,
            check_has_a_verdict_in_json_on_text_that_is_no_module,
            an_empty_intent_is_a_usage_error_that_says_what_to_give,
            a_limit_over_its_bound_is_told_by_its_option,
            a_run_may_ask_for_the_wall_clock_that_the_operator_allows_and_no_more,
            a_state_folder_that_cannot_be_made_exits_2_before_anything_is_called,
            arguments_that_are_nested_too_deeply_are_refused_before_they_are_sent,
            an_empty_variable_names_no_state_folder,
            where_no_call_can_be_journalled_none_is_made,
            a_relative_variable_names_no_state_folder,
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

fn an_import_that_is_not_granted_exits_3_and_is_named() {
    let desk = Desk::with_tools();
    let wat = calls("test.echo", r#"{"text":"x"}"#);
    for arguments in [&[][..], &["--mcp-config", "mcp.json", "--allow", "test.slow"]] {
        let (code, report) = desk.run_text(&wat, arguments);
        assert_eq!((code, &report["status"]), (3, &json!("rejected")), "{report:#}");
        let reason = report["reason"].as_str().unwrap();
        assert!(reason.contains("test.echo"), "{reason}");
    }
    let (code, report) = desk.run_text(
        r#"(module (import "wasi_snapshot_preview1" "sock_open" (func))
            (memory (export "memory") 1)
            (func (export "forge_run") (result i32) (i32.const 0)))"#,
        &[],
    );
    assert_eq!(code, 3);
    let reason = report["reason"].as_str().unwrap();
    assert!(reason.contains("sock_open") && reason.contains("no such function"), "{reason}");
}

fn a_refusal_names_the_option_or_the_file_that_it_is_about() {
    let desk = Desk::new();
    let run = |wat: &str, more: &[&str]| {
        let (code, report) = desk.run_text(wat, &[&["--isolation", "process"], more].concat());
        (code, report["reason"].as_str().unwrap().to_owned())
    };
    // What grants a tool, to who gave no grant.
    let wat = calls("crypto.hash", "{}");
    let (code, reason) = run(&wat, &[]);
    assert!(code == 3 && reason.ends_with(": `--allow crypto.hash` grants it"), "{reason}");
    desk.write("calls.wat", &wat);
    let checked = text(&desk.forge(&["check", "calls.wat"]).stdout);
    assert!(checked.contains("this tool: `--allow crypto.hash` grants it\n"), "{checked}");

    desk.write("large.json", format!("[\"{}\"]", "x".repeat(1 << 20)));
    let (code, reason) = run(HELLO, &["--input", "@large.json"]);
    assert!(code == 3 && reason.starts_with("--input: input_bytes is 1048580, "), "{reason}");
    let large = format!(r#"(data "{}") (memory (export "memory") 1)"#, "x".repeat(3 << 20));
    let (code, reason) = run(&forge_module(&large, ""), &[]);
    assert!(code == 3 && reason.starts_with("program.wat: program_bytes is "), "{reason}");
    // No option helps who wants more than there is.
    let vast =
        HELLO.replace(r#"(memory (export "memory") 1)"#, r#"(memory (export "memory") 65536)"#);
    assert_ne!(vast, HELLO);
    let (code, reason) = run(&vast, &[]);
    assert!(code == 3 && reason.starts_with("initial memory is 4294967296, "), "{reason}");
    assert!(reason.ends_with(", and no run may have more than 67108864"), "{reason}");

    let endless = forge_module(r#"(memory (export "memory") 1)"#, "(loop (result i32) (br 0))");
    let (code, reason) = run(&endless, &["--fuel", "10000"]);
    assert!(code == 4 && reason.starts_with("--fuel: the program reached its fuel"), "{reason}");
}

fn any_limit_is_asked_for_by_its_name() {
    let desk = Desk::new();
    let run = |more: &[&str]| desk.run_text(HELLO, &[&["--isolation", "process"], more].concat());
    let (code, report) = run(&["--limit", "output_bytes=3", "--limit", "calls=0"]);
    assert_eq!((code, &report["kind"]), (4, &json!("output")), "{report:#}");
    let (code, report) = run(&["--limit", "recursion=200000"]);
    let reason = report["reason"].as_str().unwrap();
    assert!(code == 3 && reason.starts_with("--limit: recursion is 200000, "), "{reason}");
    for (limit, said) in [
        ("recursions=1", "there is no limit \"recursions\"; known are fuel, memory_bytes"),
        ("calls", "NAME=N; known are fuel"),
        ("calls=many", "calls is a whole number"),
        ("calls=4294967296", "calls is at most 4294967295"),
    ] {
        let refused = desk.forge(&["run", "--limit", limit, "program.wat"]);
        assert_eq!(refused.status.code(), Some(2), "{limit}");
        assert!(text(&refused.stderr).contains(said), "{}", text(&refused.stderr));
    }
}

fn a_call_of_a_tool_takes_no_longer_than_it_is_told() {
    let desk = Desk::with_tools();
    let call = |time: &str| {
        let began = std::time::Instant::now();
        let call = ["tools", "call", "--mcp-config", "mcp.json", "--timeout", time];
        let output = desk.forge(&[&call[..], &["test.slow", r#"{"ms": 25000}"#]].concat());
        (output.status.code(), text(&output.stderr), began.elapsed())
    };
    let (code, said, took) = call("300ms");
    assert_eq!(code, Some(1), "{said}");
    assert!(took < Duration::from_secs(20), "{took:?}");
    let (code, said, _) = call("31s");
    assert_eq!(code, Some(2));
    assert!(said.contains("--timeout: a call may take at most 30s"), "{said}");
}

fn a_command_is_refused_in_words_of_what_was_typed() {
    let desk = Desk::new();
    // It reads the journal.
    executables::folder();
    for (arguments, said) in [
        (&["status", "--service", "vsock:2:5000"][..], "only `run` takes vsock:CID:PORT"),
        (&["drain", "--service", "vsock:2:5000"], "only `run` takes vsock:CID:PORT"),
        (&["tools", "call", "crypto.hash", "@"], "a file's name follows the @"),
        (&["run", "--sign-with", "signer.pem", "--input", "@", "x"], "--input: a file's name"),
        (&["journal", "list"], "forge-vmm: "),
        // The state folder is given, and by a variable.
        (&["run"], "Usage: forge-vmm run <PROGRAM>"),
    ] {
        let refused = desk.forge(arguments);
        let stderr = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.contains(said), "{arguments:?}: {stderr}");
        assert!(!stderr.contains("forge-toolbroker: "), "{arguments:?}: {stderr}");
    }
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
    // The same to standard output, of text that begins with a byte order mark.
    desk.write("marked.wat", format!("\u{feff}{HELLO}"));
    let piped = desk.forge(&["sign", "--key", "keys/signer.pem", "marked.wat", "-o", "-"]);
    assert_eq!(piped.stdout, fs::read(desk.path("hello.wasm")).unwrap(), "{piped:?}");
    assert!(!desk.path("-").exists());
    // And of text under any name.
    desk.write("hello", HELLO);
    let piped = desk.forge(&["sign", "--key", "keys/signer.pem", "hello", "-o", "-"]);
    assert_eq!(piped.stdout, fs::read(desk.path("hello.wasm")).unwrap(), "{piped:?}");
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

fn a_session_that_no_service_takes_is_refused_by_each_command() {
    let desk = Desk::new();
    let long = "s".repeat(129);
    for name in ["", "a\nb", &long] {
        for command in [
            &["run", "--session", name, "x.wasm"][..],
            &["check", "--session", name, "x.wasm"],
            &["grant", "issue", "--session", name, "--allow", "a.b", "-o", "x.grant"],
        ] {
            let refused = desk.forge(command);
            let said = text(&refused.stderr);
            assert_eq!(refused.status.code(), Some(2), "{said}");
            assert!(said.contains("--session") && said.contains("1 to 128 bytes"), "{said}");
        }
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

fn check_takes_what_a_run_may_ask_for_and_says_what_that_is() {
    let desk = Desk::new();
    let starts_with = |pages: u32| {
        format!(
            r#"(module (memory (export "memory") {pages})
                (func (export "forge_run") (result i32) (i32.const 0)))"#
        )
    };
    for (pages, code, needs) in [
        (256, 0, Value::Null),
        (257, 0, json!({ "memory_bytes": 257 * 65_536 })),
        (1024, 0, json!({ "memory_bytes": 1024 * 65_536 })),
        (1025, 3, Value::Null),
    ] {
        desk.write("program.wat", starts_with(pages));
        assert!(
            desk.forge(&["sign", "--key", "signer.pem", "program.wat", "-o", "it.wasm"])
                .status
                .success()
        );
        let check = ["check", "--trust", "signer.pub", "it.wasm"];
        let output = desk.forge(&[&check[..], &["--json"]].concat());
        assert_eq!(output.status.code(), Some(code), "{pages}");
        let checked: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(checked["needs"], needs, "{pages}: {checked}");
        let said = text(&desk.forge(&check).stdout);
        assert_eq!(said.contains("--memory"), !needs.is_null(), "{pages}: {said}");
    }
    // What run says names the option, and with what check said it runs.
    let short = starts_with(257);
    let run = |more: &[&str]| desk.run_text(&short, &[&["--isolation", "process"], more].concat());
    let (code, report) = run(&[]);
    assert_eq!((code, &report["kind"]), (3, &json!("too_large")), "{report:#}");
    let reason = report["reason"].as_str().unwrap();
    assert!(reason.starts_with("initial memory is 16842752, the limit is "), "{reason}");
    assert!(reason.ends_with(": `--memory 16842752` lets it"), "{reason}");
    let (code, report) = run(&["--memory", "16842752"]);
    assert_eq!(code, 0, "{report:#}");
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
            Some("too_large"),
            run(&format!("{} {}", many("i32.const 1 ", 100_000), many("i32.add ", 99_999))),
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
    let (code, report) = desk.run_text(&wat, &["--isolation", "process"]);
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
        &["run", "--trust", "signer.pub", "hello.txt"],
    ] {
        let refused = desk.forge(arguments);
        assert_eq!(refused.status.code(), Some(3), "{arguments:?}");
        let said = text(&refused.stdout) + &text(&refused.stderr);
        assert!(said.contains("WebAssembly text"), "{arguments:?}: {said}");
        assert!(said.contains("`forge-vmm sign --key"), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
    }
    // What may be unsigned is read as text whatever its name is.
    for command in ["inspect", "check"] {
        let of = |file| desk.forge(&[command, file]);
        let (as_text, named) = (of("hello.txt"), of("hello.wat"));
        assert_eq!((as_text.status, as_text.stdout), (named.status, named.stdout));
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
        .command(&["serve", "--socket", "socket", "--config", "forge.toml"])
        .args(["--ready", "0", "--ready-max", "1"])
        .env("FORGE_LOG", "info")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let said = service.stderr.take().unwrap();
    let service = Service::listening(service, desk.socket());
    let mut said = BufReader::new(said).lines();
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
    let hangup = |service: &Service| {
        // SAFETY: a plain system call; the process is a child of ours.
        assert_eq!(unsafe { libc::kill(service.child.id() as i32, libc::SIGHUP) }, 0);
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
    assert!(desk.command(&["keygen", "--out", "others"]).output().unwrap().status.success());
    configure("others/signer.pub", http, "second-token");
    let pid = service.child.id() as i32;
    // Who reads it has the stack of who did so before.
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
    let service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
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
        let mut command = desk.command(&[]);
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
    let cases: [(&[&str], &str); 12] = [
        (&["serve", "--trust", "signer.pub", "--socket", "vsock:2:5000"], "[service.vsock]"),
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

fn a_limit_that_is_said_twice_is_refused() {
    let desk = Desk::new();
    desk.write("hello.wat", HELLO);
    for twice in [
        ["--fuel", "100000", "--limit", "fuel=1"],
        ["--limit", "memory_bytes=65536", "--memory", "65536"],
        ["--timeout", "5s", "--limit", "wall_ms=1"],
        ["--limit", "calls=1", "--limit", "calls=2"],
    ] {
        let run = ["run", "--sign-with", "signer.pem", "hello.wat"];
        let output = desk.forge(&[&run[..], &twice].concat());
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{twice:?}: {said}");
        assert!(said.contains("is said by --"), "{twice:?}: {said}");
    }
    let half = desk.forge(&["run", "--sign-with", "signer.pem", "--timeout", "999us", "hello.wat"]);
    assert_eq!(half.status.code(), Some(2));
    assert!(text(&half.stderr).contains("whole milliseconds"), "{}", text(&half.stderr));
}

fn a_trace_replaces_nothing_before_there_is_one() {
    let desk = Desk::new();
    desk.write("hello.wat", HELLO);
    desk.write("old.json", "{}");
    let run = ["run", "--sign-with", "signer.pem", "--trace"];
    // There is no server for that.
    for trace in ["old.json", "new.json"] {
        let output = desk.forge(&[&run[..], &[trace, "--allow", "a.b", "hello.wat"]].concat());
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    }
    assert_eq!(fs::read(desk.path("old.json")).unwrap(), b"{}");
    assert!(!desk.path("new.json").exists());
    let output = desk.forge(&[&run[..], &["./hello.wat", "hello.wat"]].concat());
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("this is the program"), "{}", text(&output.stderr));
    assert_eq!(fs::read(desk.path("hello.wat")).unwrap(), HELLO.as_bytes());
    // Nor is a link taken away that leads to nothing yet.
    std::os::unix::fs::symlink("later.json", desk.path("link.json")).unwrap();
    desk.forge(&[&run[..], &["link.json", "--allow", "a.b", "hello.wat"]].concat());
    assert!(desk.path("link.json").is_symlink());
}

fn a_trace_is_written_into_a_pipe_that_is_read_from_the_beginning() {
    let desk = Desk::new();
    desk.write("hello.wat", HELLO);
    let made = std::process::Command::new("mkfifo").arg(desk.path("pipe")).status().unwrap();
    assert!(made.success());
    let read = std::thread::spawn({
        let pipe = desk.path("pipe");
        move || fs::read(pipe).unwrap()
    });
    let run = ["run", "--isolation", "process", "--sign-with", "signer.pem", "--trace", "pipe"];
    let output = desk.forge(&[&run[..], &["hello.wat"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let trace: Value = serde_json::from_slice(&read.join().unwrap()).unwrap();
    assert!(trace["traceEvents"].is_array());
}

fn a_run_that_is_interrupted_before_it_begins_is_cancelled() {
    let desk = Desk::new();
    desk.write("hello.wat", HELLO);
    let servers = json!({"mcpServers": {"slow": {"command": "sleep", "args": ["60"]}}});
    desk.write("slow.json", servers.to_string());
    let mut command = desk.command(&["run", "--json", "--isolation", "process"]);
    command.args(["--sign-with", "signer.pem", "--mcp-config", "slow.json"]);
    command.args(["--intent", "something slow", "hello.wat"]);
    // Whoever runs this in the background may have it ignored, and so would we.
    // SAFETY: signal is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGTERM, libc::SIG_DFL);
            Ok(())
        })
    };
    let began = std::time::Instant::now();
    let run = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    // It searches by then, or still starts its toolbroker.
    std::thread::sleep(Duration::from_millis(1_500));
    // SAFETY: sends a signal to a process that this test started, and has not waited for.
    unsafe { libc::kill(run.id() as i32, libc::SIGTERM) };
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(7));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["status"], "cancelled", "{report:#}");
    assert!(began.elapsed() < Duration::from_secs(20), "it waited for its server");
}

fn help_that_cannot_be_written_is_a_failure() {
    let desk = Desk::new();
    for arguments in [&["--help"][..], &["--version"], &["run", "--help"]] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let status = desk.command(arguments).stdout(full).status().unwrap();
        assert_eq!(status.code(), Some(1), "{arguments:?}");
        let (_, left) = std::io::pipe().unwrap();
        let status = desk.command(arguments).stdout(left).status().unwrap();
        assert_eq!(status.code(), Some(0), "{arguments:?}: who reads it has left");
    }
}

fn check_has_a_verdict_in_json_on_text_that_is_no_module() {
    let desk = Desk::new();
    desk.write("bad.wat", "(module (func");
    let output = desk.forge(&["check", "--json", "bad.wat"]);
    assert_eq!(output.status.code(), Some(3));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&said["ok"], &said["violations"][0]["kind"]), (&json!(false), &json!("invalid")));
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
    let _service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    for place in [["--isolation", "process"], ["--service", "socket"]] {
        for (option, value, said) in [
            ("--timeout", "100h", "--timeout: wall_ms is 360000000, the limit is "),
            ("--memory", "99999999999", "--memory: memory_bytes is 99999999999, the limit is "),
        ] {
            let (code, report) = desk.run_text(HELLO, &[&place[..], &[option, value]].concat());
            assert_eq!((code, &report["kind"]), (3, &json!("too_large")), "{report:#}");
            let reason = report["reason"].as_str().unwrap();
            assert!(reason.starts_with(said), "{reason}");
        }
    }
}

fn a_run_may_ask_for_the_wall_clock_that_the_operator_allows_and_no_more() {
    let desk = Desk::new();
    fs::write(desk.path("forge.toml"), "[limits]\nwall_ms = 40000\n").unwrap();
    let config = ["--config", "forge.toml"];
    let none_ready = ["--ready", "0", "--ready-max", "0"];
    let _service = desk.serve(&[&config[..], &none_ready].concat());
    for place in
        [&[&config[..], &["--isolation", "process"]].concat()[..], &["--service", "socket"]]
    {
        let (code, report) = desk.run_text(HELLO, &[place, &["--timeout", "40s"]].concat());
        assert_eq!(code, 0, "{report:#}");
        let (code, report) = desk.run_text(HELLO, &[place, &["--timeout", "41s"]].concat());
        let reason = report["reason"].as_str().unwrap();
        assert!(reason.contains("wall_ms is 41000, the limit is 40000"), "{code}: {reason}");
    }
    let call =
        ["tools", "call", "--config", "forge.toml", "--timeout", "41s", "crypto.random", "{}"];
    let said = text(&desk.forge(&call).stderr);
    assert!(said.contains("--timeout: a call may take at most 40s"), "{said}");
    fs::write(desk.path("forge.toml"), "[limits]\nwall_ms = 4000\n").unwrap();
    let said = text(&desk.forge(&["config", "check", "--config", "forge.toml"]).stdout);
    assert!(said.contains("limits.wall_ms: must be 5000 to 3600000"), "{said}");
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
    let refused = desk.forge(&["tools", "call", "crypto.hash", &nested(125)]);
    let stderr = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("nested more than 125 deep"), "{stderr}");
    assert!(!stderr.contains("recursion limit"), "{stderr}");
    // One less is the tool's to judge.
    let judged = desk.forge(&["tools", "call", "crypto.hash", &nested(124)]);
    assert_eq!(judged.status.code(), Some(3), "{}", text(&judged.stderr));
}

fn an_empty_variable_names_no_state_folder() {
    let desk = Desk::new();
    let mut command = desk.command(&["grant", "issue", "--allow", "crypto.hash", "-o", "g"]);
    command.env("FORGE_STATE", "").env_remove("XDG_STATE_HOME").env("HOME", desk.folder());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(desk.path(".local/state/forge-vmm").is_dir(), "it is where it is without");
}

fn where_no_call_can_be_journalled_none_is_made() {
    let desk = Desk::with_tools();
    desk.write("calls.wat", calls("test.echo", r#"{"text":"x"}"#));
    let call = ["tools", "call", "--mcp-config", "mcp.json", "test.echo", "{}"];
    let run = ["run", "--isolation", "process", "--sign-with", "signer.pem"];
    let run = [&run[..], &["--mcp-config", "mcp.json", "--allow", "test.echo", "calls.wat"]];
    let homeless = |arguments: &[&str]| {
        let mut command = desk.command(arguments);
        command.env_remove("FORGE_STATE").env_remove("XDG_STATE_HOME").env_remove("HOME");
        command.output().unwrap()
    };
    for arguments in [&call[..], &run.concat()] {
        let output = homeless(arguments);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.contains("give --state"), "{arguments:?}: {stderr}");
    }
    // Whoever calls nothing needs none.
    let listed = homeless(&["tools", "list", "--mcp-config", "mcp.json"]);
    assert_eq!(listed.status.code(), Some(0), "{}", text(&listed.stderr));
}

fn a_relative_variable_names_no_state_folder() {
    let desk = Desk::new();
    let mut command = desk.command(&["grant", "issue", "--allow", "crypto.hash", "-o", "g"]);
    command.env_remove("FORGE_STATE").env("XDG_STATE_HOME", "here").env("HOME", desk.folder());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(desk.path(".local/state/forge-vmm").is_dir() && !desk.path("here").exists());
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
