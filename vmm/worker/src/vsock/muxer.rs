//! All connections of one guest: which packet belongs to which, and which
//! goes out next.

use std::collections::{BTreeMap, VecDeque};

use super::connection::{BUFFER_BYTES, Connection, Header, Outgoing, op};

/// Connections one guest may have. A guest that asks for more is refused.
pub const CONNECTIONS_MAX: usize = 64;
/// Refusals waiting for room in the receive queue; beyond it they are lost,
/// as the guest brought that on itself.
const REFUSALS_MAX: usize = 64;

/// A connection, by its two ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionId {
    /// The port on the host's side.
    pub host_port: u32,
    /// The port on the guest's side.
    pub guest_port: u32,
}

/// What happened on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The guest connected to a port that is listened on.
    Accepted(ConnectionId),
    /// Bytes came.
    Received(ConnectionId),
    /// The connection is over, or the guest will send no more.
    Closed(ConnectionId),
}

/// Routes packets.
#[derive(Clone, Debug, Default)]
pub struct Muxer {
    listening: Vec<u32>,
    connections: BTreeMap<ConnectionId, Connection>,
    refusals: VecDeque<ConnectionId>,
    events: VecDeque<Event>,
    /// Where the search for the next packet goes on, so that no connection
    /// starves another.
    turn: Option<ConnectionId>,
}

impl Muxer {
    /// Accepts the guest's connections to these host ports.
    #[must_use]
    pub fn listening_on(ports: impl IntoIterator<Item = u32>) -> Self {
        Self { listening: ports.into_iter().collect(), ..Self::default() }
    }

    /// The same with this connection open already.
    #[must_use]
    pub fn with_open(mut self, id: ConnectionId) -> Self {
        self.connections.insert(id, Connection::handed_over());
        self
    }

    /// Takes a packet from the guest.
    pub fn handle(&mut self, id: ConnectionId, header: Header, payload: &[u8]) {
        if let Some(connection) = self.connections.get_mut(&id) {
            // A violation resets the connection; its RST goes out in turn.
            let violated = connection.handle(header, payload).is_err();
            if connection.peer_is_done() || violated {
                self.events.push_back(Event::Closed(id));
            } else if header.operation == op::RW {
                self.events.push_back(Event::Received(id));
            }
            if connection.is_gone() {
                self.connections.remove(&id);
            }
            return;
        }
        if header.operation == op::REQUEST
            && self.listening.contains(&id.host_port)
            && self.connections.len() < CONNECTIONS_MAX
        {
            self.connections.insert(id, Connection::accept(header));
            self.events.push_back(Event::Accepted(id));
        } else if header.operation != op::RST {
            self.refuse(id);
        }
    }

    /// Answers with a RST (5.10.6.4).
    pub fn refuse(&mut self, id: ConnectionId) {
        if self.refusals.len() < REFUSALS_MAX {
            self.refusals.push_back(id);
        }
    }

    /// Forgets every connection, as the device's reset does; the ports stay
    /// listened on.
    pub fn reset(&mut self) {
        *self = Self::listening_on(std::mem::take(&mut self.listening));
    }

    /// What happened. Worth calling after [`Muxer::handle`].
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The connection, if it is there.
    pub fn connection(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        self.connections.get_mut(&id)
    }

    /// How many connections there are.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Whether [`Muxer::poll`] would give something.
    #[must_use]
    pub fn wants_to_send(&self) -> bool {
        !self.refusals.is_empty() || self.connections.values().any(Connection::wants_to_send)
    }

