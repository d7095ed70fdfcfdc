//! What a guest may send its host, in each state of the host's session.
//!
//! ```text
//! input = state (u8)  limits (u8)  cuts  stream
//! ```
//!
//! A cut with its high bit set lets the host answer the oldest call first.

use std::collections::VecDeque;

use forge_protocol::RunId;
use forge_protocol::ending::{Ending, LimitKind};
use forge_protocol::frame::{self, HEADER_BYTES, Kind};
use forge_protocol::guest::{
    Call, Ended, HostEvent, HostSession, Load, SessionError, Settled, Start,
};
use forge_protocol::handshake::{Hello, Role};
use forge_protocol::limits::{ARTIFACT_NAME_BYTES_MAX, RunLimits};
use forge_protocol::name::ToolName;
use forge_protocol::run::{Artifact, Log};

use super::{Outcome, Seed, accepted, choice, cuts, refused};

/// The states, in the order in which a session goes through them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Greeting,
    Ready,
    /// A program is out, to be announced.
    Loading,
    Loaded,
    Running,
    Ended,
}

const STATES: [State; 6] =
    [State::Greeting, State::Ready, State::Loading, State::Loaded, State::Running, State::Ended];

/// What the run has used, counted beside the session.
#[derive(Default)]
struct Used {
    calls: u32,
    in_flight: VecDeque<u32>,
    output_bytes: u64,
    log_bytes: u64,
    logs: u64,
    artifacts: u32,
    ended: bool,
}

/// The run's limits hold whatever the guest sends; calls are numbered and
/// answered once; what comes out went in; nothing follows the end.
pub fn check(mut data: &[u8]) -> Outcome {
    let state = STATES[usize::from(choice(&mut data)) % STATES.len()];
    let limits = match choice(&mut data) % 4 {
        0 => small(),
        1 => RunLimits::default(),
        2 => RunLimits::operator_maxima(),
        _ => none(),
    };
    let mut session = session(state, &limits);
    let mut used = Used { ended: state == State::Ended, ..Used::default() };
    let lengths = cuts(&mut data);
    let mut lengths = lengths.iter().cycle();
    let (mut rest, mut events, mut error) = (data, 0, None);
    while !rest.is_empty() && error.is_none() {
        let cut = lengths.next().copied();
        if cut.is_some_and(|cut| cut & 0x80 != 0) {
            settle_oldest(&mut session, &mut used);
        }
        let length = cut.map_or(rest.len(), |cut| usize::from(cut & 0x7f).max(1));
        let (piece, after) = rest.split_at(length.min(rest.len()));
        rest = after;
        error = session.receive(piece).err();
        while let Some(event) = session.poll_event() {
            let is_end = matches!(event, HostEvent::Ended(_));
            assert!(
                state == State::Running || state == State::Loading && is_end,
                "an event outside a run"
            );
            events += 1;
            take(event, &limits, &mut used);
        }
    }
    assert!(events * HEADER_BYTES <= data.len(), "more events than frames");
    if let Some(log) = session.take_unfinished() {
        assert!(state == State::Running, "a record outside a run");
        used.log_bytes += log.text.len() as u64;
        assert!(used.log_bytes <= limits.log_bytes.into());
    }
    let held_bytes = used.output_bytes + used.log_bytes;
    assert!(held_bytes <= data.len() as u64, "more came out than went in");
    assert!(!matches!(error, Some(SessionError::Misuse(_))), "the guest's fault put on us");
    if used.ended {
        assert!(!session.guest_waits() && !session.is_ready(), "waits after the end");
        let bytes = frame_of(Kind::Output, b"more");
        assert!(error.is_some() || session.receive(&bytes).is_err(), "a frame after the end");
        assert_eq!(session.poll_event(), None);
    }
    if state == State::Greeting {
        assert_eq!(events, 0, "a run that was never started");
    }
    let moved = state == State::Greeting && session.is_ready()
        || state == State::Loading && session.is_loaded();
    assert!(!session.is_loaded() || session.clone().guest_waits());
    Outcome::of(error.is_none() && (events > 0 || moved))
}

