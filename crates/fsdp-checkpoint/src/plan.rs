//! The plan of a save, agreed on by all ranks and cached for the next save of the same layout.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use fsdp_comm::{CommError, ProcessGroup};
use fsdp_formats::FileError;
use fsdp_formats::metadata::Metadata;
use fsdp_formats::plan::{
    Deduplicate, GlobalPlan, HeldBox, LocalPlan, Offer, PlanOptions, PlanSchema, SchemaItem,
    SelectedItem, Selection, WriteContent, plan_offers,
};
use serde::{Deserialize, Serialize};

use crate::CheckpointError;
use crate::rounds::gather_in_rounds;

/// The rank that plans and commits.
pub(crate) const PLANNER: usize = 0;

/// The value of `CachedPlan::shared` that stands for a rank without a cached plan.
const NOTHING: u64 = 0;

/// The plan of the last save.
#[derive(Debug, Default)]
pub(crate) struct PlanCache {
    cached: Option<CachedPlan>,
}

/// The plan of a save, as one rank keeps it.
#[derive(Debug)]
pub(crate) struct CachedPlan {
    key: PlanKey,
    /// A hash of what the plan was made of on all ranks.
    shared: u64,
    /// The boxes and values that this rank writes.
    pub(crate) selection: Selection,
    /// The bytes of tensors that this rank writes.
    pub(crate) rank_bytes: u64,
    /// The bytes of tensors that all ranks write.
    pub(crate) total_bytes: u64,
    /// The metadata of the checkpoint; `None` on all ranks but the planner. Where the values lie in
    /// the files is not in it: each save adds that.
    pub(crate) metadata: Option<Metadata>,
}

/// The inputs of this rank's part of a plan. While they stay equal, so does the part.
#[derive(Debug, PartialEq)]
pub(crate) struct PlanKey {
    layout: u128,
    ranks: Vec<usize>,
    deduplicate: Deduplicate,
}

/// The part of a plan that the planner sends to a rank.
#[derive(Debug, Serialize, Deserialize)]
struct RankPlan {
    selection: Selection,
    total_bytes: u64,
}

/// The hashes of a rank's plan, which all ranks learn.
#[derive(Debug, Serialize, Deserialize)]
struct PlanHashes {
    layout: u128,
    schema: u128,
}

/// A piece of what a rank sends to the planner.
#[derive(Debug, Serialize, Deserialize)]
enum PlanPiece {
    /// The next item of the rank's schema; sent by the first rank that has this schema.
    Item(SchemaItem),
    /// A box that the rank holds.
    Box(HeldBox),
}

impl PlanKey {
    pub(crate) fn new(group: &ProcessGroup, layout: u128, deduplicate: Deduplicate) -> Self {
        PlanKey {
            layout,
            ranks: group.global_ranks().to_vec(),
            deduplicate,
        }
    }
}

