//! Steps of Adafactor, whose averages are those of whole rows and columns.

use candle_core::{D, DType, Device, Tensor, WithDType};
use fsdp_comm::ProcessGroup;
use fsdp_flat::storage::{HostSliceMut, to_device, zeros_on};
use fsdp_flat::with_float;

use super::local::{BEGUN, LocalParam, LocalState};
use super::on_device::{store, widen};
use super::owners::{
    GroupStep, Owned, agree, assign_owners, gather_to_owners, scatter_from_owners,
};
use crate::algorithm::{AdafactorOptions, Averages, WholeUpdate, average_shapes, zero_averages};
use crate::error::Result;
use crate::exchange::device;

/// The largest number of averages that a parameter has.
const MAX_AVERAGES: usize = 2;

/// The number of elements of whole parameters for which a step takes memory at a time, on each
/// rank; more if one parameter has more.
const BATCH_LEN: usize = 1 << 24;

/// Updates the parameters of a group, unless `earlier_outcome`, what this rank has done in the step
/// so far, has failed on some rank. Values travel, and are computed with, in `f64`: sums do not
/// depend on ranks, and each result is rounded once. That takes many times the memory of the
/// parameters, so they are updated in batches.
///
/// An average that has its parameter's shape is sharded with it, as in every optimizer's state;
/// others are whole on every rank. Collectives: where parameters are sharded, one agreement; for
/// each batch two agreements, three to five exchanges and one all-gather over the shard group.
pub(super) fn step_factored(
    options: &AdafactorOptions,
    mut step: GroupStep<'_>,
    earlier_outcome: Result<()>,
) -> Result<()> {
    let group = step.shard_group;
    if group.is_none() && step.is_on_gpu() {
        return earlier_outcome.and_then(|()| step_on_gpu(options, &mut step));
    }
    let prepared = earlier_outcome.and_then(|()| Ok((step.list_owned()?, ())));
    let (mut parameters, ()) = step.agree_on_parameters(prepared)?;
    // Each rank updates about as much of a batch as any other. All ranks cut the same batches,
    // because only shapes decide.
    let largest = parameters
        .iter()
        .map(Owned::numel)
        .fold(BATCH_LEN, usize::max);
    let limit = largest.saturating_mul(group.map_or(1, ProcessGroup::world_size));
    let mut remaining = parameters.as_mut_slice();
    loop {
        let len = batch_len(remaining.iter().map(Owned::numel), limit);
        let (batch, later_batches) = remaining.split_at_mut(len);
        assign_owners(batch, |shape| {
            shape.iter().map(|&size| size as u128).product()
        });
        step_batch(options, &mut step, batch)?;
        if later_batches.is_empty() {
            return Ok(());
        }
        remaining = later_batches;
    }
}

/// Updates the parameters of a group, all of which this rank has whole on its GPU, by candle's
/// operations: in `f32`, or in the parameters' dtype if that is wider. The host waits for nothing.
fn step_on_gpu(options: &AdafactorOptions, step: &mut GroupStep<'_>) -> Result<()> {
    for owned in step.list_owned()? {
        let local = &mut step.locals[owned.local];
        local.handle.begin_change()?;
        let mut averages = averages_on_gpu(&owned, local)?;
        if let (Some(param), Some(grad)) = (
            local.handle.local_piece(owned.param)?,
            local.handle.grad_piece(owned.param)?,
        ) {
            let update = GpuUpdate {
                options,
                step: next_step(local).into(),
                eps: options.first_eps(local.handle.file_dtype()),
            };
            let shape = owned.shape.as_slice();
            let (whole, grad) = (
                widen(&param)?.reshape(shape)?,
                widen(&grad)?.reshape(shape)?,
            );
            averages = update.new_averages(&averages, &grad)?;
            let new_param = update.new_param(&whole, &grad, &averages)?;
            store(&param, &new_param.flatten_all()?)?;
        }
        let mut state = local.state.clone().expect(BEGUN);
        state.step = Some(next_step(local));
        for ((name, shape), average) in average_shapes(&owned.shape).into_iter().zip(averages) {
            let average = average.to_dtype(local.handle.dtype())?;
            let entry = if shape == owned.shape {
                LocalState::Piece(average.flatten_all()?)
            } else {
                LocalState::Whole(average)
            };
            state.entries.insert(name.to_owned(), entry);
        }
        local.state = Some(state);
    }
    Ok(())
}

