//! The output of a command that runs inside another program: kept, instead of written to stdout.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

thread_local! {
    /// The output so far of the command that this thread runs for another program, and that
    /// program's request to stop.
    static CAPTURE: RefCell<Option<(Vec<u8>, Arc<AtomicUsize>)>> = const { RefCell::new(None) };
}

/// Runs a command on this thread, and returns its outcome and what it wrote to stdout. Nothing is
/// written to stderr.
///
/// The command stops where it can once `stop` is not 0; the number counts as that of a signal.
pub(crate) fn run<T>(stop: Arc<AtomicUsize>, command: impl FnOnce() -> T) -> (T, Vec<u8>) {
    // The capture is that of this thread only: other threads of the program may print.
    CAPTURE.set(Some((Vec::new(), stop)));
    let outcome = command();
    let (output, _) = CAPTURE.take().expect("only this function ends a capture");
    (outcome, output)
}

/// Returns `true` if this thread runs a command for another program.
pub(crate) fn is_on() -> bool {
    CAPTURE.with_borrow(Option::is_some)
}

/// Keeps a piece of the output. Returns `false` if nobody wants to have it.
pub(crate) fn capture_bytes(bytes: &[u8]) -> bool {
    CAPTURE.with_borrow_mut(|capture| match capture {
        Some((output, _)) => {
            output.extend_from_slice(bytes);
            true
        }
        None => false,
    })
}

/// Returns the other program's request to stop; `None` if this thread runs a command for none.
pub(crate) fn stop_flag() -> Option<Arc<AtomicUsize>> {
    CAPTURE.with_borrow(|capture| capture.as_ref().map(|(_, stop)| Arc::clone(stop)))
}
