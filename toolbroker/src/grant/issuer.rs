//! The root key: what it signs, and what it verifies.

use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use biscuit_auth::builder::{self, Algorithm};
use biscuit_auth::{Biscuit, KeyPair, PublicKey, error};
use forge_protocol::limits::GRANT_BYTES_MAX;

use super::chain::{Chain, fact};
use super::shape::check_shape;
use super::{Grant, GrantError, Terms, check_clock};
use crate::secret::{SecretError, read_private};

/// The file in the state folder that holds the root key.
const ROOT_KEY_FILE: &str = "grant-root.pem";

/// Why the root key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RootKeyError {
    /// The key file cannot be read, or others may read it.
    #[error("the grant root key: {0}")]
    File(#[from] SecretError),
    /// The key file holds no key.
    #[error("the grant root key: {} holds no Ed25519 key in PKCS#8 PEM", file.display())]
    NotAKey {
        /// The file.
        file: PathBuf,
    },
    /// A new key cannot be written.
    #[error("the grant root key cannot be written to {}: {source}", file.display())]
    Write {
        /// The file.
        file: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// Issues and verifies grants with one root key.
pub struct Issuer {
    root: KeyPair,
}

impl std::fmt::Debug for Issuer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Issuer({})", self.public_key().print())
    }
}

impl Issuer {
    /// An issuer whose key lives as long as the process: no other process
    /// can verify its grants.
    #[must_use]
    pub fn ephemeral() -> Self {
        Self { root: KeyPair::new_with_algorithm(Algorithm::Ed25519) }
    }

