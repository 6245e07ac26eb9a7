//! State dicts as sources.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::Hasher as _;

use fsdp_comm::ProcessGroup;
use fsdp_flat::storage::storage_id;
use fsdp_layout::cover::uncovered;
use fsdp_layout::{KeyPath, PlainValue, TensorBox};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::load::LoadError;
use super::source::{LoadCall, Source, WantedOn};
use super::target::Wanted;
use crate::lend::{Lend, Memory};
use crate::memory::scalar_to_value;
use crate::transfer::{BoxBytes, Exchange, Item, Layout, PerRank};
use crate::{Schema, StateDict, StateError, StateValue};

/// A state dict that values are loaded from. Either every rank has one, whole or sharded, or one
/// rank has it.
pub struct DictSource<'a> {
    schema: Schema,
    /// This rank's values, by their positions in the schema; small values are there on every rank.
    /// Tensors are shared.
    values: Values,
    /// The rank that has the state dict; `None` if every rank has one, whole or sharded.
    root: Option<usize>,
    /// Computes the boxes of other ranks, if it is given.
    boxes_on: Option<&'a BoxesOn<'a>>,
    /// For each wanted tensor, the boxes that each rank has and wants. Empty until the tensors have
    /// been located.
    layouts: Vec<Layout>,
}

/// The values of a source that are on this rank, by their positions in the schema.
type Values = Vec<Option<StateValue>>;

/// The part of a root's state dict that every rank gets before anything moves.
#[derive(Serialize, Deserialize)]
struct Outline {
    schema: Schema,
    /// The small values, by their positions in the schema.
    small: Vec<Option<PlainValue>>,
}

/// A function that computes the boxes of a value that a rank has; `None` if it cannot.
pub type BoxesOn<'a> = dyn Fn(&KeyPath, usize) -> Option<Vec<TensorBox>> + 'a;

impl<'a> DictSource<'a> {
    /// Returns a source in which every rank takes part: each value is sharded over the ranks, or
    /// whole on every rank. No communication.
    ///
    /// # Errors
    /// Tensors whose memory is released, or of dtypes and shapes that no file holds.
    pub fn on_every_rank(state: &StateDict) -> Result<Self, StateError> {
        let (schema, values) = Schema::with_values(state)?;
        let values = values.into_iter().cloned().map(Some).collect();
        Ok(DictSource {
            schema,
            values,
            root: None,
            boxes_on: None,
            layouts: Vec::new(),
        })
    }

    /// Returns a source of the values of rank `root` of the group, where what others pass is
    /// ignored; or, without a root, of the dict that every rank passes, as [`Self::on_every_rank`].
    /// A rank may pass an error instead, for example of its arguments.
    ///
    /// Collective: with a root one agreement, and one object broadcast of the schema and the small
    /// values; without, after an error the agreement of [`load_state`](super::load_state), in which
    /// the other ranks wait.
    ///
    /// # Errors
    /// Any rank's own; no such root, or no state dict there; as [`Self::on_every_rank`].
    pub fn open<E: LoadError>(
        group: &ProcessGroup,
        operation: &'static str,
        root: Option<usize>,
        state: Result<Option<&StateDict>, E>,
    ) -> Result<Self, E> {
        let Some(root) = root else {
            let missing = StateError::NoSource { rank: group.rank() };
            let opened = state.and_then(|state| Ok(Self::on_every_rank(state.ok_or(missing)?)?));
            return E::or_refuse(group, operation, opened);
        };
        let own = state.and_then(|state| Ok(Self::outline_of_root(group, root, state)?));
        let (outline, values) = E::agree(group, operation, None, own)?.unzip();
        let Outline { schema, small } = group.broadcast_object(outline.as_ref(), root)?;
        let values = match values {
            Some(values) => values,
            None => small_values(&schema, small)?,
        };
        Ok(DictSource {
            schema,
            values,
            root: Some(root),
            boxes_on: None,
            layouts: Vec::new(),
        })
    }

    /// Returns what the root sends to the other ranks before any tensor moves: its schema and its
    /// small values. Returns the root's own values too, and `None` on the other ranks.
    fn outline_of_root(
        group: &ProcessGroup,
        root: usize,
        state: Option<&StateDict>,
    ) -> Result<Option<(Outline, Values)>, StateError> {
        if root >= group.world_size() {
            return Err(StateError::NoSuchRank {
                rank: root,
                world_size: group.world_size(),
            });
        }
        if root != group.rank() {
            return Ok(None);
        }
        let state = state.ok_or_else(|| StateError::NoSource { rank: root })?;
        let DictSource { schema, values, .. } = Self::on_every_rank(state)?;
        let mut small = Vec::with_capacity(values.len());
        for (position, value) in values.iter().enumerate() {
            let value = value.as_ref().filter(|_| schema.is_small(position));
            small.push(value.map_or(Ok(None), StateValue::to_plain)?);
        }
        Ok(Some((Outline { schema, small }, values)))
    }

