//! The HTTP door of a `forge-vmm serve` as it is started: `curl` and sockets,
//! clients that leave, pages of other origins, and strangers.

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

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStderr, Command, ExitCode};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use desk::Desk;
use forge_doors::http::DOCUMENT;
use forge_doors::web::TokenHash;
use forge_protocol::limits::{INTENT_BYTES_MAX, PROGRAM_BYTES_MAX};
use processes::{Process, is_busy, is_gone, workers_below};
use serde_json::{Value, json};
use serving::{ECHO, ENDLESS, program};
use support::{eventually, forge_module, signed};
use tungstenite::Message;

fn main() -> ExitCode {
    support::main(
        claims![
            curl_gets_the_object_that_run_json_prints,
            a_run_that_nobody_waits_for_is_asked_for_and_followed,
            a_run_is_cancelled_by_its_id,
            a_waiting_client_that_goes_away_takes_its_run_with_it,
            a_run_is_submitted_once_under_a_key_and_outlives_its_client,
            an_artifact_is_a_download_and_nothing_else,
            a_run_belongs_to_the_principal_of_its_token_alone,
            a_grant_is_issued_narrowed_and_run_under_by_its_principal_alone,
            many_clients_at_once_get_each_their_own_answer,
            a_socket_carries_runs_and_closing_it_cancels_them,
            a_program_calls_a_tool_of_the_client_itself,
            every_example_of_the_documentation_works,
        ],
        claims![
            who_has_no_token_gets_nothing_and_a_body_cannot_say_who_asks,
            a_socket_ends_with_its_token,
            a_socket_says_goodbye_to_who_does_and_to_who_breaks_the_protocol,
            a_socket_gets_the_report_of_its_run_and_a_goodbye_when_the_service_ends,
            searches_that_clients_left_keep_no_place,
            questions_of_many_principals_wait_their_turn_and_readiness_for_none,
            a_host_that_is_no_name_of_the_door_is_refused_and_so_is_a_page_of_another_origin,
            what_does_not_fit_is_refused_by_its_kind_before_it_is_read,
            what_is_no_request_harms_nobody,
            health_needs_no_token_and_metrics_a_token_of_their_own,
            a_door_at_a_path_serves_the_operator_alone_or_whom_its_mode_lets_in,
            a_door_that_is_killed_is_opened_again_and_ends_with_its_service,
            the_door_can_open_no_file_and_has_no_privilege,
            a_configuration_that_lets_anybody_in_from_elsewhere_is_refused,
        ],
    )
}

// Services

const ALICE: &str = "alices-token-which-was-drawn";
const BOB: &str = "bobs-token-which-was-drawn";
const METRICS: &str = "the-token-of-metrics";

/// One whose door knows Alice and Bob.
fn desk() -> Desk {
    let hash = |token: &str| String::from(TokenHash::of(token.as_bytes()));
    desk_with(&format!(
        "[http]\nlisten = '127.0.0.1:0'\nhosts = ['forge.example']\n\
         metrics_token_sha256 = '{}'\n\
         [roles.all]\ntools = ['*']\n\
         [principals.alice]\nroles = ['all']\ntoken_sha256 = ['{}']\n\
         [principals.bob]\nroles = ['all']\ntoken_sha256 = ['{}']\n",
        hash(METRICS),
        hash(ALICE),
        hash(BOB),
    ))
}

/// One with this `forge.toml`, and a tool server.
fn desk_with(config: &str) -> Desk {
    let desk = serving::desk();
    desk.write("forge.toml", config);
    let server = json!({ "command": executables::folder().join("forge-test-server") });
    desk.write("mcp.json", json!({ "mcpServers": { "test": server } }).to_string());
    desk
}

impl Desk {
    fn opens(&self, more: &[&str]) -> Child {
        let doors = ["--config", "forge.toml", "--mcp-config", "mcp.json"];
        self.serves(&[&doors, more].concat()).spawn().unwrap()
    }

    /// A service whose doors are open.
    fn open(&self, more: &[&str]) -> Service {
        let mut child = self.opens(more);
        let mut said = BufReader::new(child.stderr.take().unwrap());
        let mut all = String::new();
        let mut lines = std::iter::from_fn(|| {
            let mut line = String::new();
            let more = said.read_line(&mut line).unwrap() > 0;
            all += &line;
            more.then_some(line)
        });
        let place = lines.by_ref().find_map(|line| {
            line.trim().strip_prefix("forge-vmm: HTTP at ").map(ToOwned::to_owned)
        });
        let serves = lines.any(|line| line.contains("serving at"));
        let service = Service { child, place: place.unwrap_or_default(), _said: said };
        assert!(serves, "the service ended:\n{all}");
        service
    }

    /// One that makes no VM.
    fn open_without_vm(&self) -> Service {
        self.open(&["--ready", "0", "--ready-max", "0"])
    }
}

struct Service {
    child: Child,
    place: String,
    _said: BufReader<ChildStderr>,
}

