//! The counts of other projects of the field, taken by this report.

use super::counts::Counts;

/// A package of another project.
pub(super) struct Anchor {
    pub(super) package: &'static str,
    /// The start of the id of the commit that was counted.
    pub(super) revision: &'static str,
    pub(super) counts: Counts,
}

pub(super) const ANCHORS: [Anchor; 0] = [];
