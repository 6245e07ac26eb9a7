//! The interface between process groups and backends: rounds.
//!
//! Every operation consists of one or two rounds. In a round each rank casts a [ballot](Ballot),
//! with a few bytes attached for all others, and publishes the bytes that it sends. Once the
//! ballots of all ranks are merged, each rank plans from the attachments which ranges of bytes it
//! reads from which rank, and where they go.
//!
//! [`ProcessGroup`](crate::ProcessGroup) knows the operations; a backend only knows rounds.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
#[cfg(feature = "nccl")]
use cudarc::driver::{CudaStream, sys::CUdeviceptr};
#[cfg(feature = "nccl")]
use fsdp_layout::DType;

use crate::ballot::Ballot;
use crate::error::CommError;
#[cfg(feature = "nccl")]
use crate::record::{Call, Fault};
#[cfg(feature = "nccl")]
use crate::reduce::ReduceOp;

/// One rank's connection to the other ranks of one group. Ranks are ranks of this group, except in
/// errors and [`Members::global_ranks`].
pub(crate) trait Backend: Send + Sync + fmt::Debug {
    /// Returns the name: `local`, `tcp`, …
    fn name(&self) -> &'static str;

    /// Returns the ranks of the group.
    fn members(&self) -> &Members;

    /// Carries out one round. All ranks call it with ascending [`Round::number`]s, one at a time.
    ///
    /// `plan` is called once, with the outcome. If it returns `None`, no bytes move. The plans of
    /// all ranks must fit together. When this returns, with or without an error, no rank reads
    /// `send` any more.
    ///
    /// # Errors
    /// A rank that is missing at the deadline or has left; an abort; the error of `plan` itself.
    fn round<'p>(
        &self,
        round: &Round<'_>,
        vote: &Vote<'_>,
        send: &[u8],
        plan: Planner<'p, '_>,
    ) -> Result<(), CommError>;

    /// Creates a group of some of these ranks. All of them call it right after the same round,
    /// while the others call [`without_subgroup`](Self::without_subgroup). They may exchange
    /// messages until the deadline of that round.
    ///
    /// # Errors
    /// The backend lacks something that a group needs, or a rank is missing.
    fn subgroup(&self, round: &Round<'_>, members: Members) -> Result<Arc<dyn Backend>, CommError>;

    /// Does a rank's part in the creation of groups that it is in none of.
    ///
    /// # Errors
    /// A rank is missing.
    fn without_subgroup(&self, _round: &Round<'_>) -> Result<(), CommError> {
        Ok(())
    }

    /// Creates the group of the ranks that remain when others are left out, which may be lost. Only
    /// `members` call it, and this group may have failed. They may exchange messages until the
    /// deadline of the round, which is not one of this group.
    ///
    /// # Errors
    /// The backend cannot do without a lost rank, or one of the members is missing.
    fn shrink(&self, round: &Round<'_>, members: Members) -> Result<Arc<dyn Backend>, CommError> {
        self.subgroup(round, members)
    }

    /// Tells all ranks that this group has failed in this round, unless it has failed already.
    /// Ranks that are still in an earlier round may finish that round, because this rank has done
    /// its part of it.
    fn abort(&self, round: u64, error: &CommError);

    /// Returns the error of an operation that had been queued when it failed, which has ended the
    /// group.
    fn queued_failure(&self) -> Option<CommError> {
        None
    }

    /// Returns the part that moves GPU memory, if the backend has one.
    #[cfg(feature = "nccl")]
    fn device(&self) -> Option<&dyn DeviceTransfer> {
        None
    }
}

/// The part of a backend that moves GPU memory.
#[cfg(feature = "nccl")]
pub(crate) trait DeviceTransfer {
    /// Returns the number of the GPU.
    fn ordinal(&self) -> usize;

    /// Queues a call that all ranks have agreed on in this round, behind all earlier work of the
    /// stream. Later work of the stream comes after it, with or without an error: also what frees
    /// the memory of the call.
    ///
    /// # Errors
    /// A rank that is missing at the deadline or has left; an abort; an error of the library.
    fn queue(
        &self,
        round: &Round<'_>,
        call: &Call,
        movement: &Movement,
        stream: &CudaStream,
    ) -> Result<Arc<dyn QueuedTransfer>, CommError>;

