//! State dicts that every rank holds, cut into local parts; and sharded ones into other boxes.

use fsdp_comm::ProcessGroup;

use crate::broadcast::select_all;
use crate::load::{LoadOptions, Origin, load};
use crate::{LoadReport, StateDict, StateError};

/// The values of a whole state dict, which every rank holds, in the structure, kinds and boxes of each rank's `local`
/// dict. torch's `_distribute_state_dict`, which however scatters the values of rank 0: here every rank takes its own,
/// and whether the ranks' values are the same is not checked.
///
/// As in [`broadcast_state_dict`](crate::broadcast_state_dict) the result is a new dict, `local` is unchanged, and
/// [`LoadOptions::strict`] decides about names that only one of the two has.
///
/// Collectives: one agreement and one status round; no tensor moves. (Sharded tensors in `full` move as in
/// [`reshard_state_dict`].)
///
/// # Errors
/// As [`broadcast_state_dict`](crate::broadcast_state_dict); also if ranks bring `full` dicts of different names,
/// dtypes or shapes.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_flat::ShardedTensor;
/// use fsdp_layout::TensorBox;
/// use fsdp_state::{LoadOptions, StateDict, distribute_state_dict};
/// fsdp_comm::run_local(2, |group| {
///     let mut full = StateDict::new();
///     full.insert("bias", Tensor::new(&[1f32, 2.], &Device::Cpu)?);
///     let mut local = StateDict::new();
///     let mine = TensorBox::new(vec![group.rank()], vec![1]);
///     local.insert("bias", ShardedTensor::zeros(DType::F32, &[2], &[mine])?);
///     let (loaded, report) = distribute_state_dict(&group, &full, &local, &LoadOptions::default())?;
///     assert!(report.is_clean());
///     let bias = loaded.get("bias").and_then(|bias| bias.as_sharded()).unwrap();
///     assert_eq!(bias.shards()[0].tensor.to_vec1::<f32>()?, [1. + group.rank() as f32]);
///     Ok::<_, fsdp_state::StateError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn distribute_state_dict(
    group: &ProcessGroup,
    full: &StateDict,
    local: &StateDict,
    options: &LoadOptions,
) -> Result<(StateDict, LoadReport), StateError> {
    load("distribute_state_dict", group, Origin::EveryRank, Some(full), local, options)
}

/// As [`distribute_state_dict`], for some keys of the outermost dict, which both dicts must have; the result has just
/// these. torch's `_distribute_tensors`, which however changes live tensors in place, one after the other: here
/// nothing is changed, and [`copy_state_dict`](crate::copy_state_dict) does that once all is well. Always strict.
///
/// Collectives: as [`distribute_state_dict`], and one agreement more.
///
/// # Errors
/// As a strict [`distribute_state_dict`]; a rank's [`StateError::MissingKey`] for a key that one of its dicts lacks.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_flat::ShardedTensor;
/// use fsdp_layout::TensorBox;
/// use fsdp_state::{LoadOptions, StateDict, distribute_tensors};
/// let parts = fsdp_comm::run_local(2, |group| {
///     let mut full = StateDict::new();
///     full.insert("bias", Tensor::arange(0f32, 3f32, &Device::Cpu)?);
///     // Uneven: two elements, then one.
///     let bounds = [TensorBox::new(vec![0], vec![2]), TensorBox::new(vec![2], vec![1])];
///     let mut local = StateDict::new();
///     local.insert("bias", ShardedTensor::zeros(DType::F32, &[3], &bounds[group.rank()..=group.rank()])?);
///     let local = distribute_tensors(&group, &full, &local, &["bias"], &LoadOptions::default())?;
///     let bias = local.get("bias").and_then(|bias| bias.as_sharded()).unwrap();
///     Ok::<_, fsdp_state::StateError>(bias.shards()[0].tensor.to_vec1::<f32>()?)
/// })?;
/// assert_eq!(*parts[1].as_ref().unwrap(), [2.]);
/// # Ok::<(), fsdp_comm::CommError>(())
/// ```
pub fn distribute_tensors(
    group: &ProcessGroup,
    full: &StateDict,
    local: &StateDict,
    keys: &[&str],
    options: &LoadOptions,
) -> Result<StateDict, StateError> {
    const OPERATION: &str = "distribute_tensors";
    let (full, local) = select_all(OPERATION, group, Some(full), local, keys)?;
    let options = LoadOptions { strict: true, ..options.clone() };
    Ok(load(OPERATION, group, Origin::EveryRank, full.as_ref(), &local, &options)?.0)
}

/// The values of a state dict that is sharded in any way, in the structure, kinds and boxes of each rank's `local`
/// dict: only overlaps move, and no rank needs memory for a tensor that it does not want whole. torch's
/// `DTensor.redistribute`, for all of a dict and between any boxes.
///
/// As in [`broadcast_state_dict`](crate::broadcast_state_dict) the result is a new dict, `local` is unchanged, and
/// [`LoadOptions::strict`] decides about names that only one of the two has. Whole tensors of `state` count as held
/// by every rank, each of which takes its own values, as it takes its own plain values.
///
/// Collectives: one agreement; if `state` has sharded tensors an object all-gather of boxes, and in path order one
/// all-to-all of overlaps for each tensor, or for several of together less than half of the largest (less than 1 MiB
/// always, at most 32 MiB); none where every rank has what it wants. A status round every 256 MiB and one at the end.
///
/// # Errors
/// As [`distribute_state_dict`]; [`StateError::NotCovered`] if wanted elements are on no rank.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_flat::{LocalShard, ShardedTensor};
/// use fsdp_layout::TensorBox;
/// use fsdp_state::{LoadOptions, StateDict, reshard_state_dict};
/// // From one row on each rank to one column on each rank.
/// let columns = fsdp_comm::run_local(2, |group| {
///     let rank = group.rank();
///     let tensor = Tensor::new(&[[[1f32, 2.]], [[3., 4.]]], &Device::Cpu)?.get(rank)?;
///     let row = LocalShard { bounds: TensorBox::new(vec![rank, 0], vec![1, 2]), tensor };
///     let mut state = StateDict::new();
///     state.insert("weight", ShardedTensor::new(DType::F32, vec![2, 2], vec![row])?);
///     let column = TensorBox::new(vec![0, rank], vec![2, 1]);
///     let mut local = StateDict::new();
///     local.insert("weight", ShardedTensor::zeros(DType::F32, &[2, 2], &[column])?);
///     let (loaded, report) = reshard_state_dict(&group, &state, &local, &LoadOptions::default())?;
///     assert!(report.is_clean());
///     let weight = loaded.get("weight").and_then(|weight| weight.as_sharded()).unwrap();
///     Ok::<_, fsdp_state::StateError>(weight.shards()[0].tensor.to_vec2::<f32>()?)
/// })?;
/// assert_eq!(*columns[1].as_ref().unwrap(), [[2.], [4.]]);
/// # Ok::<(), fsdp_comm::CommError>(())
/// ```
pub fn reshard_state_dict(
    group: &ProcessGroup,
    state: &StateDict,
    local: &StateDict,
    options: &LoadOptions,
) -> Result<(StateDict, LoadReport), StateError> {
    load("reshard_state_dict", group, Origin::EveryRank, Some(state), local, options)
}
