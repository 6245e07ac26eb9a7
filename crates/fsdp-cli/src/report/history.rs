//! The events of a run: its starts, its checkpoints, its ends.

use std::path::Path;

use anyhow::Result;
use serde::Deserialize;

use super::lines;

/// The events of each kind that are kept, the newest.
const MAX_EVENTS: usize = 500;

/// A line of `events.jsonl`, as far as the page needs it.
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum EventLine {
    Start(StartEvent),
    Checkpoint(SaveEvent),
    Stopped,
    End,
    /// Other events, also those of later versions, are not shown.
    #[serde(other)]
    Other,
}

/// A process began or continued the run.
#[derive(Debug, Deserialize)]
pub(super) struct StartEvent {
    /// Seconds since 1970.
    pub(super) time: Option<f64>,
    /// The steps done before.
    pub(super) step: u64,
    pub(super) ranks: Option<u64>,
    pub(super) resumed_from: Option<String>,
    /// The way in which it ended: at its last step, or by a signal. `None` if it was killed or
    /// crashed.
    #[serde(skip)]
    pub(super) end_text: Option<&'static str>,
}

/// A save was committed.
#[derive(Debug, Deserialize)]
pub(super) struct SaveEvent {
    pub(super) step: u64,
    pub(super) path: String,
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    pub(super) stall_seconds: f64,
}

/// The events of a run, oldest first.
#[derive(Debug, Default)]
pub(super) struct History {
    pub(super) starts: Vec<StartEvent>,
    /// The number of starts before those that are kept.
    pub(super) earlier_starts: usize,
    /// The number of starts, of all, that continued from a checkpoint.
    pub(super) resumes: usize,
    pub(super) saves: Vec<SaveEvent>,
    /// The number of saves before those that are kept.
    pub(super) earlier_saves: usize,
}

impl History {
    /// Reads a run's events; there are none if the file does not exist.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let mut history = History::default();
        lines::parse_lines(path, |line| history.record(line))?;
        Ok(history)
    }

    /// Adds an event. Of long lists the oldest entries are dropped and counted.
    fn record(&mut self, line: EventLine) {
        match line {
            EventLine::Start(start) => {
                self.earlier_starts += drop_oldest(&mut self.starts);
                // Resumes are counted over all starts, also those that are dropped from the list.
                self.resumes += usize::from(start.resumed_from.is_some());
                self.starts.push(start);
            }
            EventLine::Checkpoint(save) => {
                self.earlier_saves += drop_oldest(&mut self.saves);
                self.saves.push(save);
            }
            EventLine::Stopped => self.record_end("stopped by a signal"),
            EventLine::End => self.record_end("done"),
            EventLine::Other => {}
        }
    }

    /// Records how the process that started last has ended.
    fn record_end(&mut self, description: &'static str) {
        // The file may begin in the middle of a run, if somebody has shortened it.
        if let Some(start) = self.starts.last_mut() {
            start.end_text = Some(description);
        }
    }
}

/// Drops the first event of a full list, and returns the number that were dropped: 0 or 1.
fn drop_oldest<T>(events: &mut Vec<T>) -> usize {
    if events.len() < MAX_EVENTS {
        return 0;
    }
    events.remove(0);
    1
}
