//! The optimizer state that a source holds, sorted by the parameters that it belongs to.

use std::collections::{HashMap, HashSet};

use fsdp_layout::{KeyPath, PathPart};
use fsdp_state::engine::{Plan, Values, Wanted};
use fsdp_state::{Leaf, Schema, StateDict, StateError, StateValue, set_element};
use indexmap::IndexMap;

use super::entry::{Saved, SavedEntries};
use super::groups::{SavedGroup, SavedGroups, check_named, plain, read_param_groups};
use super::names::{OptimKey, names_that_count};
use super::{OptimStateError, OptimStateKeyType};
use crate::optimizer::Optimizer;
use crate::parameters::ShardedParameters;
use crate::{NnError, Result};

/// Optimizer state of a source, by the model's names.
pub(crate) struct SavedOptim {
    /// State of parameters of the model, by their own names.
    pub(crate) states: HashMap<String, SavedEntries>,
    /// The groups, by the model's names.
    pub(crate) groups: SavedGroups,
    /// State under keys that are no parameter's: its path below `state`, and its position.
    pub(crate) user_state: Vec<(KeyPath, usize)>,
    /// Keys that name nothing that is known here.
    pub(crate) unexpected: Vec<String>,
}

/// The parts of the state under one key: entry, path inside it, and position in the source.
type Parts = Vec<(String, Vec<PathPart>, usize)>;

impl SavedOptim {
    /// Sorts the parts of a source that belong to optimizers. `rename` turns names of the source into the model's.
    ///
    /// # Errors
    /// Malformed groups; groups and states by ids; containers where a tensor or a plain value should be; two names that
    /// `rename` makes one.
    pub(crate) fn new(
        parameters: &ShardedParameters,
        optimizers: &[&Optimizer],
        schema: &Schema,
        values: &Values,
        parts: &[(OptimKey, usize)],
        rename: &dyn Fn(&str) -> String,
    ) -> Result<Self> {
        let mut by_key: IndexMap<String, Parts> = IndexMap::new();
        let mut groups = StateDict::new();
        let mut flat_groups: IndexMap<String, SavedGroup> = IndexMap::new();
        // Two names of the source must not become one, neither in the state nor in the groups.
        let mut names = Names { rename, of: HashMap::new() };
        let mut names_of_groups = Names { rename, of: HashMap::new() };
        // A source lists single leaves: those of one parameter, and those of all groups, are put together first.
        for (key, position) in parts {
            let value = || values.get(position).cloned().unwrap_or_else(|| describe(schema, *position));
            match key {
                OptimKey::State { key, entry, inside } => {
                    by_key.entry(names.rename(key)?).or_default().push((entry.clone(), inside.clone(), *position));
                }
                OptimKey::Group(inside) => {
                    let mut path = vec![PathPart::Key("param_groups".to_owned())];
                    path.extend(inside.iter().cloned());
                    set_element(&mut groups, &KeyPath(path), value())?;
                }
                OptimKey::FlatGroup { key, name } => {
                    let fqn = names_of_groups.rename(key)?;
                    let key_type = Some(OptimStateKeyType::ParamName);
                    let empty = SavedGroup { hyperparameters: Vec::new(), params: vec![fqn.clone()], key_type };
                    let value = value();
                    let unexpected =
                        || NnError::UnexpectedState { fqn: key.clone(), name: name.clone(), kind: value.kind() };
                    let hyperparameter = (name.clone(), plain(&value).ok_or_else(unexpected)?);
                    flat_groups.entry(fqn).or_insert(empty).hyperparameters.push(hyperparameter);
                }
            }
        }
        // Nested groups are read as a whole; the flat form has a group for each parameter instead.
        let mut groups = read_param_groups(&groups)?;
        check_named(&groups)?;
        for name in groups.iter_mut().flat_map(|group| &mut group.params) {
            *name = names_of_groups.rename(name)?;
        }
        groups.extend(flat_groups.into_values());
        let groups = SavedGroups::new(groups, |name| parameters.canonical_fqn(name).to_owned());
        let mut saved = SavedOptim { states: HashMap::new(), groups, user_state: Vec::new(), unexpected: Vec::new() };
        // A tied parameter may be there under several names, of which one counts.
        let names = by_key.keys().map(String::as_str).filter(|name| parameters.contains(name));
        let chosen = names_that_count(parameters, names);
        let is_chosen: HashSet<String> = chosen.into_values().map(str::to_owned).collect();
        // The order of the source keeps what is reported the same on every rank.
        for (name, parts) in by_key {
            if !parameters.contains(&name) {
                saved.add_unknown(&name, parts);
            } else if is_chosen.contains(&name) {
                let fqn = parameters.canonical_fqn(&name).to_owned();
                let optimizer = optimizers.iter().find(|optimizer| optimizer.holds(&fqn));
                let entries = entries(parameters, optimizer.copied(), &fqn, &name, schema, values, parts)?;
                saved.states.insert(fqn, entries);
            }
        }
        Ok(saved)
    }

