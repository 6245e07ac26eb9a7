//! Padding of tensors: constant, reflect, replicate, circular.

use candle_core::Tensor;
use fsdp_layout::boxes::checked_numel;
use thiserror::Error;

/// The values that padding is filled with.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum PadMode {
    /// This value, cast to the tensor's dtype.
    Constant(f64),
    /// The elements beside the edge, mirrored at it; the edge itself is not repeated.
    Reflect,
    /// The element at the edge.
    Replicate,
    /// The elements from the other end.
    Circular,
}

/// A reason why a tensor cannot be padded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PadError {
    /// candle refused.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// The number of padding values is odd.
    #[error(
        "padding must have an even length, a pair for each dimension from the last one, not {given}"
    )]
    Unpaired {
        /// The number of values given.
        given: usize,
    },
    /// There are more pairs than dimensions.
    #[error("padding of {pairs} dimensions for a tensor of shape {shape:?}")]
    TooManyDims {
        /// Pairs given.
        pairs: usize,
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// The padding has no elements to be filled from.
    #[error(
        "padding ({before}, {after}) of dimension {dim} is too large for {mode:?}: with {size} elements there it is at \
         most {largest}"
    )]
    TooLarge {
        /// The mode.
        mode: PadMode,
        /// The dimension.
        dim: usize,
        /// Elements in it.
        size: usize,
        /// Padding before them.
        before: isize,
        /// Padding after them.
        after: isize,
        /// Most padding on one side.
        largest: usize,
    },
    /// Negative padding takes more elements than there are.
    #[error(
        "padding ({before}, {after}) of dimension {dim} takes away more than its {size} elements"
    )]
    CropsTooMuch {
        /// The dimension.
        dim: usize,
        /// Elements in it.
        size: usize,
        /// Padding before them.
        before: isize,
        /// Padding after them.
        after: isize,
    },
    /// The result is larger than the machine's memory.
    #[error("there is no memory for a padded tensor of shape {shape:?}")]
    OutOfMemory {
        /// The shape of the result.
        shape: Vec<usize>,
    },
    /// Elements are added where there is nothing to copy them from.
    #[error("{mode:?} cannot pad dimension {dim}, which has no elements")]
    Empty {
        /// The mode.
        mode: PadMode,
        /// The dimension.
        dim: usize,
    },
}

/// Pads a tensor of any number of dimensions. torch's `torch.nn.functional.pad`.
///
/// `padding` holds a pair (before, after) for each padded dimension, the **last dimension first**.
/// A negative value takes elements away. The result is a new tensor on the same device; with no
/// padding it is the tensor itself. Gradients flow to the elements that padding was copied from.
///
/// The limits are torch's. Reflect padding must be smaller than the dimension. Circular padding may
/// be at most as large as the dimension after negative padding. Reflect and replicate must leave at
/// least one element. Unlike in torch, every mode pads any number of dimensions.
///
/// # Errors
/// See [`PadError`]; nothing is computed then.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_flat::pad::{PadMode, pad};
/// let tensor = Tensor::new(&[[1i64, 2, 3]], &Device::Cpu)?;
/// assert_eq!(pad(&tensor, &[1, 2], PadMode::Constant(0.0))?.to_vec2::<i64>()?, [[0, 1, 2, 3, 0, 0]]);
/// assert_eq!(pad(&tensor, &[1, 2], PadMode::Reflect)?.to_vec2::<i64>()?, [[2, 1, 2, 3, 2, 1]]);
/// assert_eq!(pad(&tensor, &[1, 2], PadMode::Replicate)?.to_vec2::<i64>()?, [[1, 1, 2, 3, 3, 3]]);
/// assert_eq!(pad(&tensor, &[1, 2], PadMode::Circular)?.to_vec2::<i64>()?, [[3, 1, 2, 3, 1, 2]]);
/// // The second pair is for the dimension before the last.
/// assert_eq!(pad(&tensor, &[-1, 0, 0, 1], PadMode::Constant(7.0))?.to_vec2::<i64>()?, [[2, 3], [7, 7]]);
/// # Ok::<(), fsdp_flat::pad::PadError>(())
/// ```
pub fn pad(tensor: &Tensor, padding: &[isize], mode: PadMode) -> Result<Tensor, PadError> {
    if !padding.len().is_multiple_of(2) {
        return Err(PadError::Unpaired {
            given: padding.len(),
        });
    }
    let shape = tensor.dims();
    if padding.len() / 2 > shape.len() {
        return Err(PadError::TooManyDims {
            pairs: padding.len() / 2,
            shape: shape.to_vec(),
        });
    }
    let dims: Vec<PadDim> = padding
        .chunks_exact(2)
        .zip((0..shape.len()).rev())
        .map(|(pair, dim)| PadDim {
            dim,
            size: shape[dim],
            before: pair[0],
            after: pair[1],
        })
        .collect();
    // All dimensions are checked before any element is copied.
    let mut padded_shape = shape.to_vec();
    for dim in &dims {
        padded_shape[dim.dim] = dim.check(mode)?;
    }
    check_memory(&padded_shape, tensor.dtype())?;
    let mut padded = tensor.clone();
    for dim in dims.iter().filter(|dim| dim.before != 0 || dim.after != 0) {
        padded = match mode {
            PadMode::Constant(value) => dim.pad_constant(&padded, value)?,
            mode => dim.pad_indexed(&padded, mode)?,
        };
    }
    Ok(padded)
}

