//! The workers that stand ready, by what they can be used for, and how many
//! there should be.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forge_protocol::limits::RunLimits;
use forge_protocol::worker::{Prepare, Reuse};

use super::worker::Worker;
use super::{PoolOptions, Task};
use crate::machine;

/// After so long without a cold start the pool keeps one worker less.
const SHRINK_AFTER: Duration = Duration::from_secs(10);
/// After so long without a run of it a program has no VMs prepared, and one that was put
/// back for a tenant goes that has served none.
const FORGET_AFTER: Duration = Duration::from_secs(600);
/// Programs that VMs are kept prepared for. The tenant with the most of them loses its
/// least recently used one first, so that no tenant's many evict another's few.
const PROGRAMS_MAX: usize = 16;

/// Whose VM it is and what it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// The tenant. A VM never serves another.
    pub tenant: String,
    /// RAM of the VM, in bytes.
    pub ram_bytes: usize,
    /// The program that is loaded in it.
    pub program: Option<ProgramKey>,
}

impl Key {
    /// What a task needs as long as nothing is prepared for it.
    pub(super) fn of(task: &Task<'_>) -> Self {
        let ram_bytes = machine::ram_bytes(&task.job.load.limits);
        Self { tenant: task.tenant.to_owned(), ram_bytes, program: None }
    }
}

/// A prepared program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramKey {
    /// Of its bytes, signature included.
    pub digest: [u8; 32],
    /// The key that its signature was found good by.
    pub signer: [u8; 32],
    /// The limits that it was loaded under.
    pub limits: RunLimits,
}

/// How many VMs wait for a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stands {
    /// Ready workers that no tenant owns.
    pub standing: usize,
    /// Ready workers that each belong to one tenant.
    pub owned: usize,
    /// How many are to stand ready for whoever comes.
    pub target: usize,
    /// The most that `target` can become.
    pub ready_max: usize,
}

/// A worker that should stand ready and does not.
#[derive(Clone, Debug)]
pub(super) enum Missing {
    /// One with the usual RAM, for whoever comes.
    Standing,
    /// One that has this program loaded.
    Prepared(Key, Arc<Prepare>),
}

/// A program that VMs are kept prepared for.
#[derive(Debug)]
struct Program {
    key: Key,
    order: Arc<Prepare>,
    /// When it was asked for last.
    used: Instant,
}

/// A worker of one tenant, or prepared.
#[derive(Debug)]
struct Owned {
    key: Key,
    worker: Worker,
    /// When it came here.
    since: Instant,
}

impl Owned {
    fn new(key: Key, worker: Worker) -> Self {
        Self { key, worker, since: Instant::now() }
    }
}

/// The shelves.
#[derive(Debug)]
pub(super) struct Shelves {
    options: PoolOptions,
    /// Untouched by any tenant, with the usual RAM.
    standing: Vec<Worker>,
    /// The longest unused first.
    owned: Vec<Owned>,
    /// The most recently used first.
    programs: VecDeque<Program>,
    /// How many are to stand ready now.
    target: usize,
    last_cold: Option<Instant>,
    /// Their runs are over, and they are to be ended.
    spent: Vec<Worker>,
    /// Whether some of these are being ended.
    is_ending: bool,
    closing: bool,
}

impl Shelves {
    pub(super) fn new(options: PoolOptions) -> Self {
        Self {
            options,
            standing: Vec::new(),
            owned: Vec::new(),
            programs: VecDeque::new(),
            target: options.ready_min.min(options.ready_max),
            last_cold: None,
            spent: Vec::new(),
            is_ending: false,
            closing: false,
        }
    }

    pub(super) fn stands(&self) -> Stands {
        Stands {
            standing: self.standing.len(),
            owned: self.owned.len(),
            target: self.target,
            ready_max: self.options.ready_max,
        }
    }

    pub(super) fn close(&mut self) {
        self.closing = true;
    }

    /// Every worker is gone: gives them back.
    pub(super) fn clear(&mut self) -> Vec<Worker> {
        let mut gone = std::mem::take(&mut self.spent);
        gone.append(&mut self.standing);
        gone.extend(self.owned.drain(..).map(|it| it.worker));
        gone
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing
    }

