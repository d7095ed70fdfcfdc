//! What the broker and its tool servers cannot do. This program plays them
//! all: started with `--attempt FILE` it is a tool server that tries every
//! refused system call and writes down what came of it; with
//! `--attempt-as-broker FILE` it first does to itself what the broker's
//! process does, by the same function; with `--attempt-bare FILE` it does not,
//! which shows that it is the filter that refuses.

#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::process::{Command, ExitCode};

use forge_protocol::broker::{Reply, Request};
use libtest_mimic::{Arguments, Trial};
use serde_json::json;
use support::Broker;

/// A system call with arguments that harm nobody, even where it is allowed
/// and the caller is root.
type Attempt = (&'static str, libc::c_long, [libc::c_long; 5]);

/// What only tool servers are refused: launchers need it.
const OF_SERVERS: [&str; 16] = [
    "mount",
    "umount",
    "pivot_root",
    "move_mount",
    "open_tree",
    "fsopen",
    "fsconfig",
    "fsmount",
    "fspick",
    "mount_setattr",
    "sethostname",
    "set-user-ID by descriptor",
    "set-group-ID by descriptor",
    "set-user-ID by path",
    "set-user-ID at creation",
    "set-group-ID node",
];

/// No address, no descriptor and no process.
const BAD: libc::c_long = -1;
const KVM_GET_API_VERSION: libc::c_long = 0xAE00;
const KVM_CREATE_VM: libc::c_long = 0xAE01;
/// Bits that the kernel cuts off an `int`: no way around a filter.
const HIGH: libc::c_long = 1 << 32;

fn attempts() -> Vec<Attempt> {
    let null = std::fs::File::open("/dev/null").unwrap();
    let fd = libc::c_long::from(std::os::fd::IntoRawFd::into_raw_fd(null));
    let stream = libc::c_long::from(libc::SOCK_STREAM);
    let family = libc::c_long::from;
    vec![
        ("kvm ioctl", libc::SYS_ioctl, [fd, KVM_GET_API_VERSION, 0, 0, 0]),
        ("kvm ioctl with high bits", libc::SYS_ioctl, [fd, KVM_CREATE_VM | HIGH, 0, 0, 0]),
        ("typing into a terminal", libc::SYS_ioctl, [fd, libc::TIOCSTI as i64, BAD, 0, 0]),
        ("pasting into a console", libc::SYS_ioctl, [fd, libc::TIOCLINUX as i64, BAD, 0, 0]),
        ("ptrace", libc::SYS_ptrace, [libc::PTRACE_ATTACH.into(), BAD, 0, 0, 0]),
        ("process_vm_readv", libc::SYS_process_vm_readv, [BAD, 0, 0, 0, 0]),
        ("process_vm_writev", libc::SYS_process_vm_writev, [BAD, 0, 0, 0, 0]),
        ("process_madvise", libc::SYS_process_madvise, [BAD, 0, 0, 0, 0]),
        ("pidfd_getfd", libc::SYS_pidfd_getfd, [BAD, 0, 0, 0, 0]),
        ("kcmp", libc::SYS_kcmp, [BAD, BAD, 0, 0, 0]),
        ("kexec_load", libc::SYS_kexec_load, [0, 99, 0, 0, 0]),
        ("kexec_file_load", libc::SYS_kexec_file_load, [BAD, BAD, 0, 0, BAD]),
        ("init_module", libc::SYS_init_module, [0, 0, 0, 0, 0]),
        ("finit_module", libc::SYS_finit_module, [BAD, 0, 0, 0, 0]),
        ("delete_module", libc::SYS_delete_module, [0, 0, 0, 0, 0]),
        ("bpf", libc::SYS_bpf, [9999, 0, 0, 0, 0]),
        ("perf_event_open", libc::SYS_perf_event_open, [0, 0, 0, BAD, 0]),
        ("syslog", libc::SYS_syslog, [9999, 0, 0, 0, 0]),
        ("userfaultfd", libc::SYS_userfaultfd, [BAD, 0, 0, 0, 0]),
        ("io_uring_setup", libc::SYS_io_uring_setup, [0, 0, 0, 0, 0]),
        ("io_uring_enter", libc::SYS_io_uring_enter, [BAD, 0, 0, 0, 0]),
        ("io_uring_register", libc::SYS_io_uring_register, [BAD, 0, 0, 0, 0]),
        ("add_key", libc::SYS_add_key, [0, 0, 0, 0, 0]),
        ("request_key", libc::SYS_request_key, [0, 0, 0, 0, 0]),
        ("keyctl", libc::SYS_keyctl, [9999, 0, 0, 0, 0]),
        ("mount", libc::SYS_mount, [0, 0, 0, 0, 0]),
        ("umount", libc::SYS_umount2, [0, 0, 0, 0, 0]),
        ("pivot_root", libc::SYS_pivot_root, [0, 0, 0, 0, 0]),
        ("move_mount", libc::SYS_move_mount, [BAD, 0, BAD, 0, BAD]),
        ("open_tree", libc::SYS_open_tree, [BAD, 0, BAD, 0, 0]),
        ("fsopen", libc::SYS_fsopen, [0, BAD, 0, 0, 0]),
        ("fsconfig", libc::SYS_fsconfig, [BAD, 9999, 0, 0, 0]),
        ("fsmount", libc::SYS_fsmount, [BAD, BAD, 0, 0, 0]),
        ("fspick", libc::SYS_fspick, [BAD, 0, BAD, 0, 0]),
        ("mount_setattr", libc::SYS_mount_setattr, [BAD, 0, BAD, 0, 0]),
        ("setns", libc::SYS_setns, [BAD, 0, 0, 0, 0]),
        ("open_by_handle_at", libc::SYS_open_by_handle_at, [BAD, 0, 0, 0, 0]),
        ("name_to_handle_at", libc::SYS_name_to_handle_at, [BAD, 0, 0, 0, BAD]),
        ("settimeofday", libc::SYS_settimeofday, [BAD, BAD, 0, 0, 0]),
        ("clock_settime", libc::SYS_clock_settime, [0, BAD, 0, 0, 0]),
        ("clock_adjtime", libc::SYS_clock_adjtime, [0, BAD, 0, 0, 0]),
        ("adjtimex", libc::SYS_adjtimex, [BAD, 0, 0, 0, 0]),
        ("reboot", libc::SYS_reboot, [0, 0, 0, 0, 0]),
        ("swapon", libc::SYS_swapon, [0, 0, 0, 0, 0]),
        ("swapoff", libc::SYS_swapoff, [0, 0, 0, 0, 0]),
        ("acct", libc::SYS_acct, [BAD, 0, 0, 0, 0]),
        ("quotactl", libc::SYS_quotactl, [BAD, BAD, 0, 0, 0]),
        ("quotactl_fd", libc::SYS_quotactl_fd, [BAD, BAD, 0, 0, 0]),
        ("sethostname", libc::SYS_sethostname, [0, BAD, 0, 0, 0]),
        ("setdomainname", libc::SYS_setdomainname, [0, BAD, 0, 0, 0]),
        ("set-user-ID by descriptor", libc::SYS_fchmod, [BAD, 0o4755, 0, 0, 0]),
        ("set-group-ID by descriptor", libc::SYS_fchmod, [BAD, 0o2755, 0, 0, 0]),
        ("set-user-ID by path", libc::SYS_fchmodat, [BAD, BAD, 0o4755, 0, 0]),
        ("set-user-ID at creation", libc::SYS_openat, [BAD, BAD, libc::O_CREAT.into(), 0o4755, 0]),
        ("set-group-ID node", libc::SYS_mknodat, [BAD, BAD, 0o2755, 0, 0]),
        ("iopl", libc::SYS_iopl, [99, 0, 0, 0, 0]),
        ("ioperm", libc::SYS_ioperm, [BAD, BAD, 1, 0, 0]),
        ("packet socket", libc::SYS_socket, [family(libc::AF_PACKET), 99, 0, 0, 0]),
        ("cipher socket", libc::SYS_socket, [family(libc::AF_ALG), stream, 0, 0, 0]),
        ("vsock socket", libc::SYS_socket, [family(libc::AF_VSOCK), 99, 0, 0, 0]),
        (
            "netfilter socket",
            libc::SYS_socket,
            [family(libc::AF_NETLINK), 99, libc::NETLINK_NETFILTER.into(), 0, 0],
        ),
    ]
}

fn attempt(what: &Path) -> ExitCode {
    let mut found = BTreeMap::new();
    for (name, number, [a, b, c, d, e]) in attempts() {
        // SAFETY: no argument is an address of this process; most are none
        // that any call accepts.
        let outcome = unsafe { libc::syscall(number, a, b, c, d, e) };
        let errno = io::Error::last_os_error().raw_os_error().unwrap_or(0);
        found.insert(name.to_owned(), if outcome < 0 { errno } else { 0 });
    }
    // The x32 form of getpid, which takes nothing.
    // SAFETY: as above.
    let outcome = unsafe { libc::syscall(0x4000_0000 | libc::SYS_getpid) };
    let errno = io::Error::last_os_error().raw_os_error().unwrap_or(0);
    found.insert("x32".to_owned(), if outcome < 0 { errno } else { 0 });
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let found = json!({ "errnos": found, "status": status, "limits": limits });
    std::fs::write(what, found.to_string()).unwrap();
    ExitCode::SUCCESS
}

struct Found {
    errnos: BTreeMap<String, i32>,
    status: String,
    limits: String,
}

fn read(file: &Path) -> Found {
    let text = std::fs::read_to_string(file).expect("the attempts were never made");
    let found: serde_json::Value = serde_json::from_str(&text).unwrap();
    Found {
        errnos: serde_json::from_value(found["errnos"].clone()).unwrap(),
        status: found["status"].as_str().unwrap().to_owned(),
        limits: found["limits"].as_str().unwrap().to_owned(),
    }
}

fn line<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
    let line = text.lines().find(|line| line.starts_with(start)).unwrap();
    line[start.len()..].split_whitespace().collect()
}

