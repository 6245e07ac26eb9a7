//! The collectives on state dicts: gather, broadcast, distribute, reshard. Each is a source and a
//! target.

use candle_core::{Device, Tensor};
use fsdp_comm::ProcessGroup;
use fsdp_flat::{FlatError, LocalShard, ShardedTensor, storage};
use fsdp_layout::{KeyPath, TensorBox};
use indexmap::IndexMap;

use crate::engine::{
    BoxesOn, DictSource, DictTarget, LoadError as _, LoadOptions, Whole, load_state,
};
use crate::keep_on::KeepOn;
use crate::memory::device_of_sharded;
use crate::{
    IterateOptions, Keep, LoadReport, StateDict, StateError, StateValue, get_element_mut,
    iterate_state_dict,
};

/// Options of [`gather_state_dict`].
#[derive(Debug, Clone, Default)]
pub struct GatherOptions {
    /// The ranks that get the tensors: torch's `ranks_only`.
    pub keep_on: KeepOn,
    /// The device of the results; `None` leaves each tensor where this rank's part of it is (the
    /// CPU if it has none). May differ between ranks. torch's `cpu_offload` is `Some(Device::Cpu)`.
    pub device: Option<Device>,
}

/// Returns all tensors of a state dict, whole, on the ranks that keep them; an empty dict on all
/// others. torch's `_gather_state_dict`.
///
/// Every rank passes a dict of the same keys, kinds, dtypes and global shapes, in any order; a rank
/// without elements brings a [`ShardedTensor`] without boxes. Elements may be on several ranks
/// (HybridShard). The result has the order of this rank's dict, and its tensors share memory with
/// nothing; plain values and whole tensors are this rank's own.
///
/// Collectives: two agreements. If there are sharded tensors, also an object all-gather of boxes
/// and then, in path order, one all-gather for each tensor, or one gather to each rank that keeps
/// it. A tensor of which every keeping rank has all boxes needs none. Small tensors share a call,
/// up to half the size of the largest tensor (but at least 1 MiB, and at most 32 MiB). After every
/// 256 MiB there is one more agreement. A rank that keeps nothing needs memory for its own part of
/// one tensor at most.
///
/// # Errors
/// The same on every rank: [`StateError::KeyMismatch`], [`StateError::ValueMismatch`],
/// [`StateError::ArgumentMismatch`]; [`StateError::NotCovered`] if elements are on no rank; any
/// rank's own error.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_flat::ShardedTensor;
/// use fsdp_layout::TensorBox;
/// use fsdp_state::{GatherOptions, StateDict, gather_state_dict};
/// let gathered = fsdp_comm::run_local(2, |group| {
///     // Each rank has one row.
///     let row = Tensor::full(group.rank() as f32, 3, &Device::Cpu).unwrap();
///     let bounds = TensorBox::new(vec![group.rank(), 0], vec![1, 3]);
///     let mut state = StateDict::new();
///     state.insert("weight", ShardedTensor::from_flat(&[2, 3], vec![bounds], &row).unwrap());
///     gather_state_dict(&state, &group, &GatherOptions::default()).unwrap()
/// })?;
/// let weight = gathered[1].get("weight").unwrap().as_tensor().unwrap();
/// assert_eq!(weight.to_vec2::<f32>()?, [[0.0; 3], [1.0; 3]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn gather_state_dict(
    state: &StateDict,
    group: &ProcessGroup,
    options: &GatherOptions,
) -> Result<StateDict, StateError> {
    let mut values: IndexMap<KeyPath, StateValue> = IndexMap::new();
    let mut collect = |path: &KeyPath, value: StateValue| {
        values.insert(path.clone(), value);
        Ok(())
    };
    gather(
        "gather_state_dict",
        state,
        group,
        options,
        None,
        &mut collect,
    )?;
    // The structure is this rank's own, with the gathered values in their places.
    let structure = IterateOptions {
        keep_on: options.keep_on.clone(),
        rank: group.rank(),
        ..IterateOptions::default()
    };
    let mut gathered = iterate_state_dict(state, &mut Keep, &structure)?;
    for (path, value) in values {
        if let Some(slot) = get_element_mut(&mut gathered, &path) {
            *slot = value;
        }
    }
    Ok(gathered)
}

