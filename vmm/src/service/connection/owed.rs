//! What a client asked for and has not taken yet.

use std::sync::{Condvar, Mutex, PoisonError};

use super::super::peer::Peer;
use crate::locks::lock;

/// Unsent ends of one connection, each holding a thread, before nothing more of it is
/// read. Low enough that refusals to one user, over all its connections, cannot hold
/// all threads beside those of runs.
const UNTAKEN_MAX: usize = 8;
/// The same of the operator's: by a door come the runs of all its tenants, and what one
/// of them is sent slowly is not to keep others' orders from being read.
const UNTAKEN_BY_OPERATOR_MAX: usize = 64;

/// The ends of runs and the answers that are being sent to one client. One that asks
/// on and takes nothing would have a thread for everything that it asks.
#[derive(Debug)]
pub(super) struct Owed {
    untaken_max: usize,
    untaken: Mutex<usize>,
    taken_one: Condvar,
}

/// An end that its client is to take. Dropped when it is sent, or cannot be.
pub(super) struct Untaken<'a>(&'a Owed);

impl Drop for Untaken<'_> {
    fn drop(&mut self) {
        let mut untaken = lock(&self.0.untaken);
        *untaken -= 1;
        // Whoever reads next waits for that, and nobody else.
        if *untaken + 1 == self.0.untaken_max {
            self.0.taken_one.notify_one();
        }
    }
}

impl Owed {
    /// Nothing yet, to the operator or to somebody else.
    pub(super) fn to(peer: &Peer) -> Self {
        let untaken_max = if peer.is_operator() { UNTAKEN_BY_OPERATOR_MAX } else { UNTAKEN_MAX };
        Self { untaken_max, untaken: Mutex::default(), taken_one: Condvar::new() }
    }

    /// The end of a run or the answer to a question is to be sent now.
    pub(super) fn another(&self) -> Untaken<'_> {
        *lock(&self.untaken) += 1;
        Untaken(self)
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        *lock(&self.untaken)
    }

    /// Whether nothing more is to be read.
    pub(super) fn is_too_much(&self) -> bool {
        *lock(&self.untaken) >= self.untaken_max
    }

    /// Waits until it is not. All are sent in a bounded time, or the connection closes.
    pub(super) fn wait(&self) {
        let untaken = lock(&self.untaken);
        let waited = self.taken_one.wait_while(untaken, |untaken| *untaken >= self.untaken_max);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}
