//! Steps of Adafactor, whose averages are those of whole rows and columns.

use candle_core::{D, DType, Device, Tensor};
use fsdp_comm::ProcessGroup;
use fsdp_flat::storage::{owned_copy, zeros_on};
use fsdp_ops::step;

use super::local::{BEGUN, LocalParam, LocalState};
use super::on_device::{combine, store};
use super::owners::{
    GroupStep, Owned, Part, Place, agree, assign_owners, gather_to_owners, scatter_from_owners,
};
use crate::algorithm::{AdafactorOptions, WholeUpdate, average_shapes};
use crate::error::Result;
use crate::exchange::device;

/// The number of elements of whole parameters for which a step takes memory at a time, on each
/// rank; more if one parameter has more.
const BATCH_LEN: usize = 1 << 24;

/// Updates the parameters of a group, unless `earlier_outcome`, what this rank has done in the step
/// so far, has failed on some rank. On CPUs values travel, and are computed with, in `f64`: sums do
/// not depend on ranks, and each result is rounded once. On GPUs that is `f32`, or `f64` for
/// parameters of `f64`, and the host waits for nothing. Either takes several times the memory of
/// the parameters, so they are updated in batches.
///
/// An average that has its parameter's shape is sharded with it, as in every optimizer's state;
/// others are whole on every rank. Collectives: where parameters are sharded, one agreement, and
/// for each batch three agreements and two exchanges over the shard group.
pub(super) fn step_factored(
    options: &AdafactorOptions,
    mut step: GroupStep<'_>,
    earlier_outcome: Result<()>,
) -> Result<()> {
    let group = step.shard_group;
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
    let device = step.device();
    let place = (wide_dtype(step, batch), &device);
    // Step 1: this rank's parts: of a parameter, of its gradient, and of each average that is
    // sharded.
    let own_parts = agree(group, read_batch(step, batch, place))?;
    // A parameter is listed once for its values, once for its gradient, and once for each of its
    // sharded averages.
    let mut sent = Vec::with_capacity(own_parts.len());
    for owned in batch {
        sent.extend(std::iter::repeat_n(
            owned,
            2 + sharded_averages(owned).count(),
        ));
    }
    // Step 2: each owner puts its parameters together, and updates them and their averages.
    let gathered = gather_to_owners(group, &sent, own_parts, place)?;
    let updated = agree(group, update_owned(options, step, batch, gathered, place))?;
    // Step 3: every rank gets its parts of the parameters and of the sharded averages, and the
    // other averages whole.
    let averages: Vec<Vec<Owned>> = batch.iter().map(averages_of).collect();
    let mut returned = Vec::with_capacity(updated.len());
    for (owned, averages) in batch.iter().zip(&averages) {
        returned.push(owned);
        returned.extend(averages);
    }
    let mut new_values = scatter_from_owners(group, &returned, updated, place)?.into_iter();
    let mut outcome = Ok(());
    for (owned, averages) in batch.iter().zip(&averages) {
        let values: Vec<Part> = new_values.by_ref().take(1 + averages.len()).collect();
        outcome = outcome.and_then(|()| write_parts(owned, step, averages, &values));
    }
    agree(group, outcome)
}

/// Returns the dtype that values of these parameters travel and are computed in, the same on all
/// ranks.
fn wide_dtype(step: &GroupStep<'_>, batch: &[Owned]) -> DType {
    let is_f64 = |owned: &Owned| step.locals[owned.local].handle.dtype() == DType::F64;
    if step.device().is_cpu() || batch.iter().any(is_f64) {
        DType::F64
    } else {
        DType::F32
    }
}

/// Returns the names of the averages that are sharded as their parameter is, because they have its
/// shape.
fn sharded_averages(owned: &Owned) -> impl Iterator<Item = &'static str> {
    let averages = average_shapes(&owned.shape).into_iter();
    averages.filter_map(|(name, shape)| (shape == owned.shape).then_some(name))
}

/// Returns the averages of a parameter, as parameters that the same rank owns: each rank gets its
/// part of those that are sharded, and all of the others.
fn averages_of(owned: &Owned) -> Vec<Owned> {
    let mut averages = Vec::new();
    for (_, shape) in average_shapes(&owned.shape) {
        let parts = if shape == owned.shape {
            owned.parts.clone()
        } else {
            vec![0..shape.iter().product(); owned.parts.len()]
        };
        averages.push(Owned {
            shape,
            parts,
            ..*owned
        });
    }
    averages
}

/// Returns what [`read_parts`] returns for each parameter of a batch, one after the other. Like it,
/// this prepares the parameters for their change.
fn read_batch(step: &GroupStep<'_>, batch: &[Owned], place: Place<'_>) -> Result<Vec<Part>> {
    let mut parts = Vec::with_capacity(2 * batch.len());
    for owned in batch {
        parts.extend(read_parts(owned, &step.locals[owned.local], place)?);
    }
    Ok(parts)
}

