//! The link between a guest and its worker: messages, and a session for each
//! side. Neither has IO; bytes go in with `receive` and come out of
//! `transmit`.
//!
//! ```text
//!            guest                                host
//!   Greeting ──────────── Hello ────────────▶ Greeting
//!   Waiting  ◀─────────── Hello ───────────── Ready
//!   Loading  ◀─────── Load, Program ───────── Loading
//!   Loaded   ──── Loaded, if asked for ─────▶ Loaded
//!   Feeding  ◀─────── Start, Input ────────── Running
//!   Running  ──── Call ─────────────────────▶          any number,
//!            ◀─── Settled ───────────────────          several in flight
//!            ──── Output, Log, Artifact ────▶
//!   Ended    ──── Ended ────────────────────▶ Ended
//! ```
//!
//! A program is delivered in two steps. `Load` and `Program` hold nothing of a
//! run, so a guest that has said `Loaded` stands at "prepared program" and can
//! be kept or copied for any run of that program. Where `Load` asks for no
//! announcement, `Start` and `Input` may follow at once. A program that cannot
//! be loaded ends the session by `Ended`, in the place of `Loaded` or later.
//!
//! A guest serves one run: after `Ended` it is destroyed, or put back to the
//! moment it sent `Hello` or `Loaded`.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;

use crate::abi::CallCode;
use crate::codec::{self, BorrowDecode, CodecError, Decode, Encode};
use crate::ending::Ending;
use crate::frame::{self, Assembler, Frame, FrameError, Kind};
use crate::handshake::{HandshakeError, Hello, Refusal, Role};
use crate::limits::{
    LOG_RECORD_BYTES_MAX, MESSAGE_OVERHEAD_BYTES, OverLimit, REASON_BYTES_MAX, RunLimits, within,
};
use crate::name::ToolName;
use crate::run::{Artifact, Log, RunId};
use crate::tally::Tally;

/// What loading a program goes by: nothing that differs from run to run.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Load {
    /// What each run of the program may use.
    pub limits: RunLimits,
    /// The guest says [`Kind::Loaded`] and waits for [`Start`]. Without it
    /// `Start` may come at once, and nothing is said.
    pub announce: bool,
}

/// Everything a run needs beside its program, its limits and its input.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Start {
    /// Which run this is; for the guest a label, nothing more.
    pub run_id: RunId,
    /// Seeds the program's random numbers.
    pub seed: [u8; 32],
    /// Where virtual time starts, in nanoseconds since the Unix epoch.
    pub start_unix_ns: u64,
    /// The tools the program may import.
    pub granted: Vec<ToolName>,
}

/// One tool call.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Call {
    /// Counts from 0 within the run.
    pub id: u32,
    /// The guest does nothing until this call settles. A hint for whoever
    /// decides when the guest runs on.
    pub waits: bool,
    /// Which tool.
    pub tool: ToolName,
    /// Its arguments, as the program wrote them: JSON if it did well.
    pub request: Vec<u8>,
}

/// [`Call`] without owning its request; the same bytes on the wire.
#[derive(Encode)]
struct CallRef<'a> {
    id: u32,
    waits: bool,
    tool: &'a ToolName,
    request: &'a [u8],
}

/// The answer to one [`Call`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Settled {
    /// Which call.
    pub id: u32,
    /// `None`: the tool answered, and `body` is its response. `Some`: it did
    /// not, and `body` may say why.
    pub code: Option<CallCode>,
    /// How long the call took, in nanoseconds, as journalled: what virtual
    /// time advances by.
    pub duration_ns: u64,
    /// The response or the reason, JSON.
    pub body: Vec<u8>,
    /// Whether the broker removed credentials from the body.
    pub redacted: bool,
}

/// [`Artifact`] without owning its content; the same bytes on the wire.
#[derive(Encode)]
struct ArtifactRef<'a> {
    name: &'a str,
    media_type: &'a str,
    content: &'a [u8],
}

/// The end of a run, as the guest saw it: claims all.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Ended {
    /// How the program ended.
    pub ending: Ending,
    /// Fuel it used.
    pub fuel_used: u64,
    /// The most linear memory it had, in bytes.
    pub memory_peak_bytes: u64,
    /// Log records that did not fit.
    pub logs_dropped: u64,
    /// Time-stamp-counter ticks from the program's arrival to its first
    /// instruction.
    pub load_ticks: u64,
    /// Ticks from there to its end.
    pub run_ticks: u64,
}

