//! The comparison of replicas: elements that several ranks hold must be equal on all of them.

use std::collections::{BTreeMap, HashMap};
use std::hash::{Hash as _, Hasher as _};

use fsdp_comm::ProcessGroup;
use fsdp_digest::{Digest, StateDigest, Sum};
use twox_hash::XxHash3_64;

use crate::digest::flat_with_leaves;
use crate::engine::LoadError as _;
use crate::transfer::BoxBytes;
use crate::traverse::leaves;
use crate::{Leaf, StateDict, StateError};

const OPERATION: &str = "check_replicas";

/// Checks that ranks which hold the same elements hold the same bits: whole tensors and plain values on all ranks, and
/// shards on ranks with the same boxes, also those inside a tuple. Tensors that are contiguous in host memory are not
/// copied.
///
/// Collectives: one agreement and one object all-gather of a few bytes. Two more if replicas differ, or if some ranks
/// have whole tensors or values that others lack: these are compared over the ranks that have them.
///
/// # Errors
/// The same on every rank: [`StateError::ReplicasDiffer`]; any rank's own error.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_state::{StateDict, StateError, check_replicas};
/// let errors = fsdp_comm::run_local(3, |group| {
///     let weight = if group.rank() == 1 { [1f32, 2.5] } else { [1., 2.] };
///     let mut state = StateDict::new();
///     state.insert("weight", Tensor::new(&weight, &Device::Cpu)?);
///     Ok::<_, StateError>(check_replicas(&state, &group).unwrap_err().to_string())
/// })?;
/// assert_eq!(errors[0].as_ref().unwrap(), "replicas differ: `weight` on rank 1");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn check_replicas(state: &StateDict, group: &ProcessGroup) -> Result<(), StateError> {
    // Each rank digests what it holds. Usually one number from each is enough.
    let held = StateError::agree(group, OPERATION, None, Held::of(state))?;
    let all: Vec<[Summary; 2]> = group.all_gather_object(&held.summaries())?;
    let is_alike = |part: usize| classes(&all, part).values().all(|ranks| same(&all, part, ranks));
    if classes(&all, WHOLE).len() == 1 && is_alike(WHOLE) && is_alike(SHARDS) {
        return Ok(());
    }
    // Each name is compared over the ranks that hold it. The ranks send hashes of the names, which are shorter.
    let digests: Vec<HashMap<u64, u64>> = group.all_gather_object(&held.short_digests())?;
    let mut found: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (name, _) in held.parts.iter().flat_map(StateDigest::iter) {
        let hash = XxHash3_64::oneshot(name.as_bytes());
        let of_ranks = digests.iter().enumerate();
        let differing = differing(&of_ranks.filter_map(|(rank, of)| Some((rank, *of.get(&hash)?))).collect::<Vec<_>>());
        if !differing.is_empty() {
            found.entry(key_of(name).to_owned()).or_default().extend(differing);
        }
    }
    // A rank knows only its own names, so each tells all others which of them differ.
    let mut tensors: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (name, ranks) in group.all_gather_object(&found)?.into_iter().flatten() {
        tensors.entry(name).or_default().extend(ranks);
    }
    if tensors.is_empty() {
        return Ok(());
    }
    let global = group.global_ranks();
    let tensors = tensors.into_iter().map(|(name, mut ranks)| {
        ranks.sort_unstable();
        ranks.dedup();
        (name, ranks.into_iter().filter_map(|rank| global.get(rank).copied()).collect())
    });
    Err(StateError::ReplicasDiffer { tensors: tensors.collect() })
}

/// The position, among the parts of [`Held`], of whole tensors and values.
const WHOLE: usize = 0;
/// The position of boxes of sharded tensors.
const SHARDS: usize = 1;

/// The digests of what a rank holds: of whole tensors and values, and of boxes of sharded tensors.
struct Held {
    parts: [StateDigest; 2],
}

/// A summary of one part of what a rank holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Summary {
    /// A hash of the names, and of the boxes.
    layout: u64,
    root: Digest,
}

