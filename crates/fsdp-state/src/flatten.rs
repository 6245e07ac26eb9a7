//! Nested to flat keys and back: by the rule of torch's distributed checkpoints, which leaves
//! tuples and lists of plain values whole, and by that of its state-dict utilities, which opens
//! every container.

use fsdp_layout::{KeyPath, PathPart, PlainValue};
use indexmap::IndexMap;

use crate::error::StateError;
use crate::state_dict::{StateDict, StateValue};
use crate::traverse::{check_gaps, leaves, set_element, traverse_state_dict};

/// Flat keys to leaves, and each key's path: DCP's `planner_data`.
#[derive(Debug, Clone, Default)]
pub struct FlatStateDict {
    /// Flat key to value, in order of appearance.
    pub values: IndexMap<String, StateValue>,
    /// Flat key to path.
    pub paths: IndexMap<String, KeyPath>,
}

impl FlatStateDict {
    /// Adds a leaf under its flat key.
    fn insert(&mut self, path: &KeyPath, value: StateValue) -> Result<(), StateError> {
        let key = path.flat_key();
        if self.values.insert(key.clone(), value).is_some() {
            return Err(StateError::DuplicateKey { key });
        }
        self.paths.insert(key, path.clone());
        Ok(())
    }
}

/// Flattens a nested state dict by the rule of [`traverse_state_dict`]. Tensors are shared, not
/// copied. torch's `checkpoint._nested_dict.flatten_state_dict`.
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
    traverse_state_dict(state, |path, value| flat.insert(path, value.clone()))?;
    Ok(flat)
}

/// Flattens a nested state dict and opens every dict, list and tuple, also those of plain values;
/// sets and tensors stay whole. Empty containers disappear. Tensors are shared, not copied. torch's
/// `_state_dict_utils._flatten_state_dict`, which optimizers' flat state dicts are made with.
///
/// [`unflatten_state_dict`] brings it back; tuples come back as lists, and lists of plain values as
/// [`StateValue::List`].
///
/// # Errors
/// [`StateError::DuplicateKey`] if two values would get one key, also by way of a dict key that is
/// not text (`{1: …, "1": …}`).
///
/// ```
/// use fsdp_layout::PlainValue;
/// use fsdp_state::{StateDict, flatten_containers};
/// let mut group = StateDict::new();
/// group.insert("betas", PlainValue::Tuple(vec![0.9.into(), 0.999.into()]));
/// let flat = flatten_containers(&group)?;
/// assert_eq!(flat.values.keys().collect::<Vec<_>>(), ["betas.0", "betas.1"]);
/// # Ok::<(), fsdp_state::StateError>(())
/// ```
pub fn flatten_containers(state: &StateDict) -> Result<FlatStateDict, StateError> {
    let mut flat = FlatStateDict::default();
    for (path, value) in leaves(state) {
        match value {
            // A plain value may be a container too.
            StateValue::Plain(value) => add_plain_leaves(&path, value, &mut flat)?,
            tensor => flat.insert(&path, tensor.clone())?,
        }
    }
    Ok(flat)
}

/// Adds the leaves of a plain value at `path` to `flat`.
fn add_plain_leaves(
    path: &KeyPath,
    value: &PlainValue,
    flat: &mut FlatStateDict,
) -> Result<(), StateError> {
    match value {
        PlainValue::List(list) | PlainValue::Tuple(list) => {
            for (index, value) in list.iter().enumerate() {
                add_plain_leaves(&path.child(PathPart::Index(index)), value, flat)?;
            }
        }
        PlainValue::Dict(entries) => {
            for (key, value) in entries {
                // Any key needs a text here. Python's own text for a key of a kind that has none
                // is not known, so it gets the one for programmers.
                let key = key.key_text().unwrap_or_else(|| format!("{key:?}"));
                add_plain_leaves(&path.child(PathPart::Key(key)), value, flat)?;
            }
        }
        leaf => flat.insert(path, leaf.clone().into())?,
    }
    Ok(())
}

