//! The service over AF_VSOCK: its clients are told apart by their CIDs. Needs
//! `vsock_loopback`, by which this host is the machine 1, and no KVM: programs
//! run in the tier `process`.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/executables.rs"]
mod executables;

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use executables::FORGE;
use forge_client::ClientError;
use forge_client::blocking::Client;
use forge_protocol::broker::{Authority, RefusalKind};
use forge_protocol::limits::RunLimits;
use forge_protocol::service::{Order, Question, Reply};
use serde_json::Value;
use support::{forge_module, signed, signer};
use vsock::{VMADDR_CID_ANY, VMADDR_CID_LOCAL, VsockListener, VsockStream};

fn main() -> ExitCode {
    support::main_where(
        "AF_VSOCK loopback",
        loopback().err().map(|why| format!("{why}; try: modprobe vsock_loopback")),
        claims![
            a_machine_runs_programs_for_its_principal_alone,
            a_machine_is_never_the_operator,
            a_machine_of_nobody_is_refused_once_and_closed,
            strangers_have_few_connections_and_take_none_from_others,
            who_speaks_for_whom_is_loaded_again,
            one_connection_carries_runs_larger_than_the_sockets_room,
            a_client_that_leaves_takes_its_run_with_it,
            the_command_reaches_a_service_by_its_address,
        ],
        claims![a_port_that_is_taken_ends_the_start_with_a_hint],
    )
}

/// Whether this host reaches itself.
fn loopback() -> std::io::Result<()> {
    let port = port();
    let _listener = VsockListener::bind_with_cid_port(VMADDR_CID_LOCAL, port)?;
    VsockStream::connect_with_cid_port(VMADDR_CID_LOCAL, port).map(|_| ())
}

/// A port of this test's own.
fn port() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    0x1000_0000 + std::process::id() % 0x40_0000 * 64 + NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A service in a folder of its own, both gone after the test.
struct Service {
    child: Option<Child>,
    folder: PathBuf,
    port: u32,
}

impl Service {
    /// Not started yet.
    fn prepared(port: u32) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        executables::folder();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("forge-vsock-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("signer.pub"), signer().trust_key().to_pem()).unwrap();
        Self { child: None, folder, port }
    }

    /// Serves; `principals` say who may come.
    fn start(principals: &str) -> Self {
        let mut service = Self::prepared(port());
        service.configure(principals);
        service.child = Some(service.spawn());
        service.eventually("the service listens", |it| {
            let ended = it.child.as_mut().unwrap().try_wait().unwrap();
            assert!(ended.is_none(), "the service ended: {ended:?}");
            Client::connect(&it.folder.join("socket")).is_ok()
        });
        service
    }

    fn configure(&self, principals: &str) {
        let text = format!(
            "[vm]\nisolation = 'process'\n[service]\ndrain_ms = 0\n[service.vsock]\nport = {}\n\
             {principals}",
            self.port
        );
        fs::write(self.folder.join("forge.toml"), text).unwrap();
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(FORGE);
        command.current_dir(&self.folder).args(arguments).stdin(Stdio::null());
        command
    }

