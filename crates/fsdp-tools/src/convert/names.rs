//! Names of parameters that stand in values: those in the `params` of an optimizer's groups. When
//! the keys of a checkpoint change, these names have to change with them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Bound;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Change, Checkpoint};
use fsdp_layout::PlainValue;
use indexmap::{IndexMap, IndexSet};

/// The new keys of each old key: none for one that is left out, several for one that is split.
pub(crate) type NewKeysOf<'m> = BTreeMap<&'m str, Vec<&'m str>>;

/// The values in which names of parameters change with the keys.
#[derive(Debug, Default)]
pub(crate) struct NamesInValues {
    /// The values with the new names, by their old keys.
    pub(crate) values: IndexMap<String, PlainValue>,
    /// The lines that tell what was renamed, and what could not be.
    pub(crate) changes: Vec<Change>,
}

/// The part of a key below which the groups of an optimizer lie.
const GROUPS: &str = "param_groups";

/// The items of a group that hold names of parameters; torch has had the second since 2.6.
const NAME_LISTS: [&str; 2] = ["params", "param_names"];

impl NamesInValues {
    /// Finds the values of a checkpoint in which names of parameters stand, and renames them as the
    /// keys of the parameters' state are renamed, or as those of the parameters themselves where
    /// there is no state.
    ///
    /// # Errors
    /// A value that cannot be read.
    pub(crate) fn find(
        source: &dyn Checkpoint,
        new_keys: &NewKeysOf<'_>,
    ) -> Result<Self, FileError> {
        let mut names = NamesInValues::default();
        if new_keys
            .iter()
            .all(|(old, new)| new.iter().all(|new| new == old))
        {
            return Ok(names);
        }
        // Step 1: read the values in which names may stand, optimizer by optimizer.
        let mut optimizers: IndexMap<&str, OptimizerNames<'_>> = IndexMap::new();
        for (&fqn, new) in new_keys {
            let Some((prefix, rest)) = split_at_groups(fqn) else {
                continue;
            };
            let Some(new_key) = new.first() else {
                continue;
            };
            let optimizer = optimizers.entry(prefix).or_insert_with(|| OptimizerNames {
                prefix,
                new_prefix: split_at_groups(new_key).map_or(prefix, |(prefix, _)| prefix),
                ..OptimizerNames::default()
            });
            // Flattened groups have the names in their keys: `param_groups.layer.weight.lr`.
            if let Some((name, leaf)) = rest.rsplit_once('.')
                && !rest.starts_with(|first: char| first.is_ascii_digit())
            {
                optimizer.names.insert(name.to_owned());
                let new_name = split_at_groups(new_key)
                    .and_then(|(_, rest)| rest.strip_suffix(leaf)?.strip_suffix('.'));
                optimizer.names_in_groups.insert(name, new_name);
            }
            if source.metadata().tensor(fqn).is_some() || !may_hold_names(rest) {
                continue;
            }
            match source.read_value(fqn) {
                Ok(mut value) => {
                    change_names(rest, &mut value, &mut |name| {
                        optimizer.names.insert(name.clone());
                    });
                    optimizer.values.push((fqn, rest, value));
                }
                // An opaque value is copied as it is, or left out.
                Err(error) if error.opaque_type().is_some() => {}
                Err(error) => return Err(error),
            }
        }
        // Step 2: rename them.
        let prefixes: HashSet<&str> = optimizers.keys().copied().collect();
        let mut stale = IndexSet::new();
        for optimizer in optimizers.values() {
            let model = optimizer.find_model(new_keys, &prefixes);
            let mut new_names = IndexMap::new();
            for name in &optimizer.names {
                let new_name = optimizer.new_name(name, model.as_deref(), new_keys);
                let name_now = new_name.name.as_deref().unwrap_or(name);
                let group_name = optimizer.names_in_groups.get(name.as_str());
                let is_group_stale = group_name.is_some_and(|found| *found != Some(name_now));
                if new_name.is_stale || is_group_stale {
                    stale.insert(name.clone());
                }
                new_names.insert(name.as_str(), new_name.name);
            }
            for (fqn, rest, value) in &optimizer.values {
                let mut renamed = value.clone();
                change_names(rest, &mut renamed, &mut |name| {
                    if let Some(new_name) = &new_names[name.as_str()] {
                        name.clone_from(new_name);
                    }
                });
                if !renamed.same_bits(value) {
                    names.values.insert((*fqn).to_owned(), renamed);
                }
            }
        }
        // Step 3: tell both.
        let keys = names.values.keys().cloned().collect();
        names.changes.extend(Change::new(
            "value",
            "got the new names of parameters",
            keys,
        ));
        names.changes.extend(Change::new(
            "parameter",
            "kept the old name in the optimizer, though the model's key was renamed (give a \
             `--rename` for the optimizer's keys too)",
            stale.into_iter().collect(),
        ));
        Ok(names)
    }
}

/// The names of parameters in the groups of one optimizer.
#[derive(Default)]
struct OptimizerNames<'m> {
    /// The keys of the optimizer begin with this, which is empty or ends with a dot.
    prefix: &'m str,
    /// The new keys begin with this.
    new_prefix: &'m str,
    names: IndexSet<String>,
    /// The new names in the keys of flattened groups, by the old ones.
    names_in_groups: HashMap<&'m str, Option<&'m str>>,
    /// The values with names: key, the part of it below the groups, value.
    values: Vec<(&'m str, &'m str, PlainValue)>,
}

/// The new name of a parameter.
struct NewName {
    /// `None` if the name stays.
    name: Option<String>,
    /// `true` if it stays although the model's key of the parameter was renamed.
    is_stale: bool,
}

