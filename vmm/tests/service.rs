//! `forge-vmm serve` and its clients: good ones, ones that leave, and strangers.

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

use std::ffi::{CStr, CString};
use std::fs;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use desk::Desk;
use forge_client::ClientError;
use forge_client::blocking::Client;
use forge_protocol::broker::{Authority, GrantRequest, Narrowing, RefusalKind};
use forge_protocol::codec;
use forge_protocol::frame::{self, HEADER_BYTES, Header, Kind};
use forge_protocol::handshake::{Hello, Refusal, Role};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::service::{Answered, Finished, Order, Query, Question, Reply, Submit};
use forge_vmm::cpu_latency::CpuLatency;
use processes::{Process, is_busy, is_gone};
use serde_json::Value;
use serving::{
    ECHO, Service, broker_pid, desk, endless, is_closed, kill, leaving_client, lines, patience,
    program, report, run, runtime, send, signal, standing, stands, status, stranger, submit,
    test_server, three_in_flight,
};
use support::{eventually, forge_module, signed};

fn main() -> ExitCode {
    support::main(
        claims![
            a_clients_run_answers_as_the_command_does,
            the_command_prints_and_exits_the_same_with_a_service,
            a_command_that_is_interrupted_cancels_its_run_at_a_service_and_prints_the_report,
            artifacts_of_a_run_at_a_service_are_written_as_of_one_without,
            several_clients_are_served_at_once,
            one_connection_carries_many_runs,
            a_client_that_leaves_takes_its_run_with_it,
            a_client_that_has_left_or_was_cut_off_takes_up_no_connection,
            strangers_do_no_harm,
            several_runs_go_on_at_once_on_one_connection,
            a_cancelled_run_says_so_and_the_others_go_on,
            a_dropped_run_is_cancelled,
            a_number_in_use_ends_the_connection,
            questions_are_answered_while_runs_go_on,
            questions_that_wait_are_bounded_and_hold_up_no_run,
            a_watched_service_tells_latencies_pool_and_principals,
            status_is_short_for_a_person_and_whole_with_json,
            a_question_too_large_for_the_toolbroker_is_refused,
            a_client_that_reads_nothing_holds_up_nobody,
            a_client_that_takes_no_answer_has_no_thread_for_each,
            runs_one_after_another_wake_no_second_thread,
            a_frame_that_comes_drop_by_drop_holds_no_thread,
            a_flood_is_refused_at_once_and_a_second_principal_is_served,
            where_nobody_set_a_bound_a_flood_of_long_runs_leaves_places_to_others,
            the_tools_of_a_cancelled_run_hear_of_it,
            a_run_that_is_being_opened_is_cancelled_without_the_broker,
            ten_times_what_there_is_room_for_is_refused_by_kind_and_others_are_served,
            a_lost_workers_calls_are_in_the_report_and_their_tools_hear_of_it,
            another_user_speaks_for_its_principal_alone,
            a_service_holds_idle_cpus_ready_while_runs_come,
            an_order_that_no_service_takes_is_refused_before_it_is_sent,
            an_input_or_a_principal_that_is_none_is_refused_whatever_is_granted,
            a_sessions_name_that_is_none_is_refused_whatever_is_granted,
        ],
        claims![],
    )
}

// Runs

const TRAP: &str = "(i32.div_s (i32.const 1) (i32.const 0))";

/// The command without a service.
fn run_alone(desk: &Desk, program: &str, more: &[&str]) -> Output {
    let all = ["run", "--trust", "signer.pub", "--timeout", "30s"];
    desk.command(&all).args(more).arg(program).output().unwrap()
}

/// The command with one, whose keys are its own.
fn run_served(desk: &Desk, program: &str, more: &[&str]) -> Output {
    let all = ["run", "--service", "socket", "--timeout", "30s"];
    desk.command(&all).args(more).arg(program).output().unwrap()
}

/// A report without what differs from run to run.
fn essence(mut report: Value) -> Value {
    let fields = report.as_object_mut().unwrap();
    for name in ["run_id", "timing_us"] {
        assert!(fields.remove(name).is_some(), "a report has {name}");
    }
    report
}

fn a_clients_run_answers_as_the_command_does() {
    let desk = desk();
    let service = desk.serve(&[]);
    for (name, body) in [("echo", ECHO), ("trap", TRAP)] {
        fs::write(desk.path(name), program(body)).unwrap();
        let alone = run_alone(&desk, name, &["--json", "--input", "[1, 2]"]);
        let alone = essence(serde_json::from_slice(&alone.stdout).unwrap());
        for prepare in [false, true, true] {
            let submit = Order { prepare, ..submit(body, "[1, 2]") };
            assert_eq!(essence(run(&mut service.client(), &submit)), alone, "{name}");
        }
    }
}

fn the_command_prints_and_exits_the_same_with_a_service() {
    let desk = desk();
    let _service = desk.serve(&[]);
    let mut flipped = program(ECHO);
    *flipped.last_mut().unwrap() ^= 1;
    let cases = [
        ("ok", program(ECHO), 0),
        ("trap", program(TRAP), 1),
        ("rejected", flipped, 3),
        ("binary", program(&ECHO.replace("(i32.const 0)))", "(i32.const 0)) (i32.const 9))")), 0),
    ];
    for (name, program, code) in cases {
        fs::write(desk.path(name), program).unwrap();
        let alone = run_alone(&desk, name, &["--input", "\"x\""]);
        assert_eq!(alone.status.code(), Some(code), "{name}: {alone:?}");
        for more in [&[][..], &["--prepare"]] {
            let served = run_served(&desk, name, &[more, &["--input", "\"x\""]].concat());
            assert_eq!(served.status, alone.status, "{name}");
            assert_eq!(served.stdout, alone.stdout, "{name}");
            assert_eq!(served.stderr, alone.stderr, "{name}");
        }
    }
    // A key that the service would not ask for is none to be named.
    let trusted = run_served(&desk, "ok", &["--trust", "signer.pub"]);
    assert_eq!(trusted.status.code(), Some(2), "{trusted:?}");
}

