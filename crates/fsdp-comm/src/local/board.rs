//! The progress of all ranks of a group, and the error that ended the group, which all its ranks
//! can see.

use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use bytes::Bytes;

use super::turns::Turns;
use crate::backend::{Round, Tally, Vote};
use crate::ballot::Ballot;
use crate::error::CommError;
use crate::sync::{lock, ready_within_yields, wait_timeout};

/// The progress of all ranks of a group, shared by their threads.
#[derive(Debug)]
pub(super) struct Board {
    global_ranks: Vec<usize>,
    state: Mutex<BoardState>,
    /// The places at which ranks wait: for each rank one at which it waits for its readers, and
    /// behind them one at which all wait for the end of a vote. A rank is woken when it can go on,
    /// and not for each step of another one: with many ranks on few cores, waking them would take
    /// longer than their computation.
    places: Vec<Place>,
    turns: Option<Arc<dyn Turns>>,
}

/// A place at which ranks wait for a change.
#[derive(Debug, Default)]
struct Place {
    /// The number of changes so far. Read without the lock, so it may lag behind the state.
    changes: AtomicU64,
    changed: Condvar,
}

/// The part of a board that its lock protects.
#[derive(Debug)]
struct BoardState {
    ranks: Vec<RankProgress>,
    /// The ranks that have voted in a round in which others are yet to vote.
    voters: usize,
    /// The merged ballot of these ranks.
    ballot: Ballot,
    /// The outcome of the last round in which all ranks have voted. That of one round is enough,
    /// because a rank enters a round only after it has got the outcome of the one before.
    tally: Arc<Tally>,
    /// The error that has ended the group.
    failure: Option<CommError>,
}

/// The progress of one rank.
#[derive(Debug, Default)]
struct RankProgress {
    /// The number after that of the last round in which the rank has voted.
    voted: u64,
    /// The number after that of the last round in which it has finished reading from others.
    finished: u64,
    /// The number of ranks that have read its bytes in this round.
    readers_done: usize,
    /// The number of readers that the rank waits for; `None` while it waits for none.
    awaits: Option<usize>,
    /// Its attachment in a round that other ranks are yet to enter.
    attachment: Bytes,
    /// The reason why the rank takes no further part, if it has left.
    departure: Option<String>,
}

impl Board {
    /// Creates the board of a group that has not begun. Ranks that share one thread wait through
    /// `turns`.
    pub(super) fn new(global_ranks: Vec<usize>, turns: Option<Arc<dyn Turns>>) -> Self {
        let ranks = global_ranks
            .iter()
            .map(|_| RankProgress::default())
            .collect();
        let places = (0..=global_ranks.len()).map(|_| Place::default()).collect();
        Board {
            global_ranks,
            state: Mutex::new(BoardState {
                ranks,
                voters: 0,
                ballot: Ballot::blank(),
                tally: Arc::new(Tally {
                    ballot: Ballot::blank(),
                    attachments: Vec::new(),
                    sent_ballots: 0,
                }),
                failure: None,
            }),
            places,
            turns,
        }
    }

