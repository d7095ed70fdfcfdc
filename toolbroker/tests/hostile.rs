//! Tool servers that break the protocol, and what is left of it: a real server
//! that speaks MCP by hand (`forge-test-server --raw`), beside one that is
//! well. Whatever the first does, the broker lives, tells no credential, takes
//! no more memory than it says, and the second is served.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use forge_protocol::abi::CallCode;
use forge_protocol::broker::{Authority, ListedTool, Reply, Request};
use forge_protocol::limits::RunLimits;
use serde_json::{Value, json};
use support::{Broker, CANARY, name, run_request, test_server};

fn limits() -> RunLimits {
    RunLimits { wall_ms: 60_000, ..RunLimits::default() }
}

/// A broker with a raw server that gives this list of tools, and a good one.
fn broker(list: &str) -> Broker {
    Broker::with_config(&json!({"mcpServers": {
        "raw": {"command": test_server(), "args": ["--raw", list],
                "env": {"TEST_TOKEN": "${CANARY}"}},
        "good": {"command": test_server()},
    }}))
}

fn listed(broker: &mut Broker) -> (Vec<ListedTool>, Vec<(String, String)>) {
    match broker.ask(&Request::ListTools { principal: "alice".into() }) {
        Reply::Tools { tools, unavailable } => (tools, unavailable),
        other => panic!("{other:?}"),
    }
}

/// The names of the raw server's tools.
fn raw_names(broker: &mut Broker) -> Vec<String> {
    let (tools, unavailable) = listed(broker);
    assert_eq!(unavailable, []);
    let names = tools.iter().map(|tool| tool.spec.name.as_str());
    names.filter_map(|name| Some(name.strip_prefix("raw.")?.to_owned())).collect()
}

/// That the good server is served, and what the broker logged.
fn well(mut broker: Broker) -> String {
    let mut worker = broker.run(&["good.echo"], limits());
    assert_eq!(worker.call("good.echo", &json!({"text": "x"})), (None, json!({"text": "x"})));
    drop(worker);
    let (status, log) = broker.finish();
    assert!(status.success(), "{log}");
    assert!(!log.contains(CANARY), "{log}");
    assert!(!log.contains("panicked"), "{log}");
    log
}

/// The text of a result without structure.
fn text(said: &Value) -> &str {
    said[0]["text"].as_str().unwrap()
}

#[test]
fn attack_23_a_list_of_tools_without_end_is_given_up_before_it_fills_the_memory() {
    let mut broker = broker("heavy");
    let (_, unavailable) = listed(&mut broker);
    let [(server, why)] = unavailable.as_slice() else { panic!("{unavailable:?}") };
    // Whichever bound a host this slow comes to first.
    let is_bounded = why.contains("MiB") || why.contains("tools/list took more than");
    assert!(server == "raw" && is_bounded, "{why}");
    assert!(broker.peak_mib() < 512, "{} MiB", broker.peak_mib());
    well(broker);
}

#[test]
fn attack_20_a_tool_that_is_named_after_a_credential_is_neither_offered_nor_logged() {
    let mut broker = broker("names");
    let (tools, _) = listed(&mut broker);
    assert!(!format!("{tools:?}").contains(CANARY));
    assert_eq!(raw_names(&mut broker), ["fine"]);
    let log = well(broker);
    assert_eq!(log.matches("tool left out").count(), 3, "{log}");
}

#[test]
fn attack_6_names_that_look_alike_are_other_tools_and_the_first_of_two_counts() {
    let mut broker = broker("twins");
    let (tools, _) = listed(&mut broker);
    let echo: Vec<_> = tools.iter().filter(|tool| tool.spec.name.as_str() == "raw.echo").collect();
    assert_eq!(echo.len(), 1);
    assert_eq!(echo[0].spec.description, "The first.");
    let names = raw_names(&mut broker);
    // Neither the one without a name nor the one with a NUL in it.
    assert_eq!(names.len(), 6, "{names:?}");
    let mut worker = broker.run(&["raw.echo"], limits());
    assert_eq!(worker.call("raw.echo", &json!({})).0, None);
    for name in names.iter().filter(|name| *name != "echo") {
        let (code, _) = worker.call(&format!("raw.{name}"), &json!({}));
        assert_eq!(code, Some(CallCode::Denied), "{name:?}");
    }
    drop(worker);
    well(broker);
}

