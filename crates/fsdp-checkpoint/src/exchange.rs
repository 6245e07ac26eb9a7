//! Values that come from other ranks: announced and checked first, then moved one after the other.

use std::collections::BTreeSet;

use fsdp_flat::{LocalShard, ShardedTensor, storage};
use fsdp_layout::TensorBox;
use fsdp_nn::ShardedParameters;
use fsdp_state::{StateDict, StateValue};
use serde::{Deserialize, Serialize};

use crate::CheckpointError;
use crate::incoming::Incoming;

/// Where a value sits: in the model dict, or in the optimizer's state under a parameter.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(crate) fqn: String,
    pub(crate) state: Option<String>,
}

impl Place {
    /// A name for messages and for the order of moves.
    pub(crate) fn name(&self) -> String {
        match &self.state {
            Some(name) => format!("state.{}.{name}", self.fqn),
            None => self.fqn.clone(),
        }
    }
}

/// A value that is yet to come from other ranks. Until then a placeholder sits in its place, which has shape, dtype and
/// boxes of what will come, but no memory.
#[derive(Debug)]
pub(crate) struct Coming {
    pub(crate) place: Place,
    /// What this rank has of it.
    pub(crate) tensor: ShardedTensor,
    /// What this rank wants of it.
    pub(crate) boxes: Vec<TensorBox>,
}

/// A tensor of zeros in these boxes, all of them views of one element.
pub(crate) fn placeholder(
    dtype: candle_core::DType,
    shape: &[usize],
    boxes: &[TensorBox],
) -> Result<ShardedTensor, CheckpointError> {
    let zero = storage::zeros(&[], dtype)?;
    let shard = |bounds: &TensorBox| -> Result<LocalShard, CheckpointError> {
        Ok(LocalShard { bounds: bounds.clone(), tensor: zero.broadcast_as(bounds.sizes.as_slice())? })
    };
    let shards = boxes.iter().map(shard).collect::<Result<_, _>>()?;
    Ok(ShardedTensor::new(dtype, shape.to_vec(), shards)?)
}

/// Announces every sharded value that the model knows and of whose boxes some rank lacks a part.
/// Collectives: one agreement, one object all-gather, and if values have to move another agreement.
pub(crate) fn announce(
    parameters: &ShardedParameters,
    mut state: Incoming,
) -> Result<(Incoming, Vec<Coming>), CheckpointError> {
    let group = parameters.group();
    let wanting = group.agree("set_state_dict", wanting(parameters, &state))?;
    let places: BTreeSet<Place> = group.all_gather_object(&wanting)?.into_iter().flatten().collect();
    if places.is_empty() {
        return Ok((state, Vec::new()));
    }
    let announced = places.into_iter().map(|place| announce_one(parameters, &mut state, place)).collect();
    let announced = group.agree("set_state_dict", announced)?;
    Ok((state, announced))
}

fn announce_one(parameters: &ShardedParameters, state: &mut Incoming, place: Place) -> Result<Coming, CheckpointError> {
    let (shape, boxes) = (parameters.shape(&place.fqn)?, parameters.boxes(&place.fqn)?);
    let slot = slot(state, &place);
    let tensor = match &slot {
        Some(StateValue::Sharded(tensor)) => tensor.clone(),
        Some(StateValue::Tensor(tensor)) => ShardedTensor::from_whole(tensor),
        _ => ShardedTensor::new(parameters.dtype(&place.fqn)?, shape.to_vec(), Vec::new())?,
    };
    if let Some(slot) = slot {
        *slot = placeholder(tensor.dtype(), shape, &boxes)?.into();
    }
    Ok(Coming { place, tensor, boxes })
}

/// What sits at a place.
pub(crate) fn slot<'a>(state: &'a mut Incoming, place: &Place) -> Option<&'a mut StateValue> {
    match &place.state {
        None => state.model.as_mut()?.get_mut(&place.fqn),
        Some(name) => match state.optim.as_mut()?.get_mut("state")? {
            StateValue::Dict(states) => match states.get_mut(&place.fqn)? {
                StateValue::Dict(state) => state.get_mut(name),
                _ => None,
            },
            _ => None,
        },
    }
}

/// The sharded values on this rank that do not cover its boxes.
fn wanting(parameters: &ShardedParameters, state: &Incoming) -> Result<Vec<Place>, CheckpointError> {
    let mut places = Vec::new();
    let mut visit = |fqn: &str, name: Option<&str>, value: &StateValue| -> Result<(), CheckpointError> {
        let StateValue::Sharded(tensor) = value else { return Ok(()) };
        let fits = parameters.contains(fqn) && tensor.shape() == parameters.shape(fqn)?;
        if fits && !parameters.boxes(fqn)?.iter().all(|wanted| tensor.covers(wanted)) {
            places.push(Place { fqn: fqn.to_owned(), state: name.map(str::to_owned) });
        }
        Ok(())
    };
    let model = state.model.as_ref();
    for (fqn, value) in model.into_iter().flatten().filter(|(fqn, _)| counts(parameters, model, fqn)) {
        visit(fqn, None, value)?;
    }
    let states = state.optim.as_ref().and_then(|optim| optim.dict("state"));
    for (fqn, state) in states.into_iter().flatten().filter(|(fqn, _)| counts(parameters, states, fqn)) {
        for (name, value) in state.as_dict().into_iter().flatten() {
            visit(fqn, Some(name), value)?;
        }
    }
    Ok(places)
}

/// Whether what a dict has under this name is what a tied parameter is loaded from: under the parameter's first name,
/// or the first of its aliases that the dict has.
pub(crate) fn counts(parameters: &ShardedParameters, state: Option<&StateDict>, name: &str) -> bool {
    let fqn = parameters.canonical_fqn(name);
    let has = |name: &str| state.is_some_and(|state| state.contains_key(name));
    let mut aliases = parameters.aliases().iter().filter(|(_, target)| *target == fqn).map(|(alias, _)| alias);
    fqn == name || !has(fqn) && aliases.find(|alias| has(alias)).is_some_and(|alias| alias == name)
}
