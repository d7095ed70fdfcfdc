//! The executable that zygotes are started from: built beside `forge-vmm`
//! (`build.rs`), carried in it, and written to a sealed file in memory when the
//! first zygote is started. So there is nothing to be found on a disk, nobody
//! who could have changed it there, and no other version than this one.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::OnceLock;

use forge_protocol::platform::PAGE_BYTES;

use crate::sealed;

static BYTES: &[u8] = include_bytes!(env!("FORGE_WORKER_ELF"));

/// The file, which anybody may execute: a zygote is nobody to the host.
///
/// # Errors
/// The host has no files in memory to give, or none that can be executed.
pub(super) fn file() -> io::Result<&'static File> {
    static FILE: OnceLock<File> = OnceLock::new();
    if let Some(file) = FILE.get() {
        return Ok(file);
    }
    let made = make().map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => io::Error::new(
            error.kind(),
            "this host forbids executing files in memory (sysctl vm.memfd_noexec is 2); \
             set it to 1 or 0",
        ),
        _ => error,
    })?;
    Ok(FILE.get_or_init(|| made))
}

fn make() -> io::Result<File> {
    let file = sealed::executable(c"forge-worker", BYTES.len())?;
    // Most of it is what lies between segments that start at large pages, and
    // what nobody writes takes no memory.
    for (number, page) in BYTES.chunks(PAGE_BYTES as usize).enumerate() {
        if page.iter().any(|byte| *byte != 0) {
            file.write_all_at(page, number as u64 * PAGE_BYTES)?;
        }
    }
    sealed::seal(&file)?;
    // What is open for writing anywhere cannot be executed.
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_path_of_the_build_machine_is_in_it() {
        let has = |text: &str| BYTES.windows(text.len()).any(|it| it == text.as_bytes());
        let room = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        assert!(!has(room.parent().unwrap().to_str().unwrap()) && !has("/.cargo/"));
    }

    #[test]
    fn it_loads_no_library_where_there_was_an_archive_to_build_it_with() {
        /// Who loads a program's libraries (elf(5)).
        const PT_INTERP: u32 = 3;
        let number = |at: usize| u16::from_le_bytes(BYTES[at..at + 2].try_into().unwrap());
        let headers = u64::from_le_bytes(BYTES[32..40].try_into().unwrap()) as usize;
        let (bytes, count) = (usize::from(number(54)), usize::from(number(56)));
        let kinds: Vec<u32> = (0..count)
            .map(|index| headers + index * bytes)
            .map(|at| u32::from_le_bytes(BYTES[at..at + 4].try_into().unwrap()))
            .collect();
        assert!(!kinds.is_empty());
        let is_static = env!("FORGE_WORKER_STATIC") == "true";
        assert_eq!(kinds.contains(&PT_INTERP), !is_static, "{kinds:?}");
    }
}
