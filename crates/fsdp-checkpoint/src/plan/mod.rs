//! The plan of a save, agreed on by all ranks and cached for the next save of the same layout.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use fsdp_comm::{CommError, ProcessGroup};
use fsdp_digest::Digest;
use fsdp_formats::FileError;
use fsdp_formats::metadata::Metadata;
use fsdp_formats::plan::{
    Deduplicate, GlobalPlan, HeldBox, LocalPlan, Offer, Selection, WriteContent, WriteItem,
    plan_offers,
};
use fsdp_state::LoadError as _;
use serde::{Deserialize, Serialize};
use tracing::info_span;

use crate::error::CheckpointError;
use crate::local_state::LocalState;
use crate::rounds::{ROUND_BYTES, gather_in_rounds};

/// The rank that plans and commits.
pub(crate) const PLANNER: usize = 0;

/// The value of `CachedPlan::shared_hash` that stands for a rank without a cached plan.
const NO_PLAN: u64 = 0;

/// The plan of the last save.
#[derive(Debug, Default)]
pub(crate) struct PlanCache {
    cached: Option<CachedPlan>,
}

/// The plan of a save, as one rank keeps it.
#[derive(Debug)]
pub(crate) struct CachedPlan {
    /// The hash of this rank's layout, from which its part of the plan was made.
    layout_hash: u128,
    /// A hash of what the plan was made of on all ranks. Plans of the same hash are the same.
    pub(crate) shared_hash: u64,
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
    Item(WriteItem),
    /// A box that the rank holds.
    Box(HeldBox),
}

/// The plan of a save, and what this rank holds for it.
pub(crate) struct Planned<'p> {
    /// The boxes and values that this rank holds.
    pub(crate) local: LocalState,
    pub(crate) cached: &'p CachedPlan,
}

impl PlanCache {
    /// Plans which rank writes what, or takes the plan of the save before if no rank's layout has
    /// changed. The `group` and the rule to `deduplicate` are the same in all saves.
    ///
    /// Collectives: an agreement; if ranks differ, an object all-gather; for a new plan, two object
    /// all-gathers, a gather for each round of pieces, an agreement and an object scatter.
    ///
    /// # Errors
    /// The same on every rank: any rank's error in `local`, or while it plans; state that differs
    /// between ranks.
    pub(crate) fn plan(
        &mut self,
        group: &ProcessGroup,
        operation: &str,
        deduplicate: Deduplicate,
        local: Result<LocalState, CheckpointError>,
    ) -> Result<Planned<'_>, CheckpointError> {
        let _span = info_span!("plan", rank = group.rank()).entered();
        // A rank that cannot list its state takes part too. The agreement makes its error every
        // rank's, so that no rank waits for another one below.
        let (local, outcome) = match local {
            Ok(local) => (Some(local), Ok(())),
            Err(error) => (None, Err(error)),
        };
        let (layout_hash, value_digests) = local.as_ref().map_or_else(Default::default, |local| {
            (local.plan.layout_hash(), local.value_digests())
        });
        // A plan for another layout is of no use.
        let known_plan = match &self.cached {
            Some(cached) if cached.layout_hash == layout_hash => cached.shared_hash,
            _ => NO_PLAN,
        };
        let is_unchanged = all_have_plan(group, operation, known_plan, value_digests, outcome)?;
        let local = local.expect("a rank that could not list its state has returned its error");
        let cached = match self.cached.take() {
            Some(cached) if is_unchanged => cached,
            _ => plan_anew(group, &local.plan, layout_hash, deduplicate)?,
        };
        Ok(Planned {
            local,
            cached: self.cached.insert(cached),
        })
    }
}

/// Returns `true` if every rank has a plan for what it holds now, and all have the same one. The
/// answer is the same on all ranks. Collective: one agreement, and an object all-gather if the
/// ranks differ.
///
/// `known_plan` is the hash of this rank's plan, or [`NO_PLAN`]. `value_digests` are those of its
/// plain values: a checkpoint has one value for each key, so ranks that have the same key must have
/// the same value.
///
/// # Errors
/// Any rank's error in `outcome`; ranks with different values for a key.
fn all_have_plan(
    group: &ProcessGroup,
    operation: &str,
    known_plan: u64,
    value_digests: Vec<(String, Digest)>,
    outcome: Result<(), CheckpointError>,
) -> Result<bool, CheckpointError> {
    // Usually all ranks have the same plan and the same values. Then one round that compares a
    // hash is enough.
    let mut hasher = DefaultHasher::new();
    (known_plan, &value_digests).hash(&mut hasher);
    match CheckpointError::agree(group, operation, Some(hasher.finish()), outcome) {
        // All ranks have the same plan, or none has one.
        Ok(()) => return Ok(known_plan != NO_PLAN),
        // Some rank's layout has changed, or ranks have different keys or values: the next round
        // tells which.
        Err(CheckpointError::Comm(CommError::SchemaMismatch { .. })) => {}
        Err(error) => return Err(error),
    }
    let reported = group.all_gather_object(&(known_plan, value_digests))?;
    check_values(group, &reported)?;
    Ok(known_plan != NO_PLAN && reported.iter().all(|(plan, _)| *plan == known_plan))
}

