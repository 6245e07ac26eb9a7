//! The nested containers that flat keys came from.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use fsdp_layout::{KeyPath, PathPart, PlainValue};
use indexmap::IndexMap;

use crate::error::{FileError, FormatError};
use crate::limits::MAX_DEPTH;
use crate::metadata::Metadata;

/// The containers of a nested state dict, including what flat keys cannot express: the types of dict keys, tuples, and
/// empty containers.
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

/// The largest number of list positions without a value in a checkpoint. It is limited because positions come from
/// files.
const MAX_GAPS: usize = 1 << 16;

/// Returns the text of a dict's key in a flat key, as Python writes it; `None` for a key that no checkpoint has.
pub(crate) fn key_text(key: &PlainValue) -> Option<String> {
    Some(match key {
        PlainValue::Str(text) => text.clone(),
        PlainValue::Int(number) => number.to_string(),
        PlainValue::Bool(true) => "True".to_owned(),
        PlainValue::Bool(false) => "False".to_owned(),
        PlainValue::None => "None".to_owned(),
        PlainValue::Float(number) => number.to_string(),
        PlainValue::Bytes(bytes) => format!("b'{}'", bytes.escape_ascii()),
        PlainValue::Tuple(items) => {
            let items: Option<Vec<String>> = items.iter().map(item_text).collect();
            format!("({})", items?.join(", "))
        }
        _ => return None,
    })
}

/// Returns the text of an item of a tuple that is a key: text is quoted there.
fn item_text(item: &PlainValue) -> Option<String> {
    match item {
        PlainValue::Str(text) => Some(format!("'{text}'")),
        item => key_text(item),
    }
}

impl Structure {
    /// Makes the structure from the paths of a checkpoint's keys.
    pub(crate) fn of_paths(metadata: &Metadata) -> Result<Self, FileError> {
        let paths = metadata.planner_data.as_ref();
        let mut root = match paths.and_then(|paths| paths.first()?.1.0.first()) {
            Some(PathPart::Index(_)) => Builder::List(BTreeMap::new()),
            _ => Builder::Dict(IndexMap::new()),
        };
        for fqn in metadata.entries.keys() {
            let path = paths.and_then(|paths| paths.get(fqn)).cloned();
            let path = path.unwrap_or_else(|| KeyPath(vec![PathPart::Key(fqn.clone())]));
            if path.0.len() >= MAX_DEPTH {
                let (value, limit) = (path.0.len() as u64, MAX_DEPTH as u64);
                let source = FormatError::Limit { what: "nesting", value, limit };
                return Err(FileError::Encode { fqn: fqn.clone(), source });
            }
            if path.0.is_empty() && metadata.entries.len() == 1 {
                // The root itself is a tensor, or one value.
                return Ok(Structure::Leaf(fqn.clone()));
            }
            root.insert(fqn, &path.0)?;
        }
        let mut gaps = MAX_GAPS;
        root.finish(&mut gaps).map_err(|source| FileError::Encode { fqn: String::new(), source })
    }

