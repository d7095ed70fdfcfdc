//! A lock whose waiters give up when their patience ends.

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::link::Patience;
use crate::locks::lock;

/// How often somebody who waits looks whether it is still wanted.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A value that one thread at a time has, each in its turn.
#[derive(Debug)]
pub(super) struct Turn<T> {
    /// Locked by whoever has the turn: nobody waits here for longer than another
    /// takes to give its own back.
    value: Mutex<T>,
    is_taken: Mutex<bool>,
    given_back: Condvar,
}

/// The turn, until it is dropped.
#[derive(Debug)]
pub(super) struct Taken<'a, T> {
    turn: &'a Turn<T>,
    value: MutexGuard<'a, T>,
}

impl<T> Turn<T> {
    pub(super) fn new(value: T) -> Self {
        Self { value: Mutex::new(value), is_taken: Mutex::new(false), given_back: Condvar::new() }
    }

    /// Waits for the turn, as long as patience lasts.
    ///
    /// # Errors
    /// `TimedOut`, or `ConnectionAborted` if nobody wants it any more.
    pub(super) fn take(&self, patience: Patience<'_>) -> io::Result<Taken<'_, T>> {
        let mut is_taken = lock(&self.is_taken);
        while *is_taken {
            if patience.is_cancelled() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            if patience.is_over() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let left = patience.until.map(|until| until.saturating_duration_since(Instant::now()));
            let time = left.map_or(LOOK_EVERY, |left| left.min(LOOK_EVERY));
            let waited = self.given_back.wait_timeout(is_taken, time);
            is_taken = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *is_taken = true;
        drop(is_taken);
        Ok(Taken { turn: self, value: lock(&self.value) })
    }
}

impl<T> Deref for Taken<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Taken<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        *lock(&self.turn.is_taken) = false;
        self.turn.given_back.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cancel::Cancel;

    #[test]
    fn who_waits_for_a_turn_leaves_when_its_time_is_over_or_it_is_wanted_no_more() {
        let turn = Turn::new(1);
        let mut taken = turn.take(Patience::default()).unwrap();
        *taken += 1;
        let short = Patience::until(Instant::now() + Duration::from_millis(5));
        assert_eq!(turn.take(short).unwrap_err().kind(), io::ErrorKind::TimedOut);
        let cancel = Cancel::new().unwrap();
        let patience = Patience { until: None, cancel: Some(&cancel) };
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| turn.take(patience).map(|value| *value));
            cancel.raise();
            assert_eq!(waits.join().unwrap().unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
            let waits = scope.spawn(|| turn.take(Patience::default()).map(|value| *value));
            drop(taken);
            assert_eq!(waits.join().unwrap().unwrap(), 2);
        });
        // One that panics in its turn leaves it to others.
        std::thread::scope(|scope| {
            let panics = scope.spawn(|| {
                let _taken = turn.take(Patience::default()).unwrap();
                panic!("in its turn");
            });
            panics.join().unwrap_err();
        });
        assert_eq!(*turn.take(Patience::default()).unwrap(), 2);
    }
}
