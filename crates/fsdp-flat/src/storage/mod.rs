//! The memory behind a tensor: read it, change it in place, free it and give it back.
//!
//! candle lends `&mut CpuStorage` only to an in-place op, so that is what carries the closures here. Memory of NVIDIA GPUs
//! (feature `cuda`) is lent as a copy on the host, which is written back if it may have changed.
//! A *freed* storage is an empty one of candle's dummy dtype `F4`, which no op computes with: whatever reads it gets
//! candle's dtype error, never a read past the end.

pub(crate) mod host;
pub(crate) mod lend;

use candle_core::{CpuStorage, Device, Storage, Tensor};

use self::host::{bytes_of, bytes_of_mut};
use self::lend::{StorageMut, contiguous_range, freed, is_freed_storage, unsupported, with_storage_mut};
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{FlatError, with_float};

pub use self::host::{PLAIN_DTYPES, Scalar, TensorBuffer};

/// Runs `f` on the elements of a contiguous tensor, under its read lock; a GPU's are copied to the host.
///
/// # Errors
/// A tensor that is freed, not contiguous, of another dtype, or on a device that this build does not know.
pub fn with_slice<T: Scalar, R>(tensor: &Tensor, f: impl FnOnce(&[T]) -> R) -> Result<R, FlatError> {
    let (storage, layout) = tensor.storage_and_layout();
    let range = contiguous_range(tensor, layout)?;
    match &*storage {
        Storage::Cpu(storage) => {
            let data = T::cpu_storage_as_slice(storage)
                .map_err(|error| if is_freed_storage(tensor, storage) { freed(tensor) } else { error.into() })?;
            Ok(f(data.get(range).ok_or_else(|| freed(tensor))?))
        }
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => {
            check_dtype::<T>(tensor)?;
            let mut host: Vec<T> = bytemuck::allocation::zeroed_vec(range.len());
            cuda::read(tensor, storage, bytes_in::<T>(&range), bytemuck::cast_slice_mut(&mut host))?;
            Ok(f(&host))
        }
        _ => Err(FlatError::device(tensor)),
    }
}

#[cfg(feature = "cuda")]
fn check_dtype<T: Scalar>(tensor: &Tensor) -> Result<(), FlatError> {
    if tensor.dtype() == T::DTYPE {
        return Ok(());
    }
    let (expected, got) = (T::DTYPE, tensor.dtype());
    Err(candle_core::Error::UnexpectedDType { msg: "elements of a tensor", expected, got }.into())
}

#[cfg(feature = "cuda")]
const fn bytes_in<T>(range: &std::ops::Range<usize>) -> std::ops::Range<usize> {
    range.start * size_of::<T>()..range.end * size_of::<T>()
}

/// Runs `f` on the elements of a contiguous tensor, under its write lock; a GPU's are copied to the host and back.
///
/// # Errors
/// As [`with_slice`].
pub fn with_slice_mut<T: Scalar, R>(tensor: &Tensor, f: impl FnOnce(&mut [T]) -> R) -> Result<R, FlatError> {
    with_storage_mut(tensor, |storage, layout| {
        let range = contiguous_range(tensor, layout)?;
        match storage {
            StorageMut::Cpu(storage) => {
                let data = T::of_storage_mut(storage).ok_or_else(|| freed(tensor))?;
                Ok(f(data.get_mut(range).ok_or_else(|| freed(tensor))?))
            }
            #[cfg(feature = "cuda")]
            StorageMut::Cuda(storage) => {
                check_dtype::<T>(tensor)?;
                let mut host: Vec<T> = bytemuck::allocation::zeroed_vec(range.len());
                cuda::read(tensor, storage, bytes_in::<T>(&range), bytemuck::cast_slice_mut(&mut host))?;
                let result = f(&mut host);
                cuda::write(tensor, storage, bytes_in::<T>(&range), bytemuck::cast_slice(&host))?;
                Ok(result)
            }
        }
    })
}

