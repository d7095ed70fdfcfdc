//! Decides who may run now. Bounds the runs at once, the waiting runs and their waiting
//! time, and for each principal both kinds of runs together. A principal's share of the
//! places to run is no larger than its share of all places, because a place to run is
//! never taken back and a run that waits for one gives up sooner than the longest run
//! ends.
//!
//! Whoever cannot run is told at once, and when to come again. A place that
//! becomes free goes to the waiting principal that has the fewest runs under
//! way, the longest waiting first, and one to wait in, where all are taken, to
//! whoever has fewer runs here than another: a flood of some tenants' runs stands in
//! nobody's way but their own. One whose clients do not take what its runs left
//! begins no more until they do.

use std::collections::{HashMap, VecDeque};
use std::os::fd::AsRawFd as _;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forge_protocol::ending::{Refusal, RunEnd};
use forge_protocol::worker::Tier;

use super::options::Bounds;
use crate::cancel::Cancel;
use crate::locks::lock;
use crate::supervisor::RunResult;

/// A principal none of whose runs begins while its clients have more to take than this,
/// in bytes: what its runs leave is in this process until then.
const UNTAKEN_BYTES_MAX: usize = 64 << 20;

/// The gate.
#[derive(Debug)]
pub(super) struct Gate(Mutex<State>);

#[derive(Debug)]
struct State {
    bounds: Bounds,
    draining: bool,
    running: usize,
    waiting: VecDeque<Waiting>,
    /// Whose turn came and when, who has not noticed yet.
    called: HashMap<u64, Begun>,
    next_ticket: u64,
    /// Of principals that have any, until the ends of their runs are sent.
    tenants: HashMap<String, Tenant>,
    /// How long a run took lately, in microseconds.
    usual_us: u64,
    /// What [`Begun`] counts from.
    epoch: Instant,
    /// Of those that run, all together.
    begun_us: u64,
}

/// When a run began, in microseconds of the gate's own time.
#[derive(Clone, Copy, Debug)]
struct Begun(u64);

#[derive(Debug)]
struct Waiting {
    ticket: u64,
    principal: String,
    /// Its principal's own, if it has one.
    limit: Option<usize>,
    wake: Arc<Cancel>,
}

#[derive(Debug, Default)]
struct Tenant {
    running: usize,
    here: usize,
    /// Of the ends of its runs that no client has, in bytes.
    untaken_bytes: usize,
}

/// Why a run may not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Denied {
    /// The service takes no more runs.
    Draining,
    /// The principal has as many as it may have.
    TooManyRuns { limit: usize, retry_after_ms: u64 },
    /// There is no place for it, and those that wait for one, as many as may, have fewer here.
    QueueFull { retry_after_ms: u64 },
    /// There is no place for it, and none came free in time.
    Overloaded { retry_after_ms: u64 },
    /// There is, and the principal ran as many as it may run at once all that time.
    ShareTaken { share: usize, retry_after_ms: u64 },
    /// There is, and the principal's clients have more to take than they may.
    ResultsUntaken { bytes: usize, retry_after_ms: u64 },
    /// Nobody wants it any more.
    Cancelled,
}

