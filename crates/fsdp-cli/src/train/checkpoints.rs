//! The saves of a run's checkpoints, and the reports of them.

use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result};
use fsdp::checkpoint::{CheckpointError, Location, STORAGE_DEADLINE, SaveReport, StepCheckpoint};
use fsdp::formats::FileError;
use fsdp::formats::storage::Durable;
use fsdp::layout::{ErrorKind, Failure as _};
use fsdp::prelude::*;
use tracing::info_span;

use super::arguments::{ResumeMode, TrainArguments};
use super::report::Reporter;
use crate::exit_codes;
use crate::failure::CommandError;
use crate::gpt::Gpt;
use crate::job_failure::NO_PLACE_HINT;
use crate::output;

/// A run's checkpoints, as one rank sees them.
pub(super) struct Checkpoints {
    pub(super) checkpointer: Checkpointer,
    /// `true` if training continues during saves.
    pub(super) in_background: bool,
    background_save: Option<BackgroundSave>,
    /// The damaged checkpoints that saves replace, and have not replaced yet.
    damaged: Vec<Location>,
}

/// Returns the newest step of the memory tier if it is newer than `newest_saved`; `None` if none
/// is. A tier that cannot be used is left out, with a warning. This is a collective.
///
/// # Errors
/// A rank was lost; with `--resume=strict`, the errors of [`Checkpointer::latest_in_memory`].
pub(super) fn latest_in_memory(
    arguments: &TrainArguments,
    group: &ProcessGroup,
    newest_saved: Option<&StepCheckpoint>,
) -> Result<Option<StepCheckpoint>> {
    // A strict resume must not fall back to an older step without a word, so there a tier that
    // cannot be read is an error.
    let is_strict = arguments.resume_mode() == ResumeMode::Strict;
    let outcome =
        make_checkpointer(arguments, group, None)?.latest_in_memory(newest_saved, is_strict);
    let failure_text = "failed to look into the memory tier";
    if is_strict {
        return outcome.context(failure_text);
    }
    Ok(warn_unless_lost(outcome, failure_text, group.rank() == 0)?.flatten())
}

/// Returns the newest step of the memory tier without reading it; `None` if there is none. This is
/// a collective.
///
/// # Errors
/// The errors of [`Checkpointer::step_in_memory`].
pub(super) fn step_in_memory(
    arguments: &TrainArguments,
    group: &ProcessGroup,
) -> Result<Option<u64>> {
    make_checkpointer(arguments, group, None)?
        .step_in_memory()
        .context("failed to look into the memory tier")
}

/// Turns an error of the memory tier into a warning and `None`, because the run can continue
/// without the tier. Every rank has the same error, so all of them continue. The warning comes from
/// the rank with `is_reporter`.
///
/// # Errors
/// A rank was lost.
fn warn_unless_lost<T>(
    outcome: Result<T, CheckpointError>,
    failure_text: &str,
    is_reporter: bool,
) -> Result<Option<T>> {
    match outcome {
        Err(error) if error.kind() != ErrorKind::RankLost => {
            if is_reporter {
                output::print_message(&format!("warning: {failure_text}: {:#}", Error::new(error)));
            }
            Ok(None)
        }
        outcome => Ok(Some(outcome?)),
    }
}

/// Makes the checkpointer of a run. `loaded_parts` are the parts that it loads; `None` for all.
/// This is a collective.
fn make_checkpointer(
    arguments: &TrainArguments,
    group: &ProcessGroup,
    loaded_parts: Option<Vec<String>>,
) -> Result<Checkpointer> {
    let options = CheckpointerOptions {
        retention: Retention {
            keep_last: arguments.keep_last,
            keep_every: arguments.keep_every,
        },
        // Not strict: the checkpoint may also hold values that another program saved.
        save: SaveOptions {
            incremental: arguments.incremental,
            ..SaveOptions::default()
        },
        load: LoadOptions {
            strict: false,
            only: loaded_parts,
            read_once: arguments.read_once.then_some(true),
            ..LoadOptions::default()
        },
        memory_tier: arguments.memory_tier.as_ref().map(Location::from),
        pinned_bytes: None,
    };
    Ok(Checkpointer::new(
        arguments.checkpoint_location(),
        group,
        options,
    )?)
}