/// Runs `f` on the bytes of a contiguous tensor, row-major, in the machine's byte order; a GPU's are copied to the host.
///
/// # Errors
/// As [`with_slice`], and for dtypes whose elements are not plain bytes.
pub fn with_bytes<R>(tensor: &Tensor, f: impl FnOnce(&[u8]) -> R) -> Result<R, FlatError> {
    let (storage, layout) = tensor.storage_and_layout();
    let range = contiguous_range(tensor, layout)?;
    let size = tensor.dtype().size_in_bytes();
    match &*storage {
        Storage::Cpu(storage) => {
            if is_freed_storage(tensor, storage) {
                return Err(freed(tensor));
            }
            let bytes = bytes_of(storage).ok_or_else(|| unsupported(tensor))?;
            Ok(f(bytes.get(range.start * size..range.end * size).ok_or_else(|| freed(tensor))?))
        }
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => {
            let mut host = TensorBuffer::zeros(&[range.len()], tensor.dtype())?;
            cuda::read(tensor, storage, range.start * size..range.end * size, host.bytes_mut())?;
            Ok(f(host.bytes_mut()))
        }
        _ => Err(FlatError::device(tensor)),
    }
}

/// Runs `f` on the bytes of a contiguous tensor, to change them; a GPU's are copied to the host and back.
///
/// # Errors
/// As [`with_bytes`].
pub fn with_bytes_mut<R>(tensor: &Tensor, f: impl FnOnce(&mut [u8]) -> R) -> Result<R, FlatError> {
    let size = tensor.dtype().size_in_bytes();
    with_storage_mut(tensor, |storage, layout| {
        let range = contiguous_range(tensor, layout)?;
        let range = range.start * size..range.end * size;
        match storage {
            StorageMut::Cpu(storage) => {
                if is_freed_storage(tensor, storage) {
                    return Err(freed(tensor));
                }
                let bytes = bytes_of_mut(storage).ok_or_else(|| unsupported(tensor))?;
                Ok(f(bytes.get_mut(range).ok_or_else(|| freed(tensor))?))
            }
            #[cfg(feature = "cuda")]
            StorageMut::Cuda(storage) => {
                let mut host = TensorBuffer::zeros(&[range.len() / size.max(1)], tensor.dtype())?;
                cuda::read(tensor, storage, range.clone(), host.bytes_mut())?;
                let result = f(host.bytes_mut());
                cuda::write(tensor, storage, range, host.bytes_mut())?;
                Ok(result)
            }
        }
    })
}

/// Whether the tensor's storage has been freed by [`free`].
#[must_use]
pub fn is_freed(tensor: &Tensor) -> bool {
    match &*tensor.storage_and_layout().0 {
        Storage::Cpu(storage) => is_freed_storage(tensor, storage),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => cuda::is_freed(tensor, storage),
        _ => false,
    }
}

/// Whether two tensors are views of one storage: reading one while the other is changed would wait for itself forever.
#[must_use]
pub fn share_storage(a: &Tensor, b: &Tensor) -> bool {
    place(a).0 == place(b).0
}

/// Whether two tensors are the very same elements of one storage.
pub(crate) fn is_same_view(a: &Tensor, b: &Tensor) -> bool {
    place(a) == place(b) && a.dtype() == b.dtype() && a.layout() == b.layout()
}

/// The address of what a storage's lock guards, and where the tensor begins in it. One lock at a time is held.
fn place(tensor: &Tensor) -> (usize, usize) {
    let (storage, layout) = tensor.storage_and_layout();
    (std::ptr::from_ref::<Storage>(&*storage).addr(), layout.start_offset())
}

/// Gives the memory behind a tensor back to the system. The tensor, and all that share its storage, stay usable
/// once [`refill`] has been called; until then reading them is an error.
///
/// # Errors
/// A tensor on a device that this build does not know.
pub fn free(tensor: &Tensor) -> Result<(), FlatError> {
    with_storage_mut(tensor, |storage, _| match storage {
        StorageMut::Cpu(storage) => {
            *storage = CpuStorage::F4(Vec::new());
            Ok(())
        }
        #[cfg(feature = "cuda")]
        StorageMut::Cuda(storage) => cuda::free(storage),
    })
}

