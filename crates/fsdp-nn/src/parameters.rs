//! The parameters of a sharded model as one rank sees them: names, units, live values.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use candle_core::{DType, Tensor};
use fsdp_comm::ProcessGroup;
use fsdp_flat::sharded::copy_overlap;
use fsdp_flat::storage::{HostSlice, HostSliceMut};
use fsdp_flat::{FlatParameter, ShardedTensor, with_float};
use fsdp_layout::flat::aligned_numel;
use fsdp_layout::{FlatLayout, TensorBox};
use indexmap::IndexMap;

use crate::config::FsdpConfig;
use crate::fsdp_state::CurrentSettings;
use crate::handle::{FlatParamHandle, Groups, Parameter, Shared, UnitSpec};
use crate::scope::{Declared, SharedRegistry, lock};
use crate::{NnError, Result, ShardingStrategy};

/// Where a parameter lies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Location {
    pub(crate) handle: usize,
    pub(crate) param: usize,
}

/// The parameters and buffers of a model that is sharded over a process group, on this rank.
///
/// Everything here is local except where it says that it communicates.
#[derive(Debug)]
pub struct ShardedParameters {
    group: ProcessGroup,
    groups: Groups,
    strategy: ShardingStrategy,
    use_orig_params: bool,
    pub(crate) handles: Vec<Arc<FlatParamHandle>>,
    locations: IndexMap<String, Location>,
    aliases: IndexMap<String, String>,
    buffers: IndexMap<String, (Tensor, bool)>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) settings: CurrentSettings,
    /// Whether a mesh was given.
    pub(crate) on_mesh: bool,
}

impl ShardedParameters {
    /// Lays out what a model has declared and makes this rank's initial values.
    pub(crate) fn new(group: ProcessGroup, config: &FsdpConfig, registry: &SharedRegistry) -> Result<Self> {
        let mut registry = lock(registry);
        let groups = spread(&group, config)?;
        // As in torch, a single rank has nothing to shard.
        let strategy = if groups.shard.is_some() { config.strategy } else { ShardingStrategy::NoShard };
        let shards = groups.shards();
        let shared = Arc::new(Shared::new());
        let mut handles = Vec::new();
        let mut places = IndexMap::new();
        for (unit, name) in registry.units.iter().enumerate() {
            let declared: Vec<(&String, &Declared)> = registry.params.iter().filter(|(_, p)| p.unit == unit).collect();
            let Some((_, first)) = declared.first() else { continue };
            let dtype = first.tensor.dtype();
            check_unit(&declared, dtype, config.use_orig_params)?;
            let align = if config.use_orig_params { aligned_numel(file_dtype(dtype)?) } else { 0 };
            let shapes = declared.iter().map(|(fqn, p)| ((*fqn).clone(), p.tensor.dims().to_vec())).collect();
            let layout = FlatLayout::new(shapes, align, shards)?;
            let params = declared
                .iter()
                .map(|(fqn, p)| Parameter {
                    fqn: (*fqn).clone(),
                    tensor: p.tensor.clone(),
                    requires_grad: p.requires_grad,
                })
                .collect();
            let initialize = |flat: &FlatParameter| initialize(flat, &declared, config.seed);
            let spec = UnitSpec { name: name.clone(), is_root: unit == 0, params, layout, dtype };
            let handle = FlatParamHandle::new(spec, strategy, groups.clone(), Arc::clone(&shared), &initialize)?;
            let handle = Arc::new(handle);
            for (param, (fqn, declared)) in declared.iter().enumerate() {
                declared.slot.set(&handle, param);
                places.insert((*fqn).clone(), Location { handle: handles.len(), param });
            }
            registry.slots[unit].set(&handle);
            handles.push(handle);
        }
        // Names in the order in which the model declared them, whatever unit they are in.
        let locations = registry.params.keys().map(|fqn| (fqn.clone(), places[fqn])).collect();
        for target in registry.aliases.values() {
            if !registry.params.contains_key(target) {
                return Err(NnError::UnknownParameter { fqn: target.clone() });
            }
        }
        Ok(ShardedParameters {
            group,
            groups,
            strategy,
            use_orig_params: config.use_orig_params,
            handles,
            locations,
            aliases: std::mem::take(&mut registry.aliases),
            buffers: std::mem::take(&mut registry.buffers),
            shared,
            settings: CurrentSettings::default(),
            on_mesh: config.mesh.is_some(),
        })
    }

