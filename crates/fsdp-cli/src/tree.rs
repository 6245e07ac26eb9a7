//! Keys as a tree, with the sizes below each.

use std::cmp::Ordering;

use fsdp_layout::count_text;

use crate::natural;
use crate::text::{bytes_text, escaped};

/// Deeper than this, indentation says nothing.
const MAX_INDENT: usize = 64;

/// A node on the way to a key, with the sums of what is below it.
#[derive(Default)]
struct Node<'a> {
    name: &'a str,
    /// The description of a leaf; `None` for inner nodes.
    leaf: Option<String>,
    tensors: usize,
    bytes: u64,
}

/// Returns the lines of the tree of entries, each with its key, the description of a tensor (`None`
/// for a value that is no tensor) and its bytes. Keys are split at dots, and sorted naturally.
pub(super) fn tree_lines<'a>(
    entries: impl Iterator<Item = (&'a str, Option<String>, u64)>,
) -> Vec<String> {
    let mut entries: Vec<_> = entries
        .map(|(key, tensor, bytes)| (key.split('.').collect::<Vec<_>>(), tensor, bytes))
        .collect();
    entries.sort_by(|(a, ..), (b, ..)| compare_keys(a, b));
    // From the last key to the first, because the sums of a node are known once all below it is
    // written.
    let root = Node {
        name: ".",
        ..Node::default()
    };
    let mut path = vec![root];
    let mut lines = Vec::new();
    for (names, tensor, bytes) in entries.into_iter().rev() {
        let shared_depth = path[1..]
            .iter()
            .zip(&names)
            .take_while(|(node, name)| node.name == **name)
            .count();
        close_nodes(&mut path, 1 + shared_depth, &mut lines);
        path.extend(names[shared_depth..].iter().map(|name| Node {
            name,
            ..Node::default()
        }));
        let node = path.last_mut().expect("the root stays open");
        node.tensors += usize::from(tensor.is_some());
        node.bytes = node.bytes.saturating_add(bytes);
        node.leaf = Some(tensor.unwrap_or_else(|| "value".to_owned()));
    }
    close_nodes(&mut path, 0, &mut lines);
    lines.reverse();
    lines
}

/// Compares two keys part by part.
fn compare_keys(a: &[&str], b: &[&str]) -> Ordering {
    let mut orders = a.iter().zip(b).map(|(a, b)| natural::compare(a, b));
    let first_difference = orders.find(|order| order.is_ne());
    first_difference.unwrap_or(a.len().cmp(&b.len()))
}

/// Writes the lines of the nodes of a path that are deeper than `depth`, and adds their sums to
/// those above them.
fn close_nodes(path: &mut Vec<Node<'_>>, depth: usize, lines: &mut Vec<String>) {
    while path.len() > depth
        && let Some(node) = path.pop()
    {
        let indent = "  ".repeat(path.len().min(MAX_INDENT));
        let name = escaped(node.name);
        let Node { tensors, bytes, .. } = node;
        lines.push(match node.leaf {
            Some(description) => format!("{indent}{name}  {description}"),
            None => {
                let tensors = count_text(tensors, "tensor", "tensors");
                format!("{indent}{name} ({tensors}, {})", bytes_text(bytes))
            }
        });
        if let Some(parent) = path.last_mut() {
            parent.tensors += tensors;
            parent.bytes = parent.bytes.saturating_add(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_become_a_tree_in_natural_order() {
        let tensor = |key| (key, Some("float32 [2]".to_owned()), 8);
        let step = ("step", None, 0);
        let lines = tree_lines([tensor("h.10.w"), tensor("h.2.w"), step].into_iter());
        assert_eq!(
            lines,
            [
                ". (2 tensors, 16 B)",
                "  h (2 tensors, 16 B)",
                "    2 (1 tensor, 8 B)",
                "      w  float32 [2]",
                "    10 (1 tensor, 8 B)",
                "      w  float32 [2]",
                "  step  value",
            ]
        );
    }

    #[test]
    fn a_very_deep_key_is_no_danger() {
        let key = "a.".repeat(200_000);
        let entry = (key.as_str(), None, 0);
        assert_eq!(tree_lines([entry].into_iter()).len(), 200_002);
    }
}
