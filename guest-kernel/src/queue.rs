//! One split virtqueue (virtio 1.2, 2.7), driven by polling: the driver never
//! asks for interrupts and negotiates neither indirect descriptors nor event
//! indices.

use core::sync::atomic::{Ordering, fence};

use crate::mmio::Register;

/// Entries of each queue. Few, because every queued buffer is a page to touch.
pub(crate) const ENTRIES: usize = 4;

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

/// The memory both sides look at.
#[repr(C, align(16))]
pub(crate) struct Rings {
    descriptors: [Descriptor; ENTRIES],
    available: Available,
    used: Used,
}

impl Rings {
    /// All zero, so that the image need not carry it.
    pub(crate) const ZERO: Self = Self {
        descriptors: [Descriptor { address: 0, bytes: 0, flags: 0, next: 0 }; ENTRIES],
        available: Available { flags: 0, index: 0, ring: [0; ENTRIES] },
        used: Used { flags: 0, index: 0, ring: [UsedEntry { id: 0, bytes: 0 }; ENTRIES] },
    };
}

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
    /// Hands the rings to the device as queue `number`.
    ///
    /// # Safety
    /// `rings` is valid for the life of the VM and used by nothing else.
    pub(crate) unsafe fn hand_over(number: u16, rings: *mut Rings) -> Self {
        Register::QueueSel.write(number.into());
        let entries_max = Register::QueueNumMax.read();
        assert!(entries_max as usize >= ENTRIES, "queue {number} has {entries_max} entries");
        Register::QueueNum.write(ENTRIES as u32);
        // SAFETY: `rings` is valid, and not yet the device's; then only
        // addresses are taken.
        let [desc, driver, device] = unsafe {
            (&raw mut (*rings).available.flags).write_volatile(AVAIL_F_NO_INTERRUPT);
            [
                (&raw const (*rings).descriptors) as u64,
                (&raw const (*rings).available) as u64,
                (&raw const (*rings).used) as u64,
            ]
        };
        Register::QueueDescLow.write(desc as u32);
        Register::QueueDescHigh.write((desc >> 32) as u32);
        Register::QueueDriverLow.write(driver as u32);
        Register::QueueDriverHigh.write((driver >> 32) as u32);
        Register::QueueDeviceLow.write(device as u32);
        Register::QueueDeviceHigh.write((device >> 32) as u32);
        Register::QueueReady.write(1);
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
            // SAFETY: `rings` is valid (hand_over), `index` is in bounds, and
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
            Register::QueueNotify.write(self.number.into());
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
