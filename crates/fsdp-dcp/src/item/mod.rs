//! One item of a `.distcp` file: what `torch.save` makes of one tensor or one value.
//!
//! [`TensorItem`] gives the bytes around a tensor's payload, and its length and position, from dtype and shape alone.
//! [`encode_value`] and [`decode_value`] turn non-tensor values to items and back. [`StoredTensor`] finds a tensor in an
//! item without reading its payload.

mod tensor;
mod tensor_ref;
mod value;

pub(crate) use tensor::check_byte_order;
pub use tensor::{StoredTensor, TensorItem};
pub use tensor_ref::TensorRef;
pub(crate) use tensor_ref::{check_writable, write_tensor};
pub(crate) use value::{TensorLoader, convert, put, quantizer_of};
pub use value::{decode_value, encode_value, value_item_length, value_of};

/// Root directory of the zip in a `.distcp` item.
pub(crate) const ROOT: &str = "archive";

#[cfg(test)]
mod tests;
