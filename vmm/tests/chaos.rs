//! Processes killed at random, under load: a worker's, the zygote's, the
//! supervisor's.
//!
//! After a worker or the zygote was killed, the same supervisor carries out
//! runs again. After the supervisor was killed, there is soon no process, no
//! VM and no namespace left of it; the next one works, and removes its cgroup.
//!
//! The supervisor is a copy of this executable, with three threads that run
//! programs without a pause, one of them endless ones. `FORGE_CHAOS_ROUNDS`
//! says how often (10; 300 by explicit command), `FORGE_CHAOS_SEED` repeats a
//! sequence.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/kills.rs"]
mod kills;
#[path = "support/processes.rs"]
mod processes;

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use forge_protocol::broker::Authority;
use forge_protocol::limits::RunLimits;
use forge_protocol::service::Order;
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::Reuse;
use forge_vmm::jail::GroupLimits;
use forge_vmm::jail::cgroup::Parent;
use forge_vmm::pool::PoolOptions;
use forge_vmm::supervisor::{Supervisor, SupervisorOptions};
use kills::{
    Copies, NAMESPACES, RECOVERY_TIME_MAX, Spaces, dice, is_root, kill, no_group_is_left_of,
    nothing_is_left, number,
};
use support::{forge_module, signed, signer};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [role, reuse] = &words[..]
        && role == "supervise"
    {
        supervise(reuse);
    }
    support::main(claims![whoever_is_killed_the_service_goes_on_and_nothing_is_left], claims![])
}

// The supervisor's part

const HELLO: &str = r#"(drop (call $output (i32.const 0) (i32.const 5))) (i32.const 0)"#;
const ENDLESS: &str = "(loop (br 0)) (unreachable)";
const MEMORY: &str = r#"(memory (export "memory") 1) (data (i32.const 0) "hello")"#;

/// Runs programs until it is killed, and says how each ended:
/// `THREAD STATUS KIND`.
fn supervise(reuse: &str) -> ! {
    let reuse = match reuse {
        "fresh" => Reuse::Fresh,
        _ => Reuse::Reset { prove_one_in: 10 },
    };
    // No limits: what counts is that there is a group.
    let group = Parent::own().is_ok().then_some(GroupLimits::default());
    let options = SupervisorOptions {
        trust: TrustKeys::new([signer().trust_key()]).unwrap(),
        maxima: RunLimits { fuel: u64::MAX, wall_ms: 30_000, ..RunLimits::default() },
        pool: PoolOptions { ready_min: 2, ready_max: 4, reuse, group, ..PoolOptions::default() },
    };
    let supervisor = Supervisor::new(options, None).unwrap();
    let supervisor = &supervisor;
    std::thread::scope(|scope| {
        for (thread, body, wall_ms) in [(0, HELLO, 30_000), (1, HELLO, 30_000), (2, ENDLESS, 30)] {
            let request = Order {
                program: signed(&forge_module(MEMORY, body)),
                input: b"{}".to_vec(),
                // Two tenants.
                principal: format!("tenant-{}", thread % 2),
                session: None,
                authority: Authority::Tools(Vec::new()),
                limits: RunLimits { fuel: u64::MAX, wall_ms, ..RunLimits::default() },
                prepare: thread == 1,
                events: false,
                hosted: None,
            };
            scope.spawn(move || {
                loop {
                    let report = supervisor.run(&request).report;
                    let (end, reason) = (report.end, report.reason);
                    let line = format!("{thread} {:?} {} {reason}\n", end.status(), end.kind());
                    if std::io::stdout().write_all(line.as_bytes()).is_err() {
                        std::process::exit(0);
                    }
                }
            });
        }
    });
    unreachable!("the threads run until this process is killed")
}

// The part of the one who kills

/// A supervisor, and what it says.
struct Service {
    child: Child,
    lines: Receiver<String>,
}

