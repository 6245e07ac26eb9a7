//! The global save plan: which rank writes which box.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;

use fsdp_layout::TensorBox;
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use super::error::SavePlanError;
use super::local::{HeldBox, LocalPlan, WriteContent, WriteItem};
use super::validate::{ChunkError, validate_chunks, validate_cover};
use crate::limits::MAX_KEY_BYTES;
use crate::metadata::{BytesEntry, Chunk, Entry, Metadata, TensorEntry, VERSION};

/// The part of its own [`LocalPlan`] that a rank must write.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Selection {
    /// The boxes and values, in the order of the plan.
    pub kept: Vec<SelectedItem>,
}

/// A box or a value that a rank must write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SelectedItem {
    /// Position of the item in the rank's plan.
    pub item: u32,
    /// Position of the box in the item; 0 for a value.
    pub index: u32,
    /// Position of the entry in the metadata.
    pub entry: u32,
    /// Position of the chunk in the entry; 0 for a value.
    pub chunk: u32,
}

/// The rule for which of several ranks that hold the same chunk writes it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Deduplicate {
    /// The one with the fewest bytes so far.
    #[default]
    Balanced,
    /// The lowest (torch's `dedup_save_to_lowest_rank`).
    LowestRank,
}

/// The options of planning a save.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanOptions {
    /// The rule for what several ranks hold.
    pub deduplicate: Deduplicate,
}

/// The plan of a save: the metadata (without storage yet), and what each rank writes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GlobalPlan {
    /// The content that the checkpoint will have. Chunks are in the order of their offsets.
    pub metadata: Metadata,
    /// The items that each rank must write, by rank.
    pub selections: Vec<Selection>,
    /// Payload bytes that each rank writes.
    pub loads: Vec<u64>,
}

/// The boxes that one rank, or several ranks that hold the same boxes, offer to a global plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Offer {
    /// Position of its schema among those of all ranks.
    pub schema: usize,
    /// The boxes that are not in the schema.
    pub boxes: Vec<HeldBox>,
}

/// Makes a global plan from the local plans of all ranks, which are given by rank.
///
/// Every chunk is written once. Chunks that several ranks hold (equal boxes of one key) are
/// assigned, the largest first, to the rank that has the fewest bytes to write. If every rank holds
/// every such chunk, no rank writes more bytes of tensors than 1.1 times the mean, or than the mean
/// plus the largest chunk. Equal local plans give equal results, and the lengths of values do not
/// influence them.
pub fn plan_save(plans: &[LocalPlan], options: PlanOptions) -> Result<GlobalPlan, SavePlanError> {
    let mut schemas = Vec::new();
    let mut known = HashMap::new();
    let offers: Vec<Offer> = plans
        .iter()
        .map(|plan| {
            let schema = *known.entry(plan.schema_hash()).or_insert_with(|| {
                schemas.push(plan.schema());
                schemas.len() - 1
            });
            Offer {
                schema,
                boxes: plan.held_boxes(),
            }
        })
        .collect();
    let of_ranks: Vec<usize> = (0..plans.len()).collect();
    plan_offers(&schemas, offers, &of_ranks, options)
}

/// Makes the same plan as [`plan_save`], from the distinct schemas of all ranks, and the distinct
/// offers of boxes that are not in them.
///
/// `of_ranks` has the position of each rank's offer, by rank. Ranks that hold the same boxes (the
/// replicas of a shard) share one offer, so that their boxes are stored once. The boxes are moved
/// into the plan's metadata, not copied.
pub fn plan_offers(
    schemas: &[LocalPlan],
    offers: Vec<Offer>,
    of_ranks: &[usize],
    options: PlanOptions,
) -> Result<GlobalPlan, SavePlanError> {
    plan_checked(schemas, offers, of_ranks, options, &|shape, boxes| {
        validate_cover(shape, boxes.iter().copied())
    })
}

/// Makes the plan of one rank that saves what it holds as a part of a checkpoint; other ranks save
/// the rest. This is [`plan_save`] for one rank, except that the boxes need not cover their
/// tensors.
pub fn plan_part(plan: &LocalPlan) -> Result<GlobalPlan, SavePlanError> {
    let offer = Offer {
        schema: 0,
        boxes: plan.held_boxes(),
    };
    plan_checked(
        &[plan.schema()],
        vec![offer],
        &[0],
        PlanOptions::default(),
        &|shape, boxes| validate_chunks(shape, boxes.iter().copied()).map(drop),
    )
}

