//! Requests to stop: SIGINT and SIGTERM, as a terminal, a scheduler or a cluster sends them.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context as _, Result};
use fsdp_dcp::storage::{Step, StepHook};
use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;

use super::capture;

/// The request to stop, if there was one. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct StopRequest {
    /// The signal that came first; 0 for none.
    signal: Arc<AtomicUsize>,
}

impl StopRequest {
    /// Returns the request that whoever embeds this command may make, or one that only signals make.
    pub(crate) fn new() -> Self {
        StopRequest { signal: capture::stop().unwrap_or_default() }
    }

    /// Notes the first signal from now on, instead of ending the process. A second one ends the process at once.
    ///
    /// # Errors
    /// The system does not allow it.
    pub(crate) fn watch(&self) -> Result<()> {
        // A process that this command is only a guest of has handlers of its own.
        if capture::is_on() {
            return Ok(());
        }
        let is_second = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // The order counts: what is registered first runs first, so the first signal finds `is_second` unset.
            flag::register_conditional_default(signal, Arc::clone(&is_second))
                .and_then(|_| flag::register(signal, Arc::clone(&is_second)))
                .and_then(|_| flag::register_usize(signal, Arc::clone(&self.signal), signal.unsigned_abs() as usize))
                .context("failed to listen for signals")?;
        }
        Ok(())
    }

    /// Returns the signal that asked to stop.
    pub(crate) fn signal(&self) -> Option<u8> {
        u8::try_from(self.signal.load(Ordering::Relaxed)).ok().filter(|&signal| signal != 0)
    }
}

/// Keeps a limit on the size of files (`ulimit -f`) from ending the process: writing beyond it is an error instead, which
/// says what was written and cleans up.
///
/// # Errors
/// The system does not allow it.
pub(crate) fn survive_file_size_limit() -> Result<()> {
    // Any handler keeps the process alive, and nothing needs to know that the signal came.
    let registered = flag::register(SIGXFSZ, Arc::default());
    registered.map(drop).context("failed to handle the signal of too large files")
}

/// Writing goes no further after a request to stop. Steps that publish or remove something are done whole.
impl StepHook for StopRequest {
    fn before(&self, step: Step, _: &Path) -> io::Result<()> {
        let writes = matches!(step, Step::CreateDirectory | Step::CreateFile | Step::Preallocate | Step::Write);
        match self.signal() {
            Some(signal) if writes => Err(io::Error::other(format!("stopped by signal {signal}"))),
            _ => Ok(()),
        }
    }
}
