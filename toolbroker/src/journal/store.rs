//! One journal file: its tables, what opening it closes, and commits.
//!
//! `records` is only ever appended to, and bounded: where there are more than
//! [`RECORDS_MAX`], the oldest leave of the principal that has most, so that none takes
//! another's. `sessions` has a row for each broker
//! that had the file. One that is not closed when the next broker opens the
//! file died, and its calls without an end are closed as unknown.
//!
//! Every commit waits for the disk (`synchronous = FULL`). Deliberately absent
//! is making a file anew that somebody took away: until the broker is started
//! again, it has no journal.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forge_protocol::RunId;
use forge_protocol::abi::CallCode;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, Transaction, TransactionBehavior, params};

use super::record::{CallFacts, Close, Event, Record, now_us};
use super::slot::Slot;

/// Records that one file keeps, some 200 MB. A run of 10,000 calls leaves
/// 20,002.
pub const RECORDS_MAX: i64 = 1_000_000;
/// Says to SQLite's own tools whose file it is: `fjnl`.
const APPLICATION_ID: i32 = 0x666a_6e6c;
/// The tables below, after all of [`UPGRADES`].
const SCHEMA_VERSION: i32 = 4;
/// What makes a file of each earlier version, from 1 on, one of the next. A
/// broker that takes such a file does it; a reader reads it as it is.
const UPGRADES: [&str; SCHEMA_VERSION as usize - 1] = [
    "ALTER TABLE records ADD COLUMN redacted INTEGER",
    "ALTER TABLE records ADD COLUMN held_by TEXT",
    "CREATE INDEX named ON records (run) WHERE principal IS NOT NULL;
     UPDATE records SET principal = coalesce((SELECT named.principal FROM records AS named
         WHERE named.run = records.run AND named.principal IS NOT NULL LIMIT 1), '')
         WHERE principal IS NULL;
     DROP INDEX named;
     CREATE INDEX of_principals ON records (principal, seq);",
];
/// What `held_by` says of a call that the run's caller carries out.
pub(super) const HELD_BY_CALLER: &str = "caller";
/// A reader may hold the file this long while a log is folded into it.
const BUSY_TIME_MAX: Duration = Duration::from_secs(1);
/// The write-ahead log is cut back to this when it is folded in, in bytes.
const LOG_BYTES_KEPT: i64 = 4 * 1024 * 1024;

const SCHEMA: &str = "
    CREATE TABLE sessions (
        id INTEGER PRIMARY KEY,
        opened_us INTEGER NOT NULL,
        first_seq INTEGER NOT NULL,
        closed_us INTEGER
    ) STRICT;
    CREATE TABLE records (
        seq INTEGER PRIMARY KEY,
        at_us INTEGER NOT NULL,
        kind TEXT NOT NULL,
        run BLOB NOT NULL,
        call INTEGER,
        principal TEXT,
        tool TEXT,
        definition BLOB,
        effect TEXT,
        arguments BLOB,
        code TEXT,
        took_us INTEGER,
        response_bytes INTEGER,
        program BLOB,
        redacted INTEGER,
        held_by TEXT
    ) STRICT;
    CREATE INDEX of_principals ON records (principal, seq);";

const INSERT: &str = "INSERT OR IGNORE INTO records
    (seq, at_us, kind, run, call, principal, tool, definition, effect, arguments, code, took_us,
     response_bytes, program, redacted, held_by)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16)";

/// Why the journal cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// No broker has written here.
    #[error(
        "{}: there is no journal: no call was made with this state folder yet, or it is another \
         (--state)",
        folder.display()
    )]
    Missing {
        /// Where it would be.
        folder: PathBuf,
    },
    /// The folder or a file in it.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// SQLite says no: the disk is full, or the file is damaged.
    #[error("{}: {source}", path.display())]
    Database {
        /// The journal file.
        path: PathBuf,
        /// Why.
        source: rusqlite::Error,
    },
    /// The file is no journal of ours, or another release's.
    #[error(
        "{}: no journal that this release can use: move it away, or use another --state",
        path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// What is in the file cannot be read any more.
    #[error(
        "{}: the journal is damaged: move it away with the files beside it (`sqlite3 FILE \
         .recover` reads what is left), or use another --state",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
    },
    /// The file that is open is no longer the one at its path, or not all of it is
    /// there.
    #[error(
        "{}: the journal was moved, deleted or cut off under the broker: start the broker again",
        path.display()
    )]
    Gone {
        /// Where it was.
        path: PathBuf,
    },
}

