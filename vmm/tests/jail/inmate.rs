//! The process inside: it puts on the layers it is told, forks, has the child
//! make one attempt, and says what became of it.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::ops::BitOr;
use std::os::fd::AsFd as _;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use forge_vmm::jail::{
    Filter, Identity, Limits, Namespaces, Place, Role, landlock, privileges, seccomp, tree,
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

impl BitOr for Layers {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl Layers {
    fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:06b}", self.0)
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
pub const WORKER_LIMITS: Limits =
    Limits { open_files: 16, processes: 0, file_bytes: 0, address_space_bytes: Some(1 << 30) };

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
        "show_capabilities" => {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            print!("{status}");
            Some(ExitCode::SUCCESS)
        }
        _ => None,
    }
}

fn layers(word: &str) -> Layers {
    Layers(u8::from_str_radix(word, 2).unwrap())
}

/// The zygote's way.
fn inmate(layers: Layers, attempt: &str, words: &[String]) {
    let filters = [Role::Zygote, Role::Worker].map(|role| Filter::compile(role).unwrap());
    let procfs = if layers.has(TREE) { tree::enter().unwrap().procfs.ok() } else { None };
    if layers.has(PRIVILEGES) {
        privileges::drop_all().unwrap();
    } else {
        // What Landlock and seccomp ask for, and nothing else.
        // SAFETY: an option that takes numbers alone.
        unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    }
    if layers.has(LIMITS) {
        Limits { open_files: 64, processes: 1000, file_bytes: 0, address_space_bytes: None }.apply().unwrap();
    }
    if layers.has(LANDLOCK) {
        landlock::restrict(procfs.as_ref().map(|fd| fd.as_fd())).unwrap();
    }
    if layers.has(FILTER) {
        seccomp::report_forbidden(tell).unwrap();
        filters[0].install().unwrap();
    }
    attempts::PARENT.store(std::process::id() as i32, Ordering::Relaxed);
    // SAFETY: this process has one thread.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        worker(layers, &filters[1], attempt, words);
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

/// A worker's way.
fn worker(layers: Layers, filter: &Filter, attempt: &str, words: &[String]) -> ! {
    let attempt = attempts::find(attempt);
    if layers.has(LANDLOCK) {
        landlock::restrict(None).unwrap();
    }
    if layers.has(LIMITS) {
        WORKER_LIMITS.apply().unwrap();
        // In place of the signal that comes with the error.
        // SAFETY: ignoring a signal has no preconditions.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    }
    if layers.has(FILTER) {
        filter.install().unwrap();
    }
    match attempt(words) {
        Ok(()) => write(b"done\n"),
        Err(error) => {
            write(b"refused ");
            number(error);
        }
    }
    // SAFETY: ends the process at once, with nothing left to write.
    unsafe { libc::_exit(0) }
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
