//! Outputs and gradients against those of the same operation composed of candle's own in f64: large
//! and small shapes, any layout, all dtypes.

use candle_core::{D, DType, Device, Result, Tensor};

use super::{assert_close, run};
use crate::kernels::host::with_kernels;
use crate::{attention, cross_entropy, embedding, norm, rope, softmax};

/// Returns numbers that need no random generator, from -2 to 2.
fn values(shape: &[usize], seed: usize) -> Tensor {
    let count: usize = shape.iter().product();
    let value = |index: usize| {
        2.0 * (seed as f64 + 1.7 * index as f64 + 0.003 * (index * index % 100_003) as f64).sin()
    };
    Tensor::from_vec(
        (0..count).map(value).collect::<Vec<f64>>(),
        shape,
        &Device::Cpu,
    )
    .unwrap()
}

/// Returns a tensor as it is, and with the same values in other memory layouts: transposed, between
/// the columns of other values, and after the rows of other values.
fn in_other_layouts(x: &Tensor) -> Vec<Tensor> {
    let mut layouts = vec![x.clone()];
    if x.rank() >= 2 {
        layouts.push(
            x.transpose(0, D::Minus1)
                .unwrap()
                .contiguous()
                .unwrap()
                .transpose(0, D::Minus1)
                .unwrap(),
        );
        let more = Tensor::cat(&[x, x, x], D::Minus1).unwrap();
        let width = x.dim(D::Minus1).unwrap();
        layouts.push(more.narrow(D::Minus1, width, width).unwrap());
    }
    let (first, rest) = (x.dim(0).unwrap(), Tensor::cat(&[x, x], 0).unwrap());
    layouts.push(rest.narrow(0, first, first).unwrap());
    layouts
}

/// Compares an operation with the same operation composed of candle's, for inputs of these shapes.
fn compare(
    shapes: &[&[usize]],
    operation: impl Fn(&[Tensor]) -> Result<Tensor>,
    composed: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    let inputs: Vec<Tensor> = shapes
        .iter()
        .enumerate()
        .map(|(seed, shape)| values(shape, seed))
        .collect();
    for (dtype, tolerance, layout_for_kernels) in [
        (DType::F64, 1e-11, 0),
        (DType::F32, 1e-5, 1),
        (DType::F16, 1e-2, 2),
        (DType::BF16, 5e-2, 3),
    ] {
        let rounded: Vec<Tensor> = inputs
            .iter()
            .map(|input| input.to_dtype(dtype).unwrap())
            .collect();
        let exact: Vec<Tensor> = rounded
            .iter()
            .map(|input| input.to_dtype(DType::F64).unwrap())
            .collect();
        let output = composed(&exact).unwrap();
        let weight = values(output.dims(), 9)
            .to_dtype(dtype)
            .unwrap()
            .to_dtype(DType::F64)
            .unwrap();
        let (expected, expected_gradients) = run(&composed, &exact, &weight).unwrap();
        for layout in 0..4 {
            let in_layout = |input: &Tensor| {
                in_other_layouts(input)
                    .into_iter()
                    .cycle()
                    .nth(layout)
                    .unwrap()
            };
            let arranged: Vec<Tensor> = rounded.iter().map(in_layout).collect();
            // `run` makes variables, which are contiguous; so the operation gets the layout from
            // here.
            let operation = |tensors: &[Tensor]| {
                let same = |(tensor, arranged): (&Tensor, &Tensor)| arrange(tensor, arranged);
                operation(
                    &tensors
                        .iter()
                        .zip(&arranged)
                        .map(same)
                        .collect::<Result<Vec<_>>>()?,
                )
            };
            let once = || run(&operation, &rounded, &weight).unwrap();
            // Kernels on the CPU take long, so they get each dtype and each layout, but not all of
            // both.
            let by_kernels = (layout == layout_for_kernels || layout == 0 && dtype == DType::F32)
                .then(|| with_kernels(once))
                .flatten();
            for (by, results) in [("loops", Some(once())), ("kernels", by_kernels)] {
                let Some((found, gradients)) = results else {
                    continue;
                };
                let what = format!("{shapes:?}, {dtype:?}, layout {layout}, by {by}");
                assert_close(&what, &found, &expected, tolerance);
                for (index, (found, expected)) in
                    gradients.iter().zip(&expected_gradients).enumerate()
                {
                    assert_close(
                        &format!("{what}, gradient {index}"),
                        found,
                        expected,
                        4.0 * tolerance,
                    );
                }
            }
        }
    }
}

