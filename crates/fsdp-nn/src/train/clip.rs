//! The norm of all gradients together, and clipping by it.

use candle_core::{Tensor, WithDType};
use fsdp_comm::{ProcessGroup, ReduceOp};
use fsdp_flat::storage::{HostSlice, HostSliceMut};
use fsdp_flat::with_float;

use crate::algorithm::multiply;
use crate::error::{NnError, Result};
use crate::exchange::{agree, device};
use crate::model::ShardedParameters;
use crate::tasks;

/// In the place of the way to clip, from a rank that could not compute its part of the norm.
const FAILED: u64 = u64::MAX;

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
    pub(super) fn join(self, first: f64, second: f64) -> f64 {
        match self {
            GradNorm::L2 => first + second,
            GradNorm::Infinity => larger_or_nan(first, second),
        }
    }

    /// Returns the norm of a part of the gradients if these are multiplied by a factor.
    pub(super) fn scaled(self, part: f64, factor: f64) -> f64 {
        match self {
            GradNorm::L2 => part * factor * factor,
            GradNorm::Infinity => part * factor.abs(),
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
    /// Those of [ignored parameters](crate::FsdpConfig::ignored_states) do not count: they are with
    /// the caller. Collectives: one all-reduce of two numbers over the shard group, none where
    /// nothing is sharded.
    ///
    /// # Errors
    /// [`NnError::GradientsNotReduced`] and [`NnError::BackwardNotEnded`]; the all-reduce's. One
    /// rank's error is one of every rank of the shard group.
    pub fn grad_norm(&self) -> Result<f64> {
        self.grad_norm_of(GradNorm::L2)
    }

    /// Returns a norm of all gradients together, the same on every rank; 0 without gradients, NaN
    /// if any gradient is NaN. Collectives: those of [`Self::grad_norm`].
    ///
    /// # Errors
    /// The errors of [`Self::grad_norm`].
    pub fn grad_norm_of(&self, norm: GradNorm) -> Result<f64> {
        let own_part = self.norm_part(norm);
        let Some(group) = self.shard_group() else {
            return Ok(norm.finish(own_part?));
        };
        // An error of this rank must not leave the others waiting.
        let has_failed = f64::from(u8::from(own_part.is_err()));
        let mut total = [*own_part.as_ref().unwrap_or(&0.0), has_failed];
        let op = match norm {
            GradNorm::L2 => ReduceOp::Sum,
            GradNorm::Infinity => ReduceOp::Max,
        };
        group.all_reduce(&mut total, op)?;
        if total[1] > 0.0 {
            return agree(group, "grad_norm", own_part);
        }
        Ok(norm.finish(total[0]))
    }

    /// Returns this rank's part of a norm: of its gradients the sum of squares, or the largest
    /// absolute value. No communication.
    fn norm_part(&self, norm: GradNorm) -> Result<f64> {
        let (on_host, on_device, _) = self.norm_parts(norm, &[])?;
        Ok(norm.join(on_host, on_device))
    }

    /// Returns the parts of a norm that this rank's gradients have in the host's memory and on a
    /// GPU, and the values of scalars. Whatever is on the GPU is read together: the host waits for
    /// it once. No communication.
    pub(super) fn norm_parts(
        &self,
        norm: GradNorm,
        scalars: &[Tensor],
    ) -> Result<(f64, f64, Vec<f64>)> {
        self.check_gradients_reduced()?;
        let is_infinity = norm == GradNorm::Infinity;
        let (on_host, on_device) = self.gradients_by_place();
        let (device_part, scalars) = device::norm_part(&on_device, is_infinity, scalars)?;
        // If a reduction has failed, its gradients are undefined, and so is the norm: return the
        // error instead.
        self.synchronize()?;
        let mut host_part = 0f64;
        for grad in on_host {
            let unit_norm = with_float!(grad.dtype(), T => {
                let values = HostSlice::<T>::read(&grad)?;
                if is_infinity {
                    let magnitudes = values.iter().map(|x| WithDType::to_f64(*x).abs());
                    magnitudes.fold(0.0, larger_or_nan)
                } else {
                    tasks::sum(&values, |x| WithDType::to_f64(x).powi(2))
                }
            });
            host_part = norm.join(host_part, unit_norm);
        }
        Ok((host_part, device_part, scalars))
    }

    /// Returns this rank's gradients: those in the host's memory, and those on a GPU.
    pub(super) fn gradients_by_place(&self) -> (Vec<Tensor>, Vec<Tensor>) {
        let grads = self.handles.iter().filter_map(|handle| handle.grad());
        grads.partition(|grad| grad.device().is_cpu())
    }

    /// Returns the norm of all gradients to clip them by, from this rank's part, and the numbers
    /// that each rank passes. Checks that all ranks clip alike: ranks that clip differently would
    /// drift apart. Collectives: one all-gather over the model's group, and one agreement if a rank
    /// has no part because of an error.
    ///
    /// # Errors
    /// The error of this rank's part, on every rank; the all-gather's; [`NnError::Options`], the
    /// same on every rank.
    pub(super) fn norm_to_clip(
        &self,
        own_part: Result<f64>,
        max_norm: f64,
        options: ClipOptions,
        numbers: &[u64],
    ) -> Result<(f64, Vec<Vec<u64>>)> {
        let group = self.group();
        let ClipOptions {
            norm,
            on_non_finite,
        } = options;
        // An error of this rank must not leave the others waiting.
        let kind = match own_part {
            Ok(_) => norm as u64 * 4 + on_non_finite as u64,
            Err(_) => FAILED,
        };
        let own_bits = own_part.as_ref().map_or(0, |part| part.to_bits());
        let mut own = vec![own_bits, max_norm.to_bits(), kind];
        own.extend_from_slice(numbers);
        let mut gathered = vec![0; own.len() * group.world_size()];
        group.all_gather_into(&mut gathered, &own)?;
        if gathered
            .chunks_exact(own.len())
            .any(|call| call[2] == FAILED)
        {
            agree(group, "the norm of the gradients", own_part)?;
        }
        let reference = group.global_ranks()[0];
        // The gradients of other replicas are the same as those of this one.
        let shard_ranks = self.shard_group().map(ProcessGroup::global_ranks);
        let mut total = 0.0;
        let mut all_numbers = Vec::with_capacity(group.world_size());
        let calls = gathered.chunks_exact(own.len());
        for (position, (rank, call)) in group.global_ranks().iter().zip(calls).enumerate() {
            if call[1] != gathered[1] {
                return Err(NnError::options(format!(
                    "rank {rank} clips gradients to a norm of {}, rank {reference} to {}: it must \
                     be the same on every rank",
                    f64::from_bits(call[1]),
                    f64::from_bits(gathered[1]),
                )));
            }
            if call[2] != gathered[2] {
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
                total = norm.join(total, f64::from_bits(call[0]));
            }
            all_numbers.push(call[3..].to_vec());
        }
        if max_norm.is_nan() || max_norm < 0.0 {
            return Err(NnError::options(format!(
                "gradients cannot be clipped to a norm of {max_norm}: it must be at least 0, and \
                 not NaN"
            )));
        }
        Ok((norm.finish(total), all_numbers))
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
    /// `error_if_nonfinite=True`. Gradients of
    /// [ignored parameters](crate::FsdpConfig::ignored_states) neither count nor are scaled.
    /// Collective: one all-gather of three numbers over the model's group.
    ///
    /// # Errors
    /// [`NnError::Options`] for a norm that is negative or NaN, and, on every rank, if ranks pass
    /// different norms; [`NnError::NonFiniteGradients`]; [`NnError::GradientsNotReduced`] and
    /// [`NnError::BackwardNotEnded`], which are errors on every rank; the all-gather's. The
    /// gradients are unchanged then.
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
        let own_part = self.norm_part(options.norm);
        let (norm, _) = self.norm_to_clip(own_part, max_norm, options, &[])?;
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
        let factor = clip_factor(norm, max_norm);
        self.scale_gradients(factor, factor)?;
        Ok(norm)
    }

    /// Multiplies all gradients of this rank: those in the host's memory by one factor, and those
    /// on a GPU by another. No communication.
    pub(super) fn scale_gradients(&self, on_host: f64, on_device: f64) -> Result<()> {
        let (host_grads, device_grads) = self.gradients_by_place();
        if on_device != 1.0 {
            device::scale(&device_grads, on_device)?;
        }
        if on_host != 1.0 {
            for grad in host_grads {
                // A half type may not hold the factor: a product with it rounded could be zero.
                with_float!(grad.dtype(), T => {
                    multiply(&mut HostSliceMut::<T>::write(&grad)?, on_host);
                });
            }
        }
        Ok(())
    }
}

/// Returns the factor that clips gradients of this norm; 1 if they need no clipping.
pub(super) fn clip_factor(norm: f64, max_norm: f64) -> f64 {
    // torch adds the same to avoid a division by zero.
    let factor = max_norm / (norm + 1e-6);
    // A norm that is NaN makes all gradients NaN, as in torch, so that nobody overlooks it.
    if factor < 1.0 || factor.is_nan() {
        factor
    } else {
        1.0
    }
}

/// Returns the larger of two numbers, or NaN if one of them is NaN.
fn larger_or_nan(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}
