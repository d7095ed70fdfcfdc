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
    use forge_protocol::platform::{GUEST_CID, HOST_CID, STACK, queue};
    use vm_memory::{Bytes as _, GuestAddress};

    use super::*;
    use crate::link::{Link, Patience};
    use crate::machine::{Watchdog, deadline_in};
    use crate::vsock::connection::op::{REQUEST, RST, RW, SHUTDOWN};

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

    /// A guest as its driver is seen from here: what lies in its memory, and its kicks.
    struct Guest {
        board: Board,
        memory: GuestMemoryMmap,
        session: GuestSession,
        sent: u16,
        taken: u16,
        forwarded: u32,
        _watchdog: Watchdog,
    }

    /// Where it has its packets, one page each.
    const PACKETS: u64 = STACK;
    const HEADER: usize = 44;
    const NOTIFY: u64 = VSOCK_MMIO + 0x50;

    impl Guest {
        fn new() -> Self {
            let watchdog = Watchdog::new().unwrap();
            let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 8 << 20)]).unwrap();
            let board = Board::new(memory.clone(), watchdog.stop().clone());
            let session = GuestSession::new();
            let (sent, taken, forwarded, _watchdog) = (0, 0, 0, watchdog);
            Self { board, memory, session, sent, taken, forwarded, _watchdog }
        }

        /// One that has greeted, with a buffer offered for what it is answered.
        fn greeted() -> Self {
            let mut guest = Self::new();
            guest.offer(0);
            assert!(guest.say().is_break());
            assert!(matches!(guest.board.take_verdict(), Some(Verdict::Ready)));
            guest
        }

        /// One in a run.
        fn running(broker: Option<BrokerLink>) -> Self {
            let mut guest = Self::greeted();
            guest.board.begin(&job(), broker).unwrap();
            guest.take();
            let events = std::iter::from_fn(|| guest.session.poll_event()).count();
            assert_eq!(events, 2, "a program and a run");
            guest
        }

        fn word<T: vm_memory::ByteValued>(&self, value: T, at: u64) {
            self.memory.write_obj(value, GuestAddress(at)).unwrap();
        }

        /// Puts a buffer of one page into a queue.
        fn publish(&self, of: u16, number: u16, page: u64, bytes: u32, flags: u16) {
            let head = number % queue::ENTRIES;
            let descriptor = queue::descriptors(of) + u64::from(head) * 16;
            self.word(page, descriptor);
            self.word(bytes, descriptor + 8);
            self.word(flags, descriptor + 12);
            self.word(head, queue::available(of) + 4 + u64::from(head) * 2);
            self.word(number + 1, queue::available(of) + 2);
        }

        /// Offers a buffer to receive by.
        fn offer(&self, number: u16) {
            self.publish(queue::RX, number, PACKETS, 4096, 2);
        }

        /// Sends a packet from this port.
        fn send(&mut self, operation: u16, port: u32, payload: &[u8]) -> Go {
            let mut packet = Vec::new();
            packet.extend_from_slice(&GUEST_CID.to_le_bytes());
            packet.extend_from_slice(&HOST_CID.to_le_bytes());
            packet.extend_from_slice(&port.to_le_bytes());
            packet.extend_from_slice(&HOST_PORT.to_le_bytes());
            packet.extend_from_slice(&(payload.len() as u32).to_le_bytes());
            packet.extend_from_slice(&1u16.to_le_bytes());
            packet.extend_from_slice(&operation.to_le_bytes());
            packet.extend_from_slice(&3u32.to_le_bytes());
            packet.extend_from_slice(&4000u32.to_le_bytes());
            packet.extend_from_slice(&self.forwarded.to_le_bytes());
            packet.extend_from_slice(payload);
            let page = PACKETS + 4096;
            self.memory.write_slice(&packet, GuestAddress(page)).unwrap();
            self.publish(queue::TX, self.sent, page, packet.len() as u32, 0);
            self.sent += 1;
            self.kick()
        }

        fn kick(&mut self) -> Go {
            self.board.write(NOTIFY, &u32::from(queue::TX).to_le_bytes())
        }

        /// Sends what its session has.
        fn say(&mut self) -> Go {
            let said = std::mem::take(self.session.transmit());
            self.send(RW, GUEST_PORT, &said)
        }

        /// The packet in its buffer, which it offers again.
        fn packet(&mut self) -> Option<(u16, u32, Vec<u8>)> {
            let used = queue::used(queue::RX);
            let there: u16 = self.memory.read_obj(GuestAddress(used + 2)).unwrap();
            if there == self.taken {
                return None;
            }
            let entry = used + 4 + u64::from(self.taken % queue::ENTRIES) * 8;
            let bytes: u32 = self.memory.read_obj(GuestAddress(entry + 4)).unwrap();
            let mut packet = vec![0; bytes as usize];
            self.memory.read_slice(&mut packet, GuestAddress(PACKETS)).unwrap();
            self.taken += 1;
            self.offer(self.taken);
            let port = u32::from_le_bytes(packet[20..24].try_into().unwrap());
            let operation = u16::from_le_bytes(packet[30..32].try_into().unwrap());
            let payload = packet.split_off(HEADER);
            self.forwarded += payload.len() as u32;
            Some((operation, port, payload))
        }

        /// Takes what there is for its session.
        fn take(&mut self) {
            while let Some((operation, _, payload)) = self.packet() {
                assert_eq!(operation, RW);
                self.session.receive(&payload).unwrap();
            }
        }

        fn park(&mut self) -> Go {
            self.board.write(CONTROL_MMIO + control::PARK, &[0; 4])
        }

        /// How it misbehaved, which ended it.
        #[track_caller]
        fn misbehaved(&mut self, went: Go) -> String {
            assert!(went.is_break());
            match self.board.take_verdict() {
                Some(Verdict::Misbehaved(how)) => how,
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_guest_that_stands_ready_or_loaded_is_left_there_until_an_order_comes() {
        let mut guest = Guest::greeted();
        guest.board.prepare(&Prepare { load: job().load, program: b"program".to_vec() }).unwrap();
        guest.take();
        assert_eq!(std::iter::from_fn(|| guest.session.poll_event()).count(), 1);
        guest.session.loaded().unwrap();
        assert!(guest.say().is_break());
        assert!(matches!(guest.board.take_verdict(), Some(Verdict::Ready)));
        assert!(guest.park().is_break());
        assert!(matches!(guest.board.take_verdict(), Some(Verdict::Ready)));
        let Job { start, input, deadline, brokered, .. } = job();
        let job = PreparedJob { start, input, deadline, brokered };
        guest.board.begin_prepared(&job, None).unwrap();
        guest.take();
        assert_eq!(std::iter::from_fn(|| guest.session.poll_event()).count(), 1);
    }

    #[test]
    fn a_guest_is_sent_no_more_than_a_greeting_before_it_takes_anything() {
        let mut guest = Guest::new();
        let greeting = std::mem::take(guest.session.transmit());
        let (first, rest) = greeting.split_at(3);
        assert!(guest.send(RW, GUEST_PORT, first).is_continue());
        assert!(guest.send(RW, GUEST_PORT, rest).is_break());
        assert!(matches!(guest.board.take_verdict(), Some(Verdict::Ready)));
        assert!(guest.park().is_break());
        assert!(matches!(guest.board.take_verdict(), Some(Verdict::Ready)));
    }

    #[test]
    fn a_guest_that_parks_goes_on_where_there_is_something_and_ends_where_nothing_will_come() {
        let mut early = Guest::new();
        let went = early.park();
        assert!(early.misbehaved(went).contains("nobody"));

        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut guest = Guest::running(Some(BrokerLink::new(theirs)));
        let went = guest.park();
        assert!(guest.misbehaved(went).contains("nobody"));

        let tool = ToolName::parse("a.b").unwrap();
        let id = guest.session.call(&tool, b"{}", false).unwrap();
        assert!(guest.say().is_continue(), "it does not wait");
        let settled =
            Settled { id, code: None, duration_ns: 1, body: b"1".to_vec(), redacted: false };
        let mut bytes = Vec::new();
        frame::write_message(Kind::Settled, &settled, &mut bytes);
        Link::new(ours).send(&bytes, Patience::default()).unwrap();
        // The first waits for the answer; the second finds it where it was put.
        for _ in 0..2 {
            assert!(guest.park().is_continue());
        }
        guest.take();
        assert!(guest.session.poll_event().is_some());
        let went = guest.park();
        assert!(guest.misbehaved(went).contains("nobody"));
    }

    #[test]
    fn a_guest_that_parks_and_takes_no_answer_gets_no_more_of_them() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut guest = Guest::running(Some(BrokerLink::new(theirs)));
        let mut broker = Link::new(ours);
        let tool = ToolName::parse("a.b").unwrap();
        for answered in 0..50 {
            let id = guest.session.call(&tool, b"{}", false).unwrap();
            assert!(guest.say().is_continue());
            let body = vec![b'1'; ANSWER_BYTES];
            let settled = Settled { id, code: None, duration_ns: 1, body, redacted: false };
            let mut bytes = Vec::new();
            frame::write_message(Kind::Settled, &settled, &mut bytes);
            broker.send(&bytes, Patience::default()).unwrap();
            guest.board.await_settled().unwrap();
            let untaken = guest.board.wiring.device.muxer().connection(STREAM).unwrap();
            let is_over =
                untaken.unsent_bytes() + ANSWER_BYTES > guest.board.counterpart.untaken_bytes_max();
            if guest.park().is_break() {
                assert!(is_over && answered >= 2);
                match guest.board.take_verdict() {
                    Some(Verdict::Misbehaved(how)) => assert!(how.contains("untaken"), "{how}"),
                    other => panic!("{other:?}"),
                }
                return;
            }
        }
        panic!("all answers are kept for it");
    }

    #[test]
    fn a_guest_that_closes_its_stream_is_served_no_further() {
        for operation in [RST, SHUTDOWN] {
            let mut guest = Guest::running(None);
            let went = guest.send(operation, GUEST_PORT, &[]);
            assert!(guest.misbehaved(went).contains("closed its stream"));
        }
    }

    #[test]
    fn a_guest_has_its_one_stream_and_no_other_says_anything_for_it() {
        let mut guest = Guest::running(None);
        let other = GUEST_PORT + 1;
        assert!(guest.send(REQUEST, other, &[]).is_continue());
        assert_eq!(guest.packet(), Some((RST, other, Vec::new())));
        assert!(guest.send(RW, other, b"words").is_continue());
        assert_eq!(guest.packet(), Some((RST, other, Vec::new())));
        assert_eq!(guest.board.wiring.device.muxer().connections(), 1);
        guest.session.output(b"mine").unwrap();
        assert!(guest.say().is_continue());
        assert_eq!(guest.board.take_record().output, b"mine");
    }

    #[test]
    fn a_guest_that_breaks_its_queues_is_served_no_further() {
        let mut guest = Guest::running(None);
        guest.word(100u16, queue::available(queue::TX) + 2);
        let went = guest.kick();
        assert!(guest.misbehaved(went).contains("queues"));
    }

    #[test]
    fn a_guest_ends_by_the_registers_that_say_so_and_by_those_that_are_none() {
        for (address, how) in [
            (CONTROL_MMIO + control::EXIT, "left"),
            (CONTROL_MMIO + 0x10, "nothing"),
            (CONTROL_MMIO + PAGE_BYTES, "nothing"),
            (VSOCK_MMIO - 4, "nothing"),
            (u64::MAX - 3, "nothing"),
        ] {
            let mut guest = Guest::running(None);
            let went = guest.board.write(address, &[0; 4]);
            assert!(guest.misbehaved(went).contains(how), "{address:#x}");
        }
        for address in [0, VSOCK_MMIO - 4, VSOCK_MMIO + PAGE_BYTES, CONTROL_MMIO, u64::MAX - 3] {
            let mut guest = Guest::running(None);
            let went = guest.board.read(address, &mut [0; 4]);
            assert!(guest.misbehaved(went).contains("nothing"), "{address:#x}");
        }
        let mut guest = Guest::running(None);
        let mut magic = [0; 4];
        assert!(guest.board.read(VSOCK_MMIO, &mut magic).is_continue());
        assert_eq!(&magic, b"virt");
        assert!(guest.board.read(VSOCK_MMIO + PAGE_BYTES - 4, &mut magic).is_continue());
        assert!(guest.board.write(VSOCK_MMIO + PAGE_BYTES - 4, &magic).is_continue());
        let panics = 300u32.to_le_bytes();
        assert!(guest.board.write(CONTROL_MMIO + control::PANIC, &panics).is_break());
        let verdict = guest.board.take_verdict();
        assert!(matches!(verdict, Some(Verdict::Panicked { message_bytes: 300 })), "{verdict:?}");
    }

    #[test]
    fn a_board_that_is_reset_has_nothing_of_the_run_and_stands_as_its_guest_does() {
        let mut guest = Guest::greeted();
        let before = guest.board.wiring().fork(guest.memory.clone());
        guest.board.begin(&job(), None).unwrap();
        guest.take();
        while guest.session.poll_event().is_some() {}
        guest.session.output(b"mine").unwrap();
        assert!(guest.say().is_continue());
        assert!(guest.board.write(CONTROL_MMIO + control::EXIT, &[0; 4]).is_break());
        guest.board.reset(before);
        assert!(guest.board.take_verdict().is_none());
        assert!(guest.board.take_record().output.is_empty());
        assert!(guest.board.stands() && !guest.board.counterpart.has_calls());
    }
}