/// Gathers like [`gather_state_dict`], but passes each value to `sink` as soon as it is whole. So a
/// rank that writes a file needs memory for one tensor, and not for all of them.
///
/// Values come sorted by path. `sink` is called only on the ranks that keep the result. If it fails
/// on one rank, all ranks get that error after at most 256 MiB more of tensors. Collectives: the
/// same as [`gather_state_dict`].
///
/// # Errors
/// The same as [`gather_state_dict`], and those of `sink`.
pub fn gather_state_dict_into(
    state: &StateDict,
    group: &ProcessGroup,
    options: &GatherOptions,
    mut sink: impl FnMut(&KeyPath, StateValue) -> Result<(), StateError>,
) -> Result<(), StateError> {
    gather(
        "gather_state_dict_into",
        state,
        group,
        options,
        None,
        &mut sink,
    )
}

/// Gathers as [`gather_state_dict_into`], for other functions: `operation` is their name in errors.
/// If `boxes_on` computes which boxes of a value a rank has, the all-gather of boxes is left out.
///
/// # Errors
/// The same as [`gather_state_dict_into`].
pub fn gather(
    operation: &'static str,
    state: &StateDict,
    group: &ProcessGroup,
    options: &GatherOptions,
    boxes_on: Option<&BoxesOn<'_>>,
    sink: &mut dyn FnMut(&KeyPath, StateValue) -> Result<(), StateError>,
) -> Result<(), StateError> {
    let source = DictSource::open::<StateError>(group, operation, None, Ok(Some(state)))?;
    let mut source = source.with_boxes_on(boxes_on);
    let target = Whole::new(state, group, &options.keep_on, options.device.clone(), sink);
    let mut target = StateError::or_refuse(group, operation, target)?;
    load_state::<_, _, StateError>(
        operation,
        group,
        &mut source,
        &mut target,
        &LoadOptions::default(),
    )?;
    Ok(())
}

/// Returns one tensor whole on every rank. It is on `device`; without one it is where this rank's
/// part is, or on the CPU if this rank has none. torch's `_all_gather_sharded_tensor`, but for any
/// boxes.
///
/// Collectives: the same as [`gather_state_dict`].
///
/// # Errors
/// The same as [`gather_state_dict`].
pub fn all_gather_sharded_tensor(
    tensor: &ShardedTensor,
    group: &ProcessGroup,
    device: Option<&Device>,
) -> Result<Tensor, StateError> {
    let whole = gather_one(
        "all_gather_sharded_tensor",
        tensor,
        group,
        KeepOn::All,
        device,
    )?;
    whole.ok_or_else(|| StateError::NoSuchRank {
        rank: group.rank(),
        world_size: group.world_size(),
    })
}

/// Returns one tensor whole on rank `root` of the group, and `None` on all others, which need no
/// memory for it. torch's `ShardedTensor.gather`, except that the caller need not allocate the
/// tensor.
///
/// Collectives: the same as [`gather_state_dict`].
///
/// # Errors
/// The same as [`gather_state_dict`]; [`StateError::NoSuchRank`] for a root that the group does not
/// have.
pub fn gather_sharded_tensor(
    tensor: &ShardedTensor,
    group: &ProcessGroup,
    root: usize,
    device: Option<&Device>,
) -> Result<Option<Tensor>, StateError> {
    gather_one(
        "gather_sharded_tensor",
        tensor,
        group,
        KeepOn::Ranks(vec![root]),
        device,
    )
}

/// Gathers one tensor, as a state dict of its own. Returns it whole on the ranks that `keep_on`
/// names, and `None` on the others.
fn gather_one(
    operation: &'static str,
    tensor: &ShardedTensor,
    group: &ProcessGroup,
    keep_on: KeepOn,
    device: Option<&Device>,
) -> Result<Option<Tensor>, StateError> {
    let state: StateDict = [("tensor", StateValue::Sharded(tensor.clone()))]
        .into_iter()
        .collect();
    let mut whole = None;
    gather(
        operation,
        &state,
        group,
        &GatherOptions {
            keep_on,
            device: device.cloned(),
        },
        None,
        &mut |_, value| {
            whole = value.as_tensor().cloned();
            Ok(())
        },
    )?;
    Ok(whole)
}

