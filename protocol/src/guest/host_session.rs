//! The host's side, which distrusts every byte of its guest.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;

use super::error::{Misbehaviour, SessionError};
use super::message::{self, Call, Ended, Load, Settled, Start};
use crate::ending::Ending;
use crate::frame::{self, Assembler, Frame, FrameError, Kind};
use crate::handshake::{Hello, Refusal, Role};
use crate::limits::{MESSAGE_OVERHEAD_BYTES, RunLimits, within};
use crate::run::{Artifact, Log};
use crate::tally::Tally;

/// What the host's session tells the worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostEvent {
    /// The guest calls a tool.
    Call(Call),
    /// A piece of the run's output.
    Output(Vec<u8>),
    /// A log record.
    Log(Log),
    /// An artifact.
    Artifact(Artifact),
    /// The run ended; nothing follows.
    Ended(Ended),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostState {
    Greeting,
    Ready,
    /// A program is out.
    Loading {
        /// Its loading is to be announced.
        announce: bool,
    },
    /// It is loaded and waits for its run.
    Loaded,
    Running,
    Ended,
}

/// The host's side. It keeps the run's limits against a guest that does not.
///
/// A copy of it goes with a copy of its guest.
#[derive(Clone, Debug)]
pub struct HostSession {
    state: HostState,
    limits: RunLimits,
    assembler: Assembler,
    events: VecDeque<HostEvent>,
    transmit: Vec<u8>,
    next_call: u32,
    in_flight: BTreeSet<u32>,
    /// The call that the guest stands still for.
    waits_for: Option<u32>,
    tally: Tally,
    /// The log record that the guest is at.
    unfinished: Option<Log>,
}

impl Default for HostSession {
    fn default() -> Self {
        Self::new()
    }
}

impl HostSession {
    /// A session that awaits the guest's `Hello`.
    #[must_use]
    pub fn new() -> Self {
        Self {
            state: HostState::Greeting,
            limits: RunLimits::default(),
            assembler: Assembler::default(),
            events: VecDeque::new(),
            transmit: Vec::new(),
            next_call: 0,
            in_flight: BTreeSet::new(),
            waits_for: None,
            tally: Tally::default(),
            unfinished: None,
        }
    }

