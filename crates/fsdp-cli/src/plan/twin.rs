//! Simulates a save of many ranks in one process, with the layouts, the planner and the metadata of
//! real saves.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;
use fsdp_formats::metadata::encode_in_pieces;
use fsdp_formats::plan::{Deduplicate, LocalPlan, Offer, WriteContent, plan_offers};
use fsdp_formats::writer::predict_file_lengths;
use fsdp_layout::flat::aligned_numel;
use fsdp_layout::shard::chunk_range;
use fsdp_layout::{FlatLayout, TensorBox};
use serde::Serialize;

use super::state::{JobState, Unit};
use crate::failure::usage_error;

/// The largest number of boxes in a plan. They take about 20 GiB of memory.
const MAX_BOXES: usize = 100_000_000;

/// The way in which tensors are cut.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum Layout {
    /// Each unit flattened, and cut in equal pieces, as FSDP1 does
    Flat,
    /// Each tensor cut along its rows, as FSDP2 does
    Rows,
}

/// The ranks of a job and how they hold its state.
#[derive(Debug, Clone, Copy)]
pub(super) struct JobShape {
    pub(super) ranks: usize,
    /// The number of ranks that hold the same shard.
    pub(super) replicas: usize,
    pub(super) ranks_per_host: usize,
    pub(super) layout: Layout,
}

/// The smallest and the largest value over all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct LeastMost {
    pub(super) least: u64,
    pub(super) most: u64,
}

/// The checkpoint that the ranks would write.
#[derive(Debug)]
pub(super) struct PlannedCheckpoint {
    /// The boxes in the metadata.
    pub(super) box_count: u64,
    /// The boxes and values that each rank writes.
    pub(super) items_of_rank: LeastMost,
    /// The bytes of tensors and values that each rank writes.
    pub(super) payload_bytes: LeastMost,
    /// The length of each rank's file; 0 for none.
    pub(super) file_lengths: Vec<u64>,
    /// The bytes that each rank holds and loads.
    pub(super) held_bytes: Vec<u64>,
    /// The length of `.metadata`.
    pub(super) metadata_bytes: u64,
    /// The bytes that ranks send to the planner.
    pub(super) received_bytes: u64,
    /// The time that the planner takes.
    pub(super) planning_time: Duration,
    /// The time that it takes to place all items and to encode `.metadata`.
    pub(super) encoding_time: Duration,
}

impl LeastMost {
    /// Returns the least and the most of some values.
    fn of_all(values: impl Iterator<Item = u64>) -> Self {
        values.fold(
            LeastMost {
                least: u64::MAX,
                most: 0,
            },
            |so_far, value| LeastMost {
                least: so_far.least.min(value),
                most: so_far.most.max(value),
            },
        )
    }
}

