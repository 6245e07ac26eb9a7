//! The operations of a map.

use super::node::{Node, Run};

/// One operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Operation {
    Transpose,
    Concat {
        dim: usize,
    },
    /// One part for each target, of these shares, or equal ones.
    Split {
        dim: usize,
        shares: Vec<usize>,
    },
    /// The rows of each head, from interleaved pairs to halves, or back.
    Permute {
        heads: usize,
        is_back: bool,
    },
    SplitQkv(HeadCounts),
    JoinQkv(HeadCounts),
    Unstack {
        name: String,
    },
    Stack {
        name: String,
    },
}

/// The numbers of heads of a fused projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HeadCounts {
    /// The number of heads of queries.
    pub(super) queries: usize,
    /// The number of heads of keys, which is that of values too.
    pub(super) keys: usize,
}

impl Operation {
    /// Returns the operation that undoes this one.
    pub(super) fn reversed(&self) -> Self {
        match self {
            Operation::Transpose => Operation::Transpose,
            Operation::Concat { dim } => Operation::Split {
                dim: *dim,
                shares: Vec::new(),
            },
            Operation::Split { dim, .. } => Operation::Concat { dim: *dim },
            Operation::Permute { heads, is_back } => Operation::Permute {
                heads: *heads,
                is_back: !is_back,
            },
            Operation::SplitQkv(counts) => Operation::JoinQkv(*counts),
            Operation::JoinQkv(counts) => Operation::SplitQkv(*counts),
            Operation::Unstack { name } => Operation::Stack { name: name.clone() },
            Operation::Stack { name } => Operation::Unstack { name: name.clone() },
        }
    }

    /// Applies it to the tensors so far; `targets` is the number that is wanted in the end.
    pub(super) fn apply(&self, nodes: Vec<Node>, targets: usize) -> Result<Vec<Node>, String> {
        match self {
            Operation::Transpose => nodes.into_iter().map(Node::transposed).collect(),
            Operation::Concat { dim } => Ok(vec![concat(nodes, *dim)?]),
            Operation::Split { dim, shares } => split(&single(nodes)?, *dim, shares, targets),
            Operation::Permute { heads, is_back } => nodes
                .into_iter()
                .map(|node| permute(node, *heads, *is_back))
                .collect(),
            Operation::SplitQkv(counts) => split_qkv(&single(nodes)?, *counts),
            Operation::JoinQkv(counts) => Ok(vec![join_qkv(nodes, *counts)?]),
            Operation::Unstack { .. } | Operation::Stack { .. } => Ok(nodes),
        }
    }
}

/// Returns the only tensor of those so far.
fn single(nodes: Vec<Node>) -> Result<Node, String> {
    let [node] =
        <[Node; 1]>::try_from(nodes).map_err(|_| "only one tensor can be split".to_owned())?;
    Ok(node)
}

/// Returns the size of a dimension.
fn size_of(node: &Node, dim: usize) -> Result<usize, String> {
    node.shape
        .get(dim)
        .copied()
        .ok_or_else(|| format!("a tensor of shape {:?} has no dimension {dim}", node.shape))
}

/// The most runs of which a tensor is made: sizes and numbers of heads may come from files.
const MAX_RUNS: usize = 1 << 20;

fn check_runs(count: usize) -> Result<(), String> {
    if count > MAX_RUNS {
        return Err(format!(
            "it would be made of {count} pieces, and may be of at most {MAX_RUNS}"
        ));
    }
    Ok(())
}

/// Joins tensors along a dimension.
fn concat(parts: Vec<Node>, dim: usize) -> Result<Node, String> {
    let mut runs = Vec::new();
    let mut at = 0usize;
    for (part, node) in parts.iter().enumerate() {
        let len = size_of(node, dim)?;
        if len > 0 {
            runs.push(Run {
                part,
                ..Run::new(at, 0, len)
            });
        }
        at = at.saturating_add(len);
    }
    Node::gathered(parts, dim, at, runs)
}

