//! The global save plan: which rank writes which box.

use std::collections::HashMap;

use fsdp_layout::TensorBox;
use fsdp_layout::boxes::saturating_bytes;
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use super::error::SavePlanError;
use super::local::{HeldBox, LocalPlan, WriteContent, WriteItem};
use super::validate::{validate_chunks, validate_cover};
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
    /// The one with the fewest bytes so far. Small tensors that ranks hold whole, such as the
    /// running statistics in a model's buffers, come from the lowest rank all the same: each rank
    /// may have its own, and those of two ranks do not go together.
    #[default]
    Balanced,
    /// The lowest (torch's `dedup_save_to_lowest_rank`).
    LowestRank,
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
/// assigned, the largest first, to the rank that has the fewest bytes to write, except for small
/// whole tensors ([`Deduplicate::Balanced`]). These aside, if every rank holds
/// every such chunk, no rank writes more bytes of tensors than 1.1 times the mean, or than the mean
/// plus the largest chunk. Equal local plans give equal results, and the lengths of values do not
/// influence them.
pub fn plan_save(
    plans: &[LocalPlan],
    deduplicate: Deduplicate,
) -> Result<GlobalPlan, SavePlanError> {
    let mut schemas = Vec::new();
    let mut schema_positions = HashMap::new();
    let offers: Vec<Offer> = plans
        .iter()
        .map(|plan| {
            let schema = *schema_positions
                .entry(plan.schema_hash())
                .or_insert_with(|| {
                    schemas.push(plan.schema());
                    schemas.len() - 1
                });
            Offer {
                schema,
                boxes: plan.held_boxes(),
            }
        })
        .collect();
    let offer_of_rank: Vec<usize> = (0..plans.len()).collect();
    plan_offers(&schemas, offers, &offer_of_rank, deduplicate)
}

/// Makes the same plan as [`plan_save`], from the distinct schemas of all ranks, and the distinct
/// offers of boxes that are not in them.
///
/// `offer_of_rank` has the position of each rank's offer, by rank. Ranks that hold the same boxes
/// (the replicas of a shard) share one offer, so that their boxes are stored once. The boxes are
/// moved into the plan's metadata, not copied.
pub fn plan_offers(
    schemas: &[LocalPlan],
    offers: Vec<Offer>,
    offer_of_rank: &[usize],
    deduplicate: Deduplicate,
) -> Result<GlobalPlan, SavePlanError> {
    plan_checked(schemas, offers, offer_of_rank, deduplicate, true)
}

/// Makes the plan of one rank that saves what it holds as a part of a checkpoint; other ranks save
/// the rest. This is [`plan_save`] for one rank, except that the boxes need not cover their
/// tensors.
pub fn plan_part(plan: &LocalPlan) -> Result<GlobalPlan, SavePlanError> {
    let offer = Offer {
        schema: 0,
        boxes: plan.held_boxes(),
    };
    let rule = Deduplicate::default();
    plan_checked(&[plan.schema()], vec![offer], &[0], rule, false)
}

