//! The way of one run, from program bytes to report:
//!
//! 1. admission: sizes, signature, declarations;
//! 2. the broker opens the run and says what its grant allows;
//! 3. the imports are held against that;
//! 4. a worker from the pool carries it out in its VM;
//! 5. the report.
//!
//! Whatever is refused is refused before a VM is made. `opened` is a run at its broker,
//! `result` what is told of it.

mod opened;
mod result;

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forge_protocol::RunId;
use forge_protocol::broker::{Authority, OpenRun, RefusalKind, Reply, Request};
use forge_protocol::guest::{Load, Start};
use forge_protocol::limits::{OverLimit, RunLimits};
use forge_protocol::name::ToolName;
use forge_protocol::service::{Order, RunEvent};
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::{Fate, Job, Tier};
use serde::de::IgnoredAny;

pub use self::result::RunResult;

use self::opened::{AfterLoss, Opened, SYNC_GRACE, Settled, after_loss};
use self::result::{Place, Refused, held_back, reported, unstarted};
use crate::admission::{Admission, Admitted};
use crate::broker::{Broker, BrokerError};
use crate::cancel::Cancel;
use crate::keeper::{BrokerStanding, Keeper};
use crate::link::Patience;
use crate::machine::deadline_in;
use crate::pool::worker::Tell;
use crate::pool::{Done, Pool, PoolOptions, Task, Unserved, Vm};
use crate::report::{Outcome, Status};
use crate::trace::{Supervised, now_ns};
use crate::worker;

/// How much longer than its deadline a worker may take to say so.
const WORKER_GRACE: Duration = Duration::from_secs(2);
/// How often it is looked whether runs in an engine of former keys are over.
const UNDER_WAY_LOOK_EVERY: Duration = Duration::from_millis(100);

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
    /// end as they would have; where the keys are others, new ones get new VMs.
    ///
    /// # Errors
    /// If the host has no thread left for a pool. Nothing changed then.
    pub fn trust(&self, trust: TrustKeys) -> io::Result<()> {
        if self.engine().admission.trust().as_slice() == trust.as_slice() {
            return Ok(());
        }
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

#[cfg(test)]
mod tests {
    use super::*;

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