    /// All ranks that train the model.
    #[must_use]
    pub const fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// The ranks that together hold one copy of the parameters, each a shard; `None` if every rank holds all of them.
    #[must_use]
    pub const fn shard_group(&self) -> Option<&ProcessGroup> {
        self.groups.shard.as_ref()
    }

    /// The ranks that hold the same values as this one; `None` if there are no others.
    #[must_use]
    pub const fn replicate_group(&self) -> Option<&ProcessGroup> {
        self.groups.replicate.as_ref()
    }

    /// The strategy in use; `NoShard` on a single rank, whatever was asked for.
    #[must_use]
    pub const fn strategy(&self) -> ShardingStrategy {
        self.strategy
    }

    /// Whether the optimizer sees the model's own parameters rather than FlatParameters.
    #[must_use]
    pub const fn use_orig_params(&self) -> bool {
        self.use_orig_params
    }

    /// Names of all parameters, in the order in which the model declared them; tied ones once, by their first name.
    pub fn fqns(&self) -> impl Iterator<Item = &str> {
        self.locations.keys().map(String::as_str)
    }

    /// Other names of tied parameters: alias to name.
    #[must_use]
    pub const fn aliases(&self) -> &IndexMap<String, String> {
        &self.aliases
    }

    /// Buffers by name, and whether each is saved. They are whole on every rank.
    #[must_use]
    pub const fn buffers(&self) -> &IndexMap<String, (Tensor, bool)> {
        &self.buffers
    }

    /// The parameter's name for a name or an alias.
    #[must_use]
    pub fn canonical_fqn<'a>(&'a self, fqn: &'a str) -> &'a str {
        self.aliases.get(fqn).map_or(fqn, String::as_str)
    }

    pub(crate) fn location(&self, fqn: &str) -> Result<Location> {
        let fqn = self.canonical_fqn(fqn);
        self.locations.get(fqn).copied().ok_or_else(|| NnError::UnknownParameter { fqn: fqn.to_owned() })
    }

    /// Whether there is a parameter of this name or alias.
    #[must_use]
    pub fn contains(&self, fqn: &str) -> bool {
        self.location(fqn).is_ok()
    }

