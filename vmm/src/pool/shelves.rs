//! The workers that stand ready, by what they can be used for, and how many
//! there should be.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forge_protocol::limits::RunLimits;
use forge_protocol::worker::{Prepare, Reuse};

use super::PoolOptions;
use super::worker::Worker;

/// After so long without a cold start the pool keeps one worker less.
const SHRINK_AFTER: Duration = Duration::from_secs(10);
/// Programs that VMs are kept prepared for. The one used longest ago goes
/// first.
const PROGRAMS_MAX: usize = 16;

/// Whose VM it is and what it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// The tenant. A VM never serves another.
    pub tenant: String,
    /// Its RAM.
    pub ram_bytes: usize,
    /// The program that is loaded in it.
    pub program: Option<ProgramKey>,
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
}

/// The shelves.
#[derive(Debug)]
pub(super) struct Shelves {
    options: PoolOptions,
    /// Untouched by any tenant, with the usual RAM.
    standing: Vec<Worker>,
    /// Of one tenant, or prepared; the longest unused first.
    owned: Vec<(Key, Worker)>,
    /// The most recently used first.
    programs: VecDeque<Program>,
    /// How many are to stand ready now.
    target: usize,
    last_cold: Option<Instant>,
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
            closing: false,
        }
    }

    pub(super) fn close(&mut self) {
        self.closing = true;
    }

    /// Every worker is gone.
    pub(super) fn clear(&mut self) {
        self.standing.clear();
        self.owned.clear();
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing
    }

    /// A worker for this use. `usual`: any that stands ready will do, if no
    /// program need be loaded.
    pub(super) fn take(&mut self, key: &Key, usual: bool) -> Option<Worker> {
        if key.program.is_some()
            && let Some(at) = self.programs.iter().position(|program| program.key == *key)
            && let Some(program) = self.programs.remove(at)
        {
            self.programs.push_front(program);
        }
        // The one used last has the most of its memory in the caches.
        if let Some(at) = self.owned.iter().rposition(|(of, _)| of == key) {
            return Some(self.owned.remove(at).1);
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
        self.owned.push((key.clone(), worker));
        (self.owned.len() > self.options.ready_max).then(|| self.owned.remove(0).1)
    }

    /// Keeps VMs prepared with a program from now on.
    pub(super) fn keep_prepared(&mut self, key: &Key, order: Prepare) -> Arc<Prepare> {
        if let Some(program) = self.programs.iter().find(|program| program.key == *key) {
            return Arc::clone(&program.order);
        }
        let order = Arc::new(order);
        self.programs.push_front(Program { key: key.clone(), order: Arc::clone(&order) });
        if let Some(forgotten) = self.programs.get(PROGRAMS_MAX) {
            let key = forgotten.key.clone();
            self.programs.truncate(PROGRAMS_MAX);
            self.owned.retain(|(of, _)| *of != key);
        }
        order
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
        let unready = |program: &&Program| {
            let ready = self.owned.iter().filter(|(key, _)| *key == program.key).count();
            ready < self.options.ready_min.max(1)
        };
        let program = self.programs.iter().find(unready)?;
        Some(Missing::Prepared(program.key.clone(), Arc::clone(&program.order)))
    }

    /// What was missing has been made.
    pub(super) fn add(&mut self, missing: Missing, worker: Worker) {
        match missing {
            Missing::Standing => self.standing.push(worker),
            Missing::Prepared(key, _) => self.owned.push((key, worker)),
        }
    }

    /// What was missing cannot be made. A program that cannot be prepared is
    /// not tried again until somebody asks for it.
    pub(super) fn give_up(&mut self, missing: &Missing) {
        if let Missing::Prepared(key, _) = missing {
            self.programs.retain(|program| program.key != *key);
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