impl OptimizerNames<'_> {
    /// Returns what stands before the names in the keys of the model: the shortest text with which
    /// each of them is a key outside of optimizers. `None` if there is none.
    fn find_model(&self, new_keys: &NewKeysOf<'_>, prefixes: &HashSet<&str>) -> Option<String> {
        let first_name = self.names.first()?;
        let state_prefixes: Vec<String> = prefixes
            .iter()
            .map(|prefix| format!("{prefix}state."))
            .collect();
        let mut model: Option<&str> = None;
        for fqn in new_keys.keys() {
            let Some(start) = fqn.strip_suffix(first_name.as_str()) else {
                continue;
            };
            let is_of_optimizer = || {
                state_prefixes
                    .iter()
                    .any(|prefix| fqn.starts_with(prefix.as_str()))
            };
            if (start.is_empty() || start.ends_with('.'))
                && model.is_none_or(|model| start.len() < model.len())
                && !is_of_optimizer()
                && self
                    .names
                    .iter()
                    .all(|name| new_keys.contains_key(format!("{start}{name}").as_str()))
            {
                model = Some(start);
            }
        }
        model.map(str::to_owned)
    }

    /// Returns the new name of a parameter, where `model` stands before its name in the model's
    /// keys.
    fn new_name(&self, name: &str, model: Option<&str>, new_keys: &NewKeysOf<'_>) -> NewName {
        let by_state = self.new_name_by_state(name, new_keys);
        let model_key = model.map(|model| (model, format!("{model}{name}")));
        let new_model_keys = model_key
            .as_ref()
            .and_then(|(_, key)| new_keys.get(key.as_str()));
        // A key that is left out says nothing, and one that is split has no new name.
        let by_model = match (&model_key, new_model_keys.map(Vec::as_slice)) {
            // A copy leaves the key as it is.
            (Some((_, key)), Some(new)) if new.contains(&key.as_str()) => Some(name.to_owned()),
            (Some((model, _)), Some([new_key])) => new_name_by_model(name, model, new_key),
            _ => None,
        };
        let is_model_renamed = match (&model_key, new_model_keys) {
            (Some(_), Some(new)) => !new.is_empty() && by_model.as_deref() != Some(name),
            _ => false,
        };
        let new_name = by_state.or(by_model).filter(|new_name| new_name != name);
        NewName {
            is_stale: is_model_renamed && new_name.is_none(),
            name: new_name,
        }
    }

    /// Returns the name that stands in the new keys of a parameter's state; `None` if there is no
    /// state, or no name in all of its keys.
    fn new_name_by_state(&self, name: &str, new_keys: &NewKeysOf<'_>) -> Option<String> {
        let start = format!("{}state.{name}.", self.prefix);
        let mut found: Option<&str> = None;
        for (fqn, new) in keys_below(new_keys, &start) {
            let [new_key] = new[..] else {
                continue;
            };
            let new_name = new_key
                .strip_suffix(&fqn[start.len() - 1..])?
                .strip_prefix(self.new_prefix)?
                .strip_prefix("state.")?;
            if found.is_some_and(|found| found != new_name) {
                return None;
            }
            found = Some(new_name);
        }
        found.map(str::to_owned)
    }
}

/// Returns the new name of a parameter by the new key in its model; `None` if it cannot be told
/// where the name begins in that.
fn new_name_by_model(name: &str, model: &str, new_key: &str) -> Option<String> {
    if let Some(start) = new_key.strip_suffix(name)
        && (start.is_empty() || start.ends_with('.'))
    {
        return Some(name.to_owned());
    }
    let new_name = new_key.strip_prefix(model)?;
    (!new_name.is_empty()).then(|| new_name.to_owned())
}

/// Returns the keys that begin with a text, and their new ones.
fn keys_below<'m>(
    new_keys: &'m NewKeysOf<'m>,
    start: &str,
) -> impl Iterator<Item = (&'m str, &'m Vec<&'m str>)> {
    new_keys
        .range::<str, _>((Bound::Included(start), Bound::Unbounded))
        .take_while(move |(fqn, _)| fqn.starts_with(start))
        .map(|(fqn, new)| (*fqn, new))
}

/// Splits `optim.param_groups.0.lr` into `optim.`, with its dot, and `0.lr`. Returns `None` for a
/// key without `param_groups`.
fn split_at_groups(fqn: &str) -> Option<(&str, &str)> {
    let mut start = 0;
    for part in fqn.split('.') {
        let end = start + part.len();
        if part == GROUPS {
            return Some((&fqn[..start], fqn[end..].trim_start_matches('.')));
        }
        start = end + 1;
    }
    None
}

/// Returns `true` for the groups, one group, a list of names in a group, and a name in that list.
fn may_hold_names(rest: &str) -> bool {
    let is_group = rest.is_empty() || rest.starts_with(|first: char| first.is_ascii_digit());
    let parts: Vec<&str> = rest.split('.').collect();
    is_group && parts.len() <= 3 && parts.get(1).is_none_or(|part| NAME_LISTS.contains(part))
}

/// Calls `change` with each name of a parameter in a value, which lies at `rest` below the groups.
fn change_names(rest: &str, value: &mut PlainValue, change: &mut dyn FnMut(&mut String)) {
    match value {
        PlainValue::Str(name) if rest.contains('.') => change(name),
        PlainValue::List(items) | PlainValue::Tuple(items) => {
            let place = if rest.is_empty() { "0" } else { rest };
            items
                .iter_mut()
                .for_each(|item| change_names(place, item, change));
        }
        PlainValue::Dict(items) if !rest.contains('.') => {
            for (key, item) in items {
                if let Some(key) = key.as_str()
                    && NAME_LISTS.contains(&key)
                {
                    change_names("0.params", item, change);
                }
            }
        }
        _ => {}
    }
}