/// Plans a save of the state.
///
/// # Errors
/// Ranks that cannot be divided into equal replicas; a plan that is too large for this machine;
/// errors of the planner.
pub(super) fn plan(state: &JobState, shape: &JobShape) -> Result<PlannedCheckpoint> {
    let JobShape {
        ranks,
        replicas,
        layout,
        ..
    } = *shape;
    ensure!(
        ranks.is_multiple_of(replicas),
        usage_error(
            format!("{ranks} ranks cannot be divided into {replicas} equal replicas"),
            "each number of ranks must be a multiple of `--replicas`",
        )
    );
    // Replicas hold the same boxes, so the plan of one of them is that of all.
    let shards = ranks / replicas;
    let mut local_plan = LocalPlan::default();
    let mut units = ShardedUnit::add_all(state, shards, layout, &mut local_plan)?;
    for (key, dtype, shape) in &state.unsharded {
        local_plan.add_whole_tensor(&key.fqn, key.path.clone(), *dtype, shape.clone());
    }
    for (key, length) in &state.values {
        local_plan.add_value(&key.fqn, key.path.clone(), *length);
    }
    if !state.order.is_empty() {
        sort_items(&mut local_plan, &mut units, &state.order);
    }

    // Step 1: each shard's ranks offer its boxes. Replicas hold the same, so their boxes are made
    // and sent once, as in a save.
    let schema = local_plan.schema();
    let schema_bytes: u64 = schema.items.iter().map(|item| item.wire_bytes()).sum();
    // Tensors without dimensions are held by every rank, and written by one.
    let whole_bytes: u64 = state
        .unsharded
        .iter()
        .map(|(_, dtype, _)| dtype.size_in_bytes())
        .sum();
    let mut offers = Vec::with_capacity(shards);
    let mut held_bytes = Vec::with_capacity(shards);
    let mut box_count = 0;
    let mut received_bytes = schema_bytes;
    for shard in 0..shards {
        let bytes: u64 = units
            .iter()
            .map(|unit| unit.set_boxes(shard, shards, &mut local_plan))
            .sum();
        held_bytes.push(bytes + whole_bytes);
        let offer = Offer {
            schema: 0,
            boxes: local_plan.held_boxes(),
        };
        received_bytes += offer
            .boxes
            .iter()
            .map(|held| held.wire_bytes())
            .sum::<u64>();
        box_count += offer.boxes.len();
        // The check comes before the memory is taken: the boxes of the next shard may be as many.
        if box_count > MAX_BOXES {
            bail!(usage_error(
                format!("the plan would have more than {MAX_BOXES} boxes"),
                "plan fewer ranks, more `--replicas`, or `--layout flat`",
            ));
        }
        offers.push(offer);
    }
    let shard_of_rank: Vec<usize> = (0..ranks).map(|rank| rank % shards).collect();

    // Step 2: the planner decides who writes what, and checks that every element is written once.
    let planning_start = Instant::now();
    let mut global_plan = plan_offers(
        std::slice::from_ref(&schema),
        offers,
        &shard_of_rank,
        Deduplicate::default(),
    )?;
    let planning_time = planning_start.elapsed();

    // Step 3: the metadata gets the places that the items would have, and is encoded.
    let encoding_start = Instant::now();
    let lengths: HashMap<&str, u64> = state
        .values
        .iter()
        .map(|(key, length)| (key.fqn.as_str(), *length))
        .collect();
    let file_lengths = predict_file_lengths(&mut global_plan, |fqn| {
        *lengths
            .get(fqn)
            .expect("only values of the state are planned")
    })?;
    let mut metadata_bytes = 0;
    encode_in_pieces(&global_plan.metadata, &mut |piece| {
        metadata_bytes += piece.len() as u64
    });
    let encoding_time = encoding_start.elapsed();

    Ok(PlannedCheckpoint {
        box_count: global_plan
            .metadata
            .tensors()
            .map(|(_, tensor)| tensor.chunks.len() as u64)
            .sum(),
        items_of_rank: LeastMost::of_all(
            global_plan
                .selections
                .iter()
                .map(|selection| selection.kept.len() as u64),
        ),
        payload_bytes: LeastMost::of_all(global_plan.loads.iter().copied()),
        file_lengths,
        held_bytes: shard_of_rank
            .iter()
            .map(|&shard| held_bytes[shard])
            .collect(),
        metadata_bytes,
        received_bytes,
        planning_time,
        encoding_time,
    })
}

/// A unit, with the items of the local plan that are its tensors.
struct ShardedUnit<'s> {
    unit: &'s Unit,
    /// The unit as a FlatParameter; none if tensors are cut by rows.
    flat: Option<FlatLayout>,
    /// The items of each kind, one for each parameter.
    item_positions: Vec<Vec<usize>>,
}

