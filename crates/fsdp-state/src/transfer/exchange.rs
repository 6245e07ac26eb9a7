//! The collectives that carry out a [`Layout`].

use std::ops::Range;

use candle_core::Tensor;
use fsdp_comm::{CommError, ProcessGroup};
use fsdp_flat::ShardedTensor;
use fsdp_flat::storage::{StorageGuard, zeroed_vec};
use fsdp_layout::TensorBox;
use fsdp_layout::boxes::copy_runs;

use super::gpu::Gpu;
use super::packing::{BoxBytes, Outgoing, copy_elements, read_box, with_packed};
use super::route::{Layout, Piece, Route, cut_into_windows};
use super::slots::{SlotPart, carve};
use crate::error::StateError;
use crate::lend::{Lend, Memory, lent_bytes};
use crate::memory::try_reserve;
use crate::state_dict::StateValue;

/// The most bytes of several tensors that one collective carries together: a bucket. A larger
/// tensor goes alone. If its parts have to be packed, it goes in windows of this size.
pub(super) const BUCKET_BYTES: usize = 32 << 20;

/// The bytes that a bucket may have even if the largest tensor is small.
const LEAST_BUCKET_BYTES: usize = 1 << 20;

/// The bytes of tensors after which the ranks tell each other whether one of them has failed.
const STATUS_BYTES: usize = 256 << 20;

/// The most contiguous runs of memory that elements are received into directly. If there are more,
/// the elements arrive in a buffer first.
pub(super) const MAX_RUNS: usize = 4096;

/// One tensor on its way to the boxes that this rank wants.
#[derive(Debug)]
pub(crate) struct Item<'a> {
    /// The boxes that ranks have and want.
    pub(crate) layout: Layout,
    /// This rank's part of it.
    pub(crate) source: &'a StateValue,
}

/// The collectives of one function call.
///
/// A rank that fails sends zeros from then on, so that no other rank waits for it. At regular
/// intervals the ranks agree that none of them has failed; otherwise all return the error.
#[derive(Debug)]
pub(crate) struct Exchange<'g> {
    pub(super) group: &'g ProcessGroup,
    /// This rank's GPU, if the group has collectives on GPU memory. They move all tensors then.
    gpu: Option<Gpu>,
    operation: &'static str,
    /// The first failure of this rank that the others do not know of yet.
    failure: Option<StateError>,
    /// The bytes that have moved since the ranks last told each other whether one has failed.
    unreported_bytes: usize,
}

impl<'g> Exchange<'g> {
    /// Runs a local step of this rank, and records its error. After a failure such steps are
    /// skipped.
    fn attempt<T>(&mut self, step: impl FnOnce() -> Result<T, StateError>) -> Option<T> {
        if self.failure.is_some() {
            return None;
        }
        step().map_err(|error| self.failure = Some(error)).ok()
    }

    /// Records the error of a step that also runs after a failure. The first one counts.
    pub(super) fn record_error(&mut self, outcome: Result<(), StateError>) {
        if let Err(error) = outcome {
            self.failure.get_or_insert(error);
        }
    }

    /// Counts bytes that have moved. After [`STATUS_BYTES`] of them, all ranks agree that none has
    /// failed. Every rank counts the same bytes, so all agree at the same time.
    fn count_moved(&mut self, bytes: usize) -> Result<(), CommError> {
        self.unreported_bytes = self.unreported_bytes.saturating_add(bytes);
        if self.unreported_bytes >= STATUS_BYTES {
            self.unreported_bytes = 0;
            self.group
                .agree(self.operation, self.failure.take().map_or(Ok(()), Err))?;
        }
        Ok(())
    }

    /// Ends the operation on all ranks, because this rank cannot take part in the next collective.
    pub(super) fn abort(&self, error: &dyn std::error::Error) -> CommError {
        self.group.abort(error.to_string());
        // A call on an aborted group returns the error of the abort.
        let ended = self.group.barrier().err();
        ended.unwrap_or_else(|| CommError::RankFailed {
            operation: self.operation.to_owned(),
            failures: Vec::new(),
        })
    }

