//! The state that one optimizer is about to get. It is planned from saved state, its memory is lent to a source, and it
//! is complete once all memory is filled.

use std::result;

use fsdp_layout::{DType, KeyPath, TensorBox};
use fsdp_state::engine::{Plan, Values, Wanted};
use fsdp_state::{Memory, Schema, StateDict, StateError, set_element};

use super::entry::{Destination, EntryOptions, EntryPlan};
use super::saved::SavedOptim;
use crate::optimizer::{GroupUpdate, LocalParam, Optimizer, ParamState};
use crate::{NnError, Result};

/// The state and the groups that an optimizer is to have.
pub(crate) struct Incoming {
    /// The state of each local parameter; `None` if nothing was saved for it.
    plans: Vec<Option<EntryPlan>>,
    /// The hyperparameters of each group.
    pub(crate) groups: Vec<GroupUpdate>,
}

/// The place of a wanted tensor in an optimizer's state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EntryPlace {
    /// The position of the local parameter.
    local: usize,
    /// The position of the tensor in the parameter's plan.
    destination: usize,
}

impl Incoming {
    /// Plans the state of all local parameters. The new hyperparameters, in `groups`, decide which entries there must
    /// be.
    ///
    /// `misfit` gets the error of a parameter that cannot take its saved state. If it returns `Ok`, the parameter gets
    /// no state; if it returns an error, so does this function.
    pub(crate) fn new(
        optimizer: &Optimizer,
        saved: &SavedOptim,
        groups: Vec<GroupUpdate>,
        options: EntryOptions,
        mut misfit: impl FnMut(NnError) -> Result<()>,
    ) -> Result<Self> {
        let mut plans = Vec::with_capacity(optimizer.locals().len());
        for (index, local) in optimizer.locals().iter().enumerate() {
            let fqns = local.fqns();
            let entries: Vec<_> = fqns.iter().map(|fqn| saved.states.get(fqn).filter(|e| !e.is_empty())).collect();
            let (algorithm, _) = &groups[optimizer.group_of_local(index)];
            plans.push(match EntryPlan::new(local, algorithm, &entries, options) {
                Ok(plan) => plan,
                Err(error) => {
                    misfit(error)?;
                    None
                }
            });
        }
        Ok(Incoming { plans, groups })
    }

