//! MCP's streamable HTTP, on [`Client`].
//!
//! rmcp keeps the session and says what to ask; the asking is here. A server's
//! answer is bounded before anything is made of it: a body of JSON and one event
//! of a stream in bytes and in values, what is said of a refusal in bytes.
//!
//! Deliberately absent is any repetition: a request is sent once, but for an
//! access token that was refused ([`Client::send`]).

use std::collections::HashMap;
use std::future::poll_fn;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_core::stream::BoxStream;
use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use rmcp::model::{
    ClientJsonRpcMessage, ClientRequest, ErrorData, GetExtensions as _, RequestId,
    ServerJsonRpcMessage,
};
use rmcp::transport::common::client_side_sse::{ExponentialBackoff, SseRetryPolicy};
use rmcp::transport::streamable_http_client::{
    AuthRequiredError, HttpStatusError, SseError, StreamableHttpClient,
    StreamableHttpClientTransport, StreamableHttpClientTransportConfig, StreamableHttpError,
    StreamableHttpPostResponse,
};
use sse_stream::Sse;
use tokio::sync::{Mutex, Semaphore, watch};
use tokio::time::{Instant, sleep_until, timeout};

use super::events::events;
use super::http::{BodyError, Client, SendError, body_within, retry_after};
use super::received::{self, answers, is_of_another_request};
use super::unread::SMALL_BYTES_MAX;
use super::unusable::{MESSAGE_BYTES_MAX, Unusable, has_few_values, is_same};
use crate::beside;
use crate::endpoint::Endpoint;
use crate::uri::percent_encoded;

/// Two requests for one server's stream of events have at least this between
/// them, whatever the server says about coming back.
const STREAM_EVERY_MIN: Duration = Duration::from_millis(500);
/// The longest wait before a broken stream is asked for again.
const STREAM_RETRY_MAX: Duration = Duration::from_secs(60);
/// How often a broken stream is asked for again, in a row.
const STREAM_RETRIES_MAX: usize = 10;
/// How long the end of a session may take.
const DELETE_TIME_MAX: Duration = Duration::from_secs(2);
/// Requests to one server that may wait for an answer at the same time. Further
/// ones wait for a place, whosever they are.
pub(super) const REQUESTS_MAX: usize = 512;
/// The most bytes of what a server says with a status that is no success.
const REFUSAL_BYTES_MAX: usize = 64 * 1024;
/// How long an answer to `server/discover` may take, after which `initialize` is
/// asked: less than the MCP library itself would wait.
const DISCOVER_TIME_MAX: Duration = Duration::from_secs(8);

/// Large answers of all servers that are read at the same time. None waits for anything but
/// a processor, which others need too.
static READING: Semaphore = Semaphore::const_new(2);

/// Codes of errors that JSON-RPC leaves to servers.
const SERVER_ERRORS: RangeInclusive<i32> = -32_099..=-32_000;

