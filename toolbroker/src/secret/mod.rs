//! Credential values: where they come from, and their removal from whatever
//! leaves the broker.
//!
//! A value is handed to its own server's environment or header and to the
//! scrubber, and to nothing else: `Debug` is redacted, errors name the field
//! and the file but never the value, and memory is wiped on drop. What cannot
//! be wiped is told in `docs/credentials.md`. Deliberately absent are stores
//! of a desktop or a cloud: `command` reaches them all.
//!
//! | module | what it holds |
//! |---|---|
//! | `sources` | environment, file, age file, command |
//! | `scrub` | known values found in text and JSON, in many spellings |
//! | `spelling` | those spellings |
//! | `kin` | other values that are as secret as a credential |
//! | `patterns` | credentials that nobody told us of, known by their shape |

mod kin;
mod patterns;
mod scrub;
mod sources;
mod spelling;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::{ExposeSecret as _, SecretString};
use zeroize::Zeroizing;

pub(crate) use self::kin::{names_credential, parts_of_credential, parts_of_header};
pub use self::scrub::{Scrubbed, Scrubber};
pub(crate) use self::sources::read_private;

/// What stands where a credential stood.
pub const REDACTED: &str = "[credential removed]";

/// A credential longer than this is a wrong file.
pub const SECRET_BYTES_MAX: u64 = 64 * 1024;
/// A credential shorter than this, white space apart, is refused where it is
/// configured: whatever happened to hold its text would be taken out of
/// results, and it could be guessed.
pub const SECRET_BYTES_MIN: usize = 8;
/// How long a command may take to tell a credential.
pub const COMMAND_TIME_MAX: Duration = Duration::from_secs(20);

/// Whether a value is too short to be told from innocent text. White space
/// does not count: a value is looked for without it too.
#[must_use]
pub fn is_short(value: &str) -> bool {
    let bytes = value.bytes();
    bytes.filter(|byte| !byte.is_ascii_whitespace()).count() < SECRET_BYTES_MIN
}

/// A credential's value, and the files it came from.
#[derive(Clone)]
pub struct Secret {
    value: SecretString,
    files: Vec<PathBuf>,
}

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
    /// The identity file has no identity.
    #[error(
        "{} holds no identity, a line that begins with AGE-SECRET-KEY-1: make one with \
         `age-keygen`", file.display()
    )]
    NoIdentity {
        /// The file.
        file: PathBuf,
    },
    /// The file cannot be decrypted.
    #[error("{} cannot be decrypted with {}: {why}", file.display(), identity.display())]
    Encrypted {
        /// The file.
        file: PathBuf,
        /// The identity file.
        identity: PathBuf,
        /// Why not, without a byte of either.
        why: &'static str,
    },
    /// The command did not tell a credential.
    #[error("the command {program:?} {why}")]
    Command {
        /// Its first word.
        program: String,
        /// What it did instead, without a word of what it said.
        why: String,
    },
    /// The value is too short to be looked for.
    #[error(
        "the value has fewer than {SECRET_BYTES_MIN} bytes: innocent text that holds it would be \
         taken for it, and it can be guessed. Use a longer one; what is no secret belongs under \
         `env`, or into the header as plain text"
    )]
    Short,
    /// The value is empty, is not text or holds a NUL.
    #[error("the value is empty, is not UTF-8 text, or holds a NUL byte")]
    Unusable,
}

impl Secret {
    /// Takes a value over, and wipes where it was.
    ///
    /// # Errors
    /// [`SecretError::Unusable`] for a value no environment can carry.
    pub fn new(value: String) -> Result<Self, SecretError> {
        let value = Zeroizing::new(value);
        if value.is_empty() || value.contains('\0') {
            return Err(SecretError::Unusable);
        }
        // A copy of exactly its length: shortening the text where it is could
        // leave the old one behind.
        Ok(Self { value: SecretString::from(value.as_str()), files: Vec::new() })
    }

