//! Access tokens for one server: OAuth 2.1's `client_credentials`, machine to
//! machine.
//!
//! A token is fetched when first needed, kept in memory, fetched anew before
//! it runs out and once when the server refuses it. Where it comes from is
//! the operator's to say, since the client's secret goes there:
//!
//! - `token_url` names the address itself;
//! - `issuer` names the authorization server, whose metadata (RFC 8414, or
//!   OpenID Connect's form of it) has the address and must name that issuer;
//! - with neither, the server's own metadata is asked (RFC 9728), and an
//!   authorization server of the same origin is taken. One elsewhere is not:
//!   a tool server must not choose who gets the secret. The error names it,
//!   so that the operator can.
//!
//! Deliberately absent is whatever needs a person at a browser (the
//! authorization code, device codes): a broker is a daemon. Also absent are
//! refresh tokens, which this grant does not have, and dynamic registration.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::Url;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use serde_json::Value;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use super::http::{body_within, explain};
use super::scrubs::{IssuedBy, Scrubs};
use crate::endpoint::{ClientAuth, Endpoint, OAuthConfig, Resource, is_safe_url};
use crate::secret::{Secret, is_short};
use crate::uri::percent_encoded;

/// Each exchange with an authorization server.
const EXCHANGE_TIME_MAX: Duration = Duration::from_secs(10);
/// Each of its answers, in bytes.
const ANSWER_BYTES_MAX: usize = 64 * 1024;
/// The longest token: no server takes more in a header, and looking for one takes many
/// times its length.
const TOKEN_BYTES_MAX: usize = 16 * 1024;
/// The shortest life that a server gives its own tokens: one that is over before is
/// refused, and fetched anew then.
const LIFE_MIN: Duration = Duration::from_secs(10);
/// How long a token is used that does not say how long it lasts.
const LIFE_IF_UNKNOWN: Duration = Duration::from_secs(300);
/// The longest life reckoned with.
const LIFE_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// A token is fetched anew this long before its end, or a quarter of its life
/// if that is less.
const MARGIN_MAX: Duration = Duration::from_secs(60);

/// Why there is no token.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum TokenError {
    #[error("no access token: {place}: {why}")]
    Exchange { place: String, why: String },
    #[error("no access token: the authorization server refuses: {why}")]
    Refused { why: String },
    #[error(
        "no access token: {place} says nothing of an authorization server: set `oauth.issuer` or \
         `oauth.token_url`"
    )]
    NotSaid { place: String },
    #[error(
        "no access token: the authorization server {issuer:?} has no metadata at {tried}: see \
         whether `oauth.issuer` is its name, or set `oauth.token_url` in its place"
    )]
    NoMetadata { issuer: String, tried: String },
    #[error(
        "no access token: the server names the authorization server {issuer:?}, which is \
         elsewhere: if it may have this client's secret, set it as `oauth.issuer`"
    )]
    Elsewhere { issuer: String },
    #[error(
        "no access token: {issuer:?} has no client_credentials, and a login in a browser is not \
         possible here: give a token under `headers`, or another client"
    )]
    Interactive { issuer: String },
}

/// The tokens of one server.
#[derive(Debug)]
pub(super) struct OAuth {
    config: OAuthConfig,
    /// The server that the tokens are for.
    server: Url,
    /// What they are asked for as (RFC 8707), unless that server's metadata has another name
    /// for it.
    resource: Option<String>,
    http: reqwest::Client,
    scrubs: Arc<Scrubs>,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    token: Option<Token>,
    at: Option<TokenEndpoint>,
    /// Why the last try gave none, and when that was known.
    failed: Option<(TokenError, Instant)>,
}

#[derive(Debug)]
struct Token {
    value: Secret,
    renew_at: Instant,
}

#[derive(Clone, Debug)]
struct TokenEndpoint {
    url: Url,
    /// How the secret is sent, as its metadata has it.
    client_auth: ClientAuth,
    /// What the server is to it, as its own metadata has it.
    resource: Option<String>,
}

