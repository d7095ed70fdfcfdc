//! MCP servers over HTTP, seen through the broker's own doors: the real broker
//! process, and servers of the tests on loopback that keep the protocol of
//! either era, or break it.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::{any, get, post};
use forge_protocol::abi::CallCode;
use forge_protocol::broker::{Authority, Reply, Request};
use forge_protocol::limits::RunLimits;
use serde_json::{Value, json};
use support::web::{Era, Mcp, Web, tool};
use support::{Broker, CANARY, PATIENCE, name, run_request};

/// A broker with one server `web` in `forge.toml`, with these lines about it.
fn broker(web: &Web, lines: &str) -> Broker {
    broker_at(&web.url("/mcp"), lines)
}

fn broker_at(url: &str, lines: &str) -> Broker {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("forge.toml");
    std::fs::write(&file, format!("[servers.web]\nurl = \"{url}\"\n{lines}\n")).unwrap();
    let args = ["--config".to_owned(), file.to_str().unwrap().to_owned()];
    let mut broker = Broker::spawn(folder, &args);
    broker.say_hello();
    broker
}

/// Why the server cannot be asked.
fn unavailable(broker: &mut Broker) -> String {
    match broker.ask(&Request::ListTools { principal: "alice".into() }) {
        Reply::Tools { unavailable, .. } => format!("{unavailable:?}"),
        other => panic!("{other:?}"),
    }
}

fn limits() -> RunLimits {
    RunLimits { wall_ms: 60_000, ..RunLimits::default() }
}

const BEARER: &str = "headers.Authorization = { from_env = \"CANARY\", prefix = \"Bearer \" }";

