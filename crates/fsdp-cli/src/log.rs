//! `fsdp log`: the chain of a run's checkpoints, and where it is broken or forked.

use anyhow::{Result, ensure};
use clap::Args;
use fsdp_formats::Location;
use fsdp_formats::lineage::{Lineage, Link, Note, chain};
use serde::Serialize;

use crate::failure::difference;
use crate::ls::no_checkpoints;
use crate::output;
use crate::text::{escaped, or_word};

/// Options of `fsdp log`.
#[derive(Debug, Args)]
pub(crate) struct LogArguments {
    /// The directory of a run's checkpoints
    #[arg(value_name = "RUN")]
    run: Location,
    /// One JSON object on stdout
    #[arg(long)]
    json: bool,
}

/// The version of the JSON's schema.
const SCHEMA: u32 = 1;

#[derive(Debug, Serialize)]
struct Log {
    schema: u32,
    run: String,
    /// `true` if no link is broken.
    whole: bool,
    checkpoints: Vec<LoggedCheckpoint>,
}

#[derive(Debug, Serialize)]
struct LoggedCheckpoint {
    name: String,
    digest: Option<String>,
    lineage: Option<Lineage>,
    notes: Vec<String>,
}

/// Prints the chain of a run's checkpoints, the newest first: `fsdp log`.
///
/// # Errors
/// A checkpoint whose parent was replaced; a directory that cannot be read.
pub(crate) fn run(arguments: &LogArguments) -> Result<()> {
    let run = arguments.run.to_string();
    let mut links = chain(&arguments.run)?;
    // Chains are found from the oldest on, but the newest is what a reader looks for.
    links.reverse();
    let broken = links
        .iter()
        .filter(|link| link.notes.iter().any(Note::is_break))
        .count();
    if links.is_empty() && !arguments.json {
        output::talk(&no_checkpoints(&arguments.run));
    }
    output::read_or_not(if arguments.json {
        output::json(&Log {
            schema: SCHEMA,
            run: run.clone(),
            whole: broken == 0,
            checkpoints: links.iter().map(LoggedCheckpoint::new).collect(),
        })
    } else {
        let lines: Vec<String> = links.iter().flat_map(link_lines).collect();
        output::lines(&lines)
    })?;
    // The list is printed whole before this error: it shows where the chain is broken.
    ensure!(
        broken == 0,
        difference(format!(
            "the chain of `{run}` is broken at {broken} of its checkpoints"
        ))
    );
    Ok(())
}

impl LoggedCheckpoint {
    fn new(link: &Link) -> Self {
        LoggedCheckpoint {
            name: link.name.clone(),
            digest: link.digest.map(|digest| digest.to_string()),
            lineage: link.lineage.clone(),
            notes: link.notes.iter().map(Note::to_string).collect(),
        }
    }
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