impl Ended {
    /// Holds what explains the end to the bound that a guest cuts it to.
    ///
    /// # Errors
    /// [`OverLimit`].
    pub fn check(&self) -> Result<(), OverLimit> {
        match &self.ending {
            Ending::Trap { detail, .. } | Ending::Rejected { detail, .. } => {
                within("reason_bytes", detail.len() as u64, REASON_BYTES_MAX as u64)
            }
            Ending::Returned(_) | Ending::Limit { .. } => Ok(()),
        }
    }
}

/// How a peer broke the protocol. Each of these ends the link, and a guest's
/// VM with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misbehaviour {
    /// Bytes that are no frame, or a frame out of turn.
    Frame(FrameError),
    /// A frame whose payload does not decode.
    Payload {
        /// The frame's kind.
        kind: Kind,
        /// What is wrong with it.
        error: CodecError,
    },
    /// More than the run's limits, which a sound peer keeps itself.
    Over(OverLimit),
    /// A call that does not carry the next number.
    CallOutOfOrder {
        /// Its number.
        got: u32,
        /// The next number.
        expected: u32,
    },
    /// An answer to a call that is not in flight.
    NotInFlight {
        /// The call's number.
        id: u32,
    },
}

/// Why a session ends early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionError {
    /// The two sides do not fit together.
    Handshake(HandshakeError),
    /// The peer broke the protocol.
    Peer(Misbehaviour),
    /// This side's own code called the session out of turn: our bug.
    Misuse(&'static str),
}

impl core::fmt::Display for Misbehaviour {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Frame(error) => write!(f, "{error}"),
            Self::Payload { kind, error } => write!(f, "in a {kind:?} frame {error}"),
            Self::Over(over) => write!(f, "{over}"),
            Self::CallOutOfOrder { got, expected } => {
                write!(f, "call {got} came where {expected} was next")
            }
            Self::NotInFlight { id } => write!(f, "call {id} settled and is not in flight"),
        }
    }
}

impl core::fmt::Display for SessionError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Handshake(error) => write!(f, "{error}"),
            Self::Peer(how) => write!(f, "the peer broke the protocol: {how}"),
            Self::Misuse(what) => write!(f, "bug: {what}"),
        }
    }
}

impl core::error::Error for SessionError {}

impl From<FrameError> for SessionError {
    fn from(error: FrameError) -> Self {
        Self::Peer(Misbehaviour::Frame(error))
    }
}

impl From<OverLimit> for SessionError {
    fn from(over: OverLimit) -> Self {
        Self::Peer(Misbehaviour::Over(over))
    }
}

impl From<HandshakeError> for SessionError {
    fn from(error: HandshakeError) -> Self {
        Self::Handshake(error)
    }
}

/// Decodes a frame's payload as the message of its kind.
fn message<'a, T: BorrowDecode<'a, ()>>(frame: &'a Frame) -> Result<T, SessionError> {
    codec::decode(&frame.payload)
        .map_err(|error| SessionError::Peer(Misbehaviour::Payload { kind: frame.kind, error }))
}

/// What the guest's session tells the guest.
#[derive(Debug)]
pub enum GuestEvent {
    /// A program is to be loaded.
    Load(LoadOrder),
    /// It is to be run.
    Run(RunOrder),
    /// A call settled.
    Settled(Settled),
}

/// A program, arrived.
#[derive(Debug)]
pub struct LoadOrder {
    /// What to go by.
    pub load: Load,
    /// The signed program.
    pub program: Vec<u8>,
}

/// A run of it, arrived.
#[derive(Debug)]
pub struct RunOrder {
    /// What to go by.
    pub start: Start,
    /// The input.
    pub input: Vec<u8>,
}

#[derive(Debug)]
enum GuestState {
    Greeting,
    Waiting,
    /// `Load` is here, the program is not.
    Loading(Load),
    /// The program is here, and the host waits to hear that it is loaded.
    Preparing(RunLimits),
    /// `Start` may come.
    Loaded(RunLimits),
    /// `Start` is here as well, the input is not.
    Feeding(RunLimits, Start),
    Running {
        response_bytes: u32,
    },
    Ended,
}