/// A check of the boxes of a tensor of the given shape.
type CheckBoxes<'c> = &'c dyn Fn(&[usize], &[&TensorBox]) -> Result<(), ChunkError>;

/// Makes the plan of [`plan_offers`], with `check` applied to the boxes of each tensor.
fn plan_checked(
    schemas: &[LocalPlan],
    offers: Vec<Offer>,
    of_ranks: &[usize],
    options: PlanOptions,
    check: CheckBoxes<'_>,
) -> Result<GlobalPlan, SavePlanError> {
    let mut holders = Holders {
        of_schema: vec![Vec::new(); schemas.len()],
        of_offer: vec![Vec::new(); offers.len()],
    };
    for (rank, &offer) in of_ranks.iter().enumerate() {
        holders.of_offer[offer].push(rank as u32);
        holders.of_schema[offers[offer].schema].push(rank as u32);
    }
    let groups = group(schemas, offers, of_ranks)?;
    groups
        .iter()
        .try_for_each(|(fqn, _)| check_key_length(fqn))?;

    let mut assigned = Assignment {
        holders: &holders,
        weights: vec![0; of_ranks.len()],
        loads: vec![0; of_ranks.len()],
        kept: vec![Vec::new(); of_ranks.len()],
    };
    let mut shared: Vec<SharedChunk> = Vec::new();
    let mut entries = IndexMap::with_capacity(groups.len());
    let mut paths = IndexMap::new();
    for (position, (fqn, group)) in groups.into_iter().enumerate() {
        let entry = position as u32;
        if let Some(path) = &group.first.path {
            paths.insert(fqn.to_owned(), path.clone());
        }
        let content = match &group.first.content {
            WriteContent::Value { length } => {
                let holders = group.candidates.iter().map(|(_, holder)| *holder).collect();
                let value = SharedChunk {
                    weight: VALUE_BYTES,
                    bytes: *length,
                    entry,
                    chunk: 0,
                    holders,
                };
                shared.extend(assigned.assign_or_share(value));
                Entry::Bytes(BytesEntry::default())
            }
            WriteContent::Tensor {
                properties, shape, ..
            } => {
                let mut candidates = group.candidates;
                // Stable, so that equal boxes stay in the order of their ranks.
                candidates.sort_by(|(a, _), (b, _)| a.cmp(b));
                let all_holders: Vec<Holder> =
                    candidates.iter().map(|(_, holder)| *holder).collect();
                let mut candidates = candidates.into_iter().peekable();
                let mut chunks = Vec::with_capacity(candidates.len());
                while let Some((bounds, first)) = candidates.next() {
                    let Some(bounds) = bounds else { continue };
                    let mut holders = vec![first];
                    while let Some((_, equal)) =
                        candidates.next_if(|(next, _)| next.as_ref() == Some(&bounds))
                    {
                        holders.push(equal);
                    }
                    let numel = bounds
                        .sizes
                        .iter()
                        .fold(1u64, |n, &size| n.saturating_mul(size as u64));
                    let bytes = numel.saturating_mul(properties.dtype.size_in_bytes());
                    let chunk = chunks.len() as u32;
                    let tensor = SharedChunk {
                        weight: bytes,
                        bytes,
                        entry,
                        chunk,
                        holders,
                    };
                    shared.extend(assigned.assign_or_share(tensor));
                    chunks.push(Chunk {
                        bounds,
                        stored: None,
                    });
                }
                let boxes: Vec<&TensorBox> = chunks.iter().map(|chunk| &chunk.bounds).collect();
                check(shape, &boxes).map_err(|source| {
                    let ranks = holders.first_ranks(&all_holders);
                    SavePlanError::Chunks {
                        fqn: fqn.to_owned(),
                        ranks,
                        source: Box::new(source),
                    }
                })?;
                // Replicas share chunks, so there are fewer than candidates.
                chunks.shrink_to_fit();
                Entry::Tensor(TensorEntry {
                    properties: properties.clone(),
                    shape: shape.clone(),
                    chunks,
                })
            }
        };
        entries.insert(fqn.to_owned(), content);
    }

    // The largest first, so that the small ones level what is left. Stable: equals keep the order
    // of the keys.
    shared.sort_by_key(|chunk| std::cmp::Reverse(chunk.weight));
    for chunk in &shared {
        assigned.assign_shared(chunk, options.deduplicate);
    }
    let Assignment { loads, kept, .. } = assigned;
    let selections = kept.into_iter().map(|mut kept| {
        kept.sort_unstable();
        Selection { kept }
    });
    let metadata = Metadata {
        entries,
        planner_data: Some(paths),
        version: Some(VERSION.to_owned()),
        ..Metadata::default()
    };
    Ok(GlobalPlan {
        metadata,
        selections: selections.collect(),
        loads,
    })
}

