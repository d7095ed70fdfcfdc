//! The way of one run, from program bytes to report:
//!
//! 1. admission: sizes, signature, declarations;
//! 2. the broker opens the run and says what its grant allows;
//! 3. the imports are held against that;
//! 4. a worker from the pool carries it out in its VM;
//! 5. the report.
//!
//! Whatever is refused is refused before a VM is made. `carrying` is a run from the
//! broker on, `opened` what the broker has of it, `result` what is told of it.

mod carrying;
mod opened;
mod result;

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use forge_protocol::RunId;
use forge_protocol::broker::{RefusalKind, Reply, Request};
use forge_protocol::ending::{Lack, RunEnd};
use forge_protocol::limits::{OverLimit, RunLimits};
use forge_protocol::name::ToolName;
use forge_protocol::service::{Order, RunEvent};
use forge_protocol::signature::TrustKeys;
use forge_protocol::worker::Tier;
use serde::de::IgnoredAny;

pub use self::result::RunResult;

use self::carrying::{Carrying, Clock};
use self::result::{Refused, unstarted};
use crate::admission::{Admission, Admitted};
use crate::broker::{Broker, BrokerError};
use crate::cancel::Cancel;
use crate::keeper::{BrokerStanding, Keeper};
use crate::link::Patience;
use crate::locks::lock;
use crate::pool::worker::Tell;
use crate::pool::{Killer, Pool, PoolOptions};
use crate::report::Outcome;
use crate::trace::{Supervised, now_ns};

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
    pools: Mutex<Vec<Killer>>,
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
        let pools = Mutex::new(vec![first.pool.killer()]);
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
            let mut pools = lock(&self.pools);
            pools.retain(Killer::has_any);
            pools.push(engine.pool.killer());
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
        lock(&self.pools).iter().for_each(Killer::kill);
    }

    /// Has the broker end, as [`Keeper::end_within`] says. No run that may call anything
    /// is carried out any more.
    pub fn end_broker(&self, time: Duration, waits: impl Fn() -> bool) -> bool {
        self.broker.as_ref().is_none_or(|keeper| keeper.end_within(time, waits))
    }

    /// Carries out one run. However it ends, there is a report.
    pub fn run(&self, order: &Order) -> RunResult {
        let result = self.run_for(order, &Attendance::default());
        result.report.log(&order.principal);
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
    pub fn run_for(&self, order: &Order, attendance: &Attendance<'_>) -> RunResult {
        let tier = self.tier();
        if attendance.cancel.is_some_and(Cancel::is_raised) {
            let reason = "the run was cancelled before it began";
            return RunResult::unstarted(tier, RunEnd::Cancelled, reason);
        }
        let mut at = Supervised { started: now_ns(), ..Supervised::default() };
        let run_id = match crate::keys::random() {
            Ok(bytes) => RunId(bytes),
            Err(error) => {
                let outcome = Outcome::new(RunEnd::Unavailable(Lack::Host), error.to_string());
                return unstarted(RunId([0; 16]), tier, None, outcome, at);
            }
        };
        let engine = self.engine();
        let admitted = match self.admit(&engine.admission, order) {
            Ok(admitted) => admitted,
            Err(refused) => return refused.result(run_id, tier, None, at),
        };
        at.admitted = now_ns();
        match self.carry_out(&engine.pool, run_id, order, &admitted, attendance, &mut at) {
            Ok(result) => result,
            Err(refused) => refused.result(run_id, tier, Some(&admitted), at),
        }
    }

    fn admit(&self, admission: &Admission, order: &Order) -> Result<Arc<Admitted>, Refused> {
        order.limits.within(&self.maxima).map_err(Refused::Over)?;
        let input_bytes = order.input.len() as u64;
        let limit = order.limits.input_bytes.into();
        if input_bytes > limit {
            return Err(Refused::Over(OverLimit { what: "input_bytes", got: input_bytes, limit }));
        }
        json(&order.input).map_err(Refused::Input)?;
        admission
            .admit(&order.program, &order.limits)
            .map_err(|violation| Refused::Violations(vec![violation]))
    }

    fn carry_out(
        &self,
        pool: &Pool,
        run_id: RunId,
        order: &Order,
        admitted: &Admitted,
        attendance: &Attendance<'_>,
        at: &mut Supervised,
    ) -> Result<RunResult, Refused> {
        // What is wrong whatever is granted is said before anybody is asked.
        let named: Vec<ToolName> = admitted.shape.tools().cloned().collect();
        let violations = admitted.shape.violations(&named, &order.limits);
        if !violations.is_empty() {
            return Err(Refused::Violations(violations));
        }
        // If it cannot be, the run says so.
        let _ = pool.stand_by(Patience { until: None, cancel: attendance.cancel });
        let carrying = Carrying {
            pool,
            broker: self.broker.as_ref(),
            tier: self.tier(),
            run_id,
            order,
            admitted,
            attendance,
            clock: Clock::start(order.limits.wall_ms),
        };
        let (granted, opened) = carrying.opened()?;
        at.opened = now_ns();
        if let Some(tell) = attendance.tell {
            tell(RunEvent::Admitted { run_id });
        }
        let job = carrying.job(granted, opened.is_some())?;
        let carried = carrying.carried_out(&job, opened)?;
        Ok(carrying.concluded(carried, at))
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
