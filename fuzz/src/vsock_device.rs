//! What a guest may do to its one device: registers, rings, descriptors and
//! packets, while the host side reads, answers and hangs up.
//!
//! ```text
//! input = state (u8: reset, or brought up)  steps
//! step  = one of
//!   0 register (u16 LE)  value (u32 LE)          write a register
//!   1 register (u16 LE)  width (u8)              read a register
//!   2 address (u32 LE)  length (u8)  bytes       write memory
//!   3 queue  head  flags (u8)  address length (u32 LE)   offer a descriptor
//!   4 operation  flags  guest port  length (u8)  send a sound packet
//!   5 ports' place (u8)  answer (u8)             the host answers or hangs up
//!   6                                            the host delivers
//! ```

use forge_protocol::platform::{GUEST_CID, HOST_CID, HOST_PORT};
use forge_worker::vsock::connection::{BUFFER_BYTES, op};
use forge_worker::vsock::device::Device;
use forge_worker::vsock::muxer::{CONNECTIONS_MAX, ConnectionId, Event, Muxer};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::{Outcome, Seed, accepted, choice, refused};

/// Guest memory, in bytes.
const RAM_BYTES: u32 = 1 << 18;
/// Where each queue's rings lie, and where packets are put.
const QUEUE_STRIDE: u32 = 0x1_0000;
const DESCRIPTORS: u32 = 0x1000;
const AVAILABLE: u32 = 0x2000;
const USED: u32 = 0x3000;
const PACKETS: u32 = 0x3_0000;
const ENTRIES: u16 = 8;
/// An input longer than this says nothing new.
const STEPS_MAX: usize = 512;

const RX: u32 = 0;
const TX: u32 = 1;

/// The registers that bring the device up (virtio 1.2, 4.2.2).
mod register {
    pub(super) const DRIVER_FEATURES: u64 = 0x020;
    pub(super) const DRIVER_FEATURES_SEL: u64 = 0x024;
    pub(super) const QUEUE_SEL: u64 = 0x030;
    pub(super) const QUEUE_NUM: u64 = 0x038;
    pub(super) const QUEUE_READY: u64 = 0x044;
    pub(super) const QUEUE_NOTIFY: u64 = 0x050;
    pub(super) const STATUS: u64 = 0x070;
    pub(super) const QUEUE_DESC_LOW: u64 = 0x080;
    pub(super) const QUEUE_DRIVER_LOW: u64 = 0x090;
    pub(super) const QUEUE_DEVICE_LOW: u64 = 0x0a0;
}

/// The device, its memory, and the driver's own counters.
struct Machine {
    memory: GuestMemoryMmap,
    device: Device,
    offered: [u16; 2],
    known: Vec<ConnectionId>,
    received_bytes: usize,
    sent_bytes: usize,
}

/// Nothing a guest does makes the device panic, and what it holds for the
/// guest stays bounded: connections, and bytes on each.
pub fn check(mut data: &[u8]) -> Outcome {
    let mut machine = Machine::new();
    if choice(&mut data) % 2 == 1 {
        machine.bring_up();
    }
    for _ in 0..STEPS_MAX {
        if data.is_empty() {
            break;
        }
        machine.step(&mut data);
        machine.read_events();
        assert!(machine.device.muxer().connections() <= CONNECTIONS_MAX);
    }
    Outcome::of(machine.received_bytes > 0 && !machine.device.is_broken())
}

fn word(data: &mut &[u8]) -> u32 {
    u32::from_le_bytes([choice(data), choice(data), choice(data), choice(data)])
}

