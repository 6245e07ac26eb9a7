//! The exchange of records in large groups: records travel through other ranks, so that a rank sends a few messages and
//! not one to each rank.
//!
//! A rank that is late, stopped or gone holds up the records of others. Two rules keep the guarantees of an exchange
//! between every two ranks:
//! - Ranks that wait for long ask all ranks whose records they miss for these records. A rank that has entered the round
//!   answers, whatever it does now. So the records that are still missing at the deadline are those of the ranks at fault,
//!   and a rank that has stopped in the middle does not keep the records of others from anybody.
//! - A rank may leave once it has entered the last round and passed on what it had to, while its record is still on its
//!   way. So that it has left is no reason to fail. Its *keeper* knows whether it has entered the round, as that is the
//!   first rank that gets its record, and tells it those who ask.

use std::time::{Duration, Instant};

use bytes::Bytes;

use super::frame::Kind;
use super::gathering::bundles;
use super::inbox::{Question, SILENCE, State, rank_body, timeout};
use crate::backend::Round;
use crate::error::CommError;

/// The time before the deadline at which a rank asks for the records that it misses, or half of the time that the
/// operation may take if that is shorter.
const ASKS_BEFORE_DEADLINE: Duration = Duration::from_secs(2);

/// The time that others have for an answer before a silent rank is blamed.
const ANSWER_TIME: Duration = Duration::from_millis(250);

/// The longest time between two checks of the other ranks.
const CHECK: Duration = Duration::from_millis(500);

/// A rank's next part in an exchange.
#[derive(Debug)]
pub(super) enum Next {
    /// To send bundles of records to a rank.
    Send {
        /// The rank.
        to: usize,
        /// The bodies of the frames.
        bundles: Vec<Vec<u8>>,
    },
    /// To ask ranks for records. Each is given with the rank of the group whose record it is asked for.
    Ask(Vec<(usize, usize)>),
    /// To wait for frames, but no longer than this.
    Wait(Instant),
    /// Nothing more: these are the records of all, in rank order.
    Done(Vec<Bytes>),
}

/// A frame that answers a question.
#[derive(Debug)]
pub(super) struct Answer {
    /// The rank that has asked.
    pub(super) to: usize,
    pub(super) kind: Kind,
    pub(super) group: u64,
    pub(super) round: u64,
    pub(super) body: Vec<u8>,
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
    pub(super) fn next(&mut self, group: u64, round: &Round<'_>, now: Instant) -> Result<Next, CommError> {
        if let Some(failure) = self.ended(group, round) {
            return Err(failure);
        }
        let state = self.groups.entry(group).or_default();
        let (schedule, gathering) = (state.schedule, state.gatherings.entry(round.number).or_default());
        // Step 1: pass on what others wait for, before anything else.
        if let Some(step) = gathering.next_step(schedule) {
            return Ok(Next::Send { to: state.ranks[step.to], bundles: gathering.outgoing(schedule, step) });
        }
        // Step 2: end the round, if nothing is missing.
        if let Some(records) = gathering.complete(schedule) {
            state.over = Some(round.number);
            state.gatherings.retain(|&number, _| number >= round.number);
            return Ok(Next::Done(records));
        }
        // Step 3: give up if a rank will never send what is missing. One that has left without sending all that it sends to
        // this rank did not finish the round.
        let missing = gathering.missing(schedule);
        let absent = missing.iter().copied().filter(|&rank| gathering.is_absent(rank));
        let needed: Vec<usize> = gathering.debtors(schedule).chain(absent).map(|rank| state.ranks[rank]).collect();
        if let Some(failure) = self.departed(group, round, &needed) {
            return Err(failure);
        }
        // Step 4: ask for what is missing, if that takes long.
        let (questions, wake) = self.ask(group, round, &missing, now);
        if !questions.is_empty() {
            return Ok(Next::Ask(questions));
        }
        // Step 5: give up at the deadline, or earlier if a rank is silent and the others could not help.
        let is_over = now >= round.until;
        let ranks = self.groups.get(&group).map_or(&[][..], |group| &group.ranks);
        let missing: Vec<usize> = missing.iter().map(|&rank| ranks[rank]).collect();
        if (is_over || wake.is_none())
            && let Some(failure) = self.silent(round, &missing, now)
        {
            return Err(failure);
        }
        if is_over
            && let Some(failure) = self.departed(group, round, &missing).or_else(|| timeout(round, &missing, now))
        {
            return Err(failure);
        }
        Ok(Next::Wait(wake.unwrap_or(round.until).min(round.until).min(now + CHECK)))
    }

