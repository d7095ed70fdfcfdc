//! The journal as it is when things go wrong: the real broker process, killed
//! at any moment, on a real file that is taken away from it.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::fs::{File, OpenOptions, Permissions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use forge_protocol::RunId;
use forge_protocol::abi::CallCode;
use forge_protocol::broker::{Authority, RefusalKind, Reply, Request};
use forge_protocol::codec::decode;
use forge_protocol::guest::Settled;
use forge_protocol::limits::RunLimits;
use rusqlite::{Connection, OpenFlags};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, mount_remount, unmount,
};
use serde_json::{Value, json};
use support::{Broker, CANARY, Worker, name, receive, run_request, test_server, wait};

const HASH: &[u8] = br#"{"algorithm": "sha256", "text": "abc"}"#;

fn limits() -> RunLimits {
    RunLimits { wall_ms: 60_000, ..RunLimits::default() }
}

/// A folder with a journal in it, a test server's log, and any number of
/// brokers one after another.
struct Desk(tempfile::TempDir);

impl Drop for Desk {
    /// A folder that something is mounted over cannot be removed.
    fn drop(&mut self) {
        let _ = unmount(self.journal(), UnmountFlags::DETACH);
    }
}

impl Desk {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn journal(&self) -> PathBuf {
        self.0.path().join("journal")
    }

    fn broker(&self) -> Broker {
        self.broker_with(&self.journal())
    }

    fn broker_with(&self, journal: &Path) -> Broker {
        let log = self.0.path().join("calls");
        // A server may write what its command line names, if it is there.
        let opened = OpenOptions::new().create(true).append(true).open(&log).unwrap();
        opened.set_permissions(Permissions::from_mode(0o666)).unwrap();
        let config = json!({"mcpServers": {"test": {
            "command": test_server(), "args": ["--log", log], "env": {"TEST_TOKEN": CANARY},
        }}});
        let journal = ["--journal", journal.to_str().unwrap()];
        Broker::start_in(tempfile::tempdir().unwrap(), &config, &journal)
    }

