//! The thread that owns the journal file, and the way to it.
//!
//! Appending puts a record into memory and wakes the writer only if it
//! sleeps; it then waits [`GATHER`] for company, so that a run with many
//! calls costs one wake-up and one commit for many records. Whoever needs a
//! record on the disk says so, and the writer goes at once.
//!
//! The file is opened with the first record: a broker that is never called
//! leaves none. When a commit fails, its records are kept and tried again
//! every [`RETRY`]; until one succeeds, nothing may be dispatched. What is
//! kept is bounded.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forge_log::Seldom;
use tokio::sync::watch;

use super::record::{Event, Record};
use super::store::{JournalError, Store};
use crate::locks::lock;
use crate::metrics::Metrics;

/// How long the writer waits for more records before it commits.
const GATHER: Duration = Duration::from_millis(10);
/// Records that end a wait for more, and that one commit has at most: after a full disk, so
/// little room is enough to go on.
const BATCH_RECORDS: usize = 4_096;
/// Records that wait for the disk at most. Intents beyond that wait, and while
/// the disk fails what is no outcome is dropped: how the calls ended that were
/// dispatched before is never, and there are no more of those than there were
/// calls in flight, since none is dispatched meanwhile.
const PENDING_RECORDS_MAX: usize = if cfg!(test) { 8_192 } else { 65_536 };
/// From a failed commit to the next try.
const RETRY: Duration = Duration::from_secs(1);

/// The journal cannot be written.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the journal cannot be written: {reason}")]
pub struct Unwritable {
    /// Why not, for the operator: it names files of the host.
    pub reason: Arc<str>,
}

/// The way to the journal. Clones lead to the same one.
#[derive(Clone, Debug)]
pub struct Journal(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Told when there is something for the writer.
    changed: Condvar,
    progress: watch::Sender<Progress>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct State {
    pending: VecDeque<Record>,
    /// How many records were ever appended.
    appended: u64,
    /// Somebody waits for the disk.
    urgent: bool,
    /// The writer waits for a first record.
    idle: bool,
    closing: bool,
    /// How many records were not taken.
    dropped: u64,
}

/// What the writer has done.
#[derive(Clone, Debug, Default)]
struct Progress {
    /// How many records, of those ever appended, are on the disk.
    durable: u64,
    standing: Standing,
}

#[derive(Clone, Debug, Default)]
enum Standing {
    /// Nothing was written yet.
    #[default]
    Untried,
    Good,
    Failed(Arc<str>),
}

impl Standing {
    fn working(&self) -> Result<(), Unwritable> {
        match self {
            Self::Failed(reason) => Err(Unwritable { reason: Arc::clone(reason) }),
            Self::Untried | Self::Good => Ok(()),
        }
    }
}

/// Dropped by the writer's thread as it ends. One that panics writes nothing more, and
/// whoever waits for it has to hear of it.
struct Last(Arc<Shared>);

impl Drop for Last {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail("its writer panicked, which is a bug");
        }
    }
}

/// Where the journal is.
#[derive(Clone, Debug)]
pub enum Place {
    /// This folder.
    Folder(PathBuf),
    /// There is none, for this reason.
    Nowhere(String),
}

