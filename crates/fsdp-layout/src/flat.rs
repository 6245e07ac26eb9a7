//! The layout of many parameters in one FlatParameter: padding, shards, and where each parameter
//! lies in a shard.
//!
//! With `use_orig_params`, padding makes each parameter start on a 16-byte boundary. More padding
//! at the end makes the total divisible by the number of ranks. torch counts both as part of the
//! unpadded size, and so does this module.
//!
//! Without `use_orig_params` parameters are not aligned, and the last ranks' shards are padded on
//! the right.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::boxes::{TensorBox, boxes_of_flat_range, checked_numel};
use crate::dtype::DType;
use crate::shard::chunk_range;

/// The alignment of parameters: each starts on a multiple of this many bytes.
const ALIGNMENT_BYTES: usize = 16;

/// The value that torch writes into alignment padding. It must never get into a state dict.
pub const ALIGNMENT_PADDING_VALUE: u8 = 42;

/// The reason that a FlatParameter cannot be laid out.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FlatLayoutError {
    /// The list of parameters is empty.
    #[error("cannot construct a FlatParameter from an empty parameter list")]
    Empty,
    /// The number of ranks is 0.
    #[error("cannot shard a FlatParameter over 0 ranks")]
    NoRanks,
    /// The number of elements does not fit a `usize`.
    #[error("parameter `{fqn}` of shape {shape:?} is too large to flatten")]
    TooLarge {
        /// The parameter.
        fqn: String,
        /// Its shape.
        shape: Vec<usize>,
    },
}

/// Returns the number of elements of `dtype` that fill 16 bytes, the alignment of parameters: 4 for
/// f32, 8 for bf16, 2 for f64.
///
/// `dtype` is the dtype of forward and backward. With mixed precision it may be narrower than that
/// of the parameters.
#[must_use]
pub const fn aligned_numel(dtype: DType) -> usize {
    ALIGNMENT_BYTES.div_ceil(dtype.size_in_bytes() as usize)
}

/// One stretch of a FlatParameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FlatEntry {
    /// The parameter with this index.
    Param(usize),
    /// Elements that belong to no parameter.
    Padding,
}

/// A parameter's part of one shard: torch's `_ShardParamInfo` of a parameter that is in the shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardParamInfo {
    /// First element in the shard.
    pub offset_in_shard: usize,
    /// Number of elements in the shard.
    pub numel_in_shard: usize,
    /// First element of the parameter that is in the shard.
    pub intra_param_start: usize,
    /// Last element of the parameter that is in the shard, inclusive.
    pub intra_param_end: usize,
}

impl ShardParamInfo {
    /// Returns the range of the shard that holds the parameter's part.
    #[must_use]
    pub const fn shard_range(&self) -> Range<usize> {
        self.offset_in_shard..self.offset_in_shard + self.numel_in_shard
    }

    /// Returns the range of the flattened parameter that lies in the shard.
    #[must_use]
    pub const fn param_range(&self) -> Range<usize> {
        self.intra_param_start..self.intra_param_end + 1
    }
}

/// The layout of a FlatParameter and of its shards on every rank.
///
/// ```
/// use fsdp_layout::{DType, FlatLayout, flat::aligned_numel};
/// let params = [("sc", vec![7]), ("l1.weight", vec![5, 3])];
/// let params = params.map(|(fqn, shape)| (fqn.to_owned(), shape));
/// let layout = FlatLayout::new(params.into(), aligned_numel(DType::F32), 2)?;
/// assert_eq!(layout.numels_with_padding(), [7, 1, 15, 1]); // aligned, then padded for two ranks
/// assert_eq!(layout.sharded_numel(), 12);
/// # Ok::<(), fsdp_layout::FlatLayoutError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlatLayout {
    fqns: Vec<String>,
    shapes: Vec<Vec<usize>>,
    numels: Vec<usize>,
    /// Parameters and the padding between them, in the order in which they lie in the
    /// FlatParameter.
    entries: Vec<FlatEntry>,
    /// The number of elements of each of `entries`.
    numels_with_padding: Vec<usize>,
    /// The first element of each parameter in the unsharded FlatParameter.
    starts: Vec<usize>,
    unpadded_numel: usize,
    world_size: usize,
}

impl FlatLayout {
    /// Lays out parameters in the order given, for `world_size` ranks.
    ///
    /// `aligned_numel` is the alignment in elements ([`aligned_numel`]) of `use_orig_params` mode,
    /// or 0 for none. For `NoShard` use a world size of 1.
    ///
    /// # Errors
    /// An empty list, no ranks, or sizes that overflow.
    pub fn new(
        params: Vec<(String, Vec<usize>)>,
        aligned_numel: usize,
        world_size: usize,
    ) -> Result<Self, FlatLayoutError> {
        if params.is_empty() {
            return Err(FlatLayoutError::Empty);
        }
        if world_size == 0 {
            return Err(FlatLayoutError::NoRanks);
        }
        let mut layout = FlatLayout {
            fqns: Vec::with_capacity(params.len()),
            shapes: Vec::with_capacity(params.len()),
            numels: Vec::with_capacity(params.len()),
            entries: Vec::with_capacity(params.len()),
            numels_with_padding: Vec::with_capacity(params.len()),
            starts: Vec::with_capacity(params.len()),
            unpadded_numel: 0,
            world_size,
        };
        for (index, (fqn, shape)) in params.into_iter().enumerate() {
            if aligned_numel > 0 {
                layout.pad_to_multiple_of(aligned_numel);
            }
            // Padding adds less than one alignment and one element per rank. With room for both, no
            // later sum overflows.
            let numel = checked_numel(&shape).filter(|&numel| {
                [numel, aligned_numel, world_size]
                    .iter()
                    .try_fold(layout.unpadded_numel, |sum, &more| sum.checked_add(more))
                    .is_some()
            });
            let Some(numel) = numel else {
                return Err(FlatLayoutError::TooLarge { fqn, shape });
            };
            layout.starts.push(layout.unpadded_numel);
            layout.entries.push(FlatEntry::Param(index));
            layout.numels_with_padding.push(numel);
            layout.unpadded_numel += numel;
            layout.fqns.push(fqn);
            layout.shapes.push(shape);
            layout.numels.push(numel);
        }
        // With alignment, the total is padded here, so that the shards of all ranks are equally
        // long without right padding.
        if aligned_numel > 0 {
            layout.pad_to_multiple_of(world_size);
        }
        Ok(layout)
    }

