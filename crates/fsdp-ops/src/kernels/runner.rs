//! Launches on one device.

use candle_core::backend::BackendStorage as _;
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Result, Shape, Storage, Tensor};

use super::argument::Argument;
use super::cuda;
#[cfg(test)]
use super::host;
use super::kernel::{Grid, Kernel, Module, columns_parts};
use super::memory::{Memory, Operand, Output};

/// Runs kernels on a device.
#[derive(Debug)]
pub(crate) struct Runner {
    device: Device,
}

impl Runner {
    /// Returns what runs kernels on the device of a tensor.
    pub(crate) fn new(operand: &Operand<'_>) -> Self {
        let device = match operand.memory {
            Memory::Cuda(storage) => Device::Cuda(storage.device().clone()),
            #[cfg(test)]
            Memory::Cpu(_) => Device::Cpu,
        };
        Runner { device }
    }

    /// Returns what runs kernels on a device.
    pub(crate) fn on(device: &Device) -> Self {
        Runner {
            device: device.clone(),
        }
    }

    /// Makes memory for `len` elements. Kernels have to write each of them.
    ///
    /// # Errors
    /// CUDA's: usually that there is no memory.
    pub(crate) fn allocate(&self, dtype: DType, len: usize) -> Result<Output> {
        let storage = match &self.device {
            Device::Cuda(device) => Storage::Cuda(cuda::allocate(device, dtype, len)?),
            #[cfg(test)]
            Device::Cpu => Storage::Cpu(host::allocate(dtype, len)?),
            _ => return no_kernels_error(),
        };
        Ok(Output { storage, len })
    }

    /// Makes memory of zeros.
    ///
    /// # Errors
    /// CUDA's: usually that there is no memory.
    pub(crate) fn zeros(&self, dtype: DType, len: usize) -> Result<Output> {
        // CUDA does not allocate zero bytes.
        let storage = zeros(&self.device, dtype, len.max(1))?;
        Ok(Output { storage, len })
    }

