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
//! - A rank may leave once it has entered the last round and passed on what it had to, while its
//!   record is still on its way to some ranks. So a round does not fail just because a rank has
//!   left. The *keeper* of a rank is the first that gets its record. So the keeper knows whether a
//!   rank that has left had entered the round, and tells those who ask.
//!
//! A rank need not be connected to all others: see [`links`](super::links). A rank to which this
//! one has no connection counts as neither gone nor silent, until this one asks it something or
//! hears that it has ended.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use std::{iter, mem};

use bytes::Bytes;

use super::frame::{Kind, Notice};
use super::gathering::bundles;
use super::inbox::{Question, SILENCE, State, rank_body, timeout};
use crate::backend::Round;
use crate::error::CommError;

/// The time before the deadline at which a rank asks for the records that it misses, or half of the
/// time that the operation may take if that is shorter.
const ASKS_BEFORE_DEADLINE: Duration = Duration::from_secs(3);

/// The time that neighbours have for an answer before a rank asks directly those whose records are
/// still missing, or a sixth of the time that the operation may take if that is shorter. After this
/// time few records are missing, so few connections have to be made.
const NEIGHBOUR_TIME: Duration = Duration::from_secs(1);

/// The time that a rank waits before it connects to the keeper of a rank that has left, or a
/// twelfth of the time that the operation may take if that is shorter. Usually the connection is
/// not needed: if a rank has died, nearly all others hear within this time that the group has
/// failed.
pub(super) const KEEPER_PAUSE: Duration = Duration::from_millis(250);

/// The time that others have for an answer before a silent rank is blamed.
const ANSWER_TIME: Duration = Duration::from_millis(250);

/// The longest time between two checks of the other ranks.
const CHECK: Duration = Duration::from_millis(500);

/// The next thing that a rank has to do in an exchange.
#[derive(Debug)]
pub(super) enum Next {
    /// Send bundles of records to a rank.
    Send {
        /// The rank.
        to: usize,
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
    /// The earliest time at which a keeper may be asked that is not connected yet.
    keeper_at: Option<Instant>,
}

impl State {
    /// Lets this rank enter a round, with its record.
    pub(super) fn enter(&mut self, group: u64, round: u64, record: &[u8], now: Instant) {
        let state = self.groups.entry(group).or_default();
        let gathering = state.gatherings.entry(round).or_default();
        gathering.enter(state.schedule, Bytes::copy_from_slice(record), now);
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
        if let Some(failure) = self.ended(group, round) {
            return Err(failure);
        }
        let catches_up = self.catches_up(now);
        let state = self.groups.entry(group).or_default();
        let (schedule, gathering) = (
            state.schedule,
            state.gatherings.entry(round.number).or_default(),
        );
        // Step 1: pass on what others wait for, before anything else.
        if let Some(step) = gathering.next_step(schedule) {
            return Ok(Next::Send {
                to: state.ranks[step.to],
                bundles: gathering.outgoing(schedule, step),
            });
        }
        // Step 2: end the round, if nothing is missing.
        if let Some(records) = gathering.complete(schedule) {
            state.over = Some(round.number);
            state.gatherings.retain(|&number, _| number >= round.number);
            return Ok(Next::Done(records));
        }
        // Do not judge the others before this process has read what they sent while it was stopped.
        if catches_up {
            return Ok(Next::Wait(now + CHECK));
        }
        // Step 3: give up if a rank that has left will never send what is missing. This is so for a
        // rank that still owes this one records, because it left before it had finished the round,
        // and for one that never entered the round.
        let missing = gathering.missing(schedule);
        let absent = missing
            .iter()
            .copied()
            .filter(|&rank| gathering.is_absent(rank));
        let needed: Vec<usize> = gathering
            .debtors(schedule)
            .chain(absent)
            .map(|rank| state.ranks[rank])
            .collect();
        if let Some(failure) = self.departed(group, round, &needed) {
            return Err(failure);
        }
        // Step 4: ask for what is missing, if that takes long.
        let Asking {
            questions,
            wake,
            keeper_at,
        } = self.ask(group, round, &missing, now);
        if !questions.is_empty() {
            return Ok(Next::Ask(questions));
        }
        // Step 5: give up at the deadline, or earlier if a rank is silent and the others could not
        // help.
        let is_over = now >= round.until;
        let ranks = self
            .groups
            .get(&group)
            .map_or(&[][..], |group| &group.ranks);
        let missing: Vec<usize> = missing.iter().map(|&rank| ranks[rank]).collect();
        if (is_over || wake.is_none())
            && let Some(failure) = self.silent(round, &missing, now)
        {
            return Err(failure);
        }
        if is_over
            && let Some(failure) = self
                .departed(group, round, &missing)
                .or_else(|| timeout(round, &missing, now))
        {
            return Err(failure);
        }
        let wake = [wake, keeper_at]
            .into_iter()
            .flatten()
            .fold(round.until, Instant::min);
        Ok(Next::Wait(wake.min(now + CHECK)))
    }

