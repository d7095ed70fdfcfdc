//! Which journal file is whose.
//!
//! A journal folder has numbered files, and a lock beside each. A broker
//! takes one whose lock is free, and holds it for its life, so that exactly
//! one broker writes each file; brokers side by side have files of their own
//! and never wait for each other. A file that a dead broker left open (its
//! write-ahead log is still there) is taken first, so that what it left
//! unknown is closed soon.
//!
//! Distrusted is what stands in the folder already: a link in the place of a
//! file leads to somebody else's, which is neither written nor changed.

use std::fs::{DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;

use crate::state::is_trusted;

/// Brokers that may write into one folder at a time.
pub const SLOTS_MAX: u32 = 64;

/// How often a lock that is held is tried again, and after how long each time. A
/// reader holds one for the time of a system call.
const READERS_WAITED_FOR: u32 = 3;
const READER_TIME: Duration = Duration::from_millis(2);

/// A journal file that is this process's alone while this value lives.
#[derive(Debug)]
pub struct Slot {
    /// The journal file. It may not be there yet.
    pub file: PathBuf,
    _lock: File,
}

fn named(folder: &Path, number: u32, ending: &str) -> PathBuf {
    folder.join(format!("journal-{number:02}.{ending}"))
}

/// Opens a file of the journal's own, and makes it if it is not there. A link
/// is not followed, and a file that has another name besides is refused: it
/// may be anybody's.
fn open_own(path: &Path) -> io::Result<File> {
    // Without NONBLOCK a pipe would hold whoever opens it.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(flags.bits().cast_signed())
        .open(path)
        .map_err(|error| match error.raw_os_error() {
            Some(libc::ELOOP) => foreign(path, "is a link"),
            _ => error,
        })?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(foreign(path, "is no regular file"));
    }
    if metadata.nlink() > 1 {
        return Err(foreign(path, "has another name besides"));
    }
    if !is_trusted(metadata.uid()) {
        return Err(foreign(path, "is another user's"));
    }
    Ok(file)
}

/// Takes a lock that a reader may hold for a moment ([`files`]): a file that a
/// dead broker left open is not to be passed over for that.
fn taken_from_readers(lock: &File, mut wait: impl FnMut()) -> Result<(), TryLockError> {
    for _ in 0..READERS_WAITED_FOR {
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => wait(),
            outcome => return outcome,
        }
    }
    lock.try_lock()
}

fn foreign(path: &Path, what: &str) -> io::Error {
    let name = path.file_name().unwrap_or_default().display();
    io::Error::other(format!("{name} {what}, so the journal is not written there: remove it"))
}

impl Slot {
    /// Takes a journal file in this folder, which is made if need be.
    ///
    /// # Errors
    /// What the kernel said, and `ResourceBusy` if all files are taken.
    pub fn take(folder: &Path) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        // The operator may reach it by links; nothing in it is one.
        let folder = &folder.canonicalize()?;
        let metadata = folder.metadata()?;
        if !is_trusted(metadata.uid()) {
            return Err(foreign(folder, "is another user's folder"));
        }
        let mode = metadata.permissions().mode();
        if mode & 0o022 != 0 {
            // Whoever may write into it may put files in the places of ours.
            std::fs::set_permissions(folder, Permissions::from_mode(mode & 0o7755))?;
        }
        let mut free = None;
        for number in 0..SLOTS_MAX {
            let lock = named(folder, number, "lock");
            if free.is_some() && !lock.exists() {
                // Beyond it nothing was ever used.
                break;
            }
            let lock = open_own(&lock)?;
            match taken_from_readers(&lock, || std::thread::sleep(READER_TIME)) {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => continue,
                Err(TryLockError::Error(error)) => return Err(error),
            }
            let slot = Self { file: named(folder, number, "sqlite"), _lock: lock };
            if named(folder, number, "sqlite-wal").symlink_metadata().is_ok() {
                return Ok(slot);
            }
            free = free.or(Some(slot));
        }
        free.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::ResourceBusy,
                format!("{SLOTS_MAX} brokers write into this folder already"),
            )
        })
    }

    /// Makes the file if it is not there, readable by its owner alone whatever
    /// it was before.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn make_private(&self) -> io::Result<()> {
        let file = open_own(&self.file)?;
        if file.metadata()?.permissions().mode() & 0o077 != 0 {
            file.set_permissions(Permissions::from_mode(0o600))?;
        }
        Ok(())
    }
}

