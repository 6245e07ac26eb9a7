//! safetensors: single files, Hugging Face's sharded layout with its index, and torch's
//! DCP-in-safetensors.
//!
//! The `safetensors` crate parses files that are in memory. Here files are read by range, so this
//! module parses the header itself, with the same rules: the tensors cover the data exactly, in any
//! order, without gap or overlap.

pub(crate) mod header;
mod old_values;
mod paths;
pub(crate) mod read;
pub(crate) mod sidecar;
mod slices;
mod values;
mod values_read;
pub(crate) mod write;
pub(crate) mod write_ranks;
