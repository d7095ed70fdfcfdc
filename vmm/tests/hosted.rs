//! Tools that a service's client hosts itself, and what it hears of a run while
//! it goes on.

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
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitCode, Stdio};

use desk::Desk;
use forge_client::RunMessage;
use forge_protocol::broker::{Authority, HostedTool, HostedTools};
use forge_protocol::name::ToolName;
use forge_protocol::service::{Callback, Order, RunEvent};
use serde_json::Value;
use serving::{
    ECHO, ENDLESS, Service, calls, desk, endless, hashes, program, report, run, runtime, stands,
    submit,
};
use support::{eventually, forge_module, joins, signed};

fn main() -> ExitCode {
    support::main(
        claims![
            a_program_calls_tools_of_the_clients_own_process,
            a_cancelled_run_tells_of_the_calls_that_had_settled,
            what_happens_in_a_run_is_told_as_it_happens_and_only_if_asked_for,
            a_program_joins_a_servers_tool_with_a_function_of_the_client,
            a_client_that_hosts_and_dies_takes_its_run_with_it,
            a_client_hosts_under_no_servers_name,
            a_client_in_another_language_needs_the_document_alone,
        ],
        claims![],
    )
}

fn hosted(server: &str, tool: &str) -> HostedTools {
    let schema = r#"{"type":"object"}"#;
    HostedTools {
        server: server.into(),
        tools: vec![HostedTool {
            name: tool.into(),
            description: "Of the client's own.".into(),
            input_schema: schema.into(),
            output_schema: None,
        }],
    }
}

/// Starts three calls of `app.twice`, waits for them all, outputs the last.
fn three_calls() -> Vec<u8> {
    signed(&forge_module(
        r#"(memory (export "memory") 1) (data (i32.const 0) "app.twice{\"n\":21}")"#,
        r#"(local $i i32)
           (loop $start
               (drop (call $call_async (i32.const 0) (i32.const 9) (i32.const 9) (i32.const 8)))
               (br_if $start (i32.lt_u
                   (local.tee $i (i32.add (local.get $i) (i32.const 1))) (i32.const 3))))
           (loop $collect
               (if (i32.lt_s (call $wait (call $wait_any)) (i32.const 0))
                   (then (return (i32.const 2))))
               (br_if $collect (local.tee $i (i32.sub (local.get $i) (i32.const 1)))))
           (drop (call $output (i32.const 1024)
               (call $resp_read (i32.const 1024) (i32.const 0) (call $resp_len))))
           (i32.const 0)"#,
    ))
}

async fn next_callback(run: &mut forge_client::Run) -> Callback {
    match run.next().await {
        Some(RunMessage::Callback(callback)) => callback,
        other => panic!("{other:?}"),
    }
}

/// A desk whose service has the inventory of the examples.
fn with_inventory() -> (Desk, Service) {
    let desk = desk();
    fs::write(desk.path("mcp.json"), executables::inventory().to_string()).unwrap();
    let service = desk.serve(&["--mcp-config", "mcp.json"]);
    (desk, service)
}

