//! Whether a program that says nothing is stuck, or at work.
//!
//! A server that ends is seen to end. One that stops reading stands for ever, and whatever
//! it is asked waits for its own deadline. Its list of tools, which any server can tell at
//! once but one that does a call at a time and is at one, shows which it is.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How long nothing may be heard of one that leaves its list of tools unanswered.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// What a server is asked and has not answered: since when.
#[derive(Debug, Default)]
pub(super) struct Unanswered(Mutex<Asked>);

#[derive(Debug, Default)]
struct Asked {
    next: u64,
    since: BTreeMap<u64, Instant>,
}

/// A question that somebody waits for. Dropped when it is answered or given up.
pub(super) struct Question<'a> {
    unanswered: &'a Unanswered,
    number: u64,
}

impl Unanswered {
    fn asked(&self) -> MutexGuard<'_, Asked> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is asked something now.
    pub(super) fn ask(&self) -> Question<'_> {
        self.ask_at(Instant::now())
    }

    fn ask_at(&self, since: Instant) -> Question<'_> {
        let mut asked = self.asked();
        let number = asked.next;
        asked.next += 1;
        asked.since.insert(number, since);
        Question { unanswered: self, number }
    }

    /// Whether it is stuck that was asked for its list at this time, did not answer, and
    /// was last heard of then: not while it may be at something that it was asked before.
    pub(super) fn is_stuck(&self, list_asked: Instant, last_heard: Instant, now: Instant) -> bool {
        let oldest = self.asked().since.first_key_value().map(|(_, since)| *since);
        let may_be_at_work = oldest.is_some_and(|since| since < list_asked);
        !may_be_at_work && last_heard < list_asked && now - last_heard >= SILENCE_MAX
    }
}

impl Drop for Question<'_> {
    fn drop(&mut self) {
        self.unanswered.asked().since.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_silent_beside_nothing_that_it_was_asked_before_is_stuck() {
        let unanswered = Unanswered::default();
        let last_heard = Instant::now();
        let list_asked = last_heard + SILENCE_MAX;
        let now = list_asked + Duration::from_secs(10);
        let call = unanswered.ask_at(last_heard);
        let _list = unanswered.ask_at(list_asked);
        assert!(!unanswered.is_stuck(list_asked, last_heard, now), "it may be at the call");
        drop(call);
        assert!(unanswered.is_stuck(list_asked, last_heard, now));
        let _other = unanswered.ask_at(now);
        assert!(unanswered.is_stuck(list_asked, last_heard, now), "what came later is no excuse");
        assert!(!unanswered.is_stuck(list_asked, now, now), "it said something");
        let lately = now - SILENCE_MAX / 2;
        assert!(!unanswered.is_stuck(list_asked, lately, now));
    }
}