/// Puts these elements, row-major, behind a tensor and all that share its storage, in place of whatever was there.
/// The tensor must be a whole one: of a view of some elements, the rest would be lost.
///
/// # Errors
/// The number of elements and the dtype must be the tensor's; a tensor that is not contiguous, or begins further on in
/// its storage; one on a device that this build does not know.
pub fn refill<T: Scalar>(tensor: &Tensor, data: Vec<T>) -> Result<(), FlatError> {
    if data.len() != tensor.elem_count() || T::DTYPE != tensor.dtype() {
        return Err(FlatError::ShapeMismatch {
            name: format!("storage of {:?}", tensor.dtype()),
            expected: tensor.dims().to_vec(),
            found: vec![data.len()],
        });
    }
    with_storage_mut(tensor, |storage, layout| {
        if contiguous_range(tensor, layout)?.start > 0 {
            return Err(FlatError::NotContiguous { shape: tensor.dims().to_vec() });
        }
        match storage {
            StorageMut::Cpu(storage) => {
                *storage = T::to_cpu_storage_owned(data);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            StorageMut::Cuda(storage) => cuda::refill(storage, T::DTYPE, data.len(), bytemuck::cast_slice(&data)),
        }
    })
}

/// Puts the elements of `source`, a contiguous tensor on the same device, behind a tensor: as [`refill`], but a GPU's
/// elements stay there.
///
/// # Errors
/// As [`refill`].
pub fn refill_from(tensor: &Tensor, source: &Tensor) -> Result<(), FlatError> {
    if source.elem_count() != tensor.elem_count() || source.dtype() != tensor.dtype() {
        return Err(FlatError::ShapeMismatch {
            name: format!("storage of {:?}", tensor.dtype()),
            expected: tensor.dims().to_vec(),
            found: source.dims().to_vec(),
        });
    }
    #[cfg(feature = "cuda")]
    if tensor.device().is_cuda() {
        return cuda::refill_from(tensor, source);
    }
    with_float!(source.dtype(), T => {
        let data = with_slice::<T, _>(source, <[T]>::to_vec)?;
        refill(tensor, data)
    }, else Err(unsupported(tensor)))
}

/// The tensor on another device: as candle's, but of a view only its own elements are moved, and they come from a GPU
/// through pinned memory.
///
/// # Errors
/// candle's.
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
    Ok(tensor.detach().force_contiguous()?.to_device(device)?)
}

/// The same values in memory of their own: contiguous, on the same device, and in no graph.
///
/// # Errors
/// A tensor that is freed; candle's.
pub fn owned_copy(tensor: &Tensor) -> Result<Tensor, FlatError> {
    // By hand, because candle does not know all dtypes, and copies through the caches.
    if let (Storage::Cpu(storage), layout) = (&*tensor.storage_and_layout().0, tensor.layout()) {
        if is_freed_storage(tensor, storage) {
            return Err(freed(tensor));
        }
        if let Some((start, end)) = layout.contiguous_offsets()
            && let Some(copy) = TensorBuffer::copied(storage, start..end, tensor.dims())
        {
            return Ok(copy.into_tensor());
        }
    }
    Ok(tensor.detach().force_contiguous()?.detach())
}

/// A contiguous tensor of zeros on a device.
///
/// # Errors
/// As [`zeros`], and candle's.
pub fn zeros_on(shape: &[usize], dtype: candle_core::DType, device: &Device) -> Result<Tensor, FlatError> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device
        && shape.contains(&0)
    {
        return cuda::without_elements(shape, dtype, device);
    }
    if device.is_cpu() { zeros(shape, dtype) } else { Ok(Tensor::zeros(shape, dtype, device)?) }
}

