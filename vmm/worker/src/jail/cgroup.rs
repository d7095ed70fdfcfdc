//! Memory, processes and CPU time of a zygote and its workers, bounded by
//! cgroup v2.
//!
//! Groups are made below a parent that the supervisor may write: its own
//! group, if that was delegated to it, or one that the operator named. A
//! group that hands controllers down may hold no process itself, so a
//! supervisor that uses its own group moves into a leaf of it first, with what
//! it has started.
//!
//! A supervisor that is killed leaves its group behind, empty, because the
//! zygote ends with it. The next one there removes it: a group's name says
//! whose it is.
//!
//! It distrusts the worker, which cannot reach any of this, and what an
//! earlier supervisor left behind. Deliberately absent: cgroup v1, whose
//! controllers cannot be delegated safely, and mounting a hierarchy.

use std::fmt;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A controller that a limit needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Controller {
    /// `memory.max`
    Memory,
    /// `cpu.max`
    Cpu,
    /// `pids.max`
    Pids,
}

impl Controller {
    /// All that are used.
    pub const ALL: [Self; 3] = [Self::Memory, Self::Cpu, Self::Pids];

    const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
            Self::Pids => "pids",
        }
    }
}

impl fmt::Display for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why there is no group.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The host has no cgroup v2.
    #[error(
        "no cgroup v2 is mounted here: boot with systemd.unified_cgroup_hierarchy=1, or mount \
         cgroup2 on /sys/fs/cgroup"
    )]
    Missing,
    /// The supervisor's group cannot hand controllers down.
    #[error(
        "the group {path} holds other processes than this one, so it can hand no controllers \
         down: start forge-vmm in a group of its own, such as by systemd-run --scope \
         --property=Delegate=yes"
    )]
    Shared {
        /// The group.
        path: PathBuf,
    },
    /// A controller is not to be had.
    #[error(
        "the group {path} has no controller {controller}: its parent's cgroup.subtree_control \
         must name it (systemd: Delegate=yes); with cgroup v1 controllers in use it cannot"
    )]
    NoController {
        /// The group.
        path: PathBuf,
        /// The controller.
        controller: Controller,
    },
    /// A file of the hierarchy could not be read or written.
    #[error("{what} {path}: {source}{}", advice(.source))]
    File {
        /// Which it was: reading, writing, making.
        what: &'static str,
        /// The file's path.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A name that is no single path element.
    #[error("{0:?} is no name for a group")]
    Name(String),
}

fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => {
            "; the group must be delegated to this user (systemd: Delegate=yes)"
        }
        _ => "",
    }
}

fn read(path: &Path) -> Result<String, CgroupError> {
    fs::read_to_string(path).map_err(|source| CgroupError::File {
        what: "reading",
        path: path.into(),
        source,
    })
}

/// Writes a file that is there already: the kernel makes a group's files.
fn write(directory: &Path, file: &str, text: &str) -> Result<(), CgroupError> {
    let path = directory.join(file);
    let open = fs::OpenOptions::new().write(true).open(&path);
    open.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|source| CgroupError::File {
        what: "writing",
        path,
        source,
    })
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split_ascii_whitespace()
}

/// A group in which groups for workers are made.
#[derive(Clone, Debug)]
pub struct Parent {
    path: PathBuf,
    /// It is the supervisor's own, which must leave it.
    own: bool,
    missing: Vec<Controller>,
}

impl Parent {
    /// The group that the supervisor was started in, ready to hand controllers
    /// down: the supervisor and its children move into a leaf of it.
    ///
    /// # Errors
    /// [`CgroupError`], if this is not possible here.
    pub fn own() -> Result<Self, CgroupError> {
        // Asked again it is the leaf that this process is in, also if the first
        // time came to nothing afterwards.
        static PATH: Mutex<Option<PathBuf>> = Mutex::new(None);
        static OWN: Mutex<Option<Parent>> = Mutex::new(None);
        let mut own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(parent) = &*own {
            return Ok(parent.clone());
        }
        let mut found = PATH.lock().unwrap_or_else(PoisonError::into_inner);
        let path = match &*found {
            Some(path) => path.clone(),
            None => found.insert(own_group(Path::new("/"))?).clone(),
        };
        let parent = Self { path, own: true, missing: Vec::new() }.prepare()?;
        Ok(own.insert(parent).clone())
    }

