//! What is said on the streams of sessions, kept for a client that was cut off.
//!
//! rmcp lets a request's stream go with its answer, and an answer that no
//! connection took was lost. Here each stream is read to its end whoever listens,
//! and what it said stays for a while: a client that comes back names the last
//! event that it has, and hears what came after it. Clients are distrusted: what
//! is kept for them has a bound in time, number and bytes.

use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_core::Stream;
use rmcp::model::ServerJsonRpcMessage;
use rmcp::transport::streamable_http_server::session::{ServerSseMessage, SessionId};
use tokio::sync::Notify;

use crate::locks::lock;

/// How long a stream that is over can still be heard.
const KEPT_TIME: Duration = Duration::from_secs(60);
/// Streams of one principal that are over and kept, and the bytes that they have
/// together. The oldest go first; one is kept whatever it has.
const OVER_MAX: usize = 256;
const OVER_BYTES_MAX: usize = 32 * 1024 * 1024;
/// Events of one stream that are kept: its answer is the last of them.
const EVENTS_MAX: usize = 16;

/// The streams of one principal's sessions.
pub(super) struct Kept {
    lines: Mutex<Lines>,
    /// How long they are kept when they are over.
    time: Duration,
}

impl Default for Kept {
    fn default() -> Self {
        Self { lines: Mutex::default(), time: KEPT_TIME }
    }
}

#[derive(Default)]
struct Lines {
    next: u64,
    all: HashMap<u64, Arc<Line>>,
    /// Those that are over, the oldest first, with their bytes.
    over: VecDeque<(u64, usize)>,
    over_bytes: usize,
}

/// One stream of a session.
struct Line {
    session: SessionId,
    said: Mutex<Said>,
    /// The listener took an event, or is gone.
    taken: Notify,
    /// It is kept no longer.
    let_go: Notify,
}

#[derive(Default)]
struct Said {
    /// Which event is the first that is kept.
    first: usize,
    events: VecDeque<ServerSseMessage>,
    is_over: bool,
    /// The newest listener. Another that is left of this stream hears no more.
    listener: u64,
    listens: bool,
    /// The event that it takes next.
    next: usize,
    waker: Option<Waker>,
}

/// What is ahead of a client that has heard one event of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ahead {
    /// What was said since, or is to be said yet.
    More,
    /// It is over, and that was its last.
    Nothing,
    /// It is not kept, or the event was never said.
    Unknown,
}

/// Somebody who hears one stream, until another does.
pub(super) struct Listener {
    line: Arc<Line>,
    number: u64,
}

impl Kept {
    /// Reads a stream of a session's to its end. `answered` is called when its
    /// answer is there, or is not to come any more.
    pub(super) fn begin(
        self: &Arc<Self>,
        session: SessionId,
        stream: impl Stream<Item = ServerSseMessage> + Send + 'static,
        answered: impl FnOnce() + Send + 'static,
    ) -> Listener {
        let (said, taken, let_go) = Default::default();
        let line = Arc::new(Line { session, said, taken, let_go });
        let number = {
            let mut lines = lock(&self.lines);
            let number = lines.next;
            lines.next += 1;
            lines.all.insert(number, Arc::clone(&line));
            number
        };
        let listener = Listener::new(Arc::clone(&line), 0);
        let kept = Arc::clone(self);
        tokio::spawn(async move {
            let mut answered = Some(answered);
            let mut answer = || {
                if let Some(answered) = answered.take() {
                    answered();
                }
            };
            let mut stream = pin!(stream);
            while let Some(event) = poll_fn(|context| stream.as_mut().poll_next(context)).await {
                let message = event.message.as_deref();
                if let Some(ServerJsonRpcMessage::Response(_) | ServerJsonRpcMessage::Error(_)) =
                    message
                {
                    // Before its client knows: it may use the id again at once.
                    answer();
                }
                line.say(event, number).await;
            }
            answer();
            if kept.is_over(number, &line) {
                let _ = tokio::time::timeout(kept.time, line.let_go.notified()).await;
                lock(&kept.lines).forget(number);
            }
        });
        listener
    }

    /// Hears a stream of this session's from after this event on. `None` if it is
    /// not kept, or was not said yet.
    pub(super) fn resume(&self, session: &SessionId, last_event_id: &str) -> Option<Listener> {
        self.next(session, last_event_id).map(|(line, next)| Listener::new(line, next))
    }

