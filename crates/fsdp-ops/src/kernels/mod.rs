//! CUDA kernels: which there are, on which devices they run, and how they are launched. Their
//! sources are in the crate's folder `cuda`; `build.rs` compiles them with the feature `cuda`.
//!
//! An operation says what it launches through a [`Runner`], and knows no more of the device. So the
//! tests run the same code with the kernels that a C++ compiler has made for the CPU.

mod argument;
#[cfg_attr(not(feature = "cuda"), path = "no_cuda.rs")]
mod cuda;
#[cfg(test)]
pub(crate) mod host;
mod kernel;
mod memory;
pub(crate) mod pieces;
mod runner;

use candle_core::{DType, Device, Result, Tensor};

pub(crate) use self::argument::{Argument, AttentionSizes, Pieces, RotationSizes, Strides, to_int};
pub(crate) use self::cuda::check_same_stream;
pub(crate) use self::kernel::{Grid, Kernel, MOST_BLOCK_ROWS, Module, columns_parts};
pub(crate) use self::memory::{Operand, Output};
pub(crate) use self::runner::Runner;

/// Returns `true` if there are kernels for a tensor of this dtype on this device.
///
/// # Errors
/// CUDA's, where the device cannot be asked what it can do.
pub(crate) fn run_on(device: &Device, dtype: DType) -> Result<bool> {
    if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
        return Ok(false);
    }
    Ok(shared_bytes(device)? > 0)
}

/// Returns the bytes of shared memory that a block of a kernel may have on a device; 0 for devices
/// without kernels.
///
/// # Errors
/// CUDA's, where the device cannot be asked what it can do.
pub(crate) fn shared_bytes(device: &Device) -> Result<usize> {
    match device {
        Device::Cuda(device) => cuda::shared_bytes(device),
        #[cfg(test)]
        Device::Cpu if host::is_on() => Ok(host::SHARED_BYTES),
        _ => Ok(0),
    }
}

/// Returns a tensor whose elements of the last dimension lie one after the other: the tensor
/// itself, if it is one.
///
/// # Errors
/// candle's, of the copy.
pub(crate) fn with_contiguous_rows(x: &Tensor) -> Result<Tensor> {
    match (x.dims().last(), x.stride().last()) {
        (Some(&width), Some(&stride)) if width > 1 && stride != 1 => x.contiguous(),
        _ => Ok(x.clone()),
    }
}