impl Service {
    fn address(&self) -> &str {
        self.place.strip_prefix("http://").unwrap()
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Sends these bytes and gets all that comes back.
    fn raw(&self, bytes: &[u8]) -> Vec<u8> {
        let mut stream = self.connect();
        // It may be refused before all of it is sent.
        let _ = stream.write_all(bytes);
        let mut all = Vec::new();
        let _ = stream.read_to_end(&mut all);
        all
    }

    fn ask(&self, request: Request<'_>) -> Answer {
        Answer::of(&self.raw(&request.bytes()))
    }

    fn get(&self, path: &str) -> Answer {
        self.ask(Request::new("GET", path))
    }

    fn post(&self, path: &str, body: &Value) -> Answer {
        self.ask(Request::new("POST", path).json(body))
    }

    /// The id of a run that was begun, not waited for.
    fn begin(&self, mut body: Value) -> String {
        body["wait"] = false.into();
        let answer = self.post("/v1/runs", &body);
        assert_eq!(answer.status, 202, "{answer:?}");
        answer.fits("Running");
        let id = answer.json["run_id"].as_str().unwrap().to_owned();
        assert_eq!(answer.header("location"), Some(&*format!("/v1/runs/{id}")));
        id
    }

    /// The report of a run that is to end.
    fn report(&self, id: &str) -> Value {
        let mut report = Value::Null;
        eventually("the run is over", || {
            report = self.get(&format!("/v1/runs/{id}")).json;
            report["status"] != "running"
        });
        report
    }

    /// A WebSocket, if the door opens one.
    fn socket(&self, token: &str) -> Option<tungstenite::WebSocket<TcpStream>> {
        let request = tungstenite::http::Request::builder()
            .uri(format!("ws://{}/v1/runs/ws", self.address()))
            .header("host", "localhost")
            .header("connection", "upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", tungstenite::handshake::client::generate_key())
            .header("authorization", format!("Bearer {token}"));
        tungstenite::client(request.body(()).unwrap(), self.connect())
            .ok()
            .map(|(socket, _)| socket)
    }

    fn children(&self) -> Vec<Process> {
        Process::children_of(self.child.id() as i32)
    }

    /// The process that is its door.
    fn door(&self) -> i32 {
        let is_door = |pid: i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).nth(1) == Some(b"door")
        };
        let mut found = None;
        eventually("there is a door", || {
            found = self.children().iter().map(|it| it.pid).find(|pid| is_door(*pid));
            found.is_some()
        });
        found.unwrap()
    }

    /// How many runs were cancelled, rather than ended by their deadline.
    fn cancelled(&self) -> u64 {
        let metrics = self.ask(Request::new("GET", "/metrics").by(Some(METRICS)));
        let text = String::from_utf8(metrics.body).unwrap();
        let line = "forge_service_runs_total{status=\"cancelled\",kind=\"cancelled\"} ";
        let count = text.lines().find_map(|it| it.strip_prefix(line));
        count.map_or(0, |count| count.parse().unwrap())
    }

    /// Workers that do something.
    fn busy_workers(&self) -> Vec<i32> {
        let mut found = workers_below(self.child.id() as i32);
        found.retain(|pid| is_busy(*pid));
        found
    }

    fn signal(&self, pid: i32, signal: i32) {
        // SAFETY: a plain system call; the process is the service or its child.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// HTTP

struct Request<'a> {
    method: &'a str,
    path: &'a str,
    host: &'a str,
    token: Option<&'a str>,
    more: Vec<(&'a str, String)>,
    body: Vec<u8>,
}

impl<'a> Request<'a> {
    fn new(method: &'a str, path: &'a str) -> Self {
        Self {
            method,
            path,
            host: "localhost",
            token: Some(ALICE),
            more: Vec::new(),
            body: Vec::new(),
        }
    }

    fn by(self, token: Option<&'a str>) -> Self {
        Self { token, ..self }
    }

    fn host(self, host: &'a str) -> Self {
        Self { host, ..self }
    }

    fn with(mut self, name: &'a str, value: &str) -> Self {
        self.more.push((name, value.into()));
        self
    }

    fn json(mut self, body: &Value) -> Self {
        self.body = body.to_string().into();
        self.with("content-type", "application/json")
    }

    fn bytes(&self) -> Vec<u8> {
        let Self { method, path, host, token, more, body } = self;
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n");
        if let Some(token) = token {
            head += &format!("authorization: Bearer {token}\r\n");
        }
        for (name, value) in more {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("content-length: {}\r\n\r\n", body.len());
        [head.as_bytes(), body].concat()
    }
}

#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
    json: Value,
}

impl Answer {
    fn of(bytes: &[u8]) -> Self {
        let end = bytes.windows(4).position(|it| it == b"\r\n\r\n");
        let end = end.unwrap_or_else(|| panic!("no head: {}", String::from_utf8_lossy(bytes)));
        let head = String::from_utf8(bytes[..end].into()).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let body = bytes[end + 4..].to_vec();
        let json = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let answer = Self { status, head, body, json };
        if status >= 400 {
            answer.fits("Problem");
            assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        }
        assert_eq!(answer.header("access-control-allow-origin"), None);
        answer
    }

    fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().skip(1).filter_map(|line| line.split_once(": "));
        lines.into_iter().find(|(it, _)| it.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    /// Holds the body against a schema of the document.
    fn fits(&self, schema: &str) {
        fits(schema, &self.json);
    }

    fn kind(&self) -> &str {
        self.json["kind"].as_str().unwrap_or_default()
    }
}

fn fits(schema: &str, value: &Value) {
    let mut document: Value = serde_json::from_str(DOCUMENT).unwrap();
    document["$ref"] = format!("#/components/schemas/{schema}").into();
    let validator = jsonschema::draft202012::new(&document).unwrap();
    if let Err(error) = validator.validate(value) {
        panic!("no {schema}: {error}: {value:#}");
    }
}

/// `curl` with these arguments, which has to go well.
fn curl(desk: &Desk, arguments: &[&str]) -> Vec<u8> {
    let mut command = Command::new("curl");
    command.current_dir(desk.folder()).args(["--silent", "--show-error", "--max-time", "60"]);
    command.env("NO_PROXY", "*");
    let output = command.args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

// Programs

/// Calls `test.echo` and puts out what it says.
fn caller() -> Vec<u8> {
    signed(&forge_module(
        r#"(import "tool" "test.echo" (func $echo (param i32 i32) (result i32)))
           (memory (export "memory") 1)
           (data (i32.const 0) "{\"text\":\"hi\"}")"#,
        "(drop (call $output (i32.const 100) (call $resp_read (i32.const 100) (i32.const 0)
            (call $echo (i32.const 0) (i32.const 13)))))
        (i32.const 0)",
    ))
}

fn order(program: &[u8]) -> Value {
    json!({ "program": STANDARD.encode(program), "limits": { "wall_ms": 30_000 } })
}

/// A run that ends by its deadline only, and that is far away.
fn endless() -> Value {
    let limits = json!({ "fuel": u64::MAX, "wall_ms": 30_000 });
    json!({ "program": STANDARD.encode(program(ENDLESS)), "limits": limits })
}

/// A report without what differs from run to run.
fn essence(mut report: Value) -> Value {
    let fields = report.as_object_mut().unwrap();
    for name in ["run_id", "timing_us"] {
        assert!(fields.remove(name).is_some(), "a report has {name}");
    }
    report
}

// Runs

