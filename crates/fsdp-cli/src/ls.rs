//! `fsdp ls`: the checkpoints of a run.

use anyhow::Result;
use clap::Args;
use fsdp_formats::Location;
use fsdp_formats::checkpoint::{self, StepOfRun, list_steps};
use fsdp_formats::lineage::{newest_branch, read_branches};
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::{count_text, with_causes};
use serde::Serialize;
use serde_json::json;

use crate::text::{bytes_text, escaped};
use crate::{inspect, output};

/// Options of `fsdp ls`.
#[derive(Debug, Args)]
pub(crate) struct LsArguments {
    /// The folder of a run's checkpoints
    #[arg(value_name = "RUN")]
    run: Location,
    /// One JSON object on stdout
    #[arg(long)]
    json: bool,
}

/// The version of the JSON's schema.
const SCHEMA: u32 = 1;

#[derive(Debug, Default, Serialize)]
struct ListedCheckpoint {
    step: u64,
    name: String,
    /// The format; none if it cannot be opened.
    format: Option<&'static str>,
    tensors: usize,
    values: usize,
    /// The bytes of all tensors' elements.
    bytes: u64,
    /// `true` if hashes of its files lie beside it.
    hashed: bool,
    /// `true` if the run has left it by going back to an older step, and does not continue from it.
    left: bool,
    /// The reason why it cannot be opened.
    error: Option<String>,
}

/// Lists the checkpoints of a run, the oldest first: `fsdp ls`. Only metadata is read.
///
/// # Errors
/// A folder that cannot be listed.
pub(crate) fn run(arguments: &LsArguments) -> Result<()> {
    // One that cannot be opened is listed too: a run with a damaged checkpoint is when this command
    // is needed.
    let steps = list_steps(&arguments.run)?;
    let paths: Vec<&Location> = steps.iter().map(|found| &found.path).collect();
    let branches = read_branches(&paths)?;
    let newest = newest_branch(&branches);
    let mut checkpoints = Vec::with_capacity(steps.len());
    for (found, branch) in steps.iter().zip(&branches) {
        let mut listed = ListedCheckpoint::new(found);
        if let Some(branch) = branch {
            listed.left = !newest.continues(branch, found.step);
        }
        checkpoints.push(listed);
    }
    if arguments.json {
        return output::print_json(&json!({
            "schema": SCHEMA,
            "run": arguments.run.to_string(),
            "checkpoints": checkpoints,
        }));
    }
    // An empty list on stdout is data; that it is empty is told on stderr.
    if checkpoints.is_empty() {
        output::print_message(&no_checkpoints_text(&arguments.run));
    }
    let lines: Vec<String> = checkpoints.iter().map(ListedCheckpoint::line).collect();
    output::print_lines(&lines)
}

/// Returns what is said of a folder without checkpoints.
pub(crate) fn no_checkpoints_text(run: &Location) -> String {
    format!("no checkpoints in `{}`", escaped(&run.to_string()))
}

impl ListedCheckpoint {
    /// Opens a checkpoint, and describes it. One that cannot be opened is described by the error.
    fn new(step_of_run: &StepOfRun) -> Self {
        let mut summary = ListedCheckpoint {
            step: step_of_run.step,
            name: step_of_run.name.clone(),
            ..ListedCheckpoint::default()
        };
        match checkpoint::open(&step_of_run.path, OpenOptions::default()) {
            Ok(opened) => {
                summary.format = Some(opened.format().name());
                // The sizes come from a file that may be damaged, so their sum must not overflow.
                for (_, tensor) in opened.metadata().tensors() {
                    summary.tensors += 1;
                    summary.bytes = summary.bytes.saturating_add(inspect::tensor_bytes(tensor));
                }
                summary.values = opened.metadata().values().count();
                summary.hashed = opened.directory().has_integrity();
            }
            Err(error) => summary.error = Some(with_causes(&error)),
        }
        summary
    }

    /// Returns the line of a checkpoint.
    fn line(&self) -> String {
        let step = self.step;
        let name = escaped(&self.name);
        if let Some(error) = &self.error {
            return format!("{step:>9}  {name}  cannot be opened: {}", escaped(error));
        }
        let format = self
            .format
            .expect("a checkpoint without an error has a format");
        let tensors = count_text(self.tensors, "tensor", "tensors");
        let hashes = if self.hashed { ", hashes" } else { "" };
        let left = if self.left { ", left by the run" } else { "" };
        let bytes = bytes_text(self.bytes);
        format!("{step:>9}  {name}  {format}, {tensors}, {bytes}{hashes}{left}")
    }
}
