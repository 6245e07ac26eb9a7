//! What a backend does for a process group: rounds.
//!
//! Every operation is one round, or two. In a round each rank shows the others a short record and publishes the bytes
//! it sends; once all records are there, each rank looks at them and plans which ranges of whose bytes it wants, and
//! where. [`ProcessGroup`](crate::ProcessGroup) knows the operations; a backend only knows rounds.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::CommError;

/// How one group's bytes move. Ranks here are ranks of this group, except in errors and [`global_ranks`](Self::global_ranks).
pub trait Backend: Send + Sync + fmt::Debug {
    /// `local`, `tcp`, …
    fn name(&self) -> &'static str;

    /// This rank.
    fn rank(&self) -> usize;

    /// The global rank of each rank of the group.
    fn global_ranks(&self) -> &[usize];

    /// Carries out one round. All ranks call it with ascending [`Round::number`]s, one at a time.
    ///
    /// `plan` is called once, with the records of all ranks in rank order. If it answers `None`, no bytes move; all
    /// ranks' plans must fit each other. When this returns, on whatever path, no rank reads `send` any more.
    ///
    /// # Errors
    /// A rank that is missing at the deadline or has left, an abort, or the error of `plan` itself.
    fn round<'p>(&self, round: &Round<'_>, record: &[u8], send: &[u8], plan: Planner<'p, '_>) -> Result<(), CommError>;

    /// A group of some of these ranks, this one among them. All of them call it right after the same round, with the
    /// same `id`, which no other group has. They may talk to each other until that round's time is up.
    ///
    /// # Errors
    /// What the backend needs for a group may be lacking; a rank may be missing.
    fn subgroup(&self, round: &Round<'_>, id: u64, ranks: &[usize]) -> Result<Arc<dyn Backend>, CommError>;

    /// Tells all ranks that this group has failed in this round, unless it already has. Ranks that are still in an
    /// earlier round, which this one has finished, may finish it too.
    fn abort(&self, round: u64, error: &CommError);

    /// How it moves GPU memory, if it does.
    #[cfg(feature = "nccl")]
    fn device(&self) -> Option<&dyn DeviceTransfer> {
        None
    }
}

/// What a backend does that moves GPU memory.
#[cfg(feature = "nccl")]
pub trait DeviceTransfer {
    /// The GPU's number.
    fn ordinal(&self) -> usize;

    /// Carries out a call that all ranks have agreed on in this round, after what the stream has been given so far.
    /// When this returns, on whatever path, the GPU no longer touches the memory of the call.
    ///
    /// # Errors
    /// A rank that is missing at the deadline or has left, an abort, or the library's own.
    #[doc(hidden)]
    fn transfer(
        &self,
        round: &Round<'_>,
        call: DeviceCall,
        stream: &cudarc::driver::CudaStream,
    ) -> Result<(), CommError>;
}

/// A collective on memory that only [`DeviceGroup`](crate::device::DeviceGroup)'s methods can lend.
#[cfg(feature = "nccl")]
#[derive(Debug)]
pub struct DeviceCall(pub(crate) crate::nccl::library::Movement);

/// Which round this is, and how long it may take.
#[derive(Debug, Clone, Copy)]
pub struct Round<'a> {
    /// Rounds of this group before this one.
    pub number: u64,
    /// Operations of this group before this one.
    pub sequence: u64,
    /// The operation, for messages.
    pub operation: &'a str,
    /// The time that the operation was given,
    pub deadline: Duration,
    /// and when it is up.
    pub until: Instant,
}

/// Decides on a rank's part of a round from the records of all ranks.
pub type Planner<'p, 'a> = Box<dyn FnOnce(&[&[u8]]) -> Result<Option<Plan<'p>>, CommError> + 'a>;

/// Who gives bytes to whom in a round. The same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// All ranks, the same bytes to each.
    AllGather,
    /// One rank, the same bytes to each.
    Broadcast {
        /// That rank.
        root: usize,
    },
    /// All ranks to one.
    Gather {
        /// That rank.
        root: usize,
    },
    /// One rank, other bytes to each.
    Scatter {
        /// That rank.
        root: usize,
    },
    /// All ranks, other bytes to each.
    AllToAll,
}

/// A rank's part of a round.
#[derive(Debug)]
pub struct Plan<'p> {
    /// What all ranks' parts are together.
    pub pattern: Pattern,
    /// The most bytes that any rank wants of another: the same on all ranks, so that all can cut alike.
    pub longest: usize,
    /// For each rank, the range of this rank's bytes that it will want.
    pub to: Vec<Range<usize>>,
    /// For each rank, the range of its bytes that this rank wants.
    pub from: Vec<Range<usize>>,
    /// Where they go.
    pub destination: Destination<'p>,
}

