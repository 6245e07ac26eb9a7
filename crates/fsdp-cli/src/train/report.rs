//! The reports of a run: a line of JSON per step in `metrics.jsonl`, a progress bar or lines on
//! stderr, JSON on stdout.

use std::fmt::Display;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::{Value, json};

use super::arguments::{TrainArguments, elastic_job, restart_count};
use super::sparkline::{empty_curve, sparkline};
use crate::failure::usage_error;
use crate::output;
use crate::progress::{is_terminal, make_bar};
use crate::report::lines;
use crate::report::series::Series;
use crate::report::{EVENTS_FILE, METRICS_FILE};
use crate::text::escaped_lines;
use fsdp::checkpoint::{Location, SaveReport};
use fsdp::formats::storage::Durable;

/// The approximate number of lines for a whole run, if there is no bar.
const LINE_COUNT: u64 = 10;

/// One line of `metrics.jsonl`.
#[derive(Debug, Serialize)]
pub(super) struct StepMetrics {
    /// The number of steps done before this one.
    pub(super) step: u64,
    /// The moment at which it was done, in seconds since 1970.
    pub(super) time: f64,
    /// The mean over the global batch, before the step's update.
    pub(super) loss: f64,
    /// The learning rate of the step.
    pub(super) lr: f64,
    /// The norm of all gradients before they were clipped; `null` if they were not finite.
    pub(super) grad_norm: Option<f64>,
    /// `true` if gradients were not finite, so that the parameters were not updated.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) skipped: bool,
    pub(super) tokens_per_s: f64,
    /// The bytes of parameters that live on each rank between steps.
    pub(super) parameter_bytes: Vec<u64>,
    /// The largest number of such bytes at any time, on each rank.
    pub(super) peak_parameter_bytes: Vec<u64>,
    /// The most memory that the first rank's process ever had, if the system reports it.
    pub(super) peak_memory_bytes: Option<u64>,
}

/// The version of the events' schema.
pub(super) const SCHEMA: u32 = 1;

/// The reporter of a run, which only one rank has.
pub(super) struct Reporter {
    metrics: LineFile,
    /// While it is open, it holds the lock of the run's directory.
    events: LineFile,
    /// Holds the lock of the directory of the checkpoints.
    _checkpoints: Option<File>,
    prints_json: bool,
    bar: Option<Bar>,
    steps: u64,
}

/// A file of lines of JSON in the run's directory.
struct LineFile {
    file: File,
    path: PathBuf,
}

/// The progress bar, and the curves beside it.
struct Bar {
    bar: ProgressBar,
    loss: Series,
    tokens_per_s: Series,
}

impl Reporter {
    /// Makes the run's directory, locks it and that of the checkpoints, and opens the files of
    /// metrics and events. Removes the metrics of steps from `start_step` on, because these steps
    /// are about to be done, maybe for a second time. A new run removes all of both: they are of
    /// one that ended before its first checkpoint.
    ///
    /// # Errors
    /// Another run holds a lock; the directory cannot be made, or a file cannot be opened or
    /// shortened.
    pub(super) fn open(
        arguments: &TrainArguments,
        start_step: u64,
        is_new_run: bool,
    ) -> Result<Self> {
        let out = &arguments.out;
        // The directory is created durably: checkpoints are saved in it, and would be lost with it
        // when power fails.
        Durable::new().create_directories(out)?;
        let events = LineFile::open(out.join(EVENTS_FILE))?;
        lock(&events.file, out.display(), PROBE_TIMEOUT)?;
        let checkpoints = lock_checkpoints(arguments, PROBE_TIMEOUT)?;
        // Nothing is changed before both locks are held.
        if is_new_run {
            events
                .file
                .set_len(0)
                .with_context(|| events.failed_to("open"))?;
        }
        end_last_line(&events.file).with_context(|| events.failed_to("open"))?;
        let metrics = LineFile::open(out.join(METRICS_FILE))?;
        let kept_steps = if is_new_run { 0 } else { start_step };
        kept_length(&metrics.file, kept_steps)
            .and_then(|length| metrics.file.set_len(length))
            .with_context(|| metrics.failed_to("open"))?;
        let shows_bar = is_terminal() && !arguments.json && !arguments.no_progress;
        Ok(Reporter {
            metrics,
            events,
            _checkpoints: checkpoints,
            prints_json: arguments.json,
            bar: shows_bar.then(|| Bar::new(start_step, arguments.steps)),
            steps: arguments.steps,
        })
    }