    /// What [`Kept::resume`] would give.
    pub(super) fn ahead(&self, session: &SessionId, last_event_id: &str) -> Ahead {
        let Some((line, next)) = self.next(session, last_event_id) else { return Ahead::Unknown };
        let said = lock(&line.said);
        match said.is_over && next >= said.first + said.events.len() {
            true => Ahead::Nothing,
            false => Ahead::More,
        }
    }

    fn next(&self, session: &SessionId, last_event_id: &str) -> Option<(Arc<Line>, usize)> {
        let (event, line) = last_event_id.split_once('/')?;
        let (event, line): (usize, u64) = (event.parse().ok()?, line.parse().ok()?);
        let line = lock(&self.lines).all.get(&line).cloned()?;
        let end = {
            let said = lock(&line.said);
            said.first + said.events.len()
        };
        (line.session == *session && event < end).then(|| (line, event + 1))
    }

    /// A session has ended, and nobody comes back to it.
    pub(super) fn forget(&self, session: &SessionId) {
        let mut lines = lock(&self.lines);
        let of_session = lines.all.iter().filter(|(_, line)| line.session == *session);
        let numbers: Vec<u64> = of_session.map(|(number, _)| *number).collect();
        numbers.into_iter().for_each(|number| lines.forget(number));
    }

    /// Whether everything is said, and heard by whoever listens.
    pub(super) fn is_quiet(&self) -> bool {
        lock(&self.lines).all.values().all(|line| {
            let said = lock(&line.said);
            said.is_over && (!said.listens || said.next >= said.first + said.events.len())
        })
    }

    /// A stream has ended. Says whether it is kept.
    fn is_over(&self, number: u64, line: &Line) -> bool {
        let bytes = line.end();
        let mut lines = lock(&self.lines);
        if !lines.all.contains_key(&number) {
            return false;
        }
        lines.over.push_back((number, bytes));
        lines.over_bytes += bytes;
        while lines.over.len() > OVER_MAX
            || lines.over.len() > 1 && lines.over_bytes > OVER_BYTES_MAX
        {
            let Some((oldest, _)) = lines.over.front().copied() else { break };
            lines.forget(oldest);
        }
        true
    }
}

impl Lines {
    fn forget(&mut self, number: u64) {
        if let Some(line) = self.all.remove(&number) {
            line.let_go.notify_one();
        }
        if let Some(at) = self.over.iter().position(|(over, _)| *over == number)
            && let Some((_, bytes)) = self.over.remove(at)
        {
            self.over_bytes -= bytes;
        }
    }
}

impl Line {
    /// Says it once there is room: what a listener has not taken stays. Without
    /// one, the oldest gives way.
    async fn say(&self, mut event: ServerSseMessage, number: u64) {
        loop {
            {
                let mut said = lock(&self.said);
                let is_full = said.events.len() == EVENTS_MAX;
                if !is_full || !said.listens || said.next > said.first {
                    if is_full {
                        said.events.pop_front();
                        said.first += 1;
                    }
                    event.event_id = Some(format!("{}/{number}", said.first + said.events.len()));
                    said.events.push_back(event);
                    return said.wake();
                }
            }
            self.taken.notified().await;
        }
    }

    /// Nothing more is said. Gives the bytes of what is kept.
    fn end(&self) -> usize {
        let events = {
            let mut said = lock(&self.said);
            said.is_over = true;
            said.wake();
            said.events.clone()
        };
        events.iter().filter_map(|event| event.message.as_deref()).map(bytes).sum()
    }
}

