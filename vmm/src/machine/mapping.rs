//! Host memory for guests, aligned to large pages where it can be.
//!
//! KVM maps a guest's large page by one of its own only where guest-physical
//! and host-virtual address agree modulo its size. Recent kernels place large
//! anonymous mappings so; for others a filler before the mapping does it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

use forge_protocol::platform::LARGE_PAGE_BYTES;
use vm_memory::{
    GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
    GuestRegionMmap, MmapRegion,
};

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
    if misaligned(&region) != 0 {
        // The kernel places mappings below each other: this much above it
        // brings the next one to where it should be.
        let filler = misaligned(&region);
        drop(region);
        let filler: MmapRegion = MmapRegion::new(filler).map_err(io::Error::other)?;
        region = MmapRegion::new(bytes).map_err(io::Error::other)?;
        drop(filler);
    }
    let region = GuestRegionMmap::new(region, GuestAddress(address))
        .ok_or_else(|| io::Error::other("the mapping wraps around"))?;
    GuestMemoryMmap::from_regions(vec![region]).map_err(io::Error::other)
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
    use vm_memory::Bytes;

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
