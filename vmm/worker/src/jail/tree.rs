//! The empty root: a file system with nothing in it, which cannot be written.
//!
//! It is made detached, mounted over `/`, and becomes the root; the host's
//! tree goes away whole. The only path in all this is `/`, so no path of the
//! host is created or followed, and a link planted anywhere is never met.
//!
//! Called once, by a process in namespaces of its own that still has all
//! capabilities there. Deliberately absent: `/dev`, `/proc`, a place to write.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

/// A step that failed.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot leave the host's file tree: {what}: {source}{}",
    super::namespaces::hint_of_mounts(source)
)]
pub struct TreeError {
    what: &'static str,
    source: io::Error,
}

fn failed(what: &'static str) -> TreeError {
    TreeError { what, source: io::Error::last_os_error() }
}

/// What [`enter`] leaves to the caller.
#[derive(Debug)]
pub struct Tree {
    /// A procfs of the process's own pid namespace, mounted nowhere. Below it
    /// a process can open its `self/pagemap`. If there is none, why: in a
    /// container whose `/proc` is partly hidden the kernel gives none.
    pub procfs: Result<OwnedFd, io::Error>,
}

/// Makes an empty root the root of the calling process.
///
/// # Errors
/// [`TreeError`] with the step.
pub fn enter() -> Result<Tree, TreeError> {
    let null = std::ptr::null::<libc::c_char>();
    // Nothing that happens in here shows outside, nor the other way round.
    // SAFETY: a path, and null where the kernel takes nothing.
    if unsafe {
        libc::mount(null, c"/".as_ptr(), null, libc::MS_REC | libc::MS_PRIVATE, null.cast())
    } != 0
    {
        return Err(failed("making mounts private"));
    }
    forbid_more_namespaces();
    // While the host's own /proc is still to be seen: the kernel gives a new
    // one only to who sees a whole one already.
    let procfs = procfs();
    let empty = detached(
        c"tmpfs",
        // One inode, the root's: nothing can be created, were it writable.
        &[(c"size", c"4096"), (c"nr_inodes", c"1"), (c"mode", c"0555")],
        true,
    )
    .map_err(|source| TreeError { what: "making a tmpfs", source })?;
    // SAFETY: plain system calls with an open descriptor and literal paths.
    unsafe {
        if libc::syscall(
            libc::SYS_move_mount,
            empty.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            c"/".as_ptr(),
            libc::MOVE_MOUNT_F_EMPTY_PATH,
        ) != 0
        {
            return Err(failed("move_mount"));
        }
        if libc::fchdir(empty.as_raw_fd()) != 0 {
            return Err(failed("fchdir"));
        }
        // The old root comes to lie on top of the new one, and is taken off.
        if libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) != 0 {
            return Err(failed("pivot_root"));
        }
        if libc::umount2(c".".as_ptr(), libc::MNT_DETACH) != 0 {
            return Err(failed("detaching the old root"));
        }
        if libc::chdir(c"/".as_ptr()) != 0 {
            return Err(failed("chdir"));
        }
    }
    verify()?;
    Ok(Tree { procfs })
}

/// That `/` is what it ought to be, from the kernel's mouth.
fn verify() -> Result<(), TreeError> {
    // SAFETY: all zero is valid for both, and the kernel fills them in.
    let (mut kind, mut state): (libc::statfs, libc::statvfs) = unsafe { std::mem::zeroed() };
    // SAFETY: a path, and writable memory of the right kind.
    let refused = unsafe {
        libc::statfs(c"/".as_ptr(), &mut kind) != 0 || libc::statvfs(c"/".as_ptr(), &mut state) != 0
    };
    if refused {
        return Err(failed("statfs"));
    }
    let read_only = state.f_flag & libc::ST_RDONLY != 0;
    if kind.f_type != libc::TMPFS_MAGIC || !read_only || state.f_ffree != 0 {
        let source = io::Error::other("the root is not the empty file system just made");
        return Err(TreeError { what: "verifying", source });
    }
    Ok(())
}

/// User namespaces are the one thing a process without capabilities may make,
/// and a full set of capabilities in them is what exploits of the kernel begin
/// with. Every user namespace has its own figure of how many it may hold, and
/// its root may lower it. Where no procfs can be had the filter alone stands.
fn forbid_more_namespaces() {
    let Ok(whole) = mount_detached(c"proc", &[], false, 0) else { return };
    // SAFETY: an open directory and a literal path; the new descriptor is
    // closed, and one byte is readable.
    unsafe {
        let path = c"sys/user/max_user_namespaces";
        let file = libc::openat(whole.as_raw_fd(), path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if file >= 0 {
            libc::write(file, c"0".as_ptr().cast(), 1);
            libc::close(file);
        }
    }
}

fn procfs() -> io::Result<OwnedFd> {
    // Processes and nothing else of the kernel, where it can be asked for
    // (Linux 5.8).
    detached(c"proc", &[(c"subset", c"pid")], false).or_else(|_| detached(c"proc", &[], false))
}

/// A new file system, mounted nowhere, to be read only.
fn detached(kind: &CStr, options: &[(&CStr, &CStr)], read_only: bool) -> io::Result<OwnedFd> {
    mount_detached(kind, options, read_only, libc::MOUNT_ATTR_RDONLY)
}

fn mount_detached(
    kind: &CStr,
    options: &[(&CStr, &CStr)],
    read_only: bool,
    attributes: u64,
) -> io::Result<OwnedFd> {
    let descriptor = |number: libc::c_long| {
        if number < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made it for us.
        Ok(unsafe { OwnedFd::from_raw_fd(number as i32) })
    };
    // SAFETY: literal strings, numbers and null throughout.
    unsafe {
        let context =
            descriptor(libc::syscall(libc::SYS_fsopen, kind.as_ptr(), libc::FSOPEN_CLOEXEC))?;
        let configure = |command: libc::c_uint, key: *const libc::c_char, value: *const _| {
            let value: *const libc::c_char = value;
            let done =
                libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), command, key, value, 0);
            if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
        };
        let null = std::ptr::null();
        for (key, value) in options {
            configure(libc::FSCONFIG_SET_STRING as _, key.as_ptr(), value.as_ptr())?;
        }
        if read_only {
            configure(libc::FSCONFIG_SET_FLAG as _, c"ro".as_ptr(), null)?;
        }
        configure(libc::FSCONFIG_CMD_CREATE as _, null, null)?;
        let attributes =
            libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC | attributes;
        descriptor(libc::syscall(
            libc::SYS_fsmount,
            context.as_raw_fd(),
            libc::FSMOUNT_CLOEXEC,
            attributes,
        ))
    }
}
