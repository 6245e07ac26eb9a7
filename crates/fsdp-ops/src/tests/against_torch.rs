//! Outputs and gradients against those of torch, which `tests/fixtures/operations.py` wrote.

use candle_core::{DType, Device, Result, Tensor};
use serde_json::Value;

use super::{assert_close, by_each_way, run};

const FIXTURES: &str = include_str!("../../tests/fixtures/operations.json");

/// Makes a tensor of f64 from its shape and values in the fixtures.
fn tensor(record: &Value) -> Tensor {
    let numbers = |key: &str| record[key].as_array().unwrap().iter();
    let shape: Vec<usize> = numbers("shape")
        .map(|size| usize::try_from(size.as_u64().unwrap()).unwrap())
        .collect();
    let values: Vec<f64> = numbers("values")
        .map(|value| value.as_f64().unwrap())
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn tensors(records: &Value) -> Vec<Tensor> {
    records.as_array().unwrap().iter().map(tensor).collect()
}

/// Compares an operation with torch's in every dtype.
fn compare(name: &str, operation: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let fixtures: Value = serde_json::from_str(FIXTURES).unwrap();
    let case = &fixtures[name];
    let (inputs, weight) = (tensors(&case["inputs"]), tensor(&case["weight"]));
    let (output, gradients) = (tensor(&case["output"]), tensors(&case["gradients"]));
    for (dtype, tolerance) in [
        (DType::F64, 1e-12),
        (DType::F32, 2e-6),
        (DType::F16, 4e-3),
        (DType::BF16, 3e-2),
    ] {
        let inputs: Vec<Tensor> = inputs
            .iter()
            .map(|input| input.to_dtype(dtype).unwrap())
            .collect();
        for (way, results) in by_each_way(|| run(&operation, &inputs, &weight).unwrap()) {
            let (found, found_gradients) = results;
            let what = format!("{name}, {dtype:?}, by {way}");
            assert_close(&what, &found, &output, tolerance);
            for (index, (found, expected)) in found_gradients.iter().zip(&gradients).enumerate() {
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

/// Returns the cosines and sines of the angles of 4 positions, in the dtype of `x`.
fn angles(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let positions = Tensor::new(&[[0f64], [1.], [2.], [3.]], &Device::Cpu)?;
    let angles = positions.matmul(&Tensor::new(&[[1f64, 0.1, 0.01]], &Device::Cpu)?)?;
    Ok((
        angles.cos()?.to_dtype(x.dtype())?,
        angles.sin()?.to_dtype(x.dtype())?,
    ))
}

#[test]
fn softmax_is_torchs() {
    compare("softmax_last_dim", |x| crate::softmax_last_dim(&x[0]));
}

#[test]
fn norms_are_torchs() {
    compare("rms_norm", |x| crate::rms_norm(&x[0], &x[1], 1e-5));
    compare("layer_norm", |x| {
        crate::layer_norm(&x[0], &x[1], &x[2], 1e-5)
    });
}

#[test]
fn rotary_embeddings_are_torchs() {
    compare("rope", |x| {
        angles(&x[0]).and_then(|(cos, sin)| crate::rope(&x[0], &cos, &sin))
    });
    compare("rope_i", |x| {
        angles(&x[0]).and_then(|(cos, sin)| crate::rope_i(&x[0], &cos, &sin))
    });
}

#[test]
fn attention_is_torchs() {
    compare("attention", |x| {
        crate::scaled_dot_product_attention(&x[0], &x[1], &x[2], false, 0.5)
    });
    compare("attention_causal", |x| {
        crate::scaled_dot_product_attention(&x[0], &x[1], &x[2], true, 0.5)
    });
    compare("packed_attention", |x| {
        crate::packed_attention(&x[0], 2, false)
    });
    compare("packed_attention_causal", |x| {
        crate::packed_attention(&x[0], 2, true)
    });
}

#[test]
fn gelu_is_torchs() {
    compare("gelu_erf", |x| crate::gelu_erf(&x[0]));
    compare("gelu", |x| crate::gelu(&x[0]));
}

#[test]
fn cross_entropy_is_torchs() {
    let targets = Tensor::new(&[0u32, 4, 2, 2], &Device::Cpu).unwrap();
    compare("cross_entropy", |x| crate::cross_entropy(&x[0], &targets));
}

#[test]
fn linear_is_torchs() {
    compare("linear", |x| crate::linear(&x[0], &x[1], Some(&x[2])));
}
