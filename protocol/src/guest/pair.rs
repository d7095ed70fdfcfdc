//! A guest's session and its host's, brought to where a test begins; and what
//! both do together.

use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use super::{
    Call, Ended, GuestEvent, GuestSession, HostEvent, HostSession, Load, Misbehaviour,
    SessionError, Settled, Start,
};
use crate::ending::{Ending, TrapKind};
use crate::frame::{self, FrameError, HEADER_BYTES, Header, Kind};
use crate::handshake::{HandshakeError, Hello, Role};
use crate::limits::{MESSAGE_OVERHEAD_BYTES, RunLimits};
use crate::name::ToolName;
use crate::run::{Artifact, Log, RunId};

fn load(announce: bool) -> Load {
    Load { limits: RunLimits::default(), announce }
}

/// What each run here is started with.
pub(super) fn start() -> Start {
    Start {
        run_id: RunId([3; 16]),
        seed: [1; 32],
        start_unix_ns: 5,
        granted: vec![ToolName::parse("a.b").unwrap()],
    }
}

/// Moves all bytes both ways until nothing moves.
pub(super) fn exchange(
    guest: &mut GuestSession,
    host: &mut HostSession,
) -> Result<(), SessionError> {
    loop {
        let to_host = core::mem::take(guest.transmit());
        let to_guest = core::mem::take(host.transmit());
        if to_host.is_empty() && to_guest.is_empty() {
            return Ok(());
        }
        host.receive(&to_host)?;
        guest.receive(&to_guest)?;
    }
}

/// A run that goes on.
pub(super) fn running() -> (GuestSession, HostSession) {
    let (mut guest, mut host) = (GuestSession::new(), HostSession::new());
    exchange(&mut guest, &mut host).unwrap();
    assert!(host.is_ready() && host.guest_waits());
    host.load(&load(false), b"program").unwrap();
    host.start(&start(), b"{}").unwrap();
    assert!(!host.guest_waits());
    exchange(&mut guest, &mut host).unwrap();
    take_load(&mut guest, false);
    guest.loaded().unwrap();
    assert!(guest.transmit().is_empty(), "nobody asked to hear of it");
    take_run(&mut guest);
    (guest, host)
}

/// The same under limits of its own.
fn running_under(limits: RunLimits) -> (GuestSession, HostSession) {
    let (mut guest, mut host) = (GuestSession::new(), HostSession::new());
    exchange(&mut guest, &mut host).unwrap();
    host.load(&Load { limits, announce: false }, b"program").unwrap();
    host.start(&start(), b"{}").unwrap();
    exchange(&mut guest, &mut host).unwrap();
    (guest, host)
}

fn take_load(guest: &mut GuestSession, announce: bool) {
    let Some(GuestEvent::Load(order)) = guest.poll_event() else { panic!("no program") };
    assert_eq!((order.load, &order.program[..]), (load(announce), &b"program"[..]));
}

fn take_run(guest: &mut GuestSession) {
    let Some(GuestEvent::Run(order)) = guest.poll_event() else { panic!("no run") };
    assert_eq!((order.start, &order.input[..]), (start(), &b"{}"[..]));
}

/// An end with some figures.
pub(super) fn end(ending: Ending) -> Ended {
    Ended {
        ending,
        fuel_used: 1,
        memory_peak_bytes: 2,
        logs_dropped: 0,
        load_ticks: 3,
        run_ticks: 4,
    }
}

/// A guest that is loading a program and is to say when it has.
pub(super) fn preparing() -> (GuestSession, HostSession) {
    let (mut guest, mut host) = (GuestSession::new(), HostSession::new());
    exchange(&mut guest, &mut host).unwrap();
    host.load(&load(true), b"program").unwrap();
    assert!(!host.is_loaded() && !host.guest_waits());
    exchange(&mut guest, &mut host).unwrap();
    take_load(&mut guest, true);
    (guest, host)
}

#[test]
fn a_prepared_program_waits_for_its_run_and_so_does_a_copy_of_its_session() {
    let (mut guest, mut host) = preparing();
    assert!(host.start(&start(), b"{}").is_err(), "it is not loaded yet");
    guest.loaded().unwrap();
    exchange(&mut guest, &mut host).unwrap();
    assert!(host.is_loaded() && host.guest_waits() && !host.is_ready());
    let mut copy = host.clone();
    host.start(&start(), b"{}").unwrap();
    assert!(!host.is_loaded() && !host.guest_waits());
    exchange(&mut guest, &mut host).unwrap();
    take_run(&mut guest);
    assert!(copy.is_loaded());
    copy.start(&start(), b"{}").unwrap();
    assert!(!copy.transmit().is_empty());
}

