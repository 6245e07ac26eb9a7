//! Copies of a unit's whole parameters, in the dtype of the shards.

use std::sync::Arc;

use candle_core::Tensor;

use fsdp_flat::storage::owned_copy;

use super::FlatParamHandle;
use crate::Result;

/// A guard that prevents changes of a unit's values until it is dropped.
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
        let exchange = Arc::clone(&self.exchange);
        // Run the gather in the same queue as the units' other collectives, so that their order is
        // the same on all ranks.
        let whole = match &self.overlap {
            Some(overlap) => overlap.run(move || exchange.gather_flat())?,
            None => exchange.gather_flat()?,
        };
        let Some(whole) = whole else {
            return self
                .params
                .iter()
                .map(|param| Ok(owned_copy(&param.tensor.detach())?))
                .collect();
        };
        let layout = &self.exchange.layout;
        let param = |(index, shape): (usize, &Vec<usize>)| {
            let range = layout.param_range(index);
            Ok(owned_copy(
                &whole
                    .narrow(0, range.start, range.len())?
                    .reshape(shape.as_slice())?,
            )?)
        };
        layout.shapes().iter().enumerate().map(param).collect()
    }
}
