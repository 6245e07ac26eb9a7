//! Keys as a tree, with the sizes below each.

use indexmap::IndexMap;

use crate::natural;
use crate::text::{escaped, iec};

#[derive(Default)]
struct Node<'a> {
    below: IndexMap<&'a str, Node<'a>>,
    /// The description of a leaf; `None` for inner nodes.
    leaf: Option<String>,
    tensors: usize,
    bytes: u64,
}

/// Returns the lines of a tree of `(key, description of the tensor, bytes)`. Keys are split at
/// dots, and sorted naturally.
pub(super) fn tree<'a>(
    entries: impl Iterator<Item = (&'a str, Option<String>, u64)>,
) -> Vec<String> {
    let mut root = Node::default();
    for (key, what, bytes) in entries {
        // Each node on the way to a leaf counts it, so every line has the sums below it.
        let tensors = usize::from(what.is_some());
        let mut node = &mut root;
        node.add(tensors, bytes);
        for part in key.split('.') {
            node = node.below.entry(part).or_default();
            node.add(tensors, bytes);
        }
        node.leaf = Some(what.unwrap_or_else(|| "value".to_owned()));
    }
    let mut lines = vec![format!(". ({} tensors, {})", root.tensors, iec(root.bytes))];
    root.lines(&mut lines);
    lines
}

impl<'a> Node<'a> {
    fn add(&mut self, tensors: usize, bytes: u64) {
        self.tensors += tensors;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// Takes out the nodes below, in descending order: a stack returns them in ascending order.
    fn take_below(&mut self) -> Vec<(&'a str, Node<'a>)> {
        let mut below: Vec<_> = std::mem::take(&mut self.below).into_iter().collect();
        below.sort_by(|(a, _), (b, _)| natural::compare(b, a));
        below
    }

    /// Writes the tree without recursion, as a hostile key may have a million parts.
    fn lines(&mut self, lines: &mut Vec<String>) {
        let mut stack: Vec<(usize, &str, Node<'_>)> = self
            .take_below()
            .into_iter()
            .map(|(name, node)| (1, name, node))
            .collect();
        while let Some((depth, name, mut node)) = stack.pop() {
            // Deeper than this, indentation says nothing.
            let indent = "  ".repeat(depth.min(MAX_INDENT));
            let name = escaped(name);
            lines.push(match &node.leaf {
                Some(what) => format!("{indent}{name}  {what}"),
                None => format!(
                    "{indent}{name} ({} tensors, {})",
                    node.tensors,
                    iec(node.bytes)
                ),
            });
            stack.extend(
                node.take_below()
                    .into_iter()
                    .map(|(name, node)| (depth + 1, name, node)),
            );
        }
    }
}

const MAX_INDENT: usize = 64;

/// Without recursion, as above.
impl Drop for Node<'_> {
    fn drop(&mut self) {
        let mut stack: Vec<Node<'_>> = std::mem::take(&mut self.below).into_values().collect();
        while let Some(mut node) = stack.pop() {
            stack.extend(std::mem::take(&mut node.below).into_values());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_become_a_tree_in_natural_order() {
        let tensor = |name| (name, Some("float32 [2]".to_owned()), 8);
        let lines = tree([tensor("h.10.w"), tensor("h.2.w"), ("step", None, 0)].into_iter());
        assert_eq!(
            lines,
            [
                ". (2 tensors, 16 B)",
                "  h (2 tensors, 16 B)",
                "    2 (1 tensors, 8 B)",
                "      w  float32 [2]",
                "    10 (1 tensors, 8 B)",
                "      w  float32 [2]",
                "  step  value",
            ]
        );
    }

    #[test]
    fn a_very_deep_key_is_no_danger() {
        let key = "a.".repeat(200_000);
        assert_eq!(tree([(key.as_str(), None, 0)].into_iter()).len(), 200_002);
    }
}
