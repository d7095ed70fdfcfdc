//! Streamable HTTP, for principals with tokens.
//!
//! Who asks is decided before a body is read: by a bearer token, of which only
//! the SHA-256 is known here. Each principal has a door and sessions of its
//! own, so that a session's id is of no use to another. Refused as early are hosts
//! and origins that are not allowed: a name that an attacker points at
//! loopback, and pages of browsers ([`web::guard`]). rmcp speaks the
//! protocol, in sessions or without as its version has it. Which origins it knows
//! is what it says of them; it is asked that before a body is read as well.
//!
//! Deliberately absent is TLS: it listens on loopback, or behind a proxy.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forge_log::Seldom;
use forge_protocol::json;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Empty, Full};
use hyper::body::{Body, Bytes};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use rmcp::model::{
    ClientJsonRpcMessage, ClientRequest, ErrorCode, ErrorData, RequestId, ServerJsonRpcMessage,
};
use rmcp::transport::StreamableHttpService;
use rmcp::transport::streamable_http_server::StreamableHttpServerConfig;
use rmcp::transport::streamable_http_server::session::SessionManager as _;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::kept::Ahead;
use super::link::ServiceLink;
use super::sessions::{SESSIONS_MAX, Sessions};
use super::skim::Skim;
use super::{Door, MESSAGE_BYTES_MAX, REQUEST_BYTES_MAX, REQUESTS_MAX, handler};
use crate::web::guard::Refused;
use crate::web::listen::After;
use crate::web::places::Standing;
use crate::web::token::Unauthenticated;
use crate::web::{self, Held, Listener, Readiness, Sent, TokenHash};

/// The one path that is served.
const PATH: &str = "/mcp";
/// Which session a message belongs to.
const HEADER_SESSION_ID: &str = "mcp-session-id";
/// What a client has of a stream that broke.
const HEADER_LAST_EVENT_ID: &str = "last-event-id";
/// What a client of MCP accepts.
const BOTH: &str = "application/json, text/event-stream";
/// The content type of an answer.
const JSON: &str = "application/json";
/// A refusal that is no message of MCP.
const TEXT: &str = "text/plain; charset=utf-8";
/// To who names a session that is not there.
const NO_SESSION: &str = "there is no such session, or it has ended: send initialize again, \
                          without an Mcp-Session-Id";
const NO_STREAM: &str = "the stream of this Last-Event-ID is not kept any more, or never was: send \
                         its request again";
/// What some clients begin a text with.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// Pages of this host. They need a token like everybody else.
const LOOPBACK_ORIGINS: [&str; 3] = ["http://localhost:*", "http://127.0.0.1:*", "http://[::1]:*"];
/// Up to so many bytes a message is small: there is always room for it, so that
/// what cancels a large one is heard.
const SMALL_MESSAGE_BYTES: usize = 64 * 1024;
/// What is looked through of a message that is not read, for its id.
const SKIMMED_BYTES_MAX: usize = 4 * MESSAGE_BYTES_MAX;
/// How long a request's body may take to come: it has its room meanwhile.
const BODY_TIME_MAX: Duration = Duration::from_secs(30);
/// How long that and the beginning of its answer may take together.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(120);

/// How long requests may take to be answered when the door closes: less than
/// connections have then, so that other streams end in good order.
const LAST_ANSWERS_TIME_MAX: Duration = Duration::from_secs(4);
/// How often it is looked whether they are.
const LAST_ANSWERS_PAUSE: Duration = Duration::from_millis(20);

/// Who may ask, and from where.
#[derive(Debug, Default)]
pub struct HttpOptions {
    /// Each principal's tokens, with the principal's door.
    pub doors: Vec<(Vec<TokenHash>, Door)>,
    /// Host names by which clients may reach it, beside `localhost`.
    pub hosts: Vec<String>,
    /// Origins of browser pages that may ask, beside those on loopback.
    pub origins: Vec<String>,
}

