//! The broker as its supervisor and its workers see it: the real process, real
//! socket pairs, real tool servers.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use forge_protocol::RunId;
use forge_protocol::abi::CallCode;
use forge_protocol::broker::{
    Ask, Authority, BrokenLink, GrantRequest, REQUESTS_IN_FLIGHT_MAX, RefusalKind, Reply, Request,
};
use forge_protocol::frame::{self, Header, Kind};
use forge_protocol::guest::Call;
use forge_protocol::handshake::{Hello, Role};
use forge_protocol::limits::RunLimits;
use serde_json::{Value, json};
use support::{
    Broker, CANARY, PATIENCE, grant_request, inventory_server, name, receive, run_request, send,
    server_processes, test_server,
};

fn limits() -> RunLimits {
    // Generous, so that a loaded machine fails no test about something else.
    RunLimits { wall_ms: 60_000, ..RunLimits::default() }
}

fn grant_for(broker: &mut Broker, tools: &[&str], valid_s: u64) -> Vec<u8> {
    let request = GrantRequest { valid_s, calls_max: Some(7), ..grant_request(tools) };
    match broker.ask(&Request::IssueGrant(request)) {
        Reply::Grant(token) => token,
        other => panic!("{other:?}"),
    }
}

/// A broker with a server `raw` that breaks the protocol.
fn with_raw_server(list: &str) -> Broker {
    Broker::with_config(&json!({"mcpServers": {
        "raw": {"command": test_server(), "args": ["--raw", list]},
    }}))
}

fn refusal(reply: Reply) -> (RefusalKind, String) {
    match reply {
        Reply::Refused { kind, message } => (kind, message),
        other => panic!("{other:?}"),
    }
}

#[test]
fn tools_are_listed_with_schemas_and_digests() {
    let (mut broker, _) = Broker::with_test_server();
    let tools = broker.tools();
    let names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "crypto.hash",
            "test.barrier",
            "test.big",
            "test.change",
            "test.crash",
            "test.echo",
            "test.echo_env",
            "test.fail",
            "test.key",
            "test.misfit",
            "test.never",
            "test.note",
            "test.refuse",
            "test.slow",
        ]
    );
    let echo = &tools[5];
    assert_eq!(echo.description, "Says it back.");
    assert!(echo.input_schema.contains("\"text\""), "{}", echo.input_schema);
    assert!(echo.output_schema.as_ref().unwrap().contains("\"text\""));
    assert_eq!(broker.tools(), tools, "a digest repeats");
    let (status, _) = broker.finish();
    assert!(status.success());
}

