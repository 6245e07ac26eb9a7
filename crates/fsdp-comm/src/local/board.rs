//! The progress of all ranks of a group, and the error that ended the group, which all its ranks
//! can see.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use super::turns::Turns;
use crate::backend::Round;
use crate::error::CommError;
use crate::sync::{lock, wait_timeout};

/// The progress of all ranks of a group, shared by their threads.
#[derive(Debug)]
pub(super) struct Board {
    global_ranks: Vec<usize>,
    state: Mutex<BoardState>,
    /// For each rank, the condition variable that it waits on. A rank is woken when it can go on,
    /// and not for each step of another one: with many ranks on few cores, waking them would take
    /// longer than their computation.
    changed: Vec<Condvar>,
    turns: Option<Arc<dyn Turns>>,
}

/// The part of a board that its lock protects.
#[derive(Debug)]
struct BoardState {
    ranks: Vec<RankProgress>,
    /// The records of all ranks in the last round that all of them have entered. Those of one round
    /// are enough, because a rank enters a round only after it has got the records of the one
    /// before.
    records: Arc<Vec<Vec<u8>>>,
    /// The error that has ended the group.
    failure: Option<CommError>,
}

/// The progress of one rank.
#[derive(Debug, Default)]
struct RankProgress {
    /// The number of rounds that the rank has entered.
    arrived: u64,
    /// The number of rounds in which it has finished reading from others.
    finished: u64,
    /// The number of ranks that have read its bytes in this round.
    readers_done: usize,
    /// The number of readers that the rank waits for; `None` while it waits for none.
    awaits: Option<usize>,
    /// Its record of a round that other ranks are yet to enter.
    record: Vec<u8>,
    /// The reason why the rank takes no further part, if it has left.
    left: Option<String>,
}

impl Board {
    pub(super) fn new(global_ranks: Vec<usize>, turns: Option<Arc<dyn Turns>>) -> Self {
        let ranks = global_ranks
            .iter()
            .map(|_| RankProgress::default())
            .collect();
        let changed = global_ranks.iter().map(|_| Condvar::new()).collect();
        Board {
            global_ranks,
            state: Mutex::new(BoardState {
                ranks,
                records: Arc::default(),
                failure: None,
            }),
            changed,
            turns,
        }
    }

    fn lock(&self) -> MutexGuard<'_, BoardState> {
        lock(&self.state)
    }

    /// Wakes `ranks`, if they wait.
    fn wake(&self, ranks: impl IntoIterator<Item = usize>) {
        // With turns, ranks do not wait on condition variables, but ask again in their next turn.
        match &self.turns {
            Some(turns) => turns.changed(),
            None => ranks
                .into_iter()
                .for_each(|rank| self.changed[rank].notify_all()),
        }
    }

    fn wake_all(&self) {
        self.wake(0..self.changed.len());
    }

    /// Ends the group, unless something already has.
    pub(super) fn fail(&self, error: CommError) {
        self.lock().failure.get_or_insert(error);
        self.wake_all();
    }

    /// Records that a rank, which may be of another group, takes no further part.
    pub(super) fn leave(&self, global_rank: usize, reason: &str) {
        let mut ranks = self.global_ranks.iter();
        if let Some(rank) = ranks.position(|&rank| rank == global_rank) {
            self.lock().ranks[rank]
                .left
                .get_or_insert_with(|| reason.to_owned());
            self.wake_all();
        }
    }

    /// Shows this rank's record, and waits for the records of all others.
    pub(super) fn exchange(
        &self,
        round: &Round<'_>,
        rank: usize,
        record: &[u8],
    ) -> Result<Arc<Vec<Vec<u8>>>, CommError> {
        // Copy the record before taking the lock, for which all other ranks wait.
        let record = record.to_vec();
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        state.ranks[rank].record = record;
        state.ranks[rank].arrived = round.number + 1;
        state.ranks[rank].readers_done = 0;
        if state.ranks.iter().all(|rank| rank.arrived > round.number) {
            // The last rank collects the records for all. If each rank copied them for itself,
            // these copies would take most of the time in a group of many ranks.
            state.records = Arc::new(
                state
                    .ranks
                    .iter_mut()
                    .map(|rank| std::mem::take(&mut rank.record))
                    .collect(),
            );
            // Give the lock back before waking the others, because they would only wait for the
            // lock.
            drop(state);
            self.wake_all();
            state = self.lock();
        }
        let complete = self.wait(state, round, rank, |rank, _| rank.arrived > round.number)?;
        Ok(Arc::clone(&complete.records))
    }

    /// Records that this rank has finished reading from the ranks in `read`, and waits until all of
    /// `readers` have finished reading from it.
    pub(super) fn finish(
        &self,
        round: &Round<'_>,
        rank: usize,
        read: &[usize],
        readers: &[usize],
    ) -> Result<(), CommError> {
        let mut state = self.lock();
        state.ranks[rank].finished = round.number + 1;
        // Step 1: count this reader at each rank whose bytes it has read. If it was the last reader
        // that such a rank waits for, wake that rank.
        let mut ready = Vec::new();
        for &owner in read {
            let of_owner = &mut state.ranks[owner];
            of_owner.readers_done += 1;
            if of_owner.awaits == Some(of_owner.readers_done) {
                ready.push(owner);
            }
        }
        if !ready.is_empty() {
            drop(state);
            self.wake(ready);
            state = self.lock();
        }
        // Step 2: wait for the readers of this rank's own bytes.
        state.ranks[rank].awaits = Some(readers.len());
        let mut reads = vec![false; self.changed.len()];
        readers.iter().for_each(|&reader| reads[reader] = true);
        let mut complete = self.wait(state, round, rank, |other, number| {
            other.finished > round.number || !reads[number]
        })?;
        complete.ranks[rank].awaits = None;
        Ok(())
    }

    /// Returns the error of a round in which `rank` took back its slice before it was read.
    pub(super) fn failure_of(&self, round: &Round<'_>, own: usize, rank: usize) -> CommError {
        self.wait(self.lock(), round, own, |_, number| number != rank)
            .map(drop)
            .expect_err("the wait for a rank that is never ready cannot succeed")
    }

    /// Waits on rank `own` until all ranks are ready, and fails if one of them never will be.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, BoardState>,
        round: &Round<'_>,
        own: usize,
        is_ready: impl Fn(&RankProgress, usize) -> bool,
    ) -> Result<MutexGuard<'a, BoardState>, CommError> {
        let mut deadline = round.deadline;
        loop {
            let missing: Vec<usize> = (0..state.ranks.len())
                .filter(|&number| !is_ready(&state.ranks[number], number))
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
            state = wait_timeout(&self.changed[own], state, deadline - now);
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
        for &number in missing {
            if let Some(reason) = &state.ranks[number].left {
                return Some(round.rank_left_error(self.global_ranks[number], reason.as_str()));
            }
        }
        let missing = missing.iter().map(|&number| self.global_ranks[number]);
        is_late.then(|| round.timeout_error(missing.collect()))
    }
}
