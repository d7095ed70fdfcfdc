//! Grants that outlive their door: some clients start a door anew for each call, so that
//! the one that is told of a grant is not the one that found it.
//!
//! One file for each, which has the handle's name, mode 0600. The folder is the door's own
//! user's, as whoever gives it has seen. How long a grant is good for, the broker decides;
//! files that are older are passed over, and removed now and then.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::SystemTime;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use forge_protocol::limits::GRANT_BYTES_MAX;
use serde::{Deserialize, Serialize};

use super::{Grant, VALID};

/// Grants of one folder. A client that searches before each run has as many in an hour.
const KEPT_MAX: usize = 1024;

/// After so many more it is looked for those that are over.
const SWEPT_EACH: usize = 64;

/// Where the grants of a principal outlive its doors.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    principal: String,
    /// How many this door has kept.
    kept: usize,
}

/// What the file of a kept grant contains.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    principal: String,
    session: String,
    /// The grant's token, in base64.
    token: String,
}

impl Folder {
    pub(super) fn new(path: PathBuf, principal: &str) -> Self {
        Self { path, principal: principal.into(), kept: 0 }
    }

    /// Keeps a grant that was issued just now.
    ///
    /// # Errors
    /// If there is no room for it.
    pub(super) fn keep(&mut self, name: &str, grant: &Grant, now: SystemTime) -> io::Result<()> {
        if self.kept.is_multiple_of(SWEPT_EACH) {
            // What cannot be removed is over all the same.
            let _ = self.forget(now);
        }
        self.kept += 1;
        let kept = Kept {
            principal: self.principal.clone(),
            session: grant.session.clone(),
            token: BASE64_STANDARD.encode(&grant.token),
        };
        let path = self.path.join(name);
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
        file.write_all(&serde_json::to_vec(&kept)?).inspect_err(|_| {
            // Half of one is none.
            let _ = fs::remove_file(&path);
        })
    }

    /// The grant that a door of this principal's gave this name.
    pub(super) fn grant(&self, name: &str, now: SystemTime) -> Option<Grant> {
        if !is_name(name) {
            return None;
        }
        let file = File::open(self.path.join(name)).ok()?;
        if is_over(file.metadata().ok()?.modified().ok()?, now) {
            return None;
        }
        let mut text = Vec::new();
        file.take(2 * u64::from(GRANT_BYTES_MAX)).read_to_end(&mut text).ok()?;
        let Kept { principal, session, token } = serde_json::from_slice(&text).ok()?;
        let token = BASE64_STANDARD.decode(token).ok()?;
        (principal == self.principal).then_some(Grant { token, session })
    }

    /// Removes what is over, and the oldest of too many.
    fn forget(&self, now: SystemTime) -> io::Result<()> {
        let mut kept = Vec::new();
        for entry in fs::read_dir(&self.path)?.flatten() {
            // Another door may have removed it meanwhile.
            if let (Some(_), Ok(Ok(since))) = (
                entry.file_name().to_str().filter(|name| is_name(name)),
                entry.metadata().map(|it| it.modified()),
            ) {
                kept.push((since, entry.path()));
            }
        }
        kept.sort_unstable();
        let beyond = (kept.len() + 1).saturating_sub(KEPT_MAX);
        for (at, (since, path)) in kept.into_iter().enumerate() {
            if at < beyond || is_over(since, now) {
                let _ = fs::remove_file(path);
            }
        }
        Ok(())
    }
}

/// One of the future is of a clock that was set back: the broker knows better.
fn is_over(since: SystemTime, now: SystemTime) -> bool {
    now.duration_since(since).is_ok_and(|age| age > VALID)
}

/// Whether a handle's name could be this: clients choose what they ask for, and ask for
/// no other file.
fn is_name(name: &str) -> bool {
    name.len() == 16 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use super::*;

    const NAME: &str = "5e0b7c1d9a44f203";

    fn grant() -> Grant {
        Grant { token: vec![7; 300], session: "mcp-1".into() }
    }

    /// One that nobody has used.
    fn folder(of: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("handles-{of}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        let path = path.join("handles");
        fs::create_dir_all(&path).unwrap();
        Folder::new(path, "alice")
    }

    fn gone(folder: &Folder) {
        fs::remove_dir_all(folder.path.parent().unwrap()).unwrap();
    }

    #[test]
    fn a_grant_is_known_to_the_next_door_of_its_principal_for_as_long_as_it_is_good() {
        let now = SystemTime::now();
        let mut one = folder("next");
        one.keep(NAME, &grant(), now).unwrap();
        let next = Folder::new(one.path.clone(), "alice");
        assert_eq!(next.grant(NAME, now), Some(grant()));
        assert_eq!(next.grant(NAME, now + VALID + Duration::from_secs(5)), None);
        assert_eq!(Folder::new(one.path.clone(), "bob").grant(NAME, now), None);
        assert_eq!(next.grant("0000000000000000", now), None);
        let file = fs::metadata(one.path.join(NAME)).unwrap();
        assert_eq!(file.permissions().mode() & 0o777, 0o600);
        gone(&one);
    }

    #[test]
    fn no_name_leads_to_another_file() {
        let mut one = folder("names");
        one.keep(NAME, &grant(), SystemTime::now()).unwrap();
        fs::rename(one.path.join(NAME), one.path.parent().unwrap().join("other")).unwrap();
        fs::create_dir(one.path.join("0123456789abcdef")).unwrap();
        fs::write(one.path.join("00000000000000aa"), "{\"principal\": \"alice\"}").unwrap();
        for name in [
            "../other",
            "",
            ".",
            "other",
            "0123456789abcdef",
            "00000000000000aa",
            "0123456789ABCDEF",
        ] {
            assert_eq!(one.grant(name, SystemTime::now()), None, "{name}");
        }
        gone(&one);
    }

    #[test]
    fn what_is_over_is_removed_and_so_is_the_oldest_of_too_many_and_nothing_else() {
        let mut one = folder("over");
        let now = SystemTime::now();
        let put = |name: &str, age: Duration| {
            let file = File::create(one.path.join(name)).unwrap();
            file.set_modified(now - age).unwrap();
        };
        put("ffffffffffffffaa", VALID + Duration::from_secs(60));
        put("notes.txt", VALID * 2);
        for number in 0..KEPT_MAX {
            put(&format!("{number:016x}"), Duration::from_secs(number as u64));
        }
        one.keep(NAME, &grant(), now).unwrap();
        let left = |name: &str| one.path.join(name).exists();
        assert!(left(NAME) && left("notes.txt") && left("0000000000000000"));
        let oldest = format!("{:016x}", KEPT_MAX - 1);
        assert!(!left("ffffffffffffffaa") && !left(&oldest));
        gone(&one);
    }
}
