//! Building nested containers: from the paths of flat keys, and from other containers whose keys
//! change.

use std::collections::BTreeMap;

use fsdp_layout::{KeyPath, PathPart, PlainValue};
use indexmap::IndexMap;

use super::key_move::KeyMove;
use super::structure::Structure;
use crate::budget::check_depth;
use crate::error::{FileError, FormatError};
use crate::limits::BeyondLimit;
use crate::metadata::Metadata;

/// The largest number of list positions without a value in a checkpoint. It is limited because
/// positions come from files.
const MAX_GAPS: usize = 1 << 16;

/// A decision about a leaf or an empty container of a structure.
pub enum KeyChange {
    /// It stays.
    Keep,
    /// It is left out.
    Remove,
    /// It gets this flat key, at another place.
    Move(String, KeyMove),
}

impl Structure {
    /// Makes the structure from the paths of a checkpoint's keys.
    ///
    /// # Errors
    /// Paths that are too deep, that do not fit together, or that leave out too many positions of
    /// lists.
    #[doc(hidden)]
    pub fn from_paths(metadata: &Metadata) -> Result<Self, FileError> {
        let paths = metadata.planner_data.as_ref();
        // The parts of a path tell of lists and dicts; the first path stands for all at the root.
        let mut root = match paths.and_then(|paths| paths.first()?.1.0.first()) {
            Some(PathPart::Index(_)) => Builder::List(BTreeMap::new()),
            _ => Builder::Dict(IndexMap::new()),
        };
        for fqn in metadata.entries.keys() {
            let path = paths
                .and_then(|paths| paths.get(fqn))
                .cloned()
                .unwrap_or_else(|| KeyPath::from_key(fqn));
            check_depth(path.0.len()).map_err(|over| FileError::Encode {
                fqn: fqn.clone(),
                source: over.into(),
            })?;
            if path.0.is_empty() && metadata.entries.len() == 1 {
                // The root itself is a tensor, or one value.
                return Ok(Structure::Leaf(fqn.clone()));
            }
            let steps: Vec<KeyStep> = path.0.into_iter().map(KeyStep::from).collect();
            root.insert(fqn, &steps, Builder::Leaf(fqn.clone()))?;
        }
        root.build(MAX_GAPS)
    }

    /// Returns this structure with leaves and empty containers moved or left out, as `change`
    /// decides by the flat key and the path of each. Containers that become empty are removed. In a
    /// list, an empty dict replaces a removed item unless it was at the end, so that the keys of
    /// the other items stay the same.
    ///
    /// # Errors
    /// Two leaves would get one place.
    #[doc(hidden)]
    pub fn rebuilt(
        &self,
        change: &mut dyn FnMut(&str, &KeyPath) -> KeyChange,
    ) -> Result<Self, FileError> {
        let mut rebuild = Rebuild {
            change,
            path: KeyPath::default(),
            steps: Vec::new(),
            root: None,
        };
        rebuild.add(self)?;
        match rebuild.root {
            // The positions come from a structure, so there is no limit to the number of missing
            // ones: they were there before.
            Some(root) => root.build(usize::MAX),
            None => Ok(Structure::Dict(Vec::new())),
        }
    }
}

/// The state of [`Structure::rebuilt`].
struct Rebuild<'p> {
    change: &'p mut dyn FnMut(&str, &KeyPath) -> KeyChange,
    /// The path of the place that is looked at.
    path: KeyPath,
    /// The same path, with the kinds of the containers.
    steps: Vec<KeyStep>,
    root: Option<Builder>,
}

