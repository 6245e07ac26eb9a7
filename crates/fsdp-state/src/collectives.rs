//! The collectives on state dicts: gather, broadcast, distribute, reshard. Each is a source and a
//! target.
//!
//! In a group that has collectives on GPU memory, tensors move there, by all-to-alls and broadcasts
//! in the place of those that the functions name.

use candle_core::{Device, Tensor};
use fsdp_comm::ProcessGroup;
use fsdp_flat::{FlatError, LocalShard, ShardedTensor, storage};
use fsdp_layout::{KeyPath, TensorBox};

use crate::engine::{
    BoxesOn, DictSource, DictTarget, LoadCall, LoadError as _, LoadOptions, WholeTarget, load_state,
};
use crate::error::StateError;
use crate::keep_on::{GatherOptions, KeepOn};
use crate::memory::device_of;
use crate::report::LoadReport;
use crate::state_dict::{StateDict, StateValue};
use crate::traverse::replace_element;

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
    let mut values: Vec<(KeyPath, StateValue)> = Vec::new();
    let call = GatherCall {
        operation: "gather_state_dict",
        group,
        options,
        boxes_on: None,
    };
    gather(&call, state, |path, value| {
        values.push((path.clone(), value));
        Ok(())
    })?;
    if !options.keep_on.contains(group.rank()) {
        return Ok(StateDict::new());
    }
    // The structure is this rank's own, with the gathered values in their places.
    let mut gathered = state.clone().without_notes();
    for (path, value) in values {
        replace_element(&mut gathered, &path, value);
    }
    Ok(gathered)
}

/// Gathers like [`gather_state_dict`], but passes each value to `sink` as soon as it is whole. So a
/// rank that writes a file needs memory for one tensor, and not for all of them.
///
/// Values come sorted by path. `sink` is called only on the ranks that keep the result. If it fails
/// on one rank, all ranks get that error after at most 256 MiB more of tensors. In these it may get
/// tensors of zeros, so what it has written counts only once this returns without an error.
/// Collectives: the same as [`gather_state_dict`].
///
/// # Errors
/// The same as [`gather_state_dict`], and those of `sink`.
pub fn gather_state_dict_into(
    state: &StateDict,
    group: &ProcessGroup,
    options: &GatherOptions,
    sink: impl FnMut(&KeyPath, StateValue) -> Result<(), StateError>,
) -> Result<(), StateError> {
    let call = GatherCall {
        operation: "gather_state_dict_into",
        group,
        options,
        boxes_on: None,
    };
    gather(&call, state, sink)
}

/// A call of [`gather`].
#[derive(Clone, Copy)]
pub struct GatherCall<'a> {
    /// The name of the function that gathers, for messages.
    pub operation: &'static str,
    /// The ranks that have parts of the tensors.
    pub group: &'a ProcessGroup,
    /// The ranks that get the tensors, and where.
    pub options: &'a GatherOptions,
    /// Computes which boxes of a value a rank has, if that is known. The all-gather of boxes is
    /// left out then.
    pub boxes_on: Option<&'a BoxesOn<'a>>,
}

