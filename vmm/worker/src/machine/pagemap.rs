//! Which pages of a mapping this process has of its own: the host's page
//! tables, as `/proc/self/pagemap` shows them.
//!
//! A page of a private mapping is shared until it is written; from then on
//! the process has a copy. Nothing that a guest says comes into it.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::FileExt as _;
use std::sync::OnceLock;

use crate::jail::rules::PAGEMAP_SCAN;

/// A page of the host, in bytes: x86-64 has no other base size.
const PAGE: usize = 4096;

/// The kernel's `struct pm_scan_arg` (since Linux 6.7).
#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_count: u64,
    pages_max: u64,
    category_inverted: u64,
    category_mask: u64,
    category_any_of: u64,
    return_mask: u64,
}

/// The kernel's `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

// The request says how large its argument is.
const _: () = assert!(size_of::<ScanArgument>() as u32 == (PAGEMAP_SCAN >> 16) & 0x3fff);

const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;
const IS_ZERO_PAGE: u64 = 1 << 5;

/// Bits of an entry of the file itself, for kernels without the scan.
const ENTRY_PRESENT: u64 = 1 << 63;
const ENTRY_SWAPPED: u64 = 1 << 62;
const ENTRY_FILE: u64 = 1 << 61;

/// Regions that one scan can tell of.
const REGIONS: usize = 64;

/// Whether this kernel scans page maps (since Linux 6.7).
#[must_use]
pub fn can_scan() -> bool {
    static SCANS: OnceLock<bool> = OnceLock::new();
    *SCANS.get_or_init(|| {
        let page = std::ptr::from_ref(&SCANS) as usize / PAGE * PAGE;
        let scanned = PageMap::open().map(|map| map.scan(page..page + PAGE, &mut Vec::new()));
        matches!(scanned, Ok(Ok(())))
    })
}

/// This process's page map.
#[derive(Debug)]
pub struct PageMap {
    file: File,
    /// Whether the kernel has the scan.
    scans: std::cell::Cell<bool>,
}

impl PageMap {
    /// Opens it by its path.
    ///
    /// # Errors
    /// If there is no `/proc`, or it is not to be read.
    pub fn open() -> io::Result<Self> {
        Ok(File::open("/proc/self/pagemap")?.into())
    }

    /// Opens it below a procfs that is mounted nowhere.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn open_below(procfs: BorrowedFd<'_>) -> io::Result<Self> {
        // SAFETY: the path is a C string; what is opened is new and ours.
        unsafe {
            match libc::openat(
                procfs.as_raw_fd(),
                c"self/pagemap".as_ptr(),
                libc::O_RDONLY | libc::O_CLOEXEC,
            ) {
                -1 => Err(io::Error::last_os_error()),
                fd => Ok(OwnedFd::from_raw_fd(fd).into()),
            }
        }
    }

    /// The pages in `range` of this address space that are the process's own,
    /// as ascending ranges of addresses.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn private_pages(&self, range: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        let mut found = Vec::new();
        if self.scans.get() {
            match self.scan(range.clone(), &mut found) {
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
                    self.scans.set(false);
                    found.clear();
                }
                done => return done.map(|()| found),
            }
        }
        self.read(range, &mut found)?;
        Ok(found)
    }

    fn scan(&self, range: Range<usize>, found: &mut Vec<Range<usize>>) -> io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            let mut regions = [Region::default(); REGIONS];
            let mut argument = ScanArgument {
                size: size_of::<ScanArgument>() as u64,
                start: at as u64,
                end: range.end as u64,
                regions: regions.as_mut_ptr() as u64,
                regions_count: REGIONS as u64,
                // The shared page of zeros is of a page that was read alone: the
                // zygote sees to it that none is put in the place of another.
                category_inverted: IS_FILE | IS_ZERO_PAGE,
                category_mask: IS_FILE | IS_ZERO_PAGE,
                category_any_of: IS_PRESENT | IS_SWAPPED,
                return_mask: IS_PRESENT,
                ..ScanArgument::default()
            };
            // SAFETY: the argument and the regions it names are valid for
            // writes of their sizes.
            let count = unsafe {
                libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN.into(), &raw mut argument)
            };
            let Ok(count) = usize::try_from(count) else {
                return Err(io::Error::last_os_error());
            };
            for region in regions.iter().take(count) {
                push(found, region.start as usize..region.end as usize);
            }
            // A scan that filled its regions goes on where it stopped.
            at = match argument.walk_end as usize {
                end if end > at => end,
                _ => return Err(io::ErrorKind::UnexpectedEof.into()),
            };
        }
        Ok(())
    }

    fn read(&self, range: Range<usize>, found: &mut Vec<Range<usize>>) -> io::Result<()> {
        let mut entries = [0u8; 4096];
        let mut at = range.start;
        while at < range.end {
            let pages = ((range.end - at) / PAGE).min(entries.len() / 8);
            let bytes = &mut entries[..pages * 8];
            self.file.read_exact_at(bytes, (at / PAGE * 8) as u64)?;
            for entry in bytes.as_chunks::<8>().0 {
                let entry = u64::from_le_bytes(*entry);
                // The shared page of zeros cannot be told from an own one
                // here; taking it for one costs a copy and harms nothing.
                if entry & (ENTRY_PRESENT | ENTRY_SWAPPED) != 0 && entry & ENTRY_FILE == 0 {
                    push(found, at..at + PAGE);
                }
                at += PAGE;
            }
        }
        Ok(())
    }
}

impl AsRawFd for PageMap {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl From<File> for PageMap {
    fn from(file: File) -> Self {
        Self { file, scans: std::cell::Cell::new(true) }
    }
}

impl From<OwnedFd> for PageMap {
    fn from(descriptor: OwnedFd) -> Self {
        File::from(descriptor).into()
    }
}

/// Appends a range, as one with its predecessor if they touch.
fn push(found: &mut Vec<Range<usize>>, range: Range<usize>) {
    match found.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => found.push(range),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::mmap::MmapRegionBuilder;
    use vm_memory::{FileOffset, MmapRegion, VolatileMemory as _};

    fn private_mapping(pages: usize) -> MmapRegion {
        let file = vmm_sys_util::tempfile::TempFile::new().unwrap().into_file();
        file.set_len((pages * PAGE) as u64).unwrap();
        MmapRegionBuilder::new(pages * PAGE)
            .with_file_offset(FileOffset::new(file, 0))
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_NORESERVE)
            .build()
            .unwrap()
    }

    #[test]
    fn pages_are_the_processes_own_once_written_and_not_by_being_read() {
        for scans in [true, false] {
            let mapping = private_mapping(600);
            let start = mapping.as_ptr() as usize;
            let map = PageMap::open().unwrap();
            map.scans.set(scans);
            let mut expected = Vec::new();
            for page in (0..600).step_by(4) {
                let whole = mapping.get_slice(page * PAGE, 2 * PAGE).unwrap();
                whole.subslice(0, 8).unwrap().write_volatile_once();
                let mut read = [0u8; 8];
                whole.subslice(PAGE, 8).unwrap().copy_to(&mut read[..]);
                expected.push(start + page * PAGE..start + (page + 1) * PAGE);
            }
            assert_eq!(map.private_pages(start..start + 600 * PAGE).unwrap(), expected);
        }
    }

    trait WriteOnce {
        fn write_volatile_once(&self);
    }

    impl WriteOnce for vm_memory::VolatileSlice<'_> {
        fn write_volatile_once(&self) {
            self.copy_from(&[1u8; 8][..]);
        }
    }
}
