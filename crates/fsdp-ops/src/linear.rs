//! A product with a weight, and a bias.

use candle_core::{CpuStorage, CustomOp2, CustomOp3, D, Layout, Result, Shape, Tensor, WithDType as _};
use rayon::iter::{IndexedParallelIterator as _, ParallelIterator as _};
use rayon::slice::ParallelSliceMut as _;

use crate::element::{Element, tensor_of_sums, widened, with_element};
use crate::rows::sum_of_rows;
use crate::values::{Values, contiguous, elements};

const NAME: &str = "linear";

/// Computes `x * weight^T + bias` over the last dimension of `x`, with a weight `[outputs, inputs]`: torch's `linear`.
///
/// The gradient of the weight comes out in the weight's own layout; composed of a transpose and a product it comes out
/// transposed, and whoever uses it has to turn it round.
///
/// # Errors
/// Shapes that do not go together; different dtypes, or one that is no float.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (outputs, inputs) = weight.dims2()?;
    if x.dim(D::Minus1)? != inputs || bias.is_some_and(|bias| bias.dims() != [outputs]) {
        let (lhs, rhs) = (x.shape().clone(), weight.shape().clone());
        return Err(candle_core::Error::ShapeMismatchBinaryOp { lhs, rhs, op: NAME }.bt());
    }
    let mut dims = x.dims().to_vec();
    let rows = dims[..dims.len() - 1].iter().product::<usize>();
    let x = x.reshape((rows, inputs))?;
    let y = match bias {
        _ if !x.device().is_cpu() => {
            let y = x.matmul(&weight.t()?)?;
            bias.map_or_else(|| Ok(y.clone()), |bias| y.broadcast_add(bias))?
        }
        Some(bias) => x.apply_op3(weight, &bias.contiguous()?, Linear)?,
        None => x.apply_op2(weight, Linear)?,
    };
    if let Some(last) = dims.last_mut() {
        *last = outputs;
    }
    y.reshape(dims)
}

struct Linear;

impl Linear {
    /// Returns the gradients of the input and of the weight.
    fn backward(x: &Tensor, weight: &Tensor, grad: &Tensor) -> Result<(Tensor, Tensor)> {
        Ok((grad.matmul(weight)?, grad.t()?.matmul(x)?))
    }
}

/// Multiplies with the transpose of a weight.
fn product(x: &CpuStorage, x_layout: &Layout, weight: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
    use candle_core::backend::BackendStorage as _;
    let ((rows, inputs), outputs) = (x_layout.shape().dims2()?, layout.dims()[0]);
    let y = x.matmul(weight, (1, rows, outputs, inputs), x_layout, &layout.transpose(0, 1)?)?;
    Ok((y, (rows, outputs).into()))
}

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        product(x, x_layout, weight, layout)
    }

    fn bwd(&self, x: &Tensor, weight: &Tensor, _: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (dx, dweight) = Linear::backward(x, weight, grad)?;
        Ok((Some(dx), Some(dweight)))
    }
}

impl CustomOp3 for Linear {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage as _;
        let (y, shape) = product(x, x_layout, weight, layout)?;
        with_element!(x.dtype(), NAME, T => {
            let bias = elements::<T>(bias, contiguous(bias_layout, NAME)?, NAME)?;
            let mut y = T::cpu_storage_data(y)?;
            add_to_rows(&mut y, bias);
            Ok((T::to_cpu_storage_owned(y), shape))
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
        let (dx, dweight) = Linear::backward(x, weight, grad)?;
        let grad = grad.contiguous()?;
        let values = Values::of(&grad, NAME)?;
        let dbias = with_element!(grad.dtype(), NAME, T => {
            tensor_of_sums::<T>(&sum_of_rows(values.slice::<T>()?, weight.dim(0)?))
        })?;
        Ok((Some(dx), Some(dweight), Some(dbias)))
    }
}

/// Adds a bias to each row.
fn add_to_rows<T: Element>(rows: &mut [T], bias: &[T]) {
    let bias = widened(bias);
    let add = |row: &mut [T]| {
        row.iter_mut().zip(&bias).for_each(|(value, &bias)| *value = T::narrow(value.widen() + bias));
    };
    rows.par_chunks_mut(bias.len().max(1)).with_min_len(16).for_each(add);
}
