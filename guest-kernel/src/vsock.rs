//! The virtio socket driver (virtio 1.2, 5.10) and its one stream.
//!
//! The VMM hands the device over live, as firmware would, and with one stream
//! open, so there is nothing to negotiate and nobody to ask. There is no other
//! stream: who asks for one is told so with a reset. Every notification is a
//! VM exit, so the driver counts them: a message to the host is one, and if
//! the host answers within it, the answer costs none. Received bytes are read
//! where the device put them. There is no event queue: its one event tells
//! that the context id changed by migration, which a guest that serves one
//! run does not live to see.

use alloc::vec::Vec;

use forge_protocol::platform::{
    GUEST_CID, GUEST_PORT, HOST_CID, HOST_PORT, HOST_WINDOW, PAGE_BYTES, VSOCK_QUEUES, queue,
};

use crate::mmio::Control;
use crate::queue::{Buffer, ENTRIES, Queue, Rings};

const TYPE_STREAM: u16 = 1;
const OP_RST: u16 = 3;
const OP_SHUTDOWN: u16 = 4;
const OP_RW: u16 = 5;
const OP_CREDIT_UPDATE: u16 = 6;
const OP_CREDIT_REQUEST: u16 = 7;

/// The receive buffers, in the order in which they are first offered, in
/// bytes with the header of a packet. The device fills them in turn: the first
/// takes the program, the second what a prepared program still waits for.
/// Small as they are, the second and third share a page with the queues, and the
/// first lies next to that page.
///
/// The fourth is offered only once another was filled to its end: a stream of
/// much data takes it, others never touch it.
const RX_BYTES: [usize; ENTRIES] = [16 * 1024, 2560, 1024, 64 * 1024];
/// The buffer that is not offered at first.
const RX_SPARE: u16 = ENTRIES as u16 - 1;
/// What the host may send before it hears that some was consumed.
const RECEIVE_WINDOW: u32 = {
    let [first, second, third, fourth] = RX_BYTES;
    (first + second + third + fourth - ENTRIES * Header::BYTES) as u32
};
/// The most payload in one packet to the host.
const TX_PAYLOAD_BYTES_MAX: usize = 64 * 1024;

/// A packet's header (5.10.6).
#[derive(Clone, Copy)]
struct Header {
    source_cid: u64,
    destination_cid: u64,
    source_port: u32,
    destination_port: u32,
    payload_bytes: u32,
    kind: u16,
    operation: u16,
    flags: u32,
    buffer_bytes: u32,
    forwarded: u32,
}

impl Header {
    const BYTES: usize = 44;

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..8].copy_from_slice(&self.source_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.destination_cid.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.source_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.destination_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.kind.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.operation.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.buffer_bytes.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.forwarded.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Self {
            source_cid: long(0),
            destination_cid: long(8),
            source_port: word(16),
            destination_port: word(20),
            payload_bytes: word(24),
            kind: half(28),
            operation: half(30),
            flags: word(32),
            buffer_bytes: word(36),
            forwarded: word(40),
        }
    }
}

/// The page at [`VSOCK_QUEUES`].
#[repr(C, align(4096))]
struct Shared {
    rings: [Rings; queue::COUNT as usize],
    tx_header: [u8; Header::BYTES],
    third: [u8; RX_BYTES[2]],
    second: [u8; RX_BYTES[1]],
}

const _: () = assert!(size_of::<Shared>() as u64 == PAGE_BYTES);

const SHARED: *mut Shared = VSOCK_QUEUES as *mut Shared;

#[repr(C, align(4096))]
struct First([u8; RX_BYTES[0]]);

/// Last in the image, so that the heap follows it.
#[unsafe(link_section = ".bss.last")]
static mut FIRST: First = First([0; RX_BYTES[0]]);

/// The stream is over: the host reset or shut the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed;

/// The guest's one connection to the host.
pub struct Stream {
    rx: Queue,
    tx: Queue,
    /// The fourth receive buffer, from when it was first offered.
    spare: Vec<u8>,
    /// Bytes sent, modulo 2^32 (5.10.6.3).
    sent: u32,
    /// Bytes received and handed on, modulo 2^32.
    forwarded: u32,
    /// `forwarded` as the host last heard it.
    forwarded_told: u32,
    /// The host's receive window, and how much of it it has consumed.
    peer_buffer_bytes: u32,
    peer_forwarded: u32,
    /// What came while we were waiting to send.
    early: Vec<u8>,
    open: bool,
}

