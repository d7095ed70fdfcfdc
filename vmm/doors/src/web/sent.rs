//! What a client sends after its answer is known.
//!
//! A request that is refused by its head alone has a body that nobody reads. A
//! connection that ends on top of it is reset, and a client that still writes
//! loses the refusal. So what is left is read and thrown away, for a bounded time
//! and number of bytes: while the connection stays, so that it serves the next
//! request, and before it ends.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use crate::locks::lock;
use hyper::StatusCode;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::Sleep;

/// How long what is left may take to come (where tests say that it comes, a busy host
/// has longer), and how much there may be of it: as much as the largest body of any door.
const REST_TIME_MAX: Duration = Duration::from_secs(if cfg!(test) { 30 } else { 2 });
const REST_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// The body of a request. Where a handler leaves it unread, it is not lost.
pub(crate) struct Sent {
    body: Option<Incoming>,
    is_over: bool,
    rest: Rest,
}

/// What a handler left unread.
#[derive(Clone, Default)]
pub(crate) struct Rest(Arc<Mutex<Option<Incoming>>>);

impl Sent {
    pub(crate) fn new(body: Incoming) -> (Self, Rest) {
        let rest = Rest::default();
        (Self { body: Some(body), is_over: false, rest: rest.clone() }, rest)
    }
}

impl Body for Sent {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(body).poll_frame(context));
        self.is_over = !matches!(frame, Some(Ok(_)));
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::default, Incoming::size_hint)
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        if let Some(body) = self.body.take()
            && !self.is_over
            && !body.is_end_stream()
        {
            *lock(&self.rest.0) = Some(body);
        }
    }
}

impl Rest {
    /// Has what is left read, and says whether the connection stays for another
    /// request then. `owed` is set while something is left.
    ///
    /// What a client sends only once it is asked to never comes, and one that is
    /// told that it is too slow has had its time.
    pub(crate) fn read(&self, expects: bool, status: StatusCode, owed: &Arc<AtomicBool>) -> bool {
        let body = lock(&self.0).take();
        let Some(body) = body else { return true };
        owed.store(true, Ordering::Relaxed);
        if expects
            || status == StatusCode::REQUEST_TIMEOUT
            || body.size_hint().lower() > REST_BYTES_MAX
        {
            return false;
        }
        let owed = Arc::clone(owed);
        tokio::spawn(async move {
            if let Ok(true) = tokio::time::timeout(REST_TIME_MAX, read(body)).await {
                owed.store(false, Ordering::Relaxed);
            }
        });
        true
    }
}

/// Reads a body to its end. Says whether it came there.
async fn read(mut body: Incoming) -> bool {
    let mut left = REST_BYTES_MAX;
    loop {
        let frame = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
        let Some(frame) = frame else { return true };
        let Ok(frame) = frame else { return false };
        let bytes = frame.into_data().map_or(0, |data| data.len() as u64);
        let Some(fewer) = left.checked_sub(bytes) else { return false };
        left = fewer;
    }
}

/// The end of a connection: its client has been told so, and may still send.
#[derive(Default)]
pub(crate) struct Linger {
    until: Option<Pin<Box<Sleep>>>,
    bytes: u64,
}

impl Linger {
    /// Throws away what comes until the client ends too, or has had its time. One
    /// that owes nothing is not waited for.
    pub(crate) fn poll(
        &mut self,
        mut stream: Pin<&mut (impl AsyncRead + ?Sized)>,
        owed: &AtomicBool,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        let until = self.until.get_or_insert_with(|| Box::pin(tokio::time::sleep(REST_TIME_MAX)));
        loop {
            let mut bytes = [0; 8192];
            let mut buffer = ReadBuf::new(&mut bytes);
            match stream.as_mut().poll_read(context, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {
                    self.bytes += buffer.filled().len() as u64;
                    owed.store(true, Ordering::Relaxed);
                    if self.bytes > REST_BYTES_MAX {
                        return Poll::Ready(Ok(()));
                    }
                }
                Poll::Ready(_) => return Poll::Ready(Ok(())),
                Poll::Pending if !owed.load(Ordering::Relaxed) => return Poll::Ready(Ok(())),
                Poll::Pending => return until.as_mut().poll(context).map(Ok),
            }
        }
    }
}
