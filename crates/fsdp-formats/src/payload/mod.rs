//! Payloads: the bytes of a tensor's box, and writing them to a file of any format.

pub(crate) mod slot;
pub(crate) mod source;
pub(crate) mod write;
