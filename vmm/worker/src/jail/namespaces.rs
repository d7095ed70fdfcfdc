//! Starting a process in namespaces of its own.
//!
//! The caller may have many threads. What it forks has one, with a copy of
//! locks that nobody will ever unlock, so between fork and exec the child
//! makes plain system calls on memory prepared before and nothing else. It
//! keeps the descriptors it was given, at the numbers it was given them for,
//! and starts with an empty environment.
//!
//! It distrusts what others left in the supervisor: descriptors without
//! close-on-exec, signal handlers, supplementary groups. Deliberately absent:
//! looking up a path in the child, and glibc's wrappers for identities, which
//! would wait for threads that are not there.

use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::ExitStatus;

use super::privileges;

/// The host's user and group that a jail's uid 0 is, when root starts it.
///
/// From 0x70000000 to 0x7FFFFFFF no distribution allocates: systemd's list of
/// ranges (`UIDS-GIDS`) has it as unused, and subordinate ids end far below.
/// So it owns no file, and no process beside the jail's runs as it.
pub const NOBODYS_ID: u32 = 0x7F00_0000;

/// What the host is called in there.
const HOSTNAME: &[u8] = b"jail";

/// The most that a process can be made the kernel's choice when memory is short.
/// What it forks inherits that.
const FIRST_TO_GO: &str = "1000";

const NEW_NAMESPACES: libc::c_int = libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS;

/// Who the child is to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity {
    /// A user and group of this number. Takes root.
    Id(u32),
    /// Whoever the caller is, supplementary groups included: an ordinary user
    /// can become nobody else.
    Caller,
}

impl Identity {
    /// [`NOBODYS_ID`] for a root that may map it: its user namespace has that, as a
    /// container's may not, and it has not lost the capabilities. The caller for
    /// everybody else.
    #[must_use]
    pub fn best() -> Self {
        const CAP_SETGID: u32 = 6;
        const CAP_SETUID: u32 = 7;
        let has = |map: &str| fs::read_to_string(map).is_ok_and(|map| maps(&map, NOBODYS_ID));
        let may_map = || privileges::has(&[CAP_SETGID, CAP_SETUID]).unwrap_or(false);
        // SAFETY: has no preconditions.
        let is_root = unsafe { libc::geteuid() } == 0;
        if is_root && has("/proc/self/uid_map") && has("/proc/self/gid_map") && may_map() {
            Self::Id(NOBODYS_ID)
        } else {
            Self::Caller
        }
    }
}

/// Whether a user namespace with this map (user_namespaces(7)) has this id.
fn maps(map: &str, id: u32) -> bool {
    map.lines().any(|line| {
        let mut numbers = line.split_ascii_whitespace().map(str::parse::<u32>);
        let (Some(Ok(first)), Some(Ok(_)), Some(Ok(count))) =
            (numbers.next(), numbers.next(), numbers.next())
        else {
            return false;
        };
        id.checked_sub(first).is_some_and(|at| at < count)
    })
}

/// Which namespaces the child is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Namespaces {
    /// New ones of all six kinds, in which it is uid 0 and process 1.
    New,
    /// The caller's. A [`super::tree`] cannot be had there.
    Shared,
}

/// Where the child is and who.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The namespaces that the child is in.
    pub namespaces: Namespaces,
    /// The identity that the child has.
    pub identity: Identity,
}

impl Place {
    /// New namespaces, and the best identity the caller can give.
    #[must_use]
    pub fn best() -> Self {
        Self { namespaces: Namespaces::New, identity: Identity::best() }
    }
}

/// A process that was started. Dropping it leaves the process alone.
#[derive(Debug)]
pub struct Spawned {
    /// Its id, as the caller sees it.
    pub pid: libc::pid_t,
    /// A descriptor that stands for it, readable when it has ended.
    pub pidfd: OwnedFd,
}

