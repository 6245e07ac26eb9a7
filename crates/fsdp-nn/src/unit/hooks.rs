//! The connections of a sharded unit with the graphs of a backward.
//!
//! - A parameter tensor is the output of [`ParameterOp`] on a tiny anchor variable. The backward of
//!   `fsdp_ops::autograd` passes the parameter's gradient to its [`ParameterSlot`], which keeps it
//!   in the unit and not in candle's gradient store.
//! - A unit's output gets a [`PreBackward`]. When the backward reaches it, the hook gathers the
//!   unit's parameters again, and checks that they are still those of the forward.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, Weak};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor, TensorId};
use fsdp_ops::autograd::{self, Hook, Receiver, Registered};

use super::handle::FlatParamHandle;
#[cfg(feature = "cuda")]
use crate::error::NnError;
use crate::error::Result;
use crate::guards::lock;

/// The leaves of candle's graph that belong to sharded models: a parameter with its slot, and the
/// anchor variable below it with `None`.
type Leaves = HashMap<TensorId, Option<Weak<ParameterSlot>>>;

/// The leaves of all models in this process. They are looked up by id, because a tensor does not
/// reveal the operation that made it.
static LEAVES: LazyLock<Mutex<Leaves>> = LazyLock::new(Mutex::default);

fn lock_leaves() -> MutexGuard<'static, Leaves> {
    lock(&LEAVES)
}

/// Returns the slot of a tensor that is a parameter; `None` for other tensors.
pub(crate) fn parameter_of(tensor: &Tensor) -> Option<Arc<ParameterSlot>> {
    lock_leaves().get(&tensor.id())?.as_ref()?.upgrade()
}

/// Returns `true` if a tensor is the anchor variable of a parameter.
pub(crate) fn is_anchor(tensor: &Tensor) -> bool {
    matches!(lock_leaves().get(&tensor.id()), Some(None))
}

/// Returns `true` if a tensor is computed from a parameter that was built to be trained, or from a
/// variable that is no parameter.
pub(crate) fn depends_on_trainable(tensor: &Tensor) -> bool {
    autograd::sorted_nodes(tensor)
        .iter()
        .any(|node| match parameter_of(node) {
            Some(slot) => slot.is_trainable(),
            None => node.is_variable() && !is_anchor(node),
        })
}

/// The place of a parameter in its unit, which receives its gradient.
#[derive(Default)]
pub(crate) struct ParameterSlot {
    /// The unit, and the number of the parameter there; set once the unit is complete.
    place: OnceLock<(Weak<FlatParamHandle>, usize)>,
    /// The ids of the parameter's tensor and of its anchor, and the registration of the tensor in
    /// `fsdp_ops::autograd`.
    tensors: OnceLock<([TensorId; 2], Registered)>,
}

impl Drop for ParameterSlot {
    fn drop(&mut self) {
        // The ids of tensors are not used again, but the map would grow with every model.
        let mut leaves = lock_leaves();
        for id in self.tensors.get().into_iter().flat_map(|(ids, _)| ids) {
            leaves.remove(id);
        }
    }
}

impl ParameterSlot {
    /// Sets the unit that the parameter belongs to, and its number there.
    pub(crate) fn set_place(&self, unit: &Arc<FlatParamHandle>, param: usize) {
        self.place
            .set((Arc::downgrade(unit), param))
            .expect("each parameter belongs to one unit");
    }

    /// Records the tensor of the parameter and its anchor variable.
    pub(crate) fn set_tensors(self: &Arc<Self>, parameter: &Tensor, anchor: &Tensor) {
        let ids = [parameter.id(), anchor.id()];
        let mut leaves = lock_leaves();
        leaves.insert(ids[0], Some(Arc::downgrade(self)));
        leaves.insert(ids[1], None);
        let leaf = Arc::downgrade(self);
        let registered = Registered::new(parameter, anchor, leaf);
        let tensors = self.tensors.set((ids, registered));
        tensors.expect("a parameter has one tensor");
    }

    /// Returns the unit and the number of the parameter there; `None` if the model has not been
    /// built, or is gone.
    fn place(&self) -> Option<(Arc<FlatParamHandle>, usize)> {
        let (unit, param) = self.place.get()?;
        Some((unit.upgrade()?, *param))
    }

    /// Returns `true` if the parameter was built to be trained, or may have been.
    fn is_trainable(&self) -> bool {
        self.place()
            .is_none_or(|(unit, param)| unit.params[param].is_trainable)
    }

