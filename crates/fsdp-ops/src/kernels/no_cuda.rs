//! Stands in for the launches on NVIDIA GPUs in a build without the feature `cuda`, in which there
//! is no tensor on one.

use candle_core::{CudaDevice, CudaStorage, DType, Error, Result};

use super::argument::Argument;
use super::kernel::{Grid, Kernel};
use super::memory::Operand;

/// Returns the bytes of shared memory that a block may have.
///
/// # Errors
/// Always.
pub(super) const fn shared_bytes(_: &CudaDevice) -> Result<usize> {
    Err(Error::NotCompiledWithCudaSupport)
}

/// Makes memory.
///
/// # Errors
/// Always.
pub(super) const fn allocate(_: &CudaDevice, _: DType, _: usize) -> Result<CudaStorage> {
    Err(Error::NotCompiledWithCudaSupport)
}

/// Returns an address.
///
/// # Errors
/// Always.
pub(super) const fn first_address(_: &CudaStorage, _: &Operand<'_>) -> Result<u64> {
    Err(Error::NotCompiledWithCudaSupport)
}

/// Launches a kernel.
///
/// # Errors
/// Always.
pub(super) const fn launch(_: &CudaDevice, _: Kernel, _: Grid, _: &[Argument<'_>]) -> Result<()> {
    Err(Error::NotCompiledWithCudaSupport)
}

/// Checks two tensors.
///
/// # Errors
/// Always.
pub(crate) const fn check_same_stream(_: &CudaStorage, _: &CudaStorage) -> Result<()> {
    Err(Error::NotCompiledWithCudaSupport)
}

/// Ends the writing of memory.
///
/// # Errors
/// Always.
pub(super) const fn finish(_: &mut CudaStorage) -> Result<()> {
    Err(Error::NotCompiledWithCudaSupport)
}
