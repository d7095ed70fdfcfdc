//! Built-in tools as a program in a real VM uses them, through the real
//! broker: files, notes and a request over HTTP, and the refusals outside of
//! what the operator configured.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/desk.rs"]
mod desk;
#[path = "support/executables.rs"]
mod executables;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use desk::Desk;
use serde_json::{Value, json};
use support::forge_module;

fn main() -> ExitCode {
    support::main(
        claims![
            a_program_uses_files_stash_and_http_and_is_refused_outside,
            a_built_in_that_is_not_configured_cannot_be_granted,
        ],
        &[],
    )
}

const CREDENTIAL: &str = "tok-5b1e77aa90c3-canary";
/// Where in the program's memory a response goes.
const RESPONSES: usize = 65_536;

/// `run`, of a program that makes these calls, with its report.
fn run(desk: &Desk, calls: &[(&str, Value)]) -> (i32, Value) {
    desk.write("program.wat", program(calls));
    let mut arguments = vec!["--config", "forge.toml"];
    let mut tools: Vec<&str> = calls.iter().map(|(tool, _)| *tool).collect();
    tools.sort_unstable();
    tools.dedup();
    arguments.extend(tools.iter().flat_map(|tool| ["--allow", tool]));
    arguments.push("program.wat");
    desk.run_with(&[("API_TOKEN", CREDENTIAL)], &arguments)
}

/// Makes each call, one after the other, and writes its response or the
/// reason that there is none, each on a line.
fn program(calls: &[(&str, Value)]) -> String {
    let (mut imports, mut data, mut body) = (String::new(), String::new(), String::new());
    let mut names: Vec<&str> = Vec::new();
    let mut at = 16;
    for (tool, request) in calls {
        if !names.contains(tool) {
            names.push(tool);
            imports.push_str(&format!(
                "(import \"tool\" \"{tool}\" (func ${tool} (param i32 i32) (result i32)))\n"
            ));
        }
        let request = request.to_string();
        data.push_str(&format!("(data (i32.const {at}) {request:?})\n"));
        body.push_str(&format!(
            "(drop (call ${tool} (i32.const {at}) (i32.const {})))
             (drop (call $output (i32.const {RESPONSES})
                (call $resp_read (i32.const {RESPONSES}) (i32.const 0) (i32.const 60000))))
             (drop (call $output (i32.const 0) (i32.const 1)))\n",
            request.len()
        ));
        at += request.len();
    }
    assert!(at < RESPONSES);
    forge_module(
        &format!("{imports} (memory (export \"memory\") 2) (data (i32.const 0) \"\\n\") {data}"),
        &format!("{body} (i32.const 0)"),
    )
}

/// A server on loopback that tells what it heard.
fn server() -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let heard: Arc<Mutex<Vec<String>>> = Arc::default();
    let heard_here = Arc::clone(&heard);
    // Ends with the test's process.
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut request = Vec::new();
            let mut some = [0; 1024];
            while !request.windows(4).any(|end| end == b"\r\n\r\n") {
                match stream.read(&mut some) {
                    Ok(0) | Err(_) => break,
                    Ok(bytes) => request.extend_from_slice(&some[..bytes]),
                }
            }
            heard_here.lock().unwrap().push(String::from_utf8_lossy(&request).into_owned());
            let body = format!("token {CREDENTIAL}");
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
            let _ = stream.write_all(format!("{head}{body}").as_bytes());
        }
    });
    (port, heard)
}

fn a_program_uses_files_stash_and_http_and_is_refused_outside() {
    executables::folder();
    let desk = Desk::new();
    let (port, heard) = server();
    fs::create_dir(desk.path("docs")).unwrap();
    desk.write("docs/a.md", "alpha");
    desk.write("key.md", "outside");
    std::os::unix::fs::symlink("../key.md", desk.path("docs/link.md")).unwrap();
    let configuration = format!(
        "[builtins.fs]\nroots = [{{ name = 'docs', path = {:?}, patterns = ['**/*.md'] }}]\n\
         [builtins.stash]\n\
         [builtins.http]\nallow = [{{ scheme = 'http', host = '127.0.0.1', port = {port}, \
         path_prefix = '/v1/', addresses = ['127.0.0.1/32'], \
         headers = {{ Authorization = {{ prefix = 'Bearer ', from_env = 'API_TOKEN' }} }} }}]\n",
        desk.path("docs")
    );
    desk.write("forge.toml", configuration);
    let fetch = |place: &str| json!({ "method": "GET", "url": format!("http://{place}") });
    let calls = [
        ("fs.read", json!({ "path": "docs/a.md" })),
        ("fs.read", json!({ "path": "docs/link.md" })),
        ("stash.put", json!({ "key": "k", "value": [1, 2] })),
        ("stash.get", json!({ "key": "k" })),
        ("http.fetch", fetch(&format!("127.0.0.1:{port}/v1/a"))),
        ("http.fetch", fetch(&format!("127.0.0.1:{port}/admin"))),
        ("http.fetch", fetch("169.254.169.254/latest/meta-data/")),
    ];
    let (code, report) = run(&desk, &calls);
    assert_eq!(code, 0, "{report:#}");
    let answers: Vec<Value> = report["output"]
        .as_str()
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(answers[0], json!({ "text": "alpha" }));
    assert_eq!(answers[1]["code"], "not_allowed");
    assert_eq!(answers[2], json!({ "expires_in_s": 3600 }));
    assert_eq!(answers[3], json!({ "found": true, "value": [1, 2] }));
    assert_eq!(
        (&answers[4]["status"], &answers[4]["body"]),
        (&json!(200), &json!("token [credential removed]"))
    );
    assert_eq!(answers[5]["code"], "not_allowed");
    assert_eq!(answers[6]["code"], "not_allowed");
    let heard = heard.lock().unwrap().clone();
    assert_eq!(heard.len(), 1, "{heard:?}");
    assert!(heard[0].contains(&format!("authorization: Bearer {CREDENTIAL}")), "{heard:?}");
    assert!(!report.to_string().contains(CREDENTIAL));
    let states: Vec<&str> = report["tool_calls"]
        .as_array()
        .unwrap()
        .iter()
        .map(|call| call["status"].as_str().unwrap())
        .collect();
    let failed = "tool_failed";
    assert_eq!(states, ["ok", failed, "ok", "ok", "ok", failed, failed]);
}

fn a_built_in_that_is_not_configured_cannot_be_granted() {
    executables::folder();
    let desk = Desk::new();
    desk.write("forge.toml", "[builtins.stash]\n");
    let (code, report) = run(&desk, &[("fs.read", json!({ "path": "docs/a.md" }))]);
    assert_ne!(code, 0);
    let reason = report["reason"].to_string();
    assert!(reason.contains("no tool") && reason.contains("fs.read"), "{report:#}");
}
