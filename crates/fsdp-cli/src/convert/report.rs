//! The report of what was, or would be, written.

use anyhow::Result;
use fsdp_formats::checkpoint::{Change, Checkpoint};
use fsdp_formats::metadata::Metadata;
use fsdp_layout::boxes::saturating_bytes;
use fsdp_layout::count_text;
use fsdp_tools::convert::Converted;
use fsdp_tools::tensor_parallel::TensorParallelPlan;
use serde::Serialize;
use serde_json::{Value, json};

use super::destination::Destination;
use crate::inspect;
use crate::natural;
use crate::output;
use crate::text::{bytes_text, escaped};

const SCHEMA: u32 = 1;

/// The largest piece of a tensor that a thread reads at a time.
const PIECE_BYTES: u64 = 16 << 20;
/// The pieces that a thread may hold: one as it was read, one whose elements a map has moved, and
/// one that is cast.
const PIECES: u64 = 3;
/// The memory that reading and writing take besides the pieces.
const OVERHEAD_BYTES: u64 = 2 << 20;

/// The report of what was, or would be, written.
pub(super) struct WriteReport<'a> {
    source: &'a dyn Checkpoint,
    destination: &'a Destination<'a>,
    value_count: usize,
    /// The approximate upper limit of the memory used.
    memory_bytes: u64,
    /// The outcome of the write or, before it, as much as is known.
    pub(super) conversion: Converted,
    /// The keys of opaque values that are left out, with their types.
    dropped_keys: Vec<String>,
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
    pub(super) fn before_write(
        source: &'a dyn Checkpoint,
        destination: &'a Destination<'a>,
    ) -> Self {
        // The sizes come from a file that may be damaged, so no sum may overflow.
        let metadata = source.metadata();
        let mut conversion = Converted {
            // Elements that become infinite are counted later, while they are read.
            changes: source.changes(),
            ..Converted::default()
        };
        let mut largest_bytes = 0;
        for (_, tensor) in metadata.tensors() {
            let tensor_bytes = inspect::tensor_bytes(tensor);
            conversion.tensors += 1;
            conversion.bytes = conversion.bytes.saturating_add(tensor_bytes);
            largest_bytes = tensor_bytes.max(largest_bytes);
        }
        let threads = destination.writing.work.threads.count() as u64;
        let value_count = metadata.values().count();
        // DCP directories and files of torch hold any value; the others keep what they cannot hold
        // in a file beside them.
        conversion.aside_file = destination.values_file().filter(|_| value_count > 0);
        if conversion.aside_file.is_some() {
            conversion
                .aside
                .extend(metadata.values().map(|(key, _)| key.to_owned()));
            conversion.aside.sort_by(natural::compare);
        }
        let is_dry_run = destination.writing.dry_run;
        let plan = destination.tensor_parallel_plan.as_ref();
        WriteReport {
            source,
            destination,
            value_count,
            memory_bytes: threads
                .saturating_mul(PIECES * largest_bytes.min(PIECE_BYTES) + OVERHEAD_BYTES),
            conversion,
            dropped_keys: Vec::new(),
            tensor_parallel: plan.map(|plan| TensorParallelReport::new(plan, metadata, is_dry_run)),
        }
    }

    /// Sets what was really written. The plan counts what the source has: opaque items may have
    /// been left out since, and quantized tensors have become several.
    pub(super) fn set_conversion(&mut self, mut conversion: Converted) {
        conversion.aside.sort_by(natural::compare);
        conversion.quantized.sort_by(natural::compare);
        conversion.stored_as_bytes.sort_by(natural::compare);
        for (key, type_name) in &conversion.dropped {
            // An opaque item may be a tensor, and those are counted apart.
            if self.source.metadata().tensor(key).is_none() {
                self.value_count -= 1;
            }
            self.dropped_keys.push(format!("{key} ({type_name})"));
        }
        self.conversion = conversion;
    }

    /// Returns the object of `--json`.
    fn json(&self) -> Value {
        let conversion = &self.conversion;
        let mut object = json!({
            "schema": SCHEMA,
            "source": self.source.path().display().to_string(),
            "destination": self.destination.path.to_string(),
            "to": self.destination.format_name,
            "dry_run": self.destination.writing.dry_run,
            "tensors": conversion.tensors,
            "values": self.value_count,
            "bytes": conversion.bytes,
            "memory": self.memory_bytes,
            "aside": conversion.aside,
            "aside_file": conversion.aside_file,
            "quantized": conversion.quantized,
            "stored_as_bytes": conversion.stored_as_bytes,
            "containers": conversion.containers,
            "copied": conversion.copied,
            "left_behind": conversion.left_behind,
            "notes_left_out": conversion.notes_left_out,
            "dropped": self.dropped_keys,
            "changes": conversion.changes.iter().map(change_json).collect::<Vec<_>>(),
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
            return output::print_json(&self.json());
        }
        let tensors = count_text(self.conversion.tensors, "tensor", "tensors");
        let value_count = count_text(self.value_count, "value", "values");
        let bytes = bytes_text(self.conversion.bytes);
        let path = self.destination.path.to_string();
        let path = escaped(&path);
        // Ranks of a tensor-parallel job get different amounts, and the largest decides what fits.
        let part_text = match &self.tensor_parallel {
            Some(TensorParallelReport {
                ranks, most_bytes, ..
            }) => format!(
                " in parts for {} of at most {}",
                count_text(*ranks, "rank", "ranks"),
                bytes_text(*most_bytes)
            ),
            None => String::new(),
        };
        if !self.destination.writing.dry_run {
            output::print_message(&format!(
                "wrote {tensors} and {value_count}, {bytes}{part_text}, to `{path}`"
            ));
            return Ok(());
        }
        if let Some(report) = &self.tensor_parallel {
            // The cuts are data, for scripts that check them before anything is written.
            let lines: Vec<String> = report.tensors.iter().map(CutTensor::describe).collect();
            output::print_lines(&lines)?;
        }
        let memory = bytes_text(self.memory_bytes);
        output::print_line(&format!(
            "would write {tensors} and {value_count}, {bytes}{part_text}, to `{path}` with at most about \
             {memory} of memory"
        ))
    }

    /// Tells on stderr what the destination holds in another way than the source, or not at all.
    fn talk_of_differences(&self) {
        let format = &self.destination.format_name;
        let conversion = &self.conversion;
        if let Some(file) = &conversion.aside_file {
            let verb = match (self.destination.writing.dry_run, conversion.aside.len()) {
                (true, _) => "would be",
                (false, 1) => "is",
                (false, _) => "are",
            };
            let description = format!("that `{format}` cannot hold {verb} in `{file}`");
            talk_list(&conversion.aside, ["value", "values"], &description);
        }
        talk_list(
            &conversion.quantized,
            ["quantized tensor was", "quantized tensors were"],
            "written as integers, with a value `KEY.quantizer` for each",
        );
        talk_list(
            &conversion.stored_as_bytes,
            ["tensor", "tensors"],
            "of dtypes that safetensors lacks became bytes, which other programs read as `U8`",
        );
        talk_list(
            &conversion.containers,
            ["place", "places"],
            &format!(
                "of the state dict that `{format}` cannot tell (keys become text, tuples lists, empty \
                 dicts go)"
            ),
        );
        let items = ["opaque item was", "opaque items were"];
        talk_list(&self.dropped_keys, items, "left out");
        talk_names("copied", &conversion.copied);
        talk_names("left behind:", &conversion.left_behind);
        let notes = format!("notes in the header that `{format}` cannot hold:");
        talk_names(&notes, &conversion.notes_left_out);
        for change in &conversion.changes {
            output::print_message(&format!("{}:", change.line()));
            output::print_keys_message(&change.names);
        }
    }
}