/// Ends the process that this stands for, a pidfd.
///
/// # Errors
/// If it has been waited for already.
pub fn kill(pidfd: &OwnedFd) -> io::Result<()> {
    // SAFETY: no pointer but null, which means "as by kill".
    let sent = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            libc::SIGKILL,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl Spawned {
    /// Ends the process. In new namespaces it is process 1: all processes in
    /// there end with it.
    ///
    /// # Errors
    /// If the process has been waited for already.
    pub fn kill(&self) -> io::Result<()> {
        kill(&self.pidfd)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// If it has been waited for already.
    pub fn wait(&self) -> io::Result<ExitStatus> {
        loop {
            let mut status = 0;
            // SAFETY: `status` is writable.
            if unsafe { libc::waitpid(self.pid, &mut status, 0) } == self.pid {
                return Ok(ExitStatus::from_raw(status));
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

/// Why no process was started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The caller asked for what makes no sense.
    #[error("cannot start a process in a jail: {0}")]
    Misuse(&'static str),
    /// The executable cannot be opened.
    #[error("cannot open {path} to start it in a jail: {source}")]
    Command {
        /// The executable's path.
        path: String,
        /// Why it cannot be opened.
        source: io::Error,
    },
    /// The host gave no process, descriptor or namespace.
    #[error("cannot start a process in a jail: {what}: {source}{hint}")]
    Host {
        /// What failed.
        what: &'static str,
        /// How it failed.
        source: io::Error,
        /// Which setting to look at, after a separator. Empty if none is known.
        hint: String,
    },
}

impl From<SpawnError> for io::Error {
    fn from(error: SpawnError) -> Self {
        let kind = match &error {
            SpawnError::Misuse(_) => io::ErrorKind::InvalidInput,
            SpawnError::Command { source, .. } | SpawnError::Host { source, .. } => source.kind(),
        };
        Self::new(kind, error)
    }
}

fn host(what: &'static str, source: io::Error) -> SpawnError {
    let hint = hint(Path::new("/"), &source);
    SpawnError::Host { what, source, hint }
}

/// Why mounting fails in namespaces that were given.
pub(super) fn hint_of_mounts(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "; something around forge-vmm forbids mounting, also in namespaces of its own: a \
             Landlock domain, a security module's profile or a container's filter"
        }
        Some(libc::ENOSYS | libc::EINVAL) => LACKING,
        _ => "",
    }
}

/// Said of a call that is not there.
const LACKING: &str = "; the kernel lacks it, or a container's system-call filter hides it";

/// Which setting keeps namespaces away, read below `root`.
fn hint(root: &Path, error: &io::Error) -> String {
    let setting = |path: &str| {
        fs::read_to_string(root.join(path)).ok().and_then(|text| text.trim().parse::<u64>().ok())
    };
    let known = [
        (
            "kernel.unprivileged_userns_clone",
            "proc/sys/kernel/unprivileged_userns_clone",
            0,
            "1, or start forge-vmm as root",
        ),
        (
            "kernel.apparmor_restrict_unprivileged_userns",
            "proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            1,
            "0, or give forge-vmm an AppArmor profile with the rule `userns,`",
        ),
    ];
    let refused = [libc::EPERM, libc::EACCES, libc::ENOSPC, libc::EUSERS];
    match error.raw_os_error() {
        Some(code) if refused.contains(&code) => {}
        Some(libc::ENOSYS | libc::EINVAL) => return LACKING.into(),
        _ => return String::new(),
    }
    for kind in ["user", "pid", "net", "mnt", "ipc", "uts"] {
        if setting(&format!("proc/sys/user/max_{kind}_namespaces")) == Some(0) {
            return format!("; user.max_{kind}_namespaces is 0: set it to a few thousand");
        }
    }
    for (name, path, refusing, better) in known {
        if setting(path) == Some(refusing) {
            return format!("; {name} is {refusing}: set it to {better}");
        }
    }
    "; in a container, its system-call filter and its user namespace must allow user namespaces"
        .into()
}

/// What the child does, in the order of their numbers. It is all the child
/// can say when it fails.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Step {
    Await,
    Session,
    Groups,
    Group,
    User,
    Hostname,
    Move,
    Mark,
    Place,
    Signals,
    Execute,
}

impl Step {
    const ALL: [(Self, &'static str); 11] = [
        (Self::Await, "waiting to be let go"),
        (Self::Session, "setsid in the child"),
        (Self::Groups, "setgroups in the child"),
        (Self::Group, "setresgid in the child"),
        (Self::User, "setresuid in the child"),
        (Self::Hostname, "sethostname in the child"),
        (Self::Move, "moving a descriptor in the child"),
        (Self::Mark, "close_range in the child, for which Linux has to be 5.11 or newer"),
        (Self::Place, "placing a descriptor in the child"),
        (Self::Signals, "resetting signals in the child"),
        (Self::Execute, "executing the command in the child"),
    ];

    fn describe(number: u8) -> &'static str {
        let mut all = Self::ALL.iter();
        all.find(|(step, _)| *step as u8 == number).map_or("an unknown step", |(_, what)| what)
    }
}

/// Everything the child needs, laid out before it exists.
struct Plan {
    ours: UnixStream,
    theirs: UnixStream,
    executable: OwnedFd,
    /// What `pointers` points into.
    _arguments: Vec<CString>,
    pointers: Vec<*const libc::c_char>,
    environment: [*const libc::c_char; 1],
    descriptors: Vec<(OwnedFd, RawFd)>,
    moved: Vec<RawFd>,
    /// The first number past all targets.
    floor: RawFd,
    place: Place,
}

impl Plan {
    fn new(
        command: &Path,
        arguments: &[&OsStr],
        descriptors: Vec<(OwnedFd, RawFd)>,
        place: Place,
    ) -> Result<Self, SpawnError> {
        let mut targets: Vec<RawFd> = descriptors.iter().map(|(_, target)| *target).collect();
        targets.sort_unstable();
        if targets.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(SpawnError::Misuse("two descriptors for one number"));
        }
        if targets.first().is_some_and(|first| *first < 0) {
            return Err(SpawnError::Misuse("a descriptor for a negative number"));
        }
        let executable = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_PATH | libc::O_CLOEXEC)
            .open(command)
            .map_err(|source| SpawnError::Command {
                path: command.display().to_string(),
                source,
            })?;
        let arguments: Vec<CString> = arguments
            .iter()
            .map(|argument| CString::new(argument.as_bytes()))
            .collect::<Result<_, _>>()
            .map_err(|_| SpawnError::Misuse("an argument with a zero byte"))?;
        let mut pointers: Vec<_> = arguments.iter().map(|argument| argument.as_ptr()).collect();
        pointers.push(std::ptr::null());
        let (ours, theirs) = UnixStream::pair().map_err(|error| host("socketpair", error))?;
        Ok(Self {
            ours,
            theirs,
            executable: executable.into(),
            _arguments: arguments,
            pointers,
            environment: [std::ptr::null()],
            moved: vec![-1; descriptors.len()],
            floor: targets.last().map_or(0, |last| last + 1),
            descriptors,
            place,
        })
    }

    /// The child's whole life before exec. Async-signal-safe: plain system
    /// calls, no allocation, no lock, no panic.
    ///
    /// # Safety
    /// Only in a process that [`fork`] has just made, which has one thread.
    unsafe fn child(&mut self) -> ! {
        let mut answer = self.theirs.as_raw_fd();
        // SAFETY: as the caller promises; `carry_out` has the same contract.
        let (step, code) = unsafe { self.carry_out(&mut answer) };
        let code = code.to_ne_bytes();
        let message = [step as u8, code[0], code[1], code[2], code[3]];
        // SAFETY: five readable bytes for a descriptor that is open; `_exit`
        // has no preconditions.
        unsafe {
            libc::write(answer, message.as_ptr().cast(), message.len());
            libc::_exit(127)
        }
    }

    /// Returns the step that failed, and its error. `answer` is where to tell
    /// the parent, and changes its number under way.
    ///
    /// # Safety
    /// As [`Self::child`].
    unsafe fn carry_out(&mut self, answer: &mut RawFd) -> (Step, i32) {
        macro_rules! attempt {
            ($step:expr, $call:expr) => {{
                // SAFETY: plain system calls on numbers and on memory of the
                // plan, which outlives them.
                let result = unsafe { $call };
                if result < 0 {
                    // SAFETY: errno of this thread.
                    return ($step, unsafe { *libc::__errno_location() });
                }
                result
            }};
        }
        use libc::syscall;

        // Its own copy of the parent's end would keep it waiting for ever.
        attempt!(Step::Await, libc::close(self.ours.as_raw_fd()));
        let mut go = [0u8; 1];
        if attempt!(Step::Await, libc::read(*answer, go.as_mut_ptr().cast(), go.len())) != 1 {
            return (Step::Await, libc::EPIPE);
        }
        // Away from the supervisor's terminal and its Ctrl-C.
        attempt!(Step::Session, syscall(libc::SYS_setsid));

        let new = self.place.namespaces == Namespaces::New;
        let id: Option<libc::c_long> = match self.place.identity {
            // In new namespaces its id is the map's business; in there it is 0.
            Identity::Id(_) if new => Some(0),
            Identity::Id(id) => Some(id.into()),
            // The map says 0 for the caller's own id already.
            Identity::Caller => None,
        };
        if let Some(id) = id {
            attempt!(Step::Groups, syscall(libc::SYS_setgroups, 0, std::ptr::null::<u32>()));
            attempt!(Step::Group, syscall(libc::SYS_setresgid, id, id, id));
            attempt!(Step::User, syscall(libc::SYS_setresuid, id, id, id));
        }
        if new {
            attempt!(
                Step::Hostname,
                syscall(libc::SYS_sethostname, HOSTNAME.as_ptr(), HOSTNAME.len())
            );
            attempt!(Step::Hostname, syscall(libc::SYS_setdomainname, HOSTNAME.as_ptr(), 0));
        }

        // First everything out of the way of all targets, then all to close
        // at exec, then each copy to its number, which exec leaves open.
        let (cloexec, floor) = (libc::F_DUPFD_CLOEXEC, self.floor);
        *answer = attempt!(Step::Move, libc::fcntl(*answer, cloexec, floor));
        let executable =
            attempt!(Step::Move, libc::fcntl(self.executable.as_raw_fd(), cloexec, floor));
        for ((source, _), moved) in self.descriptors.iter().zip(self.moved.iter_mut()) {
            *moved = attempt!(Step::Move, libc::fcntl(source.as_raw_fd(), cloexec, floor));
        }
        attempt!(
            Step::Mark,
            syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC)
        );
        for ((_, target), moved) in self.descriptors.iter().zip(self.moved.iter()) {
            attempt!(Step::Place, libc::dup2(*moved, *target));
        }

        // A handler of the supervisor's must not run here, nor may the
        // command start with signals ignored or blocked.
        // Not through glibc, which refuses to touch two of them.
        let default = [0u64; 4];
        for signal in 1..=64 {
            // SAFETY: the kernel's sigaction is four words on x86-64, and all
            // zero it is the default action. The two signals that cannot be
            // set are at their default anyway.
            unsafe {
                syscall(
                    libc::SYS_rt_sigaction,
                    signal,
                    default.as_ptr(),
                    std::ptr::null_mut::<u64>(),
                    size_of::<u64>(),
                );
            }
        }
        let none = 0u64;
        attempt!(
            Step::Signals,
            syscall(
                libc::SYS_rt_sigprocmask,
                libc::SIG_SETMASK,
                &raw const none,
                std::ptr::null_mut::<u64>(),
                size_of::<u64>()
            )
        );
        attempt!(
            Step::Execute,
            syscall(
                libc::SYS_execveat,
                executable,
                c"".as_ptr(),
                self.pointers.as_ptr(),
                self.environment.as_ptr(),
                libc::AT_EMPTY_PATH
            )
        );
        (Step::Execute, libc::ENOEXEC)
    }
}

