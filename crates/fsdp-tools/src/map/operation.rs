//! The operations of a map.

use fsdp_layout::count_text;

use super::node::{Node, Run};

/// One operation.
#[derive(Debug, Clone)]
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
        is_inverse: bool,
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
#[derive(Debug, Clone, Copy)]
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
            Operation::Permute { heads, is_inverse } => Operation::Permute {
                heads: *heads,
                is_inverse: !is_inverse,
            },
            Operation::SplitQkv(counts) => Operation::JoinQkv(*counts),
            Operation::JoinQkv(counts) => Operation::SplitQkv(*counts),
            Operation::Unstack { name } => Operation::Stack { name: name.clone() },
            Operation::Stack { name } => Operation::Unstack { name: name.clone() },
        }
    }

    /// Applies it to the tensors so far, and returns what it makes of them; `target_count` is the
    /// number that is wanted in the end.
    pub(super) fn apply(&self, nodes: Vec<Node>, target_count: usize) -> Result<Vec<Node>, String> {
        match self {
            Operation::Transpose => nodes.into_iter().map(Node::transpose).collect(),
            Operation::Concat { dim } => Ok(vec![concat(nodes, *dim)?]),
            Operation::Split { dim, shares } => {
                split(&only_tensor(nodes)?, *dim, shares, target_count)
            }
            Operation::Permute { heads, is_inverse } => nodes
                .into_iter()
                .map(|node| permute(node, *heads, *is_inverse))
                .collect(),
            Operation::SplitQkv(counts) => split_qkv(&only_tensor(nodes)?, *counts),
            Operation::JoinQkv(counts) => Ok(vec![join_qkv(nodes, *counts)?]),
            Operation::Unstack { .. } | Operation::Stack { .. } => Ok(nodes),
        }
    }
}

/// Returns the only tensor of those so far. Several, or none, are an error.
fn only_tensor(nodes: Vec<Node>) -> Result<Node, String> {
    let [node] =
        <[Node; 1]>::try_from(nodes).map_err(|_| "only one tensor can be split".to_owned())?;
    Ok(node)
}

/// Returns the size of a dimension. One that the tensor does not have is an error.
fn dim_size(node: &Node, dim: usize) -> Result<usize, String> {
    node.shape
        .get(dim)
        .copied()
        .ok_or_else(|| format!("a tensor of shape {:?} has no dimension {dim}", node.shape))
}

/// The most runs of which a tensor is made: sizes and numbers of heads may come from files.
const MAX_RUNS: usize = 1 << 20;

/// Refuses a tensor that would be made of too many runs.
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
    let mut end = 0usize;
    for (part, node) in parts.iter().enumerate() {
        let len = dim_size(node, dim)?;
        if len > 0 {
            runs.push(Run {
                part,
                ..Run::new(end, 0, len)
            });
        }
        end = end.saturating_add(len);
    }
    Node::gather(parts, dim, end, runs)
}

/// Splits a tensor along a dimension into `target_count` parts, whose sizes are in proportion to
/// `shares`, or equal without them.
fn split(
    node: &Node,
    dim: usize,
    shares: &[usize],
    target_count: usize,
) -> Result<Vec<Node>, String> {
    let size = dim_size(node, dim)?;
    let equal_shares = vec![1; target_count];
    let shares = if shares.is_empty() {
        &equal_shares
    } else {
        shares
    };
    let total: usize = shares.iter().sum();
    // Each share must be a whole number of indices.
    if total == 0 || !size.is_multiple_of(total) || shares.len() != target_count {
        return Err(format!(
            "dimension {dim} of shape {:?} cannot be split into shares {shares:?}",
            node.shape
        ));
    }
    let mut start = 0;
    let mut parts = Vec::new();
    for share in shares {
        let len = share * (size / total);
        let runs = vec![Run::new(0, start, len)];
        parts.push(Node::gather(vec![node.clone()], dim, len, runs)?);
        start += len;
    }
    Ok(parts)
}