    /// Sets a function that computes which boxes of a value a rank has, so that ranks need not send
    /// each other their boxes. It must know all sharded values.
    pub(crate) const fn with_boxes_on(mut self, boxes_on: Option<&'a BoxesOn<'a>>) -> Self {
        self.boxes_on = boxes_on;
        self
    }

    /// Returns this rank's value at a position of the schema.
    fn value(&self, position: usize) -> Option<&StateValue> {
        self.values.get(position)?.as_ref()
    }

    /// Returns the boxes of a value that this rank has.
    fn have(&self, position: usize) -> Vec<TensorBox> {
        self.value(position)
            .map(StateValue::boxes)
            .unwrap_or_default()
    }

    fn is_sharded(&self, position: usize) -> bool {
        self.schema
            .get(position)
            .is_some_and(|(_, leaf)| leaf.is_sharded())
    }

    /// Returns the boxes of a tensor that does not move: this rank's own, and none for the other
    /// ranks, because this rank needs nothing from them.
    fn local(&self, group: &ProcessGroup, wanted: &Wanted) -> HaveWantOfRanks {
        let only = |boxes| PerRank::only(group.rank(), group.world_size(), boxes);
        (only(self.have(wanted.position)), only(wanted.boxes.clone()))
    }

    /// Returns `true` if this rank's own values hold all elements of a wanted tensor.
    fn has_all_of(&self, wanted: &Wanted) -> bool {
        let have = self.have(wanted.position);
        wanted
            .boxes
            .iter()
            .all(|want| uncovered(want, &have).is_empty())
    }

    /// Returns each rank's boxes of a wanted tensor, if they are known without asking the ranks.
    fn known_boxes(
        &self,
        group: &ProcessGroup,
        wanted: &Wanted,
        wanted_on: &WantedOn<'_>,
    ) -> Option<HaveWantOfRanks> {
        let (path, leaf) = self.schema.get(wanted.position)?;
        let have = |rank| match (self.root, &self.boxes_on) {
            // Only the root has a dict. Its tensors are whole, unless they are sharded ones.
            (Some(root), _) if rank != root => Some(Vec::new()),
            (Some(_), _) if !leaf.is_sharded() => Some(vec![TensorBox::whole(leaf.tensor()?.1)]),
            // Every rank has a dict, and the boxes of each can be computed.
            (None, Some(boxes_on)) => boxes_on(path, rank),
            _ => None,
        };
        // If the boxes of a single rank are unknown, all ranks have to be asked.
        let ranks = 0..group.world_size();
        let have = ranks.clone().map(have).collect::<Option<Vec<_>>>()?;
        let want = ranks
            .map(|rank| wanted_on(wanted, rank))
            .collect::<Option<Vec<_>>>()?;
        Some((PerRank::all(have), PerRank::all(want)))
    }

    /// Returns each rank's boxes of the tensors that may have to move, because some rank may want
    /// elements that it does not have, by the positions of the tensors in `wanted`. Collective, if
    /// the boxes are not known: an object all-gather, and another one before it if ranks do not
    /// know what others want.
    fn boxes_of_ranks(
        &self,
        group: &ProcessGroup,
        wanted: &[Wanted],
        wanted_on: &WantedOn<'_>,
    ) -> Result<HashMap<usize, HaveWantOfRanks>, StateError> {
        // Step 1: choose the tensors that may have to move. A dict on a root moves, except for
        // small values, which came with the schema. Of dicts on every rank, only sharded tensors
        // move, and nothing moves on a single rank.
        let may_move = |&index: &usize| match self.root {
            Some(_) => !self.schema.is_small(wanted[index].position),
            None => group.world_size() > 1 && self.is_sharded(wanted[index].position),
        };
        let mut moving: Vec<usize> = (0..wanted.len()).filter(may_move).collect();
        // Step 2: use what is known without communication.
        let known = moving
            .iter()
            .map(|&index| Some((index, self.known_boxes(group, &wanted[index], wanted_on)?)));
        if let Some(known) = known.collect() {
            return Ok(known);
        }
        // Step 3: tell each other which tensors a rank lacks, so that only the boxes of these are
        // sent. This is skipped for a root's dict, of which the other ranks lack everything, and if
        // it is known what each rank wants.
        if self.root.is_none()
            && moving
                .iter()
                .any(|&index| wanted_on(&wanted[index], 0).is_none())
        {
            moving.retain(|&index| !self.has_all_of(&wanted[index]));
            let lacking: BTreeSet<usize> = group
                .all_gather_object(&moving)?
                .into_iter()
                .flatten()
                .collect();
            moving = lacking.into_iter().collect();
        }
        if moving.is_empty() {
            return Ok(HashMap::new());
        }
        // Step 4: send each other the boxes.
        let mine: Vec<(Vec<TensorBox>, Vec<TensorBox>)> = moving
            .iter()
            .map(|&index| {
                (
                    self.have(wanted[index].position),
                    wanted[index].boxes.clone(),
                )
            })
            .collect();
        let mut all = group.all_gather_object(&mine)?;
        let mut boxes = HashMap::with_capacity(moving.len());
        for (at, index) in moving.into_iter().enumerate() {
            let of_ranks = all
                .iter_mut()
                .map(|boxes| boxes.get_mut(at).map(std::mem::take).unwrap_or_default());
            let (have, want) = of_ranks.unzip();
            boxes.insert(index, (PerRank::all(have), PerRank::all(want)));
        }
        Ok(boxes)
    }
}