/// Makes the plan of [`plan_offers`]. The boxes of each tensor must not overlap, and, if
/// `must_cover`, must hold all of it.
fn plan_checked(
    schemas: &[LocalPlan],
    offers: Vec<Offer>,
    offer_of_rank: &[usize],
    deduplicate: Deduplicate,
    must_cover: bool,
) -> Result<GlobalPlan, SavePlanError> {
    // Step 1: find out who holds what, and that all agree about it.
    let mut rank_lists = vec![Vec::new(); schemas.len() + offers.len()];
    for (rank, &offer) in offer_of_rank.iter().enumerate() {
        rank_lists[offers[offer].schema].push(rank as u32);
        rank_lists[schemas.len() + offer].push(rank as u32);
    }
    let groups = group_by_key(schemas, offers, offer_of_rank)?;
    // Readers would refuse such a key only after the checkpoint is written.
    for group in &groups {
        check_key_length(&group.first_item.fqn)?;
    }

    // Step 2: make the entry of each key, and assign what only one rank holds.
    let mut assignment = Assignment {
        rank_lists: &rank_lists,
        weights: vec![0; offer_of_rank.len()],
        loads: vec![0; offer_of_rank.len()],
        kept: vec![Vec::new(); offer_of_rank.len()],
        shared: Vec::new(),
    };
    let mut entries = IndexMap::with_capacity(groups.len());
    let mut paths = IndexMap::new();
    for (position, group) in groups.into_iter().enumerate() {
        let entry = position as u32;
        let WriteItem { fqn, path, content } = group.first_item;
        if let Some(path) = path {
            paths.insert(fqn.clone(), path.clone());
        }
        let all_holders: Vec<Holder> = group.candidates.iter().map(|(_, holder)| *holder).collect();
        let content = match content {
            WriteContent::Value { length } => {
                assignment.add(SharedChunk {
                    weight: VALUE_WEIGHT_BYTES,
                    bytes: *length,
                    entry,
                    chunk: 0,
                    holders: all_holders,
                });
                Entry::Bytes(BytesEntry::default())
            }
            WriteContent::Tensor {
                properties,
                shape,
                is_whole,
                ..
            } => {
                let boxes = distinct_boxes(group.candidates);
                let mut chunks = Vec::with_capacity(boxes.len());
                for (bounds, box_holders) in boxes {
                    let bytes = saturating_bytes(&bounds.sizes, properties.dtype);
                    let shared = SharedChunk {
                        weight: bytes,
                        bytes,
                        entry,
                        chunk: chunks.len() as u32,
                        holders: box_holders,
                    };
                    // Numbers, such as those of steps, are the same on all ranks.
                    if *is_whole && !shape.is_empty() && bytes <= SMALL_BYTES {
                        assignment.assign(&shared, Deduplicate::LowestRank);
                    } else {
                        assignment.add(shared);
                    }
                    chunks.push(Chunk {
                        bounds,
                        stored: None,
                    });
                }
                let bounds = chunks.iter().map(|chunk| &chunk.bounds);
                let outcome = if must_cover {
                    validate_cover(shape, bounds)
                } else {
                    validate_chunks(shape, bounds).map(drop)
                };
                outcome.map_err(|source| SavePlanError::Chunks {
                    fqn: fqn.clone(),
                    ranks: first_ranks(&rank_lists, &all_holders),
                    source: Box::new(source),
                })?;
                Entry::Tensor(TensorEntry {
                    properties: properties.clone(),
                    shape: shape.clone(),
                    chunks,
                })
            }
        };
        entries.insert(fqn.clone(), content);
    }
    let metadata = Metadata {
        entries,
        planner_data: Some(paths),
        version: Some(VERSION.to_owned()),
        ..Metadata::default()
    };
    // Step 3: with these loads known, assign what several ranks hold.
    Ok(assignment.finish(metadata, deduplicate))
}

/// Sorts the boxes of a tensor, and returns each of them once, with all that hold it.
fn distinct_boxes(
    mut candidates: Vec<(Option<TensorBox>, Holder)>,
) -> Vec<(TensorBox, Vec<Holder>)> {
    // Stable, so that equal boxes stay in the order of their ranks.
    candidates.sort_by(|(first, _), (second, _)| first.cmp(second));
    let mut boxes: Vec<(TensorBox, Vec<Holder>)> = Vec::new();
    for (bounds, holder) in candidates {
        let bounds = bounds.expect("what holds a tensor has a box of it");
        match boxes.last_mut() {
            Some((last_bounds, holders)) if *last_bounds == bounds => holders.push(holder),
            _ => boxes.push((bounds, vec![holder])),
        }
    }
    boxes
}

/// The ranks that hold a chunk or a value at the same place of their plans: every rank with the
/// same schema, if that implies the box, or every rank with the same offer.
#[derive(Debug, Clone, Copy)]
struct Holder {
    /// Position of the list of its ranks: there is one for each schema, then one for each offer.
    rank_list: u32,
    /// Position of the item in the plan of each of them.
    item: u32,
    /// Position of the box in the item; 0 for a whole tensor or a value.
    index: u32,
}

/// Returns the first eight of the ranks that these holders stand for.
fn first_ranks(rank_lists: &[Vec<u32>], holders: &[Holder]) -> Vec<usize> {
    let mut ranks: Vec<usize> = holders
        .iter()
        .flat_map(|holder| &rank_lists[holder.rank_list as usize])
        .map(|&rank| rank as usize)
        .collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks.truncate(8);
    ranks
}