    /// What the server did, in order.
    fn done(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.0.path().join("calls")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn wait_until_done(&self, what: &str) {
        let until = std::time::Instant::now() + support::PATIENCE;
        while !self.done().iter().any(|done| done == what) {
            assert!(std::time::Instant::now() < until, "{what:?} was never done");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Waits until so many records of this kind and round are on the disk.
    fn wait_for(&self, count: usize, kind: &str, round: u16) {
        let until = std::time::Instant::now() + support::PATIENCE;
        let is_one = |row: &Row| row.kind == kind && row.run == run_of(round).0;
        while self.records().iter().filter(|row| is_one(row)).count() < count {
            assert!(std::time::Instant::now() < until, "not every {kind} of round {round} comes");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = std::fs::read_dir(self.journal())
            .map(|entries| entries.map(|entry| entry.unwrap().path()).collect())
            .unwrap_or_default();
        files.retain(|path| path.extension().is_some_and(|it| it == "sqlite"));
        files.sort();
        files
    }

    /// All records as they are on the disk now.
    fn records(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for file in self.files() {
            let flags = OpenFlags::SQLITE_OPEN_READ_ONLY;
            let connection = Connection::open_with_flags(file, flags).unwrap();
            let mut select = connection
                .prepare("SELECT kind, run, call, code, effect, tool FROM records ORDER BY seq")
                .unwrap();
            let read = select.query_map([], |row| {
                Ok(Row {
                    kind: row.get(0)?,
                    run: row.get(1)?,
                    call: row.get(2)?,
                    code: row.get(3)?,
                    effect: row.get(4)?,
                    tool: row.get(5)?,
                })
            });
            rows.extend(read.unwrap().map(Result::unwrap));
        }
        rows
    }

    fn kinds(&self) -> Vec<String> {
        self.records().into_iter().map(|row| row.kind).collect()
    }

    /// What `journal list --json` says.
    fn listed(&self) -> Vec<Value> {
        let output = self.list(&["--json", "--last", "1000000"]);
        serde_json::from_str(&output).unwrap()
    }

    fn listing(&self, more: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_forge-toolbroker"))
            .args(["journal", "list", "--journal"])
            .arg(self.journal())
            .args(more)
            .output()
            .unwrap()
    }

    fn list(&self, more: &[&str]) -> String {
        let output = self.listing(more);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

#[derive(Clone, Debug)]
struct Row {
    kind: String,
    run: [u8; 16],
    call: Option<u32>,
    code: Option<String>,
    effect: Option<String>,
    tool: Option<String>,
}

fn open(broker: &mut Broker, id: u8, tools: &[&str], limits: RunLimits) -> Worker {
    open_as(broker, RunId([id; 16]), tools, limits)
}

fn open_as(broker: &mut Broker, run: RunId, tools: &[&str], limits: RunLimits) -> Worker {
    let tools = tools.iter().map(|tool| name(tool)).collect();
    let mut request = run_request("alice", Authority::Tools(tools), limits);
    request.run_id = run;
    broker.open(request).unwrap().0
}

fn kill(mut broker: Broker) {
    broker.child.kill().unwrap();
    wait(&mut broker.child);
}

fn sync(broker: &mut Broker) {
    assert_eq!(broker.ask(&Request::Sync), Reply::Synced);
}

/// Small, seeded, and the same everywhere.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % bound
    }
}

/// Calls of a run that is killed, in flight at the same time.
const CALLS: u32 = 4;
/// The run after all kills.
const LAST: u16 = u16::MAX;

/// Each round has a run.
fn run_of(round: u16) -> RunId {
    let mut id = [0; 16];
    id[..2].copy_from_slice(&round.to_le_bytes());
    RunId(id)
}

#[test]
fn a_broker_killed_at_any_moment_loses_nothing_and_does_nothing_twice() {
    let rounds: u16 =
        std::env::var("FORGE_KILL_ROUNDS").map_or(60, |rounds| rounds.parse().unwrap());
    let desk = Desk::new();
    let mut dice = Dice(0x5EED);
    let (mut synced, mut told) = (BTreeSet::new(), BTreeSet::new());
    for round in 0..rounds {
        // Nothing gets to the disk before this is dropped.
        let held = (round % 8 == 7).then(|| held_by_another(&desk.files()[0]));
        let mut broker = desk.broker();
        let mut worker = open_as(&mut broker, run_of(round), &["test.note"], limits());
        if round % 8 == 6 {
            stop_servers(&broker);
        }
        for call in 0..CALLS {
            let request = json!({ "text": format!("{round}-{call}") }).to_string();
            worker.send("test.note", request.as_bytes());
        }
        let mut settled = |worker: &mut Worker| {
            let settled = worker.settled();
            assert_eq!(settled.code, None);
            told.insert((round, settled.id));
        };
        match round % 8 {
            // Before, between and behind the server's start.
            0 => std::thread::sleep(Duration::from_micros(dice.below(60_000))),
            // The server did something that nobody was told of.
            1 => desk.wait_until_done(&format!("note {round}-{}", dice.below(CALLS.into()))),
            // Some are told and some are not.
            2 => settled(&mut worker),
            // Its end is on the disk, and nobody asked for that.
            3 => {
                settled(&mut worker);
                desk.wait_for(1, "outcome", round);
            }
            // Between the first of them and the group commit.
            4 => {
                desk.wait_until_done(&format!("note {round}-0"));
                std::thread::sleep(Duration::from_micros(dice.below(15_000)));
            }
            // All are told, and their run's result may leave.
            5 => {
                for _ in 0..CALLS {
                    settled(&mut worker);
                }
                sync(&mut broker);
                synced.insert(round);
            }
            // All are on their way to a server that does not take them.
            6 => desk.wait_for(CALLS as usize, "intent", round),
            // No intent is on the disk.
            _ => std::thread::sleep(Duration::from_micros(dice.below(20_000))),
        }
        kill(broker);
        drop(held);
        // What was sent before the kill was told.
        while let Some((_, payload)) = receive(&mut worker.link) {
            let settled: Settled = decode(&payload).unwrap();
            if settled.code.is_none() {
                told.insert((round, settled.id));
            }
        }
    }
    // The next broker closes what the last one left.
    let mut broker = desk.broker();
    let mut worker = open_as(&mut broker, run_of(LAST), &["crypto.hash"], limits());
    worker.send("crypto.hash", HASH);
    assert_eq!(worker.settled().code, None);
    drop(worker);
    assert!(broker.finish().0.success());
    account_for(&desk, &synced, &told, rounds);
}

/// Stops a broker's servers: they live, and take nothing.
fn stop_servers(broker: &Broker) {
    for server in support::server_processes(broker.child.id()) {
        let server = rustix::process::Pid::from_raw(server.try_into().unwrap()).unwrap();
        rustix::process::kill_process(server, rustix::process::Signal::STOP).unwrap();
    }
}

/// Keeps everybody else from writing to a journal.
fn held_by_another(file: &Path) -> Connection {
    let connection = Connection::open(file).unwrap();
    connection.busy_timeout(support::PATIENCE).unwrap();
    connection.execute_batch("BEGIN IMMEDIATE").unwrap();
    connection
}

#[test]
fn a_journal_that_another_holds_for_a_moment_is_waited_for() {
    let desk = Desk::new();
    // A broker that died leaves the next one something to close.
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 1, &["test.note"], limits());
    assert_eq!(worker.call("test.note", &json!({"text": "1"})).0, None);
    kill(broker);
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 2, &["test.note"], limits());
    let held = held_by_another(&desk.files()[0]);
    let holder = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        drop(held);
    });
    assert_eq!(worker.call("test.note", &json!({"text": "2"})).0, None);
    holder.join().unwrap();
}

