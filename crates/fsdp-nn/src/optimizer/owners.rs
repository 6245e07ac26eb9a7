//! Updates that need whole parameters: one rank, the owner, gathers a parameter, computes its
//! update, and sends every rank its part.

use std::hash::{Hash as _, Hasher as _};
use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use fsdp_comm::{Element, ProcessGroup};
use fsdp_flat::storage::{HostSlice, Scalar, to_device, zeroed_vec, zeros_on};
use fsdp_flat::with_float;
use twox_hash::XxHash3_64;

use super::local::{LocalParam, begin_state};
use crate::algorithm::Algorithm;
use crate::error::Result;
use crate::exchange::{self, device, resolve_agreement};

/// A parameter that a step updates as a whole.
pub(super) struct Owned {
    /// The local parameter that it belongs to, by its position in the group.
    pub(super) local: usize,
    /// Its position in the unit.
    pub(super) param: usize,
    pub(super) shape: Vec<usize>,
    /// The part of it that each rank of the shard group has; empty for none.
    pub(super) parts: Vec<Range<usize>>,
    /// The rank that computes its update.
    pub(super) owner: usize,
}

impl Owned {
    /// Returns the number of elements of the whole parameter.
    pub(super) fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A step of one group, whose parameters are updated as wholes.
pub(super) struct GroupStep<'a> {
    pub(super) algorithm: &'a Algorithm,
    /// The ranks that each have a part of every parameter; `None` if this rank has all of them.
    pub(super) shard_group: Option<&'a ProcessGroup>,
    /// The local parameters of the group.
    pub(super) locals: &'a mut [LocalParam],
}

impl GroupStep<'_> {
    /// Returns the rank of this process among those that share the parameters.
    pub(super) fn rank(&self) -> usize {
        self.shard_group.map_or(0, ProcessGroup::rank)
    }

    /// Returns the device that the parameters are on.
    pub(super) fn device(&self) -> Device {
        let first = self.locals.first();
        first.map_or(Device::Cpu, |local| local.handle.shard_device().clone())
    }

    /// Lists the parameters that got a gradient, in the order of the model, which is the same on
    /// all ranks: a rank may have named them in any order. Rank 0 owns them until
    /// [`assign_owners`]. All trained parameters get their initial state.
    pub(super) fn list_owned(&mut self) -> Result<Vec<Owned>> {
        let rank_count = self.shard_group.map_or(1, ProcessGroup::world_size);
        let mut parameters = Vec::new();
        for (index, local) in self.locals.iter_mut().enumerate() {
            if !local.requires_grad() || local.handle.grad().is_none() {
                continue;
            }
            // All parameters of a unit get their state together: a checkpoint has that of all of
            // them, or of none.
            begin_state(self.algorithm, local)?;
            let layout = local.handle.layout();
            for param in local.params() {
                if !local.handle.has_gradient(param) {
                    continue;
                }
                let parts =
                    (0..rank_count).map(|rank| match layout.shard_param_info(param, rank) {
                        Some(info) => info.param_range(),
                        None => 0..0,
                    });
                parameters.push(Owned {
                    local: index,
                    param,
                    shape: layout.shapes()[param].clone(),
                    parts: parts.collect(),
                    owner: 0,
                });
            }
        }
        parameters
            .sort_by_key(|owned| (self.locals[owned.local].handle.unit_number(), owned.param));
        Ok(parameters)
    }

    /// Turns one rank's error into an error on every rank, and checks that all ranks are about to
    /// update the same parameters: what they exchange does not say which parameters it is of.
    pub(super) fn agree_on_parameters<T>(
        &self,
        outcome: Result<(Vec<Owned>, T)>,
    ) -> Result<(Vec<Owned>, T)> {
        // A rank that shares with none has nobody to agree with.
        let Some(group) = self.shard_group else {
            return outcome;
        };
        let mut hasher = XxHash3_64::new();
        for owned in outcome.iter().flat_map(|(parameters, _)| parameters) {
            let unit_number = self.locals[owned.local].handle.unit_number();
            (unit_number, owned.param, &owned.shape).hash(&mut hasher);
        }
        let operation = format!(
            "Optimizer::step, for the parameters of {} that got a gradient,",
            self.algorithm.name()
        );
        let own_outcome = outcome.as_ref().map(|_| ());
        resolve_agreement(
            group.agree_on(&operation, hasher.finish(), own_outcome),
            outcome,
        )
    }
}