/// The guest's side.
#[derive(Debug)]
pub struct GuestSession {
    state: GuestState,
    assembler: Assembler,
    events: VecDeque<GuestEvent>,
    transmit: Vec<u8>,
    next_call: u32,
    in_flight: BTreeSet<u32>,
}

impl Default for GuestSession {
    fn default() -> Self {
        Self::new()
    }
}

impl GuestSession {
    /// A session that has greeted: `transmit` holds the `Hello`.
    #[must_use]
    pub fn new() -> Self {
        let mut transmit = Vec::new();
        frame::write_message(Kind::Hello, &Hello::ours(Role::Guest), &mut transmit);
        Self {
            state: GuestState::Greeting,
            assembler: Assembler::default(),
            events: VecDeque::new(),
            transmit,
            next_call: 0,
            in_flight: BTreeSet::new(),
        }
    }

    /// Takes bytes from the host. Call [`GuestSession::poll_event`] after it.
    ///
    /// # Errors
    /// [`SessionError`]; the session is of no further use.
    pub fn receive(&mut self, mut input: &[u8]) -> Result<(), SessionError> {
        while !input.is_empty() {
            let state = &self.state;
            let awaits = |kind| Self::awaits(state, kind);
            let Some(frame) = self.assembler.next(&mut input, awaits)? else { continue };
            self.handle(frame)?;
        }
        Ok(())
    }

    fn awaits(state: &GuestState, kind: Kind) -> Option<u32> {
        match (state, kind) {
            (GuestState::Greeting, Kind::Hello | Kind::Refuse)
            | (GuestState::Waiting, Kind::Load)
            | (GuestState::Loaded(_), Kind::Start) => Some(kind.payload_bytes_max()),
            (GuestState::Loading(load), Kind::Program) => Some(load.limits.program_bytes),
            (GuestState::Feeding(limits, _), Kind::Input) => Some(limits.input_bytes),
            (GuestState::Running { response_bytes }, Kind::Settled) => {
                Some(response_bytes.saturating_add(MESSAGE_OVERHEAD_BYTES))
            }
            _ => None,
        }
    }

    fn handle(&mut self, frame: Frame) -> Result<(), SessionError> {
        let state = core::mem::replace(&mut self.state, GuestState::Ended);
        self.state = match (state, frame.kind) {
            (GuestState::Greeting, Kind::Hello) => {
                Hello::ours(Role::Guest).agree(message(&frame)?, Role::Host)?;
                GuestState::Waiting
            }
            (GuestState::Greeting, Kind::Refuse) => {
                let Refusal(theirs) = message(&frame)?;
                return Err(HandshakeError::VersionMismatch {
                    theirs,
                    ours: Hello::ours(Role::Guest),
                }
                .into());
            }
            (GuestState::Waiting, Kind::Load) => GuestState::Loading(message(&frame)?),
            (GuestState::Loading(load), Kind::Program) => {
                let limits = load.limits.clone();
                let next = if load.announce {
                    GuestState::Preparing(limits)
                } else {
                    GuestState::Loaded(limits)
                };
                let order = LoadOrder { load, program: frame.payload };
                self.events.push_back(GuestEvent::Load(order));
                next
            }
            (GuestState::Loaded(limits), Kind::Start) => {
                GuestState::Feeding(limits, message(&frame)?)
            }
            (GuestState::Feeding(limits, start), Kind::Input) => {
                let order = RunOrder { start, input: frame.payload };
                self.events.push_back(GuestEvent::Run(order));
                GuestState::Running { response_bytes: limits.response_bytes }
            }
            (state @ GuestState::Running { .. }, Kind::Settled) => {
                let settled: Settled = message(&frame)?;
                if !self.in_flight.remove(&settled.id) {
                    let id = settled.id;
                    return Err(SessionError::Peer(Misbehaviour::NotInFlight { id }));
                }
                self.events.push_back(GuestEvent::Settled(settled));
                state
            }
            (_, kind) => return Err(FrameError::Unexpected { kind }.into()),
        };
        Ok(())
    }

    /// What arrived. Worth calling after [`GuestSession::receive`].
    pub fn poll_event(&mut self) -> Option<GuestEvent> {
        self.events.pop_front()
    }

