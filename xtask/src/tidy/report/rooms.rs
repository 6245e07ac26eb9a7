//! The imports between the rooms of each crate: the files and folders directly under its `src`.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};

use super::super::modules::Modules;

/// The rooms of one crate.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rooms {
    /// The number of rooms, without the root file.
    pub(super) count: usize,
    /// The number of floors: a room stands above all those that it imports from.
    pub(super) floors: usize,
    /// The number of pairs of rooms of which the first imports from the second.
    pub(super) arrows: usize,
}

impl Rooms {
    /// Counts the rooms of the library whose source folder is `source`. `files` are the texts of
    /// all files, by name.
    ///
    /// # Errors
    /// A file that cannot be parsed, or rooms that import from each other in a circle, which stand
    /// on no floor.
    pub(super) fn read(files: &BTreeMap<String, String>, source: &str) -> Result<Rooms> {
        let modules = Modules::read(files, &format!("{source}/lib.rs"))?;
        let rooms: BTreeSet<String> = modules
            .iter()
            .filter_map(|(file, _)| room(file, source))
            .collect();
        let mut imports: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (from, to) in modules.uses() {
            if let (Some(from), Some(to)) = (room(&from, source), room(&to, source))
                && from != to
            {
                imports.entry(from).or_default().insert(to);
            }
        }
        let arrows = imports.values().map(BTreeSet::len).sum();
        Ok(Rooms {
            count: rooms.len(),
            floors: count_floors(rooms.clone(), &imports, source)?,
            arrows,
        })
    }
}

/// Returns the room that a file belongs to; `None` for the root file of the crate.
fn room(file: &str, source: &str) -> Option<String> {
    let below = file.strip_prefix(source)?.strip_prefix('/')?;
    let first = below.split('/').next()?;
    let name = first.strip_suffix(".rs").unwrap_or(first);
    (name != "lib").then(|| name.to_owned())
}

/// Returns the number of floors: takes away the rooms that import from none of those that are left,
/// until there are none.
fn count_floors(
    mut left: BTreeSet<String>,
    imports: &BTreeMap<String, BTreeSet<String>>,
    source: &str,
) -> Result<usize> {
    let mut floors = 0;
    while !left.is_empty() {
        let lowest: Vec<String> = left
            .iter()
            .filter(|room| {
                imports
                    .get(*room)
                    .is_none_or(|imported| imported.is_disjoint(&left))
            })
            .cloned()
            .collect();
        ensure!(
            !lowest.is_empty(),
            "rooms of `{source}` import from each other in a circle: {left:?}"
        );
        left.retain(|room| !lowest.contains(room));
        floors += 1;
    }
    Ok(floors)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(files: &[(&str, &str)]) -> Result<Rooms> {
        let files = files
            .iter()
            .map(|&(name, text)| (format!("src/{name}"), text.to_owned()))
            .collect();
        Rooms::read(&files, "src")
    }

    #[test]
    fn a_room_stands_above_those_that_it_imports_from() {
        let rooms = read(&[
            ("lib.rs", "mod top; mod middle; mod low;"),
            (
                "top.rs",
                "use crate::middle::inside::M; use crate::low::L; struct T;",
            ),
            ("middle/mod.rs", "pub mod inside;"),
            ("middle/inside.rs", "use crate::low::L; pub struct M;"),
            ("low.rs", "pub struct L;"),
        ]);
        let expected = Rooms {
            count: 3,
            floors: 3,
            arrows: 3,
        };
        assert_eq!(rooms.unwrap(), expected);
    }

    #[test]
    fn rooms_in_a_circle_stand_on_no_floor() {
        let rooms = read(&[
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "use crate::b::B; pub struct A;"),
            ("b.rs", "use crate::a::A; pub struct B;"),
        ]);
        let error = rooms.unwrap_err().to_string();
        assert!(error.contains("in a circle"), "{error}");
    }
}
