//! The client for tokio: one connection, any number of runs and questions.
//!
//! A task reads the connection and hands each frame to whoever has its
//! number; another writes what they send. Both end with the last handle.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::io::ErrorKind;
use std::path::Path;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forge_protocol::broker::RefusalKind;
use forge_protocol::frame::{Frame, Incoming, Kind};
use forge_protocol::limits::NUMBERS_MAX;
use forge_protocol::parts::Contents;
use forge_protocol::service::{
    Answered, Callback, CallbackSettled, Cancel, Event, Finish, Finished, Order, Part, Query,
    Question, Reply, RunEvent,
};
use tokio::net::UnixStream;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};

use crate::ClientError;
use crate::socket::Socket;
use crate::wire::{self, GREETING_TIME_MAX};

/// Frames that may wait to be written.
const UNSENT_MAX: usize = 64;
/// Messages of one run that may wait to be taken. A client that takes none
/// stops the connection from being read: it asked for them.
const UNTAKEN_MAX: usize = 256;

/// How often it is looked for a place among those who wait to be connected.
const PLACE_LOOK_EVERY: Duration = Duration::from_millis(10);

/// A connection to a service. Clones share it.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
    outgoing: mpsc::Sender<Vec<u8>>,
}

#[derive(Debug)]
struct Shared {
    next: AtomicU64,
    waiting: Mutex<Waiting>,
}

/// Who waits for what, by number.
#[derive(Debug, Default)]
struct Waiting {
    runs: HashMap<u64, Entry>,
    questions: HashMap<u64, Asker>,
    /// Why nothing more is sent, where that is not the client's doing.
    unsendable: Option<String>,
    /// Why nothing more comes.
    over: Option<String>,
}

/// Who hears of a run, perhaps gone by now, and what is held until it is over.
#[derive(Debug)]
struct Entry {
    held: Box<dyn Any + Send>,
    sender: mpsc::Sender<RunMessage>,
    /// Of what the run left.
    contents: Contents,
}

/// Who asked, perhaps gone by now, and what is held until the answer is in.
#[derive(Debug)]
struct Asker {
    held: Box<dyn Any + Send>,
    answer: oneshot::Sender<Reply>,
}

/// What the service says of a run.
#[derive(Debug)]
pub enum RunMessage {
    /// Something happened; only where the order asks for events.
    Event(RunEvent),
    /// The program calls a tool that this client hosts: answer with
    /// [`Run::settle`].
    Callback(Callback),
    /// It is over. Nothing comes after this.
    Finished(Finish),
}

/// A run at the service. Dropped before its end, it is cancelled.
#[derive(Debug)]
pub struct Run {
    messages: mpsc::Receiver<RunMessage>,
    /// What came while something was sent, and is the next.
    taken: VecDeque<RunMessage>,
    canceller: Canceller,
    finished: bool,
}

/// A question under way. Dropped with its canceller, it is cancelled.
struct Unanswered(Option<Canceller>);

/// Cancels a run, from anywhere.
#[derive(Clone, Debug)]
pub struct Canceller {
    number: u64,
    outgoing: mpsc::Sender<Vec<u8>>,
}

impl Client {
    /// Connects to the service that listens at this path.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn connect(path: &Path) -> Result<Self, ClientError> {
        let until = Instant::now() + GREETING_TIME_MAX;
        loop {
            match UnixStream::connect(path).await {
                Ok(socket) => return Self::over(socket).await,
                // As many wait there as may, and nothing tells when there is a place.
                Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < until => {
                    tokio::time::sleep(PLACE_LOOK_EVERY).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Connects to the service at this port of the machine with this CID
    /// (vsock(7)): 2 is the host, as seen from its virtual machines.
    ///
    /// # Errors
    /// [`ClientError`].
    #[cfg(feature = "vsock")]
    pub async fn connect_vsock(cid: u32, port: u32) -> Result<Self, ClientError> {
        // The kernel waits for the other side, for 2 s at most.
        let connecting = tokio::task::spawn_blocking(move || crate::connect_vsock(cid, port));
        let socket = connecting.await.map_err(std::io::Error::from)??;
        socket.set_nonblocking(true)?;
        Self::over(UnixStream::from_std(socket)?).await
    }

    /// Says hello over a connection that is there already.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn over(socket: UnixStream) -> Result<Self, ClientError> {
        let socket = Socket::new(socket)?;
        let mut reader = Reader { socket: socket.clone(), incoming: wire::incoming() };
        socket.write_all(&wire::hello()).await?;
        let greeting = tokio::time::timeout(GREETING_TIME_MAX, reader.next(wire::may_greet));
        let frame =
            greeting.await.map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))??;
        wire::greeted(&frame)?;
        let (outgoing, unsent) = mpsc::channel(UNSENT_MAX);
        let shared = Arc::new(Shared { next: AtomicU64::new(1), waiting: Mutex::default() });
        let writing = tokio::spawn(send(socket, Arc::clone(&shared), unsent));
        tokio::spawn(read_all(reader, Arc::clone(&shared), writing));
        Ok(Self { shared, outgoing })
    }

