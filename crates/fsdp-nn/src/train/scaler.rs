//! Loss scaling, for gradients that `f16` cannot hold as they are.

use std::collections::HashSet;
use std::sync::Arc;

use candle_core::{Tensor, WithDType};
use fsdp_comm::ReduceOp;
use fsdp_flat::storage::{HostSlice, HostSliceMut};
use fsdp_flat::with_float;
use fsdp_layout::PlainValue;
use fsdp_state::StateDict;

use crate::error::{Result, ScalerError};
use crate::exchange::{agree, device};
use crate::model::ShardedParameters;
use crate::optimizer::Optimizer;

// The numbers by which ranks tell each other of their gradients. The largest one counts for all.
const FINITE: f32 = 0.0;
const NON_FINITE: f32 = 1.0;
/// A rank could not unscale its gradients.
const FAILED: f32 = 2.0;

/// Options of a [`GradScaler`], with torch's defaults; the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradScalerOptions {
    /// The scale at the beginning; 65536 by default.
    pub init_scale: f64,
    /// The factor by which the scale grows; 2 by default.
    pub growth_factor: f64,
    /// The factor by which the scale falls after gradients that were not finite; 0.5 by default.
    pub backoff_factor: f64,
    /// The number of consecutive steps with finite gradients after which the scale grows; 2000 by
    /// default.
    pub growth_interval: u32,
    /// `true` (the default) to scale losses. With `false`, [`GradScaler::scale`] returns the loss
    /// as it is, and [`GradScaler::step`] always steps the optimizer.
    pub enabled: bool,
}

impl Default for GradScalerOptions {
    fn default() -> Self {
        GradScalerOptions {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            enabled: true,
        }
    }
}

/// Scales losses, so that small gradients are not lost in `f16`, and skips steps whose gradients
/// the scale has made too large: torch's `GradScaler` and `ShardedGradScaler`. All ranks skip the
/// same steps and have the same scale.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, linear};
/// use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, GradScaler, GradScalerOptions, MixedPrecision, NnError, Optimizer};
///
/// fsdp_comm::run_local(2, |group| {
///     let mixed_precision = MixedPrecision { param: Some(DType::F16), ..MixedPrecision::default() };
///     let config = FsdpConfig { mixed_precision, ..FsdpConfig::default() };
///     let model = FullyShardedDataParallel::new(group, config, |scope| linear(3, 1, scope.vb()))?;
///     let mut optimizer = Optimizer::new(model.parameters(), Algorithm::AdamW(AdamOptions::adamw()))?;
///     let mut scaler = GradScaler::new(GradScalerOptions { init_scale: 256.0, ..GradScalerOptions::default() })?;
///     let x = Tensor::ones((2, 3), DType::F16, &Device::Cpu)?;
///     for _ in 0..3 {
///         let loss = model.forward(|layer| layer.forward(&x)?.to_dtype(DType::F32)?.sqr()?.mean_all())?;
///         model.backward(&scaler.scale(&loss)?)?;
///         scaler.unscale(model.parameters())?; // Only for what looks at gradients, such as clipping.
///         scaler.step(&mut optimizer)?;
///         scaler.update()?;
///         model.parameters().zero_grad();
///     }
///     Ok::<(), NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Set `TrainState::scaler` to save and load its state with the run.
#[derive(Debug, Clone, PartialEq)]
pub struct GradScaler {
    options: GradScalerOptions,
    /// A number of `f32`, as in torch.
    scale: f32,
    growth_tracker: u32,
    /// The models whose gradients have been unscaled since the last update.
    unscaled: Vec<Unscaled>,
}

/// The gradients of one model, once they have been unscaled.
#[derive(Debug, Clone, PartialEq)]
struct Unscaled {
    /// The identity of the model: the address of what its units share.
    model: usize,
    /// The number of the model's reductions of gradients up to then.
    reductions: u64,
    /// The parameters whose gradients were not finite on some rank.
    non_finite: HashSet<String>,
}

