//! The builder of a sharded model: a [`VarBuilder`] whose tensors are parameters of the model, and the boundaries of units.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use fsdp_flat::storage::release;
use indexmap::{IndexMap, IndexSet};

use crate::handle::takes_part_in_backward;
use crate::hooks::{ParameterOp, ParameterSlot};
use crate::unit::{Unit, UnitSlot};
use crate::{NnError, Result};

/// A parameter that the model has asked for.
pub(crate) struct Declared {
    pub(crate) tensor: Tensor,
    pub(crate) init: Init,
    pub(crate) slot: Arc<ParameterSlot>,
    pub(crate) unit: usize,
    pub(crate) requires_grad: bool,
}

/// The declarations of a model so far, in order.
pub(crate) struct Registry {
    pub(crate) params: IndexMap<String, Declared>,
    /// The units; the first is the root.
    pub(crate) units: Vec<DeclaredUnit>,
    /// The units that are being built, innermost last.
    open: Vec<usize>,
    /// Other names of parameters: alias to parameter or to another alias.
    aliases: IndexMap<String, String>,
    /// Names that the model is going to ask for.
    announced: IndexSet<String>,
    /// Tensors that are saved but not trained: name to value, and `true` if it is saved.
    pub(crate) buffers: IndexMap<String, (Tensor, bool)>,
    /// The first tie that cannot be, which no method could report when it was made.
    wrong_tie: Option<NnError>,
    /// `true` once the model has been sharded.
    is_complete: bool,
    /// `true` if parameters are going to be sharded.
    is_sharded: bool,
    requires_grad: Arc<dyn Fn(&str) -> bool + Send + Sync>,
}

/// A unit that the model has declared.
pub(crate) struct DeclaredUnit {
    pub(crate) name: String,
    /// The place where the unit's wrapper looks for its handle once the model is complete.
    pub(crate) slot: Arc<UnitSlot>,
}

impl Registry {
    /// Makes a registry of nothing but the root unit.
    pub(crate) fn new(is_sharded: bool, requires_grad: Arc<dyn Fn(&str) -> bool + Send + Sync>) -> Self {
        Registry {
            params: IndexMap::new(),
            units: vec![DeclaredUnit { name: String::new(), slot: Arc::default() }],
            open: Vec::new(),
            aliases: IndexMap::new(),
            announced: IndexSet::new(),
            buffers: IndexMap::new(),
            wrong_tie: None,
            is_complete: false,
            is_sharded,
            requires_grad,
        }
    }

    /// Ends the declarations, and returns the other names of parameters: alias to parameter.
    pub(crate) fn complete(&mut self) -> Result<IndexMap<String, String>> {
        self.is_complete = true;
        if let Some(error) = self.wrong_tie.take() {
            return Err(error);
        }
        let mut resolved = IndexMap::new();
        for alias in self.aliases.keys() {
            let fqn = self.resolve(alias)?;
            if self.params.contains_key(alias) {
                return Err(NnError::LateTie { alias: alias.clone(), fqn: fqn.to_owned() });
            }
            resolved.insert(alias.clone(), fqn.to_owned());
        }
        for fqn in resolved.values().chain(&self.announced) {
            if !self.params.contains_key(fqn) {
                return Err(NnError::UnknownParameter { fqn: fqn.clone() });
            }
        }
        Ok(resolved)
    }

    /// Returns the name at the end of a chain of ties.
    fn resolve<'a>(&'a self, name: &'a str) -> Result<&'a str> {
        let mut chain = vec![name];
        let mut current = name;
        while let Some(next) = self.aliases.get(current) {
            if chain.contains(&next.as_str()) {
                return Err(NnError::TieCircle { names: chain.into_iter().map(str::to_owned).collect() });
            }
            chain.push(next);
            current = next;
        }
        Ok(current)
    }

    /// Notes a tie.
    fn tie(&mut self, alias: String, fqn: &str) {
        if alias == fqn {
            self.announced.insert(alias);
            return;
        }
        match self.aliases.get(&alias) {
            Some(first) if first != fqn => {
                let error = NnError::TiedTwice { alias, first: first.clone(), second: fqn.to_owned() };
                self.wrong_tie.get_or_insert(error);
            }
            _ => {
                self.aliases.insert(alias, fqn.to_owned());
            }
        }
    }