    /// Returns `true` if some state of a parameter was saved.
    pub(crate) fn has_state(&self, fqn: &str) -> bool {
        self.states.get(fqn).is_some_and(|entries| !entries.is_empty())
    }

    /// Takes state under a key that is no parameter's of this model: a user's, or that of another model's parameter,
    /// which some group names.
    fn add_unknown(&mut self, name: &str, parts: Parts) {
        if self.groups.names(name) {
            self.unexpected.push(name.to_owned());
            return;
        }
        for (entry, inside, position) in parts {
            let mut path = vec![PathPart::Key(name.to_owned())];
            if !entry.is_empty() {
                path.push(PathPart::Key(entry));
            }
            path.extend(inside);
            self.user_state.push((KeyPath(path), position));
        }
    }

    /// Returns `true` if there is no group and no state of a parameter.
    pub(crate) fn is_empty(&self) -> bool {
        self.states.is_empty() && self.groups.is_empty()
    }
}

/// Sorts the wanted tensors of a plan, and their places, by the schema, whose order is that of all ranks.
pub(crate) fn sort_by_schema<P>(plan: &mut Plan, places: &mut Vec<P>) {
    let mut sorted: Vec<(Wanted, P)> = plan.wanted.drain(..).zip(places.drain(..)).collect();
    sorted.sort_by_key(|(wanted, _)| wanted.position);
    (plan.wanted, *places) = sorted.into_iter().unzip();
}

/// The names that a source's names become in the model: no two may become one.
struct Names<'a> {
    rename: &'a dyn Fn(&str) -> String,
    /// The source's name of each of the model's.
    of: HashMap<String, String>,
}

impl Names<'_> {
    /// Returns the model's name, and refuses one that another name has become.
    fn rename(&mut self, key: &str) -> Result<String> {
        let name = (self.rename)(key);
        match self.of.get(&name) {
            Some(other) if other != key => Err(StateError::DuplicateKey { key: name }.into()),
            Some(_) => Ok(name),
            None => {
                self.of.insert(name.clone(), key.to_owned());
                Ok(name)
            }
        }
    }
}

/// Returns one parameter's entries: the tensors to move, and the scalars and plain values, which are here.
fn entries(
    parameters: &ShardedParameters,
    optimizer: Option<&Optimizer>,
    fqn: &str,
    name: &str,
    schema: &Schema,
    values: &Values,
    parts: Parts,
) -> Result<SavedEntries> {
    let is_scalar_parameter = parameters.shape(fqn)?.is_empty();
    let mut entries = SavedEntries::new();
    let mut nested = StateDict::new();
    for (entry, inside, position) in parts {
        if entry.is_empty() {
            let kind = values.get(&position).map_or("tensor", StateValue::kind);
            let expected = format!("the state of parameter `{name}` is a {kind}");
            return Err(OptimStateError::InvalidKeys { keys: vec![name.to_owned()], expected }.into());
        }
        let Some((_, leaf)) = schema.get(position) else { continue };
        // A container is put together from its leaves.
        if !inside.is_empty() {
            let mut path = vec![PathPart::Key(entry)];
            path.extend(inside);
            let value = values.get(&position).cloned().unwrap_or_else(|| describe(schema, position));
            set_element(&mut nested, &KeyPath(path), value)?;
            continue;
        }
        let is_like = optimizer.is_some_and(|optimizer| optimizer.is_like_parameter(fqn, &entry));
        let is_tensor = match leaf {
            Leaf::Plain => false,
            Leaf::Whole { shape, .. } => !shape.is_empty() || is_scalar_parameter && is_like,
            Leaf::Sharded { .. } => true,
        };
        let is_scalar_state = optimizer.is_some_and(|optimizer| optimizer.is_scalar_state(fqn, &entry));
        let saved = match (leaf.tensor(), values.get(&position)) {
            // A step may have been saved with a dimension of one element.
            (_, Some(value)) if !is_tensor || is_scalar_state => Saved::Scalar(value.clone()),
            (Some((dtype, shape)), _) => Saved::Tensor { position, dtype, shape: shape.to_vec() },
            (None, _) => continue,
        };
        entries.insert(entry, saved);
    }
    for (entry, value) in nested {
        let (fqn, name, kind) = (fqn.to_owned(), entry.clone(), value.kind());
        let value = plain(&value).ok_or(NnError::UnexpectedState { fqn, name, kind })?;
        entries.insert(entry, Saved::Scalar(value.into()));
    }
    entries.sort_keys();
    Ok(entries)
}

/// Returns a stand-in for a tensor that is no small value, so that messages can name its kind.
fn describe(schema: &Schema, position: usize) -> StateValue {
    let kind = schema.get(position).map_or_else(String::new, |(_, leaf)| leaf.to_string());
    StateValue::Tuple(vec![kind.into()])
}
