//! One worker, as the supervisor sees it.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use forge_protocol::codec;
use forge_protocol::frame::{self, Kind};
use forge_protocol::worker::{Job, Ready, Report, VmFailure, VmFailureKind};

use crate::link::Link;

/// A worker process and the socket to it. Dropped, it is killed: whatever it
/// still does, it does for nobody.
#[derive(Debug)]
pub struct Worker {
    link: Link,
    process: OwnedFd,
    /// It has said that its VM stands ready.
    ready: bool,
    runs: u64,
}

/// A worker that gave no report.
#[derive(Debug)]
pub enum Lost {
    /// It was lost before the job began.
    Before(VmFailure),
    /// It had begun.
    During(VmFailure),
}

fn lost(error: &io::Error) -> VmFailure {
    VmFailure {
        kind: VmFailureKind::WorkerLost,
        message: match error.kind() {
            io::ErrorKind::TimedOut => "the worker said nothing in time".into(),
            io::ErrorKind::UnexpectedEof => "the worker ended without a report".into(),
            _ => format!("the worker was lost: {error}"),
        },
    }
}

fn broke(payload: &[u8]) -> VmFailure {
    let call = payload.try_into().map_or(-1, i32::from_le_bytes);
    VmFailure {
        kind: VmFailureKind::WorkerBroke,
        message: format!("the worker made system call {call}, which its jail forbids"),
    }
}

impl Worker {
    pub(super) fn new(socket: UnixStream, process: OwnedFd) -> Self {
        Self { link: Link::new(socket), process, ready: false, runs: 0 }
    }

    /// How many jobs it has carried out.
    #[must_use]
    pub fn runs(&self) -> u64 {
        self.runs
    }

    /// Its process descriptor.
    #[must_use]
    pub fn process(&self) -> &OwnedFd {
        &self.process
    }

    /// Waits until its VM stands ready.
    ///
    /// # Errors
    /// Why it does not; the worker is of no use then.
    pub fn await_ready(&mut self, until: Instant) -> Result<(), VmFailure> {
        if self.ready {
            return Ok(());
        }
        let frame = self
            .link
            .receive(|kind| matches!(kind, Kind::Ready | Kind::Forbidden), Some(until))
            .map_err(|error| lost(&error))?;
        if frame.kind == Kind::Forbidden {
            return Err(broke(&frame.payload));
        }
        decode::<Ready>(&frame.payload)??;
        self.ready = true;
        Ok(())
    }

    /// Hands over a job and waits for its report. The worker need not stand
    /// ready yet: it takes the job when it does.
    ///
    /// # Errors
    /// [`Lost`]; the worker is of no use then.
    pub fn carry_out(
        &mut self,
        job: &Job,
        broker: Option<&UnixStream>,
        until: Instant,
    ) -> Result<Report, Lost> {
        let mut bytes = Vec::with_capacity(job.program.len() + job.input.len() + 1024);
        frame::write_message(Kind::Job, job, &mut bytes);
        self.link
            .send(&bytes, broker.map(|socket| socket.as_fd()), Some(until))
            .map_err(|error| Lost::Before(lost(&error)))?;
        self.await_ready(until).map_err(Lost::Before)?;
        let frame = self
            .link
            .receive(|kind| matches!(kind, Kind::Report | Kind::Forbidden), Some(until))
            .map_err(|error| Lost::During(lost(&error)))?;
        if frame.kind == Kind::Forbidden {
            return Err(Lost::During(broke(&frame.payload)));
        }
        self.ready = false;
        self.runs += 1;
        decode(&frame.payload).map_err(Lost::During)
    }
}

fn decode<T: for<'a> codec::BorrowDecode<'a, ()>>(payload: &[u8]) -> Result<T, VmFailure> {
    codec::decode(payload).map_err(|error| VmFailure {
        kind: VmFailureKind::Misbehaved,
        message: format!("what the worker says cannot be read: {error}"),
    })
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: a plain system call on a descriptor of ours. The process may
        // have ended already.
        unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.process.as_raw_fd(),
                libc::SIGKILL,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
    }
}