/// Puts flat values back where their paths say. A value without a path stays at its flat key.
/// torch's `unflatten_state_dict` and `_unflatten_state_dict`.
///
/// # Errors
/// [`StateError::WrongContainer`] if paths contradict each other.
///
/// ```
/// use fsdp_state::{StateDict, flatten_state_dict, unflatten_state_dict};
/// let state: StateDict = [("a", [("b", 1.0.into())].into_iter().collect::<StateDict>().into())].into_iter().collect();
/// let flat = flatten_state_dict(&state)?;
/// assert!(flat.values.contains_key("a.b"));
/// assert!(unflatten_state_dict(flat)?.dict("a").unwrap().contains_key("b"));
/// # Ok::<(), fsdp_state::StateError>(())
/// ```
pub fn unflatten_state_dict(flat: FlatStateDict) -> Result<StateDict, StateError> {
    check_gaps(flat.values.keys().filter_map(|key| flat.paths.get(key)))?;
    let mut root = StateDict::new();
    for (key, value) in flat.values {
        // Values that were added to a flat dict by hand have no path. A path that begins with an
        // index cannot be followed in a dict.
        match flat.paths.get(&key) {
            Some(path) if matches!(path.0.first(), Some(PathPart::Key(_))) => {
                set_element(&mut root, path, value)?
            }
            _ => {
                root.insert(key, value);
            }
        }
    }
    Ok(root)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traverse::MAX_LIST_LENGTH;
    use candle_core::{Device, Tensor};

    fn tensor() -> StateValue {
        StateValue::Tensor(Tensor::zeros(1, candle_core::DType::F32, &Device::Cpu).unwrap())
    }

    fn int(value: i64) -> StateValue {
        value.into()
    }

    #[test]
    fn paths_cannot_ask_for_many_long_lists_of_nothing() {
        let unflatten_lists = |lists: usize, index: usize| {
            let mut flat = FlatStateDict::default();
            for list in 0..lists {
                let key = format!("{list}");
                flat.values.insert(key.clone(), int(1));
                flat.paths.insert(
                    key.clone(),
                    KeyPath(vec![PathPart::Key(key), PathPart::Index(index)]),
                );
            }
            unflatten_state_dict(flat)
        };
        assert!(unflatten_lists(1, MAX_LIST_LENGTH - 1).is_ok());
        assert!(unflatten_lists(2000, 100).is_ok());
        assert!(matches!(
            unflatten_lists(3, MAX_LIST_LENGTH / 2),
            Err(StateError::WrongContainer { .. })
        ));
        assert!(matches!(
            unflatten_lists(1000, MAX_LIST_LENGTH - 1),
            Err(StateError::WrongContainer { .. })
        ));
    }

    fn keys(flat: &FlatStateDict) -> Vec<&str> {
        flat.values.keys().map(String::as_str).collect()
    }

    /// Makes a dict with every container, empty ones too.
    fn mixed() -> StateDict {
        // key1 = [t, [33, t, [44, 55]], [66, 77]], as torch's traversal test has it.
        let plain_list =
            |values: &[i64]| StateValue::List(values.iter().map(|&value| int(value)).collect());
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
        state
    }

    #[test]
    fn lists_open_only_for_tensors_and_dicts() {
        let flat = flatten_state_dict(&mixed()).unwrap();
        assert_eq!(
            keys(&flat),
            [
                "key1.0", "key1.1.0", "key1.1.1", "key1.1.2", "key1.2", "tuple", "scalars"
            ]
        );
        let back = unflatten_state_dict(flat).unwrap();
        let Some(StateValue::List(list)) = back.get("key1") else {
            panic!("key1 is a list")
        };
        assert_eq!(list.len(), 3);
        assert!(
            matches!(&list[1], StateValue::List(inner) if inner.len() == 3 && inner[1].is_tensor())
        );
        assert!(matches!(back.get("tuple"), Some(StateValue::Tuple(_))));
    }

    #[test]
    fn all_containers_open_and_tuples_come_back_as_lists() {
        let mut state = mixed();
        let by_number = PlainValue::Dict(vec![(
            PlainValue::Int(7),
            PlainValue::Tuple(vec![true.into()]),
        )]);
        state.insert("dict", by_number);
        let flat = flatten_containers(&state).unwrap();
        assert_eq!(
            keys(&flat),
            [
                "key1.0",
                "key1.1.0",
                "key1.1.1",
                "key1.1.2.0",
                "key1.1.2.1",
                "key1.2.0",
                "key1.2.1",
                "tuple.0",
                "scalars.0",
                "dict.7.0"
            ]
        );
        let back = unflatten_state_dict(flat).unwrap();
        assert!(matches!(back.get("tuple"), Some(StateValue::List(list)) if list[0].is_tensor()));
        assert!(
            matches!(back.get("scalars"), Some(StateValue::List(list)) if list[0].as_plain().is_some())
        );
        assert!(matches!(
            back.dict("dict").unwrap().get("7"),
            Some(StateValue::List(_))
        ));
        assert!(!back.contains_key("empty"));
    }

    #[test]
    fn one_flat_key_for_two_values_is_refused() {
        let mut inner = StateDict::new();
        inner.insert("b", 1i64);
        let mut state = StateDict::new();
        state.insert("a", inner);
        state.insert("a.b", 2i64);
        for flat in [flatten_state_dict(&state), flatten_containers(&state)] {
            assert!(matches!(flat, Err(StateError::DuplicateKey { key }) if key == "a.b"));
        }
        let mut state = StateDict::new();
        state.insert(
            "d",
            PlainValue::Dict(vec![(1i64.into(), 1i64.into()), ("1".into(), 2i64.into())]),
        );
        assert!(
            matches!(flatten_containers(&state), Err(StateError::DuplicateKey { key }) if key == "d.1")
        );
    }

    #[test]
    fn absurd_or_contradicting_paths_are_refused() {
        let flat = |paths: &[(&str, Vec<PathPart>)]| FlatStateDict {
            values: paths
                .iter()
                .map(|(key, _)| ((*key).to_owned(), int(1)))
                .collect(),
            paths: paths
                .iter()
                .map(|(key, parts)| ((*key).to_owned(), KeyPath(parts.clone())))
                .collect(),
        };
        let key = |key: &str| PathPart::Key(key.into());
        let far = flat(&[("a", vec![key("a"), PathPart::Index(1 << 60)])]);
        assert!(matches!(
            unflatten_state_dict(far),
            Err(StateError::WrongContainer { .. })
        ));
        let both = flat(&[
            ("a.b", vec![key("a"), key("b")]),
            ("a.0", vec![key("a"), PathPart::Index(0)]),
        ]);
        assert!(matches!(
            unflatten_state_dict(both),
            Err(StateError::WrongContainer {
                expected: "list",
                ..
            })
        ));
    }
}