fn assert_hardened(found: &Found, is_server: bool) {
    for (name, errno) in &found.errnos {
        if !is_server && OF_SERVERS.contains(&name.as_str()) {
            assert_ne!(*errno, libc::EPERM, "{name}: a launcher needs it");
            continue;
        }
        let expected = if name == "x32" { libc::ENOSYS } else { libc::EPERM };
        assert_eq!(*errno, expected, "{name}");
    }
    assert_eq!(found.errnos.len(), attempts().len() + 1);
    assert_eq!(line(&found.status, "NoNewPrivs:"), ["1"]);
    assert_eq!(line(&found.status, "Seccomp:"), ["2"]);
    assert_eq!(line(&found.limits, "Max core file size")[..2], ["0", "0"]);
}

fn play(role: &str) -> Found {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("found");
    let this = std::env::current_exe().unwrap();
    assert!(Command::new(this).arg(role).arg(&file).status().unwrap().success());
    read(&file)
}

fn a_tool_server_is_refused_what_no_tool_needs() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("found");
    std::fs::write(&file, "").unwrap();
    let this = std::env::current_exe().unwrap();
    let mut broker = Broker::with_config(&json!({"mcpServers": {"probe": {
        "command": this, "args": ["--attempt", file],
    }}}));
    match broker.ask(&Request::ListTools { principal: "alice".into() }) {
        // It speaks no MCP, and it was not killed: it ended by itself.
        Reply::Tools { unavailable, .. } => assert_eq!(unavailable[0].0, "probe"),
        other => panic!("{other:?}"),
    }
    assert_hardened(&read(&file), true);
}

