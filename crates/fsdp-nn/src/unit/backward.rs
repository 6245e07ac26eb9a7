//! The backward of a unit: its gradients are collected, flattened and reduced over ranks.

use std::collections::HashSet;

use candle_core::{Tensor, TensorId};
use fsdp_flat::storage::{HostSliceMut, zeros_on};
use fsdp_flat::with_float;

use super::gradients::{Backward, Gradients, PendingReduction, Unsharded};
use super::handle::{FlatParamHandle, HandleState};
use crate::config::{BackwardPrefetch, cast};
use crate::error::Result;
use crate::exchange::gradient::{copy_gradient, flat_gradient};
use crate::exchange::{Reduction, UnitExchange, device};
use crate::tasks;

impl FlatParamHandle {
    /// Prepares a backward that will reach the tensors with the `reached_ids`. The unit is done
    /// when the backward has finished with those of its parameters that are among them.
    pub(crate) fn begin_backward(&self, reached_ids: &HashSet<TensorId>) {
        let mut expected = self.params_in_graph();
        expected.retain(|&param| reached_ids.contains(&self.params[param].tensor.id()));
        self.state().gradients.backward = Backward::Expecting(expected);
    }

    /// Prepares a backward in which this unit is reduced after all others, by
    /// [`Self::reduce_unreduced`].
    pub(crate) fn defer_reduction(&self) {
        self.state().gradients.backward = Backward::ReducesLast;
    }

    /// Returns the numbers of the parameters that a backward may come to.
    fn params_in_graph(&self) -> HashSet<usize> {
        let params = self.params.iter().enumerate();
        params
            .filter(|(_, param)| param.is_in_graph)
            .map(|(index, _)| index)
            .collect()
    }

    /// Receives the gradient of one parameter from candle's backward, which no longer needs the
    /// parameter. When the last gradient of the unit has arrived, the parameters are released and
    /// the gradients are reduced over ranks.
    pub(crate) fn receive_grad(&self, param: usize, grad: &Tensor) -> Result<()> {
        let mut state = self.state();
        let gradients = &mut state.gradients;
        if self.params[param].requires_grad() {
            // The gradient is kept as candle made it. The flat buffer for all gradients of the unit
            // is allocated only after the gathered parameters have been released, so that both are
            // never in memory together.
            gradients.received.push((param, grad.detach()));
        }
        // No `begin_backward` said which parameters are reached: expect all that the graph has.
        if matches!(gradients.backward, Backward::Idle | Backward::Reduced) {
            gradients.backward = Backward::Expecting(self.params_in_graph());
        }
        let Backward::Expecting(expected) = &mut gradients.backward else {
            return Ok(());
        };
        expected.remove(&param);
        if !expected.is_empty() || self.keeps_params_until_the_end() {
            return Ok(());
        }
        self.end_backward_locked(&mut state)?;
        // Without a new gradient there is nothing to reduce over the shard group. What earlier
        // backwards left to be summed over replicas waits for the end of this one.
        if self.shared.reductions.syncs() && state.gradients.unsharded.is_some() {
            state.gradients.backward = Backward::Reduced;
            self.reduce_locked(&mut state.gradients)?;
        }
        Ok(())
    }

    /// Returns `true` if it cannot be known when a backward no longer needs the parameters, because
    /// it does not come to all of them.
    fn keeps_params_until_the_end(&self) -> bool {
        self.needs_unshard() && self.params.iter().any(|param| !param.is_in_graph)
    }

    /// Copies the received gradients into the unsharded flat gradient, or adds them to it.
    fn flatten_received(&self, gradients: &mut Gradients) -> Result<()> {
        let mut received = std::mem::take(&mut gradients.received);
        if received.is_empty() {
            return Ok(());
        }
        for (param, _) in &received {
            gradients.has_own_gradient[*param] = true;
        }
        let exchange = &self.exchange;
        if !exchange.device.is_cpu() {
            return self.flatten_on_device(&mut gradients.unsharded, received);
        }
        // Several threads are fastest if they add to a buffer of zeros. A single one is faster if
        // it writes each element once, without zeros first.
        if gradients.unsharded.is_none() && tasks::is_alone() {
            let (first_grads, later_grads) = self.split_first_gradients(received);
            gradients.unsharded = Some(self.make_flat_gradient(first_grads)?);
            received = later_grads;
        }
        let Unsharded { flat, is_written } = self.unsharded_or_zeros(&mut gradients.unsharded)?;
        for (param, grad) in received {
            let grad = cast(grad, Some(exchange.reduce_dtype))?;
            let range = exchange.layout.param_range(param);
            let accumulate = std::mem::replace(&mut is_written[param], true);
            with_float!(exchange.reduce_dtype, T => {
                copy_gradient::<T>(&grad, &mut HostSliceMut::write(flat)?[range], accumulate)?;
            });
        }
        Ok(())
    }

