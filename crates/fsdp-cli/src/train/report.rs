//! The reports of a run: a line of JSON per step in `metrics.jsonl`, a progress bar or lines on stderr, JSON on stdout.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, IsTerminal as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::{Deserialize, Serialize};

use super::arguments::TrainArguments;
use super::sparkline::Sparkline;
use crate::output;
use crate::run_files::{EVENTS_FILE, METRICS_FILE};
use crate::text::escaped_lines;
use fsdp::dcp::storage::Durable;

/// The number of times per second that the bar is drawn.
const BAR_HZ: u8 = 10;

/// The approximate number of lines for a whole run, if there is no bar.
const LINES: u64 = 10;

/// One line of `metrics.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct StepMetrics {
    /// The number of steps done before this one.
    pub(super) step: u64,
    /// The moment at which it was done, in seconds since 1970.
    #[serde(default)]
    pub(super) time: f64,
    /// The mean over the global batch, before the step's update.
    pub(super) loss: f64,
    /// The learning rate of the step.
    pub(super) lr: f64,
    /// The norm of all gradients before they were clipped; `null` if they were not finite.
    pub(super) grad_norm: Option<f64>,
    /// `true` if gradients were not finite, so that the parameters were not updated.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
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

/// The objects that `--json` prints, one a line.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Event<'a> {
    Start {
        schema: u32,
        ranks: usize,
        threads_per_rank: usize,
        parameters: u64,
        step: u64,
        steps: u64,
        resumed_from: Option<&'a Path>,
    },
    Step(&'a StepMetrics),
    Checkpoint(&'a Saved<'a>),
    Memory {
        step: u64,
        bytes: u64,
        seconds: f64,
    },
    Stopped {
        step: u64,
    },
    End {
        step: u64,
        sample: Option<&'a str>,
    },
}

/// A checkpoint that is whole.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Saved<'a> {
    pub(super) step: u64,
    pub(super) path: &'a Path,
    /// The bytes of tensors, on all ranks.
    pub(super) bytes: u64,
    /// The time from the start of the save to its commit.
    pub(super) seconds: f64,
    /// The time for which training stood still.
    pub(super) stall_seconds: f64,
}

/// The reporter of a run, which only one rank has.
pub(super) struct Report {
    metrics: File,
    path: PathBuf,
    events: File,
    events_path: PathBuf,
    json: bool,
    bar: Option<Bar>,
    steps: u64,
}

/// The progress bar, and the curves beside it.
struct Bar {
    bar: ProgressBar,
    loss: Sparkline,
    tokens_per_s: Sparkline,
}

impl Report {
    /// Makes the run's directory, opens its metrics, and drops those of steps from `start` on, which are about to be
    /// done (again).
    ///
    /// # Errors
    /// The file cannot be opened or cut.
    pub(super) fn open(arguments: &TrainArguments, start: u64) -> Result<Self> {
        let TrainArguments { out, steps, json, no_progress, .. } = arguments;
        let (steps, json) = (*steps, *json);
        // Checkpoints are saved in it, which must not vanish with it when power fails.
        Durable::new().create_directories(out)?;
        let path = out.join(METRICS_FILE);
        let failed = || format!("failed to open `{}`", path.display());
        let metrics = OpenOptions::new().read(true).append(true).create(true).open(&path).with_context(failed)?;
        let kept = length_before(&metrics, start).with_context(failed)?;
        metrics.set_len(kept).with_context(failed)?;
        let events_path = out.join(EVENTS_FILE);
        let failed = || format!("failed to open `{}`", events_path.display());
        let events = OpenOptions::new().read(true).append(true).create(true).open(&events_path).with_context(failed)?;
        if start == 0 {
            // Another run was here before, or this one, and came to no checkpoint.
            events.set_len(0).with_context(failed)?;
        }
        end_line(&events).with_context(failed)?;
        let terminal = std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let bar = (terminal && !json && !no_progress).then(|| Bar::new(start, steps));
        Ok(Report { metrics, path, events, events_path, json, bar, steps })
    }

    /// Reports the start of the run.
    ///
    /// # Errors
    /// stdout is closed.
    pub(super) fn start(&self, event: &Event<'_>, line: &str) -> Result<()> {
        self.tell(line);
        self.happened(event)
    }

    /// Writes the metrics of a step, and reports it.
    ///
    /// # Errors
    /// The metrics cannot be written.
    pub(super) fn step(&mut self, metrics: &StepMetrics) -> Result<()> {
        let mut line = serde_json::to_string(metrics).context("failed to write JSON")?;
        line.push('\n');
        let failed = || format!("failed to write `{}`", self.path.display());
        self.metrics.write_all(line.as_bytes()).with_context(failed)?;
        let done = metrics.step + 1;
        let StepMetrics { loss, tokens_per_s, .. } = metrics;
        if metrics.skipped {
            self.tell(&format!("step {done}/{}: the gradients are not finite, and the update is skipped", self.steps));
        }
        match &mut self.bar {
            Some(bar) => bar.step(done, *loss, *tokens_per_s),
            None if done.is_multiple_of(self.steps.div_ceil(LINES)) || done == self.steps => {
                let steps = self.steps;
                self.tell(&format!("step {done}/{steps}: loss {loss:.4}, {tokens_per_s:.0} tokens/s"));
            }
            None => {}
        }
        self.event(&Event::Step(metrics))
    }

