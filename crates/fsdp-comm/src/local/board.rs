//! Where the ranks of a group see how far the others are, and why the group failed.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::backend::Round;
use crate::error::CommError;

#[derive(Debug)]
pub(super) struct Board {
    global_ranks: Vec<usize>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    ranks: Vec<RankState>,
    failure: Option<CommError>,
}

#[derive(Debug, Default)]
struct RankState {
    /// Rounds that the rank has come to.
    arrived: u64,
    /// Rounds in which it has read all that it wanted.
    finished: u64,
    /// Its records of this round and the one before. A rank comes to a round only after all have come to the last one,
    /// and none of them still looks at the records of the one before that.
    records: [Option<Arc<[u8]>>; 2],
    left: Option<String>,
}

impl Board {
    pub(super) fn new(global_ranks: Vec<usize>) -> Self {
        let ranks = global_ranks.iter().map(|_| RankState::default()).collect();
        Board { global_ranks, state: Mutex::new(State { ranks, failure: None }), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the group, unless something already has.
    pub(super) fn fail(&self, error: CommError) {
        self.lock().failure.get_or_insert(error);
        self.changed.notify_all();
    }

    /// A rank (a global one, perhaps of another group) takes no further part.
    pub(super) fn leave(&self, global_rank: usize, reason: &str) {
        if let Some(rank) = self.global_ranks.iter().position(|&rank| rank == global_rank) {
            self.lock().ranks[rank].left.get_or_insert_with(|| reason.to_owned());
            self.changed.notify_all();
        }
    }

    /// Shows this rank's record and waits for all others'.
    pub(super) fn exchange(&self, round: &Round<'_>, rank: usize, record: &[u8]) -> Result<Vec<Arc<[u8]>>, CommError> {
        let parity = (round.number % 2) as usize;
        let record = Arc::from(record);
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        state.ranks[rank].records[parity] = Some(record);
        state.ranks[rank].arrived = round.number + 1;
        if state.ranks.iter().all(|rank| rank.arrived > round.number) {
            self.changed.notify_all();
        }
        let state = self.wait(state, round, |rank, _| rank.arrived > round.number)?;
        Ok(state.ranks.iter().filter_map(|rank| rank.records[parity].clone()).collect())
    }

    /// Says that this rank has read all that it wanted, and waits until these ranks have, too.
    pub(super) fn finish(&self, round: &Round<'_>, rank: usize, readers: &[usize]) -> Result<(), CommError> {
        let mut state = self.lock();
        state.ranks[rank].finished = round.number + 1;
        self.changed.notify_all();
        self.wait(state, round, |rank, number| rank.finished > round.number || !readers.contains(&number)).map(drop)
    }

    /// Why the round failed, given that this rank took back its slice before it was read.
    pub(super) fn failure_of(&self, round: &Round<'_>, rank: usize) -> CommError {
        match self.wait(self.lock(), round, |_, number| number != rank) {
            Err(error) => error,
            // Not reached: the one rank is waited for without end.
            Ok(_) => self.timeout(round, vec![self.global_ranks[rank]]),
        }
    }

    /// Waits until `is_ready` of all ranks, and fails if that cannot come to be.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        round: &Round<'_>,
        is_ready: impl Fn(&RankState, usize) -> bool,
    ) -> Result<MutexGuard<'a, State>, CommError> {
        loop {
            let missing = || state.ranks.iter().enumerate().filter(|&(number, rank)| !is_ready(rank, number));
            if missing().next().is_none() {
                return Ok(state);
            }
            let left = missing().find_map(|(number, rank)| Some((number, rank.left.clone()?)));
            let failure = match (&state.failure, left) {
                (Some(failure), _) => Some(failure.clone()),
                (None, Some((number, reason))) => Some(CommError::RankLeft {
                    rank: self.global_ranks[number],
                    operation: round.operation.to_owned(),
                    sequence: round.sequence,
                    reason,
                }),
                (None, None) => None,
            };
            let now = Instant::now();
            let failure = failure.or_else(|| {
                let missing = missing().map(|(number, _)| self.global_ranks[number]);
                (now >= round.until).then(|| self.timeout(round, missing.collect()))
            });
            if let Some(failure) = failure {
                state.failure = Some(failure.clone());
                self.changed.notify_all();
                return Err(failure);
            }
            let waited = self.changed.wait_timeout(state, round.until - now);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn timeout(&self, round: &Round<'_>, missing: Vec<usize>) -> CommError {
        CommError::Timeout {
            operation: round.operation.to_owned(),
            sequence: round.sequence,
            missing,
            deadline: round.deadline,
        }
    }
}