/// An address as MCP has it name a resource: without a path that says nothing.
fn canonical(server: &Url) -> String {
    match server.as_str().strip_suffix('/') {
        Some(origin) if server.path() == "/" => origin.to_owned(),
        _ => server.as_str().to_owned(),
    }
}

/// Whether metadata of the resource of this name is good for a server: RFC 9728 has it be
/// the same, and servers name their origin, or what several paths lie below.
fn is_of(name: &str, server: &Url) -> bool {
    let segments = |url: &Url| -> Vec<String> {
        url.path().split('/').filter(|it| !it.is_empty()).map(str::to_owned).collect()
    };
    Url::parse(name).is_ok_and(|named| {
        named.origin() == server.origin() && segments(server).starts_with(&segments(&named))
    })
}

impl OAuth {
    pub(super) fn new(
        config: OAuthConfig,
        server: &Endpoint,
        is_resource: bool,
        http: reqwest::Client,
        scrubs: &Arc<Scrubs>,
    ) -> Self {
        let (server, scrubs) = (server.url.clone(), Arc::clone(scrubs));
        let resource = match &config.resource {
            Resource::Own => is_resource.then(|| canonical(&server)),
            Resource::Named(name) => Some(name.clone()),
            Resource::Untold => None,
        };
        Self { config, server, resource, http, scrubs, held: Mutex::default() }
    }

    /// A token that lasts. Whoever comes while it is fetched waits for it, and
    /// shares what becomes of that.
    pub(super) async fn token(&self) -> Result<Secret, TokenError> {
        let came = Instant::now();
        let mut held = self.held.lock().await;
        if let Some(token) = &held.token
            && Instant::now() < token.renew_at
        {
            return Ok(token.value.clone());
        }
        // Or each of them would ask in its turn, and wait as long again.
        if let Some((error, at)) = &held.failed
            && came <= *at
        {
            return Err(error.clone());
        }
        held.token = None;
        match self.renewed(&mut held).await {
            Ok(token) => {
                let value = token.value.clone();
                held.token = Some(token);
                Ok(value)
            }
            Err(error) => {
                held.failed = Some((error.clone(), Instant::now()));
                Err(error)
            }
        }
    }

    /// A new token, from where they are to be had, which is kept.
    async fn renewed(&self, held: &mut Held) -> Result<Token, TokenError> {
        let at = match &held.at {
            Some(at) => at.clone(),
            None => self.find().await?,
        };
        // Kept while it gives tokens: it may have moved, and who says where is asked
        // again then.
        held.at = None;
        let token = self.fetch(&at).await?;
        held.at = Some(at);
        self.scrubs.learn(&self.client(), &token.value, self.issued_by()).await;
        Ok(token)
    }

    fn issued_by(&self) -> IssuedBy {
        match (&self.config.token_url, &self.config.issuer) {
            (None, None) => IssuedBy::Itself,
            _ => IssuedBy::Named,
        }
    }

    /// Whose tokens these are, however often it is made anew.
    fn client(&self) -> String {
        format!("{} {}", self.server, self.config.client_id)
    }

    /// The server does not take this token.
    pub(super) async fn refused(&self, refused: &Secret) {
        let mut held = self.held.lock().await;
        if held.token.as_ref().is_some_and(|held| held.value.expose() == refused.expose()) {
            held.token = None;
        }
    }

