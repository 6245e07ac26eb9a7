//! The checkpoint that a run continues from: the newest, or an older one where that is damaged.

use anyhow::{Error, Result};
use fsdp::checkpoint::{Location, StepCheckpoint, list_newest_first};

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
    /// The damaged checkpoints that are newer than the one to continue from.
    pub(super) damaged: Vec<Location>,
    /// The newest step of the memory tier, if it is newer than all undamaged checkpoints.
    pub(super) memory: Option<StepCheckpoint>,
    /// `true` if a step of the memory tier turned out to be damaged while it was loaded.
    pub(super) is_memory_damaged: bool,
    /// The last damage that was found, until the next candidate is chosen.
    damage: Option<(Location, Error)>,
}

impl<'a> Candidates<'a> {
    pub(super) const fn new(run: &'a Location, mode: ResumeMode, reports: bool) -> Self {
        Candidates {
            run,
            mode,
            reports,
            damaged: Vec::new(),
            memory: None,
            is_memory_damaged: false,
            damage: None,
        }
    }

    /// Returns the newest checkpoint that is not known to be damaged.
    ///
    /// # Errors
    /// The storage cannot be read.
    pub(super) fn newest(&self) -> Result<Option<StepCheckpoint>> {
        if !self.run.exists()? {
            return Ok(None);
        }
        let checkpoints = list_newest_first(self.run)?.into_iter();
        Ok(checkpoints
            .filter(|checkpoint| !self.damaged.contains(&checkpoint.path))
            .next())
    }

    /// Returns `true` if the run has no checkpoint yet.
    ///
    /// # Errors
    /// The storage cannot be read.
    pub(super) fn is_empty(&self) -> Result<bool> {
        Ok(self.memory.is_none() && self.damage.is_none() && self.of_run()?.is_empty())
    }

    /// Opens the newest checkpoint that is not known to be damaged.
    ///
    /// # Errors
    /// There is no such checkpoint, or it is damaged ([`UnreadableCheckpoint`]).
    pub(super) fn open_newest(&mut self) -> Result<Resume> {
        let damage = self.damage.take();
        // The step in memory is newer than all undamaged checkpoints.
        let mut newest = self.memory.clone();
        for checkpoint in self.of_run()? {
            if newest.is_none() && !self.damaged.contains(&checkpoint.path) {
                newest = Some(checkpoint);
            }
        }
        let Some(StepCheckpoint { path, .. }) = newest else {
            let directory = self.run.to_string();
            return Err(match damage {
                Some((_, error)) => error,
                None => NoCheckpoint { directory }.into(),
            });
        };
        if let Some((damaged, error)) = damage
            && self.reports
        {
            output::talk(&format!(
                "warning: `{damaged}` is damaged, and the one before it is taken: {error:#}"
            ));
        }
        Resume::open(path.clone()).map_err(|error| named_if_damaged(error, &path))
    }

    /// Takes a checkpoint for damaged, so that the one before it is next.
    ///
    /// # Errors
    /// The damage, with `--resume=strict`, or if it is known already: then there was no checkpoint
    /// before.
    pub(super) fn fall_back(&mut self, path: Location, error: Error) -> Result<()> {
        if self.mode == ResumeMode::Strict || self.damaged.contains(&path) {
            return Err(error);
        }
        if self.memory.take_if(|memory| memory.path == path).is_some() {
            self.is_memory_damaged = true;
        } else {
            self.damaged.push(path.clone());
        }
        self.damage = Some((path, error));
        Ok(())
    }

    /// Returns the checkpoints of the run, the newest first.
    fn of_run(&self) -> Result<Vec<StepCheckpoint>> {
        // A run that was killed before its first checkpoint may have none but in memory.
        let may_be_absent =
            self.mode == ResumeMode::Auto || self.memory.is_some() || self.is_memory_damaged;
        if may_be_absent && !self.run.exists()? {
            return Ok(Vec::new());
        }
        Ok(list_newest_first(self.run)?)
    }
}

/// Adds to an error in loading a checkpoint that the checkpoint is damaged, if that is the reason.
pub(super) fn named_if_damaged(error: Error, path: &Location) -> Error {
    match exit_code(&error) {
        exit_codes::CORRUPT | exit_codes::INCOMPLETE => {
            error.context(UnreadableCheckpoint { path: path.clone() })
        }
        _ => error,
    }
}