/// All ranks' items of one flat key.
struct KeyGroup<'p> {
    first_rank: usize,
    /// The item of the first rank that has the key.
    first_item: &'p WriteItem,
    /// The last schema that was found to have the key.
    last_schema: Option<usize>,
    /// The boxes of a tensor, or `None` for a value, with those that hold them.
    candidates: Vec<(Option<TensorBox>, Holder)>,
}

/// The number of bytes that a value counts for when writes are balanced: about the size of a small
/// value.
///
/// The real length is not used, because it can change from save to save, for example when a step
/// count gets another digit. The plan must not change then, so that equal state always gives equal
/// files.
pub(super) const VALUE_WEIGHT_BYTES: u64 = 64;

/// The size up to which a tensor that ranks hold whole comes from the lowest of them.
const SMALL_BYTES: u64 = 64 << 10;

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
    /// The ranks of each [`Holder`], by its list, in order.
    rank_lists: &'a [Vec<u32>],
    /// The weights of what each rank has been given.
    weights: Vec<u64>,
    /// The bytes of what each rank has been given.
    loads: Vec<u64>,
    kept: Vec<Vec<SelectedItem>>,
    /// The chunks that several ranks hold, which are not assigned yet.
    shared: Vec<SharedChunk>,
}

impl Assignment<'_> {
    /// Assigns a chunk to its only holder, or sets it aside if there are several.
    fn add(&mut self, chunk: SharedChunk) {
        match chunk.holders[..] {
            [holder] if self.rank_lists[holder.rank_list as usize].len() == 1 => {
                self.assign(&chunk, Deduplicate::LowestRank);
            }
            _ => self.shared.push(chunk),
        }
    }

    /// Assigns the chunks that several ranks hold, and returns the plan.
    fn finish(mut self, metadata: Metadata, rule: Deduplicate) -> GlobalPlan {
        let mut shared = std::mem::take(&mut self.shared);
        // The largest first, so that the small ones level what is left. Stable: equals keep the
        // order of the keys.
        shared.sort_by_key(|chunk| std::cmp::Reverse(chunk.weight));
        for chunk in &shared {
            self.assign(chunk, rule);
        }
        let selections = self.kept.into_iter().map(|mut kept| {
            kept.sort_unstable();
            Selection { kept }
        });
        GlobalPlan {
            metadata,
            selections: selections.collect(),
            loads: self.loads,
        }
    }

    /// Assigns a chunk to one of its holders.
    fn assign(&mut self, chunk: &SharedChunk, rule: Deduplicate) {
        // The load that counts, the rank, and the item and index of the box in its plan.
        let mut best: Option<((u64, u32), u32, u32)> = None;
        for &Holder {
            rank_list,
            item,
            index,
        } in &chunk.holders
        {
            for &rank in &self.rank_lists[rank_list as usize] {
                let load = match rule {
                    Deduplicate::Balanced => self.weights[rank as usize],
                    Deduplicate::LowestRank => 0,
                };
                // Of equal loads the lowest rank's counts, so that the plan is the same each time.
                if best.is_none_or(|(least_load, ..)| (load, rank) < least_load) {
                    best = Some(((load, rank), item, index));
                }
            }
        }
        let ((_, rank), item, index) = best.expect("a chunk comes from a rank that holds it");
        self.weights[rank as usize] += chunk.weight;
        self.loads[rank as usize] += chunk.bytes;
        self.kept[rank as usize].push(SelectedItem {
            item,
            index,
            entry: chunk.entry,
            chunk: chunk.chunk,
        });
    }
}

