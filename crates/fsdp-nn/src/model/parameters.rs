//! [`ShardedParameters`]: the parameters of a sharded model on one rank, with their names, units
//! and live values.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{DType, Tensor, TensorId, Var};
use fsdp_comm::ProcessGroup;
use fsdp_flat::ShardedTensor;
use fsdp_flat::sharded::copy_overlap;
use fsdp_layout::TensorBox;
use fsdp_ops::autograd;
use indexmap::IndexMap;

use super::build::{BuiltUnits, NEW_OPERATION, agree_on_model, build_units, describe_model};
use super::registry::SharedRegistry;
use super::state_dict_type::StateDictSettings;
use crate::config::{FsdpConfig, ShardingStrategy};
use crate::error::{NnError, Result};
use crate::exchange::{Groups, Overlap, Shared, Unchanged};
use crate::guards::lock;
use crate::unit::{FlatParamHandle, Parameter};

/// The parameters and buffers of a model that is sharded over a process group, on this rank.
///
/// Methods do not communicate unless their documentation says so.
#[derive(Debug)]
pub struct ShardedParameters {
    group: ProcessGroup,
    groups: Groups,
    strategy: ShardingStrategy,
    use_orig_params: bool,
    pub(crate) handles: Vec<Arc<FlatParamHandle>>,
    /// The unit of each parameter, and the parameter's number there.
    places: IndexMap<String, (Arc<FlatParamHandle>, usize)>,
    aliases: IndexMap<String, String>,
    buffers: IndexMap<String, (Tensor, bool)>,
    ignored: Vec<(String, Var)>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) overlap: Option<Arc<Overlap>>,
    pub(crate) settings: Mutex<StateDictSettings>,
    /// `true` while the parameters have the values of an average, which has theirs.
    pub(crate) has_average: AtomicBool,
    /// `true` once parameters without a gradient have been looked for.
    pub(super) has_looked_for_unreached: AtomicBool,
    /// `true` if a mesh was given.
    pub(crate) has_mesh: bool,
    /// The part of the layout that each rank of the group has.
    shard_ranks: Vec<usize>,
}

impl ShardedParameters {
    /// Shards the model that `build` has declared, and returns it. Collectives: two agreements; for
    /// `HybridShard` the creation of two subgroups; with prefetching, the creation of one more for
    /// each group that the model is sharded or replicated over.
    pub(crate) fn new<M>(
        group: ProcessGroup,
        config: &FsdpConfig,
        registry: &SharedRegistry,
        build: Result<M>,
    ) -> Result<(Self, M)> {
        let mut registry = lock(registry);
        // Agree before anything is laid out: from different declarations the ranks would make
        // different shards.
        let declared = build.and_then(|module| Ok((module, registry.complete()?)));
        let (module, aliases) = agree_on_model(&group, NEW_OPERATION, declared, |(_, aliases)| {
            describe_model(config, &registry, aliases)
        })?;
        let built = agree_on_model(
            &group,
            NEW_OPERATION,
            build_units(&group, config, &registry),
            |_| Vec::new(),
        )?;
        let BuiltUnits {
            groups,
            strategy,
            handles,
            shared,
            overlap,
            ..
        } = built;
        let mut places = IndexMap::with_capacity(registry.params.len());
        for handle in &handles {
            for (param, parameter) in handle.params.iter().enumerate() {
                places.insert(parameter.fqn.clone(), (Arc::clone(handle), param));
            }
        }
        // Keep the order in which the model declared the parameters, which is not the order of
        // units.
        places.sort_by_key(|fqn, _| registry.params.get_index_of(fqn));
        // Each rank's part follows from the options, so no communication is needed.
        let shard_ranks = shard_ranks(&group, &groups, config);
        let mut ignored = Vec::with_capacity(registry.ignored_names.len());
        for name in &registry.ignored_names {
            // The builder got an error for an ignored parameter that could not be made.
            if let Some((tensor, _)) = registry.buffers.get(name) {
                ignored.push((name.clone(), Var::from_tensor(tensor)?));
            }
        }
        let parameters = ShardedParameters {
            group,
            groups,
            strategy,
            use_orig_params: config.use_orig_params,
            places,
            handles,
            aliases,
            buffers: std::mem::take(&mut registry.buffers),
            ignored,
            shared,
            overlap,
            settings: Mutex::default(),
            has_average: AtomicBool::new(false),
            has_looked_for_unreached: AtomicBool::new(false),
            has_mesh: config.mesh.is_some(),
            shard_ranks,
        };
        Ok((parameters, module))
    }

