//! Schedule-free AdamW: an AdamW that needs no schedule of its learning rate, because it averages
//! its iterates.

use fsdp_layout::PlainValue;

use super::error::{AlgorithmError, check_at_least_zero, check_range};
use super::float::{Element, Float, Weight, scalar};
use super::group::{Reader, float_or_zero, make_group, optional_bool};
use super::state::{Initial, StateEntries, StateEntry, StateKind};

/// Hyperparameters of schedule-free AdamW, with the defaults of the package `schedulefree`, and
/// what its groups keep from step to step.
///
/// There are three points, in the names of that package: `z` is the iterate, `x` the average of all
/// iterates, and `y`, between the two, the point at which gradients are computed. While the model
/// trains, its parameters are `y`. Before an evaluation, or for a checkpoint that others are going
/// to use, [`Optimizer::eval`](crate::Optimizer::eval) turns them into `x`, and
/// [`Optimizer::train`](crate::Optimizer::train) turns them into `y` again. As in that package, an
/// optimizer is in `eval` mode at first.
#[derive(Debug, Clone, PartialEq)]
pub struct ScheduleFreeOptions {
    /// The learning rate; 0.0025 by default.
    pub lr: f64,
    /// The weight of the average `x` in `y`, and the decay rate of the running average of squared
    /// gradients; (0.9, 0.999) by default.
    pub betas: (f64, f64),
    /// The number that is added to the denominator; 1e-8 by default.
    pub eps: f64,
    /// The power of the step in the weight of an iterate; 0 by default.
    pub r: f64,
    /// The number of steps in which the learning rate rises from 0; 0 by default.
    pub warmup_steps: u64,
    /// The power of the learning rate in the weight of an iterate; 2 by default.
    pub weight_lr_power: f64,
    /// The weight decay, computed at `y` like the gradients; 0 by default.
    pub weight_decay: f64,
    /// torch's switch between two implementations. It is saved and loaded, and has no effect.
    pub foreach: Option<bool>,
    /// Steps so far.
    pub k: u64,
    /// `true` while the parameters are `y`, `false` while they are `x`.
    pub train_mode: bool,
    /// The sum of the weights of all iterates so far.
    pub weight_sum: f64,
    /// The largest learning rate so far; -1 before the first step.
    pub lr_max: f64,
    /// The learning rate of the last step.
    pub scheduled_lr: f64,
}

impl Default for ScheduleFreeOptions {
    fn default() -> Self {
        Self {
            lr: 0.0025,
            betas: (0.9, 0.999),
            eps: 1e-8,
            r: 0.0,
            warmup_steps: 0,
            weight_lr_power: 2.0,
            weight_decay: 0.0,
            foreach: Some(true),
            k: 0,
            train_mode: false,
            weight_sum: 0.0,
            lr_max: -1.0,
            scheduled_lr: 0.0,
        }
    }
}

/// The optimizer's name in messages: that of its class.
pub(super) const NAME: &str = "AdamWScheduleFree";

impl ScheduleFreeOptions {
    /// Checks the hyperparameters, and refuses those that are out of range.
    pub(super) fn validate(&self, algorithm: &'static str) -> Result<(), AlgorithmError> {
        let values = [
            ("lr", self.lr),
            ("eps", self.eps),
            ("weight_decay", self.weight_decay),
            ("r", self.r),
            ("weight_lr_power", self.weight_lr_power),
            ("weight_sum", self.weight_sum),
        ];
        check_at_least_zero(algorithm, &values)?;
        // An infinite rate would make the weights NaN. Before the first step, `lr_max` is -1.
        check_range(
            algorithm,
            "lr_max",
            self.lr_max,
            self.lr_max.is_finite() && self.lr_max >= -1.0,
            "finite and at least -1",
        )?;
        // `betas[0]` may not be 0, because `switch_weight` divides by it.
        check_range(
            algorithm,
            "betas[0]",
            self.betas.0,
            (f64::MIN_POSITIVE..1.0).contains(&self.betas.0),
            "above 0 and less than 1",
        )?;
        check_range(
            algorithm,
            "betas[1]",
            self.betas.1,
            (0.0..1.0).contains(&self.betas.1),
            "at least 0 and less than 1",
        )
    }

    /// Returns the hyperparameters under torch's keys, in torch's order and types.
    pub(super) fn to_group(&self) -> Vec<(String, PlainValue)> {
        make_group([
            ("lr", self.lr.into()),
            (
                "betas",
                PlainValue::Tuple(vec![self.betas.0.into(), self.betas.1.into()]),
            ),
            ("eps", self.eps.into()),
            ("r", self.r.into()),
            ("k", self.k.cast_signed().into()),
            ("warmup_steps", self.warmup_steps.cast_signed().into()),
            ("train_mode", self.train_mode.into()),
            ("weight_sum", self.weight_sum.into()),
            ("lr_max", self.lr_max.into()),
            ("scheduled_lr", self.scheduled_lr.into()),
            ("weight_lr_power", self.weight_lr_power.into()),
            ("weight_decay", float_or_zero(self.weight_decay)),
            ("foreach", optional_bool(self.foreach)),
        ])
    }

