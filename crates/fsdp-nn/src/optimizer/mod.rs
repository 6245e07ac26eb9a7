//! Optimizers over the parameters of a sharded model: each rank steps on its own shard, in place.

mod factored;
mod local;
mod matrices;
mod modes;
mod newton_schulz;
mod on_device;
mod owners;
mod step;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use fsdp_layout::PlainValue;
use fsdp_state::{StateDict, StateValue};
use indexmap::IndexMap;

use crate::algorithm::{Algorithm, StateKind};
use crate::error::{NnError, OptimStateError, Result};
use crate::model::parameters::ShardedParameters;

pub(crate) use local::{
    LocalParam, LocalState, ParamState, Segment, complete_state, initial_state,
};
pub(crate) use modes::{all_or_none, move_towards};
pub(crate) use step::Counts;

/// The key of the learning rate that a schedule multiplies.
const INITIAL_LR: &str = "initial_lr";

/// Parameters that share hyperparameters: one of torch's `param_groups`.
#[derive(Debug, Clone)]
pub struct ParamGroup {
    /// The update rule and its hyperparameters.
    pub algorithm: Algorithm,
    /// Keys of the group that the algorithm does not know, kept as they are (`initial_lr`, …).
    pub extra: Vec<(String, PlainValue)>,
    fqns: Arc<[String]>,
}

impl ParamGroup {
    /// Makes a group of these parameters; it may be empty.
    #[must_use]
    pub fn new(algorithm: Algorithm, fqns: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let fqns = fqns.into_iter().map(Into::into).collect();
        ParamGroup {
            algorithm,
            extra: Vec::new(),
            fqns,
        }
    }

    /// Returns the names of the parameters.
    #[must_use]
    pub fn fqns(&self) -> &[String] {
        &self.fqns
    }

    /// Returns the learning rate that a [`Schedule`](crate::Schedule) multiplies: `initial_lr`, as
    /// torch's schedulers keep it in the group. `None` before a schedule has been applied.
    #[must_use]
    pub fn initial_lr(&self) -> Option<f64> {
        let (_, value) = self.extra.iter().rev().find(|(key, _)| key == INITIAL_LR)?;
        value.as_float()
    }

    /// Changes the learning rate that a schedule multiplies. Every rank must set the same.
    pub fn set_initial_lr(&mut self, lr: f64) {
        self.extra.retain(|(key, _)| key != INITIAL_LR);
        self.extra.push((INITIAL_LR.to_owned(), lr.into()));
    }
}

/// The hyperparameters that a group is to have, and the keys that its algorithm does not know.
pub(crate) type GroupUpdate = (Algorithm, Vec<(String, PlainValue)>);

/// torch's optimizers over a sharded model: SGD, Adam, AdamW, Adagrad, Adafactor, Muon, and
/// schedule-free AdamW ([`Algorithm`]).
///
/// State is sharded like the parameters. As in torch, a parameter has state from its first step on.
/// Before that, the algorithm's schema describes it, so reading or loading state needs no step with
/// zero gradients. No method communicates, except the steps of Adafactor and Muon.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::Module;
/// use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer, ParamGroup};
/// fsdp_comm::run_local(2, |group| {
///     let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
///         candle_nn::linear(3, 2, scope.vb())
///     })?;
///     let adam = |weight_decay| Algorithm::Adam(AdamOptions { weight_decay, ..AdamOptions::default() });
///     let groups = vec![ParamGroup::new(adam(0.1), ["weight"]), ParamGroup::new(adam(0.0), ["bias"])];
///     let mut optimizer = Optimizer::with_groups(model.parameters(), groups)?;
///     let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
///     let loss = model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?;
///     model.backward(&loss)?;
///     optimizer.step()?;
///     // This rank's state, as torch's `Optimizer.state_dict` has it, goes into an optimizer like this one.
///     let state = optimizer.state_dict()?;
///     let groups = vec![ParamGroup::new(adam(0.1), ["weight"]), ParamGroup::new(adam(0.0), ["bias"])];
///     let mut again = Optimizer::with_groups(model.parameters(), groups)?;
///     again.load_state_dict(&state)?;
///     assert_eq!(again.state_of("weight")?.unwrap()["step"].as_tensor().unwrap().to_scalar::<f32>()?, 1.0);
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Optimizer {
    parameters: Arc<ShardedParameters>,
    groups: Vec<ParamGroup>,
    /// The local parameters, group by group.
    locals: Vec<LocalParam>,
    /// The local parameter of each of the model's parameters.
    local_indices: IndexMap<String, usize>,
    /// The names in each group when the optimizer was made.
    group_fqns: Vec<Arc<[String]>>,
    /// State under keys that do not belong to a parameter, kept as it was loaded.
    user_state: StateDict,
}

