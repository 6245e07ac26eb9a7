//! The budget of memory and work for what is built from an input.
//!
//! Code that builds something larger from the bytes of a file charges it here first: nodes of a
//! pickle, values, keys, copies of shared text, elements of JSON. So a small file cannot take all
//! memory, and the work grows linearly with the file.

use thiserror::Error;

use crate::limits::{BeyondLimit, MAX_DEPTH};

/// The bytes that may be built from any input, however small. Twice as much may be taken for a
/// moment, while it grows, so that 64 MiB are not exceeded.
pub(crate) const FREE_BYTES: u64 = 32 << 20;

/// The name of the depth of nested values in errors.
const NESTING: &str = "nesting";

/// Refuses a value that is nested in `depth` others, if it is too deep. The functions that walk
/// values are recursive.
pub fn check_depth(depth: usize) -> Result<(), OverBudget> {
    if depth >= MAX_DEPTH {
        return Err(OverBudget(BeyondLimit {
            what: NESTING,
            value: depth as u64 + 1,
            limit: MAX_DEPTH as u64,
        }));
    }
    Ok(())
}

/// The bytes of memory and work that are left for what is built from one input.
#[derive(Debug, Clone)]
pub(crate) struct Budget {
    left: u64,
    limit: u64,
}

/// A charge that the budget does not cover: all that was asked for so far, with this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(transparent)]
pub struct OverBudget(pub BeyondLimit);

impl OverBudget {
    /// Returns `true` if values are nested too deep, which has nothing to do with memory.
    pub(crate) fn is_of_nesting(&self) -> bool {
        self.0.what == NESTING
    }
}

impl Budget {
    /// Makes the budget of an input of `length` bytes, of which each may become `factor` bytes.
    pub(crate) fn new(length: u64, factor: u64) -> Self {
        let limit = FREE_BYTES.saturating_add(length.saturating_mul(factor));
        Budget { left: limit, limit }
    }

    /// Returns what is left of it.
    pub(crate) fn left(&self) -> u64 {
        self.left
    }

    /// Allows for so much more.
    pub(crate) fn allow(&mut self, bytes: u64) {
        self.left = self.left.saturating_add(bytes);
        self.limit = self.limit.saturating_add(bytes);
    }

    /// Takes `bytes` for `what`.
    pub(crate) fn charge(&mut self, what: &'static str, bytes: u64) -> Result<(), OverBudget> {
        match self.left.checked_sub(bytes) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => Err(OverBudget(BeyondLimit {
                what,
                value: (self.limit - self.left).saturating_add(bytes),
                limit: self.limit,
            })),
        }
    }

    /// Takes what JSON may become, whatever it is: so much for each element, besides its text.
    pub(crate) fn charge_json(
        &mut self,
        what: &'static str,
        json: &[u8],
    ) -> Result<(), OverBudget> {
        const ELEMENT_COST_BYTES: u64 = 48;
        let mut elements = 0u64;
        let mut is_text = false;
        let mut is_escaped = false;
        for &byte in json {
            match byte {
                _ if is_escaped => is_escaped = false,
                b'\\' if is_text => is_escaped = true,
                b'"' => is_text = !is_text,
                // These come before an element each, or before the value of a key.
                b',' | b':' | b'[' | b'{' if !is_text => elements += 1,
                _ => {}
            }
        }
        self.charge(
            what,
            elements
                .saturating_mul(ELEMENT_COST_BYTES)
                .saturating_add(json.len() as u64),
        )
    }
}
