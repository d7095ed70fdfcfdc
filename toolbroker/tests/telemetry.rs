//! Spans of calls, as a real collector on loopback receives them: what is in
//! them, what is not, and what a bad collector costs.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse as _;
use axum::routing::post;
use forge_protocol::broker::{Reply, Request};
use forge_protocol::guest::Settled;
use forge_protocol::limits::RunLimits;
use serde_json::{Value, json};
use support::web::Web;
use support::{Broker, CANARY, PATIENCE, Worker, test_server};

/// Stands in arguments, and in no span.
const MARKER: &str = "marker-5e0c1d";
const HASH: &[u8] = br#"{"algorithm": "sha256", "text": "abc"}"#;

fn limits() -> RunLimits {
    RunLimits { wall_ms: 60_000, calls: 10_000, ..RunLimits::default() }
}

/// A collector, and the bodies that it was sent.
struct Collector {
    web: Web,
    bodies: Arc<Mutex<Vec<String>>>,
}

impl Collector {
    /// Answers so, the last answer again and again.
    fn answering(answers: &[(StatusCode, &'static str)]) -> Self {
        let bodies: Arc<Mutex<Vec<String>>> = Arc::default();
        let (log, answers) = (Arc::clone(&bodies), answers.to_vec());
        let take = move |headers: HeaderMap, body: String| {
            assert_eq!(headers[header::CONTENT_TYPE], "application/json");
            let mut log = log.lock().unwrap();
            let (status, answer) = answers[log.len().min(answers.len() - 1)];
            log.push(body);
            let answer = (status, [(header::RETRY_AFTER, "0")], answer).into_response();
            async { answer }
        };
        Self { web: Web::serve(Router::new().route("/v1/traces", post(take))), bodies }
    }

    fn spans(&self) -> Vec<Value> {
        let bodies = self.bodies.lock().unwrap();
        let requests = bodies.iter().map(|body| serde_json::from_str::<Value>(body).unwrap());
        requests
            .flat_map(|request| {
                let [resource] = &request["resourceSpans"].as_array().unwrap()[..] else {
                    panic!("{request:#}")
                };
                let name = &resource["resource"]["attributes"][0];
                assert_eq!(name["key"], "service.name", "{request:#}");
                assert_eq!(name["value"]["stringValue"], "forge-toolbroker");
                let [scope] = &resource["scopeSpans"].as_array().unwrap()[..] else {
                    panic!("{request:#}")
                };
                scope["spans"].as_array().unwrap().clone()
            })
            .collect()
    }

    fn wait_for(&self, spans: usize) -> Vec<Value> {
        let until = Instant::now() + PATIENCE;
        loop {
            let got = self.spans();
            if got.len() >= spans {
                return got;
            }
            assert!(Instant::now() < until, "only {got:#?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A broker that tells a collector here, over the hostile test server.
fn telling(collector: &str) -> Broker {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("forge.toml");
    let text = format!(
        "[telemetry]\notlp = {collector:?}\n\
         [servers.test]\ncommand = {:?}\nargs = [\"--hostile\"]\n\
         [servers.test.credentials]\nTEST_TOKEN = {{ from_env = \"CANARY\" }}\n\
         [tools.\"test.echo\"]\neffect = \"read\"\n",
        test_server()
    );
    std::fs::write(&file, text).unwrap();
    let args = ["--config".to_owned(), file.display().to_string()];
    let mut broker = Broker::spawn_logging(folder, &args, "warn");
    broker.say_hello();
    broker
}

fn call(worker: &mut Worker, tool: &str, request: &Value) -> Settled {
    worker.send(tool, request.to_string().as_bytes());
    worker.settled()
}

fn metric(broker: &mut Broker, name: &str) -> u64 {
    let Reply::Metrics(text) = broker.ask(&Request::Metrics) else { panic!("no metrics") };
    let start = format!("{name} ");
    let value = text.lines().find_map(|line| line.strip_prefix(&start));
    value.unwrap_or_else(|| panic!("no {name} in\n{text}")).parse().unwrap()
}

fn wait_for_metric(broker: &mut Broker, name: &str, expected: u64) {
    let until = Instant::now() + PATIENCE;
    while metric(broker, name) != expected {
        assert!(Instant::now() < until, "{name} is {}", metric(broker, name));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A 64-bit integer, which JSON in OTLP writes as a text.
fn number(value: &Value) -> u64 {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text")).parse().unwrap()
}

fn is_hex(value: &Value, digits: usize) -> bool {
    let text = value.as_str().unwrap();
    text.len() == digits
        && text.bytes().all(|byte| b"0123456789abcdef".contains(&byte))
        && text.bytes().any(|byte| byte != b'0')
}

/// Holds a span against what the specification says of any; its attributes.
fn attributes_of(span: &Value) -> BTreeMap<String, Value> {
    const KNOWN: [&str; 10] = [
        "traceId",
        "spanId",
        "parentSpanId",
        "name",
        "kind",
        "startTimeUnixNano",
        "endTimeUnixNano",
        "attributes",
        "events",
        "status",
    ];
    for field in span.as_object().unwrap().keys() {
        assert!(KNOWN.contains(&field.as_str()), "{field} is no field of a span");
    }
    assert!(is_hex(&span["traceId"], 32) && is_hex(&span["spanId"], 16), "{span:#}");
    assert!(span["parentSpanId"].is_null() || is_hex(&span["parentSpanId"], 16));
    assert_eq!(span["kind"], 1);
    let (start, end) = (number(&span["startTimeUnixNano"]), number(&span["endTimeUnixNano"]));
    let mut times = vec![start];
    for event in span["events"].as_array().into_iter().flatten() {
        assert!(!event["name"].as_str().unwrap().is_empty());
        times.push(number(&event["timeUnixNano"]));
    }
    times.push(end);
    assert!(times.is_sorted(), "{span:#}");
    let mut attributes = BTreeMap::new();
    for attribute in span["attributes"].as_array().unwrap() {
        let value = attribute["value"].as_object().unwrap();
        let [(kind, value)] = &value.iter().collect::<Vec<_>>()[..] else { panic!("{span:#}") };
        match kind.as_str() {
            "stringValue" => assert!(value.is_string()),
            "intValue" => drop(number(value)),
            "boolValue" => assert!(value.is_boolean()),
            other => panic!("{other}"),
        }
        let key = attribute["key"].as_str().unwrap().to_owned();
        assert!(attributes.insert(key, (*value).clone()).is_none(), "a key stands twice");
    }
    attributes
}

fn events(span: &Value) -> Vec<&str> {
    let events = span["events"].as_array().unwrap();
    events.iter().map(|event| event["name"].as_str().unwrap()).collect()
}

#[test]
fn a_collector_receives_each_call_of_a_run_and_no_argument_or_credential() {
    let collector = Collector::answering(&[(StatusCode::OK, "{}")]);
    let mut broker = telling(&collector.web.url(""));
    let mut worker = broker.run(&["test.echo", "test.spell", "crypto.hash"], limits());
    let settled = [
        call(&mut worker, "test.echo", &json!({"text": MARKER})),
        // Its refusal quotes the argument.
        call(&mut worker, "test.echo", &json!({"text": {MARKER: MARKER}})),
        call(&mut worker, &format!("{MARKER}.tool"), &json!({})),
        call(&mut worker, "test.spell", &json!({"how": "raw"})),
        call(&mut worker, "crypto.hash", &json!({"algorithm": "sha256", "text": MARKER})),
    ];
    assert!(String::from_utf8_lossy(&settled[1].body).contains("text"));
    assert!(settled[3].redacted);
    drop(worker);
    let spans = collector.wait_for(6);
    assert_eq!(metric(&mut broker, "forge_results_redacted_total"), 1);
    wait_for_metric(&mut broker, "forge_spans_exported_total", 6);
    assert!(broker.finish().0.success());
    assert_eq!(collector.spans().len(), 6, "each is sent once");

    let all = ["authorised", "intent recorded", "answered"];
    let expected: [(&str, Value, Value, &[&str]); 5] = [
        ("execute_tool test.echo", json!("ok"), json!("read"), &all),
        ("execute_tool test.echo", json!("bad_request"), json!("read"), &[]),
        ("execute_tool", json!("denied"), Value::Null, &[]),
        ("execute_tool test.spell", json!("ok"), json!("write"), &all),
        ("execute_tool crypto.hash", json!("ok"), json!("none"), &all),
    ];
    let run = spans.iter().find(|span| span["name"] == "run").unwrap();
    let of_run = attributes_of(run);
    let id = "ab".repeat(16);
    assert_eq!((&of_run["forge.run.id"], &of_run["forge.run.end"]), (&json!(id), &json!("closed")));
    for (number_of, (name, code, effect, steps)) in expected.iter().enumerate() {
        let number_of = number_of.to_string();
        let span = spans
            .iter()
            .find(|span| attributes_of(span).get("forge.call.number") == Some(&json!(number_of)))
            .unwrap();
        let of = attributes_of(span);
        let settled = &settled[number_of.parse::<usize>().unwrap()];
        assert_eq!((&span["name"], &of["forge.call.code"]), (&json!(name), code), "{span:#}");
        assert_eq!(of.get("forge.call.effect").unwrap_or(&Value::Null), effect);
        assert_eq!(events(span), *steps, "{span:#}");
        assert_eq!((&span["traceId"], &of["forge.run.id"]), (&json!(id), &json!(id)));
        assert_eq!(span["parentSpanId"], run["spanId"]);
        assert_eq!(of["forge.call.redacted"], settled.redacted);
        let took = number(&span["endTimeUnixNano"]) - number(&span["startTimeUnixNano"]);
        assert_eq!(took, settled.duration_ns);
        assert_eq!(span["status"]["code"] == 2, settled.code.is_some(), "{span:#}");
        assert_eq!(of.get("error.type"), settled.code.map(|_| code), "{span:#}");
    }
    for body in collector.bodies.lock().unwrap().iter() {
        for kept in [CANARY, MARKER, "alice", "[credential removed]"] {
            assert!(!body.contains(kept), "{kept} is in {body}");
        }
    }
}

#[test]
fn a_collector_that_hangs_costs_the_calls_nothing() {
    const CALLS: u64 = 4_000;
    // Connections stand, and nobody ever reads from them.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut broker = telling(&format!("http://{}", listener.local_addr().unwrap()));
    let mut worker = broker.run(&["crypto.hash"], limits());
    for _ in 0..CALLS {
        worker.send("crypto.hash", HASH);
        assert_eq!(worker.settled().code, None);
    }
    let held = forge_toolbroker::telemetry::QUEUE_SPANS_MAX as u64 + 512;
    let dropped = metric(&mut broker, "forge_spans_dropped_total");
    assert!(dropped >= CALLS - held, "{dropped} dropped");
    assert_eq!(metric(&mut broker, "forge_spans_exported_total"), 0);
    assert_eq!(metric(&mut broker, "forge_call_seconds_count"), CALLS);
    drop(worker);
    assert!(broker.finish().0.success(), "it ends though the collector does not");
}

#[test]
fn a_collector_that_is_busy_is_asked_again() {
    let busy = StatusCode::SERVICE_UNAVAILABLE;
    let collector = Collector::answering(&[(busy, ""), (StatusCode::OK, "{}")]);
    let mut broker = telling(&collector.web.url(""));
    let mut worker = broker.run(&["crypto.hash"], limits());
    worker.send("crypto.hash", HASH);
    worker.settled();
    wait_for_metric(&mut broker, "forge_spans_exported_total", 1);
    assert_eq!(metric(&mut broker, "forge_spans_dropped_total"), 0);
    let bodies = collector.bodies.lock().unwrap().clone();
    assert_eq!((bodies.len(), &bodies[0]), (2, &bodies[1]), "the same spans twice");
}

#[test]
fn what_a_collector_refuses_is_counted_and_not_sent_again() {
    let partial = r#"{"partialSuccess": {"rejectedSpans": "1", "errorMessage": "no"}}"#;
    for answer in [(StatusCode::BAD_REQUEST, ""), (StatusCode::OK, partial)] {
        let collector = Collector::answering(&[answer]);
        let mut broker = telling(&collector.web.url(""));
        let mut worker = broker.run(&["crypto.hash"], limits());
        worker.send("crypto.hash", HASH);
        worker.settled();
        wait_for_metric(&mut broker, "forge_spans_dropped_total", 1);
        assert_eq!(metric(&mut broker, "forge_spans_exported_total"), 0);
        drop(worker);
        // The run's own span is in a request of its own.
        wait_for_metric(&mut broker, "forge_spans_dropped_total", 2);
        assert_eq!(collector.spans().len(), 2);
    }
}
