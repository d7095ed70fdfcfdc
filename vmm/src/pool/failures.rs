//! Failures of something that is tried again and again, and when to tell of them.

use std::time::{Duration, Instant};

/// How long nothing is said of the same failure at first.
const SILENCE_MIN: Duration = Duration::from_secs(1);
/// How long nothing is said of it at most.
const SILENCE_MAX: Duration = Duration::from_secs(300);

/// Failures one after another. What is the same again is said seldomer each time.
#[derive(Default)]
pub(super) struct Failures {
    said: Option<(String, Instant)>,
    silence: Duration,
}

impl Failures {
    /// Whether it is to be said now, which then is when it was said last.
    pub(super) fn is_due(&mut self, why: &str, now: Instant) -> bool {
        match &self.said {
            // Whatever it is about: reasons may take turns.
            Some((_, at)) if now.saturating_duration_since(*at) < SILENCE_MIN => return false,
            Some((before, at)) if before == why => {
                if now.saturating_duration_since(*at) < self.silence {
                    return false;
                }
                self.silence = (2 * self.silence).min(SILENCE_MAX);
            }
            _ => self.silence = SILENCE_MIN,
        }
        self.said = Some((why.to_owned(), now));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_cannot_be_filled_says_the_same_seldomer_each_time() {
        let (mut failures, start) = (Failures::default(), Instant::now());
        let at = |s| start + Duration::from_secs(s);
        let said = (0..100).filter(|s| failures.is_due("no KVM", at(*s)));
        assert_eq!(said.collect::<Vec<_>>(), [0, 1, 3, 7, 15, 31, 63]);
        assert!(failures.is_due("no memory", at(100)), "another reason");
        let soon = at(100) + Duration::from_millis(999);
        assert!(!failures.is_due("no KVM", soon) && !failures.is_due("no memory", soon));
        assert!(failures.is_due("no KVM", at(101)));
    }
}
