//! `fsdp prune`: removes a run's old checkpoints.

use std::io;
use std::path::Path;

use anyhow::{Result, bail, ensure};
use clap::Args;
use fsdp_formats::checkpoint::{
    self, ExtraFiles, LinksInFolder, StepOfRun, list_steps, steps_with_leftovers,
};
use fsdp_formats::lineage::{newest_branch, read_branches};
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::storage::{Durable, clean_stale};
use fsdp_formats::{FileError, Location};
use fsdp_layout::count_text;
use fsdp_tools::verify::{Level, VerifyOptions, verify};
use serde_json::{Value, json};

use crate::failure::usage_error;
use crate::ls::no_checkpoints_text;
use crate::output;
use crate::text::escaped;

/// Options of `fsdp prune`.
#[derive(Debug, Args)]
#[command(after_help = "\
Nothing is removed without --yes. Nothing is removed either unless one of the checkpoints that stay is whole. A \
checkpoint that a program of fsdp is reading stays, and so does one whose directory has files that do not belong to it, \
or that a link in RUN, or in the folder of the checkpoints, leads to. Files that an incremental save shares with a \
checkpoint that stays are not lost: each has a link of its own.")]
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
    #[arg(long)]
    json: bool,
}

/// The version of the JSON's schema.
const SCHEMA: u32 = 1;

/// Removes the old checkpoints of a run: `fsdp prune`.
///
/// # Errors
/// No checkpoint that would be kept is whole; names whose numbers count different things; a folder
/// that cannot be listed; after the list is printed, the first error of a removal.
pub(crate) fn run(arguments: &PruneArguments) -> Result<()> {
    let checkpoints = list_steps(&arguments.run)?;
    if checkpoints.is_empty() && !arguments.json {
        output::print_message(&no_checkpoints_text(&arguments.run));
    }
    let run = arguments.run.to_string();
    if let Some(other_kind) = checkpoints
        .iter()
        .find(|checkpoint| checkpoint.counts != checkpoints[0].counts)
    {
        bail!(usage_error(
            format!(
                "`{run}` has `{}` and `{}`, whose numbers count different things: it is not known \
                 which is older",
                checkpoints[0].name, other_kind.name
            ),
            "move the checkpoints of one kind to another folder",
        ));
    }
    let keep_count = usize::try_from(arguments.keep).unwrap_or(usize::MAX);
    let (checkpoints, left_checkpoints) = split_by_branch(checkpoints)?;
    let (older, newest) = checkpoints.split_at(checkpoints.len().saturating_sub(keep_count));
    let (retained, expired): (Vec<&StepOfRun>, Vec<&StepOfRun>) =
        older.iter().partition(|checkpoint| {
            let every = arguments.keep_every;
            every.is_some_and(|every| checkpoint.step.is_multiple_of(every))
        });
    // If a crash has damaged the newer ones, the old ones are all that the run has.
    let mut kept_checkpoints = newest.iter().rev().chain(retained.into_iter().rev());
    ensure!(
        expired.is_empty() || kept_checkpoints.any(|checkpoint| is_whole(&checkpoint.path)),
        usage_error(
            format!(
                "nothing was removed, because no checkpoint of `{run}` that would be kept is whole"
            ),
            "`fsdp verify` says what is wrong with each; or keep more with `--keep`",
        )
    );
    let mut first_error = None;
    // Leftovers of earlier removals are removed first. Leftovers of the removals below stay for the
    // next call.
    let mut leftovers = Vec::new();
    if arguments.yes
        && let Some(last) = checkpoints.last()
    {
        for place in steps_with_leftovers(last)? {
            match clean_stale(&place) {
                Ok(paths) => leftovers.extend(paths),
                Err(error) => _ = first_error.get_or_insert(error),
            }
        }
    }
    let mut removed_names = Vec::new();
    // Checkpoints that are gone, but of which some files could not be removed, with the reason.
    let mut unfinished_names = Vec::new();
    // Old checkpoints that are kept, each with the reason.
    let mut kept_names = Vec::new();
    for checkpoint in &left_checkpoints {
        let reason = "the run has left it by going back to an older step".to_owned();
        kept_names.push((checkpoint.name.as_str(), reason));
    }
    let links = match checkpoints.first() {
        Some(checkpoint) => LinksInFolder::of_run(&arguments.run, &checkpoint.path)?,
        None => LinksInFolder::default(),
    };
    for checkpoint in expired {
        let name = checkpoint.name.as_str();
        let fate = match reason_to_stay(&checkpoint.path, &links) {
            Some(reason) => Fate::Stays(reason),
            None if arguments.yes => remove(&checkpoint.path),
            None => Fate::Removed,
        };
        // After an error the others are removed all the same, and all are listed.
        match fate {
            Fate::Removed => removed_names.push(name),
            Fate::Stays(reason) => kept_names.push((name, reason)),
            Fate::Failed(error) => {
                kept_names.push((name, error.to_string()));
                first_error.get_or_insert(error);
            }
            Fate::Unfinished(error) => {
                unfinished_names.push((name, error.to_string()));
                first_error.get_or_insert(error);
            }
        }
    }
    let leftovers: Vec<String> = leftovers.iter().map(|path| file_name(path)).collect();
    let printed = if arguments.json {
        output::print_json(&json!({
            "schema": SCHEMA,
            "run": run,
            "dry_run": !arguments.yes,
            "removed": removed_names,
            "stay": with_reasons(&kept_names),
            "unfinished": with_reasons(&unfinished_names),
            "leftovers": leftovers,
        }))
    } else {
        let word = if arguments.yes {
            "removed"
        } else {
            "would be removed"
        };
        let mut lines = Vec::new();
        for name in &leftovers {
            lines.push(format!("{}  removed, a leftover", escaped(name)));
        }
        for name in &removed_names {
            lines.push(format!("{}  {word}", escaped(name)));
        }
        for (name, reason) in &unfinished_names {
            let reason = escaped(reason);
            lines.push(format!("{}  removed in part: {reason}", escaped(name)));
        }
        for (name, reason) in &kept_names {
            lines.push(format!("{}  stays: {}", escaped(name), escaped(reason)));
        }
        output::print_lines(&lines)
    };
    if !arguments.yes && !arguments.json && !removed_names.is_empty() {
        let count = count_text(
            removed_names.len(),
            "checkpoint would be",
            "checkpoints would be",
        );
        output::print_message(&format!("{count} removed; `--yes` removes"));
    }
    let outcome = match first_error {
        Some(error) => Err(error.into()),
        None => Ok(()),
    };
    output::outcome_after_report(printed, outcome)
}