/// Holds the journal against what the server did and what workers were told.
fn account_for(desk: &Desk, synced: &BTreeSet<u16>, told: &BTreeSet<(u16, u32)>, rounds: u16) {
    let mut done: BTreeMap<String, u32> = BTreeMap::new();
    for line in desk.done() {
        *done.entry(line).or_default() += 1;
    }
    let (mut intents, mut ends) = (BTreeSet::new(), BTreeMap::new());
    let (mut opened, mut closed) = (BTreeSet::new(), BTreeSet::new());
    for Row { kind, run, call, code, .. } in desk.records() {
        let key = (u16::from_le_bytes([run[0], run[1]]), call.unwrap_or_default());
        let fresh = match kind.as_str() {
            "intent" => intents.insert(key),
            "opened" => opened.insert(run),
            "closed" => closed.insert(run),
            _ => ends.insert(key, code.unwrap()).is_none(),
        };
        assert!(fresh, "{kind} of {key:?} stands twice");
    }
    for (line, times) in &done {
        assert_eq!(*times, 1, "{line:?} was done {times} times");
        let (round, call) = line.strip_prefix("note ").unwrap().split_once('-').unwrap();
        let key = (round.parse().unwrap(), call.parse().unwrap());
        assert!(intents.contains(&key), "{line:?} was done and no intent is on the disk");
    }
    assert_eq!(intents, ends.keys().copied().collect(), "each intent has one end");
    assert_eq!(opened, closed, "each run that is opened is closed");
    for ((round, call), code) in &ends {
        let was_done = done.contains_key(&format!("note {round}-{call}"));
        if code == "ok" && *round != LAST {
            assert!(was_done, "{round}-{call} is said to be done and is not");
        }
        if synced.contains(round) {
            assert_eq!(code, "ok", "{round}-{call} was on the disk before the kill");
        }
    }
    // Where the kill met each call.
    let mut steps: BTreeMap<&str, u32> = BTreeMap::new();
    for (round, call) in (0..rounds).flat_map(|round| (0..CALLS).map(move |call| (round, call))) {
        let was_done = done.contains_key(&format!("note {round}-{call}"));
        let was_told = told.contains(&(round, call));
        assert!(was_done || !was_told, "{round}-{call} was told and not done");
        let step = match ends.get(&(round, call)).map(String::as_str) {
            None => "before its intent was on the disk",
            Some("ok") if synced.contains(&round) => "after its run's result might leave",
            Some("ok") => "after its end was on the disk",
            Some("outcome_unknown") if was_told => "between its answer and the commit of its end",
            Some("outcome_unknown") if was_done => "between its server's deed and its answer",
            Some("outcome_unknown") => "between its intent and its server's deed",
            Some(other) => panic!("{round}-{call} ended as {other}"),
        };
        *steps.entry(step).or_default() += 1;
    }
    eprintln!("killed: {steps:#?}");
    assert_eq!(steps.len(), 6, "some step was never met: {steps:#?}");
    let unknown = ends.values().filter(|code| *code == "outcome_unknown").count();
    assert!(unknown > 0, "no round was killed between intent and outcome");
    let listed = desk.listed();
    assert_eq!(listed.iter().filter(|call| call["state"] == "unknown").count(), unknown);
    let text = desk.list(&["--last", "1000000"]);
    assert!(text.contains(&format!("{unknown} UNKNOWN")));
}

#[test]
fn the_intent_of_a_write_is_on_the_disk_before_the_server_hears_of_it() {
    let desk = Desk::new();
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 1, &["test.note", "test.never"], limits());
    // Any broker's first call waits for the journal; this is about the others.
    assert_eq!(worker.call("test.note", &json!({"text": "x"})).0, None);
    worker.send("test.never", b"{}");
    desk.wait_until_done("never");
    let records = desk.records();
    assert_eq!(desk.kinds(), ["opened", "intent", "outcome", "intent"]);
    assert_eq!(records[3].effect.as_deref(), Some("write"));
    assert_eq!(desk.listed()[1]["state"], "out");
    kill(broker);
    // Nobody opened the journal since, and still a reader is told.
    assert_eq!(desk.listed()[1]["state"], "unknown");
    assert!(desk.list(&[]).contains("1 UNKNOWN"));
}

#[test]
fn a_result_that_carried_a_credential_is_flagged() {
    let desk = Desk::new();
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 1, &["test.fail", "test.echo"], limits());
    worker.call("test.fail", &json!({}));
    worker.call("test.echo", &json!({"text": "x"}));
    worker.call("test.note", &json!({}));
    drop(worker);
    assert!(broker.finish().0.success());
    let flags: Vec<Value> =
        desk.listed().iter().map(|call| call["credential_removed"].clone()).collect();
    assert_eq!(flags, [json!(true), json!(false), Value::Null], "{:#?}", desk.listed());
    let shown = desk.list(&[]);
    let flagged: Vec<&str> =
        shown.lines().filter(|line| line.ends_with(", credential removed")).collect();
    assert!(flagged.len() == 1 && flagged[0].contains("test.fail"), "{shown}");
}

/// The tables as the first release made them.
const FIRST_SCHEMA: &str = "
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
        program BLOB
    ) STRICT;
    PRAGMA application_id = 0x666a6e6c;
    PRAGMA user_version = 1;
    INSERT INTO sessions VALUES (1, 1000, 1, NULL);
    INSERT INTO records (seq, at_us, kind, run, call, principal, tool, effect) VALUES
        (1, 1000, 'intent', x'01010101010101010101010101010101', 0, 'alice', 'a.done', 'read'),
        (3, 1002, 'intent', x'01010101010101010101010101010101', 1, 'alice', 'a.lost', 'write');
    INSERT INTO records (seq, at_us, kind, run, call, code, took_us, response_bytes) VALUES
        (2, 1001, 'outcome', x'01010101010101010101010101010101', 0, 'ok', 7, 2);";

#[test]
fn a_file_of_the_first_release_is_read_as_it_is_and_written_on() {
    let desk = Desk::new();
    std::fs::create_dir(desk.journal()).unwrap();
    let file = desk.journal().join("journal-00.sqlite");
    let made = Connection::open(&file).unwrap();
    made.execute_batch(FIRST_SCHEMA).unwrap();
    drop(made);
    let states = || -> Vec<(Value, Value)> {
        let listed = desk.listed();
        listed.iter().map(|it| (it["tool"].clone(), it["state"].clone())).collect()
    };
    let before = [(json!("a.done"), json!("ended")), (json!("a.lost"), json!("unknown"))];
    assert_eq!(states(), before, "as it is");

    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 2, &["test.fail"], limits());
    worker.call("test.fail", &json!({}));
    drop(worker);
    assert!(broker.finish().0.success());
    assert_eq!(desk.files(), [file], "it went on in the same file");
    let mut after = before.to_vec();
    after.push((json!("test.fail"), json!("ended")));
    assert_eq!(states(), after);
    let flags: Vec<Value> =
        desk.listed().iter().map(|call| call["credential_removed"].clone()).collect();
    assert_eq!(flags, [Value::Null, Value::Null, json!(true)]);
    assert!(desk.kinds().contains(&"unknown".to_owned()), "what was lost is closed");
}

