//! `forge-vmm serve` on a desk, its clients, and orders for it.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use forge_client::blocking::Client;
use forge_protocol::broker::Authority;
use forge_protocol::codec;
use forge_protocol::frame::{self, Kind};
use forge_protocol::handshake::{Hello, Role};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::service::{Finish, Order, Question, Reply, Submit};
use forge_vmm::link::{Link, Patience};
use serde_json::Value;

use crate::desk::Desk;
use crate::executables;
use crate::processes::workers_below;
use crate::support::{eventually, forge_module, signed};

/// A desk with what a service needs.
pub fn desk() -> Desk {
    executables::folder_with(&["forge-toolbroker", "forge-test-server", "inventory-server"]);
    Desk::new()
}

impl Desk {
    pub fn socket(&self) -> PathBuf {
        self.path("socket")
    }

    /// The service, not started yet.
    pub fn serves(&self, more: &[&str]) -> Command {
        let all = ["serve", "--socket", "socket", "--trust", "signer.pub", "--state", "state"];
        let mut command = self.command(&[&all, more].concat());
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    /// A service that listens.
    pub fn serve(&self, more: &[&str]) -> Service {
        Service::listening(self.serves(more).spawn().unwrap(), self.socket())
    }
}

/// A service that ends with its test, however that does.
pub struct Service {
    pub child: Child,
    pub socket: PathBuf,
}

impl Service {
    /// Waits until it listens.
    pub fn listening(child: Child, socket: PathBuf) -> Self {
        let mut service = Self { child, socket };
        eventually("the service listens", || {
            if let Some(ended) = service.child.try_wait().unwrap() {
                let mut said = String::new();
                let mut stderr = service.child.stderr.take();
                let _ = stderr.as_mut().map(|stderr| stderr.read_to_string(&mut said));
                panic!("the service ended: {ended}\n{said}");
            }
            Client::connect(&service.socket).is_ok()
        });
        service
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.socket).unwrap()
    }

    pub fn workers(&self) -> Vec<i32> {
        workers_below(self.child.id() as i32)
    }

    pub fn serves(&self) {
        let report = run(&mut self.client(), &submit(ECHO, "[7]"));
        assert_eq!((&report["status"], &report["output"]), (&"ok".into(), &"[7]".into()));
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn patience() -> Patience<'static> {
    Patience::until(Instant::now() + Duration::from_secs(60))
}

pub const ECHO: &str = "(drop (call $output (i32.const 0)
        (call $input_read (i32.const 0) (i32.const 0) (call $input_len))))
    (call $log (i32.const 2) (i32.const 0) (i32.const 2))
    (i32.const 0)";

pub const ENDLESS: &str = "(loop (br 0)) (unreachable)";