/// An open journal file.
#[derive(Debug)]
pub struct Store {
    slot: Slot,
    connection: Connection,
    /// So that another file at its path is noticed, and one that was cut off: SQLite never
    /// makes it smaller.
    file: Standing,
    /// The same of the log beside it, which has what was committed last. A commit of ours alone
    /// makes that smaller; nobody else is to fold it in and cut it off.
    log: Standing,
    session: i64,
    next_seq: i64,
    /// Of what is kept. None after a commit that failed: what of it is there is not known.
    counts: Option<Counts>,
    /// So many are kept.
    records_max: i64,
}

/// How many records of each principal there are. Whoever speaks for many users may name
/// each of them, so nothing here is looked for among all.
#[derive(Debug, Default)]
struct Counts {
    of: HashMap<Arc<str>, i64>,
    /// The same, the fewest first.
    by_count: BTreeSet<(i64, Arc<str>)>,
    all: i64,
}

/// Records of one principal that leave at once, at least, as far as that is not more than
/// half of them: where two have the same, not each record costs a statement.
const LEAVING_MIN: i64 = 64;

impl Counts {
    fn read(connection: &Connection) -> rusqlite::Result<Self> {
        let mut select =
            connection.prepare("SELECT principal, count(*) FROM records GROUP BY principal")?;
        let mut rows = select.query([])?;
        let mut counts = Self::default();
        while let Some(row) = rows.next()? {
            counts.add(&row.get::<_, String>(0)?, row.get(1)?);
        }
        Ok(counts)
    }

    /// There are so many more of its records, or fewer.
    fn add(&mut self, principal: &str, records: i64) {
        let known = self.of.remove_entry(principal);
        let (name, before) = known.unwrap_or_else(|| (principal.into(), 0));
        let mut place = (before, name);
        self.by_count.remove(&place);
        place.0 += records;
        self.all += records;
        if place.0 > 0 {
            self.of.insert(Arc::clone(&place.1), place.0);
            self.by_count.insert(place);
        }
    }

    /// Whose records leave next, and how many, where no more than `most` are kept.
    fn leaving(&self, most: i64) -> Option<(Arc<str>, i64)> {
        let over = self.all - most;
        let mut from_most = self.by_count.iter().rev();
        let (count, principal) = from_most.next().filter(|_| over > 0)?;
        let second = from_most.next().map_or(0, |(count, _)| *count);
        let at_least = LEAVING_MIN.min(count / 2).max(1);
        let leaving = (count - second).max(at_least).min(over).min(*count);
        Some((Arc::clone(principal), leaving))
    }
}

