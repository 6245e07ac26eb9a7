//! The collectives on tensor elements.

use std::fmt;
use std::ops::Range;

use crate::backend::{Destination, Direction, Filler, Plan};
use crate::element::Element;
use crate::error::{CommError, RankCall};
use crate::group::{INLINE_BYTES, ProcessGroup, Turn};
use crate::record::{Call, Operation};
use crate::reduce::ReduceOp;

/// The alignment of the segments of an all-reduce, in elements, so that no two ranks write to one
/// cache line.
const SEGMENT_ELEMENTS: usize = 64;

/// The longest segment of an all-reduce: long enough that ranks seldom wait for each other, and
/// short enough to stay in a cache between being reduced and being gathered. It is a multiple of
/// [`SEGMENT_ELEMENTS`] elements of any type.
const MAX_SEGMENT_BYTES: usize = 2 << 20;

impl ProcessGroup {
    /// Gathers every rank's `input`, equally long on all ranks, into every rank's `output`, in rank
    /// order. torch's `all_gather_into_tensor`.
    ///
    /// # Errors
    /// An output that is not `world_size` inputs long; inputs of different lengths or dtypes.
    pub fn all_gather_into<T: Element>(
        &self,
        output: &mut [T],
        input: &[T],
    ) -> Result<(), CommError> {
        self.all_gather_into_slices(&mut [output], input)
    }

    /// Gathers like [`all_gather_into`](Self::all_gather_into), with the output in pieces. The
    /// slices of `outputs` are filled one after the other, like a single slice, so that each
    /// parameter's own buffer is filled without a flat temporary. The lengths of the slices may
    /// differ between ranks.
    ///
    /// # Errors
    /// The same as [`all_gather_into`](Self::all_gather_into).
    pub fn all_gather_into_slices<T: Element>(
        &self,
        outputs: &mut [&mut [T]],
        input: &[T],
    ) -> Result<(), CommError> {
        let call = tensor_call::<T>(Operation::AllGather, vec![input.len()], None);
        let counts = vec![input.len(); self.world_size()];
        self.gather_counts(call, Some(outputs), &counts, input)
    }

    /// Gathers every rank's `input` into every rank's outputs, in rank order, where rank `r` brings
    /// `counts[r]` elements. The outputs are in pieces, as in
    /// [`all_gather_into_slices`](Self::all_gather_into_slices). torch's `all_gather` of a list of
    /// tensors of different sizes.
    ///
    /// # Errors
    /// Counts that differ between ranks, or are not those of `input` and the outputs; different
    /// dtypes.
    pub fn all_gather_uneven_into_slices<T: Element>(
        &self,
        outputs: &mut [&mut [T]],
        counts: &[usize],
        input: &[T],
    ) -> Result<(), CommError> {
        let call = tensor_call::<T>(Operation::AllGatherUneven, counts.to_vec(), None);
        self.gather_counts(call, Some(outputs), counts, input)
    }

    /// Reduces every rank's `input`, `world_size` outputs long, and gives rank `r` the `r`-th of
    /// the equal pieces. torch's `reduce_scatter_tensor`. Every element is reduced in rank order.
    ///
    /// # Errors
    /// An input that is not `world_size` outputs long; different lengths, dtypes or reductions; an
    /// average of integers.
    pub fn reduce_scatter<T: Element>(
        &self,
        output: &mut [T],
        input: &[T],
        op: ReduceOp,
    ) -> Result<(), CommError> {
        let call = Call {
            reduce: Some(op),
            ..tensor_call::<T>(Operation::ReduceScatter, vec![output.len()], None)
        };
        let counts = vec![output.len(); self.world_size()];
        let arguments = check(&call, || {
            self.check_numel("the input", input.len(), checked_sum(&counts)?)
        })
        .and_then(|()| check_reduction::<T>(&call, op, true));
        self.begin(call, arguments)?
            .reduce_scatter(output, &counts, input, op)
    }

