//! The checkpoint that a run continues from: the newest, or an older one where that is damaged.

use anyhow::{Error, Result, bail};
use fsdp::checkpoint::{Location, StepCheckpoint, list_to_resume};
use fsdp::formats::checkpoint::{check_has_metadata, has_lost_metadata};

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
    /// `None` if there is none. It may have lost its `.metadata`, which shows when it is opened.
    ///
    /// # Errors
    /// The storage cannot be read.
    pub(super) fn newest(&self) -> Result<Option<StepCheckpoint>> {
        Ok(self.list_undamaged(true)?.into_iter().next())
    }

    /// Returns the newest checkpoint that is not known to be damaged and has not lost its
    /// `.metadata`, and the newer one that has lost it, if that is the newest of all.
    ///
    /// # Errors
    /// The storage cannot be read.
    pub(super) fn newest_whole_and_lost(
        &self,
    ) -> Result<(Option<StepCheckpoint>, Option<StepCheckpoint>)> {
        let mut newest_lost = None;
        for checkpoint in self.list_undamaged(true)? {
            if !has_lost_metadata(&checkpoint.path)? {
                return Ok((Some(checkpoint), newest_lost));
            }
            newest_lost.get_or_insert(checkpoint);
        }
        Ok((None, newest_lost))
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
        open(path.clone()).map_err(|error| with_damage_context(error, &path))
    }

    /// Returns the damaged checkpoints that saves replace in a run that goes on after `step`. These
    /// are the ones that are known to be damaged, and those of later steps that have lost their
    /// `.metadata`, also on a branch that the run has left.
    ///
    /// # Errors
    /// The storage cannot be read.
    pub(super) fn list_replaced(&self, step: u64) -> Result<Vec<Location>> {
        let mut replaced = self.damaged.clone();
        // An object store is not asked once more: none is known to have lost it there.
        if self.location.local().is_none() {
            return Ok(replaced);
        }
        for checkpoint in self.list_undamaged(true)? {
            if checkpoint.step > step && has_lost_metadata(&checkpoint.path)? {
                replaced.push(checkpoint.path);
            }
        }
        Ok(replaced)
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
        let mut checkpoints = list_to_resume(&self.location)?;
        checkpoints.retain(|checkpoint| !self.damaged.contains(&checkpoint.path));
        Ok(checkpoints)
    }
}

/// Opens a checkpoint of the run.
///
/// # Errors
/// It is damaged, or has lost its `.metadata`.
fn open(path: Location) -> Result<Resume> {
    check_has_metadata(&path)?;
    Resume::open(path)
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
