//! The error of this crate.

use fsdp_layout::TensorBox;

/// An error of a box that cannot be digested.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DigestError {
    /// A box that is not inside of the tensor.
    #[error("box {bounds} is not inside of a tensor of shape {shape:?}")]
    OutsideOfTensor {
        /// The box.
        bounds: TensorBox,
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// Another number of bytes than the box has.
    #[error("box {bounds} of elements of {element_size} bytes has {expected} bytes, not {found}")]
    WrongLength {
        /// The box.
        bounds: TensorBox,
        /// Bytes of an element.
        element_size: usize,
        /// The bytes that it has.
        expected: usize,
        /// The bytes that were given.
        found: usize,
    },
}
