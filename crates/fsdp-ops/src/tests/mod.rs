//! Every operation against torch's values, and against the same operation composed of candle's own:
//! computed by loops on the CPU, and by the CUDA kernels, which a C++ compiler has made for it.

mod against_composed;
mod against_torch;
mod dropout;
mod kernels;
mod nothing;
mod refusals;
mod step;

use candle_core::{DType, Result, Tensor, Var};

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
    Ok((
        output.to_dtype(DType::F64)?,
        vars.iter().map(gradient).collect::<Result<_>>()?,
    ))
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
