//! The exchanges of boxes in GPU memory.

use std::collections::BTreeMap;
use std::ops::Range;

use fsdp_comm::CommError;
use fsdp_comm::device::DeviceGroup;
use fsdp_flat::LocalShard;
use fsdp_flat::storage::{BufferCopy, HostBytesMut, zeroed_vec};
use fsdp_layout::TensorBox;
use fsdp_layout::boxes::copy_runs;

use super::exchange::{
    BUCKET_BYTES, Exchange, MAX_RUNS, Transfer, bytes_from_ranks, pieces_in_sender_order,
    rounds_of_receivers, wanted_bytes,
};
use super::gpu::{Gpu, GpuError};
use super::packing::copy_elements;
use super::route::{Piece, Route};
use crate::error::StateError;

/// The number of bytes that are copied to the host and back in about the time of one call, which
/// the copy of a run on the GPU takes.
const RUN_BYTES: usize = 16 << 10;

/// The pieces that a round of an exchange moves.
#[derive(Clone, Copy)]
enum Pieces {
    /// Parts of whole tensors, the same for each receiver.
    Whole,
    /// Parts that make up what a receiver wants.
    Wanted,
}

impl Pieces {
    fn of_transfer(self, transfer: &Transfer<'_>, receiver: usize) -> Vec<Piece> {
        match self {
            Pieces::Whole => transfer.layout.pieces_of_whole(),
            Pieces::Wanted => transfer.layout.pieces_for(receiver),
        }
    }
}

