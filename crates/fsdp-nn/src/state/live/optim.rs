//! The optimizers of a live target: what is loaded for them, and what belongs to no parameter.

use std::collections::HashSet;

use fsdp_layout::KeyPath;
use fsdp_state::engine::{LoadOptions, Plan, Values, Wanted};
use fsdp_state::{LoadReport, Mismatch, Schema, set_element};

use super::{Exact, LiveTarget, Of, Place};
use crate::algorithm::Initial;
use crate::optimizer::{GroupUpdate, Optimizer};
use crate::state::OptimStateError;
use crate::state::entry::{EntryOptions, EntryPlan, Saved};
use crate::state::groups::agree_on_groups;
use crate::state::names::OptimKey;
use crate::state::saved::SavedOptim;
use crate::{NnError, Result};

/// The state and the groups that an optimizer is about to get.
pub(super) struct Incoming {
    /// The state of each local parameter; `None` if nothing was saved for it.
    pub(super) plans: Vec<Option<EntryPlan>>,
    /// The hyperparameters of each group.
    pub(super) groups: Vec<GroupUpdate>,
}

impl LiveTarget<'_> {
    /// Plans the state and the groups of all optimizers, and the state under users' keys. `parts` are the parts of the
    /// source that belong to optimizers.
    pub(super) fn plan_optimizers(
        &mut self,
        schema: &Schema,
        values: &Values,
        parts: &[(OptimKey, usize)],
        options: &LoadOptions,
        plan: &mut Plan,
    ) -> Result<()> {
        let optimizers: Vec<&Optimizer> = self.optimizers.iter().map(|optimizer| &**optimizer).collect();
        let mut saved =
            SavedOptim::new(self.parameters, &optimizers, schema, values, parts, &self.rename_in_optimizers)?;
        if self.exact.is_some() {
            check_known(&optimizers, &saved)?;
        } else {
            if saved.groups.groups.is_empty() && !optimizers.is_empty() {
                plan.report.missing.push("param_groups".to_owned());
            }
            if saved.is_empty() {
                // Nothing to load is no reason to lose what is there.
                return Ok(());
            }
        }
        for (index, optimizer) in optimizers.iter().enumerate() {
            let mut incoming = Incoming::new(optimizer, &mut saved, options.cast, self.exact, &mut plan.report)?;
            for (local, (param, entry_plan)) in optimizer.locals().iter().zip(&mut incoming.plans).enumerate() {
                let Some(entry_plan) = entry_plan else { continue };
                for tensor in entry_plan.tensors.drain(..) {
                    let (wanted, place) = match tensor.like {
                        Some((fqn, memory)) => {
                            let wanted = Wanted::of(schema, tensor.position, tensor.becomes, memory.boxes());
                            (wanted, Place { live: Some(memory.into()), of: Of::EntryLike(fqn) })
                        }
                        None => {
                            let of = Of::Entry { optimizer: index, local, name: tensor.name };
                            (Wanted::whole(schema, tensor.position), Place { live: None, of })
                        }
                    };
                    plan.wanted.extend(wanted);
                    self.places.push(place);
                }
                entry_plan.add_scalars(param.fqns().first().map_or("", String::as_str), &mut plan.agreed);
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
                self.places.push(Place { live: None, of: Of::User(path) });
            }
        }
        Ok(())
    }
}

impl Incoming {
    /// Plans the groups and the state of all local parameters of an optimizer. The new hyperparameters decide which
    /// entries there must be.
    ///
    /// What is missing or does not fit goes into the report. In an exact load it is an error of its own.
    fn new(
        optimizer: &Optimizer,
        saved: &mut SavedOptim,
        cast: bool,
        exact: Option<Exact>,
        report: &mut LoadReport,
    ) -> Result<Self> {
        // A parameter without state is reported once, not again for the group that does not name it. In an exact load it
        // goes with the others of its group.
        let lacks_state = if exact.is_some() { HashSet::new() } else { missing_states(optimizer, saved)? };
        let is_missed = |fqn: &str| exact.is_some() || lacks_state.contains(fqn);
        let mut missing = Vec::new();
        let groups = saved.groups.match_with(optimizer, &mut missing, is_missed)?;
        // A group that is not saved (`param_groups.<index>`) keeps its hyperparameters. One that is saved must have all
        // of them, and each that it lacks is `param_groups.<index>.<key>`.
        if let Some(key) = missing.iter().find(|key| exact.is_some() && key.split('.').count() > 2) {
            return Err(OptimStateError::MissingKey { key: key.clone() }.into());
        }
        let options = EntryOptions { allow_missing: exact.is_none(), cast };
        let mut plans = Vec::with_capacity(optimizer.locals().len());
        for (index, local) in optimizer.locals().iter().enumerate() {
            let fqns = local.fqns();
            let first = fqns.first().map_or("", String::as_str);
            let entries: Vec<_> = fqns.iter().map(|fqn| saved.states.get(fqn).filter(|e| !e.is_empty())).collect();
            let (algorithm, _) = &groups[optimizer.group_of_local(index)];
            let plan = match EntryPlan::new(local, algorithm, &entries, options) {
                // The report is to have all misfits, so that the first one does not end the plan.
                Err(error) if exact.is_none() => {
                    report.mismatched.push(as_mismatch(error, optimizer, saved)?);
                    None
                }
                plan => plan?,
            };
            for name in plan.iter().flat_map(|plan| &plan.missing) {
                if exact.is_some() {
                    let fqn = if local.is_flat { local.name() } else { first.to_owned() };
                    return Err(OptimStateError::MissingEntry { fqn, name: (*name).to_owned() }.into());
                }
                missing.push(format!("{first}.{name}"));
            }
            plans.push(plan);
        }
        match exact {
            // A FlatParameter's plan has compared its parameters already; original ones have a plan each.
            Some(Exact { allow_missing_state }) if !allow_missing_state && optimizer.parameters().use_orig_params() => {
                check_presence(optimizer, saved)?;
            }
            Some(_) => {}
            None => report.missing.extend(missing.into_iter().chain(lacks_state)),
        }
        Ok(Incoming { plans, groups })
    }
}

