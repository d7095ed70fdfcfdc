//! The zygote, as the supervisor sees it.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forge_protocol::codec;
use forge_protocol::frame::{self, Kind};
use forge_protocol::worker::{
    Fate, Fork, Jailed, Reuse, Tier, VmFailure, VmFailureKind, ZygoteReady, ZygoteSetup, Zygoted,
};

use super::executable;
use super::worker::{self, Worker};
use crate::jail::{self, Group, GroupLimits, Hardening, Identity, Place, Spawned};
use crate::link::{Link, Patience, Unpassed, wait};
use crate::machine::MachineError;
use crate::machine::hypervisor::open_device;
use crate::shortage;
use crate::zygote::KVM_DESCRIPTOR;

/// How long a zygote may take over one answer. It boots a guest for some.
pub(super) const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);
/// How long one may take to end that was killed, with all that is in its namespaces.
const END_TIME_MAX: Duration = Duration::from_secs(10);
/// How long an answer is looked for that has been owed for longer than that: it
/// may have come when nobody looked.
const OWED_TIME: Duration = Duration::from_secs(1);

/// A zygote process and the socket to it.
#[derive(Debug)]
pub struct Zygote {
    process: Arc<Spawned>,
    link: Link,
    hardening: Hardening,
    /// When it began, until it has said that it stands.
    begins: Option<Instant>,
    /// When it was asked for a worker that nobody waited for.
    owes: Option<Instant>,
    /// Removed when the process has ended.
    _group: Option<Group>,
}

/// Why there is no worker.
#[derive(Debug)]
pub enum Unmade {
    /// Patience was over before: `TimedOut`, or `ConnectionAborted` where the
    /// run is wanted no more.
    Late(io::Error),
    /// It cannot be made.
    Failed(VmFailure),
    /// It cannot be made now: there is a [shortage] of what a process takes.
    Short(VmFailure),
}

impl Unmade {
    /// Whether it ended as it began, which is no word on this host.
    pub(super) fn is_loss(&self) -> bool {
        matches!(self, Self::Failed(failure) if failure.kind == VmFailureKind::WorkerLost)
    }
}

impl From<VmFailure> for Unmade {
    fn from(failure: VmFailure) -> Self {
        Self::Failed(failure)
    }
}

impl From<Unmade> for VmFailure {
    fn from(unmade: Unmade) -> Self {
        match unmade {
            Unmade::Failed(failure) | Unmade::Short(failure) => failure,
            Unmade::Late(error) if error.kind() == io::ErrorKind::ConnectionAborted => {
                worker::lost(&error)
            }
            Unmade::Late(_) => Self::new(
                VmFailureKind::Unavailable,
                "no worker was made in time: the zygote, which workers are forked from, says \
                 nothing",
            ),
        }
    }
}

/// What becomes of the run that was to have it.
impl From<Unmade> for Fate {
    fn from(unmade: Unmade) -> Self {
        match unmade {
            Unmade::Late(error) if error.kind() == io::ErrorKind::TimedOut => Self::Deadline,
            unmade => Self::Vm(unmade.into()),
        }
    }
}

impl Zygote {
    /// Starts one, in a group of its own with these limits, and waits until it
    /// stands.
    ///
    /// # Errors
    /// [`VmFailure`]: it cannot be started, or finds that this host cannot run
    /// VMs or keep the limits; `WorkerLost` if it ended before it said so.
    pub fn start(setup: &ZygoteSetup, limits: Option<&GroupLimits>) -> Result<Self, VmFailure> {
        let mut zygote = Self::begin(setup, limits)?;
        zygote.stand(Patience::default())?;
        Ok(zygote)
    }

    /// The same without waiting: it stands a little later ([`Self::stand`]).
    ///
    /// # Errors
    /// [`Unmade`]: it cannot be started; never late.
    pub fn begin(setup: &ZygoteSetup, limits: Option<&GroupLimits>) -> Result<Self, Unmade> {
        let file = executable::file().map_err(cannot_start)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        Self::begin_as(Path::new(&path), &[], setup, limits)
    }

