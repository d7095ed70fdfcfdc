//! The test vectors of `docs/protocol.md`: each is what the code writes today,
//! and reads back as the message it was made of.

#![allow(clippy::unwrap_used, missing_docs)]

use std::fmt::Debug;
use std::fs;
use std::path::Path;

use forge_protocol::RunId;
use forge_protocol::abi::CallCode;
use forge_protocol::broker::{
    Ask, Authority, Callable, HostedTool, HostedTools, OpenRun, RefusalKind, Request,
};
use forge_protocol::codec::{self, BorrowDecode, Encode};
use forge_protocol::ending::{Ending, TrapKind};
use forge_protocol::frame::{self, HEADER_BYTES, Header, Kind};
use forge_protocol::guest::{Call, Ended, Load, Settled, Start};
use forge_protocol::handshake::{Hello, Refusal, Role};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::run::{Artifact, Log};
use forge_protocol::service::{
    Answered, Callback, CallbackSettled, Cancel, Event, Finished, Left, Order, Part, Query,
    Question, Reply, RunEvent, Submit,
};

/// A message in its frame, which is first read back.
fn frame<T>(kind: Kind, message: T) -> Vec<u8>
where
    T: Encode + for<'a> BorrowDecode<'a, ()> + PartialEq + Debug,
{
    let mut bytes = Vec::new();
    frame::write_message(kind, &message, &mut bytes);
    let (header, payload) = bytes.split_first_chunk::<HEADER_BYTES>().unwrap();
    let header = Header::from_bytes(*header).unwrap();
    assert_eq!((header.kind, header.payload_bytes as usize), (kind, payload.len()));
    assert_eq!(codec::decode::<T>(payload).unwrap(), message);
    bytes
}

fn raw(kind: Kind, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::write_raw(kind, payload, &mut bytes);
    bytes
}

fn tool(name: &str) -> ToolName {
    ToolName::parse(name).unwrap()
}

/// Name and bytes of each vector, in the order of the document.
fn vectors() -> Vec<(&'static str, Vec<u8>)> {
    let run_id = RunId([0x11; 16]);
    vec![
        ("hello-guest", frame(Kind::Hello, Hello::ours(Role::Guest))),
        ("hello-host", frame(Kind::Hello, Hello::ours(Role::Host))),
        ("refuse-broker", frame(Kind::Refuse, Refusal(Hello::ours(Role::Broker)))),
        ("load", frame(Kind::Load, Load { limits: RunLimits::default(), announce: true })),
        ("loaded", raw(Kind::Loaded, &[])),
        (
            "start",
            frame(
                Kind::Start,
                Start {
                    run_id,
                    seed: [0x22; 32],
                    start_unix_ns: 1_700_000_000_000_000_000,
                    granted: vec![tool("inventory.get_stock")],
                },
            ),
        ),
        ("input", raw(Kind::Input, b"{}")),
        (
            "call",
            frame(
                Kind::Call,
                Call { id: 0, waits: true, tool: tool("a.b"), request: b"{}".to_vec() },
            ),
        ),
        (
            "settled-response",
            frame(
                Kind::Settled,
                Settled {
                    id: 0,
                    code: None,
                    duration_ns: 70_000,
                    body: b"[1]".to_vec(),
                    redacted: false,
                },
            ),
        ),
        (
            "settled-denied",
            frame(
                Kind::Settled,
                Settled {
                    id: 300,
                    code: Some(CallCode::Denied),
                    duration_ns: 0,
                    body: Vec::new(),
                    redacted: true,
                },
            ),
        ),
        ("output", raw(Kind::Output, b"ok\n")),
        ("log", frame(Kind::Log, Log { level: 2, text: "hi".into() })),
        ("unfinished", frame(Kind::Unfinished, Log { level: 2, text: "h".into() })),
        (
            "artifact",
            frame(
                Kind::Artifact,
                Artifact {
                    name: "a.csv".into(),
                    media_type: "text/csv".into(),
                    content: b"x,y".to_vec(),
                },
            ),
        ),
        ("ended-returned", frame(Kind::Ended, ended(Ending::Returned(-1)))),
        (
            "ended-trap",
            frame(
                Kind::Ended,
                ended(Ending::Trap { kind: TrapKind::DivisionByZero, detail: "0".into() }),
            ),
        ),
        (
            "open-run",
            frame(
                Kind::Request,
                Ask {
                    id: 300,
                    request: Request::OpenRun(OpenRun {
                        run_id,
                        principal: "local".into(),
                        session: None,
                        program_sha256: [0x33; 32],
                        authority: Authority::Tools(vec![tool("a.b")]),
                        callable: Callable::These(vec![tool("a.b")]),
                        limits: RunLimits::default(),
                    }),
                },
            ),
        ),
        ("hello-client", frame(Kind::Hello, Hello::ours(Role::Client))),
        ("hello-supervisor", frame(Kind::Hello, Hello::ours(Role::Supervisor))),
        ("submit", frame(Kind::Submit, Submit { number: 300, order: order() })),
        ("event-admitted", event(RunEvent::Admitted { run_id })),
        ("event-log", event(RunEvent::Log(Log { level: 2, text: "hi".into() }))),
        ("event-output", event(RunEvent::Output(b"ok\n".to_vec()))),
        ("event-called", event(RunEvent::Called { call: 0, tool: tool("a.b") })),
        (
            "event-settled",
            event(RunEvent::Settled { call: 0, code: Some(CallCode::Denied), duration_ns: 70_000 }),
        ),
        (
            "callback",
            frame(
                Kind::Callback,
                Callback {
                    number: 300,
                    callback: 1,
                    tool: tool("app.twice"),
                    arguments: b"{}".to_vec(),
                },
            ),
        ),
        (
            "callback-settled",
            frame(
                Kind::CallbackSettled,
                CallbackSettled { number: 300, callback: 1, result: Ok(b"42".to_vec()) },
            ),
        ),
        ("cancel", frame(Kind::Cancel, Cancel { number: 300 })),
        ("part", frame(Kind::Part, Part { number: 300, artifact: 0, content: b"x,y".to_vec() })),
        (
            "finished",
            frame(
                Kind::Finished,
                Finished {
                    number: 300,
                    report: b"{}".to_vec(),
                    artifacts: vec![Left {
                        name: "a.csv".into(),
                        media_type: "text/csv".into(),
                        bytes: 3,
                    }],
                },
            ),
        ),
        (
            "query-search",
            query(Question::SearchTools {
                principal: "local".into(),
                intent: "send mail".into(),
                k: 3,
            }),
        ),
        ("query-status", query(Question::Status)),
        ("answered-status", answered(Reply::Status("{}".into()))),
        (
            "answered-refused",
            answered(Reply::Refused { kind: RefusalKind::Forbidden, message: "no".into() }),
        ),
    ]
}