impl Machine {
    fn new() -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM_BYTES as usize)])
            .expect("memory for the guest");
        let device = Device::new(memory.clone(), Muxer::listening_on([HOST_PORT]));
        Self {
            memory,
            device,
            offered: [0; 2],
            known: Vec::new(),
            received_bytes: 0,
            sent_bytes: 0,
        }
    }

    fn write(&mut self, offset: u64, value: u32) {
        self.device.write(offset, &value.to_le_bytes());
    }

    fn bring_up(&mut self) {
        for status in [1, 3] {
            self.write(register::STATUS, status);
        }
        self.write(register::DRIVER_FEATURES_SEL, 1);
        self.write(register::DRIVER_FEATURES, 1);
        self.write(register::STATUS, 11);
        for queue in [RX, TX] {
            let base = queue * QUEUE_STRIDE;
            self.write(register::QUEUE_SEL, queue);
            self.write(register::QUEUE_NUM, ENTRIES.into());
            self.write(register::QUEUE_DESC_LOW, base + DESCRIPTORS);
            self.write(register::QUEUE_DRIVER_LOW, base + AVAILABLE);
            self.write(register::QUEUE_DEVICE_LOW, base + USED);
            self.write(register::QUEUE_READY, 1);
        }
        self.write(register::STATUS, 15);
    }

    /// Writes memory; what lies outside is the driver's loss.
    fn poke(&self, address: u32, bytes: &[u8]) {
        let _ = self.memory.write_slice(bytes, GuestAddress(address.into()));
    }

    fn offer(&mut self, queue: u32, head: u16, flags: u16, address: u32, length: u32) {
        let base = queue * QUEUE_STRIDE;
        let head = head % ENTRIES;
        let descriptor = [
            &u64::from(address).to_le_bytes()[..],
            &length.to_le_bytes(),
            &flags.to_le_bytes(),
            &(head + 1).to_le_bytes(),
        ];
        self.poke(base + DESCRIPTORS + u32::from(head) * 16, &descriptor.concat());
        let offered = &mut self.offered[queue as usize];
        let slot = base + AVAILABLE + 4 + u32::from(*offered % ENTRIES) * 2;
        *offered = offered.wrapping_add(1);
        let index = *offered;
        self.poke(slot, &head.to_le_bytes());
        self.poke(base + AVAILABLE + 2, &index.to_le_bytes());
    }

    fn send_packet(&mut self, operation: u8, flags: u8, guest_port: u8, length: u8) {
        let mut packet = Vec::new();
        packet.extend_from_slice(&GUEST_CID.to_le_bytes());
        packet.extend_from_slice(&HOST_CID.to_le_bytes());
        packet.extend_from_slice(&u32::from(guest_port).to_le_bytes());
        packet.extend_from_slice(&HOST_PORT.to_le_bytes());
        packet.extend_from_slice(&u32::from(length).to_le_bytes());
        packet.extend_from_slice(&1u16.to_le_bytes());
        packet.extend_from_slice(&u16::from(operation).to_le_bytes());
        packet.extend_from_slice(&u32::from(flags).to_le_bytes());
        packet.extend_from_slice(&4096u32.to_le_bytes());
        packet.extend_from_slice(&(self.sent_bytes as u32).to_le_bytes());
        packet.resize(packet.len() + usize::from(length), 0x5a);
        let head = self.offered[TX as usize] % ENTRIES;
        let address = PACKETS + u32::from(head) * 0x400;
        self.poke(address, &packet);
        self.offer(TX, head, 0, address, packet.len() as u32);
        self.write(register::QUEUE_NOTIFY, TX);
    }

    fn step(&mut self, data: &mut &[u8]) {
        match choice(data) % 7 {
            0 => {
                let offset = u64::from(u16::from_le_bytes([choice(data), choice(data)]) % 0x200);
                let value = word(data);
                self.write(offset, value);
            }
            1 => {
                let offset = u16::from_le_bytes([choice(data), choice(data)]);
                let mut bytes = [0; 16];
                let width = usize::from(choice(data)) % bytes.len();
                self.device.read(offset.into(), &mut bytes[..width]);
            }
            2 => {
                let address = word(data) % RAM_BYTES;
                let length = usize::from(choice(data)).min(data.len());
                let (bytes, rest) = data.split_at(length);
                *data = rest;
                self.poke(address, bytes);
            }
            3 => {
                let queue = u32::from(choice(data)) % 2;
                let (head, flags) = (choice(data), choice(data));
                let (address, length) = (word(data), word(data));
                self.offer(queue, head.into(), flags.into(), address, length);
            }
            4 => {
                let (operation, flags) = (choice(data), choice(data));
                let (guest_port, length) = (choice(data), choice(data));
                self.send_packet(operation, flags, guest_port, length);
            }
            5 => {
                let place = usize::from(choice(data));
                let answer = choice(data);
                self.answer(place, answer);
            }
            _ => {
                self.device.deliver();
            }
        }
    }

    fn answer(&mut self, place: usize, answer: u8) {
        let Some(id) = self.known.get(place % self.known.len().max(1)).copied() else { return };
        let Some(connection) = self.device.muxer().connection(id) else { return };
        match answer {
            0 => connection.shutdown(),
            1 => connection.reset(),
            bytes => {
                connection.send(&vec![0xa5; bytes.into()]);
                self.sent_bytes += usize::from(bytes);
            }
        }
        self.device.deliver();
    }

    fn read_events(&mut self) {
        while let Some(event) = self.device.muxer().poll_event() {
            match event {
                Event::Accepted(id) => {
                    assert_eq!(id.host_port, HOST_PORT, "a port that nobody listens on");
                    if !self.known.contains(&id) {
                        self.known.push(id);
                    }
                }
                // Every other time it stays where it is, and must not pile up.
                Event::Received(id) | Event::Closed(id) => {
                    let Some(connection) = self.device.muxer().connection(id) else { continue };
                    if self.offered[TX as usize].is_multiple_of(2) {
                        let bytes = connection.take_incoming();
                        assert!(bytes.len() <= BUFFER_BYTES as usize, "more than its credit");
                        self.received_bytes += bytes.len();
                    }
                }
            }
        }
    }
}

