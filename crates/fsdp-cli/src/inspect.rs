//! `fsdp inspect`: the contents of a checkpoint of any format, from its metadata and its `step`.

use anyhow::Result;
use clap::Args;
use fsdp_formats::FileError;
use fsdp_formats::Location;
use fsdp_formats::checkpoint::{self, Checkpoint};
use fsdp_formats::metadata::{Chunk, Entry, Metadata, StorageInfo, TensorEntry};
use fsdp_formats::reader::OpenOptions;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

use super::output;
use super::text::{count, escaped, iec};
use super::tree::tree;

use crate::natural;

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
    #[arg(long, env = "FSDP_JSON")]
    json: bool,
}

/// The version of the JSON's schema.
const SCHEMA: u32 = 1;

/// The columns that rows should fit.
const COLUMNS: usize = 80;

/// The largest number of ranks for which a tensor's boxes are listed by rank.
const RANKS_IN_A_LINE: usize = 8;

#[derive(Debug, Serialize)]
struct Summary {
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
    opaque: Vec<Opaque>,
    /// The number of tensors and values that were not looked into for such objects.
    not_looked_into: usize,
}

#[derive(Debug, Serialize)]
struct Opaque {
    name: String,
    #[serde(rename = "type")]
    of: String,
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
    if arguments.json {
        if let Err(error @ FileError::NotCommitted { .. }) = &source {
            output::read_or_not(output::json(&Summary::uncommitted(
                path.clone(),
                error.to_string(),
            )))?;
        }
        return output::json(&Summary::new(path, &*source?));
    }
    let summary = Summary::new(path, &*source?);
    if arguments.tensors {
        return output::lines(
            &summary
                .tensors
                .iter()
                .map(Tensor::fields)
                .collect::<Vec<_>>(),
        );
    }
    if arguments.tree {
        let tensors = summary
            .tensors
            .iter()
            .map(|tensor| (tensor.name.as_str(), Some(tensor.leaf()), tensor.bytes));
        let values = summary.values.iter().map(|name| (name.as_str(), None, 0));
        return output::lines(&tree(tensors.chain(values)));
    }
    output::lines(&summary.lines())
}

impl Summary {
    /// Describes a directory that is no committed checkpoint.
    fn uncommitted(path: String, reason: String) -> Self {
        Summary {
            schema: SCHEMA,
            path,
            format: "dcp",
            committed: false,
            reason: Some(reason),
            step: None,
            hashed: false,
            bytes: 0,
            tensors: Vec::new(),
            values: Vec::new(),
            opaque: Vec::new(),
            not_looked_into: 0,
        }
    }

    /// Describes a checkpoint.
    fn new(path: String, source: &dyn Checkpoint) -> Self {
        let metadata = source.metadata();
        let (opaque, not_looked_into) = opaque(source);
        let mut tensors = tensors(metadata);
        let stored: HashMap<&str, u64> = opaque
            .iter()
            .map(|opaque| (opaque.name.as_str(), opaque.bytes))
            .collect();
        for tensor in &mut tensors {
            // The dtype and the shape of an opaque tensor do not tell how many bytes it takes.
            tensor.bytes = stored
                .get(tensor.name.as_str())
                .copied()
                .unwrap_or(tensor.bytes);
        }
        let mut values: Vec<String> = metadata.values().map(|(name, _)| name.to_owned()).collect();
        values.sort_by(|a, b| natural::compare(a, b));
        let step = step(source);
        Summary {
            schema: SCHEMA,
            path,
            format: source.format().name(),
            committed: true,
            reason: None,
            step,
            hashed: source.directory().has_integrity(),
            bytes: tensors
                .iter()
                .fold(0, |sum, tensor| sum.saturating_add(tensor.bytes)),
            tensors,
            values,
            opaque,
            not_looked_into,
        }
    }

