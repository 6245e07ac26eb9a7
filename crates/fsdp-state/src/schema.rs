//! What ranks agree on before they work on state dicts: names, kinds, dtypes and shapes, in an order of their own.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};

use fsdp_comm::{CommError, ProcessGroup};
use fsdp_flat::dtype;
use fsdp_flat::storage::is_freed;
use fsdp_layout::boxes::checked_numel;
use fsdp_layout::{DType, KeyPath};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::traverse::leaves;
use crate::{StateDict, StateError, StateValue};

/// What a leaf of a state dict is, without its values and without where they are.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Leaf {
    /// A plain value.
    Plain,
    /// A whole tensor.
    Whole { dtype: DType, shape: Vec<usize> },
    /// A sharded tensor and its global shape.
    Sharded { dtype: DType, shape: Vec<usize> },
}

impl Leaf {
    fn of(key: &KeyPath, value: &StateValue) -> Result<Leaf, StateError> {
        let freed = |shape: &[usize]| StateError::Flat(fsdp_flat::FlatError::Freed { shape: shape.to_vec() });
        let leaf = match value {
            StateValue::Tensor(tensor) if is_freed(tensor) => return Err(freed(tensor.dims())),
            StateValue::Tensor(tensor) => Leaf::Whole { dtype: dtype::of(tensor)?, shape: tensor.dims().to_vec() },
            StateValue::Raw(tensor) => Leaf::Whole { dtype: tensor.dtype(), shape: tensor.shape().to_vec() },
            StateValue::Sharded(tensor) => {
                if tensor.shards().iter().any(|shard| is_freed(&shard.tensor)) {
                    return Err(freed(tensor.shape()));
                }
                Leaf::Sharded { dtype: tensor.file_dtype()?, shape: tensor.shape().to_vec() }
            }
            _ => Leaf::Plain,
        };
        if let Some((dtype, shape)) = leaf.tensor()
            && checked_numel(shape).and_then(|numel| numel.checked_mul(dtype.size_in_bytes() as usize)).is_none()
        {
            return Err(StateError::TooLarge { key: key.flat_key(), shape: shape.to_vec() });
        }
        Ok(leaf)
    }

    /// Dtype and global shape, if it is a tensor.
    pub(crate) fn tensor(&self) -> Option<(DType, &[usize])> {
        match self {
            Leaf::Plain => None,
            Leaf::Whole { dtype, shape } | Leaf::Sharded { dtype, shape } => Some((*dtype, shape)),
        }
    }

    pub(crate) const fn is_sharded(&self) -> bool {
        matches!(self, Leaf::Sharded { .. })
    }

    /// A plain value or a whole 0-dim tensor: small, and kept by each rank as its own.
    pub(crate) fn is_scalar(&self) -> bool {
        match self {
            Leaf::Plain => true,
            Leaf::Whole { shape, .. } => shape.is_empty(),
            Leaf::Sharded { .. } => false,
        }
    }
}

impl fmt::Display for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Leaf::Plain => f.write_str("plain value"),
            Leaf::Whole { dtype, shape } => write!(f, "tensor of {dtype} {shape:?}"),
            Leaf::Sharded { dtype, shape } => write!(f, "sharded tensor of {dtype} {shape:?}"),
        }
    }
}

/// The leaves of a state dict, sorted by path, so that ranks see one order whatever order their dicts have.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub(crate) struct Schema(pub(crate) Vec<(KeyPath, Leaf)>);

impl Schema {
    pub(crate) fn of(state: &StateDict) -> Result<Self, StateError> {
        Ok(Self::with_values(state)?.0)
    }

    /// The schema, and the values in its order.
    pub(crate) fn with_values(state: &StateDict) -> Result<(Self, Vec<&StateValue>), StateError> {
        let mut leaves = leaves(state);
        leaves.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut schema = Vec::with_capacity(leaves.len());
        let mut values = Vec::with_capacity(leaves.len());
        for (path, value) in leaves {
            let leaf = Leaf::of(&path, value)?;
            schema.push((path, leaf));
            values.push(value);
        }
        Ok((Schema(schema), values))
    }

    pub(crate) fn has_sharded(&self) -> bool {
        self.0.iter().any(|(_, leaf)| leaf.is_sharded())
    }

