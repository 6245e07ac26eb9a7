//! Files of `torch.save`: a zip archive with a pickle, and the storages that it names.

pub(crate) mod read;
pub(crate) mod tensor_ref;
pub(crate) mod value;
pub(crate) mod write;
pub(crate) mod zip;
