//! The flat keys of what a file of JSON holds.

use fsdp_layout::{KeyPath, PathPart, PlainValue};

use crate::budget::{Budget, OverBudget};
use crate::formats::structure::Structure;
use crate::limits::MAX_FLAT_VALUES;

/// The values of a JSON text, each with its place, and the containers around them.
///
/// Objects are flattened, and arrays that hold objects, as a file of torch is; one of very many
/// values, such as a long log, is one value.
pub(crate) struct FlatJson {
    pub(crate) values: Vec<(KeyPath, PlainValue)>,
    pub(crate) structure: Structure,
}

impl FlatJson {
    /// Flattens a value that was read from JSON. Its keys are charged to the budget.
    ///
    /// # Errors
    /// Keys that take more than the budget.
    pub(crate) fn new(value: PlainValue, budget: &mut Budget) -> Result<Self, OverBudget> {
        let mut values = Vec::new();
        let structure = flatten(value, &KeyPath::default(), budget, &mut values)?;
        Ok(FlatJson { values, structure })
    }
}

/// Adds what lies at and below a value, whose place is `path`, and returns its containers.
fn flatten(
    value: PlainValue,
    path: &KeyPath,
    budget: &mut Budget,
    values: &mut Vec<(KeyPath, PlainValue)>,
) -> Result<Structure, OverBudget> {
    // All of the path is copied for whatever lies there.
    let path_bytes: usize = path
        .0
        .iter()
        .map(|part| part.to_string().len() + size_of::<PathPart>())
        .sum();
    budget.charge("memory for keys", 4 * path_bytes as u64)?;
    // A file always has flat keys.
    let is_large = !path.0.is_empty() && count_flat_keys(&value) > MAX_FLAT_VALUES;
    match value {
        PlainValue::Dict(items) if !is_large => {
            let mut dict = Vec::with_capacity(items.len());
            for (key, item) in items {
                let text = key.as_str().expect("the keys of JSON are texts");
                let item_path = path.child(PathPart::Key(text.to_owned()));
                dict.push((key, flatten(item, &item_path, budget, values)?));
            }
            Ok(Structure::Dict(dict))
        }
        PlainValue::List(items) if !is_large && items.iter().any(holds_objects) => {
            let mut list = Vec::with_capacity(items.len());
            for (index, item) in items.into_iter().enumerate() {
                let item_path = path.child(PathPart::Index(index));
                list.push(flatten(item, &item_path, budget, values)?);
            }
            Ok(Structure::List(list))
        }
        value => {
            values.push((path.clone(), value));
            Ok(Structure::Leaf(path.flat_key()))
        }
    }
}

/// Returns how many flat keys a value would have, in which a large one counts as one.
fn count_flat_keys(value: &PlainValue) -> usize {
    let count_of_item = |item: &PlainValue| match count_flat_keys(item) {
        count if count > MAX_FLAT_VALUES => 1,
        count => count,
    };
    match value {
        PlainValue::Dict(items) => items.iter().map(|(_, item)| count_of_item(item)).sum(),
        PlainValue::List(items) if items.iter().any(holds_objects) => {
            items.iter().map(count_of_item).sum()
        }
        _ => 1,
    }
}

/// Returns `true` for a dict, and for a list with one in it.
fn holds_objects(value: &PlainValue) -> bool {
    match value {
        PlainValue::Dict(_) => true,
        PlainValue::List(items) => items.iter().any(holds_objects),
        _ => false,
    }
}
