//! A folder of a test's own, with a key to sign with and a state folder, and
//! `forge-vmm` at work in it.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};

use crate::executables;
use crate::support::signer;

/// What every run of these tests says.
const RUN: [&str; 6] = ["run", "--json", "--sign-with", "signer.pem", "--timeout", "30s"];

/// What `mcp.json` calls `${TEST_TOKEN}`.
pub const CREDENTIAL: &str = "tok-7f3a9c51e2b84d06-canary";

/// The folder, gone after the test.
pub struct Desk(PathBuf);

impl Desk {
    /// With `signer.pem` and `signer.pub` in it.
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // The name of the test binary tells whose it is.
        let name = format!("{}-{}-{number}", env!("CARGO_CRATE_NAME"), std::process::id());
        let desk = Self(std::env::temp_dir().join(format!("forge-{name}")));
        fs::create_dir_all(&desk.0).unwrap();
        desk.write("signer.pem", signer().to_pem());
        let private = fs::Permissions::from_mode(0o600);
        fs::set_permissions(desk.path("signer.pem"), private).unwrap();
        desk.write("signer.pub", signer().trust_key().to_pem());
        desk
    }

    /// The same, with the test server in `mcp.json`, whose credential is
    /// [`CREDENTIAL`].
    pub fn with_tools() -> Self {
        let desk = Self::new();
        let server = json!({
            "command": executables::folder().join("forge-test-server"),
            "env": { "TEST_TOKEN": "${TEST_TOKEN}" },
        });
        desk.write("mcp.json", json!({ "mcpServers": { "test": server } }).to_string());
        desk
    }

    pub fn folder(&self) -> &Path {
        &self.0
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a file; its path as a command line has it.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        fs::write(&path, content).unwrap();
        path.into_os_string().into_string().unwrap()
    }

    /// `forge-vmm` with these arguments, here, with a state of its own.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forge-vmm"));
        command.args(arguments).current_dir(&self.0).stdin(Stdio::null());
        command.env("FORGE_STATE", self.path("state")).env_remove("FORGE_LOG");
        command.env("TEST_TOKEN", CREDENTIAL);
        command
    }

    pub fn forge(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// `forge-vmm run` with these arguments behind the usual ones: its exit
    /// code and its report.
    pub fn run(&self, arguments: &[&str]) -> (i32, Value) {
        reported(&mut self.command(&[&RUN, arguments].concat()))
    }

    /// The same with more in its environment.
    pub fn run_with(&self, environment: &[(&str, &str)], arguments: &[&str]) -> (i32, Value) {
        let mut command = self.command(&[&RUN, arguments].concat());
        reported(command.envs(environment.iter().copied()))
    }

    /// [`Desk::run`], of a program in text.
    pub fn run_text(&self, wat: &str, arguments: &[&str]) -> (i32, Value) {
        self.write("program.wat", wat);
        // An emulated CPU needs more than the default to boot at all.
        let usual = if arguments.contains(&"--timeout") { &RUN[..4] } else { &RUN[..] };
        reported(&mut self.command(&[usual, arguments, &["program.wat"]].concat()))
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn reported(command: &mut Command) -> (i32, Value) {
    let output = command.output().unwrap();
    let report = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("no report: {}", text(&output.stderr)));
    (output.status.code().unwrap(), report)
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
