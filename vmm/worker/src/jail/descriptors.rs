//! What a process holds open, as the host's procfs has it.
//!
//! For tests and for `forge-vmm` itself to say what a worker holds. Somebody
//! else's process that may not be dumped is readable by root alone.

use std::io;
use std::os::fd::RawFd;

/// One open descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// The descriptor's number.
    pub number: RawFd,
    /// What it is, in the kernel's words: `socket:[123]`, `anon_inode:kvm-vm`,
    /// a path.
    pub what: String,
    /// Whether it closes at exec.
    pub close_on_exec: bool,
}

/// The open descriptors of a process, by number.
///
/// # Errors
/// If there is no such process, or it may not be looked at.
pub fn of(pid: libc::pid_t) -> io::Result<Vec<Descriptor>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(number) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        // One may be gone by now, such as the one this directory is read by.
        let Ok(what) = std::fs::read_link(entry.path()) else { continue };
        let info = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}"));
        let Ok(info) = info else { continue };
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
        found.push(Descriptor {
            number,
            what: what.to_string_lossy().into_owned(),
            close_on_exec: flags.is_some_and(|flags| flags & libc::O_CLOEXEC != 0),
        });
    }
    found.sort_by_key(|descriptor| descriptor.number);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd as _;

    #[test]
    fn an_open_socket_is_listed_as_one() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let all = of(std::process::id() as i32).unwrap();
        let it = all.iter().find(|it| it.number == one.as_raw_fd()).unwrap();
        assert!(it.what.starts_with("socket:["), "{it:?}");
        assert!(it.close_on_exec);
    }
}