#[test]
fn what_goes_by_group_commit_is_on_the_disk_once_the_run_may_end() {
    let desk = Desk::new();
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 1, &["crypto.hash"], limits());
    for _ in 0..50 {
        worker.send("crypto.hash", HASH);
        assert_eq!(worker.settled().code, None);
    }
    sync(&mut broker);
    kill(broker);
    let kinds = desk.kinds();
    let count = |kind| kinds.iter().filter(|it| *it == kind).count();
    assert_eq!((count("intent"), count("outcome")), (50, 50));
    // An argument appears in no file of the journal.
    for file in std::fs::read_dir(desk.journal()).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        assert!(!bytes.windows(6).any(|window| window == b"sha256"));
    }
}

#[test]
fn a_run_without_calls_and_a_broker_without_runs_leave_no_journal() {
    let desk = Desk::new();
    let mut broker = desk.broker();
    let worker = open(&mut broker, 1, &["crypto.hash"], limits());
    drop(worker);
    sync(&mut broker);
    assert!(broker.finish().0.success());
    assert_eq!(desk.files(), Vec::<PathBuf>::new());
}

#[test]
fn two_brokers_at_once_have_a_file_each_and_one_reader_sees_both() {
    let desk = Desk::new();
    let (mut first, mut second) = (desk.broker(), desk.broker());
    for (id, broker) in [(1, &mut first), (2, &mut second)] {
        let mut worker = open(broker, id, &["crypto.hash"], limits());
        worker.send("crypto.hash", HASH);
        assert_eq!(worker.settled().code, None);
        sync(broker);
    }
    let files = desk.files();
    assert_eq!(files.len(), 2);
    for file in files {
        let mode = file.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{}", file.display());
    }
    let all = desk.listed();
    assert_eq!(all.len(), 2);
    let newest: Vec<Value> = serde_json::from_str(&desk.list(&["--json", "--last", "1"])).unwrap();
    assert_eq!(newest, all[1..]);
    let one = desk.list(&["--json", "--run", &RunId([2; 16]).to_string()]);
    let one: Vec<Value> = serde_json::from_str(&one).unwrap();
    assert_eq!(one.len(), 1);
    assert_eq!((&one[0]["principal"], &one[0]["tool"]), (&json!("alice"), &json!("crypto.hash")));
    assert_eq!((&one[0]["state"], &one[0]["effect"]), (&json!("ended"), &json!("none")));
}