    /// Reduces the buffers of all ranks element by element, and gives every rank the result in its
    /// `buffer`. torch's `all_reduce`. Every element is reduced in rank order, so all ranks end
    /// with the same bits.
    ///
    /// # Errors
    /// Different lengths, dtypes or reductions; an average of integers. After an error that ends
    /// the group the buffer holds unspecified values.
    pub fn all_reduce<T: Element>(&self, buffer: &mut [T], op: ReduceOp) -> Result<(), CommError> {
        let numel = buffer.len();
        let call = Call {
            reduce: Some(op),
            ..tensor_call::<T>(Operation::AllReduce, vec![numel], None)
        };
        let arguments = check_reduction::<T>(&call, op, true);
        let mut turn = self.begin(call, arguments)?;
        let world_size = self.world_size();
        if size_of_val(buffer) <= INLINE_BYTES {
            // With so little data it is fastest if every rank gets all inputs and reduces all
            // elements.
            let input = buffer.to_vec();
            let whole = vec![0..size_of_val(buffer); world_size];
            let plan = Plan {
                direction: Direction::AllGather,
                largest_transfer_bytes: size_of_val(buffer),
                sent_ranges: whole.clone(),
                received_ranges: whole,
                destination: reduce_into(buffer, op),
            };
            return turn.move_bytes(bytemuck::cast_slice(&input), plan);
        }
        // The buffer is reduced window by window. In each window a rank reduces one segment, and
        // then all ranks gather all segments.
        let segment_len = numel
            .div_ceil(world_size)
            .next_multiple_of(SEGMENT_ELEMENTS)
            .min(MAX_SEGMENT_BYTES / size_of::<T>());
        let mut reduced = vec![T::zeroed(); segment_len];
        for mut window in buffer.chunks_mut(segment_len * world_size) {
            let counts: Vec<usize> = (0..world_size)
                .map(|rank| {
                    window
                        .len()
                        .saturating_sub(rank * segment_len)
                        .min(segment_len)
                })
                .collect();
            let reduced = &mut reduced[..counts[self.rank()]];
            turn.reduce_scatter(reduced, &counts, window, op)?;
            let plan = Plan {
                direction: Direction::AllGather,
                largest_transfer_bytes: largest_byte_len::<T>(&counts),
                sent_ranges: vec![0..size_of_val(reduced); world_size],
                received_ranges: whole_inputs::<T>(&counts),
                destination: copy_into([&mut window], &counts),
            };
            turn.move_bytes(bytemuck::cast_slice(reduced), plan)?;
        }
        Ok(())
    }

    /// Copies the root's `buffer` into every rank's `buffer`. torch's `broadcast`.
    ///
    /// # Errors
    /// Different lengths, dtypes or roots.
    pub fn broadcast<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<(), CommError> {
        let call = tensor_call::<T>(Operation::Broadcast, vec![buffer.len()], Some(root));
        let arguments = check(&call, || self.check_root(root));
        let mut turn = self.begin(call, arguments)?;
        let world_size = self.world_size();
        let byte_len = size_of_val(buffer);
        let mut counts = vec![0; world_size];
        // The root keeps its elements, and all others take those of the root.
        let (send, mut receive): (&[T], Option<&mut [T]>) = if self.rank() == root {
            (buffer, None)
        } else {
            counts[root] = buffer.len();
            (&[], Some(buffer))
        };
        let mut sent_ranges = vec![0..size_of_val(send); world_size];
        sent_ranges[root] = 0..0;
        let plan = Plan {
            direction: Direction::Broadcast { root },
            largest_transfer_bytes: byte_len,
            sent_ranges,
            received_ranges: whole_inputs::<T>(&counts),
            destination: copy_into(&mut receive, &counts),
        };
        turn.move_bytes(bytemuck::cast_slice(send), plan)
    }

    /// Gathers every rank's `input`, equally long on all ranks, into the root's `output`, in rank
    /// order. torch's `gather`. `output` is `Some` on the root and `None` on all others.
    ///
    /// # Errors
    /// An output that is given on the wrong ranks or has the wrong length; inputs of different
    /// lengths or dtypes; different roots.
    pub fn gather<T: Element>(
        &self,
        output: Option<&mut [T]>,
        input: &[T],
        root: usize,
    ) -> Result<(), CommError> {
        let call = tensor_call::<T>(Operation::Gather, vec![input.len()], Some(root));
        let counts = vec![input.len(); self.world_size()];
        let mut outputs = output.map(|output| [output]);
        let outputs = outputs.as_mut().map(<[_; 1]>::as_mut_slice);
        self.gather_counts(call, outputs, &counts, input)
    }

