//! The norm of all gradients together, and clipping by it.

use candle_core::WithDType;
use fsdp_comm::{ProcessGroup, ReduceOp};
use fsdp_flat::storage::{HostSlice, HostSliceMut};
use fsdp_flat::with_float;

use crate::algorithm::multiply;
use crate::error::{NnError, Result};
use crate::exchange::device;
use crate::model::ShardedParameters;
use crate::tasks;

/// A norm of all gradients together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GradNorm {
    /// The square root of the sum of squares.
    #[default]
    L2,
    /// The largest absolute value.
    Infinity,
}

impl GradNorm {
    /// Joins the norms of two parts of the gradients, which [`Self::finish`] has not finished.
    fn join(self, first: f64, second: f64) -> f64 {
        match self {
            GradNorm::L2 => first + second,
            GradNorm::Infinity => larger_or_nan(first, second),
        }
    }

    /// Returns the norm of all gradients from the joined norms of their parts.
    fn finish(self, total: f64) -> f64 {
        match self {
            GradNorm::L2 => total.sqrt(),
            GradNorm::Infinity => total,
        }
    }
}

/// The reaction to gradients of some rank that are NaN or infinite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnNonFinite {
    /// Every rank gets the same error, and the gradients stay as they are: torch's
    /// `error_if_nonfinite=True`.
    #[default]
    Error,
    /// Every rank drops its gradients. The next optimizer step then updates no parameter and no
    /// state.
    Skip,
    /// The gradients are scaled all the same, by zero or by NaN, and a step would spread that to
    /// all parameters: torch's default, `error_if_nonfinite=False`. For those who look at the norm
    /// before they step.
    Scale,
}

/// Options of [`ShardedParameters::clip_grad_norm_with`]; the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClipOptions {
    /// The norm by which gradients are clipped: torch's `norm_type`.
    pub norm: GradNorm,
    /// The reaction to gradients that are not finite.
    pub on_non_finite: OnNonFinite,
}

impl ShardedParameters {
    /// Returns the 2-norm of all gradients together, the same on every rank; 0 without gradients.
    /// Collectives: one all-reduce of one number over the shard group, none where nothing is
    /// sharded.
    ///
    /// # Errors
    /// The all-reduce's.
    pub fn grad_norm(&self) -> Result<f64> {
        self.grad_norm_of(GradNorm::L2)
    }

    /// Returns a norm of all gradients together, the same on every rank; 0 without gradients, NaN
    /// if any gradient is NaN. Collectives: those of [`Self::grad_norm`].
    ///
    /// # Errors
    /// The all-reduce's.
    pub fn grad_norm_of(&self, norm: GradNorm) -> Result<f64> {
        let mut total = [self.norm_part(norm)?];
        if let Some(group) = self.shard_group() {
            let op = match norm {
                GradNorm::L2 => ReduceOp::Sum,
                GradNorm::Infinity => ReduceOp::Max,
            };
            group.all_reduce(&mut total, op)?;
        }
        Ok(norm.finish(total[0]))
    }

    /// Returns this rank's part of a norm: of its gradients the sum of squares, or the largest
    /// absolute value. No communication.
    fn norm_part(&self, norm: GradNorm) -> Result<f64> {
        let is_infinity = norm == GradNorm::Infinity;
        let mut total = 0f64;
        for grad in self.handles.iter().filter_map(|handle| handle.grad()) {
            let unit_norm = if !grad.device().is_cpu() {
                device::norm_part(&grad, is_infinity)?
            } else {
                with_float!(grad.dtype(), T => {
                    let values = HostSlice::<T>::read(&grad)?;
                    if is_infinity {
                        let magnitudes = values.iter().map(|x| WithDType::to_f64(*x).abs());
                        magnitudes.fold(0.0, larger_or_nan)
                    } else {
                        tasks::sum(&values, |x| WithDType::to_f64(x).powi(2))
                    }
                })
            };
            total = norm.join(total, unit_norm);
        }
        Ok(total)
    }

