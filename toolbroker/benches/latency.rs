//! What the broker adds to a tool call, and what opening a run and
//! authorising a call cost.
//!
//! A real broker process answers `crypto.hash` on a run link; in the same
//! loop, turn about, a second process sends the same number of bytes back and
//! forth on a bare socket pair. So both meet the same machine, and their
//! ratio means more than either figure.
//!
//! `cargo bench -p forge-toolbroker --bench latency [-- ROUNDS]`

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use forge_protocol::RunId;
use forge_protocol::abi::CallCode;
use forge_protocol::broker::{Authority, Callable, GrantedTool, Reply, Request};
use forge_protocol::frame::{self, HEADER_BYTES, Kind};
use forge_protocol::guest::Call;
use forge_protocol::limits::RunLimits;
use forge_toolbroker::call::{Dispatcher, Run, Taken};
use forge_toolbroker::config::Config;
use forge_toolbroker::grant::{Issuer, Terms};
use forge_toolbroker::journal::{Journal, Place};
use forge_toolbroker::metrics::Metrics;
use forge_toolbroker::registry::Registry;
use forge_toolbroker::review::{Mode, Reviews};
use forge_toolbroker::verified::Verified;
use support::{Broker, Worker, grant_request, name, receive, run_request};

const REQUEST: &[u8] = br#"{"algorithm":"sha256","text":"the quick brown fox jumps over it"}"#;
const ROUNDS: usize = 2_000;
/// Runs are opened one after another, each with its own connection.
const OPENINGS: usize = 500;
/// A run's calls are bounded, so the bench takes a new run now and then.
const CALLS_PER_RUN: usize = 5_000;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, echo, back, forth] = arguments.as_slice()
        && echo == "--echo"
    {
        return echo_for_ever(back.parse().unwrap(), forth.parse().unwrap());
    }
    let rounds = arguments.iter().find_map(|it| it.parse().ok()).unwrap_or(ROUNDS);
    let folder = tempfile::tempdir().unwrap();
    let mut broker = Broker::spawn_logging(folder, &[], "warn");
    broker.say_hello();
    calls(&mut broker, rounds);
    openings(&mut broker);
    authorisation(rounds);
    steps(&mut broker, "of all those calls");
    effects(rounds / 10);
}

