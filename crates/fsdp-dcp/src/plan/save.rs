//! Who writes what: the global save plan.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;

use fsdp_layout::{DType, KeyPath, TensorBox};
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::validate::{ChunkError, validate_cover};
use crate::dcp::metadata::{BytesEntry, Chunk, Entry, Metadata, TensorEntry, TensorProperties, VERSION};

/// What one rank could write: its items, in the order of its state dict.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LocalPlan {
    /// The items. No flat key stands twice.
    pub items: Vec<WriteItem>,
}

/// One flat key of a rank's state dict.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WriteItem {
    /// The flat key.
    pub fqn: String,
    /// Where it sits in the nested state dict, if that was flattened.
    pub path: Option<KeyPath>,
    /// What it is.
    pub content: WriteContent,
}

/// What a [`WriteItem`] is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum WriteContent {
    /// The boxes of a tensor that this rank holds; for a replicated tensor, the whole of it, on every rank.
    Tensor {
        /// Element type and what else torch notes.
        properties: TensorProperties,
        /// Global shape.
        shape: Vec<usize>,
        /// The boxes; empty ones are dropped.
        boxes: Vec<TensorBox>,
    },
    /// A non-tensor value; every rank that has it offers it.
    Value {
        /// Bytes of its item, for balancing ([`crate::torch::value::value_item_length`]).
        length: u64,
    },
}

impl LocalPlan {
    /// Adds a tensor of which this rank holds these boxes.
    pub fn add_tensor(
        &mut self,
        fqn: impl Into<String>,
        path: Option<KeyPath>,
        dtype: DType,
        shape: Vec<usize>,
        boxes: Vec<TensorBox>,
    ) {
        let content = WriteContent::Tensor { properties: TensorProperties::of(dtype), shape, boxes };
        self.items.push(WriteItem { fqn: fqn.into(), path, content });
    }

    /// Adds a non-tensor value.
    pub fn add_value(&mut self, fqn: impl Into<String>, path: Option<KeyPath>, length: u64) {
        self.items.push(WriteItem { fqn: fqn.into(), path, content: WriteContent::Value { length } });
    }

    /// A hash of everything but the lengths of values: while all ranks' are unchanged, so is the global plan (balance
    /// apart), and it need not be made again.
    #[must_use]
    pub fn layout_hash(&self) -> u128 {
        let mut hasher = twox_hash::XxHash3_128::new();
        let mut put = |bytes: &[u8]| {
            hasher.write(&(bytes.len() as u64).to_le_bytes());
            hasher.write(bytes);
        };
        for item in &self.items {
            put(item.fqn.as_bytes());
            put(format!("{:?}", item.path).as_bytes());
            match &item.content {
                WriteContent::Value { .. } => put(b"value"),
                WriteContent::Tensor { properties, shape, boxes } => {
                    put(format!("{properties:?}").as_bytes());
                    let sizes = |of: &[usize]| of.iter().flat_map(|n| (*n as u64).to_le_bytes()).collect::<Vec<u8>>();
                    put(&sizes(shape));
                    for bounds in boxes {
                        put(&sizes(&bounds.offsets));
                        put(&sizes(&bounds.sizes));
                    }
                }
            }
        }
        hasher.finish_128()
    }
}

/// The part of its own [`LocalPlan`] that a rank must write: `(item, box)` by position, ascending. A value's box is 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Selection {
    /// The positions.
    pub kept: Vec<(u32, u32)>,
}

/// Which of several ranks that hold the same chunk writes it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Deduplicate {
    /// The one with the fewest bytes so far.
    #[default]
    Balanced,
    /// The lowest (torch's `dedup_save_to_lowest_rank`).
    LowestRank,
}

/// How to plan a save.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanOptions {
    /// Who writes what several ranks hold.
    pub deduplicate: Deduplicate,
}

/// The plan of a save: the metadata (without storage yet), and what each rank writes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GlobalPlan {
    /// What the checkpoint will hold. Chunks are in the order of their offsets.
    pub metadata: Metadata,
    /// By rank.
    pub selections: Vec<Selection>,
    /// Payload bytes that each rank writes.
    pub loads: Vec<u64>,
}

