//! Bytes of boxes: read from the tensors that have them, put in a row for sending, and into their places.

use candle_core::{Device, Tensor};
use fsdp_flat::storage::{to_device, with_bytes};
use fsdp_flat::{RawTensor, copy_streamed};
use fsdp_layout::TensorBox;
use fsdp_layout::boxes::copy_runs;

use crate::{StateError, StateValue};

/// A box in host memory.
#[derive(Debug)]
pub(crate) struct Source {
    bounds: TensorBox,
    data: Data,
}

#[derive(Debug)]
enum Data {
    /// Contiguous, on the CPU.
    Tensor(Tensor),
    Raw(RawTensor),
}

impl Source {
    /// The boxes that a value has on this rank. Those on the CPU are not copied if they are contiguous.
    pub(crate) fn of(value: &StateValue) -> Result<Vec<Source>, StateError> {
        let host = |bounds: TensorBox, tensor: &Tensor| -> Result<Source, StateError> {
            let tensor = to_device(&tensor.detach(), &Device::Cpu)?.contiguous()?;
            Ok(Source { bounds, data: Data::Tensor(tensor) })
        };
        match value {
            StateValue::Tensor(tensor) => Ok(vec![host(TensorBox::whole(tensor.dims()), tensor)?]),
            StateValue::Raw(tensor) => {
                Ok(vec![Source { bounds: TensorBox::whole(tensor.shape()), data: Data::Raw(tensor.clone()) }])
            }
            StateValue::Sharded(tensor) => {
                let shards = tensor.shards().iter().filter(|shard| !shard.bounds.is_empty());
                shards.map(|shard| host(shard.bounds.clone(), &shard.tensor)).collect()
            }
            _ => Ok(Vec::new()),
        }
    }

    fn read<R>(&self, f: impl FnOnce(&[u8]) -> R) -> Result<R, StateError> {
        match &self.data {
            Data::Tensor(tensor) => Ok(with_bytes(tensor, f)?),
            Data::Raw(tensor) => Ok(f(tensor.bytes())),
        }
    }
}

/// Writes the elements of `bounds`, which `sources` have, into a row-major buffer of the box `target`.
pub(crate) fn read_box(
    sources: &[Source],
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

/// Copies the elements of `bounds` from a row-major buffer of the box `src` to one of the box `dst`.
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
        copy_streamed(&mut to[dst..dst + len], &from[src..src + len]);
    }
}

/// Hands boxes to `f` as bytes, one box after the other: without a copy if they lie so in one source.
/// If they cannot be read `f` gets zeros, so that the collective it calls still happens, and the reason is returned.
pub(crate) fn with_packed<R>(
    sources: &[Source],
    boxes: &[&TensorBox],
    element: usize,
    f: impl FnOnce(&[u8]) -> R,
) -> (R, Result<(), StateError>) {
    if let [bounds] = boxes
        && let Some(source) = sources.iter().find(|source| source.bounds == **bounds)
    {
        let mut f = Some(f);
        let read = source.read(|bytes| f.take().map(|f| f(bytes)));
        return match (read, f) {
            (Ok(Some(result)), _) => (result, Ok(())),
            (read, Some(f)) => (f(&vec![0; bounds.numel() * element]), read.map(|_| ())),
            (_, None) => unreachable!("`read` returns what the closure that it called returned"),
        };
    }
    let mut packed = Vec::new();
    let read = pack(sources, boxes, element, &mut packed);
    (f(&packed), read)
}

/// Appends boxes, one after the other; zeros for those that cannot be read.
pub(crate) fn pack(
    sources: &[Source],
    boxes: &[&TensorBox],
    element: usize,
    packed: &mut Vec<u8>,
) -> Result<(), StateError> {
    let start = packed.len();
    let bytes: usize = boxes.iter().map(|bounds| bounds.numel() * element).sum();
    packed.resize(start + bytes, 0);
    let mut rest = &mut packed[start..];
    for bounds in boxes {
        let (to, after) = rest.split_at_mut(bounds.numel() * element);
        read_box(sources, bounds, bounds, element, to)?;
        rest = after;
    }
    Ok(())
}