/// Calls of a real MCP server over stdio, by what the operator says they do:
/// the difference is what the journal costs.
fn effects(rounds: usize) {
    println!("{rounds} rounds of test.echo over stdio, by effect");
    for effect in ["none", "read", "write"] {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("forge.toml");
        let server = support::test_server();
        let text = format!(
            "[servers.test]\ncommand = {server:?}\n[tools.\"test.echo\"]\neffect = \"{effect}\"\n"
        );
        std::fs::write(&config, text).unwrap();
        let config = ["--config".to_owned(), config.to_str().unwrap().to_owned()];
        let mut broker = Broker::spawn_logging(folder, &config, "warn");
        broker.say_hello();
        let limits = RunLimits { calls: 10_000, wall_ms: 600_000, ..RunLimits::default() };
        let mut worker = broker.run(&["test.echo"], limits);
        let mut samples = Vec::new();
        for round in 0..rounds + rounds / 10 {
            let began = Instant::now();
            worker.send("test.echo", br#"{"text": "the quick brown fox"}"#);
            assert_eq!(worker.settled().code, None);
            if round >= rounds / 10 {
                samples.push(began.elapsed());
            }
        }
        show(effect, samples);
        let began = Instant::now();
        assert_eq!(broker.ask(&Request::Sync), Reply::Synced);
        println!("{:28} {:8.1} us", "  Sync behind them", began.elapsed().as_secs_f64() * 1e6);
        steps(&mut broker, effect);
    }
}

/// What the broker itself counted of its steps: the bucket that the median
/// falls into.
fn steps(broker: &mut Broker, of: &str) {
    let Reply::Metrics(text) = broker.ask(&Request::Metrics) else { panic!("no metrics") };
    for step in ["call_authorisation", "call_intent", "call_dispatch", "journal_commit"] {
        let name = format!("forge_{step}_seconds");
        let value = |line: &str| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap();
        let count = text.lines().find(|line| line.starts_with(&format!("{name}_count")));
        let half = value(count.unwrap()).div_ceil(2);
        let median = text
            .lines()
            .filter(|line| line.starts_with(&format!("{name}_bucket")))
            .find(|line| value(line) >= half)
            .and_then(|line| line.split('"').nth(1))
            .unwrap();
        println!("{:28} p50 <= {median} s, {of}", format!("  {step}"));
    }
}

/// What it takes to say whether a call is allowed, without a process and
/// without a word on a link: grant, size, definition, schema, constraints,
/// budget. The budget is zero, so that each call passes everything before it
/// and nothing is carried out.
fn authorisation(rounds: usize) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let registry = Arc::new(Registry::new(Config::default(), runtime.handle()));
    let tool = Arc::clone(registry.builtin(&name("crypto.hash")).unwrap().tool());
    let folder = tempfile::tempdir().unwrap();
    let metrics = Arc::new(Metrics::default());
    let journal = Journal::new(Place::Folder(folder.path().into()), Arc::clone(&metrics));
    let reviews = Arc::new(Reviews::open(Mode::FirstUse, None).unwrap());
    let home = runtime.handle().clone();
    let dispatcher = Dispatcher::new(registry, reviews, journal, metrics, home);
    let constraints = ["/algorithm=\"sha256\"", "/text^=the ", "/text=~[a-z ]{1,100}"];
    for (what, constraints) in [("no constraint", &[][..]), ("3 constraints", &constraints)] {
        let granted = GrantedTool {
            name: tool.name().clone(),
            definition_sha256: tool.sha256(),
            constraints: constraints.iter().map(|&text| text.to_owned()).collect(),
        };
        let terms = Terms {
            principal: "alice".to_owned(),
            tools: vec![granted],
            valid_s: 600,
            calls_max: Some(0),
            cost_max: None,
            session: None,
        };
        let verified = Verified::new(Issuer::ephemeral());
        let token = verified.issuer().issue(&terms, SystemTime::now()).unwrap();
        let grant = verified.verify(&token, SystemTime::now()).unwrap();
        let run =
            Arc::new(Run::new(RunId([1; 16]), [0; 32], Callable::Any, grant, RunLimits::default()));
        let call =
            Call { id: 0, waits: true, tool: name("crypto.hash"), request: REQUEST.to_vec() };
        let mut took = Vec::new();
        for round in 0..rounds + rounds / 10 {
            let began = Instant::now();
            let settled = match dispatcher.take(&run, call.clone()) {
                Taken::Settled(settled) => settled,
                // The first one waits for the journal.
                Taken::Pending(call) => runtime.block_on(dispatcher.carry_out(call)),
            };
            let elapsed = began.elapsed();
            assert_eq!(settled.code, Some(CallCode::BudgetSpent));
            if round >= rounds / 10 {
                took.push(elapsed);
            }
        }
        show(&format!("authorisation, {what}"), took);
    }
}

