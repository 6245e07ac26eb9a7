//! The report of a load: the differences between a state dict and its target.

use serde::{Deserialize, Serialize};

/// The outcome of loading a model or an optimizer. Names are sorted. torch's `_IncompatibleKeys`,
/// which knows no mismatches, and tells of models only.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LoadReport {
    /// Names that the model or optimizer has and the state dict lacks.
    pub missing: Vec<String>,
    /// Names that the state dict has and nothing takes.
    pub unexpected: Vec<String>,
    /// Values of another shape, dtype or kind; nothing is loaded if there is one.
    pub mismatched: Vec<Mismatch>,
}

/// A value that does not fit.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Mismatch {
    /// The name.
    pub fqn: String,
    /// A description of the value in the state dict, e.g. `float32 [2, 3]`.
    pub saved: String,
    /// A description of the value that the target needs.
    pub current: String,
}

impl LoadReport {
    /// Returns `true` if everything fitted, name by name.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.mismatched.is_empty()
    }

    /// Returns one report with the names of both.
    #[must_use]
    pub fn merge(mut self, other: LoadReport) -> LoadReport {
        self.missing.extend(other.missing);
        self.unexpected.extend(other.unexpected);
        self.mismatched.extend(other.mismatched);
        self.sort();
        self
    }

    /// Returns the report with all names below a key.
    #[must_use]
    pub fn below(mut self, key: &str) -> LoadReport {
        let names = self.missing.iter_mut().chain(&mut self.unexpected);
        for name in names.chain(self.mismatched.iter_mut().map(|mismatch| &mut mismatch.fqn)) {
            *name = format!("{key}.{name}");
        }
        self
    }

    /// Sorts all lists, and drops what they have twice.
    pub fn sort(&mut self) {
        self.missing.sort();
        self.missing.dedup();
        self.unexpected.sort();
        self.unexpected.dedup();
        self.mismatched.sort();
        self.mismatched.dedup();
    }
}