#[test]
fn a_server_that_does_not_start_is_named_with_its_last_words() {
    let mut broker = Broker::with_config(&json!({"mcpServers": {
        "inventory": {"command": inventory_server()},
        "ghost": {"command": "no-such-program-anywhere"},
        "test": {"command": test_server()},
    }}));
    match broker.ask(&Request::ListTools { principal: "alice".into() }) {
        Reply::Tools { tools, unavailable } => {
            assert_eq!(tools.len(), 14, "the third server is there all the same");
            assert_eq!(unavailable.len(), 2);
            assert_eq!(unavailable[0].0, "ghost");
            assert!(unavailable[0].1.contains("no-such-program-anywhere"), "{unavailable:?}");
            assert_eq!(unavailable[1].0, "inventory");
            assert!(unavailable[1].1.contains("INVENTORY_TOKEN is not set"), "{unavailable:?}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_inventory_answers_with_its_token_and_refuses_without() {
    let config = |token: &str| {
        json!({"mcpServers": {"inventory": {
            "command": inventory_server(), "env": {"INVENTORY_TOKEN": token},
        }}})
    };
    let tools = ["inventory.find_parts", "inventory.get_stock", "inventory.reserve"];

    let mut broker = Broker::with_config(&config("${INVENTORY_TOKEN}"));
    let mut worker = broker.run(&tools, limits());
    let (code, found) = worker.call("inventory.find_parts", &json!({"query": "m6 bolt"}));
    assert_eq!(code, None);
    assert_eq!(found["parts"][0]["part_id"], "P-1003");
    let (code, stock) =
        worker.call("inventory.reserve", &json!({"part_id": "P-1003", "count": 30}));
    assert_eq!((code, &stock["available"]), (None, &json!(5)));
    let (code, error) =
        worker.call("inventory.reserve", &json!({"part_id": "P-1003", "count": 30}));
    assert_eq!(code, Some(CallCode::ToolFailed));
    assert!(error["error"].as_str().unwrap().contains("5 available"), "{error}");
    let (code, _) = worker.call("inventory.get_stock", &json!({"part_id": "1003"}));
    assert_eq!(code, Some(CallCode::BadRequest));

    let mut broker = Broker::with_config(&config("a-wrong-token"));
    let mut worker = broker.run(&tools, limits());
    let (code, error) = worker.call("inventory.find_parts", &json!({"query": ""}));
    assert_eq!(code, Some(CallCode::ToolFailed));
    assert!(error["error"].as_str().unwrap().contains("401"), "{error}");
}

#[test]
fn a_grant_is_issued_inspected_and_opens_a_run() {
    let (mut broker, _) = Broker::with_test_server();
    let token = grant_for(&mut broker, &["test.echo", "test.slow"], 60);
    match broker.ask(&Request::InspectGrant { token: token.clone() }) {
        Reply::Claims(claims) => {
            assert_eq!(claims.principal, "alice");
            assert_eq!(claims.calls_max, Some(7));
            let names: Vec<&str> = claims.tools.iter().map(|tool| tool.name.as_str()).collect();
            assert_eq!(names, ["test.echo", "test.slow"]);
        }
        other => panic!("{other:?}"),
    }
    let (mut worker, _) =
        broker.open(run_request("alice", Authority::Grant(token), limits())).unwrap();
    let (code, said) = worker.call("test.echo", &json!({"text": "hello"}));
    assert_eq!((code, said), (None, json!({"text": "hello"})));
}

#[test]
fn a_grant_for_an_unknown_tool_is_refused_with_the_closest_name() {
    let (mut broker, _) = Broker::with_test_server();
    let ask = |broker: &mut Broker, tool: &str| {
        refusal(broker.ask(&Request::IssueGrant(grant_request(&[tool]))))
    };
    let (kind, message) = ask(&mut broker, "test.ecko");
    assert_eq!(kind, RefusalKind::NoSuchTool);
    assert!(message.contains("did you mean \"test.echo\""), "{message}");
    let (kind, message) = ask(&mut broker, "tost.echo");
    assert_eq!(kind, RefusalKind::NoSuchTool);
    assert!(message.contains("did you mean \"test\""), "{message}");
}

#[test]
fn an_expired_grant_is_refused() {
    let (mut broker, _) = Broker::with_test_server();
    let token = grant_for(&mut broker, &["test.echo"], 1);
    std::thread::sleep(Duration::from_millis(1_100));
    let (kind, message) =
        broker.open(run_request("alice", Authority::Grant(token), limits())).err().unwrap();
    assert_eq!(kind, RefusalKind::BadGrant);
    assert!(message.contains("expired"), "{message}");
}

#[test]
fn a_forged_grant_is_refused() {
    let (mut broker, _) = Broker::with_test_server();
    let (mut other, _) = Broker::with_test_server();
    let foreign = grant_for(&mut other, &["test.echo"], 60);
    let mut flipped = grant_for(&mut broker, &["test.echo"], 60);
    let middle = flipped.len() / 2;
    flipped[middle] ^= 1;
    for token in [foreign, flipped, Vec::new(), vec![0xFF; 1000]] {
        let inspected = refusal(broker.ask(&Request::InspectGrant { token: token.clone() }));
        assert_eq!(inspected.0, RefusalKind::BadGrant, "{}", inspected.1);
        let opened = broker.open(run_request("alice", Authority::Grant(token), limits()));
        assert_eq!(opened.err().unwrap().0, RefusalKind::BadGrant);
    }
}

#[test]
fn another_principals_grant_is_refused() {
    let (mut broker, _) = Broker::with_test_server();
    let token = grant_for(&mut broker, &["test.echo"], 60);
    let (kind, message) =
        broker.open(run_request("mallory", Authority::Grant(token), limits())).err().unwrap();
    assert_eq!(kind, RefusalKind::BadGrant);
    assert!(message.contains("alice") && message.contains("mallory"), "{message}");
}

#[test]
fn a_grant_survives_its_broker_and_a_changed_definition_blocks_it_by_name() {
    let state = tempfile::tempdir().unwrap();
    let start = |args: &[&str]| {
        let config = json!({"mcpServers": {"test": {"command": test_server(), "args": args}}});
        let state = state.path().to_str().unwrap();
        Broker::start_in(tempfile::tempdir().unwrap(), &config, &["--state", state])
    };
    let token = grant_for(&mut start(&[]), &["test.echo", "test.slow"], 60);

    let mut same = start(&[]);
    same.open(run_request("alice", Authority::Grant(token.clone()), limits())).unwrap();

    let mut changed = start(&["--changed"]);
    let (kind, message) =
        changed.open(run_request("alice", Authority::Grant(token), limits())).err().unwrap();
    assert_eq!(kind, RefusalKind::BadGrant);
    assert!(message.contains("test.echo") && message.contains("changed"), "{message}");
}

#[test]
fn an_ungranted_call_is_denied_without_a_byte_to_the_server() {
    let (mut broker, server) = Broker::with_test_server();
    let mut worker = broker.run(&["test.echo"], limits());
    for tool in ["test.slow", "test.nosuch", "other.echo", "test.Echo", "test.echo "] {
        let (code, why) = worker.call(tool, &json!({"ms": 0}));
        assert_eq!(code, Some(CallCode::Denied), "{tool}");
        assert!(why["error"].as_str().unwrap().contains("grant"), "{why}");
    }
    assert_eq!(server.calls(), Vec::<String>::new());
    assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, None);
    assert_eq!(server.calls(), ["echo"]);
}

#[test]
fn arguments_that_do_not_fit_the_schema_never_reach_the_server() {
    let (mut broker, server) = Broker::with_test_server();
    let mut worker = broker.run(&["test.slow"], limits());
    for request in
        [&b"{}"[..], b"{\"ms\": -1}", b"{\"ms\": \"1\"}", b"[]", b"", b"{\"ms\": 1", b"\xFF"]
    {
        let id = worker.send("test.slow", request);
        let settled = worker.settled();
        assert_eq!((settled.id, settled.code), (id, Some(CallCode::BadRequest)), "{request:?}");
        let why: serde_json::Value = serde_json::from_slice(&settled.body).unwrap();
        assert!(!why["error"].as_str().unwrap().is_empty());
    }
    let (_, why) = worker.call("test.slow", &json!({"ms": "soon"}));
    assert!(why["violations"][0].as_str().unwrap().contains("/ms"), "{why}");
    assert_eq!(server.calls(), Vec::<String>::new());
}

#[test]
fn a_request_over_the_limit_never_reaches_the_server() {
    let (mut broker, server) = Broker::with_test_server();
    let mut worker = broker.run(&["test.echo"], RunLimits { request_bytes: 64, ..limits() });
    let (code, _) = worker.call("test.echo", &json!({"text": "x".repeat(64)}));
    assert_eq!(code, Some(CallCode::RequestTooLarge));
    assert_eq!(server.calls(), Vec::<String>::new());
}

#[test]
fn three_calls_in_flight_meet_at_a_barrier() {
    let (mut broker, _) = Broker::with_test_server();
    let mut worker = broker.run(&["test.barrier"], limits());
    let sent: Vec<u32> = (0..3).map(|_| worker.send("test.barrier", b"{\"n\": 3}")).collect();
    let mut settled: Vec<u32> = (0..3)
        .map(|_| {
            let settled = worker.settled();
            assert_eq!(settled.code, None);
            settled.id
        })
        .collect();
    settled.sort_unstable();
    assert_eq!(settled, sent);
}

#[test]
fn answers_come_in_the_order_in_which_calls_settle() {
    let (mut broker, _) = Broker::with_test_server();
    let mut worker = broker.run(&["test.slow"], limits());
    let late = worker.send("test.slow", b"{\"ms\": 1000}");
    let early = worker.send("test.slow", b"{\"ms\": 1}");
    assert_eq!(worker.settled().id, early);
    assert_eq!(worker.settled().id, late);
}

#[test]
fn a_tool_that_never_answers_settles_as_unknown_at_the_deadline() {
    let (mut broker, server) = Broker::with_test_server();
    // The journal stands.
    let echo = json!({"text": "x"});
    assert_eq!(broker.run(&["test.echo"], limits()).call("test.echo", &echo).0, None);
    let began = Instant::now();
    let mut worker =
        broker.run(&["test.never", "test.echo"], RunLimits { wall_ms: 2_000, ..limits() });
    let (code, why) = worker.call("test.never", &json!({}));
    assert_eq!(code, Some(CallCode::OutcomeUnknown));
    assert!(why["error"].as_str().unwrap().contains("time"), "{why}");
    let took = began.elapsed();
    assert!(took > Duration::from_millis(1_900) && took < Duration::from_secs(20), "{took:?}");

    // After it, nothing is dispatched any more.
    let (code, _) = worker.call("test.echo", &echo);
    assert_eq!(code, Some(CallCode::DeadlinePassed));
    assert_eq!(server.calls(), ["echo", "never"]);
}

#[test]
fn a_response_over_the_limit_is_told_and_not_carried() {
    let (mut broker, server) = Broker::with_test_server();
    let mut worker = broker.run(&["test.big"], RunLimits { response_bytes: 1_000, ..limits() });
    let (code, _) = worker.call("test.big", &json!({"bytes": 500}));
    assert_eq!(code, None);
    let (code, why) = worker.call("test.big", &json!({"bytes": 2_000}));
    assert_eq!(code, Some(CallCode::ResponseTooLarge));
    assert!(why["error"].as_str().unwrap().contains("the limit is 1000"), "{why}");
    assert_eq!(server.calls(), ["big", "big"], "it happened");
}

#[test]
fn a_spent_budget_ends_calls_before_the_server() {
    let (mut broker, server) = Broker::with_test_server();
    let mut worker = broker.run(&["test.echo"], RunLimits { calls: 2, ..limits() });
    for _ in 0..2 {
        assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, None);
    }
    for _ in 0..3 {
        let (code, _) = worker.call("test.echo", &json!({"text": "x"}));
        assert_eq!(code, Some(CallCode::BudgetSpent));
    }
    assert_eq!(server.calls().len(), 2);
}

#[test]
fn a_crashed_server_leaves_the_outcome_unknown_and_is_started_again() {
    let (mut broker, server) = Broker::with_test_server();
    let mut worker = broker.run(&["test.crash", "test.echo"], limits());
    let (code, why) = worker.call("test.crash", &json!({}));
    assert_eq!(code, Some(CallCode::OutcomeUnknown));
    assert!(why["error"].as_str().unwrap().contains("lost"), "{why}");
    let (code, said) = worker.call("test.echo", &json!({"text": "back"}));
    assert_eq!((code, said), (None, json!({"text": "back"})));
    assert_eq!(server.calls(), ["crash", "echo"]);
    drop(worker);
    let (_, log) = broker.finish();
    assert!(log.contains("lost before it answered; it exited with status 3"), "{log}");
}

#[test]
fn a_run_whose_time_ends_before_a_server_is_up_is_told_which() {
    let mut broker = Broker::with_config(&json!({"mcpServers": {
        "stuck": {"command": "/bin/sleep", "args": ["60"]},
    }}));
    let tools = Authority::Tools(vec![name("stuck.tool")]);
    let limits = RunLimits { wall_ms: 300, ..limits() };
    let (kind, why) = broker.open(run_request("alice", tools, limits)).err().unwrap();
    assert_eq!(kind, RefusalKind::OutOfTime);
    assert!(why.contains("\"stuck\"") && why.contains("not up yet"), "{why}");
    let (status, log) = broker.finish();
    assert!(status.success(), "{log}");
}

#[test]
fn a_server_that_ends_at_its_start_is_told_with_how_it_ended() {
    for (line, how) in [
        ("echo no licence >&2; exit 7", "; it exited with status 7; it said: no licence"),
        ("kill -9 $$", "; it exited with status 137, as by signal 9"),
    ] {
        let mut broker = Broker::with_config(&json!({"mcpServers": {
            "ends": {"command": "/bin/sh", "args": ["-c", line]},
        }}));
        let listed = broker.ask(&Request::ListTools { principal: "alice".into() });
        let Reply::Tools { unavailable, .. } = listed else { panic!("{listed:?}") };
        assert!(unavailable[0].1.ends_with(how), "{unavailable:?}");
    }
}

#[test]
fn a_definition_that_changes_during_a_run_denies_the_call() {
    let (mut broker, server) = Broker::with_server_args(&["--old"]);
    let mut worker = broker.run(&["test.change", "test.echo", "test.slow"], limits());
    assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, None);
    assert_eq!(
        worker.call("test.change", &json!({})),
        (None, json!([{"type": "text", "text": "changed"}]))
    );
    let (code, why) = worker.call("test.echo", &json!({"text": "x"}));
    assert_eq!(code, Some(CallCode::Denied), "{why}");
    assert!(why["error"].as_str().unwrap().contains("changed"), "{why}");
    assert_eq!(worker.call("test.slow", &json!({"ms": 1})).0, None, "only the changed one");
    assert_eq!(server.calls(), ["echo", "change", "slow", "slow ended"]);
}

