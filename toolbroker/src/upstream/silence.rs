//! Whether a program that says nothing is stuck, or at work.
//!
//! A server that ends is seen to end. One that stops reading stands for ever, and whatever
//! it is asked waits for its own deadline. Its list of tools, which any server can tell at
//! once but one that does a call at a time and is at one, shows which it is.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use crate::locks::lock;
use tokio::time::Instant;

/// How long one may leave all that it is asked unanswered and say nothing else, its list of
/// tools among it.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// What a server is asked and has not answered: since when.
#[derive(Debug, Default)]
pub(super) struct Unanswered(Mutex<Asked>);

#[derive(Debug, Default)]
struct Asked {
    next: u64,
    since: BTreeMap<u64, Instant>,
    /// When it was asked first of what it was asked since it was last heard of.
    in_silence: Option<Instant>,
}

/// A question that somebody waits for. Dropped when it is answered or given up.
pub(super) struct Question<'a> {
    unanswered: &'a Unanswered,
    number: u64,
}

impl Unanswered {
    fn asked(&self) -> MutexGuard<'_, Asked> {
        lock(&self.0)
    }

    /// It is asked something now.
    pub(super) fn ask(&self, last_heard: Instant) -> Question<'_> {
        self.ask_at(Instant::now(), last_heard)
    }

    fn ask_at(&self, since: Instant, last_heard: Instant) -> Question<'_> {
        let mut asked = self.asked();
        // Who is asked nothing is not silent.
        asked.in_silence = asked.in_silence.filter(|it| *it > last_heard).or(Some(since));
        let number = asked.next;
        asked.next += 1;
        asked.since.insert(number, since);
        Question { unanswered: self, number }
    }

    /// Whether it is stuck that was asked for its list at this time, did not answer, and
    /// was last heard of then: not while it may be at something that it was asked before.
    pub(super) fn is_stuck(&self, list_asked: Instant, last_heard: Instant, now: Instant) -> bool {
        let asked = self.asked();
        let oldest = asked.since.first_key_value().map(|(_, since)| *since);
        let may_be_at_work = oldest.is_some_and(|since| since < list_asked);
        let is_long = asked.in_silence.is_some_and(|it| now - it >= SILENCE_MAX);
        !may_be_at_work && last_heard < list_asked && is_long
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
    fn who_leaves_unanswered_all_that_it_is_asked_beside_nothing_from_before_is_stuck() {
        let unanswered = Unanswered::default();
        let last_heard = Instant::now();
        let asked = last_heard + Duration::from_secs(1);
        let list_asked = asked + SILENCE_MAX;
        let now = list_asked + Duration::from_secs(10);
        let call = unanswered.ask_at(asked, last_heard);
        let _list = unanswered.ask_at(list_asked, last_heard);
        assert!(!unanswered.is_stuck(list_asked, last_heard, now), "it may be at the call");
        drop(call);
        assert!(unanswered.is_stuck(list_asked, last_heard, now));
        let _other = unanswered.ask_at(now, last_heard);
        assert!(unanswered.is_stuck(list_asked, last_heard, now), "what came later is no excuse");
        assert!(!unanswered.is_stuck(list_asked, now, now), "it said something");
    }

    #[test]
    fn who_was_asked_nothing_for_long_has_its_time_for_the_list() {
        let unanswered = Unanswered::default();
        let last_heard = Instant::now();
        let list_asked = last_heard + 100 * SILENCE_MAX;
        drop(unanswered.ask_at(last_heard - Duration::from_secs(1), last_heard));
        drop(unanswered.ask_at(list_asked, last_heard));
        let given_up = list_asked + Duration::from_secs(10);
        assert!(!unanswered.is_stuck(list_asked, last_heard, given_up));
        // And for the next.
        let again = list_asked + SILENCE_MAX;
        drop(unanswered.ask_at(again, last_heard));
        assert!(unanswered.is_stuck(again, last_heard, again + Duration::from_secs(10)));
    }
}
