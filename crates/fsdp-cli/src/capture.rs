//! The output of a command that runs inside another program: kept, instead of written to stdout.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// A command that this thread runs for another program.
struct Capture {
    output: Vec<u8>,
    stop: Arc<AtomicUsize>,
}

thread_local! {
    static CAPTURE: RefCell<Option<Capture>> = const { RefCell::new(None) };
}

/// Runs a command on this thread, and returns its outcome and what it wrote to stdout. Nothing is
/// written to stderr.
///
/// The command stops where it can once `stop` is not 0; the number counts as that of a signal.
pub(crate) fn run<T>(stop: Arc<AtomicUsize>, command: impl FnOnce() -> T) -> (T, Vec<u8>) {
    // The capture is that of this thread only: other threads of the program may print.
    CAPTURE.set(Some(Capture {
        output: Vec::new(),
        stop,
    }));
    let outcome = command();
    let capture = CAPTURE.take().expect("only this function ends a capture");
    (outcome, capture.output)
}

/// Returns `true` if this thread runs a command for another program.
pub(crate) fn is_on() -> bool {
    CAPTURE.with_borrow(Option::is_some)
}

/// Keeps a piece of the output. Returns `false` if nobody wants to have it.
pub(crate) fn keep(bytes: &[u8]) -> bool {
    CAPTURE.with_borrow_mut(|capture| match capture {
        Some(capture) => {
            capture.output.extend_from_slice(bytes);
            true
        }
        None => false,
    })
}

/// Returns the other program's request to stop.
pub(crate) fn stop() -> Option<Arc<AtomicUsize>> {
    CAPTURE.with_borrow(|capture| capture.as_ref().map(|capture| Arc::clone(&capture.stop)))
}
