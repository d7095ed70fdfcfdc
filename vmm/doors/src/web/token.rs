//! Bearer tokens (RFC 6750), by their SHA-256: a door knows no other form. A
//! token is drawn, not thought up, so a plain hash of it tells nothing.

use std::fmt;

use forge_protocol::hex::unhex_array;
use hyper::header::{self, HeaderMap, HeaderValue};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConstantTimeEq as _};

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
    /// Hashes a token.
    #[must_use]
    pub fn of(token: &[u8]) -> Self {
        Self(Sha256::digest(token).into())
    }
}

impl std::str::FromStr for TokenHash {
    type Err = NoTokenHash;

    fn from_str(text: &str) -> Result<Self, NoTokenHash> {
        unhex_array(text).map(Self).ok_or(NoTokenHash)
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
        forge_protocol::hex::hex(&hash.0)
    }
}

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenHash(..)")
    }
}

/// Why a request's token opens nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unauthenticated {
    /// It carries none as one is carried.
    Without(&'static str),
    /// It carries one that does not open this.
    Invalid(&'static str),
}

impl Unauthenticated {
    /// Whom the token speaks for is not known.
    pub(crate) const NOBODYS: Self = Self::Invalid("nobody has this token");

    /// What is wrong, in words.
    pub(crate) fn what(self) -> &'static str {
        let (Self::Without(what) | Self::Invalid(what)) = self;
        what
    }

    /// `WWW-Authenticate` (RFC 6750, 3): of who sent no token it names no error.
    pub(crate) fn challenge(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Without(_) => "Bearer",
            Self::Invalid(_) => "Bearer error=\"invalid_token\"",
        })
    }
}

/// Whose token it is. All are compared, to the end, whichever fits.
pub(crate) fn holder<'a, T>(
    token: TokenHash,
    holders: impl IntoIterator<Item = (&'a [TokenHash], T)>,
) -> Option<T> {
    let mut found = None;
    for (tokens, holder) in holders {
        let fits = tokens.iter().fold(Choice::from(0), |fits, it| fits | it.0.ct_eq(&token.0));
        if bool::from(fits) {
            found = Some(holder);
        }
    }
    found
}

/// The hash of a request's one bearer token, or what is wrong.
pub(crate) fn bearer(headers: &HeaderMap) -> Result<TokenHash, Unauthenticated> {
    const MISSING: Unauthenticated = Unauthenticated::Without("send `Authorization: Bearer TOKEN`");
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let value = values.next().ok_or(MISSING)?.as_bytes();
    if values.next().is_some() {
        return Err(Unauthenticated::Without("send one Authorization header"));
    }
    let (scheme, token) = value.split_at_checked(b"Bearer ".len()).ok_or(MISSING)?;
    let token = token.trim_ascii();
    let fits =
        scheme.eq_ignore_ascii_case(b"Bearer ") && (1..=TOKEN_BYTES_MAX).contains(&token.len());
    if fits { Ok(TokenHash::of(token)) } else { Err(MISSING) }
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

    #[test]
    fn one_bearer_token_is_a_token_and_nothing_else_is() {
        let one = Ok(TokenHash::of(b"one"));
        for value in ["Bearer one", "bearer one", "BEARER  one "] {
            assert_eq!(bearer(&headers(&[value])), one, "{value}");
        }
        let long = format!("Bearer {}", "a".repeat(TOKEN_BYTES_MAX + 1));
        let cases: [&[&str]; 7] = [
            &[],
            &["Bearer "],
            &["Bearer"],
            &["Basic one"],
            &["one"],
            &["Bearer one", "Bearer one"],
            &[&long],
        ];
        for values in cases {
            assert!(bearer(&headers(values)).is_err(), "{values:?}");
        }
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
