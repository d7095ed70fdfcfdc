//! The shelves as threads share them: runs take from them and give back, and the
//! filling thread waits for something to do.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forge_protocol::limits::RunLimits;

use super::PoolOptions;
use super::shelves::{Key, Shelves};
use super::worker::Worker;
use crate::locks::lock;
use crate::machine;

/// The shelves, by one thread at a time.
#[derive(Debug)]
pub(super) struct Stock {
    shelves: Mutex<Shelves>,
    changed: Condvar,
    usual_ram_bytes: usize,
}

impl Stock {
    pub(super) fn new(options: PoolOptions) -> Self {
        Self {
            shelves: Mutex::new(Shelves::new(options)),
            changed: Condvar::new(),
            usual_ram_bytes: machine::ram_bytes(&RunLimits::default()),
        }
    }

    /// The RAM of a VM that stands ready for whoever comes.
    pub(super) fn usual_ram_bytes(&self) -> usize {
        self.usual_ram_bytes
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Shelves> {
        lock(&self.shelves)
    }

    /// Gives the shelves to others until something may be to be done, or for so long.
    pub(super) fn wait<'a>(
        &self,
        shelves: MutexGuard<'a, Shelves>,
        time: Duration,
    ) -> MutexGuard<'a, Shelves> {
        let waited = self.changed.wait_timeout(shelves, time);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// A worker from the shelves. What takes its place is made when its run is
    /// over, or within a second, so that it is not made beside the run; at once
    /// only if nothing is left for the next who comes.
    pub(super) fn take(&self, key: &Key) -> Option<Worker> {
        let usual = self.is_usual(key);
        let mut shelves = self.lock();
        let worker = shelves.take(key, usual);
        let urgent = shelves.is_bare(key);
        drop(shelves);
        if urgent {
            self.changed.notify_one();
        }
        worker
    }

    /// One that was taken and was given no run. Gives it back if there is no more room
    /// for it.
    pub(super) fn put_back(&self, key: &Key, worker: Worker) -> Option<Worker> {
        let usual = self.is_usual(key);
        self.lock().put_back(key, worker, usual)
    }

    /// After a run, however it went.
    pub(super) fn resume_filling(&self) {
        if self.lock().has_work() {
            self.changed.notify_one();
        }
    }

    /// Nothing is to be made from now on.
    pub(super) fn close(&self) {
        self.lock().close();
        self.changed.notify_all();
    }

    fn is_usual(&self, key: &Key) -> bool {
        key.ram_bytes == self.usual_ram_bytes
    }
}
