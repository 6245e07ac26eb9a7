//! The backward of a unit: its gradients are collected, flattened and reduced over ranks.

use std::collections::HashSet;

use candle_core::{Tensor, TensorId};
use fsdp_flat::storage::{HostSliceMut, zeros_on};
use fsdp_flat::with_float;

use super::handle::{FlatParamHandle, HandleState};
use crate::config::cast;
use crate::error::Result;
use crate::exchange::gradient::{copy_gradient, flat_gradient};
use crate::exchange::{Moment, Reduction, device};
use crate::tasks;

/// The gradients of a unit that a rank has at the end of a backward, and has yet to reduce. Of
/// several ranks, the one whose variant comes last in this list decides what they do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unreduced {
    /// No gradients.
    Nothing,
    /// Gradients that have been reduced over the shard group, and not yet over replicas.
    Partial,
    /// Gradients of the rank's own batches, whole.
    Whole,
    /// No gradients, because the rank has reduced them in this backward already.
    Reduced,
}

impl Unreduced {
    /// Returns the number that ranks send for this, in the same order.
    pub(crate) const fn to_byte(self) -> u8 {
        match self {
            Unreduced::Nothing => 0,
            Unreduced::Partial => 1,
            Unreduced::Whole => 2,
            Unreduced::Reduced => 3,
        }
    }

    /// Returns what [`Self::to_byte`] made this number of.
    pub(crate) const fn of_byte(byte: u8) -> Self {
        match byte {
            0 => Unreduced::Nothing,
            1 => Unreduced::Partial,
            2 => Unreduced::Whole,
            _ => Unreduced::Reduced,
        }
    }
}

impl HandleState {
    /// Begins a backward that is yet to come to some of the parameters.
    fn expect_gradients_of(&mut self, finished: Vec<bool>) {
        self.unfinished = finished.iter().filter(|finished| !**finished).count();
        self.finished = finished;
        self.is_reduced = false;
    }
}

impl FlatParamHandle {
    /// Prepares a backward that will reach the tensors in `reached`. The unit is done when the
    /// backward has finished with those of its parameters that are among them.
    pub(crate) fn begin_backward(&self, reached: &HashSet<TensorId>) {
        let params = self.params.iter();
        let finished = params
            .map(|param| !param.is_in_graph || !reached.contains(&param.tensor.id()))
            .collect();
        self.state().expect_gradients_of(finished);
    }

    /// Prepares a backward in which this unit is reduced after all others, by
    /// [`Self::reduce_rest`].
    pub(crate) fn reduce_last(&self) {
        let mut state = self.state();
        state.is_reduced_last = true;
        state.is_reduced = false;
    }

    /// Receives the gradient of one parameter from candle's backward, which no longer needs the
    /// parameter. When the last gradient of the unit has arrived, the parameters are released and
    /// the gradients are reduced over ranks.
    pub(crate) fn receive_grad(&self, param: usize, grad: &Tensor) -> Result<()> {
        let mut state = self.state();
        if self.params[param].requires_grad() {
            // The gradient is kept as candle made it. The flat buffer for all gradients of the unit
            // is allocated only after the gathered parameters have been released, so that both are
            // never in memory together.
            state.received.push((param, grad.detach()));
        }
        // No `begin_backward` said which parameters are reached: expect all that the graph has.
        if state.finished.is_empty() {
            state.expect_gradients_of(self.params.iter().map(|param| !param.is_in_graph).collect());
        }
        // One backward reaches each parameter once. A second gradient means that a backward before
        // was not ended.
        if !std::mem::replace(&mut state.finished[param], true) {
            state.unfinished -= 1;
        }
        // The unit is done, unless it is reduced after all others, or the backward may still need
        // its parameters.
        if state.unfinished == 0 && !state.is_reduced_last && !self.keeps_until_the_end() {
            self.end_backward_locked(&mut state)?;
            // Without a new gradient there is nothing to reduce over the shard group. What earlier
            // backwards left to be summed over replicas waits for the end of this one.
            if self.shared.syncs() && state.unsharded_grad.is_some() {
                state.is_reduced = true;
                self.reduce_locked(&mut state)?;
            }
        }
        Ok(())
    }

