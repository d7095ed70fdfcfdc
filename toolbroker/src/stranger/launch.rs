//! What a launcher does: this program, started by the broker in the place of
//! a tool server, makes the server's surroundings and starts it in them.
//!
//! ```text
//!  broker ── spawn ──▶ launcher ── fork ──▶ process 1 ── spawn ──▶ server
//!                      waits                of the namespaces,     (process 2)
//!                                           reaps, waits
//! ```
//!
//! The launcher has one thread and no credential but the one server's, in its
//! environment. It dies with the broker's thread that started it, process 1
//! dies with the launcher, and with process 1 the kernel ends all that is in
//! there, however often it forked. Where the host gives no namespaces the
//! launcher becomes the server, under the layers that are left.
//!
//! It does what its order says, or ends with the reason on standard error:
//! what may be weaker is decided by the broker, which says so, and never
//! here. Deliberately absent is any choice.

use std::fmt;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use landlock::{
    ABI, Access as _, AccessFs, BitFlags, CompatLevel, Compatible as _, LandlockStatus,
    PathBeneath, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _, RulesetError, Scope,
};
use rustix::process::{
    DumpableBehavior, Gid, Pid, Resource, Rlimit, Signal, Uid, WaitOptions, WaitStatus,
    set_dumpable_behavior, set_parent_process_death_signal, setrlimit,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, UnshareFlags, remove_capability_from_bounding_set,
    set_capabilities,
};
use serde::{Deserialize, Serialize};

use super::reach::{Seen, reach};
use super::sys;
use super::tree::{self, Tree};
use super::{Limits, Namespaces};
use crate::filter;

/// The first word of a launcher's command line.
pub(super) const LAUNCH: &str = "--launch-server";
/// The first word where the host is to be tried out.
pub(super) const PROBE: &str = "--probe-launch";
/// A launcher that cannot make the surroundings.
const EXIT_FAILED: u8 = 125;
/// One that cannot make them now: the host is short of what they take (`EX_TEMPFAIL` of
/// sysexits(3)).
pub(super) const EXIT_SHORT: u8 = 75;
/// What the server takes its host to be called.
const HOSTNAME: &[u8] = b"stranger";

/// What the launcher is to make.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Order {
    /// Whose child the launcher is.
    pub(super) broker: i32,
    /// Where the server lives.
    pub(super) namespaces: Namespaces,
    /// Whether it has a `/proc`.
    pub(super) procfs: bool,
    /// Whom it runs as; without one, as the broker's user.
    pub(super) uid: Option<u32>,
    /// What it sees.
    pub(super) tree: Tree,
    /// Whether it may reach a network.
    pub(super) network: bool,
    /// What it gets at most.
    pub(super) limits: Limits,
    /// Where it runs.
    pub(super) cwd: PathBuf,
    /// Whether it cannot do without that folder.
    pub(super) cwd_needed: bool,
    /// The program.
    pub(super) program: PathBuf,
}

/// A step that failed.
#[derive(Debug)]
pub(super) struct Failure {
    what: String,
    source: io::Error,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.source)
    }
}

impl Failure {
    pub(super) fn at(what: &str, path: &Path, source: io::Error) -> Self {
        Self { what: format!("{what} {}", path.display()), source }
    }

    /// Whether that says nothing of what the host allows: it lacks tasks, memory or
    /// descriptors for the moment.
    pub(super) fn is_shortage(&self) -> bool {
        is_shortage(&self.source)
    }

    fn code(&self) -> u8 {
        if self.is_shortage() { EXIT_SHORT } else { EXIT_FAILED }
    }
}

/// The same of what the kernel says.
pub(super) fn is_shortage(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, OutOfMemory, WouldBlock};
    matches!(error.kind(), WouldBlock | OutOfMemory | Interrupted)
        || matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

pub(super) fn failed<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Failure {
    move |source| Failure { what: what.to_owned(), source: source.into() }
}