impl Journal {
    /// A journal at this place. Nothing is opened before the first record.
    #[must_use]
    pub fn new(place: Place, metrics: Arc<Metrics>) -> Self {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            progress: watch::Sender::default(),
            writer: Mutex::default(),
        });
        let writer = Writer { place, store: None, shared: Arc::clone(&shared), metrics };
        let last = Last(Arc::clone(&shared));
        let writes = move || {
            let _last = last;
            writer.write();
        };
        match std::thread::Builder::new().name("journal".into()).spawn(writes) {
            Ok(thread) => *lock(&shared.writer) = Some(thread),
            Err(error) => shared.fail(&format!("no thread for it: {error}")),
        }
        Self(shared)
    }

    /// Whether a record that need not be on the disk yet can be taken now,
    /// by a journal that is known to work.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        matches!(self.0.progress.borrow().standing, Standing::Good)
            && lock(&self.0.state).pending.len() < PENDING_RECORDS_MAX
    }

    /// Records the intent of a call, and waits for the disk if it must be
    /// there before the call is dispatched. It also waits while nobody knows
    /// whether the journal works at all.
    ///
    /// # Errors
    /// [`Unwritable`]: the call must not be dispatched. The intent may come
    /// to the disk all the same, so a refusal has to follow it.
    pub async fn intend(&self, intent: Record, durable: bool) -> Result<(), Unwritable> {
        self.working()?;
        if lock(&self.0.state).pending.len() >= PENDING_RECORDS_MAX {
            self.sync().await?;
        }
        let ticket = self.append_always(intent);
        if durable || !self.is_ready() { self.durable(ticket).await } else { Ok(()) }
    }

    /// Records that a call was refused. It goes with the next commit; while
    /// too much waits for that, so does the caller.
    pub async fn refuse(&self, refusal: Record) {
        if lock(&self.0.state).pending.len() >= PENDING_RECORDS_MAX {
            // What comes of it is seen by `append`.
            let _ = self.sync().await;
        }
        self.append(refusal);
    }

    /// Records something that has happened. It goes with the next commit.
    pub fn append(&self, record: Record) {
        if self.working().is_err() && !matches!(record.event, Event::Outcome { .. }) {
            let mut state = lock(&self.0.state);
            if state.pending.len() >= PENDING_RECORDS_MAX {
                state.dropped += 1;
                // What programs do must not choose how much is logged.
                if state.dropped == 1 {
                    tracing::error!(
                        "records are dropped from now on, and their number is told at the \
                         journal's end: it cannot be written"
                    );
                }
                return;
            }
        }
        self.append_always(record);
    }

    fn append_always(&self, record: Record) -> u64 {
        let mut state = lock(&self.0.state);
        state.pending.push_back(record);
        state.appended += 1;
        // One notice is enough, however long the writer takes to hear it.
        let wakes = std::mem::take(&mut state.idle) || state.pending.len() == BATCH_RECORDS;
        let ticket = state.appended;
        drop(state);
        if wakes {
            self.0.changed.notify_one();
        }
        ticket
    }

    /// Waits until everything that was recorded before is on the disk.
    ///
    /// # Errors
    /// [`Unwritable`].
    pub async fn sync(&self) -> Result<(), Unwritable> {
        let ticket = lock(&self.0.state).appended;
        self.durable(ticket).await
    }

    async fn durable(&self, ticket: u64) -> Result<(), Unwritable> {
        let mut progress = self.0.progress.subscribe();
        if progress.borrow_and_update().durable >= ticket {
            return Ok(());
        }
        self.working()?;
        lock(&self.0.state).urgent = true;
        self.0.changed.notify_one();
        let over = |progress: &Progress| {
            progress.durable >= ticket || matches!(progress.standing, Standing::Failed(_))
        };
        let came = progress.wait_for(over).await;
        let came = came.map_err(|_| Unwritable { reason: "its writer is gone".into() })?;
        // By what was seen, and not by how it stands since: a later commit that went well
        // may have had no room for this record.
        if came.durable >= ticket { Ok(()) } else { came.standing.working() }
    }

    fn working(&self) -> Result<(), Unwritable> {
        self.0.progress.borrow().standing.working()
    }

    /// Commits what is left and closes the file; if that fails, it leaves the
    /// file as a broker that died would. Nothing may be recorded after that.
    pub fn close(&self) {
        lock(&self.0.state).closing = true;
        self.0.changed.notify_one();
        if let Some(writer) = lock(&self.0.writer).take()
            && writer.join().is_err()
        {
            tracing::error!("bug: the journal's writer panicked");
        }
    }
}

impl Shared {
    fn fail(&self, reason: &str) {
        let reason: Arc<str> = reason.into();
        self.progress.send_modify(|progress| progress.standing = Standing::Failed(reason));
    }
}

struct Writer {
    place: Place,
    store: Option<Store>,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
}

