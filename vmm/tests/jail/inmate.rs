//! The process inside: it puts on the layers it is told, forks, has the child
//! make one attempt, and says what became of it.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::ops::BitOr;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Instant;

use forge_vmm::jail::rules::{Rule, When};
use forge_vmm::jail::{
    AddressSpace, Filter, Identity, Limits, Namespaces, Place, Role, WorkerJail, landlock,
    privileges, seccomp, slot, tree,
};

use crate::attempts;

/// Parts of the jail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layers(u8);

pub const NONE: Layers = Layers(0);
pub const NAMESPACES: Layers = Layers(1);
pub const TREE: Layers = Layers(2);
pub const PRIVILEGES: Layers = Layers(4);
pub const LIMITS: Layers = Layers(8);
pub const LANDLOCK: Layers = Layers(16);
pub const FILTER: Layers = Layers(32);
pub const ALL: Layers = Layers(63);
/// With [`FILTER`]: that of a worker without a VM.
pub const PROCESS: Layers = Layers(64);

impl BitOr for Layers {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl Layers {
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:07b}", self.0)
    }
}

/// Where a process with these layers is to be started.
pub fn place(layers: Layers) -> Place {
    match layers.has(NAMESPACES) {
        true => Place::best(),
        false => Place { namespaces: Namespaces::Shared, identity: Identity::Caller },
    }
}

/// A worker's limits, as far as these tests go.
pub const WORKER_LIMITS: Limits = Limits { open_files: 16, processes: 0, file_bytes: 0 };
pub const ADDRESS_SPACE_BYTES: u64 = 1 << 30;

const ZYGOTE_LIMITS: Limits = Limits { open_files: 64, processes: 1000, file_bytes: 0 };

/// If this process was started for a role of its own, plays it.
pub fn main(role: &str, words: &[String]) -> Option<ExitCode> {
    match role {
        // A supervisor that is an ordinary user.
        "supervise" => {
            let layers = layers(&words[0]);
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let (spawned, mut out) =
                crate::start(place(layers), &[&["inmate"], &words[..]].concat());
            let mut said = Vec::new();
            out.read_to_end(&mut said).unwrap();
            spawned.wait().unwrap();
            std::io::stdout().write_all(&said).unwrap();
            Some(ExitCode::SUCCESS)
        }
        "inmate" => {
            inmate(layers(&words[0]), &words[1], &words[2..]);
            Some(ExitCode::SUCCESS)
        }
        // One rule's call, with the rule and without.
        "rule" => rule(&words[0], words[1].parse().unwrap(), &words[2]),
        "wait" => {
            // SAFETY: neither has preconditions.
            let (uid, gid) = unsafe { (libc::getuid(), libc::getgid()) };
            println!("uid {uid} gid {gid} pid {}", std::process::id());
            go();
            Some(ExitCode::SUCCESS)
        }
        "environment" => {
            println!("{} variables", std::env::vars_os().count());
            Some(ExitCode::SUCCESS)
        }
        "allocate" => {
            go();
            let mut much = vec![0u8; 128 << 20];
            for page in much.chunks_mut(4096) {
                page[0] = 1;
            }
            std::hint::black_box(&much);
            println!("done");
            Some(ExitCode::SUCCESS)
        }
        "fork" => {
            go();
            say(attempts::find("fork")(&[]));
            Some(ExitCode::SUCCESS)
        }
        "burn" => {
            go();
            // Ten times what a tenth of a CPU gives in one second's tenth. Time in
            // which an emulator stands still is counted here too, and no one is
            // throttled in it.
            while cpu_ms() < 100 {
                std::hint::black_box((0..1000).sum::<u64>());
            }
            Some(ExitCode::SUCCESS)
        }
        // For the figures in docs/jail.md.
        "measure" => {
            measure();
            // SAFETY: ends the process. The ordinary way out makes calls that
            // are forbidden by now.
            unsafe { libc::_exit(0) }
        }
        "show_capabilities" => {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            print!("{status}");
            Some(ExitCode::SUCCESS)
        }
        _ => None,
    }
}

/// Waits for a byte, or for nobody being left to send one.
fn go() {
    let _ = std::io::stdin().read(&mut [0]);
}

/// CPU time this process has used.
fn cpu_ms() -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec * 1000 + time.tv_nsec / 1_000_000
}

