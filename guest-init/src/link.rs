//! The protocol session over a byte stream, and the decision when bytes leave.
//!
//! Each send costs an exit from the virtual machine, so output, log records
//! and artifacts gather here until the guest has to wait anyway, until
//! [`SEND_BYTES`] have gathered, or until the program has computed for
//! [`SEND_SLICES`] since: whoever is ended from outside leaves what it wrote
//! before. A call that blocks is thus one send, whatever
//! was written before it. Only `call_async` sends at once without
//! waiting: a call that was started should be under way while the program
//! computes. An unfinished line of standard error is told in the same way, so that the host
//! has it if it ends the run in the middle of the line; once the line is finished, all of it
//! is sent as one log record instead.
//!
//! The peer is the host. It is not trusted with our stability: what breaks the
//! protocol ends the link, and no byte of it can make this panic.

use alloc::vec::Vec;
use core::fmt;

use forge_protocol::guest::{
    Ended, GuestEvent, GuestSession, LoadOrder, RunOrder, SessionError, Settled,
};
use forge_protocol::limits::OverLimit;
use forge_protocol::name::ToolName;

/// What gathers before it is sent without a reason to wait, in bytes.
pub const SEND_BYTES: usize = 64 * 1024;

/// For how many slices of fuel something waits to be sent: some ten
/// milliseconds, beside which an exit is nothing.
pub const SEND_SLICES: u32 = 32;

/// Bytes to and from the host. Both methods block.
pub trait Stream {
    /// Sends all of `bytes`.
    ///
    /// # Errors
    /// [`LinkLost`]; nothing can be sent or received any more.
    fn send(&mut self, bytes: &[u8]) -> Result<(), LinkLost>;

    /// Waits until at least one byte is there, then hands each piece that is
    /// to `take`, in order.
    ///
    /// # Errors
    /// [`LinkLost`], as for [`Stream::send`].
    fn receive(&mut self, take: &mut dyn FnMut(&[u8])) -> Result<(), LinkLost>;

    /// A module is being instantiated, or no longer. Said to whoever is below
    /// because a kernel that knows which memory is zero can then spare itself
    /// from writing zeros to a new linear memory.
    fn instantiating(&mut self, is: bool) {
        let _ = is;
    }

    /// Asked between two stretches of work that no message interrupts: before
    /// and behind the loading of a program, and for each
    /// [`SLICE_FUEL`](crate::engine::SLICE_FUEL) of its run. Who can stop a guest from outside, as a VM's host can, has
    /// nothing to say here.
    ///
    /// # Errors
    /// [`LinkLost`]: nobody wants the rest.
    fn may_go_on(&mut self) -> Result<(), LinkLost> {
        Ok(())
    }
}

/// The stream ended or broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkLost;

impl fmt::Display for LinkLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the link to the host is lost")
    }
}

impl core::error::Error for LinkLost {}

/// Why a run could not be served. In a guest each of these ends the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServeError {
    /// The stream ended or broke.
    Link(LinkLost),
    /// The host broke the protocol, speaks another version of it, or we used
    /// the session out of turn.
    Session(SessionError),
    /// The host ordered a program past the protocol's absolute bounds.
    Order(OverLimit),
}

impl fmt::Display for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Link(error) => write!(f, "{error}"),
            Self::Session(error) => write!(f, "{error}"),
            Self::Order(over) => write!(f, "the run's order passes an absolute bound: {over}"),
        }
    }
}

impl core::error::Error for ServeError {}

impl From<LinkLost> for ServeError {
    fn from(error: LinkLost) -> Self {
        Self::Link(error)
    }
}

impl From<SessionError> for ServeError {
    fn from(error: SessionError) -> Self {
        Self::Session(error)
    }
}

/// The guest's end of the link.
#[derive(Debug)]
pub(crate) struct Link<S> {
    stream: S,
    session: GuestSession,
    /// Output that has no frame yet: programs write it in small pieces.
    output: Vec<u8>,
    /// Slices since something waits to be sent.
    waited: u32,
}

