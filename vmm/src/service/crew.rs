//! The threads that read connections and carry out what comes.
//!
//! A thread that is free waits a while for the next connection before it
//! ends. There are at most so many, and some more for the operator alone; a
//! connection beyond waits for one that becomes free.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::connection::Connection;
use super::{OPERATORS_OWN, lock};

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
    /// Connections that nobody attends to yet.
    waiting: VecDeque<Arc<Connection>>,
    idle: usize,
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
    }

    /// Has a thread attend to a connection that somebody has to read.
    pub(super) fn attend(&self, connection: Arc<Connection>) {
        let mut state = lock(&self.0.state);
        // The operator may be there to see what all the others do, or to end it.
        let place = if connection.is_operators() {
            state.waiting.iter().take_while(|before| before.is_operators()).count()
        } else {
            state.waiting.len()
        };
        state.waiting.insert(place, connection);
        state.handed += 1;
        if state.idle >= state.waiting.len() {
            self.0.changed.notify_one();
        } else if state.has_room() {
            self.start(state);
        }
    }

    /// Tries again to have a thread where there was none to be had.
    pub(super) fn look(&self) {
        let state = lock(&self.0.state);
        if state.waiting.len() > state.idle && state.has_room() {
            self.start(state);
        }
    }

    fn start(&self, mut state: MutexGuard<'_, State>) {
        state.threads += 1;
        drop(state);
        let shared = Arc::clone(&self.0);
        let started =
            std::thread::Builder::new().name("client".into()).spawn(move || shared.work());
        if let Err(error) = started {
            lock(&self.0.state).threads -= 1;
            // Another thread takes it when it is free, or [`Self::look`] finds one.
            tracing::error!(%error, "no thread for a client");
        }
    }

    /// Whether a connection waits for a thread.
    pub(super) fn is_short(&self) -> bool {
        !lock(&self.0.state).waiting.is_empty()
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
    /// Whether there may be another thread for whoever waits first.
    fn has_room(&self) -> bool {
        let own = self.waiting.front().is_some_and(|first| first.is_operators());
        self.threads < self.most + if own { OPERATORS_OWN } else { 0 }
    }
}

impl Shared {
    fn work(&self) {
        while let Some(connection) = self.next() {
            // A bug of ours costs one connection.
            let attended = catch_unwind(AssertUnwindSafe(|| connection.attend()));
            if attended.is_err() {
                tracing::error!("a thread panicked, which is a bug; its client is cut off");
                connection.close();
            }
        }
    }

    /// The next connection, or `None` if none came for a while.
    fn next(&self) -> Option<Arc<Connection>> {
        let mut state = lock(&self.state);
        loop {
            if let Some(connection) = state.waiting.pop_front() {
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
            if timed_out && state.waiting.is_empty() {
                state.threads -= 1;
                return None;
            }
        }
    }
}
