//! The report of what was, or would be, written.

use anyhow::Result;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::metadata::Metadata;
use fsdp_tools::convert::Converted;
use fsdp_tools::tensor_parallel::TensorParallelPlan;
use serde::Serialize;
use serde_json::{Value, json};

use super::destination::Destination;
use crate::inspect;
use crate::natural;
use crate::output;
use crate::text::{count, escaped, iec};

const SCHEMA: u32 = 1;

/// The largest piece of a tensor that a thread reads at a time. A thread holds two pieces: one as
/// it was read, and one as it will be written.
const PIECE_BYTES: u64 = 16 << 20;
/// The memory that reading and writing take besides the pieces.
const OVERHEAD_BYTES: u64 = 2 << 20;

/// The report of what was, or would be, written.
pub(super) struct WriteReport<'a> {
    source: &'a dyn Checkpoint,
    destination: &'a Destination<'a>,
    values: usize,
    /// The approximate upper limit of the memory used.
    memory: u64,
    /// The outcome of the write or, before it, as much as is known.
    pub(super) written: Converted,
    /// The keys of opaque values that are left out, with their types.
    dropped: Vec<String>,
    tensor_parallel: Option<TensorParallelReport>,
}

/// The parts of tensor-parallel ranks.
#[derive(Serialize)]
struct TensorParallelReport {
    ranks: usize,
    most_bytes: u64,
    /// The parts that each gets of each tensor; only for `--dry-run`.
    tensors: Vec<CutTensor>,
}

/// The shapes of one tensor and of its parts on each rank.
#[derive(Serialize)]
struct CutTensor {
    name: String,
    /// The way of cutting, such as `colwise(heads)`.
    how: String,
    shape: Vec<usize>,
    /// The shape on each rank.
    ranks: Vec<Vec<usize>>,
}

impl<'a> WriteReport<'a> {
    /// Returns the report of what will be written, as far as it is known before.
    pub(super) fn planned(source: &'a dyn Checkpoint, destination: &'a Destination<'a>) -> Self {
        // The sizes come from a file that may be damaged, so no sum may overflow.
        let metadata = source.metadata();
        let mut written = Converted::default();
        let mut largest = 0;
        for (_, tensor) in metadata.tensors() {
            let size = inspect::bytes(tensor);
            written.tensors += 1;
            written.bytes = written.bytes.saturating_add(size);
            largest = size.max(largest);
        }
        let threads = destination.writing.work.threads.count() as u64;
        let values = metadata.values().count();
        // DCP directories and files of torch hold any value; the others keep what they cannot hold
        // in a file beside them.
        written.aside_file = destination.values_file().filter(|_| values > 0);
        if written.aside_file.is_some() {
            written
                .aside
                .extend(metadata.values().map(|(key, _)| key.to_owned()));
            written.aside.sort_by(natural::compare);
        }
        let is_dry_run = destination.writing.dry_run;
        let plan = destination.plan.as_ref();
        WriteReport {
            source,
            destination,
            values,
            // Each thread holds a piece as it was read, and the same piece as it will be written.
            memory: threads.saturating_mul(2 * largest.min(PIECE_BYTES) + OVERHEAD_BYTES),
            written,
            dropped: Vec::new(),
            tensor_parallel: plan.map(|plan| TensorParallelReport::new(plan, metadata, is_dry_run)),
        }
    }

    /// Sets what was really written. The plan counts what the source has: opaque items may have
    /// been left out since, and quantized tensors have become several.
    pub(super) fn set_written(&mut self, mut written: Converted) {
        written.aside.sort_by(natural::compare);
        written.quantized.sort_by(natural::compare);
        for (key, type_name) in &written.dropped {
            // An opaque item may be a tensor, and those are counted apart.
            if self.source.metadata().tensor(key).is_none() {
                self.values -= 1;
            }
            self.dropped.push(format!("{key} ({type_name})"));
        }
        self.written = written;
    }

    /// Returns the object of `--json`.
    fn json(&self) -> Value {
        let written = &self.written;
        let mut object = json!({
            "schema": SCHEMA,
            "source": self.source.path().display().to_string(),
            "destination": self.destination.path.to_string(),
            "to": self.destination.name,
            "dry_run": self.destination.writing.dry_run,
            "tensors": written.tensors,
            "values": self.values,
            "bytes": written.bytes,
            "memory": self.memory,
            "aside": written.aside,
            "aside_file": written.aside_file,
            "quantized": written.quantized,
            "containers": written.containers,
            "copied": written.copied,
            "left_behind": written.left_behind,
            "notes_left_out": written.notes_left_out,
            "dropped": self.dropped,
        });
        if let Some(report) = &self.tensor_parallel {
            object["tensor_parallel"] = json!(report);
        }
        object
    }

