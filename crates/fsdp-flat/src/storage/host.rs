//! Elements in the host's memory: candle's storages by their types.

use std::collections::TryReserveError;
use std::ops::Range;

use bytemuck::allocation::try_zeroed_vec;
use candle_core::backend::BackendStorage as _;
use candle_core::{CpuStorage, Storage, Tensor, WithDType};
use float8::F8E4M3;
use half::{bf16, f16};

use crate::FlatError;
use crate::non_temporal::non_temporal_to_vec;

/// An element type that tensors here are made of.
pub trait Scalar: WithDType + bytemuck::Pod {}

macro_rules! scalars {
    ($($type:ty => $variant:ident),*) => {
        $(impl Scalar for $type {})*

        /// The dtypes of candle whose elements are plain bytes, which is all that can be saved and
        /// loaded.
        pub const PLAIN_DTYPES: &[candle_core::DType] =
            &[$(candle_core::DType::$variant,)* candle_core::DType::F8E8M0];

        /// Returns the storage's elements as bytes; `None` for types that are not plain bytes.
        pub(crate) fn bytes_of(storage: &CpuStorage) -> Option<&[u8]> {
            match storage {
                $(CpuStorage::$variant(data) => Some(bytemuck::cast_slice(data)),)*
                CpuStorage::F8E8M0(data) => Some(data),
                _ => None,
            }
        }

        /// Returns the storage's elements as bytes that can be changed; `None` for types that are
        /// not plain bytes.
        pub(crate) fn bytes_of_mut(storage: &mut CpuStorage) -> Option<&mut [u8]> {
            match storage {
                $(CpuStorage::$variant(data) => Some(bytemuck::cast_slice_mut(data)),)*
                CpuStorage::F8E8M0(data) => Some(data),
                _ => None,
            }
        }

        /// Copies a range of the storage's elements to memory of their own; `None` for types that
        /// are not plain bytes, and for a range that is not there.
        fn copied(storage: &CpuStorage, range: Range<usize>) -> Option<Result<CpuStorage, TryReserveError>> {
            match storage {
                $(CpuStorage::$variant(data) => {
                    Some(non_temporal_to_vec(data.get(range)?).map(CpuStorage::$variant))
                })*
                CpuStorage::F8E8M0(data) => Some(non_temporal_to_vec(data.get(range)?).map(CpuStorage::F8E8M0)),
                _ => None,
            }
        }

        /// Makes zeros whose memory the system has not touched yet.
        fn zeroed(dtype: candle_core::DType, shape: &[usize]) -> Result<CpuStorage, FlatError> {
            let numel = fsdp_layout::boxes::checked_numel(shape).ok_or_else(|| out_of_memory(dtype, shape))?;
            match dtype {
                $(candle_core::DType::$variant => {
                    try_zeroed_vec::<$type>(numel).map(CpuStorage::$variant).map_err(|()| out_of_memory(dtype, shape))
                })*
                candle_core::DType::F8E8M0 => {
                    try_zeroed_vec(numel).map(CpuStorage::F8E8M0).map_err(|()| out_of_memory(dtype, shape))
                }
                _ => Err(FlatError::Candle(candle_core::Error::UnsupportedDTypeForOp(dtype, "zeros"))),
            }
        }
    };
}

scalars! { u8 => U8, u32 => U32, i16 => I16, i32 => I32, i64 => I64, bf16 => BF16, f16 => F16, f32 => F32, f64 => F64, F8E4M3 => F8E4M3 }

fn out_of_memory(dtype: candle_core::DType, shape: &[usize]) -> FlatError {
    FlatError::OutOfMemory {
        dtype: dtype.as_str().to_owned(),
        shape: shape.to_vec(),
    }
}

/// Makes a vector of zeros. Large ones are not written to: the system provides their memory as
/// zeros when it is used.
///
/// # Errors
/// [`FlatError::OutOfMemory`].
pub fn zeroed_vec<T: Scalar>(numel: usize) -> Result<Vec<T>, FlatError> {
    try_zeroed_vec(numel).map_err(|()| out_of_memory(T::DTYPE, &[numel]))
}

/// Makes an empty vector with room for this many elements.
///
/// # Errors
/// [`FlatError::OutOfMemory`].
pub fn reserved_vec<T: Scalar>(numel: usize) -> Result<Vec<T>, FlatError> {
    let mut empty = Vec::new();
    empty
        .try_reserve_exact(numel)
        .map_err(|_| out_of_memory(T::DTYPE, &[numel]))?;
    Ok(empty)
}

/// Copies a slice. If there is not enough memory, this is an error and does not end the process.
///
/// # Errors
/// [`FlatError::OutOfMemory`].
pub fn copied_vec<T: Scalar>(from: &[T]) -> Result<Vec<T>, FlatError> {
    let mut to = reserved_vec(from.len())?;
    to.extend_from_slice(from);
    Ok(to)
}

/// Memory that will become a tensor. Until then it can be filled as bytes, from any thread.
#[derive(Debug)]
pub struct TensorBuffer {
    storage: CpuStorage,
    shape: Vec<usize>,
}

impl TensorBuffer {
    /// Makes a buffer of zeros, as [`zeroed_vec`] does.
    ///
    /// # Errors
    /// Dtypes whose elements are not plain bytes; [`FlatError::OutOfMemory`].
    pub fn zeros(shape: &[usize], dtype: candle_core::DType) -> Result<Self, FlatError> {
        Ok(TensorBuffer {
            storage: zeroed(dtype, shape)?,
            shape: shape.to_vec(),
        })
    }

    /// Makes a buffer of this shape without any elements, which is no tensor until its storage has
    /// been replaced.
    ///
    /// # Errors
    /// Dtypes whose elements are not plain bytes.
    pub(super) fn without_elements(
        shape: &[usize],
        dtype: candle_core::DType,
    ) -> Result<Self, FlatError> {
        Ok(TensorBuffer {
            storage: zeroed(dtype, &[0])?,
            shape: shape.to_vec(),
        })
    }

    /// Returns the storage.
    pub(super) fn into_storage(self) -> CpuStorage {
        self.storage
    }

    /// Copies a range of a storage's elements; `None` for dtypes whose elements are not plain
    /// bytes.
    pub(super) fn copied(
        storage: &CpuStorage,
        range: Range<usize>,
        shape: &[usize],
    ) -> Result<Option<Self>, FlatError> {
        let dtype = storage.dtype();
        let Some(storage) = copied(storage, range) else {
            return Ok(None);
        };
        let storage = storage.map_err(|_| out_of_memory(dtype, shape))?;
        Ok(Some(TensorBuffer {
            storage,
            shape: shape.to_vec(),
        }))
    }

    /// Returns the elements' bytes, row-major.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        bytes_of(&self.storage).unwrap_or_default()
    }

    /// Returns the row-major bytes of the elements, for the caller to fill.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        bytes_of_mut(&mut self.storage).unwrap_or_default()
    }

    /// Turns the memory into the tensor, without a copy.
    #[must_use]
    pub fn into_tensor(self) -> Tensor {
        Tensor::from_storage(
            Storage::Cpu(self.storage),
            self.shape,
            candle_core::op::BackpropOp::none(),
            false,
        )
    }
}
