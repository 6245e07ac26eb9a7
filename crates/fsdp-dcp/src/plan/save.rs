//! The global save plan: which rank writes which box.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;

use fsdp_layout::TensorBox;
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use super::error::SavePlanError;
use super::local::{HeldBox, LocalPlan, PlanSchema, SchemaContent, SchemaItem};
use super::validate::validate_cover;
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
    /// By rank.
    pub selections: Vec<Selection>,
    /// Payload bytes that each rank writes.
    pub loads: Vec<u64>,
}

/// The offer of one rank to a global plan.
#[derive(Debug, Clone, PartialEq)]
pub struct RankOffer {
    /// Position of its schema among those of all ranks.
    pub schema: usize,
    /// The boxes that only this rank holds.
    pub boxes: Vec<HeldBox>,
}

/// Makes one plan of all ranks' local ones (by rank).
///
/// Every chunk is written once. Duplicates (equal boxes of one key) go, the largest first, to the rank with the fewest
/// payload bytes, so that no rank writes more tensors than 1.1 times the mean, or the mean and the largest chunk, wherever
/// every rank holds every duplicate. Equal plans give equal results, and the lengths of values do not change them.
pub fn plan_save(plans: &[LocalPlan], options: PlanOptions) -> Result<GlobalPlan, SavePlanError> {
    let mut schemas = Vec::new();
    let mut known = HashMap::new();
    let offers: Vec<RankOffer> = plans
        .iter()
        .map(|plan| {
            let schema = *known.entry(plan.schema_hash()).or_insert_with(|| {
                schemas.push(plan.schema());
                schemas.len() - 1
            });
            RankOffer { schema, boxes: plan.held_boxes() }
        })
        .collect();
    plan_offers(&schemas, &offers, options)
}

/// Makes one plan as [`plan_save`] does, of the distinct schemas of all ranks and of the boxes that each rank (by its
/// number) holds besides.
pub fn plan_offers(
    schemas: &[PlanSchema],
    offers: &[RankOffer],
    options: PlanOptions,
) -> Result<GlobalPlan, SavePlanError> {
    let mut ranks_of_schema = vec![Vec::new(); schemas.len()];
    for (rank, offer) in offers.iter().enumerate() {
        ranks_of_schema[offer.schema].push(rank as u32);
    }
    // Boxes of whole tensors are told by the schema; here they get bounds to be compared with others.
    let wholes: Vec<Vec<Option<TensorBox>>> = schemas.iter().map(wholes).collect();
    let groups = group(schemas, &wholes, offers)?;

    let mut assigned = Assignment {
        ranks_of_schema: &ranks_of_schema,
        weights: vec![0; offers.len()],
        loads: vec![0; offers.len()],
        kept: vec![Vec::new(); offers.len()],
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
            SchemaContent::Value { length } => {
                let holders = group.candidates.iter().map(|(_, holder)| *holder).collect();
                let value = SharedChunk { weight: VALUE_BYTES, bytes: *length, entry, chunk: 0, holders };
                shared.extend(assigned.assign_or_share(value));
                Entry::Bytes(BytesEntry::default())
            }
            SchemaContent::Tensor { properties, shape, .. } => {
                let mut candidates = group.candidates;
                // Stable, so that equal boxes stay in the order of their ranks.
                candidates.sort_by_key(|(bounds, _)| *bounds);
                let mut chunks = Vec::new();
                for equal in candidates.chunk_by(|(a, _), (b, _)| a == b) {
                    let Some((Some(bounds), _)) = equal.first() else { continue };
                    let numel = bounds.sizes.iter().fold(1u64, |n, &size| n.saturating_mul(size as u64));
                    let bytes = numel.saturating_mul(properties.dtype.size_in_bytes());
                    let holders = equal.iter().map(|(_, holder)| *holder).collect();
                    let chunk = chunks.len() as u32;
                    let tensor = SharedChunk { weight: bytes, bytes, entry, chunk, holders };
                    shared.extend(assigned.assign_or_share(tensor));
                    chunks.push(Chunk { bounds: (*bounds).clone(), stored: None });
                }
                validate_cover(shape, chunks.iter().map(|chunk| &chunk.bounds)).map_err(|source| {
                    let holders = candidates.iter().map(|(_, holder)| *holder);
                    let ranks = first_ranks(holders, &ranks_of_schema);
                    SavePlanError::Chunks { fqn: fqn.to_owned(), ranks, source: Box::new(source) }
                })?;
                Entry::Tensor(TensorEntry { properties: properties.clone(), shape: shape.clone(), chunks })
            }
        };
        entries.insert(fqn.to_owned(), content);
    }

    // The largest first, so that the small ones level what is left. Stable: equals keep the order of the keys.
    shared.sort_by_key(|chunk| std::cmp::Reverse(chunk.weight));
    for chunk in &shared {
        assigned.assign_shared(chunk, options.deduplicate);
    }
    let Assignment { loads, kept, .. } = assigned;
    let selections = kept.into_iter().map(|mut kept| {
        kept.sort_unstable();
        Selection { kept }
    });
    let metadata =
        Metadata { entries, planner_data: Some(paths), version: Some(VERSION.to_owned()), ..Metadata::default() };
    Ok(GlobalPlan { metadata, selections: selections.collect(), loads })
}

