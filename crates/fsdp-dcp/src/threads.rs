//! The same work on several threads.

use tracing::Span;

use crate::error::FileError;

/// Runs `work` on this thread and on so many more that there are `threads`; all of them count as the current span.
/// The first error in the order of the threads, this one's before the others', is the outcome.
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