/// Starts `command` with exactly these descriptors, each at its number, and an
/// empty environment, and returns when it has been executed. `arguments`
/// begin with the name it is to see itself by.
///
/// Give it 0, 1 and 2: Rust opens `/dev/null` for those that are missing. In
/// place of standard error a pipe serves, or a socket: a jail's limits let
/// nobody write to a file. Whoever is to execute the command must be allowed
/// to, which [`NOBODYS_ID`] is only if everybody is.
///
/// # Errors
/// [`SpawnError`], which says the step and, where namespaces are refused, the
/// setting to look at.
pub fn spawn(
    command: &Path,
    arguments: &[&OsStr],
    descriptors: Vec<(OwnedFd, RawFd)>,
    place: Place,
) -> Result<Spawned, SpawnError> {
    let mut plan = Plan::new(command, arguments, descriptors, place)?;
    let spawned = fork(&mut plan)?;
    let outcome = accompany(plan, &spawned);
    if outcome.is_err() {
        let _ = spawned.kill();
        let _ = spawned.wait();
    }
    outcome.map(|()| spawned)
}

/// Makes the child, with all signals blocked so that no handler runs in it.
fn fork(plan: &mut Plan) -> Result<Spawned, SpawnError> {
    let mut flags = libc::CLONE_PIDFD | libc::SIGCHLD;
    if plan.place.namespaces == Namespaces::New {
        flags |= NEW_NAMESPACES;
    }
    let mut pidfd: RawFd = -1;
    let (all, mut before) = (u64::MAX, 0u64);
    // SAFETY: masks of the eight bytes that the kernel takes, one to read and
    // one to write. Not through glibc, which keeps two signals for itself.
    let mask = |how: libc::c_int, set: *const u64, old: *mut u64| unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, how, set, old, size_of::<u64>())
    };
    mask(libc::SIG_SETMASK, &raw const all, &raw mut before);
    // SAFETY: without CLONE_VM and with no new stack this is a fork; the
    // kernel writes the new descriptor to `pidfd`. The child goes on in
    // `child`, which keeps to what such a child may do, and never returns.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, &raw mut pidfd, 0, 0) };
    if pid == 0 {
        // SAFETY: this is the child.
        unsafe { plan.child() }
    }
    let failed = io::Error::last_os_error();
    mask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
    if pid < 0 {
        return Err(host("clone", failed));
    }
    // SAFETY: the kernel made this descriptor for us.
    Ok(Spawned { pid: pid as libc::pid_t, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } })
}

