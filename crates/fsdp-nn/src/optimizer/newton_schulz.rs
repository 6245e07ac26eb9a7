//! The direction of Muon's steps.

use candle_core::{DType, Device, Result, Tensor};
use half::bf16;

use crate::algorithm::MuonOptions;

/// Makes a matrix nearly orthogonal, by the iteration of Newton and Schulz. As in torch, each
/// matrix on the way is rounded to `bf16`; products are summed in `f32`.
pub(super) fn orthogonalize(
    options: &MuonOptions,
    matrix: &[bf16],
    [rows, columns]: [usize; 2],
) -> Result<Vec<bf16>> {
    let (a, b, c) = options.ns_coefficients;
    let matrix = Tensor::from_slice(matrix, (rows, columns), &Device::Cpu)?.to_dtype(DType::F32)?;
    // The products below are of the smaller dimension if the matrix is wide.
    let is_tall = rows > columns;
    let mut x = if is_tall {
        matrix.t()?.contiguous()?
    } else {
        matrix
    };
    let norm = f64::from(x.sqr()?.sum_all()?.to_scalar::<f32>()?).sqrt();
    // The iteration converges only from a matrix whose norm is at most 1.
    x = round_tensor(&(x / round_scalar(norm).max(round_scalar(options.eps)))?)?;
    for _ in 0..options.ns_steps {
        let gram = round_tensor(&x.matmul(&x.t()?)?)?;
        let update = round_tensor(&((&gram * b)? + (gram.matmul(&gram)? * c)?)?)?;
        x = round_tensor(&((&x * a)? + update.matmul(&x)?)?)?;
    }
    if is_tall {
        x = x.t()?.contiguous()?;
    }
    x.to_dtype(DType::BF16)?.flatten_all()?.to_vec1()
}

/// Rounds a tensor to bf16. The result is `f32` again.
fn round_tensor(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::BF16)?.to_dtype(DType::F32)
}

/// Rounds a number to bf16.
fn round_scalar(x: f64) -> f64 {
    bf16::from_f64(x).to_f64()
}