#[test]
fn a_definition_that_changes_and_is_not_announced_blocks_a_grant_once_the_list_is_old() {
    let mut broker = with_raw_server("quiet");
    let token = grant_for(&mut broker, &["raw.turn", "raw.turned"], 600);
    let open = |broker: &mut Broker| {
        broker.open(run_request("alice", Authority::Grant(token.clone()), limits()))
    };
    let (mut worker, _) = open(&mut broker).unwrap();
    assert_eq!(worker.call("raw.turn", &json!({})).0, None);
    assert_eq!(worker.call("raw.turned", &json!({})).0, None, "not listed for each call");
    let until = Instant::now() + PATIENCE;
    let (kind, message) = loop {
        match open(&mut broker) {
            Err(refused) => break refused,
            Ok(_) => assert!(Instant::now() < until, "never listed again"),
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    assert_eq!(kind, RefusalKind::BadGrant);
    assert!(message.contains("raw.turned") && message.contains("changed"), "{message}");
    // The session is the one that it was.
    assert_eq!(worker.call("raw.turned", &json!({})).0, Some(CallCode::Denied));
    assert_eq!(worker.call("raw.turn", &json!({})).0, None);
}

#[test]
fn a_tool_whose_schema_is_none_is_left_out_by_name_and_costs_no_other() {
    let mut broker = with_raw_server("odd");
    let tools = broker.tools();
    let names: Vec<&str> =
        tools.iter().filter_map(|tool| tool.name.as_str().strip_prefix("raw.")).collect();
    assert_eq!(names, ["gives"]);
    let (_, log) = broker.finish();
    for name in ["without", "null", "boolean"] {
        let told = log.lines().find(|line| line.contains(&format!("tool=\"{name}\"")));
        assert!(told.is_some_and(|line| line.contains("inputSchema")), "{name}: {told:?}");
    }
    assert_eq!(log.matches("tool left out").count(), 6, "{log}");
}

#[test]
fn blocks_of_content_reach_the_program_as_they_came() {
    let mut broker = with_raw_server("odd");
    let mut worker = broker.run(&["raw.gives"], limits());
    // With what the broker's MCP library has no member for, and less precise.
    let text = json!({"type": "text", "text": "good", "annotations": {"priority": 0.7, "x": 1},
        "beside": [0.1], "_meta": null});
    let image = json!({"type": "image", "data": "AAAA", "mime": "image/png"});
    let content = json!([text, {"type": "chart", "x": 1}, image]);
    let mut given = |result: Value| worker.call("raw.gives", &json!({ "result": result }));
    assert_eq!(given(json!({ "content": content })), (None, content.clone()));
    let (code, why) = given(json!({ "content": content, "isError": true }));
    assert_eq!(code, Some(CallCode::ToolFailed));
    assert_eq!((&why["message"], &why["content"]), (&json!("good"), &content));
    let (code, why) = given(json!({ "content": [], "isError": true }));
    assert_eq!(code, Some(CallCode::ToolFailed));
    assert_eq!(why["message"], "the tool failed, and does not say why");
    // What is structured counts, unless it is nothing.
    let structured = json!({ "content": content, "structuredContent": {"a": 1} });
    assert_eq!(given(structured), (None, json!({"a": 1})));
    for content in [content, json!([text])] {
        let nothing = json!({ "content": content, "structuredContent": null });
        assert_eq!(given(nothing), (None, content));
    }
}

#[test]
fn a_result_that_is_none_is_a_bad_response() {
    let mut broker = with_raw_server("odd");
    let mut worker = broker.run(&["raw.gives"], limits());
    for result in [
        json!({}),
        json!(null),
        json!(7),
        json!({"content": null}),
        json!({"content": "plain"}),
        json!({"content": ["plain"]}),
        json!({"content": [{"text": "of no type"}]}),
        json!({"content": [{"type": "text"}]}),
        json!({"content": [{"type": "chart"}], "isError": "yes"}),
        json!({"content": [], "isError": "yes"}),
        json!({"what": 1}),
    ] {
        let (code, why) = worker.call("raw.gives", &json!({ "result": result }));
        assert_eq!(code, Some(CallCode::BadResponse), "{result}: {why}");
        assert!(why["error"].as_str().unwrap().contains("no tool result"), "{result}: {why}");
    }
    let text = json!({"type": "text", "text": "good"});
    let (_, why) =
        worker.call("raw.gives", &json!({ "result": {"content": [text, {"type": "text"}]} }));
    assert!(why["error"].as_str().unwrap().contains("content[1] is no block"), "{why}");
}

#[test]
fn an_old_server_that_says_nothing_to_discover_is_used_all_the_same() {
    let (mut broker, _) = Broker::with_server_args(&["--old"]);
    let began = Instant::now();
    assert_eq!(broker.tools().len(), 14);
    let took = began.elapsed();
    assert!(took < Duration::from_secs(9), "{took:?}: the library's own wait is 10 s");
    // Once known, it is not asked again.
    let mut worker = broker.run(&["test.crash", "test.echo"], limits());
    assert_eq!(worker.call("test.crash", &json!({})).0, Some(CallCode::OutcomeUnknown));
    let began = Instant::now();
    assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, None);
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
}

#[test]
fn an_old_server_that_ends_over_discover_is_used_all_the_same() {
    let (mut broker, _log) = Broker::with_server_args(&["--oldest"]);
    assert_eq!(broker.tools().len(), 14);
    let mut worker = broker.run(&["test.crash", "test.echo"], limits());
    assert_eq!(worker.call("test.crash", &json!({})).0, Some(CallCode::OutcomeUnknown));
    // Once known, it is not asked again.
    assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, None);
}

