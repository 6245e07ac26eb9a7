//! `fsdp inspect`: the contents of a checkpoint of any format, from its metadata and its `step`.

use std::collections::{BTreeMap, HashMap};

use anyhow::Result;
use clap::Args;
use fsdp_formats::checkpoint::{self, Checkpoint};
use fsdp_formats::metadata::{Chunk, Entry, StorageInfo, TensorEntry};
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::{FileError, Location};
use fsdp_layout::boxes::saturating_bytes;
use fsdp_layout::count_text;
use serde::Serialize;

use crate::natural;
use crate::output;
use crate::text::{bytes_text, column_widths, escaped, or_word};
use crate::tree::tree_lines;

/// Options of `fsdp inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArguments {
    /// A checkpoint of any format
    #[arg(value_name = "CKPT")]
    path: Location,
    /// The keys as a tree, with the tensors and bytes below each
    #[arg(long, conflicts_with_all = ["tensors", "json"])]
    tree: bool,
    /// Tensors only: name, dtype, shape and bytes, between tabs
    #[arg(long, conflicts_with = "json")]
    tensors: bool,
    /// One JSON object on stdout, with every box
    #[arg(long)]
    json: bool,
}

/// The version of the JSON's schema.
const SCHEMA: u32 = 1;

/// The columns that rows should fit.
const COLUMNS: usize = 80;

/// The largest number of ranks for which a tensor's boxes are listed by rank.
const MAX_RANKS_IN_LINE: usize = 8;

#[derive(Debug, Default, Serialize)]
struct CheckpointSummary {
    schema: u32,
    path: String,
    format: &'static str,
    committed: bool,
    /// The reason, if it is not committed.
    reason: Option<String>,
    /// The step at which it was saved, where it is in one of the usual places.
    step: Option<i64>,
    /// `true` if hashes of its files lie beside it.
    hashed: bool,
    /// The bytes of all tensors' elements.
    bytes: u64,
    tensors: Vec<Tensor>,
    /// The keys of values that are not tensors.
    values: Vec<String>,
    /// The values that hold objects of types that are never built, and the tensors that are such
    /// objects.
    opaque: Vec<OpaqueItem>,
    /// The number of tensors and values that were not looked into for such objects.
    not_looked_into: usize,
}

#[derive(Debug, Serialize)]
struct OpaqueItem {
    name: String,
    #[serde(rename = "type")]
    type_name: String,
    /// The bytes that it takes as it is stored.
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    bytes: u64,
    boxes: Vec<StoredBox>,
}

#[derive(Debug, Serialize)]
struct StoredBox {
    offsets: Vec<usize>,
    sizes: Vec<usize>,
    /// The rank that wrote it, from the name of its file.
    rank: Option<u64>,
    file: Option<String>,
    offset: Option<u64>,
    length: Option<u64>,
}

/// Shows a checkpoint: `fsdp inspect`.
///
/// # Errors
/// There is no committed checkpoint, or its metadata is damaged.
pub(crate) fn run(arguments: &InspectArguments) -> Result<()> {
    let source = checkpoint::open(&arguments.path, OpenOptions::default());
    let path = arguments.path.to_string();
    if arguments.json
        && let Err(error @ FileError::NotCommitted { .. }) = source
    {
        let printed = output::print_json(&CheckpointSummary {
            schema: SCHEMA,
            path,
            format: "dcp",
            reason: Some(error.to_string()),
            ..CheckpointSummary::default()
        });
        return output::outcome_after_report(printed, Err(error.into()));
    }
    let summary = CheckpointSummary::new(path, &*source?);
    if arguments.json {
        return output::print_json(&summary);
    }
    if arguments.tensors {
        let lines: Vec<String> = summary.tensors.iter().map(Tensor::script_line).collect();
        return output::print_lines(&lines);
    }
    if arguments.tree {
        let tensors = summary.tensors.iter().map(|tensor| {
            let description = format!("{} {:?}", tensor.dtype, tensor.shape);
            (tensor.name.as_str(), Some(description), tensor.bytes)
        });
        let values = summary.values.iter().map(|name| (name.as_str(), None, 0));
        return output::print_lines(&tree_lines(tensors.chain(values)));
    }
    output::print_lines(&summary.lines())
}

