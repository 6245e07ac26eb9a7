//! The vote in a round over sockets: ballots travel through other ranks, so that a rank sends only
//! about `log2(ranks)` messages, however many ranks there are. [`schedule`](super::schedule) says
//! who sends what to whom. At the end all ranks have the same merged ballot.
//!
//! A rank that is late, stopped or gone holds up the ballots of others. Three rules make sure that
//! errors name only the ranks at fault:
//! - A rank sends in all steps of a round before it goes on. So if a connection has ended, and a
//!   ballot of a step has not come over it, the rank at its other end left before it had finished
//!   that round, and the round fails. A rank that dies without a goodbye is *absent* from the first
//!   such round on. The ranks that it should have sent to tell all others, because some of them may
//!   wait alone, and may not be connected to it.
//! - A rank that has waited for long *spreads* the ballots that it has: it sends all of them to the
//!   ranks to which it sends in the steps. These do the same, whatever they do now, and again when
//!   they learn of more. So soon all ranks know all who have entered the round, and a rank that has
//!   stopped after it entered keeps nothing from others.
//! - The ranks whose ballots are still missing at the deadline are those at fault. Shortly before,
//!   each rank connects to those, so that it notices which are stopped.
//!
//! A rank need not be connected to all others: see [`links`](super::links). A rank to which this
//! one has no connection counts as neither gone nor silent, until this one sends it something or
//! hears that it has ended.
//!
//! Rounds do not depend on each other. Ranks may skip the vote of a round, and enter it later while
//! they are in another one.

use std::mem;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::frame::{Kind, Notice};
use super::inbox::{InboxState, timeout_error};
use crate::backend::{Round, Tally, Vote};
use crate::error::CommError;

/// The time before the deadline at which a rank spreads the ballots that it has, or half of the
/// time that the operation may take if that is shorter.
const SPREADS_BEFORE_DEADLINE: Duration = Duration::from_secs(3);

/// The time after which a rank that has waited for long connects to those whose ballots are still
/// missing, or a sixth of the time that the operation may take if that is shorter. By then few are
/// missing, so few connections have to be made.
const SPREADING_TIME: Duration = Duration::from_secs(1);

/// The time that the ranks whose ballots are missing have, once this one connects to them, to show
/// that they run. Then a silent one is blamed.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(250);

/// The longest time between two checks of the other ranks.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The next thing that a rank has to do in a vote.
#[derive(Debug)]
pub(super) enum Next {
    /// Send ballots to a rank.
    Send {
        /// The rank.
        receiver: usize,
        /// The bodies of the frames.
        messages: Vec<Bytes>,
    },
    /// Wait for frames, but no longer than this.
    Wait(Instant),
    /// Nothing more: the vote is over.
    Done(Tally),
}

