//! The jail as a pool sets it up: what it says of itself, its cgroup, and a
//! supervisor that is an ordinary user.

#![allow(missing_docs, clippy::unwrap_used)]

#[macro_use]
mod support;
#[path = "support/processes.rs"]
mod processes;

use std::ffi::{CStr, CString};
use std::fs;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use forge_protocol::limits::RunLimits;
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::{Fate, VmFailureKind};
use forge_vmm::jail::cgroup::{Controller, Parent};
use forge_vmm::jail::namespaces::NOBODYS_ID;
use forge_vmm::jail::{GroupLimits, Weakness};
use forge_vmm::link::Patience;
use forge_vmm::pool::{Pool, PoolOptions, Task};
use processes::{Process, is_gone};
use support::{forge_module, job, signed, signer};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["as_a_member"] => {
            as_a_member();
            return ExitCode::SUCCESS;
        }
        ["in_a_group", group] => {
            in_a_group(Path::new(group));
            return ExitCode::SUCCESS;
        }
        ["stay"] => {
            let _ = std::io::stdin().read(&mut [0]);
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    support::main(
        claims![
            what_is_weaker_is_known_from_the_first_worker_on,
            an_ordinary_user_in_the_devices_group_runs_programs,
            zygote_and_workers_are_in_a_group_with_the_configured_limits,
            a_supervisor_in_a_group_of_its_own_steps_aside_with_its_children,
            a_group_that_a_dead_supervisor_left_is_removed,
            limits_that_the_host_cannot_keep_are_no_vm,
        ],
        claims![],
    )
}

fn root() -> bool {
    // SAFETY: has no preconditions.
    unsafe { libc::geteuid() == 0 }
}

fn pool(group: Option<GroupLimits>) -> Pool {
    let trust = TrustKeys::new([signer().trust_key()]).unwrap();
    let options = PoolOptions { group, ..PoolOptions::default() };
    Pool::new(&trust, options).unwrap()
}

fn run_hello(pool: &Pool) {
    let module = forge_module(
        r#"(memory (export "memory") 1) (data (i32.const 0) "hello")"#,
        "(drop (call $output (i32.const 0) (i32.const 5))) (i32.const 0)",
    );
    let job = job(signed(&module), RunLimits::default());
    let task = Task { tenant: "somebody", job: &job, broker: None, prepared: None, tell: None };
    let report = pool.carry_out(&task, Patience::default()).unwrap().report;
    assert!(matches!(report.fate, Fate::Ended(_)), "{report:?}");
    assert_eq!(report.output, b"hello");
}

fn what_is_weaker_is_known_from_the_first_worker_on() {
    let pool = pool(None);
    assert_eq!(pool.hardening(), None);
    assert_eq!(pool.weaknesses(), []);
    run_hello(&pool);
    let on = pool.hardening().unwrap();
    assert!(on.namespaces && on.empty_root && on.seccomp, "{on:?}");
    assert_eq!(on.identity, root().then_some(NOBODYS_ID));
    // SAFETY: asks for the version, with no attribute and no effect.
    let abi =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0, 1) };
    assert_eq!(on.landlock_abi.map_or(-1, i64::from), abi.max(-1));
    let weak = pool.weaknesses();
    assert_eq!(weak.contains(&Weakness::SupervisorsUser), !root(), "{weak:?}");
    for controller in Controller::ALL {
        assert!(weak.contains(&Weakness::NoController { controller }), "{weak:?}");
    }
}

/// A group that nobody else has, for a device that only it may open.
const MEMBERS: u32 = 54_322;
const ORDINARY: u32 = 54_321;

fn an_ordinary_user_in_the_devices_group_runs_programs() {
    if !root() {
        // This is one already: all these tests show it.
        return;
    }
    let said = Command::new(std::env::current_exe().unwrap()).arg("as_a_member").output().unwrap();
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    if text.starts_with("SKIPPED") {
        eprintln!("{text}");
        return;
    }
    assert!(said.status.success(), "{text}{}", String::from_utf8_lossy(&said.stderr));
    let words: Vec<&str> = text.split_whitespace().collect();
    assert!(words.contains(&"supervisors_user"), "{text}");
    assert!(!words.contains(&"no_namespaces") && !words.contains(&"hosts_tree"), "{text}");
}