#[test]
fn an_old_server_that_answers_whatever_it_is_asked_is_used_all_the_same() {
    let (mut broker, _log) = Broker::with_server_args(&["--agreeable"]);
    assert_eq!(broker.tools().len(), 14);
    let mut worker = broker.run(&["test.echo"], limits());
    assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, None);
}

#[test]
fn a_failing_tool_says_why_without_its_credential() {
    let (mut broker, _) = Broker::with_test_server();
    let mut worker = broker.run(&["test.fail", "test.refuse"], limits());
    let (code, error) = worker.call("test.fail", &json!({}));
    assert_eq!(code, Some(CallCode::ToolFailed));
    assert_eq!(error["error"], "failed with token <[credential removed]>");
    assert_eq!(error["code"], -32603);
    let (code, error) = worker.call("test.refuse", &json!({}));
    assert_eq!(code, Some(CallCode::ToolFailed));
    assert_eq!(error["error"], "not today");
}

#[test]
fn a_credential_is_in_its_own_servers_environment_and_leaves_it_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({"mcpServers": {
        "own": {"command": test_server(), "env": {"TEST_TOKEN": "${CANARY}", "PLAIN": "plain"}},
        "other": {"command": test_server()},
    }});
    let mut broker = Broker::start_in(folder, &config, &[]);
    let mut worker = broker.run(&["own.echo_env", "other.echo_env", "own.echo"], limits());

    let (_, own) = worker.call("own.echo_env", &json!({}));
    let own = own["variables"].as_object().unwrap();
    assert_eq!(own["TEST_TOKEN"], "[credential removed]", "it is there, and scrubbed");
    assert_eq!(own["PLAIN"], "plain");
    assert!(own.contains_key("PATH"));

    let (_, other) = worker.call("other.echo_env", &json!({}));
    let other = other["variables"].as_object().unwrap();
    let removed = |value: &serde_json::Value| value.as_str().unwrap().contains("removed");
    assert!(!other.values().any(removed), "{other:?}");
    assert!(!other.contains_key("TEST_TOKEN"));
    for variables in [own, other] {
        for name in ["CANARY", "NOT_FOR_SERVERS", "FORGE_LOG", "INVENTORY_TOKEN", "CARGO"] {
            assert!(!variables.contains_key(name), "{name}");
        }
    }
    worker.call("own.echo", &json!({"text": format!("<{CANARY}>")}));
    drop(worker);
    let (status, log) = broker.finish();
    assert!(status.success());
    assert!(log.contains("dispatched call ended"), "the log is one of everything");
    assert!(!log.contains(CANARY), "{log}");
}

