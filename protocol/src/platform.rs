//! The machine a guest finds itself in: what the VMM builds and the guest
//! kernel relies on. Guest-virtual and guest-physical addresses are the same.
//!
//! ```text
//!  0x0000_0000  nothing: a null pointer faults
//!  0x0000_1000  virtio-mmio vsock device      ring 3, read and write
//!  0x0000_2000  control registers             ring 3, read and write
//!  0x0020_0000  CODE: trap stub, text and constants of the image, one large
//!               page that all VMs share       ring 3, read and execute
//!  0x0040_0000  RAM
//!    + 0x0000   page tables, GDT, TSS, IDT    ring 0
//!    TRAP_STACK the page traps push to        ring 0
//!    BOOT_INFO  what the guest is told        ring 3, read
//!    CRASH      the panic message             ring 3, read and write
//!    ARCHIVE    the boot archive              ring 3, read
//!    STACK      the stack's lower part        ring 3, read and write
//!  0x0060_0000  DATA: the stack's upper part, VSOCK_QUEUES, data, heap
//!                                             ring 3, read and write
//!    + RAM_AT_START_BYTES (of RAM): from here on the heap is there once the
//!               guest has asked for it, see [`control::ALL_RAM`]
//! ```
//!
//! Nothing is both writable and executable. What the guest writes lies
//! together, from [`DATA`] upwards, in the order in which it is written: a
//! small run touches a few dozen pages there and none elsewhere. The stack is
//! lowest and grows down, so the part of it that few runs reach lies below
//! [`DATA`]; below that nothing is mapped.
//!
//! The vCPU starts in ring 3. Ring 0 holds the trap stub alone: on hosts
//! without hardware virtualisation ring 0 is emulated, and everywhere it is
//! the stronger design.

use alloc::vec::Vec;

/// A page, in bytes.
pub const PAGE_BYTES: u64 = 4096;
/// What one page-directory entry maps, in bytes.
pub const LARGE_PAGE_BYTES: u64 = 2 << 20;

/// The virtio-mmio registers of the vsock device.
pub const VSOCK_MMIO: u64 = 0x1000;
/// The control registers, see [`control`].
pub const CONTROL_MMIO: u64 = 0x2000;

/// Where the image's code and constants lie: memory that the guest cannot
/// write and that no VM has for itself.
pub const CODE: u64 = 0x20_0000;
/// Its room, in bytes: one large page.
pub const CODE_BYTES: u64 = LARGE_PAGE_BYTES;

/// Where RAM starts.
pub const RAM_START: u64 = CODE + CODE_BYTES;
/// How much of RAM is there from the start, in bytes. What lies above is mapped
/// like it, and is not to be touched before [`control::ALL_RAM`] was written: KVM
/// takes memory and time for each page that a VM may have, and most runs need
/// none of those.
pub const RAM_AT_START_BYTES: u64 = 8 << 20;
/// PML4, PDPT, PD, the two page tables of the stretches that are mapped by
/// small pages, and the further directories of a large RAM.
pub const PAGE_TABLES: u64 = RAM_START;
/// The room for them, in pages.
pub const PAGE_TABLES_MAX: u64 = 16;
/// GDT, TSS and IDT, in one page.
pub const DESCRIPTORS: u64 = PAGE_TABLES + PAGE_TABLES_MAX * PAGE_BYTES;
/// The page whose top every trap pushes to (IST 1).
pub const TRAP_STACK: u64 = DESCRIPTORS + PAGE_BYTES;
/// The page that holds [`BootInfo`].
pub const BOOT_INFO: u64 = TRAP_STACK + PAGE_BYTES;
/// The page the panic message is left in.
pub const CRASH: u64 = BOOT_INFO + PAGE_BYTES;
/// The boot archive.
pub const ARCHIVE: u64 = CRASH + PAGE_BYTES;
/// Its room ends one page below [`STACK`]: that page is never mapped, so that
/// a stack that runs over faults.
pub const ARCHIVE_BYTES_MAX: u64 = STACK - PAGE_BYTES - ARCHIVE;
/// Where everything begins that the guest writes: the upper part of the stack,
/// [`VSOCK_QUEUES`], the image's data, then the heap to the end of RAM.
pub const DATA: u64 = RAM_START + LARGE_PAGE_BYTES;
/// Where the stack ends.
pub const STACK: u64 = STACK_TOP - STACK_BYTES;
/// The stack's size. A loop over `memory.grow` uses some 100 KiB of it.
pub const STACK_BYTES: u64 = 256 * 1024;
/// Where the stack begins: above [`DATA`] by what runs commonly use.
pub const STACK_TOP: u64 = DATA + 6 * PAGE_BYTES;
/// The page that holds the vsock device's queues, see [`queue`]. What they
/// leave of it is the driver's.
pub const VSOCK_QUEUES: u64 = STACK_TOP;

