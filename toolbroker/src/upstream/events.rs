//! A server's stream of events (`text/event-stream`), of which none has more
//! bytes or values than the broker keeps in memory.
//!
//! It distrusts the server. Bytes are counted as they come, from one empty line
//! to the next ([`sse`]); values once an event is whole, and before the MCP library parses
//! it. In the place of an answer of which nothing can be made comes the error that
//! ends its request ([`Unusable`]); an event of no use that answers nothing is left
//! out. An event of too many bytes is the last of its stream, and no other
//! stream of that session is asked for: it would begin with the same.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use forge_log::Seldom;
use futures_core::Stream;
use futures_core::stream::BoxStream;
use reqwest::Response;
use rmcp::RoleClient;
use rmcp::model::{JsonRpcMessage, RequestId};
use rmcp::service::RxJsonRpcMessage;
use rmcp::transport::streamable_http_client::SseError;
use serde::Deserialize as _;
use sse_stream::Sse;

use super::unusable::{Scan, Unusable, is_same};
use super::{received, sse};

/// The events of a response, each of at most `bytes_max` bytes. If they answer
/// a request, `asked` is its id. An event that is too large is told `session` too.
pub(super) fn events(
    response: Response,
    bytes_max: usize,
    asked: Option<RequestId>,
    session: Arc<AtomicBool>,
) -> BoxStream<'static, Result<Sse, SseError>> {
    // What becomes of this stream says nothing of another's answer.
    let is_too_large = Arc::new(AtomicBool::new(false));
    let told = [Arc::clone(&is_too_large), session];
    let inner = Box::pin(sse::Events::of(response.bytes_stream(), bytes_max, told));
    Box::pin(Answers { inner, asked, answers_another: false, is_over: false, is_too_large })
}

/// Events that the MCP library can read.
struct Answers<S> {
    inner: Pin<Box<S>>,
    asked: Option<RequestId>,
    /// Whether there was an answer, and to something that was not asked.
    answers_another: bool,
    is_over: bool,
    is_too_large: Arc<AtomicBool>,
}

impl<S> Answers<S> {
    /// What comes in the place of an event; `None` if it is left out.
    fn read(&mut self, mut event: Sse) -> Option<Sse> {
        let Some(data) = event.data.as_deref().filter(|data| !data.trim().is_empty()) else {
            return Some(event);
        };
        let mut scan = Scan::default();
        scan.see(data.as_bytes());
        let why = if scan.has_too_many() {
            Unusable::TooMany
        } else {
            let read = received::read(data.as_bytes()).and_then(|read| {
                let message = RxJsonRpcMessage::<RoleClient>::deserialize(&read)?;
                Ok((message, read.to_string()))
            });
            match read {
                // The library reads it anew.
                Ok((message, text)) => {
                    event.data = Some(text);
                    return Some(self.pass(message, event));
                }
                // A notification that this release does not know.
                Err(_) if scan.has_method() => return Some(event),
                Err(error) => Unusable::unread(&error),
            }
        };
        static SAID: Seldom = Seldom::each_second();
        if SAID.is_due() {
            tracing::warn!(%why, "an event of a tool server is of no use");
        }
        let asked = self.asked.take().or_else(|| scan.answers());
        asked.map(|asked| instead(&why.answer(asked), event))
    }

    /// An error is that of what was asked, whatever id it has: a server that could
    /// not read a request does not know which it was.
    fn pass(&mut self, message: RxJsonRpcMessage<RoleClient>, event: Sse) -> Sse {
        match (message, &self.asked) {
            (JsonRpcMessage::Response(said), Some(asked)) if is_same(&said.id, asked) => {
                self.asked = None;
                event
            }
            (JsonRpcMessage::Response(_), Some(_)) => {
                self.answers_another = true;
                event
            }
            (JsonRpcMessage::Error(said), Some(_)) => {
                let answer = RxJsonRpcMessage::<RoleClient>::error(said.error, self.asked.take());
                instead(&answer, event)
            }
            _ => event,
        }
    }
}

fn instead(message: &RxJsonRpcMessage<RoleClient>, event: Sse) -> Sse {
    // It is a map of texts and numbers.
    Sse { data: serde_json::to_string(message).ok(), ..event }
}

