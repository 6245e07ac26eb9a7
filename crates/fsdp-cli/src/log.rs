//! `fsdp log`: the chain of a run's checkpoints, and where it is broken or forked.

use anyhow::Result;
use clap::Args;
use fsdp_formats::Location;
use fsdp_formats::lineage::{Lineage, Link, Note, chain};
use serde::Serialize;

use super::failure::Broken;
use super::ls::no_checkpoints;
use super::output;
use super::text::escaped;

/// Options of `fsdp log`.
#[derive(Debug, Args)]
pub(crate) struct LogArguments {
    /// The directory of a run's checkpoints
    #[arg(value_name = "RUN")]
    run: Location,
    /// One JSON object on stdout
    #[arg(long, env = "FSDP_JSON")]
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
    checkpoints: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
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
    links.reverse();
    let broken = links
        .iter()
        .filter(|link| link.notes.iter().any(Note::is_break))
        .count();
    if links.is_empty() && !arguments.json {
        output::talk(&no_checkpoints(&arguments.run));
    }
    output::read_or_not(if arguments.json {
        let checkpoints = links.iter().map(Row::new).collect();
        output::json(&Log {
            schema: SCHEMA,
            run: run.clone(),
            whole: broken == 0,
            checkpoints,
        })
    } else {
        output::lines(&links.iter().flat_map(lines).collect::<Vec<_>>())
    })?;
    if broken > 0 {
        Err(Broken { run, count: broken }.into())
    } else {
        Ok(())
    }
}

impl Row {
    fn new(link: &Link) -> Self {
        Row {
            name: link.name.clone(),
            digest: link.digest.map(|digest| digest.to_string()),
            lineage: link.lineage.clone(),
            notes: link.notes.iter().map(Note::to_string).collect(),
        }
    }
}

/// Returns the lines of a checkpoint: its name and digest, what it was saved with, and what is
/// noteworthy.
fn lines(link: &Link) -> Vec<String> {
    let digest = link
        .digest
        .map_or_else(|| "no digest".to_owned(), |digest| digest.to_string());
    let mut lines = vec![format!("{}  {digest}", escaped(&link.name))];
    if let Some(Lineage {
        step,
        parent,
        config,
        data,
        ..
    }) = &link.lineage
    {
        let parent = parent.map_or_else(
            || "begins the run".to_owned(),
            |parent| format!("from step {} {}", parent.step, parent.digest),
        );
        lines.push(format!("  step {step}, {parent}"));
        if let Some(config) = config {
            lines.push(format!("  configuration {}", escaped(config)));
        }
        if let Some(data) = data {
            lines.push(format!(
                "  data {} at {}",
                escaped(&data.hash),
                data.position
            ));
        }
    }
    lines.extend(
        link.notes
            .iter()
            .map(|note| format!("  ! {}", escaped(&note.to_string()))),
    );
    lines
}
