//! Requests to stop: SIGINT, SIGTERM and SIGHUP, as a terminal, a scheduler or a cluster sends
//! them.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use fsdp_formats::Location;
use fsdp_formats::storage::{self, Durable, Step, StepHook};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::{flag, low_level};

use super::capture;
use super::failure::CommandError;

/// The time after the first signal in which further ones are the same request. Schedulers signal
/// every process of a job, and a launcher passes its own signal on, so one request may arrive
/// several times.
const SAME_REQUEST_WINDOW: Duration = Duration::from_secs(1);

/// The signals by which terminals, schedulers and clusters ask a program to end.
pub(crate) const REQUESTS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// Starts a thread that handles the signals of [`REQUESTS`], SIGUSR1, SIGUSR2 and `others`. Those
/// that this process was started to ignore stay ignored: `nohup`, and shells for programs in the
/// background, ignore signals on behalf of the program.
///
/// # Errors
/// The system does not allow it.
pub(crate) fn on_signals(
    other_signals: &[i32],
    handle: impl FnMut(i32) + Send + 'static,
) -> Result<()> {
    // A system that does not tell ignores none.
    let ignored_mask = ignored_signals().unwrap_or(0);
    let mut handled_signals = [&REQUESTS[..], &[SIGUSR1, SIGUSR2]].concat();
    handled_signals.retain(|signal| ignored_mask >> (signal - 1) & 1 == 0);
    handled_signals.extend(other_signals);
    let mut signals = Signals::new(handled_signals).context("failed to listen for signals")?;
    // One thread sees all signals, one after the other. Handlers on two threads could both take
    // theirs for the first.
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || signals.forever().for_each(handle))
        .context("failed to start a thread")?;
    Ok(())
}

/// Returns the signals that this process ignores, a bit each; `None` if the system does not tell.
fn ignored_signals() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

/// The request to stop, if there was one. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct StopRequest {
    /// The signal that came first; 0 for none.
    signal: Arc<AtomicUsize>,
    /// `true` once a thread listens for signals. A second thread would take the first signal for a
    /// second one.
    is_listening: Arc<AtomicBool>,
    /// `true` once signals are recorded. Until then they end the process.
    is_watching: Arc<AtomicBool>,
}

impl StopRequest {
    /// Returns the request that whoever embeds this command may make, or one that only signals
    /// make.
    pub(crate) fn new() -> Self {
        StopRequest {
            signal: capture::stop_flag().unwrap_or_default(),
            is_listening: Arc::default(),
            is_watching: Arc::default(),
        }
    }

    /// Makes the first signal from now on a request to stop, which is noted, instead of the end of
    /// the process. A second signal, more than a second later, ends the process at once. SIGUSR1
    /// and SIGUSR2 count too, since schedulers can be told to send them. Calling this again has no
    /// effect.
    ///
    /// # Errors
    /// The system does not allow it.
    pub(crate) fn watch(&self) -> Result<()> {
        self.is_watching.store(true, Ordering::Relaxed);
        self.listen()
    }

    /// Lets each signal end the process, until [`watch`](StopRequest::watch). That is what signals
    /// do by default, except to the first process of a container: the system ignores them on its
    /// behalf.
    ///
    /// # Errors
    /// The system does not allow it.
    pub(crate) fn listen(&self) -> Result<()> {
        // A process that this command is only a guest of has handlers of its own.
        if capture::is_on() || self.is_listening.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let request = self.clone();
        let mut first_signal_time: Option<Instant> = None;
        on_signals(&[], move |signal| {
            if !request.is_watching.load(Ordering::Relaxed) {
                end_by(signal);
            }
            match first_signal_time {
                None => {
                    first_signal_time = Some(Instant::now());
                    let signal_number = signal.unsigned_abs() as usize;
                    request.signal.store(signal_number, Ordering::Relaxed);
                }
                Some(first_signal_time) if first_signal_time.elapsed() >= SAME_REQUEST_WINDOW => {
                    end_by(signal)
                }
                Some(_) => {}
            }
        })
    }

    /// Returns the signal that asked to stop; `None` if there was none.
    pub(crate) fn signal(&self) -> Option<u8> {
        match u8::try_from(self.signal.load(Ordering::Relaxed)) {
            // A program that embeds this may store any number.
            Ok(0) | Err(_) => None,
            Ok(signal) => Some(signal),
        }
    }
}

/// Writes a checkpoint or a file to a place: `write` does that, with the [`Durable`] that it is
/// given. What a killed process has left of this place is removed first. A signal ends the writing,
/// which leaves nothing then.
///
/// # Errors
/// The error of `write`, or that a signal has stopped it. What a killed process has left cannot be
/// removed.
pub(crate) fn write_unless_stopped<T>(
    place: &Location,
    write: impl FnOnce(&Durable) -> Result<T>,
) -> Result<T> {
    let stop = StopRequest::new();
    // Uploads cannot be stopped between two steps, so signals end the process as they always do.
    if place.local().is_some() {
        stop.watch()?;
    }
    storage::clean_stale(place)?;
    let outcome = write(&Durable::with_hook(Arc::new(stop.clone())));
    // A library only knows that a step was refused, and not that a signal was the reason.
    if let (Err(_), Some(signal)) = (&outcome, stop.signal()) {
        bail!(CommandError {
            // Shells report a process that a signal has ended as 128 plus the signal's number.
            exit_code: 128 + signal,
            message: format!(
                "stopped by signal {signal}: nothing was written to `{place}`, and no unfinished \
                 files are left"
            ),
            hint: None,
        });
    }
    outcome
}

/// Ends this process as a signal does by default.
pub(crate) fn end_by(signal: i32) -> ! {
    if std::process::id() == 1 {
        // The system lets no signal end the first process of a container. Shells report such an end
        // as 128 plus the signal's number.
        low_level::exit(128 + signal);
    }
    low_level::emulate_default_handler(signal).ok();
    // The default of all of them ends the process, so there is nothing left to do but that.
    std::process::abort();
}

/// Keeps a limit on the size of files (`ulimit -f`) from ending the process: writing beyond it is
/// an error instead, which says what was written and cleans up.
///
/// # Errors
/// The system does not allow it.
pub(crate) fn survive_file_size_limit() -> Result<()> {
    // Any handler keeps the process alive, and nothing needs to know that the signal came.
    flag::register(SIGXFSZ, Arc::default())
        .context("failed to handle the signal of too large files")?;
    Ok(())
}

/// Writing goes no further after a request to stop. Steps that publish or remove something are done
/// whole.
impl StepHook for StopRequest {
    /// Refuses a step that writes once a signal has asked to stop.
    fn before(&self, step: Step, _: &Path) -> io::Result<()> {
        let writes = matches!(
            step,
            Step::CreateDirectory | Step::CreateFile | Step::Preallocate | Step::Write
        );
        match self.signal() {
            Some(signal) if writes => Err(io::Error::other(format!("stopped by signal {signal}"))),
            _ => Ok(()),
        }
    }
}
