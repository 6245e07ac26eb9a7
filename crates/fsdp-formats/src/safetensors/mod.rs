//! safetensors: single files, Hugging Face's sharded layout with its index, and torch's
//! DCP-in-safetensors.
//!
//! The `safetensors` crate parses files that are in memory. Here files are read by range, so this
//! module parses the header itself, with the same rules: the tensors cover the data exactly, in any
//! order, without gap or overlap.

pub(crate) mod header;
pub(crate) mod paths;
pub(crate) mod read;
mod shards;
pub(crate) mod sidecar;
pub(crate) mod slices;
pub(crate) mod values;
pub(crate) mod values_read;
