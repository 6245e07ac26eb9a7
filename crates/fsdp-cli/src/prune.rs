//! `fsdp prune`: removes a run's old checkpoints.

use anyhow::Result;
use clap::Args;
use fsdp_dcp::Location;
use fsdp_dcp::checkpoint::{self, ExtraFiles, StepOfRun, steps_of_run};
use fsdp_dcp::reader::OpenOptions;
use fsdp_dcp::storage::Durable;
use fsdp_dcp::verify::{Level, verify};
use serde::Serialize;

use super::failure::UsageError;
use super::output;
use super::text::{count, escaped};

/// Options of `fsdp prune`.
#[derive(Debug, Args)]
#[command(after_help = "\
Nothing is removed without --yes. Nothing is removed either unless one of the checkpoints that stay is whole. A checkpoint
that is being read stays, and so does one beside which lies what is not its own. Files that an incremental save shares
with a checkpoint that stays are not lost: each has a link of its own.")]
pub(crate) struct PruneArguments {
    /// The folder of a run's checkpoints
    #[arg(value_name = "RUN")]
    run: Location,
    /// The number of newest checkpoints that stay
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    keep: u64,
    /// Checkpoints whose step is a multiple of this stay too
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u64).range(1..))]
    keep_every: Option<u64>,
    /// Remove them, and do not only list them
    #[arg(long)]
    yes: bool,
    /// One JSON object on stdout
    #[arg(long, env = "FSDP_JSON")]
    json: bool,
}

/// The version of the JSON's schema.
const SCHEMA: u32 = 1;

#[derive(Debug, Serialize)]
struct Pruned {
    schema: u32,
    run: String,
    /// `true` if nothing was removed, because `--yes` was not given.
    dry_run: bool,
    removed: Vec<String>,
    /// The old ones that stay, each with the reason.
    stay: Vec<Stays>,
}

#[derive(Debug, Serialize)]
struct Stays {
    name: String,
    reason: String,
}

/// Removes the old checkpoints of a run: `fsdp prune`.
///
/// # Errors
/// No checkpoint that would stay is whole; a folder that cannot be listed; a checkpoint that cannot be removed.
pub(crate) fn run(arguments: &PruneArguments) -> Result<()> {
    let all = steps_of_run(&arguments.run)?;
    let keep = usize::try_from(arguments.keep).unwrap_or(usize::MAX);
    let (old, new) = all.split_at(all.len().saturating_sub(keep));
    let is_kept = |found: &&StepOfRun| arguments.keep_every.is_some_and(|every| found.step.is_multiple_of(every));
    let expired: Vec<&StepOfRun> = old.iter().filter(|found| !is_kept(found)).collect();
    // If a crash has damaged the newer ones, the old ones are all that the run has.
    let mut staying = new.iter().rev().chain(old.iter().rev().filter(is_kept));
    if !expired.is_empty() && !staying.any(|found| is_whole(&found.path)) {
        return Err(UsageError::NothingWhole { run: arguments.run.to_string() }.into());
    }
    let mut pruned = Pruned {
        schema: SCHEMA,
        run: arguments.run.to_string(),
        dry_run: !arguments.yes,
        removed: Vec::new(),
        stay: Vec::new(),
    };
    for found in expired {
        let reason = match reason_to_stay(&found.path) {
            Some(reason) => Some(reason),
            None if arguments.yes && !Durable::new().remove_checkpoint(&found.path)? => {
                Some("somebody reads it".to_owned())
            }
            None => None,
        };
        match reason {
            Some(reason) => pruned.stay.push(Stays { name: found.name.clone(), reason }),
            None => pruned.removed.push(found.name.clone()),
        }
    }
    if arguments.json {
        return output::json(&pruned);
    }
    let word = if pruned.dry_run { "would be removed" } else { "removed" };
    let removed = pruned.removed.iter().map(|name| format!("{}  {word}", escaped(name)));
    let stay =
        pruned.stay.iter().map(|Stays { name, reason }| format!("{}  stays: {}", escaped(name), escaped(reason)));
    output::lines(&removed.chain(stay).collect::<Vec<_>>())?;
    if pruned.dry_run && !pruned.removed.is_empty() {
        let are = count(pruned.removed.len(), "checkpoint would be", "checkpoints would be");
        output::talk(&format!("{are} removed; `--yes` removes"));
    }
    Ok(())
}

/// Returns why an old checkpoint is not removed; `None` if it may be.
fn reason_to_stay(path: &Location) -> Option<String> {
    if path.is_file().unwrap_or(true) {
        return Some("it is no directory".to_owned());
    }
    if path.local().is_some_and(std::path::Path::is_symlink) {
        return Some("it is a link".to_owned());
    }
    // A checkpoint that cannot be opened may be one that is needed.
    let opened = match checkpoint::open(path, OpenOptions { verify: false }) {
        Ok(opened) => opened,
        Err(error) => return Some(error.to_string()),
    };
    match ExtraFiles::of(&*opened) {
        Ok(ExtraFiles { others, .. }) => {
            others.iter().find(|name| !name.ends_with(".distcp")).map(|other| format!("`{other}` is not its own"))
        }
        Err(error) => Some(error.to_string()),
    }
}

/// Returns `true` if a checkpoint can be opened, and all its files are there with the right sizes.
fn is_whole(path: &Location) -> bool {
    let opened = checkpoint::open(path, OpenOptions::default());
    let report = opened.and_then(|checkpoint| verify(&*checkpoint, Level::Sizes, None));
    report.is_ok_and(|report| report.is_ok())
}
