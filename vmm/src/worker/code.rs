//! The zygote's own code, moved to large pages.
//!
//! A fork does not copy the page tables of mapped files: a worker faults its
//! code in again, 64 KiB at a time and from wherever it happens to lie, and
//! its end takes all of that apart again, page by page. Of memory of its own a
//! fork has what its parent had, at once, and for a large page that is one
//! entry.
//!
//! So the zygote, before it enters its jail and before it has anything to do
//! with anybody, puts the same bytes at the same addresses, in large pages
//! that it shares with its workers. They are readable and executable and
//! never again writable, as the file's mapping was: the zygote's filter
//! allows no `mprotect` to anything but reading. Where the host gives no large
//! pages, or forbids executable memory without a file, all stays as it is.
//!
//! It trusts `/proc/self/maps`. `build.rs` has the linker give code large pages
//! of its own; without that it still is moved, in small pages at its ends.
//! Deliberately absent: constants and data, which are not executable and share
//! no large page with what is; libraries.

use std::io;
use std::ops::Range;

use forge_protocol::platform::LARGE_PAGE_BYTES;

const LARGE_PAGE: usize = LARGE_PAGE_BYTES as usize;
/// More than this is no code that was built to be shipped, and copying it
/// would make a zygote's start longer than it makes its workers' shorter.
const BYTES_MAX: usize = 16 << 20;
/// What is between functions and after the last: `int3`.
const FILLER: u8 = 0xCC;

/// Moves the code that this function is in. To be called while the process has
/// one thread.
pub(super) fn move_to_large_pages() {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else { return };
    let here = move_to_large_pages as fn() as usize;
    if let Some(place) = Place::of(&maps, here)
        && place.code.len() <= BYTES_MAX
    {
        // Whatever the reason for a failure, the code is where it was.
        let _ = place.replace();
    }
}

/// Code as it is mapped from its file.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    code: Range<usize>,
    /// The end of its large pages, if nothing else lies before it; else that of
    /// the code.
    end: usize,
}

impl Place {
    /// That of the mapping of code which this address is in, by the text of
    /// `/proc/PID/maps` (proc_pid_maps(5)).
    fn of(maps: &str, address: usize) -> Option<Self> {
        let mut lines = maps.lines();
        let line = lines.find(|line| range(line).is_some_and(|range| range.contains(&address)))?;
        let code = range(line)?;
        let mut fields = line.split_ascii_whitespace().skip(1);
        let (rights, inode) = (fields.next()?, fields.nth(2)?);
        if rights != "r-xp" || inode == "0" {
            return None;
        }
        let next = lines.next().and_then(range).map_or(usize::MAX, |range| range.start);
        let whole = code.end.next_multiple_of(LARGE_PAGE);
        let end = if whole <= next { whole } else { code.end };
        Some(Self { code, end })
    }
}

/// The addresses of a line of maps.
fn range(line: &str) -> Option<Range<usize>> {
    let (start, end) = line.split_ascii_whitespace().next()?.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    Some(address(start)?..address(end)?)
}

/// A mapping that goes when it is dropped.
struct Mapping(Range<usize>);

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it is this one's own, and nothing refers into it any more.
        unsafe { libc::munmap(pointer(self.0.start), self.0.len()) };
    }
}

fn pointer(address: usize) -> *mut libc::c_void {
    std::ptr::with_exposed_provenance_mut(address)
}

fn checked(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl Place {
    /// Puts a copy in large pages in the code's place.
    fn replace(&self) -> io::Result<()> {
        let Self { code, end } = self;
        // A copy that lies in its large pages as the original will.
        let before = code.start % LARGE_PAGE;
        let bytes = (before + code.len()).next_multiple_of(LARGE_PAGE);
        // SAFETY: a new mapping, wherever there is room.
        let room = unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            libc::mmap(std::ptr::null_mut(), bytes + LARGE_PAGE, rights, flags, -1, 0)
        };
        if room == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let room = Mapping(room.expose_provenance()..room.addr() + bytes + LARGE_PAGE);
        let large = room.0.start.next_multiple_of(LARGE_PAGE);
        let (copy, copy_bytes) = (large + before, end - code.start);
        // SAFETY: the large pages lie in the room, which is ours alone; the
        // code is mapped and readable, and its copy fits behind `before`.
        unsafe {
            checked(libc::madvise(pointer(large), bytes, libc::MADV_HUGEPAGE))?;
            pointer(large).cast::<u8>().write_bytes(FILLER, bytes);
            pointer(copy).cast::<u8>().copy_from_nonoverlapping(
                pointer(code.start).cast::<u8>().cast_const(),
                code.len(),
            );
            // Large pages or none: thousands of small ones would cost each
            // fork more than the file's.
            checked(libc::madvise(pointer(large), bytes, libc::MADV_COLLAPSE))?;
            let rights = libc::PROT_READ | libc::PROT_EXEC;
            checked(libc::mprotect(pointer(copy), copy_bytes, rights))?;
            // One call takes the old away and puts the new there, so that there
            // is no moment without code. What lies between its end and the
            // large page's is nobody's.
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let to = pointer(code.start);
            if libc::mremap(pointer(copy), copy_bytes, copy_bytes, flags, to) == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
00400000-00500000 r--p 00000000 fe:00 7   /usr/bin/forge-vmm
00600000-00a10000 r-xp 00100000 fe:00 7   /usr/bin/forge-vmm
00c00000-00c10000 rw-p 00600000 fe:00 7   /usr/bin/forge-vmm
00d00000-00d10000 r-xp 00000000 00:00 0   [vdso]
";

    #[test]
    fn code_from_a_file_is_found_with_the_large_pages_that_nothing_else_needs() {
        let place = |code, end| Some(Place { code, end });
        assert_eq!(Place::of(MAPS, 0x70_0000), place(0x60_0000..0xa1_0000, 0xc0_0000));
        let close = MAPS.replace("00c00000", "00a20000");
        assert_eq!(Place::of(&close, 0x70_0000), place(0x60_0000..0xa1_0000, 0xa1_0000));
        // Constants, data, code from no file, nothing.
        for address in [0x45_0000, 0xc0_1000, 0xd0_0000, 0xa1_0000, 0] {
            assert_eq!(Place::of(MAPS, address), None, "{address:#x}");
        }
        assert_eq!(Place::of("x-y r-xp\n1000\n\n", 0x1000), None);
    }

    /// In a child, which has one thread: others of this process may be in the
    /// middle of what is replaced, which is as good but not what is claimed.
    #[test]
    fn code_runs_on_at_its_place_in_memory_that_cannot_be_written() {
        // SAFETY: the child makes system calls and reads and writes memory of
        // its own; the allocator's lock is kept whole by fork.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            move_to_large_pages();
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
            let here = code_runs_on_at_its_place_in_memory_that_cannot_be_written as fn() as usize;
            let found =
                maps.lines().find(|line| range(line).is_some_and(|range| range.contains(&here)));
            // A build too large to be moved stays its file's.
            let right = found.is_some_and(|line| line.contains(" r-xp "));
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!right)) }
        }
        let mut status = 0;
        // SAFETY: waits for a child of ours.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    }
}
