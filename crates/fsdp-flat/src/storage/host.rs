//! Elements in the host's memory: candle's storages by their types.

use std::ops::Range;

use bytemuck::allocation::try_zeroed_vec;
use candle_core::backend::BackendStorage as _;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Storage, Tensor, WithDType};
use float8::F8E4M3;
use fsdp_layout::boxes::checked_numel;
use half::{bf16, f16};

use crate::error::FlatError;
use crate::non_temporal::non_temporal_to_vec;

/// An element type that tensors here are made of.
pub trait Scalar: WithDType + bytemuck::Pod {}

impl<T: WithDType + bytemuck::Pod> Scalar for T {}

macro_rules! plain_storages {
    ($($type:ty => $variant:ident),*) => {
        /// The dtypes of candle whose elements are plain bytes, which is all that can be saved and
        /// loaded.
        pub const PLAIN_DTYPES: &[DType] = &[$(DType::$variant),*];

        /// Returns the storage's elements as bytes; `None` for types that are not plain bytes.
        pub(crate) fn bytes_of(storage: &CpuStorage) -> Option<&[u8]> {
            match storage {
                $(CpuStorage::$variant(data) => Some(bytemuck::cast_slice(data)),)*
                _ => None,
            }
        }

        /// Returns the bytes of a storage that has plain bytes, to be changed.
        pub(crate) fn plain_bytes_mut(storage: &mut CpuStorage) -> &mut [u8] {
            match storage {
                $(CpuStorage::$variant(data) => bytemuck::cast_slice_mut(data),)*
                _ => unreachable!("{NOT_PLAIN}"),
            }
        }

        /// Copies a range of the storage's elements, which has `shape`, to memory of their own;
        /// `None` for types that are not plain bytes, and for a range that is not there.
        pub(super) fn copy_range(
            storage: &CpuStorage,
            range: Range<usize>,
            shape: &[usize],
        ) -> Result<Option<CpuStorage>, FlatError> {
            let copy = match storage {
                $(CpuStorage::$variant(data) => data
                    .get(range)
                    .map(|data| non_temporal_to_vec(data).map(CpuStorage::$variant)),)*
                _ => None,
            };
            copy.transpose().map_err(|_| out_of_memory_error(storage.dtype(), shape))
        }

        /// Makes zeros whose memory the system has not touched yet.
        ///
        /// # Errors
        /// Dtypes whose elements are not plain bytes; [`FlatError::OutOfMemory`].
        pub(crate) fn zeroed(shape: &[usize], dtype: DType) -> Result<CpuStorage, FlatError> {
            let numel = checked_numel(shape).ok_or_else(|| out_of_memory_error(dtype, shape))?;
            let zeros = match dtype {
                $(DType::$variant => try_zeroed_vec::<$type>(numel).map(CpuStorage::$variant),)*
                _ => return Err(FlatError::Candle(candle_core::Error::UnsupportedDTypeForOp(dtype, "zeros"))),
            };
            zeros.map_err(|()| out_of_memory_error(dtype, shape))
        }
    };
}

// candle keeps the 8-bit scales of F8E8M0 as bytes, so they have no element type of their own.
plain_storages! { u8 => U8, u32 => U32, i16 => I16, i32 => I32, i64 => I64, bf16 => BF16, f16 => F16, f32 => F32, f64 => F64, F8E4M3 => F8E4M3, u8 => F8E8M0 }

/// The reason why memory that was checked when it was taken or made has plain bytes.
const NOT_PLAIN: &str = "only storages of plain bytes are lent, made and copied here";

/// Returns the bytes of a storage that has plain bytes.
pub(crate) fn plain_bytes(storage: &CpuStorage) -> &[u8] {
    bytes_of(storage).expect(NOT_PLAIN)
}

/// Returns the error of elements for which there is no memory.
fn out_of_memory_error(dtype: DType, shape: &[usize]) -> FlatError {
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
    try_zeroed_vec(numel).map_err(|()| out_of_memory_error(T::DTYPE, &[numel]))
}

/// Makes an empty vector with room for `numel` elements.
///
/// # Errors
/// [`FlatError::OutOfMemory`].
pub fn reserved_vec<T: Scalar>(numel: usize) -> Result<Vec<T>, FlatError> {
    let mut reserved = Vec::new();
    reserved
        .try_reserve_exact(numel)
        .map_err(|_| out_of_memory_error(T::DTYPE, &[numel]))?;
    Ok(reserved)
}

/// Makes a tensor of elements in the host's memory, row-major, without a copy.
pub(crate) fn host_tensor(storage: CpuStorage, shape: &[usize]) -> Tensor {
    Tensor::from_storage(Storage::Cpu(storage), shape, BackpropOp::none(), false)
}