    /// Submits a run. A run that ends badly is no error: its report says how.
    ///
    /// # Errors
    /// [`ClientError`] if the service is gone.
    pub async fn submit(&self, order: &Order) -> Result<Run, ClientError> {
        self.submit_holding(order, ()).await
    }

    /// Submits, and holds something until the service has said that the run is over
    /// or is gone, even if the run is dropped before: there it counts until then, as
    /// a question does ([`Self::ask_holding`]).
    ///
    /// # Errors
    /// As [`Self::submit`].
    pub async fn submit_holding(
        &self,
        order: &Order,
        held: impl Send + 'static,
    ) -> Result<Run, ClientError> {
        let place = self.place().await?;
        let number = self.shared.next.fetch_add(1, Ordering::Relaxed);
        // `Submit` without a copy of the program.
        let bytes = wire::bounded(Kind::Submit, &(number, order))?;
        let (sender, messages) = mpsc::channel(UNTAKEN_MAX);
        let entry = Entry { held: Box::new(held), sender, contents: Contents::default() };
        self.shared.wait(|waiting| waiting.runs.insert(number, entry))?;
        place.send(bytes);
        let canceller = Canceller { number, outgoing: self.outgoing.clone() };
        Ok(Run { messages, taken: VecDeque::new(), canceller, finished: false })
    }

    /// Submits a run and waits for its end.
    ///
    /// # Errors
    /// [`ClientError`] if the service is gone.
    pub async fn run(&self, order: &Order) -> Result<Finish, ClientError> {
        self.submit(order).await?.finish().await
    }

    /// Asks, and waits for the answer. Dropped before, the question is
    /// cancelled.
    ///
    /// # Errors
    /// [`ClientError`]; a refusal is one.
    pub async fn ask(&self, question: Question) -> Result<Reply, ClientError> {
        self.ask_holding(question, ()).await
    }

    /// Asks, and holds something until the service has answered or is gone, even
    /// if this is dropped before: a question that is cancelled counts there until
    /// then. So a permit that is held bounds what the service has to answer, and
    /// not only what somebody waits for. Where nothing was sent, it is dropped at
    /// once.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub async fn ask_holding(
        &self,
        question: Question,
        held: impl Send + 'static,
    ) -> Result<Reply, ClientError> {
        let place = self.place().await?;
        let number = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let bytes = wire::bounded(Kind::Query, &Query { number, question })?;
        let (answer, answered) = oneshot::channel();
        let asker = Asker { held: Box::new(held), answer };
        self.shared.wait(|waiting| waiting.questions.insert(number, asker))?;
        place.send(bytes);
        let canceller = Canceller { number, outgoing: self.outgoing.clone() };
        let mut asked = Unanswered(Some(canceller));
        let answer = answered.await;
        asked.0 = None;
        match answer {
            Ok(Reply::Refused { kind, message }) => Err(ClientError::Refused { kind, message }),
            Ok(reply) => Ok(reply),
            Err(_) => Err(self.shared.gone()),
        }
    }

    /// Waits until the service is gone.
    pub async fn closed(&self) {
        self.outgoing.closed().await;
    }

    /// Whether it is known by now that the connection is closed: nothing more
    /// comes on it. Once a run's or a question's end is that the service is
    /// gone, it is.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.outgoing.is_closed() || self.shared.waiting().over.is_some()
    }

    /// A place for what is to be sent. Whoever waits for one has no number
    /// yet: dropped there, it leaves nothing behind.
    async fn place(&self) -> Result<mpsc::Permit<'_, Vec<u8>>, ClientError> {
        self.outgoing.reserve().await.map_err(|_| self.shared.gone())
    }
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters somebody who waits, unless nothing more comes.
    fn wait<T>(&self, enter: impl FnOnce(&mut Waiting) -> T) -> Result<(), ClientError> {
        let mut waiting = self.waiting();
        if waiting.over.is_some() {
            drop(waiting);
            return Err(self.gone());
        }
        // The service closes the connection over one more.
        if waiting.runs.len() + waiting.questions.len() >= NUMBERS_MAX {
            let message = format!("{NUMBERS_MAX} runs and questions are under way: wait for one");
            return Err(ClientError::Refused { kind: RefusalKind::Overloaded, message });
        }
        enter(&mut waiting);
        Ok(())
    }

    fn gone(&self) -> ClientError {
        let waiting = self.waiting();
        let reason = waiting.over.as_ref().or(waiting.unsendable.as_ref()).cloned();
        drop(waiting);
        let reason = reason.unwrap_or_else(|| "the connection is closed".into());
        std::io::Error::new(std::io::ErrorKind::ConnectionAborted, reason).into()
    }
}

