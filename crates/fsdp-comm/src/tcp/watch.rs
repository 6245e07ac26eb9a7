//! Waiting for shared memory to change, with an eye on the ranks that should change it.

use std::hint;
use std::time::Duration;

use super::segment::{Bell, Segment};
use super::sockets::Member;
use crate::backend::Round;
use crate::error::CommError;

/// How often a rank that waits for memory to change looks whether the others are still there.
const LOOK: Duration = Duration::from_millis(10);

/// How often a rank looks at memory before it sleeps: about as long as falling asleep takes.
const SPINS: usize = 200;

/// Waits until memory shows what is waited for, and fails if the ranks that are `missing` cannot bring it about.
pub(super) fn wait(
    Member { node, group, .. }: Member<'_>,
    round: &Round<'_>,
    segment: &Segment,
    bell: Bell,
    is_ready: impl Fn() -> bool,
    missing: impl Fn() -> Vec<usize>,
) -> Result<(), CommError> {
    for _ in 0..SPINS {
        if is_ready() {
            return Ok(());
        }
        hint::spin_loop();
    }
    loop {
        segment.listen(bell, LOOK, &is_ready);
        // What made them leave may have come after what is waited for, so that has the last word.
        let trouble = node.trouble(group, round, &missing());
        match trouble {
            _ if is_ready() => return Ok(()),
            Some(trouble) => return Err(trouble),
            None => {}
        }
    }
}
