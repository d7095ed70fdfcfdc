//! The folder of all that lasts: the key that signs grants, the reviews of tools, the
//! journal, the homes of tool servers.
//!
//! What lies there is believed, and written to as the broker's user. Whoever else may
//! make files in it can put a link in the place of a server's home, a journal of his own
//! in the place of ours, or approved definitions that nobody approved. So it is the
//! broker's user's or root's, and nobody else may write into it.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// What has to have room, in bytes: a few records.
const ROOM_BYTES_MIN: usize = 64 * 1024;

/// Why a folder is not used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// It cannot be looked at.
    #[error("the state folder {}: {source}", folder.display())]
    Unreadable {
        /// The folder.
        folder: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It is somebody else's.
    #[error(
        "the state folder {} belongs to uid {uid}, and the toolbroker runs as uid {own}: give \
         --state a folder of its own, or have it run as that user (`[broker] user`)",
        folder.display()
    )]
    Foreign {
        /// The folder.
        folder: PathBuf,
        /// Whose it is.
        uid: u32,
        /// Who the broker is.
        own: u32,
    },
    /// Nothing can be written there.
    #[error("nothing can be written into the state folder {}: {source}", folder.display())]
    Unwritable {
        /// The folder.
        folder: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Others may put files there.
    #[error(
        "others may write into the state folder {} (mode {mode:o}): give --state a \
         folder of its own, or see that nothing strange lies in this one and `chmod go-w` it",
        folder.display()
    )]
    Open {
        /// The folder.
        folder: PathBuf,
        /// Its mode.
        mode: u32,
    },
}

/// That this folder's content is this user's or root's doing, if it is there.
///
/// # Errors
/// [`StateError`].
pub fn check(folder: &Path) -> Result<(), StateError> {
    let found = match folder.metadata() {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(StateError::Unreadable { folder: folder.into(), source }),
    };
    if !is_trusted(found.uid()) {
        let own = rustix::process::geteuid().as_raw();
        return Err(StateError::Foreign { folder: folder.into(), uid: found.uid(), own });
    }
    match found.mode() & 0o7777 {
        mode if mode & 0o022 != 0 => Err(StateError::Open { folder: folder.into(), mode }),
        _ => has_room(folder)
            .map_err(|source| StateError::Unwritable { folder: folder.into(), source }),
    }
}

/// That something can be written there: a broker that finds out with its first record has
/// promised what it cannot do.
fn has_room(folder: &Path) -> io::Result<()> {
    let probe = folder.join(format!(".room.{}", std::process::id()));
    let opened = File::options().write(true).create(true).truncate(true).mode(0o600).open(&probe);
    let written = opened.and_then(|mut file| file.write_all(&[0; ROOM_BYTES_MIN]));
    let _ = fs::remove_file(&probe);
    match written {
        // A limit of the process says nothing of the folder.
        Err(error) if error.kind() == io::ErrorKind::FileTooLarge => Ok(()),
        written => written,
    }
}

/// Whether what this user owns is the broker's own doing, or root's, who may do anything.
pub(crate) fn is_trusted(uid: u32) -> bool {
    [0, rustix::process::geteuid().as_raw()].contains(&uid)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_folder_that_others_may_write_or_own_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        check(&state).unwrap();
        fs::create_dir(&state).unwrap();
        for (mode, is_good) in [(0o700, true), (0o755, true), (0o775, false), (0o1777, false)] {
            fs::set_permissions(&state, Permissions::from_mode(mode)).unwrap();
            let checked = check(&state);
            assert_eq!(checked.is_ok(), is_good, "{mode:o}: {checked:?}");
            assert!(checked.err().is_none_or(|it| it.to_string().contains("chmod go-w")));
        }
        fs::set_permissions(&state, Permissions::from_mode(0o700)).unwrap();
        let stranger = rustix::fs::Uid::from_raw(64_123);
        if rustix::fs::chown(&state, Some(stranger), None).is_err() {
            eprintln!("SKIPPED in part: only root gives files away");
            return;
        }
        let refused = check(&state).unwrap_err().to_string();
        assert!(refused.contains("belongs to uid 64123"), "{refused}");
    }
}
