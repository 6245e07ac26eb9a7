//! Elements in the host's memory: candle's storages by their types.

use std::ops::Range;

use bytemuck::allocation::try_zeroed_vec;
use candle_core::{CpuStorage, Storage, Tensor, WithDType};
use float8::F8E4M3;
use half::{bf16, f16};

use crate::FlatError;
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

        /// The dtypes of candle whose elements are plain bytes, which is all that can be saved and loaded.
        pub const PLAIN_DTYPES: &[candle_core::DType] =
            &[$(candle_core::DType::$variant,)* candle_core::DType::F8E8M0];

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
        fn copied(storage: &CpuStorage, range: Range<usize>) -> Option<CpuStorage> {
            match storage {
                $(CpuStorage::$variant(data) => Some(CpuStorage::$variant(to_vec_streamed(data.get(range)?))),)*
                CpuStorage::F8E8M0(data) => Some(CpuStorage::F8E8M0(to_vec_streamed(data.get(range)?))),
                _ => None,
            }
        }

        /// Zeros whose memory the system has not touched yet.
        fn zeroed(dtype: candle_core::DType, shape: &[usize]) -> Result<CpuStorage, FlatError> {
            let no_memory = || FlatError::OutOfMemory { dtype: dtype.as_str().to_owned(), shape: shape.to_vec() };
            let numel = fsdp_layout::boxes::checked_numel(shape).ok_or_else(no_memory)?;
            match dtype {
                $(candle_core::DType::$variant => {
                    try_zeroed_vec::<$type>(numel).map(CpuStorage::$variant).map_err(|()| no_memory())
                })*
                candle_core::DType::F8E8M0 => {
                    try_zeroed_vec(numel).map(CpuStorage::F8E8M0).map_err(|()| no_memory())
                }
                _ => Err(FlatError::Candle(candle_core::Error::UnsupportedDTypeForOp(dtype, "zeros"))),
            }
        }
    };
}

scalars! { u8 => U8, u32 => U32, i16 => I16, i32 => I32, i64 => I64, bf16 => BF16, f16 => F16, f32 => F32, f64 => F64, F8E4M3 => F8E4M3 }

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
    /// Dtypes whose elements are not plain bytes; [`FlatError::OutOfMemory`].
    pub fn zeros(shape: &[usize], dtype: candle_core::DType) -> Result<Self, FlatError> {
        Ok(TensorBuffer { storage: zeroed(dtype, shape)?, shape: shape.to_vec() })
    }

    /// A range of a storage's elements; `None` for dtypes whose elements are not plain bytes.
    pub(super) fn copied(storage: &CpuStorage, range: Range<usize>, shape: &[usize]) -> Option<Self> {
        Some(TensorBuffer { storage: copied(storage, range)?, shape: shape.to_vec() })
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