    /// Checks that a parameter is whole wherever the unit that is being built computes: it is the unit's own, the root's,
    /// or that of a unit around it.
    fn check_reach(&self, fqn: &str, owner: usize) -> Result<()> {
        let here = self.open.last().copied().unwrap_or(0);
        if self.is_complete || owner == 0 || self.open.contains(&owner) {
            return Ok(());
        }
        let [first, second] = [owner, here].map(|unit| self.units[unit].name.clone());
        Err(NnError::SharedBetweenUnits { fqn: fqn.to_owned(), first, second })
    }

    /// Returns the tensor of a parameter, which is declared if the model asks for it for the first time.
    fn parameter(&mut self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let name = self.resolve(name)?.to_owned();
        if let Some(existing) = self.params.get(&name) {
            if existing.tensor.shape() != &shape || existing.tensor.dtype() != dtype {
                return Err(NnError::Conflict {
                    fqn: name,
                    asked: format!("{:?} {dtype:?}", shape.dims()),
                    existing: format!("{:?} {:?}", existing.tensor.dims(), existing.tensor.dtype()),
                });
            }
            self.check_reach(&name, existing.unit)?;
            return Ok(existing.tensor.clone());
        }
        if self.is_complete {
            return Err(NnError::LateParameter { fqn: name });
        }
        let unit = self.open.last().copied().unwrap_or(0);
        let requires_grad = (self.requires_grad)(&name);
        let slot = Arc::new(ParameterSlot::default());
        let op = ParameterOp { shape, dtype, slot: Arc::clone(&slot) };
        let anchor = Var::zeros(1, DType::F32, device)?;
        let tensor = if takes_part_in_backward(requires_grad, unit == 0, self.is_sharded) {
            anchor.as_tensor().apply_op1(op)?
        } else {
            anchor.as_tensor().apply_op1_no_bwd(&op)?
        };
        release(&tensor)?;
        self.params.insert(name, Declared { tensor: tensor.clone(), init, slot, unit, requires_grad });
        Ok(tensor)
    }

    /// Returns the names of the units.
    pub(crate) fn unit_names(&self) -> Vec<String> {
        self.units.iter().map(|unit| unit.name.clone()).collect()
    }
}

pub(crate) type SharedRegistry = Arc<Mutex<Registry>>;

pub(crate) fn lock(registry: &SharedRegistry) -> MutexGuard<'_, Registry> {
    registry.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The registry as candle's builder asks it.
pub(crate) struct Backend(pub(crate) SharedRegistry);

impl SimpleBackend for Backend {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        lock(&self.0).parameter(shape, name, init, dtype, device).map_err(NnError::into_candle)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        let registry = lock(&self.0);
        let name = registry.resolve(name).map_err(NnError::into_candle)?;
        let Some(declared) = registry.params.get(name) else {
            return Err(NnError::UnknownParameter { fqn: name.to_owned() }.into_candle());
        };
        registry.check_reach(name, declared.unit).map_err(NnError::into_candle)?;
        Ok(declared.tensor.clone())
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let registry = lock(&self.0);
        registry.params.contains_key(name) || registry.aliases.contains_key(name) || registry.announced.contains(name)
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
    /// Those of `build`.
    pub fn unit<M>(&self, build: impl FnOnce(&Scope) -> candle_core::Result<M>) -> candle_core::Result<Unit<M>> {
        let Some(registry) = &self.registry else {
            return Ok(Unit::plain(build(self)?));
        };
        let slot = Arc::new(UnitSlot::default());
        {
            let mut registry = lock(registry);
            let index = registry.units.len();
            registry.units.push(DeclaredUnit { name: self.vb.prefix(), slot: Arc::clone(&slot) });
            registry.open.push(index);
        }
        let built = build(self);
        lock(registry).open.pop();
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
    pub fn buffer(&self, name: &str, value: Tensor, persistent: bool) -> Tensor {
        if let Some(registry) = &self.registry {
            lock(registry).buffers.insert(self.full_name(name), (value.clone(), persistent));
        }
        value
    }
}
