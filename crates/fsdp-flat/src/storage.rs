//! The memory behind a tensor: read it, change it in place, free it and give it back.
//!
//! candle lends `&mut CpuStorage` only to an in-place op, so that is what carries the closures here.
//! A *freed* storage is an empty one of candle's dummy dtype `F4`, which no op computes with: whatever reads it gets
//! candle's dtype error, never a read past the end.

use std::cell::RefCell;

use candle_core::{CpuStorage, InplaceOp1, Layout, Storage, Tensor, WithDType};
use float8::F8E4M3;
use half::{bf16, f16};

use crate::FlatError;

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
        fn bytes_of(storage: &CpuStorage) -> Option<&[u8]> {
            match storage {
                $(CpuStorage::$variant(data) => Some(bytemuck::cast_slice(data)),)*
                CpuStorage::F8E8M0(data) => Some(data),
                _ => None,
            }
        }

        /// The storage's elements as bytes that can be changed.
        fn bytes_of_mut(storage: &mut CpuStorage) -> Option<&mut [u8]> {
            match storage {
                $(CpuStorage::$variant(data) => Some(bytemuck::cast_slice_mut(data)),)*
                CpuStorage::F8E8M0(data) => Some(data),
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

/// Lends a closure the storage of a tensor for change.
struct Lend<F, R> {
    closure: RefCell<Option<F>>,
    result: RefCell<Option<R>>,
}

impl<F, R> InplaceOp1 for Lend<F, R>
where
    F: FnOnce(&mut CpuStorage, &Layout) -> R,
{
    fn name(&self) -> &'static str {
        "fsdp-storage"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        if let Some(closure) = self.closure.borrow_mut().take() {
            *self.result.borrow_mut() = Some(closure(storage, layout));
        }
        Ok(())
    }
}

/// Runs `f` on the storage of a CPU tensor, under its write lock. All tensors that share the storage see the change.
///
/// # Errors
/// Whatever `f` returns, and candle's error for a tensor that is not on the CPU.
pub fn with_storage_mut<R>(
    tensor: &Tensor,
    f: impl FnOnce(&mut CpuStorage, &Layout) -> Result<R, FlatError>,
) -> Result<R, FlatError> {
    let lend = Lend { closure: RefCell::new(Some(f)), result: RefCell::new(None) };
    tensor.inplace_op1(&lend)?;
    lend.result.into_inner().unwrap_or_else(|| Err(not_on_cpu(tensor)))
}

fn not_on_cpu(tensor: &Tensor) -> FlatError {
    FlatError::Candle(candle_core::Error::Msg(format!(
        "a tensor on {:?} is not on the CPU",
        tensor.device().location()
    )))
}

fn freed(tensor: &Tensor) -> FlatError {
    FlatError::Freed { shape: tensor.dims().to_vec() }
}

fn contiguous_range(tensor: &Tensor, layout: &Layout) -> Result<std::ops::Range<usize>, FlatError> {
    let (start, end) =
        layout.contiguous_offsets().ok_or_else(|| FlatError::NotContiguous { shape: tensor.dims().to_vec() })?;
    Ok(start..end)
}

/// Runs `f` on the elements of a contiguous CPU tensor, under its read lock.
///
/// # Errors
/// A tensor that is freed, not contiguous, of another dtype, or not on the CPU.
pub fn with_slice<T: Scalar, R>(tensor: &Tensor, f: impl FnOnce(&[T]) -> R) -> Result<R, FlatError> {
    let (storage, layout) = tensor.storage_and_layout();
    let range = contiguous_range(tensor, layout)?;
    match &*storage {
        Storage::Cpu(storage) => {
            let data = T::cpu_storage_as_slice(storage)
                .map_err(|error| if is_freed_storage(tensor, storage) { freed(tensor) } else { error.into() })?;
            Ok(f(data.get(range).ok_or_else(|| freed(tensor))?))
        }
        Storage::Cuda(_) | Storage::Metal(_) => Err(not_on_cpu(tensor)),
    }
}

/// Runs `f` on the elements of a contiguous CPU tensor, under its write lock.
///
/// # Errors
/// As [`with_slice`].
pub fn with_slice_mut<T: Scalar, R>(tensor: &Tensor, f: impl FnOnce(&mut [T]) -> R) -> Result<R, FlatError> {
    with_storage_mut(tensor, |storage, layout| {
        let range = contiguous_range(tensor, layout)?;
        let data = T::of_storage_mut(storage).ok_or_else(|| freed(tensor))?;
        Ok(f(data.get_mut(range).ok_or_else(|| freed(tensor))?))
    })
}

/// Runs `f` on the bytes of a contiguous CPU tensor, row-major, in the machine's byte order.
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
        Storage::Cuda(_) | Storage::Metal(_) => Err(not_on_cpu(tensor)),
    }
}

/// Runs `f` on the bytes of a contiguous CPU tensor, to change them.
///
/// # Errors
/// As [`with_bytes`].
pub fn with_bytes_mut<R>(tensor: &Tensor, f: impl FnOnce(&mut [u8]) -> R) -> Result<R, FlatError> {
    let size = tensor.dtype().size_in_bytes();
    with_storage_mut(tensor, |storage, layout| {
        let range = contiguous_range(tensor, layout)?;
        if is_freed_storage(tensor, storage) {
            return Err(freed(tensor));
        }
        let bytes = bytes_of_mut(storage).ok_or_else(|| unsupported(tensor))?;
        Ok(f(bytes.get_mut(range.start * size..range.end * size).ok_or_else(|| freed(tensor))?))
    })
}

fn unsupported(tensor: &Tensor) -> FlatError {
    FlatError::Candle(candle_core::Error::UnsupportedDTypeForOp(tensor.dtype(), "bytes of a tensor"))
}

fn is_freed_storage(tensor: &Tensor, storage: &CpuStorage) -> bool {
    use candle_core::backend::BackendStorage;
    storage.dtype() != tensor.dtype()
}

/// Whether the tensor's storage has been freed by [`free`].
#[must_use]
pub fn is_freed(tensor: &Tensor) -> bool {
    match &*tensor.storage_and_layout().0 {
        Storage::Cpu(storage) => is_freed_storage(tensor, storage),
        Storage::Cuda(_) | Storage::Metal(_) => false,
    }
}

/// Gives the memory behind a tensor back to the system. The tensor, and all that share its storage, stay usable
/// once [`refill`] has been called; until then reading them is an error.
///
/// # Errors
/// A tensor that is not on the CPU.
pub fn free(tensor: &Tensor) -> Result<(), FlatError> {
    with_storage_mut(tensor, |storage, _| {
        *storage = CpuStorage::F4(Vec::new());
        Ok(())
    })
}

/// Puts these elements behind a tensor, in place of whatever was there.
///
/// # Errors
/// The number of elements and the dtype must be the tensor's, and the tensor must be a whole one, not a view.
pub fn refill<T: Scalar>(tensor: &Tensor, data: Vec<T>) -> Result<(), FlatError> {
    if data.len() != tensor.elem_count() || T::DTYPE != tensor.dtype() {
        return Err(FlatError::ShapeMismatch {
            name: format!("storage of {:?}", tensor.dtype()),
            expected: tensor.dims().to_vec(),
            found: vec![data.len()],
        });
    }
    with_storage_mut(tensor, |storage, _| {
        *storage = T::to_cpu_storage_owned(data);
        Ok(())
    })
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
        refill(&weight, vec![1f32, 2., 3., 4., 5., 6.]).unwrap();
        assert_eq!(transposed.to_vec2::<f32>().unwrap(), [[1., 4.], [2., 5.], [3., 6.]]);
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
