//! The files of a checkpoint in safetensors, and the header entries that connect them: values that
//! safetensors cannot hold are in a JSON file beside it.

use fsdp_digest::StateDigest;
use fsdp_layout::DType;
use twox_hash::{XxHash3_64, XxHash3_128};

use super::header::charge_text;
use crate::error::FormatError;
use crate::formats::weights::SHARD_PREFIX;
pub use crate::storage::names::VALUES_FILE;

/// Returns the name of the values file of a single file: `NAME.values.json` for `NAME.safetensors`.
#[must_use]
pub fn values_beside(name: &str) -> String {
    format!(
        "{}.values.json",
        name.strip_suffix(".safetensors").unwrap_or(name)
    )
}

/// Returns the name of the only other file whose values file has the same name: `NAME` for
/// `NAME.safetensors`, and the reverse.
pub fn other_with_values_of(name: &str) -> String {
    name.strip_suffix(".safetensors")
        .map_or_else(|| format!("{name}.safetensors"), str::to_owned)
}

/// The key in the `__metadata__` of a single file whose text is the hash of its values file.
/// Without it, the file has no values, and a values file beside it belongs to another checkpoint.
pub const VALUES_HASH: &str = "fsdp.values";

/// The key in the `__metadata__` of a single file whose text is an object of the digests of its
/// tensors and values, by key. Directories have them in their integrity file.
pub const DIGESTS: &str = "fsdp.digests";

/// The key in the `__metadata__` of a single file whose text is the hash of the layout that the
/// digests were written with: the length of the header, and each tensor's place. Another program
/// that rewrites the file may copy the texts, but its header has another length, because it pads
/// less. That tells that the digests are stale.
pub const DIGESTS_LAYOUT: &str = "fsdp.digests.layout";

/// Returns `true` for the key of a text in a `__metadata__` that says how a file is written. All
/// others are somebody's notes about what it holds.
pub(crate) fn is_about_file(key: &str) -> bool {
    key.starts_with("fsdp.") || matches!(key, "format" | "DCP_VERSION" | SHARDING)
}

/// Returns the text of [`DIGESTS_LAYOUT`] for a file whose data begins at `data_offset`, with these
/// tensors in the order of its header: name, dtype, shape, and start in the data. All texts have
/// the same length.
pub fn layout_text<'t>(
    data_offset: u64,
    tensors: impl IntoIterator<Item = (&'t str, DType, &'t [usize], u64)>,
) -> String {
    let mut layout = data_offset.to_le_bytes().to_vec();
    for (name, dtype, shape, start) in tensors {
        for text in [name, &dtype.to_string()] {
            layout.extend((text.len() as u64).to_le_bytes());
            layout.extend(text.as_bytes());
        }
        layout.extend((shape.len() as u64).to_le_bytes());
        layout.extend(start.to_le_bytes());
        for &size in shape {
            layout.extend((size as u64).to_le_bytes());
        }
    }
    format!("{:016x}", XxHash3_64::oneshot(&layout))
}

/// Returns the text of [`DIGESTS`]. Digests of the same keys make texts of the same length.
pub fn digests_text(digests: &StateDigest) -> Result<String, FormatError> {
    serde_json::to_string(digests).map_err(|error| FormatError::malformed("digests", error))
}

/// Reads the text of [`DIGESTS`].
pub(crate) fn digests_of_text(text: &str) -> Result<StateDigest, FormatError> {
    charge_text(text, "memory for digests")?;
    serde_json::from_str(text).map_err(|error| FormatError::malformed("digests", error))
}

/// The key in the `__metadata__` of a file of torch's `HuggingFaceStorageWriter` whose text tells
/// where in its tensor each part lies that the file holds.
pub const SHARDING: &str = "DCP_SHARDING_INFO";

/// The key in the `__metadata__` of a rank's shard whose text is the number of shards: without it,
/// a shard that is missing would leave smaller tensors. The names count from 1.
pub const SHARDS: &str = "fsdp.shards";

/// Returns the name of a shard, as torch's `HuggingFaceStorageWriter` has it.
pub fn shard_name(index: usize) -> String {
    format!(
        "{SHARD_PREFIX}{:05}-model-00001-of-00001.safetensors",
        index + 1
    )
}

/// The ending of the values file's name until the safetensors file is committed; a hyphen and the
/// hash of the values follow.
pub const NEW_VALUES: &str = ".new";

/// Returns the possible names of the values file with this hash: its final name, and the name that
/// it has until the safetensors file is committed, which no other conversion uses.
pub fn values_names(name: &str, hash: &str) -> [String; 2] {
    [name.to_owned(), format!("{name}{NEW_VALUES}-{hash}")]
}

/// Returns the text of [`VALUES_HASH`] for a values file.
pub fn values_hash(bytes: &[u8]) -> String {
    format!("{:032x}", XxHash3_128::oneshot(bytes))
}
