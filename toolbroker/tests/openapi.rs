//! HTTP interfaces with an OpenAPI document, seen through the broker's own
//! doors: the real broker process, and a real interface on loopback that keeps
//! to its document, or does not.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use forge_protocol::abi::CallCode;
use forge_protocol::broker::Authority;
use forge_protocol::limits::RunLimits;
use serde_json::{Value, json};
use support::secure::Identity;
use support::web::{Seen, Web, broken, endless};
use support::{Broker, CANARY, PATIENCE, name, run_request};

type Log = Arc<Mutex<Vec<Seen>>>;

async fn handle(
    State((log, elsewhere)): State<(Log, String)>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let text = || String::from_utf8_lossy(&body).into_owned();
    let body: Value = match body.is_empty() {
        true => Value::Null,
        false => serde_json::from_slice(&body).unwrap_or_else(|_| text().into()),
    };
    let seen = Seen { method, path: uri.to_string(), headers, body };
    log.lock().unwrap().push(seen.clone());
    let said = || {
        let headers: Vec<String> =
            seen.headers.values().map(|it| it.to_str().unwrap().to_owned()).collect();
        json!({"method": seen.method.as_str(), "path": seen.path, "body": seen.body,
               "headers": headers})
    };
    match uri.path() {
        "/v1/redirect" => (StatusCode::FOUND, [("location", elsewhere)]).into_response(),
        "/v1/missing" => {
            let problem = json!({"title": "no such part", "secret": headers_of(&seen)});
            (StatusCode::NOT_FOUND, axum::Json(problem)).into_response()
        }
        "/v1/many" => {
            let many = format!("[{}0]", "0,".repeat(600_000));
            ([("content-type", "application/json")], many).into_response()
        }
        "/v1/long-error" => {
            // However it is cut, it is cut through one of them.
            let said = "x".repeat(3_800) + &headers_of(&seen).repeat(30);
            (StatusCode::BAD_REQUEST, said).into_response()
        }
        "/v1/endless" => ([("content-type", "application/json")], endless("[")).into_response(),
        "/v1/endless-error" => (StatusCode::BAD_REQUEST, endless("x")).into_response(),
        "/v1/die" => broken("[".into()).into_response(),
        "/v1/down" => (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "7")]).into_response(),
        "/v1/text" => Body::from("plain words").into_response(),
        "/v1/garbled" => ([("content-type", "application/json")], "{\"x\": NaN}").into_response(),
        "/v1/marked" => {
            ([("content-type", "application/json")], "\u{feff}{\"x\": 1}").into_response()
        }
        "/v1/zipped" => {
            let headers = [("content-type", "application/json"), ("content-encoding", "gzip")];
            (headers, "\u{1f}").into_response()
        }
        "/v1/nothing" => StatusCode::NO_CONTENT.into_response(),
        "/v1/made" => {
            (StatusCode::CREATED, [("location", "/v1/parts/7"), ("x-more", "1")]).into_response()
        }
        "/v1/hang" => std::future::pending().await,
        _ => axum::Json(said()).into_response(),
    }
}

fn headers_of(seen: &Seen) -> String {
    seen.header("x-api-key").unwrap_or_default().to_owned()
}

struct Interface {
    web: Web,
    log: Log,
}

impl Interface {
    fn new(elsewhere: &str) -> Self {
        let log = Log::default();
        let state = (Arc::clone(&log), elsewhere.to_owned());
        Self { web: Web::serve(Router::new().fallback(handle).with_state(state)), log }
    }

    fn broker(&self) -> Broker {
        self.broker_of(&Self::document())
    }

