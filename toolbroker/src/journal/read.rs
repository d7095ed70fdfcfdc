//! What a reader makes of the journals in a folder, while brokers write.
//!
//! A reader opens the files read-only and sees what was committed. For each
//! call it says what became of it; an intent without an end is a call still
//! out if its broker lives, and unknown if it does not. Deliberately absent is
//! closing such calls for good: that is the next broker's.

use std::collections::HashMap;
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use forge_protocol::RunId;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, Row, ffi};
use serde::Serialize;

use super::slot;
use super::store::{self, JournalError, readable};

/// What a reader waits for a file that is being set up.
const BUSY_TIME_MAX: Duration = Duration::from_secs(2);

/// The last moment that can be written, in microseconds since the Unix epoch.
const LAST_US: u64 = 253_402_300_799_000_000;

/// One call, as the journal knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CallEntry {
    /// The run.
    pub run_id: String,
    /// Its number in the run.
    pub call: u32,
    /// Whose run it is.
    pub principal: String,
    /// The tool.
    pub tool: String,
    /// What the operator says it does; not known of some refused calls.
    pub effect: Option<String>,
    /// The definition that the grant names.
    pub definition_sha256: Option<String>,
    /// SHA-256 of the request's bytes.
    pub arguments_sha256: Option<String>,
    /// When its intent was recorded, or its refusal, in microseconds since
    /// the Unix epoch.
    pub at_us: i64,
    /// What became of it.
    pub state: CallState,
    /// `ok`, or the code its program saw.
    pub code: Option<String>,
    /// When its end was recorded.
    pub ended_us: Option<i64>,
    /// From its arrival to its end.
    pub took_us: Option<i64>,
    /// Whether a credential was taken out of its result; not known of calls
    /// without one, and of records of the first release.
    pub credential_removed: Option<bool>,
    /// `caller` for a tool that the run's caller holds and carries out itself.
    pub held_by: Option<String>,
}

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CallState {
    /// It was dispatched and ended.
    Ended,
    /// It was not dispatched.
    Refused,
    /// Its broker lives and has not recorded an end.
    Out,
    /// It may have happened.
    Unknown,
}

impl CallState {
    fn as_str(self) -> &'static str {
        match self {
            Self::Ended => "ended",
            Self::Refused => "refused",
            Self::Out => "still out",
            Self::Unknown => "UNKNOWN",
        }
    }
}

/// The newest calls of all journals in this folder, or of one run, oldest
/// first; at most `last`. Beside them, why files were left out
/// that cannot be read: they cost no other.
///
/// # Errors
/// [`JournalError`] if there is no journal.
pub fn calls(
    folder: &Path,
    run: Option<RunId>,
    last: usize,
) -> Result<(Vec<CallEntry>, Vec<JournalError>), JournalError> {
    let files = slot::files(folder)
        .map_err(|source| JournalError::File { path: folder.to_owned(), source })?;
    if files.is_empty() {
        // No calls at all and a folder that is misspelt look the same.
        return Err(JournalError::Missing { folder: folder.to_owned() });
    }
    let (mut calls, mut left_out) = (Vec::new(), Vec::new());
    for (file, taken) in files {
        if store::is_cut_off(&file).unwrap_or(false) {
            left_out.push(JournalError::Damaged { path: file });
            continue;
        }
        let read = calls_of(&file, run, last, taken);
        // A broker that took it meanwhile has out what would be unknown.
        let read = match !taken && slot::is_taken(&file) {
            true => calls_of(&file, run, last, true),
            false => read,
        };
        match read {
            Ok(Some(in_file)) => calls.extend(in_file),
            Ok(None) => left_out.push(JournalError::Foreign { path: file }),
            Err(source) => left_out.push(JournalError::Database { path: file, source }),
        }
    }
    calls.sort_by(|a: &CallEntry, b| {
        (a.at_us, &a.run_id, a.call).cmp(&(b.at_us, &b.run_id, b.call))
    });
    // Each file gave as many.
    calls.drain(..calls.len().saturating_sub(last));
    Ok((calls, left_out))
}

