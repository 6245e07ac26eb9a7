//! Sharded state dicts to whole ones, tensor by tensor.

use candle_core::Device;
use fsdp_comm::ProcessGroup;
use fsdp_flat::ShardedTensor;
use fsdp_layout::{KeyPath, TensorBox};
use indexmap::IndexMap;

use crate::keep_on::KeepOn;
use crate::memory::{ElementType, device_of, own_leaf};
use crate::schema::{Agreement, Schema, agree};
use crate::transfer::{Exchange, Item, Layout};
use crate::traverse::get_element_mut;
use crate::{IterateOptions, Keep, StateDict, StateError, StateValue, iterate_state_dict};

/// Options of [`gather_state_dict`].
#[derive(Debug, Clone, Default)]
pub struct GatherOptions {
    /// The ranks that get the tensors: torch's `ranks_only`.
    pub keep_on: KeepOn,
    /// Where tensors go; `None` leaves each where this rank's part of it is (the CPU if it has none). May differ
    /// between ranks. torch's `cpu_offload` is `Some(Device::Cpu)`.
    pub device: Option<Device>,
}

/// All tensors of a state dict, whole, on the ranks that keep them; an empty dict on all others.
/// torch's `_gather_state_dict`.
///
/// Every rank brings a dict of the same keys, kinds, dtypes and global shapes, in any order; a rank without elements
/// brings a [`ShardedTensor`] without boxes. Elements may be on several ranks (HybridShard). The result has the order
/// of this rank's dict, and its tensors share memory with nothing; plain values and whole tensors are this rank's own.
///
/// Collectives: one agreement; if there are sharded tensors an object all-gather of boxes, and for each tensor,
/// sorted by path, one all-gather, or one gather to each rank that keeps it; none for tensors of which every keeping
/// rank has all boxes. A status round every 256 MiB and one at the end. A rank that keeps nothing needs memory for its
/// own part of one tensor at most.
///
/// # Errors
/// The same on every rank: [`StateError::KeyMismatch`], [`StateError::ValueMismatch`],
/// [`StateError::ArgumentMismatch`]; [`StateError::NotCovered`] if elements are on no rank; any rank's own error.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_flat::{LocalShard, ShardedTensor};
/// use fsdp_layout::TensorBox;
/// use fsdp_state::{GatherOptions, KeepOn, StateDict, gather_state_dict};
///
/// // Two ranks with one row each; only rank 1 keeps the whole.
/// let rows = fsdp_comm::run_local(2, |group| {
///     let row = Tensor::full(group.rank() as f32, (1, 3), &Device::Cpu)?;
///     let bounds = TensorBox::new(vec![group.rank(), 0], vec![1, 3]);
///     let weight = ShardedTensor::new(DType::F32, vec![2, 3], vec![LocalShard { bounds, tensor: row }])?;
///     let mut state = StateDict::new();
///     state.insert("weight", weight);
///     let options = GatherOptions { keep_on: KeepOn::Ranks(vec![1]), ..Default::default() };
///     let full = gather_state_dict(&group, &state, &options)?;
///     let weight = full.get("weight").and_then(|weight| weight.as_tensor());
///     Ok::<_, fsdp_state::StateError>(weight.map(|weight| weight.to_vec2::<f32>()).transpose()?)
/// })?;
/// assert_eq!(*rows[0].as_ref().unwrap(), None);
/// assert_eq!(*rows[1].as_ref().unwrap(), Some(vec![vec![0.; 3], vec![1.; 3]]));
/// # Ok::<(), fsdp_comm::CommError>(())
/// ```
pub fn gather_state_dict(
    group: &ProcessGroup,
    state: &StateDict,
    options: &GatherOptions,
) -> Result<StateDict, StateError> {
    let mut values: IndexMap<KeyPath, StateValue> = IndexMap::new();
    gather("gather_state_dict", group, state, options, |path, value| {
        values.insert(path.clone(), value);
        Ok(())
    })?;
    // The structure of the local dict, then the gathered values in their places.
    let structure =
        IterateOptions { keep_on: options.keep_on.clone(), rank: group.rank(), ..IterateOptions::default() };
    let mut gathered = iterate_state_dict(state, &mut Keep, &structure)?;
    for (path, value) in values {
        if let Some(slot) = get_element_mut(&mut gathered, &path) {
            *slot = value;
        }
    }
    Ok(gathered)
}

