//! Users of this host that processes run as: the toolbroker, and doors.

use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Why a process cannot run as the user that is asked for.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// There is no such user.
    #[error("there is no user {0:?} on this host: make one, or give a number")]
    Unknown(String),
    /// The supervisor may not change users.
    #[error("only root can start a process as another user, and this is uid {own}")]
    NotRoot {
        /// The supervisor's effective user.
        own: u32,
    },
    /// It is to run as root.
    #[error("the user must not be root; omit this setting to run as the current user")]
    Root,
    /// The host does not say.
    #[error("this host's users cannot be looked up: {0}")]
    Host(io::Error),
}

/// A user of this host, other than root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    uid: u32,
    gid: u32,
    name: Option<String>,
    home: PathBuf,
}

impl User {
    /// The user of this name.
    ///
    /// # Errors
    /// [`UserError`]; only root may run a process as another user.
    pub fn named(name: &str) -> Result<Self, UserError> {
        may_change()?;
        let unknown = || UserError::Unknown(name.to_owned());
        let c_name = CString::new(name).map_err(|_| unknown())?;
        // SAFETY: the name is a C string, and the rest is `account`'s own.
        let account = account(|record, buffer, bytes, found| unsafe {
            libc::getpwnam_r(c_name.as_ptr(), record, buffer, bytes, found)
        })?;
        account.ok_or_else(unknown)?.not_root()
    }

    /// The user of this number, which needs no account: without one, its
    /// group has the same number and its home is `/`.
    ///
    /// # Errors
    /// [`UserError`]; only root may run a process as another user.
    pub fn numbered(uid: u32) -> Result<Self, UserError> {
        may_change()?;
        // SAFETY: all pointers are `account`'s own.
        let account = account(|record, buffer, bytes, found| unsafe {
            libc::getpwuid_r(uid, record, buffer, bytes, found)
        })?;
        account.unwrap_or(Self { uid, gid: uid, name: None, home: "/".into() }).not_root()
    }

    /// The user's numeric id.
    #[must_use]
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// The user's home folder.
    #[must_use]
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// Whether it may be able to write to this folder, and to make it where it is not
    /// there yet. Where somebody else is let in by a list of his own, that shows in the
    /// group's bits, so `false` is certain and `true` is not.
    #[must_use]
    pub fn may_write(&self, folder: &Path) -> bool {
        let found = folder.ancestors().find_map(|at| std::fs::metadata(at).ok());
        found.is_none_or(|found| match found.uid() == self.uid {
            true => found.mode() & 0o200 != 0,
            false => found.mode() & 0o022 != 0,
        })
    }

    /// Has a command run as this user: with its own group, no other group, and
    /// its home.
    pub fn becomes(&self, command: &mut Command) {
        // Where a root process sets a user, the library drops all
        // supplementary groups first.
        command.gid(self.gid).uid(self.uid).env("HOME", &self.home);
        for variable in ["USER", "LOGNAME"] {
            match &self.name {
                Some(name) => command.env(variable, name),
                None => command.env_remove(variable),
            };
        }
    }

    fn not_root(self) -> Result<Self, UserError> {
        // -1 means "leave it" to the kernel.
        if [self.uid, self.gid].iter().any(|id| [0, u32::MAX].contains(id)) {
            return Err(UserError::Root);
        }
        Ok(self)
    }
}

fn may_change() -> Result<(), UserError> {
    // SAFETY: takes nothing and cannot fail.
    match unsafe { libc::geteuid() } {
        0 => Ok(()),
        own => Err(UserError::NotRoot { own }),
    }
}

/// Looks an account up with one of the C library's calls, which get their
/// memory from here.
fn account(
    mut call: impl FnMut(
        *mut libc::passwd,
        *mut libc::c_char,
        libc::size_t,
        *mut *mut libc::passwd,
    ) -> libc::c_int,
) -> Result<Option<User>, UserError> {
    let mut buffer: Vec<libc::c_char> = vec![0; 4096];
    loop {
        let mut record = std::mem::MaybeUninit::<libc::passwd>::uninit();
        let mut found = std::ptr::null_mut();
        match call(record.as_mut_ptr(), buffer.as_mut_ptr(), buffer.len(), &raw mut found) {
            0 if found.is_null() => return Ok(None),
            0 => {
                // SAFETY: the call succeeded and found somebody, so the record
                // is written, and its texts are C strings in `buffer`, which
                // lives on while they are copied.
                let (record, name, home) = unsafe {
                    let record = record.assume_init();
                    (record, CStr::from_ptr(record.pw_name), CStr::from_ptr(record.pw_dir))
                };
                return Ok(Some(User {
                    uid: record.pw_uid,
                    gid: record.pw_gid,
                    name: name.to_str().ok().map(str::to_owned),
                    home: OsStr::from_bytes(home.to_bytes()).into(),
                }));
            }
            libc::ERANGE if buffer.len() < 1024 * 1024 => buffer.resize(2 * buffer.len(), 0),
            libc::EINTR => {}
            error => return Err(UserError::Host(io::Error::from_raw_os_error(error))),
        }
    }
}
