//! `torch.optim.Adam` and `torch.optim.AdamW`: one rule, which differ in where weight decay enters.

use fsdp_layout::PlainValue;

use super::error::{AlgorithmError, check_at_least_zero, check_range};
use super::float::{Element, Float, GradientTransform, Weight, scalar};
use super::group::{Reader, Switches, float_or_zero, make_group, optional_bool};
use super::state::{StateEntries, StateEntry};

/// Hyperparameters of Adam and AdamW; [`Default`] has torch's for Adam, [`AdamOptions::adamw`]
/// those for AdamW.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamOptions {
    /// The learning rate; 1e-3 by default.
    pub lr: f64,
    /// The decay rates of the running averages of the gradient and of its square; (0.9, 0.999) by
    /// default.
    pub betas: (f64, f64),
    /// The number that is added to the denominator; 1e-8 by default.
    pub eps: f64,
    /// The weight decay. Adam adds the parameter times this to the gradient; 0 by default. AdamW
    /// shrinks the parameter by `lr` times this at each step; 0.01 by default.
    pub weight_decay: f64,
    /// `true` to divide by the largest average of squares so far, which is the state entry
    /// `max_exp_avg_sq`; `false` by default.
    pub amsgrad: bool,
    /// `true` to maximize the objective instead of minimizing it; `false` by default.
    pub maximize: bool,
    /// Switches of torch's implementations. They are saved and loaded, and have no effect.
    pub switches: Switches,
}

impl Default for AdamOptions {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            amsgrad: false,
            maximize: false,
            switches: Switches::default(),
        }
    }
}

impl AdamOptions {
    /// Returns torch's defaults for AdamW: a weight decay of 0.01.
    #[must_use]
    pub fn adamw() -> Self {
        Self {
            weight_decay: 0.01,
            ..Self::default()
        }
    }

    /// Checks the hyperparameters, and refuses those that are out of range.
    pub(super) fn validate(&self, algorithm: &'static str) -> Result<(), AlgorithmError> {
        check_at_least_zero(
            algorithm,
            &[
                ("lr", self.lr),
                ("eps", self.eps),
                ("weight_decay", self.weight_decay),
            ],
        )?;
        for (key, value) in [("betas[0]", self.betas.0), ("betas[1]", self.betas.1)] {
            let is_in_range = (0.0..1.0).contains(&value);
            check_range(
                algorithm,
                key,
                value,
                is_in_range,
                "at least 0 and less than 1",
            )?;
        }
        Ok(())
    }

    /// Returns the hyperparameters under torch's keys, in torch's order and types.
    pub(super) fn to_group(&self, decoupled: bool) -> Vec<(String, PlainValue)> {
        // torch's defaults differ: AdamW's is a float, Adam's the integer 0.
        let weight_decay = if decoupled {
            self.weight_decay.into()
        } else {
            float_or_zero(self.weight_decay)
        };
        make_group([
            ("lr", self.lr.into()),
            (
                "betas",
                PlainValue::Tuple(vec![self.betas.0.into(), self.betas.1.into()]),
            ),
            ("eps", self.eps.into()),
            ("weight_decay", weight_decay),
            ("amsgrad", self.amsgrad.into()),
            ("maximize", self.maximize.into()),
            ("foreach", optional_bool(self.switches.foreach)),
            ("capturable", self.switches.capturable.into()),
            ("differentiable", self.switches.differentiable.into()),
            ("fused", optional_bool(self.switches.fused)),
            ("decoupled_weight_decay", decoupled.into()),
        ])
    }

    /// Reads the options of a saved parameter group, and `true` if its weight decay is decoupled.
    /// Options that the group does not have keep their current values.
    pub(super) fn read(
        &self,
        reader: &mut Reader<'_>,
        decoupled: bool,
    ) -> Result<(Self, bool), AlgorithmError> {
        let options = Self {
            lr: reader.read_float("lr", self.lr)?,
            betas: reader.read_float_pair("betas", self.betas)?,
            eps: reader.read_float("eps", self.eps)?,
            weight_decay: reader.read_float("weight_decay", self.weight_decay)?,
            amsgrad: reader.read_switch("amsgrad", false)?,
            maximize: reader.read_switch("maximize", false)?,
            switches: Switches {
                // Switches of torch's implementations: kept for torch, without an effect here.
                capturable: reader.read_switch("capturable", false)?,
                ..reader.read_switches(Switches::default())?
            },
        };
        Ok((
            options,
            reader.read_switch("decoupled_weight_decay", decoupled)?,
        ))
    }

    /// Returns the state entries of a parameter, in torch's order.
    pub(super) fn state_entries(&self) -> StateEntries {
        [
            Some(StateEntry::STEP),
            Some(StateEntry::like_parameter("exp_avg", 0.0)),
            Some(StateEntry::like_parameter("exp_avg_sq", 0.0)),
            self.amsgrad
                .then(|| StateEntry::like_parameter("max_exp_avg_sq", 0.0)),
        ]
    }