    /// A worker for this use. `usual`: any that stands ready will do, if no
    /// program need be loaded.
    pub(super) fn take(&mut self, key: &Key, usual: bool) -> Option<Worker> {
        if key.program.is_some()
            && let Some(at) = self.place_of(key)
            && let Some(program) = self.programs.remove(at)
        {
            self.programs.push_front(Program { used: Instant::now(), ..program });
        }
        // The one used last has the most of its memory in the caches.
        if let Some(at) = self.owned.iter().rposition(|it| it.key == *key) {
            return Some(self.owned.remove(at).worker);
        }
        if !usual || key.program.is_some() {
            return None;
        }
        let worker = self.standing.pop();
        if worker.is_none() {
            self.last_cold = Some(Instant::now());
            self.target = (self.target * 2).max(1).min(self.options.ready_max);
        }
        worker
    }

    /// After a run of a worker that resets itself. Gives back one that there
    /// is no more room for.
    pub(super) fn give_back(&mut self, key: &Key, worker: Worker) -> Option<Worker> {
        self.owned.push(Owned::new(key.clone(), worker));
        (self.owned.len() > self.options.ready_max).then(|| self.owned.remove(0).worker)
    }

    /// One that was taken and was given no run. Gives it back if there is no more room
    /// for it, or its program was forgotten meanwhile.
    pub(super) fn put_back(&mut self, key: &Key, worker: Worker, usual: bool) -> Option<Worker> {
        // No tenant has touched it.
        if usual && key.program.is_none() && worker.runs() == 0 {
            if self.standing.len() >= self.target {
                return Some(worker);
            }
            self.standing.push(worker);
            return None;
        }
        match key.program.is_none() || self.place_of(key).is_some() {
            true => self.give_back(key, worker),
            false => Some(worker),
        }
    }

    /// After the run of a worker that is of no further use. Gives it back if
    /// many wait for their end already.
    pub(super) fn spend(&mut self, worker: Worker) -> Option<Worker> {
        if self.spent.len() >= self.options.ready_max {
            return Some(worker);
        }
        self.spent.push(worker);
        None
    }

    /// The workers to be ended: they have been when [`Self::ended`] is called.
    pub(super) fn take_spent(&mut self) -> Vec<Worker> {
        self.is_ending = !self.spent.is_empty();
        std::mem::take(&mut self.spent)
    }

    /// Those that were taken to be ended are.
    pub(super) fn ended(&mut self) {
        self.is_ending = false;
    }

    /// Takes those that speak while they stand there: a VM that was put back, and
    /// is not as it was, says so without being asked.
    pub(super) fn take_speaking(&mut self) -> Vec<Worker> {
        let mut speaking: Vec<_> = self.standing.extract_if(.., |worker| worker.speaks()).collect();
        let owned = self.owned.extract_if(.., |it| it.worker.speaks());
        speaking.extend(owned.map(|it| it.worker));
        speaking
    }

    /// Takes those that compute while they stand there for their tenant.
    pub(super) fn take_restless(&mut self) -> Vec<Worker> {
        let restless = self.owned.extract_if(.., |it| it.worker.is_restless());
        restless.map(|it| it.worker).collect()
    }

    /// Whether the next who comes for this use would find nothing, and somebody
    /// could make something before.
    pub(super) fn is_bare(&self, key: &Key) -> bool {
        let found = self.owned.iter().any(|it| it.key == *key)
            || key.program.is_none() && !self.standing.is_empty();
        !found && self.missing().is_some()
    }

    /// Whether there is anything to make or to end.
    pub(super) fn has_work(&self) -> bool {
        self.is_ending || !self.spent.is_empty() || self.missing().is_some()
    }

    /// Keeps VMs prepared with a program from now on.
    pub(super) fn keep_prepared(&mut self, key: &Key, order: Prepare) {
        if self.place_of(key).is_some() {
            return;
        }
        let (order, used) = (Arc::new(order), Instant::now());
        self.programs.push_front(Program { key: key.clone(), order, used });
        if self.programs.len() > PROGRAMS_MAX
            && let Some(least) = self.least_missed()
        {
            self.forget(least);
        }
    }

