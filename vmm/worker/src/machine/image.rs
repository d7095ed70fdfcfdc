//! The guest's ELF, checked against the platform it was linked for.

use std::borrow::Cow;
use std::io::Cursor;
use std::sync::{Arc, OnceLock};

use forge_protocol::platform::{CODE, CODE_BYTES, DATA, LARGE_PAGE_BYTES, PAGE_BYTES};
use linux_loader::loader::{Elf, KernelLoader as _};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use super::MachineError;
use super::mapping::CodeFile;

/// A stretch of the image and who may do what with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    /// The address at which the segment starts.
    start: u64,
    /// The page behind its last.
    end: u64,
    /// Where it starts in the file, and how much of it is there; the rest is
    /// zeros.
    file_offset: u64,
    file_bytes: u64,
    writable: bool,
    executable: bool,
}

/// A guest image that fits the platform, for any number of VMs.
#[derive(Clone, Debug)]
pub struct Image {
    elf: Cow<'static, [u8]>,
    entry: u64,
    segments: Vec<Segment>,
    /// Made for the first machine of it.
    code: OnceLock<Arc<CodeFile>>,
}

const OUTSIDE: &str = "it does not fit its stretches";

const PT_LOAD: u32 = 1;
const PF_X: u32 = 1;
const PF_W: u32 = 2;