/// Does a launcher's work if this process was started as one.
#[must_use]
pub fn if_asked() -> Option<ExitCode> {
    let mut words = std::env::args_os().skip(1);
    match words.next()?.as_bytes() {
        word if word == LAUNCH.as_bytes() => {
            let order = words.next().unwrap_or_default();
            let outcome = serde_json::from_slice(order.as_bytes())
                .map_err(|error| failed("the order")(io::Error::other(error)))
                .and_then(|order| launch(&order, &words.collect::<Vec<_>>()));
            Some(outcome.unwrap_or_else(|failure| {
                complain(&failure);
                ExitCode::from(failure.code())
            }))
        }
        word if word == PROBE.as_bytes() => Some(super::host::try_out()),
        _ => None,
    }
}

/// Says why there is no server, where somebody can be told.
fn complain(failure: &Failure) {
    let what = "a tool server's surroundings cannot be made";
    let _ = writeln!(io::stderr(), "forge-toolbroker: {what}: {failure}");
}

fn launch(order: &Order, args: &[std::ffi::OsString]) -> Result<ExitCode, Failure> {
    // The broker ignores it, which is nothing for a server to know.
    sys::heed(libc::SIGXFSZ);
    let mut server = Command::new(&order.program);
    server.args(args);
    if order.namespaces == Namespaces::Shared {
        shared(order)?;
        return Err(Failure::at("starting", &order.program, server.exec()));
    }
    // Signals are for the server, which is in the same process group.
    sys::block_signals(true).map_err(failed("blocking signals"))?;
    let child = start(order, &mut |order| {
        sys::block_signals(false).map_err(failed("unblocking signals"))?;
        let child =
            server.spawn().map_err(|source| Failure::at("starting", &order.program, source))?;
        leave_streams().map_err(failed("leaving the standard streams"))?;
        Ok(reap_until(Pid::from_child(&child)))
    })?;
    leave_streams().map_err(failed("leaving the standard streams"))?;
    let (_, status) = rustix::process::waitpid(Some(child), WaitOptions::empty())
        .ok()
        .flatten()
        .ok_or_else(|| failed("waiting for the server")(io::Error::last_os_error()))?;
    Ok(ExitCode::from(code_of(status)))
}

/// Gets this process ready to become a server in the broker's own namespaces.
pub(super) fn shared(order: &Order) -> Result<(), Failure> {
    become_user(order)?;
    // Not before: the kernel forgets it where identities change.
    die_with_parent(order)?;
    go_to(order)?;
    restrict(order)
}

/// Makes the namespaces, and process 1 of them, which gets everything else
/// ready and then does `then`. Its end is the end of all.
pub(super) fn start(
    order: &Order,
    then: &mut dyn FnMut(&Order) -> Result<u8, Failure>,
) -> Result<Pid, Failure> {
    let owners = match (order.namespaces, order.uid) {
        (Namespaces::Privileged, Some(uid)) => {
            Some(tree::owners(uid).map_err(failed("making a map of owners"))?)
        }
        _ => None,
    };
    let mut new =
        UnshareFlags::NEWPID | UnshareFlags::NEWNS | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
    if !order.network {
        new |= UnshareFlags::NEWNET;
    }
    if order.namespaces == Namespaces::User {
        become_user(order)?;
        user_namespace().map_err(failed("making a user namespace"))?;
    }
    sys::unshare(new).map_err(failed("making namespaces"))?;
    // Not before: the kernel forgets it where identities change.
    die_with_parent(order)?;
    let (alive, held) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(failed("making a pipe"))?;
    if let Some(child) = sys::fork().map_err(failed("forking"))? {
        // The writing end stays open as long as this process lives.
        std::mem::forget(held);
        return Ok(child);
    }
    drop(held);
    let outcome = process_1(order, owners, &alive, then);
    let code = outcome.unwrap_or_else(|failure| {
        complain(&failure);
        failure.code()
    });
    std::process::exit(code.into());
}