impl<S: Stream> Link<S> {
    /// A link whose greeting is ready to be sent.
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, session: GuestSession::new(), output: Vec::new(), waited: 0 }
    }

    /// Waits for the program.
    pub(crate) fn receive_program(&mut self) -> Result<LoadOrder, ServeError> {
        match self.next_event()? {
            GuestEvent::Load(order) => Ok(order),
            GuestEvent::Run(_) | GuestEvent::Settled(_) => {
                Err(SessionError::Misuse("something came before the program").into())
            }
        }
    }

    /// The program is loaded. If the host is to hear of it, that leaves with
    /// the next [`Link::receive_run`].
    pub(crate) fn loaded(&mut self) -> Result<(), ServeError> {
        Ok(self.session.loaded()?)
    }

    /// See [`Stream::instantiating`].
    pub(crate) fn instantiating(&mut self, is: bool) {
        self.stream.instantiating(is);
    }

    /// See [`Stream::may_go_on`].
    pub(crate) fn may_go_on(&mut self) -> Result<(), ServeError> {
        Ok(self.stream.may_go_on()?)
    }

    /// Counts a slice. Whether something has waited for long, be it here or `elsewhere`.
    pub(crate) fn is_due(&mut self, elsewhere: bool) -> bool {
        if !elsewhere && self.output.is_empty() && self.session.transmit().is_empty() {
            self.waited = 0;
            return false;
        }
        self.waited += 1;
        self.waited >= SEND_SLICES
    }

    /// Waits for the run.
    pub(crate) fn receive_run(&mut self) -> Result<RunOrder, ServeError> {
        match self.next_event()? {
            GuestEvent::Run(order) => Ok(order),
            GuestEvent::Load(_) | GuestEvent::Settled(_) => {
                Err(SessionError::Misuse("something else came before the run").into())
            }
        }
    }

    /// Waits until a call settles.
    pub(crate) fn receive_settled(&mut self) -> Result<Settled, ServeError> {
        match self.next_event()? {
            GuestEvent::Settled(settled) => Ok(settled),
            GuestEvent::Load(_) | GuestEvent::Run(_) => {
                Err(SessionError::Misuse("a second run on one link").into())
            }
        }
    }

    /// Starts a call the program will stand still for. It leaves with the next
    /// [`Link::receive_settled`].
    pub(crate) fn blocking_call(
        &mut self,
        tool: &ToolName,
        request: &[u8],
    ) -> Result<u32, ServeError> {
        self.frame_output()?;
        Ok(self.session.call(tool, request, true)?)
    }

    /// Starts a call the program runs on beside.
    pub(crate) fn start_call(
        &mut self,
        tool: &ToolName,
        request: &[u8],
    ) -> Result<u32, ServeError> {
        self.frame_output()?;
        let id = self.session.call(tool, request, false)?;
        self.send()?;
        Ok(id)
    }

    /// Appends to the run's output.
    pub(crate) fn output(&mut self, bytes: &[u8]) -> Result<(), ServeError> {
        self.output.extend_from_slice(bytes);
        if self.output.len() >= SEND_BYTES { self.send() } else { Ok(()) }
    }

    /// Sends a log record.
    pub(crate) fn log(&mut self, level: u8, text: &str) -> Result<(), ServeError> {
        self.frame_output()?;
        self.session.log(level, text)?;
        self.send_if_much()
    }

    /// Puts a log record that is not finished beside what waits to be sent.
    pub(crate) fn unfinished(&mut self, level: u8, text: &str) -> Result<(), ServeError> {
        Ok(self.session.unfinished(level, text)?)
    }

    /// Sends an artifact.
    pub(crate) fn artifact(
        &mut self,
        name: &str,
        media_type: &str,
        content: &[u8],
    ) -> Result<(), ServeError> {
        self.frame_output()?;
        self.session.artifact(name, media_type, content)?;
        self.send_if_much()
    }

    /// Sends the end of the run.
    pub(crate) fn ended(&mut self, ended: &Ended) -> Result<(), ServeError> {
        self.frame_output()?;
        self.session.ended(ended)?;
        self.send()
    }

    fn next_event(&mut self) -> Result<GuestEvent, ServeError> {
        loop {
            if let Some(event) = self.session.poll_event() {
                return Ok(event);
            }
            self.send()?;
            let session = &mut self.session;
            let mut taken = Ok(());
            self.stream.receive(&mut |bytes| {
                if taken.is_ok() {
                    taken = session.receive(bytes);
                }
            })?;
            taken?;
        }
    }

    /// Puts gathered output into a frame, so that what is written next comes
    /// after it.
    fn frame_output(&mut self) -> Result<(), ServeError> {
        if !self.output.is_empty() {
            self.session.output(&self.output)?;
            self.output.clear();
        }
        Ok(())
    }

    fn send_if_much(&mut self) -> Result<(), ServeError> {
        if self.session.transmit().len() >= SEND_BYTES { self.send() } else { Ok(()) }
    }

    /// Sends what waits.
    pub(crate) fn send(&mut self) -> Result<(), ServeError> {
        self.frame_output()?;
        self.waited = 0;
        let pending = self.session.transmit();
        if !pending.is_empty() {
            self.stream.send(pending)?;
            pending.clear();
        }
        Ok(())
    }
}
