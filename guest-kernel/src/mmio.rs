//! Device registers: 32-bit loads and stores that the VMM answers.

use forge_protocol::platform::{CONTROL_MMIO, VSOCK_MMIO, control};

/// A register of the virtio-mmio transport, as its offset (virtio 1.2, 4.2.2).
#[derive(Clone, Copy)]
#[repr(u64)]
pub(crate) enum Register {
    MagicValue = 0x000,
    Version = 0x004,
    DeviceId = 0x008,
    DeviceFeatures = 0x010,
    DeviceFeaturesSel = 0x014,
    DriverFeatures = 0x020,
    DriverFeaturesSel = 0x024,
    QueueSel = 0x030,
    QueueNumMax = 0x034,
    QueueNum = 0x038,
    QueueReady = 0x044,
    QueueNotify = 0x050,
    Status = 0x070,
    QueueDescLow = 0x080,
    QueueDescHigh = 0x084,
    QueueDriverLow = 0x090,
    QueueDriverHigh = 0x094,
    QueueDeviceLow = 0x0a0,
    QueueDeviceHigh = 0x0a4,
    /// The low half of the guest's context id (5.10.4); the high half is
    /// reserved and zero.
    GuestCid = 0x100,
}

impl Register {
    fn address(self) -> *mut u32 {
        (VSOCK_MMIO + self as u64) as *mut u32
    }

    pub(crate) fn read(self) -> u32 {
        // SAFETY: the VMM maps this page and answers every aligned 32-bit
        // access in it; reads have no effect on memory.
        unsafe { self.address().read_volatile() }
    }

    pub(crate) fn write(self, value: u32) {
        // SAFETY: as `read`. A write may make the device write to guest
        // memory: only to what `Queue` offered it, which `Queue` reads
        // volatilely.
        unsafe { self.address().write_volatile(value) }
    }
}

/// The control registers beside the device.
pub(crate) struct Control;

impl Control {
    fn write(register: u64, value: u32) {
        // SAFETY: the VMM maps this page and answers every aligned 32-bit
        // write in it.
        unsafe { ((CONTROL_MMIO + register) as *mut u32).write_volatile(value) }
    }

    /// Returns when the device has something for the guest.
    pub(crate) fn park() {
        Self::write(control::PARK, 0);
    }

    /// The message at `platform::CRASH` has this many bytes.
    pub(crate) fn panic(message_bytes: u32) {
        Self::write(control::PANIC, message_bytes);
    }

    pub(crate) fn exit() {
        Self::write(control::EXIT, 0);
    }
}