impl Stream {
    /// Takes the device over, and the stream that is open on it. To be called
    /// once.
    #[must_use]
    pub fn take_over() -> Self {
        // SAFETY: `take_over` is called once, so the queues are taken over once.
        let (rx, tx) = unsafe { (Queue::take_over(queue::RX), Queue::take_over(queue::TX)) };
        let mut stream = Self {
            rx,
            tx,
            spare: Vec::new(),
            sent: 0,
            forwarded: 0,
            forwarded_told: 0,
            peer_buffer_bytes: HOST_WINDOW,
            peer_forwarded: 0,
            early: Vec::new(),
            open: true,
        };
        for index in (0..ENTRIES as u16).filter(|index| *index != RX_SPARE) {
            stream.offer_receive_buffer(index);
        }
        stream.rx.notify();
        stream
    }

    /// Sends all of `bytes`. Blocks while the host's window is full.
    ///
    /// # Errors
    /// [`Closed`].
    pub fn send(&mut self, mut bytes: &[u8]) -> Result<(), Closed> {
        while !bytes.is_empty() {
            if !self.open {
                return Err(Closed);
            }
            let in_flight = self.sent.wrapping_sub(self.peer_forwarded);
            let credit = self.peer_buffer_bytes.saturating_sub(in_flight) as usize;
            if credit == 0 {
                self.transmit(OP_CREDIT_REQUEST, &[]);
                self.await_credit();
                continue;
            }
            let (packet, rest) = bytes.split_at(bytes.len().min(credit).min(TX_PAYLOAD_BYTES_MAX));
            // Counted before the exit: the host's answer already knows of it.
            self.sent = self.sent.wrapping_add(packet.len() as u32);
            self.transmit(OP_RW, packet);
            bytes = rest;
        }
        Ok(())
    }

    /// Waits until something came, and hands each piece to `take`.
    ///
    /// # Errors
    /// [`Closed`].
    pub fn receive(&mut self, take: &mut dyn FnMut(&[u8])) -> Result<(), Closed> {
        if !self.early.is_empty() {
            take(&core::mem::take(&mut self.early));
            return Ok(());
        }
        loop {
            let mut got = 0;
            while self.poll(&mut |piece| {
                got += piece.len();
                take(piece);
            }) {}
            if got > 0 {
                return Ok(());
            }
            if !self.open {
                return Err(Closed);
            }
            // Credit rides on the next packet out. Only if the host may be
            // out of it does it need a packet of its own, and then that exit
            // is also the wait.
            if self.forwarded.wrapping_sub(self.forwarded_told) > RECEIVE_WINDOW / 2 {
                self.transmit(OP_CREDIT_UPDATE, &[]);
            } else {
                Control::park();
            }
        }
    }

    /// Waits until the host has consumed some, and keeps what else comes.
    fn await_credit(&mut self) {
        let before = self.peer_forwarded;
        while self.peer_forwarded == before && self.open {
            let mut early = core::mem::take(&mut self.early);
            let handled = self.poll(&mut |piece| early.extend_from_slice(piece));
            self.early = early;
            if !handled {
                Control::park();
            }
        }
    }

    /// Handles one received packet; whether there was one.
    fn poll(&mut self, take: &mut dyn FnMut(&[u8])) -> bool {
        let Some((index, written)) = self.rx.take_used() else {
            return false;
        };
        let buffer = self.receive_buffer(index);
        let written = (written as usize).min(buffer.bytes as usize);
        let is_full = written == buffer.bytes as usize;
        // SAFETY: `index` is in bounds (take_used), and the device has given
        // the buffer back, so nobody writes it until it is offered again
        // below, after the last use of this slice.
        let buffer = unsafe { core::slice::from_raw_parts(buffer.address as *const u8, written) };
        if let Some((header, payload)) = buffer.split_first_chunk::<{ Header::BYTES }>() {
            let header = Header::from_bytes(header);
            let payload = &payload[..payload.len().min(header.payload_bytes as usize)];
            self.handle(header, payload, take);
        }
        self.offer_receive_buffer(index);
        if is_full {
            self.offer_spare();
        }
        self.rx.notify();
        true
    }

