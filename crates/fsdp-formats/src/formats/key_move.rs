//! The path that a key gets in the nested state dict when it is renamed: as many parts as before,
//! as far as that goes.

use fsdp_layout::{KeyPath, PathPart};

/// A change of a path: its first and last parts stay, and the parts between them are replaced by
/// one new part or removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyMove {
    /// The number of parts at the beginning that stay.
    head_length: usize,
    /// The key that replaces the parts between; `None` if they are only removed.
    new_part: Option<String>,
    /// The position of the first of the parts at the end that stay.
    tail_start: usize,
}

impl KeyMove {
    /// Finds the smallest change of a path after which its flat key is `new_key`. A part that
    /// changes is a key of a dict afterwards, so no part changes below a list that stays.
    pub fn new(path: &KeyPath, new_key: &str) -> Self {
        let part_texts: Vec<String> = path.0.iter().map(PathPart::to_string).collect();
        // The last parts of the path that `new_key` ends with. The first part is never one of them.
        let mut end = new_key.len();
        let mut tail_start = part_texts.len();
        while tail_start > 1 {
            let Some(text_before) = new_key[..end].strip_suffix(&part_texts[tail_start - 1]) else {
                break;
            };
            if text_before.is_empty() && !is_index(path, tail_start - 1) {
                // All of `new_key` is at the end of the path, so the parts before that are removed.
                return KeyMove {
                    head_length: 0,
                    new_part: None,
                    tail_start: tail_start - 1,
                };
            }
            // The text before must be whole parts, which a dot ends. Without such a text, the
            // position in a list that begins `new_key` becomes a key of a dict.
            let Some(text_before) = text_before.strip_suffix('.') else {
                break;
            };
            end = text_before.len();
            tail_start -= 1;
        }
        // The first parts of the path that the text left begins with. At least one part changes.
        let mut start = 0;
        let mut head_length = 0;
        while head_length + 1 < tail_start {
            let text_after = new_key[start..end]
                .strip_prefix(&part_texts[head_length])
                .and_then(|text_after| text_after.strip_prefix('.'));
            let Some(text_after) = text_after.filter(|text_after| !text_after.is_empty()) else {
                break;
            };
            start = end - text_after.len();
            head_length += 1;
        }
        // A list has no keys: a key that replaces one of its positions is put into the nearest dict
        // that contains the list.
        while head_length > 0 && is_index(path, head_length) {
            head_length -= 1;
            start -= part_texts[head_length].len() + 1;
        }
        KeyMove {
            head_length,
            new_part: Some(new_key[start..end].to_owned()),
            tail_start,
        }
    }

    /// Applies the change to the parts of a path, and returns the new ones. `make_part` makes the
    /// new part from its key.
    pub fn apply<P: Clone>(&self, parts: &[P], make_part: impl FnOnce(&str) -> P) -> Vec<P> {
        let new_part = self.new_part.as_deref().map(make_part);
        parts[..self.head_length]
            .iter()
            .cloned()
            .chain(new_part)
            .chain(parts[self.tail_start..].iter().cloned())
            .collect()
    }
}

/// Returns `true` if the part at a position of a path is an index of a list.
fn is_index(path: &KeyPath, position: usize) -> bool {
    matches!(path.0.get(position), Some(PathPart::Index(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the path, written with slashes, that one gets with a new name. Numbers are
    /// positions.
    fn moved(path: &str, name: &str) -> String {
        let parse_part = |text: &str| {
            text.parse()
                .map_or_else(|_| PathPart::Key(text.to_owned()), PathPart::Index)
        };
        let path = KeyPath(path.split('/').map(parse_part).collect());
        let parts = KeyMove::new(&path, name).apply(&path.0, |key| PathPart::Key(key.to_owned()));
        assert_eq!(KeyPath(parts.clone()).flat_key(), name);
        let text_of = |part: &PathPart| match part {
            PathPart::Key(key) => format!("{key:?}"),
            PathPart::Index(index) => index.to_string(),
        };
        parts
            .iter()
            .map(text_of)
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