    /// Records that this rank has left out the agreement on a call, which all ranks expect. If
    /// another rank asks for it, this one makes up for it.
    fn leave_out(&self, round: &Round<'_>, call: &Call);

    /// Forgets the agreements that were left out: all ranks have made those calls.
    fn forget_left_out(&self);

    /// Agrees on a call with ranks that may have left out the agreement. `fault` is the error of
    /// this rank, if it has one.
    ///
    /// # Errors
    /// Ranks that make another call, or have a fault; a rank that is missing at the deadline.
    fn agree_late(
        &self,
        round: &Round<'_>,
        call: &Call,
        fault: Option<&Fault>,
    ) -> Result<(), CommError>;

    /// Waits on the host until the GPU has done all calls that are queued.
    ///
    /// # Errors
    /// The reason for which one of them has failed.
    fn synchronize(&self) -> Result<(), CommError>;
}

/// A transfer that is queued on a GPU. To drop this changes nothing.
#[cfg(feature = "nccl")]
pub(crate) trait QueuedTransfer: Send + Sync + fmt::Debug {
    /// Makes later work of a stream wait for the transfer, on the GPU.
    fn delay(&self, stream: &CudaStream) -> Result<(), CommError>;

    /// Returns `true` if the transfer is over, without waiting.
    ///
    /// # Errors
    /// The reason that the transfer failed for.
    fn is_done(&self) -> Result<bool, CommError>;

    /// Waits on the host until the transfer is over.
    ///
    /// # Errors
    /// The reason that the transfer failed for, such as its deadline.
    fn wait(&self) -> Result<(), CommError>;
}

/// Something to be moved between GPUs.
#[cfg(feature = "nccl")]
#[derive(Debug, Clone)]
pub(crate) enum Movement {
    /// A collective that takes `count` elements at `send`, and puts its result at `receive`, which
    /// may be the same place.
    Collective {
        kind: Collective,
        send: CUdeviceptr,
        receive: CUdeviceptr,
        count: usize,
        dtype: DType,
    },
    /// A transfer to and from each rank: an address and a number of bytes.
    Exchange {
        send: Vec<(CUdeviceptr, usize)>,
        receive: Vec<(CUdeviceptr, usize)>,
    },
}

/// The collectives that NCCL has.
#[cfg(feature = "nccl")]
#[derive(Debug, Clone, Copy)]
pub(crate) enum Collective {
    AllGather,
    ReduceScatter(ReduceOp),
    AllReduce(ReduceOp),
    /// A copy of the elements of this rank to all.
    Broadcast(usize),
}

/// The ranks of a group.
#[derive(Debug)]
pub(crate) struct Members {
    /// The number of the group. No two groups of a job have the same.
    pub(crate) id: u64,
    /// The global rank of each rank of the group.
    pub(crate) global_ranks: Vec<usize>,
    /// This rank in the group.
    pub(crate) rank: usize,
}

impl Members {
    /// Returns all ranks of a job, of which `rank` is this one.
    pub(crate) fn world(rank: usize, ranks: usize) -> Members {
        Members {
            id: 0,
            global_ranks: (0..ranks).collect(),
            rank,
        }
    }
}

/// The number of rounds in which a group is set up: two for shared memory, and one for the backends
/// that build on `tcp`. The rounds of its operations come after these.
pub(crate) const SETUP_ROUNDS: u64 = 3;

/// The number of a round, and its deadline.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Round<'a> {
    /// A number that is larger than those of all rounds of this group before this one. Ranks may
    /// skip numbers.
    pub(crate) number: u64,
    /// The number of operations of this group before this one.
    pub(crate) sequence: u64,
    /// The operation, for messages.
    pub(crate) operation: &'a str,
    /// The time that the operation may take.
    pub(crate) timeout: Duration,
    /// The moment at which `timeout` is over.
    pub(crate) deadline: Instant,
    /// `true` if the ranks vote by messages even where they share memory. A rank that is in no
    /// vote, because it makes a call that all expect, answers messages only.
    pub(crate) votes_by_message: bool,
}