    /// Prepares the backward of a loss: tells each unit which of its parameters the backward will
    /// reach.
    pub(crate) fn begin_backward(&self, loss: &Tensor) {
        let reached_ids: HashSet<TensorId> = autograd::sorted_nodes(loss)
            .iter()
            .map(Tensor::id)
            .collect();
        for handle in &self.handles {
            // The root unit is reduced last on all ranks, whatever parameters the backward reaches
            // on each of them.
            if handle.is_root {
                handle.defer_reduction();
            } else {
                handle.begin_backward(&reached_ids);
            }
        }
    }

    /// Returns the root unit, if it has parameters.
    pub(crate) fn root(&self) -> Option<&Arc<FlatParamHandle>> {
        self.handles.first().filter(|handle| handle.is_root)
    }

    /// Returns the groups of the model, and those of its units if they have their own.
    pub(super) fn all_groups(&self) -> impl Iterator<Item = &Groups> {
        // Collectives beside the computation run in groups of their own.
        let first_unit = self.handles.first().filter(|_| self.overlap.is_some());
        let unit_groups = first_unit.map(|handle| &handle.exchange.groups);
        std::iter::once(&self.groups).chain(unit_groups)
    }

    /// Returns `true` if `other` is this very model on this rank, and not one like it.
    pub(crate) fn is_same_model(&self, other: &ShardedParameters) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Returns all ranks that train the model.
    #[must_use]
    pub const fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the ranks that together hold one copy of the parameters, each a shard; `None` if
    /// every rank holds all of them.
    #[must_use]
    pub const fn shard_group(&self) -> Option<&ProcessGroup> {
        self.groups.shard.as_ref()
    }

    /// Returns the ranks that hold the same values as this one; `None` if there are no others.
    #[must_use]
    pub const fn replicate_group(&self) -> Option<&ProcessGroup> {
        self.groups.replicate.as_ref()
    }

    /// Returns the strategy in use. It is `NoShard` on a single rank, and with `HybridShard` where
    /// each replica has one rank.
    #[must_use]
    pub const fn strategy(&self) -> ShardingStrategy {
        self.strategy
    }

    /// Returns `true` if the optimizer sees the model's own parameters rather than FlatParameters.
    #[must_use]
    pub const fn use_orig_params(&self) -> bool {
        self.use_orig_params
    }

    /// Returns the names of all parameters, in the order in which the model declared them. A tied
    /// parameter is listed once, by its first name.
    pub fn fqns(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// Returns all names of all parameters: their own ones, and after them the aliases.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.fqns().chain(self.aliases.keys().map(String::as_str))
    }

    /// Returns the aliases of tied parameters, each with the parameter's own name.
    #[must_use]
    pub const fn aliases(&self) -> &IndexMap<String, String> {
        &self.aliases
    }

    /// Returns the aliases of each tied parameter, by the parameter's own name.
    pub(crate) fn aliases_by_fqn(&self) -> IndexMap<&str, Vec<&str>> {
        let mut aliases: IndexMap<&str, Vec<&str>> = IndexMap::new();
        for (alias, fqn) in &self.aliases {
            aliases.entry(fqn).or_default().push(alias);
        }
        aliases
    }

    /// Returns the buffers by name, with `true` for those that are saved. They are whole on every
    /// rank.
    #[must_use]
    pub const fn buffers(&self) -> &IndexMap<String, (Tensor, bool)> {
        &self.buffers
    }

    /// Returns the parameters that [`FsdpConfig::ignored_states`] selects, by name: candle
    /// variables, to be trained by one of candle's optimizers. They are among the [`Self::buffers`]
    /// too. To keep them equal on all ranks, reduce their gradients before each step.
    #[must_use]
    pub fn ignored_states(&self) -> &[(String, Var)] {
        &self.ignored
    }

    /// Returns the parameter's name for a name or an alias.
    #[must_use]
    pub fn canonical_fqn<'a>(&'a self, fqn: &'a str) -> &'a str {
        self.aliases.get(fqn).map_or(fqn, String::as_str)
    }

    /// Returns the unit of a parameter, and the parameter's number there.
    pub(crate) fn place(&self, fqn: &str) -> Result<(&Arc<FlatParamHandle>, usize)> {
        let fqn = self.canonical_fqn(fqn);
        match self.places.get(fqn) {
            Some((handle, param)) => Ok((handle, *param)),
            None => Err(NnError::unknown_parameter(fqn)),
        }
    }