impl Optimizer {
    /// Makes an optimizer of all parameters, in one group.
    ///
    /// # Errors
    /// The errors of [`Self::with_groups`], as far as one group of all parameters can have them.
    pub fn new(parameters: &Arc<ShardedParameters>, algorithm: Algorithm) -> Result<Self> {
        let group = ParamGroup::new(algorithm, parameters.fqns());
        Self::with_groups(parameters, vec![group])
    }

    /// Makes an optimizer of several groups. Parameters in no group are not trained by it.
    ///
    /// # Errors
    /// Hyperparameters out of range, unknown or repeated parameters, and, without
    /// `use_orig_params`, a FlatParameter that is split between groups. An algorithm that cannot
    /// update its parameters: [`AlgorithmError`](crate::algorithm::AlgorithmError)'s
    /// `UnsupportedDType`, `VanishingEps` for `f16` with a small `eps`, `NotAMatrix` for Muon, and
    /// `FlatParameters` for Adafactor.
    pub fn with_groups(
        parameters: &Arc<ShardedParameters>,
        groups: Vec<ParamGroup>,
    ) -> Result<Self> {
        let mut optimizer = Optimizer {
            parameters: Arc::clone(parameters),
            groups: Vec::new(),
            locals: Vec::new(),
            local_indices: IndexMap::new(),
            group_fqns: Vec::new(),
            user_state: StateDict::new(),
        };
        // Step 1: find the local parameter of each name. Without `use_orig_params` all names of a
        // unit share one, which this map has by the unit.
        let mut flat_locals: HashMap<usize, usize> = HashMap::new();
        for (index, mut group) in groups.into_iter().enumerate() {
            let fqns = group
                .fqns
                .iter()
                .map(|fqn| parameters.canonical_fqn(fqn).to_owned());
            group.fqns = fqns.collect();
            for fqn in &*group.fqns {
                let unit = parameters.place(fqn)?.0.unit_number();
                if optimizer.local_indices.contains_key(fqn) {
                    return Err(NnError::options(format!(
                        "parameter `{fqn}` is in more than one parameter group"
                    )));
                }
                // Without `use_orig_params` the first name of a unit brings in all of it.
                let local = match flat_locals.get(&unit) {
                    Some(&existing_local) => {
                        optimizer.check_same_group(existing_local, index, fqn)?
                    }
                    None => {
                        optimizer.add_local(fqn, index)?;
                        optimizer.locals.len() - 1
                    }
                };
                optimizer.local_indices.insert(fqn.clone(), local);
                if !parameters.use_orig_params() {
                    flat_locals.insert(unit, local);
                }
            }
            optimizer.group_fqns.push(Arc::clone(&group.fqns));
            optimizer.groups.push(group);
        }
        // Step 2: check what only all groups together show.
        optimizer.check_flat_parameters_are_whole()?;
        optimizer.check_algorithms(optimizer.groups.iter().map(|group| &group.algorithm))?;
        // Step 3: make the state that some algorithms have before their first step.
        for local in &mut optimizer.locals {
            let algorithm = &optimizer.groups[local.group].algorithm;
            if algorithm.state_exists_from_construction() {
                local.state = Some(initial_state(algorithm, local)?);
            }
        }
        Ok(optimizer)
    }

