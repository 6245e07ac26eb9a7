//! The memory behind a tensor: read it, change it in place, release it and fill it again.
//!
//! [`HostBytes`] and [`HostSlice`] read; [`HostBytesMut`] and [`HostSliceMut`] change in place, and
//! [`StorageGuard`] does so for many tensors at once. All of them are guards, which hold the memory
//! until they are dropped.
//!
//! candle gives mutable access to a storage only to an in-place op, during a call. So a guard for
//! writing takes the storage out of the tensor, and puts it back when it is dropped. Memory of
//! NVIDIA GPUs (feature `cuda`) is copied to the host, and written back.
//!
//! [`Contents`] are elements that can be put into a released tensor.
//!
//! A *released* storage is an empty storage of candle's dummy dtype `F4`, which no op supports. So
//! an op that reads it fails with candle's dtype error, and never reads past the end.

mod contents;
#[cfg_attr(not(feature = "cuda"), path = "no_copies.rs")]
#[cfg_attr(
    feature = "cuda",
    expect(unsafe_code, reason = "pinned memory, which GPUs write")
)]
mod copies;
#[cfg(feature = "cuda")]
#[expect(
    unsafe_code,
    reason = "elements as bytes, and memory that is not filled yet"
)]
pub mod cuda;
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "copies within a GPU's memory")]
mod gpu_buffer;
mod guard;
mod host;
mod joined;
mod lend;
mod many;
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "pinned memory")]
mod pinned;
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "pinned memory, which GPUs write")]
mod staging;
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "pinned memory, which GPUs read")]
mod uploads;

use candle_core::{CpuStorage, Device, Storage, Tensor};

use self::host::{copy_range, host_tensor, zeroed};
use self::lend::{StorageMut, is_released_storage, released_error, with_storage_mut};
use crate::error::FlatError;

pub use self::contents::Contents;
pub use self::copies::{CopiesEnd, HostCopies, HostMemory};
#[cfg(not(feature = "cuda"))]
pub use self::copies::{GpuReader, Upload, finish_uploads};
#[cfg(feature = "cuda")]
pub use self::cuda::GpuReader;
#[cfg(feature = "cuda")]
pub use self::gpu_buffer::{BufferCopy, GpuBuffer};
pub use self::guard::{HostBytes, HostBytesMut, HostSlice, HostSliceMut};
pub use self::host::{PLAIN_DTYPES, Scalar, reserved_vec, zeroed_vec};
pub use self::joined::with_joined_bytes;
pub use self::many::StorageGuard;
#[cfg(feature = "cuda")]
pub use self::uploads::{Upload, finish_uploads};

/// Returns `true` if [`release`] has freed the tensor's memory, or if a guard for writing holds it.
#[must_use]
pub fn is_released(tensor: &Tensor) -> bool {
    match &*tensor.storage_and_layout().0 {
        Storage::Cpu(storage) => is_released_storage(tensor, storage),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => is_released_storage(tensor, storage),
        _ => false,
    }
}

/// Returns `true` if two tensors are views of one storage. If so, one cannot be read while the
/// other is being changed.
#[must_use]
pub fn share_storage(first_tensor: &Tensor, second_tensor: &Tensor) -> bool {
    storage_position(first_tensor).0 == storage_position(second_tensor).0
}

/// Returns a number that is the same for all views of one storage, and different for other
/// storages. It may be used again for a new storage once the last view is dropped.
#[must_use]
pub fn storage_id(tensor: &Tensor) -> usize {
    storage_position(tensor).0
}

/// Returns `true` if two tensors are views of the same elements of one storage, with the same shape
/// and strides.
pub(crate) fn is_same_view(first_tensor: &Tensor, second_tensor: &Tensor) -> bool {
    storage_position(first_tensor) == storage_position(second_tensor)
        && first_tensor.dtype() == second_tensor.dtype()
        && first_tensor.layout() == second_tensor.layout()
}

/// Returns the address of a tensor's storage, and the offset at which the tensor begins in it.
///
/// The storage's lock is held only inside this function. Callers that compare two tensors thus
/// never hold two locks.
fn storage_position(tensor: &Tensor) -> (usize, usize) {
    let (storage, layout) = tensor.storage_and_layout();
    (
        std::ptr::from_ref::<Storage>(&*storage).addr(),
        layout.start_offset(),
    )
}

