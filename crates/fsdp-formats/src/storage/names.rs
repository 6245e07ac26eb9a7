//! Names of files in and beside checkpoints, which several formats share.

/// The name of the object that claims a place in an object store, for files whose names are not the
/// saver's own.
pub(crate) const CLAIM_FILE: &str = ".fsdp-claim";

/// The name of the values file in a directory of safetensors files.
pub const VALUES_FILE: &str = "values.json";
