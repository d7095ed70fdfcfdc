//! Streamable HTTP, for principals with tokens.
//!
//! Who asks is decided before a body is read: by a bearer token, of which only
//! the SHA-256 is known here. Each principal has a door and sessions of its
//! own, so that a session's id is of no use to another. rmcp speaks the
//! protocol, in sessions or without as its version has it, and refuses hosts
//! and origins that are not allowed: a name that an attacker points at
//! loopback, and pages of browsers.
//!
//! Deliberately absent is TLS: it listens on loopback, or behind a proxy.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use rmcp::transport::StreamableHttpService;
use rmcp::transport::streamable_http_server::StreamableHttpServerConfig;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use sha2::{Digest as _, Sha256};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::sessions::Sessions;
use super::{Door, MESSAGE_BYTES_MAX, REQUESTS_MAX};

/// The one path that is served.
const PATH: &str = "/mcp";
/// Pages of this host. They need a token like everybody else.
const LOOPBACK_ORIGINS: [&str; 3] = ["http://localhost:*", "http://127.0.0.1:*", "http://[::1]:*"];
/// Connections at a time. One more waits to be accepted.
const CONNECTIONS_MAX: usize = 512;
/// How long a request's headers may take to come.
const HEADERS_TIME_MAX: Duration = Duration::from_secs(10);
/// How long a request's body may take to come, and its answer to begin.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(120);
/// A request's headers, in bytes.
const HEADERS_BYTES_MAX: usize = 16 * 1024;

/// Who may ask, and from where.
#[derive(Debug, Default)]
pub struct HttpOptions {
    /// The SHA-256 of each principal's tokens, with the principal's door.
    pub doors: Vec<(Vec<[u8; 32]>, Door)>,
    /// Host names by which clients may reach it, beside those of loopback.
    pub hosts: Vec<String>,
    /// Origins of browser pages that may ask, beside those on loopback.
    pub origins: Vec<String>,
}

/// One principal's way in.
#[derive(Clone)]
struct Entrance {
    service: StreamableHttpService<Door, Sessions>,
    /// Answers that are not sent to their end.
    open: Arc<Semaphore>,
}

type Answer = Response<Held>;

/// Serves until it is told to end or the socket fails. What runs then is
/// cancelled.
///
/// # Errors
/// What the kernel said.
pub async fn serve(
    listener: TcpListener,
    options: HttpOptions,
    end: impl Future<Output = ()>,
) -> io::Result<()> {
    let closing = CancellationToken::new();
    let HttpOptions { doors, hosts, origins } = options;
    let own = StreamableHttpServerConfig::default();
    let config = StreamableHttpServerConfig::default()
        .with_allowed_hosts(own.allowed_hosts.into_iter().chain(hosts))
        .with_allowed_origins(LOOPBACK_ORIGINS.map(str::to_owned).into_iter().chain(origins))
        .enforce_origin_validation()
        .with_max_request_body_bytes(MESSAGE_BYTES_MAX)
        .with_cancellation_token(closing.clone());
    let mut entrances = HashMap::new();
    let mut open_doors = Vec::new();
    for (tokens_sha256, door) in doors {
        open_doors.push(door.clone());
        let sessions = Arc::new(Sessions::new(LocalSessionManager::default()));
        let service =
            StreamableHttpService::new(move || Ok(door.clone()), sessions, config.clone());
        let open = Arc::new(Semaphore::new(REQUESTS_MAX));
        for token in tokens_sha256 {
            entrances.insert(token, Entrance { service: service.clone(), open: Arc::clone(&open) });
        }
    }
    let entrances = Arc::new(entrances);
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut end = std::pin::pin!(end);
    let served = loop {
        let accepted = async {
            let room = Arc::clone(&room).acquire_owned().await.map_err(io::Error::other)?;
            Ok::<_, io::Error>((room, listener.accept().await))
        };
        let (room, accepted) = tokio::select! {
            accepted = accepted => accepted?,
            () = &mut end => break Ok(()),
        };
        match accepted {
            Ok((stream, _)) => {
                tokio::spawn(converse(stream, Arc::clone(&entrances), closing.clone(), room));
            }
            Err(error) if is_passing(&error) => {
                tracing::warn!(%error, "a connection cannot be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(error) => break Err(error),
        }
    };
    closing.cancel();
    for door in open_doors {
        door.close();
    }
    served
}

/// What is another connection's fault, or passes.
fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    // EMFILE and ENFILE have no kind of their own.
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted)
        || matches!(error.raw_os_error(), Some(23 | 24))
}

