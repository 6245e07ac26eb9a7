//! Steps of Adafactor, whose averages are those of whole rows and columns.

use candle_core::{DType, Device, Tensor, WithDType};
use fsdp_comm::ProcessGroup;
use fsdp_flat::storage::{HostSliceMut, to_device};
use fsdp_flat::with_float;

use super::local::{LocalParam, LocalState};
use super::owners::{Owned, agree, from_owners, owned_of, to_owners};
use crate::Result;
use crate::algorithm::{AdafactorOptions, Algorithm, Squares};
use crate::parameters::ShardedParameters;

/// The most entries of averages that a parameter has.
const ENTRIES: usize = 2;

/// Updates the parameters of a group. Values travel, and are computed with, in `f64`: sums do not depend on ranks, and each
/// result is rounded once.
///
/// An average that has its parameter's shape is sharded with it, as in every optimizer's state; others are whole on every rank.
/// Collectives: where parameters are sharded, two agreements, three to five exchanges and one all-gather over the shard group.
pub(super) fn step_factored(
    options: &AdafactorOptions,
    algorithm: &Algorithm,
    parameters: &ShardedParameters,
    locals: &mut [LocalParam],
    indices: &[usize],
) -> Result<()> {
    let group = parameters.shard_group();
    let rank = group.map_or(0, ProcessGroup::rank);
    let all = owned_of(algorithm, group, locals, indices, |shape| shape.iter().map(|&size| size as u128).product())?;
    let refs: Vec<&Owned> = all.iter().collect();
    // Step 1: this rank's parts of values and gradients, and the averages that all ranks have.
    let read = all.iter().map(|one| read(one, &locals[one.local])).collect::<Result<Vec<_>>>();
    let mut parts = agree(group, read)?;
    // Step 2: each owner puts its parameters together, and updates them and their averages.
    let mut params = to_owners(group, &refs, parts.iter_mut().map(|part| std::mem::take(&mut part.param)).collect())?;
    let grads = to_owners(group, &refs, parts.iter_mut().map(|part| std::mem::take(&mut part.grad)).collect())?;
    for entry in 0..ENTRIES {
        join_sharded(group, entry, &all, &mut parts)?;
    }
    for (((one, param), grad), part) in all.iter().zip(&mut params).zip(&grads).zip(&mut parts) {
        if one.owner == rank {
            let dtype = parameters.file_dtype(&locals[one.local].handle)?;
            options.update(next_step(&locals[one.local]), dtype, &one.shape, param, grad, &mut part.squares);
        }
    }
    // Step 3: every rank gets its parts of the values, and all averages.
    let params = from_owners(group, &refs, params)?;
    let mut squares: Vec<Squares> = parts.into_iter().map(|part| part.squares).collect();
    if let Some(group) = group {
        share(group, &all, &mut squares)?;
    }
    let written = all.iter().zip(params).zip(squares);
    let written = written.map(|((one, param), squares)| write(one, rank, &mut locals[one.local], &param, &squares));
    agree(group, written.collect::<Result<()>>())
}

/// A rank's part of a parameter, before a step.
struct Part {
    param: Vec<f64>,
    grad: Vec<f64>,
    /// The averages that are whole on every rank; the others are zero until they are joined.
    squares: Squares,
    /// The part of each average that is sharded; empty for those that are not.
    sharded: [Vec<f64>; ENTRIES],
}

fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    let tensor = tensor.to_device(&Device::Cpu)?.detach();
    Ok(tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}

fn read(one: &Owned, local: &LocalParam) -> Result<Part> {
    local.handle.begin_change()?;
    let piece = |piece: Option<Tensor>| piece.map_or(Ok(Vec::new()), |piece| values(&piece));
    let (param, grad) = (piece(local.handle.local_piece(one.param)?)?, piece(local.handle.grad_piece(one.param)?)?);
    let squares = Squares::zeros(&one.shape);
    let mut part = Part { grad, squares: squares.clone(), sharded: Default::default(), param };
    for (entry, (name, zeros, shape)) in squares.entries(&one.shape).into_iter().enumerate() {
        let saved = local.state.as_ref().and_then(|state| state.entries.get(name));
        match saved {
            _ if shape == one.shape => {
                let flat = local.live_piece(name).filter(|flat| flat.elem_count() == part.param.len());
                part.sharded[entry] = flat.map_or_else(|| Ok(vec![0.0; part.param.len()]), values)?;
            }
            Some(LocalState::Whole(tensor)) if tensor.elem_count() == zeros.len() => {
                part.squares.set_entry(entry, &values(tensor)?);
            }
            _ => {}
        }
    }
    Ok(part)
}