    fn lock(&self) -> MutexGuard<'_, BoardState> {
        lock(&self.state)
    }

    /// Returns the number of the place at which all ranks wait for the end of a vote.
    const fn vote_place(&self) -> usize {
        self.global_ranks.len()
    }

    /// Wakes the ranks that wait at these places.
    fn wake(&self, places: impl IntoIterator<Item = usize>) {
        // With turns, ranks do not wait at places, but ask again in their next turn.
        if let Some(turns) = &self.turns {
            turns.changed();
            return;
        }
        for place in places {
            let place = &self.places[place];
            place.changes.fetch_add(1, Ordering::Release);
            place.changed.notify_all();
        }
    }

    fn wake_all(&self) {
        self.wake(0..self.places.len());
    }

    /// Ends the group, unless something already has, and wakes all ranks.
    pub(super) fn fail(&self, error: CommError) {
        self.lock().failure.get_or_insert(error);
        self.wake_all();
    }

    /// Records that a rank takes no further part, and wakes all others. Does nothing for a rank
    /// that is not in this group.
    pub(super) fn leave(&self, global_rank: usize, reason: &str) {
        let mut ranks = self.global_ranks.iter();
        if let Some(rank) = ranks.position(|&rank| rank == global_rank) {
            self.lock().ranks[rank]
                .departure
                .get_or_insert_with(|| reason.to_owned());
            self.wake_all();
        }
    }

    /// Casts this rank's ballot, waits for all others, and returns the outcome. A group that has
    /// failed returns that failure at once.
    pub(super) fn vote(
        &self,
        round: &Round<'_>,
        rank: usize,
        vote: &Vote<'_>,
    ) -> Result<Arc<Tally>, CommError> {
        // Copy the attachment before taking the lock, for which all other ranks wait.
        let attachment = Bytes::copy_from_slice(vote.attachment);
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        state.ballot = match state.voters {
            0 => vote.ballot,
            _ => state.ballot.merge(vote.ballot),
        };
        state.voters += 1;
        let progress = &mut state.ranks[rank];
        progress.attachment = attachment;
        progress.voted = round.number + 1;
        progress.readers_done = 0;
        if state.voters == state.ranks.len() {
            // The last rank collects the attachments for all. If each rank copied them for itself,
            // these copies would take most of the time in a group of many ranks.
            let ranks = state.ranks.iter_mut();
            let tally = Arc::new(Tally {
                attachments: ranks.map(|rank| mem::take(&mut rank.attachment)).collect(),
                ballot: state.ballot,
                sent_ballots: usize::from(state.ranks.len() > 1),
            });
            state.tally = Arc::clone(&tally);
            state.voters = 0;
            // Give the lock back before waking the others, because they would only wait for the
            // lock.
            drop(state);
            self.wake([self.vote_place()]);
            return Ok(tally);
        }
        let complete = self.wait(state, round, self.vote_place(), |rank, _| {
            rank.voted > round.number
        })?;
        Ok(Arc::clone(&complete.tally))
    }

    /// Records that this rank has finished reading from the `owners`, and waits until all of
    /// `readers` have finished reading from it.
    pub(super) fn finish(
        &self,
        round: &Round<'_>,
        rank: usize,
        owners: &[usize],
        readers: &[usize],
    ) -> Result<(), CommError> {
        let mut state = self.lock();
        state.ranks[rank].finished = round.number + 1;
        // Step 1: count this reader at each rank whose bytes it has read. If it was the last reader
        // that such a rank waits for, wake that rank.
        let mut ready_owners = Vec::new();
        for &owner in owners {
            let owner_progress = &mut state.ranks[owner];
            owner_progress.readers_done += 1;
            if owner_progress.awaits == Some(owner_progress.readers_done) {
                ready_owners.push(owner);
            }
        }
        if !ready_owners.is_empty() {
            drop(state);
            self.wake(ready_owners);
            state = self.lock();
        }
        // Step 2: wait for the readers of this rank's own bytes.
        state.ranks[rank].awaits = Some(readers.len());
        let mut is_reader = vec![false; self.global_ranks.len()];
        readers.iter().for_each(|&reader| is_reader[reader] = true);
        let mut complete = self.wait(state, round, rank, |reader_progress, other_rank| {
            reader_progress.finished > round.number || !is_reader[other_rank]
        })?;
        complete.ranks[rank].awaits = None;
        Ok(())
    }

    /// Returns the error of a round in which `owner` took back its slice before it was read.
    /// Waits until the group has failed, that rank has left, or the deadline is over.
    pub(super) fn withdrawn_error(
        &self,
        round: &Round<'_>,
        own_rank: usize,
        owner: usize,
    ) -> CommError {
        self.wait(self.lock(), round, own_rank, |_, other_rank| {
            other_rank != owner
        })
        .map(drop)
        .expect_err("the wait for a rank that is never ready cannot succeed")
    }

    /// Waits at a place until all ranks are ready, and fails if one of them never will be.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, BoardState>,
        round: &Round<'_>,
        place: usize,
        is_ready: impl Fn(&RankProgress, usize) -> bool,
    ) -> Result<MutexGuard<'a, BoardState>, CommError> {
        let mut deadline = round.deadline;
        let mut has_yielded = false;
        loop {
            let missing: Vec<usize> = (0..state.ranks.len())
                .filter(|&rank| !is_ready(&state.ranks[rank], rank))
                .collect();
            if missing.is_empty() {
                return Ok(state);
            }
            let now = Instant::now();
            // The first rank to give up decides for all.
            if let Some(failure) = self.failure(&state, round, &missing, now >= deadline) {
                state.failure = Some(failure.clone());
                self.wake_all();
                return Err(failure);
            }
            if let Some(turns) = &self.turns {
                drop(state);
                if !turns.wait() {
                    deadline = now;
                }
                state = self.lock();
                continue;
            }
            let place = &self.places[place];
            if has_yielded {
                state = wait_timeout(&place.changed, state, deadline - now);
                continue;
            }
            let changes = place.changes.load(Ordering::Acquire);
            drop(state);
            let has_changed = || place.changes.load(Ordering::Acquire) != changes;
            has_yielded = !ready_within_yields(has_changed);
            state = self.lock();
        }
    }

    /// Returns the reason why a round that waits for the `missing` ranks cannot end: the error of
    /// the group comes first, then a missing rank that has left, then the deadline.
    fn failure(
        &self,
        state: &BoardState,
        round: &Round<'_>,
        missing: &[usize],
        is_late: bool,
    ) -> Option<CommError> {
        if state.failure.is_some() {
            return state.failure.clone();
        }
        for &rank in missing {
            if let Some(reason) = &state.ranks[rank].departure {
                return Some(round.rank_left_error(self.global_ranks[rank], reason.as_str()));
            }
        }
        let missing = missing.iter().map(|&rank| self.global_ranks[rank]);
        is_late.then(|| round.timeout_error(missing.collect()))
    }
}
