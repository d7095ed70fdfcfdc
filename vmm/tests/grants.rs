//! Grants from the command line to the program: a real `forge-vmm`, a VM, the
//! real toolbroker and a real tool server.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/desk.rs"]
mod desk;
#[path = "support/executables.rs"]
mod executables;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use std::fs;
use std::ops::Deref;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use desk::{Desk, text};
use serde_json::{Value, json};
use support::forge_module;

fn main() -> ExitCode {
    support::main(
        claims![
            a_programs_call_outside_its_constraint_is_denied_and_costs_the_server_nothing,
            a_grant_is_good_in_its_session_alone,
            a_tool_that_changed_is_not_run_until_it_is_approved,
        ],
        claims![
            a_grant_is_narrowed_without_key_or_server_and_inspect_shows_it_all,
            check_says_what_of_a_grant_would_keep_a_program_from_running,
            a_grant_is_looked_for_where_it_was_issued_and_nothing_is_made_elsewhere,
            a_grants_file_is_its_owners_alone_and_whole_or_as_it_was,
            a_grant_that_is_refused_is_told_by_its_file,
            a_definition_that_nobody_approved_is_not_called_approved,
            an_approval_of_nothing_says_so,
            a_command_that_is_for_no_principal_takes_none,
            a_constraint_that_cannot_be_read_exits_2_and_points_at_the_character,
        ],
    )
}

/// A desk with an `mcp.json` over the test server.
struct Shop(Desk);

impl Deref for Shop {
    type Target = Desk;

    fn deref(&self) -> &Desk {
        &self.0
    }
}

impl Shop {
    fn new() -> Self {
        let shop = Self(Desk::new());
        shop.servers(&[]);
        shop
    }

    /// The test server with these arguments.
    fn servers(&self, more: &[&str]) {
        let log = self.path("calls");
        // A server may write what its command line names, if it is there.
        let opened = fs::OpenOptions::new().create(true).append(true).open(&log).unwrap();
        opened.set_permissions(fs::Permissions::from_mode(0o666)).unwrap();
        let args = [&["--log", log.to_str().unwrap()], more].concat();
        let server =
            json!({"command": executables::folder().join("forge-test-server"), "args": args});
        let servers = json!({"mcpServers": {"test": server}});
        self.write("mcp.json", servers.to_string());
    }