    /// Launches a kernel, unless there is nothing to do for it.
    ///
    /// # Errors
    /// CUDA's; tensors that are larger than the kernel can count.
    pub(crate) fn launch(
        &self,
        kernel: Kernel,
        grid: Grid,
        arguments: &[Argument<'_>],
    ) -> Result<()> {
        // CUDA refuses to launch no blocks.
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        match &self.device {
            Device::Cuda(device) => cuda::launch(device, kernel, grid, arguments),
            #[cfg(test)]
            Device::Cpu => host::launch(kernel, grid, arguments),
            _ => no_kernels_error(),
        }
    }

    /// Launches `kernel`, which adds the elements of `bias` to each row of `x`, and writes the
    /// result to `y`. `y` may be the memory of `x`.
    ///
    /// # Errors
    /// The kernel cannot be loaded or launched.
    pub(crate) fn with_bias(
        &self,
        kernel: &'static str,
        [x, bias]: [&Operand<'_>; 2],
        y: &Output,
    ) -> Result<()> {
        let width = bias.len();
        let rows = x.len().checked_div(width).unwrap_or(0);
        self.launch(
            Kernel(Module::Elementwise, kernel, Some(x.dtype)),
            Grid::columns(rows, width, x.dtype),
            &[
                Argument::Read(x),
                Argument::Read(bias),
                Argument::Write(y),
                Argument::Long(rows),
                Argument::Int(width),
            ],
        )
    }

    /// Adds up rows of partial sums that kernels over columns have written, in f32, to sums of
    /// another type.
    ///
    /// # Errors
    /// Those of [`Self::allocate`] and [`Self::launch`].
    pub(crate) fn finish_columns(
        &self,
        partials: &Output,
        width: usize,
        dtype: DType,
    ) -> Result<Output> {
        let sums = self.allocate(dtype, width)?;
        let parts = partials.len.checked_div(width).unwrap_or(0);
        self.launch(
            Kernel(Module::Columns, "finish_columns", Some(dtype)),
            Grid::finish_columns(width),
            &[
                Argument::Read(&partials.operand()?),
                Argument::Write(&sums),
                Argument::Long(parts),
                Argument::Int(width),
            ],
        )?;
        Ok(sums)
    }

    /// Returns the sum of all rows of a tensor, whose rows lie one after the other.
    ///
    /// # Errors
    /// Those of [`Self::allocate`] and [`Self::launch`].
    pub(crate) fn sum_of_rows(&self, x: &Operand<'_>) -> Result<Output> {
        let (rows, width) = x.rows_and_width();
        let partials = self.allocate(DType::F32, columns_parts(rows, width, x.dtype) * width)?;
        self.launch(
            Kernel(Module::Columns, "column_sums", Some(x.dtype)),
            Grid::columns(rows, width, x.dtype),
            &[
                Argument::Read(x),
                Argument::Write(&partials),
                Argument::Long(rows),
                Argument::Int(width),
            ],
        )?;
        self.finish_columns(&partials, width, x.dtype)
    }

    /// Returns the product of two matrices, row-major. Each may be the transpose of one whose rows
    /// lie one after the other: that needs no copy.
    ///
    /// # Errors
    /// candle's, and layouts that are neither.
    pub(crate) fn product(&self, lhs: &Operand<'_>, rhs: &Operand<'_>) -> Result<Output> {
        let (rows, inner) = lhs.layout.shape().dims2()?;
        let columns = rhs.layout.shape().dims2()?.1;
        let len = rows * columns;
        if len == 0 {
            return self.allocate(lhs.dtype, 0);
        }
        let sizes = (1, rows, columns, inner);
        let storage = match (&self.device, lhs.memory, rhs.memory) {
            // A sum of nothing is zero.
            (device, ..) if inner == 0 => zeros(device, lhs.dtype, len)?,
            (_, Memory::Cuda(left), Memory::Cuda(right)) => {
                cuda::check_same_stream(left, right)?;
                Storage::Cuda(left.matmul(right, sizes, &lhs.layout, &rhs.layout)?)
            }
            #[cfg(test)]
            (_, Memory::Cpu(left), Memory::Cpu(right)) => {
                Storage::Cpu(left.matmul(right, sizes, &lhs.layout, &rhs.layout)?)
            }
            #[cfg(test)]
            _ => return no_kernels_error(),
        };
        Ok(Output { storage, len })
    }

    /// Returns memory that has been written, for candle.
    ///
    /// # Errors
    /// CUDA's.
    pub(crate) fn storage(&self, mut output: Output) -> Result<Storage> {
        if let Storage::Cuda(storage) = &mut output.storage {
            cuda::finish(storage)?;
        }
        Ok(output.storage)
    }

    /// Returns memory that has been written as a tensor without a history.
    ///
    /// # Errors
    /// CUDA's.
    pub(crate) fn tensor(&self, output: Output, shape: impl Into<Shape>) -> Result<Tensor> {
        let storage = self.storage(output)?;
        Ok(Tensor::from_storage(
            storage,
            shape,
            BackpropOp::none(),
            false,
        ))
    }
}

/// Makes memory of zeros.
fn zeros(device: &Device, dtype: DType, len: usize) -> Result<Storage> {
    use candle_core::backend::BackendDevice as _;
    let shape = Shape::from(len);
    match device {
        Device::Cuda(device) => Ok(Storage::Cuda(device.zeros_impl(&shape, dtype)?)),
        Device::Cpu => Ok(Storage::Cpu(
            candle_core::cpu_backend::CpuDevice.zeros_impl(&shape, dtype)?,
        )),
        Device::Metal(_) => no_kernels_error(),
    }
}

/// Returns the error of a device without kernels, which no caller uses.
fn no_kernels_error<T>() -> Result<T> {
    candle_core::bail!("there are no kernels for this device")
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Layout;

    #[test]
    fn a_layout_of_no_dimensions_has_one_row() {
        let layout = Layout::contiguous(());
        let storage = candle_core::CpuStorage::F32(vec![0.0]);
        assert_eq!(Operand::on_cpu(&storage, &layout).rows_and_width(), (1, 1));
    }
}
