//! What a process in the jail cannot do, each thing by trying it.
//!
//! Each attempt is made in a process that went the way of a zygote's child:
//! spawn, tree, privileges, limits, Landlock, fork, its own Landlock and
//! limits, filter: that of a worker with a VM, and that of one without. Then
//! with single layers, to show that each holds by
//! itself, and with none, to show that the attempt is one. Started by root,
//! all of it is done a second time with an ordinary user as supervisor.

#![allow(missing_docs, clippy::unwrap_used)]

#[path = "jail/attempts.rs"]
mod attempts;
#[path = "jail/inmate.rs"]
mod inmate;

use std::io::{BufRead as _, BufReader, PipeWriter, Read as _, Write as _};
use std::net::TcpListener;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;

use forge_vmm::jail::cgroup::Parent;
use forge_vmm::jail::namespaces::NOBODYS_ID;
use forge_vmm::jail::seccomp::EXIT_FORBIDDEN;
use forge_vmm::jail::{
    Group, GroupLimits, Identity, Namespaces, Place, Role, Spawned, descriptors, slot, spawn,
};
use inmate::{ALL, FILTER, LANDLOCK, LIMITS, Layers, NAMESPACES, NONE, PRIVILEGES, PROCESS, TREE};
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
    let tests: Vec<(&str, fn())> = claims![
        a_worker_cannot_open_a_file,
        a_worker_cannot_create_a_file,
        a_worker_cannot_list_processes,
        a_worker_cannot_reach_the_hosts_network,
        a_worker_cannot_reach_an_abstract_socket,
        a_worker_cannot_make_a_vsock_socket,
        a_worker_cannot_send_out_of_band,
        a_worker_cannot_pass_a_descriptor,
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
        a_worker_cannot_map_memory_that_stays_when_it_is_unmapped,
        a_worker_cannot_read_the_clock_of_another_process,
        a_worker_cannot_map_huge_pages_of_the_hosts_reserve,
        a_worker_cannot_make_memory_executable,
        a_worker_gets_no_more_descriptors_than_allowed,
        a_worker_cannot_leave_a_file_larger_than_nothing,
        a_worker_gets_no_more_address_space_than_allowed,
        a_worker_cannot_make_an_undeclared_kvm_request,
        a_worker_cannot_set_a_slot_of_memory_but_the_one_that_is_sealed,
        a_worker_cannot_enter_by_the_32_bit_door,
        a_forbidden_call_is_reported_by_its_number,
        every_privilege_is_given_up_for_good,
        every_limit_is_on_and_cannot_be_raised,
        a_process_in_the_jail_inherits_no_signals_and_no_session,
        a_worker_cannot_signal_another_worker,
        a_worker_cannot_read_its_parents_memory,
        a_worker_opens_its_own_pagemap_before_its_filter_and_never_again,
        the_procfs_of_its_own_cannot_be_written,
        every_rule_of_the_filters_is_what_allows_its_call,
        the_end_of_the_zygote_ends_its_workers,
        a_process_in_the_jail_holds_what_it_was_given_and_nothing_else,
        a_process_in_the_jail_has_an_empty_environment,
        planted_links_are_never_met,
        many_threads_start_jails_at_once,
        a_command_that_is_missing_is_named,
        a_command_that_may_not_be_executed_is_told_with_its_step,
        descriptors_that_make_no_sense_are_refused,
        refused_namespaces_are_told_with_the_setting,
    ];
    let of_groups: Vec<(&str, fn())> = claims![
        memory_beyond_the_groups_is_refused_by_death,
        a_fork_beyond_the_groups_number_fails,
        a_groups_cpu_time_is_throttled,
        a_group_that_is_dropped_takes_its_processes_along,
    ];
    let of_root: Vec<(&str, fn())> =
        claims![a_worker_cannot_configure_a_network, to_the_host_a_process_in_the_jail_is_nobody];
    let of_kvm: Vec<(&str, fn())> = claims![a_worker_makes_a_vm_from_the_descriptor_it_was_given];
    let kvm = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    if !arguments.list {
        if let Err(why) = &kvm {
            eprintln!("SKIPPED: {} tests with KVM: {why}", of_kvm.len());
        }
        if !root() {
            eprintln!("SKIPPED: {} tests that take root, and all others as root", of_root.len());
        }
        if let Err(why) = groups() {
            eprintln!("SKIPPED: {} tests of cgroup v2: {why}", of_groups.len());
        }
    }
    let skip_groups = !arguments.list && groups().is_err();
    let mut trials = Vec::new();
    let all =
        [(tests, false), (of_groups, skip_groups), (of_root, !root()), (of_kvm, kvm.is_err())];
    for (tests, skip) in all {
        trials.extend(tests.into_iter().map(|(name, test)| {
            let run = move || {
                test();
                Ok(())
            };
            Trial::test(name, run).with_ignored_flag(skip)
        }));
    }
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
    let (spawned, out, _) = start_with_input(place, words);
    (spawned, out)
}

