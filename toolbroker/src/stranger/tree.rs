//! The tree of files that a tool server sees: built of what it may see, on an
//! empty file system in a mount namespace of its own. What is not in it does
//! not exist for the server, whoever owns it.
//!
//! It distrusts paths: all are resolved before, so that nothing here follows a
//! link, and the host's own tree is only read. Where root starts a server,
//! whatever the operator grants to it is mounted with its owners shown
//! through a map: what belongs to the broker's user belongs to the server in
//! there, and to nobody else. Deliberately absent are copies of files, and
//! changes to the host's.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, mkdirat, openat, statat, symlinkat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
    mount_change, move_mount, open_tree, unmount,
};
use serde::{Deserialize, Serialize};

use super::launch::{Failure, failed};
use super::sys;

/// What a server's tree is made of. All paths are absolute and without links.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tree {
    /// What every server may read, as the host has it.
    pub(super) system: Vec<PathBuf>,
    /// What this one may read besides.
    pub(super) read: Vec<PathBuf>,
    /// What this one may write.
    pub(super) write: Vec<PathBuf>,
    /// Links on the way to any of them, and where they lead.
    pub(super) links: BTreeMap<PathBuf, PathBuf>,
    /// What is empty, whatever contains it: the broker's own files.
    pub(super) hidden: Vec<PathBuf>,
    /// Where its home is.
    pub(super) home: PathBuf,
    /// The folder that is its home; without one it is new and in memory.
    pub(super) home_from: Option<PathBuf>,
}

/// Bytes that a server may keep in its `/tmp`, `/dev/shm` and a home in
/// memory, each.
const SCRATCH_BYTES_MAX: &str = "512m";
/// Devices that are as harmless as a file.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

const SAFE: MountAttrFlags =
    MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NODEV);
const READ_ONLY: MountAttrFlags = SAFE.union(MountAttrFlags::MOUNT_ATTR_RDONLY);

impl Tree {
    /// Makes the tree the process's own, in a mount namespace that nobody
    /// else is in. `owners` is the map for what is granted, to the server's
    /// `uid`.
    pub(super) fn enter(
        &self,
        owners: Option<BorrowedFd<'_>>,
        uid: Option<u32>,
        procfs: bool,
    ) -> Result<(), Failure> {
        // Folders on the way to what is shown are there for the server to
        // pass, whatever the broker's mask for its own files is.
        let own_mask = rustix::process::umask(Mode::from_raw_mode(0o022));
        let built = self.build(owners, uid, procfs);
        rustix::process::umask(own_mask);
        built
    }

