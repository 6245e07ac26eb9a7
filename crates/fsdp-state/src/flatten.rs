//! Nested to flat keys and back, by the rule of torch's distributed checkpoints.
//!
//! Dicts always open, and an empty one disappears. A list opens if it directly holds a tensor, a dict, or a list that
//! opens; else it is one value. A tuple is always one value, with any tensors in it.

use fsdp_layout::{KeyPath, PathPart};
use indexmap::IndexMap;

use crate::{StateDict, StateError, StateValue};

/// Flat keys to leaves, and each key's path: DCP's `planner_data`.
#[derive(Debug, Clone, Default)]
pub struct FlatStateDict {
    /// Flat key to value, in order of appearance.
    pub values: IndexMap<String, StateValue>,
    /// Flat key to path.
    pub paths: IndexMap<String, KeyPath>,
}

/// Flattens a nested state dict. Tensors are shared, not copied.
///
/// # Errors
/// [`StateError::DuplicateKey`] if two values would get one key (`{"a.b": …, "a": {"b": …}}`).
///
/// ```
/// use fsdp_state::{StateDict, flatten_state_dict};
/// let mut inner = StateDict::new();
/// inner.insert("lr", 0.1);
/// let mut state = StateDict::new();
/// state.insert("optim", inner);
/// let flat = flatten_state_dict(&state)?;
/// assert_eq!(flat.values.keys().collect::<Vec<_>>(), ["optim.lr"]);
/// # Ok::<(), fsdp_state::StateError>(())
/// ```
pub fn flatten_state_dict(state: &StateDict) -> Result<FlatStateDict, StateError> {
    let mut flat = FlatStateDict::default();
    for (key, value) in state {
        flatten_value(&KeyPath(vec![PathPart::Key(key.clone())]), value, &mut flat)?;
    }
    Ok(flat)
}

fn flatten_value(path: &KeyPath, value: &StateValue, flat: &mut FlatStateDict) -> Result<(), StateError> {
    match value {
        StateValue::Dict(dict) => {
            for (key, value) in dict {
                flatten_value(&path.child(PathPart::Key(key.clone())), value, flat)?;
            }
            Ok(())
        }
        StateValue::List(list) if list.iter().any(opens_list) => {
            for (index, value) in list.iter().enumerate() {
                flatten_value(&path.child(PathPart::Index(index)), value, flat)?;
            }
            Ok(())
        }
        leaf => {
            let key = path.flat_key();
            if flat.values.insert(key.clone(), leaf.clone()).is_some() {
                return Err(StateError::DuplicateKey { key });
            }
            flat.paths.insert(key, path.clone());
            Ok(())
        }
    }
}

/// Whether this element makes the list around it open.
fn opens_list(element: &StateValue) -> bool {
    match element {
        StateValue::Dict(_) => true,
        StateValue::List(list) => list.iter().any(opens_list),
        other => other.is_tensor(),
    }
}

/// Puts flat values back where their paths say. A value without a path stays at its flat key.
///
/// # Errors
/// [`StateError::WrongContainer`] if paths contradict each other.
pub fn unflatten_state_dict(flat: FlatStateDict) -> Result<StateDict, StateError> {
    let mut root = StateDict::new();
    for (key, value) in flat.values {
        match flat.paths.get(&key).map(|path| path.0.as_slice()) {
            Some([PathPart::Key(first), rest @ ..]) => set_at(entry(&mut root, first, rest), rest, value, &key)?,
            _ => {
                root.insert(key, value);
            }
        }
    }
    Ok(root)
}

/// The slot of `key`, made as the container that `rest` needs if it is not there.
fn entry<'a>(dict: &'a mut StateDict, key: &str, rest: &[PathPart]) -> &'a mut StateValue {
    if !dict.contains_key(key) {
        dict.insert(key, container_for(rest));
    }
    match dict.get_mut(key) {
        Some(slot) => slot,
        None => unreachable!("the key was inserted above"),
    }
}

fn container_for(rest: &[PathPart]) -> StateValue {
    match rest.first() {
        Some(PathPart::Key(_)) => StateValue::Dict(StateDict::new()),
        Some(PathPart::Index(_)) => StateValue::List(Vec::new()),
        None => StateValue::Plain(fsdp_layout::PlainValue::None),
    }
}

