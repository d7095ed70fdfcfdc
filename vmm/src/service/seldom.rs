//! What others can bring about as often as they like, and the log says seldom.

use crate::locks::lock;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How long nothing more is said of it.
const SILENCE: Duration = Duration::from_secs(1);

/// One thing to say: at once when it begins, and at most once a second while it goes on.
#[derive(Debug)]
pub(super) struct Seldom(Mutex<Option<Instant>>);

impl Seldom {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Whether it is to be said now, which then is when it was said last.
    pub(super) fn is_due(&self) -> bool {
        self.is_due_at(Instant::now())
    }

    fn is_due_at(&self, now: Instant) -> bool {
        let mut said = lock(&self.0);
        let is_due = said.is_none_or(|said| now.saturating_duration_since(said) >= SILENCE);
        if is_due {
            *said = Some(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happens_again_and_again_is_said_at_once_and_then_once_a_second() {
        let (seldom, start) = (Seldom::new(), Instant::now());
        let said = (0..3_000).filter(|ms| seldom.is_due_at(start + Duration::from_millis(*ms)));
        assert_eq!(said.collect::<Vec<_>>(), [0, 1_000, 2_000]);
    }
}
