//! Rank 0's full state dicts on every rank: what they hold is told, and small values with it; tensors are announced.

use candle_core::{Device, Tensor};
use fsdp_flat::{RawTensor, ShardedTensor};
use fsdp_layout::{DType, KeyPath, PathPart, PlainTensor, PlainValue, TensorBox};
use fsdp_nn::{Optimizer, ShardedParameters};
use fsdp_state::{
    Reshard, StateDict, StateValue, get_element, reshard_sharded_tensors, set_element, traverse_state_dict,
};
use serde::{Deserialize, Serialize};

use crate::CheckpointError;
use crate::exchange::{Coming, Place, counts, placeholder, slot};
use crate::incoming::Incoming;

/// A leaf of rank 0's dict.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Leaf {
    /// A tensor of several elements, without them.
    Tensor(DType, Vec<usize>),
    /// A tensor of at most one element.
    Small(PlainTensor),
    Plain(PlainValue),
}

type Leaves = Vec<(KeyPath, Leaf)>;

/// Rank 0's dicts on every rank, with placeholders for tensors, and the tensors that are to come: those of parameters
/// and buffers that the model knows, and of their state that an optimizer takes. (State of a parameter in another shape
/// than the parameter's comes at once.)
///
/// Collectives: one agreement, one object broadcast, one agreement; for state of another shape one exchange.
pub(crate) fn from_rank0(
    parameters: &ShardedParameters,
    optimizers: &[&mut Optimizer],
    state: &Incoming,
) -> Result<(Incoming, Vec<Coming>), CheckpointError> {
    const OPERATION: &str = "broadcast_from_rank0";
    let group = parameters.group();
    let mine = Some(state).filter(|_| group.rank() == 0);
    let of = |dict: Option<&StateDict>| dict.map(leaves).transpose();
    let told = mine.map(|state| Ok::<_, CheckpointError>((of(state.model.as_ref())?, of(state.optim.as_ref())?)));
    let told = told.transpose();
    let told: Option<(Option<Leaves>, Option<Leaves>)> = group.agree(OPERATION, told)?;
    let (model, optim) = group.broadcast_object(told.as_ref(), 0)?;
    let mut builder = Builder { parameters, optimizers: None, coming: Vec::new(), odd: Vec::new() };
    let mut build = |optimizers, mine: Option<&StateDict>, leaves: Option<&Leaves>| {
        builder.optimizers = optimizers;
        leaves.map(|leaves| builder.build(mine, leaves)).transpose()
    };
    let built = build(None, mine.and_then(|mine| mine.model.as_ref()), model.as_ref()).and_then(|model| {
        let optim = build(Some(optimizers), mine.and_then(|mine| mine.optim.as_ref()), optim.as_ref())?;
        Ok(Incoming { model, optim })
    });
    let mut incoming = group.agree(OPERATION, built)?;
    let Builder { coming, odd, .. } = builder;
    if !odd.is_empty() {
        let names: Vec<String> = odd.iter().map(|odd| odd.place.name()).collect();
        let moves = odd.iter().zip(&names);
        let moves: Vec<Reshard<'_>> =
            moves.map(|(odd, name)| Reshard { name, tensor: &odd.tensor, boxes: &odd.boxes }).collect();
        let moved = reshard_sharded_tensors(group, &moves)?;
        let put = odd.iter().zip(moved).try_for_each(|(odd, tensor)| -> Result<(), CheckpointError> {
            if let Some(slot) = slot(&mut incoming, &odd.place) {
                *slot = tensor.to_whole()?.into();
            }
            Ok(())
        });
        group.agree(OPERATION, put)?;
    }
    Ok((incoming, coming))
}

fn leaves(state: &StateDict) -> Result<Leaves, CheckpointError> {
    let mut leaves = Vec::new();
    traverse_state_dict(state, |path, value| -> Result<(), CheckpointError> {
        let small = |dtype, shape: &[usize], data| PlainTensor { dtype, shape: shape.to_vec(), data };
        let leaf = match value {
            StateValue::Tensor(tensor) if tensor.elem_count() <= 1 => {
                let tensor = fsdp_flat::storage::to_device(tensor, &Device::Cpu)?.force_contiguous()?;
                let data = fsdp_flat::storage::with_bytes(&tensor, <[u8]>::to_vec)?;
                Leaf::Small(small(fsdp_flat::dtype::of(&tensor)?, tensor.dims(), data))
            }
            StateValue::Tensor(tensor) => Leaf::Tensor(fsdp_flat::dtype::of(tensor)?, tensor.dims().to_vec()),
            StateValue::Raw(tensor) if tensor.bytes().len() <= size_of::<u64>() => {
                Leaf::Small(small(tensor.dtype(), tensor.shape(), tensor.bytes().to_vec()))
            }
            StateValue::Raw(tensor) => Leaf::Tensor(tensor.dtype(), tensor.shape().to_vec()),
            StateValue::Plain(value) => Leaf::Plain(value.clone()),
            other => {
                return Err(CheckpointError::NotFull { fqn: path.flat_key(), kind: other.kind() });
            }
        };
        leaves.push((path.clone(), leaf));
        Ok(())
    })?;
    Ok(leaves)
}

