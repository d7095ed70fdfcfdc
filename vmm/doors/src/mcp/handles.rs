//! Grants by short names. A client gets the name; the token stays here.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

/// Grants that one door remembers; the oldest is forgotten first.
const HANDLES_MAX: usize = 64;
/// How long a grant is good for.
pub(super) const VALID: Duration = Duration::from_secs(3600);

/// The grants of one door.
#[derive(Debug, Default)]
pub(super) struct Handles(VecDeque<Handle>);

struct Handle {
    name: String,
    token: Vec<u8>,
    ends: Instant,
}

impl Handles {
    /// Remembers a grant that was issued just now, and names it.
    pub(super) fn insert(&mut self, token: Vec<u8>, now: Instant) -> io::Result<String> {
        let name = random_name()?;
        self.0.retain(|handle| handle.ends > now);
        self.0.truncate(HANDLES_MAX - 1);
        self.0.push_front(Handle { name: name.clone(), token, ends: now + VALID });
        Ok(name)
    }

    /// The grant of this name, unless it is over.
    pub(super) fn token(&self, name: &str, now: Instant) -> Option<&[u8]> {
        let handle = self.0.iter().find(|handle| handle.name == name)?;
        (handle.ends > now).then_some(&*handle.token)
    }
}

/// 64 random bits: too many to guess, few enough for a model to repeat.
pub(super) fn random_name() -> io::Result<String> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(format!("{:016x}", u64::from_be_bytes(bytes)))
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Handle({} bytes)", self.token.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_names_its_grant_until_that_is_over() {
        let now = Instant::now();
        let mut handles = Handles::default();
        let first = handles.insert(vec![1], now).unwrap();
        let second = handles.insert(vec![2], now).unwrap();
        assert_ne!(first, second);
        assert_eq!(handles.token(&first, now), Some(&[1][..]));
        assert_eq!(handles.token(&second, now + VALID - Duration::from_secs(1)), Some(&[2][..]));
        assert_eq!(handles.token(&second, now + VALID), None);
        assert_eq!(handles.token("", now), None);
    }

    #[test]
    fn the_oldest_grant_is_forgotten_first() {
        let now = Instant::now();
        let mut handles = Handles::default();
        let names: Vec<_> =
            (0..=HANDLES_MAX).map(|_| handles.insert(Vec::new(), now).unwrap()).collect();
        assert!(handles.token(&names[0], now).is_none());
        assert!(names[1..].iter().all(|name| handles.token(name, now).is_some()));
    }

    #[test]
    fn a_grant_is_not_shown() {
        let mut handles = Handles::default();
        let name = handles.insert(b"secret".to_vec(), Instant::now()).unwrap();
        let shown = format!("{handles:?}");
        assert!(!shown.contains("secret") && !shown.contains(&name) && !shown.contains("115"));
    }
}
