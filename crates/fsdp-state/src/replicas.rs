//! The comparison of replicas: elements that several ranks hold must be equal on all of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{Hash as _, Hasher as _};

use fsdp_comm::ProcessGroup;
use fsdp_digest::{Digest, StateDigest, Sum};
use twox_hash::XxHash3_64;

use crate::digest::{FlatValue, flat_values};
use crate::engine::LoadError as _;
use crate::error::{StateError, WrongTensor};
use crate::memory::try_reserve;
use crate::schema::Leaf;
use crate::state_dict::StateDict;
use crate::transfer::BoxBytes;
use crate::traverse::leaves;

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
    let mut digests = StateError::agree(group, OPERATION, None, compute_digests(state))?;
    let summaries = digests.each_ref().map(DigestSummary::new);
    let rank_summaries: Vec<[DigestSummary; 2]> = group.all_gather_object(&summaries)?;
    if rank_summaries
        .iter()
        .all(|summaries| *summaries == rank_summaries[0])
    {
        return Ok(());
    }
    for index in [WHOLE_INDEX, SHARDS_INDEX] {
        if rank_summaries
            .iter()
            .all(|summaries| summaries[index] == rank_summaries[0][index])
        {
            digests[index] = StateDigest::default();
        }
    }
    // Step 2: compare each name over the ranks that hold it. Any two ranks may hold the same box,
    // so each name has a rank that compares it. All ranks learn the hashes of the names that
    // differ, and the ranks at fault.
    let faults_of_ranks = group.all_gather_object(&compare(group, &digests)?)?;
    let faulty_ranks: HashMap<u64, Vec<usize>> = faults_of_ranks.into_iter().flatten().collect();
    if faulty_ranks.is_empty() {
        return Ok(());
    }
    // Step 3: a rank knows only its own names, so each tells all others which of them differ.
    let mut own_differences: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
    for (name, _) in digests.iter().flat_map(StateDigest::iter) {
        if let Some(ranks) = faulty_ranks.get(&short_hash(name)) {
            let key = key_of(name).to_owned();
            own_differences.entry(key).or_default().extend(ranks);
        }
    }
    let mut tensors: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
    for (key, ranks) in group
        .all_gather_object(&own_differences)?
        .into_iter()
        .flatten()
    {
        tensors.entry(key).or_default().extend(ranks);
    }
    Err(StateError::ReplicasDiffer {
        tensors: tensors
            .into_iter()
            .map(|(fqn, ranks)| WrongTensor {
                fqn,
                ranks: ranks.into_iter().collect(),
            })
            .collect(),
    })
}

/// Compares the names of which this rank is in charge, over all ranks that hold them. Returns the
/// hashes of those that differ, each with the global ranks at fault. Collectives: two exchanges.
fn compare(
    group: &ProcessGroup,
    digests: &[StateDigest; 2],
) -> Result<Vec<(u64, Vec<usize>)>, StateError> {
    let rank_count = group.world_size();
    // The hash of a name says which rank is in charge of it, so that all have about as much to do.
    let mut send: Vec<Vec<u64>> = vec![Vec::new(); rank_count];
    for (name, digest) in digests.iter().flat_map(StateDigest::iter) {
        let name_hash = short_hash(name);
        send[(name_hash % rank_count as u64) as usize]
            .extend([name_hash, short_hash(&digest.to_string())]);
    }
    // The ranks tell each other how many numbers they send, and then send them.
    let send_counts: Vec<usize> = send.iter().map(Vec::len).collect();
    let lengths: Vec<u64> = send_counts.iter().map(|&count| count as u64).collect();
    let mut lengths_received = vec![0u64; rank_count];
    let ones = vec![1; rank_count];
    group.all_to_all_uneven(&mut lengths_received, &ones, &lengths, &ones)?;
    let receive_counts: Vec<usize> = lengths_received
        .iter()
        .map(|&count| count as usize)
        .collect();
    let mut received = Vec::new();
    let length = receive_counts.iter().sum();
    if let Err(error) = try_reserve(&mut received, length) {
        // The others are about to send. From now on every call returns the error of the abort.
        group.abort(error.to_string());
        group.barrier()?;
        return Err(error);
    }
    received.resize(length, 0);
    group.all_to_all_uneven(&mut received, &receive_counts, &send.concat(), &send_counts)?;
    // The ranks that hold each name, with their digests.
    let mut holders: HashMap<u64, Vec<(usize, u64)>> = HashMap::new();
    let mut remaining = received.as_slice();
    for (rank, count) in receive_counts.into_iter().enumerate() {
        let (numbers, later_numbers) = remaining.split_at(count);
        for &[name_hash, digest] in numbers.as_chunks().0 {
            let rank = group.global_ranks()[rank];
            holders.entry(name_hash).or_default().push((rank, digest));
        }
        remaining = later_numbers;
    }
    Ok(holders
        .into_iter()
        .map(|(name_hash, rank_digests)| (name_hash, differing_ranks(&rank_digests)))
        .filter(|(_, ranks)| !ranks.is_empty())
        .collect())
}