    /// The place of a program that VMs are kept prepared for.
    fn place_of(&self, key: &Key) -> Option<usize> {
        self.programs.iter().position(|program| program.key == *key)
    }

    /// Keeps no VM prepared with the program at this place any more.
    fn forget(&mut self, at: usize) {
        let Some(forgotten) = self.programs.remove(at) else { return };
        let owned = self.owned.extract_if(.., |it| it.key == forgotten.key);
        self.spent.extend(owned.map(|it| it.worker));
    }

    /// The same of all that nobody has asked for in a while; and lets go what stands as long
    /// for a tenant with no program.
    pub(super) fn forget_unused(&mut self, now: Instant) {
        let unused = self.owned.extract_if(.., |it| {
            it.key.program.is_none() && now.saturating_duration_since(it.since) >= FORGET_AFTER
        });
        self.spent.extend(unused.map(|it| it.worker));
        let is_unused = |last: &Program| now.saturating_duration_since(last.used) >= FORGET_AFTER;
        while self.programs.back().is_some_and(is_unused) {
            self.forget(self.programs.len() - 1);
        }
    }

    /// The place of the program that goes first.
    fn least_missed(&self) -> Option<usize> {
        let of_its_tenant = |at: &usize| {
            let tenant = &self.programs[*at].key.tenant;
            self.programs.iter().filter(|program| program.key.tenant == *tenant).count()
        };
        (0..self.programs.len()).max_by_key(of_its_tenant)
    }

    /// What should stand ready and does not.
    pub(super) fn missing(&self) -> Option<Missing> {
        if self.standing.len() < self.target {
            return Some(Missing::Standing);
        }
        // A VM that is reset comes back by itself.
        if self.options.reuse != Reuse::Fresh {
            return None;
        }
        let ready =
            |program: &Program| self.owned.iter().filter(|it| it.key == program.key).count();
        // One for each program; more only as long as there may be more VMs.
        let has_room = self.owned.len() < self.options.ready_max;
        let none = self.programs.iter().find(|program| ready(program) == 0);
        let program = none.or_else(|| {
            let few = |program: &&Program| has_room && ready(program) < self.options.ready_min;
            self.programs.iter().find(few)
        })?;
        Some(Missing::Prepared(program.key.clone(), Arc::clone(&program.order)))
    }

    /// What was missing has been made. Gives it back if its program was
    /// forgotten meanwhile: nobody would look for it again.
    pub(super) fn add(&mut self, missing: Missing, worker: Worker) -> Option<Worker> {
        match missing {
            Missing::Standing => self.standing.push(worker),
            Missing::Prepared(key, _) if self.place_of(&key).is_some() => {
                self.owned.push(Owned::new(key, worker));
            }
            Missing::Prepared(..) => return Some(worker),
        }
        None
    }

    /// What was missing cannot be made. A program that cannot be prepared is
    /// forgotten until somebody asks for it.
    pub(super) fn give_up(&mut self, missing: &Missing) {
        if let Missing::Prepared(key, _) = missing
            && let Some(at) = self.place_of(key)
        {
            self.forget(at);
        }
    }

