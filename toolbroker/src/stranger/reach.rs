//! Files and folders of the host's, by what they are and not by their names
//! alone.
//!
//! A path is resolved once, and used again after that: in the launcher, at the
//! next start. Between the two, a server that may write to a folder on the way
//! can put a link in its place. So whoever opens a path here follows no link at
//! all, and holds what is found against what was there before. Deliberately
//! absent is resolving links, which is [`super::view`]'s.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, FileType, Mode, OFlags, Stat, fstat, openat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// How one name is looked at: as what it is itself.
const ITSELF: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Folders that one may lie below.
const LEVELS_MAX: usize = 4096;

/// Which file or folder it is, whatever it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    device: u64,
    inode: u64,
    pub(super) is_folder: bool,
    pub(super) is_file: bool,
}

impl Identity {
    pub(super) fn of(opened: impl AsFd) -> io::Result<Self> {
        let stat: Stat = fstat(opened)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        Ok(Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            is_folder: kind.is_dir(),
            is_file: kind.is_file(),
        })
    }
}

/// A path without links, and what it named when it was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Seen {
    pub(super) path: PathBuf,
    pub(super) identity: Identity,
}

impl Seen {
    /// What a path names now.
    ///
    /// # Errors
    /// If it names nothing, or a link is on the way.
    pub(super) fn at(path: &Path) -> io::Result<Self> {
        let identity = Identity::of(reach(path)?)?;
        Ok(Self { path: path.to_owned(), identity })
    }

    /// The same file or folder.
    ///
    /// # Errors
    /// If the path names another by now.
    pub(super) fn open(&self) -> io::Result<OwnedFd> {
        let found = reach(&self.path)?;
        self.expect(&found)?;
        Ok(found)
    }

    /// The same file, to be read. Of a pipe there is nothing to read, and nobody waits
    /// for some.
    ///
    /// # Errors
    /// If it may not be read, or the path names another by now.
    pub(super) fn open_to_read(&self) -> io::Result<File> {
        let found = open_to_read(&self.path)?;
        self.expect(&found)?;
        Ok(found)
    }

    /// Whether this is it.
    ///
    /// # Errors
    /// If it is not.
    pub(super) fn expect(&self, found: impl AsFd) -> io::Result<()> {
        if Identity::of(found)? == self.identity {
            return Ok(());
        }
        Err(io::Error::other(
            "it is not what it was a moment ago: something replaces it while the server starts; \
             try again",
        ))
    }

    /// It and the folders above it, from the inside out.
    pub(super) fn lineage(&self) -> io::Result<Vec<Identity>> {
        let mut lineage = vec![self.identity];
        let Some(folder) = self.path.parent() else { return Ok(lineage) };
        let mut folder = reach(folder)?;
        for _ in 0..LEVELS_MAX {
            let identity = Identity::of(&folder)?;
            if lineage.last() == Some(&identity) {
                return Ok(lineage);
            }
            lineage.push(identity);
            folder = openat(&folder, "..", ITSELF | OFlags::DIRECTORY, Mode::empty())?;
        }
        Err(io::Error::other("it lies below too many folders"))
    }
}

/// Something of the broker's that no server may see, and which is known wherever it
/// is moved: a server that may write above it can rename the folder that it is in.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    path: PathBuf,
    kept: Arc<OwnedFd>,
}

impl PartialEq for Kept {
    fn eq(&self, other: &Self) -> bool {
        self.path == other.path
    }
}

impl Eq for Kept {}

impl Kept {
    /// Where there is something.
    pub(super) fn at(path: PathBuf) -> Option<Self> {
        let kept = Arc::new(reach(&path).ok()?);
        Some(Self { path, kept })
    }

    /// What is to be hidden of it now: what has its name, and itself if it has another.
    pub(super) fn now(&self) -> impl Iterator<Item = Seen> {
        let by_name = Seen::at(&self.path).ok();
        let descriptor = format!("/proc/self/fd/{}", self.kept.as_raw_fd());
        // Of one that was deleted this leads to nothing, or to another file.
        let moved = Identity::of(&self.kept).ok().zip(std::fs::read_link(descriptor).ok());
        let moved = moved
            .and_then(|(identity, path)| Seen::at(&path).ok().filter(|it| it.identity == identity))
            .filter(|moved| by_name.as_ref() != Some(moved));
        by_name.into_iter().chain(moved)
    }
}

