//! A server's stream of events (`text/event-stream`), of which none has more
//! bytes or values than the broker keeps in memory.
//!
//! It distrusts the server. Bytes are counted as they come, from one empty line
//! to the next; values once an event is whole, and before anybody parses it.
//! An event of too many values on the stream that answers a request is that
//! request's end, as an error in the place of the event; on any other stream it
//! is the end of the stream, since nobody knows what it was to be.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::Stream;
use futures_core::stream::BoxStream;
use reqwest::Response;
use rmcp::model::RequestId;
use rmcp::transport::streamable_http_client::SseError;
use sse_stream::{Sse, SseStream};

use super::unusable::{Unusable, VALUES_MAX, has_few_values};

/// The events of a response, each of at most `bytes_max` bytes. If they answer
/// a request, `asked` is its id.
pub(super) fn events(
    response: Response,
    bytes_max: usize,
    asked: Option<RequestId>,
) -> BoxStream<'static, Result<Sse, SseError>> {
    let bytes = Bounded {
        inner: Box::pin(response.bytes_stream()),
        event: Event { bytes_max, ..Event::default() },
        is_over: false,
    };
    let inner = Box::pin(SseStream::from_bytes_stream(bytes));
    Box::pin(Counted { inner, asked, is_over: false })
}

/// What was seen of one event.
#[derive(Default)]
struct Event {
    bytes_max: usize,
    bytes: usize,
    line_bytes: usize,
    /// A line feed that comes now ends no other line.
    after_return: bool,
}

impl Event {
    /// `false` if it is too large.
    fn passes(&mut self, bytes: &[u8]) -> bool {
        bytes.iter().all(|byte| {
            let after_return = std::mem::replace(&mut self.after_return, *byte == b'\r');
            match byte {
                b'\n' if after_return => {}
                b'\n' | b'\r' => {
                    if self.line_bytes == 0 {
                        self.bytes = 0;
                    }
                    self.line_bytes = 0;
                }
                _ => (self.bytes, self.line_bytes) = (self.bytes + 1, self.line_bytes + 1),
            }
            self.bytes <= self.bytes_max
        })
    }
}

/// Bytes of events, to the end of the last one that is not too large.
struct Bounded<S> {
    inner: Pin<Box<S>>,
    event: Event,
    is_over: bool,
}

impl<S, B, E> Stream for Bounded<S>
where
    S: Stream<Item = Result<B, E>>,
    B: AsRef<[u8]>,
    E: std::error::Error + Send + Sync + 'static,
{
    type Item = io::Result<B>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.is_over {
            return Poll::Ready(None);
        }
        let next = match ready!(this.inner.as_mut().poll_next(context)) {
            Some(Ok(bytes)) if this.event.passes(bytes.as_ref()) => Ok(bytes),
            Some(Ok(_)) => {
                let limit = this.event.bytes_max;
                tracing::warn!("an event of a tool server has more than {limit} bytes");
                Err(io::Error::from(io::ErrorKind::InvalidData))
            }
            Some(Err(error)) => Err(io::Error::other(error)),
            None => return Poll::Ready(None),
        };
        this.is_over = next.is_err();
        Poll::Ready(Some(next))
    }
}

/// Events of few values.
struct Counted<S> {
    inner: Pin<Box<S>>,
    asked: Option<RequestId>,
    is_over: bool,
}

impl<S: Stream<Item = Result<Sse, SseError>>> Stream for Counted<S> {
    type Item = Result<Sse, SseError>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.is_over {
            return Poll::Ready(None);
        }
        let event = match ready!(this.inner.as_mut().poll_next(context)) {
            Some(Ok(event)) => event,
            other => return Poll::Ready(other),
        };
        if event.data.as_ref().is_none_or(|data| has_few_values(data.as_bytes())) {
            return Poll::Ready(Some(Ok(event)));
        }
        tracing::warn!("an event of a tool server has more than {VALUES_MAX} values");
        let answer = this.asked.take().map(|asked| Unusable::TooMany.answer(asked));
        let error = answer.and_then(|answer| serde_json::to_string(&answer).ok());
        Poll::Ready(Some(match error {
            Some(error) => Ok(Sse { data: Some(error), ..event }),
            None => {
                this.is_over = true;
                Err(SseError::Body(io::Error::from(io::ErrorKind::InvalidData).into()))
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passes(bytes_max: usize, text: &str) -> bool {
        let mut whole = Event { bytes_max, ..Event::default() };
        let mut pieces = Event { bytes_max, ..Event::default() };
        let passes = whole.passes(text.as_bytes());
        assert_eq!(text.bytes().all(|byte| pieces.passes(&[byte])), passes, "{text:?}");
        passes
    }

    #[test]
    fn an_event_is_counted_from_one_empty_line_to_the_next() {
        for end in ["\n\n", "\r\r", "\r\n\r\n"] {
            assert!(passes(7, &format!("data: x{end}").repeat(3)), "{end:?}");
            assert!(!passes(6, &format!("data: x{end}")), "{end:?}");
        }
        // One line's end is no event's.
        for end in ["\n", "\r", "\r\n"] {
            assert!(passes(14, &format!("data: x{end}").repeat(2)), "{end:?}");
            assert!(!passes(13, &format!("data: x{end}").repeat(2)), "{end:?}");
        }
    }

    /// What comes of events that are there already.
    fn out(asked: Option<RequestId>, data: &[&str]) -> Vec<Result<Sse, SseError>> {
        struct Ready(Vec<Sse>);
        impl Stream for Ready {
            type Item = Result<Sse, SseError>;

            fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
                Poll::Ready(self.get_mut().0.pop().map(Ok))
            }
        }
        let events = data.iter().rev().map(|data| Sse::default().data(*data)).collect();
        let mut stream = Counted { inner: Box::pin(Ready(events)), asked, is_over: false };
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut out = Vec::new();
        while let Poll::Ready(Some(event)) = Pin::new(&mut stream).poll_next(&mut context) {
            out.push(event);
        }
        out
    }

    #[test]
    fn an_event_of_too_many_values_ends_its_request_or_else_its_stream() {
        let many = format!("[{}0]", "0,".repeat(VALUES_MAX as usize));
        let got = out(Some(RequestId::Number(7)), &["[1]", &many, "[2]", &many, "[3]"]);
        let said: Vec<_> = got.iter().map(|event| event.as_ref().ok()?.data.as_deref()).collect();
        assert_eq!((said[0], said[2], said.len()), (Some("[1]"), Some("[2]"), 4));
        let error: serde_json::Value = serde_json::from_str(said[1].unwrap()).unwrap();
        assert_eq!(error["id"], 7);
        // Its request has ended; whose this one is nobody knows.
        assert_eq!(said[3], None);
        let got = out(None, &["[1]", &many, "[2]"]);
        assert!(got[0].is_ok() && got[1].is_err() && got.len() == 2);
    }
}
