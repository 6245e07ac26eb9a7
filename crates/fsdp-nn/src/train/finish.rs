//! The end of a step: gradients are unscaled, clipped and checked, and optimizers step.

use std::collections::HashSet;

use candle_core::Tensor;
use fsdp_ops::step::{self, Factor};
use tracing::info_span;

use super::clip::{ClipOptions, GradNorm, OnNonFinite, clip_factor};
use super::scaler::GradScaler;
use crate::error::{NnError, Result};
use crate::exchange::device;
use crate::model::ShardedParameters;
use crate::optimizer::{Counts, Optimizer};

/// Options of [`ShardedParameters::finish_step`]. All but `losses` and the values of `numbers` must
/// be the same on every rank.
#[derive(Debug, Clone)]
pub struct FinishOptions<'a> {
    /// The largest norm of all gradients together, to which they are clipped; infinite (the
    /// default) to clip none.
    pub max_norm: f64,
    /// The norm by which gradients are clipped, and the reaction to those that are not finite. With
    /// a loss scale, gradients that are not finite always skip the step.
    pub clip: ClipOptions,
    /// Scalars that this rank's backwards began with. They may be on a GPU: they come to the host
    /// together with the norm.
    pub losses: &'a [Tensor],
    /// Numbers of this rank that all ranks want to know, such as one that says if it was asked to
    /// stop.
    pub numbers: &'a [u64],
}

impl Default for FinishOptions<'_> {
    fn default() -> Self {
        FinishOptions {
            max_norm: f64::INFINITY,
            clip: ClipOptions::default(),
            losses: &[],
            numbers: &[],
        }
    }
}

/// The outcome of [`ShardedParameters::finish_step`], the same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct FinishedStep {
    /// The norm of all gradients, without the loss scale, before they were clipped.
    pub grad_norm: f64,
    /// `true` if the optimizers did not step, because gradients were not finite.
    pub is_skipped: bool,
    /// For each rank, the sum of its losses.
    pub losses: Vec<f64>,
    /// The numbers of each rank.
    pub numbers: Vec<Vec<u64>>,
}

/// The numbers that one rank tells the others at the end of a step.
struct OwnNumbers {
    /// Its part of the norm.
    norm_part: f64,
    /// `true` if its gradients are finite.
    is_finite: bool,
    loss: f64,
}

