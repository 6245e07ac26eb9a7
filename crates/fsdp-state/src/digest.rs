//! The digest of a state dict that is spread over ranks.

use std::hash::{Hash as _, Hasher as _};

use fsdp_comm::ProcessGroup;
use fsdp_digest::{Digest, StateDigest, Sum};
use fsdp_flat::ShardedTensor;
use fsdp_flat::storage::zeroed_vec;
use fsdp_layout::{KeyPath, TensorBox};
use twox_hash::XxHash3_64;

use crate::engine::LoadError as _;
use crate::error::StateError;
use crate::flatten::flatten_state_dict;
use crate::schema::Leaf;
use crate::state_dict::{StateDict, StateValue};
use crate::transfer::{
    BoxBytes, BoxesPerRank, Layout, Piece, group_by_value, incomplete_error, read_box,
};

const OPERATION: &str = "digest_state_dict";

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
    // Ranks agree on what there is before they compare the parts that each has. A rank with an
    // error sends any hash, because errors are looked at before hashes.
    let mut hasher = XxHash3_64::new();
    let flattened = flat_values(state);
    for FlatValue { key, leaf, .. } in flattened.iter().flatten() {
        (key, leaf).hash(&mut hasher);
    }
    let flat = StateError::agree(group, OPERATION, Some(hasher.finish()), flattened)?;
    // The ranks exchange their boxes of sharded tensors, so that an element on several ranks is
    // counted by one of them.
    let mut own_boxes: Vec<Vec<TensorBox>> = Vec::with_capacity(flat.len());
    for FlatValue { value, .. } in &flat {
        let tensor = value.as_sharded();
        own_boxes.push(tensor.map_or_else(Vec::new, ShardedTensor::boxes));
    }
    let boxes = group_by_value(group.all_gather_object(&own_boxes)?, flat.len())?;
    let counted = flat
        .iter()
        .zip(boxes)
        .map(|(value, boxes)| sum_of_own_part(value, boxes, group))
        .collect();
    let parts: Vec<Sum> = StateError::agree(group, OPERATION, None, counted)?;
    // The parts of all ranks add up.
    let parts_of_values = group_by_value(group.all_gather_object(&parts)?, flat.len())?;
    let mut digests = StateDigest::default();
    for (FlatValue { key, leaf, .. }, parts) in flat.iter().zip(parts_of_values) {
        let mut whole = Sum::default();
        parts.into_iter().for_each(|part| whole.add(part));
        let digest = match leaf.tensor() {
            Some((dtype, shape)) => whole.finish(dtype, shape),
            // Rank 0 counts every plain value.
            None => whole.value().ok_or_else(|| incomplete_error(0))?,
        };
        digests.insert(key.as_str(), digest);
    }
    Ok(digests)
}

/// A value of a state dict that has a flat key of its own.
pub(crate) struct FlatValue {
    pub(crate) key: String,
    pub(crate) value: StateValue,
    pub(crate) leaf: Leaf,
}

/// Returns a state dict's values, sorted by their flat keys.
pub(crate) fn flat_values(state: &StateDict) -> Result<Vec<FlatValue>, StateError> {
    let mut flat = Vec::new();
    for (key, value) in flatten_state_dict(state)?.values {
        let leaf = Leaf::from_value(&KeyPath::from_key(&key), &value)?;
        flat.push(FlatValue { key, value, leaf });
    }
    flat.sort_by(|value, other| value.key.cmp(&other.key));
    Ok(flat)
}

/// Returns this rank's part in the digest of a value. `boxes` has the boxes of each rank, if the
/// value is sharded.
///
/// # Errors
/// Elements that no rank has; a sharded tensor inside a tuple; a tensor that cannot be read.
fn sum_of_own_part(
    FlatValue { key, value, leaf }: &FlatValue,
    boxes: Vec<Vec<TensorBox>>,
    group: &ProcessGroup,
) -> Result<Sum, StateError> {
    let mut sum = Sum::default();
    let Some((dtype, shape)) = leaf.tensor() else {
        // Every rank has the value. Rank 0 counts it; the others only check that it can be counted.
        let object = value
            .to_object()?
            .ok_or_else(|| StateError::ShardedInTuple {
                key: key.to_owned(),
            })?;
        return Ok(if group.rank() == 0 {
            Sum::of_value(Digest::of_value(&object))
        } else {
            sum
        });
    };
    let element_bytes = dtype.size_in_bytes() as usize;
    if !leaf.is_sharded() {
        // Every rank has the whole tensor. Rank 0 counts it.
        if group.rank() == 0 {
            for source in BoxBytes::from_value(value)? {
                source.read(|bytes| sum.add_bytes(0, bytes))?;
            }
        }
        return Ok(sum);
    }
    let layout = Layout {
        shape: shape.to_vec(),
        element_bytes,
        held_boxes: BoxesPerRank::from_lists(boxes),
        wanted_boxes: BoxesPerRank::from_lists(vec![vec![TensorBox::whole(shape)]]),
    };
    layout.check_covered(group, OPERATION, key)?;
    let sources = BoxBytes::from_value(value)?;
    for Piece { source, bounds, .. } in layout.pieces_of_whole() {
        if source != group.rank() {
            continue;
        }
        // As a rule a piece is a whole box of this rank, whose bytes are there already.
        if let Some(held) = sources.iter().find(|source| *source.bounds() == bounds) {
            held.read(|bytes| sum.add_box(shape, &bounds, element_bytes, bytes))??;
            continue;
        }
        // This rank counts only a part of its box, because ranks before it have the rest.
        let mut bytes = zeroed_vec(bounds.numel() * element_bytes)?;
        read_box(&sources, &bounds, &bounds, element_bytes, &mut bytes)?;
        sum.add_box(shape, &bounds, element_bytes, &bytes)?;
    }
    Ok(sum)
}
