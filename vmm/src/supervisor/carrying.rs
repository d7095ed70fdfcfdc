//! An admitted run, from its opening at the broker to what is told of it.
//!
//! Its clock starts when the broker is asked to open it, for everybody. Where its worker
//! was lost and seems not to have begun it, it is opened once more and carried out
//! afresh; whatever else is lost is settled with the broker, which alone knows what was
//! called.

use std::io;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forge_protocol::RunId;
use forge_protocol::broker::{Authority, BrokenLink, OpenRun, RefusalKind};
use forge_protocol::guest::{Load, Start};
use forge_protocol::limits::RunLimits;
use forge_protocol::name::ToolName;
use forge_protocol::run::CallRecord;
use forge_protocol::service::Order;
use forge_protocol::worker::{Deadline, Fate, Job, Report, Tier, VmFailure, VmFailureKind};

use super::Attendance;
use super::opened::{AfterLoss, Opened, SYNC_GRACE, Settled, after_loss};
use super::result::{Place, Refused, RunResult, held_back, reported};
use crate::admission::Admitted;
use crate::broker::BrokerError;
use crate::keeper::Keeper;
use crate::link::Patience;
use crate::machine::deadline_in;
use crate::pool::worker::misbehaved;
use crate::pool::{Done, Pool, Served, Task, Unserved};
use crate::report::Outcome;
use crate::trace::Supervised;
use crate::worker;

/// How much longer than its deadline a worker may take to say so.
const WORKER_GRACE: Duration = Duration::from_secs(2);

/// One run that is carried out.
pub(super) struct Carrying<'a> {
    pub(super) pool: &'a Pool,
    pub(super) broker: Option<&'a Keeper>,
    pub(super) tier: Tier,
    pub(super) run_id: RunId,
    pub(super) order: &'a Order,
    pub(super) admitted: &'a Admitted,
    pub(super) attendance: &'a Attendance<'a>,
    pub(super) clock: Clock,
}

/// A run's time.
#[derive(Clone, Copy)]
pub(super) struct Clock {
    wall: Duration,
    /// `None` where it is beyond what can be told.
    until: Option<Instant>,
    /// The same, as workers know it.
    deadline: Deadline,
}

impl Clock {
    /// One that goes from now on.
    pub(super) fn start(wall_ms: u64) -> Self {
        let wall = Duration::from_millis(wall_ms);
        let (began, deadline) = (Instant::now(), deadline_in(wall));
        Self { wall, until: began.checked_add(wall), deadline }
    }

    /// Remaining time in milliseconds, at least 1.
    fn left_ms(&self) -> u64 {
        let left = self.until.map_or(self.wall, |it| it.saturating_duration_since(Instant::now()));
        u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1)
    }
}

/// What became of a run at the pool.
pub(super) struct Carried {
    done: Result<Done, Unserved>,
    /// Where the broker has it open.
    opened: Option<Opened>,
    /// What it called until the broker was told that nobody wants it, if it was.
    called: Option<Result<Vec<CallRecord>, BrokerError>>,
}

