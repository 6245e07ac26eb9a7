//! The linear layer: a product with a weight, plus a bias.

use std::sync::OnceLock;

use candle_core::{D, DType, Layout, Result, Shape, Storage, Tensor};

use crate::add::{add, sum};
use crate::autograd::{self, Recorded};
use crate::element::Element;
use crate::gelu::{erf_backward, erf_forward, gelu_erf};
use crate::kernels::{
    self, Argument, Grid, Kernel, Module, Operand, Output, Runner, columns_parts,
};
use crate::operation::{
    Operation, WithInputs, apply, check_dtypes, is_computed_here, mismatch_error,
};
use crate::product::{Matrix, product};
use crate::rows::sum_of_rows;
use crate::values::{
    Input, Values, contiguous_elements, cpu_storage, elements, span, tensor, tensor_of_sums,
};

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
        return mismatch_error(x, weight, NAME);
    }
    if !is_computed_here(x)? {
        return with_candle_ops(x, weight, bias);
    }
    let x = x.contiguous()?;
    let weight = arrange_weight(weight)?;
    match bias {
        Some(bias) => apply(Linear, [&x, &weight, &bias.contiguous()?]),
        None => apply(Linear, [&x, &weight]),
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
    if !is_computed_here(x)? || x.dim(D::Minus1)? != inputs || bias.dims() != [outputs] {
        return gelu_erf(&linear(x, weight, Some(bias))?);
    }
    let (x, bias) = (x.contiguous()?, bias.contiguous()?);
    apply(LinearGelu::default(), [&x, &arrange_weight(weight)?, &bias])
}

/// Computes `add(residual, linear(x, weight, bias))`. In the graph of a sharded model it is one
/// operation, which does not keep the result of `linear`: the backward does not need it.
///
/// # Errors
/// The same as [`linear`]; a `residual` of another shape or dtype than the result of the layer.
pub fn linear_add(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    residual: &Tensor,
) -> Result<Tensor> {
    let (outputs, inputs) = weight.dims2()?;
    let is_layer = x.dim(D::Minus1)? == inputs && bias.is_none_or(|bias| bias.dims() == [outputs]);
    if is_layer && residual.dims() != [&x.dims()[..x.rank() - 1], &[outputs]].concat() {
        return mismatch_error(residual, weight, "linear-add");
    }
    let tensors: Vec<&Tensor> = [x, weight, residual].into_iter().chain(bias).collect();
    let anchor = match autograd::anchor(&tensors) {
        Some(anchor) if is_layer && residual.dtype() == x.dtype() && is_computed_here(x)? => anchor,
        _ => return add(residual, &linear(x, weight, bias)?),
    };
    let (x, weight) = (x.contiguous()?, arrange_weight(weight)?);
    let residual = residual.contiguous()?;
    match bias {
        Some(bias) => LinearAdd::record([x, weight, bias.contiguous()?], residual, anchor),
        None => LinearAdd::record([x, weight], residual, anchor),
    }
}

/// Returns a weight in a layout that can be multiplied with: any on CPUs; on GPUs its rows or its
/// columns lie one after the other.
fn arrange_weight(weight: &Tensor) -> Result<Tensor> {
    if weight.device().is_cpu() || weight.is_contiguous() || weight.t()?.is_contiguous() {
        Ok(weight.clone())
    } else {
        weight.contiguous()
    }
}

/// Computes [`linear()`] with candle's operations.
fn with_candle_ops(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (outputs, inputs) = weight.dims2()?;
    let mut dims = x.dims().to_vec();
    dims[x.rank() - 1] = outputs;
    let y = x
        .reshape(((), inputs))?
        .matmul(&arrange_weight(weight)?.t()?)?;
    match bias {
        Some(bias) => y.broadcast_add(bias)?.reshape(dims),
        None => y.reshape(dims),
    }
}

/// A product with a weight, with a bias if there are three inputs.
///
/// It takes an input of any rank: a reshape would be a node of candle's graph, whose backward reads
/// and writes all gradients once more.
struct Linear;

