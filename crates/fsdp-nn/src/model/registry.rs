//! The declarations of a model: parameters, units, ties and buffers, in the order in which the
//! model requests them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;
use fsdp_flat::storage::{release, zeroed_vec};
use fsdp_flat::with_float;
use indexmap::{IndexMap, IndexSet};
use tracing::warn;

use super::init::InitialValues;
use crate::config::{FsdpConfig, MixedPrecision};
use crate::error::{BuildError, NnError, Result};
use crate::guards::lock;
use crate::unit::{ParameterOp, ParameterSlot, UnitSlot};

/// A parameter that the model has requested.
pub(crate) struct DeclaredParameter {
    /// The tensor that the model computes with, in the requested dtype.
    pub(crate) tensor: Tensor,
    /// The dtype of the shards.
    pub(crate) dtype: DType,
    pub(crate) init: Init,
    pub(crate) slot: Arc<ParameterSlot>,
    pub(crate) unit: usize,
    pub(crate) requires_grad: bool,
    /// `true` if candle records what is computed with it.
    pub(crate) is_in_graph: bool,
}

/// The number of the root unit.
pub(crate) const ROOT: usize = 0;

/// The declarations of a model so far, in order.
pub(crate) struct Registry {
    pub(crate) params: IndexMap<String, DeclaredParameter>,
    /// The units; the first is the root.
    pub(crate) units: Vec<DeclaredUnit>,
    /// The units that are being built, innermost last.
    open_units: Vec<usize>,
    /// Other names of parameters: alias to parameter or to another alias.
    aliases: IndexMap<String, String>,
    /// Names that were announced (tied to themselves) before the model requests them.
    announced_names: IndexSet<String>,
    /// Tensors that are saved but not trained: name to value, and `true` if it is saved.
    pub(crate) buffers: IndexMap<String, (Tensor, bool)>,
    /// The names of those buffers that are parameters selected by `FsdpConfig::ignored_states`.
    pub(crate) ignored_names: IndexSet<String>,
    /// The first invalid tie or buffer. `Scope::tie` and `Scope::buffer` cannot return an error, so
    /// it is reported when the model is complete.
    first_error: Option<BuildError>,
    /// `true` once the model has been sharded.
    is_complete: bool,
    requires_grad: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    ignored_states: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    /// The dtype of shards.
    dtype: DType,
    /// The seed of initial values.
    seed: u64,
    /// The shapes of a checkpoint's parameters, if the model is going to be loaded from one.
    shapes: Option<HashMap<String, Vec<usize>>>,
}

/// A request of the model under a name.
struct Request<'a> {
    shape: Shape,
    init: Init,
    dtype: DType,
    device: &'a Device,
}

/// A unit that the model has declared.
pub(crate) struct DeclaredUnit {
    pub(crate) name: String,
    pub(crate) precision: MixedPrecision,
    /// The slot from which the unit's wrapper takes its handle once the model is complete.
    pub(crate) slot: Arc<UnitSlot>,
}

impl Registry {
    /// Makes a registry with only the root unit.
    pub(crate) fn new(config: &FsdpConfig, shapes: Option<HashMap<String, Vec<usize>>>) -> Self {
        Registry {
            params: IndexMap::new(),
            units: vec![DeclaredUnit {
                name: String::new(),
                precision: config.mixed_precision,
                slot: Arc::default(),
            }],
            open_units: Vec::new(),
            aliases: IndexMap::new(),
            announced_names: IndexSet::new(),
            buffers: IndexMap::new(),
            ignored_names: IndexSet::new(),
            first_error: None,
            is_complete: false,
            requires_grad: Arc::clone(&config.requires_grad),
            ignored_states: Arc::clone(&config.ignored_states),
            dtype: config.dtype,
            seed: config.seed,
            shapes,
        }
    }

    /// Returns the innermost unit that is being built: the root, if there is no other.
    fn open_unit_or_root(&self) -> usize {
        self.open_units.last().copied().unwrap_or(ROOT)
    }