impl Image {
    /// The guest this supervisor was built with.
    ///
    /// # Errors
    /// [`MachineError::Image`], if the build is broken.
    pub fn built_in() -> Result<&'static Self, MachineError> {
        static IMAGE: OnceLock<Image> = OnceLock::new();
        if let Some(image) = IMAGE.get() {
            return Ok(image);
        }
        let parsed = Self::parse(forge_rootfs::GUEST_ELF)?;
        Ok(IMAGE.get_or_init(|| parsed))
    }

    /// The same with other code at its entry, for benches and tests that need
    /// a guest that does one thing.
    ///
    /// # Errors
    /// [`MachineError::Image`].
    pub fn with_entry_code(code: &[u8]) -> Result<Self, MachineError> {
        let mut image = Self::parse(forge_rootfs::GUEST_ELF)?;
        let entry = image.entry;
        let at = image.segments.iter().find_map(|segment| {
            let into = entry.checked_sub(segment.start)?;
            (segment.executable && into < segment.file_bytes).then_some(segment.file_offset + into)
        });
        let place = at.map(|at| at as usize..at as usize + code.len());
        place
            .and_then(|place| image.elf.to_mut().get_mut(place))
            .ok_or(MachineError::Image("the code does not fit at its entry"))?
            .copy_from_slice(code);
        Ok(image)
    }

    /// Reads an image's program headers.
    ///
    /// # Errors
    /// [`MachineError::Image`]: no x86-64 executable, a segment outside its
    /// stretch or the file, code and data that share a page, or a segment that
    /// is both writable and executable.
    pub fn parse(elf: impl Into<Cow<'static, [u8]>>) -> Result<Self, MachineError> {
        let elf = elf.into();
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
            let (Some(kind), Some(flags)) = (word(at), word(at + 4)) else {
                return Err(bad("its program headers are cut off"));
            };
            let (Some(file_offset), Some(start), Some(file_bytes), Some(bytes)) =
                (long(at + 8), long(at + 16), long(at + 32), long(at + 40))
            else {
                return Err(bad("its program headers are cut off"));
            };
            if kind != PT_LOAD || bytes == 0 {
                continue;
            }
            let end = start
                .checked_add(bytes)
                .and_then(|end| end.checked_next_multiple_of(PAGE_BYTES))
                .ok_or(bad("a segment wraps around"))?;
            let segment = Segment {
                start,
                end,
                file_offset,
                file_bytes,
                writable: flags & PF_W != 0,
                executable: flags & PF_X != 0,
            };
            if segment.writable && segment.executable {
                return Err(bad("a segment is both writable and executable"));
            }
            // A stretch is all writable or all not, so nothing can share a
            // page with what is otherwise.
            let room = match segment.writable {
                true => DATA..DATA + LARGE_PAGE_BYTES,
                false => CODE..CODE + CODE_BYTES,
            };
            if start < room.start || segment.end > room.end {
                return Err(bad("a segment lies outside its stretch"));
            }
            let file_end = file_offset.checked_add(file_bytes);
            if file_bytes > bytes || file_end.is_none_or(|end| end > elf.len() as u64) {
                return Err(bad("a segment lies outside the file"));
            }
            segments.push(segment);
        }
        let runs_entry = |s: &Segment| s.executable && (s.start..s.end).contains(&entry);
        if !segments.iter().any(runs_entry) {
            return Err(bad("its entry is not in its code"));
        }
        Ok(Self { elf, entry, segments, code: OnceLock::new() })
    }

    /// Where execution starts, in ring 3.
    #[must_use]
    pub fn entry(&self) -> u64 {
        self.entry
    }

    /// Makes what all its machines have in common, for which the first would
    /// wait otherwise.
    ///
    /// # Errors
    /// [`MachineError`]: the host has no memory for it.
    pub fn load(&self) -> Result<(), MachineError> {
        self.code().map(drop)
    }

    /// Its code, which all its machines have in common.
    ///
    /// # Errors
    /// [`MachineError`]: the host has no memory for it.
    pub(super) fn code(&self) -> Result<&Arc<CodeFile>, MachineError> {
        if let Some(code) = self.code.get() {
            return Ok(code);
        }
        let made = CodeFile::make(|memory| {
            Elf::load(memory, None, &mut Cursor::new(&self.elf[..]), None)
                .map(drop)
                .map_err(|_| MachineError::Image(OUTSIDE))
        })?;
        Ok(self.code.get_or_init(|| Arc::new(made)))
    }

    /// Writes its data to where it belongs in RAM, which is zero there.
    ///
    /// # Errors
    /// [`MachineError::Image`] if that is no such memory.
    pub(super) fn load_data(&self, ram: &GuestMemoryMmap) -> Result<(), MachineError> {
        for segment in self.segments.iter().filter(|segment| segment.writable) {
            let from = segment.file_offset as usize;
            let bytes = &self.elf[from..from + segment.file_bytes as usize];
            ram.write_slice(bytes, GuestAddress(segment.start))
                .map_err(|_| MachineError::Image(OUTSIDE))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_image_keeps_writable_and_executable_apart() {
        let image = Image::built_in().unwrap();
        assert!(image.segments.iter().all(|s| !(s.writable && s.executable)));
        assert!(image.segments.iter().any(|s| s.executable && s.start == CODE));
        let lowest = image.segments.iter().filter(|s| s.writable).map(|s| s.start).min();
        assert_eq!(lowest, Some(DATA), "the stack is lowest, above what is never mapped");
    }

    #[test]
    fn what_each_vm_must_copy_of_the_image_is_little() {
        let image = Image::built_in().unwrap();
        let bytes: u64 = image.segments.iter().filter(|s| s.writable).map(|s| s.file_bytes).sum();
        assert!(bytes < 16 * 1024, "{bytes} bytes");
    }

    #[test]
    fn a_cut_image_is_refused_at_every_length_of_its_headers() {
        // The last header's alignment is not looked at.
        for length in 0..64 + 4 * 56 - 8 {
            assert!(Image::parse(&forge_rootfs::GUEST_ELF[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn an_image_that_is_writable_and_executable_is_refused() {
        let mut elf = forge_rootfs::GUEST_ELF.to_vec();
        let first_flags = 64 + 4;
        elf[first_flags] = 7;
        let refused = Image::parse(elf).unwrap_err().to_string();
        assert!(refused.contains("both writable and executable"), "{refused}");
    }
}
