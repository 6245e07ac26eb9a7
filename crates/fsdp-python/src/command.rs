//! The `fsdp` command inside a Python process.

use std::ffi::OsString;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::anyhow;
use fsdp_cli::embed;
use pyo3::prelude::*;

use crate::error::to_exception;

/// The number of SIGINT, which Python turns into `KeyboardInterrupt`.
const SIGINT: usize = 2;

/// The time between two looks for signals.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Runs the command line `arguments`, whose first is the program's name, and returns its exit code.
#[pyfunction]
pub(crate) fn run(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| fsdp_cli::run(arguments))
}

/// Runs one command on checkpoints, and returns what it would write to stdout, and its error as an
/// exception or `None`.
///
/// On Ctrl-C a conversion stops and leaves nothing behind.
#[pyfunction]
pub(crate) fn report(
    py: Python<'_>,
    arguments: Vec<OsString>,
) -> PyResult<(String, Option<PyErr>)> {
    let stop = Arc::new(AtomicUsize::new(0));
    let (end_sender, end_receiver) = sync_channel::<()>(1);
    let end_receiver = Mutex::new(end_receiver);
    let worker = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            let result = embed::report(arguments, stop);
            // Sending cannot fail: the receiver below lives until this thread has ended.
            let _ = end_sender.send(());
            result
        }
    });
    // Python runs its signal handlers on the main thread only, when `check_signals` is called.
    let mut interruption = None;
    loop {
        // Without the lock of the interpreter, other Python threads go on meanwhile.
        let waiting = py.detach(|| {
            end_receiver
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .recv_timeout(SIGNAL_CHECK_INTERVAL)
        });
        match waiting {
            Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Err(signal) = py.check_signals() {
            stop.store(SIGINT, Ordering::Relaxed);
            interruption.get_or_insert(signal);
        }
    }
    let (outcome, output) = worker
        .join()
        .unwrap_or_else(|_| (Err(anyhow!("a bug: the command panicked")), String::new()));
    if let Some(signal) = interruption {
        return Err(signal);
    }
    let error = outcome.err().map(|error| to_exception(py, error));
    Ok((output, error))
}