/// A write and a call without effect, both refused as not recorded, and
/// nothing reaches the server.
fn refused_as_not_recorded(desk: &Desk, broker: &mut Broker) {
    let before = desk.done();
    let mut worker = open(broker, 9, &["test.note", "crypto.hash"], limits());
    let (code, why) = worker.call("test.note", &json!({"text": "x"}));
    assert_eq!(code, Some(CallCode::NotRecorded), "{why}");
    let why = why["error"].as_str().unwrap();
    assert!(why.contains("recorded") && !why.contains('/'), "{why}");
    for _ in 0..3 {
        worker.send("crypto.hash", HASH);
        assert_eq!(worker.settled().code, Some(CallCode::NotRecorded));
    }
    assert_eq!(desk.done(), before, "nothing is dispatched");
    match broker.ask(&Request::Sync) {
        Reply::Refused { kind: RefusalKind::Journal, .. } => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn without_a_journal_nothing_is_dispatched() {
    let desk = Desk::new();
    std::fs::write(desk.0.path().join("file"), "").unwrap();
    let mut broker = desk.broker_with(&desk.0.path().join("file/journal"));
    refused_as_not_recorded(&desk, &mut broker);
}

#[test]
fn a_call_that_waits_for_the_disk_is_dispatched_only_if_its_program_went_to_its_end() {
    let desk = Desk::new();
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 1, &["test.note"], limits());
    assert_eq!(worker.call("test.note", &json!({"text": "first"})).0, None);
    drop(worker);
    let file = desk.journal().join("journal-00.sqlite");
    for (number, is_whole) in [(2, true), (3, false)] {
        let before = desk.done();
        let mut worker = open(&mut broker, number, &["test.note"], limits());
        let (lock, locked) = std::sync::mpsc::channel();
        let ended = std::thread::scope(|scope| {
            scope.spawn(|| {
                let disk = Connection::open(&file).unwrap();
                disk.execute_batch("BEGIN IMMEDIATE").unwrap();
                lock.send(()).unwrap();
                std::thread::sleep(Duration::from_millis(800));
                disk.execute_batch("COMMIT").unwrap();
            });
            locked.recv().unwrap();
            worker.send("test.note", br#"{"text": "left"}"#);
            // Until its intent waits for the disk, and no longer than that does.
            std::thread::sleep(Duration::from_millis(200));
            broker.ask(&Request::EndRun { run_id: RunId([number; 16]), is_whole })
        });
        assert_eq!(ended, Reply::RunEnded { broken: None });
        drop(worker);
        if is_whole {
            desk.wait_until_done("note left");
            continue;
        }
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(desk.done(), before, "it was cut off");
    }
}

/// Whether the journal works at all nobody knows before its first record.
#[test]
fn a_brokers_first_call_is_recorded_or_is_none_whatever_it_is() {
    let desk = Desk::new();
    std::fs::write(desk.0.path().join("file"), "").unwrap();
    let mut broker = desk.broker_with(&desk.0.path().join("file/journal"));
    let mut worker = open(&mut broker, 9, &["crypto.hash"], limits());
    worker.send("crypto.hash", HASH);
    assert_eq!(worker.settled().code, Some(CallCode::NotRecorded));
}

#[test]
fn a_journal_that_is_taken_away_ends_all_calls() {
    let desk = Desk::new();
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 1, &["test.note"], limits());
    assert_eq!(worker.call("test.note", &json!({"text": "x"})).0, None);
    std::fs::remove_dir_all(desk.journal()).unwrap();
    refused_as_not_recorded(&desk, &mut broker);
    assert_eq!(worker.call("test.note", &json!({"text": "y"})).0, Some(CallCode::NotRecorded));
}

#[test]
fn journals_that_others_hold_are_not_written() {
    let desk = Desk::new();
    std::fs::create_dir(desk.journal()).unwrap();
    let held: Vec<File> = (0..64)
        .map(|number| {
            let path = desk.journal().join(format!("journal-{number:02}.lock"));
            let lock = File::create(path).unwrap();
            lock.lock().unwrap();
            lock
        })
        .collect();
    let mut broker = desk.broker();
    refused_as_not_recorded(&desk, &mut broker);
    drop(held);
    // Once one is free, the next try takes it.
    let mut worker = open(&mut broker, 1, &["crypto.hash"], limits());
    let until = std::time::Instant::now() + support::PATIENCE;
    loop {
        worker.send("crypto.hash", HASH);
        match worker.settled().code {
            None => break,
            Some(code) => assert_eq!(code, CallCode::NotRecorded),
        }
        assert!(std::time::Instant::now() < until);
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Mounts a file system of this size over `folder`, for this thread and what
/// it starts. `false`, loudly, where only root may.
fn with_small_disk(folder: &Path, kib: u32, flags: MountFlags) -> bool {
    std::fs::create_dir_all(folder).unwrap();
    // SAFETY: takes numbers; the thread is the test's own and ends with it.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        eprintln!("SKIPPED: only root may mount a file system that fills up");
        return false;
    }
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
    let size = CString::new(format!("size={kib}k,mode=0700")).unwrap();
    mount("tmpfs", folder, "tmpfs", flags, Some(size.as_c_str())).unwrap();
    true
}

/// Runs a test in a thread that may have mounts of its own.
fn apart(test: impl FnOnce() + Send + 'static) {
    if let Err(panic) = std::thread::spawn(test).join() {
        std::panic::resume_unwind(panic);
    }
}

/// Takes all room that is left.
fn fill(file: &Path) {
    let mut filler = File::create(file).unwrap();
    for size in [64 * 1024, 4096, 1] {
        while filler.write_all(&vec![0; size]).is_ok() {}
    }
}

/// Calls until one is carried out, since the journal is tried again only now
/// and then.
fn until_recorded(worker: &mut Worker, text: &str) {
    let until = std::time::Instant::now() + support::PATIENCE;
    loop {
        match worker.call("test.note", &json!({ "text": text })).0 {
            None => return,
            Some(code) => assert_eq!(code, CallCode::NotRecorded),
        }
        assert!(std::time::Instant::now() < until, "it is never written again");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// That each thing was done once, and is in the journal from intent to end.
fn all_is_recorded(desk: &Desk, broker: Broker) {
    assert!(broker.finish().0.success());
    let records = desk.records();
    let done = desk.done();
    let ended =
        records.iter().filter(|row| row.kind == "outcome" && row.code.as_deref() == Some("ok"));
    assert_eq!(ended.count(), done.len(), "{done:?}");
    assert_eq!(done.iter().collect::<BTreeSet<_>>().len(), done.len(), "{done:?}");
    let without_end = desk.listed();
    assert!(without_end.iter().all(|call| call["state"] != "unknown"), "{without_end:?}");
}

#[test]
fn attack_26_on_a_full_disk_nothing_is_dispatched_until_there_is_room_again() {
    apart(|| {
        let desk = Desk::new();
        if !with_small_disk(&desk.journal(), 512, MountFlags::empty()) {
            return;
        }
        let mut broker = desk.broker();
        let tools = ["test.note", "crypto.hash"];
        let limits = RunLimits { calls: 10_000, ..limits() };
        let mut worker = open(&mut broker, 1, &tools, limits);
        assert_eq!(worker.call("test.note", &json!({"text": "before"})).0, None);
        let filler = desk.journal().join("filler");
        fill(&filler);
        // The log has some room in what it has of the disk; then it has none.
        let mut number = 0;
        loop {
            let (code, why) = worker.call("test.note", &json!({ "text": format!("{number}") }));
            match code {
                None => number += 1,
                Some(code) => {
                    assert_eq!(code, CallCode::NotRecorded, "{why}");
                    break;
                }
            }
            assert!(number < 5_000, "the disk is not full");
        }
        assert_eq!(desk.done().len(), 1 + number, "what was refused was not sent");
        refused_as_not_recorded(&desk, &mut broker);
        std::fs::remove_file(&filler).unwrap();
        until_recorded(&mut worker, "after");
        sync(&mut broker);
        drop(worker);
        all_is_recorded(&desk, broker);
    });
}

#[test]
fn attack_26_a_disk_that_is_full_from_the_start_is_said_and_tried_again() {
    apart(|| {
        let desk = Desk::new();
        if !with_small_disk(&desk.journal(), 256, MountFlags::empty()) {
            return;
        }
        let filler = desk.journal().join("filler");
        fill(&filler);
        let mut broker = desk.broker();
        refused_as_not_recorded(&desk, &mut broker);
        std::fs::remove_file(&filler).unwrap();
        let mut worker = open(&mut broker, 1, &["test.note"], limits());
        until_recorded(&mut worker, "after");
        drop(worker);
        sync(&mut broker);
        all_is_recorded(&desk, broker);
    });
}

#[test]
fn a_full_disk_keeps_nobody_from_reading_what_is_on_it() {
    apart(|| {
        let desk = Desk::new();
        if !with_small_disk(&desk.journal(), 512, MountFlags::empty()) {
            return;
        }
        let filler = desk.journal().join("filler");
        let call = |id| {
            let mut broker = desk.broker();
            let mut worker = open(&mut broker, id, &["test.note"], limits());
            assert_eq!(worker.call("test.note", &json!({ "text": "a" })).0, None);
            drop(worker);
            sync(&mut broker);
            broker
        };
        call(1).finish();
        fill(&filler);
        assert_eq!(desk.listed().len(), 1);
        // The second is in the write-ahead log alone, whose index is lost.
        std::fs::remove_file(&filler).unwrap();
        kill(call(2));
        std::fs::remove_file(desk.files()[0].with_extension("sqlite-shm")).unwrap();
        fill(&filler);
        assert_eq!(desk.listed().len(), 2);
        std::fs::remove_file(&filler).unwrap();
        call(3).finish();
        assert_eq!(desk.listed().len(), 3);
    });
}

#[test]
fn attack_26_a_journal_that_cannot_be_written_is_said_and_tried_again() {
    apart(|| {
        let desk = Desk::new();
        if !with_small_disk(&desk.journal(), 512, MountFlags::RDONLY) {
            return;
        }
        let mut broker = desk.broker();
        refused_as_not_recorded(&desk, &mut broker);
        mount_remount(desk.journal(), MountFlags::empty(), c"").unwrap();
        let mut worker = open(&mut broker, 1, &["test.note"], limits());
        until_recorded(&mut worker, "after");
        drop(worker);
        sync(&mut broker);
        all_is_recorded(&desk, broker);
    });
}

#[test]
fn attack_26_without_descriptors_nothing_is_dispatched_until_there_are_some() {
    use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
    let desk = Desk::new();
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 1, &["test.note"], limits());
    // As many as it has, and not one for a journal.
    let pid = Pid::from_raw(broker.child.id().try_into().unwrap()).unwrap();
    let before = getrlimit(Resource::Nofile);
    let none = Rlimit { current: Some(3), maximum: before.maximum };
    prlimit(Some(pid), Resource::Nofile, none).unwrap();
    for text in ["a", "b"] {
        let (code, why) = worker.call("test.note", &json!({ "text": text }));
        assert_eq!(code, Some(CallCode::NotRecorded), "{why}");
    }
    assert_eq!(desk.done(), Vec::<String>::new());
    prlimit(Some(pid), Resource::Nofile, before).unwrap();
    until_recorded(&mut worker, "after");
    drop(worker);
    sync(&mut broker);
    all_is_recorded(&desk, broker);
}

/// What a file holds and who may read it, or that it is not there.
fn state(path: &Path) -> Option<(Vec<u8>, u32)> {
    let metadata = path.metadata().ok()?;
    Some((std::fs::read(path).unwrap(), metadata.permissions().mode()))
}

/// A broker that finds this folder refuses every call, changes nothing that
/// was there, and says why.
fn refused_and_left_alone(desk: &Desk, file: &Path) -> String {
    let before = state(file);
    let mut broker = desk.broker();
    refused_as_not_recorded(desk, &mut broker);
    let (status, log) = broker.finish();
    assert!(status.success(), "{log}");
    assert!(state(file) == before, "{} is another", file.display());
    assert!(log.contains("the journal fails"), "{log}");
    log
}

#[test]
fn attack_18_a_link_in_the_place_of_a_journals_file_leads_nowhere() {
    for (ending, is_there, is_hard) in [
        ("sqlite", true, false),
        ("sqlite", false, false),
        ("sqlite", true, true),
        ("lock", true, false),
        ("lock", false, false),
        ("lock", true, true),
        ("sqlite-wal", true, false),
        ("sqlite-wal", false, false),
        ("sqlite-shm", true, false),
        ("sqlite-shm", false, false),
    ] {
        let desk = Desk::new();
        std::fs::create_dir(desk.journal()).unwrap();
        let victim = desk.0.path().join("victim");
        if is_there {
            std::fs::write(&victim, "somebody else's").unwrap();
            std::fs::set_permissions(&victim, Permissions::from_mode(0o644)).unwrap();
        }
        let planted = desk.journal().join(format!("journal-00.{ending}"));
        if is_hard {
            std::fs::hard_link(&victim, &planted).unwrap();
        } else {
            std::os::unix::fs::symlink(&victim, &planted).unwrap();
        }
        if ending.starts_with("sqlite-") {
            // SQLite's own: it refuses the link or takes it away.
            let before = state(&victim);
            let mut broker = desk.broker();
            let mut worker = open(&mut broker, 1, &["test.note"], limits());
            worker.call("test.note", &json!({"text": "x"}));
            drop(worker);
            assert!(broker.finish().0.success());
            assert!(state(&victim) == before, "{ending}");
        } else {
            let log = refused_and_left_alone(&desk, &victim);
            let why = if is_hard { "has another name besides" } else { "is a link" };
            assert!(log.contains(&format!("journal-00.{ending} {why}")), "{log}");
        }
    }
}

#[test]
fn attack_18_a_journal_of_another_user_is_not_written_to() {
    let stranger = Some(rustix::fs::Uid::from_raw(64_123));
    for planted in ["", "journal-00.sqlite", "journal-00.lock"] {
        let desk = Desk::new();
        std::fs::create_dir(desk.journal()).unwrap();
        let path = desk.journal().join(planted);
        if !planted.is_empty() {
            std::fs::write(&path, "").unwrap();
        }
        if rustix::fs::chown(&path, stranger, None).is_err() {
            eprintln!("SKIPPED: only root can give a file away");
            return;
        }
        let victim = desk.0.path().join("victim");
        let log = refused_and_left_alone(&desk, &victim);
        assert!(log.contains("is another user's"), "{planted}: {log}");
    }
}

#[test]
fn attack_18_a_journal_that_is_replaced_by_a_link_ends_all_calls() {
    let desk = Desk::new();
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 1, &["test.note"], limits());
    assert_eq!(worker.call("test.note", &json!({"text": "x"})).0, None);
    // Even to the very same file.
    let elsewhere = desk.0.path().join("elsewhere");
    std::fs::rename(&desk.files()[0], &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, desk.journal().join("journal-00.sqlite")).unwrap();
    refused_as_not_recorded(&desk, &mut broker);
    let log = broker.finish().1;
    assert!(log.contains("moved, deleted or cut off"), "{log}");
}

#[test]
fn a_journal_that_is_cut_off_ends_all_calls_and_its_log_is_kept() {
    let desk = Desk::new();
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 1, &["test.note"], limits());
    assert_eq!(worker.call("test.note", &json!({"text": "x"})).0, None);
    let file = desk.files().pop().unwrap();
    File::options().write(true).open(&file).unwrap().set_len(0).unwrap();
    assert_eq!(worker.call("test.note", &json!({"text": "y"})).0, Some(CallCode::NotRecorded));
    refused_as_not_recorded(&desk, &mut broker);
    let log = file.with_extension("sqlite-wal");
    let bytes = std::fs::metadata(&log).unwrap().len();
    assert!(bytes > 0);
    // As after a broker that was killed.
    let copy = desk.0.path().join("log");
    std::fs::copy(&log, &copy).unwrap();
    broker.finish();
    File::options().write(true).open(&file).unwrap().set_len(0).unwrap();
    std::fs::copy(&copy, &log).unwrap();
    let said = refused_and_left_alone(&desk, &log);
    assert!(said.contains("the journal is damaged"), "{said}");
    let output = desk.listing(&[]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && stderr.contains("the journal is damaged"), "{stderr}");
}

#[test]
fn a_journal_whose_log_is_taken_away_ends_all_calls() {
    let ways: [fn(&Path); 3] = [
        |log| std::fs::remove_file(log).unwrap(),
        |log| File::options().write(true).open(log).unwrap().set_len(0).unwrap(),
        |log| {
            let copy = log.with_extension("copy");
            std::fs::copy(log, &copy).unwrap();
            std::fs::rename(&copy, log).unwrap();
        },
    ];
    for takes_away in ways {
        let desk = Desk::new();
        let mut broker = desk.broker();
        let mut worker = open(&mut broker, 1, &["test.note"], limits());
        assert_eq!(worker.call("test.note", &json!({"text": "x"})).0, None);
        takes_away(&desk.files().pop().unwrap().with_extension("sqlite-wal"));
        assert_eq!(worker.call("test.note", &json!({"text": "y"})).0, Some(CallCode::NotRecorded));
        refused_as_not_recorded(&desk, &mut broker);
        let log = broker.finish().1;
        assert!(log.contains("-wal: the journal was moved, deleted or cut off"), "{log}");
    }
}

#[test]
fn a_damaged_journal_is_said_and_nothing_of_it_is_changed() {
    let desk = Desk::new();
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 1, &["test.note"], limits());
    for number in 0..50 {
        let note = json!({ "text": format!("{number}") });
        assert_eq!(worker.call("test.note", &note).0, None);
    }
    drop(worker);
    assert!(broker.finish().0.success());
    let file = desk.files().pop().unwrap();
    let whole = std::fs::read(&file).unwrap();
    assert!(whole.len() > 3 * 4096);
    for (what, damaged) in [
        ("its pages", [&whole[..4096], &vec![0xA5; whole.len() - 4096]].concat()),
        ("its head", [&[0xA5; 100], &whole[100..]].concat()),
        ("its end", whole[..whole.len() / 2].to_vec()),
    ] {
        std::fs::write(&file, damaged).unwrap();
        let log = refused_and_left_alone(&desk, &file);
        assert!(
            log.contains("the journal is damaged") || log.contains("no journal that this release"),
            "{what}: {log}"
        );
        assert!(log.contains("move it away"), "{what}: {log}");
    }
    // Nothing was lost.
    std::fs::write(&file, &whole).unwrap();
    assert_eq!(desk.listed().len(), 50);
    // What another broker wrote is shown beside one that is damaged, and that is said.
    std::fs::write(desk.journal().join("journal-01.sqlite"), whole).unwrap();
    std::fs::write(&file, [0xA5; 8192]).unwrap();
    let output = desk.listing(&["--json", "--last", "1000"]);
    let calls: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(calls.len() == 50 && !output.status.success(), "{stderr}");
    assert!(stderr.contains("journal-00.sqlite"), "{stderr}");
}

