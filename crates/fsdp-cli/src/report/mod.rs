//! `fsdp report`: a run as one page, from its metrics, its events and its checkpoints.

mod chart;
mod history;
pub(crate) mod lines;
mod metrics;
mod page;
pub(crate) mod series;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use fsdp_formats::Location;
use fsdp_formats::lineage::list_chain;

use self::history::History;
use self::metrics::Metrics;
use crate::failure::usage_error;
use crate::new_file::{Content, NewFile};
use crate::output;

/// The metrics of all steps, a line of JSON each, in the run's directory.
pub(crate) const METRICS_FILE: &str = "metrics.jsonl";

/// The events of the run, a line of JSON each: starts, checkpoints, the end.
pub(crate) const EVENTS_FILE: &str = "events.jsonl";

/// The name of the page in the run's directory.
const PAGE: &str = "report.html";

/// Options of `fsdp report`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  fsdp report runs/demo
  fsdp report runs/a --checkpoint-dir s3://models/runs/a --html a.html --overwrite")]
pub(crate) struct ReportArguments {
    /// The directory of a run: of its metrics.jsonl, and of its checkpoints
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Place of the run's checkpoints, if it is another one
    #[arg(long, value_name = "LOCATION")]
    checkpoint_dir: Option<Location>,
    /// File for the page [default: report.html in RUN]
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Replace the page that is there
    #[arg(long)]
    overwrite: bool,
}

/// Writes the page of a run: `fsdp report`.
///
/// # Errors
/// The run has neither metrics nor checkpoints; files that cannot be read; a page that exists
/// already.
pub(crate) fn run(arguments: &ReportArguments) -> Result<()> {
    let directory = &arguments.run;
    let path = match &arguments.html {
        Some(path) => path,
        None => &directory.join(PAGE),
    };
    let file = NewFile {
        path,
        content: Content::Page,
        overwrite: Some(arguments.overwrite),
    };
    // A page that is in the way is told before the run is read.
    file.check()?;
    // By default the checkpoints are in the run's directory too.
    let checkpoint_dir = match &arguments.checkpoint_dir {
        Some(location) => location,
        None => &Location::from(directory.as_path()),
    };
    let name = directory.display().to_string();
    let metrics = Metrics::read(&directory.join(METRICS_FILE))?;
    let history = History::read(&directory.join(EVENTS_FILE))?;
    let checkpoints = list_chain(checkpoint_dir)?;
    if metrics.step_count == 0 && checkpoints.is_empty() {
        bail!(usage_error(
            format!("`{name}` has neither metrics nor checkpoints of a run"),
            "name the directory that `fsdp train --out` was given",
        ));
    }
    let page = page::run_page(&name, &metrics, &history, &checkpoints);
    file.write(page.as_bytes())?;
    output::print_message(&format!("wrote `{}`", path.display()));
    Ok(())
}
