//! Updates that need whole parameters: one rank, the owner, gathers a parameter, computes its update, and sends every
//! rank its part.

use std::ops::Range;

use fsdp_comm::{Element, ProcessGroup};

use super::local::{LocalParam, begin_state};
use crate::Result;
use crate::algorithm::Algorithm;

/// A parameter that a step updates as a whole.
pub(super) struct Owned {
    /// The local parameter that it belongs to, by its position in the optimizer.
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

/// Lists the parameters of a group that got a gradient, the same on all ranks; rank 0 owns them until
/// [`assign_owners`]. All trained parameters get their initial state.
pub(super) fn owned_of(
    algorithm: &Algorithm,
    group: Option<&ProcessGroup>,
    locals: &mut [LocalParam],
    indices: &[usize],
) -> Result<Vec<Owned>> {
    let ranks = group.map_or(1, ProcessGroup::world_size);
    let mut all = Vec::new();
    for &index in indices {
        let local = &mut locals[index];
        if !local.requires_grad() || local.handle.grad().is_none() {
            continue;
        }
        begin_state(algorithm, local)?;
        let layout = local.handle.layout();
        for param in local.params().into_iter().filter(|&param| local.handle.has_gradient(param)) {
            let part = |rank| layout.shard_param_info(param, rank).map_or(0..0, |info| info.param_range());
            let (shape, parts) = (layout.shapes()[param].clone(), (0..ranks).map(part).collect());
            all.push(Owned { local: index, param, shape, parts, owner: 0 });
        }
    }
    Ok(all)
}

/// Assigns an owner to each parameter, the same on all ranks. Parameters are assigned in the order of their cost, the
/// most expensive first, each to the rank with the least work so far. Only ranks that have a part of a parameter can
/// own it, because only these have its state after a load.
pub(super) fn assign_owners(all: &mut [Owned], cost: impl Fn(&[usize]) -> u128) {
    let ranks = all.first().map_or(1, |first| first.parts.len());
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(cost(&all[index].shape)));
    let mut loads = vec![0u128; ranks];
    for index in order {
        let holders = (0..ranks).filter(|&rank| !all[index].parts[rank].is_empty());
        let owner = holders.min_by_key(|&rank| loads[rank]).unwrap_or(0);
        loads[owner] += cost(&all[index].shape);
        all[index].owner = owner;
    }
}

/// Turns one rank's error into an error on every rank.
pub(super) fn agree<T>(group: Option<&ProcessGroup>, outcome: Result<T>) -> Result<T> {
    let Some(group) = group else { return outcome };
    match group.agree("Optimizer::step", outcome.as_ref().map(|_| ())) {
        // This rank's own error keeps its type.
        Err(_) if outcome.is_err() => outcome,
        Err(error) => Err(error.into()),
        Ok(()) => outcome,
    }
}

/// Returns the parameters that this rank owns, whole, from the parts of all ranks; the others are empty.
/// Collective: one exchange, none without a group.
pub(super) fn to_owners<T: Element + Default>(
    group: Option<&ProcessGroup>,
    all: &[&Owned],
    parts: Vec<Vec<T>>,
) -> Result<Vec<Vec<T>>> {
    let Some(group) = group else { return Ok(parts) };
    let (rank, ranks) = (group.rank(), group.world_size());
    let of = |owner: usize| all.iter().zip(&parts).filter(move |(one, _)| one.owner == owner);
    let sent: Vec<T> = (0..ranks).flat_map(of).flat_map(|(_, part)| part.iter().copied()).collect();
    let send_counts: Vec<usize> = (0..ranks).map(|owner| of(owner).map(|(_, part)| part.len()).sum()).collect();
    let own = || all.iter().enumerate().filter(|(_, one)| one.owner == rank);
    let receive_counts: Vec<usize> = (0..ranks).map(|from| own().map(|(_, one)| one.parts[from].len()).sum()).collect();
    let mut received = vec![T::default(); receive_counts.iter().sum()];
    group.all_to_all_uneven(&mut received, &receive_counts, &sent, &send_counts)?;
    let mut whole = vec![Vec::new(); all.len()];
    let mut rest = received.as_slice();
    for from in 0..ranks {
        for (index, one) in own() {
            let part;
            (part, rest) = rest.split_at(one.parts[from].len());
            whole[index].resize(one.numel(), T::default());
            whole[index][one.parts[from].clone()].copy_from_slice(part);
        }
    }
    Ok(whole)
}

/// Returns this rank's parts of all parameters, from their owners.
/// Collective: one exchange, none without a group.
pub(super) fn from_owners<T: Element + Default>(
    group: Option<&ProcessGroup>,
    all: &[&Owned],
    whole: Vec<Vec<T>>,
) -> Result<Vec<Vec<T>>> {
    let Some(group) = group else { return Ok(whole) };
    let (rank, ranks) = (group.rank(), group.world_size());
    let own = || all.iter().zip(&whole).filter(|(one, _)| one.owner == rank);
    let part = |to: usize| own().flat_map(move |(one, whole)| whole[one.parts[to].clone()].iter().copied());
    let sent: Vec<T> = (0..ranks).flat_map(part).collect();
    let send_counts: Vec<usize> = (0..ranks).map(|to| own().map(|(one, _)| one.parts[to].len()).sum()).collect();
    let of = |owner: usize| all.iter().enumerate().filter(move |(_, one)| one.owner == owner);
    let receive_counts: Vec<usize> =
        (0..ranks).map(|owner| of(owner).map(|(_, one)| one.parts[rank].len()).sum()).collect();
    let mut received = vec![T::default(); receive_counts.iter().sum()];
    group.all_to_all_uneven(&mut received, &receive_counts, &sent, &send_counts)?;
    let mut parts = vec![Vec::new(); all.len()];
    let mut rest = received.as_slice();
    for owner in 0..ranks {
        for (index, one) in of(owner) {
            let part;
            (part, rest) = rest.split_at(one.parts[rank].len());
            parts[index] = part.to_vec();
        }
    }
    Ok(parts)
}