/// Moves the even rows of each head before the odd ones, or back.
fn permute(node: Node, heads: usize, is_inverse: bool) -> Result<Node, String> {
    let size = dim_size(&node, 0)?;
    // Rotary embeddings pair the rows of a head, so their number must be even.
    if heads == 0 || !size.is_multiple_of(2 * heads) {
        return Err(format!(
            "{} cannot be {} of an even size",
            count_text(size, "row", "rows"),
            count_text(heads, "head", "heads")
        ));
    }
    // Going back, the rows of two halves alternate, so each row is a run of its own.
    check_runs(if is_inverse { size } else { 2 * heads })?;
    let head_rows = size / heads;
    let half = head_rows / 2;
    let mut runs = Vec::new();
    for start in (0..size).step_by(head_rows.max(1)) {
        if is_inverse {
            for row in 0..half {
                runs.push(Run::new(start + 2 * row, start + row, 1));
                runs.push(Run::new(start + 2 * row + 1, start + half + row, 1));
            }
            continue;
        }
        // First every second row from the first on, then every second row from the next on.
        for odd in 0..2 {
            runs.push(Run {
                step: 2,
                ..Run::new(start + odd * half, start + odd, half)
            });
        }
    }
    Node::gather(vec![node], 0, size, runs)
}

impl HeadCounts {
    /// Returns the number of query heads in a group, which share one head of keys, and the rows of
    /// a head, where `rows` rows are all heads.
    fn group_sizes(self, rows: usize) -> Result<(usize, usize), String> {
        let HeadCounts { queries, keys } = self;
        let head_count = queries + 2 * keys;
        if keys == 0 || !queries.is_multiple_of(keys) || !rows.is_multiple_of(head_count) {
            return Err(self.mismatch(rows));
        }
        check_runs(3 * keys)?;
        Ok((queries / keys, rows / head_count))
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
    let (group_queries, head_rows) = counts.group_sizes(dim_size(node, 0)?)?;
    let group_rows = (group_queries + 2) * head_rows;
    let mut parts = Vec::new();
    // The first head of each part in a group, and the number of its heads there.
    for (first_head, head_count) in [
        (0, group_queries),
        (group_queries, 1),
        (group_queries + 1, 1),
    ] {
        let len = head_count * head_rows;
        // A part has its heads of all groups, one group after the other.
        let runs = (0..counts.keys).map(|group| {
            Run::new(
                group * len,
                group * group_rows + first_head * head_rows,
                len,
            )
        });
        let size = counts.keys * len;
        parts.push(Node::gather(vec![node.clone()], 0, size, runs.collect())?);
    }
    Ok(parts)
}

/// Joins queries, keys and values as [`split_qkv`] splits them.
fn join_qkv(parts: Vec<Node>, counts: HeadCounts) -> Result<Node, String> {
    let [queries, keys, values] = &parts[..] else {
        return Err("queries, keys and values are three tensors".to_owned());
    };
    // The sizes of all three must be those of the same size of a head.
    let sizes = [
        dim_size(queries, 0)?,
        dim_size(keys, 0)?,
        dim_size(values, 0)?,
    ];
    let total = sizes.into_iter().fold(0, usize::saturating_add);
    let (group_queries, head_rows) = counts.group_sizes(total)?;
    let key_rows = counts.keys * head_rows;
    if sizes != [counts.queries * head_rows, key_rows, key_rows] {
        return Err(counts.mismatch(sizes));
    }
    let mut runs = Vec::new();
    for group in 0..counts.keys {
        // In a group: its query heads, then its key head, then its value head.
        let mut result_start = group * (group_queries + 2) * head_rows;
        let lengths = [group_queries * head_rows, head_rows, head_rows];
        for (part, len) in lengths.into_iter().enumerate() {
            runs.push(Run {
                part,
                ..Run::new(result_start, group * len, len)
            });
            result_start += len;
        }
    }
    Node::gather(parts, 0, total, runs)
}
