//! Requests to stop: SIGINT, SIGTERM and SIGHUP, as a terminal, a scheduler or a cluster sends them.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use fsdp_dcp::storage::{Step, StepHook};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use super::capture;

/// The time after the first signal in which further ones are the same request. Schedulers signal every process of a job,
/// and a launcher passes its own signal on, so one request may arrive several times.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// Returns the signals at which a process should stop, without those that it was started to ignore: `nohup`, and shells
/// for programs in the background, ignore signals on behalf of the program.
pub(crate) fn signals_to_stop() -> Vec<i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0).collect()
}

/// The request to stop, if there was one. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct StopRequest {
    /// The signal that came first; 0 for none.
    signal: Arc<AtomicUsize>,
    /// `true` once a thread listens for signals. Two threads would count every signal twice.
    is_watching: Arc<AtomicBool>,
}

impl StopRequest {
    /// Returns the request that whoever embeds this command may make, or one that only signals make.
    pub(crate) fn new() -> Self {
        StopRequest { signal: capture::stop().unwrap_or_default(), is_watching: Arc::default() }
    }

    /// From now on, notes the first signal instead of ending the process. A second signal, more than a second later, ends the
    /// process at once.
    /// Calling this again has no effect.
    ///
    /// # Errors
    /// The system does not allow it.
    pub(crate) fn watch(&self) -> Result<()> {
        // A process that this command is only a guest of has handlers of its own.
        if capture::is_on() || self.is_watching.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let mut signals = Signals::new(signals_to_stop()).context("failed to listen for signals")?;
        let first = Arc::clone(&self.signal);
        // One thread sees all signals, one after the other. Handlers on two threads could both take theirs for the first.
        let listen = move || {
            let mut first_came: Option<Instant> = None;
            for signal in signals.forever() {
                let Some(first_came) = first_came else {
                    first_came = Some(Instant::now());
                    first.store(signal.unsigned_abs() as usize, Ordering::Relaxed);
                    continue;
                };
                if first_came.elapsed() >= SAME_REQUEST && emulate_default_handler(signal).is_err() {
                    // The default of all of them ends the process, so there is nothing left to do but that.
                    std::process::abort();
                }
            }
        };
        thread::Builder::new().name("signals".to_owned()).spawn(listen).context("failed to start a thread")?;
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
