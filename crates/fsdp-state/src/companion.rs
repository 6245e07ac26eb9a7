//! Copies the values of one state dict into those of another of the same structure, its companion,
//! after checking that they fit.

use std::collections::HashSet;

use fsdp_flat::ShardedTensor;
use fsdp_layout::{KeyPath, PathPart};

use crate::memory::copy_into;
use crate::{StateDict, StateError, StateValue};

/// Checks that two dicts have the same keys, and containers of the same kind and length in them.
pub(crate) fn check_dict(
    dict: &StateDict,
    companion: &StateDict,
    path: &mut KeyPath,
) -> Result<(), StateError> {
    let (keys, others): (HashSet<&str>, HashSet<&str>) =
        (dict.keys().collect(), companion.keys().collect());
    if keys != others {
        let (found, expected) = (keys_apart(&keys, &others), keys_apart(&others, &keys));
        return Err(StateError::CompanionMismatch {
            key: path.flat_key(),
            found,
            expected,
        });
    }
    for (key, value) in dict {
        if let Some(companion) = companion.get(key) {
            path.0.push(PathPart::Key(key.clone()));
            check_value(value, companion, path)?;
            path.0.pop();
        }
    }
    Ok(())
}

/// Names the keys of one dict that another lacks, for messages.
fn keys_apart(keys: &HashSet<&str>, others: &HashSet<&str>) -> String {
    let mut only: Vec<&str> = keys.difference(others).copied().collect();
    only.sort_unstable();
    format!("dict with the keys {only:?} that the other lacks")
}

/// Checks that two values at `path` are containers of the same structure, or both no containers.
fn check_value(
    value: &StateValue,
    companion: &StateValue,
    path: &mut KeyPath,
) -> Result<(), StateError> {
    match (value, companion) {
        (StateValue::Dict(dict), StateValue::Dict(companion)) => check_dict(dict, companion, path),
        (StateValue::List(list), StateValue::List(others))
        | (StateValue::Tuple(list), StateValue::Tuple(others))
            if list.len() == others.len() =>
        {
            for (index, (value, companion)) in list.iter().zip(others).enumerate() {
                path.0.push(PathPart::Index(index));
                check_value(value, companion, path)?;
                path.0.pop();
            }
            Ok(())
        }
        (value, companion) if is_container(value) || is_container(companion) => {
            Err(StateError::CompanionMismatch {
                key: path.flat_key(),
                found: describe(value),
                expected: describe(companion),
            })
        }
        _ => Ok(()),
    }
}

const fn is_container(value: &StateValue) -> bool {
    matches!(
        value,
        StateValue::Dict(_) | StateValue::List(_) | StateValue::Tuple(_)
    )
}

/// Checks that a value can be copied into another: same kind, dtype, shape and boxes.
pub(crate) fn same_leaf(
    path: &KeyPath,
    value: &StateValue,
    companion: &StateValue,
) -> Result<(), StateError> {
    let same = match (value, companion) {
        (StateValue::Tensor(a), StateValue::Tensor(b)) => {
            a.dtype() == b.dtype() && a.dims() == b.dims()
        }
        (StateValue::Raw(a), StateValue::Raw(b)) => {
            a.dtype() == b.dtype() && a.shape() == b.shape()
        }
        (StateValue::Sharded(a), StateValue::Sharded(b)) => {
            a.dtype() == b.dtype() && a.shape() == b.shape() && a.boxes() == b.boxes()
        }
        (StateValue::Plain(_), StateValue::Plain(_)) => true,
        _ => false,
    };
    if same {
        return Ok(());
    }
    let (found, expected) = (describe(value), describe(companion));
    Err(StateError::CompanionMismatch {
        key: path.flat_key(),
        found,
        expected,
    })
}

/// Copies a value into its companion, and returns the new value of the companion.
pub(crate) fn copy_leaf(
    value: &StateValue,
    companion: &StateValue,
) -> Result<StateValue, StateError> {
    match (value, companion) {
        (StateValue::Tensor(from), StateValue::Tensor(to)) => copy_into(from, to)?,
        (StateValue::Sharded(from), StateValue::Sharded(to)) => copy_shards(from, to)?,
        (value, _) => return Ok(value.clone()),
    }
    Ok(companion.clone())
}

/// Copies the elements of a rank's boxes into those of a tensor with the same boxes.
pub(crate) fn copy_shards(from: &ShardedTensor, to: &ShardedTensor) -> Result<(), StateError> {
    from.shards()
        .iter()
        .zip(to.shards())
        .try_for_each(|(from, to)| copy_into(&from.tensor, &to.tensor))
}

/// Describes a value's kind, dtype, shape and boxes, for messages.
pub(crate) fn describe(value: &StateValue) -> String {
    match value {
        StateValue::Tensor(tensor) => format!("tensor of {:?} {:?}", tensor.dtype(), tensor.dims()),
        StateValue::Raw(tensor) => format!("raw tensor of {} {:?}", tensor.dtype(), tensor.shape()),
        StateValue::Sharded(tensor) => {
            let boxes: Vec<String> = tensor.boxes().iter().map(ToString::to_string).collect();
            format!(
                "sharded tensor of {:?} {:?} with boxes {}",
                tensor.dtype(),
                tensor.shape(),
                boxes.join(" ")
            )
        }
        StateValue::Dict(dict) => format!("dict of {} keys", dict.len()),
        StateValue::List(list) => format!("list of {} values", list.len()),
        StateValue::Tuple(list) => format!("tuple of {} values", list.len()),
        StateValue::Plain(value) => value.type_name().to_owned(),
    }
}