/// Returns the values of `tensor` in the memory order of `like`. Gradients still flow back to
/// `tensor`.
fn arrange(tensor: &Tensor, like: &Tensor) -> Result<Tensor> {
    if like.is_contiguous() {
        return Ok(tensor.clone());
    }
    let is_transposed = like.transpose(0, D::Minus1)?.is_contiguous();
    if is_transposed {
        return tensor
            .transpose(0, D::Minus1)?
            .contiguous()?
            .transpose(0, D::Minus1);
    }
    let width = tensor.dim(D::Minus1)?;
    Tensor::cat(&[tensor, tensor, tensor], D::Minus1)?.narrow(D::Minus1, width, width)
}

#[test]
fn softmax_equals_the_composed_one() {
    // The wide rows have blocks of 128, 256 and 1024 threads on a GPU.
    for shape in [
        &[2, 3, 5][..],
        &[70, 300],
        &[4, 1],
        &[1],
        &[33],
        &[3, 1000],
        &[2, 3001],
        &[1, 17_000],
    ] {
        compare(
            &[shape],
            |x| crate::softmax_last_dim(&x[0]),
            |x| softmax::with_candle_ops(&x[0]),
        );
    }
}

#[test]
fn norms_equal_the_composed_ones() {
    for (shape, width) in [
        (&[2, 3, 5][..], 5),
        (&[130, 200], 200),
        (&[16], 16),
        (&[3, 3], 3),
        // Several warps of a GPU have a row, and the last row does not fit into their registers.
        (&[9, 264], 264),
        (&[5, 1032], 1032),
        (&[3, 4104], 4104),
    ] {
        let shapes = [shape, &[width], &[width]];
        compare(
            &shapes,
            |x| crate::layer_norm(&x[0], &x[1], &x[2], 1e-5),
            |x| norm::with_candle_ops(&x[0], &x[1], Some(&x[2]), 1e-5),
        );
        let shapes = [shape, &[width]];
        compare(
            &shapes,
            |x| crate::rms_norm(&x[0], &x[1], 1e-3),
            |x| norm::with_candle_ops(&x[0], &x[1], None, 1e-3),
        );
    }
}

#[test]
fn rotary_embeddings_equal_the_composed_ones() {
    for (shape, angles) in [
        ([2, 3, 4, 6], &[4, 3][..]),
        ([2, 3, 4, 6], &[2, 4, 3]),
        ([1, 1, 1, 2], &[1, 1]),
    ] {
        let angles = values(angles, 5);
        let of = |x: &Tensor| {
            let angles = [angles.cos(), angles.sin()]
                .map(|angles| angles.unwrap().to_dtype(x.dtype()).unwrap());
            (angles[0].clone(), angles[1].clone())
        };
        for (fast, slow) in [
            (
                crate::rope as fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
                rope::with_candle_ops::<false> as fn(&_, &_, &_) -> _,
            ),
            (crate::rope_i, rope::with_candle_ops::<true>),
        ] {
            let run = |x: &Tensor, f: fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>| {
                f(x, &of(x).0, &of(x).1)
            };
            compare(&[&shape], |x| run(&x[0], fast), |x| run(&x[0], slow));
        }
    }
}

#[test]
fn attention_equals_the_composed_one() {
    for (query, columns, of_values) in [
        ([2, 3, 5, 4], 5, 4),
        ([1, 2, 70, 8], 130, 3),
        ([1, 2, 130, 8], 70, 8),
        ([1, 1, 1, 1], 1, 1),
        // Wide heads.
        ([1, 1, 40, 100], 33, 128),
        ([1, 1, 5, 136], 6, 8),
    ] {
        let [batch, heads, _, width] = query;
        let shapes = [
            &query[..],
            &[batch, heads, columns, width],
            &[batch, heads, columns, of_values],
        ];
        for causal in [false, true] {
            compare(
                &shapes,
                |x| crate::scaled_dot_product_attention(&x[0], &x[1], &x[2], causal, 0.4),
                |x| attention::with_candle_ops(&x[0], &x[1], &x[2], causal, 0.4),
            );
        }
    }
}