impl Store {
    /// Takes a file in this folder, opens it and closes what the broker
    /// before left open.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn open(folder: &Path) -> Result<Self, JournalError> {
        Self::keeping(folder, RECORDS_MAX)
    }

    fn keeping(folder: &Path, records_max: i64) -> Result<Self, JournalError> {
        let slot = Slot::take(folder)
            .map_err(|source| JournalError::File { path: folder.to_owned(), source })?;
        let at = |source| JournalError::File { path: slot.file.clone(), source };
        slot.make_private().map_err(at)?;
        let identity = Standing::of(&slot.file).map_err(at)?.identity;
        let path = slot.file.clone();
        let failed = |source| database(&path, source);
        if is_cut_off(&slot.file).map_err(at)? {
            return Err(JournalError::Damaged { path });
        }
        let mut connection = connect(&slot.file).map_err(failed)?;
        make_ready(&mut connection, &slot.file)?;
        let bytes_min = slot.file.metadata().map_err(at)?.len();
        let file = Standing { identity, bytes_min };
        let (session, next_seq) = begin_session(&mut connection).map_err(failed)?;
        let log = log_of(&slot.file);
        let log = Standing::of(&log)
            .map_err(|source| JournalError::File { path: log.clone(), source })?;
        let counts = Some(Counts::read(&connection).map_err(failed)?);
        Ok(Self { slot, connection, file, log, session, next_seq, counts, records_max })
    }

    /// Opens the same file again after it failed, for the same session.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn reopen(&mut self) -> Result<(), JournalError> {
        self.check_files()?;
        let mut connection = connect(&self.slot.file).map_err(|e| database(&self.slot.file, e))?;
        make_ready(&mut connection, &self.slot.file)?;
        self.connection = connection;
        Ok(())
    }

    /// That what is committed goes into the files at their paths, and that all is there which
    /// was: a commit into a file without a name would be lost with the process, and what a
    /// log has that was cut off as soon as anybody reads it anew.
    fn check_files(&self) -> Result<(), JournalError> {
        self.file.check(&self.slot.file)?;
        self.log.check(&log_of(&self.slot.file))
    }

    /// Puts records on the disk, all or none. After an error the same batch
    /// may be given again.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn commit(&mut self, batch: &[Record]) -> Result<(), JournalError> {
        self.check_files()?;
        let failed = |source| database(&self.slot.file, source);
        let mut counts = match self.counts.take() {
            Some(counts) => counts,
            None => Counts::read(&self.connection).map_err(failed)?,
        };
        // From here on SQLite may cut the log back.
        self.log.bytes_min = 0;
        let next_seq =
            insert(&mut self.connection, self.next_seq, batch, &mut counts, self.records_max)
                .map_err(failed)?;
        self.check_files()?;
        let log = log_of(&self.slot.file);
        self.log = Standing::of(&log)
            .map_err(|source| JournalError::File { path: log.clone(), source })?;
        (self.next_seq, self.counts) = (next_seq, Some(counts));
        Ok(())
    }

    /// Says that this broker left in good order.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn close(self) -> Result<(), JournalError> {
        self.connection
            .execute(
                "UPDATE sessions SET closed_us = ?1 WHERE id = ?2",
                params![number(now_us()), self.session],
            )
            .and_then(|_| self.connection.close().map_err(|(_, source)| source))
            .map_err(|source| database(&self.slot.file, source))
    }

    /// Leaves the file as a broker does that dies: its session is open, and
    /// its log is there for the next one to see ([`Slot::take`]).
    pub fn leave(self) {
        // Otherwise closing it would take the log away.
        let kept = DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE;
        if let Err(error) = self.connection.set_db_config(kept, true) {
            tracing::warn!(%error, "the journal's log may not be kept");
        }
    }
}

fn database(path: &Path, source: rusqlite::Error) -> JournalError {
    let path = path.to_owned();
    match source.sqlite_error_code() {
        Some(rusqlite::ErrorCode::DatabaseCorrupt) => JournalError::Damaged { path },
        Some(rusqlite::ErrorCode::NotADatabase) => JournalError::Foreign { path },
        _ => JournalError::Database { path, source },
    }
}

/// A file that is at its path, and not smaller than it was.
#[derive(Clone, Copy, Debug)]
struct Standing {
    identity: (u64, u64),
    bytes_min: u64,
}

impl Standing {
    /// Of the file itself: a link at its path is another one.
    fn of(path: &Path) -> io::Result<Self> {
        let metadata = path.symlink_metadata()?;
        Ok(Self { identity: (metadata.dev(), metadata.ino()), bytes_min: metadata.len() })
    }

    fn check(self, path: &Path) -> Result<(), JournalError> {
        let path = path.to_owned();
        match Self::of(&path) {
            Ok(found) if found.identity == self.identity && found.bytes_min >= self.bytes_min => {
                Ok(())
            }
            Ok(_) => Err(JournalError::Gone { path }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(JournalError::Gone { path })
            }
            Err(source) => Err(JournalError::File { path, source }),
        }
    }
}

/// Where SQLite has the write-ahead log of a file.
fn log_of(path: &Path) -> PathBuf {
    let mut log = path.as_os_str().to_owned();
    log.push("-wal");
    log.into()
}

/// Whether nothing is left of a file whose write-ahead log is there. SQLite takes it
/// for a new one, and drops the log.
pub(super) fn is_cut_off(path: &Path) -> io::Result<bool> {
    let has_log = log_of(path).metadata().is_ok_and(|log| log.len() > 0);
    Ok(has_log && path.metadata()?.len() == 0)
}