/// The same, with the far end of its standard input.
fn start_with_input(place: Place, words: &[&str]) -> (Spawned, std::fs::File, PipeWriter) {
    let (out, end) = pipe();
    let (input, our_end) = std::io::pipe().unwrap();
    let descriptors = vec![(input.into(), 0), (end.try_clone().unwrap(), 1), (end, 2)];
    let mut arguments = vec![std::ffi::OsStr::new("jail")];
    arguments.extend(words.iter().map(std::ffi::OsStr::new));
    let spawned = spawn(Path::new("/proc/self/exe"), &arguments, descriptors, place).unwrap();
    (spawned, out, our_end)
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
    for layers in [FILTER, ALL, FILTER | PROCESS, ALL | PROCESS] {
        let full = outcome(starter, layers, attempt, more);
        let expected = Outcome::Forbidden(call as i32);
        assert_eq!(full, expected, "{attempt} by {starter:?} in {layers}");
    }
    for &(layers, error) in layers {
        if layers.has(LANDLOCK) && landlock_abi() < 1 {
            eprintln!("SKIPPED: {attempt} within Landlock, which this kernel has not");
            continue;
        }
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
    // By root alone: an ordinary user cannot do it outside either.
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

fn a_worker_cannot_send_out_of_band() {
    for &starter in Starter::all() {
        // The filter is asked before the descriptor is.
        assert_eq!(outcome(starter, NONE, "out-of-band", &[]), Outcome::Refused(libc::EBADF));
        for layers in [ALL, ALL | PROCESS] {
            let outcome = outcome(starter, layers, "out-of-band", &[]);
            assert_eq!(outcome, Outcome::Forbidden(libc::SYS_sendto as i32));
        }
    }
}

/// How many are under way at once is counted for all workers and their zygote
/// together, which could make no more workers then.
fn a_worker_cannot_pass_a_descriptor() {
    for &starter in Starter::all() {
        let no_socket = Outcome::Refused(libc::EBADF);
        assert_eq!(outcome(starter, NONE, "pass_a_descriptor", &[]), no_socket);
        for layers in [ALL, ALL | PROCESS] {
            let outcome = outcome(starter, layers, "pass_a_descriptor", &[]);
            assert_eq!(outcome, Outcome::Forbidden(libc::SYS_sendmsg as i32));
        }
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
            if layers.has(LANDLOCK) && landlock_abi() < 1 {
                eprintln!("SKIPPED: mounting within Landlock, which this kernel has not");
                continue;
            }
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

fn a_worker_cannot_map_huge_pages_of_the_hosts_reserve() {
    stopped("map_from_the_reserve", &[], libc::SYS_mmap, &[]);
}

fn a_worker_cannot_map_memory_that_stays_when_it_is_unmapped() {
    stopped("map_shared", &[], libc::SYS_mmap, &[]);
}

fn a_worker_cannot_read_the_clock_of_another_process() {
    stopped("read_clock_of", &["1"], libc::SYS_clock_gettime, &[]);
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

fn a_worker_cannot_set_a_slot_of_memory_but_the_one_that_is_sealed() {
    let (no_kvm, forbidden) =
        (Outcome::Refused(libc::ENOTTY), Outcome::Forbidden(libc::SYS_ioctl as i32));
    let at = |layers, bits: u64| outcome(Starter::Me, layers, "set_slot", &[&bits.to_string()]);
    for bits in [1, 4096, 1 << 31, 1 << 32, 1 << 63] {
        assert_eq!(at(NONE, bits), no_kvm);
        assert_eq!(at(ALL, bits), forbidden, "{bits:x}");
    }
    // Where nothing can be sealed, not that one either.
    let expected = if slot::is_supported() { no_kvm } else { forbidden };
    assert_eq!(at(ALL, 0), expected);
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

fn every_privilege_is_given_up_for_good() {
    for &starter in Starter::all() {
        let said = said(starter, NAMESPACES | PRIVILEGES, "show_privileges", &[]);
        // NOROOT, NO_SETUID_FIXUP, NO_CAP_AMBIENT_RAISE, each with its lock,
        // and KEEP_CAPS' lock (`linux/securebits.h`).
        let expected = "bounding 0\nsecurebits 0xef\nno_new_privs 1\ndumpable 0\n";
        assert!(said.starts_with(expected), "{starter:?}: {said}");
    }
}

fn every_limit_is_on_and_cannot_be_raised() {
    let own = &inmate::WORKER_LIMITS;
    for &starter in Starter::all() {
        let said = said(starter, NAMESPACES | PRIVILEGES | LIMITS, "show_limits", &[]);
        for (resource, most) in [
            (libc::RLIMIT_NOFILE, own.open_files),
            (libc::RLIMIT_NPROC, own.processes),
            (libc::RLIMIT_AS, inmate::ADDRESS_SPACE_BYTES),
            (libc::RLIMIT_CORE, 0),
            (libc::RLIMIT_FSIZE, 0),
            (libc::RLIMIT_MEMLOCK, 0),
            (libc::RLIMIT_MSGQUEUE, 0),
            (libc::RLIMIT_RTPRIO, 0),
            (libc::RLIMIT_NICE, 0),
            (libc::RLIMIT_LOCKS, 0),
        ] {
            let line = format!("{resource} {most} {most}");
            assert!(said.lines().any(|it| it == line), "{starter:?}: not {line} in\n{said}");
        }
    }
}

fn a_process_in_the_jail_inherits_no_signals_and_no_session() {
    // SAFETY: an action and a mask of this thread, for a signal nobody sends.
    unsafe {
        libc::signal(libc::SIGUSR2, libc::SIG_IGN);
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&mut set, libc::SIGUSR1);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
    }
    let (spawned, out, input) = start_with_input(Place::best(), &["wait"]);
    BufReader::new(out).read_line(&mut String::new()).unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", spawned.pid)).unwrap();
    let mask = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    };
    assert_eq!(mask("SigBlk:"), 0);
    // Rust itself ignores SIGPIPE.
    assert_eq!(mask("SigIgn:"), 1 << (libc::SIGPIPE - 1));
    // SAFETY: has no preconditions.
    assert_eq!(unsafe { libc::getsid(spawned.pid) }, spawned.pid);
    drop(input);
    spawned.wait().unwrap();
}

fn the_procfs_of_its_own_cannot_be_written() {
    for &starter in Starter::all() {
        let said = said(starter, NAMESPACES | TREE, "write_below_procfs", &[]);
        if said.starts_with("no procfs") {
            eprintln!("SKIPPED: {said}");
            continue;
        }
        assert_eq!(said, format!("refused {}\nexit 0\n", libc::EROFS), "{starter:?}");
    }
}

fn a_worker_cannot_signal_another_worker() {
    let layers: &[(Layers, i32)] =
        if landlock_abi() >= 6 { &[(LANDLOCK, libc::EPERM)] } else { &[] };
    stopped("signal_sibling", &[], libc::SYS_kill, layers);
}

fn a_worker_cannot_read_its_parents_memory() {
    stopped(
        "read_parents_memory",
        &[],
        libc::SYS_openat,
        &[(PRIVILEGES, libc::EACCES), (NAMESPACES | TREE, libc::ENOENT), (LANDLOCK, libc::EACCES)],
    );
}

fn a_worker_opens_its_own_pagemap_before_its_filter_and_never_again() {
    for &starter in Starter::all() {
        let said = said(starter, ALL, "pagemap", &[]);
        if said.starts_with("no procfs") {
            eprintln!("SKIPPED: {said}");
            continue;
        }
        if said.contains(&format!("refused {}", libc::ENOTTY)) {
            eprintln!("SKIPPED: this kernel has no PAGEMAP_SCAN (Linux 6.7)");
            continue;
        }
        // The second opening, within its own ruleset, is refused by that; then
        // a scan by the first is made within the filter.
        let expected = format!("again {}\ndone\nexit 0\n", libc::EACCES);
        assert_eq!(said, expected, "{starter:?}");
    }
}

/// With the rule its call passes the filter, without the rule it does not. So
/// no rule is shadowed by another, and none allows what another was for.
fn every_rule_of_the_filters_is_what_allows_its_call() {
    for role in Role::ALL {
        let word = &format!("{role:?}");
        for (index, rule) in role.rules().iter().enumerate() {
            let index = index.to_string();
            let name = rule.name;
            if !role.enforceable().iter().any(|it| it.name == name) {
                eprintln!("SKIPPED: this kernel holds nobody to the rule {name}");
                continue;
            }
            let (status, said) = rule_outcome(word, &index, "with");
            assert_ne!(status.code(), Some(EXIT_FORBIDDEN), "{word}: {name}: {said}");
            assert_ne!(status.signal(), Some(libc::SIGSYS), "{word}: {name}: {said}");
            let (status, said) = rule_outcome(word, &index, "without");
            // Who may not even say so is killed.
            match rule.number {
                libc::SYS_exit_group | libc::SYS_write => {
                    assert_eq!(status.signal(), Some(libc::SIGSYS), "{word}: {name}: {said}");
                }
                _ => assert_eq!(status.code(), Some(EXIT_FORBIDDEN), "{word}: {name}: {said}"),
            }
            match rule.number {
                libc::SYS_write => assert_eq!(said, ""),
                number => assert_eq!(said, format!("forbidden {number}\n"), "{word}: {name}"),
            }
        }
    }
}

fn rule_outcome(role: &str, index: &str, how: &str) -> (std::process::ExitStatus, String) {
    let (spawned, mut out) = start(inmate::place(NONE), &["rule", role, index, how]);
    let mut said = String::new();
    out.read_to_string(&mut said).unwrap();
    (spawned.wait().unwrap(), said)
}

/// Everything but the filter, under which nobody makes a VM.
fn a_worker_makes_a_vm_from_the_descriptor_it_was_given() {
    let kvm = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").unwrap();
    let (mut out, end) = pipe();
    let descriptors = vec![(kvm.into(), 0), (end.try_clone().unwrap(), 1), (end, 2)];
    let layers = NAMESPACES | TREE | PRIVILEGES | LIMITS | LANDLOCK;
    let words = ["jail", "inmate", &layers.to_string(), "make_a_vm"];
    let words: Vec<_> = words.iter().map(std::ffi::OsStr::new).collect();
    let exe = Path::new("/proc/self/exe");
    let spawned = spawn(exe, &words, descriptors, Place::best()).unwrap();
    let mut said = String::new();
    out.read_to_string(&mut said).unwrap();
    assert_eq!(said, "done\nexit 0\n");
    spawned.wait().unwrap();
}

// Starting and ending

fn the_end_of_the_zygote_ends_its_workers() {
    for layers in [ALL, NONE] {
        let (spawned, out, _input) =
            start_with_input(inmate::place(layers), &["inmate", &layers.to_string(), "pause"]);
        let mut out = BufReader::new(out);
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let worker: i32 = line.trim().parse().unwrap();
        spawned.kill().unwrap();
        spawned.wait().unwrap();
        if layers == NONE {
            // Only the namespace makes it so.
            // SAFETY: the worker pauses for ever, so the number is still its.
            unsafe {
                assert_eq!(libc::kill(worker, 0), 0);
                libc::kill(worker, libc::SIGKILL);
            }
        }
        // The worker holds the other end as long as it lives.
        out.read_to_end(&mut Vec::new()).unwrap();
    }
}

fn a_process_in_the_jail_holds_what_it_was_given_and_nothing_else() {
    // One that somebody left without close-on-exec.
    // SAFETY: makes a descriptor that is then ours.
    let left = unsafe { OwnedFd::from_raw_fd(libc::dup(2)) };
    let (input, mut end) = std::io::pipe().unwrap();
    let (out, said) = pipe();
    let made = |name: &std::ffi::CStr| {
        // SAFETY: a literal name; the descriptor is then ours.
        unsafe { OwnedFd::from_raw_fd(libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC)) }
    };
    // Two that change places, each at the number the other has here.
    let (one, other) = (made(c"one"), made(c"other"));
    let (number, other_number) = (one.as_raw_fd(), other.as_raw_fd());
    let names = [c"row0", c"row1", c"row2", c"row3", c"row4", c"row5", c"row6", c"row7"];
    let row: Vec<_> = names.into_iter().map(made).collect();
    // And a row at numbers that are free, backwards: where copies would be put
    // by one who does not look, so that each overwrites a later one.
    // SAFETY: makes a copy at the first free number and closes it.
    let free = unsafe {
        let free = libc::fcntl(2, libc::F_DUPFD_CLOEXEC, 3);
        libc::close(free);
        free
    };
    let in_use = [number, other_number];
    let numbers_of_row =
        || (3..=12).rev().map(|step| free + step).filter(|it| !in_use.contains(it));
    let mut descriptors: Vec<_> = row.into_iter().zip(numbers_of_row()).collect();
    descriptors.extend([
        (one, other_number),
        (other, number),
        (input.into(), 0),
        (said.try_clone().unwrap(), 1),
        (said, 2),
    ]);
    let mut numbers: Vec<_> = descriptors.iter().map(|(_, target)| *target).collect();
    numbers.sort_unstable();
    let words = ["jail", "wait"].map(std::ffi::OsStr::new);
    let spawned = spawn(Path::new("/proc/self/exe"), &words, descriptors, Place::best()).unwrap();
    let mut out = BufReader::new(out);
    out.read_line(&mut String::new()).unwrap();
    let held = descriptors::of(spawned.pid).unwrap();
    assert_eq!(held.iter().map(|it| it.number).collect::<Vec<_>>(), numbers, "{held:?}");
    let what = |number| &held.iter().find(|it| it.number == number).unwrap().what;
    assert!(what(other_number).contains("memfd:one"), "{held:?}");
    assert!(what(number).contains("memfd:other"), "{held:?}");
    for (at, number) in numbers_of_row().take(8).enumerate() {
        assert!(what(number).contains(&format!("memfd:row{at}")), "{held:?}");
    }
    assert!(held.iter().all(|it| !it.close_on_exec));
    end.write_all(b"x").unwrap();
    assert!(spawned.wait().unwrap().success());
    drop(left);
}

fn a_process_in_the_jail_has_an_empty_environment() {
    assert!(std::env::vars_os().next().is_some());
    let (spawned, mut out) = start(Place::best(), &["environment"]);
    let mut said = String::new();
    out.read_to_string(&mut said).unwrap();
    assert_eq!(said, "0 variables\n");
    assert!(spawned.wait().unwrap().success());
}

fn to_the_host_a_process_in_the_jail_is_nobody() {
    // Groups are a thread's own to the kernel, and this is this test's.
    // SAFETY: two readable numbers.
    let set = unsafe { libc::syscall(libc::SYS_setgroups, 2, [4u32, 5].as_ptr()) };
    assert_eq!(set, 0);
    let (spawned, out, input) = start_with_input(Place::best(), &["wait"]);
    let mut out = BufReader::new(out);
    let mut inside = String::new();
    out.read_line(&mut inside).unwrap();
    assert_eq!(inside, "uid 0 gid 0 pid 1\n");
    let status = std::fs::read_to_string(format!("/proc/{}/status", spawned.pid)).unwrap();
    let line = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().map(|word| word.parse().unwrap()).collect::<Vec<u32>>()
    };
    // SAFETY: no groups; as above.
    unsafe { libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<u32>()) };
    assert_eq!(line("Uid:"), [NOBODYS_ID; 4]);
    assert_eq!(line("Gid:"), [NOBODYS_ID; 4]);
    assert!(line("Groups:").is_empty());
    drop(input);
    spawned.wait().unwrap();
}

fn planted_links_are_never_met() {
    let directory = Scratch::new("planted");
    let victim = directory.0.join("victim");
    std::fs::write(&victim, "untouched").unwrap();
    let planted = directory.0.join("here");
    std::fs::create_dir(&planted).unwrap();
    for name in ["proc", "dev", "sys", "tmp", "root", "jail", "old", "put_old", "tmpfs", "made"] {
        std::os::unix::fs::symlink(&victim, planted.join(name)).unwrap();
        std::fs::hard_link(&victim, planted.join(format!("{name}.hard"))).unwrap();
    }
    let state = || {
        let all = std::fs::metadata(&victim).unwrap();
        let here = std::fs::metadata(&planted).unwrap();
        let times = (all.mtime(), all.mtime_nsec(), all.ctime(), all.ctime_nsec());
        (times, all.mode(), all.nlink(), here.mtime(), here.mtime_nsec(), here.mode())
    };
    let before = state();
    // Wherever a relative path would lead, and wherever a mount would be seen.
    std::env::set_current_dir(&planted).unwrap();
    for &starter in Starter::all() {
        let done = outcome(starter, ALL, "run_vcpu", &[]);
        assert_eq!(done, Outcome::Refused(libc::ENOTTY));
    }
    std::env::set_current_dir("/").unwrap();
    assert_eq!(state(), before);
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "untouched");
}

