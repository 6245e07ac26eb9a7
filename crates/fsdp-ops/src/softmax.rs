//! Softmax over the last dimension.

use candle_core::{CpuStorage, CustomOp1, D, Layout, Result, Shape, Tensor, WithDType as _};

use crate::composed;
use crate::element::{tensor, with_element};
use crate::real::{Real, largest, sum};
use crate::rows::map_rows;
use crate::values::{Values, contiguous, elements};

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
        return composed::softmax_last_dim(x);
    }
    x.contiguous()?.apply_op1(Softmax)
}

struct Softmax;

impl CustomOp1 for Softmax {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage as _;
        let width = layout.dims().last().copied().unwrap_or(1);
        let range = contiguous(layout, NAME)?;
        with_element!(x.dtype(), NAME, T => {
            let x = elements::<T>(x, range, NAME)?;
            let y = map_rows([x], width, #[inline(always)] |_, [row]| softmax_row(row));
            Ok((T::to_cpu_storage_owned(y), layout.shape().clone()))
        })
    }

    fn bwd(&self, _: &Tensor, y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        let width = y.dim(D::Minus1)?;
        let (values, grads) = (Values::of(y, NAME)?, Values::of(&grad, NAME)?);
        with_element!(y.dtype(), NAME, T => {
            let dx = map_rows([grads.slice::<T>()?, values.slice::<T>()?], width, #[inline(always)] |_, [grad, y]| {
                let along = sum(grad.len(), |index| grad[index] * y[index]);
                grad.iter_mut().zip(y).for_each(|(grad, y)| *grad = *y * (*grad - along));
            });
            tensor(dx, y.dims()).map(Some)
        })
    }
}

/// Computes softmax in place.
#[inline(always)]
pub(crate) fn softmax_row<R: Real>(row: &mut [R]) {
    let highest = largest(row);
    for x in row.iter_mut() {
        *x = (*x - highest).exponential();
    }
    let scale = R::ONE / sum(row.len(), |index| row[index]);
    row.iter_mut().for_each(|x| *x *= scale);
}