/// Returns the object of one change.
fn change_json(change: &Change) -> Value {
    json!({ "what": change.line(), "count": change.names.len(), "names": change.names })
}

/// Writes the number of some keys and what they are to stderr, and a line for each; nothing if
/// there are none. The first word is for one key, the second for several.
fn talk_list(keys: &[String], [one, many]: [&str; 2], description: &str) {
    if keys.is_empty() {
        return;
    }
    let count = count_text(keys.len(), one, many);
    output::print_message(&format!("{count} {description}:"));
    for key in keys {
        output::print_message(&format!("  {}", escaped(key)));
    }
}

/// Writes names in one line to stderr; nothing if there are none.
fn talk_names(description: &str, names: &[String]) {
    if names.is_empty() {
        return;
    }
    let quoted: Vec<String> = names
        .iter()
        .map(|name| format!("`{}`", escaped(name)))
        .collect();
    output::print_message(&format!("{description} {}", quoted.join(", ")));
}

impl TensorParallelReport {
    /// Returns the report of a plan, with its tensors if `lists_tensors`.
    fn new(plan: &TensorParallelPlan, metadata: &Metadata, lists_tensors: bool) -> Self {
        let mut tensors = Vec::new();
        // Heads and rows need not divide equally, so each rank is summed up for itself.
        let mut bytes_by_rank = vec![0u64; plan.ranks()];
        for (name, cut) in plan.cuts() {
            let tensor = metadata.tensor(name).expect("the plan is of these tensors");
            let shapes: Vec<Vec<usize>> =
                (0..plan.ranks()).map(|rank| cut.shape_of(rank)).collect();
            for (bytes, shape) in bytes_by_rank.iter_mut().zip(&shapes) {
                let part_bytes = saturating_bytes(shape, tensor.properties.dtype);
                *bytes = bytes.saturating_add(part_bytes);
            }
            if lists_tensors {
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
            most_bytes: bytes_by_rank.into_iter().fold(0, u64::max),
            tensors,
        }
    }
}

impl CutTensor {
    /// Returns a line: key, shape, how it is cut, and the shapes on the ranks.
    fn describe(&self) -> String {
        // Most ranks have parts of the same shape: they are written once, with their number.
        let shapes: Vec<String> = self
            .ranks
            .chunk_by(|a, b| a == b)
            .map(|equal_shapes| format!("{} x {:?}", equal_shapes.len(), equal_shapes[0]))
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
