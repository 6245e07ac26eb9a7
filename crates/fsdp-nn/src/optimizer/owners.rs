//! Updates that need whole parameters: one rank, the owner, gathers a parameter, computes its
//! update, and sends every rank its part.

use std::hash::{Hash as _, Hasher as _};
use std::ops::Range;

use fsdp_comm::{CommError, Element, ProcessGroup};
use twox_hash::XxHash3_64;

use super::local::{LocalParam, begin_state};
use crate::algorithm::Algorithm;
use crate::error::Result;

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

    /// Returns `true` if the parameters are on a GPU.
    pub(super) fn is_on_gpu(&self) -> bool {
        self.locals
            .first()
            .is_some_and(|local| !local.handle.shard_device().is_cpu())
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
    let Some(group) = group else { return outcome };
    resolve_agreement(
        group.agree("Optimizer::step", outcome.as_ref().map(|_| ())),
        outcome,
    )
}

/// Returns `outcome` if all ranks agreed or this rank failed, and otherwise the error of the
/// agreement.
fn resolve_agreement<T>(agreed: Result<(), CommError>, outcome: Result<T>) -> Result<T> {
    match agreed {
        // This rank's own error keeps its type.
        Err(_) if outcome.is_err() => outcome,
        Err(error) => Err(error.into()),
        Ok(()) => outcome,
    }
}

/// Returns the parameters of one owner, with their positions in `parameters`.
fn owned_by<'a>(
    parameters: &'a [&Owned],
    owner: usize,
) -> impl Iterator<Item = (usize, &'a Owned)> {
    parameters
        .iter()
        .copied()
        .enumerate()
        .filter(move |(_, parameter)| parameter.owner == owner)
}

/// Returns the parameters that this rank owns, whole, from the parts of all ranks; the others are
/// empty. Collective: one exchange, none without a group.
pub(super) fn gather_to_owners<T: Element + Default>(
    group: Option<&ProcessGroup>,
    parameters: &[&Owned],
    parts: Vec<Vec<T>>,
) -> Result<Vec<Vec<T>>> {
    let Some(group) = group else { return Ok(parts) };
    let rank_count = group.world_size();
    // Step 1: pack this rank's parts, owner by owner.
    let mut send_buffer = Vec::new();
    let mut send_counts = vec![0; rank_count];
    for (owner, count) in send_counts.iter_mut().enumerate() {
        for (index, _) in owned_by(parameters, owner) {
            send_buffer.extend_from_slice(&parts[index]);
            *count += parts[index].len();
        }
    }
    // Step 2: exchange the parts.
    let mut receive_counts = vec![0; rank_count];
    for (_, parameter) in owned_by(parameters, group.rank()) {
        receive_counts
            .iter_mut()
            .zip(&parameter.parts)
            .for_each(|(count, part)| *count += part.len());
    }
    let received = exchange(group, &send_buffer, &send_counts, &receive_counts)?;
    // Step 3: put the parts of each rank in their places. Each rank has packed them in the order of
    // `parameters`.
    let mut whole_parameters = vec![Vec::new(); parameters.len()];
    let mut remaining = received.as_slice();
    for sender in 0..rank_count {
        for (index, parameter) in owned_by(parameters, group.rank()) {
            let part;
            (part, remaining) = remaining.split_at(parameter.parts[sender].len());
            whole_parameters[index].resize(parameter.numel(), T::default());
            whole_parameters[index][parameter.parts[sender].clone()].copy_from_slice(part);
        }
    }
    Ok(whole_parameters)
}

/// Sends `send_counts[rank]` elements to each rank, one rank after the other, and returns the
/// elements of all ranks in the same order. Collective: one exchange.
fn exchange<T: Element + Default>(
    group: &ProcessGroup,
    send_buffer: &[T],
    send_counts: &[usize],
    receive_counts: &[usize],
) -> Result<Vec<T>> {
    let mut received = vec![T::default(); receive_counts.iter().sum()];
    group.all_to_all_uneven(&mut received, receive_counts, send_buffer, send_counts)?;
    Ok(received)
}

/// Returns this rank's parts of all parameters, from their owners.
/// Collective: one exchange, none without a group.
pub(super) fn scatter_from_owners<T: Element + Default>(
    group: Option<&ProcessGroup>,
    parameters: &[&Owned],
    whole_parameters: Vec<Vec<T>>,
) -> Result<Vec<Vec<T>>> {
    let Some(group) = group else {
        return Ok(whole_parameters);
    };
    let rank = group.rank();
    let rank_count = group.world_size();
    // Step 1: pack each rank's part of the parameters that this rank owns, rank by rank.
    let mut send_buffer = Vec::new();
    let mut send_counts = vec![0; rank_count];
    for (receiver, count) in send_counts.iter_mut().enumerate() {
        for (index, parameter) in owned_by(parameters, rank) {
            send_buffer
                .extend_from_slice(&whole_parameters[index][parameter.parts[receiver].clone()]);
            *count += parameter.parts[receiver].len();
        }
    }
    // Step 2: exchange the parts.
    let mut receive_counts = vec![0; rank_count];
    parameters
        .iter()
        .for_each(|parameter| receive_counts[parameter.owner] += parameter.parts[rank].len());
    let received = exchange(group, &send_buffer, &send_counts, &receive_counts)?;
    // Step 3: tell the parts apart. Each owner has packed them in the order of `parameters`.
    let mut parts = vec![Vec::new(); parameters.len()];
    let mut remaining = received.as_slice();
    for owner in 0..rank_count {
        for (index, parameter) in owned_by(parameters, owner) {
            let part;
            (part, remaining) = remaining.split_at(parameter.parts[rank].len());
            parts[index] = part.to_vec();
        }
    }
    Ok(parts)
}
