//! The same work on several threads.

use tracing::Span;

use crate::error::FileError;

/// Returns how many threads to use unless told: one for each core, up to four. More do not make a disk faster.
pub(crate) fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().min(4))
}

/// Runs `work` on `threads` threads, of which this one is the first; all of them count as the current span.
///
/// The outcome is the first error in the order of the threads.
pub(crate) fn on_threads(threads: usize, work: impl Fn() -> Result<(), FileError> + Sync) -> Result<(), FileError> {
    let span = Span::current();
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(|| span.in_scope(&work))).collect();
        let mut outcome = work();
        for other in others {
            let theirs = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            outcome = outcome.and(theirs);
        }
        outcome
    })
}
