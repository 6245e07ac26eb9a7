//! The optimizers of a live target: saved state planned for them, and what belongs to no parameter.

use fsdp_state::engine::{LoadOptions, Plan, Values};
use fsdp_state::{Mismatch, Schema};

use super::{LiveTarget, Place, file_dtype};
use crate::algorithm::Initial;
use crate::optimizer::Optimizer;
use crate::parameters::ShardedParameters;
use crate::state::OptimStateError;
use crate::state::entry::{EntryOptions, Saved};
use crate::state::groups::agree_on_groups;
use crate::state::incoming::{Incoming, plan_user_state};
use crate::state::saved::SavedOptim;
use crate::{NnError, Result};

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
        if saved.groups.is_empty() && !optimizers.is_empty() {
            plan.report.missing.push("param_groups".to_owned());
        }
        if saved.is_empty() {
            // Nothing to load is no reason to lose what is there.
            return Ok(());
        }
        for (index, optimizer) in optimizers.iter().enumerate() {
            // A parameter without state is reported once, not again for the group that does not name it.
            let lacks_state = missing_states(optimizer, &saved)?;
            let missing = &mut plan.report.missing;
            let groups =
                saved.groups.match_with(optimizer, missing, |fqn| lacks_state.iter().any(|lack| lack == fqn))?;
            missing.extend(lacks_state);
            // The report is to have all misfits, so that the first one does not end the plan.
            let entry_options = EntryOptions { allow_missing: true, in_place: true, cast: options.cast };
            let mismatched = &mut plan.report.mismatched;
            let incoming = Incoming::new(optimizer, &saved, groups, entry_options, |error| {
                mismatched.push(as_mismatch(error, &saved, self.parameters)?);
                Ok(())
            })?;
            for (local, entry_plan) in incoming.planned(optimizer) {
                let fqns = local.fqns();
                let first = fqns.first().map_or("", String::as_str);
                let missing = entry_plan.missing.iter().map(|name| format!("{first}.{name}"));
                plan.report.missing.extend(missing);
            }
            let places = &mut self.places;
            incoming.want(optimizer, schema, plan, |place| places.push(Place::Entry { optimizer: index, place }))?;
            // Ranks that step with other hyperparameters would drift apart.
            agree_on_groups(optimizer, &incoming.groups, &mut plan.agreed);
            self.incoming.push(incoming);
        }
        let is_held = |fqn: &str| optimizers.iter().any(|optimizer| optimizer.holds(fqn));
        plan.report.unexpected.extend(saved.states.keys().filter(|fqn| !is_held(fqn)).cloned());
        plan.report.unexpected.append(&mut saved.unexpected);
        let places = &mut self.places;
        let user_state = std::mem::take(&mut saved.user_state);
        plan_user_state(user_state, (schema, values), &mut self.user_state, plan, |path| places.push(Place::User(path)))
    }
}

/// Returns the trained parameters of an optimizer that have no saved state, though their algorithm has some from the
/// first step on and others have been saved. (A frozen parameter never has any. A never-stepped optimizer saves no
/// state at all, which one that has not stepped either does not miss; one that has would lose its own.)
fn missing_states(optimizer: &Optimizer, saved: &SavedOptim) -> Result<Vec<String>> {
    let mut missing = Vec::new();
    if saved.states.is_empty() && optimizer.is_fresh() {
        return Ok(missing);
    }
    for group in optimizer.groups() {
        let is_stateful = group.algorithm.state_entries().any(|entry| entry.initial != Initial::FirstGradient);
        for fqn in group.fqns().iter().filter(|_| is_stateful) {
            let has_state = saved.states.get(fqn).is_some_and(|entries| !entries.is_empty());
            if !has_state && optimizer.parameters().requires_grad(fqn)? {
                missing.push(fqn.clone());
            }
        }
    }
    Ok(missing)
}

/// Turns the error of an entry that does not fit into a line of a report. Other errors stay errors.
fn as_mismatch(error: NnError, saved: &SavedOptim, parameters: &ShardedParameters) -> Result<Mismatch> {
    let NnError::OptimState { error: kind, .. } = &error else { return Err(error) };
    match kind {
        OptimStateError::WrongShape { fqn, name, .. } | OptimStateError::WrongDType { fqn, name, .. } => {
            let entry = saved.states.get(fqn).and_then(|entries| entries.get(name));
            let dtype = file_dtype(parameters.dtype(fqn)?).map_or_else(String::new, |dtype| dtype.to_string());
            Ok(Mismatch {
                fqn: format!("{fqn}.{name}"),
                saved: entry.map_or_else(String::new, Saved::describe),
                current: format!("{dtype} {:?}", parameters.shape(fqn)?),
            })
        }
        OptimStateError::DifferingTypes { name, types, fqns } => {
            let fqn = fqns.first().map_or("", String::as_str);
            Ok(Mismatch { fqn: format!("{fqn}.{name}"), saved: types.join(", "), current: "a tensor".to_owned() })
        }
        _ => Err(error),
    }
}
