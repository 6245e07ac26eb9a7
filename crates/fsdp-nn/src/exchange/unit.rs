//! The collectives of one unit: its parameters are gathered, and its gradients reduced.

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Tensor};
use fsdp_comm::{Element, ProcessGroup, ReduceOp};
use fsdp_flat::storage::{
    Contents, HostSlice, HostSliceMut, Scalar, to_device, upload, zeroed_vec, zeros_on,
};
use fsdp_flat::{FlatParameter, with_float};
use fsdp_layout::FlatLayout;
use fsdp_layout::flat::FlatEntry;
use tracing::trace;

use super::device;
use super::gradient::add_assign;
use super::groups::Groups;
use crate::error::Result;
use crate::tasks;

/// The parts of one unit that its collectives need, which another thread may run.
#[derive(Debug)]
pub(crate) struct UnitExchange {
    /// The index of the unit among those of the model.
    pub(crate) unit_number: usize,
    pub(crate) name: String,
    pub(crate) layout: FlatLayout,
    /// The dtype of shards, reduced gradients and optimizer state.
    pub(crate) dtype: DType,
    /// The dtype in which the parameters are gathered and the model computes.
    pub(crate) compute_dtype: DType,
    /// The dtype in which gradients are reduced.
    pub(crate) reduce_dtype: DType,
    /// The device on which the model computes.
    pub(crate) device: Device,
    /// The device on which shards, reduced gradients and optimizer state live.
    pub(crate) shard_device: Device,
    pub(crate) groups: Groups,
    /// This rank's shard; `None` if the parameters' own storages hold the authoritative values.
    pub(crate) flat: Option<FlatParameter>,
    /// `true` while the parameters are gathered: their storages are filled.
    pub(crate) is_unsharded: AtomicBool,
}

/// The gathered values of a unit, to be put into the tensors of its parameters.
#[derive(Debug)]
pub(crate) enum Gathered {
    /// The elements of each parameter, in the host's memory.
    Host(Vec<Contents>),
    /// The unsharded FlatParameter, on a GPU.
    Device(Tensor),
}

/// The state of a unit's gradients before, during and after their reduction.
#[derive(Debug, Default)]
pub(crate) struct Reduction {
    /// Gradients of this rank's own batch, unsharded.
    pub(crate) unsharded: Option<Tensor>,
    /// The gradient that has been reduced over the shard group, and not yet over replicas; as long
    /// as the shard.
    pub(crate) partial: Option<Tensor>,
    /// The gradient that has been reduced over all ranks, in the dtype and on the device of the
    /// shards.
    pub(crate) reduced: Option<Tensor>,
    /// `true` if the gradients are also reduced over replicas now.
    pub(crate) all_reduces: bool,
    /// The dtype in which gradients are sent, if it is another than that of the reduction.
    pub(crate) sent_dtype: Option<DType>,
}

impl UnitExchange {
    /// Returns `true` while the parameters are gathered: their storages are filled.
    pub(crate) fn is_unsharded(&self) -> bool {
        self.is_unsharded.load(Ordering::Relaxed)
    }

    /// Records that the parameters' storages have been filled or released.
    pub(crate) fn set_unsharded(&self, is_unsharded: bool) {
        self.is_unsharded.store(is_unsharded, Ordering::Relaxed);
    }

    /// Returns the bytes of the whole parameters.
    pub(crate) fn unsharded_bytes(&self) -> usize {
        self.layout.numels().iter().sum::<usize>() * self.compute_dtype.size_in_bytes()
    }

    /// Gathers the parameters from all ranks' shards, without putting them into the model's
    /// tensors. Collectives: one all-gather over the shard group, none if nothing is sharded.
    pub(crate) fn all_gather(&self) -> Result<Gathered> {
        let Some(flat) = &self.flat else {
            return Ok(Gathered::Host(Vec::new()));
        };
        // Cast before the collective, so that the narrower dtype is sent.
        let converted = device::cast_elements(flat.shard().clone(), Some(self.compute_dtype))?;
        let shard = upload(&converted, &self.device)?;
        let Some(group) = &self.groups.shard else {
            return self.split_into_params(&shard);
        };
        trace!(unit = %self.name, "all-gather parameters");
        match device::all_gather(group, &shard)? {
            Some(unsharded) => Ok(Gathered::Device(unsharded)),
            None => {
                with_float!(self.compute_dtype, T => self.all_gather_typed::<T>(&shard, group))
            }
        }
    }

    /// Gathers the parameters on the host, from a shard of elements of type `T`. Each parameter
    /// gets a buffer of its own, and so does each padding, so that nothing is copied afterwards.
    fn all_gather_typed<T: Scalar + Element>(
        &self,
        shard: &Tensor,
        group: &ProcessGroup,
    ) -> Result<Gathered> {
        // The group fills the buffers in the order of the flat layout, padding included.
        let mut buffers: Vec<Vec<T>> = Vec::with_capacity(self.layout.entries().len() + 1);
        for &numel in self.layout.numels_with_padding() {
            buffers.push(zeroed_vec(numel)?);
        }
        let right_padding =
            self.layout.padded_unsharded_numel() - self.layout.unpadded_unsharded_numel();
        buffers.push(zeroed_vec(right_padding)?);
        let mut slices: Vec<&mut [T]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        group.all_gather_into_slices(&mut slices, &HostSlice::<T>::read(shard)?)?;
        let entries = self.layout.entries().iter().zip(buffers);
        let params = entries.filter(|(entry, _)| matches!(entry, FlatEntry::Param(_)));
        let contents = params.map(|(_, buffer)| Contents::new(buffer)).collect();
        Ok(Gathered::Host(contents))
    }

