//! What a process in the jail cannot do, each thing by trying it.
//!
//! Each attempt is made in a process that went the way of a zygote's child:
//! spawn, tree, privileges, limits, Landlock, fork, its own Landlock and
//! limits, filter. Then with single layers, to show that each holds by
//! itself, and with none, to show that the attempt is one. Started by root,
//! all of it is done a second time with an ordinary user as supervisor.

#![allow(missing_docs, clippy::unwrap_used)]

#[path = "jail/attempts.rs"]
mod attempts;
#[path = "jail/inmate.rs"]
mod inmate;

use std::io::Read as _;
use std::net::TcpListener;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use forge_vmm::jail::seccomp::EXIT_FORBIDDEN;
use forge_vmm::jail::{Identity, Namespaces, Place, Spawned, spawn};
use inmate::{ALL, FILTER, LANDLOCK, LIMITS, Layers, NAMESPACES, NONE, PRIVILEGES, TREE};
use libtest_mimic::{Arguments, Trial};

macro_rules! claims {
    ($($test:ident),* $(,)?) => { vec![$((stringify!($test), $test as fn())),*] };
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [role, rest @ ..] = &words[..]
        && let Some(code) = inmate::main(role, rest)
    {
        return code;
    }
    let arguments = Arguments::from_args();
    if !root() && !arguments.list {
        eprintln!("SKIPPED: everything again as root, because this user is not");
    }
    let tests: Vec<(&str, fn())> = claims![
        a_worker_cannot_open_a_file,
        a_worker_cannot_create_a_file,
        a_worker_cannot_list_processes,
        a_worker_cannot_reach_the_hosts_network,
        a_worker_cannot_configure_a_network,
        a_worker_cannot_reach_an_abstract_socket,
        a_worker_cannot_make_a_vsock_socket,
        a_worker_cannot_fork,
        a_worker_cannot_execute_anything,
        a_worker_cannot_start_a_thread,
        a_worker_cannot_trace_its_parent,
        a_worker_cannot_signal_a_process_of_the_host,
        a_worker_cannot_signal_its_parent,
        a_worker_cannot_mount,
        a_worker_cannot_make_namespaces,
        a_worker_does_not_learn_the_hosts_name,
        a_worker_does_not_see_the_hosts_shared_memory,
        a_worker_cannot_gain_a_capability,
        a_worker_cannot_regain_one_by_executing,
        a_worker_cannot_map_executable_memory,
        a_worker_cannot_make_memory_executable,
        a_worker_gets_no_more_descriptors_than_allowed,
        a_worker_cannot_leave_a_file_larger_than_nothing,
        a_worker_gets_no_more_address_space_than_allowed,
        a_worker_cannot_make_an_undeclared_kvm_request,
        a_worker_cannot_enter_by_the_32_bit_door,
        a_forbidden_call_is_reported_by_its_number,
    ];
    let trials = tests
        .into_iter()
        .map(|(name, test)| {
            Trial::test(name, move || {
                test();
                Ok(())
            })
        })
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn root() -> bool {
    // SAFETY: has no preconditions.
    unsafe { libc::geteuid() == 0 }
}

/// An ordinary user's number, for a supervisor that is not root.
const ORDINARY: u32 = 54_321;

/// Who starts the jail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Starter {
    /// This process.
    Me,
    /// An ordinary user, which takes root to become.
    Ordinary,
}

impl Starter {
    fn all() -> &'static [Self] {
        if root() { &[Self::Me, Self::Ordinary] } else { &[Self::Me] }
    }
}

/// What became of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    Refused(i32),
    Forbidden(i32),
    Other(String),
}

fn pipe() -> (std::fs::File, OwnedFd) {
    let mut ends = [0; 2];
    // SAFETY: writes two descriptors, which then are ours.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        (std::fs::File::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))
    }
}

/// Starts this executable in a place, with a pipe for 1 and 2.
fn start(place: Place, words: &[&str]) -> (Spawned, std::fs::File) {
    let (out, end) = pipe();
    let nothing = std::fs::File::open("/dev/null").unwrap();
    let descriptors = vec![(nothing.into(), 0), (end.try_clone().unwrap(), 1), (end, 2)];
    let mut arguments = vec![std::ffi::OsStr::new("jail")];
    arguments.extend(words.iter().map(std::ffi::OsStr::new));
    let spawned = spawn(Path::new("/proc/self/exe"), &arguments, descriptors, place).unwrap();
    (spawned, out)
}