/// Writes from its first statement on. One that reads first does not wait for
/// [`BUSY_TIME_MAX`] when it comes to write: SQLite refuses it at once.
fn writing(connection: &mut Connection) -> rusqlite::Result<Transaction<'_>> {
    connection.transaction_with_behavior(TransactionBehavior::Immediate)
}

/// Never makes the file: it is made private first, elsewhere.
fn connect(path: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_NO_MUTEX
        | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY_TIME_MAX)?;
    Ok(connection)
}

fn make_ready(connection: &mut Connection, path: &Path) -> Result<(), JournalError> {
    let failed = |source| database(path, source);
    let version = (|| {
        connection.pragma_update(None, "trusted_schema", false)?;
        connection.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.query_row(
            &format!("PRAGMA journal_size_limit = {LOG_BYTES_KEPT}"),
            [],
            |_| Ok(()),
        )?;
        version_of(connection)
    })();
    match version.map_err(failed)? {
        (APPLICATION_ID, SCHEMA_VERSION) => Ok(()),
        (0, 0) if is_empty(connection).map_err(failed)? => {
            let transaction = writing(connection).map_err(failed)?;
            transaction
                .execute_batch(SCHEMA)
                .and_then(|()| transaction.pragma_update(None, "application_id", APPLICATION_ID))
                .and_then(|()| transaction.pragma_update(None, "user_version", SCHEMA_VERSION))
                .and_then(|()| transaction.commit())
                .map_err(failed)
        }
        (APPLICATION_ID, version) if (1..SCHEMA_VERSION).contains(&version) => {
            upgrade(connection, version).map_err(failed)
        }
        _ => Err(JournalError::Foreign { path: path.to_owned() }),
    }
}

/// Makes a file of an earlier version one of this, all steps or none. Nobody
/// else writes it: its slot is ours.
fn upgrade(connection: &mut Connection, version: i32) -> rusqlite::Result<()> {
    let transaction = writing(connection)?;
    for step in &UPGRADES[version as usize - 1..] {
        transaction.execute_batch(step)?;
    }
    transaction.pragma_update(None, "user_version", SCHEMA_VERSION)?;
    transaction.commit()
}

fn is_empty(connection: &Connection) -> rusqlite::Result<bool> {
    connection.query_row("SELECT count(*) = 0 FROM sqlite_schema", [], |row| row.get(0))
}

fn version_of(connection: &Connection) -> rusqlite::Result<(i32, i32)> {
    let one = |pragma: &str| connection.pragma_query_value(None, pragma, |row| row.get(0));
    Ok((one("application_id")?, one("user_version")?))
}

/// What the records of a file say that an earlier release's did not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Says {
    /// Whether something was redacted.
    pub(super) redacted: bool,
    /// Who holds a call's tool.
    pub(super) held_by: bool,
}

/// Whether this release can read the file, and then what its records say.
pub(super) fn readable(connection: &Connection) -> rusqlite::Result<Option<Says>> {
    let (application, version) = version_of(connection)?;
    let is_ours = application == APPLICATION_ID && (1..=SCHEMA_VERSION).contains(&version);
    Ok(is_ours.then_some(Says { redacted: version >= 2, held_by: version >= 3 }))
}

/// Closes what dead brokers left, and begins a session: its number and that
/// of the next record.
fn begin_session(connection: &mut Connection) -> rusqlite::Result<(i64, i64)> {
    let transaction = writing(connection)?;
    let mut next_seq: i64 =
        transaction
            .query_row("SELECT coalesce(max(seq), 0) + 1 FROM records", [], |row| row.get(0))?;
    let left_open: Option<i64> = transaction.query_row(
        "SELECT min(first_seq) FROM sessions WHERE closed_us IS NULL",
        [],
        |row| row.get(0),
    )?;
    if let Some(first_seq) = left_open {
        let left = left_open_since(&transaction, first_seq)?;
        let at_us = now_us();
        let mut insert = transaction.prepare(INSERT)?;
        for ((run, call), principal) in &left.calls {
            let (run, principal) = (*run, Arc::clone(principal));
            let record = Record { run, principal, at_us, event: Event::Unknown { call: *call } };
            add(&mut insert, next_seq, &record)?;
            next_seq += 1;
        }
        for (run, principal) in &left.runs {
            let (run, principal) = (*run, Arc::clone(principal));
            let event = Event::Closed { how: Close::Lost };
            let record = Record { run, principal, at_us, event };
            add(&mut insert, next_seq, &record)?;
            next_seq += 1;
        }
        drop(insert);
        if !left.calls.is_empty() {
            tracing::warn!(
                calls = left.calls.len(),
                "a broker died while calls were out: they are journalled as unknown, and not \
                 repeated"
            );
        }
    }
    // All of them are dealt with, and none is needed any more.
    transaction.execute("DELETE FROM sessions", [])?;
    transaction.execute(
        "INSERT INTO sessions (opened_us, first_seq) VALUES (?1, ?2)",
        params![number(now_us()), next_seq],
    )?;
    let session = transaction.last_insert_rowid();
    transaction.commit()?;
    Ok((session, next_seq))
}

