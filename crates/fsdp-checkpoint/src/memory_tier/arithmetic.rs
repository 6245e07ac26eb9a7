//! The arithmetic of a memory tier, without I/O: whose copy a rank keeps, which steps are whole,
//! which parts are transferred.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use fsdp_comm::MAX_WORLD_SIZE;
use fsdp_formats::Location;
use serde::{Deserialize, Serialize};

use crate::catalog::{RunPosition, step_name, step_of};

/// A save to the memory tier. The one that the run continues from is the greatest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct MemoryStep {
    /// The number of a start of the job, which is larger than the numbers of all starts before it.
    /// A run that goes back to an older step gets a new number too. Parts of different starts are
    /// never joined, because the same step may have another result after a restart.
    pub(super) start_number: u64,
    /// The branch of the run that it is on, and the steps done when it was saved.
    pub(super) position: RunPosition,
    /// The number of ranks, each of which has saved a part.
    pub(super) ranks: usize,
}

/// Returns the name of the directory of a step whose parts were joined: that of a checkpoint of the
/// run, and the branch if it is not the first.
pub(super) fn joined_name(position: RunPosition) -> String {
    let name = step_name(position.step);
    match position.branch {
        0 => name,
        branch => format!("{name}-branch-{branch}"),
    }
}

/// Parses a name that [`joined_name`] has made; returns `None` for any other name.
pub(super) fn position_of_joined(name: &str) -> Option<RunPosition> {
    let (name_of_step, branch) = match name.split_once("-branch-") {
        Some((name_of_step, branch)) => (name_of_step, branch.parse().ok()?),
        None => (name, 0),
    };
    let position = RunPosition {
        branch,
        step: step_of(name_of_step)?,
    };
    (joined_name(position) == name).then_some(position)
}

/// One rank's part of a save. Its `Display` text is the name of its directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Part {
    /// The save.
    pub(super) memory_step: MemoryStep,
    /// The rank that saved it.
    pub(super) rank: usize,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Part {
            memory_step:
                MemoryStep {
                    start_number,
                    position: RunPosition { branch, step },
                    ranks,
                },
            rank,
        } = self;
        write!(
            f,
            "step-{step:08}-{start_number:016x}-branch-{branch}-rank-{rank}-of-{ranks}"
        )
    }
}

impl Part {
    /// Parses the name of a part's directory; returns `None` for any other name.
    pub(super) fn from_name(name: &str) -> Option<Self> {
        let words: Vec<&str> = name.split('-').collect();
        let &[
            "step",
            step,
            start_number,
            "branch",
            branch,
            "rank",
            rank,
            "of",
            ranks,
        ] = words.as_slice()
        else {
            return None;
        };
        let part = Part {
            memory_step: MemoryStep {
                start_number: u64::from_str_radix(start_number, 16).ok()?,
                position: RunPosition {
                    branch: branch.parse().ok()?,
                    step: step.parse().ok()?,
                },
                ranks: ranks.parse().ok()?,
            },
            rank: rank.parse().ok()?,
        };
        // Only the exact spelling that `Display` writes is accepted, so one part has one name.
        let is_exact = part.to_string() == name;
        let ranks = part.memory_step.ranks;
        (is_exact && part.rank < ranks && ranks <= MAX_WORLD_SIZE).then_some(part)
    }
}

/// A copy of a part, and its location.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct PartCopy {
    pub(super) part: Part,
    /// The lowest rank of the host that has it.
    pub(super) host: usize,
    /// The name of the directory that holds it: the directory of the rank that saved it, or that of
    /// the rank's buddy.
    pub(super) holder: String,
}

impl PartCopy {
    /// Returns the path of the copy in the run's directory on its host.
    pub(super) fn path(&self, root: &Location) -> Location {
        root.join(&self.holder).join(self.part.to_string())
    }
}

/// A part to be sent from one rank to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Transfer {
    pub(super) part: Part,
    pub(super) sender: usize,
    pub(super) receiver: usize,
}

