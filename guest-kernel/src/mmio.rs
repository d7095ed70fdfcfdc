//! Device registers: 32-bit loads and stores that the VMM answers.

use forge_protocol::platform::{CONTROL_MMIO, VSOCK_MMIO, control};

/// The one register of the virtio-mmio transport that a driver needs whose
/// device was handed over live (virtio 1.2, 4.2.2: QueueNotify).
const QUEUE_NOTIFY: u64 = 0x050;

/// Tells the vsock device that queue `number` has something new for it.
pub(crate) fn notify(number: u16) {
    // SAFETY: the VMM maps this page and answers every aligned 32-bit access
    // in it. The write may make the device write to guest memory: only to what
    // `Queue` offered it, which is read volatilely.
    unsafe { ((VSOCK_MMIO + QUEUE_NOTIFY) as *mut u32).write_volatile(number.into()) }
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
    #[cfg(feature = "guest")]
    pub(crate) fn panic(message_bytes: u32) {
        Self::write(control::PANIC, message_bytes);
    }

    /// All of RAM is there when this returns.
    pub(crate) fn all_ram() {
        Self::write(control::ALL_RAM, 0);
    }

    pub(crate) fn exit() {
        Self::write(control::EXIT, 0);
    }
}
