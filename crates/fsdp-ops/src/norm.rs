//! Layer norm and root-mean-square norm over the last dimension.

use std::borrow::Cow;
use std::sync::OnceLock;

use candle_core::{D, DType, Layout, Result, Shape, Tensor};

use crate::element::Element;
use crate::kernels::{Argument, Grid, Kernel, Module, Operand, Output, Runner, columns_parts};
use crate::operation::{Operation, apply, is_computed_here, mismatch_error};
use crate::real::{Real, sum};
use crate::rows::{map_rows, reduce_rows};
use crate::values::{Input, Values, contiguous_elements, tensor, tensor_of_sums};

const LAYER_NORM: &str = "layer-norm";
const RMS_NORM: &str = "rms-norm";

/// Computes `(x - mean) / sqrt(variance + eps) * weight + bias`, with mean and variance of the last
/// dimension, for which there is one weight and one bias each: torch's `layer_norm`.
///
/// # Errors
/// A weight or a bias of another shape or dtype; a dtype that is not a float.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    check(LAYER_NORM, x, weight)?;
    check(LAYER_NORM, x, bias)?;
    if !is_computed_here(x)? {
        return with_candle_ops(x, weight, Some(bias), eps);
    }
    let (weight, bias) = (weight.contiguous()?, bias.contiguous()?);
    apply(Norm::new(eps), [&x.contiguous()?, &weight, &bias])
}

/// Computes `x / sqrt(mean of squares + eps) * weight` over the last dimension: torch's `rms_norm`.
///
/// # Errors
/// A weight of another shape or dtype; a dtype that is not a float.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    check(RMS_NORM, x, weight)?;
    if !is_computed_here(x)? {
        return with_candle_ops(x, weight, None, eps);
    }
    apply(Norm::new(eps), [&x.contiguous()?, &weight.contiguous()?])
}

/// Checks that a weight has one element for each column of `x`.
fn check(op: &'static str, x: &Tensor, weight: &Tensor) -> Result<()> {
    if weight.dims() != [x.dim(D::Minus1)?] {
        return mismatch_error(x, weight, op);
    }
    Ok(())
}

