//! One client: its frames, its runs and its questions.
//!
//! At any moment one thread reads, or the event loop watches; whoever is to
//! read next takes that over by [`Connection::take`]. Writing is anybody's,
//! one whole frame at a time. The client is distrusted: what it sends out of
//! turn, too large or under a number that it uses already ends its connection.
//! What it asked for and wants no more ends early, a question as well as a run.
//!
//! | file | what it holds |
//! |---|---|
//! | `live` | what is under way, by the client's numbers |
//! | `owed` | what the client has not taken yet |
//! | `sending` | frames to it |
//! | `hosting` | tools that it hosts itself |

mod hosting;
mod live;
mod owed;
mod sending;

use std::io::{self, Read as _};
use std::net::Shutdown;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use forge_log::Seldom;
use forge_protocol::codec::{self, BorrowDecode};
use forge_protocol::frame::{Frame, Incoming, Kind};
use forge_protocol::handshake::{Hello, Refusal, Role};
use forge_protocol::limits::QUESTIONS_MAX;
use forge_protocol::service::{
    Answered, Cancel as CancelRun, Event, Order, Query, Question, Reply, Submit,
};
use vmm_sys_util::epoll::ControlOperation;

use self::live::{Live, NoPlace};
use self::owed::{Owed, Untaken};
use self::sending::SEND_PATIENCE;
use super::options::Principals;
use super::peer::{Peer, Who};
use super::{Busy, Service};
use crate::cancel::Cancel;
use crate::link::{Patience, wait};
use crate::locks::lock;
use crate::pool::worker::Tell;
use crate::supervisor::Attendance;

/// How long a thread waits for a client's next word, or for the rest of a frame
/// that began, before it leaves that to the event loop.
const READ_PATIENCE: Duration = Duration::from_secs(1);
/// How long it waits for more of a frame that takes longer than that. What
/// flows stays with its thread; what drips has none between two drops.
const FLOW_PATIENCE: Duration = Duration::from_millis(1);
/// A client that does not take, or send, one whole frame in this time is cut off; so is
/// one that does not take a run's end, artifacts and all.
const FRAME_TIME_MAX: Duration = Duration::from_secs(60);
/// The longest frame of somebody who speaks for nobody, in bytes. It is refused
/// whatever is in it; a program of usual size is refused in words.
const STRANGERS_FRAME_BYTES_MAX: u32 = 1024 * 1024;
/// What is read at once, in bytes.
const READ_BYTES: usize = 64 * 1024;
/// When a run that found no descriptor may come again, in milliseconds.
const RETRY_AFTER_MS: u64 = 1_000;
/// Said to who would need a descriptor more.
const NO_DESCRIPTOR: &str = "the service has no descriptor left: raise its limit on open files";

/// One client.
#[derive(Debug)]
pub(super) struct Connection {
    number: u64,
    itself: Weak<Self>,
    socket: UnixStream,
    service: Weak<Service>,
    peer: Peer,
    /// When it connected.
    since: Instant,
    greeted: AtomicBool,
    /// Whether a thread reads it, or is to.
    taken: AtomicBool,
    /// Since when a frame of the client's is not whole.
    begun: Mutex<Option<Instant>>,
    reading: Mutex<Reading>,
    /// In turn: what is sent in many frames, as artifacts are, lets others be sent in between.
    writing: parking_lot::Mutex<()>,
    live: Live,
    owed: Owed,
}

/// What was received and not taken yet.
#[derive(Debug)]
struct Reading {
    incoming: Incoming,
    /// What is unread counts as under way while it is handed on.
    handed: Option<Busy>,
}

/// Work that a thread read and is to carry out.
enum Work<'a> {
    Run {
        number: u64,
        order: Box<Order>,
        cancel: Arc<Cancel>,
    },
    Question {
        number: u64,
        question: Question,
        cancel: Arc<Cancel>,
        /// Of one that is answered at once: nothing else bounds how many are.
        untaken: Option<Untaken<'a>>,
    },
}

/// How reading ended.
enum Pause {
    /// Nothing came for a while.
    Idle,
    /// The client left, or is to.
    Over,
}

