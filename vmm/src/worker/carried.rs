//! Which pages of this process's code are in place, carried over its forks.
//!
//! A fork copies page tables only of mappings that a process has pages of its
//! own in. Of code it has none, so each child meets its code as if it had
//! never run: a page fault for every 64 KiB that it reaches, some thirty in a
//! worker. Where one byte of a mapping was written, with what it is, the
//! mapping has a page of the process's own, and a child finds in place what
//! its parent had.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

/// Smaller mappings are not worth a page.
const BYTES_MIN: u64 = 64 * 1024;

/// Writes one byte of each mapping of code and constants, which stay what they
/// are. It takes `/proc`, and is no harm if the kernel will not.
///
/// # Errors
/// What the kernel said.
pub(super) fn carry_code_over_forks() -> io::Result<()> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    // Writes past a mapping's protection, as a debugger does, so that no code
    // is ever writable and executable.
    let memory = File::options().read(true).write(true).open("/proc/self/mem")?;
    for start in maps.lines().filter_map(constant_mapping) {
        let mut byte = [0];
        memory.read_exact_at(&mut byte, start)?;
        memory.write_all_at(&byte, start)?;
    }
    Ok(())
}

/// Where a mapping starts that a line of `/proc/self/maps` tells of, if it is
/// a file's, private and not writable.
fn constant_mapping(line: &str) -> Option<u64> {
    let mut fields = line.split_ascii_whitespace();
    let (range, rights) = (fields.next()?, fields.next()?.as_bytes());
    let inode = fields.nth(2)?;
    let (start, end) = range.split_once('-')?;
    let address = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = (address(start)?, address(end)?);
    let [b'r', b'-', _, b'p'] = rights else { return None };
    (inode != "0" && end - start >= BYTES_MIN).then_some(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_private_constant_mappings_of_files_are_found_and_no_others() {
        let file = "00354000 fe:00 10134045  /usr/bin/forge vmm";
        assert_eq!(
            constant_mapping(&format!("55f052d0b000-55f053223000 r-xp {file}")),
            Some(0x55f0_52d0_b000)
        );
        assert_eq!(constant_mapping(&format!("1000-11000 r--p {file}")), Some(0x1000));
        for line in [
            format!("1000-11000 rw-p {file}"),
            format!("1000-11000 r--s {file}"),
            format!("1000-11000 ---p {file}"),
            format!("1000-10000 r-xp {file}"),
            "7fee5a8bb000-7fee5a9bf000 r--p 00000000 00:00 0    [vvar]".into(),
            "1000-11000 r-xp".into(),
            String::new(),
        ] {
            assert_eq!(constant_mapping(&line), None, "{line}");
        }
    }

    #[test]
    fn code_is_what_it_was_and_a_mapping_has_a_page_of_its_own() {
        let before = carry_code_over_forks as *const () as u64;
        carry_code_over_forks().unwrap();
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        let mut own_kib = None;
        for line in smaps.lines() {
            let range = line.split_ascii_whitespace().next().and_then(|word| word.split_once('-'));
            if let Some((start, end)) = range {
                let address = |text| u64::from_str_radix(text, 16);
                if let (Ok(start), Ok(end)) = (address(start), address(end)) {
                    inside = (start..end).contains(&before);
                }
            }
            if let Some(size) = line.strip_prefix("Anonymous:").filter(|_| inside) {
                own_kib = size.trim().strip_suffix(" kB").and_then(|kib| kib.parse::<u64>().ok());
            }
        }
        assert!(own_kib.is_some_and(|kib| kib > 0), "{own_kib:?}");
    }
}
