//! The guest's side. It bounds what the host sends; that the run keeps its limits
//! is the care of whoever calls it.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;

use super::error::{Misbehaviour, SessionError};
use super::message::{self, Ended, Load, Settled, Start};
use crate::codec::Encode;
use crate::frame::{self, Assembler, Frame, FrameError, Kind};
use crate::handshake::{HandshakeError, Hello, Refusal, Role};
use crate::limits::{LOG_RECORD_BYTES_MAX, MESSAGE_OVERHEAD_BYTES, RunLimits};
use crate::name::ToolName;

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

/// [`Call`](super::Call) without owning its request; the same bytes on the wire.
#[derive(Encode)]
struct CallRef<'a> {
    id: u32,
    waits: bool,
    tool: &'a ToolName,
    request: &'a [u8],
}

/// [`Artifact`](crate::run::Artifact) without owning its content; the same
/// bytes on the wire.
#[derive(Encode)]
struct ArtifactRef<'a> {
    name: &'a str,
    media_type: &'a str,
    content: &'a [u8],
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
                Hello::ours(Role::Guest).agree(message::read(&frame)?, Role::Host)?;
                GuestState::Waiting
            }
            (GuestState::Greeting, Kind::Refuse) => {
                let Refusal(theirs) = message::read(&frame)?;
                return Err(HandshakeError::VersionMismatch {
                    theirs,
                    ours: Hello::ours(Role::Guest),
                }
                .into());
            }
            (GuestState::Waiting, Kind::Load) => GuestState::Loading(message::read(&frame)?),
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
                GuestState::Feeding(limits, message::read(&frame)?)
            }
            (GuestState::Feeding(limits, start), Kind::Input) => {
                let order = RunOrder { start, input: frame.payload };
                self.events.push_back(GuestEvent::Run(order));
                GuestState::Running { response_bytes: limits.response_bytes }
            }
            (state @ GuestState::Running { .. }, Kind::Settled) => {
                let settled: Settled = message::read(&frame)?;
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

#[cfg(test)]
mod tests {
    use super::super::pair::{preparing, start};
    use super::*;

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
}
