//! The way of one run, from program bytes to report:
//!
//! 1. admission: sizes, signature, declarations;
//! 2. the broker opens the run and says what its grant allows;
//! 3. the imports are held against that;
//! 4. a worker from the pool carries it out in its VM;
//! 5. the report.
//!
//! Whatever is refused is refused before a VM is made.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forge_protocol::RunId;
use forge_protocol::broker::{Authority, OpenRun, RefusalKind, Reply, Request};
use forge_protocol::guest::{Load, Start};
use forge_protocol::hex::hex;
use forge_protocol::limits::{OverLimit, RunLimits};
use forge_protocol::name::ToolName;
use forge_protocol::run::{Artifact, CallRecord};
use forge_protocol::service::{Order, RunEvent};
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::{Fate, Job, Report, Tier, Timing, VmFailure};
use serde::de::IgnoredAny;

use crate::admission::{Admission, Admitted, Violation};
use crate::broker::{Broker, BrokerError};
use crate::cancel::Cancel;
use crate::jail::Weakness;
use crate::keeper::{BrokerStanding, Keeper};
use crate::link::Patience;
use crate::machine::deadline_in;
use crate::pool::worker::{Tell, misbehaved};
use crate::pool::{Done, Pool, PoolOptions, Task, Unserved, Upkeep, Vm};
use crate::report::{
    LogReport, Outcome, RunReport, Status, TimingReport, artifact_report, call_report,
    encode_output,
};
use crate::trace::{Supervised, Trace, now_ns};
use crate::worker;

/// Violations of one program that are told one by one.
const VIOLATIONS_TOLD: usize = 16;
/// How much longer than its deadline a worker may take to say so.
const WORKER_GRACE: Duration = Duration::from_secs(2);
/// How much longer than its deadline a run may wait for what its calls did to be
/// on the disk.
const SYNC_GRACE: Duration = Duration::from_secs(10);
/// How often it is looked whether runs in an engine of former keys are over.
const UNDER_WAY_LOOK_EVERY: Duration = Duration::from_millis(100);

/// A run's report and the artifacts it left.
#[derive(Debug)]
pub struct RunResult {
    /// The report.
    pub report: RunReport,
    /// The artifacts, in the order of the report's list.
    pub artifacts: Vec<Artifact>,
    /// Where the time went.
    pub trace: Trace,
    /// What the run's pool has to do, once whoever waits has the rest of this.
    pub upkeep: Option<Upkeep>,
}

impl RunResult {
    /// A run that was not begun, and would have been carried out in this tier.
    #[must_use]
    pub fn unstarted(
        tier: Tier,
        status: Status,
        kind: &'static str,
        reason: impl Into<String>,
    ) -> Self {
        let at = Supervised { started: now_ns(), ..Supervised::default() };
        let run_id = RunId(crate::keys::random().unwrap_or_default());
        unstarted(run_id, tier, None, Outcome::new(status, kind, reason), at)
    }

    /// One that there was no room for, and when there may be.
    #[must_use]
    pub fn refused(
        tier: Tier,
        kind: &'static str,
        reason: impl Into<String>,
        retry_after_ms: Option<u64>,
    ) -> Self {
        let mut result = Self::unstarted(tier, Status::Refused, kind, reason);
        result.report.retry_after_ms = retry_after_ms;
        result
    }
}

/// What a supervisor goes by.
#[derive(Debug)]
pub struct SupervisorOptions {
    /// The keys that programs are trusted by.
    pub trust: TrustKeys,
    /// The most that a run may ask for.
    pub maxima: RunLimits,
    /// How VMs are kept ready.
    pub pool: PoolOptions,
}

/// Who attends a run while it is carried out.
#[derive(Clone, Copy, Default)]
pub struct Attendance<'a> {
    /// Ends it when this is raised.
    pub cancel: Option<&'a Cancel>,
    /// Hears what happens as it happens, in the thread that waits for the run.
    pub tell: Option<Tell<'a>>,
    /// Takes the connection on which calls of the tools come that the order
    /// hosts.
    pub host: Option<&'a dyn Fn(UnixStream)>,
}

