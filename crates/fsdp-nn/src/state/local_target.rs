//! A local optimizer state dict, as the target of a load of state by the model's names.

use fsdp_layout::{DType, KeyPath, TensorBox};
use fsdp_state::engine::{LoadOptions, Plan, Target, Values, Wanted};
use fsdp_state::{Memory, Schema, StateDict, StateError, set_element};

use super::entry::{EntryOptions, EntryPlan};
use super::groups::agree_on_groups;
use super::local::{StagedLocal, check_entries, local_dict};
use super::names::OptimKey;
use super::saved::{SavedOptim, sort_by_schema};
use super::{OptimStateError, OptimStateKeyType};
use crate::algorithm::Initial;
use crate::optimizer::{GroupUpdate, Optimizer};
use crate::{NnError, Result};

/// A local state dict, as the target of a load of state by the model's names.
pub(crate) struct LocalTarget<'a> {
    optimizer: &'a Optimizer,
    /// `true` if a trained parameter may lack state that others of its unit have.
    allow_missing_state: bool,
    /// The parts of the source that are read, with their positions in it.
    parts: Vec<(OptimKey, usize)>,
    /// The state of each local parameter; `None` if nothing was saved for it.
    plans: Vec<Option<EntryPlan>>,
    /// The hyperparameters of each group; `None` if no groups were saved.
    groups: Option<Vec<GroupUpdate>>,
    /// The place of each wanted tensor.
    places: Vec<Place>,
    user_state: StateDict,
}

/// The place of a wanted tensor.
enum Place {
    /// An entry of a local parameter's state, by the numbers of the parameter and of the tensor there.
    Entry { local: usize, destination: usize },
    /// State under a user's key.
    User(KeyPath),
}

impl<'a> LocalTarget<'a> {
    /// Returns a target for the parameters of an optimizer, which stays as it is.
    pub(crate) fn new(optimizer: &'a Optimizer, allow_missing_state: bool) -> Self {
        LocalTarget {
            optimizer,
            allow_missing_state,
            parts: Vec::new(),
            plans: Vec::new(),
            groups: None,
            places: Vec::new(),
            user_state: StateDict::new(),
        }
    }

    /// Returns the loaded state as a local state dict.
    ///
    /// # Errors
    /// candle's.
    pub(crate) fn into_dict(self, key_type: OptimStateKeyType) -> Result<StateDict> {
        let groups = self.groups.map(|groups| {
            let entries = |(algorithm, extra): GroupUpdate| algorithm.to_group().into_iter().chain(extra).collect();
            groups.into_iter().map(entries).collect()
        });
        let state_of = |index: usize| self.plans[index].as_ref().map(|plan| &plan.state);
        local_dict(self.optimizer, key_type, state_of, &self.user_state, groups)
    }

    /// Returns the loaded state, to be put into the optimizer; its tensors share memory with nothing.
    ///
    /// # Errors
    /// State without groups.
    pub(crate) fn into_staged(self) -> Result<StagedLocal> {
        let missing = || OptimStateError::MissingKey { key: "param_groups".to_owned() };
        let groups = self.groups.ok_or_else(missing)?;
        let states = self.plans.into_iter().map(|plan| plan.map(|plan| plan.state)).collect();
        Ok(StagedLocal { states, groups, user_state: self.user_state })
    }

    /// Refuses state of some of a unit's trained parameters without that of others.
    fn check_presence(&self, saved: &SavedOptim) -> Result<()> {
        let has_state = |fqn: &str| saved.states.get(fqn).is_some_and(|entries| !entries.is_empty());
        for handle in &self.optimizer.parameters().handles {
            let Some(other) = handle.params.iter().find(|param| has_state(&param.fqn)) else { continue };
            for (param, numel) in handle.params.iter().zip(handle.layout().numels()) {
                if !param.requires_grad() || *numel == 0 || has_state(&param.fqn) {
                    continue;
                }
                // State that begins with the first gradient is rightly missing where there was none.
                let schema = self.optimizer.state_schema(&param.fqn);
                if schema.iter().any(|entry| entry.initial != Initial::FirstGradient) {
                    let (fqn, other) = (param.fqn.clone(), other.fqn.clone());
                    return Err(OptimStateError::MissingState { fqn, other }.into());
                }
            }
        }
        Ok(())
    }

    /// Refuses state and groups of parameters that the optimizer does not have.
    fn check_known(&self, saved: &SavedOptim) -> Result<()> {
        if let Some(fqn) = saved.states.keys().filter(|fqn| !self.optimizer.holds(fqn)).min() {
            let (key, count) = (fqn.clone(), self.optimizer.fqns().count());
            return Err(OptimStateError::UnknownState { key, count }.into());
        }
        for (index, group) in saved.groups.groups().iter().enumerate() {
            if let Some(key) = group.params.iter().find(|fqn| !self.optimizer.holds(fqn)) {
                return Err(OptimStateError::UnknownParam { index, key: key.clone() }.into());
            }
        }
        Ok(())
    }
}