pub fn program(body: &str) -> Vec<u8> {
    signed(&forge_module(r#"(memory (export "memory") 1)"#, body))
}

pub fn submit(body: &str, input: &str) -> Order {
    Order {
        program: program(body),
        input: input.into(),
        principal: "local".into(),
        session: None,
        authority: Authority::Tools(Vec::new()),
        limits: RunLimits { wall_ms: 30_000, ..RunLimits::default() },
        prepare: false,
        events: false,
        hosted: None,
    }
}

/// A run that ends by its deadline only, half a minute away: as late as a run
/// may end. Who wants to see it cancelled looks how it ended.
pub fn endless() -> Order {
    let maxima = RunLimits::operator_maxima();
    let limits = RunLimits { fuel: maxima.fuel, wall_ms: maxima.wall_ms, ..RunLimits::default() };
    Order { limits, ..submit(ENDLESS, "{}") }
}

/// Calls `tool` with `request` and outputs what comes back.
pub fn calls(tool: &str, request: &str) -> Vec<u8> {
    let (name, bytes) = (tool.len(), request.len());
    let data = format!("{tool}{}", request.replace('"', "\\\""));
    let memory = format!(r#"(memory (export "memory") 1) (data (i32.const 0) "{data}")"#);
    let body = format!(
        "(local $code i32)
         (local.set $code (call $call (i32.const 0) (i32.const {name})
             (i32.const {name}) (i32.const {bytes})))
         (drop (call $output (i32.const 1024)
             (call $resp_read (i32.const 1024) (i32.const 0) (call $resp_len))))
         (select (i32.const 0) (local.get $code) (i32.ge_s (local.get $code) (i32.const 0)))"
    );
    signed(&forge_module(&memory, &body))
}

pub fn hashes() -> Order {
    let hash = ToolName::parse("crypto.hash").unwrap();
    let request = r#"{"algorithm":"sha256","text":"abc"}"#;
    let (program, authority) = (calls("crypto.hash", request), Authority::Tools(vec![hash]));
    Order { program, authority, ..submit(ECHO, "1") }
}

/// Starts three calls that nobody answers, and waits for one.
pub fn three_in_flight() -> Order {
    let wat = forge_module(
        r#"(memory (export "memory") 1) (data (i32.const 0) "test.never{}")"#,
        r#"(local $i i32)
           (loop $start
               (drop (call $call_async (i32.const 0) (i32.const 10) (i32.const 10) (i32.const 2)))
               (br_if $start (i32.lt_u
                   (local.tee $i (i32.add (local.get $i) (i32.const 1))) (i32.const 3))))
           (call $wait_any)"#,
    );
    let never = ToolName::parse("test.never").unwrap();
    Order { program: signed(&wat), authority: Authority::Tools(vec![never]), ..endless() }
}

pub fn run(client: &mut Client, order: &Order) -> Value {
    serde_json::from_slice(&client.run(order).unwrap().report).unwrap()
}

pub fn report(finish: &Finish) -> Value {
    serde_json::from_slice(&finish.report).unwrap()
}

pub fn send<T: codec::Encode>(link: &mut Link, kind: Kind, message: &T) {
    let mut bytes = Vec::new();
    frame::write_message(kind, message, &mut bytes);
    link.send(&bytes, patience()).unwrap();
}

/// A connection that has heard the service's hello.
pub fn stranger(service: &Service) -> Link {
    let mut link = Link::new(UnixStream::connect(&service.socket).unwrap());
    let frame = link.receive(|kind| kind == Kind::Hello, patience()).unwrap();
    let hello: Hello = codec::decode(&frame.payload).unwrap();
    assert_eq!(hello, Hello::ours(Role::Supervisor));
    link
}

/// A client that waits for no answer.
pub fn leaving_client(service: &Service, order: &Order) -> Link {
    let mut link = stranger(service);
    send(&mut link, Kind::Hello, &Hello::ours(Role::Client));
    send(&mut link, Kind::Submit, &Submit { number: 1, order: order.clone() });
    link
}

/// Whether the service has closed this connection; waits for it.
pub fn is_closed(mut socket: &UnixStream) -> bool {
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut rest = Vec::new();
    match socket.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// How the service stands, as this client may know.
pub fn standing(client: &mut Client) -> Value {
    let Reply::Status(text) = client.ask(Question::Status).unwrap() else { panic!("no status") };
    serde_json::from_str(&text).unwrap()
}

pub async fn status(client: &forge_client::Client) -> Value {
    let Reply::Status(text) = client.ask(Question::Status).await.unwrap() else { panic!() };
    serde_json::from_str(&text).unwrap()
}

/// Waits until the service says so of itself.
pub async fn stands(client: &forge_client::Client, what: &str, is_so: impl Fn(&Value) -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let status = status(client).await;
        if is_so(&status) {
            return;
        }
        assert!(Instant::now() < until, "it never came about that {what}: {status:#}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A configuration with the test server, and the log that it writes.
pub fn test_server(desk: &Desk) -> (String, PathBuf) {
    let server = executables::folder().join("forge-test-server");
    let log = desk.path("calls");
    // A server writes where it is let; as which user is the host's matter.
    fs::write(&log, "").unwrap();
    fs::set_permissions(&log, fs::Permissions::from_mode(0o666)).unwrap();
    let toml = format!(
        "[servers.test]\ncommand = {server:?}\nargs = ['--log', {log:?}]\nwrite = [{log:?}]\n",
    );
    (toml, log)
}

/// How many such lines there are.
pub fn lines(log: &Path, line: &str) -> usize {
    let log = fs::read_to_string(log).unwrap_or_default();
    log.lines().filter(|it| *it == line).count()
}

pub fn broker_pid(status: &Value) -> Option<i32> {
    status["broker"]["pid"].as_i64().and_then(|pid| pid.try_into().ok())
}

pub fn signal(service: &Service, signal: i32) {
    // SAFETY: a plain system call; the process is a child of ours.
    assert_eq!(unsafe { libc::kill(service.child.id() as i32, signal) }, 0);
}

pub fn kill(pid: i32) {
    signal_to(pid, libc::SIGKILL);
}

pub fn signal_to(pid: i32, signal: i32) {
    // SAFETY: a plain system call; the process was started by a service of ours.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}
