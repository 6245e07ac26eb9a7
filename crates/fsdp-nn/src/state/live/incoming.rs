//! Saved state planned for one optimizer of a live target.

use std::collections::HashSet;

use fsdp_state::{LoadReport, Mismatch};

use crate::algorithm::Initial;
use crate::error::{NnError, Result};
use crate::optimizer::{GroupUpdate, Optimizer};
use crate::state::OptimStateError;
use crate::state::entry::{EntryPlan, SavedValue};
use crate::state::saved::SavedOptim;

/// A load into an optimizer that is not in use yet. The first value that does not fit is an error
/// of its own, rather than a line of the report.
pub(crate) struct ExactLoad {
    /// `true` if a trained parameter may lack state that others of its unit have.
    pub(crate) allow_missing_state: bool,
    /// The arguments of the call, which must be the same on all ranks.
    pub(crate) arguments: String,
}

/// The state and the groups that an optimizer is about to get.
pub(super) struct Incoming {
    /// The state of each local parameter; `None` if nothing was saved for it.
    pub(super) plans: Vec<Option<EntryPlan>>,
    /// The hyperparameters of each group.
    pub(super) groups: Vec<GroupUpdate>,
}

impl Incoming {
    /// Plans the groups and the state of all local parameters of an optimizer. The new
    /// hyperparameters decide which entries there must be.
    ///
    /// State that is missing or does not fit is listed in the report. An exact load returns a typed
    /// error for it instead.
    pub(super) fn new(
        optimizer: &Optimizer,
        saved: &mut SavedOptim,
        cast: bool,
        exact: Option<&ExactLoad>,
        report: &mut LoadReport,
    ) -> Result<Self> {
        // A parameter without state is reported once, not again for the group that does not name
        // it. In an exact load it goes with the others of its group.
        let fqns_without_state = if exact.is_some() {
            HashSet::new()
        } else {
            find_fqns_without_state(optimizer, saved)?
        };
        let mut missing = Vec::new();
        let groups = saved.groups.match_with(optimizer, &mut missing, |fqn| {
            exact.is_some() || fqns_without_state.contains(fqn)
        })?;
        // A group that was not saved (`param_groups.<index>` in `missing`) keeps its
        // hyperparameters. A group that was saved must have all of them; one that it lacks is
        // `param_groups.<index>.<key>` in `missing`.
        if let Some(key) = missing
            .iter()
            .find(|key| exact.is_some() && key.split('.').count() > 2)
        {
            return Err(OptimStateError::missing_key(key));
        }
        optimizer.check_algorithms(groups.iter().map(|(algorithm, _)| algorithm))?;
        let mut plans = Vec::with_capacity(optimizer.locals().len());
        for local in optimizer.locals() {
            let fqns = local.fqns();
            let first_fqn = &fqns[0];
            let entries: Vec<_> = fqns
                .iter()
                .map(|fqn| saved.states.get(fqn).filter(|entries| !entries.is_empty()))
                .collect();
            let (algorithm, _) = &groups[local.group];
            let plan = match EntryPlan::new(local, algorithm, &entries, exact.is_none(), cast) {
                // The report is to have all misfits, so that the first one does not end the plan.
                Err(error) if exact.is_none() => {
                    report
                        .mismatched
                        .push(as_mismatch(error, optimizer, saved)?);
                    None
                }
                plan => plan?,
            };
            let foreign = plan.iter().flat_map(|plan| &plan.foreign);
            report
                .unexpected
                .extend(foreign.map(|name| state_key(&format!("{first_fqn}.{name}"))));
            for name in plan.iter().flat_map(|plan| &plan.missing) {
                if exact.is_some() {
                    let fqn = if local.is_flat {
                        local.name()
                    } else {
                        first_fqn.clone()
                    };
                    return Err(OptimStateError::MissingEntry {
                        fqn,
                        name: (*name).to_owned(),
                    }
                    .into());
                }
                missing.push(state_key(&format!("{first_fqn}.{name}")));
            }
            plans.push(plan);
        }
        match exact {
            // A FlatParameter's plan has compared its parameters already; original ones have a plan
            // each.
            Some(exact) => {
                if !exact.allow_missing_state && optimizer.parameters().use_orig_params() {
                    check_all_have_state(optimizer, saved)?;
                }
            }
            None => report.missing.extend(
                missing
                    .into_iter()
                    .chain(fqns_without_state.iter().map(|fqn| state_key(fqn))),
            ),
        }
        Ok(Incoming { plans, groups })
    }
}

/// Returns the name of a parameter's state, or of an entry of it, in a report, where the
/// parameter's own name stands for the parameter itself.
pub(super) fn state_key(name: &str) -> String {
    format!("state.{name}")
}

/// Returns the trained parameters of an optimizer that have no saved state, though their algorithm
/// has some from the first step on and others have been saved. A frozen parameter never has any. An
/// optimizer that has never stepped saves no state at all. An optimizer that has not stepped either
/// misses nothing then, but one that has stepped would lose its own state.
fn find_fqns_without_state(optimizer: &Optimizer, saved: &SavedOptim) -> Result<HashSet<String>> {
    let mut missing = HashSet::new();
    if saved.states.is_empty() && optimizer.is_fresh() {
        return Ok(missing);
    }
    for group in optimizer.groups() {
        let is_stateful = group
            .algorithm
            .state_entries()
            .any(|entry| entry.initial != Initial::FirstGradient);
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
    let NnError::OptimState { error: kind, .. } = &error else {
        return Err(error);
    };
    match kind {
        OptimStateError::WrongShape { fqn, name, .. }
        | OptimStateError::WrongDType { fqn, name, .. } => {
            let parameters = optimizer.parameters();
            let entry = saved.states.get(fqn).and_then(|entries| entries.get(name));
            let dtype = parameters.place(fqn)?.0.file_dtype();
            let shape = match kind {
                OptimStateError::WrongShape { expected, .. } => expected,
                _ => parameters.shape(fqn)?,
            };
            Ok(Mismatch {
                fqn: state_key(&format!("{fqn}.{name}")),
                saved: entry.map_or_else(String::new, SavedValue::describe),
                current: format!("{dtype} {shape:?}"),
            })
        }
        OptimStateError::DifferingTypes { name, types, fqns } => Ok(Mismatch {
            fqn: state_key(&format!("{}.{name}", fqns[0])),
            saved: types.join(", "),
            current: "a tensor".to_owned(),
        }),
        _ => Err(error),
    }
}

/// Refuses state of some of a unit's trained parameters without that of others.
fn check_all_have_state(optimizer: &Optimizer, saved: &SavedOptim) -> Result<()> {
    let lacking = find_fqns_without_state(optimizer, saved)?;
    for handle in &optimizer.parameters().handles {
        let params = handle.params.iter().zip(handle.layout().numels());
        let mut lacking =
            params.filter(|(param, numel)| **numel > 0 && lacking.contains(&param.fqn));
        let stateful = handle
            .params
            .iter()
            .find(|param| saved.has_state(&param.fqn));
        if let (Some((param, _)), Some(stateful)) = (lacking.next(), stateful) {
            return Err(OptimStateError::MissingState {
                fqn: param.fqn.clone(),
                other: stateful.fqn.clone(),
            }
            .into());
        }
    }
    Ok(())
}