    /// Gives the next packet to `place`, which says how many payload bytes fit
    /// before it is called: first refusals, then the connections in turn.
    /// Returns whether there was one.
    pub fn poll(
        &mut self,
        payload_bytes_max: usize,
        place: impl FnOnce(ConnectionId, Outgoing<'_>),
    ) -> bool {
        if let Some(id) = self.refusals.pop_front() {
            let header =
                Header { operation: op::RST, flags: 0, buffer_bytes: BUFFER_BYTES, forwarded: 0 };
            place(id, Outgoing { header, payload: &[] });
            return true;
        }
        let wants = |(_, connection): &(&ConnectionId, &Connection)| connection.wants_to_send();
        let next = match self.turn {
            Some(turn) => self
                .connections
                .range((std::ops::Bound::Excluded(turn), std::ops::Bound::Unbounded))
                .find(wants)
                .or_else(|| self.connections.iter().find(wants)),
            None => self.connections.iter().find(wants),
        };
        let Some(id) = next.map(|(id, _)| *id) else { return false };
        self.turn = Some(id);
        let Some(connection) = self.connections.get_mut(&id) else { return false };
        let Some(outgoing) = connection.poll(payload_bytes_max) else { return false };
        place(id, outgoing);
        if connection.is_gone() {
            self.connections.remove(&id);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::connection::SHUTDOWN_SEND;
    use super::*;

    fn id(host_port: u32, guest_port: u32) -> ConnectionId {
        ConnectionId { host_port, guest_port }
    }

    fn header(operation: u16) -> Header {
        Header { operation, flags: 0, buffer_bytes: 4096, forwarded: 0 }
    }

    fn next(muxer: &mut Muxer) -> Option<(ConnectionId, u16, Vec<u8>)> {
        let mut got = None;
        muxer.poll(100, |id, packet| {
            got = Some((id, packet.header.operation, packet.payload.to_vec()));
        });
        got
    }

    #[test]
    fn a_port_nobody_listens_on_is_refused() {
        let mut muxer = Muxer::listening_on([1024]);
        muxer.handle(id(80, 5), header(op::REQUEST), &[]);
        assert_eq!(next(&mut muxer), Some((id(80, 5), op::RST, vec![])));
        assert_eq!(muxer.connections(), 0);
    }

    #[test]
    fn packets_for_no_connection_are_refused_and_resets_are_not_answered() {
        let mut muxer = Muxer::listening_on([1024]);
        muxer.handle(id(1024, 5), header(op::RW), b"x");
        assert_eq!(next(&mut muxer), Some((id(1024, 5), op::RST, vec![])));
        muxer.handle(id(1024, 5), header(op::RST), &[]);
        assert_eq!(next(&mut muxer), None);
    }

    #[test]
    fn connections_and_refusals_are_bounded() {
        let mut muxer = Muxer::listening_on([1024]);
        for port in 0..65_536 {
            muxer.handle(id(1024, port), header(op::REQUEST), &[]);
        }
        assert_eq!(muxer.connections(), CONNECTIONS_MAX);
        assert_eq!(muxer.refusals.len(), REFUSALS_MAX);
        // After resets a good one gets through again.
        for port in 0..CONNECTIONS_MAX as u32 {
            muxer.handle(id(1024, port), header(op::RST), &[]);
        }
        muxer.handle(id(1024, 7), header(op::REQUEST), &[]);
        assert_eq!(muxer.connections(), 1);
    }

    #[test]
    fn connections_take_turns() {
        let mut muxer = Muxer::listening_on([1024]);
        for port in [1, 2] {
            muxer.handle(id(1024, port), header(op::REQUEST), &[]);
            next(&mut muxer);
            muxer.connection(id(1024, port)).unwrap().send(&[port as u8; 250]);
        }
        let order: Vec<u32> =
            std::iter::from_fn(|| next(&mut muxer)).map(|(id, ..)| id.guest_port).collect();
        assert_eq!(order, [1, 2, 1, 2, 1, 2]);
    }

    #[test]
    fn a_guest_that_resets_or_sends_no_more_has_closed_the_connection_for_its_user() {
        let done = Header { flags: SHUTDOWN_SEND, ..header(op::SHUTDOWN) };
        for (last, connections) in [(header(op::RST), 0), (done, 1)] {
            let mut muxer = Muxer::listening_on([1024]);
            muxer.handle(id(1024, 1), header(op::REQUEST), &[]);
            muxer.handle(id(1024, 1), header(op::RW), b"x");
            muxer.handle(id(1024, 1), last, &[]);
            let events: Vec<_> = std::iter::from_fn(|| muxer.poll_event()).collect();
            let of = id(1024, 1);
            assert_eq!(events, [Event::Accepted(of), Event::Received(of), Event::Closed(of)]);
            assert_eq!(muxer.connections(), connections);
        }
    }

    #[test]
    fn a_violation_closes_the_connection_for_its_user_too() {
        let mut muxer = Muxer::listening_on([1024]);
        muxer.handle(id(1024, 1), header(op::REQUEST), &[]);
        assert_eq!(muxer.poll_event(), Some(Event::Accepted(id(1024, 1))));
        muxer.handle(id(1024, 1), header(op::REQUEST), &[]);
        assert_eq!(muxer.poll_event(), Some(Event::Closed(id(1024, 1))));
        assert_eq!(next(&mut muxer), Some((id(1024, 1), op::RST, vec![])));
        assert_eq!(muxer.connections(), 0);
    }
}
