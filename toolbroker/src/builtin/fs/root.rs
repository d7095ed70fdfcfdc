//! One root: a folder that is opened once, and never left.
//!
//! Every path is resolved by `openat2` (Linux 5.6) from the folder's
//! descriptor, with
//!
//! | flag | refuses |
//! |---|---|
//! | `RESOLVE_BENEATH` | leaving the root, by `..` or an absolute link |
//! | `RESOLVE_NO_SYMLINKS` | any symbolic link on the way or at its end |
//! | `RESOLVE_NO_MAGICLINKS` | the links of procfs |
//! | `RESOLVE_NO_XDEV` | another file system mounted below, procfs among them |
//!
//! so that whoever changes the tree meanwhile wins no race. A file is first
//! opened as a place (`O_PATH`), so that a device or a FIFO is seen before
//! opening it does anything. A file with a second name is not read: that name
//! may be outside. It is no danger to what is written: a write replaces the
//! name and never touches what stood under it.

use std::ffi::CStr;
use std::fs::File;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat, fchmod, fstat, fstatfs,
    fsync, openat2, renameat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;

use super::super::Failure;

/// How every path is resolved.
const RESOLVE: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);
/// How often a path is resolved again when the tree changed under it.
const TRIES_MAX: usize = 8;
/// A path below a root, in bytes.
const PATH_BYTES_MAX: usize = 4096;
/// One name, in bytes, as Linux has it.
const NAME_BYTES_MAX: usize = 255;
/// Entries of a folder that are looked at.
const SCANNED_MAX: usize = if cfg!(test) { 2_000 } else { 20_000 };
/// Entries of a folder that are told.
const LISTED_MAX: usize = 1_000;
/// How the name begins of a file that is not whole yet.
const UNFINISHED: &str = ".forge-unfinished-";
/// The permissions of a new file, before the umask.
const NEW_FILE: Mode = Mode::from_raw_mode(0o644);
/// Those of one that is to get another's, until it has them.
const NOBODYS_FILE: Mode = Mode::from_raw_mode(0o600);
/// File systems whose files are doors into the kernel and other processes
/// (`linux/magic.h`).
const KERNEL_FILE_SYSTEMS: [u64; 17] = [
    0x9FA0,      // procfs
    0x6265_6572, // sysfs
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x0027_E0EB, // cgroup
    0x6367_7270, // cgroup2
    0xCAFE_4A11, // bpf
    0x7363_6673, // securityfs
    0xF97C_FF8C, // selinuxfs
    0x4341_5D53, // smackfs
    0x6265_6570, // configfs
    0xDE5E_81E4, // efivarfs
    0x6165_676C, // pstore
    0x6573_5543, // fusectl
    0x4249_4E4D, // binfmt_misc
    0x1CD1,      // devpts
    0x6C6F_6F70, // binderfs
];

/// A folder that programs may look into.
#[derive(Debug)]
pub struct Root {
    name: String,
    folder: OwnedFd,
    is_writable: bool,
    patterns: GlobSet,
    told_patterns: Vec<String>,
    file_bytes_max: usize,
}

/// Why a folder cannot be a root.
#[derive(Debug, thiserror::Error)]
pub enum RootError {
    /// It cannot be opened.
    #[error("cannot be opened as a folder: {0}")]
    Open(#[source] io::Error),
    /// It is a door into the kernel.
    #[error("is on a file system of the kernel's own: give a folder of files")]
    Kernel,
    /// A pattern is none.
    #[error("pattern {0} is none: write it as in `**/*.md`")]
    Pattern(usize),
}

/// A path below a root that is one by its form: names between slashes, none
/// of them empty, `.` or `..`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Path(String);

/// An entry of a folder: its name, and its size if it is a file.
pub(super) type Entry = (String, Option<u64>);

/// What happens to a file that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Existing {
    Stays,
    IsReplaced,
}

