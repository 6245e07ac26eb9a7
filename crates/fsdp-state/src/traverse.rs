//! Walking a nested state dict, and reaching into it by path.

use std::collections::HashMap;

use fsdp_layout::{KeyPath, MAX_DEPTH, PathPart, PlainValue};

use crate::error::StateError;
use crate::state_dict::{StateDict, StateValue};

/// The most elements of a list that is built from paths. Without it a checkpoint's metadata could
/// ask for a list of 2^60 gaps.
pub(crate) const MAX_LIST_LENGTH: usize = 1 << 20;

/// Visits the leaves depth-first in container order, with their paths. torch's
/// `traverse_state_dict`.
///
/// Dicts always open, and an empty one has no leaves. A list opens if it directly holds a tensor, a
/// dict, or a list that opens; else it is one leaf. A tuple is always one leaf, with any tensors in
/// it.
///
/// # Errors
/// The visitor's first.
///
/// ```
/// use fsdp_state::{StateDict, StateError, traverse_state_dict};
/// let mut inner = StateDict::new();
/// inner.insert("lr", 0.1);
/// let mut state = StateDict::new();
/// state.insert("optim", inner);
/// let mut keys = Vec::new();
/// traverse_state_dict(&state, |path, _| {
///     keys.push(path.flat_key());
///     Ok::<(), StateError>(())
/// })?;
/// assert_eq!(keys, ["optim.lr"]);
/// # Ok::<(), StateError>(())
/// ```
pub fn traverse_state_dict<'a, E>(
    state: &'a StateDict,
    mut visit: impl FnMut(&KeyPath, &'a StateValue) -> Result<(), E>,
) -> Result<(), E> {
    walk_dict(state, &mut KeyPath::default(), &is_container, &mut visit)
}

/// Returns every tensor and plain value with its path, depth-first in container order; all
/// containers are opened.
pub(crate) fn leaves(state: &StateDict) -> Vec<(KeyPath, &StateValue)> {
    let mut leaves = Vec::new();
    let Ok(()) = walk_dict(
        state,
        &mut KeyPath::default(),
        &|_| true,
        &mut |path: &KeyPath, value| {
            leaves.push((path.clone(), value));
            Ok::<(), std::convert::Infallible>(())
        },
    );
    leaves
}

/// Returns `true` if a traversal by torch's rule goes into this value.
fn is_container(value: &StateValue) -> bool {
    match value {
        StateValue::Dict(_) => true,
        StateValue::List(list) => list
            .iter()
            .any(|element| element.is_tensor() || is_container(element)),
        _ => false,
    }
}

/// Calls `visit` with each leaf of a dict at `path`, and with the leaf's path. Containers that
/// `is_container` refuses count as leaves.
fn walk_dict<'a, E>(
    dict: &'a StateDict,
    path: &mut KeyPath,
    is_container: &impl Fn(&StateValue) -> bool,
    visit: &mut impl FnMut(&KeyPath, &'a StateValue) -> Result<(), E>,
) -> Result<(), E> {
    for (key, value) in dict {
        path.0.push(PathPart::Key(key.clone()));
        walk_value(value, path, is_container, visit)?;
        path.0.pop();
    }
    Ok(())
}

/// Walks through a value at `path`, as [`walk_dict`] does.
fn walk_value<'a, E>(
    value: &'a StateValue,
    path: &mut KeyPath,
    is_container: &impl Fn(&StateValue) -> bool,
    visit: &mut impl FnMut(&KeyPath, &'a StateValue) -> Result<(), E>,
) -> Result<(), E> {
    match value {
        StateValue::Dict(dict) if is_container(value) => walk_dict(dict, path, is_container, visit),
        StateValue::List(list) | StateValue::Tuple(list) if is_container(value) => {
            for (index, value) in list.iter().enumerate() {
                path.0.push(PathPart::Index(index));
                walk_value(value, path, is_container, visit)?;
                path.0.pop();
            }
            Ok(())
        }
        leaf => visit(path, leaf),
    }
}

