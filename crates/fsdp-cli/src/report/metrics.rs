//! The metrics of a run's steps.

use std::path::Path;

use anyhow::Result;
use serde::Deserialize;

use super::lines;
use super::series::Series;

/// A line of `metrics.jsonl`, as far as the page needs it. A number that was none is `null`.
#[derive(Debug, Deserialize)]
struct MetricsLine {
    step: u64,
    loss: Option<f64>,
    lr: Option<f64>,
    grad_norm: Option<f64>,
    tokens_per_s: Option<f64>,
    peak_memory_bytes: Option<f64>,
    #[serde(default)]
    skipped: bool,
}

/// The metrics of all steps, as curves.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    /// The number of steps with metrics.
    pub(super) step_count: u64,
    /// The number of lines that could not be read.
    pub(super) unreadable_lines: u64,
    /// The number of steps whose update was left out.
    pub(super) skipped_updates: u64,
    /// The number of steps done at the last line.
    pub(super) steps_done: u64,
    pub(super) last_loss: Option<f64>,
    pub(super) loss: Series,
    pub(super) lr: Series,
    pub(super) grad_norm: Series,
    pub(super) tokens_per_s: Series,
    pub(super) memory_bytes: Series,
}

impl Metrics {
    /// Reads a run's metrics; there are none if the file is not there.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let mut metrics = Metrics::default();
        metrics.unreadable_lines = lines::parse_lines(path, |line| metrics.record(&line))?;
        Ok(metrics)
    }

    /// Adds the metrics of one step.
    fn record(&mut self, line: &MetricsLine) {
        // A line has the number of steps before it; people count those that are done.
        let step = line.step.saturating_add(1);
        self.step_count += 1;
        self.skipped_updates += u64::from(line.skipped);
        self.steps_done = step;
        self.last_loss = line.loss;
        // A step whose loss was not a number has no point, and leaves no gap in memory.
        self.loss.push(step, line.loss);
        self.lr.push(step, line.lr);
        self.grad_norm.push(step, line.grad_norm);
        self.tokens_per_s.push(step, line.tokens_per_s);
        self.memory_bytes.push(step, line.peak_memory_bytes);
    }
}