impl Path {
    /// Reads what stands behind the root's name; empty for the root itself. A
    /// folder's may end in a slash.
    pub(super) fn parse(text: &str) -> Result<Self, Failure> {
        let wrong = |why: &str| Err(Failure::bad_request(format!("the path {why}")));
        let text = text.strip_suffix('/').unwrap_or(text);
        if text.len() > PATH_BYTES_MAX {
            return wrong("is too long");
        }
        if text.chars().any(char::is_control) {
            return wrong("has a control character in it");
        }
        for name in text.split('/').filter(|_| !text.is_empty()) {
            if matches!(name, "" | "." | "..") {
                return wrong("has an empty name, `.` or `..` in it");
            }
            if name.len() > NAME_BYTES_MAX {
                return wrong("has a name in it that is too long");
            }
            if name.starts_with(UNFINISHED) {
                return wrong("has a name in it that is the broker's own");
            }
        }
        Ok(Self(text.to_owned()))
    }

    /// For system calls: the folder itself has no name.
    fn as_str(&self) -> &str {
        if self.0.is_empty() { "." } else { &self.0 }
    }

    /// The folder it lies in, and its name there. `None` for the root.
    fn split(&self) -> Option<(Self, &str)> {
        match self.0.rsplit_once('/') {
            Some((folder, name)) => Some((Self(folder.to_owned()), name)),
            None if self.0.is_empty() => None,
            None => Some((Self(String::new()), &self.0)),
        }
    }
}

impl Root {
    /// Opens a folder. Links on the way to it are the operator's choice, and
    /// followed once, here.
    ///
    /// # Errors
    /// [`RootError`].
    pub fn open(
        name: String,
        folder: &std::path::Path,
        is_writable: bool,
        patterns: Vec<String>,
        file_bytes_max: usize,
    ) -> Result<Self, RootError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(folder, flags, Mode::empty())
            .map_err(|error| RootError::Open(error.into()))?;
        let file_system =
            fstatfs(&folder).map_err(|error| RootError::Open(error.into()))?.f_type as u64;
        if KERNEL_FILE_SYSTEMS.contains(&file_system) {
            return Err(RootError::Kernel);
        }
        let mut set = GlobSetBuilder::new();
        for (position, pattern) in patterns.iter().enumerate() {
            let glob = GlobBuilder::new(pattern)
                .literal_separator(true)
                .build()
                .map_err(|_| RootError::Pattern(position))?;
            set.add(glob);
        }
        let set = set.build().map_err(|_| RootError::Pattern(0))?;
        let told_patterns = patterns;
        Ok(Self { name, folder, is_writable, patterns: set, told_patterns, file_bytes_max })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// What a program needs to know of it; its place on the host it does not.
    pub(super) fn told(&self) -> String {
        let writable = if self.is_writable { ", writable" } else { "" };
        format!("{} ({}{writable})", self.name, self.told_patterns.join(", "))
    }

