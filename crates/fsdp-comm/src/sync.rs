//! Locks that go on after a panic (what they protect is consistent at every moment at which a
//! thread may panic), and waits for other threads.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// The number of times that a thread lets others run before it sleeps. So many turns take about as
/// long as falling asleep and being woken.
const YIELDS: usize = 20;

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

/// Lets other threads run for some microseconds. Returns `true` as soon as `is_ready` does, and
/// `false` if it has not by then: the thread should sleep.
///
/// Ranks often make a change within microseconds of each other. While a thread sleeps its core may
/// be idle, and waking an idle core takes longer than the change.
pub(crate) fn ready_within_yields(is_ready: impl Fn() -> bool) -> bool {
    for _ in 0..YIELDS {
        if is_ready() {
            return true;
        }
        thread::yield_now();
    }
    is_ready()
}
