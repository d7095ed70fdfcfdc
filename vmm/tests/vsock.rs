//! The service over AF_VSOCK: its clients are told apart by their CIDs. Needs
//! `vsock_loopback`, by which this host is the machine 1, and no KVM: programs
//! run in the tier `process`.

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

use std::io::{BufRead as _, BufReader};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};

use desk::Desk;
use forge_client::ClientError;
use forge_client::blocking::Client;
use forge_protocol::broker::RefusalKind;
use forge_protocol::service::{Order, Question, Reply};
use serde_json::Value;
use serving::{ECHO, Service, desk, run, runtime, signal, standing, submit};
use support::{eventually, forge_module, signed};
use vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VMADDR_CID_LOCAL, VsockListener, VsockStream};

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
        claims![
            a_port_that_is_taken_ends_the_start_with_a_hint,
            a_service_that_no_machine_of_its_host_reaches_says_so,
        ],
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

/// A service that machines reach, both it and its desk gone after the test.
struct Host {
    service: Service,
    desk: Desk,
    port: u32,
}

/// What serves there on this port; `principals` say who may come.
fn configure(desk: &Desk, port: u32, principals: &str) {
    let text = format!(
        "[vm]\nisolation = 'process'\n[service]\ndrain_ms = 0\n[service.vsock]\nport = {port}\n\
         {principals}",
    );
    desk.write("forge.toml", text);
}

impl Host {
    fn start(principals: &str) -> Self {
        let (desk, port) = (desk(), port());
        configure(&desk, port, principals);
        Self { service: desk.serve(&["--config", "forge.toml"]), desk, port }
    }

    /// By AF_VSOCK, as the machine 1.
    fn machine(&self) -> Client {
        Client::connect_vsock(VMADDR_CID_LOCAL, self.port).unwrap()
    }

    /// How it stands, as the operator sees it.
    fn status(&self) -> Value {
        standing(&mut self.service.client())
    }
}

const OURS: &str = "[principals.ci]\ncids = [1]\n[principals.qa]\ncids = [3]\n";
const NOBODYS: &str = "[principals.ci]\ncids = [3, 4]\n";

