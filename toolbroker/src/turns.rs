//! Turns at what there is not enough of, so many for each principal, so that
//! none keeps the others waiting.
//!
//! Deliberately absent is a bound on all of them together: that is a semaphore
//! beside this one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use crate::locks::lock;
use tokio::sync::Semaphore;

/// Turns of each principal that has one or waits for one.
#[derive(Debug)]
pub(crate) struct Turns {
    each: usize,
    all: Mutex<HashMap<Arc<str>, Weak<Semaphore>>>,
}

impl Turns {
    /// So many for each.
    pub(crate) fn new(each: usize) -> Self {
        Self { each, all: Mutex::default() }
    }

    /// Those of one principal, which are never closed.
    pub(crate) fn of(&self, principal: &Arc<str>) -> Arc<Semaphore> {
        let mut all = lock(&self.all);
        if let Some(turns) = all.get(principal).and_then(Weak::upgrade) {
            return turns;
        }
        all.retain(|_, turns| turns.strong_count() > 0);
        let turns = Arc::new(Semaphore::new(self.each));
        all.insert(Arc::clone(principal), Arc::downgrade(&turns));
        turns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_principal_has_its_own_turns_and_leaves_nothing_behind() {
        let turns = Turns::new(3);
        let (alice, bob): (Arc<str>, Arc<str>) = ("alice".into(), "bob".into());
        let of_alice = turns.of(&alice);
        let taken: Vec<_> =
            std::iter::from_fn(|| Arc::clone(&of_alice).try_acquire_owned().ok()).collect();
        assert_eq!(taken.len(), 3);
        assert!(turns.of(&alice).try_acquire().is_err(), "they are the same ones");
        assert!(turns.of(&bob).try_acquire().is_ok());
        drop((of_alice, taken));
        let _bob = turns.of(&bob);
        assert_eq!(turns.all.lock().unwrap().len(), 1);
    }
}
