//! Host memory for guests, aligned to large pages where it can be.
//!
//! KVM maps a guest's large page by one of its own only where guest-physical
//! and host-virtual address agree modulo its size. Recent kernels place large
//! anonymous mappings so; for others a filler before the mapping does it.
//! Code lies right before RAM where it can, so that KVM has one stretch of both.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::ptr;
use std::sync::Arc;

use forge_protocol::platform::{CODE, CODE_BYTES, DATA, LARGE_PAGE_BYTES, RAM_START};
use vm_memory::{
    GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
    GuestRegionMmap, MmapRegion,
};

use super::MachineError;
use crate::sealed;

/// After so many attempts a mapping stays where the kernel put it, which costs
/// its VM large pages and nothing else.
const FILLERS: usize = 32;

fn misaligned(region: &MmapRegion) -> usize {
    region.as_ptr() as usize % LARGE_PAGE_BYTES as usize
}

/// Maps `bytes`, a multiple of the large page, for the guest at `address`.
/// Untouched pages cost nothing.
///
/// # Errors
/// What the kernel said.
pub(super) fn map(address: u64, bytes: usize) -> io::Result<GuestMemoryMmap> {
    let mut region = MmapRegion::new(bytes).map_err(io::Error::other)?;
    let mut fillers = Vec::new();
    while misaligned(&region) != 0 && fillers.len() < FILLERS {
        // The kernel places mappings below each other: this much above it
        // brings the next one to where it should be, unless the filler went
        // into a gap elsewhere or another thread's mapping came between. The
        // next attempt then starts from what that left.
        let filler = misaligned(&region);
        drop(region);
        fillers.push(MmapRegion::<()>::new(filler).map_err(io::Error::other)?);
        region = MmapRegion::new(bytes).map_err(io::Error::other)?;
    }
    drop(fillers);
    let region = GuestRegionMmap::new(region, GuestAddress(address))
        .ok_or_else(|| io::Error::other("the mapping wraps around"))?;
    GuestMemoryMmap::from_regions(vec![region]).map_err(io::Error::other)
}

/// An image's code and constants, as a file in memory that nobody can change.
/// All machines of this image in this process and its forks have its one large
/// page in common.
#[derive(Debug)]
pub(super) struct CodeFile {
    file: File,
    /// It is one large page. Before Linux 6.1 it cannot be made one.
    large: bool,
}

impl CodeFile {
    /// Makes it. `fill` writes code and data to where they belong; of that the
    /// code is kept.
    ///
    /// # Errors
    /// [`MachineError::Memory`], or what `fill` said.
    pub(super) fn make(
        fill: impl FnOnce(&GuestMemoryMmap) -> Result<(), MachineError>,
    ) -> Result<Self, MachineError> {
        let file = sealed::file(c"forge-code", Code::BYTES).map_err(no_code)?;
        let place = Room(map_aligned().map_err(no_code)?);
        let both = libc::PROT_READ | libc::PROT_WRITE;
        place.map(&file, both).map_err(no_code)?;
        // SAFETY: a mapping of ours of this length, which nobody else knows of.
        let code =
            unsafe { MmapRegion::build_raw(place.0.cast(), Code::BYTES, both, libc::MAP_SHARED) };
        let code = code.map_err(io::Error::other).map_err(no_code)?;
        let memory = GuestRegionMmap::new(code, GuestAddress(CODE)).and_then(|code| {
            let data = map(DATA, LARGE_PAGE_BYTES as usize).ok()?;
            data.insert_region(Arc::new(code)).ok()
        });
        let memory = memory.ok_or_else(|| no_code(io::Error::other("code and data overlap")))?;
        fill(&memory)?;
        drop(memory);
        // SAFETY: advice about the same mapping.
        let large = unsafe { libc::madvise(place.0, Code::BYTES, libc::MADV_COLLAPSE) } == 0;
        // What is mapped for writing cannot be sealed.
        drop(place);
        sealed::seal(&file).map_err(no_code)?;
        Ok(Self { file, large })
    }
}

fn no_code(error: io::Error) -> MachineError {
    MachineError::Memory { bytes: Code::BYTES, reason: error.to_string() }
}

/// Addresses for code, which are free again when it is dropped.
#[derive(Debug)]
struct Room(*mut libc::c_void);

