//! The two modes of schedule-free optimizers: parameters for training, and for evaluation.

use candle_core::Tensor;
use fsdp_flat::storage::{HostSlice, HostSliceMut};
use fsdp_flat::with_float;

use super::Optimizer;
use super::local::{LocalParam, LocalState};
use crate::algorithm::{Algorithm, ScheduleFreeOptions, lerp};
use crate::error::{NnError, Result};

impl Optimizer {
    /// Turns the parameters of schedule-free groups into the points at which gradients are
    /// computed, for training. Call it before the first step, and after each [`Self::eval`]. Other
    /// groups, and those that are in this mode already, stay as they are. Every rank must do the
    /// same; no communication.
    ///
    /// # Errors
    /// [`NnError::UnitInUse`] inside a forward; [`NnError::Swapped`]; candle's errors.
    pub fn train(&mut self) -> Result<()> {
        self.switch(true)
    }

    /// Turns the parameters of schedule-free groups into the average, for evaluations and for
    /// checkpoints that others are going to use. Other groups, and those that are in this mode
    /// already, stay as they are. Every rank must do the same; no communication.
    ///
    /// # Errors
    /// The errors of [`Self::train`].
    pub fn eval(&mut self) -> Result<()> {
        self.switch(false)
    }

    /// Switches the weights of all schedule-free groups to those for training, or to the averaged
    /// ones.
    fn switch(&mut self, to_train: bool) -> Result<()> {
        if self.parameters.has_average() {
            return Err(NnError::Swapped);
        }
        self.parameters.reshard()?;
        for (group, locals) in self.groups.iter_mut().zip(&self.locals_of_group) {
            let Algorithm::ScheduleFreeAdamW(options) = &mut group.algorithm else {
                continue;
            };
            if options.train_mode == to_train {
                continue;
            }
            for &index in locals {
                switch_local(options, to_train, &self.locals[index])?;
            }
            options.train_mode = to_train;
        }
        Ok(())
    }
}

/// Switches the weights of one local parameter. Before its first step it has no state, and both
/// kinds of weights are the same.
fn switch_local(options: &ScheduleFreeOptions, to_train: bool, local: &LocalParam) -> Result<()> {
    let Some(LocalState::Piece(z)) = local
        .state
        .as_ref()
        .and_then(|state| state.entries.get("z"))
    else {
        return Ok(());
    };
    local.handle.begin_change()?;
    for segment in local.segments.iter().filter(|segment| segment.len > 0) {
        let Some(param) = local.handle.local_piece(segment.param)? else {
            continue;
        };
        let z = z.narrow(0, segment.start, segment.len)?;
        if !param.device().is_cpu() {
            switch_on_device(options.switch_weight(to_train), &param, &z)?;
            continue;
        }
        with_float!(param.dtype(), T => {
            let z = HostSlice::<T>::read(&z)?;
            lerp(&mut HostSliceMut::<T>::write(&param)?, &z, options.switch_weight(to_train));
        }, else ());
    }
    Ok(())
}

/// Moves a parameter on a GPU towards `z` by a weight.
fn switch_on_device(weight: f64, param: &Tensor, z: &Tensor) -> Result<()> {
    let switched = ((param * (1.0 - weight))? + (z * weight)?)?;
    Ok(param.slice_set(&switched.contiguous()?, 0, 0)?)
}