#[test]
fn another_programs_database_is_no_journal() {
    let desk = Desk::new();
    std::fs::create_dir(desk.journal()).unwrap();
    let file = desk.journal().join("journal-00.sqlite");
    Connection::open(&file).unwrap().execute_batch("CREATE TABLE theirs (x)").unwrap();
    let mut broker = desk.broker();
    refused_as_not_recorded(&desk, &mut broker);
    let log = broker.finish().1;
    assert!(log.contains("no journal that this release can use"), "{log}");
}

#[test]
fn a_call_that_is_wrong_in_two_respects_gets_the_earlier_refusal() {
    let desk = Desk::new();
    let mut broker = desk.broker();
    let tools = ["test.note", "test.echo", "test.change"];
    let small = RunLimits { request_bytes: 64, ..limits() };
    let large = json!({ "words": "x".repeat(100) });
    let none = json!({});
    let fine = json!({ "text": "x" });
    // Ungranted before too large; too large before another definition and
    // before arguments that do not fit.
    let mut worker = open(&mut broker, 1, &tools, small.clone());
    assert_eq!(worker.call("test.fail", &large).0, Some(CallCode::Denied));
    assert_eq!(worker.call("test.note", &large).0, Some(CallCode::RequestTooLarge));
    assert_eq!(worker.call("test.change", &none).0, None);
    assert_eq!(worker.call("test.echo", &large).0, Some(CallCode::RequestTooLarge));
    // Another definition before arguments that do not fit.
    let (code, why) = worker.call("test.echo", &none);
    assert_eq!(code, Some(CallCode::Denied));
    assert!(why["error"].as_str().unwrap().contains("definition"), "{why}");
    // Arguments that do not fit before a spent budget, that before a passed
    // deadline.
    let spent = RunLimits { calls: 0, wall_ms: 1, ..small.clone() };
    let mut worker = open(&mut broker, 2, &tools[..1], spent);
    assert_eq!(worker.call("test.note", &none).0, Some(CallCode::BadRequest));
    assert_eq!(worker.call("test.note", &fine).0, Some(CallCode::BudgetSpent));
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(worker.call("test.note", &large).0, Some(CallCode::RequestTooLarge));
    // A passed deadline before a journal that is gone.
    let mut worker = open(&mut broker, 3, &tools[..1], RunLimits { wall_ms: 1, ..small });
    std::thread::sleep(Duration::from_millis(600));
    sync(&mut broker);
    // Each of them is in the journal, and none reached the server.
    let refused: Vec<_> = desk
        .records()
        .into_iter()
        .filter(|row| row.kind == "refusal")
        .map(|row| (row.code.unwrap(), row.tool.unwrap()))
        .collect();
    let refused: Vec<_> =
        refused.iter().map(|(code, tool)| (code.as_str(), tool.as_str())).collect();
    assert_eq!(
        refused,
        [
            ("denied", "test.fail"),
            ("request_too_large", "test.note"),
            ("request_too_large", "test.echo"),
            ("denied", "test.echo"),
            ("bad_request", "test.note"),
            ("budget_spent", "test.note"),
            ("request_too_large", "test.note"),
        ]
    );
    std::fs::remove_dir_all(desk.journal()).unwrap();
    assert_eq!(worker.call("test.note", &fine).0, Some(CallCode::DeadlinePassed));
    assert_eq!(desk.done(), ["change"]);
}