/// Runs programs, any number at a time.
#[derive(Debug)]
pub struct Supervisor {
    maxima: RunLimits,
    broker: Option<Keeper>,
    options: PoolOptions,
    engine: RwLock<Arc<Engine>>,
    /// Of the engine and of former ones, as long as runs are under way there.
    pools: Mutex<Vec<Weak<Pool>>>,
}

/// What hangs on the keys that are trusted: they are in every VM, too.
#[derive(Debug)]
struct Engine {
    admission: Admission,
    pool: Arc<Pool>,
}

impl Engine {
    fn new(trust: TrustKeys, pool: Pool) -> Arc<Self> {
        // Who keeps VMs ready expects many programs.
        let trust = if pool.stands().ready_max > 0 { trust.with_tables() } else { trust };
        Arc::new(Self { admission: Admission::new(trust), pool: Arc::new(pool) })
    }
}

/// Why a run is refused before it has a VM.
enum Refused {
    Violations(Vec<Violation>),
    Broker(BrokerError),
    Over(OverLimit),
    Input(String),
    Host(io::Error),
}

/// Whether a run's input is JSON. It is looked at and not read.
fn json(input: &[u8]) -> Result<(), String> {
    // What is skipped is not looked at as text.
    let text = std::str::from_utf8(input).map_err(|error| error.to_string())?;
    serde_json::from_str(text).map(|IgnoredAny| ()).map_err(|error| error.to_string())
}

impl Supervisor {
    /// A supervisor that sends tool calls to this broker, and to its successor
    /// if it is lost. Without one, no program can call a tool.
    ///
    /// # Errors
    /// If the host has no thread left.
    pub fn new(options: SupervisorOptions, broker: Option<Broker>) -> io::Result<Self> {
        let SupervisorOptions { trust, maxima, pool } = options;
        let first = Engine::new(trust.clone(), Pool::new(&trust, pool)?);
        let broker = broker.map(Keeper::of).transpose()?;
        let pools = Mutex::new(vec![Arc::downgrade(&first.pool)]);
        Ok(Self { maxima, broker, options: pool, engine: RwLock::new(first), pools })
    }

