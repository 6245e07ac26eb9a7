//! Names of the files that make a directory a checkpoint.

/// The name of the metadata file in a checkpoint's directory: its presence is what makes the directory a checkpoint.
pub const METADATA_FILE: &str = ".metadata";