    /// Returns the flat keys of all leaves and of all empty containers, with the path of typed keys to each.
    pub(crate) fn places(&self) -> IndexMap<String, Place<'_>> {
        let mut places = IndexMap::new();
        self.collect(&mut KeyPath::default(), &mut places);
        places
    }

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
    fn children(&self) -> Vec<(PathPart, &Structure)> {
        match self {
            Structure::Leaf(_) => Vec::new(),
            Structure::Dict(items) | Structure::Module(_, items) => {
                items.iter().map(|(key, child)| (PathPart::Key(key_text(key).unwrap_or_default()), child)).collect()
            }
            Structure::List(items) | Structure::Tuple(items) => {
                items.iter().enumerate().map(|(index, child)| (PathPart::Index(index), child)).collect()
            }
        }
    }

    /// Returns the same containers with a prefix before the keys of all leaves.
    pub(crate) fn below(self, prefix: &[PathPart]) -> Self {
        if prefix.is_empty() {
            return self;
        }
        let prefix = KeyPath(prefix.to_vec()).flat_key();
        self.map_leaves(&|fqn| if fqn.is_empty() { prefix.clone() } else { format!("{prefix}.{fqn}") })
    }

    fn map_leaves(self, name: &dyn Fn(&str) -> String) -> Self {
        let items = |items: Vec<(PlainValue, Structure)>| {
            items.into_iter().map(|(key, child)| (key, child.map_leaves(name))).collect()
        };
        let list = |items: Vec<Structure>| items.into_iter().map(|child| child.map_leaves(name)).collect();
        match self {
            Structure::Leaf(fqn) => Structure::Leaf(name(&fqn)),
            Structure::Dict(entries) => Structure::Dict(items(entries)),
            Structure::Module(of, entries) => Structure::Module(of, items(entries)),
            Structure::List(entries) => Structure::List(list(entries)),
            Structure::Tuple(entries) => Structure::Tuple(list(entries)),
        }
    }

    /// Returns the flat keys of the leaves.
    pub(crate) fn leaves(&self) -> HashSet<&str> {
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
    pub(crate) fn modules(&self) -> Vec<String> {
        let mut modules = Vec::new();
        let mut stack = vec![(KeyPath::default(), self)];
        while let Some((path, structure)) = stack.pop() {
            if let Structure::Module(name, _) = structure {
                // The containers inside of the module are part of it, and are not listed.
                let key = path.flat_key();
                let place = if key.is_empty() { "the root" } else { key.as_str() };
                modules.push(format!("{place}: a module of type {name}, of which only the tensors stay"));
                continue;
            }
            stack.extend(structure.children().into_iter().map(|(part, child)| (path.child(part), child)));
        }
        modules
    }

    /// Describes what the flat keys and paths of a checkpoint cannot express of this structure, each place in a line.
    pub(crate) fn untold(&self) -> Vec<String> {
        let mut untold = Vec::new();
        for (key, place) in self.places() {
            let name = if key.is_empty() { "the root" } else { key.as_str() };
            match place {
                Place::Dict(keys) if keys.is_empty() && !key.is_empty() => {
                    untold.push(format!("{name}: an empty dict"))
                }
                Place::Dict(keys) => {
                    let other = keys.iter().find(|key| key.as_str().is_none());
                    untold.extend(other.map(|key| format!("{name}: keys of type {}", key.type_name())));
                }
                Place::Tuple(_) => untold.push(format!("{name}: a tuple")),
                Place::List(_) | Place::Leaf => {}
            }
        }
        untold
    }

    /// Returns this structure without the leaves and empty containers whose flat keys `keep` refuses. Containers that
    /// become empty are removed too. In a list, an empty dict replaces a removed item unless it was at the end, so that
    /// the keys of the other items stay the same.
    pub(crate) fn retain(self, keep: &mut dyn FnMut(&str) -> bool) -> Option<Self> {
        self.retain_below(&mut KeyPath::default(), keep)
    }

    fn retain_below(self, path: &mut KeyPath, keep: &mut dyn FnMut(&str) -> bool) -> Option<Self> {
        let mut list = |items: Vec<Structure>, path: &mut KeyPath| -> Option<Vec<Structure>> {
            if items.is_empty() {
                return keep(&path.flat_key()).then_some(items);
            }
            let mut kept = Vec::with_capacity(items.len());
            for (index, item) in items.into_iter().enumerate() {
                path.0.push(PathPart::Index(index));
                if let Some(item) = item.retain_below(path, keep) {
                    kept.resize_with(index, || Structure::Dict(Vec::new()));
                    kept.push(item);
                }
                path.0.pop();
            }
            (!kept.is_empty()).then_some(kept)
        };
        match self {
            Structure::Leaf(fqn) => keep(&fqn).then_some(Structure::Leaf(fqn)),
            Structure::List(items) => list(items, path).map(Structure::List),
            Structure::Tuple(items) => list(items, path).map(Structure::Tuple),
            Structure::Dict(items) | Structure::Module(_, items) if items.is_empty() => {
                (path.0.is_empty() || keep(&path.flat_key())).then_some(Structure::Dict(items))
            }
            Structure::Dict(items) | Structure::Module(_, items) => {
                let mut kept = Vec::with_capacity(items.len());
                for (key, item) in items {
                    path.0.push(PathPart::Key(key_text(&key).unwrap_or_default()));
                    kept.extend(item.retain_below(path, keep).map(|item| (key, item)));
                    path.0.pop();
                }
                (!kept.is_empty()).then_some(Structure::Dict(kept))
            }
        }
    }

    /// Adds a leaf beside another one if that is in a dict, or at the top level if it is in a list. Returns `false` if
    /// there is no place for it.
    pub(crate) fn add_beside(&mut self, neighbour: &str, suffix: &str, fqn: &str) -> bool {
        let mut stack = vec![&mut *self];
        while let Some(structure) = stack.pop() {
            match structure {
                Structure::Dict(items) | Structure::Module(_, items) => {
                    let found =
                        items.iter().position(|(_, child)| matches!(child, Structure::Leaf(leaf) if leaf == neighbour));
                    if let Some(found) = found {
                        let key = format!("{}{suffix}", key_text(&items[found].0).unwrap_or_default());
                        items.push((key.into(), Structure::Leaf(fqn.to_owned())));
                        return true;
                    }
                    stack.extend(items.iter_mut().map(|(_, child)| child));
                }
                Structure::List(items) | Structure::Tuple(items) => stack.extend(items),
                Structure::Leaf(_) => {}
            }
        }
        self.add_at_root(fqn)
    }

    /// Adds the entries of a dict to this dict. Dicts at the same key are merged.
    pub(crate) fn merge(&mut self, other: Structure) {
        let (Structure::Dict(items), Structure::Dict(more)) = (self, other) else { return };
        // Keys of several types may have the same text.
        let mut places: HashMap<String, usize> =
            items.iter().enumerate().map(|(index, (key, _))| (format!("{key:?}"), index)).collect();
        for (key, value) in more {
            match places.get(&format!("{key:?}")) {
                Some(&there) => items[there].1.merge(value),
                None => {
                    places.insert(format!("{key:?}"), items.len());
                    items.push((key, value));
                }
            }
        }
    }

    /// Adds a leaf to the dict at the root, under its flat key. Returns `false` if the root is no dict.
    pub(crate) fn add_at_root(&mut self, fqn: &str) -> bool {
        let (Structure::Dict(items) | Structure::Module(_, items)) = self else { return false };
        items.push((fqn.into(), Structure::Leaf(fqn.to_owned())));
        true
    }
}

