//! The journal as it is when things go wrong: the real broker process, killed
//! at any moment, on a real file that is taken away from it.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use forge_protocol::RunId;
use forge_protocol::abi::CallCode;
use forge_protocol::broker::{Authority, RefusalKind, Reply, Request};
use forge_protocol::codec::decode;
use forge_protocol::guest::Settled;
use forge_protocol::limits::RunLimits;
use rusqlite::{Connection, OpenFlags};
use serde_json::{Value, json};
use support::{Broker, CANARY, Worker, name, receive, run_request, test_server, wait};

const HASH: &[u8] = br#"{"algorithm": "sha256", "text": "abc"}"#;

fn limits() -> RunLimits {
    RunLimits { wall_ms: 60_000, ..RunLimits::default() }
}

/// A folder with a journal in it, a test server's log, and any number of
/// brokers one after another.
struct Desk(tempfile::TempDir);

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
        let output = self.list(&["--json"]);
        serde_json::from_str(&output).unwrap()
    }

    fn list(&self, more: &[&str]) -> String {
        let output = Command::new(env!("CARGO_BIN_EXE_forge-toolbroker"))
            .args(["journal", "list", "--journal"])
            .arg(self.journal())
            .args(more)
            .output()
            .unwrap();
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
    let tools = tools.iter().map(|tool| name(tool)).collect();
    let mut request = run_request("alice", Authority::Tools(tools), limits);
    request.run_id = RunId([id; 16]);
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

#[test]
fn a_broker_killed_at_any_moment_loses_nothing_and_does_nothing_twice() {
    let rounds: u8 =
        std::env::var("FORGE_KILL_ROUNDS").map_or(60, |rounds| rounds.parse().unwrap());
    let desk = Desk::new();
    let mut dice = Dice(0x5EED);
    let mut synced = BTreeSet::new();
    for round in 0..rounds {
        let mut broker = desk.broker();
        let mut worker = open(&mut broker, round, &["test.note"], limits());
        for call in 0..CALLS {
            let request = json!({ "text": format!("{round}-{call}") }).to_string();
            worker.send("test.note", request.as_bytes());
        }
        match round % 6 {
            // Before, between and behind the server's start.
            0 => std::thread::sleep(Duration::from_micros(dice.below(60_000))),
            // The server did something that nobody was told of.
            1 => desk.wait_until_done(&format!("note {round}-{}", dice.below(CALLS.into()))),
            // Some are told and some are not.
            2 => {
                assert_eq!(worker.settled().code, None);
            }
            3 => {
                assert_eq!(worker.settled().code, None);
                std::thread::sleep(Duration::from_micros(dice.below(1_000)));
            }
            // Between the first of them and the group commit.
            4 => {
                desk.wait_until_done(&format!("note {round}-0"));
                std::thread::sleep(Duration::from_micros(dice.below(15_000)));
            }
            // All are told, and their run's result may leave.
            _ => {
                for _ in 0..CALLS {
                    assert_eq!(worker.settled().code, None);
                }
                sync(&mut broker);
                synced.insert(round);
            }
        }
        kill(broker);
    }
    // The next broker closes what the last one left.
    let mut broker = desk.broker();
    let mut worker = open(&mut broker, 0xFF, &["crypto.hash"], limits());
    worker.send("crypto.hash", HASH);
    assert_eq!(worker.settled().code, None);
    drop(worker);
    assert!(broker.finish().0.success());
    account_for(&desk, &synced);
}

/// Holds the journal against what the server did.
fn account_for(desk: &Desk, synced: &BTreeSet<u8>) {
    let mut done: BTreeMap<String, u32> = BTreeMap::new();
    for line in desk.done() {
        *done.entry(line).or_default() += 1;
    }
    let (mut intents, mut ends) = (BTreeSet::new(), BTreeMap::new());
    let (mut opened, mut closed) = (BTreeSet::new(), BTreeSet::new());
    for Row { kind, run, call, code, .. } in desk.records() {
        let key = (run[0], call.unwrap_or_default());
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
        if code == "ok" && *round != 0xFF {
            assert!(was_done, "{round}-{call} is said to be done and is not");
        }
        if synced.contains(round) {
            assert_eq!(code, "ok", "{round}-{call} was on the disk before the kill");
        }
    }
    let unknown = ends.values().filter(|code| *code == "outcome_unknown").count();
    assert!(unknown > 0, "no round was killed between intent and outcome");
    let listed = desk.listed();
    assert_eq!(listed.iter().filter(|call| call["state"] == "unknown").count(), unknown);
    assert!(desk.list(&[]).contains(&format!("{unknown} UNKNOWN")));
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
    assert_eq!(desk.listed().len(), 2);
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
