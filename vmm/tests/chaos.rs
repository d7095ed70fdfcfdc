//! Processes killed at random, under load: a worker's, the zygote's, the
//! supervisor's.
//!
//! After a worker or the zygote was killed, the same supervisor carries out
//! runs again. After the supervisor was killed, there is soon no process, no
//! VM and no namespace left of it; the next one works, and removes its cgroup.
//!
//! The supervisor is this executable again, with three threads that run
//! programs without a pause, one of them endless ones. `FORGE_CHAOS_ROUNDS`
//! says how often (10; 300 by explicit command), `FORGE_CHAOS_SEED` repeats a
//! sequence.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/processes.rs"]
mod processes;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant, SystemTime};

use forge_protocol::broker::Authority;
use forge_protocol::limits::RunLimits;
use forge_protocol::service::Order;
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::Reuse;
use forge_vmm::jail::cgroup::Parent;
use forge_vmm::jail::{GroupLimits, descriptors};
use forge_vmm::pool::PoolOptions;
use forge_vmm::supervisor::{Supervisor, SupervisorOptions};
use processes::Process;
use support::{forge_module, signed, signer};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [role, executable, reuse] = &words[..]
        && role == "supervise"
    {
        supervise(Path::new(executable), reuse);
    }
    support::main(claims![whoever_is_killed_the_service_goes_on_and_nothing_is_left], claims![])
}

// The supervisor's part

const HELLO: &str = r#"(drop (call $output (i32.const 0) (i32.const 5))) (i32.const 0)"#;
const ENDLESS: &str = "(loop (br 0)) (unreachable)";
const MEMORY: &str = r#"(memory (export "memory") 1) (data (i32.const 0) "hello")"#;

/// Runs programs until it is killed, and says how each ended:
/// `THREAD STATUS KIND`.
fn supervise(executable: &Path, reuse: &str) -> ! {
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
        worker: Some(executable.to_owned()),
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
                    let (status, kind, reason) = (report.status, report.kind, report.reason);
                    let line = format!("{thread} {status:?} {kind} {reason}\n");
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

const RECOVERY_TIME_MAX: Duration = Duration::from_secs(60);

/// A copy of `forge-vmm`, so that its processes are told from all others.
struct Copy {
    folder: PathBuf,
    inode: (u64, u64),
}

impl Copy {
    fn new() -> Self {
        let folder = std::env::temp_dir().join(format!("forge-chaos-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).unwrap();
        let mut this = Self { folder, inode: (0, 0) };
        fs::copy(env!("CARGO_BIN_EXE_forge-vmm"), this.path()).unwrap();
        let metadata = fs::metadata(this.path()).unwrap();
        this.inode = (metadata.dev(), metadata.ino());
        this
    }

    fn path(&self) -> PathBuf {
        self.folder.join("forge-vmm")
    }

    /// Every process that executes it.
    fn processes(&self) -> Vec<Process> {
        let ours = |it: &Process| {
            let executable = fs::metadata(format!("/proc/{}/exe", it.pid));
            executable.is_ok_and(|it| (it.dev(), it.ino()) == self.inode)
        };
        Process::all().into_iter().filter(ours).collect()
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A supervisor, and what it says.
struct Service {
    child: Child,
    lines: Receiver<String>,
}

impl Service {
    fn start(copy: &Copy, reuse: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .arg("supervise")
            .arg(copy.path())
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

const NAMESPACES: [&str; 6] = ["user", "pid", "net", "mnt", "ipc", "uts"];

/// The inodes of a process's namespaces.
fn namespaces(pid: i32) -> impl Iterator<Item = u64> {
    let of = move |kind| fs::metadata(format!("/proc/{pid}/ns/{kind}")).ok();
    NAMESPACES.into_iter().filter_map(of).map(|it| it.ino())
}

/// The VMs that the kernel lists for these processes, where it does.
fn vms_of(pids: &BTreeSet<i32>) -> Vec<String> {
    let entries = fs::read_dir("/sys/kernel/debug/kvm").into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let of = |name: &String| {
        let pid = name.split_once('-').and_then(|(pid, _)| pid.parse().ok());
        pid.is_some_and(|pid| pids.contains(&pid))
    };
    names.filter(of).collect()
}

/// Small, and repeatable.
struct Dice(u64);

impl Dice {
    fn throw(&mut self, sides: usize) -> usize {
        // xorshift64
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % sides as u64) as usize
    }
}

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().unwrap())
}

fn kill(pid: i32) {
    // SAFETY: signals a process that this test has started, directly or not.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

fn whoever_is_killed_the_service_goes_on_and_nothing_is_left() {
    // SAFETY: has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: who looks at jailed processes has to be root");
        return;
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    // A host's first process may take seconds to collect what was orphaned.
    // SAFETY: an option that takes a number.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
    let seed = number("FORGE_CHAOS_SEED", now.as_nanos() as u64 | 1);
    let rounds = number("FORGE_CHAOS_ROUNDS", 10);
    eprintln!("FORGE_CHAOS_SEED={seed}");
    let mut dice = Dice(seed);
    let copy = Copy::new();
    let before: BTreeSet<u64> = namespaces(std::process::id() as i32).collect();
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
            let all = copy.processes();
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
                let theirs: BTreeSet<i32> = all.iter().map(|it| it.pid).collect();
                let mut spaces: BTreeSet<u64> =
                    all.iter().flat_map(|it| namespaces(it.pid)).collect();
                spaces.retain(|it| !before.contains(it));
                assert!(spaces.len() >= NAMESPACES.len(), "{spaces:?} of {all:#?}");
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
    let last = service.pid();
    drop(service);
    nothing_is_left(&copy, &BTreeSet::from([last]), &BTreeSet::new());
}

/// Collects the orphans that have ended.
fn reap() {
    let this = std::process::id() as i32;
    for orphan in Process::children_of(this).iter().filter(|it| it.zombie) {
        // SAFETY: the status is not asked for.
        unsafe { libc::waitpid(orphan.pid, std::ptr::null_mut(), libc::WNOHANG) };
    }
}

/// That soon there is no process of theirs, no VM and no namespace.
fn nothing_is_left(copy: &Copy, theirs: &BTreeSet<i32>, spaces: &BTreeSet<u64>) {
    let until = Instant::now() + RECOVERY_TIME_MAX;
    loop {
        reap();
        let processes = copy.processes();
        let kept: Vec<_> = Process::all()
            .into_iter()
            .filter(|it| namespaces(it.pid).any(|it| spaces.contains(&it)))
            .collect();
        let machines = vms_of(theirs);
        let holders: Vec<_> = processes
            .iter()
            .filter(|it| {
                let held = descriptors::of(it.pid).unwrap_or_default();
                held.iter().any(|it| it.what.contains("kvm-vm"))
            })
            .collect();
        if processes.is_empty() && kept.is_empty() && machines.is_empty() && holders.is_empty() {
            return;
        }
        assert!(
            Instant::now() < until,
            "left: {processes:#?}, in their namespaces {kept:#?}, VMs {machines:?} of {holders:?}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// That the next supervisor has removed the group of one that was killed.
fn no_group_is_left_of(supervisor: i32) {
    let Ok(parent) = Parent::own() else { return };
    let part = format!("-{supervisor}-");
    let entries = fs::read_dir(parent.path()).unwrap().flatten();
    let left: Vec<_> =
        entries.filter(|it| it.file_name().to_string_lossy().contains(&part)).collect();
    assert!(left.is_empty(), "{left:?}");
}
