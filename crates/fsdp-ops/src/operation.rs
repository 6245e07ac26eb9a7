//! The frame of all operations: what each of them computes, and how candle runs it.
//!
//! The file of an operation has its parts in this order: the public functions, which check their
//! arguments; `with_candle_ops`, the same made of candle's operations, for devices without kernels
//! here; the operation with its forward and its backward; the kernels of both.

use candle_core::backend::BackendStorage as _;
use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Error, Layout, Result, Shape, Tensor,
    WithDType as _,
};

use crate::element::Element;
use crate::values::{Input, Values, contiguous_elements, tensor};

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
}

/// An operation with one input, whose output has the input's shape.
pub(crate) trait Unary {
    /// The name, for messages.
    const NAME: &'static str;

    /// Computes the elements of the output from those of the input, row-major.
    fn forward<T: Element>(&self, x: &[T]) -> Result<Vec<T>>;

    /// Computes the gradient of the input from that of the output.
    fn backward<T: Element>(&self, x: &Tensor, output: &Tensor, grads: &[T]) -> Result<Vec<T>>;
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

/// An operation in the form in which candle runs it on CPUs.
pub(crate) struct OnCpu<O>(pub(crate) O);

impl<O> OnCpu<O> {
    /// Runs the forward for the element type of the inputs.
    fn forward<const N: usize>(&self, inputs: [Input<'_>; N]) -> Result<(CpuStorage, Shape)>
    where
        O: Operation<N>,
    {
        with_element!(inputs[0].0.dtype(), O::NAME, T => {
            let (output, shape) = self.0.forward::<T>(inputs)?;
            Ok((T::to_cpu_storage_owned(output), shape))
        })
    }

    /// Runs the backward for the element type of the inputs.
    fn backward<const N: usize>(
        &self,
        inputs: [&Tensor; N],
        output: &Tensor,
        grad: &Tensor,
    ) -> Result<[Tensor; N]>
    where
        O: Operation<N>,
    {
        with_element!(inputs[0].dtype(), O::NAME, T => {
            self.0.backward::<T>(inputs, output, grad)
        })
    }
}

// candle has a trait for each number of inputs, whose methods take each input in parameters of its
// own. Nothing but these three impls has to know them.
impl<O: Operation<1>> CustomOp1 for OnCpu<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward([(x, layout)])
    }

    fn bwd(&self, x: &Tensor, output: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let [dx] = self.backward([x], output, grad)?;
        Ok(Some(dx))
    }
}

impl<O: Operation<2>> CustomOp2 for OnCpu<O> {
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

impl<O: Operation<3>> CustomOp3 for OnCpu<O> {
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
