//! Who writes what, agreed on by all ranks and kept for the next save of the same layout.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use fsdp_comm::{CommError, ProcessGroup};
use fsdp_dcp::metadata::Metadata;
use fsdp_dcp::plan::{Deduplicate, LocalPlan, Selection, WriteContent, plan_save};
use serde::{Deserialize, Serialize};

use crate::CheckpointError;

/// The rank that plans and commits.
pub(crate) const PLANNER: usize = 0;

/// In the place of the hash of a plan that there is not.
const NOTHING: u64 = 0;

/// The plan of the last save.
#[derive(Debug, Default)]
pub(crate) struct PlanCache {
    kept: Option<Kept>,
}

/// A plan, as one rank keeps it.
#[derive(Debug)]
pub(crate) struct Kept {
    made_of: MadeOf,
    /// A hash of what the plan was made of on all ranks.
    shared: u64,
    /// What this rank writes.
    pub(crate) selection: Selection,
    /// Tensor bytes of it.
    pub(crate) rank_bytes: u64,
    /// Tensor bytes of all ranks.
    pub(crate) total_bytes: u64,
    /// On the planner.
    pub(crate) everyone: Option<Everyone>,
}

/// What this rank's part of a plan depends on.
#[derive(Debug, PartialEq)]
pub(crate) struct MadeOf {
    layout: u128,
    ranks: Vec<usize>,
    deduplicate: Deduplicate,
}

/// What only the planner keeps.
#[derive(Debug)]
pub(crate) struct Everyone {
    pub(crate) plans: Vec<LocalPlan>,
    /// Without the places in files, which come anew with each save.
    pub(crate) metadata: Metadata,
}

/// What the planner tells a rank.
#[derive(Debug, Serialize, Deserialize)]
struct Order {
    selection: Selection,
    total_bytes: u64,
    shared: u64,
}

impl MadeOf {
    pub(crate) fn new(group: &ProcessGroup, layout: u128, deduplicate: Deduplicate) -> Self {
        MadeOf { layout, ranks: group.global_ranks().to_vec(), deduplicate }
    }
}

impl PlanCache {
    /// Whether the plan that is kept is right on all ranks for what they hold now. Collective: one agreement, which
    /// carries the error of a rank that does not even know what it holds.
    pub(crate) fn is_planned<T>(
        &self,
        group: &ProcessGroup,
        made_of: &MadeOf,
        outcome: &Result<T, CheckpointError>,
    ) -> Result<bool, CheckpointError> {
        let known = self.kept.as_ref().filter(|kept| kept.made_of == *made_of).map_or(NOTHING, |kept| kept.shared);
        match group.agree_on("save: plan", known, outcome.as_ref()) {
            Ok(_) => Ok(known != NOTHING),
            // What one rank holds has changed.
            Err(CommError::SchemaMismatch { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// The plan for what the ranks hold now: the one that is kept if it `is_planned`. Collectives for a new one: a
    /// gather and a scatter of objects, and an agreement.
    pub(crate) fn plan(
        &mut self,
        group: &ProcessGroup,
        made_of: MadeOf,
        local: &LocalPlan,
        is_planned: bool,
    ) -> Result<&Kept, CheckpointError> {
        let kept = match self.kept.take() {
            Some(kept) if is_planned => kept,
            _ => plan_anew(group, local, made_of)?,
        };
        Ok(self.kept.insert(kept))
    }
}

fn plan_anew(group: &ProcessGroup, local: &LocalPlan, made_of: MadeOf) -> Result<Kept, CheckpointError> {
    let plans = group.gather_object(local, PLANNER)?;
    let options = fsdp_dcp::plan::PlanOptions { deduplicate: made_of.deduplicate };
    let planned = plans.as_ref().map(|plans| plan_save(plans, options)).transpose();
    let planned = group.agree("save: plan", planned.map_err(fsdp_dcp::FileError::from))?;
    let (mut orders, mut everyone) = (None, None);
    if let (Some(plans), Some(planned)) = (plans, planned) {
        let mut hasher = DefaultHasher::new();
        plans.iter().for_each(|plan| plan.layout_hash().hash(&mut hasher));
        let shared = hasher.finish().max(NOTHING + 1);
        let selected = plans.iter().zip(&planned.selections);
        let total_bytes = selected.map(|(plan, selection)| selected_bytes(plan, selection)).sum();
        let order = |selection| Order { selection, total_bytes, shared };
        orders = Some(planned.selections.into_iter().map(order).collect::<Vec<_>>());
        everyone = Some(Everyone { plans, metadata: planned.metadata });
    }
    let Order { selection, total_bytes, shared } = group.scatter_object(orders.as_deref(), PLANNER)?;
    let rank_bytes = selected_bytes(local, &selection);
    Ok(Kept { made_of, shared, selection, rank_bytes, total_bytes, everyone })
}

/// Tensor bytes that a rank writes.
fn selected_bytes(plan: &LocalPlan, selection: &Selection) -> u64 {
    let bytes = selection.kept.iter().map(|&(item, index)| match &plan.items.get(item as usize)?.content {
        WriteContent::Tensor { properties, boxes, .. } => {
            Some(boxes.get(index as usize)?.numel() as u64 * properties.dtype.size_in_bytes())
        }
        WriteContent::Value { .. } => None,
    });
    bytes.flatten().sum()
}
