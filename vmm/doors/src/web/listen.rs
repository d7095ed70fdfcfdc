//! Connections: how many, and how long each may take over what it does.
//!
//! A connection that sends its request's head too slowly is closed, and so is
//! one that takes its answer too slowly. Where no place is left, a stranger makes room
//! ([`places`](super::places)), or the newcomer is told so and closed. One that
//! ends gives its client time to read why ([`sent`](super::sent)). One whose client
//! has left ends, and what it had asked for with it: hyper sees that only where the
//! client has sent nothing beyond its request, so it is looked for here.

use std::error::Error;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use forge_log::Seldom;
use hyper::body::{Body, Incoming};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper::{Request, Response, StatusCode, Version};
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, Sleep};

use super::is_set;
use super::places::{Connections, Places, Standing};
use super::sent::{Linger, Rest, Sent};
use crate::locks::lock;

/// Connections at a time. Tests fill them, and may open fewer files.
const CONNECTIONS_MAX: usize = if cfg!(test) { 64 } else { 1024 };
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
/// Bytes that a client may have sent beyond its request and still be seen to leave.
const AHEAD_BYTES_MAX: usize = 16 * 1024;
/// How long what was asked for may still be answered when the client has ended: it
/// may have ended its sending alone.
const LEAVING_TIME_MAX: Duration = Duration::from_millis(500);
/// How long one that connected at the last moment has for its first request: it is told
/// that nothing is taken any more, and not reset.
const FIRST_TIME_MAX: Duration = Duration::from_millis(500);
/// How long answers may still go out after the end.
const CLOSING_TIME_MAX: Duration = Duration::from_secs(5);
/// What may wait to be sent to a client over TCP, in bytes, beside what is on its way.
const UNSENT_BYTES: u32 = 128 * 1024;
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
                prepare(&stream)?;
                Ok(Box::new(stream))
            }
            Self::Unix(listener) => Ok(Box::new(listener.accept().await?.0)),
        }
    }

    /// Has nobody connect here any more, whoever else has this socket, and takes all who
    /// have: left where they are, they would be reset.
    fn close(&self) -> io::Result<Vec<Box<dyn Stream>>> {
        let mut last: Vec<Box<dyn Stream>> = Vec::new();
        match self {
            Self::Tcp(listener) => {
                let listener = std::net::TcpListener::from(listener.as_fd().try_clone_to_owned()?);
                for (stream, _) in all_of(|| listener.accept()) {
                    stream.set_nonblocking(true)?;
                    prepare(&stream)?;
                    last.push(Box::new(tokio::net::TcpStream::from_std(stream)?));
                }
                std::net::TcpStream::from(OwnedFd::from(listener)).shutdown(Shutdown::Both)?;
            }
            Self::Unix(listener) => {
                let listener =
                    std::os::unix::net::UnixListener::from(listener.as_fd().try_clone_to_owned()?);
                for (stream, _) in all_of(|| listener.accept()) {
                    stream.set_nonblocking(true)?;
                    last.push(Box::new(tokio::net::UnixStream::from_std(stream)?));
                }
                let listener = OwnedFd::from(listener);
                std::os::unix::net::UnixStream::from(listener).shutdown(Shutdown::Both)?;
            }
        }
        Ok(last)
    }
}

/// What is sent goes out at once, and little waits here to be sent: how a client takes it
/// is seen by when there is room for more, which a full buffer of the usual size, some
/// megabytes, has again only when a third of it is taken.
fn prepare(stream: &impl AsFd) -> io::Result<()> {
    let stream = SockRef::from(stream);
    stream.set_tcp_nodelay(true)?;
    stream.set_tcp_notsent_lowat(UNSENT_BYTES)
}

/// All that there are now, of a listener that does not wait.
fn all_of<T>(mut accept: impl FnMut() -> io::Result<T>) -> Vec<T> {
    let mut all = Vec::new();
    while all.len() < CONNECTIONS_MAX {
        match accept() {
            Ok(one) => all.push(one),
            // One that has left again.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(_) => break,
        }
    }
    all
}

/// What becomes of the place where a door listened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    /// Nobody connects there any more.
    Closed,
    /// Another door takes whoever does.
    Kept,
}

