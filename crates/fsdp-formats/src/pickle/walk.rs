//! The budget for turning nodes into values: it limits the depth, and how far shared nodes may be
//! expanded.

use fsdp_layout::PlainValue;

use super::error::PickleError;
use super::node::{NodeId, Pickle};
use crate::budget::{Budget, check_depth};

/// The bytes that a node is charged when it is visited: those of the value that may be made of it.
const VISIT_COST_BYTES: u64 = size_of::<PlainValue>() as u64;

/// Counts what is made of a pickle's nodes, and how deep.
#[derive(Debug, Clone)]
pub(crate) struct Walk<'p, 'a> {
    pub(crate) pickle: &'p Pickle<'a>,
    depth: usize,
    budget: Budget,
    /// `true` if opaque objects become dicts that describe them, and are no errors.
    pub(crate) describes: bool,
}

impl<'p, 'a> Walk<'p, 'a> {
    /// Begins a walk with what is left of this pickle's budget.
    pub(crate) fn new(pickle: &'p Pickle<'a>) -> Self {
        Walk {
            pickle,
            depth: 0,
            budget: pickle.budget.clone(),
            describes: false,
        }
    }

    /// Steps into a node. Every `enter` that succeeds must be followed by a [`Walk::leave`], unless
    /// the walk is given up.
    pub(crate) fn enter(&mut self, id: NodeId) -> Result<(), PickleError> {
        check_depth(self.depth).map_err(|over| self.pickle.error(id, over.into()))?;
        self.charge(id, "expanded size", VISIT_COST_BYTES)?;
        self.depth += 1;
        Ok(())
    }

    /// Makes a part of the walk, after which the walk goes on from here even if the part fails.
    /// Returns what the part returns.
    pub(crate) fn attempt<T>(&mut self, part: impl FnOnce(&mut Self) -> T) -> T {
        let depth = self.depth;
        let result = part(self);
        self.depth = depth;
        result
    }

    /// Charges bytes that are copied from a node to the budget.
    pub(crate) fn charge(
        &mut self,
        id: NodeId,
        what: &'static str,
        bytes: u64,
    ) -> Result<(), PickleError> {
        self.budget
            .charge(what, bytes)
            .map_err(|over| self.pickle.error(id, over.into()))
    }

    /// Steps out of the node entered last.
    pub(crate) fn leave(&mut self) {
        self.depth = self
            .depth
            .checked_sub(1)
            .expect("a node is left only after it was entered");
    }
}
