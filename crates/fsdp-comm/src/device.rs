//! Collectives on GPU memory, between GPUs directly, without a copy on the host.
//!
//! A [`DeviceGroup`] has the operations of a [`ProcessGroup`] on [`DeviceSlice`]s instead of
//! slices. All ranks first agree on the call, as on the host, unless it is one that [all of them
//! expect](DeviceGroup::begin_step), and then queue it: an operation returns before the GPU has
//! done it.
//!
//! To the stream of its slices an operation is like a kernel: it comes after all earlier work, and
//! later work sees its result. So memory may be freed on that stream, or used for something else
//! there, as soon as the operation has returned. The operation itself runs in another stream, and
//! work of yet other streams goes on beside it. To let such a stream use the result, and to wait on
//! the host, there is [`Pending`].
//!
//! An operation may fail after it has been queued, because a rank is lost or the deadline of the
//! group is over. The deadline begins when the work before the operation is done. Then the slices'
//! contents are undefined, and [`Pending::wait`] and every later operation of the group return
//! the error.
//!
//! Unlike on the host, NCCL chooses the order in which ranks are reduced, and how `f16` and `bf16`
//! are rounded on the way. The maximum of a NaN and a number may be the number.

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use fsdp_layout::DType;

use crate::backend::{Collective, DeviceTransfer, Movement, QueuedTransfer, bytes_of_others};
use crate::collectives::{self, byte_ranges, check, checked_sum};
use crate::element::Element;
use crate::error::CommError;
use crate::group::{ProcessGroup, Turn};
use crate::nccl::library::nccl_data_type;
use crate::record::{Call, Operation};
use crate::reduce::ReduceOp;

/// Elements in a GPU's memory, borrowed for reading.
#[derive(Debug)]
pub struct DeviceSlice<'a, T> {
    address: CUdeviceptr,
    numel: usize,
    stream: &'a CudaStream,
    _order: SyncOnDrop<'a>,
    _elements: PhantomData<&'a [T]>,
}

/// Elements in a GPU's memory, borrowed for writing.
#[derive(Debug)]
pub struct DeviceSliceMut<'a, T>(DeviceSlice<'a, T>);

impl<'a, T: Element> DeviceSlice<'a, T> {
    /// Borrows all of `memory`, which this thread has written through `stream`.
    pub fn new(memory: &'a impl DevicePtr<T>, stream: &'a CudaStream) -> Self {
        let numel = memory.len();
        Self::at(memory.device_ptr(stream), numel, stream)
    }

    /// Returns the slice of `numel` elements at an address.
    fn at(
        (address, order): (CUdeviceptr, SyncOnDrop<'a>),
        numel: usize,
        stream: &'a CudaStream,
    ) -> Self {
        DeviceSlice {
            address,
            numel,
            stream,
            _order: order,
            _elements: PhantomData,
        }
    }

    const fn bytes(&self) -> usize {
        self.numel * size_of::<T>()
    }
}

impl<'a, T: Element> DeviceSliceMut<'a, T> {
    /// Borrows all of `memory`, which this thread uses through `stream`.
    pub fn new(memory: &'a mut impl DevicePtrMut<T>, stream: &'a CudaStream) -> Self {
        let numel = memory.len();
        DeviceSliceMut(DeviceSlice::at(
            memory.device_ptr_mut(stream),
            numel,
            stream,
        ))
    }
}

/// An operation that has been queued on a GPU. It goes on if this is dropped.
#[derive(Debug, Clone)]
pub struct Pending {
    /// `None` for an operation that moves nothing.
    transfer: Option<Arc<dyn QueuedTransfer>>,
}

impl Pending {
    /// Makes later work of `stream` wait for the operation. The host does not wait.
    ///
    /// # Errors
    /// CUDA's.
    pub fn delay(&self, stream: &CudaStream) -> Result<(), CommError> {
        self.transfer
            .as_ref()
            .map_or(Ok(()), |transfer| transfer.delay(stream))
    }

    /// Returns `true` if the GPU has done the operation, without waiting.
    ///
    /// # Errors
    /// The reason for which the operation has failed.
    pub fn is_done(&self) -> Result<bool, CommError> {
        self.transfer
            .as_ref()
            .map_or(Ok(true), |transfer| transfer.is_done())
    }