fn process_1(
    order: &Order,
    owners: Option<OwnedFd>,
    alive: &OwnedFd,
    then: &mut dyn FnMut(&Order) -> Result<u8, Failure>,
) -> Result<u8, Failure> {
    rustix::system::sethostname(HOSTNAME).map_err(failed("naming the host"))?;
    order.tree.enter(owners.as_ref().map(OwnedFd::as_fd), order.uid, order.procfs)?;
    if order.namespaces == Namespaces::Privileged {
        become_user(order)?;
    }
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(failed("tying it to its parent"))?;
    if is_gone(alive.as_fd()) {
        return Err(failed("starting")(io::Error::other("the launcher is gone")));
    }
    go_to(order)?;
    restrict(order)?;
    then(order)
}

/// Whether the other end of a pipe that nobody writes to is closed.
fn is_gone(pipe: BorrowedFd<'_>) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut polled = [PollFd::new(&pipe, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&at_once)).is_err() || !polled[0].revents().is_empty()
}

fn die_with_parent(order: &Order) -> Result<(), Failure> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(failed("tying it to its parent"))?;
    // Read only after the tie: whoever is the parent now is the one tied to.
    let parent = rustix::process::getppid().map(|parent| parent.as_raw_nonzero().get());
    if parent != Some(order.broker) {
        return Err(failed("starting")(io::Error::other("the broker is gone")));
    }
    Ok(())
}

/// A user namespace with this user in it and nobody else.
fn user_namespace() -> io::Result<()> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    sys::unshare(UnshareFlags::NEWUSER)?;
    // Files of a process that may not be dumped belong to root.
    set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
    std::fs::write("/proc/self/gid_map", format!("{gid} {gid} 1"))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(())
}

fn become_user(order: &Order) -> Result<(), Failure> {
    let Some(id) = order.uid else { return Ok(()) };
    let (uid, gid) = (Uid::from_raw(id), Gid::from_raw(id));
    rustix::thread::set_thread_groups(&[]).map_err(failed("giving up groups"))?;
    rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(failed("changing the group"))?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(failed("changing the user"))
}

/// To where the server runs. A folder that nobody asked for may be one that
/// the server does not see.
fn go_to(order: &Order) -> Result<(), Failure> {
    match rustix::process::chdir(&order.cwd) {
        Ok(()) => Ok(()),
        Err(error) if order.cwd_needed => Err(Failure::at("going to", &order.cwd, error.into())),
        Err(_) => rustix::process::chdir(&order.tree.home)
            .or_else(|_| rustix::process::chdir("/"))
            .map_err(failed("going home")),
    }
}

/// Everything that lasts: limits, no capability, Landlock, the filter.
fn restrict(order: &Order) -> Result<(), Failure> {
    rustix::thread::set_no_new_privs(true).map_err(failed("no_new_privs"))?;
    // Where it shares the broker's user, that user's processes count as its.
    let counts_others = order.namespaces == Namespaces::Shared && order.uid.is_none();
    for (resource, most) in order.limits.all() {
        if resource == Resource::Nproc && counts_others {
            continue;
        }
        let limit = Rlimit { current: Some(most), maximum: Some(most) };
        // Never more than there is.
        let now = rustix::process::getrlimit(resource);
        if now.maximum.is_none_or(|now| now > most) {
            setrlimit(resource, limit).map_err(failed("setting limits"))?;
        }
    }
    landlock(order)?;
    give_up_capabilities().map_err(failed("giving up capabilities"))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed("not dumpable"))?;
    filter::install(filter::Whose::Server { network: order.network })
        .map_err(failed("the system call filter"))
}

/// Gives up what becoming another user did not take: all of it, where there is
/// no other user to become. What the process executes has none either, since
/// `no_new_privs` is set.
fn give_up_capabilities() -> rustix::io::Result<()> {
    for one in CapabilitySet::all() {
        // Of one that the kernel does not know there is nothing to remove, and
        // whoever may not remove any does not need to.
        let _ = remove_capability_from_bounding_set(one);
    }
    let none = CapabilitySet::empty();
    let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
    set_capabilities(None, none)
}