/// The session that a request is of.
const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");
/// The last event that was seen of a stream that broke.
const LAST_EVENT: HeaderName = HeaderName::from_static("last-event-id");
const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExchangeError {
    #[error(transparent)]
    Send(#[from] SendError),
    #[error(transparent)]
    Body(#[from] BodyError),
}

/// What rmcp's transport ends with.
pub(super) type Fault = StreamableHttpError<ExchangeError>;

/// When a request is of no use any more, beside it in its extensions: it may have
/// to wait for an access token, which the MCP library knows nothing of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Until(pub(super) Instant);

impl Until {
    fn of(message: &ClientJsonRpcMessage) -> Option<Instant> {
        let ClientJsonRpcMessage::Request(asked) = message else { return None };
        asked.request.extensions().get().map(|Self(until)| *until)
    }
}

/// The way to one server.
#[derive(Clone, Debug)]
pub(super) struct Mcp(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    client: Client,
    /// Sessions that were given and not yet given back.
    sessions: watch::Sender<usize>,
    /// When the next stream may be asked for.
    stream_at: Mutex<Instant>,
    /// Whether a stream had an event that was too large: the next would begin with
    /// it again, and the MCP library asks for it without end.
    is_too_large: Arc<AtomicBool>,
}

impl Mcp {
    pub(super) fn new(client: Client) -> Self {
        let (sessions, _) = watch::channel(0);
        let (stream_at, is_too_large) = (Mutex::new(Instant::now()), Arc::default());
        Self(Arc::new(Shared { client, sessions, stream_at, is_too_large }))
    }

    /// A transport to the server.
    pub(super) fn transport(&self, endpoint: &Endpoint) -> StreamableHttpClientTransport<Self> {
        let mut retry = ExponentialBackoff::default();
        retry.max_times = Some(STREAM_RETRIES_MAX);
        retry.max_delay = Some(STREAM_RETRY_MAX);
        let mut url = endpoint.url.clone();
        if !endpoint.query.is_empty() {
            let own = url.query().filter(|own| !own.is_empty()).map(str::to_owned);
            let keys = endpoint.query.iter();
            let keys = keys.map(|(name, key)| {
                format!("{}={}", percent_encoded(name), percent_encoded(key.expose()))
            });
            url.set_query(Some(&own.into_iter().chain(keys).collect::<Vec<_>>().join("&")));
        }
        let mut config = StreamableHttpClientTransportConfig::with_uri(url.as_str())
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

    /// Sends a request of this session, unless it has to wait till after `until`.
    async fn send(
        &self,
        request: RequestBuilder,
        session: Option<&str>,
        headers: HashMap<HeaderName, HeaderValue>,
        until: Option<Instant>,
    ) -> Result<Response, Fault> {
        let mut request = request.headers(headers.into_iter().collect::<HeaderMap>());
        if let Some(session) = session {
            request = request.header(SESSION, session);
        }
        self.0.client.send(request, until).await.map_err(|error| Fault::Client(error.into()))
    }

    /// What comes of the first request of the newer protocol. A stream is read here:
    /// the MCP library would wait for its events as long as they may take.
    async fn began(
        &self,
        response: Response,
        asked: RequestId,
    ) -> Result<StreamableHttpPostResponse, Fault> {
        if !response.status().is_success() {
            return refusal(response, Asked::Era(asked), false).await;
        }
        let era = Asked::Era(asked.clone());
        let (message, session) = match answer(response, era, &self.0.is_too_large).await? {
            StreamableHttpPostResponse::Sse(events, session) => {
                match answer_among(events, &asked).await {
                    Some(message) => (message, session),
                    None => {
                        let why = "it ends its answer before there is one";
                        return Ok(of_the_older_era(asked, why));
                    }
                }
            }
            StreamableHttpPostResponse::Json(message, session) => (message, session),
            other => return Ok(other),
        };
        // Some answer whatever they are asked.
        Ok(match is_of_another_request(&message) {
            true => of_the_older_era(asked, "its answer is none to what was asked"),
            false => StreamableHttpPostResponse::Json(message, session),
        })
    }

    fn request(&self, method: Method, uri: &str) -> RequestBuilder {
        self.0.client.http().request(method, uri)
    }
}

impl StreamableHttpClient for Mcp {
    type Error = ExchangeError;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<StreamableHttpPostResponse, Fault> {
        let request = self
            .request(Method::POST, &uri)
            .header(ACCEPT, format!("{JSON}, {EVENTS}"))
            .header(CONTENT_TYPE, JSON)
            .body(serde_json::to_vec(&message)?);
        let sent = self.send(request, session.as_deref(), headers, Until::of(&message));
        let asked = match message {
            ClientJsonRpcMessage::Request(asked) => match asked.request {
                ClientRequest::DiscoverRequest(_) if session.is_none() => Asked::Era(asked.id),
                _ => Asked::Request(asked.id),
            },
            _ => Asked::Nothing,
        };
        let answer = match asked {
            Asked::Era(id) => {
                let exchange = async { self.began(sent.await?, id.clone()).await };
                match timeout(DISCOVER_TIME_MAX, exchange).await {
                    Ok(answer) => answer?,
                    Err(_) => of_the_older_era(id, "it does not answer"),
                }
            }
            asked => {
                let response = sent.await?;
                let status = response.status();
                if status == StatusCode::NOT_FOUND && session.is_some() {
                    return Err(Fault::SessionExpired);
                }
                if !status.is_success() {
                    return refusal(response, asked, session.is_some()).await;
                }
                answer(response, asked, &self.0.is_too_large).await?
            }
        };
        if let StreamableHttpPostResponse::Json(_, Some(_))
        | StreamableHttpPostResponse::Sse(_, Some(_)) = answer
            && session.is_none()
        {
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
        let request = self.request(Method::DELETE, &uri);
        let ended = self.send(request, Some(&session), headers, None).await;
        self.0.sessions.send_modify(|open| *open = open.saturating_sub(1));
        let ended = ended?;
        match ended.status() {
            // A server need not let its sessions be ended.
            StatusCode::METHOD_NOT_ALLOWED => Ok(()),
            status if status.is_success() => Ok(()),
            _ => Err(refused(&ended)),
        }
    }

    async fn get_stream(
        &self,
        uri: Arc<str>,
        session: Option<Arc<str>>,
        last_event: Option<String>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, Fault> {
        if self.0.is_too_large.load(Ordering::Acquire) {
            return Err(Fault::ServerDoesNotSupportSse);
        }
        let turn = {
            let mut next = self.0.stream_at.lock().await;
            let turn = (*next).max(Instant::now());
            *next = turn + STREAM_EVERY_MIN;
            turn
        };
        sleep_until(turn).await;
        let mut request = self.request(Method::GET, &uri).header(ACCEPT, EVENTS);
        if let Some(last_event) = last_event {
            request = request.header(LAST_EVENT, last_event);
        }
        let response = self.send(request, session.as_deref(), headers, None).await?;
        match response.status() {
            StatusCode::METHOD_NOT_ALLOWED => Err(Fault::ServerDoesNotSupportSse),
            // Not asked for again and again: the credential is no better then.
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(Fault::AuthRequired(AuthRequiredError::new(String::new())))
            }
            status if !status.is_success() => Err(refused(&response)),
            _ if is(&response, EVENTS) => {
                let is_too_large = Arc::clone(&self.0.is_too_large);
                Ok(events(response, MESSAGE_BYTES_MAX, None, is_too_large))
            }
            _ => Err(Fault::UnexpectedContentType(content_type(&response))),
        }
    }
}

/// What a message that is sent asks.
enum Asked {
    /// Nothing: it tells.
    Nothing,
    /// A request.
    Request(RequestId),
    /// The one that a session of the newer protocol begins with: whatever a server
    /// says to that which knows no such request, it may know the older one.
    Era(RequestId),
}

/// What the MCP library is given in the place of an answer to `server/discover` that
/// is none: so it asks `initialize`.
fn of_the_older_era(asked: RequestId, why: &str) -> StreamableHttpPostResponse {
    let error = ErrorData::invalid_request(why.to_owned(), None);
    StreamableHttpPostResponse::Json(ServerJsonRpcMessage::error(error, Some(asked)), None)
}

/// What a server answers that took a message.
async fn answer(
    response: Response,
    asked: Asked,
    is_too_large: &Arc<AtomicBool>,
) -> Result<StreamableHttpPostResponse, Fault> {
    let status = response.status();
    let has_none = matches!(status, StatusCode::ACCEPTED | StatusCode::NO_CONTENT);
    let session = response.headers().get(SESSION);
    let session = session.and_then(|id| id.to_str().ok()).map(str::to_owned);
    if !has_none && is(&response, EVENTS) {
        let asked = match asked {
            Asked::Nothing => None,
            Asked::Request(id) | Asked::Era(id) => Some(id),
        };
        let events = events(response, MESSAGE_BYTES_MAX, asked, Arc::clone(is_too_large));
        return Ok(StreamableHttpPostResponse::Sse(events, session));
    }
    let asked = match asked {
        // To what is no request nothing is to be said.
        Asked::Nothing => return Ok(StreamableHttpPostResponse::Accepted),
        Asked::Era(id) if has_none || !is(&response, JSON) => {
            return Ok(of_the_older_era(id, "it answers with no message of MCP"));
        }
        Asked::Request(id) | Asked::Era(id) => id,
    };
    if has_none {
        // The answer to a request comes on its own exchange, and this is over.
        return Ok(StreamableHttpPostResponse::Json(Unusable::Nothing.answer(asked), session));
    }
    if !is(&response, JSON) {
        return Err(Fault::UnexpectedContentType(content_type(&response)));
    }
    let message = match body_within(response, MESSAGE_BYTES_MAX).await {
        Ok(body) if body.len() <= SMALL_BYTES_MAX => answer_to(asked, &body),
        // The MCP library talks with a server in one task, which is everybody's.
        Ok(body) => {
            let turn = READING.acquire().await;
            beside(move || {
                let _turn = turn;
                answer_to(asked, &body)
            })
            .await
        }
        Err(BodyError::TooLarge { .. }) => Unusable::TooLong.answer(asked),
        Err(error) => return Err(Fault::Client(error.into())),
    };
    Ok(StreamableHttpPostResponse::Json(message, session))
}

/// The answer among the events of a stream; `None` if they end without.
async fn answer_among(
    mut events: BoxStream<'static, Result<Sse, SseError>>,
    asked: &RequestId,
) -> Option<ServerJsonRpcMessage> {
    loop {
        let event = poll_fn(|context| events.as_mut().poll_next(context)).await?.ok()?;
        let data = event.data.unwrap_or_default();
        let said = serde_json::from_str::<ServerJsonRpcMessage>(&data);
        if let Ok(said) = said
            && answers(&said).is_some_and(|id| is_same(id, asked))
        {
            return Some(said);
        }
    }
}

/// The answer in a body. Nothing else comes on this exchange, so whatever is no
/// answer to what was asked is the end of that all the same; an error is its
/// error, whatever id it has: a server that could not read a request does not
/// know which it was.
fn answer_to(asked: RequestId, body: &[u8]) -> ServerJsonRpcMessage {
    if !has_few_values(body) {
        return Unusable::TooMany.answer(asked);
    }
    match received::read(body).and_then(serde_json::from_value) {
        Ok(ServerJsonRpcMessage::Error(said)) => {
            ServerJsonRpcMessage::error(said.error, Some(asked))
        }
        Ok(said) if answers(&said).is_some_and(|id| is_same(id, &asked)) => said,
        Ok(_) => Unusable::Another.answer(asked),
        Err(error) => Unusable::unread(&error).answer(asked),
    }
}

/// What comes of a status that is no success: the server's own error, if it says
/// one.
async fn refusal(
    response: Response,
    asked: Asked,
    is_in_session: bool,
) -> Result<StreamableHttpPostResponse, Fault> {
    let status = response.status();
    // It is about a credential, and not about what was asked.
    if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
        return Err(refused(&response));
    }
    let waits = refused(&response);
    let said = match is(&response, JSON) {
        true => body_within(response, REFUSAL_BYTES_MAX).await.unwrap_or_default(),
        false => Vec::new(),
    };
    let said = match received::read(&said).and_then(serde_json::from_value) {
        Ok(ServerJsonRpcMessage::Error(said)) => {
            // Servers made with MCP's own libraries say so, and not by 404, that they know no
            // such session: what was asked was not looked at.
            let is_unknown = status == StatusCode::BAD_REQUEST
                && said.id.is_none()
                && SERVER_ERRORS.contains(&said.error.code.0);
            if is_in_session && is_unknown && matches!(asked, Asked::Request(_)) {
                return Err(Fault::SessionExpired);
            }
            Some(said.error)
        }
        _ => None,
    };
    match (asked, said) {
        (Asked::Request(id) | Asked::Era(id), Some(error)) => {
            let message = ServerJsonRpcMessage::error(error, Some(id));
            Ok(StreamableHttpPostResponse::Json(message, None))
        }
        // A server that understood what was told, and did not want it.
        (Asked::Nothing, Some(_)) => Ok(StreamableHttpPostResponse::Accepted),
        // Some fail over a request that they do not know.
        (Asked::Era(id), None) if !status.is_redirection() => {
            Ok(of_the_older_era(id, &format!("it answers {status}")))
        }
        (_, None) => Err(waits),
    }
}

fn refused(response: &Response) -> Fault {
    HttpStatusError::new(response.status().as_u16(), retry_after(response)).into()
}

fn content_type(response: &Response) -> Option<String> {
    let value = response.headers().get(CONTENT_TYPE)?;
    Some(String::from_utf8_lossy(value.as_bytes()).into_owned())
}

/// Whether a response is of this media type, whatever its parameters.
fn is(response: &Response, media_type: &str) -> bool {
    content_type(response).is_some_and(|found| {
        found.split(';').next().is_some_and(|it| it.trim().eq_ignore_ascii_case(media_type))
    })
}

/// The status a server answered with, if the fault is that it was no good one.
pub(super) fn status_of(fault: &Fault) -> Option<u16> {
    match fault {
        Fault::SessionExpired => Some(404),
        Fault::AuthRequired(_) => Some(401),
        Fault::HttpStatus(error) => Some(error.status),
        _ => None,
    }
}

/// A refusal as a program is told: what to do about a credential or an address is
/// the operator's to know.
pub(super) fn refusal_text(fault: &Fault, status: u16) -> String {
    match fault {
        Fault::HttpStatus(HttpStatusError { retry_after: Some(when), .. }) => {
            format!("it answers {status}, to be asked again after: {}", when.escape_debug())
        }
        _ => format!("it answers {status}"),
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
        Some(status) => refusal_text(fault, status),
        None => match fault {
            Fault::Client(error) => error.to_string(),
            Fault::UnexpectedContentType(kind) => {
                let kind = kind.as_deref().map_or("of no type".into(), |it| crate::cut(it, 128));
                format!("its answer is {kind}, and no JSON and no events: is the address right?")
            }
            other => other.to_string(),
        },
    }
}