impl Rebuild<'_> {
    /// Adds all that lies at and below a place, as the change decides.
    fn add(&mut self, structure: &Structure) -> Result<(), FileError> {
        let empty_container = match structure {
            Structure::Leaf(_) => None,
            Structure::Dict(items) if items.is_empty() => Some(Builder::Dict(IndexMap::new())),
            Structure::Module(name, items) if items.is_empty() => {
                Some(Builder::Module(name.clone(), IndexMap::new()))
            }
            Structure::List(items) if items.is_empty() => Some(Builder::List(BTreeMap::new())),
            Structure::Tuple(items) if items.is_empty() => Some(Builder::Tuple(BTreeMap::new())),
            container => return self.add_items(container),
        };
        let old_key = match structure {
            Structure::Leaf(fqn) => fqn.clone(),
            _ => self.path.flat_key(),
        };
        let (fqn, steps) = match (self.change)(&old_key, &self.path) {
            KeyChange::Keep => (old_key, self.steps.clone()),
            KeyChange::Remove => return Ok(()),
            KeyChange::Move(new_key, key_move) => {
                let steps = key_move.apply(&self.steps, |key| KeyStep::Key(key.into()));
                (new_key, steps)
            }
        };
        let new_item = empty_container.unwrap_or_else(|| Builder::Leaf(fqn.clone()));
        if self.root.is_none() && steps.is_empty() {
            self.root = Some(new_item);
            return Ok(());
        }
        self.root
            .get_or_insert_with(|| Builder::container_for(&steps))
            .insert(&fqn, &steps, new_item)
    }

    /// Adds all items of a container.
    fn add_items(&mut self, container: &Structure) -> Result<(), FileError> {
        for (index, (part, child)) in container.children().into_iter().enumerate() {
            self.steps.push(match container {
                Structure::Dict(items) => KeyStep::Key(items[index].0.clone()),
                Structure::Module(name, items) => {
                    KeyStep::Attribute(name.clone(), items[index].0.clone())
                }
                Structure::Tuple(_) => KeyStep::InTuple(index),
                Structure::List(_) => KeyStep::InList(index),
                Structure::Leaf(_) => unreachable!("a leaf has no children"),
            });
            self.path.0.push(part);
            self.add(child)?;
            self.path.0.pop();
            self.steps.pop();
        }
        Ok(())
    }
}

/// A step from a container to one of its items.
#[derive(Debug, Clone)]
enum KeyStep {
    /// To the item at a key of a dict.
    Key(PlainValue),
    /// To the item of this name in a module of this type.
    Attribute(String, PlainValue),
    /// To a position of a list.
    InList(usize),
    /// To a position of a tuple.
    InTuple(usize),
}

impl From<PathPart> for KeyStep {
    fn from(part: PathPart) -> Self {
        match part {
            PathPart::Key(key) => KeyStep::Key(key.into()),
            PathPart::Index(index) => KeyStep::InList(index),
        }
    }
}

/// The items of a dict that is being built, by their keys as Rust shows them: keys of several types
/// may have the same text.
type Items = IndexMap<String, (PlainValue, Builder)>;

/// A structure that is being built.
enum Builder {
    Leaf(String),
    Dict(Items),
    Module(String, Items),
    /// The items by position. A position without a value was an empty dict, which flattening leaves
    /// out.
    List(BTreeMap<usize, Builder>),
    Tuple(BTreeMap<usize, Builder>),
}

impl Builder {
    /// Makes the empty container that the first of some steps leads into.
    fn container_for(steps: &[KeyStep]) -> Self {
        match steps.first() {
            Some(KeyStep::InList(_)) => Builder::List(BTreeMap::new()),
            Some(KeyStep::InTuple(_)) => Builder::Tuple(BTreeMap::new()),
            Some(KeyStep::Attribute(name, _)) => Builder::Module(name.clone(), IndexMap::new()),
            Some(KeyStep::Key(_)) | None => Builder::Dict(IndexMap::new()),
        }
    }

