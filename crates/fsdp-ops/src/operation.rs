//! The frame of all operations: what each of them computes, and how candle runs it.
//!
//! The file of an operation has its parts in this order: the public functions, which check their
//! arguments; `with_candle_ops`, the same made of candle's operations, for devices and dtypes that
//! are not computed here; the operation with its forward and its backward, on CPUs and by CUDA
//! kernels; the loops of both on CPUs.

use candle_core::backend::BackendStorage as _;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Error, Layout, Result, Shape,
    Storage, Tensor, WithDType as _,
};

use crate::autograd::{self, Recorded};
use crate::element::Element;
use crate::kernels::{self, Operand, Output, Runner};
use crate::values::{Input, Values, contiguous_elements, cpu_storage, tensor};

/// Returns `true` if an operation of a tensor is computed here: on CPUs, and by kernels where there
/// are some. Elsewhere operations are composed of candle's.
///
/// # Errors
/// CUDA's, where the device cannot be asked what it can do.
pub(crate) fn is_computed_here(x: &Tensor) -> Result<bool> {
    Ok(x.device().is_cpu() || kernels::run_on(x.device(), x.dtype())?)
}

/// An operation with `N` inputs, all of one dtype.
pub(crate) trait Operation<const N: usize> {
    /// The name, for messages.
    const NAME: &'static str;