/// With whose they are.
struct LeftOpen {
    calls: BTreeMap<(RunId, u32), Arc<str>>,
    runs: HashMap<RunId, Arc<str>>,
}

/// Calls and runs without an end.
fn left_open_since(connection: &Connection, first_seq: i64) -> rusqlite::Result<LeftOpen> {
    let mut left = LeftOpen { calls: BTreeMap::new(), runs: HashMap::new() };
    let mut select = connection
        .prepare("SELECT kind, run, call, principal FROM records WHERE seq >= ?1 ORDER BY seq")?;
    let mut rows = select.query([first_seq])?;
    while let Some(row) = rows.next()? {
        let (run, call): ([u8; 16], Option<u32>) = (row.get(1)?, row.get(2)?);
        let (run, call) = (RunId(run), call.unwrap_or_default());
        match row.get_ref(0)?.as_str()? {
            "opened" => drop(left.runs.insert(run, row.get::<_, String>(3)?.into())),
            "closed" => drop(left.runs.remove(&run)),
            "intent" => drop(left.calls.insert((run, call), row.get::<_, String>(3)?.into())),
            _ => drop(left.calls.remove(&(run, call))),
        }
    }
    Ok(left)
}

/// Inserts a batch in one transaction: the number of the next record.
fn insert(
    connection: &mut Connection,
    mut next_seq: i64,
    batch: &[Record],
    counts: &mut Counts,
    records_max: i64,
) -> rusqlite::Result<i64> {
    let transaction = writing(connection)?;
    let mut insert = transaction.prepare(INSERT)?;
    for record in batch {
        // None where an earlier try left it there.
        let added = add(&mut insert, next_seq, record)?;
        counts.add(&record.principal, added);
        next_seq += 1;
    }
    drop(insert);
    let mut delete = transaction.prepare(
        "DELETE FROM records WHERE seq IN
         (SELECT seq FROM records WHERE principal = ?1 ORDER BY seq LIMIT ?2)",
    )?;
    while let Some((principal, leaving)) = counts.leaving(records_max) {
        delete.execute(params![&*principal, leaving])?;
        counts.add(&principal, -leaving);
    }
    drop(delete);
    transaction.commit()?;
    Ok(next_seq)
}

fn add(
    insert: &mut rusqlite::Statement<'_>,
    seq: i64,
    Record { run, principal, at_us, event }: &Record,
) -> rusqlite::Result<i64> {
    let none: Option<&CallFacts> = None;
    let (kind, call, facts, code, took_us, response_bytes) = match event {
        Event::Opened { .. } => ("opened", None, none, None, None, None),
        Event::Intent(facts) => ("intent", Some(facts.call), Some(facts), None, None, None),
        Event::Refusal { call, code } => {
            ("refusal", Some(call.call), Some(call), Some(code.as_str()), None, None)
        }
        Event::Outcome { call, code, took_us, response_bytes, redacted: _ } => {
            let code = code.map_or("ok", CallCode::as_str);
            let (took_us, bytes) = (number(*took_us), number(*response_bytes));
            ("outcome", Some(*call), None, Some(code), Some(took_us), Some(bytes))
        }
        Event::Unknown { call } => {
            let code = CallCode::OutcomeUnknown.as_str();
            ("unknown", Some(*call), None, Some(code), None, None)
        }
        Event::Closed { how } => ("closed", None, None, Some(how.as_str()), None, None),
    };
    let program = match event {
        Event::Opened { program_sha256 } => Some(program_sha256),
        _ => None,
    };
    let redacted = match event {
        Event::Outcome { redacted, .. } => Some(*redacted),
        _ => None,
    };
    let added = insert.execute(params![
        seq,
        number(*at_us),
        kind,
        &run.0[..],
        call,
        &**principal,
        facts.map(|facts| facts.tool.as_str()),
        facts.and_then(|facts| facts.definition_sha256.as_ref()).map(|digest| &digest[..]),
        facts.and_then(|facts| facts.effect).map(|effect| effect.as_str()),
        facts.and_then(|facts| facts.arguments_sha256.as_ref()).map(|digest| &digest[..]),
        code,
        took_us,
        response_bytes,
        program.map(|digest| &digest[..]),
        redacted,
        facts.and_then(|facts| facts.held_by_caller.then_some(HELD_BY_CALLER)),
    ])?;
    Ok(i64::from(added > 0))
}

