//! The control link itself: requests out, answers in, over one socket.
//!
//! Many threads may ask at once. Requests carry numbers, and whoever waits
//! for an answer while nobody reads the link reads it for all: an answer is
//! left for the thread whose number it has. So a slow answer (servers have to
//! start) holds up nobody else, and there is no thread that only reads. Nobody
//! waits with a lock held that others need either: what the socket does not
//! take at once is kept, and goes out before the next request.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsFd as _, AsRawFd as _, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forge_protocol::broker::{Answer, Ask, RefusalKind, Reply, Request};
use forge_protocol::codec::{self, BorrowDecode};
use forge_protocol::frame::{self, Frame, Incoming, Kind};
use forge_protocol::handshake::{HandshakeError, Hello, Refusal, Role};

use super::BrokerError;
use crate::link::{self, Arrivals, Patience, Unpassed};
use crate::locks::lock;

/// How often somebody looks whether an answer is still wanted while another
/// thread reads the link.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long whoever waits for room reads before it tries again to write.
const READ_TIME_MAX: Duration = Duration::from_millis(1);
/// What is read from the link at once, in bytes.
const READ_BYTES: usize = 16 * 1024;

/// The supervisor's end.
#[derive(Debug)]
pub(super) struct Control {
    socket: UnixStream,
    outgoing: Mutex<Outgoing>,
    answers: Mutex<Answers>,
    /// Told when an answer came, the link broke, or its reader left.
    changed: Condvar,
    /// A frame that is not whole yet stays for whoever reads next.
    incoming: Mutex<Incoming>,
}

/// What goes out, one request after the other.
#[derive(Debug, Default)]
struct Outgoing {
    /// The number of the next request.
    next: u64,
    /// What the socket has not taken yet: of [`Self::last`], and then what was
    /// withdrawn since.
    rest: Vec<u8>,
    /// The last request that was begun.
    last: u64,
    /// How much of the rest is of that one.
    of_last: usize,
}

impl Outgoing {
    /// Whether all of a request is out that was begun.
    fn is_out(&self, id: u64) -> bool {
        // Who began the next one has put this one out.
        self.last != id || self.of_last == 0
    }
}

/// What came and was not taken yet.
#[derive(Debug, Default)]
struct Answers {
    /// By number; `None` while it is waited for.
    waited: HashMap<u64, Option<Reply>>,
    /// Whether a thread reads the link.
    reading: bool,
    /// Why no more answers come.
    broken: Option<Broken>,
}

/// What the socket took.
enum Put {
    /// So many bytes, at least one.
    Bytes(usize),
    /// The socket is full, and took nothing.
    Full,
    /// Nothing, as all too many descriptors of this user are under way.
    Crowded,
}

/// Whether a request was begun.
enum Begun {
    /// It was begun under this number.
    As(u64),
    /// The socket takes nothing now.
    Full,
    /// Nothing was sent, as with [`Put::Crowded`].
    Crowded,
}

/// Why there is no answer.
pub(super) enum Silence {
    /// Whoever asked wants none any more.
    Cancelled,
    /// It did not come in time.
    Over,
    /// There was no room in time to ask for it: it will not come.
    Unasked,
    /// The answer cannot come, for this reason.
    Broken(BrokerError),
}

impl From<BrokerError> for Silence {
    fn from(error: BrokerError) -> Self {
        Self::Broken(error)
    }
}

/// How a link broke, for each of those who wait.
#[derive(Clone, Debug)]
enum Broken {
    Lost(io::ErrorKind, String),
    Protocol(String),
}

impl Broken {
    fn lost(error: &io::Error) -> Self {
        Self::Lost(error.kind(), error.to_string())
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Lost(_, why) | Self::Protocol(why)) = self;
        f.write_str(why)
    }
}

impl From<Broken> for BrokerError {
    fn from(broken: Broken) -> Self {
        match broken {
            Broken::Lost(kind, text) => Self::Lost(io::Error::new(kind, text)),
            Broken::Protocol(what) => Self::Protocol(what),
        }
    }
}

impl Control {
    pub(super) fn new(socket: UnixStream) -> Self {
        Self {
            socket,
            outgoing: Mutex::default(),
            answers: Mutex::default(),
            changed: Condvar::new(),
            incoming: Mutex::new(Incoming::new(READ_BYTES)),
        }
    }

    /// The same link, for who watches whether it hangs up.
    pub(super) fn watched(&self) -> io::Result<UnixStream> {
        self.socket.try_clone()
    }

