//! One client: its frames, its runs and its questions.
//!
//! At any moment one thread reads, or the event loop watches; whoever is to
//! read next takes that over by [`Connection::take`]. Writing is anybody's,
//! one whole frame at a time. The client is distrusted: what it sends out of
//! turn, too large or under a number that it uses already ends its connection.
//! What it asked for and wants no more ends early, a question as well as a run.

use std::collections::HashMap;
use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use forge_protocol::codec::{self, BorrowDecode, Encode};
use forge_protocol::frame::{self, Assembler, Frame, Kind};
use forge_protocol::handshake::{Hello, Refusal, Role};
use forge_protocol::limits::{NUMBERS_MAX, QUESTIONS_MAX};
use forge_protocol::run::Artifact;
use forge_protocol::service::{
    Answered, Callback, CallbackSettled, Cancel as CancelRun, Event, Finish, Finished, Order,
    Query, Question, Reply, Submit,
};
use vmm_sys_util::epoll::ControlOperation;

use super::options::Principals;
use super::peer::{Peer, Who};
use super::{Busy, Service, lock};
use crate::cancel::Cancel;
use crate::link::{Link, Patience, send_once, wait};
use crate::pool::worker::Tell;
use crate::report::{OutputEncoding, RunReport, Status};
use crate::supervisor::{Attendance, RunResult};

/// How long a thread waits for a client's next word, or for the rest of a frame
/// that began, before it leaves that to the event loop.
const READ_PATIENCE: Duration = Duration::from_secs(1);
/// How long it waits for more of a frame that takes longer than that. What
/// flows stays with its thread; what drips has none between two drops.
const FLOW_PATIENCE: Duration = Duration::from_millis(1);
/// A client that takes nothing of what is sent to it for this long is cut
/// off.
const SEND_PATIENCE: Duration = Duration::from_secs(10);
/// One that does not take, or send, one whole frame in this time is, too.
const FRAME_TIME_MAX: Duration = Duration::from_secs(60);
/// The longest frame of somebody who speaks for nobody, in bytes. It is refused
/// whatever is in it; a program of usual size is refused in words.
const STRANGERS_FRAME_BYTES_MAX: u32 = 1024 * 1024;
/// Unsent ends of one connection, each holding a thread, before nothing more of it is
/// read. Low enough that refusals to one user, over all its connections, cannot hold
/// all threads beside those of runs.
const UNTAKEN_MAX: usize = 8;
/// What is read at once, in bytes.
const READ_BYTES: usize = 64 * 1024;
/// What is sent at once, in bytes.
const SEND_BYTES: usize = 64 * 1024;
/// What most reports fit in, in bytes.
const REPORT_BYTES: usize = 2 * 1024;
/// Cancel handles that are kept for what comes next.
const SPARE_MAX: usize = 4;
/// When a run that found no descriptor may come again, in milliseconds.
const RETRY_AFTER_MS: u64 = 1_000;

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
    closed: AtomicBool,
    /// Since when a frame of the client's is not whole.
    begun: Mutex<Option<Instant>>,
    reading: Mutex<Reading>,
    writing: Mutex<()>,
    live: Mutex<Live>,
    /// Ends that are being sent.
    untaken: Mutex<usize>,
    taken_one: Condvar,
}

/// What was received and not taken yet.
#[derive(Debug, Default)]
struct Reading {
    assembler: Assembler,
    buffer: Vec<u8>,
    unread: std::ops::Range<usize>,
    /// What is unread counts as under way while it is handed on.
    handed: Option<Busy>,
}

/// What is going on, by the client's numbers.
#[derive(Debug, Default)]
struct Live {
    numbers: HashMap<u64, Doing>,
    /// Those that may wait for somebody.
    questions: usize,
    spare: Vec<Arc<Cancel>>,
}

#[derive(Debug)]
enum Doing {
    Run {
        cancel: Arc<Cancel>,
        /// Where answers go of the tools that the client hosts for it.
        host: Option<Arc<UnixStream>>,
    },
    Question {
        cancel: Arc<Cancel>,
        is_counted: bool,
    },
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

/// An end that its client is to take. Dropped when it is sent, or cannot be.
struct Untaken<'a>(&'a Connection);