    /// The whole of a file.
    pub(super) fn read(&self, path: &Path) -> Result<Vec<u8>, Failure> {
        self.check_pattern(path)?;
        let place = self.resolve(path, OFlags::PATH)?;
        let seen = self.check_file(&place)?;
        let file = self.resolve(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
        let opened = self.check_file(&file)?;
        if (seen.st_dev, seen.st_ino) != (opened.st_dev, opened.st_ino) {
            return Err(Failure::new("failed", "the file was replaced while it was opened"));
        }
        let limit = self.file_bytes_max as u64;
        let mut content = Vec::with_capacity(opened.st_size.clamp(0, limit as i64) as usize);
        File::from(file)
            .take(limit + 1)
            .read_to_end(&mut content)
            .map_err(|error| failed(&error))?;
        if content.len() as u64 > limit {
            return Err(self.too_large());
        }
        Ok(content)
    }

    /// What lies in a folder, by name, and whether there is more: files with
    /// their sizes, folders without. What is neither, and what no pattern
    /// lets a program read, is not told.
    pub(super) fn list(&self, path: &Path) -> Result<(Vec<Entry>, bool), Failure> {
        let folder = self.resolve(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let entries = Dir::read_from(&folder).map_err(|error| failed(&error.into()))?;
        let mut listed = Vec::new();
        let mut truncated = false;
        for (scanned, entry) in entries.enumerate() {
            if scanned >= SCANNED_MAX {
                truncated = true;
                break;
            }
            let entry = entry.map_err(|error| failed(&error.into()))?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            // `.` and `..` are no paths either.
            let below =
                if path.0.is_empty() { name.to_owned() } else { format!("{}/{name}", path.0) };
            let Ok(below) = Path::parse(&below) else { continue };
            let Some(bytes) = self.told_entry(folder.as_fd(), entry.file_name(), &below) else {
                continue;
            };
            listed.push((name.to_owned(), bytes));
        }
        listed.sort();
        truncated |= listed.len() > LISTED_MAX;
        listed.truncate(LISTED_MAX);
        Ok((listed, truncated))
    }

    /// The size of a file that may be told, nothing for a folder.
    fn told_entry(&self, folder: BorrowedFd<'_>, name: &CStr, path: &Path) -> Option<Option<u64>> {
        let stat = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => Some(None),
            FileType::RegularFile if self.patterns.is_match(&path.0) => {
                Some(Some(stat.st_size.try_into().unwrap_or(0)))
            }
            _ => None,
        }
    }

    /// Writes a whole file: beside its place first, and put there once it is
    /// whole and on the disk. Whoever reads meanwhile sees the old one or the
    /// new one.
    pub(super) fn write(
        &self,
        path: &Path,
        content: &[u8],
        existing: Existing,
    ) -> Result<(), Failure> {
        if !self.is_writable {
            return Err(Failure::new("not_allowed", "this root is for reading only"));
        }
        self.check_pattern(path)?;
        if content.len() > self.file_bytes_max {
            return Err(self.too_large());
        }
        let (folder, name) =
            path.split().ok_or_else(|| Failure::bad_request("the root itself is no file"))?;
        let folder = self.resolve(&folder, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mut permissions = None;
        match self.resolve(path, OFlags::PATH) {
            Ok(old) => {
                let old = fstat(&old).map_err(|error| failed(&error.into()))?;
                if FileType::from_raw_mode(old.st_mode) != FileType::RegularFile {
                    return Err(no_file());
                }
                if existing == Existing::Stays {
                    return Err(is_there());
                }
                permissions = Some(Mode::from_raw_mode(old.st_mode & 0o777));
            }
            Err(failure) if failure.code == "not_found" => {}
            Err(failure) => return Err(failure),
        }
        let (unfinished, file) =
            new_file(folder.as_fd(), permissions.map_or(NEW_FILE, |_| NOBODYS_FILE))?;
        let written = (|| {
            let mut file = File::from(file);
            // Before there is anything in it to read.
            if let Some(permissions) = permissions {
                fchmod(&file, permissions)?;
            }
            file.write_all(content)?;
            file.sync_all()?;
            match existing {
                Existing::IsReplaced => renameat(&folder, &unfinished, &folder, name)?,
                Existing::Stays => {
                    let only_new = RenameFlags::NOREPLACE;
                    renameat_with(&folder, &unfinished, &folder, name, only_new)?;
                }
            }
            Ok::<_, io::Error>(())
        })();
        if let Err(error) = written {
            let _ = unlinkat(&folder, &unfinished, AtFlags::empty());
            return Err(match error.kind() {
                io::ErrorKind::AlreadyExists => is_there(),
                _ => failed(&error),
            });
        }
        // The name, too, is on the disk before the program hears of it.
        fsync(&folder).map_err(|error| {
            tracing::warn!(%error, "a folder of the tool fs cannot be synced");
            let message = "the file is written, but may be gone if this host fails now";
            Failure::new("failed", message)
        })
    }

    fn check_pattern(&self, path: &Path) -> Result<(), Failure> {
        if self.patterns.is_match(&path.0) {
            return Ok(());
        }
        Err(Failure::new("not_allowed", "no pattern of this root fits the path"))
    }

    /// That a descriptor leads to a file that may be read.
    fn check_file(&self, file: &OwnedFd) -> Result<Stat, Failure> {
        let stat = fstat(file).map_err(|error| failed(&error.into()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(no_file());
        }
        if stat.st_nlink > 1 {
            let message = "the file has a second name, which may be outside of the root";
            return Err(Failure::new("not_allowed", message));
        }
        if stat.st_size > self.file_bytes_max as i64 {
            return Err(self.too_large());
        }
        Ok(stat)
    }

    fn resolve(&self, path: &Path, flags: OFlags) -> Result<OwnedFd, Failure> {
        // Not O_NOFOLLOW: with O_PATH that would open a link itself, where
        // RESOLVE_NO_SYMLINKS alone refuses it.
        let flags = flags | OFlags::CLOEXEC;
        let mut tries = 0;
        loop {
            match openat2(&self.folder, path.as_str(), flags, Mode::empty(), RESOLVE) {
                Ok(opened) => return Ok(opened),
                // Something was renamed on the way: the kernel cannot tell.
                Err(Errno::AGAIN | Errno::INTR) if tries < TRIES_MAX => tries += 1,
                Err(Errno::LOOP | Errno::XDEV) => {
                    let message = "the path leads over a link or out of its root";
                    return Err(Failure::new("not_allowed", message));
                }
                Err(error) => return Err(failed(&error.into())),
            }
        }
    }

    fn too_large(&self) -> Failure {
        let limit = self.file_bytes_max;
        Failure::new("too_large", format!("a file of this root has at most {limit} bytes"))
    }
}

/// A new file with a name that nobody can guess, in a folder of a root.
fn new_file(folder: BorrowedFd<'_>, permissions: Mode) -> Result<(String, OwnedFd), Failure> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let mut tries = 0;
    loop {
        // Randomly keyed anew each time.
        let name = format!("{UNFINISHED}{:016x}", RandomState::new().build_hasher().finish());
        match openat2(folder, &name, flags, permissions, RESOLVE) {
            Ok(file) => return Ok((name, file)),
            Err(Errno::EXIST | Errno::AGAIN | Errno::INTR) if tries < TRIES_MAX => tries += 1,
            Err(error) => return Err(failed(&error.into())),
        }
    }
}

fn no_file() -> Failure {
    Failure::new("not_a_file", "there is no regular file")
}

fn is_there() -> Failure {
    Failure::new("exists", "there is something of this name")
}

fn failed(error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::NotFound => Failure::new("not_found", "there is no such file or folder"),
        io::ErrorKind::NotADirectory => Failure::new("not_found", "there is no such folder"),
        io::ErrorKind::PermissionDenied => {
            Failure::new("not_permitted", "the broker's user may not do that")
        }
        kind => Failure::new("failed", kind.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Barrier, mpsc};
    use std::time::Duration;

    /// A root `in` beside a folder `out`, in a folder of the test's own.
    struct Desk {
        folder: tempfile::TempDir,
        root: Root,
    }

    impl Desk {
        fn new(patterns: &[&str]) -> Self {
            let folder = tempfile::tempdir().unwrap();
            for name in ["in", "in/a", "out"] {
                std::fs::create_dir(folder.path().join(name)).unwrap();
            }
            std::fs::write(folder.path().join("out/secret"), "outside").unwrap();
            let patterns = patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
            let place = folder.path().join("in");
            let root = Root::open("in".into(), &place, true, patterns, 100).unwrap();
            Self { folder, root }
        }

        fn at(&self, path: &str) -> PathBuf {
            self.folder.path().join(path)
        }

        fn read(&self, path: &str) -> Result<Vec<u8>, &'static str> {
            Path::parse(path).and_then(|path| self.root.read(&path)).map_err(|why| why.code)
        }

        fn write(&self, path: &str, existing: Existing) -> Result<(), &'static str> {
            Path::parse(path)
                .and_then(|path| self.root.write(&path, b"new", existing))
                .map_err(|why| why.code)
        }

        fn list(&self, path: &str) -> Result<Vec<String>, &'static str> {
            let listed = Path::parse(path).and_then(|path| self.root.list(&path));
            let (listed, truncated) = listed.map_err(|why| why.code)?;
            assert!(!truncated);
            Ok(listed.into_iter().map(|(name, _)| name).collect())
        }

        /// Nothing outside has changed, and nothing unfinished lies about.
        fn audit(&self) {
            assert_eq!(std::fs::read(self.at("out/secret")).unwrap(), b"outside");
            assert_eq!(std::fs::read_dir(self.at("out")).unwrap().count(), 1);
            for folder in ["in", "in/a"] {
                for entry in std::fs::read_dir(self.at(folder)).unwrap() {
                    let name = entry.unwrap().file_name().into_string().unwrap();
                    assert!(!name.starts_with(UNFINISHED), "{name}");
                }
            }
        }
    }

