//! The nested containers that flat keys came from.

use std::collections::{HashMap, HashSet};
use std::fmt;

use fsdp_layout::{KeyPath, PathPart, PlainValue};
use indexmap::IndexMap;

/// The containers of a nested state dict, including what flat keys cannot express: the types of
/// dict keys, tuples, and empty containers.
#[derive(Debug, Clone, PartialEq)]
pub enum Structure {
    /// A tensor or value, by its flat key.
    Leaf(String),
    /// A dict, in insertion order.
    Dict(Vec<(PlainValue, Structure)>),
    /// A list.
    List(Vec<Structure>),
    /// A tuple.
    Tuple(Vec<Structure>),
    /// An `nn.Module` of this type that was saved whole: its tensors and modules by their names.
    Module(String, Vec<(PlainValue, Structure)>),
}

/// Returns the texts of the keys of a dict in flat keys. A text gets quotes if another key of the
/// dict looks the same, as `'1'` beside the number 1. `None` stands for a key that no checkpoint
/// has.
pub(crate) fn key_texts<'k>(
    keys: impl Iterator<Item = &'k PlainValue> + Clone,
) -> Vec<Option<String>> {
    let others: HashSet<String> = keys
        .clone()
        .filter(|key| key.as_str().is_none())
        .filter_map(PlainValue::key_text)
        .collect();
    keys.map(|key| match key {
        PlainValue::Str(text) if others.contains(text) => key.quoted_key_text(),
        key => key.key_text(),
    })
    .collect()
}