    /// Waits on the host until the GPU has done the operation.
    ///
    /// # Errors
    /// The reason for which the operation has failed: a rank that is lost, the deadline, or an
    /// error of NCCL's or CUDA's.
    pub fn wait(&self) -> Result<(), CommError> {
        self.transfer
            .as_ref()
            .map_or(Ok(()), |transfer| transfer.wait())
    }
}

/// The operations of a group on GPU memory: see [`ProcessGroup::device`].
#[derive(Clone, Copy)]
pub struct DeviceGroup<'g> {
    group: &'g ProcessGroup,
    transfer: &'g dyn DeviceTransfer,
}

impl std::fmt::Debug for DeviceGroup<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceGroup")
            .field("group", self.group)
            .finish_non_exhaustive()
    }
}

impl ProcessGroup {
    /// Returns the group's operations on GPU memory; `None` on all ranks if the backend moves only
    /// host memory.
    #[must_use]
    pub fn device(&self) -> Option<DeviceGroup<'_>> {
        let transfer = self.device_transfer()?;
        Some(DeviceGroup {
            group: self,
            transfer,
        })
    }
}

impl DeviceGroup<'_> {
    /// Returns the number of the GPU whose memory this rank's slices must be in.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.transfer.ordinal()
    }

    /// Returns a hash of the calls on GPU memory that this rank has made on the group since
    /// [`begin_step`](Self::begin_step): the same on ranks that have made the same calls.
    #[must_use]
    pub fn calls_hash(&self) -> u64 {
        self.group.calls_hash()
    }

    /// Begins a step of a program whose steps make the same calls again and again. All ranks call
    /// this at the same place, with the same `is_same`: `true` if they have told each other their
    /// [`calls_hash`](Self::calls_hash), and all were equal. Collective if it is `false`: one
    /// barrier.
    ///
    /// If it is `true`, all ranks expect the same calls once more, and operations on GPU memory
    /// that come in the expected order begin without an agreement. If a rank makes another call on
    /// GPU memory, all others vote on theirs: either all of them make the new one, and go on
    /// without an expected order until the next step, or all get the error that names their calls.
    /// The same is done for a call that takes long, so that the error at its deadline names the
    /// ranks that have not made it. Operations on the host's memory may come anywhere in between.
    ///
    /// # Errors
    /// If `is_same` is `false`, ranks of this group that have not made the same calls.
    pub fn begin_step(&self, is_same: bool) -> Result<(), CommError> {
        self.group.begin_step(is_same)
    }

    /// Waits on the host until the GPU has done all operations of this group that this rank has
    /// queued. The other ranks need not call it.
    ///
    /// # Errors
    /// The reason for which an operation has failed: see [`Pending::wait`].
    pub fn synchronize(&self) -> Result<(), CommError> {
        self.transfer.synchronize()
    }

    /// Gathers like [`ProcessGroup::all_gather_into`].
    ///
    /// # Errors
    /// The same as on the host, and memory of another GPU.
    pub fn all_gather_into<T: Element>(
        &self,
        DeviceSliceMut(output): &mut DeviceSliceMut<'_, T>,
        input: &DeviceSlice<'_, T>,
    ) -> Result<Pending, CommError> {
        let ranks = self.group.world_size();
        let numel = input.numel;
        let call = call::<T>(Operation::AllGather, vec![numel], None);
        let arguments = check(&call, || {
            // On one stream the call comes after the work that fills the input.
            self.check_devices_and_stream(&[input.stream, output.stream])?;
            self.group
                .check_numel("the output", output.numel, checked_product(numel, ranks)?)
        });
        let turn = self.group.begin(call, arguments)?;
        // A gather copies bytes, so it works for types that NCCL does not know too.
        let counted = as_counted::<T>(numel);
        let others = input.bytes() * (ranks - 1);
        self.collective(
            turn,
            Collective::AllGather,
            [input.address, output.address],
            counted,
            (others, others),
            input.stream,
        )
    }

    /// Reduces like [`ProcessGroup::reduce_scatter`], in an order that NCCL chooses.
    ///
    /// # Errors
    /// The same as on the host, dtypes that NCCL does not compute with, and memory of another GPU.
    pub fn reduce_scatter<T: Element>(
        &self,
        DeviceSliceMut(output): &mut DeviceSliceMut<'_, T>,
        input: &DeviceSlice<'_, T>,
        op: ReduceOp,
    ) -> Result<Pending, CommError> {
        let ranks = self.group.world_size();
        let numel = output.numel;
        let call = Call {
            reduce: Some(op),
            ..call::<T>(Operation::ReduceScatter, vec![numel], None)
        };
        let arguments = check(&call, || {
            self.check_devices_and_stream(&[input.stream, output.stream])?;
            self.group
                .check_numel("the input", input.numel, checked_product(numel, ranks)?)
        })
        .and_then(|()| check_reduction::<T>(&call, op));
        let turn = self.group.begin(call, arguments)?;
        let others = output.bytes() * (ranks - 1);
        self.collective(
            turn,
            Collective::ReduceScatter(op),
            [input.address, output.address],
            (numel, T::DTYPE),
            (others, others),
            input.stream,
        )
    }

    /// Reduces like [`ProcessGroup::all_reduce`], in an order that NCCL chooses. It is the same
    /// on all ranks.
    ///
    /// # Errors
    /// The same as on the host, dtypes that NCCL does not compute with, and memory of another GPU.
    pub fn all_reduce<T: Element>(
        &self,
        DeviceSliceMut(buffer): &mut DeviceSliceMut<'_, T>,
        op: ReduceOp,
    ) -> Result<Pending, CommError> {
        let numel = buffer.numel;
        let call = Call {
            reduce: Some(op),
            ..call::<T>(Operation::AllReduce, vec![numel], None)
        };
        let arguments = check(&call, || self.check_devices_and_stream(&[buffer.stream]))
            .and_then(|()| check_reduction::<T>(&call, op));
        let turn = self.group.begin(call, arguments)?;
        let ranks = self.group.world_size();
        // The bytes that a ring of ranks moves.
        let others = 2 * (buffer.bytes() / ranks) * (ranks - 1);
        self.collective(
            turn,
            Collective::AllReduce(op),
            [buffer.address, buffer.address],
            (numel, T::DTYPE),
            (others, others),
            buffer.stream,
        )
    }

    /// Copies like [`ProcessGroup::broadcast`].
    ///
    /// # Errors
    /// The same as on the host, and memory of another GPU.
    pub fn broadcast<T: Element>(
        &self,
        DeviceSliceMut(buffer): &mut DeviceSliceMut<'_, T>,
        root: usize,
    ) -> Result<Pending, CommError> {
        let call = call::<T>(Operation::Broadcast, vec![buffer.numel], Some(root));
        let arguments = check(&call, || {
            self.check_devices_and_stream(&[buffer.stream])?;
            self.group.check_root(root)
        });
        let turn = self.group.begin(call, arguments)?;
        let bytes = buffer.bytes();
        let moved = if self.group.rank() == root {
            (bytes * (self.group.world_size() - 1), 0)
        } else {
            (0, bytes)
        };
        self.collective(
            turn,
            Collective::Broadcast(root),
            [buffer.address, buffer.address],
            (bytes, DType::U8),
            moved,
            buffer.stream,
        )
    }

    /// Gathers like [`ProcessGroup::gather`].
    ///
    /// # Errors
    /// The same as on the host, and memory of another GPU.
    pub fn gather<T: Element>(
        &self,
        output: Option<&mut DeviceSliceMut<'_, T>>,
        input: &DeviceSlice<'_, T>,
        root: usize,
    ) -> Result<Pending, CommError> {
        let ranks = self.group.world_size();
        let bytes = input.bytes();
        let call = call::<T>(Operation::Gather, vec![input.numel], Some(root));
        let output = output.map(|output| &output.0);
        let output_numel = output.map(|output| output.numel);
        let stream = output.map(|output| output.stream);
        let arguments = check(&call, || {
            let streams = [Some(input.stream), stream];
            self.check_devices_and_stream(&streams.into_iter().flatten().collect::<Vec<_>>())?;
            self.group.check_root(root)?;
            self.group.check_root_only(
                "an output",
                root,
                output_numel,
                checked_product(input.numel, ranks)?,
            )
        });
        let turn = self.group.begin(call, arguments)?;
        // NCCL has no gather: every rank sends to the root, and receives nothing.
        let mut send = vec![(input.address, 0); ranks];
        send[root].1 = bytes;
        let receive = match output {
            Some(output) => pieces::<T>(output.address, &vec![input.numel; ranks]),
            None => vec![(0, 0); ranks],
        };
        self.exchange(turn, send, receive, input.stream)
    }

    /// Scatters like [`ProcessGroup::scatter`].
    ///
    /// # Errors
    /// The same as on the host, and memory of another GPU.
    pub fn scatter<T: Element>(
        &self,
        DeviceSliceMut(output): &mut DeviceSliceMut<'_, T>,
        input: Option<&DeviceSlice<'_, T>>,
        root: usize,
    ) -> Result<Pending, CommError> {
        let ranks = self.group.world_size();
        let bytes = output.bytes();
        let call = call::<T>(Operation::Scatter, vec![output.numel], Some(root));
        let arguments = check(&call, || {
            let streams = [Some(output.stream), input.map(|input| input.stream)];
            self.check_devices_and_stream(&streams.into_iter().flatten().collect::<Vec<_>>())?;
            self.group.check_root(root)?;
            self.group.check_root_only(
                "an input",
                root,
                input.map(|input| input.numel),
                checked_product(output.numel, ranks)?,
            )
        });
        let turn = self.group.begin(call, arguments)?;
        // NCCL has no scatter: every rank receives from the root, and sends nothing.
        let send = match input {
            Some(input) => pieces::<T>(input.address, &vec![output.numel; ranks]),
            None => vec![(0, 0); ranks],
        };
        let mut receive = vec![(output.address, 0); ranks];
        receive[root].1 = bytes;
        self.exchange(turn, send, receive, output.stream)
    }

    /// Exchanges like [`ProcessGroup::all_to_all_uneven`].
    ///
    /// # Errors
    /// The same as on the host, and memory of another GPU.
    pub fn all_to_all_uneven<T: Element>(
        &self,
        DeviceSliceMut(output): &mut DeviceSliceMut<'_, T>,
        receive_counts: &[usize],
        input: &DeviceSlice<'_, T>,
        send_counts: &[usize],
    ) -> Result<Pending, CommError> {
        // All counts, so that ranks which expect something else find out before anything moves.
        let counts_by_rank = self
            .group
            .all_gather_object(&(send_counts.to_vec(), receive_counts.to_vec()))?;
        let call = call::<T>(Operation::AllToAllUneven, Vec::new(), None);
        let rank = self.group.rank();
        let arguments = check(&call, || {
            self.check_devices_and_stream(&[input.stream, output.stream])?;
            self.group.check_counts("the counts to send", send_counts)?;
            self.group
                .check_counts("the counts to receive", receive_counts)?;
            self.group
                .check_numel("the input", input.numel, checked_sum(send_counts)?)?;
            self.group
                .check_numel("the output", output.numel, checked_sum(receive_counts)?)?;
            for (sender, (sent, _)) in counts_by_rank.iter().enumerate() {
                if sent.get(rank) != receive_counts.get(sender) {
                    return Err(format!(
                        "rank {sender} sends {:?} elements to rank {rank}, which expects {:?}",
                        sent.get(rank),
                        receive_counts.get(sender)
                    ));
                }
            }
            Ok(())
        });
        let turn = self.group.begin(call, arguments)?;
        let send = pieces::<T>(input.address, send_counts);
        let receive = pieces::<T>(output.address, receive_counts);
        self.exchange(turn, send, receive, input.stream)
    }

    /// Runs a collective on elements of a dtype at the address to read, with its result at the
    /// address to write. `moved_bytes` is as for [`run`](Self::run).
    fn collective(
        &self,
        turn: Turn<'_>,
        kind: Collective,
        [send, receive]: [CUdeviceptr; 2],
        (count, dtype): (usize, DType),
        moved_bytes: (usize, usize),
        stream: &CudaStream,
    ) -> Result<Pending, CommError> {
        let movement = Movement::Collective {
            kind,
            send,
            receive,
            count,
            dtype,
        };
        let movement = (count > 0).then_some(movement);
        self.run(turn, moved_bytes, stream, movement)
    }

    /// Sends bytes to each rank and receives bytes from each rank.
    fn exchange(
        &self,
        turn: Turn<'_>,
        send: Vec<(CUdeviceptr, usize)>,
        receive: Vec<(CUdeviceptr, usize)>,
        stream: &CudaStream,
    ) -> Result<Pending, CommError> {
        let rank = self.group.rank();
        let [sent, received] = [&send, &receive]
            .map(|pieces| bytes_of_others(pieces.iter().map(|piece| piece.1), rank));
        let moves_any = send.iter().chain(&receive).any(|piece| piece.1 > 0);
        let movement = Movement::Exchange { send, receive };
        self.run(
            turn,
            (sent, received),
            stream,
            moves_any.then_some(movement),
        )
    }

    /// Agrees with all ranks on a call, and then queues it. `moved_bytes` is the number of bytes
    /// that this rank sends and receives. Without a `movement` the call is only agreed on.
    fn run(
        &self,
        mut turn: Turn<'_>,
        moved_bytes: (usize, usize),
        stream: &CudaStream,
        movement: Option<Movement>,
    ) -> Result<Pending, CommError> {
        let transfer = turn.transfer(moved_bytes, |round, call| {
            movement
                .map(|movement| self.transfer.queue(round, call, &movement, stream))
                .transpose()
        })?;
        Ok(Pending { transfer })
    }

    /// Checks that all memory is on this rank's GPU and used through one stream, so
    /// that the collective is ordered after the work on that stream.
    fn check_devices_and_stream(&self, streams: &[&CudaStream]) -> Result<(), String> {
        let own_ordinal = self.ordinal();
        let mut ordinals = streams.iter().map(|stream| stream.context().ordinal());
        if let Some(other_ordinal) = ordinals.find(|&other_ordinal| other_ordinal != own_ordinal) {
            return Err(format!(
                "the memory is GPU {other_ordinal}'s, but rank {} of the group has GPU {own_ordinal}",
                self.group.rank()
            ));
        }
        if streams
            .windows(2)
            .any(|pair| pair[0].cu_stream() != pair[1].cu_stream())
        {
            return Err("the memory is of different streams".to_owned());
        }
        Ok(())
    }
}

