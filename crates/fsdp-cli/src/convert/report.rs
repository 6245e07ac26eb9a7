//! The report of what was, or would be, written.

use anyhow::Result;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::metadata::Metadata;
use fsdp_tools::convert::Converted;
use fsdp_tools::tensor_parallel::TensorParallelPlan;
use serde::Serialize;

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
#[derive(Debug, Serialize)]
pub(super) struct WriteReport {
    schema: u32,
    source: String,
    destination: String,
    to: String,
    dry_run: bool,
    tensors: usize,
    values: usize,
    /// The bytes of all tensors' elements.
    pub(super) bytes: u64,
    /// The approximate upper limit of the memory used.
    memory: u64,
    /// The keys of values that the format cannot hold, and the file that holds them.
    aside: Vec<String>,
    aside_file: Option<String>,
    /// The keys of quantized tensors, which are written as integers. `KEY.quantizer` describes
    /// their meaning.
    quantized: Vec<String>,
    /// The containers that the format cannot express: keys that are not text, tuples, empty dicts.
    containers: Vec<String>,
    /// The files beside the source's own that are copied.
    copied: Vec<String>,
    /// The files and directories beside the source's own that are not copied.
    left_behind: Vec<String>,
    /// The keys of the notes in the headers of safetensors files that the format cannot hold.
    notes_left_out: Vec<String>,
    /// The keys of opaque values that are left out.
    dropped: Vec<String>,
    /// The number of tensor-parallel ranks, and the most bytes of tensors that one of them gets.
    #[serde(skip_serializing_if = "Option::is_none")]
    tensor_parallel: Option<TensorParallelReport>,
}

/// The parts of tensor-parallel ranks.
#[derive(Debug, Serialize)]
struct TensorParallelReport {
    ranks: usize,
    most_bytes: u64,
    /// The parts that each gets of each tensor; only for `--dry-run`.
    tensors: Vec<CutTensor>,
}

/// The shapes of one tensor and of its parts on each rank.
#[derive(Debug, Serialize)]
struct CutTensor {
    name: String,
    /// The way of cutting, such as `colwise(heads)`.
    how: String,
    shape: Vec<usize>,
    /// The shape on each rank.
    ranks: Vec<Vec<usize>>,
}

impl WriteReport {
    /// Returns the report of what will be written, as far as it is known before.
    pub(super) fn planned(source: &dyn Checkpoint, destination: &Destination<'_>) -> Self {
        // The sizes come from a file that may be damaged, so no sum may overflow.
        let metadata = source.metadata();
        let mut tensors = 0;
        let mut bytes: u64 = 0;
        let mut largest = 0;
        for (_, tensor) in metadata.tensors() {
            let size = inspect::bytes(tensor);
            tensors += 1;
            bytes = bytes.saturating_add(size);
            largest = size.max(largest);
        }
        let threads = destination.writing.work.threads.count() as u64;
        let values = metadata.values().count();
        let mut aside = Vec::new();
        // DCP directories and files of torch hold any value; the others keep what they cannot hold
        // in a file beside them.
        let aside_file = destination.values_file().filter(|_| values > 0);
        if aside_file.is_some() {
            aside.extend(metadata.values().map(|(key, _)| key.to_owned()));
            aside.sort_by(|a, b| natural::compare(a, b));
        }
        let is_dry_run = destination.writing.dry_run;
        let plan = destination.plan.as_ref();
        WriteReport {
            schema: SCHEMA,
            source: source.path().display().to_string(),
            destination: destination.path.to_string(),
            to: destination.name.clone(),
            dry_run: is_dry_run,
            tensors,
            values,
            bytes,
            // Each thread holds a piece as it was read, and the same piece as it will be written.
            memory: threads.saturating_mul(2 * largest.min(PIECE_BYTES) + OVERHEAD_BYTES),
            aside,
            aside_file,
            quantized: Vec::new(),
            containers: Vec::new(),
            copied: Vec::new(),
            left_behind: Vec::new(),
            notes_left_out: Vec::new(),
            dropped: Vec::new(),
            tensor_parallel: plan.map(|plan| TensorParallelReport::new(plan, metadata, is_dry_run)),
        }
    }

    /// Sets what was really written.
    pub(super) fn set_written(&mut self, source: &dyn Checkpoint, written: Converted) {
        // The plan counts what the source has. Opaque items may have been left out since, and
        // quantized tensors have become several.
        self.tensors = written.tensors;
        self.bytes = written.bytes;
        self.aside = written.aside;
        self.aside.sort_by(|a, b| natural::compare(a, b));
        self.aside_file = written.aside_file;
        self.quantized = written.quantized;
        self.quantized.sort_by(|a, b| natural::compare(a, b));
        self.containers = written.containers;
        self.copied = written.copied;
        self.left_behind = written.left_behind;
        self.notes_left_out = written.notes_left_out;
        for (key, type_name) in written.dropped {
            // An opaque item may be a tensor, and those are counted above.
            if source.metadata().tensor(&key).is_none() {
                self.values -= 1;
            }
            self.dropped.push(format!("{key} ({type_name})"));
        }
    }

    /// Tells on stderr what is not as in the source, and then the outcome: as JSON on stdout, or in
    /// words.
    ///
    /// # Errors
    /// stdout is closed or full.
    pub(super) fn print(&self, as_json: bool) -> Result<()> {
        self.talk_of_differences();
        if as_json {
            return output::json(self);
        }
        let tensors = count(self.tensors, "tensor", "tensors");
        let values = count(self.values, "value", "values");
        let bytes = iec(self.bytes);
        let path = escaped(&self.destination);
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
        if !self.dry_run {
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
        let format = &self.to;
        if let Some(file) = &self.aside_file {
            let are = if self.dry_run { "would be" } else { "are" };
            let what = format!("values that `{format}` cannot hold {are} in `{file}`:");
            talk_list(&self.aside, &what);
        }
        talk_list(
            &self.quantized,
            "quantized tensors were written as integers, with a value `KEY.quantizer` for each:",
        );
        talk_list(
            &self.containers,
            &format!(
                "places of the state dict that `{format}` cannot tell (keys become text, tuples \
                 lists, empty dicts go):"
            ),
        );
        let one = self.dropped.len() == 1;
        let were = if one { "item was" } else { "items were" };
        talk_list(&self.dropped, &format!("opaque {were} left out:"));
        talk_names("copied", &self.copied);
        talk_names("left behind:", &self.left_behind);
        let notes = format!("notes in the header that `{format}` cannot hold:");
        talk_names(&notes, &self.notes_left_out);
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