impl Denied {
    /// The end of a run that was denied so, and would have been carried out in this tier.
    pub(super) fn result(self, tier: Tier) -> RunResult {
        match self {
            Self::Draining => {
                RunResult::refused(tier, Refusal::Draining, "this service takes no more runs", None)
            }
            Self::TooManyRuns { limit, retry_after_ms } => RunResult::refused(
                tier,
                Refusal::TooManyRuns,
                format!("the principal has {limit} runs here already, as many as it may"),
                Some(retry_after_ms),
            ),
            Self::QueueFull { retry_after_ms } => RunResult::refused(
                tier,
                Refusal::Overloaded,
                "every place for a run is taken, and as many wait for one as may",
                Some(retry_after_ms),
            ),
            Self::Overloaded { retry_after_ms } => RunResult::refused(
                tier,
                Refusal::Overloaded,
                "every place for a run is taken, and none came free in the time that a run may wait",
                Some(retry_after_ms),
            ),
            Self::ShareTaken { share, retry_after_ms } => RunResult::refused(
                tier,
                Refusal::Overloaded,
                format!(
                    "the principal runs {share} at once, as many as it may here, and no place of \
                     its own came free for this one in the time that a run may wait"
                ),
                Some(retry_after_ms),
            ),
            Self::ResultsUntaken { bytes, retry_after_ms } => RunResult::refused(
                tier,
                Refusal::Overloaded,
                format!(
                    "the principal's clients have {} MiB of its runs' results still to take, and \
                     took too little of them in the time that a run may wait",
                    bytes >> 20,
                ),
                Some(retry_after_ms),
            ),
            Self::Cancelled => RunResult::unstarted(
                tier,
                RunEnd::Cancelled,
                "the run was cancelled before its turn came",
            ),
        }
    }
}

/// A run of a principal is here. Dropped when its end is sent.
#[derive(Debug)]
pub(super) struct Stay<'a> {
    gate: &'a Gate,
    principal: String,
    untaken_bytes: usize,
    /// Whether it is among those that its principal has here: one that made room is none.
    counts: bool,
}

/// It may run. Dropped when it has.
#[derive(Debug)]
pub(super) struct Pass<'a> {
    gate: &'a Gate,
    principal: String,
    begun: Begun,
}

impl Gate {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self(Mutex::new(State {
            bounds,
            draining: false,
            running: 0,
            waiting: VecDeque::new(),
            called: HashMap::new(),
            next_ticket: 0,
            tenants: HashMap::new(),
            usual_us: 0,
            epoch: Instant::now(),
            begun_us: 0,
        }))
    }

    /// From now on these bounds; who is here stays.
    pub(super) fn rebind(&self, bounds: Bounds) {
        let mut state = lock(&self.0);
        state.bounds = bounds;
        state.call();
    }

    /// Waits for a run's turn, as long as that may take.
    pub(super) fn enter(
        &self,
        principal: &str,
        limit: Option<usize>,
        cancel: &Arc<Cancel>,
    ) -> Result<(Stay<'_>, Pass<'_>), Denied> {
        let mut state = lock(&self.0);
        if state.draining {
            return Err(Denied::Draining);
        }
        let runs_max = limit.unwrap_or(state.bounds.principal_runs_max);
        let here = state.tenants.get(principal).map_or(0, |tenant| tenant.here);
        if here >= runs_max {
            let retry_after_ms = state.retry_after_ms(runs_max.max(1), 0);
            return Err(Denied::TooManyRuns { limit: runs_max, retry_after_ms });
        }
        // Runs may be waiting although a place is free: those of principals that may not run
        // more now.
        let is_free = state.running < state.bounds.runs_max && state.may_run(principal, limit);
        if !is_free && state.waiting.len() >= state.bounds.queue_max && !state.make_room(here) {
            return Err(state.queue_full());
        }
        state.tenants.entry(principal.to_owned()).or_default().here += 1;
        let mut stay =
            Stay { gate: self, principal: principal.to_owned(), untaken_bytes: 0, counts: true };
        if is_free {
            let begun = state.begin(principal);
            drop(state);
            return Ok((stay, self.pass(principal, begun)));
        }
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        let wake = Arc::clone(cancel);
        let principal_of = principal.to_owned();
        state.waiting.push_back(Waiting { ticket, principal: principal_of, limit, wake });
        let until = Instant::now() + state.bounds.queue_wait;
        drop(state);
        let begun = self.wait(ticket, cancel, until, &mut stay)?;
        Ok((stay, self.pass(principal, begun)))
    }

    fn pass(&self, principal: &str, begun: Begun) -> Pass<'_> {
        Pass { gate: self, principal: principal.to_owned(), begun }
    }

    fn wait(
        &self,
        ticket: u64,
        cancel: &Cancel,
        until: Instant,
        stay: &mut Stay<'_>,
    ) -> Result<Begun, Denied> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            wait_for(cancel, left);
            let mut state = lock(&self.0);
            if let Some(begun) = state.called.remove(&ticket) {
                cancel.calm();
                return Ok(begun);
            }
            // It made room, and was counted off then.
            stay.counts = state.waiting.iter().any(|waiting| waiting.ticket == ticket);
            let denied = if cancel.is_raised() {
                Denied::Cancelled
            } else if state.draining {
                Denied::Draining
            } else if !stay.counts {
                state.queue_full()
            } else if Instant::now() >= until {
                state.overloaded(ticket)
            } else {
                cancel.calm();
                continue;
            };
            state.waiting.retain(|waiting| waiting.ticket != ticket);
            return Err(denied);
        }
    }

    /// The principals with the most runs here, running and waiting: name,
    /// running, and both together.
    pub(super) fn tenants(&self, most: usize) -> Vec<(String, usize, usize)> {
        let state = lock(&self.0);
        let each = |(name, it): (&String, &Tenant)| (name.clone(), it.running, it.here);
        let mut tenants: Vec<_> = state.tenants.iter().map(each).collect();
        drop(state);
        tenants.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| a.0.cmp(&b.0)));
        tenants.truncate(most);
        tenants
    }

    /// Takes no more runs; those that wait are told. Whether it took any before.
    pub(super) fn drain(&self) -> bool {
        let mut state = lock(&self.0);
        if std::mem::replace(&mut state.draining, true) {
            return false;
        }
        for waiting in &state.waiting {
            waiting.wake.nudge();
        }
        true
    }

    pub(super) fn is_draining(&self) -> bool {
        lock(&self.0).draining
    }

    /// How many run, and how many wait.
    pub(super) fn load(&self) -> (usize, usize) {
        let state = lock(&self.0);
        (state.running, state.waiting.len())
    }

    pub(super) fn bounds(&self) -> Bounds {
        lock(&self.0).bounds
    }
}

