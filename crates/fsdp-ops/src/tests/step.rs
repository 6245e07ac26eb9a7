//! The kernels of the rest of a step, on the CPU, against loops in f64.

use candle_core::{DType, Device, Tensor};

use crate::kernels::host::with_kernels;
use crate::step::{
    Factor, Factored, Part, Rule, Update, can_write, clipping, combine, has_kernels, join, scale,
    statistics, update, write,
};

/// Lengths with every kind of tail, and one of more than a block's chunk.
const LENGTHS: [usize; 7] = [1, 7, 8, 250, 0, 2049, 9001];
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Returns numbers between -1 and 1 that differ from seed to seed.
fn wave(numel: usize, seed: usize, dtype: DType) -> Tensor {
    let values: Vec<f32> = (0..numel)
        .map(|index| ((index * 7 + seed * 131) as f32 * 0.37).sin())
        .collect();
    Tensor::from_vec(values, numel, &Device::Cpu)
        .unwrap()
        .to_dtype(dtype)
        .unwrap()
}

fn values(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// The error of a result that is rounded once.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 8e-3,
        DType::F16 => 1e-3,
        _ => 2e-6,
    }
}

#[track_caller]
fn assert_close(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() <= tolerance * expected.abs().max(0.1),
            "{what}, element {index}: {found} is not {expected}"
        );
    }
}

#[test]
fn tensors_are_joined_and_added_up_in_one_launch() {
    with_kernels(|| {
        for dtype in DTYPES {
            for from in DTYPES {
                if !can_write(&Device::Cpu, dtype, from).unwrap() {
                    assert!(dtype != from && dtype != DType::F32);
                    continue;
                }
                let mut parts = vec![Part::Zeros(3)];
                let mut expected = vec![0.0; 3];
                for (seed, numel) in LENGTHS.into_iter().enumerate() {
                    let part = wave(numel, seed, from);
                    expected.extend(values(&part));
                    parts.extend([Part::Elements(part), Part::Zeros(seed)]);
                    expected.extend(vec![0.0; seed]);
                }
                let joined = join(&parts, dtype, &Device::Cpu).unwrap();
                let what = format!("{from:?} as {dtype:?}");
                assert_close(&what, &values(&joined), &expected, tolerance(dtype));
                // More tensors than a launch has, at odd places.
                let addends: Vec<Tensor> = (0..100).map(|seed| wave(5, seed, from)).collect();
                let pairs: Vec<(Tensor, Option<Tensor>)> = addends
                    .iter()
                    .enumerate()
                    .map(|(index, addend)| {
                        let place = joined.narrow(0, 1 + index * 7, 5).unwrap();
                        (place, Some(addend.clone()))
                    })
                    .collect();
                let mut expected = values(&joined);
                for (index, addend) in addends.iter().enumerate() {
                    for (offset, value) in values(addend).into_iter().enumerate() {
                        expected[1 + index * 7 + offset] += value;
                    }
                }
                write(&pairs, true).unwrap();
                assert_close(&what, &values(&joined), &expected, tolerance(dtype));
            }
        }
    });
}

#[test]
fn statistics_are_those_of_all_tensors_and_show_what_is_not_finite() {
    with_kernels(|| {
        let mut tensors: Vec<Tensor> = LENGTHS
            .into_iter()
            .enumerate()
            .map(|(seed, numel)| wave(numel, seed, DTYPES[seed % 3]))
            .collect();
        let all: Vec<f64> = tensors.iter().flat_map(values).collect();
        let squares: f64 = all.iter().map(|value| value * value).sum();
        let largest = all
            .iter()
            .fold(0.0, |largest: f64, value| largest.max(value.abs()));
        let first = values(&statistics(&tensors).unwrap());
        assert_close("statistics", &first, &[squares, largest], 1e-12);
        assert_eq!(values(&statistics(&tensors).unwrap()), first);
        scale(&tensors, 0.5).unwrap();
        let halved = values(&statistics(&tensors).unwrap());
        assert_close("halves", &halved, &[squares / 4.0, largest / 2.0], 1e-12);
        for bad in [f32::NAN, f32::INFINITY] {
            tensors[3] = Tensor::full(bad, 1, &Device::Cpu).unwrap();
            let found = values(&statistics(&tensors).unwrap());
            assert!(!found[0].is_finite() && !found[1].is_finite());
            assert_eq!(found[1].is_nan(), bad.is_nan());
        }
    });
}

