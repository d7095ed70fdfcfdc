//! What the guest is wired to: the vsock device, the session on its one
//! stream, and the broker behind it.
//!
//! It runs on the vCPU's thread, inside the guest's exits, and decides when
//! the guest goes on. A guest that waits is kept in the exit by which it
//! began to wait until there is something for it: then a tool call and its
//! answer cost one exit, and so do a result and the wait for the next
//! program.

use std::os::fd::RawFd;

use forge_protocol::guest::HostSession;
use forge_protocol::platform::{
    CONTROL_MMIO, GUEST_PORT, HOST_PORT, PAGE_BYTES, VSOCK_MMIO, control,
};
use forge_protocol::worker::{Job, Prepare, PreparedJob, VmFailure};
use vm_memory::GuestMemoryMmap;

use super::broker_link::BrokerLink;
use super::counterpart::{Counterpart, Record};
use super::verdict::Verdict;
use crate::machine::{Bus, Go, Stop};
use crate::vsock::{ConnectionId, Device, Event, Muxer};

/// The guest's one stream (design decision 3), open from the start.
const STREAM: ConnectionId = ConnectionId { host_port: HOST_PORT, guest_port: GUEST_PORT };

/// What the guest's own actions have made of the host's side of it: the state
/// of its device, connections and session. It belongs to a snapshot as the
/// guest's memory does.
#[derive(Debug)]
pub struct Wiring {
    device: Device,
    session: HostSession,
}

impl Wiring {
    /// The same for another guest with this memory, which is equal.
    #[must_use]
    pub fn fork(&self, memory: GuestMemoryMmap) -> Self {
        Self { device: self.device.fork(memory), session: self.session.clone() }
    }
}

/// Wiring and counterpart of one guest.
#[derive(Debug)]
pub struct Board {
    wiring: Wiring,
    counterpart: Counterpart,
    running: bool,
    verdict: Option<Verdict>,
}

impl Board {
    /// A board for a guest with this memory.
    #[must_use]
    pub fn new(memory: GuestMemoryMmap, stop: Stop) -> Self {
        let muxer = Muxer::listening_on([HOST_PORT]).with_open(STREAM);
        let device = Device::handed_over(memory, muxer);
        let wiring = Wiring { device, session: HostSession::new() };
        Self::of(wiring, stop)
    }

    /// A board for a guest that stands where this wiring was taken.
    #[must_use]
    pub fn of(wiring: Wiring, stop: Stop) -> Self {
        Self { wiring, counterpart: Counterpart::new(stop), running: false, verdict: None }
    }

    /// The wiring as it is now.
    #[must_use]
    pub fn wiring(&self) -> &Wiring {
        &self.wiring
    }

    /// Puts the wiring back, and forgets the run.
    pub fn reset(&mut self, wiring: Wiring) {
        self.counterpart.forget_run();
        (self.wiring, self.running, self.verdict) = (wiring, false, None);
    }

    /// Has the next run tell what happens, as it happens, on this socket.
    pub fn tell(&mut self, socket: RawFd) {
        self.counterpart.tell(socket);
    }

    /// Why the machine was stopped last.
    pub fn take_verdict(&mut self) -> Option<Verdict> {
        self.verdict.take()
    }

    /// What the run left.
    pub fn take_record(&mut self) -> Record {
        self.counterpart.take_record(&mut self.wiring.session)
    }

    /// Puts a program before a guest that stands ready, to be loaded ahead of
    /// its runs.
    ///
    /// # Errors
    /// If the guest is not ready: our bug.
    pub fn prepare(&mut self, order: &Prepare) -> Result<(), VmFailure> {
        self.counterpart.prepare(&mut self.wiring.session, order)?;
        self.flush();
        Ok(())
    }

    /// Puts a run before a guest that stands ready.
    ///
    /// # Errors
    /// If the guest is not ready or the job is past its own limits: our bug.
    pub fn begin(&mut self, job: &Job, broker: Option<BrokerLink>) -> Result<(), VmFailure> {
        self.counterpart.begin(&mut self.wiring.session, job, broker)?;
        self.set_off();
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
        self.counterpart.begin_prepared(&mut self.wiring.session, job, broker)?;
        self.set_off();
        Ok(())
    }