fn calls(broker: &mut Broker, rounds: usize) {
    let mut worker = open(broker);
    let call = frame_of(0);
    worker.link.write_all(&call).unwrap();
    let settled = receive(&mut worker.link).unwrap().1;
    let (there, back) = (call.len(), HEADER_BYTES + settled.len());
    let (mut link, mut echo) = echo(there, back);

    let (mut bare, mut called) = (Vec::new(), Vec::new());
    let mut next = 1;
    let (out, mut answer) = (vec![7; there], vec![0; back]);
    for round in 0..rounds + rounds / 10 {
        if next == CALLS_PER_RUN {
            worker = open(broker);
            next = 0;
        }
        let began = Instant::now();
        link.write_all(&out).unwrap();
        link.read_exact(&mut answer).unwrap();
        let ping_pong = began.elapsed();

        let call = frame_of(next as u32);
        next += 1;
        let began = Instant::now();
        worker.link.write_all(&call).unwrap();
        let mut header = [0; HEADER_BYTES];
        worker.link.read_exact(&mut header).unwrap();
        let mut payload = vec![0; u32::from_le_bytes(header[..4].try_into().unwrap()) as usize];
        worker.link.read_exact(&mut payload).unwrap();
        let took = began.elapsed();
        // The first tenth warms up.
        if round >= rounds / 10 {
            bare.push(ping_pong);
            called.push(took);
        }
    }
    drop(link);
    echo.wait().unwrap();
    println!("{rounds} rounds of {there} bytes there and {back} back");
    let (bare, called) = (show("bare ping-pong", bare), show("crypto.hash on a run link", called));
    let over = called.as_secs_f64() - 1.5 * bare.as_secs_f64();
    println!("{:28} {:8.2} ping-pongs", "  is", called.as_secs_f64() / bare.as_secs_f64());
    println!("{:28} {:8.1} us over 1.5 ping-pongs", "  or", over * 1e6);
}

fn openings(broker: &mut Broker) {
    let tools = || vec![name("crypto.hash")];
    let request = Request::IssueGrant(grant_request(&["crypto.hash"]));
    let Reply::Grant(token) = broker.ask(&request) else { panic!("no grant") };
    let list = || Request::ListTools { principal: "alice".to_owned() };
    let (mut listed, mut granted, mut named) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..OPENINGS + OPENINGS / 10 {
        let began = Instant::now();
        assert!(matches!(broker.ask(&list()), Reply::Tools { .. }));
        let list = began.elapsed();
        let mut opened = |authority| {
            let began = Instant::now();
            broker.open(run_request("alice", authority, RunLimits::default())).unwrap();
            began.elapsed()
        };
        let by_grant = opened(Authority::Grant(token.clone()));
        let by_name = opened(Authority::Tools(tools()));
        if round >= OPENINGS / 10 {
            listed.push(list);
            granted.push(by_grant);
            named.push(by_name);
        }
    }
    println!("{OPENINGS} rounds on the control link");
    show("ListTools", listed);
    show("OpenRun with a grant", granted);
    show("OpenRun with tools named", named);
}

fn open(broker: &mut Broker) -> Worker {
    let limits = RunLimits { calls: 10_000, wall_ms: 600_000, ..RunLimits::default() };
    broker.run(&["crypto.hash"], limits)
}

fn frame_of(id: u32) -> Vec<u8> {
    let call = Call { id, waits: true, tool: name("crypto.hash"), request: REQUEST.to_vec() };
    let mut bytes = Vec::new();
    frame::write_message(Kind::Call, &call, &mut bytes);
    bytes
}

/// Prints the spread and gives the median.
fn show(what: &str, mut samples: Vec<Duration>) -> Duration {
    samples.sort_unstable();
    let at = |part: f64| samples[((samples.len() - 1) as f64 * part) as usize];
    let us = |part| at(part).as_secs_f64() * 1e6;
    println!("{what:28} {:8.1} us p50 {:8.1} p95 {:8.1} p99", us(0.5), us(0.95), us(0.99));
    at(0.5)
}

/// The other end of the bare socket pair: this program again.
fn echo(there: usize, back: usize) -> (UnixStream, Child) {
    let (near, far) = UnixStream::pair().unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--echo", &there.to_string(), &back.to_string()])
        .stdin(Stdio::from(OwnedFd::from(far)))
        .spawn()
        .unwrap();
    (near, child)
}

fn echo_for_ever(there: usize, back: usize) {
    use std::os::fd::AsFd as _;
    let mut link = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let (mut request, answer) = (vec![0; there], vec![9; back]);
    while link.read_exact(&mut request).is_ok() {
        if link.write_all(&answer).is_err() {
            return;
        }
    }
}
