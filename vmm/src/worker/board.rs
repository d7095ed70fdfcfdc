//! What the guest is wired to: the vsock device, the session on its one
//! stream, and the broker behind it.
//!
//! It runs on the vCPU's thread, inside the guest's exits, and decides when
//! the guest goes on. A guest that waits is kept in the exit by which it
//! began to wait until there is something for it: then a tool call and its
//! answer cost one exit, and so do a result and the wait for the next
//! program.

use std::os::fd::{AsRawFd as _, RawFd};

use forge_protocol::abi::CallCode;
use forge_protocol::frame::{self, Kind};
use forge_protocol::guest::{
    Artifact, Call, Ended, HostEvent, HostSession, Load, Log, SessionError, Settled,
};
use forge_protocol::platform::{CONTROL_MMIO, HOST_PORT, PAGE_BYTES, VSOCK_MMIO, control};
use forge_protocol::service::{Event as RunEventMessage, RunEvent};
use forge_protocol::worker::{
    CallRecord, CallSettled, Job, Prepare, PreparedJob, VmFailure, VmFailureKind,
};
use vm_memory::GuestMemoryMmap;

use super::broker_link::{BrokerLink, LinkError, wait_readable};
use crate::link::send_once;
use crate::machine::{Bus, Go, Stop};
use crate::vsock::{ConnectionId, Device, Event, Muxer};

/// Why the board stopped the machine.
#[derive(Debug)]
pub enum Verdict {
    /// The guest waits for a program, or with one loaded for a run.
    Ready,
    /// The guest reported the end of its run.
    Ended(Ended),
    /// The guest panicked and left a message of this many bytes, it says.
    Panicked {
        /// Its length.
        message_bytes: u32,
    },
    /// The deadline passed while the host waited for the guest's sake.
    Stopped,
    /// The guest broke a rule.
    Misbehaved(String),
    /// The connection to the broker is gone.
    BrokerLost(String),
    /// Our own bug.
    Internal(String),
}

/// What a run leaves.
#[derive(Debug, Default)]
pub struct Record {
    /// Its output.
    pub output: Vec<u8>,
    /// Its artifacts.
    pub artifacts: Vec<Artifact>,
    /// Its log.
    pub logs: Vec<Log>,
    /// Its calls: settled ones first, in the order in which they settled.
    pub calls: Vec<CallRecord>,
}

/// What the guest's own actions have made of the host's side of it: the state
/// of its device, connections and session. It belongs to a snapshot as the
/// guest's memory does.
#[derive(Debug)]
pub struct Wiring {
    device: Device,
    session: HostSession,
    stream: Option<ConnectionId>,
}

impl Wiring {
    /// The same for another guest with this memory, which is equal.
    #[must_use]
    pub fn fork(&self, memory: GuestMemoryMmap) -> Self {
        Self {
            device: self.device.fork(memory),
            session: self.session.clone(),
            stream: self.stream,
        }
    }
}

/// Wiring and broker link of one guest, and what its run has left so far.
#[derive(Debug)]
pub struct Board {
    wiring: Wiring,
    broker: Option<BrokerLink>,
    response_bytes_max: usize,
    stop: Stop,
    running: bool,
    record: Record,
    in_flight: Vec<CallRecord>,
    verdict: Option<Verdict>,
    /// Where to tell what happens as it happens.
    told: Option<RawFd>,
}

impl From<SessionError> for Verdict {
    fn from(error: SessionError) -> Self {
        match error {
            SessionError::Handshake(_) | SessionError::Peer(_) => {
                Self::Misbehaved(error.to_string())
            }
            SessionError::Misuse(_) => Self::Internal(error.to_string()),
        }
    }
}

impl From<LinkError> for Verdict {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Stopped => Self::Stopped,
            LinkError::Lost(_) | LinkError::Protocol(_) => Self::BrokerLost(error.to_string()),
        }
    }
}

impl Board {
    /// A board for a guest with this memory.
    #[must_use]
    pub fn new(memory: GuestMemoryMmap, stop: Stop) -> Self {
        let wiring = Wiring {
            device: Device::handed_over(memory, Muxer::listening_on([HOST_PORT])),
            session: HostSession::new(),
            stream: None,
        };
        Self::of(wiring, stop)
    }

    /// A board for a guest that stands where this wiring was taken.
    #[must_use]
    pub fn of(wiring: Wiring, stop: Stop) -> Self {
        Self {
            wiring,
            broker: None,
            response_bytes_max: 0,
            stop,
            running: false,
            record: Record::default(),
            in_flight: Vec::new(),
            verdict: None,
            told: None,
        }
    }

    /// The wiring as it is now.
    #[must_use]
    pub fn wiring(&self) -> &Wiring {
        &self.wiring
    }

    /// Puts the wiring back, and forgets the run.
    pub fn reset(&mut self, wiring: Wiring) {
        let response_bytes_max = self.response_bytes_max;
        *self = Self { response_bytes_max, ..Self::of(wiring, self.stop.clone()) };
    }

