//! Runs the same function over many items on several threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Builder;

use tracing::Span;

use crate::error::FileError;

/// Returns how many threads to use by default: one for each core, up to four. More do not make a
/// disk faster.
pub fn default_threads() -> usize {
    // Counting the cores reads several files of the system, so they are counted once.
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS
        .get_or_init(|| std::thread::available_parallelism().map_or(1, |cores| cores.get().min(4)))
}

/// Locks a mutex. A thread that panicked while it held the lock does not matter: its panic reaches
/// whoever waits for the thread.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the content of a mutex that no other thread uses any more, as [`lock`] does.
pub(crate) fn unlocked<T>(mutex: Mutex<T>) -> T {
    mutex.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` on each item by several threads, and returns the outcomes in the order of the items.
pub fn on_each<T: Sync, R: Send>(
    items: &[T],
    threads: usize,
    work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let next_item = AtomicUsize::new(0);
    let outcomes: Vec<Mutex<Option<R>>> = items.iter().map(|_| Mutex::new(None)).collect();
    on_threads(threads.clamp(1, items.len().max(1)), || {
        loop {
            let index = next_item.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else {
                return Ok(());
            };
            *lock(&outcomes[index]) = Some(work(item));
        }
    })
    .expect("taking items cannot fail: an error of the work is an outcome");
    outcomes
        .into_iter()
        .map(|outcome| unlocked(outcome).expect("each item was taken by some thread"))
        .collect()
}

/// Runs `work` on `threads` threads, of which this one is the first; all of them count as the
/// current span.
///
/// It returns when all threads have ended: the first error in their order, if there is one. A panic
/// of any of them goes on in this one.
pub(crate) fn on_threads(
    threads: usize,
    work: impl Fn() -> Result<(), FileError> + Sync,
) -> Result<(), FileError> {
    let span = Span::current();
    std::thread::scope(|scope| {
        // Where the system grants no more threads, those that there are do the work.
        let other_threads: Vec<_> = (1..threads)
            .map_while(|_| {
                Builder::new()
                    .spawn_scoped(scope, || span.in_scope(&work))
                    .ok()
            })
            .collect();
        let mut outcome = work();
        for thread in other_threads {
            let outcome_of_thread = thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            outcome = outcome.and(outcome_of_thread);
        }
        outcome
    })
}
