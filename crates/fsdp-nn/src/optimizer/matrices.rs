//! Steps of Muon, which needs each matrix whole.

use candle_core::{DType, Tensor};
use fsdp_flat::storage::{HostSlice, HostSliceMut, Scalar};
use fsdp_flat::with_float;
use half::bf16;

use super::local::{BEGUN, LocalParam, LocalState};
use super::newton_schulz::{orthogonalize, orthogonalize_tensor};
use super::on_device::{store, widen};
use super::owners::{
    GroupStep, Owned, agree, assign_owners, gather_to_owners, scatter_from_owners,
};
use crate::algorithm::MuonOptions;
use crate::error::Result;

/// The key of the momentum in the state.
const MOMENTUM: &str = "momentum_buffer";

/// Updates the matrices of a group, unless `earlier_outcome`, what this rank has done in the step
/// so far, has failed on some rank. Collectives: where parameters are sharded, two agreements and
/// two exchanges over the shard group.
pub(super) fn step_matrices(
    options: &MuonOptions,
    mut step: GroupStep<'_>,
    earlier_outcome: Result<()>,
) -> Result<()> {
    let group = step.shard_group;
    if group.is_none() && step.is_on_gpu() {
        return earlier_outcome.and_then(|()| step_on_gpu(options, &mut step));
    }
    // Step 1: each rank updates the momentum of its parts, and computes their directions.
    let prepared = earlier_outcome.and_then(|()| compute_directions(options, &mut step));
    let (matrices, parts) = step.agree_on_parameters(prepared)?;
    // Step 2: each owner gathers the directions of its matrices, orthogonalizes them, and sends the
    // parts back.
    let references: Vec<&Owned> = matrices.iter().collect();
    let gathered = gather_to_owners(group, &references, parts)?;
    let orthogonal = agree(
        group,
        orthogonalize_owned(options, &matrices, gathered, &step),
    )?;
    let parts = scatter_from_owners(group, &references, orthogonal)?;
    // Step 3: each rank updates its parts.
    for (matrix, direction) in matrices.iter().zip(&parts) {
        descend(options, matrix, &step.locals[matrix.local], direction)?;
    }
    Ok(())
}

/// Updates the momentum of this rank's parts. Returns the matrices that got a gradient, with an
/// owner each, and the directions of the parts.
fn compute_directions(
    options: &MuonOptions,
    step: &mut GroupStep<'_>,
) -> Result<(Vec<Owned>, Vec<Vec<bf16>>)> {
    let mut matrices = step.list_owned()?;
    assign_owners(&mut matrices, multiplication_cost);
    let mut directions = Vec::with_capacity(matrices.len());
    for matrix in &matrices {
        directions.push(update_momentum(
            options,
            matrix,
            &mut step.locals[matrix.local],
        )?);
    }
    Ok((matrices, directions))
}

/// Updates the matrices of a group, all of which this rank has whole on its GPU. The host waits for
/// nothing.
fn step_on_gpu(options: &MuonOptions, step: &mut GroupStep<'_>) -> Result<()> {
    for matrix in step.list_owned()? {
        let local = &mut step.locals[matrix.local];
        local.handle.begin_change()?;
        let (Some(param), Some(grad), Some(momentum)) = (
            local.handle.local_piece(matrix.param)?,
            local.handle.grad_piece(matrix.param)?,
            momentum_of(local, matrix.param)?,
        ) else {
            continue;
        };
        let grad = widen(&grad)?;
        let average = lerp(&widen(&momentum)?, &grad, 1.0 - options.momentum)?;
        store(&momentum, &average)?;
        let direction = if options.nesterov {
            lerp(&grad, &average, options.momentum)?
        } else {
            average
        };
        let [rows, columns] = rows_and_columns(&matrix.shape);
        let direction = direction.reshape((rows, columns))?.to_dtype(DType::BF16)?;
        let direction = orthogonalize_tensor(options, &direction)?.flatten_all()?;
        let wide = widen(&param)?;
        let descent = direction.to_dtype(wide.dtype())? * options.adjusted_lr([rows, columns]);
        let kept = (wide * (1.0 - options.lr * options.weight_decay))?;
        store(&param, &(kept - descent?)?)?;
    }
    Ok(())
}

