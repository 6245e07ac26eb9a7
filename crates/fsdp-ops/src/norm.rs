//! Layer norm and root-mean-square norm over the last dimension.

use candle_core::{D, DType, Result, Shape, Tensor};

use crate::element::Element;
use crate::operation::{Input, OnCpu, Operation, mismatch_error};
use crate::real::{Real, sum};
use crate::rows::{map_rows, reduce_rows};
use crate::values::{Values, contiguous_elements, tensor, tensor_of_sums};

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
    if !x.device().is_cpu() {
        return compose(x, weight, Some(bias), eps);
    }
    let bias = bias.contiguous()?;
    x.contiguous()?
        .apply_op3(&weight.contiguous()?, &bias, OnCpu(Norm { eps }))
}

/// Computes `x / sqrt(mean of squares + eps) * weight` over the last dimension: torch's `rms_norm`.
///
/// # Errors
/// A weight of another shape or dtype; a dtype that is not a float.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    check(RMS_NORM, x, weight)?;
    if !x.device().is_cpu() {
        return compose(x, weight, None, eps);
    }
    x.contiguous()?
        .apply_op2(&weight.contiguous()?, OnCpu(Norm { eps }))
}

/// Checks that a weight has one element for each column of `x`.
fn check(op: &'static str, x: &Tensor, weight: &Tensor) -> Result<()> {
    if weight.dims() != [x.dim(D::Minus1)?] {
        return mismatch_error(x, weight, op);
    }
    Ok(())
}

/// Computes [`rms_norm`], or with a bias [`layer_norm`], with candle's operations.
pub(crate) fn compose(
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
}

impl Operation<3> for Norm {
    const NAME: &'static str = LAYER_NORM;

    fn forward<T: Element>(&self, [x, weight, bias]: [Input<'_>; 3]) -> Result<(Vec<T>, Shape)> {
        let weight = &*T::reals(contiguous_elements(weight, LAYER_NORM)?);
        let bias = &*T::reals(contiguous_elements(bias, LAYER_NORM)?);
        let y = map_rows(
            [contiguous_elements::<T>(x, LAYER_NORM)?],
            weight.len(),
            #[inline(always)]
            |_, [row]| {
                normalize::<_, true>(row, self.eps);
                row.iter_mut()
                    .zip(weight)
                    .zip(bias)
                    .for_each(|((x, &weight), &bias)| *x = *x * weight + bias);
            },
        );
        Ok((y, x.1.shape().clone()))
    }

    fn backward<T: Element>(
        &self,
        [x, weight, _]: [&Tensor; 3],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let (dx, sums) = backward::<T, true>(LAYER_NORM, [x, weight, grad], self.eps)?;
        // The kernel sums for the weight first, then for the bias.
        let (dweight, dbias) = sums.split_at(weight.elem_count());
        let dbias = tensor_of_sums::<T>(dbias)?;
        Ok([dx, tensor_of_sums::<T>(dweight)?, dbias])
    }
}

impl Operation<2> for Norm {
    const NAME: &'static str = RMS_NORM;

    fn forward<T: Element>(&self, [x, weight]: [Input<'_>; 2]) -> Result<(Vec<T>, Shape)> {
        let weight = &*T::reals(contiguous_elements(weight, RMS_NORM)?);
        let y = map_rows(
            [contiguous_elements::<T>(x, RMS_NORM)?],
            weight.len(),
            #[inline(always)]
            |_, [row]| {
                normalize::<_, false>(row, self.eps);
                row.iter_mut()
                    .zip(weight)
                    .for_each(|(x, &weight)| *x *= weight);
            },
        );
        Ok((y, x.1.shape().clone()))
    }

    fn backward<T: Element>(
        &self,
        [x, weight]: [&Tensor; 2],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; 2]> {
        let (dx, dweight) = backward::<T, false>(RMS_NORM, [x, weight, grad], self.eps)?;
        Ok([dx, tensor_of_sums::<T>(&dweight)?])
    }
}

/// Normalizes a row in place: subtracts the mean if `CENTER`, and divides by the root of the mean
/// square plus `eps`. Returns the factor that the row was multiplied by, which the backward needs.
#[inline(always)]
fn normalize<R: Real, const CENTER: bool>(row: &mut [R], eps: f64) -> R {
    let len = R::nearest(row.len() as f64);
    if CENTER {
        let mean = sum(row.len(), |index| row[index]) / len;
        row.iter_mut().for_each(|x| *x -= mean);
    }
    let squares = sum(row.len(), |index| row[index] * row[index]) / len;
    let factor = R::ONE / (squares + R::nearest(eps)).root();
    row.iter_mut().for_each(|x| *x *= factor);
    factor
}

/// Returns the gradient of `x`, and those of the weight and, if `CENTER`, of the bias, one after
/// the other.
fn backward<T: Element, const CENTER: bool>(
    name: &'static str,
    [x, weight, grad]: [&Tensor; 3],
    eps: f64,
) -> Result<(Tensor, Vec<T::Real>)> {
    let grad = grad.contiguous()?;
    let grads = Values::<T>::read(&grad, name)?;
    let values = Values::<T>::read(x, name)?;
    let weights = Values::<T>::read(weight, name)?;
    let weight = &*T::reals(&weights);
    let width = weight.len();
    let sums = if CENTER { 2 * width } else { width };
    let (dx, sums) = reduce_rows(
        [&grads, &values],
        width,
        sums,
        #[inline(always)]
        |_, [grad, x], sums| {
            // The forward has not kept the normalized row: it is quicker to compute it again.
            let factor = normalize::<_, CENTER>(x, eps);
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
            // The output does not change if all values of the row change together, or if the row is
            // scaled. So the gradient has no part in these two directions: take away its mean, and
            // its part along the row.
            let len = T::Real::nearest(width as f64);
            let mean = if CENTER {
                sum(width, |index| grad[index]) / len
            } else {
                T::Real::ZERO
            };
            let along = sum(width, |index| grad[index] * x[index]) / len;
            grad.iter_mut()
                .zip(&*x)
                .for_each(|(grad, &x)| *grad = factor * (*grad - mean - x * along));
        },
    );
    Ok((tensor(dx, x.dims())?, sums))
}