fn a_command_that_is_interrupted_cancels_its_run_at_a_service_and_prints_the_report() {
    let desk = desk();
    let service = desk.serve(&[]);
    fs::write(desk.path("endless"), endless().program).unwrap();
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let mut command = desk.command(&["run", "--service", "socket", "--json", "endless"]);
        // Whoever runs this in the background may have it ignored, and so would we.
        // SAFETY: signal is async-signal-safe.
        unsafe {
            command.pre_exec(move || {
                libc::signal(signal, libc::SIG_DFL);
                Ok(())
            })
        };
        command.args(["--timeout", "30s"]).stdout(Stdio::piped()).stderr(Stdio::null());
        let run = command.spawn().unwrap();
        eventually("it runs", || standing(&mut service.client())["runs"]["running"] == 1);
        // SAFETY: sends a signal to a process that this test started, and has not
        // waited for.
        unsafe { libc::kill(run.id() as i32, signal) };
        let output = run.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(7), "{output:?}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["status"], "cancelled", "{report:#}");
    }
    assert_eq!(cancelled(&service), 2);
}

fn artifacts_of_a_run_at_a_service_are_written_as_of_one_without() {
    let desk = desk();
    let _service = desk.serve(&[]);
    let leaves = forge_module(
        r#"(memory (export "memory") 1) (data (i32.const 0) "../a.csvtext/csv1,2")"#,
        "(call $artifact (i32.const 0) (i32.const 8) (i32.const 8) (i32.const 8)
            (i32.const 16) (i32.const 3))",
    );
    fs::write(desk.path("leaves"), signed(&leaves)).unwrap();
    let mut expected = ["out/_a.csv", "out/2-_a.csv"].into_iter();
    for run in [run_alone, run_served] {
        let kept = run(&desk, "leaves", &["--json", "--artifacts", "out"]);
        assert_eq!(kept.status.code(), Some(0), "{kept:?}");
        let report: Value = serde_json::from_slice(&kept.stdout).unwrap();
        let path = expected.next().unwrap();
        assert_eq!(report["artifacts"][0]["path"], path, "{report:#}");
        assert_eq!(fs::read(desk.path(path)).unwrap(), b"1,2");

        let lost = run(&desk, "leaves", &[]);
        let said = String::from_utf8_lossy(&lost.stderr);
        assert!(said.contains("artifacts not kept: 1; --artifacts DIR"), "{said}");
        // Where they cannot be, nothing runs.
        let nowhere = run(&desk, "leaves", &["--artifacts", "signer.pub"]);
        assert_eq!(nowhere.status.code(), Some(2), "{nowhere:?}");
    }
}

fn several_clients_are_served_at_once() {
    let desk = desk();
    let service = desk.serve(&["--ready", "2", "--ready-max", "4"]);
    // One that never ends stands in nobody's way.
    let waiting = leaving_client(&service, &endless());
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let service = &service;
            scope.spawn(move || {
                let mut client = service.client();
                for turn in 0..5 {
                    let input = format!("[{thread}, {turn}]");
                    let report = run(&mut client, &submit(ECHO, &input));
                    assert_eq!(report["output"], input.as_str(), "{report:#}");
                }
            });
        }
    });
    drop(waiting);
}

fn one_connection_carries_many_runs() {
    let desk = desk();
    let service = desk.serve(&["--reuse", "reset", "--prove-one-in", "1"]);
    let mut client = service.client();
    for turn in 0..20 {
        let input = format!("[{turn}]");
        let submit = Order { principal: "somebody".into(), ..submit(ECHO, &input) };
        let report = run(&mut client, &submit);
        assert_eq!(report["output"], input.as_str(), "{report:#}");
        assert_eq!(report["vm"], if turn == 0 { "fresh" } else { "reset" }, "{report:#}");
    }
}

// Clients that leave, and strangers

fn a_client_that_leaves_takes_its_run_with_it() {
    let desk = desk();
    for prepare in [false, true] {
        // No worker but those that run.
        let more: &[&str] =
            if prepare { &["--reuse", "reset"] } else { &["--ready", "0", "--ready-max", "0"] };
        let service = desk.serve(more);
        service.serves();
        let others = if prepare { 3 } else { 0 };
        eventually("no run goes on", || service.workers().len() == others);
        let before = service.workers();
        let client = leaving_client(&service, &Order { prepare, ..endless() });
        let mut its = Vec::new();
        // One that is being made is busy as well, for a while.
        eventually("its run is carried out", || {
            its = service.workers().into_iter().filter(|pid| is_busy(*pid)).collect();
            its.len() == 1 && is_busy(its[0])
        });
        drop(client);
        eventually("it is cancelled", || cancelled(&service) == 1);
        for pid in its {
            eventually("its worker is gone", || is_gone(pid));
        }
        if !prepare {
            // One that has ended is there until its zygote has looked at it.
            eventually("no other worker was made for it", || service.workers() == before);
        }
        service.serves();
    }
}

fn strangers_do_no_harm() {
    let desk = desk();
    let service = desk.serve(&[]);
    // One that says nothing, for as long as all of this takes.
    let silent = UnixStream::connect(&service.socket).unwrap();

    let mut http = UnixStream::connect(&service.socket).unwrap();
    http.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    assert!(is_closed(&http));
    let mut zeros = UnixStream::connect(&service.socket).unwrap();
    let _ = zeros.write_all(&[0; 100_000]);
    assert!(is_closed(&zeros));

    // A hello of another version, of another role, of nobody.
    let ours = Hello::ours(Role::Client);
    let later = Hello { version_min: 900, version_max: 901, ..ours };
    for hello in [later, Hello::ours(Role::Broker), Hello { magic: *b"none", ..ours }] {
        let mut link = stranger(&service);
        send(&mut link, Kind::Hello, &hello);
        let frame = link.receive(|kind| kind == Kind::Refuse, patience()).unwrap();
        let Refusal(theirs) = codec::decode(&frame.payload).unwrap();
        assert_eq!(theirs, Hello::ours(Role::Supervisor));
        assert!(is_closed(link.socket()), "{hello:?}");
    }

    // After a good hello: what is no submission, one too large to be true, one
    // that breaks off.
    let mut nonsense = vec![0; HEADER_BYTES];
    nonsense.extend_from_slice(&[0xff; 64]);
    let header = Header { kind: Kind::Submit, payload_bytes: 64 };
    nonsense[..HEADER_BYTES].copy_from_slice(&header.to_bytes());
    let mut wrong_kind = Vec::new();
    frame::write_message(Kind::Hello, &ours, &mut wrong_kind);
    let huge = Header { kind: Kind::Submit, payload_bytes: u32::MAX }.to_bytes().to_vec();
    for bytes in [nonsense, wrong_kind, huge] {
        let mut link = stranger(&service);
        send(&mut link, Kind::Hello, &ours);
        link.send(&bytes, patience()).unwrap();
        assert!(is_closed(link.socket()), "{bytes:?}");
    }
    let mut half = Vec::new();
    frame::write_message(Kind::Submit, &submit(ECHO, "1"), &mut half);
    let mut link = stranger(&service);
    send(&mut link, Kind::Hello, &ours);
    link.send(&half[..half.len() / 2], patience()).unwrap();
    drop(link);

    service.serves();
    drop(silent);
    service.serves();
}