fn breach(what: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

/// Nothing came for a while, as a read with a time-out says it.
fn idle(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::TimedOut => io::ErrorKind::WouldBlock.into(),
        _ => error,
    }
}

fn decode<T: for<'a> BorrowDecode<'a, ()>>(frame: &Frame) -> io::Result<T> {
    codec::decode(&frame.payload).map_err(breach)
}

impl Connection {
    /// A client that has just connected; says hello to it.
    pub(super) fn accept(
        service: Weak<Service>,
        number: u64,
        socket: UnixStream,
        peer: Peer,
    ) -> io::Result<Arc<Self>> {
        socket.set_write_timeout(Some(SEND_PATIENCE))?;
        let owed = Owed::to(&peer);
        let connection = Arc::new_cyclic(|itself| Self {
            number,
            itself: itself.clone(),
            socket,
            service,
            peer,
            since: Instant::now(),
            greeted: AtomicBool::new(false),
            taken: AtomicBool::new(false),
            begun: Mutex::default(),
            reading: Mutex::new(Reading { incoming: Incoming::new(READ_BYTES), handed: None }),
            writing: parking_lot::Mutex::default(),
            live: Live::default(),
            owed,
        });
        // There is room for it in a socket that nothing was sent on. Over
        // AF_VSOCK the other side says how much room there is: one that says
        // none must not have the event loop wait.
        connection.socket.set_nonblocking(true)?;
        connection.send(Kind::Hello, &Hello::ours(Role::Supervisor))?;
        connection.socket.set_nonblocking(false)?;
        Ok(connection)
    }

    /// Has it watched for the first time.
    pub(super) fn watch(&self, service: &Service) -> io::Result<()> {
        service.watch.once(self.socket.as_raw_fd(), self.number, ControlOperation::Add)
    }

    /// Whether it said hello.
    pub(super) fn has_greeted(&self) -> bool {
        self.greeted.load(Ordering::Acquire)
    }

    /// Whether it is to leave by itself after this time: it did not say hello,
    /// or has nothing more to say here.
    pub(super) fn is_silent(&self, patience: Duration) -> bool {
        (!self.has_greeted() || !self.peer.speaks()) && self.since.elapsed() > patience
    }

    /// Whether it was at this time sending one frame for longer than it may.
    pub(super) fn is_overdue(&self, at: Instant) -> bool {
        let begun = *lock(&self.begun);
        begun.is_some_and(|begun| at.saturating_duration_since(begun) > FRAME_TIME_MAX)
    }

    /// Takes over the reading, unless somebody has it.
    pub(super) fn take(&self) -> bool {
        !self.taken.swap(true, Ordering::AcqRel)
    }

    /// Reads, and carries out what comes, until another thread reads or
    /// nothing comes. Only for who has taken the reading over.
    pub(super) fn attend(self: &Arc<Self>) {
        let Some(service) = self.service.upgrade() else { return };
        loop {
            self.await_taker();
            match self.read(&service) {
                Ok((work, busy)) if !self.peer.speaks() => {
                    // That is refused, and nobody reads what follows.
                    self.carry_out(&service, work, busy);
                    self.close();
                    return;
                }
                Ok((work, busy)) => {
                    self.leave(&service, false);
                    self.carry_out(&service, work, busy);
                    // Whoever waits for a thread comes first.
                    if service.crew.is_short() || !self.take() {
                        return;
                    }
                    service.watch.away(self.socket.as_raw_fd(), self.number);
                }
                Err(Pause::Idle) => {
                    self.leave(&service, true);
                    return;
                }
                Err(Pause::Over) => {
                    self.close();
                    return;
                }
            }
        }
    }

    /// Gives the reading up: to the event loop, or to another thread if there
    /// is something to read already.
    fn leave(self: &Arc<Self>, service: &Arc<Service>, is_idle: bool) {
        let mut reading = lock(&self.reading);
        if !reading.incoming.is_empty() {
            reading.handed = Some(service.busy());
            service.crew.attend(Arc::clone(self));
            return;
        }
        if is_idle {
            reading.incoming.give_room_back();
        }
        drop(reading);
        self.taken.store(false, Ordering::Release);
        let fd = self.socket.as_raw_fd();
        // It fails for one that was closed meanwhile, which nobody reads.
        let _ = service.watch.once(fd, self.number, ControlOperation::Modify);
    }

