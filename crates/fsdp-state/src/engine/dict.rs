//! State dicts as sources.

use std::collections::{HashMap, HashSet};
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
use super::tied::{PairLending, TiedPair, TiedValues, compare_values, want_tied};
use crate::error::StateError;
use crate::lend::{Lend, Memory};
use crate::memory::scalar_to_value;
use crate::schema::Schema;
use crate::state_dict::{StateDict, StateValue};
use crate::transfer::{
    BoxBytes, BoxesPerRank, Exchange, Item, Layout, group_by_value, incomplete_error,
};

/// A state dict that values are loaded from. Either every rank has one, whole or sharded, or one
/// rank has it.
pub struct DictSource<'a> {
    schema: Schema,
    /// This rank's values, by their positions in the schema. Tensors are shared. Other ranks than
    /// the root have its small values, and `None` in place of the tensors that only the root has.
    values: Vec<StateValue>,
    /// The rank that has the state dict; `None` if every rank has one, whole or sharded.
    root: Option<usize>,
    /// Computes the boxes of other ranks, if it is given.
    boxes_on: Option<&'a BoxesOn<'a>>,
    /// For each wanted tensor, the boxes that each rank has and wants. Empty until the tensors have
    /// been located.
    layouts: Vec<Layout>,
}

/// The part of a root's state dict that every rank gets before anything moves.
#[derive(Serialize, Deserialize)]
struct Outline {
    schema: Schema,
    /// The small values, in the order of the schema.
    small_values: Vec<PlainValue>,
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
        Ok(DictSource {
            schema,
            values: values.into_iter().cloned().collect(),
            root: None,
            boxes_on: None,
            layouts: Vec::new(),
        })
    }

    /// Returns a source of the values of rank `root` of the group. What the other ranks pass is
    /// ignored, except for an error, for example of their arguments.
    ///
    /// Collective: one agreement, and one object broadcast of the schema and the small values.
    ///
    /// # Errors
    /// Any rank's own; no such root, or no state dict there; as [`Self::on_every_rank`].
    pub fn on_root<E: LoadError>(
        group: &ProcessGroup,
        operation: &'static str,
        root: usize,
        state: Result<Option<&StateDict>, E>,
    ) -> Result<Self, E> {
        let opened = state.and_then(|state| Ok(Self::open_on_root(group, root, state)?));
        let (outline, values) = E::agree(group, operation, None, opened)?.unzip();
        let Outline {
            schema,
            small_values,
        } = group.broadcast_object(outline.as_ref(), root)?;
        Ok(DictSource {
            values: match values {
                // The root keeps its tensors. The others get only what came with the schema.
                Some(values) => values,
                None => E::or_refuse(
                    group,
                    operation,
                    values_of_others(root, &schema, small_values),
                )?,
            },
            schema,
            root: Some(root),
            boxes_on: None,
            layouts: Vec::new(),
        })
    }

    /// Returns the root's values, and the outline that it sends to the other ranks; `None` on these
    /// ranks.
    ///
    /// # Errors
    /// No such root, or no state dict there; the errors of [`Self::on_every_rank`].
    fn open_on_root(
        group: &ProcessGroup,
        root: usize,
        state: Option<&StateDict>,
    ) -> Result<Option<(Outline, Vec<StateValue>)>, StateError> {
        if root >= group.world_size() {
            return Err(StateError::NoSuchRank {
                rank: root,
                world_size: group.world_size(),
            });
        }
        if root != group.rank() {
            return Ok(None);
        }
        let state = state.ok_or(StateError::NoSource { rank: root })?;
        let DictSource { schema, values, .. } = Self::on_every_rank(state)?;
        let mut small_values = Vec::new();
        for (position, value) in values.iter().enumerate() {
            if schema.is_small(position) {
                let plain = value.to_plain()?;
                small_values
                    .push(plain.expect("a small value is plain or a tensor of one element"));
            }
        }
        Ok(Some((
            Outline {
                schema,
                small_values,
            },
            values,
        )))
    }

    /// Sets a function that computes which boxes of a value a rank has, so that ranks need not send
    /// each other their boxes. It must know all sharded values.
    pub(crate) const fn with_boxes_on(mut self, boxes_on: Option<&'a BoxesOn<'a>>) -> Self {
        self.boxes_on = boxes_on;
        self
    }

    fn is_sharded(&self, position: usize) -> bool {
        matches!(self.values[position], StateValue::Sharded(_))
    }

    /// Returns `true` if this rank's own values hold all elements of a wanted tensor.
    fn holds_all_of(&self, wanted: &Wanted) -> bool {
        let held_boxes = self.values[wanted.position].boxes();
        wanted
            .boxes
            .iter()
            .all(|bounds| uncovered(bounds, &held_boxes).is_empty())
    }

    /// Returns the layout of a tensor that does not move: this rank's own boxes, and none of the
    /// other ranks, because this rank needs nothing from them.
    fn own_layout(&self, group: &ProcessGroup, wanted: &Wanted) -> Layout {
        let held_boxes = self.values[wanted.position].boxes();
        let wanted_boxes = wanted.boxes.clone();
        make_layout(
            wanted,
            BoxesPerRank::for_own_rank(group, held_boxes),
            BoxesPerRank::for_own_rank(group, wanted_boxes),
        )
    }

    /// Returns the layout of a wanted tensor, if it is known without asking the ranks.
    fn known_layout(
        &self,
        group: &ProcessGroup,
        wanted: &Wanted,
        wanted_on: &WantedOn<'_>,
    ) -> Option<Layout> {
        let leaf = self.schema.get(wanted.position);
        let (path, leaf) = leaf.expect("what is wanted is in the schema");
        let mut held_boxes = Vec::with_capacity(group.world_size());
        let mut wanted_boxes = Vec::with_capacity(group.world_size());
        // If the boxes of a single rank are unknown, all ranks have to be asked.
        for rank in 0..group.world_size() {
            held_boxes.push(match self.root {
                // Every rank has a dict, and perhaps the boxes of each can be computed.
                None => self.boxes_on?(path, rank)?,
                // Only the root has a dict. Its tensors are whole, unless they are sharded ones.
                Some(root) if rank != root => Vec::new(),
                Some(_) if leaf.is_sharded() => return None,
                Some(_) => vec![TensorBox::whole(&wanted.shape)],
            });
            wanted_boxes.push(wanted_on(wanted, rank)?);
        }
        Some(make_layout(
            wanted,
            BoxesPerRank::from_lists(held_boxes),
            BoxesPerRank::from_lists(wanted_boxes),
        ))
    }

    /// Checks that names which become one tensor have the same values. Collective if there are such
    /// names: an agreement and an object all-gather, and for sharded tensors that do not share
    /// their memory the exchange of both values and another agreement.
    ///
    /// # Errors
    /// The same on every rank: [`StateError::TiedNamesDiffer`], and the errors of an exchange.
    fn check_tied(
        &self,
        call: &LoadCall<'_>,
        wanted: &[Wanted],
        wanted_on: &WantedOn<'_>,
    ) -> Result<(), StateError> {
        let pairs = TiedPair::all(wanted);
        if pairs.is_empty() {
            return Ok(());
        }
        // Names of a tied parameter usually share one tensor in the dict, and a rank can compare
        // whole tensors by itself.
        let compared = pairs.iter().map(|pair| {
            let first = &wanted[pair.wanted_index];
            compare_values(
                &self.values[first.position],
                &self.values[pair.position],
                first,
            )
        });
        let own: Result<Vec<TiedValues>, StateError> = compared.collect();
        let own = StateError::agree(call.group, call.operation, None, own)?;
        let on_ranks: Vec<Vec<TiedValues>> = call.group.all_gather_object(&own)?;
        let mut requests = Vec::new();
        for (index, pair) in pairs.iter().enumerate() {
            let mut found = on_ranks.iter().filter_map(|values| values.get(index));
            if found.clone().all(|values| *values == TiedValues::Same) {
                continue;
            }
            if found.any(|values| *values == TiedValues::Different) {
                let (second, _) = self
                    .schema
                    .get(pair.position)
                    .expect("tied positions are those of the schema");
                return Err(StateError::tied_values_differ(
                    &wanted[pair.wanted_index].key,
                    &second.flat_key(),
                ));
            }
            let first = &wanted[pair.wanted_index];
            requests.push(first.clone());
            // All ranks have one schema, so each finds the same error here.
            requests.push(want_tied(&self.schema, first, pair.position)?);
        }
        if requests.is_empty() {
            return Ok(());
        }
        let mut moving = self.find_moving_layouts(call.group, &requests, wanted_on)?;
        let mut items = Vec::with_capacity(requests.len());
        for (index, request) in requests.iter().enumerate() {
            let layout = moving
                .remove(&index)
                .unwrap_or_else(|| self.own_layout(call.group, request));
            layout.check_covered(call.group, call.operation, &request.key)?;
            items.push(Item {
                layout,
                source: &self.values[request.position],
            });
        }
        let mut lending = PairLending::new(&requests);
        match Exchange::run(call.group, call.operation, &items, &mut lending) {
            Err(error) if error.comm().is_some() => Err(error),
            outcome => StateError::agree(call.group, call.operation, None, outcome),
        }
    }

    /// Returns the layouts of the tensors that may have to move, because some rank may want
    /// elements that it does not have, by the positions of the tensors in `wanted`. Collective, if
    /// the boxes are not known: an object all-gather, and another one before it if ranks do not
    /// know what others want.
    fn find_moving_layouts(
        &self,
        group: &ProcessGroup,
        wanted: &[Wanted],
        wanted_on: &WantedOn<'_>,
    ) -> Result<HashMap<usize, Layout>, StateError> {
        // Step 1: choose the tensors that may have to move. A dict on a root moves, except for
        // small values, which came with the schema. Of dicts on every rank, only sharded tensors
        // move, and nothing moves on a single rank.
        let mut moving: Vec<usize> = Vec::new();
        for (index, Wanted { position, .. }) in wanted.iter().enumerate() {
            let may_move = match self.root {
                Some(_) => !self.schema.is_small(*position),
                None => group.world_size() > 1 && self.is_sharded(*position),
            };
            if may_move {
                moving.push(index);
            }
        }
        // Step 2: use what is known without communication.
        let known_layouts: Option<HashMap<usize, Layout>> = moving
            .iter()
            .map(|&index| Some((index, self.known_layout(group, &wanted[index], wanted_on)?)))
            .collect();
        if let Some(known_layouts) = known_layouts {
            return Ok(known_layouts);
        }
        // Step 3: tell each other which tensors a rank lacks, so that only the boxes of these are
        // sent. This is skipped for a root's dict, of which the other ranks lack everything, and if
        // it is known what each rank wants.
        if self.root.is_none()
            && moving
                .iter()
                .any(|&index| wanted_on(&wanted[index], 0).is_none())
        {
            let mut own_lacking = moving.clone();
            own_lacking.retain(|&index| !self.holds_all_of(&wanted[index]));
            let lacking_on_ranks = group.all_gather_object(&own_lacking)?;
            let lacking: HashSet<usize> = lacking_on_ranks.into_iter().flatten().collect();
            moving.retain(|index| lacking.contains(index));
        }
        if moving.is_empty() {
            return Ok(HashMap::new());
        }
        // Step 4: send each other the boxes.
        let mut own_boxes = Vec::with_capacity(moving.len());
        for &index in &moving {
            let held_boxes = self.values[wanted[index].position].boxes();
            own_boxes.push((held_boxes, wanted[index].boxes.clone()));
        }
        let boxes_of_ranks = group.all_gather_object(&own_boxes)?;
        let mut layouts = HashMap::with_capacity(moving.len());
        for (rank_boxes, &index) in group_by_value(boxes_of_ranks, moving.len())?
            .into_iter()
            .zip(&moving)
        {
            let (held_boxes, wanted_boxes) = rank_boxes.into_iter().unzip();
            let layout = make_layout(
                &wanted[index],
                BoxesPerRank::from_lists(held_boxes),
                BoxesPerRank::from_lists(wanted_boxes),
            );
            layouts.insert(index, layout);
        }
        Ok(layouts)
    }
}