/// Returns the values of `root`'s whole state dict, on every rank in the structure, kinds and boxes
/// of its `local` dict. torch's `_broadcast_state_dict`.
///
/// `full` is read on `root` only. `local` dicts have the same keys, dtypes and global shapes on all
/// ranks; a sharded tensor has any boxes. The result is a new dict in the order of `local`, whose
/// tensors share memory with nothing; `local` and its tensors are unchanged
/// ([`copy_state_dict`](crate::copy_state_dict) brings the values into them). Plain values and
/// 0-dim tensors are replaced whatever they were; other tensors must have the dtype and shape of
/// the local ones.
///
/// Every rank gets the same report, or the same error, before any tensor moves. Where
/// [`LoadOptions::strict`] is false, local values that the root lacks stay (shared with `local`),
/// and what only the root has does not move.
///
/// Collectives: three agreements, one object broadcast of the root's names and small values, and
/// one object all-gather of the ranks' boxes. Then, in path order, each tensor that all ranks want
/// whole takes one broadcast, and any other tensor one scatter of just the boxes, or several if it,
/// or copies of it, exceed 32 MiB. Small tensors share a call, up to half the size of the largest
/// tensor (but at least 1 MiB, and at most 32 MiB). After every 256 MiB there is one more
/// agreement. No rank but the root needs memory for a tensor that it does not want whole.
///
/// # Errors
/// The same on every rank: [`StateError::Incompatible`] for values that do not fit, and for missing
/// and unexpected names if strict; [`StateError::KeyMismatch`], [`StateError::ValueMismatch`] and
/// [`StateError::ArgumentMismatch`] for ranks that differ; any rank's own error.
pub fn broadcast_state_dict(
    full: Option<&StateDict>,
    local: &StateDict,
    root: usize,
    group: &ProcessGroup,
    options: &LoadOptions,
) -> Result<(StateDict, LoadReport), StateError> {
    load_copy(
        "broadcast_state_dict",
        Some(root),
        full,
        local,
        group,
        options,
    )
}

/// Broadcasts only the values of `keys`, as a strict [`broadcast_state_dict`]; the result has just
/// these keys. torch's `_broadcast_tensors`.
///
/// Keys are those of the outermost dict. Both `full` (on `root`) and `local` must have all of them.
/// Every rank names the same keys, in any order. [`LoadOptions::strict`] is ignored.
///
/// Collectives: one agreement, and then those of [`broadcast_state_dict`].
///
/// # Errors
/// The same as a strict [`broadcast_state_dict`]. If a dict of some rank lacks one of the keys,
/// that rank's [`StateError::MissingKey`] is in the
/// [`RankFailed`](fsdp_comm::CommError::RankFailed) that every rank gets.
pub fn broadcast_tensors(
    full: Option<&StateDict>,
    local: &StateDict,
    keys: &[&str],
    root: usize,
    group: &ProcessGroup,
    options: &LoadOptions,
) -> Result<StateDict, StateError> {
    // The `full` of other ranks than the root is ignored, so it need not have the keys.
    let full = full.filter(|_| group.rank() == root);
    load_selected(
        "broadcast_tensors",
        Some(root),
        full,
        local,
        keys,
        group,
        options,
    )
}

/// Returns the values of a whole state dict, which every rank holds, in the structure, kinds and
/// boxes of each rank's `local` dict. torch's `_distribute_state_dict`.
///
/// torch scatters the values of rank 0. Here every rank takes its own part of its own dict, and
/// ranks that hold different tensors get an error. Plain values and tensors without dimensions are
/// each rank's own.
///
/// The result is a new dict, and `local` is unchanged. [`LoadOptions::strict`] decides about names
/// that only one of the two has, as in [`broadcast_state_dict`].
///
/// Collectives: two agreements; no tensor moves. (Sharded tensors in `full` move as in
/// [`reshard_state_dict`].)
///
/// # Errors
/// The same as [`broadcast_state_dict`]; also if ranks bring `full` dicts of different names,
/// dtypes, shapes or elements.
pub fn distribute_state_dict(
    full: &StateDict,
    local: &StateDict,
    group: &ProcessGroup,
    options: &LoadOptions,
) -> Result<(StateDict, LoadReport), StateError> {
    load_copy(
        "distribute_state_dict",
        None,
        Some(full),
        local,
        group,
        options,
    )
}