    /// Ends the declarations, and returns the other names of parameters: alias to parameter.
    pub(crate) fn complete(&mut self) -> Result<IndexMap<String, String>> {
        self.is_complete = true;
        if let Some(error) = self.first_error.take() {
            return Err(error.into());
        }
        if let Some(name) = self
            .buffers
            .keys()
            .find(|name| self.params.contains_key(*name) || self.aliases.contains_key(*name))
        {
            return Err(BuildError::Buffer {
                name: name.clone(),
                problem: "under the name of a parameter",
            }
            .into());
        }
        // A name that was tied must not be a parameter of its own too: which of the two it is would
        // depend on the order in which the model requested them.
        let mut resolved_aliases = IndexMap::new();
        for alias in self.aliases.keys() {
            let fqn = self.resolve(alias)?;
            if self.params.contains_key(alias) {
                return Err(BuildError::LateTie {
                    alias: alias.clone(),
                    fqn: fqn.to_owned(),
                }
                .into());
            }
            resolved_aliases.insert(alias.clone(), fqn.to_owned());
        }
        // A tie to a name that the model has never requested is a typing error.
        for fqn in resolved_aliases.values().chain(&self.announced_names) {
            if !self.params.contains_key(fqn) {
                return Err(NnError::unknown_parameter(fqn));
            }
        }
        Ok(resolved_aliases)
    }

    /// Returns the name at the end of a chain of ties: `name` itself if it is not tied.
    ///
    /// # Errors
    /// [`BuildError::TieCircle`].
    fn resolve<'a>(&'a self, name: &'a str) -> Result<&'a str> {
        let mut chain = vec![name];
        let mut current = name;
        while let Some(next) = self.aliases.get(current) {
            if chain.contains(&next.as_str()) {
                return Err(BuildError::TieCircle {
                    names: chain.into_iter().map(str::to_owned).collect(),
                }
                .into());
            }
            chain.push(next);
            current = next;
        }
        Ok(current)
    }

    /// Begins a unit. Until it is closed, it owns the parameters that the model requests for the
    /// first time. If it has a `precision` of its own, this returns the dtype for the builder.
    /// Otherwise it has that of the unit around it.
    pub(crate) fn open_unit(
        &mut self,
        name: String,
        precision: Option<MixedPrecision>,
        slot: Arc<UnitSlot>,
    ) -> Option<DType> {
        // A unit inherits the precision of the one around it, but the conversion of the outputs.
        let outer_precision = self.units[self.open_unit_or_root()].precision;
        self.open_units.push(self.units.len());
        self.units.push(DeclaredUnit {
            name,
            precision: precision.unwrap_or(outer_precision.for_inner_units()),
            slot,
        });
        precision.map(|precision| precision.param.unwrap_or(self.dtype))
    }

    /// Ends the innermost unit that is being built.
    pub(crate) fn close_unit(&mut self) {
        self.open_units.pop();
    }

    /// Records that the parameter `alias` shares the values of `fqn`. The first alias that is tied
    /// to two names is kept as an error.
    pub(crate) fn tie(&mut self, alias: String, fqn: &str) {
        if alias == fqn {
            self.announced_names.insert(alias);
            return;
        }
        // A name that is tied to the same one again is fine.
        match self.aliases.get(&alias) {
            Some(existing) if existing != fqn => {
                let error = BuildError::TiedTwice {
                    alias,
                    first: existing.clone(),
                    second: fqn.to_owned(),
                };
                self.first_error.get_or_insert(error);
            }
            _ => {
                self.aliases.insert(alias, fqn.to_owned());
            }
        }
    }

    /// Registers a buffer of the model's own. The first one whose name another buffer has is kept
    /// as an error.
    pub(crate) fn add_buffer(&mut self, name: String, value: Tensor, persistent: bool) {
        if self.is_complete {
            warn!(
                "buffer `{name}` is registered after the model has been built, so it is in no \
                 state dict"
            );
        } else if self.buffers.contains_key(&name) {
            self.first_error.get_or_insert(BuildError::Buffer {
                name,
                problem: "twice",
            });
        } else {
            self.buffers.insert(name, (value, persistent));
        }
    }

    /// Checks that a parameter of the unit `owner` is gathered whenever the unit that requests it
    /// computes: it must belong to that unit, to the root, or to a unit around it.
    fn check_is_gathered(&self, fqn: &str, owner: usize) -> Result<()> {
        if self.is_complete || owner == ROOT || self.open_units.contains(&owner) {
            return Ok(());
        }
        let [first, second] =
            [owner, self.open_unit_or_root()].map(|unit| self.units[unit].name.clone());
        Err(BuildError::SharedBetweenUnits {
            fqn: fqn.to_owned(),
            first,
            second,
        }
        .into())
    }