impl Target for LocalTarget<'_> {
    type Error = NnError;

    fn select(&mut self, schema: &Schema) -> Vec<usize> {
        self.parts.clear();
        let is_parameter = |name: &str| self.optimizer.parameters().contains(name);
        for (position, (path, _)) in schema.iter().enumerate() {
            self.parts.extend(OptimKey::read(&path.0, &is_parameter).map(|key| (key, position)));
        }
        self.parts.iter().map(|(_, position)| *position).collect()
    }

    fn plan(&mut self, schema: &Schema, values: &Values, options: &LoadOptions) -> Result<Plan> {
        let optimizer = self.optimizer;
        let rename = |name: &str| name.to_owned();
        let saved = SavedOptim::new(optimizer.parameters(), &[optimizer], schema, values, &self.parts, &rename)?;
        self.check_known(&saved)?;
        let mut plan = Plan::default();
        // Matching changes the groups; the states are read beside it.
        let mut groups = saved.groups;
        let saved = SavedOptim { groups: super::groups::SavedGroups::new(Vec::new(), str::to_owned), ..saved };
        let has_groups = !groups.is_empty();
        let mut missing = Vec::new();
        // Unnamed parameters are no error here: they go with the others of their group.
        let updates = groups.match_with(optimizer, &mut missing, |_| true)?;
        // A group that is not saved (`param_groups.<index>`) keeps its hyperparameters. One that is saved must have all
        // of them, and each that it lacks is `param_groups.<index>.<key>`.
        if let Some(key) = missing.into_iter().find(|key| key.split('.').count() > 2) {
            return Err(OptimStateError::MissingKey { key }.into());
        }
        // The saved groups' algorithm decides which entries there must be, so that states come after groups.
        for (index, local) in optimizer.locals().iter().enumerate() {
            let fqns = local.fqns();
            let entries: Vec<_> = fqns.iter().map(|fqn| saved.states.get(fqn).filter(|e| !e.is_empty())).collect();
            let (algorithm, _) = &updates[optimizer.group_of_local(index)];
            let entry_options = EntryOptions { cast: options.cast, ..EntryOptions::default() };
            let entry_plan = EntryPlan::new(local, algorithm, &entries, entry_options)?;
            if let Some(entry_plan) = &entry_plan {
                check_entries(local, entry_plan)?;
                self.want(index, entry_plan, schema, &mut plan)?;
            }
            self.plans.push(entry_plan);
        }
        // A FlatParameter's plan has compared its parameters already; original ones have a plan each.
        if !self.allow_missing_state && optimizer.parameters().use_orig_params() {
            self.check_presence(&saved)?;
        }
        agree_on_groups(optimizer, &updates, &mut plan.agreed);
        self.groups = has_groups.then_some(updates);
        // State under users' keys is each rank's own, and small values of it are here already.
        for (path, position) in saved.user_state {
            match (values.get(&position), schema.get(position)) {
                (Some(value), _) => set_element(&mut self.user_state, &path, value.copy()?)?,
                (None, Some((_, leaf))) => {
                    let Some((dtype, shape)) = leaf.tensor() else { continue };
                    let wanted = Wanted::of(schema, position, dtype, vec![TensorBox::whole(shape)]);
                    plan.wanted.extend(wanted.map(|wanted| Wanted { is_same_on_all: false, ..wanted }));
                    self.places.push(Place::User(path));
                }
                (None, None) => {}
            }
        }
        sort_by_schema(&mut plan, &mut self.places);
        Ok(plan)
    }

    fn memory(&mut self, index: usize, wanted: &Wanted) -> std::result::Result<Memory, StateError> {
        match &self.places[index] {
            Place::Entry { local, destination } => match &self.plans[*local] {
                Some(plan) => plan.memory(&self.optimizer.locals()[*local], &plan.destinations[*destination]),
                None => Memory::fresh(DType::U8, &[0], &[]),
            },
            Place::User(_) => Memory::fresh(wanted.dtype, &wanted.shape, &wanted.boxes),
        }
    }

    fn filled(&mut self, index: usize, memory: Memory) -> std::result::Result<(), StateError> {
        match &self.places[index] {
            Place::Entry { local, destination } => {
                if let Some(plan) = &mut self.plans[*local] {
                    let destination = plan.destinations[*destination].clone();
                    plan.filled(&self.optimizer.locals()[*local], &destination, memory)?;
                }
                Ok(())
            }
            Place::User(path) => {
                let value = memory.into_value(true, &candle_core::Device::Cpu)?;
                set_element(&mut self.user_state, path, value)
            }
        }
    }

    fn wanted_on(&self, index: usize, rank: usize) -> Option<Vec<TensorBox>> {
        let Place::Entry { local, destination } = self.places.get(index)? else { return None };
        let local_param = &self.optimizer.locals()[*local];
        let destination = self.plans[*local].as_ref()?.destinations.get(*destination)?;
        match destination.param {
            Some(param) => self.optimizer.parameters().boxes_on(&local_param.handle.params[param].fqn, rank).ok(),
            None => Some(vec![TensorBox::whole(&destination.shape)]),
        }
    }

    fn commit(&mut self) -> Result<()> {
        Ok(())
    }
}

impl LocalTarget<'_> {
    /// Asks for the tensors of a local parameter's state.
    fn want(&mut self, local: usize, entry_plan: &EntryPlan, schema: &Schema, plan: &mut Plan) -> Result<()> {
        let local_param = &self.optimizer.locals()[local];
        let fqns = local_param.fqns();
        let first = fqns.first().map_or("", String::as_str);
        for (destination, tensor) in entry_plan.destinations.iter().enumerate() {
            let boxes = match tensor.param {
                Some(param) => self.optimizer.parameters().boxes(&local_param.handle.params[param].fqn)?,
                None => vec![TensorBox::whole(&tensor.shape)],
            };
            plan.wanted.extend(Wanted::of(schema, tensor.position, tensor.dtype, boxes));
            self.places.push(Place::Entry { local, destination });
        }
        entry_plan.add_scalars(first, &mut plan.agreed);
        Ok(())
    }
}