fn the_broker_is_refused_what_it_does_not_need() {
    assert_hardened(&play("--attempt-as-broker"), false);
}

fn the_brokers_process_is_hardened_before_it_serves() {
    let broker = Broker::unconfigured();
    let of = |what: &str| {
        std::fs::read_to_string(format!("/proc/{}/{what}", broker.child.id())).unwrap()
    };
    let threads = std::fs::read_dir(format!("/proc/{}/task", broker.child.id())).unwrap();
    let mut seen = 0;
    for thread in threads.flatten() {
        let status = std::fs::read_to_string(thread.path().join("status")).unwrap();
        assert_eq!(line(&status, "NoNewPrivs:"), ["1"]);
        assert_eq!(line(&status, "Seccomp:"), ["2"]);
        seen += 1;
    }
    assert!(seen > 0);
    assert_eq!(line(&of("limits"), "Max core file size")[..2], ["0", "0"]);
}

/// A process of the same user cannot look into it. Root can look into
/// anything, so this is tried from a user of its own.
fn a_process_of_the_same_user_cannot_look_into_the_broker() {
    use std::os::unix::process::CommandExt as _;
    let folder = tempfile::tempdir().unwrap();
    let this = folder.path().join("probe");
    std::fs::copy(std::env::current_exe().unwrap(), &this).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), open).unwrap();
    let looked = |role: &str| {
        let mut other = Command::new(&this);
        let mut other = other.arg(role).uid(NOBODY).gid(NOBODY).spawn().unwrap();
        let ready = std::time::Instant::now() + support::PATIENCE;
        // It is ready once it sleeps.
        let stat = format!("/proc/{}/wchan", other.id());
        let marker = || std::fs::read_to_string(&stat).unwrap_or_default().contains("nanosleep");
        while !marker() && std::time::Instant::now() < ready {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let environment = format!("/proc/{}/environ", other.id());
        let read = Command::new("cat").arg(environment).uid(NOBODY).gid(NOBODY).output().unwrap();
        other.kill().unwrap();
        other.wait().unwrap();
        read.status.success()
    };
    assert!(looked("--sleep"), "an ordinary process is open to its user");
    assert!(!looked("--sleep-as-broker"));
}