    /// Returns the norm of all gradients to clip them by, and checks that all ranks clip alike.
    /// Ranks that clip differently would drift apart. Collective: one all-gather of three numbers
    /// over the model's group.
    ///
    /// # Errors
    /// The all-gather's; [`NnError::Options`], the same on every rank.
    fn norm_to_clip(&self, max_norm: f64, options: ClipOptions) -> Result<f64> {
        let group = self.group();
        let ClipOptions {
            norm,
            on_non_finite,
        } = options;
        let kind = f64::from(norm as u8 * 4 + on_non_finite as u8);
        let mut gathered = vec![0.0; 3 * group.world_size()];
        let own = [self.norm_part(norm)?, max_norm, kind];
        group.all_gather_into(&mut gathered, &own)?;
        let (calls, _) = gathered.as_chunks::<3>();
        let [_, first_max_norm, first_kind] = calls[0];
        let reference = group.global_ranks()[0];
        // The gradients of other replicas are the same as those of this one.
        let shard_ranks = self.shard_group().map(ProcessGroup::global_ranks);
        let mut total = 0.0;
        for (position, (rank, &[part, max_norm, kind])) in
            group.global_ranks().iter().zip(calls).enumerate()
        {
            if max_norm.to_bits() != first_max_norm.to_bits() {
                return Err(NnError::options(format!(
                    "rank {rank} clips gradients to a norm of {max_norm}, rank {reference} to \
                     {first_max_norm}: it must be the same on every rank"
                )));
            }
            if kind.to_bits() != first_kind.to_bits() {
                return Err(NnError::options(format!(
                    "rank {rank} clips gradients by another `norm` or `on_non_finite` than rank \
                     {reference}: `ClipOptions` must be the same on every rank"
                )));
            }
            let is_in_total = match shard_ranks {
                Some(ranks) => ranks.contains(rank),
                None => position == group.rank(),
            };
            if is_in_total {
                total = norm.join(total, part);
            }
        }
        Ok(norm.finish(total))
    }

    /// Returns the norm of the gradients, like [`Self::grad_norm`], if all gradients of all ranks
    /// are finite. Where they are not, a step can be skipped: every rank gets the same error, and
    /// nothing has been changed.
    ///
    /// # Errors
    /// [`NnError::NonFiniteGradients`]; those of [`Self::grad_norm`].
    pub fn finite_grad_norm(&self) -> Result<f64> {
        let norm = self.grad_norm()?;
        if norm.is_finite() {
            Ok(norm)
        } else {
            Err(NnError::NonFiniteGradients { norm })
        }
    }

    /// Scales all gradients so that their total 2-norm over all ranks is at most `max_norm`, and
    /// returns the norm before scaling, the same on every rank. torch's `clip_grad_norm_` with
    /// `error_if_nonfinite=True`. Collective: one all-gather of three numbers.
    ///
    /// # Errors
    /// [`NnError::Options`] for a norm that is negative or NaN, and, on every rank, if ranks pass
    /// different norms; [`NnError::NonFiniteGradients`]; the all-gather's. The gradients are
    /// unchanged then.
    pub fn clip_grad_norm(&self, max_norm: f64) -> Result<f64> {
        self.clip_grad_norm_with(max_norm, ClipOptions::default())
    }

    /// Clips as [`Self::clip_grad_norm`], by a norm of choice, and with a choice of what happens
    /// where gradients are not finite. The norm that is returned tells every rank of that: it is
    /// infinite or NaN on all of them, or on none.
    ///
    /// # Errors
    /// The errors of [`Self::clip_grad_norm`]; [`NnError::NonFiniteGradients`] only with
    /// [`OnNonFinite::Error`]. Also [`NnError::Options`], on every rank, if ranks pass different
    /// options.
    pub fn clip_grad_norm_with(&self, max_norm: f64, options: ClipOptions) -> Result<f64> {
        let norm = self.norm_to_clip(max_norm, options)?;
        if max_norm.is_nan() || max_norm < 0.0 {
            return Err(NnError::options(format!(
                "gradients cannot be clipped to a norm of {max_norm}: it must be at least 0, and \
                 not NaN"
            )));
        }
        if !norm.is_finite() {
            match options.on_non_finite {
                OnNonFinite::Error => return Err(NnError::NonFiniteGradients { norm }),
                OnNonFinite::Skip => {
                    self.zero_grad();
                    return Ok(norm);
                }
                OnNonFinite::Scale => {}
            }
        }
        // torch adds the same to avoid a division by zero.
        let scale = max_norm / (norm + 1e-6);
        // A norm that is NaN makes all gradients NaN, as in torch, so that nobody overlooks it.
        if scale < 1.0 || scale.is_nan() {
            self.scale_gradients(scale)?;
        }
        Ok(norm)
    }

    /// Multiplies all gradients of this rank. No communication.
    pub(crate) fn scale_gradients(&self, scale: f64) -> Result<()> {
        for grad in self.handles.iter().filter_map(|handle| handle.grad()) {
            if !grad.device().is_cpu() {
                device::scale(&grad, scale)?;
                continue;
            }
            // A half type may not hold the factor: a product with it rounded could be zero.
            with_float!(grad.dtype(), T => multiply(&mut HostSliceMut::<T>::write(&grad)?, scale));
        }
        Ok(())
    }
}

/// Returns the larger of two numbers, or NaN if one of them is NaN.
fn larger_or_nan(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}
