//! The zygote's own text, its code and constants, moved to large pages.
//!
//! A fork does not copy the page tables of mapped files: a worker faults its
//! text in again, 64 KiB at a time and from wherever it happens to lie, and
//! its end takes all of that apart again, page by page. Of memory of its own a
//! fork has what its parent had, at once, and for a large page that is one
//! entry.
//!
//! So the zygote, before it enters its jail and before it has anything to do
//! with anybody, puts the same bytes at the same addresses, in large pages
//! that it shares with its workers. Code is readable and executable, constants
//! are readable, and neither is ever again writable, as the file's mappings
//! were: the zygote's filter allows no `mprotect` to anything but reading.
//! Where the host gives no large pages, or forbids executable memory without a
//! file, all stays as it is.
//!
//! It trusts `/proc/self/maps`. `vmm/build.rs` has the linker give segments
//! large pages of their own, and links no library; without that text still is
//! moved, in small pages at its ends, or stays. Deliberately absent: data.

use std::io;
use std::ops::Range;

use forge_protocol::platform::LARGE_PAGE_BYTES;

const LARGE_PAGE: usize = LARGE_PAGE_BYTES as usize;
/// More than this is no code that was built to be shipped, and copying it
/// would make a zygote's start longer than it makes its workers' shorter.
const BYTES_MAX: usize = 16 << 20;
/// What is behind code, and harmless behind constants: `int3`.
const FILLER: u8 = 0xCC;
/// Lies among the constants.
static CONSTANT: [u8; 4] = *b"here";

/// Moves the code that this function is in, and the constants that go with it.
/// To be called while the process has one thread.
pub(super) fn move_to_large_pages() {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else { return };
    let code = Place::of(&maps, move_to_large_pages as fn() as usize, Kind::Code);
    let constants = Place::of(&maps, (&raw const CONSTANT).addr(), Kind::Constants);
    for place in [code, constants].into_iter().flatten() {
        if place.text.len() <= BYTES_MAX {
            // Whatever the reason for a failure, the text is where it was.
            let _ = place.replace();
        }
    }
}

/// What text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Code,
    Constants,
}

impl Kind {
    /// As `/proc/PID/maps` has its rights.
    const fn rights(self) -> &'static str {
        match self {
            Self::Code => "r-xp",
            Self::Constants => "r--p",
        }
    }

    const fn protection(self) -> libc::c_int {
        match self {
            Self::Code => libc::PROT_READ | libc::PROT_EXEC,
            Self::Constants => libc::PROT_READ,
        }
    }
}

/// Text as it is mapped from its file.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    kind: Kind,
    text: Range<usize>,
    /// The end of its large pages, if nothing else lies before it; else that of
    /// the text.
    end: usize,
}

impl Place {
    /// That of the mapping of this kind which this address is in, by what
    /// `/proc/PID/maps` says (proc_pid_maps(5)).
    fn of(maps: &str, address: usize, kind: Kind) -> Option<Self> {
        let mut lines = maps.lines();
        let line = lines.find(|line| range(line).is_some_and(|range| range.contains(&address)))?;
        let text = range(line)?;
        let mut fields = line.split_ascii_whitespace().skip(1);
        let (rights, inode) = (fields.next()?, fields.nth(2)?);
        if rights != kind.rights() || inode == "0" {
            return None;
        }
        let next = lines.next().and_then(range).map_or(usize::MAX, |range| range.start);
        let whole = text.end.next_multiple_of(LARGE_PAGE);
        let end = if whole <= next { whole } else { text.end };
        Some(Self { kind, text, end })
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
    /// Puts a copy in large pages in the text's place.
    fn replace(&self) -> io::Result<()> {
        let Self { kind, text, end } = self;
        // A copy that lies in its large pages as the original will.
        let before = text.start % LARGE_PAGE;
        let bytes = (before + text.len()).next_multiple_of(LARGE_PAGE);
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
        let (copy, copy_bytes) = (large + before, end - text.start);
        // SAFETY: the large pages lie in the room, which is ours alone; the
        // text is mapped and readable, and its copy fits behind `before`.
        unsafe {
            checked(libc::madvise(pointer(large), bytes, libc::MADV_HUGEPAGE))?;
            pointer(large).cast::<u8>().write_bytes(FILLER, bytes);
            pointer(copy).cast::<u8>().copy_from_nonoverlapping(
                pointer(text.start).cast::<u8>().cast_const(),
                text.len(),
            );
            // Large pages or none: thousands of small ones would cost each
            // fork more than the file's.
            checked(libc::madvise(pointer(large), bytes, libc::MADV_COLLAPSE))?;
            checked(libc::mprotect(pointer(copy), copy_bytes, kind.protection()))?;
            // One call takes the old away and puts the new there, so that there
            // is no moment without text. What lies between its end and the
            // large page's is nobody's.
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let to = pointer(text.start);
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
    fn text_from_a_file_is_found_with_the_large_pages_that_nothing_else_needs() {
        let place = |kind, text, end| Some(Place { kind, text, end });
        let code = |maps: &str, address| Place::of(maps, address, Kind::Code);
        let constants = |maps: &str, address| Place::of(maps, address, Kind::Constants);
        assert_eq!(code(MAPS, 0x70_0000), place(Kind::Code, 0x60_0000..0xa1_0000, 0xc0_0000));
        let close = MAPS.replace("00c00000", "00a20000");
        assert_eq!(code(&close, 0x70_0000), place(Kind::Code, 0x60_0000..0xa1_0000, 0xa1_0000));
        let expected = place(Kind::Constants, 0x40_0000..0x50_0000, 0x60_0000);
        assert_eq!(constants(MAPS, 0x45_0000), expected);
        // Constants, data, code from no file, nothing.
        for address in [0x45_0000, 0xc0_1000, 0xd0_0000, 0xa1_0000, 0] {
            assert_eq!(code(MAPS, address), None, "{address:#x}");
        }
        // Code, data.
        for address in [0x70_0000, 0xc0_1000] {
            assert_eq!(constants(MAPS, address), None, "{address:#x}");
        }
        assert_eq!(code("x-y r-xp\n1000\n\n", 0x1000), None);
    }

    /// In a child, which has one thread: others of this process may be in the
    /// middle of what is replaced, which is as good but not what is claimed.
    #[test]
    fn text_stays_what_it_was_in_memory_that_cannot_be_written() {
        // SAFETY: the child makes system calls and reads and writes memory of
        // its own; the allocator's lock is kept whole by fork.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            move_to_large_pages();
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
            let rights_at = |address| {
                let line =
                    maps.lines().find(|line| range(line).is_some_and(|it| it.contains(&address)));
                line.and_then(|line| line.split_ascii_whitespace().nth(1)).unwrap_or_default()
            };
            let here = text_stays_what_it_was_in_memory_that_cannot_be_written as fn() as usize;
            // A build too large to be moved stays its file's.
            let right = rights_at(here) == Kind::Code.rights()
                && rights_at((&raw const CONSTANT).addr()) == Kind::Constants.rights()
                && std::hint::black_box(&CONSTANT) == b"here";
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!right)) }
        }
        let mut status = 0;
        // SAFETY: waits for a child of ours.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    }
}