// Several things at once on one connection

fn several_runs_go_on_at_once_on_one_connection() {
    let desk = desk();
    let service = desk.serve(&[]);
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        // Two that never end are under way while others come and go.
        let endless = [client.submit(&endless()).await, client.submit(&endless()).await];
        let runs = |turn: u32| {
            let client = client.clone();
            async move {
                let input = format!("[{turn}]");
                let finish = client.run(&submit(ECHO, &input)).await.unwrap();
                assert_eq!(report(&finish)["output"], input.as_str());
            }
        };
        let runs: Vec<_> = (0..6).map(|turn| tokio::spawn(runs(turn))).collect();
        for run in runs {
            run.await.unwrap();
        }
        stands(&client, "two run", |status| status["runs"]["running"] == 2).await;
        for run in endless {
            let run = run.unwrap();
            run.canceller().cancel().await;
            assert_eq!(report(&run.finish().await.unwrap())["status"], "cancelled");
        }
    });
}

fn a_cancelled_run_says_so_and_the_others_go_on() {
    let desk = desk();
    let service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let first = client.submit(&endless()).await.unwrap();
        let second = client.submit(&endless()).await.unwrap();
        eventually("both run", || service.workers().len() == 2);
        first.canceller().cancel().await;
        let report = report(&first.finish().await.unwrap());
        assert_eq!(
            (&report["status"], &report["kind"]),
            (&"cancelled".into(), &"cancelled".into())
        );
        eventually("its worker is gone", || service.workers().len() == 1);
        stands(&client, "the other runs", |status| status["runs"]["running"] == 1).await;
        // One that is over, and one that never was.
        second.canceller().cancel().await;
        second.canceller().cancel().await;
        second.finish().await.unwrap();
    });
    service.serves();
}

fn a_dropped_run_is_cancelled() {
    let desk = desk();
    let service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        drop(client.submit(&endless()).await.unwrap());
        stands(&client, "it is cancelled", |status| {
            status["runs"]["ended"]["cancelled"] == 1 && status["runs"]["running"] == 0
        })
        .await;
    });
}

/// How many runs were cancelled, rather than ended by their deadline.
fn cancelled(service: &Service) -> u64 {
    standing(&mut service.client())["runs"]["ended"]["cancelled"].as_u64().unwrap_or(0)
}

fn a_number_in_use_ends_the_connection() {
    let desk = desk();
    let service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    for (before, kind) in [Kind::Submit, Kind::Query].into_iter().enumerate() {
        let mut link = leaving_client(&service, &endless());
        eventually("it runs", || !service.workers().is_empty());
        match kind {
            Kind::Submit => send(&mut link, kind, &Submit { number: 1, order: endless() }),
            _ => send(&mut link, kind, &Query { number: 1, question: Question::Status }),
        }
        assert!(is_closed(link.socket()), "{kind:?}");
        eventually("its run is gone with it", || service.workers().is_empty());
        eventually("it is cancelled", || cancelled(&service) == before as u64 + 1);
    }
    service.serves();
}

fn questions_that_wait_are_bounded_and_hold_up_no_run() {
    let desk = desk();
    let stuck = r#"{"mcpServers": {"stuck": {"command": "/bin/sleep", "args": ["60"]}}}"#;
    desk.write("mcp.json", stuck);
    let service = desk.serve(&["--mcp-config", "mcp.json"]);
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let of = |principal: &str| {
            let (client, principal) = (client.clone(), principal.to_owned());
            async move { client.ask(Question::ListTools { principal }).await }
        };
        let mut asked: tokio::task::JoinSet<_> = (0..17).map(|_| of("flooding")).collect();
        let first = asked.join_next().await.unwrap().unwrap();
        assert!(
            matches!(first, Err(ClientError::Refused { kind: RefusalKind::Overloaded, .. })),
            "{first:?}"
        );
        // The others wait for the server, as another's does.
        let others = tokio::time::timeout(Duration::from_millis(200), of("quiet")).await;
        assert!(others.is_err() && asked.try_join_next().is_none(), "{others:?}");
        let run = client.submit(&submit(ECHO, "1")).await.unwrap();
        assert_eq!(report(&run.finish().await.unwrap())["output"], "1");
        // Whoever gives up leaves its place, and is waited for by nobody.
        drop(asked);
        let until = Instant::now() + Duration::from_secs(10);
        while tokio::time::timeout(Duration::from_millis(200), of("flooding")).await.is_ok() {
            assert!(Instant::now() < until, "questions that were given up keep their places");
        }
    });
}

