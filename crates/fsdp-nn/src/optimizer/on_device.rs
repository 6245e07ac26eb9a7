//! The update rules for parameters that are not in host memory: by kernels, of which one launch
//! steps all parameters of a group, or as candle ops where there are none.
//!
//! The same formulas as [`Algorithm::update`]'s; results differ from those by roundings. Half types
//! are computed in `f32` and rounded once a step.

use candle_core::{DType, Device, Result, Tensor};
use fsdp_ops::step;

use crate::algorithm::{
    AdagradOptions, AdamOptions, Algorithm, ScheduleFreeOptions, SgdOptions, bias_correction,
};

/// Elements that are updated at a time: each op makes a new tensor of them. In tests there are
/// several pieces, the last of which is not whole.
const PIECE_LEN: usize = if cfg!(test) { 2 } else { 1 << 24 };

/// An update of a parameter: the rule, and the step that it is of, as in [`Algorithm::update`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Update<'a> {
    pub(super) algorithm: &'a Algorithm,
    /// The number of the update, from 1.
    pub(super) step: f32,
    /// `true` if the entry that begins as the first gradient has no values yet.
    pub(super) is_first: bool,
}

/// The updates of a group, which are launched together.
#[derive(Debug)]
pub(super) struct Launches<'a> {
    /// The factor of gradients.
    factor: step::Factor,
    /// The updates of each step of the rule: parameters may be in different steps.
    updates: Vec<(Update<'a>, Vec<step::Update>)>,
}

impl<'a> Launches<'a> {
    /// Makes an empty list. Gradients are going to be multiplied by a factor first.
    pub(super) const fn new(factor: step::Factor) -> Self {
        Launches {
            factor,
            updates: Vec::new(),
        }
    }

    /// Returns `true` if parameters of this dtype on this device are updated by kernels.
    pub(super) fn can_step(device: &Device, dtype: DType) -> Result<bool> {
        step::has_kernels(device, dtype)
    }

    /// Adds the update of a piece of a parameter, which is done by [`Self::run`], or at once if
    /// there is no kernel for it: only where the factor is 1.
    pub(super) fn add(
        &mut self,
        update: Update<'a>,
        param: Tensor,
        grad: Tensor,
        state: Vec<Tensor>,
    ) -> Result<()> {
        if !Self::can_step(param.device(), param.dtype())? {
            return update.apply(&param, &grad, &state);
        }
        let one = step::Update { param, grad, state };
        let same_step = self.updates.iter_mut().find(|(other, updates)| {
            other.step == update.step
                && other.is_first == update.is_first
                && updates[0].param.dtype() == one.param.dtype()
        });
        match same_step {
            Some((_, updates)) => updates.push(one),
            None => self.updates.push((update, vec![one])),
        }
        Ok(())
    }

    /// Queues the launches of all updates.
    pub(super) fn run(self) -> Result<()> {
        self.updates
            .iter()
            .try_for_each(|(update, updates)| step::update(&update.rule(), &self.factor, updates))
    }
}