/// What a path names, without following any link: name by name, since `openat2`, which
/// does it at once, is not there for a service whose manager watches over set-user-ID bits
/// (`RestrictSUIDSGID` of systemd).
///
/// # Errors
/// If it names nothing, or a link is on the way.
pub(super) fn reach(path: &Path) -> io::Result<OwnedFd> {
    let mut found = openat(CWD, "/", ITSELF | OFlags::DIRECTORY, Mode::empty())?;
    for name in path.components() {
        found = match name {
            Component::RootDir => continue,
            Component::Normal(name) => step(&found, name).map_err(told)?,
            _ => return Err(io::Error::other("it is not written without `.` and `..`")),
        };
    }
    Ok(found)
}

/// What a folder has under this name.
fn step(folder: &OwnedFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    // First as a folder: that mounts what is mounted once somebody goes there.
    match openat(folder, name, ITSELF | OFlags::DIRECTORY, Mode::empty()) {
        Err(Errno::NOTDIR | Errno::LOOP) => {}
        outcome => return outcome,
    }
    let found = openat(folder, name, ITSELF, Mode::empty())?;
    match FileType::from_raw_mode(fstat(&found)?.st_mode).is_symlink() {
        true => Err(Errno::LOOP),
        false => Ok(found),
    }
}

/// A file to be read, without following any link, nor waiting for anybody.
///
/// # Errors
/// If there is none that may be read.
pub(super) fn open_to_read(path: &Path) -> io::Result<File> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::IsADirectory.into());
    };
    let flags =
        OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(reach(folder)?, name, flags, Mode::empty()).map_err(told)?.into())
}

fn told(error: Errno) -> io::Error {
    match error {
        Errno::LOOP => io::Error::other(
            "a link stands where there was none: something replaces it while the server starts; \
             try again",
        ),
        error => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_took_the_place_of_what_was_seen_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        for made in ["app/d/keys", "secret/keys"] {
            std::fs::create_dir_all(at.join(made)).unwrap();
        }
        let seen = Seen::at(&at.join("app/d/keys")).unwrap();
        seen.open().unwrap();
        std::fs::rename(at.join("app/d"), at.join("app/was")).unwrap();
        assert_eq!(seen.open().unwrap_err().kind(), io::ErrorKind::NotFound);
        symlink(at.join("secret"), at.join("app/d")).unwrap();
        assert!(seen.open().unwrap_err().to_string().contains("a link stands"));
        assert!(Seen::at(&at.join("app/d/keys")).is_err());
        assert!(open_to_read(&at.join("app/d/keys")).is_err());
        std::fs::remove_file(at.join("app/d")).unwrap();
        std::fs::rename(at.join("secret"), at.join("app/d")).unwrap();
        assert!(seen.open().unwrap_err().to_string().contains("it is not what it was"));
    }

    #[test]
    fn a_lineage_ends_at_the_root() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        std::fs::write(at.join("file"), "").unwrap();
        let lineage = Seen::at(&at.join("file")).unwrap().lineage().unwrap();
        assert_eq!(lineage.len(), at.join("file").components().count());
        assert_eq!(lineage[1], Seen::at(&at).unwrap().identity);
        assert_eq!(lineage.last(), Some(&Seen::at(Path::new("/")).unwrap().identity));
    }

    #[test]
    fn what_is_hidden_is_found_under_the_name_that_a_server_gave_it() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().canonicalize().unwrap();
        std::fs::create_dir(at.join("keys")).unwrap();
        std::fs::write(at.join("keys/token"), "").unwrap();
        let token = Kept::at(at.join("keys/token")).unwrap();
        let now = || token.now().map(|it| it.path).collect::<Vec<_>>();
        assert_eq!(now(), [at.join("keys/token")]);
        std::fs::rename(at.join("keys"), at.join("other")).unwrap();
        assert_eq!(now(), [at.join("other/token")]);
        std::fs::create_dir(at.join("keys")).unwrap();
        std::fs::write(at.join("keys/token"), "").unwrap();
        assert_eq!(now(), [at.join("keys/token"), at.join("other/token")]);
        // As an editor does it.
        std::fs::rename(at.join("keys/token"), at.join("other/token")).unwrap();
        assert_eq!(now(), Vec::<PathBuf>::new());
    }
}