impl<'g> Exchange<'g> {
    /// Moves a window of a bucket by the collectives of the GPU. Unlike on the host, a rank
    /// gets its own elements with those of the others, because all are copied from the GPU
    /// together.
    pub(super) fn move_on_gpu(
        &mut self,
        gpu: &mut Gpu,
        transfers: &mut [Transfer<'_>],
        route: &Route,
    ) -> Result<(), CommError> {
        let rank_count = self.group.world_size();
        match route {
            // Nothing moves on this route.
            Route::Local => Ok(()),
            Route::Broadcast { root } => {
                let pieces = pieces_of_whole(transfers);
                let sent: Vec<_> = pieces
                    .into_iter()
                    .filter(|(_, piece)| piece.source == *root)
                    .collect();
                self.broadcast_on_gpu(gpu, transfers, *root, &sent)
            }
            Route::Gather { roots } => roots.iter().try_for_each(|&root| {
                self.exchange_on_gpu(gpu, transfers, root..root + 1, Pieces::Wanted)
            }),
            Route::AllGather => {
                let pieces = pieces_of_whole(transfers);
                let held_bytes = bytes_from_ranks(transfers, &pieces, rank_count);
                // In one call a rank has its part in memory once for each rank.
                let largest = held_bytes
                    .iter()
                    .max()
                    .map_or(0, |bytes| bytes * rank_count);
                if largest <= BUCKET_BYTES {
                    return self.exchange_on_gpu(gpu, transfers, 0..rank_count, Pieces::Whole);
                }
                pieces
                    .chunk_by(|(_, first), (_, second)| first.source == second.source)
                    .filter(|sent| held_bytes[sent[0].1.source] > 0)
                    .try_for_each(|sent| {
                        self.broadcast_on_gpu(gpu, transfers, sent[0].1.source, sent)
                    })
            }
            Route::Scatter { .. } => rounds_of_receivers(&wanted_bytes(transfers, rank_count))
                .into_iter()
                .try_for_each(|receivers| {
                    self.exchange_on_gpu(gpu, transfers, receivers, Pieces::Wanted)
                }),
            Route::AllToAll => self.exchange_on_gpu(gpu, transfers, 0..rank_count, Pieces::Wanted),
        }
    }

    /// Sends the `receivers` their pieces, by one all-to-all in which all ranks take part.
    fn exchange_on_gpu(
        &mut self,
        gpu: &mut Gpu,
        transfers: &mut [Transfer<'_>],
        receivers: Range<usize>,
        pieces: Pieces,
    ) -> Result<(), CommError> {
        let (rank, rank_count) = (self.group.rank(), self.group.world_size());
        let mut send_counts = vec![0; rank_count];
        let mut outgoing = Vec::new();
        for receiver in receivers.clone() {
            for (index, transfer) in transfers.iter().enumerate() {
                // Most ranks of a large group have nothing for each other.
                if !transfer.layout.moves_between(rank, receiver) {
                    continue;
                }
                for piece in pieces.of_transfer(transfer, receiver) {
                    if piece.source == rank {
                        send_counts[receiver] += transfer.bytes_of(&piece.bounds);
                        outgoing.push((index, piece.bounds));
                    }
                }
            }
            // The others get the same.
            if matches!(pieces, Pieces::Whole) {
                let sent_bytes = send_counts[receiver];
                send_counts[receivers.clone()].fill(sent_bytes);
                break;
            }
        }
        let copies = match pieces {
            Pieces::Whole => receivers.len(),
            Pieces::Wanted => 1,
        };
        self.pack_on_gpu(gpu, transfers, &outgoing, copies)?;
        let arriving = if receivers.contains(&rank) {
            pieces_in_sender_order(transfers, |transfer| pieces.of_transfer(transfer, rank))
        } else {
            Vec::new()
        };
        let receive_counts = bytes_from_ranks(transfers, &arriving, rank_count);
        let group = self.device_group();
        let moved = gpu.all_to_all(group, &receive_counts, &send_counts);
        self.end_on_all(moved)?;
        self.unpack_from_gpu(gpu, transfers, &arriving)
    }

    /// Sends pieces of the root to all ranks: its parts of whole tensors.
    fn broadcast_on_gpu(
        &mut self,
        gpu: &mut Gpu,
        transfers: &mut [Transfer<'_>],
        root: usize,
        pieces: &[(usize, Piece)],
    ) -> Result<(), CommError> {
        let bytes = bytes_from_ranks(transfers, pieces, self.group.world_size());
        if self.group.rank() == root {
            let outgoing: Vec<_> = pieces
                .iter()
                .map(|(index, piece)| (*index, piece.bounds.clone()))
                .collect();
            self.pack_on_gpu(gpu, transfers, &outgoing, 1)?;
        }
        let moved = gpu.broadcast(self.device_group(), bytes[root], root);
        self.end_on_all(moved)?;
        self.unpack_from_gpu(gpu, transfers, pieces)
    }

    /// Returns the collectives of the group on GPU memory.
    fn device_group(&self) -> DeviceGroup<'g> {
        let device_group = self.group.device();
        device_group.expect("only a group that has them moves anything on GPUs")
    }

    /// Puts boxes of tensors, each with the index of its tensor, into the outgoing bytes, one
    /// after the other, and then all of them again until they are there `copies` times. Of what
    /// cannot be read, zeros are sent.
    fn pack_on_gpu(
        &mut self,
        gpu: &mut Gpu,
        transfers: &[Transfer<'_>],
        boxes: &[(usize, TensorBox)],
        copies: usize,
    ) -> Result<(), CommError> {
        let sizes = boxes
            .iter()
            .map(|(index, bounds)| transfers[*index].bytes_of(bounds));
        let bytes: usize = sizes.sum();
        let reserved = gpu.outgoing.reserve(bytes * copies);
        self.end_on_all(reserved)?;
        let mut offset = 0;
        for (index, bounds) in boxes {
            let outgoing = transfers[*index].outgoing(bounds);
            let range = offset..offset + outgoing.byte_len();
            let packed = gpu.pack(offset, &outgoing);
            if packed.is_err() {
                self.record_error(packed);
                let zeroed = gpu.outgoing.put_zeros(range.clone());
                self.end_on_all(zeroed)?;
            }
            offset = range.end;
        }
        let repeated = gpu.outgoing.repeat_first_bytes(bytes, copies);
        self.end_on_all(repeated)
    }

    /// Copies pieces that have arrived, one after the other, to where they belong: on the GPU or on
    /// the host.
    fn unpack_from_gpu(
        &mut self,
        gpu: &Gpu,
        transfers: &mut [Transfer<'_>],
        pieces: &[(usize, Piece)],
    ) -> Result<(), CommError> {
        let mut for_host = Vec::new();
        let mut ranges: Vec<Range<usize>> = Vec::new();
        let mut for_gpu: BTreeMap<(usize, usize), Vec<(usize, &Piece)>> = BTreeMap::new();
        let mut offset = 0;
        for (index, piece) in pieces {
            let transfer = &transfers[*index];
            let range = offset..offset + transfer.bytes_of(&piece.bounds);
            offset = range.end;
            if transfer.gpu_tensor.is_some() {
                let found = for_gpu.entry((*index, piece.target)).or_default();
                found.push((range.start, piece));
            } else if !transfer.slots.is_empty() {
                // Pieces that follow each other are copied together.
                match ranges.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => ranges.push(range),
                }
                for_host.push((*index, piece.clone()));
            }
        }
        for ((index, target), pieces) in for_gpu {
            let copied = put_on_gpu(gpu, &transfers[index], target, &pieces);
            self.record_error(copied);
        }
        if for_host.is_empty() {
            return Ok(());
        }
        let mut copied = Ok(());
        self.receive(transfers, &for_host, |outputs| {
            copied = gpu.copy_to_host(&ranges, outputs);
            Ok(())
        })?;
        self.record_error(copied);
        Ok(())
    }

    /// Returns the error of a step, and ends the operation on all ranks if it is only this
    /// rank's: the others would wait for it in the next collective.
    fn end_on_all(&self, outcome: Result<(), impl Into<GpuError>>) -> Result<(), CommError> {
        outcome.map_err(|error| match error.into() {
            GpuError::Comm(error) => error,
            GpuError::Own(error) => self.abort(&error),
        })
    }
}

/// Returns the pieces of whole tensors that ranks have, in the order of the ranks.
fn pieces_of_whole(transfers: &[Transfer<'_>]) -> Vec<(usize, Piece)> {
    pieces_in_sender_order(transfers, |transfer| transfer.layout.pieces_of_whole())
}

/// Copies pieces that have arrived, each with its place there, into the tensor of a wanted box,
/// which is on the GPU.
///
/// # Errors
/// A tensor that was released meanwhile; CUDA's.
fn put_on_gpu(
    gpu: &Gpu,
    transfer: &Transfer<'_>,
    target: usize,
    pieces: &[(usize, &Piece)],
) -> Result<(), StateError> {
    let element_bytes = transfer.layout.element_bytes;
    let wanted_box = &transfer.slot_boxes[target];
    let tensor = transfer.gpu_tensor.as_ref();
    let Some(shard) = tensor.and_then(|tensor| tensor.shards().get(target)) else {
        return Ok(());
    };
    let runs_of = |piece: &Piece| copy_runs(&piece.bounds, &piece.bounds, wanted_box);
    let run_count: usize = pieces.iter().map(|(_, piece)| runs_of(piece).count()).sum();
    let tensor_bytes = shard.tensor.elem_count() * element_bytes;
    if run_count > MAX_RUNS && run_count.saturating_mul(RUN_BYTES) > tensor_bytes {
        return put_through_host(gpu, transfer, shard, pieces);
    }
    let mut copies = Vec::with_capacity(run_count);
    for (start, piece) in pieces {
        copies.extend(runs_of(piece).map(|run| BufferCopy {
            source: start + run.src * element_bytes,
            target: run.dst * element_bytes,
            len: run.len * element_bytes,
        }));
    }
    Ok(gpu.arriving.copy_to_tensor(&copies, &shard.tensor)?)
}

/// Does the same as [`put_on_gpu`], but fills a copy of the tensor on the host. It is for pieces of
/// so many runs that the calls would take longer than copying the tensor to the host and back.
///
/// # Errors
/// The same as [`put_on_gpu`].
fn put_through_host(
    gpu: &Gpu,
    transfer: &Transfer<'_>,
    shard: &LocalShard,
    pieces: &[(usize, &Piece)],
) -> Result<(), StateError> {
    let mut bytes = HostBytesMut::write(&shard.tensor)?;
    for (start, piece) in pieces {
        let mut arrived = zeroed_vec(transfer.bytes_of(&piece.bounds))?;
        let range = *start..start + arrived.len();
        gpu.copy_to_host(&[range], &mut [&mut arrived])?;
        let runs = copy_runs(&piece.bounds, &piece.bounds, &shard.bounds);
        copy_elements(runs, transfer.layout.element_bytes, &arrived, &mut bytes);
    }
    Ok(bytes.finish()?)
}
