//! The backward of a unit: its gradients are collected, flattened and reduced over ranks.

use std::collections::HashSet;

use candle_core::{Tensor, TensorId};
use fsdp_flat::storage::{HostSliceMut, zeros_on};
use fsdp_flat::with_float;

use super::{FlatParamHandle, HandleState, takes_part_in_backward};
use crate::exchange::{Moment, Reduction};
use crate::gradient::copy_gradient;
use crate::precision::cast;
use crate::{Result, device};

impl HandleState {
    /// Begins a backward that is yet to pass some of the parameters.
    fn await_passing(&mut self, passed: Vec<bool>) {
        self.not_passed = passed.iter().filter(|passed| !**passed).count();
        self.passed = passed;
    }
}

impl FlatParamHandle {
    /// Prepares a backward that will reach the tensors in `reached`. The unit is done when the backward has passed
    /// those of its parameters that are among them.
    pub(crate) fn begin_backward(&self, reached: &HashSet<TensorId>) {
        let tensors = self.params.iter().map(|param| param.tensor.id()).enumerate();
        let passed = tensors.map(|(param, id)| self.is_never_passed(param) || !reached.contains(&id)).collect();
        self.state().await_passing(passed);
    }

    /// Prepares a backward in which this unit is reduced after all others, by [`Self::finish_backward`].
    pub(crate) fn end_last(&self) {
        self.state().ends_last = true;
    }

    /// Receives the gradient of one parameter from candle's backward, which no longer needs the parameter. When the
    /// last gradient of the unit has arrived, the parameters are released and the gradients are reduced over ranks.
    pub(crate) fn receive_grad(&self, param: usize, grad: &Tensor) -> Result<()> {
        let mut state = self.state();
        if self.params[param].requires_grad() {
            // Kept as candle made it. The flat buffer for all gradients of the unit is allocated only after the gathered
            // parameters have been released, so that both are never in memory together.
            state.received.push((param, grad.detach()));
        }
        if state.passed.is_empty() {
            state.await_passing((0..self.params.len()).map(|param| self.is_never_passed(param)).collect());
        }
        // One backward reaches each parameter once. A second gradient means that a backward before was not ended.
        if !std::mem::replace(&mut state.passed[param], true) {
            state.not_passed -= 1;
        }
        if state.not_passed == 0 && !state.ends_last && !self.keeps_until_the_end() {
            self.finish_backward_locked(&mut state)?;
        }
        Ok(())
    }

    /// Returns `true` if candle's backward never reaches a parameter: see [`takes_part_in_backward`].
    fn is_never_passed(&self, param: usize) -> bool {
        !takes_part_in_backward(self.params[param].is_trainable, self.is_root, self.needs_gather())
    }

    /// Returns `true` if it cannot be known when a backward no longer needs the parameters.
    fn keeps_until_the_end(&self) -> bool {
        self.needs_gather() && (0..self.params.len()).any(|param| self.is_never_passed(param))
    }

    /// Copies the received gradients into the unsharded flat gradient, or adds them to it.
    fn flatten_received(&self, state: &mut HandleState) -> Result<()> {
        let received = std::mem::take(&mut state.received);
        if received.is_empty() {
            return Ok(());
        }
        let exchange = &self.exchange;
        if state.unsharded_grad.is_none() {
            state.unsharded_grad =
                Some(zeros_on(&[exchange.layout.padded_unsharded_numel()], exchange.reduce_dtype, &exchange.device)?);
            state.written = vec![false; self.params.len()];
        }
        state.touched.resize(self.params.len(), false);
        let Some(buffer) = &state.unsharded_grad else { return Ok(()) };
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

    /// Ends a backward that reached only some of the unit's parameters, or none. If it reached some, the gradients of
    /// the others count as zero.
    ///
    /// Gradients that earlier backwards inside `no_sync` have left are reduced too, even if this backward has none.
    pub(crate) fn finish_backward(&self) -> Result<()> {
        self.finish_backward_locked(&mut self.state())
    }

    fn finish_backward_locked(&self, state: &mut HandleState) -> Result<()> {
        state.passed.clear();
        state.ends_last = false;
        // First release the parameters, so that the gradients can use that memory. If this backward runs inside a
        // forward, the forward still needs the parameters.
        if state.users == 0 {
            self.release_locked(state)?;
        }
        self.flatten_received(state)?;
        // Start to gather the next unit before the reduction: the backward waits for its parameters, but not for the
        // gradients of this unit.
        if let Some(overlap) = &self.overlap {
            overlap.gather_next(Moment::AfterComputation);
        }
        if !self.shared.syncs() {
            return Ok(());
        }
        self.reduce_locked(state)
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

    fn take_reduced_locked(&self, state: &mut HandleState) -> Result<()> {
        let Some(overlap) = &self.overlap else { return Ok(()) };
        match overlap.take_reduced(&self.exchange)? {
            Some(reduced) => self.add_reduced(state, reduced),
            None => Ok(()),
        }
    }

    /// Adds gradients that have been reduced to those of earlier backwards.
    fn add_reduced(&self, state: &mut HandleState, reduction: Reduction) -> Result<()> {
        state.partial = reduction.partial;
        let Some(reduced) = reduction.reduced else { return Ok(()) };
        self.shared.count_reduction();
        // The ranks agreed on which parameters have gradients before these came, so they must agree again.
        state.has_gradient.clear();
        self.exchange.add_to(&mut state.grad, reduced)
    }
}
