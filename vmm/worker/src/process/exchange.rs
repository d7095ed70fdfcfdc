//! The library's stream, and the host's side of it: what in a VM are two
//! worlds with a device between them are here two structures in one thread.
//!
//! What the library sends is taken in at once. When it waits, this waits in
//! its place: for an order while it stands ready, for an answer while a call
//! is under way.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::time::Instant;

use forge_guest_init::{LinkLost, Stream};
use forge_protocol::frame::Kind;
use forge_protocol::guest::{HostSession, SessionError};
use forge_protocol::worker::{Deadline, Fate, Moments, Ready, Timing, VmFailure, VmFailureKind};

use crate::clock::now_ns;
use crate::link::Link;
use crate::machine::stop::Armed;
use crate::machine::{Watchdog, deadline_in};
use crate::worker::counterpart::Counterpart;
use crate::worker::life::{Order, Ordered, next_order, say};
use crate::worker::{BOOT_TIME_MAX, Verdict, elapsed_ns, not_ready, split};

/// How far the library has come.
#[derive(Clone, Copy, Debug)]
enum Phase {
    /// It waits for a program, or loads one that has no run yet.
    Standing {
        /// When it began to wait or to load.
        since: Instant,
    },
    /// It has a run.
    Running {
        /// When the run began.
        since: Instant,
    },
}

/// Why the library is told nothing any more.
#[derive(Debug)]
enum Over {
    /// The guest's session is.
    Verdict(Verdict),
    /// An order could not be carried out.
    Failed(VmFailure),
    /// The supervisor has hung up, or cannot be understood.
    Supervisor(io::Error),
}

impl From<Verdict> for Over {
    fn from(verdict: Verdict) -> Self {
        Self::Verdict(verdict)
    }
}

impl From<SessionError> for Over {
    fn from(error: SessionError) -> Self {
        Self::Verdict(error.into())
    }
}

/// How the library's own way ended.
#[derive(Debug)]
pub(super) enum Served {
    /// It has nothing left to do.
    ToTheEnd,
    /// It gave up, which in a guest is a panic.
    Broken(String),
}

/// The library's end of the exchange.
#[derive(Debug)]
pub(super) struct Wire(Rc<RefCell<Exchange>>);

impl Wire {
    /// That end, and the other.
    pub(super) fn new(exchange: Exchange) -> (Self, Rc<RefCell<Exchange>>) {
        let exchange = Rc::new(RefCell::new(exchange));
        (Self(Rc::clone(&exchange)), exchange)
    }

    /// Has the host's side do something. What ends it ends the stream.
    fn attempt<T>(
        &self,
        work: impl FnOnce(&mut Exchange) -> Result<T, Over>,
    ) -> Result<T, LinkLost> {
        let mut exchange = self.0.borrow_mut();
        if exchange.over.is_some() {
            return Err(LinkLost);
        }
        work(&mut exchange).map_err(|over| {
            exchange.over = Some(over);
            LinkLost
        })
    }
}

impl Stream for Wire {
    fn send(&mut self, bytes: &[u8]) -> Result<(), LinkLost> {
        self.attempt(|exchange| exchange.take_in(bytes))
    }

    fn receive(&mut self, take: &mut dyn FnMut(&[u8])) -> Result<(), LinkLost> {
        let bytes = self.attempt(Exchange::next_bytes)?;
        take(&bytes);
        Ok(())
    }

    fn may_go_on(&mut self) -> Result<(), LinkLost> {
        self.attempt(|exchange| match exchange.watchdog.stop().raised() {
            true => Err(Verdict::Stopped.into()),
            false => Ok(()),
        })
    }
}

/// The host's side.
#[derive(Debug)]
pub(super) struct Exchange {
    link: Link,
    session: HostSession,
    counterpart: Counterpart,
    watchdog: &'static Watchdog,
    armed: Option<Armed<'static>>,
    timing: Timing,
    phase: Phase,
    over: Option<Over>,
}

impl Exchange {
    /// Over the link to the supervisor.
    pub(super) fn new(link: Link, watchdog: &'static Watchdog, timing: Timing) -> Self {
        Self {
            link,
            session: HostSession::new(),
            counterpart: Counterpart::new(watchdog.stop().clone()),
            watchdog,
            armed: None,
            timing,
            phase: Phase::Standing { since: Instant::now() },
            over: None,
        }
    }