impl Carrying<'_> {
    /// As long as it lasts, and so much longer.
    fn patience(&self, grace: Duration) -> Patience<'_> {
        let until = self.clock.until.and_then(|until| until.checked_add(grace));
        Patience { until, cancel: self.attendance.cancel }
    }

    /// Opens it at the broker for all of its time: which tools it may call.
    pub(super) fn opened(&self) -> Result<(Vec<ToolName>, Option<Opened>), Refused> {
        self.opened_for(self.order.limits.wall_ms)
    }

    fn opened_for(&self, wall_ms: u64) -> Result<(Vec<ToolName>, Option<Opened>), Refused> {
        let (granted, opened) = self.open(wall_ms)?;
        let violations = self.admitted.shape.violations(&granted, &self.order.limits);
        match violations.is_empty() {
            true => Ok((granted, opened)),
            false => Err(Refused::Violations(violations)),
        }
    }

    /// A program that can call nothing, and is granted nothing, needs no broker.
    fn open(&self, wall_ms: u64) -> Result<(Vec<ToolName>, Option<Opened>), Refused> {
        let Self { run_id, order, .. } = *self;
        if order.authority == Authority::Tools(Vec::new()) && order.hosted.is_none() {
            return Ok((Vec::new(), None));
        }
        let Some(keeper) = self.broker else {
            return Ok((Vec::new(), None));
        };
        let open = OpenRun {
            run_id,
            principal: order.principal.clone(),
            session: order.session.clone(),
            program_sha256: self.admitted.sha256,
            authority: order.authority.clone(),
            callable: self.admitted.shape.callable(),
            limits: RunLimits { wall_ms, ..order.limits.clone() },
        };
        let patience = self.patience(Duration::ZERO);
        // A broker that is lost over it has dispatched nothing of the run.
        let opened = keeper.with(patience, |broker| {
            let host = match (&order.hosted, self.attendance.host) {
                (None, _) => None,
                (Some(tools), Some(takes)) => {
                    let (host, calls) = broker.host(tools.clone(), patience)?;
                    takes(calls);
                    Some(host)
                }
                (Some(_), None) => {
                    return Err(BrokerError::Refused {
                        kind: RefusalKind::BadRequest,
                        message: "nobody is there to carry out the tools that the order hosts"
                            .into(),
                    });
                }
            };
            let hosts = host.is_some();
            broker.open_run_for(open.clone(), host, patience).map_err(|error| match error {
                // It has looked at what the caller hosts, and may have died of that.
                BrokerError::Unsent(why) if hosts => BrokerError::Lost(io::Error::other(why)),
                error => error,
            })
        });
        let ((claims, link), broker) = opened.map_err(Refused::Broker)?;
        let granted: Vec<_> = claims.tools.into_iter().map(|tool| tool.name).collect();
        let grants_any = !granted.is_empty();
        Ok((granted, Some(Opened { run_id, broker, link, grants_any })))
    }

    /// What a worker is told to do.
    pub(super) fn job(&self, granted: Vec<ToolName>, brokered: bool) -> Result<Job, Refused> {
        let order = self.order;
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let start_unix_ns =
            since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX));
        let seed = crate::keys::random().map_err(Refused::Host)?;
        Ok(Job {
            load: Load { limits: order.limits.clone(), announce: false },
            start: Start { run_id: self.run_id, seed, start_unix_ns, granted },
            program: order.program.clone(),
            input: order.input.clone(),
            deadline: self.clock.deadline,
            brokered,
        })
    }

    fn task<'a>(&'a self, job: &'a Job, opened: Option<&'a Opened>) -> Task<'a> {
        Task {
            tenant: &self.order.principal,
            job,
            broker: opened.map(|opened| &opened.link),
            prepared: self.order.prepare.then_some(self.admitted),
            tell: self.attendance.tell,
        }
    }

    /// Has the pool carry it out, and once more where its worker was lost before it had
    /// begun it.
    pub(super) fn carried_out(
        &self,
        job: &Job,
        opened: Option<Opened>,
    ) -> Result<Carried, Refused> {
        let patience = self.patience(WORKER_GRACE);
        let done = self.pool.carry_out(&self.task(job, opened.as_ref()), patience);
        let (Err(Unserved::Handed { failure, vm }), Some(first)) = (&done, &opened) else {
            return Ok(Carried { done, opened, called: None });
        };
        match after_loss(failure, || first.broker.cancel_run(self.run_id)) {
            AfterLoss::Again => {
                // The broker's clock for it ends with ours.
                let (granted, again) = self.opened_for(self.clock.left_ms())?;
                let start = Start { granted, ..job.start.clone() };
                let job = Job { start, ..job.clone() };
                let task = self.task(&job, again.as_ref());
                let done = self.pool.carry_out_afresh(&task, patience);
                Ok(Carried { done, opened: again.or(opened), called: None })
            }
            AfterLoss::Over { failure, calls } => {
                let done = Err(Unserved::Ended { fate: Fate::Vm(failure), vm: Some(*vm) });
                Ok(Carried { done, opened, called: Some(calls) })
            }
        }
    }

    /// What is told of it, once the broker has what it called on the disk.
    pub(super) fn concluded(&self, carried: Carried, at: &mut Supervised) -> RunResult {
        let Carried { done, opened, called } = carried;
        let opened = opened.as_ref();
        let (report, vm, upkeep, settled) = match done {
            Ok(Done { report, vm, served, taken, handed, reported, upkeep }) => {
                *at = Supervised { taken, handed, reported, ..*at };
                let (report, settled) = match opened {
                    None => (report, Settled::Known),
                    Some(opened) => self.settled(report, &served, opened),
                };
                (report, Some(vm), Some(upkeep), settled)
            }
            // Cancelled, or its worker was lost or had to be ended: what it
            // called, the broker knows alone.
            Err(unserved) => {
                let (fate, vm) = unserved.told();
                let mut report = worker::unserved(fate);
                let settled = opened.map_or(Settled::Known, |opened| {
                    // Its tools hear of it. A broker that is lost tells nobody.
                    let called = called.unwrap_or_else(|| opened.broker.cancel_run(self.run_id));
                    opened.settle_cancelled(called, &mut report.calls)
                });
                (report, vm, None, settled)
            }
        };
        let place = Place { tier: self.tier, vm, weaknesses: &self.pool.weaknesses() };
        let outcome = Outcome::of_fate(&report.fate, self.order.limits.wall_ms, place.tier);
        let mut result = reported(self.run_id, self.admitted, outcome, report, place, *at);
        result.upkeep = upkeep;
        match settled {
            Settled::Known => result,
            Settled::Unsynced(error) => held_back(result, &error),
            Settled::Untold(error) => {
                let reason = &mut result.report.reason;
                *reason = format!("{reason}; what it called is not known here: {error}");
                result
            }
        }
    }

    /// What of its worker's report the broker bears out.
    fn settled(&self, mut report: Report, served: &Served, opened: &Opened) -> (Report, Settled) {
        // What the host lacked is told as of a run that may be asked for again, unless it
        // has called: that is for whoever took the calls to say.
        if let Fate::Vm(failure) = &report.fate
            && failure.kind == VmFailureKind::Unavailable
            && opened.grants_any
        {
            let called = opened.broker.cancel_run(self.run_id);
            if called.is_err() {
                let message = failure.message.clone();
                report.fate = Fate::Vm(VmFailure::new(VmFailureKind::BrokerLost, message));
            }
            let settled = opened.settle_cancelled(called, &mut report.calls);
            return (report, settled);
        }
        let is_whole = matches!(report.fate, Fate::Ended(_));
        match opened.settle(is_whole, self.patience(SYNC_GRACE)) {
            Ok(None) => (report, Settled::Known),
            Ok(Some(BrokenLink { reason, calls })) => {
                tracing::error!(
                    run = %self.run_id,
                    reason,
                    "a worker broke its link to the toolbroker, and is ended"
                );
                served.end();
                let mut report = worker::unserved(Fate::Vm(misbehaved(reason)));
                let settled = opened.settle_cancelled(Ok(calls), &mut report.calls);
                (report, settled)
            }
            Err(error) => (report, Settled::Unsynced(error)),
        }
    }
}
