//! The comparison of replicas: elements that several ranks hold must be equal on all of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{Hash as _, Hasher as _};

use fsdp_comm::ProcessGroup;
use fsdp_digest::{Digest, StateDigest, Sum};
use twox_hash::XxHash3_64;

use crate::digest::flat_with_leaves;
use crate::engine::LoadError as _;
use crate::memory::try_reserve;
use crate::transfer::BoxBytes;
use crate::traverse::leaves;
use crate::{Leaf, StateDict, StateError};

const OPERATION: &str = "check_replicas";

/// Checks that ranks which hold the same elements hold the same bits: whole tensors and plain
/// values on all ranks that have them, and shards on ranks with the same boxes, also those inside a
/// tuple. Tensors that are contiguous in host memory are not copied.
///
/// Collectives: one agreement and one object all-gather of a few bytes. If not all ranks hold the
/// same, two exchanges of 16 bytes for each value or box, and one object all-gather; one more if
/// replicas differ.
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
    // Step 1: each rank digests what it holds. If all hold the same, one number from each is
    // enough.
    let mut held = StateError::agree(group, OPERATION, None, Held::of(state))?;
    let all: Vec<[Summary; 2]> = group.all_gather_object(&held.summaries())?;
    if all.iter().all(|summaries| *summaries == all[0]) {
        return Ok(());
    }
    for part in [WHOLE, SHARDS] {
        if all.iter().all(|summaries| summaries[part] == all[0][part]) {
            held.parts[part] = StateDigest::default();
        }
    }
    // Step 2: compare each name over the ranks that hold it. Any two ranks may hold the same box,
    // so each name has a rank that compares it. All ranks learn the hashes of the names that
    // differ, and the ranks at fault.
    let found: Vec<Vec<(u64, Vec<usize>)>> = group.all_gather_object(&compare(group, &held)?)?;
    let found: HashMap<u64, Vec<usize>> = found.into_iter().flatten().collect();
    if found.is_empty() {
        return Ok(());
    }
    // Step 3: a rank knows only its own names, so each tells all others which of them differ.
    let mut named: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (name, _) in held.parts.iter().flat_map(StateDigest::iter) {
        if let Some(ranks) = found.get(&short(name)) {
            named
                .entry(key_of(name).to_owned())
                .or_default()
                .extend(ranks);
        }
    }
    let mut tensors: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
    for (name, ranks) in group.all_gather_object(&named)?.into_iter().flatten() {
        tensors.entry(name).or_default().extend(ranks);
    }
    let global = group.global_ranks();
    let of_group = |ranks: BTreeSet<usize>| {
        ranks
            .into_iter()
            .filter_map(|rank| global.get(rank).copied())
            .collect()
    };
    let tensors = tensors
        .into_iter()
        .map(|(name, ranks)| (name, of_group(ranks)))
        .collect();
    Err(StateError::ReplicasDiffer { tensors })
}

/// Compares the names of which this rank is in charge, over all ranks that hold them. Returns the
/// hashes of those that differ, each with the ranks at fault. Collectives: two exchanges.
fn compare(group: &ProcessGroup, held: &Held) -> Result<Vec<(u64, Vec<usize>)>, StateError> {
    let ranks = group.world_size();
    let mut to: Vec<Vec<u64>> = vec![Vec::new(); ranks];
    for (name, digest) in held.parts.iter().flat_map(StateDigest::iter) {
        let name = short(name);
        to[(name % ranks as u64) as usize].extend([name, short(&digest.to_string())]);
    }
    let counts: Vec<u64> = to.iter().map(|numbers| numbers.len() as u64).collect();
    let mut receive_counts = vec![0u64; ranks];
    group.all_to_all_uneven(
        &mut receive_counts,
        &vec![1; ranks],
        &counts,
        &vec![1; ranks],
    )?;
    let receive_counts: Vec<usize> = receive_counts
        .into_iter()
        .map(|count| count as usize)
        .collect();
    let send_counts: Vec<usize> = to.iter().map(Vec::len).collect();
    let length = receive_counts.iter().sum();
    let mut received = Vec::new();
    try_reserve(&mut received, length)?;
    received.resize(length, 0);
    group.all_to_all_uneven(&mut received, &receive_counts, &to.concat(), &send_counts)?;
    // The ranks that hold each name, with their digests.
    let mut holders: HashMap<u64, Vec<(usize, u64)>> = HashMap::new();
    let mut rest = received.as_slice();
    for (rank, count) in receive_counts.into_iter().enumerate() {
        let numbers;
        (numbers, rest) = rest.split_at(count);
        for &[name, digest] in numbers.as_chunks().0 {
            holders.entry(name).or_default().push((rank, digest));
        }
    }
    let differing = holders
        .into_iter()
        .map(|(name, held)| (name, differing(&held)));
    Ok(differing.filter(|(_, ranks)| !ranks.is_empty()).collect())
}

/// Returns a short hash of a name or a digest.
fn short(text: &str) -> u64 {
    XxHash3_64::oneshot(text.as_bytes())
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
            // This is a tensor, or a tuple that holds sharded tensors: each of its values is
            // compared.
            let opened: StateDict = [("", value)].into_iter().collect();
            for (inside, value) in leaves(&opened) {
                let place = inside.flat_key();
                let leaf = Leaf::of(&inside, value)?;
                if let Some(value) = value.as_plain() {
                    whole.insert(name_of(&key, &place), Digest::of_value(value));
                }
                let Some((dtype, shape)) = leaf.tensor() else {
                    continue;
                };
                let element = dtype.size_in_bytes() as usize;
                for source in BoxBytes::of(value)? {
                    let mut sum = Sum::default();
                    source.read(|bytes| sum.add_box(shape, source.bounds(), element, bytes))??;
                    let digest = sum.finish(dtype, shape);
                    if leaf.is_sharded() {
                        shards.insert(
                            name_of(&key, &format!("{place} {}", source.bounds())),
                            digest,
                        );
                    } else {
                        whole.insert(name_of(&key, &place), digest);
                    }
                }
            }
        }
        Ok(Held {
            parts: [whole, shards],
        })
    }

    /// Returns one summary for the whole values and one for the shards: hashes that are equal on
    /// ranks that hold the same.
    fn summaries(&self) -> [Summary; 2] {
        self.parts.each_ref().map(|digests| {
            let mut hasher = XxHash3_64::new();
            digests.iter().for_each(|(name, _)| name.hash(&mut hasher));
            Summary {
                layout: hasher.finish(),
                root: digests.root(),
            }
        })
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

/// Returns the ranks whose value differs from the most frequent one; all ranks, if no value is more
/// frequent than all others.
fn differing(held: &[(usize, u64)]) -> Vec<usize> {
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    held.iter()
        .for_each(|(_, digest)| *counts.entry(*digest).or_default() += 1);
    if counts.len() < 2 {
        return Vec::new();
    }
    let most = counts.values().copied().max().unwrap_or_default();
    let is_clear = counts.values().filter(|&&count| count == most).count() == 1;
    let differs = |digest: &u64| !is_clear || counts.get(digest) != Some(&most);
    held.iter()
        .filter(|(_, digest)| differs(digest))
        .map(|(rank, _)| *rank)
        .collect()
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
