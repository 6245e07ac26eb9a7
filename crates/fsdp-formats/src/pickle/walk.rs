//! The budget for turning nodes into values: it limits the depth, and how far shared nodes may be
//! expanded.

use fsdp_layout::PlainValue;

use super::error::PickleError;
use super::node::{NodeId, ObjectNode, Pickle};
use crate::budget::{Budget, check_depth};

/// The bytes that a node is charged when it is visited: those of the value that may be made of it.
const VISIT_COST_BYTES: u64 = size_of::<PlainValue>() as u64;

/// The name, in errors of the budget, of the texts, bytes and names that are copied from a pickle.
pub(crate) const COPIES: &str = "copies of text and bytes";

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

    /// Returns the text of a node, and charges this reference and a copy of it.
    pub(crate) fn copy_text(&mut self, id: NodeId) -> Result<&'a str, PickleError> {
        let text = self.pickle.str(id)?;
        self.charge(id, COPIES, (size_of::<&str>() + text.len()) as u64)?;
        Ok(text)
    }

    /// Returns the text of a path of `pathlib`. Many of its parts may be one text, so each is
    /// charged.
    pub(crate) fn path_text(&mut self, path: &ObjectNode) -> Result<String, PickleError> {
        let mut parts = Vec::new();
        for &part in self.pickle.args(path) {
            parts.push(self.copy_text(part)?);
        }
        // The first part of an absolute path is `/` itself.
        Ok(parts.join("/").replacen("//", "/", 1))
    }

    /// Steps out of the node entered last.
    pub(crate) fn leave(&mut self) {
        self.depth = self
            .depth
            .checked_sub(1)
            .expect("a node is left only after it was entered");
    }
}