    /// Has the next run tell what happens, as it happens, on this socket.
    pub fn tell(&mut self, socket: RawFd) {
        self.told = Some(socket);
    }

    /// Tells it, as far as anybody wants to know.
    fn happened(&self, what: impl FnOnce() -> RunEvent) -> Result<(), Verdict> {
        let Some(socket) = self.told else { return Ok(()) };
        let mut bytes = Vec::new();
        // The supervisor knows the client's number.
        let event = RunEventMessage { number: 0, what: what() };
        // What the guest sent was within these bounds.
        frame::try_write_message(Kind::Event, &event, &mut bytes)
            .map_err(|error| Verdict::Internal(error.to_string()))?;
        let mut unsent = &bytes[..];
        while !unsent.is_empty() {
            match send_once(socket, unsent, None) {
                Ok(sent) => unsent = &unsent[sent..],
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {
                    // The time of who is not heard goes on all the same.
                    if self.stop.raised().is_some() {
                        return Err(Verdict::Stopped);
                    }
                }
                Err(error) => return Err(Verdict::Internal(format!("nobody listens: {error}"))),
            }
        }
        Ok(())
    }

    /// Why the machine was stopped last.
    pub fn take_verdict(&mut self) -> Option<Verdict> {
        self.verdict.take()
    }

    /// What the run left.
    pub fn take_record(&mut self) -> Record {
        let mut record = std::mem::take(&mut self.record);
        record.calls.append(&mut self.in_flight);
        record
    }

    /// Puts a program before a guest that stands ready, to be loaded ahead of
    /// its runs.
    ///
    /// # Errors
    /// If the guest is not ready: our bug.
    pub fn prepare(&mut self, order: &Prepare) -> Result<(), VmFailure> {
        let load = Load { announce: true, ..order.load.clone() };
        self.wiring.session.load(&load, &order.program).map_err(misused)?;
        self.response_bytes_max = load.limits.response_bytes as usize;
        self.flush();
        Ok(())
    }

    /// Puts a run before a guest that stands ready.
    ///
    /// # Errors
    /// If the guest is not ready or the job is past its own limits: our bug.
    pub fn begin(&mut self, job: &Job, broker: Option<BrokerLink>) -> Result<(), VmFailure> {
        let session = &mut self.wiring.session;
        session.load(&job.load, &job.program).map_err(misused)?;
        session.start(&job.start, &job.input).map_err(misused)?;
        self.response_bytes_max = job.load.limits.response_bytes as usize;
        self.set_off(broker);
        Ok(())
    }

    /// Puts a run before a guest that has the program already.
    ///
    /// # Errors
    /// If it has none or the input is past its limits: our bug.
    pub fn begin_prepared(
        &mut self,
        job: &PreparedJob,
        broker: Option<BrokerLink>,
    ) -> Result<(), VmFailure> {
        self.wiring.session.start(&job.start, &job.input).map_err(misused)?;
        self.set_off(broker);
        Ok(())
    }

    fn set_off(&mut self, broker: Option<BrokerLink>) {
        self.broker = broker;
        self.running = true;
        self.flush();
    }

    /// Whether the guest waits for what only a new order can give it.
    fn stands(&self) -> bool {
        !self.running && (self.wiring.session.is_ready() || self.wiring.session.is_loaded())
    }

    fn end(&mut self, verdict: impl Into<Verdict>) -> Go {
        self.verdict = Some(verdict.into());
        Go::Break(())
    }

    /// Works off what the guest sent, and if it waits, waits with it.
    fn serve(&mut self) -> Go {
        loop {
            if let Err(verdict) = self.take_in() {
                return self.end(verdict);
            }
            if self.stands() {
                // What the guest is answered goes out with the next order.
                return self.end(Verdict::Ready);
            }
            self.flush();
            if !self.wiring.session.guest_waits() {
                return Go::Continue(());
            }
            if let Err(verdict) = self.await_settled() {
                return self.end(verdict);
            }
        }
    }

    /// The guest has nothing to do until there is something to read.
    fn park(&mut self) -> Go {
        loop {
            self.flush();
            if self.wiring.device.guest_has_unread() {
                return Go::Continue(());
            }
            if self.in_flight.is_empty() {
                if self.stands() {
                    return self.end(Verdict::Ready);
                }
                return self.end(Verdict::Misbehaved(
                    "the guest waits for something that nobody will send".into(),
                ));
            }
            if let Err(verdict) = self.await_settled() {
                return self.end(verdict);
            }
        }
    }

