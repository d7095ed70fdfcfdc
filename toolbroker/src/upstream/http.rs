//! The way to a server over HTTP: a client of its own for each server, and
//! what MCP's streamable HTTP needs beside it.
//!
//! The configured address is the only one that is ever asked. Redirects are
//! answers like any other and never followed, proxies of the environment are
//! not used, cookies are not kept, nothing is sent twice by the client itself,
//! and the credentials of one server are known to its own client alone, which
//! puts them into the declared headers and nowhere else. Connections are kept
//! and used again. What a server sends is bounded: the head of an answer by
//! the HTTP library, a body of JSON and one event of a stream by rmcp (16 MiB),
//! any other body by [`body_within`].
//!
//! Deliberately absent are client certificates and certificates that are not
//! checked.

use std::collections::HashMap;
use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_core::stream::BoxStream;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use reqwest::{RequestBuilder, Response, StatusCode};
use rmcp::model::ClientJsonRpcMessage;
use rmcp::transport::common::client_side_sse::{ExponentialBackoff, SseRetryPolicy};
use rmcp::transport::streamable_http_client::{
    SseError, StreamableHttpClient, StreamableHttpClientTransport,
    StreamableHttpClientTransportConfig, StreamableHttpError, StreamableHttpPostResponse,
};
use sse_stream::Sse;
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, sleep_until, timeout};

use super::oauth::{OAuth, TokenError};
use super::scrubs::Scrubs;
use crate::config::Endpoint;
use crate::egress::SystemResolver;
use crate::secret::Secret;

/// How long a connection may take to stand.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);
/// How long a connection is kept that nobody uses.
const IDLE_TIME_MAX: Duration = Duration::from_secs(60);
/// Two requests for one server's stream of events have at least this between
/// them, whatever the server says about coming back.
const STREAM_EVERY_MIN: Duration = Duration::from_millis(500);
/// The longest wait before a broken stream is asked for again.
const STREAM_RETRY_MAX: Duration = Duration::from_secs(60);
/// How often a broken stream is asked for again, in a row.
const STREAM_RETRIES_MAX: usize = 10;
/// How long the end of a session may take.
const DELETE_TIME_MAX: Duration = Duration::from_secs(2);
/// Requests to one server that may wait for an answer at the same time.
const REQUESTS_MAX: usize = 64;

/// A client for one server.
#[derive(Debug)]
pub(crate) struct Client {
    http: reqwest::Client,
    oauth: Option<Box<OAuth>>,
}

/// An HTTP client with this project's rules and these headers on each request.
///
/// # Errors
/// Says what is wrong with the host's certificates.
pub(crate) fn plain_client(headers: HeaderMap) -> Result<reqwest::Client, String> {
    // The first one stands for the whole process; a second one is no error.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder()
        .user_agent(concat!("forge-toolbroker/", env!("CARGO_PKG_VERSION")))
        .default_headers(headers)
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
        .map_err(|error| format!("no HTTP client: {}", explain(&error)))
}

impl Client {
    /// A client for `endpoint`. Tokens that it fetches become known to
    /// `scrubs`; they are asked for in the name of the resource, if the
    /// endpoint is one (RFC 8707).
    ///
    /// # Errors
    /// Says what is wrong with the host's certificates.
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
                let http = plain_client(HeaderMap::new())?;
                Some(Box::new(OAuth::new(config.clone(), endpoint, is_resource, http, scrubs)))
            }
            None => None,
        };
        Ok(Self { http: plain_client(headers)?, oauth })
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
    /// carried out.
    ///
    /// # Errors
    /// [`SendError`].
    pub(crate) async fn send(&self, request: RequestBuilder) -> Result<Response, SendError> {
        let again = request.try_clone();
        let token = self.token().await?;
        let response = authorized(request, token.as_ref()).send().await?;
        match (&self.oauth, token, again) {
            (Some(oauth), Some(token), Some(again))
                if response.status() == StatusCode::UNAUTHORIZED =>
            {
                drop(response);
                oauth.refused(&token).await;
                let token = oauth.token().await?;
                Ok(authorized(again, Some(&token)).send().await?)
            }
            _ => Ok(response),
        }
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
    #[error("{}", explain(.0))]
    Http(#[from] reqwest::Error),
}

impl SendError {
    /// Whether the server surely saw nothing of the request.
    pub(crate) fn is_unsent(&self) -> bool {
        match self {
            Self::Token(_) => true,
            Self::Http(error) => error.is_connect() || error.is_builder(),
        }
    }
}

/// An HTTP error in words, without the address, which may hold a credential.
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
        Some(cause) => format!("{what}: {}", crate::cut(&cause.to_string(), 256)),
        None => what.to_owned(),
    }
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

/// Streamable HTTP as MCP has it, on [`Client`].
#[derive(Clone, Debug)]
pub(super) struct Mcp(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    client: Client,
    /// Sessions that were given and not yet given back.
    sessions: watch::Sender<usize>,
    /// When the next stream may be asked for.
    stream_at: Mutex<Instant>,
}

/// What rmcp's transport ends with.
pub(super) type Fault = StreamableHttpError<reqwest::Error>;

impl Mcp {
    pub(super) fn new(client: Client) -> Self {
        let (sessions, _) = watch::channel(0);
        Self(Arc::new(Shared { client, sessions, stream_at: Mutex::new(Instant::now()) }))
    }

