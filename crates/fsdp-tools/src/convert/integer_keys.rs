//! The keys of an optimizer's `state`: torch has the numbers of the parameters there, and most
//! formats only their texts. `torch.optim` ignores state under texts, and refuses to load an
//! optimizer without `state`, which most formats do not have if it is empty.

use std::collections::{HashMap, HashSet};

use fsdp_formats::checkpoint::Structure;
use fsdp_layout::PlainValue;

/// The paths of what was restored in the states of optimizers.
#[derive(Default)]
pub(super) struct Restored {
    /// Keys that became integers.
    pub(super) keys: Vec<String>,
    /// Each `state` that was added, because it was empty.
    pub(super) states: Vec<String>,
}

/// Makes integers of the keys of each `state` that are texts of numbers which the `param_groups`
/// beside it have, and adds an empty `state` where there is none.
pub(super) fn restore_optimizers(
    structure: &mut Structure,
    values: &HashMap<String, PlainValue>,
) -> Restored {
    let mut restored = Restored::default();
    restore_below(structure, "", values, &mut restored);
    restored
}

/// Does the work of [`restore_optimizers`] for one container and all containers inside of it.
/// `path` is the container's own, with a dot at its end.
fn restore_below(
    structure: &mut Structure,
    path: &str,
    values: &HashMap<String, PlainValue>,
    restored: &mut Restored,
) {
    match structure {
        Structure::Dict(items) => {
            let mut ids = HashSet::new();
            if let Some(groups) = item_at(items, "param_groups") {
                collect_ids(&items[groups].1, values, &mut ids);
            }
            if !ids.is_empty() && item_at(items, "state").is_none() {
                items.insert(0, ("state".into(), Structure::Dict(Vec::new())));
                restored.states.push(format!("{path}state"));
            }
            if let Some(state) = item_at(items, "state")
                && let Structure::Dict(entries) = &mut items[state].1
                && !entries.is_empty()
                && entries
                    .iter()
                    .all(|(key, _)| id_of_text(key).is_some_and(|id| ids.contains(&id)))
            {
                for (key, _) in entries {
                    if let Some(id) = id_of_text(key) {
                        *key = PlainValue::Int(id);
                        restored.keys.push(format!("{path}state.{id}"));
                    }
                }
            }
            for (key, item) in items {
                let text = key.key_text().unwrap_or_default();
                restore_below(item, &format!("{path}{text}."), values, restored);
            }
        }
        Structure::List(items) | Structure::Tuple(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                restore_below(item, &format!("{path}{index}."), values, restored);
            }
        }
        Structure::Leaf(_) | Structure::Module(..) => {}
    }
}

/// Returns the position of the item at a key of a dict; `None` if there is none.
fn item_at(items: &[(PlainValue, Structure)], name: &str) -> Option<usize> {
    items.iter().position(|(key, _)| key.as_str() == Some(name))
}

/// Returns the number that a key is the text of; `None` for any other key.
fn id_of_text(key: &PlainValue) -> Option<i64> {
    let text = key.as_str()?;
    let id: i64 = text.parse().ok()?;
    // `007` and `+7` are no texts of a number in Python.
    (id.to_string() == text).then_some(id)
}

/// Adds the numbers of the parameters in the groups of an optimizer.
fn collect_ids(groups: &Structure, values: &HashMap<String, PlainValue>, ids: &mut HashSet<i64>) {
    match groups {
        Structure::Leaf(fqn) => {
            if let Some(value) = values.get(fqn) {
                collect_ids_of_value(value, ids);
            }
        }
        Structure::Dict(items) => {
            if let Some(params) = item_at(items, "params") {
                collect_ids(&items[params].1, values, ids);
            }
        }
        Structure::List(items) | Structure::Tuple(items) => {
            items.iter().for_each(|item| collect_ids(item, values, ids));
        }
        Structure::Module(..) => {}
    }
}

/// Adds the numbers of the parameters in a value: groups, a group, or a list of numbers.
fn collect_ids_of_value(value: &PlainValue, ids: &mut HashSet<i64>) {
    match value {
        PlainValue::Int(id) => drop(ids.insert(*id)),
        PlainValue::List(items) | PlainValue::Tuple(items) => {
            items
                .iter()
                .for_each(|item| collect_ids_of_value(item, ids));
        }
        PlainValue::Dict(items) => {
            for (key, item) in items {
                if key.as_str() == Some("params") {
                    collect_ids_of_value(item, ids);
                }
            }
        }
        _ => {}
    }
}
