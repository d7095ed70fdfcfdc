//! Tool calls: what the broker adds to one, by the tool's effect, and what it
//! takes to say whether one is allowed.
//!
//! The tools are the broker's own and do as good as nothing, so that what is
//! measured is the way there and back, the chain of checks and the journal:
//! a call without effect waits for nobody, one that reads for no disk, and
//! one that writes until its intent is on the disk. Deliberately absent is a
//! tool server: what it adds is its own.

use std::time::{Duration, Instant};

use forge_protocol::RunId;
use forge_protocol::broker::{Authority, Callable, GrantRequest, OpenRun, Reply, Request};
use forge_protocol::codec;
use forge_protocol::ending::RunEnd;
use forge_protocol::frame::{self, Kind};
use forge_protocol::guest::{Call, Settled};
use forge_protocol::hex::hex;
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;

use super::cases::{RESET, quiet, request};
use super::fixture::{self, PRINCIPAL};
use super::program::Program;
use super::{Case, Entry, Formula, Measure, said};
use crate::broker::Broker;
use crate::link::{Link, Patience};
use crate::supervisor::Supervisor;

pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        name: "toolcall_null",
        group: "toolcall",
        about: "a tool call without effect: guest → broker process → guest, all checks done",
        ratio_of: Some(WAY),
        measure: Measure::Sampled(null),
    },
    Entry {
        name: "toolcall_read",
        group: "toolcall",
        about: "the same of a tool that reads",
        ratio_of: Some(WAY),
        measure: Measure::Sampled(read),
    },
    Entry {
        name: "toolcall_write",
        group: "toolcall",
        about: "the same of a tool that writes: its intent is on the disk before it is called",
        ratio_of: Some(Formula::sum(&[
            (1.0, "floor_exit"),
            (1.5, "floor_socket"),
            (1.0, "floor_fsync"),
        ])),
        measure: Measure::Sampled(write),
    },
    Entry {
        name: "authorise",
        group: "toolcall",
        about: "whether a call may be made, under a verified grant with 3 constraints: by the \
                broker's own count, the mean of 32",
        ratio_of: None,
        measure: Measure::Sampled(authorise),
    },
];

/// One exit, there and back between two processes, and half as much again for
/// a broker that has more to look at than one socket.
const WAY: Formula = Formula::sum(&[(1.0, "floor_exit"), (1.5, "floor_socket")]);

/// Calls by which one run has more than another: the difference is theirs.
const CALLS: usize = 32;
/// What is hashed in each.
const HASHED: &str = "forge";
/// The arguments of `crypto.hash`, as a program sends them.
const TO_HASH: &str = r#"{"algorithm":"sha256","text":"forge"}"#;
/// What the grant of `authorise` asks of them.
const CONSTRAINTS: [&str; 3] = [
    r#"crypto.hash:/algorithm="sha256""#,
    "crypto.hash:/text^=for",
    "crypto.hash:/text=~[a-z]{1,100}",
];
/// How long a broker may take for one answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(30);
/// How long the grant of `authorise` is good: longer than any bench.
const GRANT_VALID_S: u64 = 7 * 24 * 60 * 60;

fn name(tool: &str) -> Result<ToolName, String> {
    ToolName::parse(tool).map_err(said)
}

/// A program that calls a tool once for each byte of its input, and puts out
/// the last response.
fn calling(tool: &str, arguments: &str) -> Result<Program, String> {
    let length = arguments.len();
    Program::of(&format!(
        r#"(module
            (import "forge" "input_len" (func $input_len (result i32)))
            (import "forge" "resp_read" (func $resp_read (param i32 i32 i32) (result i32)))
            (import "forge" "output" (func $output (param i32 i32) (result i32)))
            (import "tool" "{tool}" (func $tool (param i32 i32) (result i32)))
            (memory (export "memory") 1)
            (data (i32.const 0) {arguments:?})
            (func (export "forge_run") (result i32)
                (local $left i32) (local $got i32)
                (local.set $left (call $input_len))
                (loop $next
                    (local.set $got (call $tool (i32.const 0) (i32.const {length})))
                    (if (i32.lt_s (local.get $got) (i32.const 0)) (then (return (i32.const 1))))
                    (br_if $next (local.tee $left (i32.sub (local.get $left) (i32.const 1)))))
                (call $output (i32.const 1024)
                    (call $resp_read (i32.const 1024) (i32.const 0) (local.get $got)))))"#
    ))
}

/// A program that calls `crypto.hash` so.
pub(super) fn hashing() -> Result<Program, String> {
    calling("crypto.hash", TO_HASH)
}

struct Toolcall {
    supervisor: Supervisor,
    program: Program,
    tool: ToolName,
    /// What the tool answers.
    expected: String,
    _journal: fixture::Folder,
}

fn null() -> Result<Box<dyn Case>, String> {
    use sha2::Digest as _;
    let expected = format!("{{\"hex\":\"{}\"}}", hex(&sha2::Sha256::digest(HASHED)));
    Toolcall::make("crypto.hash", TO_HASH, expected)
}