    #[test]
    fn a_file_is_read_written_and_listed_below_its_root() {
        let desk = Desk::new(&["**"]);
        assert_eq!(desk.write("a/x", Existing::Stays), Ok(()));
        assert_eq!(desk.read("a/x").unwrap(), b"new");
        assert_eq!(desk.write("a/x", Existing::Stays), Err("exists"));
        std::fs::write(desk.at("in/a/x"), "old").unwrap();
        assert_eq!(desk.write("a/x", Existing::IsReplaced), Ok(()));
        assert_eq!(desk.read("a/x").unwrap(), b"new");
        assert_eq!(desk.list(""), Ok(vec!["a".to_owned()]));
        assert_eq!(desk.list("a/"), Ok(vec!["x".to_owned()]));
        assert_eq!(desk.read("a/none"), Err("not_found"));
        assert_eq!(desk.write("none/x", Existing::Stays), Err("not_found"));
        assert_eq!(desk.write("a", Existing::IsReplaced), Err("not_a_file"));
        assert_eq!(desk.write("", Existing::IsReplaced), Err("bad_request"));
        desk.audit();
    }

    #[test]
    fn dots_empty_names_absolute_paths_and_control_characters_are_no_paths() {
        for path in [
            "..",
            "../out/secret",
            "a/../../out/secret",
            "a/./x",
            "/etc/passwd",
            "a//x",
            "a\0b",
            "a\nb",
            "\u{85}",
            &"x/".repeat(4096),
            &"x".repeat(256),
        ] {
            assert!(Path::parse(path).is_err(), "{path:?}");
        }
        for path in [&"x".repeat(255), &format!("{}xx", "x/".repeat(2047)), &"x/".repeat(2048)] {
            assert!(Path::parse(path).is_ok(), "{} bytes", path.len());
        }
    }