/// Splits a tensor along a dimension into `targets` parts, whose sizes are in proportion to
/// `shares`, or equal without them.
fn split(node: &Node, dim: usize, shares: &[usize], targets: usize) -> Result<Vec<Node>, String> {
    let size = size_of(node, dim)?;
    let equal = vec![1; targets];
    let shares = if shares.is_empty() { &equal } else { shares };
    let total: usize = shares.iter().sum();
    // Each share must be a whole number of indices.
    if total == 0 || !size.is_multiple_of(total) || shares.len() != targets {
        return Err(format!(
            "dimension {dim} of shape {:?} cannot be split into shares {shares:?}",
            node.shape
        ));
    }
    let mut at = 0;
    let mut parts = Vec::new();
    for share in shares {
        let len = share * (size / total);
        let runs = vec![Run::new(0, at, len)];
        parts.push(Node::gathered(vec![node.clone()], dim, len, runs)?);
        at += len;
    }
    Ok(parts)
}

/// Moves the even rows of each head before the odd ones, or back.
fn permute(node: Node, heads: usize, is_back: bool) -> Result<Node, String> {
    let size = size_of(&node, 0)?;
    // Rotary embeddings pair the rows of a head, so their number must be even.
    if heads == 0 || !size.is_multiple_of(2 * heads) {
        return Err(format!("{size} rows are not {heads} heads of an even size"));
    }
    // Going back, the rows of two halves alternate, so each row is a run of its own.
    check_runs(if is_back { size } else { 2 * heads })?;
    let head = size / heads;
    let half = head / 2;
    let mut runs = Vec::new();
    for start in (0..size).step_by(head.max(1)) {
        if is_back {
            for row in 0..half {
                runs.push(Run::new(start + 2 * row, start + row, 1));
                runs.push(Run::new(start + 2 * row + 1, start + half + row, 1));
            }
            continue;
        }
        for odd in 0..2 {
            runs.push(Run {
                step: 2,
                ..Run::new(start + odd * half, start + odd, half)
            });
        }
    }
    Node::gathered(vec![node], 0, size, runs)
}

impl HeadCounts {
    /// Returns the number of query heads in a group, which share one head of keys, and the rows of
    /// a head, where `total` rows are all heads.
    fn group(self, total: usize) -> Result<(usize, usize), String> {
        let HeadCounts { queries, keys } = self;
        let all = queries + 2 * keys;
        if keys == 0 || !queries.is_multiple_of(keys) || !total.is_multiple_of(all) {
            return Err(self.mismatch(total));
        }
        check_runs(3 * keys)?;
        Ok((queries / keys, total / all))
    }

    /// Returns the message that rows are not those of these heads.
    fn mismatch(self, rows: impl std::fmt::Debug) -> String {
        format!(
            "{rows:?} rows are not {} heads of queries and {} of keys and values",
            self.queries, self.keys
        )
    }
}

/// Splits a fused projection into queries, keys and values. It has, for each head of keys, the
/// query heads of that group, then the key head, then the value head.
fn split_qkv(node: &Node, counts: HeadCounts) -> Result<Vec<Node>, String> {
    let (queries, head) = counts.group(size_of(node, 0)?)?;
    let group = (queries + 2) * head;
    let mut parts = Vec::new();
    // The first head of each part in a group, and the number of its heads there.
    for (first, heads) in [(0, queries), (queries, 1), (queries + 1, 1)] {
        let len = heads * head;
        let runs = (0..counts.keys).map(|at| Run::new(at * len, at * group + first * head, len));
        let size = counts.keys * len;
        parts.push(Node::gathered(vec![node.clone()], 0, size, runs.collect())?);
    }
    Ok(parts)
}

/// Joins queries, keys and values as [`split_qkv`] splits them.
fn join_qkv(parts: Vec<Node>, counts: HeadCounts) -> Result<Node, String> {
    let [queries, keys, values] = &parts[..] else {
        return Err("queries, keys and values are three tensors".to_owned());
    };
    // The sizes of all three must be those of the same size of a head.
    let sizes = [size_of(queries, 0)?, size_of(keys, 0)?, size_of(values, 0)?];
    let total = sizes.into_iter().fold(0, usize::saturating_add);
    let (each, head) = counts.group(total)?;
    let others = counts.keys * head;
    if sizes != [counts.queries * head, others, others] {
        return Err(counts.mismatch(sizes));
    }
    let mut runs = Vec::new();
    for group in 0..counts.keys {
        // In a group: its query heads, then its key head, then its value head.
        let mut to = group * (each + 2) * head;
        for (part, len) in [each * head, head, head].into_iter().enumerate() {
            runs.push(Run {
                part,
                ..Run::new(to, group * len, len)
            });
            to += len;
        }
    }
    Node::gathered(parts, 0, total, runs)
}
