//! Key files: PKCS#8 and SPKI PEM, as `openssl` and `wasmsign2` write and
//! read them.

use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use forge_protocol::signature::{KeyError, SignerKey, TrustKey, TrustKeys};

/// A private key file is larger than this only if it is none.
const KEY_FILE_BYTES_MAX: u64 = 16 * 1024;

/// Why a key file is not used or not made.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// It cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It holds no such key.
    #[error("{path}: {source}")]
    Key {
        /// The file.
        path: PathBuf,
        /// What is wrong with the key.
        source: KeyError,
    },
    /// It holds the other half of a pair.
    #[error("{path}: {half}")]
    OtherHalf {
        /// The file.
        path: PathBuf,
        /// What it holds, and what belongs here.
        half: Half,
    },
    /// A key of this name is there already.
    #[error(
        "{path}: there is such a file already, and no key is overwritten: give another folder, \
         or move this pair away if nothing is signed with it any more"
    )]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// Others can read a private key.
    #[error("{path}: mode {mode:03o} lets others read this private key; run: chmod 600 {path}")]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// No keys at all.
    #[error(transparent)]
    Trust(#[from] KeyError),
}

/// A half of a key pair, where the other one belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// A private key among those that programs are trusted by.
    Private,
    /// A public key to sign with.
    Public,
}

impl Half {
    /// By its label alone: a key of another kind is as much in the wrong place.
    fn of(pem: &str) -> Option<Self> {
        let mut labels = pem.lines().filter_map(|line| line.strip_prefix("-----BEGIN "));
        let label = labels.next()?.trim_end();
        match label.strip_suffix(" KEY-----")? {
            label if label.ends_with("PRIVATE") => Some(Self::Private),
            label if label.ends_with("PUBLIC") => Some(Self::Public),
            _ => None,
        }
    }
}

impl fmt::Display for Half {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Private => {
                "this is a private key, and programs are trusted by the public one: give its \
                 other half, which keygen names signer.pub, and keep this one to yourself"
            }
            Self::Public => {
                "this is a public key, and programs are signed with the private one: give its \
                 other half, which keygen names signer.pem"
            }
        })
    }
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> KeyFileError {
    let path = path.to_owned();
    move |source| KeyFileError::Io { path, source }
}

/// Reads a file as text, and what the file is that was read. One that is no text
/// is no key either, and its parser says so better than a complaint about UTF-8.
fn read(path: &Path) -> Result<(String, fs::Metadata), KeyFileError> {
    use io::Read as _;
    let mut bytes = Vec::new();
    let read = fs::File::open(path).and_then(|file| {
        let metadata = file.metadata()?;
        file.take(KEY_FILE_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(metadata)
    });
    let metadata = read.map_err(io_error(path))?;
    let text = String::from_utf8_lossy(&bytes);
    // The mark that some editors begin a file with is no part of it.
    Ok((text.trim_start_matches('\u{feff}').to_owned(), metadata))
}

/// Reads public keys and collects them.
///
/// # Errors
/// [`KeyFileError`], naming the file.
pub fn read_trust(paths: &[PathBuf]) -> Result<TrustKeys, KeyFileError> {
    let mut keys = Vec::new();
    for path in paths {
        let (pem, _) = read(path)?;
        if let Some(half @ Half::Private) = Half::of(&pem) {
            return Err(KeyFileError::OtherHalf { path: path.clone(), half });
        }
        let key = TrustKey::from_pem(&pem)
            .map_err(|source| KeyFileError::Key { path: path.clone(), source })?;
        keys.push(key);
    }
    Ok(TrustKeys::new(keys)?)
}

/// Reads a private key that only its owner can read.
///
/// # Errors
/// [`KeyFileError`], naming the file.
pub fn read_signer(path: &Path) -> Result<SignerKey, KeyFileError> {
    let (pem, metadata) = read(path)?;
    // What is no private key may be as open as it likes.
    if let Some(half @ Half::Public) = Half::of(&pem) {
        return Err(KeyFileError::OtherHalf { path: path.to_owned(), half });
    }
    let signer = SignerKey::from_pem(&pem)
        .map_err(|source| KeyFileError::Key { path: path.to_owned(), source })?;
    let mode = metadata.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(KeyFileError::Exposed { path: path.to_owned(), mode });
    }
    Ok(signer)
}