/// Makes an attempt within these layers and returns all that was said.
fn said(starter: Starter, layers: Layers, attempt: &str, more: &[&str]) -> String {
    let word = layers.to_string();
    let (spawned, mut out) = match starter {
        Starter::Me => {
            let words = [&["inmate", &word, attempt], more].concat();
            start(inmate::place(layers), &words)
        }
        Starter::Ordinary => {
            let words = [&["supervise", &word, attempt], more].concat();
            let place = Place { namespaces: Namespaces::Shared, identity: Identity::Id(ORDINARY) };
            start(place, &words)
        }
    };
    let mut said = String::new();
    out.read_to_string(&mut said).unwrap();
    spawned.wait().unwrap();
    said
}

fn outcome(starter: Starter, layers: Layers, attempt: &str, more: &[&str]) -> Outcome {
    let said = said(starter, layers, attempt, more);
    let words: Vec<&str> = said.split_whitespace().collect();
    match words[..] {
        ["done", "exit", "0"] => Outcome::Done,
        ["refused", code, "exit", "0"] => Outcome::Refused(code.parse().unwrap()),
        ["forbidden", number, "exit", code] if code == EXIT_FORBIDDEN.to_string() => {
            Outcome::Forbidden(number.parse().unwrap())
        }
        _ => Outcome::Other(said),
    }
}

/// That an attempt is one: it succeeds outside any jail. Then that the whole
/// jail stops it at this call, and each of these layers with this error.
#[track_caller]
fn stopped(attempt: &str, more: &[&str], call: libc::c_long, layers: &[(Layers, i32)]) {
    for &starter in Starter::all() {
        stopped_for(starter, attempt, more, call, layers);
    }
}

#[track_caller]
fn stopped_for(
    starter: Starter,
    attempt: &str,
    more: &[&str],
    call: libc::c_long,
    layers: &[(Layers, i32)],
) {
    let free = outcome(starter, NONE, attempt, more);
    assert_eq!(free, Outcome::Done, "{attempt} by {starter:?} outside any jail");
    for layers in [FILTER, ALL] {
        let full = outcome(starter, layers, attempt, more);
        let expected = Outcome::Forbidden(call as i32);
        assert_eq!(full, expected, "{attempt} by {starter:?} in {layers}");
    }
    for &(layers, error) in layers {
        let by_itself = outcome(starter, layers, attempt, more);
        let expected = Outcome::Refused(error);
        assert_eq!(by_itself, expected, "{attempt} by {starter:?} in {layers}");
    }
}

// Files

fn a_worker_cannot_open_a_file() {
    stopped(
        "open",
        &["/etc/passwd"],
        libc::SYS_openat,
        &[(NAMESPACES | TREE, libc::ENOENT), (LANDLOCK, libc::EACCES)],
    );
}

fn a_worker_cannot_create_a_file() {
    let directory = Scratch::new("create");
    let path = directory.0.join("made");
    stopped(
        "create",
        &[path.to_str().unwrap()],
        libc::SYS_openat,
        &[(NAMESPACES | TREE, libc::ENOENT), (LANDLOCK, libc::EACCES)],
    );
    // In the root it has, and with all capabilities.
    for &starter in Starter::all() {
        let outcome = outcome(starter, NAMESPACES | TREE, "create", &["/made"]);
        assert_eq!(outcome, Outcome::Refused(libc::EROFS));
    }
}

fn a_worker_cannot_list_processes() {
    stopped(
        "list",
        &["/proc"],
        libc::SYS_openat,
        &[(NAMESPACES | TREE, libc::ENOENT), (LANDLOCK, libc::EACCES)],
    );
}

fn a_worker_cannot_leave_a_file_larger_than_nothing() {
    stopped("grow_a_file", &[], libc::SYS_memfd_create, &[(LIMITS, libc::EFBIG)]);
}

// Networks

fn a_worker_cannot_reach_the_hosts_network() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let mut layers = vec![(NAMESPACES, libc::ENETUNREACH)];
    if landlock_abi() >= 4 {
        layers.push((LANDLOCK, libc::EACCES));
    }
    stopped("connect", &[&port], libc::SYS_socket, &layers);
}