fn curl_gets_the_object_that_run_json_prints() {
    let desk = desk();
    let service = desk.open(&[]);
    let url = format!("{}/v1/runs", service.place);
    let token = format!("authorization: Bearer {ALICE}");
    let trap = "(i32.div_s (i32.const 1) (i32.const 0))";
    for (name, body) in [("echo", ECHO), ("trap", trap)] {
        desk.write(name, program(body));
        let mut alone = desk.command(&["run", "--trust", "signer.pub", "--json"]);
        alone.args(["--timeout", "30s", "--input", "[1, 2]", name]);
        let alone = essence(serde_json::from_slice(&alone.output().unwrap().stdout).unwrap());

        let file = format!("program=@{name}");
        let form = ["-H", &token, "-F", &file, "-F", "input=[1, 2]", "-F"];
        let form = [&form[..], &[r#"limits={"wall_ms": 30000}"#, &url]].concat();
        let mut body = order(&fs::read(desk.path(name)).unwrap());
        body["input"] = json!("replaced");
        let body = body.to_string().replace(r#""replaced""#, "[1, 2]");
        desk.write("body.json", body);
        let json =
            ["-H", &token, "-H", "content-type: application/json", "--data", "@body.json", &url];
        for arguments in [&form[..], &json] {
            let report: Value = serde_json::from_slice(&curl(&desk, arguments)).unwrap();
            fits("Report", &report);
            assert_eq!(essence(report), alone, "{name}");
        }
    }
}

fn a_run_that_nobody_waits_for_is_asked_for_and_followed() {
    let desk = desk();
    let service = desk.open(&[]);
    let mut body = order(&program(ECHO));
    body["input"] = json!("grüße");
    let id = service.begin(body);
    let report = service.report(&id);
    fits("Report", &report);
    assert_eq!((&report["run_id"], &report["output"]), (&json!(id), &json!("\"grüße\"")));

    let follow = |more: &[&str]| {
        let (token, url) = (
            format!("authorization: Bearer {ALICE}"),
            format!("{}/v1/runs/{id}/events", service.place),
        );
        let all = [&["-N", "-H", &token][..], more, &[&url]].concat();
        String::from_utf8(curl(&desk, &all)).unwrap()
    };
    let all = follow(&[]);
    let names: Vec<&str> = all.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    assert_eq!(names, ["admitted", "output", "log", "finished"], "{all}");
    let ids: Vec<&str> = all.lines().filter_map(|line| line.strip_prefix("id: ")).collect();
    assert_eq!(ids, ["1", "2", "3", "4"]);
    let data = all.lines().filter_map(|line| line.strip_prefix("data: "));
    let data: Vec<Value> = data.map(|data| serde_json::from_str(data).unwrap()).collect();
    assert_eq!(data[0]["run_id"], json!(id));
    assert_eq!(data[1]["output"], json!("\"grüße\""));
    assert_eq!(data[2], json!({ "level": 2, "text": "\"g" }));
    assert_eq!(data[3], report);
    // One that has the first three gets the rest.
    let rest = follow(&["-H", "last-event-id: 3"]);
    assert_eq!(rest, all[all.find("id: 4").unwrap()..]);
    let from = |id: &str, last: &str| {
        let path = format!("/v1/runs/{id}/events");
        service.ask(Request::new("GET", &path).with("last-event-id", last))
    };
    let whole = from(&id, "");
    assert_eq!(whole.status, 200, "an empty one is none");
    // Or nginx would hold it back until it is over.
    assert!(whole.head.to_lowercase().contains("x-accel-buffering: no"), "{}", whole.head);
    let wrong = from(&id, "three");
    assert_eq!((wrong.status, wrong.kind()), (422, "bad_request"));
    assert_eq!(from(&id, "4").status, 204, "it has all there is, and need not come back");
    // An event that never was is not the end.
    assert_eq!(from(&id, "99").status, 200, "it does not have the end");
}

fn a_run_is_cancelled_by_its_id() {
    let desk = desk();
    let service = desk.open(&[]);
    let id = service.begin(endless());
    let path = format!("/v1/runs/{id}");
    let standing = service.get(&path);
    assert_eq!((standing.status, &standing.json["status"]), (200, &json!("running")));
    // Somebody else cannot.
    let others = service.ask(Request::new("DELETE", &path).by(Some(BOB)));
    assert_eq!((others.status, others.kind()), (404, "not_found"));
    assert_eq!(service.ask(Request::new("DELETE", &path)).status, 202);
    let report = service.report(&id);
    assert_eq!(report["status"], "cancelled", "{report:#}");
    // It is over, and stays so.
    let again = service.ask(Request::new("DELETE", &path));
    assert_eq!((again.status, &again.json), (200, &report));
}

fn a_waiting_client_that_goes_away_takes_its_run_with_it() {
    let desk = desk();
    let service = desk.open(&["--ready", "0", "--ready-max", "0"]);
    let mut client = service.connect();
    client.write_all(&Request::new("POST", "/v1/runs").json(&endless()).bytes()).unwrap();
    let mut its = Vec::new();
    eventually("its run is carried out", || {
        its = service.busy_workers();
        !its.is_empty()
    });
    client.shutdown(Shutdown::Both).unwrap();
    drop(client);
    eventually("it is cancelled", || service.cancelled() == 1);
    for pid in its {
        eventually("its worker is gone", || is_gone(pid));
    }
    let echo = service.post("/v1/runs", &order(&program(ECHO)));
    assert_eq!((echo.status, &echo.json["output"]), (200, &json!("{}")));
}

fn a_run_is_submitted_once_under_a_key_and_outlives_its_client() {
    let desk = desk();
    let service = desk.open(&["--ready", "0", "--ready-max", "0"]);
    let submit = |key: &str, token, body: &Value| {
        let request = Request::new("POST", "/v1/runs").by(Some(token)).json(body);
        service.ask(request.with("idempotency-key", key))
    };
    let echo = order(&program(ECHO));
    let first = submit("k-1", ALICE, &echo);
    assert_eq!((first.status, &first.json["output"]), (200, &json!("{}")));
    let again = submit("k-1", ALICE, &echo);
    assert_eq!((again.status, &again.json), (200, &first.json), "the same run");
    // Another run by another's word, another key, and without one.
    let others = [submit("k-1", BOB, &echo), submit("k-2", ALICE, &echo)];
    for other in &others {
        assert_eq!(other.status, 200);
        assert_ne!(other.json["run_id"], first.json["run_id"]);
    }
    let mut other = echo.clone();
    other["input"] = json!([1]);
    let reused = submit("k-1", ALICE, &other);
    assert_eq!((reused.status, reused.kind()), (422, "key_reused"));
    let nothing = submit("", ALICE, &echo);
    assert_eq!((nothing.status, nothing.kind()), (422, "bad_request"));

    // Its client leaves, and finds it again: by the list, and by asking once more.
    let endless = endless();
    let mut client = service.connect();
    let request = Request::new("POST", "/v1/runs").json(&endless).with("idempotency-key", "k-3");
    client.write_all(&request.bytes()).unwrap();
    eventually("its run is carried out", || !service.busy_workers().is_empty());
    client.shutdown(Shutdown::Both).unwrap();
    drop(client);
    let kept = service.get("/v1/runs");
    kept.fits("Runs");
    let [running, last, ..] = &kept.json["runs"].as_array().unwrap()[..] else { panic!() };
    assert_eq!(
        (&running["idempotency_key"], &running["status"]),
        (&json!("k-3"), &json!("running"))
    );
    assert_eq!((&last["run_id"], &last["status"]), (&others[1].json["run_id"], &json!("ok")));
    let mut polled = endless;
    polled["wait"] = false.into();
    let found = submit("k-3", ALICE, &polled);
    assert_eq!((found.status, &found.json["run_id"]), (202, &running["run_id"]));
    assert_eq!(service.cancelled(), 0);
    let path = format!("/v1/runs/{}", running["run_id"].as_str().unwrap());
    assert_eq!(service.ask(Request::new("DELETE", &path)).status, 202);
    eventually("it is cancelled", || service.cancelled() == 1);
}

fn an_artifact_is_a_download_and_nothing_else() {
    let desk = desk();
    let service = desk.open(&[]);
    let artifact = signed(&forge_module(
        r#"(memory (export "memory") 1)
           (data (i32.const 0) "../evil\22.html")
           (data (i32.const 32) "text/html")
           (data (i32.const 64) "<script>alert(1)</script>")"#,
        "(drop (call $artifact (i32.const 0) (i32.const 13) (i32.const 32) (i32.const 9)
            (i32.const 64) (i32.const 25)))
        (i32.const 0)",
    ));
    let run = service.post("/v1/runs", &order(&artifact));
    assert_eq!(run.json["artifacts"][0]["bytes"], 25, "{run:?}");
    let place = run.header("content-location").unwrap();
    let got = service.get(&format!("{place}/artifacts/0"));
    assert_eq!((got.status, &*got.body), (200, &b"<script>alert(1)</script>"[..]));
    assert_eq!(got.header("content-disposition"), Some(r#"attachment; filename="_evil_.html""#));
    assert_eq!(got.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(got.header("content-security-policy"), Some("sandbox; default-src 'none'"));
    assert_eq!(got.header("cache-control"), Some("no-store"));
    for number in ["1", "-1", "00", "+0", "x", "99999999999999999999"] {
        assert_eq!(service.get(&format!("{place}/artifacts/{number}")).status, 404, "{number}");
    }
    let others = service.ask(Request::new("GET", &format!("{place}/artifacts/0")).by(Some(BOB)));
    assert_eq!(others.status, 404);
}

fn a_run_belongs_to_the_principal_of_its_token_alone() {
    let desk = desk();
    let service = desk.open(&[]);
    let run = service.post("/v1/runs", &order(&program(ECHO)));
    assert_eq!(run.status, 200);
    let place = run.header("content-location").unwrap();
    assert_eq!(service.get(place).json, run.json);
    for more in ["", "/events"] {
        let others = Request::new("GET", place).by(Some(BOB));
        let path = format!("{place}{more}");
        let others = service.ask(Request { path: &path, ..others });
        assert_eq!((others.status, others.kind()), (404, "not_found"));
    }
}

fn a_grant_is_issued_narrowed_and_run_under_by_its_principal_alone() {
    let desk = desk();
    let service = desk.open(&[]);
    let listed = service.get("/v1/tools");
    listed.fits("ToolList");
    assert!(listed.body.windows(11).any(|it| it == b"\"test.echo\""), "{listed:?}");
    let found = service.post("/v1/tools/search", &json!({ "intent": "say it back", "k": 2 }));
    found.fits("ToolsFound");
    assert_eq!(found.json["tools"].as_array().unwrap().len(), 2);

    let terms = json!({ "tools": ["test.echo", "test.note"], "valid_s": 600, "calls_max": 3 });
    let issued = service.post("/v1/grants", &terms);
    assert_eq!(issued.status, 201, "{issued:?}");
    issued.fits("Grant");
    // Nothing left is no way of saying that all is.
    for none in [json!([]), json!(null)] {
        let none = json!({ "grant": issued.json["grant"], "tools": none, "calls_max": 1 });
        assert_eq!(service.post("/v1/grants/attenuate", &none).status, 422);
    }
    assert_eq!(service.post("/v1/grants", &json!({ "tools": [], "valid_s": 600 })).status, 422);
    let narrow = json!({ "grant": issued.json["grant"], "tools": ["test.echo"] });
    let narrowed = service.post("/v1/grants/attenuate", &narrow);
    assert_eq!(narrowed.status, 201, "{narrowed:?}");
    let grant = &narrowed.json["grant"];
    let claims = service.post("/v1/grants/inspect", &json!({ "grant": grant }));
    claims.fits("Claims");
    assert_eq!(claims.json["principal"], "alice");
    assert_eq!(claims.json["tools"].as_array().unwrap().len(), 1);

    let mut body = order(&caller());
    body["grant"] = grant.clone();
    let run = service.post("/v1/runs", &body);
    assert_eq!(
        (&run.json["status"], &run.json["output"]),
        (&json!("ok"), &json!(r#"{"text":"hi"}"#)),
        "{run:?}"
    );
    // By name, without a grant.
    let mut named = order(&caller());
    named["tools"] = json!(["test.echo"]);
    assert_eq!(service.post("/v1/runs", &named).json["status"], "ok");

    let bob = |path, body: &Value| service.ask(Request::new("POST", path).by(Some(BOB)).json(body));
    let stolen = bob("/v1/runs", &body);
    assert_eq!(
        (&stolen.json["status"], &stolen.json["kind"]),
        (&json!("rejected"), &json!("grant"))
    );
    let read = bob("/v1/grants/inspect", &json!({ "grant": grant }));
    assert_eq!((read.status, read.kind()), (403, "grant"));
    let nothing = service.post("/v1/grants", &json!({ "tools": ["test.nothing"], "valid_s": 1 }));
    assert_eq!((nothing.status, nothing.kind()), (422, "no_such_tool"));
}

fn many_clients_at_once_get_each_their_own_answer() {
    let desk = desk();
    let service = desk.open(&["--ready", "2", "--ready-max", "4"]);
    let program = program(ECHO);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (service, program) = (&service, &program);
            scope.spawn(move || {
                for turn in 0..5 {
                    let input = format!("[{thread},{turn}]");
                    let mut body = order(program);
                    body["input"] = serde_json::from_str(&input).unwrap();
                    let answer = service.post("/v1/runs", &body);
                    assert_eq!(answer.json["output"], input.as_str(), "{answer:?}");
                }
            });
        }
    });
}

fn a_socket_carries_runs_and_closing_it_cancels_them() {
    let desk = desk();
    let service = desk.open(&["--ready", "0", "--ready-max", "0"]);
    let open = |token: &str| service.socket(token);
    assert!(open("nobodys").is_none());
    let mut socket = open(ALICE).unwrap();
    let say = |socket: &mut tungstenite::WebSocket<TcpStream>, message: Value| {
        socket.send(Message::text(message.to_string())).unwrap();
    };
    let hear = |socket: &mut tungstenite::WebSocket<TcpStream>| loop {
        if let Message::Text(text) = socket.read().unwrap() {
            let message: Value = serde_json::from_str(&text).unwrap();
            fits("ToClient", &message);
            return message;
        }
    };
    // What is none, and what does not fit, ends nothing.
    for (said, number) in [
        (json!("what"), Value::Null),
        (json!({ "submit": { "number": 3, "run": { "program": "*" } } }), json!(3)),
        (json!({ "settle": { "number": 4, "callback": 0 } }), json!(4)),
        (json!({ "cancel": { "number": u64::MAX } }), json!(u64::MAX)),
    ] {
        say(&mut socket, said);
        let problem = hear(&mut socket);
        assert_eq!(problem["problem"]["number"], number, "{problem:#}");
        assert_eq!(problem["problem"]["over"], true, "nothing has this number: {problem:#}");
    }
    // Two at once; one never ends.
    say(&mut socket, json!({ "submit": { "number": 1, "run": endless() } }));
    say(&mut socket, json!({ "submit": { "number": 2, "run": order(&program(ECHO)) } }));
    let finished = hear(&mut socket);
    assert_eq!(finished["finished"]["number"], 2, "{finished:#}");
    assert_eq!(finished["finished"]["report"]["output"], "{}");
    say(&mut socket, json!({ "submit": { "number": 1, "run": order(&program(ECHO)) } }));
    let refused = hear(&mut socket);
    let of = |problem: &Value| {
        (problem["problem"]["number"].clone(), problem["problem"]["over"].clone())
    };
    assert_eq!(of(&refused), (json!(1), json!(false)), "the first of this number goes on");
    say(&mut socket, json!({ "settle": { "number": 1, "callback": 0 } }));
    assert_eq!(of(&hear(&mut socket)), (json!(1), json!(false)));
    say(&mut socket, json!({ "cancel": { "number": 1 } }));
    let cancelled = hear(&mut socket);
    assert_eq!(cancelled["finished"]["report"]["status"], "cancelled", "{cancelled:#}");

    say(&mut socket, json!({ "submit": { "number": 1, "run": endless(), "events": true } }));
    let admitted = hear(&mut socket);
    assert_eq!(admitted["event"]["event"], "admitted", "{admitted:#}");
    let id = admitted["event"]["data"]["run_id"].as_str().unwrap().to_owned();
    let state = || service.get(&format!("/v1/runs/{id}")).json;
    assert_eq!(state()["status"], "running", "who knows its id finds it");
    let mut its = Vec::new();
    // One that is being made is busy as well, for a while.
    eventually("its run is carried out", || {
        its = service.busy_workers();
        its.len() == 1 && is_busy(its[0])
    });
    drop(socket);
    eventually("it is cancelled, as that before", || service.cancelled() == 2);
    // What its client would have been told is kept for it.
    eventually("its report is there", || state()["status"] == "cancelled");
    for pid in its {
        eventually("its worker is gone", || is_gone(pid));
    }
}

fn a_socket_ends_with_its_token() {
    let desk = desk();
    let service = desk.open_without_vm();
    let (mut alices, mut bobs) = (service.socket(ALICE).unwrap(), service.socket(BOB).unwrap());
    let config = fs::read_to_string(desk.path("forge.toml")).unwrap();
    let alices_own = String::from(TokenHash::of(ALICE.as_bytes()));
    let new = String::from(TokenHash::of(b"another-token-that-was-drawn"));
    desk.write("forge.toml", config.replace(&alices_own, &new));
    service.signal(service.child.id() as i32, libc::SIGHUP);
    let hear = |socket: &mut tungstenite::WebSocket<TcpStream>| loop {
        match socket.read().unwrap() {
            Message::Ping(_) => {}
            other => return other,
        }
    };
    let goodbye = hear(&mut alices);
    assert!(
        matches!(&goodbye, Message::Close(Some(frame)) if u16::from(frame.code) == 1008),
        "{goodbye:?}"
    );
    assert!(service.socket(ALICE).is_none());
    assert!(service.socket("another-token-that-was-drawn").is_some());
    // Another's goes on, also when it has had the time to see what changed.
    for _ in 0..2 {
        bobs.send(Message::text("{}")).unwrap();
        assert!(matches!(hear(&mut bobs), Message::Text(_)));
    }
    let more: Vec<_> = std::iter::from_fn(|| service.socket(BOB)).take(40).collect();
    assert_eq!(more.len(), 31, "a principal has 32");
    // So do the last of all.
    let has_none = |line: &&str| !line.starts_with("token_sha256");
    let nobodys: Vec<_> = config.lines().filter(has_none).collect();
    desk.write("forge.toml", nobodys.join("\n"));
    service.signal(service.child.id() as i32, libc::SIGHUP);
    let goodbye = hear(&mut bobs);
    assert!(
        matches!(&goodbye, Message::Close(Some(frame)) if u16::from(frame.code) == 1008),
        "{goodbye:?}"
    );
    assert!(service.socket(BOB).is_none());
}

fn a_socket_says_goodbye_to_who_does_and_to_who_breaks_the_protocol() {
    let desk = desk();
    let service = desk.open_without_vm();
    let goodbye = |mut socket: tungstenite::WebSocket<TcpStream>| loop {
        match socket.read() {
            Ok(Message::Close(frame)) => return frame.map(|frame| u16::from(frame.code)),
            Ok(Message::Ping(_)) => {}
            other => panic!("no goodbye: {other:?}"),
        }
    };
    let mut socket = service.socket(ALICE).unwrap();
    socket.close(None).unwrap();
    assert_eq!(goodbye(socket), None);
    let mut socket = service.socket(ALICE).unwrap();
    // A text without a mask.
    socket.get_mut().write_all(b"\x81\x01a").unwrap();
    assert_eq!(goodbye(socket), Some(1002));
    // One that is no UTF-8, and the head of one that is too large; both with a mask.
    let mut socket = service.socket(ALICE).unwrap();
    socket.get_mut().write_all(b"\x81\x81\0\0\0\0\xff").unwrap();
    assert_eq!(goodbye(socket), Some(1007));
    let mut socket = service.socket(ALICE).unwrap();
    let head = [&b"\x81\xff"[..], &(18u64 << 20).to_be_bytes(), &[0; 4]].concat();
    socket.get_mut().write_all(&head).unwrap();
    assert_eq!(goodbye(socket), Some(1009));
}

fn a_socket_gets_the_report_of_its_run_and_a_goodbye_when_the_service_ends() {
    let desk = desk();
    let mut service = desk.open(&["--ready", "0", "--ready-max", "0"]);
    let mut socket = service.socket(ALICE).unwrap();
    let mut run = endless();
    run["limits"]["wall_ms"] = json!(1500);
    let submit = json!({ "submit": { "number": 1, "run": run } });
    socket.send(Message::text(submit.to_string())).unwrap();
    eventually("its run is carried out", || service.busy_workers().len() == 1);
    service.signal(service.child.id() as i32, libc::SIGTERM);
    let mut told = Vec::new();
    loop {
        match socket.read().unwrap() {
            Message::Text(text) => told.push(serde_json::from_str::<Value>(&text).unwrap()),
            Message::Close(frame) => {
                assert_eq!(frame.map(|frame| u16::from(frame.code)), Some(1001));
                break;
            }
            _ => {}
        }
    }
    let [finished] = told.as_slice() else { panic!("{told:#?}") };
    assert_eq!(finished["finished"]["report"]["kind"], "deadline", "{finished:#}");
    assert!(service.child.wait().unwrap().success());
}

fn a_program_calls_a_tool_of_the_client_itself() {
    let desk = desk();
    let service = desk.open(&[]);
    let mut socket = service.socket(ALICE).unwrap();
    let caller = signed(&forge_module(
        r#"(import "tool" "app.greet" (func $greet (param i32 i32) (result i32)))
           (memory (export "memory") 1)
           (data (i32.const 0) "{\"text\":\"hi\"}")"#,
        "(drop (call $output (i32.const 100) (call $resp_read (i32.const 100) (i32.const 0)
            (call $greet (i32.const 0) (i32.const 13)))))
        (i32.const 0)",
    ));
    let tool = json!({ "name": "greet", "input_schema": { "type": "object" } });
    let hosted = json!({ "server": "app", "tools": [tool] });
    let submit = json!({ "number": 1, "run": order(&caller), "hosted": hosted, "events": true });
    socket.send(Message::text(json!({ "submit": submit }).to_string())).unwrap();
    let mut events = Vec::new();
    loop {
        let Message::Text(text) = socket.read().unwrap() else { continue };
        let message: Value = serde_json::from_str(&text).unwrap();
        fits("ToClient", &message);
        if let Some(event) = message.get("event") {
            events.push(event["event"].as_str().unwrap().to_owned());
        } else if let Some(callback) = message.get("callback") {
            assert_eq!(callback["tool"], "app.greet");
            assert_eq!(callback["arguments"], json!({ "text": "hi" }));
            let settle = json!({ "number": 1, "callback": callback["callback"], "result": { "said": "ho" } });
            socket.send(Message::text(json!({ "settle": settle }).to_string())).unwrap();
        } else {
            let report = &message["finished"]["report"];
            assert_eq!(report["output"], r#"{"said":"ho"}"#, "{message:#}");
            break;
        }
    }
    assert_eq!(events, ["admitted", "called", "settled", "output"]);
}

/// The examples of `docs/http.md`, one after the other in one shell, with the
/// program and the token that the text says one has.
fn every_example_of_the_documentation_works() {
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/http.md")).unwrap();
    let desk = desk();
    desk.write("program.wasm", program(ECHO));
    let service = desk.open(&[]);
    let mut script = String::from("set -euo pipefail\n");
    let mut examples = 0;
    for block in text.split("```sh\n").skip(1) {
        let block = block.split("```").next().unwrap();
        if block.contains("$FORGE/") {
            script += block;
            examples += 1;
        }
    }
    assert!(examples >= 5, "{examples} examples");
    let output = Command::new("bash")
        .current_dir(desk.folder())
        .args(["-c", &script])
        .env("FORGE", &service.place)
        .env("TOKEN", ALICE)
        .env("METRICS_TOKEN", METRICS)
        .env("NO_PROXY", "*")
        .output()
        .unwrap();
    let (said, wrong) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{script}\n{said}\n{wrong}");
    assert!(!said.contains("\"detail\""), "{said}");
}

// Who may come in

fn who_has_no_token_gets_nothing_and_a_body_cannot_say_who_asks() {
    let desk = desk();
    let service = desk.open_without_vm();
    let document: Value = serde_json::from_str(DOCUMENT).unwrap();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            if method == "parameters" || operation.get("security").is_some() {
                continue;
            }
            let method = method.to_uppercase();
            let path = path.replace("{id}", "1").replace("{n}", "0");
            for token in [None, Some("nobodys"), Some("")] {
                let refused = service.ask(Request::new(&method, &path).by(token));
                assert_eq!((refused.status, refused.kind()), (401, "unauthenticated"), "{path}");
                let challenge = match token {
                    Some("nobodys") => "Bearer error=\"invalid_token\"",
                    _ => "Bearer",
                };
                assert_eq!(refused.header("www-authenticate"), Some(challenge));
            }
        }
    }
    let twice = Request::new("GET", "/v1/tools").with("authorization", "Bearer nobodys");
    assert_eq!(service.ask(twice).status, 401);
    let run = json!({ "program": "", "principal": "bob" });
    let search = json!({ "intent": "x", "principal": "bob" });
    let grant = json!({ "tools": ["test.echo"], "valid_s": 1, "principal": "bob" });
    for (path, body) in [("/v1/runs", run), ("/v1/tools/search", search), ("/v1/grants", grant)] {
        let refused = service.post(path, &body);
        assert_eq!((refused.status, refused.kind()), (403, "forbidden"), "{path}");
    }
    let form = "--x\r\ncontent-disposition: form-data; name=\"program\"\r\n\r\n\r\n\
                --x\r\ncontent-disposition: form-data; name=\"options\"\r\n\r\n{\"principal\": \"bob\"}\r\n--x--\r\n";
    let request =
        Request::new("POST", "/v1/runs").with("content-type", "multipart/form-data; boundary=x");
    let refused = service.ask(Request { body: form.into(), ..request });
    assert_eq!((refused.status, refused.kind()), (403, "forbidden"));
}