impl Update<'_> {
    /// Returns the rule with the numbers of the step, as kernels take it.
    fn rule(self) -> step::Rule {
        match self.algorithm {
            Algorithm::Sgd(options) => step::Rule::Sgd {
                maximize: options.maximize,
                weight_decay: options.weight_decay,
                lr: options.lr,
                momentum: options.momentum,
                dampening: options.dampening,
                nesterov: options.nesterov,
                is_first: self.is_first,
            },
            Algorithm::Adam(options) | Algorithm::AdamW(options) => {
                let is_decoupled = matches!(self.algorithm, Algorithm::AdamW(_));
                let (keep, penalty) = options.split_decay(is_decoupled);
                step::Rule::Adam {
                    maximize: options.maximize,
                    weight_decay: penalty,
                    keep,
                    betas: options.betas,
                    eps: options.eps,
                    step_size: options.lr / bias_correction(options.betas.0, self.step),
                    correction: bias_correction(options.betas.1, self.step).sqrt(),
                }
            }
            Algorithm::Adagrad(options) => step::Rule::Adagrad {
                maximize: options.maximize,
                weight_decay: options.weight_decay,
                rate: options.rate(self.step),
                eps: options.eps,
            },
            Algorithm::ScheduleFreeAdamW(options) => step::Rule::ScheduleFree {
                weight_decay: options.weight_decay,
                beta2: options.betas.1,
                correction: options.bias_correction(),
                eps: options.eps,
                iterate_weight: options.z_weight(),
                gradient_factor: options.gradient_factor(),
                lr: options.scheduled_lr,
            },
            Algorithm::Adafactor(_) | Algorithm::Muon(_) => {
                unreachable!("`Optimizer::step` updates parameters that must be whole by itself")
            }
        }
    }

    /// Updates a piece of a parameter once, in place. `state` is in the order of the schema, and
    /// has as many tensors; all are one-dimensional, contiguous and equally long.
    fn apply(self, param: &Tensor, grad: &Tensor, state: &[Tensor]) -> Result<()> {
        let numel = param.elem_count();
        for start in (0..numel).step_by(PIECE_LEN) {
            let len = PIECE_LEN.min(numel - start);
            let state: Vec<Tensor> = state
                .iter()
                .map(|tensor| tensor.narrow(0, start, len))
                .collect::<Result<_>>()?;
            let grad = grad.narrow(0, start, len)?;
            self.apply_to_piece(&param.narrow(0, start, len)?, &grad, &state)?;
        }
        Ok(())
    }

    /// Updates a piece and its state with a gradient. All arithmetic is done in the wider type that
    /// `widen` chooses.
    fn apply_to_piece(self, param: &Tensor, grad: &Tensor, state: &[Tensor]) -> Result<()> {
        let wide_state: Vec<Tensor> = state.iter().map(widen).collect::<Result<_>>()?;
        let wide_param = widen(param)?;
        let wide_grad = widen(grad)?;
        let (new_param, new_state) = match self.algorithm {
            Algorithm::Sgd(options) => {
                sgd(options, self.is_first, wide_param, wide_grad, &wide_state)?
            }
            Algorithm::Adam(options) | Algorithm::AdamW(options) => {
                adam(options, self, wide_param, wide_grad, &wide_state)?
            }
            Algorithm::Adagrad(options) => {
                adagrad(options, self.step, wide_param, wide_grad, &wide_state)?
            }
            Algorithm::ScheduleFreeAdamW(options) => {
                schedule_free(options, &wide_param, wide_grad, &wide_state)?
            }
            Algorithm::Adafactor(_) | Algorithm::Muon(_) => {
                unreachable!("`Optimizer::step` updates parameters that must be whole by itself")
            }
        };
        // Only now, so that an error has changed nothing.
        for (target, value) in state.iter().zip(&new_state) {
            store(target, value)?;
        }
        store(param, &new_param)
    }
}

/// A new parameter, and its new state.
type Updated = (Tensor, Vec<Tensor>);

/// Returns a tensor in the dtype that updates are computed in.
pub(super) fn widen(tensor: &Tensor) -> Result<Tensor> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 => tensor.to_dtype(DType::F32),
        _ => Ok(tensor.clone()),
    }
}

/// Returns the sum of two tensors of one shape and dtype, each multiplied by a factor: by one
/// kernel if there is one.
pub(super) fn combine(x: &Tensor, x_factor: f64, y: &Tensor, y_factor: f64) -> Result<Tensor> {
    if step::has_kernels(x.device(), x.dtype())? {
        return step::combine(x, x_factor, y, y_factor);
    }
    (x * x_factor)? + (y * y_factor)?
}

/// Writes a value into a tensor, rounded to the tensor's dtype.
pub(super) fn store(target: &Tensor, value: &Tensor) -> Result<()> {
    target.slice_set(&value.to_dtype(target.dtype())?.contiguous()?, 0, 0)
}

/// Returns the gradient, turned round to maximize, and with the L2 penalty added.
fn adjust_gradient(
    grad: Tensor,
    param: &Tensor,
    maximize: bool,
    weight_decay: f64,
) -> Result<Tensor> {
    let grad = if maximize { grad.neg()? } else { grad };
    if weight_decay == 0.0 {
        Ok(grad)
    } else {
        grad + (param * weight_decay)?
    }
}