impl Source for DictSource<'_> {
    type Error = StateError;

    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn values(&self, positions: &[usize]) -> Result<Vec<StateValue>, StateError> {
        Ok(positions
            .iter()
            .map(|&position| self.values[position].clone())
            .collect())
    }

    fn hash(&self, position: usize) -> Result<Option<u64>, StateError> {
        if self.root.is_some() || self.is_sharded(position) {
            return Ok(None);
        }
        let mut hasher = XxHash3_64::new();
        for source in BoxBytes::from_value(&self.values[position])? {
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
        let live_storages: HashSet<usize> = memories
            .iter()
            .flat_map(Memory::tensors)
            .map(|tensor| storage_id(&tensor))
            .collect();
        for (wanted, memory) in wanted.iter().zip(&memories) {
            let value = &mut self.values[wanted.position];
            // A value in one of these storages may be overwritten before it is read, so it is
            // copied first. A value that is its own destination needs no copy, because nothing is
            // written there.
            let is_shared = value
                .candle_tensors()
                .iter()
                .any(|tensor| live_storages.contains(&storage_id(tensor)));
            if is_shared && !memory.is_same_view(value) {
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
        let mut moving = self.find_moving_layouts(call.group, wanted, wanted_on)?;
        self.layouts.clear();
        for (index, tensor) in wanted.iter().enumerate() {
            let layout = moving
                .remove(&index)
                .unwrap_or_else(|| self.own_layout(call.group, tensor));
            layout.check_covered(call.group, call.operation, &tensor.key)?;
            self.layouts.push(layout);
        }
        self.check_tied(call, wanted, wanted_on)
    }

    fn read(
        &mut self,
        call: &LoadCall<'_>,
        wanted: &[Wanted],
        lend: &mut dyn Lend,
    ) -> Result<(), StateError> {
        let layouts = std::mem::take(&mut self.layouts);
        let mut items = Vec::with_capacity(wanted.len());
        for (wanted, layout) in wanted.iter().zip(layouts) {
            let source = &self.values[wanted.position];
            items.push(Item { layout, source });
        }
        Exchange::run(call.group, call.operation, &items, lend)
    }
}

/// Returns the layout of a wanted tensor, from the boxes that each rank has and wants.
fn make_layout(wanted: &Wanted, held_boxes: BoxesPerRank, wanted_boxes: BoxesPerRank) -> Layout {
    Layout {
        shape: wanted.shape.clone(),
        element_bytes: wanted.dtype.size_in_bytes() as usize,
        held_boxes,
        wanted_boxes,
    }
}

/// Returns the values of a rank that is not the root. It has only the small ones, which came with
/// the schema.
fn values_of_others(
    root: usize,
    schema: &Schema,
    small_values: Vec<PlainValue>,
) -> Result<Vec<StateValue>, StateError> {
    let mut small_values = small_values.into_iter();
    let mut values = Vec::new();
    for (position, (_, leaf)) in schema.iter().enumerate() {
        values.push(if schema.is_small(position) {
            let value = small_values.next();
            scalar_to_value(leaf, value.ok_or_else(|| incomplete_error(root))?)?
        } else {
            PlainValue::None.into()
        });
    }
    Ok(values)
}
