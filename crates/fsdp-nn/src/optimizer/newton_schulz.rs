//! The direction of Muon's steps.

use candle_core::{DType, Result, Tensor};
use fsdp_ops::step;
use half::bf16;

use crate::algorithm::MuonOptions;

/// Returns a matrix that is nearly orthogonal, computed from one of `bf16` by the iteration of
/// Newton and Schulz, on the matrix's device.
///
/// Each product is computed in `f32`, and every matrix of the iteration is rounded to `bf16`, as
/// torch does.
/// On a GPU the host waits for nothing.
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
    x = normalize(&x, options.eps)?;
    let has_kernels = step::has_kernels(x.device(), DType::BF16)?;
    x = if has_kernels {
        x.to_dtype(DType::BF16)?
    } else {
        round_tensor(&x)?
    };
    for _ in 0..options.ns_steps {
        x = if has_kernels {
            iterate_by_kernels((a, b, c), &x)?
        } else {
            iterate((a, b, c), &x)?
        };
    }
    if is_tall {
        x = x.t()?.contiguous()?;
    }
    x.to_dtype(DType::BF16)
}

/// Returns the next matrix of the iteration.
fn iterate((a, b, c): (f64, f64, f64), x: &Tensor) -> Result<Tensor> {
    let gram = round_tensor(&x.matmul(&x.t()?)?)?;
    let update = round_tensor(&((&gram * b)? + (gram.matmul(&gram)? * c)?)?)?;
    round_tensor(&((x * a)? + update.matmul(x)?)?)
}

/// Returns the next matrix of the iteration, in `bf16`, which GPUs multiply many times as fast as
/// `f32`. They add up in `f32` all the same, and round each product.
fn iterate_by_kernels((a, b, c): (f64, f64, f64), x: &Tensor) -> Result<Tensor> {
    let gram = x.matmul(&x.t()?)?;
    let update = step::combine(&gram, b, &gram.matmul(&gram)?, c)?;
    step::combine(x, a, &update.matmul(x)?, 1.0)
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

/// Rounds a tensor to bf16. The result is `f32` again.
fn round_tensor(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::BF16)?.to_dtype(DType::F32)
}

/// Rounds a number to bf16.
fn round_scalar(x: f64) -> f64 {
    bf16::from_f64(x).to_f64()
}
