//! `torch.optim.SGD`: stochastic gradient descent with momentum.

use fsdp_layout::PlainValue;

use super::error::{AlgorithmError, check_at_least_zero, check_range};
use super::float::{Element, Float, GradientTransform, scalar};
use super::group::{Reader, Switches, float_or_zero, make_group, optional_bool};
use super::state::{Initial, StateEntries, StateEntry, StateKind};

/// Hyperparameters of SGD; the defaults are torch's.
#[derive(Debug, Clone, PartialEq)]
pub struct SgdOptions {
    /// The learning rate; 1e-3 by default.
    pub lr: f64,
    /// The momentum factor; 0 by default. With any other value the state has the entry
    /// `momentum_buffer`.
    pub momentum: f64,
    /// The dampening: the gradient enters the momentum times `1 - dampening`; 0 by default.
    pub dampening: f64,
    /// The factor of the L2 penalty, which is added to the gradient; 0 by default.
    pub weight_decay: f64,
    /// `true` for Nesterov momentum, which needs a momentum and no dampening; `false` by default.
    pub nesterov: bool,
    /// `true` to maximize the objective instead of minimizing it; `false` by default.
    pub maximize: bool,
    /// Switches of torch's implementations. They are saved and loaded, and have no effect. SGD has
    /// no `capturable`.
    pub switches: Switches,
}

impl Default for SgdOptions {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            maximize: false,
            switches: Switches::default(),
        }
    }
}

impl SgdOptions {
    /// Checks the hyperparameters, and refuses those that are out of range.
    pub(super) fn validate(&self, algorithm: &'static str) -> Result<(), AlgorithmError> {
        let Self {
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            ..
        } = *self;
        check_at_least_zero(
            algorithm,
            &[
                ("lr", lr),
                ("momentum", momentum),
                ("weight_decay", weight_decay),
            ],
        )?;
        check_range(
            algorithm,
            "dampening",
            dampening,
            dampening.is_finite(),
            "finite",
        )?;
        // Nesterov's formula holds for undamped momentum only.
        if nesterov && (momentum == 0.0 || dampening != 0.0) {
            return Err(AlgorithmError::Nesterov {
                momentum,
                dampening,
            });
        }
        Ok(())
    }

    /// Returns the hyperparameters under torch's keys, in torch's order and types.
    pub(super) fn to_group(&self) -> Vec<(String, PlainValue)> {
        make_group([
            ("lr", self.lr.into()),
            ("momentum", float_or_zero(self.momentum)),
            ("dampening", float_or_zero(self.dampening)),
            ("weight_decay", float_or_zero(self.weight_decay)),
            ("nesterov", self.nesterov.into()),
            ("maximize", self.maximize.into()),
            ("foreach", optional_bool(self.switches.foreach)),
            ("differentiable", self.switches.differentiable.into()),
            ("fused", optional_bool(self.switches.fused)),
        ])
    }

    /// Returns these options with the hyperparameters that a group has in their place.
    pub(super) fn read(&self, reader: &mut Reader<'_>) -> Result<Self, AlgorithmError> {
        Ok(Self {
            lr: reader.read_float("lr", self.lr)?,
            momentum: reader.read_float("momentum", self.momentum)?,
            dampening: reader.read_float("dampening", self.dampening)?,
            weight_decay: reader.read_float("weight_decay", self.weight_decay)?,
            nesterov: reader.read_switch("nesterov", false)?,
            maximize: reader.read_switch("maximize", false)?,
            switches: reader.read_switches(Switches {
                fused: Some(false),
                ..Switches::default()
            })?,
        })
    }

    /// Returns the state entries of a parameter, in torch's order.
    pub(super) fn state_entries(&self) -> StateEntries {
        let buffer = StateEntry {
            name: "momentum_buffer",
            kind: StateKind::LikeParameter,
            initial: Initial::FirstGradient,
        };
        [(self.momentum != 0.0).then_some(buffer), None, None, None]
    }

    /// Runs one step without momentum. The slices must have equal lengths.
    pub(super) fn update<T: Float>(&self, params: &mut [T], grads: &[T]) {
        let transform = GradientTransform::new(self.maximize, self.weight_decay);
        let descent = Element::<T>::from_scalar(-self.lr);
        for (param, &grad) in params.iter_mut().zip(grads) {
            let p = Element::load(*param);
            *param = p.add_scaled(transform.apply(grad, p), descent).store();
        }
    }

    /// Runs one step with momentum. The slices must have equal lengths. `is_first` is `true` if the
    /// buffers have no values yet.
    pub(super) fn update_with_momentum<T: Float>(
        &self,
        is_first: bool,
        params: &mut [T],
        grads: &[T],
        buffers: &mut [T],
    ) {
        // Four loops, because with these choices inside, one loop would not be vectorised.
        match (is_first, self.nesterov) {
            (true, false) => self.momentum_loop::<T, true, false>(params, grads, buffers),
            (true, true) => self.momentum_loop::<T, true, true>(params, grads, buffers),
            (false, false) => self.momentum_loop::<T, false, false>(params, grads, buffers),
            (false, true) => self.momentum_loop::<T, false, true>(params, grads, buffers),
        }
    }

    /// Updates slices with momentum. `FIRST` is `true` in a parameter's first step, whose momentum
    /// is the gradient itself.
    fn momentum_loop<T: Float, const FIRST: bool, const NESTEROV: bool>(
        &self,
        params: &mut [T],
        grads: &[T],
        buffers: &mut [T],
    ) {
        let transform = GradientTransform::new(self.maximize, self.weight_decay);
        let descent = Element::<T>::from_scalar(-self.lr);
        let momentum = scalar::<T>(self.momentum);
        let lookahead_weight = Element::from_scalar(self.momentum);
        let gradient_weight = Element::from_scalar(1.0 - self.dampening);
        for ((param, &grad), buffer) in params.iter_mut().zip(grads).zip(buffers) {
            let p = Element::load(*param);
            let g = transform.apply(grad, p);
            let b = if FIRST {
                g
            } else {
                Element::load(*buffer)
                    .mul(momentum)
                    .add_scaled(g, gradient_weight)
            };
            let direction = if NESTEROV {
                g.add_scaled(b, lookahead_weight)
            } else {
                b
            };
            *buffer = b.store();
            *param = p.add_scaled(direction, descent).store();
        }
    }
}
