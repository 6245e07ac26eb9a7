//! The file of the values that safetensors cannot hold: its names, and how a single file knows its own.

use twox_hash::XxHash3_128;

/// The name of the values file in a directory of safetensors files.
pub const VALUES_FILE: &str = "values.json";

/// Returns the name of the values file of a single file: `NAME.values.json` for `NAME.safetensors`.
#[must_use]
pub fn values_beside(name: &str) -> String {
    format!("{}.values.json", name.strip_suffix(".safetensors").unwrap_or(name))
}

/// The key in the `__metadata__` of a single file whose text is the hash of its values file. Without it, the file has no
/// values: a values file that lies there is of another checkpoint.
pub(crate) const VALUES_HASH: &str = "fsdp.values";

/// The end of the values file's name until the file that it belongs to is in its place.
pub(crate) const NEW_VALUES: &str = ".new";

/// Returns the text of [`VALUES_HASH`] for a values file.
pub(crate) fn values_hash(bytes: &[u8]) -> String {
    format!("{:032x}", XxHash3_128::oneshot(bytes))
}