    /// Tells on stderr what is not as in the source, and then the outcome: as JSON on stdout, or in
    /// words.
    ///
    /// # Errors
    /// stdout is closed or full.
    pub(super) fn print(&self, as_json: bool) -> Result<()> {
        self.talk_of_differences();
        if as_json {
            return output::json(&self.json());
        }
        let tensors = count(self.written.tensors, "tensor", "tensors");
        let values = count(self.values, "value", "values");
        let bytes = iec(self.written.bytes);
        let path = self.destination.path.to_string();
        let path = escaped(&path);
        // Ranks of a tensor-parallel job get different amounts, and the largest decides what fits.
        let parts = match &self.tensor_parallel {
            Some(TensorParallelReport {
                ranks, most_bytes, ..
            }) => format!(
                " in parts for {ranks} ranks of at most {}",
                iec(*most_bytes)
            ),
            None => String::new(),
        };
        if !self.destination.writing.dry_run {
            output::talk(&format!(
                "wrote {tensors} and {values}, {bytes}{parts}, to `{path}`"
            ));
            return Ok(());
        }
        if let Some(report) = &self.tensor_parallel {
            // The cuts are data, for scripts that check them before anything is written.
            let lines: Vec<String> = report.tensors.iter().map(CutTensor::line).collect();
            output::lines(&lines)?;
        }
        let memory = iec(self.memory);
        output::data(&format!(
            "would write {tensors} and {values}, {bytes}{parts}, to `{path}` with at most about \
             {memory} of memory"
        ))
    }

    /// Tells on stderr what the destination holds in another way than the source, or not at all.
    fn talk_of_differences(&self) {
        let format = &self.destination.name;
        let written = &self.written;
        if let Some(file) = &written.aside_file {
            let is_dry_run = self.destination.writing.dry_run;
            let are = if is_dry_run { "would be" } else { "are" };
            let what = format!("values that `{format}` cannot hold {are} in `{file}`:");
            talk_list(&written.aside, &what);
        }
        talk_list(
            &written.quantized,
            "quantized tensors were written as integers, with a value `KEY.quantizer` for each:",
        );
        talk_list(
            &written.containers,
            &format!(
                "places of the state dict that `{format}` cannot tell (keys become text, tuples \
                 lists, empty dicts go):"
            ),
        );
        let one = self.dropped.len() == 1;
        let were = if one { "item was" } else { "items were" };
        talk_list(&self.dropped, &format!("opaque {were} left out:"));
        talk_names("copied", &written.copied);
        talk_names("left behind:", &written.left_behind);
        let notes = format!("notes in the header that `{format}` cannot hold:");
        talk_names(&notes, &written.notes_left_out);
    }
}

/// Writes the number of some keys and what they are to stderr, and a line for each; nothing if
/// there are none.
fn talk_list(keys: &[String], what: &str) {
    if keys.is_empty() {
        return;
    }
    output::talk(&format!("{} {what}", keys.len()));
    for key in keys {
        output::talk(&format!("  {}", escaped(key)));
    }
}

/// Writes names in one line to stderr; nothing if there are none.
fn talk_names(what: &str, names: &[String]) {
    if names.is_empty() {
        return;
    }
    let quoted: Vec<String> = names
        .iter()
        .map(|name| format!("`{}`", escaped(name)))
        .collect();
    output::talk(&format!("{what} {}", quoted.join(", ")));
}

impl TensorParallelReport {
    /// Returns the report of a plan, with its tensors if it `lists` them.
    fn new(plan: &TensorParallelPlan, metadata: &Metadata, lists: bool) -> Self {
        let mut tensors = Vec::new();
        // Heads and rows need not divide equally, so each rank is summed up for itself.
        let mut bytes_of_ranks = vec![0u64; plan.ranks()];
        for (name, cut) in plan.cuts() {
            let tensor = metadata.tensor(name).expect("the plan is of these tensors");
            let shapes: Vec<Vec<usize>> =
                (0..plan.ranks()).map(|rank| cut.shape_of(rank)).collect();
            for (bytes, shape) in bytes_of_ranks.iter_mut().zip(&shapes) {
                let part = inspect::bytes_of(tensor.properties.dtype, shape);
                *bytes = bytes.saturating_add(part);
            }
            if lists {
                tensors.push(CutTensor {
                    name: name.to_owned(),
                    how: cut.how.clone(),
                    shape: cut.shape.clone(),
                    ranks: shapes,
                });
            }
        }
        TensorParallelReport {
            ranks: plan.ranks(),
            most_bytes: bytes_of_ranks.into_iter().fold(0, u64::max),
            tensors,
        }
    }
}

impl CutTensor {
    /// Returns a line: key, shape, how it is cut, and the shapes on the ranks.
    fn line(&self) -> String {
        // Most ranks have parts of the same shape: they are written once, with their number.
        let shapes: Vec<String> = self
            .ranks
            .chunk_by(|a, b| a == b)
            .map(|same| format!("{} x {:?}", same.len(), same[0]))
            .collect();
        format!(
            "{}\t{:?}\t{}\t{}",
            escaped(&self.name),
            self.shape,
            escaped(&self.how),
            shapes.join(", ")
        )
    }
}
