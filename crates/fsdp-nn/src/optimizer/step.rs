//! A step of an optimizer, in place.

use std::sync::Arc;

use fsdp_flat::storage::{HostSlice, HostSliceMut, Scalar};
use fsdp_flat::with_float;
use fsdp_ops::step::Factor;

use super::Optimizer;
use super::factored::step_factored;
use super::local::{
    LocalParam, LocalState, ParamState, begin_state, begin_states_on_device, initial_state,
};
use super::matrices::step_matrices;
use super::on_device::{Launches, Update};
use super::owners::GroupStep;
use crate::algorithm::{Algorithm, Float, Initial, StateKind};
use crate::error::{NnError, Result};
use crate::tasks;

impl Optimizer {
    /// Updates all trained parameters that have a gradient, in place, each in one pass over its
    /// shard: torch's `Optimizer.step`. Gradients are kept.
    ///
    /// Collectives: none, except for groups of [`Algorithm::Muon`] and [`Algorithm::Adafactor`] if
    /// parameters are sharded. There each parameter is gathered on one rank, which computes its
    /// update and sends it back. Each such group of parameters takes two all-to-all exchanges over
    /// the shard group, from GPU to GPU over NCCL, and two agreements with Muon, four with
    /// Adafactor. Adafactor updates a large group in several batches, of which each takes two
    /// exchanges and three agreements. The results are bit for bit those of a single rank. These
    /// groups are updated after all others.
    ///
    /// Parameters that got no gradient are left as they are, without weight decay
    /// ([`ShardedParameters::has_gradient`](crate::ShardedParameters::has_gradient)).
    ///
    /// State that lacks `step` counts from 0, and state that lacks a tensor begins with its initial
    /// value.
    ///
    /// # Errors
    /// Before this rank changes anything: [`NnError::Swapped`]; [`NnError::UnitInUse`] inside a
    /// forward; [`NnError::BackwardNotEnded`]; [`NnError::GradientsNotReduced`]; schedule-free
    /// AdamW in its `eval` mode; hyperparameters out of range, and an algorithm that cannot update
    /// the parameters of its group; [`NnError::Options`] for a group of other parameters than
    /// before.
    ///
    /// After that, candle's errors, of which memory is one, and those of the collectives. A
    /// parameter whose update fails keeps its state, but others may have been updated. If the step
    /// communicates, an error of one rank is an error on every rank of the shard group, except in
    /// the last update of a matrix by Muon. If it does not, the other ranks learn nothing of the
    /// error: end the run.
    pub fn step(&mut self) -> Result<()> {
        self.step_scaled(&Factor::Known(1.0))
    }

    /// Returns what the optimizer counts and which state there is, for [`Self::undo_counts`].
    pub(crate) fn counts(&self) -> Counts {
        Counts {
            algorithms: self
                .groups
                .iter()
                .map(|group| group.algorithm.clone())
                .collect(),
            states: self
                .locals
                .iter()
                .map(|local| local.state.clone())
                .collect(),
        }
    }

    /// Puts back what the optimizer has counted before a step that a GPU has skipped. The tensors
    /// of its state have not been changed.
    pub(crate) fn undo_counts(&mut self, counts: Counts) {
        for (group, algorithm) in self.groups.iter_mut().zip(counts.algorithms) {
            group.algorithm = algorithm;
        }
        for (local, state) in self.locals.iter_mut().zip(counts.states) {
            local.state = state;
        }
    }