// Nothing but heap is there later.
const _: () = assert!(DATA + LARGE_PAGE_BYTES <= RAM_START + RAM_AT_START_BYTES);
const _: () = assert!(RAM_AT_START_BYTES.is_multiple_of(LARGE_PAGE_BYTES));
// Code and data must start where large pages do.
const _: () = assert!(CODE.is_multiple_of(LARGE_PAGE_BYTES));
const _: () = assert!(DATA.is_multiple_of(LARGE_PAGE_BYTES));
const _: () = assert!(ARCHIVE < STACK && STACK < DATA);
const _: () = assert!(STACK.is_multiple_of(PAGE_BYTES));
// A panic message fits its page.
const _: () = assert!(crate::limits::PANIC_MESSAGE_BYTES_MAX < PAGE_BYTES as usize);

/// The trap stub, first in the image. Ring 3 could jump into it, to no
/// effect: it halts, which ring 3 may not.
pub const TRAP_STUB: u64 = CODE;
/// The stub of vector `n` is at `TRAP_STUB + n * TRAP_STUB_STRIDE`.
pub const TRAP_STUB_STRIDE: u64 = 16;
/// The vectors that have a stub: the CPU's exceptions.
pub const TRAP_VECTORS: u64 = 32;

/// What the trap stub leaves below the top of [`TRAP_STACK`] before it halts.
///
/// The CPU pushes `ss` to `rip` and, for some vectors, the error code; the
/// stub pushes the rest. Lowest address first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrapFrame {
    /// The faulting address of a page fault.
    pub cr2: u64,
    /// The interrupted `rax`.
    pub rax: u64,
    /// Which exception.
    pub vector: u64,
    /// Its error code, or 0.
    pub error_code: u64,
    /// Where it happened.
    pub rip: u64,
    /// The code segment, so the ring.
    pub cs: u64,
    /// The interrupted flags.
    pub rflags: u64,
    /// The interrupted stack pointer.
    pub rsp: u64,
    /// The stack segment.
    pub ss: u64,
}

impl TrapFrame {
    /// Its size in memory.
    pub const BYTES: usize = 9 * 8;
    /// The frame's address in memory.
    pub const ADDRESS: u64 = TRAP_STACK + PAGE_BYTES - Self::BYTES as u64;

    /// Reads the frame from the bytes at [`TrapFrame::ADDRESS`].
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |index: usize| {
            let mut word = [0u8; 8];
            word.copy_from_slice(&bytes[index * 8..index * 8 + 8]);
            u64::from_le_bytes(word)
        };
        Self {
            cr2: word(0),
            rax: word(1),
            vector: word(2),
            error_code: word(3),
            rip: word(4),
            cs: word(5),
            rflags: word(6),
            rsp: word(7),
            ss: word(8),
        }
    }
}

/// The control registers, as offsets from [`CONTROL_MMIO`]. Each is written
/// with a 32-bit store.
pub mod control {
    /// Wait until the device has something for the guest. The host answers
    /// late; the value does not matter.
    pub const PARK: u64 = 0x00;
    /// The guest panicked: the value is the length of the message at
    /// [`CRASH`](super::CRASH). The VM ends.
    pub const PANIC: u64 = 0x04;
    /// The guest is done, and its last frame is sent. The VM ends.
    pub const EXIT: u64 = 0x08;
    /// Have all of RAM from here on, not its first
    /// [`RAM_AT_START_BYTES`](super::RAM_AT_START_BYTES) alone. To write it again
    /// changes nothing; the value does not matter.
    pub const ALL_RAM: u64 = 0x0c;
}

