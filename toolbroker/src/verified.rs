//! Grants that were verified before: what is expensive about a grant is its
//! chain of signatures and the evaluation of its checks, and a run's grant is
//! mostly one that was seen a moment ago.
//!
//! A token is known by the SHA-256 of all its bytes, so that nothing but the
//! very token that was verified is found again. Its end is looked at every
//! time. Where checks of the token depend on the time in any other way, only
//! the chain is remembered and the checks are evaluated anew. What is kept is
//! bounded; the token that was used least recently leaves first, and of a principal
//! who has more than half of all one of those: whoever holds a grant may make as many
//! of it as they like. Deliberately absent are refusals: a bad token costs its bearer
//! the same every time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sha2::{Digest as _, Sha256};

use crate::grant::{Chain, Grant, GrantError, Issuer};
use crate::locks::lock;

/// Tokens remembered.
const TOKENS_MAX: usize = 256;
/// Bytes of all remembered tokens and of their constraints together. A parsed
/// token takes a small multiple of its bytes; a constraint says itself what it
/// takes.
const TOKEN_BYTES_MAX: usize = 16 * 1024 * 1024;

/// An issuer's grants, verified once.
#[derive(Debug)]
pub struct Verified {
    issuer: Issuer,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    tokens: HashMap<[u8; 32], Entry>,
    bytes: usize,
    /// Counts looks, for the order of use.
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    standing: Standing,
    principal: String,
    token_bytes: usize,
    used: u64,
}

/// What is known of a token.
#[derive(Clone, Debug)]
enum Standing {
    /// It says this until it ends.
    Settled(Arc<Grant>),
    /// Its chain is good; what it says depends on the time.
    Timed(Arc<Chain>),
}

impl Verified {
    /// Nothing is known yet.
    #[must_use]
    pub fn new(issuer: Issuer) -> Self {
        Self { issuer, known: Mutex::default() }
    }

    /// The issuer.
    #[must_use]
    pub fn issuer(&self) -> &Issuer {
        &self.issuer
    }

    /// What a token allows at `now`, if that is known without any work.
    ///
    /// # Errors
    /// [`GrantError::Expired`].
    pub fn known(&self, token: &[u8], now: SystemTime) -> Option<Result<Arc<Grant>, GrantError>> {
        match self.look_up(&digest(token))? {
            Standing::Settled(grant) => Some(in_time(grant, now)),
            Standing::Timed(_) => None,
        }
    }

    /// What a token allows at `now`. Takes its time with a token that is not
    /// known.
    ///
    /// # Errors
    /// [`GrantError`].
    pub fn verify(&self, token: &[u8], now: SystemTime) -> Result<Arc<Grant>, GrantError> {
        let digest = digest(token);
        let chain = match self.look_up(&digest) {
            Some(Standing::Settled(grant)) => return in_time(grant, now),
            Some(Standing::Timed(chain)) => return chain.grant(now).map(Arc::new),
            None => self.issuer.chain(token)?,
        };
        let grant = Arc::new(chain.grant(now)?);
        let standing = if chain.ends_only() {
            Standing::Settled(Arc::clone(&grant))
        } else {
            Standing::Timed(Arc::new(chain))
        };
        let principal = &grant.claims().principal;
        self.remember(digest, principal, token.len() + grant.bytes(), standing);
        Ok(grant)
    }

    fn look_up(&self, digest: &[u8; 32]) -> Option<Standing> {
        let mut known = lock(&self.known);
        known.clock += 1;
        let clock = known.clock;
        let entry = known.tokens.get_mut(digest)?;
        entry.used = clock;
        Some(entry.standing.clone())
    }

    fn remember(&self, digest: [u8; 32], principal: &str, token_bytes: usize, standing: Standing) {
        let mut known = lock(&self.known);
        known.clock += 1;
        let principal = principal.to_owned();
        let entry = Entry { standing, principal, token_bytes, used: known.clock };
        known.bytes += token_bytes;
        if let Some(former) = known.tokens.insert(digest, entry) {
            known.bytes -= former.token_bytes;
        }
        while known.tokens.len() > TOKENS_MAX || known.bytes > TOKEN_BYTES_MAX {
            let Some(leaves) = known.leaves() else { return };
            if let Some(left) = known.tokens.remove(&leaves) {
                known.bytes -= left.token_bytes;
            }
        }
    }
}

