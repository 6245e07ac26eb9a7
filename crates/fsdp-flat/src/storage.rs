//! The memory behind a tensor: read it, change it in place, free it and give it back.
//!
//! candle lends `&mut CpuStorage` only to an in-place op, so that is what carries the closures here. Memory of NVIDIA GPUs
//! (feature `cuda`) is lent as a copy on the host, which is written back if it may have changed.
//! A *freed* storage is an empty one of candle's dummy dtype `F4`, which no op computes with: whatever reads it gets
//! candle's dtype error, never a read past the end.

use std::cell::RefCell;

use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Storage, Tensor, WithDType};
use float8::F8E4M3;
use half::{bf16, f16};

use crate::FlatError;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::streamed::to_vec_streamed;

/// An element type that tensors here are made of.
pub trait Scalar: WithDType + bytemuck::Pod {
    /// The storage's elements, if it holds this type.
    fn of_storage_mut(storage: &mut CpuStorage) -> Option<&mut Vec<Self>>;
}

macro_rules! scalars {
    ($($type:ty => $variant:ident),*) => {
        $(impl Scalar for $type {
            fn of_storage_mut(storage: &mut CpuStorage) -> Option<&mut Vec<Self>> {
                match storage {
                    CpuStorage::$variant(data) => Some(data),
                    _ => None,
                }
            }
        })*

        /// The storage's elements as bytes; `None` for types that are not plain bytes.
        pub(crate) fn bytes_of(storage: &CpuStorage) -> Option<&[u8]> {
            match storage {
                $(CpuStorage::$variant(data) => Some(bytemuck::cast_slice(data)),)*
                CpuStorage::F8E8M0(data) => Some(data),
                _ => None,
            }
        }

        /// The storage's elements as bytes that can be changed.
        pub(crate) fn bytes_of_mut(storage: &mut CpuStorage) -> Option<&mut [u8]> {
            match storage {
                $(CpuStorage::$variant(data) => Some(bytemuck::cast_slice_mut(data)),)*
                CpuStorage::F8E8M0(data) => Some(data),
                _ => None,
            }
        }

        /// Some of the storage's elements, in memory of their own.
        fn copied(storage: &CpuStorage, range: std::ops::Range<usize>) -> Option<CpuStorage> {
            match storage {
                $(CpuStorage::$variant(data) => Some(CpuStorage::$variant(to_vec_streamed(data.get(range)?))),)*
                CpuStorage::F8E8M0(data) => Some(CpuStorage::F8E8M0(to_vec_streamed(data.get(range)?))),
                _ => None,
            }
        }

        /// A CPU tensor of zeros whose memory the system has not touched yet.
        fn zeroed(dtype: candle_core::DType, numel: usize) -> Option<CpuStorage> {
            match dtype {
                $(candle_core::DType::$variant => {
                    Some(CpuStorage::$variant(bytemuck::allocation::zeroed_vec::<$type>(numel)))
                })*
                candle_core::DType::F8E8M0 => Some(CpuStorage::F8E8M0(vec![0; numel])),
                _ => None,
            }
        }
    };
}

scalars! { u8 => U8, u32 => U32, i16 => I16, i32 => I32, i64 => I64, bf16 => BF16, f16 => F16, f32 => F32, f64 => F64, F8E4M3 => F8E4M3 }

/// Calls a generic function with the Rust type of a floating-point candle dtype:
/// `with_float!(dtype, T => body, else other)`.
#[macro_export]
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr, else $otherwise:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $T = half::f16;
                $body
            }
            _ => $otherwise,
        }
    };
}

/// A tensor's storage, lent for change.
pub(crate) enum StorageMut<'a> {
    /// The host's.
    Cpu(&'a mut CpuStorage),
    /// An NVIDIA GPU's.
    #[cfg(feature = "cuda")]
    Cuda(&'a mut candle_core::CudaStorage),
}

/// Lends a closure the storage of a tensor for change.
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
    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        self.lend(StorageMut::Cuda(storage), layout);
        Ok(())
    }
}