/// A contiguous CPU tensor of zeros, fresh from the system.
///
/// # Errors
/// Dtypes whose elements are not plain bytes; [`FlatError::OutOfMemory`].
pub fn zeros(shape: &[usize], dtype: candle_core::DType) -> Result<Tensor, FlatError> {
    Ok(TensorBuffer::zeros(shape, dtype)?.into_tensor())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn an_owned_copy_has_the_values_of_any_layout_and_shares_nothing() {
        let flat = Tensor::arange(0f32, 12f32, &Device::Cpu).unwrap();
        let part = flat.narrow(0, 2, 6).unwrap().reshape((2, 3)).unwrap();
        for view in [part.clone(), part.t().unwrap(), part.narrow(1, 1, 2).unwrap(), part.narrow(0, 0, 0).unwrap()] {
            let copy = owned_copy(&view).unwrap();
            assert!(copy.is_contiguous() && !share_storage(&copy, &view));
            assert_eq!(copy.to_vec2::<f32>().unwrap(), view.to_vec2::<f32>().unwrap());
            assert_eq!(with_bytes(&copy, <[u8]>::len).unwrap(), view.elem_count() * 4);
        }
        // candle allocates no copies of this one.
        let scales = zeros(&[3], DType::F8E8M0).unwrap();
        assert_eq!(with_bytes(&owned_copy(&scales).unwrap(), <[u8]>::to_vec).unwrap(), [0; 3]);
        let scalar = owned_copy(&Tensor::new(2i64, &Device::Cpu).unwrap()).unwrap();
        assert_eq!(scalar.to_scalar::<i64>().unwrap(), 2);
        free(&flat).unwrap();
        assert!(matches!(owned_copy(&part), Err(FlatError::Freed { .. })));
    }

    #[test]
    fn more_than_there_is_is_an_error_and_not_the_end() {
        for dtype in [DType::F32, DType::F8E8M0] {
            for shape in [vec![1 << 57], vec![1 << 40, 1 << 40]] {
                assert!(matches!(zeros(&shape, dtype), Err(FlatError::OutOfMemory { .. })), "{shape:?}");
            }
        }
        let raw = crate::RawTensor::zeros(fsdp_layout::DType::Bool, vec![usize::MAX, 2]);
        assert!(matches!(raw, Err(FlatError::OutOfMemory { .. })));
    }

    #[test]
    fn a_freed_storage_is_an_error_for_every_reader_and_comes_back() {
        let weight = Tensor::arange(0f32, 6f32, &Device::Cpu).unwrap().reshape((2, 3)).unwrap();
        let transposed = weight.t().unwrap();
        free(&weight).unwrap();
        assert!(is_freed(&weight) && is_freed(&transposed));
        let x = Tensor::ones((1, 2), DType::F32, &Device::Cpu).unwrap();
        assert!(x.matmul(&weight).is_err());
        assert!(weight.add(&weight).is_err());
        assert!(weight.sqrt().is_err());
        assert!(weight.sum_all().is_err());
        assert!((&weight * 2.0).is_err());
        assert!(weight.broadcast_add(&weight).is_err());
        assert!(weight.to_vec2::<f32>().is_err());
        assert!(transposed.contiguous().is_err());
        assert!(matches!(with_bytes(&weight, <[u8]>::len), Err(FlatError::Freed { .. })));
        assert!(matches!(with_slice::<f32, _>(&weight, <[f32]>::len), Err(FlatError::Freed { .. })));
        assert!(matches!(refill(&weight, vec![0f32; 5]), Err(FlatError::ShapeMismatch { .. })));
        let rows = weight.narrow(0, 1, 1).unwrap();
        assert!(matches!(refill(&rows, vec![0f32; 3]), Err(FlatError::NotContiguous { .. })));
        assert!(matches!(refill(&transposed, vec![0f32; 6]), Err(FlatError::NotContiguous { .. })));
        refill(&weight, vec![1f32, 2., 3., 4., 5., 6.]).unwrap();
        assert_eq!(transposed.to_vec2::<f32>().unwrap(), [[1., 4.], [2., 5.], [3., 6.]]);
    }

    #[test]
    fn tensors_without_elements_are_freed_and_filled_as_any_other() {
        for shape in [vec![0], vec![2, 0], vec![0, 2], vec![3, 0, 2]] {
            let tensor = zeros(&shape, DType::F32).unwrap();
            assert_eq!(with_bytes_mut(&tensor, |bytes| bytes.len()).unwrap(), 0, "{shape:?}");
            free(&tensor).unwrap();
            assert!(is_freed(&tensor));
            refill::<f32>(&tensor, Vec::new()).unwrap();
            assert_eq!(with_slice::<f32, _>(&tensor, <[f32]>::len).unwrap(), 0);
        }
    }

    #[test]
    fn views_are_changed_in_place() {
        let flat = Tensor::zeros(6, DType::F64, &Device::Cpu).unwrap();
        let view = flat.narrow(0, 2, 3).unwrap();
        with_slice_mut::<f64, _>(&view, |data| data.copy_from_slice(&[1., 2., 3.])).unwrap();
        assert_eq!(flat.to_vec1::<f64>().unwrap(), [0., 0., 1., 2., 3., 0.]);
        assert_eq!(with_bytes(&view, <[u8]>::len).unwrap(), 24);
        let strided = flat.reshape((2, 3)).unwrap().t().unwrap();
        assert!(matches!(with_slice::<f64, _>(&strided, |_| ()), Err(FlatError::NotContiguous { .. })));
    }

    #[test]
    fn bytes_of_every_plain_dtype_are_freed_and_zeroed() {
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
            assert!(with_bytes(&tensor, |bytes| bytes.iter().all(|&b| b == 0)).unwrap());
            free(&tensor).unwrap();
            assert!(is_freed(&tensor), "{dtype:?}");
            assert!(with_bytes(&tensor, |_| ()).is_err());
        }
    }
}
