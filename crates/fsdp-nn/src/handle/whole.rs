//! The whole parameters of a unit, in memory of their own and in the dtype of the shards.

use std::sync::Arc;

use candle_core::Tensor;

use fsdp_flat::storage::{HostSlice, owned_copy, zeroed_vec};
use fsdp_flat::with_float;

use super::FlatParamHandle;
use crate::{Result, device};

/// A unit whose values nobody can change, until it is dropped.
#[derive(Debug)]
pub(crate) struct InUse(Arc<FlatParamHandle>);

impl InUse {
    pub(crate) fn new(handle: &Arc<FlatParamHandle>) -> Self {
        handle.state().users += 1;
        InUse(Arc::clone(handle))
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.end_use();
    }
}

impl FlatParamHandle {
    /// Returns copies of the parameters, whole, in the dtype of the shards.
    /// Collectives: one all-gather over the shard group, none if nothing is sharded.
    pub(crate) fn gather_whole(&self) -> Result<Vec<Tensor>> {
        let exchange = &self.exchange;
        let Some(flat) = &exchange.flat else {
            return self.params.iter().map(|param| Ok(owned_copy(&param.tensor.detach())?)).collect();
        };
        let whole = match &exchange.groups.shard {
            None => flat.shard().clone(),
            Some(group) => match device::all_gather(group, flat.shard())? {
                Some(whole) => whole,
                None => with_float!(exchange.dtype, T => {
                    let mut whole = zeroed_vec::<T>(exchange.layout.padded_unsharded_numel())?;
                    group.all_gather_into(&mut whole, &HostSlice::<T>::read(flat.shard())?)?;
                    Tensor::from_vec(whole, exchange.layout.padded_unsharded_numel(), &exchange.device)?
                }, else exchange.unsupported()?),
            },
        };
        let param = |(index, shape): (usize, &Vec<usize>)| {
            let range = exchange.layout.param_range(index);
            Ok(owned_copy(&whole.narrow(0, range.start, range.len())?.reshape(shape.as_slice())?)?)
        };
        exchange.layout.shapes().iter().enumerate().map(param).collect()
    }
}
