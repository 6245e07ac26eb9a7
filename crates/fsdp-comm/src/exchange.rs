//! The exchange of encoded objects between ranks, in pieces.
//!
//! All ranks first learn the sizes of all objects. If no rank sends or receives much, the objects
//! move in that same round. Otherwise every rank first reserves the memory for what it receives,
//! and then the objects move in pieces, one round for each, so that no round moves more than
//! [`ROUND_BYTES`] to or from a rank.

use std::borrow::Cow;
use std::ops::Range;

use crate::backend::{Destination, Pattern, Plan};
use crate::buffer::reserve;
use crate::error::CommError;
use crate::group::{ProcessGroup, Turn};
use crate::record::{Call, Fault, Record};
use crate::wire;

/// The largest object, in bytes, that a rank may send. All objects together may be larger: what a
/// rank receives in one operation is limited only by its memory.
pub const MAX_OBJECT_BYTES: usize = wire::MAX_BYTES;

/// The largest number of bytes that a rank sends or receives in one round.
const ROUND_BYTES: usize = 16 << 20;

/// The smallest piece of an object, even if that makes a round larger than [`ROUND_BYTES`] because
/// of many ranks.
const MIN_PIECE_BYTES: usize = 4096;

impl ProcessGroup {
    /// Moves encoded objects in an operation of their own. If the rank has no objects to send but
    /// an error, the operation fails on all ranks. See [`Turn::exchange_objects`].
    pub(crate) fn exchange_objects(
        &self,
        call: Call,
        pattern: Pattern,
        sent: Result<Vec<Vec<u8>>, CommError>,
        which: impl Fn(usize, usize) -> Option<usize>,
    ) -> Result<Vec<Vec<u8>>, CommError> {
        let (sent, arguments) = match sent {
            Ok(sent) => (sent, Ok(())),
            Err(error) => (Vec::new(), Err(error)),
        };
        self.begin(call, arguments)?
            .exchange_objects(None, pattern, &sent, which)
    }
}

impl Turn<'_> {
    /// Moves encoded objects. `sent` are the objects of this rank, and `which(from, to)` returns
    /// the index of the object of rank `from` that rank `to` gets. Returns the object from each
    /// rank, which is empty if there is none.
    ///
    /// # Errors
    /// The `fault` of any rank, on all of them; a rank without memory for its objects.
    pub(crate) fn exchange_objects(
        &mut self,
        fault: Option<Fault>,
        pattern: Pattern,
        sent: &[Vec<u8>],
        which: impl Fn(usize, usize) -> Option<usize>,
    ) -> Result<Vec<Vec<u8>>, CommError> {
        let group = self.group();
        let rank = group.rank();
        let name = self.call.name().to_owned();
        let sizes: Vec<u64> = sent.iter().map(|bytes| bytes.len() as u64).collect();
        let total = sizes
            .iter()
            .fold(0u64, |sum, &size| sum.saturating_add(size));
        let mut received: Vec<Vec<u8>> = vec![Vec::new(); group.world_size()];

        // All ranks learn all sizes, and get the objects too if they fit in this round. A rank
        // whose own objects do not fit knows so already, and publishes nothing.
        let first = if total <= ROUND_BYTES as u64 {
            piece(sent, &WHOLE)
        } else {
            Cow::Borrowed(&[][..])
        };
        let mut routes = None;
        self.round(fault, sizes, &first, |records| {
            let found = Routes::new(records, group.global_ranks(), &name, &which)?;
            let fits = found.longest_round() <= ROUND_BYTES;
            if fits {
                // Others may be reading the bytes of this rank already, so they must be told if it
                // cannot continue.
                found
                    .reserve(rank, group.global_ranks(), &mut received)
                    .map_err(|message| CommError::Aborted {
                        rank: group.global_ranks()[rank],
                        message,
                    })?;
            }
            let plan = fits.then(|| found.plan(rank, pattern, &WHOLE, &mut received));
            routes = Some(found);
            Ok(plan)
        })?;
        let Some(routes) = routes.filter(|routes| routes.longest_round() > ROUND_BYTES) else {
            return Ok(received);
        };

        // No bytes have moved yet. A rank without memory for its objects says so in the next round,
        // which fails on all.
        let mut no_memory = routes
            .reserve(rank, group.global_ranks(), &mut received)
            .err()
            .map(|error| Fault::new(&error));
        for window in routes.windows() {
            let piece = piece(sent, &window);
            self.round(no_memory.take(), Vec::new(), &piece, |_| {
                Ok(Some(routes.plan(rank, pattern, &window, &mut received)))
            })?;
        }
        Ok(received)
    }
}

/// A range of bytes of every object that contains all of them.
const WHOLE: Range<usize> = 0..MAX_OBJECT_BYTES;

/// Returns the bytes of all objects in this window, one after the other.
fn piece<'a>(objects: &'a [Vec<u8>], window: &Range<usize>) -> Cow<'a, [u8]> {
    match objects {
        [only] => Cow::Borrowed(&only[cut(only.len(), window)]),
        objects => Cow::Owned(
            objects
                .iter()
                .flat_map(|bytes| &bytes[cut(bytes.len(), window)])
                .copied()
                .collect(),
        ),
    }
}

/// Returns the part of an object of `len` bytes that is in this window.
fn cut(len: usize, window: &Range<usize>) -> Range<usize> {
    len.min(window.start)..len.min(window.end)
}

