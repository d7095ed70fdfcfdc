//! From an intent to a run, the whole way: the real `forge-vmm`, the real
//! toolbroker over nine real tool servers with 50 tools, and a real VM.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/desk.rs"]
mod desk;
#[path = "support/executables.rs"]
mod executables;
#[path = "support/processes.rs"]
mod processes;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Output};

use desk::{Desk, text};
use serde_json::{Value, json};

fn main() -> ExitCode {
    support::main(
        claims![
            an_intent_is_searched_granted_and_run_in_one_step,
            a_tool_that_was_not_found_is_not_granted,
            a_service_searches_grants_and_runs_in_one_step_too,
            what_an_intent_grants_and_what_is_blocked_is_said,
        ],
        claims![
            tools_search_prints_the_tools_that_fit_with_scores_and_specs,
            flags_that_do_not_go_together_are_usage_errors,
            an_intent_that_cannot_be_searched_is_refused_with_what_to_do,
            the_surface_is_benched_without_any_other_data,
        ],
    )
}

/// What the surface is made of.
const SERVERS: [&str; 3] = ["forge-toolbroker", "office-server", "inventory-server"];
/// What the inventory's server asks of whoever starts it.
const TOKEN: (&str, &str) = ("INVENTORY_TOKEN", "demo-inventory-token");
const OWED: &str = "Which invoices are unpaid?";
/// An intent that another tool fits.
const ROOM: &str = "Is there a meeting room on the second floor?";

fn example(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples").join(path)
}

/// A desk with the surface's `mcp.json`.
struct Surface(Desk);

impl Surface {
    fn new() -> Self {
        let desk = Desk::new();
        // The example's own file, with the programs that were built here.
        let config = fs::read_to_string(example("surface.mcp.json")).unwrap();
        let folder = format!("{}/", executables::folder_with(&SERVERS).display());
        desk.write("mcp.json", config.replace("target/release/", &folder));
        Self(desk)
    }

    fn forge(&self, arguments: &[&str]) -> Output {
        self.0.command(arguments).envs([TOKEN]).output().unwrap()
    }

    fn run(&self, more: &[&str]) -> (i32, Value) {
        let program = example("programs/unpaid.wat");
        let common = ["--mcp-config", "mcp.json", program.to_str().unwrap()];
        self.0.run_with(&[TOKEN], &[more, &common].concat())
    }
}

fn an_intent_is_searched_granted_and_run_in_one_step() {
    let (code, report) = Surface::new().run(&["--intent", OWED, "-k", "4"]);
    assert_eq!(code, 0, "{report:#}");
    let output: Value = serde_json::from_str(report["output"].as_str().unwrap()).unwrap();
    assert_eq!(output["count"], 2, "{report:#}");
    assert_eq!(report["tool_calls"][0]["tool"], "billing.list_invoices");
    let retrieved = report["retrieved"].as_array().unwrap();
    assert_eq!(retrieved.len(), 4, "{report:#}");
    let named = |tool: &Value| tool["tool"] == "billing.list_invoices";
    assert!(retrieved.iter().any(named), "{report:#}");
    assert!(retrieved.iter().all(|tool| tool["score_millionths"].as_u64().unwrap() > 0));
}

fn a_tool_that_was_not_found_is_not_granted() {
    let (code, report) = Surface::new().run(&["--intent", ROOM, "-k", "1"]);
    assert_eq!(code, 1, "{report:#}");
    assert_eq!(report["retrieved"][0]["tool"], "calendar.find_rooms", "{report:#}");
    assert_eq!(report["tool_calls"][0]["tool"], "billing.list_invoices");
    assert_ne!(report["tool_calls"][0]["status"], "ok", "{report:#}");
}

fn a_service_searches_grants_and_runs_in_one_step_too() {
    let desk = Surface::new();
    let serve =
        ["serve", "--socket", "socket", "--trust", "signer.pub", "--mcp-config", "mcp.json"];
    let mut service = desk.0.command(&serve).envs([TOKEN]).spawn().unwrap();
    processes::wait_for("a service", || {
        assert!(service.try_wait().unwrap().is_none(), "it has ended");
        std::os::unix::net::UnixStream::connect(desk.0.path("socket")).ok()
    });
    let program = example("programs/unpaid.wat");
    let common = ["--service", "socket", program.to_str().unwrap()];
    let (code, report) = desk.0.run(&[&["--intent", OWED, "-k", "4"][..], &common].concat());
    let (missed, other) = desk.0.run(&[&["--intent", ROOM, "-k", "1"][..], &common].concat());
    service.kill().unwrap();
    service.wait().unwrap();
    assert_eq!(code, 0, "{report:#}");
    assert_eq!(report["tool_calls"][0]["tool"], "billing.list_invoices");
    assert_eq!(report["retrieved"].as_array().unwrap().len(), 4, "{report:#}");
    // Exactly what was found is granted.
    assert_eq!((missed, &other["retrieved"][0]["tool"]), (1, &"calendar.find_rooms".into()));
    assert_ne!(other["tool_calls"][0]["status"], "ok", "{other:#}");
}

