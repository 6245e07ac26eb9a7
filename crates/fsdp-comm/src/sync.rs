//! Locks that go on after a panic (what they protect is consistent at every moment at which a
//! thread may panic), and waits for other threads.

use std::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The number of times that a thread lets others run before it sleeps. Where other threads want to
/// run, so many turns take about as long as falling asleep and being woken.
const YIELDS: usize = 20;

/// The least time for which a thread lets others run before it sleeps. Where nobody wants to run,
/// all turns together take a few microseconds. A thread that slept after them would have to be
/// woken, and the one that wakes it would sleep by the time it answers: two ranks would do nothing
/// else.
const YIELD_TIME: Duration = Duration::from_micros(50);

/// The longest time that a yield takes if the core goes to threads that pass messages. A thread
/// that computes keeps the core for longer.
const LATE: Duration = Duration::from_millis(2);

/// The number of waits after a late yield in which a thread sleeps at once.
const SKIPPED_WAITS: u32 = 500;

thread_local! {
    /// The number of waits in which this thread still sleeps at once.
    static WAITS_TO_SKIP: Cell<u32> = const { Cell::new(0) };
}

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

/// Lets other threads run, at least [`YIELDS`] times and for [`YIELD_TIME`]. Returns `true` as soon
/// as `is_ready` does, and `false` if it has not by then: the thread should sleep.
///
/// Ranks often make a change within microseconds of each other. While a thread sleeps its core may
/// be idle, and waking an idle core takes longer than the change.
///
/// A thread that is woken can interrupt one that computes, but a thread that has yielded to it gets
/// the core back only after milliseconds. So a thread does not yield in the [`SKIPPED_WAITS`] waits
/// after a yield that took longer than [`LATE`].
pub(crate) fn ready_within_yields(is_ready: impl Fn() -> bool) -> bool {
    let waits_to_skip = WAITS_TO_SKIP.get();
    if waits_to_skip > 0 {
        WAITS_TO_SKIP.set(waits_to_skip - 1);
        return is_ready();
    }
    let begun = Instant::now();
    let mut now = begun;
    let mut yields = 0;
    while yields < YIELDS || now - begun < YIELD_TIME {
        if is_ready() {
            return true;
        }
        thread::yield_now();
        yields += 1;
        let before = now;
        now = Instant::now();
        if now - before > LATE {
            WAITS_TO_SKIP.set(SKIPPED_WAITS);
            break;
        }
    }
    is_ready()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_does_not_yield_in_the_waits_after_a_late_yield() {
        let questions = || {
            let asked = Cell::new(0);
            assert!(!ready_within_yields(|| {
                asked.set(asked.get() + 1);
                false
            }));
            asked.get()
        };
        WAITS_TO_SKIP.set(2);
        assert_eq!([questions(), questions()], [1, 1]);
        assert_eq!(WAITS_TO_SKIP.get(), 0);
        let begun = Instant::now();
        let asked = questions();
        let has_yielded = asked > YIELDS && begun.elapsed() >= YIELD_TIME;
        // Unless the machine is busy, so that a yield is late.
        assert!(
            has_yielded || WAITS_TO_SKIP.get() == SKIPPED_WAITS,
            "{asked}"
        );
        assert!(ready_within_yields(|| true));
    }
}
