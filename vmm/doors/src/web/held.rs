//! Bodies that have a place until they are sent.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use hyper::body::{Body, Bytes, Frame, SizeHint};

/// What is handed on at once, in bytes. hyper takes what it is given and holds it
/// until the client takes it, and lets a body go as soon as it has all of it.
const PIECE_BYTES: usize = 64 * 1024;

/// A body, and its place among what is under way until its last piece is taken.
pub(crate) struct Held<B, P> {
    body: B,
    /// What the body gave and was not handed on yet.
    rest: Bytes,
    _place: P,
}

impl<B, P> Held<B, P> {
    pub(crate) fn new(body: B, place: P) -> Self {
        Self { body, rest: Bytes::new(), _place: place }
    }
}

impl<B: Body<Data = Bytes> + Unpin, P: Unpin> Body for Held<B, P> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                other => return Poll::Ready(other),
            }
        }
        let bytes = self.rest.len().min(PIECE_BYTES);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(bytes)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (left, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut hint = SizeHint::new();
        hint.set_lower(left.lower() + rest);
        if let Some(upper) = left.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

#[cfg(all(test, feature = "http"))]
mod tests {
    use std::future::poll_fn;
    use std::sync::Arc;

    use axum::body::Body as Whole;

    use super::*;

    #[tokio::test]
    async fn a_body_keeps_its_place_until_its_last_piece_is_taken() {
        let place = Arc::new(());
        let bytes = Bytes::from(vec![b'x'; 2 * PIECE_BYTES + 1]);
        let mut held = Held::new(Whole::from(bytes.clone()), Arc::clone(&place));
        let mut all = Vec::new();
        while !held.is_end_stream() {
            let left = (bytes.len() - all.len()) as u64;
            assert_eq!(held.size_hint().exact(), Some(left));
            let frame = poll_fn(|context| Pin::new(&mut held).poll_frame(context)).await;
            let piece = frame.unwrap().unwrap().into_data().unwrap();
            assert!(piece.len() <= PIECE_BYTES);
            all.extend_from_slice(&piece);
        }
        assert_eq!(all, bytes);
        assert_eq!(Arc::strong_count(&place), 2);
        drop(held);
        assert_eq!(Arc::strong_count(&place), 1);
    }
}