    /// Returns the questions to ask now, as in [`Next::Ask`], and the time at which to look again; `None` once all have had
    /// the time to answer.
    fn ask(
        &mut self,
        group: u64,
        round: &Round<'_>,
        missing: &[usize],
        now: Instant,
    ) -> (Vec<(usize, usize)>, Option<Instant>) {
        let State { ranks: peers, groups, patience, .. } = self;
        let state = groups.entry(group).or_default();
        let (ranks, schedule) = (&state.ranks, state.schedule);
        let gathering = state.gatherings.entry(round.number).or_default();
        let has_left = |rank: usize| peers[ranks[rank]].left.is_some();
        let is_silent = |rank: usize| now.saturating_duration_since(peers[ranks[rank]].last_frame_received) > SILENCE;
        let can_answer = |rank: usize| rank != schedule.rank() && !has_left(rank) && !is_silent(rank);
        // A rank waits for as long as others may just be late. But it asks at once if one has stopped.
        let before_deadline = round.until.checked_sub(ASKS_BEFORE_DEADLINE.min(round.deadline / 2));
        let before_patience_ends = gathering.entered.unwrap_or(now).checked_add(*patience / 2);
        let asks_at = before_deadline.unwrap_or(now).min(before_patience_ends.unwrap_or(round.until));
        if now >= asks_at || missing.iter().any(|&rank| is_silent(rank) && !has_left(rank)) {
            gathering.asks_all_since.get_or_insert(now);
        }
        let mut questions = Vec::new();
        for &about in missing {
            let (asks_all, slot) = (gathering.asks_all_since.is_some(), gathering.slot(about));
            if asks_all && !slot.is_asked && can_answer(about) {
                slot.is_asked = true;
                questions.push((ranks[about], about));
            }
            let keeper = schedule.keeper(about);
            if !slot.is_keeper_asked && (has_left(about) || is_silent(about)) && can_answer(keeper) {
                slot.is_keeper_asked = true;
                questions.push((ranks[keeper], about));
            }
        }
        let wake = match gathering.asks_all_since {
            None => Some(asks_at),
            Some(since) => Some(since + ANSWER_TIME).filter(|&answered| now < answered),
        };
        (questions, wake)
    }

    /// Returns the answers to all questions that can be answered now.
    pub(super) fn answers(&mut self) -> Vec<Answer> {
        let State { ranks: peers, groups, questions, .. } = self;
        let mut answers = Vec::new();
        questions.retain(|&Question { group, round, from, about }| {
            // Its group may not be known here yet.
            let Some(state) = groups.get(&group).filter(|state| !state.ranks.is_empty()) else { return true };
            // Nobody needs to know any more.
            if state.over > Some(round) || about >= state.ranks.len() || peers[from].left.is_some() {
                return false;
            }
            let record = state.gatherings.get(&round).and_then(|gathering| gathering.record(about));
            let (kind, body) = match record {
                Some(record) => (Kind::Bundle, bundles([(about, record)].into_iter()).concat()),
                // All frames of that rank have been read. The first one of this round would have come here. But if the group has
                // failed, the rank may have left because of that.
                None if state.schedule.keeper(about) == state.schedule.rank()
                    && peers[state.ranks[about]].left.is_some()
                    && !state.has_failed() =>
                {
                    (Kind::Absent, rank_body(about))
                }
                None => return true,
            };
            answers.push(Answer { to: from, kind, group, round, body });
            false
        });
        answers
    }
}
