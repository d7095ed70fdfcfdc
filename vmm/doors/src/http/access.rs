//! Who may come in: the principal of a request is its token's, and nothing
//! else in a request says whose it is.

use std::slice;

use axum::http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};

use super::problem::Problem;
use crate::web::{TokenHash, token};

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
        let found = token::holder(hash, principals.iter().map(|it| (&*it.tokens, it)));
        found.map(|principal| principal.name.clone()).ok_or_else(|| {
            Problem::new(StatusCode::UNAUTHORIZED, "unauthenticated", "nobody has this token")
        })
    }
}

/// Whether a request with these headers carries this one token.
pub(crate) fn carries(headers: &HeaderMap, own: &TokenHash) -> Result<(), Problem> {
    let detail = "this token does not open this; it has one of its own";
    token::holder(bearer(headers)?, [(slice::from_ref(own), ())])
        .ok_or_else(|| Problem::new(StatusCode::UNAUTHORIZED, "unauthenticated", detail))
}

fn bearer(headers: &HeaderMap) -> Result<TokenHash, Problem> {
    token::bearer(headers)
        .map_err(|what| Problem::new(StatusCode::UNAUTHORIZED, "unauthenticated", what))
}

#[cfg(test)]
mod tests {
    use axum::http::header;

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
        for values in [&[][..], &["Bearer four"], &["Basic one"], &["Bearer one", "Bearer one"]] {
            assert!(access().principal(&headers(values)).is_err(), "{values:?}");
        }
        assert!(Access::Tokens(Vec::new()).principal(&headers(&["Bearer one"])).is_err());
    }
}