/// A connection that is opened, used and closed, by a driver that is sound
/// and by others.
pub fn seeds() -> Vec<Seed> {
    const UP: u8 = 1;
    let packet = |operation: u16, flags: u8, length: u8| vec![4, operation as u8, flags, 7, length];
    let buffer = |head: u8| {
        let mut step = vec![3, RX as u8, head, 2];
        step.extend_from_slice(&(PACKETS + 0x8000 + u32::from(head) * 0x400).to_le_bytes());
        step.extend_from_slice(&0x400u32.to_le_bytes());
        step
    };
    let input = |state: u8, steps: &[Vec<u8>]| [&[state][..], &steps.concat()].concat();
    let open = || [buffer(0), buffer(1), buffer(2), packet(op::REQUEST, 0, 0), vec![6]].concat();
    let registers: Vec<u8> =
        (0..0x40).flat_map(|register| [0, register * 4, 0, 1, 0, 0, 0]).collect();
    let kick = vec![0, register::QUEUE_NOTIFY as u8, 0, TX as u8, 0, 0, 0];
    let far_index = [&[2][..], &(QUEUE_STRIDE + AVAILABLE + 2).to_le_bytes(), &[2, 0x88, 0x13]];
    vec![
        accepted("echo", input(UP, &[open(), packet(op::RW, 0, 9), vec![5, 0, 9]])),
        accepted(
            "whole-life",
            input(
                UP,
                &[
                    open(),
                    packet(op::RW, 0, 200),
                    vec![5, 0, 64],
                    packet(op::CREDIT_REQUEST, 0, 0),
                    vec![6],
                    packet(op::RW, 0, 1),
                    vec![5, 0, 0],
                    packet(op::SHUTDOWN, 3, 0),
                    vec![6],
                ],
            ),
        ),
        refused("registers-in-reset", input(0, &[registers])),
        refused("no-connection", input(UP, &[packet(op::RW, 0, 9), vec![6]])),
        refused("index-runs-ahead", input(UP, &[open(), far_index.concat(), kick])),
    ]
}
