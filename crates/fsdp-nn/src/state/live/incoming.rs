//! Saved state planned for one optimizer of a live target.

use fsdp_state::{LoadReport, Mismatch};

use crate::algorithm::Initial;
use crate::optimizer::{GroupUpdate, LocalParam, Optimizer};
use crate::parameters::ShardedParameters;
use crate::state::OptimStateError;
use crate::state::entry::{EntryOptions, EntryPlan, Saved};
use crate::state::saved::SavedOptim;
use crate::{NnError, Result};

/// The state and the groups that an optimizer is about to get.
pub(super) struct Incoming {
    /// The state of each local parameter; `None` if nothing was saved for it.
    pub(super) plans: Vec<Option<EntryPlan>>,
    /// The hyperparameters of each group.
    pub(super) groups: Vec<GroupUpdate>,
}

impl Incoming {
    /// Plans the state of all local parameters. The new hyperparameters, in `groups`, decide which entries there must
    /// be.
    ///
    /// `misfit` gets the error of a parameter that cannot take its saved state. If it returns `Ok`, the parameter gets
    /// no state; if it returns an error, so does this function.
    fn new(
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

    /// Returns the local parameters that get state, and the plans of it.
    fn planned<'a>(&'a self, optimizer: &'a Optimizer) -> impl Iterator<Item = (&'a LocalParam, &'a EntryPlan)> {
        optimizer.locals().iter().zip(&self.plans).filter_map(|(local, plan)| Some((local, plan.as_ref()?)))
    }

    /// Plans state that fits as far as it does, and puts what does not into the report.
    pub(super) fn as_far_as_it_fits(
        optimizer: &Optimizer,
        saved: &mut SavedOptim,
        cast: bool,
        report: &mut LoadReport,
    ) -> Result<Self> {
        // A parameter without state is reported once, not again for the group that does not name it.
        let lacks_state = missing_states(optimizer, saved)?;
        let is_missed = |fqn: &str| lacks_state.iter().any(|lack| lack == fqn);
        let groups = saved.groups.match_with(optimizer, &mut report.missing, is_missed)?;
        report.missing.extend(lacks_state);
        // The report is to have all misfits, so that the first one does not end the plan.
        let options = EntryOptions { allow_missing: true, cast };
        let incoming = Incoming::new(optimizer, saved, groups, options, |error| {
            report.mismatched.push(as_mismatch(error, saved, optimizer.parameters())?);
            Ok(())
        })?;
        for (local, plan) in incoming.planned(optimizer) {
            let fqns = local.fqns();
            let first = fqns.first().map_or("", String::as_str);
            report.missing.extend(plan.missing.iter().map(|name| format!("{first}.{name}")));
        }
        Ok(incoming)
    }

    /// Plans state that must fit: the first misfit is an error.
    pub(super) fn exact(
        optimizer: &Optimizer,
        saved: &mut SavedOptim,
        cast: bool,
        allow_missing_state: bool,
    ) -> Result<Self> {
        let mut missing = Vec::new();
        // Unnamed parameters are no error here: they go with the others of their group.
        let groups = saved.groups.match_with(optimizer, &mut missing, |_| true)?;
        // A group that is not saved (`param_groups.<index>`) keeps its hyperparameters. One that is saved must have all
        // of them, and each that it lacks is `param_groups.<index>.<key>`.
        if let Some(key) = missing.into_iter().find(|key| key.split('.').count() > 2) {
            return Err(OptimStateError::MissingKey { key }.into());
        }
        let incoming = Incoming::new(optimizer, saved, groups, EntryOptions { allow_missing: false, cast }, Err)?;
        for (local, plan) in incoming.planned(optimizer) {
            if let (Some(name), Some(fqn)) = (plan.missing.first(), local.fqns().first()) {
                let fqn = if local.is_flat { local.name() } else { fqn.clone() };
                return Err(OptimStateError::MissingEntry { fqn, name: (*name).to_owned() }.into());
            }
        }
        // A FlatParameter's plan has compared its parameters already; original ones have a plan each.
        if !allow_missing_state && optimizer.parameters().use_orig_params() {
            check_presence(optimizer, saved)?;
        }
        Ok(incoming)
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
            if !saved.has_state(fqn) && optimizer.parameters().requires_grad(fqn)? {
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
