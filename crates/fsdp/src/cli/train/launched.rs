//! A rank that is a process of its own, which a launcher has started.

use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::time::Duration;

use anyhow::{Error, Result};
use fsdp::comm::{CommError, Environment, TcpOptions};
use fsdp::prelude::*;
use fsdp::ranks::Ranks;

use super::arguments::{BackendName, TrainArguments};
use super::rank::{self, Job};
use crate::cli::failure::UsageError;

/// How long a rank that has failed asks its group what happened.
const LAST_QUESTION: Duration = Duration::from_millis(1);

/// This process's place among the ranks.
pub(super) struct Launched(Environment);

impl Launched {
    /// `None`: ranks are threads.
    ///
    /// # Errors
    /// A launcher's variables that make no sense, or none with `--backend tcp`; another number of ranks was asked for.
    pub(super) fn find(arguments: &TrainArguments) -> Result<Option<Self>> {
        let environment = match (arguments.backend, Environment::from_env()) {
            (Some(BackendName::Local), _) => return Ok(None),
            (Some(BackendName::Tcp), environment) => environment?,
            (None, Ok(environment)) if environment.world_size == 1 => return Ok(None),
            (None, Ok(environment)) => environment,
            (None, Err(CommError::Environment { variable, .. })) if is_unset(&variable) && variable == "RANK" => {
                return Ok(None);
            }
            (None, Err(error)) => return Err(error.into()),
        };
        let world_size = environment.world_size;
        match arguments.nproc {
            Some(nproc) if nproc != world_size => Err(UsageError::Nproc { nproc, world_size }.into()),
            _ => Ok(Some(Launched(environment))),
        }
    }

    pub(super) const fn world_size(&self) -> usize {
        self.0.world_size
    }

    /// Ranks of this machine; all, if the launcher does not tell.
    pub(super) fn local_world_size(&self) -> usize {
        self.0.local_world_size.unwrap_or(self.0.world_size)
    }

    /// Whether this is rank 0, which talks.
    pub(super) const fn is_first(&self) -> bool {
        self.0.rank == 0
    }

    /// Meets the other ranks, and trains with them.
    ///
    /// # Errors
    /// The rendezvous; whatever goes wrong on this rank, or on another one.
    pub(super) fn run(self, ranks: &Ranks, job: &Job<'_>) -> Result<()> {
        let group = TcpOptions::new(self.0).deadline(ranks.deadline).connect()?;
        // Each has read its own command line, and found its own newest checkpoint.
        let mut hasher = DefaultHasher::new();
        format!("{:?} {} {:?}", job.settings, job.start(), job.batches).hash(&mut hasher);
        let start = format!("train from step {}", job.start());
        group.agree_on(&start, hasher.finish(), Ok::<_, CommError>(()))?;
        let result = ranks.run_one(group.rank(), || rank::run(group.clone(), job))?;
        result.map_err(|error| {
            let error = with_cause(error, &group);
            // The others hear of it when this process ends, which is after it has told its error.
            std::mem::forget(group);
            error
        })
    }
}

fn is_unset(variable: &str) -> bool {
    std::env::var_os(variable).is_none_or(|value| value.is_empty())
}

/// candle passes on what a collective inside a forward or backward says as text. The group still knows the error.
fn with_cause(error: Error, group: &ProcessGroup) -> Error {
    let has = |is: fn(&(dyn std::error::Error + 'static)) -> bool| error.chain().any(is);
    if has(|cause| cause.is::<CommError>()) || !has(|cause| cause.is::<candle_core::Error>()) {
        return error;
    }
    match group.with_deadline(LAST_QUESTION).barrier() {
        Err(CommError::Timeout { deadline: LAST_QUESTION, .. }) | Ok(()) => error,
        Err(cause) if cause.ends_group() => Error::from(cause).context(error.to_string()),
        Err(_) => error,
    }
}