impl InboxState {
    /// Lets this rank enter a round, with its vote.
    pub(super) fn enter(&mut self, group: u64, round: u64, vote: &Vote<'_>, now: Instant) {
        let state = self.groups.entry(group).or_default();
        let poll = state.polls.entry(round).or_default();
        poll.enter(state.schedule, vote, now);
        self.has_news |= poll.spread.is_some();
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
        let poll = state.polls.entry(round.number).or_default();
        poll.settle(schedule);
        // Step 1: send on what others wait for, before anything else.
        if let Some((step, messages)) = poll.next_step(schedule) {
            return Ok(Next::Send {
                receiver: state.ranks[step.receiver],
                messages,
            });
        }
        // Step 2: end the round, if nothing is missing.
        if let Some(tally) = poll.tally(schedule) {
            state.finish(round.number);
            return Ok(Next::Done(tally));
        }
        // Do not judge the others before this process has read what they sent while it was stopped.
        if catches_up {
            return Ok(Next::Wait(now + CHECK_INTERVAL));
        }
        // Step 3: give up if a rank that has left will never send what is missing. It is a
        // neighbour, to which it would have told a failure before it left.
        let entered = poll.entered.unwrap_or(now);
        let senders = poll.awaited_senders(schedule);
        let mut needed: Vec<usize> = senders.map(|rank| state.ranks[rank]).collect();
        let missing = poll.missing(schedule);
        let missing: Vec<usize> = missing.map(|rank| state.ranks[rank]).collect();
        let absent = state.absent_from.iter();
        let absent = absent.filter(|&(_, first_round)| *first_round <= round.number);
        needed.extend(absent.map(|(rank, _)| rank));
        if let Some(failure) = self.departed_error(group, round, &needed) {
            return Err(failure);
        }
        // Step 4: spread the ballots, if that takes long. This rank does so at once if another one
        // is silent, because that one may have stopped.
        let spreads_at = self.spreads_at(entered, round);
        let misses_silent_rank = missing.iter().any(|&rank| self.peers[rank].is_silent(now));
        let state = self.groups.entry(group).or_default();
        let poll = state.polls.entry(round.number).or_default();
        if poll.spread.is_none() && now < spreads_at && !misses_silent_rank {
            return Ok(Next::Wait(spreads_at.min(now + CHECK_INTERVAL)));
        }
        poll.spread.get_or_insert_default();
        let connects_at = *poll
            .connects_at
            .get_or_insert(now + SPREADING_TIME.min(round.timeout / 6));
        if now >= connects_at && !mem::replace(&mut poll.has_connected, true) {
            let heartbeats = missing
                .iter()
                .map(|&rank| Notice::new(rank, Kind::Heartbeat, Bytes::new()));
            self.notices.extend(heartbeats);
        }
        self.has_news = true;
        // Step 5: give up at the deadline, or earlier if a rank is silent and the others could not
        // help.
        let is_over = now >= round.deadline;
        if (is_over || now >= connects_at + ANSWER_TIMEOUT)
            && let Some(failure) = self.unresponsive_rank_error(round, &missing, now)
        {
            return Err(failure);
        }
        if is_over
            && let Some(failure) = self
                .departed_error(group, round, &missing)
                .or_else(|| timeout_error(round, &missing, now))
        {
            return Err(failure);
        }
        let wake_times = [round.deadline, connects_at, connects_at + ANSWER_TIMEOUT];
        let next_times = wake_times.into_iter().filter(|&wake| wake > now);
        Ok(Next::Wait(
            next_times.fold(now + CHECK_INTERVAL, Instant::min),
        ))
    }

    /// Returns the time at which a rank that has entered a round at `entered` spreads the ballots
    /// that it has.
    fn spreads_at(&self, entered: Instant, round: &Round<'_>) -> Instant {
        let before_deadline = round
            .deadline
            .checked_sub(SPREADS_BEFORE_DEADLINE.min(round.timeout / 2))
            .unwrap_or(entered);
        let before_silence_ends = entered
            .checked_add(self.max_silence / 2)
            .unwrap_or(round.deadline);
        before_deadline.min(before_silence_ends)
    }

    /// Returns the first round, up to `last_round`, that another rank has entered, but this one has
    /// not.
    #[cfg(any(test, feature = "nccl"))]
    pub(super) fn awaited_round(&self, group: u64, last_round: u64) -> Option<u64> {
        let mut polls = self.groups.get(&group)?.polls.range(..=last_round);
        let awaited = polls.find(|(_, poll)| poll.awaits_this_rank());
        awaited.map(|(&round, _)| round)
    }

    /// Returns the frames to send that no operation of this rank waits for: news to forward,
    /// heartbeats, and ballots to spread.
    pub(super) fn notices(&mut self) -> Vec<Notice> {
        self.has_news = false;
        for (&group, state) in &mut self.groups {
            // Before the ranks of the group are known, nothing can be spread.
            for (&round, poll) in state.polls.iter_mut().filter(|_| !state.ranks.is_empty()) {
                for body in poll.ballots_to_spread(state.schedule) {
                    self.notices
                        .extend(state.schedule.steps().map(|step| Notice {
                            receiver: state.ranks[step.receiver],
                            kind: Kind::Ballot,
                            group,
                            round,
                            body: body.clone(),
                        }));
                }
            }
        }
        mem::take(&mut self.notices)
    }
}

#[cfg(test)]
mod tests;
