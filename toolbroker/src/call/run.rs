//! One run: what it may call, and what it has used.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use forge_protocol::RunId;
use forge_protocol::broker::{BrokenLink, Callable};
use forge_protocol::guest::Settled;
use forge_protocol::limits::{CALLS_MAX, REQUEST_BYTES_MAX, RESPONSE_BYTES_MAX, RunLimits};
use forge_protocol::name::ToolName;
use forge_protocol::run::{CallRecord, CallSettled};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::CallFailure;
use crate::budget::Budget;
use crate::builtin::Caller;
use crate::grant::Grant;
use crate::locks::lock;
use crate::upstream::Connection;
use crate::upstream::hosted::Hosted;

/// The run's own deadline is its worker's to keep, whose clock started just
/// before the run was opened here. This much behind it, the broker gives up
/// by itself.
const DEADLINE_LEAD: Duration = Duration::from_millis(500);
/// The longest wall clock reckoned with, so that no sum of times overflows.
const WALL_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// One run: what it may call, and what it has used. Known by the connection
/// it was opened for.
#[derive(Debug)]
pub struct Run {
    id: RunId,
    caller: Caller,
    program_sha256: [u8; 32],
    limits: RunLimits,
    /// What its program can call: after the rest of its grant nobody was asked.
    callable: Callable,
    budget: Budget,
    has_called: AtomicBool,
    is_closed: AtomicBool,
    leaves_calls: AtomicBool,
    /// `true` once it was ended before its program was.
    cut_off: watch::Sender<bool>,
    broken: OnceLock<String>,
    opened: Instant,
    deadline: Instant,
    /// Tools that the run's caller hosts itself.
    hosted: Option<Arc<Connection>>,
    /// `true` once nobody wants the run any more.
    cancelled: watch::Sender<bool>,
    /// Its calls, each at the place of its number.
    calls: Mutex<Vec<CallRecord>>,
}

impl Run {
    /// A run of a program, which can call these, under a verified grant. Its wall clock
    /// starts now.
    #[must_use]
    pub fn new(
        id: RunId,
        program_sha256: [u8; 32],
        callable: Callable,
        grant: Arc<Grant>,
        limits: RunLimits,
    ) -> Self {
        let claims = grant.claims();
        let calls_max = limits.calls.min(claims.calls_max.unwrap_or(u32::MAX)).min(CALLS_MAX);
        // Whoever asks for more than the protocol can carry gets that.
        let limits = RunLimits {
            request_bytes: limits.request_bytes.min(REQUEST_BYTES_MAX),
            response_bytes: limits.response_bytes.min(RESPONSE_BYTES_MAX),
            ..limits
        };
        let wall = Duration::from_millis(limits.wall_ms).min(WALL_MAX);
        let opened = Instant::now();
        let deadline = opened + wall + DEADLINE_LEAD;
        Self {
            id,
            caller: Caller {
                principal: claims.principal.as_str().into(),
                run: id,
                session: claims.session.as_deref().map(Arc::from),
                deadline,
                grant: Arc::clone(&grant),
            },
            program_sha256,
            limits,
            callable,
            budget: Budget::new(calls_max, claims.cost_max),
            has_called: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            leaves_calls: AtomicBool::new(false),
            cut_off: watch::Sender::new(false),
            broken: OnceLock::new(),
            opened,
            deadline,
            hosted: None,
            cancelled: watch::Sender::new(false),
            calls: Mutex::default(),
        }
    }

    /// The same run, whose wall clock starts then.
    #[must_use]
    pub fn asked_for_at(mut self, asked: Instant) -> Self {
        self.deadline -= self.opened.saturating_duration_since(asked);
        self.caller.deadline = self.deadline;
        self
    }

    /// The same run in this session, which a grant may leave open.
    #[must_use]
    pub fn in_session(mut self, session: Option<&str>) -> Self {
        if let Some(session) = session {
            self.caller.session = Some(session.into());
        }
        self
    }

    /// The definition that a tool was granted with, if the run may call it.
    #[must_use]
    pub fn pin(&self, tool: &ToolName) -> Option<[u8; 32]> {
        self.grant().pin(tool).filter(|_| self.callable.includes(tool))
    }

    /// The same run, whose caller hosts these tools itself. What may be
    /// called is the grant's to say, as ever.
    #[must_use]
    pub fn hosting(mut self, hosted: Hosted) -> Self {
        self.hosted = Some(Arc::new(Connection::Hosted(hosted)));
        self
    }

    /// Nobody wants it any more: what it has dispatched is waited for no
    /// longer.
    pub fn cancel(&self) {
        self.cancelled.send_replace(true);
    }