impl Run {
    /// The next that the service says. `None` after the end, or if the
    /// service is gone.
    pub async fn next(&mut self) -> Option<RunMessage> {
        let message = match self.taken.pop_front() {
            Some(message) => Some(message),
            None => self.messages.recv().await,
        };
        self.finished |= matches!(message, None | Some(RunMessage::Finished(_)));
        message
    }

    /// Waits for the end, and hears of nothing else. A call of a tool that
    /// this client hosts is left unanswered.
    ///
    /// # Errors
    /// [`ClientError`] if the service is gone.
    pub async fn finish(mut self) -> Result<Finish, ClientError> {
        while let Some(message) = self.next().await {
            if let RunMessage::Finished(finish) = message {
                return Ok(finish);
            }
        }
        let gone = "the service went away with the run";
        Err(std::io::Error::new(std::io::ErrorKind::ConnectionAborted, gone).into())
    }

    /// Answers a callback. What comes of the run meanwhile is kept for
    /// [`Self::next`].
    ///
    /// # Errors
    /// [`ClientError`] if the service is gone, or the answer is too large for it:
    /// the callback waits for another then.
    pub async fn settle(
        &mut self,
        callback: u32,
        result: Result<Vec<u8>, Vec<u8>>,
    ) -> Result<(), ClientError> {
        let canceller = self.canceller();
        self.taking_on(canceller.settle(callback, result)).await
    }

    /// Cancels the run. Its end comes all the same, and says so. What comes
    /// before is kept for [`Self::next`].
    pub async fn cancel(&mut self) {
        let canceller = self.canceller();
        self.taking_on(canceller.cancel()).await;
    }

    /// Sends something, and takes what comes of the run meanwhile: a service
    /// reads no further while too much of what it said is not taken.
    async fn taking_on<T>(&mut self, sending: impl Future<Output = T>) -> T {
        let mut sending = pin!(sending);
        loop {
            tokio::select! {
                biased;
                sent = &mut sending => return sent,
                Some(message) = self.messages.recv() => self.taken.push_back(message),
            }
        }
    }

    /// What cancels it, and settles its callbacks, from elsewhere.
    #[must_use]
    pub fn canceller(&self) -> Canceller {
        self.canceller.clone()
    }
}

impl Canceller {
    /// Cancels the run. Its end comes all the same, and says so. Whoever takes
    /// the run's messages goes on taking them meanwhile, or uses [`Run::cancel`].
    pub async fn cancel(&self) {
        let _ =
            self.outgoing.send(wire::message(Kind::Cancel, &Cancel { number: self.number })).await;
    }

    /// Answers a callback. Whoever takes the run's messages goes on taking them
    /// meanwhile, or uses [`Run::settle`].
    ///
    /// # Errors
    /// [`ClientError`] if the service is gone.
    pub async fn settle(
        &self,
        callback: u32,
        result: Result<Vec<u8>, Vec<u8>>,
    ) -> Result<(), ClientError> {
        let settled = CallbackSettled { number: self.number, callback, result };
        let bytes = wire::bounded(Kind::CallbackSettled, &settled)?;
        self.outgoing.send(bytes).await.map_err(|_| {
            std::io::Error::new(std::io::ErrorKind::ConnectionAborted, "the service is gone").into()
        })
    }

    /// Cancels what nobody waits for any more, without waiting.
    fn abandon(&self) {
        let bytes = wire::message(Kind::Cancel, &Cancel { number: self.number });
        // A full queue is a service that reads slowly: it hears of it when
        // it has read the rest.
        if let Err(TrySendError::Full(bytes)) = self.outgoing.try_send(bytes)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let outgoing = self.outgoing.clone();
            runtime.spawn(async move { outgoing.send(bytes).await });
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if !self.finished {
            self.canceller.abandon();
        }
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        if let Some(canceller) = &self.0 {
            canceller.abandon();
        }
    }
}