impl<const N: usize> Operation<N> for Linear {
    const NAME: &'static str = NAME;

    fn forward<T: Element>(&self, inputs: [Input<'_>; N]) -> Result<(Vec<T>, Shape)> {
        forward(inputs[0], inputs[1], inputs.get(2).copied())
    }

    fn backward<T: Element>(
        &self,
        inputs: [&Tensor; N],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; N]> {
        let grad = grad.contiguous()?;
        backward::<T, N>(inputs, &Values::read(&grad, NAME)?)
    }

    fn launch_forward(&self, runner: &Runner, inputs: [Operand<'_>; N]) -> Result<(Output, Shape)> {
        let (y, shape) = launch_product(runner, &inputs[0], &inputs[1])?;
        if let Some(bias) = inputs.get(2) {
            runner.with_bias("bias_add", [&y.operand()?, bias], &y)?;
        }
        Ok((y, shape))
    }

    fn launch_backward(
        &self,
        runner: &Runner,
        inputs: [Operand<'_>; N],
        _: Operand<'_>,
        grad: Operand<'_>,
    ) -> Result<[Output; N]> {
        let [dx, dweight] = launch_gradients(runner, [&inputs[0], &inputs[1]], &grad)?;
        let mut gradients = vec![dx, dweight];
        if N == 3 {
            gradients.push(runner.sum_of_rows(&grad)?);
        }
        Ok(gradients
            .try_into()
            .expect("a linear layer has two inputs, or three with a bias"))
    }
}

/// A linear layer whose result is added to a residual.
struct LinearAdd<const N: usize> {
    linear: WithInputs<Linear, N>,
    /// The inputs of the layer, and the residual.
    inputs: Vec<Tensor>,
}

impl<const N: usize> LinearAdd<N> {
    /// Runs the operation on inputs that fit together, and adds it to the graph of `autograd`.
    fn record(inputs: [Tensor; N], residual: Tensor, anchor: Tensor) -> Result<Tensor> {
        let mut all_inputs = inputs.to_vec();
        all_inputs.push(residual);
        let operation = LinearAdd {
            linear: WithInputs::new(Linear, inputs),
            inputs: all_inputs,
        };
        autograd::record(Box::new(operation), anchor)
    }
}

impl<const N: usize> Recorded for LinearAdd<N> {
    fn name(&self) -> &'static str {
        "linear-add"
    }

    fn inputs(&self) -> &[Tensor] {
        &self.inputs
    }

    fn forward(&self) -> Result<(Storage, Shape)> {
        if let [x, weight, bias, residual] = &self.inputs[..]
            && kernels::run_on(x.device(), x.dtype())?
        {
            return launch_sum(x, weight, bias, residual);
        }
        let (y, shape) = self.linear.forward()?;
        let (residual, residual_layout) = self.inputs[N].storage_and_layout();
        let y_layout = Layout::contiguous(shape.clone());
        Ok((sum((&residual, residual_layout), (&y, &y_layout))?, shape))
    }

    fn backward(&self, output: &Tensor, grad: &Tensor) -> Result<Vec<Tensor>> {
        let mut gradients = self.linear.backward(output, grad)?;
        gradients.push(grad.clone());
        Ok(gradients)
    }
}

/// Computes `x * weight^T + bias + residual` on a GPU, with one launch after the product.
fn launch_sum(
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    residual: &Tensor,
) -> Result<(Storage, Shape)> {
    let tensors = [x, weight, bias, residual];
    let stored = tensors.map(Tensor::storage_and_layout);
    let operand = |at: usize| Operand::new(&stored[at].0, stored[at].1, NAME);
    let operands = [operand(0)?, operand(1)?, operand(2)?, operand(3)?];
    check_dtypes(&operands, NAME)?;
    let [x, weight, bias, residual] = operands;
    let runner = Runner::new(&x);
    let (y, shape) = launch_product(&runner, &x, &weight)?;
    let (rows, outputs) = residual.rows_and_width();
    runner.launch(
        Kernel(Module::Elementwise, "bias_residual_add", Some(x.dtype)),
        Grid::columns(rows, outputs, x.dtype),
        &[
            Argument::Read(&y.operand()?),
            Argument::Read(&bias),
            Argument::Read(&residual),
            Argument::Write(&y),
            Argument::Long(rows),
            Argument::Int(outputs),
        ],
    )?;
    Ok((runner.storage(y)?, shape))
}

/// A product whose result goes through GELU.
#[derive(Default)]
struct LinearGelu {
    /// The result of the product, for the backward: on CPUs with the bias, on GPUs without.
    product: OnceLock<Tensor>,
}

impl Operation<3> for LinearGelu {
    const NAME: &'static str = "linear-gelu-erf";

    fn forward<T: Element>(&self, [x, weight, bias]: [Input<'_>; 3]) -> Result<(Vec<T>, Shape)> {
        let (product, shape) = forward::<T>(x, weight, Some(bias))?;
        let y = erf_forward(&product);
        // GELU's backward needs its input, and computing the product again would take long. Each
        // operation runs once, so nothing has been set before.
        let _ = self.product.set(tensor(product, shape.dims())?);
        Ok((y, shape))
    }

    fn backward<T: Element>(
        &self,
        inputs: [&Tensor; 3],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let grad = grad.contiguous()?;
        let dproduct = erf_backward::<T>(
            &Values::read(&grad, NAME)?,
            &Values::read(self.product(), NAME)?,
        );
        backward(inputs, &dproduct)
    }

    fn launch_forward(
        &self,
        runner: &Runner,
        [x, weight, bias]: [Operand<'_>; 3],
    ) -> Result<(Output, Shape)> {
        let (product, shape) = launch_product(runner, &x, &weight)?;
        let y = runner.allocate(x.dtype, shape.elem_count())?;
        let operand = product.operand()?;
        runner.with_bias("bias_gelu_erf_forward", [&operand, &bias], &y)?;
        // As on CPUs.
        let _ = self.product.set(runner.tensor(product, shape.clone())?);
        Ok((y, shape))
    }

    fn launch_backward(
        &self,
        runner: &Runner,
        [x, weight, bias]: [Operand<'_>; 3],
        _: Operand<'_>,
        grad: Operand<'_>,
    ) -> Result<[Output; 3]> {
        let (storage, layout) = self.product().storage_and_layout();
        let product = Operand::new(&storage, layout, NAME)?;
        let (rows, outputs) = grad.rows_and_width();
        let dproduct = runner.allocate(x.dtype, grad.len())?;
        let parts = columns_parts(rows, outputs, x.dtype);
        let partials = runner.allocate(DType::F32, parts * outputs)?;
        runner.launch(
            Kernel(Module::Elementwise, "bias_gelu_erf_backward", Some(x.dtype)),
            Grid::columns(rows, outputs, x.dtype),
            &[
                Argument::Read(&product),
                Argument::Read(&bias),
                Argument::Read(&grad),
                Argument::Write(&dproduct),
                Argument::Write(&partials),
                Argument::Long(rows),
                Argument::Int(outputs),
            ],
        )?;
        let operand = dproduct.operand()?;
        let operand = operand.with_layout(Layout::contiguous((rows, outputs)));
        let [dx, dweight] = launch_gradients(runner, [&x, &weight], &operand)?;
        let dbias = runner.finish_columns(&partials, outputs, x.dtype)?;
        Ok([dx, dweight, dbias])
    }
}

impl LinearGelu {
    /// Returns what the forward has kept.
    fn product(&self) -> &Tensor {
        self.product
            .get()
            .expect("the forward runs before the backward")
    }
}

/// Multiplies with the transpose of a weight on a GPU.
fn launch_product(
    runner: &Runner,
    x: &Operand<'_>,
    weight: &Operand<'_>,
) -> Result<(Output, Shape)> {
    let outputs = weight.layout.shape().dims2()?.0;
    let mut dims = x.layout.dims().to_vec();
    dims[x.layout.dims().len() - 1] = outputs;
    let transposed = weight.with_layout(weight.layout.transpose(0, 1)?);
    let y = runner.product(&matrix_of_rows(x), &transposed)?;
    Ok((y, dims.into()))
}

/// Returns the gradients of the input and the weight on a GPU, from that of the product.
fn launch_gradients(
    runner: &Runner,
    [x, weight]: [&Operand<'_>; 2],
    grad: &Operand<'_>,
) -> Result<[Output; 2]> {
    let grad = matrix_of_rows(grad);
    let transposed = grad.with_layout(grad.layout.transpose(0, 1)?);
    Ok([
        runner.product(&grad, weight)?,
        runner.product(&transposed, &matrix_of_rows(x))?,
    ])
}

/// Returns the rows of an operand, which lie one after the other, as a matrix.
fn matrix_of_rows<'a>(x: &Operand<'a>) -> Operand<'a> {
    let start = x.layout.start_offset();
    x.with_layout(Layout::contiguous_with_offset(x.rows_and_width(), start))
}

/// Multiplies with the transpose of a weight, and adds a bias.
fn forward<T: Element>(
    x: Input<'_>,
    weight: Input<'_>,
    bias: Option<Input<'_>>,
) -> Result<(Vec<T>, Shape)> {
    let (outputs, inputs) = weight.1.shape().dims2()?;
    let mut dims = x.1.dims().to_vec();
    let rows = row_count(&dims);
    dims[x.1.dims().len() - 1] = outputs;
    let x_values = T::reals(contiguous_elements(x, NAME)?);
    // The weight may have any layout, such as that of a transposed one.
    let weight_values = T::reals(elements(weight.0, span(weight.1), NAME)?);
    let bias_values = match bias {
        Some(bias) => Some(T::reals(contiguous_elements(bias, NAME)?)),
        None => None,
    };
    // The weight is `[outputs, inputs]`, so it is its transpose that is multiplied with.
    let y = product(
        Matrix::row_major(&x_values, [rows, inputs]),
        Matrix::from_layout(&weight_values, weight.1)?.transposed(),
        bias_values.as_deref(),
        rayon::current_num_threads(),
    )?;
    Ok((T::from_reals(y), dims.into()))
}

/// Returns the gradients of all inputs: the input, the weight, and the bias if there is one.
fn backward<T: Element, const N: usize>(tensors: [&Tensor; N], grads: &[T]) -> Result<[Tensor; N]> {
    let [x, weight] = [tensors[0], tensors[1]];
    let (outputs, inputs) = weight.dims2()?;
    let rows = row_count(x.dims());
    let x_elements = Values::<T>::read(x, NAME)?;
    let (weight_storage, weight_layout) = weight.storage_and_layout();
    let weight_elements = elements::<T>(
        cpu_storage(&weight_storage, NAME)?,
        span(weight_layout),
        NAME,
    )?;
    let x_values = T::reals(&x_elements);
    let weight_values = T::reals(weight_elements);
    let grad_values = T::reals(grads);
    let x_matrix = Matrix::row_major(&x_values, [rows, inputs]);
    let weight_matrix = Matrix::from_layout(&weight_values, weight_layout)?;
    let grad_matrix = Matrix::row_major(&grad_values, [rows, outputs]);
    // The two products are equally much work, so compute them at the same time, each on half of the
    // threads. One after the other on all threads, more threads would share a product, and wait for
    // each other more often.
    let threads = rayon::current_num_threads().div_ceil(2);
    let (dx, dweight) = rayon::join(
        || product(grad_matrix, weight_matrix, None, threads),
        || product(grad_matrix.transposed(), x_matrix, None, threads),
    );
    let mut gradients = vec![
        tensor(T::from_reals(dx?), x.dims())?,
        tensor(T::from_reals(dweight?), weight.dims())?,
    ];
    if tensors.len() == 3 {
        gradients.push(tensor_of_sums::<T>(&sum_of_rows(grads, outputs))?);
    }
    Ok(gradients
        .try_into()
        .expect("a linear layer has two inputs, or three with a bias"))
}

/// Returns the number of rows of an input: of its vectors along the last dimension.
fn row_count(dims: &[usize]) -> usize {
    dims[..dims.len() - 1].iter().product()
}