    /// Where tokens are to be had.
    async fn find(&self) -> Result<TokenEndpoint, TokenError> {
        if let Some(url) = &self.config.token_url {
            let (url, client_auth) = (url.clone(), ClientAuth::Basic);
            return Ok(TokenEndpoint { url, client_auth, resource: None });
        }
        if let Some(issuer) = &self.config.issuer {
            return self.of_issuer(issuer).await;
        }
        let path = self.server.path().trim_end_matches('/');
        let base = "/.well-known/oauth-protected-resource";
        let paths = [format!("{base}{path}"), base.to_owned()];
        let place = || self.server.origin().ascii_serialization();
        let metadata = self.metadata(&paths, &self.server, |_| true).await?;
        let metadata = metadata.ok_or_else(|| TokenError::NotSaid { place: place() })?;
        let resource = metadata.get("resource").and_then(Value::as_str);
        if resource.is_some_and(|name| !is_of(name, &self.server)) {
            let why = "its metadata is that of another resource".into();
            return Err(TokenError::Exchange { place: place(), why });
        }
        let named: Vec<&str> = metadata
            .get("authorization_servers")
            .and_then(Value::as_array)
            .map(|list| list.iter().filter_map(Value::as_str).collect())
            .unwrap_or_default();
        let Some(first) = named.first() else {
            return Err(TokenError::NotSaid { place: place() });
        };
        let own = named
            .iter()
            .filter_map(|issuer| Url::parse(issuer).ok())
            .find(|issuer| issuer.origin() == self.server.origin());
        let Some(own) = own else {
            let issuer = crate::cut(&self.scrubs.text(first), 256);
            return Err(TokenError::Elsewhere { issuer });
        };
        let at = self.of_issuer(&own).await?;
        if at.url.origin() != self.server.origin() {
            return Err(TokenError::Elsewhere { issuer: at.url.origin().ascii_serialization() });
        }
        Ok(TokenEndpoint { resource: resource.map(str::to_owned), ..at })
    }

    /// Where an authorization server hands tokens out, by its metadata.
    async fn of_issuer(&self, issuer: &Url) -> Result<TokenEndpoint, TokenError> {
        let path = issuer.path().trim_end_matches('/');
        // In MCP's order.
        let mut paths = vec![
            format!("/.well-known/oauth-authorization-server{path}"),
            format!("/.well-known/openid-configuration{path}"),
        ];
        if !path.is_empty() {
            paths.push(format!("{path}/.well-known/openid-configuration"));
        }
        let place = issuer.as_str().to_owned();
        // RFC 8414, 3.3: whoever speaks for another issuer is not believed.
        let speaks_for_it = |metadata: &Value| {
            let named = metadata.get("issuer").and_then(Value::as_str).unwrap_or_default();
            named.trim_end_matches('/') == place.trim_end_matches('/')
        };
        let found = self.metadata(&paths, issuer, speaks_for_it).await?;
        let metadata = found.ok_or_else(|| TokenError::NoMetadata {
            issuer: place.clone(),
            tried: paths.join(" or "),
        })?;
        let failed = |why: &str| TokenError::Exchange { place: place.clone(), why: why.into() };
        let text = |key: &str| metadata.get(key).and_then(Value::as_str);
        let lists = |key: &str, entry: &str| {
            let list = metadata.get(key).and_then(Value::as_array);
            list.map(|list| list.iter().any(|it| it.as_str() == Some(entry)))
        };
        if !speaks_for_it(&metadata) {
            return Err(failed("its metadata is that of another issuer"));
        }
        if lists("grant_types_supported", "client_credentials") == Some(false) {
            return Err(TokenError::Interactive { issuer: place });
        }
        let url = text("token_endpoint")
            .and_then(|url| Url::parse(url).ok())
            .ok_or_else(|| failed("its metadata has no token_endpoint"))?;
        if !is_safe_url(&url) {
            return Err(failed("its token_endpoint is plain http to another host"));
        }
        let methods = "token_endpoint_auth_methods_supported";
        // In the form for want of anything better alone.
        let only_post = lists(methods, "client_secret_basic") == Some(false)
            && lists(methods, "client_secret_post") == Some(true);
        let client_auth = if only_post { ClientAuth::Post } else { ClientAuth::Basic };
        Ok(TokenEndpoint { url, client_auth, resource: None })
    }

    /// The first of these documents of `host` that fits, or that is there, if one is: some hosts
    /// have one at every path.
    async fn metadata(
        &self,
        paths: &[String],
        host: &Url,
        fits: impl Fn(&Value) -> bool,
    ) -> Result<Option<Value>, TokenError> {
        let mut first = None;
        for path in paths {
            let mut url = host.clone();
            url.set_path(path);
            url.set_query(None);
            let request = self.http.get(url.clone()).header(ACCEPT, "application/json");
            let (status, answer) = self.exchange(&url, request).await?;
            if status == 200 && answer.is_object() {
                if fits(&answer) {
                    return Ok(Some(answer));
                }
                first.get_or_insert(answer);
            }
        }
        Ok(first)
    }