fn rule(role: &str, index: usize, how: &str) -> ! {
    let role = Role::ALL.into_iter().find(|it| format!("{it:?}") == role).unwrap();
    let rule = role.rules()[index];
    let filter = match how {
        "with" => Filter::compile(role).unwrap(),
        _ => Filter::compile_without(role, index).unwrap(),
    };
    // Arguments that no call does anything with, but for the one looked at.
    let mut arguments = [-1i64, -1, 0, 0, 0, 0];
    match rule.when {
        When::Always => {}
        When::Is(at, value) => arguments[usize::from(at)] = value.into(),
        When::Without(at, _) => arguments[usize::from(at)] = 0,
        When::WithoutEither((first, _), (second, _)) => {
            arguments[usize::from(first)] = 0;
            arguments[usize::from(second)] = 0;
        }
        When::Sealed(at, value) => {
            arguments[usize::from(at)] = value.into();
            arguments[usize::from(at) + 1] = slot::address() as i64;
        }
    }
    // `rt_sigreturn` takes what is on the stack for registers, and faults by
    // it. Rust's handler of that would make calls of its own.
    // SAFETY: default actions, and an option that takes numbers alone.
    unsafe {
        libc::signal(libc::SIGSEGV, libc::SIG_DFL);
        libc::signal(libc::SIGBUS, libc::SIG_DFL);
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    }
    seccomp::report_forbidden(tell).unwrap();
    filter.install().unwrap();
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: no argument points anywhere. A fork's child and `rt_sigreturn`
    // only end this process.
    unsafe {
        libc::syscall(rule.number, a, b, c, d, e, f);
        libc::_exit(0)
    }
}

fn layers(word: &str) -> Layers {
    Layers(u8::from_str_radix(word, 2).unwrap())
}

/// The zygote's, and what it takes to see how a child ended.
fn zygotes_filter() -> Filter {
    let mut rules = Role::Zygote.rules().to_vec();
    for (number, name) in [(libc::SYS_wait4, "wait4"), (libc::SYS_read, "read")] {
        let reason = "this test's";
        rules.push(Rule { number, name, when: When::Always, reason, elsewhere: false });
    }
    Filter::of(&rules).unwrap()
}

/// The zygote's way.
fn inmate(layers: Layers, attempt: &str, words: &[String]) {
    let workers = if layers.has(PROCESS) { Role::Process } else { Role::Worker };
    let filters = [zygotes_filter(), Filter::compile(workers).unwrap()];
    let mut lifeline = std::io::pipe().unwrap();
    let procfs = if layers.has(TREE) { tree::enter().unwrap().procfs.ok() } else { None };
    if layers.has(PRIVILEGES) {
        privileges::drop_all().unwrap();
    } else {
        // What Landlock and seccomp ask for, and nothing else.
        // SAFETY: an option that takes numbers alone.
        unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    }
    if layers.has(LIMITS) {
        ZYGOTE_LIMITS.apply().unwrap();
    }
    let ruleset = landlock::Ruleset::new().unwrap();
    if layers.has(LANDLOCK) {
        landlock::restrict(procfs.as_ref().map(|fd| fd.as_fd())).unwrap();
    }
    attempts::PARENT.store(std::process::id() as i32, Ordering::Relaxed);
    if layers.has(FILTER) {
        seccomp::report_forbidden(tell).unwrap();
        filters[0].install().unwrap();
    }
    if attempt == "signal_sibling" {
        let pid = fork();
        if pid == 0 {
            if layers.has(LANDLOCK) {
                ruleset.restrict().unwrap();
            }
            // Until both of the others have ended.
            drop(lifeline.1);
            let _ = lifeline.0.read(&mut [0]);
            // SAFETY: ends the process.
            unsafe { libc::_exit(0) };
        }
        attempts::SIBLING.store(pid, Ordering::Relaxed);
    }
    let pid = fork();
    if pid == 0 {
        worker(layers, &filters[1], &ruleset, attempt, words, procfs);
    }
    if attempt == "pause" {
        println!("{pid}");
    }
    let mut status = 0;
    // SAFETY: `status` is writable.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    if libc::WIFSIGNALED(status) {
        println!("signal {}", libc::WTERMSIG(status));
    } else {
        println!("exit {}", libc::WEXITSTATUS(status));
    }
}

/// As the zygote forks: without what the C library does beside it, for which
/// there is no rule.
fn fork() -> libc::pid_t {
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: this process has one thread, and the child gets a copy of all
    // that it has.
    unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, none, none, none, 0) as libc::pid_t }
}

