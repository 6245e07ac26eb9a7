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
    let texts_of_other_types: HashSet<String> = keys
        .clone()
        .filter(|key| key.as_str().is_none())
        .filter_map(PlainValue::key_text)
        .collect();
    keys.map(|key| match key {
        PlainValue::Str(text) if texts_of_other_types.contains(text) => key.quoted_key_text(),
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
        self.collect_places(&mut KeyPath::default(), &mut places);
        places
    }

    /// Adds the place of this part at `path`, and those of all parts below it.
    fn collect_places<'s>(&'s self, path: &mut KeyPath, places: &mut IndexMap<String, Place<'s>>) {
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
            child.collect_places(path, places);
            path.0.pop();
        }
    }

    /// Returns the children of a container, each with its part of a flat key.
    pub(crate) fn children(&self) -> Vec<(PathPart, &Structure)> {
        match self {
            Structure::Leaf(_) => Vec::new(),
            Structure::Dict(items) | Structure::Module(_, items) => {
                let texts = key_texts(items.iter().map(|(key, _)| key));
                let children = texts.into_iter().zip(items);
                children
                    // A key that no flat key can have, such as a tuple, has no text.
                    .map(|(text, (_, child))| (PathPart::Key(text.unwrap_or_default()), child))
                    .collect()
            }
            Structure::List(items) | Structure::Tuple(items) => items
                .iter()
                .enumerate()
                .map(|(index, child)| (PathPart::Index(index), child))
                .collect(),
        }
    }

    /// Returns the same containers with a prefix before the flat keys of all leaves.
    pub(crate) fn with_prefix(mut self, prefix: &[PathPart]) -> Self {
        if !prefix.is_empty() {
            let prefix = KeyPath(prefix.to_vec()).flat_key();
            self.rename_leaves(&|fqn| match fqn {
                "" => prefix.clone(),
                fqn => format!("{prefix}.{fqn}"),
            });
        }
        self
    }

    /// Returns this structure in nested dicts with these keys, the first of them outermost.
    pub(crate) fn nested_in(self, keys: impl DoubleEndedIterator<Item = PlainValue>) -> Self {
        keys.rev().fold(self, |structure, key| {
            Structure::Dict(vec![(key, structure)])
        })
    }

    /// Replaces the key of each leaf with the one that `new_key` returns for it.
    fn rename_leaves(&mut self, new_key: &dyn Fn(&str) -> String) {
        match self {
            Structure::Leaf(fqn) => *fqn = new_key(fqn),
            Structure::Dict(items) | Structure::Module(_, items) => {
                items
                    .iter_mut()
                    .for_each(|(_, child)| child.rename_leaves(new_key));
            }
            Structure::List(items) | Structure::Tuple(items) => {
                items
                    .iter_mut()
                    .for_each(|child| child.rename_leaves(new_key));
            }
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

    /// Returns a description of each module that was pickled whole; such modules become dicts of
    /// their tensors.
    #[doc(hidden)]
    pub fn modules(&self) -> Vec<String> {
        let mut modules = Vec::new();
        let mut stack = vec![(KeyPath::default(), self)];
        while let Some((path, structure)) = stack.pop() {
            if let Structure::Module(name, _) = structure {
                // The containers inside of the module are part of it, and are not listed.
                modules.push(format!(
                    "{}: a module of type {name}, of which only the tensors stay",
                    shown_key(&path.flat_key())
                ));
            } else {
                stack.extend(structure.children_below(&path));
            }
        }
        modules
    }

    /// Returns the children of a container that lies at `path`, each with its path.
    fn children_below(&self, path: &KeyPath) -> impl Iterator<Item = (KeyPath, &Structure)> {
        let children = self.children().into_iter();
        children.map(|(part, child)| (path.child(part), child))
    }

    /// Returns descriptions of what the flat keys and paths of a checkpoint cannot express of this
    /// structure, one for each place.
    #[doc(hidden)]
    pub fn describe_untold(&self) -> Vec<String> {
        let mut descriptions = Vec::new();
        for (key, place) in self.places() {
            let name = shown_key(&key);
            match place {
                // An empty checkpoint is an empty dict.
                Place::Dict(keys) if keys.is_empty() && !key.is_empty() => {
                    descriptions.push(format!("{name}: an empty dict"))
                }
                Place::Dict(keys) => {
                    if let Some(key) = keys.iter().find(|key| key.as_str().is_none()) {
                        descriptions.push(format!("{name}: keys of type {}", key.type_name()));
                    }
                }
                Place::Tuple(_) => descriptions.push(format!("{name}: a tuple")),
                Place::List(_) | Place::Leaf => {}
            }
        }
        descriptions
    }

    /// Returns the path of a dict in which two keys have the same text, and these keys; `None` if
    /// there is none. Only formats that store the types of keys can hold it.
    #[doc(hidden)]
    pub fn find_same_texts(&self) -> Option<(String, [&PlainValue; 2])> {
        let mut stack = vec![(KeyPath::default(), self)];
        while let Some((path, structure)) = stack.pop() {
            if let Structure::Dict(items) = structure {
                let keys = items.iter().map(|(key, _)| key);
                let keys_by_text: HashMap<String, &PlainValue> = keys
                    .clone()
                    .filter(|key| key.as_str().is_none())
                    .filter_map(|key| Some((key.key_text()?, key)))
                    .collect();
                for key in keys {
                    if let Some(other_key) = key.as_str().and_then(|text| keys_by_text.get(text)) {
                        return Some((path.flat_key(), [*other_key, key]));
                    }
                }
            }
            stack.extend(structure.children_below(&path));
        }
        None
    }

    /// Adds leaves beside existing ones. `siblings` has the flat key of each new leaf, by that of
    /// the existing leaf to which it belongs. The new leaf goes into the dict that has the existing
    /// one, at the same key with `suffix` behind it. Beside a leaf in a list, it goes to the top
    /// level.
    ///
    /// # Errors
    /// The flat key of a leaf in a list, where the top level is no dict.
    #[doc(hidden)]
    pub fn add_siblings(
        &mut self,
        siblings: &IndexMap<String, String>,
        suffix: &str,
    ) -> Result<(), String> {
        let mut added = HashSet::new();
        let mut stack = vec![&mut *self];
        while let Some(structure) = stack.pop() {
            match structure {
                Structure::Dict(items) | Structure::Module(_, items) => {
                    let mut new_items = Vec::new();
                    for (key, child) in &*items {
                        if let Structure::Leaf(leaf) = child
                            && let Some(fqn) = siblings.get(leaf)
                            && let Some(text) = key.key_text()
                        {
                            let key = format!("{text}{suffix}");
                            new_items.push((key.into(), Structure::Leaf(fqn.clone())));
                            added.insert(fqn);
                        }
                    }
                    items.extend(new_items);
                    stack.extend(items.iter_mut().map(|(_, child)| child));
                }
                Structure::List(items) | Structure::Tuple(items) => stack.extend(items),
                Structure::Leaf(_) => {}
            }
        }
        for (sibling, fqn) in siblings.iter().filter(|(_, fqn)| !added.contains(fqn)) {
            let (Structure::Dict(items) | Structure::Module(_, items)) = &mut *self else {
                return Err(sibling.clone());
            };
            items.push((fqn.as_str().into(), Structure::Leaf(fqn.clone())));
        }
        Ok(())
    }

    /// Merges dicts, and dicts at the same key of them. Whatever else is at one key, the first is
    /// kept, and the others are dropped.
    pub(crate) fn merged(structures: Vec<Structure>) -> Structure {
        let mut structures = structures.into_iter();
        let mut entries = match structures.next() {
            Some(Structure::Dict(entries)) if structures.len() > 0 => entries,
            Some(only) => return only,
            None => return Structure::Dict(Vec::new()),
        };
        for structure in structures {
            if let Structure::Dict(more_entries) = structure {
                entries.extend(more_entries);
            }
        }
        // Keys of several types may have the same text, but Rust shows them in different ways.
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

/// Returns a flat key for a message.
fn shown_key(key: &str) -> &str {
    if key.is_empty() { "the root" } else { key }
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
