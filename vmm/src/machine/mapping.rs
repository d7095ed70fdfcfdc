//! Host memory for guests, aligned to large pages where it can be.
//!
//! KVM maps a guest's large page by one of its own only where guest-physical
//! and host-virtual address agree modulo its size. Recent kernels place large
//! anonymous mappings so; for others a filler before the mapping does it.
//! Code can lie right before RAM, so that KVM has one stretch of both.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

use forge_protocol::platform::{CODE, CODE_BYTES, LARGE_PAGE_BYTES, RAM_START};
use vm_memory::{
    Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
    GuestRegionMmap, MmapRegion,
};

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

/// A copy of the code right before a RAM's mapping, which nobody can write.
/// Only KVM ever looks at it.
#[derive(Debug)]
pub(super) struct CodeBelow {
    start: *mut libc::c_void,
}

// SAFETY: the mapping is read by KVM alone, and unmapped by whoever drops it
// last.
unsafe impl Send for CodeBelow {}
// SAFETY: the same.
unsafe impl Sync for CodeBelow {}

impl CodeBelow {
    const BYTES: usize = CODE_BYTES as usize;

    /// Copies `code` to the addresses before those of `ram`. Forks share it.
    ///
    /// # Errors
    /// What the kernel said; `EEXIST` if something lies there already.
    pub(super) fn copy(code: &GuestMemoryMmap, ram: &GuestMemoryMmap) -> io::Result<Self> {
        let ram_start = ram.get_host_address(GuestAddress(RAM_START)).map_err(io::Error::other)?;
        let start = (ram_start as usize).checked_sub(Self::BYTES).ok_or(io::ErrorKind::NotFound)?;
        // SAFETY: takes addresses that nobody uses, or fails.
        let start = unsafe {
            let start = std::ptr::without_provenance_mut(start);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            libc::mmap(start, Self::BYTES, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let below = Self { start };
        // A kernel that does not know the flag may have mapped elsewhere.
        if below.start.addr() + Self::BYTES != ram_start.addr() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // SAFETY: the mapping is ours alone and writable until the end of this
        // block, and is not accessed by a reference after it.
        unsafe {
            libc::madvise(start, Self::BYTES, libc::MADV_HUGEPAGE);
            let bytes = std::slice::from_raw_parts_mut(start.cast::<u8>(), Self::BYTES);
            code.read_slice(bytes, GuestAddress(CODE)).map_err(io::Error::other)?;
            if libc::mprotect(start, Self::BYTES, libc::PROT_READ) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(below)
    }

    /// Whether forks have it, and so much RAM behind it.
    pub(super) fn set_inherited(&self, ram_bytes: usize, inherited: bool) {
        let advice = if inherited { libc::MADV_DOFORK } else { libc::MADV_DONTFORK };
        // SAFETY: advice about mappings of ours, which says nothing of this
        // process's own memory.
        unsafe { libc::madvise(self.start, Self::BYTES + ram_bytes, advice) };
    }

    /// Its address.
    pub(super) fn start(&self) -> *const libc::c_void {
        self.start
    }
}

impl Drop for CodeBelow {
    fn drop(&mut self) {
        // SAFETY: mapped by `copy`, unmapped once; the machines that had it in
        // their memory are gone, as they hold it.
        unsafe { libc::munmap(self.start, Self::BYTES) };
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

/// Asks for a large page behind the guest's address. Where there is none,
/// small ones serve.
pub(super) fn prefer_large_page(memory: &GuestMemoryMmap, address: u64) {
    let Ok(start) = memory.get_host_address(GuestAddress(address)) else { return };
    let last = GuestAddress(address + LARGE_PAGE_BYTES - 1);
    if memory.get_host_address(last).is_ok() {
        // SAFETY: advice about a range inside one mapping of ours.
        unsafe { libc::madvise(start.cast(), LARGE_PAGE_BYTES as usize, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_lies_right_before_ram_and_cannot_be_written() {
        let code = map(CODE, CODE_BYTES as usize).unwrap();
        code.write_slice(b"first", GuestAddress(CODE)).unwrap();
        code.write_slice(b"last", GuestAddress(CODE + CODE_BYTES - 4)).unwrap();
        // Where a test beside this one maps something in the gap, there is no
        // room below: each attempt takes another place.
        let mut taken = Vec::new();
        let (ram, below) = loop {
            let ram = map(RAM_START, 4 * LARGE_PAGE_BYTES as usize).unwrap();
            match CodeBelow::copy(&code, &ram) {
                Ok(below) => break (ram, below),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && taken.len() < 32 => {
                    taken.push(ram);
                }
                Err(error) => panic!("after {} attempts: {error}", taken.len() + 1),
            }
        };
        let start = below.start().addr();
        assert_eq!(
            start + CODE_BYTES as usize,
            ram.get_host_address(GuestAddress(RAM_START)).unwrap().addr()
        );
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps.lines().find(|line| line.starts_with(&format!("{start:x}-"))).unwrap();
        assert!(line.contains(" r--p "), "{line}");
        // SAFETY: the mapping is readable for this length and nobody writes it.
        let bytes =
            unsafe { std::slice::from_raw_parts(below.start().cast::<u8>(), CODE_BYTES as usize) };
        assert!(bytes.starts_with(b"first") && bytes.ends_with(b"last"));
        // Nothing is put in another's place.
        let again = CodeBelow::copy(&code, &ram).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        drop(below);
        let maps_after = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps_after.contains(line), "{line} is still mapped");
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
            prefer_large_page(&memory, LARGE_PAGE_BYTES);
            let last = GuestAddress(3 * LARGE_PAGE_BYTES - 1);
            memory.write_obj(7u8, last).unwrap();
            assert!(memory.write_obj(7u8, GuestAddress(3 * LARGE_PAGE_BYTES)).is_err());
            kept.push((odd, memory));
        }
    }
}
