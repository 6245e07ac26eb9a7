//! Locks that go on after a panic: what they protect is consistent at every moment at which a
//! thread may panic.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Locks a mutex, also if a thread has panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification of `condvar`, but no longer than `timeout`. It may return earlier
/// without one, so callers check their condition in a loop. A panic of another thread that held the
/// lock is ignored, as in [`lock`].
pub(crate) fn wait_timeout<'g, T>(
    condvar: &Condvar,
    guard: MutexGuard<'g, T>,
    timeout: Duration,
) -> MutexGuard<'g, T> {
    condvar
        .wait_timeout(guard, timeout)
        .unwrap_or_else(PoisonError::into_inner)
        .0
}