    /// Returns `true` if there is a parameter of this name or alias.
    #[must_use]
    pub fn contains(&self, fqn: &str) -> bool {
        self.place(fqn).is_ok()
    }

    /// Returns the parameter's global shape.
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`].
    pub fn shape(&self, fqn: &str) -> Result<&[usize]> {
        let (handle, param) = self.place(fqn)?;
        Ok(&handle.layout().shapes()[param])
    }

    /// Returns the parameter's dtype.
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`].
    pub fn dtype(&self, fqn: &str) -> Result<DType> {
        Ok(self.place(fqn)?.0.dtype())
    }

    /// Returns `true` if the parameter is trained now: see [`Self::set_requires_grad`].
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`].
    pub fn requires_grad(&self, fqn: &str) -> Result<bool> {
        let (handle, param) = self.place(fqn)?;
        Ok(handle.params[param].requires_grad())
    }

    /// Returns the boxes of the parameter that this rank owns.
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`].
    pub fn boxes(&self, fqn: &str) -> Result<Vec<TensorBox>> {
        let (handle, param) = self.place(fqn)?;
        Ok(handle.layout().param_boxes(param, handle.shard_rank()))
    }

    /// Computes the boxes of the parameter that a rank of the group owns. A rank that the group
    /// does not have owns none.
    pub(crate) fn boxes_on(&self, fqn: &str, rank: usize) -> Result<Vec<TensorBox>> {
        let (handle, param) = self.place(fqn)?;
        let Some(&shard_rank) = self.shard_ranks.get(rank) else {
            return Ok(Vec::new());
        };
        Ok(handle.layout().param_boxes(param, shard_rank))
    }

    /// Returns the parameter's live values on this rank, as views: the next optimizer step changes
    /// them. No communication.
    ///
    /// The views are for reading. Call [`Self::lend`] before writing into them.
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`]; those of [`Self::synchronize`].
    pub fn parameter(&self, fqn: &str) -> Result<ShardedTensor> {
        self.synchronize()?;
        let (handle, param) = self.place(fqn)?;
        handle.sharded_param(param)
    }

    /// Returns a flat view of this rank's part of the parameter's live values; `None` if it has
    /// none. No communication.
    pub(crate) fn local_piece(&self, fqn: &str) -> Result<Option<Tensor>> {
        let (handle, param) = self.place(fqn)?;
        handle.local_piece(param)
    }

    /// Returns the parameter's reduced gradient on this rank, in its boxes, as views; `None` before
    /// a backward that communicates, or after `zero_grad`. No communication.
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`]; those of [`Self::synchronize`].
    pub fn gradient(&self, fqn: &str) -> Result<Option<ShardedTensor>> {
        self.synchronize()?;
        let (handle, param) = self.place(fqn)?;
        if handle.grad().is_none() {
            return Ok(None);
        }
        let piece = handle.grad_piece(param)?;
        handle.to_boxes(param, piece.as_ref()).map(Some)
    }

    /// Writes values into the parameter's live memory on this rank. `values` must cover this rank's
    /// boxes; elements outside of them are ignored. On an error nothing has been written. No
    /// communication.
    ///
    /// # Errors
    /// An unknown name, another shape or dtype, boxes that are not covered, [`NnError::UnitInUse`],
    /// or [`NnError::Swapped`].
    pub fn set_parameter(&self, fqn: &str, values: &ShardedTensor) -> Result<()> {
        self.check_not_swapped()?;
        let (handle, param) = self.place(fqn)?;
        let target = handle.sharded_param(param)?;
        check_values(fqn, values, &target)?;
        handle.begin_change()?;
        write_boxes(values, &target)
    }

    /// Returns `true` for a tensor that is itself a parameter.
    pub(crate) fn has_tensor(&self, id: TensorId) -> bool {
        self.handles
            .iter()
            .flat_map(|handle| &handle.params)
            .any(|param| param.tensor.id() == id)
    }

    /// Returns the units, other than the root, that do not check themselves whether their values
    /// have changed between forward and backward. The output of the model checks them.
    pub(crate) fn unchecked_units(&self) -> Vec<Arc<FlatParamHandle>> {
        self.handles
            .iter()
            .filter(|handle| !handle.needs_unshard() && !handle.is_root)
            .cloned()
            .collect()
    }

    /// Returns `true` while the model has the average of its weights in the place of the weights:
    /// see [`AveragedModel::swap`](crate::AveragedModel::swap).
    #[must_use]
    pub fn has_average(&self) -> bool {
        self.has_average.load(Ordering::Relaxed)
    }

    /// Checks that the model has its weights, and not their average.
    pub(crate) fn check_not_swapped(&self) -> Result<()> {
        if self.has_average() {
            return Err(NnError::Swapped);
        }
        Ok(())
    }

    /// Prepares a change of a parameter's unit: a backward of an earlier forward becomes an error.
    /// No communication.
    pub(crate) fn begin_change(&self, fqn: &str) -> Result<()> {
        self.place(fqn)?.0.begin_change()
    }

    /// Returns the bytes of parameters that are in memory on this rank now: its shards, and the
    /// units that are gathered.
    #[must_use]
    pub fn parameter_bytes(&self) -> usize {
        self.shared.memory.held_bytes()
    }

    /// Returns the largest number of bytes of parameters that were ever in memory on this rank.
    #[must_use]
    pub fn peak_parameter_bytes(&self) -> usize {
        self.shared.memory.peak_bytes()
    }

    /// Waits on the host until the GPU has done all collectives that forwards, backwards and
    /// optimizer steps of this rank have queued over NCCL; elsewhere there is nothing to wait for.
    /// No communication.
    ///
    /// If a collective fails after it was queued, what the GPU has computed since is undefined, and
    /// the next call that communicates has the error. A program that reads a number from the GPU
    /// before that, such as the loss, calls this after it has read the number.
    ///
    /// # Errors
    /// The reason that a collective has failed for, such as a lost rank.
    pub fn synchronize(&self) -> Result<()> {
        self.all_groups().try_for_each(Groups::synchronize)
    }

    /// Releases all gathered parameters of sharded units: torch's `reshard`. No communication, but
    /// every rank must call it, because all ranks have to gather again.
    ///
    /// # Errors
    /// [`NnError::UnitInUse`] inside a forward; candle's errors.
    pub fn reshard(&self) -> Result<()> {
        self.handles.iter().try_for_each(|handle| handle.reshard())
    }

    /// Allows the caller to write into views of the live parameters ([`Self::parameter`]), now or
    /// later. Gathered copies are released, and from now on every forward gathers anew, because a
    /// copy could be out of date. No communication, but every rank must call it.
    ///
    /// Do not write between a forward and its backward: the backward would compute with the new
    /// values, without an error.
    ///
    /// # Errors
    /// [`NnError::UnitInUse`] inside a forward; candle's errors.
    pub fn lend(&self) -> Result<()> {
        // A gathered copy would not follow what is written from now on.
        self.reshard()?;
        self.wait_for_readers()?;
        self.shared.values.lend();
        Ok(())
    }

    /// Returns a guard. As long as it lives, whatever would change these parameters, the state of
    /// their optimizers or an average of them waits: [`Optimizer::step`](crate::Optimizer::step),
    /// [`Self::lend`], [`Self::set_parameter`], loads,
    /// [`AveragedModel::update`](crate::AveragedModel::update). Forwards and backwards do not wait.
    /// A save in the background copies the state meanwhile. Returns `None` once views have been
    /// lent ([`Self::lend`]), because whoever has them may write at any time. No communication.
    ///
    /// Move the guard to the thread that reads: a thread that holds the guard and changes the
    /// parameters waits forever.
    #[must_use]
    pub fn keep_unchanged(&self) -> Option<Unchanged> {
        self.shared.values.keep_unchanged()
    }

    /// Waits until nobody [keeps the values unchanged](Self::keep_unchanged).
    ///
    /// # Errors
    /// CUDA's.
    pub(crate) fn wait_for_readers(&self) -> Result<()> {
        self.shared.values.wait_for_readers()
    }

    /// Drops all gradients: torch's `zero_grad(set_to_none=True)`.
    pub fn zero_grad(&self) {
        self.handles.iter().for_each(|handle| handle.zero_grad());
    }
}

