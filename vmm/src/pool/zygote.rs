//! The zygote, as the supervisor sees it.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use forge_protocol::codec;
use forge_protocol::frame::{self, Kind};
use forge_protocol::worker::{Fork, VmFailure, VmFailureKind, Zygoted, ZygoteSetup};

use super::worker::Worker;
use crate::link::Link;
use crate::worker::zygote::COMMAND;

/// How long a zygote may take over one answer. It boots a guest for some.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);

/// A zygote process and the socket to it.
#[derive(Debug)]
pub struct Zygote {
    child: Child,
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
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let child = Command::new(executable)
            .arg0("forge-vmm-zygote")
            .arg(COMMAND)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(failed)?;
        let mut zygote = Self { child, link: Link::new(ours) };
        let mut bytes = Vec::new();
        frame::write_message(Kind::ZygoteSetup, setup, &mut bytes);
        zygote.link.send(&bytes, None, None).map_err(failed)?;
        zygote.answer().map_err(failed)??;
        Ok(zygote)
    }

    /// Its process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Has it fork a worker. The worker may not stand ready yet.
    ///
    /// # Errors
    /// The outer error: the zygote is gone. The inner one: it cannot.
    pub fn fork(&mut self, order: Fork) -> io::Result<Result<Worker, VmFailure>> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut bytes = Vec::new();
        frame::write_message(Kind::Fork, &order, &mut bytes);
        self.link.send(&bytes, Some(theirs.as_fd()), None)?;
        drop(theirs);
        if let Err(failure) = self.answer()? {
            return Ok(Err(failure));
        }
        let process = self.link.take_passed().ok_or(io::ErrorKind::InvalidData)?;
        Ok(Ok(Worker::new(ours, process)))
    }

    fn answer(&mut self) -> io::Result<Zygoted> {
        let until = Some(Instant::now() + ANSWER_TIME_MAX);
        let frame = self.link.receive(|kind| kind == Kind::Zygoted, until)?;
        codec::decode(&frame.payload)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
    }
}

impl Drop for Zygote {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