impl<'a> Round<'a> {
    /// Returns the first round of a job or of a part of it, in which its ranks find each other.
    pub(crate) fn rendezvous(timeout: Duration, deadline: Instant) -> Round<'a> {
        Round {
            number: SETUP_ROUNDS,
            sequence: 0,
            operation: "rendezvous",
            timeout,
            deadline,
            votes_by_message: false,
        }
    }

    /// Returns the error of this round because of a rank that has left.
    pub(crate) fn rank_left_error(&self, rank: usize, reason: impl Into<String>) -> CommError {
        CommError::RankLeft {
            rank,
            operation: self.operation.to_owned(),
            sequence: self.sequence,
            reason: reason.into(),
        }
    }

    /// Returns the error of this round if its deadline is over while the `missing` ranks have not
    /// come.
    pub(crate) fn timeout_error(&self, missing: Vec<usize>) -> CommError {
        CommError::Timeout {
            operation: self.operation.to_owned(),
            sequence: self.sequence,
            missing,
            deadline: self.timeout,
        }
    }
}

/// A rank's say in a round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Vote<'a> {
    pub(crate) ballot: Ballot,
    /// The bytes that all other ranks get.
    pub(crate) attachment: &'a [u8],
}

/// The outcome of the vote in a round. It is the same on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tally {
    /// The merged ballot of all ranks.
    pub(crate) ballot: Ballot,
    /// The attachments of all ranks, in rank order.
    pub(crate) attachments: Vec<Bytes>,
    /// The number of ballots that this rank has sent.
    pub(crate) sent_ballots: usize,
}

/// Plans a rank's part of a round from the outcome of the vote.
pub(crate) type Planner<'p, 'a> =
    Box<dyn FnOnce(&Tally) -> Result<Option<Plan<'p>>, CommError> + 'a>;

/// The direction in which bytes move in a round. It is the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// Every rank sends the same bytes to every rank.
    AllGather,
    /// One rank sends the same bytes to every rank.
    Broadcast {
        /// The sending rank.
        root: usize,
    },
    /// Every rank sends to one rank.
    Gather {
        /// The receiving rank.
        root: usize,
    },
    /// One rank sends different bytes to every rank.
    Scatter {
        /// The sending rank.
        root: usize,
    },
    /// Every rank sends different bytes to every rank.
    AllToAll,
}

/// A rank's part of a round. The ranges of bytes that this rank sends, to others and to itself, lie
/// within what it publishes.
pub(crate) struct Plan<'p> {
    /// The direction of the whole round.
    #[cfg_attr(
        not(feature = "mpi"),
        expect(dead_code, reason = "only MPI has a call for each direction")
    )]
    pub(crate) direction: Direction,
    /// The largest number of bytes that any rank reads from another. It is the same on all ranks,
    /// so that all cut their bytes into the same pieces.
    #[cfg_attr(
        not(feature = "mpi"),
        expect(dead_code, reason = "only MPI needs all ranks to make the same calls")
    )]
    pub(crate) largest_transfer_bytes: usize,
    /// For each rank, the range of this rank's bytes that it reads.
    pub(crate) sent_ranges: Vec<Range<usize>>,
    /// For each rank, the range of its bytes that this rank reads.
    pub(crate) received_ranges: Vec<Range<usize>>,
    /// The place that the bytes go to.
    pub(crate) destination: Destination<'p>,
}

/// The place that the bytes of all ranks go to.
pub(crate) enum Destination<'p> {
    /// For each rank, the places of its bytes, which they fill exactly.
    Copy(Vec<Filler<'p>>),
    /// A function that takes equally many bytes of all ranks: an offset, and the bytes of each rank
    /// there, in rank order. It is called for successive blocks, which begin at multiples of 64
    /// bytes.
    Reduce(Reducer<'p>),
}

/// A function of an offset and the bytes of all ranks there.
pub(crate) type Reducer<'p> = Box<dyn FnMut(usize, &[&[u8]]) + 'p>;

/// Consecutive slices that are filled from consecutive pieces.
pub(crate) struct Filler<'p> {
    slices: std::vec::IntoIter<&'p mut [u8]>,
    remaining: &'p mut [u8],
}

impl<'p> Filler<'p> {
    pub(crate) fn new(slices: Vec<&'p mut [u8]>) -> Self {
        Filler {
            slices: slices.into_iter(),
            remaining: &mut [],
        }
    }