    #[test]
    fn each_flag_of_the_resolution_refuses_by_itself_what_it_is_there_for() {
        let desk = Desk::new(&["**"]);
        symlink("a", desk.at("in/link")).unwrap();
        let folder = |path: &std::path::Path| {
            rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap()
        };
        for (flag, below, path, refusal) in [
            (ResolveFlags::BENEATH, desk.at("in"), "../out/secret", Errno::XDEV),
            (ResolveFlags::NO_SYMLINKS, desk.at("in"), "link", Errno::LOOP),
            (ResolveFlags::NO_MAGICLINKS, "/proc/self".into(), "cwd", Errno::LOOP),
            (ResolveFlags::NO_XDEV, "/".into(), "proc/version", Errno::XDEV),
        ] {
            let below = folder(&below);
            let resolve = |by| openat2(&below, path, OFlags::PATH, Mode::empty(), by).map(drop);
            assert_eq!(resolve(ResolveFlags::empty()), Ok(()), "{flag:?}");
            assert_eq!(resolve(RESOLVE & flag), Err(refusal), "{flag:?}");
        }
    }

    #[test]
    fn a_path_that_was_taken_for_one_by_its_form_still_leads_out_of_no_root() {
        let desk = Desk::new(&["**"]);
        for path in ["../out/secret", "a/../../out/secret", "/etc/passwd"] {
            let path = Path(path.to_owned());
            assert_eq!(desk.root.read(&path).unwrap_err().code, "not_allowed");
            let write = desk.root.write(&path, b"new", Existing::IsReplaced);
            assert_eq!(write.unwrap_err().code, "not_allowed");
        }
        assert_eq!(desk.root.list(&Path("..".into())).unwrap_err().code, "not_allowed");
        desk.audit();
    }