/// A worker's way.
fn worker(
    layers: Layers,
    filter: &Filter,
    ruleset: &landlock::Ruleset,
    attempt: &str,
    words: &[String],
    procfs: Option<OwnedFd>,
) -> ! {
    if attempt == "pagemap" || attempt == "write_below_procfs" {
        let Some(procfs) = &procfs else {
            println!("no procfs");
            // SAFETY: ends the process.
            unsafe { libc::_exit(0) }
        };
        if attempt == "pagemap" {
            attempts::open_pagemap(procfs.as_raw_fd()).unwrap();
        }
        attempts::PROCFS.store(procfs.as_raw_fd(), Ordering::Relaxed);
    }
    let attempt = attempts::find(attempt);
    if layers.has(LANDLOCK) {
        ruleset.restrict().unwrap();
    }
    if attempts::PAGEMAP.load(Ordering::Relaxed) >= 0 {
        let again = attempts::open_pagemap(procfs.as_ref().unwrap().as_raw_fd());
        write(b"again ");
        number(again.unwrap_err());
    }
    if layers.has(LIMITS) {
        WORKER_LIMITS.apply().unwrap();
        AddressSpace::now().unwrap().lower(ADDRESS_SPACE_BYTES).unwrap();
        // In place of the signal that comes with the error.
        // SAFETY: ignoring a signal has no preconditions.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    }
    if layers.has(FILTER) {
        filter.install().unwrap();
    }
    say(attempt(words));
    // SAFETY: ends the process at once, with nothing left to write.
    unsafe { libc::_exit(0) }
}

fn say(result: Result<(), i32>) {
    match result {
        Ok(()) => write(b"done\n"),
        Err(error) => {
            write(b"refused ");
            number(error);
        }
    }
}

/// Called in the handler of SIGSYS.
fn tell(call: i32) {
    write(b"forbidden ");
    number(call);
}

fn write(bytes: &[u8]) {
    // SAFETY: readable bytes.
    unsafe { libc::write(1, bytes.as_ptr().cast(), bytes.len()) };
}

fn number(value: i32) {
    let mut digits = [b'\n'; 12];
    let mut at = digits.len() - 1;
    let mut left = value.unsigned_abs();
    loop {
        at -= 1;
        digits[at] = b'0' + (left % 10) as u8;
        left /= 10;
        if left == 0 {
            break;
        }
    }
    write(&digits[at..]);
}

/// Prints what the layers cost, in a process that puts them on as it goes.
fn measure() {
    let timed = |what: &str, mut work: Box<dyn FnMut()>| {
        let mut us: Vec<f64> = (0..101)
            .map(|_| {
                let began = Instant::now();
                work();
                began.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        us.sort_by(f64::total_cmp);
        println!("{what}: median {:.1} us, longest {:.1}", us[50], us[100]);
    };
    let (mut told, tell) = std::io::pipe().unwrap();
    let (told_fd, tell_fd) = (told.as_raw_fd(), tell.as_raw_fd());
    // What the work takes inside a child, whose making and end are left out.
    let mut in_child = |what: &str, work: &dyn Fn()| {
        let mut us: Vec<f64> = (0..101)
            .map(|_| {
                // The child only works, tells and ends.
                let pid = fork();
                if pid == 0 {
                    let began = Instant::now();
                    work();
                    let took = began.elapsed().as_nanos() as u64;
                    (&tell).write_all(&took.to_ne_bytes()).unwrap();
                    // SAFETY: ends the process.
                    unsafe { libc::_exit(0) }
                }
                let mut ns = [0; 8];
                told.read_exact(&mut ns).unwrap();
                // SAFETY: the status is not asked for.
                unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
                u64::from_ne_bytes(ns) as f64 / 1e3
            })
            .collect();
        us.sort_by(f64::total_cmp);
        println!("{what}: median {:.1} us, longest {:.1}", us[50], us[100]);
    };
    let calls = |what: &str| {
        for (name, number, request) in [
            ("ioctl KVM_RUN", libc::SYS_ioctl, 0xAE80),
            ("ioctl PAGEMAP_SCAN", libc::SYS_ioctl, 0xC060_6610u64),
            ("close", libc::SYS_close, 0),
        ] {
            let mut ns: Vec<f64> = (0..21)
                .map(|_| {
                    let began = Instant::now();
                    for _ in 0..20_000 {
                        // SAFETY: a descriptor that is none.
                        unsafe { libc::syscall(number, -1, request, 0) };
                    }
                    began.elapsed().as_secs_f64() * 1e9 / 20_000.0
                })
                .collect();
            ns.sort_by(f64::total_cmp);
            println!("{name} of no descriptor, {what}: median {:.0} ns", ns[10]);
        }
    };
    // SAFETY: an option that takes numbers alone.
    unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    let [zygote, worker] = [zygotes_filter(), Filter::compile(Role::Worker).unwrap()];
    println!("instructions: zygote {}, worker {}", zygote.instructions(), worker.instructions());
    for role in Role::ALL {
        timed("compile", Box::new(move || drop(Filter::compile(role).unwrap())));
    }
    let ruleset = landlock::Ruleset::new().unwrap();
    in_child("a worker's filter, without a zygote's", &|| worker.install().unwrap());
    let little = [libc::SYS_write, libc::SYS_exit_group];
    let few: Vec<_> =
        Role::Worker.rules().iter().filter(|it| little.contains(&it.number)).copied().collect();
    let tiny = Filter::of(&few).unwrap();
    in_child("a filter of two rules, without a zygote's", &|| tiny.install().unwrap());
    calls("no filter");
    ZYGOTE_LIMITS.apply().unwrap();
    let jail = WorkerJail::prepare(&WORKER_LIMITS, worker.clone()).unwrap();
    let lowering = WORKER_LIMITS.lowering().unwrap();
    landlock::restrict(None).unwrap();
    zygote.install().unwrap();
    calls("the zygote's filter");
    in_child("nothing", &|| ());
    in_child("a Landlock domain", &|| ruleset.restrict().unwrap());
    in_child("limits", &|| lowering.apply().unwrap());
    in_child("a worker's filter", &|| worker.install().unwrap());
    in_child("a filter of two rules", &|| tiny.install().unwrap());
    in_child("a worker's whole part", &|| {
        jail.enter(&mut [told_fd, tell_fd], ADDRESS_SPACE_BYTES).unwrap();
    });
    worker.install().unwrap();
    calls("both filters");
}