    /// Copies received gradients on a GPU into the unsharded flat gradient, or adds them to it: all
    /// of them together, as far as each parameter has one.
    fn flatten_on_device(
        &self,
        unsharded: &mut Option<Unsharded>,
        mut received: Vec<(usize, Tensor)>,
    ) -> Result<()> {
        let UnitExchange {
            layout,
            reduce_dtype,
            device,
            ..
        } = &*self.exchange;
        if unsharded.is_none() {
            let (first_grads, later_grads) = self.split_first_gradients(received);
            let is_written = vec![true; self.params.len()];
            let flat = device::flat_gradient(layout, first_grads, *reduce_dtype, device)?;
            *unsharded = Some(Unsharded { flat, is_written });
            received = later_grads;
        }
        let Unsharded { flat, .. } = self.unsharded_or_zeros(unsharded)?;
        // A parameter that is used at several places has a gradient of each.
        while !received.is_empty() {
            let (first_grads, later_grads) = self.split_first_gradients(received);
            let grads = first_grads.into_iter().enumerate();
            let grads: Vec<(usize, Tensor)> = grads
                .filter_map(|(param, grad)| Some((param, grad?)))
                .collect();
            device::add_gradients(flat, layout, &grads)?;
            received = later_grads;
        }
        Ok(())
    }

    /// Splits gradients into the first one of each parameter, and the others.
    fn split_first_gradients(
        &self,
        received: Vec<(usize, Tensor)>,
    ) -> (Vec<Option<Tensor>>, Vec<(usize, Tensor)>) {
        let mut first_grads: Vec<Option<Tensor>> = vec![None; self.params.len()];
        let mut later_grads = Vec::new();
        for (param, grad) in received {
            if first_grads[param].is_some() {
                later_grads.push((param, grad));
            } else {
                first_grads[param] = Some(grad);
            }
        }
        (first_grads, later_grads)
    }

    /// Copies the gradients, at most one of each parameter, into one flat tensor of the whole unit,
    /// in the dtype of reductions. It is zero where a parameter has none.
    fn make_flat_gradient(&self, grads: Vec<Option<Tensor>>) -> Result<Unsharded> {
        let exchange = &self.exchange;
        let is_written = grads.iter().map(Option::is_some).collect();
        let numel = exchange.layout.padded_unsharded_numel();
        let flat = with_float!(exchange.reduce_dtype, T => {
            Tensor::from_vec(flat_gradient::<T>(&exchange.layout, grads)?, numel, &exchange.device)?
        });
        Ok(Unsharded { flat, is_written })
    }

