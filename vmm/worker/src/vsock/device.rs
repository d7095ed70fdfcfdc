//! The device's registers and queues.
//!
//! Register rules follow virtio 1.2, 4.2.2 and 2.1: queues are set up only
//! between FEATURES_OK and DRIVER_OK and never changed while ready, and a
//! write that does not fit the state is ignored and counted.

use std::sync::atomic::Ordering;

use forge_protocol::platform::{GUEST_CID, HOST_CID, STACK, queue as handed};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use virtio_vsock::packet::{PKT_HEADER_SIZE, VsockPacket};
use vm_memory::{GuestAddress, GuestMemoryMmap, VolatileSlice};

use super::connection::{self, Header, Outgoing, op};
use super::muxer::{ConnectionId, Muxer};
use super::reach::Reach;

/// Offsets of the registers (4.2.2, table 4.1).
mod register {
    pub const MAGIC_VALUE: u64 = 0x000;
    pub const VERSION: u64 = 0x004;
    pub const DEVICE_ID: u64 = 0x008;
    pub const VENDOR_ID: u64 = 0x00c;
    pub const DEVICE_FEATURES: u64 = 0x010;
    pub const DEVICE_FEATURES_SEL: u64 = 0x014;
    pub const DRIVER_FEATURES: u64 = 0x020;
    pub const DRIVER_FEATURES_SEL: u64 = 0x024;
    pub const QUEUE_SEL: u64 = 0x030;
    pub const QUEUE_NUM_MAX: u64 = 0x034;
    pub const QUEUE_NUM: u64 = 0x038;
    pub const QUEUE_READY: u64 = 0x044;
    pub const QUEUE_NOTIFY: u64 = 0x050;
    pub const INTERRUPT_STATUS: u64 = 0x060;
    pub const INTERRUPT_ACK: u64 = 0x064;
    pub const STATUS: u64 = 0x070;
    pub const QUEUE_DESC_LOW: u64 = 0x080;
    pub const QUEUE_DESC_HIGH: u64 = 0x084;
    pub const QUEUE_DRIVER_LOW: u64 = 0x090;
    pub const QUEUE_DRIVER_HIGH: u64 = 0x094;
    pub const QUEUE_DEVICE_LOW: u64 = 0x0a0;
    pub const QUEUE_DEVICE_HIGH: u64 = 0x0a4;
    pub const CONFIG_GENERATION: u64 = 0x0fc;
    pub const CONFIG: u64 = 0x100;
}

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const MMIO_VERSION: u32 = 2;
const DEVICE_SOCKET: u32 = 19;
const VENDOR: u32 = u32::from_le_bytes(*b"frge");

/// Device status bits (2.1).
mod status {
    pub const ACKNOWLEDGE: u32 = 1;
    pub const DRIVER: u32 = 2;
    pub const DRIVER_OK: u32 = 4;
    pub const FEATURES_OK: u32 = 8;
    pub const NEEDS_RESET: u32 = 64;
    pub const FAILED: u32 = 128;
}

/// VIRTIO_F_VERSION_1 is all there is: a polled device gains nothing from
/// event indices or indirect descriptors.
const FEATURES: u64 = 1 << 32;

const QUEUE_ENTRIES_MAX: u16 = 256;
const RX: usize = 0;
const TX: usize = 1;
const QUEUES: usize = 3;

/// The largest payload of one packet, in bytes (Linux's own bound).
const PAYLOAD_BYTES_MAX: u32 = 64 * 1024;

/// The device.
#[derive(Debug)]
pub struct Device {
    memory: Reach,
    status: u32,
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    queue_sel: u32,
    /// Receive, transmit and event queue. The event queue may be set up and
    /// is never used: the guest's context id does not change.
    queues: [Queue; QUEUES],
    muxer: Muxer,
    /// The most receive buffers the guest has offered at a time.
    receive_buffers: u16,
    ignored_accesses: u64,
}

impl Device {
    /// A device in reset, over all of this guest memory.
    #[must_use]
    pub fn new(memory: GuestMemoryMmap, muxer: Muxer) -> Self {
        Self::over(Reach { memory, from: GuestAddress(0) }, muxer)
    }

    fn over(memory: Reach, muxer: Muxer) -> Self {
        Self {
            memory,
            status: 0,
            device_features_sel: 0,
            driver_features_sel: 0,
            driver_features: 0,
            queue_sel: 0,
            queues: std::array::from_fn(|_| fresh_queue()),
            muxer,
            receive_buffers: 0,
            ignored_accesses: 0,
        }
    }

    /// A device that is handed over live: DRIVER_OK, VIRTIO_F_VERSION_1
    /// negotiated, and the queues ready where the platform has them. It is what
    /// a driver's negotiation with these addresses leaves, and a driver that
    /// wants another resets it.
    ///
    /// `memory` is filled by now: the device writes to the queues' page. It reaches what
    /// the platform lets ring 3 write, from the stack up, and nothing below.
    #[must_use]
    pub fn handed_over(memory: GuestMemoryMmap, muxer: Muxer) -> Self {
        let mut device = Self::over(Reach { memory, from: GuestAddress(STACK) }, muxer);
        let begun = status::ACKNOWLEDGE | status::DRIVER;
        let agreed = begun | status::FEATURES_OK;
        // Each fits the state the one before it leaves (3.1.1). In a RAM that
        // does not hold the queues they do not become ready, and the guest
        // reaches nobody.
        let mut set = |offset, value| device.try_write(offset, value);
        set(register::STATUS, begun);
        set(register::DRIVER_FEATURES_SEL, 1);
        set(register::DRIVER_FEATURES, (FEATURES >> 32) as u32);
        set(register::STATUS, agreed);
        for queue in 0..handed::COUNT {
            set(register::QUEUE_SEL, queue.into());
            set(register::QUEUE_NUM, handed::ENTRIES.into());
            for (low, high, address) in [
                (register::QUEUE_DESC_LOW, register::QUEUE_DESC_HIGH, handed::descriptors(queue)),
                (register::QUEUE_DRIVER_LOW, register::QUEUE_DRIVER_HIGH, handed::available(queue)),
                (register::QUEUE_DEVICE_LOW, register::QUEUE_DEVICE_HIGH, handed::used(queue)),
            ] {
                set(low, address as u32);
                set(high, (address >> 32) as u32);
            }
            set(register::QUEUE_READY, 1);
        }
        set(register::STATUS, agreed | status::DRIVER_OK);
        device
    }