/// The queues of the vsock device. The VMM hands the device over as firmware
/// hands over what it has set up: DRIVER_OK, VIRTIO_F_VERSION_1 negotiated,
/// and these two split queues (virtio 1.2, 2.7) ready.
pub mod queue {
    use super::VSOCK_QUEUES;

    /// Entries of each queue. Few, because every queued buffer is memory to
    /// touch.
    pub const ENTRIES: u16 = 4;
    /// The number of the queue the guest receives by.
    pub const RX: u16 = 0;
    /// The number of the queue the guest transmits by.
    pub const TX: u16 = 1;
    /// Queues that are set up.
    pub const COUNT: u16 = 2;
    /// What one queue takes, in bytes.
    pub const BYTES: u64 = 128;

    /// The descriptor table of a queue.
    #[must_use]
    pub const fn descriptors(queue: u16) -> u64 {
        VSOCK_QUEUES + queue as u64 * BYTES
    }

    /// Its available ring.
    #[must_use]
    pub const fn available(queue: u16) -> u64 {
        descriptors(queue) + 16 * ENTRIES as u64
    }

    /// Its used ring.
    #[must_use]
    pub const fn used(queue: u16) -> u64 {
        available(queue) + 4 + 2 * ENTRIES as u64
    }

    // Alignment (2.7): 16, 2 and 4 bytes. And each queue has its own stretch.
    const _: () = assert!(descriptors(TX).is_multiple_of(16));
    const _: () = assert!(available(TX).is_multiple_of(2) && used(TX).is_multiple_of(4));
    const _: () = assert!(used(RX) + 4 + 8 * ENTRIES as u64 <= descriptors(TX));
    const _: () = assert!(COUNT as u64 * BYTES <= super::PAGE_BYTES);
}

/// The host's vsock port of the guest's one stream, which is open from the
/// start, as the device is live.
pub const HOST_PORT: u32 = 1024;
/// The guest's port of it.
pub const GUEST_PORT: u32 = 1024;
/// What the host takes on that stream before it has consumed any, in bytes: its
/// `buf_alloc` (virtio 1.2, 5.10.6.3). The guest's stands in its first packet.
pub const HOST_WINDOW: u32 = 256 * 1024;
/// The guest's context id.
pub const GUEST_CID: u64 = 3;
/// The host's context id (virtio 1.2, 5.10.4).
pub const HOST_CID: u64 = 2;

/// What the VMM tells the guest, at [`BOOT_INFO`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootInfo {
    /// Where RAM ends, and with it the heap.
    pub ram_end: u64,
    /// The boot archive's length in bytes; it starts at [`ARCHIVE`].
    pub archive_bytes: u64,
    /// How much from [`DATA`] on the guest touches once it has greeted, in
    /// bytes, before it looks for a program: so that a VM which waits has its
    /// working set mapped. The guest reads this when it gets there, so it may
    /// be changed until the exit that sent the greeting is left.
    pub touch_bytes: u64,
}

impl BootInfo {
    /// Its size in memory.
    pub const BYTES: usize = 32;
    const MAGIC: u64 = u64::from_le_bytes(*b"forgeVM2");

    /// The bytes to place at [`BOOT_INFO`].
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&Self::MAGIC.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.ram_end.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.archive_bytes.to_le_bytes());
        bytes[24..].copy_from_slice(&self.touch_bytes.to_le_bytes());
        bytes
    }

    /// Reads the bytes at [`BOOT_INFO`]; `None` if they are not a boot info of
    /// this release.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let word = |index: usize| {
            let mut word = [0u8; 8];
            word.copy_from_slice(&bytes[index * 8..index * 8 + 8]);
            u64::from_le_bytes(word)
        };
        (word(0) == Self::MAGIC).then(|| Self {
            ram_end: word(1),
            archive_bytes: word(2),
            touch_bytes: word(3),
        })
    }
}

/// The boot archive: named byte strings in the `newc` cpio format, which any
/// cpio tool lists. The supervisor adds the operator's trust keys at start.
pub mod archive {
    use super::Vec;

    /// Entries below this name are trust keys, 32 bytes each.
    pub const TRUST_PREFIX: &str = "trust/";
    /// An empty entry that is there if the guest is to make tables of its trust
    /// keys before it greets: others will start from where it stands then.
    pub const TABLES: &str = "tables";