/// Every rule with every option that changes the formula, and the number of its states.
fn rules() -> Vec<(Rule, usize)> {
    let sgd = |momentum, nesterov, is_first| Rule::Sgd {
        maximize: false,
        weight_decay: 0.1,
        lr: 0.1,
        momentum,
        dampening: 0.2,
        nesterov,
        is_first,
    };
    let adam = |maximize, weight_decay, keep| Rule::Adam {
        maximize,
        weight_decay,
        keep,
        betas: (0.9, 0.99),
        eps: 1e-3,
        step_size: 0.02,
        correction: 0.3,
    };
    vec![
        (sgd(0.0, false, false), 0),
        (sgd(0.9, false, true), 1),
        (sgd(0.9, true, false), 1),
        (adam(false, 0.0, 0.99), 2),
        (adam(true, 0.1, 1.0), 3),
        (
            Rule::Adagrad {
                maximize: true,
                weight_decay: 0.1,
                rate: 0.05,
                eps: 1e-3,
            },
            1,
        ),
        (
            Rule::ScheduleFree {
                weight_decay: 0.1,
                beta2: 0.99,
                correction: 0.2,
                eps: 1e-3,
                iterate_weight: 0.25,
                gradient_factor: -0.03,
                lr: 0.05,
            },
            2,
        ),
    ]
}

/// Steps one element by a rule, in f64.
fn stepped(rule: &Rule, factor: f64, param: &mut f64, grad: f64, state: &mut [f64]) {
    let adjusted = |maximize: bool, weight_decay: f64, param: f64| {
        let sign = if maximize { -1.0 } else { 1.0 };
        sign * factor * grad + weight_decay * param
    };
    match *rule {
        Rule::Sgd {
            maximize,
            weight_decay,
            lr,
            momentum,
            dampening,
            nesterov,
            is_first,
        } => {
            let grad = adjusted(maximize, weight_decay, *param);
            let mut direction = grad;
            if let [buffer] = state {
                *buffer = if is_first {
                    grad
                } else {
                    *buffer * momentum + grad * (1.0 - dampening)
                };
                direction = if nesterov {
                    grad + momentum * *buffer
                } else {
                    *buffer
                };
            }
            *param -= lr * direction;
        }
        Rule::Adam {
            maximize,
            weight_decay,
            keep,
            betas,
            eps,
            step_size,
            correction,
        } => {
            *param *= keep;
            let grad = adjusted(maximize, weight_decay, *param);
            state[0] = state[0] * betas.0 + grad * (1.0 - betas.0);
            state[1] = state[1] * betas.1 + grad * grad * (1.0 - betas.1);
            let mut squares = state[1];
            if let [_, _, largest] = state {
                *largest = largest.max(squares);
                squares = *largest;
            }
            *param -= step_size * state[0] / (squares.sqrt() / correction + eps);
        }
        Rule::Adagrad {
            maximize,
            weight_decay,
            rate,
            eps,
        } => {
            let grad = adjusted(maximize, weight_decay, *param);
            state[0] += grad * grad;
            *param -= rate * grad / (state[0].sqrt() + eps);
        }
        Rule::ScheduleFree {
            weight_decay,
            beta2,
            correction,
            eps,
            iterate_weight,
            gradient_factor,
            lr,
        } => {
            let grad = factor * grad;
            state[1] = state[1] * beta2 + grad * grad * (1.0 - beta2);
            let normalized = grad / ((state[1] / correction).sqrt() + eps) + weight_decay * *param;
            *param += iterate_weight * (state[0] - *param) + gradient_factor * normalized;
            state[0] -= lr * normalized;
        }
    }
}

#[test]
fn every_rule_steps_all_parameters_as_its_formula_says() {
    with_kernels(|| {
        for dtype in DTYPES {
            assert!(has_kernels(&Device::Cpu, dtype).unwrap());
            for (rule, state_count) in rules() {
                let mut updates = Vec::new();
                let mut expected = Vec::new();
                for (seed, numel) in LENGTHS.into_iter().enumerate() {
                    let one = Update {
                        param: wave(numel, seed, dtype),
                        grad: wave(numel, seed + 10, dtype),
                        // Averages of squares are not negative.
                        state: (0..state_count)
                            .map(|kind| wave(numel, seed + 20 + kind, dtype).sqr().unwrap())
                            .collect(),
                    };
                    let mut params = values(&one.param);
                    let grads = values(&one.grad);
                    let mut states: Vec<Vec<f64>> = one.state.iter().map(values).collect();
                    for index in 0..numel {
                        let mut state: Vec<f64> =
                            states.iter().map(|values| values[index]).collect();
                        stepped(&rule, 0.5, &mut params[index], grads[index], &mut state);
                        for (values, value) in states.iter_mut().zip(state) {
                            values[index] = value;
                        }
                    }
                    updates.push(one);
                    expected.push((params, states));
                }
                // The factor is 0.5, known or made by clipping.
                let factor = if state_count == 1 {
                    Factor::Known(0.5)
                } else {
                    let norm = Tensor::new(&[4f64, 2.0], &Device::Cpu).unwrap();
                    Factor::Clipped(clipping(&norm, false, 1.0, 1.0).unwrap())
                };
                update(&rule, &factor, &updates).unwrap();
                for (one, (params, states)) in updates.iter().zip(expected) {
                    let what = format!("{rule:?} in {dtype:?}");
                    // Divisions by small square roots amplify the rounding of the state.
                    let tolerance = 4.0 * tolerance(dtype);
                    assert_close(&what, &values(&one.param), &params, tolerance);
                    for (found, expected) in one.state.iter().zip(states) {
                        assert_close(&what, &values(found), &expected, tolerance);
                    }
                }
            }
        }
    });
}