    /// Returns `true` if [`Self::step_scaled`] can multiply gradients by a factor while it reads
    /// them: if they are on a GPU, and all parameters are updated by kernels.
    pub(crate) fn scales_gradients(&self) -> Result<bool> {
        for local in &self.locals {
            let algorithm = &self.groups[local.group].algorithm;
            let device = local.handle.shard_device();
            if algorithm.needs_whole_parameters()
                || !Launches::can_step(device, local.handle.dtype())?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Does what [`Self::step`] does, with gradients that are multiplied by a factor, which is 1
    /// unless the optimizer [`scales_gradients`](Self::scales_gradients). The gradients stay as
    /// they are. If the factor turns out to skip the step, [`Self::undo_counts`] has to follow.
    pub(crate) fn step_scaled(&mut self, factor: &Factor) -> Result<()> {
        // Step 1: check everything that can be known before something is changed. The first error
        // is kept: the groups of step 3 communicate, and tell it to the other ranks.
        let prepared = self.prepare_step();
        // Step 2: update the groups that need no other rank.
        let mut outcome =
            prepared.and_then(|algorithms| self.step_without_others(algorithms, factor));
        // Step 3: update the groups whose parameters must be whole. An error does not end the loop:
        // all ranks begin each of these groups, in the order of the model, because a rank may have
        // made its groups in any order.
        for index in self.groups_in_order_of_model() {
            let locals = self.locals_of_group(index);
            let group = &self.groups[index];
            let step = GroupStep {
                algorithm: &group.algorithm,
                shard_group: self.parameters.shard_group(),
                locals: &mut self.locals[locals],
            };
            outcome = match &group.algorithm {
                Algorithm::Muon(options) => step_matrices(options, step, outcome),
                Algorithm::Adafactor(options) => step_factored(options, step, outcome),
                _ => outcome,
            };
        }
        outcome
    }

    /// Checks everything that can be known before a step changes something, and releases what is
    /// gathered. Returns the algorithm of each group for this step, and `true` if the step counts
    /// for it.
    fn prepare_step(&self) -> Result<Vec<(Algorithm, bool)>> {
        self.parameters.check_not_swapped()?;
        self.check_groups()?;
        let mut begun_algorithms = Vec::with_capacity(self.groups.len());
        for (index, group) in self.groups.iter().enumerate() {
            let mut algorithm = group.algorithm.clone();
            // A step without gradients does not count.
            let has_gradients = self.has_gradients(index);
            if has_gradients {
                algorithm.begin_step()?;
            }
            begun_algorithms.push((algorithm, has_gradients));
        }
        self.parameters.check_gradients_reduced()?;
        // Release all gathered parameters before shards change, also those of units without a
        // gradient.
        self.parameters.reshard()?;
        // A save in the background may still be copying the shards and the state.
        self.parameters.wait_for_readers()?;
        Ok(begun_algorithms)
    }

    /// Updates the groups that need no other rank, by the algorithms that
    /// [`Self::prepare_step`] has returned.
    fn step_without_others(
        &mut self,
        begun_algorithms: Vec<(Algorithm, bool)>,
        factor: &Factor,
    ) -> Result<()> {
        let mut outcome = Ok(());
        for (index, (algorithm, has_gradients)) in begun_algorithms.into_iter().enumerate() {
            self.groups[index].algorithm = algorithm;
            if outcome.is_ok() && !self.groups[index].algorithm.needs_whole_parameters() {
                outcome = self.step_group(index, factor.clone());
                if outcome.is_ok() && has_gradients {
                    self.groups[index].algorithm.end_step();
                }
            }
        }
        outcome
    }

    /// Returns the positions of the groups that have parameters, in the order of the first
    /// parameter of each in the model.
    fn groups_in_order_of_model(&self) -> Vec<usize> {
        let mut order: Vec<((usize, usize), usize)> = Vec::with_capacity(self.groups.len());
        for index in 0..self.groups.len() {
            let locals = &self.locals[self.locals_of_group(index)];
            let params = locals.iter().flat_map(|local| {
                let params = local.params().into_iter();
                params.map(|param| (local.handle.unit_number(), param))
            });
            order.extend(params.min().map(|first_param| (first_param, index)));
        }
        order.sort_unstable();
        order.into_iter().map(|(_, index)| index).collect()
    }

    /// Checks that the groups are those that the optimizer was made of, and that their algorithms,
    /// which may have been changed since, can update their parameters.
    fn check_groups(&self) -> Result<()> {
        for (index, (group, fqns)) in self.groups.iter().zip(&self.group_fqns).enumerate() {
            if !Arc::ptr_eq(&group.fqns, fqns) && group.fqns != *fqns {
                return Err(NnError::options(format!(
                    "parameter group {index} has been replaced by one of other parameters: change \
                     the hyperparameters of a group, or make a new optimizer"
                )));
            }
        }
        self.check_algorithms(self.groups.iter().map(|group| &group.algorithm))
    }

    /// Updates the parameters of a group: each by itself, and those on a GPU together. No
    /// communication.
    fn step_group(&mut self, index: usize, factor: Factor) -> Result<()> {
        let range = self.locals_of_group(index);
        let algorithm = &self.groups[index].algorithm;
        let locals = &mut self.locals[range];
        begin_states_on_device(algorithm, locals)?;
        let mut launches = Launches::new(factor);
        let mut launched_states = Vec::new();
        for (position, local) in locals.iter_mut().enumerate() {
            if !local.requires_grad() || local.handle.grad().is_none() {
                continue;
            }
            if !local.has_gradient() {
                // A checkpoint has state of all trained parameters of a unit, or of none.
                begin_state(algorithm, local)?;
                continue;
            }
            let state = with_float!(local.handle.dtype(), T => {
                step_local::<T>(algorithm, local, &mut launches)?
            });
            if local.handle.shard_device().is_cpu() {
                local.state = state;
            } else {
                launched_states.push((position, state));
            }
        }
        launches.run()?;
        for (position, state) in launched_states {
            locals[position].state = state;
        }
        Ok(())
    }

    /// Returns `true` if a trained parameter of a group has a gradient.
    fn has_gradients(&self, index: usize) -> bool {
        self.locals[self.locals_of_group(index)]
            .iter()
            .any(|local| local.requires_grad() && local.has_gradient())
    }
}

/// The numbers that an optimizer counts on the host, and which tensors of state it has.
pub(crate) struct Counts {
    algorithms: Vec<Algorithm>,
    states: Vec<Option<ParamState>>,
}

/// Updates one local parameter and the tensors of its state, and returns the new state. If the
/// parameter is on a GPU, this only adds the update to `launches`.
///
/// State may lack entries of the algorithm, for example if it comes from a checkpoint of another
/// algorithm. Then a missing `step` counts from 0, and missing tensors start with their initial
/// values.
fn step_local<'a, T: Scalar + Float>(
    algorithm: &'a Algorithm,
    local: &LocalParam,
    launches: &mut Launches<'a>,
) -> Result<Option<ParamState>> {
    // The tensors are shared: what is changed here is only which of them there are, and the step.
    let mut state = match &local.state {
        Some(state) => state.clone(),
        None => initial_state(algorithm, local)?,
    };
    let mut is_first = false;
    let mut state_tensors = Vec::new();
    for entry in algorithm
        .state_entries()
        .filter(|entry| entry.kind == StateKind::LikeParameter)
    {
        if let Some(LocalState::Piece(flat)) = state.entries.get(entry.name) {
            state_tensors.push(flat.clone());
            continue;
        }
        // `is_first` holds for the one entry that begins as the gradient.
        is_first |= entry.initial == Initial::FirstGradient;
        let fresh = match initial_state(algorithm, local)?
            .entries
            .swap_remove(entry.name)
        {
            Some(LocalState::Piece(flat)) => flat,
            _ => local.zeros()?,
        };
        state_tensors.push(fresh.clone());
        state
            .entries
            .insert(entry.name.to_owned(), LocalState::Piece(fresh));
    }
    let step = state.next_step();
    algorithm.check_step(step)?;
    local.handle.begin_change()?;
    let handle = &local.handle;
    for segment in local
        .segments
        .iter()
        .filter(|segment| segment.len > 0 && handle.has_gradient(segment.param))
    {
        let (Some(param), Some(grad)) = (
            local.handle.local_piece(segment.param)?,
            local.handle.grad_piece(segment.param)?,
        ) else {
            continue;
        };
        let pieces = state_tensors
            .iter()
            .map(|flat| flat.narrow(0, segment.start, segment.len))
            .collect::<candle_core::Result<Vec<_>>>()?;
        if !local.handle.shard_device().is_cpu() {
            let update = Update {
                algorithm,
                step,
                is_first,
            };
            launches.add(update, param, grad, pieces)?;
            continue;
        }
        let grad = HostSlice::<T>::read(&grad)?;
        let mut param = HostSliceMut::<T>::write(&param)?;
        let mut guards = pieces
            .iter()
            .map(HostSliceMut::<T>::write)
            .collect::<Result<Vec<_>, _>>()?;
        let mut state_slices: Vec<&mut [T]> = guards.iter_mut().map(|guard| &mut **guard).collect();
        tasks::update(
            &mut param,
            &grad,
            &mut state_slices,
            |param, grad, state| algorithm.update(step, is_first, param, grad, state),
        )?;
    }
    let counts_steps = algorithm
        .state_entries()
        .any(|entry| entry.kind == StateKind::Scalar);
    if counts_steps || state.step.is_some() {
        state.step = Some(step);
    }
    // Without momentum SGD keeps nothing, and then a state dict does not name the parameter.
    Ok(state.unless_empty())
}
