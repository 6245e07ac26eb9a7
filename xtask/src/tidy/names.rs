//! The rule that no two public types of the workspace have one name.

use std::collections::BTreeMap;

/// Returns a message for each name that several public types have. `types` are pairs of a type's
/// name and its file.
pub(super) fn check(types: &[(String, String)]) -> Vec<String> {
    let mut files: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, file) in types {
        files.entry(name).or_default().push(file);
    }
    files.retain(|_, files| files.len() > 1);
    files
        .iter()
        .map(|(name, files)| format!("`{name}` is a public type in {}", files.join(" and in ")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_two_public_types_is_found() {
        let types = [("A", "a.rs"), ("B", "a.rs"), ("A", "b.rs")]
            .map(|(name, file)| (name.to_owned(), file.to_owned()));
        assert!(check(&types[..2]).is_empty());
        assert_eq!(check(&types), ["`A` is a public type in a.rs and in b.rs"]);
    }
}