    /// Gathers like [`gather`](Self::gather), with `counts[r]` elements of each rank `r`, with
    /// the root's output in pieces, as in [`all_gather_into_slices`](Self::all_gather_into_slices).
    /// All ranks give all counts.
    ///
    /// # Errors
    /// The same as [`gather`](Self::gather); counts that differ between ranks.
    pub fn gather_uneven_into_slices<T: Element>(
        &self,
        outputs: Option<&mut [&mut [T]]>,
        counts: &[usize],
        input: &[T],
        root: usize,
    ) -> Result<(), CommError> {
        let call = tensor_call::<T>(Operation::GatherUneven, counts.to_vec(), Some(root));
        self.gather_counts(call, outputs, counts, input)
    }

    /// Gathers the input of every rank on the root of the call or, if it has none, on every rank.
    /// Only ranks on which is gathered pass outputs, which are filled one after the other, in rank
    /// order. `counts` are the elements of each rank's input.
    fn gather_counts<T: Element>(
        &self,
        call: Call,
        outputs: Option<&mut [&mut [T]]>,
        counts: &[usize],
        input: &[T],
    ) -> Result<(), CommError> {
        let root = call.root;
        let output_len = outputs.as_deref().map(total_len);
        let arguments = check(&call, || {
            root.map_or(Ok(()), |root| self.check_root(root))?;
            self.check_counts("counts", counts)?;
            self.check_numel("the input", input.len(), counts[self.rank()])?;
            let needed = checked_sum(counts)?;
            match root {
                Some(root) => self.check_root_only("an output", root, output_len, needed),
                None => self.check_numel("the output", output_len.unwrap_or(0), needed),
            }
        });
        let mut turn = self.begin(call, arguments)?;
        let mut sent_ranges = vec![0..0; counts.len()];
        match root {
            Some(root) => sent_ranges[root] = 0..size_of_val(input),
            None => sent_ranges.fill(0..size_of_val(input)),
        }
        let output_counts = match outputs {
            Some(_) => counts.to_vec(),
            None => vec![0; counts.len()],
        };
        let plan = Plan {
            direction: root.map_or(Direction::AllGather, |root| Direction::Gather { root }),
            largest_transfer_bytes: largest_byte_len::<T>(counts),
            sent_ranges,
            received_ranges: whole_inputs::<T>(&output_counts),
            destination: copy_into(outputs.into_iter().flatten(), &output_counts),
        };
        turn.move_bytes(bytemuck::cast_slice(input), plan)
    }

    /// Cuts the root's `input` into equal pieces and gives rank `r` the `r`-th. torch's `scatter`.
    /// `input` is `Some` on the root and `None` on all others.
    ///
    /// # Errors
    /// An input that is given on the wrong ranks or has the wrong length; outputs of different
    /// lengths or dtypes; different roots.
    pub fn scatter<T: Element>(
        &self,
        output: &mut [T],
        input: Option<&[T]>,
        root: usize,
    ) -> Result<(), CommError> {
        let call = tensor_call::<T>(Operation::Scatter, vec![output.len()], Some(root));
        let counts = vec![output.len(); self.world_size()];
        self.scatter_counts(call, &mut [output], input, &counts)
    }

    /// Scatters like [`scatter`](Self::scatter), with `counts[r]` elements of each rank `r`, with
    /// the output in pieces, as in [`all_gather_into_slices`](Self::all_gather_into_slices). All
    /// ranks give all counts.
    ///
    /// # Errors
    /// The same as [`scatter`](Self::scatter); counts that differ between ranks.
    pub fn scatter_uneven_into_slices<T: Element>(
        &self,
        outputs: &mut [&mut [T]],
        input: Option<&[T]>,
        counts: &[usize],
        root: usize,
    ) -> Result<(), CommError> {
        let call = tensor_call::<T>(Operation::ScatterUneven, counts.to_vec(), Some(root));
        self.scatter_counts(call, outputs, input, counts)
    }