/// Maps every tensor and plain value of a state dict, depth-first in container order, to what `map`
/// returns for it. Dicts stay dicts, lists stay lists, tuples stay tuples. torch's
/// `_iterate_state_dict`, with one function for all kinds of leaves.
///
/// This function itself communicates nothing.
///
/// # Errors
/// The first of `map`, with which the iteration ends.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_state::{StateDict, StateError, StateValue, iterate_state_dict};
/// let mut state = StateDict::new();
/// state.insert("weight", Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?);
/// state.insert("step", 3i64);
/// let half = iterate_state_dict(&state, |_, value| match value {
///     StateValue::Tensor(tensor) => Ok(tensor.to_dtype(DType::BF16)?.into()),
///     other => Ok(other.clone()),
/// })?;
/// assert_eq!(half.get("weight").and_then(|weight| weight.as_tensor()).map(Tensor::dtype), Some(DType::BF16));
/// # Ok::<(), StateError>(())
/// ```
pub fn iterate_state_dict(
    state: &StateDict,
    mut map: impl FnMut(&KeyPath, &StateValue) -> Result<StateValue, StateError>,
) -> Result<StateDict, StateError> {
    let mut mapped = state.clone();
    for (path, value) in leaves(state) {
        replace_element(&mut mapped, &path, map(&path, value)?);
    }
    Ok(mapped)
}

/// Returns the value at a path, through dicts, lists and tuples; `None` if the path leads nowhere.
/// torch's `get_element`.
///
/// A [`StateValue::Plain`] value is not entered: use [`PlainValue`] for what is inside it.
///
/// ```
/// use fsdp_layout::{KeyPath, PathPart};
/// use fsdp_state::{StateDict, get_element};
/// let state: StateDict = [("a", [("b", 1.0.into())].into_iter().collect::<StateDict>().into())].into_iter().collect();
/// let path = KeyPath(vec![PathPart::Key("a".into()), PathPart::Key("b".into())]);
/// assert!(get_element(&state, &path).is_some());
/// ```
#[must_use]
pub fn get_element<'a>(state: &'a StateDict, path: &KeyPath) -> Option<&'a StateValue> {
    let (first_part, later_parts) = path.0.split_first()?;
    let PathPart::Key(first_key) = first_part else {
        return None;
    };
    // Follow the path as long as its parts are of the kind of container that is there.
    later_parts
        .iter()
        .try_fold(state.get(first_key)?, |value, part| match (part, value) {
            (PathPart::Key(key), StateValue::Dict(dict)) => dict.get(key),
            (PathPart::Index(index), StateValue::List(list) | StateValue::Tuple(list)) => {
                list.get(*index)
            }
            _ => None,
        })
}

/// Returns the value at a path, like [`get_element`], to change it.
#[must_use]
pub fn get_element_mut<'a>(state: &'a mut StateDict, path: &KeyPath) -> Option<&'a mut StateValue> {
    let (first_part, later_parts) = path.0.split_first()?;
    let PathPart::Key(first_key) = first_part else {
        return None;
    };
    later_parts
        .iter()
        .try_fold(state.get_mut(first_key)?, |value, part| {
            match (part, value) {
                (PathPart::Key(key), StateValue::Dict(dict)) => dict.get_mut(key),
                (PathPart::Index(index), StateValue::List(list) | StateValue::Tuple(list)) => {
                    list.get_mut(*index)
                }
                _ => None,
            }
        })
}

/// Puts a value in the place of the one at a path, which the dict has.
pub(crate) fn replace_element(state: &mut StateDict, path: &KeyPath, value: StateValue) {
    *get_element_mut(state, path).expect("the path is that of a value of the dict") = value;
}

/// Puts a value at a path, and makes the dicts and lists on the way that are not there, or that are
/// `None` or an empty plain container. A list that is too short is filled up with `None`. torch's
/// `set_element`.
///
/// # Errors
/// [`StateError::WrongContainer`] if the path is empty or begins with an index, leads through
/// something that is no container or one of another kind, or has an index of 2^20 or more.
/// [`StateError::TooDeep`] if it has 200 parts or more.
/// The dict is unchanged then, except for containers that were made on the way.
///
/// ```
/// use fsdp_layout::{KeyPath, PathPart};
/// use fsdp_state::{StateDict, get_element, set_element};
/// let path = KeyPath(vec![PathPart::Key("a".into()), PathPart::Index(2)]);
/// let mut state = StateDict::new();
/// set_element(&mut state, &path, 7i64)?;
/// assert_eq!(get_element(&state, &path).and_then(|value| value.as_plain()?.as_int()), Some(7));
/// # Ok::<(), fsdp_state::StateError>(())
/// ```
pub fn set_element(
    state: &mut StateDict,
    path: &KeyPath,
    value: impl Into<StateValue>,
) -> Result<(), StateError> {
    check_depth(path)?;
    match path.0.as_slice() {
        [PathPart::Key(first_key), rest @ ..] => set_below(
            entry_or_insert(state, first_key, rest),
            rest,
            value.into(),
            path,
        ),
        _ => Err(StateError::WrongContainer {
            path: path.flat_key(),
            expected: "dict",
        }),
    }
}