/// Becomes an ordinary user to whom `/dev/kvm` opens by its group, runs a
/// program, and says what is weaker then.
fn as_a_member() {
    if let Err(why) = become_a_member() {
        println!("SKIPPED: no ordinary user can be had to whom /dev/kvm opens: {why}");
        return;
    }
    // A private folder hides even this program from others.
    if let Err(why) = std::env::current_exe().and_then(std::fs::File::open) {
        println!("SKIPPED: an ordinary user cannot reach what is tested: {why}");
        return;
    }
    let pool = pool(None);
    run_hello(&pool);
    for weak in pool.weaknesses() {
        println!("{}", weak.word());
    }
}

fn become_a_member() -> std::io::Result<()> {
    let checked = |result: i32| match result {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    };
    let path = |path: &Path| CString::new(path.as_os_str().as_bytes()).unwrap();
    let mount = |from: &CStr, to: &CStr, kind: &CStr, flags| {
        // SAFETY: C strings, and no data.
        checked(unsafe {
            libc::mount(from.as_ptr(), to.as_ptr(), kind.as_ptr(), flags, std::ptr::null())
        })
    };
    // A device of the same number that belongs to the group, over the host's,
    // in sight of this process alone.
    let number = fs::metadata("/dev/kvm")?.rdev();
    // SAFETY: takes a number.
    checked(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    mount(c"none", c"/", c"none", libc::MS_REC | libc::MS_PRIVATE)?;
    let folder = Path::new("/dev/shm");
    mount(c"tmpfs", &path(folder), c"tmpfs", 0)?;
    let device = folder.join("kvm");
    // SAFETY: a C string and numbers.
    checked(unsafe { libc::mknod(path(&device).as_ptr(), libc::S_IFCHR | 0o660, number) })?;
    std::os::unix::fs::chown(&device, Some(0), Some(MEMBERS))?;
    fs::set_permissions(&device, std::os::unix::fs::PermissionsExt::from_mode(0o660))?;
    mount(&path(&device), c"/dev/kvm", c"none", libc::MS_BIND)?;
    // SAFETY: a readable number, and numbers.
    unsafe {
        checked(libc::setgroups(1, &MEMBERS))?;
        checked(libc::setresgid(ORDINARY, ORDINARY, ORDINARY))?;
        checked(libc::setresuid(ORDINARY, ORDINARY, ORDINARY))?;
        // It may be asked about itself again, as after a login.
        libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0);
    }
    fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").map(drop)
}

/// Where groups can be made with all controllers, or a word of why not.
fn parent() -> Option<Parent> {
    let why = match Parent::own() {
        Ok(parent) if parent.missing().is_empty() => return Some(parent),
        Ok(parent) => format!("{} lacks {:?}", parent.path().display(), parent.missing()),
        Err(error) => error.to_string(),
    };
    eprintln!("SKIPPED: a pool's cgroup: {why}");
    None
}

fn zygote_and_workers_are_in_a_group_with_the_configured_limits() {
    let Some(parent) = parent() else { return };
    let limits = GroupLimits {
        memory_bytes: Some(512 << 20),
        processes: Some(64),
        cpu_thousandths: Some(1500),
    };
    let pool = pool(Some(limits));
    let worker = pool.make(false).unwrap();
    run_hello(&pool);
    assert!(!pool.weaknesses().iter().any(|it| matches!(it, Weakness::NoController { .. })));
    let zygote = pool.zygote().unwrap();
    // Of cgroup v2 the line is "0::/path" (cgroups(7)). Another test of this
    // process has a group here as well.
    let line = fs::read_to_string(format!("/proc/{zygote}/cgroup")).unwrap();
    let name = line.lines().find_map(|line| line.strip_prefix("0::")).unwrap();
    let group = parent.path().join(Path::new(name).file_name().unwrap());
    let figure = |file| fs::read_to_string(group.join(file)).unwrap();
    assert_eq!(figure("memory.max").trim(), (512 << 20).to_string());
    assert_eq!(figure("pids.max").trim(), "64");
    assert_eq!(figure("cpu.max").trim(), "150000 100000");
    let workers: Vec<_> =
        Process::children_of(zygote).into_iter().filter(|it| !it.zombie).collect();
    assert!(!workers.is_empty());
    let theirs = figure("cgroup.procs");
    let held: Vec<i32> = theirs.lines().map(|line| line.parse().unwrap()).collect();
    // A worker that served may have left in between.
    for process in workers.iter().map(|it| it.pid).chain([zygote]) {
        assert!(held.contains(&process) || is_gone(process), "{process} is not in {held:?}");
    }
    drop((worker, pool));
    assert!(!group.exists());
}