    /// Sends each rank its part of the input of the call's root, the only rank that passes one. The
    /// part fills `outputs`, one slice after the other. `counts` are the elements of each rank's
    /// part.
    fn scatter_counts<T: Element>(
        &self,
        call: Call,
        outputs: &mut [&mut [T]],
        input: Option<&[T]>,
        counts: &[usize],
    ) -> Result<(), CommError> {
        let root = call.root.expect("a scatter has a root");
        let output_len = total_len(outputs);
        let arguments = check(&call, || {
            self.check_root(root)?;
            self.check_counts("counts", counts)?;
            self.check_numel("the output", output_len, counts[self.rank()])?;
            self.check_root_only(
                "an input",
                root,
                input.map(<[T]>::len),
                checked_sum(counts)?,
            )
        });
        let mut turn = self.begin(call, arguments)?;
        // Only the root sends.
        let send = bytemuck::cast_slice(input.unwrap_or_default());
        let ranges = byte_ranges::<T>(counts);
        let mut received_ranges = vec![0..0; counts.len()];
        received_ranges[root] = ranges[self.rank()].clone();
        let mut output_counts = vec![0; counts.len()];
        output_counts[root] = output_len;
        let sent_ranges = match input {
            Some(_) => ranges,
            None => vec![0..0; counts.len()],
        };
        let plan = Plan {
            direction: Direction::Scatter { root },
            largest_transfer_bytes: largest_byte_len::<T>(counts),
            sent_ranges,
            received_ranges,
            destination: copy_into(outputs, &output_counts),
        };
        turn.move_bytes(send, plan)
    }

    /// Sends `send_counts[r]` elements of `input` to each rank `r`, and receives
    /// `receive_counts[r]` elements from it into `output`; both lie in rank order. torch's
    /// `all_to_all_single` with split sizes.
    ///
    /// # Errors
    /// Counts that do not add up to the lengths of the slices; a rank that expects another number
    /// of elements than is sent to it.
    pub fn all_to_all_uneven<T: Element>(
        &self,
        output: &mut [T],
        receive_counts: &[usize],
        input: &[T],
        send_counts: &[usize],
    ) -> Result<(), CommError> {
        self.all_to_all_uneven_into_slices(&mut [output], receive_counts, input, send_counts)
    }

    /// Exchanges like [`all_to_all_uneven`](Self::all_to_all_uneven), with the output in pieces, as
    /// in [`all_gather_into_slices`](Self::all_gather_into_slices).
    ///
    /// # Errors
    /// The same as [`all_to_all_uneven`](Self::all_to_all_uneven).
    pub fn all_to_all_uneven_into_slices<T: Element>(
        &self,
        outputs: &mut [&mut [T]],
        receive_counts: &[usize],
        input: &[T],
        send_counts: &[usize],
    ) -> Result<(), CommError> {
        let call = tensor_call::<T>(Operation::AllToAllUneven, Vec::new(), None);
        let output_len = total_len(outputs);
        let arguments = check(&call, || {
            self.check_counts("the counts to receive", receive_counts)?;
            self.check_counts("the counts to send", send_counts)?;
            self.check_numel("the output", output_len, checked_sum(receive_counts)?)?;
            self.check_numel("the input", input.len(), checked_sum(send_counts)?)
        });
        let mut turn = self.begin(call, arguments)?;
        let world_size = self.world_size();
        // Each rank shows all others its counts to send, followed by its counts to receive.
        let own_counts = send_counts
            .iter()
            .chain(receive_counts)
            .map(|&count| count as u64)
            .collect();
        let sequence = turn.call.sequence;
        let send = bytemuck::cast_slice(input);
        turn.round(None, own_counts, send, |attachments| {
            let counts: Vec<Counts<'_>> = attachments
                .iter()
                .map(|attachment| Counts(&attachment.numbers))
                .collect();
            // For every two ranks, one must send as much as the other expects.
            let fits = counts.iter().all(|counts| counts.0.len() == 2 * world_size)
                && (0..world_size).all(|sender| {
                    (0..world_size).all(|receiver| {
                        counts[sender].sent()[receiver] == counts[receiver].received()[sender]
                    })
                });
            if !fits {
                let calls = self.global_ranks().iter().copied().zip(counts);
                return Err(CommError::Mismatch {
                    sequence,
                    calls: RankCall::collect(calls),
                });
            }
            // The bytes for this rank follow those for the ranks before it in the sender's input.
            let received_ranges = counts.iter().map(|counts| {
                let sent: Vec<usize> = counts.sent().iter().map(|&count| count as usize).collect();
                byte_ranges::<T>(&sent)[self.rank()].clone()
            });
            let largest = counts
                .iter()
                .flat_map(Counts::sent)
                .max()
                .expect("there is a count for each rank");
            Ok(Some(Plan {
                direction: Direction::AllToAll,
                largest_transfer_bytes: largest_byte_len::<T>(&[*largest as usize]),
                sent_ranges: byte_ranges::<T>(send_counts),
                received_ranges: received_ranges.collect(),
                destination: copy_into(outputs, receive_counts),
            }))
        })
    }
}

