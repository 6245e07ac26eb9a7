//! The linear layer: a product with a weight, plus a bias.

use std::sync::OnceLock;

use candle_core::{
    CpuStorage, CustomOp2, CustomOp3, D, Layout, Result, Shape, Tensor, WithDType as _,
};

use crate::element::{Element as _, tensor, tensor_of_sums, with_element};
use crate::gelu::{gelu_erf, gelu_erf_backward, gelu_erf_of};
use crate::product::{Matrix, product};
use crate::rows::sum_of_rows;
use crate::values::{Values, contiguous, cpu, elements, span};

const NAME: &str = "linear";

/// Computes `x * weight^T + bias` over the last dimension of `x`, with a weight `[outputs,
/// inputs]`: torch's `linear`.
///
/// The gradient of the weight comes out in the weight's own layout; composed of a transpose and a
/// product it comes out transposed, and whoever uses it has to turn it round.
///
/// # Errors
/// Shapes that do not go together; different dtypes, or one that is not a float.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (outputs, inputs) = weight.dims2()?;
    if x.dim(D::Minus1)? != inputs || bias.is_some_and(|bias| bias.dims() != [outputs]) {
        let (lhs, rhs) = (x.shape().clone(), weight.shape().clone());
        return Err(candle_core::Error::ShapeMismatchBinaryOp { lhs, rhs, op: NAME }.bt());
    }
    if !x.device().is_cpu() {
        return on_device(x, weight, bias);
    }
    let x = x.contiguous()?;
    match bias {
        Some(bias) => x.apply_op3(weight, &bias.contiguous()?, Linear),
        None => x.apply_op2(weight, Linear),
    }
}

/// Computes `gelu_erf(linear(x, weight, bias))` as one operation. candle sets the gradient of each
/// operation's input to zero and adds to it; for this input, which is the widest tensor of most
/// models, it need not.
///
/// # Errors
/// The same as [`linear`].
pub fn linear_gelu_erf(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let (outputs, inputs) = weight.dims2()?;
    if !x.device().is_cpu() || x.dim(D::Minus1)? != inputs || bias.dims() != [outputs] {
        return gelu_erf(&linear(x, weight, Some(bias))?);
    }
    x.contiguous()?
        .apply_op3(weight, &bias.contiguous()?, LinearGelu::default())
}

/// Computes the same with candle's product, for devices that have no fast one here.
fn on_device(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (outputs, inputs) = weight.dims2()?;
    let y = x.reshape(((), inputs))?.matmul(&weight.t()?)?;
    let y = bias.map_or_else(|| Ok(y.clone()), |bias| y.broadcast_add(bias))?;
    let mut dims = x.dims().to_vec();
    dims[x.rank() - 1] = outputs;
    y.reshape(dims)
}

// The operation takes an input of any rank: a reshape would be a node of candle's graph, whose
// backward reads and writes all gradients once more.
struct Linear;

impl Linear {
    /// Multiplies with the transpose of a weight, and adds a bias.
    fn forward(
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        layout: &Layout,
        bias: Option<(&CpuStorage, &Layout)>,
    ) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage as _;
        let (outputs, inputs) = layout.shape().dims2()?;
        let mut dims = x_layout.dims().to_vec();
        let rows = rows(&dims);
        dims[x_layout.dims().len() - 1] = outputs;
        with_element!(x.dtype(), NAME, T => {
            let x = T::reals(elements::<T>(x, contiguous(x_layout, NAME)?, NAME)?);
            let weight = T::reals(elements::<T>(weight, span(layout), NAME)?);
            let bias = match bias {
                Some((bias, layout)) => Some(T::reals(elements::<T>(bias, contiguous(layout, NAME)?, NAME)?)),
                None => None,
            };
            let (x, weight) = (Matrix::row_major(&x, [rows, inputs]), Matrix::of_layout(&weight, layout)?.transposed());
            let y = product(x, weight, bias.as_deref(), rayon::current_num_threads())?;
            Ok((T::to_cpu_storage_owned(T::of_reals(y)), dims.into()))
        })
    }

    /// Returns the gradients of the input and of the weight, and that of the bias if it `has_bias`.
    fn backward(
        x: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
        has_bias: bool,
    ) -> Result<[Option<Tensor>; 3]> {
        let (outputs, inputs) = weight.dims2()?;
        let grad = grad.contiguous()?;
        let (of_x, of_grad) = (Values::of(x, NAME)?, Values::of(&grad, NAME)?);
        let (of_weight, layout) = weight.storage_and_layout();
        with_element!(x.dtype(), NAME, T => {
            let of_grad = of_grad.slice::<T>()?;
            let (of_x, reals) = (T::reals(of_x.slice::<T>()?), T::reals(of_grad));
            let of_weight = T::reals(elements::<T>(cpu(&of_weight, NAME)?, span(layout), NAME)?);
            let rows = rows(x.dims());
            let (of_x, by_row) =
                (Matrix::row_major(&of_x, [rows, inputs]), Matrix::row_major(&reals, [rows, outputs]));
            let of_weight = Matrix::of_layout(&of_weight, layout)?;
            // The two products are equally much work, so compute them at the same time, each on
            // half of the threads. One after the other on all threads, more threads would share a
            // product, and wait for each other more often.
            let threads = rayon::current_num_threads().div_ceil(2);
            let (dx, dweight) = rayon::join(
                || product(by_row, of_weight, None, threads),
                || product(by_row.transposed(), of_x, None, threads),
            );
            let dbias = if has_bias { Some(tensor_of_sums::<T>(&sum_of_rows(of_grad, outputs))?) } else { None };
            let dx = tensor(T::of_reals(dx?), x.dims())?;
            Ok([Some(dx), Some(tensor(T::of_reals(dweight?), weight.dims())?), dbias])
        })
    }
}

/// Returns the number of rows of an input: of its vectors along the last dimension.
fn rows(dims: &[usize]) -> usize {
    dims.split_last()
        .map_or(1, |(_, leading)| leading.iter().product())
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
        Linear::forward(x, x_layout, weight, layout, None)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [dx, dweight, _] = Linear::backward(x, weight, grad, false)?;
        Ok((dx, dweight))
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
        Linear::forward(x, x_layout, weight, layout, Some((bias, bias_layout)))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dx, dweight, dbias] = Linear::backward(x, weight, grad, true)?;
        Ok((dx, dweight, dbias))
    }
}

/// A product whose result goes through GELU.
#[derive(Default)]
struct LinearGelu {
    /// The result of the product, for the backward.
    product: OnceLock<CpuStorage>,
}

impl CustomOp3 for LinearGelu {
    fn name(&self) -> &'static str {
        "linear-gelu-erf"
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
        let (product, shape) =
            Linear::forward(x, x_layout, weight, layout, Some((bias, bias_layout)))?;
        let y = gelu_erf_of(&product)?;
        // Each operation is computed once.
        let _ = self.product.set(product);
        Ok((y, shape))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Some(product) = self.product.get() else {
            candle_core::bail!("{NAME}: a backward before the forward")
        };
        let grad = gelu_erf_backward(product, &grad.contiguous()?)?;
        let [dx, dweight, dbias] = Linear::backward(x, weight, &grad, true)?;
        Ok((dx, dweight, dbias))
    }
}
