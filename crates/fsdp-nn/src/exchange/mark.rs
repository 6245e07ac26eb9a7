//! The order of work that several threads queue on one GPU.
//!
//! candle queues the work of each thread in a stream of the thread's own, unless the device was
//! made with a stream. No stream waits for another by itself. So whoever hands tensors to another
//! thread makes a [`Mark`] behind their last use, and the other thread waits for it before it uses,
//! or frees, any of them. The threads themselves do not wait.

use candle_core::Device;

use crate::error::Result;

/// The point behind all work that a thread has queued on a device so far. On a CPU there is
/// nothing to wait for, as work is done at once.
#[derive(Debug)]
pub(crate) struct Mark {
    #[cfg(feature = "cuda")]
    point: Option<cuda::Point>,
}

impl Mark {
    /// Marks the present end of this thread's work on a device.
    #[cfg(feature = "cuda")]
    pub(crate) fn new(device: &Device) -> Result<Mark> {
        let point = match device {
            Device::Cuda(device) => Some(cuda::Point::new(device)?),
            _ => None,
        };
        Ok(Mark { point })
    }

    #[cfg(not(feature = "cuda"))]
    #[expect(clippy::unnecessary_wraps, reason = "it can fail on a GPU")]
    pub(crate) const fn new(_: &Device) -> Result<Mark> {
        Ok(Mark {})
    }

    /// Makes all later work of this thread on the device wait until the GPU has come to the mark.
    #[cfg(feature = "cuda")]
    pub(crate) fn wait(&self) -> Result<()> {
        self.point.as_ref().map_or(Ok(()), cuda::Point::wait)
    }

    #[cfg(not(feature = "cuda"))]
    #[expect(
        clippy::unnecessary_wraps,
        clippy::unused_self,
        reason = "there is something to wait for on a GPU, which may fail"
    )]
    pub(crate) const fn wait(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::sync::Arc;

    use candle_core::CudaDevice;
    use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};

    use super::Result;

    /// A point in a stream of a GPU.
    #[derive(Debug)]
    pub(super) struct Point {
        event: CudaEvent,
        /// The device's stream: for most devices a name that stands for that of each thread.
        stream: Arc<CudaStream>,
    }

    impl Point {
        pub(super) fn new(device: &CudaDevice) -> Result<Point> {
            let stream = device.cuda_stream();
            let event = stream
                .record_event(None)
                .map_err(candle_core::Error::wrap)?;
            Ok(Point { event, stream })
        }

        pub(super) fn wait(&self) -> Result<()> {
            Ok(self
                .stream
                .wait(&self.event)
                .map_err(candle_core::Error::wrap)?)
        }
    }
}