/// SQLite's integers are signed.
fn number(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(principal: &str, run: u8, count: u32) -> Vec<Record> {
        let event = |call| Event::Unknown { call };
        (0..count)
            .map(|call| Record::now(RunId([run; 16]), principal.into(), event(call)))
            .collect()
    }

    /// How many there are of each, and the first call that is left of the principal's.
    fn left(store: &Store, principal: &str) -> (i64, u32) {
        let of = "SELECT count(*), coalesce(min(call), 0) FROM records WHERE principal = ?1";
        let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?));
        store.connection.query_row(of, [principal], read).unwrap()
    }

    #[test]
    fn the_oldest_leave_of_the_principal_that_has_most() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::keeping(folder.path(), 1_000).unwrap();
        store.commit(&records("alice", 1, 20)).unwrap();
        for _ in 0..5 {
            store.commit(&records("mallory", 2, 1_000)).unwrap();
        }
        assert_eq!(left(&store, "alice"), (20, 0));
        assert_eq!(left(&store, "mallory"), (980, 20));
        // What it counted is what there is, also for the next broker.
        store.close().unwrap();
        let mut store = Store::keeping(folder.path(), 1_000).unwrap();
        store.commit(&records("bob", 3, 490)).unwrap();
        assert_eq!((left(&store, "mallory").0, left(&store, "bob").0), (490, 490));
        store.commit(&records("bob", 3, 10)).unwrap();
        assert_eq!(left(&store, "alice"), (20, 0));
        let all: i64 = ["alice", "mallory", "bob"].map(|it| left(&store, it).0).iter().sum();
        assert_eq!(all, 1_000);
    }

    #[test]
    fn of_many_who_have_little_none_loses_all() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::keeping(folder.path(), 200).unwrap();
        for round in 0..30 {
            for principal in ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"] {
                store.commit(&records(principal, round, 1)).unwrap();
            }
        }
        for principal in ["a", "e", "j"] {
            assert!((10..=30).contains(&left(&store, principal).0), "{principal}");
        }
    }

    #[test]
    fn a_batch_that_was_there_all_the_same_is_counted_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::keeping(folder.path(), 100).unwrap();
        let batch = records("alice", 1, 60);
        // The commit that failed late.
        let mut counts = store.counts.take().unwrap();
        insert(&mut store.connection, store.next_seq, &batch, &mut counts, 100).unwrap();
        store.reopen().unwrap();
        store.commit(&batch).unwrap();
        let counts = store.counts.as_ref().unwrap();
        assert_eq!((counts.all, counts.of["alice"], counts.by_count.len()), (60, 60, 1));
        store.commit(&records("alice", 2, 60)).unwrap();
        assert_eq!(left(&store, "alice").0, 100);
    }

    #[test]
    fn one_principal_alone_keeps_its_newest() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::keeping(folder.path(), 100).unwrap();
        store.commit(&records("alice", 1, 250)).unwrap();
        assert_eq!(left(&store, "alice"), (100, 150));
    }

    /// Only power that fails would show it.
    #[test]
    fn what_is_committed_is_on_the_disk() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        let asked = store.connection.pragma_query_value(None, "synchronous", |row| row.get(0));
        // FULL (sqlite.org/pragma.html).
        assert_eq!(asked, Ok(2));
    }
}
