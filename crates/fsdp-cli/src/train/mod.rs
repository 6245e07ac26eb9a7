//! `fsdp train`. Everything is checked before anything is written.

mod arguments;
mod checkpoints;
mod device;
mod fallback;
mod launched;
mod optimizers;
mod rank;
mod report;
mod sample;
mod settings;
mod sparkline;
mod state;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::cpu_threads;
use crate::data::{Batches, Text};
use crate::ranks::Ranks;
use anyhow::{Context as _, Result, bail, ensure};
use fsdp::checkpoint::{Location, StepCheckpoint};
use fsdp::prelude::*;
use serde_json::Value;

use self::checkpoints::{latest_in_memory, step_in_memory};
use self::fallback::{Candidates, with_damage_context};
use self::launched::Launched;
use self::rank::{Job, RunEnd};
use self::settings::{Resume, Settings};
use super::output;
use crate::failure::{Stopped, usage_error};
use crate::job_failure::{UnreadableCheckpoint, is_about_others, out_is_taken_error};
use crate::logs;
use crate::report::{EVENTS_FILE, lines};
use crate::stop::StopRequest;

pub(crate) use self::arguments::TrainArguments;
use self::arguments::{DeviceName, ResumeMode, elastic_job, restart_count};

/// Returns the file for this process's trace; `None` without `--trace`. If ranks are processes,
/// each writes a file of its own.
pub(crate) fn trace_file(arguments: &TrainArguments) -> Option<PathBuf> {
    let file = arguments.trace.as_ref()?;
    let launched = find_launcher(arguments);
    let rank = launched.map(|launched| launched.environment.rank);
    Some(trace_file_of_rank(file, rank, restart_count()))
}

/// Returns `FILE-rank3-restart1.json` for `FILE.json` and rank 3 after one restart. The trace of an
/// attempt that has failed stays.
fn trace_file_of_rank(file: &Path, rank: Option<usize>, restarts: u64) -> PathBuf {
    // A path without a file name, such as `..`, cannot be opened: that is an error of the run.
    let mut name = file.file_stem().unwrap_or_default().to_owned();
    if let Some(rank) = rank {
        name.push(format!("-rank{rank}"));
    }
    if restarts > 0 {
        name.push(format!("-restart{restarts}"));
    }
    if let Some(extension) = file.extension() {
        name.push(".");
        name.push(extension);
    }
    file.with_file_name(name)
}

/// Returns the number of CPU threads of each rank of this process: `--threads`, or else the number
/// that the user has set for candle, or else the rank's share of the machine.
pub(crate) fn threads_per_rank(arguments: &TrainArguments) -> usize {
    local_ranks(arguments, find_launcher(arguments).as_ref()).threads_per_rank()
}

/// Finds the launcher of this process, before the run; returns `None` if there is none, or if its
/// variables make no sense.
fn find_launcher(arguments: &TrainArguments) -> Option<Launched> {
    // A launcher's variables that make no sense are an error of the run, which comes next.
    Launched::find(arguments).ok().flatten()
}

/// Returns the ranks that share this machine, and the resources of each.
fn local_ranks(arguments: &TrainArguments, launched: Option<&Launched>) -> Ranks {
    Ranks {
        count: launched.map_or(arguments.nproc.unwrap_or(1), Launched::local_world_size),
        threads: arguments
            .threads
            .and_then(NonZeroUsize::new)
            .or_else(cpu_threads::requested_threads),
        deadline: Duration::from_secs(arguments.timeout.get()),
    }
}