impl GradScaler {
    /// Makes a scaler.
    ///
    /// # Errors
    /// [`ScalerError::OutOfRange`].
    pub fn new(options: GradScalerOptions) -> Result<Self> {
        let GradScalerOptions {
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
        } = options;
        // torch keeps the scale in f32, which may not hold the number.
        let scale = init_scale as f32;
        for (key, value, is_in_range, range) in [
            (
                "init_scale",
                init_scale,
                scale.is_finite() && scale > 0.0,
                "finite and positive in f32",
            ),
            (
                "growth_factor",
                growth_factor,
                growth_factor.is_finite() && growth_factor > 1.0,
                "finite and above 1",
            ),
            (
                "backoff_factor",
                backoff_factor,
                backoff_factor > 0.0 && backoff_factor < 1.0,
                "between 0 and 1",
            ),
            (
                "growth_interval",
                growth_interval.into(),
                growth_interval > 0,
                "at least 1",
            ),
        ] {
            if enabled && !is_in_range {
                return Err(ScalerError::OutOfRange { key, value, range }.into());
            }
        }
        Ok(GradScaler {
            options,
            scale,
            growth_tracker: 0,
            unscaled: Vec::new(),
        })
    }

    /// Returns the scale; 1 if the scaler is not enabled.
    #[must_use]
    pub fn get_scale(&self) -> f64 {
        if self.options.enabled {
            self.scale.into()
        } else {
            1.0
        }
    }