/// Frees the memory of a tensor. Reading the tensor, or one that shares its storage, is an error
/// until [`Contents`] are moved into it.
///
/// # Errors
/// A tensor on a device that this build does not support.
pub fn release(tensor: &Tensor) -> Result<(), FlatError> {
    with_storage_mut(tensor, |storage, _| match storage {
        StorageMut::Cpu(storage) => {
            *storage = guard::empty_storage();
            Ok(())
        }
        #[cfg(feature = "cuda")]
        StorageMut::Cuda(storage) => cuda::release(storage),
    })
}

/// Puts fresh memory in the place of that of a tensor on a GPU, which may be released. Its elements
/// are undefined: write them before you read them. All tensors that share the storage see the
/// change. The tensor must cover its whole storage, or else the other elements of the storage are
/// lost.
///
/// # Errors
/// A tensor that is not on a GPU; CUDA's errors.
pub fn renew(tensor: &Tensor) -> Result<(), FlatError> {
    with_storage_mut(tensor, |storage, _| match storage {
        StorageMut::Cpu(_) => Err(FlatError::device(tensor)),
        #[cfg(feature = "cuda")]
        StorageMut::Cuda(storage) => cuda::renew(storage, tensor.dtype(), tensor.elem_count()),
    })
}

/// Exchanges the memory of two tensors of one dtype and shape, either of which may be released. All
/// tensors that share a storage see the change. Each has to cover its whole storage.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_flat::storage::{exchange_memory, release};
/// let (first, second) = (Tensor::new(&[1f32], &Device::Cpu)?, Tensor::new(&[2f32], &Device::Cpu)?);
/// release(&first)?;
/// exchange_memory(&first, &second)?;
/// assert_eq!(first.to_vec1::<f32>()?, [2.]);
/// assert!(second.to_vec1::<f32>().is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Tensors whose dtypes or shapes differ, or of which only one is on a GPU; a device that this
/// build does not support. Tensors on two different GPUs are not told apart.
pub fn exchange_memory(first: &Tensor, second: &Tensor) -> Result<(), FlatError> {
    if first.shape() != second.shape() || first.dtype() != second.dtype() {
        let name = format!("memory of {:?}", first.dtype());
        return Err(FlatError::shape(name, first.dims(), second.dims()));
    }
    if share_storage(first, second) {
        return Ok(());
    }
    with_storage_mut(first, |storage, _| {
        with_storage_mut(second, |other_storage, _| {
            match (storage, other_storage) {
                (StorageMut::Cpu(storage), StorageMut::Cpu(other)) => {
                    std::mem::swap(storage, other)
                }
                #[cfg(feature = "cuda")]
                (StorageMut::Cuda(storage), StorageMut::Cuda(other)) => {
                    std::mem::swap(storage, other);
                }
                #[cfg(feature = "cuda")]
                _ => return Err(FlatError::device(second)),
            }
            Ok(())
        })
    })
}

/// Copies a tensor to another device, or clones it if it is there already.
///
/// Unlike candle's `to_device`, this copies only the elements of a view, not its whole storage, and
/// copies from a GPU go through pinned memory.
///
/// # Errors
/// candle's errors.
pub fn to_device(tensor: &Tensor, device: &Device) -> Result<Tensor, FlatError> {
    if tensor.device().same_device(device) {
        return Ok(tensor.clone());
    }
    #[cfg(feature = "cuda")]
    if device.is_cpu() && tensor.device().is_cuda() {
        return cuda::to_host(&tensor.detach().contiguous()?);
    }
    if tensor.elem_count() == 0 {
        return zeros_on(tensor.dims(), tensor.dtype(), device);
    }
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device
        && tensor.device().is_cpu()
        && PLAIN_DTYPES.contains(&tensor.dtype())
    {
        let source = tensor.detach().contiguous()?;
        let target = cuda::undefined(device, tensor.dtype(), tensor.shape())?;
        cuda::write_from_host(&HostBytes::read(&source)?, &target)?;
        return Ok(target);
    }
    Ok(tensor.detach().force_contiguous()?.to_device(device)?)
}