/// Returns the averages of a parameter on a GPU, in their shapes: zeros where there are none.
fn averages_on_gpu(owned: &Owned, local: &LocalParam) -> Result<Vec<Tensor>> {
    let mut averages = Vec::with_capacity(MAX_AVERAGES);
    for (name, shape) in average_shapes(&owned.shape) {
        let saved = local
            .state
            .as_ref()
            .and_then(|state| state.entries.get(name));
        let numel: usize = shape.iter().product();
        averages.push(match saved {
            Some(LocalState::Piece(tensor) | LocalState::Whole(tensor))
                if tensor.elem_count() == numel =>
            {
                widen(tensor)?.reshape(shape)?
            }
            _ => widen(&zeros_on(
                &shape,
                local.handle.dtype(),
                local.handle.shard_device(),
            )?)?,
        });
    }
    Ok(averages)
}

/// The numbers of one update on a GPU.
struct GpuUpdate<'a> {
    options: &'a AdafactorOptions,
    step: f64,
    /// The first `eps`.
    eps: f64,
}

impl GpuUpdate<'_> {
    /// Returns the averages after a step with this gradient.
    fn new_averages(&self, averages: &[Tensor], grad: &Tensor) -> Result<Vec<Tensor>> {
        let squares = grad.sqr()?;
        let means = match averages {
            [_, _] => vec![
                squares.mean_keepdim(D::Minus1)?,
                squares.mean_keepdim(D::Minus2)?,
            ],
            _ => vec![squares],
        };
        let weight = self.step.powf(self.options.beta2_decay);
        let mut moved = Vec::with_capacity(averages.len());
        for (average, mean) in averages.iter().zip(means) {
            moved.push(((average * (1.0 - weight))? + (mean * weight)?)?);
        }
        Ok(moved)
    }

    /// Returns the parameter after a step with this gradient, whose averages are new already.
    fn new_param(&self, param: &Tensor, grad: &Tensor, averages: &[Tensor]) -> Result<Tensor> {
        let options = self.options;
        let rate = options.rate(self.step);
        let alpha = (root_mean_square(param)?.maximum(options.eps.1)? * rate)?;
        let estimate = match averages {
            [rows, columns] => {
                let mean = rows.mean_keepdim(D::Minus2)?.maximum(self.eps)?;
                rows.broadcast_mul(columns)?.broadcast_div(&mean)?
            }
            averages => averages[0].clone(),
        };
        let update = (grad / estimate.maximum(self.eps * self.eps)?.sqrt()?)?;
        let excess = (root_mean_square(&update)? / options.d)?.maximum(1.0)?;
        let mut change = update.broadcast_mul(&(alpha / excess)?)?;
        if options.maximize {
            change = change.neg()?;
        }
        let kept = (param * (1.0 - options.lr * options.weight_decay))?;
        Ok((kept - change)?)
    }
}

/// Returns the root of the mean of the squares of all elements.
fn root_mean_square(values: &Tensor) -> Result<Tensor> {
    let squares = device::sum(&values.sqr()?.flatten_all()?)?;
    Ok((squares / values.elem_count() as f64)?.sqrt()?)
}

/// Returns the number of parameters of the first batch, which has at most `limit` elements but at
/// least one parameter, if there are any. `numels` are the numbers of elements of the parameters.
fn batch_len(numels: impl Iterator<Item = usize>, limit: usize) -> usize {
    let mut total = 0usize;
    let batch = numels.enumerate().take_while(|(index, numel)| {
        total = total.saturating_add(*numel);
        *index == 0 || total <= limit
    });
    batch.count()
}

