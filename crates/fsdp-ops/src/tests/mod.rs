//! Every operation against torch's values, and against the same operation composed of candle's own:
//! computed by loops on the CPU, and by the CUDA kernels, which a C++ compiler has made for it.

mod against_composed;
mod against_torch;
mod autograd;
mod dropout;
mod kernels;
mod nothing;
mod refusals;
mod step;

use std::slice;

use candle_core::{DType, Result, Tensor, Var};

use self::autograd::Parameters;
use crate::kernels::host::with_kernels;

/// Returns the output of an operation, and the gradients of its inputs for the sum of the output
/// times `weight`. All are f64, whatever the operation was computed in.
fn run(
    operation: &dyn Fn(&[Tensor]) -> Result<Tensor>,
    inputs: &[Tensor],
    weight: &Tensor,
) -> Result<(Tensor, Vec<Tensor>)> {
    let vars: Vec<Var> = inputs.iter().map(Var::from_tensor).collect::<Result<_>>()?;
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let output = operation(&tensors)?;
    let weighted = (&output * weight.to_dtype(output.dtype())?)?;
    let gradients = weighted.sum_all()?.backward()?;
    let gradient = |var: &Var| {
        gradients
            .get(var)
            .expect("every input has a gradient")
            .to_dtype(DType::F64)
    };
    let gradients: Vec<Tensor> = vars.iter().map(gradient).collect::<Result<_>>()?;
    let output = output.to_dtype(DType::F64)?;
    assert_same_of_parameters(
        operation,
        inputs,
        weight,
        &[slice::from_ref(&output), &gradients].concat(),
    )?;
    Ok((output, gradients))
}

/// Fails unless the output and the gradients of an operation are the same if its inputs are
/// registered parameters.
fn assert_same_of_parameters(
    operation: &dyn Fn(&[Tensor]) -> Result<Tensor>,
    inputs: &[Tensor],
    weight: &Tensor,
    expected: &[Tensor],
) -> Result<()> {
    let parameters = Parameters::new(inputs)?;
    let output = operation(&parameters.tensors)?;
    let weighted = (&output * weight.to_dtype(output.dtype())?)?;
    crate::autograd::backward(&weighted.sum_all()?)?;
    let found = [&[output], &parameters.gradients()[..]].concat();
    let bits = |x: &Tensor| -> Result<Vec<u64>> {
        let values = x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
        // candle adds each gradient to zero, so that there is no zero with a sign.
        Ok(values.iter().map(|value| (value + 0.0).to_bits()).collect())
    };
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.dims(), expected.dims());
        assert_eq!(bits(found)?, bits(expected)?);
    }
    Ok(())
}

/// Runs code with operations that are computed by loops and, where there are kernels for the CPU,
/// by these too. Returns the results, each with the name of the way.
fn by_each_way<R>(code: impl Fn() -> R) -> Vec<(&'static str, R)> {
    let mut results = vec![("loops", code())];
    results.extend(with_kernels(code).map(|result| ("kernels", result)));
    results
}

/// Fails unless all values are within `tolerance` of the expected ones, relative to the largest.
fn assert_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.dims(), expected.dims(), "{what}");
    let values = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let (found, expected) = (values(found), values(expected));
    let largest = expected
        .iter()
        .fold(1e-3f64, |largest, value| largest.max(value.abs()));
    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let close = (found - expected).abs() <= tolerance * largest;
        assert!(
            close,
            "{what}, element {index}: {found} is not {expected} ({largest} is the largest)"
        );
    }
}