    /// An issuer with the key in `state`, which is made if it is missing.
    ///
    /// # Errors
    /// [`RootKeyError`], naming the file.
    pub fn open(state: &Path) -> Result<Self, RootKeyError> {
        let file = state.join(ROOT_KEY_FILE);
        match read_private(&file) {
            Ok(pem) => Self::from_pem(&pem, &file),
            Err(SecretError::Unreadable { source, .. })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                let fresh = Self::ephemeral();
                if fresh
                    .save(state, &file)
                    .map_err(|source| RootKeyError::Write { file: file.clone(), source })?
                {
                    return Ok(fresh);
                }
                // Another broker was first: its key is the key.
                Self::from_pem(&read_private(&file)?, &file)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn from_pem(pem: &str, file: &Path) -> Result<Self, RootKeyError> {
        KeyPair::from_private_key_pem_with_algorithm(pem, Algorithm::Ed25519)
            .map(|root| Self { root })
            .map_err(|_| RootKeyError::NotAKey { file: file.to_owned() })
    }

    /// Writes the key beside `file` and links it there, so that `file` is
    /// there whole or not at all. `false` if it was there already.
    fn save(&self, state: &Path, file: &Path) -> io::Result<bool> {
        if !state.exists() {
            fs::create_dir_all(state)?;
            fs::set_permissions(state, Permissions::from_mode(0o700))?;
        }
        let pem = self.root.to_private_key_pem().map_err(io::Error::other)?;
        // Named for the key, which nobody else has.
        let own = crate::hex(&self.public_key().to_bytes()[..8]);
        let draft = state.join(format!(".{ROOT_KEY_FILE}.{own}"));
        let written = (|| {
            let mut opened =
                File::options().write(true).create_new(true).mode(0o600).open(&draft)?;
            opened.write_all(pem.as_bytes())?;
            opened.sync_all()?;
            match fs::hard_link(&draft, file) {
                Ok(()) => {
                    File::open(state)?.sync_all()?;
                    Ok(true)
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
                Err(error) => Err(error),
            }
        })();
        let _ = fs::remove_file(&draft);
        written
    }

    /// The key that verifies this issuer's grants.
    #[must_use]
    pub fn public_key(&self) -> PublicKey {
        self.root.public()
    }

    /// Signs a grant on `terms`, good from `now` on.
    ///
    /// # Errors
    /// [`GrantError`], if the terms cannot be met.
    pub fn issue(&self, terms: &Terms, now: SystemTime) -> Result<Vec<u8>, GrantError> {
        terms.check()?;
        let failed = |error: error::Token| GrantError::Issue(error.to_string());
        check_clock(now)?;
        let expires = now + Duration::from_secs(terms.valid_s);
        let mut token = Biscuit::builder()
            .fact(fact("principal", [builder::string(&terms.principal)]))
            .and_then(|token| token.fact(fact("expires", [builder::date(&expires)])))
            .and_then(|token| token.check("check if time($now), expires($end), $now < $end"))
            .map_err(failed)?;
        for tool in &terms.tools {
            let digest = builder::bytes(&tool.definition_sha256);
            token = token
                .fact(fact("tool", [builder::string(tool.name.as_str()), digest]))
                .map_err(failed)?;
            for constraint in &tool.constraints {
                let terms = [builder::string(tool.name.as_str()), builder::string(constraint)];
                token = token.fact(fact("constraint", terms)).map_err(failed)?;
            }
        }
        for (name, most) in [("calls_max", terms.calls_max), ("cost_max", terms.cost_max)] {
            if let Some(most) = most {
                token = token.fact(fact(name, [builder::int(most.into())])).map_err(failed)?;
            }
        }
        if let Some(session) = &terms.session {
            token = token.fact(fact("session", [builder::string(session)])).map_err(failed)?;
        }
        let bytes = token.build(&self.root).and_then(|token| token.to_vec()).map_err(failed)?;
        if bytes.len() > GRANT_BYTES_MAX as usize {
            return Err(GrantError::TooLarge { got: bytes.len() });
        }
        Ok(bytes)
    }

    /// Verifies a token and says what it allows at `now`.
    ///
    /// # Errors
    /// [`GrantError`].
    pub fn verify(&self, token: &[u8], now: SystemTime) -> Result<Grant, GrantError> {
        self.chain(token)?.grant(now)
    }

    /// Verifies a token's chain of signatures, and that its blocks have a
    /// shape whose evaluation is bounded.
    ///
    /// # Errors
    /// [`GrantError`].
    pub fn chain(&self, token: &[u8]) -> Result<Chain, GrantError> {
        if token.len() > GRANT_BYTES_MAX as usize {
            return Err(GrantError::TooLarge { got: token.len() });
        }
        let parsed = Biscuit::from(token, self.public_key())
            .map_err(|error| GrantError::Forged(error.to_string()))?;
        check_shape(token)?;
        Ok(Chain(parsed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grant::tests::{now, terms};

    #[test]
    fn a_clock_before_1970_is_an_error_and_no_panic() {
        let issuer = Issuer::ephemeral();
        let token = issuer.issue(&terms(), now()).unwrap();
        let lost = SystemTime::UNIX_EPOCH - Duration::from_secs(1);
        for refused in
            [issuer.issue(&terms(), lost).map(drop), issuer.verify(&token, lost).map(drop)]
        {
            assert!(refused.unwrap_err().to_string().contains("1970"));
        }
    }

    #[test]
    fn the_root_key_outlives_the_process_and_stays_private() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let token = Issuer::open(&state).unwrap().issue(&terms(), now()).unwrap();
        Issuer::open(&state).unwrap().verify(&token, now()).unwrap();

        let file = state.join(ROOT_KEY_FILE);
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(&state).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(fs::read_dir(&state).unwrap().count(), 1, "no draft is left");
        fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
        let refused = Issuer::open(&state).unwrap_err().to_string();
        assert!(refused.contains("chmod 600"), "{refused}");
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        fs::write(&file, "no key").unwrap();
        assert!(matches!(Issuer::open(&state), Err(RootKeyError::NotAKey { .. })));
    }

    #[test]
    fn brokers_that_start_together_agree_on_one_root_key() {
        let folder = tempfile::tempdir().unwrap();
        let keys: Vec<String> = std::thread::scope(|scope| {
            let open = || Issuer::open(folder.path()).unwrap().public_key().print();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
    }

    #[test]
    fn what_the_root_key_signed_and_does_not_say_what_a_grant_says_is_refused() {
        let issuer = Issuer::ephemeral();
        let tool =
            |name: &str, digest: &str| format!("tool(\"{name}\", hex:{});", digest.repeat(32));
        let alice = "principal(\"alice\");";
        let end = "expires(2027-01-15T08:01:00Z);";
        let find = tool("shop.find", "07");
        let many_tools: String = (0..257).map(|n| tool(&format!("shop.t{n}"), "07")).collect();
        let many_constraints: String =
            (0..129).map(|n| format!("constraint(\"shop.find\", \"/n<={n}\");")).collect();
        let verify = |source: &str| {
            let token = Biscuit::builder().code(source).unwrap().build(&issuer.root).unwrap();
            issuer.verify(&token.to_vec().unwrap(), now()).map(drop)
        };
        verify(&format!("{alice} {end} {find}")).unwrap();
        for (source, why) in [
            (format!("{end} {find}"), "not exactly one principal"),
            (format!("{alice} principal(\"bob\"); {end} {find}"), "not exactly one principal"),
            (format!("principal(\"\"); {end} {find}"), "a principal's name"),
            (format!("{alice} {find}"), "not exactly one end"),
            (format!("{alice} {end} expires(2028-01-01T00:00:00Z); {find}"), "not exactly one end"),
            (format!("{alice} {end} {find} {}", tool("shop.find", "08")), "one tool twice"),
            (format!("{alice} {end} {}", tool("find", "07")), "no tool name"),
            (format!("{alice} {end} tool(\"shop.find\", hex:07);"), "no SHA-256"),
            (format!("{alice} {end} {many_tools}"), "257 tools are too many"),
            (format!("{alice} {end} {find} {many_constraints}"), "129 constraints are too many"),
        ] {
            let refused = verify(&source).unwrap_err().to_string();
            assert!(refused.contains(why), "{why}: {refused}");
        }
    }
}