/// Updates some of the parameters of a group. Collective where parameters are sharded: see
/// [`step_factored`].
fn step_batch(options: &AdafactorOptions, step: &mut GroupStep<'_>, batch: &[Owned]) -> Result<()> {
    let group = step.shard_group;
    let rank = step.rank();
    let references: Vec<&Owned> = batch.iter().collect();
    // Step 1: this rank's parts of values and gradients, and the averages that all ranks have.
    let own_parts = batch
        .iter()
        .map(|owned| read_part(owned, &step.locals[owned.local]))
        .collect::<Result<Vec<_>>>();
    let mut parts = agree(group, own_parts)?;
    // Step 2: each owner puts its parameters together, and updates them and their averages.
    let own_params = parts.iter_mut().map(|part| std::mem::take(&mut part.param));
    let mut params = gather_to_owners(group, &references, own_params.collect())?;
    let own_grads = parts.iter_mut().map(|part| std::mem::take(&mut part.grad));
    let grads = gather_to_owners(group, &references, own_grads.collect())?;
    for average_index in 0..MAX_AVERAGES {
        gather_sharded_averages(group, average_index, batch, &mut parts)?;
    }
    for (((owned, param), grad), part) in batch.iter().zip(&mut params).zip(&grads).zip(&mut parts)
    {
        if owned.owner == rank {
            let local = &step.locals[owned.local];
            let update = WholeUpdate {
                step: next_step(local),
                dtype: local.handle.file_dtype(),
                shape: &owned.shape,
                grad,
            };
            options.update(&update, param, &mut part.averages);
        }
    }
    drop(grads);
    // Step 3: every rank gets its parts of the values, and all averages.
    let updated_params = scatter_from_owners(group, &references, params)?;
    let mut averages: Vec<Averages> = parts.into_iter().map(|part| part.averages).collect();
    if let Some(group) = group {
        share_averages(group, batch, &mut averages)?;
    }
    let mut new_values = batch.iter().zip(updated_params).zip(averages);
    let outcome = new_values.try_for_each(|((owned, param), averages)| {
        let local = &mut step.locals[owned.local];
        write_part(owned, rank, local, &param, &averages)
    });
    agree(group, outcome)
}

/// A rank's part of a parameter, before a step.
struct OwnPart {
    param: Vec<f64>,
    grad: Vec<f64>,
    /// The averages that are whole on every rank; the others are zero until they are joined.
    averages: Averages,
    /// This rank's part of each average that is sharded; empty for an average that is not sharded.
    sharded: [Vec<f64>; MAX_AVERAGES],
}

