//! The direction of Muon's steps.

use candle_core::{DType, Result, Tensor};
use half::bf16;

use crate::algorithm::MuonOptions;

/// Makes a matrix of `bf16` nearly orthogonal, by the iteration of Newton and Schulz, where it is.
/// As in torch, each matrix on the way is rounded to `bf16`; products are summed in `f32`. On a GPU
/// the host waits for nothing.
pub(super) fn orthogonalize(options: &MuonOptions, matrix: &Tensor) -> Result<Tensor> {
    let (a, b, c) = options.ns_coefficients;
    let (rows, columns) = matrix.dims2()?;
    let matrix = matrix.to_dtype(DType::F32)?;
    // The products below are of the smaller dimension if the matrix is wide.
    let is_tall = rows > columns;
    let mut x = if is_tall {
        matrix.t()?.contiguous()?
    } else {
        matrix
    };
    // The iteration converges only from a matrix whose norm is at most 1.
    x = round_tensor(&normalize(&x, options.eps)?)?;
    for _ in 0..options.ns_steps {
        let factor = factor_of(&x)?;
        let gram = round_tensor(&product(&factor, &factor.t()?)?)?;
        let gram_factor = factor_of(&gram)?;
        let squared = product(&gram_factor, &gram_factor)?;
        let update = round_tensor(&((&gram * b)? + (squared * c)?)?)?;
        x = round_tensor(&((&x * a)? + product(&factor_of(&update)?, &factor)?)?)?;
    }
    if is_tall {
        x = x.t()?.contiguous()?;
    }
    x.to_dtype(DType::BF16)
}

/// Divides a matrix by its norm, or by `eps` if that is larger.
fn normalize(x: &Tensor, eps: f64) -> Result<Tensor> {
    let squares = x.sqr()?.sum_all()?;
    if !x.device().is_cpu() {
        let norm = round_tensor(&squares.sqrt()?)?.maximum(round_scalar(eps))?;
        return x.broadcast_div(&norm);
    }
    let norm = f64::from(squares.to_scalar::<f32>()?).sqrt();
    x / round_scalar(norm).max(round_scalar(eps))
}

/// Returns a matrix whose elements `bf16` holds as a factor of products: GPUs multiply `bf16` many
/// times as fast as `f32`, and add up in `f32` all the same.
fn factor_of(matrix: &Tensor) -> Result<Tensor> {
    if matrix.device().is_cpu() {
        Ok(matrix.clone())
    } else {
        matrix.to_dtype(DType::BF16)
    }
}

/// Multiplies matrices, which [`factor_of`] has returned.
fn product(left: &Tensor, right: &Tensor) -> Result<Tensor> {
    left.matmul(right)?.to_dtype(DType::F32)
}

/// Rounds a tensor to bf16. The result is `f32` again.
fn round_tensor(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::BF16)?.to_dtype(DType::F32)
}

/// Rounds a number to bf16.
fn round_scalar(x: f64) -> f64 {
    bf16::from_f64(x).to_f64()
}