#[test]
fn a_step_whose_gradients_are_not_finite_changes_nothing() {
    with_kernels(|| {
        for (statistics, by_largest, norm, is_skipped) in [
            ([9.0, 2.0], false, 1.5, false),
            ([9.0, 2.0], true, 1.0, false),
            ([f64::INFINITY, f64::INFINITY], true, f64::INFINITY, true),
            ([f64::NAN, 2.0], true, f64::NAN, true),
        ] {
            let statistics = Tensor::new(&statistics, &Device::Cpu).unwrap();
            let decided = clipping(&statistics, by_largest, 100.0, 0.5).unwrap();
            let found = values(&decided)[0];
            assert!(
                found == norm || (found.is_nan() && norm.is_nan()),
                "{found}"
            );
            for (rule, state_count) in rules() {
                let one = Update {
                    param: wave(9, 0, DType::F32),
                    grad: wave(9, 1, DType::F32),
                    state: (0..state_count)
                        .map(|kind| wave(9, 2 + kind, DType::F32))
                        .collect(),
                };
                let all = |one: &Update| -> Vec<Vec<f64>> {
                    [&one.param]
                        .into_iter()
                        .chain(&one.state)
                        .map(values)
                        .collect()
                };
                let before = all(&one);
                let factor = Factor::Clipped(decided.clone());
                update(&rule, &factor, std::slice::from_ref(&one)).unwrap();
                assert_eq!(all(&one) == before, is_skipped, "{rule:?}");
            }
        }
    });
}

#[test]
fn more_tensors_than_a_launch_has_take_several_launches() {
    with_kernels(|| {
        // Two launches are full, and none of the tensors continues another one.
        let tensors = |first_seed: usize| -> Vec<Tensor> {
            (0..150)
                .map(|index| wave(3 + index % 5, first_seed + index, DType::F32))
                .collect()
        };
        let (params, grads) = (tensors(0), tensors(1000));
        let squares: f64 = grads
            .iter()
            .flat_map(values)
            .map(|value| value * value)
            .sum();
        let found = values(&statistics(&grads).unwrap())[0];
        assert_close("squares", &[found], &[squares], 1e-12);
        let expected: Vec<f64> = params
            .iter()
            .zip(&grads)
            .flat_map(|(param, grad)| {
                let pairs = values(param).into_iter().zip(values(grad));
                pairs.map(|(param, grad)| param - 0.1 * (0.5 * grad + 0.1 * param))
            })
            .collect();
        scale(&grads, 0.5).unwrap();
        let updates: Vec<Update> = params
            .iter()
            .zip(&grads)
            .map(|(param, grad)| Update {
                param: param.clone(),
                grad: grad.clone(),
                state: Vec::new(),
            })
            .collect();
        let (sgd, _) = rules().swap_remove(0);
        update(&sgd, &Factor::Known(1.0), &updates).unwrap();
        let found: Vec<f64> = params.iter().flat_map(values).collect();
        assert_close("parameters", &found, &expected, 2e-6);
    });
}

/// Steps a parameter of so many matrices of Adafactor, in f64.
fn stepped_by_rows_and_columns(
    numbers: &Factored,
    [matrices, height, width]: [usize; 3],
    param: &mut [f64],
    grad: &[f64],
    averages: &mut [Vec<f64>],
) {
    let root_mean_square = |values: &[f64]| {
        (values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64).sqrt()
    };
    let mut directions = vec![0.0; grad.len()];
    for matrix in 0..matrices {
        let squares =
            |row: usize, column: usize| grad[(matrix * height + row) * width + column].powi(2);
        let mut mean = 1.0;
        if let [rows, _] = averages {
            for row in 0..height {
                let sum: f64 = (0..width).map(|column| squares(row, column)).sum();
                let average = &mut rows[matrix * height + row];
                *average += numbers.weight * (sum / width as f64 - *average);
            }
            let of_matrix = &rows[matrix * height..][..height];
            mean = (of_matrix.iter().sum::<f64>() / height as f64).max(numbers.eps);
        }
        for column in 0..width {
            let sum: f64 = (0..height).map(|row| squares(row, column)).sum();
            let average = &mut averages.last_mut().unwrap()[matrix * width + column];
            *average += numbers.weight * (sum / height as f64 - *average);
        }
        for row in 0..height {
            for column in 0..width {
                let of_column = averages.last().unwrap()[matrix * width + column];
                let square = match averages {
                    [rows, _] => rows[matrix * height + row] * of_column / mean,
                    _ => of_column,
                };
                let at = (matrix * height + row) * width + column;
                directions[at] = grad[at] / square.max(numbers.eps.powi(2)).sqrt();
            }
        }
    }
    let alpha = root_mean_square(param).max(numbers.least_scale) * numbers.rate;
    let factor = alpha / (root_mean_square(&directions) / numbers.threshold).max(1.0);
    for (param, direction) in param.iter_mut().zip(directions) {
        *param = *param * numbers.keep - factor * direction;
    }
}