    fn spawn(&self) -> Child {
        let all = ["serve", "--socket", "socket", "--trust", "signer.pub", "--state", "state"];
        let mut command = self.command(&all);
        command.args(["--config", "forge.toml"]).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// By AF_VSOCK, as the machine 1.
    fn machine(&self) -> Client {
        Client::connect_vsock(VMADDR_CID_LOCAL, self.port).unwrap()
    }

    /// How it stands, as the operator sees it.
    fn status(&self) -> Value {
        let mut operator = Client::connect(&self.folder.join("socket")).unwrap();
        status(&mut operator)
    }

    fn eventually(&mut self, what: &str, mut is_so: impl FnMut(&mut Self) -> bool) {
        let until = Instant::now() + Duration::from_secs(60);
        while !is_so(self) {
            assert!(Instant::now() < until, "it never came about that {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

const OURS: &str = "[principals.ci]\ncids = [1]\n[principals.qa]\ncids = [3]\n";
const NOBODYS: &str = "[principals.ci]\ncids = [3, 4]\n";

const ECHO: &str = "(drop (call $output (i32.const 0)
        (call $input_read (i32.const 0) (i32.const 0) (call $input_len))))
    (i32.const 0)";

fn order(principal: &str, body: &str, input: &str) -> Order {
    Order {
        program: signed(&forge_module(r#"(memory (export "memory") 8)"#, body)),
        input: input.into(),
        principal: principal.into(),
        session: None,
        authority: Authority::Tools(Vec::new()),
        limits: RunLimits { wall_ms: 30_000, ..RunLimits::default() },
        prepare: false,
        events: false,
        hosted: None,
    }
}

fn endless(principal: &str) -> Order {
    let maxima = RunLimits::operator_maxima();
    let limits = RunLimits { fuel: maxima.fuel, wall_ms: maxima.wall_ms, ..RunLimits::default() };
    Order { limits, ..order(principal, "(loop (br 0)) (unreachable)", "{}") }
}

fn run(client: &mut Client, order: &Order) -> Value {
    serde_json::from_slice(&client.run(order).unwrap().report).unwrap()
}

fn status(client: &mut Client) -> Value {
    let Reply::Status(text) = client.ask(Question::Status).unwrap() else { panic!("no status") };
    serde_json::from_str(&text).unwrap()
}

#[track_caller]
fn assert_forbidden(answer: Result<Reply, ClientError>) {
    assert!(
        matches!(answer, Err(ClientError::Refused { kind: RefusalKind::Forbidden, .. })),
        "{answer:?}"
    );
}

#[track_caller]
fn assert_rejected(report: &Value) {
    let how = (&report["status"], &report["kind"]);
    assert_eq!(how, (&"rejected".into(), &"forbidden".into()), "{report:#}");
}

fn a_machine_runs_programs_for_its_principal_alone() {
    let service = Service::start(OURS);
    let mut client = service.machine();
    let report = run(&mut client, &order("ci", ECHO, "[1]"));
    assert_eq!((&report["status"], &report["output"]), (&"ok".into(), &"[1]".into()), "{report:#}");
    for other in ["qa", "local", ""] {
        assert_rejected(&run(&mut client, &order(other, ECHO, "[1]")));
    }
    assert_forbidden(client.ask(Question::ListTools { principal: "qa".into() }));
    client.ask(Question::ListTools { principal: "ci".into() }).unwrap();
    // And the connection goes on.
    assert_eq!(run(&mut client, &order("ci", ECHO, "[2]"))["output"], "[2]");
}

fn a_machine_is_never_the_operator() {
    let service = Service::start(OURS);
    let mut client = service.machine();
    assert_forbidden(client.ask(Question::Drain));
    assert_forbidden(client.ask(Question::Metrics));
    // Who else is here is the operator's to know, over the other socket.
    let seen = status(&mut client);
    assert!(seen.get("principals").is_none(), "{seen:#}");
    let all = service.status();
    assert!(all.get("principals").is_some() && all["state"] == "serving", "{all:#}");
}

fn a_machine_of_nobody_is_refused_once_and_closed() {
    let service = Service::start(NOBODYS);
    let mut client = service.machine();
    assert_rejected(&run(&mut client, &order("ci", ECHO, "[1]")));
    let gone = client.run(&order("ci", ECHO, "[1]")).unwrap_err();
    assert!(matches!(gone, ClientError::Connection(_)), "{gone}");
    // What anybody else may ask is no stranger's either.
    for question in [
        Question::Status,
        Question::ListTools { principal: "ci".into() },
        Question::InspectGrant { token: b"none".to_vec() },
        Question::Drain,
    ] {
        let mut client = service.machine();
        assert_forbidden(client.ask(question));
        let gone = client.ask(Question::Status).unwrap_err();
        assert!(matches!(gone, ClientError::Connection(_)), "{gone}");
    }
    assert_eq!(service.status()["state"], "serving");
}

fn strangers_have_few_connections_and_take_none_from_others() {
    let mut service = Service::start(NOBODYS);
    let few: Vec<_> = (0..16).map(|_| service.machine()).collect();
    let more = Client::connect_vsock(VMADDR_CID_LOCAL, service.port);
    assert!(matches!(more, Err(ClientError::Connection(_))), "{more:?}");
    let mut operator = Client::connect(&service.folder.join("socket")).unwrap();
    assert_eq!(run(&mut operator, &order("local", ECHO, "[1]"))["output"], "[1]");
    drop(few);
    service.eventually("a place is free", |it| {
        Client::connect_vsock(VMADDR_CID_LOCAL, it.port).is_ok()
    });
}

fn who_speaks_for_whom_is_loaded_again() {
    let mut service = Service::start(NOBODYS);
    assert_rejected(&run(&mut service.machine(), &order("ci", ECHO, "[1]")));
    service.configure(OURS);
    let pid = service.child.as_ref().unwrap().id() as i32;
    // SAFETY: a plain system call; the process is a child of ours.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGHUP) }, 0);
    service.eventually("the machine speaks for its principal", |it| {
        run(&mut it.machine(), &order("ci", ECHO, "[1]"))["output"] == "[1]"
    });
}

fn one_connection_carries_runs_larger_than_the_sockets_room() {
    let service = Service::start(OURS);
    // A vsock's buffer is 256 KiB unless somebody says otherwise.
    let input = format!("\"{}\"", "x".repeat(400_000));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client =
            forge_client::Client::connect_vsock(VMADDR_CID_LOCAL, service.port).await.unwrap();
        let order = order("ci", ECHO, &input);
        let (a, b, c) = tokio::join!(client.run(&order), client.run(&order), client.run(&order));
        for finish in [a, b, c] {
            let report: Value = serde_json::from_slice(&finish.unwrap().report).unwrap();
            assert!(report["status"] == "ok" && report["output"] == input.as_str(), "{report:#}");
        }
    });
}

fn a_client_that_leaves_takes_its_run_with_it() {
    let mut service = Service::start(OURS);
    let mut client = service.machine();
    std::thread::scope(|scope| {
        let leaves = service.machine();
        drop(leaves);
        let port = service.port;
        // Dropped with its runtime, while its run goes on.
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let run = runtime.block_on(async {
            let client = forge_client::Client::connect_vsock(VMADDR_CID_LOCAL, port).await.unwrap();
            client.submit(&endless("ci")).await.unwrap()
        });
        service.eventually("it runs", |it| it.status()["runs"]["running"] == 1);
        // As a process that is killed: nothing is said any more.
        std::mem::forget(run);
        scope.spawn(move || drop(runtime));
    });
    service.eventually("its run is cancelled", |it| it.status()["runs"]["running"] == 0);
    assert_eq!(run(&mut client, &order("ci", ECHO, "[1]"))["output"], "[1]");
}

fn the_command_reaches_a_service_by_its_address() {
    let service = Service::start(OURS);
    fs::write(service.folder.join("program"), order("ci", ECHO, "").program).unwrap();
    let run = |address: &str, principal: &str| {
        let all = ["run", "--trust", "signer.pub", "--principal", principal, "--input", "[7]"];
        service.command(&all).args(["--service", address, "program"]).output().unwrap()
    };
    let address = format!("vsock:1:{}", service.port);
    let output = run(&address, "ci");
    assert!(output.status.success() && output.stdout.starts_with(b"[7]"), "{output:?}");
    assert_eq!(run(&address, "qa").status.code(), Some(3));
    let nobody = run(&format!("vsock:1:{}", port()), "ci");
    let said = String::from_utf8_lossy(&nobody.stderr).into_owned();
    assert!(!nobody.status.success() && said.contains("the service is not there"), "{said}");
}

fn a_port_that_is_taken_ends_the_start_with_a_hint() {
    let port = port();
    let taken = match VsockListener::bind_with_cid_port(VMADDR_CID_ANY, port) {
        Ok(taken) => taken,
        Err(error) => {
            eprintln!("SKIPPED: no AF_VSOCK here: {error}");
            return;
        }
    };
    let service = Service::prepared(port);
    service.configure(OURS);
    let output = service.spawn().wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("another [service.vsock] port"), "{said}");
    assert!(!service.folder.join("socket").exists(), "{said}");
    drop(taken);
}
