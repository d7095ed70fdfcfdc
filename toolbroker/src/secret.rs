//! Credential values: where they come from, and their removal from whatever
//! leaves the broker.
//!
//! A value is handed to one server's environment and to its scrubber, and to
//! nothing else: `Debug` is redacted, errors name the field and the file but
//! never the value, and memory is wiped on drop. Deliberately absent are
//! encrypted files, commands and system stores as sources, and the scrubbing
//! of encoded forms (base64, percent, hex).

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use secrecy::{ExposeSecret as _, SecretString};
use serde_json::Value;

/// What stands where a credential stood.
pub const REDACTED: &str = "[credential removed]";

/// A credential longer than this is a wrong file.
const SECRET_BYTES_MAX: u64 = 64 * 1024;

/// A credential's value.
#[derive(Clone)]
pub struct Secret(SecretString);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Why a credential cannot be had. Names where, never what.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The environment variable is not set.
    #[error("the environment variable {variable} is not set: set it, or use `file`")]
    Unset {
        /// Its name.
        variable: String,
    },
    /// The file cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Others than its owner may read the file.
    #[error(
        "{} has mode {mode:04o}, others may read it: `chmod 600` it, and change the credential \
         if it was exposed", file.display()
    )]
    Loose {
        /// The file.
        file: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The file belongs to somebody else.
    #[error("{} belongs to uid {owner}, not to the broker's uid {own}", file.display())]
    ForeignOwner {
        /// The file.
        file: PathBuf,
        /// Its owner.
        owner: u32,
        /// The broker's effective user.
        own: u32,
    },
    /// The path leads to no regular file, or to one too large.
    #[error("{} is not a regular file of at most {SECRET_BYTES_MAX} bytes", file.display())]
    NotASecretFile {
        /// The file.
        file: PathBuf,
    },
    /// The value is empty, is not text or holds a NUL.
    #[error("the value is empty, is not UTF-8 text, or holds a NUL byte")]
    Unusable,
}

impl Secret {
    /// Takes a value over.
    ///
    /// # Errors
    /// [`SecretError::Unusable`] for a value no environment can carry.
    pub fn new(value: String) -> Result<Self, SecretError> {
        let secret = SecretString::from(value);
        let text = secret.expose_secret();
        if text.is_empty() || text.contains('\0') {
            return Err(SecretError::Unusable);
        }
        Ok(Self(secret))
    }

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
        let mut value = read_private(file)?;
        if value.ends_with('\n') {
            value.pop();
            if value.ends_with('\r') {
                value.pop();
            }
        }
        Self::new(value)
    }

    /// The value, for the one place that needs it.
    #[must_use]
    pub fn expose(&self) -> &str {
        self.0.expose_secret()
    }
}

/// Reads a text file that nobody but its owner, this user, may read. Mode and
/// owner are those of the file that was opened, not of the path.
///
/// # Errors
/// [`SecretError`], naming the file.
pub(crate) fn read_private(file: &Path) -> Result<String, SecretError> {
    let unreadable = |source: io::Error| SecretError::Unreadable { file: file.to_owned(), source };
    let opened = File::options()
        .read(true)
        // A FIFO at this path must not hold the broker up.
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(file)
        .map_err(unreadable)?;
    let metadata = opened.metadata().map_err(unreadable)?;
    if !metadata.is_file() || metadata.len() > SECRET_BYTES_MAX {
        return Err(SecretError::NotASecretFile { file: file.to_owned() });
    }
    let mode = metadata.mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(SecretError::Loose { file: file.to_owned(), mode });
    }
    let own = rustix::process::geteuid().as_raw();
    if metadata.uid() != own {
        let owner = metadata.uid();
        return Err(SecretError::ForeignOwner { file: file.to_owned(), owner, own });
    }
    let mut text = String::with_capacity(metadata.len() as usize);
    opened.take(SECRET_BYTES_MAX).read_to_string(&mut text).map_err(|source| {
        if source.kind() == io::ErrorKind::InvalidData {
            SecretError::Unusable
        } else {
            unreadable(source)
        }
    })?;
    Ok(text)
}

/// Removes known credential values from text and JSON.
#[derive(Clone, Debug, Default)]
pub struct Scrubber {
    /// Longest first, so that a value that holds another goes as a whole.
    secrets: Vec<Secret>,
}

impl Scrubber {
    /// A scrubber for these values.
    #[must_use]
    pub fn new(secrets: impl IntoIterator<Item = Secret>) -> Self {
        let mut secrets: Vec<Secret> = secrets.into_iter().collect();
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.expose().len()));
        Self { secrets }
    }

    /// Replaces every known value in `text` by [`REDACTED`].
    #[must_use]
    pub fn text(&self, text: &str) -> String {
        let mut scrubbed = text.to_owned();
        for secret in &self.secrets {
            if scrubbed.contains(secret.expose()) {
                scrubbed = scrubbed.replace(secret.expose(), REDACTED);
            }
        }
        scrubbed
    }

    /// Replaces every known value in the strings and keys of `value`, and
    /// numbers that spell one out.
    #[must_use]
    pub fn json(&self, value: Value) -> Value {
        if self.secrets.is_empty() {
            return value;
        }
        match value {
            Value::String(text) => Value::String(self.text(&text)),
            Value::Array(items) => items.into_iter().map(|item| self.json(item)).collect(),
            Value::Object(fields) => {
                fields.into_iter().map(|(key, value)| (self.text(&key), self.json(value))).collect()
            }
            Value::Number(number) => {
                let digits = number.to_string();
                if self.secrets.iter().any(|secret| secret.expose() == digits) {
                    Value::String(REDACTED.to_owned())
                } else {
                    Value::Number(number)
                }
            }
            Value::Null | Value::Bool(_) => value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::os::unix::fs::PermissionsExt;

    fn secret(value: &str) -> Secret {
        Secret::new(value.to_owned()).unwrap()
    }

    #[test]
    fn debug_never_shows_the_value() {
        let shown = format!("{:?} {:?}", secret("hunter2"), Scrubber::new([secret("hunter2")]));
        assert!(!shown.contains("hunter2"), "{shown}");
    }

    #[test]
    fn a_file_that_others_may_read_is_refused_by_name_and_mode() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        std::fs::write(&file, "hunter2\n").unwrap();
        for mode in [0o640, 0o604, 0o666] {
            std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
            let refused = Secret::from_file(&file).unwrap_err().to_string();
            assert!(refused.contains("token") && refused.contains("chmod 600"), "{refused}");
            assert!(!refused.contains("hunter2"), "{refused}");
        }
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(Secret::from_file(&file).unwrap().expose(), "hunter2");
    }

    #[test]
    fn empty_and_nul_values_are_refused() {
        assert!(matches!(Secret::new(String::new()), Err(SecretError::Unusable)));
        assert!(matches!(Secret::new("a\0b".to_owned()), Err(SecretError::Unusable)));
    }

    #[test]
    fn known_values_leave_strings_keys_and_numbers() {
        let scrubber = Scrubber::new([secret("s3cr3t"), secret("s3cr3t-long"), secret("12345")]);
        let dirty = json!({
            "a s3cr3t key": ["x s3cr3t-long y", {"n": 12345, "m": 123}],
            "clean": "s3cr",
        });
        assert_eq!(
            scrubber.json(dirty),
            json!({
                format!("a {REDACTED} key"): [format!("x {REDACTED} y"), {"n": REDACTED, "m": 123}],
                "clean": "s3cr",
            })
        );
    }
}
