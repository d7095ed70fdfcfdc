//! A server's words, in which no message has more values than the broker keeps
//! in memory: on its standard output, and wherever JSON of a stranger is parsed.
//!
//! A value that takes two bytes of JSON takes a hundred in memory, on its way
//! from text to what a program is told. A message is bounded in bytes, and so
//! it has to be in values: counted here, before anything is made of it.
//! Deliberately absent is any understanding of JSON beyond its strings, since
//! whatever is no JSON is refused by the next reader.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use rmcp::model::{ErrorCode, ErrorData, RequestId, ServerJsonRpcMessage};
use tokio::io::{AsyncRead, ReadBuf};

/// Values of one message, and of one result. The largest response a run may
/// have has room for no more than a few times as many.
pub(crate) const VALUES_MAX: u64 = 512 * 1024;

/// A stream of JSON, one message on each line.
pub(super) struct Counted<R> {
    inner: R,
    line: Line,
}

/// What was seen of one line.
#[derive(Default)]
struct Line {
    values: u64,
    in_string: bool,
    escaped: bool,
}

impl Line {
    /// Counts what parts values from each other. `false` if there are too
    /// many.
    fn passes(&mut self, bytes: &[u8]) -> bool {
        bytes.iter().all(|byte| match byte {
            b'\n' => {
                *self = Self::default();
                true
            }
            _ => self.takes(*byte),
        })
    }

    fn takes(&mut self, byte: u8) -> bool {
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' if self.in_string => self.escaped = true,
            b'"' => self.in_string = !self.in_string,
            b',' | b':' | b'[' | b'{' if !self.in_string => self.values += 1,
            _ => {}
        }
        self.values <= VALUES_MAX
    }
}

/// Whether a text of JSON, on however many lines, has no more values than
/// [`VALUES_MAX`].
pub(crate) fn has_few_values(json: &[u8]) -> bool {
    let mut all = Line::default();
    json.iter().all(|byte| all.takes(*byte))
}

/// Says of an answer in whose place it stands that it has too many. Of the codes
/// that JSON-RPC leaves to implementations.
const TOO_MANY: ErrorCode = ErrorCode(-32_077);

/// What a request is told in the place of an answer of too many values.
pub(super) fn too_many(id: RequestId) -> ServerJsonRpcMessage {
    let error = ErrorData::new(TOO_MANY, format!("more than {VALUES_MAX} values"), None);
    ServerJsonRpcMessage::error(error, Some(id))
}

/// Whether an error is that. A server that says so by itself has as little of an
/// answer.
pub(super) fn is_too_many(error: &ErrorData) -> bool {
    error.code == TOO_MANY
}

impl<R> Counted<R> {
    pub(super) fn new(inner: R) -> Self {
        Self { inner, line: Line::default() }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Counted<R> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.inner).poll_read(context, buffer);
        if matches!(read, Poll::Ready(Ok(()))) && !this.line.passes(&buffer.filled()[before..]) {
            tracing::warn!("a tool server's message has more than {VALUES_MAX} values");
            return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
        }
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_line_by_line_and_not_in_strings() {
        let half = "0,".repeat(VALUES_MAX as usize / 2 + 1);
        let passes = |text: &str| Line::default().passes(text.as_bytes());
        assert!(passes(&half) && !passes(&half.repeat(2)));
        assert!(passes(&format!("{half}\n{half}\n{half}")));
        assert!(passes(&format!("\"{}\"", half.repeat(3))));
        assert!(passes(&format!("\"a\\\"{}\"", half.repeat(3))));
        assert!(!passes(&format!("\"a\\\\\"{}", half.repeat(3))));
        assert!(has_few_values(half.as_bytes()));
        assert!(!has_few_values(format!("{half}\n{half}").as_bytes()), "a line ends nothing here");
        // In pieces as in one.
        let mut line = Line::default();
        assert!(line.passes(b"\"a\\") && line.passes(format!("\"{}", half.repeat(3)).as_bytes()));
    }
}
