//! The backward of a unit: its gradients are collected, flattened and reduced over ranks.

use std::collections::HashSet;

use candle_core::{Tensor, TensorId};
use fsdp_comm::{Element, ReduceOp};
use fsdp_flat::storage::{HostSlice, HostSliceMut, Scalar, to_device, zeros_on};
use fsdp_flat::with_float;
use tracing::trace;

use super::{FlatParamHandle, HandleState, takes_part_in_backward};
use crate::gradient::{add, copy_gradient};
use crate::precision::cast;
use crate::{Result, device, tasks};

impl HandleState {
    /// Begins a backward that is yet to pass some of the parameters.
    fn await_passing(&mut self, passed: Vec<bool>) {
        self.not_passed = passed.iter().filter(|passed| !**passed).count();
        self.passed = passed;
    }
}

impl FlatParamHandle {
    /// Prepares a backward that comes to these tensors: the unit ends when it has come to those of its parameters that are
    /// among them.
    pub(crate) fn begin_backward(&self, reached: &HashSet<TensorId>) {
        let tensors = self.params.iter().map(|param| param.tensor.id()).enumerate();
        let passed = tensors.map(|(param, id)| self.is_never_passed(param) || !reached.contains(&id)).collect();
        self.state().await_passing(passed);
    }

    /// Takes the gradient of one parameter from candle's backward, which is through with the parameter then. With the
    /// unit's last one the parameters are released and the gradients are reduced over ranks.
    pub(crate) fn receive_grad(&self, param: usize, grad: &Tensor) -> Result<()> {
        let mut state = self.state();
        if self.params[param].requires_grad() {
            // Kept as it is: the first ones come before candle computes the others, and before the unit after is through.
            // The memory for all of them is taken when that of the parameters has been given back.
            state.received.push((param, grad.detach()));
        }
        if state.passed.is_empty() {
            state.await_passing((0..self.params.len()).map(|param| self.is_never_passed(param)).collect());
        }
        // A backward comes to each parameter once; several that nobody has ended may come to one again.
        if !std::mem::replace(&mut state.passed[param], true) {
            state.not_passed -= 1;
        }
        if state.not_passed == 0 && !self.keeps_until_the_end() {
            self.finish_backward_locked(&mut state)?;
        }
        Ok(())
    }

    /// Returns `true` if candle's backward does not come to a parameter: see [`takes_part_in_backward`].
    fn is_never_passed(&self, param: usize) -> bool {
        !takes_part_in_backward(self.params[param].is_trainable, self.is_root, self.is_gathered())
    }

    /// Returns `true` if backward does not tell when it is through with the parameters.
    fn keeps_until_the_end(&self) -> bool {
        self.is_gathered() && (0..self.params.len()).any(|param| self.is_never_passed(param))
    }

    /// Puts the gradients that have been received into the unsharded one, or adds them to what is there.
    fn flatten_received(&self, state: &mut HandleState) -> Result<()> {
        let received = std::mem::take(&mut state.received);
        if received.is_empty() {
            return Ok(());
        }
        if state.unsharded_grad.is_none() {
            state.unsharded_grad =
                Some(zeros_on(&[self.layout.padded_unsharded_numel()], self.reduce_dtype, &self.device)?);
            state.written = vec![false; self.params.len()];
        }
        state.touched.resize(self.params.len(), false);
        let Some(buffer) = &state.unsharded_grad else { return Ok(()) };
        for (param, grad) in received {
            let grad = cast(grad, Some(self.reduce_dtype))?;
            let range = self.layout.param_range(param);
            let accumulate = std::mem::replace(&mut state.written[param], true);
            state.touched[param] = true;
            if !self.device.is_cpu() {
                device::copy_gradient(&grad, buffer, range, accumulate)?;
            } else {
                with_float!(self.reduce_dtype, T => {
                    copy_gradient::<T>(&grad, &mut HostSliceMut::write(buffer)?[range], accumulate)?;
                }, else self.unsupported()?);
            }
        }
        Ok(())
    }