fn a_supervisor_in_a_group_of_its_own_steps_aside_with_its_children() {
    let Some(parent) = parent() else { return };
    let group = parent.path().join(format!("forge-test-own-{}", std::process::id()));
    fs::create_dir(&group).unwrap();
    let exe = std::env::current_exe().unwrap();
    let said = Command::new(exe).arg("in_a_group").arg(&group).output().unwrap();
    let left: Vec<_> = fs::read_dir(&group)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_type().unwrap().is_dir())
        .map(|entry| entry.file_name())
        .collect();
    let _ = fs::remove_dir(group.join("supervisor"));
    let removed = fs::remove_dir(&group);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    assert_eq!(left, ["supervisor"]);
    removed.unwrap();
}

/// A supervisor as it is started in a group that was delegated to it, with a
/// child from before there is a pool.
fn in_a_group(group: &Path) {
    fs::write(group.join("cgroup.procs"), "0").unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .arg("stay")
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let limits = GroupLimits { memory_bytes: Some(512 << 20), ..GroupLimits::default() };
    let pool = pool(Some(limits));
    run_hello(&pool);
    for pid in [std::process::id(), child.id()] {
        let file = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        assert!(file.trim().ends_with("/supervisor"), "{pid}: {file}");
    }
    // Another zygote's group is beside the first one's, and not below it.
    // SAFETY: a process that this one has started.
    unsafe { libc::kill(pool.zygote().unwrap(), libc::SIGKILL) };
    run_hello(&pool);
    let file = fs::read_to_string(format!("/proc/{}/cgroup", pool.zygote().unwrap())).unwrap();
    let path = Path::new(file.trim().trim_start_matches("0::"));
    assert_eq!(path.parent().unwrap().file_name(), group.file_name(), "{file}");
    drop(pool);
    drop(child.stdin.take());
    child.wait().unwrap();
}

fn a_group_that_a_dead_supervisor_left_is_removed() {
    let parent = match Parent::own() {
        Ok(parent) => parent,
        Err(why) => {
            eprintln!("SKIPPED: a dead supervisor's group: {why}");
            return;
        }
    };
    let mut ended = Command::new(std::env::current_exe().unwrap()).arg("--list").spawn().unwrap();
    ended.wait().unwrap();
    let namespace = fs::metadata("/proc/self/ns/pid").unwrap().ino();
    let stale = parent.path().join(format!("forge-vmm-{namespace}-{}-1-0", ended.id()));
    // Of a namespace whose processes cannot be told from here.
    let foreign = parent.path().join(format!("forge-vmm-1-{}-1-0", ended.id()));
    fs::create_dir(&stale).unwrap();
    fs::create_dir(&foreign).unwrap();
    let pool = pool(Some(GroupLimits::default()));
    run_hello(&pool);
    let (gone, kept) = (!stale.exists(), foreign.exists());
    let _ = fs::remove_dir(&stale);
    fs::remove_dir(&foreign).unwrap();
    assert!(gone && kept);
}

fn limits_that_the_host_cannot_keep_are_no_vm() {
    let wanted = GroupLimits { memory_bytes: Some(1 << 30), ..GroupLimits::default() };
    if Parent::own().is_ok_and(|parent| !parent.missing().contains(&Controller::Memory)) {
        eprintln!("SKIPPED: this host can keep them");
        return;
    }
    let failure = pool(Some(wanted)).make(false).unwrap_err();
    assert_eq!(failure.kind, VmFailureKind::Unavailable);
    assert!(failure.message.contains("cgroup"), "{failure:?}");
}
