//! The guest's ELF, checked against the platform it was linked for.

use std::io::Cursor;

use forge_protocol::platform::{HEAP, IMAGE, PAGE_BYTES, TRAP_STUB};
use linux_loader::loader::{Elf, KernelLoader as _};
use vm_memory::GuestMemoryMmap;

use super::MachineError;

/// A stretch of the image and who may do what with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its first page.
    pub start: u64,
    /// The page behind its last.
    pub end: u64,
    /// May be written.
    pub writable: bool,
    /// May be executed.
    pub executable: bool,
    /// Belongs to ring 0.
    pub supervisor: bool,
}

/// A guest image.
#[derive(Clone, Debug)]
pub struct Image {
    elf: &'static [u8],
    entry: u64,
    segments: Vec<Segment>,
}

const PT_LOAD: u32 = 1;
const PF_X: u32 = 1;
const PF_W: u32 = 2;

impl Image {
    /// The guest this supervisor was built with.
    ///
    /// # Errors
    /// [`MachineError::Image`], if the build is broken.
    pub fn built_in() -> Result<Self, MachineError> {
        Self::parse(forge_rootfs::GUEST_ELF)
    }

    /// Reads an image's program headers.
    ///
    /// # Errors
    /// [`MachineError::Image`]: no x86-64 executable, a segment outside the
    /// image's stretch, two that share a page, or one that is both writable
    /// and executable.
    pub fn parse(elf: &'static [u8]) -> Result<Self, MachineError> {
        let bad = MachineError::Image;
        let half = |at: usize| elf.get(at..at + 2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        let word =
            |at: usize| elf.get(at..at + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let long = |at: usize| Some(u64::from(word(at)?) | u64::from(word(at + 4)?) << 32);

        // Class 64, little-endian, version 1; executable for x86-64.
        if !elf.starts_with(b"\x7fELF\x02\x01\x01") || half(16) != Some(2) || half(18) != Some(62) {
            return Err(bad("it is no x86-64 ELF executable"));
        }
        let (Some(entry), Some(table), Some(stride), Some(count)) =
            (long(24), long(32), half(54), half(56))
        else {
            return Err(bad("its ELF header is cut off"));
        };
        let mut segments: Vec<Segment> = Vec::new();
        for index in 0..usize::from(count) {
            let at = table as usize + index * usize::from(stride);
            let (Some(kind), Some(flags), Some(start), Some(bytes)) =
                (word(at), word(at + 4), long(at + 16), long(at + 40))
            else {
                return Err(bad("its program headers are cut off"));
            };
            if kind != PT_LOAD || bytes == 0 {
                continue;
            }
            let end = start.checked_add(bytes).ok_or(bad("a segment wraps around"))?;
            let segment = Segment {
                start,
                end: end.next_multiple_of(PAGE_BYTES),
                writable: flags & PF_W != 0,
                executable: flags & PF_X != 0,
                supervisor: start == TRAP_STUB,
            };
            if !start.is_multiple_of(PAGE_BYTES) || start < IMAGE || segment.end > HEAP {
                return Err(bad("a segment lies outside the image's stretch"));
            }
            if segment.writable && segment.executable {
                return Err(bad("a segment is both writable and executable"));
            }
            if segments.last().is_some_and(|last| last.end > start) {
                return Err(bad("segments share a page"));
            }
            segments.push(segment);
        }
        let runs_entry =
            |s: &Segment| s.executable && !s.supervisor && (s.start..s.end).contains(&entry);
        if !segments.iter().any(runs_entry) {
            return Err(bad("its entry is not in ring-3 code"));
        }
        if !segments.iter().any(|segment| segment.supervisor) {
            return Err(bad("it has no trap stub"));
        }
        Ok(Self { elf, entry, segments })
    }

    /// Where execution starts, in ring 3.
    #[must_use]
    pub fn entry(&self) -> u64 {
        self.entry
    }

    /// Its segments, in the order of their addresses.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Copies it into guest memory, which is zero where the image is.
    pub(super) fn load(&self, memory: &GuestMemoryMmap) -> Result<(), MachineError> {
        Elf::load(memory, None, &mut Cursor::new(self.elf), None)
            .map(|_| ())
            .map_err(|_| MachineError::Image("it does not fit guest memory"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_image_keeps_writable_and_executable_apart() {
        let image = Image::built_in().unwrap();
        assert!(image.segments().iter().all(|s| !(s.writable && s.executable)));
        let stub: Vec<_> = image.segments().iter().filter(|s| s.supervisor).collect();
        assert_eq!(stub.len(), 1);
        assert_eq!(stub[0].end - stub[0].start, PAGE_BYTES, "ring 0 holds one page");
        assert!(!stub[0].writable);
    }

    #[test]
    fn a_cut_image_is_refused_at_every_length_of_its_headers() {
        // The last header's alignment is not looked at.
        for length in 0..64 + 5 * 56 - 8 {
            assert!(Image::parse(&forge_rootfs::GUEST_ELF[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn an_image_that_is_writable_and_executable_is_refused() {
        let mut elf = forge_rootfs::GUEST_ELF.to_vec();
        let first_flags = 64 + 4;
        elf[first_flags] = 7;
        let refused = Image::parse(elf.leak()).unwrap_err().to_string();
        assert!(refused.contains("both writable and executable"), "{refused}");
    }
}