/// Trains: `fsdp train`.
///
/// # Errors
/// Options that cannot be combined or satisfied, and any failure of training. Errors that can be
/// found in advance are returned before anything is written.
pub(crate) fn run(arguments: &TrainArguments) -> Result<()> {
    // Until training begins a signal may end this process: nothing would be lost.
    let stop = StopRequest::new();
    stop.listen()?;
    let launched = Launched::find(arguments)?;
    let device = DeviceName::choose(arguments)?;
    // If ranks are threads, this process has rank 0.
    let is_reporter = launched
        .as_ref()
        .is_none_or(|launched| launched.environment.rank == 0);
    if is_reporter {
        // Looking for steps in the memory tier would already disturb a run that is saving there, so
        // this comes first.
        report::check_free(arguments)?;
    }
    let ranks = local_ranks(arguments, launched.as_ref());
    let mut candidates = Candidates::new(arguments, is_reporter);
    let mut group = None;
    // The parts of a step in memory are spread over the hosts, so only all ranks together can tell
    // which step is whole.
    if let (Some(launched), Some(_)) = (&launched, &arguments.memory_tier) {
        group = Some(launched.meet(&ranks)?);
    }
    if let Some(tier) = &arguments.memory_tier
        && candidates.mode == ResumeMode::No
    {
        let step_in_tier = run_on_ranks(&ranks, group.as_ref(), |group| {
            step_in_memory(arguments, group)
        })?;
        if let Some(step) = step_in_tier {
            // The tier holds steps of a run with the same directory.
            bail!(out_is_taken_error(tier.display(), step));
        }
    }
    loop {
        // Step 1: look for a step in memory that is newer than the newest undamaged checkpoint.
        let may_be_in_memory = candidates.mode != ResumeMode::No && !candidates.is_memory_damaged;
        if arguments.memory_tier.is_some() && may_be_in_memory {
            let (newest, lost) = candidates.newest_whole_and_lost()?;
            let memory_step = run_on_ranks(&ranks, group.as_ref(), |group| {
                latest_in_memory(arguments, group, newest.as_ref())
            })?;
            // A later checkpoint that is damaged comes first, so that its damage is told.
            candidates.memory_step = memory_step
                .filter(|in_memory| lost.as_ref().is_none_or(|lost| in_memory.step >= lost.step));
        }
        // Step 2: check all that can be checked without the other ranks.
        let job = prepare(
            &mut candidates,
            launched.as_ref(),
            device,
            ranks.threads_per_rank(),
            stop.clone(),
        );
        let outcome = match job {
            Ok(None) => return Ok(()),
            Ok(Some(job)) => {
                logs::keep_trace();
                // Step 3: meet the other ranks, once.
                if let (Some(launched), None) = (&launched, &group) {
                    group = Some(launched.meet(&ranks)?);
                }
                stop.watch()?;
                // Step 4: load, and train.
                match &group {
                    Some(group) => launched::run(group, &ranks, &job),
                    // All ranks end alike.
                    None => all_or_cause(ranks.run(|group| rank::run(group, &job))?)
                        .map(|ends| *ends.first().expect("a job has a rank")),
                }
            }
            Err(error) => Err(error),
        };
        // Damage is the same error on all ranks, so all of them continue with the checkpoint
        // before.
        match outcome {
            Ok(RunEnd::Done) => return Ok(()),
            Ok(RunEnd::Stopped) => bail!(Stopped),
            Err(error) => match error.downcast_ref::<UnreadableCheckpoint>() {
                Some(UnreadableCheckpoint { path }) => candidates.fall_back(path.clone(), error)?,
                None => return Err(error),
            },
        }
    }
}

/// Runs `collective` before the job, and returns its result, which is the same on every rank.
/// `group` is given if this process is a single rank; otherwise the ranks are threads of this
/// process.
///
/// # Errors
/// The error of a rank that probably caused those of the others.
fn run_on_ranks<T: Send>(
    ranks: &Ranks,
    group: Option<&ProcessGroup>,
    collective: impl Fn(&ProcessGroup) -> Result<Option<T>> + Sync,
) -> Result<Option<T>> {
    if let Some(group) = group {
        return collective(group);
    }
    let results = all_or_cause(ranks.run(|group| collective(&group))?)?;
    Ok(results.into_iter().flatten().next())
}