#[test]
fn tool_servers_inherit_no_descriptor() {
    let (mut broker, _) = Broker::with_test_server();
    let worker = broker.run(&["test.echo"], limits());
    let children = support::server_processes(broker.child.id())
        .into_iter()
        .map(|child| std::path::PathBuf::from(format!("/proc/{child}")));
    let mut seen = 0;
    for child in children {
        seen += 1;
        for entry in std::fs::read_dir(child.join("fd")).unwrap().flatten() {
            let number: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
            let target = std::fs::read_link(entry.path()).unwrap_or_default();
            let target = target.to_string_lossy().into_owned();
            // Standard streams are pipes; the rest is the server's own runtime.
            let own = target.starts_with("anon_inode:") || target.starts_with("pipe:");
            let own_socket = number > 2 && target.starts_with("socket:");
            if own_socket {
                // A signal pair of its runtime, made after it was started: no
                // end of it may be one of the broker's.
                let broker_fds = format!("/proc/{}/fd", broker.child.id());
                let shared = std::fs::read_dir(broker_fds).unwrap().flatten().any(|fd| {
                    std::fs::read_link(fd.path()).unwrap_or_default().to_string_lossy() == target
                });
                assert!(!shared, "{number} → {target}");
            } else {
                assert!(own, "{number} → {target}");
            }
        }
    }
    assert_eq!(seen, 1);
    drop(worker);
}

