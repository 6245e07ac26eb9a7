//! A round whose records travel through other ranks: those that have reached this rank, and its
//! part in sending them on.

use std::time::Instant;

use bytes::{Buf, Bytes};

use super::frame::CHUNK_BYTES;
use super::schedule::{Schedule, Step};

/// The bytes in front of each record in a bundle: the rank of the group whose record it is, and its
/// length.
const PREFIX_BYTES: usize = 8;

/// The records of a round, by rank of the group, and this rank's part in sending them on.
///
/// Records may come before this rank enters the round.
#[derive(Debug, Default)]
pub(super) struct RelayedRound {
    /// By rank of the group. It may be shorter than the group.
    peers: Vec<PeerRecord>,
    /// The time at which this rank entered the round.
    pub(super) entered: Option<Instant>,
    /// The number of records that this rank holds without a gap, from its own on in the order of
    /// ranks. It sends these.
    run_len: usize,
    /// The number of steps in which this rank has sent.
    steps_sent: usize,
    /// The time at which this rank had waited so long that it began to ask; `None` before.
    pub(super) waits_long_since: Option<Instant>,
    /// `true` if other ranks have asked this rank for records that it does not have.
    pub(super) others_ask: bool,
    /// `true` if this rank has asked the ranks that it receives from.
    pub(super) has_asked_neighbours: bool,
    /// The time since which this rank has asked all others.
    pub(super) asks_all_since: Option<Instant>,
}

/// The knowledge of this rank about another one in a round.
#[derive(Debug, Default)]
pub(super) struct PeerRecord {
    record: Option<Bytes>,
    /// `true` if this rank has asked that rank directly for its record.
    pub(super) is_asked: bool,
    /// The time since which that rank's record can come only from its first receiver.
    pub(super) needs_first_receiver_since: Option<Instant>,
    /// `true` if this rank has asked that first receiver.
    pub(super) is_first_receiver_asked: bool,
    /// `true` if that rank has left without having entered the round.
    pub(super) is_absent: bool,
}

impl RelayedRound {
    /// Adds a record, unless it is here already. The rank must be one of the job.
    pub(super) fn add(&mut self, rank: usize, record: Bytes) {
        self.peer(rank).record.get_or_insert(record);
    }

    /// Returns the record of a rank; `None` if it is not here yet.
    pub(super) fn record(&self, rank: usize) -> Option<&Bytes> {
        self.peers.get(rank)?.record.as_ref()
    }

    /// Returns what is known about a rank, which must be one of the job.
    pub(super) fn peer(&mut self, rank: usize) -> &mut PeerRecord {
        if rank >= self.peers.len() {
            self.peers.resize_with(rank + 1, PeerRecord::default);
        }
        &mut self.peers[rank]
    }

    /// Returns `true` if a rank has left without having entered the round.
    pub(super) fn is_absent(&self, rank: usize) -> bool {
        self.peers.get(rank).is_some_and(|peer| peer.is_absent)
    }

    /// Lets this rank enter the round, with its own record.
    pub(super) fn enter(&mut self, schedule: Schedule, record: Bytes, now: Instant) {
        self.add(schedule.rank(), record);
        self.entered = Some(now);
    }

    /// Returns the next step in which this rank can send, and counts it as done; `None` if it lacks
    /// records for it, or has sent in all steps.
    pub(super) fn next_step(&mut self, schedule: Schedule) -> Option<Step> {
        let step = schedule.steps().nth(self.steps_sent)?;
        // Records may have come since the last call: count on.
        let mut following = schedule
            .consecutive_ranks(schedule.rank(), schedule.ranks())
            .skip(self.run_len);
        while let Some(rank) = following.next()
            && self.record(rank).is_some()
        {
            self.run_len += 1;
        }
        if self.run_len < step.record_count {
            return None;
        }
        self.steps_sent += 1;
        Some(step)
    }

    /// Returns the records that this rank sends in a step, in as few bundles as the size of a frame
    /// allows.
    pub(super) fn bundles_for_step(&self, schedule: Schedule, step: Step) -> Vec<Vec<u8>> {
        bundle_records(
            schedule
                .consecutive_ranks(schedule.rank(), step.record_count)
                .filter_map(|rank| Some((rank, self.record(rank)?))),
        )
    }

    /// Returns all records, in rank order, once this rank has them and has sent on those that
    /// others wait for; `None` before.
    pub(super) fn complete_records(&self, schedule: Schedule) -> Option<Vec<Bytes>> {
        if self.steps_sent < schedule.steps().count() {
            return None;
        }
        (0..schedule.ranks())
            .map(|rank| self.record(rank).cloned())
            .collect()
    }

    /// Returns the ranks whose records are not here.
    pub(super) fn missing(&self, schedule: Schedule) -> Vec<usize> {
        (0..schedule.ranks())
            .filter(|&rank| self.record(rank).is_none())
            .collect()
    }

