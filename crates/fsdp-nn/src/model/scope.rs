//! The builder of a sharded model: a [`VarBuilder`] whose tensors are parameters of the model, and
//! the boundaries of units.

use std::sync::Arc;

use candle_core::Tensor;
use candle_nn::VarBuilder;

use super::registry::SharedRegistry;
use crate::config::MixedPrecision;
use crate::guards::lock;
use crate::unit::{Unit, UnitSlot};

/// Builds a model: candle's [`VarBuilder`] plus the boundaries of FSDP units.
///
/// The same model code serves plain candle: [`Scope::plain`] has no units and passes everything
/// through.
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
        Scope {
            vb,
            registry: Some(registry),
        }
    }

    /// Returns a candle `VarBuilder` with this scope's prefix.
    #[must_use]
    pub fn vb(&self) -> VarBuilder<'static> {
        self.vb.clone()
    }

    /// Returns a scope whose prefix has one more name.
    #[must_use]
    pub fn pp(&self, name: impl ToString) -> Scope {
        Scope {
            vb: self.vb.pp(name),
            registry: self.registry.clone(),
        }
    }

    /// Returns the full name of `name` in this scope.
    fn full_name(&self, name: &str) -> String {
        let prefix = self.vb.prefix();
        if prefix.is_empty() {
            name.to_owned()
        } else {
            format!("{prefix}.{name}")
        }
    }

    /// Builds a module whose parameters form one unit: they are gathered, released and reduced
    /// together. Parameters of units inside the module belong to the inner units. In torch, this is
    /// a submodule wrapped in `FullyShardedDataParallel`.
    ///
    /// # Errors
    /// The errors of `build`.
    pub fn unit<M>(
        &self,
        build: impl FnOnce(&Scope) -> candle_core::Result<M>,
    ) -> candle_core::Result<Unit<M>> {
        self.build_unit(None, build)
    }

    /// Builds a unit like [`Self::unit`], but with its own dtypes instead of those in
    /// [`FsdpConfig::mixed_precision`](crate::FsdpConfig::mixed_precision). The builder inside has
    /// the dtype `param`, or that of shards if it is not given.
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

    /// Builds a part of the model whose parameters form a unit. A plain scope makes no units.
    fn build_unit<M>(
        &self,
        precision: Option<MixedPrecision>,
        build: impl FnOnce(&Scope) -> candle_core::Result<M>,
    ) -> candle_core::Result<Unit<M>> {
        // A model that is not sharded has no units.
        let Some(registry) = &self.registry else {
            return Ok(Unit::new(build(self)?, None));
        };
        let slot = Arc::new(UnitSlot::default());
        let dtype = lock(registry).open_unit(self.vb.prefix(), precision, Arc::clone(&slot));
        let mut scope = self.clone();
        if let Some(dtype) = dtype {
            scope.vb = scope.vb.set_dtype(dtype);
        }
        let module = build(&scope);
        // Close it on an error too: the caller may go on with other units.
        lock(registry).close_unit();
        Ok(Unit::new(module?, Some(slot)))
    }

    /// Ties weights: makes `alias` (a name in this scope) another name of the parameter with the
    /// full name `fqn`. The model state dict lists both names; optimizers know the parameter by
    /// `fqn`. Call this before the model requests `alias`. `fqn` may itself be an alias. A plain
    /// scope ignores ties.
    ///
    /// A tie of a name to itself only makes `contains_tensor` return `true` for it before the model
    /// has requested it.
    ///
    /// An invalid tie makes [`FullyShardedDataParallel::new`](crate::FullyShardedDataParallel::new)
    /// fail: one that comes too late, is part of a circle, contradicts another, or leads to a
    /// parameter that the model never requests.
    pub fn tie(&self, alias: &str, fqn: &str) {
        if let Some(registry) = &self.registry {
            lock(registry).tie(self.full_name(alias), fqn);
        }
    }

    /// Registers a buffer, a tensor that is whole on every rank and not trained, and returns it:
    /// torch's `register_buffer`. A persistent buffer is part of the model state dict. All ranks
    /// must pass the same values. If those of a persistent buffer in the host's memory differ,
    /// [`FullyShardedDataParallel::new`](crate::FullyShardedDataParallel::new) fails; others are
    /// not compared, because tables that machines compute may differ in a bit. No communication.
    ///
    /// Batch norm's running statistics, which candle requests as `running_mean` and `running_var`,
    /// are persistent buffers automatically. Each rank keeps the statistics of its own batches.
    ///
    /// A name that another buffer or a parameter has makes
    /// [`FullyShardedDataParallel::new`](crate::FullyShardedDataParallel::new) fail. A buffer that
    /// comes after the model has been built is returned as it is, with a warning, and is in no
    /// state dict.
    pub fn buffer(&self, name: &str, value: Tensor, persistent: bool) -> Tensor {
        if let Some(registry) = &self.registry {
            lock(registry).add_buffer(self.full_name(name), value.clone(), persistent);
        }
        value
    }
}
