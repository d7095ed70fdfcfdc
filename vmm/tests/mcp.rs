//! `forge-vmm mcp` as a client starts it: whole conversations in lines of
//! JSON, in both eras of the protocol, and clients that do not keep to it.

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

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use desk::Desk;
use forge_client::ClientError;
use forge_protocol::broker::RefusalKind;
use forge_protocol::service::Question;
use processes::{descendants_of, is_gone, workers_below};
use serde_json::{Value, json};
use serving::{Service, runtime, standing};
use sha2::{Digest as _, Sha256};
use support::{eventually, forge_module, signed, signer};

fn main() -> ExitCode {
    support::main(
        claims![
            a_model_searches_and_its_program_calls_what_was_found,
            a_client_of_the_newest_protocol_needs_no_handshake,
            what_a_program_did_wrong_is_told,
            a_handle_is_good_at_the_next_door_of_its_principal,
            a_handle_is_good_at_the_next_door_before_a_service_too,
            a_call_outside_the_handle_is_refused,
            progress_tells_of_calls_to_who_asks,
            a_cancelled_request_ends_its_run,
            searches_that_are_cancelled_keep_no_place,
            a_client_that_leaves_ends_everything,
            a_signal_ends_everything,
            programs_are_signed_for_the_principal_or_refused,
            a_service_that_stands_already_serves_the_door,
            artifacts_ride_along,
            http_serves_both_eras_to_who_has_a_token,
            an_id_that_is_in_use_is_refused_over_http_and_its_first_request_answered,
            an_answer_that_a_broken_connection_lost_is_heard_by_who_comes_back,
            a_signal_answers_who_waits_over_http,
        ],
        claims![
            senseless_lines_are_answered_and_harm_nothing,
            a_flood_of_requests_is_answered_without_a_reader,
            wrong_arguments_are_results_that_say_what_is_wrong,
            the_resources_teach_the_abi,
            params_that_cannot_be_read_are_said_to_be,
            http_refuses_strangers_other_hosts_and_other_pages,
            http_refuses_other_hosts_and_pages_before_it_reads_what_they_send,
            what_is_no_message_is_400_over_http_with_an_error_of_json_rpc,
            a_stream_begins_without_data_only_for_who_knows_that,
            a_session_that_is_not_there_cannot_be_ended,
            a_hangup_ends_no_session_over_http,
            a_session_and_a_handle_are_of_no_use_to_another_principal,
            a_session_beyond_its_principals_room_is_told_so_and_another_principals_is_not,
            streams_that_every_session_has_open_leave_room_for_requests,
            a_door_without_known_principals_does_not_open,
        ],
    )
}

const PATIENCE: Duration = Duration::from_secs(60);

/// One with tool servers to start.
fn desk() -> Desk {
    let desk = serving::desk();
    let server = |name: &str| executables::folder().join(name);
    let servers = json!({"mcpServers": {
        "inventory": {
            "command": server("inventory-server"),
            "env": {"INVENTORY_TOKEN": "demo-inventory-token"},
        },
        "test": {"command": server("forge-test-server")},
    }});
    desk.write("servers.json", servers.to_string());
    desk
}

impl Desk {
    /// With tool servers, and not yet greeted.
    fn client(&self, more: &[&str]) -> Client {
        Client::start(self.command(&["mcp"]).args(more))
    }

    /// With tool servers, and greeted.
    fn greeted(&self) -> Client {
        let mut client = self.client(&["--mcp-config", "servers.json"]);
        client.greet();
        client
    }

    /// A service with the tool servers, for doors of others.
    fn serve_tools(&self) -> Service {
        self.serve(&["--mcp-config", "servers.json"])
    }
}

/// An MCP client that knows nothing but lines.
struct Client {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<Value>,
    notifications: Vec<Value>,
    next: u64,
}

