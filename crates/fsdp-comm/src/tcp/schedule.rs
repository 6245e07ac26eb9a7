//! The schedule of an exchange in which records travel through other ranks: Bruck's all-gather.
//!
//! At first a rank holds its own record only. In step `k` it sends to the rank `2^k` places before
//! it, and receives from the rank `2^k` places after it. What it receives are the records that
//! follow those that it holds already. So their number doubles with each step, and after
//! `log2(ranks)` steps, rounded up, each rank holds the records of all.
//!
//! Places are ranks of the group. The first rank follows the last.

use std::collections::BTreeSet;
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
    pub(super) receiver: usize,
    /// The rank that this one receives from.
    pub(super) sender: usize,
    /// The number of records that are sent, and that are received. Those sent begin with the record
    /// of this rank, those received with the record of `sender`; the others follow in the order of
    /// ranks.
    pub(super) record_count: usize,
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
        distances
            .take_while(move |&distance| distance < ranks)
            .map(move |distance| Step {
                receiver: (rank + ranks - distance) % ranks,
                sender: (rank + distance) % ranks,
                // The last step brings only the records that are left.
                record_count: distance.min(ranks - distance),
            })
    }

    /// Returns the ranks that this one sends to or receives from, in rank order. News that each
    /// rank forwards to its neighbours reaches all ranks.
    pub(super) fn neighbours(self) -> Vec<usize> {
        let neighbours: BTreeSet<usize> = self
            .steps()
            .flat_map(|step| [step.receiver, step.sender])
            .collect();
        neighbours.into_iter().collect()
    }

    /// Returns two ranks that this one receives from, and that are on the way of a record from
    /// another rank, `origin`, to this one. One is as far away as the longest step that does not
    /// pass `origin`. The other is as far away as the shortest of the steps that together lead to
    /// `origin`. Both may be the same.
    pub(super) fn relays_from(self, origin: usize) -> [usize; 2] {
        let distance = (origin + self.ranks - self.rank) % self.ranks;
        let longest_distance = 1 << distance.ilog2();
        let shortest_distance = distance & distance.wrapping_neg();
        [longest_distance, shortest_distance].map(|step| (self.rank + step) % self.ranks)
    }

    /// Returns `rank_count` ranks in order, beginning with `first_rank`. The first rank of the
    /// group follows the last.
    pub(super) fn consecutive_ranks(
        self,
        first_rank: usize,
        rank_count: usize,
    ) -> impl Iterator<Item = usize> {
        (first_rank..first_rank + rank_count).map(move |rank| rank % self.ranks)
    }

    /// Returns the rank that gets the record of a rank before any other does.
    pub(super) fn first_receiver(self, rank: usize) -> usize {
        (rank + self.ranks - 1) % self.ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [usize; 13] = [1, 2, 3, 4, 5, 33, 64, 97, 100, 511, 1000, 1023, 1024];

    fn steps(ranks: usize) -> Vec<Vec<Step>> {
        (0..ranks)
            .map(|rank| Schedule::new(ranks, rank).steps().collect())
            .collect()
    }

    #[test]
    fn a_rank_sends_as_many_messages_as_its_group_has_binary_digits() {
        for ranks in SIZES.into_iter().chain(1..200) {
            let digits = ranks.next_power_of_two().trailing_zeros() as usize;
            assert!(
                steps(ranks).iter().all(|steps| steps.len() == digits),
                "{ranks}"
            );
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
                    assert_ne!(step.receiver, rank);
                    let other = all[step.receiver][number];
                    assert_eq!(
                        (other.sender, other.record_count),
                        (rank, step.record_count),
                        "{rank} of {ranks}"
                    );
                }
                let first = own.first().map_or(rank, |step| step.receiver);
                assert_eq!(Schedule::new(ranks, 0).first_receiver(rank), first);
            }
        }
    }

    #[test]
    fn neighbours_are_few_and_each_others() {
        for ranks in SIZES {
            let all: Vec<Vec<usize>> = (0..ranks)
                .map(|rank| Schedule::new(ranks, rank).neighbours())
                .collect();
            for (rank, neighbours) in all.iter().enumerate() {
                assert!(
                    neighbours.len() <= 2 * ranks.next_power_of_two().trailing_zeros() as usize,
                    "{ranks}"
                );
                assert!(
                    neighbours
                        .iter()
                        .all(|&other| other != rank && all[other].contains(&rank)),
                    "{ranks}"
                );
            }
        }
        assert_eq!(Schedule::new(1024, 0).neighbours().len(), 19);
        assert_eq!(Schedule::new(5, 3).neighbours(), [0, 1, 2, 4]);
    }

    #[test]
    fn every_rank_is_reached_over_either_neighbour_on_the_way() {
        for ranks in SIZES.into_iter().filter(|&ranks| ranks > 1) {
            for (rank, to) in [
                (0, 1),
                (0, ranks - 1),
                (ranks / 2, ranks / 3),
                (ranks - 1, 0),
            ] {
                for way in [0, 1] {
                    let mut at = rank;
                    let mut steps = 0;
                    while at != to {
                        let next = Schedule::new(ranks, at).relays_from(to)[way];
                        assert!(
                            Schedule::new(ranks, at)
                                .steps()
                                .any(|step| step.sender == next),
                            "{ranks}"
                        );
                        at = next;
                        steps += 1;
                    }
                    assert!(steps <= ranks.ilog2() + 1, "{steps} steps in {ranks}");
                }
            }
        }
    }

    #[test]
    fn every_rank_gets_every_record_once() {
        for ranks in SIZES.into_iter().chain(6..80) {
            let all = steps(ranks);
            // For each rank, how often it has got each record.
            let mut got: Vec<Vec<u8>> = (0..ranks)
                .map(|rank| (0..ranks).map(|of| u8::from(of == rank)).collect())
                .collect();
            for number in 0..all[0].len() {
                let before = got.clone();
                for (rank, own) in all.iter().enumerate() {
                    let Step {
                        sender: from,
                        record_count: len,
                        ..
                    } = own[number];
                    for of in Schedule::new(ranks, rank).consecutive_ranks(from, len) {
                        assert_eq!(
                            before[from][of], 1,
                            "rank {from} of {ranks} does not have the record of {of} yet"
                        );
                        got[rank][of] += 1;
                    }
                }
            }
            assert!(got.iter().flatten().all(|&times| times == 1), "{ranks}");
        }
    }
}
