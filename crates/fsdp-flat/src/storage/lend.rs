//! Lending a tensor's storage for change, and the errors of storages that cannot be lent.

use std::cell::RefCell;
use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Tensor};

use crate::error::FlatError;

/// A tensor's storage, lent for change.
pub(crate) enum StorageMut<'a> {
    /// The host's.
    Cpu(&'a mut CpuStorage),
    /// An NVIDIA GPU's.
    #[cfg(feature = "cuda")]
    Cuda(&'a mut candle_core::CudaStorage),
}

/// An in-place op that lends the storage of a tensor to a closure: candle gives no other way to
/// change a storage.
struct Lend<F, R> {
    closure: RefCell<Option<F>>,
    result: RefCell<Option<R>>,
}

impl<F, R> InplaceOp1 for Lend<F, R>
where
    F: FnOnce(StorageMut<'_>, &Layout) -> R,
{
    fn name(&self) -> &'static str {
        "fsdp-storage"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        self.lend(StorageMut::Cpu(storage), layout);
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &mut candle_core::CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<()> {
        self.lend(StorageMut::Cuda(storage), layout);
        Ok(())
    }
}

impl<F, R> Lend<F, R>
where
    F: FnOnce(StorageMut<'_>, &Layout) -> R,
{
    /// Runs the closure on the storage, and keeps its result.
    fn lend(&self, storage: StorageMut<'_>, layout: &Layout) {
        let closure = self
            .closure
            .borrow_mut()
            .take()
            .expect("candle runs an in-place op once");
        *self.result.borrow_mut() = Some(closure(storage, layout));
    }
}

/// Runs `f` on the storage of a tensor, under its write lock. All tensors that share the storage
/// see the change.
///
/// # Errors
/// The errors of `f`, and a tensor on a device that this build does not know.
pub(crate) fn with_storage_mut<R>(
    tensor: &Tensor,
    f: impl FnOnce(StorageMut<'_>, &Layout) -> Result<R, FlatError>,
) -> Result<R, FlatError> {
    // Checked first, because candle would answer for another device without calling the op.
    if !is_supported(tensor.device()) {
        return Err(FlatError::device(tensor));
    }
    let lend = Lend {
        closure: RefCell::new(Some(f)),
        result: RefCell::new(None),
    };
    match tensor.elem_count() {
        // A shape such as [2, 0] has the strides [0, 1]. candle would take them for repeated
        // elements, and refuse.
        0 => tensor.detach().flatten_all()?.inplace_op1(&lend)?,
        _ => tensor.inplace_op1(&lend)?,
    }
    lend.result
        .into_inner()
        .expect("candle runs an in-place op on devices that this build knows")
}

/// Returns `true` if this build can access the memory of `device`.
fn is_supported(device: &Device) -> bool {
    device.is_cpu() || (cfg!(feature = "cuda") && device.is_cuda())
}

/// Returns the error for a tensor whose memory has been released.
pub(crate) fn released_error(tensor: &Tensor) -> FlatError {
    FlatError::Freed {
        shape: tensor.dims().to_vec(),
    }
}

/// Returns the range of its storage's elements that a contiguous tensor occupies.
pub(crate) fn contiguous_range(
    tensor: &Tensor,
    layout: &Layout,
) -> Result<Range<usize>, FlatError> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => Err(FlatError::NotContiguous {
            shape: tensor.dims().to_vec(),
        }),
    }
}

/// Returns the range of its storage's bytes that a contiguous tensor occupies.
pub(crate) fn contiguous_bytes(
    tensor: &Tensor,
    layout: &Layout,
) -> Result<Range<usize>, FlatError> {
    let element_range = contiguous_range(tensor, layout)?;
    let element_bytes = tensor.dtype().size_in_bytes();
    Ok(element_range.start * element_bytes..element_range.end * element_bytes)
}

/// Returns the error for a tensor of a dtype whose elements are not plain bytes.
pub(crate) fn unsupported_error(tensor: &Tensor) -> FlatError {
    FlatError::Candle(candle_core::Error::UnsupportedDTypeForOp(
        tensor.dtype(),
        "bytes of a tensor",
    ))
}

/// Returns `true` if `tensor`, whose storage this is, has been released. A released storage has a
/// dummy dtype, which is not the tensor's.
pub(super) fn is_released_storage(tensor: &Tensor, storage: &impl BackendStorage) -> bool {
    storage.dtype() != tensor.dtype()
}