fn many_threads_start_jails_at_once() {
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..10 {
                    // Allocating, so that locks are held while others fork.
                    let (spawned, mut out) = start(Place::best(), &["environment"]);
                    let mut said = String::new();
                    out.read_to_string(&mut said).unwrap();
                    assert_eq!(said, "0 variables\n");
                    assert!(spawned.wait().unwrap().success());
                }
            });
        }
    });
}

fn refused_spawn(command: &Path, descriptors: Vec<(OwnedFd, i32)>) -> String {
    let words = [std::ffi::OsStr::new("x")];
    let error = spawn(command, &words, descriptors, Place::best()).unwrap_err();
    std::io::Error::from(error).to_string()
}

fn a_command_that_is_missing_is_named() {
    let said = refused_spawn(Path::new("/nowhere/forge"), vec![]);
    assert!(said.contains("/nowhere/forge") && said.contains("No such file"), "{said}");
}

fn a_command_that_may_not_be_executed_is_told_with_its_step() {
    let said = refused_spawn(Path::new("/etc/passwd"), vec![]);
    assert!(said.contains("executing the command in the child: Permission denied"), "{said}");
    assert!(!said.contains("namespace"), "no setting would help: {said}");
}

fn descriptors_that_make_no_sense_are_refused() {
    let nothing = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let exe = Path::new("/proc/self/exe");
    assert!(refused_spawn(exe, vec![(nothing(), 3), (nothing(), 3)]).contains("one number"));
    assert!(refused_spawn(exe, vec![(nothing(), -1)]).contains("negative"));
    // Past what the kernel gives: told by the child, with its step.
    let said = refused_spawn(exe, vec![(nothing(), i32::MAX - 1)]);
    assert!(said.contains("moving a descriptor in the child"), "{said}");
}

