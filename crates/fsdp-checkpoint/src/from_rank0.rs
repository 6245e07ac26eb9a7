//! Bringing rank 0's full state dict to every rank's boxes, whatever the other ranks have.

use candle_core::Device;
use fsdp_comm::ProcessGroup;
use fsdp_flat::ShardedTensor;
use fsdp_layout::{DType, KeyPath, PathPart, PlainValue};
use fsdp_nn::ShardedParameters;
use fsdp_state::{LoadOptions, StateDict, StateValue, broadcast_state_dict, set_element, traverse_state_dict};
use serde::{Deserialize, Serialize};

use crate::CheckpointError;

/// A leaf of rank 0's dict, without its elements.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Leaf {
    Tensor(DType, Vec<usize>),
    Plain(PlainValue),
}

/// The value of rank 0 on every rank: tensors shaped like the parameter that they belong to in this rank's boxes,
/// others whole. `owner` finds the parameter in a path. Every rank gets the same keys.
///
/// Collectives: one object broadcast of the structure, one broadcast for each tensor.
pub(crate) fn from_rank0(
    parameters: &ShardedParameters,
    state: &StateDict,
    owner: impl Fn(&KeyPath) -> Option<String>,
) -> Result<StateDict, CheckpointError> {
    let group = parameters.group();
    let structure = group.agree("broadcast_from_rank0", structure(group, state))?;
    let structure = group.broadcast_object(Some(&structure).filter(|_| group.rank() == 0), 0)?;
    let template = group.agree("broadcast_from_rank0", template(parameters, &structure, owner))?;
    let full = Some(state).filter(|_| group.rank() == 0);
    let options = LoadOptions { strict: true, device: None };
    Ok(broadcast_state_dict(group, full, &template, 0, &options)?.0)
}

fn structure(group: &ProcessGroup, state: &StateDict) -> Result<Vec<(KeyPath, Leaf)>, CheckpointError> {
    let mut leaves = Vec::new();
    if group.rank() != 0 {
        return Ok(leaves);
    }
    traverse_state_dict(state, |path, value| -> Result<(), CheckpointError> {
        let leaf = match value {
            StateValue::Tensor(tensor) => Leaf::Tensor(fsdp_flat::dtype::of(tensor)?, tensor.dims().to_vec()),
            StateValue::Raw(tensor) => Leaf::Tensor(tensor.dtype(), tensor.shape().to_vec()),
            StateValue::Plain(value) => Leaf::Plain(value.clone()),
            StateValue::Dict(_) => return Ok(()),
            other => {
                return Err(CheckpointError::NotFull { fqn: path.flat_key(), kind: other.kind() });
            }
        };
        leaves.push((path.clone(), leaf));
        Ok(())
    })?;
    Ok(leaves)
}

fn template(
    parameters: &ShardedParameters,
    structure: &[(KeyPath, Leaf)],
    owner: impl Fn(&KeyPath) -> Option<String>,
) -> Result<StateDict, CheckpointError> {
    let mut template = StateDict::new();
    // Dicts that hold nothing leave no leaf, but an optimizer's `state` must be there.
    for (path, leaf) in structure {
        let value = match leaf {
            Leaf::Plain(value) => StateValue::Plain(value.clone()),
            Leaf::Tensor(dtype, shape) => {
                let boxes = match owner(path) {
                    Some(fqn) if parameters.contains(&fqn) && parameters.shape(&fqn)? == shape => {
                        Some(parameters.boxes(&fqn)?)
                    }
                    _ => None,
                };
                match (boxes, fsdp_flat::dtype::to_candle(*dtype)) {
                    (Some(boxes), Ok(dtype)) => StateValue::Sharded(ShardedTensor::zeros(dtype, shape, &boxes)?),
                    _ => crate::load::empty_tensor(shape, *dtype)?,
                }
            }
        };
        set_element(&mut template, path, value)?;
    }
    Ok(template)
}

/// The parameter of a path in a model state dict.
pub(crate) fn model_owner(path: &KeyPath) -> Option<String> {
    match path.0.as_slice() {
        [PathPart::Key(fqn)] => Some(fqn.clone()),
        _ => None,
    }
}

/// The parameter of a path in an optimizer state dict.
pub(crate) fn optim_owner(path: &KeyPath) -> Option<String> {
    match path.0.as_slice() {
        [PathPart::Key(state), PathPart::Key(fqn), PathPart::Key(_)] if state == "state" => Some(fqn.clone()),
        _ => None,
    }
}

/// The device of full tensors with `cpu_offload`.
pub(crate) const CPU: Device = Device::Cpu;
