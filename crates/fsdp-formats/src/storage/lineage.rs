//! The lineage of a checkpoint, as its integrity file records it.

use fsdp_digest::Digest;
use serde::{Deserialize, Serialize};

/// The place of a checkpoint in its run, as its integrity file records it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lineage {
    /// Steps done when it was saved.
    pub step: u64,
    /// The checkpoint that the run had saved or loaded before; `None` for the first one of a run
    /// that began anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Parent>,
    /// A text that stands for the configuration of the run: the same for the same configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
    /// The data that the run had read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<DataPosition>,
}

/// A checkpoint that another one continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parent {
    /// The number of steps after which it was saved.
    pub step: u64,
    /// The digest of all its state.
    pub digest: Digest,
}

impl Parent {
    /// Returns the parent that was saved after `step` steps and has this digest; `None` if either
    /// is not known.
    #[must_use]
    pub fn new(step: Option<u64>, digest: Option<Digest>) -> Option<Self> {
        Some(Parent {
            step: step?,
            digest: digest?,
        })
    }
}

/// The position up to which a run had read its data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataPosition {
    /// A hash of the data.
    pub hash: String,
    /// The position in it, in units of the program's own, such as rows that were read.
    pub position: u64,
}