    /// Bytes for the host. The caller sends them in order and clears what it
    /// sent. Worth looking at after every call that writes.
    pub fn transmit(&mut self) -> &mut Vec<u8> {
        &mut self.transmit
    }

    /// Says that the program is loaded, if the host asked to hear of it. From
    /// here on it may send the run.
    ///
    /// # Errors
    /// [`SessionError::Misuse`] where no program is being loaded.
    pub fn loaded(&mut self) -> Result<(), SessionError> {
        match core::mem::replace(&mut self.state, GuestState::Ended) {
            GuestState::Preparing(limits) => {
                frame::write_raw(Kind::Loaded, &[], &mut self.transmit);
                self.state = GuestState::Loaded(limits);
            }
            // Nobody asked, and the run may have come already.
            state @ (GuestState::Loaded(_)
            | GuestState::Feeding(..)
            | GuestState::Running { .. }) => self.state = state,
            state => {
                self.state = state;
                return Err(SessionError::Misuse("loaded without a program"));
            }
        }
        Ok(())
    }

    /// Starts a call; returns its number. The caller keeps the run's limits.
    ///
    /// # Errors
    /// [`SessionError::Misuse`] outside a run.
    pub fn call(
        &mut self,
        tool: &ToolName,
        request: &[u8],
        waits: bool,
    ) -> Result<u32, SessionError> {
        self.must_run("a call outside a run")?;
        let id = self.next_call;
        self.next_call += 1;
        self.in_flight.insert(id);
        let call = CallRef { id, waits, tool, request };
        frame::write_message(Kind::Call, &call, &mut self.transmit);
        Ok(id)
    }

    /// Sends a piece of output.
    ///
    /// # Errors
    /// [`SessionError::Misuse`] outside a run.
    pub fn output(&mut self, bytes: &[u8]) -> Result<(), SessionError> {
        self.must_run("output outside a run")?;
        if bytes.is_empty() {
            return Ok(());
        }
        frame::write_raw(Kind::Output, bytes, &mut self.transmit);
        Ok(())
    }

    /// Sends a log record, cut to [`LOG_RECORD_BYTES_MAX`].
    ///
    /// # Errors
    /// [`SessionError::Misuse`] outside a run.
    pub fn log(&mut self, level: u8, text: &str) -> Result<(), SessionError> {
        self.must_run("a log record outside a run")?;
        let text = &text[..text.floor_char_boundary(LOG_RECORD_BYTES_MAX as usize)];
        frame::write_message(Kind::Log, &(level, text), &mut self.transmit);
        Ok(())
    }

    /// Tells a log record that is not finished, for a host that ends the run before it
    /// is. Takes the place of the one before; without text there is none.
    ///
    /// # Errors
    /// [`SessionError::Misuse`] outside a run.
    pub fn unfinished(&mut self, level: u8, text: &str) -> Result<(), SessionError> {
        self.must_run("a log record outside a run")?;
        let text = &text[..text.floor_char_boundary(LOG_RECORD_BYTES_MAX as usize)];
        frame::write_message(Kind::Unfinished, &(level, text), &mut self.transmit);
        Ok(())
    }

    /// Sends an artifact.
    ///
    /// # Errors
    /// [`SessionError::Misuse`] outside a run.
    pub fn artifact(
        &mut self,
        name: &str,
        media_type: &str,
        content: &[u8],
    ) -> Result<(), SessionError> {
        self.must_run("an artifact outside a run")?;
        let artifact = ArtifactRef { name, media_type, content };
        frame::write_message(Kind::Artifact, &artifact, &mut self.transmit);
        Ok(())
    }

    /// Sends the end of the run, or of the attempt to load its program.
    /// Nothing can follow.
    ///
    /// # Errors
    /// [`SessionError::Misuse`] before there is a program and after an end.
    pub fn ended(&mut self, ended: &Ended) -> Result<(), SessionError> {
        match self.state {
            GuestState::Preparing(_)
            | GuestState::Loaded(_)
            | GuestState::Feeding(..)
            | GuestState::Running { .. } => {}
            GuestState::Greeting
            | GuestState::Waiting
            | GuestState::Loading(_)
            | GuestState::Ended => return Err(SessionError::Misuse("an end of nothing")),
        }
        frame::write_message(Kind::Ended, ended, &mut self.transmit);
        self.state = GuestState::Ended;
        Ok(())
    }