/// Returns the trained parameters of an optimizer that have no saved state, though their algorithm has some from the
/// first step on and others have been saved. (A frozen parameter never has any. A never-stepped optimizer saves no
/// state at all, which one that has not stepped either does not miss; one that has would lose its own.)
fn missing_states(optimizer: &Optimizer, saved: &SavedOptim) -> Result<HashSet<String>> {
    let mut missing = HashSet::new();
    if saved.states.is_empty() && optimizer.is_fresh() {
        return Ok(missing);
    }
    for group in optimizer.groups() {
        let is_stateful = group.algorithm.state_entries().any(|entry| entry.initial != Initial::FirstGradient);
        for fqn in group.fqns().iter().filter(|_| is_stateful) {
            if !saved.has_state(fqn) && optimizer.parameters().requires_grad(fqn)? {
                missing.insert(fqn.clone());
            }
        }
    }
    Ok(missing)
}

/// Turns the error of an entry that does not fit into a line of a report. Other errors stay errors.
fn as_mismatch(error: NnError, optimizer: &Optimizer, saved: &SavedOptim) -> Result<Mismatch> {
    let NnError::OptimState { error: kind, .. } = &error else { return Err(error) };
    match kind {
        OptimStateError::WrongShape { fqn, name, .. } | OptimStateError::WrongDType { fqn, name, .. } => {
            let (parameters, entry) = (optimizer.parameters(), saved.states.get(fqn).and_then(|e| e.get(name)));
            let dtype = fsdp_flat::dtype::from_candle(parameters.dtype(fqn)?);
            let dtype = dtype.map_or_else(String::new, |dtype| dtype.to_string());
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

/// Refuses state and groups of parameters that no optimizer has.
fn check_known(optimizers: &[&Optimizer], saved: &SavedOptim) -> Result<()> {
    let is_held = |fqn: &str| optimizers.iter().any(|optimizer| optimizer.holds(fqn));
    if let Some(fqn) = saved.states.keys().filter(|fqn| !is_held(fqn)).min() {
        let count = optimizers.iter().map(|optimizer| optimizer.fqns().count()).sum();
        return Err(OptimStateError::UnknownState { key: fqn.clone(), count }.into());
    }
    for (index, group) in saved.groups.groups.iter().enumerate() {
        if let Some(key) = group.params.iter().find(|fqn| !is_held(fqn)) {
            return Err(OptimStateError::UnknownParam { index, key: key.clone() }.into());
        }
    }
    Ok(())
}

/// Refuses state of some of a unit's trained parameters without that of others.
fn check_presence(optimizer: &Optimizer, saved: &SavedOptim) -> Result<()> {
    for handle in &optimizer.parameters().handles {
        let Some(other) = handle.params.iter().find(|param| saved.has_state(&param.fqn)) else { continue };
        for (param, numel) in handle.params.iter().zip(handle.layout().numels()) {
            if !param.requires_grad() || *numel == 0 || saved.has_state(&param.fqn) {
                continue;
            }
            // State that begins with the first gradient is rightly missing where there was none.
            let schema = optimizer.state_schema(&param.fqn);
            if schema.iter().any(|entry| entry.initial != Initial::FirstGradient) {
                let (fqn, other) = (param.fqn.clone(), other.fqn.clone());
                return Err(OptimStateError::MissingState { fqn, other }.into());
            }
        }
    }
    Ok(())
}