fn a_worker_cannot_configure_a_network() {
    // As root alone: an ordinary user cannot do it outside either.
    if !root() {
        eprintln!("SKIPPED: only root may configure a network");
        return;
    }
    stopped_for(
        Starter::Me,
        "loopback_up",
        &[],
        libc::SYS_socket,
        &[(PRIVILEGES, libc::EPERM), (NAMESPACES | PRIVILEGES, libc::EPERM)],
    );
}

fn a_worker_cannot_reach_an_abstract_socket() {
    let name = format!("forge-jail-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let _listener = UnixListener::bind_addr(&address).unwrap();
    let mut layers = vec![(NAMESPACES, libc::ECONNREFUSED)];
    if landlock_abi() >= 6 {
        layers.push((LANDLOCK, libc::EPERM));
    }
    stopped("abstract", &[&name], libc::SYS_socket, &layers);
}

/// No other layer knows of vsock: it is in no network namespace, and Landlock
/// has no right for it.
fn a_worker_cannot_make_a_vsock_socket() {
    for &starter in Starter::all() {
        if outcome(starter, NONE, "vsock", &[]) == Outcome::Refused(libc::EAFNOSUPPORT) {
            eprintln!("SKIPPED: outside the jail there is no vsock here either");
        }
        assert_eq!(
            outcome(starter, ALL, "vsock", &[]),
            Outcome::Forbidden(libc::SYS_socket as i32)
        );
    }
}

// Processes

fn a_worker_cannot_fork() {
    // Root of the host may pass the limit, and root is what `Me` would be
    // without a namespace.
    stopped("fork", &[], libc::SYS_clone, &[(NAMESPACES | PRIVILEGES | LIMITS, libc::EAGAIN)]);
}

fn a_worker_cannot_execute_anything() {
    stopped(
        "execute",
        &["/bin/echo"],
        libc::SYS_execve,
        &[(NAMESPACES | TREE, libc::ENOENT), (LANDLOCK, libc::EACCES)],
    );
}

fn a_worker_cannot_start_a_thread() {
    stopped("thread", &[], libc::SYS_clone, &[(NAMESPACES | PRIVILEGES | LIMITS, libc::EAGAIN)]);
}

fn a_worker_cannot_trace_its_parent() {
    stopped(
        "trace_parent",
        &[],
        libc::SYS_ptrace,
        &[(PRIVILEGES, libc::EPERM), (LANDLOCK, libc::EPERM)],
    );
}

fn a_worker_cannot_signal_a_process_of_the_host() {
    let child = std::process::Command::new("/bin/sleep").arg("60").spawn().unwrap();
    let pid = child.id().to_string();
    let _guard = Ended(child);
    let mut layers = vec![(NAMESPACES, libc::ESRCH)];
    if landlock_abi() >= 6 {
        layers.push((LANDLOCK, libc::EPERM));
    }
    // An ordinary user may signal its own processes only, and this is ours.
    stopped_for(Starter::Me, "signal", &[&pid], libc::SYS_kill, &layers);
}

fn a_worker_cannot_signal_its_parent() {
    let layers: &[(Layers, i32)] =
        if landlock_abi() >= 6 { &[(LANDLOCK, libc::EPERM)] } else { &[] };
    stopped("signal_parent", &[], libc::SYS_kill, layers);
}

// The kernel's other doors

fn a_worker_cannot_mount() {
    let here = [(NAMESPACES | PRIVILEGES, libc::EPERM), (NAMESPACES | LANDLOCK, libc::EPERM)];
    for &starter in Starter::all() {
        // Not outside any jail: it would change the host.
        assert_eq!(outcome(starter, NAMESPACES, "mount", &[]), Outcome::Done);
        for (layers, error) in here {
            let refused = Outcome::Refused(error);
            assert_eq!(outcome(starter, layers, "mount", &[]), refused, "{layers}");
        }
        let forbidden = Outcome::Forbidden(libc::SYS_mount as i32);
        assert_eq!(outcome(starter, ALL, "mount", &[]), forbidden);
    }
}

fn a_worker_cannot_make_namespaces() {
    stopped(
        "unshare",
        &[],
        libc::SYS_unshare,
        // The tree's making is what sets the number of user namespaces to 0.
        &[(NAMESPACES | TREE | PRIVILEGES, libc::ENOSPC)],
    );
}

fn a_worker_does_not_learn_the_hosts_name() {
    for &starter in Starter::all() {
        let name = said(starter, NAMESPACES, "hostname", &[]);
        assert!(name.starts_with("jail\n"), "{name}");
        let refused = outcome(starter, ALL, "hostname", &[]);
        assert_eq!(refused, Outcome::Forbidden(libc::SYS_uname as i32));
    }
}

fn a_worker_does_not_see_the_hosts_shared_memory() {
    let key = 0x464f_0000 | (std::process::id() & 0xffff) as i32;
    // SAFETY: makes a segment and, at the end, removes it.
    let id = unsafe { libc::shmget(key, 4096, libc::IPC_CREAT | libc::IPC_EXCL | 0o666) };
    assert!(id >= 0);
    stopped("shared", &[&key.to_string()], libc::SYS_shmget, &[(NAMESPACES, libc::ENOENT)]);
    // SAFETY: as above.
    unsafe { libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()) };
}