#[test]
fn packed_attention_equals_that_of_its_parts() {
    for (batch, time, heads, width) in [(2, 5, 3, 4), (1, 130, 2, 8), (1, 1, 1, 1)] {
        for causal in [false, true] {
            let parts = |x: &Tensor| {
                let parts = x
                    .reshape((batch, time, 3, heads, width))?
                    .permute((2, 0, 3, 1, 4))?;
                let scale = (width as f64).powf(-0.5);
                let mixed = attention::with_candle_ops(
                    &parts.get(0)?,
                    &parts.get(1)?,
                    &parts.get(2)?,
                    causal,
                    scale,
                )?;
                mixed.transpose(1, 2)?.reshape((batch, time, heads * width))
            };
            let shape = [batch, time, 3 * heads * width];
            compare(
                &[&shape],
                |x| crate::packed_attention(&x[0], heads, causal),
                |x| parts(&x[0]),
            );
        }
    }
}

#[test]
fn gelu_equals_the_composed_one() {
    for shape in [&[3, 7][..], &[10_000], &[1]] {
        // candle's derivatives of GELU have six digits of their constants, so the functions
        // themselves are composed.
        let erf = |x: &Tensor| x * (((x / std::f64::consts::SQRT_2)?.erf()? + 1.0)? * 0.5)?;
        let exact = |x: &Tensor| {
            // The derivative of x * F(x) is F(x) + x * f(x), with the normal distribution function
            // F and its density f.
            let value = erf(x)?;
            let density = ((x.sqr()? * -0.5)?.exp()? / (2.0 * std::f64::consts::PI).sqrt())?;
            let slope = (((x / std::f64::consts::SQRT_2)?.erf()? + 1.0)? * 0.5)? + (x * density)?;
            let slope = slope?.detach();
            // Return a tensor that has the value of GELU, and whose gradient is the slope.
            (value.detach() - (x.detach() * &slope)?)? + (x * &slope)?
        };
        compare(&[shape], |x| crate::gelu_erf(&x[0]), |x| exact(&x[0]));
        let by_tanh = |x: &Tensor| {
            let z = ((x + (x.powf(3.0)? * 0.044715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
            (x * 0.5)? * (z.tanh()? + 1.0)?
        };
        compare(&[shape], |x| crate::gelu(&x[0]), |x| by_tanh(&x[0]));
    }
}

#[test]
fn cross_entropy_equals_the_composed_one() {
    for (rows, classes) in [(4, 5), (90, 257), (1, 1), (1, 9), (3, 5003)] {
        let targets: Vec<u32> = (0..rows).map(|row| (row * 7 % classes) as u32).collect();
        let targets = Tensor::new(targets, &Device::Cpu).unwrap();
        for targets in [targets.clone(), targets.to_dtype(DType::I64).unwrap()] {
            let slow = |x: &Tensor| cross_entropy::with_candle_ops(x, &targets);
            compare(
                &[&[rows, classes]],
                |x| crate::cross_entropy(&x[0], &targets),
                |x| slow(&x[0]),
            );
        }
    }
}

#[test]
fn embedding_equals_the_composed_one() {
    for (count, width, rows) in [(5, 7, 9), (300, 8, 200), (3, 33, 70), (1, 1, 1)] {
        // Some rows have no index, and some have many, in several chunks of the kernels.
        let ids: Vec<u32> = (0..rows)
            .map(|row| (row * row / 40 % count) as u32)
            .collect();
        let ids = Tensor::new(ids, &Device::Cpu).unwrap();
        for ids in [ids.clone(), ids.to_dtype(DType::I64).unwrap()] {
            compare(
                &[&[count, width]],
                |x| crate::embedding(&ids, &x[0]),
                |x| embedding::with_candle_ops(&ids, &x[0]),
            );
        }
    }
}

#[test]
fn linear_equals_product_and_sum() {
    for (x, outputs) in [
        (&[2, 3, 4][..], 5),
        (&[40, 33], 65),
        (&[70, 16], 264),
        (&[1, 1], 1),
        (&[7], 2),
    ] {
        let inputs = x[x.len() - 1];
        let product = |x: &[Tensor]| {
            let weight = x[1].t()?;
            let y = x[0].reshape(((), inputs))?.matmul(&weight)?;
            let dims = [&x[0].dims()[..x[0].rank() - 1], &[outputs]].concat();
            y.reshape(dims)
        };
        let with_bias = |x: &[Tensor]| product(x)?.broadcast_add(&x[2]);
        let shapes = [x, &[outputs, inputs], &[outputs]];
        compare(
            &shapes,
            |x| crate::linear(&x[0], &x[1], Some(&x[2])),
            with_bias,
        );
        compare(&shapes[..2], |x| crate::linear(&x[0], &x[1], None), product);
    }
}

#[test]
fn linear_and_gelu_in_one_equal_both() {
    for (x, outputs) in [(&[2, 3, 4][..], 5), (&[40, 33], 65), (&[7], 2)] {
        let shapes = [x, &[outputs, x[x.len() - 1]], &[outputs]];
        let both = |x: &[Tensor]| crate::gelu_erf(&crate::linear(&x[0], &x[1], Some(&x[2]))?);
        compare(
            &shapes,
            |x| crate::linear_gelu_erf(&x[0], &x[1], &x[2]),
            both,
        );
    }
}

#[test]
fn linear_and_a_residual_in_one_equal_both() {
    for (x, outputs) in [(&[2, 3, 4][..], 5), (&[40, 33], 65), (&[7], 2)] {
        let (&inputs, rows) = x.split_last().unwrap();
        let residual = [rows, &[outputs]].concat();
        let shapes = [x, &[outputs, inputs], &residual, &[outputs]];
        compare(
            &shapes,
            |x| crate::linear_add(&x[0], &x[1], Some(&x[3]), &x[2]),
            |x| crate::linear(&x[0], &x[1], Some(&x[3]))? + &x[2],
        );
        compare(
            &shapes[..3],
            |x| crate::linear_add(&x[0], &x[1], None, &x[2]),
            |x| crate::linear(&x[0], &x[1], None)? + &x[2],
        );
    }
}

/// The gradient of a weight is row-major like the weight, and not a transposed view.
#[test]
fn the_gradient_of_a_linear_weight_has_the_weights_layout() {
    let weight = candle_core::Var::from_tensor(&values(&[6, 4], 0)).unwrap();
    let y = crate::linear(&values(&[3, 4], 1), &weight, None).unwrap();
    let gradients = y.sum_all().unwrap().backward().unwrap();
    assert!(gradients.get(&weight).unwrap().is_contiguous());
}

#[test]
fn tensors_without_elements_come_out_empty() {
    let empty = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let ones = |width: usize| Tensor::ones(width, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(
        crate::softmax_last_dim(&empty(&[0, 3])).unwrap().dims(),
        [0, 3]
    );
    assert_eq!(
        crate::softmax_last_dim(&empty(&[3, 0])).unwrap().dims(),
        [3, 0]
    );
    assert_eq!(crate::gelu_erf(&empty(&[0])).unwrap().dims(), [0]);
    assert_eq!(
        crate::layer_norm(&empty(&[0, 3]), &ones(3), &ones(3), 1e-5)
            .unwrap()
            .dims(),
        [0, 3]
    );
    assert_eq!(
        crate::rms_norm(&empty(&[0, 3]), &ones(3), 1e-5)
            .unwrap()
            .dims(),
        [0, 3]
    );
    assert_eq!(
        crate::packed_attention(&empty(&[2, 0, 12]), 2, true)
            .unwrap()
            .dims(),
        [2, 0, 4]
    );
    let heads = empty(&[0, 2, 3, 4]);
    assert_eq!(
        crate::scaled_dot_product_attention(&heads, &heads, &heads, true, 0.5)
            .unwrap()
            .dims(),
        [0, 2, 3, 4]
    );
    assert_eq!(
        crate::linear(&empty(&[0, 4]), &empty(&[5, 4]), None)
            .unwrap()
            .dims(),
        [0, 5]
    );
    // A sum of nothing is zero.
    let nothing = crate::linear(&empty(&[2, 3, 0]), &empty(&[4, 0]), None).unwrap();
    assert_eq!(
        nothing.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
        [0.0; 24]
    );
    let angles = empty(&[0, 2]);
    assert_eq!(
        crate::rope(&empty(&[1, 2, 0, 4]), &angles, &angles)
            .unwrap()
            .dims(),
        [1, 2, 0, 4]
    );
}