fn searches_that_clients_left_keep_no_place() {
    let desk = desk();
    let stuck = r#"{"mcpServers": {"stuck": {"command": "/bin/sleep", "args": ["60"]}}}"#;
    desk.write("mcp.json", stuck);
    let service = desk.open_without_vm();
    let search = Request::new("POST", "/v1/tools/search").json(&json!({ "intent": "any" })).bytes();
    let ask = || {
        let mut stream = service.connect();
        stream.write_all(&search).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        stream
    };
    let began = Instant::now();
    let mut head = [0; 12];
    let waits = |mut stream: &TcpStream, head: &mut [u8]| {
        stream.read_exact(head).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    };
    let mut all: Vec<_> = (0..16).map(|_| ask()).collect();
    loop {
        eventually("all places are taken", || {
            ask().read_exact(&mut head).is_ok_and(|()| head == *b"HTTP/1.1 429")
        });
        // Who asked here may have had the place of one of them for a while.
        all.retain(|stream| waits(stream, &mut head));
        if all.len() == 16 {
            break;
        }
        all.resize_with(16, ask);
    }
    drop(all);
    eventually("one waits again", || waits(&ask(), &mut head));
    // Then the start of the server fails, and they are free in any case.
    assert!(began.elapsed() < Duration::from_secs(30), "the places came free by themselves");
}