    /// Trusts these keys from now on and no others. Runs that are under way
    /// end as they would have; new ones get new VMs.
    ///
    /// # Errors
    /// If the host has no thread left for a pool. Nothing changed then.
    pub fn trust(&self, trust: TrustKeys) -> io::Result<()> {
        let pool = self.pool().successor(&trust)?;
        let engine = Engine::new(trust, pool);
        {
            let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
            pools.retain(|pool| pool.strong_count() > 0);
            pools.push(Arc::downgrade(&engine.pool));
        }
        let old = {
            let mut place = self.engine.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *place, engine)
        };
        // Its end waits for what its pool is at, which may take a minute, and the
        // caller has others to listen to. So has whoever waits for the last run
        // that is under way in it.
        let old_pool = std::thread::Builder::new().name("old-pool".into());
        let end = move || {
            while Arc::strong_count(&old) > 1 {
                std::thread::sleep(UNDER_WAY_LOOK_EVERY);
            }
            drop(old);
        };
        // Where there is no thread for that, it ends here and now, or with the
        // last of those runs.
        let _ = old_pool.spawn(end);
        Ok(())
    }

    fn engine(&self) -> Arc<Engine> {
        Arc::clone(&self.engine.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// What runs are carried out in.
    #[must_use]
    pub fn tier(&self) -> Tier {
        self.options.tier
    }

    /// The VMs that stand ready.
    #[must_use]
    pub fn pool(&self) -> Arc<Pool> {
        Arc::clone(&self.engine().pool)
    }

    /// Ends all workers and zygotes, those of former keys too: for who is about to
    /// end, whatever still waits for them.
    pub fn kill(&self) {
        let pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.iter().filter_map(Weak::upgrade).for_each(|pool| pool.kill());
    }

    /// Carries out one run. However it ends, there is a report.
    pub fn run(&self, request: &Order) -> RunResult {
        let result = self.run_for(request, &Attendance::default());
        result.report.log(&request.principal);
        result
    }

    /// Asks the broker, and waits for its answer for as long as there is
    /// patience, and a minute at most.
    ///
    /// # Errors
    /// [`BrokerError`]; a refusal is one, and that there is no broker.
    pub fn ask(&self, request: &Request, patience: Patience<'_>) -> Result<Reply, BrokerError> {
        match &self.broker {
            Some(keeper) => {
                let asked = keeper.with(patience, |broker| broker.ask_for(request, patience));
                asked.map(|(reply, _)| reply)
            }
            None => Err(BrokerError::Refused {
                kind: RefusalKind::BadRequest,
                message: "there is no toolbroker here: no tool can be asked for".into(),
            }),
        }
    }

    /// What the broker counts, in Prometheus' text exposition format.
    ///
    /// # Errors
    /// [`BrokerError`].
    pub fn metrics(&self, patience: Patience<'_>) -> Result<String, BrokerError> {
        let Some(keeper) = &self.broker else { return Ok(String::new()) };
        keeper.with(patience, |broker| broker.metrics(patience)).map(|(text, _)| text)
    }

    /// How the broker stands, if there is to be one.
    #[must_use]
    pub fn broker(&self) -> Option<BrokerStanding> {
        self.broker.as_ref().map(Keeper::standing)
    }

    /// The same as [`Self::run`] for somebody who attends the run. That it ended
    /// is theirs to log.
    pub fn run_for(&self, request: &Order, attendance: &Attendance<'_>) -> RunResult {
        let tier = self.tier();
        if attendance.cancel.is_some_and(Cancel::is_raised) {
            let reason = "the run was cancelled before it began";
            return RunResult::unstarted(tier, Status::Cancelled, "cancelled", reason);
        }
        let mut at = Supervised { started: now_ns(), ..Supervised::default() };
        let run_id = match crate::keys::random() {
            Ok(bytes) => RunId(bytes),
            Err(error) => {
                let outcome = Outcome::new(Status::Unavailable, "host", error.to_string());
                return unstarted(RunId([0; 16]), tier, None, outcome, at);
            }
        };
        let engine = self.engine();
        let admitted = match self.admit(&engine.admission, request) {
            Ok(admitted) => admitted,
            Err(refused) => return refused.result(run_id, tier, None, at),
        };
        at.admitted = now_ns();
        match self.carry_out(&engine.pool, run_id, request, &admitted, attendance, &mut at) {
            Ok(result) => result,
            Err(refused) => refused.result(run_id, tier, Some(&admitted), at),
        }
    }

    fn admit(&self, admission: &Admission, request: &Order) -> Result<Arc<Admitted>, Refused> {
        request.limits.within(&self.maxima).map_err(Refused::Over)?;
        let input_bytes = request.input.len() as u64;
        let limit = request.limits.input_bytes.into();
        if input_bytes > limit {
            return Err(Refused::Over(OverLimit { what: "input_bytes", got: input_bytes, limit }));
        }
        json(&request.input).map_err(Refused::Input)?;
        admission
            .admit(&request.program, &request.limits)
            .map_err(|violation| Refused::Violations(vec![violation]))
    }

    fn carry_out(
        &self,
        pool: &Pool,
        run_id: RunId,
        request: &Order,
        admitted: &Admitted,
        attendance: &Attendance<'_>,
        at: &mut Supervised,
    ) -> Result<RunResult, Refused> {
        // What is wrong whatever is granted is said before anybody is asked.
        let named: Vec<ToolName> = admitted.shape.tools().cloned().collect();
        let violations = admitted.shape.violations(&named, &request.limits);
        if !violations.is_empty() {
            return Err(Refused::Violations(violations));
        }
        // If it cannot be, the run says so.
        let _ = pool.stand_by(Patience { until: None, cancel: attendance.cancel });
        // From here on the run's clock goes, for everybody: the broker counts
        // from the moment at which it is asked to open the run.
        let wall = Duration::from_millis(request.limits.wall_ms);
        let (began, deadline) = (Instant::now(), deadline_in(wall));
        let until = began.checked_add(wall);
        let patience = Patience { until, cancel: attendance.cancel };
        let open = |wall_ms: u64| {
            let limits = RunLimits { wall_ms, ..request.limits.clone() };
            let (granted, opened) =
                self.open(run_id, request, limits, admitted, attendance.host, patience)?;
            let violations = admitted.shape.violations(&granted, &request.limits);
            match violations.is_empty() {
                true => Ok((granted, opened)),
                false => Err(Refused::Violations(violations)),
            }
        };
        let (granted, opened) = open(request.limits.wall_ms)?;
        at.opened = now_ns();
        if let Some(tell) = attendance.tell {
            tell(RunEvent::Admitted { run_id });
        }
        let start_unix_ns = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX));
        let job = Job {
            load: Load { limits: request.limits.clone(), announce: false },
            start: Start {
                run_id,
                seed: crate::keys::random().map_err(Refused::Host)?,
                start_unix_ns,
                granted,
            },
            program: request.program.clone(),
            input: request.input.clone(),
            deadline,
            brokered: opened.is_some(),
        };
        let task = Task {
            tenant: &request.principal,
            job: &job,
            broker: opened.as_ref().map(|opened| &opened.link),
            prepared: request.prepare.then_some(admitted),
            tell: attendance.tell,
        };
        let after = |grace| until.and_then(|until| until.checked_add(grace));
        let patience = Patience { until: after(WORKER_GRACE), ..patience };
        let mut carried_out = pool.carry_out(&task, patience);
        let (mut cancelled, mut reopened) = (None, None);
        if let (Err(Unserved::Handed(failure)), Some(opened)) = (&carried_out, &opened) {
            match after_loss(failure, || opened.broker.cancel_run(run_id)) {
                AfterLoss::Again => {
                    // The broker's clock for it ends with ours.
                    let left =
                        until.map_or(wall, |it| it.saturating_duration_since(Instant::now()));
                    let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
                    let (granted, again) = open(left_ms.max(1))?;
                    let start = Start { granted, ..job.start.clone() };
                    let job = Job { start, ..job.clone() };
                    let broker = again.as_ref().map(|again| &again.link);
                    let task = Task { job: &job, broker, ..task };
                    carried_out = pool.carry_out_afresh(&task, patience);
                    reopened = again;
                }
                AfterLoss::Over { failure, calls } => {
                    carried_out = Err(Unserved::Ended(Fate::Vm(failure)));
                    cancelled = Some(calls);
                }
            }
        }
        let at_broker = reopened.as_ref().or(opened.as_ref());
        let (report, vm, upkeep, settled) = match carried_out {
            Ok(Done { report, vm, taken, handed, reported, upkeep }) => {
                *at = Supervised { taken, handed, reported, ..*at };
                let patience = Patience { until: after(SYNC_GRACE), ..patience };
                let settled = at_broker.map_or(Settled::Known, |opened| opened.settle(patience));
                (report, vm, Some(upkeep), settled)
            }
            // Cancelled, or its worker was lost or had to be ended: what it
            // called, the broker knows alone.
            Err(unserved) => {
                let mut report = worker::unserved(unserved.into());
                let settled = at_broker.map_or(Settled::Known, |opened| {
                    // Its tools hear of it. A broker that is lost tells nobody.
                    let called = cancelled.unwrap_or_else(|| opened.broker.cancel_run(run_id));
                    opened.settle_cancelled(called, &mut report.calls)
                });
                (report, Vm::Fresh, None, settled)
            }
        };
        drop((reopened, opened));
        let place = Place { tier: self.tier(), vm, weaknesses: &pool.weaknesses() };
        let outcome = Outcome::of_fate(&report.fate, request.limits.wall_ms, place.tier);
        let mut result = reported(run_id, admitted, outcome, report, place, *at);
        result.upkeep = upkeep;
        Ok(match settled {
            Settled::Known => result,
            Settled::Unsynced(error) => held_back(result, &error),
            Settled::Untold(error) => {
                let reason = &mut result.report.reason;
                *reason = format!("{reason}; what it called is not known here: {error}");
                result
            }
        })
    }

    /// Opens the run at the broker. A program that can call nothing, and is
    /// granted nothing, needs none.
    fn open(
        &self,
        run_id: RunId,
        request: &Order,
        limits: RunLimits,
        admitted: &Admitted,
        hosting: Option<&dyn Fn(UnixStream)>,
        patience: Patience<'_>,
    ) -> Result<(Vec<ToolName>, Option<Opened>), Refused> {
        if request.authority == Authority::Tools(Vec::new()) && request.hosted.is_none() {
            return Ok((Vec::new(), None));
        }
        let Some(keeper) = &self.broker else {
            return Ok((Vec::new(), None));
        };
        let open = OpenRun {
            run_id,
            principal: request.principal.clone(),
            session: request.session.clone(),
            program_sha256: admitted.sha256,
            authority: request.authority.clone(),
            limits,
        };
        // A broker that is lost over it has dispatched nothing of the run.
        let opened = keeper.with(patience, |broker| {
            let host = match (&request.hosted, hosting) {
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
        Ok((granted, Some(Opened { broker, link, grants_any })))
    }
}

/// A run's connection at the broker that opened it. What the run did is that
/// one's to know, whichever is there by then.
struct Opened {
    broker: Arc<Broker>,
    link: UnixStream,
    /// Whether anything may be called over the link.
    grants_any: bool,
}

/// What is known, at a run's end, of what its calls did.
enum Settled {
    /// All: it is on the disk, or nobody was to wait until it is.
    Known,
    /// It may not be on the disk, and a result is not told before it is.
    Unsynced(BrokerError),
    /// Not even what it called.
    Untold(BrokerError),
}

impl Opened {
    /// Ends a run that has a result.
    fn settle(&self, patience: Patience<'_>) -> Settled {
        // That nothing was called, only its worker says. Whoever wants the run no
        // more has heard of no result yet.
        let synced = self.end(self.grants_any, patience);
        synced.map_or_else(Settled::Unsynced, |()| Settled::Known)
    }

    /// Ends a run that was cancelled at the broker, which tells its calls.
    fn settle_cancelled(
        &self,
        told: Result<Vec<CallRecord>, BrokerError>,
        calls: &mut Vec<CallRecord>,
    ) -> Settled {
        let untold = match told {
            Ok(told) => {
                *calls = told;
                None
            }
            Err(error) => {
                tracing::warn!(%error, "the calls of a run that ended go on");
                Some(error)
            }
        };
        // It has no result that could be held back, and is waited for all the same.
        let patience = Patience::until(Instant::now() + SYNC_GRACE);
        if let Err(error) = self.end(!calls.is_empty(), patience) {
            tracing::warn!(%error, "what a run's calls did may not be on the disk");
        }
        untold.map_or(Settled::Known, Settled::Untold)
    }

    /// What its calls did is on the disk before anybody hears of it. The broker
    /// answers at once if all of it is; a run that cannot have called asks nobody.
    fn end(&self, may_have_called: bool, patience: Patience<'_>) -> Result<(), BrokerError> {
        let synced = if may_have_called { self.broker.sync_for(patience) } else { Ok(()) };
        // The run is over, whoever still has this end of its link: a worker that
        // was taken over has. What was called before is read yet.
        let _ = self.link.shutdown(Shutdown::Write);
        synced
    }
}

/// What becomes of a run whose worker was lost with its link to the broker, and seems
/// not to have begun it.
#[derive(Debug)]
enum AfterLoss {
    /// Another worker may have it, over a link of its own.
    Again,
    /// It ends, with these calls.
    Over { failure: VmFailure, calls: Result<Vec<CallRecord>, BrokerError> },
}

/// Cancels it at the broker, which so tells what it called until then.
fn after_loss(
    failure: &VmFailure,
    cancel: impl Fn() -> Result<Vec<CallRecord>, BrokerError>,
) -> AfterLoss {
    // A call that is taken while the first answer is made up is in the second, and
    // from then on none is. A broker that knows no such run refuses: whoever broke its
    // link may have called before.
    let calls = cancel().and_then(|calls| if calls.is_empty() { cancel() } else { Ok(calls) });
    let failure = match &calls {
        Ok(calls) if calls.is_empty() => return AfterLoss::Again,
        Ok(_) => misbehaved(format_args!(
            "that a run had not begun which has called: {}",
            failure.message
        )),
        Err(_) => failure.clone(),
    };
    AfterLoss::Over { failure, calls }
}

impl Refused {
    fn result(
        self,
        run_id: RunId,
        tier: Tier,
        admitted: Option<&Admitted>,
        at: Supervised,
    ) -> RunResult {
        let retry_after_ms = match &self {
            Self::Broker(BrokerError::Away { retry_after_ms, .. }) => Some(*retry_after_ms),
            _ => None,
        };
        let mut result = unstarted(run_id, tier, admitted, self.into(), at);
        result.report.retry_after_ms = retry_after_ms;
        result
    }
}

impl From<Refused> for Outcome {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Violations(violations) => {
                let kind = violations.first().map_or("invalid", |v| v.kind.as_str());
                let more = violations.len().saturating_sub(VIOLATIONS_TOLD);
                let mut messages: Vec<_> =
                    violations.into_iter().take(VIOLATIONS_TOLD).map(|v| v.message).collect();
                if more > 0 {
                    messages.push(format!("and {more} more"));
                }
                Self::new(Status::Rejected, kind, messages.join("; "))
            }
            Refused::Input(why) => {
                Self::new(Status::Rejected, "bad_request", format!("the input is not JSON: {why}"))
            }
            Refused::Over(over) => Self::new(Status::Rejected, "too_large", over.to_string()),
            Refused::Broker(error) => {
                let (status, kind) = match &error {
                    BrokerError::Refused { kind, .. } => match kind {
                        RefusalKind::NoSuchTool => (Status::Rejected, "no_such_tool"),
                        RefusalKind::BadGrant => (Status::Rejected, "grant"),
                        RefusalKind::BadRequest => (Status::Rejected, "bad_request"),
                        RefusalKind::Forbidden => (Status::Rejected, "forbidden"),
                        RefusalKind::NotReviewed => (Status::Rejected, "not_reviewed"),
                        RefusalKind::Internal => (Status::Internal, "broker"),
                        RefusalKind::Journal => (Status::Internal, "journal"),
                        RefusalKind::Overloaded => (Status::Refused, "overloaded"),
                    },
                    BrokerError::Away { .. } => (Status::Refused, "broker_away"),
                    BrokerError::Cancelled => (Status::Cancelled, "cancelled"),
                    BrokerError::NoLink(_) => (Status::Unavailable, "host"),
                    BrokerError::OutOfTime => (Status::Limit, "deadline"),
                    error if error.ends_the_link() => (Status::Internal, "broker_lost"),
                    _ => (Status::Internal, "broker"),
                };
                Self::new(status, kind, error.to_string())
            }
            Refused::Host(error) => Self::new(Status::Unavailable, "host", error.to_string()),
        }
    }
}

