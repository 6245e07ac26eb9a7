//! The events of a run: its starts, its checkpoints, its ends.

use std::path::Path;

use anyhow::Result;
use serde::Deserialize;

use super::lines;

/// The events of each kind that are kept, the newest.
const KEPT: usize = 500;

/// A line of `events.jsonl`, as far as the page needs it.
#[derive(Debug, Deserialize)]
struct Line {
    event: String,
    time: Option<f64>,
    step: Option<u64>,
    ranks: Option<u64>,
    resumed_from: Option<String>,
    path: Option<String>,
    bytes: Option<u64>,
    seconds: Option<f64>,
    stall_seconds: Option<f64>,
}

/// A process that began or went on with the run.
#[derive(Debug)]
pub(super) struct Start {
    /// Seconds since 1970.
    pub(super) time: Option<f64>,
    /// The steps done before.
    pub(super) step: u64,
    pub(super) ranks: Option<u64>,
    pub(super) resumed_from: Option<String>,
    /// The way in which it ended: at its last step, or by a signal. `None` if it was killed or
    /// crashed.
    pub(super) end: Option<&'static str>,
}

/// A save that was committed.
#[derive(Debug)]
pub(super) struct Save {
    pub(super) step: u64,
    pub(super) path: String,
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    pub(super) stall_seconds: f64,
}

/// The events of a run, oldest first.
#[derive(Debug, Default)]
pub(super) struct History {
    pub(super) starts: Vec<Start>,
    /// The number of starts before those that are kept.
    pub(super) earlier_starts: usize,
    /// The number of starts, of all, that went on from a checkpoint.
    pub(super) resumes: usize,
    pub(super) saves: Vec<Save>,
    /// The number of saves before those that are kept.
    pub(super) earlier_saves: usize,
}

impl History {
    /// Reads a run's events; there are none if the file is not there.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let mut history = History::default();
        lines::read(path, |line| history.add(line))?;
        Ok(history)
    }

    /// Adds an event. Of long lists the oldest entries are dropped and counted.
    fn add(&mut self, line: Line) {
        let Line {
            event,
            time,
            step,
            ranks,
            resumed_from,
            path,
            bytes,
            seconds,
            stall_seconds,
        } = line;
        let step = step.unwrap_or(0);
        match event.as_str() {
            "start" => {
                self.earlier_starts += make_room(&mut self.starts);
                self.resumes += usize::from(resumed_from.is_some());
                self.starts.push(Start {
                    time,
                    step,
                    ranks,
                    resumed_from,
                    end: None,
                });
            }
            "checkpoint" => {
                self.earlier_saves += make_room(&mut self.saves);
                self.saves.push(Save {
                    step,
                    path: path.unwrap_or_default(),
                    bytes: bytes.unwrap_or(0),
                    seconds: seconds.unwrap_or(f64::NAN),
                    stall_seconds: stall_seconds.unwrap_or(f64::NAN),
                });
            }
            "stopped" => self.end("stopped by a signal"),
            "end" => self.end("done"),
            // Other events, also those of later versions, are not shown.
            _ => {}
        }
    }

    /// Notes how the process that started last has ended.
    fn end(&mut self, how: &'static str) {
        if let Some(start) = self.starts.last_mut() {
            start.end = Some(how);
        }
    }
}

/// Drops the first of a full list, and returns the number of those that were dropped.
fn make_room<T>(kept: &mut Vec<T>) -> usize {
    if kept.len() < KEPT {
        return 0;
    }
    kept.remove(0);
    1
}