    /// The parameter's global shape.
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`].
    pub fn shape(&self, fqn: &str) -> Result<&[usize]> {
        let Location { handle, param } = self.location(fqn)?;
        Ok(&self.handles[handle].layout().shapes()[param])
    }

    /// The parameter's dtype.
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`].
    pub fn dtype(&self, fqn: &str) -> Result<DType> {
        Ok(self.handles[self.location(fqn)?.handle].dtype())
    }

    /// Whether the parameter is trained.
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`].
    pub fn requires_grad(&self, fqn: &str) -> Result<bool> {
        let Location { handle, param } = self.location(fqn)?;
        Ok(self.handles[handle].params[param].requires_grad)
    }

    /// The boxes of the parameter that this rank owns.
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`].
    pub fn boxes(&self, fqn: &str) -> Result<Vec<TensorBox>> {
        let Location { handle, param } = self.location(fqn)?;
        let handle = &self.handles[handle];
        Ok(handle.layout().param_boxes(param, handle.shard_rank()))
    }

    /// The parameter's live values on this rank, as views: the next optimizer step changes them. No communication.
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`].
    pub fn parameter(&self, fqn: &str) -> Result<ShardedTensor> {
        let Location { handle, param } = self.location(fqn)?;
        self.handles[handle].sharded_param(param)
    }

    /// The parameter's reduced gradient on this rank, in its boxes, as views; `None` before a backward that communicates,
    /// or after `zero_grad`. No communication.
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`].
    pub fn gradient(&self, fqn: &str) -> Result<Option<ShardedTensor>> {
        let Location { handle, param } = self.location(fqn)?;
        let handle = &self.handles[handle];
        if handle.grad().is_none() {
            return Ok(None);
        }
        let shape = &handle.layout().shapes()[param];
        match handle.grad_piece(param)? {
            Some(piece) => {
                let boxes = handle.layout().param_boxes(param, handle.shard_rank());
                Ok(Some(ShardedTensor::from_flat(shape, boxes, &piece)?))
            }
            None => Ok(Some(ShardedTensor::new(handle.dtype(), shape.clone(), Vec::new())?)),
        }
    }

    /// Writes values into the parameter's live memory on this rank. `values` must cover this rank's boxes; what it
    /// has beyond them is ignored. Nothing is written unless all of it can be. No communication.
    ///
    /// # Errors
    /// An unknown name, another shape or dtype, or boxes that are not covered.
    pub fn set_parameter(&self, fqn: &str, values: &ShardedTensor) -> Result<()> {
        let Location { handle, param } = self.location(fqn)?;
        let handle = &self.handles[handle];
        let target = handle.sharded_param(param)?;
        if values.shape() != target.shape() {
            return Err(NnError::Flat(fsdp_flat::FlatError::ShapeMismatch {
                name: fqn.to_owned(),
                expected: target.shape().to_vec(),
                found: values.shape().to_vec(),
            }));
        }
        write_boxes(values, &target)?;
        handle.reshard()
    }

    /// Bytes of parameters that live on this rank now: shards, and whole units that are gathered.
    #[must_use]
    pub fn parameter_bytes(&self) -> usize {
        self.shared.parameter_bytes()
    }

    /// The most bytes of parameters that ever lived on this rank.
    #[must_use]
    pub fn peak_parameter_bytes(&self) -> usize {
        self.shared.peak_parameter_bytes()
    }

    /// Frees all gathered parameters of sharded units: torch's `reshard`. No communication.
    ///
    /// # Errors
    /// candle's.
    pub fn reshard(&self) -> Result<()> {
        self.handles.iter().try_for_each(|handle| handle.reshard())
    }

    /// Forgets all gradients, so that the next backward starts from none: torch's `zero_grad(set_to_none=True)`.
    pub fn zero_grad(&self) {
        self.handles.iter().for_each(|handle| handle.zero_grad());
    }

    /// The 2-norm of all gradients together, the same on every rank; 0 without gradients. Collectives: one all-reduce of
    /// one number over the shard group, none where nothing is sharded.
    ///
    /// # Errors
    /// The all-reduce's.
    pub fn grad_norm(&self) -> Result<f64> {
        let mut squares = 0f64;
        for grad in self.handles.iter().filter_map(|handle| handle.grad()) {
            if !grad.device().is_cpu() {
                squares += crate::device::sum_of_squares(&grad)?;
                continue;
            }
            squares += with_float!(grad.dtype(), T => {
                HostSlice::<T>::read(&grad)?.iter().map(|x| candle_core::WithDType::to_f64(*x).powi(2)).sum::<f64>()
            }, else 0.0);
        }
        if let Some(group) = &self.groups.shard {
            let mut total = [squares];
            group.all_reduce(&mut total, fsdp_comm::ReduceOp::Sum)?;
            squares = total[0];
        }
        Ok(squares.sqrt())
    }

    /// Scales all gradients so that their 2-norm over the sharded whole is at most `max_norm`, and returns the norm
    /// before: torch's `clip_grad_norm_`. The same on every rank. Collectives: as [`Self::grad_norm`].
    ///
    /// # Errors
    /// As [`Self::grad_norm`].
    pub fn clip_grad_norm(&self, max_norm: f64) -> Result<f64> {
        let norm = self.grad_norm()?;
        let scale = max_norm / (norm + 1e-6);
        if scale < 1.0 {
            for grad in self.handles.iter().filter_map(|handle| handle.grad()) {
                if !grad.device().is_cpu() {
                    crate::device::scale(&grad, scale)?;
                    continue;
                }
                with_float!(grad.dtype(), T => {
                    let scale = <T as candle_core::WithDType>::from_f64(scale);
                    HostSliceMut::<T>::write(&grad)?.iter_mut().for_each(|x| *x *= scale);
                }, else ());
            }
        }
        Ok(norm)
    }

    pub(crate) fn set_sync(&self, sync: bool) -> bool {
        self.shared.sync.swap(sync, Ordering::Relaxed)
    }
}