/// Computes a step of SGD.
fn sgd(
    options: &SgdOptions,
    is_first: bool,
    param: Tensor,
    grad: Tensor,
    state: &[Tensor],
) -> Result<Updated> {
    let grad = adjust_gradient(grad, &param, options.maximize, options.weight_decay)?;
    if options.momentum == 0.0 {
        return Ok(((param - (grad * options.lr)?)?, Vec::new()));
    }
    let [buffer] = state else {
        unreachable!("SGD with momentum has one entry of state");
    };
    // The momentum begins as the first gradient itself.
    let buffer = if is_first {
        grad.clone()
    } else {
        ((buffer * options.momentum)? + (&grad * (1.0 - options.dampening))?)?
    };
    let direction = if options.nesterov {
        (grad + (&buffer * options.momentum)?)?
    } else {
        buffer.clone()
    };
    Ok(((param - (direction * options.lr)?)?, vec![buffer]))
}

/// Computes a step of schedule-free AdamW.
fn schedule_free(
    options: &ScheduleFreeOptions,
    y: &Tensor,
    grad: Tensor,
    state: &[Tensor],
) -> Result<Updated> {
    let [z, exp_avg_sq] = state else {
        unreachable!("schedule-free AdamW has two entries of state");
    };
    // The same arithmetic as on the host, one operation of candle's at a time.
    let z_weight = options.z_weight();
    let beta2 = options.betas.1;
    let v = ((exp_avg_sq * beta2)? + (grad.sqr()? * (1.0 - beta2))?)?;
    let denominator = ((&v / options.bias_correction())?.sqrt()? + options.eps)?;
    let normalized = ((grad / denominator)? + (y * options.weight_decay)?)?;
    let moved = ((y * (1.0 - z_weight))? + (z * z_weight)?)?;
    let param = (moved + (&normalized * options.gradient_factor())?)?;
    let z = (z - (normalized * options.scheduled_lr)?)?;
    Ok((param, vec![z, v]))
}

/// Computes a step of Adam, or with `decoupled` weight decay of AdamW.
fn adam(
    options: &AdamOptions,
    update: Update<'_>,
    mut param: Tensor,
    grad: Tensor,
    state: &[Tensor],
) -> Result<Updated> {
    let [exp_avg, exp_avg_sq, optional_max @ ..] = state else {
        unreachable!("Adam has two entries of state or more");
    };
    let (beta1, beta2) = options.betas;
    let step = update.step;
    let is_decoupled = matches!(update.algorithm, Algorithm::AdamW(_));
    let (keep, penalty) = options.split_decay(is_decoupled);
    if keep != 1.0 {
        param = (param * keep)?;
    }
    let grad = adjust_gradient(grad, &param, options.maximize, penalty)?;
    let m = ((exp_avg * beta1)? + (&grad * (1.0 - beta1))?)?;
    let v = ((exp_avg_sq * beta2)? + (grad.sqr()? * (1.0 - beta2))?)?;
    // With amsgrad the third entry is the largest average so far.
    let max_exp_avg_sq = match optional_max.first() {
        // A NaN stays one, which candle's `maximum` loses on GPUs.
        Some(earlier_max) => Some(earlier_max.gt(&v)?.where_cond(earlier_max, &v)?),
        None => None,
    };
    let squares = max_exp_avg_sq.as_ref().unwrap_or(&v);
    let denominator = ((squares.sqrt()? / bias_correction(beta2, step).sqrt())? + options.eps)?;
    let descent = ((&m / denominator)? * (options.lr / bias_correction(beta1, step)))?;
    let new_state = [m, v].into_iter().chain(max_exp_avg_sq).collect();
    Ok(((param - descent)?, new_state))
}

