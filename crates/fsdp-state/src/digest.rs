//! The digest of a state dict that is spread over ranks.

use std::hash::{Hash as _, Hasher as _};

use fsdp_comm::ProcessGroup;
use fsdp_digest::{Digest, Part, StateDigest, Sum};
use fsdp_flat::ShardedTensor;
use fsdp_flat::storage::zeroed_vec;
use fsdp_layout::{KeyPath, PathPart, TensorBox};
use twox_hash::XxHash3_64;

use crate::engine::LoadError as _;
use crate::transfer::{BoxBytes, Layout, PerRank, read_box};
use crate::{Leaf, StateDict, StateError, StateValue, flatten_state_dict};

/// Returns the digests of a state dict, by its flat keys: those that a checkpoint of it has,
/// whatever its format and the number of ranks (`fsdp digest`). The same on every rank.
///
/// Every rank passes a dict of the same names. An element of a sharded tensor that several ranks
/// have counts once, with the value of the first of them. A whole tensor or a plain value counts
/// with the value of rank 0. Tensors that are contiguous in host memory are not copied.
///
/// Collectives: two agreements, and two object all-gathers, of boxes and of sums.
///
/// # Errors
/// The same on every rank: ranks that pass different names, kinds, dtypes or shapes; elements that
/// no rank has; any rank's own error.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_flat::{LocalShard, ShardedTensor};
/// use fsdp_layout::TensorBox;
/// use fsdp_state::{StateDict, StateError, digest_state_dict};
/// let digests = |ranks: usize| -> Result<String, Box<dyn std::error::Error>> {
///     let digests = fsdp_comm::run_local(ranks, |group| {
///         let (rank, rows) = (group.rank(), 4 / ranks);
///         let whole = Tensor::arange(0f32, 8., &Device::Cpu)?.reshape((4, 2))?;
///         let bounds = TensorBox::new(vec![rank * rows, 0], vec![rows, 2]);
///         let shards = vec![LocalShard { bounds, tensor: whole.narrow(0, rank * rows, rows)? }];
///         let mut state = StateDict::new();
///         state.insert("weight", ShardedTensor::new(DType::F32, vec![4, 2], shards)?);
///         Ok::<_, StateError>(digest_state_dict(&state, &group)?.root().to_string())
///     })?;
///     Ok(digests.into_iter().collect::<Result<Vec<_>, _>>()?.swap_remove(0))
/// };
/// assert_eq!(digests(1)?, digests(4)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn digest_state_dict(
    state: &StateDict,
    group: &ProcessGroup,
) -> Result<StateDigest, StateError> {
    const OPERATION: &str = "digest_state_dict";
    // Ranks agree on what there is before they compare the parts that each has.
    let flat = flat_with_leaves(state);
    // A rank with an error sends any hash, because errors are looked at before hashes.
    let hash = flat.as_ref().map_or(0, |flat| {
        let mut hasher = XxHash3_64::new();
        flat.iter()
            .for_each(|(key, _, leaf)| (key, leaf).hash(&mut hasher));
        hasher.finish()
    });
    let flat = StateError::agree(group, OPERATION, Some(hash), flat)?;
    // The ranks exchange their boxes of sharded tensors, so that an element on several ranks is
    // counted by one of them.
    let sharded = flat.iter().map(|(_, value, _)| value.as_sharded());
    let mine: Vec<Vec<TensorBox>> = sharded
        .map(|tensor| tensor.map_or_else(Vec::new, ShardedTensor::boxes))
        .collect();
    let boxes: Vec<Vec<Vec<TensorBox>>> = group.all_gather_object(&mine)?;
    let parts = StateError::agree(
        group,
        OPERATION,
        None,
        parts_of(group, OPERATION, &flat, boxes),
    )?;
    // The parts of all ranks add up.
    let all: Vec<Vec<Part>> = group.all_gather_object(&parts)?;
    let mut digests = StateDigest::default();
    for (index, (key, _, leaf)) in flat.iter().enumerate() {
        let mut whole = Part::default();
        all.iter()
            .filter_map(|parts| parts.get(index))
            .for_each(|part| whole.add(*part));
        match (leaf.tensor(), whole) {
            (Some((dtype, shape)), whole) => {
                _ = digests.insert(key.as_str(), whole.finish(dtype, shape))
            }
            (None, Part::Value(digest)) => _ = digests.insert(key.as_str(), digest),
            // A plain value always comes from rank 0.
            (None, Part::Elements(_)) => {}
        }
    }
    Ok(digests)
}