    /// Reports a checkpoint that is whole.
    ///
    /// # Errors
    /// stdout is closed.
    pub(super) fn checkpoint(&self, saved: &Saved<'_>) -> Result<()> {
        let Saved { path, bytes, seconds, stall_seconds, .. } = *saved;
        let (mib, speed) = (bytes as f64 / f64::from(1 << 20), bytes as f64 / 1e9 / seconds);
        let path = path.display();
        self.tell(&format!(
            "saved `{path}`: {mib:.1} MiB in {seconds:.2} s ({speed:.2} GB/s), training waited {stall_seconds:.2} s"
        ));
        self.happened(&Event::Checkpoint(saved))
    }

    /// Reports a save to the memory tier: the bytes of all tensors, not counting the copies, and the seconds for which
    /// training waited.
    ///
    /// # Errors
    /// stdout is closed.
    pub(super) fn memory(&self, step: u64, bytes: u64, seconds: f64) -> Result<()> {
        self.event(&Event::Memory { step, bytes, seconds })
    }

    /// Reports that a signal stopped the run after this many steps.
    ///
    /// # Errors
    /// stdout is closed.
    pub(super) fn stopped(&self, step: u64) -> Result<()> {
        if let Some(bar) = &self.bar {
            bar.bar.abandon();
            output::talk("");
        }
        let steps = self.steps;
        self.tell(&format!("stopped by a signal after step {step}/{steps}, which is saved: go on with `--resume`"));
        self.happened(&Event::Stopped { step })
    }

    /// Reports the end of the run.
    ///
    /// # Errors
    /// stdout is closed.
    pub(super) fn end(&self, step: u64, sample: Option<&str>) -> Result<()> {
        if let Some(bar) = &self.bar {
            bar.bar.finish();
            // The bar leaves the cursor on its line.
            output::talk("");
        }
        self.record(&Event::End { step, sample: None })?;
        match (sample, self.json) {
            // The model may write whatever acts on a terminal.
            (Some(sample), false) => output::data(&escaped_lines(sample)),
            _ => self.event(&Event::End { step, sample }),
        }
    }

    /// Reports an event that the run's directory keeps.
    fn happened(&self, event: &Event<'_>) -> Result<()> {
        self.record(event)?;
        self.event(event)
    }

    /// Adds an event, with the time, to those in the run's directory.
    fn record(&self, event: &Event<'_>) -> Result<()> {
        let mut object = serde_json::to_value(event).context("failed to write JSON")?;
        object["time"] = now().into();
        let failed = || format!("failed to write `{}`", self.events_path.display());
        (&self.events).write_all(format!("{object}\n").as_bytes()).with_context(failed)
    }

    fn tell(&self, line: &str) {
        match &self.bar {
            Some(Bar { bar, .. }) => bar.suspend(|| output::talk(line)),
            None if !self.json => output::talk(line),
            None => {}
        }
    }

    fn event(&self, event: &Event<'_>) -> Result<()> {
        if self.json { output::json(event) } else { Ok(()) }
    }
}

impl Bar {
    fn new(start: u64, steps: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr_with_hz(BAR_HZ));
        let template = "{bar:20} {pos}/{len} steps, {msg}, {eta} left";
        bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_position(start);
        bar.reset_eta();
        Bar { bar, loss: Sparkline::default(), tokens_per_s: Sparkline::default() }
    }

    fn step(&mut self, done: u64, loss: f64, tokens_per_s: f64) {
        self.loss.push(loss);
        self.tokens_per_s.push(tokens_per_s);
        let (losses, speeds) = (&self.loss, &self.tokens_per_s);
        self.bar.set_message(format!("loss {loss:.4} {losses}, {tokens_per_s:.0} tokens/s {speeds}"));
        self.bar.set_position(done);
    }
}

/// Ends the last line of a file, which a kill may have left half written.
fn end_line(mut file: &File) -> std::io::Result<()> {
    let length = file.metadata()?.len();
    let mut last = [b'\n'];
    if length > 0 {
        file.read_exact_at(&mut last, length - 1)?;
    }
    if last == *b"\n" { Ok(()) } else { file.write_all(b"\n") }
}

/// Returns the time in seconds since 1970, to the millisecond.
pub(super) fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_millis() as f64 / 1e3
}

/// The fields of a line that are read again. A loss that is not a number was written as `null`.
#[derive(serde::Deserialize)]
struct Numbered {
    step: u64,
}

/// Returns the bytes of the lines of steps before `start`, up to the first line that is later or unreadable. A kill may
/// have left half a line.
fn length_before(metrics: &File, start: u64) -> std::io::Result<u64> {
    let mut reader = BufReader::new(metrics);
    let (mut length, mut line) = (0, Vec::new());
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line)?;
        let whole = line.ends_with(b"\n");
        let step = serde_json::from_slice::<Numbered>(&line).map(|metrics| metrics.step);
        if !whole || !step.is_ok_and(|step| step < start) {
            return Ok(length);
        }
        length += read as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_stay_up_to_the_first_later_or_torn_one() {
        let lines = |steps: &[(u64, &str)]| -> String {
            steps.iter().map(|(step, loss)| format!("{{\"step\":{step},\"loss\":{loss}}}\n")).collect()
        };
        // A loss that is not a number is null in JSON.
        let (kept, later) = (lines(&[(0, "1.5"), (1, "null"), (2, "1.0")]), lines(&[(3, "1.0")]));
        for rest in [later.as_str(), "{\"step\":", "no JSON\n", ""] {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(format!("{kept}{rest}").as_bytes()).unwrap();
            std::io::Seek::rewind(&mut file).unwrap();
            assert_eq!(length_before(&file, 3).unwrap(), kept.len() as u64, "{rest}");
        }
    }
}