/// Refuses a path of too many parts: a checkpoint can ask for any number.
fn check_depth(path: &KeyPath) -> Result<(), StateError> {
    let depth = path.0.len();
    if depth < MAX_DEPTH {
        return Ok(());
    }
    let beginning = KeyPath(path.0[..3].to_vec());
    Err(StateError::TooDeep {
        path: beginning.flat_key(),
        depth,
    })
}

/// Checks that no path is too deep, and that lists which are made of these paths have about as many
/// elements as there are paths. Otherwise a few paths of a checkpoint could ask for many long lists
/// of nothing.
pub(crate) fn check_gaps<'p>(
    paths: impl Iterator<Item = &'p KeyPath> + Clone,
) -> Result<(), StateError> {
    // One long list is allowed, as `set_element` does, and beyond that an element for each part of
    // a path. Lists of lists are counted at every level.
    let max_elements = paths
        .clone()
        .map(|path| path.0.len())
        .fold(MAX_LIST_LENGTH, usize::saturating_add);
    let mut lengths: HashMap<&[PathPart], usize> = HashMap::new();
    let mut total = 0usize;
    for path in paths {
        check_depth(path)?;
        for (depth, part) in path.0.iter().enumerate() {
            let PathPart::Index(index) = part else {
                continue;
            };
            let length = lengths.entry(&path.0[..depth]).or_default();
            // An index makes its list as long as needed, so only what is added counts.
            let added_length = index.saturating_add(1).saturating_sub(*length);
            *length += added_length;
            total = total.saturating_add(added_length);
            if total > max_elements {
                return Err(StateError::WrongContainer {
                    path: path.flat_key(),
                    expected: "list without long gaps",
                });
            }
        }
    }
    Ok(())
}

/// Returns the slot of `key`. If the dict has no such key, it gets an empty container of the kind
/// that `rest` needs.
fn entry_or_insert<'a>(
    dict: &'a mut StateDict,
    key: &str,
    rest: &[PathPart],
) -> &'a mut StateValue {
    if !dict.contains_key(key) {
        dict.insert(key, container_for(rest));
    }
    dict.get_mut(key).expect("the key was inserted above")
}

/// Returns an empty value into which the rest of a path leads: a dict, a list, or a place for a
/// leaf.
fn container_for(rest: &[PathPart]) -> StateValue {
    match rest.first() {
        Some(PathPart::Key(_)) => StateValue::Dict(StateDict::new()),
        Some(PathPart::Index(_)) => StateValue::List(Vec::new()),
        None => StateValue::Plain(PlainValue::None),
    }
}

/// Returns `true` for a value that stands for nothing yet, and that a container may replace:
/// `None`, or an empty plain list or dict.
fn is_placeholder(value: &StateValue) -> bool {
    match value {
        StateValue::Plain(PlainValue::None) => true,
        StateValue::Plain(PlainValue::List(items)) => items.is_empty(),
        StateValue::Plain(PlainValue::Dict(entries)) => entries.is_empty(),
        _ => false,
    }
}