impl Held {
    /// Digests a state dict.
    fn of(state: &StateDict) -> Result<Self, StateError> {
        let (mut whole, mut shards) = (StateDigest::default(), StateDigest::default());
        for (key, value, leaf) in flat_with_leaves(state)? {
            if leaf.tensor().is_none()
                && let Some(object) = value.to_object()?
            {
                whole.insert(name_of(&key, ""), Digest::of_value(&object));
                continue;
            }
            // This is a tensor, or a tuple that holds sharded tensors: each of its values is compared.
            let opened: StateDict = [("", value)].into_iter().collect();
            for (inside, value) in leaves(&opened) {
                let place = inside.flat_key();
                let leaf = Leaf::of(&inside, value)?;
                if let Some(value) = value.as_plain() {
                    whole.insert(name_of(&key, &place), Digest::of_value(value));
                }
                let Some((dtype, shape)) = leaf.tensor() else { continue };
                let element = dtype.size_in_bytes() as usize;
                for source in BoxBytes::of(value)? {
                    let mut sum = Sum::default();
                    source.read(|bytes| sum.add_box(shape, source.bounds(), element, bytes))??;
                    let digest = sum.finish(dtype, shape);
                    if leaf.is_sharded() {
                        shards.insert(name_of(&key, &format!("{place} {}", source.bounds())), digest);
                    } else {
                        whole.insert(name_of(&key, &place), digest);
                    }
                }
            }
        }
        Ok(Held { parts: [whole, shards] })
    }

    /// Returns one summary for the whole values and one for the shards: hashes that are equal on ranks that hold the
    /// same.
    fn summaries(&self) -> [Summary; 2] {
        self.parts.each_ref().map(|digests| {
            let mut hasher = XxHash3_64::new();
            digests.iter().for_each(|(name, _)| name.hash(&mut hasher));
            Summary { layout: hasher.finish(), root: digests.root() }
        })
    }

    /// Returns a hash of each digest, by a hash of its name.
    fn short_digests(&self) -> HashMap<u64, u64> {
        let all = self.parts.iter().flat_map(StateDigest::iter);
        let short = |text: &str| XxHash3_64::oneshot(text.as_bytes());
        all.map(|(name, digest)| (short(name), short(&digest.to_string()))).collect()
    }
}

/// The character between the key and the box in a name. It sorts before all characters of keys.
const SEPARATOR: char = '\0';

/// Returns the name of a tensor inside the value of a key, from the key and the place in the value.
fn name_of(key: &str, place: &str) -> String {
    format!("{key}{SEPARATOR}{place}")
}

/// Returns the key from a name that [`name_of`] has made.
fn key_of(name: &str) -> &str {
    name.rsplit_once(SEPARATOR).map_or(name, |(key, _)| key)
}

/// Returns the ranks with the same layout, by layout.
fn classes(all: &[[Summary; 2]], part: usize) -> BTreeMap<u64, Vec<usize>> {
    let mut classes: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (rank, summaries) in all.iter().enumerate() {
        classes.entry(summaries[part].layout).or_default().push(rank);
    }
    classes
}

/// Returns `true` if these ranks hold the same values.
fn same(all: &[[Summary; 2]], part: usize, ranks: &[usize]) -> bool {
    ranks.windows(2).all(|pair| all[pair[0]][part].root == all[pair[1]][part].root)
}

/// Returns the ranks whose value differs from the most frequent one; all ranks, if no value is more frequent than all
/// others.
fn differing(held: &[(usize, u64)]) -> Vec<usize> {
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    held.iter().for_each(|(_, digest)| *counts.entry(*digest).or_default() += 1);
    if counts.len() < 2 {
        return Vec::new();
    }
    let most = counts.values().copied().max().unwrap_or_default();
    let is_clear = counts.values().filter(|&&count| count == most).count() == 1;
    let differs = |digest: &u64| !is_clear || counts.get(digest) != Some(&most);
    held.iter().filter(|(_, digest)| differs(digest)).map(|(rank, _)| *rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_minority_is_named_and_of_two_both() {
        let held = |values: &[u64]| values.iter().copied().enumerate().collect::<Vec<_>>();
        assert!(differing(&held(&[5, 5, 5])).is_empty());
        assert_eq!(differing(&held(&[5, 6, 5])), [1]);
        assert_eq!(differing(&held(&[5, 6])), [0, 1]);
        assert_eq!(differing(&held(&[5, 5, 6, 6])), [0, 1, 2, 3]);
        assert_eq!(differing(&held(&[5, 5, 6, 7])), [2, 3]);
    }
}
