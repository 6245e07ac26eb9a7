//! Ranks that save to the same place without knowing of each other, as jobs do that were started
//! twice.

use anyhow::{Context as _, Result};
use fsdp_checkpoint::{CheckpointError, Location, SaveOptions, save};
use fsdp_comm::ProcessGroup;
use fsdp_formats::writer::WriteOptions;
use fsdp_layout::DeviceMesh;

use super::job::{Job, Shared};
use super::simulate::locked;
use super::state::part;

/// The versions of rivals begin at this number after the first of their job.
const FIRST: u64 = 50;

/// Returns the name of the place that the ranks of a job fight for.
fn name(job: Job) -> String {
    format!("contended-{}", job.first_version)
}

impl Shared {
    /// Lets each rank save the whole state, to a place where nothing may be replaced.
    pub(crate) fn save_alone(&self, job: Job, group: &ProcessGroup, run: &Location) -> Result<()> {
        let ranks = group.world_size();
        let alone = group.mesh_group(
            &DeviceMesh::new(&[ranks, 1], &["rivals", "alone"], ranks)?,
            1,
        )?;
        let (name, version) = (name(job), job.first_version + FIRST + group.rank() as u64);
        locked(&self.journal).begin(&name, version);
        // All are noted before one of them is done.
        group.barrier()?;
        let write = WriteOptions {
            threads: Some(1),
            ..WriteOptions::default()
        };
        let options = SaveOptions {
            overwrite: false,
            write,
            ..SaveOptions::default()
        };
        match save(
            run.join(&name),
            &part(Some(version), 0, 1)?,
            &alone,
            &options,
        ) {
            Ok(_) => {
                locked(&self.winners).push(version);
                locked(&self.journal).confirm_only(&name, version);
                Ok(())
            }
            Err(error) if is_taken(&error) => Ok(()),
            Err(error) => Err(error).context("a save of one rank"),
        }
    }

    /// Checks that one rival has won; none may have, if something went wrong.
    pub(crate) fn check_rivals(&self, job: Job) {
        let winners = locked(&self.winners).clone();
        if winners.len() > 1 || (winners.is_empty() && job.has_rivals && job.is_quiet) {
            self.violation(format!(
                "the versions {winners:?} were saved to `{}`",
                name(job)
            ));
        }
    }
}

/// Returns `true` if an error says that something is at the place already. The ranks of a group
/// tell each other so in words.
fn is_taken(error: &CheckpointError) -> bool {
    error.to_string().contains("exists already")
}
