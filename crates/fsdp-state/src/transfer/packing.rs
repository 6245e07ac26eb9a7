//! Bytes of boxes: read from the tensors that hold them, packed for sending, and copied to their
//! destinations.

use candle_core::{Device, Tensor};
use fsdp_flat::storage::{HostBytes, to_device, with_joined_bytes};
use fsdp_flat::{RawTensor, non_temporal_copy};
use fsdp_layout::TensorBox;
use fsdp_layout::boxes::copy_runs;

use crate::memory::try_reserve;
use crate::{StateError, StateValue};

/// A box and its elements in host memory.
#[derive(Debug)]
pub(crate) struct BoxBytes {
    bounds: TensorBox,
    data: Data,
}

#[derive(Debug)]
enum Data {
    /// Contiguous, on the CPU.
    Tensor(Tensor),
    Raw(RawTensor),
}

impl BoxBytes {
    /// Returns the boxes that a value has on this rank. Those on the CPU are not copied if they are
    /// contiguous.
    pub(crate) fn of(value: &StateValue) -> Result<Vec<BoxBytes>, StateError> {
        match value {
            StateValue::Tensor(tensor) => Ok(vec![Self::on_host(
                TensorBox::whole(tensor.dims()),
                tensor,
            )?]),
            StateValue::Raw(tensor) => Ok(vec![BoxBytes {
                bounds: TensorBox::whole(tensor.shape()),
                data: Data::Raw(tensor.clone()),
            }]),
            StateValue::Sharded(tensor) => {
                let shards = tensor
                    .shards()
                    .iter()
                    .filter(|shard| !shard.bounds.is_empty());
                shards
                    .map(|shard| Self::on_host(shard.bounds.clone(), &shard.tensor))
                    .collect()
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Returns the box.
    pub(crate) const fn bounds(&self) -> &TensorBox {
        &self.bounds
    }

    /// Returns a box whose elements are in a tensor, which is copied to the host if it is not
    /// there.
    fn on_host(bounds: TensorBox, tensor: &Tensor) -> Result<Self, StateError> {
        let tensor = to_device(&tensor.detach(), &Device::Cpu)?.contiguous()?;
        Ok(BoxBytes {
            bounds,
            data: Data::Tensor(tensor),
        })
    }

    /// Calls `f` with the bytes of the box.
    pub(crate) fn read<R>(&self, f: impl FnOnce(&[u8]) -> R) -> Result<R, StateError> {
        match &self.data {
            Data::Tensor(tensor) => Ok(f(&HostBytes::read(tensor)?)),
            Data::Raw(tensor) => Ok(f(tensor.bytes())),
        }
    }
}

/// Writes the elements of `bounds`, which `sources` have, into a row-major buffer of the box
/// `target`.
pub(crate) fn read_box(
    sources: &[BoxBytes],
    bounds: &TensorBox,
    target: &TensorBox,
    element: usize,
    to: &mut [u8],
) -> Result<(), StateError> {
    for source in sources {
        if let Some(overlap) = source.bounds.intersect(bounds) {
            source.read(|from| copy_box(from, &source.bounds, to, target, &overlap, element))?;
        }
    }
    Ok(())
}

/// Copies the elements of `bounds` from a row-major buffer of the box `src` to one of the box
/// `dst`.
pub(crate) fn copy_box(
    from: &[u8],
    src: &TensorBox,
    to: &mut [u8],
    dst: &TensorBox,
    bounds: &TensorBox,
    element: usize,
) {
    for run in copy_runs(bounds, src, dst) {
        let (src, dst, len) = (run.src * element, run.dst * element, run.len * element);
        non_temporal_copy(&mut to[dst..dst + len], &from[src..src + len]);
    }
}

/// A box to be sent: the boxes of its tensor that are on this rank, the box, and the bytes of an
/// element.
pub(crate) type Outgoing<'a> = (&'a [BoxBytes], &'a TensorBox, usize);

/// Runs `f` on the bytes of boxes, one box after the other. The bytes are not copied if the boxes
/// are adjacent in one storage, as the pieces of a FlatParameter are.
///
/// `f` calls a collective, for which other ranks wait. So it also runs if boxes cannot be read:
/// then it gets zeros, and the error is returned together with its result.
pub(crate) fn with_packed<R>(
    boxes: &[Outgoing<'_>],
    f: impl FnOnce(&[u8]) -> R,
) -> (R, Result<(), StateError>) {
    let held: Option<Vec<&Tensor>> = boxes.iter().map(held_exactly).collect();
    let f = match with_joined_bytes(&held.unwrap_or_default(), f) {
        Ok(result) => return (result, Ok(())),
        Err(f) => f,
    };
    let mut packed = Vec::new();
    let read = boxes
        .iter()
        .try_for_each(|outgoing| pack(outgoing, &mut packed));
    // The other ranks expect this many bytes, also if some could not be read.
    let bytes: usize = boxes
        .iter()
        .map(|(_, bounds, element)| bounds.numel() * element)
        .sum();
    packed.resize(bytes, 0);
    (f(&packed), read)
}

/// Returns the candle tensor that has exactly the elements of a box, if there is one.
fn held_exactly<'a>((sources, bounds, _): &Outgoing<'a>) -> Option<&'a Tensor> {
    match &sources
        .iter()
        .find(|source| source.bounds == **bounds)?
        .data
    {
        Data::Tensor(tensor) => Some(tensor),
        Data::Raw(_) => None,
    }
}

/// Appends a box; zeros if it cannot be read.
pub(crate) fn pack(
    (sources, bounds, element): &Outgoing<'_>,
    packed: &mut Vec<u8>,
) -> Result<(), StateError> {
    let (start, bytes) = (packed.len(), bounds.numel() * element);
    try_reserve(packed, bytes)?;
    packed.resize(start + bytes, 0);
    read_box(sources, bounds, bounds, *element, &mut packed[start..])
}