/// Until it is nudged or raised, or the time is over.
fn wait_for(cancel: &Cancel, time: Duration) {
    let mut polled = libc::pollfd { fd: cancel.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let ms = time.as_millis().saturating_add(1).min(i32::MAX as u128) as i32;
    // SAFETY: one valid pollfd.
    unsafe { libc::poll(&raw mut polled, 1, ms) };
}

impl State {
    fn now_us(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn running_of(&self, principal: &str) -> usize {
        self.tenants.get(principal).map_or(0, |tenant| tenant.running)
    }

    fn untaken_bytes_of(&self, principal: &str) -> usize {
        self.tenants.get(principal).map_or(0, |tenant| tenant.untaken_bytes)
    }

    /// Whether a place may be one of this principal's.
    fn may_run(&self, principal: &str, limit: Option<usize>) -> bool {
        self.running_of(principal) < self.bounds.places(limit)
            && self.untaken_bytes_of(principal) <= UNTAKEN_BYTES_MAX
    }

    fn begin(&mut self, principal: &str) -> Begun {
        let begun = Begun(self.now_us());
        self.begun_us += begun.0;
        self.running += 1;
        self.tenants.entry(principal.to_owned()).or_default().running += 1;
        begun
    }

    /// How long it took.
    fn end(&mut self, principal: &str, Begun(begun_us): Begun) -> u64 {
        self.begun_us -= begun_us;
        self.running -= 1;
        if let Some(tenant) = self.tenants.get_mut(principal) {
            tenant.running -= 1;
        }
        self.now_us() - begun_us
    }

    /// Calls those whose turn it is.
    fn call(&mut self) {
        while self.running < self.bounds.runs_max {
            let next = self
                .waiting
                .iter()
                .enumerate()
                .filter(|(_, waiting)| self.may_run(&waiting.principal, waiting.limit))
                .min_by_key(|(_, waiting)| (self.running_of(&waiting.principal), waiting.ticket))
                .map(|(at, _)| at);
            let Some(waiting) = next.and_then(|at| self.waiting.remove(at)) else { return };
            let begun = self.begin(&waiting.principal);
            self.called.insert(waiting.ticket, begun);
            waiting.wake.nudge();
        }
    }

    /// Has the newest that waits of the principal with the most runs here give way to one of
    /// a principal with so many, if that has fewer with it.
    fn make_room(&mut self, here: usize) -> bool {
        let mut larger: Vec<(usize, &str)> = self
            .tenants
            .iter()
            .filter(|(_, tenant)| tenant.here > here + 1)
            .map(|(name, tenant)| (tenant.here, name.as_str()))
            .collect();
        larger.sort_unstable_by(|a, b| b.cmp(a));
        let newest =
            |name: &str| self.waiting.iter().rposition(|waiting| waiting.principal == name);
        let Some(at) = larger.into_iter().find_map(|(_, name)| newest(name)) else { return false };
        let Some(given_up) = self.waiting.remove(at) else { return false };
        if let Some(tenant) = self.tenants.get_mut(&given_up.principal) {
            tenant.here -= 1;
        }
        given_up.wake.nudge();
        true
    }

    /// When a place may be free: by what runs took lately, or by how long those that
    /// run have taken already, if that is more.
    fn retry_after_ms(&self, places: usize, before: usize) -> u64 {
        let running = self.running as u64;
        let age_us = (self.now_us() * running).saturating_sub(self.begun_us);
        let usual_us = self.usual_us.max(age_us.checked_div(running).unwrap_or(0));
        let us = usual_us.saturating_mul(before as u64 + 1) / places as u64;
        us.div_ceil(1000).max(1)
    }

    /// That the turn of who has this ticket did not come.
    fn overloaded(&self, ticket: u64) -> Denied {
        let retry_after_ms = self.next_turn_ms();
        let waiting = self.waiting.iter().find(|waiting| waiting.ticket == ticket);
        match waiting {
            Some(waiting) if self.running < self.bounds.runs_max => {
                let share = self.bounds.places(waiting.limit);
                match self.untaken_bytes_of(&waiting.principal) {
                    bytes if bytes > UNTAKEN_BYTES_MAX => {
                        Denied::ResultsUntaken { bytes, retry_after_ms }
                    }
                    _ => Denied::ShareTaken { share, retry_after_ms },
                }
            }
            _ => Denied::Overloaded { retry_after_ms },
        }
    }

    fn queue_full(&self) -> Denied {
        Denied::QueueFull { retry_after_ms: self.next_turn_ms() }
    }

    /// When all that wait may have had their turns.
    fn next_turn_ms(&self) -> u64 {
        self.retry_after_ms(self.bounds.runs_max, self.waiting.len())
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.gate.0);
        let took_us = state.end(&self.principal, self.begun);
        state.usual_us = match state.usual_us {
            0 => took_us,
            usual_us => usual_us - usual_us / 8 + took_us / 8,
        };
        state.call();
    }
}

impl Stay<'_> {
    /// Its end takes so many bytes until its client has it.
    pub(super) fn ends_with(&mut self, bytes: usize) {
        let mut state = lock(&self.gate.0);
        if let Some(tenant) = state.tenants.get_mut(&self.principal) {
            tenant.untaken_bytes += bytes;
            self.untaken_bytes += bytes;
        }
    }
}

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.gate.0);
        let Some(tenant) = state.tenants.get_mut(&self.principal) else { return };
        tenant.here -= usize::from(self.counts);
        tenant.untaken_bytes -= self.untaken_bytes;
        if tenant.here == 0 {
            state.tenants.remove(&self.principal);
        }
        if self.untaken_bytes > 0 {
            // It may have been what another of its runs waited for.
            state.call();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate(runs_max: usize, queue_max: usize, principal_runs_max: usize) -> Gate {
        let queue_wait = Duration::from_secs(60);
        Gate::new(Bounds { runs_max, queue_max, queue_wait, principal_runs_max })
    }

    fn cancel() -> Arc<Cancel> {
        Arc::new(Cancel::new().unwrap())
    }

    fn until(what: &str, is_so: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < until, "it never came about that {what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_run_beyond_the_bounds_is_refused_at_once() {
        let gate = gate(1, 0, 5);
        let first = gate.enter("a", None, &cancel()).unwrap();
        let refused = gate.enter("b", None, &cancel()).unwrap_err();
        let is_full = matches!(refused, Denied::QueueFull { retry_after_ms: 1.. });
        assert!(is_full, "{refused:?}");
        drop(first);
        drop(gate.enter("b", None, &cancel()).unwrap());
        assert!(lock(&gate.0).tenants.is_empty(), "nothing is kept of those that left");
    }

    #[test]
    fn a_principal_has_so_many_and_another_has_room() {
        let gate = gate(3, 0, 2);
        let held = [gate.enter("a", None, &cancel()), gate.enter("a", None, &cancel())];
        let refused = gate.enter("a", None, &cancel()).unwrap_err();
        assert!(matches!(refused, Denied::TooManyRuns { limit: 2, .. }), "{refused:?}");
        assert!(matches!(gate.enter("c", Some(0), &cancel()), Err(Denied::TooManyRuns { .. })));
        drop(gate.enter("b", None, &cancel()).unwrap());
        drop(held);
    }

    #[test]
    fn a_principal_has_no_larger_part_of_the_places_than_of_all_there_is() {
        // Three quarters of both.
        let gate = gate(4, 4, 6);
        let held: Vec<_> = (0..3).map(|_| gate.enter("a", None, &cancel()).unwrap()).collect();
        std::thread::scope(|scope| {
            let gate = &gate;
            let fourth = scope.spawn(move || gate.enter("a", None, &cancel()).map(drop));
            until("its fourth waits, though there is a place", || gate.load() == (3, 1));
            // Whose it is, at once.
            drop(gate.enter("b", None, &cancel()).unwrap());
            assert_eq!(gate.load(), (3, 1));
            drop(held);
            fourth.join().unwrap().unwrap();
        });
        // One that may have all has all.
        let held: Vec<_> = (0..4).map(|_| gate.enter("a", Some(8), &cancel()).unwrap()).collect();
        assert_eq!(gate.load(), (4, 0));
        drop(held);
    }

    #[test]
    fn a_principal_whose_results_are_not_taken_begins_no_run_until_they_are() {
        let gate = gate(4, 4, 8);
        let (mut stay, pass) = gate.enter("a", None, &cancel()).unwrap();
        stay.ends_with(UNTAKEN_BYTES_MAX + 1);
        drop(pass);
        std::thread::scope(|scope| {
            let gate = &gate;
            let next = scope.spawn(move || gate.enter("a", None, &cancel()).map(drop));
            until("its next waits, though there are places", || gate.load() == (0, 1));
            let denied = lock(&gate.0).overloaded(0);
            let bytes_max = UNTAKEN_BYTES_MAX + 1;
            assert!(matches!(denied, Denied::ResultsUntaken { bytes, .. } if bytes == bytes_max));
            drop(gate.enter("b", None, &cancel()).unwrap());
            drop(stay);
            next.join().unwrap().unwrap();
        });
    }

    #[test]
    fn whoever_is_refused_is_told_to_come_no_sooner_than_runs_take_that_run() {
        let gate = gate(2, 0, 1);
        drop(gate.enter("a", None, &cancel()).unwrap());
        let _held = gate.enter("a", None, &cancel()).unwrap();
        // What ended was short, and what runs is not.
        lock(&gate.0).epoch -= Duration::from_secs(8);
        match gate.enter("a", None, &cancel()) {
            Err(Denied::TooManyRuns { retry_after_ms: 8000.., .. }) => {}
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_place_goes_to_whoever_has_the_fewest() {
        let gate = gate(2, 8, 10);
        let (stay, pass) = gate.enter("a", None, &cancel()).unwrap();
        let (other_stay, other_pass) = gate.enter("a", None, &cancel()).unwrap();
        let order = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for (at, name) in ["a", "a", "b"].into_iter().enumerate() {
                let (gate, order) = (&gate, &order);
                scope.spawn(move || {
                    let passed = gate.enter(name, None, &cancel()).unwrap();
                    lock(order).push(name);
                    until("the others wait on", || at < 3);
                    drop(passed);
                });
                until("it waits", || gate.load().1 == at + 1);
            }
            drop(pass);
            until("somebody got the place", || !lock(&order).is_empty());
            drop(other_pass);
        });
        assert_eq!(lock(&order)[0], "b");
        drop((stay, other_stay));
    }

    #[test]
    fn a_full_queue_has_room_for_whoever_has_less_and_its_newest_gives_way() {
        let gate = gate(1, 3, 8);
        let (stay, pass) = gate.enter("a", None, &cancel()).unwrap();
        std::thread::scope(|scope| {
            let gate = &gate;
            let wait = |name: &'static str, waiting: usize| {
                let entered = scope.spawn(move || gate.enter(name, None, &cancel()).map(drop));
                until("it waits", || gate.load().1 == waiting);
                entered
            };
            let waits =
                |name: &str| lock(&gate.0).waiting.iter().filter(|it| it.principal == name).count();
            let others = [wait("b", 1), wait("a", 2), wait("b", 3)];
            // Both have two here, and neither more than the other with another.
            let full = gate.enter("a", None, &cancel()).map(drop);
            assert!(matches!(full, Err(Denied::QueueFull { .. })), "{full:?}");
            let small = scope.spawn(move || gate.enter("c", None, &cancel()).map(drop));
            until("c waits in the place of one of b's", || waits("c") == 1);
            assert_eq!((gate.load(), waits("a"), waits("b")), ((1, 3), 1, 1));
            let [first, second, newest] = others;
            let given_up = newest.join().unwrap();
            assert!(matches!(given_up, Err(Denied::QueueFull { .. })), "{given_up:?}");
            // Nobody has more than one more than c.
            let again = gate.enter("c", None, &cancel()).map(drop);
            assert!(matches!(again, Err(Denied::QueueFull { .. })), "{again:?}");
            drop(pass);
            for entered in [first, second, small] {
                entered.join().unwrap().unwrap();
            }
        });
        drop(stay);
        assert!(lock(&gate.0).tenants.is_empty());
    }

    #[test]
    fn whoever_waits_can_be_cancelled_and_is_told_of_a_drain() {
        let gate = gate(1, 2, 8);
        let _held = gate.enter("a", None, &cancel()).unwrap();
        let wanted = cancel();
        std::thread::scope(|scope| {
            let (gate, wanted) = (&gate, &wanted);
            let cancelled = scope.spawn(move || gate.enter("a", None, wanted).map(|_| ()));
            until("it waits", || gate.load().1 == 1);
            let drained = scope.spawn(move || gate.enter("b", None, &cancel()).map(|_| ()));
            until("both wait", || gate.load().1 == 2);
            wanted.raise();
            assert_eq!(cancelled.join().unwrap(), Err(Denied::Cancelled));
            gate.drain();
            assert_eq!(drained.join().unwrap(), Err(Denied::Draining));
        });
        assert_eq!(gate.load(), (1, 0));
    }

    #[test]
    fn those_who_wait_have_the_places_that_a_reload_adds() {
        let gate = gate(1, 2, 8);
        let held = gate.enter("a", None, &cancel()).unwrap();
        std::thread::scope(|scope| {
            let gate = &gate;
            let waits = scope.spawn(move || gate.enter("b", None, &cancel()).map(drop));
            until("it waits", || gate.load() == (1, 1));
            let bounds = Bounds { runs_max: 2, ..gate.bounds() };
            gate.rebind(bounds);
            until("it has its place", || waits.is_finished());
            waits.join().unwrap().unwrap();
        });
        drop(held);
    }

    #[test]
    fn of_those_who_have_as_few_the_longest_waiting_comes_first() {
        let gate = gate(1, 8, 8);
        let (stay, pass) = gate.enter("a", None, &cancel()).unwrap();
        let order = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for (at, name) in ["b", "c", "d"].into_iter().enumerate() {
                let (gate, order) = (&gate, &order);
                scope.spawn(move || {
                    let _passed = gate.enter(name, None, &cancel()).unwrap();
                    lock(order).push(name);
                });
                until("it waits", || gate.load().1 == at + 1);
            }
            drop(pass);
        });
        assert_eq!(*lock(&order), ["b", "c", "d"]);
        drop(stay);
    }

    #[test]
    fn a_principals_own_bound_takes_the_place_of_the_usual_one_also_while_it_waits() {
        // One of them at once, if it has no bound of its own.
        let gate = gate(2, 2, 2);
        let held: Vec<_> = (0..2).map(|_| gate.enter("a", Some(4), &cancel()).unwrap()).collect();
        std::thread::scope(|scope| {
            let gate = &gate;
            let third = scope.spawn(move || gate.enter("a", Some(4), &cancel()).map(drop));
            until("its third waits", || gate.load() == (2, 1));
            let mut held = held.into_iter();
            drop(held.next());
            until("it runs beside its second", || third.is_finished());
            third.join().unwrap().unwrap();
            drop(held);
        });
        assert!(lock(&gate.0).tenants.is_empty());
    }

    #[test]
    fn whose_turn_did_not_come_is_told_what_was_taken_all_places_or_its_own() {
        // One of them at once may be one principal's.
        let gate = gate(2, 2, 2);
        let first = gate.enter("a", None, &cancel()).unwrap();
        let (wanted, others) = (cancel(), std::cell::RefCell::new(None));
        std::thread::scope(|scope| {
            let (gate, wanted) = (&gate, &wanted);
            let waits = scope.spawn(move || gate.enter("a", None, wanted).map(drop));
            until("it waits, though there is a place", || gate.load() == (1, 1));
            let denied = lock(&gate.0).overloaded(0);
            assert!(matches!(denied, Denied::ShareTaken { share: 1, .. }), "{denied:?}");
            *others.borrow_mut() = Some(gate.enter("b", None, &cancel()).unwrap());
            let denied = lock(&gate.0).overloaded(0);
            assert!(matches!(denied, Denied::Overloaded { .. }), "{denied:?}");
            wanted.raise();
            assert_eq!(waits.join().unwrap(), Err(Denied::Cancelled));
        });
        drop(first);
    }

    #[test]
    fn what_a_principal_has_here_is_told_as_what_runs_and_as_all_of_it() {
        let gate = gate(1, 2, 8);
        let held = gate.enter("a", None, &cancel()).unwrap();
        std::thread::scope(|scope| {
            let gate = &gate;
            let waits = scope.spawn(move || gate.enter("a", None, &cancel()).map(drop));
            until("it waits", || gate.load() == (1, 1));
            assert_eq!(gate.tenants(8), [("a".to_owned(), 1, 2)]);
            drop(held);
            waits.join().unwrap().unwrap();
        });
        assert_eq!(gate.tenants(8), []);
    }

    #[test]
    fn a_run_whose_turn_came_is_not_woken_again_by_that() {
        let gate = gate(1, 2, 8);
        let held = gate.enter("a", None, &cancel()).unwrap();
        let wanted = cancel();
        std::thread::scope(|scope| {
            let (gate, wanted) = (&gate, &wanted);
            let waits = scope.spawn(move || gate.enter("b", None, wanted).map(drop));
            until("it waits", || gate.load() == (1, 1));
            drop(held);
            waits.join().unwrap().unwrap();
        });
        let mut polled = libc::pollfd { fd: wanted.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd.
        assert_eq!(unsafe { libc::poll(&raw mut polled, 1, 0) }, 0, "its waits would be none");
    }
}
