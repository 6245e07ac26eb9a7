//! The checkpoint that a run continues from: the newest, or an older one where that is damaged.

use anyhow::{Error, Result};
use fsdp::checkpoint::{Location, StepCheckpoint, list_checkpoints};

use super::arguments::ResumeMode;
use super::settings::Resume;
use crate::exit_codes;
use crate::job_failure::{NoCheckpoint, UnreadableCheckpoint};
use crate::outcome::exit_code;
use crate::output;

/// The checkpoints of a run that can be gone on from, as far as it is known.
pub(super) struct Candidates<'a> {
    run: &'a Location,
    mode: ResumeMode,
    /// `true` in the process that reports.
    reports: bool,
    damaged: Vec<Location>,
}

impl<'a> Candidates<'a> {
    pub(super) const fn new(run: &'a Location, mode: ResumeMode, reports: bool) -> Self {
        Candidates { run, mode, reports, damaged: Vec::new() }
    }

    /// Returns `true` if newer checkpoints than the one that is gone on from are damaged, so that they will be replaced.
    pub(super) const fn are_damaged(&self) -> bool {
        !self.damaged.is_empty()
    }

    /// Returns `true` if the run has no checkpoint yet.
    ///
    /// # Errors
    /// The storage cannot be read.
    pub(super) fn is_empty(&self) -> Result<bool> {
        Ok(!self.run.exists()? || list_checkpoints(self.run)?.is_empty())
    }

    /// Opens the newest checkpoint that is not known to be damaged.
    ///
    /// # Errors
    /// There is none; with `--resume=strict`, the newest is damaged.
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
        let all = list_checkpoints(self.run)?.into_iter().map(|StepCheckpoint { path, .. }| path);
        Ok(all.filter(|path| !self.damaged.contains(path)).collect())
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