/// Returns this rank's part of a parameter, of its gradient and of its sharded averages, in
/// preparation of its change: waits for readers, releases the gathered copy, and makes the backward
/// of an earlier forward an error (`begin_change`). All parts have the dtype and the device of
/// `place`.
fn read_parts(owned: &Owned, local: &LocalParam, place: Place<'_>) -> Result<Vec<Part>> {
    local.handle.begin_change()?;
    let param = local.handle.local_piece(owned.param)?;
    let numel = param.as_ref().map_or(0, Tensor::elem_count);
    let mut parts = vec![param, local.handle.grad_piece(owned.param)?];
    for name in sharded_averages(owned) {
        // An average that is missing, or of another shape, begins at zero.
        parts.push(match local.live_piece(name) {
            Some(flat) if flat.elem_count() == numel => Some(flat.clone()),
            _ => Some(zeros_on(&[numel], place.0, place.1)?),
        });
    }
    parts
        .into_iter()
        .map(|part| wide(part, place.0))
        .collect::<Result<_>>()
}

/// Returns a part as a tensor of one dimension, in a wider dtype; `None` if it has no elements.
fn wide(part: Part, dtype: DType) -> Result<Part> {
    let part = part.filter(|part| part.elem_count() > 0);
    let wide = part.map(|part| part.detach().flatten_all()?.to_dtype(dtype));
    Ok(wide.transpose()?)
}

/// Returns the average of a parameter that this rank has whole, in a wider dtype; zeros if it is
/// missing or has another shape.
fn whole_average(
    local: &LocalParam,
    name: &str,
    numel: usize,
    (dtype, device): Place<'_>,
) -> Result<Part> {
    let state = local.state.as_ref();
    match state.and_then(|state| state.entries.get(name)) {
        Some(LocalState::Whole(tensor)) if tensor.elem_count() == numel => {
            wide(Some(tensor.clone()), dtype)
        }
        _ => Ok((numel > 0)
            .then(|| zeros_on(&[numel], dtype, device))
            .transpose()?),
    }
}

/// Returns the new values and averages of the parameters of a batch that this rank owns, whole, in
/// the order in which they are sent back; `None` for others. `gathered` has, for each parameter,
/// its values, its gradient, and each average that is sharded.
fn update_owned(
    options: &AdafactorOptions,
    step: &GroupStep<'_>,
    batch: &[Owned],
    gathered: Vec<Part>,
    place: Place<'_>,
) -> Result<Vec<Part>> {
    let mut gathered = gathered.into_iter();
    let mut updated = Vec::new();
    for owned in batch {
        let local = &step.locals[owned.local];
        let (param, grad) = (gathered.next().flatten(), gathered.next().flatten());
        let mut averages = Vec::new();
        for (name, shape) in average_shapes(&owned.shape) {
            averages.push(if shape == owned.shape {
                gathered.next().flatten()
            } else if owned.owner == step.rank() {
                whole_average(local, name, shape.iter().product(), place)?
            } else {
                None
            });
        }
        let update = Update {
            options,
            step: local.state.as_ref().expect(BEGUN).next_step(),
            local,
            shape: &owned.shape,
        };
        match (param, grad) {
            (Some(param), Some(grad)) => {
                updated.extend(update.new_values(&param, &grad, averages)?)
            }
            (param, _) => updated.extend(std::iter::once(param).chain(averages)),
        }
    }
    Ok(updated)
}

/// One update of a whole parameter.
struct Update<'a> {
    options: &'a AdafactorOptions,
    step: f32,
    local: &'a LocalParam,
    shape: &'a [usize],
}

