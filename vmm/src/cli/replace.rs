//! Files that a command leaves: whole, or as they were.

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use super::{CliError, out};

/// Who may read a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readers {
    /// Its owner alone.
    Owner,
    /// Who may read the file that was there, or any new one.
    AsBefore,
}

/// Writes a file as [`replace`] does and says so with what `is` of it, or, where its name is
/// `-`, writes to standard output and says nothing.
///
/// # Errors
/// If it cannot be written.
pub(crate) fn put(
    output: &Path,
    bytes: &[u8],
    readers: Readers,
    is: std::fmt::Arguments<'_>,
) -> Result<(), CliError> {
    let mut out = out();
    if output == Path::new("-") {
        out.write_all(bytes)?;
        return Ok(out.flush()?);
    }
    replace(output, bytes, readers)
        .map_err(|source| CliError::File { path: output.display().to_string(), source })?;
    Ok(writeln!(out, "{}  {is}", output.display())?)
}

/// Writes a file. What was there before stays until the new one is whole, if its folder
/// lets it.
///
/// # Errors
/// If it cannot be written.
pub(crate) fn replace(output: &Path, bytes: &[u8], readers: Readers) -> io::Result<()> {
    let there = fs::metadata(output);
    if there.as_ref().is_ok_and(|there| !there.is_file()) {
        // A pipe, or a terminal.
        return fs::write(output, bytes);
    }
    // Behind a link it is the file that is replaced.
    let output = fs::canonicalize(output).unwrap_or_else(|_| output.to_owned());
    let mut name = OsString::from(".");
    name.push(output.file_name().unwrap_or_default());
    name.push(format!(".{}", std::process::id()));
    let beside = output.with_file_name(name);
    let private = Permissions::from_mode(0o600);
    let (mode, before) = match (readers, there) {
        (Readers::Owner, _) => (0o600, None),
        (Readers::AsBefore, Ok(there)) => (0o600, Some(there.permissions())),
        (Readers::AsBefore, Err(_)) => (0o666, None),
    };
    let replaced = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&beside)
        .and_then(|mut file| {
            file.write_all(bytes)?;
            before.map_or(Ok(()), |before| file.set_permissions(before))?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&beside, &output));
    let Err(error) = replaced else { return Ok(()) };
    let _ = fs::remove_file(&beside);
    // A folder that takes no file, or a file that is mounted there.
    let stays = matches!(
        error.kind(),
        io::ErrorKind::PermissionDenied
            | io::ErrorKind::ReadOnlyFilesystem
            | io::ErrorKind::ResourceBusy
    );
    if !stays || !output.is_file() {
        return Err(error);
    }
    if readers == Readers::Owner {
        fs::set_permissions(&output, private)?;
    }
    fs::write(&output, bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("forge-{name}-{}", std::process::id()));
            fs::create_dir(&folder).unwrap();
            Self(folder)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_file_that_is_replaced_has_the_readers_it_had() {
        let folder = Folder::new("replaced");
        let file = folder.0.join("program.wasm");
        let mode = || fs::metadata(&file).unwrap().permissions().mode() & 0o777;
        replace(&file, b"one", Readers::AsBefore).unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
        replace(&file, b"two", Readers::AsBefore).unwrap();
        assert_eq!((fs::read(&file).unwrap(), mode()), (b"two".to_vec(), 0o640));
        replace(&file, b"three", Readers::Owner).unwrap();
        assert_eq!((fs::read(&file).unwrap(), mode()), (b"three".to_vec(), 0o600));
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_cannot_be_written_whole_stays_as_it_was() {
        // As a full disk does it, and without one: a name that leaves no room for another.
        let folder = Folder::new("stays");
        let long = folder.0.join("x".repeat(255));
        fs::write(&long, b"before").unwrap();
        assert!(replace(&long, b"after", Readers::AsBefore).is_err());
        assert_eq!(fs::read(&long).unwrap(), b"before");
    }
}
