//! The norm of all gradients together, and clipping by it.

use fsdp_comm::ReduceOp;
use fsdp_flat::storage::{HostSlice, HostSliceMut};
use fsdp_flat::with_float;

use crate::parameters::ShardedParameters;
use crate::{NnError, Result, device};

/// A norm of all gradients together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GradNorm {
    /// The square root of the sum of squares.
    #[default]
    L2,
    /// The largest absolute value.
    Infinity,
}

impl ShardedParameters {
    /// Returns the 2-norm of all gradients together, the same on every rank; 0 without gradients. Collectives: one
    /// all-reduce of one number over the shard group, none where nothing is sharded.
    ///
    /// # Errors
    /// The all-reduce's.
    pub fn grad_norm(&self) -> Result<f64> {
        self.grad_norm_of(GradNorm::L2)
    }

    /// Returns a norm of all gradients together, the same on every rank; 0 without gradients. Not a number if any gradient is
    /// none. Collectives: as [`Self::grad_norm`].
    ///
    /// # Errors
    /// The all-reduce's.
    pub fn grad_norm_of(&self, norm: GradNorm) -> Result<f64> {
        let mut total = [0f64];
        for grad in self.handles.iter().filter_map(|handle| handle.grad()) {
            let local = match norm {
                _ if !grad.device().is_cpu() => device::norm_part(&grad, norm == GradNorm::Infinity)?,
                GradNorm::L2 => with_float!(grad.dtype(), T => {
                    HostSlice::<T>::read(&grad)?.iter().map(|x| candle_core::WithDType::to_f64(*x).powi(2)).sum::<f64>()
                }, else 0.0),
                GradNorm::Infinity => with_float!(grad.dtype(), T => {
                    HostSlice::<T>::read(&grad)?.iter().map(|x| candle_core::WithDType::to_f64(*x).abs()).fold(0.0, larger)
                }, else 0.0),
            };
            total[0] = if norm == GradNorm::L2 { total[0] + local } else { larger(total[0], local) };
        }
        if let Some(group) = self.shard_group() {
            let op = if norm == GradNorm::L2 { ReduceOp::Sum } else { ReduceOp::Max };
            group.all_reduce(&mut total, op)?;
        }
        Ok(if norm == GradNorm::L2 { total[0].sqrt() } else { total[0] })
    }

    /// Returns the norm of the gradients, like [`Self::grad_norm`], if all gradients of all ranks are finite. Where they
    /// are not, a step can be skipped: every rank gets the same error, and nothing has been changed.
    ///
    /// # Errors
    /// [`NnError::NonFiniteGradients`]; those of [`Self::grad_norm`].
    pub fn finite_grad_norm(&self) -> Result<f64> {
        self.finite_grad_norm_of(GradNorm::L2)
    }

    fn finite_grad_norm_of(&self, norm: GradNorm) -> Result<f64> {
        let norm = self.grad_norm_of(norm)?;
        if norm.is_finite() { Ok(norm) } else { Err(NnError::NonFiniteGradients { norm }) }
    }

    /// Scales all gradients so that their 2-norm over the sharded whole is at most `max_norm`, and returns the norm
    /// before: torch's `clip_grad_norm_` with `error_if_nonfinite`. The same on every rank. Collectives: as
    /// [`Self::grad_norm`].
    ///
    /// # Errors
    /// As [`Self::finite_grad_norm`]. The gradients are as they were then.
    pub fn clip_grad_norm(&self, max_norm: f64) -> Result<f64> {
        self.clip_grad_norm_by(GradNorm::L2, max_norm)
    }

    /// Clips as [`Self::clip_grad_norm`], by a norm of choice: torch's `norm_type`.
    ///
    /// # Errors
    /// As [`Self::clip_grad_norm`].
    pub fn clip_grad_norm_by(&self, norm: GradNorm, max_norm: f64) -> Result<f64> {
        let norm = self.finite_grad_norm_of(norm)?;
        let scale = max_norm / (norm + 1e-6);
        if scale < 1.0 {
            for grad in self.handles.iter().filter_map(|handle| handle.grad()) {
                if !grad.device().is_cpu() {
                    device::scale(&grad, scale)?;
                    continue;
                }
                with_float!(grad.dtype(), T => {
                    let scale = <T as candle_core::WithDType>::from_f64(scale);
                    HostSliceMut::<T>::write(&grad)?.iter_mut().for_each(|x| *x *= scale);
                }, else ());
            }
        }
        Ok(norm)
    }
}

/// Returns the larger of two numbers, or not a number if either is none.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}
