//! The way to a server over HTTP: a client of its own for each server.
//!
//! The configured address is the only one that is ever asked. Redirects are
//! answers like any other and never followed, proxies of the environment are
//! not used, cookies are not kept, and the credentials of one server are known
//! to its own client alone, which puts them into the declared headers and
//! nowhere else. Connections are used again within a moment: servers close
//! those that are idle, some after two seconds, and what is sent meanwhile is
//! lost. What only reads (RFC 9110, 9.2.1) is sent once more then, and nothing
//! else is ever sent twice. What a server sends is bounded: the head of an
//! answer by the HTTP library, a body by [`body_within`].
//!
//! Deliberately absent are client certificates and certificates that are not
//! checked.

use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{ACCEPT_ENCODING, AUTHORIZATION, HeaderMap, HeaderValue, RETRY_AFTER};
use reqwest::{RequestBuilder, Response, StatusCode};
use rustls::pki_types::CertificateDer;
use tokio::time::Instant;

use super::oauth::{OAuth, TokenError};
use super::scrubs::Scrubs;
use super::{CallEnd, Undone};
use crate::egress::SystemResolver;
use crate::endpoint::Endpoint;
use crate::secret::Secret;

/// How long a connection may take to stand.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);
/// How long a connection is kept that nobody uses: less than servers do.
const IDLE_TIME_MAX: Duration = Duration::from_millis(1_500);

/// A client for one server.
#[derive(Debug)]
pub(crate) struct Client {
    http: reqwest::Client,
    oauth: Option<Box<OAuth>>,
}

/// An HTTP client with this project's rules and these headers on each request. It
/// trusts whom the host trusts, and these `roots`.
///
/// # Errors
/// Says what is wrong with the host's certificates, or these.
pub(crate) fn plain_client(
    mut headers: HeaderMap,
    roots: &[CertificateDer<'static>],
) -> Result<reqwest::Client, String> {
    let no_client = |error: &reqwest::Error| format!("no HTTP client: {}", explain(error));
    let roots = roots
        .iter()
        .map(|root| reqwest::Certificate::from_der(root))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| no_client(&error))?;
    // To say nothing is to take any (RFC 9110, 12.5.3).
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    // The first one stands for the whole process; a second one is no error.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder()
        .user_agent(concat!("forge-toolbroker/", env!("CARGO_PKG_VERSION")))
        .default_headers(headers)
        .tls_certs_merge(roots)
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .no_proxy()
        .referer(false)
        // The one that comes with it has a thread for every lookup, and runs
        // that ask a dead name server and go would leave a thread each.
        .dns_resolver(SystemResolver::shared())
        .connect_timeout(CONNECT_TIME_MAX)
        .pool_idle_timeout(IDLE_TIME_MAX)
        .tcp_nodelay(true)
        .build()
        .map_err(|error| no_client(&error))
}

impl Client {
    /// A client for `endpoint`. Tokens that it fetches become known to
    /// `scrubs`; they are asked for in the name of the resource, if the
    /// endpoint is one (RFC 8707).
    ///
    /// # Errors
    /// Says what is wrong with the host's certificates, or the endpoint's.
    pub(crate) fn new(
        endpoint: &Endpoint,
        scrubs: &Arc<Scrubs>,
        is_resource: bool,
    ) -> Result<Self, String> {
        let mut headers = HeaderMap::new();
        for (name, value) in &endpoint.headers {
            let mut value = HeaderValue::from_str(value.expose())
                .map_err(|_| format!("the header {name} has a value that no header can carry"))?;
            value.set_sensitive(true);
            headers.insert(name.clone(), value);
        }
        let oauth = match &endpoint.oauth {
            Some(config) => {
                let http = plain_client(HeaderMap::new(), &endpoint.roots)?;
                Some(Box::new(OAuth::new(config.clone(), endpoint, is_resource, http, scrubs)))
            }
            None => None,
        };
        Ok(Self { http: plain_client(headers, &endpoint.roots)?, oauth })
    }

    /// The client itself, which has the configured headers and no token.
    pub(crate) fn http(&self) -> &reqwest::Client {
        &self.http
    }

    async fn token(&self) -> Result<Option<Secret>, TokenError> {
        match &self.oauth {
            Some(oauth) => oauth.token().await.map(Some),
            None => Ok(None),
        }
    }

    /// Sends a request, with the access token if there is one. A token that is
    /// refused is fetched anew, once: a request answered by 401 was not
    /// carried out. One that only reads is sent once more over another
    /// connection if the first broke. Nothing is sent for which the token comes
    /// after `until`.
    ///
    /// # Errors
    /// [`SendError`].
    pub(crate) async fn send(
        &self,
        request: RequestBuilder,
        until: Option<Instant>,
    ) -> Result<Response, SendError> {
        let again = request.try_clone();
        let token = self.token().await?;
        in_time(until)?;
        let response = match (authorized(request, token.as_ref()).send().await, &again) {
            (Err(error), Some(again)) if broke(&error) && only_reads(again) => {
                let again = again.try_clone().ok_or(error)?;
                authorized(again, token.as_ref()).send().await?
            }
            (response, _) => response?,
        };
        match (&self.oauth, token, again) {
            (Some(oauth), Some(token), Some(again))
                if response.status() == StatusCode::UNAUTHORIZED =>
            {
                drop(response);
                oauth.refused(&token).await;
                let token = oauth.token().await?;
                in_time(until)?;
                Ok(authorized(again, Some(&token)).send().await?)
            }
            _ => Ok(response),
        }
    }
}

