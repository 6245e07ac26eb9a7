//! Building nested containers: from the paths of flat keys, and from other containers whose keys
//! change.

use std::collections::BTreeMap;

use fsdp_layout::{KeyPath, PathPart, PlainValue};
use indexmap::IndexMap;

use super::moved::Moved;
use super::structure::Structure;
use crate::error::{FileError, FormatError};
use crate::limits::MAX_DEPTH;
use crate::metadata::Metadata;

/// The largest number of list positions without a value in a checkpoint. It is limited because
/// positions come from files.
const MAX_GAPS: usize = 1 << 16;

/// A decision about a leaf or an empty container of a structure.
pub enum Placed {
    /// It stays.
    Stays,
    /// It is left out.
    LeftOut,
    /// It gets this flat key, at another place.
    Moves(String, Moved),
}

impl Structure {
    /// Makes the structure from the paths of a checkpoint's keys.
    #[doc(hidden)]
    pub fn of_paths(metadata: &Metadata) -> Result<Self, FileError> {
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
                let source = FormatError::TooLarge {
                    what: "nesting",
                    value,
                    limit,
                };
                return Err(FileError::Encode {
                    fqn: fqn.clone(),
                    source,
                });
            }
            if path.0.is_empty() && metadata.entries.len() == 1 {
                // The root itself is a tensor, or one value.
                return Ok(Structure::Leaf(fqn.clone()));
            }
            let steps: Vec<Step> = path.0.into_iter().map(Step::of).collect();
            root.insert(fqn, &steps, Builder::Leaf(fqn.clone()))?;
        }
        let mut gaps = MAX_GAPS;
        root.finish(&mut gaps).map_err(|source| FileError::Encode {
            fqn: String::new(),
            source,
        })
    }

    /// Returns this structure with leaves and empty containers moved or left out, as `place`
    /// decides by the flat key and the path of each. Containers that become empty are removed. In a
    /// list, an empty dict replaces a removed item unless it was at the end, so that the keys of
    /// the other items stay the same.
    ///
    /// # Errors
    /// Two leaves would get one place.
    #[doc(hidden)]
    pub fn rebuilt(
        &self,
        place: &mut dyn FnMut(&str, &KeyPath) -> Placed,
    ) -> Result<Self, FileError> {
        let mut rebuild = Rebuild {
            place,
            path: KeyPath::default(),
            steps: Vec::new(),
            root: None,
        };
        rebuild.add(self)?;
        let Some(root) = rebuild.root else {
            return Ok(Structure::Dict(Vec::new()));
        };
        // The positions come from a structure, so there is no limit to the number of missing ones:
        // they were there before.
        let mut gaps = usize::MAX;
        root.finish(&mut gaps).map_err(|source| FileError::Encode {
            fqn: String::new(),
            source,
        })
    }
}

/// The state of [`Structure::rebuilt`].
struct Rebuild<'p> {
    place: &'p mut dyn FnMut(&str, &KeyPath) -> Placed,
    /// The path of the place that is looked at.
    path: KeyPath,
    /// The same path, with the kinds of the containers.
    steps: Vec<Step>,
    root: Option<Builder>,
}