/// One principal's way in.
#[derive(Clone)]
struct Entrance {
    principal: String,
    service: StreamableHttpService<Door, Sessions>,
    sessions: Arc<Sessions>,
    /// Answers that are not sent to their end.
    open: Arc<Semaphore>,
    /// Streams of what sessions say unasked. They last as long as their clients
    /// like, and take no answer's place.
    streams: Arc<Semaphore>,
    /// Bytes of large messages that are not answered to their end: as values they
    /// take many times that.
    room: Arc<Semaphore>,
}

impl Entrance {
    /// Whether the session is there that a request names. One that names none is
    /// rmcp's to refuse.
    async fn has_session(&self, headers: &HeaderMap) -> bool {
        let Some(id) = headers.get(HEADER_SESSION_ID) else { return true };
        let Ok(id) = id.to_str() else { return false };
        self.sessions.has_session(&id.into()).await.unwrap_or(false)
    }

    /// What is ahead of a client that comes back to a stream.
    async fn ahead(&self, headers: &HeaderMap) -> Ahead {
        let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        match (text(HEADER_SESSION_ID), text(HEADER_LAST_EVENT_ID)) {
            (Some(id), Some(event)) if self.has_session(headers).await => {
                self.sessions.ahead(&id.into(), event)
            }
            _ => Ahead::More,
        }
    }

    /// Whether nobody waits for an answer.
    fn is_quiet(&self) -> bool {
        self.open.available_permits() == REQUESTS_MAX && self.sessions.is_quiet()
    }

    /// Whether rmcp refuses the origin of a request: it looks at that and the host
    /// before anything else, and says of another method that it is not allowed.
    async fn is_foreign(&self, request: &Request<Sent>) -> bool {
        if !request.headers().contains_key(header::ORIGIN) {
            return false;
        }
        let mut head = Request::new(Empty::<Bytes>::new());
        *head.method_mut() = Method::OPTIONS;
        *head.uri_mut() = request.uri().clone();
        for name in [header::HOST, header::ORIGIN] {
            if let Some(value) = request.headers().get(&name) {
                head.headers_mut().insert(name, value.clone());
            }
        }
        self.service.handle(head).await.status() != StatusCode::METHOD_NOT_ALLOWED
    }

    /// Has rmcp answer. What it cannot read it takes for another media type. `held`
    /// gets what is to be kept until the answer is sent to its end.
    async fn handle(
        &self,
        mut request: Request<Sent>,
        held: &mut Vec<OwnedSemaphorePermit>,
    ) -> Said {
        // rmcp keeps what a request has with its session, and a place is its connection's.
        request.extensions_mut().remove::<Arc<Standing>>();
        let headers = request.headers_mut();
        // rmcp looks for both by their names, and for an event without one.
        if accepts_anything(headers) {
            headers.insert(header::ACCEPT, HeaderValue::from_static(BOTH));
        }
        if headers.get(HEADER_LAST_EVENT_ID).is_some_and(HeaderValue::is_empty) {
            headers.remove(HEADER_LAST_EVENT_ID);
        }
        if request.method() == Method::GET {
            match self.ahead(request.headers()).await {
                Ahead::More => {}
                // To a stream without an event clients come back at once, and without end.
                Ahead::Nothing => {
                    let mut over = Response::new(Empty::new().boxed());
                    *over.status_mut() = StatusCode::NO_CONTENT;
                    return over;
                }
                // rmcp would give one without an end to wait for.
                Ahead::Unknown => return text(StatusCode::GONE, NO_STREAM.to_owned()),
            }
        }
        if request.method() != Method::POST {
            return in_our_words(self.service.handle(request).await);
        }
        if !web::guard::is_plain(request.headers()) {
            let what = "send application/json, and no Content-Encoding".to_owned();
            return text(StatusCode::UNSUPPORTED_MEDIA_TYPE, what);
        }
        let (head, body) = request.into_parts();
        let mut body = match tokio::time::timeout(BODY_TIME_MAX, read(body, &self.room, held)).await
        {
            // As over stdio.
            Ok(Ok(body)) if body.starts_with(BYTE_ORDER_MARK) => {
                body.slice(BYTE_ORDER_MARK.len()..)
            }
            Ok(Ok(body)) => body,
            Ok(Err(unread)) => return unread.answer(),
            Err(_) => {
                let what = format!("the body took more than {} s", BODY_TIME_MAX.as_secs());
                return text(StatusCode::REQUEST_TIMEOUT, what);
            }
        };
        let is_json = head.headers.get(header::CONTENT_TYPE).is_some_and(|kind| {
            let kind = kind.as_bytes().split(|byte| *byte == b';').next().unwrap_or_default();
            kind.trim_ascii().eq_ignore_ascii_case(b"application/json")
        });
        // Read twice and held once: rmcp has the bytes alone while a request lasts.
        if is_json {
            let mut read = json::from_slice::<ClientJsonRpcMessage>(&body);
            if read.is_err()
                && std::str::from_utf8(&body).is_ok()
                && let Some(mended) = json::mended(&body)
            {
                body = mended.into();
                read = json::from_slice(&body);
            }
            let refusal = match read {
                Ok(message) => no_beginning(&message),
                Err(error) => Some(super::no_message(&body, &error)),
            };
            if let Some(refusal) = refusal {
                return said(StatusCode::BAD_REQUEST, &refusal);
            }
        }
        in_our_words(self.service.handle(Request::from_parts(head, Full::new(body))).await)
    }
}

