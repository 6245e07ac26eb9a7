//! When and how a run's checkpoints are saved, and which of them stay.

use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use fsdp::checkpoint::{AsyncSaver, CheckpointError, Location, Retention, SaveReport, Saver, prune, step_name};
use fsdp::prelude::*;
use tracing::info_span;

use super::arguments::TrainArguments;
use super::report::{Report, Saved};
use crate::cli::output;

/// A run's checkpoints, as one rank sees them.
pub(super) struct Checkpoints {
    run: Location,
    retention: Retention,
    group: ProcessGroup,
    how: How,
    /// Removes old checkpoints. Training waits for it at the end only: others may be in the next step already.
    pruning: Option<JoinHandle<()>>,
    /// `true` if a save ended while pruning still ran, so that pruning has to start again.
    prune_again: bool,
}

enum How {
    /// Training waits.
    Now(Saver),
    /// Training goes on.
    Behind { saver: Box<AsyncSaver>, started: Option<Started> },
}

/// A save in the background.
struct Started {
    step: u64,
    stall: Duration,
    /// What came of it, if somebody has looked already: the error waits for all ranks to look.
    outcome: Option<Result<Option<SaveReport>, CheckpointError>>,
}

impl Checkpoints {
    /// Collective where saves run in the background.
    ///
    /// # Errors
    /// Those of [`AsyncSaver::new`].
    pub(super) fn new(arguments: &TrainArguments, group: &ProcessGroup) -> Result<Self> {
        let how = match arguments.async_save {
            true => How::Behind { saver: Box::new(AsyncSaver::new(group)?), started: None },
            false => How::Now(Saver::new()),
        };
        let retention = Retention { keep_last: arguments.keep_last, keep_every: arguments.keep_every };
        Ok(Checkpoints {
            run: arguments.checkpoints(),
            retention,
            group: group.clone(),
            how,
            pruning: None,
            prune_again: false,
        })
    }

    /// Saves the state after a step, or starts to. Every rank calls it; `clock` runs since training stopped for it.
    ///
    /// # Errors
    /// Those of the save; of the one before, if that ran in the background.
    pub(super) fn save(&mut self, step: u64, state: &StateDict, clock: Instant, report: Option<&Report>) -> Result<()> {
        self.wait(report)?;
        let path = self.run.join(step_name(step));
        if self.group.rank() == 0 {
            // What a killed run left of this very checkpoint.
            fsdp::dcp::storage::clean_stale(&path)?;
        }
        let options = SaveOptions::default();
        let failed = || format!("failed to save `{path}`");
        match &mut self.how {
            How::Now(saver) => {
                let saved = saver.save(&path, state, &self.group, &options).with_context(failed)?;
                self.done(step, &saved, clock.elapsed(), report)
            }
            How::Behind { saver, started } => {
                saver.save(&path, state, &options).with_context(failed)?;
                *started = Some(Started { step, stall: clock.elapsed(), outcome: None });
                Ok(())
            }
        }
    }

    /// Waits for the save in the background, if there is one. Every rank calls it.
    ///
    /// # Errors
    /// Those of that save, the same on every rank.
    pub(super) fn wait(&mut self, report: Option<&Report>) -> Result<()> {
        let How::Behind { saver, started } = &mut self.how else { return Ok(()) };
        let Some(Started { step, stall, outcome }) = started.take() else { return Ok(()) };
        let outcome = match outcome {
            Some(outcome) => outcome,
            None => info_span!("wait for the save before").in_scope(|| saver.wait()),
        };
        match outcome.with_context(|| format!("failed to save `{}`", self.run.join(step_name(step))))? {
            Some(saved) => self.done(step, &saved, stall, report),
            None => Ok(()),
        }
    }

    /// Tells of a save in the background as soon as it is done. Only the rank that reports looks; an error is kept until
    /// all ranks [`wait`](Checkpoints::wait).
    ///
    /// # Errors
    /// stdout is closed.
    pub(super) fn look(&mut self, report: &Report) -> Result<()> {
        let How::Behind { saver, started: Some(started) } = &mut self.how else { return Ok(()) };
        if started.outcome.is_some() || saver.is_saving() {
            return Ok(());
        }
        let (step, stall) = (started.step, started.stall);
        match saver.wait() {
            Ok(Some(saved)) => {
                started.outcome = Some(Ok(None));
                self.done(step, &saved, stall, Some(report))
            }
            outcome => {
                started.outcome = Some(outcome);
                Ok(())
            }
        }
    }

    /// A checkpoint is whole: tells of it, and removes those that need not stay.
    fn done(&mut self, step: u64, saved: &SaveReport, stall: Duration, report: Option<&Report>) -> Result<()> {
        let Some(report) = report else { return Ok(()) };
        let path = self.run.join(step_name(step));
        report.checkpoint(&Saved {
            step,
            path: path.name(),
            bytes: saved.total_bytes,
            seconds: saved.duration.as_secs_f64(),
            stall_seconds: stall.as_secs_f64(),
        })?;
        self.prune_again = self.pruning.as_ref().is_some_and(|pruning| !pruning.is_finished());
        if self.retention.keep_last.is_some() && !self.prune_again {
            let (run, retention) = (self.run.clone(), self.retention);
            let thread = Builder::new().name("prune".to_owned());
            self.pruning = thread.spawn(move || prune_and_tell(&run, &retention)).ok();
            self.prune_again = self.pruning.is_none();
        }
        Ok(())
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        if let Some(pruning) = self.pruning.take() {
            // It has said all that it had to say.
            pruning.join().ok();
        }
        if self.prune_again {
            prune_and_tell(&self.run, &self.retention);
        }
    }
}

/// Training does not end because an old checkpoint cannot be removed.
fn prune_and_tell(run: &Location, retention: &Retention) {
    if let Err(error) = prune(run, retention) {
        output::talk(&format!("failed to remove old checkpoints: {:#}", anyhow::Error::from(error)));
    }
}
