//! The two modes of schedule-free optimizers: parameters for training, and for evaluation.

use candle_core::Tensor;
use fsdp_flat::storage::{HostSlice, HostSliceMut};
use fsdp_flat::with_float;

use super::Optimizer;
use super::local::LocalParam;
use super::on_device::{combine, store, widen};
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
    /// [`Swapped`](crate::NnError::Swapped); candle's errors, of which memory is one. The mode and
    /// the parameters are the old ones then, these but for roundings.
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
        // Step 1: find all that has to move, and prepare the parameters for the change.
        let mut moves = Vec::new();
        for (index, group) in self.groups.iter().enumerate() {
            let Some(options) = to_switch(&group.algorithm, to_train) else {
                continue;
            };
            for local in &self.locals[self.locals_of_group(index)] {
                moves.extend(find_moves(options, to_train, local)?);
            }
        }
        // Step 2: move it. A mixture of both kinds of weights would look like either.
        all_or_none(&moves, Move::make, Move::undo)?;
        for group in &mut self.groups {
            if to_switch(&group.algorithm, to_train).is_some()
                && let Algorithm::ScheduleFreeAdamW(options) = &mut group.algorithm
            {
                options.train_mode = to_train;
            }
        }
        Ok(())
    }
}

/// Returns the options of a schedule-free group that is in the other mode.
fn to_switch(algorithm: &Algorithm, to_train: bool) -> Option<&ScheduleFreeOptions> {
    match algorithm {
        Algorithm::ScheduleFreeAdamW(options) => {
            Some(options).filter(|options| options.train_mode != to_train)
        }
        _ => None,
    }
}

/// A part of a parameter that is going to move towards its `z`.
struct Move {
    param: Tensor,
    z: Tensor,
    weight: f64,
    /// The weight by which it comes back.
    undo_weight: f64,
}

impl Move {
    fn make(&self) -> Result<()> {
        move_towards(&self.param, &self.z, self.weight)
    }

    fn undo(&self) -> Result<()> {
        move_towards(&self.param, &self.z, self.undo_weight)
    }
}

/// Returns what a switch moves of a local parameter, and prepares the parameter for the change.
/// Before its first step it has no state, and both kinds of weights are the same.
fn find_moves(
    options: &ScheduleFreeOptions,
    to_train: bool,
    local: &LocalParam,
) -> Result<Vec<Move>> {
    let Some(z) = local.live_piece("z") else {
        return Ok(Vec::new());
    };
    local.handle.begin_change()?;
    let mut moves = Vec::with_capacity(local.segments.len());
    for segment in local.segments.iter().filter(|segment| segment.len > 0) {
        let Some(param) = local.handle.local_piece(segment.param)? else {
            continue;
        };
        moves.push(Move {
            param,
            z: z.narrow(0, segment.start, segment.len)?,
            weight: options.switch_weight(to_train),
            undo_weight: options.switch_weight(!to_train),
        });
    }
    Ok(moves)
}

/// Makes all changes, or on an error undoes those that have been made, the last one first.
///
/// # Errors
/// The error of the change that failed.
pub(crate) fn all_or_none<T>(
    changes: &[T],
    make: impl Fn(&T) -> Result<()>,
    undo: impl Fn(&T) -> Result<()>,
) -> Result<()> {
    for (index, change) in changes.iter().enumerate() {
        let Err(error) = make(change) else { continue };
        for made in changes[..index].iter().rev() {
            // It takes no more memory than the change took. If it fails all the same, the first
            // error is the one that explains it.
            let _ = undo(made);
        }
        return Err(error);
    }
    Ok(())
}

/// Moves a flat tensor towards another one by a weight, in place. torch's `lerp_`.
pub(crate) fn move_towards(value: &Tensor, end: &Tensor, weight: f64) -> Result<()> {
    if !value.device().is_cpu() {
        return move_on_device(value, end, weight);
    }
    with_float!(value.dtype(), T => {
        lerp(&mut HostSliceMut::<T>::write(value)?, &HostSlice::<T>::read(end)?, weight);
    });
    Ok(())
}

/// Does what [`move_towards`] does, on a GPU. A half type may not hold the weight, so this computes
/// in the wider type, and rounds once.
fn move_on_device(value: &Tensor, end: &Tensor, weight: f64) -> Result<()> {
    let (start, end) = (widen(value)?, widen(end)?);
    let distance = (&end - &start)?;
    // The host's `lerp` begins at the nearer end too, so weights of 0 and 1 give exactly the start
    // and the end.
    let moved = if weight.abs() < 0.5 {
        combine(&start, 1.0, &distance, weight)?
    } else {
        combine(&end, 1.0, &distance, weight - 1.0)?
    };
    Ok(store(value, &moved)?)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    /// Moves an element on the CPU by the operations for a GPU, and returns where it comes to.
    fn moved(dtype: DType, start: f64, end: f64, weights: &[f64]) -> f64 {
        let tensor = |value: f64| {
            let wide = Tensor::full(value, 3, &Device::Cpu).unwrap();
            wide.to_dtype(dtype).unwrap()
        };
        let (value, end) = (tensor(start), tensor(end));
        for &weight in weights {
            move_on_device(&value, &end, weight).unwrap();
        }
        let values = value.to_dtype(DType::F64).unwrap();
        values.to_vec1::<f64>().unwrap()[0]
    }

    #[test]
    fn elements_that_are_at_their_end_stay_there_on_a_gpu() {
        let free = ScheduleFreeOptions::default();
        let weights = [free.switch_weight(false), free.switch_weight(true)].repeat(4);
        for dtype in [DType::BF16, DType::F16, DType::F32, DType::F64] {
            assert_eq!(moved(dtype, 1.1015625, 1.1015625, &weights), 1.1015625);
            assert_eq!(moved(dtype, 0.5, 1.1015625, &[1.0]), 1.1015625);
        }
    }

    #[test]
    fn weights_that_a_half_type_cannot_hold_move_elements_on_a_gpu() {
        // 0.999 is 1 in bf16: an average computed there would never forget.
        let found = moved(DType::BF16, 0.1, -0.2, &[1.0 - 0.999]);
        assert!(found < 0.1, "{found}");
        // 0.9999 is 1 in f16.
        let found = moved(DType::F16, 0.1, -0.9, &[1.0 - 0.9999; 2]);
        assert!(found < 0.0999, "{found}");
    }
}