/// Computes a step of Adagrad.
fn adagrad(
    options: &AdagradOptions,
    step: f32,
    param: Tensor,
    grad: Tensor,
    state: &[Tensor],
) -> Result<Updated> {
    let [sum] = state else {
        unreachable!("Adagrad has one entry of state");
    };
    let rate = options.rate(step);
    let grad = adjust_gradient(grad, &param, options.maximize, options.weight_decay)?;
    let sum = (sum + grad.sqr()?)?;
    let denominator = (sum.sqrt()? + options.eps)?;
    Ok(((param - ((grad / denominator)? * rate)?)?, vec![sum]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{Initial, StateKind};
    use candle_core::Device;

    /// Every rule with every option that changes the formula.
    fn algorithms() -> Vec<Algorithm> {
        let sgd = |momentum, nesterov, weight_decay, dampening| {
            Algorithm::Sgd(SgdOptions {
                lr: 0.1,
                momentum,
                nesterov,
                weight_decay,
                dampening,
                ..SgdOptions::default()
            })
        };
        let adam = AdamOptions {
            lr: 0.01,
            weight_decay: 0.1,
            ..AdamOptions::default()
        };
        let amsgrad = AdamOptions {
            amsgrad: true,
            maximize: true,
            ..adam.clone()
        };
        vec![
            sgd(0.0, false, 0.0, 0.0),
            sgd(0.9, false, 0.1, 0.3),
            sgd(0.9, true, 0.0, 0.0),
            Algorithm::Adam(adam.clone()),
            Algorithm::AdamW(adam),
            Algorithm::Adam(amsgrad.clone()),
            Algorithm::AdamW(amsgrad),
            Algorithm::Adagrad(AdagradOptions {
                lr_decay: 0.1,
                weight_decay: 0.1,
                initial_accumulator_value: 0.5,
                ..AdagradOptions::default()
            }),
            Algorithm::ScheduleFreeAdamW(ScheduleFreeOptions {
                weight_decay: 0.1,
                k: 3,
                train_mode: true,
                lr_max: 0.02,
                scheduled_lr: 0.01,
                weight_sum: 0.004,
                ..ScheduleFreeOptions::default()
            }),
        ]
    }

    #[test]
    fn candle_ops_follow_the_update_rules() {
        const STEPS: usize = 6;
        for algorithm in algorithms() {
            let numel = 5;
            let wave = |i: usize| (i as f64 * 0.7).sin() + 0.05;
            let mut expected: Vec<f64> = (0..numel).map(wave).collect();
            let param = Tensor::new(expected.as_slice(), &Device::Cpu).unwrap();
            let entries: Vec<_> = algorithm
                .state_entries()
                .filter(|entry| entry.kind == StateKind::LikeParameter)
                .collect();
            let initial = |initial| {
                if let Initial::Value(value) = initial {
                    value
                } else {
                    0.0
                }
            };
            let mut expected_state: Vec<Vec<f64>> = entries
                .iter()
                .map(|entry| vec![initial(entry.initial); numel])
                .collect();
            let state: Vec<Tensor> = expected_state
                .iter()
                .map(|values| Tensor::new(values.as_slice(), &Device::Cpu).unwrap())
                .collect();
            for step in 0..STEPS {
                let is_first = step == 0
                    && entries
                        .iter()
                        .any(|entry| entry.initial == Initial::FirstGradient);
                let grads: Vec<f64> = (0..numel).map(|i| wave(i * 3 + step * 5)).collect();
                let grad = Tensor::new(grads.as_slice(), &Device::Cpu).unwrap();
                let step_number = (step + 1) as f32;
                let update = Update {
                    algorithm: &algorithm,
                    step: step_number,
                    is_first,
                };
                update.apply(&param, &grad, &state).unwrap();
                let mut slices: Vec<&mut [f64]> =
                    expected_state.iter_mut().map(Vec::as_mut_slice).collect();
                algorithm
                    .update(step_number, is_first, &mut expected, &grads, &mut slices)
                    .unwrap();
            }
            let assert_close = |found: &Tensor, expected: &[f64]| {
                for (found, expected) in found.to_vec1::<f64>().unwrap().iter().zip(expected) {
                    assert!(
                        (found - expected).abs() < 1e-12,
                        "{algorithm:?}: {found} is not {expected}"
                    );
                }
            };
            assert_close(&param, &expected);
            state
                .iter()
                .zip(&expected_state)
                .for_each(|(found, expected)| assert_close(found, expected));
        }
    }

    #[test]
    fn half_types_keep_what_they_cannot_hold_within_a_step() {
        // 0.999 is 1 in bf16: computed there, the average of squares would never forget.
        let adam = Algorithm::Adam(AdamOptions::default());
        let tensor = |value: f32| {
            Tensor::full(value, 3, &Device::Cpu)
                .unwrap()
                .to_dtype(DType::BF16)
                .unwrap()
        };
        let (param, state) = (tensor(1.0), [tensor(0.0), tensor(0.0)]);
        let update = Update {
            algorithm: &adam,
            step: 1.0,
            is_first: false,
        };
        update.apply(&param, &tensor(2.0), &state).unwrap();
        let value = |tensor: &Tensor| {
            tensor
                .to_dtype(DType::F32)
                .unwrap()
                .to_vec1::<f32>()
                .unwrap()[0]
        };
        assert!(
            (value(&state[1]) - 0.004).abs() < 2e-5,
            "{}",
            value(&state[1])
        );
        assert_eq!(param.dtype(), DType::BF16);
    }
}