    /// Ends a backward that did not come to all of the unit's parameters, or to none of them. Parameters that it did not
    /// come to count as having a gradient of zero, where the unit has any.
    ///
    /// Gradients that earlier backwards inside `no_sync` have left are reduced too, also where this one brought none.
    pub(crate) fn finish_backward(&self) -> Result<()> {
        self.finish_backward_locked(&mut self.state())
    }

    fn finish_backward_locked(&self, state: &mut HandleState) -> Result<()> {
        state.passed.clear();
        // First the memory of the parameters, so that the gradients can take it. A forward around this backward keeps it.
        if state.users == 0 {
            self.release_locked(state)?;
        }
        self.flatten_received(state)?;
        if !self.shared.syncs() {
            return Ok(());
        }
        // One reduction of all gradients since the last one, and only then the sum with what was reduced before.
        if let Some(unsharded) = state.unsharded_grad.take() {
            trace!(unit = %self.name, "reduce gradients");
            let sent = cast(unsharded, self.shared.sent_dtype())?;
            let scattered = with_float!(sent.dtype(), T => self.reduce_scatter::<T>(sent)?, else {
                return self.unsupported();
            });
            self.add_to(&mut state.partial, cast(scattered, Some(self.reduce_dtype))?)?;
        }
        if self.groups.replicate.is_some() && !self.shared.all_reduces() {
            return Ok(());
        }
        let Some(partial) = state.partial.take() else { return Ok(()) };
        // What the ranks have agreed on before does not know of these.
        state.has_gradient.clear();
        let sent = if self.groups.replicate.is_some() { cast(partial, self.shared.sent_dtype())? } else { partial };
        let reduced = with_float!(sent.dtype(), T => self.all_reduce::<T>(sent)?, else {
            return self.unsupported();
        });
        let reduced = to_device(&cast(reduced, Some(self.dtype))?, &self.shard_device)?;
        self.add_to(&mut state.grad, reduced)
    }

    /// Adds a gradient to the sum of those before it, in place; without one it is the sum.
    fn add_to(&self, sum: &mut Option<Tensor>, grad: Tensor) -> Result<()> {
        match sum {
            Some(sum) if !sum.device().is_cpu() => {
                let range = 0..sum.elem_count();
                device::copy_gradient(&grad, sum, range, true)?;
            }
            Some(sum) => with_float!(sum.dtype(), T => {
                let from = HostSlice::<T>::read(&grad)?;
                tasks::for_each_pair(&mut HostSliceMut::<T>::write(sum)?, &from, add);
            }, else self.unsupported()?),
            None => *sum = Some(grad),
        }
        Ok(())
    }

    /// Returns this rank's shard of the mean over the ranks that share the parameters; all of the gradient if nothing is
    /// sharded.
    fn reduce_scatter<T: Scalar + Element>(&self, unsharded: Tensor) -> Result<Tensor> {
        let Some(group) = &self.groups.shard else { return Ok(unsharded) };
        let reduced = zeros_on(&[self.layout.sharded_numel()], unsharded.dtype(), &self.device)?;
        if !device::reduce_scatter(group, &reduced, &unsharded)? {
            let input = HostSlice::<T>::read(&unsharded)?;
            let mut output = HostSliceMut::<T>::write(&reduced)?;
            group.reduce_scatter(&mut output, &input, ReduceOp::Avg)?;
            output.finish()?;
        }
        Ok(reduced)
    }

    /// Returns the mean of a shard over the ranks that have the same one.
    fn all_reduce<T: Scalar + Element>(&self, reduced: Tensor) -> Result<Tensor> {
        if let Some(group) = &self.groups.replicate
            && !device::all_reduce(group, &reduced)?
        {
            let mut buffer = HostSliceMut::<T>::write(&reduced)?;
            group.all_reduce(&mut buffer, ReduceOp::Avg)?;
            buffer.finish()?;
        }
        Ok(reduced)
    }
}