/// Where the bytes of all ranks go.
pub enum Destination<'p> {
    /// For each rank, consecutive slices that its bytes fill exactly.
    Copy(Vec<Vec<&'p mut [u8]>>),
    /// All ranks' bytes, equally many, go through this function: an offset and the bytes there of all ranks, in rank
    /// order. It is called for successive blocks, each beginning at a multiple of [`BLOCK_BYTES`].
    Reduce(Reducer<'p>),
}

/// Takes an offset, and the bytes there of all ranks.
pub type Reducer<'p> = Box<dyn FnMut(usize, &[&[u8]]) + 'p>;

/// Fills consecutive slices from consecutive pieces.
#[derive(Debug)]
pub(crate) struct Filler<'p> {
    slices: std::vec::IntoIter<&'p mut [u8]>,
    rest: &'p mut [u8],
}

impl<'p> Filler<'p> {
    pub(crate) fn new(slices: Vec<&'p mut [u8]>) -> Self {
        Filler { slices: slices.into_iter(), rest: &mut [] }
    }

    /// Copies the next bytes, and tells how many there was room for.
    pub(crate) fn fill(&mut self, mut bytes: &[u8]) -> usize {
        let given = bytes.len();
        while !bytes.is_empty() {
            if self.rest.is_empty() {
                match self.slices.next() {
                    Some(slice) => self.rest = slice,
                    None => break,
                }
            }
            let cut = bytes.len().min(self.rest.len());
            let (head, tail) = std::mem::take(&mut self.rest).split_at_mut(cut);
            head.copy_from_slice(&bytes[..cut]);
            (self.rest, bytes) = (tail, &bytes[cut..]);
        }
        given - bytes.len()
    }
}

/// How many bytes of each rank are reduced at a time; small enough to stay in the nearest cache.
pub const BLOCK_BYTES: usize = 16 << 10;

impl fmt::Debug for Destination<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Destination::Copy(_) => "Copy",
            Destination::Reduce(_) => "Reduce",
        })
    }
}

/// Reduces equally long pieces, which begin at `offset`, block by block.
pub(crate) fn reduce_blocks(reduce: &mut Reducer<'_>, offset: usize, pieces: &[&[u8]]) {
    let len = pieces.iter().map(|piece| piece.len()).min().unwrap_or(0);
    let mut block = Vec::with_capacity(pieces.len());
    for start in (0..len).step_by(BLOCK_BYTES) {
        let end = len.min(start + BLOCK_BYTES);
        block.clear();
        block.extend(pieces.iter().map(|piece| &piece[start..end]));
        reduce(offset + start, &block);
    }
}

impl Plan<'_> {
    /// Whether this rank wants bytes of that one.
    #[must_use]
    pub fn reads(&self, rank: usize) -> bool {
        self.from.get(rank).is_some_and(|range| !range.is_empty())
    }

    /// Whether that rank wants bytes of this one.
    #[must_use]
    pub fn is_read_by(&self, rank: usize) -> bool {
        self.to.get(rank).is_some_and(|range| !range.is_empty())
    }

    /// Fills the destination, given all ranks' published bytes (nothing for those that it does not read). Copies begin
    /// with the bytes of `first`, so that ranks can begin at different places.
    ///
    /// # Errors
    /// If a rank has not published what is wanted of it: its number and what it has published.
    pub fn deliver(self, sources: &[&[u8]], first: usize) -> Result<(), (usize, usize)> {
        let wanted = |rank: usize| {
            let source = sources.get(rank).copied().unwrap_or_default();
            match self.from.get(rank) {
                Some(range) if !range.is_empty() => source.get(range.clone()).ok_or((rank, source.len())),
                _ => Ok(Default::default()),
            }
        };
        match self.destination {
            Destination::Copy(mut destinations) => {
                let ranks = destinations.len();
                for rank in (0..ranks).map(|k| (first + k) % ranks) {
                    Filler::new(std::mem::take(&mut destinations[rank])).fill(wanted(rank)?);
                }
            }
            Destination::Reduce(mut reduce) => {
                let pieces = (0..sources.len()).map(wanted).collect::<Result<Vec<&[u8]>, _>>()?;
                reduce_blocks(&mut reduce, 0, &pieces);
            }
        }
        Ok(())
    }
}