    /// The same from another executable that becomes a zygote by these
    /// arguments. Anybody has to be allowed to execute it.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn begin_as(
        executable: &Path,
        arguments: &[&OsStr],
        setup: &ZygoteSetup,
        limits: Option<&GroupLimits>,
    ) -> Result<Self, Unmade> {
        let kvm = match setup.tier {
            Tier::Vm => Some(open_device().map_err(|it| VmFailure::from(MachineError::from(it)))?),
            Tier::Process => None,
        };
        let (ours, theirs) = UnixStream::pair().map_err(cannot_start)?;
        let null = || {
            let opened = File::options().read(true).write(true).open("/dev/null");
            opened.map_err(|error| cannot_start(io::Error::other(format!("/dev/null: {error}"))))
        };
        let mut descriptors = vec![
            (OwnedFd::from(theirs), 0),
            (OwnedFd::from(null()?), 1),
            (OwnedFd::from(null()?), 2),
        ];
        descriptors.extend(kvm.map(|kvm| (kvm, KVM_DESCRIPTOR)));
        let arguments = [&[OsStr::new("forge-vmm-zygote")], arguments].concat();
        let group = limits.map(Group::for_zygote).transpose();
        let group = group.map_err(|error| cannot_start(io::Error::other(error)))?;
        let place = Place::best();
        let process = jail::spawn(executable, &arguments, descriptors, place)
            .map_err(|error| cannot_start(error.into()))?;
        let hardening = Hardening {
            vm: setup.tier == Tier::Vm,
            // It would not have been started otherwise, nor become ready.
            namespaces: true,
            empty_root: true,
            seccomp: true,
            identity: match place.identity {
                Identity::Id(id) => Some(id),
                Identity::Caller => None,
            },
            cgroup: limits.map(|limits| limits.needs().collect()).unwrap_or_default(),
            // It says so itself.
            procfs: false,
            landlock_abi: None,
        };
        let mut zygote = Self {
            process: Arc::new(process),
            link: Link::new(ours),
            hardening,
            begins: Some(Instant::now()),
            owes: None,
            _group: group,
        };
        // Before it knows what to do, so that it has made nothing yet.
        if let Some(group) = &zygote._group {
            group.attach(zygote.id()).map_err(|error| cannot_start(io::Error::other(error)))?;
        }
        let mut bytes = Vec::new();
        frame::write_message(Kind::ZygoteSetup, setup, &mut bytes);
        zygote.link.send(&bytes, Patience::default()).map_err(lost_early)?;
        Ok(zygote)
    }

    /// Whether it has said that it stands.
    #[must_use]
    pub fn stands(&self) -> bool {
        self.begins.is_none()
    }

    /// Since when it owes an answer that nobody waits for any more.
    pub(super) fn asked(&self) -> Option<Instant> {
        self.owes.or(self.begins)
    }

    /// Whether it owes one, and has not given it since.
    pub(super) fn is_silent(&self) -> bool {
        self.asked().is_some() && !self.link.has_something()
    }

    /// Waits until it stands, as long as patience lasts. Whoever comes after
    /// that waits on.
    ///
    /// # Errors
    /// [`Unmade::Failed`]: it is of no use, as with [`Self::start`].
    pub fn stand(&mut self, patience: Patience<'_>) -> Result<(), Unmade> {
        let Some(begun) = self.begins else { return Ok(()) };
        match self.owed::<ZygoteReady>(Kind::ZygoteReady, begun, patience) {
            Ok(Ok(ready)) => {
                let Jailed { procfs, landlock_abi } = ready.map_err(Unmade::Failed)?;
                self.hardening = Hardening { procfs, landlock_abi, ..self.hardening.clone() };
                self.begins = None;
                Ok(())
            }
            Ok(Err(late)) => Err(Unmade::Late(late)),
            Err(error) => Err(Unmade::Failed(lost_early(error))),
        }
    }

    /// What is on of its jail, once it stands.
    #[must_use]
    pub fn hardening(&self) -> &Hardening {
        &self.hardening
    }

    /// Its process id.
    #[must_use]
    pub fn id(&self) -> libc::pid_t {
        self.process.pid
    }

    /// Its process, for whoever is to end it while somebody waits for an answer.
    #[must_use]
    pub fn process(&self) -> Arc<Spawned> {
        Arc::clone(&self.process)
    }

    /// Has it fork a worker, once it stands and as long as patience lasts. The
    /// worker may not stand ready yet.
    ///
    /// # Errors
    /// The outer error: the zygote is gone. The inner one: it cannot, or has not
    /// in time.
    pub fn fork(
        &mut self,
        mut order: Fork,
        patience: Patience<'_>,
    ) -> io::Result<Result<Worker, Unmade>> {
        if let Err(unmade) = self.stand(patience) {
            return Ok(Err(unmade));
        }
        if let Some(asked) = self.owes {
            match self.forked(asked, patience)? {
                // Nobody has that worker's socket any more, so it ends.
                Ok(_) => drop(self.link.take_passed()),
                Err(late) => return Ok(Err(Unmade::Late(late))),
            }
        }
        // Another would be made for nobody.
        if patience.is_cancelled() {
            return Ok(Err(Unmade::Late(io::ErrorKind::ConnectionAborted.into())));
        }
        if patience.is_over() {
            return Ok(Err(Unmade::Late(io::ErrorKind::TimedOut.into())));
        }
        // It would not find what a run wrote.
        if !self.hardening.procfs {
            order.reuse = Reuse::Fresh;
        }
        // Out of descriptors: that is no word on the zygote, whose end would be
        // the end of every run.
        let (ours, theirs) = match UnixStream::pair() {
            Ok(pair) => pair,
            Err(error) => return Ok(Err(lacks("no socket for a worker", &error))),
        };
        let mut bytes = Vec::new();
        frame::write_message(Kind::Fork, &order, &mut bytes);
        match self.link.pass(&bytes, &mut Some(theirs.as_fd()), Patience::default()) {
            Ok(()) => {}
            // It was asked for nothing.
            Err(error @ Unpassed::TooManyUnderWay) => {
                return Ok(Err(lacks("a worker's socket was not passed", &error)));
            }
            Err(Unpassed::Link(error)) => return Err(error),
        }
        drop(theirs);
        match self.forked(Instant::now(), patience)? {
            Ok(Ok(_)) => {}
            Ok(Err(failure)) => return Ok(Err(Unmade::Failed(failure))),
            Err(late) => return Ok(Err(Unmade::Late(late))),
        }
        // The worker ends as its socket does.
        let Some(process) = self.link.take_passed() else {
            let error = io::Error::from_raw_os_error(libc::EMFILE);
            return Ok(Err(lacks("no descriptor of a worker", &error)));
        };
        Ok(Ok(Worker::new(ours, process)))
    }

    /// What became of the worker that it was asked for then.
    ///
    /// # Errors
    /// The outer error: the zygote is gone. The inner one: patience was over
    /// first, and it still owes the answer.
    fn forked(
        &mut self,
        asked: Instant,
        patience: Patience<'_>,
    ) -> io::Result<Result<Zygoted, io::Error>> {
        self.owes = Some(asked);
        let answer = self.owed(Kind::Zygoted, asked, patience)?;
        if answer.is_ok() {
            self.owes = None;
        }
        Ok(answer)
    }

    /// An answer that it has owed since then.
    ///
    /// # Errors
    /// As [`Self::forked`].
    fn owed<T: for<'a> codec::BorrowDecode<'a, ()>>(
        &mut self,
        kind: Kind,
        since: Instant,
        patience: Patience<'_>,
    ) -> io::Result<Result<T, io::Error>> {
        let last = (since + ANSWER_TIME_MAX).max(Instant::now() + OWED_TIME);
        match self.answer(kind, patience.no_later_than(last)) {
            Ok(answer) => Ok(Ok(answer)),
            Err(error) => match error.kind() {
                io::ErrorKind::ConnectionAborted => Ok(Err(error)),
                io::ErrorKind::TimedOut if Instant::now() < last => Ok(Err(error)),
                _ => Err(error),
            },
        }
    }

    fn answer<T: for<'a> codec::BorrowDecode<'a, ()>>(
        &mut self,
        kind: Kind,
        patience: Patience<'_>,
    ) -> io::Result<T> {
        let frame = self.link.receive(|got| got == kind, patience)?;
        codec::decode(&frame.payload)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
    }
}

