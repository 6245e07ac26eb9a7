//! One step of one local parameter, in place.

use fsdp_flat::storage::{HostSlice, HostSliceMut, Scalar, zeros_on};

use super::local::{LocalParam, LocalState, initial_state};
use super::on_device;
use crate::algorithm::{Algorithm, Float, Initial, StateKind};
use crate::{Result, tasks};

/// Sets the initial state of a local parameter, if it has none and its algorithm has state before the first gradient.
pub(super) fn begin_state(algorithm: &Algorithm, local: &mut LocalParam) -> Result<()> {
    if local.state.is_none() {
        let state = initial_state(algorithm, local)?;
        local.state = (state.step.is_some() || !state.entries.is_empty()).then_some(state);
    }
    Ok(())
}

/// Updates one local parameter and its state. On an error the state is what it was.
///
/// State may lack entries of the algorithm, for example if it comes from a checkpoint of another algorithm. Then a
/// missing `step` counts from 0, and missing tensors start with their initial values.
pub(super) fn step_local<T: Scalar + Float>(algorithm: &Algorithm, local: &mut LocalParam) -> Result<()> {
    // The tensors are shared: what is changed here is only which of them there are, and the step.
    let mut state = match &local.state {
        Some(state) => state.clone(),
        None => initial_state(algorithm, local)?,
    };
    let mut first = false;
    let mut slices = Vec::new();
    for entry in algorithm.state_entries().filter(|entry| entry.kind == StateKind::LikeParameter) {
        let missing = !matches!(state.entries.get(entry.name), Some(LocalState::Piece(_)));
        if missing {
            // `first` holds for the one entry that begins as the gradient.
            first |= entry.initial == Initial::FirstGradient;
            let mut fresh = initial_state(algorithm, local)?;
            let piece = match fresh.entries.swap_remove(entry.name) {
                Some(piece) => piece,
                None => LocalState::Piece(zeros_on(&[local.numel], local.handle.dtype(), local.handle.shard_device())?),
            };
            state.entries.insert(entry.name.to_owned(), piece);
        }
        if let Some(LocalState::Piece(flat)) = state.entries.get(entry.name) {
            slices.push(flat.clone());
        }
    }
    let step = state.step.unwrap_or(0.0) + 1.0;
    algorithm.check_step(step)?;
    local.handle.begin_change()?;
    let handle = &local.handle;
    for segment in local.segments.iter().filter(|segment| segment.len > 0 && handle.has_gradient(segment.param)) {
        let (Some(param), Some(grad)) =
            (local.handle.local_piece(segment.param)?, local.handle.grad_piece(segment.param)?)
        else {
            continue;
        };
        let pieces = slices
            .iter()
            .map(|flat| flat.narrow(0, segment.start, segment.len))
            .collect::<candle_core::Result<Vec<_>>>()?;
        if !local.handle.shard_device().is_cpu() {
            on_device::update(algorithm, step, first, &param, &grad, &pieces)?;
            continue;
        }
        let grad = HostSlice::<T>::read(&grad)?;
        let mut param = HostSliceMut::<T>::write(&param)?;
        let mut pieces = pieces.iter().map(HostSliceMut::<T>::write).collect::<Result<Vec<_>, _>>()?;
        let mut slices: Vec<&mut [T]> = pieces.iter_mut().map(|piece| &mut **piece).collect();
        tasks::update(&mut param, &grad, &mut slices, |param, grad, slices| {
            algorithm.update(step, first, param, grad, slices)
        })?;
    }
    let counts_steps = algorithm.state_entries().any(|entry| entry.kind == StateKind::Scalar);
    if counts_steps || state.step.is_some() {
        state.step = Some(step);
    }
    // Without momentum SGD keeps nothing, and then a state dict does not name the parameter.
    local.state = (state.step.is_some() || !state.entries.is_empty()).then_some(state);
    Ok(())
}
