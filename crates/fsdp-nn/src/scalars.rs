//! Small values that all ranks must bring alike to a load: compared by a hash, and told only where they differ.

use std::collections::BTreeMap;

use fsdp_comm::ProcessGroup;
use fsdp_layout::PlainValue;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::fsdp_state::OptimStateError;

/// The scalars of an optimizer's state, and the hyperparameters of each parameter, as one rank is about to load them.
/// Each rank takes its own, so they have to be the same.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Scalars(BTreeMap<(String, String), PlainValue>);

impl Scalars {
    /// One value, by parameter and state entry.
    pub(crate) fn insert(&mut self, fqn: &str, name: &str, value: PlainValue) {
        self.0.insert((fqn.to_owned(), name.to_owned()), value);
    }

    /// A group's hyperparameters, under each of its parameters: groups may come in another order on each rank.
    pub(crate) fn insert_group<'a>(&mut self, fqns: &[String], entries: impl Iterator<Item = (&'a str, PlainValue)>) {
        for (key, value) in entries {
            let name = format!("param_groups.{key}");
            fqns.iter().for_each(|fqn| self.insert(fqn, &name, value.clone()));
        }
    }

    /// The values of both, which are of different optimizers.
    #[must_use]
    pub fn merge(mut self, other: Scalars) -> Self {
        self.0.extend(other.0);
        self
    }

    /// The same on ranks whose values are the same, bit for bit.
    #[must_use]
    pub fn hash(&self) -> u64 {
        twox_hash::XxHash3_64::oneshot(format!("{self:?}").as_bytes())
    }

    /// Where ranks differ. Collective, for ranks that know that their hashes differ: one object all-gather.
    ///
    /// # Errors
    /// [`OptimStateError::DifferingOnRanks`], the same on every rank: the first value that is not the same on rank 0 of
    /// the group and another.
    pub fn compare(&self, group: &ProcessGroup) -> Result<()> {
        let all: Vec<Scalars> = group.all_gather_object(self)?;
        let Some((first, others)) = all.split_first() else { return Ok(()) };
        let ranks = group.global_ranks();
        for (other, &rank) in others.iter().zip(ranks.iter().skip(1)) {
            for ((fqn, name), _) in first.0.iter().chain(&other.0) {
                let key = (fqn.clone(), name.clone());
                let (expected, found) = (first.0.get(&key), other.0.get(&key));
                let same = expected.zip(found).is_some_and(|(expected, found)| expected.same_bits(found));
                if !same {
                    let describe = |value: Option<&PlainValue>| value.map_or("none".to_owned(), |v| format!("{v:?}"));
                    return Err(OptimStateError::DifferingOnRanks {
                        fqns: vec![key.0],
                        name: key.1,
                        rank,
                        found: describe(found),
                        reference: ranks.first().copied().unwrap_or_default(),
                        expected: describe(expected),
                    }
                    .into());
                }
            }
        }
        Ok(())
    }
}
