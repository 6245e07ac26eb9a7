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
    Permute {
        heads: usize,
    },
    Unpermute {
        heads: usize,
    },
    SplitQkv {
        heads: usize,
        kv_heads: usize,
    },
    JoinQkv {
        heads: usize,
        kv_heads: usize,
    },
    Unstack {
        name: String,
    },
    Stack {
        name: String,
    },
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
            Operation::Permute { heads } => Operation::Unpermute { heads: *heads },
            Operation::Unpermute { heads } => Operation::Permute { heads: *heads },
            Operation::SplitQkv { heads, kv_heads } => Operation::JoinQkv {
                heads: *heads,
                kv_heads: *kv_heads,
            },
            Operation::JoinQkv { heads, kv_heads } => Operation::SplitQkv {
                heads: *heads,
                kv_heads: *kv_heads,
            },
            Operation::Unstack { name } => Operation::Stack { name: name.clone() },
            Operation::Stack { name } => Operation::Unstack { name: name.clone() },
        }
    }

    /// Applies it to the tensors so far; `targets` is the number that is wanted in the end.
    pub(super) fn apply(&self, nodes: Vec<Node>, targets: usize) -> Result<Vec<Node>, String> {
        match self {
            Operation::Transpose => nodes.into_iter().map(Node::transposed).collect(),
            Operation::Concat { dim } => Ok(vec![concat(nodes, *dim)?]),
            Operation::Split { dim, shares } => {
                let [node] = <[Node; 1]>::try_from(nodes)
                    .map_err(|_| "only one tensor can be split".to_owned())?;
                split(&node, *dim, shares, targets)
            }
            Operation::Permute { heads } => nodes
                .into_iter()
                .map(|node| permute(node, *heads, false))
                .collect(),
            Operation::Unpermute { heads } => nodes
                .into_iter()
                .map(|node| permute(node, *heads, true))
                .collect(),
            Operation::SplitQkv { heads, kv_heads } => {
                let [node] = <[Node; 1]>::try_from(nodes)
                    .map_err(|_| "only one tensor can be split".to_owned())?;
                split_qkv(&node, *heads, *kv_heads)
            }
            Operation::JoinQkv { heads, kv_heads } => {
                let three = <[Node; 3]>::try_from(nodes);
                let three =
                    three.map_err(|_| "queries, keys and values are three tensors".to_owned())?;
                Ok(vec![join_qkv(three, *heads, *kv_heads)?])
            }
            Operation::Unstack { .. } | Operation::Stack { .. } => Ok(nodes),
        }
    }
}

fn rows(node: &Node, dim: usize) -> Result<usize, String> {
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
    let (mut runs, mut at) = (Vec::new(), 0usize);
    for (part, node) in parts.iter().enumerate() {
        let len = rows(node, dim)?;
        if len > 0 {
            runs.push(Run {
                to: at,
                len,
                part,
                from: 0,
                step: 1,
            });
        }
        at = at.saturating_add(len);
    }
    Node::gathered(parts, dim, at, runs)
}

/// Splits a tensor along a dimension into `targets` parts, whose sizes are in proportion to
/// `shares`, or equal without them.
fn split(node: &Node, dim: usize, shares: &[usize], targets: usize) -> Result<Vec<Node>, String> {
    let size = rows(node, dim)?;
    let equal = vec![1; targets];
    let shares = if shares.is_empty() { &equal } else { shares };
    let total: usize = shares.iter().sum();
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
        let runs = vec![Run {
            to: 0,
            len,
            part: 0,
            from: at,
            step: 1,
        }];
        parts.push(Node::gathered(vec![node.clone()], dim, len, runs)?);
        at += len;
    }
    Ok(parts)
}

/// Moves the even rows of each head before the odd ones, or back.
fn permute(node: Node, heads: usize, back: bool) -> Result<Node, String> {
    let size = rows(&node, 0)?;
    if heads == 0 || !size.is_multiple_of(2 * heads) {
        return Err(format!("{size} rows are not {heads} heads of an even size"));
    }
    // Going back, each row is a run of its own.
    check_runs(if back { size } else { 2 * heads })?;
    let (head, half) = (size / heads, size / heads / 2);
    let mut runs = Vec::new();
    for start in (0..size).step_by(head.max(1)) {
        if back {
            for row in 0..half {
                runs.push(Run {
                    to: start + 2 * row,
                    len: 1,
                    part: 0,
                    from: start + row,
                    step: 1,
                });
                runs.push(Run {
                    to: start + 2 * row + 1,
                    len: 1,
                    part: 0,
                    from: start + half + row,
                    step: 1,
                });
            }
        } else {
            for odd in 0..2 {
                runs.push(Run {
                    to: start + odd * half,
                    len: half,
                    part: 0,
                    from: start + odd,
                    step: 2,
                });
            }
        }
    }
    Node::gathered(vec![node], 0, size, runs)
}

/// Returns the number of query heads in a group, and the rows of a head, where `total` rows are all
/// heads.
fn groups(heads: usize, kv_heads: usize, total: usize) -> Result<(usize, usize), String> {
    let all = heads + 2 * kv_heads;
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) || !total.is_multiple_of(all) {
        return Err(format!(
            "{total} rows are not {heads} heads of queries and {kv_heads} of keys and values"
        ));
    }
    check_runs(3 * kv_heads)?;
    Ok((heads / kv_heads, total / all))
}

/// Splits a packed projection into queries, keys and values. It has, for each head of keys, the
/// query heads of that group, then the key head, then the value head.
fn split_qkv(node: &Node, heads: usize, kv_heads: usize) -> Result<Vec<Node>, String> {
    let (each, head) = groups(heads, kv_heads, rows(node, 0)?)?;
    let group = (each + 2) * head;
    let part = |first: usize, count: usize| {
        let len = count * head;
        let runs = (0..kv_heads).map(|at| Run {
            to: at * len,
            len,
            part: 0,
            from: at * group + first * head,
            step: 1,
        });
        Node::gathered(vec![node.clone()], 0, kv_heads * len, runs.collect())
    };
    Ok(vec![part(0, each)?, part(each, 1)?, part(each + 1, 1)?])
}

/// Joins queries, keys and values as [`split_qkv`] splits them.
fn join_qkv(three: [Node; 3], heads: usize, kv_heads: usize) -> Result<Node, String> {
    let sizes = [
        rows(&three[0], 0)?,
        rows(&three[1], 0)?,
        rows(&three[2], 0)?,
    ];
    let total = sizes.into_iter().fold(0, usize::saturating_add);
    let (each, head) = groups(heads, kv_heads, total)?;
    if sizes != [heads * head, kv_heads * head, kv_heads * head] {
        return Err(format!(
            "{sizes:?} rows are not {heads} heads of queries and {kv_heads} of keys and values"
        ));
    }
    let mut runs = Vec::new();
    for group in 0..kv_heads {
        let at = group * (each + 2) * head;
        runs.push(Run {
            to: at,
            len: each * head,
            part: 0,
            from: group * each * head,
            step: 1,
        });
        runs.push(Run {
            to: at + each * head,
            len: head,
            part: 1,
            from: group * head,
            step: 1,
        });
        runs.push(Run {
            to: at + (each + 1) * head,
            len: head,
            part: 2,
            from: group * head,
            step: 1,
        });
    }
    Node::gathered(three.into(), 0, total, runs)
}