/// It was lost before it stood.
fn lost_early(error: io::Error) -> VmFailure {
    let kind = match error.kind() {
        // Another that says nothing would be waited for as long.
        io::ErrorKind::TimedOut => VmFailureKind::Unavailable,
        _ => VmFailureKind::WorkerLost,
    };
    VmFailure::new(kind, format!("the zygote was lost while it began: {error}"))
}

fn cannot_start(error: io::Error) -> Unmade {
    let message = format!("the zygote cannot be started: {error}");
    let failure = VmFailure::new(VmFailureKind::Unavailable, message);
    if shortage::is_one(&error) { Unmade::Short(failure) } else { Unmade::Failed(failure) }
}

fn lacks(what: &str, error: &(dyn std::error::Error + 'static)) -> Unmade {
    let error_code = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
    let cure = match error_code {
        Some(libc::EMFILE) => ": raise the service's limit on open files",
        Some(libc::ENFILE) => ": raise fs.file-max",
        _ => "",
    };
    Unmade::Failed(VmFailure::new(VmFailureKind::Unavailable, format!("{what}: {error}{cure}")))
}

impl Drop for Zygote {
    fn drop(&mut self) {
        // With it ends everything in its namespaces. Where it cannot be signalled, it ends
        // by itself once nobody asks it for workers any more.
        let _ = self.link.socket().shutdown(Shutdown::Both);
        let killed = self.process.kill();
        let process = self.process.pidfd.as_raw_fd();
        match wait(process, libc::POLLIN, Patience::until(Instant::now() + END_TIME_MAX)) {
            Ok(()) => drop(self.process.wait()),
            Err(error) => {
                tracing::warn!(?killed, %error, "a zygote does not end, and is left behind");
            }
        }
    }
}

#[cfg(test)]
impl Zygote {
    /// As if it had been asked for a worker then.
    pub(super) fn has_owed_since(&mut self, asked: Instant) {
        self.owes = Some(asked);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::fd::FromRawFd as _;
    use std::process::{Child, Command};

    use forge_protocol::codec::Encode;

    use super::*;

    /// The process descriptor of a child.
    pub(in crate::pool) fn pidfd_of(child: &Child) -> OwnedFd {
        // SAFETY: a plain system call; the process is a child of ours.
        let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id() as libc::pid_t, 0) };
        assert!(pidfd >= 0);
        // SAFETY: the descriptor is new, and nobody else's.
        unsafe { OwnedFd::from_raw_fd(pidfd as i32) }
    }

    /// A zygote by its socket alone, and the other end; behind it is a process
    /// that ends with it.
    #[allow(clippy::zombie_processes, reason = "waited for as a zygote is")]
    fn zygote() -> (Zygote, Link) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let (pid, pidfd) = (child.id() as libc::pid_t, pidfd_of(&child));
        let hardening = Hardening {
            vm: false,
            namespaces: false,
            empty_root: false,
            seccomp: false,
            identity: None,
            cgroup: Vec::new(),
            procfs: true,
            landlock_abi: None,
        };
        let process = Arc::new(Spawned { pid, pidfd });
        let link = Link::new(ours);
        let zygote = Zygote { process, link, hardening, begins: None, owes: None, _group: None };
        (zygote, Link::new(theirs))
    }

    /// One that has not said yet that it stands.
    pub(in super::super) fn beginning() -> (Zygote, Link) {
        let (mut zygote, theirs) = zygote();
        zygote.begins = Some(Instant::now());
        (zygote, theirs)
    }

    pub(in super::super) fn say<T: Encode>(
        link: &mut Link,
        kind: Kind,
        message: &T,
        passed: Option<&File>,
    ) {
        let mut bytes = Vec::new();
        frame::write_message(kind, message, &mut bytes);
        let mut passed = passed.map(|file| file.as_fd());
        link.pass(&bytes, &mut passed, Patience::default()).unwrap();
    }

    fn answer(theirs: &mut Link, answer: &Zygoted) {
        theirs.receive(|kind| kind == Kind::Fork, Patience::default()).unwrap();
        theirs.take_passed().unwrap();
        let process = File::open("/dev/null").unwrap();
        say(theirs, Kind::Zygoted, answer, Some(&process));
    }

    #[test]
    fn a_zygote_that_lacks_a_task_is_short_and_one_that_lacks_namespaces_failed() {
        let spawn = |errno| {
            let source = io::Error::from_raw_os_error(errno);
            let hint = "; set it to more".into();
            cannot_start(jail::SpawnError::Host { what: "clone", source, hint }.into())
        };
        for errno in [libc::EAGAIN, libc::ENOMEM, libc::ETXTBSY] {
            assert!(matches!(spawn(errno), Unmade::Short(_)), "{errno}");
        }
        for errno in [libc::EPERM, libc::ENOSPC, libc::EUSERS, libc::EINVAL] {
            let Unmade::Failed(failure) = spawn(errno) else { panic!("{errno}") };
            assert!(failure.message.ends_with("set it to more"), "{}", failure.message);
        }
    }

    /// Over before an answer comes, and not before the order is sent, on a host that
    /// is emulated or busy: nobody would answer then.
    const SOON: Duration = Duration::from_millis(500);

    #[test]
    fn an_answer_that_came_while_nobody_looked_is_found_however_late() {
        let (mut zygote, mut theirs) = zygote();
        let order = Fork { ram_bytes: 0, touch_bytes: 0, reuse: Reuse::Fresh };
        let soon = Patience::until(Instant::now() + SOON);
        assert!(matches!(zygote.fork(order, soon), Ok(Err(Unmade::Late(_)))));
        answer(&mut theirs, &Ok(()));
        // And nobody came for a long time.
        zygote.owes = zygote.owes.and_then(|asked| asked.checked_sub(2 * ANSWER_TIME_MAX));
        assert!(zygote.owes.is_some());
        let second = std::thread::spawn(move || {
            let failure = VmFailure::new(VmFailureKind::Internal, "second");
            answer(&mut theirs, &Err(failure));
            theirs
        });
        match zygote.fork(order, Patience::default()).unwrap() {
            Err(Unmade::Failed(failure)) => assert_eq!(failure.message, "second"),
            other => panic!("{other:?}"),
        }
        let mut theirs = second.join().unwrap();
        // One that has been silent for that long is gone.
        let soon = Patience::until(Instant::now() + SOON);
        assert!(matches!(zygote.fork(order, soon), Ok(Err(Unmade::Late(_)))));
        zygote.owes = zygote.owes.and_then(|asked| asked.checked_sub(ANSWER_TIME_MAX));
        assert_eq!(
            zygote.fork(order, Patience::default()).unwrap_err().kind(),
            io::ErrorKind::TimedOut
        );
        theirs.receive(|kind| kind == Kind::Fork, Patience::default()).unwrap();
    }

    #[test]
    fn without_a_procfs_every_worker_is_made_for_one_run() {
        for procfs in [true, false] {
            let (mut zygote, mut theirs) = zygote();
            zygote.hardening.procfs = procfs;
            let answers = std::thread::spawn(move || {
                let asked = theirs.receive(|kind| kind == Kind::Fork, Patience::default()).unwrap();
                theirs.take_passed().unwrap();
                let process = File::open("/dev/null").unwrap();
                say(&mut theirs, Kind::Zygoted, &Zygoted::Ok(()), Some(&process));
                codec::decode::<Fork>(&asked.payload).unwrap()
            });
            let reuse = Reuse::Reset { prove_one_in: 7 };
            let order = Fork { ram_bytes: 0, touch_bytes: 0, reuse };
            assert!(zygote.fork(order, Patience::default()).unwrap().is_ok());
            let asked = answers.join().unwrap();
            assert_eq!(asked.reuse, if procfs { reuse } else { Reuse::Fresh });
        }
    }

    #[test]
    fn no_worker_is_asked_for_that_nobody_waits_for_any_more() {
        let (mut zygote, theirs) = zygote();
        let order = Fork { ram_bytes: 0, touch_bytes: 0, reuse: Reuse::Fresh };
        let cancel = crate::cancel::Cancel::new().unwrap();
        cancel.raise();
        let cancelled = Patience { until: None, cancel: Some(&cancel) };
        for (patience, kind) in [
            (cancelled, io::ErrorKind::ConnectionAborted),
            (Patience::until(Instant::now()), io::ErrorKind::TimedOut),
        ] {
            match zygote.fork(order, patience) {
                Ok(Err(Unmade::Late(error))) => assert_eq!(error.kind(), kind),
                other => panic!("{other:?}"),
            }
            assert!(!theirs.has_something(), "{kind:?}");
        }
    }
}
