//! `fsdp log`: the chain of a run's checkpoints, and where it is broken or forked.

use anyhow::{Result, bail, ensure};
use clap::Args;
use fsdp_formats::Location;
use fsdp_formats::lineage::{Link, Note, list_chain};
use serde_json::{Value, json};

use crate::exit_codes;
use crate::failure::{CommandError, difference_error};
use crate::ls::no_checkpoints_text;
use crate::output;
use crate::text::{escaped, or_word};

/// Options of `fsdp log`.
#[derive(Debug, Args)]
pub(crate) struct LogArguments {
    /// The folder of a run's checkpoints
    #[arg(value_name = "RUN")]
    run: Location,
    /// One JSON object on stdout
    #[arg(long)]
    json: bool,
}

/// The version of the JSON's schema.
const SCHEMA: u32 = 1;

/// Prints the chain of a run's checkpoints, the newest first: `fsdp log`.
///
/// # Errors
/// A checkpoint whose parent was replaced, or that is damaged; a directory that cannot be read.
pub(crate) fn run(arguments: &LogArguments) -> Result<()> {
    let run = arguments.run.to_string();
    let mut links = list_chain(&arguments.run)?;
    // Chains are found from the oldest on, but the newest is what a reader looks for.
    links.reverse();
    let break_count = links
        .iter()
        .filter(|link| link.notes.iter().any(Note::is_break))
        .count();
    let has_damage = links
        .iter()
        .any(|link| link.notes.iter().any(Note::is_damage));
    if links.is_empty() && !arguments.json {
        output::print_message(&no_checkpoints_text(&arguments.run));
    }
    let printed = if arguments.json {
        let checkpoints: Vec<Value> = links.iter().map(link_json).collect();
        output::print_json(&json!({
            "schema": SCHEMA,
            "run": run,
            "whole": break_count == 0 && !has_damage,
            "checkpoints": checkpoints,
        }))
    } else {
        let lines: Vec<String> = links.iter().flat_map(link_lines).collect();
        output::print_lines(&lines)
    };
    // The list is printed whole before an error: it shows where the chain is broken.
    output::outcome_after_report(printed, check_chain(&run, &links, break_count))
}

/// Checks that the chain of a run is whole, and that its checkpoints can be opened.
///
/// # Errors
/// The chain is broken at some checkpoints, or one of them cannot be opened.
fn check_chain(run: &str, links: &[Link], break_count: usize) -> Result<()> {
    for link in links {
        for note in &link.notes {
            if let Note::Unreadable {
                reason,
                kind,
                is_damage: true,
            } = note
            {
                bail!(CommandError {
                    exit_code: exit_codes::for_kind(*kind),
                    message: format!("`{}` of `{run}` cannot be opened: {reason}", link.name),
                    hint: None,
                });
            }
        }
    }
    ensure!(
        break_count == 0,
        difference_error(format!(
            "the chain of `{run}` is broken at {break_count} of its checkpoints"
        ))
    );
    Ok(())
}

/// Returns the object of a checkpoint in the JSON.
fn link_json(link: &Link) -> Value {
    let notes: Vec<String> = link.notes.iter().map(Note::to_string).collect();
    json!({
        "name": link.name,
        "digest": link.digest.map(|digest| digest.to_string()),
        "lineage": link.lineage,
        "notes": notes,
    })
}

/// Returns the lines of a checkpoint: its name and digest, what it was saved with, and what is
/// noteworthy.
fn link_lines(link: &Link) -> Vec<String> {
    let digest = or_word(link.digest, "no digest");
    let mut lines = vec![format!("{}  {digest}", escaped(&link.name))];
    if let Some(lineage) = &link.lineage {
        // A checkpoint without a parent is the first of its run, or of a run that started from
        // weights alone.
        let parent = match lineage.parent {
            Some(parent) => format!("from step {} {}", parent.step, parent.digest),
            None => "begins the run".to_owned(),
        };
        lines.push(format!("  step {}, {parent}", lineage.step));
        if let Some(config) = &lineage.config {
            lines.push(format!("  configuration {}", escaped(config)));
        }
        if let Some(data) = &lineage.data {
            let hash = escaped(&data.hash);
            lines.push(format!("  data {hash} at {}", data.position));
        }
    }
    for note in &link.notes {
        lines.push(format!("  ! {}", escaped(&note.to_string())));
    }
    lines
}
