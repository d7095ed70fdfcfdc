//! The credentials that leave nothing a server says: those of the
//! configuration, of all servers, and the access tokens fetched since.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use crate::secret::{Scrubber, Secret};

/// Fetched tokens of one client that are still looked for: the one it uses, and
/// those before it that a server may not have forgotten.
const TOKENS_MAX: usize = 16;

/// A scrubber that learns.
#[derive(Debug)]
pub struct Scrubs {
    fixed: Vec<Secret>,
    now: Mutex<(Tokens, Arc<Scrubber>)>,
}

/// By client, so that no server makes the broker forget another one's.
type Tokens = BTreeMap<String, Vec<Secret>>;

impl Scrubs {
    /// Looks for these values.
    #[must_use]
    pub fn new(fixed: Vec<Secret>) -> Arc<Self> {
        let scrubber = Arc::new(Scrubber::new(fixed.iter().cloned()));
        Arc::new(Self { fixed, now: Mutex::new((Tokens::new(), scrubber)) })
    }

    /// Looks from now on for this token as well, which `client` uses.
    pub fn learn(&self, client: &str, token: &Secret) {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        let (tokens, scrubber) = &mut *now;
        let own = tokens.entry(client.to_owned()).or_default();
        if let Some(known) = own.iter().position(|known| known.expose() == token.expose()) {
            // The one in use is the last to be forgotten.
            own[known..].rotate_left(1);
            return;
        }
        if own.len() == TOKENS_MAX {
            own.remove(0);
        }
        own.push(token.clone());
        let tokens = tokens.values().flatten();
        *scrubber = Arc::new(Scrubber::new(self.fixed.iter().chain(tokens).cloned()));
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
        scrubs.learn("a", &secret("token-1"));
        let clean = scrubs.text("hunter2 token-1");
        assert!(!clean.contains("hunter2") && !clean.contains("token-1"), "{clean}");
        for number in 0..2 * TOKENS_MAX {
            scrubs.learn("b", &secret(&format!("later-{number}.")));
        }
        assert!(!scrubs.text("hunter2").contains("hunter2"));
        assert!(!scrubs.text("token-1").contains("token-1"), "another client's are no matter");
        assert!(scrubs.text("later-0.").contains("later-0."), "they are bounded");
    }

    #[test]
    fn a_token_that_is_fetched_again_makes_nobody_forget_another() {
        let secret = |text: &str| Secret::new(text.to_owned()).unwrap();
        let scrubs = Scrubs::new(Vec::new());
        scrubs.learn("a", &secret("token-1"));
        scrubs.learn("a", &secret("token-2"));
        for _ in 0..2 * TOKENS_MAX {
            scrubs.learn("a", &secret("token-1"));
        }
        for number in 0..TOKENS_MAX - 1 {
            scrubs.learn("a", &secret(&format!("later-{number}.")));
        }
        assert!(!scrubs.text("token-1").contains("token-1"), "it was the last to be used");
        assert!(scrubs.text("token-2").contains("token-2"));
    }
}
