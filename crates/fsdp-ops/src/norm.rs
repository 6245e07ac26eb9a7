//! Layer norm and root-mean-square norm over the last dimension.

use candle_core::{
    CpuStorage, CustomOp2, CustomOp3, D, Layout, Result, Shape, Tensor, WithDType as _,
};

use crate::composed;
use crate::element::{Element, tensor, tensor_of_sums, widened, with_element};
use crate::real::{Real, sum};
use crate::rows::{map_rows, reduce_rows};
use crate::values::{Values, contiguous, elements};

/// Computes `(x - mean) / sqrt(variance + eps) * weight + bias`, with mean and variance of the last
/// dimension, for which there is one weight and one bias each: torch's `layer_norm`.
///
/// # Errors
/// A weight or a bias of another shape or dtype; a dtype that is not a float.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    check("layer-norm", x, weight)?;
    check("layer-norm", x, bias)?;
    if !x.device().is_cpu() {
        return composed::layer_norm(x, weight, bias, eps);
    }
    let norm = LayerNorm { eps };
    x.contiguous()?
        .apply_op3(&weight.contiguous()?, &bias.contiguous()?, norm)
}

/// Computes `x / sqrt(mean of squares + eps) * weight` over the last dimension: torch's `rms_norm`.
///
/// # Errors
/// A weight of another shape or dtype; a dtype that is not a float.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    check("rms-norm", x, weight)?;
    if !x.device().is_cpu() {
        return composed::rms_norm(x, weight, eps);
    }
    x.contiguous()?
        .apply_op2(&weight.contiguous()?, RmsNorm { eps })
}

/// Checks that a weight has one element for each column of `x`.
fn check(op: &'static str, x: &Tensor, weight: &Tensor) -> Result<()> {
    let width = x.dim(D::Minus1)?;
    if weight.dims() != [width] {
        let (lhs, rhs) = (x.shape().clone(), weight.shape().clone());
        return Err(candle_core::Error::ShapeMismatchBinaryOp { lhs, rhs, op }.bt());
    }
    Ok(())
}

struct LayerNorm {
    eps: f64,
}

struct RmsNorm {
    eps: f64,
}

impl CustomOp3 for LayerNorm {
    fn name(&self) -> &'static str {
        "layer-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage as _;
        let name = CustomOp3::name(self);
        with_element!(x.dtype(), name, T => {
            let x = elements::<T>(x, contiguous(x_layout, name)?, name)?;
            let weight = widened(elements::<T>(weight, contiguous(weight_layout, name)?, name)?);
            let bias = widened(elements::<T>(bias, contiguous(bias_layout, name)?, name)?);
            let y = map_rows([x], weight.len(), #[inline(always)] |_, [row]| {
                normalize::<_, true>(row, self.eps);
                row.iter_mut().zip(&weight).zip(&bias).for_each(|((x, &weight), &bias)| *x = *x * weight + bias);
            });
            Ok((T::to_cpu_storage_owned(y), x_layout.shape().clone()))
        })
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        with_element!(x.dtype(), self.name(), T => {
            let (dx, sums) = backward::<T, true>(self.name(), x, weight, &grad, self.eps)?;
            let (dweight, dbias) = sums.split_at(weight.elem_count());
            Ok((Some(tensor(dx, x.dims())?), Some(tensor_of_sums::<T>(dweight)?), Some(tensor_of_sums::<T>(dbias)?)))
        })
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage as _;
        let name = self.name();
        with_element!(x.dtype(), name, T => {
            let x = elements::<T>(x, contiguous(x_layout, name)?, name)?;
            let weight = widened(elements::<T>(weight, contiguous(weight_layout, name)?, name)?);
            let y = map_rows([x], weight.len(), #[inline(always)] |_, [row]| {
                normalize::<_, false>(row, self.eps);
                row.iter_mut().zip(&weight).for_each(|(x, &weight)| *x *= weight);
            });
            Ok((T::to_cpu_storage_owned(y), x_layout.shape().clone()))
        })
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        with_element!(x.dtype(), self.name(), T => {
            let (dx, dweight) = backward::<T, false>(self.name(), x, weight, &grad, self.eps)?;
            Ok((Some(tensor(dx, x.dims())?), Some(tensor_of_sums::<T>(&dweight)?)))
        })
    }
}

/// Normalizes a row in place: subtracts the mean if `CENTER`, and divides by the root of the mean
/// square plus `eps`. Returns the factor that the row was multiplied by, which the backward needs.
#[inline(always)]
fn normalize<R: Real, const CENTER: bool>(row: &mut [R], eps: f64) -> R {
    let len = R::of(row.len() as f64);
    if CENTER {
        let mean = sum(row.len(), |index| row[index]) / len;
        row.iter_mut().for_each(|x| *x -= mean);
    }
    let squares = sum(row.len(), |index| row[index] * row[index]) / len;
    let factor = R::ONE / (squares + R::of(eps)).root();
    row.iter_mut().for_each(|x| *x *= factor);
    factor
}

/// Returns the gradient of the input, and those of the weight and, if `CENTER`, of the bias, one
/// after the other.
fn backward<T: Element, const CENTER: bool>(
    name: &'static str,
    x: &Tensor,
    weight: &Tensor,
    grad: &Tensor,
    eps: f64,
) -> Result<(Vec<T>, Vec<T::Real>)> {
    let (x, weight, grad) = (
        Values::of(x, name)?,
        Values::of(weight, name)?,
        Values::of(grad, name)?,
    );
    let weight = widened(weight.slice::<T>()?);
    let width = weight.len();
    let sums = if CENTER { 2 * width } else { width };
    Ok(reduce_rows(
        [grad.slice::<T>()?, x.slice::<T>()?],
        width,
        sums,
        #[inline(always)]
        |_, [grad, x], sums| {
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
                .zip(&weight)
                .for_each(|(grad, &weight)| *grad *= weight);
            // The output does not change if all values of the row change together, or if the row is
            // scaled. So the gradient has no part in these two directions: take away its mean, and
            // its part along the row.
            let len = T::Real::of(width as f64);
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
    ))
}