/// Checks that values can be written to the place of a parameter.
pub(crate) fn check_values(
    fqn: &str,
    values: &ShardedTensor,
    target: &ShardedTensor,
) -> Result<()> {
    if values.shape() != target.shape() {
        return Err(NnError::Flat(fsdp_flat::FlatError::ShapeMismatch {
            name: fqn.to_owned(),
            expected: target.shape().to_vec(),
            found: values.shape().to_vec(),
        }));
    }
    if let Some(shard) = target
        .shards()
        .iter()
        .find(|shard| !values.covers(&shard.bounds))
    {
        return Err(NnError::Flat(fsdp_flat::FlatError::NotCovered {
            wanted: shard.bounds.clone(),
        }));
    }
    // A rank without elements may have values of any dtype.
    if target.local_numel() > 0 && values.dtype() != target.dtype() {
        return Err(NnError::Candle(candle_core::Error::DTypeMismatchBinaryOp {
            lhs: target.dtype(),
            rhs: values.dtype(),
            op: "load a parameter",
        }));
    }
    Ok(())
}

/// Returns the part of a layout that each rank of a group has.
fn shard_ranks(group: &ProcessGroup, groups: &Groups, config: &FsdpConfig) -> Vec<usize> {
    let ranks = 0..group.world_size();
    match (&groups.shard, config.strategy, &config.mesh) {
        (None, ..) => vec![0; group.world_size()],
        // Shards lie along the second dimension of the mesh.
        (Some(_), ShardingStrategy::HybridShard, Some(mesh)) => ranks
            .map(|rank| mesh.coordinate(rank).expect("the mesh has all ranks")[1])
            .collect(),
        _ => ranks.collect(),
    }
}