fn a_program_calls_tools_of_the_clients_own_process() {
    let desk = desk();
    let service = desk.serve(&[]);
    let order =
        Order { program: three_calls(), hosted: Some(hosted("app", "twice")), ..submit(ECHO, "1") };
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let mut run = client.submit(&order).await.unwrap();
        // All of them are out before the first is answered.
        let mut out = Vec::new();
        for _ in 0..3 {
            let callback = next_callback(&mut run).await;
            assert_eq!(callback.tool.as_str(), "app.twice");
            assert_eq!(serde_json::from_slice::<Value>(&callback.arguments).unwrap()["n"], 21);
            out.push(callback.callback);
        }
        // One that is not out is nobody's answer.
        run.settle(77, Ok(b"0".to_vec())).await.unwrap();
        for callback in out {
            run.settle(callback, Ok(b"42".to_vec())).await.unwrap();
        }
        let report = report(&run.finish().await.unwrap());
        assert_eq!((&report["status"], &report["output"]), (&"ok".into(), &"42".into()));
        let calls = report["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 3, "{report:#}");
        assert!(calls.iter().all(|call| call["tool"] == "app.twice" && call["status"] == "ok"));
    });
    // The journal has them.
    let hash = run(&mut service.client(), &hashes());
    assert_eq!(hash["status"], "ok", "{hash:#}");
    let listed = desk.forge(&["journal", "list", "--state", "state", "--json"]);
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    let held: Vec<_> =
        listed.as_array().unwrap().iter().map(|it| (&it["tool"], &it["held_by"])).collect();
    let (twice, by) = ("app.twice".into(), "caller".into());
    let (hash, nobody) = ("crypto.hash".into(), Value::Null);
    assert_eq!(held, [(&twice, &by), (&twice, &by), (&twice, &by), (&hash, &nobody)]);
    let shown = desk.forge(&["journal", "list", "--state", "state"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert_eq!(shown.matches(", held by the caller\n").count(), 3, "{shown}");
    service.serves();
}

fn a_cancelled_run_tells_of_the_calls_that_had_settled() {
    let desk = desk();
    let service = desk.serve(&[]);
    let wat = forge_module(
        r#"(memory (export "memory") 1)
           (data (i32.const 0) "crypto.hash{\"algorithm\":\"sha256\",\"text\":\"abc\"}")
           (data (i32.const 256) "app.twice{\"n\":21}")"#,
        "(drop (call $call (i32.const 0) (i32.const 11) (i32.const 11) (i32.const 35)))
         (drop (call $call (i32.const 0) (i32.const 11) (i32.const 11) (i32.const 2)))
         (call $call (i32.const 256) (i32.const 9) (i32.const 265) (i32.const 8))",
    );
    let hash = ToolName::parse("crypto.hash").unwrap();
    let order = Order {
        program: signed(&wat),
        authority: Authority::Tools(vec![hash]),
        hosted: Some(hosted("app", "twice")),
        ..endless()
    };
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let mut run = client.submit(&order).await.unwrap();
        next_callback(&mut run).await;
        run.canceller().cancel().await;
        let report = report(&run.finish().await.unwrap());
        assert_eq!(report["status"], "cancelled", "{report:#}");
        let calls = report["tool_calls"].as_array().unwrap();
        let told: Vec<_> = calls.iter().map(|it| (&it["tool"], &it["status"])).collect();
        let (hash, twice) = (&"crypto.hash".into(), &"app.twice".into());
        let (ok, bad, out) = (&"ok".into(), &"bad_request".into(), &"unsettled".into());
        assert_eq!(told, [(hash, ok), (hash, bad), (twice, out)], "{report:#}");
        assert!(calls[0]["duration_us"].is_u64() && calls[2]["duration_us"].is_null());
    });
}

fn what_happens_in_a_run_is_told_as_it_happens_and_only_if_asked_for() {
    let desk = desk();
    let service = desk.serve(&["--reuse", "reset"]);
    let hash = ToolName::parse("crypto.hash").unwrap();
    let request = r#"{"algorithm":"sha256","text":"abc"}"#;
    let quiet = Order {
        program: calls("crypto.hash", request),
        authority: Authority::Tools(vec![hash.clone()]),
        ..submit(ECHO, "1")
    };
    let loud = Order { events: true, ..quiet.clone() };
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        // The same VM serves all of them, and one tells nothing for another.
        for order in [&quiet, &loud, &quiet, &loud] {
            let mut run = client.submit(order).await.unwrap();
            let (mut told, mut finished) = (Vec::new(), None);
            while let Some(message) = run.next().await {
                match message {
                    RunMessage::Event(event) => told.push(event),
                    RunMessage::Finished(finish) => finished = Some(report(&finish)),
                    RunMessage::Callback(_) => panic!("it hosts nothing"),
                }
            }
            let report = finished.unwrap();
            assert_eq!(report["status"], "ok", "{report:#}");
            if !order.events {
                assert!(told.is_empty(), "{told:?}");
                continue;
            }
            let [
                RunEvent::Admitted { run_id },
                RunEvent::Called { call: 0, tool },
                RunEvent::Settled { call: 0, code: None, .. },
                RunEvent::Output(output),
            ] = &told[..]
            else {
                panic!("{told:?}")
            };
            assert_eq!(run_id.to_string(), report["run_id"]);
            assert_eq!(*tool, hash);
            assert_eq!(String::from_utf8_lossy(output), report["output"].as_str().unwrap());
        }
        // While it goes on: what it logged is told before its call.
        let wat = forge_module(
            r#"(memory (export "memory") 1) (data (i32.const 0) "app.twice{\"n\":21}")"#,
            "(call $log (i32.const 1) (i32.const 0) (i32.const 3))
             (call $call (i32.const 0) (i32.const 9) (i32.const 9) (i32.const 8))",
        );
        let hosted = Some(hosted("app", "twice"));
        let order = Order { program: signed(&wat), events: true, hosted, ..endless() };
        let mut run = client.submit(&order).await.unwrap();
        let mut told = Vec::new();
        while told.len() < 4 {
            told.push(match run.next().await {
                Some(RunMessage::Event(RunEvent::Log(log))) => {
                    assert_eq!((log.level, log.text.as_str()), (1, "app"));
                    "log"
                }
                Some(RunMessage::Event(RunEvent::Admitted { .. })) => "admitted",
                Some(RunMessage::Event(RunEvent::Called { .. })) => "called",
                Some(RunMessage::Callback(_)) => "callback",
                other => panic!("{other:?}"),
            });
        }
        // The callback takes another way than the event of its call.
        assert_eq!(told[..2], ["admitted", "log"], "{told:?}");
        run.canceller().cancel().await;
        assert_eq!(report(&run.finish().await.unwrap())["status"], "cancelled");
    });
}

