//! Built-in tools as a program meets them: in the list, under a grant, through
//! the chain that every tool's calls pass, and without any configuration.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use forge_protocol::abi::CallCode;
use forge_protocol::broker::{Authority, RefusalKind, Reply, Request};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::RESERVED_SERVERS;
use serde_json::json;
use support::{Broker, grant_request, name, run_request, test_server};

const ABC_SHA256: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

fn limits() -> RunLimits {
    RunLimits { wall_ms: 60_000, ..RunLimits::default() }
}

fn abc() -> serde_json::Value {
    json!({"algorithm": "sha256", "text": "abc"})
}

#[test]
fn a_built_in_needs_no_configuration_and_is_listed() {
    let mut broker = Broker::unconfigured();
    let tools = broker.tools();
    let names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
    assert_eq!(names, ["crypto.hash"]);
    assert!(tools[0].input_schema.contains("sha512") && tools[0].output_schema.is_some());
    let mut worker = broker.run(&["crypto.hash"], limits());
    assert_eq!(worker.call("crypto.hash", &abc()), (None, json!({"hex": ABC_SHA256})));
    let (code, long) =
        worker.call("crypto.hash", &json!({"algorithm": "sha512", "base64": "YWJj"}));
    assert_eq!((code, long["hex"].as_str().unwrap().len()), (None, 128));
    drop(worker);
    let (status, log) = broker.finish();
    assert!(status.success());
    let records = log.lines().filter(|line| line.contains("call ended"));
    assert_eq!(records.filter(|line| line.contains("code=\"ok\"")).count(), 2, "{log}");
}

#[test]
fn a_built_in_stands_beside_the_tools_of_servers() {
    let (mut broker, server) = Broker::with_test_server();
    let mut worker = broker.run(&["crypto.hash", "test.echo"], limits());
    assert_eq!(worker.call("crypto.hash", &abc()).0, None);
    assert_eq!(worker.call("test.echo", &json!({"text": "x"})).0, None);
    assert_eq!(server.calls(), ["echo"]);
}

#[test]
fn a_built_in_that_is_not_granted_is_denied() {
    let (mut broker, _) = Broker::with_test_server();
    let mut worker = broker.run(&["test.echo"], limits());
    let (code, why) = worker.call("crypto.hash", &abc());
    assert_eq!(code, Some(CallCode::Denied), "{why}");
    assert_eq!(why["error"], "this run's grant does not allow crypto.hash");
}

#[test]
fn a_built_in_is_held_against_its_schema() {
    let mut broker = Broker::unconfigured();
    let mut worker = broker.run(&["crypto.hash"], limits());
    for wrong in [
        json!({"algorithm": "md5", "text": "abc"}),
        json!({"algorithm": "sha256"}),
        json!({"algorithm": "sha256", "text": "abc", "base64": "YWJj"}),
        json!({"algorithm": "sha256", "text": 7}),
        json!({"algorithm": "sha256", "text": "abc", "more": true}),
        json!([]),
    ] {
        let (code, why) = worker.call("crypto.hash", &wrong);
        assert_eq!(code, Some(CallCode::BadRequest), "{wrong}: {why}");
    }
    let (code, why) = worker.call("crypto.hash", &json!({"algorithm": "sha256", "base64": "!"}));
    assert_eq!(code, Some(CallCode::ToolFailed), "{why}");
}

#[test]
fn no_log_holds_an_argument_that_is_refused_and_the_program_is_told_which() {
    const MARKER: &str = "marker-5e0c1d";
    let mut broker = Broker::unconfigured();
    let mut worker = broker.run(&["crypto.hash"], limits());
    for wrong in [
        json!({"algorithm": MARKER, "text": "abc"}),
        json!({"algorithm": "sha256", "text": {MARKER: MARKER}}),
        json!({"algorithm": "sha256", "text": "abc", MARKER: true}),
        json!({"algorithm": format!("{MARKER}{}", "x".repeat(100_000)), "text": "abc"}),
    ] {
        let (code, why) = worker.call("crypto.hash", &wrong);
        assert_eq!(code, Some(CallCode::BadRequest), "{why}");
        assert!(why["violations"][0].as_str().unwrap().contains(MARKER), "{why}");
    }
    drop(worker);
    let (_, log) = broker.finish();
    assert!(!log.contains(MARKER), "{log}");
    for place in ["/properties/algorithm/enum", "/properties/text/type", "/additionalProperties"] {
        assert!(log.contains(&format!("schema at {place}")), "{place}: {log}");
    }
}