    /// Returns the local parameters that have a plan, and the plans.
    pub(crate) fn planned<'a>(
        &'a self,
        optimizer: &'a Optimizer,
    ) -> impl Iterator<Item = (&'a LocalParam, &'a EntryPlan)> {
        optimizer.locals().iter().zip(&self.plans).filter_map(|(local, plan)| Some((local, plan.as_ref()?)))
    }

    /// Adds all tensors of the state to what `plan` asks a source for, and all scalars to what must be the same on all
    /// ranks. `place` gets the place of each tensor, in the same order.
    pub(crate) fn want(
        &self,
        optimizer: &Optimizer,
        schema: &Schema,
        plan: &mut Plan,
        mut place: impl FnMut(EntryPlace),
    ) -> Result<()> {
        let parameters = optimizer.parameters();
        for (local_index, (local, entry_plan)) in optimizer.locals().iter().zip(&self.plans).enumerate() {
            let Some(entry_plan) = entry_plan else { continue };
            for (destination, tensor) in entry_plan.destinations.iter().enumerate() {
                let (boxes, becomes) = match tensor.param {
                    Some(param) => {
                        let fqn = &local.handle.params[param].fqn;
                        // Entries like the parameter take its dtype; others keep the one that was saved.
                        let of_parameter = fsdp_flat::dtype::from_candle(parameters.dtype(fqn)?);
                        let is_like = optimizer.is_like_parameter(fqn, &tensor.name);
                        (parameters.boxes(fqn)?, of_parameter.filter(|_| is_like).unwrap_or(tensor.dtype))
                    }
                    None => (vec![TensorBox::whole(&tensor.shape)], tensor.dtype),
                };
                if let Some(wanted) = Wanted::of(schema, tensor.position, becomes, boxes) {
                    plan.wanted.push(wanted);
                    place(EntryPlace { local: local_index, destination });
                }
            }
            entry_plan.add_scalars(local.fqns().first().map_or("", String::as_str), &mut plan.agreed);
        }
        Ok(())
    }

    /// Returns the plan and the destination of a wanted tensor.
    fn at(&mut self, place: EntryPlace) -> Option<(&mut EntryPlan, Destination)> {
        let plan = self.plans[place.local].as_mut()?;
        let destination = plan.destinations[place.destination].clone();
        Some((plan, destination))
    }

    /// Returns the memory that a wanted tensor goes to.
    pub(crate) fn memory(&mut self, optimizer: &Optimizer, place: EntryPlace) -> result::Result<Memory, StateError> {
        match self.at(place) {
            Some((plan, destination)) => plan.memory(&optimizer.locals()[place.local], &destination),
            None => Memory::fresh(DType::U8, &[0], &[]),
        }
    }

    /// Takes back the filled memory of a wanted tensor.
    pub(crate) fn filled(
        &mut self,
        optimizer: &Optimizer,
        place: EntryPlace,
        memory: Memory,
    ) -> result::Result<(), StateError> {
        match self.at(place) {
            Some((plan, destination)) => plan.filled(&optimizer.locals()[place.local], &destination, memory),
            None => Ok(()),
        }
    }

    /// Returns the boxes of a wanted tensor that a rank wants.
    pub(crate) fn wanted_on(&self, optimizer: &Optimizer, place: EntryPlace, rank: usize) -> Option<Vec<TensorBox>> {
        let destination = self.plans[place.local].as_ref()?.destinations.get(place.destination)?;
        match destination.param {
            Some(param) => {
                let fqn = &optimizer.locals()[place.local].handle.params[param].fqn;
                optimizer.parameters().boxes_on(fqn, rank).ok()
            }
            None => Some(vec![TensorBox::whole(&destination.shape)]),
        }
    }

    /// Returns `true` if a wanted tensor is shaped like its parameter. Only such tensors may go to the live state's
    /// memory.
    pub(crate) fn may_be_live(&self, place: EntryPlace) -> bool {
        let plan = self.plans[place.local].as_ref();
        plan.is_some_and(|plan| plan.destinations[place.destination].param.is_some())
    }

    /// Returns the new state of a local parameter; `None` if nothing was saved for it.
    pub(crate) fn state_of(&self, local: usize) -> Option<&ParamState> {
        self.plans[local].as_ref().map(|plan| &plan.state)
    }

    /// Returns the states of all local parameters, and the groups.
    pub(crate) fn into_parts(self) -> (Vec<Option<ParamState>>, Vec<GroupUpdate>) {
        (self.plans.into_iter().map(|plan| plan.map(|plan| plan.state)).collect(), self.groups)
    }
}

/// Plans state under keys of the user's own, which may differ between ranks. Small values are here already and go to
/// `state`. Tensors are added to what `plan` asks a source for, and `place` gets their paths.
pub(crate) fn plan_user_state(
    user_state: Vec<(KeyPath, usize)>,
    (schema, values): (&Schema, &Values),
    state: &mut StateDict,
    plan: &mut Plan,
    mut place: impl FnMut(KeyPath),
) -> Result<()> {
    for (path, position) in user_state {
        if let Some(value) = values.get(&position) {
            set_element(state, &path, value.copy()?)?;
            continue;
        }
        let Some((dtype, shape)) = schema.get(position).and_then(|(_, leaf)| leaf.tensor()) else { continue };
        let boxes = vec![TensorBox::whole(shape)];
        if let Some(wanted) = Wanted::of(schema, position, dtype, boxes) {
            plan.wanted.push(Wanted { is_same_on_all: false, ..wanted });
            place(path);
        }
    }
    Ok(())
}