/// The parent's part: the maps, the word to go, and the child's answer.
fn accompany(plan: Plan, spawned: &Spawned) -> Result<(), SpawnError> {
    let Plan { mut ours, theirs, place, .. } = plan;
    // Or its end would never be seen to close.
    drop(theirs);
    let pid = match (number_in_procfs(&spawned.pidfd), place.namespaces) {
        (Ok(pid), Namespaces::New) => {
            map_identity(pid, place.identity)?;
            Some(pid)
        }
        (Err(error), Namespaces::New) => return Err(error),
        (pid, Namespaces::Shared) => pid.ok(),
    };
    // Where memory is short, what is in there goes first, and not who trusts it with
    // nothing. It is no layer of the jail: where it is refused, all else holds.
    if let Some(pid) = pid {
        let _ = fs::write(format!("/proc/{pid}/oom_score_adj"), FIRST_TO_GO);
    }
    let failed = |error| host("speaking with the child", error);
    ours.write_all(&[1]).map_err(failed)?;
    // Exec closes the other end without a word.
    let mut answer = Vec::new();
    ours.read_to_end(&mut answer).map_err(failed)?;
    match answer[..] {
        [] => Ok(()),
        [step, a, b, c, d] => {
            let source = io::Error::from_raw_os_error(i32::from_ne_bytes([a, b, c, d]));
            let what = Step::describe(step);
            // From here on it is no longer about namespaces.
            match step < Step::Move as u8 {
                true => Err(host(what, source)),
                false => Err(SpawnError::Host { what, source, hint: String::new() }),
            }
        }
        _ => Err(failed(io::ErrorKind::InvalidData.into())),
    }
}