#[test]
fn a_request_that_is_nested_too_deep_is_told_how_deep_it_may_be() {
    let mut broker = Broker::unconfigured();
    let mut worker = broker.run(&["crypto.hash"], limits());
    let nested = |deep: usize| {
        format!("{{\"text\":{}{}}}", "[".repeat(deep - 1), "]".repeat(deep - 1)).into_bytes()
    };
    for (deep, told) in [
        (125, "do not fit"),
        (126, "nested more than 125 deep"),
        (128, "nested more than 125 deep"),
    ] {
        worker.send("crypto.hash", &nested(deep));
        let settled = worker.settled();
        assert_eq!(settled.code, Some(CallCode::BadRequest));
        let why = String::from_utf8(settled.body).unwrap();
        assert!(why.contains(told) && !why.contains("recursion"), "{deep}: {why}");
    }
}

#[test]
fn a_built_in_is_held_to_size_and_budget() {
    let mut broker = Broker::unconfigured();
    let few = RunLimits { calls: 2, request_bytes: 200_000, response_bytes: 100, ..limits() };
    let mut worker = broker.run(&["crypto.hash"], few);
    let long = "x".repeat(200_000);
    let (code, _) = worker.call("crypto.hash", &json!({"algorithm": "sha256", "text": long}));
    assert_eq!(code, Some(CallCode::RequestTooLarge));
    // 128 digits do not fit into 100 bytes; 64 do.
    let (code, _) = worker.call("crypto.hash", &json!({"algorithm": "sha512", "text": "abc"}));
    assert_eq!(code, Some(CallCode::ResponseTooLarge));
    assert_eq!(worker.call("crypto.hash", &abc()).0, None);
    assert_eq!(worker.call("crypto.hash", &abc()).0, Some(CallCode::BudgetSpent));
}

