//! One worker, as the supervisor sees it.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;

use forge_protocol::codec;
use forge_protocol::frame::{self, Kind};
use forge_protocol::service::{Event, RunEvent};
use forge_protocol::worker::{Job, Prepare, PreparedJob, Ready, Report, VmFailure, VmFailureKind};

use crate::link::{Link, Patience};

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

/// Who hears what happens in a run.
pub type Tell<'a> = &'a (dyn Fn(RunEvent) + Sync);

/// What a worker is to carry out.
#[derive(Clone, Copy, Debug)]
pub enum Run<'a> {
    /// A program and its run.
    Whole(&'a Job),
    /// A run of the program that it was prepared with.
    Prepared(&'a PreparedJob),
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
    let kind = match error.kind() {
        io::ErrorKind::ConnectionAborted => VmFailureKind::Cancelled,
        _ => VmFailureKind::WorkerLost,
    };
    VmFailure {
        kind,
        message: match error.kind() {
            io::ErrorKind::ConnectionAborted => "nobody waits for the run any more".into(),
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
    pub fn await_ready(&mut self, patience: Patience<'_>) -> Result<(), VmFailure> {
        if self.ready {
            return Ok(());
        }
        let frame = self
            .link
            .receive(|kind| matches!(kind, Kind::Ready | Kind::Forbidden), patience)
            .map_err(|error| lost(&error))?;
        if frame.kind == Kind::Forbidden {
            return Err(broke(&frame.payload));
        }
        decode::<Ready>(&frame.payload)??;
        self.ready = true;
        Ok(())
    }

    /// Has it load a program ahead of its runs.
    ///
    /// # Errors
    /// Why it did not; the worker is of no use then.
    pub fn prepare(&mut self, order: &Prepare, patience: Patience<'_>) -> Result<(), VmFailure> {
        self.await_ready(patience)?;
        let mut bytes = Vec::with_capacity(order.program.len() + 1024);
        frame::write_message(Kind::Prepare, order, &mut bytes);
        self.link.send(&bytes, None, patience).map_err(|error| lost(&error))?;
        self.ready = false;
        self.await_ready(patience)
    }

    /// Hands over a run and waits for its report.
    ///
    /// # Errors
    /// [`Lost`]; the worker is of no use then.
    pub fn carry_out(
        &mut self,
        run: Run<'_>,
        broker: Option<&UnixStream>,
        patience: Patience<'_>,
    ) -> Result<Report, Lost> {
        self.begin(run, broker, patience).map_err(Lost::Before)?;
        self.finish(patience)
    }

    /// Hands over a run. The worker need not stand ready yet: it takes the run
    /// when it does.
    ///
    /// # Errors
    /// Why it cannot be given one; the worker is of no use then.
    pub fn begin(
        &mut self,
        run: Run<'_>,
        broker: Option<&UnixStream>,
        patience: Patience<'_>,
    ) -> Result<(), VmFailure> {
        let mut bytes = Vec::new();
        match run {
            Run::Whole(job) => {
                bytes.reserve(job.program.len() + job.input.len() + 1024);
                frame::write_message(Kind::Job, job, &mut bytes);
            }
            Run::Prepared(job) => frame::write_message(Kind::PreparedJob, job, &mut bytes),
        }
        let broker = broker.map(|socket| socket.as_fd());
        self.link.send(&bytes, broker, patience).map_err(|error| lost(&error))
    }

    /// Has it tell of the run that comes next what happens as it happens.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn ask_to_tell(&mut self, patience: Patience<'_>) -> Result<(), VmFailure> {
        let mut bytes = Vec::new();
        frame::write_raw(Kind::Tell, &[], &mut bytes);
        self.link.send(&bytes, None, patience).map_err(|error| lost(&error))
    }

    /// Waits for the report of the run that it was given.
    ///
    /// # Errors
    /// [`Lost`]; the worker is of no use then.
    pub fn finish(&mut self, patience: Patience<'_>) -> Result<Report, Lost> {
        self.finish_telling(patience, None)
    }

    /// The same, and passes on what happens meanwhile, if it was asked to
    /// tell.
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub fn finish_telling(
        &mut self,
        patience: Patience<'_>,
        tell: Option<Tell<'_>>,
    ) -> Result<Report, Lost> {
        self.await_ready(patience).map_err(Lost::Before)?;
        let awaits = |kind| match kind {
            Kind::Report | Kind::Forbidden => true,
            Kind::Event => tell.is_some(),
            _ => false,
        };
        let frame = loop {
            let frame =
                self.link.receive(awaits, patience).map_err(|error| Lost::During(lost(&error)))?;
            match (frame.kind, tell) {
                (Kind::Forbidden, _) => return Err(Lost::During(broke(&frame.payload))),
                (Kind::Event, Some(tell)) => {
                    let Event { what, .. } = decode(&frame.payload).map_err(Lost::During)?;
                    tell(what);
                }
                _ => break frame,
            }
            // A worker that tells without end does so as long as others.
            if patience.is_over() {
                let over = io::Error::from(io::ErrorKind::TimedOut);
                return Err(Lost::During(lost(&over)));
            }
        };
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
