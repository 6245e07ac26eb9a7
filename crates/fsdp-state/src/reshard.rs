//! Sharded tensors from any boxes to any boxes, by all-to-alls of overlaps.

use fsdp_comm::ProcessGroup;
use fsdp_flat::{FlatError, ShardedTensor};
use fsdp_layout::TensorBox;

use crate::gather::covered;
use crate::load::assemble_sharded;
use crate::memory::{ElementType, device_of_sharded};
use crate::schema::{Agreement, Schema, agree};
use crate::transfer::{Exchange, Item, Layout};
use crate::{StateDict, StateError, get_element};

/// One tensor of [`reshard_sharded_tensors`].
#[derive(Debug, Clone, Copy)]
pub struct Reshard<'a> {
    /// Its name, the same on all ranks, and different from the other tensors' names.
    pub name: &'a str,
    /// What this rank has of it; possibly no box.
    pub tensor: &'a ShardedTensor,
    /// What this rank wants of it; possibly no box.
    pub boxes: &'a [TensorBox],
}

/// The same tensor in other boxes: each rank gets `boxes`, which may be none, from whoever has them.
/// torch's `DTensor.redistribute`, without a gather, for any boxes.
///
/// Elements may be on several ranks, and may be wanted by several; elements that nobody wants may be on none. No rank
/// holds more than what it has, what it wants, and what it sends and receives. The new boxes share memory with
/// nothing and lie where this rank's old ones do (on the CPU if it has none).
///
/// Collectives: one agreement, one object all-gather of boxes, at most one all-to-all of overlaps (or, if one rank has
/// all or some want all, a scatter, broadcast or gather), and one status round.
///
/// # Errors
/// The same on every rank: ranks that differ in dtype or shape; [`StateError::NotCovered`]; any rank's own error, such
/// as boxes that overlap or lie outside the tensor.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_flat::ShardedTensor;
/// use fsdp_layout::{TensorBox, boxes::boxes_of_flat_range};
/// // From flat ranges 0..5, 5..6 to columns.
/// let ranges = [0..5, 5..6];
/// let columns = fsdp_comm::run_local(2, |group| {
///     let range = ranges[group.rank()].clone();
///     let flat = Tensor::arange(range.start as f32, range.end as f32, &Device::Cpu)?;
///     let sharded = ShardedTensor::from_flat(&[3, 2], boxes_of_flat_range(&[3, 2], range), &flat)?;
///     let column = TensorBox::new(vec![0, group.rank()], vec![3, 1]);
///     let sharded = fsdp_state::reshard_sharded_tensor(&group, &sharded, &[column])?;
///     Ok::<_, fsdp_state::StateError>(sharded.shards()[0].tensor.flatten_all()?.to_vec1::<f32>()?)
/// })?;
/// assert_eq!(*columns[1].as_ref().unwrap(), [1., 3., 5.]);
/// # Ok::<(), fsdp_comm::CommError>(())
/// ```
pub fn reshard_sharded_tensor(
    group: &ProcessGroup,
    tensor: &ShardedTensor,
    boxes: &[TensorBox],
) -> Result<ShardedTensor, StateError> {
    let mut resharded = None;
    reshard("reshard_sharded_tensor", group, &[Reshard { name: "tensor", tensor, boxes }], |_, tensor| {
        resharded = Some(tensor);
        Ok(())
    })?;
    resharded.ok_or(StateError::NoSource { rank: group.rank() })
}

