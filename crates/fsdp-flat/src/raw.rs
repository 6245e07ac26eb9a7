//! Tensors of dtypes that candle does not compute with: their bytes, carried unchanged.

use std::sync::Arc;

use fsdp_layout::{DType, boxes::checked_bytes};

use crate::error::FlatError;

/// A whole tensor as row-major little-endian bytes. Cloning shares the bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawTensor {
    dtype: DType,
    shape: Vec<usize>,
    bytes: Arc<Vec<u8>>,
}

impl RawTensor {
    /// Makes a tensor of `bytes`.
    ///
    /// # Errors
    /// The number of bytes must be that of the shape.
    pub fn new(dtype: DType, shape: Vec<usize>, bytes: Vec<u8>) -> Result<Self, FlatError> {
        // A shape that overflows takes more bytes than can be given.
        let needed = checked_bytes(&shape, dtype).unwrap_or(usize::MAX);
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
