//! The schedule of an exchange in which records travel through other ranks: Bruck's all-gather.
//!
//! A rank holds its own record first. In step `k` it sends to the rank `2^k` places before it, and receives from the rank
//! `2^k` places after it. What it receives are the records that follow those that it holds already. So their number
//! doubles with each step, and after `log2(ranks)` steps, rounded up, each rank holds the records of all.
//!
//! Places are ranks of the group, and the first one follows the last.

use std::iter;

/// The place of one rank in the schedule of its group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Schedule {
    ranks: usize,
    rank: usize,
}

/// One step of a rank. It sends as many records as it receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    /// The rank that this one sends to.
    pub(super) to: usize,
    /// The rank that this one receives from.
    pub(super) from: usize,
    /// The number of records. Those sent begin with the record of this rank, and those received with the record of `from`.
    pub(super) len: usize,
}

impl Schedule {
    pub(super) fn new(ranks: usize, rank: usize) -> Self {
        Schedule { ranks, rank }
    }

    /// Returns the number of ranks.
    pub(super) fn ranks(self) -> usize {
        self.ranks
    }

    /// Returns the rank whose schedule this is.
    pub(super) fn rank(self) -> usize {
        self.rank
    }

    /// Returns the steps of this rank, in order.
    pub(super) fn steps(self) -> impl Iterator<Item = Step> {
        let Schedule { ranks, rank } = self;
        let distances = iter::successors(Some(1), |distance: &usize| distance.checked_mul(2));
        distances.take_while(move |&distance| distance < ranks).map(move |distance| Step {
            to: (rank + ranks - distance) % ranks,
            from: (rank + distance) % ranks,
            // The last step brings only the records that are left.
            len: distance.min(ranks - distance),
        })
    }

    /// Returns this many ranks, beginning with `first`.
    pub(super) fn block(self, first: usize, len: usize) -> impl Iterator<Item = usize> {
        (first..first + len).map(move |rank| rank % self.ranks)
    }

    /// Returns the rank to which another one sends its record before it sends it to anybody else.
    pub(super) fn keeper(self, rank: usize) -> usize {
        (rank + self.ranks - 1) % self.ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [usize; 13] = [1, 2, 3, 4, 5, 33, 64, 97, 100, 511, 1000, 1023, 1024];

    fn steps(ranks: usize) -> Vec<Vec<Step>> {
        (0..ranks).map(|rank| Schedule::new(ranks, rank).steps().collect()).collect()
    }

    #[test]
    fn a_rank_sends_as_many_messages_as_its_group_has_binary_digits() {
        for ranks in SIZES.into_iter().chain(1..200) {
            let digits = ranks.next_power_of_two().trailing_zeros() as usize;
            assert!(steps(ranks).iter().all(|steps| steps.len() == digits), "{ranks}");
        }
        assert_eq!(steps(1024)[7].len(), 10);
        assert_eq!(steps(1025)[7].len(), 11);
    }

    #[test]
    fn who_sends_to_a_rank_is_who_that_rank_receives_from() {
        for ranks in SIZES {
            let all = steps(ranks);
            for (rank, own) in all.iter().enumerate() {
                for (number, step) in own.iter().enumerate() {
                    assert_ne!(step.to, rank);
                    let other = all[step.to][number];
                    assert_eq!((other.from, other.len), (rank, step.len), "{rank} of {ranks}");
                }
                let first = own.first().map_or(rank, |step| step.to);
                assert_eq!(Schedule::new(ranks, 0).keeper(rank), first);
            }
        }
    }

    #[test]
    fn every_rank_gets_every_record_once() {
        for ranks in SIZES.into_iter().chain(6..80) {
            let all = steps(ranks);
            // For each rank, how often it has got each record.
            let mut got: Vec<Vec<u8>> =
                (0..ranks).map(|rank| (0..ranks).map(|of| u8::from(of == rank)).collect()).collect();
            for number in 0..all[0].len() {
                let before = got.clone();
                for (rank, own) in all.iter().enumerate() {
                    let Step { from, len, .. } = own[number];
                    for of in Schedule::new(ranks, rank).block(from, len) {
                        assert_eq!(before[from][of], 1, "rank {from} of {ranks} does not have the record of {of} yet");
                        got[rank][of] += 1;
                    }
                }
            }
            assert!(got.iter().flatten().all(|&times| times == 1), "{ranks}");
        }
    }
}
