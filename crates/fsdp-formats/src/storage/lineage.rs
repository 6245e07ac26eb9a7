//! The lineage of a checkpoint, as its integrity file records it.

use fsdp_digest::Digest;
use serde::{Deserialize, Serialize};

/// The place of a checkpoint in its run, as its integrity file records it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lineage {
    /// Steps done when it was saved.
    pub step: u64,
    /// The branch of the run that it is on.
    #[serde(default, skip_serializing_if = "Branch::is_first")]
    pub branch: Branch,
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

/// A branch of a run. A run begins a new one with its first save after it has gone back to an older
/// checkpoint; it leaves the checkpoints that come after that one on the old branch.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Branch {
    /// Its number: 0 for the first branch of a run. A new branch has a greater number than all
    /// others in the run's directory.
    pub number: u64,
    /// The branches that it grew out of, each up to the last step that belongs to this branch too.
    pub from: Vec<BranchPoint>,
}

/// The last checkpoint of a branch that another branch continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BranchPoint {
    /// The number of the branch.
    pub branch: u64,
    /// The step of the checkpoint.
    pub step: u64,
}

impl Branch {
    /// Returns `true` for the first branch of a run.
    #[must_use]
    pub fn is_first(&self) -> bool {
        *self == Branch::default()
    }

    /// Returns the branch `number` that begins after the checkpoint of `step` on this one.
    #[must_use]
    pub fn fork(&self, step: u64, number: u64) -> Self {
        let mut from = self.from.clone();
        from.push(BranchPoint {
            branch: self.number,
            step,
        });
        Branch { number, from }
    }

    /// Returns `true` if the checkpoint of `step` on `other` belongs to this branch, or to the part
    /// of another one that this branch continues.
    #[must_use]
    pub fn continues(&self, other: &Branch, step: u64) -> bool {
        other.number == self.number
            || self
                .from
                .iter()
                .any(|point| point.branch == other.number && step <= point.step)
    }
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