impl Service {
    fn start(copy: &Copies, reuse: &str) -> Self {
        let this = std::env::current_exe().unwrap();
        let mut child = Command::new(copy.path(this.file_name().unwrap().to_str().unwrap()))
            .arg("supervise")
            .arg(reuse)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self { child, lines }
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Waits until each thread's runs have ended as they should, several times
    /// in a row. Gives back how many runs were lost until then.
    fn serves(&self) -> usize {
        // What was said before.
        while self.lines.try_recv().is_ok() {}
        let until = Instant::now() + RECOVERY_TIME_MAX;
        let mut good = [0; 3];
        let mut lost = 0;
        while good.iter().any(|good| *good < 3) {
            let line = match self.lines.recv_timeout(Duration::from_millis(100)) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => String::new(),
                Err(RecvTimeoutError::Disconnected) => panic!("the supervisor has ended"),
            };
            assert!(Instant::now() < until, "no service since the kill: {good:?}, {line:?}");
            let mut words = line.splitn(4, ' ');
            let Some(thread) = words.next().and_then(|word| word.parse::<usize>().ok()) else {
                continue;
            };
            match (thread, words.next(), words.next()) {
                (0 | 1, Some("Ok"), _) | (2, Some("Limit"), Some("deadline")) => good[thread] += 1,
                (_, Some("Internal"), Some("worker_lost")) => {
                    lost += 1;
                    good[thread] = 0;
                }
                _ => panic!("a run ended as none may: {line}"),
            }
        }
        lost
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn whoever_is_killed_the_service_goes_on_and_nothing_is_left() {
    if !is_root() {
        return;
    }
    let mut dice = dice();
    let rounds = number("FORGE_CHAOS_ROUNDS", 10);
    let copy = Copies::new(&[&std::env::current_exe().unwrap()]);
    let mut service = Service::start(&copy, "reset");
    service.serves();
    let mut killed = [0; 3];
    let mut lost = 0;
    let (mut slowest, mut slowest_end) = (Duration::ZERO, Duration::ZERO);
    for round in 0..rounds {
        std::thread::sleep(Duration::from_millis(dice.throw(60) as u64));
        let supervisor = service.pid();
        // A zygote whose successor is on its way, or that is just becoming one,
        // is not among them yet.
        let until = Instant::now() + RECOVERY_TIME_MAX;
        let (all, zygote) = loop {
            let all = copy.workers();
            if let Some(zygote) = all.iter().find(|it| it.parent == supervisor) {
                let zygote = zygote.pid;
                break (all, zygote);
            }
            assert!(Instant::now() < until, "there is no zygote: {all:#?}");
            std::thread::sleep(Duration::from_millis(1));
        };
        let workers: Vec<i32> =
            all.iter().filter(|it| it.parent == zygote).map(|it| it.pid).collect();
        // Each of them in the first rounds, then as it comes.
        let victim = if round < 3 { round as usize } else { dice.throw(3) };
        let began = Instant::now();
        match victim {
            0 if !workers.is_empty() => kill(workers[dice.throw(workers.len())]),
            0 | 1 => kill(zygote),
            _ => {
                let theirs = all.iter().map(|it| it.pid).chain([supervisor]).collect();
                let spaces = Spaces::of(&all);
                assert!(spaces.count() >= NAMESPACES.len(), "{} of {all:#?}", spaces.count());
                kill(supervisor);
                service.child.wait().unwrap();
                nothing_is_left(&copy, &theirs, &spaces);
                slowest_end = slowest_end.max(began.elapsed());
                let reuse = if dice.throw(2) == 0 { "fresh" } else { "reset" };
                service = Service::start(&copy, reuse);
            }
        }
        lost += service.serves();
        if victim == 2 {
            no_group_is_left_of(supervisor);
        }
        killed[victim] += 1;
        slowest = slowest.max(began.elapsed());
    }
    eprintln!(
        "{rounds} rounds: killed {} workers, {} zygotes, {} supervisors; {lost} runs lost; \
         service again after at most {slowest:?}, nothing left of a supervisor after at most \
         {slowest_end:?}",
        killed[0], killed[1], killed[2]
    );
    let theirs = copy.processes().iter().map(|it| it.pid).collect();
    drop(service);
    nothing_is_left(&copy, &theirs, &Spaces::default());
}