/// As [`gather_state_dict`], with each value handed to `sink` as soon as it is whole and then forgotten here, so that
/// a rank that writes a file needs memory for one tensor, not for all of them.
///
/// Values come sorted by path. `sink` is called on the ranks that keep the result only. If it fails on one rank all
/// ranks get that error, at the latest after the next 256 MiB of tensors.
///
/// # Errors
/// As [`gather_state_dict`], and those of `sink`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_flat::{LocalShard, ShardedTensor};
/// use fsdp_layout::TensorBox;
/// use fsdp_state::{GatherOptions, KeepOn, StateDict, gather_state_dict_into};
/// // Rank 0 writes tensors of two ranks to a file, one after the other, say.
/// let names = fsdp_comm::run_local(2, |group| {
///     let bounds = TensorBox::new(vec![group.rank()], vec![1]);
///     let tensor = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
///     let half = ShardedTensor::new(DType::F32, vec![2], vec![LocalShard { bounds, tensor }])?;
///     let state: StateDict = ["b", "a"].into_iter().map(|name| (name, half.clone().into())).collect();
///     let options = GatherOptions { keep_on: KeepOn::Ranks(vec![0]), ..Default::default() };
///     let mut names = Vec::new();
///     gather_state_dict_into(&group, &state, &options, |path, _value| {
///         names.push(path.flat_key());
///         Ok(())
///     })?;
///     Ok::<_, fsdp_state::StateError>(names)
/// })?;
/// assert_eq!(*names[0].as_ref().unwrap(), ["a", "b"]);
/// assert!(names[1].as_ref().unwrap().is_empty());
/// # Ok::<(), fsdp_comm::CommError>(())
/// ```
pub fn gather_state_dict_into(
    group: &ProcessGroup,
    state: &StateDict,
    options: &GatherOptions,
    sink: impl FnMut(&KeyPath, StateValue) -> Result<(), StateError>,
) -> Result<(), StateError> {
    gather("gather_state_dict_into", group, state, options, sink)
}

/// One tensor whole on every rank, on `device` or where this rank's part of it is (the CPU if it has none).
/// torch's `_all_gather_sharded_tensor`, for any boxes and not only for chunks of dimension 0.
///
/// Collectives: as [`gather_state_dict`].
///
/// # Errors
/// As [`gather_state_dict`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_flat::ShardedTensor;
/// use fsdp_layout::boxes::boxes_of_flat_range;
/// // Flat ranges that cut rows: 0..4, 4..6.
/// let ranges = [0..4, 4..6];
/// let gathered = fsdp_comm::run_local(2, |group| {
///     let range = ranges[group.rank()].clone();
///     let flat = Tensor::arange(range.start as f32, range.end as f32, &Device::Cpu)?;
///     let sharded = ShardedTensor::from_flat(&[2, 3], boxes_of_flat_range(&[2, 3], range), &flat)?;
///     let whole = fsdp_state::all_gather_sharded_tensor(&group, &sharded, None)?;
///     Ok::<_, fsdp_state::StateError>(whole.to_vec2::<f32>()?)
/// })?;
/// assert!(gathered.into_iter().all(|whole| whole.unwrap() == [[0., 1., 2.], [3., 4., 5.]]));
/// # Ok::<(), fsdp_comm::CommError>(())
/// ```
pub fn all_gather_sharded_tensor(
    group: &ProcessGroup,
    tensor: &ShardedTensor,
    device: Option<&Device>,
) -> Result<candle_core::Tensor, StateError> {
    let whole = gather_one("all_gather_sharded_tensor", group, tensor, KeepOn::All, device)?;
    whole.ok_or_else(|| StateError::NoSuchRank { rank: group.rank(), world_size: group.world_size() })
}

/// One tensor whole on one rank, `root` of the group; `None` on all others, which need no memory for it. torch's
/// `ShardedTensor.gather`, which wants the tensor allocated beforehand.
///
/// Collectives: as [`gather_state_dict`].
///
/// # Errors
/// As [`gather_state_dict`]; [`StateError::NoSuchRank`] for a root that the group does not have.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_flat::{LocalShard, ShardedTensor};
/// use fsdp_layout::TensorBox;
/// // Two elements on rank 0, one on rank 1, none on rank 2, which gets all of them.
/// let gathered = fsdp_comm::run_local(3, |group| {
///     let (start, len) = [(0, 2), (2, 1), (3, 0)][group.rank()];
///     let tensor = Tensor::arange(start as f32, (start + len) as f32, &Device::Cpu)?;
///     let shard = LocalShard { bounds: TensorBox::new(vec![start], vec![len]), tensor };
///     let shards = if len > 0 { vec![shard] } else { vec![] };
///     let sharded = ShardedTensor::new(DType::F32, vec![3], shards)?;
///     let whole = fsdp_state::gather_sharded_tensor(&group, &sharded, 2, None)?;
///     Ok::<_, fsdp_state::StateError>(whole.map(|whole| whole.to_vec1::<f32>()).transpose()?)
/// })?;
/// assert_eq!(*gathered[0].as_ref().unwrap(), None);
/// assert_eq!(*gathered[2].as_ref().unwrap(), Some(vec![0., 1., 2.]));
/// # Ok::<(), fsdp_comm::CommError>(())
/// ```
pub fn gather_sharded_tensor(
    group: &ProcessGroup,
    tensor: &ShardedTensor,
    root: usize,
    device: Option<&Device>,
) -> Result<Option<candle_core::Tensor>, StateError> {
    gather_one("gather_sharded_tensor", group, tensor, KeepOn::Ranks(vec![root]), device)
}