fn questions_are_answered_while_runs_go_on() {
    let desk = desk();
    let service = desk.serve(&[]);
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let run = client.submit(&endless()).await.unwrap();
        let principal = || "somebody".to_owned();
        let asked = client.ask(Question::ListTools { principal: principal() }).await.unwrap();
        let Reply::Tools { tools, .. } = asked else { panic!("{asked:?}") };
        assert!(tools.iter().any(|tool| tool.spec.name.as_str() == "crypto.hash"));
        let intent = "the digest of a text".to_owned();
        let search = Question::SearchTools { principal: principal(), intent, k: 3 };
        let asked = client.ask(search).await.unwrap();
        let Reply::Found { tools, .. } = asked else { panic!("{asked:?}") };
        assert_eq!(tools[0].spec.name.as_str(), "crypto.hash");

        let hash = ToolName::parse("crypto.hash").unwrap();
        let asked = client
            .ask(Question::IssueGrant(GrantRequest {
                principal: principal(),
                tools: vec![hash.clone()],
                constraints: Vec::new(),
                valid_s: 60,
                calls_max: Some(7),
                cost_max: None,
                session: None,
            }))
            .await
            .unwrap();
        let Reply::Grant(token) = asked else { panic!("{asked:?}") };
        let narrowing = Narrowing { token, calls_max: Some(2), ..Narrowing::default() };
        let asked = client.ask(Question::AttenuateGrant(narrowing)).await.unwrap();
        let Reply::Grant(token) = asked else { panic!("{asked:?}") };
        let asked = client.ask(Question::InspectGrant { token }).await.unwrap();
        let Reply::Claims(claims) = asked else { panic!("{asked:?}") };
        assert_eq!((claims.tools[0].name.clone(), claims.calls_max), (hash, Some(2)));
        let forged = client.ask(Question::InspectGrant { token: vec![1, 2, 3] }).await.unwrap_err();
        assert!(matches!(forged, ClientError::Refused { kind: RefusalKind::BadGrant, .. }));

        let asked = client.ask(Question::Metrics).await.unwrap();
        let Reply::Metrics(text) = asked else { panic!("{asked:?}") };
        assert!(text.lines().any(|line| line == "forge_service_runs_running 1"), "{text}");
        assert!(text.contains("forge_journal_records_total"), "the broker's are there too: {text}");
        run.canceller().cancel().await;
        run.finish().await.unwrap();
    });
}

fn a_watched_service_tells_latencies_pool_and_principals() {
    let desk = desk();
    let service = desk.serve(&["--ready", "1", "--ready-max", "3"]);
    for _ in 0..3 {
        service.serves();
    }
    // Refused, and no run that took any time.
    let order = Order { program: b"no program".to_vec(), ..submit(ECHO, "[1]") };
    assert_eq!(run(&mut service.client(), &order)["status"], "rejected");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let endless = client.submit(&endless()).await.unwrap();
        stands(&client, "one runs", |status| status["runs"]["running"] == 1).await;
        stands(&client, "one stands ready", |status| status["pool"]["standing"] == 1).await;
        let told = status(&client).await;
        assert_eq!(told["latency"]["since_start"]["runs"], 3, "{told:#}");
        let (p50, p99) =
            (&told["latency"]["since_start"]["p50_us"], &told["latency"]["since_start"]["p99_us"]);
        assert!(p50.as_u64().unwrap() > 0 && p50.as_u64() <= p99.as_u64(), "{told:#}");
        assert_eq!(told["principals"][0]["running"], 1, "{told:#}");
        // Where nobody watches there is one frame, and nothing for terminals.
        let top = desk.forge(&["top", "--service", "socket"]);
        assert!(top.status.success(), "{top:?}");
        let frame = String::from_utf8(top.stdout).unwrap();
        assert!(
            frame.contains("1 of ") && frame.contains("since the start          3 "),
            "{frame}"
        );
        let name = told["principals"][0]["name"].as_str().unwrap();
        assert!(frame.contains(name) && !frame.contains('\u{1b}'), "{frame}");
        endless.canceller().cancel().await;
        endless.finish().await.unwrap();
    });
    drop(service);
    let gone = desk.forge(&["top", "--service", "socket"]);
    assert_eq!(gone.status.code(), Some(2));
}

fn status_is_short_for_a_person_and_whole_with_json() {
    let desk = desk();
    let service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    let status = |more: &[&str]| {
        let asked = desk.forge(&[&["status", "--service", "socket"], more].concat());
        assert!(asked.status.success(), "{asked:?}");
        String::from_utf8(asked.stdout).unwrap()
    };
    let whole: Value = serde_json::from_str(&status(&["--json"])).unwrap();
    let text = status(&[]);
    for part in [
        "serving at socket".to_owned(),
        format!("process {}, up", whole["pid"]),
        format!("0 of {} running", whole["bounds"]["runs_max"]),
        format!("broker   process {}", whole["broker"]["pid"]),
        "programs isolation vm".into(),
    ] {
        assert!(text.contains(&part), "{part}\n{text}");
    }
    assert!(!text.contains(['{', '"', '[']) && !text.contains("null"), "{text}");
    drop(service);
}

fn a_question_too_large_for_the_toolbroker_is_refused() {
    let desk = desk();
    let service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    let mut client = service.client();
    // As much as one frame can bear: the broker's own frame would be larger.
    let mut token = vec![7; Kind::Query.payload_bytes_max() as usize - 8];
    let question = Question::InspectGrant { token: token.clone() };
    let refused = client.ask(question).unwrap_err();
    assert!(matches!(refused, ClientError::Refused { .. }), "{refused}");
    token.resize(2 * 1024 * 1024, 7);
    let order = Order { authority: Authority::Grant(token), ..submit(ECHO, "1") };
    let report = run(&mut client, &order);
    assert_eq!((&report["status"], &report["kind"]), (&"rejected".into(), &"bad_request".into()));
    service.serves();
}

/// Writes its input four times, a megabyte each.
const LOUD: &str = "(drop (call $input_read (i32.const 0) (i32.const 0) (call $input_len)))
    (drop (call $output (i32.const 0) (call $input_len)))
    (drop (call $output (i32.const 0) (call $input_len)))
    (drop (call $output (i32.const 0) (call $input_len)))
    (i32.const 0)";

