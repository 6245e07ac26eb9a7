//! The two candle ops that tie a sharded unit to the autograd graph.
//!
//! - A parameter tensor is the output of [`ParameterOp`] on a tiny anchor variable: candle hands its gradient to the
//!   op's backward, which keeps it in the unit instead of in candle's gradient store.
//! - A unit's output passes through [`PreBackwardOp`], which gathers the unit's parameters again when backward
//!   reaches it, and checks that they still are those of the forward.

use std::sync::{Arc, OnceLock, Weak};

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};

use crate::NnError;
use crate::handle::FlatParamHandle;

/// The unit and the number of a parameter, which its gradient goes to; set once the unit that owns the parameter is complete.
#[derive(Default)]
pub(crate) struct ParameterSlot(OnceLock<(Weak<FlatParamHandle>, usize)>);

impl ParameterSlot {
    pub(crate) fn set(&self, handle: &Arc<FlatParamHandle>, param: usize) {
        // A second call cannot happen: each parameter belongs to one unit.
        let _ = self.0.set((Arc::downgrade(handle), param));
    }
}

/// The op whose output is a parameter.
pub(crate) struct ParameterOp {
    pub(crate) shape: Shape,
    pub(crate) dtype: candle_core::DType,
    pub(crate) slot: Arc<ParameterSlot>,
}

impl CustomOp1 for ParameterOp {
    fn name(&self) -> &'static str {
        "fsdp-parameter"
    }

    /// Makes an empty storage: the unit fills it when it gathers.
    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let empty = match self.dtype {
            candle_core::DType::F32 => CpuStorage::F32(Vec::new()),
            candle_core::DType::F64 => CpuStorage::F64(Vec::new()),
            candle_core::DType::F16 => CpuStorage::F16(Vec::new()),
            candle_core::DType::BF16 => CpuStorage::BF16(Vec::new()),
            dtype => return Err(candle_core::Error::UnsupportedDTypeForOp(dtype, self.name())),
        };
        Ok((empty, self.shape.clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        anchor: &candle_core::CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(candle_core::CudaStorage, Shape)> {
        let empty = fsdp_flat::cuda::empty(&anchor.device, self.dtype);
        Ok((empty.map_err(|error| NnError::from(error).into_candle())?, self.shape.clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        if let Some((handle, param)) = self.slot.0.get()
            && let Some(handle) = handle.upgrade()
        {
            handle.receive_grad(*param, grad).map_err(NnError::into_candle)?;
        }
        Ok(None)
    }
}

/// The identity, whose backward makes sure of a unit's parameters.
pub(crate) struct PreBackwardOp {
    handle: Weak<FlatParamHandle>,
    /// The last change of values before the forward.
    changes: u64,
}

impl PreBackwardOp {
    /// Makes the op for the output of a forward that has just been computed.
    pub(crate) fn new(handle: &Arc<FlatParamHandle>) -> Self {
        PreBackwardOp { handle: Arc::downgrade(handle), changes: handle.last_change() }
    }
}

impl CustomOp1 for PreBackwardOp {
    fn name(&self) -> &'static str {
        "fsdp-pre-backward"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        // A cast to the same dtype is candle's way to copy any layout to a contiguous one.
        Ok((storage.to_dtype(layout, storage.dtype())?, layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<(candle_core::CudaStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        Ok((storage.to_dtype(layout, storage.dtype())?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        if let Some(handle) = self.handle.upgrade() {
            // What the graph has kept of the forward does not go with other values.
            handle.check_unchanged(self.changes).map_err(NnError::into_candle)?;
            handle.gather().map_err(NnError::into_candle)?;
        }
        Ok(Some(grad.clone()))
    }
}
