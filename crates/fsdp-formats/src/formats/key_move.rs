//! The path that a key gets in the nested state dict when it is renamed: as many parts as before,
//! as far as that goes.

use fsdp_layout::{KeyPath, PathPart};

/// A change of a path: its first and last parts stay, and the parts between them are replaced by
/// one new part or removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyMove {
    /// The number of first parts that stay.
    first: usize,
    /// The key between them.
    between: Option<String>,
    /// The position of the first of the last parts that stay.
    last: usize,
}

impl KeyMove {
    /// Finds the smallest change of a path after which its flat key is `name`. A part that changes
    /// is a key of a dict afterwards, so no part changes below a list that stays.
    pub fn new(path: &KeyPath, name: &str) -> Self {
        let texts: Vec<String> = path.0.iter().map(PathPart::to_string).collect();
        // The last parts of the path that `name` ends with. The first part always changes.
        let mut end = name.len();
        let mut last = texts.len();
        while last > 1 {
            let Some(before) = name[..end].strip_suffix(&texts[last - 1]) else {
                break;
            };
            if before.is_empty() && !is_index(path, last - 1) {
                // All of `name` is at the end of the path, so the parts before that are removed.
                return KeyMove {
                    first: 0,
                    between: None,
                    last: last - 1,
                };
            }
            // The rest must be whole parts, which a dot ends. Without a rest, the position in a
            // list that begins `name` becomes a key of a dict.
            let Some(before) = before.strip_suffix('.') else {
                break;
            };
            end = before.len();
            last -= 1;
        }
        // The first parts of the path that the rest begins with. At least one part changes.
        let mut start = 0;
        let mut first = 0;
        while first + 1 < last {
            let after = name[start..end]
                .strip_prefix(&texts[first])
                .and_then(|after| after.strip_prefix('.'));
            let Some(after) = after.filter(|after| !after.is_empty()) else {
                break;
            };
            start = end - after.len();
            first += 1;
        }
        // A list has no keys: a key that replaces one of its positions is put into the nearest dict
        // that contains the list.
        while first > 0 && is_index(path, first) {
            first -= 1;
            start -= texts[first].len() + 1;
        }
        KeyMove {
            first,
            between: Some(name[start..end].to_owned()),
            last,
        }
    }

    /// Applies the change to the parts of a path; `key` makes the new one.
    pub fn apply<P: Clone>(&self, parts: &[P], key: impl FnOnce(&str) -> P) -> Vec<P> {
        let between = self.between.as_deref().map(key);
        parts[..self.first]
            .iter()
            .cloned()
            .chain(between)
            .chain(parts[self.last..].iter().cloned())
            .collect()
    }
}

/// Returns `true` if a part of a path is a position in a list.
fn is_index(path: &KeyPath, at: usize) -> bool {
    matches!(path.0.get(at), Some(PathPart::Index(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the path, written with slashes, that one gets with a new name. Numbers are
    /// positions.
    fn moved(path: &str, name: &str) -> String {
        let part = |part: &str| {
            part.parse()
                .map_or_else(|_| PathPart::Key(part.to_owned()), PathPart::Index)
        };
        let path = KeyPath(path.split('/').map(part).collect());
        let parts = KeyMove::new(&path, name).apply(&path.0, |key| PathPart::Key(key.to_owned()));
        assert_eq!(KeyPath(parts.clone()).flat_key(), name);
        let text = |part: &PathPart| match part {
            PathPart::Key(key) => format!("{key:?}"),
            PathPart::Index(index) => index.to_string(),
        };
        parts
            .iter()
            .map(text)
            .collect::<Vec<_>>()
            .join("/")
            .replace('"', "")
    }

    #[test]
    fn a_renamed_key_keeps_the_nesting_of_its_path() {
        for (path, name, expected) in [
            // A part is renamed, at any depth.
            (
                "opt/state/w/step",
                "optimizer.state.w.step",
                "optimizer/state/w/step",
            ),
            (
                "opt/param_groups/0/lr",
                "optimizer.param_groups.0.lr",
                "optimizer/param_groups/0/lr",
            ),
            ("model/layers.0.w", "model.layers.1.w", "model/layers.1.w"),
            ("model/a/b/w", "model.x.w", "model/x/w"),
            ("model/a/w", "model.x.y.w", "model/x.y/w"),
            // A prefix is added to the first part, or to a flat key.
            ("opt/lr", "x.opt.lr", "x.opt/lr"),
            ("layers.0.w", "model.layers.0.w", "model.layers.0.w"),
            // The first part goes.
            ("model/layers.0.w", "layers.0.w", "layers.0.w"),
            ("model/a/w", "a.w", "a/w"),
            // Nothing fits.
            ("model/a", "b", "b"),
            // An item of a list becomes one of a dict, above the list.
            (
                "opt/groups/0/lr",
                "opt.groups.first.lr",
                "opt/groups.first/lr",
            ),
            ("groups/0/lr", "0.lr", "0/lr"),
            ("a/a/a", "a.a", "a/a"),
        ] {
            assert_eq!(moved(path, name), expected, "{path} as {name}");
        }
    }
}
