//! Names of state: those of tied parameters, and the keys of model and optimizer state in a state
//! dict.

use std::collections::HashMap;

use fsdp_layout::PathPart;
use fsdp_state::StateDict;
use serde::{Deserialize, Serialize};

use super::OptimStateError;
use crate::error::{NnError, Result};
use crate::model::ShardedParameters;

/// The keys by which an optimizer state dict names parameters: torch's `OptimStateKeyType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OptimStateKeyType {
    /// Their names in the model.
    ParamName,
    /// Their positions in the optimizer, over all groups: 0, 1, …
    ParamId,
}

/// Returns the type of the keys of a state dict, ids or names; `None` if the dict is empty. The
/// groups determine the type. Without groups, keys that are numbers are ids.
pub(crate) fn find_key_type(
    states: &StateDict,
    mut group_key_types: impl Iterator<Item = OptimStateKeyType>,
) -> Result<Option<OptimStateKeyType>> {
    let number_count = states
        .keys()
        .filter(|key| key.parse::<usize>().is_ok())
        .count();
    let group_key_type = match group_key_types.next() {
        Some(first) if group_key_types.any(|other| other != first) => {
            return Err(invalid_keys_error(
                states,
                "some groups have names, others ids",
            ));
        }
        first => first,
    };
    // A name may be a number. So only the groups can say that numbers are names.
    match group_key_type {
        Some(OptimStateKeyType::ParamId) if number_count < states.len() => {
            Err(invalid_keys_error(states, "the groups have ids"))
        }
        Some(_) => Ok(group_key_type),
        None if states.is_empty() => Ok(None),
        None if number_count == states.len() => Ok(Some(OptimStateKeyType::ParamId)),
        None if number_count == 0 => Ok(Some(OptimStateKeyType::ParamName)),
        None => Err(invalid_keys_error(states, "some are names, others ids")),
    }
}

/// Returns the error for keys that are not what they should be, with some of them.
fn invalid_keys_error(states: &StateDict, expected: &str) -> NnError {
    let error = OptimStateError::InvalidKeys {
        keys: states.keys().take(8).map(str::to_owned).collect(),
        expected: expected.to_owned(),
    };
    error.into()
}

/// Returns which of several names counts, for each parameter that some of them name: parameter to
/// name.
///
/// This is the one rule for tied names: state under the parameter's own name counts, else under the
/// first of its aliases, in the order of their declaration, that a dict has. A load compares the
/// state under its other names with it, and refuses another.
pub(crate) fn names_that_count<'n>(
    parameters: &'n ShardedParameters,
    names: impl Iterator<Item = &'n str>,
) -> HashMap<&'n str, &'n str> {
    // The parameter's own name is none of the aliases, and `None` comes before any position among
    // them.
    let aliases = parameters.aliases();
    let mut chosen: HashMap<&str, &str> = HashMap::new();
    for name in names {
        let best_name = chosen.entry(parameters.canonical_fqn(name)).or_insert(name);
        if aliases.get_index_of(name) < aliases.get_index_of(*best_name) {
            *best_name = name;
        }
    }
    chosen
}

/// The place of a value in the state of optimizers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum OptimKey {
    /// A part of the state of a parameter, or under a user's key: the path below that key, which
    /// begins with an entry.
    State { key: String, inside: Vec<PathPart> },
    /// A part of `param_groups`: the path below it.
    Group(Vec<PathPart>),
    /// A hyperparameter of one parameter, in the flat form.
    FlatGroup { key: String, name: String },
}

impl OptimKey {
    /// Reads the place of a value from its path below the optimizers' state. In formats of flat
    /// keys, the whole path is one text joined by dots, and the parameters' names tell where its
    /// parts end; `has_numbered_groups` tells whether groups have numbers there
    /// ([`has_numbered_groups`]). Returns `None` for a path that optimizers do not have.
    pub(crate) fn read(
        path: &[PathPart],
        has_numbered_groups: bool,
        is_parameter: &dyn Fn(&str) -> bool,
    ) -> Option<Self> {
        match path {
            [PathPart::Key(state), PathPart::Key(key), inside @ ..] if state == "state" => {
                Some(OptimKey::State {
                    key: key.clone(),
                    inside: inside.to_vec(),
                })
            }
            [PathPart::Key(groups), rest @ ..] if groups == "param_groups" => {
                Some(OptimKey::Group(rest.to_vec()))
            }
            [PathPart::Key(flat), inside @ ..] => {
                if let Some(rest) = flat.strip_prefix("state.") {
                    let (key, entry) = split_at_parameter(rest, is_parameter)?;
                    let inside = [PathPart::Key(entry)]
                        .into_iter()
                        .chain(inside.iter().cloned())
                        .collect();
                    return Some(OptimKey::State { key, inside });
                }
                let rest = flat.strip_prefix("param_groups.")?;
                // torch's flat form writes groups by parameter, whose name may begin with a number,
                // or be one. Formats of flat keys write nested groups by number.
                if !has_numbered_groups
                    && let Some((key, name)) = split_at_parameter(rest, is_parameter)
                {
                    return Some(OptimKey::FlatGroup { key, name });
                }
                let (index, name) = rest.split_once('.')?;
                Some(OptimKey::Group(vec![
                    PathPart::Index(index.parse().ok()?),
                    PathPart::Key(name.to_owned()),
                ]))
            }
            _ => None,
        }
    }
}

/// Returns `true` if one of these flat keys, below the optimizers' state, lists the parameters of a
/// group that has a number. In torch's flat form, groups are written by parameter, and no list is.
pub(crate) fn has_numbered_groups(mut keys: impl Iterator<Item = String>) -> bool {
    keys.any(|key| {
        let group = key.strip_prefix("param_groups.");
        let number = group.and_then(|group| group.split_once(".params"));
        number.is_some_and(|(number, rest)| {
            (rest.is_empty() || rest.starts_with('.')) && number.parse::<usize>().is_ok()
        })
    })
}

/// Splits `<parameter>.<name>` at the end of the longest parameter's name; `None` if no parameter's
/// name leads the key.
fn split_at_parameter(key: &str, is_parameter: &dyn Fn(&str) -> bool) -> Option<(String, String)> {
    // Both parts may have dots in them.
    let mut dots = key.match_indices('.').map(|(dot, _)| dot).rev();
    let dot = dots.find(|&dot| is_parameter(&key[..dot]))?;
    Some((key[..dot].to_owned(), key[dot + 1..].to_owned()))
}
