//! Spans as OTLP has them: `ExportTraceServiceRequest` in the JSON encoding
//! (<https://opentelemetry.io/docs/specs/otlp/>, "JSON Protobuf Encoding").
//!
//! Field names are in lowerCamelCase, ids in hex, 64-bit integers decimal
//! texts, and enumerations numbers. A trace is a run and has its id. A span's
//! id is the first eight bytes of a SHA-256: of the run's id for the run
//! itself, of the run's id and the call's number (four bytes, big-endian) for
//! a call. So whoever knows a run or reads the journal knows its spans.
//!
//! Names of spans and attributes are those of OpenTelemetry's conventions
//! where it has some (`execute_tool`, `gen_ai.tool.name`, `error.type`), and
//! begin with `forge.` where it has none.

use std::time::Duration;

use forge_protocol::RunId;
use forge_protocol::abi::CallCode;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::{CallSpan, RunSpan, Span, Steps};
use crate::definition::Effect;

/// `SPAN_KIND_INTERNAL`.
const INTERNAL: u32 = 1;
/// `STATUS_CODE_ERROR`.
const ERROR: u32 = 2;

/// The body of one export.
pub(super) fn request(spans: &[Span]) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let spans: Vec<Value> = spans
        .iter()
        .map(|span| match span {
            Span::Run(run) => of_run(run),
            Span::Call(call) => of_call(call),
        })
        .collect();
    let resource = [text("service.name", "forge-toolbroker"), text("service.version", version)];
    json!({ "resourceSpans": [{
        "resource": { "attributes": resource },
        "scopeSpans": [{
            "scope": { "name": "forge_toolbroker", "version": version },
            "spans": spans,
        }],
    }] })
    .to_string()
}

/// What a collector says it did not take, of an answer with status 200.
pub(super) fn rejected(answer: &[u8]) -> Rejected {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    let partly = &answer["partialSuccess"];
    let spans = &partly["rejectedSpans"];
    Rejected {
        // A text, as 64-bit integers are; some write a number.
        spans: spans.as_u64().or_else(|| spans.as_str()?.parse().ok()).unwrap_or(0),
        why: partly["errorMessage"].as_str().map(|why| crate::cut(why, 256)),
    }
}

/// What a collector did not take of a request that it took.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Rejected {
    pub(super) spans: u64,
    /// Its words, which may also be a warning about spans that it took.
    pub(super) why: Option<String>,
}

fn of_run(span: &RunSpan) -> Value {
    let RunSpan { run, ended_unix_ns, took, how } = span;
    json!({
        "traceId": run.to_string(),
        "spanId": span_id(run, None),
        "name": "run",
        "kind": INTERNAL,
        "startTimeUnixNano": before(*ended_unix_ns, *took).to_string(),
        "endTimeUnixNano": ended_unix_ns.to_string(),
        "attributes": [text("forge.run.id", &run.to_string()), text("forge.run.end", how.as_str())],
    })
}

fn of_call(span: &CallSpan) -> Value {
    let CallSpan { run, call, tool, effect, code, redacted, ended_unix_ns, took, steps } = span;
    let began = before(*ended_unix_ns, *took);
    let mut attributes = vec![
        text("gen_ai.operation.name", "execute_tool"),
        text("forge.run.id", &run.to_string()),
        json!({ "key": "forge.call.number", "value": { "intValue": call.to_string() } }),
        text("forge.call.code", code.map_or("ok", CallCode::as_str)),
        json!({ "key": "forge.call.redacted", "value": { "boolValue": redacted } }),
    ];
    if let Some(tool) = tool {
        attributes.push(text("gen_ai.tool.name", tool.as_str()));
    }
    if let Some(effect) = effect {
        attributes.push(text("forge.call.effect", Effect::as_str(*effect)));
    }
    let mut written = json!({
        "traceId": run.to_string(),
        "spanId": span_id(run, Some(*call)),
        "parentSpanId": span_id(run, None),
        "name": tool
            .as_ref()
            .map_or("execute_tool".to_owned(), |it| format!("execute_tool {}", it.as_str())),
        "kind": INTERNAL,
        "startTimeUnixNano": began.to_string(),
        "endTimeUnixNano": ended_unix_ns.to_string(),
        "events": events(began, steps),
    });
    if let Some(code) = code {
        attributes.push(text("error.type", code.as_str()));
        written["status"] = json!({ "code": ERROR });
    }
    written["attributes"] = attributes.into();
    written
}

/// The steps of the chain that a call came to.
fn events(began: u64, steps: &Steps) -> Vec<Value> {
    let Steps { authorised, intended, answered } = steps;
    [("authorised", authorised), ("intent recorded", intended), ("answered", answered)]
        .into_iter()
        .filter_map(|(name, after)| {
            let at = began.saturating_add(nanoseconds((*after)?));
            Some(json!({ "timeUnixNano": at.to_string(), "name": name }))
        })
        .collect()
}

fn text(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": { "stringValue": value } })
}

fn span_id(run: &RunId, call: Option<u32>) -> String {
    let mut digest = Sha256::new_with_prefix(run.0);
    if let Some(call) = call {
        digest.update(call.to_be_bytes());
    }
    crate::hex(&digest.finalize()[..8])
}

