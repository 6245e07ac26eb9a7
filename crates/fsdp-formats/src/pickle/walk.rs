//! The budget for turning nodes into values: it limits the depth, and how far shared nodes may be
//! expanded.

use fsdp_layout::PlainValue;

use super::error::{PickleError, PickleErrorKind};
use super::node::{NodeId, Pickle};
use crate::budget::Budget;
use crate::limits::MAX_DEPTH;

/// The bytes that a node is charged when it is visited: those of the value that may be made of it.
const VISIT: u64 = size_of::<PlainValue>() as u64;

/// Counts what is made of a pickle's nodes, and how deep.
#[derive(Debug)]
pub(crate) struct Walk {
    depth: usize,
    budget: Budget,
    /// `true` if opaque objects become dicts that describe them, and are no errors.
    describes: bool,
}

impl Walk {
    /// Makes a walk with what is left of this pickle's budget.
    #[must_use]
    pub(crate) fn new(pickle: &Pickle<'_>) -> Self {
        Walk {
            depth: 0,
            budget: pickle.budget.clone(),
            describes: false,
        }
    }

    /// Makes a walk that describes opaque objects.
    #[must_use]
    pub(crate) fn describing(pickle: &Pickle<'_>) -> Self {
        Walk {
            describes: true,
            ..Self::new(pickle)
        }
    }

    /// Returns `true` if opaque objects become dicts that describe them.
    pub(crate) fn describes(&self) -> bool {
        self.describes
    }

    /// Makes a walk with what is left of this one's budget that continues from the same depth and
    /// describes opaque objects.
    pub(crate) fn aside(&self) -> Self {
        Walk {
            depth: self.depth,
            budget: self.budget.clone(),
            describes: true,
        }
    }

    /// Steps into a node. Every `enter` that succeeds must be followed by a [`Walk::leave`], unless
    /// the walk is given up.
    pub(crate) fn enter(&mut self, pickle: &Pickle<'_>, id: NodeId) -> Result<(), PickleError> {
        if self.depth >= MAX_DEPTH {
            let (value, limit) = (MAX_DEPTH as u64 + 1, MAX_DEPTH as u64);
            let kind = PickleErrorKind::TooLarge {
                what: "nesting",
                value,
                limit,
            };
            return Err(pickle.error(id, kind));
        }
        self.charge(pickle, id, "expanded size", VISIT)?;
        self.depth += 1;
        Ok(())
    }

    /// Goes on with what is left of the budget of a walk that was made [`aside`](Walk::aside), and
    /// from where that began.
    pub(crate) fn resume(&mut self, aside: Walk) {
        *self = Walk {
            describes: self.describes,
            ..aside
        };
    }

    /// Takes the bytes that are copied from a node.
    pub(crate) fn charge(
        &mut self,
        pickle: &Pickle<'_>,
        id: NodeId,
        what: &'static str,
        bytes: u64,
    ) -> Result<(), PickleError> {
        self.budget
            .charge(what, bytes)
            .map_err(|over| pickle.error(id, over.into()))
    }

    /// Steps out of the node entered last.
    pub(crate) fn leave(&mut self) {
        self.depth = self.depth.saturating_sub(1);
    }
}