/// The fate of an old checkpoint.
enum Fate {
    /// It is gone, or would be.
    Removed,
    /// It stays, for this reason.
    Stays(String),
    /// It stays, because nothing of it could be removed.
    Failed(FileError),
    /// It is gone, but some of its files are left.
    Unfinished(FileError),
}

/// Removes an old checkpoint.
fn remove(path: &Location) -> Fate {
    match Durable::new().remove_checkpoint(path) {
        Ok(true) => Fate::Removed,
        Ok(false) => Fate::Stays("it is being read".to_owned()),
        // Another process has removed it since it was listed.
        Err(FileError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Fate::Removed
        }
        Err(error) if has_lost_its_place(path) => Fate::Unfinished(error),
        Err(error) => Fate::Failed(error),
    }
}

/// Returns `true` if a checkpoint whose removal has failed is gone all the same: a directory loses
/// its name first. In an object store that without which it cannot be opened goes first.
fn has_lost_its_place(path: &Location) -> bool {
    match path.local() {
        Some(_) => matches!(path.exists(), Ok(false)),
        None => checkpoint::open(path, OpenOptions { verify: false }).is_err(),
    }
}

/// Returns the name of a file or directory for messages.
fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Returns the objects of checkpoints in the JSON, each with the reason of its fate.
fn with_reasons(names: &[(&str, String)]) -> Vec<Value> {
    names
        .iter()
        .map(|(name, reason)| json!({ "name": name, "reason": reason }))
        .collect()
}

/// Splits the checkpoints of a run into those that it continues, and those that it has left by
/// going back to an older step, which neither count nor are removed.
fn split_by_branch(all: Vec<StepOfRun>) -> Result<(Vec<StepOfRun>, Vec<StepOfRun>)> {
    let paths: Vec<&Location> = all.iter().map(|found| &found.path).collect();
    let branches = read_branches(&paths)?;
    let newest = newest_branch(&branches);
    let mut continued = Vec::new();
    let mut left = Vec::new();
    for (found, branch) in all.into_iter().zip(branches) {
        match branch {
            Some(branch) if newest.continues(&branch, found.step) => continued.push(found),
            Some(_) => left.push(found),
            // It was removed since it was listed.
            None => {}
        }
    }
    Ok((continued, left))
}

/// Returns the reason why an old checkpoint must not be removed; `None` if it may be.
fn reason_to_stay(path: &Location, links: &LinksInFolder) -> Option<String> {
    match path.is_file() {
        Ok(false) => {}
        Ok(true) => return Some("it is no directory".to_owned()),
        Err(error) => return Some(error.to_string()),
    }
    if path.local().is_some_and(Path::is_symlink) {
        return Some("it is a link".to_owned());
    }
    // A link may be the only name by which a checkpoint that stays, or one that a user has marked,
    // is known.
    if let Some(link) = links.leading_to(path) {
        return Some(format!("the link `{link}` leads to it"));
    }
    // If a checkpoint cannot be opened, it is not known whether it is still needed, so it is kept.
    let opened = match checkpoint::open(path, OpenOptions { verify: false }) {
        Ok(opened) => opened,
        Err(error) => return Some(error.to_string()),
    };
    match ExtraFiles::find(&*opened) {
        // A user may have put other files there, which removing the directory would delete.
        Ok(extra_files) => extra_files
            .foreign()
            .map(|file| format!("`{file}` is not its own")),
        Err(error) => Some(error.to_string()),
    }
}

/// Returns `true` if a checkpoint can be opened, and all its files are there with the right sizes.
fn is_whole(path: &Location) -> bool {
    let Ok(opened) = checkpoint::open(path, OpenOptions::default()) else {
        return false;
    };
    verify(&*opened, Level::Sizes, VerifyOptions::default()).is_ok_and(|report| report.is_ok())
}