/// Assigns an owner to each parameter, the same on all ranks. Parameters are assigned in the order
/// of their cost, the most expensive first, each to the rank with the least work so far. Only ranks
/// that have a part of a parameter can own it, because only these have its state after a load.
pub(super) fn assign_owners(parameters: &mut [Owned], cost: impl Fn(&[usize]) -> u128) {
    let rank_count = parameters.first().map_or(1, |first| first.parts.len());
    let mut order: Vec<usize> = (0..parameters.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(cost(&parameters[index].shape)));
    let mut rank_loads = vec![0u128; rank_count];
    for index in order {
        let holders = (0..rank_count).filter(|&rank| !parameters[index].parts[rank].is_empty());
        // A parameter without elements has no holder, and nothing to update.
        let owner = holders.min_by_key(|&rank| rank_loads[rank]).unwrap_or(0);
        rank_loads[owner] += cost(&parameters[index].shape);
        parameters[index].owner = owner;
    }
}

/// Turns one rank's error into an error on every rank.
pub(super) fn agree<T>(group: Option<&ProcessGroup>, outcome: Result<T>) -> Result<T> {
    match group {
        Some(group) => exchange::agree(group, "Optimizer::step", outcome),
        None => outcome,
    }
}

/// The elements of a parameter that a rank has, or all of them, as a tensor of one dimension;
/// `None` for no elements.
pub(super) type Part = Option<Tensor>;

/// The dtype and the device of all values that a step sends.
pub(super) type Place<'a> = (DType, &'a Device);

/// Returns the parameters that this rank owns, whole, from the parts of all ranks; `None` for the
/// others. A parameter may be listed several times, with other values. All parts have the
/// dtype and the device of `place`. Collective: one exchange, none without a group.
pub(super) fn gather_to_owners(
    group: Option<&ProcessGroup>,
    parameters: &[&Owned],
    parts: Vec<Part>,
    place: Place<'_>,
) -> Result<Vec<Part>> {
    let Some(group) = group else { return Ok(parts) };
    let mut send = vec![Vec::new(); group.world_size()];
    let mut receive = vec![Vec::new(); group.world_size()];
    for (parameter, part) in parameters.iter().zip(parts) {
        send[parameter.owner].extend(part);
        if parameter.owner == group.rank() {
            for (lens, part) in receive.iter_mut().zip(&parameter.parts) {
                lens.push(part.len());
            }
        }
    }
    let mut received = exchange_parts(group, send, &receive, place)?;
    let mut whole_parameters = Vec::with_capacity(parameters.len());
    for parameter in parameters {
        if parameter.owner != group.rank() {
            whole_parameters.push(None);
            continue;
        }
        // Ranks have consecutive parts of a parameter, in their order.
        let parts = received.iter_mut().filter_map(Iterator::next).flatten();
        whole_parameters.push(joined(&parts.collect::<Vec<_>>())?);
    }
    Ok(whole_parameters)
}

