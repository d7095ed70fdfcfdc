//! What tests that kill processes share: whom they find, how they choose, and
//! that nothing is left.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use forge_vmm::jail::cgroup::Parent;
use forge_vmm::jail::descriptors;

use crate::processes::Process;

/// How long a service may take to be one again.
pub const RECOVERY_TIME_MAX: Duration = Duration::from_secs(60);

/// Copies of executables, so that their processes are told from all others.
pub struct Copies {
    folder: PathBuf,
    inodes: Vec<(u64, u64)>,
    /// The files in memory that their zygotes and workers execute, as far as
    /// one of them was seen as a child of theirs.
    workers: RefCell<BTreeSet<(u64, u64)>>,
}

/// What `/proc/PID/exe` of a zygote or worker is called.
const WORKER: &str = "/memfd:forge-worker";

impl Copies {
    pub fn new(executables: &[&Path]) -> Self {
        let name = format!("forge-{}-{}", env!("CARGO_CRATE_NAME"), std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        let mut this = Self { folder, inodes: Vec::new(), workers: RefCell::default() };
        for executable in executables {
            let copy = this.folder.join(executable.file_name().unwrap());
            fs::copy(executable, &copy).unwrap();
            let metadata = fs::metadata(copy).unwrap();
            this.inodes.push((metadata.dev(), metadata.ino()));
        }
        this
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Every process that executes one of them, and their zygotes and workers.
    pub fn processes(&self) -> Vec<Process> {
        let mut all = executing(|inode| self.inodes.contains(inode));
        all.extend(self.workers());
        all
    }

    /// Every process that executes this one.
    pub fn processes_of(&self, name: &str) -> Vec<Process> {
        let metadata = fs::metadata(self.path(name)).unwrap();
        executing(|inode| *inode == (metadata.dev(), metadata.ino()))
    }

    /// Their zygotes and workers.
    pub fn workers(&self) -> Vec<Process> {
        let parents = executing(|inode| self.inodes.contains(inode));
        for process in Process::all() {
            let link = fs::read_link(format!("/proc/{}/exe", process.pid));
            if parents.iter().any(|it| it.pid == process.parent)
                && link.is_ok_and(|it| it.to_string_lossy().starts_with(WORKER))
                && let Some(inode) = executed(process.pid)
            {
                self.workers.borrow_mut().insert(inode);
            }
        }
        executing(|inode| self.workers.borrow().contains(inode))
    }
}

/// Device and inode of what a process executes.
fn executed(pid: i32) -> Option<(u64, u64)> {
    let executable = fs::metadata(format!("/proc/{pid}/exe")).ok()?;
    Some((executable.dev(), executable.ino()))
}

fn executing(ours: impl Fn(&(u64, u64)) -> bool) -> Vec<Process> {
    let ours = |it: &Process| executed(it.pid).is_some_and(|inode| ours(&inode));
    Process::all().into_iter().filter(ours).collect()
}

impl Drop for Copies {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

pub const NAMESPACES: [&str; 6] = ["user", "pid", "net", "mnt", "ipc", "uts"];

/// The inodes of a process's namespaces.
fn namespaces(pid: i32) -> impl Iterator<Item = u64> {
    let of = move |kind| fs::metadata(format!("/proc/{pid}/ns/{kind}")).ok();
    NAMESPACES.into_iter().filter_map(of).map(|it| it.ino())
}

/// Namespaces that processes are in, held open: the number of one that is gone is the
/// next one's, whoever makes it.
#[derive(Default)]
pub struct Spaces(BTreeMap<u64, File>);

impl Spaces {
    /// Those of these processes, but for the test's own.
    pub fn of(processes: &[Process]) -> Self {
        let own: BTreeSet<u64> = namespaces(std::process::id() as i32).collect();
        let open = |pid, kind| File::open(format!("/proc/{pid}/ns/{kind}")).ok();
        let all = processes.iter().flat_map(|it| NAMESPACES.map(|kind| (it.pid, kind)));
        let held = all.filter_map(|(pid, kind)| open(pid, kind));
        let numbered = held.map(|file| (file.metadata().unwrap().ino(), file));
        Self(numbered.filter(|(number, _)| !own.contains(number)).collect())
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    fn have(&self, process: &Process) -> bool {
        namespaces(process.pid).any(|number| self.0.contains_key(&number))
    }
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

/// Chance, small and repeatable.
pub struct Dice(u64);

impl Dice {
    pub fn throw(&mut self, sides: usize) -> usize {
        // xorshift64
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % sides as u64) as usize
    }
}

pub fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().unwrap())
}

pub fn kill(pid: i32) {
    // SAFETY: signals a process that this test has started, directly or not.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

/// Whether this test can be run; what orphans there are become ours, because a
/// host's first process may take seconds to collect them.
pub fn is_root() -> bool {
    // SAFETY: has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: who looks at jailed processes has to be root");
        return false;
    }
    // SAFETY: an option that takes a number.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
    true
}

/// By `FORGE_CHAOS_SEED`, or by the time.
pub fn dice() -> Dice {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let seed = number("FORGE_CHAOS_SEED", now.as_nanos() as u64 | 1);
    eprintln!("FORGE_CHAOS_SEED={seed}");
    Dice(seed)
}

/// Collects the orphans that have ended.
pub fn reap() {
    let this = std::process::id() as i32;
    for orphan in Process::children_of(this).iter().filter(|it| it.zombie) {
        // SAFETY: the status is not asked for.
        unsafe { libc::waitpid(orphan.pid, std::ptr::null_mut(), libc::WNOHANG) };
    }
}

/// That soon there is no process of theirs, no VM and no namespace.
pub fn nothing_is_left(copies: &Copies, theirs: &BTreeSet<i32>, spaces: &Spaces) {
    let until = Instant::now() + RECOVERY_TIME_MAX;
    loop {
        reap();
        let processes = copies.processes();
        let kept: Vec<_> = Process::all().into_iter().filter(|it| spaces.have(it)).collect();
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
pub fn no_group_is_left_of(supervisor: i32) {
    let Ok(parent) = Parent::own() else { return };
    let part = format!("-{supervisor}-");
    let entries = fs::read_dir(parent.path()).unwrap().flatten();
    let left: Vec<_> =
        entries.filter(|it| it.file_name().to_string_lossy().contains(&part)).collect();
    assert!(left.is_empty(), "{left:?}");
}