    /// The device of a copy of this guest, whose memory is `memory`: with the
    /// same registers, queues and connections, and from here on its own.
    #[must_use]
    pub fn fork(&self, memory: GuestMemoryMmap) -> Self {
        let Self {
            memory: Reach { memory: _, from },
            status,
            device_features_sel,
            driver_features_sel,
            driver_features,
            queue_sel,
            queues,
            muxer,
            receive_buffers,
            ignored_accesses,
        } = self;
        Self {
            memory: Reach { memory, from: *from },
            status: *status,
            device_features_sel: *device_features_sel,
            driver_features_sel: *driver_features_sel,
            driver_features: *driver_features,
            queue_sel: *queue_sel,
            queues: std::array::from_fn(|index| copy_of(&queues[index])),
            muxer: muxer.clone(),
            receive_buffers: *receive_buffers,
            ignored_accesses: *ignored_accesses,
        }
    }

    /// The connections.
    pub fn muxer(&mut self) -> &mut Muxer {
        &mut self.muxer
    }

    /// Accesses of registers that did not fit the device's state or the register.
    #[must_use]
    pub fn ignored_accesses(&self) -> u64 {
        self.ignored_accesses
    }

    /// Whether the driver broke the rules so that only a reset helps.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.status & status::NEEDS_RESET != 0
    }

    fn is_live(&self) -> bool {
        self.status & status::DRIVER_OK != 0 && !self.is_broken()
    }

    fn selected(&mut self) -> Option<&mut Queue> {
        self.queues.get_mut(self.queue_sel as usize)
    }

    /// Reads a register. Unknown ones, and other widths than the register
    /// has, read as zero.
    pub fn read(&mut self, offset: u64, data: &mut [u8]) {
        if offset >= register::CONFIG {
            // The guest's context id, in any width the driver likes (4.2.2.2).
            let config = GUEST_CID.to_le_bytes();
            for (index, byte) in data.iter_mut().enumerate() {
                let at = (offset - register::CONFIG) as usize + index;
                *byte = config.get(at).copied().unwrap_or(0);
            }
            return;
        }
        let value = match offset {
            register::MAGIC_VALUE => MAGIC,
            register::VERSION => MMIO_VERSION,
            register::DEVICE_ID => DEVICE_SOCKET,
            register::VENDOR_ID => VENDOR,
            register::DEVICE_FEATURES => feature_word(FEATURES, self.device_features_sel),
            register::QUEUE_NUM_MAX => {
                self.selected().map_or(0, |queue| u32::from(queue.max_size()))
            }
            register::QUEUE_READY => self.selected().map_or(0, |queue| u32::from(queue.ready())),
            register::INTERRUPT_STATUS | register::CONFIG_GENERATION => 0,
            register::STATUS => self.status,
            _ => 0,
        };
        // What stands there is no answer of this device.
        data.fill(0);
        match <&mut [u8; 4]>::try_from(data) {
            Ok(word) => *word = value.to_le_bytes(),
            Err(_) => self.ignored_accesses += 1,
        }
    }

    /// Writes a register. A kick of a queue is worked off before this
    /// returns.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let Ok(word) = <[u8; 4]>::try_from(data) else {
            self.ignored_accesses += 1;
            return;
        };
        if !self.try_write(offset, u32::from_le_bytes(word)) {
            self.ignored_accesses += 1;
        }
    }

    /// Whether the write fits the state.
    fn try_write(&mut self, offset: u64, value: u32) -> bool {
        match offset {
            register::DEVICE_FEATURES_SEL => self.device_features_sel = value,
            register::DRIVER_FEATURES_SEL => self.driver_features_sel = value,
            register::DRIVER_FEATURES => return self.write_driver_features(value),
            register::QUEUE_SEL => self.queue_sel = value,
            register::QUEUE_NOTIFY => return self.kick(value),
            register::INTERRUPT_ACK => {}
            register::STATUS => return self.write_status(value),
            register::QUEUE_READY => return self.write_queue_ready(value),
            _ => return self.write_queue_address(offset, value),
        }
        true
    }

    fn write_driver_features(&mut self, value: u32) -> bool {
        if self.status & status::FEATURES_OK != 0 || self.driver_features_sel > 1 {
            return false;
        }
        let shift = self.driver_features_sel * 32;
        self.driver_features &= !(u64::from(u32::MAX) << shift);
        self.driver_features |= u64::from(value) << shift;
        true
    }

    fn write_status(&mut self, value: u32) -> bool {
        if value == 0 {
            self.reset();
            return true;
        }
        // Bits are only ever added (2.1.1), in order.
        if value & self.status != self.status & !status::NEEDS_RESET
            || value & status::NEEDS_RESET != 0
        {
            return false;
        }
        let mut next = value | self.status & status::NEEDS_RESET;
        let needs = |bit, before| value & bit == 0 || value & before == before;
        let in_order = needs(status::DRIVER, status::ACKNOWLEDGE)
            && needs(status::FEATURES_OK, status::DRIVER)
            && (needs(status::DRIVER_OK, status::FEATURES_OK));
        if !in_order {
            return false;
        }
        // 3.1.1: the device leaves FEATURES_OK clear if it cannot serve them.
        if self.driver_features != FEATURES {
            next &= !(status::FEATURES_OK | status::DRIVER_OK);
        }
        self.status = next;
        if next & status::FAILED != 0 {
            self.break_down("the driver gave up");
        }
        true
    }

    fn queues_may_change(&self) -> bool {
        self.status & status::FEATURES_OK != 0 && self.status & status::DRIVER_OK == 0
    }

    fn write_queue_ready(&mut self, value: u32) -> bool {
        if !self.queues_may_change() {
            return false;
        }
        let (memory, index) = (&self.memory, self.queue_sel as usize);
        let Some(queue) = self.queues.get_mut(index) else { return false };
        if value != 1 || queue.ready() {
            return false;
        }
        queue.set_ready(true);
        if !queue.is_valid(memory) {
            queue.set_ready(false);
            return false;
        }
        // Receive buffers are looked at when there is something to put there,
        // so a kick for them would be an exit for nothing. Never so for TX.
        index == TX || queue.disable_notification(memory).is_ok()
    }

    fn write_queue_address(&mut self, offset: u64, value: u32) -> bool {
        if !self.queues_may_change() {
            return false;
        }
        let Some(queue) = self.selected() else { return false };
        // virtio-queue would let a ready queue be resized under our feet.
        if queue.ready() {
            return false;
        }
        match offset {
            register::QUEUE_NUM => match u16::try_from(value) {
                Ok(entries) => return queue.try_set_size(entries).is_ok(),
                Err(_) => return false,
            },
            register::QUEUE_DESC_LOW => queue.set_desc_table_address(Some(value), None),
            register::QUEUE_DESC_HIGH => queue.set_desc_table_address(None, Some(value)),
            register::QUEUE_DRIVER_LOW => queue.set_avail_ring_address(Some(value), None),
            register::QUEUE_DRIVER_HIGH => queue.set_avail_ring_address(None, Some(value)),
            register::QUEUE_DEVICE_LOW => queue.set_used_ring_address(Some(value), None),
            register::QUEUE_DEVICE_HIGH => queue.set_used_ring_address(None, Some(value)),
            _ => return false,
        }
        true
    }

    fn reset(&mut self) {
        // Each field by name, so that none outlives it unnoticed.
        let Self {
            memory: _,
            status,
            device_features_sel,
            driver_features_sel,
            driver_features,
            queue_sel,
            queues,
            muxer,
            receive_buffers,
            // Counted for the operator.
            ignored_accesses: _,
        } = self;
        *status = 0;
        *device_features_sel = 0;
        *driver_features_sel = 0;
        *driver_features = 0;
        *queue_sel = 0;
        *queues = std::array::from_fn(|_| fresh_queue());
        muxer.reset();
        *receive_buffers = 0;
    }

    fn break_down(&mut self, why: &'static str) {
        tracing::debug!(why, "vsock device needs a reset");
        self.status |= status::NEEDS_RESET;
    }

    fn kick(&mut self, queue: u32) -> bool {
        if !self.is_live() {
            return false;
        }
        match queue as usize {
            TX => self.transmit(),
            RX => {
                self.deliver();
            }
            _ => {}
        }
        (queue as usize) < QUEUES
    }

    /// Takes the packets the driver offered.
    fn transmit(&mut self) {
        let Self { memory, queues, muxer, .. } = self;
        let queue = &mut queues[TX];
        if !queue.ready() {
            return;
        }
        // A driver that publishes more than the queue holds is not followed.
        for _ in 0..queue.size() {
            let Some(mut chain) = queue.pop_descriptor_chain(&*memory) else { break };
            let head = chain.head_index();
            match VsockPacket::from_tx_virtq_chain(memory, &mut chain, PAYLOAD_BYTES_MAX) {
                Ok(packet) => receive_packet(muxer, &packet),
                // 5.10.6: such a packet belongs to no connection, so there is
                // nobody to reset; the buffer is given back.
                Err(error) => tracing::debug!(%error, "a packet from the guest is dropped"),
            }
            if queue.add_used(memory, head, 0).is_err() {
                return self.break_down("the used ring cannot be written");
            }
        }
        // Indices that run ahead of the ring stop the queue for good.
        if queue.iter(&*memory).is_err() {
            self.break_down("the transmit queue's available index is invalid");
        }
    }

    /// Puts what waits for the guest into its receive buffers, as far as they
    /// reach. Whether anything was delivered.
    pub fn deliver(&mut self) -> bool {
        if !self.is_live() || !self.queues[RX].ready() {
            return false;
        }
        self.note_offered();
        let mut delivered = false;
        while self.muxer.wants_to_send() {
            let Self { memory, queues, muxer, .. } = self;
            let queue = &mut queues[RX];
            let Some(mut chain) = queue.pop_descriptor_chain(&*memory) else { break };
            let head = chain.head_index();
            let mut written = 0;
            match VsockPacket::from_rx_virtq_chain(memory, &mut chain, PAYLOAD_BYTES_MAX) {
                Ok(mut packet) => {
                    let room = packet.data_slice().map_or(0, VolatileSlice::len);
                    muxer.poll(room, |id, outgoing| {
                        written = send_packet(&mut packet, id, &outgoing);
                    });
                }
                Err(error) => tracing::debug!(%error, "a receive buffer is unusable"),
            }
            if queue.add_used(memory, head, written).is_err() {
                self.break_down("the used ring cannot be written");
                break;
            }
            delivered |= written > 0;
        }
        delivered
    }

    /// Whether the guest has packets that it has not looked at, as far as the
    /// device can tell: it has not offered their buffers again.
    pub fn guest_has_unread(&mut self) -> bool {
        self.note_offered().is_some_and(|offered| offered < self.receive_buffers)
    }

    /// How many receive buffers the guest offers now; of the most that it ever did, it
    /// has the others.
    fn note_offered(&mut self) -> Option<u16> {
        let queue = &self.queues[RX];
        let index = queue.avail_idx(&self.memory, Ordering::Acquire).ok()?;
        let offered = index.0.wrapping_sub(queue.next_avail());
        self.receive_buffers = self.receive_buffers.max(offered);
        Some(offered)
    }
}

