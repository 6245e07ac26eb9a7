//! Learning-rate schedules.

use std::f64::consts::PI;

use crate::algorithm::AlgorithmError;
use crate::optimizer::Optimizer;

/// The way in which a learning rate falls after its warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Decay {
    /// It stays as it is.
    #[default]
    Constant,
    /// It falls to 0 along a half wave of a cosine.
    Cosine,
    /// It falls to 0 along a line.
    Linear,
}

/// A learning rate over the steps of a run, as a multiple of a base: torch's `LambdaLR` with the
/// functions that `transformers` calls constant, cosine and linear schedules with warm-up.
///
/// It has no state: the factor depends only on the number of the step. A run that saves its step,
/// and these fields as plain values, can resume the schedule.
///
/// ```
/// use fsdp_nn::schedule::{Decay, Schedule};
/// let schedule = Schedule { decay: Decay::Linear, warmup: 2, steps: 6 };
/// let factors: Vec<f64> = (0..8).map(|step| schedule.factor(step)).collect();
/// assert_eq!(factors, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Schedule {
    /// The way in which the rate falls.
    pub decay: Decay,
    /// The number of steps in which the rate rises from 0 to the base.
    pub warmup: u64,
    /// The number of steps, the warm-up included, after which the rate has fallen: more than those
    /// of the warm-up. A constant rate ignores it.
    pub steps: u64,
}

impl Schedule {
    /// Returns the multiple of the base in a step, counted from 0.
    #[must_use]
    pub fn factor(&self, step: u64) -> f64 {
        if step < self.warmup {
            return step as f64 / self.warmup as f64;
        }
        let decay_steps = self.steps.saturating_sub(self.warmup).max(1);
        let progress = ((step - self.warmup) as f64 / decay_steps as f64).min(1.0);
        match self.decay {
            Decay::Constant => 1.0,
            Decay::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
            Decay::Linear => 1.0 - progress,
        }
    }

    /// Sets the learning rate of each group of an optimizer for a step, counted from 0, to its base
    /// rate times the factor. The base rate is the group's
    /// [`initial_lr`](crate::ParamGroup::initial_lr): its learning rate when a schedule is first
    /// applied. It is saved in checkpoints, as by torch's schedulers. Every rank must call this; no
    /// communication.
    ///
    /// # Errors
    /// A base that is negative or not finite; a rate that falls, but has no steps after its warm-up
    /// to fall in. No group has been changed then.
    pub fn apply(&self, optimizer: &mut Optimizer, step: u64) -> Result<(), AlgorithmError> {
        let Schedule {
            decay,
            warmup,
            steps,
        } = *self;
        // The run would train nothing after its warm-up.
        if decay != Decay::Constant && steps <= warmup {
            return Err(AlgorithmError::Schedule { warmup, steps });
        }
        let factor = self.factor(step);
        // Step 1: find all rates, and check them.
        let mut rates = Vec::with_capacity(optimizer.groups().len());
        for group in optimizer.groups() {
            let base_lr = group.initial_lr().unwrap_or_else(|| group.algorithm.lr());
            let mut algorithm = group.algorithm.clone();
            algorithm.set_lr(base_lr * factor)?;
            rates.push((algorithm, base_lr));
        }
        // Step 2: set them.
        for (group, (algorithm, base_lr)) in optimizer.groups_mut().iter_mut().zip(rates) {
            group.algorithm = algorithm;
            group.set_initial_lr(base_lr);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of `transformers.get_cosine_schedule_with_warmup(optimizer, 3, 9)` under
    /// `torch.optim.lr_scheduler.LambdaLR`.
    #[test]
    fn a_cosine_with_warm_up_is_that_of_transformers() {
        let schedule = Schedule {
            decay: Decay::Cosine,
            warmup: 3,
            steps: 9,
        };
        let expected = [
            0.0,
            1.0 / 3.0,
            2.0 / 3.0,
            1.0,
            0.933_012_701_892_219_3,
            0.75,
            0.5,
            0.25,
            0.066_987_298_107_780_7,
            0.0,
        ];
        for (step, expected) in (0..).zip(expected) {
            let found = schedule.factor(step);
            assert!(
                (found - expected).abs() < 1e-15,
                "step {step}: {found} is not {expected}"
            );
        }
    }

    #[test]
    fn a_constant_rate_only_warms_up() {
        let factors =
            |schedule: Schedule| (0..4).map(|step| schedule.factor(step)).collect::<Vec<_>>();
        assert_eq!(factors(Schedule::default()), [1.0; 4]);
        assert_eq!(
            factors(Schedule {
                warmup: 2,
                ..Schedule::default()
            }),
            [0.0, 0.5, 1.0, 1.0]
        );
    }

    #[test]
    fn rates_stay_at_their_end() {
        for decay in [Decay::Cosine, Decay::Linear] {
            for (warmup, steps) in [(0, 0), (5, 5), (9, 3), (0, 1)] {
                let schedule = Schedule {
                    decay,
                    warmup,
                    steps,
                };
                assert!(schedule.factor(u64::MAX).abs() < 1e-15, "{schedule:?}");
                assert_eq!(schedule.factor(warmup), 1.0, "{schedule:?}");
            }
        }
    }
}