/// Checks that there is memory for a result, which candle does not: more than the system gives ends
/// the process there.
fn check_memory(shape: &[usize], dtype: candle_core::DType) -> Result<(), PadError> {
    // Each element that is copied takes an index too.
    let bytes_for_element = dtype.size_in_bytes() + size_of::<i64>();
    let bytes = checked_numel(shape).and_then(|numel| numel.checked_mul(bytes_for_element));
    if bytes.is_some_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok()) {
        return Ok(());
    }
    Err(PadError::OutOfMemory {
        shape: shape.to_vec(),
    })
}

/// Returns the index of the element that is copied to index `padded_index` of the padded dimension,
/// which may lie outside `0..size`.
fn source_index(padded_index: isize, size: isize, mode: PadMode) -> isize {
    match mode {
        PadMode::Reflect if padded_index < 0 => -padded_index,
        PadMode::Reflect if padded_index >= size => 2 * (size - 1) - padded_index,
        PadMode::Circular => padded_index.rem_euclid(size),
        _ => padded_index.clamp(0, size - 1),
    }
}

/// The padding of one dimension.
#[derive(Debug, Clone, Copy)]
struct PadDim {
    dim: usize,
    size: usize,
    before: isize,
    after: isize,
}

impl PadDim {
    /// Returns the number of elements that negative padding leaves; `None` if it takes more than
    /// there are.
    fn retained_size(&self) -> Option<usize> {
        let removed_before = self.before.min(0).unsigned_abs();
        let removed_after = self.after.min(0).unsigned_abs();
        self.size
            .checked_sub(removed_before)?
            .checked_sub(removed_after)
    }

    /// Checks this dimension, and returns its size with the padding.
    fn check(&self, mode: PadMode) -> Result<usize, PadError> {
        let PadDim {
            dim,
            size,
            before,
            after,
        } = *self;
        if before == 0 && after == 0 {
            return Ok(size);
        }
        let padded_size = isize::try_from(size)
            .ok()
            .and_then(|size| size.checked_add(before)?.checked_add(after));
        // A size beyond `isize` is also beyond any memory.
        let Some(padded_size) = padded_size else {
            return Err(self.too_large_error(mode, isize::MAX.unsigned_abs()));
        };
        // The larger of the two sides that grow; a side that shrinks counts as 0.
        let largest_addition = before.max(after).max(0).unsigned_abs();
        if largest_addition > 0 && size == 0 && !matches!(mode, PadMode::Constant(_)) {
            return Err(PadError::Empty { mode, dim });
        }
        // The most elements that this mode can add to one side; `None` if negative padding takes
        // too much away.
        let largest = match mode {
            PadMode::Constant(_) => self.retained_size().map(|_| usize::MAX),
            PadMode::Circular => self.retained_size(),
            PadMode::Reflect => (padded_size >= 1).then(|| size.saturating_sub(1)),
            PadMode::Replicate => (padded_size >= 1).then_some(usize::MAX),
        };
        let Some(largest) = largest else {
            return Err(PadError::CropsTooMuch {
                dim,
                size,
                before,
                after,
            });
        };
        if largest_addition > largest {
            return Err(self.too_large_error(mode, largest));
        }
        Ok(padded_size.max(0).unsigned_abs())
    }

    /// Returns the error of padding that adds more than the `largest` number of elements that the
    /// mode can add to one side.
    fn too_large_error(&self, mode: PadMode, largest: usize) -> PadError {
        PadError::TooLarge {
            mode,
            dim: self.dim,
            size: self.size,
            before: self.before,
            after: self.after,
            largest,
        }
    }

    /// Returns the tensor without the elements that negative padding takes away.
    fn crop(&self, tensor: &Tensor) -> Result<Tensor, PadError> {
        let retained = self
            .retained_size()
            .expect("`check` refuses padding that takes away more than there is");
        Ok(tensor.narrow(self.dim, self.before.min(0).unsigned_abs(), retained)?)
    }

    /// Pads with elements of one value.
    fn pad_constant(&self, tensor: &Tensor, value: f64) -> Result<Tensor, PadError> {
        // The padding is a view of one element, which takes no memory before it is copied.
        let scalar = Tensor::full(value, (), tensor.device())?.to_dtype(tensor.dtype())?;
        let mut pieces = vec![self.crop(tensor)?];
        let mut shape = tensor.dims().to_vec();
        if self.before > 0 {
            shape[self.dim] = self.before.unsigned_abs();
            pieces.insert(0, scalar.broadcast_as(shape.as_slice())?);
        }
        if self.after > 0 {
            shape[self.dim] = self.after.unsigned_abs();
            pieces.push(scalar.broadcast_as(shape.as_slice())?);
        }
        Ok(Tensor::cat(&pieces, self.dim)?)
    }

    /// Returns the padded tensor, with each element copied from the place that the mode gives.
    fn pad_indexed(&self, tensor: &Tensor, mode: PadMode) -> Result<Tensor, PadError> {
        // Circular padding wraps around the elements that negative padding leaves. Reflect and
        // replicate go by all elements.
        let (tensor, before, after) = match mode {
            PadMode::Circular => (self.crop(tensor)?, self.before.max(0), self.after.max(0)),
            _ => (tensor.clone(), self.before, self.after),
        };
        let size = tensor.dim(self.dim)? as isize;
        let indices: Vec<i64> = (-before..size + after)
            .map(|at| source_index(at, size, mode) as i64)
            .collect();
        if indices.is_empty() {
            return Ok(tensor);
        }
        let sources = Tensor::new(indices, tensor.device())?;
        Ok(tensor.contiguous()?.index_select(&sources, self.dim)?)
    }
}