/// Distributes only the values of `keys`, as a strict [`distribute_state_dict`]; the result has
/// just these keys. torch's `_distribute_tensors`.
///
/// Keys are those of the outermost dict, and both dicts must have all of them.
/// [`LoadOptions::strict`] is ignored. torch changes live tensors in place, one after the other.
/// Here nothing is changed: [`copy_state_dict`](crate::copy_state_dict) can copy the result into
/// live tensors afterwards.
///
/// Collectives: one agreement, and then those of [`distribute_state_dict`].
///
/// # Errors
/// The same as a strict [`distribute_state_dict`]. If a dict of some rank lacks one of the keys,
/// that rank's [`StateError::MissingKey`] is in the
/// [`RankFailed`](fsdp_comm::CommError::RankFailed) that every rank gets.
pub fn distribute_tensors(
    full: &StateDict,
    local: &StateDict,
    keys: &[&str],
    group: &ProcessGroup,
    options: &LoadOptions,
) -> Result<StateDict, StateError> {
    load_selected(
        "distribute_tensors",
        None,
        Some(full),
        local,
        keys,
        group,
        options,
    )
}

/// Returns the values of a state dict that is sharded in any way, in the structure, kinds and boxes
/// of each rank's `local` dict. torch's `DTensor.redistribute`, for all of a dict and between any
/// boxes.
///
/// Only elements that a rank wants and does not have are sent. No rank needs memory for a tensor
/// that it does not want whole. Whole tensors of `state` count as held by every rank, and must be
/// the same there.
///
/// The result is a new dict, and `local` is unchanged. [`LoadOptions::strict`] decides about names
/// that only one of the two has, as in [`broadcast_state_dict`].
///
/// Collectives: two agreements. If `state` has sharded tensors, also an object all-gather of the
/// list of those that have to move: some rank wants elements that it does not have. If there are
/// any, also an object all-gather of their boxes, and one all-to-all for each of them, in path
/// order. Small tensors share a call, up to half the size of the largest tensor (but at least 1
/// MiB, and at most 32 MiB). After every 256 MiB there is one more agreement.
///
/// # Errors
/// The same as [`distribute_state_dict`]; [`StateError::NotCovered`] if wanted elements are on no
/// rank.
pub fn reshard_state_dict(
    state: &StateDict,
    local: &StateDict,
    group: &ProcessGroup,
    options: &LoadOptions,
) -> Result<(StateDict, LoadReport), StateError> {
    load_copy(
        "reshard_state_dict",
        None,
        Some(state),
        local,
        group,
        options,
    )
}

/// Returns the values of the root's dict, or without a root those that all ranks have together, in
/// the structure of each rank's `local` dict.
fn load_copy(
    operation: &'static str,
    root: Option<usize>,
    state: Option<&StateDict>,
    local: &StateDict,
    group: &ProcessGroup,
    options: &LoadOptions,
) -> Result<(StateDict, LoadReport), StateError> {
    let mut source = DictSource::open::<StateError>(group, operation, root, Ok(state))?;
    let mut target = StateError::or_refuse(
        group,
        operation,
        DictTarget::new(local, options.device.clone()),
    )?;
    let report =
        load_state::<_, _, StateError>(operation, group, &mut source, &mut target, options)?;
    Ok((target.into_state(), report))
}

/// One tensor of [`reshard_sharded_tensors`].
#[derive(Debug, Clone, Copy)]
pub struct Reshard<'a> {
    /// Its name, the same on all ranks, and different from the other tensors' names.
    pub name: &'a str,
    /// This rank's part of it; possibly no box.
    pub tensor: &'a ShardedTensor,
    /// The boxes that this rank wants of it; possibly none.
    pub boxes: &'a [TensorBox],
}

/// Returns the same tensor in other boxes: each rank gets `boxes`, which may be none, from the
/// ranks that have them. torch's `DTensor.redistribute`, without a gather, for any boxes.
///
/// Several ranks may hold or want an element, and an element that no rank wants need not be on any.
/// No rank needs more memory than for its old and new boxes and the bytes that it sends. The new
/// boxes are new tensors on the device of this rank's old boxes, or on the CPU if it has none.
///
/// Collectives: the same as [`reshard_state_dict`].
///
/// # Errors
/// The same on every rank: ranks that differ in dtype or shape; [`StateError::NotCovered`]; any
/// rank's own error, such as boxes that overlap or lie outside the tensor.
pub fn reshard_sharded_tensor(
    tensor: &ShardedTensor,
    boxes: &[TensorBox],
    group: &ProcessGroup,
) -> Result<ShardedTensor, StateError> {
    let tensors = [Reshard {
        name: "tensor",
        tensor,
        boxes,
    }];
    let resharded = reshard("reshard_sharded_tensor", &tensors, group)?.pop();
    resharded.ok_or(StateError::NoSource { rank: group.rank() })
}