    /// Returns the factor by which weight decay shrinks the parameter, and the L2 penalty that it
    /// adds to the gradient. Decoupled decay does the former, and leaves the gradient alone.
    pub(crate) fn split_decay(&self, decoupled: bool) -> (f64, f64) {
        if decoupled {
            (1.0 - self.lr * self.weight_decay, 0.0)
        } else {
            (1.0, self.weight_decay)
        }
    }

    /// Returns the factors of one step. With `decoupled` weight decay it is AdamW's.
    pub(super) fn scalars<T: Float>(&self, decoupled: bool, step: f32) -> Scalars<T> {
        let (beta1, beta2) = self.betas;
        let (kept, penalty) = self.split_decay(decoupled);
        Scalars {
            transform: GradientTransform::new(self.maximize, penalty),
            decay_factor: (kept != 1.0).then(|| scalar::<T>(kept)),
            one_minus_beta1: Weight::new(1.0 - beta1),
            beta2: scalar::<T>(beta2),
            one_minus_beta2: scalar::<T>(1.0 - beta2),
            bias_correction2_sqrt: scalar::<T>(bias_correction(beta2, step).sqrt()),
            eps: Element::from_scalar(self.eps),
            // Computed in f64 and rounded once, as Python does.
            descent: scalar::<T>(-(self.lr / bias_correction(beta1, step))),
        }
    }
}

/// The factors that are the same for all elements of an update.
pub(super) struct Scalars<T: Float> {
    transform: GradientTransform<T>,
    /// The factor that the parameter is multiplied with: decoupled weight decay.
    decay_factor: Option<T::Real>,
    one_minus_beta1: Weight<T::Real>,
    beta2: T::Real,
    one_minus_beta2: T::Real,
    bias_correction2_sqrt: T::Real,
    eps: Element<T>,
    descent: T::Real,
}

/// Returns Adam's bias correction, `1 - beta^step`: a running average that starts at zero is
/// divided by it.
pub(crate) fn bias_correction(beta: f64, step: f32) -> f64 {
    1.0 - beta.powf(f64::from(step))
}

impl<T: Float> Scalars<T> {
    /// Runs one step without amsgrad. The slices must have equal lengths.
    pub(super) fn update(
        &self,
        params: &mut [T],
        grads: &[T],
        [exp_avgs, exp_avg_sqs]: [&mut [T]; 2],
    ) {
        let elements = params.iter_mut().zip(grads).zip(exp_avgs).zip(exp_avg_sqs);
        for (((param, &grad), exp_avg), exp_avg_sq) in elements {
            let (p, m, v) = self.decay_and_update_moments(*param, grad, *exp_avg, *exp_avg_sq);
            *exp_avg = m.store();
            *exp_avg_sq = v.store();
            *param = self.descend(p, m, v).store();
        }
    }

    /// Runs one step with amsgrad. The slices must have equal lengths.
    pub(super) fn update_amsgrad(
        &self,
        params: &mut [T],
        grads: &[T],
        [exp_avgs, exp_avg_sqs, max_exp_avg_sqs]: [&mut [T]; 3],
    ) {
        let elements = params.iter_mut().zip(grads).zip(exp_avgs).zip(exp_avg_sqs);
        for ((((param, &grad), exp_avg), exp_avg_sq), max_exp_avg_sq) in
            elements.zip(max_exp_avg_sqs)
        {
            let (p, m, v) = self.decay_and_update_moments(*param, grad, *exp_avg, *exp_avg_sq);
            // Amsgrad divides by the largest average so far.
            let largest = Element::load(*max_exp_avg_sq).maximum(v);
            *exp_avg = m.store();
            *exp_avg_sq = v.store();
            *max_exp_avg_sq = largest.store();
            *param = self.descend(p, m, largest).store();
        }
    }

    /// Returns the decayed parameter, and the moments with this gradient: the running averages of
    /// the gradient and of its square.
    #[inline(always)]
    fn decay_and_update_moments(
        &self,
        param: T,
        grad: T,
        exp_avg: T,
        exp_avg_sq: T,
    ) -> (Element<T>, Element<T>, Element<T>) {
        // The decay comes before the step, as in torch.
        let mut p = Element::load(param);
        if let Some(decay_factor) = self.decay_factor {
            p = p.mul(decay_factor);
        }
        // The gradient needs the parameter too: weight decay that is not decoupled is a penalty
        // that adds a multiple of it.
        let g = self.transform.apply(grad, p);
        let m = Element::load(exp_avg).lerp(g, self.one_minus_beta1);
        let v = Element::load(exp_avg_sq)
            .mul(self.beta2)
            .addcmul(g, g, self.one_minus_beta2);
        (p, m, v)
    }

    /// Returns the step against the averages.
    #[inline(always)]
    fn descend(&self, param: Element<T>, exp_avg: Element<T>, squares: Element<T>) -> Element<T> {
        let denominator = squares.sqrt().div(self.bias_correction2_sqrt).add(self.eps);
        param.addcdiv(exp_avg, denominator, self.descent)
    }
}