#[test]
fn calls_in_flight_together_are_each_recorded_from_intent_to_outcome() {
    let desk = Desk::new();
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 1, &["test.barrier"], limits());
    for _ in 0..5 {
        worker.send("test.barrier", br#"{"n": 5}"#);
    }
    for _ in 0..5 {
        assert_eq!(worker.settled().code, None);
    }
    sync(&mut broker);
    let kinds = desk.kinds();
    assert_eq!(kinds[..6], ["opened", "intent", "intent", "intent", "intent", "intent"]);
    assert_eq!(kinds[6..], ["outcome"; 5]);
}

#[test]
fn a_result_that_breaks_its_own_schema_is_not_passed_on() {
    let desk = Desk::new();
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 1, &["test.misfit"], limits());
    worker.send("test.misfit", b"{}");
    let (_, payload) = receive(&mut worker.link).unwrap();
    let settled: Settled = decode(&payload).unwrap();
    assert_eq!(settled.code, Some(CallCode::BadResponse));
    let body = String::from_utf8(settled.body).unwrap();
    assert!(body.contains("/text") && !body.contains(CANARY), "{body}");
    sync(&mut broker);
    let last = desk.records().pop().unwrap();
    assert_eq!((last.kind.as_str(), last.code.as_deref()), ("outcome", Some("bad_response")));
}

