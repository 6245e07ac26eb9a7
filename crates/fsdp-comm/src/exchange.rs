//! The exchange of encoded objects between ranks, in pieces.
//!
//! All ranks first learn the sizes of all objects. If no rank sends or receives much, the objects
//! move in that same round. Otherwise every rank first reserves the memory for what it receives,
//! and then the objects move in pieces, one round for each, so that no round moves more than
//! [`ROUND_BYTES`] to or from a rank.

use std::borrow::Cow;
use std::ops::Range;

use crate::backend::{Destination, Direction, Filler, Plan};
use crate::buffer::reserve;
use crate::error::CommError;
use crate::group::Turn;
use crate::record::{Attachment, Fault};
use crate::wire;

/// The largest object, in bytes, that a rank may send. All objects together may be larger: what a
/// rank receives in one operation is limited only by its memory.
pub const MAX_OBJECT_BYTES: usize = wire::MAX_BYTES;

/// The largest number of bytes that a rank sends or receives in one round.
const ROUND_BYTES: usize = 16 << 20;

/// The smallest piece of an object, even if that makes a round larger than [`ROUND_BYTES`] because
/// of many ranks.
const MIN_PIECE_BYTES: usize = 4096;

impl Turn<'_> {
    /// Moves encoded objects. `own_objects` are those of this rank: one for each rank in a scatter,
    /// else one for all. Returns the object from each rank, which is empty if there is none.
    ///
    /// # Errors
    /// The `fault` of any rank, on all of them; a rank without memory for its objects.
    pub(crate) fn exchange_objects(
        &mut self,
        fault: Option<Fault>,
        direction: Direction,
        own_objects: &[Vec<u8>],
    ) -> Result<Vec<Vec<u8>>, CommError> {
        let rank = self.group.rank();
        let global_ranks = self.group.global_ranks();
        let name = self.call.name().to_owned();
        let sizes: Vec<u64> = own_objects.iter().map(|bytes| bytes.len() as u64).collect();
        let mut received_objects: Vec<Vec<u8>> = vec![Vec::new(); global_ranks.len()];

        // All ranks learn all sizes, and get the objects too if they fit in this round. A rank
        // whose own objects do not fit knows so already, and publishes nothing.
        let first_piece = if saturating_sum(own_objects.iter().map(Vec::len)) <= ROUND_BYTES {
            piece(own_objects, &WHOLE)
        } else {
            Cow::Borrowed(&[][..])
        };
        let mut planned = None;
        self.round(fault, sizes, &first_piece, |attachments| {
            // The sizes come from others, and are checked before anything is reserved.
            let found = Routes::new(attachments, global_ranks, &name, direction)?;
            let fits = found.busiest_rank_bytes() <= ROUND_BYTES;
            if fits {
                // Others may be reading the bytes of this rank already, so they must be told if it
                // cannot continue.
                found
                    .reserve(rank, global_ranks, &mut received_objects)
                    .map_err(|message| CommError::Aborted {
                        rank: global_ranks[rank],
                        message,
                    })?;
            }
            let plan = fits.then(|| found.plan(rank, &WHOLE, &mut received_objects));
            planned = Some(found);
            Ok(plan)
        })?;
        let routes = planned.expect("a round that succeeds has been planned");
        if routes.busiest_rank_bytes() <= ROUND_BYTES {
            return Ok(received_objects);
        }

        // No bytes have moved yet. A rank without memory for its objects says so in the next round,
        // which fails on all.
        let mut no_memory = routes
            .reserve(rank, global_ranks, &mut received_objects)
            .err()
            .map(|error| Fault::new(&error));
        for window in routes.windows() {
            let piece = piece(own_objects, &window);
            self.round(no_memory.take(), Vec::new(), &piece, |_| {
                Ok(Some(routes.plan(rank, &window, &mut received_objects)))
            })?;
        }
        Ok(received_objects)
    }
}

/// A range of bytes of every object that contains all of them.
const WHOLE: Range<usize> = 0..MAX_OBJECT_BYTES;