fn a_worker_cannot_gain_a_capability() {
    for &starter in Starter::all() {
        // Namespaces alone give all of them, which is what the layer after
        // takes away.
        assert_eq!(outcome(starter, NAMESPACES, "capset", &[]), Outcome::Done);
        for layers in [PRIVILEGES, NAMESPACES | PRIVILEGES] {
            let refused = Outcome::Refused(libc::EPERM);
            assert_eq!(outcome(starter, layers, "capset", &[]), refused);
        }
        let forbidden = Outcome::Forbidden(libc::SYS_capset as i32);
        assert_eq!(outcome(starter, ALL, "capset", &[]), forbidden);
    }
}

fn a_worker_cannot_regain_one_by_executing() {
    for &starter in Starter::all() {
        let held = |layers| {
            let said = said(starter, layers, "capabilities_by_executing", &[]);
            let line = said.lines().find(|line| line.starts_with("CapEff:"));
            let held = line.and_then(|line| line.split_whitespace().nth(1));
            u64::from_str_radix(held.unwrap_or_else(|| panic!("{said}")), 16).unwrap()
        };
        assert_ne!(held(NAMESPACES), 0);
        assert_eq!(held(NAMESPACES | PRIVILEGES), 0);
    }
}

fn a_worker_cannot_map_executable_memory() {
    stopped("map_executable", &[], libc::SYS_mmap, &[]);
}

fn a_worker_cannot_make_memory_executable() {
    stopped("make_executable", &[], libc::SYS_mprotect, &[]);
}

fn a_worker_gets_no_more_descriptors_than_allowed() {
    stopped("duplicate", &[], libc::SYS_dup, &[(LIMITS, libc::EMFILE)]);
}

fn a_worker_gets_no_more_address_space_than_allowed() {
    for &starter in Starter::all() {
        assert_eq!(outcome(starter, NONE, "map_much", &[]), Outcome::Done);
        // Mapping is allowed; the limit is what holds, filter or not.
        for layers in [LIMITS, ALL] {
            let refused = Outcome::Refused(libc::ENOMEM);
            assert_eq!(outcome(starter, layers, "map_much", &[]), refused, "{layers}");
        }
    }
}

fn a_worker_cannot_make_an_undeclared_kvm_request() {
    for &starter in Starter::all() {
        // Outside, the call gets as far as finding that this is no KVM.
        let no_kvm = Outcome::Refused(libc::ENOTTY);
        assert_eq!(outcome(starter, NONE, "create_vm", &[]), no_kvm);
        let forbidden = Outcome::Forbidden(libc::SYS_ioctl as i32);
        assert_eq!(outcome(starter, ALL, "create_vm", &[]), forbidden);
        // And one that is declared gets there inside, too.
        assert_eq!(outcome(starter, ALL, "run_vcpu", &[]), no_kvm);
    }
}

fn a_worker_cannot_enter_by_the_32_bit_door() {
    for &starter in Starter::all() {
        let said = said(starter, FILTER, "by_int_80", &[]);
        assert_eq!(said.trim(), format!("signal {}", libc::SIGSYS), "{starter:?}");
    }
}

fn a_forbidden_call_is_reported_by_its_number() {
    for (attempt, number) in [("getppid", libc::SYS_getppid), ("reboot", libc::SYS_reboot)] {
        let outcome = outcome(Starter::Me, ALL, attempt, &[]);
        assert_eq!(outcome, Outcome::Forbidden(number as i32));
    }
}

// Helpers

fn landlock_abi() -> i64 {
    // SAFETY: asks for the version, with no attribute and no effect.
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0usize, 1) }
}

/// A directory of a test's own, which everybody may use.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("forge-jail-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(&path, open).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Ended(std::process::Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