#[test]
fn servers_of_both_eras_are_listed_and_called_in_their_own_words() {
    for era in [Era::Session, Era::NoSession, Era::Modern] {
        let mcp = Mcp::new(era);
        let web = mcp.serve();
        let mut broker = broker(&web, "");
        let names: Vec<String> = broker.tools().iter().map(|tool| tool.name.to_string()).collect();
        assert!(names.contains(&"web.echo".to_owned()), "{names:?}");
        let mut worker =
            broker.run(&["web.echo", "web.echo_sse", "web.refuse", "web.fail"], limits());
        for tool in ["web.echo", "web.echo_sse"] {
            let (code, said) = worker.call(tool, &json!({"a": [1, "two"]}));
            assert_eq!(code, None, "{era:?} {tool} {said}");
            assert!(said[0]["text"].as_str().unwrap().contains(r#"{"a":[1,"two"]}"#), "{said}");
        }
        let (code, error) = worker.call("web.refuse", &json!({}));
        assert_eq!(code, Some(CallCode::ToolFailed));
        assert!(error.to_string().contains("not like this"), "{error}");
        assert_eq!(worker.call("web.fail", &json!({})).0, Some(CallCode::ToolFailed));
        let (status, _) = broker.finish();
        assert!(status.success());
        let inner = mcp.get();
        let calls: Vec<_> = inner.seen.iter().filter(|seen| seen.tool().is_some()).collect();
        let version = if era == Era::Modern { "2026-07-28" } else { "2025-06-18" };
        for call in &calls {
            assert_eq!(call.header("mcp-protocol-version"), Some(version), "{era:?}");
            assert_eq!(call.header("mcp-session-id").is_some(), era == Era::Session, "{era:?}");
        }
        let ended = inner.seen.iter().filter(|seen| seen.method == "DELETE").count();
        assert_eq!(ended, usize::from(era == Era::Session), "a session is given back");
    }
}

#[test]
fn an_old_server_is_used_whatever_it_makes_of_the_newer_beginning() {
    let html = |status| Some((status, "text/html"));
    for said in [
        html(500),
        html(503),
        html(405),
        html(200),
        html(202),
        html(204),
        Some((200, "application/json")),
        Some((200, "text/event-stream")),
        Some((200, "text/event-stream; silent")),
        // To whatever it is asked.
        Some((200, "application/json; agrees")),
        Some((200, "text/event-stream; agrees")),
        None,
    ] {
        let mcp = Mcp::new(Era::Session);
        mcp.get().on_discover = Some(said);
        let web = mcp.serve();
        let mut broker = broker(&web, "");
        let mut worker = broker.run(&["web.echo"], limits());
        let (code, answer) = worker.call("web.echo", &json!({}));
        assert_eq!(code, None, "{said:?}: {answer}");
    }
}

#[test]
fn an_address_that_is_no_mcp_servers_is_told_by_what_it_answers() {
    let router =
        Router::new().route("/mcp", any(|| async { ([("content-type", "text/html")], "<p>") }));
    let why = unavailable(&mut broker(&Web::serve(router), ""));
    assert!(why.contains("its answer is text/html") && why.contains("address"), "{why}");
}

#[test]
fn a_credential_goes_into_its_header_and_nowhere_else() {
    let mcp = Mcp::new(Era::Session);
    mcp.get().token = Some(format!("Bearer {CANARY}"));
    let web = mcp.serve();
    let other = Mcp::new(Era::Modern);
    let other_web = other.serve();
    let lines = format!("{BEARER}\n[servers.other]\nurl = \"{}\"", other_web.url("/mcp"));
    let mut broker = broker(&web, &lines);
    let mut worker = broker.run(&["web.echo", "web.echo_sse", "other.echo"], limits());
    // The server says back every header that it got.
    for tool in ["web.echo", "web.echo_sse"] {
        let (code, said) = worker.call(tool, &json!({}));
        assert_eq!(code, None);
        let said = said.to_string();
        assert!(said.contains("[credential removed]") && !said.contains(CANARY), "{said}");
    }
    assert_eq!(worker.call("other.echo", &json!({})).0, None);
    let (_, log) = broker.finish();
    assert!(log.contains("tool server is up") && !log.contains(CANARY), "it is in the log");
    for seen in &mcp.get().seen {
        let holders: Vec<&str> = seen
            .headers
            .iter()
            .filter(|(_, value)| value.to_str().unwrap().contains(CANARY))
            .map(|(name, _)| name.as_str())
            .collect();
        assert_eq!(holders, ["authorization"]);
        assert!(!seen.body.to_string().contains(CANARY) && !seen.path.contains(CANARY));
    }
    for seen in &other.get().seen {
        assert!(!format!("{seen:?}").contains(CANARY), "{seen:?}");
    }
}

#[test]
fn the_mcp_json_form_reaches_the_same_server() {
    let mcp = Mcp::new(Era::Session);
    mcp.get().token = Some(format!("Bearer {CANARY}"));
    let web = mcp.serve();
    let mut broker = Broker::with_config(&json!({"mcpServers": {"web": {
        "type": "http", "url": web.url("/mcp"),
        "headers": {"Authorization": "Bearer ${CANARY}"},
    }}}));
    let mut worker = broker.run(&["web.echo"], limits());
    let (code, said) = worker.call("web.echo", &json!({}));
    assert_eq!(code, None);
    assert!(!said.to_string().contains(CANARY), "{said}");
}

#[test]
fn a_missing_credential_is_told_with_the_field_to_set() {
    let mcp = Mcp::new(Era::Session);
    mcp.get().token = Some("Bearer other".into());
    let web = mcp.serve();
    let why = unavailable(&mut broker(&web, BEARER));
    assert!(why.contains("401") && why.contains("`headers`") && !why.contains(CANARY), "{why}");
}

#[test]
fn a_redirect_is_never_followed_and_the_credential_goes_nowhere_else() {
    let elsewhere = Mcp::new(Era::Session);
    let trap = elsewhere.serve();
    // At the first word already.
    let target = trap.url("/mcp");
    let router = Router::new().route(
        "/mcp",
        any(move || async move { (axum::http::StatusCode::FOUND, [("location", target)]) }),
    );
    let redirecting = Web::serve(router);
    let why = unavailable(&mut broker(&redirecting, BEARER));
    assert!(why.contains("302") && why.contains("redirect"), "{why}");
    // And in the middle of things.
    let mcp = Mcp::new(Era::Session);
    mcp.get().elsewhere = trap.url("/mcp");
    let web = mcp.serve();
    let mut broker = broker(&web, BEARER);
    let mut worker = broker.run(&["web.redirect"], limits());
    let (code, error) = worker.call("web.redirect", &json!({}));
    assert_eq!(code, Some(CallCode::ToolFailed));
    assert!(error["message"].as_str().unwrap().contains("307"), "{error}");
    assert!(elsewhere.get().seen.is_empty(), "{:?}", elsewhere.get().seen);
}

#[test]
fn a_list_without_end_is_bounded() {
    let mcp = Mcp::new(Era::Session);
    mcp.get().endless_list = true;
    let web = mcp.serve();
    let why = unavailable(&mut broker(&web, ""));
    assert!(why.contains("more than 200 pages"), "{why}");
    let asked = mcp.get().seen.iter().filter(|seen| seen.body["method"] == "tools/list").count();
    assert_eq!(asked, 200);
}

#[test]
fn a_lost_session_is_made_anew_and_the_call_carried_out_once() {
    let mcp = Mcp::new(Era::Session);
    let web = mcp.serve();
    let mut broker = broker(&web, "");
    let mut worker = broker.run(&["web.echo"], limits());
    assert_eq!(worker.call("web.echo", &json!({})).0, None);
    mcp.forget_sessions();
    let (code, said) = worker.call("web.echo", &json!({"again": 1}));
    assert_eq!(code, None, "{said}");
    assert!(said.to_string().contains("session-2"), "{said}");
    // One, one that was refused with 404, and one in the new session.
    assert_eq!(mcp.calls("echo"), 3);
}

#[test]
fn a_tool_that_is_another_in_the_new_session_is_not_called() {
    let mcp = Mcp::new(Era::Session);
    mcp.get().tools = vec![tool("own", "As granted.")];
    let web = mcp.serve();
    let mut broker = broker(&web, "");
    let mut worker = broker.run(&["web.own"], limits());
    assert_eq!(worker.call("web.own", &json!({})).0, None);
    mcp.get().tools = vec![tool("own", "Something else.")];
    mcp.forget_sessions();
    let (code, error) = worker.call("web.own", &json!({}));
    assert_eq!(code, Some(CallCode::ToolFailed));
    assert!(error["message"].as_str().unwrap().contains("another tool"), "{error}");
    assert_eq!(mcp.calls("own"), 2, "the second was refused with 404");
    assert_eq!(worker.call("web.own", &json!({})).0, Some(CallCode::Denied));
    assert_eq!(mcp.calls("own"), 2);
}

#[test]
fn tools_are_listed_again_when_the_server_says_that_they_changed() {
    for era in [Era::Session, Era::Modern] {
        let mcp = Mcp::new(era);
        let web = mcp.serve();
        let mut broker = broker(&web, "");
        let before = broker.tools().len();
        mcp.has_listener();
        mcp.get().tools = vec![tool("late", "New.")];
        assert_eq!(broker.tools().len(), before, "{era:?}: nobody said so");
        mcp.announce();
        let until = Instant::now() + PATIENCE;
        while broker.tools().len() == before {
            assert!(Instant::now() < until, "{era:?}: never listed again");
        }
        let mut worker = broker.run(&["web.late"], limits());
        assert_eq!(worker.call("web.late", &json!({})).0, None);
    }
}

#[test]
fn a_server_that_breaks_off_leaves_the_outcome_unknown_and_is_not_asked_again() {
    let mcp = Mcp::new(Era::Session);
    let web = mcp.serve();
    for name in ["die", "die_sse"] {
        let mut broker = broker(&web, "");
        let tool = format!("web.{name}");
        let mut worker = broker.run(&[&tool, "web.echo"], limits());
        let (code, said) = worker.call(&tool, &json!({}));
        assert_eq!(code, Some(CallCode::OutcomeUnknown), "{name}: {said}");
        assert_eq!(mcp.calls(name), 1, "{name} is never repeated");
        assert_eq!(worker.call("web.echo", &json!({})).0, None, "after {name}");
    }
}

#[test]
fn lines_that_the_standard_has_ignored_cost_no_answer() {
    let mcp = Mcp::new(Era::Session);
    let web = mcp.serve();
    let mut broker = broker(&web, "");
    let (code, said) = broker.run(&["web.odd_sse"], limits()).call("web.odd_sse", &json!({}));
    assert_eq!(code, None, "{said}");
}

#[test]
fn attack_23_an_answer_over_http_of_millions_of_values_takes_no_more_memory_than_others() {
    for era in [Era::Session, Era::Modern] {
        let mcp = Mcp::new(era);
        let web = mcp.serve();
        let mut broker = broker(&web, "");
        let mut worker = broker.run(&["web.many", "web.many_sse", "web.echo"], limits());
        for name in ["many", "many_sse"] {
            let (code, error) = worker.call(&format!("web.{name}"), &json!({}));
            assert_eq!(code, Some(CallCode::BadResponse), "{name}: {error}");
            assert!(error.to_string().contains("values"), "{name}: {error}");
            assert_eq!(mcp.calls(name), 1, "{name} is not repeated");
            // It did answer, so its session goes on.
            let (code, said) = worker.call("web.echo", &json!({}));
            assert_eq!(code, None, "after {name}: {said}");
        }
        assert!(broker.peak_mib() < 128, "{} MiB", broker.peak_mib());
    }
}

#[test]
fn an_exchange_that_is_over_is_the_end_of_its_call_whatever_was_said() {
    let mcp = Mcp::new(Era::Session);
    let web = mcp.serve();
    let mut broker = broker(&web, "");
    for (name, code, says) in [
        ("garbled", CallCode::BadResponse, "no JSON"),
        ("garbled_sse", CallCode::BadResponse, "no JSON"),
        ("endless", CallCode::BadResponse, "16 MiB"),
        ("endless_sse", CallCode::BadResponse, "16 MiB"),
        ("puzzled_sse", CallCode::ToolFailed, "pardon?"),
        ("nobodys", CallCode::BadResponse, "another request"),
        ("puzzled", CallCode::ToolFailed, "pardon?"),
        ("accepted", CallCode::BadResponse, "with nothing"),
        ("silent", CallCode::BadResponse, "with nothing"),
    ] {
        let mut worker = broker.run(&[&format!("web.{name}"), "web.echo"], limits());
        let (got, error) = worker.call(&format!("web.{name}"), &json!({}));
        assert_eq!(got, Some(code), "{name}: {error}");
        assert!(error.to_string().contains(says), "{name}: {error}");
        assert_eq!(worker.call("web.echo", &json!({})).0, None, "after {name}");
        assert_eq!(mcp.calls(name), 1, "{name} is never repeated");
    }
    let mut worker = broker.run(&["web.texted"], limits());
    assert_eq!(worker.call("web.texted", &json!({})).0, None, "its number as a text");
    // All in one session.
    assert!(mcp.get().seen.iter().filter(|it| it.body["method"] == "initialize").count() == 1);
    // A stream that breaks off is no end of its call, whatever another of its session was.
    let mut worker = broker.run(&["web.die_sse"], limits());
    assert_eq!(worker.call("web.die_sse", &json!({})).0, Some(CallCode::OutcomeUnknown));
}

#[test]
fn a_server_that_has_resources_and_no_tools_is_read() {
    let mcp = Mcp::new(Era::Session);
    mcp.get().has_no_tools = true;
    mcp.get().resources = vec![resource("hello")];
    let web = mcp.serve();
    let mut broker = broker(&web, RESOURCES);
    let mut worker = broker.run(&["resource.read"], limits());
    let asked = json!({ "server": "web", "uri": "test://x" });
    let (code, said) = worker.call("resource.read", &asked);
    assert_eq!(code, None, "{said}");
    assert!(said.to_string().contains("hello"), "{said}");
}

#[test]
fn a_resource_that_is_none_is_a_bad_response() {
    let mcp = Mcp::new(Era::Session);
    let web = mcp.serve();
    let allow = "[builtins.resource]\nallow = [{ server = 'web', uri_prefix = 'test://' }]";
    let mut broker = broker(&web, allow);
    let mut worker = broker.run(&["resource.read"], limits());
    let asked = json!({ "server": "web", "uri": "test://x" });
    let (code, error) = worker.call("resource.read", &asked);
    assert_eq!(code, Some(CallCode::BadResponse), "{error}");
    assert!(error["error"].as_str().unwrap().contains("no resource"), "{error}");
}

const RESOURCES: &str = "[builtins.resource]\nallow = [{ server = 'web', uri_prefix = 'test://' }]";

/// A resource that may be kept for an hour.
fn resource(text: &str) -> (u16, Value) {
    let contents = json!([{ "uri": "test://x", "text": text }]);
    let kept = json!({ "resultType": "complete", "ttlMs": 3_600_000, "cacheScope": "public" });
    let mut result = kept;
    result["contents"] = contents;
    (200, result)
}

fn reads(mcp: &Mcp) -> usize {
    mcp.get().seen.iter().filter(|it| it.body["method"] == "resources/read").count()
}

#[test]
fn every_read_of_a_resource_is_sent_and_none_is_answered_from_memory() {
    for era in [Era::Session, Era::Modern] {
        let mcp = Mcp::new(era);
        mcp.get().resources = vec![resource("one"), resource("two"), (403, Value::Null)];
        let web = mcp.serve();
        let mut broker = broker(&web, RESOURCES);
        let mut worker = broker.run(&["resource.read"], limits());
        let asked = json!({ "server": "web", "uri": "test://x" });
        for text in ["one", "two"] {
            let (code, said) = worker.call("resource.read", &asked);
            assert_eq!(code, None, "{era:?}: {said}");
            assert_eq!(said["contents"][0]["text"], text, "{era:?}");
        }
        let (code, error) = worker.call("resource.read", &asked);
        assert_eq!(code, Some(CallCode::ToolFailed), "{era:?}: {error}");
        assert_eq!(reads(&mcp), 3, "{era:?}");
    }
}

#[test]
fn a_resource_that_is_refused_costs_nobody_the_session() {
    let mcp = Mcp::new(Era::Session);
    mcp.get().resources = [403, 400, 429].map(|status| (status, Value::Null)).to_vec();
    mcp.get().resources.push(resource("x"));
    let web = mcp.serve();
    let mut broker = broker(&web, RESOURCES);
    let mut worker = broker.run(&["resource.read", "web.echo"], limits());
    let asked = json!({ "server": "web", "uri": "test://x" });
    for _ in 0..3 {
        let (code, error) = worker.call("resource.read", &asked);
        assert_eq!((code, error["name"].as_str()), (Some(CallCode::ToolFailed), Some("Refused")));
        assert_eq!(worker.call("web.echo", &json!({})).0, None);
    }
    assert_eq!(worker.call("resource.read", &asked).0, None);
    let began =
        |mcp: &Mcp| mcp.get().seen.iter().filter(|it| it.body["method"] == "initialize").count();
    assert_eq!(began(&mcp), 1);
}

#[test]
fn a_resource_is_read_in_a_new_session_where_its_own_is_over() {
    let mcp = Mcp::new(Era::Session);
    let web = mcp.serve();
    let mut broker = broker(&web, RESOURCES);
    let mut worker = broker.run(&["resource.read"], limits());
    let asked = json!({ "server": "web", "uri": "test://x" });
    mcp.get().resources = vec![resource("x"), resource("y")];
    assert_eq!(worker.call("resource.read", &asked).0, None);
    mcp.forget_sessions();
    let (code, said) = worker.call("resource.read", &asked);
    assert_eq!((code, &said["contents"][0]["text"]), (None, &json!("y")), "{said}");
    let began = mcp.get().seen.iter().filter(|it| it.body["method"] == "initialize").count();
    assert_eq!((began, reads(&mcp)), (2, 3), "once more and no more");
    // A server that knows no session for long is not asked for ever.
    mcp.get().resources = vec![(404, Value::Null), (404, Value::Null)];
    let (code, error) = worker.call("resource.read", &asked);
    assert_eq!((code, error["name"].as_str()), (Some(CallCode::ToolFailed), Some("SessionLost")));
    assert_eq!(reads(&mcp), 5);
}

#[test]
fn a_session_that_a_server_does_not_know_is_begun_anew_however_it_says_so() {
    let mcp = Mcp::new(Era::Session);
    mcp.get().forgets_by_400 = true;
    let web = mcp.serve();
    let mut broker = broker(&web, "");
    let mut worker = broker.run(&["web.echo"], limits());
    for _ in 0..2 {
        mcp.forget_sessions();
        let (code, said) = worker.call("web.echo", &json!({}));
        assert_eq!(code, None, "{said}");
    }
}

#[test]
fn a_program_hears_that_it_was_refused_and_not_what_the_operator_should_do() {
    let mcp = Mcp::new(Era::Session);
    let web = mcp.serve();
    let mut broker = broker(&web, "");
    let mut worker = broker.run(&["web.echo"], limits());
    for status in [401, 403, 302, 403] {
        mcp.get().refuse = vec![status];
        let (code, error) = worker.call("web.echo", &json!({}));
        assert_eq!((code, error["name"].as_str()), (Some(CallCode::ToolFailed), Some("Refused")));
        assert_eq!(error["message"], format!("it answers {status}"));
    }
    let (_, log) = broker.finish();
    for what in ["`headers`", "forbidden", "configure its target"] {
        assert_eq!(log.matches(what).count(), 1, "the operator hears it once: {log}");
    }
}

#[test]
fn a_program_hears_that_no_other_session_began_and_not_why() {
    let mcp = Mcp::new(Era::Session);
    let web = mcp.serve();
    let mut broker = broker(&web, "");
    let mut worker = broker.run(&["web.echo"], limits());
    assert_eq!(worker.call("web.echo", &json!({})).0, None);
    mcp.forget_sessions();
    mcp.get().endless_list = true;
    let (code, error) = worker.call("web.echo", &json!({}));
    assert_eq!((code, error["name"].as_str()), (Some(CallCode::ToolFailed), Some("SessionLost")));
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("cannot be used now") && !message.contains("pages"), "{message}");
    let (_, log) = broker.finish();
    assert!(log.contains("more than 200 pages"), "the operator hears it: {log}");
}

#[test]
fn a_server_that_asks_very_much_at_once_is_answered_and_heard() {
    let mcp = Mcp::new(Era::Session);
    let web = mcp.serve();
    let mut broker = broker(&web, "");
    let mut worker = broker.run(&["web.asks_sse"], limits());
    let (code, said) = worker.call("web.asks_sse", &json!({}));
    assert_eq!(code, None, "{said}");
    mcp.wait_until("every question was answered", |inner| {
        inner.seen.iter().filter(|it| it.body["result"].is_object()).count() == 1_000
    });
}

#[test]
fn a_server_that_hangs_holds_up_nothing_but_its_call() {
    let mcp = Mcp::new(Era::Session);
    let web = mcp.serve();
    let mut broker = broker(&web, "");
    // The journal stands.
    assert_eq!(broker.run(&["web.echo"], limits()).call("web.echo", &json!({})).0, None);
    let mut worker =
        broker.run(&["web.hang", "web.echo"], RunLimits { wall_ms: 4_000, ..limits() });
    let hung = worker.send("web.hang", b"{}");
    mcp.wait_until("the call arrived", |inner| {
        inner.seen.iter().any(|it| it.tool() == Some("hang"))
    });
    let quick = worker.send("web.echo", b"{}");
    assert_eq!(worker.settled().id, quick);
    let settled = worker.settled();
    assert_eq!((settled.id, settled.code), (hung, Some(CallCode::OutcomeUnknown)));
}

#[test]
fn a_principal_whose_calls_a_server_takes_its_time_for_keeps_no_other_from_it() {
    let mcp = Mcp::new(Era::Session);
    let web = mcp.serve();
    let mut broker = broker(&web, "");
    assert_eq!(broker.run(&["web.echo"], limits()).call("web.echo", &json!({})).0, None);
    let _alices: Vec<_> = (0..40)
        .map(|_| {
            let mut hers = broker.run(&["web.hang"], limits());
            for _ in 0..8 {
                hers.send("web.hang", b"{}");
            }
            hers
        })
        .collect();
    // As many of hers as may be there at once, and no more.
    mcp.wait_until("her calls arrived", |inner| {
        inner.seen.iter().filter(|it| it.tool() == Some("hang")).count() >= 256
    });
    let tools = Authority::Tools(vec![name("web.echo")]);
    let mut bobs = broker.open(run_request("bob", tools, limits())).unwrap().0;
    assert_eq!(bobs.call("web.echo", &json!({})).0, None);
    assert_eq!(mcp.calls("hang"), 256);
}

#[test]
fn a_stream_that_breaks_is_resumed_where_it_was() {
    let mcp = Mcp::new(Era::Session);
    let web = mcp.serve();
    let mut broker = broker(&web, "");
    let mut worker = broker.run(&["web.resume"], limits());
    let (code, said) = worker.call("web.resume", &json!({"x": 1}));
    assert_eq!(code, None, "{said}");
    assert!(said.to_string().contains(r#"\"x\":1"#), "{said}");
    assert_eq!(mcp.calls("resume"), 1, "resumed is not repeated");
    let inner = mcp.get();
    let resumed = inner.seen.iter().find(|seen| seen.header("last-event-id").is_some()).unwrap();
    assert_eq!((resumed.method.as_str(), resumed.header("last-event-id")), ("GET", Some("7")));
}

#[test]
fn a_server_that_is_not_there_or_speaks_no_tls_is_told_and_no_bug() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let why = unavailable(&mut broker_at(&format!("http://{closed}/mcp"), ""));
    assert!(why.contains("cannot be reached"), "{why}");
    let plain = Mcp::new(Era::Session);
    let web = plain.serve();
    let mut broker = broker_at(&web.url("/mcp").replace("http:", "https:"), BEARER);
    let why = unavailable(&mut broker);
    assert!(why.contains("cannot be reached"), "{why}");
    assert!(broker.finish().0.success());
    assert!(plain.get().seen.is_empty());
}

/// An authorization server, and what it was asked.
#[derive(Clone, Default)]
struct Issuer(std::sync::Arc<std::sync::Mutex<Issued>>);

#[derive(Default)]
struct Issued {
    asked: Vec<(Option<String>, String)>,
    expires_in: Option<u64>,
    /// The metadata documents, by path.
    metadata: std::collections::BTreeMap<String, Value>,
    refuses: bool,
    /// How long a token takes.
    takes: Duration,
    /// How often its metadata was asked for.
    looked_up: usize,
}

impl Issuer {
    fn get(&self) -> std::sync::MutexGuard<'_, Issued> {
        self.0.lock().unwrap()
    }

    fn router(&self, mcp: Option<Mcp>) -> Router {
        let (metadata, token) = (self.clone(), self.clone());
        let wellknown = move |uri: axum::http::Uri| async move {
            metadata.get().looked_up += 1;
            let known = metadata.get().metadata.get(uri.path()).cloned();
            match known {
                Some(document) => (axum::http::StatusCode::OK, axum::Json(document)),
                None => (axum::http::StatusCode::NOT_FOUND, axum::Json(Value::Null)),
            }
        };
        let issue = move |headers: axum::http::HeaderMap, body: String| async move {
            let basic = headers.get("authorization").map(|it| it.to_str().unwrap().to_owned());
            let takes = token.get().takes;
            tokio::time::sleep(takes).await;
            let (count, expires_in) = {
                let mut issued = token.get();
                if issued.refuses {
                    let error = json!({"error": "invalid_client", "error_description": body});
                    return (axum::http::StatusCode::UNAUTHORIZED, axum::Json(error));
                }
                issued.asked.push((basic, body));
                (issued.asked.len(), issued.expires_in)
            };
            let mut answer =
                json!({"access_token": format!("access-token-{count}"), "token_type": "Bearer"});
            if let Some(seconds) = expires_in {
                answer["expires_in"] = seconds.into();
            }
            if let Some(mcp) = mcp {
                mcp.get().token = Some(format!("Bearer access-token-{count}"));
            }
            (axum::http::StatusCode::OK, axum::Json(answer))
        };
        Router::new().route("/token", post(issue)).route("/.well-known/{*rest}", get(wellknown))
    }

    /// Metadata as an authorization server at `origin` has it.
    fn describe(&self, origin: &str, grants: &[&str]) {
        self.get().metadata.insert(
            "/.well-known/oauth-authorization-server".into(),
            json!({"issuer": origin, "token_endpoint": format!("{origin}/token"),
                   "grant_types_supported": grants,
                   "token_endpoint_auth_methods_supported": ["client_secret_post"]}),
        );
    }
}

const ACCOUNT: &str = "client_id = \"me:x\", client_secret = { from_env = \"CANARY\" }";

/// The account at a server whose token endpoint is told.
fn tokens_of(id: &Web) -> String {
    format!("oauth = {{ {ACCOUNT}, token_url = \"{}\" }}", id.url("/token"))
}

/// The account at an issuer, who tells where the tokens are.
fn issued_by(id: &Web) -> String {
    format!("oauth = {{ {ACCOUNT}, issuer = \"{}\" }}", id.url(""))
}

#[test]
fn a_token_is_fetched_once_and_anew_once_when_it_is_refused() {
    let (mcp, issuer) = (Mcp::new(Era::Session), Issuer::default());
    mcp.get().token = Some("Bearer nobody has it".into());
    let web = mcp.serve();
    let id = Web::serve(issuer.router(Some(mcp.clone())));
    let oauth = format!(
        "oauth = {{ {ACCOUNT}, scopes = [\"a\", \"b c\"], token_url = \"{}\" }}",
        id.url("/token")
    );
    let mut broker = broker(&web, &oauth);
    let mut worker = broker.run(&["web.echo"], limits());
    for _ in 0..3 {
        let (code, said) = worker.call("web.echo", &json!({}));
        assert_eq!(code, None);
        let said = said.to_string();
        assert!(said.contains("[credential removed]") && !said.contains("access-token"), "{said}");
    }
    assert_eq!(issuer.get().asked.len(), 1, "one token for all");
    let (basic, form) = issuer.get().asked[0].clone();
    // base64 of `me%3Ax:canary-7f3a9c51-credential`.
    assert_eq!(basic.unwrap(), "Basic bWUlM0F4OmNhbmFyeS03ZjNhOWM1MS1jcmVkZW50aWFs");
    assert!(form.contains("grant_type=client_credentials&scope=a%20b%20c&resource=http%3A%2F%2F"));
    // Revoked: refused once, fetched once, called again once.
    mcp.get().token = Some("Bearer another".into());
    assert_eq!(worker.call("web.echo", &json!({})).0, None);
    assert_eq!(issuer.get().asked.len(), 2);
    assert_eq!(mcp.calls("echo"), 5);
    let (_, log) = broker.finish();
    assert!(!log.contains(CANARY) && !log.contains("access-token"), "it is in the log");
    for seen in &mcp.get().seen {
        assert!(!format!("{seen:?}").contains(CANARY), "the secret is not the server's: {seen:?}");
    }
}

#[test]
fn no_call_is_sent_whose_token_comes_when_its_run_is_over() {
    let (mcp, issuer) = (Mcp::new(Era::Session), Issuer::default());
    let web = mcp.serve();
    let id = Web::serve(issuer.router(Some(mcp.clone())));
    let mut broker = broker(&web, &tokens_of(&id));
    assert_eq!(broker.run(&["web.echo"], limits()).call("web.echo", &json!({})).0, None);
    // Refused, and the next token takes longer than the run has.
    mcp.get().token = Some("Bearer another".into());
    issuer.get().takes = Duration::from_millis(1_500);
    let mut worker = broker.run(&["web.echo"], RunLimits { wall_ms: 500, ..limits() });
    assert_eq!(worker.call("web.echo", &json!({})).0, Some(CallCode::OutcomeUnknown));
    // It is answered when that token is there.
    assert_eq!(broker.run(&["web.echo"], limits()).call("web.echo", &json!({})).0, None);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!((issuer.get().asked.len(), mcp.calls("echo")), (2, 3), "the token is kept");
}

#[test]
fn an_account_is_shown_and_a_token_asked_for_as_the_operator_says() {
    let (mcp, issuer) = (Mcp::new(Era::Session), Issuer::default());
    let web = mcp.serve();
    let id = Web::serve(issuer.router(Some(mcp.clone())));
    let oauth = format!(
        "oauth = {{ {ACCOUNT}, client_auth = \"post\", audience = \"https://x.example/a b\", \
         token_url = \"{}\" }}",
        id.url("/token")
    );
    let mut broker = broker(&web, &oauth);
    assert_eq!(broker.run(&["web.echo"], limits()).call("web.echo", &json!({})).0, None);
    let (header, form) = issuer.get().asked[0].clone();
    assert_eq!(header, None);
    assert!(form.contains("&audience=https%3A%2F%2Fx.example%2Fa%20b&"), "{form}");
    assert!(form.ends_with(&format!("&client_id=me%3Ax&client_secret={CANARY}")), "{form}");
}

#[test]
fn what_tokens_are_for_is_told_as_the_operator_or_the_servers_metadata_names_it() {
    let asked_for = |line: &str, named: Option<&str>| {
        let (mcp, issuer) = (Mcp::new(Era::Session), Issuer::default());
        let web = Web::serve(issuer.router(Some(mcp.clone())).merge(mcp.router()));
        issuer.describe(&web.url(""), &["client_credentials"]);
        let resource = named.map_or_else(|| web.url("/mcp"), |path| web.url(path));
        let metadata = json!({"resource": resource, "authorization_servers": [web.url("")]});
        issuer.get().metadata.insert("/.well-known/oauth-protected-resource/mcp".into(), metadata);
        let mut broker = broker(&web, &format!("oauth = {{ {ACCOUNT} {line} }}"));
        match named {
            Some("/other") => return unavailable(&mut broker),
            _ => drop(broker.tools()),
        }
        let (_, form) = issuer.get().asked[0].clone();
        let told = form.split('&').find_map(|it| it.strip_prefix("resource="));
        let host = web.url("").replace(':', "%3A").replace('/', "%2F");
        told.map_or_else(|| "nothing".into(), |it| it.replace(&host, "HOST"))
    };
    assert_eq!(asked_for("", None), "HOST%2Fmcp");
    assert_eq!(asked_for("", Some("")), "HOST");
    assert_eq!(asked_for(", resource = false", Some("")), "nothing");
    assert_eq!(asked_for(", resource = 'api:crm'", Some("")), "api%3Acrm");
    let why = asked_for("", Some("/other"));
    assert!(why.contains("its metadata is that of another resource"), "{why}");
}

#[test]
fn a_token_that_is_refused_again_and_again_is_an_error_and_no_loop() {
    let (mcp, issuer) = (Mcp::new(Era::Session), Issuer::default());
    mcp.get().token = Some("Bearer nobody has it".into());
    let web = mcp.serve();
    let id = Web::serve(issuer.router(None));
    let oauth = tokens_of(&id);
    let why = unavailable(&mut broker(&web, &oauth));
    assert!(why.contains("401"), "{why}");
    assert_eq!(issuer.get().asked.len(), 2);
}

#[test]
fn a_token_too_short_to_be_told_from_text_is_refused() {
    let mcp = Mcp::new(Era::Session);
    let web = mcp.serve();
    let short = || async { axum::Json(json!({"access_token": "the", "token_type": "Bearer"})) };
    let id = Web::serve(Router::new().route("/token", post(short)));
    let oauth = tokens_of(&id);
    let why = unavailable(&mut broker(&web, &oauth));
    assert!(why.contains("too short"), "{why}");
    assert!(mcp.get().seen.is_empty(), "the server heard nothing");
}

#[test]
fn a_token_is_fetched_anew_before_it_runs_out() {
    let (mcp, issuer) = (Mcp::new(Era::NoSession), Issuer::default());
    issuer.get().expires_in = Some(0);
    let web = mcp.serve();
    let id = Web::serve(issuer.router(None));
    let oauth = tokens_of(&id);
    let mut broker = broker(&web, &oauth);
    let mut worker = broker.run(&["web.echo"], limits());
    let before = issuer.get().asked.len();
    assert_eq!(worker.call("web.echo", &json!({})).0, None);
    assert!(issuer.get().asked.len() > before, "that one ran out at once");
}

#[test]
fn a_program_hears_that_there_is_no_token_and_not_why() {
    let (mcp, issuer) = (Mcp::new(Era::NoSession), Issuer::default());
    issuer.get().expires_in = Some(0);
    let web = mcp.serve();
    let id = Web::serve(issuer.router(None));
    let oauth = tokens_of(&id);
    let mut broker = broker(&web, &oauth);
    let mut worker = broker.run(&["web.echo"], limits());
    issuer.get().refuses = true;
    let (code, error) = worker.call("web.echo", &json!({}));
    assert_eq!((code, error["name"].as_str()), (Some(CallCode::ToolFailed), Some("Unauthorized")));
    assert!(!error.to_string().contains("invalid_client"), "{error}");
    assert_eq!(mcp.calls("echo"), 0);
    let (_, log) = broker.finish();
    assert!(log.contains("invalid_client") && !log.contains(CANARY), "{log}");
}

#[test]
fn an_authorization_server_is_found_by_the_servers_own_metadata_at_the_same_origin() {
    let (mcp, issuer) = (Mcp::new(Era::Session), Issuer::default());
    mcp.get().token = Some("Bearer nobody has it".into());
    let web = Web::serve(issuer.router(Some(mcp.clone())).merge(mcp.router()));
    issuer.describe(&web.url(""), &["client_credentials"]);
    let metadata = json!({"resource": web.url("/mcp"), "authorization_servers": [web.url("")]});
    issuer.get().metadata.insert("/.well-known/oauth-protected-resource/mcp".into(), metadata);
    let mut broker = broker(&web, &format!("oauth = {{ {ACCOUNT} }}"));
    let mut worker = broker.run(&["web.echo"], limits());
    assert_eq!(worker.call("web.echo", &json!({})).0, None);
    let (basic, form) = issuer.get().asked[0].clone();
    assert_eq!(basic, None, "it wants the secret in the body");
    assert!(form.contains(&format!("client_id=me%3Ax&client_secret={CANARY}")), "{form}");
}

#[test]
fn a_token_that_a_server_issues_itself_is_taken_out_of_what_it_says_alone() {
    let (mcp, issuer, other) = (Mcp::new(Era::Session), Issuer::default(), Mcp::new(Era::Session));
    // It would have a new one for each call.
    issuer.get().expires_in = Some(0);
    let web = Web::serve(issuer.router(Some(mcp.clone())).merge(mcp.router()));
    issuer.describe(&web.url(""), &["client_credentials"]);
    let metadata = json!({"resource": web.url("/mcp"), "authorization_servers": [web.url("")]});
    issuer.get().metadata.insert("/.well-known/oauth-protected-resource/mcp".into(), metadata);
    let others = other.serve();
    let oauth = format!(
        "oauth = {{ {ACCOUNT} }}\n[servers.other]\nurl = '{}'\n{RESOURCES}",
        others.url("/mcp")
    );
    let mut broker = broker(&web, &oauth);
    let mut worker = broker.run(&["web.echo", "other.echo", "resource.read"], limits());
    let said = json!({"say": "access-token-1"});
    for (tool, is_left) in [("web.echo", false), ("other.echo", true)] {
        let (code, answer) = worker.call(tool, &said);
        assert_eq!(code, None, "{tool}: {answer}");
        let text = answer[0]["text"].as_str().unwrap();
        assert_eq!(text.contains(r#"{"say":"access-token-1"}"#), is_left, "{tool}: {text}");
    }
    // And what nobody may say, it may not say either.
    let (_, answer) = worker.call("web.echo", &json!({ "say": CANARY }));
    assert!(!answer.to_string().contains(CANARY), "{answer}");
    // Of what a built-in has from it as well.
    mcp.get().resources = vec![resource("see access-token-1")];
    worker.send("resource.read", br#"{"server":"web","uri":"test://x"}"#);
    let read = worker.settled();
    let text = String::from_utf8(read.body).unwrap();
    assert_eq!((read.code, read.redacted), (None, true), "{text}");
    assert!(text.contains("see ") && !text.contains("access-token-1"), "{text}");
    assert_eq!(issuer.get().asked.len(), 1, "nor does it choose how often");
}

#[test]
fn a_key_in_the_query_goes_to_its_server_with_each_request_and_is_told_nobody() {
    for era in [Era::Session, Era::Modern] {
        let (mcp, issuer) = (Mcp::new(era), Issuer::default());
        let web = mcp.serve();
        let id = Web::serve(issuer.router(None));
        let lines = format!(
            "credentials.key = {{ from_env = \"CANARY\" }}\n\
             oauth = {{ {ACCOUNT}, token_url = \"{}\" }}\n{RESOURCES}",
            id.url("/token")
        );
        mcp.get().resources = vec![(200, json!({"contents": CANARY}))];
        let mut broker = broker(&web, &lines);
        let mut worker = broker.run(&["web.echo", "web.die", "resource.read"], limits());
        assert_eq!(worker.call("web.echo", &json!({})).0, None);
        let asked = json!({ "server": "web", "uri": "test://x" });
        let (_, said) = worker.call("resource.read", &asked);
        assert!(!said.to_string().contains(CANARY), "{said}");
        let (_, said) = worker.call("web.die", &json!({}));
        assert!(!said.to_string().contains(CANARY), "{said}");
        drop(worker);
        let (_, log) = broker.finish();
        assert!(!log.contains(CANARY), "it is in the log");
        let (_, form) = issuer.get().asked[0].clone();
        assert!(form.contains("resource=") && !form.contains(CANARY), "{form}");
        let all = format!("/mcp?key={CANARY}");
        assert!(mcp.get().seen.iter().all(|it| it.path == all), "{:?}", mcp.get().seen);
    }
}

#[test]
fn an_authorization_server_that_moved_is_found_again() {
    let (mcp, issuer, moved) = (Mcp::new(Era::NoSession), Issuer::default(), Issuer::default());
    issuer.get().expires_in = Some(0);
    let web = mcp.serve();
    let (id, other) = (Web::serve(issuer.router(None)), Web::serve(moved.router(None)));
    issuer.describe(&id.url(""), &["client_credentials"]);
    let oauth = issued_by(&id);
    let mut broker = broker(&web, &oauth);
    let mut worker = broker.run(&["web.echo"], limits());
    assert_eq!(worker.call("web.echo", &json!({})).0, None);
    issuer.get().refuses = true;
    let path = "/.well-known/oauth-authorization-server";
    let mut metadata = issuer.get().metadata[path].clone();
    metadata["token_endpoint"] = other.url("/token").into();
    issuer.get().metadata.insert(path.into(), metadata);
    let (_, error) = worker.call("web.echo", &json!({}));
    assert_eq!(error["name"], "Unauthorized", "{error}");
    let (code, said) = worker.call("web.echo", &json!({}));
    assert_eq!((code, moved.get().asked.len()), (None, 1), "{said}");
}

#[test]
fn a_server_does_not_choose_who_gets_the_clients_secret() {
    let (evil, issuer) = (Issuer::default(), Issuer::default());
    let trap = Web::serve(evil.router(None));
    evil.describe(&trap.url(""), &["client_credentials"]);
    let mcp = Mcp::new(Era::Session);
    let web = Web::serve(issuer.router(None).merge(mcp.router()));
    let name = |metadata: Value, path: &str| issuer.get().metadata.insert(path.into(), metadata);
    // By naming another authorization server.
    let resource = "/.well-known/oauth-protected-resource";
    name(json!({"authorization_servers": [trap.url("")]}), resource);
    let why = unavailable(&mut broker(&web, &format!("oauth = {{ {ACCOUNT} }}")));
    assert!(why.contains(&trap.url("")) && why.contains("oauth.issuer"), "{why}");
    assert_eq!(evil.get().looked_up, 0, "it is not even looked at");
    // By naming another token endpoint of its own one.
    name(json!({"authorization_servers": [web.url("")]}), resource);
    issuer.describe(&web.url(""), &["client_credentials"]);
    let mut own = issuer.get().metadata["/.well-known/oauth-authorization-server"].clone();
    own["token_endpoint"] = trap.url("/token").into();
    name(own, "/.well-known/oauth-authorization-server");
    let why = unavailable(&mut broker(&web, &format!("oauth = {{ {ACCOUNT} }}")));
    assert!(why.contains("oauth.issuer"), "{why}");
    // By speaking for another.
    let lines = issued_by(&web);
    issuer.describe("https://id.example", &["client_credentials"]);
    let why = unavailable(&mut broker(&web, &lines));
    assert!(why.contains("another issuer"), "{why}");
    assert!(evil.get().asked.is_empty() && issuer.get().asked.is_empty());
}

#[test]
fn what_needs_a_browser_is_refused_with_what_to_do() {
    let (mcp, issuer) = (Mcp::new(Era::Session), Issuer::default());
    let web = mcp.serve();
    let id = Web::serve(issuer.router(None));
    issuer.describe(&id.url(""), &["authorization_code"]);
    let lines = issued_by(&id);
    let why = unavailable(&mut broker(&web, &lines));
    assert!(why.contains("browser") && why.contains("`headers`"), "{why}");
    assert!(issuer.get().asked.is_empty());
}

#[test]
fn an_authorization_servers_refusal_is_told_without_the_secret() {
    let (mcp, issuer) = (Mcp::new(Era::Session), Issuer::default());
    issuer.get().refuses = true;
    let web = mcp.serve();
    let id = Web::serve(issuer.router(None));
    issuer.describe(&id.url(""), &["client_credentials"]);
    // It says back the form, with the secret in it.
    let lines = issued_by(&id);
    let why = unavailable(&mut broker(&web, &lines));
    assert!(why.contains("invalid_client") && !why.contains(CANARY), "{why}");
}