    fn build(
        &self,
        owners: Option<BorrowedFd<'_>>,
        uid: Option<u32>,
        procfs: bool,
    ) -> Result<(), Failure> {
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        mount_change("/", private).map_err(failed("making mounts private"))?;
        let root = tmpfs("64m", "0755").map_err(failed("making a root"))?;
        attach(&root, CWD, "/".as_ref()).map_err(failed("mounting a root"))?;
        let root = root.as_fd();
        self.furnish().map_err(failed("preparing the home"))?;
        self.scratch(root, owners, uid).map_err(failed("making scratch folders"))?;
        if procfs {
            folder(root, "proc".as_ref())
                .and_then(|()| attach(&proc()?, root, "proc".as_ref()))
                .map_err(failed("mounting /proc"))?;
        }
        // From the outside in, so that what is mounted later lies on top.
        let mut mounts: Vec<(&PathBuf, MountAttrFlags, Option<BorrowedFd<'_>>)> = Vec::new();
        mounts.extend(self.system.iter().map(|path| (path, READ_ONLY, None)));
        mounts.extend(self.read.iter().map(|path| (path, READ_ONLY, owners)));
        mounts.extend(self.write.iter().map(|path| (path, SAFE, owners)));
        mounts.sort_by_key(|(path, ..)| path.components().count());
        for (path, attributes, owners) in mounts {
            show(root, path, path, attributes, owners)
                .map_err(|source| Failure::at("showing", path, source))?;
        }
        for (link, target) in &self.links {
            let at = inside(link);
            let made = parents(root, at).and_then(|()| Ok(symlinkat(target, root, at)?));
            match made {
                // Below a folder that is shown, it is there already.
                Err(error) if !is(&error, Errno::EXIST) && !is(&error, Errno::ROFS) => {
                    return Err(Failure::at("linking", link, error));
                }
                _ => {}
            }
        }
        for path in &self.hidden {
            hide(root, path).map_err(|source| Failure::at("hiding", path, source))?;
        }
        rustix::process::fchdir(root).map_err(failed("entering the root"))?;
        rustix::process::pivot_root(".", ".").map_err(failed("changing the root"))?;
        unmount(".", UnmountFlags::DETACH).map_err(failed("detaching the host's files"))?;
        rustix::process::chdir("/").map_err(failed("entering the root"))?;
        Ok(())
    }

    /// Makes places in the home for what is shown below it, such as a program
    /// that is installed there. Through the map nobody but the server could.
    fn furnish(&self) -> io::Result<()> {
        let Some(from) = &self.home_from else { return Ok(()) };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let home = openat(CWD, from, flags, Mode::empty())?;
        for path in self.system.iter().chain(&self.read).chain(&self.write) {
            if let Ok(at) = path.strip_prefix(&self.home)
                && !at.as_os_str().is_empty()
            {
                place(home.as_fd(), at, path.is_dir())?;
            }
        }
        for (link, target) in &self.links {
            if let Ok(at) = link.strip_prefix(&self.home)
                && !at.as_os_str().is_empty()
            {
                parents(home.as_fd(), at)?;
                match symlinkat(target, &home, at) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(())
    }

    /// `/tmp`, `/dev` and the home.
    fn scratch(
        &self,
        root: BorrowedFd<'_>,
        owners: Option<BorrowedFd<'_>>,
        uid: Option<u32>,
    ) -> io::Result<()> {
        let scratch = |at: &Path| -> io::Result<()> {
            folder(root, at)?;
            attach(&tmpfs(SCRATCH_BYTES_MAX, "1777")?, root, at)
        };
        scratch("tmp".as_ref())?;
        folder(root, "dev/shm".as_ref())?;
        for device in DEVICES {
            let path = Path::new("/dev").join(device);
            if path.exists() {
                let _ = show(root, &path, &path, MountAttrFlags::MOUNT_ATTR_NOSUID, None)?;
            }
        }
        for (link, target) in [
            ("dev/fd", "/proc/self/fd"),
            ("dev/stdin", "/proc/self/fd/0"),
            ("dev/stdout", "/proc/self/fd/1"),
            ("dev/stderr", "/proc/self/fd/2"),
        ] {
            symlinkat(target, root, link)?;
        }
        scratch("dev/shm".as_ref())?;
        match &self.home_from {
            Some(from) => {
                let mapped = show(root, from, &self.home, SAFE, owners)?;
                if owners.is_some() && !mapped {
                    // What else is in there the server made itself.
                    std::os::unix::fs::chown(from, uid, uid)?;
                }
                Ok(())
            }
            None => scratch(inside(&self.home)),
        }
    }
}

/// A path as seen from the new root. Never empty: nothing is mounted on the
/// root itself.
fn inside(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

/// Shows what the host has at `from` at `at`: `true` if through the map of
/// `owners`.
fn show(
    root: BorrowedFd<'_>,
    from: &Path,
    at: &Path,
    attributes: MountAttrFlags,
    owners: Option<BorrowedFd<'_>>,
) -> io::Result<bool> {
    let copy = || {
        open_tree(
            CWD,
            from,
            OpenTreeFlags::OPEN_TREE_CLONE
                | OpenTreeFlags::OPEN_TREE_CLOEXEC
                | OpenTreeFlags::AT_RECURSIVE
                | OpenTreeFlags::AT_SYMLINK_NOFOLLOW,
        )
    };
    let mut shown = copy()?;
    let attributes: u64 = attributes.bits().into();
    let mapped =
        owners.is_some() && sys::set_mount_attributes(shown.as_fd(), attributes, owners).is_ok();
    if !mapped {
        // Or a file system without such maps: its owners are shown as they
        // are, and modes decide.
        shown = copy()?;
        sys::set_mount_attributes(shown.as_fd(), attributes, None)?;
    }
    let at = inside(at);
    place(root, at, from.is_dir())?;
    attach(&shown, root, at)?;
    Ok(mapped)
}

/// Something to mount on: a folder, or a file.
fn place(root: BorrowedFd<'_>, at: &Path, is_folder: bool) -> io::Result<()> {
    if is_folder {
        return folder(root, at);
    }
    parents(root, at)?;
    match openat(root, at, OFlags::CREATE | OFlags::CLOEXEC, Mode::from_raw_mode(0o444)) {
        Ok(_) | Err(Errno::EXIST) => Ok(()),
        // It is there, below something shown.
        Err(_) if statat(root, at, AtFlags::SYMLINK_NOFOLLOW).is_ok() => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Puts nothing in the place of a file or folder, if it is shown.
fn hide(root: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let at = inside(path);
    let Ok(found) = statat(root, at, AtFlags::SYMLINK_NOFOLLOW) else { return Ok(()) };
    let nothing = if rustix::fs::FileType::from_raw_mode(found.st_mode).is_dir() {
        let empty = tmpfs("4k", "0755")?;
        sys::set_mount_attributes(empty.as_fd(), READ_ONLY.bits().into(), None)?;
        empty
    } else {
        let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        open_tree(CWD, "/dev/null", clone)?
    };
    attach(&nothing, root, at)
}

fn attach(mount: &OwnedFd, to: BorrowedFd<'_>, at: &Path) -> io::Result<()> {
    Ok(move_mount(mount, "", to, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

fn folder(root: BorrowedFd<'_>, at: &Path) -> io::Result<()> {
    let mut path = PathBuf::new();
    for part in at.components() {
        path.push(part);
        match mkdirat(root, &path, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(_) if statat(root, &path, AtFlags::empty()).is_ok() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn parents(root: BorrowedFd<'_>, at: &Path) -> io::Result<()> {
    at.parent().map_or(Ok(()), |parent| folder(root, parent))
}

fn tmpfs(bytes_max: &str, mode: &str) -> io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(context.as_fd(), "size", bytes_max)?;
    fsconfig_set_string(context.as_fd(), "mode", mode)?;
    fsconfig_create(context.as_fd())?;
    Ok(fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, SAFE)?)
}

fn proc() -> io::Result<OwnedFd> {
    let context = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(context.as_fd())?;
    let attributes = SAFE.union(MountAttrFlags::MOUNT_ATTR_NOEXEC);
    Ok(fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// A user namespace in which the broker's user and group have this id: the
/// map that grants are shown through.
pub(super) fn owners(uid: u32) -> io::Result<OwnedFd> {
    let (own_uid, own_gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let (hold, held) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let Some(child) = sys::fork()? else {
        drop((reader, held));
        let entered = sys::unshare(rustix::thread::UnshareFlags::NEWUSER);
        let _ = rustix::io::write(&writer, &[u8::from(entered.is_ok())]);
        // Until the parent has what it needs.
        let _ = rustix::io::read(&hold, &mut [0]);
        std::process::exit(0);
    };
    drop((writer, hold));
    let namespace = (|| {
        let mut entered = [0];
        if rustix::io::read(&reader, &mut entered)? != 1 || entered != [1] {
            return Err(io::Error::from(Errno::PERM));
        }
        let child = child.as_raw_nonzero();
        let map = |file: &str, from: u32| {
            std::fs::write(format!("/proc/{child}/{file}"), format!("{from} {uid} 1"))
        };
        map("uid_map", own_uid.as_raw())?;
        map("gid_map", own_gid.as_raw())?;
        File::open(format!("/proc/{child}/ns/user"))
    })();
    drop(held);
    let _ = rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty());
    Ok(namespace?.into())
}