    /// The value, for the one place that needs it.
    #[must_use]
    pub fn expose(&self) -> &str {
        self.value.expose_secret()
    }

    /// The files that it came from, which are nobody else's to read.
    #[must_use]
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    fn secret(value: &str) -> Secret {
        Secret::new(value.to_owned()).unwrap()
    }

    #[test]
    fn debug_never_shows_the_value() {
        let shown = format!(
            "{:?} {:?}",
            secret("hunter2-hunter2"),
            Scrubber::new([secret("hunter2-hunter2")])
        );
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
        let read = Secret::from_file(&file).unwrap();
        assert_eq!(read.expose(), "hunter2");
        assert_eq!(read.files(), std::slice::from_ref(&file));
        std::fs::write(&file, "\u{feff}hunter2\r\n").unwrap();
        assert_eq!(Secret::from_file(&file).unwrap().expose(), "hunter2");
    }

    #[test]
    fn white_space_makes_no_value_long() {
        for short in ["hunter2", "a        b", "       \n       "] {
            assert!(is_short(short), "{short:?}");
        }
        assert!(!is_short("hunter 22"));
    }

    #[test]
    fn empty_and_nul_values_are_refused() {
        assert!(matches!(Secret::new(String::new()), Err(SecretError::Unusable)));
        assert!(matches!(Secret::new("a\0b".to_owned()), Err(SecretError::Unusable)));
    }

    /// An identity file and a file encrypted to it.
    fn encrypted(folder: &Path, value: &[u8], armored: bool) -> (PathBuf, PathBuf) {
        use std::io::Write as _;
        let identity = age::x25519::Identity::generate();
        let file = folder.join("token.age");
        let to = identity.to_public();
        let encryptor =
            age::Encryptor::with_recipients(std::iter::once(&to as &dyn age::Recipient)).unwrap();
        let mut bytes = Vec::new();
        let format =
            if armored { age::armor::Format::AsciiArmor } else { age::armor::Format::Binary };
        let armor = age::armor::ArmoredWriter::wrap_output(&mut bytes, format).unwrap();
        let mut writer = encryptor.wrap_output(armor).unwrap();
        writer.write_all(value).unwrap();
        writer.finish().and_then(|armor| armor.finish()).unwrap();
        std::fs::write(&file, bytes).unwrap();
        let identities = folder.join("identity");
        let text = format!("# made by a test\n{}\n", identity.to_string().expose_secret());
        std::fs::write(&identities, text).unwrap();
        std::fs::set_permissions(&identities, PermissionsExt::from_mode(0o600)).unwrap();
        (file, identities)
    }

    #[test]
    fn an_age_file_is_decrypted_with_its_identity_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        for armored in [true, false] {
            let (file, identity) = encrypted(folder.path(), b"hunter2\n", armored);
            assert_eq!(Secret::from_age(&file, &identity).unwrap().expose(), "hunter2");
            let other = tempfile::tempdir().unwrap();
            let (_, stranger) = encrypted(other.path(), b"x", armored);
            let refused = Secret::from_age(&file, &stranger).unwrap_err().to_string();
            assert!(refused.contains("token.age") && refused.contains("identity"), "{refused}");
        }
        let (file, identity) = encrypted(folder.path(), &[b'x'; 70_000], false);
        assert!(matches!(Secret::from_age(&file, &identity), Err(SecretError::Encrypted { .. })));
        std::fs::set_permissions(&identity, PermissionsExt::from_mode(0o644)).unwrap();
        assert!(matches!(Secret::from_age(&file, &identity), Err(SecretError::Loose { .. })));
        std::fs::set_permissions(&identity, PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::write(&identity, "hunter2").unwrap();
        let refused = Secret::from_age(&file, &identity).unwrap_err().to_string();
        assert!(refused.contains("age-keygen") && !refused.contains("hunter2"), "{refused}");
        std::fs::write(&file, "hunter2").unwrap();
        let refused = Secret::from_age(&file, &identity).unwrap_err().to_string();
        assert!(!refused.contains("hunter2"), "{refused}");
    }

