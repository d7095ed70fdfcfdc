//! Packets through the device: with its queues in guest memory, as a driver
//! kicks it, and through the multiplexer alone.

use forge_protocol::platform::{GUEST_CID, HOST_CID};
use forge_vmm::vsock::connection::{Header, op};
use forge_vmm::vsock::{ConnectionId, Device, Muxer};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::{Entry, Path, said, step};

pub(crate) const ENTRIES: &[Entry] = &[
    Entry { name: "vsock/a packet each way", make: through_the_muxer },
    Entry { name: "vsock/a kick, a packet each way, in guest memory", make: through_the_queues },
];

const PORT: u32 = 1024;
const ID: ConnectionId = ConnectionId { host_port: PORT, guest_port: 7 };
const PAYLOAD: [u8; 200] = [b'x'; 200];
const HEADER_BYTES: usize = 44;

fn through_the_muxer() -> Result<Box<dyn Path>, String> {
    let mut muxer = Muxer::listening_on([PORT]);
    let header =
        |operation, forwarded| Header { operation, flags: 0, buffer_bytes: 64 * 1024, forwarded };
    muxer.handle(ID, header(op::REQUEST, 0), &[]);
    muxer.poll(0, |_, _| {});
    let mut forwarded = 0u32;
    Ok(step(move || {
        muxer.handle(ID, header(op::RW, forwarded), &PAYLOAD);
        while muxer.poll_event().is_some() {}
        let connection = muxer.connection(ID).ok_or("the connection is gone")?;
        connection.take_incoming();
        connection.send(&PAYLOAD);
        muxer.poll(16 * 1024, |_, outgoing| {
            forwarded = forwarded.wrapping_add(outgoing.payload.len() as u32);
        });
        Ok(())
    }))
}

/// Entries of each queue.
const ENTRIES_EACH: u16 = 8;
/// Where a queue's parts are, from its own base (virtio 1.2, 2.7).
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const BUFFERS: u64 = 0x4000;
const BUFFER_BYTES: u64 = 0x1000;
const STRIDE: u64 = 0x10_0000;

/// Registers of the MMIO transport (virtio 1.2, 4.2.2).
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

const RX: u64 = 0;
const TX: u64 = 1;

/// A driver, as small as one can be.
struct Driver {
    device: Device,
    memory: GuestMemoryMmap,
    /// Chains offered so far, by queue.
    offered: [u16; 2],
    forwarded: u32,
}

impl Driver {
    fn new() -> Result<Self, String> {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 2 * STRIDE as usize)]);
        let memory = ram.map_err(said)?;
        let device = Device::new(memory.clone(), Muxer::listening_on([PORT]));
        let mut driver = Self { device, memory, offered: [0; 2], forwarded: 0 };
        driver.write(register::STATUS, 3);
        driver.write(register::DRIVER_FEATURES_SEL, 1);
        driver.write(register::DRIVER_FEATURES, 1);
        driver.write(register::STATUS, 11);
        for queue in [RX, TX] {
            let base = queue * STRIDE;
            driver.write(register::QUEUE_SEL, queue as u32);
            driver.write(register::QUEUE_NUM, ENTRIES_EACH.into());
            driver.write(register::QUEUE_DESC_LOW, (base + DESCRIPTORS) as u32);
            driver.write(register::QUEUE_DRIVER_LOW, (base + AVAILABLE) as u32);
            driver.write(register::QUEUE_DEVICE_LOW, (base + USED) as u32);
            driver.write(register::QUEUE_READY, 1);
        }
        driver.write(register::STATUS, 15);
        driver.offer(RX, BUFFER_BYTES as u32)?;
        driver.transmit(op::REQUEST, &[])?;
        driver.device.deliver();
        match driver.device.ignored_accesses() {
            0 => Ok(driver),
            _ => Err("the device did not come up".into()),
        }
    }

    fn write(&mut self, register: u64, value: u32) {
        self.device.write(register, &value.to_le_bytes());
    }

    /// Offers a queue's next buffer.
    fn offer(&mut self, queue: u64, bytes: u32) -> Result<(), String> {
        let at = self.offered[queue as usize];
        let slot = u64::from(at % ENTRIES_EACH);
        let base = queue * STRIDE;
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&(base + BUFFERS + slot * BUFFER_BYTES).to_le_bytes());
        descriptor[8..12].copy_from_slice(&bytes.to_le_bytes());
        // 2.7.5: the device writes where the driver receives.
        descriptor[12] = if queue == RX { 2 } else { 0 };
        let memory = &self.memory;
        memory
            .write_slice(&descriptor, GuestAddress(base + DESCRIPTORS + slot * 16))
            .map_err(said)?;
        let ring = base + AVAILABLE;
        memory.write_obj(slot as u16, GuestAddress(ring + 4 + slot * 2)).map_err(said)?;
        self.offered[queue as usize] = at.wrapping_add(1);
        memory.write_obj(at.wrapping_add(1), GuestAddress(ring + 2)).map_err(said)
    }

    fn transmit(&mut self, operation: u16, payload: &[u8]) -> Result<(), String> {
        let mut packet = [0; HEADER_BYTES + PAYLOAD.len()];
        packet[0..8].copy_from_slice(&GUEST_CID.to_le_bytes());
        packet[8..16].copy_from_slice(&HOST_CID.to_le_bytes());
        packet[16..20].copy_from_slice(&ID.guest_port.to_le_bytes());
        packet[20..24].copy_from_slice(&ID.host_port.to_le_bytes());
        packet[24..28].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        packet[28..30].copy_from_slice(&1u16.to_le_bytes());
        packet[30..32].copy_from_slice(&operation.to_le_bytes());
        packet[36..40].copy_from_slice(&(64 * 1024u32).to_le_bytes());
        packet[40..44].copy_from_slice(&self.forwarded.to_le_bytes());
        let bytes = HEADER_BYTES + payload.len();
        packet[HEADER_BYTES..bytes].copy_from_slice(payload);
        let slot = u64::from(self.offered[TX as usize] % ENTRIES_EACH);
        let buffer = GuestAddress(TX * STRIDE + BUFFERS + slot * BUFFER_BYTES);
        self.memory.write_slice(&packet[..bytes], buffer).map_err(said)?;
        self.offer(TX, bytes as u32)?;
        self.write(register::QUEUE_NOTIFY, TX as u32);
        Ok(())
    }

    /// A packet to the device, and one back.
    fn exchange(&mut self) -> Result<(), String> {
        self.offer(RX, BUFFER_BYTES as u32)?;
        self.transmit(op::RW, &PAYLOAD)?;
        while self.device.muxer().poll_event().is_some() {}
        let connection = self.device.muxer().connection(ID).ok_or("the connection is gone")?;
        if connection.take_incoming() != PAYLOAD {
            return Err("the packet did not arrive".into());
        }
        connection.send(&PAYLOAD);
        if !self.device.deliver() {
            return Err("nothing came back".into());
        }
        self.forwarded = self.forwarded.wrapping_add(PAYLOAD.len() as u32);
        Ok(())
    }
}

fn through_the_queues() -> Result<Box<dyn Path>, String> {
    let mut driver = Driver::new()?;
    Ok(step(move || driver.exchange()))
}

#[cfg(test)]
mod tests {
    use crate::entries;

    #[test]
    fn every_path_can_be_gone_a_thousand_times() {
        for entry in entries() {
            let mut path = (entry.make)().unwrap_or_else(|error| panic!("{}: {error}", entry.name));
            for _ in 0..1000 {
                path.step().unwrap_or_else(|error| panic!("{}: {error}", entry.name));
            }
        }
    }
}