/// Returns the bytes of all objects in this window, one after the other.
fn piece<'a>(objects: &'a [Vec<u8>], window: &Range<usize>) -> Cow<'a, [u8]> {
    match objects {
        [only] => Cow::Borrowed(&only[cut_to_window(only.len(), window)]),
        objects => Cow::Owned(
            objects
                .iter()
                .flat_map(|bytes| &bytes[cut_to_window(bytes.len(), window)])
                .copied()
                .collect(),
        ),
    }
}

/// Returns the part of an object of `len` bytes that is in this window.
fn cut_to_window(len: usize, window: &Range<usize>) -> Range<usize> {
    len.min(window.start)..len.min(window.end)
}

/// Returns the sum of sizes, some of which other ranks have sent.
fn saturating_sum(sizes: impl Iterator<Item = usize>) -> usize {
    sizes.fold(0, usize::saturating_add)
}

/// The sizes of all objects, and the ranks that they go to. The same on all ranks.
struct Routes {
    /// For each rank, the sizes of the objects that it sends.
    sizes: Vec<Vec<usize>>,
    direction: Direction,
}

impl Routes {
    /// Reads the sizes from the attachments of all ranks.
    ///
    /// # Errors
    /// An object that is larger than [`MAX_OBJECT_BYTES`].
    fn new(
        attachments: &[Attachment<'_>],
        ranks: &[usize],
        operation: &str,
        direction: Direction,
    ) -> Result<Self, CommError> {
        let mut sizes = Vec::with_capacity(attachments.len());
        for (attachment, rank) in attachments.iter().zip(ranks) {
            let own_sizes = &attachment.numbers;
            if let Some(size) = own_sizes
                .iter()
                .find(|&&size| size > MAX_OBJECT_BYTES as u64)
            {
                let message = format!(
                    "an object of rank {rank} has {size} bytes, more than {MAX_OBJECT_BYTES}"
                );
                return Err(CommError::invalid_argument(operation, message));
            }
            sizes.push(own_sizes.iter().map(|&size| size as usize).collect());
        }
        Ok(Routes { sizes, direction })
    }

    /// Returns the index of the object that a rank gets from another.
    fn object_index(&self, sender: usize, receiver: usize) -> Option<usize> {
        let index = match self.direction {
            Direction::AllGather => 0,
            Direction::Broadcast { root } if sender == root => 0,
            Direction::Gather { root } if receiver == root => 0,
            Direction::Scatter { root } if sender == root => receiver,
            Direction::AllToAll => receiver,
            Direction::Broadcast { .. } | Direction::Gather { .. } | Direction::Scatter { .. } => {
                return None;
            }
        };
        (index < self.sizes[sender].len()).then_some(index)
    }

    /// Returns the size of the object that a rank gets from another; 0 if it gets none.
    fn object_bytes(&self, sender: usize, receiver: usize) -> usize {
        self.object_index(sender, receiver)
            .map_or(0, |index| self.sizes[sender][index])
    }

    /// Returns the largest number of bytes that any rank would send or receive if all objects moved
    /// in one round.
    fn busiest_rank_bytes(&self) -> usize {
        let ranks = self.sizes.len();
        let sent_bytes = self
            .sizes
            .iter()
            .map(|sizes| saturating_sum(sizes.iter().copied()));
        let received_bytes = (0..ranks).map(|receiver| {
            saturating_sum((0..ranks).map(|sender| self.object_bytes(sender, receiver)))
        });
        sent_bytes
            .chain(received_bytes)
            .max()
            .expect("a group has at least one rank")
    }

    /// Returns the size of the largest object, 0 if there is none.
    fn largest_object_bytes(&self) -> usize {
        self.sizes.iter().flatten().max().copied().unwrap_or(0)
    }

    /// Returns the window of each round if objects move in pieces.
    fn windows(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let piece_bytes = (ROUND_BYTES / self.sizes.len()).max(MIN_PIECE_BYTES);
        (0..self.largest_object_bytes())
            .step_by(piece_bytes)
            .map(move |start| start..start + piece_bytes)
    }

    /// Reserves memory in `received` for the objects that a rank receives. The error is a message
    /// that names the object for which there is not enough.
    fn reserve(
        &self,
        rank: usize,
        ranks: &[usize],
        received: &mut [Vec<u8>],
    ) -> Result<(), String> {
        for (sender, bytes) in received.iter_mut().enumerate() {
            let name = format!("an object of rank {}", ranks[sender]);
            reserve(bytes, self.object_bytes(sender, rank), &name)?;
        }
        Ok(())
    }

    /// Returns the range of the object from a rank to another in the bytes that [`piece`] returns
    /// for a window.
    fn range(&self, sender: usize, receiver: usize, window: &Range<usize>) -> Range<usize> {
        let Some(index) = self.object_index(sender, receiver) else {
            return 0..0;
        };
        let sizes = &self.sizes[sender];
        let start = sizes[..index]
            .iter()
            .map(|&size| cut_to_window(size, window).len())
            .sum();
        start..start + cut_to_window(sizes[index], window).len()
    }

    /// Plans a rank's part of the round that moves this window of all objects.
    fn plan<'p>(
        &self,
        rank: usize,
        window: &Range<usize>,
        received: &'p mut [Vec<u8>],
    ) -> Plan<'p> {
        let ranks = 0..self.sizes.len();
        let received_ranges: Vec<Range<usize>> = ranks
            .clone()
            .map(|sender| self.range(sender, rank, window))
            .collect();
        let destinations = received
            .iter_mut()
            .zip(&received_ranges)
            .map(|(bytes, range)| {
                let old_len = bytes.len();
                bytes.resize(old_len + range.len(), 0);
                Filler::new(vec![&mut bytes[old_len..]])
            });
        Plan {
            direction: self.direction,
            largest_transfer_bytes: cut_to_window(self.largest_object_bytes(), window).len(),
            sent_ranges: ranks
                .map(|receiver| self.range(rank, receiver, window))
                .collect(),
            destination: Destination::Copy(destinations.collect()),
            received_ranges,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gather(sizes: Vec<Vec<usize>>) -> Routes {
        Routes {
            sizes,
            direction: Direction::Gather { root: 0 },
        }
    }

    #[test]
    fn together_objects_may_be_larger_than_any_one_of_them_while_no_round_is() {
        let sizes = [MAX_OBJECT_BYTES, 700 << 20, 0, 5, MAX_OBJECT_BYTES];
        let routes = gather(sizes.iter().map(|&size| vec![size]).collect());
        assert!(routes.busiest_rank_bytes() > MAX_OBJECT_BYTES);
        let mut moved = [0; 5];
        for window in routes.windows() {
            let round: Vec<usize> = (0..5)
                .map(|from| routes.range(from, 0, &window).len())
                .collect();
            assert!(
                round.iter().sum::<usize>() <= ROUND_BYTES,
                "{window:?}: {round:?}"
            );
            moved
                .iter_mut()
                .zip(&round)
                .for_each(|(moved, len)| *moved += len);
        }
        assert_eq!(moved, sizes);
    }

    #[test]
    fn pieces_of_several_objects_lie_one_after_the_other() {
        let scatter = Routes {
            sizes: vec![vec![3, 0, 5], vec![], vec![]],
            direction: Direction::Scatter { root: 0 },
        };
        let objects = [b"abc".to_vec(), b"".to_vec(), b"vwxyz".to_vec()];
        let (first, second) = (0..2, 2..4);
        assert_eq!(&piece(&objects, &first)[..], b"abvw");
        assert_eq!(&piece(&objects, &second)[..], b"cxy");
        assert_eq!(
            [0, 1, 2].map(|to| scatter.range(0, to, &second)),
            [0..1, 1..1, 1..3]
        );
        assert_eq!(scatter.range(1, 2, &first), 0..0);
    }

    #[test]
    fn a_size_that_no_object_may_have_is_refused_and_the_rank_is_named() {
        let attachments = [1, u64::MAX].map(|size| Attachment {
            numbers: vec![size],
            payload: &[],
        });
        let error = Routes::new(&attachments, &[0, 7], "gather_object", Direction::AllGather)
            .map(|_| ())
            .unwrap_err();
        assert!(
            error
                .to_string()
                .contains(&format!("rank 7 has {} bytes", u64::MAX)),
            "{error}"
        );
    }
}