    /// A worker that nobody has missed for a while.
    pub(super) fn let_go(&mut self, now: Instant) -> Option<Worker> {
        let last = self.last_cold?;
        if self.target <= self.options.ready_min
            || now.saturating_duration_since(last) < SHRINK_AFTER
        {
            return None;
        }
        self.target -= 1;
        self.last_cold = Some(now);
        self.standing.pop()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs::File;
    use std::os::unix::net::UnixStream;

    use forge_protocol::guest::Load;

    use super::*;

    /// A worker without a process, and without a word.
    fn worker() -> Worker {
        let (socket, _) = UnixStream::pair().unwrap();
        Worker::new(socket, File::open("/dev/null").unwrap().into())
    }

    /// As if nobody had come for longer than anything is kept.
    pub(in super::super) fn age(shelves: &mut Shelves) {
        let ago = |since: Instant| since.checked_sub(FORGET_AFTER.max(SHRINK_AFTER)).unwrap();
        shelves.last_cold = shelves.last_cold.map(ago);
        shelves.owned.iter_mut().for_each(|it| it.since = ago(it.since));
    }

    fn shelves(ready_min: usize, ready_max: usize, reuse: Reuse) -> Shelves {
        Shelves::new(PoolOptions { ready_min, ready_max, reuse, ..PoolOptions::default() })
    }

    const RESET: Reuse = Reuse::Reset { prove_one_in: 0 };

    fn key(tenant: &str) -> Key {
        Key { tenant: tenant.into(), ram_bytes: 1 << 20, program: None }
    }

    /// Of tenant `a`.
    fn prepared(number: u8) -> (Key, Prepare) {
        let limits = RunLimits::default();
        let program = ProgramKey { digest: [number; 32], signer: [0; 32], limits: limits.clone() };
        let load = Load { limits, announce: false };
        let order = Prepare { load, program: vec![number] };
        (Key { program: Some(program), ..key("a") }, order)
    }

    /// Makes what is missing; how many that were.
    fn fill(shelves: &mut Shelves) -> usize {
        let mut made = 0;
        while let Some(missing) = shelves.missing() {
            assert!(shelves.add(missing, worker()).is_none());
            made += 1;
            assert!(made < 1000, "there is never enough");
        }
        made
    }

    #[test]
    fn what_was_made_for_a_program_that_is_forgotten_by_then_is_given_back() {
        let mut shelves = shelves(0, 8, Reuse::Fresh);
        let (key, order) = prepared(0);
        shelves.keep_prepared(&key, order);
        let missing = shelves.missing().unwrap();
        assert!(matches!(missing, Missing::Prepared(..)));
        for number in 1..=PROGRAMS_MAX as u8 {
            let (key, order) = prepared(number);
            shelves.keep_prepared(&key, order);
        }
        assert!(shelves.add(missing, worker()).is_some());
    }

    #[test]
    fn so_many_stand_ready_as_are_configured() {
        assert_eq!(fill(&mut shelves(0, 8, Reuse::Fresh)), 0);
        assert_eq!(fill(&mut shelves(3, 8, Reuse::Fresh)), 3);
        assert_eq!(fill(&mut shelves(9, 4, Reuse::Fresh)), 4, "no more than may");
    }

    #[test]
    fn cold_starts_double_the_target_up_to_the_maximum() {
        let mut shelves = shelves(0, 6, Reuse::Fresh);
        for target in [1, 2, 4, 6, 6] {
            while shelves.take(&key("a"), true).is_some() {}
            assert_eq!(fill(&mut shelves), target);
        }
        // Who needs another size of RAM, or a program, misses no usual one.
        assert!(shelves.take(&key("a"), false).is_none());
        assert!(shelves.take(&prepared(1).0, true).is_none());
        assert_eq!(fill(&mut shelves), 0);
    }

    #[test]
    fn what_nobody_misses_goes_one_at_a_time_down_to_the_minimum() {
        let mut shelves = shelves(1, 4, Reuse::Fresh);
        let now = Instant::now();
        fill(&mut shelves);
        assert!(shelves.let_go(now + SHRINK_AFTER).is_none(), "nothing was ever missed");
        while shelves.target < 4 {
            shelves.take(&key("a"), true);
        }
        fill(&mut shelves);
        assert!(shelves.let_go(Instant::now()).is_none(), "it was missed just now");
        let mut then = Instant::now();
        for left in [3, 2, 1] {
            then += SHRINK_AFTER;
            assert!(shelves.let_go(then).is_some());
            assert!(shelves.let_go(then).is_none());
            assert_eq!(shelves.standing.len(), left);
            assert_eq!(fill(&mut shelves), 0);
        }
        assert!(shelves.let_go(then + 10 * SHRINK_AFTER).is_none());
    }

    #[test]
    fn a_program_that_nobody_asks_for_has_no_vms_after_a_while() {
        let mut shelves = shelves(1, 4, Reuse::Fresh);
        let ((one, order), (other, others)) = (prepared(1), prepared(2));
        shelves.keep_prepared(&one, order);
        shelves.keep_prepared(&other, others);
        fill(&mut shelves);
        let begun = Instant::now();
        let taken = shelves.take(&one, true).unwrap();
        assert!(shelves.put_back(&one, taken, true).is_none());
        shelves.programs.front_mut().unwrap().used = begun + FORGET_AFTER / 2;
        shelves.forget_unused(begun + FORGET_AFTER);
        assert_eq!(shelves.take_spent().len(), 1, "the VM of the other");
        shelves.ended();
        assert!(shelves.take(&one, true).is_some() && shelves.take(&other, true).is_none());
        shelves.forget_unused(Instant::now() + FORGET_AFTER);
        assert!(shelves.programs.is_empty());
    }

    #[test]
    fn a_tenants_vm_is_its_own_and_the_longest_unused_is_evicted() {
        let mut shelves = shelves(0, 2, RESET);
        assert!(shelves.give_back(&key("a"), worker()).is_none());
        assert!(shelves.give_back(&key("b"), worker()).is_none());
        assert!(shelves.take(&key("c"), true).is_none());
        assert!(shelves.give_back(&key("c"), worker()).is_some(), "two are kept");
        assert!(shelves.take(&key("a"), true).is_none(), "that of a went");
        assert!(shelves.take(&Key { ram_bytes: 2 << 20, ..key("b") }, false).is_none());
        assert!(shelves.take(&key("b"), true).is_some());
        assert!(shelves.take(&key("b"), true).is_none(), "there was one");
        assert!(shelves.take(&key("c"), true).is_some());
    }

    #[test]
    fn a_tenants_vm_that_serves_nobody_goes_after_a_while() {
        let mut shelves = shelves(0, 4, RESET);
        assert!(shelves.give_back(&key("a"), worker()).is_none());
        assert!(shelves.give_back(&key("b"), worker()).is_none());
        shelves.owned[1].since += FORGET_AFTER / 2;
        shelves.forget_unused(Instant::now() + FORGET_AFTER);
        assert_eq!(shelves.take_spent().len(), 1);
        assert!(shelves.take(&key("a"), true).is_none() && shelves.take(&key("b"), true).is_some());
    }

    #[test]
    fn a_worker_that_was_given_no_run_stands_where_it_stood() {
        let mut shelves = shelves(1, 2, Reuse::Fresh);
        fill(&mut shelves);
        let taken = shelves.take(&key("a"), true).unwrap();
        assert!(shelves.put_back(&key("a"), taken, true).is_none());
        assert!(shelves.put_back(&key("a"), worker(), true).is_some(), "as many as should");
        assert!(shelves.take(&key("b"), true).is_some(), "it is nobody's");
        // What is prepared, or of another size, is its tenant's.
        let (prepared, order) = prepared(1);
        assert!(shelves.put_back(&prepared, worker(), true).is_some(), "nobody looks for it");
        shelves.keep_prepared(&prepared, order);
        assert!(shelves.put_back(&prepared, worker(), true).is_none());
        assert!(shelves.put_back(&key("a"), worker(), false).is_none());
        assert!(shelves.take(&key("b"), true).is_none() && shelves.take(&prepared, true).is_some());
        assert!(shelves.take(&key("a"), false).is_some());
    }

    #[test]
    fn it_is_urgent_when_the_next_would_find_nothing_that_could_be_made() {
        let mut shelves = shelves(2, 4, Reuse::Fresh);
        let (prepared, order) = prepared(1);
        assert!(shelves.is_bare(&key("a")));
        fill(&mut shelves);
        assert!(!shelves.is_bare(&key("a")) && !shelves.is_bare(&prepared), "nothing to make");
        assert!(shelves.take(&key("a"), true).is_some());
        assert!(!shelves.is_bare(&key("a")), "one is left");
        assert!(shelves.take(&key("a"), true).is_some());
        assert!(shelves.is_bare(&key("a")));
        fill(&mut shelves);
        shelves.keep_prepared(&prepared, order);
        assert!(shelves.is_bare(&prepared), "who stands ready has not loaded it");
        fill(&mut shelves);
        assert!(!shelves.is_bare(&prepared));
    }

    #[test]
    fn the_spent_wait_for_their_end_up_to_a_bound() {
        let mut shelves = shelves(0, 2, Reuse::Fresh);
        assert!(!shelves.has_work());
        assert!(shelves.spend(worker()).is_none() && shelves.spend(worker()).is_none());
        assert!(shelves.spend(worker()).is_some(), "two wait");
        assert!(shelves.has_work());
        assert_eq!(shelves.take_spent().len(), 2);
        assert!(shelves.has_work(), "they are being ended");
        shelves.ended();
        assert!(!shelves.has_work());
    }

    #[test]
    fn programs_are_kept_prepared_until_others_are_used_more() {
        let mut shelves = shelves(2, 4, Reuse::Fresh);
        fill(&mut shelves);
        let numbers = 0..PROGRAMS_MAX as u8;
        for number in numbers.clone() {
            let (key, order) = prepared(number);
            shelves.keep_prepared(&key, order);
            // Two as long as there are no more than may stand, then one.
            assert_eq!(fill(&mut shelves), if number < 2 { 2 } else { 1 });
        }
        // 0 is used again; so the next one takes the place of 1.
        assert!(shelves.take(&prepared(0).0, true).is_some());
        let (key, order) = prepared(100);
        shelves.keep_prepared(&key, order);
        fill(&mut shelves);
        assert!(shelves.take(&prepared(1).0, true).is_none());
        for number in numbers.filter(|number| *number != 1).chain([100]) {
            assert!(shelves.take(&prepared(number).0, true).is_some(), "{number}");
        }
    }

    #[test]
    fn a_tenants_many_programs_take_no_other_tenants_few() {
        let mut shelves = shelves(1, 4, Reuse::Fresh);
        let (key, order) = prepared(200);
        let others = Key { tenant: "b".into(), ..key };
        shelves.keep_prepared(&others, order);
        for number in 0..3 * PROGRAMS_MAX as u8 {
            let (key, order) = prepared(number);
            shelves.keep_prepared(&key, order);
            fill(&mut shelves);
            assert!(shelves.owned.len() <= PROGRAMS_MAX);
        }
        assert!(shelves.take(&others, true).is_some());
    }

    #[test]
    fn a_program_that_cannot_be_prepared_is_not_tried_again() {
        let mut shelves = shelves(0, 4, Reuse::Fresh);
        let (key, order) = prepared(1);
        shelves.keep_prepared(&key, order.clone());
        let missing = shelves.missing().unwrap();
        shelves.give_up(&missing);
        assert!(shelves.missing().is_none());
        // Until somebody asks for it.
        shelves.keep_prepared(&key, order);
        assert!(shelves.missing().is_some());
    }

    #[test]
    fn where_one_vm_more_cannot_be_prepared_those_that_were_go_with_their_program() {
        let mut shelves = shelves(2, 4, Reuse::Fresh);
        fill(&mut shelves);
        let (key, order) = prepared(1);
        shelves.keep_prepared(&key, order);
        let first = shelves.missing().unwrap();
        assert!(shelves.add(first, worker()).is_none());
        let second = shelves.missing().unwrap();
        shelves.give_up(&second);
        assert_eq!((shelves.owned.len(), shelves.take_spent().len()), (0, 1));
    }

    #[test]
    fn a_worker_that_has_served_and_was_given_no_run_is_put_back_for_its_tenant_alone() {
        let mut shelves = shelves(1, 2, RESET);
        let (served, _theirs) = crate::pool::worker::tests::standing();
        assert!(shelves.put_back(&key("a"), served, true).is_none());
        assert!(shelves.take(&key("b"), true).is_none(), "it was another's");
        assert!(shelves.take(&key("a"), true).is_some());
    }

    #[test]
    fn who_speaks_while_it_stands_is_taken_off_whoever_it_stands_for() {
        use crate::pool::worker::tests::{not_reset, say, standing};
        let mut shelves = shelves(2, 2, RESET);
        let stands = || standing();
        let ((any, mut anys), (own, mut owns)) = (stands(), stands());
        let ((quiet, _quiets), (quiet_own, _quiet_owns)) = (stands(), stands());
        assert!(shelves.add(Missing::Standing, any).is_none());
        assert!(shelves.add(Missing::Standing, quiet).is_none());
        assert!(shelves.give_back(&key("a"), own).is_none());
        assert!(shelves.give_back(&key("a"), quiet_own).is_none());
        assert!(shelves.take_speaking().is_empty());
        say(&mut anys, &not_reset());
        assert_eq!(shelves.take_speaking().len(), 1);
        say(&mut owns, &not_reset());
        assert_eq!(shelves.take_speaking().len(), 1);
        assert_eq!((shelves.stands().standing, shelves.stands().owned), (1, 1));
    }

    #[test]
    fn who_computes_while_it_stands_for_its_tenant_is_taken_off() {
        let sh = ["-c", "while :; do :; done"];
        let mut child = std::process::Command::new("sh").args(sh).spawn().unwrap();
        let (socket, _theirs) = UnixStream::pair().unwrap();
        let process = crate::pool::zygote::tests::pidfd_of(&child);
        let mut shelves = shelves(0, 2, RESET);
        assert!(shelves.give_back(&key("a"), Worker::new(socket, process)).is_none());
        assert!(shelves.give_back(&key("a"), worker()).is_none());
        let until = Instant::now() + Duration::from_secs(60);
        let mut restless = shelves.take_restless();
        while restless.is_empty() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(50));
            restless = shelves.take_restless();
        }
        let found = restless.len();
        drop(restless);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((found, shelves.stands().owned), (1, 1));
    }

    #[test]
    fn whoever_stands_or_waits_for_its_end_is_gone_with_its_zygote() {
        let mut shelves = shelves(1, 2, RESET);
        fill(&mut shelves);
        assert!(shelves.give_back(&key("a"), worker()).is_none());
        assert!(shelves.spend(worker()).is_none());
        assert_eq!(shelves.clear().len(), 3);
        assert!(shelves.take(&key("a"), true).is_none());
        assert!(shelves.clear().is_empty());
    }

    #[test]
    fn a_program_that_is_prepared_again_keeps_no_other_from_being_kept() {
        let mut shelves = shelves(1, 4, Reuse::Fresh);
        let (other, order) = prepared(200);
        shelves.keep_prepared(&other, order);
        for _ in 0..2 * PROGRAMS_MAX {
            let (key, order) = prepared(1);
            shelves.keep_prepared(&key, order);
        }
        assert!(shelves.place_of(&other).is_some());
        assert_eq!(shelves.programs.len(), 2);
    }

    #[test]
    fn where_vms_are_reset_none_is_prepared_beside_those_that_come_back() {
        let mut shelves = shelves(0, 4, RESET);
        let (key, order) = prepared(1);
        shelves.keep_prepared(&key, order);
        assert_eq!(fill(&mut shelves), 0);
    }

    #[test]
    fn a_run_that_may_use_more_memory_needs_a_vm_that_has_it() {
        let job = |limits| forge_protocol::worker::Job {
            load: Load { limits, announce: false },
            start: forge_protocol::guest::Start {
                run_id: forge_protocol::RunId([1; 16]),
                seed: [2; 32],
                start_unix_ns: 3,
                granted: Vec::new(),
            },
            program: Vec::new(),
            input: Vec::new(),
            deadline: machine::deadline_in(Duration::from_secs(30)),
            brokered: false,
        };
        let usual = RunLimits::default();
        let large = RunLimits { memory_bytes: 4 * usual.memory_bytes, ..usual.clone() };
        let [usual, large] = [usual, large].map(|limits| {
            let job = job(limits);
            Key::of(&Task { tenant: "a", job: &job, broker: None, prepared: None, tell: None })
        });
        let options = PoolOptions { ready_min: 1, ready_max: 1, ..PoolOptions::default() };
        let stock = crate::pool::stock::Stock::new(options);
        assert!(stock.lock().add(Missing::Standing, worker()).is_none());
        assert!(stock.take(&large).is_none(), "it would be too small");
        assert!(stock.take(&usual).is_some());
    }
}
