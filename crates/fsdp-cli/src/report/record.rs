//! All data that the page of a run shows.

use fsdp_formats::lineage::Link;

use super::history::History;
use super::metrics::Metrics;

/// All that is known of a run.
pub(super) struct Run {
    pub(super) name: String,
    pub(super) metrics: Metrics,
    pub(super) history: History,
    /// Its checkpoints, oldest first.
    pub(super) checkpoints: Vec<Link>,
}
