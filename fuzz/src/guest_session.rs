//! What a host may send a guest, in each state of the guest's session.
//!
//! ```text
//! input = state (u8)  calls in flight (u8)  cuts  stream
//! ```

use std::collections::BTreeSet;

use forge_protocol::RunId;
use forge_protocol::ending::Ending;
use forge_protocol::frame::{self, HEADER_BYTES, Kind};
use forge_protocol::guest::{Ended, GuestEvent, GuestSession, Load, SessionError, Settled, Start};
use forge_protocol::handshake::{Hello, Refusal, Role};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;

use super::{Outcome, Seed, accepted, choice, cuts, pieces, refused};

/// The states, in the order in which a session goes through them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Greeting,
    Waiting,
    Loading,
    Loaded,
    Feeding,
    Running,
    Ended,
}

const STATES: [State; 7] = [
    State::Greeting,
    State::Waiting,
    State::Loading,
    State::Loaded,
    State::Feeding,
    State::Running,
    State::Ended,
];
/// Set in the first byte: the program was to be announced, and was.
const ANNOUNCED: u8 = 0x80;

/// However the stream is cut, it gives the same events; one program and one
/// run of it at most; no run before a program that was to be announced; an
/// answer only to a call in flight, and one only; nothing after the end.
pub fn check(mut data: &[u8]) -> Outcome {
    let first = choice(&mut data);
    let state = (STATES[usize::from(first & !ANNOUNCED) % STATES.len()], first & ANNOUNCED != 0);
    let calls = u32::from(choice(&mut data) % 9);
    let lengths = cuts(&mut data);
    let (events, error) = receive(state, calls, pieces(data, lengths));
    let (whole_events, whole_error) = receive(state, calls, pieces(data, &[]));
    assert_eq!(format!("{events:?}"), format!("{whole_events:?}"), "the cut changed the events");
    assert_eq!(error, whole_error, "the cut changed the error");

    let state = state.0;
    assert!(events.len() * HEADER_BYTES <= data.len(), "more events than frames");
    let (mut limits, mut is_announced) = (RunLimits::default(), false);
    let mut in_flight: BTreeSet<u32> =
        if state == State::Running { (0..calls).collect() } else { BTreeSet::new() };
    let mut held_bytes = 0;
    for (position, event) in events.iter().enumerate() {
        match event {
            GuestEvent::Load(order) => {
                assert!(position == 0 && state < State::Loaded, "a second program");
                held_bytes += order.program.len();
                limits = order.load.limits.clone();
                is_announced = order.load.announce;
                assert!(order.program.len() <= limits.program_bytes as usize);
            }
            GuestEvent::Run(order) => {
                let of_this_program = position == usize::from(state < State::Loaded);
                assert!(of_this_program && state < State::Running, "a second run");
                assert!(!is_announced, "a run before its program was loaded");
                held_bytes += order.input.len();
                assert!(order.input.len() <= limits.input_bytes as usize);
            }
            GuestEvent::Settled(settled) => {
                assert!(in_flight.remove(&settled.id), "an answer to no call in flight");
                held_bytes += settled.body.len();
            }
        }
    }
    assert!(held_bytes <= data.len() + PROGRAM.len(), "more came out than went in");
    if state == State::Ended {
        assert!(events.is_empty(), "an event after the end");
        assert!(data.len() < HEADER_BYTES || error.is_some(), "a frame after the end");
    }
    Outcome::of(error.is_none() && !events.is_empty())
}

type Received = (Vec<GuestEvent>, Option<SessionError>);

fn receive<'a>(
    state: (State, bool),
    calls: u32,
    pieces: impl Iterator<Item = &'a [u8]>,
) -> Received {
    let mut session = session(state, calls);
    let mut events = Vec::new();
    for piece in pieces {
        let outcome = session.receive(piece);
        events.extend(core::iter::from_fn(|| session.poll_event()));
        if let Err(error) = outcome {
            return (events, Some(error));
        }
    }
    (events, None)
}

const PROGRAM: &[u8] = b"program";