/// Withholds the result of a run whose calls may not be on the disk. Only events that
/// were already sent stand; the list of calls stays only if the broker was lost, since
/// its journal has them.
fn held_back(result: RunResult, error: &BrokerError) -> RunResult {
    let RunResult { mut report, trace, upkeep, .. } = result;
    let (status, kind) = match error {
        BrokerError::Cancelled => (Status::Cancelled, "cancelled"),
        error if error.ends_the_link() => (Status::Internal, "broker_lost"),
        _ => (Status::Internal, "journal"),
    };
    if kind != "broker_lost" {
        report.tool_calls.clear();
    }
    report.status = status;
    report.kind = kind;
    report.reason = format!(
        "the run may have made calls, and its result is held back, since what they did may not \
         be on the disk yet; `forge-vmm journal list --run {}` has what is: {error}",
        report.run_id
    );
    (report.output, report.output_encoding) = encode_output(&[]);
    report.artifacts.clear();
    report.log.clear();
    RunResult { report, artifacts: Vec::new(), trace, upkeep }
}

fn us_since(since_ns: u64) -> u64 {
    now_ns().saturating_sub(since_ns) / 1000
}

/// The report of a run that no VM was made for.
fn unstarted(
    run_id: RunId,
    tier: Tier,
    admitted: Option<&Admitted>,
    outcome: Outcome,
    at: Supervised,
) -> RunResult {
    let total = us_since(at.started);
    let timing_us = TimingReport { admission: total, total, ..TimingReport::default() };
    let (output, output_encoding) = encode_output(&[]);
    let report = RunReport {
        run_id: run_id.to_string(),
        status: outcome.status,
        kind: outcome.kind,
        reason: outcome.reason,
        retry_after_ms: None,
        output,
        output_encoding,
        artifacts: Vec::new(),
        log: Vec::new(),
        log_dropped: 0,
        isolation: tier.as_str(),
        weaknesses: Vec::new(),
        vm: "none",
        program_sha256: admitted.map(|admitted| hex(&admitted.sha256)),
        signer: admitted.map(|admitted| admitted.signer.to_string()),
        retrieved: Vec::new(),
        tool_calls: Vec::new(),
        fuel_used: 0,
        memory_peak_bytes: 0,
        vm_exits: 0,
        timing_us,
    };
    let trace = Trace { supervised: at, timing: Timing::default() };
    RunResult { report, artifacts: Vec::new(), trace, upkeep: None }
}