fn a_client_that_reads_nothing_holds_up_nobody() {
    let desk = desk();
    let service = desk.serve(&[]);
    let mut deaf = stranger(&service);
    send(&mut deaf, Kind::Hello, &Hello::ours(Role::Client));
    let input = format!("\"{}\"", "x".repeat(900_000));
    let maxima = RunLimits::operator_maxima();
    let limits = RunLimits {
        memory_bytes: 4 << 20,
        output_bytes: maxima.output_bytes,
        ..submit(ECHO, "1").limits
    };
    let wat = forge_module(r#"(memory (export "memory") 20)"#, LOUD);
    let order = Order { program: signed(&wat), limits, ..submit(ECHO, &input) };
    for number in 0..4 {
        send(&mut deaf, Kind::Submit, &Submit { number, order: order.clone() });
    }
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        stands(&client, "its runs are over", |status| {
            status["runs"]["ended"]["ok"] == 4 && status["runs"]["running"] == 0
        })
        .await;
    });
    // The ends of its runs wait for it, and for nobody else.
    service.serves();
    // It was not cut off for that: it still hears all of them.
    for _ in 0..4 {
        deaf.receive(|kind| kind == Kind::Finished, patience()).unwrap();
    }
    drop(deaf);
    service.serves();
}

fn a_client_that_takes_no_answer_has_no_thread_for_each() {
    const ASKED: u64 = 600;
    let desk = desk();
    let service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    let mut deaf = stranger(&service);
    send(&mut deaf, Kind::Hello, &Hello::ours(Role::Client));
    let mut bytes = Vec::new();
    for number in 0..ASKED {
        let query = Query { number, question: Question::Status };
        frame::write_message(Kind::Query, &query, &mut bytes);
    }
    deaf.send(&bytes, patience()).unwrap();
    let mut client = service.client();
    let mut before = 0;
    eventually("no more of it is read", || {
        let threads = standing(&mut client)["threads"].as_u64().unwrap();
        std::thread::sleep(Duration::from_millis(300));
        threads > 8 && threads == std::mem::replace(&mut before, threads)
    });
    assert!(before < 100, "{before} threads");
    // It still hears all of them.
    for _ in 0..ASKED {
        let frame = deaf.receive(|kind| kind == Kind::Answered, patience()).unwrap();
        let Answered { reply, .. } = codec::decode(&frame.payload).unwrap();
        assert!(matches!(reply, Reply::Status(_)), "{reply:?}");
    }
}

/// How often a connection was handed to a thread that did not read it.
fn handovers(client: &mut Client) -> u64 {
    standing(client)["handovers"].as_u64().unwrap()
}

fn runs_one_after_another_wake_no_second_thread() {
    let desk = desk();
    let service = desk.serve(&["--reuse", "reset"]);
    let mut client = service.client();
    run(&mut client, &submit(ECHO, "0"));
    let before = handovers(&mut client);
    for turn in 0..50 {
        run(&mut client, &submit(ECHO, &turn.to_string()));
    }
    let handed = handovers(&mut client) - before;
    // One for each time that this process was kept waiting for a second, or
    // that the service's was before it could read on.
    assert!(handed < 40, "{handed} hand-overs for 50 runs");
}

fn a_frame_that_comes_drop_by_drop_holds_no_thread() {
    let desk = desk();
    let service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    let mut dripping = stranger(&service);
    send(&mut dripping, Kind::Hello, &Hello::ours(Role::Client));
    let input = format!("\"{}\"", "x".repeat(100_000));
    let order = Order {
        limits: RunLimits { memory_bytes: 4 << 20, ..submit(ECHO, "1").limits },
        program: signed(&forge_module(r#"(memory (export "memory") 4)"#, ECHO)),
        ..submit(ECHO, &input)
    };
    let mut bytes = Vec::new();
    frame::write_message(Kind::Submit, &Submit { number: 1, order }, &mut bytes);
    let mut client = service.client();
    let before = handovers(&mut client);
    let mut drops = bytes.chunks(1);
    // A thread that went on to wait for the next drop would not be handed it.
    eventually("each drop is handed to a thread", || {
        dripping.send(drops.next().unwrap(), patience()).unwrap();
        handovers(&mut client) - before >= 30
    });
    // Nothing of it was lost on the way.
    dripping.send(&drops.flatten().copied().collect::<Vec<_>>(), patience()).unwrap();
    let frame = dripping.receive(|kind| kind == Kind::Finished, patience()).unwrap();
    let Finished { number, report, .. } = codec::decode(&frame.payload).unwrap();
    let report: Value = serde_json::from_slice(&report).unwrap();
    assert_eq!((number, &report["output"]), (1, &input.as_str().into()));
}

// Bounds

fn a_flood_is_refused_at_once_and_a_second_principal_is_served() {
    let desk = desk();
    // Three of the four places, as six of the eight.
    let config = "[service]\nruns_max = 4\nqueue_max = 4\nqueue_wait_ms = 3600000\n\
                  principal_runs_max = 6\n[principals.small]\nruns_max = 1\n";
    fs::write(desk.path("forge.toml"), config).unwrap();
    let service = desk.serve(&["--config", "forge.toml", "--ready", "0", "--ready-max", "0"]);
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let of = |principal: &str, order: Order| Order { principal: principal.into(), ..order };
        let are = |running: usize, waiting: usize| {
            move |status: &Value| {
                status["runs"]["running"] == running && status["runs"]["waiting"] == waiting
            }
        };
        let mut held = Vec::new();
        for _ in 0..6 {
            held.push(client.submit(&of("flood", endless())).await.unwrap());
        }
        stands(&client, "three run and three wait", are(3, 3)).await;
        for _ in 0..30 {
            let report = report(&client.run(&of("flood", endless())).await.unwrap());
            assert_eq!(report["status"], "refused", "{report:#}");
            assert_eq!(report["kind"], "too_many_runs", "{report:#}");
            assert!(report["retry_after_ms"].as_u64().unwrap() >= 1, "{report:#}");
        }
        // Another has its place at once, however many wait.
        let other = report(&client.run(&of("other", submit(ECHO, "[1]"))).await.unwrap());
        assert_eq!(other["output"], "[1]", "{other:#}");
        // Where none is left it waits for the next, and gets it.
        let last = client.submit(&of("last", endless())).await.unwrap();
        stands(&client, "all places are taken", are(4, 3)).await;
        let other = client.submit(&of("other", submit(ECHO, "[2]"))).await.unwrap();
        stands(&client, "it waits", are(4, 4)).await;
        // So does a third where as many wait as may: the flood's newest gives way.
        let third = client.submit(&of("third", submit(ECHO, "[3]"))).await.unwrap();
        let newest = report(&held.pop().unwrap().finish().await.unwrap());
        assert_eq!((&newest["status"], &newest["kind"]), (&"refused".into(), &"overloaded".into()));
        assert!(newest["retry_after_ms"].as_u64().unwrap() >= 1, "{newest:#}");
        last.canceller().cancel().await;
        assert_eq!(report(&other.finish().await.unwrap())["output"], "[2]");
        assert_eq!(report(&third.finish().await.unwrap())["output"], "[3]");
        // One that waits can be cancelled.
        let last = client.submit(&of("last", endless())).await.unwrap();
        stands(&client, "all places are taken again", are(4, 2)).await;
        let waits = client.submit(&of("small", submit(ECHO, "1"))).await.unwrap();
        stands(&client, "it waits", are(4, 3)).await;
        let small = report(&client.run(&of("small", submit(ECHO, "1"))).await.unwrap());
        assert_eq!(small["kind"], "too_many_runs", "its own limit is 1");
        waits.canceller().cancel().await;
        assert_eq!(report(&waits.finish().await.unwrap())["status"], "cancelled");
        drop((held, last));
    });
}

