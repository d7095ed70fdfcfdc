//! Tools that are not on this machine's standard streams, the whole way: the
//! real `forge-vmm`, a program in a VM, the real toolbroker, and on loopback
//! an MCP server over HTTP and an HTTP interface with an OpenAPI document.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/desk.rs"]
mod desk;
#[path = "support/executables.rs"]
mod executables;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use desk::Desk;
use serde_json::{Value, json};
use support::forge_module;

const CREDENTIAL: &str = "tok-51e2b84d-remote-canary";

fn main() -> ExitCode {
    support::main(claims![a_program_calls_an_mcp_server_over_http_and_an_interface], claims![])
}

/// Heads and bodies of the requests that came.
type Seen = Arc<Mutex<Vec<(String, String)>>>;

/// An HTTP server for as long as the test: MCP at `/mcp`, parts at `/v1/`.
fn serve() -> (SocketAddr, Seen) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, seen) = (listener.local_addr().unwrap(), Seen::default());
    let log = Arc::clone(&seen);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let log = Arc::clone(&log);
            std::thread::spawn(move || converse(&stream.unwrap(), &log));
        }
    });
    (address, seen)
}

/// Answers request after request until the client leaves.
fn converse(stream: &TcpStream, seen: &Seen) -> Option<()> {
    let (mut reader, mut writer) = (BufReader::new(stream), stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).ok()? == 0 {
                return None;
            }
        }
        let lower = head.to_ascii_lowercase();
        let length = lower
            .split("content-length: ")
            .nth(1)
            .map_or(0, |rest| rest.split("\r\n").next().unwrap().parse::<usize>().unwrap());
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        let body = String::from_utf8(body).unwrap();
        seen.lock().unwrap().push((head.clone(), body.clone()));
        let (status, answer) = if head.starts_with("POST /mcp ") {
            mcp(&serde_json::from_str(&body).unwrap())
        } else if head.starts_with("GET /v1/parts/") {
            (200, json!({"path": head.split(' ').nth(1), "stock": 7}))
        } else {
            (405, Value::Null)
        };
        let answer = answer.to_string();
        let head = format!(
            "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            answer.len()
        );
        writer.write_all((head + &answer).as_bytes()).ok()?;
    }
}

fn mcp(message: &Value) -> (u16, Value) {
    let result = match message["method"].as_str().unwrap() {
        "initialize" => json!({"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                               "serverInfo": {"name": "remote", "version": "1"}}),
        "tools/list" => json!({"tools": [{"name": "greet", "inputSchema": {"type": "object"}}]}),
        "tools/call" => json!({"content": [], "structuredContent":
            {"hello": message["params"]["arguments"]["who"], "secret": CREDENTIAL}}),
        "notifications/initialized" => return (202, Value::Null),
        _ => {
            let error = json!({"code": -32601, "message": "no such method"});
            return (400, json!({"jsonrpc": "2.0", "id": message["id"], "error": error}));
        }
    };
    (200, json!({"jsonrpc": "2.0", "id": message["id"], "result": result}))
}

/// Calls both tools, and puts out the second answer behind the first.
fn program() -> String {
    let (greet, part) = (r#"{"who":"world"}"#, r#"{"id":"a/b"}"#);
    let calls = |name: &str, at: usize, length: usize| {
        format!(
            "(if (i32.lt_s (call ${name} (i32.const {at}) (i32.const {length})) (i32.const 0))
                (then (return (i32.const 1))))
             (local.set $n (i32.add (local.get $n)
                (call $resp_read (i32.add (i32.const 4096) (local.get $n)) (i32.const 0)
                    (i32.const 10000))))"
        )
    };
    forge_module(
        &format!(
            "(import \"tool\" \"remote.greet\" (func $greet (param i32 i32) (result i32)))
             (import \"tool\" \"parts.getPart\" (func $part (param i32 i32) (result i32)))
             (memory (export \"memory\") 2)
             (data (i32.const 0) {greet:?}) (data (i32.const 1024) {part:?})"
        ),
        &format!(
            "(local $n i32) {} {}
             (drop (call $output (i32.const 4096) (local.get $n))) (i32.const 0)",
            calls("greet", 0, greet.len()),
            calls("part", 1024, part.len()),
        ),
    )
}

fn a_program_calls_an_mcp_server_over_http_and_an_interface() {
    executables::folder();
    let (address, seen) = serve();
    let desk = Desk::new();
    desk.write("program.wat", program());
    let parameter = json!({"name": "id", "in": "path", "required": true,
                           "schema": {"type": "string"}});
    let document = json!({"openapi": "3.1.0", "info": {"title": "Parts", "version": "1"},
        "paths": {"/parts/{id}": {"get": {"operationId": "getPart", "parameters": [parameter]}}}});
    desk.write("parts.json", document.to_string());
    desk.write(
        "forge.toml",
        format!(
            "[servers.remote]\nurl = \"http://{address}/mcp\"\n\
             headers.Authorization = {{ from_env = \"REMOTE_TOKEN\", prefix = \"Bearer \" }}\n\
             [servers.parts]\nopenapi = \"parts.json\"\nbase_url = \"http://{address}/v1\"\n"
        ),
    );
    let tools = ["--allow", "remote.greet", "--allow", "parts.getPart"];
    let arguments = [&["--config", "forge.toml"], &tools[..], &["program.wat"]].concat();
    let (code, report) = desk.run_with(&[("REMOTE_TOKEN", CREDENTIAL)], &arguments);
    assert_eq!(code, 0, "{report:#}");
    let said = report["output"].as_str().unwrap();
    let answers: Vec<Value> =
        serde_json::Deserializer::from_str(said).into_iter().collect::<Result<_, _>>().unwrap();
    assert_eq!(
        answers,
        [
            json!({"hello": "world", "secret": "[credential removed]"}),
            json!({"path": "/v1/parts/a%2Fb", "stock": 7}),
        ]
    );
    let calls: Vec<&str> = report["tool_calls"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|call| call["tool"].as_str())
        .collect();
    assert_eq!(calls, ["remote.greet", "parts.getPart"]);
    let seen = seen.lock().unwrap();
    for (head, body) in seen.iter() {
        let has =
            head.to_ascii_lowercase().contains(&format!("authorization: bearer {CREDENTIAL}"));
        assert_eq!(has, head.contains(" /mcp "), "{head}");
        assert!(!body.contains(CREDENTIAL), "{body}");
    }
}