/// Reshards many tensors together, each as [`reshard_sharded_tensor`] does. Ranks may list them in
/// different orders; the result has the order of this rank's list. Collectives: the same as
/// [`reshard_state_dict`].
///
/// # Errors
/// The same as [`reshard_sharded_tensor`]; ranks that pass different names;
/// [`StateError::DuplicateKey`] for one that occurs twice.
pub fn reshard_sharded_tensors(
    tensors: &[Reshard<'_>],
    group: &ProcessGroup,
) -> Result<Vec<ShardedTensor>, StateError> {
    reshard("reshard_sharded_tensors", tensors, group)
}

/// Reshards tensors under the name of the calling function, which errors show.
fn reshard(
    operation: &'static str,
    tensors: &[Reshard<'_>],
    group: &ProcessGroup,
) -> Result<Vec<ShardedTensor>, StateError> {
    let (state, local) = StateError::or_refuse(group, operation, as_state_dicts(tensors))?;
    let (loaded, _) = load_copy(
        operation,
        None,
        Some(&state),
        &local,
        group,
        &LoadOptions::default(),
    )?;
    let mut resharded = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let Some(StateValue::Sharded(tensor)) = loaded.get(tensor.name) else {
            return Err(StateError::NoSource { rank: group.rank() });
        };
        resharded.push(tensor.clone());
    }
    Ok(resharded)
}

/// Returns the tensors by name, and a template of the wanted boxes, which takes almost no memory.
fn as_state_dicts(tensors: &[Reshard<'_>]) -> Result<(StateDict, StateDict), StateError> {
    let (mut state, mut local) = (StateDict::new(), StateDict::new());
    for Reshard {
        name,
        tensor,
        boxes,
    } in tensors
    {
        // A box of the template is one zero that is broadcast to all elements, because only the
        // dtype, the boxes and the device of the template are used.
        let zero = storage::zeros(&[], tensor.dtype())?;
        let zero = storage::to_device(&zero, &device_of_sharded(tensor))?;
        let mut shards = Vec::with_capacity(boxes.len());
        for bounds in *boxes {
            if !bounds.fits(tensor.shape()) {
                return Err(FlatError::OutOfBounds {
                    bounds: bounds.clone(),
                    shape: tensor.shape().to_vec(),
                }
                .into());
            }
            let tensor = zero.broadcast_as(bounds.sizes.as_slice())?;
            shards.push(LocalShard {
                bounds: bounds.clone(),
                tensor,
            });
        }
        local.insert(
            *name,
            ShardedTensor::new(tensor.dtype(), tensor.shape().to_vec(), shards)?,
        );
        state.insert_new(*name, (*tensor).clone())?;
    }
    Ok((state, local))
}

/// Returns only the values of `keys`, as a strict [`load_copy`]. A key that a dict lacks is an
/// error on all ranks. Collective: one agreement, and then those of the load.
fn load_selected(
    operation: &'static str,
    root: Option<usize>,
    full: Option<&StateDict>,
    local: &StateDict,
    keys: &[&str],
    group: &ProcessGroup,
    options: &LoadOptions,
) -> Result<StateDict, StateError> {
    let full = full
        .map(|full| select(operation, full, keys, "the full state dict"))
        .transpose();
    let local = select(operation, local, keys, "the local state dict");
    let selected = full.and_then(|full| Ok((full, local?)));
    let (full, local) = group.agree(operation, selected)?;
    let options = LoadOptions {
        strict: true,
        ..options.clone()
    };
    Ok(load_copy(operation, root, full.as_ref(), &local, group, &options)?.0)
}

/// Returns a dict with only these keys of `state`. `holder` names the dict in the error of a
/// missing key.
fn select(
    operation: &'static str,
    state: &StateDict,
    keys: &[&str],
    holder: &'static str,
) -> Result<StateDict, StateError> {
    let mut selected = StateDict::new();
    for &key in keys {
        let Some(value) = state.get(key) else {
            return Err(StateError::MissingKey {
                operation,
                key: key.to_owned(),
                holder,
            });
        };
        selected.insert(key, value.clone());
    }
    Ok(selected)
}