impl CheckpointSummary {
    /// Describes a checkpoint.
    fn new(path: String, source: &dyn Checkpoint) -> Self {
        let metadata = source.metadata();
        let (opaque, not_looked_into) = opaque_items(source);
        let bytes_by_name: HashMap<&str, u64> = opaque
            .iter()
            .map(|item| (item.name.as_str(), item.bytes))
            .collect();
        let mut tensors: Vec<Tensor> = metadata
            .tensors()
            .map(|(name, entry)| Tensor::new(name, entry))
            .collect();
        // Numbers in names are in the order of numbers: `h.2` before `h.10`.
        tensors.sort_by(|a, b| natural::compare(&a.name, &b.name));
        let mut bytes: u64 = 0;
        for tensor in &mut tensors {
            // The dtype and the shape of an opaque tensor do not tell how many bytes it takes.
            if let Some(&stored_bytes) = bytes_by_name.get(tensor.name.as_str()) {
                tensor.bytes = stored_bytes;
            }
            bytes = bytes.saturating_add(tensor.bytes);
        }
        let mut values: Vec<String> = metadata.values().map(|(name, _)| name.to_owned()).collect();
        values.sort_by(natural::compare);
        CheckpointSummary {
            schema: SCHEMA,
            path,
            format: source.format().name(),
            committed: true,
            reason: None,
            step: find_step(source),
            hashed: source.directory().has_integrity(),
            bytes,
            tensors,
            values,
            opaque,
            not_looked_into,
        }
    }

    /// Returns the report of a committed checkpoint as lines of text.
    fn lines(&self) -> Vec<String> {
        let hashes = if self.hashed { "yes" } else { "no" };
        let tensors = self.tensors.len();
        let box_count: usize = self.tensors.iter().map(|tensor| tensor.boxes.len()).sum();
        let boxes = count_text(box_count, "box", "boxes");
        let mut lines = vec![
            format!("checkpoint  {} ({})", escaped(&self.path), self.format),
            format!("committed   yes, hashes {hashes}"),
            format!("step        {}", or_word(self.step, "unknown")),
            format!(
                "tensors     {tensors} in {boxes}, {}",
                bytes_text(self.bytes)
            ),
            format!("values      {}", self.values.len()),
        ];
        for OpaqueItem {
            name,
            type_name,
            bytes,
        } in &self.opaque
        {
            let mut line = format!("opaque      {}: {}", escaped(name), escaped(type_name));
            if *bytes > 0 {
                line.push_str(&format!(", {}", bytes_text(*bytes)));
            }
            lines.push(line);
        }
        if self.not_looked_into > 0 {
            let skipped_items = count_text(self.not_looked_into, "item was", "items were");
            lines.push(format!(
                "            {skipped_items} not looked into; `fsdp verify` looks into all"
            ));
        }
        lines.push(String::new());
        let header = ["tensor", "dtype", "shape", "bytes", "boxes by rank"];
        let mut rows = vec![header.map(str::to_owned)];
        rows.extend(self.tensors.iter().map(Tensor::row));
        let widths = column_widths(&rows);
        let [w0, w1, w2, w3, _] = widths;
        // Two spaces are between columns. Where the names leave no room, each has a line of its
        // own.
        let is_narrow = widths.iter().sum::<usize>() + 4 * 2 <= COLUMNS;
        for [name, dtype, shape, bytes, boxes] in &rows {
            let columns = format!("  {dtype:w1$}  {shape:w2$}  {bytes:>w3$}  {boxes}");
            if is_narrow {
                lines.push(format!("{name:w0$}{columns}"));
            } else {
                lines.push(name.clone());
                lines.push(format!("  {columns}"));
            }
        }
        lines
    }
}

/// The keys under which trainers keep the count of their steps, the most specific first.
const STEPS: [&str; 8] = [
    "train.step",
    "train_state.step",
    "trainer.step",
    "trainer_state.global_step",
    "global_step",
    "global_steps",
    "iteration",
    "step",
];

/// The most items that are looked into in the file system, and elsewhere.
const MAX_LOCAL_ITEMS: usize = 4096;
const MAX_REMOTE_ITEMS: usize = 64;

/// The most bytes that the value of a step takes.
const MAX_STEP_BYTES: u64 = 64 << 10;

/// Returns the opaque values and tensors, sorted, and the number of items that were not looked
/// into. Nothing is read but what tells their types, and that of some items only: a checkpoint may
/// have millions.
fn opaque_items(source: &dyn Checkpoint) -> (Vec<OpaqueItem>, usize) {
    let entries = &source.metadata().entries;
    // Values come first: most opaque items are values.
    let values = entries.iter().filter(|(_, entry)| is_value(entry));
    let tensors = entries.iter().filter(|(_, entry)| !is_value(entry));
    let is_local = Location::from(source.path()).local().is_some();
    let max_items = if is_local {
        MAX_LOCAL_ITEMS
    } else {
        MAX_REMOTE_ITEMS
    };
    let mut items = Vec::new();
    for (name, entry) in values.chain(tensors).take(max_items) {
        // A value whose type cannot be read is damaged: `verify` tells of it, and the rest is shown
        // here.
        if let Ok(Some(type_name)) = source.opaque_type(name) {
            items.push(OpaqueItem {
                name: name.clone(),
                type_name,
                bytes: stored_bytes(entry),
            });
        }
    }
    items.sort_by(|a, b| natural::compare(&a.name, &b.name));
    (items, entries.len().saturating_sub(max_items))
}