/// A holder of a chunk or a value.
#[derive(Debug, Clone, Copy)]
enum Holder {
    /// Every rank with this offer, as a box of the offer.
    Offer { offer: u32, item: u32, index: u32 },
    /// Every rank with this schema, whole.
    Schema { schema: u32, item: u32 },
}

/// The ranks that each [`Holder`] stands for.
struct Holders {
    of_schema: Vec<Vec<u32>>,
    of_offer: Vec<Vec<u32>>,
}

impl Holders {
    /// Returns the ranks of a holder, in order.
    fn ranks(&self, holder: Holder) -> &[u32] {
        match holder {
            Holder::Offer { offer, .. } => &self.of_offer[offer as usize],
            Holder::Schema { schema, .. } => &self.of_schema[schema as usize],
        }
    }

    /// Returns the first eight of the ranks that these holders stand for.
    fn first_ranks(&self, holders: &[Holder]) -> Vec<usize> {
        let ranks = holders.iter().flat_map(|&holder| self.ranks(holder));
        let mut ranks: Vec<usize> = ranks.map(|&rank| rank as usize).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks.truncate(8);
        ranks
    }
}

/// All ranks' items of one flat key.
struct Group<'p> {
    first_rank: usize,
    first: &'p WriteItem,
    last_schema: usize,
    /// The boxes of a tensor, or `None` for a value, with those that hold them.
    candidates: Vec<(Option<TensorBox>, Holder)>,
}

/// The number of bytes that a value counts for when writes are balanced: about the size of a small
/// value.
///
/// The real length is not used, because it can change from save to save, for example when a step
/// count gets another digit. The plan must not change then, so that equal state always gives equal
/// files.
pub(super) const VALUE_BYTES: u64 = 64;

/// A chunk or a value, and all that hold it.
struct SharedChunk {
    /// The bytes that count in the balance.
    weight: u64,
    /// The bytes of the payload.
    bytes: u64,
    entry: u32,
    chunk: u32,
    holders: Vec<Holder>,
}

/// The boxes and values that each rank has been given to write.
struct Assignment<'a> {
    holders: &'a Holders,
    /// The weights of what each rank has been given.
    weights: Vec<u64>,
    /// The bytes of what each rank has been given.
    loads: Vec<u64>,
    kept: Vec<Vec<SelectedItem>>,
}

impl Assignment<'_> {
    /// Assigns a chunk to its only holder. Returns it if there are several holders.
    fn assign_or_share(&mut self, chunk: SharedChunk) -> Option<SharedChunk> {
        let is_single =
            matches!(chunk.holders[..], [holder] if self.holders.ranks(holder).len() == 1);
        if !is_single {
            return Some(chunk);
        }
        self.assign_shared(&chunk, Deduplicate::LowestRank);
        None
    }

    /// Assigns a chunk to one of its holders.
    fn assign_shared(&mut self, chunk: &SharedChunk, rule: Deduplicate) {
        let mut best: Option<((u64, u32), u32, u32)> = None;
        for &holder in &chunk.holders {
            let (item, index) = match holder {
                Holder::Offer { item, index, .. } => (item, index),
                Holder::Schema { item, .. } => (item, 0),
            };
            for &rank in self.holders.ranks(holder) {
                let load = match rule {
                    Deduplicate::Balanced => self.weights[rank as usize],
                    Deduplicate::LowestRank => 0,
                };
                if best.is_none_or(|(least, ..)| (load, rank) < least) {
                    best = Some(((load, rank), item, index));
                }
            }
        }
        if let Some(((_, rank), item, index)) = best {
            self.weights[rank as usize] += chunk.weight;
            self.loads[rank as usize] += chunk.bytes;
            let selected = SelectedItem {
                item,
                index,
                entry: chunk.entry,
                chunk: chunk.chunk,
            };
            self.kept[rank as usize].push(selected);
        }
    }
}