fn questions_of_many_principals_wait_their_turn_and_readiness_for_none() {
    let tokens = ["token-a", "token-b", "token-c", "token-d", "token-e"];
    let mut config = String::from("[http]\nlisten = '127.0.0.1:0'\n[roles.all]\ntools = ['*']\n");
    for token in tokens {
        let hash = String::from(TokenHash::of(token.as_bytes()));
        config += &format!("[principals.{token}]\nroles = ['all']\ntoken_sha256 = ['{hash}']\n");
    }
    let desk = desk_with(&config);
    let stuck = r#"{"mcpServers": {"stuck": {"command": "/bin/sleep", "args": ["60"]}}}"#;
    desk.write("mcp.json", stuck);
    let service = desk.open_without_vm();
    let search = json!({ "intent": "any" });
    let ask = |token| {
        let request = Request::new("POST", "/v1/tools/search").by(Some(token)).json(&search);
        let mut stream = service.connect();
        stream.write_all(&request.bytes()).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    };
    let waits = |stream: &TcpStream| stream.peek(&mut [0]).is_err();
    let (last, first) = tokens.split_last().unwrap();
    let mut asked = Vec::new();
    for token in first {
        let streams: Vec<_> = (0..17).map(|_| ask(token)).collect();
        // That is one more than it may have, so all the others are on their way.
        eventually("one is refused", || streams.iter().any(|stream| !waits(stream)));
        asked.extend(streams);
    }
    let last = ask(last);
    for _ in 0..2 {
        // What was said before is good for some time.
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(service.ask(Request::new("GET", "/readyz").by(None)).status, 200);
    }
    assert!(waits(&last), "it waits as the others do");
    assert_eq!(asked.iter().filter(|stream| waits(stream)).count(), 4 * 16);
}

