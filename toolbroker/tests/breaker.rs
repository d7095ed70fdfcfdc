//! Servers that go away and come back: a call to one that failed again and
//! again fails at once, without a byte to anybody, until its wait is over.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forge_protocol::abi::CallCode;
use forge_protocol::broker::{RefusalKind, Reply, Request};
use forge_protocol::limits::{CALLS_MAX, RunLimits};
use serde_json::json;
use support::web::{Era, Mcp, Web};
use support::{Broker, PATIENCE, Worker, grant_request, server_processes, test_server};

fn broker(web: &Web) -> Broker {
    Broker::with_config(&json!({"mcpServers": {"web": {"url": web.url("/mcp")}}}))
}

fn limits() -> RunLimits {
    RunLimits { wall_ms: 120_000, ..RunLimits::default() }
}

/// Calls until it is answered.
fn until_answered(worker: &mut Worker, tool: &str) {
    let until = Instant::now() + PATIENCE;
    while worker.call(tool, &json!({})).0.is_some() {
        assert!(Instant::now() < until, "never tried again");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_server_that_went_away_is_left_alone_and_found_again_when_it_is_back() {
    let mcp = Mcp::new(Era::Session);
    let web = mcp.serve();
    let address = web.address;
    let mut broker = broker(&web);
    let mut worker = broker.run(&["web.echo"], limits());
    assert_eq!(worker.call("web.echo", &json!({})).0, None);
    drop(web);
    let mut said = String::new();
    let until = Instant::now() + PATIENCE;
    while !said.contains("cannot be used now, and is tried again in") {
        let (code, error) = worker.call("web.echo", &json!({}));
        said = error.to_string();
        assert!(code.is_some(), "nobody is there: {said}");
        assert_ne!(code, Some(CallCode::Denied));
        assert!(Instant::now() < until, "it never opened: {said}");
    }
    assert!(!said.contains("cannot be reached"), "why is the operator's to know: {said}");
    // It is no wrong name: who asks for a grant may come again.
    match broker.ask(&Request::IssueGrant(grant_request(&["web.echo"]))) {
        Reply::Refused { kind: RefusalKind::ServerAway, .. } => {}
        other => panic!("{other:?}"),
    }
    // While it is open, whoever is there now hears nothing for a moment; then
    // it is asked again, in a new session.
    let before = mcp.calls("echo");
    let _web = Web::serve_at(address, mcp.router());
    until_answered(&mut worker, "web.echo");
    assert_eq!(mcp.calls("echo"), before + 1);
}

#[test]
fn a_server_whose_answers_break_off_is_left_alone_though_it_stands() {
    let mcp = Mcp::new(Era::NoSession);
    let web = mcp.serve();
    let mut broker = broker(&web);
    let mut worker = broker.run(&["web.die", "web.echo"], limits());
    let until = Instant::now() + PATIENCE;
    let error = loop {
        let before = mcp.get().seen.len();
        let (code, error) = worker.call("web.die", &json!({}));
        if code == Some(CallCode::NoSuchTool) {
            assert_eq!(mcp.get().seen.len(), before, "not one byte");
            break error["error"].as_str().unwrap().to_owned();
        }
        assert_eq!(code, Some(CallCode::OutcomeUnknown), "{error}");
        assert!(Instant::now() < until, "it never opened: {error}");
    };
    assert!(mcp.calls("die") >= 2 && error.contains("is tried again in"), "{error}");
    until_answered(&mut worker, "web.echo");
    // An answer closes it: the next failure is tried again at once.
    assert_eq!(worker.call("web.die", &json!({})).0, Some(CallCode::OutcomeUnknown));
    assert_eq!(worker.call("web.echo", &json!({})).0, None);
}

#[test]
fn a_program_that_dies_at_once_is_left_alone_too() {
    let mut broker =
        Broker::with_config(&json!({"mcpServers": {"gone": {"command": "/bin/false"}}}));
    let ask = forge_protocol::broker::Request::ListTools { principal: "alice".into() };
    let mut said = format!("{:?}", broker.ask(&ask));
    assert!(said.contains("did not start") && !said.contains("in a row"), "{said}");
    let until = Instant::now() + PATIENCE;
    while !said.contains("times in a row and is tried again in") {
        assert!(Instant::now() < until, "it never opened: {said}");
        said = format!("{:?}", broker.ask(&ask));
    }
}

/// How many kills a run lives through: its limits, of time and of calls, are far
/// from used up then, on the busiest host.
const KILLS_OF_A_RUN: u64 = 100;

/// `FORGE_SERVER_KILLS` says how often (100; thousands to look for a window of
/// microseconds).
#[test]
fn a_call_is_settled_however_close_it_comes_to_the_end_of_its_server() {
    let kills = std::env::var("FORGE_SERVER_KILLS").map_or(100, |text| text.parse().unwrap());
    let mut broker = Broker::with_config(&json!({"mcpServers": {
        "test": {"command": test_server()},
    }}));
    let id = broker.child.id();
    let mut done = 0;
    while done < kills {
        let some = KILLS_OF_A_RUN.min(kills - done);
        let workers = std::array::from_fn(|_| {
            broker.run(&["test.echo"], RunLimits { calls: CALLS_MAX, ..limits() })
        });
        call_while_their_server_is_killed(workers, id, some);
        done += some;
    }
}

/// Each of the workers calls on while the servers of `broker`, a process, are
/// killed `kills` times, each time after some calls were answered.
fn call_while_their_server_is_killed(workers: [Worker; 4], broker: u32, kills: u64) {
    let (answered, over) = (&AtomicU64::new(0), &AtomicBool::new(false));
    std::thread::scope(|scope| {
        for mut worker in workers {
            scope.spawn(move || {
                while !over.load(Ordering::Acquire) {
                    let (code, _) = worker.call("test.echo", &json!({"text": "x"}));
                    match code {
                        None => drop(answered.fetch_add(1, Ordering::AcqRel)),
                        Some(CallCode::OutcomeUnknown | CallCode::NoSuchTool) => {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                        Some(code) => panic!("{code:?}"),
                    }
                }
            });
        }
        let _over = Over(over);
        for kill in 0..kills {
            let before = answered.load(Ordering::Acquire);
            let until = Instant::now() + PATIENCE;
            while answered.load(Ordering::Acquire) < before + 4 {
                assert!(Instant::now() < until, "no call is settled any more");
                std::thread::sleep(Duration::from_micros(200 + kill * 37 % 1_000));
            }
            for server in server_processes(broker) {
                let server = rustix::process::Pid::from_raw(server.try_into().unwrap()).unwrap();
                let _ = rustix::process::kill_process(server, rustix::process::Signal::KILL);
            }
        }
    });
}

/// Has the callers stop, whatever happens.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
