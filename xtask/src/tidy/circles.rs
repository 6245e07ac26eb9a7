//! The rule that files of a crate, and folders of a crate, use each other in one direction only.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Pairs of files, or of folders: the first uses the second.
type Uses = BTreeSet<(String, String)>;

/// Returns a message for each circle in the uses of one crate: files, or folders of `src`, that use
/// each other, directly or through others.
pub(super) fn check(uses: &Uses) -> Vec<String> {
    let mut breaches = Vec::new();
    for (what, uses) in [("files", uses), ("folders", &folders(uses))] {
        for circle in find_circles(uses) {
            breaches.push(format!("{what} use each other in a circle: {circle}"));
        }
    }
    breaches
}

/// Returns the uses of folders by files of other folders.
fn folders(uses: &Uses) -> Uses {
    let mut found = Uses::new();
    for (from, to) in uses {
        if let (Some(from), Some(to)) = (folder(from, uses), folder(to, uses))
            && from != to
        {
            found.insert((from, to));
        }
    }
    found
}

/// Returns the folder of `src` that a file belongs to. `a/b.rs`, `a/b/c.rs`, and `a.rs` beside a
/// folder `a` all belong to `crates/x/src/a`. Other files directly in `src` belong to none.
fn folder(file: &str, uses: &Uses) -> Option<String> {
    let (source, rest) = file.split_once("/src/")?;
    let room = match rest.split_once('/') {
        Some((room, _)) => format!("{source}/src/{room}"),
        None => format!("{source}/src/{}", rest.strip_suffix(".rs")?),
    };
    // A file directly in `src` is of a folder only if there are files in that folder.
    let inside = format!("{room}/");
    uses.iter()
        .any(|(from, to)| from.starts_with(&inside) || to.starts_with(&inside))
        .then_some(room)
}

/// Returns one shortest circle through each group of nodes that reach each other.
fn find_circles(uses: &Uses) -> Vec<String> {
    let mut next: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (from, to) in uses {
        next.entry(from).or_default().push(to);
    }
    let mut told: BTreeSet<&str> = BTreeSet::new();
    let mut circles = Vec::new();
    for &start in next.keys() {
        // One circle for each knot is enough: once it is undone, the next run tells the rest.
        if told.contains(start) {
            continue;
        }
        if let Some(circle) = circle_through(start, &next) {
            circles.push(circle.join(" -> "));
            told.extend(circle);
        }
    }
    circles
}

/// Returns the shortest circle through a node, found by a breadth-first search.
fn circle_through<'a>(
    start: &'a str,
    next: &BTreeMap<&'a str, Vec<&'a str>>,
) -> Option<Vec<&'a str>> {
    let mut came_from: BTreeMap<&str, &str> = BTreeMap::new();
    let mut queue = VecDeque::from([start]);
    while let Some(node) = queue.pop_front() {
        for &to in next.get(node).into_iter().flatten() {
            if to == start {
                // Walk back along the way that the search has come.
                let mut circle = vec![start, node];
                while let Some(&before) = circle.last().and_then(|node| came_from.get(node)) {
                    circle.push(before);
                }
                circle.reverse();
                return Some(circle);
            }
            if !came_from.contains_key(to) {
                came_from.insert(to, node);
                queue.push_back(to);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles_of(uses: &[(&str, &str)]) -> Vec<String> {
        check(&in_a_crate(uses))
    }

    fn in_a_crate(pairs: &[(&str, &str)]) -> Uses {
        pairs
            .iter()
            .map(|&(from, to)| (format!("crates/x/src/{from}"), format!("crates/x/src/{to}")))
            .collect()
    }

    #[test]
    fn files_that_use_each_other_in_one_direction_are_fine() {
        assert!(circles_of(&[("a.rs", "b.rs"), ("a.rs", "c.rs"), ("b.rs", "c.rs")]).is_empty());
    }

    #[test]
    fn a_circle_of_files_is_told_once_with_its_files_in_order() {
        let found = circles_of(&[
            ("a.rs", "b.rs"),
            ("b.rs", "c.rs"),
            ("c.rs", "a.rs"),
            ("d.rs", "a.rs"),
        ]);
        let told =
            "crates/x/src/a.rs -> crates/x/src/b.rs -> crates/x/src/c.rs -> crates/x/src/a.rs";
        assert_eq!(found, [format!("files use each other in a circle: {told}")]);
        assert_eq!(circles_of(&[("a.rs", "b.rs"), ("b.rs", "a.rs")]).len(), 1);
    }

    #[test]
    fn folders_must_not_use_each_other_even_where_no_files_do() {
        let found = circles_of(&[("a/one.rs", "b/one.rs"), ("b/two.rs", "a/two.rs")]);
        let told = "crates/x/src/a -> crates/x/src/b -> crates/x/src/a";
        assert_eq!(
            found,
            [format!("folders use each other in a circle: {told}")]
        );
        // The file `a.rs` is of the folder `a`; `c.rs` is of none.
        assert_eq!(
            circles_of(&[("a.rs", "b/one.rs"), ("b/two.rs", "a/two.rs")]).len(),
            1
        );
        assert!(circles_of(&[("c.rs", "b/one.rs"), ("b/two.rs", "d.rs")]).is_empty());
    }
}