fn a_program_joins_a_servers_tool_with_a_function_of_the_client() {
    let (_desk, service) = with_inventory();
    let tools = vec![ToolName::parse("inventory.get_stock").unwrap()];
    let order = Order {
        program: joins(),
        authority: Authority::Tools(tools),
        hosted: Some(hosted("app", "price")),
        ..submit(ECHO, "{}")
    };
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let mut run = client.submit(&order).await.unwrap();
        let callback = next_callback(&mut run).await;
        let stock: Value = serde_json::from_slice(&callback.arguments).unwrap();
        assert_eq!(stock["part_id"], "P-1001");
        let cents = stock["available"].as_u64().unwrap() * 12;
        let answer = serde_json::json!({ "cents": cents });
        run.settle(callback.callback, Ok(answer.to_string().into_bytes())).await.unwrap();
        let report = report(&run.finish().await.unwrap());
        assert_eq!(report["status"], "ok", "{report:#}");
        assert_eq!(report["output"], answer.to_string());
        let called = |at: usize| report["tool_calls"][at]["tool"].as_str().unwrap().to_owned();
        assert_eq!([called(0), called(1)], ["inventory.get_stock", "app.price"]);
    });
}

fn a_client_that_hosts_and_dies_takes_its_run_with_it() {
    let desk = desk();
    let service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    let order = Order { program: three_calls(), hosted: Some(hosted("app", "twice")), ..endless() };
    runtime().block_on(async {
        let watcher = forge_client::Client::connect(&service.socket).await.unwrap();
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let mut run = client.submit(&order).await.unwrap();
        next_callback(&mut run).await;
        drop((run, client));
        stands(&watcher, "its run is over", |status| {
            status["runs"]["ended"]["cancelled"] == 1 && status["runs"]["running"] == 0
        })
        .await;
    });
    eventually("its worker is gone", || service.workers().is_empty());
    service.serves();
}

fn a_client_hosts_under_no_servers_name() {
    let desk = desk();
    let service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    for server in ["fs", "no name", ""] {
        let order = Order { hosted: Some(hosted(server, "twice")), ..submit(ECHO, "1") };
        let report = run(&mut service.client(), &order);
        assert_eq!(
            (&report["status"], &report["kind"]),
            (&"rejected".into(), &"bad_request".into())
        );
    }
}

fn a_client_in_another_language_needs_the_document_alone() {
    let (desk, service) = with_inventory();
    fs::write(desk.path("echo"), program(ECHO)).unwrap();
    fs::write(desk.path("endless"), program(ENDLESS)).unwrap();
    fs::write(desk.path("hosted"), three_calls()).unwrap();
    fs::write(desk.path("joins"), joins()).unwrap();
    let leaves = signed(include_str!("../../examples/programs/artifact.wat"));
    fs::write(desk.path("leaves"), leaves).unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/client.py");
    let mut python = Command::new("python3");
    python.arg(script).arg(&service.socket).arg(desk.folder()).stdin(Stdio::null());
    let output = match python.output() {
        Ok(output) => output,
        Err(error) => {
            eprintln!("SKIPPED: there is no python3: {error}");
            return;
        }
    };
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ok\n", "{said}");
    // It hosts a tool, and dies when that is called.
    let mut dies = Command::new("python3");
    dies.arg(script).arg(&service.socket).arg(desk.folder()).arg("dies").stdin(Stdio::null());
    assert_eq!(dies.status().unwrap().signal(), Some(libc::SIGKILL));
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        stands(&client, "its run is over", |status| {
            status["runs"]["ended"]["cancelled"] == 2 && status["runs"]["running"] == 0
        })
        .await;
    });
}