/// Returns the buddy of each rank: the rank that keeps a copy of its part. `hosts` has the lowest
/// rank of each rank's host.
///
/// A rank and its buddy are on different hosts if there are several. Every rank is the buddy of one
/// rank, unless more than half of all ranks are on one host: then the other ranks take turns as the
/// buddies of that host's ranks. A single rank is its own buddy.
pub(super) fn buddies(hosts: &[usize]) -> Vec<usize> {
    let rank_count = hosts.len();
    let largest_host = hosts
        .iter()
        .copied()
        .max_by_key(|&host| rank_count_on(host, hosts))
        .expect("a group has ranks");
    let largest_count = rank_count_on(largest_host, hosts);
    // The ranks form a ring, in which the ranks of a host are neighbours. Those of the largest host
    // come first.
    let mut ring: Vec<usize> = (0..rank_count).collect();
    ring.sort_by_key(|&rank| (hosts[rank] != largest_host, hosts[rank]));
    let count_elsewhere = rank_count - largest_count;
    let mut buddies = vec![0; rank_count];
    for (ring_position, &rank) in ring.iter().enumerate() {
        // The distance is the number of ranks of the largest host, so that the buddy is beyond the
        // rank's own host.
        let buddy = match count_elsewhere {
            0 => ring_position + 1,
            _ if ring_position < largest_count => largest_count + ring_position % count_elsewhere,
            _ => ring_position + largest_count,
        };
        buddies[rank] = ring[buddy % rank_count];
    }
    buddies
}

/// Returns the number of ranks on a host.
fn rank_count_on(host: usize, hosts: &[usize]) -> usize {
    hosts.iter().filter(|other| **other == host).count()
}

/// The most ranks that a message names.
const MAX_LISTED: usize = 20;

/// Returns the steps of which there is at least one part, the newest first, each with the first few
/// ranks whose parts are missing.
pub(super) fn steps_with_missing_ranks(copies: &[PartCopy]) -> Vec<(MemoryStep, Vec<usize>)> {
    let mut ranks_by_step: BTreeMap<MemoryStep, BTreeSet<usize>> = BTreeMap::new();
    for copy in copies {
        ranks_by_step
            .entry(copy.part.memory_step)
            .or_default()
            .insert(copy.part.rank);
    }
    // The map is sorted, so the newest is its last entry.
    ranks_by_step
        .into_iter()
        .rev()
        .map(|(step, ranks)| (step, missing_ranks(step, &ranks)))
        .collect()
}

/// Returns the first few ranks of a save that are not among `present`. The number of ranks comes
/// from a file name, and may be absurdly large.
pub(super) fn missing_ranks(step: MemoryStep, present: &BTreeSet<usize>) -> Vec<usize> {
    (0..step.ranks)
        .filter(|rank| !present.contains(rank))
        .take(MAX_LISTED)
        .collect()
}

/// Returns the newest step that has all parts; `None` if there is none.
pub(super) fn newest_whole(copies: &[PartCopy]) -> Option<MemoryStep> {
    steps_with_missing_ranks(copies)
        .into_iter()
        .find(|(_, missing)| missing.is_empty())
        .map(|(step, _)| step)
}

/// Returns the newest step that has as many copies of each part as a save leaves: two, or one of a
/// single rank. Where there is none, because a host was lost, returns the newest step that has all
/// parts.
pub(super) fn newest_complete(copies: &[PartCopy]) -> Option<MemoryStep> {
    let mut counts: BTreeMap<Part, usize> = BTreeMap::new();
    for copy in copies {
        *counts.entry(copy.part).or_default() += 1;
    }
    let complete: Vec<PartCopy> = copies
        .iter()
        .filter(|copy| counts[&copy.part] >= copy.part.memory_step.ranks.min(2))
        .cloned()
        .collect();
    newest_whole(&complete).or_else(|| newest_whole(copies))
}

/// Returns the copies that a rank checks. The ranks of a host take turns over the copies on that
/// host.
pub(super) fn copies_to_check<'c>(
    copies: &'c [PartCopy],
    hosts: &[usize],
    rank: usize,
) -> Vec<&'c PartCopy> {
    let host_ranks: Vec<usize> = (0..hosts.len())
        .filter(|&other| hosts[other] == hosts[rank])
        .collect();
    let host_copies = copies.iter().filter(|copy| copy.host == hosts[rank]);
    host_copies
        .enumerate()
        .filter(|(index, _)| host_ranks[index % host_ranks.len()] == rank)
        .map(|(_, copy)| copy)
        .collect()
}

