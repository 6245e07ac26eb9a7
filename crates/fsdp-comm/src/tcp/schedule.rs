//! The schedule of a vote in which ballots travel through other ranks: Bruck's all-gather.
//!
//! At first a rank holds its own ballot only. In step `k` it sends to the rank `2^k` places before
//! it, and receives from the rank `2^k` places after it. What it receives are the ballots, merged
//! into one, and the attachments of the ranks that follow those of which it holds them already. So
//! their number doubles with each step, and after `log2(ranks)` steps, rounded up, each rank has
//! those of all.
//!
//! Places are ranks of the group. The first rank follows the last.

use std::collections::BTreeSet;
use std::iter;

/// The place of one rank in the schedule of its group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Schedule {
    /// The number of ranks.
    pub(super) ranks: usize,
    /// The rank whose schedule this is.
    pub(super) rank: usize,
}

/// One step of a rank. It sends the ballots of as many ranks as it receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    /// The rank that this one sends to.
    pub(super) receiver: usize,
    /// The rank that this one receives from.
    pub(super) sender: usize,
    /// The number of ranks whose ballots are sent, and of those whose ballots are received. The
    /// first of them are this rank and `sender`; the others follow in the order of ranks.
    pub(super) count: usize,
}

impl Schedule {
    pub(super) fn new(ranks: usize, rank: usize) -> Self {
        Schedule { ranks, rank }
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
                // The last step brings only the ballots that are left.
                count: distance.min(ranks - distance),
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

    /// Returns `rank_count` ranks in order, beginning with `first_rank`. The first rank of the
    /// group follows the last.
    pub(super) fn consecutive_ranks(
        self,
        first_rank: usize,
        rank_count: usize,
    ) -> impl Iterator<Item = usize> + Clone {
        (first_rank..first_rank + rank_count).map(move |rank| rank % self.ranks)
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
                        (other.sender, other.count),
                        (rank, step.count),
                        "{rank} of {ranks}"
                    );
                }
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
    fn every_rank_gets_every_attachment_once() {
        for ranks in SIZES.into_iter().chain(6..80) {
            let all = steps(ranks);
            // For each rank, how often it has got each attachment.
            let mut got: Vec<Vec<u8>> = (0..ranks)
                .map(|rank| (0..ranks).map(|of| u8::from(of == rank)).collect())
                .collect();
            for number in 0..all[0].len() {
                let before = got.clone();
                for (rank, own) in all.iter().enumerate() {
                    let Step {
                        sender: from,
                        count: len,
                        ..
                    } = own[number];
                    for of in Schedule::new(ranks, rank).consecutive_ranks(from, len) {
                        assert_eq!(
                            before[from][of], 1,
                            "rank {from} of {ranks} does not have the attachment of {of} yet"
                        );
                        got[rank][of] += 1;
                    }
                }
            }
            assert!(got.iter().flatten().all(|&times| times == 1), "{ranks}");
        }
    }
}
