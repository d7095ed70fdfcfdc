//! Servers that others wrote, unchanged, from an `mcp.json`: two from npm, one
//! from PyPI, each installed by name into a folder under the build folder.
//!
//! They need npm, Python and their registries, so they run only when
//! `FORGE_FOREIGN=1` is set and those programs are there; else they are
//! counted as ignored, and say why.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use forge_protocol::abi::CallCode;
use forge_protocol::limits::RunLimits;
use libtest_mimic::{Arguments, Trial};
use serde_json::json;
use support::Broker;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let asked = std::env::var_os("FORGE_FOREIGN").is_some_and(|value| value == "1");
    let has = |program: &str| {
        Command::new(program).arg("--version").output().is_ok_and(|it| it.status.success())
    };
    let tests: [(&str, &str, fn()); 4] = [
        ("server_everything_works_unchanged", "npm", server_everything_works_unchanged),
        ("server_everything_works_over_http", "npm", server_everything_works_over_http),
        ("server_filesystem_works_unchanged", "npm", server_filesystem_works_unchanged),
        ("server_time_works_unchanged", "python3", server_time_works_unchanged),
    ];
    let trials = tests.into_iter().map(|(name, installer, test)| {
        let missing = match (asked, asked && has(installer)) {
            (false, _) => Some("set FORGE_FOREIGN=1 to install and run foreign servers".into()),
            (true, false) => Some(format!("{installer} is not installed")),
            (true, true) => None,
        };
        if let (Some(why), false) = (&missing, arguments.list) {
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

/// The folder for installed servers.
fn cache() -> PathBuf {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("foreign");
    std::fs::create_dir_all(&cache).unwrap();
    cache
}

fn must(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{command:?}\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Installs a package from npm, once; returns its program. Two tests want the
/// same one and run side by side, in processes of their own.
fn npm(cache: &Path, package: &str, program: &str) -> PathBuf {
    let alone = File::create(cache.join(format!("{program}.lock"))).unwrap();
    alone.lock().unwrap();
    let folder = cache.join(program);
    if !folder.exists() {
        // Elsewhere first: what was broken off is not there.
        let making = cache.join(format!("{program}.making"));
        must(
            Command::new("npm")
                .args(["install", "--no-audit", "--no-fund", "--prefix"])
                .arg(&making)
                .arg(package),
        );
        std::fs::rename(making, &folder).unwrap();
    }
    folder.join("node_modules/.bin").join(program)
}

/// Installs a package from PyPI into an environment of its own, once.
fn pypi(cache: &Path, package: &str) -> PathBuf {
    let folder = cache.join(package);
    let binary = folder.join("bin").join(package);
    if !binary.exists() {
        must(Command::new("python3").args(["-m", "venv"]).arg(&folder));
        must(Command::new(folder.join("bin/pip")).args(["install", "--quiet", package]));
    }
    binary
}

fn limits() -> RunLimits {
    RunLimits { wall_ms: 60_000, ..RunLimits::default() }
}

fn server_everything_works_unchanged() {
    let cache = cache();
    let program = npm(&cache, "@modelcontextprotocol/server-everything", "mcp-server-everything");
    let mut broker = Broker::with_config(&json!({"mcpServers": {"everything": {
        "command": program, "args": ["stdio"], "env": {"SECRET_TOKEN": "${CANARY}"},
    }}}));
    let tools = broker.tools();
    assert!(tools.len() >= 8, "{tools:?}");
    let names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
    println!("everything: {names:?}");
    let mut worker =
        broker.run(&["everything.echo", "everything.get-sum", "everything.get-env"], limits());
    let (code, said) = worker.call("everything.echo", &json!({"message": "hello"}));
    assert_eq!(code, None);
    assert!(said[0]["text"].as_str().unwrap().contains("hello"), "{said}");
    let (code, sum) = worker.call("everything.get-sum", &json!({"a": 19, "b": 23}));
    assert_eq!(code, None);
    assert!(sum[0]["text"].as_str().unwrap().contains("42"), "{sum}");
    assert_eq!(worker.call("everything.get-sum", &json!({"a": "x"})).0, Some(CallCode::BadRequest));
    // It hands its environment to whoever asks: a ready-made leak.
    let (code, environment) = worker.call("everything.get-env", &json!({}));
    assert_eq!(code, None);
    let environment = environment.to_string();
    assert!(environment.contains("SECRET_TOKEN"), "{environment}");
    assert!(!environment.contains(support::CANARY));
    assert!(!environment.contains("broker-only-value"));
}

/// A program that is ended with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn server_everything_works_over_http() {
    let cache = cache();
    let program = npm(&cache, "@modelcontextprotocol/server-everything", "mcp-server-everything");
    // It takes a port by number only: one that was free a moment ago.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let server = Command::new(program)
        .arg("streamableHttp")
        .env("PORT", free.port().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let _server = Ended(server);
    let until = Instant::now() + support::PATIENCE;
    while TcpStream::connect(("localhost", free.port())).is_err() {
        assert!(Instant::now() < until, "it does not listen");
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut broker = Broker::with_config(&json!({"mcpServers": {"everything": {
        "type": "streamable-http", "url": format!("http://localhost:{}/mcp", free.port()),
        "headers": {"Authorization": "Bearer ${CANARY}"},
    }}}));
    let tools = broker.tools();
    assert!(tools.len() >= 8, "{tools:?}");
    let mut worker = broker.run(&["everything.echo", "everything.get-sum"], limits());
    for _ in 0..3 {
        let (code, said) = worker.call("everything.echo", &json!({"message": "hello"}));
        assert_eq!(code, None, "{said}");
        assert!(said[0]["text"].as_str().unwrap().contains("hello"), "{said}");
    }
    let (code, sum) = worker.call("everything.get-sum", &json!({"a": 19, "b": 23}));
    assert_eq!(code, None);
    assert!(sum[0]["text"].as_str().unwrap().contains("42"), "{sum}");
    let (_, log) = broker.finish();
    assert!(!log.contains(support::CANARY));
}

fn server_filesystem_works_unchanged() {
    let cache = cache();
    let program = npm(&cache, "@modelcontextprotocol/server-filesystem", "mcp-server-filesystem");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("note.txt");
    std::fs::write(&file, "a note").unwrap();
    let mut broker = Broker::with_config(&json!({"mcpServers": {"files": {
        "command": program, "args": [folder.path()],
    }}}));
    let tools = broker.tools();
    assert!(tools.len() >= 8, "{tools:?}");
    let mut worker = broker.run(&["files.read_text_file", "files.write_file"], limits());
    let (code, text) = worker.call("files.read_text_file", &json!({"path": file}));
    assert_eq!(code, None);
    assert_eq!(text["content"], "a note", "{text}");
    let (code, error) = worker.call("files.read_text_file", &json!({"path": "/etc/hostname"}));
    assert_eq!(code, Some(CallCode::ToolFailed));
    assert!(error["error"].as_str().unwrap().to_lowercase().contains("denied"), "{error}");
    let other = folder.path().join("other.txt");
    let (code, _) = worker.call("files.write_file", &json!({"path": other, "content": "written"}));
    assert_eq!(code, None);
    assert_eq!(std::fs::read_to_string(other).unwrap(), "written");
}

fn server_time_works_unchanged() {
    let cache = cache();
    let program = pypi(&cache, "mcp-server-time");
    let mut broker = Broker::with_config(&json!({"mcpServers": {"time": {
        "command": program, "args": ["--local-timezone", "UTC"],
    }}}));
    let listed = broker.tools();
    assert_eq!(listed.iter().filter(|tool| tool.name.server() == "time").count(), 2);
    let mut worker = broker.run(&["time.get_current_time", "time.convert_time"], limits());
    let (code, now) = worker.call("time.get_current_time", &json!({"timezone": "UTC"}));
    assert_eq!(code, None, "{now}");
    assert!(now.to_string().contains("UTC"), "{now}");
    let (code, _) = worker.call("time.get_current_time", &json!({}));
    assert_eq!(code, Some(CallCode::BadRequest));
    let (code, converted) = worker.call(
        "time.convert_time",
        &json!({"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}),
    );
    assert_eq!(code, None, "{converted}");
    assert!(converted.to_string().contains("21:00"), "{converted}");
    let (_, log) = broker.finish();
    let up = log.lines().find(|line| line.contains("tool server is up")).unwrap();
    assert!(up.contains("2026-07-28"), "this server speaks the newer protocol: {up}");
}