/// The sizes of all objects, and the ranks that they go to. The same on all ranks.
struct Routes<W> {
    /// For each rank, the sizes of the objects that it sends.
    sizes: Vec<Vec<usize>>,
    which: W,
}

impl<W: Fn(usize, usize) -> Option<usize>> Routes<W> {
    /// Reads the sizes from the records of all ranks.
    fn new(
        records: &[Record<'_>],
        ranks: &[usize],
        operation: &str,
        which: W,
    ) -> Result<Self, CommError> {
        let mut sizes = Vec::with_capacity(records.len());
        for (record, rank) in records.iter().zip(ranks) {
            let own = &record.header.own;
            if let Some(size) = own.iter().find(|&&size| size > MAX_OBJECT_BYTES as u64) {
                let message = format!(
                    "an object of rank {rank} has {size} bytes, more than {MAX_OBJECT_BYTES}"
                );
                return Err(CommError::InvalidArgument {
                    operation: operation.to_owned(),
                    message,
                });
            }
            sizes.push(own.iter().map(|&size| size as usize).collect());
        }
        Ok(Routes { sizes, which })
    }

    /// Returns the index of the object that a rank gets from another.
    fn index(&self, from: usize, to: usize) -> Option<usize> {
        (self.which)(from, to).filter(|&index| index < self.sizes[from].len())
    }

    /// Returns the size of the object that a rank gets from another.
    fn size(&self, from: usize, to: usize) -> usize {
        self.index(from, to)
            .map_or(0, |index| self.sizes[from][index])
    }

    /// Returns the largest number of bytes that any rank would send or receive if all objects moved
    /// in one round.
    fn longest_round(&self) -> usize {
        let ranks = 0..self.sizes.len();
        let sent = self.sizes.iter().map(|sizes| {
            sizes
                .iter()
                .fold(0usize, |sum, &size| sum.saturating_add(size))
        });
        let received = ranks.clone().map(|to| {
            ranks
                .clone()
                .map(|from| self.size(from, to))
                .fold(0usize, |sum, size| sum.saturating_add(size))
        });
        sent.chain(received).max().unwrap_or(0)
    }

    /// Returns the window of each round if objects move in pieces.
    fn windows(&self) -> impl Iterator<Item = Range<usize>> + use<W> {
        let longest = self.sizes.iter().flatten().max().copied().unwrap_or(0);
        let piece = (ROUND_BYTES / self.sizes.len().max(1)).max(MIN_PIECE_BYTES);
        (0..longest)
            .step_by(piece)
            .map(move |start| start..start + piece)
    }

    /// Reserves memory for the objects that a rank receives.
    fn reserve(
        &self,
        rank: usize,
        ranks: &[usize],
        received: &mut [Vec<u8>],
    ) -> Result<(), String> {
        for (from, bytes) in received.iter_mut().enumerate() {
            reserve(
                bytes,
                self.size(from, rank),
                &format!("an object of rank {}", ranks[from]),
            )?;
        }
        Ok(())
    }

    /// Returns the range of the object from a rank to another in the bytes that [`piece`] returns
    /// for a window.
    fn range(&self, from: usize, to: usize, window: &Range<usize>) -> Range<usize> {
        let Some(index) = self.index(from, to) else {
            return 0..0;
        };
        let sizes = &self.sizes[from];
        let start = sizes[..index]
            .iter()
            .map(|&size| cut(size, window).len())
            .sum();
        start..start + cut(sizes[index], window).len()
    }

    /// Plans a rank's part of the round that moves this window of all objects.
    fn plan<'p>(
        &self,
        rank: usize,
        pattern: Pattern,
        window: &Range<usize>,
        received: &'p mut [Vec<u8>],
    ) -> Plan<'p> {
        let ranks = 0..self.sizes.len();
        let from: Vec<Range<usize>> = ranks
            .clone()
            .map(|from| self.range(from, rank, window))
            .collect();
        let destinations = received.iter_mut().zip(&from).map(|(bytes, range)| {
            let old = bytes.len();
            bytes.resize(old + range.len(), 0);
            vec![&mut bytes[old..]]
        });
        Plan {
            pattern,
            longest: self
                .sizes
                .iter()
                .flatten()
                .map(|&size| cut(size, window).len())
                .max()
                .unwrap_or(0),
            to: ranks.map(|to| self.range(rank, to, window)).collect(),
            destination: Destination::Copy(destinations.collect()),
            from,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Header, Operation};

    fn gather(sizes: Vec<Vec<usize>>) -> Routes<impl Fn(usize, usize) -> Option<usize>> {
        Routes {
            sizes,
            which: |_, to| (to == 0).then_some(0),
        }
    }

    #[test]
    fn together_objects_may_be_larger_than_any_one_of_them_while_no_round_is() {
        let sizes = [MAX_OBJECT_BYTES, 700 << 20, 0, 5, MAX_OBJECT_BYTES];
        let routes = gather(sizes.iter().map(|&size| vec![size]).collect());
        assert!(routes.longest_round() > MAX_OBJECT_BYTES);
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
            which: |from, to| (from == 0).then_some(to),
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
        let record = |own: Vec<u64>| {
            let header = Header {
                call: Call::new(Operation::GatherObject),
                fault: None,
                own,
                inline: true,
            };
            Record {
                header: std::borrow::Cow::Owned(header),
                payload: &[],
            }
        };
        let records = [record(vec![1]), record(vec![u64::MAX])];
        let error = Routes::new(&records, &[0, 7], "gather_object", |_, _| Some(0))
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