    /// Returns the tensor of a parameter, and declares it if the model requests it for the first
    /// time.
    fn request_parameter(&mut self, name: &str, request: Request<'_>) -> Result<Tensor> {
        let name = self.resolve(name)?.to_owned();
        let is_ignored = (self.ignored_states)(&name);
        if is_ignored || is_running_statistic(&name) {
            if is_ignored {
                self.ignored_names.insert(name.clone());
            }
            return self.request_buffer(&name, &request);
        }
        // The model would compute with the buffer, and not train it.
        if self.buffers.contains_key(&name) {
            return Err(BuildError::Buffer {
                name,
                problem: "under the name of a parameter",
            }
            .into());
        }
        let Request {
            shape,
            init,
            dtype,
            device,
        } = request;
        if let Some(existing) = self.params.get(&name) {
            check_same(&name, &existing.tensor, &shape, dtype)?;
            return self.request_again(&name);
        }
        if self.is_complete {
            return Err(BuildError::LateParameter { fqn: name }.into());
        }
        self.check_saved(&name, &shape)?;
        let unit = self.open_unit_or_root();
        let requires_grad = (self.requires_grad)(&name);
        let precision = self.units[unit].precision;
        // The builder asked for the dtype to compute with. The shards keep the one of the config.
        let shard_dtype = if precision.param == Some(dtype) {
            self.dtype
        } else {
            dtype
        };
        let slot = Arc::new(ParameterSlot::default());
        // The tensor has no memory until its unit is gathered. It is the same tensor in every
        // forward, so that the model's modules can keep it.
        let op = ParameterOp {
            shape,
            dtype,
            slot: Arc::clone(&slot),
        };
        let anchor = Var::zeros(1, DType::F32, device)?;
        // Gradients of earlier layers need the values of a gathered unit, and a backward that comes
        // to the unit's parameters, also to frozen ones, shows when it has finished with them. The
        // root stays gathered until the end of the backward, which need not come to it.
        let is_in_graph = requires_grad || unit != ROOT;
        let tensor = if is_in_graph {
            anchor.as_tensor().apply_op1(op)?
        } else {
            anchor.as_tensor().apply_op1_no_bwd(&op)?
        };
        release(&tensor)?;
        slot.set_tensors(&tensor, anchor.as_tensor());
        self.params.insert(
            name,
            DeclaredParameter {
                tensor: tensor.clone(),
                dtype: shard_dtype,
                init,
                slot,
                unit,
                requires_grad,
                is_in_graph,
            },
        );
        Ok(tensor)
    }

    /// Returns `true` if initial values must be computed.
    pub(crate) const fn computes_initial_values(&self) -> bool {
        self.shapes.is_none()
    }

    /// Returns the shape that a parameter has in the checkpoint, by its own name or one that is
    /// tied to it.
    fn saved_shape(&self, fqn: &str) -> Option<&Vec<usize>> {
        let shapes = self.shapes.as_ref()?;
        shapes.get(fqn).or_else(|| {
            let mut aliases = self.aliases.keys();
            aliases.find_map(|alias| {
                let is_alias = self.resolve(alias).is_ok_and(|name| name == fqn);
                shapes.get(alias).filter(|_| is_alias)
            })
        })
    }

    /// Checks that the checkpoint that the model is built from has a parameter of this shape.
    fn check_saved(&self, fqn: &str, shape: &Shape) -> Result<()> {
        if self.shapes.is_none() {
            return Ok(());
        }
        match self.saved_shape(fqn) {
            None => Err(BuildError::NotInCheckpoint {
                fqn: fqn.to_owned(),
            }
            .into()),
            Some(found) if found != shape.dims() => Err(BuildError::OtherShape {
                fqn: fqn.to_owned(),
                asked: shape.dims().to_vec(),
                found: found.clone(),
            }
            .into()),
            Some(_) => Ok(()),
        }
    }

    /// Returns the tensor of an existing parameter, which is requested again.
    fn request_again(&self, fqn: &str) -> Result<Tensor> {
        let Some(existing) = self.params.get(fqn) else {
            return Err(NnError::unknown_parameter(fqn));
        };
        self.check_is_gathered(fqn, existing.unit)?;
        Ok(existing.tensor.clone())
    }