/// Reads what its tree shows, and writes what is granted, its home and its
/// scratch folders. Scopes keep it from signalling anybody and from abstract
/// sockets outside.
fn landlock(order: &Order) -> Result<(), Failure> {
    let newest = ABI::V9;
    let all = AccessFs::from_all(newest);
    let no_devices = all & !(AccessFs::MakeChar | AccessFs::MakeBlock);
    let read = AccessFs::from_read(newest);
    let Tree { system, read: granted, write, home, hidden, home_from, .. } = &order.tree;
    let mut rules = Vec::new();
    if order.namespaces == Namespaces::Shared {
        // The host's own tree: one folder after the other, and none that
        // holds what belongs to the broker. Its `/tmp` is everybody's.
        let hides = |seen: &&Seen| !hidden.iter().any(|hidden| hidden.path.starts_with(&seen.path));
        for seen in system.iter().chain(granted).filter(hides) {
            rules.extend(below(seen.open(), read, &seen.path)?);
        }
        for seen in write.iter().chain(home_from).filter(hides) {
            rules.extend(below(seen.open(), no_devices, &seen.path)?);
        }
        let proc = Path::new("/proc");
        rules.extend(below(reach(proc), read, proc)?);
    } else {
        let (root, tmp) = (Path::new("/"), Path::new("/tmp"));
        rules.extend(below(reach(root), read, root)?);
        // All that is in there is what it was given, by whatever name.
        let granted = write.iter().map(|seen| seen.path.as_path());
        for path in granted.chain([home.as_path(), tmp]) {
            rules.extend(reach(path).ok().map(|found| PathBeneath::new(found, no_devices)));
        }
    }
    let dev = Path::new("/dev");
    rules.extend(below(reach(dev), no_devices, dev)?);
    let restricted = || {
        Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(all)?
            .scope(Scope::from_all(newest))?
            .create()?
            .add_rules(rules.into_iter().map(Ok::<_, RulesetError>))?
            .restrict_self()
    };
    let refused = |error| failed("Landlock")(io::Error::other(error));
    restricted().map(drop).map_err(refused)
}

/// A rule for one folder or file, if it is there and this user comes to it.
fn below(
    found: io::Result<OwnedFd>,
    access: BitFlags<AccessFs>,
    path: &Path,
) -> Result<Option<PathBeneath<OwnedFd>>, Failure> {
    use io::ErrorKind::{NotFound, PermissionDenied};
    match found {
        Ok(found) => Ok(Some(PathBeneath::new(found, access))),
        Err(error) if matches!(error.kind(), NotFound | PermissionDenied) => Ok(None),
        Err(error) => Err(Failure::at("allowing", path, error)),
    }
}

/// The version of Landlock that this kernel has, 0 for none.
pub(super) fn landlock_version() -> i32 {
    let made = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V9))
        .and_then(|ruleset| ruleset.create()?.restrict_self());
    match made.map(|status| status.landlock) {
        Ok(LandlockStatus::Available { effective_abi, kernel_abi }) => {
            kernel_abi.unwrap_or(effective_abi as i32)
        }
        _ => 0,
    }
}

/// Leaves the streams to the server alone: while another process has them
/// open, nobody sees that the server closed them.
fn leave_streams() -> io::Result<()> {
    let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    Ok(rustix::stdio::dup2_stderr(&null)?)
}

/// Waits for whoever ends, until it is the server.
fn reap_until(server: Pid) -> u8 {
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((ended, status))) if ended == server => return code_of(status),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return EXIT_FAILED,
        }
    }
}

/// A status as shells tell it.
pub(super) fn code_of(status: WaitStatus) -> u8 {
    let status = std::process::ExitStatus::from_raw(status.as_raw());
    let code = status.code().or_else(|| Some(128 + status.signal()?));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

impl Limits {
    fn all(&self) -> [(Resource, u64); 8] {
        [
            (Resource::Core, 0),
            (Resource::As, self.memory_mib.map_or(u64::MAX, |mib| mib.saturating_mul(1024 * 1024))),
            (Resource::Nofile, self.open_files),
            (Resource::Nproc, self.processes),
            (Resource::Fsize, self.file_mib.saturating_mul(1024 * 1024)),
            (Resource::Memlock, 8 * 1024 * 1024),
            (Resource::Msgqueue, 0),
            (Resource::Rtprio, 0),
        ]
    }
}