    /// Its program went to its end: what it called and did not wait for goes on.
    pub fn leave_calls(&self) {
        self.leaves_calls.store(true, Ordering::Release);
    }

    /// Whether it did.
    #[must_use]
    pub fn leaves_calls(&self) -> bool {
        self.leaves_calls.load(Ordering::Acquire)
    }

    /// It was ended before its program was: what is not dispatched yet never is. What is
    /// goes on, unless the run is cancelled too.
    pub fn cut_off(&self) {
        self.cut_off.send_replace(true);
    }

    /// Whether it was.
    #[must_use]
    pub fn is_cut_off(&self) -> bool {
        *self.cut_off.borrow()
    }

    /// Ends when it is.
    pub(super) async fn is_ended_early(&self) {
        turns_true(&self.cut_off).await;
    }

    /// What comes of what a call waits for before it is dispatched, as long as the run's
    /// time lasts: that of one that was cut off or cancelled is over.
    pub(super) async fn in_time<T>(&self, waits: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            came = timeout_at(self.deadline, waits) => came.ok(),
            () = self.is_ended_early() => None,
            () = self.cancelled() => None,
        }
    }

    /// Its worker sent what none of ours does.
    pub fn break_link(&self, reason: String) {
        // The first is what it is.
        let _ = self.broken.set(reason);
    }

    /// What that was, with the calls until then.
    #[must_use]
    pub fn broken(&self) -> Option<BrokenLink> {
        let reason = self.broken.get()?.clone();
        Some(BrokenLink { reason, calls: self.calls_so_far() })
    }

    /// It makes its next call, of this tool.
    pub(crate) fn record_call(&self, tool: &ToolName) {
        let mut calls = self.lock_calls();
        let id = u32::try_from(calls.len()).unwrap_or(u32::MAX);
        calls.push(CallRecord { id, tool: tool.clone(), begun_ns: 0, settled: None });
    }

    /// One of them settled.
    pub(crate) fn record_settled(&self, settled: &Settled) {
        let Settled { id, code, duration_ns, redacted, .. } = *settled;
        if let Some(call) = self.lock_calls().get_mut(id as usize) {
            call.settled = Some(CallSettled { code, duration_ns, redacted });
        }
    }

    /// Its calls so far, in the order of calling.
    #[must_use]
    pub fn calls_so_far(&self) -> Vec<CallRecord> {
        self.lock_calls().clone()
    }

    fn lock_calls(&self) -> MutexGuard<'_, Vec<CallRecord>> {
        // What it guards is whole between any two statements.
        lock(&self.calls)
    }

    /// Whether nobody wants it any more.
    pub(super) fn is_cancelled(&self) -> bool {
        *self.cancelled.borrow()
    }

    /// Ends when nobody wants it any more.
    pub(super) async fn cancelled(&self) {
        turns_true(&self.cancelled).await;
    }

    /// Which run it is, for records.
    #[must_use]
    pub fn id(&self) -> RunId {
        self.id
    }

    /// Whose run it is.
    #[must_use]
    pub fn principal(&self) -> &Arc<str> {
        &self.caller.principal
    }

    /// Who calls, for built-in tools.
    pub(super) fn caller(&self) -> &Caller {
        &self.caller
    }

    /// The signed hash of its program.
    #[must_use]
    pub fn program_sha256(&self) -> [u8; 32] {
        self.program_sha256
    }

    /// What it may use.
    #[must_use]
    pub fn limits(&self) -> &RunLimits {
        &self.limits
    }

    /// How long it is open.
    pub(super) fn age(&self) -> Duration {
        self.opened.elapsed()
    }

    /// The same run, whose time is over.
    #[cfg(test)]
    pub(super) fn out_of_time(mut self) -> Self {
        (self.deadline, self.caller.deadline) = (self.opened, self.opened);
        self
    }

    /// When nobody waits for its calls any more.
    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// What it may call.
    pub(super) fn grant(&self) -> &Grant {
        &self.caller.grant
    }

    /// Tools that its caller hosts itself.
    pub(super) fn hosted(&self) -> Option<&Arc<Connection>> {
        self.hosted.as_ref()
    }

    /// Whether its caller hosts this tool.
    pub(super) fn hosts(&self, tool: &ToolName) -> bool {
        match self.hosted.as_deref() {
            Some(Connection::Hosted(hosted)) => {
                hosted.tools().iter().any(|hosted| hosted.name() == tool)
            }
            _ => false,
        }
    }

    /// It calls. `true` once: for its first call.
    pub(super) fn mark_called(&self) -> bool {
        !self.has_called.load(Ordering::Relaxed) && !self.has_called.swap(true, Ordering::AcqRel)
    }

    /// Whether it made a call.
    pub(super) fn has_called(&self) -> bool {
        self.has_called.load(Ordering::Acquire)
    }

    /// Its link is closed. Calls that are dispatched may be under way.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Whether its link is closed.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Takes one call of this cost from the budget.
    pub(super) fn spend(&self, cost: u32) -> Result<(), CallFailure> {
        self.budget.spend(cost).map_err(CallFailure::BudgetSpent)
    }
}

