//! Sums of two tensors.

use candle_core::backend::BackendStorage as _;
use candle_core::op::Add as CandleAdd;
use candle_core::{Device, Error, Layout, Result, Shape, Storage, Tensor};

use crate::autograd::{self, Recorded};
use crate::kernels::{self, Operand, Runner};
use crate::operation::mismatch_error;
use crate::values::devices_error;

const NAME: &str = "add";

/// Computes `x + y`, where `y` may lack first dimensions of `x`, as torch's `+` does: a residual,
/// or position embeddings.
///
/// It is candle's sum. In the backward of a sharded model it takes no launch, and no memory: the
/// gradient is handed on as it is.
///
/// # Errors
/// Shapes that do not go together; different dtypes.
pub fn add(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    if !x.dims().ends_with(y.dims()) {
        return mismatch_error(x, y, NAME);
    }
    if x.dtype() != y.dtype() {
        return Err(Error::DTypeMismatchBinaryOp {
            lhs: x.dtype(),
            rhs: y.dtype(),
            op: NAME,
        }
        .bt());
    }
    match autograd::anchor(&[x, y]) {
        Some(anchor) => {
            let inputs = [x.contiguous()?, y.contiguous()?];
            autograd::record(Box::new(Add { inputs }), anchor)
        }
        None => {
            let [(x_storage, _), (y_storage, _)] = [x, y].map(Tensor::storage_and_layout);
            if let (Storage::Cuda(x), Storage::Cuda(y)) = (&*x_storage, &*y_storage) {
                kernels::check_same_stream(x, y)?;
            }
            x.broadcast_add(y)
        }
    }
}

struct Add {
    inputs: [Tensor; 2],
}

impl Recorded for Add {
    fn name(&self) -> &'static str {
        NAME
    }

    fn inputs(&self) -> &[Tensor] {
        &self.inputs
    }

    fn forward(&self) -> Result<(Storage, Shape)> {
        let [(x, x_layout), (y, y_layout)] = self.inputs.each_ref().map(Tensor::storage_and_layout);
        let shape = x_layout.shape().clone();
        let [x_tensor, y_tensor] = &self.inputs;
        if x_tensor.dims() != y_tensor.dims()
            && kernels::run_on(x_tensor.device(), x_tensor.dtype())?
        {
            let x = Operand::new(&x, x_layout, NAME)?;
            let y = Operand::new(&y, y_layout, NAME)?;
            let runner = Runner::new(&x);
            let sum = runner.allocate(x.dtype, x.len())?;
            runner.with_bias("bias_add", [&x, &y], &sum)?;
            return Ok((runner.storage(sum)?, shape));
        }
        let y_layout = y_layout.broadcast_as(shape.clone())?;
        Ok((sum((&x, x_layout), (&y, &y_layout))?, shape))
    }

    fn backward(&self, _: &Tensor, grad: &Tensor) -> Result<Vec<Tensor>> {
        let [x, y] = &self.inputs;
        if x.dims() == y.dims() {
            return Ok(vec![grad.clone(), grad.clone()]);
        }
        Ok(vec![grad.clone(), sum_over_first_dims(grad, y)?])
    }
}

/// Returns the sum of two tensors of one shape.
pub(crate) fn sum(
    (x, x_layout): (&Storage, &Layout),
    (y, y_layout): (&Storage, &Layout),
) -> Result<Storage> {
    match (x, y) {
        // No kernel can be launched for no elements.
        (Storage::Cuda(x), _) if x_layout.shape().elem_count() == 0 => {
            let runner = Runner::on(&Device::Cuda(x.device().clone()));
            runner.storage(runner.allocate(x.dtype(), 0)?)
        }
        (Storage::Cpu(x), Storage::Cpu(y)) => Ok(Storage::Cpu(
            x.binary_impl::<CandleAdd>(y, x_layout, y_layout)?,
        )),
        (Storage::Cuda(x), Storage::Cuda(y)) => {
            kernels::check_same_stream(x, y)?;
            let sum = x.binary_impl::<CandleAdd>(y, x_layout, y_layout)?;
            Ok(Storage::Cuda(sum))
        }
        _ => devices_error(NAME),
    }
}

/// Returns the sum of a gradient over the first dimensions, which `y` lacks.
fn sum_over_first_dims(grad: &Tensor, y: &Tensor) -> Result<Tensor> {
    let width = y.elem_count();
    if grad.elem_count() == 0 {
        return y.zeros_like();
    }
    if !kernels::run_on(grad.device(), grad.dtype())? {
        return grad.reshape(((), width))?.sum(0)?.reshape(y.shape());
    }
    let grad = grad.contiguous()?;
    let (storage, layout) = grad.storage_and_layout();
    let rows =
        Layout::contiguous_with_offset((grad.elem_count() / width, width), layout.start_offset());
    let operand = Operand::new(&storage, &rows, NAME)?;
    let runner = Runner::new(&operand);
    runner.tensor(runner.sum_of_rows(&operand)?, y.shape())
}