    /// Returns a buffer for a collective. A rank without memory for it ends the operation on all
    /// ranks.
    fn allocate_buffer(&self, bytes: usize) -> Result<Vec<u8>, CommError> {
        zeroed_vec(bytes).map_err(|error| self.abort(&error))
    }

    /// Moves the tensors in the order of `items`, in buckets: small neighbours that take the same
    /// route go together. The memory of a bucket is borrowed from `lender` just before it moves,
    /// and given back right after.
    ///
    /// # Errors
    /// Errors of collectives, the same on every rank. A failure of this rank that the others do not
    /// know of yet is returned when all tensors have moved.
    pub(crate) fn run(
        group: &'g ProcessGroup,
        operation: &'static str,
        items: &[Item<'_>],
        lender: &mut dyn Lend,
    ) -> Result<(), StateError> {
        let mut exchange = Exchange {
            group,
            gpu: None,
            operation,
            failure: None,
            unreported_bytes: 0,
        };
        let bucket_bytes = choose_bucket_bytes(items);
        let mut start = 0;
        while start < items.len() {
            // Fill a bucket, beginning with one tensor of any size. A tensor has the same size and
            // route on all ranks, so all ranks make the same buckets.
            let route = items[start].layout.choose_route();
            let mut bytes = items[start].layout.byte_len();
            let mut end = start + 1;
            while end < items.len() {
                let next = &items[end].layout;
                bytes = bytes.saturating_add(next.byte_len());
                if bytes > bucket_bytes || next.choose_route() != route {
                    break;
                }
                end += 1;
            }
            let bucket = &items[start..end];
            if route != Route::Local && exchange.gpu.is_none() {
                exchange.gpu = Gpu::of_group(group).map_err(|error| exchange.abort(&error))?;
            }
            exchange.run_bucket(bucket, start, &route, lender)?;
            // A local route has no collective in which another rank could wait for this one, so its
            // bytes do not count.
            if route != Route::Local {
                exchange.count_moved(bucket.iter().map(|item| item.layout.byte_len()).sum())?;
            }
            start = end;
        }
        exchange.failure.map_or(Ok(()), Err)
    }

    /// Returns `true` if elements that take this route move in GPU memory.
    fn moves_on_gpu(&self, route: &Route) -> bool {
        self.gpu.is_some() && *route != Route::Local
    }

    /// Moves one bucket: borrows its memory, runs the collective of its route, and gives the memory
    /// back. `first_position` is the position of its first tensor among all that move.
    fn run_bucket(
        &mut self,
        bucket: &[Item<'_>],
        first_position: usize,
        route: &Route,
        lender: &mut dyn Lend,
    ) -> Result<(), CommError> {
        let rank = self.group.rank();
        let is_on_gpu = self.moves_on_gpu(route);
        // Borrow memory for the whole bucket. After a failure nothing more is borrowed.
        let mut memories: Vec<Option<Memory>> = Vec::with_capacity(bucket.len());
        for (index, item) in bucket.iter().enumerate() {
            if item.layout.wanted_boxes[rank].is_empty() {
                memories.push(None);
                continue;
            }
            let lent = self.attempt(|| match route {
                Route::Local => lender.lend_unfilled(first_position + index),
                _ if is_on_gpu => lender.lend_on_gpu(first_position + index),
                _ => lender.lend(first_position + index),
            });
            memories.push(lent.flatten());
        }
        self.move_bucket(bucket, &mut memories, route)?;
        // Give the memory back, in the same order.
        for (index, memory) in memories.into_iter().enumerate() {
            if let Some(memory) = memory {
                self.attempt(|| lender.filled(first_position + index, memory));
            }
        }
        Ok(())
    }

    /// Moves one bucket into borrowed memory: reads this rank's boxes, takes the storages out of
    /// the tensors to be filled, and runs the collective of the route.
    fn move_bucket(
        &mut self,
        items: &[Item<'_>],
        memories: &mut [Option<Memory>],
        route: &Route,
    ) -> Result<(), CommError> {
        let is_on_gpu = self.moves_on_gpu(route);
        // Step 1: read the boxes that this rank has. A GPU sends them from where they are.
        let mut sources = Vec::with_capacity(items.len());
        for item in items {
            let read = self.attempt(|| {
                if is_on_gpu {
                    BoxBytes::in_place(item.source)
                } else {
                    BoxBytes::from_value(item.source)
                }
            });
            // After a failure this rank sends zeros.
            sources.push(read.unwrap_or_default());
        }
        // Step 2: find the memory that the collective has to fill.
        let mut lent: Vec<Option<&mut Memory>> = Vec::with_capacity(items.len());
        let mut gpu_tensors: Vec<Option<ShardedTensor>> = Vec::with_capacity(items.len());
        for (memory, item) in memories.iter_mut().zip(items) {
            let Some(memory) = memory else {
                lent.push(None);
                gpu_tensors.push(None);
                continue;
            };
            // Unfilled memory becomes a copy of this rank's own value, if that has the same boxes.
            let is_filled = self.attempt(|| memory.try_fill_with(item.source)) == Some(true);
            // Values that are already in place are left alone, because others may be reading them.
            let is_in_place = is_filled || memory.is_same_view(item.source);
            gpu_tensors.push(match memory {
                Memory::OnGpu(tensor) if !is_in_place => Some(tensor.clone()),
                _ => None,
            });
            lent.push((!is_in_place).then_some(memory));
        }
        // Step 3: take the storages out of the tensors while elements arrive. Raw memory is a plain
        // vector, out of which nothing has to be taken.
        let tensors: Vec<Tensor> = lent
            .iter()
            .flatten()
            .flat_map(|memory| memory.tensors())
            .collect();
        let mut guard =
            self.attempt(|| Ok(StorageGuard::take(&tensors.iter().collect::<Vec<_>>())?));
        let slots = guard
            .as_mut()
            .and_then(|guard| self.attempt(|| lent_bytes(lent, guard)));
        // After a failure there are no slots.
        let mut slots_of_items = slots.into_iter().flatten();
        // Step 4: join the boxes and the memory of each tensor, and run the collective.
        let rank = self.group.rank();
        let mut transfers = Vec::with_capacity(items.len());
        for ((Item { layout, .. }, sources), gpu_tensor) in
            items.iter().zip(&sources).zip(gpu_tensors)
        {
            let mut transfer = Transfer {
                layout,
                slot_boxes: &layout.wanted_boxes[rank],
                sources,
                slots: Vec::new(),
                gpu_tensor,
            };
            if let Some(slots) = slots_of_items.next().flatten() {
                transfer.slots = slots;
                // A slot has another size if two values share elements. It would shift all elements
                // that come after it.
                if !transfer.has_slots_of_wanted_sizes() {
                    transfer.slots.clear();
                    self.failure = Some(StateError::SharedMemory {
                        shape: layout.shape.clone(),
                    });
                }
            }
            transfers.push(transfer);
        }
        if is_on_gpu && let Some(mut gpu) = self.gpu.take() {
            let moved = self.run_in_windows(&mut transfers, |exchange, transfers| {
                exchange.move_on_gpu(&mut gpu, transfers, route)
            });
            self.gpu = Some(gpu);
            return moved;
        }
        self.move_by_route(&mut transfers, route)
    }

    /// Is never called: this build has no collectives on GPU memory.
    #[cfg(not(feature = "nccl"))]
    const fn move_on_gpu(
        &mut self,
        gpu: &mut Gpu,
        _: &mut [Transfer<'_>],
        _: &Route,
    ) -> Result<(), CommError> {
        match *gpu {}
    }

    /// Runs the collective of a route. On a local route it only copies this rank's own elements.
    fn move_by_route(
        &mut self,
        transfers: &mut [Transfer<'_>],
        route: &Route,
    ) -> Result<(), CommError> {
        match route {
            // The only route without a collective: every rank has what it wants.
            Route::Local => {
                self.copy_own(transfers);
                Ok(())
            }
            Route::AllGather => self.gather_or_all_gather(transfers, None),
            Route::Gather { roots } => roots
                .iter()
                .try_for_each(|&root| self.gather_or_all_gather(transfers, Some(root))),
            Route::Broadcast { root } => self.broadcast(transfers, *root),
            Route::Scatter { root } => {
                self.copy_own(transfers);
                self.run_in_windows(transfers, |exchange, transfers| {
                    exchange.scatter(transfers, *root)
                })
            }
            Route::AllToAll => {
                self.copy_own(transfers);
                self.run_in_windows(transfers, Exchange::all_to_all)
            }
        }
    }

    /// Copies those of the wanted elements that this rank has itself.
    fn copy_own(&mut self, transfers: &mut [Transfer<'_>]) {
        let rank = self.group.rank();
        for transfer in transfers {
            let copied = transfer.copy_own(rank);
            self.record_error(copied);
        }
    }

    /// Runs a collective on a bucket. A tensor that is larger than a bucket moves in windows of a
    /// bucket's size, so that no rank packs all of it at once.
    fn run_in_windows(
        &mut self,
        transfers: &mut [Transfer<'_>],
        mut run: impl FnMut(&mut Self, &mut [Transfer<'_>]) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        // Several tensors fit into a bucket together, so only a single one may be too large.
        let [transfer] = transfers else {
            return run(self, transfers);
        };
        if transfer.layout.byte_len() <= BUCKET_BYTES {
            return run(self, transfers);
        }
        for window in cut_into_windows(
            &transfer.layout.shape,
            transfer.layout.element_bytes,
            BUCKET_BYTES,
        ) {
            let layout = transfer.layout.cut_to_window(&window);
            let slots = transfer.slots.iter_mut().map(|slot| &mut **slot).collect();
            run(
                self,
                &mut [Transfer {
                    layout: &layout,
                    slot_boxes: transfer.slot_boxes,
                    sources: transfer.sources,
                    slots,
                    gpu_tensor: transfer.gpu_tensor.clone(),
                }],
            )?;
        }
        Ok(())
    }

    /// Gathers whole tensors on one rank, or on all.
    fn gather_or_all_gather(
        &mut self,
        transfers: &mut [Transfer<'_>],
        root: Option<usize>,
    ) -> Result<(), CommError> {
        // Every rank knows all pieces that move, and the order in which they arrive. So it knows
        // how much each rank sends.
        let group = self.group;
        let rank = group.rank();
        let pieces = pieces_in_sender_order(transfers, |transfer| match root {
            Some(root) => transfer.layout.pieces_for(root),
            None => transfer.layout.pieces_of_whole(),
        });
        let counts = bytes_from_ranks(transfers, &pieces, group.world_size());
        // Pack what this rank sends, and receive where the pieces belong.
        let outgoing: Vec<Outgoing<'_>> = pieces
            .iter()
            .filter(|(_, piece)| piece.source == rank)
            .map(|(transfer, piece)| transfers[*transfer].outgoing(&piece.bounds))
            .collect();
        let (moved, packing) = with_packed(&outgoing, |input| match root {
            None => self.receive(transfers, &pieces, |outputs| {
                group.all_gather_uneven_into_slices(outputs, &counts, input)
            }),
            Some(root) if root == rank => self.receive(transfers, &pieces, |outputs| {
                group.gather_uneven_into_slices(Some(outputs), &counts, input, root)
            }),
            Some(root) => group.gather_uneven_into_slices(None, &counts, input, root),
        });
        self.record_error(packing);
        moved
    }

    /// Sends whole tensors from the root to all ranks.
    fn broadcast(&mut self, transfers: &mut [Transfer<'_>], root: usize) -> Result<(), CommError> {
        let is_root = self.group.rank() == root;
        if is_root {
            self.copy_own(transfers);
        }
        // A single tensor is sent directly from memory to memory. On the root its slot has just
        // been filled.
        if let [transfer] = transfers
            && let [slot] = &mut transfer.slots[..]
        {
            return self.group.broadcast(slot, root);
        }
        // Several tensors are packed one after the other.
        let bytes = transfers
            .iter()
            .map(|transfer| transfer.layout.byte_len())
            .sum();
        let mut packed = self.allocate_buffer(bytes)?;
        if is_root {
            let mut remaining = &mut packed[..];
            for Transfer {
                layout, sources, ..
            } in &*transfers
            {
                let output = remaining
                    .split_off_mut(..layout.byte_len())
                    .expect("the buffer has the bytes of all tensors");
                let whole = TensorBox::whole(&layout.shape);
                self.record_error(read_box(
                    sources,
                    &whole,
                    &whole,
                    layout.element_bytes,
                    output,
                ));
            }
        }
        self.group.broadcast(&mut packed, root)?;
        // A rank that has failed has no slots, and drops what it received.
        let mut remaining = &packed[..];
        for transfer in transfers {
            let (bytes, later_bytes) = remaining.split_at(transfer.layout.byte_len());
            if let Some(slot) = transfer.slots.first_mut() {
                slot.copy_from_slice(bytes);
            }
            remaining = later_bytes;
        }
        Ok(())
    }

    /// Sends each rank what it wants from the root. If all of it together is larger than a bucket,
    /// because several ranks want the same elements, this takes several rounds. So the root never
    /// packs more than a bucket at once, or what one rank wants if that is more.
    fn scatter(&mut self, transfers: &mut [Transfer<'_>], root: usize) -> Result<(), CommError> {
        let group = self.group;
        let rank = group.rank();
        let rank_count = group.world_size();
        let mut wanted_bytes = wanted_bytes(transfers, rank_count);
        // The root copies its own values and does not send them.
        wanted_bytes[root] = 0;
        for receivers in rounds_of_receivers(&wanted_bytes) {
            // Ranks outside this round get nothing in it.
            let mut counts = vec![0; rank_count];
            counts[receivers.clone()].copy_from_slice(&wanted_bytes[receivers.clone()]);
            let mut send_buffer = Vec::new();
            if rank == root {
                try_reserve(&mut send_buffer, counts.iter().sum())
                    .map_err(|error| self.abort(&error))?;
                receivers
                    .filter(|&receiver| receiver != root)
                    .for_each(|receiver| self.pack_for(transfers, receiver, &mut send_buffer));
            }
            // The pieces of a rank that gets nothing in this round come in another one.
            let arriving_pieces = if counts[rank] > 0 {
                incoming_pieces(transfers, rank)
            } else {
                Vec::new()
            };
            self.receive(transfers, &arriving_pieces, |outputs| {
                group.scatter_uneven_into_slices(
                    outputs,
                    (rank == root).then_some(&send_buffer[..]),
                    &counts,
                    root,
                )
            })?;
        }
        Ok(())
    }

    /// Exchanges all pieces at once. Pieces that a rank already has are not sent.
    fn all_to_all(&mut self, transfers: &mut [Transfer<'_>]) -> Result<(), CommError> {
        let group = self.group;
        let rank = group.rank();
        let rank_count = group.world_size();
        let mut send_buffer = Vec::new();
        let mut send_counts = vec![0; rank_count];
        for receiver in (0..rank_count).filter(|&receiver| receiver != rank) {
            let start = send_buffer.len();
            self.pack_for(transfers, receiver, &mut send_buffer);
            send_counts[receiver] = send_buffer.len() - start;
        }
        let arriving_pieces = incoming_pieces(transfers, rank);
        let receive_counts = bytes_from_ranks(transfers, &arriving_pieces, rank_count);
        self.receive(transfers, &arriving_pieces, |outputs| {
            group.all_to_all_uneven_into_slices(
                outputs,
                &receive_counts,
                &send_buffer,
                &send_counts,
            )
        })
    }

    /// Appends what this rank sends to another.
    fn pack_for(&mut self, transfers: &[Transfer<'_>], receiver: usize, send_buffer: &mut Vec<u8>) {
        let rank = self.group.rank();
        for transfer in transfers {
            // Most ranks of a large group have nothing for each other.
            if !transfer.layout.moves_between(rank, receiver) {
                continue;
            }
            for piece in transfer.layout.pieces_for(receiver) {
                if piece.source != rank {
                    continue;
                }
                let outgoing = transfer.outgoing(&piece.bounds);
                let end = send_buffer.len() + outgoing.byte_len();
                self.record_error(outgoing.pack(send_buffer));
                // The receiver expects these bytes, even if they could not be read here.
                send_buffer.resize(end, 0);
            }
        }
    }

    /// Runs a collective that receives pieces, directly into their destinations if possible, and
    /// otherwise into a buffer from which they are copied.
    pub(super) fn receive(
        &mut self,
        transfers: &mut [Transfer<'_>],
        pieces: &[(usize, Piece)],
        run: impl FnOnce(&mut [&mut [u8]]) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        if let Some(parts) = slot_parts(transfers, pieces) {
            let slots = transfers
                .iter_mut()
                .flat_map(|transfer| transfer.slots.iter_mut().map(|slot| &mut **slot));
            return run(&mut carve(slots.collect(), &parts));
        }
        // There are too many runs, or this rank has no memory for them after a failure. It still
        // receives them, so that the others are not kept waiting.
        let bytes = pieces
            .iter()
            .map(|(transfer, piece)| transfers[*transfer].bytes_of(&piece.bounds))
            .sum();
        let mut received = self.allocate_buffer(bytes)?;
        run(&mut [&mut received])?;
        let mut remaining = &received[..];
        for (transfer, piece) in pieces {
            let (bytes, later_bytes) =
                remaining.split_at(transfers[*transfer].bytes_of(&piece.bounds));
            transfers[*transfer].copy_piece_to_slot(piece, bytes);
            remaining = later_bytes;
        }
        Ok(())
    }
}

/// One tensor of a bucket, as this rank sees it: the boxes that it has, and memory for those that
/// it wants.
pub(super) struct Transfer<'a> {
    pub(super) layout: &'a Layout,
    /// The boxes of the slots.
    pub(super) slot_boxes: &'a [TensorBox],
    /// The boxes that this rank has.
    sources: &'a [BoxBytes],
    /// Memory for each wanted box; none if nothing has to be written on the host, or after a
    /// failure.
    pub(super) slots: Vec<&'a mut [u8]>,
    /// The tensors of the wanted boxes, if they are on a GPU and are filled there.
    pub(super) gpu_tensor: Option<ShardedTensor>,
}

impl<'a> Transfer<'a> {
    /// Returns a box of the tensor, to be sent.
    pub(super) fn outgoing<'b>(&self, bounds: &'b TensorBox) -> Outgoing<'b>
    where
        'a: 'b,
    {
        Outgoing {
            sources: self.sources,
            bounds,
            element_bytes: self.layout.element_bytes,
        }
    }

    /// Returns `true` if there is a slot for each wanted box, of the size of that box.
    fn has_slots_of_wanted_sizes(&self) -> bool {
        self.slots.len() == self.slot_boxes.len()
            && self
                .slots
                .iter()
                .zip(self.slot_boxes)
                .all(|(slot, bounds)| slot.len() == self.bytes_of(bounds))
    }

    /// Returns the number of bytes of a box.
    pub(super) fn bytes_of(&self, bounds: &TensorBox) -> usize {
        bounds.numel() * self.layout.element_bytes
    }

    /// Copies the pieces that this rank both has and wants, which are not sent. After a failure,
    /// which has left no slots, it copies nothing.
    fn copy_own(&mut self, rank: usize) -> Result<(), StateError> {
        if self.slots.is_empty() {
            return Ok(());
        }
        for piece in self.layout.pieces_for(rank) {
            if piece.source == rank {
                let wanted_box = &self.slot_boxes[piece.target];
                let slot = &mut *self.slots[piece.target];
                read_box(
                    self.sources,
                    &piece.bounds,
                    wanted_box,
                    self.layout.element_bytes,
                    slot,
                )?;
            }
        }
        Ok(())
    }

    /// Copies the bytes of a piece into the slot of the box that wants it.
    fn copy_piece_to_slot(&mut self, piece: &Piece, bytes: &[u8]) {
        // After a failure there are no slots.
        if let Some(slot) = self.slots.get_mut(piece.target) {
            let runs = copy_runs(&piece.bounds, &piece.bounds, &self.slot_boxes[piece.target]);
            copy_elements(runs, self.layout.element_bytes, bytes, slot);
        }
    }
}

/// Returns the pieces of several tensors in the order in which senders pack them: by rank, then by
/// tensor.
pub(super) fn pieces_in_sender_order(
    transfers: &[Transfer<'_>],
    pieces_of: impl Fn(&Transfer<'_>) -> Vec<Piece>,
) -> Vec<(usize, Piece)> {
    let mut pieces = Vec::new();
    for (index, transfer) in transfers.iter().enumerate() {
        pieces.extend(pieces_of(transfer).into_iter().map(|piece| (index, piece)));
    }
    // The sort is stable, so the tensors of one sender stay in their order.
    pieces.sort_by_key(|(_, piece)| piece.source);
    pieces
}

/// Returns the pieces that a rank receives from others, in the order in which they arrive.
fn incoming_pieces(transfers: &[Transfer<'_>], rank: usize) -> Vec<(usize, Piece)> {
    let mut pieces = pieces_in_sender_order(transfers, |transfer| transfer.layout.pieces_for(rank));
    pieces.retain(|(_, piece)| piece.source != rank);
    pieces
}

/// Returns how many bytes `pieces` bring from each rank.
pub(super) fn bytes_from_ranks(
    transfers: &[Transfer<'_>],
    pieces: &[(usize, Piece)],
    rank_count: usize,
) -> Vec<usize> {
    let mut counts = vec![0; rank_count];
    for (transfer, piece) in pieces {
        counts[piece.source] += transfers[*transfer].bytes_of(&piece.bounds);
    }
    counts
}

/// Returns the parts of all slots that pieces go to, if there are slots for all of them and not too
/// many parts.
fn slot_parts(transfers: &[Transfer<'_>], pieces: &[(usize, Piece)]) -> Option<Vec<SlotPart>> {
    let mut first_slots = Vec::with_capacity(transfers.len());
    let mut slot_count = 0;
    for transfer in transfers {
        first_slots.push(slot_count);
        slot_count += transfer.slots.len();
    }
    let mut parts = Vec::with_capacity(pieces.len());
    for (index, piece) in pieces {
        let transfer = &transfers[*index];
        let element_bytes = transfer.layout.element_bytes;
        if piece.target >= transfer.slots.len() {
            return None;
        }
        for run in copy_runs(
            &piece.bounds,
            &piece.bounds,
            &transfer.slot_boxes[piece.target],
        ) {
            parts.push((
                first_slots[*index] + piece.target,
                run.dst * element_bytes..(run.dst + run.len) * element_bytes,
            ));
            if parts.len() > MAX_RUNS {
                return None;
            }
        }
    }
    Some(parts)
}

/// Returns the number of bytes that each rank wants.
pub(super) fn wanted_bytes(transfers: &[Transfer<'_>], rank_count: usize) -> Vec<usize> {
    let wanted_on = |receiver| {
        let layouts = transfers.iter().map(|transfer| transfer.layout);
        layouts.map(|layout| layout.bytes_wanted(receiver)).sum()
    };
    (0..rank_count).map(wanted_on).collect()
}

/// Groups receivers into rounds, for one rank that sends each of them what it wants. All that a
/// round sends fits into a bucket, unless a single receiver wants more.
pub(super) fn rounds_of_receivers(wanted_bytes: &[usize]) -> Vec<Range<usize>> {
    let mut rounds = Vec::new();
    let mut start = 0;
    while start < wanted_bytes.len() {
        let mut bytes = wanted_bytes[start];
        let mut end = start + 1;
        while end < wanted_bytes.len() && bytes.saturating_add(wanted_bytes[end]) <= BUCKET_BYTES {
            bytes += wanted_bytes[end];
            end += 1;
        }
        rounds.push(start..end);
        start = end;
    }
    rounds
}

/// Returns the most bytes of a bucket. A bucket and the buffer that it travels in together take no
/// more memory than the largest tensor does alone.
fn choose_bucket_bytes(items: &[Item<'_>]) -> usize {
    let sizes = items.iter().map(|item| item.layout.byte_len());
    let largest = sizes.max().unwrap_or(0);
    (largest / 2).clamp(LEAST_BUCKET_BYTES, BUCKET_BYTES)
}
