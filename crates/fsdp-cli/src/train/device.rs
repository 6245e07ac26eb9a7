//! The devices on which ranks compute.

use anyhow::{Result, bail};
use candle_core::Device;
use fsdp::comm::ProcessGroup;

use fsdp::comm::BackendKind;

use super::arguments::{DeviceName, TrainArguments};
use crate::failure::{CommandError, usage_error};

impl DeviceName {
    /// Returns the device that was asked for, or that the backend needs, if this build and this
    /// machine have it.
    ///
    /// # Errors
    /// A GPU backend with CPUs as the device; a build or a machine without GPUs.
    pub(super) fn choose(arguments: &TrainArguments) -> Result<Self> {
        // NCCL moves GPU memory only, so it decides the device unless that is given.
        let device = match (arguments.device, arguments.backend) {
            (Some(DeviceName::Cpu), Some(BackendKind::Nccl)) => {
                bail!(usage_error(
                    "`--backend nccl` moves GPU memory, so it cannot be used with `--device cpu`",
                    "leave `--device` out, or use `--backend tcp`",
                ));
            }
            (Some(device), _) => device,
            (None, Some(BackendKind::Nccl)) => DeviceName::Cuda,
            (None, _) => DeviceName::Cpu,
        };
        // A machine without a GPU is told before anything is written.
        if device == DeviceName::Cuda {
            gpu_count()?;
        }
        Ok(device)
    }
}

/// Opens the GPU of a rank, which has its number on this machine. If there are more ranks than
/// GPUs, they share. If the ranks' GPUs communicate directly, that can overlap with the
/// computation.
///
/// # Errors
/// The GPU cannot be used.
pub(super) fn open_gpu(local_rank: usize, group: &ProcessGroup) -> Result<Device> {
    let ordinal = local_rank % gpu_count()?;
    #[cfg(feature = "cuda")]
    {
        use fsdp::flat::storage::cuda::{Streams, open};

        let overlaps = group.backend_name() == "nccl" && group.world_size() > 1;
        let streams = if overlaps {
            Streams::PerThread
        } else {
            Streams::One
        };
        Ok(open(ordinal, streams)?)
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = group;
        Ok(Device::new_cuda(ordinal)?)
    }
}

/// Returns the number of GPUs that this process sees, which is not 0.
#[cfg(feature = "cuda")]
fn gpu_count() -> Result<usize, CommandError> {
    use candle_core::cuda_backend::cudarc::driver::CudaContext;

    let reason = match CudaContext::device_count().map(usize::try_from) {
        Ok(Ok(count)) if count > 0 => return Ok(count),
        Ok(_) => "CUDA finds none".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(usage_error(
        format!("no GPU can be used: {reason}"),
        "`fsdp doctor` shows what is missing; `--device cpu` needs no GPU",
    ))
}

#[cfg(not(feature = "cuda"))]
fn gpu_count() -> Result<usize, CommandError> {
    Err(usage_error(
        "this build computes on CPUs only",
        "leave `--device` out, or build with `--features cuda`",
    ))
}
