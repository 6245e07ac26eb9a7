//! Where ranks compute.

use anyhow::Result;
use candle_core::Device;

use super::arguments::{BackendName, DeviceName, TrainArguments};
use crate::job_failure::JobError;

impl DeviceName {
    /// What was asked for, if this build and this machine have it.
    ///
    /// # Errors
    /// GPUs that NCCL needs but that are not to be used; a build or a machine without.
    pub(super) fn choose(arguments: &TrainArguments) -> Result<Self> {
        let device = match (arguments.device, arguments.backend) {
            (Some(DeviceName::Cpu), Some(BackendName::Nccl)) => return Err(JobError::NcclOnCpus.into()),
            (Some(device), _) => device,
            (None, Some(BackendName::Nccl)) => DeviceName::Cuda,
            (None, _) => DeviceName::Cpu,
        };
        if device == DeviceName::Cuda {
            devices()?;
        }
        Ok(device)
    }

    /// The device of a rank: of several GPUs the one with its number on this machine, which ranks share if they are more.
    ///
    /// # Errors
    /// The GPU cannot be used.
    pub(super) fn open(self, local_rank: usize) -> Result<Device> {
        match self {
            DeviceName::Cpu => Ok(Device::Cpu),
            DeviceName::Cuda => Ok(Device::new_cuda(local_rank % devices()?)?),
        }
    }
}

/// How many GPUs this process sees; not 0.
#[cfg(feature = "cuda")]
fn devices() -> Result<usize, JobError> {
    use candle_core::cuda_backend::cudarc::driver::CudaContext;

    let count = CudaContext::device_count().map_err(|error| JobError::NoGpu { reason: error.to_string() })?;
    let count = usize::try_from(count).unwrap_or_default();
    if count == 0 { Err(JobError::NoGpu { reason: "CUDA finds none".to_owned() }) } else { Ok(count) }
}

#[cfg(not(feature = "cuda"))]
fn devices() -> Result<usize, JobError> {
    Err(JobError::NoCuda)
}
