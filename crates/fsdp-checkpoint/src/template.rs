//! What to ask of a checkpoint for an optimizer: the state that was saved, in the boxes that this rank owns.

use std::path::Path;

use fsdp_dcp::metadata::Entry;
use fsdp_dcp::reader::CheckpointReader;
use fsdp_flat::ShardedTensor;
use fsdp_layout::{KeyPath, PathPart, PlainValue};
use fsdp_nn::Optimizer;
use fsdp_state::{FlatStateDict, StateDict, StateValue, unflatten_state_dict};

use crate::CheckpointError;

/// A template for [`load`](crate::load()) of the optimizer state that a checkpoint holds under `prefix` (the keys that
/// lead to `{"state", "param_groups"}`), for the parameters of `optimizers`.
///
/// Unlike a state dict of the live optimizer, it has exactly what was saved: state that begins with the first step
/// (momentum), groups of whatever number. Tensors shaped like their parameter are asked for in this rank's boxes.
/// No communication.
///
/// # Errors
/// A checkpoint that cannot be read.
pub fn optimizer_template(
    path: &Path,
    prefix: &[&str],
    optimizers: &[&Optimizer],
) -> Result<StateDict, CheckpointError> {
    let reader = CheckpointReader::open(path)?;
    let metadata = reader.metadata();
    let mut flat = FlatStateDict::default();
    for (fqn, entry) in &metadata.entries {
        let Some(path) = metadata.planner_data.as_ref().and_then(|paths| paths.get(fqn)) else { continue };
        let Some(inner) = strip(path, prefix) else { continue };
        let value = match entry {
            Entry::Bytes(_) => StateValue::Plain(PlainValue::None),
            Entry::Tensor(tensor) => {
                let dtype = tensor.properties.dtype;
                match owner(inner, optimizers) {
                    Some((optimizer, name)) if optimizer.parameters().shape(name)? == tensor.shape => {
                        let boxes = optimizer.parameters().boxes(name)?;
                        let dtype = fsdp_flat::dtype::to_candle(dtype)?;
                        StateValue::Sharded(ShardedTensor::zeros(dtype, &tensor.shape, &boxes)?)
                    }
                    _ => crate::load::empty_tensor(&tensor.shape, dtype)?,
                }
            }
        };
        flat.values.insert(fqn.clone(), value);
        flat.paths.insert(fqn.clone(), KeyPath(inner.to_vec()));
    }
    let mut template = unflatten_state_dict(flat)?;
    // A never-stepped optimizer saves no state, and an empty dict leaves no trace in a checkpoint.
    if !template.is_empty() && !template.contains_key("state") {
        template.insert("state", StateDict::new());
    }
    Ok(template)
}

/// The path below `prefix`.
fn strip<'a>(path: &'a KeyPath, prefix: &[&str]) -> Option<&'a [PathPart]> {
    let (start, inner) = path.0.split_at_checked(prefix.len())?;
    let same = start.iter().zip(prefix).all(|(part, key)| matches!(part, PathPart::Key(part) if part == key));
    (same && !inner.is_empty()).then_some(inner)
}

/// The optimizer that holds the parameter of `state.<fqn>.<name>`, and the parameter's name.
fn owner<'a>(inner: &'a [PathPart], optimizers: &[&'a Optimizer]) -> Option<(&'a Optimizer, &'a str)> {
    match inner {
        [PathPart::Key(state), PathPart::Key(fqn), PathPart::Key(_), ..] if state == "state" => {
            let optimizer = optimizers.iter().find(|optimizer| optimizer.holds(fqn))?;
            Some((optimizer, fqn))
        }
        _ => None,
    }
}