    fn set_off(&mut self) {
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
            if let Err(verdict) = self.flush_within_bounds() {
                return self.end(verdict);
            }
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
            if let Err(verdict) = self.flush_within_bounds() {
                return self.end(verdict);
            }
            if self.wiring.device.guest_has_unread() {
                return Go::Continue(());
            }
            if !self.counterpart.has_calls() {
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
                // A driver that has reset the device asks for its stream again.
                Event::Accepted(STREAM) => {}
                Event::Accepted(id) => {
                    if let Some(connection) = self.wiring.device.muxer().connection(id) {
                        connection.reset();
                    }
                }
                Event::Received(STREAM) => {
                    let connection = self.wiring.device.muxer().connection(STREAM);
                    let bytes = connection.map(|c| c.take_incoming()).unwrap_or_default();
                    self.wiring.session.receive(&bytes)?;
                }
                Event::Closed(STREAM) => {
                    return Err(Verdict::Misbehaved("the guest closed its stream".into()));
                }
                Event::Received(_) | Event::Closed(_) => {}
            }
        }
        self.counterpart.take_in(&mut self.wiring.session)
    }

    /// Waits until the broker settles something, no longer than the deadline.
    fn await_settled(&mut self) -> Result<(), Verdict> {
        self.counterpart.await_settled(&mut self.wiring.session)
    }

    /// Hands the device what the session has for the guest.
    fn flush(&mut self) {
        let transmit = self.wiring.session.transmit();
        if !transmit.is_empty()
            && let Some(connection) = self.wiring.device.muxer().connection(STREAM)
        {
            connection.send(transmit);
            transmit.clear();
        }
        self.wiring.device.deliver();
    }

    /// The same for a guest that makes calls, and may take no answer: what waits for
    /// it is kept in this process, whose memory is bounded.
    fn flush_within_bounds(&mut self) -> Result<(), Verdict> {
        self.flush();
        let connection = self.wiring.device.muxer().connection(STREAM);
        let untaken = connection.map_or(0, |connection| connection.unsent_bytes());
        let limit = self.counterpart.untaken_bytes_max();
        if untaken > limit {
            return Err(Verdict::Misbehaved(format!(
                "the guest leaves {untaken} bytes untaken, and {limit} can be waiting for it"
            )));
        }
        Ok(())
    }
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use forge_protocol::RunId;
    use forge_protocol::frame::{self, Kind};
    use forge_protocol::guest::{Call, GuestSession, Load, Settled, Start};
    use forge_protocol::limits::RunLimits;
    use forge_protocol::name::ToolName;

    use super::*;
    use crate::link::{Link, Patience};
    use crate::machine::{Watchdog, deadline_in};

    const ANSWER_BYTES: usize = 64 * 1024;

    fn job() -> Job {
        let limits = RunLimits {
            program_bytes: 7,
            input_bytes: 2,
            response_bytes: ANSWER_BYTES as u32,
            calls_in_flight: 2,
            ..RunLimits::default()
        };
        let run_id = RunId([0; 16]);
        Job {
            load: Load { limits, announce: false },
            start: Start { run_id, seed: [0; 32], start_unix_ns: 0, granted: Vec::new() },
            program: b"program".to_vec(),
            input: b"{}".to_vec(),
            deadline: deadline_in(std::time::Duration::from_secs(60)),
            brokered: true,
        }
    }

    #[test]
    fn a_guest_that_takes_no_answer_gets_no_more_of_them() {
        let watchdog = Watchdog::new().unwrap();
        let mut board = Board::new(GuestMemoryMmap::new(), watchdog.stop().clone());
        board.wiring.session.receive(GuestSession::new().transmit()).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        board.begin(&job(), Some(BrokerLink::new(theirs))).unwrap();
        let mut broker = Link::new(ours);
        // Each is answered before the next, so that no more than one is in flight.
        let mut answered = 0;
        let verdict = loop {
            let body = vec![b'1'; ANSWER_BYTES];
            let (id, code) = (answered, None);
            let settled = Settled { id, code, duration_ns: 1, body, redacted: false };
            let mut bytes = Vec::new();
            frame::write_message(Kind::Settled, &settled, &mut bytes);
            broker.send(&bytes, Patience::default()).unwrap();
            let tool = ToolName::parse("a.b").unwrap();
            let call = Call { id, waits: true, tool, request: Vec::new() };
            bytes.clear();
            frame::write_message(Kind::Call, &call, &mut bytes);
            board.wiring.session.receive(&bytes).unwrap();
            if board.serve().is_break() {
                break board.take_verdict();
            }
            answered += 1;
            assert!(answered < 50, "all answers are kept for it");
        };
        assert!(answered >= 2, "as many as it may have in flight");
        match verdict {
            Some(Verdict::Misbehaved(how)) => assert!(how.contains("untaken"), "{how}"),
            other => panic!("{other:?}"),
        }
    }
}