fn take(event: HostEvent, limits: &RunLimits, used: &mut Used) {
    assert!(!used.ended, "an event after the end");
    match event {
        HostEvent::Call(call) => {
            assert_eq!(call.id, used.calls, "a call's number");
            assert!(call.request.len() <= limits.request_bytes as usize);
            used.calls += 1;
            used.in_flight.push_back(call.id);
            assert!(used.calls <= limits.calls);
            assert!(used.in_flight.len() <= limits.calls_in_flight as usize);
        }
        HostEvent::Output(bytes) => {
            used.output_bytes += bytes.len() as u64;
            assert!(used.output_bytes <= limits.output_bytes.into());
        }
        HostEvent::Log(log) => {
            used.log_bytes += log.text.len() as u64;
            used.logs += 1;
            // Empty records would cost the guest nothing and us memory.
            assert!(used.logs <= limits.log_bytes.into(), "records without end");
            assert!(used.log_bytes <= limits.log_bytes.into());
        }
        HostEvent::Artifact(artifact) => {
            used.artifacts += 1;
            assert!(used.artifacts <= limits.artifacts);
            assert!(artifact.content.len() <= limits.artifact_bytes as usize);
            assert!(artifact.name.len() <= ARTIFACT_NAME_BYTES_MAX as usize);
            assert!(artifact.media_type.len() <= ARTIFACT_NAME_BYTES_MAX as usize);
        }
        HostEvent::Ended(_) => used.ended = true,
    }
}

fn settle_oldest(session: &mut HostSession, used: &mut Used) {
    let Some(id) = used.in_flight.pop_front() else { return };
    let settled = Settled { id, code: None, duration_ns: 1, body: b"[]".to_vec(), redacted: false };
    session.settle(&settled).expect("an answer to a call in flight");
    assert!(session.settle(&settled).is_err(), "a call was answered twice");
    session.transmit().clear();
}

/// Limits that a short input can pass.
fn small() -> RunLimits {
    RunLimits {
        request_bytes: 32,
        output_bytes: 64,
        artifacts: 2,
        artifact_bytes: 32,
        log_bytes: 64,
        calls: 4,
        calls_in_flight: 2,
        ..RunLimits::default()
    }
}

/// Limits that limit nothing.
fn none() -> RunLimits {
    RunLimits {
        program_bytes: u32::MAX,
        input_bytes: u32::MAX,
        request_bytes: u32::MAX,
        output_bytes: u32::MAX,
        artifacts: u32::MAX,
        artifact_bytes: u32::MAX,
        log_bytes: u32::MAX,
        calls: u32::MAX,
        calls_in_flight: u32::MAX,
        ..RunLimits::operator_maxima()
    }
}

fn session(state: State, limits: &RunLimits) -> HostSession {
    let mut session = HostSession::new();
    if state >= State::Ready {
        session.receive(&hello()).expect("a sound guest's greeting");
    }
    if state >= State::Loading {
        // A run may follow at once where nobody is to hear of the loading.
        let announce = state <= State::Loaded;
        let load = Load { limits: limits.clone(), announce };
        session.load(&load, b"program").expect("the guest is ready");
    }
    if state == State::Loaded {
        session.receive(&loaded()).expect("a sound guest's program");
        assert!(session.is_loaded());
    }
    if state >= State::Running {
        let start = Start {
            run_id: RunId([3; 16]),
            seed: [1; 32],
            start_unix_ns: 5,
            granted: vec![tool()],
        };
        session.start(&start, b"{}").expect("the guest has a program");
    }
    if state == State::Ended {
        session.receive(&ended()).expect("a sound guest's end");
        assert!(matches!(session.poll_event(), Some(HostEvent::Ended(_))));
    }
    session.transmit().clear();
    session
}

fn tool() -> ToolName {
    ToolName::parse("a.b").expect("a good name")
}

fn frame_of(kind: Kind, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::write_raw(kind, payload, &mut bytes);
    bytes
}

fn hello() -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::write_message(Kind::Hello, &Hello::ours(Role::Guest), &mut bytes);
    bytes
}

fn loaded() -> Vec<u8> {
    frame_of(Kind::Loaded, b"")
}

