//! The optimizer state that a source holds, sorted by the parameters that it belongs to.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use fsdp_layout::{KeyPath, PathPart, PlainValue};
use fsdp_state::engine::{LoadOptions, Values};
use fsdp_state::{Schema, StateDict, StateError, StateValue, set_element};
use indexmap::IndexMap;

use super::entry::{SavedEntries, SavedValue};
use super::groups::{SavedGroup, SavedGroups, read_param_groups, to_plain};
use super::names::{OptimKey, names_that_count};
use super::{OptimStateError, OptimStateKeyType};
use crate::error::{NnError, Result, StateDictError};
use crate::model::ShardedParameters;

/// Optimizer state of a source, by the model's names.
pub(crate) struct SavedOptim {
    /// The state of the model's parameters, by their names; of a tied parameter by its first name.
    pub(crate) states: HashMap<String, SavedEntries>,
    /// The groups, by the model's names.
    pub(crate) groups: SavedGroups,
    /// State under keys that are no parameter's: its path below `state`, and its position.
    pub(crate) user_state: Vec<(KeyPath, usize)>,
    /// Keys that no parameter of the model has, though a saved group names them.
    pub(crate) unexpected: Vec<String>,
}

/// A load as its target plans it.
pub(crate) struct LoadContext<'a> {
    pub(crate) schema: &'a Schema,
    /// The small values of the source.
    pub(crate) values: &'a Values,
    pub(crate) options: &'a LoadOptions,
}

impl LoadContext<'_> {
    /// Returns the small value at a position. For a tensor, which is read later, this is a tensor
    /// without elements: it only shows that there is no plain value here.
    fn small_value(&self, position: usize) -> Result<StateValue> {
        match self.values.get(&position) {
            Some(value) => Ok(value.clone()),
            None => Ok(Tensor::zeros(0, DType::U8, &Device::Cpu)?.into()),
        }
    }
}

/// A part of the state under one key: the path below the key, and the position in the source.
type StatePart<'a> = (&'a [PathPart], usize);

