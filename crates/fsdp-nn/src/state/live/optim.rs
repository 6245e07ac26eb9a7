//! The optimizers of a live target: what is loaded for them, and what belongs to no parameter.

use fsdp_layout::KeyPath;
use fsdp_state::engine::{Plan, Wanted};
use fsdp_state::set_element;

use super::incoming::{Incoming, state_key};
use super::{Destination, LiveTarget, TargetPart, request_tensor};
use crate::error::Result;
use crate::optimizer::Optimizer;
use crate::state::OptimStateError;
use crate::state::groups::agree_on_groups;
use crate::state::names::OptimKey;
use crate::state::saved::{LoadContext, SavedOptim};

impl LiveTarget<'_> {
    /// Plans the state and the groups of all optimizers, and the state under users' keys. `parts`
    /// are the parts of the source that belong to optimizers.
    pub(super) fn plan_optimizers(
        &mut self,
        load: &LoadContext<'_>,
        parts: &[(OptimKey, usize)],
        plan: &mut Plan,
    ) -> Result<()> {
        let optimizers: Vec<&Optimizer> = self
            .optimizers
            .iter()
            .map(|optimizer| &**optimizer)
            .collect();
        let mut saved = SavedOptim::new(self.parameters, load, parts, &self.rename_in_optimizers)?;
        if self.exact.is_some() {
            check_all_held(&optimizers, &saved)?;
        } else {
            if saved.groups.groups.is_empty() && !optimizers.is_empty() {
                plan.report.missing.push("param_groups".to_owned());
            }
            if saved.is_empty() {
                // If there is nothing to load for parameters, existing state is kept.
                return self.plan_user_state(saved.user_state, load, plan);
            }
        }
        for (index, optimizer) in optimizers.iter().enumerate() {
            let mut incoming = Incoming::new(
                optimizer,
                &mut saved,
                load.options.cast,
                self.exact.as_ref(),
                &mut plan.report,
            )?;
            for (local, (param, entry_plan)) in optimizer
                .locals()
                .iter()
                .zip(&mut incoming.plans)
                .enumerate()
            {
                let Some(entry_plan) = entry_plan else {
                    continue;
                };
                for tensor in entry_plan.tensors.drain(..) {
                    let (wanted, memory, part) = match tensor.parameter {
                        Some((fqn, memory, memory_kind)) => {
                            let wanted = Wanted::new(
                                load.schema,
                                tensor.position,
                                tensor.target_dtype,
                                memory.boxes(),
                            );
                            (
                                wanted,
                                Some((memory.into(), memory_kind)),
                                TargetPart::EntryLike(fqn),
                            )
                        }
                        None => {
                            let part = TargetPart::Entry {
                                optimizer: index,
                                local,
                                name: tensor.name,
                            };
                            (Wanted::whole(load.schema, tensor.position), None, part)
                        }
                    };
                    if let Some(mut wanted) = wanted {
                        wanted.tied_positions = tensor.tied_positions;
                        let destination = Destination { memory, part };
                        request_tensor(wanted, destination, &mut self.destinations, plan);
                    }
                }
                entry_plan.add_scalars(&param.fqns()[0], &mut plan.common.values);
            }
            // Ranks that step with other hyperparameters would drift apart.
            agree_on_groups(optimizer, &incoming.groups, &mut plan.common.values);
            self.incoming.push(incoming);
        }
        let unknown = saved.states.keys().filter(|fqn| !is_held(&optimizers, fqn));
        let unexpected = unknown.chain(&saved.unexpected);
        plan.report
            .unexpected
            .extend(unexpected.map(|fqn| state_key(fqn)));
        self.plan_user_state(saved.user_state, load, plan)
    }

    /// Plans state under keys of the user's own, which may differ between ranks. Small values are
    /// here already; tensors are asked for, whole.
    fn plan_user_state(
        &mut self,
        user_state: Vec<(KeyPath, usize)>,
        load: &LoadContext<'_>,
        plan: &mut Plan,
    ) -> Result<()> {
        for (path, position) in user_state {
            if let Some(value) = load.values.get(&position) {
                set_element(&mut self.user_state, &path, value.copy()?)?;
            } else if let Some(wanted) = Wanted::whole(load.schema, position) {
                let destination = Destination {
                    memory: None,
                    part: TargetPart::UserState(path),
                };
                request_tensor(wanted, destination, &mut self.destinations, plan);
            }
        }
        Ok(())
    }
}

/// Returns `true` if one of the optimizers holds a parameter.
fn is_held(optimizers: &[&Optimizer], fqn: &str) -> bool {
    optimizers.iter().any(|optimizer| optimizer.holds(fqn))
}

/// Refuses state and groups of parameters that no optimizer has.
fn check_all_held(optimizers: &[&Optimizer], saved: &SavedOptim) -> Result<()> {
    // The first by name, since the keys are in no order.
    let unknown = saved.states.keys().filter(|fqn| !is_held(optimizers, fqn));
    if let Some(fqn) = unknown.min() {
        let count = optimizers
            .iter()
            .map(|optimizer| optimizer.fqns().count())
            .sum();
        return Err(OptimStateError::UnknownState {
            key: fqn.clone(),
            count,
        }
        .into());
    }
    for (index, group) in saved.groups.groups.iter().enumerate() {
        if let Some(key) = group.params.iter().find(|fqn| !is_held(optimizers, fqn)) {
            return Err(OptimStateError::UnknownParam {
                index,
                key: key.clone(),
            }
            .into());
        }
    }
    Ok(())
}