async fn converse(
    stream: TcpStream,
    entrances: Arc<HashMap<[u8; 32], Entrance>>,
    closing: CancellationToken,
    _room: OwnedSemaphorePermit,
) {
    let answer = service_fn(move |request| {
        let entrances = Arc::clone(&entrances);
        async move { Ok::<_, Infallible>(answer(request, &entrances).await) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS_TIME_MAX)
        .max_buf_size(HEADERS_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), answer);
    tokio::select! {
        ended = connection => {
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection ends");
            }
        }
        () = closing.cancelled() => {}
    }
}

async fn answer(request: Request<Incoming>, entrances: &HashMap<[u8; 32], Entrance>) -> Answer {
    let Some(entrance) = token_sha256(request.headers()).and_then(|it| entrances.get(&it)) else {
        let mut refusal = refuse(StatusCode::UNAUTHORIZED, "a known bearer token is needed");
        let scheme = HeaderValue::from_static("Bearer");
        refusal.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        return refusal;
    };
    if request.uri().path() != PATH {
        return refuse(StatusCode::NOT_FOUND, "only /mcp is here");
    }
    let Ok(permit) = Arc::clone(&entrance.open).try_acquire_owned() else {
        let mut refusal = refuse(StatusCode::SERVICE_UNAVAILABLE, "too much at once");
        refusal.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        return refusal;
    };
    match tokio::time::timeout(ANSWER_TIME_MAX, entrance.service.handle(request)).await {
        Ok(response) => response.map(|body| Held { body, _permit: Some(permit) }),
        Err(_) => refuse(StatusCode::REQUEST_TIMEOUT, "the request took too long"),
    }
}

/// Of the one bearer token.
fn token_sha256(headers: &HeaderMap) -> Option<[u8; 32]> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let (value, None) = (values.next()?.as_bytes(), values.next()) else { return None };
    let (scheme, token) = value.split_at_checked(7)?;
    // A token that is long enough to be one; who knows its hash and not the
    // token learns nothing from how long a look takes.
    (scheme.eq_ignore_ascii_case(b"bearer ") && !token.is_empty())
        .then(|| Sha256::digest(token).into())
}

fn refuse(status: StatusCode, what: &'static str) -> Answer {
    let body = Full::new(Bytes::from_static(what.as_bytes())).boxed();
    let mut response = Response::new(Held { body, _permit: None });
    *response.status_mut() = status;
    response
}

/// A body, and its principal's room for answers until it is sent.
struct Held {
    body: BoxBody<Bytes, Infallible>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Body for Held {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(values: &[&str]) -> HeaderMap {
        let name = |value: &&str| (header::AUTHORIZATION, HeaderValue::from_str(value).unwrap());
        let mut map = HeaderMap::new();
        for (name, value) in values.iter().map(name) {
            map.append(name, value);
        }
        map
    }

    #[test]
    fn one_bearer_token_is_a_token_and_nothing_else_is() {
        let expected: [u8; 32] = Sha256::digest(b"secret").into();
        assert_eq!(token_sha256(&headers(&["Bearer secret"])), Some(expected));
        assert_eq!(token_sha256(&headers(&["bearer secret"])), Some(expected));
        for values in [
            &[][..],
            &["Bearer secret", "Bearer secret"],
            &["Bearer "],
            &["Basic secret"],
            &["secret"],
            &["Bearer"],
        ] {
            assert_eq!(token_sha256(&headers(values)), None, "{values:?}");
        }
        assert_ne!(token_sha256(&headers(&["Bearer  secret"])), Some(expected));
    }
}