async fn send(socket: Socket, shared: Arc<Shared>, mut unsent: mpsc::Receiver<Vec<u8>>) {
    while let Some(bytes) = unsent.recv().await {
        if let Err(error) = socket.write_all(&bytes).await {
            shared.waiting().unsendable = Some(error.to_string());
            break;
        }
    }
    socket.finish();
}

async fn read_all(mut reader: Reader, shared: Arc<Shared>, writing: tokio::task::JoinHandle<()>) {
    let reason = loop {
        if writing.is_finished() {
            let waiting = shared.waiting();
            match &waiting.unsendable {
                None => break "the client was dropped".to_owned(),
                // What the service said before it went is read, as long as somebody
                // waits for it.
                Some(why) if waiting.runs.is_empty() && waiting.questions.is_empty() => {
                    break why.clone();
                }
                Some(_) => {}
            }
        }
        match reader.next(wire::may_come).await {
            Ok(frame) => {
                if let Err(error) = hand_over(&frame, &shared).await {
                    break error.to_string();
                }
            }
            // Whoever is told gets it as an error of the connection again.
            Err(ClientError::Connection(error)) => break error.to_string(),
            Err(error) => break error.to_string(),
        }
    };
    writing.abort();
    let mut waiting = shared.waiting();
    waiting.over = Some(reason);
    let runs = std::mem::take(&mut waiting.runs);
    let asked = std::mem::take(&mut waiting.questions);
    // What is held is not ours, and its end may ask for the lock again.
    drop(waiting);
    drop((runs, asked));
}

/// Gives a frame to whoever has its number. Nobody may: a run can be dropped.
async fn hand_over(frame: &Frame, shared: &Shared) -> Result<(), ClientError> {
    let (number, message) = match frame.kind {
        Kind::Answered => {
            let Answered { number, reply } = wire::decode(frame)?;
            let asker = shared.waiting().questions.remove(&number);
            if let Some(Asker { held, answer }) = asker {
                drop(held);
                let _ = answer.send(reply);
            }
            return Ok(());
        }
        Kind::Event => {
            let Event { number, what } = wire::decode(frame)?;
            (number, RunMessage::Event(what))
        }
        Kind::Callback => {
            let callback: Callback = wire::decode(frame)?;
            (callback.number, RunMessage::Callback(callback))
        }
        Kind::Part => {
            let part: Part = wire::decode(frame)?;
            // Nobody takes what a run left that was dropped.
            if let Some(entry) = shared.waiting().runs.get_mut(&part.number)
                && !entry.sender.is_closed()
            {
                entry.contents.take(part).map_err(wire::misplaced)?;
            }
            return Ok(());
        }
        _ => {
            let finished: Finished = wire::decode(frame)?;
            let entry = shared.waiting().runs.remove(&finished.number);
            if let Some(Entry { held, sender, contents }) = entry {
                drop(held);
                if !sender.is_closed() {
                    let finish = contents.finish(finished).map_err(wire::misplaced)?;
                    let _ = sender.send(RunMessage::Finished(finish)).await;
                }
            }
            return Ok(());
        }
    };
    let run = shared.waiting().runs.get(&number).map(|entry| entry.sender.clone());
    if let Some(run) = run {
        let _ = run.send(message).await;
    }
    Ok(())
}

/// Frames off the connection.
struct Reader {
    socket: Socket,
    incoming: Incoming,
}