    /// Returns a loss times the scale, for the backward. No communication.
    ///
    /// # Errors
    /// candle's errors.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        if self.options.enabled {
            Ok((loss * self.get_scale())?)
        } else {
            Ok(loss.clone())
        }
    }

    /// Divides all gradients of a model by the scale, and returns `true` if those of all ranks are
    /// finite. Call it before clipping gradients; otherwise [`Self::step`] does it. Gradients of
    /// [ignored parameters](crate::FsdpConfig::ignored_states) are with the caller, who has to
    /// divide and check them too. Collectives: one all-reduce of a number over all ranks; if some
    /// gradient is not finite, another one of a byte for each parameter.
    ///
    /// # Errors
    /// [`ScalerError::UnscaledTwice`], [`ScalerError::NewGradients`];
    /// [`NnError::GradientsNotReduced`](crate::NnError::GradientsNotReduced); the all-reduce's. One
    /// rank's error is every rank's. Gradients may have been divided then: drop them.
    pub fn unscale(&mut self, parameters: &ShardedParameters) -> Result<bool> {
        if !self.options.enabled {
            return Ok(true);
        }
        if self.find_unscaled(parameters)?.is_some() {
            return Err(ScalerError::UnscaledTwice.into());
        }
        let unscaled = parameters.unscale_gradients(self.unscale_factor());
        // An error of this rank must not leave the others waiting.
        let mut worst = [match unscaled {
            Ok(true) => FINITE,
            Ok(false) => NON_FINITE,
            Err(_) => FAILED,
        }];
        parameters.group().all_reduce(&mut worst, ReduceOp::Max)?;
        if worst[0] == FAILED {
            return agree(parameters.group(), "GradScaler::unscale", unscaled);
        }
        let is_finite = worst[0] == FINITE;
        let non_finite = if is_finite {
            HashSet::new()
        } else {
            parameters.find_non_finite()?
        };
        self.unscaled.push(Unscaled {
            model: Arc::as_ptr(&parameters.shared).addr(),
            reductions: parameters.shared.reductions.count(),
            non_finite,
        });
        Ok(is_finite)
    }

    /// Returns the factor that removes the scale: an `f32`, as in torch.
    fn unscale_factor(&self) -> f64 {
        f64::from((1.0 / f64::from(self.scale)) as f32)
    }

    /// Returns `true` if losses are scaled.
    pub(super) const fn is_enabled(&self) -> bool {
        self.options.enabled
    }

    /// Returns the factor that removes the scale from a model's gradients.
    ///
    /// # Errors
    /// [`ScalerError::UnscaledTwice`].
    pub(super) fn factor_to_unscale(&self, parameters: &ShardedParameters) -> Result<f64> {
        match self.find_unscaled(parameters)? {
            Some(_) => Err(ScalerError::UnscaledTwice.into()),
            None => Ok(self.unscale_factor()),
        }
    }

    /// Returns what is known of a model's gradients; `None` if they have not been unscaled since
    /// the last update.
    ///
    /// # Errors
    /// [`ScalerError::NewGradients`].
    fn find_unscaled(&self, parameters: &ShardedParameters) -> Result<Option<&Unscaled>> {
        // One scaler may serve several models, so remember which were unscaled.
        let model = Arc::as_ptr(&parameters.shared).addr();
        let found = self
            .unscaled
            .iter()
            .find(|unscaled| unscaled.model == model);
        if found.is_some_and(|found| found.reductions != parameters.shared.reductions.count()) {
            return Err(ScalerError::NewGradients.into());
        }
        Ok(found)
    }

    /// Steps an optimizer if all gradients of its parameters are finite on all ranks, and returns
    /// `true` if it did. A scaler that is not enabled always steps the optimizer. Unscales the
    /// gradients first unless [`Self::unscale`] was called since the last [`Self::update`]. Several
    /// optimizers, of one model or of several, may step one after the other; as in torch, gradients
    /// of the others' parameters do not matter. Collectives: those of [`Self::unscale`], and the
    /// optimizer's.
    ///
    /// # Errors
    /// The errors of the optimizer and of [`Self::unscale`].
    pub fn step(&mut self, optimizer: &mut Optimizer) -> Result<bool> {
        if self.options.enabled {
            if self.find_unscaled(optimizer.parameters())?.is_none() {
                self.unscale(optimizer.parameters())?;
            }
            let unscaled = self.find_unscaled(optimizer.parameters())?;
            let non_finite = unscaled.map(|unscaled| &unscaled.non_finite);
            let mut fqns = non_finite.into_iter().flatten();
            if fqns.any(|fqn| optimizer.holds(fqn)) {
                return Ok(false);
            }
        }
        optimizer.step()?;
        Ok(true)
    }

    /// Updates the scale after a step: it falls if the step was skipped, and grows after enough
    /// steps that were not. No communication.
    ///
    /// # Errors
    /// [`ScalerError::NothingToUpdate`].
    pub fn update(&mut self) -> Result<()> {
        if !self.options.enabled {
            return Ok(());
        }
        if self.unscaled.is_empty() {
            return Err(ScalerError::NothingToUpdate.into());
        }
        // All models share the scale, so an overflow in any of them lowers it.
        let is_finite = self
            .unscaled
            .iter()
            .all(|unscaled| unscaled.non_finite.is_empty());
        self.unscaled.clear();
        self.count_step(is_finite);
        Ok(())
    }

    /// Updates the scale after a step whose gradients were finite, or not.
    pub(super) fn count_step(&mut self, is_finite: bool) {
        if !is_finite {
            // A scale of 0 could not grow again.
            self.scale = (self.scale * self.options.backoff_factor as f32).max(f32::MIN_POSITIVE);
            self.growth_tracker = 0;
        } else if self.growth_tracker.saturating_add(1) < self.options.growth_interval {
            self.growth_tracker += 1;
        } else {
            let grown = self.scale * self.options.growth_factor as f32;
            self.scale = if grown.is_finite() { grown } else { self.scale };
            self.growth_tracker = 0;
        }
    }

    /// Returns the state under torch's keys: `scale`, `growth_factor`, `backoff_factor`,
    /// `growth_interval` and `_growth_tracker`; nothing if the scaler is not enabled. Take it after
    /// [`Self::update`].
    #[must_use]
    pub fn state_dict(&self) -> StateDict {
        let mut state = StateDict::new();
        if self.options.enabled {
            state.insert("scale", f64::from(self.scale));
            state.insert("growth_factor", self.options.growth_factor);
            state.insert("backoff_factor", self.options.backoff_factor);
            state.insert("growth_interval", i64::from(self.options.growth_interval));
            state.insert("_growth_tracker", i64::from(self.growth_tracker));
        }
        state
    }

    /// Loads the state of a scaler, which may be torch's. A scaler that is not enabled ignores it,
    /// as in torch. No communication.
    ///
    /// # Errors
    /// [`ScalerError::State`] and [`ScalerError::OutOfRange`], and nothing has been changed.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        if !self.options.enabled {
            return Ok(());
        }
        let options = GradScalerOptions {
            init_scale: read_float(state, "scale")?,
            growth_factor: read_float(state, "growth_factor")?,
            backoff_factor: read_float(state, "backoff_factor")?,
            growth_interval: read_count(state, "growth_interval")?,
            enabled: true,
        };
        let growth_tracker = read_count(state, "_growth_tracker")?;
        let loaded = GradScaler {
            growth_tracker,
            ..GradScaler::new(options)?
        };
        // The scale at the beginning of this run stays the same.
        let init_scale = self.options.init_scale;
        *self = GradScaler {
            options: GradScalerOptions {
                init_scale,
                ..options
            },
            ..loaded
        };
        Ok(())
    }
}