/// `None` if this release cannot read the file.
fn calls_of(
    file: &Path,
    run: Option<RunId>,
    last: usize,
    taken: bool,
) -> rusqlite::Result<Option<Vec<CallEntry>>> {
    if file.metadata().is_ok_and(|metadata| metadata.len() == 0) {
        // A broker is about to set it up.
        return Ok(Some(Vec::new()));
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(file, flags)?;
    connection.busy_timeout(BUSY_TIME_MAX)?;
    match calls_in(connection, run, last, taken) {
        // A broker that lives has made room for the index, and writes.
        Err(error) if !taken && has_no_room_for_index(&error) => {
            calls_in(alone(file, flags)?, run, last, taken)
        }
        calls => calls,
    }
}

/// Whether the error says that the index of a write-ahead log, a file in the same
/// folder that readers make as well, finds no room there.
fn has_no_room_for_index(error: &rusqlite::Error) -> bool {
    let code = error.sqlite_error().map(|error| error.extended_code);
    matches!(code, Some(ffi::SQLITE_IOERR_SHMOPEN | ffi::SQLITE_IOERR_SHMSIZE))
}

/// Opens a file that nobody writes, with the index in memory. SQLite does that for who
/// is alone, and whoever only reads can show it by no lock, hence without any. Nothing
/// is tidied up at the end: a broker may have come.
fn alone(file: &Path, flags: OpenFlags) -> rusqlite::Result<Connection> {
    let connection = Connection::open_with_flags_and_vfs(file, flags, c"unix-none")?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    connection.pragma_update(None, "locking_mode", "exclusive")?;
    Ok(connection)
}

fn calls_in(
    mut connection: Connection,
    run: Option<RunId>,
    last: usize,
    taken: bool,
) -> rusqlite::Result<Option<Vec<CallEntry>>> {
    // One view of the file for all that is asked.
    let view = connection.transaction()?;
    let Some(says) = readable(&view)? else { return Ok(None) };
    let redacted = if says.redacted { "redacted" } else { "NULL" };
    let held_by = if says.held_by { "held_by" } else { "NULL" };
    let run = run.map(|run| run.0.to_vec());
    let last = i64::try_from(last).unwrap_or(i64::MAX);
    let first: Option<i64> = view.query_row(
        "SELECT min(seq) FROM (SELECT seq FROM records WHERE kind IN ('intent', 'refusal')
         AND (?1 IS NULL OR run = ?1) ORDER BY seq DESC LIMIT ?2)",
        rusqlite::params![run, last],
        |row| row.get(0),
    )?;
    let Some(first) = first else { return Ok(Some(Vec::new())) };
    let mut select = view.prepare(&format!(
        "SELECT kind, run, call, at_us, principal, tool, effect, definition, arguments, code,
         took_us, {redacted}, {held_by} FROM records
         WHERE seq >= ?1 AND call IS NOT NULL AND (?2 IS NULL OR run = ?2) ORDER BY seq"
    ))?;
    let mut rows = select.query(rusqlite::params![first, run])?;
    let mut calls: Vec<CallEntry> = Vec::new();
    let mut by_number: HashMap<([u8; 16], u32), usize> = HashMap::new();
    while let Some(row) = rows.next()? {
        let key = (row.get(1)?, row.get(2)?);
        let kind: String = row.get(0)?;
        let known = by_number.get(&key).and_then(|at| calls.get_mut(*at));
        match (kind.as_str(), known) {
            ("intent" | "refusal", None) => {
                let mut entry = entry(row, key)?;
                if kind == "refusal" {
                    end(&mut entry, CallState::Refused, row)?;
                } else if !taken {
                    entry.state = CallState::Unknown;
                }
                by_number.insert(key, calls.len());
                calls.push(entry);
            }
            ("refusal", Some(entry)) => end(entry, CallState::Refused, row)?,
            (_, Some(entry)) => {
                let code: String = row.get(9)?;
                let unknown = code == forge_protocol::abi::CallCode::OutcomeUnknown.as_str();
                let state = if unknown { CallState::Unknown } else { CallState::Ended };
                end(entry, state, row)?;
            }
            // The end of a call that began before the first one asked for.
            (_, None) => {}
        }
    }
    Ok(Some(calls))
}

fn entry(row: &Row<'_>, (run, call): ([u8; 16], u32)) -> rusqlite::Result<CallEntry> {
    let hex = |column| -> rusqlite::Result<Option<String>> {
        Ok(row.get::<_, Option<Vec<u8>>>(column)?.map(|bytes| crate::hex(&bytes)))
    };
    Ok(CallEntry {
        run_id: RunId(run).to_string(),
        call,
        principal: row.get::<_, Option<String>>(4)?.unwrap_or_default(),
        tool: row.get::<_, Option<String>>(5)?.unwrap_or_default(),
        effect: row.get(6)?,
        definition_sha256: hex(7)?,
        arguments_sha256: hex(8)?,
        at_us: row.get(3)?,
        state: CallState::Out,
        code: None,
        ended_us: None,
        took_us: None,
        credential_removed: None,
        held_by: row.get(12)?,
    })
}

fn end(entry: &mut CallEntry, state: CallState, row: &Row<'_>) -> rusqlite::Result<()> {
    entry.state = state;
    entry.ended_us = row.get(3)?;
    entry.code = row.get(9)?;
    entry.took_us = row.get(10)?;
    entry.credential_removed = row.get(11)?;
    Ok(())
}

/// Writes calls for a reader, one a line, and says loudly at the end how many
/// are unknown.
///
/// # Errors
/// What writing gives.
pub fn print(calls: &[CallEntry], out: &mut impl Write) -> io::Result<()> {
    for call in calls {
        let at_us = call.at_us.unsigned_abs().min(LAST_US);
        let at = UNIX_EPOCH + Duration::from_micros(at_us);
        write!(
            out,
            "{}  {}  {:>5}  {:<5}  {:<9}  {}  {}",
            humantime::format_rfc3339_micros(at),
            call.run_id,
            call.call,
            call.effect.as_deref().unwrap_or("-").escape_debug(),
            call.state.as_str(),
            call.principal.escape_debug(),
            call.tool.escape_debug(),
        )?;
        match (call.code.as_deref().map(str::escape_debug), call.took_us) {
            (Some(code), Some(us)) => write!(out, "  {code}, {us} us")?,
            (Some(code), None) => write!(out, "  {code}")?,
            (None, _) => {}
        }
        if call.credential_removed == Some(true) {
            write!(out, ", credential removed")?;
        }
        if let Some(who) = &call.held_by {
            write!(out, ", held by the {}", who.escape_debug())?;
        }
        writeln!(out)?;
    }
    let unknown = calls.iter().filter(|call| call.state == CallState::Unknown).count();
    if unknown > 0 {
        writeln!(
            out,
            "{unknown} UNKNOWN: these calls may have happened. Nothing repeats them; look at the \
             tool's own system before you do."
        )?;
    }
    Ok(())
}