/// Why ranks' items do not make one checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SavePlanError {
    /// One rank has a flat key twice.
    #[error("rank {rank} has the key `{fqn}` twice")]
    DuplicateKey {
        /// The key.
        fqn: String,
        /// The rank.
        rank: usize,
    },
    /// Two ranks mean different things by one key.
    #[error("`{fqn}` has {what} {first} on rank {first_rank}, but {second} on rank {second_rank}")]
    Disagreement {
        /// The key.
        fqn: String,
        /// What differs: dtype, shape, kind or path.
        what: &'static str,
        /// The rank that was asked first.
        first_rank: usize,
        /// What it has.
        first: String,
        /// The rank that differs.
        second_rank: usize,
        /// What that one has.
        second: String,
    },
    /// The chunks of all ranks do not make up the tensor.
    #[error("the chunks of `{fqn}` on ranks {ranks:?} do not make up the tensor")]
    Chunks {
        /// The key.
        fqn: String,
        /// The ranks that hold chunks of it (at most the first eight).
        ranks: Vec<usize>,
        /// What is wrong with them.
        #[source]
        source: Box<ChunkError>,
    },
}

/// One place where a chunk (or value) could be written from.
#[derive(Clone, Copy)]
struct Candidate {
    rank: u32,
    item: u32,
    index: u32,
}

/// All ranks' items of one flat key.
struct Group<'p> {
    first_rank: usize,
    first: &'p WriteItem,
    last_rank: usize,
    candidates: Vec<(Option<&'p TensorBox>, Candidate)>,
}

/// A chunk that several ranks hold, to be given to one of them.
struct Shared {
    bytes: u64,
    candidates: Vec<Candidate>,
}

/// Makes one plan of all ranks' local ones (by rank).
///
/// Every chunk is written once. Duplicates (equal boxes of one key) go, the largest first, to the rank with the fewest
/// payload bytes, so that no rank writes more than 1.1 times the mean, or the mean and the largest chunk, wherever every
/// rank holds every duplicate. Equal plans give equal results.
pub fn plan_save(plans: &[LocalPlan], options: PlanOptions) -> Result<GlobalPlan, SavePlanError> {
    let groups = group(plans)?;
    let mut loads = vec![0u64; plans.len()];
    let mut kept: Vec<Vec<(u32, u32)>> = plans.iter().map(|plan| Vec::with_capacity(plan.items.len())).collect();
    let mut shared: Vec<Shared> = Vec::new();
    let mut entries = IndexMap::with_capacity(groups.len());
    let mut paths = IndexMap::new();

    let mut offer = |bytes: u64, candidates: &[(Option<&TensorBox>, Candidate)], kept: &mut Vec<Vec<(u32, u32)>>| {
        match candidates {
            [(_, only)] => {
                loads[only.rank as usize] += bytes;
                kept[only.rank as usize].push((only.item, only.index));
            }
            _ => shared.push(Shared { bytes, candidates: candidates.iter().map(|(_, at)| *at).collect() }),
        }
    };
    for (fqn, group) in groups {
        if let Some(path) = &group.first.path {
            paths.insert(fqn.to_owned(), path.clone());
        }
        let entry = match &group.first.content {
            WriteContent::Value { length } => {
                offer(*length, &group.candidates, &mut kept);
                Entry::Bytes(BytesEntry::default())
            }
            WriteContent::Tensor { properties, shape, .. } => {
                let mut candidates = group.candidates;
                // Stable, so that equal boxes stay in the order of their ranks.
                candidates.sort_by_key(|(bounds, _)| *bounds);
                let mut chunks = Vec::new();
                for equal in candidates.chunk_by(|(a, _), (b, _)| a == b) {
                    let Some((Some(bounds), _)) = equal.first() else { continue };
                    let numel = bounds.sizes.iter().fold(1u64, |n, &size| n.saturating_mul(size as u64));
                    offer(numel.saturating_mul(properties.dtype.size_in_bytes()), equal, &mut kept);
                    chunks.push(Chunk { bounds: (*bounds).clone(), stored: None });
                }
                validate_cover(shape, chunks.iter().map(|chunk| &chunk.bounds)).map_err(|source| {
                    let mut ranks: Vec<usize> = candidates.iter().map(|(_, at)| at.rank as usize).collect();
                    ranks.sort_unstable();
                    ranks.dedup();
                    ranks.truncate(8);
                    SavePlanError::Chunks { fqn: fqn.to_owned(), ranks, source: Box::new(source) }
                })?;
                Entry::Tensor(TensorEntry { properties: properties.clone(), shape: shape.clone(), chunks })
            }
        };
        entries.insert(fqn.to_owned(), entry);
    }

    // Stable: among equals, the one that appeared first goes first.
    shared.sort_by_key(|chunk| std::cmp::Reverse(chunk.bytes));
    for Shared { bytes, candidates } in shared {
        let chosen = match options.deduplicate {
            Deduplicate::LowestRank => candidates.iter().min_by_key(|at| at.rank),
            Deduplicate::Balanced => candidates.iter().min_by_key(|at| (loads[at.rank as usize], at.rank)),
        };
        if let Some(at) = chosen {
            loads[at.rank as usize] += bytes;
            kept[at.rank as usize].push((at.item, at.index));
        }
    }
    let selections = kept.into_iter().map(|mut kept| {
        kept.sort_unstable();
        Selection { kept }
    });
    let metadata =
        Metadata { entries, planner_data: Some(paths), version: Some(VERSION.to_owned()), ..Metadata::default() };
    Ok(GlobalPlan { metadata, selections: selections.collect(), loads })
}