/// Moves from one tensor towards another by a weight.
fn lerp(start: &Tensor, end: &Tensor, weight: f64) -> Result<Tensor> {
    Ok(((start * (1.0 - weight))? + (end * weight)?)?)
}

/// Returns this rank's part of the momentum of a matrix, of zeros if there was none; `None` if the
/// rank has no part of the matrix.
fn momentum_of(local: &mut LocalParam, param: usize) -> Result<Option<Tensor>> {
    let segment = local.segment(param);
    if segment.len == 0 {
        return Ok(None);
    }
    // State of another algorithm may have been loaded, which has no momentum.
    if local.live_piece(MOMENTUM).is_none() {
        let fresh = LocalState::Piece(local.zeros()?);
        let state = local.state.as_mut().expect(BEGUN);
        state.entries.insert(MOMENTUM.to_owned(), fresh);
    }
    let flat = local.live_piece(MOMENTUM);
    Ok(flat
        .map(|flat| flat.narrow(0, segment.start, segment.len))
        .transpose()?)
}

/// Returns the number of multiplications that it takes to orthogonalize a matrix of this `shape`,
/// up to a constant factor.
fn multiplication_cost(shape: &[usize]) -> u128 {
    let [rows, columns] = rows_and_columns(shape).map(|size| size as u128);
    rows * columns * rows.min(columns)
}

/// Returns the rows and columns of a matrix. Groups of Muon hold only matrices.
fn rows_and_columns(shape: &[usize]) -> [usize; 2] {
    match *shape {
        [rows, columns] => [rows, columns],
        _ => unreachable!("an optimizer refuses parameters for Muon that are not matrices"),
    }
}

/// Updates the momentum of this rank's part of a matrix, and returns the part's direction.
fn update_momentum(
    options: &MuonOptions,
    matrix: &Owned,
    local: &mut LocalParam,
) -> Result<Vec<bf16>> {
    // The momentum changes before the parameter does, and a backward of an earlier forward must not
    // run in between.
    local.handle.begin_change()?;
    let (Some(momentum), Some(grad)) = (
        momentum_of(local, matrix.param)?,
        local.handle.grad_piece(matrix.param)?,
    ) else {
        return Ok(Vec::new());
    };
    with_float!(grad.dtype(), T => {
        let grad = HostSlice::<T>::read(&grad)?;
        let mut momentum = HostSliceMut::<T>::write(&momentum)?;
        let direction = options.update_momentum(&grad, &mut momentum);
        momentum.finish()?;
        Ok(direction.into_iter().map(to_bf16::<T>).collect())
    })
}

fn to_bf16<T: Scalar>(value: T) -> bf16 {
    bf16::from_f64(candle_core::WithDType::to_f64(value))
}

/// Steps this rank's part of a matrix.
fn descend(
    options: &MuonOptions,
    matrix: &Owned,
    local: &LocalParam,
    direction: &[bf16],
) -> Result<()> {
    let Some(param) = local
        .handle
        .local_piece(matrix.param)?
        .filter(|_| !direction.is_empty())
    else {
        return Ok(());
    };
    with_float!(param.dtype(), T => {
        let mut param = HostSliceMut::<T>::write(&param)?;
        options.descend(rows_and_columns(&matrix.shape), &mut param, direction);
        Ok(param.finish()?)
    })
}

/// Orthogonalizes the gathered directions of the matrices that this rank owns. The others are left
/// as they are.
fn orthogonalize_owned(
    options: &MuonOptions,
    matrices: &[Owned],
    gathered: Vec<Vec<bf16>>,
    step: &GroupStep<'_>,
) -> Result<Vec<Vec<bf16>>> {
    let directions = matrices.iter().zip(gathered).map(|(matrix, direction)| {
        if matrix.owner == step.rank() {
            Ok(orthogonalize(
                options,
                &direction,
                rows_and_columns(&matrix.shape),
                step.locals[matrix.local].handle.shard_device(),
            )?)
        } else {
            Ok(direction)
        }
    });
    directions.collect()
}
