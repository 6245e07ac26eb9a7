//! The reports in which ranks say which items and files they have written.

use fsdp_digest::Sum;
use serde::{Deserialize, Serialize};

use crate::storage::integrity::FileIntegrity;

/// A report of what a rank has written, to be gathered for [`finish`](super::finish).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RankWritten {
    /// Its files; none if it had nothing to write.
    pub files: Vec<WrittenFile>,
    /// The places of its items.
    pub items: Vec<WrittenItem>,
    /// The bytes of payloads, including those that were linked.
    pub payload_bytes: u64,
    /// The bytes of payloads that were not written, because files of the checkpoint before were
    /// linked.
    pub linked_bytes: u64,
}

/// A file of a [`RankWritten`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenFile {
    /// Its name, relative to the checkpoint.
    pub name: String,
    /// Its hashes.
    pub integrity: FileIntegrity,
}

impl RankWritten {
    /// Returns about how many bytes it takes to send this.
    #[must_use]
    pub fn wire_bytes(&self) -> u64 {
        let files: u64 = self
            .files
            .iter()
            .map(|file| 32 + file.integrity.wire_bytes())
            .sum();
        64 + self.items.len() as u64 * 52 + files
    }
}

/// One item of a [`RankWritten`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenItem {
    /// Position of its file in those of the rank.
    pub file: u32,
    /// Position of its entry in the metadata of the global plan.
    pub entry: u32,
    /// Position of the chunk in the entry; 0 for a value.
    pub chunk: u32,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Its part in the digest of its tensor or value; `None` if no digests are recorded.
    pub part: Option<Sum>,
}
