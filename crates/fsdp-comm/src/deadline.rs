//! Deadlines: points in time whose computation cannot overflow.

use std::time::{Duration, Instant};

/// The time that an operation may take unless
/// [`ProcessGroup::with_deadline`](crate::ProcessGroup::with_deadline) says otherwise.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(60);

/// The longest deadline. Longer ones are cut to it, so that no point in time overflows.
pub(crate) const MAX_DEADLINE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Returns the moment at which a deadline that begins now is over.
pub(crate) fn until(deadline: Duration) -> Instant {
    Instant::now() + deadline.min(MAX_DEADLINE)
}
