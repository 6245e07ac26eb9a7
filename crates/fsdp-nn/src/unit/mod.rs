//! A module whose parameters are one FSDP unit.
//!
//! - `handle` is the FlatParameter of a unit: its memory, gathered or sharded.
//! - `parameter` is one parameter of a unit.
//! - `gradients` holds the gradients of a unit, and `backward` collects and reduces them.
//! - `hooks` connects units with candle's autograd.
//! - `recompute` computes a part of a model again in the middle of a backward.

mod backward;
mod gradients;
mod handle;
mod hooks;
mod parameter;
mod recompute;

use std::sync::{Arc, OnceLock, Weak};

use candle_core::{Module, Result, Tensor};

use hooks::depends_on_trainable;

pub(crate) use gradients::PendingReduction;
pub(crate) use handle::{FLAT_PARAM, FlatParamHandle, InUse, UnitSpec};
pub(crate) use hooks::{ParameterOp, ParameterSlot, PreBackward};
pub(crate) use parameter::Parameter;
pub use recompute::{Recomputed, recompute};

/// The handle of a unit; empty for a unit without parameters of its own.
pub(crate) type UnitSlot = OnceLock<Weak<FlatParamHandle>>;

/// A value that a unit's forward may return: tensors that the unit's backward hook can be attached
/// to.
pub trait UnitOutput: Sized {
    /// Replaces each tensor of the value.
    ///
    /// # Errors
    /// The errors of `f`.
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self>;
}

impl UnitOutput for Tensor {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        f(self)
    }
}

impl<A: UnitOutput, B: UnitOutput> UnitOutput for (A, B) {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok((self.0.map_tensors(f)?, self.1.map_tensors(f)?))
    }
}

impl<O: UnitOutput> UnitOutput for Vec<O> {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        self.into_iter()
            .map(|output| output.map_tensors(f))
            .collect()
    }
}

impl<O: UnitOutput> UnitOutput for Option<O> {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        self.map(|output| output.map_tensors(f)).transpose()
    }
}

/// A module whose parameters are gathered before its forward, and, with full sharding, released
/// after it and gathered again for its backward. Made by [`Scope::unit`](crate::Scope::unit).
pub struct Unit<M> {
    module: M,
    slot: Option<Arc<UnitSlot>>,
}

impl<M> Unit<M> {
    /// Makes the unit of a module, with the slot of its handle unless the model is not sharded.
    pub(crate) const fn new(module: M, slot: Option<Arc<UnitSlot>>) -> Self {
        Unit { module, slot }
    }

    fn handle(&self) -> Option<Arc<FlatParamHandle>> {
        self.slot.as_ref()?.get()?.upgrade()
    }

    /// Runs a forward of the module with the unit's parameters gathered.
    /// Collectives: one all-gather over the shard group, unless the unit is gathered already.
    ///
    /// # Errors
    /// The errors of `f`, and of the all-gather.
    pub fn run<O: UnitOutput>(&self, f: impl FnOnce(&M) -> Result<O>) -> Result<O> {
        let Some(handle) = self.handle() else {
            return f(&self.module);
        };
        let guard = handle.unshard_for_forward()?;
        let computed = f(&self.module).map_err(|error| handle.shared.explain_error(error))?;
        // Release the parameters before anything else takes memory.
        drop(guard);
        let output = computed.map_tensors(&mut |tensor| handle.cast_output(tensor))?;
        if !handle.needs_unshard() && handle.is_built_frozen() {
            return cut_graph(output);
        }
        if !handle.needs_unshard() || handle.is_root {
            return Ok(output);
        }
        // Attach the hook even if the parameters stay gathered after the forward: another backward,
        // or a change of values, may release them before this unit's backward.
        let version = handle.version();
        output.map_tensors(&mut |tensor| {
            PreBackward::new(Some(&handle), &[], version).attach_to(tensor)
        })
    }
}

/// Cuts candle's graph after a frozen unit, unless something that can be trained comes before. Then
/// no backward has to come here, and the activations are not kept. Only for a unit whose backward
/// does not communicate: ranks may decide differently.
fn cut_graph<O: UnitOutput>(output: O) -> Result<O> {
    output.map_tensors(&mut |tensor| {
        Ok(if depends_on_trainable(&tensor) {
            tensor
        } else {
            tensor.detach()
        })
    })
}

impl<M: Module> Module for Unit<M> {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match self.handle() {
            Some(handle) => {
                // Mixed precision converts the inputs of each unit, as torch does for floats.
                let xs = handle.cast_input(xs)?;
                self.run(|module| module.forward(&xs))
            }
            None => self.run(|module| module.forward(xs)),
        }
    }
}