    /// Reports the start of the run.
    ///
    /// # Errors
    /// The event cannot be written, or stdout is closed.
    pub(super) fn start(&self, event: Value, line: &str) -> Result<()> {
        self.print_line(line);
        self.record_and_print(event)
    }

    /// Writes the metrics of a step, and reports it.
    ///
    /// # Errors
    /// The metrics cannot be written, or stdout is closed.
    pub(super) fn step_done(&mut self, metrics: &StepMetrics) -> Result<()> {
        /// A step, as `--json` prints it.
        #[derive(Serialize)]
        struct StepEvent<'a> {
            event: &'static str,
            #[serde(flatten)]
            metrics: &'a StepMetrics,
        }
        self.metrics.write(&serde_json::to_value(metrics)?)?;
        let steps_done = metrics.step + 1;
        let steps = self.steps;
        let StepMetrics {
            loss, tokens_per_s, ..
        } = metrics;
        if metrics.skipped {
            self.print_line(&format!(
                "step {steps_done}/{steps}: the gradients are not finite, and the update is skipped"
            ));
        }
        if let Some(bar) = &mut self.bar {
            bar.step(steps_done, *loss, *tokens_per_s);
        } else if steps_done.is_multiple_of(steps.div_ceil(LINE_COUNT)) || steps_done == steps {
            self.print_line(&format!(
                "step {steps_done}/{steps}: loss {loss:.4}, {tokens_per_s:.0} tokens/s"
            ));
        }
        self.print_json(&StepEvent {
            event: "step",
            metrics,
        })
    }

    /// Reports a checkpoint that is whole. Training stood still for the time of `stall`.
    ///
    /// # Errors
    /// stdout is closed.
    pub(super) fn checkpoint_saved(
        &self,
        step: u64,
        place: &Location,
        save_report: &SaveReport,
        stall: Duration,
    ) -> Result<()> {
        // JSON is text, so what is not UTF-8 in the place is replaced.
        let path = place.to_string();
        let bytes = save_report.total_bytes;
        // From the start of the save to its commit.
        let seconds = save_report.duration.as_secs_f64();
        let stall_seconds = stall.as_secs_f64();
        let mib = bytes as f64 / f64::from(1 << 20);
        let speed = bytes as f64 / 1e9 / seconds;
        self.print_line(&format!(
            "saved `{path}`: {mib:.1} MiB in {seconds:.2} s ({speed:.2} GB/s), training waited \
             {stall_seconds:.2} s"
        ));
        self.record_and_print(json!({
            "event": "checkpoint",
            "step": step,
            "path": path,
            "bytes": bytes,
            "seconds": seconds,
            "stall_seconds": stall_seconds,
        }))
    }

    /// Reports a save to the memory tier: the bytes of all tensors, not counting the copies, and
    /// the seconds for which training waited.
    ///
    /// # Errors
    /// stdout is closed.
    pub(super) fn memory_saved(&self, step: u64, bytes: u64, seconds: f64) -> Result<()> {
        self.print_json(&json!({
            "event": "memory", "step": step, "bytes": bytes, "seconds": seconds,
        }))
    }

    /// Reports that a signal stopped the run after this many steps.
    ///
    /// # Errors
    /// stdout is closed.
    pub(super) fn stopped(&self, step: u64) -> Result<()> {
        if let Some(bar) = &self.bar {
            bar.bar.abandon();
            output::print_message("");
        }
        let steps = self.steps;
        self.print_line(&format!(
            "stopped by a signal after step {step}/{steps}, which is saved: go on with `--resume`"
        ));
        self.record_and_print(json!({ "event": "stopped", "step": step }))
    }

    /// Reports the end of the run.
    ///
    /// # Errors
    /// stdout is closed.
    pub(super) fn end(&self, step: u64, sample: Option<&str>) -> Result<()> {
        if let Some(bar) = &self.bar {
            bar.bar.finish();
            // The bar leaves the cursor on its line.
            output::print_message("");
        }
        let mut event = json!({ "event": "end", "step": step, "sample": null });
        self.record(event.clone())?;
        if let Some(sample) = sample
            && !self.prints_json
        {
            // The text may contain characters that act on a terminal, so they are escaped.
            return output::print_line(&escaped_lines(sample));
        }
        event["sample"] = sample.into();
        self.print_json(&event)
    }

    /// Adds an event to those in the run's directory, and writes it to stdout with `--json`.
    fn record_and_print(&self, event: Value) -> Result<()> {
        self.record(event.clone())?;
        self.print_json(&event)
    }

    /// Adds an event, with the time, to those in the run's directory.
    fn record(&self, mut event: Value) -> Result<()> {
        event["time"] = now().into();
        self.events.write(&event)
    }

    /// Writes a line to stderr: above the bar if there is one, and not at all with `--json`.
    fn print_line(&self, line: &str) {
        match &self.bar {
            Some(Bar { bar, .. }) => bar.suspend(|| output::print_message(line)),
            None if !self.prints_json => output::print_message(line),
            None => {}
        }
    }

    /// Writes an event to stdout, with `--json`.
    fn print_json(&self, event: &impl Serialize) -> Result<()> {
        if self.prints_json {
            output::print_json(event)?;
        }
        Ok(())
    }
}