/// Makes a key pair: `signer.pem`, which only its owner can read, and
/// `signer.pub`. Existing files are never overwritten.
///
/// # Errors
/// [`KeyFileError`], naming the file.
pub fn generate(directory: &Path) -> Result<(PathBuf, PathBuf), KeyFileError> {
    fs::create_dir_all(directory).map_err(io_error(directory))?;
    let key = SignerKey::from_secret(&random().map_err(io_error(Path::new("/dev/urandom")))?);
    let private = directory.join("signer.pem");
    let public = directory.join("signer.pub");
    write_new(&private, 0o600, &key.to_pem())?;
    if let Err(error) = write_new(&public, 0o644, &key.trust_key().to_pem()) {
        // Half a pair looks like a pair. Nobody has signed with it yet.
        let _ = fs::remove_file(&private);
        return Err(error);
    }
    Ok((private, public))
}

fn write_new(path: &Path, mode: u32, pem: &str) -> Result<(), KeyFileError> {
    let opened = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let mut file = opened.map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => KeyFileError::Exists { path: path.to_owned() },
        _ => io_error(path)(source),
    })?;
    file.write_all(pem.as_bytes()).and_then(|()| file.sync_all()).map_err(|source| {
        let _ = fs::remove_file(path);
        io_error(path)(source)
    })
}

/// Random bytes from the kernel.
///
/// # Errors
/// If the kernel gives none.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0u8; N];
    let mut filled = 0;
    while filled < N {
        // SAFETY: the rest of the array is writable.
        let got = unsafe { libc::getrandom(bytes[filled..].as_mut_ptr().cast(), N - filled, 0) };
        match usize::try_from(got) {
            Ok(count) => filled += count,
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A folder that is gone after the test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let name = format!("forge-keys-{}-{name}", std::process::id());
            Self(std::env::temp_dir().join(name))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_key_in_the_place_of_its_other_half_is_told_as_such() {
        let folder = Folder::new("halves");
        let (private, public) = generate(&folder.0).unwrap();
        let refused = read_trust(std::slice::from_ref(&private)).unwrap_err().to_string();
        assert!(refused.contains("signer.pem: this is a private key"), "{refused}");
        assert!(refused.contains("which keygen names signer.pub"), "{refused}");
        // Public keys are for all to read, so its mode is not what is wrong.
        let refused = read_signer(&public).unwrap_err().to_string();
        assert!(refused.contains("signer.pub: this is a public key"), "{refused}");
        assert!(refused.contains("which keygen names signer.pem"), "{refused}");
        // Of whatever kind the key is.
        let rsa = folder.0.join("rsa");
        fs::write(&rsa, "a comment\n-----BEGIN RSA PRIVATE KEY-----\r\nAA==\n").unwrap();
        let refused = read_trust(&[rsa]).unwrap_err();
        assert!(matches!(refused, KeyFileError::OtherHalf { half: Half::Private, .. }));
    }

    #[test]
    fn a_pair_is_made_whole_or_not_at_all_and_over_nothing() {
        let folder = Folder::new("pair");
        let (private, public) = generate(&folder.0).unwrap();
        let made = [fs::read(&private).unwrap(), fs::read(&public).unwrap()];
        let refused = generate(&folder.0).unwrap_err().to_string();
        assert!(refused.contains("signer.pem: there is such a file already"), "{refused}");
        assert_eq!([fs::read(&private).unwrap(), fs::read(&public).unwrap()], made);
        fs::remove_file(&private).unwrap();
        let refused = generate(&folder.0).unwrap_err().to_string();
        assert!(refused.contains("signer.pub: there is such a file already"), "{refused}");
        assert!(!private.exists(), "a private key was left without its public half");
        assert_eq!(fs::read(&public).unwrap(), made[1]);
    }
}