impl Writer {
    fn write(mut self) {
        let mut batch: Vec<Record> = Vec::new();
        let failures = Seldom::failing();
        loop {
            let (upto, closing) = self.gather(&mut batch);
            if !batch.is_empty() {
                let began = Instant::now();
                match self.commit(&batch) {
                    Ok(()) => {
                        self.metrics.committed(batch.len(), began.elapsed());
                        if failures.end() {
                            tracing::warn!(records = batch.len(), "the journal is written again");
                        }
                        batch.clear();
                        self.shared.progress.send_modify(|progress| {
                            progress.durable = upto;
                            progress.standing = Standing::Good;
                        });
                    }
                    Err(error) => {
                        self.metrics.commit_failed();
                        let reason = error.to_string();
                        if failures.is_due_for(&reason) {
                            tracing::error!(reason, records = batch.len(), "the journal fails");
                        }
                        self.shared.fail(&reason);
                        self.wait_to_retry();
                    }
                }
            }
            // What had no room in this batch comes with the next.
            if closing && (!batch.is_empty() || lock(&self.shared.state).pending.is_empty()) {
                break;
            }
        }
        let Some(store) = self.store.take() else { return };
        let dropped = lock(&self.shared.state).dropped;
        if dropped > 0 || !batch.is_empty() {
            // As if this broker had died: whoever opens the file next says
            // of each call without an end that it is unknown.
            let records = batch.len();
            tracing::error!(records, dropped, "the journal is left open: it lacks records");
            store.leave();
        } else if let Err(error) = store.close() {
            tracing::error!(%error, "the journal was not closed in good order");
        }
    }

    /// Adds what is pending to the batch, once there is something to commit:
    /// how many were ever appended by then, and whether this is the end.
    fn gather(&self, batch: &mut Vec<Record>) -> (u64, bool) {
        let wait = |state, time| {
            let waited = self.shared.changed.wait_timeout(state, time);
            waited.unwrap_or_else(PoisonError::into_inner).0
        };
        let mut state = lock(&self.shared.state);
        while batch.is_empty() && state.pending.is_empty() && !state.closing {
            state.idle = true;
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle = false;
        }
        let until = Instant::now() + GATHER;
        while !state.urgent && !state.closing && state.pending.len() < BATCH_RECORDS {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = wait(state, left);
        }
        // What failed before is still in the batch.
        let room = BATCH_RECORDS.saturating_sub(batch.len()).min(state.pending.len());
        batch.extend(state.pending.drain(..room));
        // Whoever waits may wait for what had no room.
        state.urgent &= !state.pending.is_empty();
        (state.appended - state.pending.len() as u64, state.closing)
    }

    fn commit(&mut self, batch: &[Record]) -> Result<(), JournalError> {
        let failed = matches!(self.shared.progress.borrow().standing, Standing::Failed(_));
        let store = match &mut self.store {
            Some(store) if failed => {
                store.reopen()?;
                store
            }
            Some(store) => store,
            None => {
                let store = match &self.place {
                    Place::Folder(folder) => Store::open(folder)?,
                    Place::Nowhere(why) => {
                        let source = std::io::Error::other(why.clone());
                        return Err(JournalError::File { path: "no folder for it".into(), source });
                    }
                };
                self.store.insert(store)
            }
        };
        store.commit(batch)
    }

    /// Whoever waits meanwhile has its refusal already.
    fn wait_to_retry(&self) {
        let until = Instant::now() + RETRY;
        let mut state = lock(&self.shared.state);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || state.closing {
                return;
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::task::Poll;

    use super::*;
    use crate::journal::{CallFacts, Event};
    use forge_protocol::RunId;
    use forge_protocol::name::ToolName;

    fn recorded(event: Event) -> Record {
        Record::now(RunId([1; 16]), "alice".into(), event)
    }

    fn facts() -> CallFacts {
        CallFacts {
            call: 0,
            tool: ToolName::parse("shop.order").unwrap(),
            definition_sha256: None,
            effect: None,
            arguments_sha256: None,
            held_by_caller: false,
        }
    }

    fn intent() -> Record {
        recorded(Event::Intent(facts()))
    }

    fn outcome() -> Record {
        let event =
            Event::Outcome { call: 0, code: None, took_us: 1, response_bytes: 1, redacted: false };
        recorded(event)
    }

    fn refusal() -> Record {
        let call = CallFacts { call: 1, ..facts() };
        recorded(Event::Refusal { call, code: forge_protocol::abi::CallCode::Denied })
    }

    /// A journal that stands so, and its writer, which the test has in hand.
    fn in_hand(standing: Standing, place: Place) -> (Journal, Writer) {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            progress: watch::Sender::new(Progress { durable: 0, standing }),
            writer: Mutex::default(),
        });
        let (store, metrics) = (None, Arc::new(Metrics::default()));
        let writer = Writer { place, store, shared: Arc::clone(&shared), metrics };
        (Journal(shared), writer)
    }

    fn nowhere() -> Place {
        Place::Nowhere("it is not asked for".into())
    }

    /// So many are on the disk.
    fn commit(journal: &Journal, durable: u64) {
        let standing = Standing::Good;
        journal.0.progress.send_replace(Progress { durable, standing });
    }