    /// Offers the fourth buffer, if there is memory for it.
    fn offer_spare(&mut self) {
        let bytes = RX_BYTES[RX_SPARE as usize];
        if self.spare.capacity() == 0 && self.spare.try_reserve_exact(bytes).is_ok() {
            self.offer_receive_buffer(RX_SPARE);
        }
    }

    fn handle(&mut self, header: Header, payload: &[u8], take: &mut dyn FnMut(&[u8])) {
        let ours = header.source_cid == HOST_CID
            && header.source_port == HOST_PORT
            && header.destination_port == GUEST_PORT
            && header.kind == TYPE_STREAM;
        if !ours {
            if header.operation != OP_RST {
                self.refuse(header);
            }
            return;
        }
        self.peer_buffer_bytes = header.buffer_bytes;
        self.peer_forwarded = header.forwarded;
        match header.operation {
            OP_RW => {
                self.forwarded = self.forwarded.wrapping_add(payload.len() as u32);
                take(payload);
            }
            OP_CREDIT_UPDATE => {}
            OP_CREDIT_REQUEST => self.transmit(OP_CREDIT_UPDATE, &[]),
            OP_RST | OP_SHUTDOWN => self.open = false,
            _ => self.refuse(header),
        }
    }

    /// Answers a packet that belongs to no stream of ours with a reset
    /// (5.10.6.4).
    fn refuse(&mut self, header: Header) {
        let reset = Header {
            source_cid: GUEST_CID,
            destination_cid: header.source_cid,
            source_port: header.destination_port,
            destination_port: header.source_port,
            payload_bytes: 0,
            kind: header.kind,
            operation: OP_RST,
            flags: 0,
            buffer_bytes: 0,
            forwarded: 0,
        };
        self.transmit_packet(reset, &[]);
    }

    fn transmit(&mut self, operation: u16, payload: &[u8]) {
        self.forwarded_told = self.forwarded;
        let header = Header {
            source_cid: GUEST_CID,
            destination_cid: HOST_CID,
            source_port: GUEST_PORT,
            destination_port: HOST_PORT,
            payload_bytes: payload.len() as u32,
            kind: TYPE_STREAM,
            operation,
            flags: 0,
            buffer_bytes: RECEIVE_WINDOW,
            forwarded: self.forwarded,
        };
        self.transmit_packet(header, payload);
    }

    /// Gives the device a packet and waits until it has taken it, which a
    /// device does inside the notification.
    fn transmit_packet(&mut self, header: Header, payload: &[u8]) {
        // SAFETY: the device has no descriptor of the transmit queue now: the
        // last packet was waited for. The header is written before it is
        // offered.
        let header_address = unsafe {
            let place = &raw mut (*SHARED).tx_header;
            place.write_volatile(header.to_bytes());
            place as u64
        };
        let header =
            Buffer { address: header_address, bytes: Header::BYTES as u32, device_writes: false };
        // Addresses are physical ones: the guest is mapped one to one.
        let payload_buffer = Buffer {
            address: payload.as_ptr() as u64,
            bytes: payload.len() as u32,
            device_writes: false,
        };
        let chain = [header, payload_buffer];
        self.tx.offer(0, if payload.is_empty() { &chain[..1] } else { &chain });
        self.tx.notify();
        while self.tx.take_used().is_none() {
            Control::park();
        }
    }

    /// Where a receive buffer is. The spare one must be there.
    fn receive_buffer(&self, index: u16) -> Buffer {
        // SAFETY: addresses of what is there for the life of the VM; taken,
        // not read.
        let address = unsafe {
            match index {
                0 => (&raw const FIRST) as u64,
                1 => (&raw const (*SHARED).second) as u64,
                2 => (&raw const (*SHARED).third) as u64,
                _ => self.spare.as_ptr() as u64,
            }
        };
        Buffer { address, bytes: RX_BYTES[usize::from(index)] as u32, device_writes: true }
    }

    fn offer_receive_buffer(&mut self, index: u16) {
        let buffer = self.receive_buffer(index);
        self.rx.offer(index, &[buffer]);
    }
}
