//! Clients that others wrote, unchanged. At the MCP door the official
//! TypeScript SDK over stdio and over HTTP, and those scenarios of the
//! conformance suite that ask for no tools of its own; at the HTTP door `ws`,
//! the WebSocket client of JavaScript, which hosts a tool.
//!
//! They need npm and its registry, so they run only when `FORGE_FOREIGN=1` is
//! set and npm is there; else they are counted as ignored, and say why.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/executables.rs"]
mod executables;
mod support;

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use executables::FORGE;
use libtest_mimic::{Arguments, Trial};

const TOKEN: &str = "a-token-of-the-tests";
/// `printf %s a-token-of-the-tests | sha256sum`
const TOKEN_SHA256: &str = "c7355b9788d3036817b4b9118e71116224521da29885b160eb8451377c47b377";

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let asked = std::env::var_os("FORGE_FOREIGN").is_some_and(|value| value == "1");
    let has = |program: &str| {
        Command::new(program).arg("--version").output().is_ok_and(|it| it.status.success())
    };
    let missing = if !asked {
        Some("set FORGE_FOREIGN=1 to install and run foreign clients")
    } else if !has("npm") || !has("node") {
        Some("npm is not installed")
    } else if std::fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        Some("/dev/kvm does not open")
    } else {
        None
    };
    let tests: [(&str, fn()); 3] = [
        ("the_typescript_sdk_runs_a_program", the_typescript_sdk_runs_a_program),
        ("the_conformance_suite_passes", the_conformance_suite_passes),
        ("a_javascript_process_hosts_a_tool", a_javascript_process_hosts_a_tool),
    ];
    let trials = tests.into_iter().map(|(name, test)| {
        if let (Some(why), false) = (missing, arguments.list) {
            eprintln!("SKIPPED: {name}: {why}");
        }
        let test = move || {
            test();
            Ok(())
        };
        Trial::test(name, test).with_ignored_flag(missing.is_some())
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

fn must(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let (stdout, stderr) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}\n{stdout}{stderr}");
    stdout.into_owned()
}

/// A folder with packages from npm, installed once. One test has it for
/// itself: two installations in one folder spoil each other.
fn npm(name: &str, packages: &[&str]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("foreign").join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let missing = |package: &&&str| {
        let name = package.rfind('@').map_or(**package, |at| &package[..at]);
        !folder.join("node_modules").join(name).exists()
    };
    let missing: Vec<_> = packages.iter().filter(missing).collect();
    if !missing.is_empty() {
        let install = ["install", "--no-audit", "--no-fund", "--prefix"];
        must(Command::new("npm").args(install).arg(&folder).args(missing));
    }
    folder
}

/// A script that uses packages of that folder.
fn script(folder: &Path, name: &str, text: &str) -> PathBuf {
    let script = folder.join(name);
    std::fs::write(&script, text).unwrap();
    script
}

/// A folder with a configuration, gone after the test.
struct Desk(PathBuf);

impl Desk {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("forge-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("servers.json"), executables::inventory().to_string()).unwrap();
        let config = format!(
            "[http]\nlisten = '127.0.0.1:0'\n[roles.all]\ntools = ['*']\n\
             [principals.local]\nroles = ['all']\ntoken_sha256 = ['{TOKEN_SHA256}']\n"
        );
        std::fs::write(folder.join("signer.pub"), support::signer().trust_key().to_pem()).unwrap();
        std::fs::write(folder.join("forge.toml"), config).unwrap();
        Self(folder)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.0).env("FORGE_STATE", self.0.join("state"));
        command
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The MCP door over HTTP, and its address.
fn listening(desk: &Desk) -> (Ended, String) {
    started(desk, &["mcp", "--listen", "127.0.0.1:0"], "serving MCP at ")
}

/// `forge-vmm` with these arguments, and the address that it says after this.
fn started(desk: &Desk, arguments: &[&str], says: &str) -> (Ended, String) {
    let mut forge = desk.command(FORGE);
    forge.args(arguments).args(["--config", "forge.toml", "--mcp-config", "servers.json"]);
    forge.stdin(Stdio::null()).stderr(Stdio::piped());
    let mut server = Ended(forge.spawn().unwrap());
    let mut lines = BufReader::new(server.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    let address = lines.find_map(|line| line.split(says).nth(1).map(str::to_owned));
    std::thread::spawn(move || lines.for_each(|line| eprintln!("{line}")));
    (server, address.unwrap())
}

fn the_typescript_sdk_runs_a_program() {
    let desk = Desk::new("mcp-sdk");
    let folder = npm("mcp-sdk", &["@modelcontextprotocol/sdk@1"]);
    let client = script(&folder, "client.mjs", include_str!("support/mcp_client.mjs"));
    let mut over_stdio = desk.command("node");
    over_stdio.arg(&client).args(["stdio", FORGE, "mcp", "--mcp-config", "servers.json"]);
    assert!(must(&mut over_stdio).ends_with("ok\n"));
    let (_server, address) = listening(&desk);
    let mut over_http = desk.command("node");
    over_http.arg(&client).args(["http", &address, TOKEN]);
    assert!(must(&mut over_http).ends_with("ok\n"));
}

/// Those that are of the protocol and not of the suite's own example tools.
/// `prompts-list` and `completion-complete` are answered though neither is
/// offered, as the library does it.
const SCENARIOS: [&str; 8] = [
    "server-initialize",
    "ping",
    "tools-list",
    "resources-list",
    "prompts-list",
    "completion-complete",
    "server-sse-multiple-streams",
    "dns-rebinding-protection",
];

fn the_conformance_suite_passes() {
    let desk = Desk::new("mcp-conformance");
    // The suite needs a newer node than distributions have, and knows no
    // tokens: something between adds it.
    let packages = ["@modelcontextprotocol/conformance@0.1", "node@22"];
    let folder = npm("mcp-conformance", &packages);
    let node = folder.join("node_modules/.bin/node");
    let (_server, address) = listening(&desk);
    let adder = script(&folder, "adder.mjs", include_str!("support/mcp_token_adder.mjs"));
    let mut adder = Command::new(&node)
        .arg(adder)
        .args([&address, TOKEN])
        .stdout(Stdio::piped())
        .spawn()
        .map(Ended)
        .unwrap();
    let mut line = String::new();
    BufReader::new(adder.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let suite = folder.join("node_modules/@modelcontextprotocol/conformance/dist/index.js");
    for scenario in SCENARIOS {
        let mut command = Command::new(&node);
        command.arg(&suite).args(["server", "--scenario", scenario, "--url", line.trim()]);
        let said = must(command.current_dir(&desk.0));
        assert!(said.contains(" 0 failed") && !said.contains("Passed: 0/"), "{scenario}: {said}");
    }
}

fn a_javascript_process_hosts_a_tool() {
    let desk = Desk::new("ws-hosting");
    let folder = npm("ws", &["ws@8"]);
    let client = script(&folder, "hosting.mjs", include_str!("support/hosting.mjs"));
    let serve = ["serve", "--socket", "socket", "--trust", "signer.pub"];
    let (_server, address) = started(&desk, &serve, "HTTP at ");
    let program = desk.0.join("joins.wasm");
    std::fs::write(&program, support::joins()).unwrap();
    let hosting = |more: &[&str]| {
        let mut node = desk.command("node");
        node.arg(&client).args([&address, TOKEN]).arg(&program).args(more);
        node
    };
    assert!(must(&mut hosting(&[])).ends_with("ok\n"));
    // It dies when its tool is called: the run is over.
    assert_eq!(hosting(&["dies"]).status().unwrap().signal(), Some(libc::SIGKILL));
    let ended = || {
        let status = must(desk.command(FORGE).args(["status", "--service", "socket", "--json"]));
        let status: serde_json::Value = serde_json::from_str(&status).unwrap();
        status["runs"]["ended"]["cancelled"] == 1 && status["runs"]["running"] == 0
    };
    let until = Instant::now() + Duration::from_secs(60);
    while !ended() {
        assert!(Instant::now() < until, "its run goes on");
        std::thread::sleep(Duration::from_millis(20));
    }
}