impl<S: Stream<Item = Result<Sse, SseError>>> Stream for Answers<S> {
    type Item = Result<Sse, SseError>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if this.is_over {
                return Poll::Ready(None);
            }
            match ready!(this.inner.as_mut().poll_next(context)) {
                Some(Ok(event)) => {
                    if let Some(event) = this.read(event) {
                        return Poll::Ready(Some(Ok(event)));
                    }
                }
                Some(Err(error)) => {
                    this.is_over = true;
                    let is_too_large = this.is_too_large.load(Ordering::Acquire);
                    let asked = this.asked.take().filter(|_| is_too_large);
                    let answer = asked.map(|asked| Unusable::TooLong.answer(asked));
                    return Poll::Ready(Some(match answer {
                        Some(answer) => Ok(instead(&answer, Sse::default())),
                        None => Err(error),
                    }));
                }
                None => {
                    this.is_over = true;
                    let asked = this.asked.take().filter(|_| this.answers_another);
                    let answer = asked.map(|asked| Unusable::Another.answer(asked));
                    return Poll::Ready(answer.map(|answer| Ok(instead(&answer, Sse::default()))));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::unusable::VALUES_MAX;
    use super::*;

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
        let inner = Box::pin(Ready(events));
        let is_too_large = Arc::default();
        let mut stream =
            Answers { inner, asked, answers_another: false, is_over: false, is_too_large };
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut out = Vec::new();
        while let Poll::Ready(Some(event)) = Pin::new(&mut stream).poll_next(&mut context) {
            out.push(event);
        }
        out
    }

    fn answer(id: &str, rest: &str) -> String {
        format!(r#"{{"jsonrpc":"2.0","id":{id},{rest}}}"#)
    }

    /// Which request each of them ends, and why if that is ours to say.
    fn ended(got: Vec<Result<Sse, SseError>>) -> Vec<(Value, Option<Unusable>)> {
        let read = |event: Result<Sse, SseError>| {
            let said: Value = serde_json::from_str(&event.ok()?.data?).ok()?;
            let error = serde_json::from_value(said["error"].clone()).ok();
            Some((said["id"].clone(), error.and_then(|error| Unusable::of(&error))))
        };
        got.into_iter().filter_map(read).collect()
    }

    #[test]
    fn an_answer_of_no_use_ends_its_request_and_not_its_stream() {
        let many = format!("\"result\":[{}0]", "0,".repeat(VALUES_MAX as usize));
        let asked = || Some(RequestId::Number(7));
        let good = answer("1", "\"result\":{}");
        for (said, why) in [
            (answer("7", &many), Unusable::TooMany),
            (answer("7", "\"result\":NaN"), Unusable::NoJson),
            (answer("7", "\"what\":1"), Unusable::NoMessage),
            ("{no json".to_owned(), Unusable::NoJson),
        ] {
            let got = ended(out(asked(), &[&good, &said, &good]));
            assert_eq!(got, [(json!(1), None), (json!(7), Some(why)), (json!(1), None)], "{why}");
        }
        // On another stream by what is legible, if anything is.
        let got = out(None, &[&answer("9", &many), &many, "{no json", &good]);
        assert_eq!(got.len(), 2, "what answers nothing is left out");
        assert_eq!(ended(got), [(json!(9), Some(Unusable::TooMany)), (json!(1), None)]);
    }

    #[test]
    fn a_stream_that_answers_another_request_alone_ends_its_own() {
        let (asked, other) = (Some(RequestId::Number(7)), answer("8", "\"result\":{}"));
        let got = ended(out(asked.clone(), &[&other]));
        assert_eq!(got, [(json!(8), None), (json!(7), Some(Unusable::Another))]);
        let got = ended(out(asked.clone(), &[&other, &answer("7", "\"result\":{}")]));
        assert_eq!(got, [(json!(8), None), (json!(7), None)]);
        assert!(out(asked, &[]).is_empty(), "a stream that broke is another matter");
    }

    #[test]
    fn an_error_is_that_of_what_was_asked_and_what_is_no_answer_passes() {
        let error = r#""error":{"code":-32600,"message":"pardon?"}"#;
        for id in ["null", "\"server-error\"", "7"] {
            let got = ended(out(Some(RequestId::Number(7)), &["", &answer(id, error)]));
            assert_eq!(got, [(json!(7), None)], "{id}");
        }
        let ping = r#"{"id":"server-error","jsonrpc":"2.0","method":"ping"}"#;
        let unknown = r#"{"jsonrpc":"2.0","method":"notifications/unheard-of","params":7}"#;
        let got = out(Some(RequestId::Number(7)), &["", ping, unknown]);
        let said: Vec<_> = got.iter().map(|it| it.as_ref().unwrap().data.as_deref()).collect();
        assert_eq!(said, [Some(""), Some(ping), Some(unknown)]);
    }

    #[test]
    fn half_a_character_costs_itself_and_not_its_event() {
        let told =
            r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"data":"\ud83d"}}"#;
        let got = out(
            Some(RequestId::Number(7)),
            &[told, &answer("7", r#""result":{"x":"cut \ud83d"}"#)],
        );
        let said: Vec<Value> = got
            .into_iter()
            .map(|event| serde_json::from_str(&event.unwrap().data.unwrap()).unwrap())
            .collect();
        assert_eq!(said[0]["params"]["data"], "\u{fffd}");
        assert_eq!(said[1]["result"]["x"], "cut \u{fffd}");
    }
}