    const MAGIC: &[u8; 6] = b"070701";
    const HEADER_BYTES: usize = 110;
    const TRAILER: &str = "TRAILER!!!";

    /// Writes an archive.
    #[derive(Debug, Default)]
    pub struct Builder {
        bytes: Vec<u8>,
        entries: u32,
    }

    impl Builder {
        /// Adds an entry. The order is kept.
        pub fn add(&mut self, name: &str, content: &[u8]) -> &mut Self {
            self.entries += 1;
            // A regular file, read-only; all other fields are zero so that
            // equal content gives equal bytes.
            self.entry(self.entries, 0o100_444, 1, name, content);
            self
        }

        /// The archive's bytes.
        #[must_use]
        pub fn finish(mut self) -> Vec<u8> {
            self.entry(0, 0, 1, TRAILER, &[]);
            self.bytes
        }

        fn entry(&mut self, ino: u32, mode: u32, nlink: u32, name: &str, content: &[u8]) {
            let name_bytes = name.len() as u32 + 1;
            let fields =
                [ino, mode, 0, 0, nlink, 0, content.len() as u32, 0, 0, 0, 0, name_bytes, 0];
            self.bytes.extend_from_slice(MAGIC);
            for field in fields {
                for nibble in (0..8).rev() {
                    let digit = (field >> (nibble * 4)) & 0xf;
                    self.bytes.push(b"0123456789ABCDEF"[digit as usize]);
                }
            }
            self.bytes.extend_from_slice(name.as_bytes());
            self.bytes.push(0);
            self.pad();
            self.bytes.extend_from_slice(content);
            self.pad();
        }

        fn pad(&mut self) {
            while !self.bytes.len().is_multiple_of(4) {
                self.bytes.push(0);
            }
        }
    }

    /// Iterates an archive's entries as name and content. Ends at the trailer,
    /// or where the bytes are no archive any more.
    pub fn entries(archive: &[u8]) -> impl Iterator<Item = (&str, &[u8])> {
        let mut at = 0usize;
        core::iter::from_fn(move || {
            let header = archive.get(at..at.checked_add(HEADER_BYTES)?)?;
            if !header.starts_with(MAGIC) {
                return None;
            }
            let field = |index: usize| -> Option<usize> {
                let digits = core::str::from_utf8(&header[6 + index * 8..14 + index * 8]).ok()?;
                usize::from_str_radix(digits, 16).ok()
            };
            let (content_bytes, name_bytes) = (field(6)?, field(11)?);
            let name_at = at + HEADER_BYTES;
            let name = archive.get(name_at..name_at.checked_add(name_bytes.checked_sub(1)?)?)?;
            let name = core::str::from_utf8(name).ok()?;
            let content_at = (name_at + name_bytes).next_multiple_of(4);
            let content_end = content_at.checked_add(content_bytes)?;
            let content = archive.get(content_at..content_end)?;
            at = content_end.next_multiple_of(4);
            (name != TRAILER).then_some((name, content))
        })
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn entries_come_back_in_order() {
            let mut builder = Builder::default();
            builder.add("trust/0", &[1; 32]).add("runtime/js", b"abc").add("empty", b"");
            let bytes = builder.finish();
            let got: Vec<_> = entries(&bytes).collect();
            let expected: [(&str, &[u8]); 3] =
                [("trust/0", &[1; 32]), ("runtime/js", b"abc"), ("empty", b"")];
            assert_eq!(got, expected);
        }

        #[test]
        fn a_cut_or_foreign_archive_ends_without_a_panic() {
            let mut builder = Builder::default();
            builder.add("a", b"content");
            let bytes = builder.finish();
            for length in 0..bytes.len() {
                assert!(entries(&bytes[..length]).count() <= 1);
            }
            assert_eq!(entries(&[b'0'; 400]).count(), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boot_info_survives_memory_and_knows_a_stranger() {
        let info = BootInfo { ram_end: 0x4000_0000, archive_bytes: 77, touch_bytes: 0x9000 };
        assert_eq!(BootInfo::from_bytes(&info.to_bytes()), Some(info));
        assert_eq!(BootInfo::from_bytes(&[0; BootInfo::BYTES]), None);
    }
}