fn gather_one(
    operation: &'static str,
    group: &ProcessGroup,
    tensor: &ShardedTensor,
    keep_on: KeepOn,
    device: Option<&Device>,
) -> Result<Option<candle_core::Tensor>, StateError> {
    let mut state = StateDict::new();
    state.insert("tensor", tensor.clone());
    let mut whole = None;
    gather(operation, group, &state, &GatherOptions { keep_on, device: device.cloned() }, |_, value| {
        whole = value.as_tensor().cloned();
        Ok(())
    })?;
    Ok(whole)
}

fn gather(
    operation: &'static str,
    group: &ProcessGroup,
    state: &StateDict,
    options: &GatherOptions,
    mut sink: impl FnMut(&KeyPath, StateValue) -> Result<(), StateError>,
) -> Result<(), StateError> {
    let outcome = options.keep_on.check(group.world_size()).and_then(|()| Schema::with_values(state));
    let agreed = outcome.map(|(schema, values)| {
        let agreement = Agreement { arguments: options.keep_on.to_string(), schemas: vec![schema.clone()] };
        (agreement, (schema, values))
    });
    let (schema, values) = agree(group, operation, agreed)?;
    let mut layouts = layouts(operation, group, &schema, &values, &options.keep_on)?.into_iter();
    let mut exchange = Exchange::new(group, operation);
    let keeps = options.keep_on.contains(group.rank());
    for ((path, leaf), value) in schema.0.iter().zip(values) {
        let gathered = match ElementType::of(value) {
            Some(element) if leaf.is_sharded() => {
                let Some(layout) = layouts.next() else { break };
                let buffers = exchange.run(&Item { layout, source: Some(value), element })?;
                let Some(buffer) = buffers.and_then(|mut buffers| buffers.pop()) else { continue };
                let device = options.device.clone().unwrap_or_else(|| device_of(value));
                exchange.attempt(|| buffer.into_value(&device))
            }
            _ if keeps => exchange.attempt(|| own_leaf(value, options.device.as_ref())),
            _ => None,
        };
        if let Some(gathered) = gathered {
            exchange.attempt(|| sink(path, gathered));
        }
    }
    exchange.finish()
}

/// The layouts of the sharded leaves, in order, all of them checked.
fn layouts(
    operation: &'static str,
    group: &ProcessGroup,
    schema: &Schema,
    values: &[&StateValue],
    keep_on: &KeepOn,
) -> Result<Vec<Layout>, StateError> {
    if !schema.has_sharded() {
        return Ok(Vec::new());
    }
    let mine: Vec<Vec<TensorBox>> =
        values.iter().filter_map(|value| value.as_sharded()).map(ShardedTensor::boxes).collect();
    let mut all = group.all_gather_object(&mine)?;
    let sharded = schema.0.iter().filter(|(_, leaf)| leaf.is_sharded());
    sharded
        .enumerate()
        .filter_map(|(index, (path, leaf))| leaf.tensor().map(|tensor| (index, path, tensor)))
        .map(|(index, path, (dtype, shape))| {
            let whole = TensorBox::whole(shape);
            let want = |rank| if keep_on.contains(rank) { vec![whole.clone()] } else { Vec::new() };
            let layout = Layout {
                shape: shape.to_vec(),
                element: dtype.size_in_bytes() as usize,
                have: boxes_of(&mut all, index),
                want: (0..group.world_size()).map(want).collect(),
            };
            covered(operation, group, path, layout)
        })
        .collect()
}

/// Takes each rank's boxes of one tensor out of what the ranks sent.
pub(crate) fn boxes_of(all: &mut [Vec<Vec<TensorBox>>], index: usize) -> Vec<Vec<TensorBox>> {
    all.iter_mut().map(|boxes| boxes.get_mut(index).map(std::mem::take).unwrap_or_default()).collect()
}

/// The layout, if all that is wanted is somewhere.
pub(crate) fn covered(
    operation: &'static str,
    group: &ProcessGroup,
    path: &KeyPath,
    layout: Layout,
) -> Result<Layout, StateError> {
    match layout.hole() {
        None => Ok(layout),
        Some((rank, missing)) => Err(StateError::NotCovered {
            operation,
            key: path.flat_key(),
            shape: layout.shape,
            rank: group.global_ranks().get(rank).copied().unwrap_or(rank),
            missing,
        }),
    }
}