    async fn fetch(&self, at: &TokenEndpoint) -> Result<Token, TokenError> {
        let (status, answer) = self.exchange(&at.url, self.token_request(at)).await?;
        let text = |key: &str| answer.get(key).and_then(Value::as_str);
        // Some refuse with a success.
        if !(200..=299).contains(&status) || text("error").is_some() {
            let mut why = status.to_string();
            if (300..=399).contains(&status) {
                why.push_str(": it redirects, and none is followed: configure its target");
            }
            for said in [text("error"), text("error_description")].into_iter().flatten() {
                why.push_str(": ");
                why.push_str(said);
            }
            let why = self.scrubs.text(&why);
            return Err(TokenError::Refused { why: crate::cut(&why, 512) });
        }
        let place = || at.url.origin().ascii_serialization();
        let value = token_in(&answer)
            .map_err(|why| TokenError::Exchange { place: place(), why: why.to_owned() })?;
        let life = match answer.get("expires_in").and_then(Value::as_u64) {
            Some(seconds) => Duration::from_secs(seconds).min(LIFE_MAX),
            None => LIFE_IF_UNKNOWN,
        };
        let life = match self.issued_by() {
            IssuedBy::Itself => life.max(LIFE_MIN),
            IssuedBy::Named => life,
        };
        let renew_at = Instant::now() + (life - MARGIN_MAX.min(life / 4));
        Ok(Token { value, renew_at })
    }

    /// Asks for a token as a client of its own (RFC 6749, 4.4.2).
    fn token_request(&self, at: &TokenEndpoint) -> reqwest::RequestBuilder {
        let OAuthConfig { client_id, client_secret, scopes, audience, client_auth, .. } =
            &self.config;
        let mut form = "grant_type=client_credentials".to_owned();
        let mut add = |key: &str, value: &str| {
            form.push('&');
            form.push_str(key);
            form.push('=');
            form.push_str(&percent_encoded(value));
        };
        if !scopes.is_empty() {
            add("scope", &scopes.join(" "));
        }
        if let Some(audience) = audience {
            add("audience", audience);
        }
        let own = at.resource.as_ref().filter(|_| self.config.resource == Resource::Own);
        if let Some(resource) = &self.resource {
            add("resource", own.unwrap_or(resource));
        }
        let mut request = self.http.post(at.url.clone());
        if client_auth.unwrap_or(at.client_auth) == ClientAuth::Post {
            add("client_id", client_id);
            add("client_secret", client_secret.expose());
        } else {
            // RFC 6749, 2.3.1: both are encoded before they are joined.
            let pair = format!(
                "{}:{}",
                percent_encoded(client_id),
                percent_encoded(client_secret.expose())
            );
            let text = format!("Basic {}", STANDARD.encode(pair));
            if let Ok(mut value) = HeaderValue::from_str(&text) {
                value.set_sensitive(true);
                request = request.header(AUTHORIZATION, value);
            }
        }
        request
            .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
            .header(ACCEPT, "application/json")
            .body(form)
    }

    /// One request to an authorization server: status, and JSON if it is some.
    async fn exchange(
        &self,
        url: &Url,
        request: reqwest::RequestBuilder,
    ) -> Result<(u16, Value), TokenError> {
        let exchanged = async {
            let response = request.send().await.map_err(|error| explain(&error))?;
            let status = response.status().as_u16();
            let body = body_within(response, ANSWER_BYTES_MAX).await;
            let body = body.map_err(|error| error.to_string())?;
            Ok((status, serde_json::from_slice(&body).unwrap_or(Value::Null)))
        };
        let late = || format!("no answer within {} s", EXCHANGE_TIME_MAX.as_secs());
        timeout(EXCHANGE_TIME_MAX, exchanged)
            .await
            .unwrap_or_else(|_| Err(late()))
            .map_err(|why| TokenError::Exchange { place: url.origin().ascii_serialization(), why })
    }
}

