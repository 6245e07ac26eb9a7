//! What a model is built from: a [`VarBuilder`] whose tensors are parameters of a sharded model, and unit boundaries.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use indexmap::IndexMap;

use crate::NnError;
use crate::hooks::{ParameterOp, ParameterSlot};
use crate::unit::Unit;

/// A parameter that the model has asked for.
pub(crate) struct Declared {
    pub(crate) tensor: Tensor,
    pub(crate) init: Init,
    pub(crate) slot: Arc<ParameterSlot>,
    pub(crate) unit: usize,
    pub(crate) requires_grad: bool,
}

/// What the model has declared so far, in order.
pub(crate) struct Registry {
    pub(crate) params: IndexMap<String, Declared>,
    /// Names of units; the first is the root's.
    pub(crate) units: Vec<String>,
    /// The units that are being built, innermost last.
    open: Vec<usize>,
    /// Other names of parameters: alias to parameter.
    pub(crate) aliases: IndexMap<String, String>,
    /// Tensors that are saved but not trained: name to value and whether it is saved.
    pub(crate) buffers: IndexMap<String, (Tensor, bool)>,
    /// The handles of the units, which the units' wrappers look up once the model is complete.
    pub(crate) slots: Vec<Arc<crate::unit::UnitSlot>>,
}

impl Registry {
    /// Nothing but the root unit.
    pub(crate) fn new() -> Self {
        Registry {
            params: IndexMap::new(),
            units: vec![String::new()],
            open: Vec::new(),
            aliases: IndexMap::new(),
            buffers: IndexMap::new(),
            slots: vec![Arc::default()],
        }
    }
}

pub(crate) type SharedRegistry = Arc<Mutex<Registry>>;

pub(crate) fn lock(registry: &SharedRegistry) -> MutexGuard<'_, Registry> {
    registry.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) struct Backend {
    pub(crate) registry: SharedRegistry,
    pub(crate) requires_grad: Arc<dyn Fn(&str) -> bool + Send + Sync>,
}

impl SimpleBackend for Backend {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let mut registry = lock(&self.registry);
        let name = registry.aliases.get(name).cloned().unwrap_or_else(|| name.to_owned());
        if let Some(existing) = registry.params.get(&name) {
            if existing.tensor.shape() != &shape || existing.tensor.dtype() != dtype {
                return Err(NnError::Conflict {
                    fqn: name,
                    asked: format!("{:?} {dtype:?}", shape.dims()),
                    existing: format!("{:?} {:?}", existing.tensor.dims(), existing.tensor.dtype()),
                }
                .into_candle());
            }
            return Ok(existing.tensor.clone());
        }
        let requires_grad = (self.requires_grad)(&name);
        let slot = Arc::new(ParameterSlot::default());
        let op = ParameterOp { shape, dtype, slot: Arc::clone(&slot) };
        let anchor = Var::zeros(1, DType::F32, device)?;
        let tensor = match requires_grad {
            true => anchor.as_tensor().apply_op1(op)?,
            false => anchor.as_tensor().apply_op1_no_bwd(&op)?,
        };
        fsdp_flat::storage::release(&tensor).map_err(|error| NnError::from(error).into_candle())?;
        let unit = registry.open.last().copied().unwrap_or(0);
        registry.params.insert(name, Declared { tensor: tensor.clone(), init, slot, unit, requires_grad });
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        let registry = lock(&self.registry);
        let name = registry.aliases.get(name).map_or(name, String::as_str);
        match registry.params.get(name) {
            Some(declared) => Ok(declared.tensor.clone()),
            None => Err(NnError::UnknownParameter { fqn: name.to_owned() }.into_candle()),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let registry = lock(&self.registry);
        registry.params.contains_key(name) || registry.aliases.contains_key(name)
    }
}

/// Builds a model: candle's [`VarBuilder`] plus the boundaries of FSDP units.
///
/// The same model code serves plain candle: [`Scope::plain`] has no units and passes everything through.
#[derive(Clone)]
pub struct Scope {
    vb: VarBuilder<'static>,
    registry: Option<SharedRegistry>,
}

impl Scope {
    /// A scope without sharding: `vb`'s tensors are used as they are.
    #[must_use]
    pub const fn plain(vb: VarBuilder<'static>) -> Self {
        Scope { vb, registry: None }
    }

    pub(crate) const fn sharded(vb: VarBuilder<'static>, registry: SharedRegistry) -> Self {
        Scope { vb, registry: Some(registry) }
    }

    /// candle's builder at this scope's prefix.
    #[must_use]
    pub fn vb(&self) -> VarBuilder<'static> {
        self.vb.clone()
    }

    /// This scope one name further down.
    #[must_use]
    pub fn pp(&self, name: impl ToString) -> Scope {
        Scope { vb: self.vb.pp(name), registry: self.registry.clone() }
    }

    /// The full name of something at this scope.
    fn full_name(&self, name: &str) -> String {
        let prefix = self.vb.prefix();
        if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") }
    }

    /// Builds a module whose parameters form a unit of their own: gathered, freed and reduced together.
    /// Parameters of units inside it belong to those. In torch: a submodule that is wrapped in `FullyShardedDataParallel`.
    ///
    /// # Errors
    /// Those of `build`.
    pub fn unit<M>(&self, build: impl FnOnce(&Scope) -> candle_core::Result<M>) -> candle_core::Result<Unit<M>> {
        let Some(registry) = &self.registry else {
            return Ok(Unit::plain(build(self)?));
        };
        let slot = {
            let mut registry = lock(registry);
            let index = registry.units.len();
            let slot = Arc::new(crate::unit::UnitSlot::default());
            registry.units.push(self.vb.prefix());
            registry.slots.push(Arc::clone(&slot));
            registry.open.push(index);
            slot
        };
        let built = build(self);
        lock(registry).open.pop();
        Ok(Unit::sharded(built?, slot))
    }

    /// Says that `alias` (a name at this scope) is another name of the parameter with full name `fqn`: tied weights.
    /// The model state dict lists both names; the optimizer knows the parameter by `fqn`. Call it before the model asks
    /// for `alias`, which would else become a parameter of its own. A plain scope ignores it.
    ///
    /// An `fqn` that the model never asks for is the error of
    /// [`FullyShardedDataParallel::new`](crate::FullyShardedDataParallel::new).
    pub fn tie(&self, alias: &str, fqn: &str) {
        if let Some(registry) = &self.registry {
            lock(registry).aliases.insert(self.full_name(alias), fqn.to_owned());
        }
    }

    /// Registers a buffer: a tensor, whole on every rank, that is not trained. A persistent one is in the model state
    /// dict. The tensor is returned, for the model to keep. torch's `register_buffer`. No communication: all ranks give
    /// the same values.
    pub fn buffer(&self, name: &str, value: Tensor, persistent: bool) -> Tensor {
        if let Some(registry) = &self.registry {
            lock(registry).buffers.insert(self.full_name(name), (value.clone(), persistent));
        }
        value
    }
}