/// Removes a damaged checkpoint from an object store, unless there are objects that no save has
/// written. Then the save to its place is refused.
///
/// # Errors
/// The errors of the store.
fn remove_damaged(location: &Location) -> Result<(), FileError> {
    // A user may have put other objects there, which must not be lost with the checkpoint.
    for name in location.names()? {
        let is_of_save = name == ".metadata"
            || name.starts_with(".integrity")
            || name.starts_with("__") && name.ends_with(".distcp");
        if !is_of_save {
            return Ok(());
        }
    }
    Durable::new().remove_checkpoint(location)?;
    Ok(())
}

/// A save in the background.
struct BackgroundSave {
    step: u64,
    stall: Duration,
    /// The outcome, if this rank has asked for it already. An error is kept until all ranks ask.
    outcome: Option<Result<Option<SaveReport>, CheckpointError>>,
}

impl Checkpoints {
    /// Prepares the saves and the load of a run. Saves replace `damaged` checkpoints, and the load
    /// is limited to `loaded_parts`. This is a collective.
    ///
    /// # Errors
    /// The errors of [`Checkpointer::new`].
    pub(super) fn new(
        arguments: &TrainArguments,
        group: &ProcessGroup,
        damaged: &[Location],
        loaded_parts: Option<Vec<String>>,
    ) -> Result<Self> {
        let mut checkpointer = make_checkpointer(arguments, group, loaded_parts)?;
        checkpointer.set_damaged(damaged.to_vec());
        Ok(Checkpoints {
            checkpointer,
            in_background: arguments.async_save,
            background_save: None,
            damaged: damaged.to_vec(),
        })
    }

    /// Checks that checkpoints can be saved in `place`, the run's. Every rank calls it.
    ///
    /// # Errors
    /// The same on every rank: the errors of the storage.
    pub(super) fn check_writable(&self, place: &Location) -> Result<()> {
        self.checkpointer
            .check_writable()
            .map_err(|source| match source.kind() {
                ErrorKind::RankLost | ErrorKind::NoSpace => source.into(),
                // The operating system's error is the cause, and may be of a kind with another
                // code; that the run has no place to save is what counts.
                _ => Error::new(source).context(CommandError {
                    exit_code: exit_codes::IO,
                    message: format!("no checkpoint can be saved in `{place}`"),
                    hint: Some(NO_PLACE_HINT),
                }),
            })
    }

    /// Saves the state after a step to the memory tier. A failure is a warning only. Every rank
    /// calls it.
    ///
    /// # Errors
    /// A rank was lost; stdout is closed.
    pub(super) fn save_to_memory(
        &mut self,
        step: u64,
        run: &TrainState<Gpt>,
        reporter: Option<&Reporter>,
    ) -> Result<()> {
        let outcome = self.checkpointer.save_to_memory(step, run);
        let failure_text = format!("failed to save step {step} to the memory tier");
        let save_report = warn_unless_lost(outcome, &failure_text, reporter.is_some())?;
        if let (Some(save_report), Some(reporter)) = (save_report, reporter) {
            reporter.memory_saved(
                step,
                save_report.total_bytes,
                save_report.duration.as_secs_f64(),
            )?;
        }
        Ok(())
    }

    /// Removes the run's steps from the memory tier. A failure is a warning only. Every rank calls
    /// it.
    ///
    /// # Errors
    /// A rank was lost.
    pub(super) fn clear_memory(&mut self, is_reporter: bool) -> Result<()> {
        let outcome = self.checkpointer.clear_memory();
        warn_unless_lost(outcome, "failed to clear the memory tier", is_reporter).map(drop)
    }