    /// Nobody asks any more.
    pub(super) fn close(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Agrees on a version, before anything is asked: `None` if there is no
    /// patience left for the other side's word.
    pub(super) fn greet(&self, patience: Patience<'_>) -> Result<Option<()>, BrokerError> {
        let ours = Hello::ours(Role::Supervisor);
        let mut bytes = Vec::new();
        frame::write_message(Kind::Hello, &ours, &mut bytes);
        (&self.socket).write_all(&bytes).map_err(BrokerError::Lost)?;
        match self.next_frame(patience)? {
            None => Ok(None),
            Some(Frame { kind: Kind::Hello, payload }) => {
                ours.agree(decode(&payload)?, Role::Broker)?;
                Ok(Some(()))
            }
            Some(Frame { kind: Kind::Refuse, payload }) => {
                let Refusal(theirs) = decode(&payload)?;
                Err(HandshakeError::VersionMismatch { theirs, ours }.into())
            }
            Some(Frame { kind, .. }) => {
                Err(BrokerError::Protocol(format!("a {kind:?} frame for a greeting")))
            }
        }
    }

    /// Asks, and waits for the answer as long as there is patience; `rider` goes
    /// with the request's first byte. The other side is told when nobody waits
    /// any more, if it can make use of that.
    ///
    /// # Errors
    /// [`Silence`]. It is [`BrokerError::Unsent`] if the other side cannot have
    /// seen the request.
    pub(super) fn ask(
        &self,
        request: Request,
        rider: Option<UnixStream>,
        patience: Patience<'_>,
    ) -> Result<Reply, Silence> {
        let can_be_withdrawn = request.can_be_withdrawn();
        let id = self.begin(request, rider, patience).map_err(|silence| match silence {
            Silence::Over => Silence::Unasked,
            silence => silence,
        })?;
        let reply = self.flush(id, patience).and_then(|()| self.wait_for(id, patience));
        if let Err(silence) = &reply {
            lock(&self.answers).waited.remove(&id);
            if can_be_withdrawn && !matches!(silence, Silence::Broken(_)) {
                self.withdraw(id);
            }
        }
        reply
    }

    /// Begins to send a request as soon as the link takes any of it; gives back
    /// the number of its answer. It may be as large as a client likes, and the
    /// other side slow.
    fn begin(
        &self,
        request: Request,
        rider: Option<UnixStream>,
        patience: Patience<'_>,
    ) -> Result<u64, Silence> {
        let mut ask = Ask { id: 0, request };
        let mut arrivals = Arrivals::default();
        loop {
            match self.try_begin(&mut ask, rider.as_ref())? {
                Begun::As(id) => return Ok(id),
                Begun::Full => self.wait_for_room(patience)?,
                Begun::Crowded => arrivals.wait(patience).map_err(uncrowded)?,
            }
        }
    }

    /// Puts as much of a request into the socket as it takes, and keeps the
    /// rest.
    fn try_begin(&self, ask: &mut Ask, rider: Option<&UnixStream>) -> Result<Begun, BrokerError> {
        let mut outgoing = lock(&self.outgoing);
        if !self.push(&mut outgoing)? {
            return Ok(Begun::Full);
        }
        let id = outgoing.next;
        ask.id = id;
        let mut bytes = Vec::new();
        // What is asked may be a client's words, of any length.
        frame::try_write_message(Kind::Request, &*ask, &mut bytes).map_err(|error| {
            BrokerError::Refused {
                kind: RefusalKind::BadRequest,
                message: format!("this is too much for one request: {error}"),
            }
        })?;
        {
            let mut answers = lock(&self.answers);
            if let Some(broken) = &answers.broken {
                return Err(BrokerError::Unsent(broken.to_string()));
            }
            answers.waited.insert(id, None);
        }
        let begun = match self.put_first(&bytes, rider)? {
            Put::Bytes(put) => {
                let rest = bytes.split_off(put);
                *outgoing = Outgoing { next: id + 1, last: id, of_last: rest.len(), rest };
                return Ok(Begun::As(id));
            }
            Put::Full => Begun::Full,
            Put::Crowded => Begun::Crowded,
        };
        lock(&self.answers).waited.remove(&id);
        Ok(begun)
    }

    /// Waits until all of a request is in the socket. A frame that is not whole
    /// is never decoded; what is missing of one that nobody waits for goes out
    /// before the next.
    fn flush(&self, id: u64, patience: Patience<'_>) -> Result<(), Silence> {
        loop {
            {
                let mut outgoing = lock(&self.outgoing);
                let pushed = self.push(&mut outgoing);
                // Whatever becomes of what others left behind it.
                if outgoing.is_out(id) {
                    return Ok(());
                }
                pushed?;
            }
            self.wait_for_room(patience)?;
        }
    }

    /// Says that nobody waits for an answer any more: now, or with what goes
    /// out next. It stays small: nothing but this is added to a rest.
    fn withdraw(&self, question: u64) {
        let mut outgoing = lock(&self.outgoing);
        let withdraw = Ask { id: outgoing.next, request: Request::Withdraw { question } };
        outgoing.next += 1;
        frame::write_message(Kind::Request, &withdraw, &mut outgoing.rest);
        // Where the link fails, all who wait hear of it.
        let _ = self.push(&mut outgoing);
    }

    /// Puts out what is left: whether all of it is.
    fn push(&self, outgoing: &mut Outgoing) -> Result<bool, BrokerError> {
        while !outgoing.rest.is_empty() {
            match self
                .put(|socket| link::send_now(socket, &outgoing.rest).map_err(Unpassed::Link))?
            {
                Put::Bytes(put) => {
                    outgoing.rest.drain(..put);
                    outgoing.of_last = outgoing.of_last.saturating_sub(put);
                }
                Put::Full | Put::Crowded => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Puts the beginning of a request into the socket, and what rides along.
    fn put_first(&self, bytes: &[u8], rider: Option<&UnixStream>) -> Result<Put, BrokerError> {
        self.put(|socket| match rider {
            Some(rider) => link::pass_now(socket, bytes, rider.as_fd()),
            None => link::send_now(socket, bytes).map_err(Unpassed::Link),
        })
    }

    /// Puts into the socket what it takes now.
    fn put(&self, send: impl Fn(RawFd) -> Result<usize, Unpassed>) -> Result<Put, BrokerError> {
        loop {
            match send(self.socket.as_raw_fd()) {
                Ok(put) => return Ok(Put::Bytes(put)),
                Err(Unpassed::TooManyUnderWay) => return Ok(Put::Crowded),
                Err(Unpassed::Link(error)) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => return Ok(Put::Full),
                    _ => {
                        // A request may have gone out in part: the link is of no use.
                        self.end(Broken::lost(&error));
                        return Err(BrokerError::Unsent(error.to_string()));
                    }
                },
            }
        }
    }

    /// Waits until the socket may take something. Reads meanwhile, as long as
    /// nobody else does: the other side may wait for room as well, and then
    /// reads nothing before its answers are taken.
    fn wait_for_room(&self, patience: Patience<'_>) -> Result<(), Silence> {
        let mut answers = lock(&self.answers);
        if answers.reading {
            drop(answers);
            // Whoever reads may leave.
            let look = Instant::now() + LOOK_EVERY;
            return match self.wait(libc::POLLOUT, patience.no_later_than(look)) {
                Err(Silence::Over) if !patience.is_over() => Ok(()),
                waited => waited,
            };
        }
        answers.reading = true;
        drop(answers);
        let (waited, read) = self.read_or_wait_for_room(patience);
        self.deliver(&mut lock(&self.answers), read);
        waited
    }

    /// What is read comes first: the answer that came along with another is not
    /// in the socket any more.
    fn read_or_wait_for_room(
        &self,
        patience: Patience<'_>,
    ) -> (Result<(), Silence>, Result<Option<Answer>, Broken>) {
        match self.read_answer(Patience::until(Instant::now())) {
            Ok(None) => match self.wait(libc::POLLIN | libc::POLLOUT, patience) {
                // There may be nothing to read.
                Ok(()) => {
                    (Ok(()), self.read_answer(Patience::until(Instant::now() + READ_TIME_MAX)))
                }
                silence => (silence, Ok(None)),
            },
            read => (Ok(()), read),
        }
    }

    fn wait(&self, events: libc::c_short, patience: Patience<'_>) -> Result<(), Silence> {
        link::wait(self.socket.as_raw_fd(), events, patience).map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => Silence::Over,
            io::ErrorKind::ConnectionAborted => Silence::Cancelled,
            _ => BrokerError::Unsent(error.to_string()).into(),
        })
    }

    /// Waits for one answer, and reads the link for all while nobody else
    /// does.
    fn wait_for(&self, id: u64, patience: Patience<'_>) -> Result<Reply, Silence> {
        let mut answers = lock(&self.answers);
        loop {
            if let Some(reply) = answers.waited.get_mut(&id).and_then(Option::take) {
                answers.waited.remove(&id);
                return Ok(reply);
            }
            if let Some(broken) = &answers.broken {
                return Err(BrokerError::from(broken.clone()).into());
            }
            if patience.is_cancelled() {
                return Err(Silence::Cancelled);
            }
            if patience.is_over() {
                return Err(Silence::Over);
            }
            if answers.reading {
                // Who waits for a word of another thread's cannot look at the
                // cancel handle meanwhile, and so does now and then.
                let waited = self.changed.wait_timeout(answers, LOOK_EVERY);
                answers = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            answers.reading = true;
            drop(answers);
            let read = self.read_answer(patience);
            answers = lock(&self.answers);
            self.deliver(&mut answers, read);
        }
    }

    /// Hands the answer to the thread that asked for it, and lets another thread read.
    fn deliver(&self, answers: &mut Answers, read: Result<Option<Answer>, Broken>) {
        answers.reading = false;
        match read {
            // One that nobody waits for any more is dropped here.
            Ok(Some(Answer { id, reply })) => {
                if let Some(place) = answers.waited.get_mut(&id) {
                    *place = Some(reply);
                }
            }
            Ok(None) => {}
            Err(broken) => {
                answers.broken = Some(broken);
                self.close();
            }
        }
        self.changed.notify_all();
    }

    /// The next answer on the link; `None` if nobody waits for it any longer.
    fn read_answer(&self, patience: Patience<'_>) -> Result<Option<Answer>, Broken> {
        let broken = |error| match error {
            BrokerError::Lost(error) => Broken::lost(&error),
            other => Broken::Protocol(match other {
                BrokerError::Protocol(what) => what,
                other => other.to_string(),
            }),
        };
        match self.next_frame(patience).map_err(broken)? {
            None => Ok(None),
            Some(Frame { kind: Kind::Reply, payload }) => {
                decode(&payload).map(Some).map_err(broken)
            }
            Some(Frame { kind, .. }) => {
                Err(Broken::Protocol(format!("a {kind:?} frame for a reply")))
            }
        }
    }

    /// The next frame; `None` if nobody waits any longer before it is whole.
    fn next_frame(&self, patience: Patience<'_>) -> Result<Option<Frame>, BrokerError> {
        let mut incoming = lock(&self.incoming);
        loop {
            let frame = incoming.next(|kind| Some(kind.payload_bytes_max()));
            if let Some(frame) = frame.map_err(|e| BrokerError::Protocol(e.to_string()))? {
                return Ok(Some(frame));
            }
            match link::wait(self.socket.as_raw_fd(), libc::POLLIN, patience) {
                Ok(()) => {}
                Err(error) => match error.kind() {
                    io::ErrorKind::TimedOut | io::ErrorKind::ConnectionAborted => return Ok(None),
                    _ => return Err(BrokerError::Lost(error)),
                },
            }
            match (&self.socket).read(incoming.room()) {
                Ok(0) => return Err(BrokerError::Lost(io::ErrorKind::UnexpectedEof.into())),
                Ok(bytes) => incoming.filled(bytes),
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => {}
                    _ => return Err(BrokerError::Lost(error)),
                },
            }
        }
    }

    fn end(&self, broken: Broken) {
        lock(&self.answers).broken.get_or_insert(broken);
        self.close();
        self.changed.notify_all();
    }
}

/// Too many descriptors were under way for too long: nothing was asked, and the link
/// goes on.
fn uncrowded(unpassed: Unpassed) -> Silence {
    match unpassed {
        Unpassed::TooManyUnderWay => BrokerError::NoLink(io::Error::other(unpassed)).into(),
        Unpassed::Link(error) if error.kind() == io::ErrorKind::ConnectionAborted => {
            Silence::Cancelled
        }
        Unpassed::Link(_) => Silence::Over,
    }
}

fn decode<T: for<'a> BorrowDecode<'a, ()>>(payload: &[u8]) -> Result<T, BrokerError> {
    codec::decode(payload).map_err(|error| BrokerError::Protocol(error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread::JoinHandle;

    use forge_protocol::frame::Assembler;

    use super::*;
    use crate::crowd::{self, Crowd};
    use crate::link::Link;

    const TIME_MAX: Duration = Duration::from_secs(30);
    /// More than a socket takes that nobody reads.
    const LENGTH: usize = 900 * 1024;

    /// Somebody who asks this on a thread of its own.
    fn asking(control: &Arc<Control>, intent: String) -> JoinHandle<Result<Reply, Silence>> {
        let control = Arc::clone(control);
        let request = Request::SearchTools { principal: "alice".into(), intent, k: 1 };
        let patience = Patience::until(Instant::now() + TIME_MAX);
        std::thread::spawn(move || control.ask(request, None, patience))
    }

    fn pair() -> (Arc<Control>, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        far.set_read_timeout(Some(TIME_MAX)).unwrap();
        (Arc::new(Control::new(near)), far)
    }

    /// Waits until a request was begun after so many.
    fn wait_until_begun(control: &Control, before: u64) {
        let until = Instant::now() + TIME_MAX;
        while lock(&control.outgoing).next <= before {
            assert!(Instant::now() < until, "nobody began to send");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn who_finds_no_room_to_ask_is_told_that_nothing_was_asked() {
        let (control, _far) = pair();
        let asked = |intent: String| {
            let request = Request::SearchTools { principal: "alice".into(), intent, k: 1 };
            let soon = Patience::until(Instant::now() + Duration::from_millis(1));
            control.ask(request, None, soon).unwrap_err()
        };
        // What of it has no room follows it.
        assert!(matches!(asked("1".repeat(LENGTH)), Silence::Over));
        assert!(matches!(asked("2".into()), Silence::Unasked));
    }

    #[test]
    fn who_dies_behind_a_whole_request_may_have_seen_it_and_has_not_seen_the_next() {
        let (control, mut far) = pair();
        let first = asking(&control, "1".repeat(LENGTH));
        wait_until_begun(&control, 0);
        let second = asking(&control, "2".repeat(LENGTH));
        // All of the first is read, and the beginning of the second.
        let (mut buffer, mut assembler) = (vec![0; READ_BYTES], Assembler::default());
        loop {
            let read = far.read(&mut buffer).unwrap();
            let mut input = &buffer[..read];
            if assembler.next(&mut input, |kind| Some(kind.payload_bytes_max())).unwrap().is_some()
            {
                break;
            }
        }
        wait_until_begun(&control, 1);
        drop(far);
        let first = first.join().unwrap();
        assert!(matches!(first, Err(Silence::Broken(BrokerError::Lost(_)))));
        let second = second.join().unwrap();
        assert!(matches!(second, Err(Silence::Broken(BrokerError::Unsent(_)))));
    }

    #[test]
    fn what_others_withdrew_behind_a_whole_request_is_not_missing_of_it() {
        let (control, far) = pair();
        let patience = Patience::until(Instant::now() + TIME_MAX);
        let Ok(id) = control.begin(Request::Sync, None, patience) else { panic!("not begun") };
        // As if the socket had no room for a word of somebody else's.
        lock(&control.outgoing).rest.push(0);
        drop(far);
        assert!(control.flush(id, patience).is_ok());
    }

    #[test]
    fn a_request_that_cannot_pass_its_descriptor_leaves_the_link_whole() {
        let test = "broker::control::tests::a_request_that_cannot_pass_its_descriptor_leaves_the_link_whole";
        if !crowd::alone(test, 54_326) {
            return;
        }
        let (control, far) = pair();
        let patience = Patience::until(Instant::now() + TIME_MAX);
        let (rider, _other) = UnixStream::pair().unwrap();
        let ask = || control.begin(Request::Sync, Some(rider.try_clone().unwrap()), patience);
        let crowd = Crowd::new();
        let began = Instant::now();
        let refused = ask();
        assert!(matches!(refused, Err(Silence::Broken(BrokerError::NoLink(_)))));
        assert!(began.elapsed() > Duration::from_millis(90), "they may arrive");
        // Who passes nothing is not held up.
        assert!(matches!(control.begin(Request::Sync, None, patience), Ok(0)));
        drop(crowd);
        assert!(matches!(ask(), Ok(1)));
        let mut far = Link::new(far);
        for passes in [false, true] {
            let request = far.receive(|kind| kind == Kind::Request, patience).unwrap();
            let Ask { id, request } = decode(&request.payload).unwrap();
            assert_eq!((id, request), (u64::from(passes), Request::Sync));
        }
        assert!(far.take_passed().is_some());
    }

    #[test]
    fn an_answer_at_length_and_a_request_at_length_pass_each_other() {
        let (control, mut far) = pair();
        let asked = asking(&control, "?".repeat(LENGTH));
        wait_until_begun(&control, 0);
        // It reads nothing before all of its answer is taken.
        let reply = Reply::Metrics("!".repeat(LENGTH));
        let mut bytes = Vec::new();
        frame::write_message(Kind::Reply, &Answer { id: 0, reply: reply.clone() }, &mut bytes);
        far.set_write_timeout(Some(TIME_MAX)).unwrap();
        far.write_all(&bytes).unwrap();
        let reading = std::thread::spawn(move || {
            let mut buffer = vec![0; READ_BYTES];
            while far.read(&mut buffer).is_ok_and(|read| read > 0) {}
        });
        let Ok(got) = asked.join().unwrap() else { panic!("no answer") };
        assert_eq!(got, reply);
        control.close();
        reading.join().unwrap();
    }
}