impl Said {
    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// What a brace and what parts two values take at most, in bytes: the nodes of a map
/// and the values themselves are far larger than their text.
const BRACE_BYTES: usize = 640;
const PART_BYTES: usize = 64;

/// The bytes that a message takes: those of its text, and what its values are held
/// in. A text that has such characters counts for more than it takes.
fn bytes(message: &ServerJsonRpcMessage) -> usize {
    struct Count(usize);
    impl io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let held = |byte: &u8| match byte {
                b'{' => BRACE_BYTES,
                b',' | b'[' | b':' => PART_BYTES,
                _ => 1,
            };
            self.0 += bytes.iter().map(held).sum::<usize>();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    // What cannot be written is sent to nobody.
    let _ = serde_json::to_writer(&mut count, message);
    count.0
}

impl Listener {
    fn new(line: Arc<Line>, next: usize) -> Self {
        let number = {
            let mut said = lock(&line.said);
            said.listener += 1;
            (said.listens, said.next) = (true, next);
            // The one before ends.
            said.wake();
            said.listener
        };
        line.taken.notify_one();
        Self { line, number }
    }
}

impl Stream for Listener {
    type Item = ServerSseMessage;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut said = lock(&self.line.said);
        if said.listener != self.number {
            return Poll::Ready(None);
        }
        // What is kept no longer is passed over.
        said.next = said.next.max(said.first);
        let Some(event) = said.events.get(said.next - said.first).cloned() else {
            if said.is_over {
                return Poll::Ready(None);
            }
            said.waker = Some(context.waker().clone());
            return Poll::Pending;
        };
        said.next += 1;
        self.line.taken.notify_one();
        Poll::Ready(Some(event))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut said = lock(&self.line.said);
        if said.listener == self.number {
            said.listens = false;
            self.line.taken.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use rmcp::model::{RequestId, ServerResult};
    use tokio::sync::mpsc;

    use super::*;

    /// A stream that says what it is told to.
    struct Fed(mpsc::Receiver<ServerSseMessage>);

    impl Stream for Fed {
        type Item = ServerSseMessage;

        fn poll_next(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<Self::Item>> {
            self.0.poll_recv(context)
        }
    }

    fn fed(kept: &Arc<Kept>) -> (mpsc::Sender<ServerSseMessage>, Listener, Arc<Mutex<bool>>) {
        let (feed, stream) = mpsc::channel(1);
        let answered = Arc::<Mutex<bool>>::default();
        let is_answered = Arc::clone(&answered);
        let listener = kept.begin("a".into(), Fed(stream), move || *lock(&is_answered) = true);
        (feed, listener, answered)
    }

    fn progress() -> ServerSseMessage {
        ServerSseMessage::retry(Duration::ZERO)
    }

    fn answer() -> ServerSseMessage {
        let result = ServerResult::empty(());
        ServerSseMessage::from_message(ServerJsonRpcMessage::response(result, RequestId::Number(1)))
    }

    /// The id of the next event, if there is one.
    async fn hear(listener: &mut Listener) -> Option<String> {
        let next = poll_fn(|context| Pin::new(&mut *listener).poll_next(context));
        let heard = tokio::time::timeout(Duration::from_secs(30), next).await.unwrap();
        heard.map(|event| event.event_id.unwrap())
    }

    #[tokio::test]
    async fn an_answer_that_nobody_took_is_heard_by_who_comes_back() {
        let kept = Arc::<Kept>::default();
        let (feed, mut listener, answered) = fed(&kept);
        feed.send(progress()).await.unwrap();
        assert_eq!(hear(&mut listener).await.as_deref(), Some("0/0"));
        drop(listener);
        // More than is kept: nobody is waited for.
        for _ in 0..2 * EVENTS_MAX {
            feed.send(progress()).await.unwrap();
        }
        assert!(!*lock(&answered));
        feed.send(answer()).await.unwrap();
        drop(feed);
        while !kept.is_quiet() {
            tokio::task::yield_now().await;
        }
        let mut back = kept.resume(&"a".into(), "0/0").unwrap();
        let mut heard = Vec::new();
        while let Some(id) = hear(&mut back).await {
            heard.push(id);
        }
        let last = 2 * EVENTS_MAX + 1;
        let ids: Vec<_> =
            (0..EVENTS_MAX).map(|n| format!("{}/0", last + 1 + n - EVENTS_MAX)).collect();
        assert_eq!(heard, ids);
        assert!(*lock(&answered) && kept.is_quiet());
        // What it has is not said again, and what is another's is not said at all.
        let ahead = |session: &str, id: &str| kept.ahead(&session.into(), id);
        assert_eq!(ahead("a", &format!("{}/0", last - 1)), Ahead::More);
        assert_eq!(ahead("a", &format!("{last}/0")), Ahead::Nothing);
        assert_eq!(ahead("b", &format!("{last}/0")), Ahead::Unknown);
        let mut again = kept.resume(&"a".into(), &format!("{}/0", last - 1)).unwrap();
        assert_eq!(hear(&mut again).await, Some(format!("{last}/0")));
        for (session, id) in [("b", "0/0"), ("a", "0/1"), ("a", "99/0"), ("a", "0"), ("a", "x/y")] {
            assert!(kept.resume(&session.into(), id).is_none(), "{session} {id}");
        }
        kept.forget(&"a".into());
        assert!(kept.resume(&"a".into(), "0/0").is_none());
    }

    #[tokio::test]
    async fn who_comes_back_hears_what_goes_on_and_its_old_connection_no_more() {
        let kept = Arc::<Kept>::default();
        let (feed, mut old, _) = fed(&kept);
        feed.send(progress()).await.unwrap();
        hear(&mut old).await.unwrap();
        let mut new = kept.resume(&"a".into(), "0/0").unwrap();
        assert_eq!(hear(&mut old).await, None);
        drop(old);
        let (heard, ()) = tokio::join!(hear(&mut new), async {
            assert!(!kept.is_quiet());
            feed.send(answer()).await.unwrap();
        });
        assert_eq!(heard.as_deref(), Some("1/0"));
    }

    #[tokio::test]
    async fn a_slow_listener_misses_nothing() {
        let kept = Arc::<Kept>::default();
        let (feed, mut listener, _) = fed(&kept);
        let feeding = tokio::spawn(async move {
            for _ in 0..10 * EVENTS_MAX {
                feed.send(progress()).await.unwrap();
            }
        });
        for n in 0..10 * EVENTS_MAX {
            tokio::task::yield_now().await;
            assert_eq!(hear(&mut listener).await, Some(format!("{n}/0")));
        }
        assert_eq!(hear(&mut listener).await, None);
        feeding.await.unwrap();
    }

    #[tokio::test]
    async fn what_is_over_is_kept_for_so_long_and_so_many_of_it() {
        let hear_all = async |kept: &Arc<Kept>| {
            let (feed, mut listener, _) = fed(kept);
            feed.send(answer()).await.unwrap();
            drop(feed);
            while hear(&mut listener).await.is_some() {}
        };
        let kept = Arc::<Kept>::default();
        for _ in 0..=OVER_MAX {
            hear_all(&kept).await;
        }
        // That it is over is noted after it is heard.
        while lock(&kept.lines).all.contains_key(&0) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(lock(&kept.lines).all.len(), OVER_MAX);
        let kept = Arc::new(Kept { time: Duration::from_millis(20), ..Kept::default() });
        hear_all(&kept).await;
        while !lock(&kept.lines).all.is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let lines = lock(&kept.lines);
        assert_eq!((lines.over.len(), lines.over_bytes), (0, 0));
    }

    #[tokio::test]
    async fn a_listener_that_goes_late_takes_nothing_from_the_one_that_came_after_it() {
        let kept = Arc::<Kept>::default();
        let (feed, old, _) = fed(&kept);
        feed.send(progress()).await.unwrap();
        while kept.ahead(&"a".into(), "0/0") == Ahead::Unknown {
            tokio::task::yield_now().await;
        }
        let mut new = kept.resume(&"a".into(), "0/0").unwrap();
        drop(old);
        let feeding = tokio::spawn(async move {
            for _ in 0..3 * EVENTS_MAX {
                feed.send(progress()).await.unwrap();
            }
        });
        // What is said waits for it, and is not given up for what comes next.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        for at in 1..=3 * EVENTS_MAX {
            assert_eq!(hear(&mut new).await, Some(format!("{at}/0")));
        }
        feeding.await.unwrap();
    }

    #[tokio::test]
    async fn an_id_is_free_before_its_client_has_the_answer_though_the_stream_goes_on() {
        let kept = Arc::<Kept>::default();
        let (feed, mut listener, answered) = fed(&kept);
        feed.send(progress()).await.unwrap();
        hear(&mut listener).await.unwrap();
        assert!(!*lock(&answered));
        feed.send(answer()).await.unwrap();
        hear(&mut listener).await.unwrap();
        assert!(*lock(&answered));
        drop(feed);
    }
}
