//! Files that live in memory, and that from some moment on nobody can change,
//! whoever holds them.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _};

/// A file in memory, of zeros, that can be sealed.
///
/// # Errors
/// What the kernel said.
pub fn file(name: &CStr, bytes: usize) -> io::Result<File> {
    make(name, bytes, 0)
}

/// One that can be executed, also where files in memory cannot unless that is
/// asked for (`vm.memfd_noexec` = 1).
///
/// # Errors
/// What the kernel said; `PermissionDenied` where none can be (= 2).
pub fn executable(name: &CStr, bytes: usize) -> io::Result<File> {
    match make(name, bytes, libc::MFD_EXEC) {
        // A kernel before 6.3 does not know the word, nor the restriction.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => make(name, bytes, 0),
        made => made,
    }
}

fn make(name: &CStr, bytes: usize, flags: libc::c_uint) -> io::Result<File> {
    let flags = flags | libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor that was just made and is nobody else's.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes as u64)?;
    Ok(file)
}

/// How often it is tried to seal a file that is busy.
const TRIES: u32 = 8;

/// From here on nobody can change the file, whoever holds it.
///
/// # Errors
/// What the kernel said: somebody has it mapped for writing.
pub fn seal(file: &File) -> io::Result<()> {
    let seals = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    let mut tries = 1..TRIES;
    loop {
        // SAFETY: a plain system call on a descriptor of ours.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        // So says the kernel too while anything else holds a page of the file, as reclaim
        // does, for which it waits a little each time (memfd_wait_for_pins).
        if error.kind() != io::ErrorKind::ResourceBusy || tries.next().is_none() {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_sealed_file_cannot_be_written_nor_resized() {
        let mut file = file(c"forge-test", 4).unwrap();
        file.write_all(b"abcd").unwrap();
        seal(&file).unwrap();
        assert!(file.write_all(b"e").is_err());
        assert!(file.set_len(0).is_err());
        assert!(file.set_len(8).is_err());
    }
}