    /// Returns what this rank asks for now.
    fn ask(&mut self, group: u64, round: &Round<'_>, missing: &[usize], now: Instant) -> Asking {
        let State {
            ranks: peers,
            groups,
            patience,
            ..
        } = self;
        let state = groups.entry(group).or_default();
        let (ranks, schedule) = (&state.ranks, state.schedule);
        let gathering = state.gatherings.entry(round.number).or_default();
        let has_left = |rank: usize| peers[ranks[rank]].left.is_some();
        let is_silent = |rank: usize| peers[ranks[rank]].silence(now) > SILENCE;
        let can_answer =
            |rank: usize| rank != schedule.rank() && !has_left(rank) && !is_silent(rank);
        // Decide whether this rank has waited for long. It asks at once if another one is silent,
        // because that one may have stopped.
        let before_deadline = round
            .until
            .checked_sub(ASKS_BEFORE_DEADLINE.min(round.deadline / 2));
        let before_patience_ends = gathering.entered.unwrap_or(now).checked_add(*patience / 2);
        let asks_at = before_deadline
            .unwrap_or(now)
            .min(before_patience_ends.unwrap_or(round.until));
        if now >= asks_at
            || missing
                .iter()
                .any(|&rank| is_silent(rank) && !has_left(rank))
        {
            gathering.waits_long_since.get_or_insert(now);
        }
        // Step 1: ask those ranks from which the missing records should have come. They may miss
        // them too, and ask on.
        let mut questions: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        let asks_neighbours = gathering.waits_long_since.is_some() || gathering.others_ask;
        if asks_neighbours && !mem::replace(&mut gathering.has_asked_neighbours, true) {
            for &about in missing {
                let [one, other] = schedule.toward(about);
                for of in iter::once(one)
                    .chain((one != other).then_some(other))
                    .filter(|&of| can_answer(of))
                {
                    questions.entry(of).or_default().push(about);
                }
            }
        }
        // Step 2: if that did not help, ask each rank whose record is still missing.
        let asks_all_at = gathering
            .waits_long_since
            .map(|since| since + NEIGHBOUR_TIME.min(round.deadline / 6));
        if asks_all_at.is_some_and(|at| now >= at) {
            gathering.asks_all_since.get_or_insert(now);
        }
        let mut keeper_at = None;
        for &about in missing {
            let (asks_all, slot) = (gathering.asks_all_since.is_some(), gathering.slot(about));
            if asks_all && !slot.is_asked && can_answer(about) {
                slot.is_asked = true;
                questions.entry(about).or_default().push(about);
            }
            // Step 3: ask the keeper of a rank that cannot answer itself, at once if there is a
            // connection.
            let keeper = schedule.keeper(about);
            if !slot.is_keeper_asked && (has_left(about) || is_silent(about)) && can_answer(keeper)
            {
                let since = *slot.needs_keeper_since.get_or_insert(now);
                let at = since + KEEPER_PAUSE.min(round.deadline / 12);
                if peers[ranks[keeper]].is_connected() || now >= at {
                    slot.is_keeper_asked = true;
                    questions.entry(keeper).or_default().push(about);
                } else {
                    keeper_at = Some(keeper_at.map_or(at, |other: Instant| other.min(at)));
                }
            }
        }
        let questions = questions
            .into_iter()
            .map(|(of, about)| (ranks[of], about))
            .collect();
        let wake = match (asks_all_at, gathering.asks_all_since) {
            (_, Some(since)) => Some(since + ANSWER_TIME).filter(|&answered| now < answered),
            (Some(at), None) => Some(at),
            (None, None) => Some(asks_at),
        };
        Asking {
            questions,
            wake,
            keeper_at,
        }
    }

    /// Returns the news to pass on, and the answers to all questions that can be answered now.
    pub(super) fn notices(&mut self) -> Vec<Notice> {
        let State {
            ranks: peers,
            groups,
            questions,
            notices,
            ..
        } = self;
        let mut notices = mem::take(notices);
        // The records that ranks have asked for, each with its rank.
        let mut found: BTreeMap<(usize, u64, u64), Vec<(usize, Bytes)>> = BTreeMap::new();
        questions.retain(
            |&Question {
                 group,
                 round,
                 from,
                 about,
             }| {
                // Keep a question about a group that is not known here yet.
                let Some(state) = groups.get(&group).filter(|state| !state.ranks.is_empty()) else {
                    return true;
                };
                // Drop a question whose answer nobody needs any more, or that makes no sense.
                if state.over > Some(round)
                    || about >= state.ranks.len()
                    || peers[from].left.is_some()
                {
                    return false;
                }
                let record = state
                    .gatherings
                    .get(&round)
                    .and_then(|gathering| gathering.record(about));
                if let Some(record) = record {
                    found
                        .entry((from, group, round))
                        .or_default()
                        .push((about, record.clone()));
                    return false;
                }
                // This rank is the keeper, and all frames of the rank that has left have been read.
                // If it had entered the round, its record would be here. But if the group has
                // failed, the rank may have left because of that.
                let is_absent = state.schedule.keeper(about) == state.schedule.rank()
                    && peers[state.ranks[about]].left.is_some()
                    && !state.has_failed();
                if is_absent {
                    notices.push(Notice {
                        to: from,
                        kind: Kind::Absent,
                        group,
                        round,
                        body: rank_body(about),
                    });
                }
                !is_absent
            },
        );
        for ((to, group, round), records) in found {
            let bodies = bundles(records.iter().map(|(rank, record)| (*rank, record)));
            notices.extend(bodies.into_iter().map(|body| Notice {
                to,
                kind: Kind::Bundle,
                group,
                round,
                body,
            }));
        }
        notices
    }
}