    /// Appends padding, if needed, so that the total number of elements so far becomes a multiple
    /// of `multiple`.
    fn pad_to_multiple_of(&mut self, multiple: usize) {
        let padding = self.unpadded_numel.next_multiple_of(multiple) - self.unpadded_numel;
        if padding > 0 {
            self.entries.push(FlatEntry::Padding);
            self.numels_with_padding.push(padding);
            self.unpadded_numel += padding;
        }
    }

    /// Returns the names of the parameters, in flat order.
    #[must_use]
    pub fn fqns(&self) -> &[String] {
        &self.fqns
    }

    /// Returns the shapes of the parameters, in flat order.
    #[must_use]
    pub fn shapes(&self) -> &[Vec<usize>] {
        &self.shapes
    }

    /// Returns the element counts of the parameters, in flat order.
    #[must_use]
    pub fn numels(&self) -> &[usize] {
        &self.numels
    }

    /// Returns the parameters and the padding between them, in flat order.
    /// [`Self::numels_with_padding`] has their lengths.
    #[must_use]
    pub fn entries(&self) -> &[FlatEntry] {
        &self.entries
    }

    /// Returns the element counts of [`Self::entries`]: of parameters and padding, in flat order.
    #[must_use]
    pub fn numels_with_padding(&self) -> &[usize] {
        &self.numels_with_padding
    }

    /// Returns the range of a parameter in the unsharded FlatParameter.
    ///
    /// # Panics
    /// If the layout has no such parameter.
    #[must_use]
    pub fn param_range(&self, param: usize) -> Range<usize> {
        self.starts[param]..self.starts[param] + self.numels[param]
    }

    /// Returns the number of ranks that share the FlatParameter.
    #[must_use]
    pub const fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the number of elements of the unsharded FlatParameter: with alignment and tail
    /// padding, without right padding.
    #[must_use]
    pub const fn unpadded_unsharded_numel(&self) -> usize {
        self.unpadded_numel
    }

    /// Returns the number of elements of all shards together, right padding included.
    #[must_use]
    pub const fn padded_unsharded_numel(&self) -> usize {
        self.sharded_numel() * self.world_size
    }

    /// Returns the number of elements of one shard, which is the same on every rank, right padding
    /// included.
    #[must_use]
    pub const fn sharded_numel(&self) -> usize {
        self.unpadded_numel.div_ceil(self.world_size)
    }

    /// Returns the rank's range of the unsharded FlatParameter. Right padding makes it as long as
    /// [`Self::sharded_numel`].
    #[must_use]
    pub fn shard_range(&self, rank: usize) -> Range<usize> {
        chunk_range(self.unpadded_numel, self.world_size, rank)
    }

    /// Returns where each parameter lies in a rank's shard; `None` for a parameter that the shard
    /// has no element of.
    #[must_use]
    pub fn shard_param_infos(&self, rank: usize) -> Vec<Option<ShardParamInfo>> {
        (0..self.fqns.len())
            .map(|param| self.shard_param_info(param, rank))
            .collect()
    }

    /// Returns the place of one parameter in a rank's shard; `None` if it has none there. Unlike
    /// [`Self::shard_param_infos`] this looks at no other parameter.
    ///
    /// # Panics
    /// If the layout has no such parameter.
    #[must_use]
    pub fn shard_param_info(&self, param: usize, rank: usize) -> Option<ShardParamInfo> {
        self.param_info_of_range(param, &self.shard_range(rank))
    }

    /// Returns where a parameter lies in a range of the unsharded FlatParameter; `None` if it has
    /// no element there. Offsets are counted from the start of the range.
    fn param_info_of_range(&self, param: usize, range: &Range<usize>) -> Option<ShardParamInfo> {
        let whole = self.param_range(param);
        let start = range.start.max(whole.start);
        let end = range.end.min(whole.end);
        // A parameter without elements is in no range, not even where it would begin.
        (start < end).then(|| ShardParamInfo {
            offset_in_shard: start - range.start,
            numel_in_shard: end - start,
            intra_param_start: start - whole.start,
            intra_param_end: end - whole.start - 1,
        })
    }

    /// Returns the boxes of parameter `param` that a rank's shard holds, in the order of their
    /// elements in the shard. There are none if the shard has no element of the parameter.
    ///
    /// # Panics
    /// If the layout has no such parameter.
    #[must_use]
    pub fn param_boxes(&self, param: usize, rank: usize) -> Vec<TensorBox> {
        match self.shard_param_info(param, rank) {
            Some(info) => boxes_of_flat_range(&self.shapes[param], info.param_range()),
            None => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests;