/// Returns the transfers that bring every part to the lowest rank of every host that lacks it.
pub(super) fn needed_transfers(copies: &[PartCopy], hosts: &[usize]) -> Vec<Transfer> {
    let mut holders: BTreeMap<Part, BTreeSet<usize>> = BTreeMap::new();
    for copy in copies {
        holders.entry(copy.part).or_default().insert(copy.host);
    }
    let all_hosts: BTreeSet<usize> = hosts.iter().copied().collect();
    let mut transfers = Vec::new();
    for (part, holders) in holders {
        // The hosts that have the part take turns as senders.
        for (&receiver, &sender) in all_hosts.difference(&holders).zip(holders.iter().cycle()) {
            transfers.push(Transfer {
                part,
                sender,
                receiver,
            });
        }
    }
    transfers
}

/// Groups transfers into rounds. In a round each rank sends at most one part and receives at most
/// one.
pub(super) fn group_into_rounds(transfers: Vec<Transfer>) -> Vec<Vec<Transfer>> {
    let mut rounds: Vec<Vec<Transfer>> = Vec::new();
    for transfer in transfers {
        match rounds.iter_mut().find(|round| has_room(round, transfer)) {
            Some(round) => round.push(transfer),
            None => rounds.push(vec![transfer]),
        }
    }
    rounds
}