impl Client {
    fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stdout.lines() {
                // Whatever is no JSON is nothing that may come there.
                let value = serde_json::from_str(&line.unwrap());
                if sender.send(value.expect("standard output carries JSON alone")).is_err() {
                    return;
                }
            }
        });
        let stdin = child.stdin.take();
        Self { child, stdin, lines, notifications: Vec::new(), next: 1 }
    }

    fn raw(&mut self, bytes: &[u8]) {
        self.stdin.as_mut().unwrap().write_all(bytes).unwrap();
    }

    fn send(&mut self, message: &Value) {
        self.raw(format!("{message}\n").as_bytes());
    }

    fn ask(&mut self, method: &str, params: Value) -> u64 {
        let id = self.next;
        self.next += 1;
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}));
        id
    }

    fn receive(&mut self) -> Value {
        self.lines.recv_timeout(PATIENCE).expect("the door says something")
    }

    fn answer(&mut self, id: u64) -> Value {
        loop {
            let message = self.receive();
            if message["id"] == id {
                return message;
            }
            assert!(message["method"].is_string(), "{message}");
            self.notifications.push(message);
        }
    }

    fn result(&mut self, method: &str, params: Value) -> Value {
        let id = self.ask(method, params);
        let mut answer = self.answer(id);
        assert_eq!(answer["error"], Value::Null, "{answer}");
        answer["result"].take()
    }

    fn greet(&mut self) -> Value {
        let result = self.result(
            "initialize",
            json!({
                "protocolVersion": "2025-11-25",
                "capabilities": {},
                "clientInfo": {"name": "test", "version": "1"},
            }),
        );
        self.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        result
    }

    fn call(&mut self, tool: &str, arguments: Value) -> Value {
        self.result("tools/call", json!({"name": tool, "arguments": arguments}))
    }

    fn search(&mut self, intent: &str) -> Value {
        let mut result = self.call("search_tools", json!({"intent": intent}));
        assert_eq!(result["isError"], false, "{result}");
        result["structuredContent"].take()
    }

    fn run(&mut self, arguments: Value) -> Value {
        self.call("run_program", arguments)
    }

    /// Closes its end and waits for the other.
    fn leave(mut self) -> std::process::ExitStatus {
        self.stdin = None;
        let mut status = None;
        eventually("the door ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn names(found: &Value) -> Vec<&str> {
    found["tools"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect()
}

fn text(result: &Value) -> &str {
    result["content"][0]["text"].as_str().unwrap()
}

/// Writes its input to its output.
const ECHO: &str = r#"(module
  (import "forge" "input_len" (func $input_len (result i32)))
  (import "forge" "input_read" (func $input_read (param i32 i32 i32) (result i32)))
  (import "forge" "output" (func $output (param i32 i32) (result i32)))
  (memory (export "memory") 1)
  (func (export "forge_run") (result i32)
    (call $output (i32.const 0)
      (call $input_read (i32.const 0) (i32.const 0) (call $input_len)))))"#;

/// Calls one tool by its name and writes what came back.
fn caller(tool: &str, arguments: &str) -> String {
    let quoted = arguments.replace('"', "\\\"");
    let memory = format!(
        "(memory (export \"memory\") 1)
         (data (i32.const 0) \"{tool}\") (data (i32.const 512) \"{quoted}\")"
    );
    let body = format!(
        "(local $code i32)
         (local.set $code (call $call (i32.const 0) (i32.const {}) (i32.const 512) (i32.const {})))
         (drop (call $output (i32.const 1024)
             (call $resp_read (i32.const 1024) (i32.const 0) (call $resp_len))))
         (local.get $code)",
        tool.len(),
        arguments.len(),
    );
    // A tool's answer has a length, and 0 alone is success.
    forge_module(
        &memory,
        &body.replace(
            "(local.get $code)",
            "(select (i32.const 0) (local.get $code) (i32.ge_s (local.get $code) (i32.const 0)))",
        ),
    )
}

/// Ends by its deadline or by being cancelled.
fn endless(client: &mut Client) -> u64 {
    let program = forge_module("(memory (export \"memory\") 1)", "(loop (br 0)) (unreachable)");
    let limits = json!({"timeout_ms": 30_000, "fuel": 1_000_000_000_000u64});
    let arguments = json!({"program": program, "limits": limits});
    let meta = json!({"progressToken": "endless"});
    let params = json!({"name": "run_program", "arguments": arguments, "_meta": meta});
    client.ask("tools/call", params)
}

/// Until the run that was asked for last is submitted.
fn begun(client: &mut Client) {
    let message = client.receive();
    assert_eq!(message["method"], "notifications/progress", "{message}");
    assert_eq!(message["params"]["progressToken"], "endless", "{message}");
}

// What a model does

fn a_model_searches_and_its_program_calls_what_was_found() {
    let desk = desk();
    let mut client = desk.client(&["--mcp-config", "servers.json"]);
    let greeting = client.greet();
    assert_eq!(greeting["protocolVersion"], "2025-11-25");
    assert_eq!(greeting["serverInfo"]["name"], "forge-vmm");
    let listed = client.result("tools/list", json!({}));
    assert_eq!(names(&listed), ["search_tools", "run_program"]);
    for tool in listed["tools"].as_array().unwrap() {
        assert!(tool["inputSchema"].is_object() && tool["outputSchema"].is_object(), "{tool}");
    }
    let found = client.search("How many parts of a kind are in stock?");
    assert!(names(&found).contains(&"inventory.get_stock"), "{found}");
    let tool =
        &found["tools"][names(&found).iter().position(|it| *it == "inventory.get_stock").unwrap()];
    let import = tool["import"].as_str().unwrap();
    assert!(tool["input_schema"]["properties"]["part_id"].is_object(), "{tool}");
    let grant = found["grant"].as_str().unwrap();
    assert_eq!(grant.len(), 16, "short enough to repeat");
    // The example that a model is shown, as it stands there, with the import
    // that the search gave.
    let example = client.result("resources/read", json!({"uri": "forge://example.wat"}));
    let example = example["contents"][0]["text"].as_str().unwrap().to_owned();
    let (before, after) = import.split_once("(func ").unwrap();
    let named = format!("{before}(func $get_stock {after}");
    assert!(example.contains(&named), "{example} has not {named}");
    let result = client.run(json!({"program": example, "grant": grant}));
    let report = &result["structuredContent"];
    assert_eq!(result["isError"], false, "{result}");
    assert_eq!((&report["status"], &report["isolation"]), (&"ok".into(), &"vm".into()), "{result}");
    assert_eq!(report["tool_calls"][0]["tool"], "inventory.get_stock", "{result}");
    let stock: Value = serde_json::from_str(text(&result)).unwrap();
    assert_eq!(stock["available"], 480, "{stock}");
    assert!(client.leave().success());
}

fn a_client_of_the_newest_protocol_needs_no_handshake() {
    let desk = desk();
    let mut client = desk.client(&["--mcp-config", "servers.json"]);
    let meta = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    let discovered = client.result("server/discover", json!({"_meta": meta}));
    let versions = discovered["supportedVersions"].as_array().unwrap();
    assert!(versions.contains(&"2026-07-28".into()), "{discovered}");
    let listed = client.result("tools/list", json!({"_meta": meta}));
    assert_eq!(names(&listed), ["search_tools", "run_program"]);
    let run = json!({"program": ECHO, "input": [1, "two"]});
    let result = client
        .result("tools/call", json!({"name": "run_program", "arguments": run, "_meta": meta}));
    assert_eq!(result["resultType"], "complete", "{result}");
    assert_eq!(text(&result), "[1,\"two\"]", "{result}");
    // Before all that, the older way was still open, and a stray word harmless.
    let mut client = desk.client(&[]);
    client.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
    client.result("server/discover", json!({"_meta": meta}));
    assert_eq!(client.greet()["protocolVersion"], "2025-11-25");
    assert_eq!(text(&client.run(json!({"program": ECHO}))), "{}");
}

fn what_a_program_did_wrong_is_told() {
    let desk = desk();
    let mut client = desk.client(&[]);
    client.greet();
    let page = "(memory (export \"memory\") 1)";
    let trap = forge_module(page, "(i32.div_s (i32.const 1) (i32.const 0))");
    let failed = forge_module(
        "(memory (export \"memory\") 1) (data (i32.const 0) \"why\")",
        "(call $log (i32.const 0) (i32.const 0) (i32.const 3)) (i32.const 7)",
    );
    let limited = forge_module(page, "(loop (br 0)) (unreachable)");
    let cases = [
        (json!({"program": trap}), "trap", "division_by_zero"),
        (json!({"program": failed}), "failed", "log: why"),
        (json!({"program": limited, "limits": {"fuel": 1000}}), "limit", "fuel"),
        (json!({"program": "(module)"}), "rejected", "memory"),
        (
            json!({"program": ECHO, "limits": {"timeout_ms": 99_999_999}}),
            "rejected",
            "timeout_ms is",
        ),
    ];
    for (arguments, status, word) in cases {
        let result = client.run(arguments);
        assert_eq!(result["isError"], true, "{result}");
        assert_eq!(result["structuredContent"]["status"], status, "{result}");
        assert!(text(&result).contains(word), "{result}");
    }
}

fn a_handle_is_good_at_the_next_door_of_its_principal() {
    let desk = desk();
    let mut one = desk.greeted();
    let grant = one.search("say a text back")["grant"].clone();
    let program = caller("test.echo", r#"{"text": "hello"}"#);
    let run = json!({"program": program, "grant": grant});
    let at = |more: &[&str]| {
        let mut door = desk.client(&[&["--mcp-config", "servers.json"], more].concat());
        door.greet();
        door.run(run.clone())
    };
    // Beside the first door, and after it.
    assert_eq!(text(&at(&[])), r#"{"text":"hello"}"#);
    assert!(one.leave().success());
    assert_eq!(text(&at(&[])), r#"{"text":"hello"}"#);
    for strange in [["--principal", "bob"], ["--state", "another"]] {
        let result = at(&strange);
        assert_eq!(result["isError"], true, "{result}");
        assert!(text(&result).contains("is not known here"), "{result}");
    }
}

fn a_handle_is_good_at_the_next_door_before_a_service_too() {
    let desk = desk();
    let _service = desk.serve_tools();
    let door = || {
        let mut door = desk.client(&["--service", "socket"]);
        door.greet();
        door
    };
    let program = STANDARD.encode(signed(&caller("test.echo", r#"{"text": "hello"}"#)));
    let run = |grant| json!({"program": program, "language": "wasm", "grant": grant});
    let grant = door().search("say a text back")["grant"].clone();
    assert_eq!(text(&door().run(run(grant))), r#"{"text":"hello"}"#);
    // Where others may write, a name is good at its own door.
    fs::create_dir(desk.path("shared")).unwrap();
    fs::set_permissions(desk.path("shared"), fs::Permissions::from_mode(0o770)).unwrap();
    let mut door = desk.client(&["--service", "socket", "--state", "shared"]);
    door.greet();
    let grant = door.search("say a text back")["grant"].clone();
    assert_eq!(text(&door.run(run(grant))), r#"{"text":"hello"}"#);
    assert!(!desk.path("shared/handles").exists());
}

fn a_call_outside_the_handle_is_refused() {
    let desk = desk();
    let mut client = desk.greeted();
    let found = client.call("search_tools", json!({"intent": "say a text back", "k": 1}));
    let found = &found["structuredContent"];
    let grant = &found["grant"];
    assert!(!names(found).contains(&"inventory.get_stock"), "{found}");
    // By an import: no VM is made. By name: the call is refused.
    let example = client.result("resources/read", json!({"uri": "forge://example.wat"}));
    let example = &example["contents"][0]["text"];
    let result = client.run(json!({"program": example, "grant": grant}));
    assert_eq!(result["structuredContent"]["status"], "rejected", "{result}");
    assert!(text(&result).contains("inventory.get_stock"), "{result}");
    let program = caller("inventory.get_stock", r#"{"part_id": "P-1001"}"#);
    for arguments in [json!({"program": program, "grant": grant}), json!({"program": program})] {
        let result = client.run(arguments);
        assert_eq!(result["structuredContent"]["status"], "failed", "{result}");
        assert!(text(&result).contains("call of inventory.get_stock: denied"), "{result}");
    }
}

fn progress_tells_of_calls_to_who_asks() {
    let desk = desk();
    let mut client = desk.greeted();
    let grant = client.search("say a text back")["grant"].clone();
    let program = caller("test.echo", r#"{"text": "hello"}"#);
    let arguments = json!({"program": program, "grant": grant});
    let meta = json!({"progressToken": 7});
    let params = json!({"name": "run_program", "arguments": arguments, "_meta": meta});
    let result = client.result("tools/call", params);
    assert_eq!(result["isError"], false, "{result}");
    let told: Vec<_> = client.notifications.iter().map(|told| &told["params"]).collect();
    assert!(told.iter().all(|it| it["progressToken"] == 7), "{told:?}");
    assert!(told.windows(2).all(|two| two[0]["progress"].as_f64() < two[1]["progress"].as_f64()));
    let words: Vec<_> = told.iter().map(|it| it["message"].as_str().unwrap()).collect();
    assert!(words[0] == "submitted" && words[1].starts_with("run "), "{words:?}");
    assert_eq!(&words[2..], ["calls test.echo", "test.echo answered"]);
    // Who did not ask hears nothing.
    client.notifications.clear();
    client.run(json!({"program": program, "grant": grant}));
    assert_eq!(client.notifications, Vec::<Value>::new());
}

// Clients that change their mind, and that leave

fn key_file(desk: &Desk) {
    use std::os::unix::fs::OpenOptionsExt as _;
    let path = desk.path("door.pem");
    let file = fs::File::options().write(true).create_new(true).mode(0o600).open(path);
    file.unwrap().write_all(signer().to_pem().as_bytes()).unwrap();
}

fn a_cancelled_request_ends_its_run() {
    let desk = desk();
    key_file(&desk);
    let service = desk.serve_tools();
    let mut client = desk.client(&["--service", "socket", "--sign-with", "door.pem"]);
    client.greet();
    let id = endless(&mut client);
    begun(&mut client);
    eventually("it runs", || standing(&mut service.client())["runs"]["running"] == 1);
    let cancelled = json!({"requestId": id, "reason": "changed my mind"});
    let method = "notifications/cancelled";
    client.send(&json!({"jsonrpc": "2.0", "method": method, "params": cancelled}));
    // By being cancelled, and not by its deadline.
    eventually("the run is cancelled", || {
        standing(&mut service.client())["runs"]["ended"]["cancelled"] == 1
    });
    // Its request has no answer, which `answer` would not let pass, and the
    // next has.
    assert_eq!(text(&client.run(json!({"program": ECHO, "input": 1}))), "1");
}

fn searches_that_are_cancelled_keep_no_place() {
    let desk = desk();
    let stuck = r#"{"mcpServers": {"stuck": {"command": "/bin/sleep", "args": ["60"]}}}"#;
    desk.write("stuck.json", stuck);
    let service = desk.serve(&["--mcp-config", "stuck.json"]);
    let mut client = desk.client(&["--service", "socket", "--principal", "seeker"]);
    client.greet();
    let runtime = runtime();
    let other = runtime.block_on(forge_client::Client::connect(&service.socket)).unwrap();
    // What somebody else is told who asks for the same principal; nothing while
    // that waits for the server as well.
    let told = || {
        let asked = other.ask(Question::ListTools { principal: "seeker".into() });
        let told = async { tokio::time::timeout(Duration::from_millis(200), asked).await.ok() };
        runtime.block_on(told)
    };
    let began = Instant::now();
    let search = json!({"name": "search_tools", "arguments": {"intent": "any"}});
    let mut searches: Vec<u64> =
        (0..16).map(|_| client.ask("tools/call", search.clone())).collect();
    loop {
        eventually("all places are taken", || {
            matches!(told(), Some(Err(ClientError::Refused { kind: RefusalKind::Overloaded, .. })))
        });
        // Who asked here may have had the place of one of them for a while.
        let Ok(refused) = client.lines.recv_timeout(Duration::from_millis(500)) else { break };
        searches.retain(|id| refused["id"] != *id);
        searches.push(client.ask("tools/call", search.clone()));
    }
    for id in searches {
        let method = "notifications/cancelled";
        client.send(&json!({"jsonrpc": "2.0", "method": method, "params": {"requestId": id}}));
    }
    eventually("one waits again", || told().is_none());
    // Then the start of the server fails, and they are free in any case.
    assert!(began.elapsed() < Duration::from_secs(30), "the places came free by themselves");
}

fn a_client_that_leaves_ends_everything() {
    let desk = desk();
    let mut client = desk.greeted();
    client.search("say a text back");
    endless(&mut client);
    begun(&mut client);
    // The VM that the run has, and the one that takes its place.
    let mut started = Vec::new();
    eventually("it runs", || {
        let door = client.child.id() as i32;
        started = descendants_of(door);
        // Broker, two servers, zygote, workers.
        workers_below(door).len() >= 2 && started.len() >= 6
    });
    assert!(client.leave().success());
    eventually("all it started is gone", || started.iter().all(|pid| is_gone(*pid)));
}

fn a_signal_ends_everything() {
    let desk = desk();
    for signal in [libc::SIGTERM, libc::SIGKILL] {
        let mut client = desk.greeted();
        endless(&mut client);
        begun(&mut client);
        // The VM that the run has, and the one that takes its place.
        let mut started = Vec::new();
        eventually("it runs", || {
            let door = client.child.id() as i32;
            started = descendants_of(door);
            workers_below(door).len() >= 2
        });
        // SAFETY: the process is this test's own child, not waited for yet.
        unsafe { libc::kill(client.child.id() as i32, signal) };
        let mut status = None;
        eventually("the door ends", || {
            status = client.child.try_wait().unwrap();
            status.is_some()
        });
        assert_eq!(status.unwrap().success(), signal == libc::SIGTERM);
        eventually("all it started is gone", || started.iter().all(|pid| is_gone(*pid)));
    }
}

// Who signs

fn programs_are_signed_for_the_principal_or_refused() {
    let desk = desk();
    key_file(&desk);
    let wasm = |bytes: &[u8]| json!({"program": STANDARD.encode(bytes), "language": "wasm"});
    let config = "[trust]\nkeys = [\"signer.pub\"]\n";
    let closed = format!("{config}[mcp]\naccept_unsigned = false\n");
    desk.write("closed.toml", closed);
    let keyed = "[mcp]\nprincipal = \"alice\"\n[principals.alice]\nsign_with = \"door.pem\"\n";
    desk.write("keyed.toml", keyed);
    let ours = signer().trust_key().to_string();

    let mut client = desk.client(&["--config", "closed.toml"]);
    client.greet();
    let result = client.run(json!({"program": ECHO}));
    assert_eq!(result["isError"], true);
    assert!(text(&result).contains("forge-vmm sign"), "{result}");
    let result = client.run(wasm(&signed(ECHO)));
    assert_eq!(result["structuredContent"]["signer"], ours.as_str(), "{result}");

    let mut client = desk.client(&["--config", "keyed.toml"]);
    client.greet();
    let result = client.run(json!({"program": ECHO}));
    assert_eq!(result["structuredContent"]["signer"], ours.as_str(), "{result}");

    // Without a word, with a key that is nobody else's. A stranger's signature
    // is not made good by it.
    let mut client = desk.client(&[]);
    client.greet();
    let result = client.run(json!({"program": ECHO}));
    assert_eq!(result["structuredContent"]["status"], "ok", "{result}");
    assert_ne!(result["structuredContent"]["signer"], ours.as_str());
    let result = client.run(wasm(&signed(ECHO)));
    assert_eq!(result["structuredContent"]["kind"], "signature", "{result}");
}

fn a_service_that_stands_already_serves_the_door() {
    let desk = desk();
    let service = desk.serve_tools();
    let mut client = desk.client(&["--service", "socket"]);
    client.greet();
    let result = client.run(json!({"program": ECHO}));
    assert!(text(&result).contains("sign_with"), "{result}");
    let grant = client.search("say a text back")["grant"].clone();
    let program = STANDARD.encode(signed(&caller("test.echo", r#"{"text": "hello"}"#)));
    let run = json!({"program": program, "language": "wasm", "grant": grant});
    assert_eq!(text(&client.run(run.clone())), r#"{"text":"hello"}"#);
    // Another service at the same place serves the same door; its grants are
    // signed with the same key.
    drop(service);
    // Lost on the old connection, or not connected again.
    let lost = client.run(run.clone());
    assert_eq!(lost["isError"], true, "{lost}");
    let _service = desk.serve_tools();
    assert_eq!(text(&client.run(run)), r#"{"text":"hello"}"#);
}

fn artifacts_ride_along() {
    let desk = desk();
    let mut client = desk.client(&[]);
    client.greet();
    let memory = "(memory (export \"memory\") 1) (data (i32.const 0) \"a.csvtext/csv1,2\")";
    let body = "(call $artifact (i32.const 0) (i32.const 5) (i32.const 5) (i32.const 8)
                    (i32.const 13) (i32.const 3))";
    let result = client.run(json!({"program": forge_module(memory, body)}));
    assert_eq!(result["structuredContent"]["artifacts"][0]["name"], "a.csv", "{result}");
    let artifact = &result["content"][1]["resource"];
    assert_eq!((&artifact["text"], &artifact["mimeType"]), (&"1,2".into(), &"text/csv".into()));
}

// Clients that do not keep to the protocol

fn senseless_lines_are_answered_and_harm_nothing() {
    let desk = desk();
    let mut client = desk.client(&[]);
    let long = format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"x\":\"{}\"}}", "x".repeat(5 << 20));
    let deep = "[".repeat(100_000);
    let hostile: [(&[u8], i64); 7] = [
        (b"no JSON", -32700),
        (b"\xff\xfe{}", -32700),
        (b"[]", -32600),
        (b"17", -32600),
        (b"{\"jsonrpc\":\"2.0\",\"id\":{\"a\":1},\"method\":\"tools/list\"}", -32600),
        (long.as_bytes(), -32600),
        (deep.as_bytes(), -32700),
    ];
    // Whoever forgets to begin is told how.
    let id = client.ask("tools/list", json!({}));
    let refusal = client.answer(id)["error"].clone();
    assert!(refusal["message"].as_str().unwrap().contains("`initialize` first"), "{refusal}");
    for greeted in [false, true] {
        for (line, code) in &hostile {
            client.raw(line);
            client.raw(b"\n");
            let answer = client.receive();
            let shown = String::from_utf8_lossy(&line[..line.len().min(60)]).into_owned();
            assert_eq!(answer["error"]["code"], *code, "{shown}: {answer}");
        }
        client.raw(b"\n\r\n   \n");
        // Answers to nothing, and words of another protocol.
        client.send(&json!({"jsonrpc": "2.0", "id": 5, "result": {}}));
        client.send(&json!({"jsonrpc": "2.0", "id": 5, "error": {"code": 1, "message": ""}}));
        if greeted {
            client.send(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled",
                "params": {"requestId": 99}}));
            client.send(&json!({"jsonrpc": "2.0", "method": "notifications/unknown"}));
            for (method, params) in [
                ("no/such/method", json!({})),
                ("logging/setLevel", json!({"level": "info"})),
                ("prompts/get", json!({"name": "x"})),
                ("resources/subscribe", json!({"uri": "forge://abi.md"})),
                ("resources/unsubscribe", json!({"uri": "forge://abi.md"})),
            ] {
                let id = client.ask(method, params);
                let error = client.answer(id)["error"].clone();
                assert_eq!(error["code"], -32601, "{method}: {error}");
                let said = format!("there is no method \"{method}\"");
                assert_eq!(error["message"], said, "{method}: {error}");
            }
        } else {
            client.greet();
        }
    }
    assert_eq!(names(&client.result("tools/list", json!({}))).len(), 2);
    assert!(client.leave().success());
}

fn params_that_cannot_be_read_are_said_to_be() {
    let desk = desk();
    let mut client = desk.client(&[]);
    let hello = client.ask("initialize", json!({"protocolVersion": 5}));
    let answer = client.answer(hello);
    assert_eq!(answer["error"]["code"], -32602, "{answer}");
    client.greet();
    for (method, params) in [
        ("tools/call", json!({})),
        ("tools/call", json!({"name": 5})),
        ("tools/call", json!({"name": "run_program", "arguments": [1]})),
        ("resources/read", json!({"uri": 5})),
    ] {
        let id = client.ask(method, params);
        let answer = client.answer(id);
        assert_eq!(answer["error"]["code"], -32602, "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(method), "{answer}");
    }
    // Of one page there is no second.
    for method in ["tools/list", "resources/list"] {
        let id = client.ask(method, json!({"cursor": "nonsense"}));
        let error = client.answer(id)["error"].clone();
        assert_eq!(error["code"], -32602, "{error}");
        assert!(error["message"].as_str().unwrap().contains("cursor"), "{error}");
    }
    assert_eq!(names(&client.result("tools/list", json!({}))).len(), 2);
}

fn a_flood_of_requests_is_answered_without_a_reader() {
    const REQUESTS: u64 = 2_000;
    let desk = desk();
    let mut client = desk.client(&[]);
    client.greet();
    // Many more than may be open, each with an answer of some kilobytes, and
    // nobody takes one until the pipe is full and the door has stopped reading.
    let mut stdin = client.stdin.take().unwrap();
    let flood = std::thread::spawn(move || {
        for id in 1_000..1_000 + REQUESTS {
            let request = json!({"jsonrpc": "2.0", "id": id, "method": "tools/list"});
            stdin.write_all(format!("{request}\n").as_bytes()).unwrap();
        }
        stdin
    });
    let (mut listed, mut refused) = (0, 0);
    let mut seen = std::collections::HashSet::new();
    while listed + refused < REQUESTS {
        let answer = client.receive();
        assert!(seen.insert(answer["id"].as_u64().unwrap()), "{answer}");
        if answer["result"].is_object() {
            listed += 1;
        } else {
            assert!(answer["error"]["message"].as_str().unwrap().contains("too much"), "{answer}");
            refused += 1;
        }
    }
    client.stdin = Some(flood.join().unwrap());
    assert!(listed > 0);
    assert_eq!(names(&client.result("tools/list", json!({}))).len(), 2);
    // An id that is in use is refused, and only the first request answered.
    let request = json!({"jsonrpc": "2.0", "id": 7, "method": "tools/list"});
    client.raw(format!("{request}\n").repeat(2).as_bytes());
    let answers = [client.receive(), client.receive()];
    let good = answers.iter().filter(|answer| answer["id"] == 7).count();
    assert!(good >= 1, "{answers:?}");
}

fn wrong_arguments_are_results_that_say_what_is_wrong() {
    let desk = desk();
    let mut client = desk.client(&[]);
    client.greet();
    let long = "x".repeat(5_000);
    let cases = [
        ("run_program", json!({}), "program"),
        ("run_program", json!({"program": 7}), "string"),
        ("run_program", json!({"program": "(module", "language": "wat"}), "does not assemble"),
        ("run_program", json!({"program": "(module)", "language": "wasm"}), "base64"),
        ("run_program", json!({"program": "AAAA", "language": "wasm"}), "module"),
        ("run_program", json!({"program": "(module)", "language": "python"}), "python"),
        ("run_program", json!({"program": "(module)", "grants": "x"}), "grants"),
        ("run_program", json!({"program": "(module)", "limits": {"wall": 1}}), "wall"),
        ("run_program", json!({"program": "(module)", "grant": "0000000000000000"}), "search"),
        ("search_tools", json!({"intent": long}), "limit"),
        ("search_tools", json!({"intent": "x", "k": 0}), "`k`"),
        ("search_tools", json!({"k": 1}), "intent"),
    ];
    for (tool, arguments, word) in cases {
        let result = client.call(tool, arguments.clone());
        assert_eq!(result["isError"], true, "{arguments}: {result}");
        assert!(text(&result).contains(word), "{arguments}: {result}");
    }
    // Longer written again than it came.
    let input = vec!["1e15"; 700_000].join(",");
    let arguments = format!(r#"{{"program":"(module)","input":[{input}]}}"#);
    let params = format!(r#"{{"name":"run_program","arguments":{arguments}}}"#);
    let call = r#"{"jsonrpc":"2.0","id":"long","method":"tools/call","params":"#;
    client.raw(format!("{call}{params}}}\n").as_bytes());
    let answer = client.receive();
    assert!(text(&answer["result"]).contains("the input has"), "{answer}");
    let id = client.ask("tools/call", json!({"name": "forge.rm", "arguments": {}}));
    assert_eq!(client.answer(id)["error"]["code"], -32602);
}

fn the_resources_teach_the_abi() {
    let desk = desk();
    let mut client = desk.client(&[]);
    client.greet();
    let listed = client.result("resources/list", json!({}));
    for resource in listed["resources"].as_array().unwrap() {
        let read = client.result("resources/read", json!({"uri": resource["uri"]}));
        assert_eq!(read["contents"][0]["uri"], resource["uri"]);
        assert_eq!(
            read["contents"][0]["text"].as_str().unwrap().len() as u64,
            resource["size"].as_u64().unwrap()
        );
    }
    let id = client.ask("resources/read", json!({"uri": "file:///etc/passwd"}));
    assert!(client.answer(id)["error"].is_object());
}

// Over HTTP

/// `forge-vmm mcp --listen`, for alice and bob, whose tokens are their names.
struct Http(Child, String);

impl Http {
    fn start(desk: &Desk) -> Self {
        let principals: String = ["alice", "bob"]
            .map(|name| {
                let digest: String =
                    Sha256::digest(name).iter().map(|byte| format!("{byte:02x}")).collect();
                format!("[principals.{name}]\ntoken_sha256 = [\"{digest}\"]\n")
            })
            .concat();
        desk.write("http.toml", principals);
        let arguments = ["mcp", "--config", "http.toml", "--mcp-config", "servers.json"];
        let mut command = desk.command(&arguments);
        command.args(["--listen", "127.0.0.1:0"]).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let address = lines
            .find_map(|line| Some(line.split_once("http://")?.1.strip_suffix("/mcp")?.to_owned()))
            .unwrap();
        std::thread::spawn(move || lines.for_each(|line| eprintln!("{line}")));
        Self(child, address)
    }

    /// Status, headers and body of one answer, as they came.
    fn post(&self, headers: &[(&str, &str)], message: &Value) -> String {
        self.send("POST", headers, &message.to_string())
    }

    fn send(&self, method: &str, headers: &[(&str, &str)], body: &str) -> String {
        let mut answer = String::new();
        self.begin(method, headers, body).read_to_string(&mut answer).unwrap();
        answer
    }

    /// Asks, and leaves the answer to be read.
    fn begin(&self, method: &str, headers: &[(&str, &str)], body: &str) -> TcpStream {
        let length = body.len().to_string();
        let mut stream = self.head(method, &[&[("Content-Length", &*length)], headers].concat());
        stream.write_all(body.as_bytes()).unwrap();
        stream
    }

    /// Sends the head of a request alone.
    fn head(&self, method: &str, headers: &[(&str, &str)]) -> TcpStream {
        let mut request = format!("{method} /mcp HTTP/1.1\r\n");
        let host = headers.iter().any(|(name, _)| *name == "Host");
        let usual = [
            ("Content-Type", "application/json"),
            ("Accept", "application/json, text/event-stream"),
            ("Connection", "close"),
            ("Host", &*self.1),
        ];
        let accept = headers.iter().any(|(name, _)| *name == "Accept");
        let usual = usual
            .into_iter()
            .filter(|(name, _)| !(host && *name == "Host" || accept && *name == "Accept"));
        for (name, value) in usual.chain(headers.iter().copied()) {
            request.push_str(&format!("{name}: {value}\r\n"));
        }
        let mut stream = TcpStream::connect(&self.1).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(format!("{request}\r\n").as_bytes()).unwrap();
        stream
    }

    /// What somebody hears at a path who has no token.
    fn look(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.1).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // As load balancers ask.
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// The stream of what a session of Alice's says unasked, with its status.
    fn stream(&self, session: &str) -> (TcpStream, String) {
        let mut stream = TcpStream::connect(&self.1).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let (name, value) = ALICE;
        let request = format!(
            "GET /mcp HTTP/1.1\r\nHost: {}\r\nAccept: text/event-stream\r\n{name}: {value}\r\n\
             Mcp-Session-Id: {session}\r\n\r\n",
            self.1
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        (stream, String::from_utf8(status.into()).unwrap())
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const ALICE: (&str, &str) = ("Authorization", "Bearer alice");
const BOB: (&str, &str) = ("Authorization", "Bearer bob");
const NEWEST: (&str, &str) = ("MCP-Protocol-Version", "2026-07-28");

fn request(method: &str, params: Value) -> Value {
    json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
}

fn initialize() -> Value {
    let client = json!({"name": "test", "version": "1"});
    let params = json!({
        "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client,
    });
    request("initialize", params)
}

/// Calls a tool without a session, as the newest protocol does.
fn call(http: &Http, who: (&str, &str), tool: &str, arguments: Value) -> String {
    let meta = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    let params = json!({"name": tool, "arguments": arguments, "_meta": meta});
    let headers = [who, NEWEST, ("Mcp-Method", "tools/call"), ("Mcp-Name", tool)];
    http.post(&headers, &request("tools/call", params))
}

fn session(answer: &str) -> String {
    let line = answer.lines().find(|line| line.to_lowercase().starts_with("mcp-session-id:"));
    line.unwrap_or_else(|| panic!("no session: {answer}")).split_once(": ").unwrap().1.into()
}

fn http_serves_both_eras_to_who_has_a_token() {
    let desk = desk();
    let http = Http::start(&desk);
    let answer = call(&http, ALICE, "run_program", json!({"program": ECHO, "input": "newest"}));
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("newest"), "{answer}");
    let greeted = http.post(&[ALICE], &initialize());
    assert!(greeted.contains("2025-11-25"), "{greeted}");
    let session = session(&greeted);
    let headers = [ALICE, ("Mcp-Session-Id", &*session)];
    // What accepts anything accepts both.
    let headers = [headers[0], headers[1], ("Accept", "*/*")];
    let run = json!({"name": "run_program", "arguments": {"program": ECHO, "input": "older"}});
    let answer = http.post(&headers, &request("tools/call", run));
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("older"), "{answer}");
}

fn http_refuses_strangers_other_hosts_and_other_pages() {
    let desk = desk();
    let http = Http::start(&desk);
    for (path, body) in [("/healthz", "live"), ("/readyz", "ready")] {
        let answer = http.look(path);
        assert!(answer.contains(" 200 OK\r\n") && answer.ends_with(body), "{answer}");
    }
    assert!(http.look("/mcp").contains(" 401 "));
    let cases: [(&[(&str, &str)], &str); 11] = [
        (&[], "401"),
        (&[("Authorization", "Bearer mallory")], "401"),
        (&[("Authorization", "Basic alice")], "401"),
        (&[ALICE, BOB], "401"),
        (&[ALICE, ("Host", "rebound.example")], "403"),
        (&[ALICE, ("Origin", "https://evil.example")], "403"),
        (&[ALICE, ("Origin", "null")], "403"),
        (&[ALICE, ("Sec-Fetch-Site", "cross-site")], "403"),
        (&[ALICE, ("Origin", "http://localhost"), ("Origin", "http://evil.example")], "403"),
        (&[ALICE, ("Origin", "http://localhost:3000")], "200"),
        (&[ALICE, ("Host", "192.0.2.7:80")], "200"),
    ];
    for (headers, status) in cases {
        let answer = http.post(headers, &initialize());
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{headers:?}: {answer}");
    }
    let long = request("tools/call", json!({"name": "run_program", "x": "x".repeat(5 << 20)}));
    // One about a request is that one's answer: to many clients any other status is the
    // end of their session.
    let answer = http.post(&[ALICE], &long);
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert!(answer.contains("content-type: application/json"), "{answer}");
    let said: Value = serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert_eq!((&said["id"], said["error"].is_object()), (&json!(1), true), "{said}");
    // Without an id it would be nobody's answer.
    let answer = http.post(&[], &long);
    assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");
    assert!(answer.contains("content-type: text/plain"), "{answer}");
    // Of two hosts, or one and another's address, neither counts.
    for (target, hosts) in [
        ("/mcp", "Host: localhost\r\nHost: evil.example\r\n"),
        ("http://evil.example/mcp", "Host: localhost\r\n"),
    ] {
        let mut stream = TcpStream::connect(&http.1).unwrap();
        let head = format!("GET {target} HTTP/1.1\r\n{hosts}{}: {}\r\n\r\n", ALICE.0, ALICE.1);
        stream.write_all(head.as_bytes()).unwrap();
        let status = read_until(&mut stream, "\r\n");
        assert!(status.contains(" 400 ") || status.contains(" 403 "), "{target}: {status}");
    }
    assert!(http.post(&[ALICE], &initialize()).starts_with("HTTP/1.1 200"));
}

fn http_refuses_other_hosts_and_pages_before_it_reads_what_they_send() {
    let desk = desk();
    let http = Http::start(&desk);
    for (name, value) in [("Host", "rebound.example"), ("Origin", "https://evil.example")] {
        // The body that is announced never comes.
        let headers = [ALICE, (name, value), ("Expect", "100-continue"), ("Content-Length", "9")];
        let mut stream = http.head("POST", &headers);
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        assert_eq!(std::str::from_utf8(&status), Ok("HTTP/1.1 403"), "{name}");
    }
}

fn what_is_no_message_is_400_over_http_with_an_error_of_json_rpc() {
    let desk = desk();
    let http = Http::start(&desk);
    let numbered = r#"{"jsonrpc":"1.0","id":3,"method":"ping"}"#;
    // What serde_json would read anew.
    let raw = r#"{"jsonrpc":"2.0","id":4,"method":"tools/call","params":{"name":"run_program",
        "arguments":{"program":"","input":{"$serde_json::private::RawValue":"[1]"}}}}"#;
    for (body, code, id) in [
        ("{bad", -32700, None),
        ("", -32700, None),
        ("[]", -32600, None),
        (numbered, -32600, Some(3)),
        (raw, -32600, Some(4)),
    ] {
        let answer = http.send("POST", &[ALICE], body);
        assert!(answer.starts_with("HTTP/1.1 400 "), "{body}: {answer}");
        let said = answer.split("\r\n\r\n").nth(1).unwrap();
        let said: Value = serde_json::from_str(&said[said.find('{').unwrap()..]).unwrap();
        assert_eq!((&said["error"]["code"], said["id"].as_i64()), (&json!(code), id), "{said}");
    }
    // What some clients begin with is passed over, as over stdio; what is encoded is not read.
    let marked = http.send("POST", &[ALICE], &format!("\u{feff}{}", initialize()));
    assert!(marked.starts_with("HTTP/1.1 200 "), "{marked}");
    let encoded = [ALICE, ("Content-Encoding", "gzip")];
    let answer = http.send("POST", &encoded, "{}");
    assert!(answer.starts_with("HTTP/1.1 415 "), "{answer}");
    let mut unreadable = initialize();
    unreadable["params"] = json!({"protocolVersion": "2025-06-18"});
    let answer = http.post(&[ALICE], &unreadable);
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(answer.contains("-32602") && answer.contains(r#""id":1"#), "{answer}");
    assert!(answer.contains("missing field"), "{answer}");
    let other = [ALICE, ("Content-Type", "text/plain")];
    // With two of it, the first counts.
    let typed = http.send("POST", &other, "{bad");
    assert!(typed.starts_with("HTTP/1.1 400 "), "{typed}");
    let session = session(&http.post(&[ALICE], &initialize()));
    let headers = [ALICE, ("Mcp-Session-Id", &*session)];
    let answer = http.post(&headers, &request("tools/call", json!({"name": 5})));
    assert!(answer.contains("-32602") && answer.contains("tools/call"), "{answer}");
}

fn a_stream_begins_without_data_only_for_who_knows_that() {
    let desk = desk();
    let http = Http::start(&desk);
    // An event without data is a line of its own.
    let is_primed = |answer: &str| {
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        answer.lines().any(|line| line.trim_end() == "data:")
    };
    for (version, expected) in [("2025-06-18", false), ("2025-11-25", true)] {
        let mut hello = initialize();
        hello["params"]["protocolVersion"] = version.into();
        let greeted = http.post(&[ALICE], &hello);
        assert!(!is_primed(&greeted), "{greeted}");
        let session = session(&greeted);
        let headers = [ALICE, ("Mcp-Session-Id", &*session), ("MCP-Protocol-Version", version)];
        let answer = http.post(&headers, &request("tools/list", json!({})));
        assert_eq!(is_primed(&answer), expected, "{answer}");
        assert!(answer.contains("run_program"), "{answer}");
    }
}

fn an_id_that_is_in_use_is_refused_over_http_and_its_first_request_answered() {
    let desk = desk();
    let http = Http::start(&desk);
    let session = session(&http.post(&[ALICE], &initialize()));
    let headers = [ALICE, ("Mcp-Session-Id", &*session)];
    let limits = json!({"timeout_ms": 3000, "fuel": u64::MAX});
    let program = "(module (memory (export \"memory\") 1) (func (export \"forge_run\") (result i32) \
                   (loop (br 0)) (unreachable)))";
    let arguments = json!({"program": program, "limits": limits});
    let run = request("tools/call", json!({"name": "run_program", "arguments": arguments}));
    let mut first = http.begin("POST", &headers, &run.to_string());
    // Its stream has begun: it is under way.
    let mut status = [0; 12];
    first.read_exact(&mut status).unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");
    let second = http.post(&headers, &request("tools/list", json!({})));
    assert!(second.contains("not answered yet"), "{second}");
    let mut answer = String::new();
    first.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("deadline"), "{answer}");
    let listed = request("tools/list", json!({}));
    let answer = http.post(&headers, &listed);
    assert!(answer.contains("run_program"), "{answer}");
    // One that was broken off goes on, and its answer is for nobody else.
    let mut first = http.begin("POST", &headers, &run.to_string());
    first.read_exact(&mut status).unwrap();
    drop(first);
    let second = http.post(&headers, &listed);
    assert!(second.contains("not answered yet"), "{second}");
    let mut other = listed;
    other["id"] = 2.into();
    assert!(http.post(&headers, &other).contains("run_program"));
}

/// A run that ends by its deadline or by being cancelled.
fn endless_over_http(timeout_ms: u64) -> Value {
    let program = forge_module("(memory (export \"memory\") 1)", "(loop (br 0)) (unreachable)");
    let limits = json!({"timeout_ms": timeout_ms, "fuel": 1_000_000_000_000u64});
    let arguments = json!({"program": program, "limits": limits});
    let meta = json!({"progressToken": "endless"});
    request("tools/call", json!({"name": "run_program", "arguments": arguments, "_meta": meta}))
}

/// What comes of a stream until it holds this word.
fn read_until(stream: &mut TcpStream, word: &str) -> String {
    let (mut all, mut byte) = (Vec::new(), [0]);
    while !all.ends_with(word.as_bytes()) {
        stream.read_exact(&mut byte).unwrap();
        all.push(byte[0]);
    }
    String::from_utf8(all).unwrap()
}

fn an_answer_that_a_broken_connection_lost_is_heard_by_who_comes_back() {
    let desk = desk();
    let http = Http::start(&desk);
    let session = session(&http.post(&[ALICE], &initialize()));
    let headers = [ALICE, ("Mcp-Session-Id", &*session)];
    let mut first = http.begin("POST", &headers, &endless_over_http(500).to_string());
    let begun = read_until(&mut first, "\ndata: {");
    let last = begun.lines().filter_map(|line| line.strip_prefix("id:")).next_back().unwrap();
    let last = last.trim().to_owned();
    drop(first);
    // Its id is free again when its answer is there.
    let listed = request("tools/list", json!({}));
    eventually("the run ends", || http.post(&headers, &listed).contains("search_tools"));
    let back = [ALICE, ("Mcp-Session-Id", &*session), ("Last-Event-ID", &*last)];
    let mut heard = None;
    for _ in 0..2 {
        let answer = http.send("GET", &back, "");
        assert!(answer.contains("\"isError\":true") && answer.contains("deadline"), "{answer}");
        let again =
            answer.lines().any(|line| line.strip_prefix("id:").is_some_and(|id| id.trim() == last));
        assert!(!again, "{last} once more: {answer}");
        heard = answer
            .lines()
            .filter_map(|line| line.strip_prefix("id:"))
            .next_back()
            .map(|id| id.trim().to_owned());
    }
    // Who has heard all is told so, or would come back at once and without end.
    let heard = heard.unwrap();
    let back = [ALICE, ("Mcp-Session-Id", &*session), ("Last-Event-ID", &*heard)];
    let answer = http.send("GET", &back, "");
    assert!(answer.starts_with("HTTP/1.1 204 "), "{answer}");
    for never_was in ["99999/1", "0/99999", "zzz"] {
        let back = [ALICE, ("Mcp-Session-Id", &*session), ("Last-Event-ID", never_was)];
        let answer = http.send("GET", &back, "");
        assert!(answer.starts_with("HTTP/1.1 410 "), "{answer}");
        assert!(answer.contains("send its request again"), "{answer}");
    }
}

fn a_signal_answers_who_waits_over_http() {
    let desk = desk();
    let http = Http::start(&desk);
    let session = session(&http.post(&[ALICE], &initialize()));
    let (mut unasked, _) = http.stream(&session);
    let headers = [ALICE, ("Mcp-Session-Id", &*session)];
    let mut waits = http.begin("POST", &headers, &endless_over_http(30_000).to_string());
    read_until(&mut waits, "notifications/progress");
    // SAFETY: a plain system call; the process is a child of ours.
    assert_eq!(unsafe { libc::kill(http.0.id() as i32, libc::SIGTERM) }, 0);
    let mut answer = String::new();
    waits.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("cancelled (cancelled)"), "{answer}");
    unasked.read_to_string(&mut answer).unwrap();
}

fn a_session_that_is_not_there_cannot_be_ended() {
    let desk = desk();
    let http = Http::start(&desk);
    let session = session(&http.post(&[ALICE], &initialize()));
    let end = |who| http.send("DELETE", &[who, ("Mcp-Session-Id", &*session)], "");
    assert!(end(BOB).starts_with("HTTP/1.1 404 "), "another's");
    assert!(end(ALICE).starts_with("HTTP/1.1 204 "));
    assert!(end(ALICE).starts_with("HTTP/1.1 404 "), "it has ended");
}

fn a_hangup_ends_no_session_over_http() {
    let desk = desk();
    let http = Http::start(&desk);
    let session = session(&http.post(&[ALICE], &initialize()));
    // SAFETY: a plain system call; the process is a child of ours.
    assert_eq!(unsafe { libc::kill(http.0.id() as i32, libc::SIGHUP) }, 0);
    let headers = [ALICE, ("Mcp-Session-Id", &*session)];
    let answer = http.post(&headers, &request("ping", json!({})));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

fn a_session_and_a_handle_are_of_no_use_to_another_principal() {
    let desk = desk();
    let http = Http::start(&desk);
    let session = session(&http.post(&[ALICE], &initialize()));
    let listed = request("tools/list", json!({}));
    for (who, status) in [(ALICE, "200"), (BOB, "404")] {
        let answer = http.post(&[who, ("Mcp-Session-Id", &session)], &listed);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{who:?}: {answer}");
        assert!(status == "200" || answer.contains("initialize again"), "{answer}");
    }
    let found = call(&http, ALICE, "search_tools", json!({"intent": "say a text back"}));
    let grant = found.split("\"grant\":\"").nth(1).unwrap_or_else(|| panic!("{found}"));
    let grant = grant.split('"').next().unwrap();
    let run = json!({"program": "(module)", "grant": grant});
    let answer = call(&http, BOB, "run_program", run.clone());
    assert!(answer.contains("is not known here"), "{answer}");
    let answer = call(&http, ALICE, "run_program", run);
    assert!(!answer.contains("is not known here"), "{answer}");
}

fn a_session_beyond_its_principals_room_is_told_so_and_another_principals_is_not() {
    let desk = desk();
    let http = Http::start(&desk);
    let sessions: Vec<String> =
        (0..64).map(|_| session(&http.post(&[ALICE], &initialize()))).collect();
    let refused = http.post(&[ALICE], &initialize());
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("sessions"), "{refused}");
    assert!(http.post(&[BOB], &initialize()).starts_with("HTTP/1.1 200"));
    let listed = request("tools/list", json!({}));
    let answer = http.post(&[ALICE, ("Mcp-Session-Id", &sessions[0])], &listed);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

fn streams_that_every_session_has_open_leave_room_for_requests() {
    let desk = desk();
    let http = Http::start(&desk);
    let sessions: Vec<String> =
        (0..64).map(|_| session(&http.post(&[ALICE], &initialize()))).collect();
    let streams: Vec<_> = sessions.iter().map(|session| http.stream(session)).collect();
    assert!(streams.iter().all(|(_, status)| status == "HTTP/1.1 200"), "{streams:?}");
    assert_eq!(http.stream(&sessions[0]).1, "HTTP/1.1 503", "one more than there may be");
    let answer =
        http.post(&[ALICE, ("Mcp-Session-Id", &sessions[0])], &request("tools/list", json!({})));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

fn a_door_without_known_principals_does_not_open() {
    let desk = desk();
    let short = "[principals.a]\ntoken_sha256 = [\"00\"]\n";
    for (config, word) in [("", "nobody is known"), (short, "token_sha256")] {
        desk.write("bad.toml", config);
        let arguments = ["mcp", "--config", "bad.toml", "--listen", "127.0.0.1:0"];
        let output = desk.command(&arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(word), "{said}");
    }
}
