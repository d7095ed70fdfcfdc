//! What a pool hears of workers that it loses, and of those that it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forge_protocol::worker::{Reuse, VmFailure, VmFailureKind};

use super::worker::Worker;

/// How long it is listened to workers that are ended together. What an honest one
/// says is there at once.
const HEARD_TIME_MAX: Duration = Duration::from_millis(20);

/// The losses of a pool. Its clone counts on where it has got to.
#[derive(Clone, Debug)]
pub(super) struct Losses {
    /// What becomes of a VM after its run.
    reuse: Reuse,
    /// Of this pool and those that it succeeded.
    resets_disproven: Arc<AtomicU64>,
}

impl Losses {
    pub(super) fn new(reuse: Reuse) -> Self {
        Self { reuse, resets_disproven: Arc::default() }
    }

    /// How many resets were found by their proof to have left something behind.
    pub(super) fn resets_disproven(&self) -> u64 {
        self.resets_disproven.load(Ordering::Relaxed)
    }

    /// A worker was lost before it had a run, which another gets. That is no
    /// reason for silence if its last reset was not one, or if it tried what
    /// its jail forbids.
    pub(super) fn note(&self, failure: &VmFailure) {
        match failure.kind {
            VmFailureKind::NotReset => {
                self.resets_disproven.fetch_add(1, Ordering::Relaxed);
                tracing::error!(reason = failure.message, "a VM that was reset is not as it was");
            }
            VmFailureKind::WorkerBroke => {
                tracing::error!(reason = failure.message, "a worker was lost between two runs");
            }
            _ => {}
        }
    }

    /// Ends workers that nobody needs, and hears what they have to say. One whose
    /// run is over and that is not put back has nothing to.
    pub(super) fn end(&self, workers: impl IntoIterator<Item = Worker>) {
        let until = Instant::now() + HEARD_TIME_MAX;
        for worker in workers {
            let is_over = self.reuse == Reuse::Fresh && worker.runs() > 0;
            if !is_over && worker.speaks() {
                self.note(&worker.last_word(until));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reset_that_was_disproven_is_counted_and_other_losses_are_not() {
        let losses = Losses::new(Reuse::Fresh);
        let lost = |kind| losses.note(&VmFailure::new(kind, "gone"));
        lost(VmFailureKind::WorkerLost);
        assert_eq!(losses.resets_disproven(), 0);
        lost(VmFailureKind::NotReset);
        assert_eq!(losses.resets_disproven(), 1);
    }
}