/// What rmcp says of a session that is not there, and what to do then. It says it
/// without a media type, which an answer of MCP has.
fn in_our_words(said: Said) -> Said {
    let is_of_session = said.status() == StatusCode::NOT_FOUND
        && !said.headers().contains_key(header::CONTENT_TYPE);
    if is_of_session { text(StatusCode::NOT_FOUND, NO_SESSION.to_owned()) } else { said }
}

/// What is said to an `initialize` whose params cannot be read. rmcp takes it for one
/// of another method, which needs a session.
fn no_beginning(message: &ClientJsonRpcMessage) -> Option<ServerJsonRpcMessage> {
    let ClientJsonRpcMessage::Request(request) = message else { return None };
    let ClientRequest::CustomRequest(custom) = &request.request else { return None };
    let error = (custom.method == "initialize").then(|| handler::unreadable(custom))??;
    Some(ServerJsonRpcMessage::error(error, Some(request.id.clone())))
}

/// Why a body is not taken, with the id of the request in it, if that was seen.
#[derive(Debug)]
enum Unread {
    TooLarge(Option<RequestId>),
    NoRoom(Option<RequestId>),
    Broken(String),
}

impl Unread {
    /// What is about one request is that one's answer, as over stdio: to many clients any
    /// other status is the end of all that they wait for in their session.
    fn answer(self) -> Said {
        let (code, what, id, status) = match self {
            Self::TooLarge(id) => {
                let what = format!("a message has at most {MESSAGE_BYTES_MAX} bytes");
                (ErrorCode::INVALID_REQUEST, what, id, StatusCode::PAYLOAD_TOO_LARGE)
            }
            Self::NoRoom(id) => {
                let what = format!(
                    "too much at once: large messages have {REQUEST_BYTES_MAX} bytes together"
                );
                (ErrorCode::INTERNAL_ERROR, what, id, StatusCode::SERVICE_UNAVAILABLE)
            }
            Self::Broken(why) => {
                return text(StatusCode::BAD_REQUEST, format!("the body: {why}"));
            }
        };
        if let Some(id) = id {
            let error = ErrorData::new(code, what, None);
            return said(StatusCode::OK, &ServerJsonRpcMessage::error(error, Some(id)));
        }
        let mut refusal = text(status, what);
        if status == StatusCode::SERVICE_UNAVAILABLE {
            refusal.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        refusal
    }
}

/// The id of a request that is not read and began with these bytes, none of which is kept
/// while the rest goes by. Of one that does not end there is none.
async fn skimmed<B: Body<Data = Bytes> + Unpin>(
    began: [Bytes; 2],
    mut body: B,
) -> Option<RequestId> {
    let mut skim = Skim::default();
    let mut left = SKIMMED_BYTES_MAX;
    if body.size_hint().lower() > left as u64 {
        return None;
    }
    for bytes in began {
        skim.pass(&bytes);
    }
    while let Some(frame) = body.frame().await {
        let bytes = frame.ok()?.into_data().unwrap_or_default();
        left = left.checked_sub(bytes.len())?;
        skim.pass(&bytes);
    }
    skim.id()
}

/// Reads a message. A large one has room before it is in memory: for all of it
/// where its length is said, else for each piece as it comes.
async fn read<B: Body<Data = Bytes, Error: std::fmt::Display> + Unpin>(
    mut body: B,
    room: &Arc<Semaphore>,
    held: &mut Vec<OwnedSemaphorePermit>,
) -> Result<Bytes, Unread> {
    let mut bytes = Vec::new();
    let mut taken: Option<OwnedSemaphorePermit> = None;
    let mut wanted = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    let mut piece = Bytes::new();
    loop {
        if wanted > MESSAGE_BYTES_MAX {
            drop(taken);
            return Err(Unread::TooLarge(skimmed([bytes.into(), piece], body).await));
        }
        let has = taken.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        if wanted > SMALL_MESSAGE_BYTES.max(has) {
            let more = Arc::clone(room).try_acquire_many_owned((wanted - has) as u32);
            let Ok(more) = more else {
                drop(taken);
                return Err(Unread::NoRoom(skimmed([bytes.into(), piece], body).await));
            };
            match &mut taken {
                Some(taken) => taken.merge(more),
                None => taken = Some(more),
            }
        }
        bytes.extend_from_slice(&piece);
        let Some(frame) = body.frame().await else { break };
        let frame = frame.map_err(|error| Unread::Broken(error.to_string()))?;
        piece = frame.into_data().unwrap_or_default();
        wanted = wanted.max(bytes.len() + piece.len());
    }
    held.extend(taken);
    Ok(bytes.into())
}

type Said = Response<BoxBody<Bytes, Infallible>>;
type Answer = Response<Held<BoxBody<Bytes, Infallible>, Vec<OwnedSemaphorePermit>>>;

fn said(status: StatusCode, message: &ServerJsonRpcMessage) -> Said {
    // It is a map of texts and numbers.
    with_body(status, JSON, serde_json::to_vec(message).unwrap_or_default())
}

/// A refusal of what has no id, or none that is known. As a message of MCP it would be
/// nobody's answer, and whoever asked would wait on.
fn text(status: StatusCode, what: String) -> Said {
    with_body(status, TEXT, what.into_bytes())
}

fn with_body(status: StatusCode, kind: &'static str, body: Vec<u8>) -> Said {
    let mut response = Response::new(Full::new(Bytes::from(body)).boxed());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// Serves until it is told to end. What runs then is cancelled.
pub async fn serve(listener: Listener, options: HttpOptions, end: impl Future<Output = ()>) {
    let closing = CancellationToken::new();
    let HttpOptions { doors, hosts, origins } = options;
    let origins = origins.iter().map(|origin| with_its_port(origin));
    let config = StreamableHttpServerConfig::default()
        // Before anything comes to it they are looked at here.
        .disable_allowed_hosts()
        .with_allowed_origins(LOOPBACK_ORIGINS.map(str::to_owned).into_iter().chain(origins))
        .enforce_origin_validation()
        .with_max_request_body_bytes(MESSAGE_BYTES_MAX)
        // Sessions have events without data for clients that know them.
        .with_sse_retry(None)
        .with_cancellation_token(closing.clone());
    let mut entrances = Vec::new();
    let mut open_doors = Vec::new();
    for (tokens, door) in doors {
        open_doors.push(door.clone());
        let principal = door.0.principal.name.clone();
        let sessions = Arc::new(Sessions::new(LocalSessionManager::default()));
        let own = Arc::clone(&sessions);
        let service = StreamableHttpService::new(move || Ok(door.clone()), own, config.clone());
        let open = Arc::new(Semaphore::new(REQUESTS_MAX));
        let streams = Arc::new(Semaphore::new(SESSIONS_MAX));
        let room = Arc::new(Semaphore::new(REQUEST_BYTES_MAX));
        entrances.push((tokens, Entrance { principal, service, sessions, open, streams, room }));
    }
    let gate = Arc::new(Gate {
        entrances,
        hosts,
        // All of them are of one service.
        behind: open_doors.first().map(|door| Arc::clone(&door.0.service)),
        readiness: Readiness::default(),
    });
    let closed = Arc::clone(&gate);
    let service = service_fn(move |request| {
        let gate = Arc::clone(&gate);
        async move { Ok::<_, Infallible>(gate.answer(request).await) }
    });
    let close = || {
        open_doors.iter().for_each(Door::close);
        // What ran is cancelled, and whoever waits for it is told so before rmcp
        // ends its streams.
        tokio::spawn(async move {
            let quiet = async {
                while !closed.entrances.iter().all(|(_, entrance)| entrance.is_quiet()) {
                    tokio::time::sleep(LAST_ANSWERS_PAUSE).await;
                }
            };
            let _ = tokio::time::timeout(LAST_ANSWERS_TIME_MAX, quiet).await;
            closing.cancel();
        });
    };
    let end = async {
        end.await;
        After::Closed
    };
    web::listen::serve(listener, service, Arc::default(), end, close).await;
}

/// What a request comes to first.
struct Gate {
    entrances: Vec<(Vec<TokenHash>, Entrance)>,
    hosts: Vec<String>,
    behind: Option<Arc<ServiceLink>>,
    readiness: Readiness,
}

impl Gate {
    async fn answer(&self, request: Request<Sent>) -> Answer {
        if request.method() == Method::GET
            && let Some(standing) = self.standing(request.uri().path()).await
        {
            return standing;
        }
        let known = web::token::bearer(request.headers()).and_then(|token| {
            let entrances = self.entrances.iter().map(|(tokens, entrance)| (&**tokens, entrance));
            web::token::holder(token, entrances).ok_or(Unauthenticated::NOBODYS)
        });
        let entrance = match known {
            Ok(entrance) => {
                web::places::stay(request.extensions(), &entrance.principal);
                entrance
            }
            Err(why) => {
                log_refusal("unauthenticated");
                let mut refusal = say(StatusCode::UNAUTHORIZED, why.what());
                refusal.headers_mut().insert(header::WWW_AUTHENTICATE, why.challenge());
                return refusal;
            }
        };
        let guarded = web::guard::check(request.uri(), request.headers(), &self.hosts, |_, _| true);
        match guarded {
            Ok(()) if entrance.is_foreign(&request).await => refuse_page(),
            Ok(()) => enter(request, entrance).await,
            Err(Refused::Malformed(what)) => say(StatusCode::BAD_REQUEST, what),
            Err(Refused::Misdirected) => {
                log_refusal("misdirected");
                let what = "this door does not go by that name; [mcp] hosts lists its names";
                say(StatusCode::FORBIDDEN, what)
            }
            Err(Refused::Foreign) => refuse_page(),
        }
    }

    /// What a load balancer asks for, which has no token and goes by any name.
    async fn standing(&self, path: &str) -> Option<Answer> {
        match path {
            "/healthz" => Some(say(StatusCode::OK, "live")),
            "/readyz" => {
                let is_ready = match &self.behind {
                    Some(service) => self.readiness.is_ready(service.status()).await,
                    None => false,
                };
                Some(match is_ready {
                    true => say(StatusCode::OK, "ready"),
                    false => no_room("the service takes no runs now", Duration::ZERO),
                })
            }
            _ => None,
        }
    }
}

fn log_refusal(reason: &str) {
    static SAID: Seldom = Seldom::each_second();
    if SAID.is_due_for(reason) {
        tracing::warn!(reason, "a request was refused");
    }
}

/// A request of somebody who has come in.
async fn enter(request: Request<Sent>, entrance: &Entrance) -> Answer {
    if request.uri().path() != PATH {
        return say(StatusCode::NOT_FOUND, "only /mcp is here");
    }
    let is_stream = request.method() == Method::GET;
    let places = if is_stream { &entrance.streams } else { &entrance.open };
    let Ok(permit) = Arc::clone(places).try_acquire_owned() else {
        return no_room("too much at once", Duration::ZERO);
    };
    let begins = !request.headers().contains_key(HEADER_SESSION_ID);
    let ends = request.method() == Method::DELETE;
    if ends && !entrance.has_session(request.headers()).await {
        return say(StatusCode::NOT_FOUND, NO_SESSION);
    }
    let mut held = vec![permit];
    match tokio::time::timeout(ANSWER_TIME_MAX, entrance.handle(request, &mut held)).await {
        // rmcp takes a session that there is no room for as a fault of its own.
        Ok(response)
            if begins
                && response.status() == StatusCode::INTERNAL_SERVER_ERROR
                && entrance.sessions.is_full().await =>
        {
            let what = "too many sessions are open: end one, with DELETE";
            no_room(what, entrance.sessions.room_in(Instant::now()))
        }
        Ok(mut response) => {
            // It has ended already: some clients take another status for a failure.
            if ends && response.status() == StatusCode::ACCEPTED {
                *response.status_mut() = StatusCode::NO_CONTENT;
            }
            response.map(|body| Held::new(body, held))
        }
        Err(_) => say(StatusCode::REQUEST_TIMEOUT, "the request took too long"),
    }
}

/// An origin as browsers mean it: without a port it has its scheme's, where rmcp takes any.
fn with_its_port(origin: &str) -> String {
    let origin = origin.to_ascii_lowercase();
    let port = match origin.split_once("://") {
        Some(("https", _)) => 443,
        Some(("http", _)) => 80,
        _ => return origin,
    };
    let origin = origin.trim_end_matches('/');
    let has_port = origin.rsplit_once(':').is_some_and(|(_, port)| !port.contains(['/', ']']));
    if has_port { origin.to_owned() } else { format!("{origin}:{port}") }
}

fn refuse_page() -> Answer {
    log_refusal("foreign");
    let what = "a page of another origin may not use this door; [mcp] origins lists those that \
                may through a proxy, beside those on loopback, and there is no CORS here";
    say(StatusCode::FORBIDDEN, what)
}

/// A refusal of what there may be room for then.
fn no_room(what: &'static str, then: Duration) -> Answer {
    let mut refusal = say(StatusCode::SERVICE_UNAVAILABLE, what);
    // No sooner than then.
    let seconds = then.as_millis().div_ceil(1_000).max(1) as u64;
    refusal.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    refusal
}

fn say(status: StatusCode, what: &'static str) -> Answer {
    text(status, what.to_owned()).map(|body| Held::new(body, Vec::new()))
}

/// Whether a request takes an answer of any media type, as one does that does not say.
fn accepts_anything(headers: &HeaderMap) -> bool {
    let mut ranges = headers.get_all(header::ACCEPT).iter().peekable();
    ranges.peek().is_none()
        || ranges.filter_map(|value| value.to_str().ok()).flat_map(|it| it.split(',')).any(
            |range| {
                let (kind, weight) = range.split_once(';').unwrap_or((range, ""));
                let is_refused = weight
                    .trim()
                    .strip_prefix("q=")
                    .is_some_and(|it| it.trim().parse::<f32>().is_ok_and(|weight| weight == 0.0));
                kind.trim() == "*/*" && !is_refused
            },
        )
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use hyper::body::{Frame, SizeHint};

    use super::*;

    #[test]
    fn an_origin_without_a_port_is_of_its_schemes_alone() {
        for (written, meant) in [
            ("https://app.example", "https://app.example:443"),
            ("http://app.example/", "http://app.example:80"),
            ("HTTPS://App.example", "https://app.example:443"),
            ("http://[::1]", "http://[::1]:80"),
            ("http://[::1]:8", "http://[::1]:8"),
            ("https://app.example:*", "https://app.example:*"),
            ("null", "null"),
            ("app://x", "app://x"),
        ] {
            assert_eq!(with_its_port(written), meant);
        }
    }

    /// A body of pieces, whose length may be said, and what may be done before a
    /// piece is given.
    struct Pieces<F> {
        left: usize,
        said: Option<usize>,
        before: F,
    }

    const PIECE_BYTES: usize = 64 * 1024;

    impl<F: Fn(usize) + Unpin> Body for Pieces<F> {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            (self.before)(self.left);
            Poll::Ready(self.left.checked_sub(1).map(|left| {
                self.left = left;
                Ok(Frame::data(Bytes::from(vec![b' '; PIECE_BYTES])))
            }))
        }

        fn size_hint(&self) -> SizeHint {
            self.said.map_or_else(SizeHint::new, |said| SizeHint::with_exact(said as u64))
        }
    }

    #[tokio::test]
    async fn a_large_message_has_room_before_it_is_read_and_a_small_one_needs_none() {
        let room = Arc::new(Semaphore::new(8 * PIECE_BYTES));
        let left = || room.available_permits() / PIECE_BYTES;
        let before = |_| assert_eq!(left(), 5);
        let mut held = Vec::new();
        let large = Pieces { left: 3, said: Some(3 * PIECE_BYTES), before };
        assert_eq!(read(large, &room, &mut held).await.unwrap().len(), 3 * PIECE_BYTES);
        // It says nothing of its length: all that came of it has room.
        let before = |unread| assert_eq!(left(), [1, 2, 3, 5, 5][unread]);
        let large = Pieces { left: 4, said: None, before };
        assert_eq!(read(large, &room, &mut held).await.unwrap().len(), 4 * PIECE_BYTES);
        assert_eq!(left(), 1);
        // It goes by, for its id, and nothing of it is kept.
        let unkept = |_| assert_eq!(left(), 1);
        let large = Pieces { left: 2, said: Some(2 * PIECE_BYTES), before: unkept };
        assert!(matches!(read(large, &room, &mut held).await, Err(Unread::NoRoom(None))));
        let large = Pieces { left: 9, said: None, before: |_| {} };
        assert!(matches!(read(large, &room, &mut held).await, Err(Unread::NoRoom(None))));
        assert_eq!(left(), 1, "what was refused keeps nothing");
        let small = Pieces { left: 1, said: None, before: |_| {} };
        assert!(read(small, &room, &mut held).await.is_ok());
        let huge = Pieces { left: 1, said: Some(MESSAGE_BYTES_MAX + 1), before: |_| {} };
        assert!(matches!(read(huge, &room, &mut held).await, Err(Unread::TooLarge(None))));
        drop(held);
        assert_eq!(left(), 8);
    }

    #[test]
    fn who_takes_anything_is_whoever_does_not_say_or_names_the_range_of_all() {
        let takes = |accepts: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for accept in accepts {
                headers.append(header::ACCEPT, HeaderValue::from_static(accept));
            }
            accepts_anything(&headers)
        };
        assert!(takes(&[]) && takes(&["*/*"]) && takes(&["*/*;q=0.8"]));
        assert!(takes(&["application/json, text/plain, */*"]));
        assert!(takes(&["application/json", "*/*"]));
        assert!(!takes(&["application/json"]) && !takes(&["text/*, */*;q=0"]));
    }
}