/// The journal files of a folder, by number, each with whether a broker has
/// it. None if the folder is not there.
///
/// # Errors
/// What the kernel said.
pub fn files(folder: &Path) -> io::Result<Vec<(PathBuf, bool)>> {
    let mut files = Vec::new();
    for number in 0..SLOTS_MAX {
        let file = named(folder, number, "sqlite");
        if !file.try_exists()? {
            continue;
        }
        let taken = is_taken(&file);
        files.push((file, taken));
    }
    Ok(files)
}

/// Whether a broker has this journal file now.
pub fn is_taken(file: &Path) -> bool {
    let lock = OpenOptions::new().read(true).open(file.with_extension("lock"));
    // A shared lock, so that readers do not take each other for a broker.
    lock.is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_brokers_have_two_files_and_a_free_one_is_taken_again() {
        let folder = tempfile::tempdir().unwrap();
        let first = Slot::take(folder.path()).unwrap();
        let second = Slot::take(folder.path()).unwrap();
        assert_ne!(first.file, second.file);
        let freed = first.file.clone();
        drop(first);
        assert_eq!(Slot::take(folder.path()).unwrap().file, freed);
    }

    #[test]
    fn one_broker_after_the_other_leaves_one_lock() {
        let folder = tempfile::tempdir().unwrap();
        for _ in 0..3 {
            drop(Slot::take(folder.path()).unwrap());
        }
        assert_eq!(folder.path().read_dir().unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_a_dead_broker_left_is_taken_first() {
        let folder = tempfile::tempdir().unwrap();
        let (first, second) =
            (Slot::take(folder.path()).unwrap(), Slot::take(folder.path()).unwrap());
        std::fs::write(second.file.with_extension("sqlite-wal"), b"").unwrap();
        let left = second.file.clone();
        drop((first, second));
        assert_eq!(Slot::take(folder.path()).unwrap().file, left);
    }

    #[test]
    fn a_reader_that_looks_at_that_moment_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let lock = folder.path().join("lock");
        let own = open_own(&lock).unwrap();
        let reader = File::open(&lock).unwrap();
        reader.lock_shared().unwrap();
        let mut waited = 0;
        let held = taken_from_readers(&own, || waited += 1);
        assert!(matches!(held, Err(TryLockError::WouldBlock)), "{held:?}");
        assert_eq!(waited, READERS_WAITED_FOR, "and not for ever");
        // It leaves while it is waited for.
        let mut reader = Some(reader);
        taken_from_readers(&own, || drop(reader.take())).unwrap();
    }

    #[test]
    fn all_files_taken_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let held: Vec<Slot> = (0..SLOTS_MAX).map(|_| Slot::take(folder.path()).unwrap()).collect();
        let refused = Slot::take(folder.path()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ResourceBusy);
        drop(held);
    }

    #[test]
    fn a_folder_that_others_could_write_is_made_the_owners() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
        let _slot = Slot::take(folder.path()).unwrap();
        let mode = folder.path().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
    }

    #[test]
    fn a_journal_that_others_could_read_is_made_private() {
        let folder = tempfile::tempdir().unwrap();
        let slot = Slot::take(folder.path()).unwrap();
        std::fs::write(&slot.file, b"").unwrap();
        std::fs::set_permissions(&slot.file, std::fs::Permissions::from_mode(0o644)).unwrap();
        slot.make_private().unwrap();
        let mode = slot.file.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_folder_that_its_group_may_write_to_is_so_no_more() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o770)).unwrap();
        let _slot = Slot::take(folder.path()).unwrap();
        assert_eq!(folder.path().metadata().unwrap().permissions().mode() & 0o777, 0o750);
    }
}
