//! Softmax over the last dimension.

use candle_core::{D, Result, Shape, Tensor};

use crate::element::Element;
use crate::operation::{Input, OnCpu, Operation};
use crate::real::{Real, largest, sum};
use crate::rows::map_rows;
use crate::values::{Values, contiguous_elements, tensor};

const NAME: &str = "softmax-last-dim";

/// Computes softmax over the last dimension.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// let x = Var::new(&[[0f32, 0.], [1., 3.]], &Device::Cpu)?;
/// let y = fsdp_ops::softmax_last_dim(&x)?;
/// let gradients = y.narrow(1, 0, 1)?.sum_all()?.backward()?;
/// assert_eq!(gradients.get(&x).unwrap().to_vec2::<f32>()?[0], [0.25, -0.25]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// A tensor without dimensions, or of a dtype that is not a float.
pub fn softmax_last_dim(x: &Tensor) -> Result<Tensor> {
    x.dim(D::Minus1)?;
    if !x.device().is_cpu() {
        return compose(x);
    }
    x.contiguous()?.apply_op1(OnCpu(Softmax))
}

/// Computes softmax with candle's operations.
pub(crate) fn compose(x: &Tensor) -> Result<Tensor> {
    // The maximum is taken off so that no exponential overflows. It changes no result, so it needs
    // no gradient.
    let exp = x
        .broadcast_sub(&x.detach().max_keepdim(D::Minus1)?)?
        .exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}

struct Softmax;

impl Operation<1> for Softmax {
    const NAME: &'static str = NAME;

    fn forward<T: Element>(&self, [x]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let shape = x.1.shape().clone();
        let width = shape.dim(D::Minus1)?;
        let y = map_rows(
            [contiguous_elements::<T>(x, NAME)?],
            width,
            #[inline(always)]
            |_, [row]| softmax_row(row),
        );
        Ok((y, shape))
    }

    fn backward<T: Element>(
        &self,
        _: [&Tensor; 1],
        y: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; 1]> {
        let grad = grad.contiguous()?;
        let grads = Values::<T>::read(&grad, NAME)?;
        let values = Values::<T>::read(y, NAME)?;
        let dx = map_rows(
            [&grads, &values],
            y.dim(D::Minus1)?,
            #[inline(always)]
            |_, [grad, y]| {
                // A softmax does not change if all values grow alike, so the gradient has no part
                // in that direction.
                let along = sum(grad.len(), |index| grad[index] * y[index]);
                grad.iter_mut()
                    .zip(y)
                    .for_each(|(grad, y)| *grad = *y * (*grad - along));
            },
        );
        Ok([tensor(dx, y.dims())?])
    }
}

/// Computes softmax in place.
#[inline(always)]
pub(crate) fn softmax_row<R: Real>(row: &mut [R]) {
    // The largest value is subtracted so that no power overflows.
    let highest = largest(row);
    for x in row.iter_mut() {
        *x = (*x - highest).exponential();
    }
    let scale = R::ONE / sum(row.len(), |index| row[index]);
    row.iter_mut().for_each(|x| *x *= scale);
}