#[test]
fn attack_14_an_answer_to_a_call_that_is_not_out_is_nobodys() {
    let mut broker = broker("plain");
    let mut worker = broker.run(&["raw.wrong_ids"], limits());
    for _ in 0..3 {
        let (code, said) = worker.call("raw.wrong_ids", &json!({}));
        assert_eq!((code, text(&said)), (None, "its own"));
    }
    drop(worker);
    well(broker);
}

#[test]
fn attack_21_a_definition_that_changes_in_mid_call_denies_the_next_call() {
    let mut broker = broker("plain");
    let mut worker = broker.run(&["raw.mid_call"], limits());
    let (code, said) = worker.call("raw.mid_call", &json!({}));
    assert_eq!((code, text(&said)), (None, "said"), "it was granted as it was then");
    let (code, why) = worker.call("raw.mid_call", &json!({}));
    assert_eq!(code, Some(CallCode::Denied), "{why}");
    assert!(why["error"].as_str().unwrap().contains("definition"), "{why}");
    drop(worker);
    well(broker);
}

#[test]
fn attack_23_a_flood_of_requests_and_notifications_takes_no_memory_and_holds_up_nobody() {
    let mut broker = broker("plain");
    // Shorter than an answer is waited for here.
    let limits = RunLimits { wall_ms: 30_000, ..limits() };
    let mut worker = broker.run(&["raw.flood", "good.echo"], limits);
    worker.send("raw.flood", b"{}");
    let echo = worker.send("good.echo", br#"{"text": "meanwhile"}"#);
    assert_eq!(worker.settled().id, echo, "the other server is not held up");
    let flood = worker.settled();
    assert!(flood.code.is_none() || flood.code == Some(CallCode::OutcomeUnknown), "{flood:?}");
    assert!(broker.peak_mib() < 100, "{} MiB", broker.peak_mib());
    drop(worker);
    well(broker);
}

#[test]
fn attack_23_a_result_of_millions_of_values_takes_no_more_memory_than_others() {
    let mut broker = broker("plain");
    let mut worker = broker.run(&["raw.many", "raw.wrong_ids"], limits());
    let (code, why) = worker.call("raw.many", &json!({}));
    assert_eq!(code, Some(CallCode::BadResponse), "{why}");
    // Nobody else's call ends with it: the server is the same.
    let (code, said) = worker.call("raw.wrong_ids", &json!({}));
    assert_eq!((code, text(&said)), (None, "its own"));
    assert!(broker.peak_mib() < 128, "{} MiB", broker.peak_mib());
    drop(worker);
    well(broker);
}

#[test]
fn attack_23_a_server_that_hangs_up_or_listens_no_more_leaves_the_outcome_unknown() {
    let mut broker = broker("plain");
    let limits = RunLimits { wall_ms: 5_000, request_bytes: 1 << 20, ..RunLimits::default() };
    let mut worker = broker.run(&["raw.half"], limits.clone());
    assert_eq!(worker.call("raw.half", &json!({})).0, Some(CallCode::OutcomeUnknown));
    // More than any pipe holds.
    let much = json!({ "x": "y".repeat(500_000) });
    let mut worker = broker.run(&["raw.deaf"], limits);
    assert_eq!(worker.call("raw.deaf", &json!({})).0, Some(CallCode::OutcomeUnknown));
    let mut worker = broker.run(
        &["raw.deaf"],
        RunLimits { request_bytes: 1 << 20, wall_ms: 5_000, ..RunLimits::default() },
    );
    assert_eq!(worker.call("raw.deaf", &much).0, Some(CallCode::OutcomeUnknown));
    drop(worker);
    well(broker);
}

#[test]
fn attack_23_a_server_that_listens_no_more_is_not_kept_everything_for() {
    let mut broker = broker("plain");
    // Sending takes seconds where much else runs.
    let limits = RunLimits {
        wall_ms: 15_000,
        request_bytes: 1 << 20,
        calls_in_flight: 64,
        ..RunLimits::default()
    };
    let much = json!({ "x": "y".repeat(1_000_000) }).to_string();
    let mut refused_of = |principals: &[&str]| {
        let tools = || Authority::Tools(vec![name("raw.deaf")]);
        let mut workers: Vec<_> = principals
            .iter()
            .map(|it| broker.open(run_request(it, tools(), limits.clone())).unwrap().0)
            .collect();
        for worker in &mut workers {
            for _ in 0..48 {
                worker.send("raw.deaf", much.as_bytes());
            }
        }
        let mut refused = 0;
        for worker in &mut workers {
            for _ in 0..48 {
                let settled = worker.settled();
                let why = String::from_utf8_lossy(&settled.body).into_owned();
                if settled.code == Some(CallCode::ToolFailed) {
                    assert!(why.contains("takes nothing"), "{why}");
                    refused += 1;
                }
            }
        }
        refused
    };
    // What waits for it has 64 MiB, of which one principal has half: the others' requests
    // wait for their turn.
    assert_eq!(refused_of(&["alice"]), 0);
    let refused = refused_of(&["alice", "bob", "carol"]);
    assert!((1..=3 * 48 - 60).contains(&refused), "{refused}");
    well(broker);
}

#[test]
fn attack_23_a_server_that_hangs_up_and_takes_nothing_holds_up_no_call() {
    let mut broker = broker("plain");
    // Longer than an answer is waited for here.
    let limits = RunLimits { wall_ms: 120_000, request_bytes: 1 << 20, ..RunLimits::default() };
    let mut worker = broker.run(&["raw.mute"], limits);
    worker.send("raw.mute", b"{}");
    worker.send("raw.mute", json!({ "x": "y".repeat(500_000) }).to_string().as_bytes());
    for _ in 0..2 {
        assert_eq!(worker.settled().code, Some(CallCode::OutcomeUnknown));
    }
    drop(worker);
    well(broker);
}

#[test]
fn attack_15_nonsense_before_an_answer_is_skipped_and_strange_text_is_only_text() {
    let mut broker = broker("plain");
    let mut worker = broker.run(&["raw.nonsense"], limits());
    let (code, said) = worker.call("raw.nonsense", &json!({}));
    assert_eq!(code, None, "{said}");
    for strange in ["\0", "\u{1b}[2J", "\u{202e}"] {
        assert!(text(&said).contains(strange), "it is the program's to read: {said}");
    }
    drop(worker);
    let log = well(broker);
    assert!(!log.chars().any(|it| it.is_control() && it != '\n'), "{log:?}");
}

#[test]
fn attack_20_no_part_of_a_credential_is_left_where_a_reason_is_cut() {
    let mut broker = broker("plain");
    let limits = RunLimits { calls: 200, ..limits() };
    let mut worker = broker.run(&["raw.misfit"], limits);
    for before in 400..520 {
        worker.send("raw.misfit", json!({ "before": before }).to_string().as_bytes());
        let settled = worker.settled();
        assert_eq!(settled.code, Some(CallCode::BadResponse));
        let why = String::from_utf8(settled.body).unwrap();
        assert!(!why.contains(&CANARY[..4]), "{before}: {why}");
        assert!(settled.redacted, "{before}: there was one in it");
    }
    drop(worker);
    well(broker);
}

#[test]
fn attack_20_no_part_of_a_credential_is_left_where_a_failed_start_is_told() {
    let mut broker = broker("rude");
    let (_, unavailable) = listed(&mut broker);
    let [(server, why)] = unavailable.as_slice() else { panic!("{unavailable:?}") };
    assert!(server == "raw" && !why.contains(&CANARY[..5]), "{why}");
    assert!(why.contains("[credential removed]"), "it is told: {why}");
    let log = well(broker);
    assert!(!log.contains(&CANARY[..5]), "{log}");
}

#[test]
fn attack_20_no_level_of_logging_shows_what_the_protocols_library_logs() {
    let config = json!({"mcpServers": {"test": {
        "command": test_server(), "env": {"TEST_TOKEN": "${CANARY}"},
    }}});
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mcp.json");
    std::fs::write(&file, config.to_string()).unwrap();
    let args = ["--mcp-config".to_owned(), file.to_str().unwrap().to_owned()];
    let level = "trace,rmcp=trace,rmcp::service=trace,rmcp::transport::async_rw=trace";
    let mut broker = Broker::spawn_logging(folder, &args, level);
    broker.say_hello();
    let mut worker = broker.run(&["test.echo_env"], limits());
    assert_eq!(worker.call("test.echo_env", &json!({})).0, None);
    drop(worker);
    let (_, log) = broker.finish();
    assert!(log.contains("run opened"), "{log}");
    assert!(!log.contains(CANARY), "it is in the log");
}