    /// Checks that algorithms, one for each group, can update the parameters of their groups.
    pub(crate) fn check_algorithms<'a>(
        &self,
        algorithms: impl IntoIterator<Item = &'a Algorithm>,
    ) -> Result<()> {
        for (group, algorithm) in algorithms.into_iter().enumerate() {
            algorithm.validate()?;
            for local in &self.locals[self.locals_of_group(group)] {
                check_algorithm(algorithm, local)?;
            }
        }
        Ok(())
    }

    /// Checks that the FlatParameter that holds `fqn` is of this group, and returns its local
    /// parameter.
    fn check_same_group(&self, local: usize, group: usize, fqn: &str) -> Result<usize> {
        if self.locals[local].group == group {
            return Ok(local);
        }
        let grouped = self.locals[local]
            .handle
            .params
            .iter()
            .find(|param| self.local_indices.contains_key(&param.fqn))
            .expect("a FlatParameter has a local parameter since one of its names was grouped");
        Err(split_flat_parameter_error(&grouped.fqn, fqn))
    }

    /// Adds the local parameter for `fqn`, its own piece or the FlatParameter that holds it.
    fn add_local(&mut self, fqn: &str, group: usize) -> Result<()> {
        let (handle, param) = self.parameters.place(fqn)?;
        let layout = handle.layout();
        let rank = handle.shard_rank();
        let is_flat = !self.parameters.use_orig_params();
        let mut segments = Vec::new();
        let numel;
        if is_flat {
            for (param, info) in layout.shard_param_infos(rank).into_iter().enumerate() {
                if let Some(info) = info {
                    segments.push(Segment {
                        param,
                        start: info.offset_in_shard,
                        len: info.numel_in_shard,
                    });
                }
            }
            numel = layout.sharded_numel();
        } else {
            // A rank may have no element of a parameter.
            let info = layout.shard_param_info(param, rank);
            numel = info.map_or(0, |info| info.numel_in_shard);
            segments.push(Segment {
                param,
                start: 0,
                len: numel,
            });
        }
        self.locals.push(LocalParam {
            handle: Arc::clone(handle),
            is_flat,
            group,
            segments,
            numel,
            state: None,
        });
        Ok(())
    }

    /// Checks that the optimizer has all parameters of each FlatParameter, or none of them: without
    /// `use_orig_params` they are updated together.
    fn check_flat_parameters_are_whole(&self) -> Result<()> {
        if self.parameters.use_orig_params() {
            return Ok(());
        }
        for local in &self.locals {
            // One update moves the whole flat tensor, frozen parameters or not.
            let (grouped, ungrouped): (Vec<_>, Vec<_>) = local
                .handle
                .params
                .iter()
                .partition(|param| self.local_indices.contains_key(&param.fqn));
            if let (Some(first), Some(second)) = (grouped.first(), ungrouped.first()) {
                return Err(split_flat_parameter_error(&first.fqn, &second.fqn));
            }
        }
        Ok(())
    }

    /// Returns the model's parameters.
    #[must_use]
    pub const fn parameters(&self) -> &Arc<ShardedParameters> {
        &self.parameters
    }

    /// Returns the groups.
    #[must_use]
    pub fn groups(&self) -> &[ParamGroup] {
        &self.groups
    }

    /// Returns the groups, to change hyperparameters. Every rank must make the same changes.
    /// [`Self::step`] refuses a group of other parameters in the place of one of these.
    pub fn groups_mut(&mut self) -> &mut [ParamGroup] {
        &mut self.groups
    }

    /// Returns `true` if this optimizer steps on the parameters of this very model, and not of one
    /// like it.
    #[must_use]
    pub fn belongs_to(&self, parameters: &ShardedParameters) -> bool {
        self.parameters.is_same_model(parameters)
    }

    /// Refuses the parameters of a model that this optimizer does not belong to.
    pub(crate) fn check_belongs_to(&self, parameters: &ShardedParameters) -> Result<()> {
        if self.belongs_to(parameters) {
            Ok(())
        } else {
            Err(NnError::ForeignOptimizer)
        }
    }

    /// Returns `true` if this optimizer holds the parameter.
    #[must_use]
    pub fn holds(&self, fqn: &str) -> bool {
        self.local_index(fqn).is_some()
    }

    pub(crate) fn locals(&self) -> &[LocalParam] {
        &self.locals
    }

    pub(crate) fn locals_mut(&mut self) -> &mut [LocalParam] {
        &mut self.locals
    }

    /// Returns the position of the local parameter that holds `fqn`: its id in a state dict.
    /// Returns `None` if the optimizer does not hold the parameter.
    pub(crate) fn local_index(&self, fqn: &str) -> Option<usize> {
        self.local_indices
            .get(self.parameters.canonical_fqn(fqn))
            .copied()
    }

    /// Returns `true` if no parameter has state: nothing has been stepped or loaded.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.locals.iter().all(|local| local.state.is_none())
    }

    /// Returns a parameter's state under torch's names: `step` as a 0-d f32 tensor, tensors shaped
    /// like the parameter as sharded views of the live state, and other values unchanged. Returns
    /// `None` if the parameter has no state yet, or is not in this optimizer. The keys are the same
    /// on every rank.
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`] and candle's errors.
    pub fn state_of(&self, fqn: &str) -> Result<Option<IndexMap<String, StateValue>>> {
        let (_, param) = self.parameters.place(fqn)?;
        let Some(local) = self.local_index(fqn).map(|index| &self.locals[index]) else {
            return Ok(None);
        };
        local
            .state
            .as_ref()
            .map(|state| Ok(local.portable_state(state, param)?.into_iter().collect()))
            .transpose()
    }

    /// Returns the state of a local parameter before its first step, in fresh memory: the
    /// algorithm's schema with its initial values. `None` for one that is frozen, and where the
    /// algorithm has no state before its first step.
    pub(crate) fn initial_state(&self, local: usize) -> Result<Option<ParamState>> {
        let local = &self.locals[local];
        if !local.requires_grad() {
            return Ok(None);
        }
        Ok(initial_state(&self.groups[local.group].algorithm, local)?.unless_empty())
    }

    /// Returns the state of a local parameter with all entries that its algorithm ever has: those
    /// that do not exist yet have their initial values, in fresh memory, or are zero if they begin
    /// with the first step. `None` for a frozen parameter without state, and where the algorithm
    /// has no state.
    pub(crate) fn complete_state(&self, local: usize) -> Result<Option<ParamState>> {
        let local = &self.locals[local];
        if !local.requires_grad() {
            return Ok(local.state.clone());
        }
        complete_state(&self.groups[local.group].algorithm, local)
    }

    /// Returns the names of the model's parameters that this optimizer holds, group by group. A
    /// name's position is its id in the state dict of an optimizer without sharding.
    pub fn fqns(&self) -> impl Iterator<Item = &str> {
        self.groups
            .iter()
            .flat_map(|group| group.fqns())
            .map(String::as_str)
    }

    /// Returns `true` if an entry of a parameter's state is shaped like the parameter.
    pub(crate) fn is_like_parameter(&self, fqn: &str, name: &str) -> bool {
        let (Some(local), Ok(shape)) = (self.local_index(fqn), self.parameters.shape(fqn)) else {
            return false;
        };
        self.groups[self.locals[local].group]
            .algorithm
            .kind_of(name, shape)
            == Some(StateKind::LikeParameter)
    }

    /// Returns the positions of a group's local parameters.
    pub(crate) fn locals_of_group(&self, group: usize) -> Range<usize> {
        let start = self.locals.partition_point(|local| local.group < group);
        let end = self.locals.partition_point(|local| local.group <= group);
        start..end
    }

    /// Returns an optimizer of the same parameters and groups without any state. A load fills it,
    /// and it then takes the place of this one or becomes a state dict.
    pub(crate) fn without_state(&self) -> Self {
        Optimizer {
            parameters: Arc::clone(&self.parameters),
            groups: self.groups.clone(),
            locals: self.locals.iter().map(LocalParam::without_state).collect(),
            local_indices: self.local_indices.clone(),
            group_fqns: self.group_fqns.clone(),
            user_state: StateDict::new(),
        }
    }

    /// Returns an optimizer of one of the local parameters alone, without any state. State of that
    /// parameter can be loaded into it to convert the state, while this optimizer stays as it is.
    pub(crate) fn with_one_local(&self, local: usize) -> Self {
        // Conversions run on a copy, so that an error changes nothing here.
        let mut local = self.locals[local].without_state();
        let group = &self.groups[local.group];
        local.group = 0;
        let fqns: Arc<[String]> = local.fqns().into();
        Optimizer {
            parameters: Arc::clone(&self.parameters),
            local_indices: fqns.iter().map(|fqn| (fqn.clone(), 0)).collect(),
            groups: vec![ParamGroup {
                fqns: Arc::clone(&fqns),
                ..group.clone()
            }],
            locals: vec![local],
            group_fqns: vec![fqns],
            user_state: StateDict::new(),
        }
    }

    /// Returns the state under keys that are no parameter's.
    pub(crate) const fn user_state(&self) -> &StateDict {
        &self.user_state
    }

    /// Replaces the state under keys that are no parameter's.
    pub(crate) fn set_user_state(&mut self, user_state: StateDict) {
        self.user_state = user_state;
    }

    /// Puts state in place of the present one, also if there is none, and hyperparameters into the
    /// groups (in their order). Nothing is changed on error.
    ///
    /// # Errors
    /// The number of groups must stay, hyperparameters must be in range, and the algorithms must
    /// suit their parameters.
    pub(crate) fn replace_state(
        &mut self,
        states: Vec<Option<ParamState>>,
        groups: Vec<GroupUpdate>,
    ) -> Result<()> {
        if groups.len() != self.groups.len() {
            return Err(OptimStateError::GroupCount {
                saved: groups.len(),
                current: self.groups.len(),
            }
            .into());
        }
        self.check_algorithms(groups.iter().map(|(algorithm, _)| algorithm))?;
        // All checks are done: from here nothing fails.
        for (group, (algorithm, extra)) in self.groups.iter_mut().zip(groups) {
            group.algorithm = algorithm;
            group.extra = extra;
        }
        for (local, state) in self.locals.iter_mut().zip(states) {
            local.state = state;
        }
        Ok(())
    }
}

/// Returns the error for two parameters of one FlatParameter of which only one is in a group.
fn split_flat_parameter_error(first: &str, second: &str) -> NnError {
    NnError::options(format!(
        "parameters `{first}` and `{second}` are of one FlatParameter, so they must be in one \
         parameter group: set `use_orig_params` or group them together"
    ))
}

/// Checks that an algorithm can update a local parameter.
fn check_algorithm(algorithm: &Algorithm, local: &LocalParam) -> Result<()> {
    algorithm.check_parameters(!local.is_flat)?;
    algorithm.check_dtype(local.handle.file_dtype())?;
    let shapes = local.handle.layout().shapes();
    local
        .params()
        .into_iter()
        .try_for_each(|param| Ok(algorithm.check_shape(&shapes[param])?))
}