/// Computes [`rms_norm`], or with a bias [`layer_norm`], with candle's operations.
pub(crate) fn with_candle_ops(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let mut rows = match x.dtype() {
        // The squares of half types would overflow.
        DType::F16 | DType::BF16 => x.to_dtype(DType::F32)?,
        _ => x.clone(),
    };
    if bias.is_some() {
        rows = rows.broadcast_sub(&rows.mean_keepdim(D::Minus1)?)?;
    }
    let squares = rows.sqr()?.mean_keepdim(D::Minus1)?;
    let normalized = rows.broadcast_div(&(squares + eps)?.sqrt()?)?;
    let y = normalized.to_dtype(x.dtype())?.broadcast_mul(weight)?;
    match bias {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

/// A norm of each row: with a weight the root-mean-square norm, and with a weight and a bias layer
/// norm.
struct Norm {
    eps: f64,
    /// The mean and the factor of each row, for the kernels of the backward.
    rows: OnceLock<Tensor>,
}

impl Norm {
    const fn new(eps: f64) -> Self {
        Norm {
            eps,
            rows: OnceLock::new(),
        }
    }
}

impl<const N: usize> Operation<N> for Norm {
    const NAME: &'static str = if N == 3 { LAYER_NORM } else { RMS_NORM };

    fn forward<T: Element>(&self, inputs: [Input<'_>; N]) -> Result<(Vec<T>, Shape)> {
        let name = <Self as Operation<N>>::NAME;
        let weight = &*T::reals(contiguous_elements(inputs[1], name)?);
        let bias = match inputs.get(2) {
            Some(&bias) => T::reals(contiguous_elements(bias, name)?),
            None => Cow::Borrowed(&[][..]),
        };
        let y = map_rows(
            [contiguous_elements::<T>(inputs[0], name)?],
            weight.len(),
            #[inline(always)]
            |_, [row]| {
                normalize(row, self.eps, N == 3);
                if N == 3 {
                    row.iter_mut()
                        .zip(weight)
                        .zip(&*bias)
                        .for_each(|((x, &weight), &bias)| *x = *x * weight + bias);
                } else {
                    row.iter_mut()
                        .zip(weight)
                        .for_each(|(x, &weight)| *x *= weight);
                }
            },
        );
        Ok((y, inputs[0].1.shape().clone()))
    }

    fn backward<T: Element>(
        &self,
        inputs: [&Tensor; N],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; N]> {
        let name = <Self as Operation<N>>::NAME;
        let grad = grad.contiguous()?;
        let grads = Values::<T>::read(&grad, name)?;
        let values = Values::<T>::read(inputs[0], name)?;
        let weights = Values::<T>::read(inputs[1], name)?;
        let weight = &*T::reals(&weights);
        let width = weight.len();
        // The kernel sums for the weight first, then for the bias.
        let (dx, sums) = reduce_rows(
            [&grads, &values],
            width,
            width * (N - 1),
            #[inline(always)]
            |_, [grad, x], sums| {
                // The forward has not kept the normalized row: it is quicker to compute it again.
                let factor = normalize(x, self.eps, N == 3);
                let (dweight, dbias) = sums.split_at_mut(width);
                dweight
                    .iter_mut()
                    .zip(&*grad)
                    .zip(&*x)
                    .for_each(|((sum, &grad), &x)| *sum += grad * x);
                dbias
                    .iter_mut()
                    .zip(&*grad)
                    .for_each(|(sum, &grad)| *sum += grad);
                grad.iter_mut()
                    .zip(weight)
                    .for_each(|(grad, &weight)| *grad *= weight);
                // The output does not change if all values of the row change together, or if the
                // row is scaled. So the gradient has no part in these two directions: take away its
                // mean, and its part along the row.
                let len = T::Real::nearest(width as f64);
                let mean = if N == 3 {
                    sum(width, |index| grad[index]) / len
                } else {
                    T::Real::ZERO
                };
                let dot_product_mean = sum(width, |index| grad[index] * x[index]) / len;
                grad.iter_mut()
                    .zip(&*x)
                    .for_each(|(grad, &x)| *grad = factor * (*grad - mean - x * dot_product_mean));
            },
        );
        let mut gradients = vec![tensor(dx, inputs[0].dims())?];
        for index in 0..N - 1 {
            let sums = &sums[index * width..(index + 1) * width];
            gradients.push(tensor_of_sums::<T>(sums)?);
        }
        Ok(gradients
            .try_into()
            .expect("a norm has two inputs, or three with a bias"))
    }

    fn launch_forward(&self, runner: &Runner, inputs: [Operand<'_>; N]) -> Result<(Output, Shape)> {
        let x = &inputs[0];
        let (rows, width) = x.rows_and_width();
        let y = runner.allocate(x.dtype, x.len())?;
        let of_rows = runner.allocate(DType::F32, 2 * rows)?;
        let mut arguments: Vec<Argument<'_>> = inputs.iter().map(Argument::Read).collect();
        arguments.push(Argument::Write(&y));
        if N == 3 {
            arguments.push(Argument::Write(&of_rows));
        }
        arguments.extend([
            Argument::WriteFrom(&of_rows, rows),
            Argument::Long(rows),
            Argument::Int(width),
            Argument::Double(self.eps),
        ]);
        runner.launch(
            kernel::<N>(["rms_norm_forward", "layer_norm_forward"], x.dtype),
            Grid::rows(rows, width, x.dtype),
            &arguments,
        )?;
        // Each operation runs once, so nothing has been set before.
        let _ = self.rows.set(runner.tensor(of_rows, (2, rows))?);
        Ok((y, x.layout.shape().clone()))
    }

    fn launch_backward(
        &self,
        runner: &Runner,
        inputs: [Operand<'_>; N],
        _: Operand<'_>,
        grad: Operand<'_>,
    ) -> Result<[Output; N]> {
        let x = &inputs[0];
        let (rows, width) = x.rows_and_width();
        let name = <Self as Operation<N>>::NAME;
        let of_rows = self
            .rows
            .get()
            .expect("the forward runs before the backward");
        let (storage, _) = of_rows.storage_and_layout();
        let means = Operand::new(&storage, &Layout::contiguous(rows), name)?;
        let factors = Operand::new(&storage, &Layout::contiguous_with_offset(rows, rows), name)?;
        // Root-mean-square norm has no means.
        let of_rows = match N {
            3 => vec![Argument::Read(&means), Argument::Read(&factors)],
            _ => vec![Argument::Read(&factors)],
        };
        let dx = runner.allocate(x.dtype, x.len())?;
        // Of layer norm in half types the two kernels are faster than the one, though they read
        // everything twice.
        let begins_at_pack = |operand: &&Operand<'_>| {
            let start_bytes = operand.layout.start_offset() * operand.dtype.size_in_bytes();
            start_bytes.is_multiple_of(PACK_BYTES)
        };
        let has_packs = [x, &inputs[1], &grad].iter().all(begins_at_pack);
        let at_once = grid_at_once(rows, width, x.dtype, has_packs)
            .filter(|_| N == 2 || x.dtype == DType::F32);
        let parts = match at_once {
            Some(grid) => grid.blocks[0],
            None => columns_parts(rows, width, x.dtype),
        };
        let mut partials = Vec::with_capacity(N - 1);
        for _ in 1..N {
            partials.push(runner.allocate(DType::F32, parts * width)?);
        }
        let read = [x, &inputs[1], &grad].map(Argument::Read);
        let write_dx = [Argument::Write(&dx)];
        let write_sums: Vec<_> = partials.iter().map(Argument::Write).collect();
        let sizes = [Argument::Long(rows), Argument::Int(width)];
        if let Some(grid) = at_once {
            let names = ["rms_norm_backward_at_once", "layer_norm_backward_at_once"];
            let arguments = [&read[..], &of_rows, &write_dx, &write_sums, &sizes];
            runner.launch(kernel::<N>(names, x.dtype), grid, &arguments.concat())?;
        } else {
            let arguments = [&read[..], &of_rows, &write_dx, &sizes];
            runner.launch(
                kernel::<N>(["rms_norm_backward", "layer_norm_backward"], x.dtype),
                Grid::rows(rows, width, x.dtype),
                &arguments.concat(),
            )?;
            let arguments_for_sums = [&[read[0], read[2]][..], &of_rows, &write_sums, &sizes];
            runner.launch(
                kernel::<N>(["rms_norm_columns", "layer_norm_columns"], x.dtype),
                Grid::columns(rows, width, x.dtype),
                &arguments_for_sums.concat(),
            )?;
        }
        let mut gradients = vec![dx];
        for partials in partials {
            gradients.push(runner.finish_columns(&partials, width, x.dtype)?);
        }
        Ok(gradients
            .try_into()
            .expect("a norm has two inputs, or three with a bias"))
    }
}

/// Returns the kernel of the norm with N inputs, of the names of both norms.
const fn kernel<const N: usize>(names: [&'static str; 2], dtype: DType) -> Kernel {
    Kernel(Module::Norm, names[N - 2], Some(dtype))
}

/// The bytes that a thread reads at once, at addresses that are multiples of them.
const PACK_BYTES: usize = 16;

/// Returns the shape for the kernel that computes all gradients at once, which reads everything
/// once. `None` for rows that do not fit into the registers of their threads. `has_packs` is `true`
/// if all tensors begin where a pack may.
fn grid_at_once(rows: usize, width: usize, dtype: DType, has_packs: bool) -> Option<Grid> {
    /// The packs of a row that a thread has in registers.
    const PACKS_OF_THREAD: usize = 4;
    let pack = PACK_BYTES / dtype.size_in_bytes();
    // Other rows are read by single elements.
    let pack = if has_packs && width.is_multiple_of(pack) {
        pack
    } else {
        1
    };
    let warps = width.div_ceil(32 * PACKS_OF_THREAD * pack).max(1);
    let (threads, rows_of_block) = match warps {
        1 => ([32, 4], 16),
        2..=8 => ([32 * warps, 1], 4),
        _ => return None,
    };
    let blocks = rows.div_ceil(rows_of_block).clamp(1, 512);
    Some(Grid::blocks(blocks, threads))
}

/// Normalizes a row in place: subtracts the mean if `center`, and divides by the root of the mean
/// square plus `eps`. Returns the factor that the row was multiplied by, which the backward needs.
#[inline(always)]
fn normalize<R: Real>(row: &mut [R], eps: f64, center: bool) -> R {
    let len = R::nearest(row.len() as f64);
    if center {
        let mean = sum(row.len(), |index| row[index]) / len;
        row.iter_mut().for_each(|x| *x -= mean);
    }
    let squares = sum(row.len(), |index| row[index] * row[index]) / len;
    let factor = R::ONE / (squares + R::nearest(eps)).root();
    row.iter_mut().for_each(|x| *x *= factor);
    factor
}
