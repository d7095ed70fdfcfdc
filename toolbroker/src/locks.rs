//! Locks that outlive a panic: what each guards is whole between any two statements, so
//! that one thread's end is not the end of all others.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks it, whoever panicked with it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