    fn document() -> Value {
        let simple = |id: &str| json!({"get": {"operationId": id}});
        json!({
            "openapi": "3.0.3", "info": {"title": "Parts", "version": "1"},
            // Not followed: the operator says where.
            "servers": [{"url": "http://169.254.169.254/"}],
            "paths": {
                "/parts/{id}": {
                    "parameters": [{"name": "id", "in": "path", "required": true,
                                    "schema": {"type": "string"}}],
                    "get": {"operationId": "getPart", "parameters": [
                        {"name": "fields", "in": "query",
                         "schema": {"type": "array", "items": {"type": "string"}}},
                        {"name": "X-Trace", "in": "header", "schema": {"type": "string"}}]},
                    "put": {"operationId": "putPart", "requestBody": {"required": true,
                        "content": {"application/json": {"schema": {
                            "$ref": "#/components/schemas/Part"}}}}},
                },
                "/redirect": simple("redirect"), "/missing": simple("missing"),
                "/endless": simple("endless"), "/endless-error": simple("endless_error"),
                "/long-error": simple("long_error"), "/many": simple("many"),
                "/die": {"post": {"operationId": "die"}},
                "/cancel": {"post": {"operationId": "cancel"}}, "/down": simple("down"),
                "/text": simple("text"), "/nothing": simple("nothing"),
                "/garbled": simple("garbled"), "/marked": simple("marked"), "/zipped": simple("zipped"), "/hang": simple("hang"),
            },
            "components": {"schemas": {"Part": {"type": "object", "required": ["stock"],
                "properties": {"stock": {"type": "integer", "minimum": 0}},
                "additionalProperties": false}}},
        })
    }

    fn broker_of(&self, document: &Value) -> Broker {
        let key = "headers.X-API-Key = { from_env = \"CANARY\" }";
        Self::broker_at(&self.web.url("/v1/"), document, key)
    }

    /// A broker of an interface at this address, with more lines about it.
    fn broker_at(url: &str, document: &Value, lines: &str) -> Broker {
        let folder = tempfile::tempdir().unwrap();
        let api = folder.path().join("api.json");
        std::fs::write(&api, document.to_string()).unwrap();
        let file = folder.path().join("forge.toml");
        let toml = format!(
            "[servers.parts]\nopenapi = {:?}\nbase_url = \"{url}\"\n{lines}\n",
            api.to_str().unwrap(),
        );
        std::fs::write(&file, toml).unwrap();
        let args = ["--config".to_owned(), file.to_str().unwrap().to_owned()];
        Self::started(folder, &args)
    }

    fn started(folder: tempfile::TempDir, args: &[String]) -> Broker {
        let mut broker = Broker::spawn(folder, args);
        broker.say_hello();
        broker
    }

    fn seen(&self) -> Vec<Seen> {
        self.log.lock().unwrap().clone()
    }
}

fn limits() -> RunLimits {
    RunLimits { wall_ms: 60_000, ..RunLimits::default() }
}

#[test]
fn an_operation_is_called_with_its_arguments_where_they_belong() {
    let interface = Interface::new("");
    let mut broker = interface.broker();
    assert_eq!(broker.tools().iter().filter(|it| it.name.server() == "parts").count(), 17);
    let all = ["parts.getPart", "parts.putPart", "parts.cancel"];
    let mut worker = broker.run(&all, limits());
    let arguments = json!({"id": "a/..b?c", "fields": ["x", "y&z=1"], "X-Trace": "t-1"});
    let (code, said) = worker.call("parts.getPart", &arguments);
    assert_eq!(code, None, "{said}");
    assert_eq!(said["method"], "GET");
    assert_eq!(said["path"], "/v1/parts/a%2F..b%3Fc?fields=x&fields=y%26z%3D1");
    let (code, said) = worker.call("parts.putPart", &json!({"id": "7", "body": {"stock": 3}}));
    assert_eq!(code, None, "{said}");
    assert_eq!((said["method"].as_str(), &said["body"]), (Some("PUT"), &json!({"stock": 3})));
    assert_eq!(worker.call("parts.cancel", &json!({})).0, None);
    let seen = interface.seen();
    assert_eq!(seen[2].header("content-length"), Some("0"), "some servers answer 411 else");
    assert_eq!(seen[0].header("content-length"), None);
    assert_eq!(seen[0].header("x-trace"), Some("t-1"));
    assert_eq!(seen[1].header("content-type"), Some("application/json"));
    assert!(seen.iter().all(|it| it.header("accept") == Some("application/json, */*;q=0.5")));
    assert!(seen.iter().all(|it| it.header("x-api-key") == Some(CANARY)));
}