impl Reader {
    async fn next(&mut self, awaits: impl Fn(Kind) -> Option<u32>) -> Result<Frame, ClientError> {
        loop {
            if let Some(frame) = wire::next(&mut self.incoming, &awaits)? {
                return Ok(frame);
            }
            let bytes = self.socket.read(self.incoming.room()).await?;
            wire::filled(&mut self.incoming, bytes)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use forge_protocol::broker::Authority;
    use forge_protocol::codec::Encode;
    use forge_protocol::frame::write_message;
    use forge_protocol::handshake::{Hello, Role};
    use forge_protocol::limits::RunLimits;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    fn order() -> Order {
        Order {
            program: Vec::new(),
            input: Vec::new(),
            principal: String::new(),
            session: None,
            authority: Authority::Tools(Vec::new()),
            limits: RunLimits::default(),
            prepare: false,
            events: true,
            hosted: None,
        }
    }

    /// A service that reads nothing until all that it has to say is taken.
    async fn says_before_it_reads(mut socket: UnixStream, said: Vec<u8>) {
        let mut hello = Vec::new();
        write_message(Kind::Hello, &Hello::ours(Role::Supervisor), &mut hello);
        socket.write_all(&hello).await.unwrap();
        // The client's greeting and the start of its order.
        socket.read_exact(&mut [0; 64]).await.unwrap();
        socket.write_all(&said).await.unwrap();
        let mut rest = vec![0; 1 << 20];
        while socket.read(&mut rest).await.is_ok_and(|bytes| bytes > 0) {}
    }

    async fn say<T: Encode>(service: &mut UnixStream, kind: Kind, message: &T) {
        service.write_all(&wire::message(kind, message)).await.unwrap();
    }

    #[tokio::test]
    async fn what_a_question_holds_is_held_until_the_service_has_answered_or_is_gone() {
        let (mut service, socket) = UnixStream::pair().unwrap();
        say(&mut service, Kind::Hello, &Hello::ours(Role::Supervisor)).await;
        let client = Client::over(socket).await.unwrap();
        let held = Arc::new(());
        let leave = async || {
            let asking = client.ask_holding(Question::Metrics, Arc::clone(&held));
            // Sent, and cancelled.
            tokio::time::timeout(Duration::ZERO, asking).await.unwrap_err();
        };
        let given_back = async |left: usize| {
            let back = async {
                while Arc::strong_count(&held) > 1 + left {
                    tokio::task::yield_now().await;
                }
            };
            tokio::time::timeout(Duration::from_secs(30), back).await.unwrap();
        };
        leave().await;
        leave().await;
        leave().await;
        assert_eq!(Arc::strong_count(&held), 1 + 3);
        let refused = Reply::Refused { kind: RefusalKind::Away, message: "cancelled".into() };
        say(&mut service, Kind::Answered, &Answered { number: 2, reply: refused }).await;
        given_back(2).await;
        drop(service);
        given_back(0).await;
        client.ask_holding(Question::Metrics, Arc::clone(&held)).await.unwrap_err();
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[tokio::test]
    async fn who_answers_a_callback_takes_meanwhile_what_comes_and_loses_none_of_it() {
        const EVENTS: usize = 4 * UNTAKEN_MAX;
        let (service, socket) = UnixStream::pair().unwrap();
        let mut said = Vec::new();
        for n in 0..EVENTS {
            let what = RunEvent::Output(n.to_le_bytes().repeat(1 << 10));
            write_message(Kind::Event, &Event { number: 1, what }, &mut said);
        }
        let service = tokio::spawn(says_before_it_reads(service, said));
        let talk = async {
            let client = Client::over(socket).await.unwrap();
            let mut run = client.submit(&order()).await.unwrap();
            for callback in 0..4 * UNSENT_MAX as u32 {
                run.settle(callback, Ok(vec![0; 16 << 10])).await.unwrap();
            }
            for n in 0..EVENTS {
                let Some(RunMessage::Event(RunEvent::Output(output))) = run.next().await else {
                    panic!("event {n} is missing");
                };
                assert_eq!(output[..8], n.to_le_bytes());
            }
        };
        let talked = tokio::time::timeout(Duration::from_secs(30), talk).await;
        talked.expect("the two wait for each other");
        service.await.unwrap();
    }

    #[tokio::test]
    async fn what_a_service_said_before_it_went_is_heard_though_nothing_can_be_sent() {
        let (mut service, socket) = UnixStream::pair().unwrap();
        say(&mut service, Kind::Hello, &Hello::ours(Role::Supervisor)).await;
        let client = Client::over(socket).await.unwrap();
        let run = client.submit(&order()).await.unwrap();
        // The client's greeting and the start of its order.
        service.read_exact(&mut [0; 64]).await.unwrap();
        for _ in 0..3 {
            let what = RunEvent::Output(vec![7]);
            say(&mut service, Kind::Event, &Event { number: 1, what }).await;
        }
        let end = Finished { number: 1, report: b"{}".to_vec(), artifacts: Vec::new() };
        say(&mut service, Kind::Finished, &end).await;
        drop(service);
        let lost = client.submit(&order()).await.unwrap();
        assert_eq!(run.finish().await.unwrap().report, b"{}");
        lost.finish().await.unwrap_err();
        let why = client.submit(&order()).await.unwrap_err().to_string();
        assert!(!why.contains("dropped"), "{why}");
    }
}