    /// A transport to the server.
    pub(super) fn transport(&self, endpoint: &Endpoint) -> StreamableHttpClientTransport<Self> {
        let mut retry = ExponentialBackoff::default();
        retry.max_times = Some(STREAM_RETRIES_MAX);
        retry.max_delay = Some(STREAM_RETRY_MAX);
        let mut config = StreamableHttpClientTransportConfig::with_uri(endpoint.url.as_str())
            // A lost session is made anew here, since the new one may have
            // other tools, and each call is held against what was granted.
            .reinit_on_expired_session(false)
            .max_concurrent_requests(REQUESTS_MAX);
        config.retry_config = Arc::new(retry) as Arc<dyn SseRetryPolicy>;
        StreamableHttpClientTransport::with_client(self.clone(), config)
    }

    /// Waits until the session is given back.
    pub(super) async fn ended(&self) {
        let mut sessions = self.0.sessions.subscribe();
        let _ = timeout(DELETE_TIME_MAX, sessions.wait_for(|open| *open == 0)).await;
    }

    async fn token(&self) -> Result<Option<Secret>, Fault> {
        let failed = |error: TokenError| StreamableHttpError::Io(io::Error::other(error));
        self.0.client.token().await.map_err(failed)
    }

    /// Does something with a token, and once more with another if the server
    /// refuses the first.
    async fn authorized<T, F: Future<Output = Result<T, Fault>>>(
        &self,
        attempt: impl Fn(Option<String>) -> F,
    ) -> Result<T, Fault> {
        let token = self.token().await?;
        let bearer = |token: &Option<Secret>| token.as_ref().map(|it| it.expose().to_owned());
        let outcome = attempt(bearer(&token)).await;
        let is_refused = outcome.as_ref().err().and_then(status_of) == Some(401);
        match (&self.0.client.oauth, token) {
            (Some(oauth), Some(token)) if is_refused => {
                drop(outcome);
                oauth.refused(&token).await;
                attempt(bearer(&self.token().await?)).await
            }
            _ => outcome,
        }
    }
}

impl StreamableHttpClient for Mcp {
    type Error = reqwest::Error;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<StreamableHttpPostResponse, Fault> {
        let max = StreamableHttpClientTransportConfig::default().max_sse_event_size;
        self.post_message_with_max_sse_event_size(uri, message, session, None, headers, max).await
    }

    async fn post_message_with_max_sse_event_size(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
        event_bytes_max: usize,
    ) -> Result<StreamableHttpPostResponse, Fault> {
        let is_first = session.is_none();
        let answer = self
            .authorized(|token| {
                self.0.client.http.post_message_with_max_sse_event_size(
                    Arc::clone(&uri),
                    message.clone(),
                    session.clone(),
                    token,
                    headers.clone(),
                    event_bytes_max,
                )
            })
            .await?;
        let given = matches!(
            &answer,
            StreamableHttpPostResponse::Json(_, Some(_))
                | StreamableHttpPostResponse::Sse(_, Some(_))
        );
        if is_first && given {
            self.0.sessions.send_modify(|open| *open += 1);
        }
        Ok(answer)
    }

    async fn delete_session(
        &self,
        uri: Arc<str>,
        session: Arc<str>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<(), Fault> {
        let ended = self
            .authorized(|token| {
                let (uri, session) = (Arc::clone(&uri), Arc::clone(&session));
                self.0.client.http.delete_session(uri, session, token, headers.clone())
            })
            .await;
        self.0.sessions.send_modify(|open| *open = open.saturating_sub(1));
        ended
    }

    async fn get_stream(
        &self,
        uri: Arc<str>,
        session: Option<Arc<str>>,
        last_event: Option<String>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, Fault> {
        let max = StreamableHttpClientTransportConfig::default().max_sse_event_size;
        self.get_stream_with_max_sse_event_size(uri, session, last_event, None, headers, max).await
    }

    async fn get_stream_with_max_sse_event_size(
        &self,
        uri: Arc<str>,
        session: Option<Arc<str>>,
        last_event: Option<String>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
        event_bytes_max: usize,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, Fault> {
        let turn = {
            let mut next = self.0.stream_at.lock().await;
            let turn = (*next).max(Instant::now());
            *next = turn + STREAM_EVERY_MIN;
            turn
        };
        sleep_until(turn).await;
        self.authorized(|token| {
            self.0.client.http.get_stream_with_max_sse_event_size(
                Arc::clone(&uri),
                session.clone(),
                last_event.clone(),
                token,
                headers.clone(),
                event_bytes_max,
            )
        })
        .await
    }
}

/// The status a server answered with, if the fault is that it was no good one.
pub(super) fn status_of(fault: &Fault) -> Option<u16> {
    match fault {
        StreamableHttpError::AuthRequired(_) => Some(401),
        StreamableHttpError::InsufficientScope(_) => Some(403),
        StreamableHttpError::SessionExpired => Some(404),
        StreamableHttpError::HttpStatus(error) => Some(error.status),
        StreamableHttpError::Client(error) => error.status().map(|status| status.as_u16()),
        // rmcp keeps other statuses in its text alone: `HTTP 307 Temporary …`.
        StreamableHttpError::UnexpectedServerResponse(text) => {
            text.strip_prefix("HTTP ")?.get(..3)?.parse().ok()
        }
        _ => None,
    }
}

/// A fault in words, without the address.
pub(super) fn fault_text(fault: &Fault) -> String {
    match status_of(fault) {
        Some(401) => "it answers 401 (unauthorized): the credential under `headers` or `oauth` \
                      is missing or refused; a login in a browser is not possible here"
            .into(),
        Some(403) => "it answers 403 (forbidden): the credential does not allow this".into(),
        Some(status @ 300..=399) => {
            format!("it answers {status}, a redirect; none is followed: configure its target")
        }
        Some(status) => format!("it answers {status}"),
        None => match fault {
            StreamableHttpError::Client(error) => explain(error),
            StreamableHttpError::Io(error) => error.to_string(),
            other => other.to_string(),
        },
    }
}
