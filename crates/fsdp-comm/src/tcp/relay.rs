//! The exchange of records in large groups: records travel through other ranks, so that a rank
//! sends only a few messages, and not one to each other rank. [`schedule`](super::schedule) says
//! who sends what to whom.
//!
//! A rank that is late, stopped or gone holds up the records of others. Two rules make sure that
//! the outcome is still the same as if every two ranks exchanged their records directly:
//! - A rank that has waited for long asks for the records that it misses. First it asks the ranks
//!   that it receives from, which ask on. Then it asks directly the ranks whose records are still
//!   missing. A rank that has entered the round answers, whatever it does now. So the records that
//!   are still missing at the deadline are those of the ranks at fault, and a rank that has stopped
//!   in the middle does not keep the records of others from anybody.
//! - A rank may leave once it has entered the last round and sent on what it had to, while its
//!   record is still on its way to some ranks. So a round does not fail just because a rank has
//!   left. The *first receiver* of a rank is the one that gets its record before any other does. So
//!   it knows whether a rank that has left had entered the round, and tells those who ask.
//!
//! A rank need not be connected to all others: see [`links`](super::links). A rank to which this
//! one has no connection counts as neither gone nor silent, until this one asks it something or
//! hears that it has ended.

use std::collections::BTreeMap;
use std::mem;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::frame::{Kind, Notice};
use super::inbox::{InboxState, Question, encode_ranks, timeout_error};
use super::relayed_round::bundle_records;
use crate::backend::Round;
use crate::error::CommError;

/// The time before the deadline at which a rank asks for the records that it misses, or half of the
/// time that the operation may take if that is shorter.
const ASKS_BEFORE_DEADLINE: Duration = Duration::from_secs(3);

/// The time that neighbours have for an answer before a rank asks directly those whose records are
/// still missing, or a sixth of the time that the operation may take if that is shorter. After this
/// time few records are missing, so few connections have to be made.
const NEIGHBOUR_TIMEOUT: Duration = Duration::from_secs(1);

/// The time that a rank waits before it connects to the first receiver of a rank that has left, or
/// a twelfth of the time that the operation may take if that is shorter. Usually the connection is
/// not needed: if a rank has died, nearly all others hear within this time that the group has
/// failed.
const FIRST_RECEIVER_INTERVAL: Duration = Duration::from_millis(250);

/// The time that others have for an answer before a silent rank is blamed.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(250);

/// The longest time between two checks of the other ranks.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The next thing that a rank has to do in an exchange.
#[derive(Debug)]
pub(super) enum Next {
    /// Send bundles of records to a rank.
    Send {
        /// The rank.
        receiver: usize,
        /// The bodies of the frames.
        bundles: Vec<Vec<u8>>,
    },
    /// Ask ranks for records: each global rank, with the ranks of the group whose records it is
    /// asked for.
    Ask(Vec<(usize, Vec<usize>)>),
    /// Wait for frames, but no longer than this.
    Wait(Instant),
    /// Nothing more: the round is complete. These are the records of all ranks, in rank order.
    Done(Vec<Bytes>),
}

/// The questions of a rank.
struct Asking {
    /// The questions to ask now, as in [`Next::Ask`].
    questions: Vec<(usize, Vec<usize>)>,
    /// The time at which to ask further, or to look again; `None` once all have had the time to
    /// answer.
    wake: Option<Instant>,
    /// The earliest time at which a first receiver may be asked that is not connected yet.
    first_receiver_at: Option<Instant>,
}

impl InboxState {
    /// Lets this rank enter a round, with its record.
    pub(super) fn enter(&mut self, group: u64, round: u64, record: &[u8], now: Instant) {
        let state = self.groups.entry(group).or_default();
        let relayed = state.relayed_rounds.entry(round).or_default();
        relayed.enter(state.schedule, Bytes::copy_from_slice(record), now);
    }

