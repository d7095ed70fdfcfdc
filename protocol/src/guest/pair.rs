//! A guest's session and its host's, brought to where a test begins; and what
//! both do together.

use alloc::vec;
use alloc::vec::Vec;

use super::{
    Call, Ended, GuestEvent, GuestSession, HostEvent, HostSession, Load, Misbehaviour,
    SessionError, Settled, Start,
};
use crate::ending::{Ending, TrapKind};
use crate::frame::{self, Kind};
use crate::handshake::{HandshakeError, Hello, Role};
use crate::limits::RunLimits;
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
