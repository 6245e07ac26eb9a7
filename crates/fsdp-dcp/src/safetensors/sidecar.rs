//! The files of a checkpoint in safetensors: the values that safetensors cannot hold, and how each knows the others.

use fsdp_digest::StateDigest;
use twox_hash::XxHash3_128;

use crate::budget::Budget;
use crate::error::FormatError;
pub use crate::storage::names::VALUES_FILE;

/// Returns the name of the values file of a single file: `NAME.values.json` for `NAME.safetensors`.
#[must_use]
pub fn values_beside(name: &str) -> String {
    format!("{}.values.json", name.strip_suffix(".safetensors").unwrap_or(name))
}

/// The key in the `__metadata__` of a single file whose text is the hash of its values file. Without it, the file has no
/// values: a values file that lies there is of another checkpoint.
pub(crate) const VALUES_HASH: &str = "fsdp.values";

/// The key in the `__metadata__` of a single file whose text is an object of the digests of its tensors and values, by key.
/// Directories have them in their integrity file.
pub(crate) const DIGESTS: &str = "fsdp.digests";

/// Returns the text of [`DIGESTS`]. Digests of the same keys make texts of the same length.
pub(crate) fn digests_text(digests: &StateDigest) -> Result<String, FormatError> {
    serde_json::to_string(digests).map_err(malformed_digests)
}

/// Reads the text of [`DIGESTS`].
pub(crate) fn digests_of_text(text: &str) -> Result<StateDigest, FormatError> {
    Budget::new(text.len() as u64, 1).charge_json("memory for digests", text.as_bytes())?;
    serde_json::from_str(text).map_err(malformed_digests)
}

fn malformed_digests(error: serde_json::Error) -> FormatError {
    FormatError::Malformed { what: "digests", reason: error.to_string() }
}

/// The key in the `__metadata__` of a rank's shard whose text is the number of shards: without it, a shard that is missing
/// would leave smaller tensors. The names count from 1.
pub(crate) const SHARDS: &str = "fsdp.shards";

/// Returns the name of a shard, as torch's `HuggingFaceStorageWriter` has it.
pub(crate) fn shard_name(index: usize) -> String {
    format!("shard-{:05}-model-00001-of-00001.safetensors", index + 1)
}

/// The end of the values file's name until the file that it belongs to is in its place; its hash follows.
const NEW_VALUES: &str = ".new";

/// Returns the names under which the values file of this hash may lie, given its name: that one; until the file that it
/// belongs to is in its place another, which no other conversion uses; and the one that earlier versions gave it.
pub(crate) fn values_names(name: &str, hash: &str) -> [String; 3] {
    [name.to_owned(), format!("{name}{NEW_VALUES}-{hash}"), format!("{name}{NEW_VALUES}")]
}

/// Returns the text of [`VALUES_HASH`] for a values file.
pub(crate) fn values_hash(bytes: &[u8]) -> String {
    format!("{:032x}", XxHash3_128::oneshot(bytes))
}