impl Known {
    /// Which is forgotten next.
    fn leaves(&self) -> Option<[u8; 32]> {
        let newest = self.tokens.values().max_by_key(|entry| entry.used)?;
        let own = |entry: &Entry| entry.principal == newest.principal;
        let (mut count, mut bytes) = (0, 0);
        for entry in self.tokens.values().filter(|entry| own(entry)) {
            (count, bytes) = (count + 1, bytes + entry.token_bytes);
        }
        let has_most = count > TOKENS_MAX / 2 || bytes > TOKEN_BYTES_MAX / 2;
        let among = self.tokens.iter().filter(|(_, entry)| !has_most || own(entry));
        among.min_by_key(|(_, entry)| entry.used).map(|(digest, _)| *digest)
    }
}

fn digest(token: &[u8]) -> [u8; 32] {
    Sha256::digest(token).into()
}

fn in_time(grant: Arc<Grant>, now: SystemTime) -> Result<Arc<Grant>, GrantError> {
    let end = UNIX_EPOCH + Duration::from_secs(grant.claims().expires_unix_s);
    match now.duration_since(end) {
        Ok(over) => Err(GrantError::Expired { ago_s: over.as_secs() }),
        Err(_) => Ok(grant),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grant::Terms;
    use crate::grant::tests::{attenuated, claims_of_nothing};
    use forge_protocol::broker::GrantedTool;
    use forge_protocol::name::ToolName;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(1_800_000_000 + seconds)
    }

    fn grant(issuer: &Issuer, principal: &str) -> Vec<u8> {
        let name = ToolName::parse("shop.find").unwrap();
        let tools = vec![GrantedTool { name, definition_sha256: [7; 32], constraints: Vec::new() }];
        let principal = principal.into();
        let (calls_max, cost_max, session) = (None, None, None);
        let terms = Terms { principal, tools, valid_s: 60, calls_max, cost_max, session };
        issuer.issue(&terms, at(0)).unwrap()
    }

    fn count(verified: &Verified) -> usize {
        verified.known.lock().unwrap().tokens.len()
    }

    #[test]
    fn a_grant_is_verified_once_and_still_ends_on_time() {
        let verified = Verified::new(Issuer::ephemeral());
        let token = grant(verified.issuer(), "alice");
        assert!(verified.known(&token, at(0)).is_none());
        let first = verified.verify(&token, at(0)).unwrap();
        let again = verified.known(&token, at(59)).unwrap().unwrap();
        assert!(Arc::ptr_eq(&first, &again), "verified anew");
        for over in [
            verified.known(&token, at(60)).unwrap().unwrap_err(),
            verified.verify(&token, at(60)).unwrap_err(),
        ] {
            assert!(matches!(over, GrantError::Expired { ago_s: 0 }), "{over}");
        }
    }

    #[test]
    fn a_known_grant_makes_no_other_token_good() {
        let verified = Verified::new(Issuer::ephemeral());
        let mut token = grant(verified.issuer(), "alice");
        verified.verify(&token, at(0)).unwrap();
        let middle = token.len() / 2;
        token[middle] ^= 1;
        assert!(verified.known(&token, at(0)).is_none());
        assert!(verified.verify(&token, at(0)).is_err());
        let foreign = grant(&Issuer::ephemeral(), "alice");
        assert!(matches!(verified.verify(&foreign, at(0)), Err(GrantError::Forged(_))));
        assert_eq!(count(&verified), 1, "refusals are not remembered");
    }

    #[test]
    fn a_later_blocks_own_time_holds_for_a_known_grant_too() {
        let verified = Verified::new(Issuer::ephemeral());
        let token = grant(verified.issuer(), "alice");
        // Ten seconds after the grant was issued: long before its own end.
        let check = "check if time($now), $now < 2027-01-15T08:00:10Z";
        let token = attenuated(verified.issuer(), &token, check);
        verified.verify(&token, at(9)).unwrap();
        assert!(verified.known(&token, at(9)).is_none());
        verified.verify(&token, at(9)).unwrap();
        let over = verified.verify(&token, at(11)).unwrap_err();
        assert!(matches!(over, GrantError::NothingLeft(_)), "{over}");
        verified.verify(&token, at(9)).unwrap();
    }

    #[test]
    fn a_later_block_that_does_not_speak_of_time_is_known() {
        let verified = Verified::new(Issuer::ephemeral());
        let token = grant(verified.issuer(), "alice");
        let token = attenuated(verified.issuer(), &token, "check if call(\"shop.find\")");
        verified.verify(&token, at(0)).unwrap();
        assert_eq!(verified.known(&token, at(1)).unwrap().unwrap().claims().tools.len(), 1);
    }

    #[test]
    fn what_is_known_is_bounded_and_the_least_used_leaves() {
        let verified = Verified::new(Issuer::ephemeral());
        let first = grant(verified.issuer(), "first");
        verified.verify(&first, at(0)).unwrap();
        let second = grant(verified.issuer(), "second");
        verified.verify(&second, at(0)).unwrap();
        for number in 2..=TOKENS_MAX {
            assert!(verified.known(&first, at(0)).is_some());
            let token = grant(verified.issuer(), &format!("p{number}"));
            verified.verify(&token, at(0)).unwrap();
        }
        assert_eq!(count(&verified), TOKENS_MAX);
        assert!(verified.known(&first, at(0)).is_some(), "used all the time");
        assert!(verified.known(&second, at(0)).is_none(), "not used for longest");
        let empty = Grant::new(claims_of_nothing()).unwrap();
        let empty = Standing::Settled(Arc::new(empty));
        verified.remember([1; 32], "mallory", TOKEN_BYTES_MAX, empty.clone());
        assert_eq!(count(&verified), TOKENS_MAX, "what is so large is itself not kept");
        // Whoever has half of it has only its own forgotten, by count and by bytes.
        for number in 0..TOKENS_MAX as u32 {
            let mut digest = [2; 32];
            digest[..4].copy_from_slice(&number.to_le_bytes());
            verified.remember(digest, "mallory", TOKEN_BYTES_MAX / 128, empty.clone());
        }
        let of = |whose: fn(&Entry) -> bool| {
            verified.known.lock().unwrap().tokens.values().filter(|it| whose(it)).count()
        };
        assert!(of(|it| it.principal == "mallory") <= 65);
        assert!(of(|it| it.principal != "mallory") >= TOKENS_MAX / 2);
    }

    #[test]
    fn what_a_grants_constraints_take_counts_as_much_as_its_bytes() {
        let bytes_with = |constraint: &str| {
            let verified = Verified::new(Issuer::ephemeral());
            let token = grant(verified.issuer(), "alice");
            let fact = format!("constraint(\"shop.find\", \"{constraint}\");");
            let token = attenuated(verified.issuer(), &token, &fact);
            verified.verify(&token, at(0)).unwrap();
            (verified.known.lock().unwrap().bytes, token.len())
        };
        let (prefix, prefix_token) = bytes_with("/a^=[a-z]+");
        let (pattern, pattern_token) = bytes_with("/a=~[a-z]+");
        assert_eq!(prefix_token, pattern_token);
        assert!(prefix > prefix_token, "{prefix}");
        assert!(pattern > prefix + 64 * 1024, "a compiled pattern takes more: {pattern}");
    }

    #[test]
    fn whoever_makes_ever_new_tokens_of_a_grant_has_only_own_ones_forgotten() {
        let verified = Verified::new(Issuer::ephemeral());
        let token = grant(verified.issuer(), "alice");
        verified.verify(&token, at(0)).unwrap();
        let empty = Standing::Settled(Arc::new(Grant::new(claims_of_nothing()).unwrap()));
        for number in 0..2 * TOKENS_MAX as u64 {
            let mut digest = [2; 32];
            digest[..8].copy_from_slice(&number.to_le_bytes());
            verified.remember(digest, "mallory", 1, empty.clone());
        }
        assert!(verified.known(&token, at(0)).is_some());
        assert_eq!(count(&verified), TOKENS_MAX);
        // One that two verified at the same time is there once, and counted once.
        let bytes = || verified.known.lock().unwrap().bytes;
        let before = bytes();
        verified.remember(digest(&token), "alice", token.len(), empty);
        assert!(bytes() <= before, "{} and then {}", before, bytes());
    }
}