fn a_host_that_is_no_name_of_the_door_is_refused_and_so_is_a_page_of_another_origin() {
    // Nobody needs a token here, so a page would need none either.
    let desk =
        desk_with("[http]\nlisten = '127.0.0.1:0'\nprincipal = 'local'\nhosts = ['forge.example']");
    let service = desk.open_without_vm();
    let ask = |host, origin: &[(&'static str, &str)]| {
        let mut request = Request::new("GET", "/v1/tools").by(None).host(host);
        for (name, value) in origin {
            request = request.with(name, value);
        }
        let answer = service.ask(request);
        (answer.status, answer.kind().to_owned())
    };
    for host in ["localhost", "127.0.0.1:1", "[::1]", "forge.example"] {
        assert_eq!(ask(host, &[]), (200, String::new()), "{host}");
    }
    for host in ["evil.example", "forge.example.evil.example"] {
        assert_eq!(ask(host, &[]), (421, "misdirected".into()), "{host}");
    }
    for origin in ["https://evil.example", "null", "http://localhost:1"] {
        assert_eq!(ask("localhost", &[("origin", origin)]), (403, "forbidden".into()), "{origin}");
    }
    assert_eq!(ask("localhost", &[("sec-fetch-site", "cross-site")]), (403, "forbidden".into()));
    assert_eq!(ask("localhost", &[("origin", "http://localhost")]), (200, String::new()));
    // Nor may it ask whether it may.
    let preflight =
        Request::new("OPTIONS", "/v1/runs").by(None).with("origin", "https://evil.example");
    assert_eq!(service.ask(preflight).status, 403);
}

fn what_does_not_fit_is_refused_by_its_kind_before_it_is_read() {
    let desk = desk();
    let service = desk.open_without_vm();
    for (method, path, status, kind) in [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/runs/00", 404, "not_found"),
        ("GET", "/v1/runs/%ff", 404, "not_found"),
        ("GET", "/v1/runs/00/artifacts/%ff", 404, "not_found"),
        ("GET", "/v1/runs/..%2f..%2fetc", 404, "not_found"),
        ("PUT", "/v1/runs", 405, "method"),
        ("POST", "/v1/runs", 415, "media_type"),
        ("POST", "/v1/tools/search", 415, "media_type"),
        ("GET", "/v1/runs/ws", 426, "bad_request"),
    ] {
        let refused = service.ask(Request::new(method, path));
        assert_eq!((refused.status, refused.kind()), (status, kind), "{method} {path}");
        assert_eq!(refused.header("upgrade"), (status == 426).then_some("websocket"));
        assert_eq!(refused.header("sec-websocket-version"), (status == 426).then_some("13"));
    }
    // A WebSocket is opened as RFC 6455 has it.
    for (key, body) in [("x", ""), ("", ""), ("dGhlIHNhbXBsZSBub25jZQ==", "hello")] {
        let upgrade = format!(
            "GET /v1/runs/ws HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ALICE}\r\n\
             connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
             sec-websocket-key: {key}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut stream = service.connect();
        stream.write_all(upgrade.as_bytes()).unwrap();
        // The connection may stay for another request.
        let (mut all, mut some) = (Vec::new(), [0; 4096]);
        while !all.ends_with(b"}") {
            match stream.read(&mut some).unwrap() {
                0 => break,
                read => all.extend_from_slice(&some[..read]),
            }
        }
        let refused = Answer::of(&all);
        assert_eq!((refused.status, refused.kind()), (422, "bad_request"), "{key:?} {body:?}");
    }
    let long = "x".repeat(INTENT_BYTES_MAX as usize + 1);
    let large = "x".repeat(600 * 1024);
    let program = "A".repeat((PROGRAM_BYTES_MAX as usize).div_ceil(3) * 4 + 4);
    for (path, body, status, kind) in [
        ("/v1/runs", json!([]), 422, "bad_request"),
        ("/v1/runs", json!({ "program": "AA==", "limit": {} }), 422, "bad_request"),
        ("/v1/runs", json!({ "program": program }), 413, "too_large"),
        ("/v1/tools/search", json!({ "intent": long }), 413, "too_large"),
        ("/v1/tools/search", json!({ "intent": large }), 413, "too_large"),
        ("/v1/tools/search", json!({ "intent": "x", "k": 65 }), 422, "bad_request"),
        ("/v1/grants", json!({ "tools": ["x"], "valid_s": 1 }), 422, "bad_request"),
        ("/v1/grants", json!({ "tools": vec!["a.b"; 257], "valid_s": 1 }), 422, "bad_request"),
        ("/v1/grants/inspect", json!({ "grant": "AAAA" }), 403, "grant"),
    ] {
        let refused = service.post(path, &body);
        assert_eq!((refused.status, refused.kind()), (status, kind), "{path}");
    }
    // A length that is too large is answered though nothing of it was sent,
    // and so are more bytes than were announced to be too many.
    let head = |more: &str| {
        format!(
            "POST /v1/runs HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ALICE}\r\n\
             content-type: application/json\r\n{more}\r\n\r\n"
        )
    };
    let announced = Answer::of(&service.raw(head("content-length: 999999999").as_bytes()));
    assert_eq!((announced.status, announced.kind()), (413, "too_large"));
    let encoded = head("content-encoding: gzip\r\ncontent-length: 0");
    let encoded = Answer::of(&service.raw(encoded.as_bytes()));
    assert_eq!((encoded.status, encoded.kind()), (415, "media_type"));
    let mut chunked = head("transfer-encoding: chunked").into_bytes();
    chunked.extend_from_slice(b"2000000\r\n");
    chunked.resize(chunked.len() + 0x200_0000, b' ');
    let refused = Answer::of(&service.raw(&chunked));
    assert_eq!((refused.status, refused.kind()), (413, "too_large"));
}

fn what_is_no_request_harms_nobody() {
    let desk = desk();
    let service = desk.open_without_vm();
    // One that says nothing, for as long as all of this takes.
    let silent = service.connect();
    let long = format!("GET / HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "x".repeat(100_000));
    let many = format!("GET / HTTP/1.1\r\nhost: localhost\r\n{}\r\n", "x: y\r\n".repeat(1000));
    let path = format!("GET /{} HTTP/1.1\r\nhost: localhost\r\n\r\n", "x".repeat(100_000));
    let smuggled = "POST /v1/runs HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\n\
                    content-length: 5\r\n\r\nabcd";
    let folded = "GET / HTTP/1.1\r\nhost: localhost\r\nx: a\r\n b: c\r\n\r\n";
    for bytes in [
        &[0u8; 100_000][..],
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        long.as_bytes(),
        many.as_bytes(),
        path.as_bytes(),
        smuggled.as_bytes(),
        folded.as_bytes(),
    ] {
        let mut stream = service.connect();
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(Shutdown::Write);
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said);
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]).into_owned();
        assert!(said.is_empty() || said.starts_with(b"HTTP/1.1 4"), "{shown}: {said:?}");
    }
    for (head, status) in [
        ("GET /healthz HTTP/1.1", 400),
        // As load balancers ask.
        ("GET /healthz HTTP/1.0", 200),
        ("GET /readyz HTTP/1.0", 200),
        ("GET /metrics HTTP/1.0", 400),
        ("GET /healthz HTTP/1.0\r\nhost: evil.example", 421),
        ("GET /healthz HTTP/1.1\r\nhost: localhost\r\nhost: localhost", 400),
        ("GET http://evil.example/healthz HTTP/1.1\r\nhost: localhost", 421),
    ] {
        let bytes = format!("{head}\r\nconnection: close\r\n\r\n");
        assert_eq!(Answer::of(&service.raw(bytes.as_bytes())).status, status, "{head}");
    }
    // One that leaves in the middle of its body.
    let whole = Request::new("POST", "/v1/runs").json(&order(&[0; 100_000])).bytes();
    service.connect().write_all(&whole[..whole.len() / 2]).unwrap();
    assert_eq!(service.get("/healthz").status, 200);
    drop(silent);
    // Two requests at once on one connection are two answers.
    let mut two = Request::new("GET", "/healthz").bytes();
    let text = String::from_utf8(two.clone()).unwrap().replace("connection: close\r\n", "");
    two.splice(0..0, text.into_bytes());
    let said = String::from_utf8(service.raw(&two)).unwrap();
    assert_eq!(said.matches("HTTP/1.1 200 OK").count(), 2, "{said}");
}

