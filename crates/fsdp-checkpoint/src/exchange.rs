//! Moving sharded values to the ranks that need them, before they are checked and loaded.

use std::collections::BTreeSet;

use fsdp_flat::ShardedTensor;
use fsdp_layout::TensorBox;
use fsdp_nn::ShardedParameters;
use fsdp_state::{Reshard, StateDict, StateValue, reshard_sharded_tensors};
use serde::{Deserialize, Serialize};

use crate::CheckpointError;
use crate::incoming::Incoming;

/// Where a sharded value sits: in the model dict, or in the optimizer's state under a parameter.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Place {
    fqn: String,
    state: Option<String>,
}

/// Gives every sharded value that the model knows the boxes that this rank owns, where some rank lacks a part of them.
/// Collectives: one object all-gather; if values have to move, one exchange for all of them.
pub(crate) fn localize(parameters: &ShardedParameters, mut state: Incoming) -> Result<Incoming, CheckpointError> {
    let group = parameters.group();
    let wanting = group.agree("set_state_dict", wanting(parameters, &state))?;
    let places: BTreeSet<Place> = group.all_gather_object(&wanting)?.into_iter().flatten().collect();
    if places.is_empty() {
        return Ok(state);
    }
    let held = group.agree("set_state_dict", held(parameters, &mut state, &places))?;
    let moves: Vec<Reshard<'_>> =
        held.iter().map(|(name, tensor, boxes)| Reshard { name: name.as_str(), tensor, boxes }).collect();
    let moved = reshard_sharded_tensors(group, &moves)?;
    for (place, tensor) in places.iter().zip(moved) {
        if let Some(slot) = slot(&mut state, place) {
            *slot = StateValue::Sharded(tensor);
        }
    }
    Ok(state)
}

/// A value that moves: its name, what this rank has of it, the boxes that it wants.
type Held = (String, ShardedTensor, Vec<TensorBox>);

fn held(
    parameters: &ShardedParameters,
    state: &mut Incoming,
    places: &BTreeSet<Place>,
) -> Result<Vec<Held>, CheckpointError> {
    let mut held = Vec::with_capacity(places.len());
    for place in places {
        let shape = parameters.shape(&place.fqn)?.to_vec();
        let tensor = match slot(state, place) {
            Some(StateValue::Sharded(tensor)) => tensor.clone(),
            Some(StateValue::Tensor(tensor)) => ShardedTensor::from_whole(tensor),
            _ => ShardedTensor::new(parameters.dtype(&place.fqn)?, shape, Vec::new())?,
        };
        let name = place.state.as_ref().map_or_else(|| place.fqn.clone(), |name| format!("{}.{name}", place.fqn));
        held.push((name, tensor, parameters.boxes(&place.fqn)?));
    }
    Ok(held)
}

fn slot<'a>(state: &'a mut Incoming, place: &Place) -> Option<&'a mut StateValue> {
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
    for (fqn, value) in state.model.iter().flatten() {
        visit(fqn, None, value)?;
    }
    let states = state.optim.as_ref().and_then(|optim| optim.dict("state"));
    for (fqn, state) in states.into_iter().flat_map(StateDict::iter) {
        for (name, value) in state.as_dict().into_iter().flatten() {
            visit(fqn, Some(name), value)?;
        }
    }
    Ok(places)
}