    /// Waits until the client has taken enough of what it is owed.
    fn await_taker(&self) {
        if self.owed.is_too_much() {
            // It is not for the client to send the rest of a frame now.
            *lock(&self.begun) = None;
            self.owed.wait();
        }
    }

    /// Reads until there is something that takes its time.
    fn read(&self, service: &Arc<Service>) -> Result<(Work<'_>, Busy), Pause> {
        let mut under_way = lock(&self.reading).handed.take();
        loop {
            let read = self.read_frame(under_way, || service.busy());
            match read.and_then(|(frame, busy)| Ok((self.understand(service, &frame)?, busy))) {
                Ok((None, busy)) => under_way = Some(busy),
                Ok((Some(work), busy)) => return Ok((work, busy)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(Pause::Idle);
                }
                Err(error) => {
                    self.log_end(&error);
                    return Err(Pause::Over);
                }
            }
        }
    }

    /// Whoever writes a client learns from nothing else what was wrong.
    fn log_end(&self, error: &io::Error) {
        static SAID: Seldom = Seldom::each_second();
        match error.kind() {
            io::ErrorKind::UnexpectedEof => {}
            io::ErrorKind::InvalidData if SAID.is_due() => {
                tracing::warn!(peer = ?self.peer, %error, "a client broke the protocol: its connection ends");
            }
            _ => tracing::debug!(%error, "a client's connection ends"),
        }
    }

