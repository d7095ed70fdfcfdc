//! One split virtqueue (virtio 1.2, 2.7), driven by polling: the driver never
//! asks for interrupts and has neither indirect descriptors nor event indices.
//! The VMM has set it up where `forge_protocol::platform::queue` says.

use core::mem::offset_of;
use core::sync::atomic::{Ordering, fence};

use forge_protocol::platform::queue as platform;

use crate::mmio;

/// Entries of each queue.
pub(crate) const ENTRIES: usize = platform::ENTRIES as usize;

const DESC_F_NEXT: u16 = 1;
const DESC_F_WRITE: u16 = 2;
const AVAIL_F_NO_INTERRUPT: u16 = 1;
const USED_F_NO_NOTIFY: u16 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
struct Descriptor {
    address: u64,
    bytes: u32,
    flags: u16,
    next: u16,
}

#[repr(C, align(4))]
struct Available {
    flags: u16,
    index: u16,
    ring: [u16; ENTRIES],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct UsedEntry {
    id: u32,
    bytes: u32,
}

#[repr(C, align(4))]
struct Used {
    flags: u16,
    index: u16,
    ring: [UsedEntry; ENTRIES],
}

/// The memory both sides look at, zero at the start of the VM.
#[repr(C, align(128))]
pub(crate) struct Rings {
    descriptors: [Descriptor; ENTRIES],
    available: Available,
    used: Used,
}

// The device was told the platform's addresses.
const _: () = {
    let first = platform::descriptors(platform::RX);
    assert!(size_of::<Rings>() as u64 == platform::BYTES);
    assert!(offset_of!(Rings, available) as u64 == platform::available(platform::RX) - first);
    assert!(offset_of!(Rings, used) as u64 == platform::used(platform::RX) - first);
};

/// A buffer for the device.
#[derive(Clone, Copy)]
pub(crate) struct Buffer {
    pub(crate) address: u64,
    pub(crate) bytes: u32,
    /// The device writes it.
    pub(crate) device_writes: bool,
}

/// The driver's end of a queue.
pub(crate) struct Queue {
    number: u16,
    /// Shared with the device: only ever accessed volatilely.
    rings: *mut Rings,
    available: u16,
    used: u16,
}

impl Queue {
    /// Takes over queue `number`, which the VMM has set up.
    ///
    /// # Safety
    /// Called once for each queue; nothing else uses its rings.
    pub(crate) unsafe fn take_over(number: u16) -> Self {
        let rings = platform::descriptors(number) as *mut Rings;
        // SAFETY: the page is mapped writable (`platform::VSOCK_QUEUES`), and
        // the device only reads this field.
        unsafe { (&raw mut (*rings).available.flags).write_volatile(AVAIL_F_NO_INTERRUPT) };
        Self { number, rings, available: 0, used: 0 }
    }

    /// Offers a chain that starts at descriptor `head`. Does not notify.
    ///
    /// The caller offers no descriptor that the device still has.
    pub(crate) fn offer(&mut self, head: u16, chain: &[Buffer]) {
        for (position, buffer) in chain.iter().enumerate() {
            let index = head as usize + position;
            assert!(index < ENTRIES);
            let last = position + 1 == chain.len();
            let descriptor = Descriptor {
                address: buffer.address,
                bytes: buffer.bytes,
                flags: if last { 0 } else { DESC_F_NEXT }
                    | if buffer.device_writes { DESC_F_WRITE } else { 0 },
                next: if last { 0 } else { index as u16 + 1 },
            };
            // SAFETY: `rings` is valid (take_over), `index` is in bounds, and
            // the device only reads this.
            unsafe { (&raw mut (*self.rings).descriptors[index]).write_volatile(descriptor) };
        }
        let slot = self.available as usize % ENTRIES;
        // SAFETY: as above.
        unsafe { (&raw mut (*self.rings).available.ring[slot]).write_volatile(head) };
        self.available = self.available.wrapping_add(1);
        // The entry must be seen before the index that publishes it (2.7.13.2).
        fence(Ordering::SeqCst);
        // SAFETY: as above.
        unsafe { (&raw mut (*self.rings).available.index).write_volatile(self.available) };
        fence(Ordering::SeqCst);
    }

    /// Tells the device about what was offered, unless it asked not to be
    /// told.
    pub(crate) fn notify(&self) {
        // SAFETY: as `offer`; the device writes this field, so it is read
        // volatilely.
        let flags = unsafe { (&raw const (*self.rings).used.flags).read_volatile() };
        if flags & USED_F_NO_NOTIFY == 0 {
            mmio::notify(self.number);
        }
    }

    /// Takes back the next chain the device is done with: its head, and how
    /// many bytes the device wrote.
    pub(crate) fn take_used(&mut self) -> Option<(u16, u32)> {
        // SAFETY: as `notify`.
        let index = unsafe { (&raw const (*self.rings).used.index).read_volatile() };
        if index == self.used {
            return None;
        }
        // The index must be seen before the entry it publishes.
        fence(Ordering::SeqCst);
        let slot = self.used as usize % ENTRIES;
        // SAFETY: as `notify`.
        let entry = unsafe { (&raw const (*self.rings).used.ring[slot]).read_volatile() };
        self.used = self.used.wrapping_add(1);
        assert!((entry.id as usize) < ENTRIES, "the device returned descriptor {}", entry.id);
        Some((entry.id as u16, entry.bytes))
    }
}
