//! The rule that no two public types of the workspace have one name.

use std::collections::BTreeMap;

/// Names that several public types are known to have. Do not add to this list.
const KNOWN: [&str; 0] = [];

/// Returns a message for each name that several public types have. `types` are pairs of a type's
/// name and its file.
pub(super) fn check<'a>(types: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<String> {
    breaches(types, &KNOWN)
}

/// Returns a message for each name of several types that is not in `known`, and for each name in
/// `known` that is no longer one.
fn breaches<'a>(
    types: impl IntoIterator<Item = (&'a str, &'a str)>,
    known: &[&str],
) -> Vec<String> {
    let mut files: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, file) in types {
        files.entry(name).or_default().push(file);
    }
    let twice = files
        .iter()
        .filter(|(name, files)| files.len() > 1 && !known.contains(name));
    let twice = twice
        .map(|(name, files)| format!("`{name}` is a public type in {}", files.join(" and in ")));
    let stale = known
        .iter()
        .filter(|name| files.get(*name).is_none_or(|files| files.len() < 2));
    let stale = stale
        .map(|name| format!("`{name}` is one public type by now: remove it from xtask's list"));
    twice.chain(stale).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_two_public_types_is_found() {
        assert!(breaches([("A", "a.rs"), ("B", "a.rs")], &[]).is_empty());
        let found = breaches([("A", "a.rs"), ("B", "a.rs"), ("A", "b.rs")], &[]);
        assert_eq!(found, ["`A` is a public type in a.rs and in b.rs"]);
    }

    #[test]
    fn a_known_name_is_let_pass_until_it_is_mended() {
        assert!(breaches([("A", "a.rs"), ("A", "b.rs")], &["A"]).is_empty());
        assert_eq!(breaches([("A", "a.rs")], &["A"]).len(), 1);
    }
}