    /// Returns the version of the model's values; 0 if the model has not been built, or is gone.
    pub(crate) fn version(&self) -> u64 {
        self.place().map_or(0, |(unit, _)| unit.version())
    }

    /// Checks that the values of the parameter's unit have not changed since `version_at_forward`.
    /// It is called before the forward is computed again inside a backward.
    pub(crate) fn check_unchanged(&self, version_at_forward: u64) -> Result<()> {
        match self.place() {
            Some((unit, _)) => unit.check_unchanged(version_at_forward),
            None => Ok(()),
        }
    }
}

impl Receiver for ParameterSlot {
    fn receive(&self, grad: &Tensor) -> candle_core::Result<()> {
        // The model may be gone, while its loss is still there.
        if let Some((unit, param)) = self.place() {
            unit.receive_grad(param, grad)?;
        }
        Ok(())
    }
}

/// The op whose output is a parameter, and whose argument is its anchor.
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
            dtype => {
                return Err(candle_core::Error::UnsupportedDTypeForOp(
                    dtype,
                    self.name(),
                ));
            }
        };
        Ok((empty, self.shape.clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        anchor: &candle_core::CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(candle_core::CudaStorage, Shape)> {
        let empty = fsdp_flat::storage::cuda::empty(&anchor.device, self.dtype);
        Ok((empty.map_err(NnError::from)?, self.shape.clone()))
    }

    fn bwd(
        &self,
        _: &Tensor,
        parameter: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<Option<Tensor>> {
        // If no backward of `fsdp_ops::autograd` comes to the parameter, candle's own does, and
        // `grad` is its whole gradient.
        if !autograd::collect(parameter, grad)? {
            self.slot.receive(grad)?;
        }
        Ok(None)
    }
}

/// Copies a storage of any layout to a contiguous one.
pub(crate) fn copy_contiguous<S: BackendStorage>(
    storage: &S,
    layout: &Layout,
) -> candle_core::Result<(S, Shape)> {
    // A cast to the same dtype is candle's way to do that.
    let copy = storage.to_dtype(layout, storage.dtype())?;
    Ok((copy, layout.shape().clone()))
}

/// The hook of a forward's output, which a backward runs when it comes there: it gathers a unit's
/// parameters, and checks that they have not changed since the forward.
pub(crate) struct PreBackward {
    /// The unit that is unsharded, and checked; `None` for a model without a root unit. It is weak,
    /// as the graph must not keep a model alive that has been dropped.
    handle: Option<Weak<FlatParamHandle>>,
    /// The units that are only checked, since they are unsharded one by one.
    checked: Vec<Weak<FlatParamHandle>>,
    /// The version of the model's values at the forward.
    version_at_forward: u64,
}

impl PreBackward {
    /// Makes the hook for the output of a forward of the unit `handle`, or of the model with this
    /// root unit. It checks the units `checked` too.
    pub(crate) fn new(
        handle: Option<&Arc<FlatParamHandle>>,
        checked: &[Arc<FlatParamHandle>],
        version_at_forward: u64,
    ) -> Self {
        PreBackward {
            handle: handle.map(Arc::downgrade),
            checked: checked.iter().map(Arc::downgrade).collect(),
            version_at_forward,
        }
    }

    /// Attaches the hook to a tensor, and returns the tensor. One that candle has computed is
    /// copied for that.
    ///
    /// # Errors
    /// candle's, of the copy.
    pub(crate) fn attach_to(self, tensor: Tensor) -> candle_core::Result<Tensor> {
        match autograd::before_backward(&tensor, self) {
            None => Ok(tensor),
            Some(hook) => tensor.apply_op1(PreBackwardOp(hook)),
        }
    }
}

impl Hook for PreBackward {
    fn run(&self) -> candle_core::Result<()> {
        // The graph holds activations of the forward, which do not fit other values of the
        // parameters.
        for handle in self.checked.iter().chain(&self.handle) {
            if let Some(handle) = handle.upgrade() {
                handle.check_unchanged(self.version_at_forward)?;
            }
        }
        if let Some(handle) = self.handle.as_ref().and_then(Weak::upgrade) {
            handle.unshard()?;
        }
        Ok(())
    }
}

/// The identity, whose backward runs a hook.
struct PreBackwardOp(PreBackward);

impl CustomOp1 for PreBackwardOp {
    fn name(&self) -> &'static str {
        "fsdp-pre-backward"
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        copy_contiguous(storage, layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<(candle_core::CudaStorage, Shape)> {
        copy_contiguous(storage, layout)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        self.0.run()?;
        Ok(Some(grad.clone()))
    }
}