    fn pending(journal: &Journal) -> usize {
        lock(&journal.0.state).pending.len()
    }

    /// What it comes to in one step, if it does.
    async fn now<T>(future: &mut (impl Future<Output = T> + Unpin)) -> Option<T> {
        let step = poll_fn(|context| Poll::Ready(pin!(&mut *future).poll(context)));
        match step.await {
            Poll::Ready(done) => Some(done),
            Poll::Pending => None,
        }
    }

    #[tokio::test]
    async fn while_as_many_wait_for_the_disk_as_may_whoever_would_add_to_them_waits_too() {
        let (journal, writer) = in_hand(Standing::Good, nowhere());
        for number in 1..=PENDING_RECORDS_MAX {
            assert!(journal.is_ready(), "{number}");
            journal.append(outcome());
        }
        assert!(!journal.is_ready());
        let mut intends = Box::pin(journal.intend(intent(), false));
        let mut refuses = Box::pin(journal.refuse(refusal()));
        assert!(now(&mut intends).await.is_none() && now(&mut refuses).await.is_none());
        assert_eq!(pending(&journal), PENDING_RECORDS_MAX);
        // What has happened is taken, and nothing is dropped while the disk works.
        journal.append(outcome());
        journal.append(refusal());
        assert_eq!(pending(&journal), PENDING_RECORDS_MAX + 2);

        for batches in 1..=PENDING_RECORDS_MAX / BATCH_RECORDS {
            assert!(now(&mut intends).await.is_none(), "they are not on the disk yet");
            let mut batch = Vec::new();
            let (upto, _) = writer.gather(&mut batch);
            assert_eq!((upto as usize, batch.len()), (batches * BATCH_RECORDS, BATCH_RECORDS));
            commit(&journal, upto);
        }
        assert!(now(&mut intends).await.unwrap().is_ok() && now(&mut refuses).await.is_some());
        assert_eq!((pending(&journal), lock(&journal.0.state).dropped), (4, 0));
    }

    #[tokio::test]
    async fn a_batch_that_failed_takes_as_much_more_as_there_is_room_for_and_says_up_to_where() {
        let (journal, writer) = in_hand(Standing::Good, nowhere());
        let mut batch: Vec<_> = (0..BATCH_RECORDS - 3).map(|_| outcome()).collect();
        for _ in 0..10 {
            journal.append(outcome());
        }
        for _ in 0..2 {
            assert_eq!(writer.gather(&mut batch), (3, false));
            assert_eq!((batch.len(), pending(&journal)), (BATCH_RECORDS, 7));
        }
    }

    #[tokio::test]
    async fn an_intent_waits_for_the_disk_where_it_must_and_until_the_journal_is_known_to_work() {
        let (journal, _writer) = in_hand(Standing::Untried, nowhere());
        assert!(!journal.is_ready());
        let mut first = Box::pin(journal.intend(intent(), false));
        assert!(now(&mut first).await.is_none());
        commit(&journal, 1);
        assert!(now(&mut first).await.unwrap().is_ok() && journal.is_ready());

        assert!(now(&mut Box::pin(journal.intend(intent(), false))).await.unwrap().is_ok());
        let mut durable = Box::pin(journal.intend(intent(), true));
        for on_the_disk in [1, 2, 3] {
            assert!(now(&mut durable).await.is_none(), "{on_the_disk}");
            commit(&journal, on_the_disk);
        }
        assert!(now(&mut durable).await.unwrap().is_ok());

        let mut fails = Box::pin(journal.intend(intent(), true));
        assert!(now(&mut fails).await.is_none());
        journal.0.fail("on purpose");
        assert!(now(&mut fails).await.unwrap().is_err() && !journal.is_ready());
        let recorded = pending(&journal);
        assert!(now(&mut Box::pin(journal.intend(intent(), false))).await.unwrap().is_err());
        assert_eq!(pending(&journal), recorded, "nothing is intended that is not dispatched");
    }