/// As [`reshard_sharded_tensor`], for many tensors with one agreement, one exchange of boxes, and one all-to-all for as
/// many tensors as have together at most half of what the largest has (though 1 MiB always, and 32 MiB at most). Ranks
/// may list them in any order; the result is in this rank's. A status round every 256 MiB and one at the end.
///
/// # Errors
/// As [`reshard_sharded_tensor`]; ranks that bring different names; [`StateError::DuplicateKey`] for one that occurs
/// twice.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_flat::ShardedTensor;
/// use fsdp_layout::TensorBox;
/// use fsdp_state::{Reshard, reshard_sharded_tensors};
/// // Each rank has one of two tensors, and gets a half of both.
/// let halves = fsdp_comm::run_local(2, |group| {
///     let mine = ShardedTensor::from_whole(&Tensor::full(group.rank() as f32, 4, &Device::Cpu)?);
///     let nothing = ShardedTensor::new(DType::F32, vec![4], vec![])?;
///     let (a, b) = if group.rank() == 0 { (&mine, &nothing) } else { (&nothing, &mine) };
///     let half = [TensorBox::new(vec![2 * group.rank()], vec![2])];
///     let wanted = [("a", a), ("b", b)].map(|(name, tensor)| Reshard { name, tensor, boxes: &half });
///     let [a, b] = &reshard_sharded_tensors(&group, &wanted)?[..] else { panic!("as many as were asked for") };
///     let half = |tensor: &ShardedTensor| tensor.shards()[0].tensor.to_vec1::<f32>();
///     Ok::<_, fsdp_state::StateError>((half(a)?, half(b)?))
/// })?;
/// assert_eq!(*halves[1].as_ref().unwrap(), (vec![0., 0.], vec![1., 1.]));
/// # Ok::<(), fsdp_comm::CommError>(())
/// ```
pub fn reshard_sharded_tensors(
    group: &ProcessGroup,
    tensors: &[Reshard<'_>],
) -> Result<Vec<ShardedTensor>, StateError> {
    let mut resharded = Vec::with_capacity(tensors.len());
    reshard("reshard_sharded_tensors", group, tensors, |index, tensor| {
        resharded.push((index, tensor));
        Ok(())
    })?;
    resharded.sort_by_key(|(index, _)| *index);
    Ok(resharded.into_iter().map(|(_, tensor)| tensor).collect())
}

/// As [`reshard_sharded_tensors`], with each tensor handed to `sink`, with its position in `tensors`, as soon as it is
/// there and before the next ones move: a rank whose sink keeps nothing needs memory for one tensor of those that it
/// wants (or 1 MiB of small ones). They come sorted by name.
///
/// # Errors
/// As [`reshard_sharded_tensors`]. A failure of `sink` on any rank is every rank's, once all tensors have moved; it gets
/// nothing more.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fsdp_flat::ShardedTensor;
/// use fsdp_layout::TensorBox;
/// use fsdp_state::{Reshard, reshard_sharded_tensors_into};
/// // Rank 0 has all of two tensors; each rank takes its row of them, and keeps a sum.
/// let sums = fsdp_comm::run_local(2, |group| {
///     let tensor = match group.rank() {
///         0 => ShardedTensor::from_whole(&Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?),
///         _ => ShardedTensor::new(DType::F32, vec![2, 2], vec![])?,
///     };
///     let row = [TensorBox::new(vec![group.rank(), 0], vec![1, 2])];
///     let wanted = ["a", "b"].map(|name| Reshard { name, tensor: &tensor, boxes: &row });
///     let mut sum = 0.0;
///     reshard_sharded_tensors_into(&group, &wanted, |_, tensor| {
///         sum += tensor.shards()[0].tensor.sum_all()?.to_scalar::<f32>()?;
///         Ok(())
///     })?;
///     Ok::<_, fsdp_state::StateError>(sum)
/// })?;
/// assert_eq!(*sums[1].as_ref().unwrap(), 14.);
/// # Ok::<(), fsdp_comm::CommError>(())
/// ```
pub fn reshard_sharded_tensors_into(
    group: &ProcessGroup,
    tensors: &[Reshard<'_>],
    sink: impl FnMut(usize, ShardedTensor) -> Result<(), StateError>,
) -> Result<(), StateError> {
    reshard("reshard_sharded_tensors", group, tensors, sink)
}

/// The boxes that a rank has of a tensor, and those that it wants.
type HaveWant = (Vec<TensorBox>, Vec<TensorBox>);

fn reshard(
    operation: &'static str,
    group: &ProcessGroup,
    tensors: &[Reshard<'_>],
    mut sink: impl FnMut(usize, ShardedTensor) -> Result<(), StateError>,
) -> Result<(), StateError> {
    let state = named(tensors);
    let agreed = state.and_then(|state| {
        let schema = Schema::of(&state)?;
        Ok((Agreement { arguments: String::new(), schemas: vec![schema.clone()] }, (schema, state)))
    });
    let (schema, state) = agree(group, operation, agreed)?;
    // Where the agreed order puts each of this rank's tensors.
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&index| tensors[index].name);
    let boxes: Vec<HaveWant> =
        order.iter().map(|&index| (tensors[index].tensor.boxes(), tensors[index].boxes.to_vec())).collect();
    let all = group.all_gather_object(&boxes)?;

    let mut items = Vec::with_capacity(tensors.len());
    for (index, (path, leaf)) in schema.0.iter().enumerate() {
        let (Some((dtype, shape)), Some(value)) = (leaf.tensor(), get_element(&state, path)) else { continue };
        let Some(element) = ElementType::of(value) else { continue };
        let (have, want) = all.iter().map(|boxes| boxes.get(index).cloned().unwrap_or_default()).unzip();
        let layout = Layout { shape: shape.to_vec(), element: dtype.size_in_bytes() as usize, have, want };
        items.push(Item { layout: covered(operation, group, path, layout)?, source: Some(value), element });
    }
    let mut exchange = Exchange::new(group, operation);
    exchange.run_each(&items, |item, buffers| {
        let index = order[item];
        let Reshard { tensor, boxes, .. } = tensors[index];
        let device = device_of_sharded(tensor);
        sink(index, assemble_sharded(tensor.dtype(), tensor.shape(), boxes.to_vec(), buffers, &device)?)
    })?;
    exchange.finish()
}

/// The tensors by name, if the names differ and the wanted boxes are those of a tensor.
fn named(tensors: &[Reshard<'_>]) -> Result<StateDict, StateError> {
    let mut state = StateDict::new();
    for Reshard { name, tensor, boxes } in tensors {
        for (index, bounds) in boxes.iter().enumerate() {
            if !bounds.fits(tensor.shape()) {
                return Err(FlatError::OutOfBounds { bounds: bounds.clone(), shape: tensor.shape().to_vec() }.into());
            }
            if let Some(other) = boxes[..index].iter().find(|other| other.intersect(bounds).is_some()) {
                return Err(FlatError::Overlap { first: other.clone(), second: bounds.clone() }.into());
            }
        }
        if state.insert(*name, (*tensor).clone()).is_some() {
            return Err(StateError::DuplicateKey { key: (*name).to_owned() });
        }
    }
    Ok(state)
}