/// Collects the items of each key, in the order of first appearance by rank, and checks that the
/// ranks agree on them.
fn group_by_key<'p>(
    schemas: &'p [LocalPlan],
    mut offers: Vec<Offer>,
    offer_of_rank: &[usize],
) -> Result<Vec<KeyGroup<'p>>, SavePlanError> {
    let mut positions: HashMap<&str, usize> = HashMap::new();
    let mut groups: Vec<KeyGroup<'_>> = Vec::new();
    // The group of each item, for each schema that was met.
    let mut groups_by_schema: Vec<Vec<usize>> = vec![Vec::new(); schemas.len()];
    for (rank, &offer) in offer_of_rank.iter().enumerate() {
        let schema = offers[offer].schema;
        let items = &schemas[schema].items;
        // Ranks with equal schemas agree with each other: only the first of them need be compared
        // with the others.
        if groups_by_schema[schema].len() != items.len() {
            for (index, item) in items.iter().enumerate() {
                let position = *positions.entry(&item.fqn).or_insert_with(|| {
                    groups.push(KeyGroup {
                        first_rank: rank,
                        first_item: item,
                        last_schema: None,
                        candidates: Vec::new(),
                    });
                    groups.len() - 1
                });
                groups[position].add_item(rank, item, schema, index)?;
                groups_by_schema[schema].push(position);
            }
        }
        // The boxes of a shared offer are taken once, with the first rank that has it. After that
        // the offer is empty.
        for held in std::mem::take(&mut offers[offer].boxes) {
            let group = groups_by_schema[schema].get(held.item as usize);
            // A box of an item that the schema does not have is left out. The check that the boxes
            // hold the whole tensor finds what is missing then.
            let Some(group) = group.and_then(|&group| groups.get_mut(group)) else {
                continue;
            };
            let holder = Holder {
                rank_list: (schemas.len() + offer) as u32,
                item: held.item,
                index: held.index,
            };
            group.candidates.push((Some(held.bounds), holder));
        }
    }
    Ok(groups)
}

impl KeyGroup<'_> {
    /// Adds the item of this index in a schema, which `rank` is the first to have. A key that
    /// stands twice in the schema, or that ranks disagree about, is an error.
    fn add_item(
        &mut self,
        rank: usize,
        item: &WriteItem,
        schema: usize,
        index: usize,
    ) -> Result<(), SavePlanError> {
        if self.last_schema == Some(schema) {
            return Err(SavePlanError::DuplicateKey {
                fqn: item.fqn.clone(),
                rank,
            });
        }
        self.check_agreement(rank, item)?;
        self.last_schema = Some(schema);
        let holder = Holder {
            rank_list: schema as u32,
            item: index as u32,
            index: 0,
        };
        match &item.content {
            WriteContent::Value { .. } => self.candidates.push((None, holder)),
            // The schema implies the boxes of whole tensors. Make them explicit, to compare them
            // with others.
            WriteContent::Tensor {
                shape,
                is_whole: true,
                ..
            } => {
                let whole = TensorBox::whole(shape);
                if !whole.is_empty() {
                    self.candidates.push((Some(whole), holder));
                }
            }
            WriteContent::Tensor { .. } => {}
        }
        Ok(())
    }

    /// Checks that a rank's item has the same kind, dtype, shape and path as that of the first rank
    /// with this key.
    fn check_agreement(&self, rank: usize, item: &WriteItem) -> Result<(), SavePlanError> {
        let (what, first, second) = match (&self.first_item.content, &item.content) {
            (
                WriteContent::Tensor {
                    properties: first,
                    shape: first_shape,
                    ..
                },
                WriteContent::Tensor {
                    properties, shape, ..
                },
            ) if (first.dtype, first_shape) != (properties.dtype, shape) => {
                if first.dtype == properties.dtype {
                    ("shape", format!("{first_shape:?}"), format!("{shape:?}"))
                } else {
                    let (first, second) = (first.dtype, properties.dtype);
                    ("dtype", first.to_string(), second.to_string())
                }
            }
            (WriteContent::Tensor { .. }, WriteContent::Value { .. }) => {
                ("kind", "tensor".into(), "value".into())
            }
            (WriteContent::Value { .. }, WriteContent::Tensor { .. }) => {
                ("kind", "value".into(), "tensor".into())
            }
            _ if self.first_item.path == item.path => return Ok(()),
            _ => {
                let (first, second) = (&self.first_item.path, &item.path);
                ("path", format!("{first:?}"), format!("{second:?}"))
            }
        };
        Err(SavePlanError::Disagreement {
            fqn: self.first_item.fqn.clone(),
            what,
            first_rank: self.first_rank,
            first,
            second_rank: rank,
            second,
        })
    }
}

/// Checks that readers will accept a key of this length.
pub fn check_key_length(fqn: &str) -> Result<(), SavePlanError> {
    /// The most characters of the key that the error shows.
    const SHOWN_CHARACTERS: usize = 80;
    if fqn.len() <= MAX_KEY_BYTES {
        return Ok(());
    }
    let start = fqn.chars().take(SHOWN_CHARACTERS).collect();
    Err(SavePlanError::LongKey {
        start,
        length: fqn.len(),
        limit: MAX_KEY_BYTES,
    })
}
