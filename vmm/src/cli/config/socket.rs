//! Unix sockets that are listened at: where, and who may connect.

use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use super::Fault;

/// Bytes of a socket's path: what unix(7) has room for, without the NUL.
const PATH_BYTES_MAX: usize = 107;

/// The mode of a socket's file without one that is given: its user alone may connect.
pub(crate) const OWN: u32 = 0o600;

/// A socket's mode, as this field has it.
///
/// # Errors
/// If it is none that lets somebody connect and nobody execute.
pub(crate) fn mode(field: &str, mode: Option<&str>) -> Result<u32, Fault> {
    match mode.map(|mode| u32::from_str_radix(mode, 8)) {
        None => Ok(OWN),
        // Whoever may connect may write, and there is nothing to execute.
        Some(Ok(mode @ (0o600 | 0o660 | 0o666))) => Ok(mode),
        Some(_) => Err(Fault::at(field, "must be \"0600\", \"0660\" or \"0666\"")),
    }
}

/// A socket's path, as this field has it.
///
/// # Errors
/// If it is longer than an address may be.
pub(crate) fn path(field: &str, path: PathBuf) -> Result<PathBuf, Fault> {
    match path.as_os_str().as_bytes().len() {
        ..=PATH_BYTES_MAX => Ok(path),
        bytes => Err(Fault::at(
            field,
            format!("its path has {bytes} bytes, and a socket's at most {PATH_BYTES_MAX}"),
        )),
    }
}
