//! `fsdp report`: a run as one page, from its metrics, its events and its checkpoints.

mod chart;
mod history;
pub(crate) mod lines;
mod metrics;
mod page;
mod record;
mod series;

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use fsdp_formats::Location;
use fsdp_formats::lineage::chain;

use self::history::History;
use self::metrics::Metrics;
use self::record::Run;
use crate::failure::UsageError;
use crate::new_file::{check_free, write};
use crate::output;
use crate::run_files::{EVENTS_FILE, METRICS_FILE};

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
    let file = arguments
        .html
        .clone()
        .unwrap_or_else(|| directory.join(PAGE));
    check_free(&file, arguments.overwrite)?;
    let place = arguments
        .checkpoint_dir
        .clone()
        .unwrap_or_else(|| directory.as_path().into());
    let run = Run {
        name: directory.display().to_string(),
        metrics: Metrics::read(&directory.join(METRICS_FILE))?,
        history: History::read(&directory.join(EVENTS_FILE))?,
        checkpoints: chain(&place)?,
    };
    if run.metrics.lines == 0 && run.checkpoints.is_empty() {
        return Err(UsageError::NoRun { path: run.name }.into());
    }
    write(&file, page::html(&run).as_bytes(), arguments.overwrite)?;
    output::talk(&format!("wrote `{}`", file.display()));
    Ok(())
}
