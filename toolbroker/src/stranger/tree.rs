//! The tree of files that a tool server sees: built of what it may see, on an
//! empty file system in a mount namespace of its own. What is not in it does
//! not exist for the server, whoever owns it.
//!
//! It distrusts paths: all are resolved before, and walked here without
//! following a link, whoever put it there and wherever it stands on the way; and
//! what is found is held against what the broker saw ([`super::reach`]). A
//! server writes to its home, which it keeps, and may still run while it, or
//! another, is started. The host's own tree is only read. Where root starts a server,
//! whatever the operator grants to it is mounted with its owners shown
//! through a map: what belongs to the broker's user belongs to the server in
//! there, and to nobody else. Deliberately absent are copies of files, but for the
//! two that say who the server's user is, and changes to the host's.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Gid, Mode, OFlags, ResolveFlags, Uid, chownat, mkdirat, openat, openat2,
    symlinkat, unlinkat,
};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
    mount_change, move_mount, open_tree, unmount,
};
use serde::{Deserialize, Serialize};

use super::launch::{Failure, failed};
use super::reach::{Identity, Seen};
use super::{account, sys};

/// What a server's tree is made of. All paths are absolute and without links.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tree {
    /// What every server may read, as the host has it.
    pub(super) system: Vec<Seen>,
    /// What this one may read besides.
    pub(super) read: Vec<Seen>,
    /// What this one may write.
    pub(super) write: Vec<Seen>,
    /// Links on the way to any of them, and where they lead.
    pub(super) links: BTreeMap<PathBuf, PathBuf>,
    /// What is empty, whatever contains it: the broker's own files.
    pub(super) hidden: Vec<Seen>,
    /// Where its home is.
    pub(super) home: PathBuf,
    /// The folder that is its home; without one it is new and in memory.
    pub(super) home_from: Option<Seen>,
}

/// Bytes that a server may keep in its `/tmp`, `/dev/shm` and a home in
/// memory, each.
const SCRATCH_BYTES_MAX: &str = "512m";
/// Devices that are as harmless as a file.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

const SAFE: MountAttrFlags =
    MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NODEV);
const READ_ONLY: MountAttrFlags = SAFE.union(MountAttrFlags::MOUNT_ATTR_RDONLY);

/// How every name is resolved: to what it is itself.
const RESOLVE: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);
/// Where a text is until it is mounted: in the root, in which no server may write.
const REPLACEMENT: &str = ".text";
/// How often one name is looked up again, while somebody changes what it is.
const TRIES_MAX: usize = 8;