impl ShardedParameters {
    /// Ends a step after its last backward: divides gradients by the loss scale, clips them, steps
    /// the optimizers of this model, updates the scale, and drops the gradients. It does what
    /// [`GradScaler::unscale`], [`Self::clip_grad_norm_with`], [`GradScaler::step`] and
    /// [`GradScaler::update`] do one after the other, but the host waits for a GPU only once, and
    /// the ranks communicate only once.
    ///
    /// If a gradient of any rank is not finite, no optimizer steps on any rank.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{Module, linear};
    /// use fsdp_nn::algorithm::{AdamOptions, Algorithm};
    /// use fsdp_nn::{FinishOptions, FsdpConfig, FullyShardedDataParallel, NnError, Optimizer};
    ///
    /// fsdp_comm::run_local(2, |group| {
    ///     let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| linear(3, 1, scope.vb()))?;
    ///     let mut optimizers = [Optimizer::new(model.parameters(), Algorithm::AdamW(AdamOptions::adamw()))?];
    ///     let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
    ///     let loss = model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?;
    ///     model.backward(&loss)?;
    ///     let options = FinishOptions { max_norm: 1.0, losses: &[loss], ..FinishOptions::default() };
    ///     let step = model.parameters().finish_step(&mut optimizers, None, &options)?;
    ///     assert!(!step.is_skipped && step.losses.len() == 2);
    ///     Ok::<(), NnError>(())
    /// })?
    /// .into_iter()
    /// .collect::<Result<Vec<()>, _>>()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// Collectives: one all-gather of numbers over the model's group, and the optimizers'.
    ///
    /// # Errors
    /// Before anything is changed, except that gradients may have been unscaled:
    /// [`NnError::NonFiniteGradients`] with [`OnNonFinite::Error`] and no loss scale, on every
    /// rank; [`NnError::ForeignOptimizer`]; [`NnError::Options`] for two optimizers that hold the
    /// same parameter; [`ScalerError::UnscaledTwice`](crate::ScalerError); the errors of
    /// [`Self::clip_grad_norm_with`]. After that, those of [`Optimizer::step`].
    pub fn finish_step(
        &self,
        optimizers: &mut [Optimizer],
        scaler: Option<&mut GradScaler>,
        options: &FinishOptions<'_>,
    ) -> Result<FinishedStep> {
        let mut stepped = HashSet::new();
        for optimizer in &*optimizers {
            optimizer.check_belongs_to(self)?;
            if let Some(fqn) = optimizer.fqns().find(|fqn| !stepped.insert(*fqn)) {
                return Err(NnError::options(format!(
                    "two of the optimizers hold the parameter `{fqn}`, and each would update it: \
                     give it to one of them"
                )));
            }
        }
        let mut scaler = scaler.filter(|scaler| scaler.is_enabled());
        // The factor that removes the loss scale.
        let unscale = match &scaler {
            Some(scaler) => Some(scaler.factor_to_unscale(self)?),
            None => None,
        };
        if let Some(step) =
            self.finish_on_gpu(optimizers, scaler.as_deref_mut(), options, unscale)?
        {
            return Ok(step);
        }
        // Step 1: find out what only this rank knows, and tell all others.
        let own = self.own_numbers(options, unscale);
        let (mut step, is_finite) = self.share_numbers(own, options, unscale)?;
        // Step 2: decide. All ranks have the same numbers, so all of them decide alike.
        if let Some(scaler) = scaler.as_mut().filter(|_| !is_finite) {
            scaler.count_step(false);
            step.is_skipped = true;
        } else if !step.grad_norm.is_finite() {
            match options.clip.on_non_finite {
                OnNonFinite::Error => {
                    return Err(NnError::NonFiniteGradients {
                        norm: step.grad_norm,
                    });
                }
                OnNonFinite::Skip => step.is_skipped = true,
                OnNonFinite::Scale => {}
            }
        }
        // Step 3: do it.
        if !step.is_skipped {
            let clip = clip_factor(step.grad_norm, options.max_norm);
            self.step_clipped(optimizers, clip, clip * unscale.unwrap_or(1.0))?;
            if let Some(scaler) = scaler {
                scaler.count_step(true);
            }
        }
        self.zero_grad();
        Ok(step)
    }

    /// Steps optimizers with gradients that are multiplied by a factor: `on_host` those in the
    /// host's memory, and `on_device` those on a GPU.
    fn step_clipped(
        &self,
        optimizers: &mut [Optimizer],
        on_host: f64,
        on_device: f64,
    ) -> Result<()> {
        let _span = info_span!("optimizer").entered();
        let mut scale_themselves = true;
        for optimizer in &*optimizers {
            scale_themselves &= optimizer.scales_gradients()?;
        }
        let mut factor = Factor::Known(on_device);
        if !scale_themselves {
            self.scale_gradients(on_host, on_device)?;
            factor = Factor::Known(1.0);
        }
        optimizers
            .iter_mut()
            .try_for_each(|optimizer| optimizer.step_scaled(&factor))
    }

    /// Ends the step of a single rank whose GPU can decide all by itself: the host queues the whole
    /// step, and then waits to learn the norm. If gradients are not finite, the GPU has changed
    /// nothing. Returns `None`, and does nothing, for other steps.
    fn finish_on_gpu(
        &self,
        optimizers: &mut [Optimizer],
        scaler: Option<&mut GradScaler>,
        options: &FinishOptions<'_>,
        unscale: Option<f64>,
    ) -> Result<Option<FinishedStep>> {
        let ClipOptions {
            norm,
            on_non_finite,
        } = options.clip;
        let (on_host, on_device) = self.gradients_by_place();
        let mut is_for_gpu = self.group().world_size() == 1
            && on_host.is_empty()
            && !on_device.is_empty()
            && options.max_norm >= 0.0
            && (unscale.is_some() || on_non_finite != OnNonFinite::Scale);
        for optimizer in &*optimizers {
            is_for_gpu = is_for_gpu && optimizer.scales_gradients()?;
        }
        if !is_for_gpu {
            return Ok(None);
        }
        let counts: Vec<Counts> = optimizers.iter().map(Optimizer::counts).collect();
        let span = info_span!("optimizer").entered();
        let by_largest = norm == GradNorm::Infinity;
        let clipping = step::clipping(
            &step::statistics(&on_device)?,
            by_largest,
            options.max_norm,
            unscale.unwrap_or(1.0),
        )?;
        let factor = Factor::Clipped(clipping.clone());
        optimizers
            .iter_mut()
            .try_for_each(|optimizer| optimizer.step_scaled(&factor))?;
        drop(span);
        // The only wait.
        let mut scalars = vec![clipping.get(0)?];
        scalars.extend_from_slice(options.losses);
        let (_, values) = device::norm_part(&[], false, &scalars)?;
        let (grad_norm, losses) = (values[0], &values[1..]);
        let is_skipped = !grad_norm.is_finite();
        if is_skipped {
            for (optimizer, counts) in optimizers.iter_mut().zip(counts) {
                optimizer.undo_counts(counts);
            }
            if scaler.is_none() && on_non_finite == OnNonFinite::Error {
                return Err(NnError::NonFiniteGradients { norm: grad_norm });
            }
        }
        if let Some(scaler) = scaler {
            scaler.count_step(!is_skipped);
        }
        self.zero_grad();
        Ok(Some(FinishedStep {
            grad_norm,
            is_skipped,
            losses: vec![losses.iter().sum()],
            numbers: vec![options.numbers.to_vec()],
        }))
    }

