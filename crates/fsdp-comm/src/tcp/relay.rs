//! The exchange of records in large groups: records travel through other ranks, so that a rank sends a few messages and
//! not one to each rank.
//!
//! A rank that is late, stopped or gone holds up the records of others. Two rules keep the guarantees of an exchange
//! between every two ranks:
//! - Ranks that wait for long ask for the records that they miss: first the ranks that they receive from, which ask on, and
//!   then directly the ranks whose records are still missing. A rank that has entered the round
//!   answers, whatever it does now. So the records that are still missing at the deadline are those of the ranks at fault,
//!   and a rank that has stopped in the middle does not keep the records of others from anybody.
//! - A rank may leave once it has entered the last round and passed on what it had to, while its record is still on its
//!   way. So that it has left is no reason to fail. Its *keeper* knows whether it has entered the round, as that is the
//!   first rank that gets its record, and tells it those who ask.
//!
//! A rank need not be connected to all others: see [`links`](super::links). A rank without a connection counts as neither
//! gone nor silent until this one asks it something, or hears that it has ended.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use std::{iter, mem};

use bytes::Bytes;

use super::frame::{Kind, Notice};
use super::gathering::bundles;
use super::inbox::{Question, SILENCE, State, rank_body, timeout};
use crate::backend::Round;
use crate::error::CommError;

/// The time before the deadline at which a rank asks for the records that it misses, or half of the time that the
/// operation may take if that is shorter.
const ASKS_BEFORE_DEADLINE: Duration = Duration::from_secs(3);

/// The time that neighbours have for an answer before a rank asks all others directly, or a sixth of the time that the
/// operation may take if that is shorter. Few records are missing then, so that few connections have to be made.
const NEIGHBOUR_TIME: Duration = Duration::from_secs(1);

/// The time that a rank waits before it connects to the keeper of a rank that has left, or a twelfth of the time that the
/// operation may take if that is shorter. If a rank dies, all hear of it, and nearly all hear at once that the group has
/// failed.
pub(super) const KEEPER_PAUSE: Duration = Duration::from_millis(250);

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
    /// To ask ranks for records. Each is given with the ranks of the group whose records it is asked for.
    Ask(Vec<(usize, Vec<usize>)>),
    /// To wait for frames, but no longer than this.
    Wait(Instant),
    /// Nothing more: these are the records of all, in rank order.
    Done(Vec<Bytes>),
}

/// The questions of a rank.
struct Asking {
    /// The questions to ask now, as in [`Next::Ask`].
    questions: Vec<(usize, Vec<usize>)>,
    /// The time at which to look again; `None` once all have had the time to answer.
    wake: Option<Instant>,
    /// The time at which there is a keeper to ask.
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
        let Asking { questions, wake, keeper_at } = self.ask(group, round, &missing, now);
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
        let wake = [wake, keeper_at].into_iter().flatten().fold(round.until, Instant::min);
        Ok(Next::Wait(wake.min(now + CHECK)))
    }

    /// Returns what this rank asks for now.
    fn ask(&mut self, group: u64, round: &Round<'_>, missing: &[usize], now: Instant) -> Asking {
        let State { ranks: peers, groups, patience, .. } = self;
        let state = groups.entry(group).or_default();
        let (ranks, schedule) = (&state.ranks, state.schedule);
        let gathering = state.gatherings.entry(round.number).or_default();
        let has_left = |rank: usize| peers[ranks[rank]].left.is_some();
        let is_silent = |rank: usize| peers[ranks[rank]].silence(now) > SILENCE;
        let can_answer = |rank: usize| rank != schedule.rank() && !has_left(rank) && !is_silent(rank);
        // A rank waits for as long as others may just be late. But it asks at once if one has stopped.
        let before_deadline = round.until.checked_sub(ASKS_BEFORE_DEADLINE.min(round.deadline / 2));
        let before_patience_ends = gathering.entered.unwrap_or(now).checked_add(*patience / 2);
        let asks_at = before_deadline.unwrap_or(now).min(before_patience_ends.unwrap_or(round.until));
        if now >= asks_at || missing.iter().any(|&rank| is_silent(rank) && !has_left(rank)) {
            gathering.waits_long_since.get_or_insert(now);
        }
        // Step 1: ask those who pass on to this rank what is missing. They may miss it too, and ask on.
        let mut questions: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        let asks_neighbours = gathering.waits_long_since.is_some() || gathering.others_ask;
        if asks_neighbours && !mem::replace(&mut gathering.has_asked_neighbours, true) {
            for &about in missing {
                let [one, other] = schedule.toward(about);
                for of in iter::once(one).chain((one != other).then_some(other)).filter(|&of| can_answer(of)) {
                    questions.entry(of).or_default().push(about);
                }
            }
        }
        // Step 2: ask all whose records are still missing.
        let asks_all_at = gathering.waits_long_since.map(|since| since + NEIGHBOUR_TIME.min(round.deadline / 6));
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
            let keeper = schedule.keeper(about);
            if !slot.is_keeper_asked && (has_left(about) || is_silent(about)) && can_answer(keeper) {
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
        let questions = questions.into_iter().map(|(of, about)| (ranks[of], about)).collect();
        let wake = match (asks_all_at, gathering.asks_all_since) {
            (_, Some(since)) => Some(since + ANSWER_TIME).filter(|&answered| now < answered),
            (Some(at), None) => Some(at),
            (None, None) => Some(asks_at),
        };
        Asking { questions, wake, keeper_at }
    }

    /// Returns the news to pass on, and the answers to all questions that can be answered now.
    pub(super) fn notices(&mut self) -> Vec<Notice> {
        let State { ranks: peers, groups, questions, notices, .. } = self;
        let mut notices = mem::take(notices);
        // The records that ranks have asked for, each with its rank.
        let mut found: BTreeMap<(usize, u64, u64), Vec<(usize, Bytes)>> = BTreeMap::new();
        questions.retain(|&Question { group, round, from, about }| {
            // Its group may not be known here yet.
            let Some(state) = groups.get(&group).filter(|state| !state.ranks.is_empty()) else { return true };
            // Nobody needs to know any more.
            if state.over > Some(round) || about >= state.ranks.len() || peers[from].left.is_some() {
                return false;
            }
            let record = state.gatherings.get(&round).and_then(|gathering| gathering.record(about));
            if let Some(record) = record {
                found.entry((from, group, round)).or_default().push((about, record.clone()));
                return false;
            }
            // All frames of that rank have been read. The first one of this round would have come here. But if the group has
            // failed, the rank may have left because of that.
            let is_absent = state.schedule.keeper(about) == state.schedule.rank()
                && peers[state.ranks[about]].left.is_some()
                && !state.has_failed();
            if is_absent {
                notices.push(Notice { to: from, kind: Kind::Absent, group, round, body: rank_body(about) });
            }
            !is_absent
        });
        for ((to, group, round), records) in found {
            let bodies = bundles(records.iter().map(|(rank, record)| (*rank, record)));
            notices.extend(bodies.into_iter().map(|body| Notice { to, kind: Kind::Bundle, group, round, body }));
        }
        notices
    }
}