impl Drop for Untaken<'_> {
    fn drop(&mut self) {
        let mut untaken = lock(&self.0.untaken);
        *untaken -= 1;
        // Whoever reads next waits for that, and nobody else.
        if *untaken + 1 == UNTAKEN_MAX {
            self.0.taken_one.notify_one();
        }
    }
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
    /// A client that has just connected; says hello to it, and has it watched.
    pub(super) fn accept(
        service: Weak<Service>,
        number: u64,
        socket: UnixStream,
        peer: Peer,
    ) -> io::Result<Arc<Self>> {
        socket.set_write_timeout(Some(SEND_PATIENCE))?;
        let connection = Arc::new_cyclic(|itself| Self {
            number,
            itself: itself.clone(),
            socket,
            service,
            peer,
            since: Instant::now(),
            greeted: AtomicBool::new(false),
            taken: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            begun: Mutex::default(),
            reading: Mutex::default(),
            writing: Mutex::default(),
            live: Mutex::default(),
            untaken: Mutex::default(),
            taken_one: Condvar::new(),
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
        if !reading.unread.is_empty() {
            reading.handed = Some(service.busy());
            service.crew.attend(Arc::clone(self));
            return;
        }
        if is_idle {
            reading.buffer = Vec::new();
        }
        drop(reading);
        self.taken.store(false, Ordering::Release);
        let fd = self.socket.as_raw_fd();
        // It fails for one that was closed meanwhile, which nobody reads.
        let _ = service.watch.once(fd, self.number, ControlOperation::Modify);
    }

    /// Waits until the client has taken enough of what it is owed. One that asks
    /// on and takes nothing would have a thread for everything that it asks.
    fn await_taker(&self) {
        let untaken = lock(&self.untaken);
        if *untaken >= UNTAKEN_MAX {
            // It is not for the client to send the rest of a frame now.
            *lock(&self.begun) = None;
        }
        // All are sent in a bounded time, or the connection closes.
        let waited = self.taken_one.wait_while(untaken, |untaken| *untaken >= UNTAKEN_MAX);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// The end of a run or the answer to a question is to be sent now.
    fn owe(&self) -> Untaken<'_> {
        *lock(&self.untaken) += 1;
        Untaken(self)
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
                    if error.kind() != io::ErrorKind::UnexpectedEof {
                        tracing::debug!(%error, "a client's connection ends");
                    }
                    return Err(Pause::Over);
                }
            }
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
        let Reading { assembler, buffer, unread, .. } = &mut *reading;
        loop {
            while unread.start < unread.end {
                let mut input = &buffer[unread.clone()];
                let frame = assembler.next(&mut input, awaits).map_err(breach)?;
                unread.start = unread.end - input.len();
                if let Some(frame) = frame {
                    *lock(&self.begun) = None;
                    return Ok((frame, under_way.unwrap_or_else(busy)));
                }
            }
            buffer.resize(READ_BYTES, 0);
            let now = Instant::now();
            let until = if assembler.is_between_frames() {
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
            match (&self.socket).read(buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => *unread = 0..bytes,
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
                if let Some(cancel) = self.enter_run(number)? {
                    return Ok(Some(Work::Run { number, order: Box::new(order), cancel }));
                }
                let why = "the service has no descriptor left: raise its limit on open files";
                self.finish(number, service.refuse(&order, why, RETRY_AFTER_MS))?;
                Ok(None)
            }
            Kind::Cancel => {
                let CancelRun { number } = decode(frame)?;
                // One that is not there has ended meanwhile.
                if let Some(doing) = lock(&self.live).numbers.get(&number) {
                    doing.cancel().raise();
                }
                Ok(None)
            }
            Kind::CallbackSettled => {
                let CallbackSettled { number, callback, result } = decode(frame)?;
                let host = match lock(&self.live).numbers.get(&number) {
                    Some(Doing::Run { host: Some(host), .. }) => Arc::clone(host),
                    // Its run has ended meanwhile.
                    _ => return Ok(None),
                };
                let settled = CallbackSettled { number: 0, callback, result };
                let mut bytes = Vec::new();
                frame::try_write_message(Kind::CallbackSettled, &settled, &mut bytes)
                    .map_err(breach)?;
                // The broker reads as long as the run is open. What is there of an
                // answer that it did not take is the beginning of no other.
                if let Err(error) = (&*host).write_all(&bytes) {
                    tracing::debug!(%error, "nobody waits for a client's answer");
                    let _ = host.shutdown(Shutdown::Both);
                }
                Ok(None)
            }
            _ => {
                let Query { number, question } = decode(frame)?;
                if let Some(cancel) = self.enter_question(number, &question)? {
                    let untaken = matches!(question, Question::Status).then(|| self.owe());
                    return Ok(Some(Work::Question { number, question, cancel, untaken }));
                }
                let reply = Reply::Refused {
                    kind: forge_protocol::broker::RefusalKind::Overloaded,
                    message: format!("{QUESTIONS_MAX} questions are unanswered: wait for one"),
                };
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

    /// Takes a number for a run; `None` if there is no descriptor for it: the
    /// others of this connection go on.
    fn enter_run(&self, number: u64) -> io::Result<Option<Arc<Cancel>>> {
        let mut live = lock(&self.live);
        live.check(number)?;
        let Ok(cancel) = live.cancel() else { return Ok(None) };
        let doing = Doing::Run { cancel: Arc::clone(&cancel), host: None };
        self.enter(&mut live, number, doing);
        Ok(Some(cancel))
    }

    /// Takes a number for a question; `None` if there are too many. How the
    /// service stands is answered at once, whoever waits for the broker, and is
    /// none of them.
    fn enter_question(&self, number: u64, question: &Question) -> io::Result<Option<Arc<Cancel>>> {
        let mut live = lock(&self.live);
        live.check(number)?;
        let is_counted = !matches!(question, Question::Status);
        if is_counted && live.questions >= QUESTIONS_MAX {
            return Ok(None);
        }
        // Where no descriptor is left, that is one too many as well: the runs of
        // this connection go on.
        let Ok(cancel) = live.cancel() else { return Ok(None) };
        live.questions += usize::from(is_counted);
        let doing = Doing::Question { cancel: Arc::clone(&cancel), is_counted };
        self.enter(&mut live, number, doing);
        Ok(Some(cancel))
    }

    fn enter(&self, live: &mut Live, number: u64, doing: Doing) {
        // Whoever closes looks at what is under way after it has said so.
        if self.closed.load(Ordering::SeqCst) {
            doing.cancel().raise();
        }
        live.numbers.insert(number, doing);
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
                let (result, _stay) = service.run(&order, &self.peer, &cancel, &attendance);
                drop(order);
                // The number is free before the client can know it.
                lock(&self.live).leave_run(number, cancel);
                self.finish(number, result)
            }
            Work::Question { number, question, cancel, untaken } => {
                let reply = service.answer(question, &self.peer, &cancel);
                lock(&self.live).leave_question(number, cancel);
                let _untaken = untaken.unwrap_or_else(|| self.owe());
                self.send(Kind::Answered, &Answered { number, reply })
            }
        };
        if let Err(error) = sent {
            tracing::debug!(%error, "a client takes no answer");
            self.close();
        }
    }

    /// Tells how a run ended.
    fn finish(&self, number: u64, result: RunResult) -> io::Result<()> {
        // The pool's upkeep comes after the answer.
        let RunResult { report, artifacts, upkeep: _upkeep, .. } = result;
        let bytes = finished(number, report, artifacts, Kind::Finished.payload_bytes_max())?;
        let _untaken = self.owe();
        self.send_frame(&bytes, || true)
    }

    /// Has a thread pass on the calls of tools that the client hosts for a
    /// run, until the run is over.
    fn host(&self, number: u64, calls: UnixStream) {
        let host = Arc::new(calls);
        if let Some(Doing::Run { host: place, .. }) = lock(&self.live).numbers.get_mut(&number) {
            *place = Some(Arc::clone(&host));
        }
        let connection = self.itself.clone();
        let calls = Arc::clone(&host);
        let passes_on = host.set_write_timeout(Some(SEND_PATIENCE)).and_then(|()| {
            let link = Link::new(calls.try_clone()?);
            let thread = std::thread::Builder::new().name("host".into());
            thread.spawn(move || pass_on(&connection, number, &calls, link))
        });
        if let Err(error) = passes_on {
            tracing::error!(%error, "a client's own tools cannot be called");
            // The run's calls of these tools fail.
            let _ = host.shutdown(Shutdown::Both);
        }
    }

    /// Passes one call on, unless its run has ended: the run's end is the last
    /// that its client hears of the number, which then may be another's.
    fn pass_on(&self, number: u64, host: &Arc<UnixStream>, call: &Frame) -> io::Result<()> {
        let callback: Callback = decode(call)?;
        self.send_if(Kind::Callback, &Callback { number, ..callback }, || {
            lock(&self.live).is_hosted_by(number, host)
        })
    }

    /// Sends one frame, whole.
    ///
    /// # Errors
    /// What the kernel said; `TimedOut` for a client that does not take it.
    /// The connection is of no use then.
    fn send<T: Encode>(&self, kind: Kind, message: &T) -> io::Result<()> {
        self.send_if(kind, message, || true)
    }

    /// The same, if that is still wanted when it is this frame's turn.
    fn send_if<T: Encode>(
        &self,
        kind: Kind,
        message: &T,
        is_wanted: impl FnOnce() -> bool,
    ) -> io::Result<()> {
        let mut bytes = Vec::new();
        frame::try_write_message(kind, message, &mut bytes).map_err(breach)?;
        self.send_frame(&bytes, is_wanted)
    }

    fn send_frame(&self, bytes: &[u8], is_wanted: impl FnOnce() -> bool) -> io::Result<()> {
        let _writing = lock(&self.writing);
        if !is_wanted() {
            return Ok(());
        }
        let until = Instant::now() + FRAME_TIME_MAX;
        let mut unsent = bytes;
        while !unsent.is_empty() {
            // The kernel's patience begins anew with each piece of what it sends.
            let part = &unsent[..unsent.len().min(SEND_BYTES)];
            let asked = Instant::now();
            match send_once(self.socket.as_raw_fd(), part) {
                // It was over within this piece: what fitted is told first.
                Ok(sent) if sent < part.len() && asked.elapsed() >= SEND_PATIENCE => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Ok(sent) => unsent = &unsent[sent..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Err(error) => return Err(error),
            }
            if !unsent.is_empty() && Instant::now() > until {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(())
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
        for doing in lock(&self.live).numbers.values() {
            doing.cancel().raise();
        }
    }

    /// Closes it and cancels its runs and questions.
    pub(super) fn close(&self) {
        if self.closed.swap(true, Ordering::SeqCst) {
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

/// The frame that tells how a run ended, whose payload has at most so many bytes. A
/// result that would pass them is told as our failure: to close the connection would
/// end the runs of others, as a door has those of all its clients on one.
fn finished(
    number: u64,
    report: RunReport,
    artifacts: Vec<Artifact>,
    payload_bytes_max: u32,
) -> io::Result<Vec<u8>> {
    let written = |report: &RunReport, artifacts| -> io::Result<Option<Vec<u8>>> {
        let mut json = Vec::with_capacity(REPORT_BYTES);
        serde_json::to_writer(&mut json, report)?;
        let result = Finish { report: json, artifacts };
        let mut bytes = Vec::new();
        let message = Finished { number, result };
        let fits = frame::try_write_message(Kind::Finished, &message, &mut bytes).is_ok()
            && bytes.len() <= frame::HEADER_BYTES + payload_bytes_max as usize;
        Ok(fits.then_some(bytes))
    };
    if let Some(bytes) = written(&report, artifacts)? {
        return Ok(bytes);
    }
    tracing::error!(run = report.run_id, "a run's result is larger than a message may be");
    let report = RunReport {
        status: Status::Internal,
        kind: "internal",
        reason: "the run's result is larger than a message may be, and left out".into(),
        output: String::new(),
        output_encoding: OutputEncoding::Utf8,
        artifacts: Vec::new(),
        log: Vec::new(),
        retrieved: Vec::new(),
        tool_calls: Vec::new(),
        ..report
    };
    written(&report, Vec::new())?.ok_or_else(|| breach("no room for a run's end"))
}

/// Passes the broker's calls on to the client.
fn pass_on(connection: &Weak<Connection>, number: u64, host: &Arc<UnixStream>, mut calls: Link) {
    while let Ok(call) = calls.receive(|kind| kind == Kind::Callback, Patience::default()) {
        let Some(connection) = connection.upgrade() else { return };
        if let Err(error) = connection.pass_on(number, host, &call) {
            tracing::debug!(%error, "a client takes no calls");
            connection.close();
            return;
        }
    }
}

impl Doing {
    fn cancel(&self) -> &Cancel {
        match self {
            Self::Run { cancel, .. } | Self::Question { cancel, .. } => cancel,
        }
    }
}

impl Live {
    /// A cancel handle: one that is left of another, or a new one.
    fn cancel(&mut self) -> io::Result<Arc<Cancel>> {
        match self.spare.pop() {
            Some(cancel) => Ok(cancel),
            None => Cancel::new().map(Arc::new),
        }
    }

    fn check(&self, number: u64) -> io::Result<()> {
        if self.numbers.contains_key(&number) {
            return Err(breach(format!("number {number} is in use")));
        }
        if self.numbers.len() >= NUMBERS_MAX {
            return Err(breach(format!("more than {NUMBERS_MAX} runs and questions at once")));
        }
        Ok(())
    }

    /// Whether the run of this number is there, and this is its link.
    fn is_hosted_by(&self, number: u64, link: &Arc<UnixStream>) -> bool {
        let doing = self.numbers.get(&number);
        matches!(doing, Some(Doing::Run { host: Some(host), .. }) if Arc::ptr_eq(host, link))
    }

    fn leave_run(&mut self, number: u64, cancel: Arc<Cancel>) {
        if let Some(Doing::Run { host: Some(host), .. }) = self.numbers.remove(&number) {
            let _ = host.shutdown(Shutdown::Both);
        }
        self.spare(cancel);
    }

    fn leave_question(&mut self, number: u64, cancel: Arc<Cancel>) {
        if let Some(Doing::Question { is_counted: true, .. }) = self.numbers.remove(&number) {
            self.questions -= 1;
        }
        self.spare(cancel);
    }

    /// Keeps the handle of what is over for something else. Its number is gone,
    /// so nobody raises it any more.
    fn spare(&mut self, cancel: Arc<Cancel>) {
        cancel.calm();
        if !cancel.is_raised() && self.spare.len() < SPARE_MAX {
            self.spare.push(cancel);
        }
    }
}

#[cfg(test)]
mod tests {
    use forge_protocol::name::ToolName;
    use forge_protocol::worker::Tier;

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
    fn a_result_that_is_too_large_to_be_told_ends_as_our_failure_under_its_number() {
        let told = |text_bytes: usize, content_bytes: usize| {
            let result = RunResult::unstarted(Tier::Vm, Status::Trap, "other", "x");
            let RunResult { mut report, .. } = result;
            report.output = "a".repeat(text_bytes);
            let content = vec![1; content_bytes];
            let artifact = Artifact { name: "a".into(), media_type: "b".into(), content };
            let bytes = finished(7, report, vec![artifact], 4096).unwrap();
            let mut rest = &bytes[..];
            let whole = Assembler::default().next(&mut rest, |_| Some(4096)).unwrap().unwrap();
            let Finished { number, result } = codec::decode(&whole.payload).unwrap();
            let report: serde_json::Value = serde_json::from_slice(&result.report).unwrap();
            (number, report["status"].as_str().unwrap().to_owned(), result.artifacts.len())
        };
        assert_eq!(told(1, 1), (7, "trap".into(), 1));
        assert_eq!(told(4096, 1), (7, "internal".into(), 0));
        assert_eq!(told(1, 4096), (7, "internal".into(), 0));
    }

    #[test]
    fn how_the_service_stands_may_be_asked_beside_as_many_questions_as_there_may_be() {
        let (_client, ours) = UnixStream::pair().unwrap();
        let connection = Connection::accept(Weak::new(), 0, ours, Peer::Operator).unwrap();
        let enter = |number, question| connection.enter_question(number, &question).unwrap();
        let most = QUESTIONS_MAX as u64;
        let asked: Vec<_> = (0..most).map(|it| enter(it, Question::Metrics).unwrap()).collect();
        assert!(enter(most, Question::Metrics).is_none());
        let standing = enter(most, Question::Status).unwrap();
        let leave = |number, cancel| lock(&connection.live).leave_question(number, cancel);
        leave(most, standing);
        assert!(enter(most, Question::Metrics).is_none(), "it had no place to give back");
        (0..).zip(asked).for_each(|(number, cancel)| leave(number, cancel));
        assert!(enter(0, Question::Metrics).is_some());
    }

    #[test]
    fn a_client_that_takes_nothing_is_waited_for_once() {
        let (_client, ours) = UnixStream::pair().unwrap();
        let connection = Connection::accept(Weak::new(), 0, ours, Peer::Operator).unwrap();
        let report = vec![0; 2 << 20];
        let result = Finish { report, artifacts: Vec::new() };
        let began = Instant::now();
        let sent = connection.send(Kind::Finished, &Finished { number: 0, result });
        assert_eq!(sent.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() < SEND_PATIENCE * 3 / 2, "{:?}", began.elapsed());
    }

    #[test]
    fn a_call_that_waits_behind_its_runs_end_is_passed_to_nobody() {
        let (client, ours) = UnixStream::pair().unwrap();
        let connection = Connection::accept(Weak::new(), 0, ours, Peer::Operator).unwrap();
        let mut heard = Link::new(client);
        heard.receive(|kind| kind == Kind::Hello, Patience::default()).unwrap();
        let call = |n| {
            let (tool, arguments) = (ToolName::parse("app.twice").unwrap(), b"{}".to_vec());
            Callback { number: 0, callback: n, tool, arguments }
        };
        let hosts = || {
            let (mut broker, calls) = UnixStream::pair().unwrap();
            connection.host(1, calls);
            let mut bytes = Vec::new();
            frame::write_message(Kind::Callback, &call(7), &mut bytes);
            broker.write_all(&bytes).unwrap();
            broker
        };
        let passes_on = || Arc::strong_count(&connection) > 1;
        let leaves = |cancel| lock(&connection.live).leave_run(1, cancel);
        let first = connection.enter_run(1).unwrap().unwrap();
        let _broker = hosts();
        let frame = heard.receive(|kind| kind == Kind::Callback, Patience::default()).unwrap();
        assert_eq!(decode::<Callback>(&frame).unwrap(), Callback { number: 1, ..call(7) });
        leaves(first);
        while passes_on() {
            std::thread::yield_now();
        }

        // The second call is on its way when its run ends, and the number is
        // another run's before its turn has come.
        let second = connection.enter_run(1).unwrap().unwrap();
        let writing = lock(&connection.writing);
        let _broker = hosts();
        while !passes_on() {
            std::thread::yield_now();
        }
        leaves(second);
        let _third = connection.enter_run(1).unwrap().unwrap();
        drop(writing);
        while passes_on() {
            std::thread::yield_now();
        }
        connection.send(Kind::Cancel, &CancelRun { number: 0 }).unwrap();
        let frame = heard.receive(|_| true, Patience::default()).unwrap();
        assert_eq!(frame.kind, Kind::Cancel, "the call came after its run's end");
    }
}
