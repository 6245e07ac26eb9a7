//! The digests of a state dict, by name.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use crate::sum::Digest;

/// The digests of all tensors and values of a state dict or a checkpoint, by their flat keys.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StateDigest(BTreeMap<String, Digest>);

impl StateDigest {
    /// Sets the digest of a name, and returns the one that it had.
    pub fn insert(&mut self, name: impl Into<String>, digest: Digest) -> Option<Digest> {
        self.0.insert(name.into(), digest)
    }

    /// Returns the digest of a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Digest> {
        self.0.get(name).copied()
    }

    /// Returns all names and their digests, in the order of the names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Digest)> {
        self.0.iter().map(|(name, digest)| (name.as_str(), *digest))
    }

    /// Returns the number of names.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns `true` if there are no names.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the digest of all names and their digests.
    #[must_use]
    pub fn root(&self) -> Digest {
        let mut hashed = b"fsdp-digest-1-state\0".to_vec();
        for (name, digest) in &self.0 {
            // The length tells where a name ends and its digest begins.
            hashed.extend((name.len() as u64).to_le_bytes());
            hashed.extend(name.as_bytes());
            hashed.extend(digest.0.to_le_bytes());
        }
        Digest(XxHash3_128::oneshot(&hashed))
    }

    /// Returns the names whose digests differ from another's, or that only one of the two has, in
    /// order.
    #[must_use]
    pub fn differing(&self, other: &StateDigest) -> Vec<String> {
        // A set, so that a name that both have is listed once, and they are in order.
        let names: BTreeSet<&String> = self.0.keys().chain(other.0.keys()).collect();
        names
            .into_iter()
            .filter(|name| self.get(name) != other.get(name))
            .cloned()
            .collect()
    }
}

impl FromIterator<(String, Digest)> for StateDigest {
    fn from_iter<I: IntoIterator<Item = (String, Digest)>>(digests: I) -> Self {
        StateDigest(digests.into_iter().collect())
    }
}
