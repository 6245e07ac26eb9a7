//! Promises of the kernels beyond the values of the loops.

use candle_core::{DType, Device, Tensor, Var};
use half::bf16;

use super::assert_close;
use crate::kernels::host::with_kernels;
use crate::{DropoutMasks, cross_entropy, dropout, rope, rope_i, softmax_last_dim};

/// Returns numbers that need no random generator.
fn values(shape: &[usize], dtype: DType) -> Tensor {
    let count: usize = shape.iter().product();
    let values: Vec<f64> = (0..count).map(|index| (1.7 * index as f64).sin()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
        .unwrap()
        .to_dtype(dtype)
        .unwrap()
}

/// Returns the elements of a tensor, exactly.
fn elements(x: &Tensor) -> Vec<f64> {
    let x = x.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
    x.to_vec1().unwrap()
}

#[test]
fn dropout_by_kernels_drops_what_loops_drop() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (shape, p) in [(&[5, 33][..], 0.3), (&[3, 2, 64], 0.5), (&[7], 1.0)] {
            let x = values(shape, dtype);
            let masks = DropoutMasks::new(7, 3, 40).at("mlp");
            let drop_some = || {
                let x = Var::from_tensor(&x).unwrap();
                let y = dropout(&x, p, masks).unwrap();
                let gradients = y.sum_all().unwrap().backward().unwrap();
                [elements(&y), elements(gradients.get(&x).unwrap())]
            };
            if let Some(found) = with_kernels(drop_some) {
                assert_eq!(found, drop_some(), "{shape:?}, {dtype:?}");
            }
        }
    }
}

#[test]
fn rotations_by_kernels_have_the_bits_of_loops() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let x = values(&[2, 5, 3, 32], dtype).transpose(1, 2).unwrap();
        let angles = values(&[5, 16], dtype);
        for rotate in [rope, rope_i] {
            let rotated = || elements(&rotate(&x, &angles, &angles).unwrap());
            if let Some(found) = with_kernels(rotated) {
                assert_eq!(found, rotated(), "{dtype:?}");
            }
        }
    }
}

/// Nobody waits for a GPU to learn that a target is no class.
#[test]
fn a_target_that_is_no_class_makes_loss_and_gradient_nan_by_kernels() {
    let scores = Var::from_tensor(&values(&[3, 4], DType::F32)).unwrap();
    for (target, is_class) in [(3, true), (4, false), (-1, false), (1 << 32, false)] {
        let targets = Tensor::new(&[0i64, target, 2], &Device::Cpu).unwrap();
        let loss_and_gradient = || {
            let loss = cross_entropy(&scores, &targets).unwrap();
            let gradients = loss.backward().unwrap();
            let gradient = elements(gradients.get(&scores).unwrap());
            (loss.to_scalar::<f32>().unwrap(), gradient)
        };
        if let Some((loss, gradient)) = with_kernels(loss_and_gradient) {
            assert_eq!(loss.is_finite(), is_class, "{target}");
            let rows: Vec<&[f64]> = gradient.chunks(4).collect();
            let mut of_target = rows[1].iter();
            assert!(of_target.all(|x| x.is_nan() != is_class), "{target}");
            // Those of the other rows stay what they are.
            assert!([rows[0], rows[2]].concat().iter().all(|x| x.is_finite()));
        }
    }
}

#[test]
fn rows_that_begin_with_hidden_scores_have_weights_by_kernels() {
    let hidden = bf16::NEG_INFINITY;
    for width in [70, 2000] {
        let mut row = vec![hidden; width];
        row[width - 1] = bf16::ONE;
        let x = Tensor::from_vec(
            [row, vec![hidden; width]].concat(),
            (2, width),
            &Device::Cpu,
        );
        let x = x.unwrap();
        let Some(y) = with_kernels(|| elements(&softmax_last_dim(&x).unwrap())) else {
            return;
        };
        assert_eq!((y[0], y[width - 1]), (0.0, 1.0));
        assert!(y[width..].iter().all(|weight| weight.is_nan()));
    }
}

/// Memory that is not aligned to packs, and rows whose width is no multiple of one.
#[test]
fn any_address_and_width_works_by_kernels() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for width in [7, 64] {
            for offset in 0..3 {
                let memory = values(&[6 * width + offset], dtype);
                let x = memory.narrow(0, offset, 6 * width).unwrap();
                let x = x.reshape((6, width)).unwrap();
                let ones = Tensor::ones(width, dtype, &Device::Cpu).unwrap();
                let norm = |x: &[Tensor]| crate::layer_norm(&x[0], &x[1], &x[1], 1e-5);
                let exact = |x: &Tensor| x.to_dtype(DType::F64).unwrap();
                let tolerance = if dtype == DType::F32 { 1e-5 } else { 0.02 };
                let normalize = || exact(&norm(&[x.clone(), ones.clone()]).unwrap());
                let soften = || exact(&softmax_last_dim(&x).unwrap());
                let Some((normalized, softened)) = with_kernels(|| (normalize(), soften())) else {
                    return;
                };
                let what = format!("{dtype:?}, width {width}, offset {offset}");
                let expected = softmax_last_dim(&exact(&x)).unwrap();
                assert_close(&what, &softened, &expected, tolerance);
                let expected = norm(&[exact(&x), exact(&ones)]).unwrap();
                assert_close(&what, &normalized, &expected, tolerance);
            }
        }
    }
}

/// A kernel that has a whole row in registers reads it by packs only where all tensors begin at
/// one.
#[test]
fn gradients_of_norms_are_whole_at_any_address_by_kernels() {
    let width = 512;
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 0.05)] {
        for (x_offset, weight_offset) in [(0, 1), (1, 0), (2, 3), (0, 0)] {
            // Two norms, of which the first has no bias.
            let run = |inputs: &[Tensor; 2], is_layer_norm: bool| -> [Tensor; 3] {
                let vars = inputs.each_ref().map(|x| Var::from_tensor(x).unwrap());
                let x = vars[0].narrow(0, x_offset, 3 * width).unwrap();
                let x = x.reshape((3, width)).unwrap();
                let weight = vars[1].narrow(0, weight_offset, width).unwrap();
                let y = if is_layer_norm {
                    crate::layer_norm(&x, &weight, &weight, 1e-5).unwrap()
                } else {
                    crate::rms_norm(&x, &weight, 1e-5).unwrap()
                };
                let gradients = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
                let exact = |x: &Tensor| x.to_dtype(DType::F64).unwrap();
                let gradients = vars
                    .each_ref()
                    .map(|var| exact(gradients.get(var).unwrap()));
                let [of_x, of_weight] = gradients;
                [exact(&y), of_x, of_weight]
            };
            let inputs = [
                values(&[3 * width + x_offset], dtype),
                values(&[width + weight_offset], dtype),
            ];
            let exact = inputs.each_ref().map(|x| x.to_dtype(DType::F64).unwrap());
            for is_layer_norm in [false, true] {
                let Some(found) = with_kernels(|| run(&inputs, is_layer_norm)) else {
                    return;
                };
                let expected = run(&exact, is_layer_norm);
                for (found, expected) in found.iter().zip(&expected) {
                    let what = format!("{dtype:?}, {x_offset}, {weight_offset}, {is_layer_norm}");
                    assert_close(&what, found, expected, tolerance);
                }
            }
        }
    }
}