/// Checks that ranks with the same key have the same plain value. `reported` has for each rank the
/// hash of its cached plan, and the key and digest of each of its plain values.
fn check_values(
    group: &ProcessGroup,
    reported: &[(u64, Vec<(String, Digest)>)],
) -> Result<(), CheckpointError> {
    let mut first_digests: HashMap<&str, (usize, Digest)> = HashMap::new();
    for (&rank, (_, value_digests)) in group.global_ranks().iter().zip(reported) {
        for (key, digest) in value_digests {
            let (reference, expected) = *first_digests.entry(key).or_insert((rank, *digest));
            if expected != *digest {
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
    layout: u128,
    deduplicate: Deduplicate,
) -> Result<CachedPlan, CheckpointError> {
    // Step 1: all ranks learn which ranks have equal schemas (usually all) and which hold equal
    // boxes (usually replicas). Each schema and each list of boxes is then sent by one rank only.
    let hashes = group.all_gather_object(&PlanHashes {
        layout,
        schema: local.schema_hash(),
    })?;
    // Step 2: the planner gets the schemas and the lists of boxes.
    let pieces = gather_in_rounds(
        ROUND_BYTES,
        group,
        pieces_to_send(local, &hashes, group.rank()),
        wire_bytes,
        PLANNER,
    )?;
    // Step 3: the planner makes the plan. If it fails, all ranks get its error.
    let outcome = pieces
        .map(|pieces| plan_pieces(&hashes, pieces, deduplicate))
        .transpose();
    let mut planned = group.agree("save: plan", outcome.map_err(FileError::from))?;
    // Step 4: each rank gets its own part of the plan. Only the planner keeps the metadata, which
    // it writes when it commits.
    let rank_plans = planned.as_mut().map(take_rank_plans);
    let RankPlan {
        selection,
        total_bytes,
    } = group.scatter_object(rank_plans.as_deref(), PLANNER)?;
    // Step 5: every rank computes the same hash from all layouts. It tells the next save whether
    // all still have this plan.
    let mut hasher = DefaultHasher::new();
    for rank_hashes in &hashes {
        rank_hashes.layout.hash(&mut hasher);
    }
    Ok(CachedPlan {
        layout_hash: layout,
        // `NO_PLAN` stands for no plan, so no plan may have it.
        shared_hash: hasher.finish().max(NO_PLAN + 1),
        rank_bytes: selected_bytes(local, &selection),
        selection,
        total_bytes,
        metadata: planned.map(|plan| plan.metadata),
    })
}

/// Takes the part of each rank out of a global plan, which has no selections then.
fn take_rank_plans(plan: &mut GlobalPlan) -> Vec<RankPlan> {
    let total_bytes = tensor_bytes(&plan.metadata);
    std::mem::take(&mut plan.selections)
        .into_iter()
        .map(|selection| RankPlan {
            selection,
            total_bytes,
        })
        .collect()
}

/// Returns what a rank sends to the planner, in pieces: its schema if no rank before it has the
/// same, and its boxes if no rank before it holds the same.
fn pieces_to_send(local: &LocalPlan, hashes: &[PlanHashes], rank: usize) -> Vec<PlanPiece> {
    let own_hashes = &hashes[rank];
    let earlier_ranks = &hashes[..rank];
    let mut pieces = Vec::new();
    if earlier_ranks
        .iter()
        .all(|earlier| earlier.schema != own_hashes.schema)
    {
        pieces.extend(local.schema().items.into_iter().map(PlanPiece::Item));
    }
    if earlier_ranks
        .iter()
        .all(|earlier| earlier.layout != own_hashes.layout)
    {
        pieces.extend(local.held_boxes().into_iter().map(PlanPiece::Box));
    }
    pieces
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
    let mut schemas: Vec<LocalPlan> = Vec::new();
    let mut schema_indices: HashMap<u128, usize> = HashMap::new();
    let mut offers: Vec<Offer> = Vec::new();
    let mut offer_indices: HashMap<u128, usize> = HashMap::new();
    let mut offer_of_rank = Vec::with_capacity(hashes.len());
    for (rank_hashes, pieces) in hashes.iter().zip(pieces) {
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
        let schema_index = *schema_indices.entry(rank_hashes.schema).or_insert_with(|| {
            schemas.push(LocalPlan { items });
            schemas.len() - 1
        });
        // It is the same with the boxes of a layout. Ranks with the same layout have the same
        // schema.
        offer_of_rank.push(*offer_indices.entry(rank_hashes.layout).or_insert_with(|| {
            offers.push(Offer {
                schema: schema_index,
                boxes,
            });
            offers.len() - 1
        }));
    }
    plan_offers(&schemas, offers, &offer_of_rank, deduplicate)
}

/// Returns the bytes of all tensors of a checkpoint.
fn tensor_bytes(metadata: &Metadata) -> u64 {
    let mut bytes = 0;
    for (_, tensor) in metadata.tensors() {
        let elements: usize = tensor.chunks.iter().map(|chunk| chunk.bounds.numel()).sum();
        bytes += elements as u64 * tensor.properties.dtype.size_in_bytes();
    }
    bytes
}

/// Returns the number of bytes of tensors that a rank writes.
fn selected_bytes(plan: &LocalPlan, selection: &Selection) -> u64 {
    let mut bytes = 0;
    for selected in &selection.kept {
        // A selection comes from another rank. One that does not fit the plan is an error when it
        // is written.
        if let Some(item) = plan.items.get(selected.item as usize)
            && let WriteContent::Tensor {
                properties, boxes, ..
            } = &item.content
            && let Some(bounds) = boxes.get(selected.index as usize)
        {
            bytes += bounds.numel() as u64 * properties.dtype.size_in_bytes();
        }
    }
    bytes
}

#[cfg(test)]
mod tests;