/// One place of a [`Structure`].
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Place<'s> {
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

/// A structure that is being built from paths.
enum Builder {
    Dict(IndexMap<String, Builder>),
    /// The items by position. A position without a value was an empty dict, which flattening leaves out.
    List(BTreeMap<usize, Builder>),
    Leaf(String),
}

impl Builder {
    /// Makes the empty container that the first part of a path leads into.
    fn container_for(path: &[PathPart]) -> Self {
        match path.first() {
            Some(PathPart::Index(_)) => Builder::List(BTreeMap::new()),
            _ => Builder::Dict(IndexMap::new()),
        }
    }

    /// Puts a leaf at its place, and makes the dicts and lists on the way.
    fn insert(&mut self, fqn: &str, path: &[PathPart]) -> Result<(), FileError> {
        let refused = |what: &str| {
            let source = FormatError::Unsupported { what: what.to_owned() };
            Err(FileError::Encode { fqn: fqn.to_owned(), source })
        };
        let Some((part, rest)) = path.split_first() else { return refused("a value where others lie below") };
        let is_leaf = rest.is_empty();
        let make = || if is_leaf { Builder::Leaf(fqn.to_owned()) } else { Builder::container_for(rest) };
        let mut is_new = false;
        let make = || {
            is_new = true;
            make()
        };
        let slot = match (self, part) {
            (Builder::Dict(dict), PathPart::Key(key)) => dict.entry(key.clone()).or_insert_with(make),
            (Builder::List(list), PathPart::Index(index)) => list.entry(*index).or_insert_with(make),
            _ => return refused("a place that is a dict to one key and a list to another"),
        };
        match (is_leaf, is_new) {
            (true, true) => Ok(()),
            (true, false) => refused("two values at one place"),
            (false, _) => slot.insert(fqn, rest),
        }
    }

    /// Makes the structure; `gaps` are the positions without a value that it may still have.
    fn finish(self, gaps: &mut usize) -> Result<Structure, FormatError> {
        Ok(match self {
            Builder::Leaf(fqn) => Structure::Leaf(fqn),
            Builder::Dict(dict) => {
                let items = dict.into_iter().map(|(key, child)| Ok((key.into(), child.finish(gaps)?)));
                Structure::Dict(items.collect::<Result<_, FormatError>>()?)
            }
            Builder::List(list) => {
                let mut items = Vec::with_capacity(list.len());
                for (index, child) in list {
                    let Some(left) = gaps.checked_sub(index - items.len()) else {
                        let (value, limit) = (index as u64, MAX_GAPS as u64);
                        return Err(FormatError::Limit {
                            what: "number of list positions without a value",
                            value,
                            limit,
                        });
                    };
                    *gaps = left;
                    // A list has no holes. A missing position was an empty dict, which flattening leaves out.
                    items.resize_with(index, || Structure::Dict(Vec::new()));
                    items.push(child.finish(gaps)?);
                }
                Structure::List(items)
            }
        })
    }
}
