//! A rank that is a separate process, started by a launcher.

use std::hash::{DefaultHasher, Hash, Hasher as _};

use crate::ranks::Ranks;
use anyhow::{Result, bail, ensure};
use fsdp::comm::{BackendKind, CommError, Environment, ProcessGroup, init_process_group_within};

use super::arguments::TrainArguments;
use super::rank::{self, Job, RunEnd};
use crate::failure::{CommandError, usage_error};
use crate::job_failure::{UnreadableCheckpoint, is_without_launcher};

/// The place of this process among the ranks, and the way in which they reach each other.
pub(super) struct Launched {
    pub(super) environment: Environment,
    backend: BackendKind,
}

impl Launched {
    /// Finds the launcher of this process; `None` if ranks are threads.
    ///
    /// # Errors
    /// A launcher's variables that make no sense, or none where `--backend` needs one; a backend
    /// that this build has not; another number of ranks was asked for.
    pub(super) fn find(arguments: &TrainArguments) -> Result<Option<Self>> {
        let backend = match arguments.backend {
            None | Some(BackendKind::Local) => BackendKind::Tcp,
            Some(backend) => backend,
        };
        backend.check_compiled_in()?;
        let environment = match (arguments.backend, Environment::from_env()) {
            (Some(BackendKind::Local), _) => return Ok(None),
            (Some(BackendKind::Mpi), _) => started_by_mpi()?,
            (Some(_), environment) => environment?,
            (None, Ok(environment)) if environment.world_size == 1 => return Ok(None),
            (None, Ok(environment)) => environment,
            (None, Err(error)) if is_without_launcher(&error) => return Ok(None),
            (None, Err(error)) => return Err(error.into()),
        };
        let world_size = environment.world_size;
        if let Some(nproc) = arguments.nproc {
            ensure!(
                nproc == world_size,
                usage_error(
                    format!(
                        "`--nproc` is {nproc}, but the launcher has started {world_size} ranks"
                    ),
                    "leave out `--nproc`, or use threads with `--backend local`",
                )
            );
        }
        Ok(Some(Launched {
            environment,
            backend,
        }))
    }

    /// Returns the number of this rank among those of its machine.
    pub(super) fn local_rank(&self) -> usize {
        self.environment.local_rank.unwrap_or(self.environment.rank)
    }

    /// Returns the number of ranks of this machine; all, if the launcher does not tell.
    pub(super) fn local_world_size(&self) -> usize {
        self.environment
            .local_world_size
            .unwrap_or(self.environment.world_size)
    }

    /// Meets the other ranks.
    ///
    /// # Errors
    /// The rendezvous fails.
    pub(super) fn meet(&self, ranks: &Ranks) -> Result<ProcessGroup> {
        Ok(init_process_group_within(self.backend, ranks.deadline)?)
    }
}

/// Checks that all ranks of the group have the same options, text and first step, and trains with
/// them. If training fails, the group stays open until the process ends.
///
/// # Errors
/// Ranks that differ; the error of this rank, or that of another rank.
pub(super) fn run(group: &ProcessGroup, ranks: &Ranks, job: &Job<'_>) -> Result<RunEnd> {
    // Each process has read its own command line and its own copy of the text, and found its own
    // newest checkpoint, so compare them.
    let start = job.start_step();
    let text = job.text.digest();
    let options = format!(
        "first step: {start},\n{:#?}\n{:#?}\n{}\ndigest of the text: {text}",
        job.settings,
        job.batches,
        job.arguments.shared_options_text()
    );
    let mut hasher = DefaultHasher::new();
    options.hash(&mut hasher);
    let agreement = format!("train from step {start} with the same options and the same text");
    match group.agree_on(&agreement, hasher.finish(), Ok::<_, CommError>(())) {
        // The other ranks get this error too, so all of them show what they have.
        Err(CommError::SchemaMismatch { .. }) => {
            bail!(differing_options_error(&group.all_gather_object(&options)?))
        }
        outcome => outcome?,
    }
    let result = ranks.run_one(group.rank(), || rank::run(group.clone(), job))?;
    result.inspect_err(|error| {
        // Leaving the group tells the others of the failure. So keep the group until this process
        // ends, after it has reported its error. But a damaged checkpoint is an error on all ranks,
        // and they may continue with another checkpoint.
        if !error.is::<UnreadableCheckpoint>() {
            std::mem::forget(group.clone());
        }
    })
}

/// Returns the error of ranks that would not train the same, from the texts of their options: it
/// names the first line that differs from that of rank 0.
fn differing_options_error(texts: &[String]) -> CommandError {
    let differing = (1..texts.len())
        .find(|&rank| texts[rank] != texts[0])
        .unwrap_or(0);
    let mut lines = texts[0].lines().zip(texts[differing].lines());
    let shown = |line: &str| line.trim().trim_end_matches(',').to_owned();
    let what = match lines.find(|(first, other)| first != other) {
        Some((first, other)) => format!(
            "rank 0 has `{}`, and rank {differing} has `{}`",
            shown(first),
            shown(other)
        ),
        None => "one has more options than another".to_owned(),
    };
    usage_error(
        format!("the ranks were not started alike: {what}"),
        "give all ranks the same options and the same text",
    )
}

/// Reads the place of a process that an MPI launcher started. No address needs to be set, as MPI
/// connects the processes.
fn started_by_mpi() -> Result<Environment, CommError> {
    Environment::from_variables(|name| match std::env::var(name) {
        Err(_) if name == "MASTER_ADDR" => Some("localhost".to_owned()),
        value => value.ok(),
    })
}
