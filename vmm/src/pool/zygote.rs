//! The zygote, as the supervisor sees it.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use forge_protocol::codec;
use forge_protocol::frame::{self, Kind};
use forge_protocol::worker::{Fork, VmFailure, VmFailureKind, ZygoteSetup, Zygoted};

use super::worker::Worker;
use crate::jail::{self, Place, Spawned};
use crate::link::{Link, Patience};
use crate::machine::MachineError;
use crate::machine::hypervisor::open_device;
use crate::worker::zygote::{COMMAND, KVM_DESCRIPTOR};

/// How long a zygote may take over one answer. It boots a guest for some.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);

/// A zygote process and the socket to it.
#[derive(Debug)]
pub struct Zygote {
    process: Spawned,
    link: Link,
}

impl Zygote {
    /// Starts one. `executable` is `forge-vmm`.
    ///
    /// # Errors
    /// [`VmFailure`]: it cannot be started, or finds that this host cannot run
    /// VMs.
    pub fn start(executable: &Path, setup: &ZygoteSetup) -> Result<Self, VmFailure> {
        let failed = |error: io::Error| VmFailure {
            kind: VmFailureKind::Unavailable,
            message: format!("the zygote cannot be started: {error}"),
        };
        let kvm = open_device().map_err(MachineError::from)?;
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let null = || File::options().read(true).write(true).open("/dev/null").map_err(failed);
        let descriptors = vec![
            (OwnedFd::from(theirs), 0),
            (OwnedFd::from(null()?), 1),
            (OwnedFd::from(null()?), 2),
            (kvm, KVM_DESCRIPTOR),
        ];
        let arguments = [OsStr::new("forge-vmm-zygote"), OsStr::new(COMMAND)];
        let process = jail::spawn(executable, &arguments, descriptors, Place::best())
            .map_err(|error| failed(io::Error::other(error)))?;
        let mut zygote = Self { process, link: Link::new(ours) };
        let mut bytes = Vec::new();
        frame::write_message(Kind::ZygoteSetup, setup, &mut bytes);
        zygote.link.send(&bytes, None, Patience::default()).map_err(failed)?;
        zygote.answer().map_err(failed)??;
        Ok(zygote)
    }

    /// Its process id.
    #[must_use]
    pub fn id(&self) -> libc::pid_t {
        self.process.pid
    }

    /// Has it fork a worker. The worker may not stand ready yet.
    ///
    /// # Errors
    /// The outer error: the zygote is gone. The inner one: it cannot.
    pub fn fork(&mut self, order: Fork) -> io::Result<Result<Worker, VmFailure>> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut bytes = Vec::new();
        frame::write_message(Kind::Fork, &order, &mut bytes);
        self.link.send(&bytes, Some(theirs.as_fd()), Patience::default())?;
        drop(theirs);
        if let Err(failure) = self.answer()? {
            return Ok(Err(failure));
        }
        let process = self.link.take_passed().ok_or(io::ErrorKind::InvalidData)?;
        Ok(Ok(Worker::new(ours, process)))
    }

    fn answer(&mut self) -> io::Result<Zygoted> {
        let until = Patience::until(Instant::now() + ANSWER_TIME_MAX);
        let frame = self.link.receive(|kind| kind == Kind::Zygoted, until)?;
        codec::decode(&frame.payload)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
    }
}

impl Drop for Zygote {
    fn drop(&mut self) {
        // With it ends everything in its namespaces.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