/// Answers whoever connects until `end` is there, and whoever had connected before that.
/// Then calls `close`, for answers that would not end by themselves, and lets what is
/// known already still go out.
pub(crate) async fn serve<S, B>(
    listener: Listener,
    service: S,
    connections: Arc<Connections>,
    end: impl Future<Output = After>,
    close: impl FnOnce(),
) where
    S: Service<Request<Sent>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<Box<dyn Error + Send + Sync>>,
    B: Body<Data: Send, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static,
{
    let closing = watch::Sender::new(false);
    let places = Places::new(CONNECTIONS_MAX, connections);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME_MAX)
        .max_headers(HEADERS_MAX)
        .max_header_size(HEAD_BYTES_MAX);
    let mut arrivals = Arrivals { listener: &listener, last: None };
    let mut end = std::pin::pin!(end);
    let refusals = Seldom::each_second();
    while let Some(arrival) = arrivals.next(end.as_mut()).await {
        let stream = match arrival {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection was not taken");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let place = places.take().await;
        let is_short = place.as_ref().is_none_or(|(.., is_anothers)| *is_anothers);
        if is_short && refusals.is_due() {
            tracing::warn!(
                CONNECTIONS_MAX,
                "no place is left for connections: those that showed no token are closed, those \
                 beyond a principal's share, or new ones refused"
            );
        }
        let Some((standing, gives_way, _)) = place else {
            tokio::spawn(refuse(stream));
            continue;
        };
        let (standing, asked) = (Arc::new(standing), Arc::new(Notify::new()));
        let stream = Patient::new(stream, Arc::clone(&standing.heard));
        let (owed, wire) = (Arc::clone(&stream.owed), Arc::clone(&stream.wire));
        let of_one = OfOne {
            standing: Arc::clone(&standing),
            asked: Arc::clone(&asked),
            owed,
            closing: closing.subscribe(),
        };
        let service = of_one.answered_by(service.clone());
        let connection = http.serve_connection(TokioIo::new(stream), service).with_upgrades();
        let is_closing = closing.subscribe();
        tokio::spawn(async move {
            let _standing = standing;
            let mut connection = std::pin::pin!(connection);
            let served = async {
                tokio::select! {
                    ended = connection.as_mut() => return ended,
                    () = may_be_closed(is_closing, &asked) => {}
                }
                connection.as_mut().graceful_shutdown();
                connection.await
            };
            let ended = tokio::select! {
                // It reads first: what is left to be read it does not read now.
                biased;
                ended = served => ended,
                () = left(&wire) => return,
                () = gives_way.told() => return,
            };
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection ends");
            }
        });
    }
    drop(listener);
    close();
    closing.send_replace(true);
    let _ = tokio::time::timeout(CLOSING_TIME_MAX, places.are_free(CONNECTIONS_MAX)).await;
}

/// Whoever connects until the end, and whoever had connected by then.
struct Arrivals<'a> {
    listener: &'a Listener,
    /// Those at the end, once it is there.
    last: Option<std::vec::IntoIter<Box<dyn Stream>>>,
}

impl Arrivals<'_> {
    /// The next; `None` if nobody comes any more.
    async fn next(
        &mut self,
        end: Pin<&mut impl Future<Output = After>>,
    ) -> Option<io::Result<Box<dyn Stream>>> {
        if self.last.is_none() {
            let after = tokio::select! {
                accepted = self.listener.accept() => return Some(accepted),
                after = end => after,
            };
            let closed = match after {
                After::Closed => self.listener.close(),
                After::Kept => Ok(Vec::new()),
            };
            let closed = closed.inspect_err(|error| {
                tracing::warn!(%error, "the place where the door listened is not closed");
            });
            self.last = Some(closed.unwrap_or_default().into_iter());
        }
        self.last.as_mut()?.next().map(Ok)
    }
}

/// What the requests of one connection have in common.
struct OfOne {
    standing: Arc<Standing>,
    /// Notified of each request.
    asked: Arc<Notify>,
    owed: Arc<AtomicBool>,
    closing: watch::Receiver<bool>,
}

impl OfOne {
    /// Has a service answer them, and each answer say whether the connection stays.
    fn answered_by<S, B>(
        self,
        service: S,
    ) -> impl Service<Request<Incoming>, Response = Response<B>, Error = S::Error, Future: Send>
    where
        S: Service<Request<Sent>, Response = Response<B>, Future: Send>,
        S::Error: Into<Box<dyn Error + Send + Sync>>,
        B: Body,
    {
        service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(Arc::clone(&self.standing));
            self.asked.notify_one();
            let (stays, owed) = (stays(&request), Arc::clone(&self.owed));
            let is_closing = self.closing.clone();
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
                        // hyper may hear of it after this.
                        _ if *is_closing.borrow() => tell_end(response.headers_mut()),
                        (true, true) => tell_idle_time(response.headers_mut()),
                        (_, false) => tell_end(response.headers_mut()),
                        // hyper says so.
                        (false, true) => {}
                    }
                    response
                })
            }
        })
    }
}

