//! Bytes of boxes: read from the tensors that hold them, packed for sending, and copied to their
//! destinations.

#[cfg(feature = "nccl")]
use candle_core::DeviceLocation;
use candle_core::{Device, Tensor};
use fsdp_flat::storage::{HostBytes, to_device, with_joined_bytes};
use fsdp_flat::{RawTensor, non_temporal_copy};
use fsdp_layout::TensorBox;
use fsdp_layout::boxes::{CopyRun, copy_runs};

use crate::error::StateError;
use crate::memory::try_reserve;
use crate::state_dict::StateValue;

/// A box and its elements: in host memory, or on their own device.
#[derive(Debug)]
pub(crate) struct BoxBytes {
    bounds: TensorBox,
    data: Data,
}

/// The elements of a box.
#[derive(Debug)]
enum Data {
    /// Contiguous; on the CPU, unless it was to stay where it is.
    Tensor(Tensor),
    Raw(RawTensor),
}

impl BoxBytes {
    /// Returns the boxes that a value has on this rank. Those on the CPU are not copied if they are
    /// contiguous. A value that is no tensor has none.
    ///
    /// # Errors
    /// A tensor that cannot be copied to the host.
    pub(crate) fn from_value(value: &StateValue) -> Result<Vec<BoxBytes>, StateError> {
        // Both steps share the storage if nothing has to change.
        Self::of_value(value, |tensor| {
            Ok(to_device(tensor, &Device::Cpu)?.contiguous()?)
        })
    }

    /// Returns the same boxes as [`Self::from_value`], and leaves the elements on their device.
    ///
    /// # Errors
    /// A tensor that cannot be made contiguous.
    pub(super) fn in_place(value: &StateValue) -> Result<Vec<BoxBytes>, StateError> {
        Self::of_value(value, |tensor| Ok(tensor.contiguous()?))
    }

    /// Returns the boxes that a value has on this rank, each with what `place` makes of its tensor.
    fn of_value(
        value: &StateValue,
        place: impl Fn(&Tensor) -> Result<Tensor, StateError>,
    ) -> Result<Vec<BoxBytes>, StateError> {
        let make = |bounds: TensorBox, tensor: &Tensor| {
            // A box is read as one slice.
            place(&tensor.detach()).map(|tensor| BoxBytes {
                bounds,
                data: Data::Tensor(tensor),
            })
        };
        match value {
            StateValue::Tensor(tensor) => Ok(vec![make(TensorBox::whole(tensor.dims()), tensor)?]),
            StateValue::Raw(tensor) => Ok(vec![BoxBytes {
                bounds: TensorBox::whole(tensor.shape()),
                data: Data::Raw(tensor.clone()),
            }]),
            StateValue::Sharded(tensor) => tensor
                .shards()
                .iter()
                .filter(|shard| !shard.bounds.is_empty())
                .map(|shard| make(shard.bounds.clone(), &shard.tensor))
                .collect(),
            _ => Ok(Vec::new()),
        }
    }

    /// Returns the box.
    pub(crate) const fn bounds(&self) -> &TensorBox {
        &self.bounds
    }

    /// Returns what `f` returns for the bytes of the box.
    ///
    /// # Errors
    /// A tensor whose memory is released.
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
    element_bytes: usize,
    output: &mut [u8],
) -> Result<(), StateError> {
    for source in sources {
        if let Some(overlap) = source.bounds.intersect(bounds) {
            let runs = copy_runs(&overlap, &source.bounds, target);
            source.read(|bytes| copy_elements(runs, element_bytes, bytes, output))?;
        }
    }
    Ok(())
}

/// Copies runs of elements from one buffer to another.
pub(super) fn copy_elements(
    runs: impl IntoIterator<Item = CopyRun>,
    element_bytes: usize,
    input: &[u8],
    output: &mut [u8],
) {
    for CopyRun { src, dst, len } in runs {
        let source = &input[src * element_bytes..(src + len) * element_bytes];
        non_temporal_copy(
            &mut output[dst * element_bytes..(dst + len) * element_bytes],
            source,
        );
    }
}

/// A box to be sent.
pub(super) struct Outgoing<'a> {
    /// The boxes of its tensor that are on this rank.
    pub(super) sources: &'a [BoxBytes],
    pub(super) bounds: &'a TensorBox,
    /// Bytes of an element.
    pub(super) element_bytes: usize,
}

impl<'a> Outgoing<'a> {
    pub(super) fn byte_len(&self) -> usize {
        self.bounds.numel() * self.element_bytes
    }

    /// Returns the candle tensor that has exactly the elements of the box, if there is one.
    fn tensor_of_box(&self) -> Option<&'a Tensor> {
        let mut sources = self.sources.iter();
        match &sources.find(|source| source.bounds == *self.bounds)?.data {
            Data::Tensor(tensor) => Some(tensor),
            Data::Raw(_) => None,
        }
    }

    /// Returns the elements of the box in a contiguous tensor on the GPU with this CUDA ordinal,
    /// if they are there, and if candle can cut them out.
    #[cfg(feature = "nccl")]
    pub(super) fn gpu_tensor(&self, ordinal: usize) -> Option<Tensor> {
        let mut sources = self.sources.iter();
        let source = sources
            .find(|source| source.bounds.intersect(self.bounds).as_ref() == Some(self.bounds))?;
        let Data::Tensor(tensor) = &source.data else {
            return None;
        };
        if !matches!(tensor.device().location(), DeviceLocation::Cuda { gpu_id } if gpu_id == ordinal)
        {
            return None;
        }
        let mut part = tensor.reshape(source.bounds.sizes.as_slice()).ok()?;
        for (dimension, &size) in self.bounds.sizes.iter().enumerate() {
            let start = self.bounds.offsets[dimension] - source.bounds.offsets[dimension];
            part = part.narrow(dimension, start, size).ok()?;
        }
        part.contiguous().ok()
    }

    /// Appends the box. If it cannot be read, too little may have been appended.
    pub(super) fn pack(&self, packed: &mut Vec<u8>) -> Result<(), StateError> {
        let start = packed.len();
        // The length depends on the other ranks' requests, so a lack of memory is an error.
        try_reserve(packed, self.byte_len())?;
        packed.resize(start + self.byte_len(), 0);
        let output = &mut packed[start..];
        read_box(
            self.sources,
            self.bounds,
            self.bounds,
            self.element_bytes,
            output,
        )
    }
}

/// Runs `f` on the bytes of boxes, one box after the other. The bytes are not copied if the boxes
/// are adjacent in one storage, as the pieces of a FlatParameter are.
///
/// `f` calls a collective, for which other ranks wait. So it also runs if boxes cannot be read:
/// then it gets zeros, and the error is returned together with its result.
pub(super) fn with_packed<R>(
    boxes: &[Outgoing<'_>],
    f: impl FnOnce(&[u8]) -> R,
) -> (R, Result<(), StateError>) {
    let tensors: Option<Vec<&Tensor>> = boxes.iter().map(Outgoing::tensor_of_box).collect();
    // Without tensors there is nothing to join, and `f` comes back.
    match with_joined_bytes(&tensors.unwrap_or_default(), f) {
        Ok(result) => (result, Ok(())),
        Err(f) => {
            let mut packed = Vec::new();
            let outcome = boxes
                .iter()
                .try_for_each(|outgoing| outgoing.pack(&mut packed));
            // The other ranks expect this many bytes, also if some could not be read.
            packed.resize(boxes.iter().map(Outgoing::byte_len).sum(), 0);
            (f(&packed), outcome)
        }
    }
}