/// A holder of a chunk or a value.
#[derive(Debug, Clone, Copy)]
enum Holder {
    /// One rank, as a box of its own.
    One { rank: u32, item: u32, index: u32 },
    /// Every rank with this schema, whole.
    Every { schema: u32, item: u32 },
}

/// All ranks' items of one flat key.
struct Group<'p> {
    first_rank: usize,
    first: &'p SchemaItem,
    last_schema: usize,
    candidates: Vec<(Option<&'p TensorBox>, Holder)>,
}

/// The bytes that a value counts for when ranks get equal shares: about what a small one takes.
///
/// It is not the length, since that changes from save to save, as a count of steps gets another digit. The plan must not:
/// equal state makes equal bytes, whatever was saved before.
pub(super) const VALUE_BYTES: u64 = 64;

/// A chunk or a value, and all that hold it.
struct SharedChunk {
    /// The bytes by which chunks and values are shared out.
    weight: u64,
    /// The bytes of the payload.
    bytes: u64,
    entry: u32,
    chunk: u32,
    holders: Vec<Holder>,
}

/// The boxes and values that each rank has been given to write.
struct Assignment<'a> {
    ranks_of_schema: &'a [Vec<u32>],
    /// The weights of what each rank has been given.
    weights: Vec<u64>,
    /// The bytes of what each rank has been given.
    loads: Vec<u64>,
    kept: Vec<Vec<SelectedItem>>,
}

impl Assignment<'_> {
    /// Gives a chunk to its only holder, or gives it back if there are several.
    fn assign_or_share(&mut self, chunk: SharedChunk) -> Option<SharedChunk> {
        let is_single = match chunk.holders.as_slice() {
            [Holder::One { .. }] => true,
            [Holder::Every { schema, .. }] => self.ranks_of_schema[*schema as usize].len() == 1,
            _ => false,
        };
        if !is_single {
            return Some(chunk);
        }
        self.assign_shared(&chunk, Deduplicate::LowestRank);
        None
    }

    /// Gives a chunk to one of its holders.
    fn assign_shared(&mut self, chunk: &SharedChunk, rule: Deduplicate) {
        let mut best: Option<((u64, u32), u32, u32)> = None;
        let weights = &self.weights;
        let mut consider = |rank: u32, item: u32, index: u32| {
            let load = match rule {
                Deduplicate::Balanced => weights[rank as usize],
                Deduplicate::LowestRank => 0,
            };
            if best.is_none_or(|(least, ..)| (load, rank) < least) {
                best = Some(((load, rank), item, index));
            }
        };
        for holder in &chunk.holders {
            match *holder {
                Holder::One { rank, item, index } => consider(rank, item, index),
                Holder::Every { schema, item } => {
                    self.ranks_of_schema[schema as usize].iter().for_each(|&rank| consider(rank, item, 0));
                }
            }
        }
        if let Some(((_, rank), item, index)) = best {
            self.weights[rank as usize] += chunk.weight;
            self.loads[rank as usize] += chunk.bytes;
            let selected = SelectedItem { item, index, entry: chunk.entry, chunk: chunk.chunk };
            self.kept[rank as usize].push(selected);
        }
    }
}

/// Returns the box of each whole tensor of a schema; none of one without elements.
fn wholes(schema: &PlanSchema) -> Vec<Option<TensorBox>> {
    let whole = schema.items.iter().map(|item| match &item.content {
        SchemaContent::Tensor { shape, is_whole: true, .. } => {
            Some(TensorBox::whole(shape)).filter(|bounds| !bounds.is_empty())
        }
        _ => None,
    });
    whole.collect()
}

