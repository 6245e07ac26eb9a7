//! The checkpoint that a run continues from: the newest, or an older one where that is damaged.

use anyhow::{Error, Result, bail};
use fsdp::checkpoint::{Location, StepCheckpoint, list_newest_first};

use super::arguments::{ResumeMode, TrainArguments};
use super::settings::Resume;
use crate::exit_codes;
use crate::failure::CommandError;
use crate::job_failure::UnreadableCheckpoint;
use crate::outcome::exit_code;
use crate::output;

/// The checkpoints of a run that can be gone on from, as far as it is known.
pub(super) struct Candidates<'a> {
    pub(super) arguments: &'a TrainArguments,
    pub(super) mode: ResumeMode,
    pub(super) location: Location,
    /// `true` in the process that reports.
    pub(super) is_reporter: bool,
    /// The damaged checkpoints that are newer than the one to continue from.
    pub(super) damaged: Vec<Location>,
    /// The newest step of the memory tier, if it is newer than all undamaged checkpoints.
    pub(super) memory_step: Option<StepCheckpoint>,
    /// `true` if a step of the memory tier turned out to be damaged while it was loaded.
    pub(super) is_memory_damaged: bool,
    /// The last damage that was found, until the next candidate is chosen.
    damage: Option<(Location, Error)>,
}

impl<'a> Candidates<'a> {
    /// Returns the candidates before any is looked for.
    pub(super) fn new(arguments: &'a TrainArguments, is_reporter: bool) -> Self {
        Candidates {
            arguments,
            mode: arguments.resume_mode(),
            location: arguments.checkpoint_location(),
            is_reporter,
            damaged: Vec::new(),
            memory_step: None,
            is_memory_damaged: false,
            damage: None,
        }
    }

    /// Returns the newest checkpoint that is not known to be damaged, without the memory tier;
    /// `None` if there is none.
    ///
    /// # Errors
    /// The storage cannot be read.
    pub(super) fn newest(&self) -> Result<Option<StepCheckpoint>> {
        Ok(self.list_undamaged(true)?.into_iter().next())
    }

    /// Returns `true` if the run has no checkpoint yet.
    ///
    /// # Errors
    /// The storage cannot be read.
    pub(super) fn is_empty(&self) -> Result<bool> {
        Ok(self.memory_step.is_none() && self.damage.is_none() && self.newest()?.is_none())
    }

    /// Opens the newest checkpoint that is not known to be damaged, or the newer step in memory.
    /// Warns of the last damage that was found.
    ///
    /// # Errors
    /// There is no such checkpoint, or it is damaged ([`UnreadableCheckpoint`]).
    pub(super) fn open_newest(&mut self) -> Result<Resume> {
        let damage = self.damage.take();
        // A run that was killed before its first checkpoint may have none but in memory.
        let may_be_absent =
            self.mode == ResumeMode::Auto || self.memory_step.is_some() || self.is_memory_damaged;
        let undamaged = self.list_undamaged(may_be_absent)?.into_iter().next();
        // The step in memory is newer than all undamaged checkpoints.
        let Some(StepCheckpoint { path, .. }) = self.memory_step.clone().or(undamaged) else {
            bail!(match damage {
                Some((_, error)) => error,
                None => Error::new(CommandError {
                    exit_code: exit_codes::INCOMPLETE,
                    message: format!("`{}` holds no committed checkpoint", self.location),
                    hint: Some(
                        "check `--out`, or leave out `--resume` to start from the beginning"
                    ),
                }),
            });
        };
        if let Some((damaged, error)) = damage
            && self.is_reporter
        {
            output::print_message(&format!(
                "warning: `{damaged}` is damaged, and the one before it is taken: {error:#}"
            ));
        }
        Resume::open(path.clone()).map_err(|error| with_damage_context(error, &path))
    }

    /// Marks a checkpoint as damaged, so that the one before it is next.
    ///
    /// # Errors
    /// The damage, with `--resume=strict`, or if it is known already: then there was no checkpoint
    /// before.
    pub(super) fn fall_back(&mut self, path: Location, error: Error) -> Result<()> {
        if self.mode == ResumeMode::Strict || self.damaged.contains(&path) {
            return Err(error);
        }
        if self.memory_step.take_if(|step| step.path == path).is_some() {
            self.is_memory_damaged = true;
        } else {
            self.damaged.push(path.clone());
        }
        self.damage = Some((path, error));
        Ok(())
    }

    /// Returns the checkpoints of the run that are not known to be damaged, the newest first.
    fn list_undamaged(&self, may_be_absent: bool) -> Result<Vec<StepCheckpoint>> {
        if may_be_absent && !self.location.exists()? {
            return Ok(Vec::new());
        }
        let mut checkpoints = list_newest_first(&self.location)?;
        checkpoints.retain(|checkpoint| !self.damaged.contains(&checkpoint.path));
        Ok(checkpoints)
    }
}

/// Adds to an error in loading a checkpoint that the checkpoint is damaged, if that is the reason.
pub(super) fn with_damage_context(error: Error, path: &Location) -> Error {
    match exit_code(&error) {
        exit_codes::CORRUPT | exit_codes::INCOMPLETE => {
            error.context(UnreadableCheckpoint { path: path.clone() })
        }
        _ => error,
    }
}