impl Structure {
    /// Returns the flat keys of all leaves and of all empty containers, with the path of typed keys
    /// to each.
    #[doc(hidden)]
    pub fn places(&self) -> IndexMap<String, Place<'_>> {
        let mut places = IndexMap::new();
        self.collect(&mut KeyPath::default(), &mut places);
        places
    }

    /// Adds the place of this part at `path`, and those of all parts below it.
    fn collect<'s>(&'s self, path: &mut KeyPath, places: &mut IndexMap<String, Place<'s>>) {
        let place = match self {
            Structure::Leaf(_) => Place::Leaf,
            Structure::Dict(items) | Structure::Module(_, items) => {
                Place::Dict(items.iter().map(|(key, _)| key).collect())
            }
            Structure::List(items) => Place::List(items.len()),
            Structure::Tuple(items) => Place::Tuple(items.len()),
        };
        places.insert(path.flat_key(), place);
        for (part, child) in self.children() {
            path.0.push(part);
            child.collect(path, places);
            path.0.pop();
        }
    }

    /// Returns the children of a container, each with its part of a flat key.
    pub(crate) fn children(&self) -> Vec<(PathPart, &Structure)> {
        match self {
            Structure::Leaf(_) => Vec::new(),
            Structure::Dict(items) | Structure::Module(_, items) => {
                let texts = key_texts(items.iter().map(|(key, _)| key));
                let parts = texts
                    .into_iter()
                    .map(|text| PathPart::Key(text.unwrap_or_default()));
                parts.zip(items.iter().map(|(_, child)| child)).collect()
            }
            Structure::List(items) | Structure::Tuple(items) => items
                .iter()
                .enumerate()
                .map(|(index, child)| (PathPart::Index(index), child))
                .collect(),
        }
    }

    /// Returns the same containers with a prefix before the keys of all leaves.
    pub(crate) fn below(self, prefix: &[PathPart]) -> Self {
        if prefix.is_empty() {
            return self;
        }
        let prefix = KeyPath(prefix.to_vec()).flat_key();
        self.map_leaves(&|fqn| {
            if fqn.is_empty() {
                prefix.clone()
            } else {
                format!("{prefix}.{fqn}")
            }
        })
    }

    /// Replaces the key of each leaf.
    fn map_leaves(self, name: &dyn Fn(&str) -> String) -> Self {
        let items = |items: Vec<(PlainValue, Structure)>| {
            items
                .into_iter()
                .map(|(key, child)| (key, child.map_leaves(name)))
                .collect()
        };
        let list = |items: Vec<Structure>| {
            items
                .into_iter()
                .map(|child| child.map_leaves(name))
                .collect()
        };
        match self {
            Structure::Leaf(fqn) => Structure::Leaf(name(&fqn)),
            Structure::Dict(entries) => Structure::Dict(items(entries)),
            Structure::Module(of, entries) => Structure::Module(of, items(entries)),
            Structure::List(entries) => Structure::List(list(entries)),
            Structure::Tuple(entries) => Structure::Tuple(list(entries)),
        }
    }

    /// Returns the flat keys of the leaves.
    #[doc(hidden)]
    pub fn leaves(&self) -> HashSet<&str> {
        let mut leaves = HashSet::new();
        let mut stack = vec![self];
        while let Some(structure) = stack.pop() {
            match structure {
                Structure::Leaf(fqn) => drop(leaves.insert(fqn.as_str())),
                Structure::Dict(items) | Structure::Module(_, items) => {
                    stack.extend(items.iter().map(|(_, child)| child));
                }
                Structure::List(items) | Structure::Tuple(items) => stack.extend(items),
            }
        }
        leaves
    }

    /// Describes the modules that were pickled whole; they become dicts of their tensors.
    #[doc(hidden)]
    pub fn modules(&self) -> Vec<String> {
        let mut modules = Vec::new();
        let mut stack = vec![(KeyPath::default(), self)];
        while let Some((path, structure)) = stack.pop() {
            if let Structure::Module(name, _) = structure {
                // The containers inside of the module are part of it, and are not listed.
                let key = path.flat_key();
                let place = if key.is_empty() {
                    "the root"
                } else {
                    key.as_str()
                };
                modules.push(format!(
                    "{place}: a module of type {name}, of which only the tensors stay"
                ));
                continue;
            }
            stack.extend(
                structure
                    .children()
                    .into_iter()
                    .map(|(part, child)| (path.child(part), child)),
            );
        }
        modules
    }

    /// Describes what the flat keys and paths of a checkpoint cannot express of this structure,
    /// each place in a line.
    #[doc(hidden)]
    pub fn untold(&self) -> Vec<String> {
        let mut untold = Vec::new();
        for (key, place) in self.places() {
            let name = if key.is_empty() {
                "the root"
            } else {
                key.as_str()
            };
            match place {
                Place::Dict(keys) if keys.is_empty() && !key.is_empty() => {
                    untold.push(format!("{name}: an empty dict"))
                }
                Place::Dict(keys) => {
                    let other = keys.iter().find(|key| key.as_str().is_none());
                    untold.extend(
                        other.map(|key| format!("{name}: keys of type {}", key.type_name())),
                    );
                }
                Place::Tuple(_) => untold.push(format!("{name}: a tuple")),
                Place::List(_) | Place::Leaf => {}
            }
        }
        untold
    }

    /// Returns the path of a dict in which two keys have the same text, and these keys. Only
    /// formats that store the types of keys can hold it.
    #[doc(hidden)]
    pub fn same_texts(&self) -> Option<(String, [&PlainValue; 2])> {
        let mut stack = vec![(KeyPath::default(), self)];
        while let Some((path, structure)) = stack.pop() {
            if let Structure::Dict(items) = structure {
                let others = items
                    .iter()
                    .map(|(key, _)| key)
                    .filter(|key| key.as_str().is_none());
                let others: HashMap<String, &PlainValue> = others
                    .filter_map(|key| Some((key.key_text()?, key)))
                    .collect();
                let same = items
                    .iter()
                    .find_map(|(key, _)| Some([*others.get(key.as_str()?)?, key]));
                if let Some(same) = same {
                    return Some((path.flat_key(), same));
                }
            }
            stack.extend(
                structure
                    .children()
                    .into_iter()
                    .map(|(part, child)| (path.child(part), child)),
            );
        }
        None
    }

    /// Adds leaves beside others: `beside` has their keys, by those of the others. A leaf goes into
    /// the same dict, or to the top level, if the other one is in a list.
    ///
    /// # Errors
    /// The key of one of the others beside which there is no such place.
    #[doc(hidden)]
    pub fn add_beside(
        &mut self,
        beside: &IndexMap<String, String>,
        suffix: &str,
    ) -> Result<(), String> {
        let mut placed = HashSet::new();
        let mut stack = vec![&mut *self];
        while let Some(structure) = stack.pop() {
            match structure {
                Structure::Dict(items) | Structure::Module(_, items) => {
                    let mut more = Vec::new();
                    for (key, child) in &*items {
                        if let Structure::Leaf(leaf) = child
                            && let Some(fqn) = beside.get(leaf)
                        {
                            let key = format!("{}{suffix}", key.key_text().unwrap_or_default());
                            more.push((key.into(), Structure::Leaf(fqn.clone())));
                            placed.insert(fqn);
                        }
                    }
                    items.extend(more);
                    stack.extend(items.iter_mut().map(|(_, child)| child));
                }
                Structure::List(items) | Structure::Tuple(items) => stack.extend(items),
                Structure::Leaf(_) => {}
            }
        }
        let unplaced = beside.iter().filter(|(_, fqn)| !placed.contains(fqn));
        for (neighbour, fqn) in unplaced {
            let (Structure::Dict(items) | Structure::Module(_, items)) = &mut *self else {
                return Err(neighbour.clone());
            };
            items.push((fqn.as_str().into(), Structure::Leaf(fqn.clone())));
        }
        Ok(())
    }

    /// Merges dicts, and dicts at the same key of them. Whatever else is at one key, the first is
    /// kept.
    pub(crate) fn merged(structures: Vec<Structure>) -> Structure {
        let mut structures = structures.into_iter();
        let mut entries = match structures.next() {
            Some(Structure::Dict(entries)) if structures.len() > 0 => entries,
            Some(only) => return only,
            None => return Structure::Dict(Vec::new()),
        };
        for structure in structures {
            if let Structure::Dict(more) = structure {
                entries.extend(more);
            }
        }
        // Keys of several types may have the same text.
        let mut items: IndexMap<String, (PlainValue, Vec<Structure>)> = IndexMap::new();
        for (key, child) in entries {
            items
                .entry(format!("{key:?}"))
                .or_insert_with(|| (key, Vec::new()))
                .1
                .push(child);
        }
        Structure::Dict(
            items
                .into_values()
                .map(|(key, children)| (key, Structure::merged(children)))
                .collect(),
        )
    }
}

/// One place of a [`Structure`].
#[derive(Debug, Clone, PartialEq)]
pub enum Place<'s> {
    /// A tensor or value.
    Leaf,
    /// A dict with these keys.
    Dict(Vec<&'s PlainValue>),
    /// A list of this length.
    List(usize),
    /// A tuple of this length.
    Tuple(usize),
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Leaf => f.write_str("a tensor or value"),
            Place::Dict(keys) => match keys.iter().find(|key| key.as_str().is_none()) {
                Some(key) => write!(f, "a dict with keys of type {}", key.type_name()),
                None => f.write_str("a dict"),
            },
            Place::List(length) => write!(f, "a list of {length}"),
            Place::Tuple(length) => write!(f, "a tuple of {length}"),
        }
    }
}
