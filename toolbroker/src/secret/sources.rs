//! Where credential values come from.
//!
//! Whatever a source gives is held in memory that is wiped, and is bounded in
//! size and time. Deliberately absent is a way to ask somebody: a broker
//! starts without a terminal.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::str::FromStr as _;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use zeroize::Zeroizing;

use super::{COMMAND_TIME_MAX, SECRET_BYTES_MAX, Secret, SecretError};

/// What a command's environment has from the broker's own: enough to find its
/// own configuration and agent.
pub(super) const COMMAND_ENVIRONMENT: [&str; 10] = [
    "PATH",
    "HOME",
    "LANG",
    "USER",
    "LOGNAME",
    "XDG_CONFIG_HOME",
    "XDG_RUNTIME_DIR",
    "DBUS_SESSION_BUS_ADDRESS",
    "GNUPGHOME",
    "TMPDIR",
];

impl Secret {
    /// Reads the value from the broker's own environment.
    ///
    /// # Errors
    /// [`SecretError::Unset`] or [`SecretError::Unusable`].
    pub fn from_env(
        variable: &str,
        lookup: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, SecretError> {
        let value =
            lookup(variable).ok_or_else(|| SecretError::Unset { variable: variable.to_owned() })?;
        Self::new(value)
    }

    /// Reads the value from a file that only its owner may read; one line end
    /// after it does not belong to it.
    ///
    /// # Errors
    /// [`SecretError`], naming the file.
    pub fn from_file(file: &Path) -> Result<Self, SecretError> {
        let secret = Self::of_line(&read_private(file)?)?;
        Ok(Self { files: vec![file.to_owned()], ..secret })
    }

    /// Decrypts an age file, armored or not, with an X25519 identity from a
    /// file that only its owner may read. The encrypted file may be anybody's
    /// to read. One line end after the value does not belong to it.
    ///
    /// # Errors
    /// [`SecretError`], naming both files.
    pub fn from_age(file: &Path, identity: &Path) -> Result<Self, SecretError> {
        let keys = read_private(identity)?;
        let lines = keys.lines().map(str::trim).filter(|line| line.starts_with("AGE-SECRET-KEY-1"));
        let identities: Vec<age::x25519::Identity> =
            lines.filter_map(|line| age::x25519::Identity::from_str(line).ok()).collect();
        if identities.is_empty() {
            return Err(SecretError::NoIdentity { file: identity.to_owned() });
        }
        let failed = |why| SecretError::Encrypted {
            file: file.to_owned(),
            identity: identity.to_owned(),
            why,
        };
        // Its overhead is a header and 16 bytes in 64 KiB; armor adds a third.
        let encrypted = read_bounded(file, 4 * SECRET_BYTES_MAX)?;
        let decryptor = age::Decryptor::new(age::armor::ArmoredReader::new(encrypted.as_slice()))
            .map_err(|_| failed("it is no age file"))?;
        let identities = identities.iter().map(|identity| identity as &dyn age::Identity);
        let plain = decryptor
            .decrypt(identities)
            .map_err(|_| failed("it is encrypted to others, or damaged"))?;
        let value = read_text(plain, SECRET_BYTES_MAX)
            .map_err(|_| failed("its content is damaged, too long or no UTF-8 text"))?;
        let secret = Self::of_line(&value)?;
        Ok(Self { files: vec![file.to_owned(), identity.to_owned()], ..secret })
    }

    /// Has a command tell the value on its standard output. Its words are
    /// passed as they are, to no shell; it has 20 seconds, no standard input
    /// and a small environment; what it writes to standard error is thrown
    /// away. One line end after the value does not belong to it.
    ///
    /// # Errors
    /// [`SecretError`], naming the program and never what it said.
    pub fn from_command(words: &[&str]) -> Result<Self, SecretError> {
        Self::of_line(&told_by(words, COMMAND_TIME_MAX)?)
    }

    fn of_line(text: &str) -> Result<Self, SecretError> {
        // The mark that some editors begin a file with would go to the server unseen.
        let line = text.strip_prefix('\u{feff}').unwrap_or(text);
        let line = line.strip_suffix('\n').unwrap_or(line);
        Self::new(line.strip_suffix('\r').unwrap_or(line).to_owned())
    }
}

/// What a command says within this time.
pub(super) fn told_by(words: &[&str], time: Duration) -> Result<Zeroizing<String>, SecretError> {
    let (program, args) = words.split_first().ok_or(SecretError::Unusable)?;
    let failed = |why: String| SecretError::Command { program: (*program).to_owned(), why };
    let environment =
        COMMAND_ENVIRONMENT.iter().filter_map(|name| Some((*name, std::env::var_os(name)?)));
    let mut child = Command::new(program)
        .args(args)
        .env_clear()
        .envs(environment)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(|error| failed(format!("cannot be started: {error}")))?;
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let end = || {
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::KILL);
        }
    };
    let until = Instant::now() + time;
    let (tell, told) = mpsc::channel();
    if let Some(stdout) = child.stdout.take() {
        std::thread::spawn(move || {
            // Nobody listens any more where the time is over.
            let _ = tell.send(read_text(stdout, SECRET_BYTES_MAX));
        });
    }
    let said = told.recv_timeout(time);
    // Whoever has said too much, or is silent, may still run.
    let status = loop {
        match child.try_wait() {
            Ok(None) if matches!(said, Ok(Ok(_))) && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Ok(Some(status)) => break Some(status),
            _ => {
                end();
                let _ = child.wait();
                break None;
            }
        }
    };
    end();
    match (said, status) {
        (Ok(Ok(said)), Some(status)) if status.success() => Ok(said),
        (Ok(Ok(_)), Some(status)) => Err(failed(format!("ended with {status}: run it by hand"))),
        (Ok(Err(error)), _) if error.kind() == io::ErrorKind::InvalidData => {
            Err(SecretError::Unusable)
        }
        (Ok(Err(_)), _) => Err(failed(format!("said more than {SECRET_BYTES_MAX} bytes"))),
        _ => Err(failed(format!("gave no answer within {} s", time.as_secs_f32()))),
    }
}

