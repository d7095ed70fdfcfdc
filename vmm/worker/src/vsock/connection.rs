//! One connection: its state and its credit. It knows neither guest memory
//! nor queues. Deliberately absent: connections that the host asks for.
//!
//! ```text
//!  guest opens:  REQUEST in ─▶ Accepted ─ RESPONSE out ─▶ Open
//!  handed over:  Open
//!  Open ─ SHUTDOWN both ways, or RST ─▶ gone
//! ```

use std::num::Wrapping;

use forge_protocol::platform::HOST_WINDOW;

/// What a guest may send us on one connection before we have consumed it, in
/// bytes (our `buf_alloc`).
pub const BUFFER_BYTES: u32 = HOST_WINDOW;

/// Operations of a packet (5.10.6).
pub mod op {
    #![allow(missing_docs)]
    pub const REQUEST: u16 = 1;
    pub const RESPONSE: u16 = 2;
    pub const RST: u16 = 3;
    pub const SHUTDOWN: u16 = 4;
    pub const RW: u16 = 5;
    pub const CREDIT_UPDATE: u16 = 6;
    pub const CREDIT_REQUEST: u16 = 7;
}

/// SHUTDOWN flag: the sender will receive no more (5.10.6.5).
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// SHUTDOWN flag: the sender will send no more.
pub const SHUTDOWN_SEND: u32 = 2;

/// The fields of a packet header that a connection looks at, copied once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// The operation, one of [`op`].
    pub operation: u16,
    /// Flags of a SHUTDOWN.
    pub flags: u32,
    /// The sender's whole receive buffer, in bytes.
    pub buffer_bytes: u32,
    /// What the sender has consumed of what it got, in bytes, modulo 2^32.
    pub forwarded: u32,
}

/// Where a connection stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The guest asked; our RESPONSE is not yet out.
    Accepted,
    /// Bytes flow.
    Open,
    /// It is over; a RST is to go out, if the peer has not sent one itself.
    Over { tell: bool },
}

/// How a packet breaks the rules. Each resets the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// More bytes than the credit we gave.
    PastCredit,
    /// An operation that does not fit the state.
    OutOfTurn,
    /// Data after the guest said it would send no more.
    AfterShutdown,
}

/// One connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    state: State,
    /// Bytes for the guest; the first `sent` of them are out already.
    outgoing: Vec<u8>,
    sent: usize,
    /// Bytes from the guest that nobody has taken.
    incoming: Vec<u8>,
    /// Counters of 5.10.6.3, modulo 2^32.
    sent_total: Wrapping<u32>,
    received_total: Wrapping<u32>,
    consumed_total: Wrapping<u32>,
    /// `consumed_total` as the guest last heard it.
    consumed_told: Wrapping<u32>,
    peer_buffer_bytes: u32,
    peer_consumed: Wrapping<u32>,
    /// The guest waits for our counters.
    credit_asked: bool,
    /// The guest's SHUTDOWN flags so far, and ours.
    peer_shutdown: u32,
    our_shutdown: u32,
    our_shutdown_out: bool,
}

/// What to send next.
#[derive(Debug, PartialEq, Eq)]
pub struct Outgoing<'a> {
    /// The header's own fields.
    pub header: Header,
    /// The payload of a RW.
    pub payload: &'a [u8],
}

impl Connection {
    fn new(state: State) -> Self {
        Self {
            state,
            outgoing: Vec::new(),
            sent: 0,
            incoming: Vec::new(),
            sent_total: Wrapping(0),
            received_total: Wrapping(0),
            consumed_total: Wrapping(0),
            consumed_told: Wrapping(0),
            peer_buffer_bytes: 0,
            peer_consumed: Wrapping(0),
            credit_asked: false,
            peer_shutdown: 0,
            our_shutdown: 0,
            our_shutdown_out: false,
        }
    }