#[test]
fn a_call_in_flight_when_its_run_link_closes_is_still_finished_and_recorded() {
    let (mut broker, server) = Broker::with_test_server();
    let mut worker = broker.run(&["test.slow"], limits());
    worker.send("test.slow", b"{\"ms\": 700}");
    server.wait_for("slow");
    drop(worker);
    // Even the whole broker's end waits for it.
    let (status, log) = broker.finish();
    assert!(status.success());
    assert_eq!(server.calls(), ["slow", "slow ended"]);
    let record = log.lines().find(|line| line.contains("dispatched call ended")).unwrap();
    assert!(record.contains("code=\"ok\"") && record.contains("test.slow"), "{record}");
}

#[test]
fn tool_servers_end_with_their_broker() {
    let (mut broker, server) = Broker::with_test_server();
    let mut worker = broker.run(&["test.never"], RunLimits { wall_ms: 3_000, ..limits() });
    assert_eq!(worker.call("test.never", &json!({})).0, Some(CallCode::OutcomeUnknown));
    let marker = server.log.to_str().unwrap().to_owned();
    let alive = |marker: &str| {
        std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
            std::fs::read(entry.path().join("cmdline")).is_ok_and(|line| {
                let line = String::from_utf8_lossy(&line).into_owned();
                line.contains("forge-test-server") && line.contains(marker)
            })
        })
    };
    assert!(alive(&marker));
    let (status, _) = broker.finish();
    assert!(status.success());
    assert!(!alive(&marker));
}

#[test]
fn malformed_frames_close_a_run_link_and_nothing_else() {
    let (mut broker, server) = Broker::with_test_server();
    let mut oversized = Vec::new();
    oversized.extend_from_slice(&u32::MAX.to_le_bytes());
    oversized.extend_from_slice(&[Kind::Call as u8, 0, 0, 0]);
    let mut over_run_limit =
        Header { kind: Kind::Call, payload_bytes: 600_000 }.to_bytes().to_vec();
    // No more than a socket takes: nobody reads it.
    over_run_limit.resize(60_000, 0);
    let mut garbage = Vec::new();
    frame::write_raw(Kind::Call, &[0xFF; 40], &mut garbage);
    let mut out_of_turn = Vec::new();
    frame::write_raw(Kind::Output, b"x", &mut out_of_turn);
    let mut wrong_number = Vec::new();
    let call = Call { id: 5, waits: false, tool: name("test.echo"), request: b"{}".to_vec() };
    frame::write_message(Kind::Call, &call, &mut wrong_number);
    for bytes in [
        oversized,
        over_run_limit,
        garbage,
        out_of_turn,
        wrong_number,
        vec![0, 0, 0, 0, 0xEE, 0, 0, 0],
        vec![0, 0, 0, 0, Kind::Call as u8, 1, 0, 0],
    ] {
        let mut worker = broker.run(&["test.echo"], limits());
        let _ = worker.link.write_all(&bytes);
        assert!(worker.is_closed(), "{:?}", &bytes[..8]);
    }
    assert_eq!(server.calls(), Vec::<String>::new());
    let mut worker = broker.run(&["test.echo"], limits());
    assert_eq!(worker.call("test.echo", &json!({"text": "still here"})).0, None);
    drop(worker);
    let (status, log) = broker.finish();
    assert!(status.success());
    assert!(!log.contains("panicked"), "{log}");
}

#[test]
fn a_run_whose_link_is_gone_is_not_said_to_have_called_nothing() {
    let (mut broker, _) = Broker::with_test_server();
    let mut worker = broker.run(&["test.echo"], limits());
    assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, None);
    // Whoever has taken a worker over can break its run's link.
    worker.link.write_all(&[0xFF; 40]).unwrap();
    assert!(worker.is_closed());
    let (until, run_id) = (Instant::now() + PATIENCE, RunId([0xAB; 16]));
    // As long as its supervisor has the link, what it called is known.
    for _ in 0..3 {
        match broker.ask(&Request::CancelRun { run_id }) {
            Reply::Cancelled { calls } => assert_eq!(calls.len(), 1),
            other => panic!("{other:?}"),
        }
    }
    drop(worker);
    let (kind, _) = loop {
        match broker.ask(&Request::CancelRun { run_id }) {
            Reply::Cancelled { calls } => assert_eq!(calls.len(), 1),
            other => break refusal(other),
        }
        assert!(Instant::now() < until, "it stays open");
    };
    assert_eq!(kind, RefusalKind::BadRequest);
}

#[test]
fn a_run_that_ends_over_a_link_that_its_worker_broke_is_said_to_with_its_calls() {
    let (mut broker, _) = Broker::with_test_server();
    let run_id = RunId([0xAB; 16]);
    let mut worker = broker.run(&["test.echo"], limits());
    assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, None);
    let whole = Reply::RunEnded { broken: None };
    assert_eq!(broker.ask(&Request::EndRun { run_id, is_whole: true }), whole);
    let call = Call { id: 5, waits: false, tool: name("test.echo"), request: b"{}".to_vec() };
    let mut bytes = Vec::new();
    frame::write_message(Kind::Call, &call, &mut bytes);
    worker.link.write_all(&bytes).unwrap();
    assert!(worker.is_closed());
    let until = Instant::now() + PATIENCE;
    let BrokenLink { reason, calls } = loop {
        match broker.ask(&Request::EndRun { run_id, is_whole: true }) {
            Reply::RunEnded { broken: Some(broken) } => break broken,
            other => assert!(other == whole && Instant::now() < until, "{other:?}"),
        }
    };
    assert!(reason.contains("call 5"), "{reason}");
    assert_eq!(calls.len(), 1);
    // And nothing of it is kept once the link is gone.
    drop(worker);
    while broker.ask(&Request::EndRun { run_id, is_whole: true }) != whole {
        assert!(Instant::now() < until, "it is kept");
    }
}

