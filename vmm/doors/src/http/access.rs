//! Who may come in: the principal of a request is its token's, and nothing
//! else in a request says whose it is.
//!
//! The door knows tokens by their SHA-256 alone. A token is drawn, not thought
//! up, so a plain hash of it tells nothing.

use std::fmt;

use axum::http::{HeaderMap, StatusCode, header};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConstantTimeEq as _};

use super::problem::Problem;

/// A token, in bytes.
const TOKEN_BYTES_MAX: usize = 512;

/// SHA-256 of a token, written as 64 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TokenHash([u8; 32]);

/// What is no [`TokenHash`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the SHA-256 of a token is 64 hex digits: printf %s \"$TOKEN\" | sha256sum")]
pub struct NoTokenHash;

impl TokenHash {
    /// Of this token.
    #[must_use]
    pub fn of(token: &[u8]) -> Self {
        Self(Sha256::digest(token).into())
    }

    fn is(&self, other: &Self) -> Choice {
        self.0.ct_eq(&other.0)
    }
}

impl std::str::FromStr for TokenHash {
    type Err = NoTokenHash;

    fn from_str(text: &str) -> Result<Self, NoTokenHash> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return Err(NoTokenHash);
        }
        let digit = |byte: u8| char::from(byte).to_digit(16).ok_or(NoTokenHash);
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
        }
        Ok(Self(bytes))
    }
}

impl From<[u8; 32]> for TokenHash {
    fn from(sha256: [u8; 32]) -> Self {
        Self(sha256)
    }
}

impl TryFrom<String> for TokenHash {
    type Error = NoTokenHash;

    fn try_from(text: String) -> Result<Self, NoTokenHash> {
        text.parse()
    }
}

impl From<TokenHash> for String {
    fn from(hash: TokenHash) -> Self {
        hash.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenHash(..)")
    }
}

/// A principal and the tokens that speak for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Principal {
    /// Its name.
    pub name: String,
    /// Its tokens.
    pub tokens: Vec<TokenHash>,
}

/// Whom a request speaks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    /// The principal of the bearer token it carries.
    Tokens(Vec<Principal>),
    /// This one, whoever sends it. For a door that only this host's users can
    /// reach.
    Anybody(String),
}

impl Access {
    /// The principal of a request with these headers.
    pub(crate) fn principal(&self, headers: &HeaderMap) -> Result<String, Problem> {
        let principals = match self {
            Self::Anybody(name) => return Ok(name.clone()),
            Self::Tokens(principals) => principals,
        };
        let hash = bearer(headers)?;
        // All are compared, to the end, whichever fits.
        let mut found = None;
        for principal in principals {
            let fits =
                principal.tokens.iter().fold(Choice::from(0), |fits, it| fits | it.is(&hash));
            if bool::from(fits) {
                found = Some(principal);
            }
        }
        found.map(|principal| principal.name.clone()).ok_or_else(|| {
            Problem::new(StatusCode::UNAUTHORIZED, "unauthenticated", "nobody has this token")
        })
    }
}

/// Whether a request with these headers carries this one token.
pub(crate) fn carries(headers: &HeaderMap, token: &TokenHash) -> Result<(), Problem> {
    if bool::from(bearer(headers)?.is(token)) {
        return Ok(());
    }
    let detail = "this token does not open this; it has one of its own";
    Err(Problem::new(StatusCode::UNAUTHORIZED, "unauthenticated", detail))
}

/// The hash of a request's one bearer token.
fn bearer(headers: &HeaderMap) -> Result<TokenHash, Problem> {
    let missing = |what: &str| Problem::new(StatusCode::UNAUTHORIZED, "unauthenticated", what);
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let value = values.next().ok_or_else(|| missing("send `Authorization: Bearer TOKEN`"))?;
    if values.next().is_some() {
        return Err(missing("send one Authorization header"));
    }
    let value = value.as_bytes();
    let scheme = value.split_at_checked(b"Bearer ".len());
    match scheme {
        Some((scheme, token))
            if scheme.eq_ignore_ascii_case(b"Bearer ") && token.len() <= TOKEN_BYTES_MAX =>
        {
            Ok(TokenHash::of(token.trim_ascii()))
        }
        _ => Err(missing("send `Authorization: Bearer TOKEN`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(values: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(header::AUTHORIZATION, value.parse().unwrap());
        }
        headers
    }

    fn access() -> Access {
        let principal = |name: &str, tokens: &[&str]| Principal {
            name: name.into(),
            tokens: tokens.iter().map(|token| TokenHash::of(token.as_bytes())).collect(),
        };
        Access::Tokens(vec![principal("alice", &["one", "two"]), principal("bob", &["three"])])
    }

    #[test]
    fn a_token_speaks_for_its_principal_alone() {
        for (token, name) in [("one", "alice"), ("two", "alice"), ("three", "bob")] {
            let headers = headers(&[&format!("bearer {token}")]);
            assert_eq!(access().principal(&headers).unwrap(), name);
        }
    }

    #[test]
    fn what_is_no_known_token_speaks_for_nobody() {
        let long = format!("Bearer {}", "a".repeat(TOKEN_BYTES_MAX + 1));
        let cases: [&[&str]; 7] = [
            &[],
            &["Bearer four"],
            &["Bearer "],
            &["Basic one"],
            &["one"],
            &["Bearer one", "Bearer one"],
            &[&long],
        ];
        for values in cases {
            assert!(access().principal(&headers(values)).is_err(), "{values:?}");
        }
        assert!(Access::Tokens(Vec::new()).principal(&headers(&["Bearer one"])).is_err());
    }

    #[test]
    fn a_hash_is_64_hex_digits_and_is_not_shown() {
        let hash = TokenHash::of(b"one");
        let text = String::from(hash);
        assert_eq!(text.parse(), Ok(hash));
        assert_eq!(text.to_uppercase().parse(), Ok(hash));
        for text in ["", "00", &"g".repeat(64), &"0".repeat(63), &"é".repeat(32)] {
            assert_eq!(text.parse::<TokenHash>(), Err(NoTokenHash), "{text:?}");
        }
        assert!(!format!("{hash:?}").contains(&text[..4]));
    }
}
