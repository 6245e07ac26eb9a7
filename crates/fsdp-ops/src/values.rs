//! The elements of tensors as slices.

use std::marker::PhantomData;
use std::ops::{Deref, Range};

use candle_core::backend::BackendStorage as _;
use candle_core::{
    CpuStorage, Device, Error, Layout, Result, Storage, StorageRef, Tensor, WithDType,
};

use crate::element::Element;

/// An input of a forward on the CPU: a tensor's storage, and its layout there.
pub(crate) type Input<'a> = (&'a CpuStorage, &'a Layout);

/// The elements of a contiguous CPU tensor, lent for as long as this lives.
pub(crate) struct Values<'a, T> {
    storage: StorageRef<'a>,
    range: Range<usize>,
    element: PhantomData<T>,
}

impl<'a, T: Element> Values<'a, T> {
    /// Lends the elements of a tensor to an operation, and locks its storage for reading meanwhile.
    ///
    /// # Errors
    /// A tensor that is not contiguous, of another dtype or on another device.
    pub(crate) fn read(tensor: &'a Tensor, operation: &'static str) -> Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        let range = contiguous(layout, operation)?;
        // Looked at once now, so that later looks cannot fail.
        elements::<T>(cpu_storage(&storage, operation)?, range.clone(), operation)?;
        Ok(Values {
            storage,
            range,
            element: PhantomData,
        })
    }
}

impl<T: Element> Deref for Values<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // The storage is locked, so it is still what `read` has found.
        let Storage::Cpu(storage) = &*self.storage else {
            unreachable!("`read` refuses tensors of other devices");
        };
        let values = storage.as_slice::<T>();
        &values.expect("`read` refuses tensors of other dtypes")[self.range.clone()]
    }
}

/// Returns the elements of a contiguous input.
///
/// # Errors
/// An input that is not contiguous, or of another dtype.
pub(crate) fn contiguous_elements<'a, T: Element>(
    (storage, layout): Input<'a>,
    operation: &'static str,
) -> Result<&'a [T]> {
    elements(storage, contiguous(layout, operation)?, operation)
}

/// Returns the range of a contiguous layout in its storage.
///
/// # Errors
/// A layout that is not contiguous.
pub(crate) fn contiguous(layout: &Layout, operation: &'static str) -> Result<Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => Err(Error::RequiresContiguous { op: operation }.bt()),
    }
}

/// Returns the range from the first element of a layout to its last one, in its storage.
pub(crate) fn span(layout: &Layout) -> Range<usize> {
    let start = layout.start_offset();
    // Without elements there is no last one.
    if layout.shape().elem_count() == 0 {
        return start..start;
    }
    let steps = layout.dims().iter().zip(layout.stride());
    let last_offset: usize = steps.map(|(&dim, &stride)| (dim - 1) * stride).sum();
    start..start + last_offset + 1
}

/// Returns the error of inputs on several devices.
pub(crate) fn devices_error<T>(operation: &'static str) -> Result<T> {
    candle_core::bail!("{operation}: a tensor on another device than the others")
}

/// Returns the storage of a CPU tensor.
///
/// # Errors
/// A tensor of another device.
pub(crate) fn cpu_storage<'a>(
    storage: &'a StorageRef<'_>,
    operation: &'static str,
) -> Result<&'a CpuStorage> {
    match &**storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => devices_error(operation),
    }
}

/// Returns a range of the elements of a storage.
///
/// # Errors
/// Another dtype, which memory that has been released has too; a storage that is too short.
pub(crate) fn elements<'a, T: WithDType>(
    storage: &'a CpuStorage,
    range: Range<usize>,
    operation: &'static str,
) -> Result<&'a [T]> {
    match all_elements::<T>(storage, operation)?.get(range) {
        Some(values) => Ok(values),
        None => candle_core::bail!("{operation}: a storage is shorter than its tensor"),
    }
}

/// Returns all elements of a storage.
///
/// # Errors
/// Another dtype, which memory that has been released has too.
pub(crate) fn all_elements<'a, T: WithDType>(
    storage: &'a CpuStorage,
    operation: &'static str,
) -> Result<&'a [T]> {
    // candle's own error does not name the operation.
    storage.as_slice::<T>().map_err(|_| {
        Error::DTypeMismatchBinaryOp {
            lhs: T::DTYPE,
            rhs: storage.dtype(),
            op: operation,
        }
        .bt()
    })
}

/// Makes a tensor of computed values.
pub(crate) fn tensor<T: Element>(values: Vec<T>, dims: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(values, dims, &Device::Cpu)
}

/// Makes a tensor of sums, rounded to the element type.
pub(crate) fn tensor_of_sums<T: Element>(sums: &[T::Real]) -> Result<Tensor> {
    let rounded = sums.iter().map(|&sum| T::narrow(sum)).collect();
    tensor::<T>(rounded, &[sums.len()])
}