fn fresh_queue() -> Queue {
    #[allow(clippy::expect_used, reason = "a constant that is a power of two is a size")]
    Queue::new(QUEUE_ENTRIES_MAX).expect("256 is a queue size")
}

fn copy_of(queue: &Queue) -> Queue {
    #[allow(clippy::expect_used, reason = "the state is that of a queue")]
    Queue::try_from(queue.state()).expect("a queue's state makes a queue")
}

fn feature_word(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

/// Hands a packet on, if it is from the guest, to us, and of a stream.
fn receive_packet(muxer: &mut Muxer, packet: &VsockPacket<'_, ()>) {
    let id = ConnectionId { host_port: packet.dst_port(), guest_port: packet.src_port() };
    // The identity is the device's: a guest cannot speak as another.
    let ours = packet.src_cid() == GUEST_CID && packet.dst_cid() == HOST_CID;
    if !ours || packet.type_() != 1 {
        if packet.op() != op::RST {
            muxer.refuse(id);
        }
        return;
    }
    let header = Header {
        operation: packet.op(),
        flags: packet.flags(),
        buffer_bytes: packet.buf_alloc(),
        forwarded: packet.fwd_cnt(),
    };
    let mut payload = vec![0; packet.len() as usize];
    if let Some(slice) = packet.data_slice() {
        let copied = slice.copy_to(&mut payload[..]);
        payload.truncate(copied);
    }
    muxer.handle(id, header, &payload);
}

/// Writes a packet for the guest; returns its size in bytes.
fn send_packet(packet: &mut VsockPacket<'_, ()>, id: ConnectionId, outgoing: &Outgoing<'_>) -> u32 {
    let Outgoing { header, payload } = outgoing;
    let mut bytes = [0u8; PKT_HEADER_SIZE];
    bytes[0..8].copy_from_slice(&HOST_CID.to_le_bytes());
    bytes[8..16].copy_from_slice(&GUEST_CID.to_le_bytes());
    bytes[16..20].copy_from_slice(&id.host_port.to_le_bytes());
    bytes[20..24].copy_from_slice(&id.guest_port.to_le_bytes());
    bytes[24..28].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes[28..30].copy_from_slice(&1u16.to_le_bytes());
    bytes[30..32].copy_from_slice(&header.operation.to_le_bytes());
    bytes[32..36].copy_from_slice(&header.flags.to_le_bytes());
    bytes[36..40].copy_from_slice(&header.buffer_bytes.to_le_bytes());
    bytes[40..44].copy_from_slice(&header.forwarded.to_le_bytes());
    if packet.set_header_from_raw(&bytes).is_err() {
        return 0;
    }
    if let Some(slice) = packet.data_slice() {
        slice.copy_from(payload);
    }
    (PKT_HEADER_SIZE + payload.len()) as u32
}

const _: () = assert!(connection::BUFFER_BYTES >= PAYLOAD_BYTES_MAX);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vsock::muxer::Event;
    use forge_protocol::platform::{ARCHIVE, BOOT_INFO, DESCRIPTORS, PAGE_TABLES, TRAP_STACK};
    use vm_memory::Bytes;

    const RAM: usize = 1 << 20;
    const DESC: u64 = 0x1000;
    const AVAIL: u64 = 0x2000;
    const USED: u64 = 0x3000;
    const STRIDE: u64 = 0x10_000;

    fn device() -> Device {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM)]).unwrap();
        Device::new(memory, Muxer::listening_on([1024]))
    }

    fn write(device: &mut Device, offset: u64, value: u32) {
        device.write(offset, &value.to_le_bytes());
    }

    fn read(device: &mut Device, offset: u64) -> u32 {
        let mut data = [0; 4];
        device.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// The device up to the agreement on its features.
    fn agreed() -> Device {
        let mut device = device();
        write(&mut device, register::STATUS, 1);
        write(&mut device, register::STATUS, 3);
        write(&mut device, register::DRIVER_FEATURES_SEL, 1);
        write(&mut device, register::DRIVER_FEATURES, 1);
        write(&mut device, register::STATUS, 11);
        assert_eq!(read(&mut device, register::STATUS), 11);
        device
    }

    /// Brings the device up, each queue with `entries` at its own stretch.
    fn live(entries: u32) -> Device {
        let mut device = set_up(entries);
        write(&mut device, register::STATUS, 15);
        assert_eq!(read(&mut device, register::STATUS), 15);
        device
    }

    /// The same before the driver says that it is ready.
    fn set_up(entries: u32) -> Device {
        let mut device = agreed();
        for queue in 0..2u32 {
            let base = u64::from(queue) * STRIDE;
            write(&mut device, register::QUEUE_SEL, queue);
            write(&mut device, register::QUEUE_NUM, entries);
            write(&mut device, register::QUEUE_DESC_LOW, (base + DESC) as u32);
            write(&mut device, register::QUEUE_DRIVER_LOW, (base + AVAIL) as u32);
            write(&mut device, register::QUEUE_DEVICE_LOW, (base + USED) as u32);
            write(&mut device, register::QUEUE_READY, 1);
            assert_eq!(read(&mut device, register::QUEUE_READY), 1);
        }
        device
    }

    /// Publishes a one-descriptor chain at `head`.
    fn offer(device: &Device, queue: u64, head: u16, address: u64, bytes: u32, writable: bool) {
        offer_at(device, queue * STRIDE, head, address, bytes, writable);
    }

    /// The same in the queue that lies there.
    fn offer_at(device: &Device, base: u64, head: u16, address: u64, bytes: u32, writable: bool) {
        let memory = &device.memory;
        let descriptor = GuestAddress(base + DESC + u64::from(head) * 16);
        memory.write_obj(address, descriptor).unwrap();
        memory.write_obj(bytes, GuestAddress(descriptor.0 + 8)).unwrap();
        let flags: u16 = if writable { 2 } else { 0 };
        memory.write_obj(flags, GuestAddress(descriptor.0 + 12)).unwrap();
        let index: u16 = memory.read_obj(GuestAddress(base + AVAIL + 2)).unwrap();
        let slot = GuestAddress(base + AVAIL + 4 + u64::from(index % 4) * 2);
        memory.write_obj(head, slot).unwrap();
        memory.write_obj(index + 1, GuestAddress(base + AVAIL + 2)).unwrap();
    }

    fn packet(operation: u16, payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&GUEST_CID.to_le_bytes());
        bytes.extend_from_slice(&HOST_CID.to_le_bytes());
        bytes.extend_from_slice(&7u32.to_le_bytes());
        bytes.extend_from_slice(&1024u32.to_le_bytes());
        bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&1u16.to_le_bytes());
        bytes.extend_from_slice(&operation.to_le_bytes());
        bytes.extend_from_slice(&0u32.to_le_bytes());
        bytes.extend_from_slice(&4096u32.to_le_bytes());
        bytes.extend_from_slice(&0u32.to_le_bytes());
        bytes.extend_from_slice(payload);
        bytes
    }

    fn transmit(device: &mut Device, head: u16, bytes: &[u8]) {
        let address = 0x8_0000 + u64::from(head) * 0x1000;
        device.memory.write_slice(bytes, GuestAddress(address)).unwrap();
        offer(device, 1, head, address, bytes.len() as u32, false);
        write(device, register::QUEUE_NOTIFY, 1);
    }

    fn used_index(device: &Device, queue: u64) -> u16 {
        device.memory.read_obj(GuestAddress(queue * STRIDE + USED + 2)).unwrap()
    }

    #[test]
    fn a_kick_is_worked_off_before_the_write_returns() {
        let mut device = live(4);
        offer(&device, 0, 0, 0x9_0000, 4096, true);
        transmit(&mut device, 0, &packet(op::REQUEST, &[]));
        assert_eq!(used_index(&device, 1), 1);
        let id = ConnectionId { host_port: 1024, guest_port: 7 };
        assert_eq!(device.muxer().poll_event(), Some(Event::Accepted(id)));
        assert!(device.deliver());
        let operation: u16 = device.memory.read_obj(GuestAddress(0x9_0000 + 30)).unwrap();
        assert_eq!(operation, op::RESPONSE);
        transmit(&mut device, 1, &packet(op::RW, b"payload"));
        assert_eq!(device.muxer().connection(id).unwrap().take_incoming(), b"payload");
    }

    #[test]
    fn the_receive_queue_asks_for_no_kicks_and_the_transmit_queue_does() {
        let device = live(4);
        let flags: u16 = device.memory.read_obj(GuestAddress(USED)).unwrap();
        assert_eq!(flags, 1);
        let flags: u16 = device.memory.read_obj(GuestAddress(STRIDE + USED)).unwrap();
        assert_eq!(flags, 0);
    }

    const ALL: usize = 8 << 20;

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), ALL)]).unwrap()
    }

    fn contents(device: &Device) -> Vec<u8> {
        let mut bytes = vec![0; ALL];
        device.memory.memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        bytes
    }

    /// All of a device but its memory.
    fn state(device: &Device) -> String {
        let queues: Vec<_> = device.queues.iter().map(Queue::state).collect();
        format!(
            "{} {} {} {:#x} {} {queues:?} {:?} {} {}",
            device.status,
            device.device_features_sel,
            device.driver_features_sel,
            device.driver_features,
            device.queue_sel,
            device.muxer,
            device.receive_buffers,
            device.ignored_accesses,
        )
    }

    /// What a driver does that finds the device in reset.
    fn negotiate(device: &mut Device, queues: [[u64; 3]; 2]) {
        write(device, register::STATUS, 1 | 2);
        write(device, register::DRIVER_FEATURES_SEL, 1);
        write(device, register::DRIVER_FEATURES, 1);
        write(device, register::STATUS, 1 | 2 | 8);
        assert_eq!(read(device, register::STATUS), 11);
        for (queue, [desc, driver, used]) in (0..).zip(queues) {
            write(device, register::QUEUE_SEL, queue);
            write(device, register::QUEUE_NUM, 4);
            write(device, register::QUEUE_DESC_LOW, desc as u32);
            write(device, register::QUEUE_DESC_HIGH, 0);
            write(device, register::QUEUE_DRIVER_LOW, driver as u32);
            write(device, register::QUEUE_DRIVER_HIGH, 0);
            write(device, register::QUEUE_DEVICE_LOW, used as u32);
            write(device, register::QUEUE_DEVICE_HIGH, 0);
            write(device, register::QUEUE_READY, 1);
        }
        write(device, register::STATUS, 1 | 2 | 8 | 4);
        assert_eq!(read(device, register::STATUS), 15);
        assert_eq!(device.ignored_accesses(), 0);
    }

    #[test]
    fn a_handed_over_device_is_what_a_negotiation_leaves() {
        let handed = Device::handed_over(memory(), Muxer::listening_on([1024]));
        // The platform's addresses, written out.
        let page = 0x60_6000;
        let mut negotiated = Device::new(memory(), Muxer::listening_on([1024]));
        let rx = [page, page + 64, page + 76];
        negotiate(&mut negotiated, [rx, rx.map(|address| address + 128)]);
        assert!(handed.is_live());
        assert_eq!(state(&handed), state(&negotiated));
        assert!(contents(&handed) == contents(&negotiated), "memory differs");
    }

    #[test]
    fn a_driver_may_reset_a_handed_over_device_and_negotiate() {
        let mut device = Device::handed_over(memory(), Muxer::listening_on([1024]));
        write(&mut device, register::STATUS, 0);
        assert_eq!(read(&mut device, register::STATUS), 0);
        negotiate_above(&mut device);
        transmit_above(&mut device, 0, &packet(op::REQUEST, &[]));
        assert_eq!(device.muxer().connections(), 1);
    }

    /// Where queues and packets of a handed-over device may lie.
    const ABOVE: u64 = 0x62_0000;

    fn negotiate_above(device: &mut Device) {
        let queue = |base| [base + DESC, base + AVAIL, base + USED];
        negotiate(device, [queue(ABOVE), queue(ABOVE + STRIDE)]);
    }

    fn transmit_above(device: &mut Device, head: u16, bytes: &[u8]) {
        let address = ABOVE + 0x8_0000 + u64::from(head) * 0x1000;
        device.memory.write_slice(bytes, GuestAddress(address)).unwrap();
        offer_at(device, ABOVE + STRIDE, head, address, bytes.len() as u32, false);
        write(device, register::QUEUE_NOTIFY, 1);
    }

    #[test]
    fn no_descriptor_makes_the_device_write_what_ring_3_cannot() {
        // An answer to a packet for nobody has words that the guest chose.
        let nobodys = packet(op::RW, &[]);
        let writes = |address: u64| {
            let mut device = Device::handed_over(memory(), Muxer::listening_on([1024]));
            write(&mut device, register::STATUS, 0);
            negotiate_above(&mut device);
            transmit_above(&mut device, 0, &nobodys);
            let before = contents(&device);
            offer_at(&device, ABOVE, 0, address, 4096, true);
            device.deliver();
            let at = address as usize..address as usize + PKT_HEADER_SIZE;
            contents(&device)[at.clone()] != before[at]
        };
        assert!(writes(STACK) && writes(ABOVE + 0x9_0000), "the test makes none");
        for address in [PAGE_TABLES, DESCRIPTORS, TRAP_STACK, BOOT_INFO, ARCHIVE, STACK - 4] {
            assert!(!writes(address), "{address:#x}");
        }
    }

    #[test]
    fn no_queue_of_a_handed_over_device_lies_where_ring_3_cannot_write() {
        for place in 0..3 {
            let mut device = Device::handed_over(memory(), Muxer::listening_on([1024]));
            let mut queue = [ABOVE + DESC, ABOVE + AVAIL, ABOVE + USED];
            queue[place] = PAGE_TABLES;
            write(&mut device, register::STATUS, 0);
            for status in [1, 3] {
                write(&mut device, register::STATUS, status);
            }
            write(&mut device, register::DRIVER_FEATURES_SEL, 1);
            write(&mut device, register::DRIVER_FEATURES, 1);
            write(&mut device, register::STATUS, 11);
            let before = contents(&device);
            let [descriptors, driver, used] = queue.map(|address| address as u32);
            write(&mut device, register::QUEUE_NUM, 4);
            write(&mut device, register::QUEUE_DESC_LOW, descriptors);
            write(&mut device, register::QUEUE_DRIVER_LOW, driver);
            write(&mut device, register::QUEUE_DEVICE_LOW, used);
            write(&mut device, register::QUEUE_READY, 1);
            assert_eq!(read(&mut device, register::QUEUE_READY), 0, "{place}");
            assert!(contents(&device) == before, "{place}");
        }
    }

    #[test]
    fn a_fork_goes_on_alone_where_its_original_stood() {
        let mut device = live(4);
        offer(&device, 0, 0, 0x9_0000, 4096, true);
        transmit(&mut device, 0, &packet(op::REQUEST, &[]));
        assert!(device.deliver());
        let mut bytes = vec![0; RAM];
        device.memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        let copy = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM)]).unwrap();
        copy.write_slice(&bytes, GuestAddress(0)).unwrap();
        let before = state(&device);
        let mut fork = device.fork(copy);
        assert_eq!(state(&fork), before);

        let id = ConnectionId { host_port: 1024, guest_port: 7 };
        transmit(&mut fork, 1, &packet(op::RW, b"payload"));
        assert_eq!(fork.muxer().connection(id).unwrap().take_incoming(), b"payload");
        assert_eq!(used_index(&fork, 1), 2);
        assert_eq!((state(&device), used_index(&device, 1)), (before, 1));
    }

    #[test]
    fn features_other_than_ours_are_refused() {
        let mut offered = device();
        assert_eq!([0, 1, 2].map(|word| offered_word(&mut offered, word)), [0, 1, 0]);
        // More in either word, nothing, and another one.
        for [low, high] in [[1 << 29, 1], [0, 1 | 2], [0, 0], [1, 0]] {
            for status in [11, 15] {
                let mut device = device();
                write(&mut device, register::STATUS, 3);
                accept(&mut device, [low, high]);
                write(&mut device, register::STATUS, status);
                assert_eq!(read(&mut device, register::STATUS), 3, "{low:#x} {high:#x} {status}");
            }
        }
    }

    fn offered_word(device: &mut Device, word: u32) -> u32 {
        write(device, register::DEVICE_FEATURES_SEL, word);
        read(device, register::DEVICE_FEATURES)
    }

    fn accept(device: &mut Device, words: [u32; 2]) {
        for (word, features) in (0..).zip(words) {
            write(device, register::DRIVER_FEATURES_SEL, word);
            write(device, register::DRIVER_FEATURES, features);
        }
    }

    #[test]
    fn a_driver_may_accept_other_features_until_they_are_agreed_on_and_not_after() {
        let mut device = device();
        write(&mut device, register::STATUS, 3);
        accept(&mut device, [1 << 29, 1 | 2]);
        accept(&mut device, [0, 1]);
        write(&mut device, register::STATUS, 11);
        assert_eq!((read(&mut device, register::STATUS), device.ignored_accesses()), (11, 0));
        accept(&mut device, [1 << 29, 0]);
        assert_eq!((device.driver_features, device.ignored_accesses()), (FEATURES, 2));
    }

    #[test]
    fn status_bits_are_added_in_order_and_none_is_taken_back() {
        let stands: [(&[u32], &[u32]); 5] = [
            (&[], &[2, 4, 5, 6, 7, 8, 9, 10, 13, 14, 64, 65]),
            (&[1], &[2, 5, 8, 9, 10, 13, 65, 128]),
            (&[3], &[1, 2, 7, 67, 128]),
            (&[3, 11], &[1, 2, 3, 8, 9, 10, 13, 14, 75, 128]),
            (&[3, 11, 15], &[1, 3, 4, 7, 8, 11, 13, 14, 79, 128]),
        ];
        for (path, out_of_order) in stands {
            for value in out_of_order {
                let mut device = device();
                accept(&mut device, [0, 1]);
                for status in path {
                    write(&mut device, register::STATUS, *status);
                }
                let before = read(&mut device, register::STATUS);
                assert_eq!((before, device.ignored_accesses()), (*path.last().unwrap_or(&0), 0));
                write(&mut device, register::STATUS, *value);
                let after = (read(&mut device, register::STATUS), device.ignored_accesses());
                assert_eq!(after, (before, 1), "{path:?} {value}");
            }
        }
    }

    const QUEUE_REGISTERS: [u64; 8] = [
        register::QUEUE_NUM,
        register::QUEUE_READY,
        register::QUEUE_DESC_LOW,
        register::QUEUE_DESC_HIGH,
        register::QUEUE_DRIVER_LOW,
        register::QUEUE_DRIVER_HIGH,
        register::QUEUE_DEVICE_LOW,
        register::QUEUE_DEVICE_HIGH,
    ];

    /// No write of the selected queue's registers does anything.
    #[track_caller]
    fn assert_queue_stays(mut device: Device) {
        let before: Vec<_> = device.queues.iter().map(Queue::state).collect();
        for value in [0, 1, 2] {
            for offset in QUEUE_REGISTERS {
                write(&mut device, offset, value);
            }
        }
        assert_eq!(device.ignored_accesses(), 3 * QUEUE_REGISTERS.len() as u64);
        let after: Vec<_> = device.queues.iter().map(Queue::state).collect();
        assert_eq!(after, before);
    }

    #[test]
    fn a_ready_queue_cannot_be_changed() {
        assert_queue_stays(live(4));
        assert_queue_stays(set_up(4));
    }

    #[test]
    fn a_queue_is_set_up_after_the_agreement_and_before_the_drivers_start_alone() {
        let mut begun = device();
        write(&mut begun, register::STATUS, 3);
        let mut started = agreed();
        write(&mut started, register::STATUS, 15);
        for device in [device(), begun, started] {
            assert_queue_stays(device);
        }
        let mut another = live(4);
        write(&mut another, register::QUEUE_SEL, 2);
        assert_queue_stays(another);
        let mut none = agreed();
        write(&mut none, register::QUEUE_SEL, 3);
        assert_queue_stays(none);
    }

    #[test]
    fn a_queue_is_ready_by_the_word_one_alone() {
        let mut device = agreed();
        for (low, address) in [
            (register::QUEUE_DESC_LOW, DESC),
            (register::QUEUE_DRIVER_LOW, AVAIL),
            (register::QUEUE_DEVICE_LOW, USED),
        ] {
            write(&mut device, low, address as u32);
        }
        for (value, ready) in [(0, 0), (2, 0), (u32::MAX, 0), (1, 1)] {
            write(&mut device, register::QUEUE_READY, value);
            assert_eq!(read(&mut device, register::QUEUE_READY), ready, "{value}");
        }
    }

    #[test]
    fn nothing_moves_before_the_driver_says_that_it_is_ready() {
        let mut device = set_up(4);
        let id = ConnectionId { host_port: 1, guest_port: 2 };
        device.muxer().refuse(id);
        offer(&device, 0, 0, 0x9_0000, 4096, true);
        transmit(&mut device, 0, &packet(op::REQUEST, &[]));
        assert!(!device.deliver());
        assert_eq!((used_index(&device, 0), used_index(&device, 1)), (0, 0));
        assert_eq!((device.muxer().connections(), device.ignored_accesses()), (0, 1));
        write(&mut device, register::STATUS, 15);
        write(&mut device, register::QUEUE_NOTIFY, 1);
        assert!(device.deliver());
        assert_eq!((used_index(&device, 0), used_index(&device, 1)), (1, 1));
    }

    #[test]
    fn a_queue_that_is_not_ready_is_neither_read_nor_written() {
        let mut device = agreed();
        write(&mut device, register::STATUS, 15);
        let id = ConnectionId { host_port: 1, guest_port: 2 };
        device.muxer().refuse(id);
        // It lies at 0 by its registers; there something is offered.
        let memory = &device.memory;
        memory.write_obj(2u16, GuestAddress(2)).unwrap();
        let before = ram(&device);
        for queue in 0..QUEUES as u32 {
            write(&mut device, register::QUEUE_NOTIFY, queue);
        }
        assert!(!device.deliver() && ram(&device) == before);
        assert!(!device.is_broken() && device.ignored_accesses() == 0);
        write(&mut device, register::QUEUE_NOTIFY, QUEUES as u32);
        assert_eq!(device.ignored_accesses(), 1, "there is no such queue");
    }

    fn ram(device: &Device) -> Vec<u8> {
        let mut bytes = vec![0; RAM];
        device.memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        bytes
    }

    #[test]
    fn only_a_reset_mends_a_broken_device() {
        for breaks in [a_head_beyond_the_queue, an_index_that_ran_ahead, giving_up] {
            let mut device = live(4);
            breaks(&mut device);
            assert!(device.is_broken());
            let broken = read(&mut device, register::STATUS);
            for status in [broken & !status::NEEDS_RESET, 15, 79, 11] {
                write(&mut device, register::STATUS, status);
                assert_eq!(read(&mut device, register::STATUS), broken, "{status}");
            }
            let used = used_index(&device, 1);
            transmit(&mut device, 1, &packet(op::REQUEST, &[]));
            assert_eq!(used_index(&device, 1), used);
            write(&mut device, register::STATUS, 0);
            assert_eq!(read(&mut device, register::STATUS), 0);
        }
    }

    fn a_head_beyond_the_queue(device: &mut Device) {
        offer(device, 1, 4, 0x8_0000, 44, false);
        write(device, register::QUEUE_NOTIFY, 1);
    }

    fn an_index_that_ran_ahead(device: &mut Device) {
        device.memory.write_obj(5u16, GuestAddress(STRIDE + AVAIL + 2)).unwrap();
        write(device, register::QUEUE_NOTIFY, 1);
    }

    fn giving_up(device: &mut Device) {
        write(device, register::STATUS, 15 | status::FAILED);
    }

    #[test]
    fn a_receive_buffer_beyond_the_queue_breaks_the_device() {
        let mut device = live(4);
        offer(&device, 0, 4, 0x9_0000, 4096, true);
        transmit(&mut device, 0, &packet(op::REQUEST, &[]));
        assert!(!device.deliver() && device.is_broken());
    }

    #[test]
    fn a_reset_leaves_nothing_of_a_driver_behind() {
        let mut device = live(4);
        offer(&device, 0, 0, 0x9_0000, 4096, true);
        transmit(&mut device, 0, &packet(op::REQUEST, &[]));
        assert!(device.deliver());
        for offset in [register::DEVICE_FEATURES_SEL, register::DRIVER_FEATURES_SEL] {
            write(&mut device, offset, 1);
        }
        write(&mut device, register::QUEUE_SEL, 2);
        write(&mut device, register::STATUS, 0);
        assert_eq!(state(&device), state(&super::tests::device()));
    }

    #[test]
    fn what_lies_in_a_buffer_that_was_not_offered_again_is_unread() {
        let mut device = live(4);
        assert!(!device.guest_has_unread());
        for head in 0..2 {
            offer(&device, 0, head, 0x9_0000 + u64::from(head) * 4096, 4096, true);
        }
        assert!(!device.guest_has_unread());
        transmit(&mut device, 0, &packet(op::REQUEST, &[]));
        assert!(device.deliver() && device.guest_has_unread());
        offer(&device, 0, 0, 0x9_0000, 4096, true);
        assert!(!device.guest_has_unread());
    }

    #[test]
    fn a_buffer_is_given_back_with_as_many_bytes_as_were_written() {
        let mut device = live(4);
        let id = ConnectionId { host_port: 1024, guest_port: 7 };
        transmit(&mut device, 0, &packet(op::REQUEST, &[]));
        // One that can hold no packet.
        offer(&device, 0, 0, 0x9_0000, 8, true);
        assert!(!device.deliver());
        for head in [1, 2] {
            offer(&device, 0, head, 0x9_0000 + u64::from(head) * 4096, 4096, true);
        }
        assert!(device.deliver());
        device.muxer().connection(id).unwrap().send(b"payload");
        assert!(device.deliver());
        let used = |at: u64| device.memory.read_obj::<u32>(GuestAddress(USED + 4 + at)).unwrap();
        let header = PKT_HEADER_SIZE as u32;
        assert_eq!([used(4), used(12), used(20)], [0, header, header + 7]);
    }

    #[test]
    fn every_register_can_be_written_in_every_state_without_a_panic() {
        let values = [0, 1, 2, 3, 4, 7, 11, 15, 64, 128, 0xff, 0x1000, u32::MAX];
        for state in [device as fn() -> Device, || live(4)] {
            for offset in (0..0x120).step_by(4) {
                for value in values {
                    let mut device = state();
                    write(&mut device, offset, value);
                    for after in (0..0x120).step_by(4) {
                        read(&mut device, after);
                        write(&mut device, after, value);
                    }
                    for queue in 0..4 {
                        write(&mut device, register::QUEUE_NOTIFY, queue);
                    }
                }
            }
        }
    }

    #[test]
    fn odd_widths_read_as_zero_and_so_does_what_is_behind_the_configuration_space() {
        let mut device = device();
        for width in 0..=16 {
            let mut data = vec![0xff; width];
            device.read(register::MAGIC_VALUE, &mut data);
            let expected = if width == 4 { MAGIC.to_le_bytes().to_vec() } else { vec![0; width] };
            assert_eq!(data, expected, "{width}");
            data.fill(0xff);
            device.read(0xffe, &mut data);
            assert_eq!(data, vec![0; width]);
            device.write(register::STATUS, &data);
        }
        let mut cid = [0; 8];
        device.read(register::CONFIG, &mut cid);
        assert_eq!(u64::from_le_bytes(cid), GUEST_CID);
    }

    #[test]
    fn a_driver_that_runs_its_index_ahead_breaks_the_device_not_the_host() {
        let mut device = live(4);
        // What is to be sent waits for a buffer, which then is there.
        transmit(&mut device, 0, &packet(op::REQUEST, &[]));
        offer(&device, 0, 0, 0x9_0000, 4096, true);
        device.memory.write_obj(5000u16, GuestAddress(STRIDE + AVAIL + 2)).unwrap();
        write(&mut device, register::QUEUE_NOTIFY, 1);
        assert!(device.is_broken());
        assert!(!device.deliver());
        assert_eq!(used_index(&device, 0), 0);
        write(&mut device, register::STATUS, 0);
        assert!(!device.is_broken());
    }

    #[test]
    fn hostile_chains_are_dropped() {
        // Too short, unmapped, wrapping around, writable, longer than said.
        let cases: [(u64, u32, bool); 6] = [
            (0x8_0000, 10, false),
            (u64::MAX - 8, 64, false),
            (RAM as u64 - 20, 64, false),
            (0x8_0000, 0, false),
            (0x8_0000, 64, true),
            (0x7fff_ffff_ffff_f000, u32::MAX, false),
        ];
        for (address, bytes, writable) in cases {
            let mut device = live(4);
            device.memory.write_slice(&[0xff; 64], GuestAddress(0x8_0000)).unwrap();
            offer(&device, 1, 0, address, bytes, writable);
            write(&mut device, register::QUEUE_NOTIFY, 1);
            assert_eq!(used_index(&device, 1), 1, "{address:#x} {bytes}");
            assert_eq!(device.muxer().poll_event(), None);
        }
    }

    #[test]
    fn a_cyclic_chain_ends() {
        let mut device = live(4);
        offer(&device, 1, 0, 0x8_0000, 44, false);
        let descriptor = STRIDE + DESC;
        device.memory.write_obj(1u16, GuestAddress(descriptor + 12)).unwrap();
        device.memory.write_obj(0u16, GuestAddress(descriptor + 14)).unwrap();
        write(&mut device, register::QUEUE_NOTIFY, 1);
        assert_eq!(used_index(&device, 1), 1);
    }

    /// What becomes of a packet that has this byte there: connections, and whether it is
    /// answered.
    fn forged(operation: u16, at: usize, byte: u8) -> (usize, bool) {
        let mut device = live(4);
        let mut forged = packet(operation, &[]);
        forged[at] = byte;
        transmit(&mut device, 0, &forged);
        (device.muxer().connections(), device.muxer().wants_to_send())
    }

    #[test]
    fn a_guest_cannot_speak_under_another_context_id() {
        assert_eq!(forged(op::REQUEST, 0, 9), (0, true));
        assert_eq!(forged(op::REQUEST, 7, 1), (0, true));
        assert_eq!(forged(op::RST, 0, 9), (0, false), "a reset is not answered");
    }

    #[test]
    fn a_packet_for_another_context_id_or_of_no_stream_is_refused() {
        for (at, byte) in [(8, GUEST_CID as u8), (8, 9), (15, 1), (28, 0), (28, 2), (29, 1)] {
            assert_eq!(forged(op::REQUEST, at, byte), (0, true), "{at} {byte}");
            assert_eq!(forged(op::RST, at, byte), (0, false), "{at} {byte}");
        }
    }

    #[test]
    fn a_reset_forgets_connections_and_keeps_listening() {
        let mut device = live(4);
        transmit(&mut device, 0, &packet(op::REQUEST, &[]));
        assert_eq!(device.muxer().connections(), 1);
        write(&mut device, register::STATUS, 0);
        assert_eq!(device.muxer().connections(), 0);
        assert_eq!(read(&mut device, register::STATUS), 0);
    }
}