impl LineFile {
    /// Opens a file to read it and to append to it. Creates it if it does not exist.
    fn open(path: PathBuf) -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(&path);
        let file = file.with_context(|| format!("failed to open `{}`", path.display()))?;
        Ok(LineFile { file, path })
    }

    /// Appends a line.
    fn write(&self, object: &Value) -> Result<()> {
        (&self.file)
            .write_all(format!("{object}\n").as_bytes())
            .with_context(|| self.failed_to("write"))
    }

    fn failed_to(&self, operation: &str) -> String {
        format!("failed to {operation} `{}`", self.path.display())
    }
}

impl Bar {
    /// Creates the bar of a run that begins after `start` of `steps` steps.
    fn new(start_step: u64, steps: u64) -> Self {
        let bar = make_bar(steps, "{bar:20} {pos}/{len} steps, {msg}, {eta} left");
        bar.set_position(start_step);
        bar.reset_eta();
        Bar {
            bar,
            loss: empty_curve(),
            tokens_per_s: empty_curve(),
        }
    }

    /// Shows a step that is done.
    fn step(&mut self, steps_done: u64, loss: f64, tokens_per_s: f64) {
        self.loss.push(steps_done, Some(loss));
        self.tokens_per_s.push(steps_done, Some(tokens_per_s));
        let losses = sparkline(&self.loss);
        let speeds = sparkline(&self.tokens_per_s);
        self.bar.set_message(format!(
            "loss {loss:.4} {losses}, {tokens_per_s:.0} tokens/s {speeds}"
        ));
        self.bar.set_position(steps_done);
    }
}

/// Checks that no other run uses the directories of this one now. [`Reporter::open`] takes the
/// locks themselves, when this run has something to write.
///
/// # Errors
/// Another run holds a lock.
pub(super) fn check_free(arguments: &TrainArguments) -> Result<()> {
    // A launcher starts a job again while its old processes may still end, and while the locks of a
    // host that has died are still there. The other ranks wait for this one at the rendezvous until
    // the timeout.
    let is_restarted = elastic_job().is_some() || restart_count() > 0;
    let timeout = if is_restarted {
        Duration::from_secs(arguments.timeout.get() / 2)
    } else {
        PROBE_TIMEOUT
    };
    // If the file is missing, no run has been here. If it cannot be opened, `Reporter::open`
    // returns that error.
    if let Ok(events) = OpenOptions::new()
        .append(true)
        .open(arguments.out.join(EVENTS_FILE))
    {
        lock(&events, arguments.out.display(), timeout)?;
    }
    lock_checkpoints(arguments, timeout)?;
    Ok(())
}

