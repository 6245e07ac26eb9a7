//! `fsdp inspect`: what a checkpoint holds, from its metadata alone (and its step, if it has one).

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use fsdp::dcp::CheckpointError;
use fsdp::dcp::metadata::{Chunk, Entry, Metadata, StorageInfo, TensorEntry};
use fsdp::dcp::reader::CheckpointReader;
use serde::Serialize;

use super::output;

/// Options of `fsdp inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArguments {
    /// A checkpoint directory
    #[arg(value_name = "CKPT")]
    path: PathBuf,
    /// One JSON object on stdout, with every box
    #[arg(long, env = "FSDP_JSON")]
    json: bool,
}

/// The version of the JSON's schema.
const SCHEMA: u32 = 1;

/// Boxes of a tensor are told rank by rank up to this many ranks.
const RANKS_IN_A_LINE: usize = 8;

#[derive(Debug, Serialize)]
struct Summary {
    schema: u32,
    path: String,
    format: &'static str,
    committed: bool,
    /// Why not, if it is not.
    reason: Option<String>,
    /// `train.step`, where there is one.
    step: Option<i64>,
    /// Whether hashes of its files lie beside it.
    hashed: bool,
    /// Bytes of all tensors' elements.
    bytes: u64,
    tensors: Vec<Tensor>,
    /// Keys of what is no tensor.
    values: Vec<String>,
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
    /// The rank that wrote it, by its file's name.
    rank: Option<u64>,
    file: Option<String>,
    offset: Option<u64>,
    length: Option<u64>,
}

/// # Errors
/// There is no committed checkpoint, or its metadata is damaged.
pub(crate) fn run(arguments: &InspectArguments) -> Result<()> {
    let reader = CheckpointReader::open(&arguments.path);
    if arguments.json {
        let path = arguments.path.display().to_string();
        if let Err(error @ CheckpointError::NotCommitted { .. }) = &reader {
            output::json(&Summary::uncommitted(path.clone(), error.to_string()))?;
        }
        return output::json(&Summary::new(path, &reader?));
    }
    let summary = Summary::new(arguments.path.display().to_string(), &reader?);
    summary.lines().iter().try_for_each(|line| output::data(line))
}

impl Summary {
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
        }
    }

    fn new(path: String, reader: &CheckpointReader) -> Self {
        let metadata = reader.metadata();
        let tensors = tensors(metadata);
        let mut values: Vec<String> = metadata.values().map(|(name, _)| name.to_owned()).collect();
        values.sort_by(|a, b| natord::compare(a, b));
        let step = matches!(metadata.entries.get("train.step"), Some(Entry::Bytes(_)));
        // A damaged step does not keep the rest from being shown: `verify` is for damage.
        let step = step.then(|| reader.read_value("train.step").ok()?.as_int()).flatten();
        Summary {
            schema: SCHEMA,
            path,
            format: "dcp",
            committed: true,
            reason: None,
            step,
            hashed: reader.is_sealed(),
            bytes: tensors.iter().map(|tensor| tensor.bytes).sum(),
            tensors,
            values,
        }
    }

    fn lines(&self) -> Vec<String> {
        let yes = |yes| if yes { "yes" } else { "no" };
        let boxes: usize = self.tensors.iter().map(|tensor| tensor.boxes.len()).sum();
        let mut lines = vec![
            format!("checkpoint  {} ({})", self.path, self.format),
            format!("committed   {}, hashes {}", yes(self.committed), yes(self.hashed)),
            format!("step        {}", self.step.map_or_else(|| "unknown".to_owned(), |step| step.to_string())),
            format!("tensors     {} in {boxes} boxes, {}", self.tensors.len(), iec(self.bytes)),
            format!("values      {}", self.values.len()),
            String::new(),
        ];
        let rows: Vec<[String; 5]> = std::iter::once(["tensor", "dtype", "shape", "bytes", "boxes by rank"])
            .map(|header| header.map(str::to_owned))
            .chain(self.tensors.iter().map(Tensor::row))
            .collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths = [0, 1, 2, 3].map(width);
        for [name, dtype, shape, bytes, boxes] in &rows {
            let [w0, w1, w2, w3] = widths;
            lines.push(format!("{name:w0$}  {dtype:w1$}  {shape:w2$}  {bytes:>w3$}  {boxes}"));
        }
        lines
    }
}

impl Tensor {
    fn row(&self) -> [String; 5] {
        [
            self.name.clone(),
            self.dtype.clone(),
            format!("{:?}", self.shape),
            self.bytes.to_string(),
            self.boxes_by_rank(),
        ]
    }

    /// `0:1 1:2`: one box of rank 0, two of rank 1.
    fn boxes_by_rank(&self) -> String {
        let mut ranks: BTreeMap<u64, usize> = BTreeMap::new();
        for rank in self.boxes.iter().filter_map(|part| part.rank) {
            *ranks.entry(rank).or_default() += 1;
        }
        let told: usize = ranks.values().sum();
        if told < self.boxes.len() || ranks.len() > RANKS_IN_A_LINE {
            return format!("{} on {} ranks", self.boxes.len(), ranks.len());
        }
        ranks.iter().map(|(rank, boxes)| format!("{rank}:{boxes}")).collect::<Vec<_>>().join(" ")
    }
}

fn tensors(metadata: &Metadata) -> Vec<Tensor> {
    let mut tensors: Vec<Tensor> = metadata.tensors().map(|(name, entry)| tensor(name, entry)).collect();
    tensors.sort_by(|a, b| natord::compare(&a.name, &b.name));
    tensors
}

fn tensor(name: &str, entry: &TensorEntry) -> Tensor {
    let dtype = entry.properties.dtype;
    let numel = entry.shape.iter().fold(1u64, |numel, &size| numel.saturating_mul(size as u64));
    Tensor {
        name: name.to_owned(),
        dtype: dtype.to_string(),
        shape: entry.shape.clone(),
        bytes: numel.saturating_mul(dtype.size_in_bytes()),
        boxes: entry.chunks.iter().map(box_of).collect(),
    }
}

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

/// `__2_0.distcp` is a file of rank 2.
fn rank(stored: &StorageInfo) -> Option<u64> {
    stored.relative_path.strip_prefix("__")?.split('_').next()?.parse().ok()
}

/// Bytes for people.
fn iec(bytes: u64) -> String {
    let units = [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match units.into_iter().find(|&(_, unit)| bytes >= unit) {
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} B"),
    }
}
