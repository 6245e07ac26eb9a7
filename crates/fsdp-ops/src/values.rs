//! The elements of tensors as slices.

use std::ops::Range;

use candle_core::{CpuStorage, Layout, Result, Storage, StorageRef, Tensor};

use crate::element::Element;

/// The elements of a CPU tensor, lent for as long as this lives.
pub(crate) struct Values<'a> {
    storage: StorageRef<'a>,
    range: Range<usize>,
    operation: &'static str,
}

impl<'a> Values<'a> {
    /// Lends the elements of a contiguous tensor to an operation.
    ///
    /// # Errors
    /// A tensor that is not contiguous.
    pub(crate) fn of(tensor: &'a Tensor, operation: &'static str) -> Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        let range = contiguous(layout, operation)?;
        Ok(Values {
            storage,
            range,
            operation,
        })
    }

    /// Returns the elements.
    ///
    /// # Errors
    /// Another dtype; a tensor of another device.
    pub(crate) fn slice<T: Element>(&self) -> Result<&[T]> {
        elements(
            cpu(&self.storage, self.operation)?,
            self.range.clone(),
            self.operation,
        )
    }
}

/// Returns the range of a contiguous layout in its storage.
///
/// # Errors
/// A layout that is not contiguous.
pub(crate) fn contiguous(layout: &Layout, operation: &'static str) -> Result<Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => Err(candle_core::Error::RequiresContiguous { op: operation }.bt()),
    }
}

/// Returns the range from the first element of a layout to its last one, in its storage.
pub(crate) fn span(layout: &Layout) -> Range<usize> {
    let start = layout.start_offset();
    if layout.shape().elem_count() == 0 {
        return start..start;
    }
    let steps = layout.dims().iter().zip(layout.stride());
    let last: usize = steps.map(|(&dim, &stride)| (dim - 1) * stride).sum();
    start..start + last + 1
}

/// Returns the storage of a CPU tensor.
///
/// # Errors
/// A tensor of another device.
pub(crate) fn cpu<'a>(
    storage: &'a StorageRef<'_>,
    operation: &'static str,
) -> Result<&'a CpuStorage> {
    match &**storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => candle_core::bail!("{operation}: a tensor on another device than the others"),
    }
}

/// Returns a range of the elements of a storage.
///
/// # Errors
/// Another dtype, which memory that has been released has too; a storage that is too short.
pub(crate) fn elements<'a, T: Element>(
    storage: &'a CpuStorage,
    range: Range<usize>,
    operation: &'static str,
) -> Result<&'a [T]> {
    use candle_core::Error;
    use candle_core::backend::BackendStorage as _;
    let mismatch = || {
        Error::DTypeMismatchBinaryOp {
            lhs: T::DTYPE,
            rhs: storage.dtype(),
            op: operation,
        }
        .bt()
    };
    let values = storage.as_slice::<T>().map_err(|_| mismatch())?;
    match values.get(range) {
        Some(values) => Ok(values),
        None => candle_core::bail!("{operation}: a storage is shorter than its tensor"),
    }
}
