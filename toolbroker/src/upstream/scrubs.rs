//! The credentials that leave nothing a server says: those of the
//! configuration, of all servers, and the access tokens fetched since.

use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use crate::secret::{Scrubber, Secret};

/// Fetched tokens that are still looked for: the last ones, and those before
/// them that a server may not have forgotten.
const TOKENS_MAX: usize = 64;

/// A scrubber that learns.
#[derive(Debug)]
pub struct Scrubs {
    fixed: Vec<Secret>,
    now: Mutex<(Vec<Secret>, Arc<Scrubber>)>,
}

impl Scrubs {
    /// Looks for these values.
    #[must_use]
    pub fn new(fixed: Vec<Secret>) -> Arc<Self> {
        let scrubber = Arc::new(Scrubber::new(fixed.iter().cloned()));
        Arc::new(Self { fixed, now: Mutex::new((Vec::new(), scrubber)) })
    }

    /// Looks for this token as well from now on.
    pub fn learn(&self, token: &Secret) {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        let (tokens, scrubber) = &mut *now;
        if tokens.len() == TOKENS_MAX {
            tokens.remove(0);
        }
        tokens.push(token.clone());
        *scrubber = Arc::new(Scrubber::new(self.fixed.iter().chain(tokens.iter()).cloned()));
    }

    /// The scrubber for everything that is known now.
    #[must_use]
    pub fn scrubber(&self) -> Arc<Scrubber> {
        Arc::clone(&self.now.lock().unwrap_or_else(PoisonError::into_inner).1)
    }

    /// Text without them.
    #[must_use]
    pub fn text(&self, text: &str) -> String {
        self.scrubber().text(text)
    }

    /// JSON without them.
    #[must_use]
    pub fn json(&self, value: Value) -> Value {
        self.scrubber().json(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_fetched_later_is_removed_as_well() {
        let secret = |text: &str| Secret::new(text.to_owned()).unwrap();
        let scrubs = Scrubs::new(vec![secret("hunter2")]);
        assert!(scrubs.text("hunter2 token-1").contains("token-1"));
        scrubs.learn(&secret("token-1"));
        let clean = scrubs.text("hunter2 token-1");
        assert!(!clean.contains("hunter2") && !clean.contains("token-1"), "{clean}");
        for number in 0..2 * TOKENS_MAX {
            scrubs.learn(&secret(&format!("later-{number}")));
        }
        assert!(!scrubs.text("hunter2").contains("hunter2"));
    }
}
