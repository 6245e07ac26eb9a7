//! [`Schema`]: a state dict without its elements, which is what ranks agree on before anything
//! moves.

use std::fmt;
use std::sync::Arc;

use fsdp_flat::storage::is_released;
use fsdp_flat::{FlatError, dtype};
use fsdp_layout::boxes::{checked_bytes, checked_numel};
use fsdp_layout::{DType, KeyPath, PathPart};
use itertools::{EitherOrBoth, Itertools as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::StateError;
use crate::state_dict::{StateDict, StateValue};
use crate::traverse::{check_gaps, leaves};

/// One value of a state dict without its elements, and without where they are.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Leaf {
    /// A plain value.
    Plain,
    /// A whole tensor.
    Whole {
        /// Its dtype.
        dtype: DType,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A sharded tensor.
    Sharded {
        /// Its dtype.
        dtype: DType,
        /// Its global shape.
        shape: Vec<usize>,
    },
}

impl Leaf {
    /// Returns the description of a value; `key` is its name in errors.
    ///
    /// # Errors
    /// A tensor whose memory is released, or of a dtype or a shape that no file holds.
    pub fn from_value(key: &KeyPath, value: &StateValue) -> Result<Leaf, StateError> {
        let leaf = match value {
            StateValue::Tensor(tensor) => Leaf::Whole {
                dtype: dtype::file_dtype(tensor.dtype())?,
                shape: tensor.dims().to_vec(),
            },
            StateValue::Raw(tensor) => Leaf::Whole {
                dtype: tensor.dtype(),
                shape: tensor.shape().to_vec(),
            },
            StateValue::Sharded(tensor) => Leaf::Sharded {
                dtype: tensor.file_dtype()?,
                shape: tensor.shape().to_vec(),
            },
            _ => Leaf::Plain,
        };
        let Some((dtype, shape)) = leaf.tensor() else {
            return Ok(leaf);
        };
        let shape = shape.to_vec();
        let mut tensors = value.candle_tensors().into_iter();
        if tensors.any(is_released) {
            return Err(FlatError::Freed { shape }.into());
        }
        // Code that allocates memory for a tensor of a schema multiplies its sizes unchecked.
        match checked_bytes(&shape, dtype) {
            Some(_) => Ok(leaf),
            None => Err(StateError::TooLarge {
                key: key.flat_key(),
                shape,
            }),
        }
    }

    /// Returns dtype and global shape; `None` for a plain value.
    #[must_use]
    pub fn tensor(&self) -> Option<(DType, &[usize])> {
        match self {
            Leaf::Plain => None,
            Leaf::Whole { dtype, shape } | Leaf::Sharded { dtype, shape } => Some((*dtype, shape)),
        }
    }

    /// Returns dtype and shape for a report: `float32 [2, 3]`.
    #[must_use]
    pub fn describe(&self) -> String {
        self.tensor().map_or_else(
            || self.to_string(),
            |(dtype, shape)| format!("{dtype} {shape:?}"),
        )
    }

    /// Returns `true` for a sharded tensor.
    #[must_use]
    pub const fn is_sharded(&self) -> bool {
        matches!(self, Leaf::Sharded { .. })
    }

    /// Returns `true` for a plain value and for a whole tensor without dimensions: one may stand
    /// for the other, as an optimizer's step may be either.
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

/// The one description of a state dict without its elements: names, kinds, dtypes and shapes.
///
/// It is sorted by path, so that ranks see one order whatever order their dicts have. Copies share
/// their memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Schema(
    #[serde(
        serialize_with = "serialize_leaves",
        deserialize_with = "deserialize_leaves"
    )]
    Arc<Leaves>,
);

/// The leaves of a schema, and their paths.
type Leaves = Vec<(KeyPath, Leaf)>;

/// Serializes leaves as serde does a vector.
fn serialize_leaves<S: Serializer>(leaves: &Leaves, serializer: S) -> Result<S::Ok, S::Error> {
    leaves.serialize(serializer)
}

/// Deserializes what [`serialize_leaves`] wrote.
fn deserialize_leaves<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<Leaves>, D::Error> {
    Leaves::deserialize(deserializer).map(Arc::new)
}

impl Schema {
    /// Returns a schema of `leaves`.
    #[must_use]
    pub fn new(mut leaves: Vec<(KeyPath, Leaf)>) -> Self {
        leaves.sort_by(|(path, _), (other_path, _)| path.cmp(other_path));
        Schema(Arc::new(leaves))
    }

    /// Checks that a state dict can be made of the paths: that its lists have about as many
    /// elements as there are values. The paths of a checkpoint may ask for many long lists of
    /// nothing.
    ///
    /// # Errors
    /// [`StateError::WrongContainer`], which names the path.
    pub fn check_gaps(&self) -> Result<(), StateError> {
        check_gaps(self.iter().map(|(path, _)| path))
    }

    /// Returns the leaf at a position, and its path; `None` if there is no such position.
    #[must_use]
    pub fn get(&self, position: usize) -> Option<&(KeyPath, Leaf)> {
        self.0.get(position)
    }

    /// Returns the leaves and their paths, sorted by path.
    pub fn iter(&self) -> std::slice::Iter<'_, (KeyPath, Leaf)> {
        self.0.iter()
    }

    /// Returns `true` if some path begins with a key.
    #[must_use]
    pub fn has_key(&self, key: &str) -> bool {
        self.0.iter().any(
            |(path, _)| matches!(path.0.first(), Some(PathPart::Key(top_key)) if top_key == key),
        )
    }

    /// Returns `true` if the leaf at a position is a plain value or a whole tensor of one element.
    /// Such small values are sent with the schema.
    #[must_use]
    pub fn is_small(&self, position: usize) -> bool {
        match self.get(position) {
            Some((_, Leaf::Plain)) => true,
            Some((_, Leaf::Whole { shape, .. })) => checked_numel(shape) == Some(1),
            _ => false,
        }
    }

    /// Returns the schema of a state dict, with a leaf for each value in its dicts, lists and
    /// tuples.
    ///
    /// # Errors
    /// Tensors whose memory is released, or of dtypes and shapes that no file holds.
    pub fn from_state(state: &StateDict) -> Result<Self, StateError> {
        Ok(Self::with_values(state)?.0)
    }

    /// Returns the schema of a state dict, and the dict's values in the order of the schema.
    pub(crate) fn with_values(state: &StateDict) -> Result<(Self, Vec<&StateValue>), StateError> {
        let mut leaves = leaves(state);
        leaves.sort_by(|(path, _), (other_path, _)| path.cmp(other_path));
        let mut schema = Vec::with_capacity(leaves.len());
        let mut values = Vec::with_capacity(leaves.len());
        for (path, value) in leaves {
            let leaf = Leaf::from_value(&path, value)?;
            schema.push((path, leaf));
            values.push(value);
        }
        Ok((Schema(Arc::new(schema)), values))
    }

    /// Returns the leaves of two schemas with their positions, those of one path side by side, in
    /// path order.
    pub(crate) fn compare<'a>(
        &'a self,
        other: &'a Schema,
    ) -> impl Iterator<Item = EitherOrBoth<Positioned<'a>>> {
        self.iter().enumerate().merge_join_by(
            other.iter().enumerate(),
            |(_, (path, _)), (_, (other_path, _))| path.cmp(other_path),
        )
    }
}

/// A leaf of a schema: its position, and its path with it.
pub(crate) type Positioned<'a> = (usize, &'a (KeyPath, Leaf));