// For operators

fn health_needs_no_token_and_metrics_a_token_of_their_own() {
    let desk = desk();
    let service = desk.open_without_vm();
    for path in ["/healthz", "/readyz"] {
        let answer = service.ask(Request::new("GET", path).by(None));
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.fits("Health");
    }
    let document = service.ask(Request::new("GET", "/openapi.json").by(None));
    assert_eq!((document.status, &*document.body), (200, DOCUMENT.as_bytes()));
    assert_eq!(service.get("/metrics").status, 401);
    let metrics = service.ask(Request::new("GET", "/metrics").by(Some(METRICS)));
    let text = String::from_utf8(metrics.body).unwrap();
    assert_eq!(metrics.status, 200, "{text}");
    assert!(text.contains("\nforge_http_answers_total{status=\"2xx\"} 3\n"), "{text}");
    assert!(text.contains("\nforge_http_refusals_total{reason=\"unauthenticated\"} 1\n"), "{text}");
    assert!(text.contains("\nforge_service_runs_running 0\n"), "{text}");
    let guide = include_str!("../../docs/observability.md");
    let told: BTreeSet<(&str, &str)> = guide
        .lines()
        .filter_map(|line| line.strip_prefix("| `forge_")?.split_once("` | "))
        .map(|(name, rest)| (name, rest.split(' ').next().unwrap()))
        .collect();
    let counted: BTreeSet<(&str, &str)> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE forge_")?.split_once(' '))
        .collect();
    assert_eq!(told, counted, "what the operators' table has");
    // And that token opens nothing else.
    assert_eq!(service.ask(Request::new("GET", "/v1/tools").by(Some(METRICS))).status, 401);
}