fn order(principal: &str, body: &str, input: &str) -> Order {
    let program = signed(&forge_module(r#"(memory (export "memory") 8)"#, body));
    Order { program, principal: principal.into(), ..submit(body, input) }
}

fn endless(principal: &str) -> Order {
    Order { principal: principal.into(), ..serving::endless() }
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
    let host = Host::start(OURS);
    let mut client = host.machine();
    let report = run(&mut client, &order("ci", ECHO, "[1]"));
    assert_eq!((&report["status"], &report["output"]), (&"ok".into(), &"[1]".into()), "{report:#}");
    for other in ["qa", "local"] {
        assert_rejected(&run(&mut client, &order(other, ECHO, "[1]")));
    }
    let nobodys = run(&mut client, &order("", ECHO, "[1]"));
    assert_eq!(nobodys["kind"], "bad_request", "{nobodys:#}");
    assert_forbidden(client.ask(Question::ListTools { principal: "qa".into() }));
    client.ask(Question::ListTools { principal: "ci".into() }).unwrap();
    // And the connection goes on.
    assert_eq!(run(&mut client, &order("ci", ECHO, "[2]"))["output"], "[2]");
}

fn a_machine_is_never_the_operator() {
    let host = Host::start(OURS);
    let mut client = host.machine();
    assert_forbidden(client.ask(Question::Drain));
    assert_forbidden(client.ask(Question::Metrics));
    // Who else is here is the operator's to know, over the other socket.
    let seen = standing(&mut client);
    assert!(seen.get("principals").is_none(), "{seen:#}");
    let all = host.status();
    assert!(all.get("principals").is_some() && all["state"] == "serving", "{all:#}");
}

fn a_machine_of_nobody_is_refused_once_and_closed() {
    let host = Host::start(NOBODYS);
    let mut client = host.machine();
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
        let mut client = host.machine();
        assert_forbidden(client.ask(question));
        let gone = client.ask(Question::Status).unwrap_err();
        assert!(matches!(gone, ClientError::Connection(_)), "{gone}");
    }
    assert_eq!(host.status()["state"], "serving");
}

fn strangers_have_few_connections_and_take_none_from_others() {
    let host = Host::start(NOBODYS);
    let few: Vec<_> = (0..16).map(|_| host.machine()).collect();
    let more = Client::connect_vsock(VMADDR_CID_LOCAL, host.port);
    assert!(matches!(more, Err(ClientError::Connection(_))), "{more:?}");
    let mut operator = host.service.client();
    assert_eq!(run(&mut operator, &order("local", ECHO, "[1]"))["output"], "[1]");
    drop(few);
    eventually("a place is free", || Client::connect_vsock(VMADDR_CID_LOCAL, host.port).is_ok());
}

fn who_speaks_for_whom_is_loaded_again() {
    let host = Host::start(NOBODYS);
    assert_rejected(&run(&mut host.machine(), &order("ci", ECHO, "[1]")));
    configure(&host.desk, host.port, OURS);
    signal(&host.service, libc::SIGHUP);
    eventually("the machine speaks for its principal", || {
        run(&mut host.machine(), &order("ci", ECHO, "[1]"))["output"] == "[1]"
    });
}

fn one_connection_carries_runs_larger_than_the_sockets_room() {
    let host = Host::start(OURS);
    // A vsock's buffer is 256 KiB unless somebody says otherwise.
    let input = format!("\"{}\"", "x".repeat(400_000));
    runtime().block_on(async {
        let client =
            forge_client::Client::connect_vsock(VMADDR_CID_LOCAL, host.port).await.unwrap();
        let order = order("ci", ECHO, &input);
        let (a, b, c) = tokio::join!(client.run(&order), client.run(&order), client.run(&order));
        for finish in [a, b, c] {
            let report: Value = serde_json::from_slice(&finish.unwrap().report).unwrap();
            assert!(report["status"] == "ok" && report["output"] == input.as_str(), "{report:#}");
        }
    });
}

fn a_client_that_leaves_takes_its_run_with_it() {
    let host = Host::start(OURS);
    let mut client = host.machine();
    std::thread::scope(|scope| {
        let leaves = host.machine();
        drop(leaves);
        let port = host.port;
        // Dropped with its runtime, while its run goes on.
        let runtime = runtime();
        let run = runtime.block_on(async {
            let client = forge_client::Client::connect_vsock(VMADDR_CID_LOCAL, port).await.unwrap();
            client.submit(&endless("ci")).await.unwrap()
        });
        eventually("it runs", || host.status()["runs"]["running"] == 1);
        // As a process that is killed: nothing is said any more.
        std::mem::forget(run);
        scope.spawn(move || drop(runtime));
    });
    eventually("its run is cancelled", || host.status()["runs"]["ended"]["cancelled"] == 1);
    assert_eq!(run(&mut client, &order("ci", ECHO, "[1]"))["output"], "[1]");
}

fn the_command_reaches_a_service_by_its_address() {
    let host = Host::start(OURS);
    host.desk.write("program", order("ci", ECHO, "").program);
    let run = |address: &str, principal: &str| {
        let all = ["run", "--principal", principal, "--input", "[7]"];
        host.desk.command(&all).args(["--service", address, "program"]).output().unwrap()
    };
    let address = format!("vsock:1:{}", host.port);
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
    let desk = desk();
    configure(&desk, port, OURS);
    let output = desk.serves(&["--config", "forge.toml"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("another [service.vsock] port"), "{said}");
    assert!(!desk.socket().exists(), "{said}");
    drop(taken);
}

fn a_service_that_no_machine_of_its_host_reaches_says_so() {
    let is_there = |cid| VsockListener::bind_with_cid_port(cid, port()).is_ok();
    if !is_there(VMADDR_CID_ANY) {
        eprintln!("SKIPPED: no AF_VSOCK here");
        return;
    }
    let desk = desk();
    configure(&desk, port(), OURS);
    let mut command = desk.serves(&["--config", "forge.toml"]);
    let mut service = command.spawn().unwrap();
    let mut lines = BufReader::new(service.stderr.take().unwrap()).lines().map_while(Result::ok);
    let serves = |line: &String| line.contains("serving at vsock");
    let said: Vec<String> = lines.by_ref().take_while(|line| !serves(line)).collect();
    let warns = said.iter().any(|line| line.contains("no machine of this host can connect"));
    let is_reached = is_there(VMADDR_CID_LOCAL) || is_there(VMADDR_CID_HOST);
    serving::signal_to(service.id() as i32, libc::SIGTERM);
    assert!(service.wait().unwrap().success(), "{said:?}");
    assert_eq!(warns, !is_reached, "{said:?}");
}
