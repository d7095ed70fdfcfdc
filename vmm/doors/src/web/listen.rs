//! Connections: how many, and how long each may take over what it does.
//!
//! A connection that sends its request's head too slowly is closed, and so is
//! one that takes its answer too slowly; one more than there is room for is
//! told so and closed. So a stranger can hold a place for a bounded time. One that
//! ends gives its client time to read why ([`sent`](super::sent)).

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::body::{Body, Incoming};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper::{Request, Response, StatusCode, Version};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, Sleep};

use super::is_set;
use super::sent::{Linger, Rest, Sent};

/// Connections at a time.
const CONNECTIONS_MAX: usize = 1024;
/// How long the head of a request may take, and how long a connection may be
/// idle between two.
const HEAD_TIME_MAX: Duration = Duration::from_secs(10);
/// What clients are told of that: a second less, so that a request that is sent in
/// that time is here before the connection ends.
const IDLE_TOLD: &str = "timeout=9";
const _: () = assert!(HEAD_TIME_MAX.as_secs() == 9 + 1);
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
/// Header fields of a request.
const HEADERS_MAX: usize = 64;
/// The head of a request, in bytes.
const HEAD_BYTES_MAX: usize = 32 * 1024;
/// How long a client may take nothing of what is sent to it.
const STALL_TIME_MAX: Duration = Duration::from_secs(30);
/// How long answers may still go out after the end.
const CLOSING_TIME_MAX: Duration = Duration::from_secs(5);
/// After how long the door tries again to take a connection when the host has
/// no room for it.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Where a door listens.
#[derive(Debug)]
pub enum Listener {
    /// At an address.
    Tcp(TcpListener),
    /// At a path.
    Unix(UnixListener),
}

/// What a connection is read from and written to.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Listener {
    async fn accept(&self) -> io::Result<Box<dyn Stream>> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Ok(Box::new(stream))
            }
            Self::Unix(listener) => Ok(Box::new(listener.accept().await?.0)),
        }
    }
}

/// How many there are.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    /// Open now.
    pub(crate) open: AtomicU64,
    /// That there was no room for.
    pub(crate) refused: AtomicU64,
}

/// One connection that is open: a place among all. Requests have it in their
/// extensions, so that what a connection becomes keeps it.
#[derive(Debug)]
pub(crate) struct Standing {
    connections: Arc<Connections>,
    /// Bytes that its client has sent.
    heard: Arc<AtomicU64>,
    _place: OwnedSemaphorePermit,
}

impl Standing {
    fn new(connections: Arc<Connections>, place: OwnedSemaphorePermit) -> Self {
        connections.open.fetch_add(1, Ordering::Relaxed);
        Self { connections, heard: Arc::default(), _place: place }
    }

    /// How many bytes have come, of whatever is not whole yet, too.
    pub(crate) fn heard_bytes(&self) -> u64 {
        self.heard.load(Ordering::Relaxed)
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        self.connections.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Answers whoever connects until `end` is there. Then calls `close`, for
/// answers that would not end by themselves, and lets what is known already
/// still go out.
pub(crate) async fn serve<S, B>(
    listener: Listener,
    service: S,
    connections: Arc<Connections>,
    end: impl Future<Output = ()>,
    close: impl FnOnce(),
) where
    S: Service<Request<Sent>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<Box<dyn Error + Send + Sync>>,
    B: Body<Data: Send, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static,
{
    let closing = watch::Sender::new(false);
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME_MAX)
        .max_headers(HEADERS_MAX)
        .max_header_size(HEAD_BYTES_MAX);
    let mut end = std::pin::pin!(end);
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(stream) => stream,
                Err(error) => {
                    tracing::warn!(%error, "a connection was not taken");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
            () = end.as_mut() => break,
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            connections.refused.fetch_add(1, Ordering::Relaxed);
            tokio::spawn(refuse(stream));
            continue;
        };
        let standing = Arc::new(Standing::new(Arc::clone(&connections), place));
        let (service, of_request) = (service.clone(), Arc::clone(&standing));
        let stream = Patient::new(stream, Arc::clone(&standing.heard));
        let owed = Arc::clone(&stream.owed);
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(Arc::clone(&of_request));
            let (stays, owed) = (stays(&request), Arc::clone(&owed));
            let expects = request.headers().contains_key(header::EXPECT);
            let mut rest = Rest::default();
            let answer = service.call(request.map(|body| {
                let (sent, left) = Sent::new(body);
                rest = left;
                sent
            }));
            async move {
                answer.await.map(|mut response| {
                    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                        return response;
                    }
                    let is_read = rest.read(expects, response.status(), &owed);
                    match (stays, is_read) {
                        (true, true) => tell_idle_time(response.headers_mut()),
                        (_, false) => tell_end(response.headers_mut()),
                        // hyper says so.
                        (false, true) => {}
                    }
                    response
                })
            }
        });
        let connection = http.serve_connection(TokioIo::new(stream), service).with_upgrades();
        let mut closing = closing.subscribe();
        tokio::spawn(async move {
            let _standing = standing;
            let mut connection = std::pin::pin!(connection);
            let ended = tokio::select! {
                ended = connection.as_mut() => ended,
                () = is_set(&mut closing) => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection ends");
            }
        });
    }
    drop(listener);
    close();
    closing.send_replace(true);
    let all = u32::try_from(CONNECTIONS_MAX).unwrap_or(u32::MAX);
    let _ = tokio::time::timeout(CLOSING_TIME_MAX, places.acquire_many(all)).await;
}