fn refused_namespaces_are_told_with_the_setting() {
    for &starter in Starter::all() {
        let said = said(starter, NAMESPACES, "spawn_without_namespaces", &[]);
        assert!(said.contains("user.max_user_namespaces is 0: set it to"), "{said}");
    }
}

// Control groups

/// Where groups can be made with all controllers: one place for all tests.
fn groups() -> Result<&'static Parent, &'static str> {
    static PARENT: OnceLock<Result<Parent, String>> = OnceLock::new();
    let parent = PARENT.get_or_init(|| match Parent::own() {
        Ok(parent) if parent.missing().is_empty() => Ok(parent),
        Ok(parent) => Err(format!("{} lacks {:?}", parent.path().display(), parent.missing())),
        Err(error) => Err(error.to_string()),
    });
    parent.as_ref().map_err(String::as_str)
}

fn group(name: &str, limits: &GroupLimits) -> Group {
    let name = format!("forge-test-{name}-{}", std::process::id());
    Group::create(groups().unwrap(), &name, limits).unwrap()
}

/// Runs a role of its own within a group from before it does anything.
fn within(group: &Group, role: &str) -> (std::process::ExitStatus, String) {
    let (spawned, mut out, mut input) = start_with_input(Place::best(), &[role]);
    group.attach(spawned.pid).unwrap();
    input.write_all(b"x").unwrap();
    let mut said = String::new();
    out.read_to_string(&mut said).unwrap();
    (spawned.wait().unwrap(), said)
}