/// Reads a float from the state of a scaler.
fn read_float(state: &StateDict, key: &'static str) -> Result<f64> {
    read_value(state, key, "a float", PlainValue::as_float)
}

/// Reads a count from the state of a scaler.
fn read_count(state: &StateDict, key: &'static str) -> Result<u32> {
    read_value(state, key, "a count", |value| {
        u32::try_from(value.as_int()?).ok()
    })
}

/// Reads a value from the state of a scaler.
///
/// # Errors
/// [`ScalerError::State`] for a missing key, and for a value that `convert` does not accept.
fn read_value<T>(
    state: &StateDict,
    key: &'static str,
    expected: &'static str,
    convert: impl FnOnce(&PlainValue) -> Option<T>,
) -> Result<T> {
    let found = match state.get(key).map(|value| value.as_plain()) {
        None => "nothing",
        Some(None) => "a tensor or dict",
        Some(Some(plain)) => match convert(plain) {
            Some(value) => return Ok(value),
            None => plain.type_name(),
        },
    };
    let error = ScalerError::State {
        key,
        found,
        expected,
    };
    Err(error.into())
}

impl ShardedParameters {
    /// Returns the parameters whose gradients are not finite on some rank, on every rank the same.
    /// Collective: an all-reduce of a byte for each parameter over all ranks.
    ///
    /// # Errors
    /// The all-reduce's; candle's errors.
    fn find_non_finite(&self) -> Result<HashSet<String>> {
        let mut flags = Vec::new();
        let mut outcome = Ok(());
        for handle in &self.handles {
            for param in 0..handle.params.len() {
                let piece = handle.grad_piece(param);
                let is_finite =
                    piece.and_then(|piece| piece.map_or(Ok(true), |grad| is_finite(&grad)));
                flags.push(u8::from(!*is_finite.as_ref().unwrap_or(&false)));
                // An error of this rank must not leave the others waiting.
                outcome = outcome.and(is_finite.map(drop));
            }
        }
        self.group().all_reduce(&mut flags, ReduceOp::Max)?;
        outcome?;
        let params = self.handles.iter().flat_map(|handle| &handle.params);
        let flagged = params.zip(flags).filter(|(_, flag)| *flag > 0);
        Ok(flagged.map(|(param, _)| param.fqn.clone()).collect())
    }

    /// Multiplies the gradients of this rank by `factor`, and returns `true` if all of them were
    /// finite before. No communication.
    fn unscale_gradients(&self, factor: f64) -> Result<bool> {
        self.check_gradients_reduced()?;
        let (_, on_device) = self.gradients_by_place();
        // A sum of squares on the GPU is not finite if an element is not, and only that sum comes
        // to the host.
        let (squares, _) = device::norm_part(&on_device, false, &[])?;
        // If a reduction has failed, its gradients are undefined: return the error before they are
        // used.
        self.synchronize()?;
        device::scale(&on_device, factor)?;
        Ok(self.unscale_host_gradients(factor)? && squares.is_finite())
    }

    /// Does what [`Self::unscale_gradients`] does, for gradients in the host's memory only.
    pub(super) fn unscale_host_gradients(&self, factor: f64) -> Result<bool> {
        let mut is_finite = true;
        for grad in self.gradients_by_place().0 {
            with_float!(grad.dtype(), T => {
                for x in HostSliceMut::<T>::write(&grad)?.iter_mut() {
                    let value = WithDType::to_f64(*x);
                    is_finite &= value.is_finite();
                    *x = <T as WithDType>::from_f64(value * factor);
                }
            });
        }
        Ok(is_finite)
    }
}

/// Returns `true` if all elements of a gradient are finite.
fn is_finite(grad: &Tensor) -> Result<bool> {
    if !grad.device().is_cpu() {
        let (squares, _) = device::norm_part(std::slice::from_ref(grad), false, &[])?;
        return Ok(squares.is_finite());
    }
    Ok(with_float!(grad.dtype(), T => {
        let values = HostSlice::<T>::read(grad)?;
        values.iter().all(|x| WithDType::to_f64(*x).is_finite())
    }))
}