/// Returns a state dict's values by their flat keys, sorted, each with its description.
pub(crate) fn flat_with_leaves(
    state: &StateDict,
) -> Result<Vec<(String, StateValue, Leaf)>, StateError> {
    let mut flat = Vec::new();
    for (key, value) in flatten_state_dict(state)?.values {
        let leaf = Leaf::of(&KeyPath(vec![PathPart::Key(key.clone())]), &value)?;
        flat.push((key, value, leaf));
    }
    flat.sort_by(|(a, ..), (b, ..)| a.cmp(b));
    Ok(flat)
}

/// Returns this rank's part in the digest of each value. `boxes` has each rank's boxes of each
/// value.
fn parts_of(
    group: &ProcessGroup,
    operation: &'static str,
    flat: &[(String, StateValue, Leaf)],
    mut boxes: Vec<Vec<Vec<TensorBox>>>,
) -> Result<Vec<Part>, StateError> {
    let mut parts = Vec::with_capacity(flat.len());
    for (index, (key, value, leaf)) in flat.iter().enumerate() {
        let mut have = Vec::with_capacity(boxes.len());
        for of_rank in &mut boxes {
            have.push(
                of_rank
                    .get_mut(index)
                    .map(std::mem::take)
                    .unwrap_or_default(),
            );
        }
        parts.push(part_of(
            group,
            operation,
            key,
            value,
            leaf,
            PerRank::all(have),
        )?);
    }
    Ok(parts)
}

/// Returns this rank's part in the digest of a value. `have` has the boxes of all ranks, if the
/// value is sharded.
fn part_of(
    group: &ProcessGroup,
    operation: &'static str,
    key: &str,
    value: &StateValue,
    leaf: &Leaf,
    have: PerRank,
) -> Result<Part, StateError> {
    let mut sum = Sum::default();
    let Some((dtype, shape)) = leaf.tensor() else {
        // Every rank has the value. Rank 0 counts it; the others only check that it can be counted.
        let object = value
            .to_object()?
            .ok_or_else(|| StateError::ShardedInTuple {
                key: key.to_owned(),
            })?;
        return Ok(if group.rank() == 0 {
            Part::Value(Digest::of_value(&object))
        } else {
            Part::Elements(sum)
        });
    };
    let element = dtype.size_in_bytes() as usize;
    if !leaf.is_sharded() {
        // Every rank has the whole tensor. Rank 0 counts it.
        if group.rank() == 0 {
            for source in BoxBytes::of(value)? {
                source.read(|bytes| sum.add_bytes(0, bytes))?;
            }
        }
        return Ok(Part::Elements(sum));
    }
    let whole = TensorBox::whole(shape);
    let layout = Layout {
        shape: shape.to_vec(),
        element,
        have,
        want: PerRank::all(vec![vec![whole.clone()]]),
    };
    if let Some((_, missing)) = layout.hole() {
        let (key, shape, rank) = (key.to_owned(), shape.to_vec(), 0);
        return Err(StateError::NotCovered {
            operation,
            key,
            shape,
            rank,
            missing,
        });
    }
    let sources = BoxBytes::of(value)?;
    for piece in layout
        .pieces_of_whole()
        .into_iter()
        .filter(|piece| piece.source == group.rank())
    {
        if let Some(source) = sources
            .iter()
            .find(|source| source.bounds() == &piece.bounds)
        {
            source.read(|bytes| sum.add_box(shape, &piece.bounds, element, bytes))??;
            continue;
        }
        // This rank counts only a part of its box, because ranks before it have the rest.
        let mut bytes = zeroed_vec(piece.bounds.numel() * element)?;
        read_box(&sources, &piece.bounds, &piece.bounds, element, &mut bytes)?;
        sum.add_box(shape, &piece.bounds, element, &bytes)?;
    }
    Ok(Part::Elements(sum))
}