impl SavedOptim {
    /// Sorts the parts of a source that belong to optimizers. `rename` turns names of the source
    /// into the model's.
    ///
    /// # Errors
    /// Malformed groups; groups and states by ids; containers where a tensor or a plain value
    /// should be; two names that `rename` makes one.
    pub(crate) fn new(
        parameters: &ShardedParameters,
        load: &LoadContext<'_>,
        parts: &[(OptimKey, usize)],
        rename: &dyn Fn(&str) -> String,
    ) -> Result<Self> {
        // A source lists single leaves: those of one parameter, and those of all groups, are
        // collected first.
        let mut parts_by_key: IndexMap<&str, Vec<StatePart<'_>>> = IndexMap::new();
        let mut nested_groups = StateDict::new();
        let mut flat_groups: IndexMap<&str, SavedGroup> = IndexMap::new();
        for (key, position) in parts {
            match key {
                OptimKey::State { key, inside } => parts_by_key
                    .entry(key)
                    .or_default()
                    .push((inside, *position)),
                OptimKey::Group(inside) => {
                    let mut path = vec![PathPart::Key("param_groups".to_owned())];
                    path.extend(inside.iter().cloned());
                    set_element(
                        &mut nested_groups,
                        &KeyPath(path),
                        load.small_value(*position)?,
                    )?;
                }
                OptimKey::FlatGroup { key, name } => {
                    let value = plain_entry(key, name, &load.small_value(*position)?)?;
                    let group = flat_groups
                        .entry(key)
                        .or_insert_with(|| SavedGroup::for_parameter(key));
                    group.hyperparameters.push((name.clone(), value));
                }
            }
        }
        // Nested groups are read as a whole; the flat form has a group for each parameter instead.
        let mut groups = read_param_groups(&nested_groups)?;
        if let Some(group) = groups
            .iter()
            .find(|group| group.key_type == Some(OptimStateKeyType::ParamId))
        {
            return Err(id_keys_error(group.params.clone()));
        }
        groups.extend(flat_groups.into_values());
        let mut sources = HashMap::new();
        for name in groups.iter_mut().flat_map(|group| &mut group.params) {
            *name = rename_uniquely(name, rename, &mut sources)?;
        }
        let mut saved = SavedOptim {
            states: HashMap::new(),
            groups: SavedGroups::new(groups, parameters),
            user_state: Vec::new(),
            unexpected: Vec::new(),
        };
        // Groups and states name the same parameters, so each has a map of its own.
        sources.clear();
        let mut renamed_parts: Vec<(String, Vec<StatePart<'_>>)> =
            Vec::with_capacity(parts_by_key.len());
        for (key, parts) in parts_by_key {
            renamed_parts.push((rename_uniquely(key, rename, &mut sources)?, parts));
        }
        // A tied parameter may have been saved under several of its names. One of them is used, and
        // the state under the others must be the same.
        let names = renamed_parts
            .iter()
            .map(|(name, _)| name.as_str())
            .filter(|name| parameters.contains(name));
        let chosen = names_that_count(parameters, names);
        let mut other_names = Vec::new();
        // Go in the order of the source, so that every rank reports the same.
        for (name, parts) in &renamed_parts {
            let fqn = parameters.canonical_fqn(name);
            if !parameters.contains(name) {
                saved.add_unknown(name, parts)?;
                continue;
            }
            let entries = collect_entries(fqn, name, load, parts)?;
            if chosen.get(fqn) == Some(&name.as_str()) {
                saved.states.insert(fqn.to_owned(), entries);
            } else {
                other_names.push((fqn, name, entries));
            }
        }
        for (fqn, name, entries) in other_names {
            let counting_name = chosen[fqn];
            let counting_entries = saved
                .states
                .get_mut(fqn)
                .expect("the name that counts has state");
            tie_entries((counting_name, counting_entries), (name, &entries))?;
        }
        Ok(saved)
    }

    /// Returns `true` if some state of a parameter was saved.
    pub(crate) fn has_state(&self, fqn: &str) -> bool {
        self.states
            .get(fqn)
            .is_some_and(|entries| !entries.is_empty())
    }

    /// Adds state under a key that no parameter of the model has. If a saved group names the key,
    /// it is a parameter of another model, and is unexpected. Otherwise it is state that a user has
    /// added, under a key that is no number.
    fn add_unknown(&mut self, name: &str, parts: &[StatePart<'_>]) -> Result<()> {
        if self.groups.positions_by_parameter.contains_key(name) {
            self.unexpected.push(name.to_owned());
            return Ok(());
        }
        if name.parse::<usize>().is_ok() {
            return Err(id_keys_error(vec![name.to_owned()]));
        }
        for (inside, position) in parts {
            let path = [PathPart::Key(name.to_owned())]
                .into_iter()
                .chain(inside.iter().cloned());
            self.user_state.push((KeyPath(path.collect()), *position));
        }
        Ok(())
    }

    /// Returns `true` if there is no group and no state of a parameter.
    pub(crate) fn is_empty(&self) -> bool {
        self.states.is_empty() && self.groups.groups.is_empty()
    }
}

/// Returns the error of keys that are ids.
fn id_keys_error(keys: Vec<String>) -> NnError {
    let expected = "these are ids, and names are needed: see `rekey_optim_state_dict`".to_owned();
    OptimStateError::InvalidKeys { keys, expected }.into()
}

/// Turns a name of a source into the model's with `rename`. `sources` has the names that have
/// become names of the model before, by these.
///
/// # Errors
/// [`StateError::DuplicateKey`] if another name of the source has become the same name.
fn rename_uniquely(
    name: &str,
    rename: &dyn Fn(&str) -> String,
    sources: &mut HashMap<String, String>,
) -> Result<String> {
    let new_name = rename(name);
    let first_source = sources
        .entry(new_name.clone())
        .or_insert_with(|| name.to_owned());
    if first_source == name {
        Ok(new_name)
    } else {
        Err(StateError::DuplicateKey { key: new_name }.into())
    }
}

/// Returns one parameter's entries: positions of tensors, which are read later, and the scalars and
/// plain values themselves.
fn collect_entries(
    fqn: &str,
    name: &str,
    load: &LoadContext<'_>,
    parts: &[StatePart<'_>],
) -> Result<SavedEntries> {
    let mut entries = SavedEntries::new();
    // A container comes as one leaf for each of its elements.
    let mut nested = StateDict::new();
    for &(path, position) in parts {
        let (_, leaf) = load
            .schema
            .get(position)
            .expect("parts are those of the schema");
        let [PathPart::Key(entry), inside @ ..] = path else {
            let kind = load
                .values
                .get(&position)
                .map_or("tensor", StateValue::kind);
            let expected = format!("the state of parameter `{name}` is a {kind}");
            return Err(OptimStateError::InvalidKeys {
                keys: vec![name.to_owned()],
                expected,
            }
            .into());
        };
        // A container is assembled from its leaves.
        if !inside.is_empty() {
            set_element(
                &mut nested,
                &KeyPath(path.to_vec()),
                load.small_value(position)?,
            )?;
            continue;
        }
        let saved_value = match (leaf.tensor(), load.values.get(&position).cloned()) {
            (Some((dtype, shape)), small) => SavedValue::Tensor {
                position,
                dtype,
                shape: shape.to_vec(),
                small,
                tied_positions: Vec::new(),
            },
            (None, Some(value)) => SavedValue::Scalar(value),
            (None, None) => continue,
        };
        entries.insert(entry.clone(), saved_value);
    }
    for (entry, value) in nested {
        let value = plain_entry(fqn, &entry, &value)?;
        entries.insert(entry, SavedValue::Scalar(value.into()));
    }
    entries.sort_keys();
    Ok(entries)
}

/// Ties the state that a parameter has under another of its names to that under the name that
/// counts: tensors are compared when they are read, and everything else here.
///
/// # Errors
/// [`StateError::TiedNamesDiffer`].
fn tie_entries(
    (name, entries): (&str, &mut SavedEntries),
    (other_name, other_entries): (&str, &SavedEntries),
) -> Result<()> {
    let error = |found: String| -> NnError {
        StateError::TiedNamesDiffer {
            first: format!("state.{name}"),
            second: format!("state.{other_name}"),
            found,
        }
        .into()
    };
    // Both are sorted.
    if !entries.keys().eq(other_entries.keys()) {
        let names: Vec<&String> = entries.keys().collect();
        let other_names: Vec<&String> = other_entries.keys().collect();
        return Err(error(format!(
            "the first has {names:?}, and the second {other_names:?}"
        )));
    }
    for ((entry, value), other_value) in entries.iter_mut().zip(other_entries.values()) {
        value.tie(other_value).map_err(|(first, second)| {
            error(format!(
                "`{entry}` of the first is {first}, and that of the second {second}"
            ))
        })?;
    }
    Ok(())
}

/// Returns an entry of a parameter, of its state or its group, that must be a plain value.
fn plain_entry(fqn: &str, name: &str, value: &StateValue) -> Result<PlainValue> {
    to_plain(value).ok_or_else(|| {
        StateDictError::UnexpectedState {
            fqn: fqn.to_owned(),
            name: name.to_owned(),
            kind: value.kind().to_owned(),
        }
        .into()
    })
}