/// How far an index may lie past the end of a list that is being rebuilt: a checkpoint's metadata must not be able
/// to ask for a list of 2^60 gaps.
pub const MAX_LIST_LENGTH: usize = 1 << 20;

fn set_at(slot: &mut StateValue, path: &[PathPart], value: StateValue, key: &str) -> Result<(), StateError> {
    match (path, slot) {
        ([], slot) => {
            *slot = value;
            Ok(())
        }
        ([PathPart::Key(part), rest @ ..], StateValue::Dict(dict)) => set_at(entry(dict, part, rest), rest, value, key),
        ([PathPart::Index(index), rest @ ..], StateValue::List(list)) if *index < MAX_LIST_LENGTH => {
            if list.len() <= *index {
                list.resize_with(*index + 1, || StateValue::Plain(fsdp_layout::PlainValue::None));
            }
            if matches!(list[*index], StateValue::Plain(fsdp_layout::PlainValue::None)) {
                list[*index] = container_for(rest);
            }
            set_at(&mut list[*index], rest, value, key)
        }
        ([PathPart::Key(_), ..], _) => Err(StateError::WrongContainer { path: key.to_owned(), expected: "dict" }),
        ([PathPart::Index(_), ..], _) => Err(StateError::WrongContainer { path: key.to_owned(), expected: "list" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor};
    use fsdp_layout::PlainValue;

    fn tensor() -> StateValue {
        StateValue::Tensor(Tensor::zeros(1, candle_core::DType::F32, &Device::Cpu).unwrap())
    }

    fn int(value: i64) -> StateValue {
        value.into()
    }

    #[test]
    fn lists_open_only_for_tensors_and_dicts() {
        // key1 = [t, [33, t, [44, 55]], [66, 77]], as torch's traversal test has it.
        let plain_list = |values: &[i64]| StateValue::List(values.iter().map(|&v| int(v)).collect());
        let key1 = StateValue::List(vec![
            tensor(),
            StateValue::List(vec![int(33), tensor(), plain_list(&[44, 55])]),
            plain_list(&[66, 77]),
        ]);
        let mut state = StateDict::new();
        state.insert("key1", key1);
        state.insert("empty", StateDict::new());
        state.insert("tuple", StateValue::Tuple(vec![tensor()]));
        state.insert("scalars", PlainValue::List(vec![PlainValue::Int(1)]));
        let flat = flatten_state_dict(&state).unwrap();
        let keys: Vec<&str> = flat.values.keys().map(String::as_str).collect();
        assert_eq!(keys, ["key1.0", "key1.1.0", "key1.1.1", "key1.1.2", "key1.2", "tuple", "scalars"]);
        let back = unflatten_state_dict(flat).unwrap();
        let Some(StateValue::List(list)) = back.get("key1") else { panic!("key1 is a list") };
        assert_eq!(list.len(), 3);
        assert!(matches!(&list[1], StateValue::List(inner) if inner.len() == 3 && inner[1].is_tensor()));
    }

    #[test]
    fn one_flat_key_for_two_values_is_refused() {
        let mut inner = StateDict::new();
        inner.insert("b", 1i64);
        let mut state = StateDict::new();
        state.insert("a", inner);
        state.insert("a.b", 2i64);
        assert!(matches!(flatten_state_dict(&state), Err(StateError::DuplicateKey { key }) if key == "a.b"));
    }

    #[test]
    fn absurd_or_contradicting_paths_are_refused() {
        let flat = |paths: &[(&str, Vec<PathPart>)]| FlatStateDict {
            values: paths.iter().map(|(key, _)| ((*key).to_owned(), int(1))).collect(),
            paths: paths.iter().map(|(key, parts)| ((*key).to_owned(), KeyPath(parts.clone()))).collect(),
        };
        let key = |key: &str| PathPart::Key(key.into());
        let far = flat(&[("a", vec![key("a"), PathPart::Index(1 << 60)])]);
        assert!(matches!(unflatten_state_dict(far), Err(StateError::WrongContainer { .. })));
        let both = flat(&[("a.b", vec![key("a"), key("b")]), ("a.0", vec![key("a"), PathPart::Index(0)])]);
        assert!(matches!(unflatten_state_dict(both), Err(StateError::WrongContainer { expected: "list", .. })));
    }
}