    /// Takes what the guest sent through the session.
    fn take_in(&mut self) -> Result<(), Verdict> {
        while let Some(event) = self.wiring.device.muxer().poll_event() {
            match event {
                Event::Accepted(id) if self.wiring.stream.is_none() => {
                    self.wiring.stream = Some(id)
                }
                // One stream is all a guest gets (design decision 3).
                Event::Accepted(id) => {
                    if let Some(connection) = self.wiring.device.muxer().connection(id) {
                        connection.reset();
                    }
                }
                Event::Received(id) if self.wiring.stream == Some(id) => {
                    let connection = self.wiring.device.muxer().connection(id);
                    let bytes = connection.map(|c| c.take_incoming()).unwrap_or_default();
                    self.wiring.session.receive(&bytes)?;
                }
                Event::Closed(id) if self.wiring.stream == Some(id) => {
                    return Err(Verdict::Misbehaved("the guest closed its stream".into()));
                }
                Event::Received(_) | Event::Closed(_) => {}
            }
        }
        while let Some(event) = self.wiring.session.poll_event() {
            match event {
                HostEvent::Call(call) => self.call(&call)?,
                HostEvent::Output(bytes) => {
                    self.happened(|| RunEvent::Output(bytes.clone()))?;
                    self.record.output.extend_from_slice(&bytes);
                }
                HostEvent::Log(log) => {
                    self.happened(|| RunEvent::Log(log.clone()))?;
                    self.record.logs.push(log);
                }
                HostEvent::Artifact(artifact) => self.record.artifacts.push(artifact),
                HostEvent::Ended(ended) => return Err(Verdict::Ended(ended)),
            }
        }
        Ok(())
    }

    fn call(&mut self, call: &Call) -> Result<(), Verdict> {
        let record = CallRecord { id: call.id, tool: call.tool.clone(), settled: None };
        self.in_flight.push(record);
        self.happened(|| RunEvent::Called { call: call.id, tool: call.tool.clone() })?;
        match &mut self.broker {
            Some(broker) => Ok(broker.call(call, &self.stop)?),
            None => {
                let denied = Settled {
                    id: call.id,
                    code: Some(CallCode::Denied),
                    duration_ns: 0,
                    body: Vec::new(),
                    redacted: false,
                };
                self.settle(denied)
            }
        }
    }

    /// Waits until the broker settles something, no longer than the deadline.
    fn await_settled(&mut self) -> Result<(), Verdict> {
        let Some(broker) = &mut self.broker else {
            return Err(Verdict::Internal("a call is in flight without a broker".into()));
        };
        let settled = broker.receive(&self.stop)?;
        self.settle(settled)
    }

    fn settle(&mut self, mut settled: Settled) -> Result<(), Verdict> {
        let Some(at) = self.in_flight.iter().position(|call| call.id == settled.id) else {
            return Err(Verdict::BrokerLost("it settled a call that is not in flight".into()));
        };
        if settled.body.len() > self.response_bytes_max {
            settled.code = Some(CallCode::ResponseTooLarge);
            settled.body.clear();
        }
        let mut record = self.in_flight.remove(at);
        record.settled = Some(CallSettled {
            code: settled.code,
            duration_ns: settled.duration_ns,
            redacted: settled.redacted,
        });
        self.record.calls.push(record);
        let Settled { id: call, code, duration_ns, .. } = settled;
        self.happened(|| RunEvent::Settled { call, code, duration_ns })?;
        Ok(self.wiring.session.settle(&settled)?)
    }

    /// Hands the device what the session has for the guest.
    fn flush(&mut self) {
        let transmit = self.wiring.session.transmit();
        if let Some(id) = self.wiring.stream
            && !transmit.is_empty()
            && let Some(connection) = self.wiring.device.muxer().connection(id)
        {
            connection.send(transmit);
            transmit.clear();
        }
        self.wiring.device.deliver();
    }
}

fn misused(error: SessionError) -> VmFailure {
    VmFailure { kind: VmFailureKind::Internal, message: error.to_string() }
}

fn within(address: u64, page: u64) -> Option<u64> {
    address.checked_sub(page).filter(|offset| *offset < PAGE_BYTES)
}

impl Bus for Board {
    fn read(&mut self, address: u64, data: &mut [u8]) -> Go {
        match within(address, VSOCK_MMIO) {
            Some(offset) => {
                self.wiring.device.read(offset, data);
                Go::Continue(())
            }
            None => self.end(Verdict::Misbehaved(format!("a read of nothing at {address:#x}"))),
        }
    }

    fn write(&mut self, address: u64, data: &[u8]) -> Go {
        if let Some(offset) = within(address, VSOCK_MMIO) {
            self.wiring.device.write(offset, data);
            if self.wiring.device.is_broken() {
                return self.end(Verdict::Misbehaved("the guest broke its vsock queues".into()));
            }
            return self.serve();
        }
        let word = data.try_into().map_or(0, u32::from_le_bytes);
        match within(address, CONTROL_MMIO) {
            Some(control::PARK) => self.park(),
            Some(control::PANIC) => self.end(Verdict::Panicked { message_bytes: word }),
            Some(control::EXIT) => {
                self.end(Verdict::Misbehaved("the guest left without ending its run".into()))
            }
            _ => self.end(Verdict::Misbehaved(format!("a write to nothing at {address:#x}"))),
        }
    }
}

/// Waits for the broker's descriptor or a stop; `false` for the stop.
impl BrokerLink {
    fn receive(&mut self, stop: &Stop) -> Result<Settled, LinkError> {
        loop {
            if let Some(settled) = self.next_settled()? {
                return Ok(settled);
            }
            wait_readable(self.as_raw_fd(), stop)?;
            self.fill()?;
        }
    }
}
