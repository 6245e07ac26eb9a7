//! The memory that kernels read and write.

#[cfg(test)]
use candle_core::CpuStorage;
use candle_core::backend::BackendStorage as _;
use candle_core::{CudaStorage, DType, Layout, Result, Storage};

use crate::values::devices_error;

/// A tensor in a device's memory, as kernels read it.
#[derive(Debug, Clone)]
pub(crate) struct Operand<'a> {
    pub(super) memory: Memory<'a>,
    pub(crate) dtype: DType,
    pub(crate) layout: Layout,
}

/// The memory of a tensor.
#[derive(Debug, Clone, Copy)]
pub(super) enum Memory<'a> {
    Cuda(&'a CudaStorage),
    #[cfg(test)]
    Cpu(&'a CpuStorage),
}

impl<'a> Operand<'a> {
    /// Returns the tensor that has this storage and layout.
    ///
    /// # Errors
    /// Memory of another device than kernels run on.
    pub(crate) fn new(
        storage: &'a Storage,
        layout: &Layout,
        operation: &'static str,
    ) -> Result<Self> {
        match storage {
            Storage::Cuda(storage) => Ok(Operand::on_cuda(storage, layout)),
            #[cfg(test)]
            Storage::Cpu(storage) => Ok(Operand::on_cpu(storage, layout)),
            _ => devices_error(operation),
        }
    }

    /// Returns the tensor that has this memory of a GPU, and this layout.
    pub(crate) fn on_cuda(storage: &'a CudaStorage, layout: &Layout) -> Self {
        Operand {
            dtype: storage.dtype(),
            memory: Memory::Cuda(storage),
            layout: layout.clone(),
        }
    }

    /// Returns the tensor that has this memory of the host, and this layout.
    #[cfg(test)]
    pub(crate) fn on_cpu(storage: &'a CpuStorage, layout: &Layout) -> Self {
        Operand {
            dtype: storage.dtype(),
            memory: Memory::Cpu(storage),
            layout: layout.clone(),
        }
    }

    /// Returns the same memory with another layout.
    pub(crate) fn with_layout(&self, layout: Layout) -> Self {
        Operand {
            layout,
            ..self.clone()
        }
    }

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        self.layout.shape().elem_count()
    }

    /// Returns the width of the last dimension, and the number of rows of that width.
    pub(crate) fn rows_and_width(&self) -> (usize, usize) {
        let (rows, width) = match self.layout.dims().split_last() {
            Some((&width, dims)) => (dims.iter().product(), width),
            None => (1, 1),
        };
        (rows, width)
    }
}

/// Fresh memory that kernels write.
#[derive(Debug)]
pub(crate) struct Output {
    pub(super) storage: Storage,
    pub(super) len: usize,
}

impl Output {
    /// Returns the type of the elements.
    pub(super) fn dtype(&self) -> DType {
        self.storage.dtype()
    }

    /// Returns the memory as a tensor of one dimension, for a kernel that reads it.
    pub(crate) fn operand(&self) -> Result<Operand<'_>> {
        Operand::new(&self.storage, &Layout::contiguous(self.len), "kernel")
    }
}