fn what_an_intent_grants_and_what_is_blocked_is_said() {
    let desk = Desk::with_tools();
    desk.write("forge.toml", "[review]\nmode = \"required\"\n");
    desk.write("hello.wat", support::HELLO);
    let tools = ["--mcp-config", "mcp.json", "--config", "forge.toml"];
    let forge = |arguments: &[&str]| {
        let output = desk.forge(&[arguments, &tools].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        (text(&output.stdout), text(&output.stderr))
    };
    forge(&["tools", "approve", "test.echo"]);
    let run = ["run", "--sign-with", "signer.pem", "--timeout", "30s", "hello.wat"];
    let intent = ["--intent", "say the same text again", "-k", "1"];
    let (stdout, stderr) = forge(&[&run[..], &intent].concat());
    assert_eq!(stdout, "hello");
    let granted: Vec<_> = stderr.lines().filter(|line| line.contains("granted by")).collect();
    assert_eq!(granted, ["forge-vmm: granted by --intent: test.echo"], "{stderr}");
    assert!(stderr.contains("blocked and therefore not searched: test."), "{stderr}");
    assert!(stderr.contains("(new)") && stderr.contains("`forge-vmm tools review`"), "{stderr}");
    let (_, stderr) = forge(&["tools", "search", "say the same text again"]);
    assert!(stderr.contains("blocked and therefore not searched: test."), "{stderr}");
    let (stdout, _) = forge(&["tools", "search", "say the same text again", "--json"]);
    let found: Value = serde_json::from_str(&stdout).unwrap();
    let is_named = |tool: &str| {
        let entry = json!({"name": tool, "standing": "new"});
        found["blocked"].as_array().unwrap().contains(&entry)
    };
    assert!(is_named("test.big") && !is_named("test.echo"), "{found:#}");
    // The report says it to programs.
    let (stdout, stderr) = forge(&[&run[..], &intent, &["--json"]].concat());
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(report["retrieved"][0]["tool"], "test.echo", "{report:#}");
    assert!(!stderr.contains("granted by"), "{stderr}");
}

fn tools_search_prints_the_tools_that_fit_with_scores_and_specs() {
    let desk = Surface::new();
    let common = ["tools", "search", "--mcp-config", "mcp.json", OWED];
    let output = desk.forge(&[&common[..], &["--json", "-k", "3"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let tools = found["tools"].as_array().unwrap();
    assert_eq!(tools.len(), 3);
    assert!(tools.iter().any(|tool| tool["name"] == "billing.list_invoices"), "{found:#}");
    assert!(tools.iter().all(|tool| tool["score"].as_f64().unwrap() > 0.0));
    assert!(tools.iter().all(|tool| tool["input_schema"]["type"] == "object"));
    assert_eq!(found["unavailable"], json!([]));

    let plain = text(&desk.forge(&common).stdout);
    assert_eq!(plain.lines().filter(|line| line.contains("arguments: {")).count(), 5, "{plain}");
}

fn flags_that_do_not_go_together_are_usage_errors() {
    let desk = Surface::new();
    for arguments in [
        &["run", "--intent", "x", "--allow", "a.b", "p.wasm"][..],
        &["run", "--intent", "x", "--grant", "g", "p.wasm"],
        &["run", "-k", "3", "p.wasm"],
        &["tools", "search", "-k", "0", "x"],
        &["tools", "search", "-k", "65", "x"],
        &["bench", "retrieval"],
        &["bench", "boot", "--data", "."],
        &["bench", "retrieval", "--data", "."],
    ] {
        let output = desk.forge(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", text(&output.stderr));
    }
}

fn an_intent_that_cannot_be_searched_is_refused_with_what_to_do() {
    let desk = Surface::new();
    let long = "word ".repeat(1000);
    for (intent, code, why) in
        [(" ", 2, "the intent is empty"), (long.as_str(), 3, "intent_bytes is 5000")]
    {
        let output = desk.forge(&["tools", "search", intent]);
        assert_eq!(output.status.code(), Some(code));
        assert!(text(&output.stderr).contains(why), "{}", text(&output.stderr));
    }
}

fn the_surface_is_benched_without_any_other_data() {
    let folder = example("retrieval");
    let output =
        Surface::new().forge(&["bench", "retrieval", "--json", "--data", folder.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    let value = |name: &str| {
        let all = results["results"].as_array().unwrap();
        let found = all.iter().find(|result| result["name"] == name);
        found.unwrap_or_else(|| panic!("no {name}: {results:#}"))["p50"].as_f64().unwrap()
    };
    let fused = value("retrieval.surface.recall_at_5");
    assert!(fused > value("retrieval.surface.lexical.recall_at_5"));
    let shown = value("retrieval.surface.tokens_shown");
    assert!(5.0 * shown < value("retrieval.surface.everything.tokens_shown"));
    for size in [500, 10_000, 100_000] {
        assert!(value(&format!("retrieval.query_{size}")) > 0.0);
        assert!(value(&format!("retrieval.lexical.query_{size}")) > 0.0);
    }
}
