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
    let mut resharded = reshard("reshard_sharded_tensor", group, &[Reshard { name: "tensor", tensor, boxes }])?;
    resharded.pop().ok_or(StateError::NoSource { rank: group.rank() })
}

/// As [`reshard_sharded_tensor`], for many tensors with one agreement, one exchange of boxes, and one all-to-all for
/// as many tensors as have less than 32 MiB together. Ranks may list them in any order; the result is in this rank's.
///
/// # Errors
/// As [`reshard_sharded_tensor`]; ranks that bring different names.
pub fn reshard_sharded_tensors(
    group: &ProcessGroup,
    tensors: &[Reshard<'_>],
) -> Result<Vec<ShardedTensor>, StateError> {
    reshard("reshard_sharded_tensors", group, tensors)
}

/// The boxes that a rank has of a tensor, and those that it wants.
type HaveWant = (Vec<TensorBox>, Vec<TensorBox>);

fn reshard(
    operation: &'static str,
    group: &ProcessGroup,
    tensors: &[Reshard<'_>],
) -> Result<Vec<ShardedTensor>, StateError> {
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
    let received = exchange.run_all(&items)?;
    let mut resharded: Vec<(usize, ShardedTensor)> = Vec::with_capacity(tensors.len());
    for (index, buffers) in order.into_iter().zip(received) {
        let Reshard { tensor, boxes, .. } = tensors[index];
        let assembled = exchange.attempt(|| {
            let (buffers, device) = (buffers.unwrap_or_default(), device_of_sharded(tensor));
            assemble_sharded(tensor.dtype(), tensor.shape(), boxes.to_vec(), buffers, &device)
        });
        resharded.extend(assembled.map(|assembled| (index, assembled)));
    }
    exchange.finish()?;
    resharded.sort_by_key(|(index, _)| *index);
    Ok(resharded.into_iter().map(|(_, tensor)| tensor).collect())
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