/// Ends when the door closes, and the connection has asked something or had time to: who
/// has asked nothing so far may have connected just now.
async fn may_be_closed(mut closing: watch::Receiver<bool>, asked: &Notify) {
    is_set(&mut closing).await;
    let _ = tokio::time::timeout(FIRST_TIME_MAX, asked.notified()).await;
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

/// A client's end of a connection.
struct Wire {
    stream: Box<dyn Stream>,
    /// How many bytes the client has sent.
    heard: Arc<AtomicU64>,
    /// What was read to see whether the client is there. It comes before all else.
    ahead: Vec<u8>,
    /// The client sends nothing more.
    is_over: bool,
}

impl Wire {
    fn poll_read(
        &mut self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.ahead.is_empty() {
            let taken = self.ahead.len().min(buffer.remaining());
            buffer.put_slice(&self.ahead[..taken]);
            self.ahead.drain(..taken);
            return Poll::Ready(Ok(()));
        }
        if self.is_over {
            return Poll::Ready(Ok(()));
        }
        self.poll_more(context, buffer)
    }

    fn poll_more(
        &mut self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.heard.fetch_add((buffer.filled().len() - before) as u64, Ordering::Relaxed);
        read
    }

    /// Is there when the client sends nothing more.
    fn poll_over(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let mut bytes = [0; 4096];
        while !self.is_over {
            let room = (AHEAD_BYTES_MAX - self.ahead.len()).min(bytes.len());
            if room == 0 {
                // It is looked again when some of it was taken, by the same task.
                return Poll::Pending;
            }
            let mut buffer = ReadBuf::new(&mut bytes[..room]);
            let read = ready!(self.poll_more(context, &mut buffer));
            self.is_over = read.is_err() || buffer.filled().is_empty();
            self.ahead.extend_from_slice(buffer.filled());
        }
        Poll::Ready(())
    }
}

/// Waits until the client has left, and had its time.
async fn left(wire: &Mutex<Wire>) {
    std::future::poll_fn(|context| lock(wire).poll_over(context)).await;
    tokio::time::sleep(LEAVING_TIME_MAX).await;
}

/// A stream whose writes fail if they make no way for too long, and whose reads
/// are counted. It ends once its client has read why.
struct Patient {
    /// One task has it: whoever reads, and whoever looks for its end.
    wire: Arc<Mutex<Wire>>,
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
        let wire = Wire { stream, heard, ahead: Vec::new(), is_over: false };
        let wire = Arc::new(Mutex::new(wire));
        Self { wire, owed, linger, stalled: None, patience: STALL_TIME_MAX }
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
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        lock(&self.wire).poll_read(context, buffer)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut lock(&self.wire).stream).poll_write(context, bytes);
        self.made(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut lock(&self.wire).stream).poll_write_vectored(context, pieces);
        self.made(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        lock(&self.wire).stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut lock(&self.wire).stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let mut wire = lock(&this.wire);
        // What was written is on its way, and the client hears that nothing follows.
        ready!(Pin::new(&mut wire.stream).poll_shutdown(context))?;
        if !wire.ahead.is_empty() {
            this.owed.store(true, Ordering::Relaxed);
        }
        this.linger.poll(Pin::new(&mut wire.stream), &this.owed, context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;
    use crate::web::places;

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
    async fn a_client_that_takes_a_little_at_a_time_is_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let far = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        far.set_recv_buffer_size(64 * 1024).unwrap();
        far.connect(&listener.local_addr().unwrap().into()).unwrap();
        let near = Listener::Tcp(listener).accept().await.unwrap();
        let reading = std::thread::spawn(move || {
            let mut far = std::net::TcpStream::from(far);
            let (mut piece, mut all) = (vec![0; 32 * 1024], 0);
            while let Ok(bytes @ 1..) = io::Read::read(&mut far, &mut piece) {
                all += bytes;
                std::thread::sleep(Duration::from_millis(20));
            }
            all
        });
        // A fifth of what it takes for all.
        let patience = Duration::from_millis(700);
        let mut patient = Patient { patience, ..Patient::new(near, Arc::default()) };
        let sent = patient.write_all(&vec![b'x'; 6 << 20]).await;
        drop(patient);
        assert_eq!(reading.join().unwrap(), 6 << 20, "{sent:?}");
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

    #[tokio::test]
    async fn a_client_that_leaves_is_seen_whatever_it_sent_beyond_its_request() {
        /// Says that it is dropped.
        struct Dropped(tokio::sync::mpsc::UnboundedSender<()>);
        impl Drop for Dropped {
            fn drop(&mut self) {
                let _ = self.0.send(());
            }
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (begun, mut begins) = tokio::sync::mpsc::unbounded_channel();
        let (ended, mut ends) = tokio::sync::mpsc::unbounded_channel();
        let endless = service_fn(move |_: Request<Sent>| {
            let (begun, dropped) = (begun.clone(), Dropped(ended.clone()));
            async move {
                let _ = begun.send(());
                std::future::pending::<()>().await;
                drop(dropped);
                Ok::<_, std::convert::Infallible>(Response::new(String::new()))
            }
        });
        let end = std::future::pending();
        tokio::spawn(serve(Listener::Tcp(listener), endless, Arc::default(), end, || {}));
        for beyond in ["", "\r\n", "GET / HTTP/1.1\r\nhost: a\r\n\r\n"] {
            let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
            client.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
            begins.recv().await.unwrap();
            client.write_all(beyond.as_bytes()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert!(ends.try_recv().is_err());
            drop(client);
            let seen = tokio::time::timeout(Duration::from_secs(20), ends.recv()).await;
            assert!(seen.is_ok(), "{beyond:?}: what it asked for goes on");
        }
    }

    #[tokio::test]
    async fn what_a_client_sends_ahead_is_served_in_its_turn() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let named = service_fn(async |request: Request<Sent>| {
            tokio::time::sleep(Duration::from_millis(5)).await;
            let path = request.uri().path().to_owned();
            Ok::<_, std::convert::Infallible>(Response::new(path))
        });
        let end = std::future::pending();
        tokio::spawn(serve(Listener::Tcp(listener), named, Arc::default(), end, || {}));
        let mut client = tokio::net::TcpStream::connect(address).await.unwrap();
        // More than is read ahead.
        let padding = "x".repeat(4000);
        for number in 0..10 {
            let head = format!("GET /{number} HTTP/1.1\r\nhost: a\r\nx: {padding}\r\n\r\n");
            client.write_all(head.as_bytes()).await.unwrap();
        }
        let mut all = String::new();
        while !all.contains("/9") {
            let mut bytes = [0; 4096];
            let count = client.read(&mut bytes).await.unwrap();
            assert!(count > 0, "{all}");
            all.push_str(std::str::from_utf8(&bytes[..count]).unwrap());
        }
        assert_eq!(all.matches("200 OK").count(), 10, "{all}");
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
    async fn who_has_connected_when_a_door_closes_is_answered_and_nobody_connects_then() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let kept = listener.as_fd().try_clone_to_owned().unwrap();
        let mut clients = Vec::new();
        for _ in 0..8 {
            clients.push(tokio::net::TcpStream::connect(address).await.unwrap());
        }
        let answers = service_fn(async |_: Request<Sent>| {
            Ok::<_, std::convert::Infallible>(Response::new("closing".to_owned()))
        });
        let end = std::future::ready(After::Closed);
        let served =
            tokio::spawn(serve(Listener::Tcp(listener), answers, Arc::default(), end, || {}));
        for client in &mut clients {
            client.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
            let mut said = String::new();
            client.read_to_string(&mut said).await.unwrap();
            assert!(said.ends_with("closing") && said.contains("connection: close"), "{said}");
        }
        served.await.unwrap();
        assert!(tokio::net::TcpStream::connect(address).await.is_err());
        drop(kept);
    }

    #[tokio::test]
    async fn strangers_who_hold_every_place_keep_nobody_out() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let known = service_fn(async |request: Request<Sent>| {
            places::stay(request.extensions(), "known");
            Ok::<_, std::convert::Infallible>(Response::new("yes".to_owned()))
        });
        let end = std::future::pending();
        tokio::spawn(serve(Listener::Tcp(listener), known, Arc::default(), end, || {}));
        let ask = async |client: &mut tokio::net::TcpStream| {
            client.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
            let mut all = Vec::new();
            while !all.ends_with(b"yes") && client.read_buf(&mut all).await.unwrap() > 0 {}
            String::from_utf8(all).unwrap()
        };
        let mut here = tokio::net::TcpStream::connect(address).await.unwrap();
        assert!(ask(&mut here).await.ends_with("yes"));
        let mut strangers = Vec::new();
        for _ in 0..2 * CONNECTIONS_MAX {
            let mut stranger = tokio::net::TcpStream::connect(address).await.unwrap();
            stranger.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
            strangers.push(stranger);
        }
        let mut newcomer = tokio::net::TcpStream::connect(address).await.unwrap();
        assert!(ask(&mut newcomer).await.ends_with("yes"));
        assert!(ask(&mut here).await.ends_with("yes"), "one that is known gave way");
        let mut oldest = Vec::new();
        // Reset, if it was closed before what it sent was read.
        let _ = strangers[0].read_to_end(&mut oldest).await;
        assert!(oldest.is_empty());
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