    /// Returns `true` if it cannot be known when a backward no longer needs the parameters.
    fn keeps_until_the_end(&self) -> bool {
        self.needs_gather() && self.params.iter().any(|param| !param.is_in_graph)
    }

    /// Copies the received gradients into the unsharded flat gradient, or adds them to it.
    fn flatten_received(&self, state: &mut HandleState) -> Result<()> {
        let mut received = std::mem::take(&mut state.received);
        if received.is_empty() {
            return Ok(());
        }
        state.touched.resize(self.params.len(), false);
        let exchange = &self.exchange;
        // Several threads are fastest if they add to a buffer of zeros. A single one is faster if
        // it writes each element once, without zeros first.
        if state.unsharded_grad.is_none() && exchange.device.is_cpu() && tasks::is_alone() {
            received = self.flatten_first(state, received)?;
        }
        self.make_unsharded_grad(state)?;
        let Some(buffer) = &state.unsharded_grad else {
            return Ok(());
        };
        for (param, grad) in received {
            let grad = cast(grad, Some(exchange.reduce_dtype))?;
            let range = exchange.layout.param_range(param);
            let accumulate = std::mem::replace(&mut state.written[param], true);
            state.touched[param] = true;
            if !exchange.device.is_cpu() {
                device::copy_gradient(&grad, buffer, range, accumulate)?;
            } else {
                with_float!(exchange.reduce_dtype, T => {
                    copy_gradient::<T>(&grad, &mut HostSliceMut::write(buffer)?[range], accumulate)?;
                }, else exchange.unsupported()?);
            }
        }
        Ok(())
    }

    /// Makes the unsharded flat gradient of the first gradient of each parameter, and returns the
    /// other gradients.
    fn flatten_first(
        &self,
        state: &mut HandleState,
        received: Vec<(usize, Tensor)>,
    ) -> Result<Vec<(usize, Tensor)>> {
        let exchange = &self.exchange;
        let mut first: Vec<Option<Tensor>> = vec![None; self.params.len()];
        let mut others = Vec::new();
        for (param, grad) in received {
            if first[param].is_some() {
                others.push((param, grad));
            } else {
                first[param] = Some(grad);
            }
        }
        state.written = first.iter().map(Option::is_some).collect();
        state
            .touched
            .iter_mut()
            .zip(&state.written)
            .for_each(|(touched, written)| *touched |= written);
        let numel = exchange.layout.padded_unsharded_numel();
        let flat = with_float!(exchange.reduce_dtype, T => {
            Tensor::from_vec(flat_gradient::<T>(&exchange.layout, first)?, numel, &exchange.device)?
        }, else return exchange.unsupported());
        state.unsharded_grad = Some(flat);
        Ok(others)
    }

    /// Makes an unsharded flat gradient of zeros, unless there is one.
    fn make_unsharded_grad(&self, state: &mut HandleState) -> Result<()> {
        if state.unsharded_grad.is_none() {
            let exchange = &self.exchange;
            let numel = exchange.layout.padded_unsharded_numel();
            state.unsharded_grad =
                Some(zeros_on(&[numel], exchange.reduce_dtype, &exchange.device)?);
            state.written = vec![false; self.params.len()];
        }
        Ok(())
    }

    /// Ends a backward, which may have reached only some of the unit's parameters, or none:
    /// releases the parameters, and collects the gradients that have not been reduced yet. If it
    /// reached some, the gradients of the others count as zero.
    pub(crate) fn end_backward(&self) -> Result<()> {
        self.end_backward_locked(&mut self.state())
    }

