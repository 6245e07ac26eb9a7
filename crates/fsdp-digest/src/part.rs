//! The contribution of one rank, or of one file, to a digest.

use fsdp_layout::DType;
use serde::{Deserialize, Serialize};

use crate::sum::{Digest, Sum};

/// The part of one rank, or of one file, in the digest of a tensor or a value. Parts add up, in any
/// order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Part {
    /// The sum over some elements of a tensor.
    Elements(Sum),
    /// A value that has no elements, whole.
    Value(Digest),
}

impl Default for Part {
    fn default() -> Self {
        Part::Elements(Sum::default())
    }
}

impl Part {
    /// Adds another part of the same tensor or value.
    pub fn add(&mut self, other: Part) {
        match (&mut *self, other) {
            (Part::Elements(sum), Part::Elements(other)) => sum.add(other),
            // A value has no elements, so a rank that does not have the value contributes the
            // empty sum, which changes nothing.
            (_, Part::Value(_)) => *self = other,
            (Part::Value(_), Part::Elements(_)) => {}
        }
    }

    /// Returns the digest of the whole tensor of `dtype` and `shape`, or of the value, once all
    /// parts are added.
    #[must_use]
    pub fn finish(&self, dtype: DType, shape: &[usize]) -> Digest {
        match self {
            Part::Elements(sum) => sum.finish(dtype, shape),
            Part::Value(digest) => *digest,
        }
    }
}