    /// A group the operator named, ready to hand controllers down.
    ///
    /// # Errors
    /// [`CgroupError`], if this is not possible.
    pub fn at(path: impl Into<PathBuf>) -> Result<Self, CgroupError> {
        Self { path: path.into(), own: false, missing: Vec::new() }.prepare()
    }

    fn prepare(mut self) -> Result<Self, CgroupError> {
        let has = read(&self.path.join("cgroup.controllers"))?;
        let lacks = |text: &str, wanted: Controller| words(text).all(|it| it != wanted.name());
        self.missing = Controller::ALL.into_iter().filter(|it| lacks(&has, *it)).collect();
        let hands_down = read(&self.path.join("cgroup.subtree_control"))?;
        let to_do: Vec<_> = Controller::ALL
            .into_iter()
            .filter(|it| !self.missing.contains(it) && lacks(&hands_down, *it))
            .collect();
        if to_do.is_empty() {
            return Ok(self);
        }
        if self.own {
            self.step_aside()?;
        }
        for controller in to_do {
            let enabled = write(&self.path, "cgroup.subtree_control", &format!("+{controller}"));
            match enabled {
                Err(CgroupError::File { source, .. })
                    if source.raw_os_error() == Some(libc::EBUSY) =>
                {
                    return Err(CgroupError::Shared { path: self.path });
                }
                other => other?,
            }
        }
        Ok(self)
    }

    /// Moves this process and its descendants into a leaf, unless its group is
    /// the root, which may hold processes.
    fn step_aside(&self) -> Result<(), CgroupError> {
        if !self.path.join("cgroup.type").exists() {
            return Ok(());
        }
        let leaf = self.path.join("supervisor");
        match fs::create_dir(&leaf) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(CgroupError::File { what: "making", path: leaf, source: error });
            }
            _ => write(&leaf, "cgroup.procs", "0")?,
        }
        for pid in words(&read(&self.path.join("cgroup.procs"))?) {
            // One that has ended meanwhile is in nobody's way.
            if pid.parse().is_ok_and(is_descendant) {
                let _ = write(&leaf, "cgroup.procs", pid);
            }
        }
        Ok(())
    }

    /// Removes the groups that supervisors left here who have ended since.
    fn remove_stale(&self) {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        for entry in entries {
            let name = entry.file_name();
            if let Some(owner) = name.to_str().and_then(Owner::of_name)
                && owner.is_gone()
            {
                tracing::info!(group = ?name, "removing a group that a supervisor left behind");
                drop(Group { path: entry.path() });
            }
        }
    }

    /// Which controllers it does not have. A limit that needs one is an
    /// error; without that limit groups can still be made.
    #[must_use]
    pub fn missing(&self) -> &[Controller] {
        &self.missing
    }

    /// The folder of the group.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The group of this process, as `proc` below `root` has it.
fn own_group(root: &Path) -> Result<PathBuf, CgroupError> {
    let mounts = read(&root.join("proc/self/mountinfo"))?;
    // ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [TAG...] - KIND ... (proc(5))
    let mount = mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = words(left).skip(3);
        let (top, point) = (left.next()?, left.next()?);
        words(right).next().filter(|kind| *kind == "cgroup2").map(|_| (top, point))
    });
    let groups = read(&root.join("proc/self/cgroup"))?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"));
    let (Some((top, point)), Some(group)) = (mount, group) else {
        return Err(CgroupError::Missing);
    };
    // A container may have only a part of the hierarchy mounted.
    let below = Path::new(group).strip_prefix(top).unwrap_or(Path::new(group));
    let relative = below.strip_prefix("/").unwrap_or(below);
    Ok(root.join(point.trim_start_matches('/')).join(relative))
}

/// The fields of a process's `stat` from the third on (proc(5)). The second
/// may hold spaces.
fn stat(pid: u32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = text.rsplit_once(')')?;
    Some(words(rest).map(str::to_owned).collect())
}

