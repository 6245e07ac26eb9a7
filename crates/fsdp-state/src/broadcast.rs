//! One rank's state dict to all ranks, each of which keeps its part.

use fsdp_comm::ProcessGroup;

use crate::load::{LoadOptions, Origin, load};
use crate::{LoadReport, StateDict, StateError};

/// The values of `root`'s whole state dict, on every rank in the structure, kinds and boxes of its `local` dict.
/// torch's `_broadcast_state_dict`.
///
/// `full` is read on `root` only. `local` dicts have the same keys, dtypes and global shapes on all ranks; a sharded
/// tensor has any boxes. The result is a new dict in the order of `local`, whose tensors share memory with nothing;
/// `local` and its tensors are unchanged ([`copy_state_dict`](crate::copy_state_dict) brings the values into them).
/// Plain values and 0-dim tensors are replaced whatever they were; other tensors must have the dtype and shape of the
/// local ones.
///
/// Every rank gets the same report, or the same error, before any tensor moves. Where [`LoadOptions::strict`] is
/// false, local values that the root lacks stay (shared with `local`), and what only the root has does not move.
///
/// Collectives: one agreement; one object all-gather with the root's names, plain values and 0-dim tensors, and all
/// ranks' boxes; in path order one broadcast for each tensor that is whole on all ranks, or one scatter of just the
/// boxes (one more for each time that what replicas want exceeds the tensor and 32 MiB); tensors of together less than
/// half of the largest share them (less than 1 MiB always, at most 32 MiB). A status round every 256 MiB and one at the
/// end. No rank but the root needs memory for a tensor that it does not want whole.
///
/// # Errors
/// The same on every rank: [`StateError::Incompatible`] for values that do not fit, and for missing and unexpected
/// names if strict; [`StateError::KeyMismatch`], [`StateError::ValueMismatch`] and [`StateError::ArgumentMismatch`]
/// for ranks that differ; any rank's own error.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_flat::ShardedTensor;
/// use fsdp_layout::TensorBox;
/// use fsdp_state::{LoadOptions, StateDict, broadcast_state_dict};
///
/// let rows = fsdp_comm::run_local(2, |group| {
///     let mut full = StateDict::new();
///     if group.rank() == 0 {
///         full.insert("weight", Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?);
///     }
///     let row = TensorBox::new(vec![group.rank(), 0], vec![1, 2]);
///     let mut local = StateDict::new();
///     local.insert("weight", ShardedTensor::zeros(DType::F32, &[2, 2], &[row])?);
///     let (loaded, report) = broadcast_state_dict(&group, Some(&full), &local, 0, &LoadOptions::default())?;
///     assert!(report.is_clean());
///     let weight = loaded.get("weight").and_then(|weight| weight.as_sharded()).unwrap();
///     Ok::<_, fsdp_state::StateError>(weight.shards()[0].tensor.to_vec2::<f32>()?)
/// })?;
/// assert_eq!(*rows[1].as_ref().unwrap(), [[3., 4.]]);
/// # Ok::<(), fsdp_comm::CommError>(())
/// ```
pub fn broadcast_state_dict(
    group: &ProcessGroup,
    full: Option<&StateDict>,
    local: &StateDict,
    root: usize,
    options: &LoadOptions,
) -> Result<(StateDict, LoadReport), StateError> {
    load("broadcast_state_dict", group, Origin::Root(root), full, local, options)
}

/// As [`broadcast_state_dict`], for some keys of the outermost dict, which both dicts must have; the result has just
/// these. torch's `_broadcast_tensors`. Always strict. Every rank names the same keys, in any order.
///
/// Collectives: as [`broadcast_state_dict`], and one agreement more.
///
/// # Errors
/// As a strict [`broadcast_state_dict`]; a rank's [`StateError::MissingKey`] for a key that one of its dicts lacks.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_flat::ShardedTensor;
/// use fsdp_layout::TensorBox;
/// use fsdp_state::{LoadOptions, StateDict, broadcast_tensors};
/// let parts = fsdp_comm::run_local(2, |group| {
///     let mut full = StateDict::new();
///     if group.rank() == 0 {
///         full.insert("bias", Tensor::new(&[1f32, 2.], &Device::Cpu)?);
///         full.insert("not asked for", Tensor::zeros(9, DType::F32, &Device::Cpu)?);
///     }
///     let mut local = StateDict::new();
///     let mine = TensorBox::new(vec![group.rank()], vec![1]);
///     local.insert("bias", ShardedTensor::zeros(DType::F32, &[2], &[mine])?);
///     let loaded = broadcast_tensors(&group, Some(&full), &local, &["bias"], 0, &LoadOptions::default())?;
///     let bias = loaded.get("bias").and_then(|bias| bias.as_sharded()).unwrap();
///     Ok::<_, fsdp_state::StateError>(bias.shards()[0].tensor.to_vec1::<f32>()?)
/// })?;
/// assert_eq!(*parts[1].as_ref().unwrap(), [2.]);
/// # Ok::<(), fsdp_comm::CommError>(())
/// ```
pub fn broadcast_tensors(
    group: &ProcessGroup,
    full: Option<&StateDict>,
    local: &StateDict,
    keys: &[&str],
    root: usize,
    options: &LoadOptions,
) -> Result<StateDict, StateError> {
    const OPERATION: &str = "broadcast_tensors";
    let full = full.filter(|_| group.rank() == root);
    let (full, local) = select_all(OPERATION, group, full, local, keys)?;
    let options = LoadOptions { strict: true, ..options.clone() };
    Ok(load(OPERATION, group, Origin::Root(root), full.as_ref(), &local, &options)?.0)
}

/// The values of some keys of both dicts; a missing one is an error on all ranks.
pub(crate) fn select_all(
    operation: &'static str,
    group: &ProcessGroup,
    full: Option<&StateDict>,
    local: &StateDict,
    keys: &[&str],
) -> Result<(Option<StateDict>, StateDict), StateError> {
    let full = full.map(|full| select(operation, full, keys, "the full state dict")).transpose();
    let local = select(operation, local, keys, "the local state dict");
    let selected = full.and_then(|full| Ok((full, local?)));
    Ok(group.agree(operation, selected)?)
}

fn select(
    operation: &'static str,
    state: &StateDict,
    keys: &[&str],
    holder: &'static str,
) -> Result<StateDict, StateError> {
    keys.iter()
        .map(|&key| match state.get(key) {
            Some(value) => Ok((key, value.clone())),
            None => Err(StateError::MissingKey { operation, key: key.to_owned(), holder }),
        })
        .collect()
}