    /// Returns what this rank does next in a round that it has entered.
    ///
    /// # Errors
    /// The round cannot end.
    pub(super) fn next(
        &mut self,
        group: u64,
        round: &Round<'_>,
        now: Instant,
    ) -> Result<Next, CommError> {
        if let Some(failure) = self.group_error(group, round) {
            return Err(failure);
        }
        let catches_up = self.catches_up(now);
        let state = self.groups.entry(group).or_default();
        let schedule = state.schedule;
        let relayed = state.relayed_rounds.entry(round.number).or_default();
        // Step 1: send on what others wait for, before anything else.
        if let Some(step) = relayed.next_step(schedule) {
            return Ok(Next::Send {
                receiver: state.ranks[step.receiver],
                bundles: relayed.bundles_for_step(schedule, step),
            });
        }
        // Step 2: end the round, if nothing is missing.
        if let Some(records) = relayed.complete_records(schedule) {
            state.last_finished_round = Some(round.number);
            state
                .relayed_rounds
                .retain(|&other_round, _| other_round >= round.number);
            return Ok(Next::Done(records));
        }
        // Do not judge the others before this process has read what they sent while it was stopped.
        if catches_up {
            return Ok(Next::Wait(now + CHECK_INTERVAL));
        }
        // Step 3: give up if a rank that has left will never send what is missing. This is so for a
        // rank from which records are still to come, because it left before it had finished the
        // round, and for one that never entered the round.
        let missing = relayed.missing(schedule);
        let absent = missing
            .iter()
            .copied()
            .filter(|&rank| relayed.is_absent(rank));
        let needed: Vec<usize> = relayed
            .awaited_senders(schedule)
            .chain(absent)
            .map(|rank| state.ranks[rank])
            .collect();
        let missing_ranks: Vec<usize> = missing.iter().map(|&rank| state.ranks[rank]).collect();
        if let Some(failure) = self.departed_error(group, round, &needed) {
            return Err(failure);
        }
        // Step 4: ask for what is missing, if that takes long.
        let Asking {
            questions,
            wake,
            first_receiver_at,
        } = self.decide_questions(group, round, &missing, now);
        if !questions.is_empty() {
            return Ok(Next::Ask(questions));
        }
        // Step 5: give up at the deadline, or earlier if a rank is silent and the others could not
        // help.
        let is_over = now >= round.deadline;
        if (is_over || wake.is_none())
            && let Some(failure) = self.unresponsive_rank_error(round, &missing_ranks, now)
        {
            return Err(failure);
        }
        if is_over
            && let Some(failure) = self
                .departed_error(group, round, &missing_ranks)
                .or_else(|| timeout_error(round, &missing_ranks, now))
        {
            return Err(failure);
        }
        let wake_time = [
            Some(round.deadline),
            Some(now + CHECK_INTERVAL),
            wake,
            first_receiver_at,
        ]
        .into_iter()
        .flatten()
        .min();
        Ok(Next::Wait(wake_time.expect("the deadline is always there")))
    }

