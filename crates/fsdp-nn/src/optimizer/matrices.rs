//! Steps of Muon, which needs each matrix whole.

use candle_core::{DType, Device, Tensor};
use fsdp_flat::storage::{HostSlice, HostSliceMut, Scalar};
use fsdp_flat::with_float;
use half::bf16;

use super::local::{BEGUN, LocalParam, LocalState};
use super::modes::move_towards;
use super::newton_schulz::orthogonalize;
use super::on_device::{combine, store, widen};
use super::owners::{
    GroupStep, Owned, Part, agree, assign_owners, gather_to_owners, scatter_from_owners,
};
use crate::algorithm::MuonOptions;
use crate::error::Result;

/// The key of the momentum in the state.
const MOMENTUM: &str = "momentum_buffer";

/// Updates the matrices of a group, unless `earlier_outcome`, what this rank has done in the step
/// so far, has failed on some rank. On a GPU the host waits for nothing. Collectives: where
/// parameters are sharded, two agreements and two exchanges over the shard group.
pub(super) fn step_matrices(
    options: &MuonOptions,
    mut step: GroupStep<'_>,
    earlier_outcome: Result<()>,
) -> Result<()> {
    let group = step.shard_group;
    let device = step.device();
    let place = (DType::BF16, &device);
    // Step 1: each rank computes the directions of its parts.
    let prepared = earlier_outcome.and_then(|()| compute_directions(options, &mut step));
    let (matrices, parts) = step.agree_on_parameters(prepared)?;
    // Step 2: each owner gathers the directions of its matrices, orthogonalizes them, and sends the
    // parts back.
    let references: Vec<&Owned> = matrices.iter().collect();
    let gathered = gather_to_owners(group, &references, parts, place)?;
    let orthogonal = agree(group, orthogonalize_owned(options, &matrices, gathered))?;
    let parts = scatter_from_owners(group, &references, orthogonal, place)?;
    // Step 3: each rank updates its parts and their momentum. Until here nothing has changed, so
    // that a step that another rank could not make can be made again.
    for (matrix, direction) in matrices.iter().zip(&parts) {
        if let Some(direction) = direction {
            let local = &mut step.locals[matrix.local];
            descend(options, matrix, local, direction)?;
            update_momentum(options, local, matrix.param)?;
        }
    }
    Ok(())
}

/// Returns the matrices that got a gradient, with an owner each, and the directions of this rank's
/// parts.
fn compute_directions(
    options: &MuonOptions,
    step: &mut GroupStep<'_>,
) -> Result<(Vec<Owned>, Vec<Part>)> {
    let mut matrices = step.list_owned()?;
    assign_owners(&mut matrices, multiplication_cost);
    let mut directions = Vec::with_capacity(matrices.len());
    for matrix in &matrices {
        let local = &mut step.locals[matrix.local];
        local.handle.begin_change()?;
        let (Some(momentum), Some(grad)) = (
            momentum_of(local, matrix.param)?,
            local.handle.grad_piece(matrix.param)?,
        ) else {
            directions.push(None);
            continue;
        };
        directions.push(Some(direction_of(options, &momentum, &grad)?));
    }
    Ok((matrices, directions))
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

/// Returns the direction of this rank's part of a matrix, in `bf16`. The momentum stays as it is.
fn direction_of(options: &MuonOptions, momentum: &Tensor, grad: &Tensor) -> Result<Tensor> {
    if grad.device().is_cpu() {
        let direction: Vec<bf16> = with_float!(grad.dtype(), T => {
            let grad = HostSlice::<T>::read(grad)?;
            let momentum = HostSlice::<T>::read(momentum)?;
            let direction = options.direction(&grad, &momentum);
            direction.into_iter().map(to_bf16::<T>).collect()
        });
        let numel = direction.len();
        return Ok(Tensor::from_vec(direction, numel, &Device::Cpu)?);
    }
    let grad = widen(grad)?;
    let average = average_on_device(options, momentum, &grad)?;
    let direction = if options.nesterov {
        combine(&grad, 1.0 - options.momentum, &average, options.momentum)?
    } else {
        average
    };
    Ok(direction.to_dtype(DType::BF16)?)
}

/// Updates the momentum of this rank's part of a matrix.
fn update_momentum(options: &MuonOptions, local: &mut LocalParam, param: usize) -> Result<()> {
    let (Some(momentum), Some(grad)) =
        (momentum_of(local, param)?, local.handle.grad_piece(param)?)
    else {
        return Ok(());
    };
    // torch's Muon averages gradients, where SGD adds them up.
    if grad.device().is_cpu() {
        return move_towards(&momentum, &grad, 1.0 - options.momentum);
    }
    let average = average_on_device(options, &momentum, &widen(&grad)?)?;
    Ok(store(&momentum, &average)?)
}

/// Returns the momentum after a gradient, both on a GPU, in the dtype of the gradient.
fn average_on_device(options: &MuonOptions, momentum: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let factor = options.momentum;
    Ok(combine(&widen(momentum)?, factor, grad, 1.0 - factor)?)
}

fn to_bf16<T: Scalar>(value: T) -> bf16 {
    bf16::from_f64(candle_core::WithDType::to_f64(value))
}

/// Steps this rank's part of a matrix.
fn descend(
    options: &MuonOptions,
    matrix: &Owned,
    local: &LocalParam,
    direction: &Tensor,
) -> Result<()> {
    let Some(param) = local.handle.local_piece(matrix.param)? else {
        return Ok(());
    };
    let shape = rows_and_columns(&matrix.shape);
    if param.device().is_cpu() {
        let direction = HostSlice::<bf16>::read(direction)?;
        return with_float!(param.dtype(), T => {
            let mut param = HostSliceMut::<T>::write(&param)?;
            options.descend(shape, &mut param, &direction);
            Ok(param.finish()?)
        });
    }
    let wide = widen(&param)?;
    let direction = direction.to_dtype(wide.dtype())?;
    let kept = 1.0 - options.lr * options.weight_decay;
    let stepped = combine(&wide, kept, &direction, -options.adjusted_lr(shape))?;
    Ok(store(&param, &stepped)?)
}

/// Orthogonalizes the directions of the matrices that this rank has gathered, because it owns them.
fn orthogonalize_owned(
    options: &MuonOptions,
    matrices: &[Owned],
    gathered: Vec<Part>,
) -> Result<Vec<Part>> {
    let mut orthogonal = Vec::with_capacity(matrices.len());
    for (matrix, direction) in matrices.iter().zip(gathered) {
        let Some(direction) = direction else {
            orthogonal.push(None);
            continue;
        };
        let direction = direction.reshape(matrix.shape.as_slice())?;
        orthogonal.push(Some(orthogonalize(options, &direction)?.flatten_all()?));
    }
    Ok(orthogonal)
}