/// Opens the checkpoint that the run continues from, and checks the options; returns `None` if the
/// run is complete already.
///
/// # Errors
/// Options that contradict each other, the checkpoint or the text; files that cannot be read.
fn prepare<'a>(
    candidates: &mut Candidates<'a>,
    launched: Option<&Launched>,
    device: DeviceName,
    threads_per_rank: usize,
    stop: StopRequest,
) -> Result<Option<Job<'a>>> {
    let &mut Candidates {
        arguments,
        mode,
        is_reporter,
        ..
    } = candidates;
    let world_size = match launched {
        Some(launched) => launched.environment.world_size,
        None => arguments.nproc.unwrap_or(1),
    };
    let is_new_run = match mode {
        ResumeMode::No => true,
        ResumeMode::Auto => candidates.is_empty()?,
        ResumeMode::Newest | ResumeMode::Strict => false,
    };
    if !is_new_run && arguments.is_resumed_by_launcher() && is_reporter {
        check_run_is_own(candidates)?;
    }
    let resume = match &arguments.init_from {
        _ if !is_new_run => Some(candidates.open_newest()?),
        Some(path) => Some(Resume::open_any(path)?),
        None => None,
    };
    let settings = Settings::resolve(arguments, resume.as_ref());
    let settings = match &resume {
        // Damage may show first in the settings. Then the checkpoint before may do.
        Some(resume) if !is_new_run => {
            settings.map_err(|error| with_damage_context(error, &resume.path))?
        }
        _ => settings?,
    };
    settings.gpt.validate()?;
    ensure!(
        !(arguments.flat && settings.optimizer.needs_original_parameters()),
        usage_error(
            "`--flat` joins the parameters, and this optimizer steps on each by its shape",
            "leave out `--flat`, or choose another `--optimizer`",
        )
    );
    let text = match &settings.data {
        Some(path) => Text::open(path)?,
        None => Text::builtin(),
    };
    if let Some(resume) = &resume
        && !is_new_run
        && arguments.data.is_none()
    {
        check_same_text(resume, &text)?;
    }
    let batches = Batches {
        batch: settings.batch,
        seq: settings.gpt.seq,
        ranks: world_size,
        accumulation: arguments.accumulate,
    };
    batches.check(&text)?;
    let mesh = make_mesh(arguments, world_size)?;
    if let Some(Resume { step, path, .. }) = &resume
        && *step >= arguments.steps
    {
        if is_new_run {
            bail!(usage_error(
                format!(
                    "`--steps` is the number of all steps, and `{path}` is at step {step} already"
                ),
                "make `--steps` more than that",
            ));
        }
        if is_reporter {
            output::print_message(&format!(
                "nothing to do: `{path}` is at step {step} of {}",
                arguments.steps
            ));
        }
        return Ok(None);
    }
    if mode == ResumeMode::No {
        check_out_is_free(candidates)?;
    }
    if is_new_run && is_reporter {
        check_saved_nowhere_else(arguments)?;
    }
    let mut rows_read = 0;
    let mut origin: Option<StepCheckpoint> = None;
    let mut is_saved = false;
    if let Some(resume) = &resume {
        rows_read = resume.rows_read(settings.batch)?;
        let is_in_memory =
            matches!(&candidates.memory_step, Some(memory) if memory.path == resume.path);
        is_saved = !is_new_run && !is_in_memory;
        origin = Some(StepCheckpoint {
            step: resume.step,
            path: resume.path.clone(),
        });
    }
    let start_step = origin.as_ref().map_or(0, |origin| origin.step);
    Ok(Some(Job {
        arguments,
        settings,
        text,
        batches,
        origin,
        is_new_run,
        is_saved,
        rows_read,
        resume: Mutex::new(resume.map(Arc::new)),
        damaged: candidates.list_replaced(start_step)?,
        mesh,
        threads_per_rank,
        device,
        local_rank: launched.map(Launched::local_rank),
        stop,
    }))
}

/// Checks that the text of a run whose `--data` is that of its checkpoint is still the same: the
/// file may have changed, or be another one in this directory.
///
/// # Errors
/// It is not the text that the checkpoint was trained on.
fn check_same_text(resume: &Resume, text: &Text) -> Result<()> {
    let lineage = resume.checkpoint.lineage();
    let recorded = lineage.and_then(|lineage| lineage.data.as_ref());
    ensure!(
        recorded.is_none_or(|recorded| recorded.hash == text.digest().to_string()),
        usage_error(
            format!(
                "the text `{}` is not the one that `{}` was trained on",
                text.name(),
                resume.path
            ),
            "name that text with `--data`, or this one to go on with it",
        )
    );
    Ok(())
}

/// Returns the mesh of hybrid sharding, replicas x shards; `None` for other strategies.
///
/// # Errors
/// The ranks cannot be divided into equal replicas.
fn make_mesh(arguments: &TrainArguments, ranks: usize) -> Result<Option<DeviceMesh>> {
    if arguments.strategy != ShardingStrategy::HybridShard {
        ensure!(
            arguments.replicas.is_none(),
            usage_error(
                format!(
                    "`--strategy {}` has no use for `--replicas`",
                    arguments.strategy
                ),
                "leave it out, or choose `--strategy hybrid-shard`",
            )
        );
        return Ok(None);
    }
    let replicas = arguments.replicas.map_or(2, NonZeroUsize::get);
    let sizes = [replicas, ranks / replicas];
    match DeviceMesh::new(&sizes, &["replicate", "shard"], ranks) {
        Ok(mesh) => Ok(Some(mesh)),
        Err(_) => bail!(usage_error(
            format!(
                "`--strategy hybrid-shard` cannot divide {ranks} ranks into {replicas} equal \
                 replicas"
            ),
            "change `--replicas` or `--nproc`",
        )),
    }
}

