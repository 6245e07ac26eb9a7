//! Files of `torch.save`: a zip archive with a pickle, and the storages that it names; before torch
//! 1.6, pickles and storages one after the other.

pub(crate) mod flat;
pub(crate) mod index;
pub(crate) mod legacy;
mod numpy;
pub(crate) mod read;
pub(crate) mod sharded;
pub(crate) mod storages;
pub(crate) mod tensor_ref;
pub(crate) mod value;

use crate::error::FormatError;

/// The result of reading a file of torch.
pub(crate) type Result<T, E = FormatError> = std::result::Result<T, E>;