#[test]
fn a_program_that_does_not_load_ends_with_or_without_an_announcement() {
    let refused =
        end(Ending::Trap { kind: TrapKind::MemoryOutOfBounds, detail: "a data segment".into() });
    let (mut guest, mut host) = preparing();
    guest.ended(&refused).unwrap();
    exchange(&mut guest, &mut host).unwrap();
    assert_eq!(host.poll_event(), Some(HostEvent::Ended(refused.clone())));
    assert!(!host.guest_waits());
    assert!(host.start(&start(), b"{}").is_err() && guest.loaded().is_err());

    let (mut guest, mut host) = (GuestSession::new(), HostSession::new());
    exchange(&mut guest, &mut host).unwrap();
    host.load(&load(false), b"program").unwrap();
    exchange(&mut guest, &mut host).unwrap();
    guest.ended(&refused).unwrap();
    exchange(&mut guest, &mut host).unwrap();
    assert_eq!(host.poll_event(), Some(HostEvent::Ended(refused)));
}

#[test]
fn a_run_goes_the_whole_way() {
    let (mut guest, mut host) = running();
    let tool = ToolName::parse("a.b").unwrap();
    let id = guest.call(&tool, b"{\"q\":1}", true).unwrap();
    exchange(&mut guest, &mut host).unwrap();
    assert!(host.guest_waits());
    let expected = Call { id, waits: true, tool, request: b"{\"q\":1}".to_vec() };
    assert_eq!(host.poll_event(), Some(HostEvent::Call(expected)));

    let settled = Settled { id, code: None, duration_ns: 9, redacted: false, body: b"[]".to_vec() };
    host.settle(&settled).unwrap();
    assert!(!host.guest_waits());
    exchange(&mut guest, &mut host).unwrap();
    guest.output(b"out").unwrap();
    guest.log(2, "said").unwrap();
    guest.artifact("a.txt", "text/plain", b"x").unwrap();
    let ended = Ended {
        ending: Ending::Returned(0),
        fuel_used: 1,
        memory_peak_bytes: 2,
        logs_dropped: 0,
        load_ticks: 3,
        run_ticks: 4,
    };
    guest.ended(&ended).unwrap();
    exchange(&mut guest, &mut host).unwrap();
    assert!(matches!(guest.poll_event(), Some(GuestEvent::Settled(got)) if got == settled));
    let events: Vec<_> = core::iter::from_fn(|| host.poll_event()).collect();
    assert_eq!(
        events,
        [
            HostEvent::Output(b"out".to_vec()),
            HostEvent::Log(Log { level: 2, text: "said".into() }),
            HostEvent::Artifact(Artifact {
                name: "a.txt".into(),
                media_type: "text/plain".into(),
                content: b"x".to_vec(),
            }),
            HostEvent::Ended(ended),
        ]
    );
    assert!(guest.output(b"more").is_err(), "nothing can follow the end");
}

#[test]
fn a_guest_of_another_version_is_refused_by_name_on_both_sides() {
    let mut host = HostSession::new();
    let mut hello = Vec::new();
    let theirs = Hello { version_min: 9, version_max: 9, ..Hello::ours(Role::Guest) };
    frame::write_message(Kind::Hello, &theirs, &mut hello);
    let refused = host.receive(&hello).unwrap_err();
    assert!(matches!(refused, SessionError::Handshake(HandshakeError::VersionMismatch { .. })));
    let mut guest = GuestSession::new();
    let refused = guest.receive(host.transmit()).unwrap_err();
    assert!(matches!(refused, SessionError::Handshake(HandshakeError::VersionMismatch { .. })));
}

#[test]
fn the_host_cannot_settle_what_was_not_called() {
    let (mut guest, mut host) = running();
    let settled = Settled { id: 0, code: None, duration_ns: 0, redacted: false, body: vec![] };
    assert!(host.settle(&settled).is_err());
    let mut bytes = Vec::new();
    frame::write_message(Kind::Settled, &settled, &mut bytes);
    assert_eq!(guest.receive(&bytes), Err(SessionError::Peer(Misbehaviour::NotInFlight { id: 0 })));
}

/// A frame of this kind that announces so many bytes, and none of them.
fn announced(kind: Kind, payload_bytes: u32) -> [u8; HEADER_BYTES] {
    Header { kind, payload_bytes }.to_bytes()
}

fn is_oversized(received: Result<(), SessionError>) -> bool {
    let Err(SessionError::Peer(Misbehaviour::Frame(error))) = received else { return false };
    matches!(error, FrameError::Oversized { .. })
}