/// Checks that a run would not mix its checkpoints with those of another.
///
/// # Errors
/// There are checkpoints in its directory, or they cannot be listed.
fn check_out_is_free(candidates: &Candidates<'_>) -> Result<()> {
    match candidates.newest()? {
        Some(newest) => bail!(out_is_taken_error(&candidates.location, newest.step)),
        None => Ok(()),
    }
}

/// Returns the last event of a kind in the run's directory; `null` if there is none.
///
/// # Errors
/// The file of events cannot be read.
fn last_event(arguments: &TrainArguments, kind: &str) -> Result<Value> {
    let mut latest = Value::Null;
    lines::parse_lines(&arguments.out.join(EVENTS_FILE), |event: Value| {
        if event["event"] == kind {
            latest = event;
        }
    })?;
    Ok(latest)
}

/// Checks that the run's directory is not that of a run which has saved its checkpoints in another
/// place, and which would begin anew because `--checkpoint-dir` is not what it was. Its metrics
/// would be lost.
///
/// # Errors
/// The last checkpoint still exists in another place; it cannot be looked for.
fn check_saved_nowhere_else(arguments: &TrainArguments) -> Result<()> {
    let event = last_event(arguments, "checkpoint")?;
    let Some(path) = event["path"].as_str() else {
        return Ok(());
    };
    let place = Location::from(path);
    if place.name().parent() == Some(arguments.checkpoint_location().name()) {
        return Ok(());
    }
    let directory = arguments.out.display();
    let exists = place.exists().with_context(|| {
        format!("failed to look for the checkpoints of the run in `{directory}`")
    })?;
    ensure!(
        !exists,
        usage_error(
            format!(
                "the run in `{directory}` has saved its checkpoints in another place, the last one \
                 as `{place}`"
            ),
            "continue it with `--resume` and the `--checkpoint-dir` that it had, or choose another \
             `--out`"
        )
    );
    Ok(())
}

/// Checks that a run which its launcher has started again finds its own checkpoints, and not those
/// of another run: torchrun also restarts a process that has refused to begin because of them. Jobs
/// without a name pass, because nothing tells whose checkpoints these are.
///
/// # Errors
/// The run in the directory was another job, and has left checkpoints.
fn check_run_is_own(candidates: &Candidates<'_>) -> Result<()> {
    let Some(job) = elastic_job() else {
        return Ok(());
    };
    let start = last_event(candidates.arguments, "start")?;
    if !start.is_null() && start["job"] != job {
        check_out_is_free(candidates)?;
    }
    Ok(())
}

/// Returns the results of all ranks.
///
/// # Errors
/// The error that probably caused the others: one that does not blame other ranks, if there is such
/// an error.
fn all_or_cause<T>(results: Vec<Result<T>>) -> Result<Vec<T>> {
    let mut results_of_ranks = Vec::new();
    let mut errors = Vec::new();
    for result in results {
        match result {
            Ok(value) => results_of_ranks.push(value),
            Err(error) => errors.push(error),
        }
    }
    match errors.into_iter().min_by_key(is_about_others) {
        Some(error) => Err(error),
        None => Ok(results_of_ranks),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_a_trace_of_its_own() {
        for (file, named) in [
            ("trace.json", "trace-rank3.json"),
            ("out/run.4ranks.json", "out/run.4ranks-rank3.json"),
            ("trace", "trace-rank3"),
            (".trace", ".trace-rank3"),
        ] {
            assert_eq!(
                trace_file_of_rank(Path::new(file), Some(3), 0),
                Path::new(named)
            );
            assert_eq!(
                trace_file_of_rank(Path::new(file), None, 0),
                Path::new(file)
            );
        }
    }

    #[test]
    fn each_attempt_has_a_trace_of_its_own() {
        for (rank, named) in [
            (Some(0), "a/t-rank0-restart2.json"),
            (None, "a/t-restart2.json"),
        ] {
            assert_eq!(
                trace_file_of_rank(Path::new("a/t.json"), rank, 2),
                Path::new(named)
            );
        }
    }
}