impl Turn<'_> {
    /// Carries out one round in which `input`, cut into parts of `counts` elements, is reduced over
    /// all ranks, and each rank gets its part.
    fn reduce_scatter<T: Element>(
        &mut self,
        output: &mut [T],
        counts: &[usize],
        input: &[T],
        op: ReduceOp,
    ) -> Result<(), CommError> {
        let rank = self.group.rank();
        let sent_ranges = byte_ranges::<T>(counts);
        let plan = Plan {
            direction: Direction::AllToAll,
            largest_transfer_bytes: largest_byte_len::<T>(counts),
            received_ranges: vec![sent_ranges[rank].clone(); counts.len()],
            sent_ranges,
            destination: reduce_into(output, op),
        };
        self.move_bytes(bytemuck::cast_slice(input), plan)
    }
}

impl ProcessGroup {
    /// Checks that `root` is a rank of this group. The error is a message.
    pub(crate) fn check_root(&self, root: usize) -> Result<(), String> {
        if root < self.world_size() {
            return Ok(());
        }
        Err(format!(
            "the root is rank {root}, but the group has {} ranks",
            self.world_size()
        ))
    }

    /// Checks that there is one count for each rank. The error is a message that begins with
    /// `name`, a plural noun such as `the counts to send`.
    pub(crate) fn check_counts(&self, name: &str, counts: &[usize]) -> Result<(), String> {
        if counts.len() == self.world_size() {
            return Ok(());
        }
        Err(format!(
            "{name} must be one for each of {} ranks, not {}",
            self.world_size(),
            counts.len()
        ))
    }

    /// Checks that an argument with `numel` elements has the `needed` number. The error is a
    /// message that begins with `name`, a noun such as `the input`.
    pub(crate) fn check_numel(
        &self,
        name: &str,
        numel: usize,
        needed: usize,
    ) -> Result<(), String> {
        if numel == needed {
            return Ok(());
        }
        Err(format!(
            "{name} must have {needed} elements on rank {} of {}, not {numel}",
            self.rank(),
            self.world_size()
        ))
    }

    /// Checks an argument that the root must give and no other rank may give. `numel` is its number
    /// of elements, or `None` if this rank does not give it. `needed` is the number of elements
    /// that it must have. The error is a message that begins with `name`, a noun such as `an
    /// output`.
    pub(crate) fn check_root_only(
        &self,
        name: &str,
        root: usize,
        numel: Option<usize>,
        needed: usize,
    ) -> Result<(), String> {
        match numel {
            Some(numel) if self.rank() == root => self.check_numel(name, numel, needed),
            None if self.rank() != root => Ok(()),
            Some(_) => Err(format!(
                "{name} must not be given on rank {}, but only on root {root}",
                self.rank()
            )),
            None => Err(format!("{name} must be given on root {root}")),
        }
    }
}

/// Returns the call of an operation on elements of type `T`.
fn tensor_call<T: Element>(operation: Operation, sizes: Vec<usize>, root: Option<usize>) -> Call {
    Call {
        dtype: Some(T::DTYPE),
        sizes,
        root,
        ..Call::new(operation)
    }
}

