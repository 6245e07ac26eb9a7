//! `fsdp ls`: the checkpoints of a run.

use anyhow::Result;
use clap::Args;
use fsdp_formats::Location;
use fsdp_formats::checkpoint::{self, StepOfRun, steps_of_run};
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::with_causes;
use serde::Serialize;

use super::inspect;
use super::output;
use super::text::{count, escaped, iec};

/// Options of `fsdp ls`.
#[derive(Debug, Args)]
pub(crate) struct LsArguments {
    /// The folder of a run's checkpoints
    #[arg(value_name = "RUN")]
    run: Location,
    /// One JSON object on stdout
    #[arg(long, env = "FSDP_JSON")]
    json: bool,
}

/// The version of the JSON's schema.
const SCHEMA: u32 = 1;

#[derive(Debug, Serialize)]
struct Listing {
    schema: u32,
    run: String,
    checkpoints: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
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
    /// The reason why it cannot be opened.
    error: Option<String>,
}

/// Lists the checkpoints of a run, the oldest first: `fsdp ls`. Only metadata is read.
///
/// # Errors
/// A folder that cannot be listed.
pub(crate) fn run(arguments: &LsArguments) -> Result<()> {
    let checkpoints: Vec<Row> = steps_of_run(&arguments.run)?.iter().map(row).collect();
    if arguments.json {
        return output::json(&Listing {
            schema: SCHEMA,
            run: arguments.run.to_string(),
            checkpoints,
        });
    }
    if checkpoints.is_empty() {
        output::talk(&no_checkpoints(&arguments.run));
    }
    output::lines(&checkpoints.iter().map(Row::line).collect::<Vec<_>>())
}

/// Returns what is said of a folder without checkpoints.
pub(crate) fn no_checkpoints(run: &Location) -> String {
    format!("no checkpoints in `{}`", escaped(&run.to_string()))
}

/// Opens a checkpoint, and describes it. One that cannot be opened has a row with the error.
fn row(found: &StepOfRun) -> Row {
    let mut row = Row {
        step: found.step,
        name: found.name.clone(),
        format: None,
        tensors: 0,
        values: 0,
        bytes: 0,
        hashed: false,
        error: None,
    };
    match checkpoint::open(&found.path, OpenOptions::default()) {
        Ok(opened) => {
            let metadata = opened.metadata();
            row.format = Some(opened.format().name());
            row.tensors = metadata.tensors().count();
            row.values = metadata.values().count();
            row.bytes = metadata
                .tensors()
                .map(|(_, tensor)| inspect::bytes(tensor))
                .fold(0, u64::saturating_add);
            row.hashed = opened.directory().has_integrity();
        }
        Err(error) => row.error = Some(with_causes(&error)),
    }
    row
}

impl Row {
    /// Returns the line of a checkpoint.
    fn line(&self) -> String {
        let (step, name) = (self.step, escaped(&self.name));
        let Some(format) = self.format else {
            let error = escaped(self.error.as_deref().unwrap_or_default()).into_owned();
            return format!("{step:>9}  {name}  cannot be opened: {error}");
        };
        let tensors = count(self.tensors, "tensor", "tensors");
        let hashes = if self.hashed { ", hashes" } else { "" };
        format!(
            "{step:>9}  {name}  {format}, {tensors}, {}{hashes}",
            iec(self.bytes)
        )
    }
}
