//! Processes of a service killed at random, under load: a worker, the zygote,
//! the toolbroker, a tool server, the service itself.
//!
//! Whoever is killed, the service soon carries out runs again, by itself or,
//! if it was the one, started again as a service manager would; of what was
//! killed nothing is left. At the end the journal is held against what the
//! tool server wrote down: whatever it did was intended there before, once, and
//! whatever a client heard the end of has ended there.
//!
//! `FORGE_CHAOS_ROUNDS` says how often (10; 500 by explicit command),
//! `FORGE_CHAOS_SEED` repeats a sequence.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/executables.rs"]
mod executables;
#[path = "support/kills.rs"]
mod kills;
#[path = "support/processes.rs"]
mod processes;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use executables::FORGE;
use forge_client::blocking::Client;
use forge_protocol::broker::Authority;
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::service::Order;
use kills::{
    Copies, Dice, RECOVERY_TIME_MAX, Spaces, dice, is_root, kill, nothing_is_left, number, reap,
};
use processes::{Process, descendants_of, is_gone};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use support::{forge_module, signed, signer};

fn main() -> ExitCode {
    support::main(claims![whoever_is_killed_nothing_is_left_and_no_record_is_lost], claims![])
}

// Load

/// What the clients run, each one of them without a pause.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Load {
    /// Has the tool server write something down.
    Note,
    /// Is mostly waiting for it.
    Slow,
    /// Calls nothing.
    Echo,
    /// Ends at its deadline.
    Endless,
}

const CLIENTS: [Load; 5] = [Load::Note, Load::Note, Load::Slow, Load::Echo, Load::Endless];

impl Load {
    fn order(self, client: usize, text: &str) -> Order {
        let (program, tool, input, wall_ms) = match self {
            Self::Note => (calls("test.note"), Some("test.note"), noted(text), 30_000),
            Self::Slow => (calls("test.slow"), Some("test.slow"), r#"{"ms":30}"#.into(), 30_000),
            Self::Echo => (forge_module(MEMORY, ECHO), None, format!("\"{text}\""), 30_000),
            Self::Endless => {
                (forge_module(MEMORY, "(loop (br 0)) (unreachable)"), None, "1".into(), 50)
            }
        };
        let tools = tool.map(|tool| ToolName::parse(tool).unwrap());
        Order {
            program: signed(&program),
            input: input.into(),
            // Two tenants.
            principal: format!("tenant-{}", client % 2),
            session: None,
            authority: Authority::Tools(tools.into_iter().collect()),
            limits: RunLimits {
                fuel: RunLimits::operator_maxima().fuel,
                wall_ms,
                ..RunLimits::default()
            },
            prepare: self == Self::Echo,
            events: false,
            hosted: None,
        }
    }

    /// Whether it ended as it does where nobody is killed. Any other end must
    /// be one that says who failed.
    fn is_good(self, report: &Value, text: &str) -> Result<bool, String> {
        let (status, kind) = (report["status"].as_str().unwrap(), report["kind"].as_str().unwrap());
        let output = report["output"].as_str().unwrap();
        match (self, status, kind) {
            (Self::Note, "ok", _) if output == noted(text) => Ok(true),
            (Self::Slow, "ok", _) if output.contains("30 ms") => Ok(true),
            (Self::Echo, "ok", _) if output == format!("\"{text}\"") => Ok(true),
            (Self::Endless, "limit", "deadline") => Ok(true),
            (_, "internal", "worker_lost") => Ok(false),
            // The tool server is gone, and so is the outcome of its call.
            (Self::Note | Self::Slow, "failed", "returned") => Ok(false),
            (Self::Note | Self::Slow, "internal", "broker_lost") => Ok(false),
            (Self::Note | Self::Slow, "refused", "broker_away") => Ok(false),
            (Self::Note | Self::Slow, "refused", "server_away") => Ok(false),
            _ => Err(format!("a run ended as none may: {report:#}")),
        }
    }
}

fn noted(text: &str) -> String {
    format!("{{\"text\":\"{text}\"}}")
}

const MEMORY: &str = r#"(memory (export "memory") 1)"#;
const ECHO: &str = "(drop (call $output (i32.const 0)
    (call $input_read (i32.const 0) (i32.const 0) (call $input_len)))) (i32.const 0)";

