//! `text/event-stream` as the HTML standard has it (9.2.6, "Interpreting an event
//! stream"): a field that is not known, a line without a colon or a `retry` that is no
//! number costs itself and neither its event nor its stream.
//!
//! Beyond the standard, an event has so many bytes and no more; and one without data is
//! an event too, since its id says from where a stream that breaks is resumed.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use futures_core::Stream;
use rmcp::transport::streamable_http_client::SseError;
use sse_stream::Sse;

/// What a stream may begin with: a byte order mark.
const MARK: &[u8] = "\u{feff}".as_bytes();

/// The events of a stream of bytes, to the end of the last one that is not too large.
pub(super) struct Events<S> {
    inner: Pin<Box<S>>,
    reader: Reader,
    ready: VecDeque<Sse>,
    /// What its end is, once it has come.
    end: Option<Option<SseError>>,
    /// Of this stream, and of its session.
    is_too_large: [Arc<AtomicBool>; 2],
}

impl<S> Events<S> {
    /// Of at most so many bytes each. One that has more is told everybody who asks.
    pub(super) fn of(inner: S, bytes_max: usize, is_too_large: [Arc<AtomicBool>; 2]) -> Self {
        let reader = Reader { bytes_max, ..Reader::default() };
        Self { inner: Box::pin(inner), reader, ready: VecDeque::new(), end: None, is_too_large }
    }
}

impl<S, B, E> Stream for Events<S>
where
    S: Stream<Item = Result<B, E>>,
    B: AsRef<[u8]>,
    E: std::error::Error + Send + Sync + 'static,
{
    type Item = Result<Sse, SseError>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(event) = this.ready.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            if let Some(end) = &mut this.end {
                return Poll::Ready(end.take().map(Err));
            }
            match ready!(this.inner.as_mut().poll_next(context)) {
                Some(Ok(bytes)) => {
                    if !this.reader.read(bytes.as_ref(), &mut this.ready) {
                        let limit = this.reader.bytes_max;
                        tracing::warn!("an event of a tool server has more than {limit} bytes");
                        for is_too_large in &this.is_too_large {
                            is_too_large.store(true, Ordering::Release);
                        }
                        let error = io::Error::from(io::ErrorKind::InvalidData);
                        this.end = Some(Some(SseError::Body(Box::new(error))));
                    }
                }
                Some(Err(error)) => this.end = Some(Some(SseError::Body(Box::new(error)))),
                None => this.end = Some(None),
            }
        }
    }
}

/// What was read of an event that is not whole.
#[derive(Default)]
struct Reader {
    bytes_max: usize,
    /// Those of the event, without the ends of its lines.
    bytes: usize,
    line: Vec<u8>,
    /// A line feed that comes now ends no other line.
    after_return: bool,
    /// The first line is behind it.
    has_begun: bool,
    event: Option<Sse>,
}