    #[test]
    fn a_command_tells_a_credential_without_its_line_end() {
        let told = Secret::from_command(&["printf", "%s\\n", "hunter2"]).unwrap();
        assert_eq!(told.expose(), "hunter2");
        let home = Secret::from_command(&["sh", "-c", "echo $PATH"]).unwrap();
        assert_eq!(home.expose(), std::env::var("PATH").unwrap());
    }

    /// Credentials that others are to have are in this process's own, too.
    #[test]
    fn a_command_sees_nothing_of_the_environment_that_it_needs_not() {
        let seen = sources::told_by(&["env"], Duration::from_secs(30)).unwrap();
        let names: Vec<_> =
            seen.lines().filter_map(|line| line.split_once('=').map(|(name, _)| name)).collect();
        assert!(names.contains(&"PATH"), "{names:?}");
        let stray = names.iter().find(|name| !sources::COMMAND_ENVIRONMENT.contains(name));
        assert_eq!(stray, None);
    }

    #[test]
    fn a_command_that_fails_says_too_much_or_nothing_is_refused_without_its_words() {
        let cases: [(&[&str], &str); 5] = [
            (&["sh", "-c", "echo hunter2; echo hunter2 >&2; exit 3"], "ended with"),
            (&["sh", "-c", "yes hunter2"], "more than"),
            (&["no-such-program-anywhere"], "cannot be started"),
            (&["true"], "is empty"),
            (&["printf", "\\377"], "is not UTF-8"),
        ];
        for (words, expected) in cases {
            let refused = Secret::from_command(words).unwrap_err().to_string();
            assert!(refused.contains(expected), "{words:?}: {refused}");
            assert!(!refused.contains("hunter2"), "{refused}");
        }
    }

    #[test]
    fn a_command_that_does_not_end_is_ended_with_its_children() {
        let marker = tempfile::tempdir().unwrap();
        let pids = marker.path().join("pids");
        let script = format!("sleep 600 & echo $! > {}; wait", pids.display());
        // As long as the shell takes to say whom it started.
        let times = [300, 3_000, 30_000].map(Duration::from_millis);
        let found = times.into_iter().find_map(|time| {
            let refused = sources::told_by(&["sh", "-c", &script], time);
            assert!(refused.unwrap_err().to_string().contains("gave no answer"));
            std::fs::read_to_string(&pids).ok()?.trim().parse().ok()
        });
        let pid: i32 = found.expect("the shell said nothing");
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        // It is a zombie until init reaps it, and may not be signalled away at once.
        for _ in 0..1000 {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
            if stat.is_err() || stat.is_ok_and(|stat| stat.contains(") Z ")) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("its child lives on");
    }

    #[test]
    fn what_is_no_file_of_this_users_or_is_too_long_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        let write = |bytes: u64| {
            std::fs::write(&file, "x".repeat(bytes as usize)).unwrap();
            std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
            Secret::from_file(&file)
        };
        assert_eq!(write(SECRET_BYTES_MAX).unwrap().expose().len() as u64, SECRET_BYTES_MAX);
        let long = write(SECRET_BYTES_MAX + 1);
        assert!(matches!(long, Err(SecretError::NotASecretFile { .. })), "{long:?}");
        let no_file = Secret::from_file(Path::new("/dev/zero"));
        assert!(matches!(no_file, Err(SecretError::NotASecretFile { .. })), "{no_file:?}");
        let no_file = Secret::from_file(folder.path());
        assert!(matches!(no_file, Err(SecretError::NotASecretFile { .. })), "{no_file:?}");

        write(8).unwrap();
        if rustix::fs::chown(&file, Some(rustix::fs::Uid::from_raw(64_123)), None).is_err() {
            eprintln!("SKIPPED in part: only root gives files away");
            return;
        }
        let foreign = Secret::from_file(&file);
        assert!(matches!(foreign, Err(SecretError::ForeignOwner { owner: 64_123, .. })));
    }
}
