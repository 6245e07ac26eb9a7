//! The checkpoint that a run continues from: the newest, or an older one where that is damaged.

use anyhow::{Error, Result};
use fsdp::checkpoint::{Location, StepCheckpoint, list_checkpoints};

use super::arguments::ResumeMode;
use super::settings::Resume;
use crate::exit_codes;
use crate::job_failure::{JobError, NoCheckpoint, UnreadableCheckpoint};
use crate::outcome::exit_code;
use crate::output;

/// The checkpoints of a run that can be gone on from, as far as it is known.
pub(super) struct Candidates<'a> {
    run: &'a Location,
    mode: ResumeMode,
    /// `true` in the process that reports.
    reports: bool,
    damaged: Vec<Location>,
    /// The newest step of the memory tier, if that is newer than the newest checkpoint.
    memory: Option<StepCheckpoint>,
}

impl<'a> Candidates<'a> {
    pub(super) const fn new(run: &'a Location, mode: ResumeMode, reports: bool) -> Self {
        Candidates { run, mode, reports, damaged: Vec::new(), memory: None }
    }

    /// Sets the newest step of the memory tier, which must be newer than the newest checkpoint.
    ///
    /// # Errors
    /// The run starts from the beginning, but the tier already holds steps of a run with the same directory.
    pub(super) fn set_memory(&mut self, memory: Option<StepCheckpoint>) -> Result<()> {
        self.memory = memory;
        match &self.memory {
            Some(StepCheckpoint { step, path }) if self.mode == ResumeMode::No => {
                Err(JobError::OutIsTaken { directory: path.to_string(), step: *step }.into())
            }
            _ => Ok(()),
        }
    }

    /// Returns `true` if checkpoints newer than the one to continue from are damaged, so that they will be replaced.
    pub(super) fn are_damaged(&self) -> bool {
        self.damaged.iter().any(|path| self.memory.as_ref().is_none_or(|memory| memory.path != *path))
    }

    /// Returns `true` if the run has no checkpoint yet.
    ///
    /// # Errors
    /// The storage cannot be read.
    pub(super) fn is_empty(&self) -> Result<bool> {
        Ok(self.memory.is_none() && self.of_run()?.is_empty())
    }

    /// Opens the newest checkpoint that is not known to be damaged.
    ///
    /// # Errors
    /// There is no such checkpoint; with `--resume=strict`, the newest checkpoint is damaged.
    pub(super) fn open_newest(&mut self) -> Result<Resume> {
        loop {
            let Some(path) = self.left()?.pop() else {
                return Err(NoCheckpoint { directory: self.run.to_string() }.into());
            };
            match Resume::open(path.clone()) {
                Err(error) if is_damage(&error) => self.fall_back(path, error)?,
                resume => return resume,
            }
        }
    }

    /// Takes a checkpoint for damaged, so that the one before it is next.
    ///
    /// # Errors
    /// The damage, if there is none before it, or with `--resume=strict`.
    pub(super) fn fall_back(&mut self, path: Location, error: Error) -> Result<()> {
        let has_older = self.left()?.iter().any(|other| *other != path);
        if self.mode == ResumeMode::Strict || !has_older {
            return Err(error);
        }
        if self.reports {
            output::talk(&format!("warning: `{path}` is damaged, and the one before it is taken: {error:#}"));
        }
        self.damaged.push(path);
        Ok(())
    }

    /// Returns the checkpoints that are not known to be damaged, the oldest first.
    fn left(&self) -> Result<Vec<Location>> {
        // The step in memory is newer than all checkpoints.
        let all = self.of_run()?.into_iter().chain(self.memory.clone()).map(|StepCheckpoint { path, .. }| path);
        Ok(all.filter(|path| !self.damaged.contains(path)).collect())
    }

    /// Returns the checkpoints of the run, the oldest first.
    fn of_run(&self) -> Result<Vec<StepCheckpoint>> {
        // A run that was killed before its first checkpoint may have none but in memory.
        let is_there = self.memory.is_none() && self.mode != ResumeMode::Auto || self.run.exists()?;
        Ok(if is_there { list_checkpoints(self.run)? } else { Vec::new() })
    }
}

/// Says of an error in loading a checkpoint if that is damaged.
pub(super) fn named_if_damaged(error: Error, path: &Location) -> Error {
    if !is_damage(&error) {
        return error;
    }
    error.context(UnreadableCheckpoint { path: path.clone() })
}

fn is_damage(error: &Error) -> bool {
    matches!(exit_code(error), exit_codes::CORRUPT | exit_codes::INCOMPLETE)
}