/// Returns `true` if neither rank of a transfer sends or receives in the same way in a round.
fn has_room(round: &[Transfer], transfer: Transfer) -> bool {
    round
        .iter()
        .all(|other| other.sender != transfer.sender && other.receiver != transfer.receiver)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn memory_step(step: u64, ranks: usize) -> MemoryStep {
        MemoryStep {
            position: RunPosition { branch: 0, step },
            ranks,
            start_number: 7,
        }
    }

    fn copy(memory_step: MemoryStep, rank: usize, host: usize) -> PartCopy {
        PartCopy {
            part: Part { memory_step, rank },
            host,
            holder: format!("rank-{rank}"),
        }
    }

    #[test]
    fn a_name_says_all_of_a_part_and_nothing_else_is_one() {
        let part = Part {
            memory_step: MemoryStep {
                position: RunPosition {
                    branch: 5,
                    step: 20,
                },
                ranks: 4,
                start_number: 0xabc,
            },
            rank: 3,
        };
        assert_eq!(
            part.to_string(),
            "step-00000020-0000000000000abc-branch-5-rank-3-of-4"
        );
        assert_eq!(Part::from_name(&part.to_string()), Some(part));
        for name in [
            "step-00000020",
            "step-20-0000000000000abc-branch-5-rank-3-of-4",
            "step-00000020-abc-branch-5-rank-3-of-4",
            "step-00000020-0000000000000abc-branch-05-rank-3-of-4",
            "step-00000020-0000000000000abc-rank-3-of-4",
            "step-00000020-0000000000000abc-branch-5-rank-4-of-4",
            "step-00000020-0000000000000abc-branch-5-rank-3-of-4-x",
            "step-00000020-0000000000000abc-branch-5-rank-3-of-18446744073709551615",
            ".step-00000020-0000000000000abc-branch-5-rank-3-of-4.tmp-0000000000000000",
        ] {
            assert_eq!(Part::from_name(name), None, "{name}");
        }
    }

    #[test]
    fn the_name_of_a_joined_step_has_its_position() {
        for (branch, name) in [(0, "step-00000020"), (3, "step-00000020-branch-3")] {
            let position = RunPosition { branch, step: 20 };
            assert_eq!(joined_name(position), name);
            assert_eq!(position_of_joined(name), Some(position));
        }
        for name in [
            "step-20",
            "step-00000020-branch-0",
            "step-00000020-branch-x",
            "rank-1",
        ] {
            assert_eq!(position_of_joined(name), None, "{name}");
        }
    }

    #[test]
    fn a_message_names_few_of_many_missing_ranks() {
        let name = format!("step-00000001-0000000000000007-branch-0-rank-0-of-{MAX_WORLD_SIZE}");
        let part = Part::from_name(&name).unwrap();
        assert!(
            steps_with_missing_ranks(&[copy(part.memory_step, part.rank, 0)])[0]
                .1
                .len()
                <= 20
        );
    }

    #[test]
    fn a_buddy_is_on_another_host_or_else_a_neighbour() {
        assert_eq!(buddies(&[0]), [0]);
        assert_eq!(buddies(&[0, 0, 0]), [1, 2, 0]);
        assert_eq!(buddies(&[0, 0, 2, 2]), [2, 3, 0, 1]);
        // Ranks that are dealt out to hosts in turn.
        assert_eq!(buddies(&[0, 1, 0, 1]), [1, 0, 3, 2]);
        // Most ranks are on one host, so the other ranks keep several parts.
        assert_eq!(buddies(&[0, 0, 2]), [2, 2, 1]);
    }

    proptest! {
        #[test]
        fn no_host_and_no_rank_has_both_copies(sizes in prop::collection::vec(1usize..5, 1..6)) {
            let mut hosts = Vec::new();
            for size in &sizes {
                hosts.extend(std::iter::repeat_n(hosts.len(), *size));
            }
            let buddies = buddies(&hosts);
            let largest = sizes.iter().copied().max().unwrap_or(0);
            for (rank, &buddy) in buddies.iter().enumerate() {
                prop_assert!(hosts.len() == 1 || buddy != rank);
                prop_assert!(sizes.len() == 1 || hosts[buddy] != hosts[rank], "{hosts:?}: {buddies:?}");
                // No rank keeps more parts than it must.
                let kept = buddies.iter().filter(|other| **other == rank).count();
                let most = if sizes.len() == 1 { 1 } else { largest.div_ceil(hosts.len() - largest).max(1) };
                prop_assert!(kept <= most, "{hosts:?}: {buddies:?}");
            }
        }

        #[test]
        fn transfers_bring_each_part_to_each_host_once(
            hosts in prop::collection::vec(0usize..4, 1..8),
            places in prop::collection::vec(0usize..8, 1..10),
        ) {
            // The lowest rank of a host stands for it.
            let lowest = |host| hosts.iter().position(|other| *other == host).unwrap();
            let hosts: Vec<usize> = hosts.iter().map(|&host| lowest(host)).collect();
            let step = memory_step(1, places.len());
            let copies: Vec<PartCopy> =
                places
                    .iter()
                    .enumerate()
                    .map(|(rank, place)| copy(step, rank, hosts[place % hosts.len()]))
                    .collect();
            let (mut present, mut sent_count) = (BTreeSet::new(), 0);
            present.extend(copies.iter().map(|copy| (copy.part, copy.host)));
            let initial = present.clone();
            for round in group_into_rounds(needed_transfers(&copies, &hosts)) {
                let (mut senders, mut receivers) = (BTreeSet::new(), BTreeSet::new());
                for transfer in round {
                    prop_assert!(senders.insert(transfer.sender));
                    prop_assert!(receivers.insert(transfer.receiver));
                    prop_assert!(initial.contains(&(transfer.part, transfer.sender)));
                    prop_assert!(present.insert((transfer.part, transfer.receiver)));
                    sent_count += 1;
                }
            }
            let all: BTreeSet<usize> = hosts.iter().copied().collect();
            prop_assert_eq!(present.len(), places.len() * all.len());
            prop_assert_eq!(sent_count, present.len() - initial.len());
        }
    }

    #[test]
    fn a_step_is_whole_if_all_parts_of_one_save_are_there() {
        let (new, old, other) = (
            memory_step(30, 2),
            memory_step(20, 2),
            MemoryStep {
                start_number: 8,
                ..memory_step(30, 2)
            },
        );
        // Rank 1 had not saved step 30 yet, and what another start of the job had of that step does
        // not count.
        let copies = [
            copy(new, 0, 0),
            copy(new, 0, 0),
            copy(other, 1, 0),
            copy(old, 0, 0),
            copy(old, 1, 0),
        ];
        assert_eq!(newest_whole(&copies), Some(old));
        let found: Vec<_> = steps_with_missing_ranks(&copies)
            .into_iter()
            .map(|(step, missing)| (step.position.step, missing))
            .collect();
        assert_eq!(found, [(30, vec![0]), (30, vec![1]), (20, vec![])]);
        assert_eq!(newest_whole(&copies[..4]), None);
        // The same step of another number of ranks is another save.
        assert_eq!(
            newest_whole(&[copy(memory_step(5, 1), 0, 0), copy(memory_step(5, 2), 0, 0)]),
            Some(memory_step(5, 1))
        );
    }

    #[test]
    fn the_ranks_of_a_host_share_the_checking() {
        let hosts = [0, 0, 2];
        let copies: Vec<PartCopy> = (0..5)
            .map(|rank| copy(memory_step(1, 5), rank, if rank == 4 { 2 } else { 0 }))
            .collect();
        let shares: Vec<Vec<usize>> = (0..3)
            .map(|rank| {
                copies_to_check(&copies, &hosts, rank)
                    .iter()
                    .map(|copy| copy.part.rank)
                    .collect()
            })
            .collect();
        assert_eq!(shares, [vec![0, 2], vec![1, 3], vec![4]]);
    }
}