/// Whether a connection that stood ended before the answer began.
fn broke(error: &reqwest::Error) -> bool {
    error.is_request() && !error.is_connect() && !error.is_timeout()
}

fn only_reads(request: &RequestBuilder) -> bool {
    let built = request.try_clone().and_then(|it| it.build().ok());
    built.is_some_and(|it| it.method().is_safe())
}

fn in_time(until: Option<Instant>) -> Result<(), SendError> {
    match until {
        Some(until) if Instant::now() >= until => Err(SendError::Late),
        _ => Ok(()),
    }
}

fn authorized(request: RequestBuilder, token: Option<&Secret>) -> RequestBuilder {
    let Some(token) = token else { return request };
    match HeaderValue::from_str(&format!("Bearer {}", token.expose())) {
        Ok(mut value) => {
            value.set_sensitive(true);
            request.header(AUTHORIZATION, value)
        }
        // Tokens are checked when they are fetched.
        Err(_) => request,
    }
}

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SendError {
    #[error("{0}")]
    Token(#[from] TokenError),
    #[error("there was an access token only when nobody waited any more")]
    Late,
    #[error("{}", explain(.0))]
    Http(#[source] reqwest::Error),
}

impl From<reqwest::Error> for SendError {
    fn from(error: reqwest::Error) -> Self {
        // Whoever follows an error's causes, or prints it for a developer, would
        // have the address, and the key in it.
        Self::Http(error.without_url())
    }
}

impl SendError {
    /// The end of a call of which the server surely saw nothing, as a program is
    /// told: why is the operator's to know.
    pub(crate) fn unsent(&self) -> Option<CallEnd> {
        let (why, message) = match self {
            Self::Token(_) => (Undone::Unauthorized, "there is no access token for the server"),
            Self::Late => (Undone::Unauthorized, "the access token for the server came too late"),
            Self::Http(error) if error.is_connect() || error.is_builder() => {
                (Undone::Unreachable, "the server cannot be reached")
            }
            Self::Http(_) => return None,
        };
        Some(CallEnd::undone(why, message))
    }
}

/// An HTTP error in words, without the address, which may hold a credential. Its
/// cause may be a server's word: it is cut by whoever scrubs it, and after that.
pub(crate) fn explain(error: &reqwest::Error) -> String {
    let what = if error.is_connect() {
        "it cannot be reached"
    } else if error.is_timeout() {
        "it took too long"
    } else if error.is_builder() {
        "the request cannot be written"
    } else {
        "the connection broke"
    };
    // The deepest cause says most.
    let mut cause = error.source();
    while let Some(deeper) = cause.and_then(std::error::Error::source) {
        cause = Some(deeper);
    }
    match cause {
        Some(cause) => format!("{what}: {cause}"),
        None => what.to_owned(),
    }
}

/// When a server that refuses wants to be asked again, in its own words: seconds
/// or a date.
pub(crate) fn retry_after(response: &Response) -> Option<String> {
    let value = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    (value.len() <= 64).then(|| value.to_owned())
}

/// Why a body is not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BodyError {
    #[error("its answer has more than {limit} bytes")]
    TooLarge { limit: usize },
    #[error("its answer broke off: {0}")]
    Broken(String),
}

/// Reads a body of at most `limit` bytes.
///
/// # Errors
/// [`BodyError`]. Of a body that is too large no more than `limit` bytes are
/// held.
pub(crate) async fn body_within(
    mut response: Response,
    limit: usize,
) -> Result<Vec<u8>, BodyError> {
    if response.content_length().is_some_and(|length| length > limit as u64) {
        return Err(BodyError::TooLarge { limit });
    }
    let mut body = Vec::new();
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) if body.len() + chunk.len() > limit => {
                return Err(BodyError::TooLarge { limit });
            }
            Ok(Some(chunk)) => body.extend_from_slice(&chunk),
            Ok(None) => return Ok(body),
            Err(error) => return Err(BodyError::Broken(explain(&error))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers the first request of each connection, and ends with the second.
    async fn breaks_each_second(listener: tokio::net::TcpListener) {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        loop {
            let Ok((mut stream, _)) = listener.accept().await else { return };
            let mut buffer = [0; 4096];
            let _ = stream.read(&mut buffer).await;
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
            // The next one is taken, and never answered.
            let _ = stream.read(&mut buffer).await;
        }
    }

    #[tokio::test]
    async fn what_reads_is_sent_once_more_where_its_connection_broke_and_nothing_else_is() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        tokio::spawn(breaks_each_second(listener));
        let client = || Client { http: plain_client(HeaderMap::new(), &[]).unwrap(), oauth: None };
        let (reads, writes) = (client(), client());
        for _ in 0..2 {
            let answer = reads.send(reads.http().get(&url), None).await;
            assert!(answer.is_ok(), "{answer:?}");
        }
        drop(reads);
        assert!(writes.send(writes.http().post(&url), None).await.is_ok());
        let broken = writes.send(writes.http().post(&url), None).await.unwrap_err();
        assert!(broken.unsent().is_none(), "{broken}");
    }

    #[tokio::test]
    async fn no_error_holds_the_address_that_a_key_is_in() {
        let client = plain_client(HeaderMap::new(), &[]).unwrap();
        let refused = client.get("http://127.0.0.1:1/?key=canary-key").send().await.unwrap_err();
        let error = SendError::from(refused);
        assert!(error.unsent().is_some(), "{error}");
        assert!(!format!("{error:?}").contains("canary-key"), "{error:?}");
        let cause = error.source().map(ToString::to_string);
        assert!(!cause.clone().unwrap_or_default().contains("canary-key"), "{cause:?}");
    }
}