/// Whether this request's connection surely stays for another by HTTP/1.1 (RFC 9112, 9.3).
fn stays<B>(request: &Request<B>) -> bool {
    let options = request.headers().get_all(header::CONNECTION);
    let mut options = options.iter().flat_map(|it| it.as_bytes().split(|byte| *byte == b','));
    // Of one that says its length twice hyper leaves one out and ends the connection
    // (RFC 9112, 6.1): nothing is promised to what looks the same.
    request.version() == Version::HTTP_11
        && !request.headers().contains_key(header::TRANSFER_ENCODING)
        && !options.any(|option| option.trim_ascii().eq_ignore_ascii_case(b"close"))
}

/// Says how long a connection stays idle. If it is closed after this all the same,
/// hyper adds that, and it is what counts.
fn tell_idle_time(headers: &mut HeaderMap) {
    headers.insert(KEEP_ALIVE, HeaderValue::from_static(IDLE_TOLD));
    headers.append(header::CONNECTION, HeaderValue::from_static("keep-alive"));
}

/// Says that the connection ends with this answer.
fn tell_end(headers: &mut HeaderMap) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
}

/// Tells one that there is no room for it. It may take that or leave it.
async fn refuse(mut stream: Box<dyn Stream>) {
    let body = r#"{"title":"Service Unavailable","status":503,"kind":"overloaded","detail":"the door has no room for another connection"}"#;
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n\
         content-type: application/problem+json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len(),
    );
    let _ = tokio::time::timeout(Duration::from_secs(1), stream.write_all(answer.as_bytes())).await;
}

/// A stream whose writes fail if they make no way for too long, and whose reads
/// are counted. It ends once its client has read why.
struct Patient {
    stream: Box<dyn Stream>,
    heard: Arc<AtomicU64>,
    /// Something of a request is still to come that nobody reads.
    owed: Arc<AtomicBool>,
    linger: Linger,
    /// Set while a write waits.
    stalled: Option<Pin<Box<Sleep>>>,
    patience: Duration,
}

impl Patient {
    fn new(stream: Box<dyn Stream>, heard: Arc<AtomicU64>) -> Self {
        let (owed, linger) = Default::default();
        Self { stream, heard, owed, linger, stalled: None, patience: STALL_TIME_MAX }
    }

    /// What becomes of a write that came so far.
    fn made<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let until = Instant::now() + self.patience;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        ready!(stalled.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.heard.fetch_add((buffer.filled().len() - before) as u64, Ordering::Relaxed);
        read
    }
}