/// The timeout of a lock that only another run can hold which looks whether it is free: it lets go
/// of the lock at once.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Locks the directory of the checkpoints, which may be another than that of the run, and returns
/// the file that holds the lock. Returns `None` in an object store, and where only files can be
/// locked that are open for writing (NFS).
///
/// # Errors
/// Another run holds the lock.
fn lock_checkpoints(arguments: &TrainArguments, timeout: Duration) -> Result<Option<File>> {
    let place = arguments.checkpoint_location();
    let Some(directory) = place.local().and_then(|path| File::open(path).ok()) else {
        return Ok(None);
    };
    lock(&directory, &place, timeout)?;
    Ok(Some(directory))
}

/// Takes a lock, which lasts until the file is closed, or its process ends in any way. Two runs in
/// one directory would mix their steps. Where the file system has no locks, other runs are not
/// seen.
///
/// # Errors
/// Another run still holds the lock after `timeout`.
fn lock(file: &File, directory: impl Display, timeout: Duration) -> Result<()> {
    let deadline = Instant::now() + timeout;
    loop {
        match file.try_lock() {
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(()),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                bail!(usage_error(
                    format!("another run uses `{directory}` now"),
                    "wait until it ends, or choose another directory. If its host has died and the \
                     lock has stayed, rename `events.jsonl` and copy it back under its name: the \
                     lock stays with the old file",
                ));
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// Ends the last line of a file with a newline, if a kill has left it half written.
fn end_last_line(mut file: &File) -> std::io::Result<()> {
    let length = file.metadata()?.len();
    let mut last_byte = [b'\n'];
    if length > 0 {
        file.read_exact_at(&mut last_byte, length - 1)?;
    }
    if last_byte != *b"\n" {
        file.write_all(b"\n")?;
    }
    Ok(())
}

/// Returns the time in seconds since 1970, to the millisecond.
pub(super) fn now() -> f64 {
    // A clock that is set to a time before 1970 counts as 0.
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH);
    elapsed.unwrap_or_default().as_millis() as f64 / 1e3
}

/// Returns the length in bytes of the part of `metrics` that a run which continues at step
/// `start_step` keeps: it ends with the last line of an earlier step before the first line of
/// `start_step` or a later step.
///
/// Unreadable lines before the end of that part are kept. Unreadable lines after it are dropped: a
/// killed run may have left half a line.
fn kept_length(metrics: &File, start_step: u64) -> std::io::Result<u64> {
    let mut length = 0;
    let mut is_over = false;
    lines::visit_lines(metrics, |line, line_end| {
        if !is_over
            && line.ends_with(b"\n")
            && let Ok(line_metrics) = serde_json::from_slice::<Value>(line)
            && let Some(step) = line_metrics["step"].as_u64()
        {
            is_over = step >= start_step;
            if !is_over {
                length = line_end;
            }
        }
    })?;
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(steps: &[(u64, &str)]) -> String {
        steps
            .iter()
            .map(|(step, loss)| format!("{{\"step\":{step},\"loss\":{loss}}}\n"))
            .collect()
    }

    #[test]
    fn lines_stay_up_to_the_first_later_or_torn_one() {
        // A loss that is not a number is null in JSON.
        let (kept, later) = (
            lines(&[(0, "1.5"), (1, "null"), (2, "1.0")]),
            lines(&[(3, "1.0")]),
        );
        for rest in [later.as_str(), "{\"step\":", "no JSON\n", ""] {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(format!("{kept}{rest}").as_bytes()).unwrap();
            std::io::Seek::rewind(&mut file).unwrap();
            assert_eq!(kept_length(&file, 3).unwrap(), kept.len() as u64, "{rest}");
        }
    }

    #[test]
    fn a_damaged_line_takes_no_good_one_with_it() {
        let (before, after, later) = (
            lines(&[(0, "1.5")]),
            lines(&[(1, "1.0"), (2, "1.0")]),
            lines(&[(3, "1.0")]),
        );
        for damage in [
            "{\"step\":\n",
            "no JSON\n",
            &*format!("{}\n", "\0".repeat(5 << 20)),
        ] {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(format!("{before}{damage}{after}{later}").as_bytes())
                .unwrap();
            std::io::Seek::rewind(&mut file).unwrap();
            let kept = before.len() + damage.len() + after.len();
            assert_eq!(
                kept_length(&file, 3).unwrap(),
                kept as u64,
                "{}",
                damage.len()
            );
        }
    }
}