/// What a run was carried out in.
struct Place<'a> {
    tier: Tier,
    vm: Vm,
    weaknesses: &'a [Weakness],
}

/// The report of a run that a worker was given.
fn reported(
    run_id: RunId,
    admitted: &Admitted,
    outcome: Outcome,
    report: Report,
    place: Place<'_>,
    at: Supervised,
) -> RunResult {
    // Only a guest that told its end has told these.
    let (fuel_used, memory_peak_bytes, log_dropped) = match &report.fate {
        Fate::Ended(ended) => (ended.fuel_used, ended.memory_peak_bytes, ended.logs_dropped),
        Fate::Deadline | Fate::Vm(_) => (0, 0, 0),
    };
    let timing: Timing = report.timing;
    let timing_us = TimingReport {
        admission: at.opened.saturating_sub(at.started) / 1000,
        total: us_since(at.started),
        ..TimingReport::of_worker(timing)
    };
    let (output, output_encoding) = encode_output(&report.output);
    let public = RunReport {
        run_id: run_id.to_string(),
        status: outcome.status,
        kind: outcome.kind,
        reason: outcome.reason,
        retry_after_ms: None,
        output,
        output_encoding,
        artifacts: report.artifacts.iter().map(artifact_report).collect(),
        log: report
            .logs
            .iter()
            .map(|log| LogReport { level: log.level, text: log.text.clone() })
            .collect(),
        log_dropped,
        isolation: place.tier.as_str(),
        weaknesses: place.weaknesses.iter().map(|weakness| weakness.word()).collect(),
        vm: place.vm.as_str(),
        program_sha256: Some(hex(&admitted.sha256)),
        signer: Some(admitted.signer.to_string()),
        retrieved: Vec::new(),
        tool_calls: report.calls.iter().map(call_report).collect(),
        fuel_used,
        memory_peak_bytes,
        vm_exits: report.vm_exits,
        timing_us,
    };
    let trace = Trace { supervised: at, timing };
    RunResult { report: public, artifacts: report.artifacts, trace, upkeep: None }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use forge_protocol::worker::VmFailureKind;

    use super::*;

    #[test]
    fn a_run_that_called_or_may_have_is_given_to_no_second_worker() {
        let lost = VmFailure::new(VmFailureKind::NotReset, "page 7 differs");
        let call = CallRecord { id: 0, tool: ToolName::parse("a.b").unwrap(), settled: None };
        let told = |answers: [Result<Vec<CallRecord>, BrokerError>; 2]| {
            let answers = RefCell::new(answers.into_iter());
            after_loss(&lost, || answers.borrow_mut().next().unwrap())
        };
        let none = || Ok(Vec::new());
        assert!(matches!(told([none(), none()]), AfterLoss::Again));
        // Also one that was taken while it was asked.
        for answers in [[Ok(vec![call.clone()]), none()], [none(), Ok(vec![call.clone()])]] {
            let AfterLoss::Over { failure, calls } = told(answers) else { panic!("again") };
            assert_eq!(
                (failure.kind, calls.unwrap()),
                (VmFailureKind::Misbehaved, vec![call.clone()])
            );
        }
        let gone = || Err(BrokerError::Lost(io::ErrorKind::UnexpectedEof.into()));
        let unknown = || {
            let (kind, message) = (RefusalKind::BadRequest, "no such run".into());
            Err(BrokerError::Refused { kind, message })
        };
        for answers in
            [[gone(), none()], [none(), gone()], [unknown(), none()], [none(), unknown()]]
        {
            let AfterLoss::Over { failure, calls } = told(answers) else { panic!("again") };
            assert!(failure == lost && calls.is_err());
        }
    }

    #[test]
    fn an_input_is_one_json_value_in_utf_8() {
        for input in ["{}", " null\n", "1e999", "\"\u{e9}\"", "[[[]]]"] {
            assert!(json(input.as_bytes()).is_ok(), "{input}");
        }
        for input in [&b""[..], b"{", b"1 2", b"\xff", b"\"\xff\"", b"nul", b"{}x"] {
            assert!(json(input).is_err(), "{input:?}");
        }
    }
}