impl<F, R> Lend<F, R>
where
    F: FnOnce(StorageMut<'_>, &Layout) -> R,
{
    fn lend(&self, storage: StorageMut<'_>, layout: &Layout) {
        if let Some(closure) = self.closure.borrow_mut().take() {
            *self.result.borrow_mut() = Some(closure(storage, layout));
        }
    }
}

/// Runs `f` on the storage of a tensor, under its write lock. All tensors that share the storage see the change.
///
/// # Errors
/// Whatever `f` returns, and a tensor on a device that this build does not know.
pub(crate) fn with_storage_mut<R>(
    tensor: &Tensor,
    f: impl FnOnce(StorageMut<'_>, &Layout) -> Result<R, FlatError>,
) -> Result<R, FlatError> {
    if !is_known(tensor.device()) {
        return Err(FlatError::device(tensor));
    }
    let lend = Lend { closure: RefCell::new(Some(f)), result: RefCell::new(None) };
    match tensor.elem_count() {
        // Shape [2, 0] has the strides [0, 1], which candle takes for repeated elements.
        0 => tensor.detach().flatten_all()?.inplace_op1(&lend)?,
        _ => tensor.inplace_op1(&lend)?,
    }
    lend.result.into_inner().unwrap_or_else(|| Err(FlatError::device(tensor)))
}

/// Whether this build reaches the memory of this device.
fn is_known(device: &Device) -> bool {
    device.is_cpu() || (cfg!(feature = "cuda") && device.is_cuda())
}

pub(crate) fn freed(tensor: &Tensor) -> FlatError {
    FlatError::Freed { shape: tensor.dims().to_vec() }
}

pub(crate) fn contiguous_range(tensor: &Tensor, layout: &Layout) -> Result<std::ops::Range<usize>, FlatError> {
    let (start, end) =
        layout.contiguous_offsets().ok_or_else(|| FlatError::NotContiguous { shape: tensor.dims().to_vec() })?;
    Ok(start..end)
}

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

pub(crate) fn unsupported(tensor: &Tensor) -> FlatError {
    FlatError::Candle(candle_core::Error::UnsupportedDTypeForOp(tensor.dtype(), "bytes of a tensor"))
}

pub(crate) fn is_freed_storage(tensor: &Tensor, storage: &CpuStorage) -> bool {
    use candle_core::backend::BackendStorage;
    storage.dtype() != tensor.dtype()
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
            && let Some(storage) = copied(storage, start..end)
        {
            return Ok(TensorBuffer { storage, shape: tensor.dims().to_vec() }.into_tensor());
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
/// Dtypes whose elements are not plain bytes.
pub fn zeros(shape: &[usize], dtype: candle_core::DType) -> Result<Tensor, FlatError> {
    Ok(TensorBuffer::zeros(shape, dtype)?.into_tensor())
}

/// Memory that is to become a tensor: filled as bytes first, many at a time and from any thread.
#[derive(Debug)]
pub struct TensorBuffer {
    storage: CpuStorage,
    shape: Vec<usize>,
}

impl TensorBuffer {
    /// Zeros, fresh from the system.
    ///
    /// # Errors
    /// Dtypes whose elements are not plain bytes.
    pub fn zeros(shape: &[usize], dtype: candle_core::DType) -> Result<Self, FlatError> {
        let storage = zeroed(dtype, shape.iter().product())
            .ok_or(FlatError::Candle(candle_core::Error::UnsupportedDTypeForOp(dtype, "zeros")))?;
        Ok(TensorBuffer { storage, shape: shape.to_vec() })
    }

    /// The elements' bytes, row-major.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        bytes_of_mut(&mut self.storage).unwrap_or_default()
    }

    /// The tensor, without a copy.
    #[must_use]
    pub fn into_tensor(self) -> Tensor {
        Tensor::from_storage(Storage::Cpu(self.storage), self.shape, candle_core::op::BackpropOp::none(), false)
    }
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
        for dtype in [
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
        ] {
            let tensor = zeros(&[2, 2], dtype).unwrap();
            assert!(with_bytes(&tensor, |bytes| bytes.iter().all(|&b| b == 0)).unwrap());
            free(&tensor).unwrap();
            assert!(is_freed(&tensor), "{dtype:?}");
            assert!(with_bytes(&tensor, |_| ()).is_err());
        }
    }
}
