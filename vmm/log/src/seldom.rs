//! What happens again and again, and is told seldom.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long nothing is said of the same at first.
const SILENCE_MIN: Duration = Duration::from_secs(1);
/// How long nothing is said of the same failure at most.
const FAILURE_SILENCE_MAX: Duration = Duration::from_secs(300);

/// One thing to say that others can bring about as often as they like, or that fails as
/// often as it is tried. It is said at once when it begins.
#[derive(Debug)]
pub struct Seldom {
    silence_max: Duration,
    said: Mutex<Option<Said>>,
}

/// What was said last.
#[derive(Debug)]
struct Said {
    reason: String,
    at: Instant,
    /// How long nothing is said of the same.
    silence: Duration,
}

impl Seldom {
    /// At most once a second while it goes on.
    #[must_use]
    pub const fn each_second() -> Self {
        Self { silence_max: SILENCE_MIN, said: Mutex::new(None) }
    }

    /// Of a failure of what is tried again and again: at most once a second, and what is
    /// the same again half as often each time, at last every five minutes.
    #[must_use]
    pub const fn failing() -> Self {
        Self { silence_max: FAILURE_SILENCE_MAX, said: Mutex::new(None) }
    }

    /// Whether it is to be said now, which then is when it was said last.
    pub fn is_due(&self) -> bool {
        self.is_due_for("")
    }

    /// The same of something with a reason: another one is not the same again.
    pub fn is_due_for(&self, reason: &str) -> bool {
        self.is_due_at(reason, Instant::now())
    }

    fn is_due_at(&self, reason: &str, now: Instant) -> bool {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let mut silence = SILENCE_MIN;
        if let Some(said) = &*said {
            let since = now.saturating_duration_since(said.at);
            // Whatever it is about: reasons may take turns.
            if since < SILENCE_MIN {
                return false;
            }
            if said.reason == reason {
                if since < said.silence {
                    return false;
                }
                silence = (2 * said.silence).min(self.silence_max);
            }
        }
        *said = Some(Said { reason: reason.to_owned(), at: now, silence });
        true
    }

    /// It goes well again, and the next time is a first one. Whether anything was said.
    pub fn end(&self) -> bool {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happens_again_and_again_is_said_at_once_and_then_once_a_second() {
        let (seldom, start) = (Seldom::each_second(), Instant::now());
        let due = |ms: &u64| seldom.is_due_at("", start + Duration::from_millis(*ms));
        assert_eq!((0..3_000).filter(due).collect::<Vec<_>>(), [0, 1_000, 2_000]);
    }

    #[test]
    fn a_failure_that_is_the_same_again_is_said_less_and_less_often() {
        let (failures, start) = (Seldom::failing(), Instant::now());
        let at = |s| start + Duration::from_secs(s);
        let said = (0..100).filter(|s| failures.is_due_at("no KVM", at(*s)));
        assert_eq!(said.collect::<Vec<_>>(), [0, 1, 3, 7, 15, 31, 63]);
        assert!(failures.is_due_at("no memory", at(100)), "another reason");
        let soon = at(100) + Duration::from_millis(999);
        assert!(!failures.is_due_at("no KVM", soon) && !failures.is_due_at("no memory", soon));
        assert!(failures.is_due_at("no KVM", at(101)));
        // Five minutes at most.
        let said = (102..2_000).filter(|s| failures.is_due_at("no KVM", at(*s)));
        let said: Vec<_> = said.collect();
        assert_eq!(said.windows(2).map(|two| two[1] - two[0]).max(), Some(300), "{said:?}");
        assert!(failures.end() && !failures.end());
        assert!(failures.is_due_at("no KVM", at(2_000)));
    }
}