    /// Takes what the library sent.
    fn take_in(&mut self, bytes: &[u8]) -> Result<(), Over> {
        self.session.receive(bytes)?;
        Ok(self.counterpart.take_in(&mut self.session)?)
    }

    /// Waits until there is something for the library.
    fn next_bytes(&mut self) -> Result<Vec<u8>, Over> {
        loop {
            let bytes = self.session.transmit();
            if !bytes.is_empty() {
                return Ok(std::mem::take(bytes));
            }
            if self.session.is_ready() || self.session.is_loaded() {
                self.take_order()?;
            } else if self.counterpart.has_calls() {
                self.counterpart.await_settled(&mut self.session)?;
            } else {
                let how = "the guest waits for something that nobody will send";
                return Err(Verdict::Misbehaved(how.into()).into());
            }
        }
    }

    /// Says that the library stands ready, and waits for what to do.
    fn take_order(&mut self) -> Result<(), Over> {
        self.armed = None;
        if let Phase::Standing { since } = self.phase {
            self.timing.boot_ns += elapsed_ns(since);
        }
        self.note(|at| at.ready = now_ns());
        say(&mut self.link, Kind::Ready, &Ready::Ok(self.timing)).map_err(Over::Supervisor)?;
        let (link, counterpart) = (&mut self.link, &mut self.counterpart);
        let Ordered { order, is_answered_ready, arrived_ns } =
            next_order(link, |listener| counterpart.tell(listener)).map_err(Over::Supervisor)?;
        self.note(|at| at.arrived = arrived_ns);
        let since = Instant::now();
        self.phase = match is_answered_ready {
            true => Phase::Standing { since },
            false => Phase::Running { since },
        };
        let (counterpart, session) = (&mut self.counterpart, &mut self.session);
        let (deadline, begun) = match order.map_err(Over::Failed)? {
            Order::Prepare(program) => {
                (deadline_in(BOOT_TIME_MAX), counterpart.prepare(session, &program))
            }
            Order::Run(job, broker) => (job.deadline, counterpart.begin(session, &job, broker)),
            Order::RunPrepared(job, broker) => {
                (job.deadline, counterpart.begin_prepared(session, &job, broker))
            }
        };
        begun.map_err(Over::Failed)?;
        self.arm(deadline);
        self.note(|at| at.begun = now_ns());
        Ok(())
    }

    fn arm(&mut self, deadline: Deadline) {
        self.armed = Some(self.watchdog.arm(deadline));
    }

    fn note(&mut self, moment: impl FnOnce(&mut Moments)) {
        moment(&mut self.timing.at);
    }

    /// Tells the supervisor what became of it.
    pub(super) fn end(&mut self, served: Served) -> io::Result<()> {
        self.armed = None;
        let fate = match (self.over.take(), served) {
            (Some(Over::Supervisor(error)), _) => {
                return match error.kind() {
                    io::ErrorKind::UnexpectedEof => Ok(()),
                    _ => Err(error),
                };
            }
            (Some(Over::Failed(failure)), _) => Fate::Vm(failure),
            (Some(Over::Verdict(verdict)), _) => verdict.into(),
            (None, Served::ToTheEnd) => {
                Verdict::Misbehaved("the guest left without ending its run".into()).into()
            }
            (None, Served::Broken(how)) => Fate::Vm(VmFailure::new(VmFailureKind::Crash, how)),
        };
        match self.phase {
            Phase::Standing { .. } => {
                say(&mut self.link, Kind::Ready, &Ready::Err(not_ready(fate)))
            }
            Phase::Running { since } => {
                let (load_ns, run_ns) = split(elapsed_ns(since), &fate);
                let at = Moments { ended: now_ns(), ..self.timing.at };
                let timing = Timing { load_ns, run_ns, at, ..self.timing };
                let record = self.counterpart.take_record(&mut self.session);
                let report = record.into_report(fate, 0, timing);
                say(&mut self.link, Kind::Report, &report)
            }
        }
    }
}