/// Reads a text file that nobody but its owner, this user, may read. Mode and
/// owner are those of the file that was opened, not of the path.
///
/// # Errors
/// [`SecretError`], naming the file.
pub(crate) fn read_private(file: &Path) -> Result<Zeroizing<String>, SecretError> {
    let unreadable = |source: io::Error| SecretError::Unreadable { file: file.to_owned(), source };
    let (opened, metadata) = open(file, SECRET_BYTES_MAX)?;
    let mode = metadata.mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(SecretError::Loose { file: file.to_owned(), mode });
    }
    let own = rustix::process::geteuid().as_raw();
    if metadata.uid() != own {
        let owner = metadata.uid();
        return Err(SecretError::ForeignOwner { file: file.to_owned(), owner, own });
    }
    read_text(opened, SECRET_BYTES_MAX).map_err(|source| match source.kind() {
        io::ErrorKind::InvalidData => SecretError::Unusable,
        _ => unreadable(source),
    })
}

fn read_bounded(file: &Path, bytes_max: u64) -> Result<Vec<u8>, SecretError> {
    let (opened, _) = open(file, bytes_max)?;
    let mut bytes = Vec::new();
    opened
        .take(bytes_max)
        .read_to_end(&mut bytes)
        .map_err(|source| SecretError::Unreadable { file: file.to_owned(), source })?;
    Ok(bytes)
}

/// A regular file of at most this size.
fn open(file: &Path, bytes_max: u64) -> Result<(File, std::fs::Metadata), SecretError> {
    let unreadable = |source: io::Error| SecretError::Unreadable { file: file.to_owned(), source };
    let opened = File::options()
        .read(true)
        // A FIFO at this path must not hold the broker up.
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(file)
        .map_err(unreadable)?;
    let metadata = opened.metadata().map_err(unreadable)?;
    if !metadata.is_file() || metadata.len() > bytes_max {
        return Err(SecretError::NotASecretFile { file: file.to_owned() });
    }
    Ok((opened, metadata))
}

/// Reads text to its end into memory that is wiped and never moves.
fn read_text(mut source: impl Read, bytes_max: u64) -> io::Result<Zeroizing<String>> {
    let mut bytes = Zeroizing::new(vec![0; bytes_max as usize + 1]);
    let mut got = 0;
    while got < bytes.len() {
        match source.read(&mut bytes[got..]) {
            Ok(0) => {
                let text = std::str::from_utf8(&bytes[..got])
                    .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
                return Ok(Zeroizing::new(text.to_owned()));
            }
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::FileTooLarge.into())
}
