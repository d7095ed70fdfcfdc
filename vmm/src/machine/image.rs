//! The guest's ELF, checked against the platform it was linked for, and its
//! code, loaded once for all VMs.

use std::io::Cursor;

use forge_protocol::platform::{CODE, CODE_BYTES, DATA, LARGE_PAGE_BYTES, PAGE_BYTES};
use linux_loader::loader::{Elf, KernelLoader as _};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::MachineError;
use super::mapping;

/// A stretch of the image and who may do what with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where it starts.
    pub start: u64,
    /// The page behind its last.
    pub end: u64,
    /// May be written.
    pub writable: bool,
    /// May be executed.
    pub executable: bool,
}

/// What writable memory starts as: an address and the bytes there.
type Data = Vec<(u64, Vec<u8>)>;

/// A guest image, ready for any number of VMs.
#[derive(Clone, Debug)]
pub struct Image {
    entry: u64,
    segments: Vec<Segment>,
    /// Code and constants, in memory that all VMs share and none can write.
    code: GuestMemoryMmap,
    data: Data,
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

    /// The same with other code at its entry, for benches and tests that need
    /// a guest that does one thing.
    ///
    /// # Errors
    /// [`MachineError::Image`].
    pub fn with_entry_code(code: &[u8]) -> Result<Self, MachineError> {
        let built_in = Self::built_in()?;
        let entry = GuestAddress(built_in.entry);
        built_in
            .code
            .write_slice(code, entry)
            .map_err(|_| MachineError::Image("the code does not fit at its entry"))?;
        Ok(built_in)
    }

    /// Reads an image's program headers and loads it.
    ///
    /// # Errors
    /// [`MachineError::Image`]: no x86-64 executable, a segment outside its
    /// stretch, code and data that share a page, or a segment that is both
    /// writable and executable. [`MachineError::Memory`] if it cannot be
    /// mapped.
    pub fn parse(elf: &[u8]) -> Result<Self, MachineError> {
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
        let mut data: Data = Vec::new();
        for index in 0..usize::from(count) {
            let at = table as usize + index * usize::from(stride);
            let (Some(kind), Some(flags), Some(start), Some(file_bytes), Some(bytes)) =
                (word(at), word(at + 4), long(at + 16), long(at + 32), long(at + 40))
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
            if segment.writable && file_bytes > 0 {
                data.push((start, vec![0; file_bytes.min(bytes) as usize]));
            }
            segments.push(segment);
        }
        let runs_entry = |s: &Segment| s.executable && (s.start..s.end).contains(&entry);
        if !segments.iter().any(runs_entry) {
            return Err(bad("its entry is not in its code"));
        }
        let code = load(elf, &mut data)?;
        Ok(Self { entry, segments, code, data })
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

    /// Its code, for the memory slot that all VMs share.
    pub(super) fn code(&self) -> &GuestMemoryMmap {
        &self.code
    }

    /// Copies its data into guest memory, which is zero there.
    pub(super) fn load_data(&self, memory: &GuestMemoryMmap) -> Result<(), MachineError> {
        for (address, bytes) in &self.data {
            memory
                .write_slice(bytes, GuestAddress(*address))
                .map_err(|_| MachineError::Image("it does not fit guest memory"))?;
        }
        Ok(())
    }
}

/// Loads the image; its code stays where it was loaded, its data is taken out
/// again.
fn load(elf: &[u8], data: &mut Data) -> Result<GuestMemoryMmap, MachineError> {
    let map = |address, bytes: u64| {
        let bytes = bytes as usize;
        mapping::map(address, bytes)
            .map_err(|error| MachineError::Memory { bytes, reason: error.to_string() })
    };
    let does_not_fit = MachineError::Image("it does not fit its stretches");
    let code = map(CODE, CODE_BYTES)?;
    mapping::prefer_large_page(&code, CODE);
    let writable = map(DATA, LARGE_PAGE_BYTES)?;
    let both = writable
        .remove_region(GuestAddress(DATA), LARGE_PAGE_BYTES)
        .and_then(|(_, region)| code.insert_region(region));
    let Ok(both) = both else { return Err(does_not_fit) };
    if Elf::load(&both, None, &mut Cursor::new(elf), None).is_err() {
        return Err(does_not_fit);
    }
    for (address, bytes) in data {
        if writable.read_slice(bytes, GuestAddress(*address)).is_err() {
            return Err(does_not_fit);
        }
    }
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_image_keeps_writable_and_executable_apart() {
        let image = Image::built_in().unwrap();
        assert!(image.segments().iter().all(|s| !(s.writable && s.executable)));
        assert!(image.segments().iter().any(|s| s.executable && s.start == CODE));
        let lowest = image.segments().iter().filter(|s| s.writable).map(|s| s.start).min();
        assert_eq!(lowest, Some(DATA), "the stack is lowest, above what is never mapped");
    }

    #[test]
    fn what_each_vm_must_copy_of_the_image_is_little() {
        let bytes: usize = Image::built_in().unwrap().data.iter().map(|(_, b)| b.len()).sum();
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
        let refused = Image::parse(&elf).unwrap_err().to_string();
        assert!(refused.contains("both writable and executable"), "{refused}");
    }
}
