//! `torch.optim.Adagrad`: each element's rate falls with the sum of its squared gradients.

use fsdp_layout::PlainValue;

use super::error::{AlgorithmError, check_at_least_zero};
use super::float::{Element, Float, GradientTransform, scalar};
use super::group::{Reader, Switches, float_or_zero, make_group, optional_bool};
use super::state::{StateEntries, StateEntry};

/// Hyperparameters of Adagrad; the defaults are torch's.
#[derive(Debug, Clone, PartialEq)]
pub struct AdagradOptions {
    /// The learning rate; 1e-2 by default.
    pub lr: f64,
    /// The decay of the learning rate, which is `lr / (1 + (n - 1) * lr_decay)` in update n; 0 by
    /// default.
    pub lr_decay: f64,
    /// The number that is added to the denominator; 1e-10 by default.
    pub eps: f64,
    /// The factor of the L2 penalty, which is added to the gradient; 0 by default.
    pub weight_decay: f64,
    /// The value that the state entry `sum` starts from; 0 by default.
    pub initial_accumulator_value: f64,
    /// `true` to maximize the objective instead of minimizing it; `false` by default.
    pub maximize: bool,
    /// Switches of torch's implementations. They are saved and loaded, and have no effect. Adagrad
    /// has no `capturable`.
    pub switches: Switches,
}

impl Default for AdagradOptions {
    fn default() -> Self {
        Self {
            lr: 1e-2,
            lr_decay: 0.0,
            eps: 1e-10,
            weight_decay: 0.0,
            initial_accumulator_value: 0.0,
            maximize: false,
            switches: Switches::default(),
        }
    }
}

impl AdagradOptions {
    /// Checks the hyperparameters, and refuses those that are out of range.
    pub(super) fn validate(&self, algorithm: &'static str) -> Result<(), AlgorithmError> {
        check_at_least_zero(
            algorithm,
            &[
                ("lr", self.lr),
                ("lr_decay", self.lr_decay),
                ("eps", self.eps),
                ("weight_decay", self.weight_decay),
                ("initial_accumulator_value", self.initial_accumulator_value),
            ],
        )
    }

    /// Returns the hyperparameters under torch's keys, in torch's order and types.
    pub(super) fn to_group(&self) -> Vec<(String, PlainValue)> {
        make_group([
            ("lr", self.lr.into()),
            ("lr_decay", float_or_zero(self.lr_decay)),
            ("eps", self.eps.into()),
            ("weight_decay", float_or_zero(self.weight_decay)),
            (
                "initial_accumulator_value",
                float_or_zero(self.initial_accumulator_value),
            ),
            ("foreach", optional_bool(self.switches.foreach)),
            ("maximize", self.maximize.into()),
            ("differentiable", self.switches.differentiable.into()),
            ("fused", optional_bool(self.switches.fused)),
        ])
    }

    /// Returns these options with the hyperparameters that a group has in their place.
    pub(super) fn read(&self, reader: &mut Reader<'_>) -> Result<Self, AlgorithmError> {
        Ok(Self {
            lr: reader.read_float("lr", self.lr)?,
            lr_decay: reader.read_float("lr_decay", self.lr_decay)?,
            eps: reader.read_float("eps", self.eps)?,
            weight_decay: reader.read_float("weight_decay", self.weight_decay)?,
            initial_accumulator_value: reader
                .read_float("initial_accumulator_value", self.initial_accumulator_value)?,
            maximize: reader.read_switch("maximize", false)?,
            switches: reader.read_switches(Switches::default())?,
        })
    }

    /// Returns the state entries of a parameter, in torch's order.
    pub(super) fn state_entries(&self) -> StateEntries {
        let sum = StateEntry::like_parameter("sum", self.initial_accumulator_value);
        [Some(StateEntry::STEP), Some(sum), None, None]
    }

    /// Returns the learning rate of a step, counted from 1: it decays with the steps that were made
    /// before.
    pub(crate) fn rate(&self, step: f32) -> f64 {
        self.lr / (1.0 + (f64::from(step) - 1.0) * self.lr_decay)
    }

    /// Runs one step. The slices must have equal lengths.
    pub(super) fn update<T: Float>(
        &self,
        step: f32,
        params: &mut [T],
        grads: &[T],
        sums: &mut [T],
    ) {
        let transform = GradientTransform::new(self.maximize, self.weight_decay);
        let descent = scalar::<T>(-self.rate(step));
        let one = scalar::<T>(1.0);
        let eps = Element::from_scalar(self.eps);
        for ((param, &grad), sum) in params.iter_mut().zip(grads).zip(sums) {
            let p = Element::load(*param);
            let g = transform.apply(grad, p);
            // The sum only grows, so the steps of an element only shrink.
            let s = Element::load(*sum).addcmul(g, g, one);
            *sum = s.store();
            *param = p.addcdiv(g, s.sqrt().add(eps), descent).store();
        }
    }
}
