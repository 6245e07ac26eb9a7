//! Softmax over the last dimension.

use candle_core::{D, Result, Tensor};

use crate::element::Element;
use crate::kernels::{Argument, Grid, Kernel, Module, Operand, Output, Runner};
use crate::operation::{Unary, apply, is_computed_here};
use crate::real::{Real, largest, sum};
use crate::rows::map_rows;
use crate::values::Values;

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
    let width = x.dim(D::Minus1)?;
    if !is_computed_here(x)? {
        return with_candle_ops(x);
    }
    apply(Softmax { width }, [&x.contiguous()?])
}

/// Computes softmax with candle's operations.
pub(crate) fn with_candle_ops(x: &Tensor) -> Result<Tensor> {
    // The maximum is taken off so that no exponential overflows. It changes no result, so it needs
    // no gradient.
    let exp = x
        .broadcast_sub(&x.detach().max_keepdim(D::Minus1)?)?
        .exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}

struct Softmax {
    width: usize,
}

impl Unary for Softmax {
    const NAME: &'static str = NAME;

    fn forward<T: Element>(&self, x: &[T]) -> Result<Vec<T>> {
        Ok(map_rows(
            [x],
            self.width,
            #[inline(always)]
            |_, [row]| softmax_row(row),
        ))
    }

    fn backward<T: Element>(&self, _: &Tensor, y: &Tensor, grads: &[T]) -> Result<Vec<T>> {
        let values = Values::<T>::read(y, NAME)?;
        Ok(map_rows(
            [grads, &values],
            self.width,
            #[inline(always)]
            |_, [grad, y]| {
                // A softmax does not change if all values grow alike, so the gradient has no part
                // in that direction.
                let dot_product = sum(grad.len(), |index| grad[index] * y[index]);
                grad.iter_mut()
                    .zip(y)
                    .for_each(|(grad, y)| *grad = *y * (*grad - dot_product));
            },
        ))
    }

    fn launch_forward(&self, runner: &Runner, x: &Operand<'_>) -> Result<Output> {
        let y = runner.allocate(x.dtype, x.len())?;
        self.launch(runner, "softmax_forward", &[x], &y)?;
        Ok(y)
    }

    fn launch_backward(
        &self,
        runner: &Runner,
        x: &Operand<'_>,
        output: &Operand<'_>,
        grad: &Operand<'_>,
    ) -> Result<Output> {
        let dx = runner.allocate(x.dtype, x.len())?;
        self.launch(runner, "softmax_backward", &[output, grad], &dx)?;
        Ok(dx)
    }
}

impl Softmax {
    /// Launches a kernel that takes rows, and writes rows of the same width.
    fn launch(
        &self,
        runner: &Runner,
        kernel: &'static str,
        inputs: &[&Operand<'_>],
        output: &Output,
    ) -> Result<()> {
        let (rows, width) = inputs[0].rows_and_width();
        let dtype = inputs[0].dtype;
        let mut arguments: Vec<Argument<'_>> =
            inputs.iter().map(|input| Argument::Read(input)).collect();
        arguments.extend([
            Argument::Write(output),
            Argument::Long(rows),
            Argument::Int(width),
        ]);
        runner.launch(
            Kernel(Module::Softmax, kernel, Some(dtype)),
            Grid::rows(rows, width, dtype),
            &arguments,
        )
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