#[test]
fn a_write_carries_an_idempotency_key_of_its_run_and_call() {
    let desk = Desk::new();
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 0xAB, &["test.key"], limits());
    for call in 0..2 {
        let (code, key) = worker.call("test.key", &json!({}));
        assert_eq!(code, None);
        assert_eq!(key["text"], format!("{}-{call}", RunId([0xAB; 16])));
    }
}

#[test]
fn a_tools_own_error_reaches_the_program_whole_and_redacted() {
    let desk = Desk::new();
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 1, &["test.fail", "test.refuse"], limits());
    let (code, error) = worker.call("test.fail", &json!({}));
    assert_eq!(code, Some(CallCode::ToolFailed));
    assert_eq!((&error["name"], &error["code"]), (&json!("ToolError"), &json!(-32603)));
    let message = error["message"].as_str().unwrap();
    assert!(message.starts_with("failed with token <") && !message.contains(CANARY), "{message}");
    assert!(error.get("data").is_some());
    let (_, error) = worker.call("test.refuse", &json!({}));
    assert_eq!((&error["name"], &error["message"]), (&json!("ToolError"), &json!("not today")));
}

#[test]
fn what_is_counted_can_be_asked_for() {
    let desk = Desk::new();
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 1, &["test.note", "crypto.hash"], limits());
    worker.call("test.note", &json!({"text": "x"}));
    worker.call("test.note", &json!({}));
    worker.call("other.tool", &json!({}));
    sync(&mut broker);
    let Reply::Metrics(text) = broker.ask(&Request::Metrics) else { panic!("no metrics") };
    for line in [
        "forge_calls_total{server=\"test\",effect=\"write\",end=\"ok\"} 1",
        "forge_calls_total{server=\"test\",effect=\"write\",end=\"bad_request\"} 1",
        "forge_calls_total{server=\"\",effect=\"\",end=\"denied\"} 1",
        "forge_call_dispatch_seconds_count 1",
        "forge_journal_records_total 5",
        "forge_journal_commit_failures_total 0",
        "forge_runs_open 1",
    ] {
        assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
    }
}
