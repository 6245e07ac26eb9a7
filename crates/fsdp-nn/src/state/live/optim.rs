//! The optimizers of a live target: what is loaded for them, and what belongs to no parameter.

use fsdp_layout::KeyPath;
use fsdp_state::engine::{LoadOptions, Plan, Values, Wanted};
use fsdp_state::{Schema, set_element};

use super::incoming::Incoming;
use super::{LiveTarget, Place};
use crate::Result;
use crate::optimizer::Optimizer;
use crate::state::OptimStateError;
use crate::state::groups::agree_on_groups;
use crate::state::saved::SavedOptim;

impl LiveTarget<'_> {
    /// Plans the state and the groups of all optimizers, and the state under users' keys.
    pub(super) fn plan_optimizers(
        &mut self,
        schema: &Schema,
        values: &Values,
        options: &LoadOptions,
        plan: &mut Plan,
    ) -> Result<()> {
        let optimizers: Vec<&Optimizer> = self.optimizers.iter().map(|optimizer| &**optimizer).collect();
        let parts = &self.sorted.optim;
        let mut saved =
            SavedOptim::new(self.parameters, &optimizers, schema, values, parts, &self.rename_in_optimizers)?;
        if self.exact.is_some() {
            check_known(&optimizers, &saved)?;
        } else if saved.groups.is_empty() && !optimizers.is_empty() {
            plan.report.missing.push("param_groups".to_owned());
        }
        if self.exact.is_none() && saved.is_empty() {
            // Nothing to load is no reason to lose what is there.
            return Ok(());
        }
        for (index, optimizer) in optimizers.iter().enumerate() {
            let incoming = match self.exact {
                Some(exact) => Incoming::exact(optimizer, &mut saved, options.cast, exact.allow_missing_state)?,
                None => Incoming::as_far_as_it_fits(optimizer, &mut saved, options.cast, &mut plan.report)?,
            };
            let rank = self.parameters.group().rank();
            for (at, (local, entry_plan)) in optimizer.locals().iter().zip(&incoming.plans).enumerate() {
                let Some(entry_plan) = entry_plan else { continue };
                for (destination, tensor) in entry_plan.destinations.iter().enumerate() {
                    let boxes = tensor.boxes_on(local, self.parameters, rank)?;
                    if let Some(wanted) = Wanted::of(schema, tensor.position, tensor.becomes, boxes) {
                        plan.wanted.push(wanted);
                        self.places.push(Place::Entry { optimizer: index, local: at, destination });
                    }
                }
                entry_plan.add_scalars(local.fqns().first().map_or("", String::as_str), &mut plan.agreed);
            }
            // Ranks that step with other hyperparameters would drift apart.
            agree_on_groups(optimizer, &incoming.groups, &mut plan.agreed);
            self.incoming.push(incoming);
        }
        let is_held = |fqn: &str| optimizers.iter().any(|optimizer| optimizer.holds(fqn));
        plan.report.unexpected.extend(saved.states.keys().filter(|fqn| !is_held(fqn)).cloned());
        plan.report.unexpected.append(&mut saved.unexpected);
        self.plan_user_state(saved.user_state, schema, values, plan)
    }

    /// Plans state under keys of the user's own, which may differ between ranks. Small values are here already; tensors
    /// are asked for, whole.
    fn plan_user_state(
        &mut self,
        user_state: Vec<(KeyPath, usize)>,
        schema: &Schema,
        values: &Values,
        plan: &mut Plan,
    ) -> Result<()> {
        for (path, position) in user_state {
            if let Some(value) = values.get(&position) {
                set_element(&mut self.user_state, &path, value.copy()?)?;
            } else if let Some(wanted) = Wanted::whole(schema, position) {
                plan.wanted.push(Wanted { is_same_on_all: false, ..wanted });
                self.places.push(Place::User(path));
            }
        }
        Ok(())
    }
}

/// Refuses state and groups of parameters that no optimizer has.
fn check_known(optimizers: &[&Optimizer], saved: &SavedOptim) -> Result<()> {
    let is_held = |fqn: &str| optimizers.iter().any(|optimizer| optimizer.holds(fqn));
    if let Some(fqn) = saved.states.keys().filter(|fqn| !is_held(fqn)).min() {
        let count = optimizers.iter().map(|optimizer| optimizer.fqns().count()).sum();
        return Err(OptimStateError::UnknownState { key: fqn.clone(), count }.into());
    }
    for (index, group) in saved.groups.groups().iter().enumerate() {
        if let Some(key) = group.params.iter().find(|fqn| !is_held(fqn)) {
            return Err(OptimStateError::UnknownParam { index, key: key.clone() }.into());
        }
    }
    Ok(())
}