fn memory_beyond_the_groups_is_refused_by_death() {
    let limits = |bytes| GroupLimits { memory_bytes: Some(bytes), ..GroupLimits::default() };
    let enough = group("enough", &limits(256 << 20));
    let (status, said) = within(&enough, "allocate");
    assert!(status.success() && said == "done\n", "{status} {said}");
    let little = group("little", &limits(32 << 20));
    let (status, said) = within(&little, "allocate");
    assert_eq!((status.signal(), said.as_str()), (Some(libc::SIGKILL), ""));
    assert!(little.figure("memory.events", "oom_kill").unwrap() > Some(0));
}

fn a_fork_beyond_the_groups_number_fails() {
    let limits = |processes| GroupLimits { processes: Some(processes), ..GroupLimits::default() };
    let two = group("two", &limits(2));
    assert_eq!(within(&two, "fork").1, "done\n");
    let one = group("one", &limits(1));
    assert_eq!(within(&one, "fork").1, format!("refused {}\n", libc::EAGAIN));
}

fn a_groups_cpu_time_is_throttled() {
    let limits = |share| GroupLimits { cpu_thousandths: share, ..GroupLimits::default() };
    let free = group("free", &limits(None));
    assert!(within(&free, "burn").0.success());
    assert_eq!(free.figure("cpu.stat", "nr_throttled").unwrap().unwrap_or(0), 0);
    let tenth = group("tenth", &limits(Some(100)));
    assert!(within(&tenth, "burn").0.success());
    assert!(tenth.figure("cpu.stat", "nr_throttled").unwrap() > Some(0));
}

fn a_group_that_is_dropped_takes_its_processes_along() {
    let group = group("dropped", &GroupLimits::default());
    let (spawned, _out, input) = start_with_input(Place::best(), &["wait"]);
    group.attach(spawned.pid).unwrap();
    let path = group.path().to_owned();
    drop(group);
    // One that was spared would end by itself now.
    drop(input);
    assert_eq!(spawned.wait().unwrap().signal(), Some(libc::SIGKILL));
    assert!(!path.exists());
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
