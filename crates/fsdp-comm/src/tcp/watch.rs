//! Waiting for a change of shared memory, and for the loss of a rank that should make it.

use std::time::Duration;

use super::segment::{Notification, Segment};
use super::sockets::Member;
use crate::backend::Round;
use crate::error::CommError;
use crate::sync::ready_within_yields;

/// The time between two checks of the other ranks while this one waits.
const PEER_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// A round of a group whose ranks share memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct SharedRound<'a> {
    pub(super) member: Member<'a>,
    pub(super) round: &'a Round<'a>,
    /// The segment of each rank.
    pub(super) segments: &'a [Segment],
}

impl<'a> SharedRound<'a> {
    /// Returns the segment of this rank.
    pub(super) fn own(&self) -> &'a Segment {
        &self.segments[self.member.rank]
    }

    /// Waits for notifications of a segment until `is_ready` returns `true`.
    ///
    /// # Errors
    /// One of the `missing` ranks, which are global ranks, is lost, the group has failed, or the
    /// deadline is over.
    pub(super) fn wait(
        &self,
        segment: &Segment,
        notification: Notification,
        is_ready: impl Fn() -> bool,
        missing: impl Fn() -> Vec<usize>,
    ) -> Result<(), CommError> {
        if ready_within_yields(&is_ready) {
            return Ok(());
        }
        loop {
            segment.wait_for_notification(notification, PEER_CHECK_INTERVAL, &is_ready);
            if is_ready() {
                return Ok(());
            }
            // The ranks may have made the change and left after that. So look for their loss first,
            // and then for the change.
            let Member { node, group, .. } = self.member;
            let failure = node.failure(group, self.round, &missing());
            if is_ready() {
                return Ok(());
            }
            if let Some(failure) = failure {
                return Err(failure);
            }
        }
    }
}