fn call(id: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let call = Call { id, waits: id == 0, tool: tool(), request: b"{\"q\":1}".to_vec() };
    frame::write_message(Kind::Call, &call, &mut bytes);
    bytes
}

fn log(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::write_message(Kind::Log, &Log { level: 2, text: text.into() }, &mut bytes);
    bytes
}

fn unfinished(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::write_message(Kind::Unfinished, &Log { level: 2, text: text.into() }, &mut bytes);
    bytes
}

fn artifact() -> Vec<u8> {
    let mut bytes = Vec::new();
    let artifact =
        Artifact { name: "a.txt".into(), media_type: "text/plain".into(), content: b"x".to_vec() };
    frame::write_message(Kind::Artifact, &artifact, &mut bytes);
    bytes
}

fn ended() -> Vec<u8> {
    ended_by(Ending::Returned(0))
}

fn ended_by(ending: Ending) -> Vec<u8> {
    let mut bytes = Vec::new();
    let ended = Ended {
        ending,
        fuel_used: 1,
        memory_peak_bytes: 2,
        logs_dropped: 0,
        load_ticks: 3,
        run_ticks: 4,
    };
    frame::write_message(Kind::Ended, &ended, &mut bytes);
    bytes
}

/// A whole run, answered calls, and a guest that breaks each limit.
pub fn seeds() -> Vec<Seed> {
    const SMALL: u8 = 0;
    const DEFAULT: u8 = 1;
    const MAXIMA: u8 = 2;
    const NONE: u8 = 3;
    let input = |state: State, limits: u8, cuts: &[u8], frames: &[Vec<u8>]| {
        [&[state as u8, limits, cuts.len() as u8], cuts, &frames.concat()].concat()
    };
    let output = || frame_of(Kind::Output, b"out");
    let run = [call(0), output(), log("said"), artifact(), ended()];
    let many_calls: Vec<_> = (0..4).map(call).collect();
    let one_call_bytes = call(0).len() as u8;
    vec![
        accepted("greeting", input(State::Greeting, DEFAULT, &[], &[hello()])),
        accepted("whole-run", input(State::Running, DEFAULT, &[], &run)),
        accepted("whole-run-cut", input(State::Running, SMALL, &[3, 0x87, 11], &run)),
        accepted("whole-run-maxima", input(State::Running, MAXIMA, &[64], &run)),
        accepted("whole-run-unlimited", input(State::Running, NONE, &[], &run)),
        accepted(
            "answered-calls",
            input(State::Running, SMALL, &[0x80 | one_call_bytes], &many_calls),
        ),
        refused("too-many-in-flight", input(State::Running, SMALL, &[], &many_calls)),
        refused("call-out-of-order", input(State::Running, DEFAULT, &[], &[call(1)])),
        refused(
            "too-much-output",
            input(
                State::Running,
                SMALL,
                &[],
                &[frame_of(Kind::Output, &[7; 60]), output(), output()],
            ),
        ),
        refused(
            "too-many-artifacts",
            input(State::Running, SMALL, &[], &[artifact(), artifact(), artifact()]),
        ),
        refused("empty-log-records", input(State::Running, SMALL, &[], &vec![log(""); 65])),
        accepted(
            "unfinished",
            input(
                State::Running,
                SMALL,
                &[],
                &[log("said"), unfinished("sa"), unfinished("say"), output()],
            ),
        ),
        accepted("loaded", input(State::Loading, DEFAULT, &[], &[loaded()])),
        accepted(
            "not-loaded",
            input(
                State::Loading,
                DEFAULT,
                &[],
                &[ended_by(Ending::Limit { kind: LimitKind::Memory, limit: 1 })],
            ),
        ),
        refused("returned-before-it-ran", input(State::Loading, DEFAULT, &[], &[ended()])),
        refused("loaded-twice", input(State::Loaded, DEFAULT, &[], &[loaded()])),
        refused("before-its-turn", input(State::Ready, DEFAULT, &[], &[output()])),
        refused("after-the-end", input(State::Ended, DEFAULT, &[], &[output()])),
    ]
}