fn read() -> Result<Box<dyn Case>, String> {
    Toolcall::make("stash.get", r#"{"key":"k"}"#, r#"{"found":false}"#.into())
}

fn write() -> Result<Box<dyn Case>, String> {
    let arguments = r#"{"key":"k","value":"v","ttl_s":60}"#;
    Toolcall::make("stash.put", arguments, r#"{"expires_in_s":60}"#.into())
}

impl Toolcall {
    fn make(tool: &str, arguments: &str, expected: String) -> Result<Box<dyn Case>, String> {
        let program = calling(tool, arguments)?;
        let (broker, journal) = fixture::broker()?;
        let supervisor = fixture::supervisor(&program, RESET, Some(broker))?;
        let tool = name(tool)?;
        Ok(Box::new(Self { supervisor, program, tool, expected, _journal: journal }))
    }

    /// Nanoseconds of a run with this many calls.
    fn run(&mut self, calls: usize) -> Result<u64, String> {
        let mut job = self.program.next_job();
        // A JSON string: two quotes and the rest.
        job.input = format!("\"{}\"", "x".repeat(calls - 2)).into_bytes();
        let granted = Authority::Tools(vec![self.tool.clone()]);
        let report = self.supervisor.run(&request(job, granted)).report;
        if report.end != RunEnd::Ok || report.output != self.expected {
            return Err(format!("the benched run failed: {} {}", report.reason, report.output));
        }
        Ok((report.timing_us.load + report.timing_us.run) * 1000)
    }
}

impl Case for Toolcall {
    fn sample(&mut self) -> Result<u64, String> {
        let few = self.run(2)?;
        let many = self.run(2 + CALLS)?;
        quiet(&self.supervisor);
        Ok(many.saturating_sub(few) / CALLS as u64)
    }
}

/// Plays a worker, without a VM: what is measured does not begin before the
/// call is at the broker.
struct Authorise {
    broker: Broker,
    token: Vec<u8>,
    _journal: fixture::Folder,
}

fn authorise() -> Result<Box<dyn Case>, String> {
    let (broker, journal) = fixture::broker()?;
    let request = GrantRequest {
        principal: PRINCIPAL.into(),
        tools: vec![name("crypto.hash")?],
        constraints: CONSTRAINTS.map(str::to_owned).to_vec(),
        valid_s: GRANT_VALID_S,
        calls_max: None,
        cost_max: None,
        session: None,
    };
    match broker.ask(&Request::IssueGrant(request)).map_err(said)? {
        Reply::Grant(token) => Ok(Box::new(Authorise { broker, token, _journal: journal })),
        other => Err(format!("{other:?} for a grant")),
    }
}

impl Authorise {
    /// Seconds that all calls together took to be allowed, and how many there
    /// were: the broker's own figures, which end where its journal begins.
    fn counted(&self) -> Result<(f64, f64), String> {
        let text = self.broker.metrics(Patience::default()).map_err(said)?;
        let value = |what: &str| {
            let name = format!("forge_call_authorisation_seconds_{what} ");
            let line = text.lines().find_map(|line| line.strip_prefix(&name));
            line.and_then(|value| value.parse().ok()).ok_or(format!("the broker counts no {name}"))
        };
        Ok((value("sum")?, value("count")?))
    }
}

impl Case for Authorise {
    fn sample(&mut self) -> Result<u64, String> {
        let open = OpenRun {
            run_id: RunId(crate::keys::random().map_err(said)?),
            principal: PRINCIPAL.into(),
            session: None,
            program_sha256: [0; 32],
            authority: Authority::Grant(self.token.clone()),
            callable: Callable::Any,
            limits: RunLimits::default(),
        };
        let (_claims, link) = self.broker.open_run(open).map_err(said)?;
        let mut link = Link::new(link);
        let before = self.counted()?;
        for id in 0..CALLS {
            let call = Call {
                id: id as u32,
                waits: true,
                tool: name("crypto.hash")?,
                request: TO_HASH.into(),
            };
            let mut bytes = Vec::new();
            frame::write_message(Kind::Call, &call, &mut bytes);
            let patience = Patience::until(Instant::now() + ANSWER_TIME_MAX);
            link.send(&bytes, patience).map_err(said)?;
            let answer = link.receive(|kind| kind == Kind::Settled, patience).map_err(said)?;
            let settled: Settled = codec::decode(&answer.payload).map_err(said)?;
            if settled.code.is_some() {
                return Err(format!("a call was not allowed: {:?}", settled.code));
            }
        }
        let (took, calls) = self.counted()?;
        let (took, calls) = (took - before.0, calls - before.1);
        if calls as usize != CALLS {
            return Err(format!("the broker counted {calls} calls of {CALLS}"));
        }
        Ok((took / calls * 1e9) as u64)
    }
}