/// What becomes of a link where a folder or a file is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    IsRefused,
    /// In the home, where all links are the server's.
    IsReplaced,
}

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
        open(Path::new("/"))
            .and_then(|host| attach(&root, &host))
            .map_err(failed("mounting a root"))?;
        let root = root.as_fd();
        self.furnish()?;
        self.scratch(root, owners, uid).map_err(failed("making scratch folders"))?;
        if procfs {
            folder(root, "proc".as_ref(), Link::IsRefused)
                .and_then(|at| attach(&proc()?, &at))
                .map_err(failed("mounting /proc"))?;
        }
        // From the outside in, so that what is mounted later lies on top.
        let mut mounts: Vec<(&Seen, MountAttrFlags, Option<BorrowedFd<'_>>)> = Vec::new();
        mounts.extend(self.system.iter().map(|seen| (seen, READ_ONLY, None)));
        mounts.extend(self.read.iter().map(|seen| (seen, READ_ONLY, owners)));
        mounts.extend(self.write.iter().map(|seen| (seen, SAFE, owners)));
        mounts.sort_by_key(|(seen, ..)| seen.path.components().count());
        for (seen, attributes, owners) in mounts {
            self.is_no_alias(seen)
                .and_then(|()| show(root, seen, &seen.path, attributes, owners))
                .map_err(|source| Failure::at("showing", &seen.path, source))?;
        }
        for (link, target) in &self.links {
            match make_link(root, inside(link), target, Link::IsRefused) {
                // Below a folder that is shown, it is there already.
                Err(error) if !is(&error, Errno::ROFS) => {
                    return Err(Failure::at("linking", link, error));
                }
                _ => {}
            }
        }
        if let Some(uid) = uid {
            for (file, text) in account::files(uid, &self.home) {
                replace(root, file, &text)
                    .map_err(|source| Failure::at("naming its user in", file, source))?;
            }
        }
        for seen in &self.hidden {
            hide(root, seen, self.should_show(&seen.path))
                .map_err(|source| Failure::at("hiding", &seen.path, source))?;
        }
        rustix::process::fchdir(root).map_err(failed("entering the root"))?;
        rustix::process::pivot_root(".", ".").map_err(failed("changing the root"))?;
        unmount(".", UnmountFlags::DETACH).map_err(failed("detaching the host's files"))?;
        rustix::process::chdir("/").map_err(failed("entering the root"))?;
        Ok(())
    }

    /// All of the host's that it shows, but the home.
    fn shown(&self) -> impl Iterator<Item = &Seen> {
        self.system.iter().chain(&self.read).chain(&self.write)
    }

    /// Nothing that is hidden, or lies below that, is shown under another name, where
    /// hiding it by its own does not reach.
    fn is_no_alias(&self, seen: &Seen) -> io::Result<()> {
        let lineage = seen.lineage()?;
        let is_alias = |hidden: &&Seen| {
            lineage.contains(&hidden.identity) && !seen.path.starts_with(&hidden.path)
        };
        match self.hidden.iter().find(is_alias) {
            Some(hidden) => Err(io::Error::other(format!(
                "this is the broker's own {} by another name: give the server another folder",
                hidden.path.display()
            ))),
            None => Ok(()),
        }
    }

    /// Whether a path of the host's lies in what it shows.
    fn should_show(&self, path: &Path) -> bool {
        self.shown().any(|shown| path.starts_with(&shown.path))
    }

    /// Makes places in the home for what is shown below it, such as a program
    /// that is installed there. Through the map nobody but the server could.
    fn furnish(&self) -> Result<(), Failure> {
        let Some(from) = &self.home_from else { return Ok(()) };
        let home =
            from.open().map_err(|source| Failure::at("opening the home", &from.path, source))?;
        let in_home = |path: &Path| {
            let at = path.strip_prefix(&self.home).ok()?;
            (!at.as_os_str().is_empty()).then(|| at.to_owned())
        };
        for Seen { path, identity } in self.shown() {
            if let Some(at) = in_home(path) {
                place(home.as_fd(), &at, identity.is_folder, Link::IsReplaced).map_err(
                    |source| Failure::at("making a place in the home for", path, source),
                )?;
            }
        }
        for (link, target) in &self.links {
            if let Some(at) = in_home(link) {
                make_link(home.as_fd(), &at, target, Link::IsReplaced)
                    .map_err(|source| Failure::at("linking in the home", link, source))?;
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
            let at = folder(root, at, Link::IsRefused)?;
            attach(&tmpfs(SCRATCH_BYTES_MAX, "1777")?, &at)
        };
        scratch("tmp".as_ref())?;
        folder(root, "dev/shm".as_ref(), Link::IsRefused)?;
        for device in DEVICES {
            let path = Path::new("/dev").join(device);
            if let Ok(device) = Seen::at(&path) {
                let _ = show(root, &device, &path, MountAttrFlags::MOUNT_ATTR_NOSUID, None)?;
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
                    let (uid, gid) = (uid.map(Uid::from_raw), uid.map(Gid::from_raw));
                    chownat(from.open()?, "", uid, gid, AtFlags::EMPTY_PATH)?;
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

/// Shows what the broker saw of the host at `at`, and nothing that has taken its
/// place: `true` if through the map of `owners`.
fn show(
    root: BorrowedFd<'_>,
    from: &Seen,
    at: &Path,
    attributes: MountAttrFlags,
    owners: Option<BorrowedFd<'_>>,
) -> io::Result<bool> {
    let found = from.open()?;
    let copy = || {
        open_tree(
            &found,
            "",
            OpenTreeFlags::OPEN_TREE_CLONE
                | OpenTreeFlags::OPEN_TREE_CLOEXEC
                | OpenTreeFlags::AT_RECURSIVE
                | OpenTreeFlags::AT_EMPTY_PATH,
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
    let at = place(root, inside(at), from.identity.is_folder, Link::IsRefused)?;
    attach(&shown, &at)?;
    Ok(mapped)
}

/// Something to mount on: a folder, or a file. Made if it is not there, and so
/// is every folder on the way to it.
fn place(root: BorrowedFd<'_>, at: &Path, is_folder: bool, link: Link) -> io::Result<OwnedFd> {
    let mut reached = root.try_clone_to_owned()?;
    let mut names = at.iter().peekable();
    while let Some(name) = names.next() {
        let is_folder = is_folder || names.peek().is_some();
        reached = step(reached.as_fd(), Path::new(name), is_folder, link)?;
    }
    Ok(reached)
}

/// One name in a folder.
fn step(folder: BorrowedFd<'_>, name: &Path, is_folder: bool, link: Link) -> io::Result<OwnedFd> {
    let kind = if is_folder { OFlags::DIRECTORY } else { OFlags::empty() };
    let mut tries = 0;
    loop {
        match openat2(folder, name, OFlags::PATH | OFlags::CLOEXEC | kind, Mode::empty(), RESOLVE) {
            Ok(found) => return Ok(found),
            Err(error @ (Errno::NOENT | Errno::LOOP)) if tries == TRIES_MAX => {
                return Err(error.into());
            }
            Err(Errno::NOENT) => make(folder, name, is_folder)?,
            Err(Errno::LOOP) if link == Link::IsReplaced => {
                unlinkat(folder, name, AtFlags::empty())?;
            }
            Err(Errno::LOOP) => {
                let name = name.display();
                return Err(io::Error::other(format!("{name:?} is a link, and none is followed")));
            }
            Err(error) => return Err(error.into()),
        }
        tries += 1;
    }
}

/// A folder or an empty file, where nothing is.
fn make(folder: BorrowedFd<'_>, name: &Path, is_folder: bool) -> io::Result<()> {
    let made = if is_folder {
        mkdirat(folder, name, Mode::from_raw_mode(0o755))
    } else {
        let new = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        openat2(folder, name, new, Mode::from_raw_mode(0o444), RESOLVE).map(drop)
    };
    match made {
        // Somebody was faster: what it is is seen when it is opened.
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Puts a text in the place of a file, if it is shown.
fn replace(root: BorrowedFd<'_>, file: &Path, text: &[u8]) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let Ok(found) = openat2(root, file, flags, Mode::empty(), RESOLVE) else { return Ok(()) };
    let made = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    let made = openat2(root, REPLACEMENT, made, Mode::from_raw_mode(0o444), RESOLVE)?;
    File::from(made).write_all(text)?;
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let shown = open_tree(root, REPLACEMENT, clone | OpenTreeFlags::AT_SYMLINK_NOFOLLOW)?;
    sys::set_mount_attributes(shown.as_fd(), READ_ONLY.bits().into(), None)?;
    attach(&shown, &found)?;
    // What is mounted stays.
    Ok(unlinkat(root, REPLACEMENT, AtFlags::empty())?)
}

/// Puts nothing in the place of a file or folder, if it is shown: under its own
/// name, since what a link leads to is another. One that is not found where it
/// `should_show` has been moved, and shows elsewhere.
fn hide(root: BorrowedFd<'_>, seen: &Seen, should_show: bool) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let found = match openat2(root, inside(&seen.path), flags, Mode::empty(), RESOLVE) {
        Ok(found) => found,
        // Whoever is kept from it here is so as the server.
        Err(Errno::ACCESS) => return Ok(()),
        Err(error) if should_show => return Err(error.into()),
        Err(_) => return Ok(()),
    };
    if should_show {
        seen.expect(&found)?;
    }
    let nothing = if Identity::of(&found)?.is_folder {
        let empty = tmpfs("4k", "0755")?;
        sys::set_mount_attributes(empty.as_fd(), READ_ONLY.bits().into(), None)?;
        empty
    } else {
        let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        open_tree(CWD, "/dev/null", clone)?
    };
    attach(&nothing, &found)
}

/// A folder of the host's that is no server's to change.
fn open(folder: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(CWD, folder, flags, Mode::empty())?)
}

fn attach(mount: &OwnedFd, at: &OwnedFd) -> io::Result<()> {
    let by_descriptor =
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(mount, "", at, "", by_descriptor)?)
}

fn folder(root: BorrowedFd<'_>, at: &Path, link: Link) -> io::Result<OwnedFd> {
    place(root, at, true, link)
}

/// A link, where nothing is yet.
fn make_link(root: BorrowedFd<'_>, at: &Path, target: &Path, link: Link) -> io::Result<()> {
    let (Some(parent), Some(name)) = (at.parent(), at.file_name()) else { return Ok(()) };
    let parent = folder(root, parent, link)?;
    match symlinkat(target, &parent, name) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// The operator's home with a program in it, a server's home in its place,
    /// and a folder that is neither's.
    fn desk(folder: &Path) -> Tree {
        let folder = folder.canonicalize().unwrap();
        let (home, kept, out) = (folder.join("home"), folder.join("kept"), folder.join("out"));
        for made in [&home.join("npm/bin"), &kept, &out] {
            std::fs::create_dir_all(made).unwrap();
        }
        std::fs::write(home.join("npm/bin/srv"), "").unwrap();
        Tree {
            read: vec![Seen::at(&home.join("npm/bin/srv")).unwrap()],
            links: BTreeMap::from([(home.join("a/link"), "npm".into())]),
            home,
            home_from: Some(Seen::at(&kept).unwrap()),
            ..Tree::default()
        }
    }

    #[test]
    fn a_link_that_a_server_left_in_its_home_is_replaced_and_nothing_made_where_it_leads() {
        for planted in ["npm", "npm/bin", "npm/bin/srv", "a"] {
            for target in ["out", "out/dangling"] {
                let folder = tempfile::tempdir().unwrap();
                let tree = desk(folder.path());
                let kept = folder.path().join("kept");
                std::fs::create_dir_all(kept.join(planted).parent().unwrap()).unwrap();
                symlink(folder.path().join(target), kept.join(planted)).unwrap();
                tree.furnish().unwrap();
                let out = std::fs::read_dir(folder.path().join("out")).unwrap().count();
                assert_eq!(out, 0, "{planted} -> {target}");
                assert!(kept.join("npm/bin/srv").symlink_metadata().unwrap().is_file());
                assert_eq!(kept.join("a/link").read_link().unwrap(), Path::new("npm"));
                // What is there stays.
                tree.furnish().unwrap();
            }
        }
    }

    #[test]
    fn a_link_elsewhere_is_no_place_and_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let tree = desk(folder.path());
        let kept = folder.path().join("kept");
        symlink(folder.path().join("out"), kept.join("npm")).unwrap();
        let root = open(&kept).unwrap();
        for (at, is_folder) in [("npm/bin/srv", false), ("npm/bin", true), ("npm", true)] {
            let refused = place(root.as_fd(), at.as_ref(), is_folder, Link::IsRefused).unwrap_err();
            assert!(refused.to_string().contains("\"npm\" is a link"), "{refused}");
        }
        assert!(make_link(root.as_fd(), "npm/x".as_ref(), &tree.home, Link::IsRefused).is_err());
        assert!(place(root.as_fd(), "../out/x".as_ref(), true, Link::IsReplaced).is_err());
        assert_eq!(std::fs::read_dir(folder.path().join("out")).unwrap().count(), 0);
    }

    /// On a thread with mounts of its own.
    fn with_own_mounts(work: impl FnOnce() + Send) -> bool {
        std::thread::scope(|scope| {
            let alone = scope.spawn(|| {
                if sys::unshare(rustix::thread::UnshareFlags::NEWNS).is_err() {
                    return false;
                }
                let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
                mount_change("/", private).unwrap();
                work();
                true
            });
            alone.join().unwrap()
        })
    }

    #[test]
    fn a_folder_that_becomes_a_link_before_it_is_shown_shows_nothing_of_where_that_leads() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        for made in ["app/d/keys", "other/keys", "root"] {
            std::fs::create_dir_all(at.join(made)).unwrap();
        }
        std::fs::write(at.join("app/d/keys/own"), "").unwrap();
        std::fs::write(at.join("other/keys/secret"), "").unwrap();
        let seen = Seen::at(&at.join("app/d/keys")).unwrap();
        let ran = with_own_mounts(|| {
            attach(&tmpfs("1m", "0755").unwrap(), &open(&at.join("root")).unwrap()).unwrap();
            let root = open(&at.join("root")).unwrap();
            let shown =
                |name: &str| show(root.as_fd(), &seen, &Path::new("/").join(name), SAFE, None);
            shown("before").unwrap();
            assert!(at.join("root/before/own").exists());
            std::fs::rename(at.join("app/d"), at.join("app/was")).unwrap();
            symlink(at.join("other"), at.join("app/d")).unwrap();
            let refused = shown("link").unwrap_err();
            assert!(refused.to_string().contains("a link stands"), "{refused}");
            std::fs::remove_file(at.join("app/d")).unwrap();
            std::fs::rename(at.join("other"), at.join("app/d")).unwrap();
            let refused = shown("another").unwrap_err();
            assert!(refused.to_string().contains("it is not what it was"), "{refused}");
            assert!(!at.join("root/link").exists() && !at.join("root/another").exists());
        });
        if !ran {
            eprintln!("SKIPPED: this user may not mount");
        }
    }

    #[test]
    fn what_is_hidden_is_neither_shown_by_another_name_nor_passed_over_once_it_moved() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        for made in ["app/state/keys", "alias", "root"] {
            std::fs::create_dir_all(at.join(made)).unwrap();
        }
        let app = Seen::at(&at.join("app")).unwrap();
        let state = Seen::at(&at.join("app/state")).unwrap();
        let ran = with_own_mounts(|| {
            attach(&tmpfs("1m", "0755").unwrap(), &open(&at.join("root")).unwrap()).unwrap();
            let root = open(&at.join("root")).unwrap();
            rustix::mount::mount_bind(at.join("app/state"), at.join("alias")).unwrap();
            let tree = Tree { hidden: vec![state.clone()], ..Tree::default() };
            let alias = |path: &str| tree.is_no_alias(&Seen::at(&at.join(path)).unwrap());
            assert!(alias("alias").is_err() && alias("alias/keys").is_err());
            // These it hides itself.
            assert!(alias("app").is_ok() && alias("app/state/keys").is_ok());
            show(root.as_fd(), &app, &app.path, SAFE, None).unwrap();
            std::fs::rename(at.join("app/state"), at.join("app/moved")).unwrap();
            assert!(hide(root.as_fd(), &state, true).is_err());
            std::fs::create_dir(at.join("app/state")).unwrap();
            assert!(hide(root.as_fd(), &state, true).is_err());
            let moved = Seen { path: at.join("app/moved"), ..state };
            hide(root.as_fd(), &moved, true).unwrap();
            let inside = at.join("root").join(inside(&moved.path));
            assert_eq!(std::fs::read_dir(inside).unwrap().count(), 0);
        });
        if !ran {
            eprintln!("SKIPPED: this user may not mount");
        }
    }
}