fn where_nobody_set_a_bound_a_flood_of_long_runs_leaves_places_to_others() {
    let desk = desk();
    let (toml, _) = test_server(&desk);
    fs::write(desk.path("forge.toml"), toml).unwrap();
    let service = desk.serve(&["--config", "forge.toml"]);
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let of = |principal: &str, order: Order| Order { principal: principal.into(), ..order };
        let bound = |status: &Value, name: &str| status["bounds"][name].as_u64().unwrap();
        let bounds = status(&client).await;
        let (places, all) = (bound(&bounds, "runs_max"), bound(&bounds, "principal_runs_max"));
        let mut held = Vec::new();
        for _ in 0..all {
            held.push(client.submit(&of("flood", three_in_flight())).await.unwrap());
        }
        let reached = |status: &Value| status["runs"]["running"].as_u64() >= Some(places * 3 / 4);
        stands(&client, "the flood has what it may have", reached).await;
        for at in 0..10 {
            let input = format!("[{at}]");
            let other = report(&client.run(&of("other", submit(ECHO, &input))).await.unwrap());
            assert_eq!(other["output"], input.as_str(), "{other:#}");
        }
        drop(held);
    });
}

// Tools

fn the_tools_of_a_cancelled_run_hear_of_it() {
    let desk = desk();
    let (toml, log) = test_server(&desk);
    fs::write(desk.path("forge.toml"), toml).unwrap();
    let service = desk.serve(&["--config", "forge.toml"]);
    let order = three_in_flight();
    let logged = |line: &str| lines(&log, line);
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let run = client.submit(&order).await.unwrap();
        eventually("three calls are in flight", || logged("never") == 3);
        run.canceller().cancel().await;
        let report = report(&run.finish().await.unwrap());
        assert_eq!(report["status"], "cancelled", "{report:#}");
        let calls = report["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 3, "{report:#}");
        for (id, call) in calls.iter().enumerate() {
            assert_eq!((&call["id"], &call["tool"]), (&id.into(), &"test.never".into()));
            assert_eq!(call["status"], "unsettled", "{report:#}");
        }
        eventually("its tools heard of it", || logged("never cancelled") == 3);
        // So it is where the client leaves.
        let again = client.submit(&order).await.unwrap();
        eventually("three more are in flight", || logged("never") == 6);
        drop((again, client));
        eventually("these heard of it too", || logged("never cancelled") == 6);
    });
    eventually("both were cancelled", || cancelled(&service) == 2);
    service.serves();
}

fn a_run_that_is_being_opened_is_cancelled_without_the_broker() {
    let desk = desk();
    // A server that never says what its tools are.
    let toml = "[servers.test]\ncommand = '/bin/sleep'\nargs = ['1000']\n";
    fs::write(desk.path("forge.toml"), toml).unwrap();
    let service = desk.serve(&["--config", "forge.toml"]);
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        // The first reads the broker's link for both.
        let first = client.submit(&three_in_flight()).await.unwrap();
        let second = client.submit(&three_in_flight()).await.unwrap();
        stands(&client, "both are being opened", |status| status["runs"]["running"] == 2).await;
        for run in [second, first] {
            run.canceller().cancel().await;
            let report = report(&run.finish().await.unwrap());
            assert_eq!(report["status"], "cancelled", "{report:#}");
        }
        stands(&client, "both are over", |status| status["runs"]["running"] == 0).await;
    });
    service.serves();
}

/// Calls `test.slow` with its input, and outputs the answer.
fn slow(ms: u64) -> Order {
    let wat = forge_module(
        r#"(memory (export "memory") 1) (data (i32.const 0) "test.slow")"#,
        "(local $code i32)
         (drop (call $input_read (i32.const 512) (i32.const 0) (call $input_len)))
         (local.set $code (call $call (i32.const 0) (i32.const 9)
             (i32.const 512) (call $input_len)))
         (drop (call $output (i32.const 1024)
             (call $resp_read (i32.const 1024) (i32.const 0) (call $resp_len))))
         (select (i32.const 0) (i32.const 1) (i32.ge_s (local.get $code) (i32.const 0)))",
    );
    let tool = ToolName::parse("test.slow").unwrap();
    let (program, authority) = (signed(&wat), Authority::Tools(vec![tool]));
    Order { program, authority, ..submit(ECHO, &format!("{{\"ms\":{ms}}}")) }
}