impl Rebuild<'_> {
    /// Adds all that lies at and below a place.
    fn add(&mut self, structure: &Structure) -> Result<(), FileError> {
        let (fqn, empty) = match structure {
            Structure::Leaf(fqn) => (fqn.clone(), None),
            Structure::Dict(items) if items.is_empty() => {
                (self.path.flat_key(), Some(Builder::Dict(IndexMap::new())))
            }
            Structure::Module(of, items) if items.is_empty() => (
                self.path.flat_key(),
                Some(Builder::Module(of.clone(), IndexMap::new())),
            ),
            Structure::List(items) if items.is_empty() => {
                (self.path.flat_key(), Some(Builder::List(BTreeMap::new())))
            }
            Structure::Tuple(items) if items.is_empty() => {
                (self.path.flat_key(), Some(Builder::Tuple(BTreeMap::new())))
            }
            container => return self.add_items(container),
        };
        let (fqn, steps) = match (self.place)(&fqn, &self.path) {
            Placed::Stays => (fqn, self.steps.clone()),
            Placed::LeftOut => return Ok(()),
            Placed::Moves(name, moved) => {
                (name, moved.apply(&self.steps, |key| Step::Key(key.into())))
            }
        };
        let last = empty.unwrap_or_else(|| Builder::Leaf(fqn.clone()));
        match &mut self.root {
            Some(root) => root.insert(&fqn, &steps, last),
            None if steps.is_empty() => {
                self.root = Some(last);
                Ok(())
            }
            None => self
                .root
                .insert(Builder::container_for(&steps))
                .insert(&fqn, &steps, last),
        }
    }

    /// Adds all items of a container.
    fn add_items(&mut self, container: &Structure) -> Result<(), FileError> {
        for (index, (part, child)) in container.children().into_iter().enumerate() {
            self.steps.push(match container {
                Structure::Dict(items) => Step::Key(items[index].0.clone()),
                Structure::Module(of, items) => Step::Attribute(of.clone(), items[index].0.clone()),
                Structure::Tuple(_) => Step::InTuple(index),
                Structure::List(_) | Structure::Leaf(_) => Step::InList(index),
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
enum Step {
    /// To the item at a key of a dict.
    Key(PlainValue),
    /// To the item of this name in a module of this type.
    Attribute(String, PlainValue),
    /// To a position of a list.
    InList(usize),
    /// To a position of a tuple.
    InTuple(usize),
}

impl Step {
    fn of(part: PathPart) -> Self {
        match part {
            PathPart::Key(key) => Step::Key(key.into()),
            PathPart::Index(index) => Step::InList(index),
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
    fn container_for(steps: &[Step]) -> Self {
        match steps.first() {
            Some(Step::InList(_)) => Builder::List(BTreeMap::new()),
            Some(Step::InTuple(_)) => Builder::Tuple(BTreeMap::new()),
            Some(Step::Attribute(of, _)) => Builder::Module(of.clone(), IndexMap::new()),
            Some(Step::Key(_)) | None => Builder::Dict(IndexMap::new()),
        }
    }

    /// Puts a leaf or an empty container at its place, and makes the containers on the way.
    fn insert(&mut self, fqn: &str, steps: &[Step], last: Builder) -> Result<(), FileError> {
        let Some((last_step, way)) = steps.split_last() else {
            return Err(refused(fqn, "a value where others lie below"));
        };
        let mut at = self;
        for (index, step) in way.iter().enumerate() {
            at = at
                .item(fqn, step, || Builder::container_for(&steps[index + 1..]))?
                .0;
        }
        let kind = std::mem::discriminant(&last);
        let is_leaf = matches!(last, Builder::Leaf(_));
        match at.item(fqn, last_step, || last)? {
            (_, true) => Ok(()),
            // An empty container, where one of its kind is already.
            (found, false) if !is_leaf && kind == std::mem::discriminant(found) => Ok(()),
            _ => Err(refused(fqn, "two values at one place")),
        }
    }

    /// Returns the item that a step leads to, and `true` if it was made for that.
    fn item(
        &mut self,
        fqn: &str,
        step: &Step,
        make: impl FnOnce() -> Builder,
    ) -> Result<(&mut Builder, bool), FileError> {
        let mut is_new = false;
        let make = || {
            is_new = true;
            make()
        };
        let item = match (self, step) {
            (
                Builder::Dict(items) | Builder::Module(_, items),
                Step::Key(key) | Step::Attribute(_, key),
            ) => {
                &mut items
                    .entry(format!("{key:?}"))
                    .or_insert_with(|| (key.clone(), make()))
                    .1
            }
            (
                Builder::List(items) | Builder::Tuple(items),
                Step::InList(index) | Step::InTuple(index),
            ) => items.entry(*index).or_insert_with(make),
            (Builder::Leaf(_), _) => return Err(refused(fqn, "a value where others lie below")),
            _ => {
                return Err(refused(
                    fqn,
                    "a place that is a dict to one key and a list to another",
                ));
            }
        };
        Ok((item, is_new))
    }

    /// Makes the structure; `gaps` are the positions without a value that it may still have.
    fn finish(self, gaps: &mut usize) -> Result<Structure, FormatError> {
        Ok(match self {
            Builder::Leaf(fqn) => Structure::Leaf(fqn),
            Builder::Dict(items) => Structure::Dict(finish_dict(items, gaps)?),
            Builder::Module(of, items) => Structure::Module(of, finish_dict(items, gaps)?),
            Builder::List(items) => Structure::List(finish_list(items, gaps)?),
            Builder::Tuple(items) => Structure::Tuple(finish_list(items, gaps)?),
        })
    }
}

fn finish_dict(
    items: Items,
    gaps: &mut usize,
) -> Result<Vec<(PlainValue, Structure)>, FormatError> {
    items
        .into_values()
        .map(|(key, child)| Ok((key, child.finish(gaps)?)))
        .collect()
}

/// Returns the items of a list in order. `gaps` is the number of missing positions that may still
/// be filled.
fn finish_list(
    list: BTreeMap<usize, Builder>,
    gaps: &mut usize,
) -> Result<Vec<Structure>, FormatError> {
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
    Ok(items)
}

fn refused(fqn: &str, what: &str) -> FileError {
    FileError::Encode {
        fqn: fqn.to_owned(),
        source: FormatError::Unsupported {
            what: what.to_owned(),
        },
    }
}