fn before(unix_ns: u64, took: Duration) -> u64 {
    unix_ns.saturating_sub(nanoseconds(took))
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::Close;
    use crate::telemetry::CalledTool;
    use forge_protocol::name::ToolName;

    fn call() -> CallSpan {
        CallSpan {
            run: RunId([0xAB; 16]),
            call: 7,
            tool: Some(CalledTool::Named(ToolName::parse("shop.find").unwrap())),
            effect: Some(Effect::Read),
            code: None,
            redacted: false,
            ended_unix_ns: 1_700_000_000_000_000_500,
            took: Duration::from_nanos(500),
            steps: Steps {
                authorised: Some(Duration::from_nanos(20)),
                intended: Some(Duration::from_nanos(40)),
                answered: Some(Duration::from_nanos(450)),
            },
        }
    }

    fn written(span: Span) -> Value {
        let request: Value = serde_json::from_str(&request(&[span])).unwrap();
        request["resourceSpans"][0]["scopeSpans"][0]["spans"][0].clone()
    }

    #[test]
    fn a_call_is_written_as_the_specification_has_it() {
        let attribute =
            |key: &str, value: &str| json!({"key": key, "value": {"stringValue": value}});
        let event = |at: &str, name: &str| json!({"timeUnixNano": at, "name": name});
        let expected = json!({
            "traceId": "abababababababababababababababab",
            "spanId": written(Span::Call(call()))["spanId"],
            "parentSpanId": written(Span::Run(run()))["spanId"],
            "name": "execute_tool shop.find",
            "kind": 1,
            "startTimeUnixNano": "1700000000000000000",
            "endTimeUnixNano": "1700000000000000500",
            "events": [
                event("1700000000000000020", "authorised"),
                event("1700000000000000040", "intent recorded"),
                event("1700000000000000450", "answered"),
            ],
            "attributes": [
                attribute("gen_ai.operation.name", "execute_tool"),
                attribute("forge.run.id", "abababababababababababababababab"),
                {"key": "forge.call.number", "value": {"intValue": "7"}},
                attribute("forge.call.code", "ok"),
                {"key": "forge.call.redacted", "value": {"boolValue": false}},
                attribute("gen_ai.tool.name", "shop.find"),
                attribute("forge.call.effect", "read"),
            ],
        });
        assert_eq!(written(Span::Call(call())), expected);
    }

    fn run() -> RunSpan {
        RunSpan {
            run: RunId([0xAB; 16]),
            ended_unix_ns: 1_700_000_000_000_000_000,
            took: Duration::from_secs(1),
            how: Close::Dropped,
        }
    }

    #[test]
    fn ids_are_hex_of_their_size_and_no_two_spans_of_a_run_share_one() {
        let spans = [
            Span::Run(run()),
            Span::Call(call()),
            Span::Call(CallSpan { call: 8, ..call() }),
            Span::Call(CallSpan { run: RunId([0xAC; 16]), ..call() }),
        ];
        let mut ids = std::collections::BTreeSet::new();
        for span in spans {
            let span = written(span);
            let id = span["spanId"].as_str().unwrap().to_owned();
            assert!(id.len() == 16 && id.bytes().all(|it| it.is_ascii_hexdigit()), "{id}");
            assert!(ids.insert(id));
        }
    }

    #[test]
    fn a_call_that_failed_says_so_and_one_that_was_not_granted_names_no_tool() {
        let failed = written(Span::Call(CallSpan {
            code: Some(CallCode::Denied),
            tool: None,
            effect: None,
            steps: Steps::default(),
            ..call()
        }));
        assert_eq!(failed["status"], json!({"code": 2}));
        assert_eq!((&failed["name"], &failed["events"]), (&json!("execute_tool"), &json!([])));
        let attributes = failed["attributes"].to_string();
        assert!(attributes.contains("\"error.type\""), "{attributes}");
        assert!(!attributes.contains("gen_ai.tool.name"), "{attributes}");
    }

    #[test]
    fn every_tool_that_a_caller_hosts_has_one_name() {
        let hosted = written(Span::Call(CallSpan { tool: Some(CalledTool::Hosted), ..call() }));
        assert_eq!(hosted["name"], "execute_tool (hosted)");
        let name = json!({"key": "gen_ai.tool.name", "value": {"stringValue": "(hosted)"}});
        assert!(hosted["attributes"].as_array().unwrap().contains(&name), "{hosted:#}");
        assert!(!forge_protocol::name::is_server_name(CalledTool::Hosted.server()));
    }

    #[test]
    fn what_a_collector_rejected_is_read_as_text_and_as_number() {
        let three = |why: Option<&str>| Rejected { spans: 3, why: why.map(str::to_owned) };
        let text = br#"{"partialSuccess": {"rejectedSpans": "3"}}"#;
        let number = br#"{"partialSuccess": {"rejectedSpans": 3, "errorMessage": "too old"}}"#;
        assert_eq!((rejected(text), rejected(number)), (three(None), three(Some("too old"))));
        for answer in [&b""[..], b"{}", b"[]", b"\xff", br#"{"partialSuccess": {}}"#] {
            assert_eq!(rejected(answer), Rejected::default());
        }
    }
}
