//! Locks that go on after a panic: what they protect is consistent at every moment at which a
//! thread may panic.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Locks a mutex, also if a thread has panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification, but no longer than `limit`.
pub(crate) fn wait_timeout<'g, T>(
    changed: &Condvar,
    guard: MutexGuard<'g, T>,
    limit: Duration,
) -> MutexGuard<'g, T> {
    changed
        .wait_timeout(guard, limit)
        .unwrap_or_else(PoisonError::into_inner)
        .0
}
