//! `fsdp train`: everything is checked before anything is written.

mod arguments;
mod launched;
mod rank;
mod report;
mod sample;
mod settings;
mod state;

use std::time::Duration;

use anyhow::{Error, Result};
use fsdp::checkpoint::latest_checkpoint;
use fsdp::comm::CommError;
use fsdp::data::{Batches, Text};
use fsdp::prelude::*;
use fsdp::ranks::Ranks;

use self::launched::Launched;
use self::rank::Job;
use self::settings::{Resume, Settings};
use super::failure::UsageError;
use super::output;

pub(crate) use self::arguments::TrainArguments;

/// # Errors
/// Whatever cannot be done as asked. Nothing has been written if that could be known beforehand.
pub(crate) fn run(arguments: &TrainArguments) -> Result<()> {
    let launched = Launched::find(arguments)?;
    let world_size = launched.as_ref().map_or(arguments.nproc.unwrap_or(1), Launched::world_size);
    let out = &arguments.out;
    let resume = match &arguments.init_from {
        Some(path) => Some(Resume::at(path)?),
        None => arguments.resume.then(|| Resume::newest(out)).transpose()?,
    };
    let settings = Settings::resolve(arguments, resume.as_ref())?;
    settings.gpt.validate()?;
    let text = match &settings.data {
        Some(path) => Text::open(path)?,
        None => Text::builtin(),
    };
    let batches =
        Batches { batch: settings.batch, seq: settings.gpt.seq, ranks: world_size, accumulation: arguments.accumulate };
    batches.check(&text)?;
    let mesh = mesh(arguments, world_size)?;
    if let Some(Resume { step, path, .. }) = &resume
        && *step >= arguments.steps
    {
        let steps = arguments.steps;
        if launched.as_ref().is_none_or(Launched::is_first) {
            output::talk(&format!("nothing to do: `{}` is at step {step} of {steps}", path.display()));
        }
        return Ok(());
    }
    if !arguments.resume {
        check_out_is_free(arguments)?;
    }

    let ranks = Ranks {
        // Those that share this machine.
        count: launched.as_ref().map_or(world_size, Launched::local_world_size),
        threads: arguments.threads,
        deadline: Duration::from_secs(arguments.timeout.get()),
    };
    let job = Job { arguments, settings, text, batches, resume, mesh, threads_per_rank: ranks.threads_per_rank() };
    if let Some(launched) = launched {
        return launched.run(&ranks, &job);
    }
    let results = ranks.run(|group| rank::run(group, &job))?;
    first_cause(results.into_iter().filter_map(Result::err))
}

/// The mesh of hybrid sharding: replicas x shards.
fn mesh(arguments: &TrainArguments, ranks: usize) -> Result<Option<DeviceMesh>> {
    if arguments.strategy != ShardingStrategy::HybridShard {
        return Ok(None);
    }
    let replicas = arguments.replicas.get();
    let mesh = DeviceMesh::new(&[replicas, ranks / replicas], &["replicate", "shard"], ranks);
    mesh.map(Some).map_err(|_| UsageError::Replicas { replicas, ranks }.into())
}

/// A run must not mix its checkpoints with those of another.
fn check_out_is_free(arguments: &TrainArguments) -> Result<()> {
    let out = &arguments.out;
    if !out.exists() {
        return Ok(());
    }
    match latest_checkpoint(out)? {
        Some(found) => Err(UsageError::OutIsTaken { directory: out.display().to_string(), step: found.step }.into()),
        None => Ok(()),
    }
}

/// The error that the others follow from: one that is not about other ranks, if there is one.
fn first_cause(errors: impl Iterator<Item = Error>) -> Result<()> {
    let distance = |error: &Error| {
        let of_group = error.chain().any(|cause| cause.is::<CommError>());
        // candle passes on what a collective inside a forward or backward says, as text.
        let of_candle = error.chain().any(|cause| cause.is::<candle_core::Error>());
        (of_group, of_candle)
    };
    errors.min_by_key(distance).map_or(Ok(()), Err)
}