impl Room {
    /// Puts the file there.
    fn map(&self, file: &File, rights: libc::c_int) -> io::Result<()> {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: in the place of a mapping of ours of this length.
        let got = unsafe { libc::mmap(self.0, Code::BYTES, rights, flags, file.as_raw_fd(), 0) };
        if got == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Puts a copy of the file there, in a large page if the host gives one.
    fn copy(&self, file: &File) -> io::Result<()> {
        // SAFETY: a mapping of ours of this length, which nobody else knows of
        // and which can be written until the last of these calls.
        unsafe {
            libc::madvise(self.0, Code::BYTES, libc::MADV_HUGEPAGE);
            file.read_exact_at(std::slice::from_raw_parts_mut(self.0.cast(), Code::BYTES), 0)?;
            match libc::mprotect(self.0, Code::BYTES, libc::PROT_READ) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // SAFETY: mapped by whoever made this, unmapped once; the machines that
        // had it in their memory are gone, as they hold it.
        unsafe { libc::munmap(self.0, Code::BYTES) };
    }
}

/// A guest's code and constants, where KVM finds them. Nobody can write them,
/// and only KVM ever looks at them.
#[derive(Debug)]
pub(super) struct Code {
    room: Room,
    file: Arc<CodeFile>,
}

// SAFETY: the mapping is read by KVM and `bytes` alone, and unmapped by whoever
// drops it last.
unsafe impl Send for Code {}
// SAFETY: the same.
unsafe impl Sync for Code {}

impl Code {
    const BYTES: usize = CODE_BYTES as usize;

    /// Maps code right before `ram`'s addresses, or anywhere else if something
    /// lies there.
    ///
    /// # Errors
    /// [`MachineError::Memory`].
    pub(super) fn map(ram: &GuestMemoryMmap, file: &Arc<CodeFile>) -> Result<Self, MachineError> {
        let room = Room(map_below(ram).or_else(|_| map_aligned()).map_err(no_code)?);
        if file.large {
            room.map(&file.file, libc::PROT_READ).map_err(no_code)?;
        } else {
            // In small pages a guest would find each of hundreds by an exit.
            room.copy(&file.file).map_err(no_code)?;
        }
        Ok(Self { room, file: Arc::clone(file) })
    }

    /// The file that it is of.
    pub(super) fn file(&self) -> &Arc<CodeFile> {
        &self.file
    }

    /// The mapped bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is readable for this length as long as `self`
        // lives, and nobody can write it.
        unsafe { std::slice::from_raw_parts(self.room.0.cast(), Self::BYTES) }
    }

    /// Whether this RAM follows it, in the host's addresses as in the guest's.
    pub(super) fn is_below(&self, ram: &GuestMemoryMmap) -> bool {
        ram.get_host_address(GuestAddress(RAM_START))
            .is_ok_and(|start| start.addr() == self.room.0.addr() + Self::BYTES)
    }

    /// Whether forks have it, and so much RAM behind it.
    pub(super) fn set_inherited(&self, ram_bytes: usize, inherited: bool) {
        let advice = if inherited { libc::MADV_DOFORK } else { libc::MADV_DONTFORK };
        // SAFETY: advice about mappings of ours, which says nothing of this
        // process's own memory.
        unsafe { libc::madvise(self.room.0, Self::BYTES + ram_bytes, advice) };
    }
}

/// Maps memory for code where `ram` begins to follow it; `EEXIST` if something
/// lies there already.
fn map_below(ram: &GuestMemoryMmap) -> io::Result<*mut libc::c_void> {
    let ram_start = ram.get_host_address(GuestAddress(RAM_START)).map_err(io::Error::other)?;
    let start = ram_start.addr().checked_sub(Code::BYTES).ok_or(io::ErrorKind::NotFound)?;
    let start = ptr::without_provenance_mut(start);
    let got = map_private(start, Code::BYTES, libc::MAP_FIXED_NOREPLACE)?;
    // A kernel that does not know the flag may have mapped elsewhere.
    if got.addr() != start.addr() {
        // SAFETY: just mapped, and nobody knows of it.
        unsafe { libc::munmap(got, Code::BYTES) };
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok(got)
}

/// Maps memory for code anywhere, aligned to a large page.
fn map_aligned() -> io::Result<*mut libc::c_void> {
    let start = map_private(ptr::null_mut(), 2 * Code::BYTES, 0)?;
    let before = start.align_offset(Code::BYTES);
    let aligned = start.wrapping_byte_add(before);
    // SAFETY: what lies around the aligned part of a mapping of ours that nobody
    // knows of.
    unsafe {
        if before > 0 {
            libc::munmap(start, before);
        }
        libc::munmap(aligned.wrapping_byte_add(Code::BYTES), Code::BYTES - before);
    }
    Ok(aligned)
}

fn map_private(
    start: *mut libc::c_void,
    bytes: usize,
    how: libc::c_int,
) -> io::Result<*mut libc::c_void> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | how;
    // SAFETY: takes addresses that nobody uses, or fails.
    match unsafe { libc::mmap(start, bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) } {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        start => Ok(start),
    }
}

/// Puts the first `bytes` of a file in the place of what `memory` has at
/// `address`: pages are shared with all who map the file until they are
/// written.
///
/// # Errors
/// What the kernel said; `InvalidInput` if the stretch is not in `memory`.
pub(super) fn overlay(
    memory: &GuestMemoryMmap,
    address: u64,
    file: &File,
    bytes: usize,
) -> io::Result<()> {
    let outside = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let start = memory.get_host_address(GuestAddress(address)).map_err(outside)?;
    let last = GuestAddress(address + bytes as u64 - 1);
    memory.get_host_address(last).map_err(outside)?;
    // SAFETY: the stretch lies in one mapping of ours, which stays one for
    // `munmap`, and is accessed through vm-memory's volatile copies alone.
    let mapped = unsafe {
        libc::mmap(
            start.cast(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE,
            file.as_raw_fd(),
            0,
        )
    };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Asks for small pages alone. A host may be set to give large ones to all
/// who do not: then one write would cost 512 pages, to hold and to put back.
pub(super) fn small_pages(memory: &GuestMemoryMmap) {
    for region in memory.iter() {
        let (start, bytes) = (region.as_ptr(), region.len() as usize);
        // SAFETY: advice about a mapping of ours.
        unsafe { libc::madvise(start.cast(), bytes, libc::MADV_NOHUGEPAGE) };
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes as _;

    use super::*;

    fn file() -> Arc<CodeFile> {
        let file = CodeFile::make(|memory| {
            memory.write_slice(b"first", GuestAddress(CODE)).unwrap();
            memory.write_slice(b"last", GuestAddress(CODE + CODE_BYTES - 4)).unwrap();
            Ok(())
        });
        Arc::new(file.unwrap())
    }

    /// Where the kernel makes no large page of a file, code is a copy: that way
    /// is tested wherever the tests run.
    fn files() -> [Arc<CodeFile>; 2] {
        let mut small = CodeFile::make(|_| Ok(())).unwrap();
        small.large = false;
        let filled = file();
        small.file = filled.file.try_clone().unwrap();
        [filled, Arc::new(small)]
    }

    /// How the kernel lists what lies at this address.
    fn listed(start: usize) -> Option<String> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().find(|line| line.starts_with(&format!("{start:x}-"))).map(String::from)
    }

    #[test]
    fn code_lies_right_before_ram_and_cannot_be_written() {
        for file in files() {
            // Where a test beside this one maps something in the gap, there is
            // no room below: each attempt takes another place.
            let mut taken = Vec::new();
            let (ram, code) = loop {
                let ram = map(RAM_START, 4 * LARGE_PAGE_BYTES as usize).unwrap();
                let code = Code::map(&ram, &file).unwrap();
                if code.is_below(&ram) {
                    break (ram, code);
                }
                taken.push(ram);
                assert!(taken.len() < 32);
            };
            let start = code.room.0.addr();
            let ram_start = ram.get_host_address(GuestAddress(RAM_START)).unwrap().addr();
            assert_eq!(start + CODE_BYTES as usize, ram_start);
            let line = listed(start).unwrap();
            assert!(line.contains(if file.large { " r--s " } else { " r--p " }), "{line}");
            assert!(code.bytes().starts_with(b"first") && code.bytes().ends_with(b"last"));
            drop(code);
            assert_ne!(listed(start), Some(line), "still mapped");
        }
    }

    #[test]
    fn nobody_can_change_the_file_that_code_is_in() {
        let file = file();
        assert!(file.file.write_all_at(b"other", 0).is_err());
        let ram = map(RAM_START, LARGE_PAGE_BYTES as usize).unwrap();
        let code = Code::map(&ram, &file).unwrap();
        let both = libc::PROT_READ | libc::PROT_WRITE;
        assert!(!file.large || code.room.map(&file.file, both).is_err());
    }

    #[test]
    fn where_there_is_no_room_below_ram_code_lies_elsewhere_and_aligned() {
        let ram = map(RAM_START, 4 * LARGE_PAGE_BYTES as usize).unwrap();
        for file in files() {
            let below = Code::map(&ram, &file).unwrap();
            let elsewhere = Code::map(&ram, &file).unwrap();
            assert!(!elsewhere.is_below(&ram), "something was put in another's place");
            assert!(elsewhere.room.0.addr().is_multiple_of(LARGE_PAGE_BYTES as usize));
            let line = listed(elsewhere.room.0.addr()).unwrap();
            assert!(line.contains(" r--"), "{line}");
            assert!(elsewhere.bytes() == below.bytes());
        }
    }

    #[test]
    fn mappings_are_aligned_whatever_lies_around_them() {
        let large = LARGE_PAGE_BYTES as usize;
        let mut kept = Vec::new();
        for pages in 1..20 {
            let odd: MmapRegion = MmapRegion::new(pages * 4096).unwrap();
            let memory = map(LARGE_PAGE_BYTES, 2 * large).unwrap();
            let host = memory.get_host_address(GuestAddress(LARGE_PAGE_BYTES)).unwrap();
            assert!((host as usize).is_multiple_of(large), "{host:?} after {pages} pages");
            let last = GuestAddress(3 * LARGE_PAGE_BYTES - 1);
            memory.write_obj(7u8, last).unwrap();
            assert!(memory.write_obj(7u8, GuestAddress(3 * LARGE_PAGE_BYTES)).is_err());
            kept.push((odd, memory));
        }
    }
}