/// Calls a tool with its input and outputs what comes back.
fn calls(tool: &str) -> String {
    let memory = format!(r#"(memory (export "memory") 1) (data (i32.const 0) "{tool}")"#);
    let name = tool.len();
    let body = format!(
        "(local $code i32)
         (drop (call $input_read (i32.const 512) (i32.const 0) (call $input_len)))
         (local.set $code (call $call (i32.const 0) (i32.const {name})
             (i32.const 512) (call $input_len)))
         (drop (call $output (i32.const 1024)
             (call $resp_read (i32.const 1024) (i32.const 0) (call $resp_len))))
         (select (i32.const 0) (i32.const 1) (i32.ge_s (local.get $code) (i32.const 0)))"
    );
    forge_module(&memory, &body)
}

/// What the clients found.
#[derive(Default)]
struct Found {
    stop: AtomicBool,
    good: [AtomicU64; CLIENTS.len()],
    told: Mutex<Told>,
}

#[derive(Default)]
struct Told {
    /// How runs ended, and how often.
    ends: BTreeMap<String, u64>,
    /// What was noted, and the client heard so.
    noted: Vec<String>,
    wrong: Option<String>,
    /// Who was killed, and when.
    killed: Vec<(Instant, Victim)>,
}

impl Found {
    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One client: runs the same again and again, over a new connection where
    /// the old one is gone.
    fn load(&self, socket: &Path, client: usize) {
        let load = CLIENTS[client];
        let mut connection = None;
        for turn in 0.. {
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let Some(service) = &mut connection else {
                connection = Client::connect(socket).ok();
                std::thread::sleep(Duration::from_millis(5));
                continue;
            };
            let text = format!("{client}-{turn}");
            let Ok(finish) = service.run(&load.order(client, &text)) else {
                connection = None;
                *self.told().ends.entry("(gone with the service)".into()).or_default() += 1;
                continue;
            };
            let report: Value = serde_json::from_slice(&finish.report).unwrap();
            let good = load.is_good(&report, &text);
            let mut told = self.told();
            let word = |name: &str| report[name].as_str().unwrap().to_owned();
            *told.ends.entry(format!("{} {}", word("status"), word("kind"))).or_default() += 1;
            match good {
                Ok(true) => {
                    if load == Load::Note {
                        told.noted.push(text);
                    }
                    self.good[client].fetch_add(1, Ordering::AcqRel);
                }
                Ok(false) => {}
                Err(wrong) => told.wrong = Some(wrong),
            }
        }
    }

    /// Waits until every client's runs end as they should, several times.
    fn serves(&self, service: &Service) {
        let before: Vec<u64> = self.good.iter().map(|it| it.load(Ordering::Acquire)).collect();
        let until = Instant::now() + RECOVERY_TIME_MAX;
        loop {
            let now = self.good.iter().map(|it| it.load(Ordering::Acquire));
            if now.zip(&before).all(|(now, before)| now >= before + 2) {
                return;
            }
            let mut told = self.told();
            let wrong = told.wrong.take().or_else(|| {
                let late = Instant::now() >= until;
                late.then(|| format!("no service since the kill: {:#?}", told.ends))
            });
            if let Some(wrong) = wrong {
                let last = told.killed.iter().rev().take(5);
                let last: Vec<_> = last.map(|(at, victim)| (at.elapsed(), victim)).collect();
                panic!("{wrong}\nlast killed: {last:?}\n{}", service.last_calls());
            }
            drop(told);
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

// The service

struct Service {
    child: Child,
    copies: Copies,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Victim {
    Worker,
    Zygote,
    Broker,
    ToolServer,
    Service,
}

const VICTIMS: [Victim; 5] =
    [Victim::Worker, Victim::Zygote, Victim::Broker, Victim::ToolServer, Victim::Service];

impl Service {
    fn start() -> Self {
        let beside = executables::folder();
        let (broker, server) = (beside.join("forge-toolbroker"), beside.join("forge-test-server"));
        let copies = Copies::new(&[Path::new(FORGE), &broker, &server]);
        let (server, log) = (copies.path("forge-test-server"), copies.path("calls"));
        fs::write(&log, "").unwrap();
        fs::set_permissions(&log, fs::Permissions::from_mode(0o666)).unwrap();
        let toml = format!(
            "[servers.test]\ncommand = {server:?}\nargs = ['--log', {log:?}]\nwrite = [{log:?}]\n",
        );
        fs::write(copies.path("forge.toml"), toml).unwrap();
        fs::write(copies.path("signer.pub"), signer().trust_key().to_pem()).unwrap();
        Self { child: Self::serve(&copies), copies }
    }

    fn serve(copies: &Copies) -> Child {
        Command::new(copies.path("forge-vmm"))
            .args(["serve", "--socket", "socket", "--trust", "signer.pub", "--state", "state"])
            .args(["--config", "forge.toml", "--reuse", "reset", "--prove-one-in", "10"])
            .current_dir(copies.folder())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn socket(&self) -> PathBuf {
        self.copies.path("socket")
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// One of its processes of this kind, soon.
    fn find(&self, victim: Victim, dice: &mut Dice) -> i32 {
        let child = |all: Vec<Process>| {
            all.iter().find(|it| it.parent == self.pid() && !it.zombie).map(|it| it.pid)
        };
        processes::wait_for("a process to kill", || {
            let all = match victim {
                Victim::Service => vec![self.pid()],
                Victim::Zygote => child(self.copies.workers()).into_iter().collect(),
                Victim::Broker => {
                    child(self.copies.processes_of("forge-toolbroker")).into_iter().collect()
                }
                Victim::Worker => {
                    let zygote = child(self.copies.workers())?;
                    let workers = self.copies.workers();
                    workers.iter().filter(|it| it.parent == zygote).map(|it| it.pid).collect()
                }
                Victim::ToolServer => {
                    self.copies.processes_of("forge-test-server").iter().map(|it| it.pid).collect()
                }
            };
            (!all.is_empty()).then(|| all[dice.throw(all.len())])
        })
    }

    /// Kills one, and starts the service again if that was the one. Gives back
    /// how long it took until nothing was left of it.
    fn kill(&mut self, victim: Victim, dice: &mut Dice) {
        let pid = self.find(victim, dice);
        if victim != Victim::Service {
            let below = descendants_of(pid);
            kill(pid);
            // What it had started is gone with it.
            processes::wait_for("the end of all it started", || {
                reap();
                below.iter().all(|pid| is_gone(*pid)).then_some(())
            });
            return;
        }
        let all = self.copies.processes();
        let theirs: BTreeSet<i32> = all.iter().map(|it| it.pid).collect();
        let spaces = Spaces::of(&all);
        kill(pid);
        self.child.wait().unwrap();
        nothing_is_left(&self.copies, &theirs, &spaces);
        self.child = Self::serve(&self.copies);
    }

    /// What its journal says of the last calls.
    fn last_calls(&self) -> String {
        let listed = Command::new(self.copies.path("forge-vmm"))
            .args(["journal", "list", "--state", "state", "--last", "10"])
            .current_dir(self.copies.folder())
            .output()
            .unwrap();
        String::from_utf8_lossy(&listed.stdout).into_owned()
    }

    /// That every process there is of it belongs to the service that runs.
    fn has_no_strays(&self) {
        processes::wait_for("that all processes are the service's", || {
            reap();
            let its = descendants_of(self.pid()).into_iter().chain([self.pid()]);
            let its: BTreeSet<i32> = its.collect();
            self.copies.processes().iter().all(|it| its.contains(&it.pid)).then_some(())
        });
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn whoever_is_killed_nothing_is_left_and_no_record_is_lost() {
    if !is_root() {
        return;
    }
    let mut dice = dice();
    let rounds = number("FORGE_CHAOS_ROUNDS", 10);
    let mut service = Service::start();
    let socket = service.socket();
    let found = Found::default();
    let mut killed: BTreeMap<Victim, u64> = BTreeMap::new();
    let mut slowest = Duration::ZERO;
    std::thread::scope(|scope| {
        let _stop = Stop(&found);
        for client in 0..CLIENTS.len() {
            let (found, socket) = (&found, &socket);
            scope.spawn(move || found.load(socket, client));
        }
        found.serves(&service);
        for round in 0..rounds {
            std::thread::sleep(Duration::from_millis(dice.throw(60) as u64));
            // Each of them in the first rounds, then as it comes.
            let victim = VICTIMS.get(round as usize).copied();
            let victim = victim.unwrap_or_else(|| VICTIMS[dice.throw(VICTIMS.len())]);
            let began = Instant::now();
            found.told().killed.push((began, victim));
            service.kill(victim, &mut dice);
            found.serves(&service);
            slowest = slowest.max(began.elapsed());
            service.has_no_strays();
            *killed.entry(victim).or_default() += 1;
        }
    });
    // It ends as it is told to, with all it started.
    let theirs: BTreeSet<i32> = service.copies.processes().iter().map(|it| it.pid).collect();
    // SAFETY: a plain system call; the process is a child of ours.
    assert_eq!(unsafe { libc::kill(service.pid(), libc::SIGTERM) }, 0);
    assert!(service.child.wait().unwrap().success());
    nothing_is_left(&service.copies, &theirs, &Spaces::default());
    assert!(!socket.exists());
    let calls = nothing_is_unrecorded(&service.copies, &found.told().noted);
    let ends = &found.told().ends;
    eprintln!(
        "{rounds} rounds, killed {killed:?}; service again after at most {slowest:?}; {calls} calls in the journal; runs {ends:?}"
    );
}

/// Has the clients stop, whatever happens.
struct Stop<'a>(&'a Found);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Release);
    }
}

/// Holds the journal against what the tool server wrote down, and what clients
/// heard. Gives back how many calls the journal has.
fn nothing_is_unrecorded(copies: &Copies, heard: &[String]) -> usize {
    let listed = Command::new(copies.path("forge-vmm"))
        .args(["journal", "list", "--state", "state", "--json", "--last", "1000000"])
        .current_dir(copies.folder())
        .output()
        .unwrap();
    assert!(listed.status.success(), "{listed:?}");
    let calls: Vec<Value> = serde_json::from_slice(&listed.stdout).unwrap();
    let of_notes = calls.iter().filter(|call| call["tool"] == "test.note");
    let states: HashMap<&str, &str> = of_notes
        .map(|call| (call["arguments_sha256"].as_str().unwrap(), call["state"].as_str().unwrap()))
        .collect();
    let state = |text: &str| {
        let digest = Sha256::digest(noted(text));
        let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        states.get(digest.as_str()).copied()
    };
    let log = fs::read_to_string(copies.path("calls")).unwrap();
    let did: Vec<&str> = log.lines().filter_map(|line| line.strip_prefix("note ")).collect();
    assert_eq!(did.len(), did.iter().collect::<BTreeSet<_>>().len(), "nothing is done twice");
    for text in &did {
        assert!(state(text).is_some(), "{text} was done and is not in the journal");
    }
    assert!(!heard.is_empty());
    for text in heard {
        assert_eq!(state(text), Some("ended"), "a client has the result of {text}");
    }
    calls.len()
}