/// Sets a value below `slot`, where `rest` of the path leads. Missing containers are made.
fn set_below(
    slot: &mut StateValue,
    rest: &[PathPart],
    value: StateValue,
    path: &KeyPath,
) -> Result<(), StateError> {
    if rest.is_empty() {
        *slot = value;
        return Ok(());
    }
    // An empty plain container, as a checkpoint has it for a dict without keys, cannot hold
    // tensors.
    if is_placeholder(slot) {
        *slot = container_for(rest);
    }
    match (rest, slot) {
        ([PathPart::Key(part), rest @ ..], StateValue::Dict(dict)) => {
            set_below(entry_or_insert(dict, part, rest), rest, value, path)
        }
        ([PathPart::Index(index), rest @ ..], StateValue::List(list))
            if *index < MAX_LIST_LENGTH =>
        {
            // A list may come in any order, so its missing elements are filled in later.
            if list.len() <= *index {
                list.resize_with(*index + 1, || StateValue::Plain(PlainValue::None));
            }
            set_below(&mut list[*index], rest, value, path)
        }
        ([] | [PathPart::Key(_), ..], _) => Err(StateError::WrongContainer {
            path: path.flat_key(),
            expected: "dict",
        }),
        ([PathPart::Index(_), ..], _) => Err(StateError::WrongContainer {
            path: path.flat_key(),
            expected: "list",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Tensor};

    fn tensor() -> StateValue {
        StateValue::Tensor(Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap())
    }

    fn ints(values: &[i64]) -> StateValue {
        StateValue::List(values.iter().map(|&value| value.into()).collect())
    }

    fn keys(state: &StateDict) -> Vec<String> {
        let mut keys = Vec::new();
        traverse_state_dict(state, |path, _| {
            keys.push(path.flat_key());
            Ok::<(), StateError>(())
        })
        .unwrap();
        keys
    }

    fn path(parts: &[PathPart]) -> KeyPath {
        KeyPath(parts.to_vec())
    }

    fn key(key: &str) -> PathPart {
        PathPart::Key(key.into())
    }

    #[test]
    fn shallow_dicts_and_lists_of_numbers_are_leaves_of_their_keys() {
        let state: StateDict = [
            ("key0", 1i64.into()),
            ("key1", ints(&[1, 2])),
            ("key2", StateValue::from("a")),
        ]
        .into_iter()
        .collect();
        assert_eq!(keys(&state), ["key0", "key1", "key2"]);
    }

    #[test]
    fn nested_lists_open_only_for_tensors() {
        let list = StateValue::List(vec![
            tensor(),
            StateValue::List(vec![33i64.into(), tensor(), ints(&[44, 55])]),
            ints(&[66, 77]),
        ]);
        let state: StateDict = [("key1", list)].into_iter().collect();
        assert_eq!(
            keys(&state),
            ["key1.0", "key1.1.0", "key1.1.1", "key1.1.2", "key1.2"]
        );
        let inner = get_element(
            &state,
            &path(&[key("key1"), PathPart::Index(1), PathPart::Index(2)]),
        )
        .unwrap();
        assert!(matches!(inner, StateValue::List(list) if list.len() == 2));
    }

    #[test]
    fn dicts_always_open_even_in_lists() {
        let dict: StateDict = [("key2", 2i64.into())].into_iter().collect();
        let list = StateValue::List(vec![dict.into(), ints(&[3])]);
        let state: StateDict = [("key0", list)].into_iter().collect();
        assert_eq!(keys(&state), ["key0.0.key2", "key0.1"]);
    }

    #[test]
    fn elements_are_set_and_got_through_gaps() {
        let mut state = StateDict::new();
        let gaps = path(&[key("a"), PathPart::Index(3), key("b.c"), PathPart::Index(1)]);
        set_element(&mut state, &gaps, 5i64).unwrap();
        assert_eq!(
            get_element(&state, &gaps).and_then(|value| value.as_plain()?.as_int()),
            Some(5)
        );
        let gap = path(&[key("a"), PathPart::Index(0)]);
        assert!(matches!(
            get_element(&state, &gap),
            Some(StateValue::Plain(PlainValue::None))
        ));
        set_element(&mut state, &gap, tensor()).unwrap();
        assert!(get_element(&state, &gap).unwrap().is_tensor());
        for missing in [
            path(&[]),
            path(&[PathPart::Index(0)]),
            path(&[key("b")]),
            path(&[key("a"), PathPart::Index(9)]),
            path(&[key("a"), key("x")]),
            path(&[key("a"), PathPart::Index(0), key("x")]),
        ] {
            assert!(get_element(&state, &missing).is_none(), "{missing:?}");
        }
    }

    #[test]
    fn paths_that_nest_too_deep_are_refused_and_leave_the_dict_empty() {
        for part in [key("p"), PathPart::Index(0)] {
            let mut parts = vec![key("a")];
            parts.resize(MAX_DEPTH - 1, part.clone());
            let mut state = StateDict::new();
            set_element(&mut state, &path(&parts), 1i64).unwrap();
            parts.resize(500_000, part);
            let too_deep = path(&parts);
            let mut untouched = StateDict::new();
            for error in [
                set_element(&mut untouched, &too_deep, 1i64).unwrap_err(),
                check_gaps([&too_deep].into_iter()).unwrap_err(),
            ] {
                assert!(
                    matches!(error, StateError::TooDeep { depth: 500_000, .. }),
                    "{error}"
                );
            }
            assert!(untouched.is_empty());
        }
    }

    #[test]
    fn paths_that_contradict_the_dict_or_are_absurd_are_refused() {
        let mut state = StateDict::new();
        state.insert("a", 1i64);
        for (wrong, expected) in [
            (path(&[]), "dict"),
            (path(&[PathPart::Index(0)]), "dict"),
            (path(&[key("a"), key("b")]), "dict"),
            (path(&[key("a"), PathPart::Index(0)]), "list"),
            (path(&[key("b"), PathPart::Index(1 << 60)]), "list"),
        ] {
            let error = set_element(&mut state, &wrong, 2i64).unwrap_err();
            assert!(
                matches!(error, StateError::WrongContainer { expected: e, .. } if e == expected),
                "{error}"
            );
        }
        assert_eq!(state.plain_at(&["a"]).and_then(PlainValue::as_int), Some(1));
    }
}