/// Returns the call of an operation on elements of type `T` in GPU memory.
fn call<T: Element>(operation: Operation, sizes: Vec<usize>, root: Option<usize>) -> Call {
    Call {
        dtype: Some(T::DTYPE),
        sizes,
        root,
        on_device: true,
        ..Call::new(operation)
    }
}

/// Returns the count and dtype to give NCCL for a move: bytes, if NCCL does not know the element
/// type.
const fn as_counted<T: Element>(numel: usize) -> (usize, DType) {
    match nccl_data_type(T::DTYPE) {
        Some(_) => (numel, T::DTYPE),
        None => (numel * size_of::<T>(), DType::U8),
    }
}

fn check_reduction<T: Element>(call: &Call, op: ReduceOp) -> Result<(), CommError> {
    collectives::check_reduction::<T>(call, op, nccl_data_type(T::DTYPE).is_some())
}

/// Returns the number of elements of `numel` elements for each rank.
fn checked_product(numel: usize, ranks: usize) -> Result<usize, String> {
    numel
        .checked_mul(ranks)
        .ok_or_else(|| format!("{numel} elements for each of {ranks} ranks are too many"))
}

/// Returns the addresses and numbers of bytes of consecutive pieces of elements, from `start` on.
fn pieces<T>(start: CUdeviceptr, counts: &[usize]) -> Vec<(CUdeviceptr, usize)> {
    let ranges = byte_ranges::<T>(counts).into_iter();
    ranges
        .map(|range| (start.saturating_add(range.start as u64), range.len()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_lie_one_after_the_other() {
        assert_eq!(
            pieces::<u16>(1000, &[4, 0, 2]),
            [(1000, 8), (1008, 0), (1008, 4)]
        );
    }

    #[test]
    fn types_that_nccl_lacks_move_as_bytes_and_are_not_reduced() {
        assert_eq!(as_counted::<i16>(3), (6, DType::U8));
        assert_eq!(as_counted::<half::bf16>(3), (3, DType::BF16));
        let call = call::<i16>(Operation::AllReduce, vec![3], None);
        assert!(matches!(
            check_reduction::<i16>(&call, ReduceOp::Sum),
            Err(CommError::UnsupportedReduction {
                dtype: DType::I16,
                ..
            })
        ));
        assert!(check_reduction::<i64>(&call, ReduceOp::Avg).is_err());
        assert_eq!(check_reduction::<half::f16>(&call, ReduceOp::Avg), Ok(()));
        assert!(call.to_string().ends_with("in GPU memory"), "{call}");
    }
}