const fn is_value(entry: &Entry) -> bool {
    matches!(entry, Entry::Bytes(_))
}

/// Returns the bytes that an entry takes as it is stored.
fn stored_bytes(entry: &Entry) -> u64 {
    let lengths: Vec<u64> = match entry {
        Entry::Bytes(value) => value.stored.iter().map(|stored| stored.length).collect(),
        Entry::Tensor(tensor) => tensor
            .chunks
            .iter()
            .filter_map(|chunk| Some(chunk.stored.as_ref()?.length))
            .collect(),
    };
    // The lengths come from a file that may be damaged.
    lengths.into_iter().fold(0, u64::saturating_add)
}

/// Returns the step at which a checkpoint was saved; `None` if neither a usual key nor the lineage
/// has it. One that is damaged does not keep the rest from being shown: `verify` is for damage.
fn find_step(source: &dyn Checkpoint) -> Option<i64> {
    let entries = &source.metadata().entries;
    let by_key = STEPS.iter().find_map(|key| {
        let entry = entries.get(*key)?;
        // A longer value is no number, and need not be read.
        if !is_value(entry) || stored_bytes(entry) > MAX_STEP_BYTES {
            return None;
        }
        source.read_value(key).ok()?.as_int()
    });
    let lineage = source.directory().lineage();
    by_key.or_else(|| i64::try_from(lineage?.step).ok())
}

impl Tensor {
    /// Describes a tensor and its boxes.
    fn new(name: &str, entry: &TensorEntry) -> Self {
        Tensor {
            name: name.to_owned(),
            dtype: entry.properties.dtype.to_string(),
            shape: entry.shape.clone(),
            bytes: tensor_bytes(entry),
            boxes: entry.chunks.iter().map(StoredBox::new).collect(),
        }
    }

    /// Returns the row of the table.
    fn row(&self) -> [String; 5] {
        [
            escaped(&self.name).into_owned(),
            self.dtype.clone(),
            format!("{:?}", self.shape),
            self.bytes.to_string(),
            self.boxes_by_rank(),
        ]
    }

    /// Returns the line of `--tensors`, for scripts: fields between tabs.
    fn script_line(&self) -> String {
        format!(
            "{}\t{}\t{:?}\t{}",
            escaped(&self.name),
            self.dtype,
            self.shape,
            self.bytes
        )
    }

    /// Lists the number of boxes by rank: `0:1 1:2` is one box of rank 0 and two of rank 1. Returns
    /// only the number of boxes if no rank is known, and the numbers of boxes and ranks if some are
    /// unknown or there are many.
    fn boxes_by_rank(&self) -> String {
        let mut ranks: BTreeMap<u64, usize> = BTreeMap::new();
        for rank in self.boxes.iter().filter_map(|stored| stored.rank) {
            *ranks.entry(rank).or_default() += 1;
        }
        let boxes_with_rank: usize = ranks.values().sum();
        if ranks.is_empty() {
            return self.boxes.len().to_string();
        }
        if boxes_with_rank < self.boxes.len() || ranks.len() > MAX_RANKS_IN_LINE {
            let ranks = count_text(ranks.len(), "rank", "ranks");
            return format!("{} on {ranks}", self.boxes.len());
        }
        let counts: Vec<String> = ranks
            .iter()
            .map(|(rank, boxes)| format!("{rank}:{boxes}"))
            .collect();
        counts.join(" ")
    }
}

/// Returns the number of bytes of a tensor's elements.
pub(super) fn tensor_bytes(entry: &TensorEntry) -> u64 {
    // The shape may be that of a damaged file.
    saturating_bytes(&entry.shape, entry.properties.dtype)
}

impl StoredBox {
    /// Describes a box and the place of its bytes.
    fn new(Chunk { bounds, stored }: &Chunk) -> Self {
        let stored = stored.as_ref();
        StoredBox {
            offsets: bounds.offsets.clone(),
            sizes: bounds.sizes.clone(),
            rank: stored.and_then(rank_of_file),
            file: stored.map(|stored| stored.relative_path.clone()),
            offset: stored.map(|stored| stored.offset),
            length: stored.map(|stored| stored.length),
        }
    }
}

/// Returns the rank that wrote a file, or that it is for, from the file's name: 2 for
/// `__2_0.distcp`, for `model_world_size_4_rank_2.pt` and for `model-rank-2-part-0.safetensors`.
/// Returns `None` for other names.
pub(super) fn rank_of_file(stored: &StorageInfo) -> Option<u64> {
    let name = &stored.relative_path;
    let rank_text = match name
        .strip_prefix("__")
        .or_else(|| name.strip_prefix("model-rank-"))
    {
        Some(rank_text) => rank_text,
        None => name.split_once("_rank")?.1.trim_start_matches('_'),
    };
    rank_text.split(['_', '.', '-']).next()?.parse().ok()
}