/// The number that the process of a pidfd has in the procfs at `/proc`, which may be that of
/// another pid namespace than the caller's: what has the caller's number for it there may be
/// anybody.
fn number_in_procfs(pidfd: &OwnedFd) -> Result<libc::pid_t, SpawnError> {
    let told = fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))
        .map_err(|error| host("reading /proc, which has to be mounted", error))?;
    let number = told.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok());
    number.filter(|number| *number > 0).ok_or_else(|| {
        let other = io::Error::other("the /proc that is mounted knows no process of this place");
        host("finding the child in /proc", other)
    })
}

fn map_identity(pid: libc::pid_t, identity: Identity) -> Result<(), SpawnError> {
    let write = |file: &'static str, text: &str| {
        let open = fs::OpenOptions::new().write(true).open(format!("/proc/{pid}/{file}"));
        open.and_then(|mut file: File| file.write_all(text.as_bytes()))
            .map_err(|error| host(file, error))
    };
    let (uid, gid) = match identity {
        Identity::Id(id) => (id, id),
        // SAFETY: neither has preconditions.
        Identity::Caller => unsafe { (libc::geteuid(), libc::getegid()) },
    };
    if identity == Identity::Caller {
        // The kernel's condition for a user's own group map.
        write("setgroups", "deny")?;
    }
    write("uid_map", &format!("0 {uid} 1"))?;
    write("gid_map", &format!("0 {gid} 1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_without_an_id_is_told_from_one_with_it() {
        let host = "         0          0 4294967295\n";
        let container = "         0     100000      65536\n";
        let parted = "0 1000 1\n2130706432 100000 1\n";
        for (map, has) in [(host, true), (container, false), (parted, true), ("", false)] {
            assert_eq!(maps(map, NOBODYS_ID), has, "{map:?}");
        }
        assert!(maps(container, 65_535) && !maps(container, 65_536));
    }
}