fn a_door_at_a_path_serves_the_operator_alone_or_whom_its_mode_lets_in() {
    let desk = desk_with("[http]\nlisten = './http.sock'\nprincipal = 'local'");
    let path = desk.path("http.sock");
    let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o777;
    let mut service = desk.open_without_vm();
    assert_eq!(mode(), 0o600);
    let ask = || {
        let mut stream = UnixStream::connect(desk.path("http.sock")).unwrap();
        stream.write_all(&Request::new("GET", "/v1/tools").by(None).bytes()).unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        Answer::of(&all).status
    };
    assert_eq!(ask(), 200);
    // One that a dead service left is replaced.
    service.child.kill().unwrap();
    service.child.wait().unwrap();
    assert!(path.exists());
    let mut service = desk.open_without_vm();
    assert_eq!(ask(), 200);
    service.signal(service.child.id() as i32, libc::SIGTERM);
    assert!(service.child.wait().unwrap().success());
    assert!(!path.exists());
    let opened = "[http]\nlisten = './http.sock'\nmode = '0660'\nprincipal = 'local'";
    let desk = desk_with(opened);
    let _service = desk.open_without_vm();
    assert_eq!(fs::metadata(desk.path("http.sock")).unwrap().permissions().mode() & 0o777, 0o660);
}

fn a_door_that_is_killed_is_opened_again_and_ends_with_its_service() {
    let desk = desk();
    for signal in [libc::SIGTERM, libc::SIGKILL] {
        let mut service = desk.open_without_vm();
        assert_eq!(service.get("/readyz").status, 200);
        let first = service.door();
        // Somebody tidies up, and the service listens at a socket without a name.
        fs::remove_file(desk.socket()).unwrap();
        service.signal(first, libc::SIGKILL);
        eventually("it is gone", || is_gone(first));
        // At the same address: whoever comes meanwhile waits for it.
        eventually("it is ready", || service.get("/readyz").status == 200);
        let second = service.door();
        assert_ne!(first, second);
        // What the operator's terminal or its supervisor tells all, it lets be.
        service.signal(second, libc::SIGINT);
        service.signal(second, libc::SIGTERM);
        assert_eq!(service.get("/readyz").status, 200);
        assert_eq!(service.door(), second);
        service.signal(service.child.id() as i32, signal);
        service.child.wait().unwrap();
        eventually("the door ends with its service", || is_gone(second));
    }
}

fn the_door_can_open_no_file_and_has_no_privilege() {
    let desk = desk();
    let service = desk.open_without_vm();
    assert_eq!(service.get("/healthz").status, 200);
    let status = fs::read_to_string(format!("/proc/{}/status", service.door())).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().to_owned()
    };
    for set in ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:"] {
        assert_eq!(field(set), "0000000000000000", "{set}");
    }
    assert_eq!(field("NoNewPrivs:"), "1");
    let open = forge_vmm::jail::descriptors::of(service.door()).unwrap();
    for descriptor in &open {
        let what = descriptor.what.as_str();
        let known = ["socket:", "pipe:", "anon_inode:", "/dev/null"];
        assert!(known.iter().any(|it| what.starts_with(it)), "{open:?}");
        assert!(!what.contains("kvm"), "{open:?}");
    }
}

fn a_configuration_that_lets_anybody_in_from_elsewhere_is_refused() {
    for (config, said) in [
        ("[http]\nlisten = '0.0.0.0:0'\nprincipal = 'local'", "loopback alone"),
        ("[http]\nlisten = '127.0.0.1:0'\nprincipal = 'a'\nprinciple = 'b'", "unknown field"),
    ] {
        let desk = desk_with(config);
        let refused = desk.opens(&["--ready", "0"]).wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(2), "{text}");
        assert!(text.contains("forge.toml:") && text.contains(said), "{text}");
    }
}