fn start() -> Start {
    Start { run_id: RunId([3; 16]), seed: [1; 32], start_unix_ns: 5, granted: vec![tool()] }
}

fn tool() -> ToolName {
    ToolName::parse("a.b").expect("a good name")
}

/// The frames a host sends, one for each step from state to state.
fn steps(announce: bool) -> [Vec<u8>; 5] {
    let mut steps = [const { Vec::new() }; 5];
    let [hello, load, program, order, input] = &mut steps;
    frame::write_message(Kind::Hello, &Hello::ours(Role::Host), hello);
    let limits = RunLimits::default();
    frame::write_message(Kind::Load, &Load { limits, announce }, load);
    frame::write_message(Kind::Start, &start(), order);
    frame::write_raw(Kind::Program, PROGRAM, program);
    frame::write_raw(Kind::Input, b"{}", input);
    steps
}

fn session((state, announce): (State, bool), calls: u32) -> GuestSession {
    let mut session = GuestSession::new();
    for step in steps(announce).iter().take((state as usize).min(5)) {
        session.receive(step).expect("what a sound host sends");
        if let Some(event) = session.poll_event() {
            match event {
                GuestEvent::Load(_) => session.loaded().expect("there is a program"),
                other => assert!(matches!(other, GuestEvent::Run(_)) && state >= State::Running),
            }
        }
    }
    if state >= State::Running {
        assert!(session.poll_event().is_none());
    }
    if state == State::Running {
        for _ in 0..calls {
            session.call(&tool(), b"{}", false).expect("a call in a run");
        }
    }
    if state == State::Ended {
        session.ended(&ENDED).expect("an end of a run");
    }
    session
}

const ENDED: Ended = Ended {
    ending: Ending::Returned(0),
    fuel_used: 1,
    memory_peak_bytes: 2,
    logs_dropped: 0,
    load_ticks: 3,
    run_ticks: 4,
};

/// The way of one run from each state, answers in and out of order, and a
/// host of another version.
pub fn seeds() -> Vec<Seed> {
    let input = |state: State, calls: u8, cuts: &[u8], stream: &[u8]| {
        [&[state as u8, calls, cuts.len() as u8], cuts, stream].concat()
    };
    let steps = steps(false);
    let announced = self::steps(true);
    let settled = |id: u32| {
        let mut bytes = Vec::new();
        let settled =
            Settled { id, code: None, duration_ns: 9, body: b"[]".to_vec(), redacted: false };
        frame::write_message(Kind::Settled, &settled, &mut bytes);
        bytes
    };
    let settled_twice = [settled(1), settled(0)].concat();
    let mut refusal = Vec::new();
    let theirs = Hello { version_min: 9, version_max: 9, ..Hello::ours(Role::Host) };
    frame::write_message(Kind::Refuse, &Refusal(theirs), &mut refusal);
    vec![
        accepted("whole-run", input(State::Greeting, 0, &[], &steps.concat())),
        accepted("from-waiting", input(State::Waiting, 0, &[5, 17], &steps[1..].concat())),
        accepted("from-loading", input(State::Loading, 0, &[1], &steps[2..].concat())),
        accepted("from-loaded", input(State::Loaded, 0, &[9], &steps[3..].concat())),
        accepted(
            "prepared",
            [&[State::Loaded as u8 | ANNOUNCED, 0, 0], &steps[3..].concat()[..]].concat(),
        ),
        accepted("announced", input(State::Waiting, 0, &[], &announced[1..3].concat())),
        refused("run-before-loaded", input(State::Waiting, 0, &[], &announced[1..].concat())),
        accepted("from-feeding", input(State::Feeding, 0, &[], &steps[4])),
        accepted("answers", input(State::Running, 2, &[], &settled_twice)),
        refused("answer-to-no-call", input(State::Running, 1, &[], &settled(1))),
        refused("refusal", input(State::Greeting, 0, &[], &refusal)),
        refused("after-the-end", input(State::Ended, 0, &[], &settled(0))),
    ]
}