    /// Returns the report as lines of text.
    fn lines(&self) -> Vec<String> {
        let boxes: usize = self.tensors.iter().map(|tensor| tensor.boxes.len()).sum();
        let mut lines = vec![
            format!("checkpoint  {} ({})", escaped(&self.path), self.format),
            format!(
                "committed   {}, hashes {}",
                yes_or_no(self.committed),
                yes_or_no(self.hashed)
            ),
            format!(
                "step        {}",
                self.step
                    .map_or_else(|| "unknown".to_owned(), |step| step.to_string())
            ),
            format!(
                "tensors     {} in {}, {}",
                self.tensors.len(),
                count(boxes, "box", "boxes"),
                iec(self.bytes)
            ),
            format!("values      {}", self.values.len()),
        ];
        lines.extend(self.opaque.iter().map(|Opaque { name, of, bytes }| {
            let stored = if *bytes > 0 {
                format!(", {}", iec(*bytes))
            } else {
                String::new()
            };
            format!("opaque      {}: {}{stored}", escaped(name), escaped(of))
        }));
        if self.not_looked_into > 0 {
            let more = count(self.not_looked_into, "item was", "items were");
            lines.push(format!(
                "            {more} not looked into; `fsdp verify` looks into all"
            ));
        }
        lines.push(String::new());
        let rows: Vec<[String; 5]> =
            std::iter::once(["tensor", "dtype", "shape", "bytes", "boxes by rank"])
                .map(|header| header.map(str::to_owned))
                .chain(self.tensors.iter().map(Tensor::row))
                .collect();
        let width = |column: usize| {
            rows.iter()
                .map(|row| row[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths = [0, 1, 2, 3].map(width);
        let [w0, w1, w2, w3] = widths;
        // Where the names leave no room, each has a line of its own.
        let is_narrow = widths.iter().sum::<usize>() + 8 + width(4) <= COLUMNS;
        for [name, dtype, shape, bytes, boxes] in &rows {
            if is_narrow {
                lines.push(format!(
                    "{name:w0$}  {dtype:w1$}  {shape:w2$}  {bytes:>w3$}  {boxes}"
                ));
            } else {
                lines.push(name.clone());
                lines.push(format!(
                    "    {dtype:w1$}  {shape:w2$}  {bytes:>w3$}  {boxes}"
                ));
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

/// The number of items that are looked into, in the file system and elsewhere.
const LOOKS: [usize; 2] = [4096, 64];

/// The most bytes that the value of a step takes.
const STEP_BYTES: u64 = 64 << 10;

/// Returns the opaque values and tensors, sorted, and the number of items that were not looked
/// into. Nothing is read but what tells their types, and that of some items only: a checkpoint may
/// have millions.
fn opaque(source: &dyn Checkpoint) -> (Vec<Opaque>, usize) {
    let metadata = source.metadata();
    let values = metadata.values().map(|(name, value)| {
        (
            name,
            value.stored.as_ref().map_or(0, |stored| stored.length),
        )
    });
    let tensors = metadata.tensors().map(|(name, tensor)| {
        let stored = tensor
            .chunks
            .iter()
            .filter_map(|chunk| chunk.stored.as_ref());
        (
            name,
            stored.fold(0, |sum: u64, stored| sum.saturating_add(stored.length)),
        )
    });
    let [local, remote] = LOOKS;
    let is_local = Location::from(source.path()).local().is_some();
    let looks = if is_local { local } else { remote };
    let opaque = values
        .chain(tensors)
        .take(looks)
        .filter_map(|(name, bytes)| {
            // A value whose type cannot be read is damaged: `verify` tells of it, and the rest is
            // shown here.
            let of = source.opaque_type(name).ok()??;
            Some(Opaque {
                name: name.to_owned(),
                of,
                bytes,
            })
        });
    let mut opaque: Vec<Opaque> = opaque.collect();
    opaque.sort_by(|a, b| natural::compare(&a.name, &b.name));
    (opaque, metadata.entries.len().saturating_sub(looks))
}

/// Returns the step at which a checkpoint was saved. One that is damaged does not keep the rest
/// from being shown: `verify` is for damage.
fn step(source: &dyn Checkpoint) -> Option<i64> {
    let entries = &source.metadata().entries;
    STEPS.iter().find_map(|key| match entries.get(*key)? {
        Entry::Bytes(bytes)
            if bytes
                .stored
                .as_ref()
                .is_some_and(|stored| stored.length > STEP_BYTES) =>
        {
            None
        }
        Entry::Bytes(_) => source.read_value(key).ok()?.as_int(),
        Entry::Tensor(_) => None,
    })
}

const fn yes_or_no(yes: bool) -> &'static str {
    if yes { "yes" } else { "no" }
}

impl Tensor {
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

    fn leaf(&self) -> String {
        format!("{} {:?}", self.dtype, self.shape)
    }

    /// Returns the lines of `--tensors`, for scripts.
    fn fields(&self) -> String {
        format!(
            "{}\t{}\t{:?}\t{}",
            escaped(&self.name),
            self.dtype,
            self.shape,
            self.bytes
        )
    }

    /// Lists the number of boxes by rank: `0:1 1:2` is one box of rank 0 and two of rank 1.
    fn boxes_by_rank(&self) -> String {
        let mut ranks: BTreeMap<u64, usize> = BTreeMap::new();
        for rank in self.boxes.iter().filter_map(|part| part.rank) {
            *ranks.entry(rank).or_default() += 1;
        }
        let told: usize = ranks.values().sum();
        if ranks.is_empty() {
            return self.boxes.len().to_string();
        }
        if told < self.boxes.len() || ranks.len() > RANKS_IN_A_LINE {
            return format!("{} on {} ranks", self.boxes.len(), ranks.len());
        }
        ranks
            .iter()
            .map(|(rank, boxes)| format!("{rank}:{boxes}"))
            .collect::<Vec<_>>()
            .join(" ")
    }
}

/// Returns the tensors of a checkpoint, numbers in their names in the order of numbers (`h.2`
/// before `h.10`).
fn tensors(metadata: &Metadata) -> Vec<Tensor> {
    let mut tensors: Vec<Tensor> = metadata
        .tensors()
        .map(|(name, entry)| tensor(name, entry))
        .collect();
    tensors.sort_by(|a, b| natural::compare(&a.name, &b.name));
    tensors
}

/// Returns the number of bytes of a tensor's elements.
pub(super) fn bytes(entry: &TensorEntry) -> u64 {
    let numel = entry
        .shape
        .iter()
        .fold(1u64, |numel, &size| numel.saturating_mul(size as u64));
    numel.saturating_mul(entry.properties.dtype.size_in_bytes())
}

/// Describes a tensor and its boxes.
fn tensor(name: &str, entry: &TensorEntry) -> Tensor {
    Tensor {
        name: name.to_owned(),
        dtype: entry.properties.dtype.to_string(),
        shape: entry.shape.clone(),
        bytes: bytes(entry),
        boxes: entry.chunks.iter().map(box_of).collect(),
    }
}

/// Describes a box and the place of its bytes.
fn box_of(Chunk { bounds, stored }: &Chunk) -> StoredBox {
    let stored = stored.as_ref();
    StoredBox {
        offsets: bounds.offsets.clone(),
        sizes: bounds.sizes.clone(),
        rank: stored.and_then(rank),
        file: stored.map(|stored| stored.relative_path.clone()),
        offset: stored.map(|stored| stored.offset),
        length: stored.map(|stored| stored.length),
    }
}

/// Returns the rank that wrote a file, or that it is for, from the file's name: 2 for
/// `__2_0.distcp`, for `model_world_size_4_rank_2.pt` and for `model-rank-2-part-0.safetensors`.
pub(super) fn rank(stored: &StorageInfo) -> Option<u64> {
    let name = &stored.relative_path;
    let rest = match name
        .strip_prefix("__")
        .or_else(|| name.strip_prefix("model-rank-"))
    {
        Some(rest) => rest,
        None => name.split_once("_rank")?.1.trim_start_matches('_'),
    };
    rest.split(['_', '.', '-']).next()?.parse().ok()
}