/// Returns a copy of a contiguous tensor of the host on a device, and does not wait for an NVIDIA
/// GPU, as [`to_device`] would: the copy goes through pinned memory, and may be under way when this
/// returns. Work that this thread gives to the GPU later sees it.
///
/// # Errors
/// candle's and CUDA's errors; [`FlatError::OutOfMemory`] if the host lacks the memory.
pub fn upload(tensor: &Tensor, device: &Device) -> Result<Tensor, FlatError> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device
        && tensor.device().is_cpu()
        && tensor.elem_count() > 0
        && PLAIN_DTYPES.contains(&tensor.dtype())
    {
        let target = cuda::undefined(device, tensor.dtype(), tensor.shape())?;
        let mut upload = Upload::begin(&target)?;
        upload
            .bytes_mut()
            .copy_from_slice(&HostBytes::read(tensor)?);
        upload.finish()?;
        return Ok(target);
    }
    to_device(tensor, device)
}

/// Copies the elements of a contiguous tensor into the memory of another one, contiguous and of the
/// same dtype and number of elements: from the host to a GPU, without more memory there. Returns
/// `false`, and does nothing, if they are not on these devices.
///
/// # Errors
/// A tensor that is released or not contiguous; lengths that differ count as released; CUDA's.
pub fn copy_to_gpu(source: &Tensor, target: &Tensor) -> Result<bool, FlatError> {
    #[cfg(feature = "cuda")]
    if source.device().is_cpu() && target.device().is_cuda() {
        cuda::write_from_host(&HostBytes::read(source)?, target)?;
        return Ok(true);
    }
    let _ = (source, target);
    Ok(false)
}

/// Returns a contiguous copy of a tensor in new memory on the same device, detached from the graph.
///
/// # Errors
/// A tensor that is released; [`FlatError::OutOfMemory`]; candle's errors.
pub fn owned_copy(tensor: &Tensor) -> Result<Tensor, FlatError> {
    // candle's own copy does not support all dtypes, and goes through the CPU's caches.
    match contiguous_copy(tensor)? {
        Some(copy) => Ok(host_tensor(copy, tensor.dims())),
        None => Ok(tensor.detach().force_contiguous()?.detach()),
    }
}

/// Copies the elements of a tensor; `None` if it is not on the CPU, not contiguous, or of a dtype
/// whose elements are not plain bytes.
///
/// # Errors
/// A tensor that is released; [`FlatError::OutOfMemory`].
fn contiguous_copy(tensor: &Tensor) -> Result<Option<CpuStorage>, FlatError> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Ok(None);
    };
    if is_released_storage(tensor, storage) {
        return Err(released_error(tensor));
    }
    match layout.contiguous_offsets() {
        Some((start, end)) => copy_range(storage, start..end, tensor.dims()),
        None => Ok(None),
    }
}

/// Makes a contiguous tensor of zeros on a device.
///
/// # Errors
/// The same as [`zeros`], and candle's errors.
pub fn zeros_on(
    shape: &[usize],
    dtype: candle_core::DType,
    device: &Device,
) -> Result<Tensor, FlatError> {
    match device {
        Device::Cpu => zeros(shape, dtype),
        // CUDA gives no memory for no elements.
        #[cfg(feature = "cuda")]
        Device::Cuda(device) if shape.contains(&0) => cuda::undefined(device, dtype, shape),
        device => Ok(Tensor::zeros(shape, dtype, device)?),
    }
}

/// Makes a contiguous tensor of zeros on the CPU.
///
/// # Errors
/// Dtypes whose elements are not plain bytes; [`FlatError::OutOfMemory`].
pub fn zeros(shape: &[usize], dtype: candle_core::DType) -> Result<Tensor, FlatError> {
    Ok(host_tensor(zeroed(shape, dtype)?, shape))
}