/// Whether this process has started it, or one that did.
fn is_descendant(mut pid: u32) -> bool {
    while pid > 1 {
        // The parent is the fourth field.
        let Some(parent) = stat(pid).and_then(|stat| stat.get(1)?.parse().ok()) else {
            return false;
        };
        if parent == std::process::id() {
            return true;
        }
        pid = parent;
    }
    false
}

/// Whose a group is, as its name says: a process by its number and when it
/// started, in the pid namespace in which that is so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    namespace: u64,
    pid: u32,
    started: u64,
}

impl Owner {
    const PREFIX: &'static str = "forge-vmm";

    fn this() -> Option<Self> {
        let pid = std::process::id();
        Some(Self { namespace: Self::namespace()?, pid, started: Self::started(pid)? })
    }

    fn namespace() -> Option<u64> {
        fs::metadata("/proc/self/ns/pid").ok().map(|it| it.ino())
    }

    /// When a process started, in ticks since the host did.
    fn started(pid: u32) -> Option<u64> {
        // The 22nd field.
        stat(pid)?.get(19)?.parse().ok()
    }

    fn name(&self, number: u32) -> String {
        let Self { namespace, pid, started } = self;
        format!("{}-{namespace}-{pid}-{started}-{number}", Self::PREFIX)
    }

    fn of_name(name: &str) -> Option<Self> {
        let mut numbers = name.strip_prefix(Self::PREFIX)?.strip_prefix('-')?.split('-');
        let mut number = || numbers.next()?.parse::<u64>().ok();
        let owner =
            Self { namespace: number()?, pid: u32::try_from(number()?).ok()?, started: number()? };
        number().map(|_| owner)
    }

    /// Whether it has ended. What is in another pid namespace cannot be told.
    fn is_gone(&self) -> bool {
        Self::namespace() == Some(self.namespace) && Self::started(self.pid) != Some(self.started)
    }
}

/// What a group may use. What is `None` is not bounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GroupLimits {
    /// Memory, the kernel's own for the group included; no swap beyond it.
    pub memory_bytes: Option<u64>,
    /// Processes and threads: one for each worker, and one for the zygote. KVM
    /// has one of its own for each VM.
    pub processes: Option<u64>,
    /// CPU time in each tenth of a second, in thousandths of one CPU.
    pub cpu_thousandths: Option<u64>,
}

impl GroupLimits {
    /// Enough for the group to be scheduled, not so long that a deadline
    /// passes in one wait.
    const PERIOD_US: u64 = 100_000;

    fn apply(&self, directory: &Path) -> Result<(), CgroupError> {
        if let Some(bytes) = self.memory_bytes {
            write(directory, "memory.max", &bytes.to_string())?;
            // What may go to swap is not bounded by memory.max. A kernel
            // without swap has no such file.
            if directory.join("memory.swap.max").exists() {
                write(directory, "memory.swap.max", "0")?;
            }
        }
        if let Some(processes) = self.processes {
            write(directory, "pids.max", &processes.to_string())?;
        }
        if let Some(thousandths) = self.cpu_thousandths {
            // One beyond all bounds is the kernel's to refuse.
            let quota_us = thousandths.saturating_mul(Self::PERIOD_US / 1000);
            write(directory, "cpu.max", &format!("{quota_us} {}", Self::PERIOD_US))?;
        }
        Ok(())
    }

    /// The controllers that the limits are kept by.
    pub fn needs(&self) -> impl Iterator<Item = Controller> {
        [
            self.memory_bytes.map(|_| Controller::Memory),
            self.cpu_thousandths.map(|_| Controller::Cpu),
            self.processes.map(|_| Controller::Pids),
        ]
        .into_iter()
        .flatten()
    }
}

/// A group. Dropped, it kills what is in it and is removed.
#[derive(Debug)]
pub struct Group {
    path: PathBuf,
}

impl Group {
    /// Makes a group of this name, which no group there may have.
    ///
    /// # Errors
    /// [`CgroupError`]; then no group is left.
    pub fn create(parent: &Parent, name: &str, limits: &GroupLimits) -> Result<Self, CgroupError> {
        if name.is_empty() || name.contains(['/', '\0', '\n']) || name.starts_with('.') {
            return Err(CgroupError::Name(name.into()));
        }
        if let Some(controller) = limits.needs().find(|it| parent.missing.contains(it)) {
            return Err(CgroupError::NoController { path: parent.path.clone(), controller });
        }
        let path = parent.path.join(name);
        fs::create_dir(&path).map_err(|source| CgroupError::File {
            what: "making",
            path: path.clone(),
            source,
        })?;
        let group = Self { path };
        limits.apply(&group.path)?;
        Ok(group)
    }