/// Gathers as [`gather_state_dict_into`], for other functions.
///
/// # Errors
/// The same as [`gather_state_dict_into`].
pub fn gather(
    call: &GatherCall<'_>,
    state: &StateDict,
    mut sink: impl FnMut(&KeyPath, StateValue) -> Result<(), StateError>,
) -> Result<(), StateError> {
    let GatherCall {
        operation,
        group,
        options,
        boxes_on,
    } = *call;
    // The source and the target are made of one dict, so values that do not move keep their places.
    let source = DictSource::on_every_rank(state).map(|source| source.with_boxes_on(boxes_on));
    let target = WholeTarget::new(state, group, options, &mut sink);
    load_state::<_, _, StateError>(
        operation,
        group,
        &mut StateError::or_refuse(group, operation, source)?,
        &mut StateError::or_refuse(group, operation, target)?,
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
    let operation = "all_gather_sharded_tensor";
    let whole = gather_one(operation, tensor, group, KeepOn::All, device)?;
    Ok(whole.expect("every rank keeps the tensor"))
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
    let keep_on = KeepOn::Ranks(vec![root]);
    gather_one("gather_sharded_tensor", tensor, group, keep_on, device)
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
    let mut state = StateDict::new();
    state.insert("tensor", tensor.clone());
    let options = GatherOptions {
        keep_on,
        device: device.cloned(),
    };
    let call = GatherCall {
        operation,
        group,
        options: &options,
        boxes_on: None,
    };
    let mut whole = None;
    gather(&call, &state, |_, value| {
        whole = value.as_tensor().cloned();
        Ok(())
    })?;
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
    let call = LoadCall {
        operation: "broadcast_state_dict",
        group,
        options,
    };
    let source = DictSource::on_root::<StateError>(group, call.operation, root, Ok(full))?;
    load_copy(&call, source, local)
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
    load_own_copy("distribute_state_dict", full, local, group, options)
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
    load_own_copy("reshard_state_dict", state, local, group, options)
}

/// Returns the values that the dicts of all ranks have together, in the structure of each rank's
/// `local` dict.
fn load_own_copy(
    operation: &'static str,
    state: &StateDict,
    local: &StateDict,
    group: &ProcessGroup,
    options: &LoadOptions,
) -> Result<(StateDict, LoadReport), StateError> {
    let call = LoadCall {
        operation,
        group,
        options,
    };
    let source = StateError::or_refuse(group, operation, DictSource::on_every_rank(state))?;
    load_copy(&call, source, local)
}

/// Returns the values of a source in the structure of each rank's `local` dict.
fn load_copy(
    call: &LoadCall<'_>,
    mut source: DictSource<'_>,
    local: &StateDict,
) -> Result<(StateDict, LoadReport), StateError> {
    let LoadCall {
        operation,
        group,
        options,
    } = *call;
    let opened = DictTarget::new(local, options.device.clone());
    let mut target = StateError::or_refuse(group, operation, opened)?;
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
    let mut resharded = reshard("reshard_sharded_tensor", &tensors, group)?;
    Ok(resharded.pop().expect("one tensor was passed"))
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
    let options = LoadOptions::default();
    let (loaded, _) = load_own_copy(operation, &state, &local, group, &options)?;
    let mut resharded = Vec::with_capacity(tensors.len());
    for Reshard { name, .. } in tensors {
        let tensor = loaded.get(name).and_then(StateValue::as_sharded);
        resharded.push(tensor.expect("the result has what `local` has").clone());
    }
    Ok(resharded)
}

/// Returns the tensors by name, and a template of the wanted boxes, which takes almost no memory.
fn as_state_dicts(tensors: &[Reshard<'_>]) -> Result<(StateDict, StateDict), StateError> {
    let mut state = StateDict::new();
    let mut local = StateDict::new();
    for Reshard {
        name,
        tensor,
        boxes,
    } in tensors
    {
        // A box of the template is one zero that is broadcast to all elements, because only the
        // dtype, the boxes and the device of the template are used.
        let zero = storage::zeros(&[], tensor.dtype())?;
        let source = StateValue::Sharded((*tensor).clone());
        let zero_on_device = storage::to_device(&zero, &device_of(&source))?;
        let mut shards = Vec::with_capacity(boxes.len());
        for bounds in *boxes {
            // A wrong box must not reach the template, where its zeros could not be made.
            if !bounds.fits(tensor.shape()) {
                return Err(FlatError::OutOfBounds {
                    bounds: bounds.clone(),
                    shape: tensor.shape().to_vec(),
                }
                .into());
            }
            shards.push(LocalShard {
                bounds: bounds.clone(),
                tensor: zero_on_device.broadcast_as(bounds.sizes.as_slice())?,
            });
        }
        let template = ShardedTensor::new(tensor.dtype(), tensor.shape().to_vec(), shards)?;
        local.insert(*name, template);
        // A name that occurs twice would lose a tensor.
        state.insert_new(*name, source)?;
    }
    Ok((state, local))
}
