//! The budget of whoever turns nodes into values: depth, and how much sharing may expand.

use super::error::{PickleError, PickleErrorKind};
use super::node::{NodeId, Pickle};
use crate::limits::{EXPANSION_PER_BYTE, MAX_DEPTH, MAX_EXPANSION};

/// Counts the nodes visited, and how deep.
#[derive(Debug)]
pub(crate) struct Walk {
    depth: usize,
    left: usize,
    limit: usize,
}

impl Walk {
    /// Makes a fresh budget for this pickle.
    #[must_use]
    pub(crate) fn new(pickle: &Pickle<'_>) -> Self {
        let limit = MAX_EXPANSION.max(pickle.len.saturating_mul(EXPANSION_PER_BYTE));
        Walk { depth: 0, left: limit, limit }
    }

    /// Steps into a node. Every `enter` that succeeds must be followed by a [`Walk::leave`], unless the walk is given up.
    pub(crate) fn enter(&mut self, pickle: &Pickle<'_>, id: NodeId) -> Result<(), PickleError> {
        if self.depth >= MAX_DEPTH {
            let kind = PickleErrorKind::Limit { what: "nesting", value: MAX_DEPTH as u64 + 1, limit: MAX_DEPTH as u64 };
            return Err(pickle.error(id, kind));
        }
        let Some(left) = self.left.checked_sub(1) else {
            let limit = self.limit as u64;
            return Err(pickle.error(id, PickleErrorKind::Limit { what: "expanded size", value: limit + 1, limit }));
        };
        self.left = left;
        self.depth += 1;
        Ok(())
    }

    /// Steps out of the node entered last.
    pub(crate) fn leave(&mut self) {
        self.depth = self.depth.saturating_sub(1);
    }
}
