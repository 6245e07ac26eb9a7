//! The order in which ranks run, if a test controls it.

use std::fmt;
use std::sync::Arc;

/// The order in which the ranks of [`LocalRanks`](super::LocalRanks) run: a simulation lets one go
/// on at a time, so that a run can be repeated exactly.
pub trait Turns: fmt::Debug + Send + Sync {
    /// Begins the part of a rank, on its thread. Returns when it is the turn of that rank.
    fn begin(&self, rank: usize);

    /// Ends the part of the rank whose thread this is.
    fn end(&self);

    /// Lets others run until one of them has called [`Turns::changed`]. Returns `false` if none
    /// ever will, because all of them wait: then the deadline of the operation counts as over.
    fn wait(&self) -> bool;

    /// Is called when something has changed for which ranks may be waiting.
    fn changed(&self);
}

/// The part of a rank, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct TurnGuard(Arc<dyn Turns>);

impl TurnGuard {
    /// Begins the part of a rank.
    pub(super) fn begin(turns: &Arc<dyn Turns>, rank: usize) -> Self {
        turns.begin(rank);
        TurnGuard(Arc::clone(turns))
    }
}

impl Drop for TurnGuard {
    fn drop(&mut self) {
        self.0.end();
    }
}