#[test]
fn what_passes_the_limits_of_its_run_is_refused_on_both_sides_by_its_header_alone() {
    let limits = RunLimits {
        program_bytes: 7,
        input_bytes: 2,
        request_bytes: 10,
        response_bytes: 20,
        output_bytes: 30,
        artifact_bytes: 40,
        ..RunLimits::default()
    };
    for (kind, most) in [
        (Kind::Output, 30),
        (Kind::Call, 10 + MESSAGE_OVERHEAD_BYTES),
        (Kind::Artifact, 40 + MESSAGE_OVERHEAD_BYTES),
    ] {
        let (_, host) = running_under(limits.clone());
        host.clone().receive(&announced(kind, most)).unwrap();
        assert!(is_oversized(host.clone().receive(&announced(kind, most + 1))), "{kind:?}");
    }
    let settled = 20 + MESSAGE_OVERHEAD_BYTES;
    for (kind, most) in [(Kind::Program, 7), (Kind::Input, 2), (Kind::Settled, settled)] {
        for over in [false, true] {
            let mut guest = GuestSession::new();
            let mut host = HostSession::new();
            exchange(&mut guest, &mut host).unwrap();
            let load = Load { limits: limits.clone(), announce: false };
            let mut bytes = Vec::new();
            frame::write_message(Kind::Load, &load, &mut bytes);
            if kind != Kind::Program {
                frame::write_raw(Kind::Program, b"program", &mut bytes);
                frame::write_message(Kind::Start, &start(), &mut bytes);
            }
            if kind == Kind::Settled {
                frame::write_raw(Kind::Input, b"{}", &mut bytes);
            }
            guest.receive(&bytes).unwrap();
            let received = guest.receive(&announced(kind, most + u32::from(over)));
            assert_eq!(is_oversized(received), over, "{kind:?}");
        }
    }
}

#[test]
fn what_is_as_large_as_the_limits_of_its_run_goes_through() {
    let limits = RunLimits {
        request_bytes: 300,
        response_bytes: 300,
        artifact_bytes: 300,
        output_bytes: 300,
        calls_in_flight: 2,
        ..RunLimits::default()
    };
    let (mut guest, mut host) = running_under(limits);
    let tool = ToolName::parse(&format!("{}.{}", "s".repeat(64), "t".repeat(128))).unwrap();
    for _ in 0..2 {
        guest.call(&tool, &[b'1'; 300], false).unwrap();
    }
    guest.artifact("a", "b", &[1; 300]).unwrap();
    guest.output(&[1; 300]).unwrap();
    exchange(&mut guest, &mut host).unwrap();
    assert_eq!(core::iter::from_fn(|| host.poll_event()).count(), 4);
    let body = vec![b'1'; 300];
    host.settle(&Settled { id: 1, code: None, duration_ns: u64::MAX, redacted: true, body })
        .unwrap();
    exchange(&mut guest, &mut host).unwrap();
}

#[test]
fn a_guest_waits_until_the_call_that_it_waits_for_is_settled_or_its_run_is_over() {
    let tool = ToolName::parse("a.b").unwrap();
    let waiting = || {
        let (mut guest, mut host) = running();
        for waits in [false, true] {
            guest.call(&tool, b"{}", waits).unwrap();
        }
        exchange(&mut guest, &mut host).unwrap();
        assert!(host.guest_waits());
        (guest, host)
    };
    let settled = |id| Settled { id, code: None, duration_ns: 0, redacted: false, body: vec![] };
    let (_, mut host) = waiting();
    host.settle(&settled(0)).unwrap();
    assert!(host.guest_waits());
    host.settle(&settled(1)).unwrap();
    assert!(!host.guest_waits());

    let (mut guest, mut host) = waiting();
    guest.ended(&end(Ending::Returned(0))).unwrap();
    exchange(&mut guest, &mut host).unwrap();
    assert!(!host.guest_waits());
    let mut bytes = Vec::new();
    frame::write_raw(Kind::Output, b"more", &mut bytes);
    assert!(host.receive(&bytes).is_err(), "nothing can follow the end");
}

#[test]
fn a_call_is_settled_once_on_both_sides() {
    let (mut guest, mut host) = running();
    let id = guest.call(&ToolName::parse("a.b").unwrap(), b"{}", false).unwrap();
    exchange(&mut guest, &mut host).unwrap();
    let settled = Settled { id, code: None, duration_ns: 0, redacted: false, body: vec![] };
    host.settle(&settled).unwrap();
    let again = host.transmit().clone();
    assert!(matches!(host.settle(&settled), Err(SessionError::Misuse(_))));
    exchange(&mut guest, &mut host).unwrap();
    assert_eq!(guest.receive(&again), Err(SessionError::Peer(Misbehaviour::NotInFlight { id })));
}

#[test]
fn a_program_is_sent_to_a_guest_that_stands_ready_and_to_no_other() {
    let mut host = HostSession::new();
    assert!(matches!(host.load(&load(false), b"program"), Err(SessionError::Misuse(_))));
    for (_, mut host) in [preparing(), running()] {
        assert!(matches!(host.load(&load(false), b"program"), Err(SessionError::Misuse(_))));
        assert!(host.transmit().is_empty());
    }
}

#[test]
fn a_guest_hears_no_host_that_is_none_or_speaks_another_version() {
    let ours = Hello::ours(Role::Host);
    for theirs in [
        Hello { role: Role::Guest, ..ours },
        Hello { version_min: 9, version_max: 9, ..ours },
        Hello { magic: *b"none", ..ours },
    ] {
        let mut bytes = Vec::new();
        frame::write_message(Kind::Hello, &theirs, &mut bytes);
        let refused = GuestSession::new().receive(&bytes);
        assert!(refused.is_err(), "{theirs:?}");
    }
}