/// Each rank's boxes of one tensor: those that it has, and those that it wants.
type HaveWantOfRanks = (PerRank, PerRank);

impl Source for DictSource<'_> {
    type Error = StateError;

    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn values(&self, positions: &[usize]) -> Result<Vec<StateValue>, StateError> {
        Ok(positions
            .iter()
            .map(|&at| {
                self.value(at)
                    .cloned()
                    .unwrap_or(StateValue::Plain(PlainValue::None))
            })
            .collect())
    }

    fn hash(&self, position: usize) -> Result<Option<u64>, StateError> {
        if self.root.is_some() || self.is_sharded(position) {
            return Ok(None);
        }
        let mut hasher = XxHash3_64::new();
        for source in self
            .value(position)
            .map_or_else(|| Ok(Vec::new()), BoxBytes::of)?
        {
            source.read(|bytes| hasher.write(bytes))?;
        }
        Ok(Some(hasher.finish()))
    }

    fn moves_between_ranks(&self) -> bool {
        true
    }

    fn separate(
        &mut self,
        wanted: &[Wanted],
        memory: &mut dyn FnMut(&Wanted) -> Result<Memory, StateError>,
    ) -> Result<(), StateError> {
        // Find the storages that the load is about to fill.
        let memories = wanted.iter().map(memory).collect::<Result<Vec<_>, _>>()?;
        let live: HashSet<usize> = memories
            .iter()
            .flat_map(Memory::tensors)
            .map(|tensor| storage_id(&tensor))
            .collect();
        for (wanted, memory) in wanted.iter().zip(&memories) {
            let Some(Some(value)) = self.values.get_mut(wanted.position) else {
                continue;
            };
            // A value in one of these storages may be overwritten before it is read, so it is
            // copied first. A value that is its own destination needs no copy, because nothing is
            // written there.
            let shares = value
                .candle_tensors()
                .iter()
                .any(|tensor| live.contains(&storage_id(tensor)));
            if shares && !memory.is_same_view(value) {
                *value = value.copy()?;
            }
        }
        Ok(())
    }

    fn locate(
        &mut self,
        call: &LoadCall<'_>,
        wanted: &[Wanted],
        wanted_on: &WantedOn<'_>,
    ) -> Result<(), StateError> {
        let &LoadCall {
            operation, group, ..
        } = call;
        let mut boxes = self.boxes_of_ranks(group, wanted, wanted_on)?;
        self.layouts.clear();
        for (index, tensor) in wanted.iter().enumerate() {
            let (have, want) = boxes
                .remove(&index)
                .unwrap_or_else(|| self.local(group, tensor));
            let element = tensor.dtype.size_in_bytes() as usize;
            let layout = Layout {
                shape: tensor.shape.clone(),
                element,
                have,
                want,
            };
            if let Some((rank, missing)) = layout.hole() {
                let rank = group.global_ranks().get(rank).copied().unwrap_or(rank);
                let (key, shape) = (tensor.key.clone(), layout.shape);
                return Err(StateError::NotCovered {
                    operation,
                    key,
                    shape,
                    rank,
                    missing,
                });
            }
            self.layouts.push(layout);
        }
        Ok(())
    }

    fn read(
        &mut self,
        call: &LoadCall<'_>,
        wanted: &[Wanted],
        lend: &mut dyn Lend,
    ) -> Result<(), StateError> {
        let layouts = std::mem::take(&mut self.layouts);
        let items = wanted.iter().zip(layouts);
        let items: Vec<Item<'_>> = items
            .map(|(wanted, layout)| Item {
                layout,
                source: self.value(wanted.position),
            })
            .collect();
        Exchange::run(call.group, call.operation, &items, lend)
    }
}

/// Returns the values of a rank that is not the root. It has only the small ones, which came with
/// the schema.
fn small_values(schema: &Schema, small: Vec<Option<PlainValue>>) -> Result<Values, StateError> {
    let leaves = schema.iter().map(|(_, leaf)| leaf).zip(small);
    leaves
        .map(|(leaf, small)| small.map(|small| scalar_to_value(leaf, small)).transpose())
        .collect()
}