    /// `forge-vmm`, which has to go well.
    fn done(&self, arguments: &[&str]) -> String {
        let output = self.forge(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn issue(&self, more: &[&str]) {
        let command = ["grant", "issue", "--mcp-config", "mcp.json", "-o", "whole.grant"];
        self.done(&[&command[..], more].concat());
    }

    /// Runs a program that makes one call and puts out what it gets.
    fn run(&self, tool: &str, request: &str, more: &[&str]) -> (i32, Value) {
        self.write("program.wat", calls(tool, request));
        self.0.run(&[more, &["--mcp-config", "mcp.json", "program.wat"]].concat())
    }

    /// What reached the test server.
    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("calls")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

/// A program that calls a tool, puts the answer out, refusal or not, and
/// returns 0.
fn calls(tool: &str, request: &str) -> String {
    forge_module(
        &format!(
            "(import \"tool\" \"{tool}\" (func $call_tool (param i32 i32) (result i32)))
             (memory (export \"memory\") 2) (data (i32.const 0) {request:?})"
        ),
        &format!(
            "(drop (call $call_tool (i32.const 0) (i32.const {})))
             (drop (call $output (i32.const 4096)
                (call $resp_read (i32.const 4096) (i32.const 0) (i32.const 100000))))
             (i32.const 0)",
            request.len()
        ),
    )
}

fn a_programs_call_outside_its_constraint_is_denied_and_costs_the_server_nothing() {
    let desk = Shop::new();
    desk.issue(&["--allow", "test.slow", "--where", "test.slow:/ms<=5"]);
    let (code, report) = desk.run("test.slow", r#"{"ms":6}"#, &["--grant", "whole.grant"]);
    assert_eq!(code, 0, "{report:#}");
    assert_eq!(report["tool_calls"][0]["status"], "denied", "{report:#}");
    let why: Value = serde_json::from_str(report["output"].as_str().unwrap()).unwrap();
    assert_eq!(why["constraint"], "/ms<=5", "{why}");
    assert_eq!(desk.calls(), Vec::<String>::new());

    // A tool would get 5.0.
    let nearly = r#"{"ms":4.99999999999999999999999}"#;
    let (code, report) = desk.run("test.slow", nearly, &["--grant", "whole.grant"]);
    assert_eq!(
        (code, &report["tool_calls"][0]["status"]),
        (0, &json!("bad_request")),
        "{report:#}"
    );
    assert!(report["output"].as_str().unwrap().contains("at byte 6 of"), "{report:#}");
    assert_eq!(desk.calls(), Vec::<String>::new());

    let (_, report) = desk.run("test.slow", r#"{"ms":5}"#, &["--grant", "whole.grant"]);
    assert_eq!(report["tool_calls"][0]["status"], "ok", "{report:#}");
    assert_eq!(desk.calls(), ["slow", "slow ended"]);
}

fn a_grant_is_good_in_its_session_alone() {
    let desk = Shop::new();
    desk.issue(&["--allow", "test.echo", "--session", "s-1"]);
    let run = |more: &[&str]| {
        desk.run("test.echo", r#"{"text":"x"}"#, &[&["--grant", "whole.grant"], more].concat())
    };
    let (code, report) = run(&["--session", "s-1"]);
    assert_eq!(code, 0, "{report:#}");
    for other in [&[][..], &["--session", "s-2"]] {
        let (code, report) = run(other);
        assert_eq!((code, &report["kind"]), (3, &json!("grant")), "{report:#}");
    }
    assert_eq!(desk.calls(), ["echo"]);
}

fn a_tool_that_changed_is_not_run_until_it_is_approved() {
    let desk = Shop::new();
    let run = || desk.run("test.echo", r#"{"text":"x"}"#, &["--allow", "test.echo"]);
    assert_eq!(run().0, 0);
    desk.servers(&["--changed"]);
    let (code, report) = run();
    assert_eq!((code, &report["kind"]), (3, &json!("not_reviewed")), "{report:#}");
    assert!(report["reason"].as_str().unwrap().contains("forge-vmm tools approve test.echo"));
    assert_eq!(desk.calls(), ["echo"], "the first one alone");

    let servers = ["--mcp-config", "mcp.json"];
    let listed = desk.done(&[&["tools", "list"], &servers[..]].concat());
    assert!(listed.contains("test.echo  [blocked: changed]"), "{listed}");
    let review = desk.done(&[&["tools", "review"], &servers[..]].concat());
    assert!(review.contains("changed   test.echo"), "{review}");
    assert!(review.contains("    + Says it back, and tells everybody."), "{review}");
    let approved = desk.done(&[&["tools", "approve", "test.echo"], &servers[..]].concat());
    assert!(approved.ends_with("1 approved\n"), "{approved}");
    assert_eq!(run().0, 0);
}

fn a_grant_is_narrowed_without_key_or_server_and_inspect_shows_it_all() {
    let desk = Shop::new();
    desk.issue(&["--allow", "test.slow", "--allow", "test.echo", "--cost", "9"]);
    // Whoever narrows it has neither the key nor the servers.
    fs::rename(desk.path("state"), desk.path("elsewhere")).unwrap();
    fs::rename(desk.path("mcp.json"), desk.path("away.json")).unwrap();
    desk.done(&[
        "grant",
        "attenuate",
        "whole.grant",
        "-o",
        "narrow.grant",
        "--allow",
        "test.slow",
        "--where",
        "test.slow:/ms<=5",
        "--calls",
        "3",
        "--session",
        "s-1",
        "--valid",
        "1m",
    ]);
    assert!(!desk.path("state").exists(), "it made a state folder");
    let mode = fs::metadata(desk.path("narrow.grant")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    fs::rename(desk.path("elsewhere"), desk.path("state")).unwrap();

    let shown = desk.done(&["grant", "inspect", "narrow.grant", "--json"]);
    let claims: Value = serde_json::from_str(&shown).unwrap();
    let whole = desk.done(&["grant", "inspect", "whole.grant", "--json"]);
    let whole: Value = serde_json::from_str(&whole).unwrap();
    assert!(claims["expires"].as_str() < whole["expires"].as_str(), "{claims:#}");
    assert_eq!((&claims["calls_max"], &claims["cost_max"]), (&json!(3), &json!(9)));
    assert_eq!(claims["session"], "s-1");
    assert_eq!(claims["tools"].as_array().unwrap().len(), 1, "{claims:#}");
    assert_eq!(claims["tools"][0]["constraints"], json!(["/ms<=5"]));
    let shown = desk.done(&["grant", "inspect", "narrow.grant"]);
    for line in ["session    s-1", "calls      3 ", "cost       9 ", "  where    /ms<=5"] {
        assert!(shown.contains(line), "{shown}");
    }

    let nothing = desk.forge(&["grant", "attenuate", "whole.grant", "-o", "narrow.grant"]);
    assert_eq!(nothing.status.code(), Some(2), "{}", text(&nothing.stderr));
}

fn check_says_what_of_a_grant_would_keep_a_program_from_running() {
    let desk = Shop::new();
    desk.issue(&["--allow", "test.echo", "--session", "s-1"]);
    desk.write("program.wat", calls("test.echo", "{}"));
    desk.done(&["sign", "--key", "signer.pem", "program.wat", "-o", "program.wasm"]);
    let check = |more: &[&str]| -> Vec<String> {
        let command = ["check", "--json", "--trust", "signer.pub", "--grant", "whole.grant"];
        let output = desk.forge(&[&command[..], more, &["program.wasm"]].concat());
        let said: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| panic!("{}", text(&output.stderr)));
        let violations = said["violations"].as_array().unwrap();
        assert_eq!(output.status.success(), violations.is_empty(), "{said}");
        violations.iter().map(|it| format!("{}: {}", it["kind"], it["message"])).collect()
    };
    assert_eq!(check(&["--session", "s-1"]), Vec::<String>::new());
    for (more, said) in [(&[][..], "session"), (&["--session", "s-1", "--principal", "bob"], "bob")]
    {
        let violations = check(more);
        assert_eq!(violations.len(), 1, "{violations:?}");
        assert!(violations[0].starts_with("\"grant\"") && violations[0].contains(said));
    }
    let mut token = fs::read(desk.path("whole.grant")).unwrap();
    let middle = token.len() / 2;
    token[middle] ^= 1;
    desk.write("whole.grant", token);
    let violations = check(&[]);
    assert_eq!(violations.len(), 1, "{violations:?}");
    assert!(violations[0].starts_with("\"grant\""), "{violations:?}");
}

fn a_grant_is_looked_for_where_it_was_issued_and_nothing_is_made_elsewhere() {
    let desk = Shop::new();
    desk.issue(&["--allow", "test.echo"]);
    desk.write("program.wat", calls("test.echo", "{}"));
    let (state, grant) = (["--state", "mistyped"], ["--grant", "whole.grant"]);
    let commands = [
        [&["grant", "inspect", "whole.grant"][..], &state].concat(),
        [&["check", "program.wat"][..], &grant, &state].concat(),
        [&["run", "--sign-with", "signer.pem", "program.wat"][..], &grant, &state].concat(),
    ];
    for command in commands {
        let output = desk.forge(&command);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{command:?}: {said}");
        assert!(said.contains("mistyped") && said.contains("--state"), "{command:?}: {said}");
        assert!(!desk.path("mistyped").exists(), "{command:?}");
    }
    desk.done(&["grant", "inspect", "whole.grant"]);
}

fn a_grants_file_is_its_owners_alone_and_whole_or_as_it_was() {
    let desk = Shop::new();
    let whole = desk.path("whole.grant");
    fs::write(&whole, "").unwrap();
    fs::set_permissions(&whole, fs::Permissions::from_mode(0o644)).unwrap();
    desk.issue(&["--allow", "test.slow"]);
    assert_eq!(fs::metadata(&whole).unwrap().permissions().mode() & 0o777, 0o600);

    let (token, beside) = (fs::read(&whole).unwrap(), fs::read_dir(desk.folder()).unwrap().count());
    let narrows = ["grant", "attenuate", "whole.grant", "--calls", "1", "-o", "whole.grant"];
    let mut command = desk.command(&narrows);
    let no_room = || {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a plain system call on a limit that is whole.
        unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &none) };
        Ok(())
    };
    // SAFETY: the closure makes one system call between fork and exec.
    let output = unsafe { command.pre_exec(no_room) }.output().unwrap();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("whole.grant: File too large"), "{stderr}");
    assert_eq!(fs::read(&whole).unwrap(), token);
    assert_eq!(fs::read_dir(desk.folder()).unwrap().count(), beside);

    std::os::unix::fs::symlink("whole.grant", desk.path("link.grant")).unwrap();
    desk.done(&["grant", "attenuate", "whole.grant", "--calls", "1", "-o", "link.grant"]);
    assert!(desk.path("link.grant").is_symlink());
    assert_ne!(fs::read(&whole).unwrap(), token);

    // As the HTTP door gives it, and an editor keeps it.
    desk.write("door.grant", format!("{}\n", STANDARD.encode(fs::read(&whole).unwrap())));
    let inspects = |grant| desk.forge(&["grant", "inspect", "--json", grant]);
    let (own, doors) = (inspects("whole.grant"), inspects("door.grant"));
    assert!(own.status.success() && own.stdout == doors.stdout, "{doors:?}");
}

fn a_grant_that_is_refused_is_told_by_its_file() {
    let desk = Shop::new();
    desk.issue(&["--allow", "test.echo", "--principal", "bob"]);
    desk.write("junk.grant", "junk");
    desk.write("program.wat", calls("test.echo", "{}"));
    desk.done(&["sign", "--key", "signer.pem", "program.wat", "-o", "program.wasm"]);
    let said = |arguments: &[&str]| {
        let output = desk.forge(arguments);
        assert_eq!(output.status.code(), Some(3), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout) + &text(&output.stderr)
    };
    let run = ["run", "--isolation", "process", "--trust", "signer.pub", "program.wasm"];
    let servers = ["--mcp-config", "mcp.json"];
    for (grant, why) in [("junk.grant", "this is no grant"), ("whole.grant", "bob")] {
        let told = format!("{grant}: ");
        let run = [&run[..], &servers, &["--grant", grant]].concat();
        let report = said(&[&run[..], &["--json"]].concat());
        for text in [
            said(&run),
            report,
            said(&["check", "--trust", "signer.pub", "--grant", grant, "program.wasm"]),
        ] {
            assert!(text.contains(&told) && text.contains(why), "{text}");
        }
    }
    for arguments in [
        &["grant", "inspect", "junk.grant"][..],
        &["grant", "attenuate", "junk.grant", "--calls", "1", "-o", "less.grant"],
    ] {
        let text = said(arguments);
        assert!(text.contains("junk.grant: this is no grant"), "{text}");
    }
}

fn a_definition_that_nobody_approved_is_not_called_approved() {
    let desk = Shop::new();
    let servers = ["--mcp-config", "mcp.json"];
    // Its first use pins it.
    desk.done(&[&["tools", "list"], &servers[..]].concat());
    let shown = desk.done(&[&["tools", "review"], &servers[..]].concat());
    let standing = |tool: &str| {
        let line = shown.lines().find(|line| line.contains(tool));
        line.and_then(|line| line.split_whitespace().next()).unwrap_or_default()
    };
    assert_eq!((standing("test.echo"), standing("crypto.hash")), ("pinned", "built-in"), "{shown}");
}

fn an_approval_of_nothing_says_so() {
    let desk = Shop::new();
    let output = desk.forge(&["tools", "approve", "crypto.hash"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("nothing had to be approved"), "{output:?}");
}

fn a_command_that_is_for_no_principal_takes_none() {
    let desk = Shop::new();
    let whom = ["--principal", "anybody"];
    for command in [
        &["serve"][..],
        &["tools", "review"],
        &["tools", "approve", "--all"],
        &["grant", "inspect", "x"],
    ] {
        let output = desk.forge(&[command, &whom].concat());
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(text(&output.stderr).contains("--principal"), "{output:?}");
    }
    desk.done(&[&["tools", "list"], &whom[..]].concat());
}

fn a_constraint_that_cannot_be_read_exits_2_and_points_at_the_character() {
    let desk = Shop::new();
    let output = desk.forge(&[
        "grant",
        "issue",
        "--mcp-config",
        "mcp.json",
        "-o",
        "x.grant",
        "--allow",
        "test.slow",
        "--where",
        "test.slow:/ms<=five",
    ]);
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert!(said.contains("\"test.slow:/ms<=five\", character 16: a number"), "{said}");
    assert!(!desk.path("x.grant").exists());
}
