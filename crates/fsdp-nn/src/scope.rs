//! The builder of a sharded model: a [`VarBuilder`] whose tensors are parameters of the model, and the boundaries of units.

use std::sync::Arc;

use candle_core::Tensor;
use candle_nn::VarBuilder;

use crate::MixedPrecision;
use crate::registry::{SharedRegistry, lock};
use crate::unit::{Unit, UnitSlot};

/// Builds a model: candle's [`VarBuilder`] plus the boundaries of FSDP units.
///
/// The same model code serves plain candle: [`Scope::plain`] has no units and passes everything through.
#[derive(Clone)]
pub struct Scope {
    vb: VarBuilder<'static>,
    registry: Option<SharedRegistry>,
}

impl Scope {
    /// Makes a scope without sharding: `vb`'s tensors are used as they are.
    #[must_use]
    pub const fn plain(vb: VarBuilder<'static>) -> Self {
        Scope { vb, registry: None }
    }

    pub(crate) const fn sharded(vb: VarBuilder<'static>, registry: SharedRegistry) -> Self {
        Scope { vb, registry: Some(registry) }
    }

    /// Returns candle's builder at this scope's prefix.
    #[must_use]
    pub fn vb(&self) -> VarBuilder<'static> {
        self.vb.clone()
    }

    /// This scope one name further down.
    #[must_use]
    pub fn pp(&self, name: impl ToString) -> Scope {
        Scope { vb: self.vb.pp(name), registry: self.registry.clone() }
    }

    /// Returns the full name of something at this scope.
    fn full_name(&self, name: &str) -> String {
        let prefix = self.vb.prefix();
        if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") }
    }

    /// Builds a module whose parameters form a unit of their own: gathered, released and reduced together.
    /// Parameters of units inside it belong to those. In torch: a submodule that is wrapped in `FullyShardedDataParallel`.
    ///
    /// # Errors
    /// The errors of `build`.
    pub fn unit<M>(&self, build: impl FnOnce(&Scope) -> candle_core::Result<M>) -> candle_core::Result<Unit<M>> {
        self.build_unit(None, build)
    }

    /// Builds a unit like [`Self::unit`], which has dtypes of its own in place of those of
    /// [`FsdpConfig::mixed_precision`](crate::FsdpConfig::mixed_precision). Its parameters are asked for in its `param` dtype,
    /// or in that of shards.
    ///
    /// # Errors
    /// The errors of `build`.
    pub fn unit_with<M>(
        &self,
        precision: MixedPrecision,
        build: impl FnOnce(&Scope) -> candle_core::Result<M>,
    ) -> candle_core::Result<Unit<M>> {
        self.build_unit(Some(precision), build)
    }

    fn build_unit<M>(
        &self,
        precision: Option<MixedPrecision>,
        build: impl FnOnce(&Scope) -> candle_core::Result<M>,
    ) -> candle_core::Result<Unit<M>> {
        let Some(registry) = &self.registry else {
            return Ok(Unit::plain(build(self)?));
        };
        let slot = Arc::new(UnitSlot::default());
        let dtype = lock(registry).open_unit(self.vb.prefix(), precision, Arc::clone(&slot));
        let built = match dtype {
            Some(dtype) => build(&Scope { vb: self.vb.clone().set_dtype(dtype), registry: self.registry.clone() }),
            None => build(self),
        };
        lock(registry).close_unit();
        Ok(Unit::sharded(built?, slot))
    }

    /// Makes `alias` (a name at this scope) another name of the parameter with full name `fqn`: tied weights.
    /// The model state dict lists both names; the optimizer knows the parameter by `fqn`. Call it before the model asks
    /// for `alias`. `fqn` may be an alias itself. A plain scope ignores ties.
    ///
    /// A name tied to itself is only announced: `contains_tensor` says that it is there, before the model asks for it.
    ///
    /// A tie that cannot be is the error of [`FullyShardedDataParallel::new`](crate::FullyShardedDataParallel::new): one
    /// that comes too late, goes round in a circle, contradicts another, or leads to a parameter that the model never asks
    /// for.
    pub fn tie(&self, alias: &str, fqn: &str) {
        if let Some(registry) = &self.registry {
            lock(registry).tie(self.full_name(alias), fqn);
        }
    }

    /// Registers a buffer: a tensor, whole on every rank, that is not trained. A persistent one is in the model state
    /// dict. The tensor is returned, for the model to keep. torch's `register_buffer`. No communication: all ranks give
    /// the same values.
    ///
    /// Batch norm's running statistics, which candle asks for as `running_mean` and `running_var`, are persistent buffers
    /// without that. Each rank keeps those of its own batches.
    pub fn buffer(&self, name: &str, value: Tensor, persistent: bool) -> Tensor {
        if let Some(registry) = &self.registry {
            lock(registry).buffers.insert(self.full_name(name), (value.clone(), persistent));
        }
        value
    }
}
