//! Operations on tensors without elements, such as those of an expert to which no token was routed.

use candle_core::{DType, Device, Result, Tensor};

use super::autograd::Parameters;
use super::{by_each_way, run};

/// Returns zeros of a shape.
fn zeros(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(shape, DType::F32, &Device::Cpu)
        .unwrap()
        .to_dtype(dtype)
        .unwrap()
}

/// Checks that an operation returns a tensor of this shape, and that all its gradients are zero.
fn check(
    name: &str,
    operation: impl Fn(&[Tensor]) -> Result<Tensor>,
    inputs: &[&[usize]],
    output: &[usize],
) {
    for dtype in [DType::F32, DType::BF16] {
        let inputs: Vec<Tensor> = inputs.iter().map(|shape| zeros(shape, dtype)).collect();
        let weight = zeros(output, dtype);
        for (way, results) in by_each_way(|| run(&operation, &inputs, &weight).unwrap()) {
            let (found, gradients) = results;
            let what = format!("{name}, {dtype:?}, by {way}");
            assert_eq!(found.dims(), output, "{what}");
            for (gradient, input) in gradients.iter().zip(&inputs) {
                assert_eq!(gradient.dims(), input.dims(), "{what}");
                let values = gradient.flatten_all().unwrap().to_vec1::<f64>().unwrap();
                assert!(
                    values.iter().all(|value| *value == 0.0),
                    "{what}: {values:?}"
                );
            }
        }
    }
}

#[test]
fn nothing_goes_in_and_nothing_comes_out() {
    let no_ids = Tensor::zeros((2, 0), DType::U32, &Device::Cpu).unwrap();
    check(
        "embedding",
        |x| crate::embedding(&no_ids, &x[0]),
        &[&[4, 3]],
        &[2, 0, 3],
    );
    check(
        "linear",
        |x| crate::linear(&x[0], &x[1], Some(&x[2])),
        &[&[0, 3], &[2, 3], &[2]],
        &[0, 2],
    );
    check(
        "linear without inputs",
        |x| crate::linear(&x[0], &x[1], Some(&x[2])),
        &[&[4, 0], &[2, 0], &[2]],
        &[4, 2],
    );
    check(
        "linear without a bias",
        |x| crate::linear(&x[0], &x[1], None),
        &[&[2, 0, 3], &[2, 3]],
        &[2, 0, 2],
    );
    check(
        "linear-gelu-erf",
        |x| crate::linear_gelu_erf(&x[0], &x[1], &x[2]),
        &[&[0, 3], &[2, 3], &[2]],
        &[0, 2],
    );
    for shape in [&[0, 3][..], &[3, 0], &[0]] {
        check(
            "softmax",
            |x| crate::softmax_last_dim(&x[0]),
            &[shape],
            shape,
        );
        check("gelu", |x| crate::gelu(&x[0]), &[shape], shape);
        check("gelu-erf", |x| crate::gelu_erf(&x[0]), &[shape], shape);
        check(
            "dropout",
            |x| crate::dropout(&x[0], 0.5, crate::DropoutMasks::new(1, 2, 0)),
            &[shape],
            shape,
        );
    }
    check(
        "layer-norm",
        |x| crate::layer_norm(&x[0], &x[1], &x[2], 1e-5),
        &[&[0, 3], &[3], &[3]],
        &[0, 3],
    );
    check(
        "rms-norm",
        |x| crate::rms_norm(&x[0], &x[1], 1e-5),
        &[&[0, 3], &[3]],
        &[0, 3],
    );
    check(
        "layer-norm of no width",
        |x| crate::layer_norm(&x[0], &x[1], &x[2], 1e-5),
        &[&[3, 0], &[0], &[0]],
        &[3, 0],
    );
    for shape in [[0, 2, 3, 4], [2, 0, 3, 4], [2, 2, 0, 4], [2, 2, 3, 0]] {
        let angles = [shape[2], shape[3] / 2];
        let rope = |x: &[Tensor]| {
            let angles = Tensor::zeros(&angles[..], x[0].dtype(), &Device::Cpu)?;
            crate::rope(&x[0], &angles, &angles)
        };
        check("rope", rope, &[&shape], &shape);
        let attention =
            |x: &[Tensor]| crate::scaled_dot_product_attention(&x[0], &x[1], &x[2], true, 0.5);
        check("attention", attention, &[&shape, &shape, &shape], &shape);
    }
    let attention =
        |x: &[Tensor]| crate::scaled_dot_product_attention(&x[0], &x[1], &x[2], true, 0.5);
    check(
        "no queries",
        attention,
        &[&[1, 1, 0, 4], &[1, 1, 3, 4], &[1, 1, 3, 2]],
        &[1, 1, 0, 2],
    );
    for shape in [[0, 2, 12], [2, 0, 12], [2, 3, 0]] {
        check(
            "packed",
            |x| crate::packed_attention(&x[0], 2, true),
            &[&shape],
            &[shape[0], shape[1], shape[2] / 3],
        );
    }
}

/// candle's sum of nothing gives its second summand no gradient.
#[test]
fn sums_of_nothing_have_gradients_in_the_graph_of_sharded_models() {
    let shapes: [&[usize]; 3] = [&[2, 3], &[2], &[2]];
    let zeros = shapes.map(|shape| zeros(shape, DType::F32));
    let parameters = Parameters::new(&zeros).unwrap();
    let [weight, bias, positions] = &parameters.tensors[..] else {
        unreachable!("there are three")
    };
    let x = Tensor::zeros((0, 3), DType::F32, &Device::Cpu).unwrap();
    let first = crate::linear(&x, weight, None).unwrap();
    let second = crate::linear_add(&x, weight, Some(bias), &first).unwrap();
    let sum = crate::add(&crate::add(&first, &second).unwrap(), positions).unwrap();
    assert_eq!(sum.dims(), [0, 2]);
    crate::autograd::backward(&sum.sum_all().unwrap()).unwrap();
    for (gradient, shape) in parameters.gradients().iter().zip(shapes) {
        assert_eq!(gradient.dims(), shape);
        let values = gradient.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(values.iter().all(|value| *value == 0.0), "{values:?}");
    }
}