/// Returns a tensor's elements as `f64`.
fn f64_elements(tensor: &Tensor) -> Result<Vec<f64>> {
    let tensor = tensor.to_device(&Device::Cpu)?.detach();
    Ok(tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}

/// Returns a tensor's elements; none if there is no tensor.
fn f64_elements_or_empty(piece: Option<Tensor>) -> Result<Vec<f64>> {
    piece.map_or(Ok(Vec::new()), |piece| f64_elements(&piece))
}

/// Reads this rank's part of a parameter, of its gradient and of its averages, in preparation of
/// its change: waits for readers, releases the gathered copy, and makes the backward of an earlier
/// forward an error (`begin_change`).
fn read_part(owned: &Owned, local: &LocalParam) -> Result<OwnPart> {
    local.handle.begin_change()?;
    let mut part = OwnPart {
        param: f64_elements_or_empty(local.handle.local_piece(owned.param)?)?,
        grad: f64_elements_or_empty(local.handle.grad_piece(owned.param)?)?,
        averages: zero_averages(&owned.shape),
        sharded: Default::default(),
    };
    for (index, (name, shape)) in average_shapes(&owned.shape).into_iter().enumerate() {
        // An average that is missing, or of another shape, begins at zero.
        let saved = local
            .state
            .as_ref()
            .and_then(|state| state.entries.get(name));
        if shape == owned.shape {
            part.sharded[index] = match local.live_piece(name) {
                Some(flat) if flat.elem_count() == part.param.len() => f64_elements(flat)?,
                _ => vec![0.0; part.param.len()],
            };
        } else if let Some(LocalState::Whole(tensor)) = saved
            && tensor.elem_count() == part.averages[index].len()
        {
            part.averages[index] = f64_elements(tensor)?;
        }
    }
    Ok(part)
}

/// Gathers the sharded averages at one index of the entries: each owner gets the whole averages of
/// its parameters.
/// Collective: one exchange, or none if no average is sharded.
fn gather_sharded_averages(
    group: Option<&ProcessGroup>,
    average_index: usize,
    batch: &[Owned],
    parts: &mut [OwnPart],
) -> Result<()> {
    let mut chosen = Vec::new();
    for (index, parameter) in batch.iter().enumerate() {
        let shapes = average_shapes(&parameter.shape);
        if shapes
            .get(average_index)
            .is_some_and(|(_, shape)| *shape == parameter.shape)
        {
            chosen.push(index);
        }
    }
    if chosen.is_empty() {
        return Ok(());
    }
    // All ranks choose the same parameters, because only shapes decide.
    let owned: Vec<&Owned> = chosen.iter().map(|&index| &batch[index]).collect();
    let sharded = chosen
        .iter()
        .map(|&index| std::mem::take(&mut parts[index].sharded[average_index]))
        .collect();
    let rank = group.map_or(0, ProcessGroup::rank);
    for (index, average) in chosen
        .into_iter()
        .zip(gather_to_owners(group, &owned, sharded)?)
    {
        if batch[index].owner == rank {
            parts[index].averages[average_index] = average;
        }
    }
    Ok(())
}

/// Returns the number of a parameter's next update, counted from 1.
fn next_step(local: &LocalParam) -> f32 {
    local
        .state
        .as_ref()
        .and_then(|state| state.step)
        .unwrap_or(0.0)
        + 1.0
}

/// Gives the averages of each parameter, as its owner has them, to all ranks. Collective: one
/// all-gather.
fn share_averages(group: &ProcessGroup, batch: &[Owned], averages: &mut [Averages]) -> Result<()> {
    // The sizes follow from the shapes, so no rank has to send its own.
    let mut counts = vec![0; group.world_size()];
    let mut own_averages: Vec<f64> = Vec::new();
    for (parameter, elements) in batch
        .iter()
        .zip(averages.iter().map(|lists| lists.concat()))
    {
        counts[parameter.owner] += elements.len();
        if parameter.owner == group.rank() {
            own_averages.extend(elements);
        }
    }
    let mut received = vec![0.0; counts.iter().sum()];
    group.all_gather_uneven_into(&mut received, &counts, &own_averages)?;
    let mut remaining = received.as_slice();
    for owner in 0..group.world_size() {
        let owned = batch
            .iter()
            .zip(averages.iter_mut())
            .filter(|(parameter, _)| parameter.owner == owner);
        for average in owned.flat_map(|(_, averages)| averages) {
            let elements;
            (elements, remaining) = remaining.split_at(average.len());
            average.copy_from_slice(elements);
        }
    }
    Ok(())
}

/// Writes this rank's part of the new values, and replaces the state by the new averages and step.
fn write_part(
    owned: &Owned,
    rank: usize,
    local: &mut LocalParam,
    param: &[f64],
    averages: &[Vec<f64>],
) -> Result<()> {
    if let Some(piece) = local.handle.local_piece(owned.param)? {
        with_float!(piece.dtype(), T => {
            let mut piece = HostSliceMut::<T>::write(&piece)?;
            for (element, value) in piece.iter_mut().zip(param) {
                *element = <T as WithDType>::from_f64(*value);
            }
            piece.finish()?;
        });
    }
    let mut state = local.state.clone().expect(BEGUN);
    state.step = Some(next_step(local));
    for ((name, shape), average) in average_shapes(&owned.shape).into_iter().zip(averages) {
        // An average of the parameter's own shape is sharded as the parameter is.
        let entry = if shape == owned.shape {
            let own_part = &average[owned.parts[rank].clone()];
            LocalState::Piece(state_tensor(own_part, &[own_part.len()], local)?)
        } else {
            LocalState::Whole(state_tensor(average, &shape, local)?)
        };
        state.entries.insert(name.to_owned(), entry);
    }
    local.state = Some(state);
    Ok(())
}

/// Makes a tensor of state in the dtype and on the device of a local parameter.
fn state_tensor(values: &[f64], shape: &[usize], local: &LocalParam) -> Result<Tensor> {
    let tensor = Tensor::from_slice(values, shape, &Device::Cpu)?.to_dtype(local.handle.dtype())?;
    Ok(to_device(&tensor, local.handle.shard_device())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cuts parameters of these sizes into batches.
    fn batches(mut numels: &[usize], limit: usize) -> Vec<&[usize]> {
        let mut batches = Vec::new();
        while !numels.is_empty() {
            let batch;
            (batch, numels) = numels.split_at(batch_len(numels.iter().copied(), limit));
            batches.push(batch);
        }
        batches
    }

    #[test]
    fn a_batch_has_as_many_parameters_as_fit_and_at_least_one() {
        assert_eq!(batches(&[3, 4, 5, 1], 8), [&[3, 4][..], &[5, 1]]);
        assert_eq!(
            batches(&[9, 1, usize::MAX, 0, 2], 8),
            [&[9][..], &[1], &[usize::MAX], &[0, 2]]
        );
        assert_eq!(batches(&[0, 0, 0], 0), [&[0, 0, 0][..]]);
        assert_eq!(batch_len(std::iter::empty(), 8), 0);
    }
}