/// `FORGE_OVERLOAD_SECONDS` says how long (2; 60 by explicit command).
fn ten_times_what_there_is_room_for_is_refused_by_kind_and_others_are_served() {
    const ROOM: usize = 8;
    let seconds = std::env::var("FORGE_OVERLOAD_SECONDS");
    let seconds = seconds.map_or(2, |text| text.parse().unwrap());
    let desk = desk();
    let (toml, _) = test_server(&desk);
    // Who is refused is refused at once: nobody's wait in the queue ends here.
    let config = "[service]\nruns_max = 4\nqueue_max = 4\nqueue_wait_ms = 3600000\n\
                  principal_runs_max = 7\n";
    fs::write(desk.path("forge.toml"), format!("{config}{toml}")).unwrap();
    let service = desk.serve(&["--config", "forge.toml", "--reuse", "reset"]);
    let memory = |pid: i32| Process::of(pid).unwrap().anonymous_kib;
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let pids = [service.child.id() as i32, broker_pid(&status(&client).await).unwrap()];
        let until = Instant::now() + Duration::from_secs(seconds);
        let flood = |number: usize| {
            let client = client.clone();
            tokio::spawn(async move {
                let ms = 15 + number as u64 % 10;
                let order = Order { principal: "flood".into(), ..slow(ms) };
                let (mut admitted, mut refused) = (0, 0);
                while Instant::now() < until {
                    let report = report(&client.run(&order).await.unwrap());
                    match (report["status"].as_str().unwrap(), report["kind"].as_str().unwrap()) {
                        ("ok", _) => {
                            let output = report["output"].as_str().unwrap();
                            assert!(output.contains(&format!("{ms} ms")), "{report:#}");
                            admitted += 1;
                        }
                        ("refused", "too_many_runs" | "overloaded") => {
                            refused += 1;
                            let again = report["retry_after_ms"].as_u64().unwrap();
                            assert!(again > 0, "{report:#}");
                            tokio::time::sleep(Duration::from_millis(again)).await;
                        }
                        _ => panic!("{report:#}"),
                    }
                }
                (admitted, refused)
            })
        };
        let floods: Vec<_> = (0..10 * ROOM).map(flood).collect();
        let (mut served, mut early) = (0, None);
        while Instant::now() < until {
            let input = format!("[{served}]");
            let order = Order { principal: "second".into(), ..submit(ECHO, &input) };
            let report = report(&client.run(&order).await.unwrap());
            assert_eq!(report["output"], input.as_str(), "it is never refused: {report:#}");
            served += 1;
            // By then all there is to make has been made.
            if early.is_none() && Instant::now() + Duration::from_secs(seconds) / 2 > until {
                early = Some(pids.map(memory));
            }
        }
        let (mut admitted, mut refused) = (0, 0);
        for flood in floods {
            let (ran, turned_away) = flood.await.unwrap();
            admitted += ran;
            refused += turned_away;
        }
        let late = pids.map(memory);
        eprintln!(
            "{seconds} s: {admitted} admitted, {refused} refused, {served} of the second tenant; \
             service and broker {early:?} KiB, {late:?} after"
        );
        assert!(admitted > 0 && refused > 0 && served > 0);
        for (early, late) in early.into_iter().flatten().zip(late) {
            assert!(late < early + 16 * 1024, "memory grows: {early} KiB, then {late} KiB");
        }
    });
}

fn a_lost_workers_calls_are_in_the_report_and_their_tools_hear_of_it() {
    let desk = desk();
    let (toml, log) = test_server(&desk);
    fs::write(desk.path("forge.toml"), toml).unwrap();
    let service = desk.serve(&["--config", "forge.toml", "--ready", "0", "--ready-max", "0"]);
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        let run = client.submit(&three_in_flight()).await.unwrap();
        eventually("three calls are in flight", || lines(&log, "never") == 3);
        let workers = service.workers();
        assert_eq!(workers.len(), 1);
        kill(workers[0]);
        let lost = report(&run.finish().await.unwrap());
        assert_eq!((&lost["status"], &lost["kind"]), (&"internal".into(), &"worker_lost".into()));
        let calls = lost["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 3, "{lost:#}");
        assert!(calls.iter().all(|call| call["status"] == "unsettled"), "{lost:#}");
        eventually("their tools hear of it", || lines(&log, "never cancelled") == 3);
    });
}

// Whose runs

/// Connects as another user, in a thread that is that user's.
fn connect_as(uid: u32, socket: &std::path::Path) -> Option<UnixStream> {
    std::thread::scope(|scope| {
        let connected = scope.spawn(|| {
            // SAFETY: changes this thread's effective user alone, which ends
            // with it.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) };
            (changed == 0).then(|| UnixStream::connect(socket).unwrap())
        });
        connected.join().unwrap()
    })
}

/// What somebody asked of idle CPUs, in the order in which it was asked.
fn asked(of: &Path) -> Vec<i32> {
    let bytes = fs::read(of).unwrap();
    bytes.chunks_exact(4).map(|us| i32::from_ne_bytes(us.try_into().unwrap())).collect()
}