    /// The next frame. What is taken off the socket counts as under way before it
    /// is, and until all of it is understood: a service that drains must not end over
    /// it. `under_way` is what counts of what is unread.
    fn read_frame<Busy>(
        &self,
        mut under_way: Option<Busy>,
        busy: impl Fn() -> Busy,
    ) -> io::Result<(Frame, Busy)> {
        let greeted = self.has_greeted();
        let awaits = |kind: Kind| {
            let awaited = match kind {
                Kind::Hello => !greeted,
                Kind::Submit | Kind::Cancel | Kind::Query | Kind::CallbackSettled => greeted,
                _ => false,
            };
            let most = if self.peer.speaks() { u32::MAX } else { STRANGERS_FRAME_BYTES_MAX };
            awaited.then(|| kind.payload_bytes_max().min(most))
        };
        let mut reading = lock(&self.reading);
        let incoming = &mut reading.incoming;
        loop {
            if let Some(frame) = incoming.next(awaits).map_err(breach)? {
                *lock(&self.begun) = None;
                return Ok((frame, under_way.unwrap_or_else(busy)));
            }
            let now = Instant::now();
            let until = if incoming.is_between_frames() {
                // Nothing is off the socket and not understood.
                under_way = None;
                now + READ_PATIENCE
            } else {
                let begun = *lock(&self.begun).get_or_insert(now);
                (begun + READ_PATIENCE).max(now + FLOW_PATIENCE)
            };
            // Not by the read itself, which also wakes when the client takes
            // its answer.
            wait(self.socket.as_raw_fd(), libc::POLLIN, Patience::until(until)).map_err(idle)?;
            under_way.get_or_insert_with(&busy);
            match (&self.socket).read(incoming.room()) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => incoming.filled(bytes),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Does what is done at once; gives back what is not.
    fn understand(&self, service: &Service, frame: &Frame) -> io::Result<Option<Work<'_>>> {
        match frame.kind {
            Kind::Hello => self.greet(decode(frame)?).map(|()| None),
            Kind::Submit => {
                let Submit { number, order } = decode(frame)?;
                if let Some(cancel) = self.live.enter_run(number)? {
                    return Ok(Some(Work::Run { number, order: Box::new(order), cancel }));
                }
                self.finish(number, service.refuse(&order, NO_DESCRIPTOR, RETRY_AFTER_MS), None)?;
                Ok(None)
            }
            Kind::Cancel => {
                let CancelRun { number } = decode(frame)?;
                self.live.cancel(number);
                Ok(None)
            }
            Kind::CallbackSettled => self.settle(decode(frame)?).map(|()| None),
            _ => {
                let Query { number, question } = decode(frame)?;
                let no_place = match self.live.enter_question(number, &question)? {
                    Ok(cancel) => {
                        let untaken =
                            matches!(question, Question::Status).then(|| self.owed.another());
                        return Ok(Some(Work::Question { number, question, cancel, untaken }));
                    }
                    Err(no_place) => no_place,
                };
                let message = match no_place {
                    NoPlace::NoDescriptor => NO_DESCRIPTOR.to_owned(),
                    NoPlace::TooMany => {
                        format!("{QUESTIONS_MAX} questions are unanswered: wait for one")
                    }
                };
                let kind = forge_protocol::broker::RefusalKind::Overloaded;
                let reply = Reply::Refused { kind, message };
                self.send(Kind::Answered, &Answered { number, reply })?;
                Ok(None)
            }
        }
    }

    fn greet(&self, theirs: Hello) -> io::Result<()> {
        let ours = Hello::ours(Role::Supervisor);
        match ours.agree(theirs, Role::Client) {
            Ok(_) => {
                self.greeted.store(true, Ordering::Release);
                Ok(())
            }
            Err(error) => {
                let _ = self.send(Kind::Refuse, &Refusal(ours));
                Err(breach(error))
            }
        }
    }

    fn carry_out(&self, service: &Service, work: Work<'_>, _busy: Busy) {
        let sent = match work {
            Work::Run { number, order, cancel } => {
                let tell = |what| {
                    // Who does not listen is cut off, and its runs end.
                    if self.send(Kind::Event, &Event { number, what }).is_err() {
                        self.close();
                    }
                };
                let tell: Option<Tell<'_>> = if order.events { Some(&tell) } else { None };
                let host = |calls| self.host(number, calls);
                let attendance = Attendance { cancel: Some(&cancel), tell, host: Some(&host) };
                let (result, stay) = service.run(&order, &self.peer, &cancel, &attendance);
                drop(order);
                // The number is free before the client can know it.
                self.live.leave_run(number, cancel);
                self.finish(number, result, stay)
            }
            Work::Question { number, question, cancel, untaken } => {
                let reply = service.answer(question, &self.peer, &cancel);
                self.live.leave_question(number, cancel);
                let _untaken = untaken.unwrap_or_else(|| self.owed.another());
                self.send(Kind::Answered, &Answered { number, reply })
            }
        };
        if let Err(error) = sent {
            tracing::debug!(%error, "a client takes no answer");
            self.close();
        }
    }

    /// Whether it is the operator's.
    pub(super) fn is_operators(&self) -> bool {
        self.peer.is_operator()
    }

    /// Whose connection it is, unless the operator's.
    pub(super) fn who(&self) -> Option<Who> {
        self.peer.who()
    }

    /// Whether these still name it for all that it speaks for.
    pub(super) fn speaks_still(&self, principals: &Principals) -> bool {
        self.peer.speaks_still(principals)
    }

    /// Cancels its runs and questions.
    pub(super) fn cancel_all(&self) {
        self.live.cancel_all();
    }

    /// Closes it and cancels its runs and questions.
    pub(super) fn close(&self) {
        if self.live.close() {
            return;
        }
        let _ = self.socket.shutdown(Shutdown::Both);
        self.cancel_all();
        if let Some(service) = self.service.upgrade() {
            service.watch.forget(self.socket.as_raw_fd());
            service.left(self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use forge_protocol::frame;

    use super::*;

    #[test]
    fn a_frame_has_one_time_for_all_of_it_from_its_first_byte() {
        let (mut client, ours) = UnixStream::pair().unwrap();
        let connection = Connection::accept(Weak::new(), 0, ours, Peer::Stranger).unwrap();
        let reads = || {
            connection.read_frame(None, || ()).map(|(frame, ())| frame.kind).map_err(|e| e.kind())
        };
        let mut hello = Vec::new();
        frame::write_message(Kind::Hello, &Hello::ours(Role::Client), &mut hello);
        let far = Duration::from_secs(3600);
        // Who says nothing sends no frame.
        assert!(!connection.is_overdue(Instant::now() + far));
        client.write_all(&hello[..3]).unwrap();
        assert_eq!(reads(), Err(io::ErrorKind::WouldBlock));
        assert!(!connection.is_overdue(Instant::now()));
        let late = Instant::now() + FRAME_TIME_MAX;
        assert!(connection.is_overdue(late));
        // Another drop renews nothing.
        client.write_all(&hello[3..9]).unwrap();
        assert_eq!(reads(), Err(io::ErrorKind::WouldBlock));
        assert!(connection.is_overdue(late));
        client.write_all(&hello[9..]).unwrap();
        // A millisecond may pass without this thread.
        let last = std::iter::repeat_with(reads).find(|it| *it != Err(io::ErrorKind::WouldBlock));
        assert_eq!(last, Some(Ok(Kind::Hello)));
        assert!(!connection.is_overdue(Instant::now() + far));
    }

    #[test]
    fn what_is_off_the_socket_counts_as_under_way_and_a_silent_client_does_not() {
        let (mut client, ours) = UnixStream::pair().unwrap();
        let connection = Connection::accept(Weak::new(), 0, ours, Peer::Operator).unwrap();
        let unread = || {
            let mut bytes = 0;
            // SAFETY: the kernel writes one int there.
            unsafe { libc::ioctl(connection.socket.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
            bytes
        };
        let counted = std::cell::Cell::new(0);
        let count = || {
            counted.set(counted.get() + 1);
            unread()
        };
        assert!(connection.read_frame(None, count).is_err());
        assert_eq!(counted.get(), 0);
        let mut hello = Vec::new();
        frame::write_message(Kind::Hello, &Hello::ours(Role::Client), &mut hello);
        client.write_all(&hello).unwrap();
        let (_, before) = connection.read_frame(None, count).unwrap();
        assert_eq!((counted.get(), before), (1, hello.len() as i32), "it was read before");
        // What came with it counts on.
        client.write_all(&hello.repeat(2)).unwrap();
        let (_, first) = connection.read_frame(None, count).unwrap();
        let (_, second) = connection.read_frame(Some(first), count).unwrap();
        assert_eq!((counted.get(), second), (2, first), "it counts as another");
    }

    #[test]
    fn a_client_says_hello_before_all_else_and_once() {
        let mut hello = Vec::new();
        frame::write_message(Kind::Hello, &Hello::ours(Role::Client), &mut hello);
        let mut cancels = Vec::new();
        frame::write_message(Kind::Cancel, &CancelRun { number: 1 }, &mut cancels);
        let read = |has_greeted, said: &[u8]| {
            let (mut client, ours) = UnixStream::pair().unwrap();
            let connection = Connection::accept(Weak::new(), 0, ours, Peer::Operator).unwrap();
            connection.greeted.store(has_greeted, Ordering::Release);
            client.write_all(said).unwrap();
            let read = connection.read_frame(None, || ());
            read.map(|(frame, ())| frame.kind).map_err(|error| error.kind())
        };
        assert_eq!(read(false, &hello), Ok(Kind::Hello));
        assert_eq!(read(true, &cancels), Ok(Kind::Cancel));
        assert_eq!(read(false, &cancels), Err(io::ErrorKind::InvalidData));
        assert_eq!(read(true, &hello), Err(io::ErrorKind::InvalidData));
    }

    #[test]
    fn a_stranger_sends_no_long_frame() {
        let read = |peer, payload_bytes| {
            let (mut client, ours) = UnixStream::pair().unwrap();
            let connection = Connection::accept(Weak::new(), 0, ours, peer).unwrap();
            connection.greeted.store(true, Ordering::Release);
            let header = frame::Header { kind: Kind::Submit, payload_bytes };
            client.write_all(&header.to_bytes()).unwrap();
            client.shutdown(Shutdown::Write).unwrap();
            connection.read_frame(None, || ()).map(drop).unwrap_err().kind()
        };
        let most = STRANGERS_FRAME_BYTES_MAX;
        // It is waited for, or not.
        let (waited, refused) = (io::ErrorKind::UnexpectedEof, io::ErrorKind::InvalidData);
        assert_eq!(read(Peer::Stranger, most), waited);
        assert_eq!(read(Peer::Stranger, most + 1), refused);
        assert_eq!(read(Peer::Operator, most + 1), waited);
    }
}