    /// Saves the state after a step, or starts to. Every rank calls it.
    ///
    /// # Errors
    /// The errors of this save; for a save in the background, those of the previous one.
    pub(super) fn save(
        &mut self,
        step: u64,
        run: &TrainState<Gpt>,
        reporter: Option<&Reporter>,
    ) -> Result<()> {
        // The wait for the save before counts as a part of this save: training stands still for it.
        let start = Instant::now();
        self.wait(reporter)?;
        self.make_room(step, run.model.group())?;
        if self.in_background {
            self.checkpointer
                .save_async(step, run)
                .with_context(|| self.failure_text(step))?;
            self.background_save = Some(BackgroundSave {
                step,
                stall: start.elapsed(),
                outcome: None,
            });
            return Ok(());
        }
        let save_report = self
            .checkpointer
            .save(step, run)
            .with_context(|| self.failure_text(step))?;
        self.report_saved(step, &save_report, start.elapsed(), reporter)
    }

    /// Removes a damaged checkpoint of this step from an object store. A directory is replaced in
    /// one step, which no object store can do. Every rank calls it.
    ///
    /// # Errors
    /// The same on every rank: the errors of the store.
    fn make_room(&mut self, step: u64, group: &ProcessGroup) -> Result<()> {
        let location = self.checkpointer.location(step);
        // Saves of other steps are not in the way of a damaged checkpoint.
        let Some(index) = self.damaged.iter().position(|damaged| *damaged == location) else {
            return Ok(());
        };
        // It is removed once: a later save of the same step would find its own files there.
        self.damaged.swap_remove(index);
        if location.local().is_some() {
            return Ok(());
        }
        let outcome = match group.rank() {
            0 => remove_damaged(&location),
            _ => Ok(()),
        };
        let group = group.with_deadline(group.deadline().max(STORAGE_DEADLINE));
        let outcome = group.agree("remove a damaged checkpoint", outcome);
        outcome.with_context(|| format!("failed to remove the damaged `{location}`"))
    }

    /// Waits for the save in the background, if there is one. Every rank calls it.
    ///
    /// # Errors
    /// The errors of that save, the same on every rank.
    pub(super) fn wait(&mut self, reporter: Option<&Reporter>) -> Result<()> {
        // Only the last save can still be in the background, because each one waits for the one
        // before.
        let Some(BackgroundSave {
            step,
            stall,
            outcome,
        }) = self.background_save.take()
        else {
            return Ok(());
        };
        let outcome = match outcome {
            Some(outcome) => outcome,
            None => info_span!("wait for the save before").in_scope(|| self.checkpointer.wait()),
        };
        match outcome.with_context(|| self.failure_text(step))? {
            Some(save_report) => {
                self.report_saved(step, &save_report, stall + save_report.waited, reporter)
            }
            None => Ok(()),
        }
    }

    /// Reports a save in the background as soon as it is done. Only the rank that reports asks; an
    /// error is kept until all ranks [`wait`](Checkpoints::wait).
    ///
    /// # Errors
    /// stdout is closed.
    pub(super) fn report_if_finished(&mut self, reporter: &Reporter) -> Result<()> {
        let Some(background_save) = &mut self.background_save else {
            return Ok(());
        };
        // Looking must never wait: the next step begins right after this.
        if background_save.outcome.is_some() || self.checkpointer.is_saving() {
            return Ok(());
        }
        let outcome = self.checkpointer.wait();
        // An error is not reported by this rank alone. All ranks return it together when they next
        // wait.
        let Ok(Some(save_report)) = outcome else {
            background_save.outcome = Some(outcome);
            return Ok(());
        };
        background_save.outcome = Some(Ok(None));
        let step = background_save.step;
        let stall = background_save.stall + save_report.waited;
        self.report_saved(step, &save_report, stall, Some(reporter))
    }

    /// Returns the message of a save after this step that has failed.
    fn failure_text(&self, step: u64) -> String {
        format!("failed to save `{}`", self.checkpointer.location(step))
    }

    /// Reports a checkpoint that is whole, on the rank with a reporter.
    fn report_saved(
        &self,
        step: u64,
        save_report: &SaveReport,
        stall: Duration,
        reporter: Option<&Reporter>,
    ) -> Result<()> {
        let Some(reporter) = reporter else {
            return Ok(());
        };
        reporter.checkpoint_saved(step, &self.checkpointer.location(step), save_report, stall)
    }
}