/// A service that finds this file where the kernel is asked for ready CPUs.
fn serve_asking(desk: &Desk, file: &Path, more: &[&str]) -> Service {
    fs::write(file, "").unwrap();
    let file = CString::new(file.as_os_str().as_bytes()).unwrap();
    let mut command = desk.serves(more);
    let mount = move |what: &CStr, at: &CStr, flags| {
        let none = std::ptr::null();
        // SAFETY: C strings, and two that are not there.
        match unsafe { libc::mount(what.as_ptr(), at.as_ptr(), none, flags, none.cast()) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: system calls on memory that was allocated before the fork.
    unsafe {
        command.pre_exec(move || {
            if libc::unshare(libc::CLONE_NEWNS) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            mount(c"none", c"/", libc::MS_REC | libc::MS_PRIVATE)?;
            mount(&file, c"/dev/cpu_dma_latency", libc::MS_BIND)
        });
    }
    Service::listening(command.spawn().unwrap(), desk.socket())
}

fn a_service_holds_idle_cpus_ready_while_runs_come() {
    let bound_us = match CpuLatency::open() {
        Ok(latency) => latency.bound_us(),
        Err(why) => {
            eprintln!("SKIPPED: {why}");
            return;
        }
    };
    // SAFETY: takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: only root can show a service another device");
        return;
    }
    let desk = desk();
    let file = desk.path("asked");
    let service = serve_asking(&desk, &file, &[]);
    let any = asked(&file);
    assert!(matches!(any[..], [any_us] if any_us > 1_000_000), "before a run: {any:?}");
    for runs in 1..=2 {
        service.serves();
        eventually("idle CPUs are left alone after a run", || asked(&file).len() == 1 + 2 * runs);
        let [.., held, left] = asked(&file)[..] else { unreachable!() };
        assert_eq!((held, left), (bound_us, any[0]));
    }
    drop(service);
    fs::write(desk.path("forge.toml"), "[service]\npm_qos = false\n").unwrap();
    let service = serve_asking(&desk, &file, &["--config", "forge.toml"]);
    service.serves();
    assert_eq!(asked(&file), any, "nothing is asked for where that is configured");
}

fn another_user_speaks_for_its_principal_alone() {
    // SAFETY: takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: only root can connect as another user");
        return;
    }
    let desk = desk();
    let config = "[service]\nmode = '0666'\n[principals.ci]\nuids = [61001]\n";
    fs::write(desk.path("forge.toml"), config).unwrap();
    let service = desk.serve(&["--config", "forge.toml"]);
    assert_eq!(fs::metadata(desk.socket()).unwrap().permissions().mode() & 0o777, 0o666);
    let nobody = connect_as(61002, &service.socket).unwrap();
    // Who speaks for nobody hears so, once.
    let mut stranger = Client::over(nobody.try_clone().unwrap()).unwrap();
    let refused = run(&mut stranger, &submit(ECHO, "[1]"));
    assert_eq!((&refused["status"], &refused["kind"]), (&"rejected".into(), &"forbidden".into()));
    assert!(is_closed(&nobody), "a user that speaks for nobody");
    let mut stranger = Client::over(connect_as(61002, &service.socket).unwrap()).unwrap();
    let refused = stranger.ask(Question::Status).unwrap_err();
    assert!(refused.to_string().contains("uids"), "{refused}");
    let socket = connect_as(61001, &service.socket).unwrap();
    let mut client = Client::over(socket.try_clone().unwrap()).unwrap();
    let order = Order { principal: "ci".into(), ..submit(ECHO, "[1]") };
    assert_eq!(run(&mut client, &order)["output"], "[1]");
    let refused = run(&mut client, &submit(ECHO, "[1]"));
    assert_eq!((&refused["status"], &refused["kind"]), (&"rejected".into(), &"forbidden".into()));
    for question in
        [Question::ListTools { principal: "local".into() }, Question::Drain, Question::Metrics]
    {
        let refused = client.ask(question).unwrap_err();
        assert!(
            matches!(refused, ClientError::Refused { kind: RefusalKind::Forbidden, .. }),
            "{refused}"
        );
    }
    client.ask(Question::ListTools { principal: "ci".into() }).unwrap();
    // Who else is here is the operator's to know.
    for (mut asks, told) in [(client, false), (service.client(), true)] {
        let status = standing(&mut asks);
        assert_eq!(status.get("principals").is_some(), told, "{status:#}");
    }
    // What is taken away is gone for who is here already.
    signal(&service, libc::SIGHUP);
    desk.write("forge.toml", "[service]\nmode = '0666'\n[principals.ci]\nuids = [61003]\n");
    signal(&service, libc::SIGHUP);
    assert!(is_closed(&socket), "a user that lost its principal");
    service.serves();
}

fn an_order_that_no_service_takes_is_refused_before_it_is_sent() {
    let desk = desk();
    let service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    let large = Order { input: vec![b' '; 16 << 20], ..submit(ECHO, "1") };
    let refused = |error: ClientError| match error {
        ClientError::Refused { kind: RefusalKind::BadRequest, message } => {
            assert!(message.contains("the limit is"), "{message}");
        }
        other => panic!("{other}"),
    };
    let mut client = service.client();
    refused(client.run(&large).unwrap_err());
    client.ask(Question::Status).unwrap();
    runtime().block_on(async {
        let client = forge_client::Client::connect(&service.socket).await.unwrap();
        refused(client.run(&large).await.unwrap_err());
        client.ask(Question::Status).await.unwrap();
    });
}

fn a_client_that_has_left_or_was_cut_off_takes_up_no_connection() {
    let desk = desk();
    let service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    let mut client = service.client();
    let others: Vec<_> = (0..3).map(|_| service.client()).collect();
    // With them, for a moment, whoever looked whether it listens.
    eventually("all are there", || standing(&mut client)["connections"] == 4);
    drop(others);
    eventually("those that left are gone", || standing(&mut client)["connections"] == 1);
    let mut breaks = stranger(&service);
    send(&mut breaks, Kind::Cancel, &forge_protocol::service::Cancel { number: 1 });
    assert!(is_closed(breaks.socket()), "it said no hello");
    eventually("so is who broke the protocol", || standing(&mut client)["connections"] == 1);
}

fn an_input_or_a_principal_that_is_none_is_refused_whatever_is_granted() {
    let desk = desk();
    let service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    let mut client = service.client();
    let mut refused = |order: &Order, why: &str| {
        let report = run(&mut client, order);
        let how = (&report["status"], &report["kind"]);
        assert_eq!(how, (&"rejected".into(), &"bad_request".into()), "{report:#}");
        assert!(report["reason"].as_str().unwrap().contains(why), "{report:#}");
    };
    for input in [&b""[..], b"{", b"{} {}", b"\"\xff\""] {
        refused(&Order { input: input.into(), ..submit(ECHO, "1") }, "not JSON");
    }
    for principal in ["", "a\nb", &"x".repeat(10_000)] {
        refused(&Order { principal: principal.into(), ..submit(ECHO, "1") }, "1 to 256 bytes");
    }
    assert_eq!(run(&mut client, &submit(ECHO, " null "))["output"], " null ");
}

fn a_sessions_name_that_is_none_is_refused_whatever_is_granted() {
    let desk = desk();
    let service = desk.serve(&["--ready", "0", "--ready-max", "0"]);
    let mut client = service.client();
    let mut in_session = |session: &str| {
        run(&mut client, &Order { session: Some(session.into()), ..submit(ECHO, "1") })
    };
    for session in ["", "a\nb", &"x".repeat(10_000)] {
        let report = in_session(session);
        let how = (&report["status"], &report["kind"]);
        assert_eq!(how, (&"rejected".into(), &"bad_request".into()), "{report:#}");
    }
    assert_eq!(in_session("of today")["output"], "1");
}