    /// What this gives, unless it is held up.
    fn unhindered<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || tell.send(act()));
        told.recv_timeout(Duration::from_secs(10)).expect("somebody holds it up")
    }

    fn fifo(path: &std::path::Path) {
        rustix::fs::mkfifoat(rustix::fs::CWD, path, Mode::from_raw_mode(0o600)).unwrap();
    }

    #[test]
    fn whatever_takes_a_files_place_while_it_is_read_is_not_told_and_holds_nobody_up() {
        let make: [fn(&Desk); 3] = [
            |desk| fifo(&desk.at("other")),
            |desk| symlink(desk.at("out/secret"), desk.at("other")).unwrap(),
            |desk| std::fs::hard_link(desk.at("out/secret"), desk.at("other")).unwrap(),
        ];
        for make in make {
            let desk = Desk::new(&["**"]);
            std::fs::write(desk.at("in/x"), "x").unwrap();
            make(&desk);
            let is_over = Arc::new(AtomicBool::new(false));
            let (this, other) = (desk.at("in/x"), desk.at("other"));
            let ends = Arc::clone(&is_over);
            let swaps = std::thread::spawn(move || {
                let here = rustix::fs::CWD;
                while !ends.load(Ordering::Acquire) {
                    renameat_with(here, &this, here, &other, RenameFlags::EXCHANGE).unwrap();
                }
            });
            let desk = unhindered(move || {
                for _ in 0..2000 {
                    let read = desk.read("x");
                    assert!(!matches!(&read, Ok(content) if content != b"x"), "{read:?}");
                }
                desk
            });
            is_over.store(true, Ordering::Release);
            swaps.join().unwrap();
            desk.audit();
        }
    }

    #[test]
    fn a_file_that_grows_while_it_is_read_is_as_it_was_or_too_large() {
        const ROUNDS: usize = 2000;
        let desk = Desk::new(&["**"]);
        let file = File::create(desk.at("in/x")).unwrap();
        let meet = Barrier::new(2);
        let reads: Vec<_> = std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    meet.wait();
                    // Each time at another moment of the read.
                    (0..round).for_each(|_| std::hint::spin_loop());
                    file.set_len(1000).unwrap();
                    meet.wait();
                }
            });
            let round = |_| {
                file.set_len(50).unwrap();
                meet.wait();
                let read = desk.read("x").map(|content| content.len());
                meet.wait();
                read
            };
            (0..ROUNDS).map(round).collect()
        });
        for read in reads {
            assert!(matches!(read, Ok(50) | Err("too_large")), "{read:?}");
        }
    }

    #[test]
    fn of_several_who_write_a_new_file_at_once_one_does() {
        let desk = Desk::new(&["**"]);
        for round in 0..5 {
            let (path, starts) = (format!("a/{round}"), Barrier::new(4));
            let write = || {
                starts.wait();
                desk.write(&path, Existing::Stays)
            };
            let ends: Vec<_> = std::thread::scope(|scope| {
                let all: Vec<_> = (0..4).map(|_| scope.spawn(write)).collect();
                all.into_iter().map(|one| one.join().unwrap()).collect()
            });
            assert_eq!(ends.iter().filter(|end| end.is_ok()).count(), 1, "{ends:?}");
            assert!(ends.iter().all(|end| matches!(end, Ok(()) | Err("exists"))), "{ends:?}");
        }
        desk.audit();
    }

    #[test]
    fn a_symbolic_link_is_followed_nowhere_not_even_inside() {
        let desk = Desk::new(&["**"]);
        std::fs::write(desk.at("in/a/x"), "x").unwrap();
        symlink(desk.at("out/secret"), desk.at("in/absolute")).unwrap();
        symlink("../out/secret", desk.at("in/relative")).unwrap();
        symlink("../out", desk.at("in/folder")).unwrap();
        symlink("a/x", desk.at("in/inside")).unwrap();
        symlink("/proc/self/root", desk.at("in/magic")).unwrap();
        for path in ["absolute", "relative", "folder/secret", "inside", "magic/etc/passwd"] {
            assert_eq!(desk.read(path), Err("not_allowed"), "{path}");
            assert_eq!(desk.write(path, Existing::IsReplaced), Err("not_allowed"), "{path}");
        }
        assert_eq!(desk.list("folder"), Err("not_allowed"));
        assert_eq!(desk.write("folder/new", Existing::Stays), Err("not_allowed"));
        assert_eq!(desk.list(""), Ok(vec!["a".to_owned()]), "links are not told");
        desk.audit();
    }

    #[test]
    fn a_hard_link_to_a_file_outside_is_not_read_and_what_it_names_not_written() {
        let desk = Desk::new(&["**"]);
        std::fs::hard_link(desk.at("out/secret"), desk.at("in/link")).unwrap();
        assert_eq!(desk.read("link"), Err("not_allowed"));
        assert_eq!(desk.write("link", Existing::IsReplaced), Ok(()));
        assert_eq!(desk.read("link").unwrap(), b"new");
        desk.audit();
    }

    #[test]
    fn a_fifo_a_socket_and_a_folder_are_no_files_and_hold_nobody_up() {
        let desk = Desk::new(&["**"]);
        fifo(&desk.at("in/fifo"));
        let _socket = std::os::unix::net::UnixListener::bind(desk.at("in/socket")).unwrap();
        for path in ["fifo", "socket", "a"] {
            assert_eq!(desk.read(path), Err("not_a_file"), "{path}");
            assert_eq!(desk.write(path, Existing::IsReplaced), Err("not_a_file"), "{path}");
        }
        assert_eq!(desk.list(""), Ok(vec!["a".to_owned()]));
        assert_eq!(unhindered(move || desk.list("fifo")), Err("not_found"));
    }

    #[test]
    fn another_file_system_below_a_root_is_not_entered() {
        let root = Root::open("all".into(), "/".as_ref(), false, vec!["**".into()], 100).unwrap();
        for path in ["proc/self/environ", "proc/self/root/etc/passwd", "proc/version"] {
            let refused = root.read(&Path::parse(path).unwrap()).unwrap_err();
            assert_eq!(refused.code, "not_allowed", "{path}");
        }
    }

    #[test]
    fn a_file_system_of_the_kernel_is_no_root() {
        // What of them is mounted here (proc_pid_mountinfo(5)).
        let kernels = [
            "proc",
            "sysfs",
            "debugfs",
            "tracefs",
            "cgroup",
            "cgroup2",
            "bpf",
            "securityfs",
            "selinuxfs",
            "configfs",
            "efivarfs",
            "pstore",
            "fusectl",
            "binfmt_misc",
            "devpts",
        ];
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mounted = mounts.lines().filter_map(|line| {
            let (mount, of) = line.split_once(" - ")?;
            kernels.contains(&of.split(' ').next()?).then_some(mount.split(' ').nth(4)?)
        });
        let is_root =
            |folder: &str| Root::open("k".into(), folder.as_ref(), false, vec!["**".into()], 100);
        for folder in ["/proc", "/proc/self/fd", "/sys"] {
            assert!(matches!(is_root(folder), Err(RootError::Kernel)), "{folder}");
        }
        for folder in mounted {
            // Some are single files, and others may lie over some.
            let is_its_own = rustix::fs::statfs(folder)
                .is_ok_and(|it| KERNEL_FILE_SYSTEMS.contains(&(it.f_type as u64)));
            if is_its_own && std::fs::metadata(folder).is_ok_and(|it| it.is_dir()) {
                assert!(matches!(is_root(folder), Err(RootError::Kernel)), "{folder}");
            }
        }
    }

    #[test]
    fn only_what_a_pattern_fits_is_read_written_and_told() {
        let desk = Desk::new(&["**/*.md", "top-*"]);
        std::fs::create_dir(desk.at("in/top-folder")).unwrap();
        for path in
            ["in/a/x.md", "in/a/x.txt", "in/y.md", "in/top-1", "in/a/top-2", "in/top-folder/x"]
        {
            std::fs::write(desk.at(path), "x").unwrap();
        }
        for (path, allowed) in [
            ("a/x.md", true),
            ("a/x.txt", false),
            ("y.md", true),
            ("top-1", true),
            ("a/top-2", false),
            ("a/x.MD", false),
            ("top-folder/x", false),
        ] {
            assert_eq!(desk.read(path) == Err("not_allowed"), !allowed, "{path}");
        }
        assert_eq!(desk.write("a/z.txt", Existing::Stays), Err("not_allowed"));
        assert_eq!(
            desk.list(""),
            Ok(vec!["a".into(), "top-1".into(), "top-folder".into(), "y.md".into()])
        );
        assert_eq!(desk.list("a"), Ok(vec!["x.md".to_owned()]));
    }

    #[test]
    fn size_and_number_are_bounded() {
        let desk = Desk::new(&["**"]);
        std::fs::write(desk.at("in/fits"), "x".repeat(100)).unwrap();
        std::fs::write(desk.at("in/over"), "x".repeat(101)).unwrap();
        assert_eq!(desk.read("fits").unwrap().len(), 100);
        assert_eq!(desk.read("over"), Err("too_large"));
        let path = Path::parse("new").unwrap();
        let refused = desk.root.write(&path, &[b'x'; 101], Existing::Stays).unwrap_err();
        assert_eq!(refused.code, "too_large");
        desk.root.write(&path, &[b'x'; 100], Existing::Stays).unwrap();
        let listed = || {
            let (listed, truncated) = desk.root.list(&Path::parse("a").unwrap()).unwrap();
            (listed.len(), truncated)
        };
        for number in 0..LISTED_MAX {
            File::create(desk.at(&format!("in/a/{number:04}"))).unwrap();
        }
        assert_eq!(listed(), (LISTED_MAX, false));
        File::create(desk.at("in/a/more")).unwrap();
        assert_eq!(listed(), (LISTED_MAX, true));
    }

    #[test]
    fn a_folder_of_very_many_is_looked_at_in_part_and_said_to_be() {
        let desk = Desk::new(&["**/*.md"]);
        for number in 0..=SCANNED_MAX {
            // What is not told counts as well.
            rustix::fs::symlinkat("x", rustix::fs::CWD, desk.at(&format!("in/a/{number}")))
                .unwrap();
        }
        let (listed, truncated) = desk.root.list(&Path::parse("a").unwrap()).unwrap();
        assert_eq!((listed.len(), truncated), (0, true));
    }

    #[test]
    fn what_replaces_a_file_keeps_its_permissions_and_no_more() {
        let desk = Desk::new(&["**"]);
        let file = desk.at("in/x");
        std::fs::write(&file, "x").unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o4640)).unwrap();
        desk.write("x", Existing::IsReplaced).unwrap();
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o640);
    }

    #[test]
    fn what_replaces_a_file_is_never_open_to_more_than_the_file_was() {
        let desk = Desk::new(&["**"]);
        let file = desk.at("in/x");
        std::fs::write(&file, "x").unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut seen = 0;
                while !is_over.load(Ordering::Acquire) {
                    for entry in std::fs::read_dir(desk.at("in")).unwrap().flatten() {
                        // It may be gone by now.
                        let Ok(stat) = entry.path().symlink_metadata() else { continue };
                        if stat.is_file() {
                            seen |= stat.permissions().mode();
                        }
                    }
                }
                seen
            });
            for _ in 0..200 {
                desk.write("x", Existing::IsReplaced).unwrap();
            }
            is_over.store(true, Ordering::Release);
            assert_eq!(watch.join().unwrap() & 0o777, 0o600);
        });
    }

    #[test]
    fn an_unfinished_file_is_neither_told_nor_read() {
        let desk = Desk::new(&["**"]);
        std::fs::write(desk.at(&format!("in/{UNFINISHED}1")), "x").unwrap();
        assert_eq!(desk.list(""), Ok(vec!["a".to_owned()]));
        assert_eq!(desk.read(&format!("{UNFINISHED}1")), Err("bad_request"));
    }

    #[test]
    fn a_root_stays_the_folder_that_was_opened_whatever_takes_its_name() {
        let desk = Desk::new(&["**"]);
        std::fs::write(desk.at("in/x"), "x").unwrap();
        std::fs::rename(desk.at("in"), desk.at("moved")).unwrap();
        symlink(desk.at("out"), desk.at("in")).unwrap();
        assert_eq!(desk.read("x").unwrap(), b"x");
        assert_eq!(desk.read("secret"), Err("not_found"));
    }

    #[test]
    fn a_root_for_reading_is_not_written_to() {
        let desk = Desk::new(&["**"]);
        let root = Root::open("in".into(), &desk.at("in"), false, vec!["**".into()], 100).unwrap();
        let path = Path::parse("x").unwrap();
        assert_eq!(root.write(&path, b"x", Existing::Stays).unwrap_err().code, "not_allowed");
        desk.audit();
    }
}