impl AsyncWrite for Patient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.made(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.made(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        // What was written is on its way, and the client hears that nothing follows.
        ready!(Pin::new(&mut this.stream).poll_shutdown(context))?;
        this.linger.poll(Pin::new(&mut this.stream), &this.owed, context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    #[tokio::test]
    async fn a_client_that_takes_nothing_is_given_up_and_a_slow_one_is_not() {
        let (near, mut far) = tokio::io::duplex(4);
        let patient = Patient::new(Box::new(near), Arc::default());
        let mut patient = Patient { patience: Duration::from_millis(20), ..patient };
        patient.write_all(b"1234").await.unwrap();
        let error = patient.write_all(b"5").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);

        // Each step is waited for anew.
        patient.stalled = None;
        patient.patience = Duration::from_secs(60);
        let reading = tokio::spawn(async move {
            let mut all = Vec::new();
            far.read_to_end(&mut all).await.unwrap();
            all
        });
        patient.write_all(&[b'x'; 100]).await.unwrap();
        drop(patient);
        assert_eq!(reading.await.unwrap().len(), 104);
    }

    #[tokio::test]
    async fn a_connection_that_stays_says_how_long() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let empty = service_fn(async |_: Request<Sent>| {
            Ok::<_, std::convert::Infallible>(Response::new(String::new()))
        });
        let end = std::future::pending();
        tokio::spawn(serve(Listener::Tcp(listener), empty, Arc::default(), end, || {}));
        let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
        let mut answer = async |head: &str| {
            client.write_all(head.as_bytes()).await.unwrap();
            let mut all = Vec::new();
            while !all.ends_with(b"\r\n\r\n") {
                assert!(client.read_buf(&mut all).await.unwrap() > 0);
            }
            String::from_utf8(all).unwrap()
        };
        let stays = answer("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        assert!(stays.contains("\r\nkeep-alive: timeout=9\r\n"), "{stays}");
        assert!(stays.contains("\r\nconnection: keep-alive\r\n"), "{stays}");
        let ends = answer("GET / HTTP/1.1\r\nhost: a\r\nconnection: x, Close\r\n\r\n").await;
        assert!(!ends.contains("keep-alive"), "{ends}");
    }

    /// A door that refuses all without reading anything, and a client's end.
    async fn refusing() -> tokio::net::TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let refuse = service_fn(async |_: Request<Sent>| {
            let mut refusal = Response::new("no".to_owned());
            *refusal.status_mut() = StatusCode::UNAUTHORIZED;
            Ok::<_, std::convert::Infallible>(refusal)
        });
        let end = std::future::pending();
        tokio::spawn(serve(Listener::Tcp(listener), refuse, Arc::default(), end, || {}));
        tokio::net::TcpStream::connect(address).await.unwrap()
    }

    #[tokio::test]
    async fn what_nobody_reads_leaves_the_connection_to_the_next_request() {
        let mut client = refusing().await;
        for bytes in [1, 100_000, 5_000_000] {
            let head = format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {bytes}\r\n\r\n");
            client.write_all(head.as_bytes()).await.unwrap();
            client.write_all(&vec![b'x'; bytes]).await.unwrap();
            let mut all = Vec::new();
            while !all.ends_with(b"no") {
                assert!(client.read_buf(&mut all).await.unwrap() > 0);
            }
            let said = String::from_utf8(all).unwrap();
            assert!(said.starts_with("HTTP/1.1 401 ") && said.contains("timeout=9"), "{said}");
        }
    }

    #[tokio::test]
    async fn a_refusal_that_ends_a_connection_says_so_and_is_not_lost() {
        let long = format!("content-length: {}", 17 << 20);
        let both = "content-length: 5\r\ntransfer-encoding: chunked";
        let asks = "expect: 100-continue\r\ncontent-length: 5000000";
        // More than the sockets hold: somebody has to read it.
        let many = vec![b'x'; 15_000_000];
        for (header, body) in
            [(&*long, &many[..]), (both, b"5\r\nxxxxx\r\n0\r\n\r\n"), (asks, &many[..])]
        {
            let mut client = refusing().await;
            let head = format!("POST / HTTP/1.1\r\nhost: a\r\n{header}\r\n\r\n");
            client.write_all(head.as_bytes()).await.unwrap();
            let sent = client.write_all(body).await;
            assert!(sent.is_ok(), "{header}: {sent:?}");
            let mut said = String::new();
            client.read_to_string(&mut said).await.unwrap();
            assert!(said.contains("\r\nconnection: close\r\n"), "{header}: {said}");
            assert!(!said.contains("keep-alive") && said.ends_with("no"), "{header}: {said}");
        }
    }

    #[tokio::test]
    async fn what_comes_is_counted_as_it_comes() {
        let (near, mut far) = tokio::io::duplex(4);
        let heard = Arc::<AtomicU64>::default();
        let mut patient = Patient::new(Box::new(near), Arc::clone(&heard));
        for bytes in 1..4 {
            far.write_all(b"x").await.unwrap();
            patient.read_u8().await.unwrap();
            assert_eq!(heard.load(Ordering::Relaxed), bytes);
        }
    }
}