impl Update<'_> {
    /// Returns the parameter and its averages after the update. All are of one dimension.
    fn new_values(&self, param: &Tensor, grad: &Tensor, averages: Vec<Part>) -> Result<Vec<Part>> {
        if param.device().is_cpu() {
            return self.new_values_on_host(param, grad, &averages);
        }
        let (param, grad) = (param.reshape(self.shape)?, grad.reshape(self.shape)?);
        let mut shaped = Vec::with_capacity(averages.len());
        for (average, (_, shape)) in averages.into_iter().zip(average_shapes(self.shape)) {
            // A parameter that has elements has averages.
            shaped.extend(average.map(|average| average.reshape(shape)).transpose()?);
        }
        let (param, averages) = if step::has_kernels(param.device(), param.dtype())? {
            self.numbers().step(&param, &grad, &shaped)?
        } else {
            self.composed(&param, &grad, &shaped)?
        };
        let values = std::iter::once(param).chain(averages);
        values
            .map(|value| Ok(Some(value.flatten_all()?)))
            .collect::<Result<_>>()
    }

    /// Returns the numbers of the update, as kernels take them.
    fn numbers(&self) -> step::Factored {
        let options = self.options;
        let rate = options.rate(self.step.into());
        step::Factored {
            rate: if options.maximize { -rate } else { rate },
            keep: 1.0 - options.lr * options.weight_decay,
            weight: f64::from(self.step).powf(options.beta2_decay),
            eps: options.first_eps(self.local.handle.file_dtype()),
            least_scale: options.eps.1,
            threshold: options.d,
        }
    }

    /// Returns a parameter and its averages, in their shapes, after the update: by candle's
    /// operations, on a GPU without kernels for it.
    fn composed(
        &self,
        param: &Tensor,
        grad: &Tensor,
        averages: &[Tensor],
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let numbers = self.numbers();
        let squares = grad.sqr()?;
        let means = match averages {
            [_, _] => vec![
                squares.mean_keepdim(D::Minus1)?,
                squares.mean_keepdim(D::Minus2)?,
            ],
            _ => vec![squares],
        };
        let mut moved = Vec::with_capacity(averages.len());
        for (average, mean) in averages.iter().zip(means) {
            moved.push(combine(
                average,
                1.0 - numbers.weight,
                &mean,
                numbers.weight,
            )?);
        }
        let estimate = match moved.as_slice() {
            [rows, columns] => {
                let mean = at_least(&rows.mean_keepdim(D::Minus2)?, numbers.eps)?;
                rows.broadcast_mul(columns)?.broadcast_div(&mean)?
            }
            moved => moved[0].clone(),
        };
        let direction = (grad / at_least(&estimate, numbers.eps * numbers.eps)?.sqrt()?)?;
        let scale = at_least(&root_mean_square(param)?, numbers.least_scale)?;
        let alpha = (scale * numbers.rate)?;
        let excess = at_least(&(root_mean_square(&direction)? / numbers.threshold)?, 1.0)?;
        let change = direction.broadcast_mul(&(alpha / excess)?)?;
        Ok((((param * numbers.keep)? - change)?, moved))
    }

    /// Computes the update on the host, in `f64`.
    fn new_values_on_host(
        &self,
        param: &Tensor,
        grad: &Tensor,
        averages: &[Part],
    ) -> Result<Vec<Part>> {
        let mut param = param.to_vec1::<f64>()?;
        let mut averages: Vec<Vec<f64>> = averages
            .iter()
            .map(|average| average.as_ref().map_or(Ok(Vec::new()), Tensor::to_vec1))
            .collect::<candle_core::Result<_>>()?;
        let update = WholeUpdate {
            step: self.step,
            dtype: self.local.handle.file_dtype(),
            shape: self.shape,
            grad: &grad.to_vec1()?,
        };
        self.options.update(&update, &mut param, &mut averages);
        let values = std::iter::once(param).chain(averages);
        values
            .map(|values| {
                let numel = values.len();
                Ok(Some(Tensor::from_vec(values, numel, &Device::Cpu)?))
            })
            .collect::<Result<_>>()
    }
}

/// Returns the elements that are smaller than a number as that number. A NaN stays one, which
/// candle's `maximum` loses on GPUs.
fn at_least(values: &Tensor, least: f64) -> Result<Tensor> {
    // candle chooses between tensors on GPUs only where they have dimensions.
    let shape = values.shape();
    let values = values.flatten_all()?;
    let floor = (values.zeros_like()? + least)?;
    let chosen = values.lt(&floor)?.where_cond(&floor, &values)?;
    Ok(chosen.reshape(shape)?)
}

/// Returns the root of the mean of the squares of all elements.
fn root_mean_square(values: &Tensor) -> Result<Tensor> {
    let squares = device::sum(&values.sqr()?.flatten_all()?)?;
    Ok((squares / values.elem_count() as f64)?.sqrt()?)
}

/// Writes this rank's part of the new values, and replaces the state by the new averages and step.
/// `values` has the new part of the parameter, and then that of each of its `averages`.
fn write_parts(
    owned: &Owned,
    step: &mut GroupStep<'_>,
    averages: &[Owned],
    values: &[Part],
) -> Result<()> {
    let rank = step.rank();
    let local = &mut step.locals[owned.local];
    let piece = local.handle.local_piece(owned.param)?;
    if let (Some(piece), Some(Some(value))) = (piece, values.first()) {
        store(&piece, value)?;
    }
    let mut state = local.state.clone().expect(BEGUN);
    state.step = Some(state.next_step());
    let names = average_shapes(&owned.shape).into_iter();
    for (((name, _), average), value) in names.zip(averages).zip(&values[1..]) {
        let is_sharded = average.shape == owned.shape;
        let shape = if is_sharded {
            vec![average.parts[rank].len()]
        } else {
            average.shape.clone()
        };
        let tensor = state_tensor(value.as_ref(), &shape, local)?;
        let entry = if is_sharded {
            LocalState::Piece(tensor)
        } else {
            LocalState::Whole(tensor)
        };
        state.entries.insert(name.to_owned(), entry);
    }
    local.state = Some(state);
    Ok(())
}

/// Returns a tensor of state of this shape, in the dtype and on the device of a local parameter, in
/// memory of its own. Zeros if there is no value.
fn state_tensor(value: Option<&Tensor>, shape: &[usize], local: &LocalParam) -> Result<Tensor> {
    let dtype = local.handle.dtype();
    let Some(value) = value else {
        return Ok(zeros_on(shape, dtype, local.handle.shard_device())?);
    };
    let tensor = value.reshape(shape)?;
    Ok(if tensor.dtype() == dtype {
        // candle's `copy` would copy the whole storage, which values that were received share.
        owned_copy(&tensor)?
    } else {
        tensor.to_dtype(dtype)?
    })
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