    /// Returns what this rank tells the others. Gradients in the host's memory are unscaled; those
    /// on a GPU stay as they are, and their norm is that of unscaled ones. No communication.
    fn own_numbers(&self, options: &FinishOptions<'_>, unscale: Option<f64>) -> Result<OwnNumbers> {
        // Before any are unscaled.
        self.check_gradients_reduced()?;
        let is_finite_on_host = match unscale {
            Some(factor) => self.unscale_host_gradients(factor)?,
            None => true,
        };
        let norm = options.clip.norm;
        let (on_host, on_device, losses) = self.norm_parts(norm, options.losses)?;
        let on_device = norm.scaled(on_device, unscale.unwrap_or(1.0));
        Ok(OwnNumbers {
            norm_part: norm.join(on_host, on_device),
            is_finite: is_finite_on_host && on_device.is_finite(),
            loss: losses.iter().sum(),
        })
    }

    /// Gives every rank the numbers of all, and returns what they tell together: the step, which is
    /// not skipped yet, and `true` if the gradients of all ranks are finite. Collective: one
    /// all-gather over the model's group.
    ///
    /// # Errors
    /// An error in the place of a rank's own numbers, on every rank; the all-gather's;
    /// [`NnError::Options`] if ranks end their steps differently.
    fn share_numbers(
        &self,
        own: Result<OwnNumbers>,
        options: &FinishOptions<'_>,
        unscale: Option<f64>,
    ) -> Result<(FinishedStep, bool)> {
        let (is_finite, loss) = own
            .as_ref()
            .map_or((false, 0.0), |own| (own.is_finite, own.loss));
        let mut own_numbers = vec![
            u64::from(is_finite),
            loss.to_bits(),
            unscale.unwrap_or(1.0).to_bits(),
        ];
        own_numbers.extend_from_slice(options.numbers);
        let own_part = own.map(|own| own.norm_part);
        let (grad_norm, numbers) =
            self.norm_to_clip(own_part, options.max_norm, options.clip, &own_numbers)?;
        let ranks = self.group().global_ranks();
        let reference = numbers[0][2];
        let (mut is_finite, mut losses) = (true, Vec::with_capacity(numbers.len()));
        let mut others = Vec::with_capacity(numbers.len());
        for (rank, numbers) in ranks.iter().zip(numbers) {
            let (&[rank_is_finite, loss, rank_unscale], rest) = numbers
                .split_first_chunk::<3>()
                .expect("every rank has sent as many numbers as this one");
            if rank_unscale != reference {
                return Err(NnError::options(format!(
                    "rank {rank} has a loss scale of {}, rank {} of {}: it must be the same on \
                     every rank",
                    1.0 / f64::from_bits(rank_unscale),
                    ranks[0],
                    1.0 / f64::from_bits(reference),
                )));
            }
            is_finite &= rank_is_finite == 1;
            losses.push(f64::from_bits(loss));
            others.push(rest.to_vec());
        }
        let step = FinishedStep {
            grad_norm,
            is_skipped: false,
            losses,
            numbers: others,
        };
        Ok((step, is_finite))
    }
}