impl Reader {
    /// Reads on, and adds the events that are whole. `false` if one is too large.
    fn read(&mut self, mut bytes: &[u8], events: &mut VecDeque<Sse>) -> bool {
        while let Some(first) = bytes.first() {
            if std::mem::take(&mut self.after_return) && *first == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let (line, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
            self.bytes += line.len();
            if self.bytes > self.bytes_max {
                return false;
            }
            self.line.extend_from_slice(line);
            let Some((end, rest)) = rest.split_first() else { break };
            self.after_return = *end == b'\r';
            bytes = rest;
            let line = std::mem::take(&mut self.line);
            match self.without_mark(&line) {
                [] => {
                    self.bytes = 0;
                    events.extend(self.event.take());
                }
                line => self.field(line),
            }
        }
        true
    }

    fn without_mark<'a>(&mut self, line: &'a [u8]) -> &'a [u8] {
        match std::mem::replace(&mut self.has_begun, true) {
            false => line.strip_prefix(MARK).unwrap_or(line),
            true => line,
        }
    }

    fn field(&mut self, line: &[u8]) {
        let colon = line.iter().position(|byte| *byte == b':');
        let (name, value) = match colon {
            Some(at) => (&line[..at], &line[at + 1..]),
            None => (line, &[][..]),
        };
        let value = String::from_utf8_lossy(value.strip_prefix(b" ").unwrap_or(value));
        let is_number = || !value.is_empty() && value.bytes().all(|it| it.is_ascii_digit());
        let event = &mut self.event;
        match name {
            b"data" => match &mut event.get_or_insert_default().data {
                Some(data) => data.extend(["\n", &*value]),
                none => *none = Some(value.into()),
            },
            b"event" => event.get_or_insert_default().event = Some(value.into()),
            b"id" if !value.contains('\0') => {
                event.get_or_insert_default().id = Some(value.into());
            }
            b"retry" if is_number() => {
                event.get_or_insert_default().retry = value.parse().ok();
            }
            // A comment, or nothing that is known.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The events of a text, the same whether it comes at once or byte by byte; `None` if
    /// one is too large.
    fn read(bytes_max: usize, text: &[u8]) -> Option<Vec<Sse>> {
        let [mut whole, mut pieces] =
            [(); 2].map(|()| (Reader { bytes_max, ..Reader::default() }, VecDeque::new()));
        let passes = whole.0.read(text, &mut whole.1);
        assert_eq!(text.iter().all(|byte| pieces.0.read(&[*byte], &mut pieces.1)), passes);
        assert_eq!(whole.1, pieces.1);
        passes.then(|| whole.1.into())
    }

    fn data(text: &str) -> Vec<Option<String>> {
        read(1 << 20, text.as_bytes()).unwrap().into_iter().map(|event| event.data).collect()
    }

    #[test]
    fn an_event_is_counted_from_one_empty_line_to_the_next() {
        for end in ["\n\n", "\r\r", "\r\n\r\n"] {
            let text = format!("data: x{end}").repeat(3);
            assert_eq!(read(7, text.as_bytes()).unwrap().len(), 3, "{end:?}");
            assert_eq!(read(6, text.as_bytes()), None, "{end:?}");
        }
        // One line's end is no event's.
        for end in ["\n", "\r", "\r\n"] {
            let text = format!("data: x{end}").repeat(2);
            assert_eq!(read(14, text.as_bytes()), Some(Vec::new()), "{end:?}");
            assert_eq!(read(13, text.as_bytes()), None, "{end:?}");
        }
    }

    #[test]
    fn what_comes_before_an_event_that_is_too_large_is_told() {
        let mut reader = Reader { bytes_max: 7, ..Reader::default() };
        let mut events = VecDeque::new();
        assert!(!reader.read(b"data: x\n\ndata: xy\n\ndata: z\n\n", &mut events));
        assert_eq!(events, [Sse::default().data("x")]);
    }

    #[test]
    fn what_the_standard_has_ignored_costs_itself_and_no_event() {
        for line in [
            "foo: bar",
            "foo",
            "event",
            "id",
            ": a comment",
            ":",
            "retry: abc",
            "retry: 3.5",
            "retry:",
            "retry: -1",
            "id: a\nid: b",
            "event: a\nevent: b",
            "retry: 1\nretry: 2",
            "data : no",
            "id: a\0b",
        ] {
            let texts = [format!("{line}\ndata: x\n\n"), format!("data: x\n{line}\n\ndata: y\n\n")];
            assert_eq!(data(&texts[0]), [Some("x".into())], "{line:?}");
            assert_eq!(data(&texts[1]), [Some("x".into()), Some("y".into())], "{line:?}");
        }
        let last = read(99, b"id: a\nid: b\nevent: c\nevent: d\nretry: 1\nretry: 20\nid: c\0\n\n");
        let expected = Sse::default().id("b").event("d").retry(20);
        assert_eq!(last.unwrap(), [expected]);
    }

    #[test]
    fn data_is_joined_by_lines_less_one_space_each() {
        assert_eq!(data("data: a\ndata:  b\ndata\ndata:c\n\n"), [Some("a\n b\n\nc".into())]);
        assert_eq!(data("\u{feff}data: a\n\n\u{feff}data: b\n\n"), [Some("a".into())]);
        // One that is not ended is none, and an id alone is one.
        assert_eq!(data("id: 7\ndata:\n\nid: 8\n\n: keep\n\ndata: x\n"), [Some("".into()), None]);
        assert_eq!(read(99, b"data: \xff\n\n").unwrap()[0].data.as_deref(), Some("\u{fffd}"));
    }
}
