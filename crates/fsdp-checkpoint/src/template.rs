//! What to ask of a checkpoint for an optimizer: the state that was saved, in the boxes that this rank owns.

use fsdp_dcp::checkpoint::Checkpoint;
use fsdp_dcp::metadata::Entry;
use fsdp_flat::ShardedTensor;
use fsdp_layout::{KeyPath, PathPart, PlainValue};
use fsdp_nn::Optimizer;
use fsdp_state::{FlatStateDict, StateDict, StateValue, unflatten_state_dict};

use crate::CheckpointError;

/// A template for [`load`](crate::load()) or [`read_template`](crate::load::read_template) of the optimizer state that
/// a checkpoint holds under `prefix` (the keys that lead to `{"state", "param_groups"}`), for the parameters of
/// `optimizers`.
///
/// Unlike a state dict of the live optimizer, it has exactly what was saved: state that begins with the first step
/// (momentum), groups of whatever number. Tensors shaped like their parameter are asked for in this rank's boxes.
/// In formats of flat keys (safetensors), the parameters' names tell where the parts of a key end. No communication.
///
/// # Errors
/// Dtypes that candle does not have, for sharded state.
pub fn optimizer_template(
    checkpoint: &dyn Checkpoint,
    prefix: &[&str],
    optimizers: &[&Optimizer],
) -> Result<StateDict, CheckpointError> {
    let metadata = checkpoint.metadata();
    let flat_prefix: String = prefix.iter().map(|key| format!("{key}.")).collect();
    let mut flat = FlatStateDict::default();
    for (fqn, entry) in &metadata.entries {
        let inner = match &metadata.planner_data {
            Some(paths) => paths.get(fqn).and_then(|path| strip(path, prefix)).map(<[PathPart]>::to_vec),
            None => fqn.strip_prefix(&flat_prefix).and_then(|key| parse(key, optimizers)),
        };
        let Some(inner) = inner else { continue };
        let value = match entry {
            Entry::Bytes(_) => StateValue::Plain(PlainValue::None),
            Entry::Tensor(tensor) => {
                let dtype = tensor.properties.dtype;
                match owner(&inner, optimizers) {
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
        flat.paths.insert(fqn.clone(), KeyPath(inner));
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

/// The parts of a flat key: `state.<fqn>.<name>` or `param_groups.<index>.<hyperparameter>`, where both names have dots.
fn parse(key: &str, optimizers: &[&Optimizer]) -> Option<Vec<PathPart>> {
    let part = |key: &str| PathPart::Key(key.to_owned());
    if let Some(state) = key.strip_prefix("state.") {
        // The longest name, if one parameter's begins another's.
        let fqns = optimizers.iter().flat_map(|optimizer| optimizer.fqns());
        let names = fqns.filter_map(|fqn| Some((fqn, state.strip_prefix(fqn)?.strip_prefix('.')?)));
        let (fqn, name) = names.max_by_key(|(fqn, _)| fqn.len())?;
        return Some(vec![part("state"), part(fqn), part(name)]);
    }
    let (index, hyperparameter) = key.strip_prefix("param_groups.")?.split_once('.')?;
    Some(vec![part("param_groups"), PathPart::Index(index.parse().ok()?), part(hyperparameter)])
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