/// Runs a check of arguments, and turns its message into the error of the call.
pub(crate) fn check(
    call: &Call,
    arguments: impl FnOnce() -> Result<(), String>,
) -> Result<(), CommError> {
    arguments().map_err(|message| CommError::invalid_argument(call.name(), message))
}

/// Checks that elements of type `T` can be reduced by `op`: an average of integers cannot, nor can
/// a type of which `is_known` says that the backend does not have it.
pub(crate) fn check_reduction<T: Element>(
    call: &Call,
    op: ReduceOp,
    is_known: bool,
) -> Result<(), CommError> {
    if is_known && (op != ReduceOp::Avg || T::AVERAGES) {
        return Ok(());
    }
    Err(CommError::UnsupportedReduction {
        operation: call.name().to_owned(),
        dtype: T::DTYPE,
        op,
    })
}

/// Returns the sum of counts, or a message that it is too large.
pub(crate) fn checked_sum(counts: &[usize]) -> Result<usize, String> {
    let sum = counts
        .iter()
        .try_fold(0usize, |sum, &count| sum.checked_add(count));
    sum.ok_or_else(|| format!("counts {counts:?} are too large"))
}

/// Returns the number of elements of all outputs together.
fn total_len<T>(outputs: &[&mut [T]]) -> usize {
    outputs.iter().map(|output| output.len()).sum()
}

/// Returns the number of bytes of the largest of `counts`.
fn largest_byte_len<T>(counts: &[usize]) -> usize {
    let largest = counts.iter().max().expect("there is a count of each rank");
    largest.saturating_mul(size_of::<T>())
}

/// Returns the range of bytes of each rank's whole input.
fn whole_inputs<T>(counts: &[usize]) -> Vec<Range<usize>> {
    counts
        .iter()
        .map(|count| 0..count * size_of::<T>())
        .collect()
}

/// Returns the range of bytes of each rank's elements, which lie one after the other.
pub(crate) fn byte_ranges<T>(counts: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0usize;
    let ranges = counts.iter().map(|count| {
        let start = end;
        // Ranks that do not send may have been given any counts. Then the ranks do not agree.
        end = start.saturating_add(count.saturating_mul(size_of::<T>()));
        start..end
    });
    ranges.collect()
}

/// Returns the destination that fills `outputs`, one after the other, with `counts[r]` elements of
/// each rank `r`. A rank's elements may span several outputs. The outputs have as many elements as
/// the counts say.
fn copy_into<'p, 'o: 'p, T: Element>(
    outputs: impl IntoIterator<Item = &'p mut &'o mut [T]>,
    counts: &[usize],
) -> Destination<'p> {
    let outputs = outputs.into_iter();
    let slices = outputs.map(|output| bytemuck::cast_slice_mut(output));
    let mut places = Filler::new(slices.collect());
    let fillers = counts
        .iter()
        .map(|count| places.take(count * size_of::<T>()));
    Destination::Copy(fillers.collect())
}

/// Returns the destination that reduces the pieces of all ranks into `output`.
fn reduce_into<T: Element>(output: &mut [T], op: ReduceOp) -> Destination<'_> {
    Destination::Reduce(Box::new(move |offset, pieces| {
        // Blocks begin at multiples of 64 bytes, so no element is cut.
        let start = offset / size_of::<T>();
        let numel = pieces[0].len() / size_of::<T>();
        T::reduce(op, pieces, &mut output[start..start + numel]);
    }))
}

/// The counts of a rank's call of an all-to-all: those to send, and then those to receive.
#[derive(PartialEq)]
struct Counts<'a>(&'a [u64]);

impl Counts<'_> {
    fn sent(&self) -> &[u64] {
        &self.0[..self.0.len() / 2]
    }

    fn received(&self) -> &[u64] {
        &self.0[self.0.len() / 2..]
    }
}

impl fmt::Display for Counts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} sending {:?} and receiving {:?}",
            Operation::AllToAllUneven,
            self.sent(),
            self.received()
        )
    }
}