/// Returns a short hash of a name or a digest.
fn short_hash(text: &str) -> u64 {
    XxHash3_64::oneshot(text.as_bytes())
}

/// The position, among the digests of what a rank holds, of those of whole tensors and values.
const WHOLE_INDEX: usize = 0;
/// The position of those of boxes of sharded tensors.
const SHARDS_INDEX: usize = 1;

/// A summary of digests, which is equal on ranks that hold the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct DigestSummary {
    /// A hash of the names, and of the boxes.
    layout_hash: u64,
    root: Digest,
}

impl DigestSummary {
    /// Returns the summary of these digests.
    fn new(digests: &StateDigest) -> Self {
        let mut hasher = XxHash3_64::new();
        digests.iter().for_each(|(name, _)| name.hash(&mut hasher));
        DigestSummary {
            layout_hash: hasher.finish(),
            root: digests.root(),
        }
    }
}

/// Digests what a rank holds: whole tensors and values, and boxes of sharded tensors.
fn compute_digests(state: &StateDict) -> Result<[StateDigest; 2], StateError> {
    let mut digests = [StateDigest::default(), StateDigest::default()];
    for FlatValue { key, value, leaf } in flat_values(state)? {
        if leaf.tensor().is_none()
            && let Some(object) = value.to_object()?
        {
            digests[WHOLE_INDEX].insert(name_of(&key, ""), Digest::of_value(&object));
            continue;
        }
        // This is a tensor, or a tuple that holds sharded tensors: each of its values is compared.
        let container = StateDict::from_iter([("", value)]);
        for (inner_path, value) in leaves(&container) {
            let place = inner_path.flat_key();
            if let Some(value) = value.as_plain() {
                digests[WHOLE_INDEX].insert(name_of(&key, &place), Digest::of_value(value));
            }
            let leaf = Leaf::from_value(&inner_path, value)?;
            let Some((dtype, shape)) = leaf.tensor() else {
                continue;
            };
            let element_bytes = dtype.size_in_bytes() as usize;
            for source in BoxBytes::from_value(value)? {
                let bounds = source.bounds();
                let mut sum = Sum::default();
                source.read(|bytes| sum.add_box(shape, bounds, element_bytes, bytes))??;
                let digest = sum.finish(dtype, shape);
                if leaf.is_sharded() {
                    digests[SHARDS_INDEX]
                        .insert(name_of(&key, &format!("{place} {bounds}")), digest);
                } else {
                    digests[WHOLE_INDEX].insert(name_of(&key, &place), digest);
                }
            }
        }
    }
    Ok(digests)
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
fn differing_ranks(rank_digests: &[(usize, u64)]) -> Vec<usize> {
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    for (_, digest) in rank_digests {
        *counts.entry(*digest).or_default() += 1;
    }
    if counts.len() < 2 {
        return Vec::new();
    }
    let majority = counts.values().max().expect("two values were counted");
    let most_frequent: Vec<u64> = counts
        .iter()
        .filter(|(_, count)| *count == majority)
        .map(|(digest, _)| *digest)
        .collect();
    // If several values are equally frequent, nobody knows which of them is right.
    rank_digests
        .iter()
        .filter(|(_, digest)| most_frequent != [*digest])
        .map(|(rank, _)| *rank)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_minority_is_named_and_of_two_both() {
        let held = |values: &[u64]| values.iter().copied().enumerate().collect::<Vec<_>>();
        assert!(differing_ranks(&held(&[5, 5, 5])).is_empty());
        assert_eq!(differing_ranks(&held(&[5, 6, 5])), [1]);
        assert_eq!(differing_ranks(&held(&[5, 6])), [0, 1]);
        assert_eq!(differing_ranks(&held(&[5, 5, 6, 6])), [0, 1, 2, 3]);
        assert_eq!(differing_ranks(&held(&[5, 5, 6, 7])), [2, 3]);
    }
}