impl PlanCache {
    /// Returns `true` if every rank can use its cached plan for what it holds now; the answer is
    /// the same on all ranks. Collective: one agreement, and an object all-gather if the ranks
    /// differ.
    ///
    /// `outcome` is an error if this rank could not list what it holds. The agreement makes it
    /// every rank's error.
    ///
    /// `values` are hashes of this rank's plain values. A checkpoint has one value for each key, so
    /// ranks that have the same key must have the same value.
    ///
    /// # Errors
    /// The error of any rank's `outcome`; ranks with different values for a key.
    pub(crate) fn is_planned<T>(
        &self,
        group: &ProcessGroup,
        key: &PlanKey,
        outcome: &Result<T, CheckpointError>,
        values: &[(String, u64)],
    ) -> Result<bool, CheckpointError> {
        // A plan for another layout is of no use.
        let known = self
            .cached
            .as_ref()
            .filter(|cached| cached.key == *key)
            .map_or(NOTHING, |cached| cached.shared);
        // Usually all ranks have the same plan and the same values. Then one round that compares a
        // hash is enough.
        let mut hasher = DefaultHasher::new();
        (known, values).hash(&mut hasher);
        match group.agree_on("save: plan", hasher.finish(), outcome.as_ref()) {
            // All ranks have the same plan, or none has one.
            Ok(_) => return Ok(known != NOTHING),
            // Some rank's layout has changed, or ranks have different keys or values: the next
            // round tells which.
            Err(CommError::SchemaMismatch { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let reported: Vec<(u64, Vec<(String, u64)>)> =
            group.all_gather_object(&(known, values.to_vec()))?;
        check_values(group, &reported)?;
        Ok(known != NOTHING && reported.iter().all(|(other, _)| *other == known))
    }

    /// Returns the plan for what the ranks hold now: the cached one if it `is_planned`, a new one
    /// otherwise. Collective for a new one.
    pub(crate) fn plan(
        &mut self,
        group: &ProcessGroup,
        key: PlanKey,
        local: &LocalPlan,
        is_planned: bool,
    ) -> Result<&CachedPlan, CheckpointError> {
        let cached = match self.cached.take() {
            Some(cached) if is_planned => cached,
            _ => plan_anew(group, local, key)?,
        };
        Ok(self.cached.insert(cached))
    }
}

/// Checks that ranks with the same key have the same plain value. `reported` has for each rank the
/// number of its cached plan, and the key and hash of each of its plain values.
fn check_values(
    group: &ProcessGroup,
    reported: &[(u64, Vec<(String, u64)>)],
) -> Result<(), CheckpointError> {
    let mut first: HashMap<&str, (usize, u64)> = HashMap::new();
    for (&rank, (_, values)) in group.global_ranks().iter().zip(reported) {
        for (key, hash) in values {
            let (reference, expected) = *first.entry(key).or_insert((rank, *hash));
            if expected != *hash {
                return Err(CheckpointError::DifferingValues {
                    key: key.clone(),
                    rank,
                    reference,
                });
            }
        }
    }
    Ok(())
}

/// Plans a save with all ranks. Collective: two object all-gathers, a gather for each round of
/// pieces, one agreement and one object scatter.
fn plan_anew(
    group: &ProcessGroup,
    local: &LocalPlan,
    key: PlanKey,
) -> Result<CachedPlan, CheckpointError> {
    // Step 1: all ranks learn which ranks have equal schemas (usually all) and which hold equal
    // boxes (usually replicas). Each schema and each list of boxes is then sent by one rank only.
    let hashes = group.all_gather_object(&PlanHashes {
        layout: key.layout,
        schema: local.schema_hash(),
    })?;
    // Step 2: the planner gets the schemas and the lists of boxes.
    let pieces = gather_in_rounds(
        group,
        pieces(local, &hashes, group.rank()),
        wire_bytes,
        PLANNER,
    )?;
    // Step 3: the planner makes the plan. If it fails, all ranks get its error.
    let planned = pieces
        .map(|pieces| plan_pieces(&hashes, pieces, key.deduplicate))
        .transpose();
    let planned = group.agree("save: plan", planned.map_err(FileError::from))?;
    // Step 4: each rank gets its own part of the plan. Only the planner keeps the metadata, which
    // it writes when it commits.
    let (mut parts, mut metadata) = (None, None);
    if let Some(GlobalPlan {
        metadata: made,
        selections,
        ..
    }) = planned
    {
        let total_bytes = tensor_bytes(&made);
        let selections = selections.into_iter();
        parts = Some(
            selections
                .map(|selection| RankPlan {
                    selection,
                    total_bytes,
                })
                .collect::<Vec<_>>(),
        );
        metadata = Some(made);
    }
    let RankPlan {
        selection,
        total_bytes,
    } = group.scatter_object(parts.as_deref(), PLANNER)?;
    // Step 5: every rank computes the same hash from all layouts. It tells the next save whether
    // all still have this plan.
    let mut hasher = DefaultHasher::new();
    hashes.iter().for_each(|rank| rank.layout.hash(&mut hasher));
    // `NOTHING` stands for no plan, so no plan may have it.
    let shared = hasher.finish().max(NOTHING + 1);
    let rank_bytes = selected_bytes(local, &selection);
    Ok(CachedPlan {
        key,
        shared,
        selection,
        rank_bytes,
        total_bytes,
        metadata,
    })
}

/// Cuts what a rank sends to the planner into pieces: its schema if no rank before it has the same,
/// and its boxes if no rank before it holds the same.
fn pieces(local: &LocalPlan, hashes: &[PlanHashes], rank: usize) -> Vec<PlanPiece> {
    let (before, own) = (&hashes[..rank], &hashes[rank]);
    let is_first_schema = before.iter().all(|other| other.schema != own.schema);
    let is_first_layout = before.iter().all(|other| other.layout != own.layout);
    let schema = if is_first_schema {
        local.schema()
    } else {
        PlanSchema::default()
    };
    let boxes = if is_first_layout {
        local.held_boxes()
    } else {
        Vec::new()
    };
    schema
        .items
        .into_iter()
        .map(PlanPiece::Item)
        .chain(boxes.into_iter().map(PlanPiece::Box))
        .collect()
}

/// Returns about how many bytes it takes to send a piece.
fn wire_bytes(piece: &PlanPiece) -> u64 {
    match piece {
        PlanPiece::Box(held) => held.wire_bytes(),
        PlanPiece::Item(item) => item.wire_bytes(),
    }
}

/// Makes the global plan from the pieces of all ranks. Of ranks with the same schema, or the same
/// layout, only the first has sent it; equal hashes tell which ranks those are.
fn plan_pieces(
    hashes: &[PlanHashes],
    pieces: Vec<Vec<PlanPiece>>,
    deduplicate: Deduplicate,
) -> Result<GlobalPlan, fsdp_formats::plan::SavePlanError> {
    let mut schemas: Vec<PlanSchema> = Vec::new();
    let mut known: HashMap<u128, usize> = HashMap::new();
    let mut offers: Vec<Offer> = Vec::new();
    let mut known_offers: HashMap<u128, usize> = HashMap::new();
    let mut of_ranks = Vec::with_capacity(hashes.len());
    for (rank, pieces) in hashes.iter().zip(pieces) {
        let mut items = Vec::new();
        let mut boxes = Vec::new();
        for piece in pieces {
            match piece {
                PlanPiece::Item(item) => items.push(item),
                PlanPiece::Box(held) => boxes.push(held),
            }
        }
        // Only the first rank with a schema has sent it. Ranks come in order here, so that rank is
        // also the first with an unknown hash.
        let schema = *known.entry(rank.schema).or_insert_with(|| {
            schemas.push(PlanSchema { items });
            schemas.len() - 1
        });
        // It is the same with the boxes of a layout. Ranks with the same layout have the same
        // schema.
        of_ranks.push(*known_offers.entry(rank.layout).or_insert_with(|| {
            offers.push(Offer { schema, boxes });
            offers.len() - 1
        }));
    }
    plan_offers(&schemas, offers, &of_ranks, PlanOptions { deduplicate })
}

/// Returns the bytes of all tensors of a checkpoint.
fn tensor_bytes(metadata: &Metadata) -> u64 {
    let chunks = metadata.tensors().flat_map(|(_, tensor)| {
        let element = tensor.properties.dtype.size_in_bytes();
        tensor
            .chunks
            .iter()
            .map(move |chunk| chunk.bounds.numel() as u64 * element)
    });
    chunks.sum()
}

/// Returns the number of bytes of tensors that a rank writes.
fn selected_bytes(plan: &LocalPlan, selection: &Selection) -> u64 {
    let bytes = selection
        .kept
        .iter()
        .map(
            |&SelectedItem { item, index, .. }| match &plan.items.get(item as usize)?.content {
                WriteContent::Tensor {
                    properties, boxes, ..
                } => Some(
                    boxes.get(index as usize)?.numel() as u64 * properties.dtype.size_in_bytes(),
                ),
                WriteContent::Value { .. } => None,
            },
        );
    bytes.flatten().sum()
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