    /// Returns the next free place, of at most `limit` bytes.
    fn next_place(&mut self, limit: usize) -> &'p mut [u8] {
        while self.remaining.is_empty() {
            self.remaining = self
                .slices
                .next()
                .expect("the slices are as long as the bytes that are planned for them");
        }
        let cut = limit.min(self.remaining.len());
        self.remaining
            .split_off_mut(..cut)
            .expect("the place is no longer than what remains")
    }

    /// Copies bytes to the next free places. There are places for all bytes that a plan asks for.
    pub(crate) fn fill(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let place = self.next_place(bytes.len());
            let (head, tail) = bytes.split_at(place.len());
            place.copy_from_slice(head);
            bytes = tail;
        }
    }

    /// Takes the next free places, of `missing` bytes together.
    pub(crate) fn take(&mut self, mut missing: usize) -> Filler<'p> {
        let mut slices = Vec::new();
        while missing > 0 {
            let place = self.next_place(missing);
            missing -= place.len();
            slices.push(place);
        }
        Filler::new(slices)
    }
}

/// The number of bytes of each rank that are reduced at a time: few enough to stay in the nearest
/// cache.
pub(crate) const BLOCK_BYTES: usize = 16 << 10;

impl Destination<'_> {
    /// Takes the next piece of each rank. The pieces begin at `offset` of the bytes of each.
    pub(crate) fn take(&mut self, offset: usize, pieces: &[&[u8]]) {
        match self {
            Destination::Copy(fillers) => {
                for (filler, piece) in fillers.iter_mut().zip(pieces) {
                    filler.fill(piece);
                }
            }
            Destination::Reduce(reduce) => reduce_blocks(reduce, offset, pieces),
        }
    }
}

/// Reduces equally long pieces, which begin at `offset`, block by block.
pub(crate) fn reduce_blocks(reduce: &mut Reducer<'_>, offset: usize, pieces: &[&[u8]]) {
    let piece_len = pieces
        .iter()
        .map(|piece| piece.len())
        .min()
        .expect("there is a piece of each rank");
    let mut block = Vec::with_capacity(pieces.len());
    for start in (0..piece_len).step_by(BLOCK_BYTES) {
        let end = piece_len.min(start + BLOCK_BYTES);
        block.clear();
        block.extend(pieces.iter().map(|piece| &piece[start..end]));
        reduce(offset + start, &block);
    }
}

impl Plan<'_> {
    /// Returns the number of bytes that this rank, which is `rank`, sends to others, and that it
    /// reads from others.
    pub(crate) fn moved_bytes(&self, rank: usize) -> (usize, usize) {
        let [sent, received] = [&self.sent_ranges, &self.received_ranges]
            .map(|ranges| bytes_of_others(ranges.iter().map(ExactSizeIterator::len), rank));
        (sent, received)
    }

    /// Fills the destination from the published bytes of all `members` (an empty slice for a rank
    /// that this one does not read). Copies begin with the bytes of this rank, so that ranks begin
    /// at different places.
    ///
    /// # Errors
    /// A rank has published fewer bytes in this round than are read from it. Only a bug in a
    /// backend can cause it.
    pub(crate) fn deliver(
        self,
        sources: &[&[u8]],
        members: &Members,
        round: &Round<'_>,
    ) -> Result<(), CommError> {
        let published = |rank: usize| {
            let source = sources[rank];
            match self.received_ranges[rank].clone() {
                // A rank that this one does not read from may have published nothing.
                range if range.is_empty() => Ok(&[][..]),
                range => source.get(range).ok_or_else(|| {
                    let reason = format!("published only {} bytes", source.len());
                    round.rank_left_error(members.global_ranks[rank], reason)
                }),
            }
        };
        let ranks = sources.len();
        match self.destination {
            Destination::Copy(mut fillers) => {
                for rank in (0..ranks).map(|distance| (members.rank + distance) % ranks) {
                    fillers[rank].fill(published(rank)?);
                }
            }
            Destination::Reduce(mut reduce) => {
                let pieces = (0..ranks).map(published);
                reduce_blocks(&mut reduce, 0, &pieces.collect::<Result<Vec<_>, _>>()?);
            }
        }
        Ok(())
    }
}

/// Returns the sum of the numbers of bytes of all ranks but `rank`.
pub(crate) fn bytes_of_others(bytes: impl Iterator<Item = usize>, rank: usize) -> usize {
    bytes
        .enumerate()
        .filter(|&(other_rank, _)| other_rank != rank)
        .map(|(_, bytes)| bytes)
        .sum()
}