impl<'s> ShardedUnit<'s> {
    /// Adds the tensors of all units to the local plan, and returns the units with the numbers of
    /// these items. All parameters come first, then all first moments, and so on, as in state
    /// dicts.
    fn add_all(
        state: &'s JobState,
        shards: usize,
        layout: Layout,
        local_plan: &mut LocalPlan,
    ) -> Result<Vec<Self>> {
        let mut units = Vec::with_capacity(state.units.len());
        let mut kind_count = 0;
        for unit in &state.units {
            // FSDP1 shards the flattened unit, aligned for its dtype; FSDP2 cuts each tensor for
            // itself.
            let flat = match (layout, unit.kinds.first()) {
                (Layout::Flat, Some((dtype, _))) => Some(FlatLayout::new(
                    unit.parameters.clone(),
                    aligned_numel(*dtype),
                    shards,
                )?),
                _ => None,
            };
            let item_positions = Vec::new();
            units.push(ShardedUnit {
                unit,
                flat,
                item_positions,
            });
            kind_count = kind_count.max(unit.kinds.len());
        }
        for kind in 0..kind_count {
            for sharded in &mut units {
                let Some((dtype, keys)) = sharded.unit.kinds.get(kind) else {
                    continue;
                };
                let first_position = local_plan.items.len();
                sharded
                    .item_positions
                    .push((first_position..first_position + keys.len()).collect());
                for (key, (_, shape)) in keys.iter().zip(&sharded.unit.parameters) {
                    local_plan.add_tensor(
                        &key.fqn,
                        key.path.clone(),
                        *dtype,
                        shape.clone(),
                        Vec::new(),
                    );
                }
            }
        }
        Ok(units)
    }

    /// Sets the boxes in the local plan to those that the ranks of a shard hold, and returns their
    /// bytes.
    fn set_boxes(&self, shard: usize, shards: usize, local_plan: &mut LocalPlan) -> u64 {
        let mut bytes = 0;
        for (parameter, (_, shape)) in self.unit.parameters.iter().enumerate() {
            let held_boxes = match &self.flat {
                Some(flat) => flat.param_boxes(parameter, shard),
                None => row_boxes(shape, shard, shards),
            };
            // All kinds of state of a parameter are cut like the parameter itself.
            let element_count: u64 = held_boxes.iter().map(|bounds| bounds.numel() as u64).sum();
            for (positions, (dtype, _)) in self.item_positions.iter().zip(&self.unit.kinds) {
                bytes += element_count * dtype.size_in_bytes();
                match &mut local_plan.items[positions[parameter]].content {
                    WriteContent::Tensor { boxes, .. } => boxes.clone_from(&held_boxes),
                    _ => unreachable!("`add_all` has added these items as tensors"),
                }
            }
        }
        bytes
    }
}

/// Sorts the items of the local plan in the order of these keys.
fn sort_items(local_plan: &mut LocalPlan, units: &mut [ShardedUnit<'_>], order: &[String]) {
    let positions: HashMap<&str, usize> = order
        .iter()
        .enumerate()
        .map(|(position, fqn)| (fqn.as_str(), position))
        .collect();
    let mut items: Vec<_> = std::mem::take(&mut local_plan.items)
        .into_iter()
        .enumerate()
        .collect();
    // A checkpoint that another program has saved may have its keys in any order.
    items.sort_by_key(|(_, item)| positions.get(item.fqn.as_str()).copied());
    let mut new_positions = vec![0; items.len()];
    for (new_position, (old_position, item)) in items.into_iter().enumerate() {
        new_positions[old_position] = new_position;
        local_plan.items.push(item);
    }
    for position in units
        .iter_mut()
        .flat_map(|unit| unit.item_positions.iter_mut().flatten())
    {
        *position = new_positions[*position];
    }
}

/// Returns the rows of a tensor that the ranks of a shard hold, as a box; none if they hold no row.
fn row_boxes(shape: &[usize], shard: usize, shards: usize) -> Vec<TensorBox> {
    let mut bounds = TensorBox::whole(shape);
    if let Some(&dim) = shape.first() {
        let range = chunk_range(dim, shards, shard);
        (bounds.offsets[0], bounds.sizes[0]) = (range.start, range.len());
    }
    if bounds.is_empty() {
        Vec::new()
    } else {
        vec![bounds]
    }
}

#[cfg(test)]
mod tests;