/// A user that nothing belongs to.
const NOBODY: u32 = 64_123;

fn without_the_filter_root_meets_other_refusals() {
    let bare = play("--attempt-bare");
    assert_eq!(line(&bare.status, "Seccomp:"), ["0"], "something else filters this test");
    let refused: Vec<&String> =
        bare.errnos.iter().filter(|(_, errno)| **errno == libc::EPERM).map(|it| it.0).collect();
    assert_eq!(refused, Vec::<&String>::new(), "these would prove nothing");
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[1..] {
        ["--attempt" | "--attempt-bare", file] => return attempt(Path::new(file)),
        ["--attempt-as-broker", file] => {
            forge_toolbroker::process::harden().unwrap();
            return attempt(Path::new(file));
        }
        ["--sleep"] => std::thread::sleep(support::PATIENCE),
        ["--sleep-as-broker"] => {
            forge_toolbroker::process::harden().unwrap();
            std::thread::sleep(support::PATIENCE);
        }
        _ => {}
    }
    let arguments = Arguments::from_args();
    // SAFETY: takes nothing and cannot fail.
    let root = unsafe { libc::geteuid() } == 0;
    if !root && !arguments.list {
        eprintln!("SKIPPED: 2 tests of the broker's hardening need root");
    }
    let tests: [(&str, fn(), bool); 5] = [
        (
            "a_tool_server_is_refused_what_no_tool_needs",
            a_tool_server_is_refused_what_no_tool_needs,
            false,
        ),
        (
            "the_broker_is_refused_what_it_does_not_need",
            the_broker_is_refused_what_it_does_not_need,
            false,
        ),
        (
            "the_brokers_process_is_hardened_before_it_serves",
            the_brokers_process_is_hardened_before_it_serves,
            false,
        ),
        (
            "a_process_of_the_same_user_cannot_look_into_the_broker",
            a_process_of_the_same_user_cannot_look_into_the_broker,
            true,
        ),
        (
            "without_the_filter_root_meets_other_refusals",
            without_the_filter_root_meets_other_refusals,
            true,
        ),
    ];
    let trials = tests.into_iter().map(|(name, test, needs_root)| {
        let test = move || {
            test();
            Ok(())
        };
        Trial::test(name, test).with_ignored_flag(needs_root && !root)
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}
