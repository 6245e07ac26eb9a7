//! Tensors of dtypes that candle does not compute with: their bytes, carried unchanged.

use std::sync::Arc;

use fsdp_layout::{DType, boxes::checked_numel};

use crate::FlatError;

/// A whole tensor as row-major little-endian bytes. Cloning shares the bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawTensor {
    dtype: DType,
    shape: Vec<usize>,
    bytes: Arc<Vec<u8>>,
}

impl RawTensor {
    /// Makes zeros, fresh from the system.
    ///
    /// # Errors
    /// [`FlatError::OutOfMemory`].
    pub fn zeros(dtype: DType, shape: Vec<usize>) -> Result<Self, FlatError> {
        let size = dtype.size_in_bytes() as usize;
        let length = checked_numel(&shape).and_then(|numel| numel.checked_mul(size));
        match length.and_then(|length| bytemuck::allocation::try_zeroed_vec(length).ok()) {
            Some(bytes) => Self::new(dtype, shape, bytes),
            None => Err(FlatError::OutOfMemory {
                dtype: dtype.to_string(),
                shape,
            }),
        }
    }

    /// Makes a tensor of these bytes.
    ///
    /// # Errors
    /// The number of bytes must be that of the shape.
    pub fn new(dtype: DType, shape: Vec<usize>, bytes: Vec<u8>) -> Result<Self, FlatError> {
        let needed = checked_numel(&shape)
            .and_then(|numel| numel.checked_mul(dtype.size_in_bytes() as usize))
            .unwrap_or(usize::MAX);
        if needed != bytes.len() {
            return Err(FlatError::WrongSize {
                given: bytes.len(),
                dtype,
                shape,
                needed,
            });
        }
        Ok(RawTensor {
            dtype,
            shape,
            bytes: Arc::new(bytes),
        })
    }

    /// Returns the element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the shape.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the row-major little-endian bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}