    /// Returns the questions that this rank has to ask now, and records that it has asked them.
    fn decide_questions(
        &mut self,
        group: u64,
        round: &Round<'_>,
        missing: &[usize],
        now: Instant,
    ) -> Asking {
        let InboxState {
            peers,
            groups,
            max_silence,
            ..
        } = self;
        let state = groups.entry(group).or_default();
        let ranks = &state.ranks;
        let schedule = state.schedule;
        let relayed = state.relayed_rounds.entry(round.number).or_default();
        // Decide whether this rank has waited for long. It asks at once if another one is silent,
        // because that one may have stopped.
        let entered = relayed
            .entered
            .expect("a rank asks in rounds that it has entered");
        let before_deadline = round
            .deadline
            .checked_sub(ASKS_BEFORE_DEADLINE.min(round.timeout / 2))
            .unwrap_or(now);
        let before_silence_ends = entered
            .checked_add(*max_silence / 2)
            .unwrap_or(round.deadline);
        let asks_at = before_deadline.min(before_silence_ends);
        let misses_silent_rank = missing.iter().any(|&rank| {
            let peer = &peers[ranks[rank]];
            peer.departure.is_none() && !peer.can_answer(now)
        });
        if now >= asks_at || misses_silent_rank {
            relayed.waits_long_since.get_or_insert(now);
        }
        // Step 1: ask those ranks from which the missing records should have come. They may miss
        // them too, and ask on.
        let mut questions: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        let asks_neighbours = relayed.waits_long_since.is_some() || relayed.others_ask;
        if asks_neighbours && !mem::replace(&mut relayed.has_asked_neighbours, true) {
            for &wanted_rank in missing {
                let mut relays = schedule.relays_from(wanted_rank).to_vec();
                relays.dedup();
                for asked_rank in relays {
                    if asked_rank != schedule.rank() && peers[ranks[asked_rank]].can_answer(now) {
                        questions.entry(asked_rank).or_default().push(wanted_rank);
                    }
                }
            }
        }
        // Step 2: if that did not help, ask each rank whose record is still missing.
        let asks_all_at = relayed
            .waits_long_since
            .map(|since| since + NEIGHBOUR_TIMEOUT.min(round.timeout / 6));
        if asks_all_at.is_some_and(|due| now >= due) {
            relayed.asks_all_since.get_or_insert(now);
        }
        let asks_all = relayed.asks_all_since.is_some();
        let mut first_receiver_at: Option<Instant> = None;
        for &wanted_rank in missing {
            let peer = relayed.peer(wanted_rank);
            let can_answer = peers[ranks[wanted_rank]].can_answer(now);
            if asks_all && !peer.is_asked && can_answer {
                peer.is_asked = true;
                questions.entry(wanted_rank).or_default().push(wanted_rank);
            }
            // Step 3: ask the first receiver of a rank that cannot answer itself, at once if there
            // is a connection.
            let first_receiver = schedule.first_receiver(wanted_rank);
            if can_answer
                || peer.is_first_receiver_asked
                || first_receiver == schedule.rank()
                || !peers[ranks[first_receiver]].can_answer(now)
            {
                continue;
            }
            let since = *peer.needs_first_receiver_since.get_or_insert(now);
            let due = since + FIRST_RECEIVER_INTERVAL.min(round.timeout / 12);
            if peers[ranks[first_receiver]].is_connected() || now >= due {
                peer.is_first_receiver_asked = true;
                questions
                    .entry(first_receiver)
                    .or_default()
                    .push(wanted_rank);
            } else {
                first_receiver_at =
                    Some(first_receiver_at.map_or(due, |earliest| earliest.min(due)));
            }
        }
        let wake = match (asks_all_at, relayed.asks_all_since) {
            (_, Some(since)) => Some(since + ANSWER_TIMEOUT).filter(|&answered| now < answered),
            (Some(due), None) => Some(due),
            (None, None) => Some(asks_at),
        };
        Asking {
            questions: questions
                .into_iter()
                .map(|(asked_rank, wanted_ranks)| (ranks[asked_rank], wanted_ranks))
                .collect(),
            wake,
            first_receiver_at,
        }
    }

    /// Returns the news to forward, and the answers to all questions that can be answered now.
    pub(super) fn notices(&mut self) -> Vec<Notice> {
        let mut notices = mem::take(&mut self.notices);
        // The records that ranks have asked for, each with its rank.
        let mut found: BTreeMap<(usize, u64, u64), Vec<(usize, Bytes)>> = BTreeMap::new();
        for question in mem::take(&mut self.questions) {
            let Question {
                group,
                round,
                asker,
                wanted_rank,
            } = question;
            // Keep a question about a group that is not known here yet.
            let state = match self.groups.get(&group) {
                Some(state) if !state.ranks.is_empty() => state,
                _ => {
                    self.questions.insert(question);
                    continue;
                }
            };
            // Drop a question whose answer nobody needs any more, or that makes no sense.
            if state.last_finished_round > Some(round)
                || wanted_rank >= state.ranks.len()
                || self.peers[asker].departure.is_some()
            {
                continue;
            }
            if let Some(relayed) = state.relayed_rounds.get(&round)
                && let Some(record) = relayed.record(wanted_rank)
            {
                let records = found.entry((asker, group, round)).or_default();
                records.push((wanted_rank, record.clone()));
                continue;
            }
            // If this rank is the first receiver, all frames of the rank that has left have been
            // read. If it had entered the round, its record would be here. But if the group has
            // failed, the rank may have left because of that.
            let is_absent = state.schedule.first_receiver(wanted_rank) == state.schedule.rank()
                && self.peers[state.ranks[wanted_rank]].departure.is_some()
                && state.failure.is_none();
            if !is_absent {
                self.questions.insert(question);
                continue;
            }
            notices.push(Notice {
                receiver: asker,
                kind: Kind::Absent,
                group,
                round,
                body: encode_ranks(&[wanted_rank]).into(),
            });
        }
        for ((receiver, group, round), records) in found {
            for body in bundle_records(records.iter().map(|(rank, record)| (*rank, record))) {
                notices.push(Notice {
                    receiver,
                    kind: Kind::Bundle,
                    group,
                    round,
                    body: body.into(),
                });
            }
        }
        notices
    }
}

#[cfg(test)]
mod tests;
