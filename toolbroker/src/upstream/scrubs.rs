//! The credentials that leave nothing a server says: those of the
//! configuration, of all servers, and the access tokens fetched since.
//!
//! Who hands a token out chooses its text. One of an authorization server that the
//! operator named leaves nothing that any server says. One that a tool server issued
//! itself leaves nothing that this server says, and only that: or it would have words
//! taken out of the others' answers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex as StdMutex};

use serde_json::Value;
use tokio::sync::Mutex;

use crate::beside;
use crate::locks::lock;
use crate::secret::{Scrubber, Secret};

/// Fetched tokens of one client that are still looked for: the one it uses, and
/// those before it that a server may not have forgotten.
const TOKENS_MAX: usize = 16;
/// The same in bytes, since looking for one takes many times its length.
const TOKENS_BYTES_MAX: usize = 64 * 1024;

/// Who hands tokens out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IssuedBy {
    /// An authorization server that the operator named.
    Named,
    /// The server that they are for.
    Itself,
}

/// A scrubber that learns: that of one server, or of none.
#[derive(Debug)]
pub struct Scrubs {
    all: Arc<All>,
    /// What the server itself issued.
    own: Fetched,
}

/// What leaves nothing that any server says.
#[derive(Debug)]
struct All {
    fixed: Scrubber,
    fetched: Fetched,
}

#[derive(Debug, Default)]
struct Fetched {
    tokens: Mutex<Tokens>,
    now: StdMutex<Option<Scrubber>>,
}

/// By client, so that no server makes the broker forget another one's.
type Tokens = BTreeMap<String, Vec<Secret>>;

impl Scrubs {
    /// Looks for these values, in what any server says.
    #[must_use]
    pub fn new(fixed: Vec<Secret>) -> Arc<Self> {
        let all = All { fixed: Scrubber::new(fixed), fetched: Fetched::default() };
        Arc::new(Self { all: Arc::new(all), own: Fetched::default() })
    }

    /// That of one more server.
    #[must_use]
    pub fn of_another(&self) -> Arc<Self> {
        Arc::new(Self { all: Arc::clone(&self.all), own: Fetched::default() })
    }

    /// Looks from now on for this token as well, which `client` uses.
    pub(super) async fn learn(&self, client: &str, token: &Secret, issuer: IssuedBy) {
        match issuer {
            IssuedBy::Named => self.all.fetched.learn(client, token).await,
            IssuedBy::Itself => self.own.learn(client, token).await,
        }
    }

    /// The scrubber for everything that is known now.
    #[must_use]
    pub fn scrubber(&self) -> Scrubber {
        let fetched = [self.all.fetched.now(), self.own.now()];
        fetched.iter().flatten().fold(self.all.fixed.clone(), |all, more| all.and(more))
    }

    /// The one for what the server itself issued, if it did.
    pub(super) fn own(&self) -> Option<Scrubber> {
        self.own.now()
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

impl Fetched {
    /// Whoever goes away meanwhile leaves all as it was.
    async fn learn(&self, client: &str, token: &Secret) {
        let mut tokens = self.tokens.lock().await;
        let mut own = tokens.get(client).cloned().unwrap_or_default();
        let known = own.iter().position(|known| known.expose() == token.expose());
        // The one in use is the last to be forgotten.
        if let Some(known) = known {
            own[known..].rotate_left(1);
            tokens.insert(client.to_owned(), own);
            return;
        }
        own.push(token.clone());
        let bytes = |own: &[Secret]| own.iter().map(|it| it.expose().len()).sum::<usize>();
        while own.len() > TOKENS_MAX || (own.len() > 1 && bytes(&own) > TOKENS_BYTES_MAX) {
            own.remove(0);
        }
        let others = tokens.iter().filter(|(of, _)| *of != client).flat_map(|(_, of)| of);
        let sought: Vec<Secret> = others.chain(&own).cloned().collect();
        // Long work, if whoever issues them wants it to be.
        let scrubber = beside(|| Scrubber::new(sought)).await;
        *lock(&self.now) = Some(scrubber);
        tokens.insert(client.to_owned(), own);
    }

    fn now(&self) -> Option<Scrubber> {
        lock(&self.now).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(text: &str) -> Secret {
        Secret::new(text.to_owned()).unwrap()
    }

    #[tokio::test]
    async fn a_token_fetched_later_is_removed_as_well() {
        let scrubs = Scrubs::new(vec![secret("hunter2")]);
        assert!(scrubs.text("hunter2 token-1").contains("token-1"));
        scrubs.learn("a", &secret("token-1"), IssuedBy::Named).await;
        let clean = scrubs.text("hunter2 token-1");
        assert!(!clean.contains("hunter2") && !clean.contains("token-1"), "{clean}");
        for number in 0..2 * TOKENS_MAX {
            scrubs.learn("b", &secret(&format!("later-{number}.")), IssuedBy::Named).await;
        }
        assert!(!scrubs.text("hunter2").contains("hunter2"));
        assert!(!scrubs.text("token-1").contains("token-1"), "another client's are no matter");
        assert!(scrubs.text("later-0.").contains("later-0."), "they are bounded");
        let of_another = scrubs.of_another();
        assert!(!of_another.text("token-1").contains("token-1"), "nor does another server say it");
    }

    #[tokio::test]
    async fn what_a_server_issues_itself_is_removed_from_what_it_says_and_nobody_else() {
        let all = Scrubs::new(vec![secret("hunter2")]);
        let (its, others) = (all.of_another(), all.of_another());
        its.learn("a", &secret("reserved"), IssuedBy::Itself).await;
        let said = "hunter2 reserved";
        for (scrubs, is_left) in [(&its, false), (&others, true), (&all, true)] {
            let left = scrubs.text(said);
            assert_eq!((left.contains("reserved"), left.contains("hunter2")), (is_left, false));
        }
        assert!(its.own().is_some() && others.own().is_none());
    }

    #[tokio::test]
    async fn long_tokens_are_fewer() {
        let scrubs = Scrubs::new(Vec::new());
        let long = |token: u32| {
            let text: String = (0..).map(|part| format!("{token}{part:05}")).take(4_000).collect();
            secret(&text[..TOKENS_BYTES_MAX / 3])
        };
        for token in 0..4 {
            scrubs.learn("a", &long(token), IssuedBy::Named).await;
        }
        let is_left = |token| scrubs.text(long(token).expose()) == long(token).expose();
        assert_eq!([0, 1, 2, 3].map(is_left), [true, false, false, false]);
        // The one in use is looked for however long it is.
        let longest = "0123456789".repeat(TOKENS_BYTES_MAX / 10 + 1);
        scrubs.learn("a", &secret(&longest), IssuedBy::Named).await;
        assert!(scrubs.text(&longest) != longest);
    }

    #[tokio::test]
    async fn a_token_that_is_fetched_again_makes_nobody_forget_another() {
        let scrubs = Scrubs::new(Vec::new());
        scrubs.learn("a", &secret("token-1"), IssuedBy::Named).await;
        scrubs.learn("a", &secret("token-2"), IssuedBy::Named).await;
        for _ in 0..2 * TOKENS_MAX {
            scrubs.learn("a", &secret("token-1"), IssuedBy::Named).await;
        }
        for number in 0..TOKENS_MAX - 1 {
            scrubs.learn("a", &secret(&format!("later-{number}.")), IssuedBy::Named).await;
        }
        assert!(!scrubs.text("token-1").contains("token-1"), "it was the last to be used");
        assert!(scrubs.text("token-2").contains("token-2"));
    }
}