/// Collects the items of each key, in the order of first appearance by rank, and checks that the
/// ranks agree on them.
fn group<'p>(
    schemas: &'p [LocalPlan],
    mut offers: Vec<Offer>,
    of_ranks: &[usize],
) -> Result<Vec<(&'p str, Group<'p>)>, SavePlanError> {
    let mut positions: HashMap<&str, usize> = HashMap::new();
    let mut groups: Vec<(&str, Group<'_>)> = Vec::new();
    // The group of each item, for each schema that was met.
    let mut groups_of: Vec<Vec<usize>> = vec![Vec::new(); schemas.len()];
    for (rank, &position) in of_ranks.iter().enumerate() {
        let schema = offers[position].schema;
        let items = &schemas[schema].items;
        let is_new = groups_of[schema].len() != items.len();
        // Ranks with equal schemas agree with each other: only the first of them need be compared
        // with the others.
        for (index, item) in items.iter().enumerate().filter(|_| is_new) {
            let position = match positions.entry(&item.fqn) {
                Slot::Occupied(there) => {
                    let group = &groups[*there.get()].1;
                    if group.last_schema == schema {
                        return Err(SavePlanError::DuplicateKey {
                            fqn: item.fqn.clone(),
                            rank,
                        });
                    }
                    check_agreement(group, rank, item)?;
                    *there.get()
                }
                Slot::Vacant(slot) => {
                    let (first_rank, first, last_schema) = (rank, item, schema);
                    groups.push((
                        &item.fqn,
                        Group {
                            first_rank,
                            first,
                            last_schema,
                            candidates: Vec::new(),
                        },
                    ));
                    *slot.insert(groups.len() - 1)
                }
            };
            let group = &mut groups[position].1;
            group.last_schema = schema;
            let holder = Holder::Schema {
                schema: schema as u32,
                item: index as u32,
            };
            match &item.content {
                WriteContent::Value { .. } => group.candidates.push((None, holder)),
                // The schema implies the boxes of whole tensors. Make them explicit, to compare
                // them with others.
                WriteContent::Tensor {
                    shape,
                    is_whole: true,
                    ..
                } => {
                    let whole = Some(TensorBox::whole(shape)).filter(|bounds| !bounds.is_empty());
                    group
                        .candidates
                        .extend(whole.map(|bounds| (Some(bounds), holder)));
                }
                WriteContent::Tensor { .. } => {}
            }
            groups_of[schema].push(position);
        }
        // The boxes of a shared offer are taken once, with the first rank that has it. After that
        // the offer is empty.
        for held in std::mem::take(&mut offers[position].boxes) {
            let group = groups_of[schema].get(held.item as usize);
            let Some((_, group)) = group.and_then(|&group| groups.get_mut(group)) else {
                continue;
            };
            let holder = Holder::Offer {
                offer: position as u32,
                item: held.item,
                index: held.index,
            };
            group.candidates.push((Some(held.bounds), holder));
        }
    }
    Ok(groups)
}

/// Checks that readers will accept a key of this length.
pub fn check_key_length(fqn: &str) -> Result<(), SavePlanError> {
    /// The most characters of the key that the error shows.
    const SHOWN: usize = 80;
    if fqn.len() <= MAX_KEY_BYTES {
        return Ok(());
    }
    let start = fqn.chars().take(SHOWN).collect();
    Err(SavePlanError::LongKey {
        start,
        length: fqn.len(),
        limit: MAX_KEY_BYTES,
    })
}

/// Checks that a rank's item has the same kind, dtype and shape as that of the first rank with this
/// key.
fn check_agreement(group: &Group<'_>, rank: usize, item: &WriteItem) -> Result<(), SavePlanError> {
    let differs = |what, first: String, second: String| {
        let (first_rank, second_rank) = (group.first_rank, rank);
        Err(SavePlanError::Disagreement {
            fqn: item.fqn.clone(),
            what,
            first_rank,
            first,
            second_rank,
            second,
        })
    };
    match (&group.first.content, &item.content) {
        (WriteContent::Value { .. }, WriteContent::Value { .. }) => {}
        (
            WriteContent::Tensor {
                properties: a,
                shape: shape_a,
                ..
            },
            WriteContent::Tensor {
                properties: b,
                shape: shape_b,
                ..
            },
        ) => {
            if a.dtype != b.dtype {
                return differs("dtype", a.dtype.to_string(), b.dtype.to_string());
            }
            if shape_a != shape_b {
                return differs("shape", format!("{shape_a:?}"), format!("{shape_b:?}"));
            }
        }
        (WriteContent::Tensor { .. }, _) => {
            return differs("kind", "tensor".into(), "value".into());
        }
        (WriteContent::Value { .. }, _) => {
            return differs("kind", "value".into(), "tensor".into());
        }
    }
    if group.first.path != item.path {
        return differs(
            "path",
            format!("{:?}", group.first.path),
            format!("{:?}", item.path),
        );
    }
    Ok(())
}
