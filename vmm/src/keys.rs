//! Key files: PKCS#8 and SPKI PEM, as `openssl` and `wasmsign2` write and
//! read them.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
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
        /// What is wrong.
        source: KeyError,
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

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> KeyFileError {
    let path = path.to_owned();
    move |source| KeyFileError::Io { path, source }
}

/// Reads a file as text. One that is no text is no key either, and its parser
/// says so better than a complaint about UTF-8.
fn read(path: &Path) -> Result<String, KeyFileError> {
    use io::Read as _;
    let mut bytes = Vec::new();
    fs::File::open(path)
        .and_then(|file| file.take(KEY_FILE_BYTES_MAX).read_to_end(&mut bytes))
        .map_err(io_error(path))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Reads public keys and collects them.
///
/// # Errors
/// [`KeyFileError`], naming the file.
pub fn read_trust(paths: &[PathBuf]) -> Result<TrustKeys, KeyFileError> {
    let mut keys = Vec::new();
    for path in paths {
        let key = TrustKey::from_pem(&read(path)?)
            .map_err(|source| KeyFileError::Key { path: path.clone(), source })?;
        keys.push(key);
    }
    Ok(TrustKeys::new(keys)?)
}

/// Collects keys from their bytes.
///
/// # Errors
/// [`KeyError`].
pub fn trust_from_bytes(keys: &[[u8; 32]]) -> Result<TrustKeys, KeyError> {
    let keys: Result<Vec<_>, _> = keys.iter().map(TrustKey::from_bytes).collect();
    TrustKeys::new(keys?)
}

/// Reads a private key that only its owner can read.
///
/// # Errors
/// [`KeyFileError`], naming the file.
pub fn read_signer(path: &Path) -> Result<SignerKey, KeyFileError> {
    let mode = fs::metadata(path).map_err(io_error(path))?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(KeyFileError::Exposed { path: path.to_owned(), mode });
    }
    SignerKey::from_pem(&read(path)?)
        .map_err(|source| KeyFileError::Key { path: path.to_owned(), source })
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
    for (path, mode, pem) in
        [(&private, 0o600, key.to_pem()), (&public, 0o644, key.trust_key().to_pem())]
    {
        fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(path)
            .and_then(|mut file| {
                file.write_all(pem.as_bytes())?;
                file.sync_all()
            })
            .map_err(io_error(path))?;
    }
    Ok((private, public))
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