/// Copies `values`, which [`check_values`] has found to fit, into the memory of `target`'s boxes.
/// Does nothing if they are views of that memory.
pub(crate) fn write_boxes(values: &ShardedTensor, target: &ShardedTensor) -> Result<()> {
    if values.is_same_view(target) {
        return Ok(());
    }
    for shard in target.shards() {
        for source in values.shards() {
            copy_overlap(&source.tensor, &source.bounds, &shard.tensor, &shard.bounds)?;
        }
    }
    Ok(())
}

impl ShardedParameters {
    /// Chooses by name which parameters are trained from now on: torch's `requires_grad_`, for
    /// gradual unfreezing. The others are frozen: later backwards bring them no gradients, and
    /// optimizers leave them as they are. Only parameters that
    /// [`FsdpConfig::requires_grad`](crate::FsdpConfig::requires_grad) names can be trained at all.
    /// Gradients that are there stay; call it between [`Self::zero_grad`] and the next backward.
    /// Collectives: one agreement.
    ///
    /// # Errors
    /// [`NnError::Options`] for a parameter that was built frozen; without `use_orig_params` a
    /// choice of some of a unit's parameters; [`NnError::DifferentModels`] if ranks choose
    /// differently. One rank's error is every rank's, and changes nothing.
    pub fn set_requires_grad(&self, requires_grad: impl Fn(&str) -> bool) -> Result<()> {
        let params = self.handles.iter().flat_map(|handle| &handle.params);
        let chosen: Vec<(&Parameter, bool)> = params
            .map(|param| (param, requires_grad(&param.fqn)))
            .collect();
        // The collectives of a backward depend on the choice, so it must be the same on all ranks.
        let checked = self.check_choice(&chosen).map(|()| chosen);
        let agreed = agree_on_model(self.group(), "set_requires_grad", checked, |chosen| {
            let lines = chosen.iter().map(|(param, requires_grad)| {
                let state = if *requires_grad { "trained" } else { "frozen" };
                format!("the parameter `{}` {state}", param.fqn)
            });
            lines.collect()
        })?;
        for (param, requires_grad) in agreed {
            param.set_requires_grad(requires_grad);
        }
        Ok(())
    }

    /// Checks a choice of the parameters to train: they must have been built as trainable, and
    /// without `use_orig_params` a unit's parameters must all be chosen or none.
    fn check_choice(&self, choices: &[(&Parameter, bool)]) -> Result<()> {
        if let Some((param, _)) = choices
            .iter()
            .find(|(param, requires_grad)| *requires_grad && !param.is_trainable)
        {
            return Err(NnError::options(format!(
                "parameter `{}` was built frozen, so it gets no gradient: select it in \
                 `FsdpConfig::requires_grad`, and freeze it with `set_requires_grad` until it is \
                 to be trained",
                param.fqn
            )));
        }
        if self.use_orig_params() {
            return Ok(());
        }
        let mut remaining = choices;
        for handle in &self.handles {
            let unit_choices;
            (unit_choices, remaining) = remaining.split_at(handle.params.len());
            // A FlatParameter is trained as a whole, or not at all.
            let (_, first_choice) = unit_choices[0];
            if let Some((param, _)) = unit_choices
                .iter()
                .find(|(_, choice)| *choice != first_choice)
            {
                return Err(fsdp_flat::FlatError::MixedRequiresGrad {
                    fqn: param.fqn.clone(),
                }
                .into());
            }
        }
        Ok(())
    }
}