    /// Returns the ranks from which records are still to come in some step of the schedule.
    pub(super) fn awaited_senders(&self, schedule: Schedule) -> impl Iterator<Item = usize> {
        let awaited_steps = schedule.steps().filter(move |step| {
            schedule
                .consecutive_ranks(step.sender, step.record_count)
                .any(|rank| self.record(rank).is_none())
        });
        awaited_steps.map(|step| step.sender)
    }
}

/// Encodes records, each with its rank. A bundle is no longer than a chunk, unless it consists of a
/// single long record.
pub(super) fn bundle_records<'r>(
    records: impl Iterator<Item = (usize, &'r Bytes)>,
) -> Vec<Vec<u8>> {
    let mut bundles: Vec<Vec<u8>> = Vec::new();
    for (rank, record) in records {
        let added_bytes = PREFIX_BYTES + record.len();
        let bundle = match bundles.last_mut() {
            Some(bundle) if bundle.len() + added_bytes <= CHUNK_BYTES => bundle,
            _ => bundles.push_mut(Vec::new()),
        };
        bundle.extend_from_slice(&(rank as u32).to_le_bytes());
        bundle.extend_from_slice(&(record.len() as u32).to_le_bytes());
        bundle.extend_from_slice(record);
    }
    bundles
}

/// Returns the records of a bundle, each with its rank; `None` if it is no bundle.
pub(super) fn unbundle(bundle: Vec<u8>) -> Option<Vec<(usize, Bytes)>> {
    let mut remaining = Bytes::from(bundle);
    let mut records = Vec::new();
    while !remaining.is_empty() {
        let rank = remaining.try_get_u32_le().ok()?;
        let record_bytes = remaining.try_get_u32_le().ok()? as usize;
        if record_bytes > remaining.len() {
            return None;
        }
        records.push((rank as usize, remaining.split_to(record_bytes)));
    }
    Some(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(of: usize) -> Bytes {
        Bytes::from(vec![of as u8; of])
    }

    #[test]
    fn records_come_back_from_bundles() {
        let records: Vec<(usize, Bytes)> = [5, 0, 3].map(|of| (of, record(of))).into();
        let bundles = bundle_records(records.iter().map(|(rank, record)| (*rank, record)));
        assert_eq!(bundles.len(), 1);
        assert_eq!(unbundle(bundles[0].clone()), Some(records));
        assert_eq!(unbundle(Vec::new()), Some(Vec::new()));
    }

    #[test]
    fn what_is_no_bundle_is_refused() {
        let bundle = bundle_records([(7, &record(9))].into_iter()).remove(0);
        for len in 1..bundle.len() {
            assert_eq!(unbundle(bundle[..len].to_vec()), None, "{len}");
        }
        assert_eq!(unbundle([&bundle[..], &[0]].concat()), None);
        assert_eq!(unbundle(vec![0xff; 8]), None);
    }

    #[test]
    fn many_long_records_are_cut_into_bundles_of_the_size_of_a_chunk() {
        let long = Bytes::from(vec![1; 300 << 10]);
        let longest = Bytes::from(vec![2; CHUNK_BYTES + 1]);
        let records = [&long, &long, &long, &long, &longest, &long];
        let bundles = bundle_records(records.into_iter().enumerate());
        let sizes: Vec<usize> = bundles
            .iter()
            .map(|bundle| unbundle(bundle.clone()).unwrap().len())
            .collect();
        assert_eq!(sizes, [3, 1, 1, 1]);
    }

    #[test]
    fn a_rank_sends_on_what_it_has_and_is_done_when_it_has_all() {
        let schedule = Schedule::new(6, 4);
        let mut round = RelayedRound::default();
        round.add(0, record(0));
        assert_eq!(
            round.next_step(schedule),
            None,
            "it has not entered the round"
        );
        round.enter(schedule, record(4), Instant::now());
        let step = round.next_step(schedule).unwrap();
        assert_eq!((step.receiver, step.record_count), (3, 1));
        assert_eq!(
            round.next_step(schedule),
            None,
            "it does not have the record of rank 5"
        );
        assert_eq!(
            round.awaited_senders(schedule).collect::<Vec<_>>(),
            [5, 0, 2]
        );
        round.add(5, record(5));
        let step = round.next_step(schedule).unwrap();
        assert_eq!((step.receiver, step.record_count), (2, 2));
        let sent = round.bundles_for_step(schedule, step);
        assert_eq!(
            unbundle(sent[0].clone()),
            Some(vec![(4, record(4)), (5, record(5))])
        );
        // The last step needs no more than what it has.
        assert_eq!(
            round
                .next_step(schedule)
                .map(|step| (step.receiver, step.record_count)),
            Some((0, 2))
        );
        assert_eq!(round.missing(schedule), [1, 2, 3]);
        assert_eq!(round.awaited_senders(schedule).collect::<Vec<_>>(), [0, 2]);
        assert_eq!(round.complete_records(schedule), None);
        (1..4).for_each(|of| round.add(of, record(of)));
        assert_eq!(
            round.complete_records(schedule),
            Some((0..6).map(record).collect())
        );
    }
}