    /// Computes the elements of the output, row-major, and returns them with its shape.
    fn forward<T: Element>(&self, inputs: [Input<'_>; N]) -> Result<(Vec<T>, Shape)>;

    /// Computes the gradient of each input from that of the output.
    fn backward<T: Element>(
        &self,
        inputs: [&Tensor; N],
        output: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; N]>;

    /// Launches the kernels of the forward, and returns the output with its shape.
    fn launch_forward(&self, runner: &Runner, inputs: [Operand<'_>; N]) -> Result<(Output, Shape)>;

    /// `true` if the kernels of the backward take a gradient of which only the elements of the last
    /// dimension lie one after the other; otherwise all of it does.
    const TAKES_STRIDED_GRADIENT: bool = false;

    /// Launches the kernels of the backward, and returns the gradient of each input.
    fn launch_backward(
        &self,
        runner: &Runner,
        inputs: [Operand<'_>; N],
        output: Operand<'_>,
        grad: Operand<'_>,
    ) -> Result<[Output; N]>;
}

/// An operation with one input, whose output has the input's shape.
pub(crate) trait Unary {
    /// The name, for messages.
    const NAME: &'static str;

    /// Computes the elements of the output from those of the input, row-major.
    fn forward<T: Element>(&self, x: &[T]) -> Result<Vec<T>>;

    /// Computes the gradient of the input from that of the output.
    fn backward<T: Element>(&self, x: &Tensor, output: &Tensor, grads: &[T]) -> Result<Vec<T>>;

    /// Launches the kernels of the forward.
    fn launch_forward(&self, runner: &Runner, x: &Operand<'_>) -> Result<Output>;

    /// `true` for operations of which [`Operation::TAKES_STRIDED_GRADIENT`] is.
    const TAKES_STRIDED_GRADIENT: bool = false;

    /// Launches the kernels of the backward.
    fn launch_backward(
        &self,
        runner: &Runner,
        x: &Operand<'_>,
        output: &Operand<'_>,
        grad: &Operand<'_>,
    ) -> Result<Output>;
}

impl<U: Unary> Operation<1> for U {
    const NAME: &'static str = U::NAME;

    fn forward<T: Element>(&self, [x]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let y = self.forward(contiguous_elements::<T>(x, U::NAME)?)?;
        Ok((y, x.1.shape().clone()))
    }

    fn backward<T: Element>(
        &self,
        [x]: [&Tensor; 1],
        output: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; 1]> {
        let grad = grad.contiguous()?;
        let dx = self.backward(x, output, &Values::<T>::read(&grad, U::NAME)?)?;
        Ok([tensor(dx, x.dims())?])
    }

    fn launch_forward(&self, runner: &Runner, [x]: [Operand<'_>; 1]) -> Result<(Output, Shape)> {
        Ok((self.launch_forward(runner, &x)?, x.layout.shape().clone()))
    }

    const TAKES_STRIDED_GRADIENT: bool = U::TAKES_STRIDED_GRADIENT;

    fn launch_backward(
        &self,
        runner: &Runner,
        [x]: [Operand<'_>; 1],
        output: Operand<'_>,
        grad: Operand<'_>,
    ) -> Result<[Output; 1]> {
        Ok([self.launch_backward(runner, &x, &output, &grad)?])
    }
}

/// Runs code with `$type` as the element type of a dtype; an error for dtypes that no operation
/// here takes.
macro_rules! with_element {
    ($dtype:expr, $operation:expr, $type:ident => $code:expr) => {
        match $dtype {
            DType::F32 => {
                type $type = f32;
                $code
            }
            DType::F64 => {
                type $type = f64;
                $code
            }
            DType::BF16 => {
                type $type = half::bf16;
                $code
            }
            DType::F16 => {
                type $type = half::f16;
                $code
            }
            dtype => unsupported_error(dtype, $operation),
        }
    };
}

/// Runs an operation on its inputs.
///
/// # Errors
/// The operation fails: it says why.
pub(crate) fn apply<O, const N: usize>(operation: O, inputs: [&Tensor; N]) -> Result<Tensor>
where
    O: Operation<N> + Send + Sync + 'static,
    ForCandle<O>: CandleOp<N>,
{
    match autograd::anchor(&inputs) {
        Some(anchor) => {
            let inputs = inputs.map(Clone::clone);
            autograd::record(Box::new(WithInputs::new(operation, inputs)), anchor)
        }
        None => ForCandle(operation).apply(inputs),
    }
}

/// An operation that candle can run on `N` inputs.
pub(crate) trait CandleOp<const N: usize> {
    /// Runs the operation, and adds it to candle's graph.
    fn apply(self, inputs: [&Tensor; N]) -> Result<Tensor>;
}

impl<O: Operation<1> + Send + Sync + 'static> CandleOp<1> for ForCandle<O> {
    fn apply(self, [x]: [&Tensor; 1]) -> Result<Tensor> {
        x.apply_op1(self)
    }
}

impl<O: Operation<2> + Send + Sync + 'static> CandleOp<2> for ForCandle<O> {
    fn apply(self, [first, second]: [&Tensor; 2]) -> Result<Tensor> {
        first.apply_op2(second, self)
    }
}

impl<O: Operation<3> + Send + Sync + 'static> CandleOp<3> for ForCandle<O> {
    fn apply(self, [first, second, third]: [&Tensor; 3]) -> Result<Tensor> {
        first.apply_op3(second, third, self)
    }
}

/// An operation with its inputs, in the graph of `autograd`.
pub(crate) struct WithInputs<O, const N: usize> {
    operation: ForCandle<O>,
    inputs: [Tensor; N],
}

impl<O, const N: usize> WithInputs<O, N> {
    /// Joins an operation with the tensors that it computes from.
    pub(crate) const fn new(operation: O, inputs: [Tensor; N]) -> Self {
        WithInputs {
            operation: ForCandle(operation),
            inputs,
        }
    }
}

impl<O: Operation<N> + Send + Sync, const N: usize> Recorded for WithInputs<O, N> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn inputs(&self) -> &[Tensor] {
        &self.inputs
    }

    fn forward(&self) -> Result<(Storage, Shape)> {
        let storages = self.inputs.each_ref().map(Tensor::storage_and_layout);
        if matches!(&*storages[0].0, Storage::Cuda(_)) {
            let operands = try_map(storages.each_ref(), |(storage, layout)| {
                Operand::new(storage, layout, O::NAME)
            })?;
            return self.operation.launch_forward(operands);
        }
        let inputs = try_map(storages.each_ref(), |(storage, layout)| {
            Ok((cpu_storage(storage, O::NAME)?, *layout))
        })?;
        let (output, shape) = self.operation.forward(inputs)?;
        Ok((Storage::Cpu(output), shape))
    }

    fn backward(&self, output: &Tensor, grad: &Tensor) -> Result<Vec<Tensor>> {
        let gradients = self
            .operation
            .backward(self.inputs.each_ref(), output, grad)?;
        Ok(gradients.into())
    }
}

/// Returns the result of a function for each of `N` inputs.
///
/// # Errors
/// The first error of the function.
fn try_map<I, T, const N: usize>(
    inputs: [I; N],
    function: impl FnMut(I) -> Result<T>,
) -> Result<[T; N]> {
    let results: Vec<T> = inputs.into_iter().map(function).collect::<Result<_>>()?;
    let Ok(results) = results.try_into() else {
        unreachable!("there is one result for each input")
    };
    Ok(results)
}

/// An operation in the form in which candle runs it, on CPUs and GPUs.
pub(crate) struct ForCandle<O>(O);

impl<O> ForCandle<O> {
    /// Runs the forward on the CPU, for the element type of the inputs.
    fn forward<const N: usize>(&self, inputs: [Input<'_>; N]) -> Result<(CpuStorage, Shape)>
    where
        O: Operation<N>,
    {
        #[cfg(test)]
        if kernels::run_on(&candle_core::Device::Cpu, inputs[0].0.dtype())? {
            let operands = inputs.map(|(storage, layout)| Operand::on_cpu(storage, layout));
            let (Storage::Cpu(output), shape) = self.launch_forward(operands)? else {
                unreachable!("kernels on the CPU write memory of the host");
            };
            return Ok((output, shape));
        }
        with_element!(inputs[0].0.dtype(), O::NAME, T => {
            let (output, shape) = self.0.forward::<T>(inputs)?;
            Ok((T::to_cpu_storage_owned(output), shape))
        })
    }

    /// Runs the forward on a GPU.
    fn cuda_forward<const N: usize>(
        &self,
        inputs: [(&CudaStorage, &Layout); N],
    ) -> Result<(CudaStorage, Shape)>
    where
        O: Operation<N>,
    {
        let operands = inputs.map(|(storage, layout)| Operand::on_cuda(storage, layout));
        match self.launch_forward(operands)? {
            (Storage::Cuda(output), shape) => Ok((output, shape)),
            _ => unreachable!("kernels on a GPU write its memory"),
        }
    }

    /// Runs the forward by kernels.
    fn launch_forward<const N: usize>(&self, inputs: [Operand<'_>; N]) -> Result<(Storage, Shape)>
    where
        O: Operation<N>,
    {
        check_dtypes(&inputs, O::NAME)?;
        let runner = Runner::new(&inputs[0]);
        let (output, shape) = self.0.launch_forward(&runner, inputs)?;
        Ok((runner.storage(output)?, shape))
    }

    /// Runs the backward where the forward has run.
    fn backward<const N: usize>(
        &self,
        inputs: [&Tensor; N],
        output: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; N]>
    where
        O: Operation<N>,
    {
        if kernels::run_on(output.device(), output.dtype())? {
            return self.launch_backward(inputs, output, grad);
        }
        with_element!(inputs[0].dtype(), O::NAME, T => {
            self.0.backward::<T>(inputs, output, grad)
        })
    }

    /// Runs the backward by kernels.
    fn launch_backward<const N: usize>(
        &self,
        inputs: [&Tensor; N],
        output: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; N]>
    where
        O: Operation<N>,
    {
        let grad = if O::TAKES_STRIDED_GRADIENT {
            kernels::with_contiguous_rows(grad)?
        } else {
            grad.contiguous()?
        };
        let storages = inputs.map(Tensor::storage_and_layout);
        let (output_storage, output_layout) = output.storage_and_layout();
        let (grad_storage, grad_layout) = grad.storage_and_layout();
        let operands = try_map(storages.each_ref(), |(storage, layout)| {
            Operand::new(storage, layout, O::NAME)
        })?;
        let output = Operand::new(&output_storage, output_layout, O::NAME)?;
        let grad = Operand::new(&grad_storage, grad_layout, O::NAME)?;
        check_dtypes(&operands, O::NAME)?;
        check_dtypes(&[output.clone(), grad.clone()], O::NAME)?;
        let runner = Runner::new(&output);
        let gradients = self.0.launch_backward(&runner, operands, output, grad)?;
        let mut shapes = inputs.iter().map(|input| input.shape());
        try_map(gradients, |gradient| {
            let shape = shapes.next().expect("there is one gradient for each input");
            runner.tensor(gradient, shape)
        })
    }
}

/// Checks that tensors are of one dtype, which has kernels. Memory that has been released has
/// another.
pub(crate) fn check_dtypes(operands: &[Operand<'_>], operation: &'static str) -> Result<()> {
    let dtype = operands[0].dtype;
    check_float(dtype, operation)?;
    match operands.iter().find(|operand| operand.dtype != dtype) {
        None => Ok(()),
        Some(other) => Err(Error::DTypeMismatchBinaryOp {
            lhs: dtype,
            rhs: other.dtype,
            op: operation,
        }
        .bt()),
    }
}

// candle has a trait for each number of inputs, whose methods take each input in parameters of its
// own. Nothing but these three impls has to know them.
impl<O: Operation<1>> CustomOp1 for ForCandle<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward([(x, layout)])
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.cuda_forward([(x, layout)])
    }

    fn bwd(&self, x: &Tensor, output: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let [dx] = self.backward([x], output, grad)?;
        Ok(Some(dx))
    }
}

impl<O: Operation<2>> CustomOp2 for ForCandle<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(
        &self,
        first: &CpuStorage,
        first_layout: &Layout,
        second: &CpuStorage,
        second_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward([(first, first_layout), (second, second_layout)])
    }

    fn cuda_fwd(
        &self,
        first: &CudaStorage,
        first_layout: &Layout,
        second: &CudaStorage,
        second_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.cuda_forward([(first, first_layout), (second, second_layout)])
    }

    fn bwd(
        &self,
        first: &Tensor,
        second: &Tensor,
        output: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [d_first, d_second] = self.backward([first, second], output, grad)?;
        Ok((Some(d_first), Some(d_second)))
    }
}

impl<O: Operation<3>> CustomOp3 for ForCandle<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(
        &self,
        first: &CpuStorage,
        first_layout: &Layout,
        second: &CpuStorage,
        second_layout: &Layout,
        third: &CpuStorage,
        third_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward([
            (first, first_layout),
            (second, second_layout),
            (third, third_layout),
        ])
    }

    fn cuda_fwd(
        &self,
        first: &CudaStorage,
        first_layout: &Layout,
        second: &CudaStorage,
        second_layout: &Layout,
        third: &CudaStorage,
        third_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.cuda_forward([
            (first, first_layout),
            (second, second_layout),
            (third, third_layout),
        ])
    }

    fn bwd(
        &self,
        first: &Tensor,
        second: &Tensor,
        third: &Tensor,
        output: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [d_first, d_second, d_third] = self.backward([first, second, third], output, grad)?;
        Ok((Some(d_first), Some(d_second), Some(d_third)))
    }
}

/// Checks that operations take `dtype`: that it is a float.
pub(crate) fn check_float(dtype: DType, operation: &'static str) -> Result<()> {
    match dtype {
        DType::F32 | DType::F64 | DType::BF16 | DType::F16 => Ok(()),
        dtype => unsupported_error(dtype, operation),
    }
}

/// Returns the error of a dtype that an operation does not take.
pub(crate) fn unsupported_error<T>(dtype: DType, operation: &'static str) -> Result<T> {
    Err(Error::UnsupportedDTypeForOp(dtype, operation).bt())
}

/// Returns the error of tensors whose shapes do not go together.
pub(crate) fn mismatch_error<T>(lhs: &Tensor, rhs: &Tensor, op: &'static str) -> Result<T> {
    Err(Error::ShapeMismatchBinaryOp {
        lhs: lhs.shape().clone(),
        rhs: rhs.shape().clone(),
        op,
    }
    .bt())
}
