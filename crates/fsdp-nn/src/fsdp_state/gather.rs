//! One flat shard of every rank to whole tensors, on the ranks that keep them: one collective a flat tensor.

use candle_core::{Device, Tensor};
use fsdp_comm::ProcessGroup;
use fsdp_flat::copy_streamed;
use fsdp_flat::storage::{TensorBuffer, to_device, with_bytes};
use fsdp_layout::FlatLayout;
use fsdp_layout::flat::FlatEntry;

use crate::Result;
use crate::parameters::ShardedParameters;

/// Who gets a full state dict.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keep {
    /// Only rank 0 of the model's group, rather than all ranks.
    pub(crate) rank0_only: bool,
    /// Whether tensors go to the CPU.
    pub(crate) offload_to_cpu: bool,
}

impl Keep {
    /// Whether this rank keeps the result.
    pub(crate) fn here(&self, parameters: &ShardedParameters) -> bool {
        !self.rank0_only || parameters.group().rank() == 0
    }

    /// Where tensors that this rank gets from memory on `device` go.
    pub(crate) fn place(&self, tensor: Tensor) -> Result<Tensor> {
        match self.offload_to_cpu {
            true => Ok(to_device(&tensor, &Device::Cpu)?),
            false => Ok(tensor),
        }
    }
}

/// The parameters that `wanted` names, whole, from the ranks' flat shards of one FlatParameter; on a rank that does
/// not keep them nothing. `shard` is as long as this rank's shard, right padding included, of any dtype.
///
/// Collectives, over the shard group: one all-gather, or with `rank0_only` one gather to the rank-0 that keeps all, in
/// which the groups of its replicas have no part. A rank that keeps nothing needs no memory for it. None if nothing is
/// sharded.
pub(crate) fn gather_flat(
    parameters: &ShardedParameters,
    layout: &FlatLayout,
    shard: &Tensor,
    wanted: &[bool],
    keep: Keep,
) -> Result<Option<Vec<Option<Tensor>>>> {
    let Some(group) = parameters.shard_group() else {
        return match keep.here(parameters) {
            true => Ok(Some(split(layout, &with_bytes(shard, <[u8]>::to_vec)?, shard, wanted)?)),
            false => Ok(None),
        };
    };
    if keep.rank0_only {
        return gather_to_rank0(parameters, group, layout, shard, wanted);
    }
    // Elements go where they are to stay; what is padding, or not wanted, goes to scratch memory.
    let size = shard.dtype().size_in_bytes();
    let mut buffers: Vec<TensorBuffer> = Vec::new();
    let mut scratch: Vec<Vec<u8>> = Vec::new();
    let goes = |entry: &FlatEntry| matches!(*entry, FlatEntry::Param(param) if wanted[param]);
    for (entry, &numel) in layout.entries().iter().zip(layout.numels_with_padding()) {
        match *entry {
            FlatEntry::Param(param) if wanted[param] => {
                buffers.push(TensorBuffer::zeros(&layout.shapes()[param], shard.dtype())?);
            }
            _ => scratch.push(vec![0; numel * size]),
        }
    }
    let right = layout.padded_unsharded_numel() - layout.unpadded_unsharded_numel();
    scratch.push(vec![0; right * size]);
    let (mut to_keep, mut to_drop) = (buffers.iter_mut(), scratch.iter_mut());
    let mut slices: Vec<&mut [u8]> = Vec::new();
    for entry in layout.entries() {
        let slice = match goes(entry) {
            true => to_keep.next().map(TensorBuffer::bytes_mut),
            false => to_drop.next().map(Vec::as_mut_slice),
        };
        slices.extend(slice);
    }
    slices.extend(to_drop.next().map(Vec::as_mut_slice));
    with_bytes(shard, |bytes| group.all_gather_into_slices(&mut slices, bytes))??;
    let mut buffers = buffers.into_iter();
    let mut whole: Vec<Option<Tensor>> = vec![None; wanted.len()];
    for entry in layout.entries() {
        if let FlatEntry::Param(param) = *entry
            && wanted[param]
        {
            whole[param] = buffers.next().map(TensorBuffer::into_tensor);
        }
    }
    Ok(Some(whole))
}

fn gather_to_rank0(
    parameters: &ShardedParameters,
    group: &ProcessGroup,
    layout: &FlatLayout,
    shard: &Tensor,
    wanted: &[bool],
) -> Result<Option<Vec<Option<Tensor>>>> {
    let first = parameters.group().global_ranks().first();
    let Some(root) = group.global_ranks().iter().position(|rank| Some(rank) == first) else { return Ok(None) };
    if group.rank() != root {
        with_bytes(shard, |bytes| group.gather(None, bytes, root))??;
        return Ok(None);
    }
    let mut flat = vec![0u8; layout.padded_unsharded_numel() * shard.dtype().size_in_bytes()];
    with_bytes(shard, |bytes| group.gather(Some(&mut flat), bytes, root))??;
    Ok(Some(split(layout, &flat, shard, wanted)?))
}

/// Copies of the parameters in a whole flat tensor of `like`'s dtype.
fn split(layout: &FlatLayout, flat: &[u8], like: &Tensor, wanted: &[bool]) -> Result<Vec<Option<Tensor>>> {
    let size = like.dtype().size_in_bytes();
    let copy = |(param, &wanted): (usize, &bool)| -> Result<Option<Tensor>> {
        if !wanted {
            return Ok(None);
        }
        let range = layout.param_range(param);
        let mut buffer = TensorBuffer::zeros(&layout.shapes()[param], like.dtype())?;
        copy_streamed(buffer.bytes_mut(), &flat[range.start * size..range.end * size]);
        Ok(Some(buffer.into_tensor()))
    };
    wanted.iter().enumerate().map(copy).collect()
}