/// Copies `values` into the memory of `target`'s boxes, all of which it must cover. Views of that very memory are left.
pub(crate) fn write_boxes(values: &ShardedTensor, target: &ShardedTensor) -> Result<()> {
    if values.is_same_view(target) {
        return Ok(());
    }
    if let Some(shard) = target.shards().iter().find(|shard| !values.covers(&shard.bounds)) {
        return Err(NnError::Flat(fsdp_flat::FlatError::NotCovered { wanted: shard.bounds.clone() }));
    }
    if target.local_numel() > 0 && values.dtype() != target.dtype() {
        return Err(NnError::Candle(candle_core::Error::DTypeMismatchBinaryOp {
            lhs: target.dtype(),
            rhs: values.dtype(),
            op: "load a parameter",
        }));
    }
    for shard in target.shards() {
        for from in values.shards() {
            copy_overlap(&from.tensor, &from.bounds, &shard.tensor, &shard.bounds)?;
        }
    }
    Ok(())
}

/// Which ranks share shards and which are replicas. Collectives: for `HybridShard` the making of two sub-groups.
fn spread(group: &ProcessGroup, config: &FsdpConfig) -> Result<Groups> {
    let others = |group: ProcessGroup| Some(group).filter(|group| group.world_size() > 1);
    match (config.strategy, &config.mesh) {
        (ShardingStrategy::NoShard, _) => Ok(Groups { shard: None, replicate: others(group.clone()) }),
        (ShardingStrategy::HybridShard, Some(mesh)) if mesh.shape().len() == 2 && mesh.size() == group.world_size() => {
            let replicate = others(group.mesh_group(mesh, 0)?);
            Ok(Groups { shard: others(group.mesh_group(mesh, 1)?), replicate })
        }
        (ShardingStrategy::HybridShard, mesh) => Err(NnError::Mesh {
            shape: mesh.as_ref().map_or_else(Vec::new, |mesh| mesh.shape().to_vec()),
            world_size: group.world_size(),
        }),
        _ => Ok(Groups { shard: others(group.clone()), replicate: None }),
    }
}

fn file_dtype(dtype: DType) -> Result<fsdp_layout::DType> {
    fsdp_flat::dtype::from_candle(dtype)
        .ok_or(NnError::Candle(candle_core::Error::UnsupportedDTypeForOp(dtype, "FlatParameter")))
}

fn check_unit(declared: &[(&String, &Declared)], dtype: DType, use_orig_params: bool) -> Result<()> {
    let requires_grad = declared.first().is_none_or(|(_, first)| first.requires_grad);
    for (fqn, param) in declared {
        let found = file_dtype(param.tensor.dtype())?;
        if !found.is_float() {
            return Err(fsdp_flat::FlatError::IntegerDType { fqn: (*fqn).clone(), dtype: found }.into());
        }
        if param.tensor.dtype() != dtype {
            let expected = file_dtype(dtype)?;
            return Err(fsdp_flat::FlatError::MixedDType { fqn: (*fqn).clone(), expected, found }.into());
        }
        if !use_orig_params && param.requires_grad != requires_grad {
            return Err(fsdp_flat::FlatError::MixedRequiresGrad { fqn: (*fqn).clone() }.into());
        }
    }
    Ok(())
}

/// Writes this rank's part of each parameter's initial values.
fn initialize(flat: &FlatParameter, declared: &[(&String, &Declared)], seed: u64) -> Result<()> {
    let infos = flat.layout().shard_param_infos(flat.rank());
    with_float!(flat.shard().dtype(), T => {
        let mut data = HostSliceMut::<T>::write(flat.shard())?;
        for (info, (fqn, param)) in infos.iter().zip(declared) {
            if let Some(info) = info {
                let target = &mut data[info.shard_range()];
                crate::init::fill(&param.init, seed, fqn, param.tensor.dims(), info.param_range(), target);
            }
        }
    }, else ());
    Ok(())
}