/// Collects the items of each key, in the order of first appearance, and checks that the ranks agree on what it is.
fn group(plans: &[LocalPlan]) -> Result<Vec<(&str, Group<'_>)>, SavePlanError> {
    let mut positions: HashMap<&str, usize> = HashMap::new();
    let mut groups: Vec<(&str, Group<'_>)> = Vec::new();
    for (rank, plan) in plans.iter().enumerate() {
        for (item_index, item) in plan.items.iter().enumerate() {
            let position = match positions.entry(&item.fqn) {
                Slot::Occupied(there) => {
                    let group = &groups[*there.get()].1;
                    if group.last_rank == rank {
                        return Err(SavePlanError::DuplicateKey { fqn: item.fqn.clone(), rank });
                    }
                    check_agreement(group, rank, item)?;
                    *there.get()
                }
                Slot::Vacant(slot) => {
                    groups.push((
                        &item.fqn,
                        Group { first_rank: rank, first: item, last_rank: rank, candidates: Vec::new() },
                    ));
                    *slot.insert(groups.len() - 1)
                }
            };
            let group = &mut groups[position].1;
            group.last_rank = rank;
            let at = |index: usize| Candidate { rank: rank as u32, item: item_index as u32, index: index as u32 };
            match &item.content {
                WriteContent::Value { .. } => group.candidates.push((None, at(0))),
                WriteContent::Tensor { boxes, .. } => {
                    let boxes = boxes.iter().enumerate().filter(|(_, bounds)| !bounds.is_empty());
                    group.candidates.extend(boxes.map(|(index, bounds)| (Some(bounds), at(index))));
                }
            }
        }
    }
    Ok(groups)
}

fn check_agreement(group: &Group<'_>, rank: usize, item: &WriteItem) -> Result<(), SavePlanError> {
    let differs = |what, first: String, second: String| SavePlanError::Disagreement {
        fqn: item.fqn.clone(),
        what,
        first_rank: group.first_rank,
        first,
        second_rank: rank,
        second,
    };
    match (&group.first.content, &item.content) {
        (WriteContent::Value { .. }, WriteContent::Value { .. }) => {}
        (
            WriteContent::Tensor { properties: a, shape: shape_a, .. },
            WriteContent::Tensor { properties: b, shape: shape_b, .. },
        ) => {
            if a.dtype != b.dtype {
                return Err(differs("dtype", a.dtype.to_string(), b.dtype.to_string()));
            }
            if shape_a != shape_b {
                return Err(differs("shape", format!("{shape_a:?}"), format!("{shape_b:?}")));
            }
        }
        (WriteContent::Tensor { .. }, _) => return Err(differs("kind", "tensor".into(), "value".into())),
        (WriteContent::Value { .. }, _) => return Err(differs("kind", "value".into(), "tensor".into())),
    }
    if group.first.path != item.path {
        return Err(differs("path", format!("{:?}", group.first.path), format!("{:?}", item.path)));
    }
    Ok(())
}