fn event(what: RunEvent) -> Vec<u8> {
    frame(Kind::Event, Event { number: 300, what })
}

fn query(question: Question) -> Vec<u8> {
    frame(Kind::Query, Query { number: 8, question })
}

fn answered(reply: Reply) -> Vec<u8> {
    frame(Kind::Answered, Answered { number: 8, reply })
}

fn order() -> Order {
    Order {
        program: b"\0asm".to_vec(),
        input: b"{}".to_vec(),
        principal: "local".into(),
        session: None,
        authority: Authority::Tools(vec![tool("a.b")]),
        limits: RunLimits::default(),
        prepare: false,
        events: true,
        hosted: Some(HostedTools {
            server: "app".into(),
            tools: vec![HostedTool {
                name: "twice".into(),
                description: "Doubles.".into(),
                input_schema: "{}".into(),
                output_schema: None,
            }],
        }),
    }
}

fn ended(ending: Ending) -> Ended {
    Ended {
        ending,
        fuel_used: 1000,
        memory_peak_bytes: 65_536,
        logs_dropped: 0,
        load_ticks: 5,
        run_ticks: 7,
    }
}

/// The fenced block of the document that begins with `vectors`.
fn documented() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/protocol.md");
    let text = fs::read_to_string(path).unwrap();
    let (_, rest) = text.split_once("```vectors\n").expect("docs/protocol.md has no vectors");
    rest.split_once("```").unwrap().0.to_owned()
}

/// Sixteen bytes to a line, the name above them.
fn written(vectors: &[(&str, Vec<u8>)]) -> String {
    let mut text = String::new();
    for (name, bytes) in vectors {
        text += &format!("{name}\n");
        for line in bytes.chunks(16) {
            let bytes: Vec<String> = line.iter().map(|byte| format!("{byte:02x}")).collect();
            text += &format!("  {}\n", bytes.join(" "));
        }
    }
    text
}

#[test]
fn the_documents_vectors_are_what_the_code_writes() {
    let expected = written(&vectors());
    assert!(documented() == expected, "docs/protocol.md should hold these vectors:\n{expected}");
}
