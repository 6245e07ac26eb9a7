//! A rank's GPU, in whose memory boxes are packed, sent and received.

use std::ops::Range;

use fsdp_comm::device::{DeviceGroup, DeviceSlice, DeviceSliceMut};
use fsdp_comm::{CommError, ProcessGroup};
use fsdp_flat::FlatError;
use fsdp_flat::storage::GpuBuffer;

use super::packing::Outgoing;
use crate::error::StateError;

/// A rank's GPU memory for one window of what the collectives move: what the rank sends, and what
/// arrives.
#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) outgoing: GpuBuffer,
    pub(super) arriving: GpuBuffer,
}

impl Gpu {
    /// Returns buffers, without memory yet, for this rank of the group; `None` on all ranks if the
    /// group moves host memory only.
    ///
    /// # Errors
    /// CUDA's.
    pub(super) fn of_group(group: &ProcessGroup) -> Result<Option<Self>, StateError> {
        let Some(device_group) = group.device() else {
            return Ok(None);
        };
        let outgoing = GpuBuffer::new(device_group.ordinal())?;
        Ok(Some(Gpu {
            arriving: outgoing.beside(),
            outgoing,
        }))
    }

    /// Puts a box into the outgoing bytes.
    ///
    /// # Errors
    /// A tensor that cannot be read; CUDA's.
    pub(super) fn pack(
        &mut self,
        offset: usize,
        outgoing: &Outgoing<'_>,
    ) -> Result<(), StateError> {
        if let Some(tensor) = outgoing.gpu_tensor(self.outgoing.ordinal()) {
            return Ok(self.outgoing.put_tensor(offset, &tensor)?);
        }
        let mut packed = Vec::new();
        outgoing.pack(&mut packed)?;
        Ok(self.outgoing.put_bytes(offset, &packed)?)
    }

    /// Sends outgoing bytes to each rank, and waits for those that arrive.
    ///
    /// # Errors
    /// The same on every rank.
    pub(super) fn all_to_all(
        &mut self,
        group: DeviceGroup<'_>,
        receive_counts: &[usize],
        send_counts: &[usize],
    ) -> Result<(), GpuError> {
        let receive_bytes = receive_counts.iter().sum();
        self.arriving.reserve(receive_bytes)?;
        let mut arriving = self.arriving.view_mut(receive_bytes)?;
        let outgoing = self.outgoing.view(send_counts.iter().sum())?;
        let stream = self.outgoing.stream();
        let pending = group.all_to_all_uneven(
            &mut DeviceSliceMut::new(&mut arriving, stream),
            receive_counts,
            &DeviceSlice::new(&outgoing, stream),
            send_counts,
        )?;
        Ok(pending.wait()?)
    }

    /// Sends the outgoing bytes of the root to all ranks. On every rank, also on the root, they are
    /// then those that have arrived.
    ///
    /// # Errors
    /// The same on every rank.
    pub(super) fn broadcast(
        &mut self,
        group: DeviceGroup<'_>,
        bytes: usize,
        root: usize,
    ) -> Result<(), GpuError> {
        // The collective is done in place, so the buffer that the root has packed becomes the
        // arriving one.
        std::mem::swap(&mut self.outgoing, &mut self.arriving);
        self.arriving.reserve(bytes)?;
        let stream = self.outgoing.stream();
        let mut buffer = self.arriving.view_mut(bytes)?;
        let pending = group.broadcast(&mut DeviceSliceMut::new(&mut buffer, stream), root)?;
        Ok(pending.wait()?)
    }

    /// Copies ranges of what has arrived, one after the other, into slices of host memory, one
    /// after the other. The slices have as many bytes as the ranges, but need not be cut where
    /// these are.
    ///
    /// # Errors
    /// CUDA's.
    pub(super) fn copy_to_host(
        &self,
        ranges: &[Range<usize>],
        outputs: &mut [&mut [u8]],
    ) -> Result<(), StateError> {
        let mut outputs = outputs.iter_mut().map(|output| &mut **output);
        let mut output: &mut [u8] = &mut [];
        for range in ranges {
            self.arriving.read(range.clone(), &mut |mut piece: &[u8]| {
                while !piece.is_empty() {
                    if output.is_empty() {
                        output = outputs.next().expect("the slices have all bytes");
                        continue;
                    }
                    let len = piece.len().min(output.len());
                    let (filled, later) = std::mem::take(&mut output).split_at_mut(len);
                    let (copied, rest) = piece.split_at(len);
                    filled.copy_from_slice(copied);
                    (output, piece) = (later, rest);
                }
                Ok::<(), FlatError>(())
            })?;
        }
        Ok(())
    }
}

/// An error of a collective on GPU memory.
pub(super) enum GpuError {
    /// Every rank has it.
    Comm(CommError),
    /// Only this rank has it, and cannot take part in the collective.
    Own(StateError),
}

impl From<CommError> for GpuError {
    fn from(error: CommError) -> Self {
        GpuError::Comm(error)
    }
}

impl From<FlatError> for GpuError {
    fn from(error: FlatError) -> Self {
        GpuError::Own(error.into())
    }
}