#[test]
fn what_a_run_called_and_did_not_wait_for_is_carried_out() {
    let (mut broker, server) = Broker::with_test_server();
    for number in 1..=20 {
        let mut worker = broker.run(&["test.echo"], limits());
        worker.send("test.echo", br#"{"text": "x"}"#);
        let (run_id, until) = (RunId([0xAB; 16]), Instant::now() + PATIENCE);
        assert_eq!(
            broker.ask(&Request::EndRun { run_id, is_whole: true }),
            Reply::RunEnded { broken: None }
        );
        drop(worker);
        while server.calls().len() < number {
            assert!(Instant::now() < until, "{number} runs made {} calls", server.calls().len());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn more_calls_than_a_run_may_make_close_its_link() {
    let (mut broker, _) = Broker::with_test_server();
    let limits = RunLimits { calls: 3, calls_in_flight: 2, ..limits() };
    let mut worker = broker.run(&["test.echo"], limits);
    let codes = [None, None, None, Some(CallCode::BudgetSpent), Some(CallCode::BudgetSpent)];
    for code in codes {
        assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, code);
    }
    worker.send("test.echo", b"{}");
    assert!(worker.is_closed());
}

#[test]
fn a_run_that_was_opened_again_stays_open_when_its_former_link_ends() {
    let (mut broker, _) = Broker::with_test_server();
    let former = broker.run(&["test.echo"], limits());
    let mut worker = broker.run(&["test.echo"], limits());
    assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, None);
    drop(former);
    let until = Instant::now() + PATIENCE;
    loop {
        let Reply::Metrics(text) = broker.ask(&Request::Metrics) else { panic!("no metrics") };
        if text.contains("forge_runs_open 1\n") {
            break;
        }
        assert!(Instant::now() < until, "{text}");
    }
    match broker.ask(&Request::CancelRun { run_id: RunId([0xAB; 16]) }) {
        Reply::Cancelled { calls } => assert_eq!(calls.len(), 1),
        other => panic!("{other:?}"),
    }
}

#[test]
fn more_calls_in_flight_than_allowed_close_the_run_link() {
    let (mut broker, _) = Broker::with_test_server();
    let mut worker = broker.run(&["test.slow"], RunLimits { calls_in_flight: 2, ..limits() });
    for _ in 0..3 {
        worker.send("test.slow", b"{\"ms\": 2000}");
    }
    assert!(worker.is_closed());
}

#[test]
fn malformed_frames_end_the_control_link_without_a_panic() {
    let mut request = Vec::new();
    frame::write_raw(Kind::Request, &[0xFF; 100], &mut request);
    let mut hello = Vec::new();
    frame::write_message(Kind::Hello, &Hello::ours(Role::Supervisor), &mut hello);
    for bytes in [request, hello, vec![0xFF; 64], vec![1, 0]] {
        let (mut broker, _) = Broker::with_test_server();
        broker.control.write_all(&bytes).unwrap();
        broker.control.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(receive(&mut broker.control).is_none(), "{:?}", &bytes[..2]);
        let (status, log) = broker.finish();
        assert_eq!(status.code(), Some(70), "{log}");
        assert!(!log.contains("panicked"), "{log}");
    }
}

#[test]
fn a_supervisor_of_another_version_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let mut broker = Broker::spawn(folder, &[]);
    let hello = Hello { version_min: 7, version_max: 9, ..Hello::ours(Role::Supervisor) };
    send(&mut broker.control, Kind::Hello, &hello);
    assert_eq!(receive(&mut broker.control).unwrap().0, Kind::Hello);
    assert_eq!(receive(&mut broker.control).unwrap().0, Kind::Refuse);
    let (_, log) = broker.finish();
    assert!(log.contains("the supervisor speaks forge protocol 7 to 9"), "{log}");
}

#[test]
fn a_run_without_its_socket_is_refused_and_the_link_goes_on() {
    let (mut broker, _) = Broker::with_test_server();
    let request = run_request("alice", Authority::Tools(Vec::new()), limits());
    let (kind, message) = refusal(broker.ask(&Request::OpenRun(request.clone())));
    assert_eq!(kind, RefusalKind::BadRequest);
    assert!(message.contains("socket pair"), "{message}");

    let mut frames = Vec::new();
    let ask = Ask { id: 7, request: Request::OpenRun(request) };
    frame::write_message(Kind::Request, &ask, &mut frames);
    let file = std::fs::File::open("/dev/null").unwrap();
    support::send_with(&broker.control, &frames, file.into());
    assert_eq!(refusal(broker.reply()).0, RefusalKind::BadRequest);
    assert_eq!(broker.tools().len(), 14);
}

#[test]
fn two_runs_do_not_share_budgets_or_grants() {
    let (mut broker, _) = Broker::with_test_server();
    let mut one = broker.run(&["test.echo"], RunLimits { calls: 1, ..limits() });
    let mut two = broker.run(&["test.slow"], RunLimits { calls: 1, ..limits() });
    // Both requests carried the same run id: the connection is what counts.
    assert_eq!(one.call("test.echo", &json!({"text": "x"})).0, None);
    assert_eq!(two.call("test.echo", &json!({"text": "x"})).0, Some(CallCode::Denied));
    assert_eq!(two.call("test.slow", &json!({"ms": 1})).0, None);
    assert_eq!(one.call("test.echo", &json!({"text": "x"})).0, Some(CallCode::BudgetSpent));
}

#[test]
fn bad_configuration_ends_the_broker_with_2_and_names_the_field() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("forge.toml");
    std::fs::write(&file, "[servers.a]\ncommand = 'hunter2'\nurl = 'x'\n").unwrap();
    let args = ["--config".to_owned(), file.to_str().unwrap().to_owned()];
    let mut broker = Broker::spawn(folder, &args);
    let status = support::wait(&mut broker.child);
    let (_, log) = broker.finish();
    assert_eq!(status.code(), Some(2));
    assert!(log.contains("servers.a.url") && !log.contains("hunter2"), "{log}");
}

