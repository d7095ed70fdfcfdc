//! Who may come in: the principal of a request is its token's, and nothing
//! else in a request says whose it is.

use std::slice;

use axum::http::HeaderMap;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::Options;
use super::problem::Problem;
use crate::web::token::Unauthenticated;
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
        if let Self::Anybody(name) = self {
            return Ok(name.clone());
        }
        let token = bearer(headers)?;
        let nobodys = || Problem::unauthenticated(Unauthenticated::NOBODYS);
        self.holder(Some(token)).map(str::to_owned).ok_or_else(nobodys)
    }

    /// Whom one speaks for who has this token, or none.
    fn holder(&self, token: Option<TokenHash>) -> Option<&str> {
        match self {
            Self::Anybody(name) => Some(name),
            Self::Tokens(principals) => {
                token::holder(token?, principals.iter().map(|it| (&*it.tokens, &*it.name)))
            }
        }
    }
}

/// What a request came in with, which may be revoked while it is under way.
#[derive(Clone, Debug)]
pub(crate) struct Bearer {
    principal: String,
    token: Option<TokenHash>,
    options: watch::Receiver<Options>,
}

impl Bearer {
    /// Of a request with these headers, which speaks for this principal now.
    pub(crate) fn new(
        principal: String,
        headers: &HeaderMap,
        options: watch::Receiver<Options>,
    ) -> Self {
        Self { principal, token: bearer(headers).ok(), options }
    }

    /// One that nobody needs a token for.
    #[cfg(test)]
    pub(crate) fn anybodys(principal: &str) -> Self {
        let access = Access::Anybody(principal.into());
        let options = Options { access, hosts: Vec::new(), metrics_token: None };
        Self::new(principal.into(), &HeaderMap::new(), watch::channel(options).1)
    }

    /// Whether it speaks for the same principal now.
    pub(crate) fn speaks_still(&self) -> bool {
        self.options.borrow().access.holder(self.token) == Some(&self.principal)
    }

    /// Waits until it does not.
    pub(crate) async fn revoked(&self) {
        let mut options = self.options.clone();
        while self.speaks_still() {
            if options.changed().await.is_err() {
                // Without anybody who could change them, the door closes.
                std::future::pending::<()>().await;
            }
        }
    }
}

/// Whether a request with these headers carries this one token.
pub(crate) fn carries(headers: &HeaderMap, own: &TokenHash) -> Result<(), Problem> {
    let others = Unauthenticated::Invalid("this token does not open this; it has one of its own");
    token::holder(bearer(headers)?, [(slice::from_ref(own), ())])
        .ok_or_else(|| Problem::unauthenticated(others))
}

fn bearer(headers: &HeaderMap) -> Result<TokenHash, Problem> {
    token::bearer(headers).map_err(Problem::unauthenticated)
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

    #[test]
    fn a_token_that_is_anothers_now_speaks_no_more_for_whoever_came_with_it() {
        let options = |access| Options { access, hosts: Vec::new(), metrics_token: None };
        let (now, told) = watch::channel(options(access()));
        let [alices, bobs] = [("alice", "one"), ("bob", "three")].map(|(name, token)| {
            Bearer::new(name.into(), &headers(&[&format!("Bearer {token}")]), told.clone())
        });
        assert!(alices.speaks_still() && bobs.speaks_still());
        let tokens = ["one", "three"].map(|token| TokenHash::of(token.as_bytes())).to_vec();
        now.send_replace(options(Access::Tokens(vec![Principal { name: "bob".into(), tokens }])));
        assert!(!alices.speaks_still() && bobs.speaks_still());
    }
}