    /// Whether the guest stands at "waiting for a program".
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.state == HostState::Ready
    }

    /// Whether the guest stands at "prepared program": it has said that its
    /// program is loaded, and waits for the run.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.state == HostState::Loaded
    }

    /// Whether the guest does nothing until it is sent something: it waits
    /// for a program, for the run of a prepared one, or for a call it said it
    /// waits for.
    #[must_use]
    pub fn guest_waits(&self) -> bool {
        self.is_ready() || self.is_loaded() || self.waits_for.is_some()
    }

    /// Sends a program to a guest that stands ready. Unless `load` asks for
    /// an announcement, [`HostSession::start`] may follow at once.
    ///
    /// # Errors
    /// [`SessionError::Misuse`] if the guest is not ready, or if the program
    /// passes the limits in `load`, which admission has checked.
    pub fn load(&mut self, load: &Load, program: &[u8]) -> Result<(), SessionError> {
        if self.state != HostState::Ready {
            return Err(SessionError::Misuse("a program for a guest that is not ready"));
        }
        if program.len() > load.limits.program_bytes as usize {
            return Err(SessionError::Misuse("a program past its own limits"));
        }
        self.transmit.reserve(program.len() + 1024);
        frame::write_message(Kind::Load, load, &mut self.transmit);
        frame::write_raw(Kind::Program, program, &mut self.transmit);
        self.limits = load.limits.clone();
        self.state = HostState::Loading { announce: load.announce };
        Ok(())
    }

    /// Sends a run of the program: right after [`HostSession::load`], or, if
    /// that asked for an announcement, once [`HostSession::is_loaded`].
    ///
    /// # Errors
    /// [`SessionError::Misuse`] if there is no such program, or if the input
    /// passes the program's limits, which admission has checked.
    pub fn start(&mut self, start: &Start, input: &[u8]) -> Result<(), SessionError> {
        if !matches!(self.state, HostState::Loading { announce: false } | HostState::Loaded) {
            return Err(SessionError::Misuse("a run for a guest without a loaded program"));
        }
        if input.len() > self.limits.input_bytes as usize {
            return Err(SessionError::Misuse("an input past its run's limits"));
        }
        self.transmit.reserve(input.len() + 1024);
        frame::write_message(Kind::Start, start, &mut self.transmit);
        frame::write_raw(Kind::Input, input, &mut self.transmit);
        self.state = HostState::Running;
        Ok(())
    }

    /// Takes bytes from the guest. Call [`HostSession::poll_event`] after it.
    ///
    /// # Errors
    /// [`SessionError`]; the VM is to be destroyed.
    pub fn receive(&mut self, mut input: &[u8]) -> Result<(), SessionError> {
        while !input.is_empty() {
            let (state, limits) = (self.state, &self.limits);
            let awaits = |kind| Self::awaits(state, limits, kind);
            let Some(frame) = self.assembler.next(&mut input, awaits)? else { continue };
            self.handle(frame)?;
        }
        Ok(())
    }

    fn awaits(state: HostState, limits: &RunLimits, kind: Kind) -> Option<u32> {
        match (state, kind) {
            (HostState::Greeting, Kind::Hello)
            | (HostState::Loading { announce: true }, Kind::Loaded)
            | (HostState::Loading { .. }, Kind::Ended) => Some(kind.payload_bytes_max()),
            (HostState::Running, Kind::Call) => {
                Some(limits.request_bytes.saturating_add(MESSAGE_OVERHEAD_BYTES))
            }
            (HostState::Running, Kind::Output) => Some(limits.output_bytes),
            (HostState::Running, Kind::Log | Kind::Unfinished | Kind::Ended) => {
                Some(kind.payload_bytes_max())
            }
            (HostState::Running, Kind::Artifact) => {
                Some(limits.artifact_bytes.saturating_add(MESSAGE_OVERHEAD_BYTES))
            }
            _ => None,
        }
    }

    fn handle(&mut self, frame: Frame) -> Result<(), SessionError> {
        let event = match frame.kind {
            Kind::Hello => return self.greeted(message::read(&frame)?),
            Kind::Loaded => {
                self.state = HostState::Loaded;
                return Ok(());
            }
            Kind::Call => HostEvent::Call(self.called(message::read(&frame)?)?),
            // No bound would count it.
            Kind::Output if frame.payload.is_empty() => {
                return Err(FrameError::Unexpected { kind: Kind::Output }.into());
            }
            Kind::Output => {
                self.tally.output(&frame.payload, &self.limits)?;
                HostEvent::Output(frame.payload)
            }
            Kind::Log => {
                let log: Log = message::read(&frame)?;
                self.tally.log(&log, &self.limits)?;
                HostEvent::Log(log)
            }
            Kind::Unfinished => {
                // One at most is kept, so there is nothing to count.
                let log: Log = message::read(&frame)?;
                log.check()?;
                self.unfinished = Some(log).filter(|log| !log.text.is_empty());
                return Ok(());
            }
            Kind::Artifact => {
                let artifact: Artifact = message::read(&frame)?;
                self.tally.artifact(&artifact, &self.limits)?;
                HostEvent::Artifact(artifact)
            }
            Kind::Ended => {
                let ended: Ended = message::read(&frame)?;
                ended.check()?;
                // What was not started cannot have returned.
                let started = self.state == HostState::Running;
                if !started && matches!(ended.ending, Ending::Returned(_)) {
                    return Err(FrameError::Unexpected { kind: Kind::Ended }.into());
                }
                self.state = HostState::Ended;
                self.waits_for = None;
                HostEvent::Ended(ended)
            }
            kind => return Err(FrameError::Unexpected { kind }.into()),
        };
        self.events.push_back(event);
        Ok(())
    }

    fn greeted(&mut self, theirs: Hello) -> Result<(), SessionError> {
        let ours = Hello::ours(Role::Host);
        match ours.agree(theirs, Role::Guest) {
            Ok(_version) => {
                frame::write_message(Kind::Hello, &ours, &mut self.transmit);
                self.state = HostState::Ready;
                Ok(())
            }
            Err(error) => {
                frame::write_message(Kind::Refuse, &Refusal(ours), &mut self.transmit);
                self.state = HostState::Ended;
                Err(error.into())
            }
        }
    }

    fn called(&mut self, call: Call) -> Result<Call, SessionError> {
        if call.id != self.next_call {
            return Err(SessionError::Peer(Misbehaviour::CallOutOfOrder {
                got: call.id,
                expected: self.next_call,
            }));
        }
        self.next_call += 1;
        self.in_flight.insert(call.id);
        self.tally.call(&self.limits)?;
        let in_flight = self.in_flight.len() as u64;
        within("calls_in_flight", in_flight, self.limits.calls_in_flight.into())?;
        within("request_bytes", call.request.len() as u64, self.limits.request_bytes.into())?;
        if call.waits {
            self.waits_for = Some(call.id);
        }
        Ok(call)
    }

    /// Answers a call.
    ///
    /// # Errors
    /// [`SessionError::Misuse`] if it is not in flight or its body is past the
    /// run's limit, which whoever settles it has checked.
    pub fn settle(&mut self, settled: &Settled) -> Result<(), SessionError> {
        if settled.body.len() > self.limits.response_bytes as usize {
            return Err(SessionError::Misuse("a response past the run's limit"));
        }
        if !self.in_flight.remove(&settled.id) {
            return Err(SessionError::Misuse("an answer to no call"));
        }
        if self.waits_for == Some(settled.id) {
            self.waits_for = None;
        }
        frame::write_message(Kind::Settled, settled, &mut self.transmit);
        Ok(())
    }

    /// What the guest did. Worth calling after [`HostSession::receive`].
    pub fn poll_event(&mut self) -> Option<HostEvent> {
        self.events.pop_front()
    }

    /// The log record that the guest was at, if the log has room for it: of a run that
    /// is over, its last.
    pub fn take_unfinished(&mut self) -> Option<Log> {
        let fits = |log: &Log| self.tally.clone().log(log, &self.limits).is_ok();
        self.unfinished.take().filter(fits)
    }

    /// Bytes for the guest. The caller delivers them in order and clears what
    /// it delivered. Worth looking at after every call.
    pub fn transmit(&mut self) -> &mut Vec<u8> {
        &mut self.transmit
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::super::GuestSession;
    use super::super::pair::{end, exchange, preparing, running, start};
    use super::*;
    use crate::ending::{RejectKind, TrapKind};
    use crate::limits::{
        LOG_LEVEL_MAX, LOG_RECORD_BYTES_MAX, LOG_RECORD_OVERHEAD_BYTES, OverLimit, REASON_BYTES_MAX,
    };
    use crate::name::ToolName;

    #[test]
    fn what_was_not_started_cannot_have_returned_or_called() {
        let (mut guest, mut host) = preparing();
        guest.ended(&end(Ending::Returned(0))).unwrap();
        assert!(exchange(&mut guest, &mut host).is_err());

        for kind in [Kind::Output, Kind::Call, Kind::Log, Kind::Artifact] {
            let (mut guest, mut host) = preparing();
            let mut bytes = Vec::new();
            frame::write_raw(kind, &[], &mut bytes);
            assert!(host.clone().receive(&bytes).is_err(), "{kind:?} while loading");
            guest.loaded().unwrap();
            exchange(&mut guest, &mut host).unwrap();
            assert!(host.receive(&bytes).is_err(), "{kind:?} once loaded");
        }
    }

    #[test]
    fn loaded_is_said_once_and_only_where_it_was_asked_for() {
        let mut bytes = Vec::new();
        frame::write_raw(Kind::Loaded, &[], &mut bytes);
        let (_, mut host) = running();
        assert!(host.receive(&bytes).is_err());
        let (_, mut host) = preparing();
        host.receive(&bytes).unwrap();
        assert!(host.receive(&bytes).is_err());
    }

    #[test]
    fn the_host_sends_nothing_past_the_programs_own_limits() {
        let mut host = HostSession::new();
        host.receive(GuestSession::new().transmit()).unwrap();
        let limits = RunLimits { program_bytes: 3, input_bytes: 1, ..RunLimits::default() };
        let load = Load { limits, announce: false };
        assert!(host.load(&load, b"program").is_err());
        host.load(&load, b"pro").unwrap();
        assert!(host.start(&start(), b"{}").is_err());
        host.start(&start(), b"1").unwrap();
    }

    #[test]
    fn of_what_is_unfinished_the_last_is_kept_as_far_as_the_log_has_room() {
        let said = |say: &dyn Fn(&mut GuestSession)| {
            let (mut guest, mut host) = running();
            say(&mut guest);
            exchange(&mut guest, &mut host).unwrap();
            let told = core::iter::from_fn(|| host.poll_event()).count();
            let unfinished = host.take_unfinished();
            assert_eq!(host.take_unfinished(), None);
            (told, unfinished.map(|log| log.text))
        };
        let tell = |guest: &mut GuestSession, text: &str| guest.unfinished(2, text).unwrap();
        let kept = said(&|guest| ["a", "ab"].iter().for_each(|text| tell(guest, text)));
        assert_eq!(kept, (0, Some("ab".into())));
        assert_eq!(said(&|guest| ["a", ""].iter().for_each(|text| tell(guest, text))), (0, None));
        // A flood of them is one.
        let long = "a".repeat(LOG_RECORD_BYTES_MAX as usize + 1);
        let (told, kept) = said(&|guest| (0..100).for_each(|_| tell(guest, &long)));
        assert_eq!((told, kept.map(|text| text.len())), (0, Some(long.len() - 1)));
        // Records that came after it have the room: these leave too little by a byte.
        let records = RunLimits::default().log_bytes / LOG_RECORD_OVERHEAD_BYTES - 1;
        for (fewer, expected) in [(0, None), (1, Some("a".into()))] {
            let (_, kept) = said(&|guest| {
                tell(guest, "a");
                (fewer..records).for_each(|_| guest.log(0, "").unwrap());
            });
            assert_eq!(kept, expected);
        }
    }

    #[test]
    fn a_guest_cannot_reuse_or_skip_a_call_number() {
        for id in [0u32, 2] {
            let (mut guest, mut host) = running();
            let tool = ToolName::parse("a.b").unwrap();
            guest.call(&tool, b"{}", false).unwrap();
            exchange(&mut guest, &mut host).unwrap();
            let mut bytes = Vec::new();
            let call = Call { id, waits: false, tool, request: vec![] };
            frame::write_message(Kind::Call, &call, &mut bytes);
            assert_eq!(
                host.receive(&bytes),
                Err(SessionError::Peer(Misbehaviour::CallOutOfOrder { got: id, expected: 1 }))
            );
        }
    }

    #[test]
    fn a_guest_cannot_pass_the_runs_limits() {
        let limits = RunLimits::default();
        let tool = ToolName::parse("a.b").unwrap();

        let (mut guest, mut host) = running();
        for _ in 0..=limits.calls_in_flight {
            guest.call(&tool, b"{}", false).unwrap();
        }
        let refused = exchange(&mut guest, &mut host).unwrap_err();
        assert!(matches!(
            refused,
            SessionError::Peer(Misbehaviour::Over(OverLimit { what: "calls_in_flight", .. }))
        ));

        let (mut guest, mut host) = running();
        let half = vec![0; limits.output_bytes as usize / 2 + 1];
        guest.output(&half).unwrap();
        guest.output(&half).unwrap();
        let refused = exchange(&mut guest, &mut host).unwrap_err();
        assert!(matches!(
            refused,
            SessionError::Peer(Misbehaviour::Over(OverLimit { what: "output_bytes", .. }))
        ));

        let (mut guest, mut host) = running();
        for _ in 0..=limits.log_bytes / LOG_RECORD_OVERHEAD_BYTES {
            guest.log(0, "").unwrap();
        }
        let refused = exchange(&mut guest, &mut host).unwrap_err();
        assert!(matches!(
            refused,
            SessionError::Peer(Misbehaviour::Over(OverLimit { what: "log_bytes", .. }))
        ));

        let (mut guest, mut host) = running();
        for _ in 0..=limits.artifacts {
            guest.artifact("a", "b", b"").unwrap();
        }
        assert!(exchange(&mut guest, &mut host).is_err());
    }

    #[test]
    fn a_guest_cannot_send_what_no_bound_of_its_run_counts() {
        let said = |bytes: &[u8]| {
            let (_, mut host) = running();
            host.receive(bytes).unwrap_err()
        };
        let of_kind = |kind, level: u8, text: &str| {
            let mut bytes = Vec::new();
            frame::write_message(kind, &(level, text), &mut bytes);
            said(&bytes)
        };
        let over = |error: SessionError| match error {
            SessionError::Peer(Misbehaviour::Over(over)) => over.what,
            other => panic!("{other}"),
        };
        let long = "a".repeat(LOG_RECORD_BYTES_MAX as usize + 1);
        for kind in [Kind::Log, Kind::Unfinished] {
            assert_eq!(over(of_kind(kind, LOG_LEVEL_MAX + 1, "")), "log_level");
            assert_eq!(over(of_kind(kind, 0, &long)), "log_record_bytes");
        }
        let detail = "a".repeat(REASON_BYTES_MAX + 1);
        for ending in [
            Ending::Trap { kind: TrapKind::Other, detail: detail.clone() },
            Ending::Rejected { kind: RejectKind::Invalid, detail },
        ] {
            let mut bytes = Vec::new();
            frame::write_message(Kind::Ended, &end(ending), &mut bytes);
            assert_eq!(over(said(&bytes)), "reason_bytes");
        }
        let mut empty = Vec::new();
        frame::write_raw(Kind::Output, b"", &mut empty);
        let unexpected = FrameError::Unexpected { kind: Kind::Output };
        assert_eq!(said(&empty), unexpected.into());
    }

    #[test]
    fn a_guest_cannot_speak_before_its_turn() {
        let mut host = HostSession::new();
        let mut bytes = Vec::new();
        frame::write_raw(Kind::Output, b"early", &mut bytes);
        assert_eq!(
            host.receive(&bytes),
            Err(SessionError::Peer(Misbehaviour::Frame(FrameError::Unexpected {
                kind: Kind::Output
            })))
        );
    }

    /// That a guest keeps to them is not its own to say.
    #[test]
    fn a_guest_is_held_to_the_limits_of_its_calls() {
        let limits =
            RunLimits { calls: 1, request_bytes: 8, response_bytes: 4, ..RunLimits::default() };
        let running = || {
            let mut host = HostSession::new();
            host.receive(GuestSession::new().transmit()).unwrap();
            host.load(&Load { limits: limits.clone(), announce: false }, b"p").unwrap();
            host.start(&start(), b"1").unwrap();
            host
        };
        let called = |host: &mut HostSession, id, bytes: usize| {
            let tool = ToolName::parse("a.b").unwrap();
            let call = Call { id, waits: false, tool, request: vec![b' '; bytes] };
            let mut out = Vec::new();
            frame::write_message(Kind::Call, &call, &mut out);
            host.receive(&out)
        };
        let over = |error: SessionError| match error {
            SessionError::Peer(Misbehaviour::Over(over)) => over.what,
            other => panic!("{other}"),
        };
        let mut host = running();
        called(&mut host, 0, 8).unwrap();
        let settled = |bytes| {
            let body = vec![1; bytes];
            Settled { id: 0, code: None, duration_ns: 0, body, redacted: false }
        };
        assert!(host.settle(&settled(5)).is_err());
        host.settle(&settled(4)).unwrap();
        assert_eq!(over(called(&mut host, 1, 8).unwrap_err()), "calls");
        assert_eq!(over(called(&mut running(), 0, 9).unwrap_err()), "request_bytes");
    }
}