/// Puts the averages together on their owners that are sharded with their parameters, for one of the entries.
/// Collective: one exchange, none if there are none.
fn join_sharded(group: Option<&ProcessGroup>, entry: usize, all: &[Owned], parts: &mut [Part]) -> Result<()> {
    let is_sharded = |one: &Owned| Squares::shapes(&one.shape).get(entry).is_some_and(|(_, shape)| *shape == one.shape);
    let chosen: Vec<usize> = (0..all.len()).filter(|&index| is_sharded(&all[index])).collect();
    if chosen.is_empty() {
        return Ok(());
    }
    let owned: Vec<&Owned> = chosen.iter().map(|&index| &all[index]).collect();
    let sharded = chosen.iter().map(|&index| std::mem::take(&mut parts[index].sharded[entry])).collect();
    let rank = group.map_or(0, ProcessGroup::rank);
    for (index, whole) in chosen.into_iter().zip(to_owners(group, &owned, sharded)?) {
        if all[index].owner == rank {
            parts[index].squares.set_entry(entry, &whole);
        }
    }
    Ok(())
}

fn next_step(local: &LocalParam) -> f32 {
    local.state.as_ref().and_then(|state| state.step).unwrap_or(0.0) + 1.0
}

/// Gives the averages of each parameter, as its owner has them, to all ranks. Collective: one all-gather.
fn share(group: &ProcessGroup, all: &[Owned], squares: &mut [Squares]) -> Result<()> {
    let numel = |owner: usize| {
        let of_owner = all.iter().filter(move |one| one.owner == owner);
        of_owner.map(|one| Squares::zeros(&one.shape).values().len()).sum()
    };
    let counts: Vec<usize> = (0..group.world_size()).map(numel).collect();
    let owned = all.iter().zip(&*squares).filter(|(one, _)| one.owner == group.rank());
    let own: Vec<f64> = owned.flat_map(|(_, squares)| squares.values()).collect();
    let mut received = vec![0.0; counts.iter().sum()];
    group.all_gather_uneven_into(&mut received, &counts, &own)?;
    let mut rest = received.as_slice();
    for owner in 0..group.world_size() {
        for (one, squares) in all.iter().zip(squares.iter_mut()).filter(|(one, _)| one.owner == owner) {
            let values;
            (values, rest) = rest.split_at(Squares::zeros(&one.shape).values().len());
            squares.set(values);
        }
    }
    Ok(())
}

/// Writes this rank's part of the new values, and the new averages.
fn write(one: &Owned, rank: usize, local: &mut LocalParam, param: &[f64], squares: &Squares) -> Result<()> {
    if let Some(piece) = local.handle.local_piece(one.param)? {
        with_float!(piece.dtype(), T => {
            let mut piece = HostSliceMut::<T>::write(&piece)?;
            piece.iter_mut().zip(param).for_each(|(to, from)| *to = <T as WithDType>::from_f64(*from));
            piece.finish()?;
        }, else ());
    }
    let mut state = local.state.clone().unwrap_or_default();
    state.step = Some(next_step(local));
    for (name, values, shape) in squares.entries(&one.shape) {
        let is_sharded = shape == one.shape;
        let values = if is_sharded { &values[one.parts[rank].clone()] } else { values };
        let shape = if is_sharded { vec![values.len()] } else { shape };
        let values = Tensor::from_slice(values, shape, &Device::Cpu)?.to_dtype(local.handle.dtype())?;
        let values = to_device(&values, local.handle.shard_device())?;
        let entry = if is_sharded { LocalState::Piece(values) } else { LocalState::Whole(values) };
        state.entries.insert(name.to_owned(), entry);
    }
    local.state = Some(state);
    Ok(())
}