    /// Returns the tensor of a name that is requested without a shape: the existing one, or one of
    /// the checkpoint's shape.
    fn request_without_shape(
        &mut self,
        name: &str,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let fqn = self.resolve(name)?.to_owned();
        if let Some((buffer, _)) = self.buffers.get(&fqn) {
            return Ok(buffer.clone());
        }
        match self.saved_shape(&fqn).cloned() {
            // The checkpoint knows the shape that the model's code does not give.
            Some(shape) if !self.params.contains_key(&fqn) => {
                let request = Request {
                    shape: shape.into(),
                    init: Init::Const(0.0),
                    dtype,
                    device,
                };
                self.request_parameter(name, request)
            }
            _ => self.request_again(&fqn),
        }
    }

    /// Returns a buffer, and registers it as a persistent one if the model requests it for the
    /// first time.
    fn request_buffer(&mut self, name: &str, request: &Request<'_>) -> Result<Tensor> {
        let shape = &request.shape;
        if let Some((existing, _)) = self.buffers.get(name) {
            // Under mixed precision the buffer may have a dtype of its own, so only its shape is
            // compared.
            check_same(name, existing, shape, existing.dtype())?;
            return Ok(existing.clone());
        }
        if self.is_complete {
            return Err(BuildError::LateParameter {
                fqn: name.to_owned(),
            }
            .into());
        }
        self.check_saved(name, shape)?;
        let precision = self.units[self.open_unit_or_root()].precision;
        // An ignored parameter is trained outside of the units, in the dtype that was asked for.
        let dtype = if self.ignored_names.contains(name) {
            request.dtype
        } else if let Some(dtype) = precision.buffer {
            dtype
        } else if precision.param == Some(request.dtype) {
            self.dtype
        } else {
            request.dtype
        };
        let initial_values = InitialValues {
            init: &request.init,
            seed: self.seed,
            fqn: name,
            shape: shape.dims(),
        };
        let initial_tensor = with_float!(dtype, T => {
            let mut values = zeroed_vec::<T>(shape.elem_count())?;
            let range = 0..values.len();
            initial_values.fill(range, &mut values);
            Tensor::from_vec(values, shape, request.device)?
        }, else return Err(candle_core::Error::UnsupportedDTypeForOp(dtype, "buffer").into()));
        // Make it a variable: candle's batch norm updates a variable in place, but would update a
        // copy of another tensor.
        let value = Var::from_tensor(&initial_tensor)?.into_inner();
        self.buffers.insert(name.to_owned(), (value.clone(), true));
        Ok(value)
    }

    /// Converts an error of the model's own code, which may have computed with a parameter. The
    /// last parameter that it has requested is listed first, because it is the most likely one.
    pub(crate) fn explain_error(&self, error: candle_core::Error) -> NnError {
        NnError::from_computation(error, || {
            (self.params.keys().rev().cloned().collect(), Vec::new())
        })
    }
}

/// Checks that an existing tensor has the requested shape and dtype.
fn check_same(fqn: &str, existing: &Tensor, shape: &Shape, dtype: DType) -> Result<()> {
    if existing.shape() == shape && existing.dtype() == dtype {
        return Ok(());
    }
    Err(BuildError::Conflict {
        fqn: fqn.to_owned(),
        asked: format!("{:?} {dtype:?}", shape.dims()),
        existing: format!("{:?} {:?}", existing.dims(), existing.dtype()),
    }
    .into())
}

/// Returns `true` for the names by which candle's batch norm requests its running statistics, which
/// are buffers.
#[must_use]
pub fn is_running_statistic(name: &str) -> bool {
    matches!(
        name.rsplit('.').next(),
        Some("running_mean" | "running_var")
    )
}

pub(crate) type SharedRegistry = Arc<Mutex<Registry>>;

/// The registry as the backend of candle's `VarBuilder`.
pub(crate) struct Backend(pub(crate) SharedRegistry);

impl SimpleBackend for Backend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let request = Request {
            shape,
            init,
            dtype,
            device,
        };
        Ok(lock(&self.0).request_parameter(name, request)?)
    }

    fn get_unchecked(
        &self,
        name: &str,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        Ok(lock(&self.0).request_without_shape(name, dtype, device)?)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let registry = lock(&self.0);
        // Models ask before they request an optional parameter.
        let is_saved = registry
            .resolve(name)
            .is_ok_and(|fqn| registry.saved_shape(fqn).is_some());
        is_saved
            || registry.params.contains_key(name)
            || registry.buffers.contains_key(name)
            || registry.aliases.contains_key(name)
            || registry.announced_names.contains(name)
    }
}