/// Makes a contiguous tensor on the CPU that takes no memory yet. It is a released tensor until
/// [`fill_with_copy`] or [`fill_with_zeros`] gives it elements. A tensor without elements needs
/// neither.
///
/// # Errors
/// Dtypes whose elements are not plain bytes.
pub fn unfilled(shape: &[usize], dtype: candle_core::DType) -> Result<Tensor, FlatError> {
    // There is nothing to fill in a tensor without elements.
    if shape.contains(&0) {
        return zeros(shape, dtype);
    }
    // candle takes the dtype from the storage, so the tensor is made of one of its dtype, which is
    // then released.
    let tensor = host_tensor(zeroed(&[0], dtype)?, shape);
    release(&tensor)?;
    Ok(tensor)
}

/// Gives a tensor that [`unfilled`] made a copy of the elements of another. Returns `false`, and
/// does nothing, if that one has another number of elements or another dtype, is not on the CPU, or
/// is not contiguous.
///
/// # Errors
/// A source that is released; [`FlatError::OutOfMemory`].
pub fn fill_with_copy(tensor: &Tensor, source: &Tensor) -> Result<bool, FlatError> {
    if tensor.elem_count() != source.elem_count() || tensor.dtype() != source.dtype() {
        return Ok(false);
    }
    let Some(copy) = contiguous_copy(source)? else {
        return Ok(false);
    };
    guard::exchange(tensor, copy)?;
    Ok(true)
}