async fn turns_true(of: &watch::Sender<bool>) {
    // It cannot fail: the sender is there.
    let _ = of.subscribe().wait_for(|is_so| *is_so).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Spent;
    use crate::grant::tests::claims_of_nothing;
    use forge_protocol::broker::{GrantClaims, GrantedTool};

    fn run(limits: RunLimits, calls_max: Option<u32>) -> Run {
        let claims = GrantClaims { calls_max, ..claims_of_nothing() };
        let grant = Arc::new(Grant::new(claims).unwrap());
        Run::new(RunId([0; 16]), [0; 32], Callable::Any, grant, limits)
    }

    #[tokio::test]
    async fn what_a_call_waits_for_is_waited_for_as_long_as_somebody_wants_its_run() {
        let run = || run(RunLimits::default(), None);
        assert_eq!(run().in_time(std::future::ready(1)).await, Some(1));
        let ends: [fn(&Run); 2] = [Run::cut_off, Run::cancel];
        for end in ends {
            let run = run();
            end(&run);
            assert_eq!(run.in_time(std::future::ready(1)).await, Some(1), "it is there");
            assert_eq!(run.in_time(std::future::pending::<()>()).await, None);
        }
        assert_eq!(run().out_of_time().in_time(std::future::pending::<()>()).await, None);
    }

    #[test]
    fn time_that_went_by_before_it_was_opened_is_the_runs() {
        let run = run(RunLimits::default(), None);
        let (deadline, waited) = (run.deadline(), Duration::from_secs(3));
        let run = {
            let asked = run.opened - waited;
            run.asked_for_at(asked)
        };
        assert_eq!((run.deadline(), run.caller.deadline), (deadline - waited, deadline - waited));
    }

    #[test]
    fn the_budget_is_the_smaller_of_run_and_grant() {
        for (calls, calls_max, expected) in [(5, None, 5), (5, Some(2), 2), (2, Some(5), 2)] {
            let run = run(RunLimits { calls, ..RunLimits::default() }, calls_max);
            for _ in 0..expected {
                run.spend(1).unwrap();
            }
            let spent = run.spend(1).unwrap_err();
            let limit = expected;
            assert!(matches!(spent, CallFailure::BudgetSpent(by) if by == Spent::Calls { limit }));
        }
    }

    #[test]
    fn limits_beyond_the_protocol_are_lowered_to_it() {
        let asked = RunLimits {
            response_bytes: u32::MAX,
            request_bytes: u32::MAX,
            wall_ms: u64::MAX,
            ..RunLimits::default()
        };
        let run = run(asked, None);
        assert_eq!(run.limits().response_bytes, RESPONSE_BYTES_MAX);
        assert_eq!(run.limits().request_bytes, REQUEST_BYTES_MAX);
        assert_eq!(run.deadline - run.opened, WALL_MAX + DEADLINE_LEAD);
    }

    #[test]
    fn no_run_makes_more_calls_than_there_are_numbers_for() {
        let run = run(RunLimits { calls: u32::MAX, ..RunLimits::default() }, Some(u32::MAX));
        for _ in 0..CALLS_MAX {
            run.spend(0).unwrap();
        }
        assert!(run.spend(0).is_err());
    }

    #[test]
    fn a_run_calls_no_tool_of_its_grant_that_its_program_does_not_name() {
        let find = ToolName::parse("shop.find").unwrap();
        let buy = ToolName::parse("shop.buy").unwrap();
        let granted = |name: &ToolName| GrantedTool {
            name: name.clone(),
            definition_sha256: [7; 32],
            constraints: Vec::new(),
        };
        let tools = vec![granted(&find), granted(&buy)];
        let grant = Grant::new(GrantClaims { tools, ..claims_of_nothing() }).unwrap();
        let callable = Callable::These(vec![find.clone()]);
        let run =
            Run::new(RunId([0; 16]), [0; 32], callable, Arc::new(grant), RunLimits::default());
        assert_eq!((run.pin(&find), run.pin(&buy)), (Some([7; 32]), None));
    }

    #[test]
    fn a_run_is_opened_in_the_journal_once() {
        let run = run(RunLimits::default(), None);
        assert!(!run.has_called());
        assert!(run.mark_called());
        assert!(!run.mark_called());
        assert!(run.has_called());
    }
}
