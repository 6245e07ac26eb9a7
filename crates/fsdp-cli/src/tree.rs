//! Keys as a tree, with the sizes below each.

use indexmap::IndexMap;

use crate::natural;
use crate::text::{escaped, iec};

#[derive(Default)]
struct Node<'a> {
    children: IndexMap<&'a str, Node<'a>>,
    /// The description of a leaf; `None` for inner nodes.
    leaf: Option<String>,
    tensors: usize,
    bytes: u64,
}

/// A key of a checkpoint, as a leaf of the tree.
pub(super) struct TreeEntry<'a> {
    pub(super) key: &'a str,
    /// The description of a tensor; `None` for a value that is no tensor.
    pub(super) tensor: Option<String>,
    pub(super) bytes: u64,
}

/// Returns the lines of the tree of `entries`. Keys are split at dots, and sorted naturally.
pub(super) fn tree_lines<'a>(entries: impl Iterator<Item = TreeEntry<'a>>) -> Vec<String> {
    let mut root = Node::default();
    for TreeEntry { key, tensor, bytes } in entries {
        // Each node on the way to a leaf counts it, so every line has the sums below it.
        let tensors = usize::from(tensor.is_some());
        let mut node = &mut root;
        node.count(tensors, bytes);
        for part in key.split('.') {
            node = node.children.entry(part).or_default();
            node.count(tensors, bytes);
        }
        node.leaf = Some(tensor.unwrap_or_else(|| "value".to_owned()));
    }
    let mut lines = vec![format!(". ({} tensors, {})", root.tensors, iec(root.bytes))];
    root.push_lines(&mut lines);
    lines
}

impl<'a> Node<'a> {
    fn count(&mut self, tensors: usize, bytes: u64) {
        self.tensors += tensors;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// Takes out the child nodes, in descending order: a stack returns them in ascending order.
    fn take_children(&mut self) -> Vec<(&'a str, Node<'a>)> {
        let mut children: Vec<_> = std::mem::take(&mut self.children).into_iter().collect();
        children.sort_by(|(a, _), (b, _)| natural::compare(b, a));
        children
    }

    /// Adds the tree below this node to `lines`, without recursion, as a hostile key may have a
    /// million parts.
    fn push_lines(&mut self, lines: &mut Vec<String>) {
        let mut stack: Vec<(usize, &str, Node<'_>)> = self
            .take_children()
            .into_iter()
            .map(|(name, node)| (1, name, node))
            .collect();
        while let Some((depth, name, mut node)) = stack.pop() {
            // Deeper than this, indentation says nothing.
            let indent = "  ".repeat(depth.min(MAX_INDENT));
            let name = escaped(name);
            lines.push(match &node.leaf {
                Some(description) => format!("{indent}{name}  {description}"),
                None => format!(
                    "{indent}{name} ({} tensors, {})",
                    node.tensors,
                    iec(node.bytes)
                ),
            });
            stack.extend(
                node.take_children()
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
        let mut stack: Vec<Node<'_>> = std::mem::take(&mut self.children).into_values().collect();
        while let Some(mut node) = stack.pop() {
            stack.extend(std::mem::take(&mut node.children).into_values());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_become_a_tree_in_natural_order() {
        let tensor = |key| TreeEntry {
            key,
            tensor: Some("float32 [2]".to_owned()),
            bytes: 8,
        };
        let step = TreeEntry {
            key: "step",
            tensor: None,
            bytes: 0,
        };
        let lines = tree_lines([tensor("h.10.w"), tensor("h.2.w"), step].into_iter());
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
        let entry = TreeEntry {
            key: &key,
            tensor: None,
            bytes: 0,
        };
        assert_eq!(tree_lines([entry].into_iter()).len(), 200_002);
    }
}