    fn must_run(&self, otherwise: &'static str) -> Result<(), SessionError> {
        match self.state {
            GuestState::Running { .. } => Ok(()),
            _ => Err(SessionError::Misuse(otherwise)),
        }
    }
}

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
            Kind::Hello => return self.greeted(message(&frame)?),
            Kind::Loaded => {
                self.state = HostState::Loaded;
                return Ok(());
            }
            Kind::Call => HostEvent::Call(self.called(message(&frame)?)?),
            // No bound would count it.
            Kind::Output if frame.payload.is_empty() => {
                return Err(FrameError::Unexpected { kind: Kind::Output }.into());
            }
            Kind::Output => {
                self.tally.output(&frame.payload, &self.limits)?;
                HostEvent::Output(frame.payload)
            }
            Kind::Log => {
                let log: Log = message(&frame)?;
                self.tally.log(&log, &self.limits)?;
                HostEvent::Log(log)
            }
            Kind::Unfinished => {
                // One at most is kept, so there is nothing to count.
                let log: Log = message(&frame)?;
                log.check()?;
                self.unfinished = Some(log).filter(|log| !log.text.is_empty());
                return Ok(());
            }
            Kind::Artifact => {
                let artifact: Artifact = message(&frame)?;
                self.tally.artifact(&artifact, &self.limits)?;
                HostEvent::Artifact(artifact)
            }
            Kind::Ended => {
                let ended: Ended = message(&frame)?;
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
    use super::*;
    use crate::ending::{RejectKind, TrapKind};
    use crate::limits::{LOG_LEVEL_MAX, LOG_RECORD_OVERHEAD_BYTES};
    use alloc::vec;

    fn load(announce: bool) -> Load {
        Load { limits: RunLimits::default(), announce }
    }

    fn start() -> Start {
        Start {
            run_id: RunId([3; 16]),
            seed: [1; 32],
            start_unix_ns: 5,
            granted: vec![ToolName::parse("a.b").unwrap()],
        }
    }

    /// Moves all bytes both ways until nothing moves.
    fn exchange(guest: &mut GuestSession, host: &mut HostSession) -> Result<(), SessionError> {
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

    fn running() -> (GuestSession, HostSession) {
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

    fn end(ending: Ending) -> Ended {
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
    fn preparing() -> (GuestSession, HostSession) {
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
        let refused = end(Ending::Trap {
            kind: TrapKind::MemoryOutOfBounds,
            detail: "a data segment".into(),
        });
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
    fn a_run_cannot_reach_a_guest_that_is_still_loading() {
        let (mut guest, _) = preparing();
        let mut bytes = Vec::new();
        frame::write_message(Kind::Start, &start(), &mut bytes);
        assert_eq!(
            guest.receive(&bytes),
            Err(SessionError::Peer(Misbehaviour::Frame(FrameError::Unexpected {
                kind: Kind::Start
            })))
        );
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
    fn a_run_goes_the_whole_way() {
        let (mut guest, mut host) = running();
        let tool = ToolName::parse("a.b").unwrap();
        let id = guest.call(&tool, b"{\"q\":1}", true).unwrap();
        exchange(&mut guest, &mut host).unwrap();
        assert!(host.guest_waits());
        let expected = Call { id, waits: true, tool, request: b"{\"q\":1}".to_vec() };
        assert_eq!(host.poll_event(), Some(HostEvent::Call(expected)));

        let settled =
            Settled { id, code: None, duration_ns: 9, redacted: false, body: b"[]".to_vec() };
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

    #[test]
    fn the_host_cannot_settle_what_was_not_called() {
        let (mut guest, mut host) = running();
        let settled = Settled { id: 0, code: None, duration_ns: 0, redacted: false, body: vec![] };
        assert!(host.settle(&settled).is_err());
        let mut bytes = Vec::new();
        frame::write_message(Kind::Settled, &settled, &mut bytes);
        assert_eq!(
            guest.receive(&bytes),
            Err(SessionError::Peer(Misbehaviour::NotInFlight { id: 0 }))
        );
    }
}