    #[test]
    fn a_writer_that_is_to_end_commits_batch_after_batch_until_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let (journal, writer) = in_hand(Standing::Untried, Place::Folder(folder.path().into()));
        for _ in 0..2 * PENDING_RECORDS_MAX + 1 {
            journal.append(outcome());
        }
        lock(&journal.0.state).closing = true;
        writer.write();
        assert_eq!(pending(&journal), 0);
        assert_eq!(journal.0.progress.borrow().durable as usize, 2 * PENDING_RECORDS_MAX + 1);
    }

    /// How a journal's call is left by a broker, and what the next says of it.
    fn left_after(last: impl FnOnce(&Journal, &std::path::Path)) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("journal-00.sqlite");
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let place = Place::Folder(folder.path().into());
        let journal = Journal::new(place, Arc::new(Metrics::default()));
        runtime.block_on(journal.intend(intent(), true)).unwrap();
        last(&journal, &file);
        drop(Store::open(folder.path()).unwrap());
        let read = rusqlite::Connection::open(file).unwrap();
        let mut kinds = read.prepare("SELECT kind FROM records ORDER BY seq").unwrap();
        let kinds = kinds.query_map([], |row| row.get(0)).unwrap();
        kinds.collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn a_writer_that_panics_leaves_nobody_waiting_and_no_call_unrecorded() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let place = Place::Folder(folder.path().into());
        let journal = Journal::new(place, Arc::new(Metrics::default()));
        runtime.block_on(journal.intend(intent(), true)).unwrap();
        let shared = Arc::clone(&journal.0);
        let writer = std::thread::spawn(move || {
            let _last = Last(shared);
            panic!("on purpose");
        });
        assert!(writer.join().is_err());
        assert!(!journal.is_ready());
        let refused = runtime.block_on(journal.intend(intent(), false)).unwrap_err();
        assert!(refused.to_string().contains("panicked"), "{refused}");
    }

    #[test]
    fn an_outcome_that_the_last_commit_loses_is_unknown_to_the_next_broker() {
        let left = left_after(|journal, file| {
            let away = file.with_extension("away");
            std::fs::rename(file, &away).unwrap();
            journal.append(outcome());
            journal.close();
            std::fs::rename(&away, file).unwrap();
            assert!(file.with_extension("sqlite-wal").exists(), "the next takes this file first");
        });
        assert_eq!(left, ["intent", "unknown"]);
    }

    #[test]
    fn an_outcome_is_kept_however_much_is_refused_while_the_disk_fails() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let left = left_after(|journal, file| {
            let away = file.with_extension("away");
            std::fs::rename(file, &away).unwrap();
            journal.append(refusal());
            assert!(runtime.block_on(journal.sync()).is_err());
            for _ in 0..2 * PENDING_RECORDS_MAX {
                journal.append(refusal());
            }
            assert!(lock(&journal.0.state).pending.len() <= PENDING_RECORDS_MAX);
            journal.append(outcome());
            std::fs::rename(&away, file).unwrap();
            while runtime.block_on(journal.sync()).is_err() {
                std::thread::sleep(RETRY / 10);
            }
            assert!(journal.is_ready(), "it works again");
            journal.close();
            assert!(file.with_extension("sqlite-wal").exists(), "it lacks records, and says so");
        });
        assert_eq!((left[0].as_str(), left.len() > PENDING_RECORDS_MAX), ("intent", true));
        assert!(left.iter().any(|kind| kind == "outcome"), "{:?}", left.last());
        assert!(left.iter().all(|kind| kind != "unknown"));
    }

    #[test]
    fn what_waited_for_the_disk_goes_there_in_pieces() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let metrics = Arc::new(Metrics::default());
        let journal = Journal::new(Place::Folder(folder.path().into()), Arc::clone(&metrics));
        runtime.block_on(journal.intend(intent(), true)).unwrap();
        let file = folder.path().join("journal-00.sqlite");
        let away = file.with_extension("away");
        std::fs::rename(&file, &away).unwrap();
        for _ in 0..4 * BATCH_RECORDS {
            journal.append(outcome());
        }
        assert!(runtime.block_on(journal.sync()).is_err());
        std::fs::rename(&away, &file).unwrap();
        while runtime.block_on(journal.sync()).is_err() {
            std::thread::sleep(RETRY / 10);
        }
        let (commits, records) = metrics.commits();
        assert!(commits >= 5 && records == 1 + 4 * BATCH_RECORDS as u64, "{commits}, {records}");
    }

    #[test]
    fn what_is_left_is_committed_before_the_file_is_closed() {
        let left = left_after(|journal, _| {
            // More than one batch has room for.
            for _ in 0..PENDING_RECORDS_MAX + 10 {
                journal.append(outcome());
            }
            journal.close();
        });
        assert_eq!(left.len(), 1 + PENDING_RECORDS_MAX + 10);
    }
}