#[test]
fn adafactor_steps_parameters_of_every_shape_as_its_formula_says() {
    with_kernels(|| {
        for (shape, threshold, rate) in [
            (&[5, 7][..], 1.0, 0.1),
            (&[1, 1], 2.0, 0.1),
            (&[70, 1100], 0.5, -0.1),
            (&[1100, 3], 1.0, 0.1),
            (&[4, 3, 5], 1.0, 0.1),
            (&[9], 1.0, 0.1),
            (&[], 1.0, 0.1),
        ] {
            let numbers = Factored {
                rate,
                keep: 0.99,
                weight: 0.3,
                eps: 1e-3,
                least_scale: 0.2,
                threshold,
            };
            let (sizes, lens) = match *shape {
                [] => ([1, 1, 1], vec![1]),
                [width] => ([1, 1, width], vec![width]),
                [height, width] => ([1, height, width], vec![height, width]),
                [matrices, height, width] => (
                    [matrices, height, width],
                    vec![matrices * height, matrices * width],
                ),
                _ => unreachable!("no shape has more dimensions"),
            };
            let numel = sizes.iter().product();
            let of_shape = |seed| wave(numel, seed, DType::F32).reshape(shape).unwrap();
            let (param, grad) = (of_shape(1), of_shape(2));
            let averages: Vec<Tensor> = lens
                .iter()
                .map(|&len| wave(len, 3, DType::F32).sqr().unwrap())
                .collect();
            let flat = |x: &Tensor| values(&x.flatten_all().unwrap());
            let mut expected = flat(&param);
            let mut expected_averages: Vec<Vec<f64>> = averages.iter().map(values).collect();
            stepped_by_rows_and_columns(
                &numbers,
                sizes,
                &mut expected,
                &flat(&grad),
                &mut expected_averages,
            );
            let (stepped, found_averages) = numbers.step(&param, &grad, &averages).unwrap();
            let what = format!("{shape:?}");
            assert_eq!(stepped.dims(), shape);
            assert_close(&what, &flat(&stepped), &expected, 1e-5);
            for (found, expected) in found_averages.iter().zip(&expected_averages) {
                assert_close(&what, &values(found), expected, 1e-5);
            }
            let wrong = wave(numel + 1, 3, DType::F32);
            assert!(numbers.step(&param, &wrong, &averages).is_err());
        }
    });
}

#[test]
fn a_sum_of_two_tensors_is_rounded_once() {
    with_kernels(|| {
        for dtype in DTYPES {
            for numel in LENGTHS {
                let (x, y) = (wave(numel, 1, dtype), wave(numel, 2, dtype));
                let found = combine(&x, -4.775, &y, 2.0315).unwrap();
                let expected: Vec<f64> = values(&x)
                    .into_iter()
                    .zip(values(&y))
                    .map(|(x, y)| -4.775 * x + 2.0315 * y)
                    .collect();
                assert_close("sum", &values(&found), &expected, tolerance(dtype));
            }
        }
    });
}

#[test]
fn tensors_that_no_kernel_reads_are_refused() {
    with_kernels(|| {
        let matrix = wave(6, 0, DType::F32).reshape((2, 3)).unwrap();
        let turned = matrix.t().unwrap();
        assert!(scale(&[turned], 0.5).is_err());
        let mut one = Update {
            param: wave(4, 0, DType::F32),
            grad: wave(4, 1, DType::F32),
            state: vec![wave(5, 2, DType::F32)],
        };
        let rule = rules()[1].0;
        let factor = Factor::Known(1.0);
        assert!(update(&rule, &factor, std::slice::from_ref(&one)).is_err());
        one.state = vec![wave(4, 2, DType::BF16)];
        assert!(update(&rule, &factor, &[one]).is_err());
        let pair = (wave(4, 0, DType::F16), Some(wave(4, 1, DType::BF16)));
        assert!(write(&[pair], false).is_err());
    });
}