    /// Walks through two schemas side by side, in path order.
    pub(crate) fn compare<'a>(&'a self, other: &'a Schema, mut visit: impl FnMut(Side<'a>)) {
        let (mut left, mut right) = (self.0.iter().enumerate().peekable(), other.0.iter().enumerate().peekable());
        loop {
            let order = match (left.peek(), right.peek()) {
                (None, None) => return,
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some((_, (a, _))), Some((_, (b, _)))) => a.cmp(b),
            };
            let a = if order.is_le() { left.next() } else { None };
            let b = if order.is_ge() { right.next() } else { None };
            match (a, b) {
                (Some((i, (path, a))), Some((j, (_, b)))) => visit(Side::Both { path, left: (i, a), right: (j, b) }),
                (Some((_, (path, _))), None) => visit(Side::Left { path }),
                (None, Some((_, (path, _)))) => visit(Side::Right { path }),
                (None, None) => return,
            }
        }
    }
}

/// One path of two schemas.
pub(crate) enum Side<'a> {
    /// Only the left one has it.
    Left { path: &'a KeyPath },
    /// Only the right one has it.
    Right { path: &'a KeyPath },
    /// Both have it: the positions, and what is there.
    Both { path: &'a KeyPath, left: (usize, &'a Leaf), right: (usize, &'a Leaf) },
}

/// What all ranks must bring alike to one function.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Agreement {
    /// The arguments beside the state dicts, for people to read.
    pub(crate) arguments: String,
    /// The schemas of the state dicts that must be alike.
    pub(crate) schemas: Vec<Schema>,
}

impl Agreement {
    fn hash(&self) -> u64 {
        let mut hasher = XxHash3_64::new();
        Hash::hash(self, &mut hasher);
        hasher.finish()
    }
}

/// Makes sure that all ranks bring the same schemas and arguments, and that none has an error: one agreement round,
/// and one object all-gather more if they differ, to tell how.
pub(crate) fn agree<T>(
    group: &ProcessGroup,
    operation: &'static str,
    outcome: Result<(Agreement, T), StateError>,
) -> Result<T, StateError> {
    let hash = outcome.as_ref().map_or(0, |(agreement, _)| agreement.hash());
    let agreement = outcome.as_ref().map(|(agreement, _)| agreement.clone()).ok();
    match group.agree_on(operation, hash, outcome) {
        Ok((_, value)) => Ok(value),
        Err(error @ CommError::SchemaMismatch { .. }) => {
            let agreements = group.all_gather_object(&agreement)?;
            Err(difference(group, operation, &agreements).unwrap_or(StateError::Comm(error)))
        }
        Err(error) => Err(error.into()),
    }
}

/// The first difference between what rank 0 and another rank bring; every rank finds the same one.
fn difference(group: &ProcessGroup, operation: &'static str, agreements: &[Option<Agreement>]) -> Option<StateError> {
    let ranks = group.global_ranks();
    let (first, others) = agreements.split_first()?;
    let first = first.as_ref()?;
    let reference = *ranks.first()?;
    others.iter().zip(ranks.iter().skip(1)).find_map(|(other, &rank)| {
        let other = other.as_ref()?;
        if first.arguments != other.arguments {
            return Some(StateError::ArgumentMismatch {
                operation,
                rank,
                found: other.arguments.clone(),
                reference,
                expected: first.arguments.clone(),
            });
        }
        let mut found = None;
        for (a, b) in first.schemas.iter().zip(&other.schemas) {
            a.compare(b, |side| {
                if found.is_some() {
                    return;
                }
                let key = |path: &KeyPath| path.flat_key();
                found = match side {
                    Side::Left { path } => Some(StateError::KeyMismatch { operation, rank, key: key(path), reference }),
                    Side::Right { path } => {
                        Some(StateError::KeyMismatch { operation, rank: reference, key: key(path), reference: rank })
                    }
                    Side::Both { path, left: (_, a), right: (_, b) } if a != b => Some(StateError::ValueMismatch {
                        operation,
                        key: key(path),
                        rank,
                        found: b.to_string(),
                        reference,
                        expected: a.to_string(),
                    }),
                    Side::Both { .. } => None,
                };
            });
        }
        found
    })
}
