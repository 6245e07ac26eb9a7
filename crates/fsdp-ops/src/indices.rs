//! Indices that an operation gets: the classes of targets, or rows of a table.

use candle_core::{DType, Result, Tensor};

use crate::kernels::{self, Argument, Grid, Kernel, Module, Operand, Runner};
use crate::operation::unsupported_error;

/// Checks that indices are integers: a float would be cut to one.
///
/// # Errors
/// A dtype of floats.
pub(crate) fn check_integers(indices: &Tensor, operation: &'static str) -> Result<()> {
    if indices.dtype().is_int() {
        return Ok(());
    }
    unsupported_error(indices.dtype(), operation)
}

/// Indices, in the form that an operation computes with.
pub(crate) enum Indices {
    /// Each is less than the number of things that there are.
    Checked(Vec<usize>),
    /// For kernels, `u32` or `i64`: nobody waits for the device to check them. An index that is too
    /// large makes NaN.
    OnDevice(Tensor),
}

impl Indices {
    /// Returns indices into `count` things, for an operation on `x`. `describe` returns the message
    /// for an index that is not below `count`, from its position and its value.
    ///
    /// # Errors
    /// An index that is not below `count`, on CPUs; those of candle's copies.
    pub(crate) fn new(
        indices: &Tensor,
        count: usize,
        x: &Tensor,
        describe: impl Fn(usize, i64) -> String,
    ) -> Result<Self> {
        if kernels::run_on(x.device(), x.dtype())? {
            let on_device = match indices.dtype() {
                DType::U32 | DType::I64 => indices.contiguous()?,
                _ => indices.to_dtype(DType::I64)?.contiguous()?,
            };
            return Ok(Indices::OnDevice(on_device));
        }
        let indices = indices.flatten_all()?.to_dtype(DType::I64)?;
        let mut checked = Vec::with_capacity(indices.elem_count());
        for (position, index) in indices.to_vec1::<i64>()?.into_iter().enumerate() {
            match usize::try_from(index) {
                Ok(index) if index < count => checked.push(index),
                _ => candle_core::bail!("{}", describe(position, index)),
            }
        }
        Ok(Indices::Checked(checked))
    }

    /// Returns the number of indices.
    pub(crate) fn len(&self) -> usize {
        match self {
            Indices::Checked(indices) => indices.len(),
            Indices::OnDevice(indices) => indices.elem_count(),
        }
    }

    /// Returns the indices for loops on the CPU.
    pub(crate) fn checked(&self) -> &[usize] {
        match self {
            Indices::Checked(indices) => indices,
            Indices::OnDevice(_) => unreachable!("only kernels get indices of a device"),
        }
    }

    /// Runs code with the indices as kernels read them: u32.
    ///
    /// # Errors
    /// The code fails; CUDA's.
    pub(crate) fn with_operand<R>(
        &self,
        runner: &Runner,
        operation: &'static str,
        code: impl FnOnce(&Operand<'_>) -> Result<R>,
    ) -> Result<R> {
        let Indices::OnDevice(indices) = self else {
            unreachable!("kernels get indices of their device");
        };
        let (storage, layout) = indices.storage_and_layout();
        let indices = Operand::new(&storage, layout, operation)?;
        if indices.dtype == DType::U32 {
            return code(&indices);
        }
        let narrowed = runner.allocate(DType::U32, indices.len())?;
        runner.launch(
            Kernel(Module::Embedding, "narrow_indices", None),
            Grid::elements(indices.len(), DType::I64),
            &[
                Argument::Read(&indices),
                Argument::Write(&narrowed),
                Argument::Long(indices.len()),
            ],
        )?;
        code(&narrowed.operand()?)
    }
}