    /// Returns the unsharded FlatParameter in the dtype of the shards; `None` if the parameters'
    /// own storages hold the authoritative values. Collectives: one all-gather over the shard
    /// group, none if nothing is sharded.
    pub(crate) fn all_gather_flat(&self) -> Result<Option<Tensor>> {
        let Some(flat) = &self.flat else {
            return Ok(None);
        };
        let Some(group) = &self.groups.shard else {
            return Ok(Some(flat.shard().clone()));
        };
        if let Some(unsharded) = device::all_gather(group, flat.shard())? {
            return Ok(Some(unsharded));
        }
        with_float!(self.dtype, T => {
            let numel = self.layout.padded_unsharded_numel();
            let mut unsharded = zeroed_vec::<T>(numel)?;
            group.all_gather_into(&mut unsharded, &HostSlice::<T>::read(flat.shard())?)?;
            Ok(Some(Tensor::from_vec(unsharded, numel, &self.device)?))
        })
    }

    /// Splits `unsharded`, an unsharded FlatParameter, into the values of each parameter.
    pub(crate) fn split_into_params(&self, unsharded: &Tensor) -> Result<Gathered> {
        if !unsharded.device().is_cpu() {
            return Ok(Gathered::Device(unsharded.clone()));
        }
        let mut contents = Vec::with_capacity(self.layout.fqns().len());
        for param in 0..self.layout.fqns().len() {
            let range = self.layout.param_range(param);
            let elements = unsharded.narrow(0, range.start, range.len())?;
            contents.push(Contents::from_tensor(&elements)?);
        }
        Ok(Gathered::Host(contents))
    }

    /// Reduces gradients: first over the ranks that shard the parameters, and then, if replicas
    /// reduce now, over the replicas. Collectives: at most one reduce-scatter and one all-reduce.
    pub(crate) fn reduce(&self, mut reduction: Reduction) -> Result<Reduction> {
        // First reduce the gradients of all backwards since the last reduction together. Then add
        // the result to that of earlier reductions (`partial`).
        if let Some(unsharded) = reduction.unsharded.take() {
            trace!(unit = %self.name, "reduce gradients");
            // Gradients that stay on this rank are not rounded.
            let sent_grad = if self.groups.shard.is_some() {
                device::cast_elements(unsharded, reduction.sent_dtype)?
            } else {
                unsharded
            };
            let scattered_grad =
                with_float!(sent_grad.dtype(), T => self.reduce_scatter::<T>(sent_grad)?);
            self.add_to(
                &mut reduction.partial,
                device::cast_elements(scattered_grad, Some(self.reduce_dtype))?,
            )?;
        }
        if self.groups.replicate.is_some() && !reduction.all_reduces {
            return Ok(reduction);
        }
        let Some(partial) = reduction.partial.take() else {
            return Ok(reduction);
        };
        let sent_grad = if self.groups.replicate.is_some() {
            device::cast_elements(partial, reduction.sent_dtype)?
        } else {
            partial
        };
        let reduced = with_float!(sent_grad.dtype(), T => self.all_reduce::<T>(sent_grad)?);
        reduction.reduced = Some(to_device(
            &device::cast_elements(reduced, Some(self.dtype))?,
            &self.shard_device,
        )?);
        Ok(reduction)
    }

    /// Adds `grad` to `sum`, in place. If there is no sum yet, `grad` becomes the sum.
    pub(crate) fn add_to(&self, sum: &mut Option<Tensor>, grad: Tensor) -> Result<()> {
        match sum {
            Some(sum) if !sum.device().is_cpu() => {
                let range = 0..sum.elem_count();
                device::copy_gradient(&grad, sum, range, true)?;
            }
            Some(sum) => with_float!(sum.dtype(), T => {
                let addend = HostSlice::<T>::read(&grad)?;
                tasks::for_each_pair(&mut HostSliceMut::<T>::write(sum)?, &addend, add_assign);
            }),
            None => *sum = Some(grad),
        }
        Ok(())
    }

    /// Returns this rank's shard of the mean of the shard group's gradients. If nothing is sharded,
    /// returns the gradient as it is.
    fn reduce_scatter<T: Scalar + Element>(&self, unsharded: Tensor) -> Result<Tensor> {
        let Some(group) = &self.groups.shard else {
            return Ok(unsharded);
        };
        if let Some(reduced) = device::reduce_scatter(group, &unsharded)? {
            return Ok(reduced);
        }
        // Without NCCL the gradient goes through the host.
        let reduced = zeros_on(
            &[self.layout.sharded_numel()],
            unsharded.dtype(),
            &self.device,
        )?;
        let input = HostSlice::<T>::read(&unsharded)?;
        let mut output = HostSliceMut::<T>::write(&reduced)?;
        group.reduce_scatter(&mut output, &input, ReduceOp::Avg)?;
        output.finish()?;
        Ok(reduced)
    }

    /// Returns the mean of a shard of the gradient over the replicas. Without replicas, returns the
    /// shard as it is.
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
