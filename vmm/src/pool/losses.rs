//! What a pool hears of workers that it loses, and of those that it ends.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forge_protocol::worker::{Reuse, VmFailure, VmFailureKind};

use super::worker::Worker;

/// How long workers that are ended together are listened to. What an honest one
/// says is there at once.
const HEARD_TIME_MAX: Duration = Duration::from_millis(20);
/// How long each of them is at least: one that begins a word and does not
/// end it takes the others' time, and not their last words.
const HEARD_TIME_LEAST: Duration = Duration::from_millis(1);

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

    /// Records that a worker was lost. What must not go unseen even if another worker takes
    /// over the run is logged here: a reset that did not put everything back, or was not
    /// made, and a system call that the jail forbids. Returns whether this was one of them.
    pub(super) fn tell(&self, failure: &VmFailure) -> bool {
        match failure.kind {
            VmFailureKind::NotReset => {
                self.resets_disproven.fetch_add(1, Ordering::Relaxed);
                tracing::error!(reason = failure.message, "a VM that was reset is not as it was");
            }
            VmFailureKind::WorkerBroke => {
                tracing::error!(reason = failure.message, "a worker was lost between two runs");
            }
            // As it is meant to be.
            VmFailureKind::TooChanged => {
                tracing::info!(reason = failure.message, "a VM is let go instead of reset");
            }
            _ => return false,
        }
        true
    }

    /// Ends workers that nobody needs, and hears what they have to say. One whose
    /// run is over and that is not put back has nothing to.
    pub(super) fn end(&self, workers: impl IntoIterator<Item = Worker>) {
        let ear = Ear::new();
        for worker in workers {
            let is_over = self.reuse == Reuse::Fresh && worker.runs() > 0;
            if !is_over && worker.speaks() {
                self.tell(&worker.last_word(ear.until()));
            }
        }
    }

    /// Ends workers that computed while they waited for a run.
    pub(super) fn end_restless(&self, workers: Vec<Worker>) {
        if !workers.is_empty() {
            let workers = workers.len();
            tracing::error!(workers, "workers that waited for a run used the CPU, and are ended");
        }
    }

    /// Ends workers that stood ready and have something to say, which is why they are
    /// of no further use. Those that say the same, as when all are killed, are told
    /// together.
    pub(super) fn end_speaking(&self, workers: Vec<Worker>) {
        let ear = Ear::new();
        let mut untold = BTreeMap::<_, usize>::new();
        for worker in workers {
            let failure = worker.last_word(ear.until());
            if !self.tell(&failure) {
                *untold.entry(failure.message).or_default() += 1;
            }
        }
        for (reason, workers) in untold {
            tracing::warn!(workers, reason, "workers that stood ready have ended");
        }
    }
}

/// How long workers that are ended together are listened to.
struct Ear(Instant);

impl Ear {
    fn new() -> Self {
        Self(Instant::now() + HEARD_TIME_MAX)
    }

    /// Until when the next one is.
    fn until(&self) -> Instant {
        self.0.max(Instant::now() + HEARD_TIME_LEAST)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use forge_protocol::worker::Ready;

    use super::*;
    use crate::pool::worker::tests::{say, standing};

    /// What is logged of the end of workers that stood ready, if nobody asked for more
    /// than warnings.
    fn warned_of(workers: Vec<Worker>) -> String {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let log = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::WARN)
            .with_ansi(false)
            .with_writer(Arc::new(ours))
            .finish();
        tracing::subscriber::with_default(log, || Losses::new(Reuse::Fresh).end_speaking(workers));
        let mut said = String::new();
        theirs.read_to_string(&mut said).unwrap();
        said
    }

    #[test]
    fn a_vm_that_is_let_go_as_too_much_changed_is_no_warning() {
        let (worker, mut theirs) = standing();
        let failure = VmFailure::new(VmFailureKind::TooChanged, "1300 pages have changed");
        say(&mut theirs, &Ready::Err(failure));
        assert_eq!(warned_of(vec![worker]), "");
    }

    #[test]
    fn workers_that_ended_while_they_stood_ready_are_a_warning_which_says_why() {
        let gone = (0..3).map(|_| standing().0);
        let (fails, mut theirs) = standing();
        say(&mut theirs, &Ready::Err(VmFailure::new(VmFailureKind::Unavailable, "KVM: no")));
        let said = warned_of(gone.chain([fails]).collect());
        let lines: Vec<_> = said.lines().collect();
        let [kvm, gone] = lines[..] else { panic!("{said}") };
        assert!(kvm.contains("workers=1 reason=\"KVM: no\""), "{said}");
        assert!(gone.contains("workers=3 reason=\"the worker ended without a report"), "{said}");
    }

    #[test]
    fn a_worker_that_ends_no_word_takes_no_other_its_last_one() {
        let (hangs, mut begins) = standing();
        begins.write_all(&[1]).unwrap();
        let (lies, mut theirs) = standing();
        say(&mut theirs, &crate::pool::worker::tests::not_reset());
        let losses = Losses::new(Reuse::Fresh);
        losses.end_speaking(vec![hangs, lies]);
        assert_eq!(losses.resets_disproven(), 1);
    }

    #[test]
    fn a_reset_that_was_disproven_is_counted_and_other_losses_are_not() {
        let losses = Losses::new(Reuse::Fresh);
        let lost = |kind| losses.tell(&VmFailure::new(kind, "gone"));
        lost(VmFailureKind::WorkerLost);
        assert_eq!(losses.resets_disproven(), 0);
        lost(VmFailureKind::NotReset);
        assert_eq!(losses.resets_disproven(), 1);
    }
}
