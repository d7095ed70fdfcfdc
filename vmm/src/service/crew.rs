//! The threads that read connections and carry out what comes.
//!
//! A thread that is free waits a while for the next connection before it
//! ends. There are at most so many, and some more for the operator alone; a
//! connection beyond waits for one that becomes free.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forge_log::Seldom;

use super::OPERATORS_OWN;
use super::connection::Connection;
use crate::locks::lock;

/// How long a thread without work stays.
const LINGER: Duration = Duration::from_secs(10);

/// The threads.
#[derive(Clone, Debug)]
pub(super) struct Crew(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    most: usize,
    /// Connections that nobody attends to yet: the operator's, which come first,
    /// and all others.
    operators: VecDeque<Arc<Connection>>,
    others: VecDeque<Arc<Connection>>,
    idle: usize,
    /// Of the threads, those that were started and have not looked yet.
    starting: usize,
    threads: usize,
    handed: u64,
}

impl Crew {
    pub(super) fn new(most: usize) -> Self {
        let state = Mutex::new(State { most, ..State::default() });
        Self(Arc::new(Shared { state, changed: Condvar::new() }))
    }

    /// So many, if that is more than before: those that are there may all have
    /// something to do.
    pub(super) fn grow(&self, most: usize) {
        let mut state = lock(&self.0.state);
        state.most = state.most.max(most);
        // What was for the operator alone may be for others now.
        self.0.changed.notify_all();
    }

    /// Has a thread attend to a connection that somebody has to read.
    pub(super) fn attend(&self, connection: Arc<Connection>) {
        let mut state = lock(&self.0.state);
        if connection.is_operators() {
            state.operators.push_back(connection);
        } else {
            state.others.push_back(connection);
        }
        state.handed += 1;
        if state.idle > 0 {
            self.0.changed.notify_one();
        }
        let starts = state.takes_thread();
        drop(state);
        if starts {
            self.start();
        }
    }

    /// Tries again to have a thread where there was none to be had.
    pub(super) fn look(&self) {
        if lock(&self.0.state).takes_thread() {
            self.start();
        }
    }

    /// Starts a thread that has its place already.
    fn start(&self) {
        let shared = Arc::clone(&self.0);
        let started =
            std::thread::Builder::new().name("client".into()).spawn(move || shared.work());
        if let Err(error) = started {
            let mut state = lock(&self.0.state);
            state.threads -= 1;
            state.starting -= 1;
            drop(state);
            // Another thread takes it when it is free, or [`Self::look`] finds one.
            static SAID: Seldom = Seldom::each_second();
            if SAID.is_due() {
                tracing::error!(%error, "no thread for a client");
            }
        }
    }

    /// Whether a connection waits for a thread.
    pub(super) fn is_short(&self) -> bool {
        lock(&self.0.state).waiting() > 0
    }

    /// How often a connection was handed to a thread.
    pub(super) fn handed(&self) -> u64 {
        lock(&self.0.state).handed
    }

    /// How many threads there are.
    pub(super) fn threads(&self) -> usize {
        lock(&self.0.state).threads
    }
}

impl State {
    fn waiting(&self) -> usize {
        self.operators.len() + self.others.len()
    }

    /// Whether more wait than have a thread, and there may be another for one of them,
    /// which has its place then.
    fn takes_thread(&mut self) -> bool {
        let most = self.most + if self.operators.is_empty() { 0 } else { OPERATORS_OWN };
        let takes = self.waiting() > self.idle + self.starting && self.threads < most;
        if takes {
            self.threads += 1;
            self.starting += 1;
        }
        takes
    }

    /// The next connection for a thread that has nothing to do. While more than the usual
    /// number of threads are busy, this one included, only the operator's connections are
    /// served, whatever caused the threads beyond it to be started.
    fn next(&mut self) -> Option<Arc<Connection>> {
        let next = self.operators.pop_front();
        let busy = self.threads - self.idle;
        if next.is_some() || busy > self.most { next } else { self.others.pop_front() }
    }
}

/// A thread's place among those that there are, given back however it ends.
struct Place<'a>(&'a Shared);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).threads -= 1;
    }
}

impl Shared {
    fn work(&self) {
        let place = Place(self);
        let mut state = lock(&self.state);
        state.starting -= 1;
        let mut next = self.next(state);
        while let Some(connection) = next {
            // A bug of ours costs one connection.
            let attended = catch_unwind(AssertUnwindSafe(|| connection.attend()));
            if attended.is_err() {
                // Before anything else that may fail.
                connection.close();
                tracing::error!("a thread panicked, which is a bug; its client is cut off");
            }
            next = self.next(lock(&self.state));
        }
        // `next` has given the place back already, under the lock with which it found
        // nothing to do.
        std::mem::forget(place);
    }

    /// The next connection, or `None` if none came for a while.
    fn next(&self, mut state: MutexGuard<'_, State>) -> Option<Arc<Connection>> {
        loop {
            if let Some(connection) = state.next() {
                return Some(connection);
            }
            state.idle += 1;
            let waited = self.changed.wait_timeout(state, LINGER);
            let timed_out;
            (state, timed_out) = {
                let (state, out) = waited.unwrap_or_else(PoisonError::into_inner);
                (state, out.timed_out())
            };
            state.idle -= 1;
            if timed_out {
                // Whoever came just now is not left to nobody.
                let next = state.next();
                if next.is_none() {
                    state.threads -= 1;
                }
                return next;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Weak;

    use super::super::peer::Peer;
    use super::*;

    #[test]
    fn a_thread_that_panics_gives_its_place_back() {
        let crew = Crew::new(1);
        lock(&crew.0.state).threads = 1;
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _place = Place(&crew.0);
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        assert_eq!(crew.threads(), 0);
    }

    #[test]
    fn a_connection_that_a_thread_was_started_for_has_no_second_one_started() {
        let (_client, ours) = UnixStream::pair().unwrap();
        let stranger = Connection::accept(Weak::new(), 1, ours, Peer::Stranger).unwrap();
        let mut state = State { most: 4, ..State::default() };
        state.others.push_back(stranger);
        assert!(state.takes_thread());
        assert!(!state.takes_thread(), "one is on its way");
    }

    #[test]
    fn threads_on_top_are_for_the_operators_connections_alone() {
        let (_client, ours) = UnixStream::pair().unwrap();
        let connects = |number, peer| {
            let socket = ours.try_clone().unwrap();
            Connection::accept(Weak::new(), number, socket, peer).unwrap()
        };
        let mut state = State { most: 2, threads: 2, ..State::default() };
        state.others.push_back(connects(1, Peer::Stranger));
        assert!(!state.takes_thread());
        let operators = connects(2, Peer::Operator);
        state.operators.push_back(Arc::clone(&operators));
        assert!(state.takes_thread());
        // It has begun.
        state.starting -= 1;
        assert!(Arc::ptr_eq(&state.next().unwrap(), &operators));
        // It is done with that.
        assert!(state.next().is_none());
        state.idle += 1;
        assert!(state.next().is_some(), "another is, and took no thread of the operator's");
        state.threads = state.most + OPERATORS_OWN;
        state.operators.push_back(operators);
        assert!(!state.takes_thread());
    }
}