/// Makes a dict that rank 0 told of: the optimizers' if it has any, else the model's.
struct Builder<'a> {
    parameters: &'a ShardedParameters,
    optimizers: Option<&'a [&'a mut Optimizer]>,
    coming: Vec<Coming>,
    /// State of a parameter that is shaped otherwise: every rank gets all of it.
    odd: Vec<Coming>,
}

impl Builder<'_> {
    fn build(&mut self, mine: Option<&StateDict>, leaves: &Leaves) -> Result<StateDict, CheckpointError> {
        let mut built = StateDict::new();
        let before = std::mem::take(&mut self.coming);
        for (path, leaf) in leaves {
            let value = self.value(path, leaf, mine)?;
            set_element(&mut built, path, value)?;
        }
        // Where a dict has several names of a tied parameter, one of them is loaded.
        let named = if self.optimizers.is_some() { built.dict("state") } else { Some(&built) };
        self.coming.retain(|coming| counts(self.parameters, named, &coming.place.fqn));
        self.coming.splice(0..0, before);
        Ok(built)
    }

    fn value(&mut self, path: &KeyPath, leaf: &Leaf, mine: Option<&StateDict>) -> Result<StateValue, CheckpointError> {
        let (dtype, shape) = match leaf {
            Leaf::Plain(value) => return Ok(StateValue::Plain(value.clone())),
            Leaf::Small(tensor) => {
                return Ok(match fsdp_flat::dtype::to_candle(tensor.dtype) {
                    Ok(dtype) => Tensor::from_raw_buffer(&tensor.data, dtype, &tensor.shape, &Device::Cpu)?.into(),
                    Err(_) => RawTensor::new(tensor.dtype, tensor.shape.clone(), tensor.data.clone())?.into(),
                });
            }
            Leaf::Tensor(dtype, shape) => (*dtype, shape),
        };
        // No parameter has a dtype that candle does not compute with, so this will not fit, but has to be named.
        let Ok(dtype) = fsdp_flat::dtype::to_candle(dtype) else { return crate::load::empty_tensor(shape, dtype) };
        let none = || ShardedTensor::new(dtype, shape.clone(), Vec::new());
        let Some((place, boxes, is_odd)) = self.wanted(path, shape)? else { return Ok(none()?.into()) };
        let tensor = match mine.and_then(|mine| get_element(mine, path)) {
            Some(StateValue::Tensor(tensor)) => ShardedTensor::from_whole(tensor),
            _ => none()?,
        };
        let value = placeholder(dtype, shape, &boxes)?;
        let coming = Coming { place, tensor, boxes };
        if is_odd { &mut self.odd } else { &mut self.coming }.push(coming);
        Ok(value.into())
    }

    /// Whether an optimizer's algorithm has this entry.
    fn names(&self, fqn: &str, name: &str) -> bool {
        let mut optimizers = self.optimizers.into_iter().flatten();
        optimizers.any(|optimizer| optimizer.state_schema(fqn).iter().any(|entry| entry.name == name))
    }

    /// Where a tensor goes, the boxes of it that this rank needs, and whether it is state of a shape of its own.
    fn wanted(
        &self,
        path: &KeyPath,
        shape: &[usize],
    ) -> Result<Option<(Place, Vec<TensorBox>, bool)>, CheckpointError> {
        let whole = || vec![TensorBox::whole(shape)];
        let place = match (path.0.as_slice(), self.optimizers) {
            ([PathPart::Key(fqn)], None) => Place { fqn: fqn.clone(), state: None },
            ([PathPart::Key(state), PathPart::Key(fqn), PathPart::Key(name)], Some(optimizers))
                if state == "state" && optimizers.iter().any(|optimizer| optimizer.holds(fqn)) =>
            {
                Place { fqn: fqn.clone(), state: Some(name.clone()) }
            }
            _ => return Ok(None),
        };
        if self.parameters.contains(&place.fqn) {
            // A FlatParameter may have an entry of its own as one tensor, which all its parameters bring.
            let is_odd = self.parameters.shape(&place.fqn)? != shape
                || place
                    .state
                    .as_ref()
                    .is_some_and(|name| !self.parameters.use_orig_params() && !self.names(&place.fqn, name));
            let boxes = if is_odd { whole() } else { self.parameters.boxes(&place.fqn)? };
            return Ok((!is_odd || place.state.is_some()).then_some((place, boxes, is_odd)));
        }
        let buffer = self.parameters.buffers().get(&place.fqn);
        Ok(buffer.filter(|(buffer, _)| buffer.dims() == shape).map(|_| (place, whole(), false)))
    }
}

/// The device of full tensors with `cpu_offload`.
pub(crate) const CPU: Device = Device::Cpu;
