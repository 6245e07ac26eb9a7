//! The two custom candle ops that connect a sharded unit with the autograd graph.
//!
//! - A parameter tensor is the output of [`ParameterOp`] on a tiny anchor variable. candle passes
//!   the parameter's gradient to the op's backward, which keeps it in the unit and not in candle's
//!   gradient store.
//! - A unit's output passes through [`PreBackwardOp`]. When the backward reaches it, the op gathers
//!   the unit's parameters again, and checks that they are still those of the forward.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, Weak};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor, TensorId};

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
    tensor
        .sorted_nodes()
        .into_iter()
        .any(|node| match parameter_of(node) {
            Some(slot) => slot.is_trainable(),
            None => node.is_variable() && !is_anchor(node),
        })
}

thread_local! {
    /// The gradients of parameters from backwards that run inside another backward, the innermost
    /// last.
    static INNER: RefCell<Vec<HashMap<TensorId, Tensor>>> = const { RefCell::new(Vec::new()) };
}

/// A backward inside another one. Until it ends, gradients of parameters are collected for the
/// outer backward, and not passed to their units.
pub(crate) struct InnerBackward(());

impl InnerBackward {
    pub(crate) fn begin() -> Self {
        INNER.with_borrow_mut(|inner| inner.push(HashMap::new()));
        InnerBackward(())
    }

    /// Ends the backward, and returns the gradients by their parameters' tensors.
    pub(crate) fn end(self) -> HashMap<TensorId, Tensor> {
        INNER.with_borrow_mut(|inner| {
            std::mem::take(inner.last_mut().expect("a backward that ends has begun"))
        })
    }

    /// Collects a gradient for the outer backward, and returns `true`, if an inner backward runs on
    /// this thread. Otherwise does nothing.
    fn collect(parameter: &Tensor, grad: &Tensor) -> bool {
        INNER.with_borrow_mut(|inner| match inner.last_mut() {
            Some(collected) => {
                collected.insert(parameter.id(), grad.detach());
                true
            }
            None => false,
        })
    }
}

impl Drop for InnerBackward {
    fn drop(&mut self) {
        INNER.with_borrow_mut(|inner| inner.pop());
    }
}

/// The place of a parameter in its unit, which receives its gradient.
#[derive(Default)]
pub(crate) struct ParameterSlot {
    /// The unit, and the number of the parameter there; set once the unit is complete.
    place: OnceLock<(Weak<FlatParamHandle>, usize)>,
    /// The parameter's tensor and its anchor.
    tensors: OnceLock<[TensorId; 2]>,
}

impl Drop for ParameterSlot {
    fn drop(&mut self) {
        // The ids of tensors are not used again, but the map would grow with every model.
        let mut leaves = lock_leaves();
        for id in self.tensors.get().into_iter().flatten() {
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
        self.tensors.set(ids).expect("a parameter has one tensor");
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
        // A recomputed part passes the gradient on to the outer backward itself.
        if InnerBackward::collect(parameter, grad) {
            return Ok(None);
        }
        // The model may be gone, while its loss is still there.
        if let Some((unit, param)) = self.slot.place() {
            unit.receive_grad(param, grad)?;
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

/// The identity. Its backward gathers a unit's parameters, and checks that they have not changed
/// since the forward.
pub(crate) struct PreBackwardOp {
    /// The unit that is unsharded, and checked; `None` for a model without a root unit. It is weak,
    /// as the graph must not keep a model alive that has been dropped.
    handle: Option<Weak<FlatParamHandle>>,
    /// The units that are only checked, since they are unsharded one by one.
    checked: Vec<Weak<FlatParamHandle>>,
    /// The version of the model's values at the forward.
    version_at_forward: u64,
}

impl PreBackwardOp {
    /// Makes the op for the output of a forward of the unit `handle`, or of the model with this
    /// root unit. It checks the units `checked` too.
    pub(crate) fn new(
        handle: Option<&Arc<FlatParamHandle>>,
        checked: &[Arc<FlatParamHandle>],
        version_at_forward: u64,
    ) -> Self {
        PreBackwardOp {
            handle: handle.map(Arc::downgrade),
            checked: checked.iter().map(Arc::downgrade).collect(),
            version_at_forward,
        }
    }
}

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
        Ok(Some(grad.clone()))
    }
}