/// Gives a tensor that [`unfilled`] made zeros as elements.
///
/// # Errors
/// [`FlatError::OutOfMemory`].
pub fn fill_with_zeros(tensor: &Tensor) -> Result<(), FlatError> {
    guard::exchange(tensor, zeroed(tensor.dims(), tensor.dtype())?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn an_unfilled_tensor_is_released_until_it_gets_elements() {
        for dtype in PLAIN_DTYPES {
            let tensor = unfilled(&[2, 3], *dtype).unwrap();
            assert!(is_released(&tensor) && tensor.dims() == [2, 3] && tensor.dtype() == *dtype);
            let view = tensor.narrow(0, 1, 1).unwrap();
            fill_with_zeros(&tensor).unwrap();
            assert_eq!(
                HostBytes::read(&view).unwrap().len(),
                3 * dtype.size_in_bytes()
            );
        }
        let source = Tensor::arange(0f32, 8f32, &Device::Cpu).unwrap();
        let tensor = unfilled(&[2, 3], DType::F32).unwrap();
        assert!(!fill_with_copy(&tensor, &source).unwrap() && is_released(&tensor));
        assert!(
            !fill_with_copy(
                &tensor,
                &source
                    .reshape((4, 2))
                    .unwrap()
                    .t()
                    .unwrap()
                    .narrow(1, 0, 3)
                    .unwrap()
            )
            .unwrap()
        );
        assert!(fill_with_copy(&tensor, &source.narrow(0, 1, 6).unwrap()).unwrap());
        assert_eq!(
            tensor.to_vec2::<f32>().unwrap(),
            [[1., 2., 3.], [4., 5., 6.]]
        );
        assert!(!share_storage(&tensor, &source));
        release(&source).unwrap();
        let other = unfilled(&[8], DType::F32).unwrap();
        assert!(matches!(
            fill_with_copy(&other, &source),
            Err(FlatError::Freed { .. })
        ));
        assert!(!is_released(&unfilled(&[0, 3], DType::F32).unwrap()));
    }

    #[test]
    fn an_owned_copy_has_the_values_of_any_layout_and_shares_nothing() {
        let flat = Tensor::arange(0f32, 12f32, &Device::Cpu).unwrap();
        let part = flat.narrow(0, 2, 6).unwrap().reshape((2, 3)).unwrap();
        for view in [
            part.clone(),
            part.t().unwrap(),
            part.narrow(1, 1, 2).unwrap(),
            part.narrow(0, 0, 0).unwrap(),
        ] {
            let copy = owned_copy(&view).unwrap();
            assert!(copy.is_contiguous() && !share_storage(&copy, &view));
            assert_eq!(
                copy.to_vec2::<f32>().unwrap(),
                view.to_vec2::<f32>().unwrap()
            );
            assert_eq!(HostBytes::read(&copy).unwrap().len(), view.elem_count() * 4);
        }
        // candle allocates no copies of this one.
        let scales = zeros(&[3], DType::F8E8M0).unwrap();
        assert_eq!(
            *HostBytes::read(&owned_copy(&scales).unwrap()).unwrap(),
            [0; 3]
        );
        let scalar = owned_copy(&Tensor::new(2i64, &Device::Cpu).unwrap()).unwrap();
        assert_eq!(scalar.to_scalar::<i64>().unwrap(), 2);
        release(&flat).unwrap();
        assert!(matches!(owned_copy(&part), Err(FlatError::Freed { .. })));
    }

    #[test]
    fn more_than_there_is_is_an_error_and_not_the_end() {
        for dtype in [DType::F32, DType::F8E8M0] {
            for shape in [vec![1 << 57], vec![1 << 40, 1 << 40]] {
                assert!(
                    matches!(zeros(&shape, dtype), Err(FlatError::OutOfMemory { .. })),
                    "{shape:?}"
                );
            }
        }
    }

    #[test]
    fn a_released_storage_is_an_error_for_every_reader_and_comes_back() {
        let weight = Tensor::arange(0f32, 6f32, &Device::Cpu)
            .unwrap()
            .reshape((2, 3))
            .unwrap();
        let transposed = weight.t().unwrap();
        release(&weight).unwrap();
        assert!(is_released(&weight) && is_released(&transposed));
        let x = Tensor::ones((1, 2), DType::F32, &Device::Cpu).unwrap();
        assert!(x.matmul(&weight).is_err());
        assert!(weight.add(&weight).is_err());
        assert!(weight.sqrt().is_err());
        assert!(weight.sum_all().is_err());
        assert!((&weight * 2.0).is_err());
        assert!(weight.broadcast_add(&weight).is_err());
        assert!(weight.to_vec2::<f32>().is_err());
        assert!(transposed.contiguous().is_err());
        assert!(matches!(
            HostBytes::read(&weight),
            Err(FlatError::Freed { .. })
        ));
        assert!(matches!(
            HostSlice::<f32>::read(&weight),
            Err(FlatError::Freed { .. })
        ));
        assert!(matches!(
            Contents::new(vec![0f32; 5]).move_into(&weight),
            Err(FlatError::ShapeMismatch { .. })
        ));
        let rows = weight.narrow(0, 1, 1).unwrap();
        assert!(matches!(
            Contents::new(vec![0f32; 3]).move_into(&rows),
            Err(FlatError::NotContiguous { .. })
        ));
        assert!(matches!(
            Contents::new(vec![0f32; 6]).move_into(&transposed),
            Err(FlatError::NotContiguous { .. })
        ));
        Contents::new(vec![1f32, 2., 3., 4., 5., 6.])
            .move_into(&weight)
            .unwrap();
        assert_eq!(
            transposed.to_vec2::<f32>().unwrap(),
            [[1., 4.], [2., 5.], [3., 6.]]
        );
    }

    #[test]
    fn tensors_without_elements_are_released_and_filled_as_any_other() {
        for shape in [vec![0], vec![2, 0], vec![0, 2], vec![3, 0, 2]] {
            let tensor = zeros(&shape, DType::F32).unwrap();
            release(&tensor).unwrap();
            assert!(is_released(&tensor));
            Contents::new(Vec::<f32>::new()).move_into(&tensor).unwrap();
            assert!(HostSlice::<f32>::read(&tensor).unwrap().is_empty());
        }
    }

    #[test]
    fn bytes_of_every_plain_dtype_are_released_and_zeroed() {
        let all = [
            DType::U8,
            DType::U32,
            DType::I16,
            DType::I32,
            DType::I64,
            DType::BF16,
            DType::F16,
            DType::F32,
            DType::F64,
            DType::F8E4M3,
            DType::F8E8M0,
        ];
        assert_eq!(PLAIN_DTYPES, all);
        for dtype in all {
            let tensor = zeros(&[2, 2], dtype).unwrap();
            assert!(
                HostBytes::read(&tensor)
                    .unwrap()
                    .iter()
                    .all(|&byte| byte == 0)
            );
            release(&tensor).unwrap();
            assert!(is_released(&tensor), "{dtype:?}");
            assert!(HostBytes::read(&tensor).is_err());
        }
    }
}