    /// Returns the unsharded flat gradient, one of zeros if there was none.
    fn unsharded_or_zeros<'g>(
        &self,
        unsharded: &'g mut Option<Unsharded>,
    ) -> Result<&'g mut Unsharded> {
        match unsharded {
            Some(unsharded) => Ok(unsharded),
            empty => Ok(empty.insert(Unsharded {
                flat: self.zeros(self.exchange.layout.padded_unsharded_numel())?,
                is_written: vec![false; self.params.len()],
            })),
        }
    }

    /// Makes a flat gradient of zeros.
    fn zeros(&self, numel: usize) -> Result<Tensor> {
        let exchange = &self.exchange;
        Ok(zeros_on(&[numel], exchange.reduce_dtype, &exchange.device)?)
    }

    /// Ends a backward, which may have reached only some of the unit's parameters, or none:
    /// releases the parameters, and collects the gradients that have not been reduced yet. If it
    /// reached some, the gradients of the others count as zero.
    pub(crate) fn end_backward(&self) -> Result<()> {
        self.end_backward_locked(&mut self.state())
    }

    /// Does what [`end_backward`](Self::end_backward) does, with the state locked.
    fn end_backward_locked(&self, state: &mut HandleState) -> Result<()> {
        if !matches!(state.gradients.backward, Backward::Reduced) {
            state.gradients.backward = Backward::Idle;
        }
        // First release the parameters, so that the gradients can use that memory. If this backward
        // runs inside a forward, the forward still needs the parameters.
        if state.user_count == 0 {
            self.release()?;
        }
        self.flatten_received(&mut state.gradients)?;
        // Start to gather the next unit before the reduction: the backward waits for its
        // parameters, but not for the gradients of this unit.
        if let Some(overlap) = &self.overlap {
            overlap.prefetch_next(BackwardPrefetch::Post);
        }
        Ok(())
    }

    /// Returns the gradients that this rank has left to reduce.
    pub(crate) fn unreduced(&self) -> PendingReduction {
        self.state().gradients.unreduced()
    }

    /// Reduces the gradients that are left at the end of a backward. `unreduced` is what all ranks
    /// have together: a rank that has less takes part with zeros, so that all ranks call the same
    /// collectives.
    pub(crate) fn reduce_unreduced(&self, unreduced: PendingReduction) -> Result<()> {
        let mut state = self.state();
        let gradients = &mut state.gradients;
        match unreduced {
            PendingReduction::Nothing => return Ok(()),
            PendingReduction::Partial => {
                if gradients.partial.is_none() {
                    gradients.partial = Some(self.zeros(self.exchange.layout.sharded_numel())?);
                }
            }
            PendingReduction::Whole | PendingReduction::AlreadyReduced => {
                if matches!(gradients.backward, Backward::Reduced) {
                    return Ok(());
                }
                self.unsharded_or_zeros(&mut gradients.unsharded)?;
            }
        }
        self.reduce_locked(gradients)
    }

    /// Reduces the gradients over ranks, or starts the reduction in the background.
    fn reduce_locked(&self, gradients: &mut Gradients) -> Result<()> {
        self.take_reduced_locked(gradients)?;
        let unsharded = gradients.unsharded.take();
        let reduction = Reduction {
            unsharded: unsharded.map(|unsharded| unsharded.flat),
            partial: gradients.partial.take(),
            reduced: None,
            all_reduces: self.shared.reductions.all_reduces(),
            sent_dtype: self.shared.reductions.sent_dtype(),
        };
        if reduction.unsharded.is_none() && reduction.partial.is_none() {
            return Ok(());
        }
        let finished = match &self.overlap {
            Some(overlap) => overlap.reduce(&self.exchange, reduction)?,
            None => Some(self.exchange.reduce(reduction)?),
        };
        self.add_reduced(gradients, finished)
    }

    /// Waits for the reduction in the background, if there is one.
    pub(crate) fn take_reduced(&self) -> Result<()> {
        self.take_reduced_locked(&mut self.state().gradients)
    }

    /// Waits for a reduction of this unit that runs in the background, if there is one, and adds
    /// its result to the gradient.
    fn take_reduced_locked(&self, gradients: &mut Gradients) -> Result<()> {
        match &self.overlap {
            Some(overlap) => self.add_reduced(gradients, overlap.take_reduced(&self.exchange)?),
            None => Ok(()),
        }
    }

    /// Takes back the outcome of a reduction, if there is one. The gradient that is not yet reduced
    /// over replicas replaces the old one, which it includes. The reduced one is added to that of
    /// earlier backwards.
    fn add_reduced(&self, gradients: &mut Gradients, reduction: Option<Reduction>) -> Result<()> {
        let Some(reduction) = reduction else {
            return Ok(());
        };
        gradients.partial = reduction.partial;
        let Some(reduced) = reduction.reduced else {
            return Ok(());
        };
        self.shared.reductions.count_reduction();
        // The ranks agreed on which parameters have gradients before these came, so they must agree
        // again.
        gradients.has_gradient = None;
        self.exchange.add_to(&mut gradients.reduced, reduced)
    }
}
