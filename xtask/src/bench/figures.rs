//! The figures that benches write, and that `cargo xtask bench` puts together.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// The version of the JSON.
pub(super) const SCHEMA: u32 = 1;

/// A case of `tests/examples/bench`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) size: String,
    pub(crate) ranks: usize,
    pub(crate) place: String,
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
    pub(crate) limit: Option<Limit>,
    pub(crate) peak_bytes: Option<u64>,
    pub(crate) read_ratio: Option<f64>,
    /// The time that torch takes for the same work.
    #[serde(default)]
    pub(crate) torch_seconds: Option<f64>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Limit {
    pub(crate) name: String,
    pub(crate) seconds: f64,
    pub(crate) ratio: f64,
}

/// All figures of a run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Results {
    pub(crate) schema: u32,
    pub(crate) machine: String,
    pub(crate) cases: Vec<Case>,
    /// The figures of the smaller benches, as they write them.
    pub(crate) others: Vec<Other>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Other {
    pub(crate) name: String,
    pub(crate) figures: serde_json::Value,
}

impl Other {
    pub(super) fn new<T: Serialize>(name: &str, figures: T) -> Result<Other> {
        Ok(Other {
            name: name.to_owned(),
            figures: serde_json::to_value(figures)?,
        })
    }
}

impl Case {
    /// Returns `true` if this is the same case as an older one, measured again.
    fn replaces(&self, old: &Case) -> bool {
        let limits = [self, old].map(|case| case.limit.as_ref().map(|limit| &limit.name));
        limits[0] == limits[1]
            && (&self.name, &self.size, self.ranks, &self.place)
                == (&old.name, &old.size, old.ranks, &old.place)
    }
}

impl Results {
    /// Adds these results to those of an earlier part of the run. If both have a case, these
    /// replace it.
    pub(super) fn merge_into(self, mut earlier: Results) -> Result<Results> {
        ensure!(
            earlier.schema == SCHEMA,
            "the figures to add to have schema {}, not {SCHEMA}",
            earlier.schema
        );
        ensure!(
            earlier.machine == self.machine,
            "the figures to add to are of another machine: {}, this is {}",
            earlier.machine,
            self.machine
        );
        earlier
            .cases
            .retain(|old| !self.cases.iter().any(|new| new.replaces(old)));
        earlier
            .others
            .retain(|old| self.others.iter().all(|new| new.name != old.name));
        earlier.cases.extend(self.cases);
        earlier.others.extend(self.others);
        Ok(earlier)
    }
}