#[test]
fn members_reach_a_tool_and_come_back_in_the_order_they_were_written() {
    let interface = Interface::new("");
    let mut document = Interface::document();
    document["paths"]["/find"] = json!({"post": {"operationId": "find",
        "requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}}}});
    let mut broker = interface.broker_of(&document);
    let mut worker = broker.run(&["parts.find"], limits());
    let sort = r#"{"price":-1,"age":1,"sort":{"z":1,"b":2,"a":3}}"#;
    worker.send("parts.find", format!(r#"{{"body":{sort}}}"#).as_bytes());
    let settled = worker.settled();
    let said = String::from_utf8(settled.body).unwrap();
    assert_eq!(settled.code, None, "{said}");
    assert_eq!(interface.seen()[0].body.to_string(), sort);
    assert!(said.contains(sort), "{said}");
}

#[test]
fn a_form_reaches_its_interface_as_its_members_were_given() {
    let interface = Interface::new("");
    let mut document = Interface::document();
    let schema = json!({"type": "object", "required": ["channel"], "properties": {
        "channel": {"type": "string"}, "amount": {"type": "integer"},
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
        "lines": {"type": "array", "items": {"type": "object"}},
    }});
    let encoding = json!({"metadata": {"style": "deepObject", "explode": true}});
    let form = json!({"schema": schema, "encoding": encoding});
    document["paths"]["/form"] = json!({"post": {"operationId": "form", "summary": "Posts it.",
        "requestBody": {"content": {"application/x-www-form-urlencoded": form}}}});
    let note = json!({"schema": {"properties": {"text": {"type": "string"}}}});
    document["paths"]["/note"] = json!({"post": {"operationId": "note",
        "requestBody": {"content": {"application/x-www-form-urlencoded": note}}}});
    let mut broker = interface.broker_of(&document);
    let tools = broker.tools();
    let tool = tools.iter().find(|it| it.name.as_str() == "parts.form").unwrap();
    assert!(tool.description.contains("cannot be given here: lines"), "{}", tool.description);
    let mut worker = broker.run(&["parts.form", "parts.note"], limits());
    let body = json!({"channel": "#a&amount=9", "amount": 1e3, "metadata": {"k": "v w"}});
    let (code, said) = worker.call("parts.form", &json!({ "body": body }));
    assert_eq!(code, None, "{said}");
    let mut pairs: Vec<_> = said["body"].as_str().unwrap().split('&').collect();
    pairs.sort_unstable();
    assert_eq!(pairs, ["amount=1000", "channel=%23a%26amount%3D9", "metadata%5Bk%5D=v%20w"]);
    let seen = interface.seen();
    assert_eq!(seen[0].header("content-type"), Some("application/x-www-form-urlencoded"));
    let (code, said) = worker.call("parts.note", &json!({"body": {}}));
    assert_eq!(code, None, "{said}");
    let length = interface.seen()[1].header("content-length").map(str::to_owned);
    assert_eq!(length.as_deref(), Some("0"), "some servers answer 411 else");
    // What has no form is not sent at all: it would say something else.
    for body in [
        json!({"amount": 1}),
        json!({"channel": "a", "lines": []}),
        json!({"channel": "a", "other": 1}),
    ] {
        let (code, said) = worker.call("parts.form", &json!({ "body": body }));
        assert_eq!(code, Some(CallCode::BadRequest), "{said}");
    }
    let nested = json!({"channel": "a", "metadata": {"k][x": "v"}});
    let (code, said) = worker.call("parts.form", &json!({ "body": nested }));
    assert!(code.is_some() && said.to_string().contains("bracket"), "{said}");
    assert_eq!(interface.seen().len(), 2);
}

#[test]
fn where_to_find_what_was_made_is_an_answer() {
    let interface = Interface::new("");
    let mut document = Interface::document();
    document["paths"]["/made"] = json!({"post": {"operationId": "make"}});
    let mut broker = interface.broker_of(&document);
    let mut worker = broker.run(&["parts.make", "parts.nothing"], limits());
    let made = worker.call("parts.make", &json!({}));
    assert_eq!(made, (None, json!({"location": "/v1/parts/7"})));
    assert_eq!(worker.call("parts.nothing", &json!({})), (None, Value::Null));
}

#[test]
fn what_is_left_out_of_an_operation_and_what_it_wants_in_the_query_is_in_the_log() {
    let interface = Interface::new("");
    let mut document = Interface::document();
    document["security"] = json!([{"key": []}]);
    document["components"]["securitySchemes"] =
        json!({"key": {"type": "apiKey", "in": "query", "name": "appid"}});
    document["paths"]["/upload"] = json!({"post": {
        "operationId": "upload",
        "requestBody": {"content": {"multipart/form-data": {"schema": {}}}},
        "servers": [{"url": "https://upload.example"}],
        "parameters": [{"name": "shape", "in": "header", "schema": {"type": "object"}},
                       {"name": "crumb", "in": "cookie", "schema": {"type": "string"}}]}});
    document["paths"]["/elsewhere"] = json!({"$ref": "other.json#/a"});
    document["paths"]["/shape/{shape}"] = json!({"get": {"operationId": "shape", "parameters": [
        {"name": "shape", "in": "path", "required": true, "schema": {"type": "object"}}]}});
    let mut broker = interface.broker_of(&document);
    let mut worker = broker.run(&["parts.upload"], limits());
    assert_eq!(worker.call("parts.upload", &json!({})).0, None);
    let (_, log) = broker.finish();
    let has = |words: &[&str]| {
        log.lines().any(|line| line.contains("WARN") && words.iter().all(|it| line.contains(it)))
    };
    assert!(has(&["POST /upload", "its body is neither JSON nor a plain form"]), "{log}");
    assert!(has(&["POST /upload", "shape", "cannot be written as a part of the header"]), "{log}");
    assert!(has(&["GET /shape/{shape}", "operation left out", "a part of the path"]), "{log}");
    assert!(has(&["appid", "operations=18", "`credentials`"]), "{log}");
    assert!(has(&["POST /upload", "crumb", "is a cookie"]), "{log}");
    assert!(has(&["POST /upload", "`servers`", "`base_url`"]), "{log}");
    assert!(has(&["path left out", "/elsewhere", "not in this document"]), "{log}");
}

#[test]
fn a_key_in_the_query_goes_to_the_interface_and_is_told_nobody() {
    let interface = Interface::new("https://elsewhere.example/?appid=canary-7f3a9c51-credential");
    let mut document = Interface::document();
    document["security"] = json!([{"key": []}]);
    document["components"]["securitySchemes"] =
        json!({"key": {"type": "apiKey", "in": "query", "name": "appid"}});
    let parameter =
        |name: &str, schema: Value| json!({"name": name, "in": "query", "schema": schema});
    document["paths"]["/find"] = json!({"get": {"operationId": "find", "parameters": [
        parameter("q", json!({"type": "string"})), parameter("AppId", json!({"type": "string"})),
        parameter("filter", json!({"type": "object"}))]}});
    let folder = tempfile::tempdir().unwrap();
    let journal = tempfile::tempdir().unwrap();
    let (api, file) = (folder.path().join("api.json"), folder.path().join("forge.toml"));
    std::fs::write(&api, document.to_string()).unwrap();
    let toml = format!(
        "[servers.parts]\nopenapi = {api:?}\nbase_url = \"{}\"\n\
         credentials = {{ appid = {{ from_env = \"CANARY\" }} }}\n",
        interface.web.url("/v1/"),
    );
    std::fs::write(&file, toml).unwrap();
    let text = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let args = ["--config".into(), text(&file), "--journal".into(), text(journal.path())];
    let mut broker = Interface::started(folder, &args);
    let tools = ["parts.find", "parts.redirect", "parts.missing", "parts.die"];
    let mut worker = broker.run(&tools, limits());
    let (code, said) = worker.call("parts.find", &json!({"q": "a&b", "filter": {"more": 1}}));
    assert_eq!(code, None, "{said}");
    assert_eq!(said["path"], "/v1/find?q=a%26b&more=1&appid=[credential removed]");
    let all = format!("/v1/find?q=a%26b&more=1&appid={CANARY}");
    assert_eq!(interface.seen()[0].path, all);
    // Nobody else says what it is.
    let (code, error) = worker.call("parts.find", &json!({"AppId": "mine"}));
    assert_eq!(code, Some(CallCode::BadRequest), "{error}");
    for name in ["appid", "APPID", " appid"] {
        let (code, error) = worker.call("parts.find", &json!({"filter": {name: "mine"}}));
        assert_eq!(code, Some(CallCode::BadRequest), "{error}");
        assert!(error["error"].as_str().unwrap().contains("the operator sets"), "{error}");
    }
    assert_eq!(interface.seen().len(), 1);
    let (_, error) = worker.call("parts.redirect", &json!({}));
    assert_eq!(error["name"], "Redirect", "{error}");
    assert!(!error.to_string().contains(CANARY), "{error}");
    let (_, error) = worker.call("parts.missing", &json!({}));
    assert_eq!(error["name"], "HttpError", "{error}");
    assert!(!error.to_string().contains(CANARY), "{error}");
    assert_eq!(worker.call("parts.die", &json!({})).0, Some(CallCode::OutcomeUnknown));
    assert!(
        interface
            .seen()
            .iter()
            .all(|it| it.path.ends_with(&format!("?appid={CANARY}")) || it.path == all)
    );
    drop(worker);
    let (_, log) = broker.finish();
    assert!(!log.contains(CANARY) && !log.contains("operations want a key"), "{log}");
    let written = walk(journal.path());
    assert!(!written.is_empty());
    for (file, bytes) in written {
        let found = bytes.windows(CANARY.len()).any(|it| it == CANARY.as_bytes());
        assert!(!found, "it is in {}", file.display());
    }
}

/// The files below a folder.
fn walk(folder: &std::path::Path) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(walk(&path));
        } else {
            files.push((path.clone(), std::fs::read(path).unwrap()));
        }
    }
    files
}

#[test]
fn arguments_that_do_not_fit_cost_the_interface_not_one_byte() {
    let interface = Interface::new("");
    let mut broker = interface.broker();
    // Nor of the budget, which is one call. A worker's link takes as many more as may be
    // in flight.
    let limits = RunLimits { calls: 1, calls_in_flight: 64, ..limits() };
    let mut worker = broker.run(&["parts.getPart", "parts.putPart"], limits);
    for (tool, arguments) in [
        ("parts.putPart", json!({"id": "7"})),
        ("parts.putPart", json!({"id": "7", "body": {"stock": -1}})),
        ("parts.putPart", json!({"id": "7", "body": {"stock": 1, "more": 1}})),
        ("parts.getPart", json!({"id": 7})),
        ("parts.getPart", json!({"id": "7", "host": "evil.example"})),
        ("parts.getPart", json!({"id": "7", "X-API-Key": "mine"})),
    ] {
        let (code, error) = worker.call(tool, &arguments);
        assert_eq!(code, Some(CallCode::BadRequest), "{arguments} {error}");
    }
    for arguments in [
        json!({"id": ".."}),
        json!({"id": ""}),
        json!({"id": "7", "X-Trace": "a\r\nX-API-Key: mine"}),
    ] {
        let (code, error) = worker.call("parts.getPart", &arguments);
        assert_eq!(code, Some(CallCode::BadRequest), "{arguments}");
        assert!(error["error"].as_str().unwrap().contains("cannot be sent"), "{error}");
    }
    assert_eq!(interface.seen().len(), 0);
    let (code, part) = worker.call("parts.getPart", &json!({"id": "7"}));
    assert_eq!(code, None, "{part}");
}

#[test]
fn answers_are_json_text_or_nothing() {
    let interface = Interface::new("");
    let mut broker = interface.broker();
    let names = ["parts.text", "parts.nothing", "parts.marked", "parts.garbled", "parts.zipped"];
    let mut worker = broker.run(&names, limits());
    assert_eq!(worker.call("parts.text", &json!({})), (None, json!("plain words")));
    assert_eq!(worker.call("parts.nothing", &json!({})), (None, Value::Null));
    assert_eq!(worker.call("parts.marked", &json!({})), (None, json!({"x": 1})));
    // What says that it is JSON does not come as something else.
    for (name, says) in [("parts.garbled", "no JSON"), ("parts.zipped", "encoding")] {
        let (code, why) = worker.call(name, &json!({}));
        assert_eq!(code, Some(CallCode::BadResponse), "{name}: {why}");
        assert!(why["error"].as_str().unwrap().contains(says), "{name}: {why}");
    }
}

#[test]
fn an_interfaces_own_error_passes_through_with_its_status_and_without_the_credential() {
    let interface = Interface::new("");
    let mut broker = interface.broker();
    let mut worker = broker.run(&["parts.missing", "parts.getPart"], limits());
    let (code, error) = worker.call("parts.missing", &json!({}));
    assert_eq!(code, Some(CallCode::ToolFailed));
    assert_eq!((error["name"].as_str(), &error["code"]), (Some("HttpError"), &json!(404)));
    assert!(error["message"].as_str().unwrap().contains("GET /missing answered 404"), "{error}");
    assert_eq!(error["data"]["title"], "no such part");
    assert_eq!(error["data"]["secret"], "[credential removed]");
    let (code, said) = worker.call("parts.getPart", &json!({"id": "1"}));
    assert_eq!(code, None);
    assert!(
        said.to_string().contains("[credential removed]") && !said.to_string().contains(CANARY)
    );
    let (_, log) = broker.finish();
    assert!(!log.contains(CANARY), "it is in the log");
}

#[test]
fn attack_20_no_part_of_a_credential_is_left_in_a_long_error() {
    let interface = Interface::new("");
    let mut broker = interface.broker();
    let mut worker = broker.run(&["parts.long_error"], limits());
    worker.send("parts.long_error", b"{}");
    let settled = worker.settled();
    let said = String::from_utf8(settled.body).unwrap();
    assert!(settled.code == Some(CallCode::ToolFailed) && settled.redacted, "{said}");
    assert!(said.contains("[credential removed]") && !said.contains(&CANARY[..5]), "{said}");
}

#[test]
fn attack_23_an_answer_of_very_many_values_is_not_looked_through() {
    let interface = Interface::new("");
    let mut broker = interface.broker();
    let limits = RunLimits { response_bytes: 4 << 20, ..limits() };
    let mut worker = broker.run(&["parts.many", "parts.text"], limits);
    let (code, why) = worker.call("parts.many", &json!({}));
    assert_eq!(code, Some(CallCode::BadResponse), "{why}");
    assert!(why["error"].as_str().unwrap().contains("values"), "{why}");
    assert_eq!(worker.call("parts.text", &json!({})).0, None);
}

#[test]
fn a_redirect_is_an_error_and_the_credential_goes_nowhere_else() {
    let trap = Interface::new("");
    let interface = Interface::new(&trap.web.url("/v1/trap"));
    let mut broker = interface.broker();
    let mut worker = broker.run(&["parts.redirect"], limits());
    let (code, error) = worker.call("parts.redirect", &json!({}));
    assert_eq!(code, Some(CallCode::ToolFailed));
    assert_eq!((error["name"].as_str(), &error["code"]), (Some("Redirect"), &json!(302)));
    assert!(trap.seen().is_empty());
}

#[test]
fn answers_without_end_are_bounded() {
    let interface = Interface::new("");
    let mut broker = interface.broker();
    let mut worker = broker.run(&["parts.endless", "parts.endless_error", "parts.text"], limits());
    let (code, error) = worker.call("parts.endless", &json!({}));
    assert_eq!(
        (code, error["name"].as_str()),
        (Some(CallCode::ToolFailed), Some("AnswerTooLarge"))
    );
    let (code, error) = worker.call("parts.endless_error", &json!({}));
    assert_eq!((code, &error["code"]), (Some(CallCode::ToolFailed), &json!(400)));
    assert_eq!(worker.call("parts.text", &json!({})).0, None);
}

#[test]
fn an_interface_that_breaks_off_leaves_the_outcome_unknown_and_is_not_asked_again() {
    let interface = Interface::new("");
    let mut broker = interface.broker();
    let mut worker = broker.run(&["parts.die", "parts.text"], limits());
    assert_eq!(worker.call("parts.die", &json!({})).0, Some(CallCode::OutcomeUnknown));
    assert_eq!(interface.seen().len(), 1);
    assert_eq!(worker.call("parts.text", &json!({})).0, None);
}

#[test]
fn a_companys_own_authority_is_trusted_by_the_servers_that_name_it_and_by_no_other() {
    let identity = Identity::of("localhost");
    let (port, heard) = identity.serve(|request| {
        let body = match request.starts_with("POST /token ") {
            true => r#"{"access_token": "a-token-of-the-company", "token_type": "Bearer"}"#,
            false => r#"{"stock": 3}"#,
        };
        let length = body.len();
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close";
        format!("{head}\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
    });
    let folder = tempfile::tempdir().unwrap();
    let authority = folder.path().join("ca.pem");
    std::fs::write(&authority, identity.pem()).unwrap();
    let oauth = format!(
        "oauth = {{ client_id = \"me\", client_secret = {{ from_env = \"CANARY\" }}, \
         token_url = \"https://localhost:{port}/token\" }}"
    );
    let ca_file = format!("ca_file = {authority:?}");
    let url = format!("https://localhost:{port}/v1/");
    let call = |lines: &str| {
        let mut broker = Interface::broker_at(&url, &Interface::document(), lines);
        let mut worker = broker.run(&["parts.text"], limits());
        let (_, said) = worker.call("parts.text", &json!({}));
        (said, broker.finish().1)
    };
    for (lines, name) in [("", "Unreachable"), (oauth.as_str(), "Unauthorized")] {
        let (error, log) = call(lines);
        assert_eq!(error["name"], name, "{error} {log}");
        assert!(log.contains("invalid peer certificate"), "{log}");
    }
    assert!(heard.lock().unwrap().is_empty());
    assert_eq!(call(&ca_file).0, json!({"stock": 3}));
    assert_eq!(call(&format!("{ca_file}\n{oauth}")).0, json!({"stock": 3}));
    let heard = heard.lock().unwrap();
    assert!(heard[1].starts_with("localhost POST /token "), "{heard:?}");
    assert!(heard[2].contains("authorization: Bearer a-token-of-the-company"), "{heard:?}");
}

#[test]
fn a_program_hears_that_nothing_was_sent_and_not_why() {
    let refuse =
        || async { (StatusCode::UNAUTHORIZED, axum::Json(json!({"error": "invalid_client"}))) };
    let id = Web::serve(Router::new().route("/token", axum::routing::post(refuse)));
    let oauth = format!(
        "oauth = {{ client_id = \"me\", client_secret = {{ from_env = \"CANARY\" }}, \
         token_url = \"{}\" }}",
        id.url("/token")
    );
    let interface = Interface::new("");
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let closed = format!("http://{closed}/");
    let (url, document) = (interface.web.url("/v1/"), Interface::document());
    for (url, lines, name, why) in [
        (url.as_str(), oauth.as_str(), "Unauthorized", "invalid_client"),
        (closed.as_str(), "", "Unreachable", "os error"),
    ] {
        let mut broker = Interface::broker_at(url, &document, lines);
        let mut worker = broker.run(&["parts.text"], limits());
        let (code, error) = worker.call("parts.text", &json!({}));
        assert_eq!((code, error["name"].as_str()), (Some(CallCode::ToolFailed), Some(name)));
        assert!(!error.to_string().contains(why), "{error}");
        let (_, log) = broker.finish();
        assert!(log.contains(why), "the operator hears it: {log}");
    }
    assert!(interface.seen().is_empty());
}

#[test]
fn an_interface_that_hangs_holds_up_nothing_but_its_call() {
    let interface = Interface::new("");
    let mut broker = interface.broker();
    // The journal stands.
    assert_eq!(broker.run(&["parts.text"], limits()).call("parts.text", &json!({})).0, None);
    let limits = RunLimits { wall_ms: 3_000, ..limits() };
    let mut worker = broker.run(&["parts.hang", "parts.text"], limits);
    let hung = worker.send("parts.hang", b"{}");
    let quick = worker.send("parts.text", b"{}");
    assert_eq!(worker.settled().id, quick);
    let settled = worker.settled();
    assert_eq!((settled.id, settled.code), (hung, Some(CallCode::OutcomeUnknown)));
}

#[test]
fn a_principal_has_so_many_calls_at_an_interface_and_keeps_no_other_from_it() {
    let interface = Interface::new("");
    let mut broker = interface.broker();
    let _alices: Vec<_> = (0..40)
        .map(|_| {
            let mut hers = broker.run(&["parts.hang"], limits());
            for _ in 0..8 {
                hers.send("parts.hang", b"{}");
            }
            hers
        })
        .collect();
    let deadline = Instant::now() + PATIENCE;
    while interface.seen().len() < 256 {
        assert!(Instant::now() < deadline, "only {}", interface.seen().len());
        std::thread::sleep(Duration::from_millis(20));
    }
    let tools = Authority::Tools(vec![name("parts.text")]);
    let mut bobs = broker.open(run_request("bob", tools, limits())).unwrap().0;
    assert_eq!(bobs.call("parts.text", &json!({})).0, None);
    assert_eq!(interface.seen().len(), 256 + 1);
}

#[test]
fn an_interface_that_is_down_is_left_alone_and_the_refusal_says_so() {
    let interface = Interface::new("");
    let mut broker = interface.broker();
    let mut worker = broker.run(&["parts.down", "parts.text"], limits());
    let (code, error) = worker.call("parts.down", &json!({}));
    assert_eq!((code, &error["code"]), (Some(CallCode::ToolFailed), &json!(503)));
    let until = Instant::now() + PATIENCE;
    let error = loop {
        let before = interface.seen().len();
        let (code, error) = worker.call("parts.down", &json!({}));
        if code == Some(CallCode::NoSuchTool) {
            assert_eq!(interface.seen().len(), before, "not one byte");
            assert_eq!(error["name"], "Unavailable");
            break error["error"].as_str().unwrap().to_owned();
        }
        assert!(Instant::now() < until, "it never opened: {error}");
    };
    assert!(error.contains("is tried again in") && !error.contains("503"), "{error}");
    // And tried again after it.
    let until = Instant::now() + PATIENCE;
    while worker.call("parts.text", &json!({})).0.is_some() {
        assert!(Instant::now() < until, "never tried again");
        std::thread::sleep(Duration::from_millis(20));
    }
    // What the refusal does not say the operator's log does.
    let (_, log) = broker.finish();
    let says = |line: &str| line.contains("interface left alone") && line.contains("503");
    assert!(log.lines().any(says), "{log}");
}