    /// The guest's REQUEST, accepted.
    #[must_use]
    pub fn accept(request: Header) -> Self {
        let mut connection = Self::new(State::Accepted);
        connection.note_credit(request);
        connection
    }

    /// A connection that both sides know to be open from the start. What the
    /// guest takes on it stands in its first packet, and before that it is
    /// sent nothing.
    #[must_use]
    pub fn handed_over() -> Self {
        Self::new(State::Open)
    }

    /// Whether nothing is left to do.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.state == State::Over { tell: false }
    }

    /// Whether the guest will send no more.
    #[must_use]
    pub fn peer_is_done(&self) -> bool {
        self.peer_shutdown & SHUTDOWN_SEND != 0 || matches!(self.state, State::Over { .. })
    }

    /// Takes a packet from the guest.
    ///
    /// # Errors
    /// [`Violation`]; the connection is over and a RST is to go out.
    pub fn handle(&mut self, header: Header, payload: &[u8]) -> Result<(), Violation> {
        let handled = self.try_handle(header, payload);
        if handled.is_err() {
            self.state = State::Over { tell: true };
        }
        handled
    }

    fn try_handle(&mut self, header: Header, payload: &[u8]) -> Result<(), Violation> {
        self.note_credit(header);
        match (self.state, header.operation) {
            (_, op::RST) => self.state = State::Over { tell: false },
            (State::Open | State::Accepted, op::RW) => {
                if self.peer_shutdown & SHUTDOWN_SEND != 0 {
                    return Err(Violation::AfterShutdown);
                }
                let held = (self.received_total - self.consumed_total).0 as usize;
                if held + payload.len() > BUFFER_BYTES as usize {
                    return Err(Violation::PastCredit);
                }
                self.received_total += Wrapping(payload.len() as u32);
                self.incoming.extend_from_slice(payload);
            }
            (State::Open | State::Accepted, op::CREDIT_UPDATE) => {}
            (State::Open | State::Accepted, op::CREDIT_REQUEST) => self.credit_asked = true,
            (State::Open | State::Accepted, op::SHUTDOWN) => {
                self.peer_shutdown |= header.flags & (SHUTDOWN_RECEIVE | SHUTDOWN_SEND);
                if self.peer_shutdown == SHUTDOWN_RECEIVE | SHUTDOWN_SEND {
                    // 5.10.6.5: both directions are down; a RST confirms it.
                    self.state = State::Over { tell: true };
                }
            }
            (State::Over { .. }, _) => {}
            _ => return Err(Violation::OutOfTurn),
        }
        Ok(())
    }

    fn note_credit(&mut self, header: Header) {
        self.peer_buffer_bytes = header.buffer_bytes;
        self.peer_consumed = Wrapping(header.forwarded);
    }

    /// What the guest can still take, in bytes. A guest that shrinks its
    /// buffer below what is under way, or whose counter runs ahead, gets
    /// nothing until its counters make sense.
    fn credit(&self) -> usize {
        let under_way = (self.sent_total - self.peer_consumed).0;
        self.peer_buffer_bytes.saturating_sub(under_way) as usize
    }

    /// Takes all bytes that came from the guest.
    pub fn take_incoming(&mut self) -> Vec<u8> {
        self.consumed_total = self.received_total;
        std::mem::take(&mut self.incoming)
    }

    /// Queues bytes for the guest.
    pub fn send(&mut self, bytes: &[u8]) {
        if self.sent > 0 {
            self.outgoing.drain(..self.sent);
            self.sent = 0;
        }
        // Not twice what it has: it may be large, and a worker's memory is bounded.
        self.outgoing.reserve_exact(bytes.len());
        self.outgoing.extend_from_slice(bytes);
    }

    /// How many bytes are queued that the guest has not taken yet.
    #[must_use]
    pub fn unsent_bytes(&self) -> usize {
        self.outgoing.len() - self.sent
    }

    /// Ends the connection once all that is queued is out.
    pub fn shutdown(&mut self) {
        self.our_shutdown = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;
    }

    /// Ends the connection now.
    pub fn reset(&mut self) {
        self.state = State::Over { tell: true };
    }

    /// Whether [`Connection::poll`] would give something.
    #[must_use]
    pub fn wants_to_send(&self) -> bool {
        match self.state {
            State::Accepted => true,
            State::Over { tell } => tell,
            State::Open => {
                let data = self.outgoing.len() > self.sent;
                (data && self.credit() > 0 && self.peer_shutdown & SHUTDOWN_RECEIVE == 0)
                    || self.credit_asked
                    || self.guest_may_be_out_of_credit()
                    || (self.our_shutdown != 0 && !self.our_shutdown_out && !data)
            }
        }
    }

    /// The guest heard of less than half of the buffer being free.
    fn guest_may_be_out_of_credit(&self) -> bool {
        let unheard = (self.consumed_total - self.consumed_told).0;
        unheard > BUFFER_BYTES / 2
    }

    /// The next packet, whose payload has at most `payload_bytes_max` bytes.
    /// What it returns is sent as far as this connection is concerned.
    pub fn poll(&mut self, payload_bytes_max: usize) -> Option<Outgoing<'_>> {
        let mut payload = 0..0;
        let mut flags = 0;
        let operation = match self.state {
            State::Accepted => {
                self.state = State::Open;
                op::RESPONSE
            }
            State::Over { tell: true } => {
                self.state = State::Over { tell: false };
                op::RST
            }
            State::Open => {
                let data = self.outgoing.len() - self.sent;
                let bytes = data.min(self.credit()).min(payload_bytes_max);
                if bytes > 0 && self.peer_shutdown & SHUTDOWN_RECEIVE == 0 {
                    payload = self.sent..self.sent + bytes;
                    self.sent += bytes;
                    self.sent_total += Wrapping(bytes as u32);
                    op::RW
                } else if self.credit_asked || self.guest_may_be_out_of_credit() {
                    op::CREDIT_UPDATE
                } else if self.our_shutdown != 0 && !self.our_shutdown_out && data == 0 {
                    self.our_shutdown_out = true;
                    flags = self.our_shutdown;
                    op::SHUTDOWN
                } else {
                    return None;
                }
            }
            State::Over { tell: false } => return None,
        };
        self.credit_asked = false;
        self.consumed_told = self.consumed_total;
        let header = Header {
            operation,
            flags,
            buffer_bytes: BUFFER_BYTES,
            forwarded: self.consumed_total.0,
        };
        Some(Outgoing { header, payload: &self.outgoing[payload] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(operation: u16) -> Header {
        Header { operation, flags: 0, buffer_bytes: 1000, forwarded: 0 }
    }

    fn open() -> Connection {
        let mut connection = Connection::accept(header(op::REQUEST));
        assert_eq!(connection.poll(10).unwrap().header.operation, op::RESPONSE);
        connection
    }

    #[test]
    fn a_connection_that_is_handed_over_is_what_asking_for_it_leaves() {
        let mut asked = Connection::accept(Header { buffer_bytes: 0, ..header(op::REQUEST) });
        assert_eq!(asked.poll(10).unwrap().header.operation, op::RESPONSE);
        let mut handed = Connection::handed_over();
        assert_eq!(handed, asked);
        handed.send(b"x");
        assert!(handed.poll(10).is_none(), "sent before the guest said what it takes");
        handed.handle(header(op::RW), b"hello").unwrap();
        assert_eq!(handed.poll(10).unwrap().payload, b"x");
    }

    #[test]
    fn data_never_passes_the_credit_the_guest_gave() {
        let mut connection = open();
        connection.send(&[7; 2500]);
        let mut got = 0;
        while let Some(packet) = connection.poll(300) {
            assert_eq!(packet.header.operation, op::RW);
            got += packet.payload.len();
        }
        assert_eq!(got, 1000);
        let heard = Header { forwarded: 600, ..header(op::CREDIT_UPDATE) };
        connection.handle(heard, &[]).unwrap();
        assert_eq!(connection.poll(1000).unwrap().payload.len(), 600);
        assert!(connection.poll(1000).is_none());
    }

    #[test]
    fn a_guest_that_shrinks_its_buffer_or_lies_about_its_counter_gets_nothing() {
        let mut connection = open();
        connection.send(&[7; 1500]);
        assert_eq!(connection.poll(800).unwrap().payload.len(), 800);
        let shrunk = Header { buffer_bytes: 100, ..header(op::CREDIT_UPDATE) };
        connection.handle(shrunk, &[]).unwrap();
        assert!(connection.poll(800).is_none());
        let ahead = Header { forwarded: 900, ..header(op::CREDIT_UPDATE) };
        connection.handle(ahead, &[]).unwrap();
        assert!(connection.poll(800).is_none());
    }

    #[test]
    fn a_guest_cannot_send_past_the_credit_we_gave() {
        let mut connection = open();
        let half = vec![0; BUFFER_BYTES as usize / 2];
        connection.handle(header(op::RW), &half).unwrap();
        connection.handle(header(op::RW), &half).unwrap();
        assert_eq!(connection.handle(header(op::RW), &[0]), Err(Violation::PastCredit));
        assert_eq!(connection.poll(0).unwrap().header.operation, op::RST);
        assert!(connection.is_gone());
    }

    #[test]
    fn consuming_gives_credit_back_and_tells_it_unasked() {
        let mut connection = open();
        let most = vec![0; BUFFER_BYTES as usize / 2 + 1];
        connection.handle(header(op::RW), &most).unwrap();
        assert!(!connection.wants_to_send());
        assert_eq!(connection.take_incoming().len(), most.len());
        assert!(connection.wants_to_send());
        let update = connection.poll(0).unwrap();
        assert_eq!(update.header.operation, op::CREDIT_UPDATE);
        assert_eq!(update.header.forwarded, most.len() as u32);
        assert!(!connection.wants_to_send() && connection.poll(0).is_none(), "told once");
        connection.handle(header(op::RW), &most[1..]).unwrap();
        connection.take_incoming();
        assert!(!connection.wants_to_send() && connection.poll(0).is_none(), "half is enough");
    }

    #[test]
    fn credit_holds_where_the_counters_wrap() {
        let mut connection = open();
        let before = Wrapping(u32::MAX - 300);
        (connection.sent_total, connection.peer_consumed) = (before, before);
        (connection.received_total, connection.consumed_total) = (before, before);
        connection.send(&[7; 2000]);
        let at = |wrapped: u32| Header { forwarded: wrapped, ..header(op::CREDIT_UPDATE) };
        connection.handle(at(before.0), &[]).unwrap();
        assert_eq!(connection.poll(5000).unwrap().payload.len(), 1000);
        connection.handle(at((before + Wrapping(600)).0), &[]).unwrap();
        assert_eq!(connection.poll(5000).unwrap().payload.len(), 600);
        // A counter that goes back is a lie, and gives nothing.
        connection.handle(at(before.0), &[]).unwrap();
        assert!(!connection.wants_to_send() && connection.poll(5000).is_none());
        connection.handle(at((before + Wrapping(1600)).0), &[0; 600]).unwrap();
        assert_eq!(connection.poll(5000).unwrap().payload.len(), 400);
        let all = vec![0; BUFFER_BYTES as usize];
        connection.take_incoming();
        connection.handle(header(op::RW), &all).unwrap();
        assert_eq!(connection.handle(header(op::RW), &[0]), Err(Violation::PastCredit));
    }

    #[test]
    fn a_guest_without_a_buffer_is_sent_no_data_and_takes_none_of_its_receive_buffers() {
        let mut connection = open();
        connection.send(b"x");
        for (buffer_bytes, wants) in [(0, false), (1, true)] {
            let update = Header { buffer_bytes, ..header(op::CREDIT_UPDATE) };
            connection.handle(update, &[]).unwrap();
            assert_eq!(connection.wants_to_send(), wants);
            assert_eq!(connection.clone().poll(100).is_some(), wants);
        }
    }

    /// A device that heard of a packet and got none would use up the guest's receive
    /// buffers.
    #[test]
    fn a_connection_wants_to_send_where_there_is_a_packet_and_nowhere_else() {
        type Step = fn(&mut Connection);
        fn hear(connection: &mut Connection, header: Header) {
            let _ = connection.handle(header, &[]);
        }
        let steps: [Step; 11] = [
            |connection| connection.send(&[7; 700]),
            |connection| connection.shutdown(),
            |connection| connection.reset(),
            |connection| {
                let _ = connection.poll(500);
            },
            |connection| {
                let _ = connection.handle(header(op::RW), &vec![0; BUFFER_BYTES as usize / 2 + 1]);
            },
            |connection| drop(connection.take_incoming()),
            |connection| hear(connection, header(op::CREDIT_REQUEST)),
            |connection| {
                hear(connection, Header { buffer_bytes: 0, ..header(op::CREDIT_UPDATE) });
            },
            |connection| hear(connection, Header { forwarded: 700, ..header(op::CREDIT_UPDATE) }),
            |connection| {
                hear(connection, Header { flags: SHUTDOWN_RECEIVE, ..header(op::SHUTDOWN) });
            },
            |connection| hear(connection, Header { flags: SHUTDOWN_SEND, ..header(op::SHUTDOWN) }),
        ];
        let mut reached = vec![Connection::accept(header(op::REQUEST))];
        for _ in 0..4 {
            let mut next: Vec<Connection> = Vec::new();
            for (before, step) in reached.iter().flat_map(|one| steps.map(|step| (one, step))) {
                let mut connection = before.clone();
                step(&mut connection);
                assert_eq!(
                    connection.wants_to_send(),
                    connection.clone().poll(500).is_some(),
                    "{connection:?}"
                );
                if !next.contains(&connection) {
                    next.push(connection);
                }
            }
            reached = next;
        }
    }

    #[test]
    fn a_guest_that_receives_no_more_is_sent_no_data_and_may_go_on_sending() {
        let mut connection = open();
        connection.send(b"too late");
        let deaf = Header { flags: SHUTDOWN_RECEIVE, ..header(op::SHUTDOWN) };
        connection.handle(deaf, &[]).unwrap();
        assert!(!connection.wants_to_send() && connection.poll(100).is_none());
        connection.handle(header(op::RW), b"still here").unwrap();
        assert_eq!(connection.take_incoming(), b"still here");
        connection.handle(header(op::CREDIT_REQUEST), &[]).unwrap();
        assert_eq!(connection.poll(100).unwrap().header.operation, op::CREDIT_UPDATE);
        assert!(!connection.peer_is_done());
    }

    #[test]
    fn data_may_come_before_our_answer_is_out() {
        let mut connection = Connection::accept(header(op::REQUEST));
        connection.handle(header(op::CREDIT_UPDATE), &[]).unwrap();
        connection.handle(header(op::RW), b"at once").unwrap();
        assert_eq!(connection.poll(100).unwrap().header.operation, op::RESPONSE);
        assert_eq!(connection.take_incoming(), b"at once");
    }

    #[test]
    fn what_was_sent_is_not_kept() {
        let mut connection = open();
        for _ in 0..3 {
            connection.send(&[7; 300]);
            assert_eq!(connection.unsent_bytes(), 300);
            assert_eq!(connection.outgoing.len(), 300);
            assert_eq!(connection.poll(500).unwrap().payload.len(), 300);
        }
    }

    #[test]
    fn a_connection_that_we_end_at_once_is_told_and_gone() {
        let mut connection = open();
        connection.send(b"unsaid");
        connection.reset();
        assert!(connection.peer_is_done());
        assert_eq!(connection.poll(100).unwrap().header.operation, op::RST);
        assert!(connection.is_gone() && connection.poll(100).is_none());
    }

    #[test]
    fn what_comes_after_the_end_changes_nothing() {
        let mut connection = open();
        connection.handle(header(op::RST), &[]).unwrap();
        for operation in [op::RW, op::REQUEST, op::SHUTDOWN, 99] {
            connection.handle(header(operation), b"x").unwrap();
            assert!(connection.is_gone() && connection.take_incoming().is_empty());
        }
        let mut broken = open();
        broken.handle(header(op::REQUEST), &[]).unwrap_err();
        broken.handle(header(op::RW), b"x").unwrap();
        assert!(broken.take_incoming().is_empty());
        assert_eq!(broken.poll(100).unwrap().header.operation, op::RST);
        assert!(broken.poll(100).is_none());
    }

    #[test]
    fn flags_of_a_shutdown_that_mean_nothing_change_nothing() {
        let mut connection = open();
        let flags = |flags| Header { flags, ..header(op::SHUTDOWN) };
        connection.handle(flags(!3), &[]).unwrap();
        connection.send(b"x");
        assert_eq!(connection.poll(100).unwrap().payload, b"x");
        connection.handle(flags(u32::MAX), &[]).unwrap();
        assert_eq!(connection.poll(100).unwrap().header.operation, op::RST);
    }

    #[test]
    fn a_credit_request_is_answered() {
        let mut connection = open();
        connection.handle(header(op::CREDIT_REQUEST), &[]).unwrap();
        assert_eq!(connection.poll(0).unwrap().header.operation, op::CREDIT_UPDATE);
        assert!(connection.poll(0).is_none());
    }

    #[test]
    fn packets_out_of_turn_reset_the_connection() {
        for operation in [op::REQUEST, op::RESPONSE, 0, 99] {
            let mut connection = open();
            assert_eq!(connection.handle(header(operation), &[]), Err(Violation::OutOfTurn));
        }
    }

    #[test]
    fn shutdown_of_both_directions_is_confirmed_and_data_after_it_refused() {
        let mut connection = open();
        let half = Header { flags: SHUTDOWN_SEND, ..header(op::SHUTDOWN) };
        connection.handle(half, &[]).unwrap();
        assert!(connection.peer_is_done() && connection.state == State::Open);
        let mut other = open();
        other.handle(half, &[]).unwrap();
        assert_eq!(other.handle(header(op::RW), b"x"), Err(Violation::AfterShutdown));
        let rest = Header { flags: SHUTDOWN_RECEIVE, ..header(op::SHUTDOWN) };
        connection.handle(rest, &[]).unwrap();
        assert_eq!(connection.poll(0).unwrap().header.operation, op::RST);
        assert!(connection.is_gone());
    }

    #[test]
    fn our_shutdown_waits_for_what_is_queued() {
        let mut connection = open();
        connection.send(b"last words");
        connection.shutdown();
        let full = Header { buffer_bytes: 0, ..header(op::CREDIT_UPDATE) };
        connection.handle(full, &[]).unwrap();
        assert!(connection.poll(100).is_none());
        connection.handle(header(op::CREDIT_UPDATE), &[]).unwrap();
        assert_eq!(connection.poll(100).unwrap().payload, b"last words");
        let shutdown = connection.poll(100).unwrap();
        assert_eq!(shutdown.header.operation, op::SHUTDOWN);
        assert_eq!(shutdown.header.flags, SHUTDOWN_RECEIVE | SHUTDOWN_SEND);
        assert!(connection.poll(100).is_none(), "said once");
    }
}