#[test]
fn a_large_request_to_a_built_in_is_answered_like_a_small_one() {
    use sha2::Digest as _;
    let mut broker = Broker::unconfigured();
    let mut worker = broker.run(&["crypto.hash"], limits());
    let long = "x".repeat(200_000);
    let expected: String =
        sha2::Sha256::digest(long.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    let (code, said) = worker.call("crypto.hash", &json!({"algorithm": "sha256", "text": long}));
    assert_eq!((code, said), (None, json!({"hex": expected})));
    let wrong = json!({"algorithm": "md5", "text": long});
    assert_eq!(worker.call("crypto.hash", &wrong).0, Some(CallCode::BadRequest));
}

#[test]
fn a_built_in_is_pinned_by_its_grant() {
    let mut broker = Broker::unconfigured();
    let request = Request::IssueGrant(grant_request(&["crypto.hash"]));
    let Reply::Grant(token) = broker.ask(&request) else { panic!("no grant") };
    let digest = broker.tools()[0].definition_sha256;
    let (mut worker, claims) =
        broker.open(run_request("alice", Authority::Grant(token), limits())).unwrap();
    assert_eq!(claims.tools[0].definition_sha256, digest);
    assert_eq!(worker.call("crypto.hash", &abc()).0, None);
}

#[test]
fn a_built_in_that_does_not_exist_is_refused_with_the_closest_name() {
    let mut broker = Broker::unconfigured();
    let tools = vec![name("crypto.hsh")];
    let (kind, message) =
        broker.open(run_request("alice", Authority::Tools(tools), limits())).err().unwrap();
    assert_eq!(kind, RefusalKind::NoSuchTool);
    assert!(message.contains("did you mean \"crypto.hash\""), "{message}");
}

#[test]
fn no_configured_server_can_take_a_reserved_name() {
    for reserved in RESERVED_SERVERS {
        let folder = tempfile::tempdir().unwrap();
        let mcp = folder.path().join("mcp.json");
        let servers = json!({"mcpServers": {reserved: {"command": test_server()}}});
        std::fs::write(&mcp, servers.to_string()).unwrap();
        let own = folder.path().join("forge.toml");
        std::fs::write(&own, format!("[servers.{reserved}]\ncommand = \"x\"\n")).unwrap();
        for (flag, file) in [("--mcp-config", mcp), ("--config", own)] {
            let args = [flag.to_owned(), file.to_str().unwrap().to_owned()];
            let mut broker = Broker::spawn(tempfile::tempdir().unwrap(), &args);
            let status = support::wait(&mut broker.child);
            let (_, log) = broker.finish();
            assert_eq!(status.code(), Some(2), "{flag} {reserved}");
            let said = log.contains(&format!(".{reserved}: this name is reserved"));
            assert!(said, "{flag} {reserved}: {log}");
        }
    }
}

const STASH_AND_KEYS: &str = "
[builtins.stash]
groups = { team = ['alice', 'bob'] }
[builtins.crypto.keys.hook]
algorithm = 'hmac-sha256'
secret = { from_env = 'CANARY' }
uses = ['sign', 'verify']
principals = ['alice']
";

fn run_of(broker: &mut Broker, principal: &str, run: u8, tools: &[&str]) -> support::Worker {
    let tools = tools.iter().map(|tool| name(tool)).collect();
    let mut request = run_request(principal, Authority::Tools(tools), limits());
    request.run_id = forge_protocol::RunId([run; 16]);
    broker.open(request).unwrap().0
}

#[test]
fn a_stash_is_a_runs_own_and_a_groups_is_its_members() {
    let mut broker = Broker::with_forge_toml(STASH_AND_KEYS);
    let tools = ["stash.put", "stash.get", "stash.delete", "stash.list"];
    let mut first = run_of(&mut broker, "alice", 1, &tools);
    let mut second = run_of(&mut broker, "alice", 2, &tools);
    let mut bob = run_of(&mut broker, "bob", 3, &tools);
    let mut eve = run_of(&mut broker, "eve", 4, &tools);
    let own = json!({ "key": "k", "value": { "n": [1, 2] } });
    assert_eq!(first.call("stash.put", &own), (None, json!({ "expires_in_s": 3600 })));
    let key = json!({ "key": "k" });
    let found = json!({ "found": true, "value": { "n": [1, 2] } });
    assert_eq!(first.call("stash.get", &key), (None, found));
    for other in [&mut second, &mut bob, &mut eve] {
        assert_eq!(other.call("stash.get", &key), (None, json!({ "found": false })));
    }
    let shared = json!({ "key": "k", "value": "ours", "group": "team" });
    assert_eq!(first.call("stash.put", &shared).0, None);
    let key = json!({ "key": "k", "group": "team" });
    assert_eq!(bob.call("stash.get", &key).1["value"], "ours");
    for (tool, arguments) in [("stash.get", &key), ("stash.put", &shared), ("stash.delete", &key)] {
        let (code, why) = eve.call(tool, arguments);
        assert_eq!((code, &why["code"]), (Some(CallCode::ToolFailed), &json!("not_allowed")));
    }
    let elsewhere = json!({ "key": "k", "group": "others" });
    assert_eq!(bob.call("stash.get", &elsewhere).0, Some(CallCode::BadRequest));
    assert_eq!(bob.call("stash.delete", &key).1, json!({ "deleted": true }));
    assert_eq!(first.call("stash.list", &json!({ "group": "team" })).1["entries"], json!([]));
    // Nothing of a run's own is left for one that comes under its number.
    drop(first);
    let until = std::time::Instant::now() + support::PATIENCE;
    let is_there = |broker: &mut Broker| {
        let mut again = run_of(broker, "alice", 1, &tools);
        again.call("stash.get", &json!({ "key": "k" })).1["found"] == true
    };
    while is_there(&mut broker) {
        assert!(std::time::Instant::now() < until, "it is kept");
    }
}

#[test]
fn a_stash_is_of_the_session_that_a_run_is_opened_in_whether_its_grant_names_one_or_not() {
    let mut broker = Broker::with_forge_toml(STASH_AND_KEYS);
    let tools = ["stash.put", "stash.get"];
    let Reply::Grant(token) = broker.ask(&Request::IssueGrant(grant_request(&tools))) else {
        panic!("no grant");
    };
    let mut open = |run: u8, session: Option<&str>, granted: bool| {
        let names = tools.iter().map(|tool| name(tool)).collect();
        let authority =
            if granted { Authority::Grant(token.clone()) } else { Authority::Tools(names) };
        let mut request = run_request("alice", authority, limits());
        request.run_id = forge_protocol::RunId([run; 16]);
        request.session = session.map(str::to_owned);
        broker.open(request).unwrap().0
    };
    let (put, key) = (json!({ "key": "k", "value": "v" }), json!({ "key": "k" }));
    assert_eq!(open(1, Some("s-17"), true).call("stash.put", &put).0, None);
    for (run, session, granted, found) in [
        (2, Some("s-17"), true, true),
        (3, Some("s-17"), false, true),
        (4, Some("s-18"), true, false),
        (5, None, true, false),
    ] {
        let got = open(run, session, granted).call("stash.get", &key);
        assert_eq!(got.1["found"], found, "{session:?} {granted}: {got:?}");
    }
}

#[test]
fn a_key_signs_for_whom_it_is_and_is_never_told() {
    let mut broker = Broker::with_forge_toml(STASH_AND_KEYS);
    let tools = ["crypto.hmac", "crypto.verify"];
    let mut alice = run_of(&mut broker, "alice", 1, &tools);
    let mut bob = run_of(&mut broker, "bob", 2, &tools);
    let asked = json!({ "key": "hook", "text": "a message" });
    let (code, signed) = alice.call("crypto.hmac", &asked);
    assert_eq!(code, None, "{signed}");
    let mut check = asked.clone();
    check["signature"] = signed["hex"].clone();
    check["encoding"] = json!("hex");
    assert_eq!(alice.call("crypto.verify", &check), (None, json!({ "valid": true })));
    check["text"] = json!("another message");
    assert_eq!(alice.call("crypto.verify", &check), (None, json!({ "valid": false })));
    for (tool, arguments) in [("crypto.hmac", &asked), ("crypto.verify", &check)] {
        let (code, why) = bob.call(tool, arguments);
        assert_eq!((code, &why["code"]), (Some(CallCode::ToolFailed), &json!("not_allowed")));
    }
    let other = json!({ "key": "other", "text": "x" });
    assert_eq!(alice.call("crypto.hmac", &other).0, Some(CallCode::BadRequest));
    let told = format!("{:?}", broker.tools());
    drop((alice, bob));
    let (_, log) = broker.finish();
    assert!(!log.contains(support::CANARY) && !told.contains(support::CANARY));
}

#[test]
fn a_resource_is_read_where_a_rule_allows_it_scrubbed_and_within_its_limit() {
    let mut broker = Broker::with_forge_toml(&format!(
        "[servers.test]\ncommand = {:?}\ncredentials = {{ TEST_TOKEN = {{ from_env = 'CANARY' }} }}\n\
         [builtins.resource]\nbytes_max = 1000\n\
         allow = [{{ server = 'test', uri_prefix = 'test://open/' }}]",
        test_server()
    ));
    let mut worker = broker.run(&["resource.read"], limits());
    let mut read =
        |uri: &str| worker.call("resource.read", &json!({ "server": "test", "uri": uri }));
    let (code, said) = read("test://open/echo/hello");
    assert_eq!(code, None, "{said}");
    assert_eq!(said["contents"][0]["text"], "hello");
    assert_eq!(said["contents"][0]["uri"], "test://open/echo/hello");
    let (code, said) = read("test://open/token");
    assert_eq!((code, &said["contents"][0]["text"]), (None, &json!("[credential removed]")));
    for (uri, expected) in [
        ("test://open/large", json!("too_large")),
        ("test://closed/echo/x", json!("not_allowed")),
        ("test://open/../closed/echo/x", json!("not_allowed")),
        ("test://open/%2e%2e/closed/echo/x", json!("not_allowed")),
    ] {
        let (code, why) = read(uri);
        assert_eq!((code, &why["code"]), (Some(CallCode::ToolFailed), &expected), "{uri} {why}");
    }
    // The server's own refusal, with its own number.
    let (code, why) = read("test://open/none");
    assert_eq!((code, why["code"].is_i64()), (Some(CallCode::ToolFailed), true), "{why}");
    let other = json!({ "server": "other", "uri": "test://open/token" });
    assert_eq!(worker.call("resource.read", &other).0, Some(CallCode::BadRequest));
}
