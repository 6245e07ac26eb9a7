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
        let items = Items::find(&value);
        let structure = flatten(value, items, &KeyPath::default(), budget, &mut values)?;
        Ok(FlatJson { values, structure })
    }
}

/// Adds what lies at and below a value, whose place is `path`, and returns its containers.
fn flatten(
    value: PlainValue,
    items: Option<Items>,
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
    let items = items.filter(|items| path.0.is_empty() || !items.are_many());
    match (value, items) {
        (PlainValue::Dict(values_by_key), Some(items)) => {
            let mut dict = Vec::with_capacity(values_by_key.len());
            for ((key, item), items) in values_by_key.into_iter().zip(items.each) {
                let text = key.as_str().expect("the keys of JSON are texts");
                let item_path = path.child(PathPart::Key(text.to_owned()));
                dict.push((key, flatten(item, items, &item_path, budget, values)?));
            }
            Ok(Structure::Dict(dict))
        }
        (PlainValue::List(list), Some(items)) => {
            let mut structures = Vec::with_capacity(list.len());
            for (index, (item, items)) in list.into_iter().zip(items.each).enumerate() {
                let item_path = path.child(PathPart::Index(index));
                structures.push(flatten(item, items, &item_path, budget, values)?);
            }
            Ok(Structure::List(structures))
        }
        (value, _) => {
            values.push((path.clone(), value));
            Ok(Structure::Leaf(path.flat_key()))
        }
    }
}

/// The items of a dict, or of a list with a dict in it at any depth.
struct Items {
    /// How many flat keys they have. A large one among them has one.
    flat_keys: usize,
    /// The items of each of them; `None` for a value without dicts.
    each: Vec<Option<Items>>,
}

impl Items {
    /// Counts the flat keys of a value, from the innermost items on, so that each is looked at
    /// once. Returns `None` if there is no dict in it.
    fn find(value: &PlainValue) -> Option<Self> {
        let each: Vec<Option<Items>> = match value {
            PlainValue::Dict(items) => items.iter().map(|(_, item)| Items::find(item)).collect(),
            PlainValue::List(items) => {
                // Long lists of numbers take no more memory for this.
                if !items.iter().any(is_container) {
                    return None;
                }
                let each: Vec<_> = items.iter().map(Items::find).collect();
                if each.iter().all(Option::is_none) {
                    return None;
                }
                each
            }
            _ => return None,
        };
        let flat_keys = each.iter().map(|items| match items {
            Some(items) if !items.are_many() => items.flat_keys,
            _ => 1,
        });
        Some(Items {
            flat_keys: flat_keys.sum(),
            each,
        })
    }

    /// Returns `true` if the value of which these are the items becomes one flat key, as there
    /// would be too many.
    fn are_many(&self) -> bool {
        self.flat_keys > MAX_FLAT_VALUES
    }
}

/// Returns `true` for a dict or a list.
fn is_container(value: &PlainValue) -> bool {
    matches!(value, PlainValue::Dict(_) | PlainValue::List(_))
}