    /// Does what [`end_backward`](Self::end_backward) does, with the state locked.
    fn end_backward_locked(&self, state: &mut HandleState) -> Result<()> {
        state.finished.clear();
        state.is_reduced_last = false;
        // First release the parameters, so that the gradients can use that memory. If this backward
        // runs inside a forward, the forward still needs the parameters.
        if state.users == 0 {
            self.release_locked(state)?;
        }
        self.flatten_received(state)?;
        // Start to gather the next unit before the reduction: the backward waits for its
        // parameters, but not for the gradients of this unit.
        if let Some(overlap) = &self.overlap {
            overlap.gather_next(Moment::AfterComputation);
        }
        Ok(())
    }

    /// Returns the gradients that this rank has left to reduce.
    pub(crate) fn unreduced(&self) -> Unreduced {
        let state = self.state();
        match (&state.unsharded_grad, &state.partial) {
            _ if state.is_reduced => Unreduced::Reduced,
            (Some(_), _) => Unreduced::Whole,
            (None, Some(_)) => Unreduced::Partial,
            (None, None) => Unreduced::Nothing,
        }
    }

    /// Reduces the gradients that are left at the end of a backward. `unreduced` is what all ranks
    /// have together: a rank that has less takes part with zeros, so that all ranks call the same
    /// collectives.
    pub(crate) fn reduce_rest(&self, unreduced: Unreduced) -> Result<()> {
        let mut state = self.state();
        match unreduced {
            Unreduced::Nothing => return Ok(()),
            Unreduced::Reduced if state.is_reduced => return Ok(()),
            Unreduced::Whole | Unreduced::Reduced => self.make_unsharded_grad(&mut state)?,
            Unreduced::Partial if state.partial.is_none() => {
                let exchange = &self.exchange;
                let numel = exchange.layout.sharded_numel();
                state.partial = Some(zeros_on(&[numel], exchange.reduce_dtype, &exchange.device)?);
            }
            Unreduced::Partial => {}
        }
        self.reduce_locked(&mut state)
    }

    /// Reduces the gradients over ranks, or starts the reduction in the background.
    fn reduce_locked(&self, state: &mut HandleState) -> Result<()> {
        self.take_reduced_locked(state)?;
        let reduction = Reduction {
            unsharded: state.unsharded_grad.take(),
            partial: state.partial.take(),
            reduced: None,
            all_reduces: self.shared.all_reduces(),
            sent_dtype: self.shared.sent_dtype(),
        };
        if reduction.unsharded.is_none() && reduction.partial.is_none() {
            return Ok(());
        }
        let reduced = match &self.overlap {
            Some(overlap) => overlap.reduce(&self.exchange, reduction)?,
            None => Some(self.exchange.reduce(reduction)?),
        };
        reduced.map_or(Ok(()), |reduced| self.add_reduced(state, reduced))
    }

    /// Waits for the reduction in the background, if there is one.
    pub(crate) fn take_reduced(&self) -> Result<()> {
        self.take_reduced_locked(&mut self.state())
    }

    /// Waits for a reduction of this unit that runs in the background, if there is one, and adds
    /// its result to the gradient.
    fn take_reduced_locked(&self, state: &mut HandleState) -> Result<()> {
        let Some(overlap) = &self.overlap else {
            return Ok(());
        };
        match overlap.take_reduced(&self.exchange)? {
            Some(reduced) => self.add_reduced(state, reduced),
            None => Ok(()),
        }
    }

    /// Adds gradients that have been reduced to those of earlier backwards.
    fn add_reduced(&self, state: &mut HandleState, reduction: Reduction) -> Result<()> {
        state.partial = reduction.partial;
        let Some(reduced) = reduction.reduced else {
            return Ok(());
        };
        self.shared.count_reduction();
        // The ranks agreed on which parameters have gradients before these came, so they must agree
        // again.
        state.has_gradient.clear();
        self.exchange.add_to(&mut state.grad, reduced)
    }
}
