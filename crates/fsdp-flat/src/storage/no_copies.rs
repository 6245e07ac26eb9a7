//! Copies of tensors on GPUs, in a build that has no tensors there.

use std::ops::Range;

use candle_core::Tensor;

use crate::error::FlatError;

/// Pinned memory of the host for copies of tensors on GPUs. This build has none.
#[derive(Debug, Clone)]
pub struct HostMemory(());

impl HostMemory {
    /// Makes a place for pinned memory.
    #[must_use]
    pub const fn new(_limit: usize) -> Self {
        HostMemory(())
    }
}

/// Copies of tensors on GPUs in the host's memory. This build makes none.
#[derive(Debug)]
pub enum HostCopies {}

impl HostCopies {
    /// Returns `None`: no tensor is on a GPU that this build knows.
    ///
    /// # Errors
    /// Tensors on other devices.
    pub fn begin(
        _memory: &HostMemory,
        at_once: &[Tensor],
        kept: &[Tensor],
    ) -> Result<Option<Self>, FlatError> {
        match at_once.iter().chain(kept).next() {
            Some(tensor) => Err(FlatError::device(tensor)),
            None => Ok(None),
        }
    }

    /// Returns `true` if all copies have been given to the GPUs.
    #[must_use]
    pub const fn is_queued(&self) -> bool {
        match *self {}
    }

    /// Gives the rest of the copies to the GPUs.
    ///
    /// # Errors
    /// The driver's.
    pub const fn queue(&mut self) -> Result<(), FlatError> {
        match *self {}
    }

    /// Returns the end of all copies.
    ///
    /// # Errors
    /// The driver's.
    pub const fn end(&self) -> Result<CopiesEnd, FlatError> {
        match *self {}
    }

    /// Passes bytes of a copy to `sink`.
    ///
    /// # Errors
    /// The driver's, and those of `sink`.
    pub fn read<E: From<FlatError>>(
        &self,
        _tensor: &Tensor,
        _range: Range<usize>,
        _sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        match *self {}
    }
}

/// The end of some copies, for which changes of their tensors have to wait.
#[derive(Debug)]
pub enum CopiesEnd {}

impl CopiesEnd {
    /// Returns `true` if the copies are over.
    #[must_use]
    pub const fn has_come(&self) -> bool {
        match *self {}
    }

    /// Makes all work that this thread gives to the GPUs wait for the end of the copies.
    ///
    /// # Errors
    /// The driver's.
    pub const fn order_before_changes(&self) -> Result<(), FlatError> {
        match *self {}
    }
}

/// Reads tensors on GPUs. This build has none.
#[derive(Debug)]
pub enum GpuReader {}

impl GpuReader {
    /// Returns `None`: no tensor is on a GPU that this build knows.
    ///
    /// # Errors
    /// Tensors on other devices.
    pub fn begin(tensors: &[Tensor]) -> Result<Option<Self>, FlatError> {
        match tensors.first() {
            Some(tensor) => Err(FlatError::device(tensor)),
            None => Ok(None),
        }
    }

    /// Passes bytes of a tensor to `sink`.
    ///
    /// # Errors
    /// CUDA's, and those of `sink`.
    pub fn read<E: From<FlatError>>(
        &self,
        _tensor: &Tensor,
        _range: Range<usize>,
        _sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        match *self {}
    }
}

/// Memory of the host for the elements of a tensor on a GPU. This build has none.
#[derive(Debug)]
pub enum Upload {}

impl Upload {
    /// Returns the error of a device that this build does not know.
    ///
    /// # Errors
    /// Always.
    pub fn begin(target: &Tensor) -> Result<Self, FlatError> {
        Err(FlatError::device(target))
    }

    /// Returns the memory.
    pub const fn bytes_mut(&mut self) -> &mut [u8] {
        match *self {}
    }

    /// Gives the GPU the copy of the memory to the tensor.
    ///
    /// # Errors
    /// The driver's.
    pub const fn finish(self) -> Result<(), FlatError> {
        match self {}
    }
}

/// Does nothing: no GPU has been given a copy.
///
/// # Errors
/// None.
pub const fn finish_uploads() -> Result<(), FlatError> {
    Ok(())
}
