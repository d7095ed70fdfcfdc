//! Grants by short names. A client gets the name; the token stays here.

mod folder;

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use folder::Folder;

/// Grants that one door remembers; the oldest is forgotten first.
const HANDLES_MAX: usize = 64;
/// How long a grant is good for.
pub(super) const VALID: Duration = Duration::from_secs(3600);

/// What stands behind a name.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Grant {
    pub(super) token: Vec<u8>,
    /// The one session that it is good in.
    pub(super) session: String,
}

/// The grants of one door.
#[derive(Debug, Default)]
pub(super) struct Handles {
    recent: VecDeque<Handle>,
    /// Where they outlive the door.
    folder: Option<Folder>,
}

struct Handle {
    name: String,
    grant: Grant,
    ends: Instant,
}

impl Handles {
    /// Of a principal whose grants are good at its next door too, which has the same
    /// folder: one that is there, and its user's alone to write.
    pub(super) fn lasting(folder: PathBuf, principal: &str) -> Self {
        Self { folder: Some(Folder::new(folder, principal)), ..Self::default() }
    }

    /// Remembers a grant that was issued just now, and names it.
    pub(super) fn insert(&mut self, grant: Grant, now: Instant) -> io::Result<String> {
        let name = random_name()?;
        if let Some(folder) = &mut self.folder
            && let Err(error) = folder.keep(&name, &grant, SystemTime::now())
        {
            tracing::warn!(%error, "a grant is good at this door alone: it cannot be kept");
        }
        self.recent.retain(|handle| handle.ends > now);
        self.recent.truncate(HANDLES_MAX - 1);
        self.recent.push_front(Handle { name: name.clone(), grant, ends: now + VALID });
        Ok(name)
    }

    /// The grant of this name, unless it is over.
    pub(super) fn grant(&self, name: &str, now: Instant) -> Option<Grant> {
        let recent = self.recent.iter().find(|handle| handle.name == name);
        match (recent, &self.folder) {
            (Some(handle), _) => (handle.ends > now).then(|| handle.grant.clone()),
            (None, Some(folder)) => folder.grant(name, SystemTime::now()),
            (None, None) => None,
        }
    }
}

/// 64 random bits: too many to guess, few enough for a model to repeat.
pub(super) fn random_name() -> io::Result<String> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(format!("{:016x}", u64::from_be_bytes(bytes)))
}

impl std::fmt::Debug for Grant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grant({} bytes)", self.token.len())
    }
}

/// Without its name, which is as good as the grant.
impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.grant.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(token: &[u8]) -> Grant {
        Grant { token: token.to_vec(), session: "s".into() }
    }

    #[test]
    fn a_handle_names_its_grant_until_that_is_over() {
        let now = Instant::now();
        let mut handles = Handles::default();
        let first = handles.insert(grant(&[1]), now).unwrap();
        let second = handles.insert(grant(&[2]), now).unwrap();
        assert_ne!(first, second);
        assert_eq!(handles.grant(&first, now), Some(grant(&[1])));
        assert_eq!(handles.grant(&second, now + VALID - Duration::from_secs(1)), Some(grant(&[2])));
        assert_eq!(handles.grant(&second, now + VALID), None);
        assert_eq!(handles.grant("", now), None);
    }

    #[test]
    fn the_oldest_grant_is_forgotten_first() {
        let now = Instant::now();
        let mut handles = Handles::default();
        let names: Vec<_> =
            (0..=HANDLES_MAX).map(|_| handles.insert(grant(&[]), now).unwrap()).collect();
        assert!(handles.grant(&names[0], now).is_none());
        assert!(names[1..].iter().all(|name| handles.grant(name, now).is_some()));
    }

    #[test]
    fn a_grant_is_not_shown() {
        let mut handles = Handles::default();
        let name = handles.insert(grant(b"secret"), Instant::now()).unwrap();
        let shown = format!("{handles:?}");
        assert!(!shown.contains("secret") && !shown.contains(&name) && !shown.contains("115"));
    }
}