    /// A group for a zygote and its workers, in the group that this process was
    /// started in.
    ///
    /// # Errors
    /// As [`Parent::own`] and [`Self::create`].
    pub fn for_zygote(limits: &GroupLimits) -> Result<Self, CgroupError> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let parent = Parent::own()?;
        parent.remove_stale();
        let owner = Owner::this().ok_or_else(|| CgroupError::File {
            what: "reading",
            path: "/proc/self/stat".into(),
            source: io::ErrorKind::InvalidData.into(),
        })?;
        let name = owner.name(NUMBER.fetch_add(1, Ordering::Relaxed));
        Self::create(&parent, &name, limits)
    }

    /// Puts a process into the group. What it forks afterwards is in it, too.
    ///
    /// # Errors
    /// If there is no such process or it may not be moved.
    pub fn attach(&self, pid: libc::pid_t) -> Result<(), CgroupError> {
        write(&self.path, "cgroup.procs", &pid.to_string())
    }

    /// Kills every process in the group.
    ///
    /// # Errors
    /// If the kernel is older than Linux 5.14.
    pub fn kill(&self) -> Result<(), CgroupError> {
        write(&self.path, "cgroup.kill", "1")
    }

    /// A figure of one of the group's files of figures, such as `oom_kill` of
    /// `memory.events` or `nr_throttled` of `cpu.stat`.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn figure(&self, file: &str, name: &str) -> Result<Option<u64>, CgroupError> {
        let text = read(&self.path.join(file))?;
        Ok(text.lines().find_map(|line| {
            line.strip_prefix(name)?.strip_prefix(' ').and_then(|value| value.parse().ok())
        }))
    }

    /// The folder of the group.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = self.kill();
        // A killed process is in its group until it has gone. One that does
        // not go keeps the group, empty of rights and small.
        for _ in 0..200 {
            match fs::remove_dir(&self.path) {
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                _ => return,
            }
        }
        tracing::warn!(path = %self.path.display(), "a cgroup cannot be removed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake(PathBuf);

    impl Fake {
        fn new(name: &str) -> Self {
            let directory = format!("forge-cgroup-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(directory);
            fs::create_dir_all(path.join("proc/self")).unwrap();
            Self(path)
        }

        fn put(&self, file: &str, text: &str) -> &Self {
            let path = self.0.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        fn text(&self, file: &str) -> String {
            fs::read_to_string(self.0.join(file)).unwrap()
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const UNIFIED: &str = "23 1 0:20 / /proc rw - proc proc rw\n\
                           30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";

    #[test]
    fn the_own_group_is_found_wherever_the_hierarchy_is_mounted() {
        let fake = Fake::new("own");
        fake.put("proc/self/mountinfo", UNIFIED).put("proc/self/cgroup", "0::/user.slice/a\n");
        assert_eq!(own_group(&fake.0).unwrap(), fake.0.join("sys/fs/cgroup/user.slice/a"));

        let hybrid = "30 23 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        fake.put("proc/self/mountinfo", hybrid).put("proc/self/cgroup", "4:memory:/x\n0::/\n");
        assert_eq!(own_group(&fake.0).unwrap(), fake.0.join("sys/fs/cgroup/unified"));

        let container = "30 23 0:26 /box /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n";
        fake.put("proc/self/mountinfo", container).put("proc/self/cgroup", "0::/box/b\n");
        assert_eq!(own_group(&fake.0).unwrap(), fake.0.join("sys/fs/cgroup/b"));
    }

    #[test]
    fn a_host_without_cgroup_v2_is_told_apart() {
        let fake = Fake::new("none");
        let v1 = "30 23 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        fake.put("proc/self/mountinfo", v1).put("proc/self/cgroup", "1:cpu:/\n");
        assert!(matches!(own_group(&fake.0), Err(CgroupError::Missing)));
    }

    #[test]
    fn a_parent_hands_down_what_it_has_and_says_what_it_lacks() {
        let fake = Fake::new("parent");
        fake.put("cgroup.controllers", "cpuset cpu io\n").put("cgroup.subtree_control", "");
        let parent = Parent::at(&fake.0).unwrap();
        assert_eq!(parent.missing(), [Controller::Memory, Controller::Pids]);
        assert_eq!(fake.text("cgroup.subtree_control"), "+cpu");

        let limits = GroupLimits { memory_bytes: Some(1), ..GroupLimits::default() };
        let error = Group::create(&parent, "w", &limits).unwrap_err();
        assert!(matches!(error, CgroupError::NoController { .. }), "{error}");
        assert!(!fake.0.join("w").exists());
    }

    #[test]
    fn a_supervisor_leaves_its_own_group_before_that_hands_down() {
        let fake = Fake::new("leaf");
        fake.put("cgroup.controllers", "memory cpu pids")
            .put("cgroup.subtree_control", "")
            .put("cgroup.type", "domain")
            .put("cgroup.procs", "1\n")
            .put("supervisor/cgroup.procs", "");
        Parent { path: fake.0.clone(), own: true, missing: Vec::new() }.prepare().unwrap();
        assert_eq!(fake.text("supervisor/cgroup.procs"), "0");
    }

    #[test]
    fn limits_are_written_as_the_kernel_reads_them() {
        let fake = Fake::new("limits");
        for file in ["memory.max", "memory.swap.max", "pids.max", "cpu.max"] {
            fake.put(file, "");
        }
        let limits = GroupLimits {
            memory_bytes: Some(64 << 20),
            processes: Some(1),
            cpu_thousandths: Some(1500),
        };
        limits.apply(&fake.0).unwrap();
        assert_eq!(fake.text("memory.max"), "67108864");
        assert_eq!(fake.text("memory.swap.max"), "0");
        assert_eq!(fake.text("pids.max"), "1");
        assert_eq!(fake.text("cpu.max"), "150000 100000");
    }

    #[test]
    fn no_file_is_made_where_the_kernel_made_none() {
        let fake = Fake::new("strict");
        let limits = GroupLimits { processes: Some(1), ..GroupLimits::default() };
        assert!(limits.apply(&fake.0).is_err());
        assert!(!fake.0.join("pids.max").exists());
    }

    #[test]
    fn a_group_is_stale_when_its_owner_has_ended() {
        let this = Owner::this().unwrap();
        assert_eq!(Owner::of_name(&this.name(3)), Some(this));
        assert!(!this.is_gone());
        assert!(Owner { started: this.started + 1, ..this }.is_gone());
        assert!(!Owner { namespace: 1, started: 0, ..this }.is_gone());
        for name in ["forge-vmm", "forge-vmm-1-2-3", "forge-vmmx-1-2-3-4", "other-1-2-3-4"] {
            assert_eq!(Owner::of_name(name), None, "{name}");
        }
    }

    #[test]
    fn a_child_is_a_descendant_and_a_parent_is_none() {
        let mut child = std::process::Command::new("/bin/sleep").arg("9").spawn().unwrap();
        assert!(is_descendant(child.id()));
        assert!(!is_descendant(std::os::unix::process::parent_id()));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_groups_name_is_one_path_element() {
        let fake = Fake::new("name");
        fake.put("cgroup.controllers", "").put("cgroup.subtree_control", "");
        let parent = Parent::at(&fake.0).unwrap();
        for name in ["", "..", "../x", "a/b", "."] {
            let made = Group::create(&parent, name, &GroupLimits::default());
            assert!(matches!(made, Err(CgroupError::Name(_))), "{name}");
        }
    }

    #[test]
    fn figures_are_found_by_their_whole_name() {
        let fake = Fake::new("figures");
        fake.put("memory.events", "oom 3\noom_kill 1\n");
        let group = std::mem::ManuallyDrop::new(Group { path: fake.0.clone() });
        assert_eq!(group.figure("memory.events", "oom_kill").unwrap(), Some(1));
        assert_eq!(group.figure("memory.events", "oo").unwrap(), None);
    }
}
