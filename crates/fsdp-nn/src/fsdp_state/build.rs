//! Local optimizer state as it is being loaded, value by value.

use candle_core::Tensor;
use fsdp_flat::ShardedTensor;
use fsdp_flat::storage::{owned_copy, with_bytes, zeros};
use fsdp_state::{StateDict, StateValue};

use super::OptimStateError;
use super::plan::{Plan, Planned, Plans};
use super::user_state::Carried;
use crate::optimizer::{EMPTY_PIECES, LocalParam, Optimizer};
use crate::parameters::write_boxes;
use crate::{NnError, Result};

/// Local state that grows value by value, so that no value is held twice for longer than it takes to copy it.
#[derive(Debug)]
pub(crate) struct Building<'a> {
    optimizer: &'a Optimizer,
    plans: &'a Plans,
    /// The tensors so far of each of the optimizer's parameters, flat.
    tensors: Vec<StateDict>,
}

impl<'a> Building<'a> {
    pub(crate) fn new(optimizer: &'a Optimizer, plans: &'a Plans) -> Self {
        Building { optimizer, plans, tensors: vec![StateDict::new(); plans.len()] }
    }

    /// Takes one parameter's value, which covers what this rank needs of it.
    pub(crate) fn put(&mut self, fqn: &str, name: &str, values: &ShardedTensor) -> Result<()> {
        let Some(index) = self.optimizer.local_index(fqn) else { return Ok(()) };
        match &self.plans[index] {
            Some(plan) => put(&self.optimizer.locals()[index], plan, &mut self.tensors[index], (fqn, name), values),
            None => Ok(()),
        }
    }

    pub(crate) fn finish(
        self,
        user_state: Vec<(String, Carried)>,
        groups: Option<Vec<StateValue>>,
        key_of: impl Fn(usize) -> String,
    ) -> Result<StateDict> {
        let (mut states, mut of_empty) = (StateDict::new(), StateDict::new());
        let locals = self.optimizer.locals().iter().zip(self.plans).zip(self.tensors).enumerate();
        for (index, ((local, plan), tensors)) in locals {
            let Some(plan) = plan else { continue };
            let entries = finish(local, plan, tensors)?;
            let states = if local.is_empty() { &mut of_empty } else { &mut states };
            states.insert(key_of(index), entries);
        }
        for (key, value) in user_state {
            states.insert(key, value.into_value()?);
        }
        let mut state = StateDict::new();
        state.insert("state", states);
        if let Some(groups) = groups {
            state.insert("param_groups", StateValue::List(groups));
        }
        if self.optimizer.locals().iter().any(LocalParam::is_empty) {
            state.insert(EMPTY_PIECES, of_empty);
        }
        Ok(state)
    }
}

/// Puts one of the model's parameters' values into the local state that it is a part of.
pub(crate) fn put(
    local: &LocalParam,
    plan: &Plan,
    tensors: &mut StateDict,
    (fqn, name): (&str, &str),
    values: &ShardedTensor,
) -> Result<()> {
    match plan.get(name) {
        Some(Planned::Whole) => {
            let whole = owned_copy(&values.to_whole()?)?;
            if let Some(StateValue::Tensor(first)) = tensors.get(name)
                && !same_elements(first, &whole)?
            {
                return Err(OptimStateError::DifferingScalars {
                    name: name.to_owned(),
                    values: vec!["tensors with other elements".to_owned()],
                    dtypes: vec![whole.dtype().as_str().to_owned()],
                    fqns: local.fqns(),
                }
                .into());
            }
            tensors.insert(name, whole);
        }
        Some(Planned::Piece(dtype)) => {
            let params = local.params();
            let Some(&param) = params.iter().find(|&&param| local.handle.params[param].fqn == fqn) else {
                return Ok(());
            };
            let flat = match tensors.get(name) {
                Some(StateValue::Tensor(flat)) => flat.clone(),
                _ => zeros(&[local.numel], *dtype)?,
            };
            write_boxes(values, &local.sharded_piece(&flat, param)?)?;
            tensors.insert(name, flat);
        }
        Some(Planned::Scalar(_)) | None => {}
    }
    Ok(())
}

/// The local state of one of the optimizer's parameters, from its tensors.
pub(crate) fn finish(local: &LocalParam, plan: &Plan, mut tensors: StateDict) -> Result<StateDict> {
    let missing =
        |name: &str| NnError::from(OptimStateError::MissingEntry { fqn: local.name(), name: name.to_owned() });
    let mut entries = StateDict::new();
    for (name, planned) in plan {
        let entry = match (planned, tensors.remove(name)) {
            (Planned::Scalar(value), _) => value.scalar()?.ok_or_else(|| missing(name))?,
            (Planned::Whole, Some(whole)) => whole,
            (Planned::Piece(_), Some(StateValue::Tensor(flat))) => flat.reshape(local.dims())?.into(),
            _ => return Err(missing(name)),
        };
        entries.insert(name.as_str(), entry);
    }
    Ok(entries)
}

fn same_elements(a: &Tensor, b: &Tensor) -> Result<bool> {
    Ok(with_bytes(a, |a| with_bytes(b, |b| a == b))??)
}
