//! The two modes of schedule-free optimizers: parameters for training, and for evaluation.

use candle_core::Tensor;
use fsdp_flat::storage::{HostSlice, HostSliceMut};
use fsdp_flat::with_float;

use super::Optimizer;
use super::local::LocalParam;
use crate::algorithm::{Algorithm, ScheduleFreeOptions, lerp};
use crate::error::Result;

impl Optimizer {
    /// Turns the parameters of schedule-free groups into the points at which gradients are
    /// computed, for training. Call it before the first step, and after each [`Self::eval`]. Other
    /// groups, and those that are in this mode already, stay as they are. Every rank must do the
    /// same; no communication.
    ///
    /// # Errors
    /// [`UnitInUse`](crate::NnError::UnitInUse) inside a forward;
    /// [`Swapped`](crate::NnError::Swapped); candle's errors.
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
        self.parameters.check_not_swapped()?;
        self.parameters.reshard()?;
        for index in 0..self.groups.len() {
            let locals = self.locals_of_group(index);
            let Algorithm::ScheduleFreeAdamW(options) = &mut self.groups[index].algorithm else {
                continue;
            };
            if options.train_mode == to_train {
                continue;
            }
            for local in &self.locals[locals] {
                switch_local(options, to_train, local)?;
            }
            options.train_mode = to_train;
        }
        Ok(())
    }
}

/// Switches the weights of one local parameter. Before its first step it has no state, and both
/// kinds of weights are the same.
fn switch_local(options: &ScheduleFreeOptions, to_train: bool, local: &LocalParam) -> Result<()> {
    let Some(z) = local.live_piece("z") else {
        return Ok(());
    };
    local.handle.begin_change()?;
    for segment in local.segments.iter().filter(|segment| segment.len > 0) {
        let Some(param) = local.handle.local_piece(segment.param)? else {
            continue;
        };
        let z = z.narrow(0, segment.start, segment.len)?;
        move_towards(&param, &z, options.switch_weight(to_train))?;
    }
    Ok(())
}

/// Moves a flat tensor towards another one by a weight, in place.
pub(crate) fn move_towards(value: &Tensor, end: &Tensor, weight: f64) -> Result<()> {
    if !value.device().is_cpu() {
        let moved = ((value * (1.0 - weight))? + (end * weight)?)?;
        return Ok(value.slice_set(&moved.contiguous()?, 0, 0)?);
    }
    with_float!(value.dtype(), T => {
        lerp(&mut HostSliceMut::<T>::write(value)?, &HostSlice::<T>::read(end)?, weight);
    });
    Ok(())
}