/// Returns the first eight of the ranks that are holders.
fn first_ranks(holders: impl Iterator<Item = Holder>, ranks_of_schema: &[Vec<u32>]) -> Vec<usize> {
    let mut ranks = Vec::new();
    for holder in holders {
        match holder {
            Holder::One { rank, .. } => ranks.push(rank as usize),
            Holder::Every { schema, .. } => {
                ranks.extend(ranks_of_schema[schema as usize].iter().map(|&rank| rank as usize));
            }
        }
    }
    ranks.sort_unstable();
    ranks.dedup();
    ranks.truncate(8);
    ranks
}

/// Collects the items of each key, in the order of first appearance by rank, and checks that the ranks agree on them.
fn group<'p>(
    schemas: &'p [PlanSchema],
    wholes: &'p [Vec<Option<TensorBox>>],
    offers: &'p [RankOffer],
) -> Result<Vec<(&'p str, Group<'p>)>, SavePlanError> {
    let mut positions: HashMap<&str, usize> = HashMap::new();
    let mut groups: Vec<(&str, Group<'_>)> = Vec::new();
    // The group of each item, for each schema that was met.
    let mut groups_of: Vec<Vec<usize>> = vec![Vec::new(); schemas.len()];
    for (rank, offer) in offers.iter().enumerate() {
        let schema = &schemas[offer.schema];
        let is_new = groups_of[offer.schema].len() != schema.items.len();
        // Ranks with equal schemas agree with each other: only the first of them need be compared with the others.
        for (index, item) in schema.items.iter().enumerate().filter(|_| is_new) {
            let position = match positions.entry(&item.fqn) {
                Slot::Occupied(there) => {
                    let group = &groups[*there.get()].1;
                    if group.last_schema == offer.schema {
                        return Err(SavePlanError::DuplicateKey { fqn: item.fqn.clone(), rank });
                    }
                    check_agreement(group, rank, item)?;
                    *there.get()
                }
                Slot::Vacant(slot) => {
                    let (first_rank, first, last_schema) = (rank, item, offer.schema);
                    groups.push((&item.fqn, Group { first_rank, first, last_schema, candidates: Vec::new() }));
                    *slot.insert(groups.len() - 1)
                }
            };
            let group = &mut groups[position].1;
            group.last_schema = offer.schema;
            let whole = wholes[offer.schema][index].as_ref();
            if whole.is_some() || matches!(item.content, SchemaContent::Value { .. }) {
                let holder = Holder::Every { schema: offer.schema as u32, item: index as u32 };
                group.candidates.push((whole, holder));
            }
            groups_of[offer.schema].push(position);
        }
        for held in &offer.boxes {
            let position = groups_of[offer.schema].get(held.item as usize);
            let Some((_, group)) = position.and_then(|&position| groups.get_mut(position)) else { continue };
            let holder = Holder::One { rank: rank as u32, item: held.item, index: held.index };
            group.candidates.push((Some(&held.bounds), holder));
        }
    }
    Ok(groups)
}

/// Checks that a rank means the same by a key as the first rank that has it.
fn check_agreement(group: &Group<'_>, rank: usize, item: &SchemaItem) -> Result<(), SavePlanError> {
    let differs = |what, first: String, second: String| {
        let (first_rank, second_rank) = (group.first_rank, rank);
        Err(SavePlanError::Disagreement { fqn: item.fqn.clone(), what, first_rank, first, second_rank, second })
    };
    match (&group.first.content, &item.content) {
        (SchemaContent::Value { .. }, SchemaContent::Value { .. }) => {}
        (
            SchemaContent::Tensor { properties: a, shape: shape_a, .. },
            SchemaContent::Tensor { properties: b, shape: shape_b, .. },
        ) => {
            if a.dtype != b.dtype {
                return differs("dtype", a.dtype.to_string(), b.dtype.to_string());
            }
            if shape_a != shape_b {
                return differs("shape", format!("{shape_a:?}"), format!("{shape_b:?}"));
            }
        }
        (SchemaContent::Tensor { .. }, _) => return differs("kind", "tensor".into(), "value".into()),
        (SchemaContent::Value { .. }, _) => return differs("kind", "value".into(), "tensor".into()),
    }
    if group.first.path != item.path {
        return differs("path", format!("{:?}", group.first.path), format!("{:?}", item.path));
    }
    Ok(())
}