    /// Puts a leaf or an empty container at its place, and makes the containers on the way. If
    /// something else is there already, that is an error.
    fn insert(&mut self, fqn: &str, steps: &[KeyStep], new_item: Builder) -> Result<(), FileError> {
        let Some((last_step, outer_steps)) = steps.split_last() else {
            return Err(refused_error(fqn, "a value where others lie below"));
        };
        let mut container = self;
        for (index, step) in outer_steps.iter().enumerate() {
            container = container
                .find_or_make_item(fqn, step, || Builder::container_for(&steps[index + 1..]))?;
        }
        let kind = std::mem::discriminant(&new_item);
        let is_leaf = matches!(new_item, Builder::Leaf(_));
        let mut unused = Some(new_item);
        let existing = container.find_or_make_item(fqn, last_step, || {
            unused.take().expect("an item is made once at most")
        })?;
        // Something is there already. Two empty containers of one kind are the same.
        let is_same_empty = !is_leaf && kind == std::mem::discriminant(existing);
        if unused.is_some() && !is_same_empty {
            return Err(refused_error(fqn, "two values at one place"));
        }
        Ok(())
    }

    /// Returns the item that a step leads to. If there is none, `make` makes it. A step that is not
    /// of the kind of this container is an error.
    fn find_or_make_item(
        &mut self,
        fqn: &str,
        step: &KeyStep,
        make: impl FnOnce() -> Builder,
    ) -> Result<&mut Builder, FileError> {
        match (self, step) {
            (
                Builder::Dict(items) | Builder::Module(_, items),
                KeyStep::Key(key) | KeyStep::Attribute(_, key),
            ) => {
                let item = items.entry(format!("{key:?}"));
                Ok(&mut item.or_insert_with(|| (key.clone(), make())).1)
            }
            (
                Builder::List(items) | Builder::Tuple(items),
                KeyStep::InList(index) | KeyStep::InTuple(index),
            ) => Ok(items.entry(*index).or_insert_with(make)),
            (Builder::Leaf(_), _) => Err(refused_error(fqn, "a value where others lie below")),
            _ => Err(refused_error(
                fqn,
                "a place that is a dict to one key and a list to another",
            )),
        }
    }

    /// Makes the structure of the whole, in which at most `gaps` positions may be without a value.
    fn build(self, mut gaps: usize) -> Result<Structure, FileError> {
        self.finish(&mut gaps).map_err(|source| FileError::Encode {
            fqn: String::new(),
            source,
        })
    }

    /// Makes the structure; `gaps` are the positions without a value that it may still have.
    fn finish(self, gaps: &mut usize) -> Result<Structure, FormatError> {
        Ok(match self {
            Builder::Leaf(fqn) => Structure::Leaf(fqn),
            Builder::Dict(items) => Structure::Dict(finish_dict(items, gaps)?),
            Builder::Module(name, items) => Structure::Module(name, finish_dict(items, gaps)?),
            Builder::List(items) => Structure::List(finish_list(items, gaps)?),
            Builder::Tuple(items) => Structure::Tuple(finish_list(items, gaps)?),
        })
    }
}

/// Returns the items of a dict in order, with their structures. `gaps` is the number of missing
/// positions that lists in it may still have.
fn finish_dict(
    items: Items,
    gaps: &mut usize,
) -> Result<Vec<(PlainValue, Structure)>, FormatError> {
    items
        .into_values()
        .map(|(key, child)| Ok((key, child.finish(gaps)?)))
        .collect()
}

/// Returns the items of a list in order, with an empty dict at each missing position. `gaps` is the
/// number of such positions that may still be filled, and is reduced by them.
fn finish_list(
    list: BTreeMap<usize, Builder>,
    gaps: &mut usize,
) -> Result<Vec<Structure>, FormatError> {
    let mut items = Vec::with_capacity(list.len());
    for (index, child) in list {
        let Some(gaps_left) = gaps.checked_sub(index - items.len()) else {
            return Err(FormatError::Limit(BeyondLimit {
                what: "number of list positions without a value",
                value: index as u64,
                limit: MAX_GAPS as u64,
            }));
        };
        *gaps = gaps_left;
        // A list has no holes. A missing position was an empty dict, which flattening leaves out.
        items.resize_with(index, || Structure::Dict(Vec::new()));
        items.push(child.finish(gaps)?);
    }
    Ok(items)
}

/// Returns the error of a key that cannot be put at its place.
fn refused_error(fqn: &str, what: &str) -> FileError {
    FileError::Encode {
        fqn: fqn.to_owned(),
        source: FormatError::unsupported(what),
    }
}