/// Returns this rank's parts of all parameters, from their owners: views of memory that they share
/// if there is a group. A parameter may be listed several times, with other values. All have the
/// dtype and the device of `place`. Collective: one exchange, none without a group.
pub(super) fn scatter_from_owners(
    group: Option<&ProcessGroup>,
    parameters: &[&Owned],
    whole_parameters: Vec<Part>,
    place: Place<'_>,
) -> Result<Vec<Part>> {
    let Some(group) = group else {
        return Ok(whole_parameters);
    };
    let rank = group.rank();
    let mut send = vec![Vec::new(); group.world_size()];
    let mut receive = vec![Vec::new(); group.world_size()];
    for (parameter, whole) in parameters.iter().zip(whole_parameters) {
        receive[parameter.owner].push(parameter.parts[rank].len());
        let Some(whole) = whole.filter(|_| parameter.owner == rank) else {
            continue;
        };
        for (tensors, part) in send.iter_mut().zip(&parameter.parts) {
            if !part.is_empty() {
                tensors.push(whole.narrow(0, part.start, part.len())?);
            }
        }
    }
    let mut received = exchange_parts(group, send, &receive, place)?;
    let parts = parameters
        .iter()
        .map(|parameter| received[parameter.owner].next().flatten());
    Ok(parts.collect())
}

/// Sends the tensors in `send[rank]` to each rank, and returns the tensors that each rank has sent
/// to this one: `receive[rank]` has the numbers of their elements. The elements go from GPU to GPU
/// if the group can do that, otherwise through the host. Collective: one exchange.
fn exchange_parts(
    group: &ProcessGroup,
    send: Vec<Vec<Tensor>>,
    receive: &[Vec<usize>],
    (dtype, device): Place<'_>,
) -> Result<Vec<std::vec::IntoIter<Part>>> {
    let send_counts: Vec<usize> = send
        .iter()
        .map(|tensors| tensors.iter().map(Tensor::elem_count).sum())
        .collect();
    let receive_counts: Vec<usize> = receive.iter().map(|lens| lens.iter().sum()).collect();
    // The others may be in the exchange already, where they would wait for this rank.
    let packed = packed(&send.concat(), dtype, device)
        .inspect_err(|error| group.abort(format!("Optimizer::step: {error}")))?;
    let counts = (send_counts.as_slice(), receive_counts.as_slice());
    let received = match device::all_to_all(group, &packed, counts)? {
        Some(received) => received,
        None => with_float!(dtype, T => exchange_on_host::<T>(group, &packed, counts)?),
    };
    let mut start = 0;
    let mut parts = Vec::with_capacity(receive.len());
    for lens in receive {
        let mut parts_of_rank = Vec::with_capacity(lens.len());
        for &len in lens {
            let part = (len > 0).then(|| received.narrow(0, start, len));
            parts_of_rank.push(part.transpose()?);
            start += len;
        }
        parts.push(parts_of_rank.into_iter());
    }
    Ok(parts)
}

/// Exchanges elements through the host: sends and receives as many elements of each rank as
/// `counts` say. Collective: one exchange.
fn exchange_on_host<T: Scalar + Element>(
    group: &ProcessGroup,
    packed: &Tensor,
    (send_counts, receive_counts): (&[usize], &[usize]),
) -> Result<Tensor> {
    let mut received = zeroed_vec::<T>(receive_counts.iter().sum())?;
    {
        let packed = HostSlice::<T>::read(packed)?;
        group.all_to_all_uneven(&mut received, receive_counts, &packed, send_counts)?;
    }
    let numel = received.len();
    let received = Tensor::from_vec(received, numel, &Device::Cpu)?;
    Ok(to_device(&received, packed.device())?)
}

/// Returns the elements of tensors of one dimension, one after the other, in one tensor of this
/// dtype and device.
fn packed(tensors: &[Tensor], dtype: DType, device: &Device) -> Result<Tensor> {
    match joined(tensors)? {
        Some(packed) => Ok(packed),
        None => Ok(zeros_on(&[0], dtype, device)?),
    }
}

/// Returns the elements of tensors of one dimension, one after the other; `None` if there are no
/// tensors.
fn joined(tensors: &[Tensor]) -> Result<Part> {
    if tensors.is_empty() {
        return Ok(None);
    }
    Ok(Some(Tensor::cat(tensors, 0)?))
}