    /// Returns these options with the hyperparameters that a group has in their place.
    pub(super) fn read(&self, reader: &mut Reader<'_>) -> Result<Self, AlgorithmError> {
        Ok(Self {
            lr: reader.read_float("lr", self.lr)?,
            betas: reader.read_float_pair("betas", self.betas)?,
            eps: reader.read_float("eps", self.eps)?,
            r: reader.read_float("r", self.r)?,
            k: reader.read_count("k", self.k)?,
            warmup_steps: reader.read_count("warmup_steps", self.warmup_steps)?,
            train_mode: reader.read_bool("train_mode", self.train_mode)?,
            weight_sum: reader.read_float("weight_sum", self.weight_sum)?,
            lr_max: reader.read_float("lr_max", self.lr_max)?,
            scheduled_lr: reader.read_float("scheduled_lr", self.scheduled_lr)?,
            weight_lr_power: reader.read_float("weight_lr_power", self.weight_lr_power)?,
            weight_decay: reader.read_float("weight_decay", self.weight_decay)?,
            foreach: reader.read_optional_switch("foreach", None)?,
        })
    }

    /// Returns the state entries of a parameter, in torch's order.
    pub(super) fn state_entries(&self) -> StateEntries {
        let z = StateEntry {
            name: "z",
            kind: StateKind::LikeParameter,
            initial: Initial::Parameter,
        };
        [
            Some(z),
            Some(StateEntry::like_parameter("exp_avg_sq", 0.0)),
            None,
            None,
        ]
    }

    /// Returns the weight that the iterate of the current step has in the average.
    fn iterate_weight(&self) -> f64 {
        ((self.k + 1) as f64).powf(self.r) * self.lr_max.powf(self.weight_lr_power)
    }

    /// Begins a step: sets its learning rate, the largest rate so far and the sum of weights. The
    /// caller counts the step in `k` when it is done.
    ///
    /// # Errors
    /// [`AlgorithmError::NotTraining`] if the parameters are the average.
    pub(super) fn begin_step(&mut self) -> Result<(), AlgorithmError> {
        if !self.train_mode {
            return Err(AlgorithmError::NotTraining { algorithm: NAME });
        }
        // The rate grows linearly, from its first fraction in the first step.
        let warmup = if self.k < self.warmup_steps {
            (self.k + 1) as f64 / self.warmup_steps as f64
        } else {
            1.0
        };
        self.scheduled_lr = self.lr * warmup;
        // Later iterates count more if their rate was larger.
        self.lr_max = self.lr_max.max(self.scheduled_lr);
        self.weight_sum += self.iterate_weight();
        Ok(())
    }

    /// Returns the divisor that makes up for the average of squares beginning at zero.
    pub(crate) fn bias_correction(&self) -> f64 {
        1.0 - self.betas.1.powf((self.k + 1) as f64)
    }

    /// Returns the weight of `z` in the new average.
    pub(crate) fn z_weight(&self) -> f64 {
        // Without any learning rate so far there is nothing to average.
        if self.weight_sum == 0.0 {
            0.0
        } else {
            self.iterate_weight() / self.weight_sum
        }
    }

    /// Returns the factor with which the normalized gradient is added to the parameter.
    pub(crate) fn gradient_factor(&self) -> f64 {
        self.scheduled_lr * (self.betas.0 * (1.0 - self.z_weight()) - 1.0)
    }

    /// Runs one step. The slices must have equal lengths; `zs` and `exp_avg_sqs` are the state of
    /// `params`.
    pub(super) fn update<T: Float>(
        &self,
        params: &mut [T],
        grads: &[T],
        zs: &mut [T],
        exp_avg_sqs: &mut [T],
    ) {
        let beta2 = scalar::<T>(self.betas.1);
        let one_minus_beta2 = scalar::<T>(1.0 - self.betas.1);
        let bias_correction = scalar::<T>(self.bias_correction());
        let eps = Element::from_scalar(self.eps);
        let decay = (self.weight_decay != 0.0).then(|| Element::from_scalar(self.weight_decay));
        let z_weight = Weight::new(self.z_weight());
        let gradient_factor = Element::from_scalar(self.gradient_factor());
        let negative_lr = Element::from_scalar(-self.scheduled_lr);
        for (((param, &grad), z), exp_avg_sq) in
            params.iter_mut().zip(grads).zip(zs).zip(exp_avg_sqs)
        {
            let y = Element::load(*param);
            let g = Element::load(grad);
            // AdamW's step, without its average of gradients.
            let v = Element::load(*exp_avg_sq)
                .mul(beta2)
                .addcmul(g, g, one_minus_beta2);
            let mut normalized = g.div_by(v.div(bias_correction).sqrt().add(eps));
            if let Some(decay) = decay {
                normalized = normalized.add_scaled(y, decay);
            }
            // Both `y` and `z` move, each from the `z` before this step.
            let old_z = Element::load(*z);
            *exp_avg_sq = v.store();
            *param = y
                .lerp(old_z, z_weight)
                .add_scaled(normalized, gradient_factor)
                .store();
            *z = old_z.add_scaled(normalized, negative_lr).store();
        }
    }

    /// Returns the weight of the `lerp` from a parameter to `z` that turns `x` into `y`
    /// (`to_train`), or `y` into `x`.
    ///
    /// With the first beta `b`, `y = b * x + (1 - b) * z`: from `x` to `z` the weight is `1 - b`.
    /// Solved for `x`, that is `x = y / b + (1 - 1 / b) * z`: from `y` to `z` the weight is `1 - 1
    /// / b`, which is negative.
    pub(crate) fn switch_weight(&self, to_train: bool) -> f64 {
        if to_train {
            1.0 - self.betas.0
        } else {
            1.0 - 1.0 / self.betas.0
        }
    }
}
