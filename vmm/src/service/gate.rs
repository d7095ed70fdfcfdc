//! Who may run now.

use std::sync::Mutex;

use super::lock;

/// Counts runs, and takes none once the service drains.
#[derive(Debug, Default)]
pub(super) struct Gate(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    running: usize,
    draining: bool,
}

/// A run that may run. Dropped at its end.
#[derive(Debug)]
pub(super) struct Pass<'a>(&'a Gate);

impl Gate {
    /// Lets a run through, or not.
    pub(super) fn enter(&self) -> Option<Pass<'_>> {
        let mut state = lock(&self.0);
        if state.draining {
            return None;
        }
        state.running += 1;
        Some(Pass(self))
    }

    pub(super) fn drain(&self) {
        lock(&self.0).draining = true;
    }

    pub(super) fn is_draining(&self) -> bool {
        lock(&self.0).draining
    }

    pub(super) fn running(&self) -> usize {
        lock(&self.0).running
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        lock(&self.0.0).running -= 1;
    }
}