/// The bearer token in a successful answer, or what is wrong with that.
fn token_in(answer: &Value) -> Result<Secret, &'static str> {
    let text = |key: &str| answer.get(key).and_then(Value::as_str);
    match text("token_type") {
        Some(kind) if kind.eq_ignore_ascii_case("bearer") => {}
        Some(_) => return Err("its token is of another type than Bearer"),
        None => return Err("its answer has no token_type"),
    }
    let value = text("access_token")
        // RFC 6750, 2.1: what a token is made of.
        .filter(|token| token.bytes().all(|byte| byte.is_ascii_graphic()))
        .and_then(|token| Secret::new(token.to_owned()).ok())
        .ok_or("its answer has no access_token")?;
    if is_short(value.expose()) {
        // It would be looked for in what every server says.
        return Err("its access_token is too short to be one");
    }
    if value.expose().len() > TOKEN_BYTES_MAX {
        return Err("its access_token has more than 16 KiB");
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::super::http::plain_client;
    use super::*;
    use axum::Router;
    use axum::http::StatusCode;
    use axum::routing::post;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::sync::Semaphore;
    use tokio::task::JoinSet;

    #[test]
    fn a_resource_is_named_without_an_empty_path_and_taken_as_its_own_or_what_it_lies_below() {
        let url = |text: &str| Url::parse(text).unwrap();
        assert_eq!(canonical(&url("https://a.example/")), "https://a.example");
        assert_eq!(canonical(&url("https://a.example/mcp/")), "https://a.example/mcp/");
        assert_eq!(canonical(&url("https://a.example/?key=1")), "https://a.example/?key=1");
        let server = url("https://a.example/v1/mcp");
        for (name, is_good) in [
            ("https://a.example/v1/mcp", true),
            ("https://a.example/v1/mcp/", true),
            ("https://a.example/v1", true),
            ("https://a.example", true),
            ("https://a.example/v1/m", false),
            ("https://a.example/v1/mcp/more", false),
            ("http://a.example/v1/mcp", false),
            ("https://b.example/v1/mcp", false),
            ("a.example", false),
        ] {
            assert_eq!(is_of(name, &server), is_good, "{name}");
        }
    }

    #[tokio::test]
    async fn whoever_waits_for_a_token_that_is_not_had_shares_the_one_failure() {
        let (asked, may_answer) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
        let (asked_there, may) = (Arc::clone(&asked), Arc::clone(&may_answer));
        let refuse = move || async move {
            asked_there.fetch_add(1, Ordering::AcqRel);
            may.acquire().await.unwrap().forget();
            StatusCode::SERVICE_UNAVAILABLE
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = Url::parse(&format!("http://{}/", listener.local_addr().unwrap())).unwrap();
        let router = Router::new().route("/token", post(refuse));
        tokio::spawn(async move { axum::serve(listener, router).await });
        let config = OAuthConfig {
            client_id: "me".into(),
            client_secret: Secret::new("a secret of mine".into()).unwrap(),
            scopes: Vec::new(),
            audience: None,
            resource: Resource::Own,
            client_auth: None,
            token_url: Some(url.join("token").unwrap()),
            issuer: None,
        };
        let server = Endpoint {
            url,
            headers: Vec::new(),
            query: Vec::new(),
            oauth: None,
            roots: Vec::new(),
        };
        let http = plain_client(Default::default(), &[]).unwrap();
        let oauth = Arc::new(OAuth::new(config, &server, true, http, &Scrubs::new(Vec::new())));
        let mut calls = JoinSet::new();
        for _ in 0..8 {
            let oauth = Arc::clone(&oauth);
            calls.spawn(async move { oauth.token().await });
        }
        while asked.load(Ordering::Acquire) == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // More than enough for all, if each asked.
        may_answer.add_permits(8);
        while let Some(ended) = calls.join_next().await {
            assert!(matches!(ended.unwrap(), Err(TokenError::Refused { .. })));
        }
        assert_eq!(asked.load(Ordering::Acquire), 1);
        // Whoever comes after it asks again.
        may_answer.add_permits(1);
        assert!(oauth.token().await.is_err());
        assert_eq!(asked.load(Ordering::Acquire), 2);
    }
}