#[test]
fn questions_that_are_withdrawn_hold_no_place() {
    let mut broker = Broker::with_config(&json!({"mcpServers": {
        "stuck": {"command": "/bin/sleep", "args": ["60"]},
    }}));
    for question in 0..=REQUESTS_IN_FLIGHT_MAX as u64 {
        broker.send(&Request::ListTools { principal: "alice".into() }, question);
        broker.send(&Request::Withdraw { question }, u64::MAX);
        // An answer to the question itself comes only if it was there before:
        // when the server's start has failed.
        while broker.answer().reply != Reply::Withdrawn {}
    }
    assert!(matches!(broker.ask(&Request::Metrics), Reply::Metrics(_)));
    let (status, log) = broker.finish();
    assert!(status.success(), "{log}");
}

#[test]
fn a_start_goes_on_when_whoever_asked_for_it_leaves_and_ends_with_the_broker() {
    let mut broker = Broker::with_config(&json!({"mcpServers": {
        "stuck": {"command": "/bin/sleep", "args": ["60"]},
    }}));
    let started = |broker: &Broker| {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            // Not what is about to become it.
            let mut pids = server_processes(broker.child.id());
            pids.retain(|pid| {
                let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                line.starts_with(b"/bin/sleep")
            });
            if !pids.is_empty() {
                return pids;
            }
            assert!(Instant::now() < until, "no server was started");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    broker.send(&Request::ListTools { principal: "alice".into() }, 1);
    let pids = started(&broker);
    broker.send(&Request::Withdraw { question: 1 }, 2);
    assert_eq!(broker.answer().reply, Reply::Withdrawn);
    // Who comes next waits for the same one.
    broker.send(&Request::ListTools { principal: "alice".into() }, 3);
    assert!(matches!(broker.ask(&Request::Metrics), Reply::Metrics(_)));
    assert_eq!(started(&broker), pids);
    let (status, log) = broker.finish();
    assert!(status.success(), "{log}");
    // Killed, and gone once it is reaped.
    let until = Instant::now() + Duration::from_secs(20);
    let lives =
        |pid: &u32| !std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default().is_empty();
    while pids.iter().any(lives) {
        assert!(Instant::now() < until, "{pids:?} outlive their broker: {log}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_control_descriptor_that_is_no_socket_is_refused() {
    let (_near, _far) = UnixStream::pair().unwrap();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_forge-toolbroker"))
        .args(["--control-fd", "1"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--control-fd"));
}

#[test]
fn a_broker_that_can_have_no_threads_says_so_and_does_not_stand_still() {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::process::CommandExt as _;

    use rustix::process::{Resource, Rlimit, setrlimit};
    // By its descriptor: another user may not see the folder it is in.
    let file = std::fs::File::open(env!("CARGO_BIN_EXE_forge-toolbroker")).unwrap();
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
    let mut command = std::process::Command::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
    command.args(["--control-fd", "0"]).stderr(std::process::Stdio::piped());
    if rustix::process::geteuid().is_root() {
        // Root's own tasks are not counted.
        command.uid(54_321).gid(54_321);
    }
    let one_more = || {
        let two = Rlimit { current: Some(2), maximum: Some(2) };
        setrlimit(Resource::Nproc, two).map_err(Into::into)
    };
    // SAFETY: the closure makes one system call between fork and exec.
    let mut child = unsafe { command.pre_exec(one_more) }.spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if Instant::now() > until => {
                child.kill().unwrap();
                panic!("it stands still");
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(status.code(), Some(5), "{said}");
    assert!(said.contains("threads") && said.contains("pids.max"), "{said}");
}

#[test]
fn a_run_whose_link_there_is_no_descriptor_for_is_turned_away_as_overload_and_not_its_callers_fault()
 {
    use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
    let (mut broker, _) = Broker::with_test_server();
    drop(broker.run(&["test.echo"], limits()));
    let pid = Pid::from_raw(broker.child.id().try_into().unwrap()).unwrap();
    let before = getrlimit(Resource::Nofile);
    let none = Rlimit { current: Some(3), maximum: before.maximum };
    prlimit(Some(pid), Resource::Nofile, none).unwrap();
    let request = || run_request("alice", Authority::Tools(vec![name("test.echo")]), limits());
    let (kind, message) = broker.open(request()).map(|_| ()).unwrap_err();
    assert_eq!(kind, RefusalKind::Overloaded, "{message}");
    assert!(message.contains("raise its limit on open files"), "{message}");
    prlimit(Some(pid), Resource::Nofile, before).unwrap();
    broker.open(request()).unwrap();
}
